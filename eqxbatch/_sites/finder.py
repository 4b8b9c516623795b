"""Finds the sites of a program: where values that depend on leaves meet an example.

The finder goes through the equations of a program one by one. Values of leaves and
constants alone are the same for all examples: their derivatives are known as sums of
views of leaves. Where such a value meets an example, there is a site.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.jaxprs import (
    live_in_scan,
    live_variables,
    scan_sizes,
    source_line,
)
from .._base.mesh import in_this_mesh
from .._base.primitives import (
    callee,
    CUSTOM,
    IDENTITIES,
    is_unknown_object,
    LINEAR_IN_ALL,
    LINEAR_IN_EACH,
    LINEAR_IN_SOME,
    name_of,
    with_trait,
)
from .custom import linearized, unique_inputs
from .plan import (
    Called,
    Equation,
    Linearized,
    Perturbed,
    Plan,
    Shared,
    SharedPerturbation,
    Switched,
)
from .rules import find_rule, unknown_parameters
from .shared import Graph, Loop, Node, pushforward_of, Slope, Value
from .site import Site, SiteLoop
from .view import extend_view, leaf_view, View


_Struct = jax.ShapeDtypeStruct


# The largest number of ways from a leaf to a value that are followed.
_MOST_VIEWS = 16


# Linear in all inputs together, as far as second derivatives are concerned.
_JOINTLY_LINEAR = LINEAR_IN_ALL | {*LINEAR_IN_SOME} | with_trait("straight")


_Inputs = list[Shared | None]


class Finder:
    """Goes through a jaxpr and the jaxprs that it calls.

    - `order`: the highest derivative that will be taken with the sites.
    - `failed`: the leaves without a rule, with reasons.
    - `values`: the values that views read.
    """

    def __init__(self, order: int = 1) -> None:
        self.order = order
        self.failed: dict[int, str] = {}
        self.values: list[Value] = []
        self.graph = Graph()
        self._numbers: dict[Any, int] = {}
        self._of_nodes: dict[Node, Shared] = {}
        self._num_loops = 0

    def leaf(self, number: int, aval: Any, *, is_followed: bool) -> Shared:
        """Adds a leaf; a leaf that is not followed has no sites."""
        node = self.graph.leaf(number, aval, varies=is_followed)
        return self._known(node, (leaf_view(number, aval),) if is_followed else ())

    def constant(self, var: Any, value: Any) -> Shared:
        return self._known(self.graph.constant(var.aval, value))

    def plan(
        self, jaxpr: Any, consts: Sequence[Any], inputs: _Inputs, live: Sequence[bool]
    ) -> Plan:
        """The plan of a jaxpr, of which some outputs are differentiated."""
        plan = Plan()
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        uses = collections.Counter(x for x in atoms if not isinstance(x, jex.Literal))
        needed = live_variables(jaxpr, live)
        shared = {v: x for v, x in zip(jaxpr.invars, inputs, strict=True) if x}
        pairs = zip(jaxpr.constvars, consts, strict=True)
        shared.update((var, self.constant(var, value)) for var, value in pairs)

        def of(atom: Any) -> Shared | None:
            if isinstance(atom, jex.Literal):
                return Shared(self.graph.literal(atom))
            return shared.get(atom)

        for index, eqn in enumerate(jaxpr.eqns):
            ins = [of(atom) for atom in eqn.invars]
            own = Equation(jaxpr, index, eqn, [v in needed for v in eqn.outvars], uses)
            outs = self.step(plan, own, ins)
            pairs = zip(eqn.outvars, outs, strict=True)
            shared.update((var, x) for var, x in pairs if x is not None)
            plan.follow(eqn, uses)
        plan.outs = [of(atom) for atom in jaxpr.outvars]
        return plan

    def step(self, plan: Plan, own: Equation, inputs: _Inputs) -> _Inputs:
        """Adds one equation to the plan, and returns its outputs that are shared."""
        eqn = own.eqn
        name = name_of(eqn)
        none: _Inputs = [None for _ in eqn.outvars]
        found = [x for x in inputs if x is not None]
        has_views = any(x.views for x in found)
        is_shared = len(found) == len(inputs)
        if not eqn.outvars or not (is_shared or (has_views and any(own.live))):
            return none
        closed = callee(eqn)
        if closed is not None:
            return self.call(plan, own, closed, inputs)
        if name in IDENTITIES:
            return inputs
        is_lookup = name in ("gather", "dynamic_slice") and has_views and any(own.live)
        if is_shared and not (is_lookup and find_rule(eqn, 0) is not None):
            if is_unknown_object(eqn) and any(own.live):
                self.fail(_views(inputs), own, f"no rule for `{name}`")
            return self.shared(own, found)
        unknown = unknown_parameters(eqn)
        if unknown:
            reason = f"`{name}` with {unknown}, which no rule knows"
            self.fail(_views(inputs), own, reason)
        elif name == "scan":
            self.scan(plan, own, inputs)
        elif name == "cond":
            self.cond(plan, own, inputs)
        elif name in CUSTOM:
            self.custom(plan, own, inputs)
        else:
            self.meet(plan, own, inputs)
        return none

    # Values that are the same for all examples.

    def shared(self, own: Equation, inputs: list[Shared]) -> _Inputs:
        """The outputs of an equation whose inputs are the same for all examples."""
        eqn = own.eqn
        used = [var for var in eqn.outvars if own.uses[var]]
        nodes = self.graph.outputs(own.jaxpr, eqn, tuple(x.node for x in inputs), used)
        linear = self._linear(eqn, inputs)
        by_var: dict[Any, Shared] = {}
        for var, node in zip(used, nodes, strict=True):
            output = eqn.outvars.index(var)
            views: tuple[View, ...] = ()
            if node.varies:
                views = self._views_of(own, inputs, output, node, linear)
            counts = collections.Counter(view.leaf for view in views)
            many = [view for view in views if counts[view.leaf] > _MOST_VIEWS]
            reason = f"`{name_of(eqn)}` makes too much of a parameter"
            self.fail(many, own, reason)
            views = tuple(view for view in views if view.leaf not in self.failed)
            by_var[var] = self._known(node, views, *self._curved(eqn, inputs, node))
        return [by_var.get(var) for var in eqn.outvars]

    def _inverse(self, own: Equation, x: Shared) -> Shared:
        """One over a value that is the same for all examples."""
        node = self.graph.inverse(x.node)
        views = self._views_of(own, [x], 0, node, None)
        return self._known(node, views, *self._curved(own.eqn, [x], node))

    def _known(self, node: Node, *rest: Any) -> Shared:
        self._of_nodes[node] = Shared(node, *rest)
        return self._of_nodes[node]

    def _linear(self, eqn: Any, inputs: list[Shared]) -> list[list[View]] | None:
        """The views of each output, if the equation is linear in all its inputs."""
        results: list[list[View]] = [[] for _ in eqn.outvars]
        for position, own in enumerate(inputs):
            for view in own.views:
                extended = extend_view(view, eqn, position)
                if extended is None:
                    return None
                for result, new in zip(results, extended, strict=True):
                    result.append(new)
        return results

    def _views_of(
        self,
        own: Equation,
        inputs: list[Shared],
        output: int,
        node: Node,
        linear: list[list[View]] | None,
    ) -> tuple[View, ...]:
        """The derivative of an output of an equation, as a sum of views."""
        bases = [self._of_nodes[base] for base in node.bases]
        by_slopes = sum(len(x.views) for x in bases)
        # Two ways from the same array are merged, with the sum of their slopes.
        if linear is not None and (not bases or len(linear[output]) <= by_slopes):
            return tuple(linear[output])
        if bases:
            return tuple(
                self._times(view, Slope(node, base.node))
                for base in bases
                for view in base.views
            )
        views: list[View] = []
        for position, x in enumerate(inputs):
            if x.views:
                views += self._pushed(x.views, own, inputs, position, output)
        return tuple(views)

    def _times(self, view: View, slope: Slope) -> View:
        """A view times the derivative of an elementwise function."""
        value = self._number(slope, (slope.node, slope.base))
        place = view.place
        if place is not None:
            view = dataclasses.replace(
                view, place=None, shape=(place.size, *view.shape[1:])
            )

        def times(x: Array, slope: Array) -> Array:
            if place is not None:
                slope = slope[place.start : place.start + place.size]
            return x.astype(slope.dtype) * slope

        view = view.then(
            f"times {value[0]}" + (f" at {place.start}" if place else ""),
            times,
            view.shape,
            tuple(range(len(view.shape))),
            is_isometry=False,
            is_weighted=True,
            values=[value],
        )
        return dataclasses.replace(view, place=place, shape=slope.node.shape)

    def _pushed(
        self,
        views: tuple[View, ...],
        own: Equation,
        inputs: list[Shared],
        position: int,
        output: int,
    ) -> list[View]:
        """Views pushed through the derivative of an equation at the values there."""
        eqn = own.eqn
        var = eqn.outvars[output]
        push = pushforward_of(own.jaxpr, eqn, position, var)
        if push is None:
            reason = f"`{name_of(eqn)}` has no derivative in forward mode"
            self.fail(views, own, reason)
            return []
        values = [self._number(x.node, x.node) for x in inputs]
        numbers = [number for number, _ in values]
        key = f"{name_of(eqn)}[{position}, {output}]{numbers}"
        settings = {"is_isometry": False, "values": values}
        shape, push = var.aval.shape, in_this_mesh(push)
        return [view.then(key, push, shape, None, **settings) for view in views]

    def _number(self, value: Value, key: Any) -> tuple[int, tuple[Loop, ...]]:
        """The index of a value, and its loops."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key], value.loops

    def _curved(
        self, eqn: Any, inputs: list[Shared], node: Node
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The leaves in which a node is nonlinear, and those that it couples."""
        bases = [self._of_nodes[base] for base in node.bases]
        made_of = bases or inputs
        curved = frozenset[int]().union(*(x.curved for x in made_of))
        coupled = frozenset[int]().union(*(x.coupled for x in made_of))
        if not node.varies or self._is_linear(eqn, inputs, node):
            return curved, coupled
        leaves = frozenset(view.leaf for x in made_of for view in x.views)
        views = [view for x in made_of for view in x.views]
        if bases and len(views) == 1 and not curved and views[0].is_whole:
            return leaves, frozenset()
        return curved | leaves, coupled | leaves

    def _is_linear(self, eqn: Any, inputs: list[Shared], node: Node) -> bool:
        if node.bases:
            return node.is_linear
        name, num = name_of(eqn), sum(x.node.varies for x in inputs)
        return name in _JOINTLY_LINEAR or (name in LINEAR_IN_EACH and num == 1)

    # Where values meet an example.

    def meet(self, plan: Plan, own: Equation, inputs: _Inputs) -> None:
        """Adds an equation in which views meet other values, using their rules."""
        eqn = own.eqn
        name = name_of(eqn)
        of_views = {i: x for i, x in enumerate(inputs) if x is not None and x.views}
        found = {i: find_rule(eqn, i) for i in of_views}
        rules = {i: rule for i, rule in found.items() if rule is not None}
        reason = f"no rule for `{name}` with a parameter in this place"
        for i, x in of_views.items():
            if i not in rules:
                self.fail(x.views, own, reason)
        if len(rules) < len(found):
            return
        of_views.update(
            (i, self._inverse(own, of_views[i]))
            for i, rule in rules.items()
            if rule.is_of_inverse
        )
        out = eqn.outvars[0]

        def add(position: int, perturbation: int, operand: int | None) -> None:
            x, kind = of_views[position], is_complex(out.aval)
            rule = rules[position]
            for view in x.views:
                source = x.node if view.leaf in x.curved else None
                plan.sites.append(
                    Site(
                        view.in_zeros(),
                        rule,
                        perturbation,
                        operand,
                        kind,
                        source=source,
                        is_coupled=view.leaf in x.coupled,
                        is_reverse=x.node.is_reverse,
                    )
                )

        before = plan.perturbed_before(eqn, rules)
        if before is not None:
            # A summand has the cotangent of the sum.
            (position,) = rules
            rules[position] = before.rule(rules[position])
            add(position, before.perturbation, None)
            plan.perturbed_by[out] = before
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
            add(position, number, operand)
        shape = out.aval.shape
        plan.perturbed_by[out] = SharedPerturbation(
            number, shape, tuple(range(len(shape)))
        )
        plan.perturbations.append(_Struct(out.aval.shape, out.aval.dtype))
        plan.steps[own.index] = Perturbed(operands)

    def call(self, plan: Plan, own: Equation, closed: Any, inputs: _Inputs) -> _Inputs:
        inner = self.plan(closed.jaxpr, closed.consts, inputs, own.live)
        if inner.steps:
            plan.steps[own.index] = Called(closed.jaxpr, list(closed.consts), inner)
            plan.follow_out(inner, closed.jaxpr.outvars, own.eqn.outvars)
            plan.include(inner)
        return inner.outs

    def scan(self, plan: Plan, own: Equation, inputs: _Inputs) -> None:
        params = own.eqn.params
        closed, length = params["jaxpr"], params["length"]
        num_consts, num_carry = scan_sizes(own.eqn)
        first_x = num_consts + num_carry
        carried = [*_views(inputs[num_consts:first_x])]
        self.fail(carried, own, "a parameter is carried through a `scan`")
        if carried:
            return
        loop = (self._num_loops, length)
        self._num_loops += 1
        inner_inputs: _Inputs = []
        for position, x in enumerate(inputs):
            if x is None or num_consts <= position < first_x:
                # A carry differs between steps, even if its initial value is shared.
                inner_inputs.append(None)
            elif position < first_x:
                inner_inputs.append(x)
            else:
                node = self.graph.sliced(x.node, loop)
                views = tuple(view.scanned(loop) for view in x.views)
                inner_inputs.append(self._known(node, views, x.curved, x.coupled))
        live = live_in_scan(own.eqn, own.live)[0]
        inner = self.plan(closed.jaxpr, closed.consts, inner_inputs, live)
        for x, is_live in zip(inner.outs, live, strict=True):
            if x is not None and is_live:
                self.fail(x.views, own, "a `scan` returns a parameter")
        inner.sites = [
            dataclasses.replace(site, loops=(SiteLoop.of(site.view, loop), *site.loops))
            for site in inner.sites
        ]
        if inner.steps:
            plan.steps[own.index] = Called(closed.jaxpr, list(closed.consts), inner)
            plan.include(inner, (length,))

    def cond(self, plan: Plan, own: Equation, inputs: _Inputs) -> None:
        """Adds the sites of all branches; those of branches not taken give zero."""
        branches, start = [], len(self.values)
        for closed in own.eqn.params["branches"]:
            inner = self.plan(closed.jaxpr, closed.consts, inputs[1:], own.live)
            for x, is_live in zip(inner.outs, own.live, strict=True):
                if x is not None and is_live:
                    self.fail(x.views, own, "a `cond` returns a parameter")
            for site in inner.sites:
                # The values of a view are computed before the branch is known. They may
                # be infinite, and a zero cotangent does not remove that.
                if any(i >= start for x in site.view.steps for i in x.values):
                    reason = "a branch of a `cond` has a function of a parameter"
                    self.fail([site.view], own, reason)
            inner.sites = [
                dataclasses.replace(x, is_in_branch=True) for x in inner.sites
            ]
            branches.append(Called(closed.jaxpr, list(closed.consts), inner))
        if any(branch.plan.steps for branch in branches):
            plan.steps[own.index] = Switched(branches)
            for branch in branches:
                plan.include(branch.plan)

    def custom(self, plan: Plan, own: Equation, inputs: _Inputs) -> None:
        """Adds the sites in the custom derivative of an equation.

        Only tangents of parameters are followed in it. All other inputs, including the
        parameters themselves, are values.
        """
        eqn, given = own.eqn, unique_inputs(own.eqn)
        shared = [inputs[i] for i in given]
        moved = [i for i, x in zip(given, shared, strict=True) if x and x.views]
        live = [
            i
            for i, is_live in enumerate(own.live)
            if is_live and own.uses[eqn.outvars[i]]
        ]
        reason = f"`{name_of(eqn)}` has a first derivative of its own, and no second"
        found = linearized(own.jaxpr, eqn, moved, live) if self.order == 1 else reason
        if isinstance(found, str):
            self.fail(_views(inputs), own, found)
            return
        known: _Inputs = [
            None if x is None else self._known(self.graph.frozen(x.node))
            for x in shared
        ]
        for i in moved:
            x = inputs[i]
            assert x is not None
            known.append(self._known(self.graph.tangent(eqn.invars[i].aval), x.views))
        consts = list(found.consts)
        inner = self.plan(found.jaxpr, consts, known, [True for _ in live])
        for x in inner.outs:
            self.fail(_views([x]), own, f"`{name_of(eqn)}` returns a parameter")
        if inner.steps:
            used = [i for i, var in enumerate(eqn.outvars) if own.uses[var]]
            tangents = [eqn.invars[i].aval for i in moved]
            called = Called(found.jaxpr, consts, inner)
            plan.steps[own.index] = Linearized(called, given, tangents, used, live)
            plan.include(inner)

    def fail(self, views: Iterable[View], own: Equation, reason: str) -> None:
        """Marks the leaves of some views as not covered, because of an equation."""
        line = source_line(own.eqn)
        for view in views:
            led = [f"`{re.split(r'[^a-z_]', key)[0]}`" for key in view.key]
            parts = [reason, line and f"at {line}", led and f"after {', '.join(led)}"]
            self.failed.setdefault(view.leaf, ", ".join(filter(None, parts)))


def _views(inputs: Sequence[Shared | None]) -> "itertools.chain[View]":
    return itertools.chain(*(x.views for x in inputs if x is not None))
