"""Random calls of `filter_micro_value_and_grad`, against single gradients."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from eqxbatch import (
    filter_micro_grad,
    filter_micro_value_and_grad,
    Mean,
    Projection,
    Sum,
)
from eqxbatch.results import GradientMoments, GradientStatistics
from .map_draw import (
    Case,
    Draw,
    draw_dtype,
    draw_placing,
    draw_size,
    draw_total,
    Expected,
    widen,
)


class Model(eqx.Module):
    """Parameters, one of which is used twice, and what is not differentiated."""

    w: Any
    b: Any
    scale: Any
    steps: Any
    name: str = eqx.field(static=True, default="model")


def _dot(model: Model, x: Any) -> Any:
    """The gradient in `w` is `x` itself."""
    return jnp.sum(model.w[0] * x) + model.b[0]


def _tanh(model: Model, x: Any) -> Any:
    hidden = jnp.tanh(model.w @ x + model.b) * model.scale
    return jnp.sum(hidden**2 + model.b * hidden)


def _positions(model: Model, x: Any) -> Any:
    """A weight that is used at several positions."""
    rows = jnp.stack([x, x * 2, jnp.flip(x)])
    return jnp.sum(jnp.sin(rows @ model.w.T + model.b[None])) * model.scale


def _table(model: Model, x: Any) -> Any:
    at = (jnp.abs(x) > 1).astype(jnp.int32)
    return jnp.sum(model.w[at].astype(x.dtype) ** 2) + jnp.sum(model.b * x[:2])


def _looped(model: Model, x: Any) -> Any:
    step = lambda state, _: (jnp.tanh(model.w[:, :2] @ state + model.b), None)
    return jnp.sum(jax.lax.scan(step, x[:2], None, 3)[0]) * model.scale


_LOSSES = {
    "tanh": _tanh,
    "dot": _dot,
    "positions": _positions,
    "table": _table,
    "looped": _looped,
}
_DTYPES = ("float32", "float64", "float16", "bfloat16")


def _model(rng: Any, dtype: str, scale: float) -> Model:
    array = lambda *shape: jnp.asarray(rng.normal(size=shape) * scale).astype(dtype)
    return Model(array(2, 3), array(2), array(), jnp.arange(3))


def _draw_accumulator(draw: Draw, total: int) -> tuple[Any, str, Any]:
    """An accumulator, its description, and its weights as NumPy has them."""
    kind = draw.one_of("Mean", "Sum", "running", "weights", "weights", "weights")
    if kind != "weights":
        return (
            Sum() if kind == "Sum" else Mean(running=kind == "running"),
            kind,
            None,
        )
    name = draw.one_of("float32", "int32", "bool", "tiny", "large", "zero", "int8")
    whole = draw.numbers().integers(1, 5, total)
    weights = {
        "float32": (whole / 3).astype("float32"),
        "int32": whole.astype("int32"),
        "int8": (whole * 20).astype("int8"),
        "bool": whole != 1,
        "tiny": (whole * 1e-9).astype("float32"),
        "large": (whole * 1e6).astype("float32"),
        "zero": np.where(whole == 1, 0, whole).astype("float32"),
    }[name]
    kind = draw.one_of(Mean, Sum)
    text = f"{kind.__name__}({name} weights)"
    return kind(weights=jnp.asarray(weights)), text, weights.astype(float)


def _draw_bounds(draw: Draw, size: float) -> tuple[Any, Any, str]:
    """`clip_norm`, the bounds of `w`, `b` and `scale` by group, and a description."""
    size = size or 1.0
    forms = ("none", "float", "int", "jax", "numpy", "numpy scalar", "by part", "some")
    form = draw.one_of(*forms)
    if form == "none":
        return None, None, ""
    bound = draw.one_of(1.0, 0.3, 3.0, 0.0) * size
    if form == "int":
        bound = 1
    given = {
        "jax": lambda: jnp.asarray(bound),
        "numpy": lambda: np.array(bound),
        "numpy scalar": lambda: np.float32(bound),
    }.get(form, lambda: bound)()
    if form not in ("by part", "some"):
        bound = float(given)
        return given, [((0, 1, 2), bound)], f" clip_norm={bound:g} ({form})"
    second = None if form == "some" else 2 * bound
    tree = Model(bound, second, jnp.asarray(bound) if form == "by part" else None, None)
    bounds = [
        ((0,), bound),
        ((1,), second),
        ((2,), bound if form == "by part" else None),
    ]
    return tree, bounds, f" clip_norm by part {bound:g}, {second}"


def _norms(each: list[np.ndarray], members: tuple) -> np.ndarray:
    """Of each example; scaled first, so that nothing overflows."""
    flat = [np.abs(each[i]).reshape(len(each[i]), -1) for i in members]
    flat = np.concatenate(flat, axis=1)
    top = flat.max(axis=1, initial=0, keepdims=True)
    scale = np.where((top > 0) & np.isfinite(top), top, 1)
    return scale[:, 0] * np.sqrt(((flat / scale) ** 2).sum(axis=1))


def draw_gradients(draw: Draw) -> Case:
    """A loss, how gradients are clipped and accumulated, and what is asked besides."""
    total = max(draw_total(draw), 1)
    often = 0.2
    if draw.flag(0.1):
        # More than an int8 can count.
        total, often = 150, 0.7
    size = draw_size(draw, total)
    placing = draw_placing(draw, 0.15)
    dtype = draw_dtype(draw, _DTYPES)
    name, loss = draw.one_of(*_LOSSES.items())
    # Half precision has few large numbers, so that sums are larger than all of them.
    power = draw.one_of(0, 0, 0, 3, 20, -24) if name == "dot" else 0
    if draw.flag(0.1):
        name, loss, dtype, power = "dot", _dot, "float16", 4
        total = max(total, 12)
    if dtype == "float16":
        power = min(max(power, -3), 4)
    rng = draw.numbers()
    x = jnp.asarray((np.abs(rng.normal(size=(total, 3))) + 0.5) * 10.0**power)
    x = x.astype(dtype)
    model = _model(rng, dtype, 10.0 ** -max(power, 0))
    accumulator, text, weights = _draw_accumulator(draw, total)
    clip_norm, bounds, clip_text = _draw_bounds(draw, 10.0**power)
    settings: dict[str, Any] = {"microbatch_size": size, "accumulator": accumulator}
    options = {
        "clip_norm": clip_norm,
        "has_aux": draw.flag(0.3),
        "return_norms": draw.flag(0.3),
        "moments": weights is None and total > 2 and power == 0 and draw.flag(often),
        "metrics": (lambda g: jnp.sum(g.w)) if draw.flag(0.15) else None,
        "nan_safe": draw.flag(0.1),
        "against": eqx.filter(model, eqx.is_array) if draw.flag(0.2) else None,
        "features": Projection(4, jr.key(total)) if draw.flag(0.2) else None,
    }
    if not options["metrics"]:
        options["method"] = draw.one_of("auto", "sites", "materialise")
    settings |= {k: x for k, x in options.items() if x is not None and x is not False}
    rows = total
    count_text = ""
    if placing.mesh is None and draw.flag(often):
        step = min(size or total, total)
        num = 1 + draw.below(-(-total // step))
        kind = draw.one_of("int", "int32", "int8") if num < 128 else "int"
        settings["num_real_microbatches"] = (
            num if kind == "int" else jnp.asarray(num, kind)
        )
        rows = min(num * step, total)
        count_text = f" only {num} blocks ({kind})"
    has_value = draw.flag(0.6)
    public = filter_micro_value_and_grad if has_value else filter_micro_grad

    def with_aux(model: Model, x: Any) -> Any:
        value = loss(model, x)
        return (value, {"x": x[0], "name": "aux"}) if options["has_aux"] else value

    whole = placing.spread(draw, x, 0)
    params, static = eqx.partition(model, eqx.is_array)
    params = jtu.tree_map(lambda x: placing.spread(draw, x, None), params)
    placed = eqx.combine(params, static)
    one = jax.value_and_grad(lambda leaves, x: loss(Model(*leaves, model.steps), x))
    dense = jax.jit(jax.vmap(one, in_axes=(None, 0)))
    leaves = [model.w, model.b, model.scale]
    eps = float(jnp.finfo(dtype).eps)

    def oracle() -> Any:
        values, gradients = dense(leaves, x)
        values, each = widen(values)[:rows], [widen(g)[:rows] for g in gradients]
        own = np.ones(rows) if weights is None else weights[:rows]
        result = functools.partial(_result, own=own, dtype=x.dtype, eps=eps)
        is_sum = isinstance(accumulator, Sum)
        groups = bounds or [((0, 1, 2), None)]
        norms, scales = [], [np.ones(rows) for _ in each]
        for members, bound in groups:
            norm = _norms(each, members)
            norms.append(norm)
            if bound is not None:
                factor = np.minimum(1, bound / np.where(norm == 0, 1, norm))
                for i in members:
                    scales[i] = np.where(norm > bound, factor, 1)
        clipped = [
            g * s.reshape(-1, *[1] * (g.ndim - 1))
            for g, s in zip(each, scales, strict=True)
        ]
        total = Model(*[result(g, is_sum) for g in clipped], None)
        value = result(values, is_sum)
        wide = _at_least_single(x.dtype)
        norm_leaves = [_padded(n, len(x), wide, eps) for n in norms]
        if bounds is not None and len(bounds) == 3:
            # There is one for the part without a gradient, too.
            norm_tree = Model(*norm_leaves, Expected(None))
        else:
            norm_tree = norm_leaves[0]
        metrics = [_padded(each[0].sum(axis=(1, 2)), len(x), x.dtype, eps)]
        statistics = GradientStatistics(
            norm_tree if options["return_norms"] else None,
            metrics[0] if options["metrics"] else None,
            _moments(each, x.dtype, eps) if options["moments"] else None,
            _inner_products(each, leaves, len(x), wide, eps)
            if options["against"]
            else None,
            _features(options["features"], each, leaves, len(x), wide, eps)
            if options["features"]
            else None,
        )
        aux = {"x": _padded(widen(x)[:rows, 0], len(x), x.dtype, eps), "name": "aux"}
        if has_value:
            first = [(value, aux) if options["has_aux"] else value, total]
        else:
            first = [total, aux] if options["has_aux"] else [total]
        if any(x is not None for x in statistics):
            first.append(statistics)
        return first[0] if len(first) == 1 else tuple(first)

    flags = ("has_aux", "return_norms", "moments", "metrics", "nan_safe", "against")
    flags += ("features",)
    asked = [key for key in flags if options[key]]
    text = (
        f"{name} {dtype} 1e{power} n={total} b={size} {text}{clip_text}{count_text} "
        f"{asked} method={options.get('method')}"
        f"{' with value' if has_value else ''}{placing.text}"
    )
    by_jax = lambda: dense([placed.w, placed.b, placed.scale], whole)
    return Case(
        text, lambda: public(with_aux, **settings)(placed, whole), oracle, by_jax=by_jax
    )


def _at_least_single(dtype: Any) -> Any:
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def _result(
    each: np.ndarray, is_sum: bool, *, own: np.ndarray, dtype: Any, eps: float
) -> Expected:
    """The weighted sum or mean over examples."""
    rows = each * own.reshape(-1, *[1] * (each.ndim - 1))
    weight = 1.0 if is_sum else own.sum()
    with np.errstate(all="ignore"):
        scale = float(np.abs(rows).sum(axis=0).max(initial=0) / weight)
        total = rows.sum(axis=0) / weight
    return Expected(total, dtype, scale=scale, tolerance=64.0, eps=eps)


def _padded(each: np.ndarray, total: int, dtype: Any, eps: float) -> Expected:
    """Results of examples; those that did not run are zero."""
    missing = np.zeros((total - len(each), *each.shape[1:]))
    values = np.concatenate([each, missing])
    return Expected(values, dtype, tolerance=64.0, eps=eps)


def _features(
    projection: Projection,
    each: list[np.ndarray],
    leaves: list,
    total: int,
    dtype: Any,
    eps: float,
) -> Expected:
    """The sums of entries times the projections of unit gradients."""
    flat = np.concatenate([g.reshape(len(g), -1) for g in each], axis=1)
    starts = np.cumsum([math.prod(g.shape[1:]) for g in each])[:-1]
    units = np.split(np.eye(flat.shape[1], dtype="float32"), starts, axis=1)
    shaped = [
        jnp.asarray(x).reshape(len(x), *leaf.shape)
        for x, leaf in zip(units, leaves, strict=True)
    ]
    matrix = widen(projection.drawn(leaves).of_gradients(shaped))
    values = np.zeros((total, projection.dim))
    values[: len(flat)] = flat @ matrix
    scale = float((np.abs(flat) @ np.abs(matrix)).max(initial=0))
    return Expected(values, dtype, scale=scale, tolerance=64.0, eps=eps)


def _inner_products(
    each: list[np.ndarray], direction: list, total: int, dtype: Any, eps: float
) -> Expected:
    products = [
        (g * widen(v)).reshape(len(g), -1) for g, v in zip(each, direction, strict=True)
    ]
    scale = sum(float(np.abs(x).sum(1).max(initial=0)) for x in products)
    values = np.zeros(total)
    values[: len(each[0])] = sum(x.sum(1) for x in products)
    return Expected(values, dtype, scale=scale, tolerance=64.0, eps=eps)


def _moments(each: list[np.ndarray], dtype: Any, eps: float) -> GradientMoments:
    count = len(each[0])
    means = [g.mean(axis=0) for g in each]
    variances = [g.var(axis=0, ddof=1) if count > 1 else g[0] * np.nan for g in each]
    noise = sum(v.sum() for v in variances)
    signal = sum((m**2).sum() for m in means) - noise / count
    # It is a difference, which may be nothing but rounding.
    is_lost = not np.isfinite(noise) or abs(signal) < 0.3 * noise
    scale = max(float(np.abs(g).max(initial=0)) for g in each)
    of = lambda xs, scale: Model(
        *[Expected(x, dtype, scale=scale, tolerance=64.0, eps=eps) for x in xs], None
    )
    ratio = Expected(
        None if is_lost else noise / signal,
        _at_least_single(dtype),
        tolerance=500.0,
        eps=eps,
    )
    return GradientMoments(of(means, scale), of(variances, scale**2), ratio)
