"""Where blocks of a kernel go that leave the device, and what tells kernels apart."""

import abc
import dataclasses
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .grid import Grid, Tile
from .kernel import AbstractBlockKernel, KernelCall, KernelLeaf, TileMirror


@dataclasses.dataclass(frozen=True)
class Patch:
    """What a tile adds to one array of a kernel.

    - `leaf`: the number of the array.
    - `place`: where that is in the array, and `chunk`, in blocks.
    - `part`: what of the tile that is.
    - `is_mirror`: whether it is from the mirror image of the tile.
    """

    leaf: int
    place: tuple[slice, ...]
    chunk: tuple[int, ...]
    part: tuple[slice, ...]
    is_mirror: bool


def patches(leaves: list[KernelLeaf], grid: Grid, tile: Tile) -> Iterator[Patch]:
    """What a tile adds to the arrays of a kernel."""
    for index, leaf in enumerate(leaves):
        if leaf.is_pairwise:
            yield _patch(index, leaf, grid, tile, False)
            if grid.is_symmetric and tile.row != tile.column:
                yield _patch(index, leaf, grid, Tile(*reversed(tile)), True)
            continue
        # One of the tiles of a row, or of a column, is enough.
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
    """Takes the patches of one kernel."""

    @abc.abstractmethod
    def has(self, patch: Patch) -> bool:
        """Whether it is there already, and whole."""

    @abc.abstractmethod
    def prepare(self, missing: list[Patch]) -> None:
        """Is told what is to come. Raises `OSError` if there is no room for it."""

    @abc.abstractmethod
    def write(self, patch: Patch, values: np.ndarray) -> None:
        """Takes a patch. Can be called from several threads, for different ones."""

    @abc.abstractmethod
    def finish(self) -> list[Any]:
        """The arrays, after all patches."""


class AbstractStore(eqx.Module):
    """Where the blocks of a kernel go."""

    # Whether patches that are mirror images are not to be written.
    upper_only: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def begin(
        self,
        leaves: list[KernelLeaf],
        grid: Grid,
        fingerprint: Callable[[], dict[str, Any]],
        *,
        mirror: TileMirror,
        is_first: bool,
    ) -> AbstractWriter:
        """What takes the patches of a kernel.

        `fingerprint` tells kernels apart, `mirror` exchanges the sides of one that is
        symmetric, and `is_first` is whether this process is the first of those that
        compute it.
        """

    @property
    @abc.abstractmethod
    def is_shared(self) -> bool:
        """Whether several processes can write into it."""


class HostStore(AbstractStore):
    """Brings a kernel to the memory of the host, as NumPy arrays.

    Each block is copied while the next one is computed, so that the kernel can be
    larger than the memory of the device. It stands for `store` in
    [`eqxbatch.filter_batch_kernel`][].

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, store=eqxbatch.HostStore()
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
        leaves: list[KernelLeaf],
        grid: Grid,
        fingerprint: Callable[[], dict[str, Any]],
        *,
        mirror: TileMirror,
        is_first: bool,
    ) -> AbstractWriter:
        del fingerprint, mirror, is_first
        return _HostWriter(leaves, grid)

    @property
    def is_shared(self) -> bool:
        return False


class _HostWriter(AbstractWriter):
    def __init__(self, leaves: list[KernelLeaf], grid: Grid):
        self.arrays = [np.zeros(leaf.shape(grid.totals), leaf.dtype) for leaf in leaves]

    def has(self, patch: Patch) -> bool:
        del patch
        return False

    def prepare(self, missing: list[Patch]) -> None:
        del missing

    def write(self, patch: Patch, values: np.ndarray) -> None:
        self.arrays[patch.leaf][patch.place] = values

    def finish(self) -> list[np.ndarray]:
        return self.arrays


# Of what is stored, so that a later version knows what an earlier one wrote.
_FORMAT = 1


def fingerprint(
    call: KernelCall, kernel: AbstractBlockKernel, grid: Grid
) -> dict[str, Any]:
    """The parts by which the kernel of a call is known, as JSON has them."""
    first, second = kernel.structs(grid.sizes)
    program = [_of_program(kernel.tile, first, second)]
    if grid.is_same:
        program.append(_of_program(kernel.tile, first, None))
    return {
        "format": _FORMAT,
        "package": f"eqxbatch {importlib.metadata.version('equinox-batch')}",
        # Only a record: tiles of another backend are rounded in another way, and not
        # to be mixed with these. Nothing is computed differently because of it.
        "compiler": f"jax {jax.__version__} {jax.default_backend()}",
        "inputs": _digest((call.calls, call.args, call.shared)),
        "kernel_fn": _digest(call.kernel_fn),
        "program": program,
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
                "shape": list(leaf.shape(grid.totals)),
                "dtype": str(np.dtype(leaf.dtype)),
            }
            for leaf in kernel.leaves
        ],
    }


def _digest(tree: PyTree) -> str:
    """A digest of all arrays of a PyTree."""
    digest = hashlib.sha256()
    for path, leaf in jtu.tree_leaves_with_path(eqx.filter(tree, eqx.is_array)):
        digest.update(jtu.keystr(path).encode())
        _add(digest, leaf)
    return digest.hexdigest()


def _add(digest: Any, x: Any) -> None:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        digest.update(str(x.dtype).encode())
        x = jr.key_data(x)
    x = np.asarray(x)
    digest.update(f"{x.dtype}{x.shape}".encode())
    digest.update(np.ascontiguousarray(x).tobytes())


def _of_program(fun: Any, *args: Any) -> str:
    """A digest of what a function does, and of what it closes over."""
    closed = eqx.filter_make_jaxpr(fun)(*args)[0]
    # Functions are shown with their addresses, which are others in each run.
    text = re.sub(r"0x[0-9a-f]+", "", str(closed))
    digest = hashlib.sha256(text.encode())
    # The arrays of the kernel function are among these, and digested once more.
    for x in constants(closed):
        _add(digest, x)
    return digest.hexdigest()


def constants(x: Any) -> Iterator[Any]:
    """All arrays that are part of a jaxpr."""
    if isinstance(x, jex.ClosedJaxpr):
        yield from x.consts
        x = x.jaxpr
    # Since JAX 0.12, a jaxpr with constants is a `Jaxpr`, too.
    if isinstance(x, jex.Jaxpr):
        for eqn in x.eqns:
            for atom in eqn.invars:
                if isinstance(atom, jex.Literal):
                    yield np.asarray(atom.val)
            for param in eqn.params.values():
                yield from constants(param)
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from constants(part)
