"""Accumulators: how the results of microbatches are combined.

Sums and moments are exact with a remainder and after an early stop.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PyTree, Shaped

from .._base.checks import as_jax, check_exclusive, check_fields
from .._base.dtypes import accumulation_dtype, check_fits, common_dtype, widened, widest
from .._base.mesh import spec_of, with_type_of
from .batch import are_split, Batch, Block, Blocks, full_block, merge_parts, split_parts


_State = TypeVar("_State")


_Struct = jax.ShapeDtypeStruct


class AbstractAccumulator(eqx.Module, Generic[_State]):
    """Combines the results of all microbatches; subclass it to write your own.

    An accumulator is used like this:

    ```python
    state = accumulator.init(shape_of_one_value, blocks)
    for block, value in ...:
        state = accumulator.update(state, value, block)
    result = accumulator.finalize(state)
    ```

    In [`eqxbatch.filter_micro_vmap`][], the `value` of a microbatch is what `aggregate`
    returns for the results of its examples. In [`eqxbatch.filter_microbatch`][], it is
    what the function returns for the microbatch, and `aggregate` is not called.

    By default, an accumulator is applied to each array of the output separately. With
    the class attribute `leafwise = False`, it is applied to the whole sub-PyTree at its
    place instead, as optax's accumulators are.

    !!! example

        The largest absolute value:

        ```python
        >>> import eqxbatch, jax, jax.numpy as jnp
        >>> class MaxAbs(eqxbatch.AbstractAccumulator):
        ...     def init(self, value, blocks):
        ...         return jnp.zeros(value.shape, value.dtype)
        ...     def update(self, state, value, block):
        ...         return jnp.maximum(state, abs(value))
        ...     def finalize(self, state):
        ...         return state
        ...     def aggregate(self, values, block):
        ...         return abs(values).max(axis=0)
        >>> largest = eqxbatch.filter_micro_vmap(
        ...     lambda x: x, microbatch_size=2, accumulator=MaxAbs()
        ... )
        >>> print(largest(jnp.array([1.0, -3.0, 2.0])))
        3.0

        ```
    """

    leafwise: ClassVar[bool] = True

    @abc.abstractmethod
    def init(self, value: PyTree[_Struct], blocks: Blocks) -> _State:
        """Returns the state before the first microbatch.

        **Arguments:**

        - `value`: the shape and dtype of the value of one full microbatch.
        - `blocks`: how the batch is cut, as Python ints; see [`eqxbatch.Blocks`][].
        """

    @abc.abstractmethod
    def update(self, state: _State, value: PyTree[Array], block: Block) -> _State:
        """Returns the state after one more microbatch.

        **Arguments:**

        - `state`: what `init` or the previous `update` returned. Its structure, shapes
            and dtypes must not change.
        - `value`: the value of the microbatch.
        - `block`: the microbatch's index, start and size; see [`eqxbatch.Block`][].
        """

    @abc.abstractmethod
    def finalize(self, state: _State) -> PyTree[Array]:
        """Returns the result, from the state after the last microbatch."""

    @abc.abstractmethod
    def aggregate(self, values: PyTree[Array], block: Block) -> PyTree[Array]:
        """Returns the value of a microbatch from its examples' results, on axis 0."""


class Concat(AbstractAccumulator[Array]):
    """Concatenates the results of the microbatches, as `vmap` returns them.

    This is the default of [`eqxbatch.filter_micro_vmap`][]. Results are written into
    the output array in place. If `num_real_microbatches` stops the loop early, the
    remaining rows are zero.

    **Arguments:**

    - `axis`: the axis that has the examples in each result of
        [`eqxbatch.filter_microbatch`][]. For [`eqxbatch.filter_micro_vmap`][], set its
        `out_axes` instead.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.Concat()
        ... )
        >>> print(f(jnp.arange(5.0)))
        [0. 2. 4. 6. 8.]

        ```
    """

    axis: int = eqx.field(static=True, default=0)

    __check_init__ = check_fields

    def init(self, value: _Struct, blocks: Blocks) -> Shaped[Array, "..."]:
        axis = self.axis_of(value)
        extent = self.extent(value, blocks)
        shape = (*value.shape[:axis], extent, *value.shape[axis + 1 :])
        return with_type_of(value, jnp.zeros(shape, value.dtype))

    def update(
        self, state: Shaped[Array, "..."], value: Shaped[Array, "..."], block: Block
    ) -> Shaped[Array, "..."]:
        axis = self.axis_of(value)
        parts = self.parts_of(value, block)
        if block.is_remainder:
            # Rows that do not belong to examples can be as many as the examples by
            # chance: then full microbatches have the same number of rows.
            total = block.start + block.size
            if state.shape[axis] * block.size != value.shape[axis] * total:
                parts = 1
        is_split = are_split(value, axis, parts)
        if is_split:
            state = split_parts(state, axis, parts)
            value = split_parts(value, axis, parts)
            axis += 1
        rows = value.shape[axis]
        start = state.shape[axis] - rows if block.is_remainder else block.index * rows
        state = lax.dynamic_update_slice_in_dim(
            state, value, start, axis, allow_negative_indices=False
        )
        return merge_parts(state, axis - 1) if is_split else state

    def finalize(self, state: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return state

    def aggregate(
        self, values: Shaped[Array, "b ..."], block: Block
    ) -> Shaped[Array, "..."]:
        return jnp.moveaxis(values, 0, self.axis)

    def extent(self, value: Any, blocks: Blocks) -> int:
        """The number of rows of the result, from the value of a full microbatch."""
        rows = value.shape[self.axis_of(value)]
        # A result with as many rows as examples (or a multiple) scales with the size;
        # any other number of rows is the same for every microbatch.
        per_example, per_block = divmod(rows, blocks.size)
        return rows * blocks.num if per_block else per_example * blocks.total

    def parts_of(self, value: Any, block: Block) -> int:
        """The parts that the rows of a value come from; 1 if rows are not examples."""
        rows = value.shape[self.axis_of(value)]
        return 1 if rows % block.size else block.parts

    def axis_of(self, value: Any) -> int:
        """`axis` as a non-negative number."""
        if not -len(value.shape) <= self.axis < len(value.shape):
            raise ValueError(
                f"Concat(axis={self.axis}) does not fit a result of shape "
                f"{value.shape}: `fun` must return an array with that axis for each "
                "microbatch. Return one, or use another accumulator: `Mean()` for what "
                "is averaged, and `Last()` for what each microbatch replaces."
            )
        return self.axis % len(value.shape)


class Last(AbstractAccumulator[Array]):
    """Keeps the result of the last example (or microbatch) that runs.

    Raises `ValueError` if there are no examples, or if `num_real_microbatches` is 0. If
    it is an array of value 0, the result is zero, as it is within `jax.jit` for
    [`eqxbatch.over_batches`][] if all batches are empty.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.Last()
        ... )
        >>> print(f(jnp.arange(5.0)))
        8.0

        ```
    """

    def init(self, value: Any, blocks: Blocks) -> Shaped[Array, "..."]:
        # If batches follow, an empty one can be the first.
        if blocks.total == 0 and not blocks.continues:
            raise ValueError(
                "Last needs at least one example, but the batch has 0. Use Concat, or "
                "do not call it with an empty batch."
            )
        return jnp.zeros(value.shape, value.dtype)

    def update(
        self, state: Shaped[Array, "..."], value: Shaped[Array, "..."], block: Block
    ) -> Shaped[Array, "..."]:
        return value

    def finalize(self, state: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return state

    def aggregate(
        self, values: Shaped[Array, "b *r"], block: Block
    ) -> Shaped[Array, "*r"]:
        examples, *others = spec_of(values)
        if examples is not None:
            # JAX cannot slice one row out of an explicitly sharded axis.
            values = reshard(values, PartitionSpec(None, *others))
        return values[-1]


class _Extreme(eqx.Module):
    """The largest or smallest result of some examples, and how many attain it."""

    value: Any
    count: Any


class AbstractExtreme(AbstractAccumulator[_Extreme]):
    """The largest or smallest result. Before the first one, it is `sign` times inf."""

    sign: ClassVar[int]

    @staticmethod
    @abc.abstractmethod
    def pick(x: Array, y: Array, /) -> Array:
        """The elementwise larger or smaller of two results."""

    def init(self, value: Any, blocks: Blocks) -> _Extreme:
        struct = value.value if isinstance(value, _Extreme) else value
        identity = _identity(type(self).__name__, struct.dtype, self.sign)
        extreme = jnp.full(struct.shape, identity, struct.dtype)
        return _Extreme(extreme, jnp.zeros(struct.shape, jnp.int32))

    def update(
        self, state: _Extreme, value: _Extreme | Shaped[Array, "*r"], block: Block
    ) -> _Extreme:
        if not isinstance(value, _Extreme):
            value = _Extreme(value, jnp.ones(value.shape, jnp.int32))
        picked = self.pick(state.value, value.value)
        counts = [jnp.where(x.value == picked, x.count, 0) for x in (state, value)]
        count = counts[0] + counts[1]
        if jnp.issubdtype(picked.dtype, jnp.inexact):
            share = counts[0].astype(jnp.float32) / count.astype(jnp.float32)
            picked = _shared(
                self.pick, state.value, value.value, share.astype(picked.dtype)
            )
        return _Extreme(picked, count)

    def finalize(self, state: _Extreme) -> Shaped[Array, "*r"]:
        return state.value

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> _Extreme:
        _identity(type(self).__name__, values.dtype, self.sign)
        extreme = values.max(axis=0) if self.sign < 0 else values.min(axis=0)
        count = jnp.sum(values == extreme[None], axis=0, dtype=jnp.int32)
        return _Extreme(extreme, count)


class Max(AbstractExtreme):
    """The elementwise maximum over all examples; NaN where any result is NaN.

    If several examples attain the maximum, the gradient is split evenly between them.

    For an empty batch, the result is `-inf` (the smallest number for integer dtypes and
    others without infinities).
    Raises `TypeError` for complex results, which have no order.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.Max()
        ... )
        >>> print(f(jnp.arange(5.0)))
        8.0

        ```
    """

    sign: ClassVar[int] = -1
    pick = staticmethod(jnp.maximum)


class Min(AbstractExtreme):
    """The elementwise minimum over all examples; NaN where any result is NaN.

    If several examples attain the minimum, the gradient is split evenly between them.

    For an empty batch, the result is `inf` (the largest number for integer dtypes and
    others without infinities).
    Raises `TypeError` for complex results, which have no order.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.Min()
        ... )
        >>> print(f(jnp.arange(5.0)))
        0.0

        ```
    """

    sign: ClassVar[int] = 1
    pick = staticmethod(jnp.minimum)


def _shared(pick: Callable, x: Array, y: Array, share: Array) -> Array:
    """`pick(x, y)`, with derivatives in which `x` has weight `share` if both tie.

    Ties are written out, because JAX can drop the custom rule of a `lax.scan` that is
    differentiated twice.
    """
    is_tie = (x == y) & jnp.isfinite(x)
    gap = jnp.where(is_tie, y, 0) - jnp.where(is_tie, x, 0)
    return jnp.where(is_tie, x + (1 - share) * gap, _picked(pick, x, y, share))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _picked(pick: Callable, x: Array, y: Array, share: Array) -> Array:
    """`pick(x, y)`, with a derivative in which `x` has weight `share`."""
    del share
    return pick(x, y)


@_picked.defjvp
def _picked_jvp(pick: Callable, primals: tuple, tangents: tuple) -> tuple:
    x, y, share = primals
    t_x, t_y, _ = tangents
    return pick(x, y), share * t_x + (1 - share) * t_y


def _identity(name: str, dtype: Any, sign: int) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        if np.isinf(np.asarray(np.inf, dtype)):
            return sign * np.inf
        # Some dtypes with 8 or fewer bits have no infinity.
        info = jnp.finfo(dtype)
        return float(info.max if sign > 0 else info.min)
    if jnp.issubdtype(dtype, jnp.bool_):
        return sign > 0
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return info.max if sign > 0 else info.min
    raise TypeError(
        f"{name} needs ordered results, but `fun` returned {dtype}. Return a real "
        "number for it, such as the absolute value."
    )


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


def is_summary(x: Any) -> bool:
    """Whether this is what an `AbstractSummary` adds up."""
    return isinstance(x, Total | VarianceState)


_Summary = TypeVar("_Summary", Total, VarianceState)


class AbstractSummary(AbstractAccumulator[_Summary]):
    """Adds up summaries of examples, such as their total and number."""

    __check_init__ = check_fields

    @abc.abstractmethod
    def whole(self, value: Any, block: Block) -> _Summary:
        """The summary of a microbatch, from its result as a whole."""

    def init(self, value: Any, blocks: Blocks) -> _Summary:
        block, struct = full_block(blocks, 0), value
        if not is_summary(value):
            struct = jax.eval_shape(lambda value: self.whole(value, block), value)
        zeros = jtu.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), struct)
        return zeros.before(_most(blocks))

    def update(
        self, state: _Summary, value: _Summary | _Value, block: Block
    ) -> _Summary:
        return state.plus(self.summary(value, block))

    def summary(self, value: Any, block: Block) -> Any:
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

    def finalize(self, state: Total) -> Shaped[Array, "*r"]:
        return complete(state.total, state.lost[0]).astype(state.dtype)

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> Total:
        check_weights("Sum", self.weights, block.total)
        total, dtype = _cast("Sum", values, self.dtype, self.weights, inexact=False)
        return Total(_sum_of_rows(total, self.weights, block), None, dtype)

    def whole(self, value: Any, block: Block) -> Total:
        if self.weights is not None:
            raise ValueError(
                "Sum(weights=...) weights single examples, but here `fun` returns one "
                "result for a whole microbatch. Pass the weights to `fun` as a batched "
                "argument, and return the weighted sum."
            )
        total, dtype = _cast("Sum", value, self.dtype, None, inexact=False)
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

    running: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        remedy = "Weighted results can be larger than the results. Leave one out."
        check_exclusive(remedy, weights=self.weights, running=self.running or None)

    def finalize(self, state: Total | VarianceState) -> Inexact[Array, "*r"]:
        if isinstance(state, VarianceState):
            return _mean_or_nan(state)
        total = widened(complete(state.total, state.lost[0]))
        weight = complete(state.weight, state.lost[1])
        return (total / weight.astype(total.dtype)).astype(state.dtype)

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> Any:
        if self.running:
            whole = self.whole(values, block)
            return dataclasses.replace(whole, mean=_mean(whole.mean, block))
        total, dtype = _cast("Mean", values, self.dtype, self.weights, inexact=True)
        weight = block_weight(total.dtype, self.weights, block)
        return Total(_sum_of_rows(total, self.weights, block), weight, dtype)

    def whole(self, value: Any, block: Block) -> Any:
        mean, dtype = _cast("Mean", value, self.dtype, self.weights, inexact=True)
        if self.running:
            return VarianceState(mean, None, block.num_new, None, dtype)
        weight = block_weight(mean.dtype, self.weights, block)
        return Total(mean * weight.astype(mean.dtype), weight, dtype)


def is_running(accumulator: Any) -> bool:
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

    ddof: int = eqx.field(static=True, default=0)
    dtype: DTypeLike | None = eqx.field(static=True, default=None)

    def finalize(self, state: VarianceState) -> MeanAndVariance:
        state = state.whole()
        real = widest(state.squares.dtype)
        observations = state.observations.astype(real)
        unbiased = observations / (observations - self.ddof)
        variance = state.squares.astype(real) / state.count.astype(real) * unbiased
        mean = _mean_or_nan(state)
        return MeanAndVariance(mean, variance.astype(mean.real.dtype))

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> VarianceState:
        whole = self.whole(values, block)
        mean = _mean(whole.mean, block)
        distances = block.new(whole.mean - mean[None])
        squares = jnp.sum(_abs_squared(distances), axis=0)
        return VarianceState(mean, squares, whole.count, whole.count, whole.dtype)

    def whole(self, value: Any, block: Block) -> VarianceState:
        mean, dtype = _cast("Variance", value, self.dtype, None, inexact=True)
        count = block.num_new
        return VarianceState(
            mean, jnp.zeros_like(mean.real), count, jnp.ones_like(count), dtype
        )


class OfTotals(AbstractSummary[Total]):
    """A sum or mean over examples, whose values are sums over a microbatch."""

    accumulator: Sum | Mean

    def whole(self, value: Any, block: Block) -> Total:
        accumulator = self.accumulator
        name, weights = type(accumulator).__name__, accumulator.weights
        wide, dtype = _cast(name, value, accumulator.dtype, None, inexact=True)
        if isinstance(accumulator, Sum):
            return Total(wide, None, dtype)
        return Total(wide, block_weight(wide.dtype, weights, block), dtype)

    def finalize(self, state: Total) -> Shaped[Array, "..."]:
        return self.accumulator.finalize(state)

    def aggregate(self, values: Any, block: Block) -> Any:
        return self.accumulator.aggregate(values, block)


def _cast(
    name: str,
    value: Any,
    requested: DTypeLike | None,
    weights: Array | None,
    *,
    inexact: bool,
) -> tuple[Array, Any]:
    """`value` in the dtype to accumulate in, and the dtype to return it in."""
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
    return value.astype(dtype), dtype if is_returned else value.dtype


def _weighted_dtype(
    name: str, dtype: Any, weights: Array, requested: DTypeLike | None
) -> Any:
    """The dtype to add weighted results in; `dtype` is the one without weights."""
    if requested is not None:
        check_fits(name, dtype, weights.dtype, "of `weights`")
        return dtype
    if jnp.issubdtype(dtype, jnp.inexact) and _holds(dtype, weights.dtype):
        return dtype
    if weights.dtype == jnp.bool_:
        return dtype
    of_weights = jax.eval_shape(lambda x: jnp.sum(widened(x)), weights).dtype
    is_unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    if is_unsigned and jnp.issubdtype(of_weights, jnp.signedinteger):
        # Promotion would turn the longest ones into floats.
        return jnp.dtype(f"int{8 * max(dtype.itemsize, of_weights.itemsize)}")
    return jax.dtypes.canonicalize_dtype(common_dtype(dtype, of_weights))


def _holds(dtype: Any, other: Any) -> bool:
    """Whether an inexact dtype can hold the imaginary part of another one, if any."""
    are_complex = [jnp.issubdtype(x, jnp.complexfloating) for x in (dtype, other)]
    return are_complex[0] or not are_complex[1]


def _mean(values: Inexact[Array, "b ..."], block: Block) -> Inexact[Array, "..."]:
    """The mean along axis 0, without a sum that may overflow."""
    wide = block.new(widened(values))
    return jnp.sum(wide / block.num_new.astype(wide.dtype), axis=0).astype(values.dtype)


def _mean_or_nan(state: VarianceState) -> Array:
    return jnp.where(state.count > 0, state.mean, jnp.nan).astype(state.dtype)


def _abs_squared(x: Any) -> Any:
    return (x * x.conj()).real


def check_weights(name: str, weights: Any, total: int | None) -> None:
    if weights is not None and total not in (None, weights.shape[0]):
        raise ValueError(
            f"{name}(weights=...) needs one weight for each example, shape "
            f"({total},); got shape {weights.shape}."
        )


def check_real(name: str, weights: Any, total: int | None) -> None:
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


# Rows with the weights of their examples as the last of them, their axes, and what
# separates both again, times the shares that the examples have in a microbatch.
_Weighted = tuple[list, tuple[int, ...], Callable[..., tuple[list, Array | None]]]


def with_weights(arrays: list, axes: Sequence[int], weights: Array | None) -> _Weighted:
    """Appends weights to rows, if there are any."""

    def split(rows: list, shares: Array | None = None) -> tuple[list, Array | None]:
        if weights is None:
            return rows, shares
        *rows, of_rows = rows
        if shares is not None:
            of_rows = of_rows.astype(shares.dtype) * shares
        return rows, of_rows

    if weights is None:
        return arrays, tuple(axes), split
    return [*arrays, weights], (*axes, 0), split


def rows_and_weights(accumulator: Any, batch: Batch, blocks: Blocks) -> _Weighted:
    """The rows of a batch, and the weights of its examples if they are added up."""
    weights = accumulator.weights if isinstance(accumulator, AbstractTotal) else None
    check_real(type(accumulator).__name__, weights, blocks.total)
    return with_weights(batch.arrays, batch.axes, weights)


def _sum_of_rows(values: Array, weights: Array | None, block: Block) -> Array:
    if weights is not None:
        rows = block.take(weights).astype(values.dtype)
        rows = jnp.expand_dims(rows, tuple(range(1, values.ndim)))
        if jnp.issubdtype(values.dtype, jnp.inexact):
            # What pads a batch counts for nothing, also if it is NaN. What is finite
            # stays: it is the derivative with respect to the weight.
            is_padding = (rows == 0) & ~jnp.isfinite(values)
            values = jnp.where(is_padding, jnp.zeros_like(values), values)
        values = values * rows
    return jnp.sum(block.new(values), axis=0, dtype=values.dtype)


def block_weight(dtype: Any, weights: Array | None, block: Block) -> Array:
    if weights is None:
        return block.num_new
    check_real("Mean", weights, block.total)
    return jnp.sum(block.new(block.take(weights).astype(widest(dtype))))


# Sums of at most this many parts are within 1e-6 in float32 as they are.
_MANY = 128


def _most(blocks: Blocks) -> int:
    """The largest number of microbatches that results may come from."""
    return _MANY + 1 if blocks.continues else blocks.num


def nothing_lost(total: Any, num: int) -> Array | None:
    """What rounding took from a sum so far, or None if it is not kept.

    `num` is the largest number of its parts.
    """
    if total is None or num <= _MANY:
        return None
    is_inexact = jnp.issubdtype(total.dtype, jnp.inexact)
    return jnp.zeros_like(total) if is_inexact else None


def plus(total: Any, lost: Any, part: Any) -> tuple[Any, Any]:
    """A sum with one more part, and what rounding took from it.

    This is the summation of Kahan, with an error that is exact for parts of any size.
    """
    return (total + part, None) if lost is None else _sum_and_rest(total, part + lost)


def complete(total: Any, lost: Any) -> Any:
    """The sum, with what rounding took from it."""
    return total if lost is None else total + lost


@jax.custom_jvp
def _sum_and_rest(x: Array, y: Array) -> tuple[Array, Array]:
    """A rounded sum, and its rounding error; 0 for sums that are not finite."""
    total, rest = _two_sum(x, y)
    return total, jnp.where(jnp.isfinite(rest), rest, jnp.zeros_like(rest))


@_sum_and_rest.defjvp
def _sum_and_rest_jvp(primals: tuple, tangents: tuple) -> tuple:
    # Without the condition, reverse mode has nothing to save.
    return _sum_and_rest(*primals), _two_sum(*tangents)


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """Knuth's exact addition: the sum of both results is that of the arguments."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


# How far results may exceed the shift. Each new shift rounds the sum.
_MARGIN = 8.0


class _LogTotal(eqx.Module):
    log_total: Any
    dtype: Any = eqx.field(static=True)


class _Exponentials(eqx.Module):
    """A sum of `exp(x - shift)`.

    A sum of logarithms would lose as much with each microbatch as their size allows.
    The shift is `-inf` before the first finite number; then nothing is subtracted.
    """

    shift: Any
    total: Total


class LogSumExp(AbstractAccumulator[_Exponentials]):
    """`log(sum(exp(...)))` over all examples, without overflow.

    **Arguments:**

    - `dtype`: the dtype to compute in. The default is float32 for bfloat16 and float16
        results, and the dtype of the results otherwise. Integer results need one. The
        output has this dtype for integer results, and that of the results otherwise.

    For an empty batch, the result is `-inf`. Raises `TypeError` for integer results
    without a `dtype`.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_micro_vmap(
        ...     lambda x: 2 * x, microbatch_size=2, accumulator=eqxbatch.LogSumExp()
        ... )
        >>> print(f(jnp.arange(5.0)).round(3))
        8.145

        ```
    """

    dtype: DTypeLike | None = eqx.field(static=True, default=None)

    __check_init__ = check_fields

    def init(self, value: Any, blocks: Blocks) -> _Exponentials:
        value = jax.eval_shape(self._whole, value)
        # Not even in half precision do sums overflow.
        total = widened(jnp.zeros(value.log_total.shape, value.log_total.dtype))
        shift = jnp.full_like(total.real, -jnp.inf)
        return _Exponentials(
            shift, Total(total, None, value.dtype).before(_most(blocks))
        )

    def update(
        self, state: _Exponentials, value: _LogTotal | Shaped[Array, "*r"], block: Block
    ) -> _Exponentials:
        x = widened(self._whole(value).log_total)
        size = lax.stop_gradient(x.real)
        finite = jnp.where(jnp.isfinite(size), size, -jnp.inf)
        shift = jnp.where(finite > state.shift + _MARGIN, finite, state.shift)
        base = _finite(shift)
        # Without a shift, the sum is 0 or not finite.
        has_shift = state.shift != -jnp.inf
        scale = jnp.where(has_shift, jnp.exp(_finite(state.shift) - base), 1)
        part = jnp.exp(x - base.astype(x.dtype))
        return _Exponentials(shift, state.total.added(part, scale.astype(x.dtype)))

    def finalize(self, state: _Exponentials) -> Inexact[Array, "*r"]:
        sums = state.total.whole()
        log_total = _log(sums.total, _finite(state.shift))
        is_real = not jnp.issubdtype(sums.dtype, jnp.complexfloating)
        return (log_total.real if is_real else log_total).astype(sums.dtype)

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> _LogTotal:
        whole = self._whole(values)
        log_totals = block.new(whole.log_total, -jnp.inf)
        return _LogTotal(_log_sum_exp(log_totals), whole.dtype)

    def _whole(self, value: Any) -> _LogTotal:
        if isinstance(value, _LogTotal):
            return value
        dtype = accumulation_dtype("LogSumExp", value.dtype, self.dtype, inexact=True)
        is_integer = not jnp.issubdtype(value.dtype, jnp.inexact)
        return _LogTotal(value.astype(dtype), dtype if is_integer else value.dtype)


def _log_sum_exp(x: Inexact[Array, "n ..."]) -> Inexact[Array, "..."]:
    """`jax.nn.logsumexp` along axis 0, with derivative zero if all are `-inf`."""
    shift = _finite(lax.stop_gradient(jnp.max(jnp.real(x), axis=0)))
    return _log(jnp.sum(jnp.exp(x - shift.astype(x.dtype)[None]), axis=0), shift)


def _finite(shift: Array) -> Array:
    return jnp.where(jnp.isfinite(shift), shift, 0)


def _log(total: Inexact[Array, "*r"], shift: Array) -> Inexact[Array, "*r"]:
    """`log(total) + shift`, with derivative zero if the total is zero."""
    is_empty = total == 0
    log_total = jnp.log(jnp.where(is_empty, jnp.ones_like(total), total))
    log_total = log_total + shift.astype(total.dtype)
    return jnp.where(is_empty, jnp.asarray(-jnp.inf, total.dtype), log_total)
