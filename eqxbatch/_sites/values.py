"""Values that a program computes from parameters alone, shared by all examples.

Examples are penalties, masks, weight normalisation and reparametrisations. Their values
and derivatives do not depend on an example, so they are computed once. A `Node` is such
a value. JAX runs it as written in the program, with all custom derivatives. Its
derivative is a sum of views.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.jaxpr_types import Aval, Eqn, Jaxpr
from .._base.jaxprs import callee, inner_jaxprs, run_equation
from .._base.modes import Derivative, derivative_of, pushed
from .._base.primitives import (
    is_flat,
    LINEAR_IN_ALL,
    LINEAR_IN_EACH,
    LINEAR_IN_SOME,
    name_of,
    with_trait,
)
from .._base.structs import full_varying_as
from .._base.trees import safe_zip
from .views import Loop, Loops, merged_loops, Values, View


# The numbers of nodes. A node is made after all that it is computed from.
_ORDERS = itertools.count()


_ELEMENTWISE = with_trait("entries")


# Linear in all inputs together, as far as second derivatives are concerned.
_JOINTLY_LINEAR = LINEAR_IN_ALL | {*LINEAR_IN_SOME} | with_trait("straight")


@dataclasses.dataclass(eq=False)
class Node:
    """A value computed from leaves and constants alone, the same for all examples.

    - `loops`: the loops in whose steps the value differs, outermost first. The value
        has a leading axis for each.
    - `run`: computes the outputs of an equation from `inputs`; `output` is the index of
        this one.
    - `varies`: whether its derivative may be nonzero.
    - `bases`: the nodes in which it is elementwise, if any; so is everything in
        between.
    - `is_linear`: whether it is linear in these, or else in `inputs`.
    - `is_reverse`: whether JAX has its derivative in reverse mode only.
    - `views`: its derivative.
    - `curved`: the leaves in which it is nonlinear. For those also in `coupled`, some
        entry has a mixed second derivative with another entry of this or another leaf.
    - `order`: larger than that of all inputs.
    """

    loops: Loops
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
    views: tuple["View", ...] = ()
    curved: frozenset[int] = frozenset()
    coupled: frozenset[int] = frozenset()
    order: int = dataclasses.field(init=False, default_factory=_ORDERS.__next__)

    def __repr__(self) -> str:
        if self.leaf is not None:
            source = f"leaf {self.leaf}"
        elif self.run is None:
            source = "a constant"
        else:
            num = len(self.inputs)
            source = f"computed from {num} value{'s' * (num != 1)}"
        views = ", ".join(map(repr, self.views))
        derivative = f"; views: {views}" if views else ""
        return f"<value {self.shape}: {source}{derivative}>"

    @classmethod
    def of(cls, aval: Aval, varies: bool, **settings: Any) -> "Node":
        """A node of this type that is computed from no other one."""
        return cls((), aval.shape, aval.dtype, varies, **settings)

    @classmethod
    def constant_of(cls, aval: Aval, value: Any) -> "Node":
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
        return cls.of(aval, False, constant=value)

    @classmethod
    def tangent(cls, aval: Aval, views: tuple["View", ...]) -> "Node":
        """A node that is linear in a leaf, so its derivatives may be taken at zero."""
        return cls.of(aval, True, run=lambda: [full_varying_as(aval, 0)], views=views)

    def sliced(self, loop: Loop) -> "Node":
        """Its slices along the first axis, for the body of a scan."""
        # A loop adds a leading axis to the value, and takes it off the shape in a step.
        changes = {"loops": (*self.loops, loop), "shape": self.shape[1:]}
        changes |= {"views": tuple(view.scanned(loop) for view in self.views)}
        changes |= {"curved": self.curved, "coupled": self.coupled}
        return self._then(lambda x: [x], **changes)

    def frozen(self) -> "Node":
        """Its value without the derivative."""
        return self._then(lambda x: [x], varies=False)

    def inverse(self) -> "Node":
        """One over it, elementwise."""
        # Elementwise in a value, and so in what that is elementwise in.
        bases = self.bases or (self,)
        return self._then(lambda x: [1 / x], bases=bases, is_linear=False)

    def _then(self, run: Callable[..., list], **changes: Any) -> "Node":
        """A node that `run` computes from this one, with the same type."""
        reset = {"leaf": None, "constant": None, "bases": (), "is_linear": True}
        reset |= {"views": (), "curved": frozenset(), "coupled": frozenset()}
        reset |= {"inputs": (self,), "run": run, "output": 0}
        return dataclasses.replace(self, **{**reset, **changes})


def output_nodes(
    jaxpr: Jaxpr, eqn: Eqn, inputs: tuple[Node, ...], outs: Values
) -> list[Node]:
    """Some of the outputs of an equation whose inputs are nodes."""
    loops = merged_loops(*(node.loops for node in inputs))
    # All outputs have one `run`, so that `evaluated` runs an equation once.
    run = _in_loops(run_equation(jaxpr, eqn, outs), loops, inputs)
    varies = any(node.varies for node in inputs) and not is_flat(eqn)
    is_reverse = any(node.is_reverse for node in inputs) or _is_reverse(eqn)
    bases, is_linear = _bases(jaxpr, eqn, inputs) if varies else _Bases((), True)
    return [
        Node(
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


def _in_loops(
    run: Callable[..., list], loops: Loops, inputs: tuple[Node, ...]
) -> Callable[..., list]:
    # Outermost last, so that it has the first axis.
    for loop in reversed(loops):
        axes = [0 if loop in node.loops else None for node in inputs]
        run = jax.vmap(run, axes)
    return run


def _is_reverse(eqn: Eqn) -> bool:
    if name_of(eqn).startswith("custom_vjp"):
        return True
    return any(_is_reverse(inner) for sub in inner_jaxprs(eqn) for inner in sub.eqns)


def pushforward_of(
    jaxpr: Jaxpr, eqn: Eqn, position: int, var: Any
) -> Callable[..., Array] | None:
    """The derivative of the output `var` of an equation in one of its inputs.

    It is a function of a tangent and of the values of all inputs; None if JAX has only
    reverse mode, and no transpose of that.
    """
    run = run_equation(jaxpr, eqn, [var])
    put = lambda values: lambda x: run(*values[:position], *x, *values[position + 1 :])
    derivative: Derivative = "both"
    if _is_reverse(eqn):
        # A `custom_vjp` has no forward mode, but the transpose of its backward pass is
        # one, if that is linear.
        zeros = [full_varying_as(atom.aval, 0) for atom in eqn.invars]
        name, point = f"`{name_of(eqn)}`", [zeros[position]]
        derivative = derivative_of(name, put(zeros), point)

    def push(tangent: Array, *values: Array) -> Array:
        tangents = [tangent.astype(values[position].dtype)]
        (out,) = pushed(put(values), [values[position]], tangents, derivative)
        return out

    return None if derivative == "rows" else push


class _Bases(NamedTuple):
    """The nodes in which a value is elementwise, and whether it is linear in them.

    Without such nodes, whether it is linear in the inputs of its equation.
    """

    nodes: tuple[Node, ...]
    is_linear: bool


def _bases(jaxpr: Jaxpr, eqn: Eqn, inputs: tuple[Node, ...]) -> _Bases:
    """The nodes in which an equation's outputs are elementwise."""
    name, shape = name_of(eqn), eqn.outvars[0].aval.shape
    # Constants, and what has a derivative of zero, may have any shape and do anything.
    varying = [node for node in inputs if node.varies]
    is_linear = _is_linear_equation(eqn, [node.varies for node in inputs])
    # An input that is broadcast has entries that several outputs depend on.
    if any(node.shape != shape for node in varying):
        return _Bases((), is_linear)
    # Of a custom derivative, the rule counts; of anything else, the table.
    if name == "custom_jvp_call":
        is_known = len(eqn.outvars) == 1 and _has_elementwise_rule(jaxpr, eqn)
    else:
        is_known = name in _ELEMENTWISE and _is_real(eqn)
    if not is_known:
        return _Bases((), is_linear)
    # Elementwise in the inputs, and so in what these are elementwise in.
    bases: dict[Node, None] = {}
    for node in varying:
        bases.update(dict.fromkeys(node.bases or (node,)))
    are_linear = all(node.is_linear for node in varying if node.bases)
    return _Bases(tuple(bases), is_linear and are_linear)


def _is_linear_equation(eqn: Eqn, varying: list[bool]) -> bool:
    """Whether an equation is linear in all inputs that depend on leaves."""
    name = name_of(eqn)
    if name in LINEAR_IN_EACH:
        return sum(varying) == 1
    if name == "div":
        return not varying[1]
    # A selection is linear in what is selected, not in the condition.
    return name in _JOINTLY_LINEAR or (name == "select_n" and not varying[0])


def _is_real(eqn: Eqn) -> bool:
    """Whether all is real: complex functions may have no complex derivative."""
    atoms = (*eqn.invars, *eqn.outvars)
    return not any(is_complex(x.aval) for x in atoms)


def _are_alike(eqn: Eqn, shape: tuple[int, ...]) -> bool:
    """Whether all inputs and outputs of an equation have one shape or are scalars."""
    outs = [var.aval.shape for var in eqn.outvars]
    ins = [atom.aval.shape for atom in eqn.invars]
    return all(size == shape for size in outs) and all(
        size in (shape, ()) for size in ins
    )


def _has_elementwise_rule(jaxpr: Jaxpr, eqn: Eqn) -> bool:
    """Whether a function with custom derivatives is elementwise, up to second order.

    What counts are the derivatives, not the code of the function.
    """
    shape = eqn.outvars[0].aval.shape
    are_real = all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars)
    if not (are_real and _are_alike(eqn, shape)):
        return False
    apply = run_equation(jaxpr, eqn, eqn.outvars)
    run = lambda ins: apply(*ins)

    def first(ins: Values, tangents: Values) -> Values:
        return jax.jvp(run, (ins,), (tangents,))[1]

    def second() -> Values:
        # The point, the direction of the first derivative, and changes of both.
        ins, *tangents = (
            [full_varying_as(atom.aval, 0) for atom in eqn.invars] for _ in range(4)
        )
        return jax.jvp(first, (ins, tangents[0]), (tangents[1], tangents[2]))[1]

    # This program has those of the first derivative and of the rule in it.
    return _is_elementwise(jax.make_jaxpr(second)().jaxpr, shape)


def _is_elementwise(jaxpr: Jaxpr, shape: tuple[int, ...]) -> bool:
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
            if not all(_is_elementwise(inner, shape) for inner in inner_jaxprs(eqn)):
                return False
        elif name not in _ELEMENTWISE or not (_is_real(eqn) and _are_alike(eqn, shape)):
            return False
    return True


def nodes_up_to(
    last: Iterable[Node], is_known: Callable[[Node], bool] = lambda _: False
) -> list[Node]:
    """All nodes that some nodes are computed from, in order, except known ones."""
    needed: dict[Node, None] = {}
    stack = [*last]
    while stack:
        node = stack.pop()
        if node not in needed and not is_known(node):
            needed[node] = None
            stack += node.inputs
    # Nothing comes before its inputs, which have smaller numbers.
    return sorted(needed, key=lambda node: node.order)


def slope_of(node: Node, base: Node) -> Node:
    """The elementwise derivative of a node with respect to one of its bases."""
    # What leads from the base to the node is run again; all other inputs are values.
    is_before = lambda x: x is base or base not in x.bases
    between = nodes_up_to([node], is_before)
    read = itertools.chain(*(x.inputs for x in between))
    inputs = tuple(dict.fromkeys([base, *(x for x in read if x not in between)]))

    def run(*values: Array) -> Values:
        of_inputs = dict(safe_zip(inputs, values))
        along = lambda x: evaluated([node], [], {**of_inputs, base: x})[node]
        # Entries do not mix, so the direction of ones has the slope of each.
        x = of_inputs[base]
        return [jax.jvp(along, (x,), (jnp.ones_like(x),))[1]]

    return node._then(run, inputs=inputs, varies=False)


def evaluated(
    wanted: Iterable[Node], leaves: Values, known: dict[Node, Array] | None = None
) -> dict[Node, Array]:
    """The values of nodes and of all that they are computed from, at these leaves."""
    known = {} if known is None else known
    made: dict[Callable, list] = {}
    for node in nodes_up_to(wanted, known.__contains__):
        if node.leaf is not None:
            known[node] = leaves[node.leaf]
        elif node.run is None:
            known[node] = node.constant
        else:
            # The outputs of one equation.
            if node.run not in made:
                made[node.run] = node.run(*(known[x] for x in node.inputs))
            known[node] = made[node.run][node.output]
    return known
