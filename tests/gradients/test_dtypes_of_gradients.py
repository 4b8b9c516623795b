"""Gradients in all dtypes, and beyond their range."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import (
    filter_micro_grad,
    filter_micro_value_and_grad,
    Mean,
    Sum,
)
from ..helpers import assert_same, normal, thinned, variants
from .models import combined, data, each, loss, METHODS, norms_of


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_bfloat16(getkey, method):
    model, x, y = data(getkey(), 64, jnp.bfloat16)
    fun = filter_micro_value_and_grad(
        loss, microbatch_size=5, clip_norm=0.5, method=method, return_norms=True
    )
    value, gradient, statistics = fun(model, x, y)
    to_wide = lambda a: jax.device_put(np.asarray(a).astype(np.float32))
    wide = jax.tree.map(
        lambda a: to_wide(a) if eqx.is_inexact_array(a) else a, (model, x, y)
    )
    expected, grads, truth = fun(*wide)
    assert gradient.linear.weight.dtype == value.dtype == jnp.bfloat16
    assert statistics.norms.dtype == jnp.float32
    pairs = [
        (value, expected),
        (statistics.norms, truth.norms),
        (gradient.linear.weight, grads.linear.weight),
    ]
    for got, wanted in pairs:
        atol = 0.02 * np.max(np.abs(wanted))
        got = np.asarray(got).astype(np.float32)
        np.testing.assert_allclose(got, wanted, 0.1, atol)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_complex_parameters(getkey, method):
    model, x, y = data(getkey(), 7, jnp.complex64)
    fun = lambda model, x, y: jnp.sum(jnp.abs(model(x) - y))
    grads = each(model, x, y, fun)
    clipped = filter_micro_grad(
        fun, microbatch_size=3, clip_norm=0.5, return_norms=True, method=method
    )
    gradient, statistics = clipped(model, x, y)
    norms = norms_of(grads)
    assert_same(statistics.norms, norms)
    assert_same(gradient, combined(grads, np.minimum(1, 0.5 / norms) / 7))


@pytest.mark.usefixtures("x64")
def test_mixed_dtypes(getkey):
    model = (normal(getkey(), (3,)), normal(getkey(), (3,), jnp.float64))
    fun = lambda w, x: jnp.sum(w[0] * x).astype(jnp.float64) + jnp.sum(jnp.sin(w[1]))
    x = normal(getkey(), (5, 3))
    grad = filter_micro_grad(fun, clip_norm=0.5, return_norms=True, microbatch_size=2)
    gradient, statistics = grad(model, x)
    assert [g.dtype for g in gradient] == [jnp.float32, jnp.float64]
    squares = np.sum(np.asarray(x, np.float64) ** 2, 1)
    expected = np.sqrt(squares + np.sum(np.cos(model[1]) ** 2))
    np.testing.assert_allclose(statistics.norms, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "clip_norm", "metrics"),
    thinned(
        ("sum", "mean", "weighted", "running_mean"), (None, 2e4), (None, lambda g: g)
    ),
)
def test_gradients_of_float16_are_added_in_float32(kind, clip_norm, metrics):
    # Some entries are half of what float16 holds, others nearly vanish.
    x = np.tile(np.array([32768.0, 5e-5], np.float16), (300, 1))
    x[::3] /= 2
    accumulator = {
        "sum": Sum(jnp.full(300, 1 / 300)),
        "mean": Mean(),
        "weighted": Mean(jnp.full(300, 1e-9)),
        "running_mean": Mean(running=True),
    }[kind]
    wide = np.asarray(x, np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    bound = np.inf if clip_norm is None else clip_norm
    expected = np.mean(wide * np.minimum(1, bound / norms), 0)
    for size in (7, None):
        got = filter_micro_grad(
            lambda w, x: w @ x,
            microbatch_size=size,
            accumulator=accumulator,
            clip_norm=clip_norm,
            metrics=metrics,
        )(jnp.zeros(2, jnp.float16), x)
        got = got if metrics is None else got[0]
        assert got.dtype == jnp.float16
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2e-2)


def test_derivatives_of_batches_of_float16_gradients():
    # The sums of the last batch overflow.
    x = np.array([0.5, 1, 2e4]).reshape(3, 1, 1) + np.arange(12).reshape(1, 4, 3) / 12
    x = jnp.asarray(x, jnp.float16)
    clipped = filter_micro_grad(lambda w, x: jnp.sin(w) @ x, clip_norm=3e4)

    def loss(w, x):
        return 1e-3 * jnp.sum(clipped(w, x).astype(jnp.float32))

    w = jnp.array([0.5, -0.25, 1.0], jnp.float16)
    got = jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, x)))(w)
    each = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    assert np.all(np.isfinite(each))
    expected = np.sum(np.asarray(each, np.float32), 0)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=2e-2)


def test_float16_inside_of_a_function_in_float32():
    @jax.jit
    def loss(w, x):
        return jnp.sum(w.astype(jnp.float16) * x.astype(jnp.float16)).astype(w.dtype)

    # The mean is in the range of float16, but the sum is not.
    x = jnp.full((9, 2), 32768.0)
    assert_same(filter_micro_grad(loss)(jnp.ones(2), x), x[0])


def test_weights_beyond_the_range_of_the_loss():
    w, x = jnp.ones(3, jnp.float16), jnp.arange(12.0, dtype=jnp.float16).reshape(4, 3)
    loss = lambda w, x: w @ x
    for scale in (1e-9, 1.0, 1e6):
        weights = scale * jnp.arange(1.0, 5.0)
        wide = x.astype(jnp.float32)
        expected = jnp.average(wide, axis=0, weights=weights).astype(jnp.float16)
        for options in ({}, {"clip_norm": 1e4}):
            mean = filter_micro_grad(loss, accumulator=Mean(weights), **options)
            assert_same(mean(w, x), expected)


def test_weights_that_are_integers_keep_their_digits(x64):
    # Also those that float32 does not have.
    weights, x = jnp.array([123456789, 3, 987654321]), jnp.array([[1.0], [2.0], [5.0]])
    grad = filter_micro_value_and_grad(jnp.dot, accumulator=Mean(weights))
    value, gradient = grad(jnp.ones(1), x)
    expected = np.average(x[:, 0], weights=weights)
    np.testing.assert_allclose([value, gradient[0]], expected, rtol=1e-14)


def test_clipped_gradients_of_float16_of_any_length():
    # What the first is scaled with is no number in float16. Gradients of a vector are
    # formed, and those of a matrix are not.
    rows = jnp.array([[6e4, 6e4], [1e-3, 2e-3]], jnp.float16)
    for shape in ((2,), (16, 16)):
        x = np.tile(rows, shape[-1] // 2)
        wide = np.broadcast_to(np.asarray(x, np.float64)[:, None], (2, 16, shape[-1]))
        wide = wide if len(shape) == 2 else wide[:, 0]
        norms = [np.linalg.norm(gradient) for gradient in wide]
        expected = sum(g / norm for g, norm in zip(wide, norms, strict=True))
        for method in METHODS[1:]:
            clipped = filter_micro_grad(
                lambda w, x: jnp.sum(w @ x),
                accumulator=Sum(),
                clip_norm=1e-3,
                method=method,
            )
            got = np.asarray(clipped(jnp.ones(shape, jnp.float16), x), np.float64)
            np.testing.assert_allclose(got, 1e-3 * expected, rtol=1e-2)


def test_running_mean_of_huge_gradients():
    x = jnp.full((9, 2), 3e38)
    grad = functools.partial(
        filter_micro_grad, lambda w, x: w @ x, accumulator=Mean(running=True)
    )
    for options in ({}, {"microbatch_size": 4}, {"clip_norm": jnp.inf}):
        assert_same(grad(**options)(jnp.zeros(2), x), x[0])
    # Its norm is no number in float32.
    got = grad(clip_norm=1e38)(jnp.zeros(2), x)
    assert_same(got, jnp.full(2, 0.5**0.5 * 1e38))


@pytest.mark.matrix
def test_noise_scale_of_a_count_of_few_bits(getkey):
    model, x, y = data(getkey(), 300)
    grads = each(model, x, y)
    mean = jax.tree.map(lambda g: np.mean(g, 0), grads)
    noise = sum(np.sum(np.var(g, 0, ddof=1)) for g in jax.tree.leaves(grads))
    signal = sum(np.sum(g**2) for g in jax.tree.leaves(mean)) - noise / 300
    counted = filter_micro_grad(
        loss,
        microbatch_size=100,
        moments=True,
        num_real_microbatches=jnp.array(3, jnp.int8),
    )
    assert_same(counted(model, x, y)[1].moments.noise_scale, noise / signal)
    many = filter_micro_grad(
        loss, microbatch_size=1, num_real_microbatches=jnp.array(100, jnp.int8)
    )
    expected = jax.tree.map(lambda g: np.mean(g[:100], 0), grads)
    assert_same(many(model, x, y), expected)


@pytest.mark.parametrize("size", (1e-4, 1e3))
def test_noise_scale_of_squares_beyond_half_precision(size, getkey):
    x = (size * normal(getkey(), (50, 3))).astype(jnp.float16)
    fun = filter_micro_grad(jnp.dot, microbatch_size=20, moments=True)
    moments = fun(jnp.ones(3, jnp.float16), x)[1].moments
    wide = fun(jnp.ones(3), x.astype(jnp.float32))[1].moments
    assert moments.noise_scale.dtype == jnp.float32
    np.testing.assert_allclose(moments.noise_scale, wide.noise_scale, 1e-3)
    expected = (wide.mean.astype(jnp.float16), wide.variance.astype(jnp.float16))
    assert_same((moments.mean, moments.variance), expected)


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"), thinned((jnp.float16, jnp.float32), (jnp.bool_, jnp.int8))
)
def test_weights_times_whole_numbers(dtype, mask_dtype, getkey):
    weight = normal(getkey(), (3, 4), dtype)
    masks = jnp.array([[1, 0, 1, 1], [0, 0, 3, 1], [5, 1, 0, 0]]).astype(mask_dtype)

    def loss(weight, mask):
        numbers = (((1,), (0,)), ((), ()))
        out = jax.lax.dot_general(weight, mask, numbers, preferred_element_type=dtype)
        return jnp.sum(jnp.sin(out))

    wide = weight.astype(jnp.float32)
    dense = lambda w, mask: jnp.sum(jnp.sin(w @ mask.astype(jnp.float32)))
    each = np.asarray(jax.jit(jax.vmap(jax.grad(dense), (None, 0)))(wide, masks))
    norms = np.linalg.norm(each.reshape(3, -1), axis=1)
    expected = np.tensordot(np.minimum(1, 0.5 / norms), each, 1) / 3
    for method in ("sites", "materialise"):
        micro = filter_micro_grad(loss, clip_norm=0.5, method=method)
        assert_same(micro(weight, masks), expected.astype(dtype), tol=4e-3)


@pytest.mark.parametrize("clip_norm", (None, 10.0))
def test_bfloat16_inside_of_a_function_in_float32(clip_norm):
    """Mixed precision: sums over microbatches are those of float32."""

    def loss(w, x):
        half = w.astype(jnp.bfloat16) * x.astype(jnp.bfloat16)
        return jnp.sum(half).astype(jnp.float32)

    # In bfloat16, a sum of ones ends at 256.
    total = filter_micro_grad(
        loss, clip_norm=clip_norm, accumulator=Sum(), microbatch_size=3
    )(jnp.zeros(2), jnp.ones((1023, 2)))
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(total, [1023.0, 1023.0])
