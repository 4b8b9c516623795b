"""Accumulators with weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import (
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    Mean,
    Sum,
)
from ..helpers import assert_same, BLOCK, normal, thinned, TOTALS


# Weights


@pytest.mark.parametrize(
    ("dtype", "total"), thinned((jnp.float32, jnp.bool_, jnp.int32), TOTALS)
)
def test_weights(total, dtype, getkey):
    x = normal(getkey(), (total, 2))
    weights = jnp.asarray(np.arange(1, total + 1).astype(dtype))
    w = np.asarray(weights).astype(np.float32)[:, None]
    micro = filter_micro_vmap(
        lambda x: (x, x),
        microbatch_size=BLOCK,
        accumulator=(Sum(weights), Mean(weights)),
    )
    expected = (w * np.asarray(x)).sum(0)
    assert_same(micro(x), (expected, expected / w.sum()))


def test_weights_of_whole_microbatches_can_be_zero():
    x = jnp.arange(9.0)
    mask = jnp.arange(9) >= 5
    micro = filter_micro_vmap(lambda x: x, microbatch_size=4, accumulator=Mean(mask))
    assert_same(micro(x), jnp.array(6.5))
    micro = filter_microbatch(jnp.sum, microbatch_size=1, accumulator=Mean(mask))
    assert_same(micro(x), jnp.array(6.5))


@pytest.mark.parametrize("size", (2, None))
def test_results_that_are_means_with_the_same_weights(size, getkey):
    x, w = normal(getkey(), (5,)), jnp.arange(1.0, 6.0)
    mean = lambda p, x, w: jnp.sum(w * p * x) / jnp.sum(w)
    gradient = filter_micro_grad(
        mean, batched=True, accumulator=Mean(w), microbatch_size=size
    )
    assert_same(gradient(jnp.ones(()), x, w), jax.jit(mean)(1.0, x, w))


def test_weights_of_integers():
    x = jnp.arange(9)
    weights = jnp.full(9, 0.5)
    micro = filter_micro_vmap(lambda x: x, microbatch_size=4, accumulator=Sum(weights))
    assert_same(micro(x), jnp.array(18.0))


@pytest.mark.parametrize("name", (Mean, Sum))
def test_weights_of_numpy_can_change_afterwards(name):
    # JAX reads large arrays later.
    for _ in range(30):
        weights = np.ones(1_000_003, np.float32)
        accumulator = name(weights)
        weights[:] = 0
        assert np.min(accumulator.weights) == 1


def test_weights_are_differentiable(getkey):
    x = normal(getkey(), (9,))
    w = jnp.asarray(np.random.default_rng(0).uniform(size=9), jnp.float32)
    run = lambda w: filter_micro_vmap(
        lambda x: x, microbatch_size=4, accumulator=Mean(w)
    )(x)
    dense = lambda w: jnp.sum(w * x) / jnp.sum(w)
    both = jax.jit(lambda w: (jax.grad(run)(w), jax.grad(dense)(w)))
    assert_same(*both(w), tol=1e-4)


def test_weights_do_not_retrace():
    traces = []

    def fun(x):
        traces.append(x)
        return x

    x = jnp.arange(8.0)
    for scale in (1.0, 2.0):
        weights = jnp.full(8, scale)
        micro = filter_micro_vmap(fun, microbatch_size=4, accumulator=Sum(weights))
        assert_same(micro(x), scale * x.sum())
    assert len(traces) == 1


def test_wrong_weights():
    micro = functools.partial(filter_micro_vmap, lambda x: x, microbatch_size=4)
    for cls in (Sum, Mean):
        with pytest.raises(ValueError, match=r"one weight for each example.*\(9,\)"):
            micro(accumulator=cls(jnp.ones(8)))(jnp.ones(9))
    with pytest.raises(
        ValueError, match=r"weights single examples.*as a batched argument"
    ):
        filter_microbatch(jnp.sum, accumulator=Sum(jnp.ones(9)))(jnp.ones(9))


WEIGHTED_DTYPES = {
    "halves of integers": (jnp.int32, jnp.float32, 0.5, jnp.float32),
    "negative and unsigned": (jnp.uint8, jnp.int32, -1, jnp.int32),
    "bools and unsigned": (jnp.uint32, jnp.bool_, True, jnp.uint32),
    "low precision and integers": (jnp.int32, jnp.bfloat16, 1, jnp.float32),
    "complex and real": (jnp.float32, jnp.complex64, 1 + 2j, jnp.complex64),
    "complex and low": (jnp.bfloat16, jnp.complex64, 1 + 2j, jnp.complex64),
    "complex and integers": (jnp.int32, jnp.complex64, 1 + 2j, jnp.complex64),
    "real and complex": (jnp.complex64, jnp.float32, 0.5, jnp.complex64),
    "bools": (jnp.bool_, jnp.bool_, True, jnp.int32),
}


@pytest.mark.parametrize("name", WEIGHTED_DTYPES)
def test_dtypes_of_weighted_sums(name):
    dtype, of_weights, weight, expected = WEIGHTED_DTYPES[name]
    x = (np.arange(300) % 100).astype(dtype)
    accumulator = Sum(np.full(300, weight).astype(of_weights))
    micro = filter_micro_vmap(lambda x: x, microbatch_size=7, accumulator=accumulator)
    total = weight * int(x.astype(np.complex64).real.sum())
    assert_same(micro(jnp.asarray(x)), jnp.asarray(total, expected))


DROPPED = {
    "half": (jnp.int32, jnp.int32, 0.5, "the fractional part of the float32 of"),
    "sign": (jnp.uint32, jnp.uint8, -1, "the sign of the int32 of `weights`"),
    "imaginary": (jnp.float32, jnp.float32, 1j, "imaginary part of the complex64 of"),
    "results": (jnp.int32, jnp.float32, 1, "the fractional part of the float32 that"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_sums_drop_nothing_quietly(name):
    dtype, of_results, weight, match = DROPPED[name]
    accumulator = Sum(jnp.full(3, weight), dtype=dtype)
    micro = filter_micro_vmap(lambda x: x, accumulator=accumulator)
    with pytest.raises(TypeError, match=match):
        micro(jnp.ones(3, of_results))


def test_weights_of_means_are_real():
    micro = filter_micro_vmap(lambda x: x, accumulator=Mean(jnp.full(3, 1j)))
    with pytest.raises(TypeError, match=r"Mean\(weights=...\) needs real numbers"):
        micro(jnp.ones(3))


@pytest.mark.parametrize("size", (1, None))
def test_weights_of_no_examples(size):
    micro = functools.partial(filter_micro_vmap, lambda x: x, microbatch_size=size)
    x, weights = jnp.zeros((0, 2)), jnp.zeros(0)
    assert_same(micro(accumulator=Sum(weights))(x), jnp.zeros(2))
    assert_same(micro(accumulator=Mean(weights))(x), jnp.full(2, jnp.nan))
    mean = filter_microbatch(lambda x: x.sum(0), accumulator=Mean(weights))
    assert_same(mean(x), jnp.full(2, jnp.nan))


def test_counts_beyond_half_precision():
    # A count of 70,000 is infinite in float16.
    x = jnp.full(70_000, 2**-10, jnp.float16)
    for accumulator in (Mean(None, jnp.float16, running=True), Mean(dtype=jnp.float16)):
        micro = filter_micro_vmap(
            lambda x: x, microbatch_size=35_000, accumulator=accumulator
        )
        assert_same(micro(x), jnp.asarray(2**-10, jnp.float16), tol=1e-2)


@pytest.mark.parametrize("size", (1, 4096))
def test_weights_beyond_half_precision(size):
    # In float16, 2048 + 1 is 2048, and the sum of these weights is infinite.
    x = jnp.zeros(4096, jnp.float16).at[0].set(1024)
    accumulator = Mean(jnp.full(4096, 32.0), jnp.float16)
    micro = filter_micro_vmap(
        lambda x: x, microbatch_size=size, accumulator=accumulator
    )
    assert_same(micro(x), jnp.asarray(0.25, jnp.float16))
