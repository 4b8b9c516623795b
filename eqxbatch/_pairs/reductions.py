"""Reductions of a kernel that is never stored as a whole."""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, Generic, TYPE_CHECKING, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from .._base.dtypes import power_of_two, widened
from .._base.shapes import Arranged, as_jax, check_fields, checked, Contract
from .._batch.cut import Block
from .._batch.long_sums import complete, nothing_lost, plus


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


def sum_dtype(struct: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(widened, jax.ShapeDtypeStruct((), struct.dtype)).dtype


def most_blocks(kernel: jax.ShapeDtypeStruct) -> int:
    """The number of blocks of a kernel, at most."""
    return math.prod(kernel.shape[:2])


class _Sums(eqx.Module):
    """Sums over the columns in a wide dtype, and the dtype of the result.

    `lost` is what rounding took from them, if there may be many blocks.
    """

    checked_as: ClassVar[dict[str, Any]] = {"values": Shaped[Array, "n1 ..."]}
    values: Array
    lost: Array | None
    dtype: Any = eqx.field(static=True)

    @staticmethod
    def begun(values: Array, kernel: jax.ShapeDtypeStruct, dtype: Any) -> "_Sums":
        return _Sums(values, nothing_lost(values, kernel.shape[1]), dtype)

    def plus(self, part: Array, rows: Block) -> "_Sums":
        """The sums with a part for the rows of a block."""
        whole = self.values, self.lost
        old, lost = jtu.tree_map(rows.take, whole)
        put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, rows.start, 0)
        values, lost = jtu.tree_map(put, whole, plus(old, lost, part))
        return _Sums(values, lost, self.dtype)

    def merged(self, other: "_Sums") -> "_Sums":
        part = complete(other.values, other.lost)
        return _Sums(*plus(self.values, self.lost, part), self.dtype)

    def result(self) -> Array:
        return complete(self.values, self.lost).astype(self.dtype)


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
        return _Sums.begun(jnp.zeros(sums.shape, sums.dtype), kernel, dtype)

    @checked
    def update(
        self, state: _Sums, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Sums:
        del columns
        return state.plus(_row_sums(tile), rows)

    @checked
    def merge(self, first: _Sums, second: _Sums) -> _Sums:
        return first.merged(second)

    @checked
    def finalize(self, state: _Sums) -> Shaped[Array, "n1 *out"]:
        return state.result()


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
        wide = sum_dtype(jax.ShapeDtypeStruct((), dtype))
        return _Sums.begun(jnp.zeros(shape, wide), kernel, dtype)

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
        return state.plus(part, rows)

    @checked
    def merge(self, first: _Sums, second: _Sums) -> _Sums:
        return first.merged(second)

    @checked
    def finalize(self, state: _Sums) -> Shaped[Array, "n1 ..."]:
        return state.result()


class Norm(eqx.Module):
    """A norm whose squares neither overflow nor vanish.

    - `largest`: the largest absolute value of an entry.
    - `squares`: the sum of the squares of entries that are divided by `scale`.
    - `lost`: what rounding took from it, if there may be many tiles.
    """

    checked_as: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("largest", "squares"), Inexact[Array, ""]
    )
    largest: Array
    squares: Array
    lost: Array | None

    @staticmethod
    def begun(kernel: jax.ShapeDtypeStruct) -> "Norm":
        zero = jnp.zeros((), jnp.finfo(sum_dtype(kernel)).dtype)
        return Norm(zero, zero, nothing_lost(zero, most_blocks(kernel)))

    @property
    def scale(self) -> Inexact[Array, ""]:
        """The power of two at `largest`, by which all entries can be divided."""
        return power_of_two(self.largest)

    def shrinkage(self, other: "Norm") -> Inexact[Array, ""]:
        """The factor of sums of this norm that are added to those of a larger one."""
        # Infinite entries have the scale 1, and nothing has to grow beside them.
        return jnp.minimum(self.scale / other.scale, 1)

    def including(self, tile: Array) -> "Norm":
        """The norm with the entries of one more tile."""
        top = jnp.max(jnp.abs(lax.stop_gradient(tile)), initial=0)
        new = dataclasses.replace(self, largest=jnp.maximum(self.largest, top))
        is_real = jnp.issubdtype(tile.dtype, jnp.floating)
        parts = [tile] if is_real else [jnp.real(tile), jnp.imag(tile)]
        squares = [jnp.sum((part / new.scale) ** 2) for part in parts]
        return self._plus(functools.reduce(jnp.add, squares), new)

    def merged(self, other: "Norm") -> "Norm":
        largest = jnp.maximum(self.largest, other.largest)
        new = dataclasses.replace(self, largest=largest)
        return self._plus(other.total * other.shrinkage(new) ** 2, new)

    @property
    def total(self) -> Inexact[Array, ""]:
        """The sum of the squares, with what rounding took from it."""
        return complete(self.squares, self.lost)

    def _plus(self, squares: Array, new: "Norm") -> "Norm":
        shrinkage = self.shrinkage(new) ** 2
        shrink = lambda x: x * shrinkage
        old, lost = jtu.tree_map(shrink, (self.squares, self.lost))
        return Norm(new.largest, *plus(old, lost, squares))


class FrobeniusNorm(AbstractReduction[Norm]):
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
    def init(self, kernel: KernelStruct) -> Norm:
        if not jnp.issubdtype(kernel.dtype, jnp.inexact):
            raise TypeError(
                "FrobeniusNorm needs a kernel of an inexact dtype; got "
                f"{kernel.dtype}. Cast what `kernel_fn` returns."
            )
        return Norm.begun(kernel)

    @checked
    def update(
        self, state: Norm, tile: MatrixTile, rows: Block, columns: Block
    ) -> Norm:
        del rows, columns
        return state.including(widened(tile))

    @checked
    def merge(self, first: Norm, second: Norm) -> Norm:
        return first.merged(second)

    @checked
    def finalize(self, state: Norm) -> Inexact[Array, ""]:
        return jnp.sqrt(state.total) * state.scale
