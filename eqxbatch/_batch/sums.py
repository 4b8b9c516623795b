"""Accumulators of sums: totals, means and variances, with weights.

They are exact with a remainder and after an early stop. What rounding takes from a sum
of many parts is kept beside it.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PyTree, Shaped

from .._base.checks import check_exclusive
from .._base.dtypes import accumulation_dtype, check_fits, common_dtype, widened, widest
from .._base.types import as_jax, check_fields
from .accumulators import AbstractAccumulator
from .arguments import Dtype, Dual, Primals, Tangents
from .batch import Batch
from .blocks import Block, Blocks, full_block
from .rows import Rows


_Value = Shaped[Array, "*r"]


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class Total:
    """A sum over examples, their total weight, and the dtype of the results.

    `lost` is what rounding took from both, if there are many microbatches.
    """

    total: Any
    weight: Any
    dtype: Any = eqx.field(static=True)
    lost: tuple[Any, Any] = (None, None)

    def plus(self, value: "Total") -> "Total":
        total, lost = plus(self.total, self.lost[0], value.total)
        # A `Sum` has no weight: nothing divides it.
        if self.weight is None:
            return Total(total, None, self.dtype, (lost, None))
        weight, lost_weight = plus(self.weight, self.lost[1], value.weight)
        return Total(total, weight, self.dtype, (lost, lost_weight))

    def added(self, part: Array, shrinkage: Any = None) -> "Total":
        """The sum with one more part, after a multiplication by `shrinkage`."""
        shrunk = self
        if shrinkage is not None:
            shrunk = jtu.tree_map(lambda x: x * shrinkage, self)
        return shrunk.plus(Total(part, None, self.dtype))

    def whole(self) -> "Total":
        """The same, with each sum in one number."""
        total, weight = map(complete, (self.total, self.weight), self.lost)
        return Total(total, weight, self.dtype)

    def before(self, num: int) -> "Total":
        """The state before the first of `num` microbatches, from zeros."""
        lost = nothing_lost(self.total, num), nothing_lost(self.weight, num)
        return dataclasses.replace(self, lost=lost)


class VarianceState(eqx.Module):
    """The mean over some examples, and the sum of squared distances to it.

    `count` is the number of examples and `observations` the number of results. `lost`
    is what rounding took from `squares`, if there are many microbatches.
    """

    mean: Any
    squares: Any
    count: Any
    observations: Any
    dtype: Any = eqx.field(static=True)
    lost: Any = None

    def whole(self) -> "VarianceState":
        """The same, with `squares` in one number."""
        squares = complete(self.squares, self.lost)
        return dataclasses.replace(self, squares=squares, lost=None)

    def plus(self, value: "VarianceState", xp: Any = jnp) -> "VarianceState":
        """The moments of both sets of examples. `xp` is the library of their arrays."""
        counts = self.count, value.count, self.count + value.count
        # In floating point, because the product of two counts can overflow int32.
        real = widest(self.mean.dtype)
        of_self, of_value, of_both = (xp.asarray(x).astype(real) for x in counts)
        # Of no examples at all, both shares are 0.
        of_both = xp.where(of_both == 0, xp.ones_like(of_both), of_both)
        shares = [(x / of_both).astype(self.mean.dtype) for x in (of_self, of_value)]
        delta = value.mean - self.mean
        # The difference is more accurate, unless it is infinite: then a mean is
        # infinite, or both are huge with opposite signs.
        mean = xp.where(
            xp.isfinite(delta),
            self.mean + delta * shares[1],
            self.mean * shares[0] + value.mean * shares[1],
        )
        # A running mean needs no squares.
        if self.squares is None:
            return VarianceState(mean, None, counts[-1], None, self.dtype)
        # Scaled before squaring: the square alone may overflow.
        distance = delta * xp.sqrt(of_self * (of_value / of_both)).astype(delta.dtype)
        part = value.squares + _abs_squared(distance)
        squares, lost = plus(self.squares, self.lost, part)
        observations = self.observations + value.observations
        return VarianceState(mean, squares, counts[-1], observations, self.dtype, lost)

    def before(self, num: int) -> "VarianceState":
        """The state before the first of `num` microbatches, from zeros."""
        return dataclasses.replace(self, lost=nothing_lost(self.squares, num))


def is_summary(x: object) -> bool:
    """Whether this is what an `AbstractSummary` adds up."""
    return isinstance(x, Total | VarianceState)


_Summary = TypeVar("_Summary", Total, VarianceState)


class AbstractSummary(AbstractAccumulator[_Summary]):
    """Adds up summaries of examples, such as their total and number."""

    __check_init__ = check_fields

    @abc.abstractmethod
    def whole(self, value: PyTree, block: Block) -> _Summary:
        """The summary of a microbatch, from its result as a whole."""

    def init(self, value: PyTree, blocks: Blocks) -> _Summary:
        block, struct = full_block(blocks, 0), value
        if not is_summary(value):
            struct = jax.eval_shape(lambda value: self.whole(value, block), value)
        # A summary of no examples is all zeros, and adding one to it is exact.
        zeros = jtu.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), struct)
        return zeros.before(most_parts(blocks))

    def update(
        self, state: _Summary, value: _Summary | _Value, block: Block
    ) -> _Summary:
        return state.plus(self.summary(value, block))

    def summary(self, value: PyTree, block: Block) -> Any:
        """The summary of a microbatch, from its value."""
        # It is one already if it comes from `aggregate`.
        return value if is_summary(value) else self.whole(value, block)


class AbstractTotal(AbstractSummary[Any]):
    """A sum over examples, as it is or divided by their weight."""

    weights: Shaped[Array, " n"] | None = eqx.field(converter=as_jax, default=None)
    dtype: DTypeLike | None = eqx.field(static=True, default=None)


class Sum(AbstractTotal):
    """The sum over all examples: `jnp.sum(..., axis=0)` of what `vmap` returns.

    **Arguments:**

    - `weights`: an array of numbers or bools of shape `(n,)`. The sum is over
        `weights[i] * result[i]`. Only for per-example results.
    - `dtype`: the dtype to accumulate in. The default is float32 for bfloat16 and
        float16, the dtype that `jnp.sum` uses for integers and bools, and the dtype of
        the results otherwise. Weights are taken into account: unsigned integers with
        signed weights accumulate as signed integers, integers with real weights as real
        numbers, and anything with complex weights as complex numbers.

    The sum has the dtype of the results. Exceptions are integers, bools, and real
    results with complex weights: the sum then has the dtype of the accumulation.

    Raises `TypeError` for a `dtype` that would drop the imaginary part, the fractional
    part or the sign of results or weights. Raises `ValueError` for `weights` of another
    shape, as [`eqxbatch.Mean`][] does.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.Sum()
        ... )
        >>> print(f(jnp.arange(5.0)))
        20.0

        ```
    """

    counts_new: ClassVar[bool] = True
    one_shape: ClassVar[bool] = True
    state_as: ClassVar[Literal["itself", "mean"]] = "mean"

    def finalize(self, state: Total) -> Shaped[Array, "*r"]:
        return complete(state.total, state.lost[0]).astype(state.dtype)

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> Total:
        check_weights("Sum", self.weights, block.total)
        total, dtype = _to_add("Sum", values, self.dtype, self.weights, inexact=False)
        return Total(_sum_of_rows(total, self.weights, block), None, dtype)

    def whole(self, value: PyTree, block: Block) -> Total:
        if self.weights is not None:
            raise ValueError(
                "Sum(weights=...) weights single examples, but here `fun` returns one "
                "result for a whole microbatch. Pass the weights to `fun` as a batched "
                "argument, and return the weighted sum."
            )
        total, dtype = _to_add("Sum", value, self.dtype, None, inexact=False)
        return Total(total, None, dtype)


class Mean(AbstractTotal):
    """The mean over all examples: `jnp.mean(..., axis=0)` of what `vmap` returns.

    The mean is exact even if the microbatch size does not divide the batch: each
    microbatch is weighted by its number of examples (or by their total weight). After
    an early stop, it is the mean over the examples that ran. In
    [`eqxbatch.filter_microbatch`][] and with `batched=True`, each result must be the
    mean over its microbatch: with `weights`, the mean with the same weights.

    **Arguments:**

    - `weights`: an array of non-negative numbers or bools of shape `(n,)`. The result
        is `sum(weights[i] * result[i]) / sum(weights)`.
    - `dtype`: the dtype to accumulate in. The default is float32 for bfloat16 and
        float16, and the dtype of the results otherwise.
    - `running`: whether to update the mean after every microbatch, instead of dividing
        a sum at the end: for results whose sum would overflow. No intermediate value is
        larger than the results themselves. Over many microbatches, a sum keeps more
        digits, because it keeps what rounding takes from it.

    The mean has the dtype of the results. It is NaN for an empty batch and if the
    weights sum to zero. Raises `TypeError` for integer results unless `dtype` is given;
    the mean then has that `dtype`. Raises `ValueError` for `weights` with `running`.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.Mean()
        ... )
        >>> print(f(jnp.arange(5.0)))
        4.0

        ```

    ??? cite

        The running update is that of Welford, "Note on a method for calculating
        corrected sums of squares and products", Technometrics 4(3), 1962.
    """

    counts_new: ClassVar[bool] = True
    one_shape: ClassVar[bool] = True
    of_equal: ClassVar[bool] = True
    state_as: ClassVar[Literal["itself", "mean"]] = "mean"

    running: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        remedy = "Weighted results can be larger than the results. Leave one out."
        check_exclusive(remedy, weights=self.weights, running=self.running or None)

    def finalize(self, state: Total | VarianceState) -> Inexact[Array, "*r"]:
        if isinstance(state, VarianceState):
            return _mean_or_nan(state)
        # The division is in at least float32, so that it rounds only once.
        total = widened(complete(state.total, state.lost[0]))
        weight = complete(state.weight, state.lost[1])
        return (total / weight.astype(total.dtype)).astype(state.dtype)

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> Any:
        if self.running:
            whole = self.whole(values, block)
            return dataclasses.replace(whole, mean=_mean(whole.mean, block))
        total, dtype = _to_add("Mean", values, self.dtype, self.weights, inexact=True)
        weight = block_weight(total.dtype, self.weights, block)
        return Total(_sum_of_rows(total, self.weights, block), weight, dtype)

    def whole(self, value: PyTree, block: Block) -> Any:
        mean, dtype = _to_add("Mean", value, self.dtype, self.weights, inexact=True)
        if self.running:
            return VarianceState(mean, None, block.num_new, None, dtype)
        weight = block_weight(mean.dtype, self.weights, block)
        return Total(mean * weight.astype(mean.dtype), weight, dtype)


def is_running(accumulator: object) -> bool:
    return isinstance(accumulator, Mean) and accumulator.running


def check_adds(accumulators: PyTree) -> None:
    """Raises for a running mean where results are added up."""
    if any(map(is_running, jtu.tree_leaves(accumulators, is_leaf=is_running))):
        raise ValueError(
            "`accumulator=Mean(running=True)` is for maps and gradients; here, results "
            "are added up. Use `Mean()`."
        )


class MeanAndVariance(NamedTuple):
    """What [`eqxbatch.Variance`][] returns for an array: `mean` and `variance`."""

    mean: Inexact[Array, "*r"]
    variance: Inexact[Array, "*r"]


class Variance(AbstractSummary[VarianceState]):
    """Mean and variance over all examples, in one numerically stable pass.

    Each array of the output becomes a [`eqxbatch.results.MeanAndVariance`][], whose
    fields are `jnp.mean(..., axis=0)` and `jnp.var(..., axis=0, ddof=ddof)` of what
    `vmap` returns. The variance of complex results is real.

    In [`eqxbatch.filter_microbatch`][], each result is one observation, weighted by the
    number of examples in its microbatch, and the variance is between microbatches.

    **Arguments:**

    - `ddof`: the divisor of the variance is the number of results minus `ddof`.
    - `dtype`: the dtype to compute in, as for [`eqxbatch.Mean`][].

    Raises `TypeError` for integer results unless `dtype` is given.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.Variance()
        ... )
        >>> mean, variance = f(jnp.arange(5.0))
        >>> print(mean, variance)
        4.0 8.0

        ```

    ??? cite

        Blocks are merged as in Chan, Golub and LeVeque, "Algorithms for computing the
        sample variance: analysis and recommendations", The American Statistician
        37(3), 1983.
    """

    counts_new: ClassVar[bool] = True
    one_shape: ClassVar[bool] = True
    state_as: ClassVar[Literal["itself", "mean"]] = "mean"

    ddof: int = eqx.field(static=True, default=0)
    dtype: DTypeLike | None = eqx.field(static=True, default=None)

    def finalize(self, state: VarianceState) -> MeanAndVariance:
        state = state.whole()
        # Counts may be beyond what float16 has.
        real = widest(state.squares.dtype)
        observations = state.observations.astype(real)
        # `ddof` is for results, which in `filter_microbatch` are fewer than examples.
        unbiased = observations / (observations - self.ddof)
        variance = state.squares.astype(real) / state.count.astype(real) * unbiased
        mean = _mean_or_nan(state)
        return MeanAndVariance(mean, variance.astype(mean.real.dtype))

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> VarianceState:
        whole = self.whole(values, block)
        # All examples of the microbatch are there, so their mean comes first.
        mean = _mean(whole.mean, block)
        distances = block.new(whole.mean - mean[None])
        squares = jnp.sum(_abs_squared(distances), axis=0)
        return VarianceState(mean, squares, whole.count, whole.count, whole.dtype)

    def whole(self, value: PyTree, block: Block) -> VarianceState:
        mean, dtype = _to_add("Variance", value, self.dtype, None, inexact=True)
        count = block.num_new
        return VarianceState(
            mean, jnp.zeros_like(mean.real), count, jnp.ones_like(count), dtype
        )


class OfTotals(AbstractSummary[Total]):
    """A sum or mean over examples, whose values are sums over a microbatch."""

    accumulator: Sum | Mean

    def whole(self, value: PyTree, block: Block) -> Total:
        accumulator = self.accumulator
        name, weights = type(accumulator).__name__, accumulator.weights
        wide, dtype = _to_add(name, value, accumulator.dtype, None, inexact=True)
        if isinstance(accumulator, Sum):
            return Total(wide, None, dtype)
        return Total(wide, block_weight(wide.dtype, weights, block), dtype)

    def finalize(self, state: Total) -> Shaped[Array, "..."]:
        return self.accumulator.finalize(state)

    def aggregate(self, values: PyTree, block: Block) -> Any:
        return self.accumulator.aggregate(values, block)


class _Widened(NamedTuple):
    """A value in the dtype to accumulate in, and the dtype to return it in."""

    value: Array
    dtype: Dtype


def _to_add(
    name: str,
    value: Array,
    requested: DTypeLike | None,
    weights: Array | None,
    *,
    inexact: bool,
) -> _Widened:
    """A value in both dtypes."""
    is_exact = not jnp.issubdtype(value.dtype, jnp.inexact)
    if requested is None and is_exact and not inexact:
        accumulation_dtype(name, value.dtype, None, inexact=False)
        # Only `jnp.sum` knows which dtype it adds integers in.
        dtype = jax.eval_shape(jnp.sum, value).dtype
    else:
        dtype = accumulation_dtype(name, value.dtype, requested, inexact=inexact)
    if weights is not None:
        dtype = _weighted_dtype(name, dtype, weights, requested)
    is_returned = is_exact or not _holds(value.dtype, dtype)
    return _Widened(value.astype(dtype), dtype if is_returned else value.dtype)


def _weighted_dtype(
    name: str, dtype: Dtype, weights: Array, requested: DTypeLike | None
) -> Any:
    """The dtype to add weighted results in; `dtype` is the one without weights."""
    if requested is not None:
        check_fits(name, dtype, weights.dtype, "of `weights`")
        return dtype
    # A float takes real weights as they are, and a complex number all weights.
    if jnp.issubdtype(dtype, jnp.inexact) and _holds(dtype, weights.dtype):
        return dtype
    # A mask picks values and changes none.
    if weights.dtype == jnp.bool_:
        return dtype
    of_weights = jax.eval_shape(lambda x: jnp.sum(widened(x)), weights).dtype
    is_unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    if is_unsigned and jnp.issubdtype(of_weights, jnp.signedinteger):
        # Promotion would turn the longest ones into floats.
        return jnp.dtype(f"int{8 * max(dtype.itemsize, of_weights.itemsize)}")
    return jax.dtypes.canonicalize_dtype(common_dtype(dtype, of_weights))


def _holds(dtype: Dtype, other: Dtype) -> bool:
    """Whether an inexact dtype can hold the imaginary part of another one, if any."""
    are_complex = [jnp.issubdtype(x, jnp.complexfloating) for x in (dtype, other)]
    return are_complex[0] or not are_complex[1]


def _mean(values: Inexact[Array, "b ..."], block: Block) -> Inexact[Array, "..."]:
    """The mean along axis 0, without a sum that may overflow."""
    wide = block.new(widened(values))
    return jnp.sum(wide / block.num_new.astype(wide.dtype), axis=0).astype(values.dtype)


def _mean_or_nan(state: VarianceState) -> Array:
    return jnp.where(state.count > 0, state.mean, jnp.nan).astype(state.dtype)


def _abs_squared(x: PyTree) -> Any:
    return (x * x.conj()).real


def check_weights(name: str, weights: Array | None, total: int | None) -> None:
    if weights is not None and total not in (None, weights.shape[0]):
        raise ValueError(
            f"{name}(weights=...) needs one weight for each example, shape "
            f"({total},); got shape {weights.shape}."
        )


def check_real(name: str, weights: Array | None, total: int | None) -> None:
    """Like `check_weights`, for weights that may not be complex."""
    check_weights(name, weights, total)
    if weights is not None and not any(
        jnp.issubdtype(weights.dtype, kind)
        for kind in (jnp.floating, jnp.integer, jnp.bool_)
    ):
        raise TypeError(
            f"{name}(weights=...) needs real numbers or bools here; got dtype "
            f"{weights.dtype}. For complex weights, use `Sum` over the results of "
            "`filter_micro_vmap`."
        )


def rows_and_weights(accumulator: PyTree, batch: Batch) -> Rows:
    """The rows of a batch, and the weights of its examples if they are added up."""
    rows = batch.rows()
    if not isinstance(accumulator, AbstractTotal):
        return rows
    check_real(type(accumulator).__name__, accumulator.weights, rows.total)
    return rows.with_(weights=accumulator.weights)


def _sum_of_rows(values: Array, weights: Array | None, block: Block) -> Array:
    if weights is not None:
        # `[b]` to `[b, 1, ...]`, to multiply the results of `b` examples.
        rows = block.take(weights).astype(values.dtype)
        rows = jnp.expand_dims(rows, tuple(range(1, values.ndim)))
        if jnp.issubdtype(values.dtype, jnp.inexact):
            # What pads a batch counts for nothing, also if it is NaN. What is finite
            # stays: it is the derivative with respect to the weight.
            is_padding = (rows == 0) & ~jnp.isfinite(values)
            values = jnp.where(is_padding, jnp.zeros_like(values), values)
        values = values * rows
    return jnp.sum(block.new(values), axis=0, dtype=values.dtype)


def block_weight(dtype: Dtype, weights: Array | None, block: Block) -> Array:
    if weights is None:
        return block.num_new
    check_real("Mean", weights, block.total)
    return jnp.sum(block.new(block.take(weights).astype(widest(dtype))))


# Sums of at most this many parts are within 1e-6 in float32 as they are.
MANY = 128


def most_parts(blocks: Blocks) -> int:
    """The largest number of microbatches that results may come from."""
    return MANY + 1 if blocks.continues else blocks.num


def nothing_lost(total: Array | None, num: int) -> Array | None:
    """What rounding took from a sum so far, or None if it is not kept.

    `num` is the largest number of its parts.
    """
    if total is None or num <= MANY:
        return None
    is_inexact = jnp.issubdtype(total.dtype, jnp.inexact)
    return jnp.zeros_like(total) if is_inexact else None


class RoundedSum(NamedTuple):
    """A sum, and what rounding took from it; None if that is not kept."""

    total: Any
    lost: Any


def plus(total: Array, lost: Array | None, part: Array) -> RoundedSum:
    """A sum with one more part, and what rounding took from it.

    This is the summation of Kahan, with an error that is exact for parts of any size.
    """
    if lost is None:
        return RoundedSum(total + part, None)
    return _sum_and_rest(total, part + lost)


def complete(total: PyTree, lost: PyTree) -> PyTree:
    """The sum, with what rounding took from it."""
    return total if lost is None else total + lost


@jax.custom_jvp
def _sum_and_rest(x: Array, y: Array) -> RoundedSum:
    """A rounded sum, and its rounding error; 0 for sums that are not finite."""
    total, error = _two_sum(x, y)
    lost = jnp.where(jnp.isfinite(error), error, jnp.zeros_like(error))
    return RoundedSum(total, lost)


@_sum_and_rest.defjvp
def _sum_and_rest_jvp(primals: Primals, tangents: Tangents) -> Dual:
    # Without the condition, reverse mode has nothing to save.
    return _sum_and_rest(*primals), _two_sum(*tangents)


def _two_sum(x: Array, y: Array) -> RoundedSum:
    """Knuth's exact addition: the sum of both results is that of the arguments."""
    total = x + y
    # `x + y` is `total` plus the second result, whichever of them is larger.
    of_y = total - x
    return RoundedSum(total, (x - (total - of_y)) + (y - of_y))
