"""The loop over blocks of a kernel, in one compiled program.

Factors of examples are computed once for a panel: as many blocks of rows as fit into
memory. They are kept while the loop runs over all columns. If both sides are the same,
a panel is combined with itself and with half of the other panels. Blocks are stored or
reduced.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from .._base.checks import check_types
from .._base.mesh import on_mesh_around, with_type_of
from .._base.trees import match_prefix, safe_zip, shown
from .._batch.batch import Block
from .._batch.loop import Rows
from .._batch.slots import types_of
from .kernel import AbstractBlockKernel, Grid, KernelLeaf
from .reductions import AbstractReduction


@dataclasses.dataclass(frozen=True)
class Span:
    """A block of rows or columns, and a mask of those that count; None for all."""

    block: Block
    counts: Bool[Array, " size"] | None


def span(grid: Grid, side: int, index: Any, counts: Any = None) -> Span:
    """The block with number `index` of a side; `counts` says whether it counts."""
    size = grid.sizes[side]
    start = grid.start(side, index)
    new = None
    if grid.is_ragged(side) or counts is not None:
        # Rows that the previous block contains do not count again.
        new = start + jnp.arange(size, dtype=jnp.int32) >= index * size
        if counts is not None:
            new = new & counts
    return Span(Block(index, start, size, False, 1, grid.totals[side]), new)


def _both(rows: Span, columns: Span) -> Bool[Array, "rows columns"] | None:
    if rows.counts is None and columns.counts is None:
        return None
    counts = [
        jnp.ones(span.block.size, bool) if span.counts is None else span.counts
        for span in (rows, columns)
    ]
    return counts[0][:, None] & counts[1][None, :]


def _where(counts: Bool[Array, "rows columns"] | None, x: Array, other: Any) -> Array:
    """A tile with rows and columns first, and `other` for entries that do not count."""
    if counts is None:
        return x
    counts = jnp.expand_dims(counts, range(2, x.ndim))
    return jnp.where(counts, x, jnp.asarray(other).astype(x.dtype))


_KERNEL = Shaped[jax.ShapeDtypeStruct, "n1 n2 *out"]


_State = PyTree[Shaped[ArrayLike, "..."]]


class Collector:
    """Collects the tiles of one array of a kernel, or reduces them."""

    def __init__(self, leaf: KernelLeaf, reduction: AbstractReduction | None = None):
        self.leaf, self.reduction = leaf, reduction

    def init(self, totals: tuple[int, int]) -> PyTree[Array]:
        """The state before the first tile."""
        if self.reduction is None:
            return jnp.zeros(self.leaf.shape_for(totals), self.leaf.dtype)
        try:
            neutral = {"neutral": self.reduction.neutral}
            self._check(neutral, float | Shaped[ArrayLike, ""])
            state = self.reduction.init(self._struct(totals))
            self._check({"init(...)": state}, _State)
        except (TypeError, ValueError) as e:
            e.add_note(f"This is about output{self.leaf.path}.")
            raise
        return state

    def update(
        self, state: PyTree[Array], tile: Array, rows: Span, columns: Span
    ) -> PyTree[Array]:
        """The state after one more tile."""
        reduction = self.reduction
        if reduction is None:
            starts = rows.block.start, columns.block.start
            return self.leaf.written(state, tile, *starts)
        tile = _where(_both(rows, columns), self.leaf.front(tile), reduction.neutral)
        state = reduction.update(state, tile, rows.block, columns.block)
        self._check({"update(...)": state}, _State)
        return state

    def finalize(self, state: PyTree[Array], totals: tuple[int, int]) -> Any:
        """The result."""
        if self.reduction is None:
            return state
        result = self.reduction.finalize(state)
        annotations = getattr(type(self.reduction).finalize, "__annotations__", {})
        struct = self._struct(totals)
        self._check({"finalize(...)": result}, annotations.get("return", Any), struct)
        return result

    def _check(self, result: dict[str, Any], hint: Any, kernel: Any = None) -> None:
        """Raises if an attribute or a result of the reduction has another type."""
        ((name, value),) = result.items()
        name = f"{type(self.reduction).__name__}.{name}"
        values, hints, remedies = {name: value}, {name: hint}, {}
        if kernel is not None:
            # It binds the names of sizes.
            values, hints = {"kernel": kernel, **values}, {"kernel": _KERNEL, **hints}
            remedies = {name: f"The kernel has the shape {kernel.shape}."}
        check_types(values, hints, remedies)

    def _struct(self, totals: tuple[int, int]) -> jax.ShapeDtypeStruct:
        """The shape of the kernel, with rows and columns first."""
        struct = jax.ShapeDtypeStruct(self.leaf.shape_for(totals), self.leaf.dtype)
        return jax.eval_shape(self.leaf.front, struct)


def finalized(
    kernel: AbstractBlockKernel,
    collectors: Sequence[Collector],
    states: list[PyTree[Array]],
) -> PyTree:
    """The output of the kernel function, from the states after the last tile."""
    pairs = safe_zip(collectors, states)
    results = [one.finalize(state, kernel.totals) for one, state in pairs]
    return kernel.output(results)


def make_collectors(kernel: AbstractBlockKernel, reduce: PyTree) -> list[Collector]:
    """One collector for each array, from a PyTree prefix of reductions or None."""
    if reduce is None:
        return [*map(Collector, kernel.leaves)]
    places = match_prefix(
        "reduce",
        reduce,
        kernel.output(kernel.leaves),
        "a reduction, or a PyTree prefix of what `kernel_fn` returns with one for each "
        "part",
        is_leaf=lambda x: x is None or isinstance(x, AbstractReduction),
    )
    collectors: list[Collector] = []
    for _, reduction, part in places:
        for leaf in jtu.tree_leaves(part):
            if not isinstance(leaf, KernelLeaf):
                continue
            if not isinstance(reduction, AbstractReduction):
                raise TypeError(
                    "`reduce` must consist of `eqxbatch.AbstractReduction`s, such as "
                    f"`TopK(10)`; got {shown(reduction)} for output{leaf.path}."
                )
            if not leaf.is_pairwise:
                raise ValueError(
                    f"`reduce` is for kernels with rows and columns, but output"
                    f"{leaf.path} has the axes {leaf.axes}. Compute it "
                    "separately."
                )
            collectors.append(Collector(leaf, reduction))
    return collectors


class Tiles:
    """The tiles of a kernel, and their collectors."""

    def __init__(
        self,
        kernel: AbstractBlockKernel,
        grid: Grid,
        collectors: Sequence[Collector],
    ):
        self.kernel, self.grid, self.collectors = kernel, grid, collectors
        kernel.prepare()

    def _spans(self, pair: Int[Array, "2"], counts: Any = None) -> tuple[Span, Span]:
        first, second = (span(self.grid, i, pair[i], counts) for i in (0, 1))
        return first, second

    def tile(
        self,
        kept: tuple[Rows, Rows],
        places: tuple[Any, Any],
        is_diagonal: bool,
        is_loop: bool = False,
    ) -> list[Array]:
        """The arrays of a tile, from the factors of its blocks.

        For a tile on the diagonal, rows and columns are the same block.
        """

        def run(kept: tuple[Rows, Rows], places: tuple[Any, Any]) -> list[Array]:
            first, second = (
                rows.at(place, size)
                for rows, place, size in safe_zip(kept, places, self.grid.sizes)
            )
            always = jnp.asarray(places[0]) >= 0
            return self.kernel.block(first, None if is_diagonal else second, always)

        with jax.named_scope("tile"):
            # Reverse mode recomputes tiles instead of storing them.
            tile = jax.checkpoint(run, prevent_cse=not is_loop)(kept, places)
            if self.grid.is_symmetric and is_diagonal:
                return self.kernel.symmetrised(tile)
            return tile

    def tile_of(
        self,
        pair: Int[Array, "2"],
        is_diagonal: bool,
        is_loop: bool = False,
        kept: Sequence[Rows | None] = (None, None),
    ) -> list[Array]:
        """The arrays of a tile, by the indices of its blocks.

        `kept` has the factors of its two blocks that are available already.
        """
        sides = []
        for side, of_side in enumerate(kept):
            if of_side is None and is_diagonal and side == 1:
                of_side = sides[0]
            if of_side is None:
                size = self.grid.sizes[side]
                start = self.grid.start(side, pair[side])
                rows = self.kernel.rows[side].at(start, size)
                of_side = self.kernel.keep(side, rows, size)
            sides.append(of_side)
        first, second = sides
        return self.tile((first, second), (pair[0], pair[1]), is_diagonal, is_loop)

    def update(
        self,
        states: list[PyTree[Array]],
        tile: list[Array],
        pair: Int[Array, "2"],
        is_diagonal: bool,
        counts: Any = None,
    ) -> list[PyTree[Array]]:
        """The states after a tile, and after its mirror image if there is one.

        `counts` is False if the tile is only padding.
        """
        spans = self._spans(pair, counts)
        states = self._collected(states, tile, spans)
        if self.grid.is_symmetric and not is_diagonal:
            mirrored = self.kernel.mirror(tile)
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
            # Arrays with rows only, or columns only, need no mirror image.
            state
            if is_mirror and not leaf.is_pairwise
            else collector.update(state, x, *spans)
            for collector, leaf, state, x in safe_zip(
                self.collectors, self.kernel.leaves, states, tile
            )
        ]

    def num_nans(
        self, tile: list[Array], pair: Int[Array, "2"], is_diagonal: bool
    ) -> Int[Array, ""]:
        """The number of NaNs that a tile adds to the kernel."""
        num = jnp.zeros((), jnp.int32)
        counts = _both(*self._spans(pair))
        for leaf, x in safe_zip(self.kernel.leaves, tile):
            if leaf.is_pairwise and jnp.issubdtype(x.dtype, jnp.inexact):
                nans = jnp.isnan(leaf.front(x))
                num += jnp.sum(_where(counts, nans, False), dtype=jnp.int32)
        return 2 * num if self.grid.is_symmetric and not is_diagonal else num

    def initial(self, first: Rows, second: Rows) -> list[PyTree[Array]]:
        """The states before the first tile."""
        states = [collector.init(self.grid.totals) for collector in self.collectors]
        states = on_mesh_around(states)
        if self.grid.is_empty:
            return states
        pair = jnp.zeros(2, jnp.int32)

        def step(states: list, first: Rows, second: Rows, pair: Array) -> list:
            kept = [
                self.kernel.keep(side, rows.at(0, size), size)
                for side, rows, size in safe_zip(
                    (0, 1), (first, second), self.grid.sizes
                )
            ]
            tile = self.tile_of(pair, self.grid.is_same, kept=kept)
            return self.update(states, tile, pair, True)

        before, after = (
            jax.eval_shape(lambda x: x, states),
            jax.eval_shape(step, states, first, second, pair),
        )
        if types_of(before) != types_of(after):
            raise TypeError(
                "`reduce` must keep structure, shapes and dtypes of its state: `init` "
                f"returned {before} and `update` {after}."
            )
        return jtu.tree_map(with_type_of, after, states)

    def run(
        self, first: Rows, second: Rows, panel: Rows | None = None
    ) -> list[PyTree[Array]]:
        """The states after all tiles of some examples with some others.

        `panel` has the factors of all of the first examples, if available already.
        """
        states = self.initial(first, second)
        if self.grid.is_empty:
            return states
        if self.grid.num_panels == 1:
            return self._with_panel(states, first, second, 0, panel)

        def step(states: list, index: Array) -> list:
            return self._with_panel(states, first, second, index)

        return _loop(step, states, range(self.grid.num_panels))

    def _with_panel(
        self,
        states: list,
        first: Rows,
        second: Rows,
        index: Any,
        panel: Rows | None = None,
    ) -> list:
        """The states after all tiles of a panel."""
        grid = self.grid
        if panel is None:
            rows = first.at(grid.panel_start(index), grid.panel_rows)
            panel = self.kernel.keep(0, rows, grid.sizes[0])
        if not grid.is_same:
            return self._rectangle(states, panel, index, second, range(grid.num(1)))
        states = self._square(states, panel, index)
        if grid.num_panels == 1:
            return states

        def step(states: list, distance: Array) -> list:
            other = (index + distance) % grid.num_panels
            columns = other * grid.height + jnp.arange(grid.height, dtype=jnp.int32)
            return self._rectangle(states, panel, index, first, columns)

        return _loop(step, states, range(1, (grid.num_panels + 1) // 2))

    def _square(self, states: list, panel: Rows, index: Any) -> list:
        """The states after the tiles of a panel with itself."""
        begin = self.grid.panel_start(index)
        # Diagonal tiles come last: they decide the entries that overlapping blocks
        # share.
        for tiles, is_diagonal in (
            (self.grid.pairs(), False),
            (self.grid.diagonal(), True),
        ):
            is_loop = len(tiles) > 1

            def step(
                states: list,
                local: Array,
                is_diagonal: bool = is_diagonal,
                is_loop: bool = is_loop,
            ) -> list:
                pair = index * self.grid.height + local
                places = [self.grid.start(0, number) - begin for number in pair]
                kept, both = (panel, panel), (places[0], places[1])
                tile = self.tile(kept, both, is_diagonal, is_loop)
                return self.update(states, tile, pair, is_diagonal)

            states = _loop(step, states, tiles)
        return states

    def _rectangle(
        self, states: list, panel: Rows, index: Any, second: Rows, columns: Any
    ) -> list:
        """The states after the tiles of a panel with some blocks of columns."""
        grid = self.grid
        begin = grid.panel_start(index)

        def with_column(states: list, column: Array) -> list:
            size = grid.sizes[1]
            rows = second.at(grid.start(1, column), size)
            kept = self.kernel.keep(1, rows, size)

            def step(states: list, local: Array) -> list:
                pair = jnp.stack([index * grid.height + local, column])
                places = grid.start(0, pair[0]) - begin, jnp.zeros_like(local)
                tile = self.tile((panel, kept), places, False, True)
                return self.update(states, tile, pair, False)

            return _loop(step, states, range(grid.height))

        return _loop(with_column, states, columns)


def _loop(
    step: Callable[[list, Array], list], states: list, numbers: Any
) -> list[PyTree[Array]]:
    """The states after a step for each index, or for each pair of indices."""
    if len(numbers) == 0:
        return states

    xs = jnp.asarray(numbers, jnp.int32)
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
) -> list[PyTree[Array]]:
    """The states after all tiles, with panels as large as memory allows.

    `panel` has the factors of all of the first examples, if available already.
    """
    if panel is None:
        grid = grid.in_panels(kernel.num_kept(kernel.bytes_kept[0]))
    return Tiles(kernel, grid, collectors).run(first, second, panel)


def on_device(kernel: AbstractBlockKernel, reduce: PyTree = None) -> PyTree:
    """The output of a kernel function on one device, reduced if requested."""
    collectors = make_collectors(kernel, reduce)
    states = run_tiles(kernel, kernel.grid, collectors, *kernel.rows)
    return finalized(kernel, collectors, states)
