"""Kronecker factors and Gauss-Newton diagonals; also gradients and kfac-jax.

kfac-jax 0.0.8 does not run with JAX 0.10. The figures in the docs were measured with
`pip install -e ".[benchmarks]" kfac-jax==0.0.8 jax==0.7.2 jaxlib==0.7.2`. Without
kfac-jax, its rows are left out.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

from eqxbatch import filter_ggn, filter_ggn_diagonal, filter_kfac
from . import work
from .harness import Bar, bars_of, Case, measure, OURS, results, Row, temporaries
from .limit import num_bytes, Work


NAME = "kfac"
KEY = jr.key(0)
PLAIN, PEER = "plain gradient", "kfac-jax 0.0.8"
CLASSES = 10
LABELS = {"fisher": "mc", "key": KEY, "sampler": jr.categorical}


def predict(model, x, label):
    return model(x)


def cross_entropy(logits, x, label):
    return -jax.nn.log_softmax(logits)[label]


class Convolutional(eqx.Module):
    """Three convolutions, the mean over positions, and a linear layer."""

    convolutions: list[eqx.nn.Conv2d]
    last: eqx.nn.Linear

    def __init__(self, channels: int, *, key: jax.Array):
        keys = jr.split(key, 4)
        sizes = (3, channels, 2 * channels, 2 * channels)
        self.convolutions = [
            eqx.nn.Conv2d(*pair, 3, stride, padding=1, key=own)
            for *pair, stride, own in zip(
                sizes, sizes[1:], (1, 2, 2), keys, strict=False
            )
        ]
        self.last = eqx.nn.Linear(sizes[-1], CLASSES, key=keys[-1])

    def __call__(self, x):
        for layer in self.convolutions:
            x = jax.nn.relu(layer(x))
        return self.last(jnp.mean(x, (1, 2)))


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    layers: list[eqx.nn.Linear]

    def __init__(self, size: int, *, key: jax.Array):
        keys = jr.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(4, size, key=keys[0])
        self.norms = [eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)]
        self.layers = [
            eqx.nn.Linear(size, 4 * size, key=keys[1]),
            eqx.nn.Linear(4 * size, size, key=keys[2]),
        ]

    def __call__(self, x):
        own = jax.vmap(self.norms[0])(x)
        x = x + self.attention(own, own, own)
        hidden = jax.vmap(self.layers[0])(jax.vmap(self.norms[1])(x))
        return x + jax.vmap(self.layers[1])(jax.nn.gelu(hidden))


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    last: eqx.nn.Linear

    def __init__(self, size: int, *, key: jax.Array):
        keys = jr.split(key, 4)
        self.embedding = eqx.nn.Embedding(100, size, key=keys[0])
        self.blocks = [Block(size, key=own) for own in keys[1:3]]
        self.last = eqx.nn.Linear(size, CLASSES, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(jnp.mean(x, 0))


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and its examples; `of_peer(job)` is the way of kfac-jax."""

    name: str
    title: str
    model: Any
    x: Any
    of_peer: Callable | None = None

    @property
    def labels(self):
        return jr.randint(KEY, (len(self.x),), 0, CLASSES)

    @property
    def args(self) -> tuple:
        return eqx.filter(self.model, eqx.is_inexact_array), self.x, self.labels

    def way(self, transform: Callable, **settings: Any) -> Callable:
        rest = eqx.filter(self.model, eqx.is_inexact_array, inverse=True)
        run = transform(predict, cross_entropy, in_axes=0, **settings)

        def way(arrays, x, labels):
            found = run(eqx.combine(arrays, rest), x, labels)
            return eqx.filter(found, eqx.is_array)

        return way

    def work_of(self, directions: int) -> Work:
        """That of Kronecker factors, which keep all digits."""
        products = work.products_of(predict, self.model, self.x, self.labels)
        flops = work.kfac(products, len(self.x), directions)
        moved = num_bytes(self.args) + 4 * work.kfac_size(products)
        return Work(flops, moved, "highest")

    def gradient(self) -> Callable:
        rest = eqx.filter(self.model, eqx.is_inexact_array, inverse=True)

        def mean(arrays, x, labels):
            model = eqx.combine(arrays, rest)
            one = lambda x, label: cross_entropy(predict(model, x, label), x, label)
            return jnp.mean(jax.vmap(one)(x, labels))

        return jax.grad(mean)


def make_jobs(quick: bool) -> list[Job]:
    keys = jr.split(KEY, 6)
    inputs, width, depth, num = (64, 128, 2, 64) if quick else (784, 460, 3, 2048)
    mlp = eqx.nn.MLP(inputs, CLASSES, width, depth, key=keys[0])
    side, channels, few = (8, 4, 8) if quick else (32, 32, 128)
    convolutional = Convolutional(channels, key=keys[1])
    size, length = (16, 8) if quick else (128, 32)
    transformer = Transformer(size, key=keys[2])
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(mlp, eqx.is_array)))
    jobs = [
        Job(
            "mlp",
            f"MLP, {count:,} parameters, {num:,} examples",
            mlp,
            jr.normal(keys[3], (num, inputs)),
            dense_peer,
        ),
        Job(
            "cnn",
            f"CNN, {few} images of {side} x {side}",
            convolutional,
            jr.normal(keys[4], (few, 3, side, side)),
            convolutional_peer,
        ),
        Job(
            "transformer",
            f"2 transformer blocks, {few} sequences of {length}",
            transformer,
            jr.randint(keys[5], (few, length), 0, 100),
        ),
    ]
    # The others take seconds to compile, however small they are.
    return jobs[:1] if quick else jobs


def has_peer() -> bool:
    return importlib.util.find_spec("kfac_jax") is not None


def peer_way(
    loss: Callable, own: Callable[[Any], Any], images: Callable, job: Job
) -> Callable:
    """The update of all factors by kfac-jax, for labels that it draws.

    `own` and `images` convert parameters and examples to its layout.
    """
    import kfac_jax

    arrays, x, labels = job.args
    estimator = kfac_jax.BlockDiagonalCurvature(loss, params_index=0)
    state = estimator.init(
        rng=KEY,
        func_args=(own(arrays), (images(x), labels)),
        exact_powers_to_cache=None,
        approx_powers_to_cache=None,
        cache_eigenvalues=False,
    )

    def way(arrays, x, labels):
        return estimator.update_curvature_matrix_estimate(
            state,
            ema_old=0.0,
            ema_new=1.0,
            identity_weight=0.0,
            batch_size=len(x),
            rng=KEY,
            func_args=(own(arrays), (images(x), labels)),
            estimation_mode="fisher_gradients",
        )

    return way


def registered(logits, labels):
    import kfac_jax

    kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
    log_likelihood = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_likelihood, labels[:, None], 1))


def dense_peer(job: Job) -> Callable:
    def own(model):
        return [(layer.weight.T, layer.bias) for layer in model.layers]

    def loss(parameters, batch):
        x, labels = batch
        for i, (weight, bias) in enumerate(parameters):
            x = jax.nn.relu(x) if i else x
            x = x @ weight + bias
        return registered(x, labels)

    return peer_way(loss, own, lambda x: x, job)


def convolutional_peer(job: Job) -> Callable:
    """With channels last, as kfac-jax requires, which is fast on CPUs."""
    strides = [layer.stride for layer in job.model.convolutions]

    def own(model):
        of_one = lambda x: (jnp.transpose(x.weight, (2, 3, 1, 0)), x.bias[:, 0, 0])
        last = (model.last.weight.T, model.last.bias)
        return [*map(of_one, model.convolutions), last]

    def loss(parameters, batch):
        x, labels = batch
        *convolutions, last = parameters
        for (weight, bias), stride in zip(convolutions, strides, strict=True):
            x = lax.conv_general_dilated(
                x,
                weight,
                stride,
                [(1, 1), (1, 1)],
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x + bias)
        weight, bias = last
        return registered(jnp.mean(x, (1, 2)) @ weight + bias, labels)

    return peer_way(loss, own, lambda x: jnp.transpose(x, (0, 2, 3, 1)), job)


def make_cases(quick: bool) -> list[Case]:
    cases = []
    for job in make_jobs(quick):
        ways = {
            OURS: job.way(filter_kfac, **LABELS),
            PLAIN: job.gradient(),
            "reduce": job.way(filter_kfac, **LABELS, weight_sharing="reduce"),
            "corrected": job.way(filter_kfac, **LABELS, corrected=True),
        }
        limits, missing = {PLAIN: 1.5}, {}
        if job.of_peer is not None and has_peer():
            ways[PEER] = job.of_peer(job)
            limits[PEER] = 1.0
        elif job.of_peer is not None:
            missing[PEER] = "not installed"
        else:
            missing[PEER] = "knows neither attention nor embeddings"
        title = f"{job.title}: drawn labels"
        case = Case(job.name, title, ways, job.args, job.work_of(1))
        cases.append(_without_bars(case, limits=limits, missing=missing))
        exact = {OURS: job.way(filter_kfac), PLAIN: job.gradient()}
        name, title = f"{job.name}-exact", f"{job.title}: exact"
        case = Case(name, title, exact, job.args, job.work_of(CLASSES))
        cases.append(_without_bars(case, limits={PLAIN: CLASSES + 1.0}))
    cases.append(_diagonal_case(quick))
    return cases


def _without_bars(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, best_memory=None, best_time=None, **changes)


def _diagonal_case(quick: bool) -> Case:
    width, num = (8, 16) if quick else (58, 256)
    model = eqx.nn.MLP(16, CLASSES, width, 2, jnp.tanh, key=KEY)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    job = Job("diagonal", "", model, jr.normal(KEY, (num, 16)))
    rest = eqx.filter(model, eqx.is_inexact_array, inverse=True)

    def squared(arrays, x, labels):
        """The diagonal from Jacobians by `jacrev`, and the Hessian of the loss."""

        def one(x, label):
            outputs = lambda arrays: eqx.combine(arrays, rest)(x)
            curve = jax.hessian(cross_entropy)(outputs(arrays), x, label)
            square = lambda j: jnp.einsum("c...,cd,d...->...", j, curve, j)
            return jax.tree.map(square, jax.jacrev(outputs)(arrays))

        mean = lambda x: jnp.mean(x, 0)
        return jax.tree.map(mean, jax.vmap(one)(x, labels))

    ways = {
        OURS: job.way(filter_ggn_diagonal),
        "filter_ggn, dense": job.way(filter_ggn, flat=True),
        "jax.jacrev, squared": squared,
        "drawn labels": job.way(filter_ggn_diagonal, **LABELS),
        "empirical": job.way(filter_ggn_diagonal, fisher="empirical"),
        PLAIN: job.gradient(),
    }
    title = f"diagonal: MLP, {count:,} parameters, {num} examples"
    limits = {"filter_ggn, dense": 1 / 5, "jax.jacrev, squared": 1 / 3}
    products = work.products_of(predict, model, job.x, job.labels)
    flops = work.ggn_diagonal(products, num, CLASSES)
    least = Work(flops, num_bytes(job.args, job.args[0]))
    return _without_bars(Case("diagonal", title, ways, job.args, least), limits=limits)


def memory_bars(quick: bool) -> list[Bar]:
    """For a fixed microbatch size, temporaries do not grow with the examples."""
    bars = []
    for job in make_jobs(quick):
        size, found = max(len(job.x) // 4, 1), []
        for repeats in (1, 4):
            many = dataclasses.replace(job, x=jnp.concatenate([job.x] * repeats))
            way = many.way(filter_kfac, **LABELS, microbatch_size=size)
            found.append(temporaries(jax.jit(way).lower(*many.args)))
        name = f"{job.name}: temporaries with 4 times the examples, of those before"
        bars.append(Bar(name, found[1] / found[0], 1.05))
    return bars


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    measured: list[tuple[Case, list[Row]]] = []
    bars: list[Bar] = []
    for case in make_cases(quick):
        rows = measure(case, rounds=2 if quick else 7)
        measured.append((case, rows))
        bars += bars_of(case, rows)
    bars += memory_bars(quick)
    return *results(measured, bars), bars
