"""Reductions of a kernel that is never stored as a whole."""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from .._base.checks import check_equal
from .._base.cpu import in_turn
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


class AbstractTwoSided(AbstractReduction[_State]):
    """A reduction that takes the mirror image of a block without transposing it.

    XLA for CPUs transposes a block of 1,000 rows and columns in the time of several
    products with it.
    """

    @abc.abstractmethod
    def update_mirrored(
        self, state: _State, tile: MatrixTile, rows: Block, columns: Block
    ) -> _State:
        """The state after the mirror image of a block: its conjugate transpose.

        The arguments are those of the block itself, so that the mirror image has the
        rows `columns` and the columns `rows`.
        """

    @property
    def takes_mirrored(self) -> bool:
        """Whether `update_mirrored` belongs to `update`.

        A subclass that has an `update` of its own gets mirror images as blocks.
        """
        return _belongs(self, "update_mirrored")


class AbstractSymmetrised(AbstractTwoSided[_State]):
    """A reduction that makes a block on the diagonal symmetric itself.

    XLA for CPUs takes as long to combine a block of 1,000 rows with its transpose as to
    compute it.
    """

    @property
    @abc.abstractmethod
    def is_cheaper(self) -> bool:
        """Whether that takes less time than to combine a block with its transpose."""

    @abc.abstractmethod
    def update_symmetrised(
        self, state: _State, tile: MatrixTile, rows: Block, columns: Block
    ) -> _State:
        """The state after the mean of a block and its mirror image.

        `rows` and `columns` are the same.
        """

    @property
    def takes_asymmetric(self) -> bool:
        """Whether it is to get blocks on the diagonal as they were computed."""
        return self.is_cheaper and _belongs(self, "update_symmetrised")


def _belongs(reduction: AbstractReduction, name: str) -> bool:
    """Whether a method is at least as new as `update`, as classes are derived."""
    classes = [vars(x) for x in type(reduction).__mro__]
    update, other = (
        next(i for i, names in enumerate(classes) if x in names)
        for x in ("update", name)
    )
    return other <= update


def sum_dtype(struct: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(widened, jax.ShapeDtypeStruct((), struct.dtype)).dtype


def most_blocks(kernel: jax.ShapeDtypeStruct) -> int:
    """The number of blocks of a kernel, at most."""
    return math.prod(kernel.shape[:2])


def with_rows(whole: _State, part: _State, rows: Block) -> _State:
    """Arrays with other rows in place of those of a block."""
    put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, rows.start, 0)
    # All new rows are there before any is written. XLA would compute those of one array
    # from the old rows of another, again, and copy whole arrays for that in each step.
    return jtu.tree_map(put, whole, in_turn(part))


def _added_to(state: Total, part: Array, rows: Block) -> Total:
    """The sums with those of a block of rows."""
    return with_rows(state, jtu.tree_map(rows.take, state).added(part), rows)


def _begun(zeros: Array, num: int, dtype: Any) -> Total:
    """A sum of at most `num` parts, and the dtype of the result."""
    return Total(zeros, None, dtype).before(num)


# Up to so many vectors, a product takes less time than a transpose.
_FEW_VECTORS = 4


class KernelProduct(AbstractSymmetrised[Total]):
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
        return _added_to(state, self._product(state, tile, columns), rows)

    def update_mirrored(
        self, state: Total, tile: MatrixTile, rows: Block, columns: Block
    ) -> Total:
        return _added_to(state, self._mirrored(state, tile, rows), columns)

    @property
    def is_cheaper(self) -> bool:
        # It is one more product, of a block that is in the cache.
        return math.prod(self.vectors.shape[1:]) <= _FEW_VECTORS

    def update_symmetrised(
        self, state: Total, tile: MatrixTile, rows: Block, columns: Block
    ) -> Total:
        part = self._product(state, tile, columns)
        # Integers are not rounded, so that their block is symmetric.
        if jnp.issubdtype(part.dtype, jnp.inexact):
            # The sum of both could overflow.
            part = 0.5 * part + 0.5 * self._mirrored(state, tile, rows)
        return _added_to(state, part, rows)

    def _product(self, state: Total, tile: MatrixTile, columns: Block) -> Array:
        """The product of a block with the vectors of its columns."""
        vectors = columns.take(self.vectors).astype(state.dtype)
        tile, wide = tile.astype(state.dtype), state.total.dtype
        # [rows, columns, ...] and [columns, k] make [rows, ..., k].
        with exact_products():
            return jnp.tensordot(
                tile, vectors, ((1,), (0,)), preferred_element_type=wide
            )

    def _mirrored(self, state: Total, tile: MatrixTile, rows: Block) -> Array:
        """The product of the mirror image of a block with the vectors of its rows."""
        vectors = rows.take(self.vectors).astype(state.dtype)
        tile, wide = jnp.conj(tile.astype(state.dtype)), state.total.dtype
        # [rows, k] and [rows, columns, ...] make [k, columns, ...]. Both are read as
        # they are stored, with the rows first.
        with exact_products():
            part = jnp.tensordot(
                vectors, tile, ((0,), (0,)), preferred_element_type=wide
            )
        return jnp.moveaxis(part, 0, -1) if vectors.ndim > 1 else part

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


class FrobeniusNorm(AbstractTwoSided[Norm]):
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

    def update_mirrored(
        self, state: Norm, tile: MatrixTile, rows: Block, columns: Block
    ) -> Norm:
        # The mirror image has the same absolute values.
        return self.update(state, tile, columns, rows)

    def merge(self, first: Norm, second: Norm) -> Norm:
        return first.merged(second)

    def finalize(self, state: Norm) -> Inexact[Array, ""]:
        return state.root * state.scale
