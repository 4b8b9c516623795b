"""Kernels outside of the device: a Python loop over blocks, and stores for these."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from .._base.compile import compiled, num_bytes
from .._base.mesh import within_mesh
from .._base.trees import safe_zip
from .._batch.fingerprint import digest, digest_of_program, fingerprint
from .._batch.progress import AbstractProgressMeter, metered
from .._batch.rows import Rows
from .._batch.store import (
    AbstractStore,
    AbstractWriter,
    Chunk,
    HostStore,
    IN_FLIGHT,
    in_threads,
    StoredArray,
)
from .called import block_kernel, on_mesh_of_results
from .collect import checked_output, finalized, make_collectors, NOT_SYMMETRIC, States
from .engine import Tiles
from .grid import Grid, Tile
from .kernel import AbstractBlockKernel, KernelLeaf
from .on_devices import check_closed_over, MeshAxis, on_devices
from .sides import Stored


_ON_DEVICE = "use `store='device'` without `progress` and `tol`, and examples in memory"


def check_concrete(call: PyTree, what: str, instead: str = _ON_DEVICE) -> None:
    """Raises `TypeError` if a call is being transformed."""
    # Within `jax.jit`, new arrays are traced, too.
    if any(isinstance(x, Tracer) for x in [*jtu.tree_leaves(call), jnp.zeros(())]):
        raise _transformed(what, instead)


def _transformed(what: str, instead: str = _ON_DEVICE) -> TypeError:
    return TypeError(
        f"A kernel with {what} runs a loop in Python, and cannot be within `jax.jit`, "
        f"`jax.grad`, `jax.vmap` or the like. Call it outside of them, or {instead}."
    )


def check_solve(call: PyTree) -> None:
    """Raises `TypeError` if a system is being transformed, or the numbers of it are."""
    check_concrete(
        call,
        "`kernel_solve`",
        "solve with a `KernelOperator` and `lineax.linear_solve`, which can be "
        "differentiated: see the documentation on operators and solves",
    )


class _Blocks:
    """The factors of blocks of examples on the device, for as many as fit.

    Examples that are not in memory are kept if there are no factors.

    - `stored`: what is read for blocks of each side, as `detached` returns it.
    - `digests`: of the blocks as read last, by side and number, for stores in which
        runs are resumed; or None.
    """

    def __init__(
        self,
        kernel: AbstractBlockKernel,
        stored: Sequence[Stored | None],
        *,
        resumes: bool = False,
    ):
        self.kernel, self.grid = kernel, kernel.grid
        self.has_factors, self.stored = any(kernel.bytes_kept), stored or (None, None)
        self.digests: dict | None = {} if resumes and stored else None
        self._structs = kernel.structs(self.grid.sizes)
        self._blocks: dict[tuple[int, int], Rows] = {}
        sizes = [
            n * x.total if self.has_factors else num_bytes(x.arrays)
            for n, x in safe_zip(kernel.bytes_kept, self._structs)
        ]
        most = kernel.num_kept(max(sizes)) if self.has_factors or stored else 0
        # A budget has memory for two blocks of each tile that is in flight. Tiles of a
        # panel share their columns, so that so many blocks are enough for as many rows.
        is_of_budget = stored and not (self.has_factors or kernel.room)
        # The blocks of a panel, beside which one of columns fits.
        self._height = max(most - 1, IN_FLIGHT + 1 if is_of_budget else 1)

    def of(self, tile: Tile) -> tuple[Rows | None, Rows | None]:
        """What is kept of a tile's two blocks; None to compute it with the tile."""
        row, column = self._keys(tile)
        return self._block(row, tile), self._block(column, tile)

    def _keys(self, tile: Tile) -> tuple[tuple[int, int], tuple[int, int]]:
        return (0, tile.row), (0 if self.grid.is_same else 1, tile.column)

    def _block(self, key: tuple[int, int], tile: Tile) -> Rows | None:
        side, number = key
        if key not in self._blocks and (self.has_factors or self.stored[side]):
            if len(self._blocks) > self._height:
                # The panel stays, and columns pass by.
                panel = 0, tile.row // self._height
                others = (
                    x for x in self._blocks if (x[0], x[1] // self._height) != panel
                )
                del self._blocks[next(others)]
            rows = None
            if self.stored[side]:
                arrays = jax.device_put(self._read(key))
                rows = Rows(arrays, self._structs[side].axes, self.grid.sizes[side])
            if self.has_factors:
                index = jnp.asarray(number, jnp.int32)
                rows = _kept((self.kernel, side, rows), index)
            assert rows is not None
            self._blocks[key] = rows
        return self._blocks.get(key)

    def _read(self, key: tuple[int, int]) -> list:
        """A block of examples that are not in memory."""
        stored = self.stored[key[0]]
        assert stored is not None
        arrays = stored.read(self.grid.start(*key), self._structs[key[0]])
        if self.digests is not None:
            # Of the latest ones, which the next tiles are computed from.
            self.digests[key] = digest(arrays)
        return arrays

    def source(self, tile: Tile) -> str:
        """What identifies the examples of a tile, beside the fingerprint."""
        if self.digests is None:
            return ""
        keys = [key for key in self._keys(tile) if self.stored[key[0]]]
        for key in keys:
            if key not in self.digests:
                self._read(key)
        return " ".join(self.digests[key] for key in keys)

    def ordered(self, tiles: list[Tile]) -> list[Tile]:
        """The tiles, ordered so that factors are recomputed as rarely as possible.

        The factors of a panel of rows are kept while the loop runs over the columns.
        The last block with itself stays the last one.
        """
        is_used = self.has_factors or any(self.stored)
        if not is_used or self._height >= sum(map(self.grid.num, (0, 1))):
            return tiles
        return sorted(tiles, key=lambda t: (t.row // self._height, t.column, t.row))


@functools.partial(compiled, waits=False)
def _kept(operands: tuple, number: Array) -> Rows:
    kernel, side, rows = operands
    grid, size = kernel.grid, kernel.grid.sizes[side]
    if rows is None:
        rows = kernel.rows[side].slice(grid.start(side, number), size)
    return kernel.keep(side, rows, size)


def in_turn(
    kernel: AbstractBlockKernel,
    stored: Sequence[Stored | None],
    reduce: PyTree,
    meter: AbstractProgressMeter | None,
) -> PyTree:
    """The collected arrays of a kernel on one device, one tile at a time."""
    check_concrete(kernel, "`progress`")
    kernel = block_kernel(kernel)
    grid = kernel.grid
    collectors = make_collectors(kernel, reduce)
    states, _ = _initial(kernel, reduce)
    blocks = _Blocks(kernel, stored)
    tiles = blocks.ordered([*grid.pairs(), *grid.diagonal()])
    with metered(meter, len(tiles), 0) as step:
        waiting: collections.deque = collections.deque()
        for tile in tiles:
            pair = jnp.array(tile, jnp.int32)
            is_diagonal = grid.is_diagonal(tile)
            operands = (kernel, reduce, is_diagonal, pair, blocks.of(tile))
            states, num_nans = _step(operands, states)
            # At most two tiles are being computed, with the blocks that these need.
            waiting.append(num_nans)
            if len(waiting) > 1:
                step(jax.block_until_ready(waiting.popleft()))
        for num_nans in waiting:
            step(jax.block_until_ready(num_nans))
    return checked_output(finalized(kernel, collectors, states))


def _tiles(kernel: AbstractBlockKernel, reduce: PyTree) -> Tiles:
    kernel, reduce = on_mesh_of_results(kernel, reduce)
    return Tiles(kernel, kernel.grid, make_collectors(kernel, reduce))


@compiled
def _initial(kernel: AbstractBlockKernel, reduce: PyTree) -> tuple[States, Array]:
    tiles = _tiles(kernel, reduce)
    rows, structs = tiles.kernel.rows, tiles.kernel.structs(tiles.grid.sizes)
    blocks = [y if x.are_stored else x for x, y in safe_zip(rows, structs)]
    with within_mesh(rows):
        # JAX finds the devices of the states by the examples, if some result has any.
        return tiles.initial(*blocks), rows[0].arrays[0][:0]


@functools.partial(compiled, donate="all-except-first", waits=False)
def _step(operands: tuple, states: States) -> tuple[States, Array]:
    """The states after a tile, updated in place, and its number of NaNs."""
    kernel, reduce, is_diagonal, pair, kept = operands
    tiles = _tiles(kernel, reduce)
    tile = tiles.tile(pair, is_diagonal, kept)
    num_nans = tiles.num_nans(tile.arrays, pair, is_diagonal)
    with within_mesh(tile.arrays):
        return tiles.update(states, tile, pair, is_diagonal), num_nans


class _Team:
    """The devices and processes that compute a kernel together.

    - `devices`: the devices of this process.
    - `rank`, `num`: the index of this process and the number of processes.
    """

    def __init__(self, mesh_axis: MeshAxis | None, store: AbstractStore):
        self.devices: list = []
        self.rank, self.num = 0, 1
        if mesh_axis is None:
            return
        mesh = mesh_axis.mesh
        axis = mesh.axis_names.index(mesh_axis.name)
        # Devices along other axes would repeat the same work.
        line = np.moveaxis(mesh.devices, axis, 0).reshape(mesh_axis.num, -1)[:, 0]
        processes = sorted({device.process_index for device in line})
        this = jax.process_index()
        self.devices = [device for device in line if device.process_index == this]
        self.num = len(processes)
        # All processes meet whenever there are several, so they must fail together.
        is_of_all = self.num in (1, jax.process_count())
        is_shared = self.num == 1 or store.is_shared
        if this not in processes or not is_of_all or not is_shared:
            raise ValueError(
                f"The `mesh` has devices of {self.num} of {jax.process_count()} "
                "processes, which each have memory of their own. Use `store='device'` "
                "or a `ZarrStore` on a disk that all of them see, and a mesh with "
                "devices of all processes."
            )
        self.rank = processes.index(this)

    def together(self, run: Callable[[], Any] = lambda: None) -> Any:
        """The result of a function, once all processes have called theirs.

        Raises in all of them if one has failed.
        """
        error = result = None
        try:
            result = run()
        except Exception as e:
            error = e
        if self.num > 1:
            flags = multihost_utils.process_allgather(np.array(error is not None))
            if error is None and np.any(flags):
                failed = np.flatnonzero(flags).tolist()
                error = RuntimeError(
                    f"A kernel is computed by {self.num} processes together, of which "
                    f"{failed} failed. See what they raised."
                )
        if error is not None:
            raise error
        return result

    def begin(self, make: Callable[[bool], AbstractWriter]) -> AbstractWriter:
        """Runs a function in the first process before all others."""
        if self.rank > 0:
            self.together()
        made = self.together(lambda: make(self.rank == 0))
        if self.rank == 0 and self.num > 1:
            self.together()
        return made


def to_store(
    kernel: AbstractBlockKernel,
    stored: Sequence[Stored | None],
    store: AbstractStore,
    meter: AbstractProgressMeter | None,
    mesh_axis: MeshAxis | None,
) -> PyTree:
    """The arrays of a kernel, in a store."""
    check_concrete(kernel, "a `store`")
    team = _Team(mesh_axis, store)
    # Devices compute tiles on a mesh of their own, or alone.
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(jax.set_mesh(Mesh(np.empty((), dtype=object), ())))
        except ValueError as e:  # The kernel function may close over traced arrays.
            raise _transformed("a `store`") from e
        kernel = block_kernel(kernel)
        leaves, grid = kernel.leaves, kernel.grid
        arrays = _stored_arrays(leaves, grid)
        mark = lambda: _fingerprint(kernel)
        writer = team.begin(functools.partial(store.begin, arrays, mark))
        with contextlib.closing(writer):
            resumes = not isinstance(store, HostStore)
            blocks = _Blocks(kernel, stored, resumes=resumes)
            team.together(lambda: _write(blocks, arrays, writer, meter, team))
            return kernel.output(writer.finish())


def _stored_arrays(leaves: Sequence[KernelLeaf], grid: Grid) -> list[StoredArray]:
    """The arrays of a kernel, with tiles as chunks."""
    return [
        StoredArray(
            leaf.path,
            leaf.struct(grid.totals).shape,
            tuple(max(1, size) for size in leaf.struct(grid.sizes).shape),
            leaf.dtype,
        )
        for leaf in leaves
    ]


def _chunks_of_tiles(
    leaves: Sequence[KernelLeaf], arrays: list[StoredArray], grid: Grid
) -> dict[Tile, list[tuple[int, Chunk]]]:
    """The chunks of each tile, each with the index of the result that has its entries.

    Results are the arrays of the tile, followed by those of its mirror image.
    """
    chunks = collections.defaultdict(list)
    for i, (leaf, array) in enumerate(safe_zip(leaves, arrays)):
        for index in array.indices():
            # A single tile of each row, or of each column, is enough.
            numbers = [None if axis is None else index[axis] for axis in leaf.axes]
            other = max(x for x in numbers if x is not None) if grid.is_same else 0
            row, column = (other if x is None else x for x in numbers)
            is_mirror = grid.is_symmetric and row > column
            tile = Tile(column, row) if is_mirror else Tile(row, column)
            chunks[tile].append((i + is_mirror * len(leaves), Chunk(i, index)))
    return chunks


def _write(
    blocks: _Blocks,
    arrays: list[StoredArray],
    writer: AbstractWriter,
    meter: AbstractProgressMeter | None,
    team: _Team,
) -> None:
    """Computes the tiles that the store lacks, and writes them."""
    kernel, grid, leaves = blocks.kernel, blocks.grid, blocks.kernel.leaves
    num, diagonal = max(len(team.devices), 1), grid.diagonal()
    # A kernel that is not symmetric is found out by the first tile.
    first = diagonal[:1] if kernel.checks_symmetry else []
    tiles = [
        tile
        for tile in (*first, *grid.pairs(), *diagonal[len(first) :])
        if grid.part_of(tile, team.num) == team.rank
    ]
    wanted = _chunks_of_tiles(leaves, arrays, grid)
    made_of = {x: tile for tile in tiles for _, x in wanted[tile]}
    missing = {*writer.missing([*made_of], lambda x: blocks.source(made_of[x]))}
    left = [tile for tile in tiles if any(x in missing for _, x in wanted[tile])]

    def computed() -> Iterator[tuple]:
        # Several devices keep nothing, and compute tiles of one kind at a time.
        ordered = left if num > 1 else blocks.ordered(left)
        for is_diagonal, tiles in itertools.groupby(ordered, grid.is_diagonal):
            tiles = [*tiles]
            for start in range(0, len(tiles), num):
                group = tiles[start : start + num]
                parts = [wanted[tile] for tile in group]
                has_mirror = any(i >= len(leaves) for part in parts for i, _ in part)
                task = kernel, is_diagonal, has_mirror, meter is not None
                results = _computed(task, group, team.devices, blocks)
                for x in jtu.tree_leaves(results):
                    x.copy_to_host_async()
                yield writer, arrays, parts, results, [*map(blocks.source, group)]

    with (
        metered(meter, len(tiles), len(tiles) - len(left)) as step,
        contextlib.closing(in_threads(_written, computed(), IN_FLIGHT)) as written,
    ):
        for num_nans in itertools.chain.from_iterable(written):
            step(num_nans)


def _written(
    writer: AbstractWriter,
    arrays: list[StoredArray],
    wanted: list[list[tuple[int, Chunk]]],
    results: list[list[Array]],
    sources: list[str],
) -> list[int]:
    """Writes the wanted chunks of some tiles; returns the NaNs in each tile."""
    numbers = [np.asarray(tile[-1]) for tile in results]
    if any(is_wrong for _, is_wrong in numbers):
        raise ValueError(NOT_SYMMETRIC)
    for part, tile, source in safe_zip(wanted, results, sources):
        for result, chunk in part:
            place = arrays[chunk.array].place(chunk.index)
            # The last tile overlaps with the previous one, and only its new rows count.
            new = tuple(slice(x.start - x.stop, None) for x in place)
            writer.write(chunk, np.asarray(tile[result])[new], source)
    return [int(num_nans) for num_nans, _ in numbers]


# A kernel, whether a tile is of a block with itself, whether it has a mirror image, and
# whether its NaNs are counted.
_Task = tuple[AbstractBlockKernel, bool, bool, bool]


def _results(
    task: _Task, pair: Array, kept: Sequence[Rows | None] = (None, None)
) -> list[Array]:
    """The arrays of a tile and of its mirror image, and two numbers.

    These are its number of NaNs, and 1 if it should be symmetric, but is not.
    """
    kernel, is_diagonal, has_mirror, counts_nans = task
    tiles = _tiles(kernel, None)
    tile, is_symmetric = tiles.tile(pair, is_diagonal, kept)
    mirrored = tiles.kernel.mirror(tile) if has_mirror else []
    num_nans = is_wrong = jnp.zeros((), jnp.int32)
    if counts_nans:
        num_nans = tiles.num_nans(tile, pair, is_diagonal)
    if is_symmetric is not None:
        is_wrong = (~is_symmetric).astype(jnp.int32)
    return [*tile, *mirrored, jnp.stack([num_nans, is_wrong])]


_tile = compiled(_results, waits=False)


def tile_program(
    kernel: AbstractBlockKernel, blocks: Sequence[Rows | None]
) -> list[Array]:
    """The program for one tile, to measure its memory.

    `blocks` has the examples of each side that are not in memory.
    """
    grid, pair = kernel.grid, jnp.zeros(2, jnp.int32)
    kept = [
        None if x is None else kernel.keep(side, x, x.total)
        for side, x in enumerate(blocks)
    ]
    task = kernel, grid.is_same, grid.is_symmetric, False
    return _results(task, pair, kept)


@functools.partial(compiled, waits=False)
def _tiles_on_devices(task: _Task, pair: Array, mesh_axis: MeshAxis) -> list[Array]:
    """Like `_tile`, for one tile on each device, along a new first axis."""
    check_closed_over(task[0])

    def run(operands: tuple) -> list[Array]:
        task, pair = operands
        tile = pair[lax.axis_index(mesh_axis.name)]
        return [x[None] for x in _results(task, tile)]

    return on_devices(run, (task, pair), mesh_axis, PartitionSpec(mesh_axis.name))


def _computed(
    task: _Task, group: Sequence[Tile], devices: list, blocks: _Blocks
) -> list[list[Array]]:
    """The results for each tile of a group, one for each device."""
    if len(devices) < 2:
        with jax.default_device(devices[0] if devices else None):
            pair = jnp.array(group[0], jnp.int32)
            return [_tile(task, pair, blocks.of(group[0]))]
    mesh_axis = MeshAxis(Mesh(np.array(devices), ("devices",)), "devices")
    # Devices without a tile repeat the work of another one.
    padded = [*group, *[group[0]] * (len(devices) - len(group))]
    stacked = _tiles_on_devices(task, jnp.array(padded, jnp.int32), mesh_axis)
    shards = [
        {shard.device: shard.data for shard in x.addressable_shards} for x in stacked
    ]
    pairs = zip(devices, group, strict=False)
    return [[shard[device][0] for shard in shards] for device, _ in pairs]


def _fingerprint(kernel: AbstractBlockKernel) -> dict[str, Any]:
    """The parts that identify a kernel, as JSON data."""
    grid = kernel.grid
    first, second = kernel.structs(grid.sizes)
    programs = [kernel.program(first, second)]
    if grid.is_same:
        programs.append(kernel.program(first, None))
    symmetric = None
    if grid.is_symmetric:
        symmetric = "transpose"
        if not kernel.mirror.is_transpose:
            # How blocks below the diagonal follow from those above it.
            tile = [leaf.struct(grid.sizes) for leaf in kernel.leaves]
            run = lambda tile: kernel.mirror(tile)
            programs.append(eqx.filter_make_jaxpr(run)(tile)[0])
            symmetric = digest_of_program(programs[-1])
    return {
        **fingerprint(kernel.parts, programs),
        "symmetric": symmetric,
        "grid": {
            "totals": list(grid.totals),
            "sizes": list(grid.sizes),
            "is_same": grid.is_same,
            "is_symmetric": grid.is_symmetric,
        },
        "arrays": [
            {
                "path": leaf.path,
                "axes": list(leaf.axes),
                "shape": list(leaf.struct(grid.totals).shape),
                "dtype": str(np.dtype(leaf.dtype)),
            }
            for leaf in kernel.leaves
        ],
    }
