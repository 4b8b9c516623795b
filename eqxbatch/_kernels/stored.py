"""The arrays of a stored kernel, and how they are opened again."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._base.trees import import_extra, safe_zip, shown
from .._base.types import check_types
from .._batch.fingerprint import FORMAT
from .._batch.store import StoredArray
from .._batch.zarr_store import names_of, read_record, ZarrWriter
from .grid import Grid
from .kernel import KernelLeaf, TileMirror


def stored_arrays(
    leaves: Sequence[KernelLeaf], grid: Grid, upper_only: bool
) -> list[StoredArray]:
    """The arrays of a kernel, with tiles as chunks."""
    return [
        StoredArray(
            leaf.path,
            leaf.struct(grid.totals).shape,
            tuple(max(1, size) for size in leaf.struct(grid.sizes).shape),
            leaf.dtype,
            upper_only and leaf.is_pairwise,
        )
        for leaf in leaves
    ]


def opened_arrays(
    arrays: list, stored: list[StoredArray], grid: Grid, mirror: TileMirror
) -> list:
    """What users receive for the arrays of a store."""
    return [
        SymmetricArray(arrays, i, grid.sizes[0], mirror) if part.upper_only else x
        for i, (x, part) in enumerate(safe_zip(arrays, stored))
    ]


def open_kernel(path: str | os.PathLike) -> Any:
    """Opens a kernel that a [`eqxbatch.ZarrStore`][] has written, in any process.

    The kernel function and the examples are not needed. `zarr.open` alone would read
    zeros below the diagonal of a kernel with `upper_only`, and in blocks that a stopped
    run has not written.

    Needs the extra `store`: `pip install "equinox-batch[store]"`.

    **Arguments:**

    - `path`: the folder that the kernel was stored in.

    **Returns:**

    A zarr array that is open for reading or, with `upper_only`, an
    [`eqxbatch.results.SymmetricArray`][]. If the kernel function returns several
    arrays, a dict of them by the names of their folders.

    **Raises:**

    - `FileNotFoundError` if there is no kernel.
    - `ValueError` for an unfinished or damaged kernel, for other zarr arrays, for a
        kernel that another version of this package stored in another format, and with
        `upper_only` and a function as `symmetric`, which is not stored.
    - `ImportError` if zarr is not installed.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, store=folder.name
        ... )
        >>> stored = kernel(jnp.ones((3, 4)), jnp.ones((2, 4)))
        >>> eqxbatch.open_kernel(folder.name)[2:]
        array([[4., 4.]], dtype=float32)
        >>> folder.cleanup()

        ```
    """
    check_types({"path": path}, {"path": str | os.PathLike}, always=True)
    zarr, folder = import_extra("zarr", "open_kernel", "store"), pathlib.Path(path)
    record = read_record(folder)
    if record.get("format") != FORMAT:
        raise ValueError(
            f"`path` has a kernel in the format {record.get('format')}, and this "
            f"version of eqxbatch reads {FORMAT}: {folder}. Open it with "
            f"{record.get('package')}, which has stored it."
        )
    if "grid" not in record:
        raise ValueError(
            f"`path` has rows that `over_batches` stored, and no kernel: {folder}. "
            "Open it with `zarr.open_group`."
        )
    numbers, upper_only = record["grid"], record["upper_only"]
    totals, sizes = (tuple(numbers.pop(name)) for name in ("totals", "sizes"))
    grid = Grid(totals, sizes, **numbers)
    leaves = tuple(
        KernelLeaf(x["path"], tuple(x["axes"]), tuple(x["shape"]), np.dtype(x["dtype"]))
        for x in record["arrays"]
    )
    if upper_only and record["symmetric"] != "transpose":
        raise ValueError(
            f"`path` has a kernel without the blocks below its diagonal: {folder}. "
            "The function that exchanges its sides, `symmetric`, is not stored. "
            "Call the kernel with its store, which returns the arrays."
        )
    stored = stored_arrays(leaves, grid, upper_only)
    writer = ZarrWriter(zarr, folder, stored, mode="r")
    damaged = writer.damaged()
    if damaged:
        raise ValueError(
            f"`path` has an unfinished or damaged kernel: {len(damaged)} of its files "
            f"are missing or have a wrong size, such as {damaged[0]}. Call the kernel "
            "with its store again, which computes what is missing."
        )
    arrays = opened_arrays(writer.open("r"), stored, grid, TileMirror())
    return arrays[0] if len(arrays) == 1 else dict(safe_zip(names_of(stored), arrays))


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
        dots = [i for i, index in enumerate(key) if index is Ellipsis]
        if dots:
            i, missing = dots[0], self.ndim - len(key) + 1
            key = (*key[:i], *[slice(None)] * missing, *key[i + 1 :])
        if len(key) > self.ndim:
            raise IndexError(
                f"There are {len(key)} indices for the {self.ndim} axes of an array of "
                f"shape {self.shape}. Pass at most one for each axis."
            )
        key = (*key, *[slice(None)] * (2 - len(key)))
        # NumPy raises for indices that are out of range.
        numbers = [_numbers(*pair) for pair in safe_zip(key[:2], self.shape[:2])]
        bounds = [
            (int(x.min()), int(x.max()) + 1) if x.size else (0, 0) for x in numbers
        ]
        entries = self._read(*bounds)
        rows, columns = (x - low for x, (low, _) in safe_zip(numbers, bounds))
        entries = np.take(np.take(entries, columns, 1), rows, 0)
        return entries[(*[slice(None)] * (rows.ndim + columns.ndim), *key[2:])]

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
        for leaf, x in safe_zip(self._mirror.leaves, self._arrays):
            key = [slice(None)] * x.ndim
            for axis, part in safe_zip(leaf.axes, (rows, columns)):
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


def _numbers(index: Any, size: int) -> np.ndarray:
    """The rows or columns that an index names."""
    is_bool = isinstance(index, bool)
    if is_bool or not isinstance(index, int | np.integer | slice):
        raise IndexError(
            f"Rows and columns are named by ints and slices; got {shown(index)}. Read "
            "a slice, and index that."
        )
    return np.asarray(np.arange(size)[index])


def _pieces(start: int, stop: int, block: int) -> list[tuple[int, int]]:
    """Splits a range at the boundaries of blocks."""
    firsts = range(start // block * block, stop, block)
    return [(max(start, x), min(stop, x + block)) for x in firsts]
