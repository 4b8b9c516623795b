"""A kernel in memory or on disk, read and multiplied a tile at a time."""

import collections
import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Shaped

from .._base.trees import described
from .symmetric_array import SymmetricArray


# The bytes of a tile of an array without chunks: a few tiles fit into a cache.
_TILE_BYTES = 2**22


# The number of tiles that are read ahead while one is multiplied.
_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tile, by its rows and columns."""

    rows: slice
    columns: slice

    @property
    def is_diagonal(self) -> bool:
        return self.rows == self.columns


class Reader:
    """A matrix that is read a tile at a time.

    Two readers are equal only if they are the same object. A reader can therefore be a
    static part of a PyTree: its entries are never arguments of a compiled program.

    - `array`: has `shape` and `dtype`, and can be indexed with slices.
    - `is_hermitian`: whether the tiles below the diagonal are mirror images of those
        above it. Only tiles on and above the diagonal are then read.
    """

    def __init__(self, array: Any, is_hermitian: bool):
        is_half = isinstance(array, SymmetricArray) and array.is_transpose
        self.array = array.stored if is_half else array
        rows, columns = array.shape
        self.shape: tuple[int, int] = rows, columns
        # JAX has no arrays of the other byte order.
        self.dtype = np.dtype(array.dtype).newbyteorder("=")
        self.is_hermitian = is_hermitian
        self._sizes = self._tile_sizes()

    def _tile_sizes(self) -> tuple[int, int]:
        chunks = getattr(self.array, "chunks", None)
        if chunks is None:
            size = max(math.isqrt(_TILE_BYTES // max(self.dtype.itemsize, 1)), 1)
            return size, size
        rows, columns = (max(size, 1) for size in chunks)
        # The mirror image of a square tile is a tile, too.
        return (min(rows, columns),) * 2 if self.is_hermitian else (rows, columns)

    def _pieces(self) -> list[_Piece]:
        cuts = [
            [slice(start, min(start + size, total)) for start in range(0, total, size)]
            for total, size in zip(self.shape, self._sizes, strict=True)
        ]
        return [
            _Piece(rows, columns)
            for rows in cuts[0]
            for columns in cuts[1]
            if not self.is_hermitian or rows.start <= columns.start
        ]

    def _read(self, piece: _Piece) -> Shaped[np.ndarray, "rows columns"]:
        return np.asarray(self.array[piece.rows, piece.columns])

    def _tiles(self) -> Iterator[tuple[_Piece, np.ndarray]]:
        """The tiles; the next ones are read ahead."""
        pieces = self._pieces()
        if isinstance(self.array, np.ndarray):
            # There is nothing to wait for.
            yield from ((piece, self._read(piece)) for piece in pieces)
            return
        ahead: collections.deque = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(_AHEAD) as pool:
            try:
                for piece in pieces:
                    ahead.append((piece, pool.submit(self._read, piece)))
                    if len(ahead) > _AHEAD:
                        first, future = ahead.popleft()
                        yield first, future.result()
                while ahead:
                    first, future = ahead.popleft()
                    yield first, future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def product(
        self, vectors: Shaped[np.ndarray, "n k"], *, is_transposed: bool = False
    ) -> Shaped[np.ndarray, "m k"]:
        """The product with vectors, or that of the transpose.

        Tiles are multiplied in the dtype of `vectors` or their own, whichever is wider,
        and added up in float64.
        """
        num = self.shape[1 if is_transposed else 0]
        dtype = np.result_type(_multiplied(self.dtype), vectors.dtype)
        vectors = vectors.astype(dtype, copy=False)
        wide = np.result_type(dtype, np.float64)
        total = np.zeros((num, vectors.shape[1]), wide)
        for piece, tile in self._tiles():
            tile = tile.astype(dtype, copy=False)
            # The transpose of a Hermitian matrix is its conjugate.
            if self.is_hermitian:
                tile = _conj(tile) if is_transposed else tile
                total[piece.rows] += tile @ vectors[piece.columns]
                if not piece.is_diagonal:
                    total[piece.columns] += _conj(tile).T @ vectors[piece.rows]
            elif is_transposed:
                total[piece.columns] += tile.T @ vectors[piece.rows]
            else:
                total[piece.rows] += tile @ vectors[piece.columns]
        return total

    def whole(self) -> Shaped[np.ndarray, "n m"]:
        """The whole matrix, in memory."""
        result = np.empty(self.shape, self.dtype)
        for piece, tile in self._tiles():
            result[piece.rows, piece.columns] = tile
            if self.is_hermitian and not piece.is_diagonal:
                result[piece.columns, piece.rows] = _conj(tile).T
        return result

    def diagonal(self) -> Shaped[np.ndarray, " n"]:
        """The diagonal, from the tiles that contain it."""
        size, num = self._sizes[0], min(self.shape)
        parts = [
            np.diagonal(self._read(_Piece(slice(start, stop), slice(start, stop))))
            for start in range(0, num, size)
            for stop in [min(start + size, num)]
        ]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def column(self, index: int) -> Shaped[np.ndarray, " n"]:
        """One column; for a Hermitian matrix, from the upper triangle."""
        result = np.empty(self.shape[0], self.dtype)
        size, at = self._sizes[0], slice(index, index + 1)
        for start in range(0, self.shape[0], size):
            rows = slice(start, min(start + size, self.shape[0]))
            if self.is_hermitian and start > index:
                result[rows] = np.conj(self._read(_Piece(at, rows))[0])
            else:
                result[rows] = self._read(_Piece(rows, at))[:, 0]
        if self.is_hermitian:
            start = index // size * size
            rows = slice(start, min(start + size, self.shape[0]))
            result[rows] = self._read(_Piece(rows, rows))[:, index - start]
        return result


def _conj(x: np.ndarray) -> np.ndarray:
    """Like `np.conj`, but without a copy of real numbers."""
    return np.conj(x) if np.iscomplexobj(x) else x


def _multiplied(dtype: np.dtype) -> np.dtype:
    """The dtype in which entries are multiplied: NumPy has no fast half precision."""
    if dtype.kind in "biu":
        return np.dtype(np.float64)
    return np.result_type(dtype, np.float32) if dtype.itemsize > 2 else np.dtype("f4")


def check_stored(array: Any) -> None:
    """Raises `TypeError` or `ValueError` for anything that is not a stored matrix."""
    missing = [x for x in ("shape", "dtype", "__getitem__") if not hasattr(array, x)]
    if missing:
        raise TypeError(
            "`kernel` must be a kernel function with `x1`, or a stored kernel: a NumPy "
            f"array, a zarr array or a `SymmetricArray`; got {described(array)}."
        )
    if isinstance(array, SymmetricArray) and not array.is_transpose:
        raise ValueError(
            "The `symmetric` of a kernel on disk must be True, for a transpose; this "
            "one has a function. Store the whole kernel, without `upper_only`."
        )
    if len(array.shape) != 2:
        raise ValueError(
            f"A stored kernel must have the two axes (n1, n2); got {array.shape}. For "
            "a kernel of several outputs, take the one of a pair of outputs, or trace "
            "over them with `trace_axes`."
        )
