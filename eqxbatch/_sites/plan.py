"""The `Plan` of a program says which equations have sites, and runs them."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._base.jaxpr_types import Atom, Eqn, Jaxpr
from .._base.jaxprs import (
    as_called,
    as_remat,
    evaluate_with,
    run_equation,
)
from .._base.mesh import zeros_like
from .._base.primitives import (
    is_remat,
    SUMS,
)
from .._base.structs import full_varying_as
from .._base.trees import safe_zip
from .._base.versions import scan_sizes
from .site import Rule, Site
from .values import Node
from .view_rules import extend_view, MOVES
from .views import Values, View


_Struct = jax.ShapeDtypeStruct


class Run(NamedTuple):
    """What an equation or a program with sites returns.

    - `perturbed`: the values to perturb, if there are no perturbations.
    """

    outs: Values
    operands: Values
    perturbed: Values


# Runs an equation with sites for some inputs, and with perturbations if there are any.
Step = Callable[[list, list | None], Run]


def perturbed(
    eqn: Eqn,
    operands: list[Callable[[list], Array]],
    ins: Values,
    perturbations: Values | None,
) -> Run:
    """Runs an equation with sites, whose `operands` are functions of its inputs."""
    # A constant may be a NumPy array.
    values = [jnp.asarray(operand(ins)) for operand in operands]
    out = eqn.primitive.bind(*ins, **eqn.params)
    if perturbations is None:
        return Run([out], values, [out])
    return Run([out + perturbations[0]], values, [])


def run_call(eqn: Eqn, plan: "Plan", ins: Values, perturbations: Values | None) -> Run:
    """Runs an equation that calls a jaxpr with sites in it."""
    run = lambda *args: plan.run([*args[:-1]], args[-1])
    # Perturbations are one argument more than the equation has.
    run = as_remat(eqn, run, 1) if is_remat(eqn) else as_called(eqn, run)
    return run(*ins, perturbations)


def run_scan(eqn: Eqn, plan: "Plan", ins: Values, perturbations: Values | None) -> Run:
    """Runs a `scan` with sites in its body."""
    params = eqn.params
    num_consts, num_carry = scan_sizes(eqn)
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]

    # Perturbations enter and operands leave as slices: one for each step.
    def body(carry: Values, slices: tuple[list, list | None]) -> tuple[list, Run]:
        xs, perturbations = slices
        ran = plan.run([*consts, *carry, *xs], perturbations)
        return ran.outs[:num_carry], ran._replace(outs=ran.outs[num_carry:])

    carry, ran = lax.scan(
        body,
        carry,
        (ins[num_consts + num_carry :], perturbations),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return ran._replace(outs=[*carry, *ran.outs])


def run_cond(plans: list["Plan"], ins: Values, perturbations: Values | None) -> Run:
    """Runs a `cond` with sites in its branches, which have separate perturbations."""
    index, *args = ins
    # The perturbations of all branches are in one list, one branch after the other.
    nums = [len(plan.perturbations) for plan in plans]
    starts = [0, *itertools.accumulate(nums)]

    def branch(number: int) -> Callable[[list, list | None], Run]:
        its = slice(starts[number], starts[number + 1])
        return lambda args, perturbations: plans[number].run(
            args, None if perturbations is None else perturbations[its]
        )

    # Branches must return equal types, but each has operands of its own: what they are
    # is asked first, and then each returns those of all.
    runs = [branch(number) for number, _ in enumerate(nums)]
    structs = [jax.eval_shape(run, args, perturbations)[1:] for run in runs]

    def with_zeros(number: int) -> Callable[[list, list | None], Run]:
        """A branch that returns zeros for the operands of the others."""

        def run(args: Values, perturbations: Values | None) -> Run:
            ran = runs[number](args, perturbations)
            every = [
                ran[1:] if i == number else jax.tree.map(zeros_like, skipped)
                for i, skipped in enumerate(structs)
            ]
            operands, values = safe_zip(*every)
            # Joined in the order of `include`: branch by branch.
            chain = itertools.chain.from_iterable
            return Run(ran.outs, [*chain(operands)], [*chain(values)])

        return run

    branches = [with_zeros(number) for number, _ in enumerate(runs)]
    return lax.switch(index, branches, args, perturbations)


class PlannedStep(NamedTuple):
    """How an equation with sites runs, and how many perturbations it takes."""

    run: Step
    num: int


@dataclasses.dataclass(frozen=True)
class CustomDerivative:
    """An equation with a custom derivative that contains sites.

    - `plan`: that of the derivative, which is linear in tangents.
    - `numbers`: the inputs of the equation that the derivative takes first.
    - `tangents`: the types of the tangents, which it takes next.
    - `outs`: the outputs of the equation that are used.
    - `live`: the outputs whose tangents it returns.
    """

    jaxpr: Jaxpr
    eqn: Eqn
    plan: "Plan"
    numbers: list[int]
    tangents: list[Any]
    outs: list[int]
    live: list[int]

    def __call__(self, ins: Values, perturbations: Values | None) -> Run:
        """Runs the equation unchanged; perturbations only enter its derivative.

        They only matter for derivatives with respect to them: they are zero, and so is
        their contribution, even if a derivative is infinite.
        """
        values = [self.plan.consts, [ins[i] for i in self.numbers]]

        def run(values: Values, perturbations: Values | None) -> Run:
            consts, args = values
            zeros = [full_varying_as(aval, 0) for aval in self.tangents]
            return self.plan.run([*args, *zeros], perturbations, consts)

        # The identity in the outputs. Its derivative with respect to perturbations is
        # what the plan adds for them.
        @jax.custom_jvp
        def perturbed_by(outs: Values, values: Values, perturbations: Values) -> Values:
            return outs

        @perturbed_by.defjvp
        def _jvp(primals: tuple, tangents: tuple) -> tuple[list, list]:
            outs, values, _ = primals
            moved, _, perturbations = tangents
            added = run(values, perturbations).outs
            return outs, [x + y for x, y in safe_zip(moved, added)]

        # Outputs that nothing uses are not asked for, and stay None.
        every: list = [None for _ in self.eqn.outvars]
        outs = [self.eqn.outvars[i] for i in self.outs]
        used = run_equation(self.jaxpr, self.eqn, outs)(*ins)
        for i, out in safe_zip(self.outs, used):
            every[i] = out
        # The sites are in the derivative, so it runs for their operands. Its tangents
        # are zeros, on which no operand depends.
        _, operands, moved = run(values, None)
        if perturbations is not None:
            live = perturbed_by([every[i] for i in self.live], values, perturbations)
            for i, out in safe_zip(self.live, live):
                every[i] = out
        return Run(every, operands, moved)


class Plan:
    """The plan of a jaxpr, built by going through its equations.

    - `steps`: how to run the equations with sites, by index.
    - `outs`: the outputs that are the same for all examples.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        self.jaxpr, self.consts = jaxpr, list(consts)
        self.steps: dict[int, PlannedStep] = {}
        self.sites: list[Site] = []
        self.perturbations: list[_Struct] = []
        self.operands: list[_Struct] = []
        self.outs: list[Node | None] = []
        # Values that have a perturbation and are used only once, as views of it.
        self.perturbed_by: dict[Any, View] = {}

    def __repr__(self) -> str:
        nums = len(self.jaxpr.eqns), len(self.steps), len(self.sites)
        return "<plan of {} equations, of which {} have {} sites>".format(*nums)

    def run(
        self, args: Values, perturbations: Values | None, consts: Values | None = None
    ) -> Run:
        """Evaluates the jaxpr with perturbations added to the outputs of its sites."""
        operands: list = []
        perturbed: list = []
        # Equations run in the order in which their perturbations were numbered.
        remaining = iter(perturbations or ())

        def replace(index: int, eqn: Eqn) -> Callable[[list], list] | None:
            if index not in self.steps:
                return None
            step, num = self.steps[index]

            def run(ins: Values) -> Values:
                added = None
                if perturbations is not None:
                    added = [*itertools.islice(remaining, num)]
                ran = step(ins, added)
                operands.extend(ran.operands)
                perturbed.extend(ran.perturbed)
                return ran.outs

            return run

        consts = self.consts if consts is None else consts
        outs = evaluate_with(self.jaxpr, consts, args, replace)
        return Run(outs, operands, perturbed)

    def follow(self, eqn: Eqn, uses: collections.Counter) -> None:
        """Follows a perturbed value where its axes are moved or a number is added.

        A value that is used more than once has more than one cotangent.
        """
        name = eqn.primitive.name
        for index, atom in enumerate(eqn.invars):
            before = self._perturbed(atom)
            # Taylor mode adds up derivatives from 0 on.
            is_plus = name == "add" and isinstance(eqn.invars[1 - index], jex.Literal)
            if before is None or not (name in MOVES or is_plus):
                continue
            for moved in extend_view(before, eqn, index) or ():
                # Not through a broadcast: the cotangent before it is a sum of those
                # behind.
                if moved and moved.axes is not None and moved.is_isometry:
                    self.perturbed_by[eqn.outvars[0]] = moved
        for var in eqn.outvars:
            if uses[var] != 1:
                self.perturbed_by.pop(var, None)

    def follow_out(self, inner: "Plan", outs: Values) -> None:
        """Follows a perturbed value out of a call that is about to be included."""
        for var, out in safe_zip(inner.jaxpr.outvars, outs):
            before = inner._perturbed(var)
            if before is not None:
                number = before.leaf + len(self.perturbations)
                self.perturbed_by[out] = dataclasses.replace(before, leaf=number)

    def perturbed_before(self, eqn: Eqn, rules: dict[int, Rule]) -> View | None:
        """The summand of a parameter, if it is perturbed and as large as the sum."""
        name = eqn.primitive.name
        # In `w - y`, the cotangents of the difference and of `y` have opposite signs.
        if name not in SUMS or len(rules) != 1 or (name == "sub" and 0 in rules):
            return None
        (position,) = rules
        other, out = eqn.invars[1 - position], eqn.outvars[0]
        return self._perturbed(other) if other.aval.shape == out.aval.shape else None

    def _perturbed(self, atom: Atom) -> View | None:
        return None if isinstance(atom, jex.Literal) else self.perturbed_by.get(atom)

    def include(
        self,
        index: int,
        step: Step,
        plans: Sequence["Plan"],
        steps: tuple[int, ...] = (),
    ) -> None:
        """Includes the plans of a call, or of `steps` of a loop, if it has sites."""
        if not any(plan.steps for plan in plans):
            return
        num = sum(len(plan.perturbations) for plan in plans)
        self.steps[index] = PlannedStep(step, num)
        # Every step of a loop has a perturbation and an operand of its own.
        stacked = lambda s: _Struct((*steps, *s.shape), s.dtype)
        for plan in plans:
            for site in plan.sites:
                # An inner plan numbers from 0; here, its numbers follow those before.
                of_site = site.operand, site.which
                operand, which = (
                    None if x is None else x + len(self.operands) for x in of_site
                )
                number = site.perturbation + len(self.perturbations)
                self.sites.append(
                    dataclasses.replace(
                        site, perturbation=number, operand=operand, which=which
                    )
                )
            self.perturbations += map(stacked, plan.perturbations)
            self.operands += map(stacked, plan.operands)
