import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from eqxbatch import (
    Concat,
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    Last,
    Max,
    Mean,
    Sum,
    Variance,
)
from eqxbatch.results import MeanAndVariance
from ..helpers import (
    assert_same,
    BLOCK,
    CountTraces,
    drawn,
    normal,
    spread,
    thinned,
    TOTALS,
)


def model_and_data(getkey, total):
    model = drawn(eqx.nn.MLP, 3, 2, 8, 2, key=getkey())
    return model, normal(getkey(), (total, 3)), normal(getkey(), (total, 2))


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@pytest.mark.parametrize(
    ("total", "size"),
    (
        *thinned((1, BLOCK + 1, 13), (1, BLOCK, None)),
        *(
            pytest.param(total, BLOCK, marks=pytest.mark.matrix)
            for total in TOTALS
            if total not in (1, BLOCK + 1, 13)
        ),
    ),
)
def test_exact_gradient_accumulation(size, total, getkey):
    model, x, y = model_and_data(getkey, total)
    grad = filter_microbatch(
        eqx.filter_value_and_grad(loss),
        in_axes=(None, 0, 0),
        microbatch_size=size,
        accumulator=Mean(),
    )
    value, grads = grad(model, x, y)
    dense = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    expected_value, expected = dense(model, x, y)
    assert_same(value, expected_value)
    assert_same(grads, expected, tol=1e-4)
    # It is what optax and Equinox take.
    optim = optax.sgd(1e-3)
    state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    updates, _ = optim.update(grads, state)
    assert isinstance(eqx.apply_updates(model, updates), eqx.nn.MLP)


def test_microbatches_are_contiguous():
    seen = filter_microbatch(
        lambda x: x[None], microbatch_size=3, accumulator=Concat()
    )(jnp.arange(12))
    assert_same(seen, jnp.arange(12).reshape(4, 3))


@pytest.mark.parametrize(("axis", "total"), thinned((0, 1, -1), (8, 9)))
def test_concat_along_an_axis(total, axis, getkey):
    x = jnp.moveaxis(normal(getkey(), (total, 3)), 0, axis)
    fun = functools.partial(jnp.cumsum, axis=1 - axis % 2)
    micro = filter_microbatch(
        fun, in_axes=axis, microbatch_size=BLOCK, accumulator=Concat(axis)
    )
    assert_same(micro(x), np.cumsum(np.asarray(x), 1 - axis % 2))


def test_concat_of_results_that_do_not_scale():
    # One row for each microbatch, whatever its size; and two for each example.
    x = jnp.arange(9.0)
    fun = lambda x: (x.sum()[None], jnp.repeat(x, 2))
    micro = filter_microbatch(fun, microbatch_size=4, accumulator=Concat())
    got = micro(x)
    sums = np.array([6, 22, 8], np.float32)
    assert_same(got, (sums, np.repeat(x, 2)))
    grad = jax.jit(jax.grad(lambda x: sum(jnp.sum(y**2) for y in micro(x))))(x)
    assert_same(grad, 2 * np.repeat(sums, [4, 4, 1]) + 4 * np.asarray(x))


def test_concat_of_ambiguous_results():
    micro = filter_microbatch(
        lambda x: jnp.zeros(4), microbatch_size=4, accumulator=Concat()
    )
    assert_same(micro(jnp.ones(8)), jnp.zeros(8))
    with pytest.raises(ValueError, match="there are 4 rows for the remainder of 1"):
        micro(jnp.ones(9))


def test_concat_of_scalars():
    with pytest.raises(ValueError, match=r"Concat\(axis=0\) does not fit"):
        filter_microbatch(jnp.sum, accumulator=Concat())(jnp.ones(3))


def test_mean_is_exact_for_ragged_batches():
    x = jnp.arange(10.0)
    for accumulator in (Mean(), Mean(jnp.ones(10))):
        micro = filter_microbatch(jnp.mean, microbatch_size=4, accumulator=accumulator)
        assert_same(micro(x), x.mean())


def test_other_accumulators():
    x = jnp.arange(8.0)
    fun = lambda x: x.sum()
    micro = functools.partial(filter_microbatch, fun, microbatch_size=4)
    assert_same(micro(accumulator=Sum())(x), x.sum())
    assert_same(micro(accumulator=Max())(x), jnp.array(22.0))
    assert_same(micro(accumulator=Last())(x), jnp.array(22.0))


def test_variance_between_microbatches(getkey):
    x = np.asarray(normal(getkey(), (12,)))
    means = x.reshape(3, 4).mean(1)
    micro = functools.partial(filter_microbatch, jnp.mean, microbatch_size=4)
    for ddof in (0, 1):
        got = micro(accumulator=Variance(ddof))(x)
        assert_same(got, MeanAndVariance(x.mean(), np.var(means, ddof=ddof)), tol=1e-4)
    # Of a ragged batch, the mean stays that over all examples.
    x = np.asarray(normal(getkey(), (13,)))
    got = micro(accumulator=Variance())(x)
    parts = [x[i : i + 4].mean() for i in range(0, 13, 4)]
    means = zip((4, 4, 4, 1), parts, strict=True)
    variance = sum(n * (mean - x.mean()) ** 2 for n, mean in means) / 13
    expected = MeanAndVariance(x.mean(), np.asarray(variance, np.float32))
    assert_same(got, expected, tol=1e-4)


@pytest.mark.parametrize("mode", spread(("batch", "ema"), 1))
def test_a_state_is_merged_where_it_is_returned(mode):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        3, "batch", momentum=0.9, mode=mode
    )
    x = np.random.default_rng(0).normal(size=(13, 3)) + np.arange(13)[:, None]
    x = jnp.asarray(x, jnp.float32)
    axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
    whole = jax.jit(jax.vmap(norm, **axes))
    states = [whole(x[i : i + 4], state)[1] for i in range(0, 13, 4)]
    expected = jax.tree.map(
        lambda *parts: (
            np.average(np.stack(parts), 0, [4, 4, 4, 1])
            if eqx.is_inexact_array(parts[0])
            else parts[-1]
        ),
        *states,
    )
    # The mean is that of the whole batch.
    mean = jax.tree.leaves(whole(x, state)[1])[1]
    assert_same(jnp.asarray(jax.tree.leaves(expected)[1], jnp.float32), mean)

    def check(got, expected):
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            assert_same(a, jnp.asarray(b, a.dtype))
        likes = zip(*map(jax.tree.leaves, (got, state)), strict=True)
        assert all(a.aval == b.aval for a, b in likes)

    check(filter_micro_vmap(norm, microbatch_size=4, **axes)(x, state)[1], expected)
    if mode == "ema":
        return
    run = functools.partial(filter_microbatch, in_axes=(0, None), microbatch_size=4)
    losses = lambda x, state: (whole(x, state)[0].sum(), whole(x, state)[1])
    for fun, accumulator in (
        (whole, Concat()),
        (losses, Sum()),
        (losses, Mean(weights=jnp.ones(13))),
    ):
        check(run(fun, accumulator=accumulator)(x, state)[1], expected)
    # `Last` is taken at its word.
    check(run(whole, accumulator=Last())(x, state)[1], states[-1])
    # So are accumulators for single arrays.
    each = jax.tree.map(lambda _: Last(), state)
    check(run(whole, accumulator=(Concat(), each))(x, state)[1], states[-1])
    _, found = filter_micro_grad(
        lambda scale, x, state: losses(scale * x, state),
        in_axes=(0, None),
        microbatch_size=4,
        has_aux=True,
        batched=True,
        accumulator=Sum(),
    )(jnp.ones(()), x, state)
    check(found, expected)
    # A state that the function leaves alone is not even rounded.
    inference = eqx.nn.inference_mode(norm)
    kept = filter_micro_vmap(inference, microbatch_size=4, **axes)(x, found)[1]
    assert eqx.tree_equal(kept, found)


@pytest.mark.parametrize("kind", tuple(optax.microbatching.AccumulationType))
def test_agrees_with_optax(kind, getkey):
    # One microbatch has the same examples in any order.
    x = normal(getkey(), (12, 3))
    fun = lambda x: (jnp.cumsum(x, 0), {"a": jnp.sin(x)})
    ours = filter_microbatch(fun, microbatch_size=12, accumulator=kind)(x)
    theirs = optax.microbatching.microbatch(fun, 0, 12, kind)(x)
    assert_same(ours, theirs)
    # And a function of single rows gives the same in any microbatch.
    fun = lambda x: jnp.sin(x).sum(0, keepdims=True)
    if kind is not optax.microbatching.AccumulationType.CONCAT:
        ours = filter_microbatch(fun, microbatch_size=4, accumulator=kind)(x)
        assert_same(ours, optax.microbatching.microbatch(fun, 0, 4, kind)(x))


def test_all_of_optaxs_arguments_can_be_expressed(getkey):
    x, y, z = normal(getkey(), (8, 2)), normal(getkey(), (3, 8)), jnp.array(2.0)
    fun = lambda x, z, *, y: (jnp.sum(x) * z + jnp.sum(y), {"z": z})
    kind = optax.microbatching.AccumulationType
    theirs = optax.microbatching.microbatch(
        fun,
        argnums=0,
        microbatch_size=4,
        accumulator=(kind.SUM, kind.RUNNING_MEAN),
        argnames="y",
        in_axes=(0, 1),
        num_real_microbatches=2,
    )
    ours = filter_microbatch(
        fun,
        in_axes={"x": 0, "y": 1, "z": None},
        microbatch_size=4,
        accumulator=(kind.SUM, kind.RUNNING_MEAN),
        num_real_microbatches=2,
    )
    assert_same(ours(x, z, y=y), theirs(x, z, y=y))


@pytest.mark.parametrize(("traced", "count"), thinned((True, False), range(4)))
def test_num_real_microbatches(count, traced):
    x = jnp.arange(10.0)
    rows = min(4 * count, 10)
    for accumulator, oracle in ((Sum(), jnp.sum), (Mean(), jnp.mean)):
        micro = filter_microbatch(
            oracle,
            microbatch_size=4,
            accumulator=accumulator,
            num_real_microbatches=jnp.array(count) if traced else count,
        )
        # The mean is over the examples that ran, not over all of them.
        expected = oracle(x[:rows]) if rows else accumulator_of_nothing(accumulator)
        assert_same(micro(x), expected)


def accumulator_of_nothing(accumulator):
    return jnp.array(jnp.nan if isinstance(accumulator, Mean) else 0.0)


def test_no_examples_does_not_run():
    def fun(x):
        return x.max()  # Would raise for an empty microbatch.

    micro = filter_microbatch(fun, accumulator=Sum(), microbatch_size=4)
    assert_same(micro(jnp.ones((0, 2))), jnp.array(0.0))
    micro = filter_microbatch(fun, accumulator=Sum())
    assert_same(micro(jnp.ones((0, 2))), jnp.array(0.0))


def test_static_outputs():
    fun = lambda x: (x.sum(), "static", jnp.tanh, None)
    total = functools.partial(filter_microbatch, microbatch_size=4, accumulator=Sum())
    micro = total(fun)
    assert_same(micro(jnp.arange(9.0)), (jnp.array(36.0), "static", jnp.tanh, None))
    # Numbers in a module are settings of it.
    whole = total(lambda x: (x.sum(), eqx.nn.Dropout(0.25)))(jnp.arange(9.0))
    assert whole[1] == eqx.nn.Dropout(0.25)
    wrong = total(lambda x: (x.sum(), len(x)), accumulator=(Sum(), None))
    assert_same(wrong(jnp.arange(8.0)), (jnp.array(28.0), 4))
    with pytest.raises(ValueError, match="must be the same for every microbatch"):
        wrong(jnp.arange(9.0))


def test_outputs_that_change_their_type():
    fun = lambda x: x.sum() if len(x) > 1 else x
    with pytest.raises(ValueError, match="same structure, rank and dtype"):
        filter_microbatch(fun, accumulator=Sum(), microbatch_size=4)(jnp.arange(9.0))


def test_as_a_method_and_decorator(getkey):
    class Model(eqx.Module):
        weight: jax.Array

        @filter_microbatch(in_axes=(None, 0), microbatch_size=4, accumulator=Mean())
        def loss(self, x):
            return jnp.mean((x @ self.weight) ** 2)

    model, x = Model(normal(getkey(), (3,))), normal(getkey(), (9, 3))
    out = np.asarray(x) @ np.asarray(model.weight)
    assert_same(model.loss(x), (out**2).mean())
    grad = eqx.filter_grad(lambda model: model.loss(x))(model)
    assert_same(grad.weight, 2 * np.asarray(x).T @ out / np.float32(9), tol=1e-4)


def test_traces_once(getkey):
    model, x, y = model_and_data(getkey, 9)
    counted = CountTraces(loss)
    micro = filter_microbatch(
        counted, in_axes=(None, 0, 0), microbatch_size=3, accumulator=Mean()
    )
    micro(model, x, y)
    assert counted.num == 1
    micro(model, x + 1, y)
    assert counted.num == 1


def test_dropout_keys_by_microbatch(getkey):
    keys = jr.split(getkey(), 3)
    x = normal(getkey(), (12, 2))
    noisy = lambda x, key: x + jr.normal(key, x.shape)
    got = [noisy(x[4 * i : 4 * i + 4], keys[i]) for i in range(3)]
    # A key for each microbatch is a batch of its own: one row for four examples.
    micro = filter_microbatch(
        lambda x, key: noisy(x, key[0]), microbatch_size=4, accumulator=Concat()
    )
    assert_same(micro(x, jnp.repeat(keys, 4)), jnp.concatenate(got))
