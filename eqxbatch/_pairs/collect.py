"""What becomes of the blocks of a kernel on a device: written down, or reduced."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Bool, PyTree

from .._base.trees import match_prefix
from .._batch.cut import Block
from .grid import Grid
from .kernel import AbstractBlockKernel, KernelLeaf
from .reductions import AbstractReduction


@dataclasses.dataclass(frozen=True)
class Span:
    """A block of rows or of columns, and which of it counts; None for all."""

    block: Block
    counts: Bool[Array, " size"] | None


def span(grid: Grid, side: int, index: Any, counts: Any = None) -> Span:
    """The block number `index` of a side. `counts` says whether it does at all."""
    size = grid.sizes[side]
    start = grid.start(side, index)
    new = None
    if grid.is_ragged(side) or counts is not None:
        # What is in the block before does not count again.
        new = start + jnp.arange(size, dtype=jnp.int32) >= index * size
        if counts is not None:
            new = new & counts
    return Span(Block(index, start, size, is_remainder=False, parts=1), new)


def _both(rows: Span, columns: Span) -> Bool[Array, "rows columns"] | None:
    if rows.counts is None and columns.counts is None:
        return None
    counts = [
        jnp.ones(span.block.size, bool) if span.counts is None else span.counts
        for span in (rows, columns)
    ]
    return counts[0][:, None] & counts[1][None, :]


def count_nans(
    kernel: AbstractBlockKernel, tile: list[Array], rows: Span, columns: Span
) -> Array:
    """How many entries of a tile are NaN, of those that count."""
    num = jnp.zeros((), jnp.int32)
    for leaf, x in zip(kernel.leaves, tile, strict=True):
        if not leaf.is_pairwise or not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        nans = jnp.isnan(leaf.front(x))
        counts = _both(rows, columns)
        if counts is not None:
            nans = nans & counts.reshape(*counts.shape, *(1 for _ in x.shape[2:]))
        num += jnp.sum(nans, dtype=jnp.int32)
    return num


class AbstractCollector(abc.ABC):
    """What becomes of one array that the kernel function returns."""

    @abc.abstractmethod
    def init(self, totals: tuple[int, int]) -> PyTree[Array]:
        """The state before the first tile."""

    @abc.abstractmethod
    def update(
        self, state: PyTree[Array], tile: Array, rows: Span, columns: Span
    ) -> PyTree[Array]:
        """The state after one more."""

    @abc.abstractmethod
    def finalize(self, state: PyTree[Array]) -> Any:
        """The result."""


class Written(AbstractCollector):
    """The tiles in their places."""

    def __init__(self, leaf: KernelLeaf):
        self.leaf = leaf

    def init(self, totals: tuple[int, int]) -> Array:
        return jnp.zeros(self.leaf.shape(totals), self.leaf.dtype)

    def update(self, state: Array, tile: Array, rows: Span, columns: Span) -> Array:
        if tile.shape == state.shape:
            return tile
        at = [jnp.zeros((), jnp.int32) for _ in tile.shape]
        for axis, span in zip(self.leaf.axes, (rows, columns), strict=True):
            if axis is not None:
                at[axis] = jnp.asarray(span.block.start, jnp.int32)
        return lax.dynamic_update_slice(state, tile, at)

    def finalize(self, state: Array) -> Array:
        return state


class Reduced(AbstractCollector):
    """What a reduction makes of the tiles."""

    def __init__(self, leaf: KernelLeaf, reduction: AbstractReduction):
        self.leaf, self.reduction = leaf, reduction

    def init(self, totals: tuple[int, int]) -> PyTree[Array]:
        struct = jax.ShapeDtypeStruct(self.leaf.shape(totals), self.leaf.dtype)
        try:
            return self.reduction.init(jax.eval_shape(self.leaf.front, struct))
        except (TypeError, ValueError) as e:
            e.add_note(f"This is about output{self.leaf.path}.")
            raise

    def update(
        self, state: PyTree[Array], tile: Array, rows: Span, columns: Span
    ) -> PyTree[Array]:
        tile = self.leaf.front(tile)
        counts = _both(rows, columns)
        if counts is not None:
            counts = counts.reshape(*counts.shape, *(1 for _ in tile.shape[2:]))
            neutral = jnp.asarray(self.reduction.neutral).astype(tile.dtype)
            tile = jnp.where(counts, tile, neutral)
        return self.reduction.update(state, tile, rows.block, columns.block)

    def finalize(self, state: PyTree[Array]) -> Any:
        return self.reduction.finalize(state)


def finalized(
    collectors: Sequence[AbstractCollector], states: list[PyTree[Array]]
) -> list[Any]:
    """The results, from the states after the last tile."""
    return [
        collector.finalize(state)
        for collector, state in zip(collectors, states, strict=True)
    ]


def make_collectors(
    kernel: AbstractBlockKernel, reduce: PyTree
) -> list[AbstractCollector]:
    """One for each array, from a PyTree prefix of reductions, or None for none."""
    if reduce is None:
        return [Written(leaf) for leaf in kernel.leaves]
    places = match_prefix(
        "reduce",
        reduce,
        kernel.output(kernel.leaves),
        "a reduction, or a PyTree prefix of what `kernel_fn` returns with one for each "
        "part",
        is_leaf=lambda x: x is None or isinstance(x, AbstractReduction),
    )
    found: list[AbstractCollector] = []
    for _, reduction, part in places:
        for leaf in jtu.tree_leaves(part):
            if not isinstance(leaf, KernelLeaf):
                continue
            if not isinstance(reduction, AbstractReduction):
                raise TypeError(
                    "`reduce` must consist of `eqxbatch.AbstractReduction`s, such as "
                    f"`RowSums()`; got {reduction!r} for output{leaf.path}."
                )
            if not leaf.is_pairwise:
                raise ValueError(
                    f"`reduce` is for kernels with rows and columns, but output"
                    f"{leaf.path} has the axes {leaf.axes}. Compute it apart."
                )
            found.append(Reduced(leaf, reduction))
    return found
