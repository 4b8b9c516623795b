"""Views: linear functions of one parameter, as a program applies them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.jaxprs import literal
from .._base.primitives import SUMS
from .rules import unknown_parameters
from .shared import Loop, merged_loops


@dataclasses.dataclass(frozen=True)
class _Step:
    """A linear function of an array; `values` are indices of values that it reads."""

    fun: Callable[[Array, list], Array]
    values: tuple[int, ...] = ()


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
        `loops`: the loops in which the view differs between steps, outermost first.
    - `windows`: the loops in some of whose steps the view is zero, with the first of
        the others and their number.
    - `key`: equal for two views that are the same function.
    - `axes`: for each axis of the view, including leading ones, the corresponding axis
        of the leaf, or None if the leaf is repeated along it. None if some axis is
        neither, for example after a reshape or a slice.
    - `scale`: a factor of the leaf.
    - `is_weighted`: whether each entry is multiplied by its own weight.
    - `is_isometry`: whether the transpose of the view keeps the norm, up to `scale`.
    - `place`: the position of the view in an array of zeros, which gives it its shape.
        This comes last, so that a loop over the array uses the leaf in some steps only.
    """

    leaf: int
    type_of_leaf: Any
    shape: tuple[int, ...]
    axes: tuple[int | None, ...] | None
    loops: tuple[Loop, ...] = ()
    windows: tuple[tuple[Loop, tuple[int, int]], ...] = ()
    steps: tuple[_Step, ...] = ()
    key: tuple[str, ...] = ()
    scale: float | complex = 1.0
    is_weighted: bool = False
    is_isometry: bool = True
    place: _Place | None = None

    @property
    def is_complex(self) -> bool:
        return is_complex(self.type_of_leaf)

    @property
    def is_whole(self) -> bool:
        """Whether entries are distinct entries of the leaf, times a number."""
        return self.axes is not None and None not in self.axes and self.place is None

    def apply(self, x: Array, values: list) -> Array:
        """Applies the view to a leaf `x`; `values` are those of the program."""
        for step in self.steps:
            x = step.fun(x, [values[i] for i in step.values])
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
        place = self.place
        window = () if place is None else ((loop, (place.start, place.size)),)
        return dataclasses.replace(
            self,
            loops=(*self.loops, loop),
            windows=(*self.windows, *window),
            shape=self.shape[1:],
            place=None,
        )

    def in_zeros(self) -> "View":
        """The view with the zeros around it."""
        place = self.place
        if place is None:
            return self
        shape = (place.size, *self.shape[1:])
        own = dataclasses.replace(self, place=None, shape=shape)
        return own.then(place.key, place.put, self.shape, None, is_isometry=False)

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
        loops = merged_loops(view.loops, *of_values)
        own, composed = view.axes, None
        if own is not None and axes is not None:
            num = len(view.loops)
            lead = dict(zip(view.loops, own[:num], strict=True))
            new = (None if axis is None else own[num + axis] for axis in axes)
            composed = (*map(lead.get, loops), *new)
        fun = _in_loops(step, view, of_values, loops)
        return dataclasses.replace(
            view,
            shape=tuple(shape),
            axes=composed,
            loops=loops,
            steps=(*view.steps, _Step(fun, tuple(number for number, _ in values))),
            key=(*view.key, key),
            scale=view.scale * scale,
            is_weighted=view.is_weighted or is_weighted,
            is_isometry=view.is_isometry and is_isometry and loops == view.loops,
        )


def _in_loops(
    step: Callable[..., Array],
    view: View,
    of_values: list[tuple[Loop, ...]],
    loops: tuple[Loop, ...],
) -> Callable[[Array, list], Array]:
    """Maps a step over the loops of the view and of the values."""
    run, windows = lambda x, values: step(x, *values), dict(view.windows)
    for loop in reversed(loops):
        axes = [0 if loop in each else None for each in of_values]
        _, length = windows.get(loop, loop)
        run = jax.vmap(run, (0 if loop in view.loops else None, axes), axis_size=length)

    def cut(x: Array, values: list) -> Array:
        values = [*values]
        for loop, window in windows.items():
            for i, each in enumerate(of_values):
                if loop in each:
                    values[i] = jax.lax.slice_in_dim(
                        values[i], window[0], sum(window), axis=each.index(loop)
                    )
        return run(x, values)

    return cut


def leaf_view(index: int, aval: Any) -> View:
    """The leaf itself."""
    return View(index, aval, aval.shape, tuple(range(len(aval.shape))))


def extend_view(view: View, eqn: Any, index: int) -> list[View] | None:
    """The views after an equation, whose input with the given `index` is a view.

    There is one for each output of the equation. None if the equation is not known to
    be linear in this input.
    """
    name = eqn.primitive.name
    shapes = [var.aval.shape for var in eqn.outvars]
    shape = shapes[0]
    given = [var.aval.shape for var in eqn.invars]
    key = f"{name}[{index}]({view.loops}, {given}, {eqn.params})"
    bind = lambda x: eqn.primitive.bind(x, **eqn.params)

    if unknown_parameters(eqn):
        return None
    if name in SUMS:
        return [_summand(view, eqn, index)]
    if name in ("transpose", "squeeze", "broadcast_in_dim", "reshape"):
        if len(eqn.invars) > 1:  # A dynamic shape.
            return None
        axes = _kept_axes(name, view.shape, shape, eqn.params)
        # Broadcasting is not an isometry: its transpose is a sum.
        same = math.prod(shape) == math.prod(view.shape)
        return [view.then(key, bind, shape, axes, is_isometry=same)]
    if name in ("convert_element_type", "copy", "copy_p"):
        if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
            return None
        # The real part of a complex array is not a view of the same dimension.
        old, new = (is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if old and not new:
            return None
        if new and not old:
            # Its transpose takes the real part.
            return [view.then(key, bind, shape, None, is_isometry=False)]
        return [view.then(key, bind, shape, tuple(range(len(shape))))]
    if name == "neg":
        axes = tuple(range(len(shape)))
        return [view.then(key, bind, shape, axes, scale=-1.0)]
    if name == "slice" and shape == view.shape:
        # The whole array, for example if an axis of size 1 is indexed.
        return [view.then(key, bind, shape, tuple(range(len(shape))))]
    if name in ("slice", "rev", "reduce_sum"):
        return [view.then(key, bind, shape, None, is_isometry=name != "reduce_sum")]
    if name == "split":
        return [
            view.then(
                f"{key}[{i}]",
                lambda x, i=i: eqn.primitive.bind(x, **eqn.params)[i],
                shape,
                None,
            )
            for i, shape in enumerate(shapes)
        ]
    if name == "concatenate":
        return [_in_zeros(view, eqn, index, key)]
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


def _in_zeros(view: View, eqn: Any, index: int, key: str) -> View:
    """A view as a part of the output of `concatenate`."""
    axis = eqn.params["dimension"]
    start = sum(var.aval.shape[axis] for var in eqn.invars[:index])
    return _placed(view, eqn, start, axis, key)


def _placed(view: View, eqn: Any, start: int, axis: int, key: str) -> View:
    """A view as a part of the output of an equation, from `start` on along an axis."""
    view = view.in_zeros()
    shape, size = eqn.outvars[0].aval.shape, view.shape[axis]
    sizes = (start, shape[axis] - start - size)
    key = f"{key} at {start}"

    def put(x: Array) -> Array:
        return jnp.pad(x, [sizes if i == axis else (0, 0) for i in range(x.ndim)])

    if axis:
        return view.then(key, put, shape, None, is_isometry=False)
    return dataclasses.replace(view, shape=shape, place=_Place(start, size, key, put))


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
    if not math.isfinite(abs(factor)):
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


def _kept_axes(
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
