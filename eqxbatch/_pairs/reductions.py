"""Reductions of a kernel that is never stored as a whole."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, Generic, TYPE_CHECKING, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from .._base.dtypes import common_dtype, power_of_two, widened
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


class _Norm(eqx.Module):
    """A norm whose squares neither overflow nor vanish.

    - `largest`: the largest absolute value of an entry.
    - `squares`: the sum of the squares of entries that are divided by `scale`.
    """

    checked_as: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("largest", "squares"), Inexact[Array, ""]
    )
    largest: Array
    squares: Array

    @property
    def scale(self) -> Inexact[Array, ""]:
        """The power of two at `largest`, by which all entries can be divided."""
        return power_of_two(self.largest)

    def shrinkage(self, other: "_Norm") -> Inexact[Array, ""]:
        """The factor of sums of this norm that are added to those of a larger one."""
        # Infinite entries have the scale 1, and nothing has to grow beside them.
        return jnp.minimum(self.scale / other.scale, 1)

    def including(self, tile: Array) -> "_Norm":
        """The norm with the entries of one more tile."""
        top = jnp.max(jnp.abs(lax.stop_gradient(tile)), initial=0)
        new = _Norm(jnp.maximum(self.largest, top), self.squares)
        is_real = jnp.issubdtype(tile.dtype, jnp.floating)
        parts = [tile] if is_real else [jnp.real(tile), jnp.imag(tile)]
        squares = sum(jnp.sum((part / new.scale) ** 2) for part in parts)
        return _Norm(new.largest, self.squares * self.shrinkage(new) ** 2 + squares)

    def merged(self, other: "_Norm") -> "_Norm":
        new = _Norm(jnp.maximum(self.largest, other.largest), self.squares)
        squares = [x.squares * x.shrinkage(new) ** 2 for x in (self, other)]
        return _Norm(new.largest, squares[0] + squares[1])


class FrobeniusNorm(AbstractReduction[_Norm]):
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
    def init(self, kernel: KernelStruct) -> _Norm:
        if not jnp.issubdtype(kernel.dtype, jnp.inexact):
            raise TypeError(
                "FrobeniusNorm needs a kernel of an inexact dtype; got "
                f"{kernel.dtype}. Cast what `kernel_fn` returns."
            )
        zero = jnp.zeros((), jnp.finfo(_sum_dtype(kernel)).dtype)
        return _Norm(zero, zero)

    @checked
    def update(
        self, state: _Norm, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Norm:
        del rows, columns
        return state.including(widened(tile))

    @checked
    def merge(self, first: _Norm, second: _Norm) -> _Norm:
        return first.merged(second)

    @checked
    def finalize(self, state: _Norm) -> Inexact[Array, ""]:
        return jnp.sqrt(state.squares) * state.scale


class _Alignment(eqx.Module):
    """Sums in a wide dtype, and the dtype of the result.

    - `inner`: the inner product with the kernel of the labels, divided by the scales of
        both kernels.
    - `norm`: the norm of the kernel.
    - `labels`: the norm of the kernel of the labels, divided by its scale.
    - `scales`: the largest label of the rows and that of the columns, as powers of two.
    """

    checked_as: ClassVar[dict[str, Any]] = {
        "inner": Inexact[Array, ""],
        "labels": Inexact[Array, ""],
        "scales": Inexact[Array, "2"],
    }
    inner: Array
    norm: _Norm
    labels: Array
    scales: Array
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
    axes. Raises `TypeError` for complex labels, and unless the kernel has a real
    floating-point dtype.

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
        for name, y in zip(("labels", "other_labels"), self._sides, strict=True):
            if jnp.issubdtype(y.dtype, jnp.complexfloating):
                raise TypeError(
                    f"`{name}` must be real numbers; got dtype {y.dtype}. Give their "
                    "real and imaginary parts as columns."
                )

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
        wide = [y.astype(common_dtype(y.dtype, zero.dtype)) for y in sides]
        tops = [jnp.max(jnp.abs(lax.stop_gradient(y)), initial=0) for y in wide]
        scales = [power_of_two(top).astype(zero.dtype) for top in tops]
        # The norm of y1 y2^T, from matrices that are only as large as a label.
        flat = [_columns(y, scale) for y, scale in zip(wide, scales, strict=True)]
        gram = [y.T @ y for y in flat]
        labels = jnp.sqrt(jnp.sum(gram[0] * gram[1]))
        norm = _Norm(zero, zero)
        return _Alignment(zero, norm, labels, jnp.stack(scales), kernel.dtype)

    @checked
    def update(
        self, state: _Alignment, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Alignment:
        wide = widened(tile)
        norm = state.norm.including(wide)
        # Half of the scale for each side, so that no label underflows. A tile need not
        # be copied to be divided.
        root = power_of_two(jnp.sqrt(norm.scale))
        first, second = (
            _columns(block.take(y), scale)
            for y, block, scale in zip(
                self._sides, (rows, columns), state.scales, strict=True
            )
        )
        inner = jnp.sum((wide @ (second / root)) * (first / (norm.scale / root)))
        inner += state.inner * state.norm.shrinkage(norm)
        return dataclasses.replace(state, inner=inner, norm=norm)

    @checked
    def merge(self, first: _Alignment, second: _Alignment) -> _Alignment:
        norm = first.norm.merged(second.norm)
        inner = [x.inner * x.norm.shrinkage(norm) for x in (first, second)]
        return dataclasses.replace(first, inner=inner[0] + inner[1], norm=norm)

    @checked
    def finalize(self, state: _Alignment) -> Inexact[Array, ""]:
        norms = jnp.sqrt(state.norm.squares) * state.labels
        return (state.inner / norms).astype(state.dtype)


def _columns(labels: Array, scale: Inexact[Array, ""]) -> Inexact[Array, "n k"]:
    """Labels as columns, divided by `scale`, in its dtype."""
    flat = labels.reshape(labels.shape[0], -1 if labels.size else 1)
    dtype = common_dtype(labels.dtype, scale.dtype)
    divided = (flat.astype(dtype) / scale.astype(dtype)).astype(scale.dtype)
    # Without it, XLA divides by the product with the next divisor, which overflows.
    return lax.optimization_barrier(divided)
