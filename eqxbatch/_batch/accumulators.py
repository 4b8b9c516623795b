"""Accumulators: how the results of microbatches are combined.

Sums and moments are exact with a remainder and after an early stop.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Array, PyTree, Shaped

from .._base.mesh import spec_of, with_type_of
from .._base.types import check_fields
from .arguments import Dtype, Primals, Tangents, Typed
from .blocks import are_split, Block, Blocks, merge_parts, split_parts


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

    Class attributes say what else an accumulator can do:

    - `leafwise`: by default, it is applied to each array of the output separately. With
        `leafwise = False`, it is applied to the whole sub-PyTree at its place instead,
        as optax's accumulators are.
    - `counts_new`: whether `aggregate` counts no example twice if two microbatches have
        it: it takes the new ones from `block.new` and their number from
        `block.num_new`. Then a remainder can run as a full microbatch that overlaps the
        one before it, which saves a program. Each class says this for itself, because
        another `aggregate` can break it.
    - `one_shape`: whether the results of all microbatches must have one shape. A
        remainder with another shape, which might be broadcast, then raises.
    - `of_equal`: whether the result for equal numbers is that number. Python numbers in
        an output then stay as they are; otherwise, they raise.
    - `of_last`: whether the result is that of the last microbatch, as it is. If none
        runs, there is no such result, which raises.
    - `keeps_weak`: whether a result is weakly typed if that of a microbatch is. It must
        be an array.
    - `state_as`: how an array in an `equinox.nn.State` is accumulated: `"itself"`, by
        this accumulator; or `"mean"`, by the mean of floats and the last of all others.

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
    counts_new: ClassVar[bool] = False
    one_shape: ClassVar[bool] = False
    of_equal: ClassVar[bool] = False
    of_last: ClassVar[bool] = False
    keeps_weak: ClassVar[bool] = False
    state_as: ClassVar[Literal["itself", "mean"]] = "itself"

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

    counts_new: ClassVar[bool] = True
    of_equal: ClassVar[bool] = True
    keeps_weak: ClassVar[bool] = True
    state_as: ClassVar[Literal["itself", "mean"]] = "mean"

    axis: int = eqx.field(static=True, default=0)

    __check_init__ = check_fields

    def init(self, value: _Struct, blocks: Blocks) -> Shaped[Array, "..."]:
        axis = self.axis_of(value)
        extent = self.extent(value, blocks)
        shape = (*value.shape[:axis], extent, *value.shape[axis + 1 :])
        # A loop carries it, so it begins with the sharding that values have.
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
        # `[..., parts, rows of a part, ...]`: each device writes to its own part.
        is_split = are_split(value, axis, parts)
        if is_split:
            state = split_parts(state, axis, parts)
            value = split_parts(value, axis, parts)
            axis += 1
        # Full microbatches have equal numbers of rows; a remainder has the last ones.
        rows = value.shape[axis]
        start = state.shape[axis] - rows if block.is_remainder else block.index * rows
        # No start is negative: nothing has to be selected in each step.
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

    def extent(self, value: Typed, blocks: Blocks) -> int:
        """The number of rows of the result, from the value of a full microbatch."""
        rows = value.shape[self.axis_of(value)]
        # A result with as many rows as examples (or a multiple) scales with the size;
        # any other number of rows is the same for every microbatch.
        per_example, per_block = divmod(rows, blocks.size)
        return rows * blocks.num if per_block else per_example * blocks.total

    def parts_of(self, value: Typed, block: Block) -> int:
        """The parts that the rows of a value come from; 1 if rows are not examples."""
        rows = value.shape[self.axis_of(value)]
        return 1 if rows % block.size else block.parts

    def axis_of(self, value: Typed) -> int:
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

    counts_new: ClassVar[bool] = True
    of_equal: ClassVar[bool] = True
    of_last: ClassVar[bool] = True
    keeps_weak: ClassVar[bool] = True

    def init(self, value: _Struct, blocks: Blocks) -> Shaped[Array, "..."]:
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
        examples, *of_example = spec_of(values)
        if examples is not None:
            # JAX cannot slice one row out of an explicitly sharded axis.
            values = reshard(values, PartitionSpec(None, *of_example))
        return values[-1]


class _Extreme(eqx.Module):
    """The largest or smallest result of some examples, and how many attain it."""

    value: Any
    count: Any


class AbstractExtreme(AbstractAccumulator[_Extreme]):
    """The largest or smallest result. Before the first one, it is `sign` times inf."""

    # No example counts twice in the value, but it does in `count`, which says how the
    # derivative is shared among the examples that attain it: `counts_new` is False.
    one_shape: ClassVar[bool] = True
    of_equal: ClassVar[bool] = True
    state_as: ClassVar[Literal["itself", "mean"]] = "mean"

    sign: ClassVar[int]

    @staticmethod
    @abc.abstractmethod
    def pick(x: Array, y: Array, /) -> Array:
        """The elementwise larger or smaller of two results."""

    def init(self, value: _Struct | _Extreme, blocks: Blocks) -> _Extreme:
        struct = value.value if isinstance(value, _Extreme) else value
        # Any first result takes the place of it, and it adds no example to the count.
        identity = _before_any(type(self).__name__, struct.dtype, self.sign)
        extreme = jnp.full(struct.shape, identity, struct.dtype)
        return _Extreme(extreme, jnp.zeros(struct.shape, jnp.int32))

    def update(
        self, state: _Extreme, value: _Extreme | Shaped[Array, "*r"], block: Block
    ) -> _Extreme:
        if not isinstance(value, _Extreme):
            value = _Extreme(value, jnp.ones(value.shape, jnp.int32))
        picked = self.pick(state.value, value.value)
        # A side that is not the extreme adds none of its examples; at a tie, both do.
        counts = [jnp.where(x.value == picked, x.count, 0) for x in (state, value)]
        count = counts[0] + counts[1]
        if jnp.issubdtype(picked.dtype, jnp.inexact):
            # All examples that attain the extreme share the derivative equally. In
            # float32, because float16 does not have all counts beyond 2,048.
            share = counts[0].astype(jnp.float32) / count.astype(jnp.float32)
            picked = _shared(
                self.pick, state.value, value.value, share.astype(picked.dtype)
            )
        return _Extreme(picked, count)

    def finalize(self, state: _Extreme) -> Shaped[Array, "*r"]:
        return state.value

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> _Extreme:
        _before_any(type(self).__name__, values.dtype, self.sign)
        extreme = values.max(axis=0) if self.sign < 0 else values.min(axis=0)
        if jnp.issubdtype(values.dtype, jnp.inexact):
            # XLA for CPUs drops NaN where it reduces some thousand numbers, with JAX
            # 0.12 (https://github.com/openxla/xla/issues/21461 is of its kind).
            has_nan = jnp.any(jnp.isnan(values), axis=0)
            extreme = extreme * jnp.where(has_nan, jnp.nan, 1).astype(extreme.dtype)
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
    # The gap is 0, and its tangent is `t_y - t_x`: the result has the tangent
    # `share * t_x + (1 - share) * t_y`. A gap of infinities would be NaN.
    is_tie = (x == y) & jnp.isfinite(x)
    gap = jnp.where(is_tie, y, 0) - jnp.where(is_tie, x, 0)
    return jnp.where(is_tie, x + (1 - share) * gap, _picked(pick, x, y, share))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _picked(pick: Callable, x: Array, y: Array, share: Array) -> Array:
    """`pick(x, y)`, with a derivative in which `x` has weight `share`."""
    del share
    return pick(x, y)


@_picked.defjvp
def _picked_jvp(pick: Callable, primals: Primals, tangents: Tangents) -> tuple:
    x, y, share = primals
    t_x, t_y, _ = tangents
    # Unless both tie, `share` is 0 or 1: the tangent is that of the one picked.
    return pick(x, y), share * t_x + (1 - share) * t_y


def _before_any(name: str, dtype: Dtype, sign: int) -> Any:
    """The last number of a dtype in a direction: `sign` times inf, if it has that."""
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
