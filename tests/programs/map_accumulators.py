"""Random accumulators, each beside what NumPy makes of all results."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax.microbatching import AccumulationType

from eqxbatch import (
    Concat,
    Last,
    LogSumExp,
    Max,
    Mean,
    Min,
    Sum,
    Variance,
)
from eqxbatch.results import MeanAndVariance
from .map_draw import Draw, expect, Expected, kind_of, Skip, widen


@dataclasses.dataclass
class Reduced:
    """An accumulator, and what it must return.

    - `numpy`: from the results of all examples, along axis 0.
    - `dense`: the same in JAX, for derivatives.
    - `refusal`: from a dtype and the number of examples, what must be raised, if so.
    - `is_odd`: whether it may be refused in favour of a number that is right.
    """

    accumulator: Any
    text: str
    numpy: Callable[[jax.Array], Any]
    dense: Callable[[jax.Array], Any]
    refusal: Callable[[Any, int], str]
    is_odd: Callable[[Any], bool] = lambda dtype: False


def _wide_sum(y: Any, weights: Any, wide: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Weighted results, their sum in `wide`, and what its error is relative to."""
    values = widen(y)
    if kind_of(y.dtype) in ("bool", "int"):
        values = values.astype(np.int64)
    if weights is not None:
        rows = np.asarray(weights)[: len(values)]
        if rows.dtype == bool:
            rows = rows.astype(np.int64)
        with np.errstate(all="ignore"):
            values = values * rows.reshape(-1, *[1] * (values.ndim - 1))
    with np.errstate(all="ignore"):
        total = values.sum(axis=0)
        finite = np.abs(np.where(np.isfinite(values), values, 0)).astype(float)
        scale = finite.sum(axis=0).max(initial=0)
    if jnp.issubdtype(wide, jnp.inexact):
        info = jnp.finfo(wide)
        if scale > float(info.max):
            raise Skip  # It depends on the order whether that is finite.
        if weights is not None and np.any((finite > 0) & (finite < float(info.tiny))):
            raise Skip  # It depends on the compiler whether that is zero.
    return values, total, float(scale)


def _accumulation(dtype: Any, requested: Any) -> Any:
    if requested is not None:
        return requested
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def _needs_numbers(dtype: Any, total: int) -> str:
    return "needs numbers" if kind_of(dtype) == "key" else ""


def _needs_floats(requested: Any, dtype: Any, total: int) -> str:
    if kind_of(dtype) == "key":
        return "needs numbers"
    is_exact = requested is None and kind_of(dtype) in ("bool", "int")
    return "needs floating-point or complex results" if is_exact else ""


def _needs_order(dtype: Any, total: int) -> str:
    return "needs ordered results" if kind_of(dtype) in ("key", "complex") else ""


def _draw_weights(
    draw: Draw, total: int, name: str, often: float = 0.35
) -> tuple[Any, str]:
    if not draw.flag(often):
        return None, ""
    kinds = ["float32", "int32", "bool", "float16", "zero", "tiny", "large"]
    if name == "Sum":
        kinds += ["negative", "complex64", "half"]
    kind = draw.one_of(*kinds)
    rng = draw.numbers()
    whole = rng.integers(1, 4, total)
    weights = {
        "float32": lambda: rng.uniform(0.5, 2, total).astype("float32"),
        "int32": lambda: whole.astype("int32"),
        "bool": lambda: np.arange(total) % 3 != 1,
        "float16": lambda: (whole / 2).astype("float16"),
        "zero": lambda: np.where(whole == 1, 0, whole).astype("float32"),
        "tiny": lambda: (whole * 1e-9).astype("float32"),
        "large": lambda: (whole * 1e6).astype("float32"),
        "negative": lambda: (-whole).astype("int32"),
        "complex64": lambda: (whole * 1j).astype("complex64"),
        "half": lambda: np.full(total, 0.5, "float32"),
    }[kind]()
    return jnp.asarray(weights), f"weights {kind}"


def _draw_dtype(draw: Draw, dtypes: list) -> Any:
    """A dtype to accumulate in that has room for the results."""
    if not draw.flag(0.25) or any(kind_of(d) in ("complex", "key") for d in dtypes):
        return None
    options = ["float32"]
    if jax.config.jax_enable_x64:
        options = ["float64"]
    elif all(kind_of(d) in ("bool", "int") for d in dtypes):
        options.append("int32")
    return draw.one_of(*options)


def draw_sum(draw: Draw, total: int, dtypes: list, often: float = 0.35) -> Reduced:
    """A sum, with weights as often as that."""
    weights, text = _draw_weights(draw, total, "Sum", often)
    requested = _draw_dtype(draw, dtypes)

    def dtype_of(y: Any) -> Any:
        if kind_of(y.dtype) not in ("bool", "int"):
            return y.dtype
        if requested is not None:
            return jnp.dtype(requested)
        own = jax.eval_shape(jnp.sum, y).dtype
        if weights is None or weights.dtype == jnp.bool_:
            return own
        if kind_of(weights.dtype) != "int":
            return _accumulation(weights.dtype, None)
        return own if own.kind == "i" else jnp.dtype(f"int{8 * own.itemsize}")

    def is_odd(dtype: Any) -> bool:
        """The result has another dtype than the weighted results need."""
        if weights is None:
            return False
        y = jax.ShapeDtypeStruct((), dtype)
        of_weights, result = kind_of(weights.dtype), kind_of(dtype_of(y))
        if of_weights == "complex":
            return result != "complex"
        return result == "int" and of_weights == "float"

    def numpy(y: Any) -> Any:
        if is_odd(y.dtype):
            _, values, scale = _wide_sum(y, weights, jnp.float32)
            return Expected(values, None, scale=scale)
        dtype = dtype_of(y)
        _, values, scale = _wide_sum(y, weights, _accumulation(dtype, requested))
        return Expected(values, dtype, scale=scale)

    def dense(y: Any) -> Any:
        if weights is not None:
            if jnp.iscomplexobj(weights) and not jnp.iscomplexobj(y):
                raise Skip  # Of another dtype than the results.
            if not jnp.issubdtype(y.dtype, jnp.inexact):
                raise Skip  # Integers with weights may be real numbers.
            largest = float(np.max(np.abs(np.asarray(weights))))
            if largest > float(jnp.finfo(y.dtype).max):
                raise Skip  # The product below overflows.
            y = y * weights[: len(y)].astype(y.dtype).reshape(-1, *[1] * (y.ndim - 1))
        return jnp.sum(y, axis=0)

    accumulator = Sum(weights=weights, dtype=requested)
    text = f"Sum({text}{f' dtype={requested}' if requested else ''})"
    return Reduced(accumulator, text, numpy, dense, _needs_numbers, is_odd)


def _mean(draw: Draw, total: int, dtypes: list) -> Reduced:
    weights, text = _draw_weights(draw, total, "Mean")
    requested = _draw_dtype(draw, dtypes)
    if requested == "int32":
        requested = "float32"

    def numpy(y: Any) -> Any:
        dtype = y.dtype
        if kind_of(dtype) in ("bool", "int"):
            dtype = jnp.dtype(requested)
        _, values, scale = _wide_sum(y, weights, _accumulation(dtype, requested))
        count = float(len(y))
        if weights is not None:
            count = np.asarray(weights)[: len(y)].astype(float).sum()
        with np.errstate(all="ignore"):
            return Expected(values / count, dtype, scale=scale / count if count else 1)

    def dense(y: Any) -> Any:
        if weights is None:
            return jnp.mean(y, axis=0)
        # In half precision, weights can vanish that are all the same here.
        rows = weights[: len(y)].astype(jnp.zeros(()).dtype)
        rows = (rows / jnp.sum(rows)).astype(y.dtype)
        return jnp.sum(y * rows.reshape(-1, *[1] * (y.ndim - 1)), axis=0)

    text = f"Mean({text}{f' dtype={requested}' if requested else ''})"
    accumulator = Mean(weights=weights, dtype=requested)
    refusal = functools.partial(_needs_floats, requested)
    return Reduced(accumulator, text, numpy, dense, refusal)


def _moments(y: Any) -> tuple[np.ndarray, float]:
    values = widen(y)
    with np.errstate(all="ignore"):
        # Divided first: a mean of numbers that are there is no larger than they are.
        mean = (values / max(len(values), 1)).sum(axis=0)
        if len(values) == 0:
            mean = np.full(values.shape[1:], np.nan)
        finite = np.abs(np.where(np.isfinite(values), values, 0))
    return mean, float(finite.max(initial=0))


def _running_mean(draw: Draw, total: int, dtypes: list) -> Reduced:
    def numpy(y: Any) -> Any:
        mean, scale = _moments(y)
        return Expected(mean, y.dtype, scale=scale)

    dense = lambda y: jnp.mean(y, axis=0)
    refusal = functools.partial(_needs_floats, None)
    return Reduced(Mean(running=True), "Mean(running=True)", numpy, dense, refusal)


def _variance(draw: Draw, total: int, dtypes: list) -> Reduced:
    ddof = draw.below(2)

    def numpy(y: Any) -> Any:
        mean, scale = _moments(y)
        values = widen(y)
        with np.errstate(all="ignore"):
            squares = np.abs(values - mean) ** 2
            count = len(values) - ddof
            variance = squares.sum(axis=0) / count if count > 0 else mean.real * np.nan
            std = np.sqrt(
                np.nanmax(np.where(np.isfinite(variance), variance, 0), initial=0)
            )
        largest = float(jnp.finfo(_accumulation(y.dtype, None)).max)
        if scale > (largest / 8 / max(len(y), 1)) ** 0.5:
            variance = None
        real = jnp.finfo(y.dtype).dtype
        return MeanAndVariance(
            Expected(mean, y.dtype, scale=scale),
            Expected(variance, real, scale=float(std**2 + scale * std)),
        )

    def dense(y: Any) -> Any:
        if len(y) <= ddof:
            raise Skip  # It is NaN, and so is its derivative, but for JAX.
        return MeanAndVariance(jnp.mean(y, axis=0), jnp.var(y, axis=0, ddof=ddof))

    refusal = functools.partial(_needs_floats, None)
    return Reduced(Variance(ddof=ddof), f"Variance({ddof})", numpy, dense, refusal)


def _log_sum_exp(draw: Draw, total: int, dtypes: list) -> Reduced:
    def numpy(y: Any) -> Any:
        values = widen(y)
        with np.errstate(all="ignore"):
            top = values.real.max(axis=0, initial=-np.inf)
            top = np.where(np.isfinite(top), top, 0)
            result = np.log(np.exp(values - top).sum(axis=0)) + top
        return Expected(result, y.dtype, scale=float(np.abs(top).max(initial=1)))

    dense = lambda y: jax.nn.logsumexp(y, axis=0)
    refusal = functools.partial(_needs_floats, None)
    return Reduced(LogSumExp(), "LogSumExp()", numpy, dense, refusal)


def _extreme(name: str, draw: Draw, total: int, dtypes: list) -> Reduced:
    accumulator, sign = (Max(), 1) if name == "Max" else (Min(), -1)

    def numpy(y: Any) -> Any:
        values = widen(y)
        if kind_of(y.dtype) == "bool":
            initial = sign < 0
        elif kind_of(y.dtype) == "int":
            info = jnp.iinfo(y.dtype)
            initial = info.min if sign > 0 else info.max
        else:
            initial = -sign * np.inf
        function = np.max if sign > 0 else np.min
        return Expected(function(values, axis=0, initial=initial), y.dtype)

    dense = lambda y: (jnp.max if sign > 0 else jnp.min)(y, axis=0)
    return Reduced(accumulator, f"{name}()", numpy, dense, _needs_order)


def _last(draw: Draw, total: int, dtypes: list) -> Reduced:
    refusal = lambda dtype, n: "Last needs at least one example" if n == 0 else ""

    def numpy(y: Any) -> Any:
        if len(y) == 0:
            raise Skip  # No microbatch ran.
        return Expected(widen(y)[-1], y.dtype)

    return Reduced(Last(), "Last()", numpy, lambda y: y[-1], refusal)


def _of_optax(draw: Draw, total: int, dtypes: list) -> Reduced:
    name = draw.one_of("SUM", "MEAN", "RUNNING_MEAN")
    of = {"SUM": Sum(), "MEAN": Mean(), "RUNNING_MEAN": Mean(running=True)}
    plain = Draw(0, [0] * 5)
    makers = {"SUM": draw_sum, "MEAN": _mean, "RUNNING_MEAN": _running_mean}
    reduced = makers[name](plain, total, dtypes)
    if type(reduced.accumulator) is not type(of[name]):
        raise AssertionError
    return dataclasses.replace(
        reduced, accumulator=getattr(AccumulationType, name), text=f"optax {name}"
    )


def _concat(draw: Draw, total: int, dtypes: list) -> Reduced:
    numpy = lambda y: expect(y)
    return Reduced(Concat(), "Concat()", numpy, lambda y: y, lambda dtype, n: "")


_MAKERS = (
    draw_sum,
    _concat,
    _mean,
    _running_mean,
    functools.partial(_extreme, "Max"),
    functools.partial(_extreme, "Min"),
    _log_sum_exp,
    _variance,
    _last,
    _of_optax,
)


def draw_accumulator(draw: Draw, total: int, dtypes: list) -> Reduced:
    """An accumulator for results of these dtypes."""
    for _ in range(3):
        reduced = draw.one_of(*_MAKERS)(draw, total, dtypes)
        if not any(reduced.refusal(dtype, total) for dtype in dtypes):
            break
        if draw.flag(0.1):
            break
    return reduced
