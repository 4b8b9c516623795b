"""Random projections of gradients, with and without a metric, against dense ones."""

import dataclasses
import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import EmpiricalNTK, filter_kfac, Projection
from ..helpers import assert_bits, assert_same, integers, make_mesh, normal, put
from .metric_models import (
    diagonal,
    Lookup,
    matrix,
    Net,
    of_lookup,
    of_operator,
    operator_of,
    parameters,
    subject,
    Tokens,
)
from .models import float64, jacobians, pairs


def signs_of(projection, leaves):
    """Random signs for the first axis of each leaf, and for all others together."""
    signs = []
    for number, leaf in enumerate(leaves):
        rows, *columns = leaf.shape or (1,)
        sizes = [rows, math.prod(columns)] if columns else [rows]
        keys = jr.split(jr.fold_in(projection.key, number), 2)
        draw = lambda key, size: (
            2
            * jnp.unpackbits(
                jr.bits(key, (size, -(-projection.dim // 8)), jnp.uint8),
                axis=1,
                count=projection.dim,
            ).astype(float)
            - 1
        )
        signs.append([*map(draw, keys, sizes)])
    return signs


def projected(projection, model, x):
    """The features of examples, from their Jacobians."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    fun = lambda params, x: eqx.combine(params, static)(x)
    each = jax.vmap(jax.jacrev(fun), (None, 0))

    @jax.jit
    def run(params, x):
        return each(params, x), signs_of(projection, jax.tree.leaves(params))

    slopes, drawn = jax.device_get(run(params, x))
    total = 0.0
    for jac, signs in zip(jax.tree.leaves(slopes), drawn, strict=True):
        jac = jac.reshape(*jac.shape[:2], *(len(y) for y in signs))
        axes = "ab"[: len(signs)]
        terms = "".join(f",{axis}j" for axis in axes)
        total += np.einsum(f"no{axes}{terms}->noj", jac, *signs)
    return total / np.sqrt(projection.dim)


@float64
@pytest.mark.parametrize("kind", (Tokens, pytest.param(Net, marks=pytest.mark.matrix)))
def test_projections_are_those_of_gradients(kind):
    model, projection = kind(jr.key(0)), Projection(8, jr.key(1))
    x = subject()[1] if kind is Net else integers(jr.key(2), (7, 5), 6)
    expected = projected(projection, model, x)

    @eqx.filter_jit
    def results(model, projection, x):
        kernel = EmpiricalNTK(model, metric=projection, trace_axes=())
        return kernel.features(x), dataclasses.replace(kernel, block_size=4)(x)

    features, kernel = results(model, projection, x)
    assert_same(features, jax.device_put(expected))
    assert_same(kernel, pairs(expected, expected))


@float64
def test_a_side_of_a_weight_with_axes_in_both_arrays_of_signs():
    """As heads and their sizes, of which an attention has its outputs."""

    class Heads(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return jnp.einsum("hkt,hko->to", jnp.tanh(x), self.weight).sum(0)

    model = Heads(normal(jr.key(0), (2, 3, 4), float))
    x = normal(jr.key(1), (3, 2, 3, 5), float)
    sketch = Projection(8, jr.key(2))
    found = EmpiricalNTK(model, metric=sketch, trace_axes=()).features(x)
    assert_same(found, jax.device_put(projected(sketch, model, x)))


def test_projections_are_unbiased():
    # For all signs of an outer product of 2 and 3 numbers, and of 2 numbers.
    rng = np.random.default_rng(0)
    vectors = [(rng.normal(size=(2, 3)), rng.normal(size=2)) for _ in range(2)]
    signs = np.array([*itertools.product((-1, 1), repeat=7)])
    products = [
        np.einsum("sa,sb,ab->s", signs[:, :2], signs[:, 2:5], weight)
        + signs[:, 5:] @ bias
        for weight, bias in vectors
    ]
    single = products[0] * products[1]
    expected = sum(np.sum(x * y) for x, y in zip(*vectors, strict=True))
    np.testing.assert_allclose(single.mean(), expected)

    dim, num = 4, 400

    @jax.jit
    @jax.vmap
    def estimate(key):
        arrays = [jnp.asarray(x, "float32") for x in vectors[0]]
        drawn = Projection(dim, key).drawn(arrays)
        of = lambda pair: drawn.of_gradients([jnp.asarray(x)[None] for x in pair])[0]
        pairs = [[x.astype("float32") for x in pair] for pair in vectors]
        return jnp.dot(*map(of, pairs))

    estimates = np.asarray(estimate(jr.split(jr.key(0), num)))
    deviation = np.sqrt(single.var() / dim)
    assert abs(estimates.mean() - expected) < 4 * deviation / np.sqrt(num)
    assert 0.8 < estimates.std() / deviation < 1.2


def directions(metric):
    """The projection of each unit gradient: `(parameters, dim)`."""
    num = sum(metric.unravel.sizes)
    units = jax.tree.leaves(jax.vmap(metric.unravel)(jnp.eye(num)))
    return metric.projected.of_gradients(units)


def plain_weights(model):
    num = sum(x.size for x in jax.tree.leaves(parameters(model)))
    return None, np.eye(num)


def of_net(make):
    metric, dense = make()
    return subject()[0], subject()[1], metric, dense


def of_tokens(**settings):
    """A table that is only looked up, and a weight with two uses."""
    model, x, *_ = of_lookup()
    call = filter_kfac(
        lambda m, x: m(x),
        lambda o, x: jnp.sum(jnp.cosh(o)),
        corrected=not settings.get("factored", False),
    )
    metric, dense = operator_of(call(model, x), True, {"damping": 0.1, **settings})
    return model, x, metric, np.asarray(dense)


SUBJECTS = {
    "none": lambda: of_net(lambda: plain_weights(subject()[0])),
    "diagonal": lambda: of_net(diagonal),
    "matrix": lambda: of_net(matrix),
    "factored": lambda: of_net(lambda: of_operator(damping=0.1, factored=True)),
    "undamped": lambda: of_net(lambda: of_operator(is_inverse=False)),
    "inverse": lambda: of_net(lambda: of_operator(damping=0.1)),
    "corrected": lambda: of_net(lambda: of_operator(True, damping=0.1)),
    "tokens": lambda: of_tokens(relative=True, factored=True),
    "tokens, corrected": of_tokens,
}


CASES = [
    ("factored", "dense"),
    ("corrected", "sparse"),
    ("tokens, corrected", "dense"),
]
CASES += [
    pytest.param(*case, marks=pytest.mark.matrix)
    for case in itertools.product(SUBJECTS, ("dense", "sparse", "auto"))
    if case not in CASES
]


@float64
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_projections_in_a_metric(name, kind):
    model, x, metric, dense = SUBJECTS[name]()
    dim, num = 12, 800
    settings = {"metric": metric, "kind": kind, "entries": 2}

    @eqx.filter_jit
    def results(model, settings, x):
        of_key = lambda key: EmpiricalNTK(
            model, metric=Projection(dim, key, **settings), trace_axes=()
        )
        kernel = of_key(jr.key(3))
        found = kernel.features(x), dataclasses.replace(kernel, block_size=3)(x)
        # `E[S^T S]` in the metric, and the mean of the squares of its entries.
        each = jax.lax.map(
            lambda key: directions(of_key(key).metric),
            jr.split(jr.key(4), num),
            batch_size=100,
        )
        grams = jnp.einsum("kpj,kqj->kpq", each, each)
        return found, directions(kernel.metric), jnp.mean(grams, 0), jnp.std(grams, 0)

    (features, kernel), matrix, mean, std = results(model, settings, x)
    jac = np.asarray(jacobians(model, x))
    # All factors in place of gradients are exact.
    expected = jac @ np.asarray(matrix)
    assert_same(features, jax.device_put(expected))
    assert_same(kernel, pairs(expected, expected))
    # So are the kernels that the features estimate, on average over the directions.
    error = np.abs(np.asarray(mean) - dense)
    limit = 5 * np.asarray(std) / np.sqrt(num) + 1e-12 * np.max(np.abs(dense))
    assert (error <= limit).all()
    # What is 5 standard errors must be small in itself.
    assert np.linalg.norm(limit) < 0.5 * np.linalg.norm(dense) * np.sqrt(jac.shape[-1])


@float64
def test_sparse_columns_have_some_signed_entries():
    model, dim, entries = subject()[0], 12, 4
    metric = {"dim": dim, "key": jr.key(0), "kind": "sparse", "entries": entries}
    run = eqx.filter_jit(
        lambda model: directions(
            EmpiricalNTK(model, metric=Projection(**metric)).metric
        )
    )
    columns = np.asarray(run(model))
    np.testing.assert_allclose(np.sum(columns != 0, 1), entries)
    np.testing.assert_allclose(np.abs(columns[columns != 0]), 1 / np.sqrt(entries))
    # One in each block of rows, and neighbours in one piece apart.
    blocks = columns.reshape(len(columns), entries, dim // entries)
    assert (np.sum(blocks != 0, 2) == 1).all()
    first = jax.tree.leaves(parameters(model))[0].size
    width = dim // entries
    pieces = np.abs(blocks[: first - first % width]).reshape(-1, width, entries, width)
    assert (np.sum(pieces != 0, 1) == 1).all()


def test_sparse_variance():
    """At most that of independent signs, for any vectors."""
    rng, dim, num = np.random.default_rng(0), 8, 4000
    x, y = (rng.normal(size=(30, 2)).astype("float32") for _ in range(2))

    @jax.jit
    @jax.vmap
    def estimate(key):
        sketch = Projection(dim, key, kind="sparse", entries=2)
        drawn = sketch.drawn(jnp.asarray(x))
        return jnp.dot(*(drawn.of_gradients([jnp.asarray(v)[None]])[0] for v in (x, y)))

    found = np.asarray(estimate(jr.split(jr.key(0), num)))
    bound = (np.sum(x**2) * np.sum(y**2) + np.sum(x * y) ** 2) / dim
    assert abs(found.mean() - np.sum(x * y)) < 4 * np.sqrt(bound / num)
    assert 0.7 * bound < found.var() < 1.1 * bound


@float64
def test_a_metric_of_ones_changes_nothing():
    model, x, _ = subject()
    ones = jax.tree.map(jnp.ones_like, parameters(model))

    def results(model, ones, x):
        for kind, metric in itertools.product(("dense", "sparse"), (None, ones)):
            sketch = Projection(6, jr.key(1), metric=metric, kind=kind, entries=3)
            yield EmpiricalNTK(model, metric=sketch, trace_axes=()).features(x)

    dense, also_dense, sparse, also_sparse = eqx.filter_jit(
        lambda *args: [*results(*args)]
    )(model, ones, x)
    assert_same(also_dense, dense)
    assert_same(also_sparse, sparse)
    assert np.max(np.abs(np.asarray(sparse - dense))) > 0.1


@float64
def test_auto_looks_at_the_array_alone():
    # Of many directions, a large matrix keeps its factors, and all else is sparse.
    auto = Projection(8, jr.key(0), kind="auto")
    assert auto.is_sparse((20,))
    assert auto.is_sparse((2, 2))
    assert not auto.is_sparse((64, 64))
    assert auto.is_sparse((1, 64, 64), is_formed=True)
    assert not Projection(1, jr.key(0), kind="auto").is_sparse((20,))
    assert not Projection(1, jr.key(0)).is_sparse((20,))
    # Texts of different lengths are different programs with the same directions.
    model, sketch = Lookup(jr.key(0)), Projection(8, jr.key(1), kind="auto")
    texts = [integers(jr.key(i), (3, num), 6) for i, num in ((2, 5), (3, 2))]

    @eqx.filter_jit
    def results(model, sketch, texts):
        kernel = EmpiricalNTK(model, metric=sketch, trace_axes=())
        features = [kernel.features(x) for x in texts]
        return directions(kernel.metric), features, kernel(*texts)

    matrix, features, kernel = results(model, sketch, texts)
    expected = [np.asarray(jacobians(model, x)) @ np.asarray(matrix) for x in texts]
    assert_same(features, [*map(jax.device_put, expected)])
    assert_same(kernel, pairs(*expected))


def test_blocks_and_products_with_vectors():
    # In float32, with the same numbers in all blocks.
    model, x = eqx.nn.MLP(3, 2, 8, 1, key=jr.key(0)), normal(jr.key(1), (7, 3))
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(o**2))
    metric, _ = operator_of(call(model, x), True, {"damping": 0.1})
    sketch = Projection(8, jr.key(1), metric=metric, kind="auto", entries=2)
    vector = normal(jr.key(2), (7, 2))

    @eqx.filter_jit
    def results(model, sketch, x, vector):
        kernel = EmpiricalNTK(model, metric=sketch, trace_axes=())
        sized = [dataclasses.replace(kernel, block_size=size) for size in (1, 3, 7, 8)]
        features = [of.features(x) for of in (kernel, *sized)]
        return features, kernel(x), kernel.untraced_matvec(x, None, vector)

    (whole, *blocks), kernel, product = results(model, sketch, x, vector)
    assert whole.dtype == jnp.float32
    assert whole.shape == (7, 2, 8)
    for features in blocks:
        assert_same(features, whole)
    kernel = np.asarray(kernel)
    assert (kernel == kernel.transpose(1, 0, 3, 2)).all()
    assert_same(product, np.einsum("abij,bj->ai", kernel, vector), tol=1e-5)


@float64
def test_a_store_refuses_another_projection(tmp_path):
    model, x, metric, _ = SUBJECTS["factored"]()
    other, _ = of_operator(damping=0.2, factored=True)
    x = np.asarray(x)

    def run(**settings):
        sketch = Projection(8, jr.key(1), **settings)
        kernel = EmpiricalNTK(model, metric=sketch, trace_axes=(), block_size=3)
        return kernel.features(x, store=tmp_path / "features")

    found = run(metric=metric)
    assert_bits(np.asarray(run(metric=metric)), np.asarray(found))
    for settings in (
        {"metric": other},
        {"metric": metric, "kind": "sparse"},
        {},
    ):
        with pytest.raises(ValueError, match="has another map than this one"):
            run(**settings)


@pytest.mark.devices
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_projections_on_a_mesh(kind):
    model, x = eqx.nn.MLP(3, 2, 8, 1, key=jr.key(0)), normal(jr.key(1), (8, 3))
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(o**2))
    metric, _ = operator_of(call(model, x), True, {"damping": 0.1})

    @eqx.filter_jit
    def results(model, metric, x):
        sketches = [
            Projection(8, jr.key(1), metric=metric, kind="auto", entries=2),
            Projection(8, jr.key(1), kind="sparse"),
        ]
        kernels = [EmpiricalNTK(model, metric=sketch) for sketch in sketches]
        return [kernel.features(x) for kernel in kernels], kernels[0](x)

    expected = jax.device_get(results(model, metric, x))
    mesh = make_mesh(kind, (4,))
    found = jax.device_get(results(model, metric, put(x, mesh, "data")))
    assert_same(jax.tree.map(jax.device_put, found), expected)
