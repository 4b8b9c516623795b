"""A function with its sites: where its parameters enter the computation.

A zero perturbation is added to the output of each site. The derivative with respect to
it is the cotangent `d` in the gradient of the parameter. `jax.vjp` computes it, so no
derivative rules of our own are needed.
"""

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._base.jaxprs import evaluate_jaxpr, evaluate_with, run_equation, scan_sizes
from .._base.mesh import full_varying_as, is_on_mesh, zeros_like
from .._base.primitives import as_remat, is_remat
from .finder import Finder
from .plan import Called, Linearized, Perturbed, Plan, Switched
from .shared import evaluate, Value
from .site import leaf_site, Site


_Struct = jax.ShapeDtypeStruct


class Program:
    """A function of some leaves and one example, with its sites.

    `closed` is its jaxpr, whose first `num_leaves` inputs are the leaves. All other
    inputs belong to the example; constants are shared by all examples. With
    `use_rules=False`, all leaves are treated as if no rule covered them. Leaves in
    `constant` are not differentiated. For leaves in `formed`, the gradient itself is
    requested, as if no rule covered them. The first `num_outputs` outputs are
    differentiated; None for all of them. `order` is 2 if second derivatives are needed.

    - `leaves`: shapes and dtypes of the leaves.
    - `sites`: all sites; every leaf that the function uses has at least one.
    - `perturbations`, `operands`: shapes and dtypes of the cotangents and operands.
    - `fallbacks`: the leaves that no rule covers, by index, with reasons. Their only
        site is the leaf itself.
    """

    def __init__(
        self,
        closed: Any,
        num_leaves: int,
        *,
        use_rules: bool = True,
        constant: Collection[int] = (),
        formed: Collection[int] = (),
        num_outputs: int | None = None,
        order: int = 1,
    ):
        self.jaxpr, self.consts = closed.jaxpr, list(closed.consts)
        avals = [var.aval for var in self.jaxpr.invars]
        self.leaves = [_Struct(a.shape, a.dtype) for a in avals[:num_leaves]]
        self.fallbacks = dict.fromkeys(formed, "its gradient is formed")
        reason = None if use_rules else "no rules are used"
        if self.jaxpr.effects:
            reason = "the function has side effects, so it is run as it is"
        if reason is not None:
            leaves = (leaf for leaf in range(num_leaves) if leaf not in constant)
            self.fallbacks = dict.fromkeys(leaves, reason)
        live = [
            num_outputs is None or i < num_outputs
            for i, _ in enumerate(self.jaxpr.outvars)
        ]
        while True:
            finder = Finder(order)
            inputs = [
                finder.leaf(
                    i, aval, is_followed=not (i in self.fallbacks or i in constant)
                )
                for i, aval in enumerate(avals[:num_leaves])
            ]
            inputs += [None for _ in avals[num_leaves:]]
            self.plan = finder.plan(self.jaxpr, self.consts, inputs, live)
            for out, is_live in zip(self.plan.outs, live, strict=True):
                for view in out.views if out is not None and is_live else ():
                    reason = "the function returns the parameter itself"
                    finder.failed.setdefault(view.leaf, reason)
            if not finder.failed:
                break
            # Leaves that are no longer followed cannot block others.
            self.fallbacks.update(finder.failed)
        self._values = finder.values
        self.sites = list(self.plan.sites)
        self.perturbations = list(self.plan.perturbations)
        self.operands = list(self.plan.operands)
        self._perturbed = sorted(self.fallbacks)
        for leaf in self._perturbed:
            struct = self.leaves[leaf]
            self.sites.append(leaf_site(leaf, struct, len(self.perturbations)))
            self.perturbations.append(struct)

    def sites_of(self, leaf: int) -> list[Site]:
        return [site for site in self.sites if site.leaf == leaf]

    def with_jacobians(self, leaves: Sequence[int]) -> "Program":
        """Jacobians in place of the sites of some leaves, after the cotangents.

        It has the same values and operands. Do not run it.
        """
        own = copy.copy(self)
        own.sites = [site for site in self.sites if site.leaf not in leaves]
        own.perturbations = [*self.perturbations]
        for leaf in leaves:
            struct = self.leaves[leaf]
            own.sites.append(leaf_site(leaf, struct, len(own.perturbations)))
            own.perturbations.append(struct)
        return own

    def value_of(self, number: int) -> Value:
        """A value that a view reads, by its index."""
        return self._values[number]

    def values(self, leaves: list) -> list:
        """The values that views of sites read, besides their leaf.

        They are the same for all examples. Values that no view reads are None.
        """
        steps = [step for site in self.sites for step in site.view.steps]
        read = {i for step in steps for i in step.values}
        numbers = sorted(read)
        found = evaluate([self._values[i] for i in numbers], leaves)
        by_number = dict(zip(numbers, found, strict=True))
        return [by_number.get(i) for i, _ in enumerate(self._values)]

    def value_structs(self) -> list:
        """The types of the values."""
        avals = [var.aval for var in self.jaxpr.invars[: len(self.leaves)]]
        zeros = lambda: [full_varying_as(aval, 0) for aval in avals]
        return jax.eval_shape(lambda: self.values(zeros()))

    def linearize(
        self, leaves: list, example: list, num_outputs: int
    ) -> tuple[list, list, Callable[[list], list]]:
        """Runs the function on one example.

        Returns its outputs, the operands `a` of the sites, and the pullback from
        cotangents of the first `num_outputs` outputs to the cotangents `d`.
        """

        def run(perturbations: list) -> tuple[list, tuple[list, list]]:
            outs, operands, _ = self._evaluate(leaves, example, perturbations)
            return outs[:num_outputs], (outs[num_outputs:], operands)

        zeros = self.zeros(leaves, example)
        outs, pullback, (rest, operands) = jax.vjp(run, zeros, has_aux=True)
        return [*outs, *rest], operands, lambda cotangents: pullback(cotangents)[0]

    def perturbed(
        self, leaves: list, example: list, perturbations: list
    ) -> tuple[list, list]:
        """The outputs and operands of one example, with perturbations."""
        return self._evaluate(leaves, example, perturbations)[:2]

    def zeros(self, leaves: list, example: list) -> list[Array]:
        """Perturbations of zero."""
        # On a mesh, a perturbation must have the type of the value that it perturbs.
        typed = any(map(is_on_mesh, [*leaves, *example]))
        structs = (
            self._perturbed_types(leaves, example) if typed else self.perturbations
        )
        return [zeros_like(struct) for struct in structs]

    def _perturbed_types(self, leaves: list, example: list) -> list:
        def run(leaves: list, example: list) -> list:
            return self._evaluate(leaves, example, None)[2]

        return jax.eval_shape(run, leaves, example)

    def _evaluate(
        self, leaves: list, example: list, perturbations: list | None
    ) -> tuple[list, list, list]:
        """Outputs, operands and, without perturbations, the values to perturb."""
        leaves = list(leaves)
        of_leaves = [leaves[leaf] for leaf in self._perturbed]
        if perturbations is not None:
            perturbations = list(perturbations)
            for leaf in reversed(self._perturbed):
                leaves[leaf] = leaves[leaf] + perturbations.pop()
        args = [*leaves, *example]
        if self.jaxpr.effects:
            return evaluate_jaxpr(self.jaxpr, self.consts, args), [], of_leaves
        outs, operands, perturbed = _run(
            self.plan, self.jaxpr, self.consts, args, perturbations
        )
        return outs, operands, perturbed + of_leaves


_Run = tuple[list, list, list]


def _run(
    plan: Plan, jaxpr: Any, consts: list, args: list, perturbations: list | None
) -> _Run:
    """Evaluates a jaxpr with perturbations added to the outputs of its sites.

    Returns its outputs, the operands and, without perturbations, the values to perturb.
    """
    remaining = None if perturbations is None else list(perturbations)
    operands: list = []
    perturbed: list = []

    def take(num: int) -> list | None:
        if remaining is None:
            return None
        taken = remaining[:num]
        del remaining[:num]
        return taken

    def replace(index: int, eqn: Any) -> Callable[[list], list] | None:
        step = plan.steps.get(index)
        if step is None:
            return None
        if isinstance(step, Perturbed):

            def perturb(ins: list) -> list:
                # A constant may be a NumPy array.
                operands.extend(jnp.asarray(operand(ins)) for operand in step.operands)
                out = eqn.primitive.bind(*ins, **eqn.params)
                own = take(1)
                if own is None:
                    perturbed.append(out)
                    return [out]
                return [out + own[0]]

            return perturb

        def call(ins: list) -> list:
            outs, *found = _run_step(jaxpr, eqn, step, ins, take)
            operands.extend(found[0])
            perturbed.extend(found[1])
            return outs

        return call

    return evaluate_with(jaxpr, consts, args, replace), operands, perturbed


def _run_step(
    jaxpr: Any,
    eqn: Any,
    step: Called | Switched | Linearized,
    ins: list,
    take: Callable[[int], list | None],
) -> _Run:
    """Runs an equation with sites inside of it; `take` gives its perturbations."""
    if isinstance(step, Switched):
        own = [take(len(branch.plan.perturbations)) for branch in step.branches]
        return _run_cond(step, ins, own)
    if isinstance(step, Linearized):
        own = take(len(step.called.plan.perturbations))
        return _run_linearized(jaxpr, eqn, step, ins, own)
    run = _run_scan if eqn.primitive.name == "scan" else _run_call
    return run(eqn, step, ins, take(len(step.plan.perturbations)))


def _run_call(eqn: Any, step: Called, ins: list, perturbations: list | None) -> _Run:
    def run(*args: Any) -> _Run:
        *ins, perturbations = args
        return _run(step.plan, step.jaxpr, step.consts, ins, perturbations)

    run = as_remat(eqn, run, 1) if is_remat(eqn) else run
    return run(*ins, perturbations)


def _run_scan(eqn: Any, step: Called, ins: list, perturbations: list | None) -> _Run:
    params = eqn.params
    num_consts, num_carry = scan_sizes(eqn)
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]

    def body(carry: list, slices: tuple[list, list | None]) -> tuple[list, tuple]:
        xs, perturbations = slices
        args = [*consts, *carry, *xs]
        outs, *found = _run(step.plan, step.jaxpr, step.consts, args, perturbations)
        return outs[:num_carry], (outs[num_carry:], *found)

    carry, (ys, operands, perturbed) = lax.scan(
        body,
        carry,
        (ins[num_consts + num_carry :], perturbations),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys], operands, perturbed


def _run_cond(step: Switched, ins: list, perturbations: list[list | None]) -> _Run:
    index, *args = ins

    def branch(number: int) -> Callable[[list, list], _Run]:
        own = step.branches[number]
        return lambda args, perturbations: _run(
            own.plan, own.jaxpr, own.consts, args, perturbations[number]
        )

    runs = [branch(number) for number, _ in enumerate(step.branches)]
    structs = [jax.eval_shape(run, args, perturbations)[1:] for run in runs]

    def with_zeros(number: int) -> Callable[[list, list], _Run]:
        """A branch that returns zeros for the operands of the others."""

        def run(args: list, perturbations: list) -> _Run:
            outs, *own = runs[number](args, perturbations)
            every = [
                own if i == number else jax.tree.map(zeros_like, [*found])
                for i, found in enumerate(structs)
            ]
            operands, perturbed = zip(*every, strict=True)
            chain = itertools.chain.from_iterable
            return outs, [*chain(operands)], [*chain(perturbed)]

        return run

    branches = [with_zeros(number) for number, _ in enumerate(runs)]
    return lax.switch(index, branches, args, perturbations)


def _run_linearized(
    jaxpr: Any, eqn: Any, step: Linearized, ins: list, perturbations: list | None
) -> _Run:
    """Runs an equation unchanged; perturbations only enter its derivative.

    They only matter for derivatives with respect to them: they are zero, and so is
    their contribution, even if a derivative is infinite.
    """
    own = step.called
    given = [own.consts, [ins[i] for i in step.given]]

    def run(given: list, perturbations: list | None) -> _Run:
        consts, args = given
        zeros = [full_varying_as(aval, 0) for aval in step.tangents]
        return _run(own.plan, own.jaxpr, consts, [*args, *zeros], perturbations)

    @jax.custom_jvp
    def perturbed_by(outs: list, given: list, perturbations: list) -> list:
        return outs

    @perturbed_by.defjvp
    def _jvp(primals: tuple, tangents: tuple) -> tuple[list, list]:
        outs, given, _ = primals
        moved, _, perturbations = tangents
        added = run(given, perturbations)[0]
        return outs, [x + y for x, y in zip(moved, added, strict=True)]

    every: list = [None for _ in eqn.outvars]
    used = run_equation(jaxpr, eqn, [eqn.outvars[i] for i in step.outs])(*ins)
    for i, out in zip(step.outs, used, strict=True):
        every[i] = out
    _, operands, perturbed = run(given, None)
    if perturbations is not None:
        live = perturbed_by([every[i] for i in step.live], given, perturbations)
        for i, out in zip(step.live, live, strict=True):
            every[i] = out
    return every, operands, perturbed
