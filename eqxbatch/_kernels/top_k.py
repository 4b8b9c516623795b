"""The largest entries of each row of a kernel."""

import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from .._base.checks import check_at_least, check_fields
from .._batch.batch import Block
from .reductions import AbstractReduction, MatrixTile


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

    Ties are broken arbitrarily. NaN counts as larger than all numbers.

    **Arguments:**

    - `k`: the number of entries for each row, at least 1.
    - `without_self`: whether to exclude the diagonal, because each example is its own
        nearest neighbour.

    **Returns:**

    An [`eqxbatch.Neighbours`][].

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
        # At most `k` entries of a tile can be among the largest of all.
        values, index = lax.top_k(tile, min(self.k, columns.size))
        new = _Nearest(values, column[index], state.num_columns)
        old = rows.take(state.values), rows.take(state.indices)
        merged = self.merge(_Nearest(*old, state.num_columns), new)
        write = lambda x, part: lax.dynamic_update_slice_in_dim(x, part, rows.start, 0)
        return _Nearest(
            write(state.values, merged.values),
            write(state.indices, merged.indices),
            state.num_columns,
        )

    def merge(self, first: _Nearest, second: _Nearest) -> _Nearest:
        values = jnp.concatenate([first.values, second.values], axis=1)
        indices = jnp.concatenate([first.indices, second.indices], axis=1)
        values, order = lax.top_k(values, self.k)
        indices = jnp.take_along_axis(indices, order, axis=1)
        return _Nearest(values, indices, first.num_columns)

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


def _missing(
    taken: Int[Array, "rows m"], rank: Int[Array, "rows k"]
) -> Int[Array, "rows k"]:
    """The columns with these ranks among those that are not taken, for each row."""
    taken = jnp.sort(taken, axis=1)
    # The number of columns before each taken column that are not taken.
    before = taken - jnp.arange(taken.shape[1], dtype=jnp.int32)[None]
    passed = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(before, rank)
    return rank + passed.astype(jnp.int32)
