"""`filter_micro_vmap` and `filter_microbatch`, compared with their peers."""

import functools
from collections.abc import Callable
from typing import Any

import adv_jax_math
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from eqxbatch import filter_micro_vmap, filter_microbatch, Mean, Sum
from .harness import Bar, bars_of, Case, measure, OURS, results, temporaries
from .limit import num_bytes, Work
from .work import accumulated, mapped, products_of


NAME = "micro_vmap"
KEY = jr.key(0)


class CNN(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    linear: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3 = jr.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 16, 3, key=key1)
        self.conv2 = eqx.nn.Conv2d(16, 32, 3, stride=2, key=key2)
        self.linear = eqx.nn.Linear(32 * 12 * 12, 10, key=key3)

    def __call__(self, x):
        x = jax.nn.relu(self.conv1(x))
        x = jax.nn.relu(self.conv2(x))
        return self.linear(x.reshape(-1))


def maps(size: int, *, checkpoint: bool = False, ragged: bool = False) -> dict:
    """All ways to map a function of one row, as `way(fun, x)`."""
    remat = jax.checkpoint if checkpoint else (lambda fun: fun)
    ways: dict[str, Callable] = {
        OURS: lambda fun, x: filter_micro_vmap(
            fun, microbatch_size=size, checkpoint=checkpoint
        )(x),
        "jax.lax.map": lambda fun, x: jax.lax.map(remat(fun), x, batch_size=size),
        "adv_jax_math.batch_vmap": lambda fun, x: adv_jax_math.batch_vmap(
            remat(fun), batch_size=size
        )(x),
        "optax micro_vmap": lambda fun, x: optax.microbatching.micro_vmap(
            remat(fun), microbatch_size=size
        )(x),
        "jax.vmap": lambda fun, x: jax.vmap(remat(fun))(x),
    }
    if ragged:
        del ways["optax micro_vmap"]
    return ways


def evaluations(model: Any, size: int, **kwargs: Any) -> dict[str, Callable]:
    """All ways to evaluate a model, as `way(x)`."""
    # Peers map functions and not modules, so the model is closed over.
    fun = lambda x: model(x)
    return {
        name: functools.partial(way, fun) for name, way in maps(size, **kwargs).items()
    }


def gradients(model: Any, size: int, **kwargs: Any) -> dict[str, Callable]:
    """All ways to differentiate through a map, as `way(arrays, x)`."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def grad(way: Callable) -> Callable:
        def loss(arrays, x):
            model = eqx.combine(arrays, static)
            return jnp.sum(way(lambda x: model(x), x) ** 2)

        return jax.grad(loss, argnums=(0, 1))

    return {name: grad(way) for name, way in maps(size, **kwargs).items()}


def accumulations(model: Any, size: int) -> dict[str, Callable]:
    """All ways to accumulate the gradient of a mean loss, as `way(arrays, x)`."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x):
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    grad = jax.grad(loss)
    return {
        OURS: filter_microbatch(
            grad, in_axes=(None, 0), microbatch_size=size, accumulator=Mean()
        ),
        "optax microbatch": optax.microbatching.microbatch(
            grad, 1, size, optax.microbatching.AccumulationType.MEAN
        ),
        "jax.grad": grad,
    }


def cases(quick: bool) -> list[Case]:
    mlp = eqx.nn.MLP(256, 256, 512, 3, key=KEY)
    cnn = CNN(KEY)
    rows = 16_384
    x = jr.normal(KEY, (rows, 256))
    ragged = jr.normal(KEY, (rows + 77, 256))
    images = jr.normal(KEY, (512 if quick else 1024, 1, 28, 28))
    tiny = jr.normal(KEY, (262_144, 16))
    arrays = eqx.filter(mlp, eqx.is_inexact_array)
    size = 256
    call = lambda model, x: model(x)
    of_mlp, of_cnn = products_of(call, mlp, x), products_of(call, cnn, images)
    of_loss = products_of(lambda model, x: jnp.sum(model(x) ** 2), cnn, images)
    of_images = eqx.filter(cnn, eqx.is_inexact_array), images
    logits = jax.eval_shape(jax.vmap(cnn), images)
    divides = {"optax micro_vmap": "must divide"}
    return [
        Case(
            "a",
            f"(a) MLP, {rows:,} rows by 256",
            evaluations(mlp, size),
            (x,),
            Work(mapped(of_mlp, rows), num_bytes(arrays, x, x)),
        ),
        Case(
            "b",
            f"(b) CNN, {len(images):,} images by 32",
            evaluations(cnn, 32),
            (images,),
            Work(mapped(of_cnn, len(images)), num_bytes(of_images, logits)),
            # 1.0 with JAX 0.10.2; with 0.12, XLA gives `lax.map` fewer temporaries.
            # Ours have channels last, where convolutions in loops are fast.
            best_memory=1.45,
        ),
        Case(
            "c",
            "(c) tiny work, 262,144 rows by 16,384",
            evaluations(lambda x: jnp.sin(x) * x.sum(), 16_384),
            (tiny,),
            Work(0, num_bytes(tiny, tiny)),
        ),
        Case(
            "d",
            f"(d) ragged, {rows + 77:,} rows by 256",
            evaluations(mlp, size, ragged=True),
            (ragged,),
            Work(mapped(of_mlp, len(ragged)), num_bytes(arrays, ragged, ragged)),
            missing=divides,
        ),
        Case(
            "e",
            "(e) reverse mode of (a)",
            gradients(mlp, size),
            (arrays, x),
            # Forwards, and the gradients of parameters and of rows.
            Work(3 * mapped(of_mlp, rows), 2 * num_bytes(arrays, x)),
        ),
        Case(
            "e+",
            "(e) with checkpoint",
            gradients(mlp, size, checkpoint=True),
            (arrays, x),
            # Forwards once more.
            Work(4 * mapped(of_mlp, rows), 2 * num_bytes(arrays, x)),
        ),
        Case(
            "f",
            "(f) accumulated gradient of (b)",
            accumulations(cnn, 32),
            of_images,
            Work(accumulated(of_loss, len(images)), num_bytes(of_images, of_images[0])),
            unbounded=("jax.grad",),
        ),
    ]


def flat_bars() -> list[Bar]:
    """Temporaries do not grow with the batch."""
    mlp = eqx.nn.MLP(256, 256, 512, 3, key=KEY)

    def taken(rows: int) -> int:
        run = filter_micro_vmap(lambda x: mlp(x), microbatch_size=256)
        x = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
        return temporaries(jax.jit(run).lower(x))

    growth = taken(16 * 1024) / taken(1024)
    return [Bar("temporaries for 16 times the batch, of those for 1", growth, 1.001)]


def residual_bars() -> list[Bar]:
    """With `checkpoint`, residuals are the inputs and one microbatch's activations."""
    mlp = eqx.nn.MLP(256, 256, 512, 3, key=KEY)
    arrays, static = eqx.partition(mlp, eqx.is_inexact_array)
    x = jnp.zeros((4096, 256))

    def run(arrays, x):
        model = eqx.combine(arrays, static)
        return filter_micro_vmap(
            lambda x: model(x), microbatch_size=256, accumulator=Sum(), checkpoint=True
        )(x)

    _, pullback = jax.vjp(run, arrays, x)
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))
    inputs = sum(leaf.nbytes for leaf in jax.tree.leaves((arrays, x)))
    one_microbatch = 256 * 4 * (4 * 512 + 256)
    limit = (inputs + one_microbatch) / inputs
    return [Bar("residuals with checkpoint, of the inputs", saved / inputs, limit)]


def trace_bars() -> list[Bar]:
    """The numbers of traces in a first and in a second call."""
    bars = []
    for rows, limit in ((1024, 1), (1025, 2)):
        traces = []

        def fun(x, traces=traces):
            traces.append(x)
            return jnp.sin(x)

        counts = []
        for _ in range(2):
            filter_micro_vmap(fun, microbatch_size=256)(jnp.ones((rows, 4)))
            counts.append(len(traces))
        bars.append(Bar(f"traces of a first call, {rows:,} rows", counts[0], limit))
        again = counts[1] - counts[0]
        bars.append(Bar(f"traces of a second call, {rows:,} rows", again, 0))
    return bars


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    measured = []
    bars = [*flat_bars(), *residual_bars(), *trace_bars()]
    for case in cases(quick):
        rows = measure(case, rounds=5 if quick else 25)
        measured.append((case, rows))
        bars += bars_of(case, rows)
        if case.name == "a":
            (optax_row,) = [row for row in rows if row.way.startswith("optax")]
            ratio = 1 / optax_row.memory_ratio
            bars.append(Bar("a: temporaries, of optax's", ratio, 1 / 20))
    return (*results(measured, bars), bars)
