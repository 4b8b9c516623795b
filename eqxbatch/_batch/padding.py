"""Rows of weight 0, which pad a batch and must have no influence.

A weight of 0 does not remove what is not finite: 0 times NaN is NaN, in a sum as well
as in a backward pass. So before a function sees them, rows that do not count are
replaced by one that does.

The derivative with respect to a weight is the value of its row, also if the weight is
0. Where weights are differentiated, rows stay as they are.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Shaped

from .._base.trees import safe_zip
from .arguments import Dual, Primals, Tangents
from .rows import Rows


class Padding(eqx.Module):
    """What replaces rows of weight 0: the first row of a batch that counts.

    If none counts, it has ones, which most functions take better than what pads a
    batch, and `unless_padding` drops the result.
    """

    row: list

    @staticmethod
    def of(rows: Rows) -> "Padding | None":
        """The padding of a batch; None if all of its rows count."""
        weights = rows.weights
        if weights is None or weights.shape[0] == 0 or not rows.arrays:
            return None
        counts = weights.astype(bool)
        # `argmax` finds the first row that counts, or row 0 if none does: no mark then.
        first = counts & (jnp.arange(weights.shape[0]) == jnp.argmax(counts))
        pairs = safe_zip(rows.arrays, rows.axes)
        row = [_marked_row(x, first, axis) for x, axis in pairs]
        # Its share in a derivative has the weight 0.
        return Padding([*map(lax.stop_gradient, row)])

    def replaced(self, rows: Rows) -> Rows:
        """The rows of a microbatch, without those that do not count."""
        if rows.weights is None:
            return rows
        triples = safe_zip(rows.arrays, self.row, rows.axes)
        counting = lambda x, row, axis: _counting(x, row, rows.weights, axis=axis)
        return rows.with_(arrays=[counting(*triple) for triple in triples])


def unless_padding(totals: list[Array], weights: Shaped[Array, " n"]) -> list[Array]:
    """Weighted sums over a microbatch, or zeros if none of its rows counts."""
    return [_unless_padding(x, weights) for x in totals]


def _marked_row(x: Array, is_marked: Array, axis: int) -> Array:
    """The only marked row, along an axis of size 1; ones if none is marked.

    The others add zeros to it, so that no device has to send more than its sum.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # Keys cannot be added, but the integers that they are made of can.
        data = _marked_row(jr.key_data(x), is_marked, axis)
        return jr.wrap_key_data(data, impl=jr.key_impl(x))
    # Without a mark, all rows are zeros in the sum, and ones take its place.
    has_mark = jnp.any(is_marked)
    is_marked = _along(is_marked, x, axis)
    if x.dtype == jnp.bool_:
        return jnp.any(is_marked & x, axis, keepdims=True) | ~has_mark
    # Not all backends add numbers of so few bits.
    is_small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 2
    numbers = x.astype(jnp.float32) if is_small else x
    numbers = jnp.where(is_marked, numbers, jnp.zeros((), numbers.dtype))
    row = jnp.sum(numbers, axis, dtype=numbers.dtype, keepdims=True)
    return jnp.where(has_mark, row, jnp.ones((), row.dtype)).astype(x.dtype)


def _along(marks: Array, x: Array, axis: int) -> Array:
    """A mark for each row of `x`, with as many axes."""
    return jnp.expand_dims(marks, [i for i in range(x.ndim) if i != axis])


@eqx.filter_custom_jvp
def _counting(x: Array, row: Array, weights: Array, *, axis: int) -> Array:
    return jnp.where(_along(weights.astype(bool), x, axis), x, row)


@_counting.def_jvp
def _counting_jvp(primals: Primals, tangents: Tangents, *, axis: int) -> Dual:
    (x, row, weights), (t_x, _, t_weights) = primals, tangents
    # The derivative with respect to a weight needs the row as it is.
    if t_weights is not None:
        return x, t_x
    # The row in the place of padding is a constant, so its tangent is zero.
    counts = _along(weights.astype(bool), x, axis)
    zero = jnp.zeros((), t_x.dtype)
    return jnp.where(counts, x, row), jnp.where(counts, t_x, zero)


@eqx.filter_custom_jvp
def _unless_padding(total: Array, weights: Array) -> Array:
    return jnp.where(jnp.any(weights.astype(bool)), total, jnp.zeros((), total.dtype))


@_unless_padding.def_jvp
def _unless_padding_jvp(primals: Primals, tangents: Tangents) -> Dual:
    (total, weights), (t_total, t_weights) = primals, tangents
    if t_weights is not None:
        return total, t_total
    # The tangent of a sum over padding may be NaN as well, and is dropped with it.
    return _unless_padding(total, weights), _unless_padding(t_total, weights)
