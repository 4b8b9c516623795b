"""What the transforms that run in microbatches have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from .._blocks.axes import Batch
from .._blocks.block import Blocks
from .._blocks.integers import as_int
from .._blocks.loop import run_blocks
from .._blocks.memory import check_size, MemoryBudget, resolve_size
from .._blocks.mesh import num_parts
from .._blocks.slots import Slots
from .wrapper import AbstractTransform


class Blocking(eqx.Module):
    """How a batch is cut into microbatches, and how many of them run."""

    microbatch_size: int | MemoryBudget | None
    num_real_microbatches: int | Int[Array, ""] | None
    checkpoint: bool

    def __init__(
        self, microbatch_size: Any, num_real_microbatches: Any, checkpoint: bool
    ):
        self.microbatch_size = check_size("microbatch_size", microbatch_size)
        self.num_real_microbatches = _check_count(num_real_microbatches)
        self.checkpoint = checkpoint

    def blocks(
        self,
        batch: Batch,
        total: int,
        transform: AbstractTransform,
        call: tuple[Callable, tuple, dict[str, Any]],
    ) -> Blocks:
        """How a batch of `total` examples is cut.

        `transform` is what this is the `blocking` of, and `call` what it is applied to:
        the program for a budget to measure.
        """

        def run_with(size: int) -> Callable[[tuple], Any]:
            def run(operands: tuple) -> Any:
                transform, *call = operands
                blocking = dataclasses.replace(transform.blocking, microbatch_size=size)
                return dataclasses.replace(transform, blocking=blocking).apply(*call)

            return run

        # The transform is one of the operands, as the memory depends on its settings.
        operands = (transform, *call)
        size = resolve_size(self.microbatch_size, total, run_with, operands)
        parts = num_parts(batch.arrays, batch.axes, total)
        # Each part gives the same share.
        return Blocks(total, min(-(-size // parts) * parts, max(total, 1)), parts)

    def num_examples(self, blocks: Blocks) -> int | Array:
        """How many examples run."""
        count = self.num_real_microbatches
        if count is None:
            return blocks.total
        return jnp.minimum(count * blocks.size, blocks.total)

    def run(
        self,
        arrays: list,
        axes: tuple[int, ...],
        blocks: Blocks,
        fun: Callable[[list, int], tuple[PyTree, Any]],
        make_slots: Callable[[PyTree, Any], Slots],
    ) -> PyTree:
        """Runs `fun` over the blocks of a batch; see `run_blocks`."""
        limit = _check_limit(self.num_real_microbatches, blocks.num)
        return run_blocks(fun, arrays, axes, blocks, make_slots, limit, self.checkpoint)


def _check_count(count: Any) -> int | Array | None:
    if count is None:
        return None
    if isinstance(count, jax.Array):
        if count.shape == () and jnp.issubdtype(count.dtype, jnp.integer):
            # Numbers of microbatches and of examples can need more bits.
            is_narrow = jnp.iinfo(count.dtype).bits < 32
            return count.astype(jnp.int32) if is_narrow else count
        got = f"an array of shape {count.shape} and dtype {count.dtype}"
    else:
        number = as_int(count)
        if number is not None:
            return number
        got = f"{count!r} of type {type(count).__name__}"
    raise TypeError(
        "`num_real_microbatches` must be an int, an integer array of shape (), or "
        f"None; got {got}."
    )


def _check_limit(count: int | Array | None, num: int) -> int | Array | None:
    remedy = (
        f"`num_real_microbatches` must be between 0 and the number of microbatches, "
        f"{num}"
    )
    if isinstance(count, jax.Array):
        return eqx.error_if(count, (count < 0) | (count > num), f"{remedy}.")
    if count is not None and not 0 <= count <= num:
        raise ValueError(f"{remedy}; got {count}. Use None to run all of them.")
    return count
