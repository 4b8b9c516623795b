"""Moments, norms by group, scales and inner products of per-example gradients."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxbatch
from eqxbatch import filter_micro_grad, filter_micro_value_and_grad, Mean, Sum
from ..helpers import (
    assert_same,
    BLOCK,
    drawn,
    integers,
    KINDS,
    make_mesh,
    memory,
    normal,
    put,
    variants,
)
from .models import combined, data, each, loss, METHODS, norms_of, values_of


class Network(eqx.Module):
    """Layers whose squares are formed in different ways."""

    first: eqx.nn.Linear
    conv: eqx.nn.Conv1d
    norm: eqx.nn.LayerNorm
    table: jax.Array
    name: str = "network"
    nothing: None = None

    def __call__(self, x):
        hidden = jnp.tanh(self.first(x)) * self.norm(x[:4])[0]
        rows = self.table[(jnp.abs(x[:3]) * 3).astype(jnp.int32) % 5]
        return jnp.sum(jnp.sin(self.conv(hidden[None])) ** 2) + jnp.sum(rows @ x[:2])


def network(getkey, dtype=jnp.float64):
    keys = [getkey() for _ in range(2)]
    return Network(
        drawn(eqx.nn.Linear, 8, 6, key=keys[0], dtype=dtype),
        drawn(eqx.nn.Conv1d, 1, 2, 3, key=keys[1], dtype=dtype),
        eqx.nn.LayerNorm(4, dtype=dtype),
        normal(getkey(), (5, 2), dtype),
    )


def per_example(fun, model, *args):
    grads = eqx.filter_vmap(eqx.filter_grad(fun), in_axes=(None, *[0] * len(args)))
    return jax.device_get(eqx.filter_jit(grads)(model, *args))


def products(grads, direction):
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    return sum(
        np.real(np.conj(x) * np.asarray(v)).reshape(len(x), -1).sum(1) for x, v in pairs
    )


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
@pytest.mark.usefixtures("x64")
def test_moments_and_inner_products_of_layers(getkey, method):
    model, total = network(getkey), 37
    x = normal(getkey(), (total, 8), jnp.float64)
    direction = eqx.filter(model, eqx.is_inexact_array)
    grads = per_example(lambda m, x: m(x), model, x)
    # Products of squares need 16 examples; 18 divides no rest but one that overlaps.
    sizes = ((18, 1.0),) if method == "materialise" else ((18, 1.0), (1, None))
    for size, clip_norm in sizes:
        gradient, found = filter_micro_grad(
            lambda m, x: m(x),
            microbatch_size=size,
            moments=True,
            against=direction,
            clip_norm=clip_norm,
            method=method,
        )(model, x)
        mean, variance, noise = found.moments
        scale = np.ones(total)
        if clip_norm is not None:
            scale = np.minimum(1, clip_norm / norms_of(grads))
        assert_same(gradient, combined(grads, scale / total), tol=1e-12)
        assert_same(mean, jax.tree.map(lambda g: g.mean(0), grads), tol=1e-12)
        truth = jax.tree.map(lambda g: g.var(0, ddof=1), grads)
        assert_same(variance, truth, tol=1e-11)
        of_all = [sum(np.sum(x) for x in jax.tree.leaves(truth))]
        squares = [np.sum(g.mean(0) ** 2) for g in jax.tree.leaves(grads)]
        assert_same(noise, of_all[0] / (sum(squares) - of_all[0] / total), tol=1e-9)
        assert_same(found.inner_products, products(grads, direction), tol=1e-12)
        assert found.norms is None


def test_moments_of_gradients_that_are_alike():
    # All squares nearly cancel with those of the mean.
    rng = np.random.default_rng(0)
    x = (3 + 1e-3 * rng.normal(size=(64, 8))).astype("float32")
    w = rng.normal(size=(16, 8)).astype("float32")
    fun = lambda w, x: jnp.sum(jnp.exp(0.01 * (w @ x)))
    _, found = filter_micro_grad(fun, moments=True)(w, x)
    wide = lambda x: np.exp(0.01 * (w.astype(float) @ x))[:, None] * x * 0.01
    truth = np.stack([wide(row.astype(float)) for row in x]).var(0, ddof=1)
    np.testing.assert_allclose(found.moments.variance, truth, rtol=1e-3)


@pytest.mark.parametrize("power", (-25, -12, 12, 25))
def test_moments_of_factors_out_of_range(power):
    # The square of each factor is no number of float32, but that of the gradient is.
    rng = np.random.default_rng(1)
    size = np.float32(10.0**power)
    x = rng.normal(size=(32, 8)).astype("float32") * size
    x[::2] /= size
    y = rng.normal(size=(32, 16)).astype("float32")
    y[1::2] /= size
    fun = lambda w, x, y: jnp.dot(y, w @ x)
    _, found = filter_micro_grad(fun, moments=True)(np.zeros((16, 8), "float32"), x, y)
    truth = np.einsum("ni,nj->nij", y.astype(float), x.astype(float)).var(0, ddof=1)
    np.testing.assert_allclose(found.moments.variance, truth, rtol=1e-4)


@pytest.mark.cpu
def test_moments_take_little_memory(getkey):
    model = drawn(eqx.nn.MLP, 128, "scalar", 128, 1, key=getkey())
    x = normal(getkey(), (256, 128))
    params, static = eqx.partition(model, eqx.is_array)
    fun = lambda params, x: eqx.combine(params, static)(x)
    clipped = filter_micro_grad(fun, clip_norm=1.0, microbatch_size=64)
    moments = filter_micro_grad(fun, moments=True, microbatch_size=64)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    # Those of 64 examples would be 64 times the size.
    sizes = [memory(f, params, x).temp_size_in_bytes for f in (clipped, moments)]
    assert sizes[1] < sizes[0] + 3 * size


def lookups(tables, tokens):
    """A loss of tables whose rows are looked up, some twice or not at all."""
    step = lambda total, token: (jnp.tanh(total + tables["scan"][token]), None)
    total, _ = jax.lax.scan(step, jnp.zeros(3), tokens)
    rows = [
        tables["rows"][tokens.reshape(2, 3)],
        jnp.take(tables["columns"], tokens, axis=1).T,
        tables["missing"].at[tokens + 3].get(mode="fill", fill_value=0),
    ]
    rows = [x.reshape(-1, 3) for x in rows]
    return jnp.sum(total) + jnp.sum(jnp.sin(jnp.cumsum(jnp.stack(rows), axis=1)))


@pytest.mark.usefixtures("x64")
def test_rows_of_tables(getkey):
    names = ("scan", "rows", "missing")
    tables = {name: normal(getkey(), (5, 3), jnp.float64) for name in names}
    tables["columns"] = normal(getkey(), (3, 5), jnp.float64)
    tokens = integers(getkey(), (7, 6), 5)
    fun = filter_micro_grad(
        lookups, moments=True, return_norms=True, norms="leaf", microbatch_size=BLOCK
    )
    _, found = fun(tables, tokens)
    grads = per_example(lookups, tables, tokens)
    truth = jax.tree.map(lambda g: g.reshape(7, -1), grads)
    norms = jax.tree.map(lambda g: np.sqrt(np.sum(g**2, 1)), truth)
    assert_same(found.norms, norms, tol=1e-12)
    variance = jax.tree.map(lambda g: g.var(0, ddof=1), grads)
    assert_same(found.moments.variance, variance, tol=1e-12)


@pytest.mark.cpu
def test_no_table_is_formed(getkey):
    table = drawn(eqx.nn.Embedding, 1000, 32, key=getkey())
    tokens = integers(getkey(), (16, 8), 1000)
    fun = lambda table, x: jnp.sum(jnp.tanh(jnp.mean(jax.vmap(table)(x), axis=0)))
    size = table.weight.nbytes
    sizes = [
        memory(filter_micro_grad(fun, **settings), table, tokens).temp_size_in_bytes
        for settings in ({"clip_norm": 1.0}, {"moments": True})
    ]
    assert sizes[0] < size / 2
    assert sizes[1] < 3 * size


@pytest.mark.devices
@pytest.mark.parametrize("kind", variants(KINDS, KINDS[0]))
def test_meshes(getkey, kind):
    model, x, y = data(getkey(), 24)
    direction = eqx.filter(model, eqx.is_inexact_array)
    fun = filter_micro_grad(
        loss,
        microbatch_size=16,
        moments=True,
        against=direction,
        scale=lambda norm: 1 / (1 + norm),
        norms="leaf",
        return_norms=True,
    )
    scaled = functools.partial(jax.tree.map, lambda norm: 1 / (1 + norm))
    expected = eqx.tree_at(lambda f: f.scale, fun, scaled)(model, x, y)
    mesh = make_mesh(kind)
    placed = jax.tree.map(lambda x: put(x, mesh, "data"), (x, y))
    with jax.set_mesh(mesh):
        found = eqx.tree_at(lambda f: f.scale, fun, scaled)(model, *placed)
    assert_same(jax.device_get(found), jax.device_get(expected), tol=1e-5)


def test_norms_of_leaves_and_groups(getkey):
    model, x, y = data(getkey(), 7)
    grads = each(model, x, y)
    by_leaf = jax.tree.map(
        lambda g: np.sqrt(np.sum(g.reshape(len(g), -1) ** 2, 1)), grads
    )
    settings = {"return_norms": True, "microbatch_size": BLOCK}
    bound = float(np.median(norms_of(grads)))
    fun = filter_micro_grad(loss, norms="leaf", clip_norm=bound, **settings)
    gradient, found = fun(model, x, y)
    assert_same(found.norms, by_leaf, tol=1e-5)
    # All are clipped together.
    scale = np.minimum(1, bound / norms_of(grads))
    assert_same(gradient, combined(grads, scale / 7), tol=1e-5)

    def group(path, leaf):
        return "matrix" if leaf.ndim == 2 else path.split(".")[1]

    _, found = filter_micro_grad(loss, norms=group, **settings)(model, x, y)
    expected = {
        "matrix": by_leaf.linear.weight,
        "linear": by_leaf.linear.bias,
        "scale": by_leaf.scale,
        "unused": by_leaf.unused,
    }
    assert_same(found.norms, expected, tol=1e-5)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_scales(getkey, method):
    model, x, y = data(getkey(), 7)
    grads, settings = each(model, x, y), {"method": method, "microbatch_size": BLOCK}
    norms = norms_of(grads)
    fun = filter_micro_grad(loss, scale=lambda norm: 1 / (norm + 0.01), **settings)
    expected = combined(grads, 1 / (norms + 0.01) / 7)
    assert_same(fun(model, x, y), expected, tol=1e-5)
    # A factor for each leaf, and one for a group of them.
    several = (
        ("leaf", lambda norms: jax.tree.map(lambda x: 2 / (1 + x), norms)),
        ("leaf", lambda norms: 2 / (1 + norms.linear.bias)),
        (lambda path, leaf: leaf.ndim, lambda norms: {1: 1.0, 2: 2 / (1 + norms[2])}),
    )
    # What follows from norms does not depend on how these were computed.
    for norms, scale in several[:1] if method == "materialise" else several:
        fun = filter_micro_grad(loss, scale=scale, norms=norms, **settings)
        size = lambda g: np.sqrt(np.sum(g.reshape(len(g), -1) ** 2, 1))
        if norms == "leaf":
            factors = jax.vmap(scale)(jax.tree.map(size, grads))
        else:
            of_groups = {2: size(grads.linear.weight), 1: np.zeros(7)}
            of_groups = jax.vmap(scale)(of_groups)
            factors = jax.tree.map(lambda g: of_groups[g.ndim - 1], grads)
        if not isinstance(factors, type(grads)):
            factors = jax.tree.map(lambda g: factors, grads)
        expected = jax.tree.map(
            lambda g, f: np.tensordot(np.asarray(f) / 7, g, 1), grads, factors
        )
        assert_same(fun(model, x, y), expected, tol=1e-5)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_bounds_of_examples(getkey, method):
    model, x, y = data(getkey(), 7)
    grads = each(model, x, y)
    norms = norms_of(grads)
    bounds = np.linspace(0, 2, 7).astype("float32") * norms
    fun = filter_micro_grad(
        loss, clip_norm=bounds, microbatch_size=BLOCK, method=method, return_norms=True
    )
    gradient, found = fun(model, x, y)
    assert_same(found.norms, norms, tol=1e-5)
    scale = np.minimum(1, np.linspace(0, 2, 7))
    assert_same(gradient, combined(grads, scale / 7), tol=1e-5)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_padding_has_no_influence(getkey, method):
    model, x, y = data(getkey(), 7)
    mask = np.arange(7) < 5
    padded = x.at[5:].set(jnp.nan)
    for accumulator in (Sum(weights=mask / 4), Mean(weights=mask)):
        fun = filter_micro_value_and_grad(
            loss,
            clip_norm=0.5,
            accumulator=accumulator,
            microbatch_size=BLOCK,
            method=method,
        )
        expected = fun(model, x, y)
        results = map(jax.tree.leaves, (fun(model, padded, y), expected))
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_derivatives_with_respect_to_weights_that_are_zero(getkey, method):
    model, x, y = data(getkey(), 7)
    grads = each(model, x, y)
    direction = eqx.filter(model, eqx.is_inexact_array)

    def product(weights):
        value, gradient = filter_micro_value_and_grad(
            loss,
            clip_norm=1e3,
            accumulator=Sum(weights=weights),
            microbatch_size=BLOCK,
            method=method,
        )(model, x, y)
        leaves = zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
        return value + sum(jnp.sum(a * b) for a, b in leaves)

    weights = jnp.array([0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 1.0])
    expected = products(grads, direction) + values_of(model, x, y)
    assert_same(jax.jit(jax.grad(product))(weights), expected, tol=1e-4)


def test_directions_in_float16():
    # Inputs times the direction are out of range, and the inner products are not.
    loss = lambda w, x: jnp.sum(w @ x) * jnp.float16(1e-3)
    w, x = jnp.zeros((2, 8), jnp.float16), jnp.full((3, 8), 1000, jnp.float16)
    _, found = filter_micro_grad(loss, against=jnp.full_like(w, 100))(w, x)
    np.testing.assert_allclose(found.inner_products, np.full(3, 1600), rtol=2e-3)


def test_sensitivity(getkey):
    settings = {"accumulator": Sum(), "nan_safe": True}
    model, x, y = data(getkey(), 7)
    like = eqx.filter(model, eqx.is_inexact_array)
    bounds = jax.tree.map(lambda x: 0.01, like)
    as_array = filter_micro_grad(loss, clip_norm=np.float32(0.1), **settings)
    np.testing.assert_allclose(as_array.sensitivity(model), 0.1, rtol=1e-6)
    for clip_norm, expected in ((0.1, 0.1), (bounds, 0.02)):
        fun = filter_micro_grad(loss, clip_norm=clip_norm, **settings)
        np.testing.assert_allclose(fun.sensitivity(model), expected, rtol=1e-6)
        # All of these gradients are longer than the bound, but that of what is unused.
        both = fun(model, x, y), fun(model, *(np.asarray(a)[1:] for a in (x, y)))
        change = jax.tree.map(np.subtract, *jax.device_get(both))
        change = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(change)))
        assert 0.8 * expected < change < expected * (1 + 1e-5)
    settings["accumulator"] = Sum(weights=jnp.full(7, 0.25))
    weighted = filter_micro_grad(loss, clip_norm=0.1, **settings)
    np.testing.assert_allclose(
        weighted.sensitivity(model, weight=0.25), 0.025, rtol=1e-6
    )
    unsafe = filter_micro_grad(loss, clip_norm=0.1, accumulator=Sum())
    with pytest.warns(UserWarning, match="no bound for an example .* `nan_safe=True`"):
        np.testing.assert_allclose(unsafe.sensitivity(model), 0.1, rtol=1e-6)
    for fun, match in (
        (weighted, "`weight` must be the largest weight"),
        (filter_micro_grad(loss, clip_norm=0.1), "the accumulator is"),
        (filter_micro_grad(loss, accumulator=Sum()), "needs a bound"),
        (filter_micro_grad(loss, scale=jnp.sin, accumulator=Sum()), "needs a bound"),
    ):
        with pytest.raises(ValueError, match=match):
            fun.sensitivity(model)


def test_direction_is_an_argument_of_the_program(getkey):
    model, x, y = data(getkey(), 7)
    traces = []

    def counted(model, x, y):
        traces.append(None)
        return loss(model, x, y)

    @eqx.filter_jit
    def run(direction):
        fun = filter_micro_value_and_grad(counted, against=direction)
        return fun(model, x, y)[2].inner_products

    direction = eqx.filter(model, eqx.is_inexact_array)
    first = run(direction)
    second = run(jax.tree.map(lambda x: 2 * x, direction))
    assert_same(second, 2 * first, tol=1e-5)
    assert len(traces) == 1


def test_with_functions_of_gradients(getkey):
    model, x, y = data(getkey(), 7)
    direction = eqx.filter(model, eqx.is_inexact_array)
    _, found = filter_micro_grad(
        loss, metrics=lambda g: g.scale, moments=True, against=direction
    )(model, x, y)
    _, expected = filter_micro_grad(loss, moments=True, against=direction)(model, x, y)
    assert_same(found.inner_products, expected.inner_products, tol=1e-5)
    assert_same(found.moments, expected.moments, tol=1e-4)


WRONG = {
    "both": (
        {"clip_norm": 1.0, "scale": lambda norm: norm},
        ValueError,
        "`clip_norm=1.0` and `scale=",
    ),
    "norms of nothing": ({"norms": "leaf"}, ValueError, "neither is given"),
    "norms": ({"norms": "all", "return_norms": True}, TypeError, "`norms` must be"),
    "scale": (
        {"scale": lambda norm: jnp.ones(2)},
        ValueError,
        "What `scale` returns must be",
    ),
    "scales": (
        {"scale": lambda norm: (norm, norm)},
        ValueError,
        "`scale` must be a function that returns one factor",
    ),
    "direction": (
        {"against": jnp.ones(3)},
        ValueError,
        "`against` must have the structure, shapes and dtypes",
    ),
    "bounds": (
        {"clip_norm": jnp.ones(4)},
        ValueError,
        r"a bound for each example must be \(3,\)",
    ),
    "negative bounds": (
        {"clip_norm": jnp.array([1.0, -1.0, 1.0])},
        RuntimeError,
        "must not be negative",
    ),
    "batched": (
        {"batched": True, "against": jnp.ones(3)},
        ValueError,
        "`against` is about single examples",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(getkey, name):
    settings, error, match = WRONG[name]
    model, x, y = data(getkey(), 3)
    with pytest.raises(error, match=match):
        filter_micro_grad(loss, **settings)(model, x, y)


@pytest.mark.quick
def test_public_names():
    assert eqxbatch.results.GradientStatistics._fields == (
        "norms",
        "metrics",
        "moments",
        "inner_products",
        "features",
    )
    assert eqxbatch.results.GradientMoments._fields == (
        "mean",
        "variance",
        "noise_scale",
    )


def test_metrics_that_return_none_are_statistics():
    gradient = filter_micro_grad(lambda w, x: jnp.dot(w, x), metrics=lambda g: None)
    _, statistics = gradient(jnp.ones(2), jnp.ones((3, 2)))
    assert statistics == eqxbatch.results.GradientStatistics(None, None, None)
