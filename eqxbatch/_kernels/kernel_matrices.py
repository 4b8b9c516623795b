"""The matrices of kernel operators, and those that are computed in blocks."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree, Shaped

from .._base.compile import compiled
from .._base.mesh import gathered, within_mesh
from .._base.types import AnyArray, as_jax
from .._batch.blocks import Block
from .._batch.progress import AbstractProgressMeter
from .._batch.rows import Rows
from .._batch.store import AbstractStore
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
from .kernel import AbstractBlockKernel
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

    @abc.abstractmethod
    def columns(self) -> Callable[[Int[Array, ""]], Shaped[Array, " n1"]]:
        """A function like `column`, for many columns one after another."""


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
    - `has_factors`: whether an entry follows from factors of two examples, which take
        much longer than the entry.
    - `keeps_factors`: whether there is memory for those of all rows.
    """

    call: FunctionCall
    mesh_axis: MeshAxis | None
    sizes: Sizes = eqx.field(static=True)
    has_factors: bool = eqx.field(static=True)
    keeps_factors: bool = eqx.field(static=True)

    def __init__(
        self, transform: BatchKernel, x1: PyTree, x2: PyTree, kwargs: dict[str, PyTree]
    ):
        self.mesh_axis = transform.row_axis
        # Copies, as the caller may change NumPy arrays later.
        self.call = jtu.tree_map(as_jax, transform.called(x1, x2, **kwargs))
        # Sizes are chosen once: diagonals and columns are computed in the same blocks.
        kernel = on_one_device(self.call)
        assert isinstance(kernel.sizes, tuple)
        self.sizes, self.has_factors = kernel.sizes, any(kernel.bytes_kept)
        most = kernel.num_kept(kernel.bytes_kept[0])
        self.keeps_factors = self.has_factors and most >= kernel.totals[0]
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

    def columns(self) -> Callable[[Int[Array, ""]], Shaped[Array, " n1"]]:
        if not self.keeps_factors:
            return self.column
        call = self._on_one_device
        # One backward pass of all examples in place of one for each column.
        panel = _compiled_entries(_factors_of_rows, call)
        return lambda index: _compiled_entries(_column_in_blocks, call, index, panel)

    @property
    def _on_one_device(self) -> FunctionCall:
        return gathered(dataclasses.replace(self.call, sizes=self.sizes))


@compiled
def _compiled_entries(run: Callable[..., Any], call: FunctionCall, *args: Any) -> Any:
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


def _factors_of_rows(kernel: AbstractBlockKernel) -> Rows:
    kernel.prepare()
    return kernel.keep(0, kernel.rows[0], kernel.grid.sizes[0])


def _column_in_blocks(
    kernel: AbstractBlockKernel, index: Int[Array, ""], panel: Rows | None = None
) -> Shaped[Array, " n1"]:
    """A column; `panel` has the factors of all rows, if available already."""
    rows, columns = kernel.rows
    grid = Grid((rows.total, 1), (kernel.grid.sizes[0], 1), False, False)
    collectors, example = make_collectors(kernel, None), columns.slice(index, 1)
    states = run_tiles(kernel, grid, collectors, rows, example, panel)
    column = states.arrays[0][:, 0]
    is_alone = isinstance(kernel, CalledKernel) and kernel.call.is_alone
    if not (is_alone and kernel.is_same):
        return column
    # Without `x2`, the function may add noise to the diagonal.
    entries = Grid(kernel.totals, (1, 1), True, kernel.grid.is_symmetric)
    both = jnp.stack([index, index])
    entry = Tiles(kernel, entries, []).tile(both, is_diagonal=True).arrays[0]
    return lax.dynamic_update_slice(column, entry[:, 0], (index,))


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

    def columns(self) -> Callable[[Int[Array, ""]], Shaped[Array, " n1"]]:
        return self.column
