"""Values that a program computes from parameters alone, shared by all examples.

Examples are penalties, masks, weight normalisation and reparametrisations. Their values
and derivatives do not depend on an example, so they are computed once. A `Node` is such
a value. JAX runs it as written in the program, with all custom derivatives.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base.differentiable import Derivative, derivative_of, pushed
from .._base.jaxprs import literal, run_equation
from .._base.mesh import full_varying_as
from .._base.primitives import (
    callee,
    inner_jaxprs,
    is_flat,
    LINEAR_IN_ALL,
    name_of,
    with_trait,
)


# A `scan` around an equation: its index, which grows inwards, and its length.
Loop = tuple[int, int]

_ELEMENTWISE = with_trait("entries")
_LINEAR = _ELEMENTWISE & (LINEAR_IN_ALL | with_trait("straight"))


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A value computed from leaves and constants alone.

    - `order`: the position of the node among those of the program.
    - `loops`: the loops in whose steps the value differs, outermost first. The value
        has a leading axis for each.
    - `run`: computes the outputs of an equation from `inputs`; `output` is the index of
        this one.
    - `varies`: whether its derivative may be nonzero.
    - `bases`: the nodes in which it is elementwise, if any; so is everything in
        between.
    - `is_linear`: whether it is linear in these.
    - `is_reverse`: whether JAX has its derivative in reverse mode only.
    """

    order: int
    loops: tuple[Loop, ...]
    shape: tuple[int, ...]
    dtype: Any
    varies: bool
    inputs: tuple["Node", ...] = ()
    run: Callable[..., list] | None = None
    output: int = 0
    leaf: int | None = None
    constant: Any = None
    bases: tuple["Node", ...] = ()
    is_linear: bool = True
    is_reverse: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Slope:
    """The elementwise derivative of a node with respect to `base`."""

    node: Node
    base: Node

    @property
    def loops(self) -> tuple[Loop, ...]:
        return self.node.loops


Value = Node | Slope


class Graph:
    """The nodes of a program."""

    def __init__(self) -> None:
        self._order = itertools.count()

    def leaf(self, number: int, aval: Any, *, varies: bool) -> Node:
        order = next(self._order)
        return Node(order, (), aval.shape, aval.dtype, varies, leaf=number)

    def constant(self, aval: Any, value: Any) -> Node:
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
        order = next(self._order)
        return Node(order, (), aval.shape, aval.dtype, False, constant=value)

    def literal(self, atom: Any) -> Node:
        return self.constant(atom.aval, literal(atom))

    def sliced(self, node: Node, loop: Loop) -> Node:
        """The slices of a node along its first axis, for the body of a scan."""
        loops, shape = (*node.loops, loop), node.shape[1:]
        return self._made_of(node, lambda x: [x], loops=loops, shape=shape)

    def frozen(self, node: Node) -> Node:
        """The value of a node without its derivative."""
        return self._made_of(node, lambda x: [x], varies=False)

    def tangent(self, aval: Any) -> Node:
        """A node that is linear in a leaf, so its derivatives may be taken at zero."""
        order, run = next(self._order), lambda: [full_varying_as(aval, 0)]
        return Node(order, (), aval.shape, aval.dtype, True, run=run)

    def inverse(self, node: Node) -> Node:
        """One over a node, elementwise."""
        bases = node.bases or (node,)
        return self._made_of(node, lambda x: [1 / x], bases=bases, is_linear=False)

    def _made_of(self, node: Node, run: Callable[..., list], **changes: Any) -> Node:
        """A node that `run` computes from another one, with the same type."""
        order = next(self._order)
        own = {"bases": (), "is_linear": True, **changes}
        made = {"inputs": (node,), "run": run, "output": 0}
        is_none = {"leaf": None, "constant": None}
        return dataclasses.replace(node, order=order, **made, **is_none, **own)

    def outputs(
        self, jaxpr: Any, eqn: Any, inputs: tuple[Node, ...], outs: list
    ) -> list[Node]:
        """Some of the outputs of an equation whose inputs are nodes."""
        loops = merged_loops(*(node.loops for node in inputs))
        run = _in_loops(run_equation(jaxpr, eqn, outs), loops, inputs)
        order = next(self._order)
        varies = any(node.varies for node in inputs) and not is_flat(eqn)
        is_reverse = any(node.is_reverse for node in inputs) or _is_reverse(eqn)
        bases, is_linear = _bases(jaxpr, eqn, inputs) if varies else ((), True)
        return [
            Node(
                order,
                loops,
                var.aval.shape,
                var.aval.dtype,
                varies and jnp.issubdtype(var.aval.dtype, jnp.inexact),
                inputs,
                run,
                output,
                bases=bases,
                is_linear=is_linear,
                is_reverse=is_reverse,
            )
            for output, var in enumerate(outs)
        ]


def merged_loops(*loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
    """The loops of several values, outermost first."""
    # Inner loops have larger indices.
    return tuple(sorted(set(itertools.chain(*loops))))


def _in_loops(
    run: Callable[..., list], loops: tuple[Loop, ...], inputs: tuple[Node, ...]
) -> Callable[..., list]:
    for loop in reversed(loops):
        axes = [0 if loop in node.loops else None for node in inputs]
        run = jax.vmap(run, axes)
    return run


def _is_reverse(eqn: Any) -> bool:
    if name_of(eqn).startswith("custom_vjp"):
        return True
    return any(_is_reverse(own) for sub in inner_jaxprs(eqn) for own in sub.eqns)


def pushforward_of(
    jaxpr: Any, eqn: Any, position: int, var: Any
) -> Callable[..., Array] | None:
    """The derivative of the output `var` of an equation in one of its inputs.

    It is a function of a tangent and of the values of all inputs; None if JAX has only
    reverse mode, and no transpose of that.
    """
    run = run_equation(jaxpr, eqn, [var])
    at = lambda values: lambda x: run(*values[:position], *x, *values[position + 1 :])
    derivative: Derivative = "both"
    if _is_reverse(eqn):
        zeros = [full_varying_as(atom.aval, 0) for atom in eqn.invars]
        name, point = f"`{name_of(eqn)}`", [zeros[position]]
        derivative = derivative_of(name, at(zeros), point)

    def push(tangent: Array, *values: Array) -> Array:
        tangents = [tangent.astype(values[position].dtype)]
        (out,) = pushed(at(values), [values[position]], tangents, derivative)
        return out

    return None if derivative == "rows" else push


def _bases(
    jaxpr: Any, eqn: Any, inputs: tuple[Node, ...]
) -> tuple[tuple[Node, ...], bool]:
    """The nodes in which an equation's outputs are elementwise, and if linearly so."""
    name, shape = name_of(eqn), eqn.outvars[0].aval.shape
    varying = [node for node in inputs if node.varies]
    if any(node.shape != shape for node in varying):
        return (), True
    if name == "custom_jvp_call":
        is_known = len(eqn.outvars) == 1 and _has_elementwise_rule(jaxpr, eqn)
    else:
        is_known = name in _ELEMENTWISE and _is_real(eqn)
    if not is_known:
        return (), True
    found: dict[Node, None] = {}
    for node in varying:
        found.update(dict.fromkeys(node.bases or (node,)))
    is_linear = all(node.is_linear for node in varying) and _is_linear(eqn, inputs)
    return tuple(found), is_linear


def _is_linear(eqn: Any, inputs: tuple[Node, ...]) -> bool:
    """Whether an elementwise equation is linear in all inputs that depend on leaves."""
    name = name_of(eqn)
    varying = [node.varies for node in inputs]
    if name in _LINEAR:
        return True
    if name == "mul":
        return sum(varying) == 1
    if name == "div":
        return not varying[1]
    return name == "select_n" and not varying[0]


def _is_real(eqn: Any) -> bool:
    """Whether all is real: complex functions may have no complex derivative."""
    atoms = (*eqn.invars, *eqn.outvars)
    return not any(jnp.issubdtype(x.aval.dtype, jnp.complexfloating) for x in atoms)


def _are_alike(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether all inputs and outputs of an equation have one shape or are scalars."""
    outs = [var.aval.shape for var in eqn.outvars]
    ins = [atom.aval.shape for atom in eqn.invars]
    return all(own == shape for own in outs) and all(own in (shape, ()) for own in ins)


def _has_elementwise_rule(jaxpr: Any, eqn: Any) -> bool:
    """Whether a function with custom derivatives is elementwise, up to second order.

    What counts are the derivatives, not the code of the function.
    """
    shape = eqn.outvars[0].aval.shape
    are_real = all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars)
    if not (are_real and _are_alike(eqn, shape)):
        return False
    apply = run_equation(jaxpr, eqn, eqn.outvars)
    run = lambda ins: apply(*ins)

    def first(ins: list, tangents: list) -> list:
        return jax.jvp(run, (ins,), (tangents,))[1]

    def second() -> list:
        ins, *tangents = (
            [full_varying_as(atom.aval, 0) for atom in eqn.invars] for _ in range(4)
        )
        return jax.jvp(first, (ins, tangents[0]), (tangents[1], tangents[2]))[1]

    return _is_elementwise(jax.make_jaxpr(second)().jaxpr, shape)


def _is_elementwise(jaxpr: Any, shape: tuple[int, ...]) -> bool:
    if any(var.aval.shape not in (shape, ()) for var in jaxpr.constvars):
        return False
    for eqn in jaxpr.eqns:
        name, closed = name_of(eqn), callee(eqn)
        avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
        if all(aval.shape == () for aval in avals) and shape:
            continue  # Depends on no entry.
        if name in ("broadcast_in_dim", "iota"):
            # Depends on a scalar, which is not one of the entries.
            is_scalar = all(atom.aval.shape == () for atom in eqn.invars)
            if not is_scalar or eqn.outvars[0].aval.shape != shape:
                return False
        elif closed is not None:
            if not _is_elementwise(closed.jaxpr, shape):
                return False
        elif name == "custom_jvp_call":
            if not all(_is_elementwise(own, shape) for own in inner_jaxprs(eqn)):
                return False
        elif name not in _ELEMENTWISE or not (_is_real(eqn) and _are_alike(eqn, shape)):
            return False
    return True


def evaluate(values: Iterable[Value], leaves: list) -> list[Array]:
    """Computes values at these leaves."""
    values = list(values)
    known = _evaluated([node for value in values for node in _inputs(value)], leaves)
    return [
        known[value] if isinstance(value, Node) else _slope(value, known)
        for value in values
    ]


def nodes_up_to(
    last: Iterable[Node], is_known: Callable[[Node], bool] = lambda _: False
) -> list[Node]:
    """All nodes that some nodes are computed from, in order, except known ones."""
    found: dict[Node, None] = {}
    stack = [*last]
    while stack:
        node = stack.pop()
        if node not in found and not is_known(node):
            found[node] = None
            stack += node.inputs
    return sorted(found, key=lambda node: node.order)


def _between(slope: Slope) -> list[Node]:
    """The nodes on the way from the base to the node, in order."""
    is_before = lambda node: node is slope.base or slope.base not in node.bases
    return nodes_up_to([slope.node], is_before)


def _inputs(value: Value) -> list[Node]:
    """The nodes that a value is computed from, apart from those on the way to it."""
    if isinstance(value, Node):
        return [value]
    between = _between(value)
    inputs = itertools.chain(*(node.inputs for node in between))
    return [value.base, *(node for node in inputs if node not in between)]


def _slope(slope: Slope, known: dict[Node, Array]) -> Array:
    inputs = {node: known[node] for node in _inputs(slope)}
    base = inputs[slope.base]
    along = lambda x: _evaluated([slope.node], [], {**inputs, slope.base: x})[
        slope.node
    ]
    return jax.jvp(along, (base,), (jnp.ones_like(base),))[1]


def _evaluated(
    wanted: Iterable[Node], leaves: list, known: dict[Node, Array] | None = None
) -> dict[Node, Array]:
    known = {} if known is None else known
    made: dict[int, list] = {}
    for node in nodes_up_to(wanted, known.__contains__):
        if node.leaf is not None:
            known[node] = leaves[node.leaf]
        elif node.run is None:
            known[node] = node.constant
        else:
            if node.order not in made:
                made[node.order] = node.run(*(known[x] for x in node.inputs))
            known[node] = made[node.order][node.output]
    return known
