"""`KernelOperator`: a kernel as a linear operator, computed or read in blocks."""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Inexact, Int, PyTree, Shaped

from .._base.checks import AnyArray, as_jax, check_equal, checked
from .._base.dtypes import is_complex
from .._base.linear_operator import AbstractTaggedOperator, as_tags
from .._base.mesh import gathered, within_mesh
from .._base.platforms import compiled, platform
from .._base.trees import described, safe_zip
from .._batch.batch import as_numpy, Block
from .._batch.progress import AbstractProgressMeter, as_meter, Progress
from .._batch.store import AbstractStore, as_store, in_threads, Store
from .batch_kernel import BatchKernel, computed, known, on_one_device
from .engine import make_collectors, MeshAxis, run_tiles, Tiles
from .kernel import (
    AbstractBlockKernel,
    AbstractKernelFunction,
    block_kernel,
    CalledKernel,
    compared_step,
    Grid,
    is_close,
    on_mesh_of_results,
    Sizes,
    TileMirror,
)
from .on_host import check_solve, SymmetricArray
from .reductions import AbstractReduction, KernelProduct


class AbstractMatrix(eqx.Module):
    """The matrix of a kernel that need not fit in memory.

    - `struct`: its shape and dtype.
    - `is_hermitian`: whether it is known to be its own conjugate transpose.
    """

    struct: jax.ShapeDtypeStruct = eqx.field(static=True)
    is_hermitian: bool = eqx.field(static=True)

    @abc.abstractmethod
    def product(self, vectors: Any, *, is_transposed: bool = False) -> Any:
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


class _OfTranspose(AbstractReduction):
    """The product of the transpose of a kernel with two axes."""

    is_sum: ClassVar[bool] = True

    reduction: KernelProduct

    @property
    def neutral(self) -> float:
        return self.reduction.neutral

    def init(self, kernel: jax.ShapeDtypeStruct) -> Any:
        struct = jax.ShapeDtypeStruct(kernel.shape[::-1], kernel.dtype)
        return self.reduction.init(struct)

    def update(self, state: Any, tile: Array, rows: Block, columns: Block) -> Any:
        return self.reduction.update(state, tile.T, columns, rows)

    def merge(self, first: Any, second: Any) -> Any:
        return self.reduction.merge(first, second)

    def finalize(self, state: Any) -> Any:
        return self.reduction.finalize(state)


class ComputedMatrix(AbstractMatrix):
    """The matrix of a kernel function; each product computes its blocks anew.

    - `call`, `mesh_axis`: as for `computed`.
    - `sizes`: the sizes of its blocks on one device.
    """

    call: CalledKernel
    mesh_axis: MeshAxis | None
    sizes: Sizes = eqx.field(static=True)

    def __init__(self, transform: BatchKernel, x1: Any, x2: Any, kwargs: dict):
        self.mesh_axis = transform.row_axis
        # Copies, as the caller may change NumPy arrays later.
        self.call = jtu.tree_map(as_jax, transform.called(x1, x2, **kwargs)())
        on_device = on_one_device(self.call)
        assert isinstance(on_device.sizes, tuple)
        self.sizes = on_device.sizes
        kernel = block_kernel(on_device)
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

    def stored(self, store: Any, meter: AbstractProgressMeter | None) -> Any:
        """The matrix in a store."""
        symmetric = True if self.is_hermitian else None
        call = dataclasses.replace(self.call, symmetric=symmetric)
        return computed(known(call), self.mesh_axis, None, store, meter)

    def product(self, vectors: Any, *, is_transposed: bool = False) -> Any:
        if isinstance(vectors, np.ndarray):
            product = self.product(jnp.asarray(vectors), is_transposed=is_transposed)
            check_solve(product)  # A kernel function may close over traced arrays.
            return np.asarray(product)
        product = KernelProduct(vectors)
        reduce = _OfTranspose(product) if is_transposed else product
        return computed(known(self.call), self.mesh_axis, reduce)

    def whole(self) -> Array:
        return computed(known(self.call), self.mesh_axis)

    def diagonal(self) -> Array:
        return _in_one_program(_diagonal, self._on_one_device)

    def column(self, index: Int[Array, ""]) -> Array:
        return _in_one_program(_column, self._on_one_device, index)

    @property
    def _on_one_device(self) -> CalledKernel:
        return gathered(dataclasses.replace(self.call, sizes=self.sizes))


@compiled
def _in_one_program(
    run: Callable[..., Array], call: CalledKernel, *args: Array
) -> Array:
    with within_mesh(call):
        kernel, _ = on_mesh_of_results(block_kernel(call), None)
    with within_mesh(kernel):
        return run(kernel, *args)


def _diagonal(kernel: AbstractBlockKernel) -> Shaped[Array, " n"]:
    grid, leaf = kernel.grid, kernel.leaves[0]
    num = min(grid.totals)
    if num == 0:
        return jnp.zeros(0, leaf.dtype)
    # Blocks of both sides start at the same places.
    size = min(*grid.sizes, num)
    grid = Grid((num, num), (size, size), grid.is_same, grid.is_symmetric)
    tiles = Tiles(kernel, grid, [])

    def step(diagonal: Array, number: Array) -> tuple[Array, None]:
        both = jnp.stack([number, number])
        tile = tiles.tile(both, grid.is_same).arrays[0]
        start = jnp.asarray(grid.start(0, number), jnp.int32)
        return lax.dynamic_update_slice(diagonal, jnp.diagonal(tile), (start,)), None

    numbers = jnp.arange(grid.num(0), dtype=jnp.int32)
    return lax.scan(step, jnp.zeros(num, leaf.dtype), numbers)[0]


def _column(kernel: AbstractBlockKernel, index: Int[Array, ""]) -> Shaped[Array, " n1"]:
    rows, columns = kernel.rows
    grid = Grid((rows.total, 1), (kernel.grid.sizes[0], 1), False, False)
    collectors, one = make_collectors(kernel, None), columns.at(index, 1)
    column = run_tiles(kernel, grid, collectors, rows, one).arrays[0][:, 0]
    is_alone = isinstance(kernel, CalledKernel) and kernel.is_alone
    if not (is_alone and kernel.is_same):
        return column
    # Without `x2`, the function may add noise to the diagonal.
    one = Grid(kernel.totals, (1, 1), True, kernel.grid.is_symmetric)
    both = jnp.stack([index, index])
    entry = Tiles(kernel, one, []).tile(both, is_diagonal=True).arrays[0]
    return lax.dynamic_update_slice(column, entry[:, 0], (index,))


# The number of tiles that are read ahead while one is multiplied.
_AHEAD = 2


# A tile, by its rows and columns.
_Piece = tuple[slice, slice]


class Reader:
    """A matrix that is read a tile at a time.

    Two readers are equal only if they are the same object. A reader can therefore be a
    static part of a PyTree: its entries are never arguments of a compiled program.

    - `array`: has `shape` and `dtype`, and can be indexed with slices.
    - `is_hermitian`: whether the tiles below the diagonal are mirror images of those
        above it. Only tiles on and above the diagonal are then read.
    - `is_checked`: whether tiles on the diagonal are compared with their mirror images.
    """

    def __init__(self, array: Any, is_hermitian: bool, is_checked: bool = False):
        is_half = isinstance(array, SymmetricArray) and array.is_transpose
        self.array = array.stored if is_half else array
        rows, columns = array.shape
        self.shape: tuple[int, int] = rows, columns
        # JAX has no arrays of the other byte order.
        self.dtype = np.dtype(array.dtype).newbyteorder("=")
        self.is_hermitian, self._is_checked = is_hermitian, is_checked
        self._sizes = self._tile_sizes()

    def _tile_sizes(self) -> tuple[int, int]:
        chunks = getattr(self.array, "chunks", None)
        if chunks is None:
            entries = platform().block_bytes // max(self.dtype.itemsize, 1)
            size = max(math.isqrt(entries), 1)
            return size, size
        rows, columns = (max(size, 1) for size in chunks)
        # The mirror image of a square tile is a tile, too.
        return (min(rows, columns),) * 2 if self.is_hermitian else (rows, columns)

    def _pieces(self) -> list[_Piece]:
        cuts = [
            [slice(start, min(start + size, total)) for start in range(0, total, size)]
            for total, size in safe_zip(self.shape, self._sizes)
        ]
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

    def _tiles(self) -> Iterator[tuple[_Piece, np.ndarray]]:
        """The tiles; the next ones are read ahead."""
        pieces = [(piece,) for piece in self._pieces()]
        is_in_memory = isinstance(self.array, np.ndarray)
        tiles = in_threads(self._read, pieces, _AHEAD)
        # In memory, there is nothing to wait for.
        tiles = itertools.starmap(self._read, pieces) if is_in_memory else tiles
        yield from ((*piece, tile) for piece, tile in safe_zip(pieces, tiles))

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
        for (rows, columns), tile in self._tiles():
            tile = tile.astype(dtype, copy=False)
            if is_transposed and self.is_hermitian:
                # The transpose of a Hermitian matrix is its conjugate.
                tile = _conj(tile)
            elif is_transposed:
                rows, columns, tile = columns, rows, tile.T
            total[rows] += tile @ vectors[columns]
            if self.is_hermitian and rows != columns:
                total[columns] += _conj(tile).T @ vectors[rows]
        return total

    def whole(self) -> Shaped[np.ndarray, "n m"]:
        """The whole matrix, in memory."""
        result = np.empty(self.shape, self.dtype)
        for (rows, columns), tile in self._tiles():
            result[rows, columns] = tile
            if self.is_hermitian and rows != columns:
                result[columns, rows] = _conj(tile).T
        return result

    def diagonal(self) -> Shaped[np.ndarray, " n"]:
        """The diagonal, from the tiles that contain it."""
        size, num = self._sizes[0], min(self.shape)
        cuts = [slice(i, min(i + size, num)) for i in range(0, num, size)]
        parts = [np.diagonal(self._read((cut, cut))) for cut in cuts]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def column(self, index: int) -> Shaped[np.ndarray, " n"]:
        """One column; for a Hermitian matrix, from the upper triangle."""
        array = self.array
        if self.is_hermitian:
            array = SymmetricArray([array], 0, self._sizes[0], TileMirror())
        column = self._checked(array[:, index], self.shape[:1])
        return column.astype(self.dtype, copy=False)


def _check_hermitian(tile: Shaped[np.ndarray, "n n"]) -> None:
    """Raises `ValueError` for a block that is not its mirror image within rounding."""
    step = compared_step(len(tile))
    sample, rounding = tile[::step, ::step], 0.0
    if jnp.issubdtype(tile.dtype, jnp.inexact):
        rounding = float(jnp.finfo(tile.dtype).eps)
        sample = sample.astype(np.result_type(_multiplied(tile.dtype), np.float32))
    if not is_close(sample, _conj(sample).T, rounding, np):
        raise ValueError(
            "`symmetric=True` is not true of the stored kernel: a block of examples "
            "with themselves is not its mirror image within rounding. Leave it out."
        )


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


class StoredMatrix(AbstractMatrix):
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

    def product(self, vectors: Any, *, is_transposed: bool = False) -> Any:
        if isinstance(vectors, np.ndarray):
            return self.reader.product(vectors, is_transposed=is_transposed)
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

        def run(vectors: Any) -> np.ndarray:
            vectors = np.asarray(vectors)
            if vectors.dtype != dtype:
                raise TypeError(
                    f"JAX gives vectors of dtype {dtype} as {vectors.dtype} to the "
                    "thread that multiplies them with a stored kernel. Enable 64-bit "
                    "types in all threads: `jax.config.update('jax_enable_x64', True)`."
                )
            *batch, size, k = vectors.shape
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


class MatrixView(AbstractMatrix):
    """The transpose of another matrix, its complex conjugate, or both."""

    original: AbstractMatrix
    is_transposed: bool = eqx.field(static=True)
    is_conjugate: bool = eqx.field(static=True)

    @staticmethod
    def of(matrix: AbstractMatrix, change: str) -> AbstractMatrix:
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

    def _conj(self, x: Any) -> Any:
        return x.conj() if self.is_conjugate else x

    def product(self, vectors: Any, *, is_transposed: bool = False) -> Any:
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
        unit = jnp.zeros((num, 1), self.struct.dtype).at[index, 0].set(1)
        return self.product(unit)[:, 0]


# The settings of `filter_batch_kernel` that an operator takes, too.
_SETTINGS = ("block_size", "pairwise", "in_axes", "mesh", "mesh_axis")


class KernelOperator(AbstractTaggedOperator):
    """A kernel as a `lineax.AbstractLinearOperator`; it need not fit in memory.

    Products with vectors are computed in blocks. Each product computes the blocks anew,
    or reads them from a store: while one block is multiplied, the next ones are read.
    By symmetry, only half of the blocks of a symmetric kernel are computed or read.

    It works with iterative solvers such as `lineax.CG` and `lineax.GMRES`, with
    matfree's estimates of traces and log-determinants, and with
    [`eqxbatch.kernel_solve`][].

    - `mv(vector)`: the product with a vector of shape `(n2,)`, or with `k` vectors in
        an array of shape `(n2, k)`.
    - `transpose()`: the transpose, as another such operator.
    - `diagonal()`: the diagonal, computed from the blocks that contain it.
    - `column(index)`: one column, of shape `(n1,)`.
    - `as_matrix()`: the whole kernel, of shape `(n1, n2)`.

    **Arguments:**

    - `kernel`: a kernel function, as for [`eqxbatch.filter_batch_kernel`][], or an
        estimator such as [`eqxbatch.EmpiricalNTK`][], that returns one array of shape
        `(n1, n2)`. Or, without `x1`, a stored kernel: a NumPy array, a zarr array or an
        [`eqxbatch.results.SymmetricArray`][].
    - `x1`, `x2`: the examples of rows and columns. Without `x2`, both are `x1`. NumPy
        arrays are copied. With a `store`, they can be on disk, as for
        [`eqxbatch.filter_batch_kernel`][].
    - `block_size`, `pairwise`, `in_axes`, `mesh`, `mesh_axis`: as for
        [`eqxbatch.filter_batch_kernel`][]. A stored kernel does not take them.
    - `symmetric`: a bool or None, as for [`eqxbatch.filter_batch_kernel`][]. With
        `True`, only half of a stored kernel is read.
    - `store`: `"host"`, a path or a store, as for [`eqxbatch.filter_batch_kernel`][].
        The kernel is computed once, right away, and read for each product.
    - `progress`: True or an [`eqxbatch.AbstractProgressMeter`][], for computing the
        kernel into the `store`.
    - `tags`: lineax tags that state properties of the kernel, such as
        `lineax.positive_semidefinite_tag`, which `lineax.CG` requires. A symmetric
        kernel need not be tagged as such.
    - `**kwargs`: further arguments of the kernel function, including `key`.

    Operators without a store work inside `jax.jit`, `jax.vmap` and `jax.grad`, also
    for derivatives with respect to the arrays of `kernel`. With a stored kernel, the
    host computes products, which are differentiable with respect to the vectors.

    Raises `ValueError` for a kernel without exactly two axes, for vectors with another
    number of rows, for an index out of range, for settings that a stored kernel does
    not take, for `progress` or examples on disk without a `store`, and for triangular
    `tags`. Raises `TypeError` for arguments of the wrong type, and `ImportError`
    without lineax, which the extra `linalg` installs.

    !!! example

        Kernel ridge regression:

        ```python
        >>> import eqxbatch, jax.numpy as jnp, lineax
        >>> rbf = lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))
        >>> x = jnp.linspace(0.0, 3.0, 7)[:, None]
        >>> kernel = eqxbatch.KernelOperator(
        ...     rbf, x, block_size=4, pairwise=True, symmetric=True
        ... )
        >>> ridge = 0.1 * lineax.IdentityLinearOperator(kernel.in_structure())
        >>> ridged = lineax.TaggedLinearOperator(
        ...     kernel + ridge, lineax.positive_semidefinite_tag
        ... )
        >>> solver = lineax.CG(rtol=1e-5, atol=1e-5)
        >>> solution = lineax.linear_solve(ridged, jnp.sin(x[:, 0]), solver)
        >>> solution.value.shape
        (7,)

        ```
    """

    tags: frozenset = eqx.field(static=True)
    matrix: AbstractMatrix

    @checked
    def __init__(
        self,
        kernel: Any,
        x1: PyTree = None,
        x2: PyTree = None,
        *,
        symmetric: bool | None = None,
        store: Store = "device",
        progress: Progress = None,
        tags: Any = (),
        **kwargs: Any,
    ):
        store, meter = as_store(store), as_meter(progress)
        is_stored = isinstance(store, AbstractStore)
        if meter is not None and not is_stored:
            raise ValueError(
                "`progress` is for computing a kernel into a `store`, and there is "
                "none. Leave it out, or pass `store='host'`."
            )
        settings = {name: kwargs.pop(name) for name in _SETTINGS if name in kwargs}
        if x1 is None:
            others = {**settings, "x2": x2, "store": is_stored, **kwargs}
            self.matrix = _read(kernel, symmetric, others)
        else:
            settings = {"block_size": None, **settings}
            transform = BatchKernel(kernel, symmetric=symmetric, **settings)
            computed = ComputedMatrix(transform, x1, x2, kwargs)
            reads = any(side.stored for side in computed.call.sides)
            if reads and not is_stored:
                raise ValueError(
                    "Examples that are not in memory are read once, to compute the "
                    "kernel into a `store`. Pass `store='host'`, or a path."
                )
            self.matrix = computed
            if is_stored:
                reader = Reader(computed.stored(store, meter), computed.is_hermitian)
                self.matrix = StoredMatrix(reader, None if reads else computed)
        self.tags = as_tags(tags)
        triangular = {lineax.lower_triangular_tag, lineax.upper_triangular_tag}
        if self.tags & triangular:
            raise ValueError("`tags` must not be triangular: a kernel is not.")
        if self.matrix.is_hermitian and not is_complex(self.matrix.struct):
            self.tags |= {lineax.symmetric_tag}

    @checked
    def mv(
        self, vector: Shaped[AnyArray, " n2"] | Shaped[AnyArray, "n2 k"]
    ) -> Shaped[Array, "n1 ..."]:
        vectors: Array = jnp.asarray(vector)
        num = self.matrix.struct.shape[1]
        if vectors.shape[0] != num:
            raise ValueError(
                f"`vector` must have {num} rows, as the kernel has {num} columns; got "
                f"shape {vectors.shape}."
            )
        if vectors.ndim == 1:
            return self.matrix.product(vectors[:, None])[:, 0]
        return self.matrix.product(vectors)

    @checked
    def as_matrix(self) -> Shaped[Array, "n1 n2"]:
        return self.matrix.whole()

    @checked
    def diagonal(self) -> Shaped[Array, " n"]:
        return self.matrix.diagonal()

    @checked
    def column(self, index: int | Int[Array, ""]) -> Shaped[Array, " n1"]:
        num = self.matrix.struct.shape[1]
        if not isinstance(index, Tracer) and not 0 <= index < num:
            raise ValueError(
                f"`index` must be the index of one of the {num} columns; got {index}."
            )
        column = eqx.error_if(
            jnp.asarray(index, jnp.int32),
            (jnp.asarray(index) < 0) | (jnp.asarray(index) >= num),
            f"`index` must be the index of one of the {num} columns.",
        )
        return self.matrix.column(column)

    def transpose(self) -> "KernelOperator":
        if lineax.is_symmetric(self):
            return self
        transposed = MatrixView.of(self.matrix, "is_transposed")
        return eqx.tree_at(lambda x: x.matrix, self, transposed)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        struct = self.matrix.struct
        return jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        struct = self.matrix.struct
        return jax.ShapeDtypeStruct(struct.shape[:1], struct.dtype)


def _read(array: Any, symmetric: bool | None, others: dict[str, Any]) -> StoredMatrix:
    """The matrix of a kernel that is stored already."""
    check_stored(array)
    names = [name for name, x in others.items() if x is not None and x is not False]
    if names:
        raise ValueError(
            "A kernel that is stored takes no other settings than `symmetric` and "
            f"`tags`; got `{'`, `'.join(names)}`. Pass `x1` with a kernel function."
        )
    is_mirrored = isinstance(array, SymmetricArray)
    is_hermitian = is_mirrored if symmetric is None else symmetric
    if is_hermitian and array.shape[0] != array.shape[1]:
        raise ValueError(
            f"A kernel with `symmetric=True` must be square; got shape {array.shape}."
        )
    if is_mirrored and not is_hermitian:
        raise ValueError(
            "`symmetric=False` contradicts a `SymmetricArray`. Leave it out."
        )
    array = np.asarray(array) if isinstance(array, jax.Array) else array
    return StoredMatrix(Reader(array, is_hermitian, is_hermitian and not is_mirrored))


@lineax.materialise.register(KernelOperator)
def _materialise(operator: KernelOperator) -> lineax.AbstractLinearOperator:
    return lineax.MatrixLinearOperator(operator.as_matrix(), operator.tags)


@lineax.conj.register(KernelOperator)
def _conjugate(operator: KernelOperator) -> lineax.AbstractLinearOperator:
    if not is_complex(operator.matrix.struct):
        return operator
    conjugated = MatrixView.of(operator.matrix, "is_conjugate")
    return eqx.tree_at(lambda x: x.matrix, operator, conjugated)
