"""Blocks of a kernel in one compiled program."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Int, PyTree

from .._base.cpu import as_own_program, evaluate_in_loop
from .._base.explicit import on_mesh_around
from .._base.mesh import with_type_of
from .._batch.loop import types_of
from .._batch.rows import Rows
from .collect import AbstractCollector, count_nans, finalized, Span, span
from .function import BlockKernel
from .grid import Grid, Tile


class Tiles:
    """The tiles of a kernel of some examples, one after the other.

    - `first`, `second`: the examples of the rows and of the columns.
    """

    def __init__(
        self,
        kernel: BlockKernel,
        grid: Grid,
        collectors: Sequence[AbstractCollector],
        first: Rows,
        second: Rows,
    ):
        self.kernel, self.grid, self.collectors = kernel, grid, collectors
        self.sides = (first, second)
        self._programs: dict[bool, Any] = {}

    def _at(self, at: Int[Array, "2"], counts: Any = None) -> tuple[Span, Span]:
        return span(self.grid, 0, at[0], counts), span(self.grid, 1, at[1], counts)

    def tile(
        self, at: Int[Array, "2"], is_diagonal: bool, is_loop: bool = False
    ) -> list[Array]:
        """The arrays of a tile; of one on the diagonal, rows and columns are one."""
        spans = self._at(at)
        blocks = [
            rows.at(span.block.start, span.block.size).arrays
            for rows, span in zip(self.sides, spans, strict=True)
        ]
        arrays = blocks[:1] if is_diagonal else blocks
        if is_diagonal not in self._programs:
            second = [] if not is_diagonal else [None]
            make = eqx.filter_make_jaxpr(self.kernel.tile)
            self._programs[is_diagonal] = make(*arrays, *second)[0]
        closed = self._programs[is_diagonal]
        # Apart, it is in a branch, which is as bad for convolutions as a loop.
        run = as_own_program(
            functools.partial(evaluate_in_loop, closed.jaxpr), at[0] >= 0
        )
        # In reverse mode, a tile is computed again and not kept.
        tile = jax.checkpoint(run, prevent_cse=not is_loop)(
            list(closed.consts), jtu.tree_leaves(arrays)
        )
        if self.grid.is_symmetric and is_diagonal:
            return self.kernel.symmetrised(tile)
        return tile

    def update(
        self,
        states: list[PyTree[Array]],
        tile: list[Array],
        at: Int[Array, "2"],
        is_diagonal: bool,
        counts: Any = None,
    ) -> list[PyTree[Array]]:
        """The states after a tile, and its mirror image if there is one.

        `counts` is False if it is there for nothing.
        """
        spans = self._at(at, counts)
        states = self._collected(states, tile, spans)
        if self.grid.is_symmetric and not is_diagonal:
            mirrored = self.kernel.mirrored(tile)
            spans = (spans[1], spans[0])
            states = self._collected(states, mirrored, spans, is_mirror=True)
        return states

    def _collected(
        self,
        states: list,
        tile: list[Array],
        spans: tuple[Span, Span],
        is_mirror: bool = False,
    ) -> list:
        return [
            # What there is for each row, or for each column, is in the tile itself.
            state
            if is_mirror and not leaf.is_pairwise
            else collector.update(state, x, *spans)
            for collector, leaf, state, x in zip(
                self.collectors, self.kernel.leaves, states, tile, strict=True
            )
        ]

    def num_nans(
        self, tile: list[Array], at: Int[Array, "2"], is_diagonal: bool
    ) -> Int[Array, ""]:
        """How many entries of the kernel a tile makes NaN."""
        num = count_nans(self.kernel, tile, *self._at(at))
        return 2 * num if self.grid.is_symmetric and not is_diagonal else num

    def initial(self) -> list[PyTree[Array]]:
        """The states before the first tile."""
        states = [collector.init(self.grid.totals) for collector in self.collectors]
        states = on_mesh_around(states)
        if self.grid.is_empty:
            return states
        at = jnp.zeros(2, jnp.int32)

        def step(states: list, at: Array) -> list:
            return self.update(states, self.tile(at, self.grid.is_same), at, True)

        before, after = (
            jax.eval_shape(lambda x: x, states),
            jax.eval_shape(step, states, at),
        )
        if types_of(before) != types_of(after):
            raise TypeError(
                "`reduce` must keep structure, shapes and dtypes of its state: `init` "
                f"returned {before} and `update` {after}."
            )
        return jtu.tree_map(with_type_of, after, states)

    def run(
        self,
        states: list[PyTree[Array]],
        tiles: list[Tile],
        is_diagonal: bool,
    ) -> list[PyTree[Array]]:
        """The states after some tiles, all on the diagonal or none."""
        if not tiles:
            return states
        is_loop = len(tiles) > 1

        def step(states: list, at: Array) -> tuple[list, None]:
            with jax.named_scope("tile"):
                tile = self.tile(at, is_diagonal, is_loop)
                return self.update(states, tile, at, is_diagonal), None

        at = jnp.array(tiles, jnp.int32)
        return lax.scan(step, states, at)[0] if is_loop else step(states, at[0])[0]

    def run_all(self) -> list[PyTree[Array]]:
        """The states after all tiles."""
        states = self.initial()
        states = self.run(states, self.grid.pairs(), False)
        # Those on the diagonal come last, to settle what overlapping blocks share.
        return self.run(states, self.grid.diagonal(), True)


def all_tiles(
    kernel: BlockKernel, grid: Grid, collectors: Sequence[AbstractCollector]
) -> Tiles:
    """The tiles of all examples."""
    rows = kernel.sides[0].rows, kernel.sides[-1].rows
    return Tiles(kernel, grid, collectors, *rows)


def on_device(
    kernel: BlockKernel, grid: Grid, collectors: Sequence[AbstractCollector]
) -> list[PyTree[Array]]:
    """What becomes of all arrays of a kernel, on one device."""
    return finalized(collectors, all_tiles(kernel, grid, collectors).run_all())
