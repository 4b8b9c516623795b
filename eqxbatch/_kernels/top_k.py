"""`TopK`: the largest entries of each row of a kernel, and their columns."""

import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Int, Shaped

from .._base.checks import check_at_least
from .._base.types import check_fields
from .._batch.blocks import Block
from .reductions import AbstractTwoSided, MatrixTile, with_rows


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


class _Candidates(NamedTuple):
    """The entries of a tile that can be among the largest, in groups of columns.

    - `values`: shape `(rows, num * size)`, in the order of their columns.
    - `groups`: the numbers of the groups, in ascending order; shape `(rows, num)`.
    - `size`: the number of columns in a group.
    """

    values: Array
    groups: Int[Array, "rows num"]
    size: int

    def columns(self, index: Int[Array, "rows k"]) -> Int[Array, "rows k"]:
        """The columns of some candidates, within the tile."""
        group = jnp.take_along_axis(self.groups, index // self.size, axis=1)
        return group * self.size + index % self.size


class TopK(AbstractTwoSided[_Nearest]):
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
        tile = self._without_self(tile, rows, columns)
        return self._updated(state, tile, rows, columns, axis=1)

    def update_mirrored(
        self, state: _Nearest, tile: MatrixTile, rows: Block, columns: Block
    ) -> _Nearest:
        tile = self._without_self(tile, rows, columns)
        return self._updated(state, tile, columns, rows, axis=0)

    def _without_self(
        self, tile: MatrixTile, rows: Block, columns: Block
    ) -> MatrixTile:
        """A tile whose entries on the diagonal of the kernel do not count."""
        if not self.without_self:
            return tile
        row, column = (
            block.start + jnp.arange(block.size, dtype=jnp.int32)
            for block in (rows, columns)
        )
        is_self = row[:, None] == column[None, :]
        return jnp.where(is_self, jnp.asarray(-jnp.inf, tile.dtype), tile)

    def _updated(
        self,
        state: _Nearest,
        tile: MatrixTile,
        rows: Block,
        columns: Block,
        axis: int,
    ) -> _Nearest:
        """The state after a tile, which has the columns along an axis of it."""
        old, k = jtu.tree_map(rows.take, state), self.k
        # `top_k` takes the first of equal entries, so that all are in the order of
        # their columns, in whatever order tiles come. An entry of `-inf` has no column.
        # Columns of this tile that entries have are repeated ones, at its start.
        is_before = old.indices < columns.start + columns.size
        low = jnp.asarray(-jnp.inf, tile.dtype)
        before = jnp.where(is_before, old.values, low)
        behind = jnp.where(is_before, low, old.values)
        new = _candidates(before, tile, behind, axis)
        num = new.values.shape[1]
        values = jnp.concatenate([before, new.values, behind], axis=1)
        _, place = lax.top_k(_ranked(values), k)
        is_new = (place >= k) & (place < k + num)
        column = columns.start + new.columns(jnp.clip(place - k, 0, num - 1))
        place_before = jnp.where(place < k, place, jnp.maximum(place - k - num, 0))
        kept = jnp.take_along_axis(old.indices, place_before, axis=1)
        largest = _Nearest(
            jnp.take_along_axis(values, place, axis=1),
            jnp.where(is_new, column, kept),
            state.num_columns,
        )
        return with_rows(state, largest, rows)

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


# With fewer columns than this for each of the largest entries, groups do not pay.
_LEAST_COLUMNS = 16


def _candidates(
    before: Shaped[Array, "rows k"],
    tile: MatrixTile,
    behind: Shaped[Array, "rows k"],
    axis: int,
) -> _Candidates:
    """The entries of a tile that can be among the `k` largest of a row.

    `before` and `behind` have the largest entries so far, from columns before and
    behind those of the tile. Columns are taken in groups of neighbours, by the largest
    entry of each. If a group is not among the `k` first ones, then `k` others, or
    entries so far, have an entry that is larger than all of it, or as large and in a
    column before it. `top_k` then passes a fraction of the entries.
    """
    k, num = before.shape[1], tile.shape[axis]
    if num < _LEAST_COLUMNS * k:
        whole = jnp.zeros((before.shape[0], 1), jnp.int32)
        return _Candidates(tile if axis else tile.T, whole, num)
    # About as many groups as candidates, [rows, groups].
    size = math.isqrt(num // k)
    maxima = _largest_of_groups(lax.stop_gradient(tile), size, axis)
    first = _ranked(jnp.concatenate([before, maxima, behind], axis=1))
    _, place = lax.top_k(first, k)
    # A place of another entry stands for no group: one past the last.
    is_group = (place >= k) & (place < k + maxima.shape[1])
    groups = jnp.sort(jnp.where(is_group, place - k, maxima.shape[1]), axis=1)
    within = jnp.arange(size, dtype=jnp.int32)
    column = (groups[:, :, None] * size + within[None, None]).reshape(
        before.shape[0], -1
    )
    # Read where they are, so that a tile is never transposed: [rows, k * size].
    index = jnp.minimum(column, num - 1)
    index = index if axis else index.T
    values = jnp.take_along_axis(tile, index, axis=axis, mode="promise_in_bounds")
    values = values if axis else values.T
    low = jnp.asarray(-jnp.inf, tile.dtype)
    return _Candidates(jnp.where(column < num, values, low), groups, size)


def _largest_of_groups(
    tile: MatrixTile, size: int, axis: int
) -> Shaped[Array, "rows groups"]:
    """The largest entry of each group of neighbours; the last one may be smaller."""
    num = tile.shape[axis]
    stop = num // size * size
    shape = (-1, num // size, size) if axis else (num // size, size, -1)
    full = lax.slice_in_dim(tile, 0, stop, 1, axis).reshape(shape)
    maxima = [_largest(full, axis + 1)]
    if stop < num:
        last = _largest(lax.slice_in_dim(tile, stop, num, 1, axis), axis)
        maxima.append(jnp.expand_dims(last, axis))
    maxima = jnp.concatenate(maxima, axis)
    return maxima if axis else maxima.T


def _largest(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """The largest entries along an axis, which is NaN if there is one.

    XLA for CPUs drops NaN in reductions of its own
    (https://github.com/openxla/xla/issues/21461).
    """
    # As fast as `jnp.max`.
    larger = lambda x, y: lax.select((x >= y) | (x != x), x, y)
    return lax.reduce(x, jnp.asarray(-jnp.inf, x.dtype), larger, (axis,))


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
