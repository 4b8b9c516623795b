"""What becomes of a view in an equation that is linear in it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.jaxpr_types import Eqn
from .._base.jaxprs import literal
from .._base.primitives import SUMS, unknown_parameters
from .._base.trees import safe_zip
from .axes import Shape
from .views import Place, View


Views = list[View | None]


def extend_view(view: View, eqn: Eqn, index: int) -> Views | None:
    """The views after an equation, whose input with the given `index` is a view.

    There is one for each output of the equation, or None where the output is zero. None
    if the equation is not known to be linear in this input.

    For example, a weight of shape `(3, 2)` that is transposed is the view of shape
    `(2, 3)` with the axes `(1, 0)` of the leaf. After `2 * w`, its scale is 2.
    """
    after = _VIEWS.get(eqn.primitive.name)
    if after is None or unknown_parameters(eqn):
        return None
    return after(_Input(view, eqn, index))


@dataclasses.dataclass(frozen=True)
class _Input:
    """A view as one input of an equation."""

    view: View
    eqn: Eqn
    index: int

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def shape(self) -> Shape:
        """The shape of the first output."""
        return self.eqn.outvars[0].aval.shape

    @property
    def shapes_before(self) -> list[tuple[int, ...]]:
        return [var.aval.shape for var in self.eqn.invars]

    @property
    def key(self) -> str:
        """Equal for two inputs that become views by the same function."""
        before = f"{self.shapes_before}, {self.eqn.params}"
        return f"{self.name}[{self.index}]({self.view.key_of_loops}, {before})"

    @property
    def all_axes(self) -> tuple[int, ...]:
        """The axes of the view after an equation that keeps them."""
        return tuple(range(len(self.shape)))

    def bind(self, x: Array) -> Any:
        return self.eqn.primitive.bind(x, **self.eqn.params)

    def then(self, axes: tuple[int | None, ...] | None, **settings: Any) -> View:
        """The view after the equation, which has no other input."""
        return self.view.then(self.key, self.bind, self.shape, axes, **settings)


def _with_moved_axes(x: _Input) -> Views | None:
    """Axes are moved, or those of size 1 inserted or removed; or the array repeated.

    A weight of shape `(3, 2)` that is transposed is a view of shape `(2, 3)` with the
    axes `(1, 0)` of the leaf. Repeated to the shape `(5, 3, 2)`, it has the axes
    `(None, 0, 1)`.
    """
    if len(x.eqn.invars) > 1:  # A dynamic shape.
        return None
    axes = kept_axes(x.name, x.view.shape, x.shape, x.eqn.params)
    # Broadcasting is not an isometry: its transpose is a sum.
    same = math.prod(x.shape) == math.prod(x.view.shape)
    return [x.then(axes, is_isometry=same)]


def _in_other_dtype(x: _Input) -> Views | None:
    """Another dtype.

    A weight in float32 that is cast to bfloat16 keeps its axes, `(0, 1)`.
    """
    # An integer has no derivative.
    if not jnp.issubdtype(x.eqn.outvars[0].aval.dtype, jnp.inexact):
        return None
    # The real part of a complex array is not a view of the same dimension.
    old, new = (is_complex(v.aval) for v in (*x.eqn.invars, *x.eqn.outvars))
    if old and not new:
        return None
    if new and not old:
        # Its transpose takes the real part.
        return [x.then(None, is_isometry=False)]
    return [x.then(x.all_axes)]


def _negated(x: _Input) -> Views:
    """The other sign: for `-(2 * w)`, the axes are those of `w` and the scale is -2."""
    return [x.then(x.all_axes, scale=-1.0)]


def _sliced(x: _Input) -> Views:
    """A slice.

    For `w[2:5]` of a weight of shape `(6, 4)`, the view has the shape `(3, 4)` and the
    ranges `2:5` of axis 0 and `0:4` of axis 1. Its own axes are those of no leaf.
    """
    if x.shape == x.view.shape:
        # The whole array, for example if an axis of size 1 is indexed.
        return [x.then(x.all_axes)]
    cut = None if x.view.place is None else _taken_back(x.view, x.eqn)
    if cut is not None:
        return cut
    # A slice with strides reaches further than its size, which `View.sliced` takes.
    if not {*(x.eqn.params["strides"] or ())} <= {1}:
        return [x.then(None)]
    return [x.view.sliced(x.key, x.bind, x.eqn.params["start_indices"], x.shape)]


def _reversed(x: _Input) -> Views:
    """The reverse order, which is an isometry.

    Entry 0 of `w[::-1]` for a `w` of shape `(3,)` is entry 2, so the axis is not that
    of the leaf.
    """
    return [x.then(None)]


def _summed_over_axes(x: _Input) -> Views:
    """A sum over axes, which is no isometry.

    `w.sum(0)` of a weight of shape `(3, 2)` is a view of shape `(2,)`, which is pulled
    back by repeating it 3 times: this triples squared norms.
    """
    return [x.then(None, is_isometry=False)]


def _split_in_slices(x: _Input) -> Views:
    """One slice for each output.

    `jnp.split(w, [2])` of a weight of shape `(5, 4)` has the views `w[:2]` and `w[2:]`.
    """
    cut = None if x.view.place is None else _taken_back(x.view, x.eqn)
    if cut is not None:
        return cut
    axis, views = x.eqn.params["axis"], []
    shapes = [var.aval.shape for var in x.eqn.outvars]
    for i, shape in enumerate(shapes):
        start = [0] * len(shape)
        start[axis] = sum(before[axis] for before in shapes[:i])
        output = lambda array, i=i: x.bind(array)[i]
        views.append(x.view.sliced(f"{x.key}[{i}]", output, start, shape))
    return views


def _concatenated(x: _Input) -> Views:
    """An array in a larger one: the view, with a place in zeros.

    For `w` of shape `(2, 4)` in `concatenate([v, w])` with `v` of shape `(3, 4)`, the
    view has the shape `(5, 4)`, and its place begins with row 3 and has 2 rows.
    """
    axis = x.eqn.params["dimension"]
    start = sum(shape[axis] for shape in x.shapes_before[: x.index])
    return [_placed(x, x.view, start, axis)]


def _stacked_view(x: _Input) -> Views:
    """An array in a stack, as one of size 1 along the new axis in a larger array.

    For `w` of shape `(4,)` in `stack([v, w])`, the view has the shape `(2, 4)`, and its
    place is row 1.
    """
    axis, shape = x.eqn.params["axis"], x.view.shape
    axes = (*range(axis), None, *range(axis, len(shape)))
    expand = lambda array: jnp.expand_dims(array, axis)
    one = (*shape[:axis], 1, *shape[axis:])
    expanded = x.view.then(f"expand({axis})", expand, one, axes)
    return [_placed(x, expanded, x.index, axis)]


def _placed(x: _Input, view: View, start: int, axis: int) -> View:
    """A view as a part of the output of an equation, from `start` on along an axis."""
    view = view.in_zeros()
    shape, size = x.shape, view.shape[axis]
    sizes = (start, shape[axis] - start - size)
    key, put = f"{x.key} at {start}", functools.partial(_padded, sizes, axis)
    if axis:
        return view.then(key, put, shape, None, is_isometry=False)
    return dataclasses.replace(view, shape=shape, place=Place(start, size, key, put))


def _taken_back(view: View, eqn: Eqn) -> Views | None:
    """Slices along axis 0 of an array in which a view has its place.

    None if a slice has only some of the view.
    """
    assert view.place is not None
    # Where the outputs begin along axis 0: one after the other, or a single slice.
    first, size = view.place.start, view.place.size
    shapes = [var.aval.shape for var in eqn.outvars]
    starts = [*itertools.accumulate((shape[0] for shape in shapes[:-1]), initial=0)]
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"]
        if strides is not None and any(stride != 1 for stride in strides):
            return None
        starts = [eqn.params["start_indices"][0]]
    # What is cut along another axis is no longer the view in zeros.
    if any(shape[1:] != view.shape[1:] for shape in shapes):
        return None
    cut: Views = []
    for start, shape in safe_zip(starts, shapes):
        # Beside the view there are zeros. An output around it has all of it, in fewer
        # zeros. One that cuts it is a slice of the view in zeros, which callers take.
        end = start + shape[0]
        if end <= first or first + size <= start:
            cut.append(None)
        elif start <= first and first + size <= end:
            whole = dataclasses.replace(view, place=None, shape=(size, *shape[1:]))
            sizes = first - start, end - first - size
            key = f"pad{sizes}"
            put = functools.partial(_padded, sizes, 0)
            place = Place(first - start, size, key, put) if any(sizes) else None
            cut.append(dataclasses.replace(whole, shape=shape, place=place))
        else:
            return None
    return cut


def _padded(sizes: tuple[int, int], axis: int, x: Array) -> Array:
    return jnp.pad(x, [sizes if i == axis else (0, 0) for i in range(x.ndim)])


# Norms and kernels of factors are multiplied by the square of a scale at the end: those
# of 1 must stay in range, and those that are still in range must have had all digits.
_SCALES = 2.0**-24, 2.0**12


def _times_number(x: _Input) -> Views | None:
    """Multiplied or divided by a number; None for anything else.

    For `w / 4`, the axes are those of `w`, and the scale is 0.25.
    """
    name, out, eqn, index = x.name, x.eqn.outvars[0].aval, x.eqn, x.index
    other = eqn.invars[1 - index] if len(eqn.invars) == 2 else None
    if not isinstance(other, jex.Literal) or out.shape != x.view.shape:
        return None
    if np.ndim(other.val):  # With flags of JAX, an array is a literal, too.
        return None
    # A quotient is not linear in its divisor.
    if name == "div" and index == 1:
        return None
    # The number is rounded to the dtype of the output, as the equation rounds it.
    value = complex(np.asarray(other.val).astype(out.dtype).item())
    factor = value if name == "mul" else 1 / value if value else math.inf
    least, most = _SCALES
    if not least <= abs(factor * x.view.scale) <= most:
        return None

    def scale(array: Array) -> Array:
        ins = [literal(other), literal(other)]
        ins[index] = array
        return eqn.primitive.bind(*ins, **eqn.params)

    key = f"{x.key} {other.val}"
    factor = factor if factor.imag else factor.real
    return [x.view.then(key, scale, out.shape, x.all_axes, scale=factor)]


def _summand(x: _Input) -> Views:
    """The contribution of a view to `add` or `sub`.

    In `v - w`, that of `w` has the axes of `w` and the scale -1. If an array is
    repeated there along an axis, the view has None for it.
    """
    view, shape = x.view, x.shape
    if view.shape != shape:
        repeat = lambda array: jnp.broadcast_to(array, shape)
        repeated = (
            axis if size == shape[axis] else None
            for axis, size in enumerate(view.shape)
        )
        axes = tuple(repeated) if view.shape else (None,) * len(shape)
        key = f"repeat({view.key_of_loops}, {view.shape}, {shape})"
        view = view.then(key, repeat, shape, axes, is_isometry=False)
    if x.name == "sub" and x.index == 1:
        view = view.then("neg", lambda array: -array, shape, x.all_axes, scale=-1.0)
    return [view]


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
    longer = [axis for axis in order if old[axis] != 1]
    if [old[axis] for axis in longer] != [size for size in new if size != 1]:
        return None
    return tuple(None if size == 1 else longer.pop(0) for size in new)


# What becomes of a view as an input of an equation, by the name of its primitive.
_VIEWS: dict[str, Callable[[_Input], Views | None]] = {
    **dict.fromkeys(SUMS, _summand),
    **dict.fromkeys(MOVES, _with_moved_axes),
    **dict.fromkeys(("convert_element_type", "copy"), _in_other_dtype),
    **dict.fromkeys(("mul", "div"), _times_number),
    "neg": _negated,
    "slice": _sliced,
    "rev": _reversed,
    "reduce_sum": _summed_over_axes,
    "split": _split_in_slices,
    "concatenate": _concatenated,
    "stack": _stacked_view,
}
