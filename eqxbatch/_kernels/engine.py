"""The loop over blocks of a kernel, in one compiled program.

Factors of examples are computed once for a panel: as many blocks of rows as fit into
memory. They are kept while the loop runs over all columns. If both sides are the same,
a panel is combined with itself and with half of the other panels.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Bool, Int, PyTree

from .._base.compile import num_bytes
from .._base.mesh import (
    with_type_of,
)
from .._base.trees import safe_zip
from .._base.versions import on_mesh_around
from .._batch.blocks import Block
from .._batch.rows import Rows
from .._batch.slots import types_of
from .collect import (
    CheckedTile,
    Collector,
    finalized,
    KernelOutput,
    make_collectors,
    States,
    Update,
    where_new,
)
from .grid import Grid, Index, Tile
from .kernel import AbstractBlockKernel


class Kept(NamedTuple):
    """Factors of rows and of columns that are there already; None for none."""

    first: Rows | None = None
    second: Rows | None = None


NOTHING_KEPT = Kept()


# The numbers of blocks of rows or columns, or those of both.
_Numbers = Sequence[int] | Sequence[Tile] | Array


def _new_entries(
    grid: Grid, pair: Int[Array, "2"], counts: Array | None
) -> Bool[Array, "rows columns"] | None:
    """The entries of a tile that no previous tile contains; None for all.

    If `counts` is False, there are none.
    """
    if counts is None and not any(map(grid.is_ragged, (0, 1))):
        return None
    # The last block starts early. Its entries are new from where it would have started.
    are_new = [
        grid.start(side, index) + jnp.arange(size, dtype=jnp.int32) >= index * size
        for side, (index, size) in enumerate(safe_zip(pair, grid.sizes))
    ]
    both = are_new[0][:, None] & are_new[1][None, :]
    return both if counts is None else both & counts


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of a kernel, and their collectors."""

    kernel: AbstractBlockKernel
    grid: Grid
    collectors: Sequence[Collector]

    def __post_init__(self) -> None:
        self.kernel.prepare()

    def tile(
        self,
        pair: Int[Array, "2"],
        is_diagonal: bool,
        kept: Kept = NOTHING_KEPT,
        begin: Index = 0,
        *,
        recomputes: bool = True,
    ) -> CheckedTile:
        """A tile, by the indices of its blocks.

        For a tile on the diagonal, rows and columns are the same block. `kept` has the
        factors that are available already: of a block of this tile, or of more examples
        from index `begin`. Reverse mode `recomputes` tiles instead of storing what
        their derivative needs.
        """
        sides: list[Rows] = []
        # Factors that nobody keeps are computed here, once for a block with itself.
        for side, of_side in enumerate(kept):
            if of_side is None and is_diagonal and side == 1:
                of_side = sides[0]
            if of_side is None:
                size = self.grid.sizes[side]
                start = self.grid.start(side, pair[side])
                rows = self.kernel.rows[side].slice(start, size)
                of_side = self.kernel.keep(side, rows, size)
            sides.append(of_side)
        # A panel has more examples than the block, which is cut from it.
        places = [self.grid.start(side, i) - begin for side, i in enumerate(pair)]

        def run(sides: list[Rows], places: list[Index]) -> list[Array]:
            first, second = (
                rows.slice(place, size)
                for rows, place, size in safe_zip(sides, places, self.grid.sizes)
            )
            # True of every place, but at compile time XLA does not know the places.
            always = jnp.asarray(places[0]) >= 0
            return self.kernel.block(first, None if is_diagonal else second, always)

        if recomputes:
            run = jax.checkpoint(run, prevent_cse=False)
        with jax.named_scope("tile"):
            tile = run(sides, places)
            if not (self.grid.is_symmetric and is_diagonal):
                return CheckedTile(tile, None)
            # Before both halves are combined.
            is_symmetric = self.kernel.is_symmetric(tile)
            if not self._take_asymmetric:
                tile = self.kernel.symmetrised(tile)
            return CheckedTile(tile, is_symmetric)

    @property
    def _take_asymmetric(self) -> bool:
        """Whether all reductions make tiles on the diagonal symmetric themselves."""
        takes = [x.takes_asymmetric for x in self.collectors]
        return self.kernel.mirror.is_transpose and bool(takes) and all(takes)

    def step(
        self,
        states: States,
        pair: Int[Array, "2"],
        is_diagonal: bool,
        kept: Kept,
        begin: Index = 0,
        counts: Array | None = None,
    ) -> States:
        """The states after a tile, with arguments as for `tile` and `update`."""
        recomputes = self._recomputes_updates(states.arrays)

        def run(
            states: States,
            pair: Array,
            kept: Kept,
            begin: Index,
            counts: Array | None,
        ) -> States:
            tile = self.tile(pair, is_diagonal, kept, begin, recomputes=not recomputes)
            return self.update(states, tile, pair, is_diagonal, counts)

        if recomputes:
            run = jax.checkpoint(run, prevent_cse=False)
        return run(states, pair, kept, begin, counts)

    def _recomputes_updates(self, states: list[PyTree[Array]]) -> bool:
        """Whether reverse mode recomputes a tile together with the update by it.

        What the derivative of a reduction needs of all tiles is as large as the kernel.
        If it is recomputed, the states before all tiles are stored, unless they are
        sums; small ones take at most a quarter of the kernel.
        """
        return all(
            x.reduction is not None
            and (
                x.reduction.is_sum
                or 4 * num_bytes(state) <= num_bytes(x.leaf.struct(self.grid.sizes))
            )
            for x, state in safe_zip(self.collectors, states)
        )

    def update(
        self,
        states: States,
        tile: CheckedTile,
        pair: Int[Array, "2"],
        is_diagonal: bool,
        counts: Array | None = None,
    ) -> States:
        """The states after a tile, and after its mirror image if there is one.

        `counts` is False if the tile is only padding.
        """
        grid = self.grid
        rows, columns = (
            Block(index, grid.start(side, index), size, False, 1, grid.totals[side])
            for side, (index, size) in enumerate(safe_zip(pair, grid.sizes))
        )
        are_new = _new_entries(grid, pair, counts)
        by: Update = "update"
        if grid.is_symmetric and is_diagonal and self._take_asymmetric:
            by = "update_symmetrised"
        updated = [
            collector.update(state, x, rows, columns, are_new, by=by)
            for collector, state, x in safe_zip(
                self.collectors, states.arrays, tile.arrays
            )
        ]
        if grid.is_symmetric and not is_diagonal:
            updated = self._update_mirrored(
                updated, tile.arrays, rows, columns, are_new
            )
        return States(updated, tile.and_before(states.is_symmetric))

    def _update_mirrored(
        self,
        states: list[PyTree[Array]],
        tile: list[Array],
        rows: Block,
        columns: Block,
        are_new: Bool[Array, "rows columns"] | None,
    ) -> list[PyTree[Array]]:
        """The states after the mirror image of a tile, which has these blocks."""
        mirror, updated = self.kernel.mirror, []
        # Made only where it is needed, and once for all.
        mirrored = functools.cache(lambda: mirror(tile))
        for i, (collector, state) in enumerate(safe_zip(self.collectors, states)):
            # Arrays with rows only, or columns only, have no mirror image.
            if not collector.leaf.is_pairwise:
                updated.append(state)
            elif mirror.is_transpose and collector.takes_mirrored:
                updated.append(
                    collector.update(
                        state, tile[i], rows, columns, are_new, by="update_mirrored"
                    )
                )
            else:
                # The same entries are new, in exchanged blocks.
                of_image = None if are_new is None else are_new.T
                updated.append(
                    collector.update(state, mirrored()[i], columns, rows, of_image)
                )
        return updated

    def num_nans(
        self, tile: list[Array], pair: Int[Array, "2"], is_diagonal: bool
    ) -> Int[Array, ""]:
        """The number of NaNs that a tile adds to the kernel."""
        num = jnp.zeros((), jnp.int32)
        are_new = _new_entries(self.grid, pair, None)
        for leaf, x in safe_zip(self.kernel.leaves, tile):
            if leaf.is_pairwise and jnp.issubdtype(x.dtype, jnp.inexact):
                nans = jnp.isnan(leaf.front(x))
                num += jnp.sum(where_new(are_new, nans, False), dtype=jnp.int32)
        # Those of the mirror image are entries of the kernel as well.
        return 2 * num if self.grid.is_symmetric and not is_diagonal else num

    def initial(self, first: Rows, second: Rows) -> States:
        """The states before the first tile."""
        arrays = [collector.init(self.grid.totals) for collector in self.collectors]
        is_checked = self.grid.is_symmetric and self.kernel.checks_symmetry
        states = States(arrays, jnp.array(True) if is_checked else None)
        states = on_mesh_around(states)
        reduces = any(x.reduction is not None for x in self.collectors)
        # Only on a mesh do tiles have other types than what they are written to.
        if self.grid.is_empty or (not reduces and get_abstract_mesh().empty):
            return states
        # Shapes alone tell whether an update keeps them: nothing is computed.
        pair = jnp.zeros(2, jnp.int32)

        def step(states: States, first: Rows, second: Rows, pair: Array) -> States:
            kept = (
                self.kernel.keep(side, rows.slice(0, size), size)
                for side, (rows, size) in enumerate(
                    safe_zip((first, second), self.grid.sizes)
                )
            )
            tile = self.tile(pair, self.grid.is_same, Kept(*kept))
            return self.update(states, tile, pair, True)

        before = jax.eval_shape(lambda x: x, states)
        after = jax.eval_shape(step, states, first, second, pair)
        if types_of(before.arrays) != types_of(after.arrays):
            raise TypeError(
                "`reduce` must keep structure, shapes and dtypes of its state: `init` "
                f"returned {before.arrays} and `update` {after.arrays}."
            )
        # The carry of a loop keeps its type, which may name mesh axes. From here on,
        # states have the types that updates return.
        return jtu.tree_map(with_type_of, after, states)

    def with_panel(
        self,
        states: States,
        first: Rows,
        second: Rows,
        index: Index,
        panel: Rows | None,
    ) -> States:
        """The states after all tiles of a panel."""
        grid = self.grid
        # Computed once for all columns that the panel meets.
        if panel is None:
            rows = first.slice(grid.panel_start(index), grid.panel_rows)
            panel = self.kernel.keep(0, rows, grid.sizes[0])
        if not grid.is_same:
            return self._rectangle(states, panel, index, second, range(grid.num(1)))
        states = self._square(states, panel, index)
        if grid.num_panels == 1:
            return states

        def step(states: States, distance: Array) -> States:
            other = (index + distance) % grid.num_panels
            columns = other * grid.height + jnp.arange(grid.height, dtype=jnp.int32)
            return self._rectangle(states, panel, index, first, columns)

        # The number of panels is odd, so that any two meet once. Of 5, panel 0 meets 1
        # and 2; panel 3 meets 4 and 0; panel 4 meets 0 and 1.
        return _loop(step, states, range(1, (grid.num_panels + 1) // 2))

    def _square(self, states: States, panel: Rows, index: Index) -> States:
        """The states after the tiles of a panel with itself."""
        begin, height = self.grid.panel_start(index), self.grid.height
        for tiles, is_diagonal in self.grid.groups():

            def step(
                states: States, local: Array, is_diagonal: bool = is_diagonal
            ) -> States:
                pair, kept = index * height + local, Kept(panel, panel)
                return self.step(states, pair, is_diagonal, kept, begin)

            states = _loop(step, states, tiles)
        return states

    def _rectangle(
        self, states: States, panel: Rows, index: Index, second: Rows, columns: _Numbers
    ) -> States:
        """The states after the tiles of a panel with some blocks of columns."""
        grid = self.grid
        begin = grid.panel_start(index)

        def with_column(states: States, column: Array) -> States:
            size = grid.sizes[1]
            rows = second.slice(grid.start(1, column), size)
            # Factors of a column are computed once for all blocks of the panel.
            kept = self.kernel.keep(1, rows, size)

            def step(states: States, local: Array) -> States:
                pair = jnp.stack([index * grid.height + local, column])
                return self.step(states, pair, False, Kept(panel, kept), begin)

            return _loop(step, states, range(grid.height))

        return _loop(with_column, states, columns)


def _loop(
    step: Callable[[States, Array], States], states: States, numbers: _Numbers
) -> States:
    """The states after a step for each index, or for each pair of indices."""
    if len(numbers) == 0:
        return states

    xs = jnp.asarray(numbers, jnp.int32)
    # XLA would unroll a loop of one step anyway.
    if len(numbers) == 1:
        return step(states, xs[0])
    return lax.scan(lambda states, x: (step(states, x), None), states, xs)[0]


def run_tiles(
    kernel: AbstractBlockKernel,
    grid: Grid,
    collectors: Sequence[Collector],
    first: Rows,
    second: Rows,
    panel: Rows | None = None,
) -> States:
    """The states after all tiles, with panels as large as memory allows.

    `panel` has the factors of all of the first examples, if available already.
    """
    if panel is None:
        # Where nothing is kept, all rows are one panel.
        grid = grid.in_panels(kernel.num_kept(kernel.bytes_kept[0]))
    tiles = Tiles(kernel, grid, collectors)
    states = tiles.initial(first, second)
    if grid.is_empty:
        return states
    if grid.num_panels == 1:
        return tiles.with_panel(states, first, second, 0, panel)
    step = lambda states, index: tiles.with_panel(states, first, second, index, None)
    return _loop(step, states, range(grid.num_panels))


def on_device(kernel: AbstractBlockKernel, reduce: PyTree = None) -> PyTree:
    """The output of a kernel function on one device, reduced if requested."""
    return output_on_device(kernel, reduce).out


def output_on_device(kernel: AbstractBlockKernel, reduce: PyTree) -> KernelOutput:
    collectors = make_collectors(kernel, reduce)
    states = run_tiles(kernel, kernel.grid, collectors, *kernel.rows)
    return finalized(kernel, collectors, states)
