"""Values that a program computes from parameters alone, shared by all examples.

Examples are penalties, masks, weight normalisation and reparametrisations. Their values
and derivatives do not depend on an example, so they are computed once. A `Node` is such
a value. JAX runs it as written in the program, with all custom derivatives. Its
derivative is a sum of views: a `View` is a linear function of one parameter, as a
program applies it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.jaxprs import (
    callee,
    full_varying_as,
    inner_jaxprs,
    is_flat,
    LINEAR_IN_ALL,
    LINEAR_IN_EACH,
    LINEAR_IN_SOME,
    literal,
    name_of,
    run_equation,
    SUMS,
    unknown_parameters,
    with_trait,
)
from .._base.modes import Derivative, derivative_of, pushed
from .._base.trees import safe_zip


# A `scan` around an equation: its index, which grows inwards, and its length.
Loop = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a loop that use a leaf.

    - `length`: their number; they begin with `start`, or are all steps if that is None.
    - `is_sliced`: whether each of them uses another slice of the leaf.
    """

    loop: Loop
    length: int
    start: int | None = None
    is_sliced: bool = True


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
    views: tuple["View", ...] = ()
    curved: frozenset[int] = frozenset()
    coupled: frozenset[int] = frozenset()
    order: int = dataclasses.field(init=False, default_factory=_ORDERS.__next__)

    @classmethod
    def of(cls, aval: Any, varies: bool, **settings: Any) -> "Node":
        """A node of this type that is computed from no other one."""
        return cls((), aval.shape, aval.dtype, varies, **settings)

    @classmethod
    def constant_of(cls, aval: Any, value: Any) -> "Node":
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
        return cls.of(aval, False, constant=value)

    @classmethod
    def tangent(cls, aval: Any, views: tuple["View", ...]) -> "Node":
        """A node that is linear in a leaf, so its derivatives may be taken at zero."""
        return cls.of(aval, True, run=lambda: [full_varying_as(aval, 0)], views=views)

    def sliced(self, loop: Loop) -> "Node":
        """Its slices along the first axis, for the body of a scan."""
        changes = {"loops": (*self.loops, loop), "shape": self.shape[1:]}
        changes |= {"views": tuple(view.scanned(loop) for view in self.views)}
        changes |= {"curved": self.curved, "coupled": self.coupled}
        return self._then(lambda x: [x], **changes)

    def frozen(self) -> "Node":
        """Its value without the derivative."""
        return self._then(lambda x: [x], varies=False)

    def inverse(self) -> "Node":
        """One over it, elementwise."""
        bases = self.bases or (self,)
        return self._then(lambda x: [1 / x], bases=bases, is_linear=False)

    def _then(self, run: Callable[..., list], **changes: Any) -> "Node":
        """A node that `run` computes from this one, with the same type."""
        reset = {"leaf": None, "constant": None, "bases": (), "is_linear": True}
        reset |= {"views": (), "curved": frozenset(), "coupled": frozenset()}
        reset |= {"inputs": (self,), "run": run, "output": 0}
        return dataclasses.replace(self, **{**reset, **changes})


def output_nodes(
    jaxpr: Any, eqn: Any, inputs: tuple[Node, ...], outs: list
) -> list[Node]:
    """Some of the outputs of an equation whose inputs are nodes."""
    loops = merged_loops(*(node.loops for node in inputs))
    run = _in_loops(run_equation(jaxpr, eqn, outs), loops, inputs)
    varies = any(node.varies for node in inputs) and not is_flat(eqn)
    is_reverse = any(node.is_reverse for node in inputs) or _is_reverse(eqn)
    bases, is_linear = _bases(jaxpr, eqn, inputs) if varies else ((), True)
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
    return any(_is_reverse(inner) for sub in inner_jaxprs(eqn) for inner in sub.eqns)


def pushforward_of(
    jaxpr: Any, eqn: Any, position: int, var: Any
) -> Callable[..., Array] | None:
    """The derivative of the output `var` of an equation in one of its inputs.

    It is a function of a tangent and of the values of all inputs; None if JAX has only
    reverse mode, and no transpose of that.
    """
    run = run_equation(jaxpr, eqn, [var])
    put = lambda values: lambda x: run(*values[:position], *x, *values[position + 1 :])
    derivative: Derivative = "both"
    if _is_reverse(eqn):
        zeros = [full_varying_as(atom.aval, 0) for atom in eqn.invars]
        name, point = f"`{name_of(eqn)}`", [zeros[position]]
        derivative = derivative_of(name, put(zeros), point)

    def push(tangent: Array, *values: Array) -> Array:
        tangents = [tangent.astype(values[position].dtype)]
        (out,) = pushed(put(values), [values[position]], tangents, derivative)
        return out

    return None if derivative == "rows" else push


def _bases(
    jaxpr: Any, eqn: Any, inputs: tuple[Node, ...]
) -> tuple[tuple[Node, ...], bool]:
    """The nodes in which an equation's outputs are elementwise, and if linearly so.

    Without such nodes, whether the equation is linear in its inputs.
    """
    name, shape = name_of(eqn), eqn.outvars[0].aval.shape
    varying = [node for node in inputs if node.varies]
    is_linear = _is_linear(eqn, [node.varies for node in inputs])
    if any(node.shape != shape for node in varying):
        return (), is_linear
    if name == "custom_jvp_call":
        is_known = len(eqn.outvars) == 1 and _has_elementwise_rule(jaxpr, eqn)
    else:
        is_known = name in _ELEMENTWISE and _is_real(eqn)
    if not is_known:
        return (), is_linear
    bases: dict[Node, None] = {}
    for node in varying:
        bases.update(dict.fromkeys(node.bases or (node,)))
    are_linear = all(node.is_linear for node in varying if node.bases)
    return tuple(bases), is_linear and are_linear


def _is_linear(eqn: Any, varying: list[bool]) -> bool:
    """Whether an equation is linear in all inputs that depend on leaves."""
    name = name_of(eqn)
    if name in LINEAR_IN_EACH:
        return sum(varying) == 1
    if name == "div":
        return not varying[1]
    return name in _JOINTLY_LINEAR or (name == "select_n" and not varying[0])


def _is_real(eqn: Any) -> bool:
    """Whether all is real: complex functions may have no complex derivative."""
    atoms = (*eqn.invars, *eqn.outvars)
    return not any(is_complex(x.aval) for x in atoms)


def _are_alike(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether all inputs and outputs of an equation have one shape or are scalars."""
    outs = [var.aval.shape for var in eqn.outvars]
    ins = [atom.aval.shape for atom in eqn.invars]
    return all(size == shape for size in outs) and all(
        size in (shape, ()) for size in ins
    )


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
    return sorted(needed, key=lambda node: node.order)


def slope_of(node: Node, base: Node) -> Node:
    """The elementwise derivative of a node with respect to one of its bases."""
    is_before = lambda x: x is base or base not in x.bases
    between = nodes_up_to([node], is_before)
    others = itertools.chain(*(x.inputs for x in between))
    inputs = tuple(dict.fromkeys([base, *(x for x in others if x not in between)]))

    def run(*values: Array) -> list:
        known = dict(safe_zip(inputs, values))
        along = lambda x: evaluated([node], [], {**known, base: x})[node]
        return [jax.jvp(along, (known[base],), (jnp.ones_like(known[base]),))[1]]

    return node._then(run, inputs=inputs, varies=False)


def evaluated(
    wanted: Iterable[Node], leaves: list, known: dict[Node, Array] | None = None
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


@dataclasses.dataclass(frozen=True)
class _Place:
    """The position of an array in zeros, along its first axis."""

    start: int
    size: int
    key: str
    put: Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class View:
    """A linear function of one leaf, built from steps such as a transpose.

    - `leaf`, `type_of_leaf`: the index of the leaf, and its shape, dtype and so on.
    - `shape`: the shape of the view. The result of `apply` has leading axes for
        `loops`: the loops in which the view differs between steps, outermost first. The
        view is zero in steps that are left out.
    - `maps`: linear functions of an array, with the indices of values that they read.
    - `key`: equal for two views that are the same function.
    - `axes`: for each axis of the view, including leading ones, the corresponding axis
        of the leaf, or None if the leaf is repeated along it. None if some axis is
        neither, for example after a reshape or a slice.
    - `scale`: a factor of the leaf.
    - `is_weighted`: whether each entry is multiplied by its own weight.
    - `is_isometry`: whether the transpose of the view keeps the norm, up to `scale`.
    - `place`: the position of the view in an array of zeros, which gives it its shape.
        This comes last, so that a loop over the array uses the leaf in some steps only.
    - `parts`: axes of the leaf of which the view has a part only, each with the indices
        from which on and up to which it has them.
    """

    leaf: int
    type_of_leaf: Any
    shape: tuple[int, ...]
    axes: tuple[int | None, ...] | None
    loops: tuple[Steps, ...] = ()
    maps: tuple[tuple[Callable[[Array, list], Array], tuple[int, ...]], ...] = ()
    key: tuple[str, ...] = ()
    scale: float | complex = 1.0
    is_weighted: bool = False
    is_isometry: bool = True
    place: _Place | None = None
    parts: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_complex(self) -> bool:
        return is_complex(self.type_of_leaf)

    @property
    def reads(self) -> list[int]:
        """The indices of the values that it reads."""
        return [i for _, numbers in self.maps for i in numbers]

    @property
    def is_whole(self) -> bool:
        """Whether entries are distinct entries of the leaf, times a number."""
        return self.axes is not None and None not in self.axes and self.place is None

    def is_apart(self, other: "View") -> bool:
        """Whether two views of a leaf have no entry in common."""
        sides = itertools.product(self.parts, other.parts)
        return any(
            axis == same and (end <= first or last <= start)
            for (axis, start, end), (same, first, last) in sides
        )

    def sliced(
        self, key: str, step: Callable, start: Sequence[int], shape: Any
    ) -> "View":
        """The view after a slice without strides, from `start` on."""
        view = self.then(key, step, shape, None)
        if not self.is_whole:
            return view
        assert self.axes is not None
        axes = safe_zip(self.axes[len(self.loops) :], start, shape)
        parts = [(axis, first, first + size) for axis, first, size in axes]
        return dataclasses.replace(view, parts=(*self.parts, *parts))

    def apply(self, x: Array, values: list) -> Array:
        """Applies the view to a leaf `x`; `values` are those of the program."""
        for fun, numbers in self.maps:
            x = fun(x, [values[i] for i in numbers])
        return x

    def transposed(self, leaf: Any, values: list) -> Callable[[Array], Array]:
        """Pulls an array back from the view to a leaf of the given type."""
        transpose = jax.linear_transpose(lambda x: self.apply(x, values), leaf)
        return lambda x: transpose(x)[0]

    def struct(self, leaf: Any, values: list) -> jax.ShapeDtypeStruct:
        """The type of the view for a leaf of the given type."""
        return jax.eval_shape(self.apply, leaf, values)

    def scanned(self, loop: Loop) -> "View":
        """A slice along axis 0, as in the body of a scan."""
        place, steps = self.place, Steps(loop, loop[1])
        if place is not None:
            steps = Steps(loop, place.size, place.start)
        loops, shape = (*self.loops, steps), self.shape[1:]
        return dataclasses.replace(self, loops=loops, shape=shape, place=None)

    def in_zeros(self) -> "View":
        """The view with the zeros around it."""
        place = self.place
        if place is None:
            return self
        shape = (place.size, *self.shape[1:])
        whole = dataclasses.replace(self, place=None, shape=shape)
        return whole.then(place.key, place.put, self.shape, None, is_isometry=False)

    def then(
        self,
        key: str,
        step: Callable[..., Array],
        shape: tuple[int, ...],
        axes: tuple[int | None, ...] | None,
        *,
        is_isometry: bool = True,
        is_weighted: bool = False,
        scale: float | complex = 1.0,
        values: Sequence[tuple[int, tuple[Loop, ...]]] = (),
    ) -> "View":
        """The view after one more step.

        `step` and `axes` refer to the input without leading axes. For each axis of the
        result, `axes` has the axis that it was, or None for a new one. `values` are the
        indices of further values that `step` takes, and their loops.
        """
        view = self.in_zeros()
        of_values = [loops for _, loops in values]
        known = {steps.loop: steps for steps in view.loops}
        merged = merged_loops(tuple(known), *of_values)
        loops = tuple(known.get(loop, Steps(loop, loop[1])) for loop in merged)
        kept, composed = view.axes, None
        if kept is not None and axes is not None:
            num = len(view.loops)
            lead = dict(safe_zip(view.loops, kept[:num]))
            new = (None if axis is None else kept[num + axis] for axis in axes)
            composed = (*map(lead.get, loops), *new)
        fun = _mapped(step, view, of_values, loops)
        return dataclasses.replace(
            view,
            shape=tuple(shape),
            axes=composed,
            loops=loops,
            maps=(*view.maps, (fun, tuple(number for number, _ in values))),
            key=(*view.key, key),
            scale=view.scale * scale,
            is_weighted=view.is_weighted or is_weighted,
            is_isometry=view.is_isometry and is_isometry and loops == view.loops,
        )


def _mapped(
    step: Callable[..., Array],
    view: View,
    of_values: list[tuple[Loop, ...]],
    loops: tuple[Steps, ...],
) -> Callable[[Array, list], Array]:
    """Maps a step over the loops of the view and of the values."""
    run = lambda x, values: step(x, *values)
    for steps in reversed(loops):
        axes = [0 if steps.loop in others else None for others in of_values]
        in_axes = (0 if steps in view.loops else None, axes)
        run = jax.vmap(run, in_axes, axis_size=steps.length)

    def cut(x: Array, values: list) -> Array:
        values = [*values]
        for steps in view.loops:
            for i, others in enumerate(of_values):
                if steps.start is not None and steps.loop in others:
                    values[i] = jax.lax.slice_in_dim(
                        *(values[i], steps.start, steps.start + steps.length),
                        axis=others.index(steps.loop),
                    )
        return run(x, values)

    return cut


def leaf_view(index: int, aval: Any) -> View:
    """The leaf itself."""
    return View(index, aval, aval.shape, tuple(range(len(aval.shape))))


def extend_view(view: View, eqn: Any, index: int) -> list[View | None] | None:
    """The views after an equation, whose input with the given `index` is a view.

    There is one for each output of the equation, or None where the output is zero. None
    if the equation is not known to be linear in this input.
    """
    name = eqn.primitive.name
    shapes = [var.aval.shape for var in eqn.outvars]
    shape = shapes[0]
    before = [var.aval.shape for var in eqn.invars]
    key = f"{name}[{index}]({view.loops}, {before}, {eqn.params})"
    bind = lambda x: eqn.primitive.bind(x, **eqn.params)
    all_axes = tuple(range(len(shape)))

    if unknown_parameters(eqn):
        return None
    if name in SUMS:
        return [_summand(view, eqn, index)]
    if name in MOVES:
        if len(eqn.invars) > 1:  # A dynamic shape.
            return None
        axes = kept_axes(name, view.shape, shape, eqn.params)
        # Broadcasting is not an isometry: its transpose is a sum.
        same = math.prod(shape) == math.prod(view.shape)
        return [view.then(key, bind, shape, axes, is_isometry=same)]
    if name in ("convert_element_type", "copy"):
        if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
            return None
        # The real part of a complex array is not a view of the same dimension.
        old, new = (is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if old and not new:
            return None
        if new and not old:
            # Its transpose takes the real part.
            return [view.then(key, bind, shape, None, is_isometry=False)]
        return [view.then(key, bind, shape, all_axes)]
    if name == "neg":
        return [view.then(key, bind, shape, all_axes, scale=-1.0)]
    if name == "slice" and shape == view.shape:
        # The whole array, for example if an axis of size 1 is indexed.
        return [view.then(key, bind, shape, all_axes)]
    if view.place is not None and name in ("slice", "split"):
        parts = _taken_back(view, eqn)
        if parts is not None:
            return parts
    if name == "slice" and {*(eqn.params["strides"] or ())} <= {1}:
        return [view.sliced(key, bind, eqn.params["start_indices"], shape)]
    if name in ("slice", "rev", "reduce_sum"):
        return [view.then(key, bind, shape, None, is_isometry=name != "reduce_sum")]
    if name == "split":
        axis, views = eqn.params["axis"], []
        for i, shape in enumerate(shapes):
            bind = lambda x, i=i: eqn.primitive.bind(x, **eqn.params)[i]
            start = [0] * len(shape)
            start[axis] = sum(x[axis] for x in shapes[:i])
            views.append(view.sliced(f"{key}[{i}]", bind, start, shape))
        return views
    if name == "concatenate":
        axis = eqn.params["dimension"]
        start = sum(shape[axis] for shape in before[:index])
        return [_placed(view, eqn, start, axis, key)]
    if name == "stack":
        axis = eqn.params["axis"]
        axes = (*range(axis), None, *range(axis, len(view.shape)))
        expand = lambda x: jnp.expand_dims(x, axis)
        one = (*view.shape[:axis], 1, *view.shape[axis:])
        view = view.then(f"expand({axis})", expand, one, axes)
        return [_placed(view, eqn, index, axis, key)]
    if name in ("mul", "div"):
        scaled = _scaled(view, eqn, index, key)
        return None if scaled is None else [scaled]
    return None


def _placed(view: View, eqn: Any, start: int, axis: int, key: str) -> View:
    """A view as a part of the output of an equation, from `start` on along an axis."""
    view = view.in_zeros()
    shape, size = eqn.outvars[0].aval.shape, view.shape[axis]
    sizes = (start, shape[axis] - start - size)
    key, put = f"{key} at {start}", functools.partial(_padded, sizes, axis)
    if axis:
        return view.then(key, put, shape, None, is_isometry=False)
    return dataclasses.replace(view, shape=shape, place=_Place(start, size, key, put))


def _taken_back(view: View, eqn: Any) -> list[View | None] | None:
    """Parts along axis 0 of an array in which a view has its place.

    None if a part has only some of the view.
    """
    assert view.place is not None
    first, size = view.place.start, view.place.size
    shapes = [var.aval.shape for var in eqn.outvars]
    starts = [*itertools.accumulate((shape[0] for shape in shapes[:-1]), initial=0)]
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"]
        if strides is not None and any(stride != 1 for stride in strides):
            return None
        starts = [eqn.params["start_indices"][0]]
    if any(shape[1:] != view.shape[1:] for shape in shapes):
        return None
    parts: list[View | None] = []
    for start, shape in safe_zip(starts, shapes):
        end = start + shape[0]
        if end <= first or first + size <= start:
            parts.append(None)
        elif start <= first and first + size <= end:
            whole = dataclasses.replace(view, place=None, shape=(size, *shape[1:]))
            sizes = first - start, end - first - size
            key = f"pad{sizes}"
            put = functools.partial(_padded, sizes, 0)
            place = _Place(first - start, size, key, put) if any(sizes) else None
            parts.append(dataclasses.replace(whole, shape=shape, place=place))
        else:
            return None
    return parts


def _padded(sizes: tuple[int, int], axis: int, x: Array) -> Array:
    return jnp.pad(x, [sizes if i == axis else (0, 0) for i in range(x.ndim)])


# Norms and kernels of factors are multiplied by the square of a scale at the end: those
# of 1 must stay in range, and those that are still in range must have had all digits.
_SCALES = 2.0**-24, 2.0**12


def _scaled(view: View, eqn: Any, index: int, key: str) -> View | None:
    """A view multiplied or divided by a number; None for anything else."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    other = eqn.invars[1 - index] if len(eqn.invars) == 2 else None
    if not isinstance(other, jex.Literal) or out.shape != view.shape:
        return None
    if np.ndim(other.val):  # With flags of JAX, an array is a literal, too.
        return None
    if name == "div" and index == 1:
        return None
    value = complex(np.asarray(other.val).astype(out.dtype).item())
    factor = value if name == "mul" else 1 / value if value else math.inf
    least, most = _SCALES
    if not least <= abs(factor * view.scale) <= most:
        return None

    def scale(x: Array) -> Array:
        ins = [literal(other), literal(other)]
        return eqn.primitive.bind(*ins[:index], x, *ins[index + 1 :], **eqn.params)

    key, axes = f"{key} {other.val}", tuple(range(len(out.shape)))
    factor = factor if factor.imag else factor.real
    return view.then(key, scale, out.shape, axes, scale=factor)


def _summand(view: View, eqn: Any, index: int) -> View:
    """The contribution of a view to `add` or `sub`, as the input with this `index`."""
    shape = eqn.outvars[0].aval.shape
    if view.shape != shape:
        repeat = lambda x: jnp.broadcast_to(x, shape)
        kept = (
            axis if size == shape[axis] else None
            for axis, size in enumerate(view.shape)
        )
        axes = tuple(kept) if view.shape else (None,) * len(shape)
        key = f"repeat({view.loops}, {view.shape}, {shape})"
        view = view.then(key, repeat, shape, axes, is_isometry=False)
    if eqn.primitive.name == "sub" and index == 1:
        axes = tuple(range(len(shape)))
        view = view.then("neg", lambda x: -x, shape, axes, scale=-1.0)
    return view


# What may move axes, remove or insert those of size 1, or repeat an array.
MOVES = ("transpose", "squeeze", "broadcast_in_dim", "reshape")


def kept_axes(
    name: str, old: tuple[int, ...], new: tuple[int, ...], params: dict[str, Any]
) -> tuple[int | None, ...] | None:
    """For each axis of the result, the axis that it was; None if there is none."""
    if name == "transpose":
        return tuple(params["permutation"])
    if name == "squeeze":
        removed = {axis % len(old) for axis in params["dimensions"]}
        return tuple(axis for axis in range(len(old)) if axis not in removed)
    if name == "broadcast_in_dim":
        axes: list[int | None] = [None] * len(new)
        for axis, target in enumerate(params["broadcast_dimensions"]):
            if old[axis] == new[target]:
                axes[target] = axis
        return tuple(axes)
    # A reshape that only moves axes of size 1 keeps all others. It may follow a
    # transpose.
    order = params["dimensions"]
    order = range(len(old)) if order is None else order
    kept = [axis for axis in order if old[axis] != 1]
    if [old[axis] for axis in kept] != [size for size in new if size != 1]:
        return None
    return tuple(None if size == 1 else kept.pop(0) for size in new)
