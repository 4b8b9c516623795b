"""Clipped gradients: norms, bounds, and values that are not finite."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxbatch import (
    filter_micro_grad,
    filter_micro_value_and_grad,
    Sum,
)
from eqxbatch._base.platforms import CPU, for_platform, GPU
from ..helpers import (
    assert_same,
    BLOCK,
    CountTraces,
    drawn,
    memory,
    normal,
    thinned,
    variants,
)
from .models import combined, data, each, loss, METHODS, mlp, norms_of, program


@pytest.mark.flags
@pytest.mark.parametrize(("method", "total"), thinned(METHODS, (13, 1)))
@pytest.mark.usefixtures("x64")
def test_clips_the_gradient_of_each_example(getkey, total, method):
    model, x, y = data(getkey(), total, jnp.float64)
    grads = each(model, x, y)
    norms = norms_of(grads)
    bound = float(np.median(norms))
    fun = filter_micro_grad(
        loss,
        microbatch_size=BLOCK,
        clip_norm=bound,
        return_norms=True,
        method=method,
    )
    gradient, statistics = fun(model, x, y)
    scale = np.minimum(1, bound / norms)
    assert_same(gradient, combined(grads, scale / total), tol=1e-10)
    assert_same(statistics.norms, norms, tol=1e-10)
    assert statistics.metrics is None
    assert statistics.moments is None


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_clips_groups(getkey, method):
    model, x, y = data(getkey(), 7)
    grads = each(model, x, y)
    like = eqx.filter(model, eqx.is_inexact_array)
    # The linear layer as one, the scale not at all, and the rest by a traced bound.
    bounds = eqx.tree_at(
        lambda m: (m.linear, m.scale, m.unused), like, (0.5, None, jnp.array(0.1))
    )
    fun = filter_micro_grad(
        loss, microbatch_size=3, clip_norm=bounds, return_norms=True, method=method
    )
    gradient, statistics = fun(model, x, y)
    norms = norms_of(grads.linear)
    assert_same(statistics.norms.linear, norms)
    assert_same(statistics.norms.scale, norms_of(grads.scale))
    scale = np.minimum(1, 0.5 / norms)
    assert_same(gradient.linear, combined(grads.linear, scale / 7))
    assert_same(gradient.scale, np.mean(grads.scale, 0))
    assert_same(gradient.unused, jnp.zeros(4))


def test_extreme_bounds(getkey):
    model, x, y = data(getkey(), 5)
    plain = combined(each(model, x, y), np.full(5, 0.2))
    fun = lambda w, x: 0.0 * w * x
    # Two of them are arrays, which share a program.
    for bound in (0, np.array(np.inf, "float32"), np.array(1e-30, "float32")):
        clipped = filter_micro_grad(loss, microbatch_size=2, clip_norm=bound)
        gradient = clipped(model, x, y)
        if np.isinf(bound):
            assert_same(gradient, plain)
        else:
            squares = [np.sum(np.square(g)) for g in jax.tree.leaves(gradient)]
            assert np.sqrt(sum(squares)) <= bound * 1.001
        # An example without a gradient is not divided by zero.
        still = filter_micro_grad(fun, clip_norm=bound)
        assert still(jnp.array(1.0), x[:, 0]) == 0


def test_bound_is_an_argument_of_the_program(getkey):
    model, x, y = data(getkey(), 5)
    counted, grads = CountTraces(loss), each(model, x, y)
    truth = lambda bound: combined(grads, np.minimum(1, bound / norms_of(grads)) / 5)
    for bound in (0.1, 0.2):
        fun = filter_micro_grad(counted, microbatch_size=2, clip_norm=jnp.array(bound))
        assert_same(fun(model, x, y), truth(bound))
    assert counted.num == 1
    for bound in (0.1, 0.2):
        fun = filter_micro_grad(counted, microbatch_size=2, clip_norm=np.array(bound))
        assert_same(fun(model, x, y), truth(bound))
    # Once more, as an array of NumPy has a type that is not weak.
    assert counted.num == 2


@pytest.mark.parametrize(
    ("method", "bad"),
    variants(
        (("sites", "inf"), ("materialise", "nan"), ("sites", "nan"), ("auto", "nan")),
        ("sites", "nan"),
        ("auto", "nan"),
    ),
)
def test_gradients_that_are_not_finite(getkey, method, bad):
    model, x, y = data(getkey(), 6)
    x = np.array(x)
    x[4, 1] = float(bad)
    make = functools.partial(
        filter_micro_value_and_grad,
        loss,
        microbatch_size=4,
        clip_norm=0.3,
        method=method,
        return_norms=True,
    )
    # What is not finite reaches the result, or ...
    _, gradient, statistics = make()(model, x, y)
    assert np.isnan(gradient.linear.weight).any()
    # ... counts as zero, in a mean over all examples.
    value, gradient, safe = make(nan_safe=True)(model, x, y)
    kept = np.arange(6) != 4
    grads = each(model, np.where(kept[:, None], x, 0), y)
    scale = np.minimum(1, 0.3 / norms_of(grads))
    assert_same(gradient, combined(grads, kept * scale / 6))
    for norms in (statistics.norms, safe.norms):
        np.testing.assert_array_equal(np.isfinite(norms), kept)
    assert np.isfinite(value) == (bad == "inf")


def test_nan_safe_without_clipping(getkey):
    model, x, y = data(getkey(), 6)
    x = np.array(x)
    x[4, 1] = np.nan
    gradient = filter_micro_grad(loss, microbatch_size=4, nan_safe=True)(model, x, y)
    x[4] = 0
    grads = each(model, x, y)
    assert_same(gradient, combined(grads, np.where(np.arange(6) == 4, 0, 1 / 6)))


@pytest.mark.parametrize("method", variants(METHODS, "auto"))
def test_nan_safe_in_groups(method):
    # Of the first example, the gradient is not finite in the first group only.
    x = jnp.array([[jnp.nan, 1.0], [2.0, 3.0]])
    loss = lambda w, x: w[0] * x[0] + w[1] * x[1]
    fun = filter_micro_grad(loss, nan_safe=True, clip_norm=(1.0, 1.0), method=method)
    w = (jnp.array(1.0), jnp.array(1.0))
    assert_same(fun(w, x), (jnp.array(0.5), jnp.array(0.5)))


def test_transform_is_clipped(getkey):
    model, x, y = data(getkey(), 7)
    grads = jax.tree.map(lambda g: 3 * np.asarray(g), each(model, x, y))
    fun = filter_micro_grad(
        loss,
        microbatch_size=3,
        transform=lambda g: jax.tree.map(lambda g: 3 * g, g),
        clip_norm=1.0,
        return_norms=True,
        accumulator=Sum(),
    )
    gradient, statistics = fun(model, x, y)
    norms = norms_of(grads)
    assert_same(statistics.norms, norms)
    assert_same(gradient, combined(grads, np.minimum(1, 1 / norms)))


# The range of dtypes


class Range(eqx.Module):
    """A model with leaves of each form: outer products, positions, and no rule."""

    first: jax.Array
    bias: jax.Array
    shared: jax.Array
    last: jax.Array

    def __init__(self, key, dtype):
        keys = jr.split(key, 4)
        self.first = normal(keys[0], (3, 2), dtype)
        self.bias = normal(keys[1], (3,), dtype)
        self.shared = normal(keys[2], (3, 3), dtype)
        self.last = normal(keys[3], (3,), dtype)

    def __call__(self, x):
        h = self.first @ x + self.bias
        h = jnp.stack([h, 2 * h, h + 1]) @ self.shared
        return jnp.sum(h @ self.last)


@pytest.mark.parametrize(
    ("method", "is_grouped", "chosen"),
    variants(
        (
            ("auto", False, CPU),
            ("sites", True, GPU),
            ("materialise", False, GPU),
        ),
        ("materialise", False, GPU),
    ),
)
def test_norms_whose_squares_are_out_of_range(getkey, method, is_grouped, chosen):
    model, x = Range(getkey(), jnp.float32), normal(getkey(), (6, 2))
    fun = lambda model, x, scale: model(x) * scale
    grads = eqx.filter_jit(jax.vmap(jax.grad(fun), (None, 0, None)))(model, x, 1.0)
    leaves, treedef = jax.tree.flatten(grads)
    flat = [np.asarray(g, np.float64).reshape(6, -1) for g in leaves]
    for scale in np.array([1e-28, 1e-21, 1e21, 1e30], np.float32):
        # One of them has no gradient, and one is of order one.
        scales = np.full(6, scale)
        scales[3:5] = 1.0, 0.0
        exact = [g * scales[:, None].astype(np.float64) for g in flat]
        groups = [[g] for g in exact] if is_grouped else [exact]
        # An array, so that all scales share a program.
        bound = jnp.array(scale)
        clipped = filter_micro_grad(
            fun,
            microbatch_size=4,
            clip_norm=jax.tree.unflatten(treedef, [bound] * 4) if is_grouped else bound,
            return_norms=True,
            method=method,
            accumulator=Sum(),
        )
        with for_platform(chosen):
            gradient, statistics = clipped(model, x, jnp.array(scales))
        expected = []
        for group, got in zip(groups, jax.tree.leaves(statistics.norms), strict=True):
            norms = np.sqrt(sum(np.sum(g**2, 1) for g in group))
            np.testing.assert_allclose(got, norms, rtol=1e-4)
            factors = float(scale) / np.maximum(norms, scale)
            expected += [factors @ g for g in group]
        for got, total in zip(jax.tree.leaves(gradient), expected, strict=True):
            atol = 1e-4 * np.max(abs(total))
            np.testing.assert_allclose(got.ravel(), total, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("method", variants(METHODS, "auto"))
def test_inputs_whose_squares_are_out_of_range(method):
    w, x = jnp.ones(2), jnp.array([[3e25, 4e25], [3e-25, 4e-25], [3e30, 4e30]])
    grad = filter_micro_grad(
        lambda w, x, scale: (w @ x) * scale,
        clip_norm=1.0,
        return_norms=True,
        method=method,
    )
    gradient, statistics = grad(w, x, jnp.array([1.0, 1.0, 0.0]))
    assert_same(statistics.norms / jnp.array([5e25, 5e-25, 1]), jnp.array([1.0, 1, 0]))
    assert_same(gradient, jnp.array([0.2, 0.8 / 3]))


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_slopes_whose_squares_are_out_of_range(method):
    # The same parameters by their logarithms, so that the slopes are large or small.
    x = np.arange(16.0).reshape(2, 8) / 8
    for num_uses in (1, 2):

        def loss(w, x, num=num_uses):
            out = sum(jnp.exp(w) @ x for _ in range(num))
            return jnp.sum(out**2) / 2 + jnp.sum(out)

        grad = filter_micro_grad(loss, clip_norm=1.0, return_norms=True, method=method)
        for log, size in ((60.0, 1e-27), (-60.0, 1e26)):
            w, rows = jnp.full((8, 8), log), jnp.asarray(x * size, jnp.float32)
            gradient, statistics = grad(w, rows)
            products = np.exp(log) * np.asarray(rows, np.float64)
            out = num_uses * products.sum(1, keepdims=True)
            each = num_uses * (1 + out) * products
            each = np.broadcast_to(each[:, None], (2, 8, 8))
            norms = np.linalg.norm(each, axis=(1, 2))
            np.testing.assert_allclose(statistics.norms, norms, rtol=1e-4)
            clipped = each / np.maximum(norms, 1)[:, None, None]
            np.testing.assert_allclose(gradient, np.mean(clipped, axis=0), rtol=1e-4)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_one_infinite_entry_makes_all_of_a_gradient_infinite(method):
    w, x = (jnp.ones(2), jnp.ones(2)), jnp.array([[1.0, jnp.inf], [1.0, 1.0]])
    loss = lambda w, x: w[0] @ x + w[1].sum()
    gradient = filter_micro_grad(loss, clip_norm=1.0, method=method)(w, x)
    assert not any(jnp.isfinite(g).any() for g in gradient)


@pytest.mark.cpu
def test_memory_of_norms_is_not_that_of_gradients(getkey):
    model = mlp(getkey())
    x, y = np.zeros((512, 8), np.float32), np.zeros((512, 4), np.float32)
    temporaries = {}
    for method in ("sites", "materialise"):
        arrays, fun = program(model, 128, clip_norm=1.0, method=method)
        temporaries[method] = memory(fun, arrays, x, y).temp_size_in_bytes
    one = sum(a.size * 4 for a in jax.tree.leaves(arrays))
    assert temporaries["materialise"] > 64 * one
    assert temporaries["sites"] < 16 * one


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_norms_where_no_parameter_is_used(method):
    loss = lambda w, x: jnp.sum(x)
    settings = {"clip_norm": 1.0, "return_norms": True, "method": method}
    micro = filter_micro_value_and_grad(loss, microbatch_size=3, **settings)
    value, gradient, statistics = micro(jnp.ones(3), jnp.ones((4, 2)))
    assert_same((value, gradient), (jnp.asarray(2.0), jnp.zeros(3)))
    assert_same(statistics.norms, jnp.zeros(4))


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_factors_whose_squares_are_out_of_range(method):
    # The gradient is of order one, or nothing but its norm is out of range.
    x = jnp.array([[3e30, 4e30], [3e-30, 4e-30], [0.0, 0.0], [3e38, 3e38]])
    scale = jnp.array([1e-30, 1e30, 1e30, 1.0])
    loss = lambda w, x, scale: jnp.sum(w @ x) * scale
    for rows, bound, norms, expected in (
        (slice(0, 3), 1.0, [50**0.5, 50**0.5, 0], [1.2, 1.6]),
        (slice(3, 4), 1e30, [jnp.inf], [1e30 / 2**0.5, 1e30 / 2**0.5]),
    ):
        grad = filter_micro_grad(
            loss, clip_norm=bound, return_norms=True, method=method, accumulator=Sum()
        )
        gradient, statistics = grad(jnp.ones((2, 2)), x[rows], scale[rows])
        assert_same(statistics.norms, jnp.array(norms))
        assert_same(gradient, jnp.array([expected] * 2) / 2**0.5)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_squares_in_range_times_a_square_out_of_range(method):
    # Of a single factor, whose squares are not those of the gradient.
    for scale, size in ((2.0**-24, 2e-12), (2.0**12, 1e16), (2.0**12, 1e30)):
        x = jnp.array([[3.0, 4.0], [0.3, 0.4]]) * size
        grad = filter_micro_grad(
            lambda b, x, scale=scale: (scale * b + jnp.cos(x)) @ x,
            clip_norm=scale * size,
            return_norms=True,
            method=method,
            accumulator=Sum(),
        )
        gradient, statistics = grad(jnp.ones(2), x)
        assert_same(statistics.norms / (scale * size), jnp.array([5.0, 0.5]))
        assert_same(gradient / (scale * size), jnp.array([0.9, 1.2]))


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
@pytest.mark.parametrize("scale", (1e25, 1e-25))
def test_parameters_times_numbers_whose_squares_are_out_of_range(scale, method):
    x = jnp.array([[3.0, 4.0], [0.3, 0.4]]) / scale
    grad = filter_micro_grad(
        lambda w, x: jnp.sum((w * scale) @ x),
        clip_norm=1.0,
        return_norms=True,
        method=method,
        accumulator=Sum(),
    )
    gradient, statistics = grad(jnp.ones((2, 2)), x)
    assert_same(statistics.norms, jnp.array([50.0, 0.5]) ** 0.5)
    one = jnp.array([0.6, 0.8]) / 2**0.5
    assert_same(gradient, jnp.stack([one + jnp.array([0.3, 0.4])] * 2))


@pytest.mark.parametrize("method", variants(METHODS, "auto"))
def test_derivatives_of_norms_whose_squares_are_out_of_range(method):
    def norm(x):
        grad = filter_micro_grad(
            lambda w, x: w @ x, clip_norm=1.0, return_norms=True, method=method
        )
        return jnp.sum(grad(jnp.ones(2), x)[1].norms)

    x = jnp.array([[3e25, 4e25], [3e-25, 4e-25], [3.0, 4.0], [0.0, 0.0]])
    slopes = jnp.array([[0.6, 0.8]] * 3 + [[0.0, 0.0]])
    assert_same(jax.jit(jax.grad(norm))(x), slopes)


class Convolution(eqx.Module):
    """A convolution whose patches are larger than its input."""

    conv: eqx.nn.Conv2d

    def __init__(self, key):
        self.conv = drawn(eqx.nn.Conv2d, 3, 2, 3, padding=1, key=key)

    def __call__(self, x):
        return jnp.sum(jnp.tanh(self.conv(x)))


def test_programs_for_gpus_have_neither_loops_for_caches_nor_many_conditionals(getkey):
    mapped = lambda m, x: jnp.sum(jnp.tanh(jax.vmap(m)(x)))
    wide = drawn(eqx.nn.Linear, 16, 16, key=getkey())
    cases = {
        # The model, loss, input, and the numbers of loops and of conditionals.
        "products": (wide, lambda m, x: jnp.sum(jnp.tanh(m(x))), (4, 16), 0, 0),
        "positions": (wide, mapped, (4, 2, 16), None, 1),
        "patches": (Convolution(getkey()), lambda m, x: m(x), (4, 3, 8, 8), 0, None),
    }
    for name, (model, fun, shape, loops, conditionals) in cases.items():
        grad = filter_micro_grad(fun, clip_norm=1.0, method="sites")
        with for_platform(GPU):
            text = jax.jit(grad).lower(model, np.ones(shape, np.float32)).as_text()
        if loops is not None:
            assert text.count("stablehlo.while") == loops, name
        if conditionals is not None:
            # The branch for terms that cancel has another one.
            assert text.count("stablehlo.case") <= 2 * conditionals, name


@pytest.mark.parametrize(
    ("method", "transform"), (*((x, None) for x in METHODS), ("auto", lambda g: g))
)
def test_nan_safe_with_a_scale_that_is_nan_for_nan(method, transform):
    x = np.array([[1.0, 2.0], [np.nan, 1.0], [3.0, 4.0]], np.float32)
    scaled = filter_micro_grad(
        lambda w, x: jnp.dot(w, x),
        nan_safe=True,
        scale=lambda norm: 1 / (norm + 0.01),
        transform=transform,
        accumulator=Sum(),
        method=method,
    )
    kept = x[[0, 2]]
    norms = np.linalg.norm(kept, axis=1, keepdims=True)
    assert_same(scaled(jnp.zeros(2), x), (kept / (norms + 0.01)).sum(0))
