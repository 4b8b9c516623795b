"""Stores for kernels outside the device, and fingerprints of kernels."""

import abc
import dataclasses
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
from jaxtyping import PyTree

from .._base.primitives import constants, inner_programs, parameters, programs_in
from .function import CalledKernel
from .kernel import AbstractBlockKernel, Grid, KernelLeaf, Tile


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


class AbstractStore(eqx.Module):
    """Where the blocks of a kernel are stored."""

    # Whether to omit patches that are mirror images.
    upper_only: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def begin(
        self,
        kernel: AbstractBlockKernel,
        fingerprint: Callable[[], dict[str, Any]],
        is_first: bool,
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
        self,
        kernel: AbstractBlockKernel,
        fingerprint: Callable[[], dict[str, Any]],
        is_first: bool,
    ) -> AbstractWriter:
        del fingerprint, is_first
        return _HostWriter(kernel.leaves, kernel.grid)

    @property
    def is_shared(self) -> bool:
        return False


class _HostWriter(AbstractWriter):
    def __init__(self, leaves: Sequence[KernelLeaf], grid: Grid):
        self.arrays = [
            np.zeros(leaf.shape_for(grid.totals), leaf.dtype) for leaf in leaves
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


def fingerprint(call: CalledKernel, kernel: AbstractBlockKernel) -> dict[str, Any]:
    """The parts that identify the kernel of a call, as JSON data."""
    grid = kernel.grid
    first, second = kernel.structs(grid.sizes)
    programs = [kernel.program(first, second)]
    if grid.is_same:
        programs.append(kernel.program(first, None))
    symmetric = None
    if grid.is_symmetric:
        symmetric = "transpose"
        if not kernel.mirror.is_transpose:
            exchange = _program_of_mirror(kernel)
            programs.append(exchange)
            symmetric = _of_program(exchange)
    return {
        "format": FORMAT,
        "package": f"eqxbatch {importlib.metadata.version('equinox-batch')}",
        # Only a record: tiles of another backend have other rounding errors and must
        # not be mixed with these. It does not change any computation.
        "compiler": f"jax {jax.__version__} {jax.default_backend()}",
        "inputs": digest((call.sides, call.args, call.shared)),
        "settings": {name: getattr(jax.config, name, None) for name in _SETTINGS},
        "kernel_fn": digest(call.kernel_fn),
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
                "shape": list(leaf.shape_for(grid.totals)),
                "dtype": str(np.dtype(leaf.dtype)),
            }
            for leaf in kernel.leaves
        ],
    }


def _program_of_mirror(kernel: AbstractBlockKernel) -> Any:
    """How blocks below the diagonal follow from those above it."""
    mirror = kernel.mirror
    tile = [
        jax.ShapeDtypeStruct(leaf.shape_for(kernel.grid.sizes), leaf.dtype)
        for leaf in kernel.leaves
    ]
    return eqx.filter_make_jaxpr(lambda tile: mirror(tile))(tile)[0]


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
