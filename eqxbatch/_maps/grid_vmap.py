"""`filter_grid_vmap`: maps a function over every combination of its arguments."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from .._base.checks import (
    called,
    has_numbers,
    is_one_key,
    key_remedy,
    match_prefix,
    NUMBERS,
)
from .._base.mesh import spec_of
from .._base.refs import is_ref
from .._base.trees import described, safe_zip
from .._base.types import checked
from .._batch.accumulators import Concat
from .._batch.batch import leaf_name, no_ref, positional_names, split_axes
from .._batch.memory import as_block_size, Size
from .._batch.slots import canonicalise, is_accumulator
from .._batch.transform import AbstractSharded, also_decorator, Out, P, run_compiled
from .micro_vmap import check_no_axis, MicroVmap


class GridAxis(eqx.Module):
    """What `grid` returns: names of grid axes, and for each the axis of the arrays."""

    names: tuple[str, ...] = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)

    def __repr__(self) -> str:
        return f"grid({self.names}, {self.axes})"


@checked
def grid(name: str | Sequence[str], axis: int | Sequence[int] = 0) -> GridAxis:
    """Assigns an argument of [`eqxbatch.filter_grid_vmap`][] to an axis of the grid.

    **Arguments:**

    - `name`: the name of the grid axis, or a tuple of names for arrays with several
        grid axes.
    - `axis`: the axis of the argument's arrays that is mapped: an int, or one for each
        name. Leaves that are not arrays are not mapped.

    `"i"` alone is short for `grid("i")`.

    Raises `TypeError` for names that are not strings and axes that are not ints. Raises
    `ValueError` for repeated names or axes, and for different numbers of names and
    axes.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_grid_vmap(
        ...     lambda weight, x: weight * x,
        ...     in_axes=(eqxbatch.grid(("i", "j"), (0, 1)), "j"),
        ... )
        >>> print(f(jnp.ones((2, 3)), jnp.arange(3.0)))
        [[0. 1. 2.]
         [0. 1. 2.]]

        ```
    """
    names = (name,) if isinstance(name, str) else tuple(name)
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    if not names or len(names) != len(axes) or len({*names}) < len(names):
        raise ValueError(
            "`grid` must be given names that differ, and an axis for each of them; got "
            f"{name!r} and {axis!r}."
        )
    return GridAxis(names, tuple(map(int, axes)))


def _is_grid_axis(x: Any) -> bool:
    return isinstance(x, GridAxis)


def _as_grid_axes(in_axes: PyTree) -> PyTree:
    """The axes with `grid(name)` for each name."""
    as_axis = lambda x: grid(x) if isinstance(x, str) else x
    return jtu.tree_map(as_axis, in_axes, is_leaf=_is_grid_axis)


class AbstractGridVmap(AbstractSharded, Generic[P, Out]):
    """`filter_grid_vmap` with results of the type of the function's."""

    fun: Callable[P, Out]
    _: dataclasses.KW_ONLY
    in_axes: PyTree = eqx.field(converter=_as_grid_axes)
    out_axes: int | str | Sequence[str] | dict[str, int] | None = None
    block_size: Size = eqx.field(default=None, converter=as_block_size)
    checkpoint: bool = False

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Out:
        return run_compiled(self, *args, **kwargs)


def _in_order(accumulator: dict[str, PyTree] | None) -> dict[str, PyTree] | None:
    """An equal dict whose order JAX keeps."""
    is_dict = isinstance(accumulator, dict)
    # JAX sorts the keys of a plain dict when a transform becomes an argument of a
    # program, but the order says which axis is reduced first.
    return collections.OrderedDict(accumulator) if is_dict else accumulator


class GridVmap(AbstractGridVmap[P, Out]):
    """Maps a function over a grid: zipped, unbatched and Cartesian axes in one call.

    Arguments on the same grid axis are zipped. Arguments on different grid axes are
    combined as a Cartesian product. The result equals that of nested `jax.vmap`s, one
    for each grid axis, but only one block of the grid is computed at a time, which
    bounds peak temporary memory.

    **Arguments:**

    - `fun`: a function of one example of each argument. Arguments and results may be
        any PyTrees, including modules.
    - `in_axes`: which arguments are on which grid axis: a PyTree prefix of the tuple of
        positional arguments, or a dict from argument names to such prefixes. The leaves
        are names of grid axes, for axis 0 of the arrays, or results of
        [`eqxbatch.grid`][] for other axes, or None for unmapped arguments. Each
        argument with arrays needs one of these: in a grid, there is no default for
        arguments that a dict does not name.
    - `out_axes`: the positions of the grid axes in the results: a tuple of names for
        the leading axes, a dict from names to positions, or a name or an int if there
        is only one axis. By default, grid axes come first, in the order in which they
        appear in the arguments (keyword arguments in alphabetical order).
    - `block_size`: the number of grid cells that are computed at a time, at least 1.
        Blocks cut the first grid axis of the results, and later ones only if the rest
        does not fit, so put the costliest argument on the first; reduced axes come
        last. An [`eqxbatch.MemoryBudget`][] chooses the largest size that
        fits; None computes the whole grid at once.
    - `accumulator`: how to reduce grid axes: a dict from their names to an
        [`eqxbatch.AbstractAccumulator`][] such as [`eqxbatch.Mean`][], or to a PyTree
        prefix of the output with accumulators as leaves. Axes are reduced in the order
        of the dict. Axes that are not named are kept.
    - `checkpoint`: whether reverse-mode differentiation saves only the inputs and
        recomputes each block in the backward pass.

    **Returns:**

    A function with the arguments of `fun`. The function is compiled on the first call;
    repeated calls with the same function and shapes are not retraced.

    **Raises:**

    - `ValueError` for a size below 1, if no array is on the grid, if arguments on the
        same grid axis have different sizes, for axes out of range, for names that are
        not in `in_axes`, for names in `in_axes` without an array, for arrays in
        arguments that `in_axes` does not name, for `out_axes` that do not name all axes
        of the results, and for an axis that is reduced in some outputs and kept in
        others.
    - `TypeError` for settings of the wrong type.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = lambda x, y: jnp.sin(x) * y
        >>> x, y = jnp.linspace(0.0, 1.0, 50), jnp.linspace(0.0, 2.0, 40)
        >>> surface = eqxbatch.filter_grid_vmap(f, in_axes=("i", "j"))
        >>> surface(x, y).shape
        (50, 40)

        ```

        Its mean over `j`, 500 cells at a time:

        ```python
        >>> mean = eqxbatch.filter_grid_vmap(
        ...     f,
        ...     in_axes={"x": "i", "y": "j"},
        ...     accumulator={"j": eqxbatch.Mean()},
        ...     block_size=500,
        ... )
        >>> mean(x, y).shape
        (50,)

        ```
    """

    _: dataclasses.KW_ONLY
    accumulator: dict[str, PyTree] | None = eqx.field(default=None, converter=_in_order)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run_compiled(self, *args, **kwargs)

    def __check_init__(self) -> None:
        names = self.out_axes
        if isinstance(names, (tuple, list)) and len({*names}) < len(names):
            raise ValueError(f"`out_axes` names a grid axis twice; got {names!r}.")

    def specs(self, args: tuple, kwargs: dict[str, Any], out: PyTree) -> PyTree:
        places = self._places(args, kwargs)
        sizes = _sizes(self.fun, (args, kwargs), places)
        # A grid axis is sharded in the results as it is in an argument.
        spread = {
            name: entry
            for leaf, place in safe_zip(jtu.tree_leaves((args, kwargs)), places)
            for name, axis in place.items()
            if (entry := spec_of(leaf)[axis]) is not None
        }

        def spec(x: Array) -> PartitionSpec:
            entries: list = [None] * x.ndim
            for level in self._levels(sizes):
                # A reduced axis has no position: its result is the same on all devices.
                if level.position is not None and level.name in spread:
                    entries[level.position] = spread[level.name]
            return PartitionSpec(*entries)

        return jtu.tree_map(spec, eqx.filter(out, eqx.is_array))

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = (args, kwargs)
        places = self._places(args, kwargs)
        sizes = _sizes(self.fun, call, places)
        # A name without an array would be left out of the results without a word.
        for axes in jtu.tree_leaves(self.in_axes, is_leaf=_is_grid_axis):
            for name in axes.names:
                if name not in sizes:
                    raise ValueError(
                        f"`in_axes` names the grid axis {name!r}, but its argument has "
                        "no arrays. Pass arrays, not Python numbers or lists."
                    )
        levels = self._levels(sizes)

        room = self.fitting_size("block_size", math.prod(sizes.values()), args, kwargs)
        # Loops see only the arrays on the grid; each cell shares all other leaves.
        leaves, treedef = jtu.tree_flatten(call)
        mapped = [x for x, place in safe_zip(leaves, places) if place]
        axes = [place for place in places if place]

        fun: Callable = self.fun

        def of_one(arrays: list) -> Any:
            remaining = list(arrays)
            pairs = safe_zip(leaves, places)
            filled = [remaining.pop(0) if place else x for x, place in pairs]
            args, kwargs = jtu.tree_unflatten(treedef, filled)
            return called(fun, args, kwargs, of="one point of the grid")

        # A block contains the innermost axes as a whole, so that what depends only on
        # the others is computed once for all of them.
        over = of_one
        for i, level in reversed([*enumerate(levels)]):
            # `room` counts blocks of the loops inside. An empty axis has a block size,
            # too.
            number = max(min(level.size, room), 1)
            room //= number
            over = self._mapped(over, level, levels[:i], axes, number)
        return over(mapped)

    def _mapped(
        self,
        fun: Callable[[list], Any],
        level: "_Level",
        outer: "list[_Level]",
        axes: list[dict[str, int]],
        size: int,
    ) -> Callable[[list], Any]:
        """Maps a function of arrays over one of their axes, within the outer loops."""
        transform = MicroVmap(
            fun,
            in_axes=([_axis_within(place, level, outer) for place in axes],),
            out_axes=functools.partial(_out_axis, level, outer),
            accumulator=level.accumulator,
            microbatch_size=size,
            # What is saved for a single block is needed all at once, recomputed or not.
            checkpoint=self.checkpoint and size < level.size,
        )
        # Errors name the arguments of the user's call, which these arrays are not.
        return lambda arrays: transform.apply((arrays,), {}, if_whole=None)

    def _places(self, args: tuple, kwargs: dict[str, Any]) -> list[dict[str, int]]:
        """For each leaf, which of its axes are grid axes."""
        # Each name, or None, can stand for all leaves of an argument.
        specs = split_axes(self.fun, self.in_axes, args, kwargs, _UNNAMED)
        prefix = match_prefix(
            "in_axes",
            specs,
            (args, kwargs),
            "a PyTree prefix of the arguments, with the name of a grid axis, "
            "`grid(name, axis)` or None for each part",
            is_leaf=lambda x: x is None or _is_grid_axis(x),
        )
        names = positional_names(self.fun, len(args))
        places: list[dict[str, int]] = []
        for path, axes, subtree in prefix:
            is_named = axes is not _UNNAMED
            if axes is not None and is_named and not _is_grid_axis(axes):
                raise TypeError(
                    "`in_axes` must consist of names of grid axes, `grid(name, axis)` "
                    f"and None; got {described(axes)}."
                )
            # All leaves get a place, so that they can be zipped with those of the call:
            # an empty one if they are the same on the whole grid.
            for sub, leaf in jtu.tree_leaves_with_path(subtree):
                name = leaf_name((*path, *sub), names)
                if is_ref(leaf) and axes is not None:
                    raise ValueError(no_ref(name))
                if axes is None or not eqx.is_array(leaf):
                    places.append({})
                    continue
                # Only now, as a dict need not name arguments without arrays.
                if not is_named:
                    raise ValueError(
                        f"`in_axes` does not say where {name}, an array, lies on the "
                        "grid. Pass a dict that gives its argument `grid(name, axis)`, "
                        "or None if it is the same on the whole grid."
                    )
                places.append(_place_of(name, axes, leaf))
        return places

    def _levels(self, sizes: dict[str, int]) -> "list[_Level]":
        """The loops, outermost first."""
        # To join the rows of an axis is to keep it.
        reduced = {}
        for name, accumulator in (self.accumulator or {}).items():
            _check_name("accumulator", name, sizes)
            if not _keeps_rows(name, accumulator):
                reduced[name] = accumulator
        names = [name for name in sizes if name not in reduced]
        positions = _positions(self.out_axes, names, sizes)
        # The first axis of the results is the outermost loop, which is cut first.
        # Negative positions count from the end, so they come after all others.
        names.sort(key=lambda name: (positions[name] < 0, positions[name]))
        levels = [_Level(x, sizes[x], Concat(), positions[x]) for x in names]
        # The first name is accumulated first.
        for name, accumulator in reversed(reduced.items()):
            levels.append(_Level(name, sizes[name], accumulator, None))
        return levels


# The axes of an argument that `in_axes` does not name. Maps give it axis 0, but in a
# grid there is no default.
_UNNAMED: Any = object()


@dataclasses.dataclass(frozen=True)
class _Level:
    """One of the nested loops.

    `position` is that of its axis in the results; None if it is reduced.
    """

    name: str
    size: int
    accumulator: PyTree
    position: int | None


def _out_axis(level: _Level, outer: list[_Level], leaf: Any) -> int | None:
    """The position of the axis in the results of a loop; `leaf` lacks it."""
    if not eqx.is_array(leaf):
        return None
    # Any axis will do: reductions take the results of examples along axis 0 anyway.
    if level.position is None:
        return 0
    # Positions are those among all axes of the results. Loops further out have yet to
    # add theirs, so that axes of these before this one do not count here.
    ndim = leaf.ndim + 1 + len(outer)
    positions = [_in_range(x.position, ndim, leaf.shape) for x in (level, *outer)]
    if len({*positions}) < len(positions):
        raise ValueError(
            f"`out_axes` puts two grid axes, '{level.name}' among them, at one place "
            f"of an output that has {ndim} axes."
        )
    position, *of_outer = positions
    return position - sum(other < position for other in of_outer)


def _in_range(position: Any, ndim: int, shape: tuple[int, ...]) -> int:
    if not -ndim <= position < ndim:
        raise ValueError(
            f"`out_axes` puts a grid axis at {position}, which is out of range: with "
            f"all of them, the output has {ndim} axes (for the loops inside, its "
            f"shape is {shape})."
        )
    return position % ndim


_SHARED_REMEDY = (
    "Name another axis of it, or None for an argument that is the same at all points."
)


def _place_of(name: str, axes: GridAxis, leaf: Any) -> dict[str, int]:
    place = {}
    for grid_axis, axis in safe_zip(axes.names, axes.axes):
        if not -leaf.ndim <= axis < leaf.ndim:
            remedy = key_remedy(name, None) if is_one_key(leaf) else _SHARED_REMEDY
            raise ValueError(
                f"`in_axes` says that axis {axis} of {name} is the grid axis "
                f"'{grid_axis}', which is out of range for its shape {leaf.shape}. "
                f"{remedy}"
            )
        place[grid_axis] = axis % leaf.ndim
    # Two loops cannot take the same axis away.
    if len({*place.values()}) < len(place):
        raise ValueError(
            f"`in_axes` gives one axis of {name} to two grid axes; got {axes}."
        )
    return place


def _axis_within(
    place: dict[str, int], level: _Level, outer: list[_Level]
) -> int | None:
    """The axis of an array from which the outer loops have removed theirs."""
    axis = place.get(level.name)
    if axis is None:
        return None
    # An array without the axis of an outer loop has lost none to it.
    return axis - sum(place.get(other.name, axis) < axis for other in outer)


def _sizes(
    fun: Callable, call: tuple[tuple, dict], places: list[dict[str, int]]
) -> dict[str, int]:
    """The lengths of the grid axes, in order of their first appearance."""
    names = positional_names(fun, len(call[0]))
    leaves = jtu.tree_leaves_with_path(call)
    # The length of each grid axis in each array that has it, by words for a message.
    listing: dict[str, dict[str, int]] = {}
    for (path, leaf), place in safe_zip(leaves, places):
        for name, axis in place.items():
            where = f"axis {axis} of {leaf_name(path, names)}, shape {leaf.shape}"
            listing.setdefault(name, {})[where] = leaf.shape[axis]
    if not listing:
        remedy = ""
        if any(map(has_numbers, (*call[0], *call[1].values()))):
            remedy = f" {NUMBERS}"
        raise ValueError(
            "`in_axes` gives no array an axis of the grid, so there is nothing to map "
            'over. Mark an argument that has arrays, as in `in_axes={"x": "i"}`.'
            f"{remedy}"
        )
    # Zipped axes advance together, so that no length is broadcast, not even 1.
    for name, lengths in listing.items():
        if len({*lengths.values()}) > 1:
            sizes = "; ".join(f"{where} has {size}" for where, size in lengths.items())
            raise ValueError(
                "Arguments on the same grid axis are zipped and must have the same "
                f"size, but for '{name}' {sizes}. Fix the shapes, or use another name "
                "for one of them to compute every combination."
            )
    return {name: next(iter(lengths.values())) for name, lengths in listing.items()}


def _keeps_rows(name: str, accumulator: PyTree) -> bool:
    """Whether the results keep the axis; raises if only some of them do."""
    leaves = jtu.tree_leaves(accumulator, is_leaf=is_accumulator)
    concats = [x for x in map(canonicalise, leaves) if isinstance(x, Concat)]
    # One nesting of loops serves all outputs, and axes that are kept are outermost.
    if len(concats) not in (0, len(leaves)):
        raise ValueError(
            f"`accumulator` keeps the grid axis '{name}' in some outputs and not in "
            "others. Make one call for each, or keep it and reduce afterwards."
        )
    for concat in concats:
        check_no_axis(concat)
    return bool(concats)


def _check_name(argument: str, name: Any, sizes: dict[str, int]) -> None:
    if name not in sizes:
        raise ValueError(
            f"`{argument}` names the grid axis {name!r}, but `in_axes` has only "
            f"{tuple(sizes)}."
        )


def _positions(
    out_axes: Any, names: list[str], sizes: dict[str, int]
) -> dict[str, int]:
    """The position of each kept axis in the results."""
    # These are in the order in which the arguments name them.
    if out_axes is None:
        return {name: number for number, name in enumerate(names)}
    if isinstance(out_axes, int):
        if len(names) != 1:
            raise ValueError(
                f"`out_axes` is {out_axes}, a place for one grid axis, but the results "
                f"have {tuple(names)}. Pass a tuple of names, or a dict from names to "
                "places."
            )
        return {names[0]: out_axes}
    # Names alone are those of the leading axes.
    if isinstance(out_axes, str):
        out_axes = (out_axes,)
    is_dict = isinstance(out_axes, dict)
    positions = out_axes if is_dict else {x: i for i, x in enumerate(out_axes)}
    # Unknown names have a message of their own: a typo is no axis that is reduced.
    for name in positions:
        _check_name("out_axes", name, sizes)
    if {*positions} != {*names}:
        raise ValueError(
            "`out_axes` must name each grid axis that the results have, "
            f"{tuple(names)}, and no other; got {tuple(positions)}. Grid axes with an "
            "accumulator other than `Concat` are not in the results."
        )
    return positions


filter_grid_vmap = also_decorator("filter_grid_vmap", GridVmap, AbstractGridVmap)
