"""Linear functions of one parameter, as a program applies them.

A `View` is built step by step: `extend_view` says what becomes of one in an equation
that is linear in it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.jaxpr_types import Aval, Eqn
from .._base.jaxprs import literal
from .._base.primitives import (
    SUMS,
    unknown_parameters,
)
from .._base.trees import safe_zip
from .axes import Shape


# Values of a program: arrays, keys and numbers, or only their types; None for one that
# is not known, or not needed.
Values = list[Any]


# A `scan` around an equation: its index, which grows inwards, and its length.
Loop = tuple[int, int]


# The loops around an equation, outermost first.
Loops = tuple[Loop, ...]


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


def merged_loops(*loops: Loops) -> Loops:
    """The loops of several values, outermost first."""
    # Inner loops have larger indices.
    return tuple(sorted(set(itertools.chain(*loops))))


@dataclasses.dataclass(frozen=True)
class Place:
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
    maps: tuple[tuple[Callable[[Array, Values], Array], tuple[int, ...]], ...] = ()
    key: tuple[str, ...] = ()
    scale: float | complex = 1.0
    is_weighted: bool = False
    is_isometry: bool = True
    place: Place | None = None
    parts: tuple[tuple[int, int, int], ...] = ()

    def __repr__(self) -> str:
        steps = [key.split("[")[0].split("(")[0] for key in self.key]
        scale = "" if self.scale == 1 else f" scaled by {self.scale:g}"
        return " > ".join([f"leaf {self.leaf}", *steps]) + f" {self.shape}{scale}"

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

    def apply(self, x: Array, values: Values) -> Array:
        """Applies the view to a leaf `x`; `values` are those of the program."""
        for fun, numbers in self.maps:
            x = fun(x, [values[i] for i in numbers])
        return x

    def transposed(self, leaf: Any, values: Values) -> Callable[[Array], Array]:
        """Pulls an array back from the view to a leaf of the given type."""
        transpose = jax.linear_transpose(lambda x: self.apply(x, values), leaf)
        return lambda x: transpose(x)[0]

    def struct(self, leaf: Any, values: Values) -> jax.ShapeDtypeStruct:
        """The type of the view for a leaf of the given type."""
        return jax.eval_shape(self.apply, leaf, values)

    def scanned(self, loop: Loop) -> "View":
        """A slice along axis 0, as in the body of a scan."""
        # A place along the axis that is sliced becomes the steps that use the leaf.
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
        values: Sequence[tuple[int, Loops]] = (),
    ) -> "View":
        """The view after one more step.

        `step` and `axes` refer to the input without leading axes. For each axis of the
        result, `axes` has the axis that it was, or None for a new one. `values` are the
        indices of further values that `step` takes, and their loops.
        """
        # A place comes last, so a further step is applied to the array with its zeros.
        view = self.in_zeros()
        of_values = [loops for _, loops in values]
        # The result differs in the steps of all loops in which the view or a value
        # does.
        known = {steps.loop: steps for steps in view.loops}
        merged = merged_loops(tuple(known), *of_values)
        loops = tuple(known.get(loop, Steps(loop, loop[1])) for loop in merged)
        # Axes of the step's result are looked up among those of the view. In loops that
        # only values have, the view is repeated: `lead` has None for these.
        kept, composed = view.axes, None
        if kept is not None and axes is not None:
            num = len(view.loops)
            lead = dict(safe_zip(view.loops, kept[:num]))
            new = (None if axis is None else kept[num + axis] for axis in axes)
            composed = (*map(lead.get, loops), *new)
        fun = _over_steps(step, view, of_values, loops)
        return dataclasses.replace(
            view,
            shape=tuple(shape),
            axes=composed,
            loops=loops,
            maps=(*view.maps, (fun, tuple(number for number, _ in values))),
            key=(*view.key, key),
            scale=view.scale * scale,
            is_weighted=view.is_weighted or is_weighted,
            # The transpose of what repeats the view in more loops is a sum.
            is_isometry=view.is_isometry and is_isometry and loops == view.loops,
        )


def _over_steps(
    step: Callable[..., Array],
    view: View,
    of_values: list[Loops],
    loops: tuple[Steps, ...],
) -> Callable[[Array, Values], Array]:
    """Maps a step over the loops of the view and of the values."""
    run = lambda x, values: step(x, *values)
    # Outermost last, so that it has the first axis.
    for steps in reversed(loops):
        axes = [0 if steps.loop in others else None for others in of_values]
        in_axes = (0 if steps in view.loops else None, axes)
        run = jax.vmap(run, in_axes, axis_size=steps.length)

    # Values have all steps of a loop, and views only those that use the leaf.
    def cut(x: Array, values: Values) -> Array:
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


def leaf_view(index: int, aval: Aval) -> View:
    """The leaf itself."""
    return View(index, aval, aval.shape, tuple(range(len(aval.shape))))


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
        before = f"{self.view.loops}, {self.shapes_before}, {self.eqn.params}"
        return f"{self.name}[{self.index}]({before})"

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
    """Axes are moved, or those of size 1 inserted or removed; or the array repeated."""
    if len(x.eqn.invars) > 1:  # A dynamic shape.
        return None
    axes = kept_axes(x.name, x.view.shape, x.shape, x.eqn.params)
    # Broadcasting is not an isometry: its transpose is a sum.
    same = math.prod(x.shape) == math.prod(x.view.shape)
    return [x.then(axes, is_isometry=same)]


def _in_other_dtype(x: _Input) -> Views | None:
    """Another dtype."""
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
    return [x.then(x.all_axes, scale=-1.0)]


def _sliced(x: _Input) -> Views:
    if x.shape == x.view.shape:
        # The whole array, for example if an axis of size 1 is indexed.
        return [x.then(x.all_axes)]
    parts = None if x.view.place is None else _taken_back(x.view, x.eqn)
    if parts is not None:
        return parts
    # A slice with strides reaches further than its size, which `View.sliced` takes.
    if not {*(x.eqn.params["strides"] or ())} <= {1}:
        return [x.then(None)]
    return [x.view.sliced(x.key, x.bind, x.eqn.params["start_indices"], x.shape)]


def _reversed(x: _Input) -> Views:
    return [x.then(None)]


def _summed_over_axes(x: _Input) -> Views:
    return [x.then(None, is_isometry=False)]


def _split_in_slices(x: _Input) -> Views:
    """One slice for each output."""
    parts = None if x.view.place is None else _taken_back(x.view, x.eqn)
    if parts is not None:
        return parts
    axis, views = x.eqn.params["axis"], []
    shapes = [var.aval.shape for var in x.eqn.outvars]
    for i, shape in enumerate(shapes):
        start = [0] * len(shape)
        start[axis] = sum(before[axis] for before in shapes[:i])
        output = lambda array, i=i: x.bind(array)[i]
        views.append(x.view.sliced(f"{x.key}[{i}]", output, start, shape))
    return views


def _concatenated(x: _Input) -> Views:
    axis = x.eqn.params["dimension"]
    start = sum(shape[axis] for shape in x.shapes_before[: x.index])
    return [_placed(x, x.view, start, axis)]


def _stacked_view(x: _Input) -> Views:
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
    """Parts along axis 0 of an array in which a view has its place.

    None if a part has only some of the view.
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
    parts: Views = []
    for start, shape in safe_zip(starts, shapes):
        # Beside the view there are zeros. An output around it has all of it, in fewer
        # zeros. One that cuts it is a slice of the view in zeros, which callers take.
        end = start + shape[0]
        if end <= first or first + size <= start:
            parts.append(None)
        elif start <= first and first + size <= end:
            whole = dataclasses.replace(view, place=None, shape=(size, *shape[1:]))
            sizes = first - start, end - first - size
            key = f"pad{sizes}"
            put = functools.partial(_padded, sizes, 0)
            place = Place(first - start, size, key, put) if any(sizes) else None
            parts.append(dataclasses.replace(whole, shape=shape, place=place))
        else:
            return None
    return parts


def _padded(sizes: tuple[int, int], axis: int, x: Array) -> Array:
    return jnp.pad(x, [sizes if i == axis else (0, 0) for i in range(x.ndim)])


# Norms and kernels of factors are multiplied by the square of a scale at the end: those
# of 1 must stay in range, and those that are still in range must have had all digits.
_SCALES = 2.0**-24, 2.0**12


def _times_number(x: _Input) -> Views | None:
    """Multiplied or divided by a number; None for anything else."""
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
    """The contribution of a view to `add` or `sub`."""
    view, shape = x.view, x.shape
    if view.shape != shape:
        repeat = lambda array: jnp.broadcast_to(array, shape)
        kept = (
            axis if size == shape[axis] else None
            for axis, size in enumerate(view.shape)
        )
        axes = tuple(kept) if view.shape else (None,) * len(shape)
        key = f"repeat({view.loops}, {view.shape}, {shape})"
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
    kept = [axis for axis in order if old[axis] != 1]
    if [old[axis] for axis in kept] != [size for size in new if size != 1]:
        return None
    return tuple(None if size == 1 else kept.pop(0) for size in new)


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
