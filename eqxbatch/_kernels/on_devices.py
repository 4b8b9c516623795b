"""The loop over blocks of a kernel on a mesh: each device computes its own rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, PyTree

from .._base.cpu import materialised
from .._base.jaxprs import constants
from .._base.mesh import (
    is_explicit,
    replicated,
)
from .._base.trees import safe_zip
from .._base.types import check_types
from .._batch.rows import Rows
from .collect import Collector, finalized, KernelOutput, make_collectors, States
from .engine import Kept, NOTHING_KEPT, run_tiles, Tiles
from .grid import balanced, Grid, Index, Tile
from .kernel import AbstractBlockKernel, KernelLeaf, of_pairs, SAMPLE


class MeshAxis(eqx.Module):
    """A mesh axis, over which the rows of a kernel are distributed."""

    mesh: Mesh = eqx.field(static=True)
    name: str = eqx.field(static=True)

    @property
    def num(self) -> int:
        return self.mesh.shape[self.name]

    def __repr__(self) -> str:
        return repr(self.name)


def check_mesh(mesh: object, axis: str | None) -> MeshAxis | None:
    """The selected mesh axis, or None without a mesh."""
    if mesh is None and axis is None:
        return None
    hints = {"mesh": Mesh | None, "mesh_axis": str | None}
    check_types({"mesh": mesh, "mesh_axis": axis}, hints)
    if not isinstance(mesh, Mesh):
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
        states = _in_panels(kernel, mesh_axis)
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


def on_each_device(
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


class _Share(NamedTuple):
    """The tiles of one device, and whether each counts, or is a repeated one."""

    pair: Array
    counts: Array


def _reduced(
    operands: tuple[AbstractBlockKernel, PyTree],
    collectors: Sequence[Collector],
    mesh_axis: MeshAxis,
) -> States:
    """Each device reduces a share of the tiles of a kernel."""
    num, grid = mesh_axis.num, operands[0].grid

    def share(tiles: list[Tile]) -> _Share:
        """An equal share of tiles; the last one may not count."""
        missing = -len(tiles) % num
        padded = [*tiles, *[Tile(0, 0)] * missing]
        counts = [True] * len(tiles) + [False] * missing
        index = lax.axis_index(mesh_axis.name)
        # [steps, devices, 2]: in each step, devices have tiles that follow each other.
        pair = jnp.array(padded, jnp.int32).reshape(-1, num, 2)
        counted = jnp.array(counts, bool).reshape(-1, num)
        return _Share(pair[:, index], counted[:, index])

    def run(operands: tuple[AbstractBlockKernel, PyTree]) -> States:
        kernel, reduce = operands
        tiles = Tiles(kernel, grid, make_collectors(kernel, reduce))
        states, always = tiles.initial(*kernel.rows), jnp.array(True)
        # Computed before the loop, in which each step would compute them anew.
        kept = _all_kept(kernel, grid)
        for places, is_diagonal in grid.groups():

            def step(
                states: States, now: _Share, is_diagonal: bool = is_diagonal
            ) -> tuple[States, None]:
                after = tiles.step(states, now.pair, is_diagonal, kept, 0, now.counts)
                return after, None

            if places:
                of_device = share(places)
                states, _ = lax.scan(step, states, of_device)
                always = of_device.pair[0, 0] >= 0
        leaves, treedef = jtu.tree_flatten(states)
        # XLA removes a scan of one step, and then mixes its writes with what follows.
        leaves = [x[None] for x in materialised(leaves, always)]
        return jtu.tree_unflatten(treedef, leaves)

    # The first axis of each state is that of the devices, whose states are merged.
    spread = PartitionSpec(mesh_axis.name)
    parts = on_each_device(run, operands, mesh_axis, spread)
    parts = jtu.tree_map(lambda x: replicated(x, mesh_axis.mesh), parts)
    # Every device merges all states in the same order, to the same bits.
    merged = []
    for collector, part in safe_zip(collectors, parts.arrays):
        assert collector.reduction is not None
        states = [jtu.tree_map(lambda x, i=i: x[i], part) for i in range(num)]
        merged.append(functools.reduce(collector.reduction.merge, states))
    return States(merged, _everywhere(parts.is_symmetric))


def _everywhere(flags: Bool[Array, " devices"] | None) -> Bool[Array, ""] | None:
    return None if flags is None else jnp.all(flags)


def _all_kept(kernel: AbstractBlockKernel, grid: Grid) -> Kept:
    """The factors of all examples, since a device may need any, unless too large."""
    sides = (0,) if kernel.is_same else (0, 1)
    size = sum(kernel.bytes_kept[side] * kernel.totals[side] for side in sides)
    if size > kernel.room:
        return NOTHING_KEPT
    kept = [kernel.keep(side, kernel.rows[side], grid.sizes[side]) for side in sides]
    return Kept(kept[0], kept[-1])


def _in_panels(kernel: AbstractBlockKernel, mesh_axis: MeshAxis) -> States:
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
    arrays, flags = on_each_device(run, kernel, mesh_axis, States(specs, of_flags))
    if flags is not None:
        flags = replicated(flags, mesh_axis.mesh)
    # Padding of the last panel is cut off, and what devices share is taken once.
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
    grid, (rows, columns) = kernel.grid, kernel.rows
    num, total = mesh_axis.num, grid.totals[0]
    # Panel `i` has the rows from `i * height` on; the last ones may lack some.
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

    def panel(number: Index, start: Index = 0, size: int = height) -> Rows:
        indices = number * height + start + jnp.arange(size, dtype=jnp.int32)
        # If there are too few examples, the last one is repeated.
        return _taken_rows(rows, jnp.minimum(indices, total - 1))

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
            missing = lax.slice_in_dim(y, 2 * half - height, half, 1, row)
            return lax.concatenate([x, missing], row)

        whole = of_pairs(kernel.leaves, joined, first, second)
        choose = lambda _, x, y: jnp.where(is_first, x, y)
        return of_pairs(kernel.leaves, choose, whole, kernel.mirror(whole))

    # Of different sides, each device computes all columns of its rows.
    if not grid.is_same:
        results, _ = block(panel(index), columns, False)
        return States(
            [
                x[None] if leaf.axes[0] is None else x
                for leaf, x in safe_zip(kernel.leaves, results)
            ]
        )

    # [height, num * height]: the columns of all panels, with what pads the last one.
    results = [
        jnp.zeros(leaf.struct((height, num * height)).shape, leaf.dtype)
        for leaf in kernel.leaves
    ]
    # All columns share the factors of the panel, if there is room for them.
    mine = panel(index)
    kept = None
    if kernel.num_kept(kernel.bytes_kept[0]) >= height:
        kept = kernel.keep(0, mine, size)
    diagonal, is_symmetric = block(mine, mine, True, kept)

    def placed(results: list[Array], part: list[Array], number: Index) -> list[Array]:
        """The rows of this device, with the columns of the panel of some device."""
        put = lambda leaf, whole, x: leaf.written(whole, x, 0, number * height)
        return of_pairs(kernel.leaves, put, results, part)

    results = placed(results, diagonal, index)
    # The devices are a ring. By symmetry, each computes what lies at most halfway
    # around it, and gets the mirror images of all else.
    for distance in range(1, num if not grid.is_symmetric else (num + 1) // 2):
        other = (index + distance) % num
        part, _ = block(mine, panel(other), False, kept)
        results = placed(results, part, other)
        if grid.is_symmetric:
            # The other device lacks the mirror image.
            pairs = [(i, (i + distance) % num) for i in range(num)]
            sent = _sent(kernel.mirror(part), mesh_axis, pairs)
            results = placed(results, sent, (index - distance) % num)
    # Two devices that are opposite to each other would both compute that block.
    if grid.is_symmetric and num % 2 == 0:
        results = placed(results, opposite(), (index + num // 2) % num)
    # Per-example arrays come from the diagonal.
    results = of_pairs(kernel.leaves, lambda _, part, whole: whole, diagonal, results)
    return States(results, None if is_symmetric is None else is_symmetric[None])


def _sent(
    tile: list[Array], mesh_axis: MeshAxis, pairs: list[tuple[int, int]]
) -> list[Array]:
    return [lax.ppermute(x, mesh_axis.name, pairs) for x in tile]


def _taken_rows(rows: Rows, index: Array) -> Rows:
    arrays = [
        x[(*[slice(None)] * axis, index)]
        for x, axis in safe_zip(rows.arrays, rows.axes)
    ]
    return Rows(arrays, rows.axes, index.shape[0])
