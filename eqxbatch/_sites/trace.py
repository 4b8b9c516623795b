"""Finding the sites of a function: where its parameters enter the computation.

Adding a perturbation of zero to the output of each site, the derivative with respect to
it is the cotangent `d` that the gradient of the parameter is made of. That takes no
derivative rule of our own: `jax.vjp` does it.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._base.jaxprs import callee, CALLS, evaluate_jaxpr, evaluate_with
from .._base.mesh import is_on_mesh, zeros_like
from .rules import find_rule, Rule, unknown_parameters
from .site import extend_sum, extend_view, is_complex, leaf_site, leaf_view, Site, View


_Views = tuple[View, ...]


_Struct = jax.ShapeDtypeStruct


_REMAT = ("checkpoint", "remat2")  # Its name depends on the version of JAX.


@dataclasses.dataclass(frozen=True)
class _Perturbed:
    """An equation with sites: the functions from its inputs to the operands."""

    operands: list[Callable[[list], Array]]


@dataclasses.dataclass(frozen=True)
class _Call:
    """An equation that calls a jaxpr with sites in it."""

    jaxpr: Any
    consts: list
    plan: "_Plan"


class _Plan:
    """What is to be done in one jaxpr, found by going through its equations."""

    def __init__(self) -> None:
        self.steps: dict[int, _Perturbed | _Call] = {}
        self.sites: list[Site] = []
        self.perturbations: list[_Struct] = []
        self.operands: list[_Struct] = []
        self.outs: list[_Views] = []
        # What has a perturbation, and is used only once.
        self.perturbed_by: dict[Any, int] = {}

    def include(self, inner: "_Plan", steps: tuple[int, ...] = ()) -> None:
        """Takes over what is in a call, or in the `steps` of a loop."""
        for site in inner.sites:
            operand = site.operand
            self.sites.append(
                dataclasses.replace(
                    site,
                    perturbation=site.perturbation + len(self.perturbations),
                    operand=None if operand is None else operand + len(self.operands),
                )
            )
        stacked = lambda s: _Struct((*steps, *s.shape), s.dtype)
        self.perturbations += map(stacked, inner.perturbations)
        self.operands += map(stacked, inner.operands)


class _Finder:
    """Goes through a jaxpr and what it calls. `failed` has leaves without a rule."""

    def __init__(self, *, forbids_products: bool) -> None:
        self.forbids_products = forbids_products
        self.failed: dict[int, str] = {}

    def plan(self, jaxpr: Any, views: list[_Views], constant: list[bool]) -> _Plan:
        """`views` and `constant` are about the inputs of the jaxpr.

        Constant is what depends neither on examples nor on leaves.
        """
        plan = _Plan()
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        uses = collections.Counter(x for x in atoms if not isinstance(x, jex.Literal))
        tracked = {v: view for v, view in zip(jaxpr.invars, views, strict=True) if view}
        constants = set(jaxpr.constvars)
        constants |= {
            v for v, is_const in zip(jaxpr.invars, constant, strict=True) if is_const
        }

        def views_of(atom: Any) -> _Views:
            return () if isinstance(atom, jex.Literal) else tracked.get(atom, ())

        def is_constant(atom: Any) -> bool:
            return isinstance(atom, jex.Literal) or atom in constants

        for index, eqn in enumerate(jaxpr.eqns):
            inputs = [views_of(atom) for atom in eqn.invars]
            are_constant = [is_constant(atom) for atom in eqn.invars]
            if not any(inputs):
                if all(are_constant):
                    constants |= set(eqn.outvars)
                continue
            outs = self.step(plan, index, eqn, inputs, are_constant)
            tracked.update(
                (var, views)
                for var, views in zip(eqn.outvars, outs, strict=True)
                if views
            )
            plan.perturbed_by = {
                v: number for v, number in plan.perturbed_by.items() if uses[v] == 1
            }
        plan.outs = [views_of(atom) for atom in jaxpr.outvars]
        return plan

    def step(
        self,
        plan: _Plan,
        index: int,
        eqn: Any,
        inputs: list[_Views],
        constant: list[bool],
    ) -> list[_Views]:
        """Adds one equation to the plan, and returns the views that it makes."""
        name = eqn.primitive.name
        none: list[_Views] = [() for _ in eqn.outvars]
        unknown = unknown_parameters(eqn)
        if unknown:
            for view in itertools.chain(*inputs):
                self.fail(view.leaf, f"`{name}` with {unknown}, which no rule knows")
            return none
        if name in CALLS:
            return self.call(plan, index, callee(eqn), inputs, constant)
        if name in _REMAT:
            closed = jex.ClosedJaxpr(eqn.params["jaxpr"], ())
            return self.call(plan, index, closed, inputs, constant)
        if name == "scan":
            return self.scan(plan, index, eqn, inputs, constant)
        if name in ("add", "sub") and all(
            views or is_const for views, is_const in zip(inputs, constant, strict=True)
        ):
            sums = [
                extend_sum(view, eqn, position)
                for position, views in enumerate(inputs)
                for view in views
            ]
            return [tuple(sums)]
        extended = self.extended(eqn, inputs)
        if extended is not None:
            return extended
        self.meet(plan, index, eqn, inputs)
        return none

    def meet(self, plan: _Plan, index: int, eqn: Any, inputs: list[_Views]) -> None:
        """Adds an equation in which views meet something else, by their rules."""
        name = eqn.primitive.name
        met = [{view.leaf for view in views} for views in inputs if views]
        if self.forbids_products and len(met) > 1:
            for leaf in set().union(*met):
                self.fail(leaf, f"`{name}` multiplies parameters with each other")
            return
        found = {i: find_rule(eqn, i) for i, views in enumerate(inputs) if views}
        rules = {i: rule for i, rule in found.items() if rule is not None}
        for view in itertools.chain(*(inputs[i] for i in found if i not in rules)):
            self.fail(view.leaf, f"no rule for `{name}` with a parameter in this place")
        if len(rules) < len(found):
            return
        out = eqn.outvars[0]
        perturbation = _perturbation_before(plan, eqn, rules)
        if perturbation is not None:
            # What is added to something has the cotangent of that.
            ((position, rule),) = rules.items()
            plan.sites += [
                Site(view, rule, perturbation, None, is_complex(out.aval.dtype))
                for view in inputs[position]
            ]
            plan.perturbed_by[out] = perturbation
            return
        number = len(plan.perturbations)
        operands: list[Callable[[list], Array]] = []
        structs = [_Struct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
        for position, rule in rules.items():
            operand = None
            if rule.operand is not None:
                operand = len(plan.operands)
                operands.append(rule.operand)
                plan.operands.append(jax.eval_shape(rule.operand, structs))
            plan.sites += [
                Site(view, rule, number, operand, is_complex(out.aval.dtype))
                for view in inputs[position]
            ]
        plan.perturbed_by[out] = number
        plan.perturbations.append(_Struct(out.aval.shape, out.aval.dtype))
        plan.steps[index] = _Perturbed(operands)

    def extended(self, eqn: Any, inputs: list[_Views]) -> list[_Views] | None:
        """The views that an equation makes; None if it is not linear in all it gets."""
        results: list[list[View]] = [[] for _ in eqn.outvars]
        for position, views in enumerate(inputs):
            for view in views:
                extended = extend_view(view, eqn, position)
                if extended is None:
                    return None
                for result, new in zip(results, extended, strict=True):
                    result.append(new)
        return [tuple(result) for result in results]

    def call(
        self,
        plan: _Plan,
        index: int,
        closed: Any,
        inputs: list[_Views],
        constant: list[bool],
    ) -> list[_Views]:
        inner = self.plan(closed.jaxpr, inputs, constant)
        plan.steps[index] = _Call(closed.jaxpr, list(closed.consts), inner)
        plan.include(inner)
        return inner.outs

    def scan(
        self,
        plan: _Plan,
        index: int,
        eqn: Any,
        inputs: list[_Views],
        constant: list[bool],
    ) -> list[_Views]:
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        first_x = num_consts + num_carry
        none: list[_Views] = [() for _ in eqn.outvars]
        for views in inputs[num_consts:first_x]:
            for view in views:
                self.fail(view.leaf, "a parameter is carried through a `scan`")
        sliced = {view.leaf for views in inputs[first_x:] for view in views}
        whole = {view.leaf for views in inputs[:num_consts] for view in views}
        for leaf in sliced & whole:
            self.fail(leaf, "a `scan` takes a parameter both whole and in slices")
        if any(leaf in self.failed for leaf in sliced | whole) or any(
            inputs[num_consts:first_x]
        ):
            return none
        inner_views = [
            tuple(view.scanned() for view in views) if position >= first_x else views
            for position, views in enumerate(inputs)
        ]
        # A carry is not constant, even where it starts as one.
        inner_constant = [
            is_const and not num_consts <= position < first_x
            for position, is_const in enumerate(constant)
        ]
        inner = self.plan(closed.jaxpr, inner_views, inner_constant)
        for views in inner.outs:
            for view in views:
                self.fail(view.leaf, "a `scan` returns a parameter")
        inner.sites = [
            dataclasses.replace(
                site, loops=((site.leaf in sliced, length), *site.loops)
            )
            for site in inner.sites
        ]
        plan.steps[index] = _Call(closed.jaxpr, list(closed.consts), inner)
        plan.include(inner, (length,))
        return none

    def fail(self, leaf: int, reason: str) -> None:
        self.failed.setdefault(leaf, reason)


def _perturbation_before(plan: _Plan, eqn: Any, rules: dict[int, Rule]) -> int | None:
    """The perturbation of what a parameter is added to, if it has that shape."""
    name = eqn.primitive.name
    if name not in ("add", "sub") or len(rules) != 1 or (name == "sub" and 0 in rules):
        return None
    (position,) = rules
    other = eqn.invars[1 - position]
    if isinstance(other, jex.Literal) or other.aval.shape != eqn.outvars[0].aval.shape:
        return None
    return plan.perturbed_by.get(other)


class Program:
    """A function of some leaves and one example, with its sites.

    `closed` is its jaxpr, whose first `num_leaves` inputs are the leaves. All others
    are of the example; what is the same for all examples is among its constants. With
    `use_rules=False`, all leaves are treated as if no rule covered them. Those in
    `constant` are not differentiated. With `forbids_products`, no operand of a site is
    a parameter, so that operands depend on parameters only by way of perturbations.

    - `leaves`: shapes and dtypes of the leaves.
    - `sites`: all sites; every leaf that the function uses has one at least.
    - `perturbations`, `operands`: shapes and dtypes of the cotangents and operands.
    - `fallbacks`: the leaves that no rule covers, by number, and why. Their one site is
        the leaf itself.
    """

    def __init__(
        self,
        closed: Any,
        num_leaves: int,
        *,
        use_rules: bool = True,
        constant: Collection[int] = (),
        forbids_products: bool = False,
    ):
        self.jaxpr, self.consts = closed.jaxpr, list(closed.consts)
        avals = [var.aval for var in self.jaxpr.invars]
        self.leaves = [_Struct(a.shape, a.dtype) for a in avals[:num_leaves]]
        self.fallbacks: dict[int, str] = {}
        reason = None if use_rules else "no rules are used"
        if self.jaxpr.effects:
            reason = "the function has side effects, so it is run as it is"
        if reason is not None:
            self.fallbacks = {
                leaf: reason for leaf in range(num_leaves) if leaf not in constant
            }
        while True:
            finder = _Finder(forbids_products=forbids_products)
            views: list[_Views] = [
                () if i in self.fallbacks or i in constant else (leaf_view(i, struct),)
                for i, struct in enumerate(self.leaves)
            ]
            views += [() for _ in avals[num_leaves:]]
            self.plan = finder.plan(self.jaxpr, views, [False] * len(avals))
            for outs in self.plan.outs:
                for view in outs:
                    finder.fail(view.leaf, "the function returns the parameter itself")
            if not finder.failed:
                break
            # What is not followed any more can no longer be in the way of others.
            self.fallbacks.update(finder.failed)
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
        """The outputs and operands of one example, with these perturbations."""
        return self._evaluate(leaves, example, perturbations)[:2]

    def zeros(self, leaves: list, example: list) -> list[Array]:
        """Perturbations that are none."""
        # On a mesh, a perturbation must be of the type of what it perturbs.
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
        """Outputs, operands and, without perturbations, what would be perturbed."""
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
    plan: _Plan, jaxpr: Any, consts: list, args: list, perturbations: list | None
) -> _Run:
    """Evaluates a jaxpr with perturbations added to the outputs of its sites.

    Returns its outputs, the operands, and what would be perturbed if there are none.
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
        if isinstance(step, _Perturbed):

            def perturb(ins: list) -> list:
                # A constant may be an array of NumPy.
                operands.extend(jnp.asarray(operand(ins)) for operand in step.operands)
                out = eqn.primitive.bind(*ins, **eqn.params)
                own = take(1)
                if own is None:
                    perturbed.append(out)
                    return [out]
                return [out + own[0]]

            return perturb

        run = _run_scan if eqn.primitive.name == "scan" else _run_call

        def call(ins: list) -> list:
            outs, *found = run(eqn, step, ins, take(len(step.plan.perturbations)))
            operands.extend(found[0])
            perturbed.extend(found[1])
            return outs

        return call

    return evaluate_with(jaxpr, consts, args, replace), operands, perturbed


def _run_call(eqn: Any, step: _Call, ins: list, perturbations: list | None) -> _Run:
    def run(*args: Any) -> _Run:
        *ins, perturbations = args
        return _run(step.plan, step.jaxpr, step.consts, ins, perturbations)

    if eqn.primitive.name in _REMAT:
        prevent_cse, policy = eqn.params["prevent_cse"], eqn.params["policy"]
        if isinstance(prevent_cse, tuple):  # One for each input.
            prevent_cse = (*prevent_cse, True)
        run = jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)
    return run(*ins, perturbations)


def _run_scan(eqn: Any, step: _Call, ins: list, perturbations: list | None) -> _Run:
    params = eqn.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
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
