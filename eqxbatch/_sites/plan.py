"""The plan of a program: which equations have sites, and how to run them."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._base.jaxprs import evaluate_with, run_equation, scan_sizes
from .._base.mesh import full_varying_as, zeros_like
from .._base.primitives import as_remat, is_remat, SUMS
from .._base.trees import safe_zip
from .rules import Axes, Rule
from .shared import kept_axes, MOVES, Node, View
from .site import Site


_Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value that is the same for all examples, and its derivative as views.

    - `curved`: the leaves in which it is nonlinear. For those also in `coupled`, some
        entry has a mixed second derivative with another entry of this or another leaf.
    """

    node: Node
    views: tuple[View, ...] = ()
    curved: frozenset[int] = frozenset()
    coupled: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class SharedPerturbation:
    """A perturbed value, after steps that only move its axes.

    - `perturbation`, `shape`: the index and shape of the perturbation.
    - `axes`: for each current axis, the axis that it was; None for an inserted axis of
        size 1. Axes of size 1 may have been removed.
    """

    perturbation: int
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]

    @property
    def is_whole(self) -> bool:
        """Whether no axis has moved."""
        return self.axes == tuple(range(len(self.shape)))

    @property
    def _new(self) -> tuple[int, ...]:
        return tuple(i for i, axis in enumerate(self.axes) if axis is None)

    def after(self, eqn: Any) -> "SharedPerturbation | None":
        """The value after an equation; None if that does more than move axes."""
        name = eqn.primitive.name
        # A dynamic shape may be an input.
        if len(eqn.invars) != 1 or name not in MOVES:
            return None
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        moved = kept_axes(name, before, after, eqn.params)
        sizes = lambda shape: sorted(size for size in shape if size != 1)
        if moved is None or sizes(before) != sizes(after):
            return None
        axes = tuple(None if axis is None else self.axes[axis] for axis in moved)
        return dataclasses.replace(self, axes=axes)

    def apply(self, x: Array) -> Array:
        """Moves the axes of an array with the shape of the perturbation."""
        kept = [axis for axis in self.axes if axis is not None]
        gone = [axis for axis in range(x.ndim) if axis not in kept]
        x = jnp.squeeze(jnp.transpose(x, [*gone, *kept]), tuple(range(len(gone))))
        return jnp.expand_dims(x, self._new)

    def undo(self, x: Array) -> Array:
        """Moves the axes back."""
        kept = [axis for axis in self.axes if axis is not None]
        x = jnp.squeeze(x, self._new)
        x = jnp.transpose(x, sorted(range(len(kept)), key=lambda i: kept[i]))
        gone = [axis for axis, _ in enumerate(self.shape) if axis not in kept]
        return jnp.expand_dims(x, gone)

    def rule(self, rule: Rule) -> Rule:
        """Converts a rule for the current value to one for the perturbed value."""
        if self.is_whole:
            return rule
        named: list[Axes] = [() for _ in self.shape]
        for axis, names in safe_zip(self.axes, rule.y_axes):
            if axis is not None:
                named[axis] = names
        return dataclasses.replace(
            rule,
            op=lambda a, w: self.undo(rule.op(a, w)),
            arrange=lambda d: rule.arrange(self.apply(d)),
            outputs=tuple(named),
            key=f"{rule.key} moved by {self.axes} of {self.shape}",
        )


# Outputs, operands and, without perturbations, the values to perturb.
Run = tuple[list, list, list]


@dataclasses.dataclass(frozen=True)
class Perturbed:
    """An equation with sites: the functions from its inputs to the operands."""

    operands: list[Callable[[list], Array]]

    def run(self, jaxpr: Any, eqn: Any, ins: list, perturbations: list | None) -> Run:
        # A constant may be a NumPy array.
        operands = [jnp.asarray(operand(ins)) for operand in self.operands]
        out = eqn.primitive.bind(*ins, **eqn.params)
        if perturbations is None:
            return [out], operands, [out]
        return [out + perturbations[0]], operands, []


@dataclasses.dataclass(frozen=True)
class Called:
    """An equation that calls a jaxpr with sites in it."""

    plan: "Plan"

    def run(self, jaxpr: Any, eqn: Any, ins: list, perturbations: list | None) -> Run:
        run = lambda *args: self.plan.run([*args[:-1]], args[-1])
        run = as_remat(eqn, run, 1) if is_remat(eqn) else run
        return run(*ins, perturbations)


@dataclasses.dataclass(frozen=True)
class Scanned:
    """A `scan` with sites in its body."""

    plan: "Plan"

    def run(self, jaxpr: Any, eqn: Any, ins: list, perturbations: list | None) -> Run:
        params = eqn.params
        num_consts, num_carry = scan_sizes(eqn)
        consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]

        def body(carry: list, slices: tuple[list, list | None]) -> tuple[list, tuple]:
            xs, perturbations = slices
            outs, *rest = self.plan.run([*consts, *carry, *xs], perturbations)
            return outs[:num_carry], (outs[num_carry:], *rest)

        carry, (ys, operands, perturbed) = lax.scan(
            body,
            carry,
            (ins[num_consts + num_carry :], perturbations),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys], operands, perturbed


@dataclasses.dataclass(frozen=True)
class Switched:
    """A `cond` with sites in its branches; each branch has its own perturbations."""

    branches: list["Plan"]

    def run(self, jaxpr: Any, eqn: Any, ins: list, perturbations: list | None) -> Run:
        index, *args = ins
        nums = [len(plan.perturbations) for plan in self.branches]
        starts = [0, *itertools.accumulate(nums)]

        def branch(number: int) -> Callable[[list, list | None], Run]:
            plan, start = self.branches[number], starts[number]
            part = slice(start, start + nums[number])
            return lambda args, perturbations: plan.run(
                args, None if perturbations is None else perturbations[part]
            )

        runs = [branch(number) for number, _ in enumerate(nums)]
        structs = [jax.eval_shape(run, args, perturbations)[1:] for run in runs]

        def with_zeros(number: int) -> Callable[[list, list | None], Run]:
            """A branch that returns zeros for the operands of the others."""

            def run(args: list, perturbations: list | None) -> Run:
                outs, *rest = runs[number](args, perturbations)
                every = [
                    rest if i == number else jax.tree.map(zeros_like, [*skipped])
                    for i, skipped in enumerate(structs)
                ]
                operands, perturbed = safe_zip(*every)
                chain = itertools.chain.from_iterable
                return outs, [*chain(operands)], [*chain(perturbed)]

            return run

        branches = [with_zeros(number) for number, _ in enumerate(runs)]
        return lax.switch(index, branches, args, perturbations)


@dataclasses.dataclass(frozen=True)
class Linearized:
    """An equation with a custom derivative that contains sites.

    - `plan`: that of the derivative, which is linear in tangents.
    - `given`: the inputs of the equation that the derivative takes first.
    - `tangents`: the types of the tangents, which it takes next.
    - `outs`: the outputs of the equation that are used.
    - `live`: the outputs whose tangents it returns.
    """

    plan: "Plan"
    numbers: list[int]
    tangents: list[Any]
    outs: list[int]
    live: list[int]

    def run(self, jaxpr: Any, eqn: Any, ins: list, perturbations: list | None) -> Run:
        """Runs the equation unchanged; perturbations only enter its derivative.

        They only matter for derivatives with respect to them: they are zero, and so is
        their contribution, even if a derivative is infinite.
        """
        known = [self.plan.consts, [ins[i] for i in self.numbers]]

        def run(known: list, perturbations: list | None) -> Run:
            consts, args = known
            zeros = [full_varying_as(aval, 0) for aval in self.tangents]
            return self.plan.run([*args, *zeros], perturbations, consts)

        @jax.custom_jvp
        def perturbed_by(outs: list, known: list, perturbations: list) -> list:
            return outs

        @perturbed_by.defjvp
        def _jvp(primals: tuple, tangents: tuple) -> tuple[list, list]:
            outs, known, _ = primals
            moved, _, perturbations = tangents
            added = run(known, perturbations)[0]
            return outs, [x + y for x, y in safe_zip(moved, added)]

        every: list = [None for _ in eqn.outvars]
        used = run_equation(jaxpr, eqn, [eqn.outvars[i] for i in self.outs])(*ins)
        for i, out in safe_zip(self.outs, used):
            every[i] = out
        _, operands, perturbed = run(known, None)
        if perturbations is not None:
            live = perturbed_by([every[i] for i in self.live], known, perturbations)
            for i, out in safe_zip(self.live, live):
                every[i] = out
        return every, operands, perturbed


Step = Perturbed | Called | Scanned | Switched | Linearized


class Plan:
    """The plan of a jaxpr, built by going through its equations.

    - `steps`: how to run the equations with sites, and their numbers of perturbations.
    - `outs`: the outputs that are the same for all examples.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any]) -> None:
        self.jaxpr, self.consts = jaxpr, list(consts)
        self.steps: dict[int, tuple[Step, int]] = {}
        self.sites: list[Site] = []
        self.perturbations: list[_Struct] = []
        self.operands: list[_Struct] = []
        self.outs: list[Shared | None] = []
        # Values that have a perturbation and are used only once.
        self.perturbed_by: dict[Any, SharedPerturbation] = {}

    def run(
        self, args: list, perturbations: list | None, consts: list | None = None
    ) -> Run:
        """Evaluates the jaxpr with perturbations added to the outputs of its sites."""
        operands: list = []
        perturbed: list = []
        remaining = iter(perturbations or ())

        def replace(index: int, eqn: Any) -> Callable[[list], list] | None:
            if index not in self.steps:
                return None
            step, num = self.steps[index]

            def run(ins: list) -> list:
                part = None
                if perturbations is not None:
                    part = [*itertools.islice(remaining, num)]
                outs, *rest = step.run(self.jaxpr, eqn, ins, part)
                operands.extend(rest[0])
                perturbed.extend(rest[1])
                return outs

            return run

        consts = self.consts if consts is None else consts
        outs = evaluate_with(self.jaxpr, consts, args, replace)
        return outs, operands, perturbed

    def follow(self, eqn: Any, uses: collections.Counter) -> None:
        """Follows a perturbed value through an equation that moves its axes.

        A value that is used more than once has more than one cotangent.
        """
        for atom in eqn.invars:
            before = self._perturbed(atom)
            moved = None if before is None else before.after(eqn)
            if moved is not None:
                self.perturbed_by[eqn.outvars[0]] = moved
        self.perturbed_by = {v: x for v, x in self.perturbed_by.items() if uses[v] == 1}

    def follow_out(self, inner: "Plan", outs: list) -> None:
        """Follows a perturbed value out of a call that is about to be included."""
        for var, out in safe_zip(inner.jaxpr.outvars, outs):
            before = inner._perturbed(var)
            if before is not None:
                number = before.perturbation + len(self.perturbations)
                self.perturbed_by[out] = dataclasses.replace(
                    before, perturbation=number
                )

    def perturbed_before(
        self, eqn: Any, rules: dict[int, Rule]
    ) -> SharedPerturbation | None:
        """The summand of a parameter, if it is perturbed and as large as the sum."""
        name = eqn.primitive.name
        if name not in SUMS or len(rules) != 1 or (name == "sub" and 0 in rules):
            return None
        (position,) = rules
        other, out = eqn.invars[1 - position], eqn.outvars[0]
        return self._perturbed(other) if other.aval.shape == out.aval.shape else None

    def _perturbed(self, atom: Any) -> SharedPerturbation | None:
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
        self.steps[index] = step, sum(len(plan.perturbations) for plan in plans)
        stacked = lambda s: _Struct((*steps, *s.shape), s.dtype)
        for plan in plans:
            for site in plan.sites:
                operand = site.operand
                operand = None if operand is None else operand + len(self.operands)
                number = site.perturbation + len(self.perturbations)
                self.sites.append(
                    dataclasses.replace(site, perturbation=number, operand=operand)
                )
            self.perturbations += map(stacked, plan.perturbations)
            self.operands += map(stacked, plan.operands)
