"""How many columns or rows of a matrix are computed at a time."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from .._blocks.memory import check_size, MemoryBudget, resolve_size


class ColumnSize(eqx.Module):
    """How many columns, or rows, of a matrix are computed at a time."""

    block_size: int | MemoryBudget | None
    num_blocks: int | None = eqx.field(static=True)

    def __init__(self, block_size: Any, num_blocks: Any):
        self.block_size = check_size("block_size", block_size)
        number = check_size("num_blocks", num_blocks)
        if isinstance(number, MemoryBudget):
            raise TypeError(
                "`num_blocks` must be an int or None. Give the `MemoryBudget` as "
                "`block_size`."
            )
        if self.block_size is not None and number is not None:
            raise ValueError(
                "`block_size` and `num_blocks` say the same thing in two ways; got "
                f"{block_size} and {num_blocks}. Give one of them."
            )
        self.num_blocks = number

    def resolve(
        self,
        total: int,
        run: Callable[["ColumnSize"], Callable[[PyTree], Any]],
        operands: PyTree,
    ) -> int | None:
        """The size; `run(size)(operands)` is the program for a budget to measure."""
        if self.num_blocks is not None:
            return max(1, -(-total // self.num_blocks))
        if self.block_size is None:
            return None
        with_size = lambda size: run(ColumnSize(size, None))
        return resolve_size(self.block_size, total, with_size, operands)
