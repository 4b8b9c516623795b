"""The matrix of a kernel that is stored, which the host reads and multiplies."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Inexact, Int, Shaped

from .._base.checks import check_equal
from .._base.platforms import platform
from .._base.trees import described, safe_zip
from .._base.types import AnyArray
from .._batch.reading import as_numpy
from .._batch.store import in_threads
from .kernel import compared_step, is_close
from .kernel_matrices import AbstractKernelMatrix, ComputedMatrix
from .team import Team


# The number of tiles that are read ahead while one is multiplied.
_AHEAD = 2


# The tiles of a matrix of at most so many bytes are kept once they are read: in
# products, reading them again would take longer than all else.
_KEPT_BYTES = 2**26


# A tile, by its rows and columns.
_Piece = tuple[slice, slice]


def _place(piece: _Piece) -> tuple[int, ...]:
    """Where a tile starts and ends."""
    return tuple(x for cut in piece for x in (cut.start, cut.stop))


class _TileSizes(NamedTuple):
    """The numbers of rows and of columns of the tiles that are read."""

    rows: int
    columns: int


class Reader:
    """A matrix that is read a tile at a time.

    Two readers are equal only if they are the same object. A reader can therefore be a
    static part of a PyTree: its entries are never arguments of a compiled program.

    - `array`: has `shape` and `dtype`, and can be indexed with slices.
    - `is_hermitian`: whether the tiles below the diagonal are mirror images of those
        above it. Only tiles on and above the diagonal are then read.
    - `is_checked`: whether tiles on the diagonal are compared with their mirror images.
    - `team`: the processes of which each reads a share of the tiles.

    A small matrix is read once.
    """

    def __init__(
        self,
        array: Any,
        is_hermitian: bool,
        is_checked: bool = False,
        team: Team | None = None,
    ):
        self.array, self.team = array, team or Team(None)
        rows, columns = array.shape
        self.shape: tuple[int, int] = rows, columns
        # JAX has no arrays of the other byte order.
        self.dtype = np.dtype(array.dtype).newbyteorder("=")
        self.is_hermitian, self._is_checked = is_hermitian, is_checked
        self._sizes = self._tile_sizes()
        self._is_in_memory = isinstance(array, np.ndarray)
        is_small = rows * columns * self.dtype.itemsize <= _KEPT_BYTES
        self._keeps = is_small and not self._is_in_memory
        # The tiles that are kept, by their places: those of the diagonal may be other
        # ones than those of products.
        self._kept: dict[tuple[int, ...], np.ndarray] = {}

    def _tile_sizes(self) -> _TileSizes:
        chunks = getattr(self.array, "chunks", None)
        if chunks is None:
            entries = platform().block_bytes // max(self.dtype.itemsize, 1)
            # In memory, tiles can have any size. A square one of these bytes is
            # multiplied while it is in a cache.
            size = max(math.isqrt(entries), 1)
            return _TileSizes(size, size)
        rows, columns = (max(size, 1) for size in chunks)
        # The mirror image of a square tile is a tile, too.
        if self.is_hermitian:
            rows = columns = min(rows, columns)
        return _TileSizes(rows, columns)

    def _cuts(self, side: int) -> list[slice]:
        """The rows of tiles, or their columns."""
        total, size = self.shape[side], self._sizes[side]
        return [slice(i, min(i + size, total)) for i in range(0, total, size)]

    def _pieces(self) -> list[_Piece]:
        # A tile that starts below the diagonal is the mirror image of one above it.
        return [
            (rows, columns)
            for rows in self._cuts(0)
            for columns in self._cuts(1)
            if not self.is_hermitian or rows.start <= columns.start
        ]

    def _read(self, piece: _Piece) -> Shaped[np.ndarray, "rows columns"]:
        place = _place(piece)
        if place in self._kept:
            return self._kept[place]
        tile = as_numpy(self.array[piece])
        # NumPy would broadcast what is too small.
        shape = tuple(x.stop - x.start for x in piece)
        check_equal("Slices of a stored kernel", tile.shape, shape)
        if self._is_checked and piece[0] == piece[1]:
            _check_hermitian(tile)
        if self._keeps:
            self._kept[place] = tile
        return tile

    def _tiles(
        self, rank: int = 0, num: int = 1
    ) -> Iterator[tuple[_Piece, np.ndarray]]:
        """The tiles, or those of a process; the next ones are read ahead."""
        # In turn, because rows of a triangle have tiles of different numbers.
        pieces = [(piece,) for piece in self._pieces()[rank::num]]
        is_kept = all(_place(piece) in self._kept for (piece,) in pieces)
        # In memory, there is nothing to wait for.
        tiles = (
            itertools.starmap(self._read, pieces)
            if self._is_in_memory or is_kept
            else in_threads(self._read, pieces, _AHEAD)
        )
        yield from ((*piece, tile) for piece, tile in safe_zip(pieces, tiles))

    def product(
        self,
        vectors: Shaped[np.ndarray, "n k"],
        *,
        is_transposed: bool = False,
        is_shared: bool = False,
    ) -> Shaped[np.ndarray, "m k"]:
        """The product with vectors, or that of the transpose.

        Tiles are multiplied in the dtype of `vectors` or their own, whichever is wider,
        and added up in float64. With `is_shared`, all processes must call it.
        """
        if not is_shared:
            return self._partial(vectors, is_transposed, 0, 1)
        team = self.team
        share = lambda: self._partial(vectors, is_transposed, team.rank, team.num)
        return team.total(team.together(share))

    def _partial(
        self,
        vectors: Shaped[np.ndarray, "n k"],
        is_transposed: bool,
        rank: int,
        num_processes: int,
    ) -> Shaped[np.ndarray, "m k"]:
        """The product with the tiles of a process, which is a summand of the whole."""
        num = self.shape[1 if is_transposed else 0]
        dtype = np.result_type(_multiplied(self.dtype), vectors.dtype)
        vectors = vectors.astype(dtype, copy=False)
        wide = np.result_type(dtype, np.float64)
        total = np.zeros((num, vectors.shape[1]), wide)
        for (rows, columns), tile in self._tiles(rank, num_processes):
            tile = tile.astype(dtype, copy=False)
            if is_transposed and self.is_hermitian:
                # The transpose of a Hermitian matrix is its conjugate.
                tile = _numpy_conj(tile)
            elif is_transposed:
                rows, columns, tile = columns, rows, tile.T
            total[rows] += tile @ vectors[columns]
            # The mirror image of a tile counts without being read.
            if self.is_hermitian and rows != columns:
                total[columns] += _numpy_conj(tile).T @ vectors[rows]
        return total

    def whole(self) -> Shaped[np.ndarray, "n m"]:
        """The whole matrix, in memory."""
        result = np.empty(self.shape, self.dtype)
        for (rows, columns), tile in self._tiles():
            result[rows, columns] = tile
            if self.is_hermitian and rows != columns:
                result[columns, rows] = _numpy_conj(tile).T
        return result

    def diagonal(self) -> Shaped[np.ndarray, " n"]:
        """The diagonal, from the tiles that contain it."""
        size, num = self._sizes[0], min(self.shape)
        cuts = [slice(i, min(i + size, num)) for i in range(0, num, size)]
        parts = [np.diagonal(self._read((cut, cut))) for cut in cuts]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def column(self, index: int) -> Shaped[np.ndarray, " n"]:
        """One column; of a Hermitian matrix, from tiles on and above the diagonal."""
        columns = self._cuts(1)[index // self._sizes.columns]
        place = index - columns.start

        def part(rows: slice) -> np.ndarray:
            # Further down, entries are mirror images of those in the row `index`.
            if self.is_hermitian and rows.start > columns.start:
                return _numpy_conj(self._read((columns, rows))[place])
            return self._read((rows, columns))[:, place]

        parts = np.zeros(0, self.dtype), *map(part, self._cuts(0))
        return np.concatenate(parts, dtype=self.dtype)


def _check_hermitian(tile: Shaped[np.ndarray, "n n"]) -> None:
    """Raises `ValueError` for a block that is not its mirror image within rounding."""
    step = compared_step(len(tile))
    sample, rounding = tile[::step, ::step], 0.0
    if jnp.issubdtype(tile.dtype, jnp.inexact):
        rounding = float(jnp.finfo(tile.dtype).eps)
        sample = sample.astype(np.result_type(_multiplied(tile.dtype), np.float32))
    if not is_close(sample, _numpy_conj(sample).T, rounding, np):
        raise ValueError(
            "`symmetric=True` is not true of the stored kernel: a block of examples "
            "with themselves is not its mirror image within rounding. Leave it out."
        )


def _numpy_conj(x: np.ndarray) -> np.ndarray:
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
            f"array or a zarr array; got {described(array)}."
        )
    if len(array.shape) != 2:
        raise ValueError(
            f"A stored kernel must have the two axes (n1, n2); got {array.shape}. For "
            "a kernel of several outputs, take the one of a pair of outputs, or trace "
            "over them with `trace_axes`."
        )


class StoredMatrix(AbstractKernelMatrix):
    """A stored matrix, which the host reads in blocks and multiplies.

    - `source`: the matrix that it was computed from, if that is known. Columns are
        computed from it, because reading one takes as long as reading all the blocks
        that contain a part of it; unless that takes the factors of all examples.
    """

    reader: Reader = eqx.field(static=True)
    source: ComputedMatrix | None

    def __init__(self, reader: Reader, source: ComputedMatrix | None = None):
        self.reader, self.source = reader, source
        dtype = jax.dtypes.canonicalize_dtype(reader.dtype)
        self.struct = jax.ShapeDtypeStruct(reader.shape, dtype)
        self.is_hermitian = reader.is_hermitian

    @property
    def team(self) -> Team:
        return self.reader.team

    def product(self, vectors: AnyArray, *, is_transposed: bool = False) -> Any:
        if isinstance(vectors, np.ndarray):
            # Within a program, other processes may not be there at the same time.
            return self.reader.product(
                vectors, is_transposed=is_transposed, is_shared=True
            )
        dtype = jnp.result_type(self.struct.dtype, vectors.dtype)
        vectors = vectors.astype(dtype)
        if isinstance(vectors, Tracer):
            return self._traced_product(vectors, is_transposed)
        product = self.product(np.asarray(vectors), is_transposed=is_transposed)
        return jnp.asarray(product.astype(dtype))

    def _traced_product(
        self, vectors: Inexact[Array, "n2 k"], is_transposed: bool
    ) -> Inexact[Array, "n1 k"]:
        rows, columns = (
            reversed(self.reader.shape) if is_transposed else self.reader.shape
        )
        size = max(rows, columns)
        padded = jnp.pad(vectors, [(0, size - columns), (0, 0)])
        # A callback has no derivative. In JAX, the linear function that accepts its own
        # transpose and works under `jax.vmap` is a linear solve, so the product is
        # declared to be one. Systems are square, so the shorter side is padded.
        product = lax.custom_linear_solve(
            lambda x: x,
            padded,
            lambda _, b: self._callback(b, is_transposed),
            lambda _, b: self._callback(b, not is_transposed),
        )
        return product[:rows]

    def _callback(self, vectors: Array, is_transposed: bool) -> Array:
        """The product with padded vectors, padded to the same size."""
        height = self.reader.shape[0 if is_transposed else 1]
        dtype = np.dtype(vectors.dtype)

        def run(vectors: AnyArray) -> np.ndarray:
            vectors = np.asarray(vectors)
            if vectors.dtype != dtype:
                raise TypeError(
                    f"JAX gives vectors of dtype {dtype} as {vectors.dtype} to the "
                    "thread that multiplies them with a stored kernel. Enable 64-bit "
                    "types in all threads: `jax.config.update('jax_enable_x64', True)`."
                )
            *batch, size, k = vectors.shape
            # [size, batch * k]: vectors of all calls under `vmap` share one reading.
            flat = np.moveaxis(vectors, -2, 0).reshape(size, -1)[:height]
            product = self.reader.product(flat, is_transposed=is_transposed)
            product = np.pad(product, [(0, size - len(product)), (0, 0)])
            product = np.moveaxis(product.reshape(size, *batch, k), 0, -2)
            return product.astype(dtype)

        struct = jax.ShapeDtypeStruct(vectors.shape, vectors.dtype)
        return jax.pure_callback(run, struct, vectors, vmap_method="expand_dims")

    def whole(self) -> Array:
        return jnp.asarray(self.reader.whole(), self.struct.dtype)

    def diagonal(self) -> Array:
        return jnp.asarray(self.reader.diagonal(), self.struct.dtype)

    def column(self, index: Int[Array, ""]) -> Array:
        source, is_known = self.source, not isinstance(index, Tracer)
        if source is not None and not (source.has_factors and is_known):
            return source.column(index)
        struct = self.struct
        read = lambda index: self.reader.column(int(index)).astype(struct.dtype)
        if is_known:
            return jnp.asarray(read(index))
        shape = jax.ShapeDtypeStruct(struct.shape[:1], struct.dtype)
        return jax.pure_callback(read, shape, index, vmap_method="sequential")

    def columns(self) -> Callable[[Int[Array, ""]], Shaped[Array, " n1"]]:
        return self.column
