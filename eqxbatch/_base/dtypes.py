"""Dtypes of sums, scaling against overflow, and complex numbers as pairs."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from .branches import is_any
from .jaxpr_types import DType, Value
from .trees import safe_zip


def widened(x: Array) -> Array:
    """`x` in the dtype in which its sums are accumulated."""
    return x.astype(accumulation_dtype("Sum", x.dtype, None, inexact=False))


def widest(*dtypes: Any) -> np.dtype:
    """The real dtype with the most digits among these, and at least float32."""
    reals = [jnp.finfo(dtype).dtype for dtype in dtypes]
    return max((jnp.dtype(jnp.float32), *reals), key=operator.attrgetter("itemsize"))


def common_dtype(*dtypes: Any) -> Any:
    """The dtype that can hold all of these, independent of the promotion setting.

    JAX promotes no dtype of fewer than 16 bits: with others, it counts as float32.
    """
    if len({*map(jnp.dtype, dtypes)}) > 1:
        is_narrow = lambda x: jnp.issubdtype(x, jnp.floating) and jnp.finfo(x).bits < 16
        dtypes = tuple(jnp.float32 if is_narrow(x) else x for x in dtypes)
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def accumulation_dtype(
    name: str, dtype: DType, requested: DTypeLike | None, *, inexact: bool
) -> Any:
    """The dtype in which results of `dtype` are accumulated.

    Raises `TypeError` if `dtype` has no sum and, with `inexact`, if results are
    integers and no dtype was requested. Raises `TypeError` or `ValueError` for a
    requested dtype that would drop the imaginary part, or that JAX would silently
    narrow.
    """
    # PRNG keys, for one, have no sum.
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        raise TypeError(
            f"{name} needs numbers, but `fun` returned {dtype}. Use Concat or Last for "
            "this output: `accumulator` takes a PyTree prefix of the output."
        )
    # What JAX would do to a requested dtype without a word is an error.
    if requested is not None:
        requested = jnp.dtype(requested)
        if jax.dtypes.canonicalize_dtype(requested) != requested:
            raise ValueError(
                f"{name}(dtype={requested}) needs 64-bit mode, which is off. Set "
                "`jax.config.update('jax_enable_x64', True)`, or ask for 32 bits."
            )
        check_fits(name, requested, dtype, "that `fun` returned")
        dtype = requested
    # Sums of many narrow numbers lose digits.
    elif jnp.issubdtype(dtype, jnp.floating):
        dtype = widest(dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{name} needs floating-point or complex results, but `fun` returned "
            f"{dtype}. Cast it in `fun`, or pass `{name}(dtype=jnp.float32)`."
        )
    return dtype


def check_fits(name: str, requested: DType, dtype: DType, what: str) -> None:
    """Raises `TypeError` if a requested dtype cannot hold numbers of `dtype`."""
    # The dtypes that have a part of a number, and those that can hold it.
    kinds = {
        "the imaginary part": (jnp.complexfloating, (jnp.complexfloating,)),
        "the fractional part": (jnp.inexact, (jnp.inexact,)),
        "the sign": (jnp.signedinteger, (jnp.signedinteger, jnp.inexact)),
    }
    for part, (kind, holds) in kinds.items():
        if jnp.issubdtype(dtype, kind) and not any(
            jnp.issubdtype(requested, other) for other in holds
        ):
            raise TypeError(
                f"{name}(dtype={requested}) would drop {part} of the {dtype} {what}. "
                "Ask for a dtype that has it, or for none."
            )


def power_of_two(x: Real[Array, "*s"]) -> Real[Array, "*s"]:
    """The largest power of two up to `x`, and 1 where there is none.

    Division by it is exact, and it has no derivative.
    """
    info = jnp.finfo(x.dtype)
    # Compilers divide by multiplying with the inverse, which must not underflow.
    exponent = jnp.minimum(exponent_of(x), int(info.maxexp) - 2)
    return jnp.where((x >= info.tiny) & jnp.isfinite(x), _two_to(exponent, x.dtype), 1)


def common_power_of_two(arrays: Sequence[Real[Array, "*s"]]) -> Real[Array, "*s"]:
    """The largest power of two up to the largest of some numbers, entry by entry."""
    dtype = widest(*(x.dtype for x in arrays))
    return power_of_two(
        functools.reduce(jnp.maximum, (x.astype(dtype) for x in arrays))
    )


def exponent_of(x: Real[Array, "*s"]) -> Int[Array, "*s"]:
    """The exponent of the largest power of two up to `x`, which is not negative."""
    info = jnp.finfo(x.dtype)
    # A float that is not negative is its exponent, plus an offset, and then its digits.
    bits = lax.bitcast_convert_type(x, f"uint{info.bits}")
    bits = lax.shift_right_logical(bits, jnp.asarray(info.nmant, bits.dtype))
    return bits.astype("int32") - (int(info.maxexp) - 1)


def _two_to(exponent: Int[Array, "*s"], dtype: DType) -> Real[Array, "*s"]:
    """`2**exponent`, or the nearest power of two that is a number of the dtype."""
    info = jnp.finfo(dtype)
    most = int(info.maxexp) - 1
    least, largest = (jnp.asarray(x, exponent.dtype) for x in (info.minexp, most))
    # The same bits, with zeros for digits.
    bits = (lax.clamp(least, exponent, largest) + most).astype(f"uint{info.bits}")
    bits = lax.shift_left(bits, jnp.asarray(info.nmant, bits.dtype))
    return lax.bitcast_convert_type(bits, dtype)


def times_two_to(x: Real[Array, "*s"], exponent: Int[Array, "*s"]) -> Real[Array, "*s"]:
    """`x * 2**exponent`, also if the power of two is no number of the dtype."""
    # Each of two factors is a number of the dtype, where one would be out of range.
    half = exponent >> 1
    return x * _two_to(half, x.dtype) * _two_to(exponent - half, x.dtype)


def _times_four_to(
    x: Real[Array, "*s"], exponent: Int[Array, "*s"]
) -> Real[Array, "*s"]:
    root = _two_to(exponent, x.dtype)
    return x * root * root


def largest_of_each(x: Inexact[Array, "n ..."]) -> Real[Array, " n"]:
    """The largest absolute value of each example; zero if there are no entries."""
    x = jnp.abs(widened(x))
    return jnp.max(x, axis=tuple(range(1, x.ndim)), initial=0)


def scaled_examples(x: Inexact[Array, "n ..."], by: Real[Array, " n"]) -> Array:
    """Each example times its own number, in at least float32."""
    x = x.astype(common_dtype(x.dtype, by.dtype))
    return x * jnp.expand_dims(by, range(1, x.ndim)).astype(x.dtype)


def squared_norm(
    gradient: Inexact[Array, "n ..."], first: int = 1
) -> Real[Array, "n ..."]:
    """The squared norm of each per-example gradient, in at least float32.

    Squares are summed over the axes from the `first` on.
    """
    gradient = widened(gradient)
    squares = jnp.real(gradient * jnp.conj(gradient))
    return jnp.sum(squares, axis=tuple(range(first, squares.ndim)))


class Squares(NamedTuple):
    """The squares `value * 4**exponent`, of numbers of any size."""

    value: Real[Array, "*s"]
    exponent: Int[Array, "*s"]

    def plus(self, other: "Squares") -> "Squares":
        """The sum, if the exponents are equal."""
        dtype = widest(self.value.dtype, other.value.dtype)
        value = self.value.astype(dtype) + other.value.astype(dtype)
        return Squares(value, self.exponent)

    @property
    def number(self) -> Real[Array, "*s"]:
        """The squares as numbers of the dtype, some of which may be out of range."""
        return _times_four_to(self.value, self.exponent)


def is_in_range(square: Real[Array, "*s"]) -> Bool[Array, "*s"]:
    """Whether no relevant square in these sums has underflowed or overflowed."""
    info = jnp.finfo(square.dtype)
    # Beside a sum of this size, squares that underflow change no digit.
    least = float(info.tiny) / float(info.eps) ** 2
    return (square >= least) & jnp.isfinite(square)


class Scale(NamedTuple):
    """A power of two that numbers are multiplied by, `2**-exponent`."""

    factor: Real[Array, "*s"]
    exponent: Int[Array, "*s"]


def into_range(square: Real[Array, "*s"]) -> Scale:
    """The scale of numbers that brings the sum of their squares into range."""
    up, down = _factors_into_range(square.dtype)
    factor = jnp.where(square < 1, up, down)
    factor = jnp.where(is_in_range(square), 1, factor).astype(square.dtype)
    return Scale(factor, -exponent_of(factor))


class _FactorsIntoRange(NamedTuple):
    """What squares that are too small, or too large, are multiplied by."""

    up: float
    down: float


def _factors_into_range(dtype: DType) -> _FactorsIntoRange:
    most = int(jnp.finfo(dtype).maxexp)
    # Compilers may square the first one separately, so this must not overflow.
    return _FactorsIntoRange(2.0 ** (most // 2 - 1), 2.0 ** -(5 * most // 8))


def scaled_squares(x: Inexact[Array, "n ..."], scale: Scale) -> Squares:
    """The squared norm of each example, from numbers times a power of two."""
    return Squares(squared_norm(scaled_examples(x, scale.factor)), scale.exponent)


def squares_in_range(arrays: Sequence[Inexact[Array, "_ ..."]]) -> list[Squares]:
    """The squared norm of each example of some arrays, whatever its size, in one pass.

    The entries are squared as they are, scaled up, and scaled down. Values are from 1
    to 4, or zero, so that they can be multiplied.
    """
    norms = [*map(_norms_of_scaled, arrays)]
    alike: dict[tuple, list[int]] = {}
    for i, (plain, *_) in enumerate(norms):
        alike.setdefault((plain.dtype, plain.shape), []).append(i)
    squares: dict[int, Squares] = {}
    # All at once, because programs with many small arrays take long to compile.
    for members in alike.values():
        plain, small, large = map(jnp.stack, safe_zip(*(norms[i] for i in members)))
        up, down = _factors_into_range(plain.dtype)
        is_plain, is_small = is_in_range(plain), plain < 1
        value = jnp.where(is_plain, plain, jnp.where(is_small, small, large))
        scaled = jnp.where(is_small, -int(math.log2(up)), -int(math.log2(down)))
        half = _half_exponent(value)
        exponent = half + jnp.where(is_plain, 0, scaled).astype("int32")
        pairs = map(Squares, _times_four_to(value, -half), exponent)
        squares.update(safe_zip(members, pairs))
    return [squares[i] for i, _ in enumerate(norms)]


def _norms_of_scaled(x: Inexact[Array, "n ..."]) -> list[Real[Array, " n"]]:
    """The squared norm of each example as it is, scaled up, and scaled down."""
    x = widened(x)
    x = jnp.abs(x) if is_complex(x) else x
    up, down = _factors_into_range(x.dtype)
    # Derivatives multiply what is not chosen by zero, so it must be finite.
    small = jnp.clip(x * up, -up, up)
    return [*map(squared_norm, (x, small, x * down))]


def sum_of_squares(terms: Sequence[Squares]) -> Squares:
    """The sum. Values whose exponents are the same array must have one in range."""
    # What has the same exponents adds up as it is, without another scaling.
    alike: dict[int, Squares] = {}
    for x in terms:
        other = alike.get(id(x.exponent))
        alike[id(x.exponent)] = x if other is None else other.plus(x)
    terms = [*alike.values()]
    dtype = widest(*(x.value.dtype for x in terms))
    values, exponents = (
        jnp.stack(jnp.broadcast_arrays(*x))
        for x in safe_zip(*((x.astype(dtype), exponent) for x, exponent in terms))
    )
    small = jnp.asarray(-(2**20), "int32")  # So is zero.
    sizes = jnp.where(values > 0, exponents + _half_exponent(values), small)
    largest = jnp.max(sizes, axis=0)
    parts = _times_four_to(values, exponents - largest[None])
    return Squares(jnp.sum(parts, axis=0), largest)


def product_of_squares(terms: Sequence[Squares]) -> Squares:
    """The product of squares with values from 1 to 4."""
    dtype = widest(*(x.value.dtype for x in terms))
    values, exponents = safe_zip(*terms)
    wide = (x.astype(dtype) for x in values)
    multiply, add = jnp.multiply, jnp.add
    return Squares(functools.reduce(multiply, wide), functools.reduce(add, exponents))


def _half_exponent(x: Real[Array, "*s"]) -> Int[Array, "*s"]:
    return exponent_of(x) >> 1


_MOST_GROUPS = 8


def size_groups(sizes: list[int], least: int) -> list[list[int]]:
    """Groups of consecutive sizes, each about an eighth of the total, or `least`."""
    most = max(sum(sizes) // _MOST_GROUPS, least)
    groups: list[list[int]] = []
    for i, size in enumerate(sizes):
        if groups and sum(sizes[k] for k in groups[-1]) + size <= most:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def is_inexact(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def weighted_totals(
    sums: Callable[[Array | None, float], Sequence[Inexact[Array, "..."]]],
    num: int,
    weights: Array | None,
    is_narrow: bool,
) -> list[Inexact[Array, "..."]]:
    """Sums of `num` terms, in at least float32 and without overflow.

    `sums(weights, share)` are the weighted sums, times a number. Weights are scaled
    first, so that the range of the dtype of the terms does not matter. If the program
    `is_narrow`, which means that it uses float16, a sum can overflow although the mean
    does not. The terms are then scaled down first. This is not always done, because
    small terms would underflow.
    """
    scale = None
    if weights is not None:
        # Weights of at most one cannot cause overflow of cotangents in a backward pass.
        dtype = weights.dtype if is_inexact(weights) else jnp.result_type(float)
        weights = weights.astype(widest(dtype))
        scale = 2 * power_of_two(jnp.max(jnp.abs(weights), initial=0))
        weights = weights / scale
    totals = [widened(x) for x in sums(weights, 1.0)]
    if is_narrow and num > 1:
        wide, most = totals, 2.0 ** (num - 1).bit_length()

        def smaller() -> list[Array]:
            # Terms times `1 / most` add up to no more than the largest of them.
            shares = [widened(x) * most for x in sums(weights, 1 / most)]
            pairs = safe_zip(wide, shares)
            # Only what overflowed, because small terms may underflow in a share.
            return [jnp.where(jnp.isfinite(x), x, share) for x, share in pairs]

        are_infinite = [jnp.any(~jnp.isfinite(x)) for x in wide]
        totals = lax.cond(is_any(jnp.stack(are_infinite)), smaller, lambda: wide)
    return totals if scale is None else [x * scale.astype(x.dtype) for x in totals]


class _RealAndImaginary(eqx.Module):
    """The real and the imaginary part of an array."""

    real: Array
    imag: Array


def is_complex(x: Value) -> bool:
    """Whether an array or struct has a complex dtype."""
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def as_real(tree: PyTree) -> PyTree:
    """Replaces each complex array by two real leaves."""
    split = lambda x: _RealAndImaginary(jnp.real(x), jnp.imag(x))
    return jtu.tree_map(
        lambda x: split(x) if eqx.is_array(x) and is_complex(x) else x, tree
    )


def as_complex(tree: PyTree) -> PyTree:
    """The inverse of `as_real`."""
    is_split = lambda x: isinstance(x, _RealAndImaginary)
    return jtu.tree_map(
        lambda x: lax.complex(x.real, x.imag) if is_split(x) else x,
        tree,
        is_leaf=is_split,
    )


def reachable_rtol(dtype: DTypeLike) -> float:
    """What relative residuals of an iterative solver can reach, for most matrices."""
    if np.dtype(dtype) == np.float64:
        return 1e-6
    return min(1_000 * float(jnp.finfo(dtype).eps), 0.01)
