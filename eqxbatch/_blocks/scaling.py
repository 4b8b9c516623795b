"""Numbers brought to a size at which their sums and squares are in range."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Real

from .accumulators import common_dtype, widened, widest


def power_of_two(x: Real[Array, "*s"]) -> Real[Array, "*s"]:
    """The power of two next to `x` from below, and 1 where there is none.

    To divide by it rounds nothing, and it has no derivative.
    """
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, f"uint{info.bits}")
    shift = jnp.asarray(info.nmant, bits.dtype)
    bits = lax.shift_left(lax.shift_right_logical(bits, shift), shift)
    power = lax.bitcast_convert_type(bits, x.dtype)
    # Compilers divide by multiplying with the inverse, which must not vanish.
    power = jnp.minimum(power, 2.0 ** (info.maxexp - 2))
    return jnp.where((x > 0) & jnp.isfinite(x) & (power > 0), power, 1)


def largest_of_each(x: Inexact[Array, "n ..."]) -> Real[Array, " n"]:
    """The largest absolute value of each example, zero where there is no entry."""
    x = jnp.abs(widened(x))
    return jnp.max(x, axis=tuple(range(1, x.ndim)), initial=0)


def scaled_examples(x: Inexact[Array, "n ..."], by: Real[Array, " n"]) -> Array:
    """That of each example times a number of its own, in float32 at least."""
    x = x.astype(common_dtype(x.dtype, by.dtype))
    return x * jnp.expand_dims(by, range(1, x.ndim)).astype(x.dtype)


def squared_norm(gradient: Inexact[Array, "n ..."]) -> Real[Array, " n"]:
    """The squared norm of each example's gradient, in float32 at least."""
    gradient = widened(gradient)
    squares = jnp.real(gradient * jnp.conj(gradient))
    return jnp.sum(squares, axis=tuple(range(1, squares.ndim)))


def is_in_range(square: Real[Array, "*s"]) -> Bool[Array, "*s"]:
    """Whether no square that counts has vanished in these sums, or has overflowed."""
    info = jnp.finfo(square.dtype)
    least = float(info.tiny) / float(info.eps) ** 2
    return (square >= least) & jnp.isfinite(square)


def into_range(square: Real[Array, "*s"]) -> Real[Array, "*s"]:
    """What to multiply numbers with so that such a sum of their squares is in range."""
    most = jnp.finfo(square.dtype).maxexp
    # Compilers may square the first of these alone, so that must not overflow.
    small, large = 2.0 ** (most // 2 - 1), 2.0 ** -(5 * most // 8)
    factor = jnp.where(square < 1, small, large)
    return jnp.where(is_in_range(square), 1, factor).astype(square.dtype)


def normalised(weights: Real[Array, " n"]) -> tuple[Array, Array]:
    """Weights that no backward pass overflows with, and what they were divided by.

    They are one at most, so that no cotangent overflows by its weight.
    """
    wide = weights.astype(widest(*[weights.dtype] * is_inexact(weights)))
    scale = 2 * power_of_two(jnp.max(jnp.abs(wide), initial=0))
    return wide / scale, scale


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def finite_sums(
    found: Sequence[Inexact[Array, "..."]],
    sums_of: Callable[[float], Sequence[Inexact[Array, "..."]]],
    num: int,
    is_narrow: bool,
) -> list[Inexact[Array, "..."]]:
    """Sums of `num` terms, in float32 at least.

    `found` are these sums as they come out, and `sums_of(share)` those of the terms
    times a number. Where the program `is_narrow`, which means that it uses float16, a
    sum can overflow though the mean does not: it is then taken of smaller terms. That
    is not done at once, as small terms would vanish.
    """
    wide = [widened(x) for x in found]
    if not is_narrow or num == 1:
        return wide
    most = 2.0 ** (num - 1).bit_length()

    def smaller() -> list[Array]:
        others = [widened(x) * most for x in sums_of(1 / most)]
        return [
            jnp.where(jnp.isfinite(x), x, other)
            for x, other in zip(wide, others, strict=True)
        ]

    are_finite = [jnp.all(jnp.isfinite(x)) for x in wide]
    return lax.cond(jnp.all(jnp.stack(are_finite)), lambda: wide, smaller)
