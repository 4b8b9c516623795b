"""Random maps within maps with collectives, and functions of microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eqxbatch import (
    Concat,
    filter_micro_vmap,
    filter_microbatch,
    Last,
    LogSumExp,
    Max,
    Mean,
    Min,
    Sum,
    Variance,
)
from eqxbatch.results import MeanAndVariance
from .map_accumulators import draw_accumulator, draw_sum
from .map_derivatives import differentiated
from .map_draw import (
    Case,
    Draw,
    draw_dtype,
    draw_placing,
    draw_size,
    DTYPES,
    FLOATS,
    KINDS,
    make,
)


_ACCUMULATORS: dict[str, tuple[Any, Callable]] = {
    "Concat": (Concat(), lambda y: y),
    "Sum": (Sum(), lambda y: jnp.sum(y, axis=0)),
    "Mean": (Mean(), lambda y: jnp.mean(y, axis=0)),
    "RunningMean": (Mean(running=True), lambda y: jnp.mean(y, axis=0)),
    "Max": (Max(), lambda y: jnp.max(y, axis=0)),
    "LogSumExp": (LogSumExp(), lambda y: jax.nn.logsumexp(y, axis=0)),
}
_COLLECTIVES: dict[str, Callable] = {
    "none": lambda x, name: x,
    "psum": jax.lax.psum,
    "pmean": jax.lax.pmean,
    "pmax": lambda x, name: (
        jax.lax.stop_gradient(jax.lax.pmax(jax.lax.stop_gradient(x), name)) * x
    ),
    "all_gather": lambda x, name: jnp.sum(jax.lax.all_gather(x, name), axis=0),
}


def _in_blocks(fun: Callable, name: str | None, size: int | None, reduce: Callable):
    """What a map in microbatches is, without it: each of them is a `jax.vmap`."""

    def run(x: Any) -> Any:
        step = size or len(x)
        kwargs = {} if name is None else {"axis_name": name}
        parts = [
            jax.vmap(fun, **kwargs)(x[i : i + step]) for i in range(0, len(x), step)
        ]
        whole = jtu.tree_map(lambda *xs: jnp.concatenate(xs), *parts)
        return jtu.tree_map(reduce, whole)

    return run


def draw_nested(draw: Draw) -> Case:
    """A map over `x` of a map over `y`, with collectives over either."""
    total, inner_total = draw.one_of(2, 3, 4, 5, 1), draw.one_of(3, 2, 1, 4)
    size, inner_size = draw_size(draw, total), draw_size(draw, inner_total)
    dtype = draw_dtype(draw, ("float32", "float64"))
    rng = draw.numbers()
    x, y = make(rng, (total, 2), dtype), make(rng, (inner_total,), dtype)
    mode = draw.one_of("jit", "", "grad", "jvp", "vmap")
    outer, outer_dense = _ACCUMULATORS[outer_text := draw.one_of(*_ACCUMULATORS)]
    inner, inner_dense = _ACCUMULATORS[inner_text := draw.one_of(*_ACCUMULATORS)]
    over_outer = draw.one_of(*_COLLECTIVES)
    over_inner = draw.one_of(*_COLLECTIVES)
    outer_name = "i" if over_outer != "none" or draw.flag(0.3) else None
    inner_name = "j" if over_inner != "none" or draw.flag(0.3) else None
    kinds = draw.one_of(("micro", "micro"), ("micro", "vmap"), ("vmap", "micro"))
    checkpoint = draw.flag(0.2)

    def example(x: Any, y: Any) -> Any:
        product = jnp.sin(x[0] * y) + x[1]
        product = product * 0.5 + _COLLECTIVES[over_outer](product, "i")
        return product + _COLLECTIVES[over_inner](jnp.tanh(product * y), "j")

    def mapped(fun, name, size, accumulator, kind, dense) -> Callable:
        if kind == "vmap":
            return _in_blocks(fun, name, None, dense)
        return filter_micro_vmap(
            fun,
            axis_name=name,
            microbatch_size=size,
            accumulator=accumulator,
            checkpoint=checkpoint,
        )

    def package(x: Any, y: Any) -> Any:
        over_y = lambda x: mapped(
            lambda y: example(x, y),
            inner_name,
            inner_size,
            inner,
            kinds[1],
            inner_dense,
        )(y)
        return mapped(over_y, outer_name, size, outer, kinds[0], outer_dense)(x)

    def dense(x: Any, y: Any) -> Any:
        given = zip(kinds, (size, inner_size), strict=True)
        sizes = [None if kind == "vmap" else size for kind, size in given]
        over_y = lambda x: _in_blocks(
            lambda y: example(x, y), inner_name, sizes[1], inner_dense
        )(y)
        return _in_blocks(over_y, outer_name, sizes[0], outer_dense)(x)

    text = (
        f"{kinds} n=({total}, {inner_total}) b=({size}, {inner_size}) {mode} {dtype} "
        f"{outer_text} of {inner_text}, {over_outer} over i, {over_inner} over j"
        f"{' checkpoint' if checkpoint else ''}"
    )
    return differentiated(mode, text, package, dense, [x, y])


def draw_accumulated(draw: Draw) -> Case:
    """All numbers as they are, and often with none that is ordinary."""
    total = draw.one_of(4, 1, 2, 3, 5, 7, 8, 12, 0)
    size = draw_size(draw, total)
    dtype = draw_dtype(draw, (*FLOATS, *FLOATS, *DTYPES[:-1]))
    kind = draw.one_of(*KINDS) if dtype in FLOATS else "normal"
    shape = draw.one_of((), (3,))
    x = make(draw.numbers(), (total, *shape), dtype, kind)
    if dtype not in FLOATS and draw.flag(0.5):
        reduced = draw_sum(draw, total, [x.dtype], 0.9)
    else:
        reduced = draw_accumulator(draw, total, [x.dtype])
    is_special = kind in ("-inf first", "-inf") and total > 0
    text = f"n={total} b={size} {dtype}{list(shape)} {kind} {reduced.text}"
    micro = lambda x: filter_micro_vmap(
        lambda x: x, microbatch_size=size, accumulator=reduced.accumulator
    )(x)
    if is_special and draw.flag(0.6):
        return differentiated("shift", f"shift {text}", micro, reduced.dense, [x])
    case = Case(text, lambda: micro(x), lambda: reduced.numpy(x))
    case.refuses = reduced.refusal(x.dtype, total)
    case.may_refuse = reduced.is_odd(x.dtype)
    return case


def _rows(x: Any) -> Any:
    return jnp.tanh(x * 2)


def draw_microbatch(draw: Draw) -> Case:
    """`filter_microbatch` of a function with results of every kind."""
    total = draw.one_of(4, 1, 2, 3, 5, 7, 8, 12, 13)
    size = draw_size(draw, total)
    placing = draw_placing(draw, 0.2)
    axis = draw.below(2)
    dtype = draw_dtype(draw, ("float32", "float64", "float16", "bfloat16"))
    x = jnp.moveaxis(make(draw.numbers(), (total, 3), dtype), 0, axis)
    mode = draw.one_of("jit", "", "grad", "jvp", "vmap")
    out_axis = draw.one_of(0, 1, -1)
    step = min(size or total, total)
    # Rows of no example; as many as there are examples would be taken for theirs.
    fixed = jnp.arange(2.0 if step != 2 else 3.0, dtype=dtype)[:, None]
    # What there is for each microbatch, as JAX has it.
    makers: dict[str, tuple[Any, Callable, Callable]] = {
        "rows": (
            Concat(out_axis),
            lambda x: jnp.moveaxis(_rows(x), 0, out_axis),
            lambda parts, counts: jnp.concatenate(parts, axis=out_axis),
        ),
        "sum": (Sum(), lambda x: _rows(x).sum(0), lambda ps, _: _stack(ps).sum(0)),
        "mean": (Mean(), lambda x: _rows(x).mean(0), _weighted),
        "running": (Mean(running=True), lambda x: _rows(x).mean(0), _weighted),
        "max": (Max(), lambda x: _rows(x).max(0), lambda ps, _: _stack(ps).max(0)),
        "min": (Min(), lambda x: _rows(x).min(0), lambda ps, _: _stack(ps).min(0)),
        "last": (Last(), lambda x: _rows(x)[-1], lambda ps, _: ps[-1]),
        "log": (
            LogSumExp(),
            lambda x: jax.nn.logsumexp(_rows(x), axis=0),
            lambda ps, _: jax.nn.logsumexp(_stack(ps), axis=0),
        ),
        "fixed": (
            Concat(),
            lambda x: fixed + 0 * _rows(x).sum(0)[None],
            lambda parts, counts: jnp.concatenate(parts),
        ),
        "twice": (
            Concat(),
            lambda x: jnp.repeat(_rows(x), 2, axis=0),
            lambda parts, counts: jnp.concatenate(parts),
        ),
    }
    if mode in ("", "jit"):
        makers["variance"] = (Variance(), lambda x: _rows(x).mean(0), _between)
    names = [name for name in makers if draw.flag(0.35)] or ["rows"]
    if placing.mesh is not None:
        # Microbatches have a share of each device, and are not contiguous.
        others = ["last", "twice", "variance"]
        # Sizes are rounded to a multiple of the number of devices, and so is how many
        # microbatches there are.
        others += ["fixed"] if step % placing.mesh.size else []
        names = [n for n in names if n not in others] or ["sum"]
    checkpoint = draw.flag(0.2)

    def fun(x: Any) -> Any:
        x = jnp.moveaxis(x, axis, 0)
        return {name: makers[name][1](x) for name in names}

    def package(x: Any) -> Any:
        return filter_microbatch(
            fun,
            in_axes=axis,
            microbatch_size=size,
            accumulator={name: makers[name][0] for name in names},
            checkpoint=checkpoint,
        )(x)

    def dense(x: Any) -> Any:
        x = jnp.moveaxis(x, axis, 0)
        blocks = [x[i : i + step] for i in range(0, total, step)]
        counts = [len(block) for block in blocks]
        return {
            name: makers[name][2]([makers[name][1](b) for b in blocks], counts)
            for name in names
        }

    placed = placing.spread(draw, x, axis)
    text = (
        f"n={total} b={size} {mode} {dtype} axis={axis} {names} out={out_axis}"
        f"{' checkpoint' if checkpoint else ''}{placing.text}"
    )
    return differentiated(mode, text, package, dense, [x], [placed])


def _stack(parts: list) -> Any:
    return jnp.stack(parts)


def _weighted(parts: list, counts: list) -> Any:
    wide = jnp.stack(parts).astype(jnp.zeros(()).dtype)
    weights = jnp.asarray(np.array(counts) / sum(counts), wide.dtype)
    return (wide * weights[:, None]).sum(0).astype(parts[0].dtype)


def _between(parts: list, counts: list) -> Any:
    mean = _weighted(parts, counts)
    wide = jnp.zeros(()).dtype
    squares = [(p.astype(wide) - mean.astype(wide)) ** 2 for p in parts]
    return MeanAndVariance(mean, _weighted(squares, counts).astype(mean.dtype))
