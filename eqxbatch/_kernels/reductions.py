"""Reductions of a kernel that is never stored as a whole."""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Int, Shaped

from .._base.checks import check_at_least, check_equal
from .._base.dtypes import power_of_two, widened
from .._base.platforms import exact_products
from .._base.types import as_jax, check_fields
from .._batch.blocks import Block
from .._batch.sums import Total


_State = TypeVar("_State")


MatrixTile = Shaped[Array, "rows columns ..."]


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

    Reverse mode recomputes blocks and updates, unless that takes more memory: for an
    update whose derivative depends on the state, all states are stored. Set the class
    attribute `is_sum` to True if updates only add to the state.

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

    # Whether updates only add to the state, so that their derivative needs no state.
    is_sum: ClassVar[bool] = False

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


def _with_rows(whole: _State, part: _State, rows: Block) -> _State:
    """Arrays with other rows in place of those of a block."""
    put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, rows.start, 0)
    return jtu.tree_map(put, whole, part)


def _begun(zeros: Array, num: int, dtype: Any) -> Total:
    """A sum of at most `num` parts, and the dtype of the result."""
    return Total(zeros, None, dtype).before(num)


class KernelProduct(AbstractReduction[Total]):
    """The product of the kernel with `vectors`, of shape `(n1, ...)` or `(n1, ..., k)`.

    Half precision is accumulated in float32. The result has the dtype to which kernel
    and vectors promote. On GPUs and TPUs, products of float32 keep all digits unless
    `jax.default_matmul_precision` is set. `KernelProduct(jnp.ones(n2))` is the sum of
    each row.

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

    is_sum: ClassVar[bool] = True

    vectors: Shaped[Array, " n2"] | Shaped[Array, "n2 k"] = eqx.field(converter=as_jax)

    __check_init__ = check_fields

    @property
    def neutral(self) -> float:
        return 0.0

    def init(self, kernel: jax.ShapeDtypeStruct) -> Total:
        vectors = self.vectors
        what = "The number of rows of `vectors`"
        remedy = "It is the number of columns of the kernel."
        check_equal(what, vectors.shape[0], kernel.shape[1], remedy)
        dtype = jnp.result_type(kernel.dtype, vectors.dtype)
        shape = (kernel.shape[0], *kernel.shape[2:], *vectors.shape[1:])
        wide = sum_dtype(jax.ShapeDtypeStruct((), dtype))
        # A row is the sum of one product for each block of columns: at most `n2`.
        return _begun(jnp.zeros(shape, wide), kernel.shape[1], dtype)

    def update(
        self, state: Total, tile: MatrixTile, rows: Block, columns: Block
    ) -> Total:
        vectors = columns.take(self.vectors).astype(state.dtype)
        tile, wide = tile.astype(state.dtype), state.total.dtype
        # [rows, columns, ...] and [columns, k] make [rows, ..., k].
        with exact_products():
            part = jnp.tensordot(
                tile, vectors, ((1,), (0,)), preferred_element_type=wide
            )
        return _with_rows(state, jtu.tree_map(rows.take, state).added(part), rows)

    def merge(self, first: Total, second: Total) -> Total:
        return first.plus(second.whole())

    def finalize(self, state: Total) -> Shaped[Array, "n1 ..."]:
        return state.whole().total.astype(state.dtype)


class Norm(eqx.Module):
    """A norm whose squares neither overflow nor vanish.

    - `largest`: the largest absolute value of an entry.
    - `squares`: the sum of the squares of entries that are divided by `scale`.
    """

    largest: Array
    squares: Total

    @staticmethod
    def begun(kernel: jax.ShapeDtypeStruct) -> "Norm":
        # Real, also for a complex kernel.
        zero = jnp.zeros((), jnp.finfo(sum_dtype(kernel)).dtype)
        return Norm(zero, _begun(zero, most_blocks(kernel), zero.dtype))

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
        # A norm is the same for any scale, which has no derivative for that reason.
        top = jnp.max(jnp.abs(lax.stop_gradient(tile)), initial=0)
        new = dataclasses.replace(self, largest=jnp.maximum(self.largest, top))
        # The square of a complex entry is that of its two parts, which need no root.
        is_real = jnp.issubdtype(tile.dtype, jnp.floating)
        parts = [tile] if is_real else [jnp.real(tile), jnp.imag(tile)]
        squares = [jnp.sum((part / new.scale) ** 2) for part in parts]
        return self._plus(functools.reduce(jnp.add, squares), new)

    def merged(self, other: "Norm") -> "Norm":
        largest = jnp.maximum(self.largest, other.largest)
        new = dataclasses.replace(self, largest=largest)
        return self._plus(other.squares.whole().total * other.shrinkage(new) ** 2, new)

    def _plus(self, squares: Array, new: "Norm") -> "Norm":
        added = self.squares.added(squares, self.shrinkage(new) ** 2)
        return Norm(new.largest, added)

    @property
    def root(self) -> Inexact[Array, ""]:
        """The norm, divided by `scale`."""
        return jnp.sqrt(self.squares.whole().total)


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

    def init(self, kernel: jax.ShapeDtypeStruct) -> Norm:
        if not jnp.issubdtype(kernel.dtype, jnp.inexact):
            raise TypeError(
                "FrobeniusNorm needs a kernel of an inexact dtype; got "
                f"{kernel.dtype}. Cast what `kernel_fn` returns."
            )
        return Norm.begun(kernel)

    def update(
        self, state: Norm, tile: MatrixTile, rows: Block, columns: Block
    ) -> Norm:
        del rows, columns
        return state.including(widened(tile))

    def merge(self, first: Norm, second: Norm) -> Norm:
        return first.merged(second)

    def finalize(self, state: Norm) -> Inexact[Array, ""]:
        return state.root * state.scale


class Neighbours(NamedTuple):
    """The result of [`eqxbatch.TopK`][].

    - `values`: the largest entries of each row in descending order, shape `(n1, k)`.
    - `indices`: their columns, shape `(n1, k)`.
    """

    values: Shaped[Array, "n1 k"]
    indices: Int[Array, "n1 k"]


class _Nearest(eqx.Module):
    """The largest entries so far; only those above `-inf` have a column."""

    values: Shaped[Array, "n1 k"]
    indices: Int[Array, "n1 k"]
    num_columns: int = eqx.field(static=True)


class TopK(AbstractReduction[_Nearest]):
    """The `k` largest entries of each row and their columns: nearest neighbours.

    NaN counts as larger than all numbers, whatever its sign. Of equal entries, those
    with the smallest columns come first, whatever the block size.

    **Arguments:**

    - `k`: the number of entries for each row, at least 1.
    - `without_self`: whether to exclude the diagonal, because each example is its own
        nearest neighbour.

    **Returns:**

    An [`eqxbatch.results.Neighbours`][].

    Raises `ValueError` if a row has fewer than `k` entries, or for a kernel with more
    than two axes. Raises `TypeError` unless the kernel has a real floating-point dtype.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> kernel = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: -abs(x - y.T),
        ...     block_size=2,
        ...     reduce=eqxbatch.TopK(1, without_self=True),
        ... )
        >>> x = jnp.array([0.0, 1.0, 3.0, 7.0])[:, None]
        >>> print(kernel(x, x).indices[:, 0])
        [1 0 1 2]

        ```
    """

    k: int = eqx.field(static=True)
    without_self: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_fields(self)
        check_at_least("k", self.k, 1)

    @property
    def neutral(self) -> float:
        return -math.inf

    def init(self, kernel: jax.ShapeDtypeStruct) -> _Nearest:
        if len(kernel.shape) != 2:
            raise ValueError(
                "TopK needs a kernel with one number for each pair of examples; got "
                f"shape {kernel.shape}. Take the trace over the other axes."
            )
        if not jnp.issubdtype(kernel.dtype, jnp.floating):
            raise TypeError(
                f"TopK needs a kernel of real numbers; got dtype {kernel.dtype}. Cast "
                "what `kernel_fn` returns."
            )
        most = max(kernel.shape[1] - self.without_self, 0)
        has_rows = kernel.shape[0] > 0
        if has_rows and self.k > most:
            raise ValueError(
                f"`k` must be at most the number of entries of a row, {most}; got "
                f"{self.k}."
            )
        shape = (kernel.shape[0], self.k)
        # Any entry is at least as large as these, which stand for no column.
        values = jnp.full(shape, -jnp.inf, kernel.dtype)
        return _Nearest(values, jnp.full(shape, -1, jnp.int32), kernel.shape[1])

    def update(
        self, state: _Nearest, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Nearest:
        column = columns.start + jnp.arange(columns.size, dtype=jnp.int32)
        if self.without_self:
            row = rows.start + jnp.arange(rows.size, dtype=jnp.int32)
            is_self = row[:, None] == column[None, :]
            tile = jnp.where(is_self, jnp.asarray(-jnp.inf, tile.dtype), tile)
        # At most `k` entries of a tile can be among the largest of all. Of equal ones,
        # the first ones are taken.
        _, index = lax.top_k(_ranked(tile), min(self.k, columns.size))
        values = jnp.take_along_axis(tile, index, axis=1)
        new = _Nearest(values, column[index], state.num_columns)
        merged = self.merge(jtu.tree_map(rows.take, state), new)
        return _with_rows(state, merged, rows)

    def merge(self, first: _Nearest, second: _Nearest) -> _Nearest:
        values = jnp.concatenate([first.values, second.values], axis=1)
        indices = jnp.concatenate([first.indices, second.indices], axis=1)
        # Tiles need not come in the order of their columns. In ascending order, NaN is
        # the last value, and the smallest column is the last of equal values.
        values, last = lax.sort((values, -indices), dimension=1, num_keys=2)
        largest = lambda x: x[:, : -self.k - 1 : -1]
        return _Nearest(largest(values), -largest(last), first.num_columns)

    def finalize(self, state: _Nearest) -> Neighbours:
        # An entry of `-inf` looks like an excluded one. If such entries are among the
        # largest, all columns of larger entries are known, and the other columns have
        # `-inf`.
        is_low = state.values == -jnp.inf
        # Indices past the last column stand for no column; they are distinct.
        none = state.num_columns + jnp.arange(self.k + 1, dtype=jnp.int32)
        taken = jnp.where(is_low, none[None, :-1], state.indices)
        if self.without_self:
            row = jnp.arange(taken.shape[0], dtype=jnp.int32)
            itself = jnp.where(row < state.num_columns, row, none[-1])
            taken = jnp.concatenate([taken, itself[:, None]], axis=1)
        rank = jnp.cumsum(is_low, axis=1, dtype=jnp.int32) - 1
        return Neighbours(
            state.values, jnp.where(is_low, _missing(taken, rank), state.indices)
        )


def _ranked(x: Array) -> Array:
    """Numbers that `jax.lax.top_k` ranks as their values.

    It ranks a NaN by its sign, which is set for 0 / 0 on x86, and -0.0 below 0.0.
    """
    x = lax.stop_gradient(x)
    return jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x == 0, 0, x)).astype(x.dtype)


def _missing(
    taken: Int[Array, "rows m"], rank: Int[Array, "rows k"]
) -> Int[Array, "rows k"]:
    """The columns with these ranks among those that are not taken, for each row."""
    taken = jnp.sort(taken, axis=1)
    # The number of columns before each taken column that are not taken.
    # If 1 and 3 are taken, 1 and 2 columns before them are not. Ranks 0, 1 and 2 pass
    # none, one and both of them: columns 0, 2 and 4.
    before = taken - jnp.arange(taken.shape[1], dtype=jnp.int32)[None]
    passed = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(before, rank)
    return rank + passed.astype(jnp.int32)
