"""A function with its sites: where its parameters enter the computation.

A `Finder` goes through the equations of a program one by one. Values of leaves and
constants alone are the same for all examples: their derivatives are known as sums of
views of leaves. Where such a value meets an example, there is a site.

A zero perturbation is added to the output of each site. The derivative with respect to
it is the cotangent `d` in the gradient of the parameter. `jax.vjp` computes it, so no
derivative rules of our own are needed.

The `Plan` of the program says which equations have sites, and runs them.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._base.backward import unique_inputs
from .._base.dtypes import is_complex
from .._base.jaxprs import (
    as_called,
    as_remat,
    callee,
    CUSTOM,
    evaluate_with,
    full_varying_as,
    IDENTITIES,
    is_remat,
    is_unknown_object,
    literal,
    live_in_scan,
    live_variables,
    name_of,
    run_equation,
    run_jaxpr,
    scan_sizes,
    source_line,
    SUMS,
    unknown_parameters,
    varying,
)
from .._base.mesh import in_this_mesh, is_on_mesh, is_reduction, zeros_like
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .custom import linearized
from .shared import (
    evaluated,
    extend_view,
    leaf_view,
    Loop,
    MOVES,
    Node,
    output_nodes,
    pushforward_of,
    slope_of,
    View,
)
from .site import Axes, find_rule, leaf_site, Rule, Site


_Struct = jax.ShapeDtypeStruct


# The largest number of ways from a leaf to a value that are followed.
_MOST_VIEWS = 16


_Inputs = list[Node | None]


class Program:
    """A traced function with its sites.

    With `use_rules=False`, all leaves are treated as if no rule covered them. Leaves in
    `constant` are not differentiated. For leaves in `formed`, the gradient itself is
    requested, as if no rule covered them. The first `num_outputs` outputs are
    differentiated; None for all of them. `order` is 2 if second derivatives are needed.

    - `traced`, `leaves`, `jaxpr`: the traced function, its leaves and jaxpr.
    - `nodes`: the values that views of sites read, by index.
    - `sites`: all sites; every leaf that the function uses has at least one.
    - `perturbations`, `operands`: shapes and dtypes of the cotangents and operands.
    - `fallbacks`: the leaves that no rule covers, by index, with reasons. Their only
        site is the leaf itself.
    """

    def __init__(
        self,
        traced: TracedFunction,
        *,
        use_rules: bool = True,
        constant: Collection[int] = (),
        formed: Collection[int] = (),
        num_outputs: int | None = None,
        order: int = 1,
    ):
        self.traced, self.leaves, closed = traced, traced.leaves, traced.closed
        self.jaxpr: Any = closed.jaxpr
        self._consts = list(closed.consts)
        avals, num_leaves = [var.aval for var in self.jaxpr.invars], len(self.leaves)
        self.fallbacks = dict.fromkeys(formed, "its gradient is formed")
        reason = None if use_rules else "no rules are used"
        if self.jaxpr.effects:
            reason = "the function has side effects, so it is run as it is"
        if reason is not None:
            leaves = (leaf for leaf in range(num_leaves) if leaf not in constant)
            self.fallbacks = dict.fromkeys(leaves, reason)
        num = len(self.jaxpr.outvars)
        live = [num_outputs is None or i < num_outputs for i in range(num)]
        while True:
            finder = Finder(order)
            inputs: _Inputs = [None for _ in avals]
            for i, aval in enumerate(avals[:num_leaves]):
                # A leaf that is not followed has no sites.
                is_followed = i not in self.fallbacks and i not in constant
                views = (leaf_view(i, aval),) if is_followed else ()
                inputs[i] = Node.of(aval, is_followed, leaf=i, views=views)
            self._plan = finder.plan(self.jaxpr, self._consts, inputs, live)
            for view in _views(itertools.compress(self._plan.outs, live)):
                reason = "the function returns the parameter itself"
                finder.failed.setdefault(view.leaf, reason)
            if not finder.failed:
                break
            # Leaves that are no longer followed cannot block others.
            self.fallbacks.update(finder.failed)
        self.nodes = finder.values
        self.sites = list(self._plan.sites)
        self.perturbations = list(self._plan.perturbations)
        self.operands = list(self._plan.operands)
        self._perturbed = sorted(self.fallbacks)
        self._add_leaves(self._perturbed)

    def _add_leaves(self, leaves: Iterable[int]) -> None:
        """Adds sites of leaves that are perturbed themselves."""
        for leaf in leaves:
            x = self.leaves[leaf]
            self.sites.append(leaf_site(leaf, x, len(self.perturbations)))
            self.perturbations.append(_Struct(x.shape, x.dtype))

    @functools.cached_property
    def _by_leaf(self) -> dict[int, list[Site]]:
        sites: dict[int, list[Site]] = collections.defaultdict(list)
        for site in self.sites:
            sites[site.leaf].append(site)
        return sites

    def sites_of(self, leaf: int) -> list[Site]:
        return self._by_leaf.get(leaf, [])

    def family(self, leaf: int) -> Hashable:
        """A key that is equal for leaves whose sites are equal functions."""
        struct = self.leaves[leaf]
        key = [struct.shape, struct.dtype, varying(jax.typeof(struct))]
        key.append(leaf in self.fallbacks)
        for site in self.sites_of(leaf):
            view, rule, operand = site.view, site.rule, site.operand
            structs = [self.perturbations[site.perturbation]]
            if operand is not None:
                structs.append(self.operands[operand])
            key += [view.key, view.loops, rule.kind, rule.key, site.loops]
            key += [(struct.shape, struct.dtype) for struct in structs]
            key += [site.is_complex, site.is_coupled, site.is_reverse]
            if site.source is not None or view.reads:
                key.append(leaf)
        return tuple(key)

    def with_jacobians(self, leaves: Sequence[int]) -> "Program":
        """Jacobians in place of the sites of some leaves, after the cotangents.

        It has the same values and operands. Do not run it.
        """
        other = copy.copy(self)
        vars(other).pop("_by_leaf", None)
        other.sites = [site for site in self.sites if site.leaf not in leaves]
        other.perturbations = [*self.perturbations]
        other._add_leaves(leaves)
        return other

    def with_factors(
        self, leaves: list, sites: list[Site], perturbations: list, operands: list
    ) -> "Program":
        """Other leaves and sites, with factors that are made of those of this program.

        Do not run it.
        """
        other = self.with_jacobians([])
        other.leaves, other.sites, other.nodes = leaves, sites, []
        other.perturbations, other.operands = perturbations, operands
        return other

    def values(self, leaves: list | None = None) -> list:
        """The values that views of sites read, besides their leaf, at some `leaves`.

        They are the same for all examples. Values that no view reads are None.
        """
        read = {self.nodes[i] for site in self.sites for i in site.view.reads}
        values = evaluated(read, self.leaves if leaves is None else leaves)
        return [values[x] if x in read else None for x in self.nodes]

    def value_structs(self) -> list:
        """The types of the values."""
        return jax.eval_shape(lambda: self.values(self.traced.zeros()[0]))

    def linearize(
        self, leaves: list, example: list, num_outputs: int
    ) -> tuple[list, list, Callable[[list], list]]:
        """Runs the function on one example.

        Returns its outputs, the operands `a` of the sites, and the pullback from
        cotangents of the first `num_outputs` outputs to the cotangents `d`.
        """

        def run(perturbations: list) -> tuple[list, tuple[list, list]]:
            outs, operands, _ = self.evaluate(leaves, example, perturbations)
            return outs[:num_outputs], (outs[num_outputs:], operands)

        zeros = self.zeros(leaves, example)
        outs, pullback, (rest, operands) = jax.vjp(run, zeros, has_aux=True)
        return [*outs, *rest], operands, lambda cotangents: pullback(cotangents)[0]

    def zeros(self, leaves: list, example: list) -> list[Array]:
        """Perturbations of zero."""
        # On a mesh, a perturbation must have the type of the value that it perturbs.
        structs = self.perturbations
        if any(map(is_on_mesh, [*leaves, *example])):
            perturbed = lambda leaves, example: self.evaluate(leaves, example, None)[2]
            structs = jax.eval_shape(perturbed, leaves, example)
        return [*map(zeros_like, structs)]

    def evaluate(
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
            return run_jaxpr(self.jaxpr, self._consts, args), [], of_leaves
        outs, operands, perturbed = self._plan.run(args, perturbations)
        return outs, operands, perturbed + of_leaves


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of a plan, and which of its outputs are differentiated.

    `uses` counts how often variables are used.
    """

    plan: "Plan"
    index: int
    eqn: Any
    live: list[bool]
    uses: collections.Counter


class Finder:
    """Goes through a jaxpr and the jaxprs that it calls.

    - `order`: the highest derivative that will be taken with the sites.
    - `failed`: the leaves without a rule, with reasons.
    - `values`: the values that views read.
    """

    def __init__(self, order: int = 1) -> None:
        self.order = order
        self.failed: dict[int, str] = {}
        self.values: list[Node] = []
        self._numbers: dict[Any, int] = {}
        self._num_loops = 0

    def plan(
        self, jaxpr: Any, consts: Sequence[Any], inputs: _Inputs, live: Sequence[bool]
    ) -> "Plan":
        """The plan of a jaxpr, of which some outputs are differentiated."""
        plan = Plan(jaxpr, consts)
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        uses = collections.Counter(x for x in atoms if not isinstance(x, jex.Literal))
        needed = live_variables(jaxpr, live)
        shared = {v: x for v, x in safe_zip(jaxpr.invars, inputs) if x}
        for var, value in safe_zip(jaxpr.constvars, consts):
            shared[var] = Node.constant_of(var.aval, value)

        def of(atom: Any) -> Node | None:
            if isinstance(atom, jex.Literal):
                return Node.constant_of(atom.aval, literal(atom))
            return shared.get(atom)

        for index, eqn in enumerate(jaxpr.eqns):
            ins = [of(atom) for atom in eqn.invars]
            is_needed = [v in needed for v in eqn.outvars]
            equation = Equation(plan, index, eqn, is_needed, uses)
            outs = self.step(equation, ins)
            pairs = safe_zip(eqn.outvars, outs)
            shared.update((var, x) for var, x in pairs if x is not None)
            plan.follow(eqn, uses)
        plan.outs = [of(atom) for atom in jaxpr.outvars]
        return plan

    def step(self, equation: Equation, inputs: _Inputs) -> _Inputs:
        """Adds one equation to the plan, and returns its outputs that are shared."""
        eqn = equation.eqn
        name = name_of(eqn)
        none: _Inputs = [None for _ in eqn.outvars]
        nodes = [x for x in inputs if x is not None]
        has_views = any(x.views for x in nodes)
        is_shared, is_live = len(nodes) == len(inputs), any(equation.live)
        if not eqn.outvars or not (is_shared or (has_views and is_live)):
            return none
        closed = callee(eqn)
        if closed is not None:
            return self.call(equation, closed, inputs)
        if is_reduction(eqn) and is_live:
            # A sum over devices would mix examples.
            reason = f"`{name}` of an array that is unreduced or reduced over devices"
            self.fail(_views(inputs), equation, reason)
        if name in IDENTITIES:
            return inputs
        is_lookup = name in ("gather", "dynamic_slice") and has_views and is_live
        if is_shared and not (is_lookup and find_rule(eqn, 0) is not None):
            if is_unknown_object(eqn) and is_live:
                self.fail(_views(inputs), equation, f"no rule for `{name}`")
            return self.shared(equation, nodes)
        unknown = unknown_parameters(eqn)
        if unknown:
            reason = f"`{name}` with {unknown}, which no rule knows"
            self.fail(_views(inputs), equation, reason)
        elif name == "scan":
            self.scan(equation, inputs)
        elif name == "cond":
            self.cond(equation, inputs)
        elif name in CUSTOM:
            self.custom(equation, inputs)
        else:
            self.meet(equation, inputs)
        return none

    # Values that are the same for all examples.

    def shared(self, equation: Equation, inputs: list[Node]) -> _Inputs:
        """The outputs of an equation whose inputs are the same for all examples."""
        eqn, jaxpr = equation.eqn, equation.plan.jaxpr
        used = [var for var in eqn.outvars if equation.uses[var]]
        nodes = output_nodes(jaxpr, eqn, tuple(inputs), used)
        linear = self._linear(eqn, inputs)
        for var, node in safe_zip(used, nodes):
            output = eqn.outvars.index(var)
            views: tuple[View, ...] = ()
            if node.varies:
                views = self._views_of(equation, inputs, output, node, linear)
            counts = collections.Counter(view.leaf for view in views)
            many = [view for view in views if counts[view.leaf] > _MOST_VIEWS]
            reason = f"`{name_of(eqn)}` makes too much of a parameter"
            self.fail(many, equation, reason)
            node.views = tuple(view for view in views if view.leaf not in self.failed)
            node.curved, node.coupled = _curved(inputs, node)
        return [*map(dict(safe_zip(used, nodes)).get, eqn.outvars)]

    def _inverse(self, equation: Equation, x: Node) -> Node:
        """One over a value that is the same for all examples."""
        node = x.inverse()
        node.views = self._views_of(equation, [x], 0, node, None)
        node.curved, node.coupled = _curved([x], node)
        return node

    def _linear(self, eqn: Any, inputs: list[Node]) -> list[list[View]] | None:
        """The views of each output, if the equation is linear in all its inputs."""
        results: list[list[View]] = [[] for _ in eqn.outvars]
        for position, x in enumerate(inputs):
            for view in x.views:
                extended = extend_view(view, eqn, position)
                if extended is None:
                    return None
                for result, new in safe_zip(results, extended):
                    result += [] if new is None else [new]
        return results

    def _views_of(
        self,
        equation: Equation,
        inputs: list[Node],
        output: int,
        node: Node,
        linear: list[list[View]] | None,
    ) -> tuple[View, ...]:
        """The derivative of an output of an equation, as a sum of views."""
        bases = node.bases
        by_slopes = sum(len(x.views) for x in bases)
        # Two ways from the same array are merged, with the sum of their slopes.
        if linear is not None and (not bases or len(linear[output]) <= by_slopes):
            return tuple(linear[output])
        if bases:
            return tuple(
                self._times(view, node, base) for base in bases for view in base.views
            )
        views: list[View] = []
        for position, x in enumerate(inputs):
            if x.views:
                views += self._pushed(x.views, equation, inputs, position, output)
        return tuple(views)

    def _times(self, view: View, node: Node, base: Node) -> View:
        """A view times the derivative of an elementwise function."""
        value = self._number(slope_of(node, base), (node, base))
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
        return dataclasses.replace(view, place=place, shape=node.shape)

    def _pushed(
        self,
        views: tuple[View, ...],
        equation: Equation,
        inputs: list[Node],
        position: int,
        output: int,
    ) -> list[View]:
        """Views pushed through the derivative of an equation at the values there."""
        eqn = equation.eqn
        var = eqn.outvars[output]
        push = pushforward_of(equation.plan.jaxpr, eqn, position, var)
        if push is None:
            reason = f"`{name_of(eqn)}` has no derivative in forward mode"
            self.fail(views, equation, reason)
            return []
        values = [self._number(x, x) for x in inputs]
        numbers = [number for number, _ in values]
        key = f"{name_of(eqn)}[{position}, {output}]{numbers}"
        settings = {"is_isometry": False, "values": values}
        shape, push = var.aval.shape, in_this_mesh(push)
        return [view.then(key, push, shape, None, **settings) for view in views]

    def _number(self, value: Node, key: Any) -> tuple[int, tuple[Loop, ...]]:
        """The index of a value, and its loops."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key], value.loops

    # Where values meet an example.

    def meet(self, equation: Equation, inputs: _Inputs) -> None:
        """Adds an equation in which views meet other values, using their rules."""
        eqn, plan = equation.eqn, equation.plan
        name = name_of(eqn)
        of_views = {i: x for i, x in enumerate(inputs) if x is not None and x.views}
        tried = {i: find_rule(eqn, i) for i in of_views}
        rules = {i: rule for i, rule in tried.items() if rule is not None}
        reason = f"no rule for `{name}` with a parameter in this place"
        for i, x in of_views.items():
            if i not in rules:
                self.fail(x.views, equation, reason)
        if len(rules) < len(tried):
            return
        of_views.update(
            (i, self._inverse(equation, of_views[i]))
            for i, rule in rules.items()
            if rule.is_of_inverse
        )
        out = eqn.outvars[0]
        operands: list[Callable[[list], Array]] = []
        # A summand has the cotangent of the sum, if there is one.
        value = plan.perturbed_before(eqn, rules)
        if value is None:
            value = leaf_view(len(plan.perturbations), out.aval)
            plan.perturbations.append(_Struct(out.aval.shape, out.aval.dtype))
            step = functools.partial(perturbed, eqn, operands)
            plan.steps[equation.index] = step, 1
        plan.perturbed_by[out] = value
        structs = [_Struct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]

        def add_operand(of: Callable[[list], Array]) -> int:
            operands.append(of)
            plan.operands.append(jax.eval_shape(of, structs))
            return len(plan.operands) - 1

        for position, rule in rules.items():
            x, operand = of_views[position], None
            which = None
            if rule.operand is not None:
                operand = add_operand(rule.operand)
            if rule.which is not None:
                which = add_operand(rule.which)
            plan.sites += [
                Site(
                    view.in_zeros(),
                    moved_rule(rule, value),
                    value.leaf,
                    operand,
                    is_complex(out.aval),
                    which,
                    source=x if view.leaf in x.curved else None,
                    is_coupled=view.leaf in x.coupled,
                    is_reverse=x.is_reverse,
                )
                for view in x.views
            ]

    def call(self, equation: Equation, closed: Any, inputs: _Inputs) -> _Inputs:
        inner = self.plan(closed.jaxpr, closed.consts, inputs, equation.live)
        equation.plan.follow_out(inner, equation.eqn.outvars)
        step = functools.partial(run_call, equation.eqn, inner)
        equation.plan.include(equation.index, step, [inner])
        return inner.outs

    def scan(self, equation: Equation, inputs: _Inputs) -> None:
        params = equation.eqn.params
        closed, length = params["jaxpr"], params["length"]
        num_consts, num_carry = scan_sizes(equation.eqn)
        first_x = num_consts + num_carry
        carried = [*_views(inputs[num_consts:first_x])]
        self.fail(carried, equation, "a parameter is carried through a `scan`")
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
                inner_inputs.append(x.sliced(loop))
        live = live_in_scan(equation.eqn, equation.live)[0]
        inner = self.plan(closed.jaxpr, closed.consts, inner_inputs, live)
        returned = _views(itertools.compress(inner.outs, live))
        self.fail(returned, equation, "a `scan` returns a parameter")
        inner.sites = [site.within(loop) for site in inner.sites]
        step = functools.partial(run_scan, equation.eqn, inner)
        equation.plan.include(equation.index, step, [inner], (length,))

    def cond(self, equation: Equation, inputs: _Inputs) -> None:
        """Adds the sites of all branches; those of branches not taken give zero."""
        branches, start = [], len(self.values)
        for closed in equation.eqn.params["branches"]:
            inner = self.plan(closed.jaxpr, closed.consts, inputs[1:], equation.live)
            returned = _views(itertools.compress(inner.outs, equation.live))
            self.fail(returned, equation, "a `cond` returns a parameter")
            for site in inner.sites:
                # The values of a view are computed before the branch is known. They may
                # be infinite, and a zero cotangent does not remove that.
                if any(i >= start for i in site.view.reads):
                    reason = "a branch of a `cond` has a function of a parameter"
                    self.fail([site.view], equation, reason)
            inner.sites = [
                dataclasses.replace(x, is_in_branch=True) for x in inner.sites
            ]
            branches.append(inner)
        step = functools.partial(run_cond, branches)
        equation.plan.include(equation.index, step, branches)

    def custom(self, equation: Equation, inputs: _Inputs) -> None:
        """Adds the sites in the custom derivative of an equation.

        Only tangents of parameters are followed in it. All other inputs, including the
        parameters themselves, are values.
        """
        eqn, numbers = equation.eqn, unique_inputs(equation.eqn)
        shared = [inputs[i] for i in numbers]
        moved = [i for i, x in safe_zip(numbers, shared) if x and x.views]
        used = [i for i, var in enumerate(eqn.outvars) if equation.uses[var]]
        live = [i for i in used if equation.live[i]]
        reason = f"`{name_of(eqn)}` has a first derivative of its own, and no second"
        jaxpr = equation.plan.jaxpr
        traced = linearized(jaxpr, eqn, moved, live) if self.order == 1 else reason
        if isinstance(traced, str):
            self.fail(_views(inputs), equation, traced)
            return
        known: _Inputs = [None if x is None else x.frozen() for x in shared]
        for i in moved:
            x = inputs[i]
            assert x is not None
            known.append(Node.tangent(eqn.invars[i].aval, x.views))
        inner = self.plan(traced.jaxpr, traced.consts, known, [True for _ in live])
        self.fail(_views(inner.outs), equation, f"`{name_of(eqn)}` returns a parameter")
        tangents = [eqn.invars[i].aval for i in moved]
        step = CustomDerivative(jaxpr, eqn, inner, numbers, tangents, used, live)
        equation.plan.include(equation.index, step, [inner])

    def fail(self, views: Iterable[View], equation: Equation, reason: str) -> None:
        """Marks the leaves of some views as not covered, because of an equation."""
        line = source_line(equation.eqn)
        for view in views:
            led = [f"`{re.split(r'[^a-z_]', key)[0]}`" for key in view.key]
            parts = [reason, line and f"at {line}", led and f"after {', '.join(led)}"]
            self.failed.setdefault(view.leaf, ", ".join(filter(None, parts)))


def _curved(inputs: list[Node], node: Node) -> tuple[frozenset[int], frozenset[int]]:
    """The leaves in which a node is nonlinear, and those that it couples."""
    made_of = node.bases or inputs
    curved = frozenset[int]().union(*(x.curved for x in made_of))
    coupled = frozenset[int]().union(*(x.coupled for x in made_of))
    if not node.varies or node.is_linear:
        return curved, coupled
    views = [view for x in made_of for view in x.views]
    leaves = frozenset(view.leaf for view in views)
    if node.bases and len(views) == 1 and not curved and views[0].is_whole:
        return leaves, frozenset()
    return curved | leaves, coupled | leaves


def _views(inputs: Iterable[Node | None]) -> "itertools.chain[View]":
    return itertools.chain(*(x.views for x in inputs if x is not None))


def moved_rule(rule: Rule, value: View) -> Rule:
    """Converts a rule for a perturbed value, after moves of its axes, to one before.

    `value` is the perturbed value after the moves. For each axis, it has the axis that
    it was; None for an inserted axis of size 1. Axes of size 1 may have been removed.
    """
    shape, axes = value.type_of_leaf.shape, value.axes or ()
    if axes == tuple(range(len(shape))):
        return rule
    kept = [axis for axis in axes if axis is not None]
    order = [*(i for i, _ in enumerate(shape) if i not in kept), *kept]
    named: list[Axes] = [() for _ in shape]
    for axis, names in safe_zip(axes, rule.y_axes):
        if axis is not None:
            named[axis] = names

    def op(a: Any, w: Array) -> Array:
        y = rule.op(a, w).reshape([shape[i] for i in order])
        return jnp.transpose(y, sorted(range(len(order)), key=order.__getitem__))

    return dataclasses.replace(
        rule,
        op=op,
        arrange=lambda d: rule.arrange(jnp.transpose(d, order).reshape(value.shape)),
        outputs=tuple(named),
        key=f"{rule.key} moved by {axes} of {shape}",
    )


# Outputs, operands and, without perturbations, the values to perturb.
Run = tuple[list, list, list]


# Runs an equation with sites for some inputs, and with perturbations if there are any.
Step = Callable[[list, list | None], Run]


def perturbed(
    eqn: Any,
    operands: list[Callable[[list], Array]],
    ins: list,
    perturbations: list | None,
) -> Run:
    """Runs an equation with sites, whose `operands` are functions of its inputs."""
    # A constant may be a NumPy array.
    values = [jnp.asarray(operand(ins)) for operand in operands]
    out = eqn.primitive.bind(*ins, **eqn.params)
    if perturbations is None:
        return [out], values, [out]
    return [out + perturbations[0]], values, []


def run_call(eqn: Any, plan: "Plan", ins: list, perturbations: list | None) -> Run:
    """Runs an equation that calls a jaxpr with sites in it."""
    run = lambda *args: plan.run([*args[:-1]], args[-1])
    run = as_remat(eqn, run, 1) if is_remat(eqn) else as_called(eqn, run)
    return run(*ins, perturbations)


def run_scan(eqn: Any, plan: "Plan", ins: list, perturbations: list | None) -> Run:
    """Runs a `scan` with sites in its body."""
    params = eqn.params
    num_consts, num_carry = scan_sizes(eqn)
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]

    def body(carry: list, slices: tuple[list, list | None]) -> tuple[list, tuple]:
        xs, perturbations = slices
        outs, *rest = plan.run([*consts, *carry, *xs], perturbations)
        return outs[:num_carry], (outs[num_carry:], *rest)

    carry, (ys, operands, values) = lax.scan(
        body,
        carry,
        (ins[num_consts + num_carry :], perturbations),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys], operands, values


def run_cond(plans: list["Plan"], ins: list, perturbations: list | None) -> Run:
    """Runs a `cond` with sites in its branches, which have separate perturbations."""
    index, *args = ins
    nums = [len(plan.perturbations) for plan in plans]
    starts = [0, *itertools.accumulate(nums)]

    def branch(number: int) -> Callable[[list, list | None], Run]:
        part = slice(starts[number], starts[number + 1])
        return lambda args, perturbations: plans[number].run(
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
            operands, values = safe_zip(*every)
            chain = itertools.chain.from_iterable
            return outs, [*chain(operands)], [*chain(values)]

        return run

    branches = [with_zeros(number) for number, _ in enumerate(runs)]
    return lax.switch(index, branches, args, perturbations)


@dataclasses.dataclass(frozen=True)
class CustomDerivative:
    """An equation with a custom derivative that contains sites.

    - `plan`: that of the derivative, which is linear in tangents.
    - `numbers`: the inputs of the equation that the derivative takes first.
    - `tangents`: the types of the tangents, which it takes next.
    - `outs`: the outputs of the equation that are used.
    - `live`: the outputs whose tangents it returns.
    """

    jaxpr: Any
    eqn: Any
    plan: "Plan"
    numbers: list[int]
    tangents: list[Any]
    outs: list[int]
    live: list[int]

    def __call__(self, ins: list, perturbations: list | None) -> Run:
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

        every: list = [None for _ in self.eqn.outvars]
        outs = [self.eqn.outvars[i] for i in self.outs]
        used = run_equation(self.jaxpr, self.eqn, outs)(*ins)
        for i, out in safe_zip(self.outs, used):
            every[i] = out
        _, operands, values = run(known, None)
        if perturbations is not None:
            live = perturbed_by([every[i] for i in self.live], known, perturbations)
            for i, out in safe_zip(self.live, live):
                every[i] = out
        return every, operands, values


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
        self.outs: list[Node | None] = []
        # Values that have a perturbation and are used only once, as views of it.
        self.perturbed_by: dict[Any, View] = {}

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
                outs, *rest = step(ins, part)
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
            if before is None or eqn.primitive.name not in MOVES:
                continue
            for moved in extend_view(before, eqn, 0) or ():
                if moved and moved.axes is not None and moved.is_isometry:
                    self.perturbed_by[eqn.outvars[0]] = moved
        for var in eqn.outvars:
            if uses[var] != 1:
                self.perturbed_by.pop(var, None)

    def follow_out(self, inner: "Plan", outs: list) -> None:
        """Follows a perturbed value out of a call that is about to be included."""
        for var, out in safe_zip(inner.jaxpr.outvars, outs):
            before = inner._perturbed(var)
            if before is not None:
                number = before.leaf + len(self.perturbations)
                self.perturbed_by[out] = dataclasses.replace(before, leaf=number)

    def perturbed_before(self, eqn: Any, rules: dict[int, Rule]) -> View | None:
        """The summand of a parameter, if it is perturbed and as large as the sum."""
        name = eqn.primitive.name
        if name not in SUMS or len(rules) != 1 or (name == "sub" and 0 in rules):
            return None
        (position,) = rules
        other, out = eqn.invars[1 - position], eqn.outvars[0]
        return self._perturbed(other) if other.aval.shape == out.aval.shape else None

    def _perturbed(self, atom: Any) -> View | None:
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
