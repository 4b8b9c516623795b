"""Kernels in a metric: influence functions and variances of Laplace approximations.

Peers are what others do with Kronecker factors, written in JAX: Jacobians that are
contracted with the blocks, and gradients of examples that meet preconditioned ones.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from eqxbatch import EmpiricalNTK, filter_kfac, Projection
from . import work
from .harness import (
    Bar,
    bars_of,
    Case,
    judges_times,
    measure,
    OURS,
    results,
    temporaries,
)
from .limit import NoLimit, num_bytes, Work


NAME = "metric"
KEY = jr.key(0)
PLAIN = "`EmpiricalNTK` without a metric"
FACTORED = "with `factored=True`"
DENSE = "Jacobians contracted with dense blocks"
GRADIENTS = "a gradient at a time, with preconditioned queries"


def predict(model: Callable, x: jax.Array, label: jax.Array) -> jax.Array:
    return model(x)


def cross_entropy(logits: jax.Array, x: jax.Array, label: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[label]


def squared_error(out: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((out - y) ** 2) / 2


class Loss(eqx.Module):
    """The cross entropy of one example."""

    model: Callable

    def __call__(self, pair: Any) -> jax.Array:
        x, label = pair
        return cross_entropy(self.model(x), x, label)


class CNN(eqx.Module):
    """Two convolutions and a linear layer, without biases."""

    convs: list[eqx.nn.Conv2d]
    last: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jr.split(key, 3)
        self.convs = [
            eqx.nn.Conv2d(num, out, 3, padding=1, use_bias=False, key=key)
            for num, out, key in ((1, 8, keys[0]), (8, 16, keys[1]))
        ]
        self.last = eqx.nn.Linear(16, 10, use_bias=False, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv in self.convs:
            x = jax.nn.relu(conv(x))
        return self.last(x.mean((1, 2)))


def covariance(model: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    """Kronecker factors, and the inverse of their operator."""
    call = filter_kfac(predict, cross_entropy, microbatch_size=100)
    factors = call(model, x, labels)
    return factors, factors.operator(damping=1e-3, factored=True).inverse()


def dense_layers(width: int) -> tuple[Any, Any, Any]:
    """An MLP for images of digits, the images, and labels."""
    model = eqx.nn.MLP(64, 10, width, 3, key=KEY)
    x = jr.normal(KEY, (1797, 64))
    return model, x, jr.randint(KEY, (1797,), 0, 10)


def plain(num: int, others: int | None, width: int) -> Case:
    """The kernel of examples with each other, or with some others."""
    model, x, labels = dense_layers(width)
    _, metric = covariance(model, x[:200], labels[:200])
    size = 128 if num > 128 else 16
    ways = {
        OURS: lambda model, metric, x, y: EmpiricalNTK(
            model, metric=metric, block_size=size
        )(x, y),
        PLAIN: lambda model, metric, x, y: EmpiricalNTK(model, block_size=size)(x, y),
    }
    arrays, static = eqx.partition(model, eqx.is_array)
    y = None if others is None else jr.normal(jr.key(1), (others, 64))
    products = work.products_of(lambda model, x: model(x), model, x)
    flops = work.kernel(
        products,
        num,
        others or 0,
        outputs=10,
        tiles=work.upper_tiles(num, size) if others is None else None,
    )
    flops += work.preconditioned(products, others or num, 10)
    moved = num_bytes(arrays, metric, x[:num], y) + 4 * num * (others or num)
    return Case(
        "plain" if others is None else "sides",
        f"kernel of {num} by {others or num} examples, MLP",
        {name: with_static(way, static) for name, way in ways.items()},
        (arrays, metric, x[:num], y),
        Work(flops, moved),
        unbounded=(),
        best_memory=None,
        best_time=None,
        limits={PLAIN: 1.2},
    )


def damped(num: int, width: int, corrected: bool, is_diagonal: bool) -> Case:
    """A kernel of ten outputs with exact damping, in one block, or its diagonal."""
    model, x, labels = dense_layers(width)
    call = filter_kfac(predict, cross_entropy, corrected=corrected, microbatch_size=100)
    factors = call(model, x[:200], labels[:200])
    exact = factors.operator(damping=0.1, relative=True).inverse()
    factored, _ = covariance(model, x[:200], labels[:200])
    factored = factored.operator(damping=0.1, relative=True, factored=True).inverse()

    def kernel(model: Any, metric: Any, x: jax.Array) -> jax.Array:
        ntk = EmpiricalNTK(model, metric=metric)
        return ntk.diagonal(x) if is_diagonal else ntk(x)

    ways = {
        OURS: lambda model, exact, factored, x: kernel(model, exact, x),
        PLAIN: lambda model, exact, factored, x: kernel(model, None, x),
        FACTORED: lambda model, exact, factored, x: kernel(model, factored, x),
    }
    arrays, static = eqx.partition(model, eqx.is_array)
    kind = "corrected" if corrected else "exact damping"
    what = "diagonal" if is_diagonal else "kernel"
    return Case(
        f"{kind}, {what}",
        f"{what} of {num} examples, MLP, {kind}",
        {name: with_static(way, static) for name, way in ways.items()},
        (arrays, exact, factored, x[:num]),
        NoLimit("terms and tables of metrics with damping are not counted"),
        unbounded=(),
        best_memory=None,
        best_time=None,
        limits={PLAIN: 20.0},
    )


def with_static(way: Callable, static: Any) -> Callable:
    return lambda arrays, *args: way(eqx.combine(arrays, static), *args)


def variances(num: int) -> Case:
    model = CNN(KEY)
    x = jr.normal(KEY, (num, 1, 16, 16))
    labels = jr.randint(KEY, (num,), 0, 10)
    _, metric = covariance(model, x[:200], labels[:200])
    arrays, static = eqx.partition(model, eqx.is_array)
    # The dense blocks, in the order of the layers.
    weights = jax.tree.leaves(arrays)
    ends = np.cumsum([0, *(w.size for w in weights)])
    whole = np.asarray(metric.as_matrix())
    blocks = [jnp.asarray(whole[i:j, i:j]) for i, j in itertools.pairwise(ends)]

    def ours(model: Any, metric: Any, blocks: Any, x: jax.Array) -> jax.Array:
        kernel = EmpiricalNTK(model, metric=metric, trace_axes=(), block_size=50)
        return kernel.diagonal(x)

    def dense(model: Any, metric: Any, blocks: Any, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(model, eqx.is_array)

        def one(x: jax.Array) -> jax.Array:
            jac = jax.jacrev(lambda arrays: eqx.combine(arrays, static)(x))(arrays)
            flat = [j.reshape(10, -1) for j in jax.tree.leaves(jac)]
            return sum(j @ block @ j.T for j, block in zip(flat, blocks, strict=True))

        return jax.lax.map(one, x, batch_size=50)

    products = work.products_of(lambda model, x: model(x), model, x)
    flops = work.covariances(products, num, 10)
    ways = {OURS: ours, DENSE: dense}
    return Case(
        "variances",
        f"covariances of predictions for {num} images, CNN",
        {name: with_static(way, static) for name, way in ways.items()},
        (arrays, metric, blocks, x),
        Work(flops, num_bytes(arrays, metric, x) + 4 * num * 10**2),
        unbounded=(),
        best_memory=None,
        best_time=0.2,
    )


def influence(num: int, queries: int, width: int) -> Case:
    model, x, labels = dense_layers(width)
    _, metric = covariance(model, x[:200], labels[:200])
    arrays, static = eqx.partition(model, eqx.is_array)
    train, test = (x[:num], labels[:num]), (x[-queries:], labels[-queries:])

    def ours(model: Any, metric: Any, test: Any, train: Any) -> jax.Array:
        kernel = EmpiricalNTK(Loss(model), metric=metric, block_size=(queries, 200))
        return kernel(test, train)

    def gradients(model: Any, metric: Any, test: Any, train: Any) -> jax.Array:
        arrays, static = eqx.partition(model, eqx.is_array)
        of_pair = lambda pair: jax.grad(
            lambda arrays: Loss(eqx.combine(arrays, static))(pair)
        )(arrays)
        parameters = lambda pair: eqx.filter(
            eqx.combine(of_pair(pair), static), eqx.is_inexact_array
        )
        turned = jax.lax.map(lambda pair: metric.mv(parameters(pair)), test)

        def row(pair: Any) -> jax.Array:
            pairs = zip(*map(jax.tree.leaves, (turned, parameters(pair))), strict=True)
            return sum(jnp.tensordot(q, g, g.ndim) for q, g in pairs)

        return jax.lax.map(row, train, batch_size=50).T

    products = work.products_of(lambda model, *pair: Loss(model)(pair), model, *train)
    flops = work.kernel(products, queries, num)
    flops += work.preconditioned(products, queries, 1)
    ways = {OURS: ours, GRADIENTS: gradients}
    return Case(
        "influence",
        f"influence of {num} examples on {queries} queries, MLP",
        {name: with_static(way, static) for name, way in ways.items()},
        (arrays, metric, test, train),
        Work(flops, num_bytes(arrays, metric, test, train) + 4 * num * queries),
        unbounded=(),
        best_memory=None,
        best_time=0.2,
    )


def error(case: Case) -> Bar:
    """How far ours is from the peer, in float32."""
    found, peer = (jax.jit(case.ways[way])(*case.args) for way in (OURS, GRADIENTS))
    value = jnp.max(jnp.abs(found - peer)) / jnp.max(jnp.abs(peer))
    return Bar(f"{case.name}: error, of the largest entry", float(value), 1e-5)


def growth(num: int) -> Bar:
    """How much more temporaries twice as many images take."""
    sizes = []
    for images in (num, 2 * num):
        case = variances(images)
        sizes.append(temporaries(jax.jit(case.ways[OURS]).lower(*case.args)))
    name = "variances: temporaries of twice as many images"
    return Bar(name, sizes[1] / sizes[0], 1.05)


def outputs(num: int, outputs: int, width: int) -> tuple[str, list[Bar]]:
    """Variances of many outputs, whose Jacobians take gigabytes for each example."""
    model = eqx.nn.MLP(128, outputs, width, 2, key=KEY)
    x, y = jr.normal(KEY, (200, 128)), jr.normal(KEY, (200, outputs))
    call = filter_kfac(predict, squared_error, fisher="empirical", microbatch_size=100)
    metric = call(model, x, y).operator(damping=0.1, factored=True).inverse()
    arrays, static = eqx.partition(model, eqx.is_array)
    settings = {"trace_axes": (), "diagonal_axes": (1,), "block_size": 1}
    way = with_static(
        lambda model, metric, x: EmpiricalNTK(
            model, metric=metric, **settings
        ).diagonal(x),
        static,
    )
    args = arrays, metric, x[:num]
    lowered = jax.jit(way).lower(*args)
    megabytes, compiled = temporaries(lowered) / 1e6, lowered.compile()
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    seconds = (time.perf_counter() - start) / num
    more = (
        f"The variances of {outputs:,} outputs of an MLP with 128 inputs take "
        f"{1e3 * seconds:.0f} ms for each of {num} examples, and {megabytes:.0f} MB of "
        "temporaries."
    )
    name = f"variances of {outputs} outputs"
    return more, [
        Bar(f"{name}: seconds for an example", seconds, 1.0, is_time=True),
        Bar(f"{name}: megabytes of temporaries", megabytes, 200.0),
    ]


def features(num: int, width: int, rounds: int) -> tuple[str, list[Bar]]:
    """Projected gradients to disk, and what else passes over the same examples."""
    model, *_ = dense_layers(width)
    size, dim = min(num // 4, 1_000), 256
    x = np.random.default_rng(0).normal(size=(num, 64)).astype("float32")
    pairs = x, np.arange(num, dtype="int32") % 10
    projection = Projection(dim, KEY)
    kernel = EmpiricalNTK(Loss(model), metric=projection, block_size=size)
    arrays, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def gradient(arrays: Any, pairs: Any) -> Any:
        loss = lambda arrays, batch: jnp.mean(
            jax.vmap(Loss(eqx.combine(arrays, static)))(batch)
        )
        add = lambda total, batch: jax.tree.map(
            jnp.add, total, jax.grad(loss)(arrays, batch)
        )
        batches = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), pairs)
        zeros = jax.tree.map(jnp.zeros_like, arrays)
        return jax.lax.scan(lambda *args: (add(*args), None), zeros, batches)[0]

    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count()
        ways = {
            OURS: lambda: kernel.features(pairs, store=f"{folder}/{next(numbers)}"),
            "in memory": lambda: kernel.features(pairs),
            "an accumulated gradient": lambda: gradient(arrays, pairs),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                jax.block_until_ready(way())
                times[name].append(time.perf_counter() - start)
    # The first round compiles.
    ratio = {
        name: statistics.median(
            ours / theirs
            for ours, theirs in zip(times[OURS][1:], other[1:], strict=True)
        )
        for name, other in times.items()
    }
    more = (
        f"Projections of the gradients of {num:,} examples to {dim} numbers, written "
        f"to disk, take {ratio['in memory']:.2f} times as long as in memory, and "
        f"{ratio['an accumulated gradient']:.2f} times as long as an accumulated "
        f"gradient by hand."
    )
    name = f"features of {num} examples to disk: time, of those in memory"
    return more, [Bar(name, ratio["in memory"], 1.5, is_time=True)]


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    cases = [
        plain(64, None, 64) if quick else plain(1_797, None, 512),
        plain(64, 16, 64) if quick else plain(1_797, 128, 512),
        variances(50 if quick else 1_000),
        influence(64, 8, 64) if quick else influence(1_797, 100, 256),
    ]
    size, width = (32, 32) if quick else (512, 256)
    kinds = [*itertools.product((False, True), (False, True))]
    kinds = kinds[::3] if quick else kinds
    damped_cases = [damped(size, width, *kind) for kind in kinds]
    bars = [error(cases[-1]), growth(100 if quick else 1_000)]
    measured = []
    for one in (*cases, *damped_cases):
        rows = measure(one, rounds=3 if quick else 9)
        measured.append((one, rows))
        bars += bars_of(one, rows)
    more, of_outputs = outputs(2, 64, 32) if quick else outputs(100, 3_100, 256)
    bars += of_outputs
    if judges_times():
        text, to_disk = features(64, 32, 1) if quick else features(10_000, 512, 7)
        more, bars = f"{more}\n\n{text}", bars + to_disk
    return *results(measured, bars, more), bars
