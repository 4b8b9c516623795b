"""Blocks of columns of a matrix, and how many columns one of them has."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from .._base.dtypes import common_dtype
from .._base.mesh import vary, varying
from .._batch.accumulators import Concat
from .._batch.memory import check_size, MemoryBudget, resolve_size
from .._batch.rows import accumulated, Rows


Linear = Callable[[list], list]


def images(
    linear: Linear, point: Sequence[Array], size: int | None
) -> list[Inexact[Array, "..."]]:
    """What a linear function makes of each direction in which one entry changes.

    `point` is like what the function takes. The directions are along axis 0 of all
    results, and `size` of them are followed at a time.
    """
    return _in_blocks(jax.vmap(linear), point, size, 0)


def columns(
    linear: Linear, point: Sequence[Array], size: int | None
) -> list[Inexact[Array, "..."]]:
    """As `images`, with the directions along the last axis."""
    return _in_blocks(
        lambda seeds: jax.vmap(linear, out_axes=-1)(seeds), point, size, -1
    )


def own_entries(
    linear: Linear, point: Sequence[Array], size: int | None
) -> list[Inexact[Array, " n"]]:
    """The diagonal of a linear function that returns what is like its argument."""

    def entries(seeds: list) -> list:
        outs = jax.vmap(linear)(seeds)
        dtype = common_dtype(*(out.dtype for out in outs))
        parts = [
            jnp.sum((seed * out).reshape(seed.shape[0], -1), 1).astype(dtype)
            for seed, out in zip(seeds, outs, strict=True)
        ]
        return [sum(parts[1:], parts[0])]

    return _in_blocks(entries, point, size, 0)


def _in_blocks(
    fun: Linear, point: Sequence[Array], size: int | None, axis: int
) -> list[Array]:
    total = sum(x.size for x in point)
    run = lambda arrays, _: fun(_seeds(arrays[0], point))
    rows = Rows([jnp.arange(total)], (0,), total)
    return accumulated(run, rows, size, Concat(axis=axis))


def _seeds(index: Int[Array, " b"], point: Sequence[Array]) -> list[Array]:
    """One-hot directions, for entries by their numbers in all arrays together."""
    ends = itertools.accumulate(x.size for x in point)
    seeds = [
        jax.nn.one_hot(index - (end - x.size), x.size, dtype=x.dtype)
        for x, end in zip(point, ends, strict=True)
    ]
    return [
        vary(seed.reshape(index.size, *x.shape), varying(jax.typeof(x)))
        for seed, x in zip(seeds, point, strict=True)
    ]


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
