"""Reductions of a kernel that is never stored as a whole."""

import abc
import math
from typing import Any, ClassVar, Generic, TYPE_CHECKING, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from .._base.dtypes import widened
from .._base.shapes import Arranged, as_jax, check_fields, checked, Contract
from .._batch.cut import Block


_State = TypeVar("_State")


MatrixTile = Shaped[Array, "rows columns ..."]


if TYPE_CHECKING:
    KernelStruct = jax.ShapeDtypeStruct
else:
    KernelStruct = Shaped[Arranged, "n1 n2 *out"]


class AbstractReduction(eqx.Module, Generic[_State]):
    """Reduces a kernel block by block; subclass it to write your own.

    A reduction is used like this:

    ```python
    state = reduction.init(shape_of_the_kernel)
    for rows, columns, tile in ...:
        state = reduction.update(state, tile, rows, columns)
    result = reduction.finalize(state)
    ```

    Each entry of the kernel counts once. If the last block overlaps with the previous
    one, entries that were already seen are set to `neutral`.

    !!! example

        The largest entry of each column:

        ```python
        >>> import eqxbatch, jax, jax.numpy as jnp
        >>> class ColumnMax(eqxbatch.AbstractReduction):
        ...     @property
        ...     def neutral(self):
        ...         return -jnp.inf
        ...     def init(self, kernel):
        ...         return jnp.full(kernel.shape[1], -jnp.inf, kernel.dtype)
        ...     def update(self, state, tile, rows, columns):
        ...         old = columns.take(state)
        ...         new = jnp.maximum(old, tile.max(axis=0))
        ...         return jax.lax.dynamic_update_slice(state, new, (columns.start,))
        ...     def merge(self, first, second):
        ...         return jnp.maximum(first, second)
        ...     def finalize(self, state):
        ...         return state
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, reduce=ColumnMax()
        ... )
        >>> x = jnp.arange(5.0)[:, None]
        >>> print(kernel(x, x))
        [ 0.  4.  8. 12. 16.]

        ```
    """

    @property
    @abc.abstractmethod
    def neutral(self) -> float:
        """The value of an entry that does not change the result."""

    @abc.abstractmethod
    def init(self, kernel: jax.ShapeDtypeStruct) -> _State:
        """Returns the state before the first block, from the kernel's shape and dtype.

        The first two axes of `kernel` are the rows and columns. Raise `ValueError` or
        `TypeError` for a kernel that cannot be reduced.
        """

    @abc.abstractmethod
    def update(
        self, state: _State, tile: MatrixTile, rows: Block, columns: Block
    ) -> _State:
        """Returns the state after one more block.

        **Arguments:**

        - `state`: what `init` or the previous `update` returned. Its structure, shapes
            and dtypes must not change.
        - `tile`: the block, of shape `(rows.size, columns.size, ...)`.
        - `rows`, `columns`: the indices of its rows and columns.
        """

    @abc.abstractmethod
    def merge(self, first: _State, second: _State) -> _State:
        """Merges the states of two sets of blocks, as computed by different devices."""

    @abc.abstractmethod
    def finalize(self, state: _State) -> Any:
        """Returns the result, from the state after the last block."""


def _added(state: Array, part: Array, block: Block) -> Array:
    """Adds a part to the rows of a block in the state."""
    new = block.take(state) + part
    return lax.dynamic_update_slice_in_dim(state, new, block.start, 0)


def _sum_dtype(struct: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(widened, jax.ShapeDtypeStruct((), struct.dtype)).dtype


class _Sums(eqx.Module):
    """Sums in a wide dtype, and the dtype of the result."""

    checked_as: ClassVar[dict[str, Any]] = {"values": Shaped[Array, "n1 ..."]}
    values: Array
    dtype: Any = eqx.field(static=True)


class RowSums(AbstractReduction[_Sums]):
    """The sum of each row of the kernel, of shape `(n1, ...)`.

    The dtype is that of `jax.numpy.sum`: the dtype of the kernel, or a longer integer.
    Half precision is accumulated in float32.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, reduce=eqxbatch.RowSums()
        ... )
        >>> print(kernel(jnp.ones((3, 4)), jnp.ones((5, 4))))
        [20. 20. 20.]

        ```
    """

    @property
    def neutral(self) -> float:
        return 0.0

    @checked
    def init(self, kernel: KernelStruct) -> _Sums:
        sums = jax.eval_shape(_row_sums, kernel)
        is_inexact = jnp.issubdtype(kernel.dtype, jnp.inexact)
        dtype = kernel.dtype if is_inexact else sums.dtype
        return _Sums(jnp.zeros(sums.shape, sums.dtype), dtype)

    @checked
    def update(
        self, state: _Sums, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Sums:
        del columns
        return _Sums(_added(state.values, _row_sums(tile), rows), state.dtype)

    @checked
    def merge(self, first: _Sums, second: _Sums) -> _Sums:
        return _Sums(first.values + second.values, first.dtype)

    @checked
    def finalize(self, state: _Sums) -> Shaped[Array, "n1 *out"]:
        return state.values.astype(state.dtype)


def _row_sums(tile: MatrixTile) -> Shaped[Array, "rows ..."]:
    return jnp.sum(widened(tile), axis=1)


_PRODUCT = Contract(
    {"kernel": KernelStruct, "vectors": Shaped[Array, "n2 *k"]},
    {"vectors": "They must have as many rows as the kernel has columns."},
)


class KernelProduct(AbstractReduction[_Sums]):
    """The product of the kernel with `vectors`, of shape `(n1, ...)` or `(n1, ..., k)`.

    Half precision is accumulated in float32. The result has the dtype to which kernel
    and vectors promote.

    **Arguments:**

    - `vectors`: an array of shape `(n2,)` or `(n2, k)`.

    Raises `ValueError` if `vectors` has another shape or another number of rows.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> reduce = eqxbatch.KernelProduct(jnp.arange(5.0))
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, reduce=reduce
        ... )
        >>> print(kernel(jnp.ones((3, 4)), jnp.ones((5, 4))))
        [40. 40. 40.]

        ```
    """

    vectors: Shaped[Array, " n2"] | Shaped[Array, "n2 k"] = eqx.field(converter=as_jax)

    def __check_init__(self) -> None:
        check_fields(self)

    @property
    def neutral(self) -> float:
        return 0.0

    @checked
    def init(self, kernel: KernelStruct) -> _Sums:
        vectors = self.vectors
        call = _PRODUCT.begin()
        call.check("kernel", kernel, always=True)
        call.check("vectors", vectors, always=True)
        dtype = jnp.result_type(kernel.dtype, vectors.dtype)
        shape = (kernel.shape[0], *kernel.shape[2:], *vectors.shape[1:])
        wide = _sum_dtype(jax.ShapeDtypeStruct((), dtype))
        return _Sums(jnp.zeros(shape, wide), dtype)

    @checked
    def update(
        self, state: _Sums, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Sums:
        vectors = columns.take(self.vectors).astype(state.dtype)
        part = jnp.tensordot(
            tile.astype(state.dtype),
            vectors,
            ((1,), (0,)),
            preferred_element_type=state.values.dtype,
        )
        return _Sums(_added(state.values, part, rows), state.dtype)

    @checked
    def merge(self, first: _Sums, second: _Sums) -> _Sums:
        return _Sums(first.values + second.values, first.dtype)

    @checked
    def finalize(self, state: _Sums) -> Shaped[Array, "n1 ..."]:
        return state.values.astype(state.dtype)


class FrobeniusNorm(AbstractReduction[Array]):
    """The Frobenius norm of the kernel, a real scalar.

    For kernels in half precision, it is computed and returned in float32. Raises
    `TypeError` for a kernel of integers.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T, block_size=2, reduce=eqxbatch.FrobeniusNorm()
        ... )
        >>> print(kernel(jnp.ones((2, 4)), jnp.ones((8, 4))))
        16.0

        ```
    """

    @property
    def neutral(self) -> float:
        return 0.0

    @checked
    def init(self, kernel: KernelStruct) -> Array:
        if not jnp.issubdtype(kernel.dtype, jnp.inexact):
            raise TypeError(
                "FrobeniusNorm needs a kernel of an inexact dtype; got "
                f"{kernel.dtype}. Cast what `kernel_fn` returns."
            )
        return jnp.zeros((), jnp.finfo(_sum_dtype(kernel)).dtype)

    @checked
    def update(
        self, state: Array, tile: MatrixTile, rows: Block, columns: Block
    ) -> Array:
        del rows, columns
        return state + _squares(tile)

    @checked
    def merge(self, first: Array, second: Array) -> Array:
        return first + second

    @checked
    def finalize(self, state: Array) -> Inexact[Array, ""]:
        return jnp.sqrt(state)


def _squares(tile: MatrixTile) -> Inexact[Array, ""]:
    wide = widened(tile)
    return jnp.sum(jnp.real(wide * jnp.conj(wide)))


class _Alignment(eqx.Module):
    checked_as: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("inner", "squares", "labels"), Inexact[Array, ""]
    )
    inner: Array
    squares: Array
    labels: Array
    dtype: Any = eqx.field(static=True)


class KernelAlignment(AbstractReduction[_Alignment]):
    """The alignment of the kernel `K` with the kernel `T` of the labels: at most 1.

    The alignment is the cosine similarity of the two kernels,
    `sum(K * T) / (norm(K) * norm(T))`, where `T` is `labels @ other_labels.T`. It is 1
    if one kernel is a positive multiple of the other.

    **Arguments:**

    - `labels`: the labels of the rows, of shape `(n1,)` or `(n1, k)`.
    - `other_labels`: the labels of the columns, of shape `(n2,)` or `(n2, k)`. The
        default is `labels`.

    Raises `ValueError` for labels of other shapes and for a kernel with more than two
    axes. Raises `TypeError` unless the kernel has a real floating-point dtype.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> labels = jnp.array([1.0, 1.0, -1.0, -1.0])
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: x @ y.T,
        ...     block_size=2,
        ...     reduce=eqxbatch.KernelAlignment(labels),
        ... )
        >>> x = jnp.array([2.0, 2.0, -2.0, -2.0])[:, None]
        >>> print(kernel(x, x))
        1.0

        ```

    ??? cite

        [Cristianini et al., 2001](https://papers.nips.cc/paper/1946-on-kernel-target-alignment).
    """

    labels: Shaped[Array, "n1 *k"] = eqx.field(converter=as_jax)
    other_labels: Shaped[Array, "n2 *l"] | None = eqx.field(
        converter=as_jax, default=None
    )

    def __check_init__(self) -> None:
        check_fields(self)

    @property
    def neutral(self) -> float:
        return 0.0

    @property
    def _sides(self) -> list[Array]:
        other = self.labels if self.other_labels is None else self.other_labels
        return [self.labels, other]

    @checked
    def init(self, kernel: KernelStruct) -> _Alignment:
        sides = self._sides
        if len(kernel.shape) != 2 or [y.shape[:1] for y in sides] != [
            kernel.shape[:1],
            kernel.shape[1:],
        ]:
            raise ValueError(
                "KernelAlignment needs a kernel of shape `(n1, n2)` and labels for "
                f"its rows and columns; got {kernel.shape} and labels of shapes "
                f"{sides[0].shape} and {sides[1].shape}."
            )
        sizes = [math.prod(y.shape[1:]) for y in sides]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "KernelAlignment needs labels with as many columns for the columns of "
                f"the kernel as for its rows; got shapes {sides[0].shape} and "
                f"{sides[1].shape}."
            )
        if not jnp.issubdtype(kernel.dtype, jnp.floating):
            raise TypeError(
                "KernelAlignment needs a kernel of real numbers; got dtype "
                f"{kernel.dtype}. Cast what `kernel_fn` returns."
            )
        zero = jnp.zeros((), _sum_dtype(kernel))
        # The norm of y1 y2^T, from matrices that are only as large as a label.
        flat = [_columns(y, zero.dtype) for y in sides]
        gram = [y.T @ y for y in flat]
        return _Alignment(zero, zero, jnp.sum(gram[0] * gram[1]), kernel.dtype)

    @checked
    def update(
        self, state: _Alignment, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Alignment:
        wide = widened(tile)
        first, second = (
            _columns(block.take(y), wide.dtype)
            for y, block in zip(self._sides, (rows, columns), strict=True)
        )
        inner = jnp.sum((wide @ second) * first)
        return _Alignment(
            state.inner + inner,
            state.squares + _squares(tile),
            state.labels,
            state.dtype,
        )

    @checked
    def merge(self, first: _Alignment, second: _Alignment) -> _Alignment:
        return _Alignment(
            first.inner + second.inner,
            first.squares + second.squares,
            first.labels,
            first.dtype,
        )

    @checked
    def finalize(self, state: _Alignment) -> Inexact[Array, ""]:
        norms = jnp.sqrt(state.squares) * jnp.sqrt(state.labels)
        return (state.inner / norms).astype(state.dtype)


def _columns(labels: Array, dtype: Any) -> Inexact[Array, "n k"]:
    return labels.reshape(labels.shape[0], -1 if labels.size else 1).astype(dtype)
