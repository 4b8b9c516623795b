"""Finds the sites of a program.

A `Finder` goes through the equations of a program one by one. Values of leaves and
constants alone are the same for all examples: their derivatives are known as sums of
views of leaves. Where such a value meets an example, there is a site.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array

from .._base.backward import unique_inputs
from .._base.dtypes import is_complex
from .._base.jaxpr_types import Atom, Eqn, Jaxpr, JaxprAndConsts
from .._base.jaxprs import (
    callee,
    literal,
    live_in_scan,
    live_variables,
    source_line,
)
from .._base.mesh import in_this_mesh, is_reduction
from .._base.primitives import (
    CUSTOM,
    IDENTITIES,
    is_unknown_object,
    name_of,
    unknown_parameters,
)
from .._base.trees import safe_zip
from .._base.versions import scan_sizes
from .custom import linearized
from .plan import (
    CustomDerivative,
    perturbed,
    Plan,
    PlannedStep,
    run_call,
    run_cond,
    run_scan,
)
from .rules import DENSE_PRODUCTS, find_rule
from .site import AxisNames, Rule, Site
from .values import Node, output_nodes, pushforward_of, slope_of
from .view_rules import extend_view
from .views import leaf_view, Loop, Read, View


_Struct = jax.ShapeDtypeStruct


# The largest number of ways from a leaf to a value that are followed.
_MOST_VIEWS = 16


Inputs = list[Node | None]


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of a plan, and which of its outputs are differentiated.

    `uses` counts how often variables are used.
    """

    plan: "Plan"
    index: int
    eqn: Eqn
    live: list[bool]
    uses: collections.Counter


class Finder:
    """Goes through a jaxpr and the jaxprs that it calls.

    - `order`: the highest derivative that will be taken with the sites.
    - `uses`: the leaves whose products with constants are sites.
    - `failed`: the leaves without a rule, with reasons.
    - `values`: the values that views read.
    """

    def __init__(self, order: int = 1, uses: Collection[int] = ()) -> None:
        self.order, self.uses = order, frozenset(uses)
        self.failed: dict[int, str] = {}
        self.values: list[Node] = []
        self._numbers: dict[Any, int] = {}
        self._num_loops = 0

    def plan(
        self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Inputs, live: Sequence[bool]
    ) -> "Plan":
        """The plan of a jaxpr, of which some outputs are differentiated."""
        plan = Plan(jaxpr, consts)
        # To be returned is a use, too. A value with one use has one cotangent.
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        uses = collections.Counter(x for x in atoms if not isinstance(x, jex.Literal))
        # Where nothing that is differentiated depends on a value, no site is needed.
        needed = live_variables(jaxpr, live)
        # The variables that are the same for all examples, which equations add to.
        shared = {v: x for v, x in safe_zip(jaxpr.invars, inputs) if x}
        for var, value in safe_zip(jaxpr.constvars, consts):
            shared[var] = Node.constant_of(var.aval, value)

        def of(atom: Atom) -> Node | None:
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
            # Only now is it known whether the equation's output is perturbed.
            plan.follow(eqn, uses)
        plan.outs = [of(atom) for atom in jaxpr.outvars]
        return plan

    def step(self, equation: Equation, inputs: Inputs) -> Inputs:
        """Adds one equation to the plan, and returns its outputs that are shared."""
        eqn = equation.eqn
        name = name_of(eqn)
        none: Inputs = [None for _ in eqn.outvars]
        nodes = [x for x in inputs if x is not None]
        has_views = any(x.views for x in nodes)
        is_shared, is_live = len(nodes) == len(inputs), any(equation.live)
        # Values of examples have a site only where they meet views, and where something
        # that is differentiated depends on it.
        if not eqn.outvars or not (is_shared or (has_views and is_live)):
            return none
        # Calls are entered first: in them, some values may be shared, and others not.
        closed = callee(eqn)
        if closed is not None:
            return self.call(equation, closed, inputs)
        if is_reduction(eqn) and is_live:
            # A sum over devices would mix examples.
            reason = f"`{name}` of an array that is unreduced or reduced over devices"
            self.fail(views_of(inputs), equation, reason)
        if name in IDENTITIES:
            return inputs
        if is_shared and not (has_views and is_live and self._is_site(eqn, nodes)):
            if is_unknown_object(eqn) and is_live:
                self.fail(views_of(inputs), equation, f"no rule for `{name}`")
            return self.shared(equation, nodes)
        # From here on, views meet what differs between examples.
        unknown = unknown_parameters(eqn)
        if unknown:
            reason = f"`{name}` with {unknown}, which no rule knows"
            self.fail(views_of(inputs), equation, reason)
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

    def _is_site(self, eqn: Eqn, inputs: list[Node]) -> bool:
        """Whether a leaf and what is the same for all examples make a site."""
        # A lookup by constant tokens does: its rule knows which rows have a gradient,
        # and a view does not.
        if name_of(eqn) in ("gather", "dynamic_slice"):
            return find_rule(eqn, 0) is not None
        # So does a product with a constant, if it is to count as a use of the leaf.
        if name_of(eqn) not in DENSE_PRODUCTS:
            return False
        moved = [i for i, x in enumerate(inputs) if x.varies]
        leaves = {view.leaf for i in moved for view in inputs[i].views}
        is_alone = len(moved) == 1 and self.uses.issuperset(leaves)
        return is_alone and find_rule(eqn, moved[0]) is not None

    def shared(self, equation: Equation, inputs: list[Node]) -> Inputs:
        """The outputs of an equation whose inputs are the same for all examples."""
        eqn, jaxpr = equation.eqn, equation.plan.jaxpr
        # What nothing uses gets no node, so that it is never computed.
        used = [var for var in eqn.outvars if equation.uses[var]]
        nodes = output_nodes(jaxpr, eqn, tuple(inputs), used)
        linear = self._linear(eqn, inputs)
        for var, node in safe_zip(used, nodes):
            output = eqn.outvars.index(var)
            views: list[View] = []
            if node.varies:
                views = self._views_of(equation, inputs, output, node, linear)
            # Ways from a leaf multiply: each `x = x @ x` has twice as many as the one
            # before.
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
        node.views = tuple(self._views_of(equation, [x], 0, node, None))
        node.curved, node.coupled = _curved([x], node)
        return node

    def _linear(self, eqn: Eqn, inputs: list[Node]) -> list[list[View]] | None:
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
    ) -> list[View]:
        """The derivative of an output of an equation, as a sum of views."""
        bases = node.bases
        by_slopes = sum(len(x.views) for x in bases)
        # Two ways from the same array are merged, with the sum of their slopes.
        if linear is not None and (not bases or len(linear[output]) <= by_slopes):
            return linear[output]
        # Any number of elementwise equations is one product with a slope for each base.
        if bases:
            return [
                self._times(view, node, base) for base in bases for view in base.views
            ]
        views: list[View] = []
        # Anything else is left to JAX's own derivative.
        for position, x in enumerate(inputs):
            if x.views:
                views += self._pushed(x.views, equation, inputs, position, output)
        return views

    def _times(self, view: View, node: Node, base: Node) -> View:
        """A view times the derivative of an elementwise function."""
        value = self._number(slope_of(node, base), (node, base))
        # Zeros around a view come last (see `View`), so it is multiplied without them,
        # by a part of the slope.
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
            f"times value {value.index}" + (f" at {place.start}" if place else ""),
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
        # A derivative depends on all inputs, also on those that no leaf moves.
        values = [self._number(x, x) for x in inputs]
        indices = [value.index for value in values]
        key = f"{name_of(eqn)}[{position}, {output}]{indices}"
        settings = {"is_isometry": False, "values": values}
        shape, push = var.aval.shape, in_this_mesh(push)
        return [view.then(key, push, shape, None, **settings) for view in views]

    def _number(self, value: Node, key: Any) -> Read:
        """How views read a value."""
        # Keys of views have these numbers: two views are equal if they read the same.
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return Read(self._numbers[key], value.loops)

    # Where values meet an example.

    def meet(self, equation: Equation, inputs: Inputs) -> None:
        """Adds an equation in which views meet other values, using their rules."""
        eqn, plan = equation.eqn, equation.plan
        name = name_of(eqn)
        # Several inputs may have views, as in a `concatenate`. Each needs a rule.
        of_views = {i: x for i, x in enumerate(inputs) if x is not None and x.views}
        has_examples = any(x is None for x in inputs)
        tried = {i: find_rule(eqn, i) for i in of_views}
        rules = {i: rule for i, rule in tried.items() if rule is not None}
        reason = f"no rule for `{name}` with a parameter in this place"
        for i, x in of_views.items():
            if i not in rules:
                self.fail(x.views, equation, reason)
        if len(rules) < len(tried):
            return
        # `x / w` is linear in `1 / w`, whose views lead on to `w`.
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
            # A perturbed value is a view whose leaf is the perturbation, so that moves
            # of its axes are followed as those of a leaf.
            value = leaf_view(len(plan.perturbations), out.aval)
            plan.perturbations.append(_Struct(out.aval.shape, out.aval.dtype))
            step = functools.partial(perturbed, eqn, operands)
            plan.steps[equation.index] = PlannedStep(step, 1)
        plan.perturbed_by[out] = value
        # Operands are functions of the equation's inputs, computed where it runs.
        structs = [_Struct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]

        def add_operand(of: Callable[[list], Array]) -> int:
            operands.append(of)
            plan.operands.append(jax.eval_shape(of, structs))
            return len(plan.operands) - 1

        # All views of an input meet the same operand and the same cotangent.
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
                    is_of_constant=not has_examples and rule.token is None,
                )
                for view in x.views
            ]

    def call(
        self, equation: Equation, closed: JaxprAndConsts, inputs: Inputs
    ) -> Inputs:
        inner = self.plan(closed.jaxpr, closed.consts, inputs, equation.live)
        equation.plan.follow_out(inner, equation.eqn.outvars)
        step = functools.partial(run_call, equation.eqn, inner)
        equation.plan.include(equation.index, step, [inner])
        return inner.outs

    def scan(self, equation: Equation, inputs: Inputs) -> None:
        params = equation.eqn.params
        closed, length = params["jaxpr"], params["length"]
        num_consts, num_carry = scan_sizes(equation.eqn)
        first_x = num_consts + num_carry
        # What is carried may be another function of a parameter in each step.
        carried = [*views_of(inputs[num_consts:first_x])]
        self.fail(carried, equation, "a parameter is carried through a `scan`")
        if carried:
            return
        # An outer loop is met before its inner ones, and so has the smaller number.
        loop = Loop(self._num_loops, length)
        self._num_loops += 1
        inner_inputs: Inputs = []
        for position, x in enumerate(inputs):
            if x is None or num_consts <= position < first_x:
                # A carry differs between steps, even if its initial value is shared.
                inner_inputs.append(None)
            elif position < first_x:
                inner_inputs.append(x)
            else:
                inner_inputs.append(x.sliced(loop))
        # A carry is differentiated if that of any later step is.
        live = live_in_scan(equation.eqn, equation.live).outs
        inner = self.plan(closed.jaxpr, closed.consts, inner_inputs, live)
        returned = views_of(itertools.compress(inner.outs, live))
        self.fail(returned, equation, "a `scan` returns a parameter")
        inner.sites = [site.within(loop) for site in inner.sites]
        step = functools.partial(run_scan, equation.eqn, inner)
        equation.plan.include(equation.index, step, [inner], (length,))

    def cond(self, equation: Equation, inputs: Inputs) -> None:
        """Adds the sites of all branches; those of branches not taken give zero."""
        branches, start = [], len(self.values)
        for closed in equation.eqn.params["branches"]:
            inner = self.plan(closed.jaxpr, closed.consts, inputs[1:], equation.live)
            returned = views_of(itertools.compress(inner.outs, equation.live))
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

    def custom(self, equation: Equation, inputs: Inputs) -> None:
        """Adds the sites in the custom derivative of an equation.

        Only tangents of parameters are followed in it. All other inputs, including the
        parameters themselves, are values.
        """
        # A variable that is passed twice has one tangent.
        eqn, numbers = equation.eqn, unique_inputs(equation.eqn)
        shared = [inputs[i] for i in numbers]
        moved = [i for i, x in safe_zip(numbers, shared) if x and x.views]
        used = [i for i, var in enumerate(eqn.outvars) if equation.uses[var]]
        live = [i for i in used if equation.live[i]]
        # A second derivative would also have to follow how the first one changes with
        # its values, which are frozen here.
        reason = f"`{name_of(eqn)}` has a first derivative of its own, and no second"
        jaxpr = equation.plan.jaxpr
        traced = linearized(jaxpr, eqn, moved, live) if self.order == 1 else reason
        if isinstance(traced, str):
            self.fail(views_of(inputs), equation, traced)
            return
        # The derivative takes values first, and then tangents, which have the views.
        ins: Inputs = [None if x is None else x.frozen() for x in shared]
        for i in moved:
            x = inputs[i]
            assert x is not None
            ins.append(Node.tangent(eqn.invars[i].aval, x.views))
        inner = self.plan(traced.jaxpr, traced.consts, ins, [True for _ in live])
        self.fail(
            views_of(inner.outs), equation, f"`{name_of(eqn)}` returns a parameter"
        )
        tangents = [eqn.invars[i].aval for i in moved]
        step = CustomDerivative(jaxpr, eqn, inner, numbers, tangents, used, live)
        equation.plan.include(equation.index, step, [inner])

    def fail(self, views: Iterable[View], equation: Equation, reason: str) -> None:
        """Marks the leaves of some views as not covered, because of an equation."""
        line = source_line(equation.eqn)
        for view in views:
            led = [f"`{name}`" for name in view.step_names]
            parts = [reason, line and f"at {line}", led and f"after {', '.join(led)}"]
            self.failed.setdefault(view.leaf, ", ".join(filter(None, parts)))


class _Curved(NamedTuple):
    """The leaves in which a node is nonlinear, and those that it couples."""

    curved: frozenset[int]
    coupled: frozenset[int]


def _curved(inputs: list[Node], node: Node) -> _Curved:
    """The leaves in which a node is nonlinear, and those that it couples."""
    # A base may lie before the inputs; what is in between is elementwise.
    made_of = node.bases or inputs
    curved = frozenset[int]().union(*(x.curved for x in made_of))
    coupled = frozenset[int]().union(*(x.coupled for x in made_of))
    if not node.varies or node.is_linear:
        return _Curved(curved, coupled)
    views = [view for x in made_of for view in x.views]
    leaves = frozenset(view.leaf for view in views)
    # Each entry depends on one entry of the leaf, so mixed derivatives are zero.
    if node.bases and len(views) == 1 and not curved and views[0].is_whole:
        return _Curved(leaves, frozenset())
    return _Curved(curved | leaves, coupled | leaves)


def views_of(inputs: Iterable[Node | None]) -> "itertools.chain[View]":
    return itertools.chain(*(x.views for x in inputs if x is not None))


def moved_rule(rule: Rule, value: View) -> Rule:
    """Converts a rule for a perturbed value, after moves of its axes, to one before.

    `value` is the perturbed value after the moves. For each axis, it has the axis that
    it was; None for an inserted axis of size 1. Axes of size 1 may have been removed.
    """
    shape, axes = value.type_of_leaf.shape, value.axes or ()
    if axes == tuple(range(len(shape))):
        return rule
    # Axes that were removed had size 1, so a reshape puts them back, in front.
    present = [axis for axis in axes if axis is not None]
    order = [*(i for i, _ in enumerate(shape) if i not in present), *present]
    named: list[AxisNames] = [() for _ in shape]
    for axis, names in safe_zip(axes, rule.y_axes):
        if axis is not None:
            named[axis] = names

    def op(a: Any, w: Array) -> Array:
        y = rule.op(a, w).reshape([shape[i] for i in order])
        return jnp.transpose(y, sorted(range(len(order)), key=order.__getitem__))

    def before(d: Array) -> Array:
        return jnp.transpose(d, order).reshape(value.shape)

    forming = rule.forming
    if forming is not None:
        cotangent = forming.cotangent
        moved = lambda d: cotangent(before(d))
        forming = dataclasses.replace(forming, cotangent=moved)
    return dataclasses.replace(
        rule,
        op=op,
        arrange=lambda d: rule.arrange(before(d)),
        outputs=tuple(named),
        forming=forming,
        key=f"{rule.key} moved by {axes} of {shape}",
    )
