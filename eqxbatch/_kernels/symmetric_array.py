"""Symmetric kernels on disk, stored without the blocks below the diagonal."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._base.trees import shown
from .kernel import TileMirror


class SymmetricArray:
    """A symmetric array on disk, without the blocks below its diagonal.

    Entries below the diagonal are read from above it, and the two sides are exchanged
    as `symmetric` of the kernel specifies: complex entries are conjugated, and output
    axes, if any, are transposed. `array[rows, columns]`, with ints and slices, reads
    only what it needs; `numpy.asarray` reads everything.

    - `shape`, `dtype`, `ndim`: as for NumPy arrays.
    - `stored`: the underlying zarr array, with zeros in the omitted blocks.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T,
        ...     block_size=2,
        ...     symmetric=True,
        ...     store=eqxbatch.ZarrStore(folder.name, upper_only=True),
        ... )
        >>> stored = kernel(jnp.arange(4.0)[:, None])
        >>> stored[2:, :3]
        array([[0., 2., 4.],
               [0., 3., 6.]], dtype=float32)
        >>> folder.cleanup()

        ```
    """

    def __init__(self, arrays: list, index: int, block: int, mirror: TileMirror):
        self.stored = arrays[index]
        self._arrays, self._index = arrays, index
        self._block, self._mirror = block, mirror

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def ndim(self) -> int:
        return self.stored.ndim

    @property
    def is_transpose(self) -> bool:
        """Whether blocks below the diagonal are conjugate transposes of those above."""
        return self._mirror.is_transpose

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SymmetricArray({self.stored!r})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("The array is on disk: reading it takes a copy.")
        return np.asarray(self[:, :], dtype)

    def __getitem__(self, key: Any) -> np.ndarray:
        key = key if isinstance(key, tuple) else (key,)
        # By identity: arrays do not compare to a truth value.
        dots = [at for at, index in enumerate(key) if index is Ellipsis]
        if dots:
            at = dots[0]
            key = key[:at] + (slice(None),) * (self.ndim - len(key) + 1) + key[at + 1 :]
        if len(key) > self.ndim:
            raise IndexError(
                f"There are {len(key)} indices for the {self.ndim} axes of an array of "
                f"shape {self.shape}. Pass at most one for each axis."
            )
        key = (*key, *[slice(None)] * (2 - len(key)))
        ranges = [
            _range(name, index, size)
            for name, index, size in zip(
                ("row", "column"), key[:2], self.shape[:2], strict=True
            )
        ]
        bounds = [_bounds(x) for x in ranges]
        found = self._read(*bounds)
        for axis, (wanted, (low, _)) in enumerate(zip(ranges, bounds, strict=True)):
            found = np.take(found, [x - low for x in wanted], axis)
        drop = [0 if not isinstance(i, slice) else slice(None) for i in key[:2]]
        return found[(*drop, *key[2:])]

    def _read(self, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        """Reads a rectangle, block by block."""
        shape = (rows[1] - rows[0], columns[1] - columns[0], *self.shape[2:])
        result = np.empty(shape, self.dtype)
        for top, bottom in _pieces(*rows, self._block):
            for left, right in _pieces(*columns, self._block):
                if top // self._block <= left // self._block:
                    part = self.stored[top:bottom, left:right]
                else:
                    part = self._mirrored(slice(left, right), slice(top, bottom))
                place = (
                    slice(top - rows[0], bottom - rows[0]),
                    slice(left - columns[0], right - columns[0]),
                )
                result[place] = part
        return result

    def _mirrored(self, rows: slice, columns: slice) -> np.ndarray:
        """Reads the mirror image of a rectangle above the diagonal."""
        if self.is_transpose:
            return np.conj(np.swapaxes(self.stored[rows, columns], 0, 1))
        tile = []
        for leaf, x in zip(self._mirror.leaves, self._arrays, strict=True):
            key = [slice(None)] * x.ndim
            for axis, part in zip(leaf.axes, (rows, columns), strict=True):
                if axis is not None:
                    key[axis] = part
            tile.append(jnp.asarray(x[tuple(key)]))
        part = self._mirror(tile)[self._index]
        if part.dtype != self.dtype:
            raise ValueError(
                f"The mirror image of blocks of dtype {self.dtype} has dtype "
                f"{part.dtype}. If 64-bit mode is off, set "
                "`jax.config.update('jax_enable_x64', True)`, or read `stored`."
            )
        return np.asarray(part)


def _range(name: str, index: Any, size: int) -> range:
    if isinstance(index, slice):
        return range(size)[index]
    if isinstance(index, bool) or not isinstance(index, int | np.integer):
        raise IndexError(
            f"Rows and columns are named by ints and slices; got {shown(index)}. Read "
            "a slice, and index that."
        )
    if not -size <= index < size:
        raise IndexError(
            f"The {name} {index} is out of range: there are {size} {name}s."
        )
    at = range(size)[int(index)]
    return range(at, at + 1)


def _bounds(x: range) -> tuple[int, int]:
    return (min(x), max(x) + 1) if len(x) else (0, 0)


def _pieces(start: int, stop: int, block: int) -> list[tuple[int, int]]:
    """Splits a range at the boundaries of blocks."""
    firsts = range(start // block * block, stop, block)
    return [(max(start, x), min(stop, x + block)) for x in firsts]
