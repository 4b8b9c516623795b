"""Where the blocks of a kernel go that are not to stay on a device."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import numpy as np

from .grid import Grid, Tile
from .kernel import KernelLeaf, TileMirror


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
