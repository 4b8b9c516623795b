"""A kernel of two sides of examples, and how it is cut into blocks."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Bool, PyTree, Shaped

from .._base.cpu import with_mirror_image
from .._base.trees import safe_zip, shown, with_arrays
from .._batch.batch import block_struct
from .._batch.loop import Rows
from .._batch.memory import available_bytes, check_size, MemoryBudget


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

    def new(self, side: int, index: int) -> range:
        """The examples of a block that no previous block contains."""
        first = index * self.sizes[side]
        return range(first, min(first + self.sizes[side], self.totals[side]))

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

    def back(self, tile: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        row, column = self.axes
        assert row is not None
        assert column is not None
        return jnp.moveaxis(tile, _LEADING, (row, column))


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
            return [
                leaf.back(jnp.conj(jnp.swapaxes(leaf.front(x), 0, 1)))
                if leaf.is_pairwise
                else x
                for leaf, x in safe_zip(self.leaves, tile)
            ]
        arrays = jtu.tree_leaves(self.symmetric(_filled(self.out, tile)))
        mirrored = [x for x in arrays if eqx.is_array(x)]
        sizes = _sizes(self.leaves, tile)
        expected = [leaf.struct((sizes[1], sizes[0])).shape for leaf in self.leaves]
        pairwise = [leaf.is_pairwise for leaf in self.leaves]
        for is_pairwise, x, shape in safe_zip(pairwise, mirrored, expected):
            if is_pairwise and x.shape != shape:
                raise ValueError(
                    "`symmetric` must return the block with rows and columns "
                    f"exchanged, of shape {shape}; got {x.shape}."
                )
        return mirrored


def flattened(out: PyTree) -> Flat:
    leaves, treedef = jtu.tree_flatten(out)
    return tuple(leaves), treedef


def _filled(out: Flat, arrays: Sequence) -> PyTree:
    """The output of the kernel function, with arrays in place of shapes."""
    leaves, treedef = out
    return with_arrays(jtu.tree_unflatten(treedef, leaves), arrays)


def _sizes(leaves: Sequence[KernelLeaf], tile: list[Array]) -> tuple[int, int]:
    """The numbers of rows and columns of a tile."""
    sizes = [0, 0]
    # Arrays of rows only may be those of a part of the tile.
    for leaf, x in sorted(safe_zip(leaves, tile), key=lambda pair: pair[0].is_pairwise):
        for side, axis in enumerate(leaf.axes):
            if axis is not None:
                sizes[side] = x.shape[axis]
    return sizes[0], sizes[1]


class AbstractBlockKernel(eqx.Module):
    """A kernel: factors of blocks of examples, and tiles from two such blocks.

    It can be passed to compiled functions, each of which finds out what it returns.

    - `symmetric`: None if the kernel is not known to be symmetric; True if it is
        symmetric under exchange of its two axes; or a function from a block to its
        mirror image.
    - `sizes`: the largest number of rows and of columns in a block, None for all; or a
        budget, which becomes such a pair before there are blocks.
    - `room`: the number of bytes for factors of examples.
    """

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
    def tile(self, first: list, second: list | None) -> list[Array]:
        """The arrays of a tile, from the examples of a block of rows and of columns.

        Without `second`, both are the same.
        """

    def program(self, first: list, second: list | None) -> Any:
        """The jaxpr of a tile, as a function of the examples."""
        # Not of the method, whose arrays would be arguments of the program.
        tile = lambda first, second: self.tile(first, second)
        return eqx.filter_make_jaxpr(tile)(first, second)[0]

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

    def structs(self, sizes: tuple[int, int]) -> list[list[jax.ShapeDtypeStruct]]:
        """The shapes of blocks of both sides."""
        return [
            [
                block_struct(x, axis, size)
                for x, axis in safe_zip(rows.arrays, rows.axes)
                if axis is not None
            ]
            for rows, size in safe_zip(self.rows, sizes)
        ]

    def output(self, arrays: Sequence) -> PyTree:
        """The output of the kernel function, with these arrays."""
        return _filled(self.out, arrays)

    @property
    def mirror(self) -> TileMirror:
        return TileMirror(self.symmetric, self.leaves, self.out)

    def symmetrised(self, tile: list[Array]) -> list[Array]:
        """A tile on the diagonal, made exactly symmetric."""
        if self.symmetric is True:
            return [
                leaf.back(_symmetrised(leaf.front(x))) if leaf.is_pairwise else x
                for leaf, x in safe_zip(self.leaves, tile)
            ]
        return [
            _common(x, y) if leaf.is_pairwise else x
            for leaf, x, y in safe_zip(self.leaves, tile, self.mirror(tile))
        ]


def _common(x: Shaped[Array, "..."], y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """A combination of two arrays that does not depend on their order."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.where(x == y, x, (x + y) / 2)
    return jnp.maximum(x, y)


def _symmetrised(x: Shaped[Array, "n n ..."]) -> Shaped[Array, "n n ..."]:
    exchanged = lambda x: jnp.conj(jnp.swapaxes(x, 0, 1))
    return with_mirror_image(x, _common, exchanged)
