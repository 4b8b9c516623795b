"""A kernel of two sides of examples: its blocks, and the axes of what it returns."""

import abc
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Bool, PyTree, Shaped

from .._base.checks import match_prefix
from .._base.cpu import with_mirror_image
from .._base.dtypes import widened
from .._base.jaxpr_types import Eqn
from .._base.jaxprs import equations_in
from .._base.platforms import platform
from .._base.primitives import PRODUCTS
from .._base.refs import without_refs
from .._base.structs import is_struct, with_arrays
from .._base.trees import safe_zip, shown
from .._base.types import AnyArray
from .._batch.blocks import block_struct
from .._batch.memory import available_bytes, MemoryBudget
from .._batch.rows import Rows
from .grid import Grid, Sizes


# Shapes are looked up with different numbers of rows and columns, to tell them apart.
SAMPLE = 2, 3


_LEADING = (0, 1)


# Factors of examples may take as much memory as the blocks in use.
SHARE = 2


def room_of(sizes: Sizes | MemoryBudget) -> int:
    """The number of bytes for factors of examples; 0 if a budget says it later.

    It is a power of two, so that it changes rarely; it only decides the number of
    panels.
    """
    return 0 if isinstance(sizes, MemoryBudget) else available_bytes(1) // SHARE


class Flat(NamedTuple):
    """An output of a kernel function, with shapes for its arrays."""

    leaves: tuple[Any, ...]
    treedef: Any

    @property
    def tree(self) -> PyTree:
        return self.treedef.unflatten(self.leaves)

    def with_arrays(self, arrays: Sequence) -> PyTree:
        """The output with these arrays."""
        return with_arrays(self.tree, arrays)


class RowsOfSides(NamedTuple):
    """The examples of both sides; a single object if they are the same."""

    first: Rows
    second: Rows

    def structs(self, sizes: tuple[int, int]) -> "RowsOfSides":
        """The shapes of blocks of both sides."""
        first, second = (
            Rows(
                [block_struct(*x, size) for x in safe_zip(rows.arrays, rows.axes)],
                rows.axes,
                size,
            )
            for rows, size in safe_zip(self, sizes)
        )
        return RowsOfSides(first, second)


@dataclasses.dataclass(frozen=True)
class KernelLeaf:
    """One array that the kernel function returns.

    - `axes`: the axes of the rows and of the columns; None for a missing one.
    - `sample`: its shape for two rows and three columns.
    """

    path: str
    axes: tuple[int | None, int | None]
    sample: tuple[int, ...]
    dtype: Any

    @property
    def is_pairwise(self) -> bool:
        return None not in self.axes

    @property
    def further(self) -> tuple[int, ...]:
        """The sizes of its axes other than those of the rows and of the columns."""
        return tuple(n for i, n in enumerate(self.sample) if i not in self.axes)

    def struct(self, sizes: tuple[int, int]) -> jax.ShapeDtypeStruct:
        """Its shape and dtype for given numbers of rows and columns."""
        shape = list(self.sample)
        for axis, size in safe_zip(self.axes, sizes):
            if axis is not None:
                shape[axis] = size
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype)

    def front(self, tile: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The tile with its rows and columns as its first two axes."""
        row, column = self.axes
        assert row is not None
        assert column is not None
        return jnp.moveaxis(tile, (row, column), _LEADING)

    def written(
        self, whole: Shaped[Array, "..."], tile: Shaped[Array, "..."], *starts: Any
    ) -> Shaped[Array, "..."]:
        """The array with a tile whose rows and columns start at these places."""
        # A tile of everything needs no copy.
        if tile.shape == whole.shape:
            return tile
        # Of its further axes, a tile has all.
        place = [jnp.zeros((), jnp.int32) for _ in tile.shape]
        for axis, start in safe_zip(self.axes, starts):
            if axis is not None:
                place[axis] = jnp.asarray(start, jnp.int32)
        return lax.dynamic_update_slice(whole, tile, place)

    def every(self, tile: Shaped[Array, "..."], step: int) -> Shaped[Array, "..."]:
        """Every `step`th row and column of a tile."""
        steps = (step if axis in self.axes else 1 for axis in range(tile.ndim))
        return tile[tuple(slice(None, None, n) for n in steps)]

    def transposed(self, tile: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The tile with its rows and columns exchanged."""
        return self.back(jnp.swapaxes(self.front(tile), 0, 1))

    def back(self, tile: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        row, column = self.axes
        assert row is not None
        assert column is not None
        return jnp.moveaxis(tile, _LEADING, (row, column))


def of_pairs(
    leaves: Sequence[KernelLeaf], fun: Callable[..., Array], *tiles: Sequence[Array]
) -> list[Array]:
    """`fun(leaf, ...)` of the arrays of tiles that have an entry for each pair.

    Others, with rows only or columns only, are those of the first tile.
    """
    return [
        fun(leaf, *arrays) if leaf.is_pairwise else arrays[0]
        for leaf, *arrays in safe_zip(leaves, *tiles)
    ]


@dataclasses.dataclass(frozen=True)
class TileMirror:
    """Exchanges rows and columns of tiles, without holding arrays of the kernel.

    - `symmetric`, `leaves`, `out`: as in `AbstractBlockKernel`, but not None.
    """

    symmetric: Any
    leaves: tuple[KernelLeaf, ...]
    out: Flat

    @property
    def is_transpose(self) -> bool:
        return self.symmetric is True

    def __call__(self, tile: list[Array]) -> list[Array]:
        """The arrays of the mirror image of a tile."""
        if self.is_transpose:
            mirror = lambda leaf, x: jnp.conj(leaf.transposed(x))
            return of_pairs(self.leaves, mirror, tile)
        # A user's function takes what `kernel_fn` returns, with what is no array in it.
        arrays = jtu.tree_leaves(self.symmetric(self.out.with_arrays(tile)))
        mirrored = [x for x in arrays if eqx.is_array(x)]
        for leaf, x, y in safe_zip(self.leaves, tile, mirrored):
            if not leaf.is_pairwise:
                continue
            shape = jax.eval_shape(leaf.transposed, x).shape
            if y.shape != shape:
                raise ValueError(
                    "`symmetric` must return the block with rows and columns "
                    f"exchanged, of shape {shape}; got {y.shape}."
                )
        return mirrored


def flattened(out: PyTree) -> Flat:
    leaves, treedef = jtu.tree_flatten(out)
    return Flat(tuple(leaves), treedef)


class AbstractBlockKernel(eqx.Module):
    """A kernel: factors of blocks of examples, and tiles from two such blocks.

    It can be passed to compiled functions, each of which finds out what it returns.

    - `symmetric`: None if the kernel is not known to be symmetric; True if it is
        symmetric under exchange of its two axes; or a function from a block to its
        mirror image.
    - `sizes`: the largest number of rows and of columns in a block, None for all; or a
        budget, which becomes such a pair before there are blocks.
    - `room`: the number of bytes for factors of examples.
    - `is_users`: whether `symmetric` is what a user says of a function.
    """

    is_users: ClassVar[bool] = False

    _: dataclasses.KW_ONLY
    symmetric: Any = None
    sizes: Sizes | MemoryBudget = eqx.field(static=True, default=(None, None))
    room: int = eqx.field(static=True, default=0)

    @property
    @abc.abstractmethod
    def parts(self) -> dict[str, PyTree]:
        """What identifies it on disk, by name, besides its program."""

    @property
    @abc.abstractmethod
    def leaves(self) -> tuple[KernelLeaf, ...]:
        """The arrays of the kernel, in the order of its blocks."""

    @property
    @abc.abstractmethod
    def out(self) -> Flat:
        """The output of the kernel function."""

    @property
    @abc.abstractmethod
    def bytes_kept(self) -> tuple[int, int]:
        """The bytes kept for an example of each side.

        They are 0 if tiles are computed from the examples themselves.
        """

    @property
    @abc.abstractmethod
    def rows(self) -> tuple[Rows, Rows]:
        """The examples of both sides; a single object if they are the same."""

    @abc.abstractmethod
    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        """The factors of some examples, computed in blocks of at most `size`."""

    @abc.abstractmethod
    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""]
    ) -> list[Array]:
        """The arrays of a tile, from the factors of a block of rows and of columns.

        Without `second`, both are the same. `always` is true, but XLA cannot know that
        at compile time.
        """

    @abc.abstractmethod
    def prepare(self) -> None:
        """Computes what all examples share.

        It is called before any loop, so that loops do not recompute it.
        """

    @abc.abstractmethod
    def tile(self, first: Rows, second: Rows | None) -> list[Array]:
        """The arrays of a tile, from the examples of a block of rows and of columns.

        Without `second`, both are the same.
        """

    def program(self, first: Rows, second: Rows | None) -> Any:
        """The jaxpr of a tile, as a function of the examples."""
        # Not of the method, whose arrays would be arguments of the program.
        tile = lambda first, second: self.tile(first, second)
        return without_refs(eqx.filter_make_jaxpr(tile)(first, second)[0])

    @property
    def is_same(self) -> bool:
        """Whether both sides are the same examples."""
        return self.rows[0] is self.rows[1]

    @property
    def totals(self) -> tuple[int, int]:
        return self.rows[0].total, self.rows[1].total

    @functools.cached_property
    def grid(self) -> Grid:
        """How the kernel is cut into tiles."""
        assert isinstance(self.sizes, tuple)
        is_symmetric = self.is_same and self.symmetric is not None
        grid = Grid.of(self.totals, self.sizes, self.is_same, is_symmetric)
        # An array of one side alone has entries even if the other side has no examples:
        # then there is one tile, with size 0 for that side.
        if any(not leaf.is_pairwise for leaf in self.leaves) and any(self.totals):
            rows, columns = map(min, grid.sizes, self.totals)
            return dataclasses.replace(grid, sizes=(rows, columns))
        return grid

    def num_kept(self, bytes_of_one: int) -> int:
        """The number of examples whose factors can be kept."""
        return max(self.totals) if not bytes_of_one else self.room // bytes_of_one

    def structs(self, sizes: tuple[int, int]) -> RowsOfSides:
        """The shapes of blocks of both sides."""
        return RowsOfSides(*self.rows).structs(sizes)

    def output(self, arrays: Sequence) -> PyTree:
        """The output of the kernel function, with these arrays."""
        return self.out.with_arrays(arrays)

    @property
    def mirror(self) -> TileMirror:
        return TileMirror(self.symmetric, self.leaves, self.out)

    @property
    def checks_symmetry(self) -> bool:
        """Whether blocks of examples with themselves are compared with their images."""
        return self.symmetric is not None and self.is_users

    def is_symmetric(self, tile: list[Array]) -> Bool[Array, ""] | None:
        """Whether a tile on the diagonal is its mirror image, within rounding.

        Of a large tile, rows and columns at equal distances are compared. None if that
        is not checked.
        """
        if not self.checks_symmetry:
            return None
        # At most `_COMPARED` rows and columns are enough to find a mistake. The check
        # has no derivative.
        step = compared_step(max(self.grid.sizes))
        sample = [
            lax.stop_gradient(leaf.every(x, step))
            for leaf, x in safe_zip(self.leaves, tile)
        ]
        is_equal = jnp.array(True)
        for leaf, x, y in safe_zip(self.leaves, sample, self.mirror(sample)):
            if leaf.is_pairwise:
                x, y = widened(leaf.front(x)), widened(leaf.front(y))
                is_equal &= is_close(x, y, self._rounding)
        return is_equal

    @functools.cached_property
    def _rounding(self) -> float:
        """The relative rounding error of the shortest numbers that tiles pass."""
        closed = self.program(*self.structs(SAMPLE))
        return max(map(_rounding_of, equations_in(closed)), default=0.0)

    def symmetrised(self, tile: list[Array]) -> list[Array]:
        """A tile on the diagonal, made exactly symmetric."""
        if self.symmetric is True:
            # A transposition can be made piece by piece, and any other exchange cannot.
            make = lambda leaf, x: leaf.back(_with_common_entries(leaf.front(x)))
            return of_pairs(self.leaves, make, tile)
        both = lambda _, x, y: _common(x, y)
        return of_pairs(self.leaves, both, tile, self.mirror(tile))


# The largest number of rows of a block that are compared with its mirror image.
_COMPARED = 256


def compared_step(size: int) -> int:
    """The distance of the rows of a block that are compared with its mirror image.

    It has no small divisors, because rows may be of kinds that take turns.
    """
    step = max(1, -(-size // _COMPARED))
    return next(i for i in itertools.count(step) if math.gcd(i, 2 * 3 * 5 * 7) == 1)


def _rounding_of(eqn: Eqn) -> float:
    """The relative rounding error of the results of an equation."""
    dtypes = [x.aval.dtype for x in eqn.outvars if hasattr(x.aval, "dtype")]
    dtypes = [x for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    # Where products cost more with all digits, their operands are rounded to bfloat16.
    if platform().exact_product > 1 and eqn.primitive.name in _ROUNDED:
        # Of float64, they are exact, and the largest error counts.
        short = jnp.bfloat16
        dtypes = [x if jnp.finfo(x).bits > 32 else short for x in dtypes]
    return max((float(jnp.finfo(x).eps) for x in dtypes), default=0.0)


# The primitives whose operands a device may round; the last one is JAX's own.
_ROUNDED = PRODUCTS | {"ragged_dot_general"}


def is_close(
    x: AnyArray, y: AnyArray, rounding: float, xp: types.ModuleType = jnp
) -> Any:
    """Whether arrays are equal within rounding, at the scale of rows and columns.

    A third of the digits count: steep functions of products with long sums lose the
    others. What is not finite is not compared. `xp` is the library of the arrays.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return xp.all(x == y)
    size = xp.maximum(xp.abs(x), xp.abs(y))
    size = xp.where(xp.isfinite(size), size, 0)
    # An entry is small or not beside those of its row and of its column, [n].
    largest = xp.max(size, axis=tuple(range(1, x.ndim)), initial=0)
    scale = xp.maximum(largest[:, None], largest[None, :])
    scale = xp.expand_dims(scale, tuple(range(2, x.ndim)))
    # Infinities that are equal have no difference.
    are_finite = xp.isfinite(x) & xp.isfinite(y)
    difference = xp.abs(xp.where(are_finite, x, 0) - xp.where(are_finite, y, 0))
    return ~xp.any(difference > rounding ** (1 / 3) * scale)


def _common(x: Shaped[Array, "..."], y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """A combination of two arrays that does not depend on their order."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.where(x == y, x, (x + y) / 2)
    # Real numbers have an order; the larger one is an entry and no new rounding.
    return jnp.maximum(x, y)


def _with_common_entries(x: Shaped[Array, "n n ..."]) -> Shaped[Array, "n n ..."]:
    exchanged = lambda x: jnp.conj(jnp.swapaxes(x, 0, 1))
    return with_mirror_image(x, _common, exchanged)


def leaves_at(out_axes: PyTree, out: PyTree) -> list[KernelLeaf]:
    """The arrays that a kernel function returns, with rows and columns on these axes.

    `out` has their shapes for a sample. Raises `ValueError` or `TypeError` for axes
    that do not fit.
    """
    places = match_prefix(
        "out_axes",
        out_axes,
        out,
        "a PyTree prefix of what `kernel_fn` returns, with a pair of axes, or None in "
        "place of one, for each part",
        is_leaf=is_axes,
    )
    leaves = [
        _make_leaf(jtu.keystr((*path, *sub)), axes, leaf)
        for path, axes, part in places
        for sub, leaf in jtu.tree_leaves_with_path(part)
        if is_struct(leaf)
    ]
    if not leaves:
        raise ValueError(
            f"`kernel_fn` must return at least one array; got {shown(out)}. Return the "
            "kernel of `x1` with `x2`."
        )
    return leaves


def is_axes(x: object) -> bool:
    """Whether `axes` is a pair of axes, not a PyTree of pairs."""
    # `True` is an int for Python, but not an axis.
    return (
        isinstance(x, tuple)
        and len(x) == 2
        and all(
            a is None or (isinstance(a, int) and not isinstance(a, bool)) for a in x
        )
    )


def _make_leaf(path: str, axes: Any, struct: jax.ShapeDtypeStruct) -> KernelLeaf:
    # What says nothing of rows and columns is a mistake in `out_axes`.
    shape = tuple(struct.shape)
    if not is_axes(axes):
        raise TypeError(
            "`out_axes` must consist of pairs `(axis of the rows, axis of the "
            f"columns)`, with None for one that is not there; got {shown(axes)}."
        )
    got = (
        f"`kernel_fn` returned shape {shape} in output{path} for {SAMPLE[0]} rows and "
        f"{SAMPLE[1]} columns"
    )
    remedy = (
        "Return an array with these axes, or declare by `out_axes` what there is, with "
        "None for an axis that is missing, as in `(0, None)` for a value for each row. "
        "For a kernel of single examples, pass `pairwise=True`."
    )
    # Tiles would overwrite each other's array.
    if axes == (None, None):
        raise ValueError(
            f"`out_axes` gives output{path} neither rows nor columns, so that there "
            "would be one for each block. Return it separately."
        )
    # Samples have different numbers of rows and columns, which tell axes apart.
    resolved: list[int | None] = []
    for name, size, axis in safe_zip(("rows", "columns"), SAMPLE, axes):
        if axis is None:
            resolved.append(None)
            continue
        if not -len(shape) <= axis < len(shape) or shape[axis] != size:
            raise ValueError(
                f"{got}, whose axis {axis} should be the axis of the {name}. {remedy}"
            )
        # Counted from the front from here on.
        resolved.append(axis % len(shape))
    return KernelLeaf(path, (resolved[0], resolved[1]), shape, struct.dtype)
