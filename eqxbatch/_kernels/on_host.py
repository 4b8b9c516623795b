"""Kernels outside of the device: a Python loop over blocks, and stores for these."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from .._base.compile import compiled, num_bytes
from .._base.mesh import within_mesh
from .._base.trees import safe_zip
from .._batch.fingerprint import digest_of_program, digest_of_rows, fingerprint
from .._batch.progress import AbstractProgressMeter, metered
from .._batch.rows import Rows
from .._batch.store import (
    AbstractStore,
    AbstractWriter,
    Chunk,
    IN_FLIGHT,
    in_threads,
    StoredArray,
)
from .called import on_mesh_of_results
from .collect import checked_output, finalized, make_collectors, NOT_SYMMETRIC, States
from .engine import Kept, NOTHING_KEPT, Tiles
from .grid import Grid, Tile
from .kernel import AbstractBlockKernel, KernelLeaf
from .on_devices import check_closed_over, MeshAxis, on_each_device
from .sides import Stored
from .team import Team


class Destination(NamedTuple):
    """Where the blocks of a kernel go, with settings as for `BatchKernel`."""

    mesh_axis: MeshAxis | None = None
    reduce: PyTree = None
    store: AbstractStore | Literal["device"] = "device"
    meter: AbstractProgressMeter | None = None

    @property
    def mesh(self) -> Mesh | None:
        return None if self.mesh_axis is None else self.mesh_axis.mesh


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


class _BlockKey(NamedTuple):
    """A block of one side, by its number."""

    side: int
    number: int


class _Blocks:
    """The factors of blocks of examples on the device, for as many as fit.

    Examples that are not in memory are kept if there are no factors.

    - `stored`: what is read for blocks of each side, or None.
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
        self._blocks: dict[_BlockKey, Rows] = {}
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

    def of(self, tile: Tile) -> Kept:
        """What is kept of a tile's two blocks; None to compute it with the tile."""
        row, column = self._keys(tile)
        return Kept(self._block(row, tile), self._block(column, tile))

    def _keys(self, tile: Tile) -> list[_BlockKey]:
        second = 0 if self.grid.is_same else 1
        return [_BlockKey(0, tile.row), _BlockKey(second, tile.column)]

    def _block(self, key: _BlockKey, tile: Tile) -> Rows | None:
        side, number = key
        if key not in self._blocks and (self.has_factors or self.stored[side]):
            if len(self._blocks) > self._height:
                # The panel stays, and columns pass by.
                panel = 0, tile.row // self._height
                columns = (
                    x for x in self._blocks if (x[0], x[1] // self._height) != panel
                )
                del self._blocks[next(columns)]
            rows = None
            if self.stored[side]:
                arrays = jax.device_put(self._read(key))
                rows = Rows(arrays, self._structs[side].axes, self.grid.sizes[side])
            if self.has_factors:
                index = jnp.asarray(number, jnp.int32)
                rows = _kept(_OfBlock(self.kernel, side, rows), index)
            assert rows is not None
            self._blocks[key] = rows
        return self._blocks.get(key)

    def _read(self, key: _BlockKey) -> list:
        """A block of examples that are not in memory."""
        stored = self.stored[key[0]]
        assert stored is not None
        arrays = stored.read(int(self.grid.start(*key)), self._structs[key[0]])
        if self.digests is not None:
            # Of the latest ones, which the next tiles are computed from.
            self.digests[key] = digest_of_rows(arrays)
        return arrays

    def source(self, tile: Tile) -> str:
        """What identifies the examples of a tile, beside the fingerprint."""
        if self.digests is None:
            return ""
        keys = [key for key in self._keys(tile) if self.stored[key[0]]]
        # A run that is resumed asks for digests of blocks before it computes any.
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


class _OfBlock(NamedTuple):
    """A kernel, a side of it, and the examples of a block, if these were read."""

    kernel: AbstractBlockKernel
    side: int
    rows: Rows | None


@functools.partial(compiled, waits=False)
def _kept(operands: _OfBlock, number: Array) -> Rows:
    kernel, side, rows = operands
    grid, size = kernel.grid, kernel.grid.sizes[side]
    if rows is None:
        rows = kernel.rows[side].slice(grid.start(side, number), size)
    return kernel.keep(side, rows, size)


def tile_by_tile(
    kernel: AbstractBlockKernel,
    stored: Sequence[Stored | None],
    destination: Destination,
) -> PyTree:
    """The collected arrays of a kernel on one device, one tile at a time."""
    grid, reduce = kernel.grid, destination.reduce
    collectors = make_collectors(kernel, reduce)
    states = _initial(kernel, reduce).states
    blocks = _Blocks(kernel, stored)
    # Diagonal tiles come last, as in one program.
    tiles = blocks.ordered([*grid.pairs(), *grid.diagonal()])
    with metered(destination.meter, len(tiles), 0) as step:
        waiting: collections.deque = collections.deque()
        for tile in tiles:
            pair = jnp.array(tile, jnp.int32)
            is_diagonal = grid.is_diagonal(tile)
            operands = _Step(kernel, reduce, is_diagonal, pair, blocks.of(tile))
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


class _Stepped(NamedTuple):
    """The states after a tile, and its number of NaNs."""

    states: States
    num_nans: Array


@compiled
def _initial(kernel: AbstractBlockKernel, reduce: PyTree) -> _Stepped:
    """The states before the first tile."""
    tiles = _tiles(kernel, reduce)
    rows, structs = tiles.kernel.rows, tiles.kernel.structs(tiles.grid.sizes)
    blocks = [y if x.are_stored else x for x, y in safe_zip(rows, structs)]
    with within_mesh(rows):
        # JAX finds the devices of the states by the examples, if some result has any.
        return _Stepped(tiles.initial(*blocks), rows[0].arrays[0][:0])


class _Step(NamedTuple):
    """A tile of a kernel, and what is kept for it."""

    kernel: AbstractBlockKernel
    reduce: PyTree
    is_diagonal: bool
    pair: Array
    kept: Kept


@functools.partial(compiled, donate="all-except-first", waits=False)
def _step(operands: _Step, states: States) -> _Stepped:
    """The states after a tile, updated in place."""
    kernel, reduce, is_diagonal, pair, kept = operands
    tiles = _tiles(kernel, reduce)
    tile = tiles.tile(pair, is_diagonal, kept)
    num_nans = tiles.num_nans(tile.arrays, pair, is_diagonal)
    with within_mesh(tile.arrays):
        return _Stepped(tiles.update(states, tile, pair, is_diagonal), num_nans)


def _team(mesh_axis: MeshAxis | None, store: AbstractStore) -> Team:
    """Those who compute a kernel into a store together."""
    team = Team(mesh_axis)
    if team.num > 1 and not store.is_shared:
        raise ValueError(
            f"The `mesh` has devices of {team.num} processes, which each have memory "
            "of their own. Use `store='device'`, or a `ZarrStore` on a disk or in a "
            "bucket that all of them see."
        )
    return team


def to_store(
    kernel: AbstractBlockKernel,
    stored: Sequence[Stored | None],
    destination: Destination,
) -> PyTree:
    """The arrays of a kernel, in a store."""
    store, meter = destination.store, destination.meter
    assert isinstance(store, AbstractStore)
    team = _team(destination.mesh_axis, store)
    arrays = _stored_arrays(kernel.leaves, kernel.grid)
    mark = lambda: _fingerprint(kernel)
    writer = team.begin(functools.partial(store.begin, arrays, mark))
    with contextlib.closing(writer):
        # Digests tell a resumed run which rows have changed.
        blocks = _Blocks(kernel, stored, resumes=store.is_resumed)
        team.together(lambda: _write(blocks, arrays, writer, meter, team))
        return kernel.output(writer.finish())


@contextlib.contextmanager
def on_no_mesh() -> Iterator[None]:
    """A context for tiles, which devices compute on a mesh of their own, or alone."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(jax.set_mesh(Mesh(np.empty((), dtype=object), ())))
        except ValueError as e:  # The kernel function may close over traced arrays.
            raise _transformed("a `store`") from e
        yield


def _stored_arrays(leaves: Sequence[KernelLeaf], grid: Grid) -> list[StoredArray]:
    """The arrays of a kernel, with tiles as chunks."""
    return [
        # Chunks are tiles: each is written as a whole, and by one tile only.
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
    team: Team,
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
    # A tile is computed if the store lacks a chunk of it or of its mirror image.
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
                task = _Task(kernel, is_diagonal, has_mirror, meter is not None)
                results = _computed(task, group, team.devices, blocks)
                # Copies to the host begin as soon as tiles are ready, before a thread
                # waits for them.
                for x in jtu.tree_leaves(results):
                    x.copy_to_host_async()
                yield writer, arrays, parts, results, [*map(blocks.source, group)]

    with (
        metered(meter, len(tiles), len(tiles) - len(left)) as step,
        contextlib.closing(in_threads(_write_tiles, computed(), IN_FLIGHT)) as written,
    ):
        for num_nans in itertools.chain.from_iterable(written):
            step(num_nans)


def _write_tiles(
    writer: AbstractWriter,
    arrays: list[StoredArray],
    wanted: list[list[tuple[int, Chunk]]],
    results: list[list[Array]],
    sources: list[str],
) -> list[int]:
    """Writes the wanted chunks of some tiles; returns the NaNs in each tile."""
    # Behind its arrays, each tile has two numbers; see `_results`.
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


class _Task(NamedTuple):
    """Tiles of one kind to compute of a kernel.

    - `is_diagonal`: whether they are of blocks with themselves.
    - `has_mirror`: whether their mirror images are wanted, too.
    """

    kernel: AbstractBlockKernel
    is_diagonal: bool
    has_mirror: bool
    counts_nans: bool


def _results(task: _Task, pair: Array, kept: Kept = NOTHING_KEPT) -> list[Array]:
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


@functools.partial(compiled, waits=False)
def _mirrored(kernel: AbstractBlockKernel, tile: list[Array]) -> list[Array]:
    kernel, _ = on_mesh_of_results(kernel, None)
    return kernel.mirror(tile)


def _on_one_device(task: _Task, tile: Tile, blocks: _Blocks) -> list[Array]:
    """The results for a tile.

    Its mirror image has a program of its own: beside its tile, XLA transposes it on
    CPUs in two passes, each slower than this one, with memory for one more tile.
    """
    alone, pair = task._replace(has_mirror=False), jnp.array(tile, jnp.int32)
    *arrays, numbers = _tile(alone, pair, blocks.of(tile))
    mirrored = _mirrored(task.kernel, arrays) if task.has_mirror else []
    return [*arrays, *mirrored, numbers]


def tile_program(
    kernel: AbstractBlockKernel, blocks: Sequence[Rows | None]
) -> list[Array]:
    """The program for one tile, to measure its memory.

    `blocks` has the examples of each side that are not in memory.
    """
    grid, pair = kernel.grid, jnp.zeros(2, jnp.int32)
    # Rows that are read are arguments of the program, so that they count.
    kept = (
        None if x is None else kernel.keep(side, x, x.total)
        for side, x in enumerate(blocks)
    )
    task = _Task(kernel, grid.is_same, grid.is_symmetric, counts_nans=False)
    return _results(task, pair, Kept(*kept))


@functools.partial(compiled, waits=False)
def _tiles_on_devices(task: _Task, pair: Array, mesh_axis: MeshAxis) -> list[Array]:
    """Like `_tile`, for one tile on each device, along a new first axis."""
    check_closed_over(task.kernel)

    def run(operands: tuple[_Task, Array]) -> list[Array]:
        task, pair = operands
        tile = pair[lax.axis_index(mesh_axis.name)]
        return [x[None] for x in _results(task, tile)]

    return on_each_device(run, (task, pair), mesh_axis, PartitionSpec(mesh_axis.name))


def _computed(
    task: _Task, group: Sequence[Tile], devices: Sequence[Any], blocks: _Blocks
) -> list[list[Array]]:
    """The results for each tile of a group, one for each device."""
    if len(devices) < 2:
        with jax.default_device(devices[0] if devices else None):
            return [_on_one_device(task, group[0], blocks)]
    # A mesh of these devices alone; other axes of the user's would repeat work.
    mesh_axis = MeshAxis(Mesh(np.array(devices), ("devices",)), "devices")
    # Devices without a tile repeat the work of another one.
    padded = [*group, *[group[0]] * (len(devices) - len(group))]
    stacked = _tiles_on_devices(task, jnp.array(padded, jnp.int32), mesh_axis)
    # Every tile stays on its device, from which it is copied to the host.
    shards = [
        {shard.device: shard.data for shard in x.addressable_shards} for x in stacked
    ]
    pairs = zip(devices, group, strict=False)
    return [[shard[device][0] for shard in shards] for device, _ in pairs]


def _fingerprint(kernel: AbstractBlockKernel) -> dict[str, Any]:
    """The parts that identify a kernel, as JSON data."""
    grid = kernel.grid
    first, second = kernel.structs(grid.sizes)
    # Another function is another kernel, and so is one that is traced otherwise.
    programs = [kernel.program(first, second)]
    if grid.is_same:
        # A block with itself can be another program: `x2` is None then.
        programs.append(kernel.program(first, None))
    # How blocks below the diagonal follow from those above it is a part, too.
    symmetric = None
    if grid.is_symmetric:
        symmetric = "transpose"
        if not kernel.mirror.is_transpose:
            tile = [leaf.struct(grid.sizes) for leaf in kernel.leaves]
            run = lambda tile: kernel.mirror(tile)
            programs.append(eqx.filter_make_jaxpr(run)(tile)[0])
            symmetric = digest_of_program(programs[-1])
    # Chunks of another grid, or with other axes or dtypes, would not fit together.
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
