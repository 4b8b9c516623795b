"""Accumulators with weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import (
    Concat,
    filter_ggn,
    filter_ggn_diagonal,
    filter_hessian,
    filter_hvp,
    filter_kfac,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    filter_microbatch,
    Mean,
    over_batches,
    Sum,
)
from ..helpers import (
    assert_same,
    BLOCK,
    KINDS,
    make_mesh,
    normal,
    put,
    thinned,
    TOTALS,
)


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


# Rows that do not count, of which some are NaN.


def by_length(w, x, length):
    """Is NaN for padding, which has length 0, and so is its derivative."""
    return jnp.sum(w * x) ** 2 / length


PADDED = np.array([[1.0, 4.0], [2.0, 3.0], [0, 0], [0, 0], [5.0, 1.0]], np.float32)
LENGTHS = np.array([2.0, 1.0, 0.0, 0.0, 4.0], np.float32)
MASK = LENGTHS > 0
ONES = np.ones(2, np.float32)


def outputs(w, x, length):
    return (w * x) / length


def of_outputs(out, x, length):
    return jnp.sum(out**2) / 2


WEIGHTED = {
    "gradient": lambda a, size: filter_micro_grad(
        by_length, accumulator=a, microbatch_size=size
    ),
    "value": lambda a, size: filter_micro_value_and_grad(
        by_length, accumulator=a, microbatch_size=size
    ),
    "norms": lambda a, size: (
        lambda *args: filter_micro_grad(
            by_length, accumulator=a, microbatch_size=size, return_norms=True
        )(*args)[0]
    ),
    "products": lambda a, size: (
        lambda *args: filter_micro_grad(
            by_length, accumulator=a, microbatch_size=size, against=jnp.asarray(ONES)
        )(*args)[0]
    ),
    "derivative of a map": lambda a, size: (
        lambda w, *rows: jax.jit(
            jax.grad(
                lambda w: filter_micro_vmap(
                    lambda *rows: by_length(w, *rows),
                    accumulator=a,
                    microbatch_size=size,
                )(*rows)
            )
        )(w)
    ),
    "hessian": lambda a, size: filter_hessian(
        by_length, in_axes=0, accumulator=a, microbatch_size=size
    ),
    "hvp": lambda a, size: (
        lambda w, *rows: filter_hvp(
            by_length, in_axes=0, accumulator=a, microbatch_size=size
        )(w, w, *rows)
    ),
    "ggn": lambda a, size: filter_ggn(
        outputs, of_outputs, accumulator=a, microbatch_size=size
    ),
    "fisher": lambda a, size: filter_ggn_diagonal(
        outputs,
        of_outputs,
        fisher="mc",
        key=jax.random.key(0),
        accumulator=a,
        microbatch_size=size,
    ),
    "kfac": lambda a, size: (
        lambda *args: (
            filter_kfac(outputs, of_outputs, accumulator=a, microbatch_size=size)(
                *args
            ).blocks
        )
    ),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_padding_has_no_influence(name):
    make, w = WEIGHTED[name], jnp.asarray(ONES)
    expected = make(Mean(weights=jnp.ones(3)), None)(
        w, jnp.asarray(PADDED[MASK]), jnp.asarray(LENGTHS[MASK])
    )
    for size in (2, None):
        # With a size of 2, a whole microbatch is padding.
        got = make(Mean(weights=jnp.asarray(MASK)), size)(w, PADDED, LENGTHS)
        if name == "fisher":  # Each example has a key of its own.
            assert np.isfinite(got).all()
        else:
            assert_same(got, expected, tol=1e-5)


def test_padding_in_many_batches():
    over = over_batches(filter_micro_grad(by_length), weighted=True)
    parts = [(PADDED[i], LENGTHS[i], MASK[i]) for i in np.split(np.arange(5), (2, 4))]
    # All rows of the second batch are padding.
    got = over(jnp.asarray(ONES), parts)
    rows = PADDED[MASK], LENGTHS[MASK]
    assert_same(got, filter_micro_grad(by_length)(jnp.asarray(ONES), *rows), tol=1e-5)


def test_values_of_padding_are_its_own():
    both = filter_micro_value_and_grad(
        lambda w, *rows: (by_length(w, *rows), jnp.sum(rows[0])),
        has_aux=True,
        value_accumulator=Concat(),
        accumulator=Sum(weights=jnp.asarray(MASK)),
        microbatch_size=2,
    )
    (values, aux), gradient = both(jnp.asarray(ONES), PADDED + 1, LENGTHS)
    np.testing.assert_array_equal(np.isfinite(values), MASK)
    assert_same(aux, (PADDED + 1).sum(1))
    assert np.isfinite(gradient).all()


def test_derivatives_with_respect_to_weights_of_zero():
    # As in learning to reweight examples, which begins with weights of 0.
    loss = lambda w, x: jnp.sum(w * x) ** 2
    direction = np.array([0.3, -1.0], np.float32)

    def through(weights):
        both = filter_micro_value_and_grad(
            loss, accumulator=Sum(weights=weights), microbatch_size=2
        )
        value, gradient = both(jnp.asarray(ONES), PADDED + 1)
        return value + gradient @ direction

    x = PADDED + 1
    total = x.sum(1)
    expected = total**2 + 2 * total * (x @ direction)
    for weights in (jnp.zeros(5), jnp.asarray(MASK, jnp.float32)):
        assert_same(jax.jit(jax.grad(through))(weights), expected, tol=1e-4)


def test_derivatives_with_respect_to_padded_rows():
    loss = lambda w, x: jnp.sum(w * x) ** 2
    mask = jnp.asarray(MASK)

    def mapped(x):
        one = lambda x: loss(jnp.asarray(ONES), x)
        return filter_micro_vmap(one, microbatch_size=2, accumulator=Sum(mask))(x)

    def gradient(x):
        total = filter_micro_grad(loss, microbatch_size=2, accumulator=Sum(mask))
        return jnp.sum(total(jnp.asarray(ONES), x))

    x = jnp.asarray(PADDED + 1)
    sums = jnp.where(mask, 1.0, 0.0) * x.sum(1)
    expected = np.repeat(2 * sums[:, None], 2, axis=1)
    assert_same(jax.jit(jax.grad(mapped))(x), expected, tol=1e-5)
    # The sum of a gradient is 2 (w @ x) sum(x), and w has ones.
    assert_same(jax.jit(jax.grad(gradient))(x), 2 * expected, tol=1e-5)


@pytest.mark.devices
@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_a_mesh(kind):
    mesh = make_mesh(kind)
    x, lengths, mask = (np.concatenate([x, x])[:8] for x in (PADDED, LENGTHS, MASK))
    expected = filter_micro_grad(by_length, accumulator=Sum())(
        jnp.asarray(ONES), x[mask], lengths[mask]
    )
    on = lambda x: put(jnp.asarray(x), mesh, "data")
    summed = filter_micro_grad(
        by_length, accumulator=Sum(weights=on(mask)), microbatch_size=4
    )
    got = summed(put(jnp.asarray(ONES), mesh), on(x), on(lengths))
    assert_same(jax.device_get(got), expected, tol=1e-5)


def test_padding_of_other_dtypes():
    keys = jax.random.split(jax.random.key(0), 5)
    flags = np.array([True, False, True, True, False])
    scales = jnp.asarray(LENGTHS, jnp.bfloat16)

    def loss(w, x, key, flag, scale, number):
        noise = jax.random.uniform(key, (2,)) * jnp.where(flag, 1.0, 2.0)
        return jnp.sum(w * x * noise) / (
            scale.astype(jnp.float32) * number.astype(jnp.float32)
        )

    rows = PADDED, keys, flags, scales, np.arange(5, dtype=np.int8)
    mask = MASK & (np.arange(5) > 0)
    got = filter_micro_grad(
        loss, accumulator=Sum(weights=jnp.asarray(mask)), microbatch_size=2
    )(jnp.asarray(ONES), *rows)
    kept = [x[np.flatnonzero(mask)] for x in rows]
    expected = filter_micro_grad(loss, accumulator=Sum())(jnp.asarray(ONES), *kept)
    assert_same(got, expected, tol=1e-5)
