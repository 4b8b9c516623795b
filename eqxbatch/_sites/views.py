"""Linear functions of one parameter, as a program applies them.

A `View` is built step by step: `view_rules.py` says what becomes of one in an equation
that is linear in it.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from .._base.dtypes import is_complex
from .._base.jaxpr_types import Aval
from .._base.trees import safe_zip


# Values of a program: arrays, keys and numbers, or only their types; None for one that
# is not known, or not needed.
Values = list[Any]


class Loop(NamedTuple):
    """A `scan` around an equation: its number, which grows inwards, and its length."""

    number: int
    length: int


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

    def __repr__(self) -> str:
        use = "sliced" if self.is_sliced else "the same"
        steps = f"{self.length} step{'s' * (self.length != 1)}"
        if self.start is not None:
            steps += f" of {self.loop.length}, from {self.start} on"
        return f"{use} in {steps}"


def merged_loops(*loops: Loops) -> Loops:
    """The loops of several values, outermost first."""
    # Inner loops have larger indices.
    return tuple(sorted(set(itertools.chain(*loops))))


class Read(NamedTuple):
    """A value that a view reads: its index among those of the program, its loops."""

    index: int
    loops: Loops


class LinearMap(NamedTuple):
    """A linear function of an array and of the values with the indices in `reads`."""

    fun: Callable[[Array, Values], Array]
    reads: tuple[int, ...]


class Range(NamedTuple):
    """The entries from `start` on, up to `stop`, along an axis of a leaf."""

    axis: int
    start: int
    stop: int


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
    - `maps`: the steps, one after the other.
    - `key`: equal for two views that are the same function.
    - `axes`: for each axis of the view, including leading ones, the corresponding axis
        of the leaf, or None if the leaf is repeated along it. None if some axis is
        neither, for example after a reshape or a slice.
    - `scale`: a factor of the leaf.
    - `is_weighted`: whether each entry is multiplied by its own weight.
    - `is_isometry`: whether the transpose of the view keeps the norm, up to `scale`.
    - `place`: the position of the view in an array of zeros, which gives it its shape.
        This comes last, so that a loop over the array uses the leaf in some steps only.
    - `ranges`: the entries that slices have left of axes of the leaf.
    """

    leaf: int
    type_of_leaf: Any
    shape: tuple[int, ...]
    axes: tuple[int | None, ...] | None
    loops: tuple[Steps, ...] = ()
    maps: tuple[LinearMap, ...] = ()
    key: tuple[str, ...] = ()
    scale: float | complex = 1.0
    is_weighted: bool = False
    is_isometry: bool = True
    place: Place | None = None
    ranges: tuple[Range, ...] = ()

    def __repr__(self) -> str:
        scale = "" if self.scale == 1 else f" scaled by {self.scale:g}"
        steps = [f"leaf {self.leaf}", *self.step_names]
        return f"{' > '.join(steps)} {self.shape}{scale}"

    @property
    def step_names(self) -> list[str]:
        """What it was built by: names of primitives, or words of our own."""
        return [re.split(r"[\[( ]", key)[0] for key in self.key]

    @property
    def is_complex(self) -> bool:
        return is_complex(self.type_of_leaf)

    @property
    def key_of_loops(self) -> str:
        """Equal for two views that differ in the same steps of the same loops."""
        return str([dataclasses.astuple(steps) for steps in self.loops])

    @property
    def reads(self) -> list[int]:
        """The indices of the values that it reads."""
        return [i for step in self.maps for i in step.reads]

    @property
    def is_whole(self) -> bool:
        """Whether entries are distinct entries of the leaf, times a number."""
        return self.axes is not None and None not in self.axes and self.place is None

    def is_apart(self, other: "View") -> bool:
        """Whether two views of a leaf have no entry in common."""
        pairs = itertools.product(self.ranges, other.ranges)
        return any(
            x.axis == y.axis and (x.stop <= y.start or y.stop <= x.start)
            for x, y in pairs
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
        # None of these is repeated, as the view is whole.
        ranges = [
            Range(axis, first, first + size)
            for axis, first, size in axes
            if axis is not None
        ]
        return dataclasses.replace(view, ranges=(*self.ranges, *ranges))

    def apply(self, x: Array, values: Values) -> Array:
        """Applies the view to a leaf `x`; `values` are those of the program."""
        for fun, reads in self.maps:
            x = fun(x, [values[i] for i in reads])
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
        place, steps = self.place, Steps(loop, loop.length)
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
        values: Sequence[Read] = (),
    ) -> "View":
        """The view after one more step.

        `step` and `axes` refer to the input without leading axes. For each axis of the
        result, `axes` has the axis that it was, or None for a new one. `values` are
        what else `step` takes.
        """
        # A place comes last, so a further step is applied to the array with its zeros.
        view = self.in_zeros()
        of_values = [value.loops for value in values]
        # The result differs in the steps of all loops in which the view or a value
        # does.
        steps_of = {steps.loop: steps for steps in view.loops}
        merged = merged_loops(tuple(steps_of), *of_values)
        loops = tuple(steps_of.get(loop, Steps(loop, loop.length)) for loop in merged)
        # Axes of the step's result are looked up among those of the view. In loops that
        # only values have, the view is repeated: `lead` has None for these.
        before, composed = view.axes, None
        if before is not None and axes is not None:
            num = len(view.loops)
            lead = dict(safe_zip(view.loops, before[:num]))
            new = (None if axis is None else before[num + axis] for axis in axes)
            composed = (*map(lead.get, loops), *new)
        fun = _over_steps(step, view, of_values, loops)
        return dataclasses.replace(
            view,
            shape=tuple(shape),
            axes=composed,
            loops=loops,
            maps=(*view.maps, LinearMap(fun, tuple(value.index for value in values))),
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
        axes = [0 if steps.loop in around else None for around in of_values]
        in_axes = (0 if steps in view.loops else None, axes)
        run = jax.vmap(run, in_axes, axis_size=steps.length)

    # Values have all steps of a loop, and views only those that use the leaf.
    def cut(x: Array, values: Values) -> Array:
        values = [*values]
        for steps in view.loops:
            for i, around in enumerate(of_values):
                if steps.start is not None and steps.loop in around:
                    values[i] = jax.lax.slice_in_dim(
                        *(values[i], steps.start, steps.start + steps.length),
                        axis=around.index(steps.loop),
                    )
        return run(x, values)

    return cut


def leaf_view(index: int, aval: Aval) -> View:
    """The leaf itself."""
    return View(index, aval, aval.shape, tuple(range(len(aval.shape))))
