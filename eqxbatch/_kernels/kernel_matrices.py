"""The matrices of kernel operators: computed in blocks, or read from a store."""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Inexact, Int, PyTree, Shaped

from .._base.checks import check_equal
from .._base.compile import compiled
from .._base.mesh import gathered, within_mesh
from .._base.platforms import platform
from .._base.trees import described, safe_zip
from .._base.types import AnyArray, as_jax
from .._batch.blocks import Block
from .._batch.progress import AbstractProgressMeter
from .._batch.reading import as_numpy
from .._batch.store import AbstractStore, in_threads
from .._batch.sums import Total
from .batch_kernel import BatchKernel, computed, on_one_device, ready
from .called import (
    AbstractKernelFunction,
    CalledKernel,
    FunctionCall,
    on_mesh_of_results,
)
from .collect import make_collectors
from .engine import run_tiles, Tiles
from .grid import Grid, Sizes
from .kernel import AbstractBlockKernel, compared_step, is_close
from .on_devices import MeshAxis
from .on_host import check_solve, Destination
from .reductions import AbstractSymmetrised, KernelProduct
from .team import Team


class AbstractKernelMatrix(eqx.Module):
    """The matrix of a kernel that need not fit in memory.

    - `struct`: its shape and dtype.
    - `is_hermitian`: whether it is known to be its own conjugate transpose.
    """

    struct: jax.ShapeDtypeStruct = eqx.field(static=True)
    is_hermitian: bool = eqx.field(static=True)

    @property
    @abc.abstractmethod
    def team(self) -> Team:
        """The processes that have to compute a product together."""

    @abc.abstractmethod
    def product(self, vectors: AnyArray, *, is_transposed: bool = False) -> Any:
        """The product with vectors, of shape `(n2, k)`, or that of the transpose.

        For NumPy arrays, it is a NumPy array, in their dtype if JAX need not compute
        it.
        """

    @abc.abstractmethod
    def whole(self) -> Shaped[Array, "n1 n2"]:
        """The whole matrix."""

    @abc.abstractmethod
    def diagonal(self) -> Shaped[Array, " n"]:
        """The diagonal, from the blocks that contain it."""

    @abc.abstractmethod
    def column(self, index: Int[Array, ""]) -> Shaped[Array, " n1"]:
        """One column; `index` is in range."""


class _OfTranspose(AbstractSymmetrised[Total]):
    """The product of the transpose of a kernel with two axes."""

    is_sum: ClassVar[bool] = True

    reduction: KernelProduct

    @property
    def neutral(self) -> float:
        return self.reduction.neutral

    def init(self, kernel: jax.ShapeDtypeStruct) -> Total:
        struct = jax.ShapeDtypeStruct(kernel.shape[::-1], kernel.dtype)
        return self.reduction.init(struct)

    def update(self, state: Total, tile: Array, rows: Block, columns: Block) -> Total:
        # The transpose is the mirror image of the conjugate.
        return self.reduction.update_mirrored(state, jnp.conj(tile), rows, columns)

    def update_mirrored(
        self, state: Total, tile: Array, rows: Block, columns: Block
    ) -> Total:
        return self.reduction.update(state, jnp.conj(tile), rows, columns)

    @property
    def is_cheaper(self) -> bool:
        return self.reduction.is_cheaper

    def update_symmetrised(
        self, state: Total, tile: Array, rows: Block, columns: Block
    ) -> Total:
        conjugate = jnp.conj(tile)
        return self.reduction.update_symmetrised(state, conjugate, rows, columns)

    def merge(self, first: Total, second: Total) -> Total:
        return self.reduction.merge(first, second)

    def finalize(self, state: Total) -> Any:
        return self.reduction.finalize(state)


class ComputedMatrix(AbstractKernelMatrix):
    """The matrix of a kernel function; each product computes its blocks anew.

    - `call`, `mesh_axis`: as for `computed`.
    - `sizes`: the sizes of its blocks on one device.
    """

    call: FunctionCall
    mesh_axis: MeshAxis | None
    sizes: Sizes = eqx.field(static=True)

    def __init__(
        self, transform: BatchKernel, x1: PyTree, x2: PyTree, kwargs: dict[str, PyTree]
    ):
        self.mesh_axis = transform.row_axis
        # Copies, as the caller may change NumPy arrays later.
        self.call = jtu.tree_map(as_jax, transform.called(x1, x2, **kwargs))
        # Sizes are chosen once: diagonals and columns are computed in the same blocks.
        kernel = on_one_device(self.call)
        assert isinstance(kernel.sizes, tuple)
        self.sizes = kernel.sizes
        if [leaf.axes for leaf in kernel.leaves] != [(0, 1)] or any(
            len(leaf.sample) != 2 for leaf in kernel.leaves
        ):
            shapes = [leaf.struct(kernel.totals).shape for leaf in kernel.leaves]
            raise ValueError(
                "`kernel` must return one array of shape (n1, n2), here "
                f"{kernel.totals}; got the shapes {shapes}. For several outputs, take "
                "the trace over them, with `trace_axes`."
            )
        self.struct = kernel.leaves[0].struct(kernel.totals)
        # With two axes, the function that exchanges the sides of our estimators is a
        # transpose. A user's function can do anything.
        mirror = kernel.symmetric
        is_ours = isinstance(transform.kernel_fn, AbstractKernelFunction)
        is_known = mirror is True or (mirror is not None and is_ours)
        self.is_hermitian = kernel.is_same and is_known

    @property
    def team(self) -> Team:
        return Team(self.mesh_axis, is_whole=True)

    def stored(self, store: AbstractStore, meter: AbstractProgressMeter | None) -> Any:
        """The matrix in a store."""
        symmetric = True if self.is_hermitian else None
        call = dataclasses.replace(self.call, symmetric=symmetric)
        return computed(call, Destination(self.mesh_axis, None, store, meter))

    def product(self, vectors: AnyArray, *, is_transposed: bool = False) -> Any:
        if isinstance(vectors, np.ndarray):
            product = self.product(jnp.asarray(vectors), is_transposed=is_transposed)
            check_solve(product)  # A kernel function may close over traced arrays.
            return np.asarray(product)
        product = KernelProduct(vectors)
        reduce = _OfTranspose(product) if is_transposed else product
        return computed(self.call, Destination(self.mesh_axis, reduce))

    def whole(self) -> Array:
        return computed(self.call, Destination(self.mesh_axis))

    def diagonal(self) -> Array:
        return _compiled_entries(_diagonal_in_blocks, self._on_one_device)

    def column(self, index: Int[Array, ""]) -> Array:
        return _compiled_entries(_column_in_blocks, self._on_one_device, index)

    @property
    def _on_one_device(self) -> FunctionCall:
        return gathered(dataclasses.replace(self.call, sizes=self.sizes))


@compiled
def _compiled_entries(
    run: Callable[..., Array], call: FunctionCall, *args: Array
) -> Array:
    with within_mesh(call):
        kernel, _ = on_mesh_of_results(ready(call), None)
    with within_mesh(kernel):
        return run(kernel, *args)


def _diagonal_in_blocks(kernel: AbstractBlockKernel) -> Shaped[Array, " n"]:
    grid, leaf = kernel.grid, kernel.leaves[0]
    num = min(grid.totals)
    if num == 0:
        return jnp.zeros(0, leaf.dtype)
    # Blocks of both sides start at the same places.
    size = min(*grid.sizes, num)
    grid = Grid((num, num), (size, size), grid.is_same, grid.is_symmetric)
    # Tiles on the diagonal alone: `n * size` entries in place of `n * n`.
    tiles = Tiles(kernel, grid, [])

    def step(diagonal: Array, number: Array) -> tuple[Array, None]:
        both = jnp.stack([number, number])
        tile = tiles.tile(both, grid.is_same).arrays[0]
        start = jnp.asarray(grid.start(0, number), jnp.int32)
        return lax.dynamic_update_slice(diagonal, jnp.diagonal(tile), (start,)), None

    numbers = jnp.arange(grid.num(0), dtype=jnp.int32)
    return lax.scan(step, jnp.zeros(num, leaf.dtype), numbers)[0]


def _column_in_blocks(
    kernel: AbstractBlockKernel, index: Int[Array, ""]
) -> Shaped[Array, " n1"]:
    rows, columns = kernel.rows
    grid = Grid((rows.total, 1), (kernel.grid.sizes[0], 1), False, False)
    collectors, example = make_collectors(kernel, None), columns.slice(index, 1)
    column = run_tiles(kernel, grid, collectors, rows, example).arrays[0][:, 0]
    is_alone = isinstance(kernel, CalledKernel) and kernel.call.is_alone
    if not (is_alone and kernel.is_same):
        return column
    # Without `x2`, the function may add noise to the diagonal.
    entries = Grid(kernel.totals, (1, 1), True, kernel.grid.is_symmetric)
    both = jnp.stack([index, index])
    entry = Tiles(kernel, entries, []).tile(both, is_diagonal=True).arrays[0]
    return lax.dynamic_update_slice(column, entry[:, 0], (index,))


# The number of tiles that are read ahead while one is multiplied.
_AHEAD = 2


# A tile, by its rows and columns.
_Piece = tuple[slice, slice]


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

    def _pieces(self) -> list[_Piece]:
        cuts = [
            [slice(start, min(start + size, total)) for start in range(0, total, size)]
            for total, size in safe_zip(self.shape, self._sizes)
        ]
        # A tile that starts below the diagonal is the mirror image of one above it.
        return [
            (rows, columns)
            for rows in cuts[0]
            for columns in cuts[1]
            if not self.is_hermitian or rows.start <= columns.start
        ]

    def _read(self, piece: _Piece) -> Shaped[np.ndarray, "rows columns"]:
        tile = self._checked(self.array[piece], [x.stop - x.start for x in piece])
        if self._is_checked and piece[0] == piece[1]:
            _check_hermitian(tile)
        return tile

    def _checked(self, entries: Any, shape: Sequence[int]) -> np.ndarray:
        entries = as_numpy(entries)
        # NumPy would broadcast what is too small.
        check_equal("Slices of a stored kernel", entries.shape, tuple(shape))
        return entries

    def _tiles(
        self, rank: int = 0, num: int = 1
    ) -> Iterator[tuple[_Piece, np.ndarray]]:
        """The tiles, or those of a process; the next ones are read ahead."""
        # In turn, because rows of a triangle have tiles of different numbers.
        pieces = [(piece,) for piece in self._pieces()[rank::num]]
        is_in_memory = isinstance(self.array, np.ndarray)
        tiles = in_threads(self._read, pieces, _AHEAD)
        # In memory, there is nothing to wait for.
        tiles = itertools.starmap(self._read, pieces) if is_in_memory else tiles
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
        size, (rows, _) = self._sizes[0], self.shape
        # What a tile on the diagonal has below it is stored, too.
        stop = min((index // size + 1) * size, rows) if self.is_hermitian else rows
        column = self._checked(self.array[:stop, index], [stop])
        # Further down, entries are mirror images of those in the row `index`.
        if stop < rows:
            below = self._checked(self.array[index, stop:], [rows - stop])
            column = np.concatenate([column, _numpy_conj(below)])
        return column.astype(self.dtype, copy=False)


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
        that contain a part of it.
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
        if self.source is not None:
            return self.source.column(index)
        struct = self.struct
        read = lambda index: self.reader.column(int(index)).astype(struct.dtype)
        if not isinstance(index, Tracer):
            return jnp.asarray(read(index))
        shape = jax.ShapeDtypeStruct(struct.shape[:1], struct.dtype)
        return jax.pure_callback(read, shape, index, vmap_method="sequential")


class MatrixView(AbstractKernelMatrix):
    """The transpose of another matrix, its complex conjugate, or both."""

    original: AbstractKernelMatrix
    is_transposed: bool = eqx.field(static=True)
    is_conjugate: bool = eqx.field(static=True)

    @staticmethod
    def of(matrix: AbstractKernelMatrix, change: str) -> AbstractKernelMatrix:
        """A matrix with one of the two changes more, or less if it has it already."""
        changes, struct = {"is_transposed": False, "is_conjugate": False}, matrix.struct
        if isinstance(matrix, MatrixView):
            changes = {name: getattr(matrix, name) for name in changes}
            matrix = matrix.original
        changes[change] = not changes[change]
        if not any(changes.values()):
            return matrix
        if change == "is_transposed":
            struct = jax.ShapeDtypeStruct(struct.shape[::-1], struct.dtype)
        return MatrixView(struct, matrix.is_hermitian, matrix, **changes)

    @property
    def team(self) -> Team:
        return self.original.team

    def _conj(self, x: Any) -> Any:
        return x.conj() if self.is_conjugate else x

    def product(self, vectors: AnyArray, *, is_transposed: bool = False) -> Any:
        is_transposed ^= self.is_transposed
        run = self.original.product
        return self._conj(run(self._conj(vectors), is_transposed=is_transposed))

    def whole(self) -> Array:
        whole = self._conj(self.original.whole())
        return whole.T if self.is_transposed else whole

    def diagonal(self) -> Array:
        return self._conj(self.original.diagonal())

    def column(self, index: Int[Array, ""]) -> Array:
        if not self.is_transposed:
            return self._conj(self.original.column(index))
        num = self.struct.shape[1]
        # A column of the transpose is a row, which no matrix can read by itself.
        unit = jnp.zeros((num, 1), self.struct.dtype).at[index, 0].set(1)
        return self.product(unit)[:, 0]
