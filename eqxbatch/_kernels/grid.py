"""How the rows and columns of a kernel are cut into blocks."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from .._base.trees import shown
from .._batch.memory import check_size, MemoryBudget


# The number of a block, which programs may compute.
Index = int | Array


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
    # 9 examples in blocks of at most 4 make 3 blocks, for which 3 are enough.
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


def _least(x: Index, y: int) -> Index:
    # What is known when tracing stays known, so that slices of it are static.
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
        # A side without examples has one empty block, for arrays of the other side.
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
        # Balanced again, for as many blocks as full panels have.
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

    def start(self, side: int, index: Index) -> Index:
        """The start of a block; the last one overlaps with the previous one."""
        size = self.sizes[side]
        return _least(index * size, self.totals[side] - size)

    def panel_start(self, index: Index) -> Index:
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
        # Of 5 rows of tiles, (0, 3) and (0, 4) count for rows 3 and 4, so that each of
        # the rows has 3 tiles on or above the diagonal.
        row, column = tile
        num = self.num(0)
        if self.is_symmetric and 2 * (column - row) > num:
            row = column
        return row * num_parts // num
