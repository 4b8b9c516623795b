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
from jax.sharding import get_abstract_mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from .._base.checks import check_types
from .._base.mesh import on_mesh_around, with_type_of
from .._base.trees import match_prefix, safe_zip, shown
from .._batch.batch import Block
from .._batch.loop import Rows, types_of
from .kernel import AbstractBlockKernel, Grid, KernelLeaf
from .reductions import AbstractReduction


def _new_entries(
    grid: Grid, pair: Int[Array, "2"], counts: Any
) -> Bool[Array, "rows columns"] | None:
    """The entries of a tile that no previous tile contains; None for all.

    If `counts` is False, there are none.
    """
    if counts is None and not any(map(grid.is_ragged, (0, 1))):
        return None
    are_new = [
        grid.start(side, index) + jnp.arange(size, dtype=jnp.int32) >= index * size
        for side, (index, size) in enumerate(safe_zip(pair, grid.sizes))
    ]
    both = are_new[0][:, None] & are_new[1][None, :]
    return both if counts is None else both & counts


def _where(are_new: Bool[Array, "rows columns"] | None, x: Array, other: Any) -> Array:
    """A tile with rows and columns first, and `other` for entries that are not new."""
    if are_new is None:
        return x
    are_new = jnp.expand_dims(are_new, range(2, x.ndim))
    return jnp.where(are_new, x, jnp.asarray(other).astype(x.dtype))


_KERNEL = Shaped[jax.ShapeDtypeStruct, "n1 n2 *out"]


_State = PyTree[Shaped[ArrayLike, "..."]]


@dataclasses.dataclass(frozen=True)
class Collector:
    """Collects the tiles of one array of a kernel, or reduces them."""

    leaf: KernelLeaf
    reduction: AbstractReduction | None = None

    def init(self, totals: tuple[int, int]) -> PyTree[Array]:
        """The state before the first tile."""
        if self.reduction is None:
            return jnp.zeros(self.leaf.struct(totals).shape, self.leaf.dtype)
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
        self,
        state: PyTree[Array],
        tile: Array,
        rows: Block,
        columns: Block,
        are_new: Bool[Array, "rows columns"] | None,
    ) -> PyTree[Array]:
        """The state after one more tile, of which some entries may not be new."""
        reduction = self.reduction
        if reduction is None:
            return self.leaf.written(state, tile, rows.start, columns.start)
        tile = _where(are_new, self.leaf.front(tile), reduction.neutral)
        state = reduction.update(state, tile, rows, columns)
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
        return jax.eval_shape(self.leaf.front, self.leaf.struct(totals))


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
        kept: tuple[Rows, Rows],
        places: tuple[Any, Any],
        is_diagonal: bool,
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
            tile = jax.checkpoint(run, prevent_cse=False)(kept, places)
            if self.grid.is_symmetric and is_diagonal:
                return self.kernel.symmetrised(tile)
            return tile

    def tile_of(
        self,
        pair: Int[Array, "2"],
        is_diagonal: bool,
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
        return self.tile((first, second), (pair[0], pair[1]), is_diagonal)

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
        grid = self.grid
        blocks = [
            Block(index, grid.start(side, index), size, False, 1, grid.totals[side])
            for side, (index, size) in enumerate(safe_zip(pair, grid.sizes))
        ]
        are_new = _new_entries(grid, pair, counts)
        images = [(tile, blocks, are_new)]
        if grid.is_symmetric and not is_diagonal:
            are_new = None if are_new is None else are_new.T
            images.append((self.kernel.mirror(tile), blocks[::-1], are_new))
        updated = []
        for i, (collector, state) in enumerate(safe_zip(self.collectors, states)):
            # Arrays with rows only, or columns only, need no mirror image.
            needed = images if collector.leaf.is_pairwise else images[:1]
            for image, (rows, columns), are_new in needed:
                state = collector.update(state, image[i], rows, columns, are_new)
            updated.append(state)
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
                num += jnp.sum(_where(are_new, nans, False), dtype=jnp.int32)
        return 2 * num if self.grid.is_symmetric and not is_diagonal else num

    def initial(self, first: Rows, second: Rows) -> list[PyTree[Array]]:
        """The states before the first tile."""
        states = [collector.init(self.grid.totals) for collector in self.collectors]
        states = on_mesh_around(states)
        reduces = any(x.reduction is not None for x in self.collectors)
        # Only on a mesh do tiles have other types than what they are written to.
        if self.grid.is_empty or (not reduces and get_abstract_mesh().empty):
            return states
        pair = jnp.zeros(2, jnp.int32)

        def step(states: list, first: Rows, second: Rows, pair: Array) -> list:
            sides = enumerate(safe_zip((first, second), self.grid.sizes))
            kept = [self.kernel.keep(i, x.at(0, size), size) for i, (x, size) in sides]
            tile = self.tile_of(pair, self.grid.is_same, kept=kept)
            return self.update(states, tile, pair, True)

        before = jax.eval_shape(lambda x: x, states)
        after = jax.eval_shape(step, states, first, second, pair)
        if types_of(before) != types_of(after):
            raise TypeError(
                "`reduce` must keep structure, shapes and dtypes of its state: `init` "
                f"returned {before} and `update` {after}."
            )
        return jtu.tree_map(with_type_of, after, states)

    def with_panel(
        self, states: list, first: Rows, second: Rows, index: Any, panel: Rows | None
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

            def step(
                states: list, local: Array, is_diagonal: bool = is_diagonal
            ) -> list:
                pair = index * self.grid.height + local
                places = [self.grid.start(0, number) - begin for number in pair]
                kept, both = (panel, panel), (places[0], places[1])
                tile = self.tile(kept, both, is_diagonal)
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
                tile = self.tile((panel, kept), places, False)
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
    collectors = make_collectors(kernel, reduce)
    states = run_tiles(kernel, kernel.grid, collectors, *kernel.rows)
    return finalized(kernel, collectors, states)
