"""The loop over blocks of a kernel, in one compiled program, on one device or several.

Factors of examples are computed once for a panel: as many blocks of rows as fit into
memory. They are kept while the loop runs over all columns. If both sides are the same,
a panel is combined with itself and with half of the other panels. Blocks are stored or
reduced. On a mesh, each device computes its own rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import get_abstract_mesh, Mesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from .._base.checks import check_types, match_prefix
from .._base.jaxprs import constants
from .._base.mesh import (
    is_explicit,
    is_on_mesh,
    replicated,
    with_type_of,
)
from .._base.platforms import materialised, num_bytes
from .._base.trees import safe_zip, shown
from .._base.versions import on_mesh_around
from .._batch.batch import Block
from .._batch.loop import Rows, types_of
from .kernel import (
    AbstractBlockKernel,
    balanced,
    Grid,
    KernelLeaf,
    of_pairs,
    SAMPLE,
    Tile,
)
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
            hint = float | Shaped[ArrayLike, ""]
            self._check("neutral", self.reduction.neutral, hint)
            state = self.reduction.init(self._struct(totals))
            self._check("init(...)", state, _State)
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
        self._check("update(...)", state, _State)
        return state

    def finalize(self, state: PyTree[Array], totals: tuple[int, int]) -> Any:
        """The result."""
        if self.reduction is None:
            return state
        result = self.reduction.finalize(state)
        annotations = getattr(type(self.reduction).finalize, "__annotations__", {})
        struct = self._struct(totals)
        self._check("finalize(...)", result, annotations.get("return", Any), struct)
        return result

    def _check(self, name: str, value: Any, hint: Any, kernel: Any = None) -> None:
        """Raises if an attribute or a result of the reduction has another type."""
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


class States(NamedTuple):
    """The states of all collectors.

    `is_symmetric` is whether all blocks of examples with themselves were symmetric so
    far; None if that is not checked.
    """

    arrays: list[PyTree[Array]]
    is_symmetric: Bool[Array, ""] | None = None


class CheckedTile(NamedTuple):
    """The arrays of a tile, and whether it was symmetric; None if not checked."""

    arrays: list[Array]
    is_symmetric: Bool[Array, ""] | None

    def and_before(self, before: Bool[Array, ""] | None) -> Bool[Array, ""] | None:
        """Whether all tiles were symmetric, including those before."""
        now = self.is_symmetric
        return before if now is None or before is None else before & now


class KernelOutput(NamedTuple):
    """The output of the kernel function, with `is_symmetric` as in `States`."""

    out: PyTree
    is_symmetric: Bool[Array, ""] | None


def finalized(
    kernel: AbstractBlockKernel,
    collectors: Sequence[Collector],
    states: States,
) -> KernelOutput:
    """The output of the kernel function, from the states after the last tile."""
    pairs = safe_zip(collectors, states.arrays)
    results = [one.finalize(state, kernel.totals) for one, state in pairs]
    return KernelOutput(kernel.output(results), states.is_symmetric)


NOT_SYMMETRIC = (
    "`symmetric` is not true of `kernel_fn`: a block of examples with themselves is "
    "not its mirror image within rounding, and half of the kernel would be wrong. "
    "Leave `symmetric` out, or exchange the examples in a way that changes nothing "
    "else. For a kernel that is symmetric but for rounding, use a longer dtype."
)


def checked_output(output: KernelOutput, *, is_sharded: bool = False) -> PyTree:
    """The output of a kernel. Raises `ValueError` if it should have been symmetric.

    Within a transformed function, that is an error at run time; or, if the kernel may
    be on several devices, the result is NaN: the others would wait for the one that
    raises an error.
    """
    out, is_symmetric = output
    if is_symmetric is None:
        return out
    if not isinstance(is_symmetric, Tracer):
        if not np.asarray(is_symmetric):
            raise ValueError(NOT_SYMMETRIC)
        return out
    leaves, treedef = jtu.tree_flatten(out)
    numbers = [i for i, x in enumerate(leaves) if eqx.is_array(x) and x.size]
    is_sharded |= not get_abstract_mesh().empty or any(map(is_on_mesh, leaves))
    if is_sharded:
        factor = jnp.where(is_symmetric, 1.0, jnp.nan)
        for i in filter(lambda i: eqx.is_inexact_array(leaves[i]), numbers):
            leaves[i] = leaves[i] * factor.astype(leaves[i].dtype)
    elif numbers:
        i = min(numbers, key=lambda i: leaves[i].size)
        leaves[i] = _waiting(leaves[i], ~is_symmetric)
    return jtu.tree_unflatten(treedef, leaves)


def _waiting(x: Shaped[Array, "..."], is_wrong: Bool[Array, ""]) -> Array:
    """An array of which one entry waits for the check.

    Unlike a condition on all of it, that copies nothing, and it is linear in the array.
    """
    one = eqx.error_if(jnp.ones((), x.dtype), is_wrong, NOT_SYMMETRIC)
    entry = x[(slice(0, 1),) * x.ndim] * one
    return lax.dynamic_update_slice(x, entry, [jnp.zeros((), jnp.int32)] * x.ndim)


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
        pair: Int[Array, "2"],
        is_diagonal: bool,
        kept: Sequence[Rows | None] = (None, None),
        begin: Any = 0,
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
        for side, of_side in enumerate(kept):
            if of_side is None and is_diagonal and side == 1:
                of_side = sides[0]
            if of_side is None:
                size = self.grid.sizes[side]
                start = self.grid.start(side, pair[side])
                rows = self.kernel.rows[side].at(start, size)
                of_side = self.kernel.keep(side, rows, size)
            sides.append(of_side)
        places = [self.grid.start(side, i) - begin for side, i in enumerate(pair)]

        def run(sides: list[Rows], places: list) -> list[Array]:
            first, second = (
                rows.at(place, size)
                for rows, place, size in safe_zip(sides, places, self.grid.sizes)
            )
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
            return CheckedTile(self.kernel.symmetrised(tile), is_symmetric)

    def step(
        self,
        states: States,
        pair: Int[Array, "2"],
        is_diagonal: bool,
        kept: Sequence[Rows | None],
        begin: Any = 0,
        counts: Any = None,
    ) -> States:
        """The states after a tile, with arguments as for `tile` and `update`."""
        recomputes = self._recomputes_updates(states.arrays)

        def run(
            states: States, pair: Array, kept: Any, begin: Any, counts: Any
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
        counts: Any = None,
    ) -> States:
        """The states after a tile, and after its mirror image if there is one.

        `counts` is False if the tile is only padding.
        """
        grid = self.grid
        blocks = [
            Block(index, grid.start(side, index), size, False, 1, grid.totals[side])
            for side, (index, size) in enumerate(safe_zip(pair, grid.sizes))
        ]
        are_new = _new_entries(grid, pair, counts)
        images = [(tile.arrays, blocks, are_new)]
        if grid.is_symmetric and not is_diagonal:
            are_new = None if are_new is None else are_new.T
            images.append((self.kernel.mirror(tile.arrays), blocks[::-1], are_new))
        updated = []
        for i, (collector, state) in enumerate(
            safe_zip(self.collectors, states.arrays)
        ):
            # Arrays with rows only, or columns only, need no mirror image.
            needed = images if collector.leaf.is_pairwise else images[:1]
            for image, (rows, columns), are_new in needed:
                state = collector.update(state, image[i], rows, columns, are_new)
            updated.append(state)
        return States(updated, tile.and_before(states.is_symmetric))

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
        pair = jnp.zeros(2, jnp.int32)

        def step(states: States, first: Rows, second: Rows, pair: Array) -> States:
            sides = enumerate(safe_zip((first, second), self.grid.sizes))
            kept = [self.kernel.keep(i, x.at(0, size), size) for i, (x, size) in sides]
            tile = self.tile(pair, self.grid.is_same, kept)
            return self.update(states, tile, pair, True)

        before = jax.eval_shape(lambda x: x, states)
        after = jax.eval_shape(step, states, first, second, pair)
        if types_of(before.arrays) != types_of(after.arrays):
            raise TypeError(
                "`reduce` must keep structure, shapes and dtypes of its state: `init` "
                f"returned {before.arrays} and `update` {after.arrays}."
            )
        return jtu.tree_map(with_type_of, after, states)

    def with_panel(
        self, states: States, first: Rows, second: Rows, index: Any, panel: Rows | None
    ) -> States:
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

        def step(states: States, distance: Array) -> States:
            other = (index + distance) % grid.num_panels
            columns = other * grid.height + jnp.arange(grid.height, dtype=jnp.int32)
            return self._rectangle(states, panel, index, first, columns)

        return _loop(step, states, range(1, (grid.num_panels + 1) // 2))

    def _square(self, states: States, panel: Rows, index: Any) -> States:
        """The states after the tiles of a panel with itself."""
        begin, height = self.grid.panel_start(index), self.grid.height
        for tiles, is_diagonal in self.grid.groups():

            def step(
                states: States, local: Array, is_diagonal: bool = is_diagonal
            ) -> States:
                pair, kept = index * height + local, (panel, panel)
                return self.step(states, pair, is_diagonal, kept, begin)

            states = _loop(step, states, tiles)
        return states

    def _rectangle(
        self, states: States, panel: Rows, index: Any, second: Rows, columns: Any
    ) -> States:
        """The states after the tiles of a panel with some blocks of columns."""
        grid = self.grid
        begin = grid.panel_start(index)

        def with_column(states: States, column: Array) -> States:
            size = grid.sizes[1]
            rows = second.at(grid.start(1, column), size)
            kept = self.kernel.keep(1, rows, size)

            def step(states: States, local: Array) -> States:
                pair = jnp.stack([index * grid.height + local, column])
                return self.step(states, pair, False, (panel, kept), begin)

            return _loop(step, states, range(grid.height))

        return _loop(with_column, states, columns)


def _loop(
    step: Callable[[States, Array], States], states: States, numbers: Any
) -> States:
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
) -> States:
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
    return output_on_device(kernel, reduce).out


def output_on_device(kernel: AbstractBlockKernel, reduce: PyTree) -> KernelOutput:
    collectors = make_collectors(kernel, reduce)
    states = run_tiles(kernel, kernel.grid, collectors, *kernel.rows)
    return finalized(kernel, collectors, states)


class MeshAxis(eqx.Module):
    """A mesh axis, over which the rows of a kernel are distributed."""

    mesh: Mesh = eqx.field(static=True)
    name: str = eqx.field(static=True)

    @property
    def num(self) -> int:
        return self.mesh.shape[self.name]

    def __repr__(self) -> str:
        return repr(self.name)


def check_mesh(mesh: Any, axis: str | None) -> MeshAxis | None:
    """The selected mesh axis, or None without a mesh."""
    if mesh is None and axis is None:
        return None
    hints = {"mesh": Mesh | None, "mesh_axis": str | None}
    check_types({"mesh": mesh, "mesh_axis": axis}, hints)
    if mesh is None:
        raise ValueError(
            f"`mesh_axis` is {axis!r}, but there is no `mesh`. Pass a mesh, or leave "
            "the axis out."
        )
    if axis is None and len(mesh.axis_names) == 1:
        (axis,) = mesh.axis_names
    if axis is None or axis not in mesh.axis_names:
        raise ValueError(
            f"`mesh_axis` must name one of the axes of the mesh, {mesh.axis_names}; "
            f"got {axis!r}."
        )
    return MeshAxis(mesh, axis)


def on_mesh(
    kernel: AbstractBlockKernel, reduce: PyTree, mesh_axis: MeshAxis
) -> KernelOutput:
    """The output of a kernel function on the devices of a mesh."""
    check_closed_over(kernel)
    collectors = make_collectors(kernel, reduce)
    if kernel.grid.is_empty:
        states = States([collector.init(kernel.totals) for collector in collectors])
    elif reduce is None:
        states = _written(kernel, mesh_axis)
    else:
        states = _reduced((kernel, reduce), collectors, mesh_axis)
    return finalized(kernel, collectors, states)


def check_closed_over(kernel: AbstractBlockKernel) -> None:
    """Raises `ValueError` if `kernel_fn` closes over arrays on an Explicit mesh.

    `jax.shard_map` cannot close over such arrays.
    """
    # Arrays that a copy computes from those of the kernel are no constants of this.
    copy = jtu.tree_map(lambda x: x, kernel)
    closed = copy.program(*kernel.structs(SAMPLE))
    operands = {id(x) for x in jtu.tree_leaves(kernel)}
    for x in constants(closed):
        if id(x) not in operands and is_explicit(x):
            raise ValueError(
                "`kernel_fn` closes over an array on a mesh with Explicit axes, of "
                f"type {jax.typeof(x)}, which JAX cannot bring to each device. Pass it "
                "in the call, or make it part of `kernel_fn`: by `eqx.Partial`, or as "
                "a field of an `eqx.Module`."
            )


def on_devices(
    run: Callable[[Any], Any], operands: PyTree, mesh_axis: MeshAxis, out_specs: Any
) -> Any:
    """The results of `run(operands)` on each device."""
    dynamic, static = eqx.partition(operands, eqx.is_array)
    dynamic = jtu.tree_map(lambda x: replicated(x, mesh_axis.mesh), dynamic)
    return jax.shard_map(
        lambda dynamic: run(eqx.combine(dynamic, static)),
        mesh=mesh_axis.mesh,
        in_specs=PartitionSpec(),
        out_specs=out_specs,
        # If True, JAX sums a derivative over devices if its input is the same on all of
        # them. Arguments can be declared to vary, but closed-over arrays cannot. Kernel
        # functions must not depend on the mesh, so their derivatives are local.
        check_vma=False,
    )(dynamic)


def _reduced(
    operands: tuple[AbstractBlockKernel, PyTree],
    collectors: Sequence[Collector],
    mesh_axis: MeshAxis,
) -> States:
    """Each device reduces a share of the tiles of a kernel."""
    num, grid = mesh_axis.num, operands[0].grid

    def share(tiles: list[Tile]) -> tuple[Array, Array]:
        """An equal share of tiles; the last one may not count."""
        missing = -len(tiles) % num
        padded = [*tiles, *[Tile(0, 0)] * missing]
        counts = [True] * len(tiles) + [False] * missing
        index = lax.axis_index(mesh_axis.name)
        pair = jnp.array(padded, jnp.int32).reshape(-1, num, 2)
        return pair[:, index], jnp.array(counts, bool).reshape(-1, num)[:, index]

    def run(operands: tuple[AbstractBlockKernel, PyTree]) -> States:
        kernel, reduce = operands
        tiles = Tiles(kernel, grid, make_collectors(kernel, reduce))
        states, always = tiles.initial(*kernel.rows), jnp.array(True)
        kept = _all_kept(kernel, grid)
        for places, is_diagonal in grid.groups():

            def step(
                states: States, now: tuple, is_diagonal: bool = is_diagonal
            ) -> tuple[States, None]:
                pair, counts = now
                return tiles.step(states, pair, is_diagonal, kept, 0, counts), None

            if places:
                pair, counts = share(places)
                states, _ = lax.scan(step, states, (pair, counts))
                always = pair[0, 0] >= 0
        leaves, treedef = jtu.tree_flatten(states)
        # XLA removes a scan of one step, and then mixes its writes with what follows.
        leaves = [x[None] for x in materialised(leaves, always)]
        return jtu.tree_unflatten(treedef, leaves)

    spread = PartitionSpec(mesh_axis.name)
    parts = on_devices(run, operands, mesh_axis, spread)
    parts = jtu.tree_map(lambda x: replicated(x, mesh_axis.mesh), parts)
    merged = []
    for collector, part in safe_zip(collectors, parts.arrays):
        assert collector.reduction is not None
        states = [jtu.tree_map(lambda x, i=i: x[i], part) for i in range(num)]
        merged.append(functools.reduce(collector.reduction.merge, states))
    return States(merged, _everywhere(parts.is_symmetric))


def _everywhere(flags: Bool[Array, " devices"] | None) -> Bool[Array, ""] | None:
    return None if flags is None else jnp.all(flags)


def _all_kept(
    kernel: AbstractBlockKernel, grid: Grid
) -> tuple[Rows | None, Rows | None]:
    """The factors of all examples, since a device may need any, unless too large."""
    sides = (0,) if kernel.is_same else (0, 1)
    size = sum(kernel.bytes_kept[side] * kernel.totals[side] for side in sides)
    if size > kernel.room:
        return None, None
    kept = [kernel.keep(side, kernel.rows[side], grid.sizes[side]) for side in sides]
    return kept[0], kept[-1]


def _written(kernel: AbstractBlockKernel, mesh_axis: MeshAxis) -> States:
    """Each device has a panel of rows; in the last one, some may not count."""
    grid, num = kernel.grid, mesh_axis.num
    run = functools.partial(_panel, mesh_axis)
    specs = []
    for leaf in kernel.leaves:
        row, column = leaf.axes
        if grid.is_same and row is None:
            row = column  # Each device has its own examples.
        if row is None:
            row = 0  # All devices have the same, along a new first axis.
        specs.append(PartitionSpec(*[None] * row, mesh_axis.name))
    of_flags: Any = PartitionSpec(mesh_axis.name)
    arrays, flags = on_devices(run, kernel, mesh_axis, States(specs, of_flags))
    if flags is not None:
        flags = replicated(flags, mesh_axis.mesh)
    size = -(-grid.totals[0] // num) * num
    results = []
    for leaf, x in safe_zip(kernel.leaves, arrays):
        if leaf.axes[0] is None and not grid.is_same:
            results.append(replicated(x, mesh_axis.mesh)[0])
            continue
        if size != grid.totals[0]:
            # An axis that devices cannot share equally is replicated.
            shape = leaf.struct(grid.totals).shape
            whole = replicated(x, mesh_axis.mesh)
            x = whole[tuple(slice(0, length) for length in shape)]
        results.append(x)
    return States(results, _everywhere(flags))


def _panel(mesh_axis: MeshAxis, kernel: AbstractBlockKernel) -> States:
    """The rows of one device, with an axis of devices for `is_symmetric`."""
    grid, (rows, others) = kernel.grid, kernel.rows
    num, total = mesh_axis.num, grid.totals[0]
    height = -(-total // num)
    index = lax.axis_index(mesh_axis.name)
    collectors = make_collectors(kernel, None)
    size = balanced(height, grid.sizes[0])
    sizes = (size, size if grid.is_same else grid.sizes[1])

    def block(
        first: Rows, second: Rows, is_diagonal: bool, kept: Rows | None = None
    ) -> States:
        """The kernel of some examples with others or with themselves."""
        totals = first.total, second.total
        size = min(sizes[0], totals[0]), min(sizes[1], totals[1])
        cut = Grid(totals, size, is_diagonal, grid.is_symmetric and is_diagonal)
        return run_tiles(kernel, cut, collectors, first, second, kept)

    def panel(number: Any, start: Any = 0, size: int = height) -> Rows:
        indices = number * height + start + jnp.arange(size, dtype=jnp.int32)
        # If there are too few examples, the last one is repeated.
        return _taken(rows, jnp.minimum(indices, total - 1))

    def opposite() -> list[Array]:
        """The kernel with the opposite panel; the two devices compute a half each."""
        is_first, low = index < num // 2, index % (num // 2)
        half = -(-height // 2)
        start = jnp.where(is_first, 0, height - half)
        computed, _ = block(panel(low, start, half), panel(low + num // 2), False)
        pairs = [(i, (i + num // 2) % num) for i in range(num)]
        other = _sent(computed, mesh_axis, pairs)
        # If the number of rows is odd, the halves overlap in one row, computed by both.
        first = [jnp.where(is_first, x, y) for x, y in safe_zip(computed, other)]
        second = [jnp.where(is_first, y, x) for x, y in safe_zip(computed, other)]

        def joined(leaf: KernelLeaf, x: Array, y: Array) -> Array:
            row: Any = leaf.axes[0]
            rest = lax.slice_in_dim(y, 2 * half - height, half, 1, row)
            return lax.concatenate([x, rest], row)

        whole = of_pairs(kernel.leaves, joined, first, second)
        choose = lambda _, x, y: jnp.where(is_first, x, y)
        return of_pairs(kernel.leaves, choose, whole, kernel.mirror(whole))

    if not grid.is_same:
        results, _ = block(panel(index), others, False)
        return States(
            [
                x[None] if leaf.axes[0] is None else x
                for leaf, x in safe_zip(kernel.leaves, results)
            ]
        )

    results = [
        jnp.zeros(leaf.struct((height, num * height)).shape, leaf.dtype)
        for leaf in kernel.leaves
    ]
    mine = panel(index)
    kept = None
    if kernel.num_kept(kernel.bytes_kept[0]) >= height:
        kept = kernel.keep(0, mine, size)
    diagonal, is_symmetric = block(mine, mine, True, kept)

    def placed(results: list[Array], part: list[Array], number: Any) -> list[Array]:
        """The rows of this device, with the columns of the panel of some device."""
        put = lambda leaf, whole, x: leaf.written(whole, x, 0, number * height)
        return of_pairs(kernel.leaves, put, results, part)

    results = placed(results, diagonal, index)
    for distance in range(1, num if not grid.is_symmetric else (num + 1) // 2):
        other = (index + distance) % num
        part, _ = block(mine, panel(other), False, kept)
        results = placed(results, part, other)
        if grid.is_symmetric:
            # The other device lacks the mirror image.
            pairs = [(i, (i + distance) % num) for i in range(num)]
            sent = _sent(kernel.mirror(part), mesh_axis, pairs)
            results = placed(results, sent, (index - distance) % num)
    if grid.is_symmetric and num % 2 == 0:
        results = placed(results, opposite(), (index + num // 2) % num)
    # Per-example arrays come from the diagonal.
    results = of_pairs(kernel.leaves, lambda _, part, whole: whole, diagonal, results)
    return States(results, None if is_symmetric is None else is_symmetric[None])


def _sent(tile: list[Array], mesh_axis: MeshAxis, pairs: list) -> list[Array]:
    return [lax.ppermute(x, mesh_axis.name, pairs) for x in tile]


def _taken(rows: Rows, index: Array) -> Rows:
    arrays = [
        x[(*[slice(None)] * axis, index)]
        for x, axis in safe_zip(rows.arrays, rows.axes)
    ]
    return Rows(arrays, rows.axes, index.shape[0])
