import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxbatch
from eqxbatch import (
    Concat,
    filter_micro_grad,
    filter_micro_value_and_grad,
    Max,
    Mean,
    MemoryBudget,
    RunningMean,
    Sum,
)
from .helpers import assert_same, BLOCK, CountTraces, memory, normal, TOTALS


METHODS = ("auto", "sites", "materialise")


class Model(eqx.Module):
    """A model with a layer that has a rule, one that has none, and static leaves."""

    linear: eqx.nn.Linear
    scale: jax.Array
    unused: jax.Array
    count: jax.Array
    name: str = "model"
    nothing: None = None

    def __init__(self, key, dtype=jnp.float32):
        key1, key2 = jr.split(key)
        self.linear = eqx.nn.Linear(3, 2, key=key1, dtype=dtype)
        self.scale = normal(key2, (2,), dtype)
        self.unused = jnp.ones(4, dtype)
        self.count = jnp.arange(3)

    def __call__(self, x):
        return jnp.tanh(self.linear(x)) * jnp.exp(self.scale)


def loss(model, x, y):
    return jnp.sum(jnp.abs(model(x) - y) ** 2)


def data(key, total, dtype=jnp.float32):
    key1, key2, key3 = jr.split(key, 3)
    model = Model(key1, dtype)
    return model, normal(key2, (total, 3), dtype), normal(key3, (total, 2), dtype)


def each(model, x, y, fun=loss):
    """The gradient of each example, the truth for all of this."""
    return eqx.filter_vmap(eqx.filter_grad(fun), in_axes=(None, 0, 0))(model, x, y)


def combined(grads, weights):
    """The weighted sum of the examples' gradients."""
    return jax.tree.map(
        lambda g: jnp.tensordot(weights.astype(g.dtype), g, 1).astype(g.dtype), grads
    )


def norms_of(grads):
    return jax.vmap(optax.tree.norm)(grads)


ACCUMULATORS = {
    "sum": Sum,
    "mean": Mean,
    "running_mean": RunningMean,
}


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("kind", ACCUMULATORS)
def test_accumulates_values_and_gradients(getkey, total, kind):
    model, x, y = data(getkey(), total)
    accumulator = ACCUMULATORS[kind]()
    fun = filter_micro_value_and_grad(
        loss, microbatch_size=BLOCK, accumulator=accumulator
    )
    reduce = jnp.sum if kind == "sum" else jnp.mean
    truth = eqx.filter_value_and_grad(
        lambda model: reduce(jax.vmap(functools.partial(loss, model))(x, y))
    )
    assert_same(fun(model, x, y), truth(model))
    grad = filter_micro_grad(loss, microbatch_size=BLOCK, accumulator=accumulator)
    assert_same(grad(model, x, y), truth(model)[1])


@pytest.mark.parametrize("clip_norm", (None, 0.5))
@pytest.mark.parametrize("kind", ("sum", "mean"))
def test_weights_of_examples(getkey, kind, clip_norm):
    model, x, y = data(getkey(), 13)
    weights = jr.uniform(getkey(), (13,)).at[:BLOCK].set(0)
    fun = filter_micro_value_and_grad(
        loss,
        microbatch_size=BLOCK,
        accumulator=ACCUMULATORS[kind](weights=weights),
        clip_norm=clip_norm,
    )
    value, gradient = fun(model, x, y)
    grads = each(model, x, y)
    scale = 1 if clip_norm is None else jnp.minimum(1, clip_norm / norms_of(grads))
    total = 1 if kind == "sum" else jnp.sum(weights)
    assert_same(gradient, combined(grads, weights * scale / total))
    values = jax.vmap(functools.partial(loss, model))(x, y)
    assert_same(value, jnp.sum(values * weights) / total)


def test_no_examples(getkey):
    model, x, y = data(getkey(), 0)
    total = filter_micro_value_and_grad(loss, accumulator=Sum(), return_norms=True)
    value, gradient, statistics = total(model, x, y)
    assert value == 0
    assert_same(gradient, jax.tree.map(jnp.zeros_like, gradient))
    assert statistics.norms.shape == (0,)
    assert jnp.isnan(filter_micro_value_and_grad(loss)(model, x, y)[0])


@pytest.mark.parametrize("options", ({}, {"clip_norm": 0.3}, {"metrics": jnp.shape}))
def test_aux(getkey, options):
    model, x, y = data(getkey(), 5)
    if "metrics" in options:
        options = {"metrics": lambda gradient: gradient.scale}

    def with_aux(model, x, y):
        out = model(x)
        return loss(model, x, y), {"out": out, "norm": jnp.sum(out), "text": "static"}

    fun = filter_micro_value_and_grad(
        with_aux,
        has_aux=True,
        microbatch_size=2,
        aux_accumulator={"out": Concat(), "norm": Max(), "text": None},
        **options,
    )
    (value, aux), gradient, *_ = fun(model, x, y)
    outs = jax.vmap(model)(x)
    expected = {"out": outs, "norm": jnp.max(jnp.sum(outs, 1)), "text": "static"}
    assert_same(aux, expected)
    without = filter_micro_value_and_grad(loss, microbatch_size=2, **options)
    assert_same((value, gradient), without(model, x, y)[:2])
    grad = filter_micro_grad(with_aux, has_aux=True, microbatch_size=2, **options)
    gradient, aux = grad(model, x, y)[:2]
    assert_same(gradient, without(model, x, y)[1])
    assert_same(aux, {**expected, "norm": jnp.sum(outs, 1)})


def test_axes(getkey):
    model, x, y = data(getkey(), 7)
    expected = eqx.filter_grad(
        lambda model: jnp.mean(jax.vmap(lambda x: loss(model, x, y[0]))(x))
    )(model)
    make = functools.partial(filter_micro_grad, loss, microbatch_size=3)
    assert_same(make(in_axes=(1, None))(model, x.T, y[0]), expected)
    assert_same(make(in_axes={"x": 1, "y": None})(model, x.T, y[0]), expected)
    assert_same(make(in_axes={"x": -1, "y": None})(model, y=y[0], x=x.T), expected)
    alone = make(in_axes=(eqx.if_array(0),))
    keyword = make(in_axes=(0,))
    assert_same(alone(model, x, y=y), make()(model, x, y))
    assert_same(keyword(model, x, y=y), make()(model, x, y))


def test_keys_do_not_depend_on_the_size(getkey):
    model, x, _ = data(getkey(), 7)
    keys = jr.split(getkey(), 7)
    dropout = eqx.nn.Dropout(0.5)
    noisy = lambda model, x, key: jnp.sum(dropout(model(x), key=key) ** 2)
    for options in ({}, {"clip_norm": 0.2}):
        one, many = (
            filter_micro_grad(noisy, microbatch_size=size, **options)(model, x, keys)
            for size in (2, None)
        )
        assert_same(one, many)


@pytest.mark.parametrize("total", TOTALS)
def test_batched(getkey, total):
    model, x, y = data(getkey(), total)

    def mean(model, x, y):
        outs = jax.vmap(model)(x)
        return jnp.mean(jnp.sum((outs - y) ** 2, 1)), (outs, "text")

    fun = filter_micro_value_and_grad(
        mean, has_aux=True, batched=True, microbatch_size=BLOCK
    )
    ((value, aux), gradient) = fun(model, x, y)
    expected = eqx.filter_value_and_grad(mean, has_aux=True)(model, x, y)
    assert_same(((value, aux), gradient), expected)
    total_loss = lambda model, x, y: mean(model, x, y)[0] * x.shape[0]
    fun = filter_micro_grad(
        total_loss, batched=True, microbatch_size=BLOCK, accumulator=Sum()
    )
    assert_same(fun(model, x, y), jax.tree.map(lambda g: g * total, expected[1]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("total", (1, 13))
@pytest.mark.usefixtures("x64")
def test_clips_the_gradient_of_each_example(getkey, total, method):
    model, x, y = data(getkey(), total, jnp.float64)
    grads = each(model, x, y)
    norms = norms_of(grads)
    bound = float(jnp.median(norms))
    fun = filter_micro_grad(
        loss,
        microbatch_size=BLOCK,
        clip_norm=bound,
        return_norms=True,
        method=method,
    )
    gradient, statistics = fun(model, x, y)
    scale = jnp.minimum(1, bound / norms)
    assert_same(gradient, combined(grads, scale / total), tol=1e-10)
    assert_same(statistics.norms, norms, tol=1e-10)
    assert statistics.metrics is None
    assert statistics.moments is None


@pytest.mark.parametrize("method", METHODS)
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
    scale = jnp.minimum(1, 0.5 / norms)
    assert_same(gradient.linear, combined(grads.linear, scale / 7))
    assert_same(gradient.scale, jnp.mean(grads.scale, 0))
    assert_same(gradient.unused, jnp.zeros(4))


@pytest.mark.parametrize("bound", (0, jnp.inf, 1e-30))
def test_extreme_bounds(getkey, bound):
    model, x, y = data(getkey(), 5)
    gradient = filter_micro_grad(loss, microbatch_size=2, clip_norm=bound)(model, x, y)
    plain = filter_micro_grad(loss, microbatch_size=2)(model, x, y)
    scale = 1 if bound == jnp.inf else bound / 1
    if bound == jnp.inf:
        assert_same(gradient, plain)
    else:
        assert float(optax.tree.norm(gradient)) <= scale * 1.001
    # An example without a gradient is not divided by zero.
    still = filter_micro_grad(lambda w, x: 0.0 * w * x, clip_norm=bound)
    assert still(jnp.array(1.0), x[:, 0]) == 0


def test_bound_is_an_argument_of_the_program(getkey):
    model, x, y = data(getkey(), 5)
    counted = CountTraces(loss)
    for bound in (0.1, 0.2):
        fun = filter_micro_grad(counted, microbatch_size=2, clip_norm=jnp.array(bound))
        once = filter_micro_grad(loss, microbatch_size=2, clip_norm=bound)
        assert_same(fun(model, x, y), once(model, x, y))
    assert counted.num == 1
    for bound in (0.1, 0.2):
        fun = filter_micro_grad(counted, microbatch_size=2, clip_norm=np.array(bound))
        once = filter_micro_grad(loss, microbatch_size=2, clip_norm=bound)
        assert_same(fun(model, x, y), once(model, x, y))
    # Once more, as an array of NumPy has a type that is not weak.
    assert counted.num == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", (jnp.nan, jnp.inf))
def test_gradients_that_are_not_finite(getkey, method, bad):
    model, x, y = data(getkey(), 6)
    x = x.at[4, 1].set(bad)
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
    assert jnp.isnan(gradient.linear.weight).any()
    # ... counts as zero, in a mean over all examples.
    value, gradient, safe = make(nan_safe=True)(model, x, y)
    kept = jnp.arange(6) != 4
    _, expected, _ = make(accumulator=Sum())(model, x[kept], y[kept])
    assert_same(gradient, jax.tree.map(lambda g: g / 6, expected))
    for norms in (statistics.norms, safe.norms):
        np.testing.assert_array_equal(jnp.isfinite(norms), kept)
    assert jnp.isfinite(value) == jnp.isfinite(loss(model, x[4], y[4]))


def test_nan_safe_without_clipping(getkey):
    model, x, y = data(getkey(), 6)
    x = x.at[4, 1].set(jnp.nan)
    gradient = filter_micro_grad(loss, microbatch_size=4, nan_safe=True)(model, x, y)
    grads = each(model, x.at[4].set(0), y)
    assert_same(gradient, combined(grads, jnp.where(jnp.arange(6) == 4, 0, 1 / 6)))


@pytest.mark.parametrize("method", METHODS)
def test_nan_safe_in_groups(method):
    # Of the first example, the gradient is not finite in the first group only.
    x = jnp.array([[jnp.nan, 1.0], [2.0, 3.0]])
    loss = lambda w, x: w[0] * x[0] + w[1] * x[1]
    fun = filter_micro_grad(loss, nan_safe=True, clip_norm=(1.0, 1.0), method=method)
    w = (jnp.array(1.0), jnp.array(1.0))
    assert_same(fun(w, x), (jnp.array(0.5), jnp.array(0.5)))


def test_transform_and_metrics(getkey):
    model, x, y = data(getkey(), 7)
    grads = each(model, x, y)
    fun = filter_micro_value_and_grad(
        loss,
        microbatch_size=3,
        transform=lambda g: {"sign": jax.tree.map(jnp.sign, g), "max": g.scale.max()},
        accumulator={"sign": Mean(), "max": Max()},
        metrics=lambda g: (optax.tree.norm(g), g.scale),
    )
    value, out, statistics = fun(model, x, y)
    assert_same(value, jnp.mean(jax.vmap(functools.partial(loss, model))(x, y)))
    assert_same(out["sign"], jax.tree.map(lambda g: jnp.mean(jnp.sign(g), 0), grads))
    assert_same(out["max"], grads.scale.max())
    assert_same(statistics.metrics, (norms_of(grads), grads.scale))


def test_transform_is_clipped(getkey):
    model, x, y = data(getkey(), 7)
    grads = jax.tree.map(lambda g: 3 * g, each(model, x, y))
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
    assert_same(gradient, combined(grads, jnp.minimum(1, 1 / norms)))


@pytest.mark.parametrize("count", (None, 2, 3))
def test_moments(getkey, count):
    # The gradient of an example is its data.
    x = 3 + normal(getkey(), (11, 5))
    fun = filter_micro_value_and_grad(
        lambda w, x: jnp.dot(w, x),
        microbatch_size=4,
        moments=True,
        num_real_microbatches=count,
    )
    _, gradient, statistics = fun(jnp.zeros(5), x)
    x = x if count is None else x[: 4 * count]
    mean, variance, noise_scale = statistics.moments
    assert_same(gradient, jnp.mean(x, 0))
    assert_same(mean, jnp.mean(x, 0))
    assert_same(variance, jnp.var(x, 0, ddof=1))
    noise = jnp.sum(jnp.var(x, 0, ddof=1))
    signal = jnp.sum(jnp.mean(x, 0) ** 2) - noise / len(x)
    assert_same(noise_scale, noise / signal)


def test_noise_scale_is_that_of_the_distribution():
    # Gradients with mean 1 and variance 4 in each of 50 entries.
    x = 1 + 2 * jr.normal(jr.key(0), (20_000, 50))
    fun = filter_micro_grad(jnp.dot, microbatch_size=1000, moments=True)
    _, statistics = fun(jnp.zeros(50), x)
    assert abs(statistics.moments.noise_scale - 4) < 0.1


def test_early_stop(getkey):
    model, x, y = data(getkey(), 7)
    for count in (0, 1, 2, 3):
        for number in (count, jnp.array(count)):
            fun = filter_micro_value_and_grad(
                loss,
                microbatch_size=3,
                clip_norm=0.5,
                accumulator=Sum(),
                num_real_microbatches=number,
            )
            ran = slice(0, min(3 * count, 7))
            plain = filter_micro_value_and_grad(loss, clip_norm=0.5, accumulator=Sum())
            assert_same(fun(model, x, y), plain(model, x[ran], y[ran]))


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16(getkey, method):
    model, x, y = data(getkey(), 64, jnp.bfloat16)
    fun = filter_micro_value_and_grad(
        loss, microbatch_size=5, clip_norm=0.5, method=method, return_norms=True
    )
    value, gradient, statistics = fun(model, x, y)
    wide = jax.tree.map(
        lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, (model, x, y)
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
        np.testing.assert_allclose(got.astype(jnp.float32), wanted, 0.1, atol)


@pytest.mark.parametrize("method", METHODS)
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
    assert_same(gradient, combined(grads, jnp.minimum(1, 0.5 / norms) / 7))


@pytest.mark.usefixtures("x64")
def test_mixed_dtypes(getkey):
    model = (normal(getkey(), (3,)), normal(getkey(), (3,), jnp.float64))
    fun = lambda w, x: jnp.sum(w[0] * x).astype(jnp.float64) + jnp.sum(jnp.sin(w[1]))
    x = normal(getkey(), (5, 3))
    grad = filter_micro_grad(fun, clip_norm=0.5, return_norms=True, microbatch_size=2)
    gradient, statistics = grad(model, x)
    assert [g.dtype for g in gradient] == [jnp.float32, jnp.float64]
    squares = jnp.sum(x.astype(jnp.float64) ** 2, 1)
    expected = jnp.sqrt(squares + jnp.sum(jnp.cos(model[1]) ** 2))
    np.testing.assert_allclose(statistics.norms, expected, rtol=1e-6)


def test_inside_other_transforms(getkey):
    model, x, y = data(getkey(), 7)
    fun = filter_micro_grad(loss, microbatch_size=3, clip_norm=0.5)
    expected = fun(model, x, y)
    assert_same(eqx.filter_jit(fun)(model, x, y), expected)
    scales = jnp.array([1.0, 2.0])
    many = eqx.filter_vmap(lambda scale: fun(model, x * scale, y))(scales)
    for i, scale in enumerate(scales):
        one = jax.tree.map(lambda a: a[i], many)
        assert_same(one, fun(model, x * scale, y))
    models = eqx.filter_vmap(Model)(jr.split(getkey(), 2))
    of_ensemble = eqx.filter_vmap(fun, in_axes=(eqx.if_array(0), None, None))
    many = of_ensemble(models, x, y)
    for i in range(2):
        first = lambda a: a[i] if eqx.is_array(a) else a
        one = fun(jax.tree.map(first, models), x, y)
        assert_same(jax.tree.map(first, many), one)


@pytest.mark.parametrize("clip_norm", (None, 0.5))
@pytest.mark.usefixtures("x64")
def test_derivative_of_a_gradient(getkey, clip_norm):
    model, x, y = data(getkey(), 5, jnp.float64)
    fun = filter_micro_grad(loss, microbatch_size=2, clip_norm=clip_norm)

    def through(scale):
        return optax.tree.norm(fun(model, x * scale, y))

    def truth(scale):
        grads = each(model, x * scale, y)
        factors = jnp.ones(5)
        if clip_norm is not None:
            factors = jnp.minimum(1, clip_norm / norms_of(grads))
        return optax.tree.norm(combined(grads, factors / 5))

    assert_same(jax.grad(through)(1.0), jax.grad(truth)(1.0), tol=1e-9)


def test_derivative_where_a_gradient_is_zero():
    # The gradient of an example is its data, here times a scale.
    x = jnp.array([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]])
    fun = filter_micro_grad(jnp.dot, clip_norm=1.0, microbatch_size=2)
    total = lambda scale: jnp.sum(fun(jnp.zeros(2), scale * x))
    # What is clipped does not change with the scale, so the last example is left.
    assert_same(jax.grad(total)(1.0), jnp.array(0.7 / 3))


@pytest.mark.parametrize(
    "options", ({}, {"clip_norm": 1.0}, {"metrics": optax.tree.norm})
)
def test_traces(getkey, options):
    model, x, y = data(getkey(), 7)
    counted = CountTraces(loss)
    fun = filter_micro_value_and_grad(counted, microbatch_size=3, **options)
    fun(model, x, y)
    # An example has one shape, also in the remainder.
    assert counted.num == 1
    fun(model, x + 1, y)
    assert counted.num == 1


def test_methods_and_decorators(getkey):
    _, x, y = data(getkey(), 7)

    class Trainer(eqx.Module):
        penalty: float

        @filter_micro_grad(microbatch_size=2, in_axes=(None, 0, 0))
        def weight_grad(self, model, x, y):
            return loss(model, x, y)

    # The first argument of a method is the instance, which has no arrays to train.
    with pytest.raises(ValueError, match="nothing to differentiate"):
        Trainer(1.0).weight_grad(Model(getkey()), x, y)

    class Quadratic(eqx.Module):
        weight: jax.Array

        @filter_micro_grad(microbatch_size=2)
        def grad(self, x):
            """Twice a weighted x."""
            return self.weight * x**2

    quadratic = Quadratic(jnp.array(3.0))
    assert_same(quadratic.grad(x[:, 0]).weight, jnp.mean(x[:, 0] ** 2))
    assert filter_micro_grad(loss).__name__ == "loss"
    assert filter_micro_grad(loss).__wrapped__ is loss


def test_in_an_optax_loop():
    # Always the same, as not every start gets there in so few steps.
    model, x, _ = data(jr.key(0), 20)
    y = jax.vmap(Model(jr.key(1)))(x)
    optimiser = optax.sgd(0.2)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    step = filter_micro_value_and_grad(loss, microbatch_size=8, clip_norm=5.0)
    first = None
    for _ in range(100):
        value, grads = step(model, x, y)
        first = value if first is None else first
        updates, state = optimiser.update(grads, state)
        model = eqx.apply_updates(model, updates)
    assert value < 0.1 * first
    assert model.count.dtype == jnp.int32
    assert model.name == "model"


def test_accumulators_of_optax(getkey):
    model, x, y = data(getkey(), 7)
    kind = optax.microbatching.AccumulationType.SUM
    fun = filter_micro_value_and_grad(loss, microbatch_size=2, accumulator=kind)
    own = filter_micro_value_and_grad(loss, microbatch_size=2, accumulator=Sum())
    assert_same(fun(model, x, y), own(model, x, y))
    # As `micro_grad` of optax returns it: the values of all examples.
    values = filter_micro_value_and_grad(
        loss, microbatch_size=2, accumulator=kind, value_accumulator=Concat()
    )
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    theirs = optax.microbatching.micro_grad(
        lambda arrays, x, y: loss(eqx.combine(arrays, static), x, y),
        batch_argnums=(1, 2),
        keep_batch_dim=False,
    )
    expected, aux = theirs(arrays, x, y)
    assert_same(values(model, x, y), (aux.values, expected))


def mlp(key):
    return eqx.nn.MLP(8, 4, 64, 2, key=key)


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


@pytest.mark.parametrize("kind", ("sum", "mean", "weighted", "running_mean"))
@pytest.mark.parametrize("clip_norm", (None, 2e4))
@pytest.mark.parametrize("metrics", (None, lambda g: g))
def test_gradients_of_float16_are_added_in_float32(kind, clip_norm, metrics):
    # Some entries are half of what float16 holds, others nearly vanish.
    x = jnp.tile(jnp.array([32768.0, 5e-5], jnp.float16), (300, 1))
    x = x.at[::3].multiply(0.5)
    accumulator = {
        "sum": Sum(jnp.full(300, 1 / 300)),
        "mean": Mean(),
        "weighted": Mean(jnp.full(300, 1e-9)),
        "running_mean": RunningMean(),
    }[kind]
    wide = np.asarray(x, np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    bound = np.inf if clip_norm is None else clip_norm
    expected = np.mean(wide * np.minimum(1, bound / norms), 0)
    for size in (1, 7, None):
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


def test_clipped_gradients_of_float16_of_any_length():
    # What the first is scaled with is no number in float16.
    x = jnp.array([[6e4, 6e4], [1e-3, 2e-3]], jnp.float16)
    wide = np.asarray(x, np.float64)
    expected = np.sum(wide / np.linalg.norm(wide, axis=1, keepdims=True), 0)
    for method in METHODS:
        clipped = filter_micro_grad(
            lambda w, x: w @ x, accumulator=Sum(), clip_norm=1e-3, method=method
        )
        got = np.asarray(clipped(jnp.ones(2, jnp.float16), x), np.float64)
        np.testing.assert_allclose(got, 1e-3 * expected, rtol=1e-2)


def test_running_mean_of_huge_gradients():
    x = jnp.full((9, 2), 3e38)
    grad = functools.partial(
        filter_micro_grad, lambda w, x: w @ x, accumulator=RunningMean()
    )
    for options in ({}, {"microbatch_size": 4}, {"clip_norm": jnp.inf}):
        assert_same(grad(**options)(jnp.zeros(2), x), x[0])
    # Its norm is no number in float32.
    got = grad(clip_norm=1e38)(jnp.zeros(2), x)
    assert_same(got, jnp.full(2, 0.5**0.5 * 1e38))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_grouped", (False, True))
def test_norms_whose_squares_are_out_of_range(getkey, method, is_grouped):
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
        bound = jnp.asarray(scale)
        clipped = filter_micro_grad(
            fun,
            microbatch_size=4,
            clip_norm=jax.tree.unflatten(treedef, [bound] * 4) if is_grouped else bound,
            return_norms=True,
            method=method,
            accumulator=Sum(),
        )
        gradient, statistics = clipped(model, x, jnp.asarray(scales))
        expected = []
        for group, got in zip(groups, jax.tree.leaves(statistics.norms), strict=True):
            norms = np.sqrt(sum(np.sum(g**2, 1) for g in group))
            np.testing.assert_allclose(got, norms, rtol=1e-4)
            factors = float(scale) / np.maximum(norms, scale)
            expected += [factors @ g for g in group]
        for got, total in zip(jax.tree.leaves(gradient), expected, strict=True):
            atol = 1e-4 * np.max(abs(total))
            np.testing.assert_allclose(got.ravel(), total, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("method", METHODS)
def test_one_infinite_entry_makes_all_of_a_gradient_infinite(method):
    w, x = (jnp.ones(2), jnp.ones(2)), jnp.array([[1.0, jnp.inf], [1.0, 1.0]])
    loss = lambda w, x: w[0] @ x + w[1].sum()
    gradient = filter_micro_grad(loss, clip_norm=1.0, method=method)(w, x)
    assert not any(jnp.isfinite(g).any() for g in gradient)


def test_noise_scale_of_a_count_of_few_bits(getkey):
    model, x, y = data(getkey(), 300)
    make = functools.partial(filter_micro_grad, loss, microbatch_size=100, moments=True)
    expected = make()(model, x, y)[1].moments.noise_scale
    counted = make(num_real_microbatches=jnp.array(3, jnp.int8))
    assert_same(counted(model, x, y)[1].moments.noise_scale, expected)
    many = filter_micro_grad(
        loss, microbatch_size=1, num_real_microbatches=jnp.array(100, jnp.int8)
    )
    assert_same(many(model, x, y), filter_micro_grad(loss)(model, x[:100], y[:100]))


def program(model, size, **options):
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    fun = filter_micro_grad(loss, microbatch_size=size, **options)
    return arrays, lambda arrays, x, y: fun(eqx.combine(arrays, static), x, y)


@pytest.mark.parametrize("options", ({}, {"clip_norm": 1.0}))
def test_memory_is_flat_in_the_number_of_examples(getkey, options):
    arrays, fun = program(mlp(getkey()), 32, **options)
    sizes = [
        memory(fun, arrays, jnp.zeros((n, 8)), jnp.zeros((n, 4))).temp_size_in_bytes
        for n in (128, 4096)
    ]
    assert sizes[0] == sizes[1]


def test_memory_of_norms_is_not_that_of_gradients(getkey):
    model = mlp(getkey())
    x, y = jnp.zeros((512, 8)), jnp.zeros((512, 4))
    temporaries = {}
    for method in ("sites", "materialise"):
        arrays, fun = program(model, 128, clip_norm=1.0, method=method)
        temporaries[method] = memory(fun, arrays, x, y).temp_size_in_bytes
    one = sum(a.size * 4 for a in jax.tree.leaves(arrays))
    assert temporaries["materialise"] > 64 * one
    assert temporaries["sites"] < 16 * one


def test_memory_budget(getkey):
    model = mlp(getkey())
    x, y = normal(getkey(), (2000, 8)), normal(getkey(), (2000, 4))
    budget = MemoryBudget("1MB")
    arrays, fun = program(model, budget, clip_norm=1.0)
    assert memory(fun, arrays, x, y).temp_size_in_bytes < 1e6
    _, whole = program(model, None, clip_norm=1.0)
    assert memory(whole, arrays, x, y).temp_size_in_bytes > 1e6
    assert_same(fun(arrays, x, y), whole(arrays, x, y))


BAD = {
    "a vector": (lambda m, x, y: m(x), {}, ValueError, "real floating-point scalar"),
    "complex": (
        lambda m, x, y: jnp.sum(m(x)).astype(jnp.complex64),
        {},
        ValueError,
        "dtype complex64. Take the sum",
    ),
    "an integer": (lambda m, x, y: 1, {}, ValueError, "dtype int32"),
    "text": (lambda m, x, y: "loss", {}, ValueError, "'loss' of type str"),
    "no aux": (loss, {"has_aux": True}, ValueError, r"return a pair `\(value, aux\)`"),
    "axes for all": (
        loss,
        {"in_axes": (None, 0, 0)},
        ValueError,
        "must have 2 entries for 3 positional",
    ),
    "batched model": (
        loss,
        {"in_axes": {"model": 0}},
        ValueError,
        "gives `model` the batch axis 0",
    ),
    "wrong weights": (
        loss,
        {"accumulator": Mean(weights=jnp.ones(3))},
        ValueError,
        "one weight for each example",
    ),
    "wrong bounds": (
        loss,
        {"clip_norm": {"a": 1.0}},
        ValueError,
        "`clip_norm` must be a number or a PyTree prefix",
    ),
    "traced bound": (
        loss,
        {"clip_norm": jnp.array(-1.0)},
        RuntimeError,
        "`clip_norm` must not be negative or NaN",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(getkey, name):
    fun, options, error, match = BAD[name]
    model, x, y = data(getkey(), 5)
    with pytest.raises(error, match=match):
        jax.block_until_ready(
            filter_micro_grad(fun, microbatch_size=2, **options)(model, x, y)
        )


SETTINGS = {
    "negative": (
        {"clip_norm": -1.0},
        ValueError,
        "must not be negative or NaN; got -1.0",
    ),
    "nan": ({"clip_norm": (1.0, jnp.nan)}, ValueError, "must not be negative or NaN"),
    "negative of NumPy": (
        {"clip_norm": np.array(-1.0)},
        ValueError,
        "must not be negative or NaN; got -1.0",
    ),
    "vector of NumPy": ({"clip_norm": np.ones(2)}, TypeError, r"array of shape \(2,\)"),
    "bool": ({"clip_norm": True}, TypeError, "got True of type bool"),
    "vector": ({"clip_norm": jnp.ones(2)}, TypeError, r"array of shape \(2,\)"),
    "sites": (
        {"transform": jnp.sign, "method": "sites"},
        ValueError,
        "does not form the gradient of an example, but `transform`",
    ),
    "sites of moments": (
        {"moments": True, "method": "sites"},
        ValueError,
        "but `moments` is about",
    ),
    "batched": (
        {"batched": True, "clip_norm": 1.0},
        ValueError,
        "`clip_norm, nan_safe or return_norms` is about single examples",
    ),
    "batched metrics": (
        {"batched": True, "metrics": jnp.sum},
        ValueError,
        "`metrics` is about single examples",
    ),
    "accumulator": ({"accumulator": Concat()}, TypeError, "must be a Sum, a Mean"),
    "no accumulator": (
        {"accumulator": "mean"},
        TypeError,
        "Unknown accumulator 'mean'",
    ),
    "weighted moments": (
        {"moments": True, "accumulator": Mean(weights=jnp.ones(3))},
        ValueError,
        "`moments` are those of examples that count the same",
    ),
    "size": ({"microbatch_size": 0}, ValueError, "must be at least 1; got 0"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings(name):
    options, error, match = SETTINGS[name]
    with pytest.raises(error, match=match):
        filter_micro_grad(loss, **options)


def test_bad_types(unchecked):
    with pytest.raises(ValueError, match="`method` must be one of"):
        filter_micro_grad(loss, method="site")
    with pytest.raises(TypeError, match="`metrics` must be a function of the gradient"):
        filter_micro_grad(loss, metrics=3)
    with pytest.raises(TypeError, match="`fun` must be callable"):
        filter_micro_grad(3)


def test_nothing_to_differentiate(getkey):
    _, x, y = data(getkey(), 5)
    with pytest.raises(ValueError, match="no arrays of an inexact dtype"):
        filter_micro_grad(loss)(jnp.arange(3), x, y)
    with pytest.raises(ValueError, match="only keyword arguments"):
        filter_micro_grad(loss)(model=Model(getkey()), x=x, y=y)
    with pytest.raises(ValueError, match="Nothing is batched"):
        filter_micro_grad(loss, in_axes=None)(Model(getkey()), x[0], y[0])


def test_aux_that_differs_between_microbatches(getkey):
    model, x, y = data(getkey(), 5)
    differs = lambda model, x, y: (jnp.mean(jax.vmap(model)(x)), [x] * len(x))
    fun = filter_micro_grad(differs, batched=True, has_aux=True, microbatch_size=2)
    with pytest.raises(ValueError, match="for every microbatch"):
        fun(model, x, y)


def test_public_names():
    assert eqxbatch.GradientStatistics._fields == ("norms", "metrics", "moments")
    assert eqxbatch.GradientMoments._fields == ("mean", "variance", "noise_scale")


@pytest.mark.parametrize("method", ("auto", "sites", "materialise"))
def test_norms_where_no_parameter_is_used(method):
    loss = lambda w, x: jnp.sum(x)
    settings = {"clip_norm": 1.0, "return_norms": True, "method": method}
    micro = filter_micro_value_and_grad(loss, microbatch_size=3, **settings)
    value, gradient, statistics = micro(jnp.ones(3), jnp.ones((4, 2)))
    assert_same((value, gradient), (jnp.asarray(2.0), jnp.zeros(3)))
    assert_same(statistics.norms, jnp.zeros(4))


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.float32))
@pytest.mark.parametrize("mask_dtype", (jnp.bool_, jnp.int8))
def test_weights_times_whole_numbers(dtype, mask_dtype, getkey):
    weight = normal(getkey(), (3, 4), dtype)
    masks = jnp.array([[1, 0, 1, 1], [0, 0, 3, 1], [5, 1, 0, 0]]).astype(mask_dtype)

    def loss(weight, mask):
        numbers = (((1,), (0,)), ((), ()))
        out = jax.lax.dot_general(weight, mask, numbers, preferred_element_type=dtype)
        return jnp.sum(jnp.sin(out))

    wide = weight.astype(jnp.float32)
    dense = lambda w, mask: jnp.sum(jnp.sin(w @ mask.astype(jnp.float32)))
    each = jax.vmap(jax.grad(dense), (None, 0))(wide, masks)
    norms = jnp.linalg.norm(each.reshape(3, -1), axis=1)
    expected = jnp.tensordot(jnp.minimum(1, 0.5 / norms), each, 1) / 3
    for method in ("sites", "materialise"):
        micro = filter_micro_grad(loss, clip_norm=0.5, method=method)
        assert_same(micro(weight, masks), expected.astype(dtype), tol=4e-3)
