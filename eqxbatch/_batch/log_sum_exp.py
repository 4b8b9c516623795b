"""The accumulator `LogSumExp`, whose exponentials may be out of range."""

from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PyTree, Shaped

from .._base.dtypes import accumulation_dtype, widened
from .._base.types import check_fields
from .accumulators import AbstractAccumulator
from .blocks import Block, Blocks
from .sums import most_parts, Total


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

    counts_new: ClassVar[bool] = True
    one_shape: ClassVar[bool] = True
    state_as: ClassVar[Literal["itself", "mean"]] = "mean"

    dtype: DTypeLike | None = eqx.field(static=True, default=None)

    __check_init__ = check_fields

    def init(self, value: PyTree, blocks: Blocks) -> _Exponentials:
        value = jax.eval_shape(self._whole, value)
        # Not even in half precision do sums overflow.
        total = widened(jnp.zeros(value.log_total.shape, value.log_total.dtype))
        shift = jnp.full_like(total.real, -jnp.inf)
        return _Exponentials(
            shift, Total(total, None, value.dtype).before(most_parts(blocks))
        )

    def update(
        self, state: _Exponentials, value: _LogTotal | Shaped[Array, "*r"], block: Block
    ) -> _Exponentials:
        x = widened(self._whole(value).log_total)
        # The result does not depend on the shift, so that its derivative is left out.
        size = lax.stop_gradient(x.real)
        finite = jnp.where(jnp.isfinite(size), size, -jnp.inf)
        # A new shift only where exponentials would exceed `exp(8)`: each one rounds.
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
        # A complex `dtype` for real results adds an imaginary part, which they lack.
        is_real = not jnp.issubdtype(sums.dtype, jnp.complexfloating)
        return (log_total.real if is_real else log_total).astype(sums.dtype)

    def aggregate(self, values: Shaped[Array, "b *r"], block: Block) -> _LogTotal:
        whole = self._whole(values)
        # The exponential of `-inf` is 0: repeated examples add nothing.
        log_totals = block.new(whole.log_total, -jnp.inf)
        return _LogTotal(_log_sum_exp(log_totals), whole.dtype)

    def _whole(self, value: Array | _LogTotal) -> _LogTotal:
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
    """The shift, or 0 where there is none: `inf - inf` would be NaN."""
    return jnp.where(jnp.isfinite(shift), shift, 0)


def _log(total: Inexact[Array, "*r"], shift: Array) -> Inexact[Array, "*r"]:
    """`log(total) + shift`, with derivative zero if the total is zero."""
    is_empty = total == 0
    # Of `log(0)`, the derivative is infinite, and times 0 it would be NaN.
    log_total = jnp.log(jnp.where(is_empty, jnp.ones_like(total), total))
    log_total = log_total + shift.astype(total.dtype)
    return jnp.where(is_empty, jnp.asarray(-jnp.inf, total.dtype), log_total)
