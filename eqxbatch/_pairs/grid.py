"""How a kernel is cut into blocks, and the order in which they are computed."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp


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
