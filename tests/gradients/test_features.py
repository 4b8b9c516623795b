"""Projections of gradients beside their sum, against the estimator and dense ones."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqxbatch
from eqxbatch import (
    EmpiricalNTK,
    filter_kfac,
    filter_micro_grad,
    filter_micro_value_and_grad,
    Mean,
    MemoryBudget,
    Projection,
    Sum,
)
from ..helpers import (
    assert_same,
    BLOCK,
    drawn,
    integers,
    make_mesh,
    normal,
    put,
    variants,
)
from .models import combined, data, each, loss, METHODS, norms_of


class OfLoss(eqx.Module):
    """The loss of an example as a model, for the estimator."""

    model: eqx.Module
    loss: object = eqx.field(static=True)

    def __call__(self, example):
        return self.loss(self.model, *example)


def estimated(fun, model, projection, *args, **settings):
    estimator = EmpiricalNTK(OfLoss(model, fun), metric=projection, **settings)
    return jax.device_get(estimator.features(args))


@eqx.filter_jit
def _of_gradients(projection, params, gradients):
    return projection.drawn(params).of_gradients(gradients)


def projected(projection, model, grads):
    """The gradients of examples times the projections of unit vectors."""
    params = eqx.filter(model, eqx.is_inexact_array)
    leaves = jax.tree.leaves(params)
    sizes = [x.size for x in leaves]
    cut = lambda v: np.split(np.asarray(v), np.cumsum(sizes)[:-1], axis=1)
    eye = cut(np.eye(sum(sizes)))
    units = [
        jnp.asarray(x.reshape(len(x), *y.shape), y.dtype)
        for x, y in zip(eye, leaves, strict=True)
    ]
    matrix = _of_gradients(projection, params, units)
    flat = [np.asarray(g).reshape(len(g), -1) for g in jax.tree.leaves(grads)]
    return np.concatenate(flat, axis=1) @ np.asarray(matrix)


class Layers(eqx.Module):
    """Layers whose gradients are projected in different ways, and a table used twice.

    Of its arrays, one has no rule, one is not used, and one is no parameter.
    """

    conv: eqx.nn.Conv2d
    grouped: eqx.nn.Conv2d
    table: eqx.nn.Embedding
    linear: eqx.nn.Linear
    scale: jax.Array
    sorted: jax.Array
    unused: jax.Array
    count: jax.Array
    name: str = "layers"
    nothing: None = None

    def __init__(self, getkey, dtype=jnp.float64):
        make = functools.partial(drawn, dtype=dtype)
        self.conv = make(eqx.nn.Conv2d, 1, 4, 3, key=getkey())
        self.grouped = make(eqx.nn.Conv2d, 4, 4, 3, groups=2, key=getkey())
        self.table = make(eqx.nn.Embedding, 6, 4, key=getkey())
        self.linear = make(eqx.nn.Linear, 4, 4, key=getkey())
        self.scale = normal(getkey(), (), dtype)
        self.sorted = normal(getkey(), (4, 2), dtype)
        self.unused = jnp.ones((3, 2), dtype)
        self.count = jnp.arange(3)

    def __call__(self, image, tokens):
        pixels = jnp.tanh(self.grouped(jnp.tanh(self.conv(image)))).mean((1, 2))
        step = lambda state, word: (jnp.tanh(self.linear(state) + word), None)
        state, _ = jax.lax.scan(step, pixels, jax.vmap(self.table)(tokens))
        logits = self.table.weight @ state * self.scale
        return jnp.sum(jnp.cosh(logits)) + jnp.sum(jnp.sort(self.sorted, 0)[:2] ** 3)


def layers(getkey, num, dtype=jnp.float64):
    model, tokens = Layers(getkey, dtype), integers(getkey(), (num, 5), 6)
    return model, normal(getkey(), (num, 1, 7, 7), dtype), tokens


def of_layers(model, image, tokens):
    return model(image, tokens)


KINDS = ("dense", "sparse", "auto")


def some_of(first, *names):
    """All pairs with kinds, of which all but some are left to the matrix."""
    pairs = [*itertools.product(first, KINDS)]
    return variants(pairs, *(x for x in pairs if x not in names))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("method", "kind"),
    some_of(METHODS, ("sites", "sparse"), ("auto", "dense"), ("materialise", "auto")),
)
def test_layers(getkey, method, kind):
    model, *args = layers(getkey, 7)
    sketch = Projection(6, jr.key(3), kind=kind, entries=2)
    grads = eqx.filter_vmap(eqx.filter_grad(of_layers), in_axes=(None, 0, 0))
    grads = jax.device_get(eqx.filter_jit(grads)(model, *args))
    gradient, found = filter_micro_grad(
        of_layers, features=sketch, microbatch_size=3, method=method
    )(model, *args)
    assert_same(found.features, projected(sketch, model, grads), tol=1e-12)
    assert_same(found.features, estimated(of_layers, model, sketch, *args), tol=1e-12)
    assert_same(gradient, combined(grads, np.full(7, 1 / 7)), tol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("metric", "kind"),
    some_of(
        ("diagonal", "factors", "other"), ("factors", "dense"), ("other", "sparse")
    ),
)
def test_in_a_metric(getkey, metric, kind):
    pytest.importorskip("lineax")
    model = drawn(eqx.nn.MLP, 3, 2, 4, 1, key=getkey(), dtype=jnp.float64)
    args = [normal(getkey(), (7, n), jnp.float64) for n in (3, 2)]
    fun = lambda model, x, y: jnp.sum(jnp.cosh(model(x) - y))
    params = eqx.filter(model, eqx.is_inexact_array)
    matrix = jax.tree.map(lambda x: jnp.abs(x) + 1, params)
    if metric != "diagonal":
        factors = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(o**2))
        is_factored = metric == "factors"
        operator = factors(model, args[0]).operator(damping=0.1, factored=is_factored)
        matrix = operator.inverse()
    sketch = Projection(8, jr.key(3), metric=matrix, kind=kind, entries=2)
    grads = each(model, *args, fun=fun)
    gradient, found = filter_micro_grad(
        fun, features=sketch, clip_norm=0.5, return_norms=True, microbatch_size=4
    )(model, *args)
    assert_same(found.features, projected(sketch, model, grads), tol=1e-11)
    assert_same(found.features, estimated(fun, model, sketch, *args), tol=1e-11)
    assert_same(found.norms, norms_of(grads), tol=1e-12)
    scale = np.minimum(1, 0.5 / norms_of(grads)) / 7
    assert_same(gradient, combined(grads, scale), tol=1e-12)


@pytest.mark.usefixtures("x64")
def test_a_stack_of_layers_and_parameters_without_entries(getkey):
    # Entries of a layer share a sign for all layers, so that gradients are formed.
    model = {
        "layers": normal(getkey(), (2, 3, 3), jnp.float64),
        "nothing": jnp.zeros((0, 3)),
    }
    x = normal(getkey(), (5, 3), jnp.float64)

    def fun(model, x):
        state, _ = jax.lax.scan(
            lambda h, w: (jnp.tanh(w @ h), None), x, model["layers"]
        )
        return jnp.sum(state) + jnp.sum(model["nothing"] @ x)

    sketch = Projection(6, jr.key(3))
    grads = jax.device_get(jax.jit(jax.vmap(jax.grad(fun), (None, 0)))(model, x))
    _, found = filter_micro_grad(fun, features=sketch, microbatch_size=2)(model, x)
    assert_same(found.features, projected(sketch, model, grads), tol=1e-12)


SKETCH = Projection(8, jr.key(1))


SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7)


@pytest.mark.parametrize("total", variants(SIZES, BLOCK - 1, BLOCK + 1))
def test_sizes(getkey, total):
    model, x, y = data(getkey(), total)
    if total == 0:
        # A mean of nothing is NaN, and a sum of nothing zero.
        fun = filter_micro_grad(
            loss, features=SKETCH, accumulator=Sum(), microbatch_size=BLOCK
        )
        assert fun(model, x, y)[1].features.shape == (0, 8)
        return
    gradient, found = filter_micro_grad(loss, features=SKETCH, microbatch_size=BLOCK)(
        model, x, y
    )
    grads = each(model, x, y)
    assert_same(found.features, projected(SKETCH, model, grads), tol=1e-5)
    assert_same(gradient, combined(grads, np.full(total, 1 / total)), tol=1e-5)


SETTINGS = {
    "weights": {"accumulator": Sum(weights=jnp.arange(7.0))},
    "mean of weights": {"accumulator": Mean(weights=jnp.arange(7.0) % 3)},
    "running": {"accumulator": Mean(running=True)},
    "bounds": {"clip_norm": 0.7, "return_norms": True, "norms": "leaf"},
    "scale": {"scale": lambda norm: 1 / (1 + norm), "nan_safe": True},
    "moments": {"moments": True},
    "transform": {"transform": jnp.sign, "return_norms": True},
    "metrics": {"metrics": lambda g: g.scale, "moments": True},
    "values": {"value_accumulator": eqxbatch.Concat(), "nan_safe": True},
    "budget": {"microbatch_size": MemoryBudget(2**28)},
    "a part": {"where": lambda model: model.linear},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_with_other_settings(getkey, name):
    model, x, y = data(getkey(), 7)
    if "transform" in SETTINGS[name]:
        sign = lambda g: jax.tree.map(jnp.sign, g)
        settings = {**SETTINGS[name], "transform": sign}
    else:
        settings = SETTINGS[name]
    settings = {"microbatch_size": BLOCK, "has_aux": True, **settings}
    with_aux = lambda model, x, y: (loss(model, x, y), x)
    plain = filter_micro_value_and_grad(with_aux, **settings)(model, x, y)
    out = filter_micro_value_and_grad(with_aux, features=SKETCH, **settings)(
        model, x, y
    )
    for a, b in zip(plain[:2], out[:2], strict=True):
        assert_same(a, b, tol=1e-5)
    statistics = plain[2] if len(plain) > 2 else out[2]._replace(features=None)
    assert_same(statistics, out[2]._replace(features=None), tol=1e-5)
    chosen, grads = model, each(model, x, y)
    if "where" in settings:
        chosen, grads = model.linear, grads.linear
    assert_same(out[2].features, projected(SKETCH, chosen, grads), tol=1e-5)


def test_with_a_direction_and_few_microbatches(getkey):
    model, x, y = data(getkey(), 7)
    direction = eqx.filter(model, eqx.is_inexact_array)
    fun = filter_micro_grad(
        loss,
        features=SKETCH,
        against=direction,
        microbatch_size=BLOCK,
        num_real_microbatches=1,
    )
    _, found = fun(model, x, y)
    expected = projected(SKETCH, model, each(model, x, y))
    expected[BLOCK:] = 0
    assert_same(found.features, expected, tol=1e-5)


@pytest.mark.parametrize("method", variants(METHODS, "sites"))
def test_padding_and_what_is_not_finite(getkey, method):
    model, x, y = data(getkey(), 7)
    padded, weights = x.at[5:].set(jnp.nan), np.arange(7) < 5
    fun = filter_micro_grad(
        loss,
        features=SKETCH,
        accumulator=Mean(weights=weights),
        microbatch_size=BLOCK,
        method=method,
    )
    gradient, found = fun(model, padded, y)
    grads = each(model, x, y)
    assert_same(gradient, combined(grads, weights / 5), tol=1e-5)
    expected = projected(SKETCH, model, grads)
    assert_same(found.features[:5], expected[:5], tol=1e-5)
    assert np.isnan(found.features[5:]).all()


@jax.custom_vjp
def bounded(x):
    """The identity, which clips the gradient of an example."""
    return x


bounded.defvjp(
    lambda x: (x, None), lambda _, d: (d / jnp.maximum(1, 4 * jnp.linalg.norm(d)),)
)


@pytest.mark.parametrize("accumulator", (Mean(), Sum(weights=jnp.arange(7.0))))
def test_backward_passes_that_are_not_linear(getkey, accumulator):
    model, x, y = data(getkey(), 7)
    fun = lambda model, x, y: jnp.sum((bounded(model(x)) - y) ** 2)
    _, found = filter_micro_grad(
        fun, features=SKETCH, accumulator=accumulator, microbatch_size=BLOCK
    )(model, x, y)
    grads = each(model, x, y, fun=fun)
    assert_same(found.features, projected(SKETCH, model, grads), tol=1e-5)
    assert_same(found.features, estimated(fun, model, SKETCH, x, y), tol=1e-5)


HALF = (jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("dtype", variants(HALF, jnp.float16))
def test_half_precision_is_that_of_the_estimator(getkey, dtype):
    # Factors are widened, where gradients of the convolution would be rounded.
    model, *args = layers(getkey, 5, dtype)
    run = filter_micro_grad(of_layers, features=SKETCH, microbatch_size=2)
    _, found = run(model, *args)
    assert found.features.dtype == jnp.float32
    expected = estimated(of_layers, model, SKETCH, *args)
    assert_same(found.features, expected, tol=1e-4)


@pytest.mark.devices
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_meshes(getkey, kind):
    model, x, y = data(getkey(), 24)
    sketches = Projection(8, jr.key(1)), Projection(8, jr.key(1), kind="sparse")
    settings = {"microbatch_size": 16, "clip_norm": 0.5, "return_norms": True}
    mesh = make_mesh(kind)
    placed = jax.tree.map(lambda x: put(x, mesh, "data"), (x, y))
    for sketch in sketches:
        fun = filter_micro_grad(loss, features=sketch, **settings)
        expected = jax.device_get(fun(model, x, y))
        with jax.set_mesh(mesh):
            found = jax.device_get(fun(model, *placed))
        assert_same(found, expected, tol=1e-5)


@pytest.mark.devices
def test_inside_of_shard_map(getkey):
    model, x, y = data(getkey(), 16)
    mesh = make_mesh(AxisType.Auto)
    rows = PartitionSpec("data")
    fun = filter_micro_grad(loss, features=SKETCH, microbatch_size=2)
    params, static = eqx.partition(model, eqx.is_array)
    run = jax.shard_map(
        lambda params, x, y: fun(eqx.combine(params, static), x, y)[1].features,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=rows,
    )
    found = jax.jit(run)(params, *(put(a, mesh, "data") for a in (x, y)))
    expected = projected(SKETCH, model, each(model, x, y))
    assert_same(jax.device_get(found), expected, tol=1e-5)


def test_signs_are_drawn_before_the_loop(getkey):
    model, x, y = data(getkey(), 8)
    params, static = eqx.partition(model, eqx.is_array)

    def run(params, key):
        fun = filter_micro_grad(
            loss, features=Projection(8, key), microbatch_size=BLOCK
        )
        return fun(eqx.combine(params, static), x, y)[1].features

    traced = jax.make_jaxpr(run)(params, jr.key(0))
    assert "random_bits" in str(traced)
    loops = [*_loops(traced.jaxpr)]
    assert loops
    # Those that draw go through keys, and none of the others draws.
    drawing = [x for x in loops if "random_bits" in str(x)]
    assert not any("dot_general" in str(x) for x in drawing)
    # The key is an argument of the program, and other keys have other features.
    compiled = jax.jit(run)
    first, second, again = (compiled(params, jr.key(i)) for i in (0, 1, 0))
    assert np.max(np.abs(np.asarray(first - second))) > 0.01
    np.testing.assert_array_equal(first, again)


def _loops(jaxpr):
    """The bodies of all loops, at any depth."""
    for eqn in jaxpr.eqns:
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                if eqn.primitive.name in ("scan", "while"):
                    yield inner
                yield from _loops(inner)


def test_influences_are_products_of_features(getkey):
    # On average over directions, these are the inner products of gradients.
    model, x, y = data(getkey(), 7)
    grads = each(model, x, y)
    flat = [np.asarray(g).reshape(7, -1) for g in jax.tree.leaves(grads)]
    flat = np.concatenate(flat, axis=1)
    fun = filter_micro_grad(
        loss, features=Projection(4096, jr.key(2)), microbatch_size=BLOCK
    )
    features = np.asarray(fun(model, x, y)[1].features)
    error = features @ features.T - flat @ flat.T
    assert np.max(np.abs(error)) < 0.1 * np.max(flat @ flat.T)


WRONG = {
    "number": ({"features": 8}, TypeError, "`features` must be a `Projection`"),
    "batched": (
        {"features": SKETCH, "batched": True, "accumulator": Mean()},
        ValueError,
        "`features` is about single examples, but with `batched=True`",
    ),
    "axis": (
        {"features": SKETCH, "axis_name": "batch"},
        ValueError,
        "`features` is about single examples, but `axis_name`",
    ),
    "metric": (
        {"features": Projection(8, jr.key(0), metric={"w": jnp.ones(3)})},
        ValueError,
        "`metric` must be a PyTree of non-negative arrays like the parameters",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(getkey, name):
    settings, error, match = WRONG[name]
    model, x, y = data(getkey(), 3)
    with pytest.raises(error, match=match):
        filter_micro_grad(loss, **settings)(model, x, y)


def test_complex_parameters_are_refused_as_by_the_estimator():
    fun = lambda w, x: jnp.abs(jnp.vdot(w, x)) ** 2
    w, x = jnp.ones(3, jnp.complex64), jnp.ones((4, 3), jnp.complex64)
    for call in (
        lambda: filter_micro_grad(fun, features=SKETCH)(w, x),
        lambda: EmpiricalNTK(eqx.Partial(fun, w), metric=SKETCH).features(x),
    ):
        with pytest.raises(ValueError, match="for real parameters, but some are"):
            call()
