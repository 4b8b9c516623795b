"""How a kernel is cut into blocks: which rows by which columns, and in what order."""

import dataclasses
import math
from typing import NamedTuple


class Tile(NamedTuple):
    """A block of rows by a block of columns, by their numbers."""

    row: int
    column: int


def starts(total: int, size: int) -> list[int]:
    """Where blocks start; the last one overlaps with the one before."""
    return [min(start, total - size) for start in range(0, total, size)]


def balanced(total: int, size: int | None) -> int:
    """The smallest size, at most that, with which there are as many blocks."""
    if total == 0:
        return 1
    if size is None or size >= total:
        return total
    return math.ceil(total / math.ceil(total / size))


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cut of a kernel into tiles.

    All tiles have the same shape, so that one program computes them: the last block of
    a side overlaps with the one before, and only what is new of it counts.

    - `totals`: the number of examples of both sides.
    - `sizes`: that of the rows and columns of a tile. A side without examples has no
        block, or one of size 0, for what there is of the other side alone.
    - `is_same`: whether both sides are the same examples; tiles are square then.
    - `is_symmetric`: whether those below the diagonal are mirror images, and not
        computed.
    """

    totals: tuple[int, int]
    sizes: tuple[int, int]
    is_same: bool
    is_symmetric: bool

    def num(self, side: int) -> int:
        """The number of blocks of a side."""
        if self.sizes[side] == 0:
            return 1
        return math.ceil(self.totals[side] / self.sizes[side])

    @property
    def is_empty(self) -> bool:
        """Whether there are no tiles."""
        return 0 in (self.num(0), self.num(1))

    def start(self, side: int, index: int) -> int:
        """Where a block starts; the last one overlaps with the one before."""
        size = self.sizes[side]
        return min(index * size, self.totals[side] - size)

    def is_ragged(self, side: int) -> bool:
        """Whether the last block overlaps with the one before."""
        size = self.sizes[side]
        return size != 0 and self.totals[side] % size != 0

    def new(self, side: int, index: int) -> range:
        """The examples of a block that are in none before it."""
        first = index * self.sizes[side]
        return range(first, min(first + self.sizes[side], self.totals[side]))

    def pairs(self) -> list[Tile]:
        """The tiles to compute, but for those of a block with itself."""
        return [
            Tile(row, column)
            for row in range(self.num(0))
            for column in range(self.num(1))
            if not self.is_same
            or (row < column if self.is_symmetric else row != column)
        ]

    def diagonal(self) -> list[Tile]:
        """The tiles of a block with itself, if both sides are the same examples."""
        return [Tile(i, i) for i in range(self.num(0))] if self.is_same else []

    def part_of(self, tile: Tile, num_parts: int) -> int:
        """Which of some equal parts of the rows a tile belongs to.

        Of a symmetric kernel, a row of tiles has those with the half of the others that
        follow, as if in a circle, so that all rows have about the same number of them.
        """
        row, column = tile
        num = self.num(0)
        if self.is_symmetric and 2 * (column - row) > num:
            row = column
        return row * num_parts // num
