"""Kernels outside of the device: a Python loop over blocks, and stores for these."""

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from .._base.jaxprs import compiled
from .._base.mesh import within_mesh
from .._base.primitives import constants, inner_programs, parameters, programs_in
from .._base.trees import safe_zip
from .._batch.loop import Rows
from .engine import finalized, make_collectors, Tiles
from .function import block_kernel, on_mesh_of_results
from .kernel import AbstractBlockKernel, Grid, KernelLeaf, Tile
from .on_mesh import check_closed_over, MeshAxis, on_devices
from .progress import AbstractProgressMeter


@dataclasses.dataclass(frozen=True)
class Patch:
    """The part of a tile that is written to one array of a kernel.

    - `leaf`: the index of the array.
    - `place`: its position in the array; `chunk` is the position in blocks.
    - `part`: the part of the tile.
    - `is_mirror`: whether it is from the mirror image of the tile.
    """

    leaf: int
    place: tuple[slice, ...]
    chunk: tuple[int, ...]
    part: tuple[slice, ...]
    is_mirror: bool


def patches(leaves: Sequence[KernelLeaf], grid: Grid, tile: Tile) -> Iterator[Patch]:
    """The patches of a tile, for the arrays of a kernel."""
    for index, leaf in enumerate(leaves):
        if leaf.struct(grid.totals).size == 0:
            continue
        if leaf.is_pairwise:
            yield _patch(index, leaf, grid, tile, False)
            if grid.is_symmetric and tile.row != tile.column:
                yield _patch(index, leaf, grid, Tile(*reversed(tile)), True)
            continue
        # A single tile of each row, or of each column, is enough.
        other = tile.column if leaf.axes[1] is None else tile.row
        if tile.row == tile.column if grid.is_same else other == 0:
            yield _patch(index, leaf, grid, tile, False)


def _patch(
    index: int, leaf: KernelLeaf, grid: Grid, tile: Tile, is_mirror: bool
) -> Patch:
    ndim = len(leaf.sample)
    place, part, chunk = [slice(None)] * ndim, [slice(None)] * ndim, [0] * ndim
    for side, axis in enumerate(leaf.axes):
        if axis is None:
            continue
        new = grid.new(side, tile[side])
        start = grid.start(side, tile[side])
        place[axis] = slice(new.start, new.stop)
        part[axis] = slice(new.start - start, new.stop - start)
        chunk[axis] = tile[side]
    return Patch(index, tuple(place), tuple(chunk), tuple(part), is_mirror)


class AbstractWriter(abc.ABC):
    """Writes the patches of one kernel."""

    @abc.abstractmethod
    def has(self, patch: Patch) -> bool:
        """Whether a patch is stored already, and intact."""

    @abc.abstractmethod
    def prepare(self, missing: list[Patch]) -> None:
        """Announces patches to write. Raises `OSError` without enough space."""

    @abc.abstractmethod
    def write(self, patch: Patch, values: np.ndarray) -> None:
        """Writes a patch. Several threads may call it for different patches."""

    @abc.abstractmethod
    def finish(self) -> list[Any]:
        """The arrays, once all patches are written."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the writing, also after an error."""


# Makes what identifies a kernel, as JSON data.
Fingerprint = Callable[[], dict[str, Any]]


class AbstractStore(eqx.Module):
    """Where the blocks of a kernel are stored."""

    # Whether to omit patches that are mirror images.
    upper_only: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def begin(
        self, kernel: AbstractBlockKernel, fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        """The writer for the patches of a kernel.

        `fingerprint` identifies the kernel, and `is_first` says whether this is the
        first of the processes that compute it.
        """

    @property
    @abc.abstractmethod
    def is_shared(self) -> bool:
        """Whether several processes can write to it."""


class HostStore(AbstractStore):
    """Stores a kernel in host memory, as NumPy arrays.

    `store="host"` of [`eqxbatch.filter_batch_kernel`][] stands for it. Each block is
    copied while the next one is computed, so the kernel can be larger than device
    memory.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, store="host"
        ... )
        >>> kernel(jnp.ones((3, 4)), jnp.ones((2, 4)))
        array([[4., 4.],
               [4., 4.],
               [4., 4.]], dtype=float32)

        ```
    """

    upper_only: bool = eqx.field(static=True, default=False, init=False)

    def begin(
        self, kernel: AbstractBlockKernel, fingerprint: Fingerprint, is_first: bool
    ) -> AbstractWriter:
        del fingerprint, is_first
        return _HostWriter(kernel.leaves, kernel.grid)

    @property
    def is_shared(self) -> bool:
        return False


class _HostWriter(AbstractWriter):
    def __init__(self, leaves: Sequence[KernelLeaf], grid: Grid):
        self.arrays = [
            np.zeros(leaf.struct(grid.totals).shape, leaf.dtype) for leaf in leaves
        ]

    def has(self, patch: Patch) -> bool:
        del patch
        return False

    def prepare(self, missing: list[Patch]) -> None:
        del missing

    def write(self, patch: Patch, values: np.ndarray) -> None:
        self.arrays[patch.leaf][patch.place] = values

    def finish(self) -> list[np.ndarray]:
        return self.arrays

    def close(self) -> None:
        pass


# While one group of tiles is computed, one is copied to the host and one is written.
IN_FLIGHT = 2


@contextlib.contextmanager
def metered(
    meter: AbstractProgressMeter | None, num_tiles: int, num_done: int
) -> Iterator[Callable[..., None]]:
    """The step of a meter that is closed even if the loop raises an error."""
    if meter is None:
        yield lambda *_: None
        return
    states = [meter.start(num_tiles, num_done)]

    def step(num_nans: Any, *residual: float) -> None:
        states[0] = meter.step(states[0], int(num_nans), *residual)

    try:
        yield step
    finally:
        meter.close(states[0])


def check_concrete(call: PyTree, what: str) -> None:
    """Raises `TypeError` if a call is being transformed."""
    if any(isinstance(x, Tracer) for x in jtu.tree_leaves(call)):
        raise TypeError(
            f"A kernel with {what} runs a loop in Python, and cannot be within "
            "`jax.jit`, `jax.grad`, `jax.vmap` or the like. Call it outside of them, "
            "or use `store='device'` without `progress` and `tol`."
        )


class _Blocks:
    """The factors of blocks of examples on the device, for as many as fit."""

    def __init__(self, kernel: AbstractBlockKernel):
        self.kernel, self.grid = kernel, kernel.grid
        self.is_used = any(kernel.bytes_kept)
        self._blocks: collections.OrderedDict = collections.OrderedDict()
        sizes = safe_zip(kernel.bytes_kept, self.grid.sizes)
        self._most = max(kernel.num_kept(max(n * size for n, size in sizes)), 2)

    def of(self, tile: Tile) -> tuple[Rows | None, Rows | None]:
        """The factors of a tile's two blocks; None to compute them with the tile."""
        return self._block(0, tile.row), self._block(1, tile.column)

    def _block(self, side: int, number: int) -> Rows | None:
        if not self.is_used:
            return None
        side = 0 if self.grid.is_same else side
        key = side, number
        if key not in self._blocks:
            if len(self._blocks) >= self._most:
                self._blocks.popitem(last=False)
            index = jnp.asarray(number, jnp.int32)
            self._blocks[key] = _kept((self.kernel, side), index)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def ordered(self, tiles: list[Tile]) -> list[Tile]:
        """The tiles, ordered so that factors are recomputed as rarely as possible.

        The factors of a panel of rows are kept while the loop runs over the columns.
        """
        if not self.is_used or self._most >= sum(map(self.grid.num, (0, 1))):
            return tiles
        height = self._most - 1
        return sorted(tiles, key=lambda t: (t.row // height, t.column, t.row))


@compiled
def _kept(operands: tuple, number: Array) -> Rows:
    kernel, side = operands
    grid, size = kernel.grid, kernel.grid.sizes[side]
    rows = kernel.rows[side].at(grid.start(side, number), size)
    return kernel.keep(side, rows, size)


def with_progress(
    kernel: AbstractBlockKernel, reduce: PyTree, meter: AbstractProgressMeter
) -> PyTree:
    """The collected arrays of a kernel on one device, one tile at a time."""
    check_concrete(kernel, "`progress`")
    kernel = block_kernel(kernel)
    grid = kernel.grid
    collectors = make_collectors(kernel, reduce)
    states, _ = _initial(kernel, reduce)
    blocks = _Blocks(kernel)
    tiles = [*blocks.ordered(grid.pairs()), *grid.diagonal()]
    with metered(meter, len(tiles), 0) as step:
        waiting: collections.deque = collections.deque()
        for tile in tiles:
            pair = jnp.array(tile, jnp.int32)
            is_diagonal = grid.is_diagonal(tile)
            operands = (kernel, reduce, is_diagonal, pair, blocks.of(tile))
            states, num_nans = _step(operands, states)
            # The count of the previous tile is available by now, so this does not wait.
            waiting.append(num_nans)
            if len(waiting) > 1:
                step(waiting.popleft())
        for num_nans in waiting:
            step(num_nans)
    return finalized(kernel, collectors, states)


def _tiles(kernel: AbstractBlockKernel, reduce: PyTree) -> Tiles:
    kernel, reduce = on_mesh_of_results(kernel, reduce)
    return Tiles(kernel, kernel.grid, make_collectors(kernel, reduce))


@compiled
def _initial(kernel: AbstractBlockKernel, reduce: PyTree) -> tuple[list, Array]:
    tiles = _tiles(kernel, reduce)
    rows = tiles.kernel.rows
    with within_mesh(rows):
        # JAX finds the devices of the states by the examples, if some result has any.
        return tiles.initial(*rows), rows[0].arrays[0][:0]


@functools.partial(compiled, donate="all-except-first")
def _step(operands: tuple, states: list) -> tuple[list, Array]:
    """The states after a tile, updated in place, and its number of NaNs."""
    kernel, reduce, is_diagonal, pair, kept = operands
    tiles = _tiles(kernel, reduce)
    tile = tiles.tile_of(pair, is_diagonal, kept=kept)
    num_nans = tiles.num_nans(tile, pair, is_diagonal)
    with within_mesh(tile):
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

    def agree(self, error: Exception | None) -> None:
        """Waits for all processes and raises if one of them has failed."""
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

    def begin(self, make: Callable[[bool], AbstractWriter]) -> AbstractWriter:
        """Runs a function in the first process before all others."""
        made: AbstractWriter | None = None
        for is_first in (True, False) if self.num > 1 else (True,):
            error = None
            if is_first == (self.rank == 0):
                try:
                    made = make(is_first)
                except Exception as e:
                    error = e
            self.agree(error)
        assert made is not None
        return made


def to_store(
    kernel: AbstractBlockKernel,
    store: AbstractStore,
    meter: AbstractProgressMeter | None,
    mesh_axis: MeshAxis | None,
) -> PyTree:
    """The arrays of a kernel, in a store."""
    check_concrete(kernel, "a `store`")
    team = _Team(mesh_axis, store)
    # Devices compute tiles on a mesh of their own, or alone.
    with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
        kernel = block_kernel(kernel)
        if store.upper_only and not kernel.grid.is_symmetric:
            raise ValueError(
                "`upper_only` is for symmetric kernels of examples with themselves: "
                "leave out `x2`, and pass `symmetric=True` if the kernel does not "
                "declare it."
            )
        mark = lambda: fingerprint(kernel)
        writer = team.begin(functools.partial(store.begin, kernel, mark))
        with contextlib.closing(writer):
            error = None
            try:
                _write(kernel, store, writer, meter, team)
            except Exception as e:
                error = e
            team.agree(error)
            return kernel.output(writer.finish())


def _write(
    kernel: AbstractBlockKernel,
    store: AbstractStore,
    writer: AbstractWriter,
    meter: AbstractProgressMeter | None,
    team: _Team,
) -> None:
    """Computes the tiles that the store lacks, and writes them."""
    leaves, grid, blocks = kernel.leaves, kernel.grid, _Blocks(kernel)
    num = max(len(team.devices), 1)
    tiles = [
        tile
        for tile in (*grid.pairs(), *grid.diagonal())
        if grid.part_of(tile, team.num) == team.rank
    ]
    wanted = {
        tile: [
            patch
            for patch in patches(leaves, grid, tile)
            if not (store.upper_only and patch.is_mirror)
        ]
        for tile in tiles
    }
    # All patches are checked, because this removes damaged ones.
    missing = [tile for tile in tiles if not all([*map(writer.has, wanted[tile])])]
    writer.prepare([patch for tile in missing for patch in wanted[tile]])
    with (
        metered(meter, len(tiles), len(tiles) - len(missing)) as step,
        _pipeline(step) as submit,
    ):
        for is_diagonal in (False, True):
            alike = [tile for tile in missing if grid.is_diagonal(tile) == is_diagonal]
            ordered = blocks.ordered(alike)
            for start in range(0, len(ordered), num):
                group = ordered[start : start + num]
                parts = [wanted[tile] for tile in group]
                has_mirror = any(patch.is_mirror for part in parts for patch in part)
                task = kernel, is_diagonal, has_mirror, meter is not None
                results = _computed(task, group, team.devices, blocks)
                for x in jtu.tree_leaves(results):
                    x.copy_to_host_async()
                submit(_written, writer, len(leaves), parts, results)


def _written(
    writer: AbstractWriter,
    num_leaves: int,
    wanted: list[list[Patch]],
    results: list[list[Array]],
) -> list[int]:
    """Writes the wanted patches of some tiles; returns the NaNs in each tile."""
    for part, arrays in safe_zip(wanted, results):
        for patch in part:
            index = patch.leaf + num_leaves * patch.is_mirror
            writer.write(patch, np.asarray(arrays[index])[patch.part])
    return [int(np.asarray(arrays[-1])) for arrays in results]


@contextlib.contextmanager
def _pipeline(step: Callable[[int], None]) -> Iterator[Callable[..., None]]:
    """Submits writes to separate threads, with a bound on the pending work.

    `step` is called with each number of NaNs that a write returns.
    """
    pool = concurrent.futures.ThreadPoolExecutor(IN_FLIGHT)
    futures: collections.deque = collections.deque()

    def drain(remaining: int) -> None:
        while len(futures) > remaining:
            for num_nans in futures.popleft().result():
                step(num_nans)

    def submit(write: Callable[..., list[int]], *args: Any) -> None:
        futures.append(pool.submit(write, *args))
        drain(IN_FLIGHT)

    try:
        yield submit
        drain(0)
    finally:
        # Writes that have begun are finished, even after an error.
        pool.shutdown(wait=True, cancel_futures=True)


# A kernel, whether a tile is of a block with itself, whether it has a mirror image, and
# whether its NaNs are counted.
_Task = tuple[AbstractBlockKernel, bool, bool, bool]


def _results(
    task: _Task, pair: Array, kept: Sequence[Rows | None] = (None, None)
) -> list[Array]:
    """The arrays of a tile and of its mirror image, and the number of NaNs."""
    kernel, is_diagonal, has_mirror, counts_nans = task
    tiles = _tiles(kernel, None)
    tile = tiles.tile_of(pair, is_diagonal, kept=kept)
    mirrored = tiles.kernel.mirror(tile) if has_mirror else []
    num_nans = jnp.zeros((), jnp.int32)
    if counts_nans:
        num_nans = tiles.num_nans(tile, pair, is_diagonal)
    return [*tile, *mirrored, num_nans]


_tile = compiled(_results)


def tile_program(kernel: AbstractBlockKernel) -> list[Array]:
    """The program for one tile, to measure its memory."""
    grid, pair = kernel.grid, jnp.zeros(2, jnp.int32)
    return _results((kernel, grid.is_same, grid.is_symmetric, False), pair)


@compiled
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


# The version of the format, so that later versions recognise earlier ones.
FORMAT = 2


# What changes numbers, random ones above all, without changing a program's text.
_SETTINGS = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_random_seed_offset",
    "jax_default_matmul_precision",
)


def fingerprint(kernel: AbstractBlockKernel) -> dict[str, Any]:
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
            symmetric = _of_program(programs[-1])
    return {
        "format": FORMAT,
        "package": f"eqxbatch {importlib.metadata.version('equinox-batch')}",
        # Only a record: tiles of another backend have other rounding errors and must
        # not be mixed with these. It does not change any computation.
        "compiler": f"jax {jax.__version__} {jax.default_backend()}",
        **{name: digest(part) for name, part in kernel.parts.items()},
        "settings": {name: getattr(jax.config, name, None) for name in _SETTINGS},
        "program": [_of_program(x) for x in programs],
        "callbacks": sorted(_callbacks(programs)),
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


def digest(tree: PyTree) -> str:
    """A digest of all arrays of a PyTree."""
    sha = hashlib.sha256()
    for path, leaf in jtu.tree_leaves_with_path(eqx.filter(tree, eqx.is_array)):
        sha.update(jtu.keystr(path).encode())
        add_array(sha, leaf)
    return sha.hexdigest()


def add_array(sha: Any, x: Any) -> None:
    """Adds an array to a digest, without a copy if it is contiguous."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        sha.update(str(x.dtype).encode())
        x = jr.key_data(x)
    x = np.asarray(x)
    sha.update(f"{x.dtype}{x.shape}".encode())
    # As bytes: Python has no buffers of dtypes such as bfloat16.
    sha.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _of_program(closed: Any) -> str:
    """A digest of a program, and of what it closes over."""
    sha = hashlib.sha256()
    # Some equations are printed without the programs that they run.
    texts = (str(x) for part in programs_in(closed) for x in _programs_of_objects(part))
    for text in (str(closed), *texts):
        # Functions are printed with their addresses, which change in every run.
        sha.update(re.sub(r"0x[0-9a-f]+", "", text).encode())
    # These include the arrays of the kernel function, which are digested again.
    for x in constants(closed):
        add_array(sha, x)
    return sha.hexdigest()


def _programs_of_objects(closed: Any) -> Iterator[Any]:
    """The programs that objects among the parameters of equations have."""
    for eqn in closed.jaxpr.eqns:
        if parameters(eqn) is not eqn.params:
            yield from inner_programs(eqn)


def _callbacks(programs: list) -> set[str]:
    """What programs call on the host, whose results are not part of their text."""
    return {
        eqn.primitive.name
        for program in programs
        for closed in programs_in(program)
        for eqn in closed.jaxpr.eqns
        if "callback" in eqn.primitive.name and not _has_no_result(eqn)
    }


def _has_no_result(eqn: Any) -> bool:
    """Whether a callback prints, or raises an error of `equinox.error_if`."""
    if eqn.primitive.name.startswith("debug"):
        return True
    fun = getattr(eqn.params.get("callback"), "callback_func", None)
    return getattr(fun, "__module__", None) == "equinox._errors"


def read_json(name: str, file: pathlib.Path, remedy: str) -> dict[str, Any]:
    """The object in a file. Raises `ValueError` if the file is damaged."""
    try:
        record = json.loads(file.read_text())
        if not isinstance(record, dict):
            raise ValueError(f"got a {type(record).__name__}")
    except ValueError as e:
        raise ValueError(
            f"`{name}` has a damaged file: {file} is not a JSON object ({e}). {remedy}"
        ) from e
    return record


def check_record(
    name: str, path: pathlib.Path, saved: dict, expected: dict, what: str
) -> None:
    """Raises `ValueError` if a folder belongs to something else than expected."""
    parts = [
        _difference(part, saved.get(part), expected.get(part))
        for part in {**expected, **saved}
        if saved.get(part) != expected.get(part)
    ]
    if parts:
        raise ValueError(
            f"`{name}` {what}: {path}. {'; '.join(parts)}. Delete it, or pass another "
            "path."
        )


def _difference(part: str, there: Any, now: Any) -> str:
    # Digits of a digest say nothing to users.
    if re.search("[0-9a-f]{64}", f"{there}{now}"):
        return f"the contents of {part} differ"
    return f"{part} is {there!r} there and {now!r} now"
