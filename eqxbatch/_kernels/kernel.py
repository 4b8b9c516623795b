"""A kernel of two sides of examples: how it is cut into blocks, and called for them."""

import abc
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Key, PyTree, Shaped, UInt32

from .._base.backward import custom_backward
from .._base.checks import AnyArray, called, check_equal, check_types, match_prefix
from .._base.dtypes import widened
from .._base.jaxprs import constants, equations_in, is_struct, with_arrays
from .._base.mesh import (
    explicit_mesh,
    gathered,
    has_explicit_axes,
    mesh_of_results,
    put_on,
)
from .._base.platforms import (
    compiled,
    evaluate_in_loop,
    in_opaque_branch,
    platform,
    with_mirror_image,
)
from .._base.refs import without_refs
from .._base.trees import safe_zip, shown
from .._batch.batch import (
    available_bytes,
    Batch,
    block_struct,
    check_size,
    explained_failure,
    is_stored,
    MemoryBudget,
    read_rows,
    split_batch,
)
from .._batch.loop import Rows


class Tile(NamedTuple):
    """A block of rows by a block of columns, given by their indices."""

    row: int
    column: int


def balanced(total: int, size: int | None) -> int:
    """The smallest size that needs no more blocks than `size`."""
    if total == 0:
        return 1
    if size is None or size >= total:
        return total
    return math.ceil(total / math.ceil(total / size))


# The largest numbers of rows and of columns of a tile; None for all.
Sizes = tuple[int | None, int | None]


BlockSize = int | tuple[int, int] | MemoryBudget | None


def sizes_of(size: BlockSize) -> Sizes | MemoryBudget:
    """The sizes that a setting stands for, with a budget in bytes."""
    if isinstance(size, MemoryBudget):
        return MemoryBudget(MemoryBudget.resolve(size))
    return size if isinstance(size, tuple) else (size, size)


def check_block_size(size: BlockSize | str) -> BlockSize:
    if isinstance(size, tuple):
        if len(size) != 2:
            raise ValueError(
                "`block_size` must be one size, or a pair of them for rows and "
                f"columns; got {len(size)}."
            )
        rows, columns = (check_size("block_size", one) for one in size)
        if not isinstance(rows, int) or not isinstance(columns, int):
            raise TypeError(
                f"A pair of sizes must consist of ints; got {shown(size)}. A "
                "`MemoryBudget` is for both: pass it alone."
            )
        return rows, columns
    return check_size("block_size", size)


def _least(x: Any, y: int) -> Any:
    return min(x, y) if isinstance(x, int) else jnp.minimum(x, y)


@dataclasses.dataclass(frozen=True)
class Grid:
    """How a kernel is cut into tiles.

    All tiles have the same shape, so that one program computes them. The last block of
    a side overlaps with the previous one, and only its new rows count.

    - `totals`: the numbers of examples of the two sides.
    - `sizes`: the numbers of rows and columns of a tile. A side without examples has no
        block, or one of size 0 for arrays of the other side alone.
    - `is_same`: whether both sides are the same examples; tiles are then square.
    - `is_symmetric`: whether tiles below the diagonal are mirror images and not
        computed.
    - `num_panels`: the number of panels, which have equally many blocks of rows.
    """

    totals: tuple[int, int]
    sizes: tuple[int, int]
    is_same: bool
    is_symmetric: bool
    num_panels: int = 1

    @staticmethod
    def of(
        totals: tuple[int, int], sizes: Sizes, is_same: bool, is_symmetric: bool = False
    ) -> "Grid":
        """A grid of balanced tiles of at most these sizes."""
        if is_same:
            # The mirror image of a square tile is a tile, too.
            limits = [size for size in sizes if size is not None]
            sizes = (min(limits), min(limits)) if limits else (None, None)
        rows, columns = map(balanced, totals, sizes)
        return Grid(totals, (rows, columns), is_same, is_symmetric)

    def num(self, side: int) -> int:
        """The number of blocks of a side."""
        if self.sizes[side] == 0:
            return 1
        num = math.ceil(self.totals[side] / self.sizes[side])
        if side == 0 or self.is_same:
            # The last panel is filled by repeating the last block.
            num = math.ceil(num / self.num_panels) * self.num_panels
        return num

    def in_panels(self, most: int) -> "Grid":
        """The grid with panels of at most `most` rows, but at least one block.

        If both sides are the same, the number of panels is odd. Each panel is then
        combined with the half of the others that follows it in cyclic order.
        """
        num, height = self.num(0), max(most // max(self.sizes[0], 1), 1)
        if most >= self.totals[0] or num <= height:
            return self
        num_panels = math.ceil(num / height)
        num_panels += self.is_same and num_panels % 2 == 0
        rows = math.ceil(self.totals[0] / (math.ceil(num / num_panels) * num_panels))
        sizes = (rows, rows if self.is_same else self.sizes[1])
        return dataclasses.replace(self, sizes=sizes, num_panels=num_panels)

    @property
    def height(self) -> int:
        """The number of blocks of rows in a panel."""
        return self.num(0) // self.num_panels

    @property
    def panel_rows(self) -> int:
        """The number of rows of a panel."""
        return min(self.height * self.sizes[0], self.totals[0])

    @property
    def is_empty(self) -> bool:
        """Whether there are no tiles."""
        return 0 in (self.num(0), self.num(1))

    def start(self, side: int, index: Any) -> Any:
        """The start of a block; the last one overlaps with the previous one."""
        size = self.sizes[side]
        return _least(index * size, self.totals[side] - size)

    def panel_start(self, index: Any) -> Any:
        """The start of a panel; the last one overlaps with the previous one."""
        first = index * self.height * self.sizes[0]
        return _least(first, self.totals[0] - self.panel_rows)

    def is_ragged(self, side: int) -> bool:
        """Whether the last block overlaps with the previous one."""
        size = self.sizes[side]
        return size != 0 and self.num(side) * size != self.totals[side]

    def pairs(self) -> list[Tile]:
        """The tiles of a panel with all columns, except those of a block with itself.

        If both sides are the same, the columns are those of the panel.
        """
        return [
            Tile(row, column)
            for row in range(self.height)
            for column in range(self.height if self.is_same else self.num(1))
            if not self.is_same
            or (row < column if self.is_symmetric else row != column)
        ]

    def diagonal(self) -> list[Tile]:
        """The tiles of a panel's blocks with themselves, if both sides are the same."""
        return [Tile(i, i) for i in range(self.height)] if self.is_same else []

    def groups(self) -> list[tuple[list[Tile], bool]]:
        """The tiles of a panel with itself, and whether they are diagonal ones.

        These come last: they decide the entries that overlapping blocks share.
        """
        return [(self.pairs(), False), (self.diagonal(), True)]

    def is_diagonal(self, tile: Tile) -> bool:
        """Whether a tile is of a block with itself."""
        return self.is_same and tile.row == tile.column

    def part_of(self, tile: Tile, num_parts: int) -> int:
        """The part that a tile belongs to, if rows are divided into equal parts.

        In a symmetric kernel, a row of tiles has those with the half of the other
        blocks that follows it in cyclic order, so that all rows have about the same
        number of tiles.
        """
        row, column = tile
        num = self.num(0)
        if self.is_symmetric and 2 * (column - row) > num:
            row = column
        return row * num_parts // num


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


# The leaves and the structure of an output, with shapes for its arrays.
Flat = tuple[tuple[Any, ...], jtu.PyTreeDef]


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
        if tile.shape == whole.shape:
            return tile
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

    - `symmetric`, `leaves`, `out`: as in `AbstractBlockKernel`, but not None. A
        transpose of NumPy arrays needs no leaves.
    """

    symmetric: Any = True
    leaves: tuple[KernelLeaf, ...] = ()
    out: Flat = dataclasses.field(default_factory=lambda: flattened(()))

    @property
    def is_transpose(self) -> bool:
        return self.symmetric is True

    def __call__(self, tile: list[Array]) -> list[Array]:
        """The arrays of the mirror image of a tile."""
        if self.is_transpose:
            mirror = lambda leaf, x: jnp.conj(leaf.transposed(x))
            return of_pairs(self.leaves, mirror, tile)
        arrays = jtu.tree_leaves(self.symmetric(_filled(self.out, tile)))
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
    return tuple(leaves), treedef


def _filled(out: Flat, arrays: Sequence) -> PyTree:
    """The output of the kernel function, with arrays in place of shapes."""
    leaves, treedef = out
    return with_arrays(jtu.tree_unflatten(treedef, leaves), arrays)


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
        """The output of the kernel function, with shapes for its arrays."""

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

    @property
    def grid(self) -> Grid:
        """How the kernel is cut into tiles."""
        assert isinstance(self.sizes, tuple)
        is_symmetric = self.is_same and self.symmetric is not None
        grid = Grid.of(self.totals, self.sizes, self.is_same, is_symmetric)
        if any(not leaf.is_pairwise for leaf in self.leaves) and any(self.totals):
            rows, columns = map(min, grid.sizes, self.totals)
            return dataclasses.replace(grid, sizes=(rows, columns))
        return grid

    def num_kept(self, bytes_of_one: int) -> int:
        """The number of examples whose factors can be kept."""
        return max(self.totals) if not bytes_of_one else self.room // bytes_of_one

    def structs(self, sizes: tuple[int, int]) -> list[Rows]:
        """The shapes of blocks of both sides."""
        return [
            Rows(
                [block_struct(*x, size) for x in safe_zip(rows.arrays, rows.axes)],
                rows.axes,
                size,
            )
            for rows, size in safe_zip(self.rows, sizes)
        ]

    def output(self, arrays: Sequence) -> PyTree:
        """The output of the kernel function, with these arrays."""
        return _filled(self.out, arrays)

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
            one = lambda leaf, x: leaf.back(_symmetrised(leaf.front(x)))
            return of_pairs(self.leaves, one, tile)
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


def _rounding_of(eqn: Any) -> float:
    """The relative rounding error of the results of an equation."""
    dtypes = [x.aval.dtype for x in eqn.outvars if hasattr(x.aval, "dtype")]
    dtypes = [x for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    if platform().exact_product > 1 and eqn.primitive.name in _PRODUCTS:
        # Of float64, they are exact, and the largest error counts.
        short = jnp.bfloat16
        dtypes = [x if jnp.finfo(x).bits > 32 else short for x in dtypes]
    return max((float(jnp.finfo(x).eps) for x in dtypes), default=0.0)


_PRODUCTS = ("dot_general", "conv_general_dilated")


def is_close(x: Any, y: Any, rounding: float, xp: Any = jnp) -> Any:
    """Whether arrays are equal within rounding, at the scale of rows and columns.

    A third of the digits count: steep functions of products with long sums lose the
    others. What is not finite is not compared. `xp` is the library of the arrays.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return xp.all(x == y)
    size = xp.maximum(xp.abs(x), xp.abs(y))
    size = xp.where(xp.isfinite(size), size, 0)
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
    return jnp.maximum(x, y)


def _symmetrised(x: Shaped[Array, "n n ..."]) -> Shaped[Array, "n n ..."]:
    exchanged = lambda x: jnp.conj(jnp.swapaxes(x, 0, 1))
    return with_mirror_image(x, _common, exchanged)


# One key, or one for each example.
OneKey = Key[Array, "..."] | UInt32[AnyArray, "... 2"] | None


# Keys for both sides, or a pair with those for each side.
Keys = OneKey | tuple[OneKey, ...] | list[OneKey]


KEY_REMEDY = {"key": "`jax.random.key(seed)` makes one."}


# The examples of one side: `x`, keys, and keyword arguments.
SideArguments = tuple[PyTree, Any, dict[str, Any]]


def examples_of(
    x1: PyTree, x2: PyTree, key: Any, kwargs: dict[str, Any]
) -> tuple[list[SideArguments], dict[str, Any]]:
    """The examples of the two sides of a call, or of one if they are equal.

    And the arguments that are shared. It must see the objects of the call: within a
    program, they are not the same any more.
    """
    pairs = {name: x for name, x in kwargs.items() if is_pair(x)}
    shared = {name: x for name, x in kwargs.items() if name not in pairs}
    is_one = x2 is None or x2 is x1
    for name, (_, second) in pairs.items():
        if second is None and not is_one:
            raise ValueError(
                f"`{name}` must be a pair of arrays for the examples of `x1` and of "
                "`x2`; got None for those of `x2`, which is for calls without `x2`."
            )
    keys = _key_pair(key, is_one)
    is_same = (
        is_one
        and keys[0] is keys[1]
        and all(second is None or second is first for first, second in pairs.values())
    )
    first = {name: pair[0] for name, pair in pairs.items()}
    sides: list[SideArguments] = [(x1, keys[0], first)]
    if not is_same:
        second = {name: x if y is None else y for name, (x, y) in pairs.items()}
        sides.append((x1 if x2 is None else x2, keys[1], second))
    return sides, shared


def are_stored(tree: PyTree) -> bool:
    """Whether some arrays are not in memory."""
    return any(map(is_stored, jtu.tree_leaves(tree)))


def make_sides(
    sides: list[SideArguments], in_axes: PyTree, kwargs_axes: dict[str, PyTree]
) -> list["Side"]:
    """The sides of a call, without rows if they are not in memory."""
    axes = in_axes, kwargs_axes
    numbered = enumerate(sides)
    return [_with_stored(Side(*side, *axes, is_second=i > 0)) for i, side in numbered]


def is_pair(x: Any) -> bool:
    """Whether a keyword argument has arrays for each of the two sides."""
    is_two = type(x) is tuple and len(x) == 2
    is_array = lambda leaf: isinstance(leaf, (jax.Array, np.ndarray)) or is_stored(leaf)
    return is_two and any(map(is_array, jtu.tree_leaves(x)))


def _key_pair(key: Any, is_one: bool) -> tuple:
    if key is None:
        return None, None
    check_types({"key": key}, {"key": Keys}, KEY_REMEDY)
    if isinstance(key, (tuple, list)):
        if len(key) != 2:
            raise ValueError(
                "`key` must be one key, or a pair of them for the two sides; got "
                f"{len(key)} keys."
            )
        return tuple(key)
    is_single = isinstance(key, (jax.Array, np.ndarray)) and _is_single(key)
    if is_one and not is_single:
        return key, key
    if not is_single:
        raise ValueError(
            f"`key` must be one key, or a pair of them for the two sides; got "
            f"{shown(key)}."
        )
    # Without `x2`, `x1` has the keys that it has with one.
    first, second = jr.split(key)
    return first, first if is_one else second


def _is_single(key: AnyArray) -> bool:
    return key.ndim == (0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1)


class Stored:
    """The arrays of a side, of which some are not in memory.

    Two of them are equal only if they are the same object, which is a leaf of a PyTree.
    """

    def __init__(self, arrays: list):
        self.arrays = arrays

    def read(self, start: int, like: Rows) -> list:
        """As many rows as in `like`, in memory."""
        read, stop = [], start + like.total
        for x, struct, axis in safe_zip(self.arrays, like.arrays, like.axes):
            if isinstance(x, jax.Array):
                rows = lax.dynamic_slice_in_dim(x, start, like.total, axis)
            else:
                rows = read_rows(x, start, stop)
                of = rows.shape, jax.dtypes.canonicalize_dtype(rows.dtype)
                expected = struct.shape, struct.dtype
                check_equal(f"Rows {start} to {stop} of {shown(x)}", of, expected)
            read.append(rows)
        return read


def each_key(key: Any, total: int) -> Any:
    """The keys of all examples."""
    return jr.split(key, total) if key is not None and _is_single(key) else key


class Side(eqx.Module):
    """The examples of one side, and how to call a model with one of them.

    - `x`, `key`, `kwargs`: the arguments that have the examples.
    - `in_axes`, `kwargs_axes`: their batch axes. If `in_axes` is None, the model takes
        a whole batch at once.
    - `stored`, `total`: if some of the arguments are not in memory, what is read for
        each block, and the number of examples. All arguments have no rows then.
    """

    x: PyTree
    key: Array | None
    kwargs: dict[str, Any]
    in_axes: PyTree
    kwargs_axes: dict[str, PyTree]
    is_second: bool = eqx.field(static=True)
    stored: Stored | None = None
    total: int | None = eqx.field(static=True, default=None)

    @functools.cached_property
    def batch(self) -> Batch:
        """The examples as a batch, each of which has a key of its own."""
        x, key, kwargs = self.x, self.key, self.kwargs
        default = eqx.if_array(0)
        axes = default if self.in_axes is None else self.in_axes
        if self.in_axes is None:
            # The whole batch is treated as one example; its output has a batch axis.
            x, key, kwargs = jtu.tree_map(_with_axis, (x, key, kwargs))
        kwargs_axes = {name: self.kwargs_axes.get(name, default) for name in kwargs}
        name = _CALLS[self.is_second]
        try:
            if key is not None:
                if self.in_axes is not None:
                    key = each_key(key, split_batch(name, (axes,), (x,), {}).total())
                kwargs, kwargs_axes = {**kwargs, "key": key}, {**kwargs_axes, "key": 0}
            batch = split_batch(name, (axes, kwargs_axes), (x, kwargs), {})
            batch.total()
        except ValueError as e:
            e.add_note(
                "Keyword arguments for the examples come in pairs, batched along axis "
                "0 unless `kwargs_axes` names another one."
            )
            raise
        return batch

    @functools.cached_property
    def rows(self) -> Rows:
        total = self.batch.total() if self.total is None else self.total
        return Rows(self.batch.arrays, self.batch.axes, total)

    @property
    def type(self) -> tuple:
        """What a program depends on: two sides with equal types are traced once."""
        batch = self.batch
        shared = [id(x) if eqx.is_array(x) else x for x in batch.shared]
        rows = safe_zip(batch.arrays, batch.axes)
        shapes = [(x.shape[:axis] + x.shape[axis + 1 :], x.dtype) for x, axis in rows]
        return batch.treedef, shared, batch.axes, shapes

    def arguments(self, rows: list) -> tuple[PyTree, dict[str, Any]]:
        """The input and the keyword arguments, with these arrays for the examples."""
        (x, kwargs), _ = self.batch.arguments(rows)
        return x, kwargs

    def call(self, model: Callable, shared: dict[str, Any], rows: list) -> PyTree:
        """The output of the model for one example."""
        return _of_model(model, *self.arguments(rows), shared)

    def explained_failure(
        self, model: Callable, shared: dict[str, Any]
    ) -> AbstractContextManager:
        """A context that tells models of a batch from models of one example."""
        call, batch = functools.partial(self.call, model, shared), self.batch
        if self.in_axes is not None:
            return explained_failure(call, batch, "example", _IF_WHOLE)
        # The whole batch is the single row of a batch.
        whole = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in batch.arrays]
        has_examples = all(x.shape for x in whole)
        batch = dataclasses.replace(batch, arrays=whole if has_examples else [])
        return explained_failure(call, batch, "microbatch", _IF_ONE)


_IF_WHOLE = "Pass `in_axes=None`, or a model of one example."


_IF_ONE = "If it is a model of one example, leave out `in_axes=None`."


def _with_stored(side: Side) -> Side:
    """A side without rows, if some of its arrays are not in memory."""
    leaves = filter(is_stored, jtu.tree_leaves((side.x, side.kwargs)))
    stored = {id(x): (x, _stand_in(x)) for x in leaves}
    if not stored:
        return side
    whole = jtu.tree_map(lambda x: stored.get(id(x), (x, x))[1], side)
    batch, arrays = whole.batch, {id(y): x for x, y in stored.values()}
    axes = {id(x): axis for x, axis in safe_zip(batch.arrays, batch.axes)}
    for key, x in arrays.items():
        if axes.get(key) != 0:
            raise ValueError(
                "The batch axis of arrays that are not in memory must be 0, because "
                f"rows of them are read; got {axes.get(key)} for {shown(x)}. Read it "
                "by `numpy.asarray`."
            )
    source = lambda x: arrays[id(x)] if id(x) in arrays else jnp.asarray(x)
    none = [
        jnp.asarray(x[(*[slice(None)] * axis, slice(0))])
        for x, axis in safe_zip(batch.arrays, batch.axes)
    ]
    x, kwargs = whole.arguments(none)
    parts = {"x": x, "key": kwargs.pop("key", None), "kwargs": kwargs}
    read = Stored([*map(source, batch.arrays)])
    return dataclasses.replace(side, **parts, stored=read, total=batch.total())


def _stand_in(x: Any) -> np.ndarray:
    """An array without memory, with the shape and dtype of one that is not there."""
    none = read_rows(x, 0, 0)
    is_number = any(jnp.issubdtype(none.dtype, kind) for kind in (np.number, np.bool_))
    if none.shape != (0, *x.shape[1:]) or not is_number:
        raise TypeError(
            "Slices of arrays that are not in memory must be rows of numbers or bools; "
            f"got {shown(none)} for no rows of {shown(x)}."
        )
    return np.broadcast_to(np.zeros((), none.dtype), tuple(x.shape))


_Kernel = TypeVar("_Kernel", bound=AbstractBlockKernel)


def detached(kernel: _Kernel) -> tuple[_Kernel, list[Stored | None]]:
    """A kernel for compiled programs, and what is read for each block of its sides.

    The list is empty if all examples are in memory.
    """
    is_side = lambda x: isinstance(x, Side)
    sides = filter(is_side, jtu.tree_leaves(kernel, is_leaf=is_side))
    stored = [side.stored for side in sides]
    if not any(stored):
        return kernel, []
    alone = lambda x: dataclasses.replace(x, stored=None) if is_side(x) else x
    return jtu.tree_map(alone, kernel, is_leaf=is_side), stored


# The names of the arguments of a side, for error messages.
_CALLS: tuple[Callable, Callable] = (lambda x1, kwargs: None, lambda x2, kwargs: None)


def _with_axis(x: Any) -> Any:
    return x[None] if eqx.is_array(x) else x


def block_kernel(kernel: AbstractBlockKernel) -> AbstractBlockKernel:
    """The kernel in the form in which it has blocks.

    Kernel functions of this package keep factors of examples.
    """
    if isinstance(kernel, CalledKernel):
        kernel_fn: Any = kernel.kernel_fn
        in_blocks = kernel_fn.in_blocks(kernel) if kernel.is_ours else None
        kernel = in_blocks or dataclasses.replace(kernel, known=kernel.out)
    if kernel.is_same and kernel.mirror.is_transpose:
        _check_transpose(kernel.leaves)
    return kernel


def _check_transpose(leaves: Sequence[KernelLeaf]) -> None:
    """Raises if exchanging the examples may exchange further axes of the kernel."""
    for leaf in leaves:
        sizes = leaf.further
        if leaf.is_pairwise and any(n > 1 and sizes.count(n) > 1 for n in sizes):
            raise ValueError(
                "`symmetric=True` exchanges rows and columns only, but output"
                f"{leaf.path} has the further axes {sizes} for each pair of examples. "
                "Exchanging two examples may exchange axes of the same size as well. "
                "Pass a function from a block to its mirror image: `symmetric=lambda "
                "k: k.transpose(1, 0, 3, 2)` if it transposes the matrix of each pair, "
                "or `symmetric=lambda k: k.swapaxes(0, 1)` if it does not (and "
                "conjugate a complex result). Leave `symmetric` out if `kernel_fn` has "
                "it as an attribute, as the estimators of this package do."
            )


def on_mesh_of_results(
    kernel: AbstractBlockKernel, reduce: PyTree
) -> tuple[AbstractBlockKernel, PyTree]:
    """A kernel on the mesh with explicit axes where its results are.

    `kernel_fn` may close over arrays there, or move arrays itself. What is on no mesh
    could not be combined with its blocks, so the kernel and `reduce` are moved.
    """
    is_on_mesh = explicit_mesh((kernel, reduce)) is not None
    if is_on_mesh or not isinstance(kernel, CalledKernel):
        return kernel, reduce
    if not any(map(has_explicit_axes, kernel.out[0])):
        return kernel, reduce
    closed = kernel.program(*kernel.structs(SAMPLE))
    mesh = mesh_of_results(closed, list(constants(closed)))
    return (kernel, reduce) if mesh is None else put_on((kernel, reduce), mesh)


class CalledKernel(AbstractBlockKernel):
    """Any kernel function, which is called for each block, and its arguments.

    - `sides`: the two sides, or one if they are the same examples.
    - `is_alone`: whether the second argument was omitted.
    - `pairwise`: whether it is a function of one example of each side.
    - `known`: its output, once it was called for a sample.
    """

    is_users: ClassVar[bool] = True

    kernel_fn: Callable
    args: tuple
    sides: list[Side]
    shared: dict[str, Any]
    out_axes: PyTree
    is_alone: bool
    pairwise: bool
    _: dataclasses.KW_ONLY
    known: Flat | None = eqx.field(static=True, default=None)

    @property
    def is_ours(self) -> bool:
        """Whether the function may compute factors of examples for all blocks."""
        return isinstance(self.kernel_fn, AbstractKernelFunction) and not self.pairwise

    @property
    def rows(self) -> tuple[Rows, Rows]:
        return self.sides[0].rows, self.sides[-1].rows

    @property
    def parts(self) -> dict[str, PyTree]:
        inputs = self.sides, self.args, self.shared
        return {"inputs": inputs, "kernel_fn": self.kernel_fn}

    @property
    def bytes_kept(self) -> tuple[int, int]:
        return 0, 0

    @functools.cached_property
    def leaves(self) -> tuple[KernelLeaf, ...]:
        return tuple(leaves_at(self.out_axes, jtu.tree_unflatten(*reversed(self.out))))

    @functools.cached_property
    def out(self) -> Flat:
        if self.known is not None:
            return self.known
        structs = self.structs(SAMPLE)
        try:
            out = eqx.filter_eval_shape(self.called, *structs)
        except Exception as e:
            sides = (", ".join(str(x.shape) for x in side.arrays) for side in structs)
            remedy = " For a kernel of single examples, pass `pairwise=True`."
            e.add_note(
                "`kernel_fn` is called with blocks of examples, here of shape "
                f"{' and '.join(sides)}.{'' if self.pairwise else remedy}"
            )
            raise
        return flattened(out)

    @functools.cached_property
    def _takes_none(self) -> bool:
        """Whether the second argument is omitted for a block with itself."""
        is_alone = self.is_alone and not self.pairwise
        return is_alone and _can_omit_second(self.kernel_fn)

    def called(self, first: Rows, second: Rows | None) -> PyTree:
        """The output of the function for a block of rows and one of columns."""
        if second is None and not self._takes_none and not self.is_ours:
            # As for other blocks, so that one trace of the function serves all.
            second = first
        call = self.kernel_fn, self.args, self.shared, self._takes_none
        left, right = self.sides[0], self.sides[-1]
        if second is None:
            return _called(call, left.arguments(first.arrays), None)
        both = lambda x, y: _called(call, left.arguments(x), right.arguments(y))
        if not self.pairwise:
            return both(first.arrays, second.arrays)

        def one(x: list, y: list) -> PyTree:
            as_array = lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x
            return jtu.tree_map(as_array, both(x, y))

        rows, columns = ([*rows.axes] for rows in self.rows)
        row = eqx.filter_vmap(one, in_axes=(None, columns))
        run = eqx.filter_vmap(row, in_axes=(rows, None))
        return run(first.arrays, second.arrays)

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        del side, size
        return rows

    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""]
    ) -> list[Array]:
        closed = self.program(first, second)
        arrays = list(closed.consts), jtu.tree_leaves((first, second))
        sizes = first.total, (first if second is None else second).total
        is_example = [True for _ in closed.jaxpr.invars]
        if sizes != self.totals and not custom_backward(closed, is_example).is_linear:
            arrays = _without_derivative(arrays)
        # As its own program, it is in a branch, where convolutions are as slow as in a
        # loop.
        run = in_opaque_branch(
            functools.partial(evaluate_in_loop, closed.jaxpr), always
        )
        return run(*arrays)

    def tile(self, first: Rows, second: Rows | None) -> list[Array]:
        """The arrays for a block of rows and a block of columns.

        Without `second`, both are the same.
        """
        sizes = first.total, (first if second is None else second).total
        kernel_fn: Any = self.kernel_fn
        is_part = sizes != self.totals
        if is_part and hasattr(kernel_fn, "check_is_batched"):
            kernel_fn.check_is_batched()
        try:
            out = self.called(first, second)
        except Exception as e:
            if second is None:
                e.add_note(
                    "This is a block of examples with themselves, for which `x2` is "
                    "None, as it is in the call."
                )
            raise
        arrays = [x for x in jtu.tree_leaves(out) if eqx.is_array(x)]
        structs = [leaf.struct(sizes) for leaf in self.leaves]
        if _shown(arrays) != _shown(structs):
            raise ValueError(
                "`kernel_fn` must return arrays of the same structure, rank and dtype "
                "for all blocks, whose other axes have the same sizes for all of them; "
                f"expected {_shown(structs)} for {sizes[0]} rows and {sizes[1]} "
                f"columns, got {_shown(arrays)}."
            )
        # Blocks can start anywhere, which a mesh with explicit axes does not allow.
        return gathered([jnp.asarray(x, x.dtype) for x in arrays])


@eqx.filter_custom_jvp
def _without_derivative(arrays: PyTree) -> PyTree:
    """The arrays of a block whose derivative is not that of the whole kernel."""
    return arrays


@_without_derivative.def_jvp
def _refuse(primals: tuple, tangents: tuple) -> Any:
    raise ValueError(
        "`kernel_fn` has a custom backward pass (`jax.custom_vjp`) that is not known "
        "to be linear in the cotangent. It would be called for each block of the "
        "kernel, which gives another derivative than one call for all. Pass "
        "`block_size=None`, or differentiate without that function."
    )


# Compiled, so that a function is traced once for each shape of its blocks.
@compiled
def _called(call: tuple, first: tuple, second: tuple | None) -> PyTree:
    """The output of a kernel function for the arguments of two sides.

    Without the second, both are the same.
    """
    kernel_fn, args, shared, takes_none = call
    (x1, kwargs), (x2, other) = first, second or first
    if second is None and takes_none:
        x2 = None
    pairs = {name: (kwargs[name], other[name]) for name in kwargs}
    out = called(kernel_fn, (x1, x2, *args), {**pairs, **shared}, "`kernel_fn`")
    return jtu.tree_map(as_array, out)


# Compiled, so that a model is traced once for all programs of its kernel.
@functools.partial(compiled, inline=True)
def _of_model(
    model: Callable, x: PyTree, kwargs: dict[str, Any], shared: dict[str, Any]
) -> PyTree:
    """The output of a model for one example."""
    out = called(model, (x,), {**kwargs, **shared}, "The model")
    return jtu.tree_map(as_array, out)


def as_array(x: Any) -> Any:
    """An array of JAX for one of NumPy."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


class AbstractKernelFunction(eqx.Module):
    """A kernel function that computes factors of examples once for all blocks."""

    @abc.abstractmethod
    def in_blocks(self, call: CalledKernel) -> AbstractBlockKernel | None:
        """The kernel of a call; None if the function is to be called for each block."""


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


def is_axes(x: Any) -> bool:
    """Whether `axes` is a pair of axes, not a PyTree of pairs."""
    return (
        isinstance(x, tuple)
        and len(x) == 2
        and all(
            a is None or (isinstance(a, int) and not isinstance(a, bool)) for a in x
        )
    )


def _make_leaf(path: str, axes: Any, struct: jax.ShapeDtypeStruct) -> KernelLeaf:
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
    if axes == (None, None):
        raise ValueError(
            f"`out_axes` gives output{path} neither rows nor columns, so that there "
            "would be one for each block. Return it separately."
        )
    resolved: list[int | None] = []
    for name, size, axis in safe_zip(("rows", "columns"), SAMPLE, axes):
        if axis is None:
            resolved.append(None)
            continue
        if not -len(shape) <= axis < len(shape) or shape[axis] != size:
            raise ValueError(
                f"{got}, whose axis {axis} should be the axis of the {name}. {remedy}"
            )
        resolved.append(axis % len(shape))
    return KernelLeaf(path, (resolved[0], resolved[1]), shape, struct.dtype)


def _can_omit_second(fun: Callable) -> bool:
    """Whether a kernel function can be called without a second argument."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # Some builtins have no signature.
        return True
    if len(parameters) < 2:
        return True
    is_required = parameters[1].default is inspect.Parameter.empty
    return not is_required or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL


def _shown(arrays: Sequence) -> str:
    return ", ".join(f"{x.shape} {x.dtype}" for x in arrays)
