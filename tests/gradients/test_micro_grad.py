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
    Sum,
)
from ..helpers import (
    assert_same,
    BLOCK,
    CountTraces,
    memory,
    normal,
    spread,
    thinned,
    TOTALS,
    variants,
)
from .models import combined, data, each, loss, mlp, Model, norms_of, program, values_of


ACCUMULATORS = {
    "sum": Sum,
    "mean": Mean,
    "running_mean": functools.partial(Mean, running=True),
}


@pytest.mark.parametrize(("total", "kind"), thinned(TOTALS, [*ACCUMULATORS]))
def test_accumulates_values_and_gradients(getkey, total, kind):
    # The truth is of as many as possible for all, which takes one program.
    model, *batch = data(getkey(), max(TOTALS))
    values, grads = values_of(model, *batch), each(model, *batch)
    x, y = [np.asarray(a)[:total] for a in batch]
    settings = {"microbatch_size": BLOCK, "accumulator": ACCUMULATORS[kind]()}
    reduce = np.sum if kind == "sum" else np.mean
    expected = jax.tree.map(lambda a: reduce(a[:total], 0), (values, grads))
    assert_same(filter_micro_value_and_grad(loss, **settings)(model, x, y), expected)
    if total == max(TOTALS):
        grad = filter_micro_grad(loss, **settings)
        assert_same(grad(model, x, y), expected[1])


@pytest.mark.parametrize(("clip_norm", "kind"), thinned((None, 0.5), ("sum", "mean")))
def test_weights_of_examples(getkey, kind, clip_norm):
    model, x, y = data(getkey(), 13)
    weights = np.array(jnp.abs(normal(getkey(), (13,))))
    weights[:BLOCK] = 0
    fun = filter_micro_value_and_grad(
        loss,
        microbatch_size=BLOCK,
        accumulator=ACCUMULATORS[kind](weights=jax.device_put(weights)),
        clip_norm=clip_norm,
    )
    value, gradient = fun(model, x, y)
    grads = each(model, x, y)
    scale = 1 if clip_norm is None else np.minimum(1, clip_norm / norms_of(grads))
    total = 1 if kind == "sum" else np.sum(weights)
    assert_same(gradient, combined(grads, weights * scale / total))
    values = values_of(model, x, y)
    assert_same(value, np.sum(values * weights) / total)


def test_no_examples(getkey):
    model, x, y = data(getkey(), 0)
    total = filter_micro_value_and_grad(loss, accumulator=Sum(), return_norms=True)
    value, gradient, statistics = total(model, x, y)
    assert value == 0
    assert_same(gradient, jax.tree.map(jnp.zeros_like, gradient))
    assert statistics.norms.shape == (0,)
    assert jnp.isnan(filter_micro_value_and_grad(loss)(model, x, y)[0])


@pytest.mark.parametrize(
    "options", spread(({}, {"clip_norm": 0.3}, {"metrics": jnp.shape}), 2)
)
def test_aux(getkey, options):
    model, x, y = data(getkey(), 5)
    if "metrics" in options:
        options = {"metrics": lambda gradient: gradient.scale}

    def with_aux(model, x, y):
        out = model(x)
        return loss(model, x, y), {"out": out, "norm": jnp.sum(out), "text": "static"}

    grads, outs = each(model, x, y), np.asarray(jax.jit(jax.vmap(model))(x))
    scale = np.minimum(1, options.get("clip_norm", np.inf) / norms_of(grads))
    truth = combined(grads, scale / 5)
    expected = {"out": outs, "norm": np.sum(outs, 1), "text": "static"}
    settings = {"has_aux": True, "microbatch_size": 2, **options}
    if "metrics" not in options:
        fun = filter_micro_value_and_grad(
            with_aux,
            aux_accumulator={"out": Concat(), "norm": Max(), "text": None},
            **settings,
        )
        (value, aux), gradient, *_ = fun(model, x, y)
        assert_same(aux, {**expected, "norm": np.max(expected["norm"])})
        assert_same((value, gradient), (np.mean(values_of(model, x, y)), truth))
    if "clip_norm" not in options:
        gradient, aux = filter_micro_grad(with_aux, **settings)(model, x, y)[:2]
        assert_same(gradient, truth)
        assert_same(aux, expected)


def test_axes(getkey):
    model, x, y = data(getkey(), 7)
    mean = lambda grads: jax.tree.map(lambda g: np.mean(g, 0), grads)
    first = np.asarray(y)[0]
    turned = np.asarray(x).T
    expected = mean(each(model, x, np.stack([first] * 7)))
    make = functools.partial(filter_micro_grad, loss, microbatch_size=3)
    assert_same(make(in_axes=(1, None))(model, turned, first), expected)
    in_axes = {"x": -1, "y": None}
    assert_same(make(in_axes=in_axes)(model, y=first, x=turned), expected)
    expected = mean(each(model, x, y))
    for in_axes in ((eqx.if_array(0),), (0,)):
        assert_same(make(in_axes=in_axes)(model, x, y=y), expected)


def test_keys_do_not_depend_on_the_size(getkey):
    model, x, _ = data(getkey(), 7)
    keys = jr.split(getkey(), 7)
    dropout = eqx.nn.Dropout(0.5)
    noisy = lambda model, x, key: jnp.sum(dropout(model(x), key=key) ** 2)
    # Also with gradients of each example, of which none is clipped.
    one, many = (
        filter_micro_grad(noisy, microbatch_size=size, clip_norm=bound)(model, x, keys)
        for size, bound in ((2, None), (None, 1e6))
    )
    assert_same(one, many)


@pytest.mark.parametrize("total", variants(TOTALS, 3, 4, 8, 13))
def test_batched(getkey, total):
    model, x, y = data(getkey(), total)

    def mean(model, x, y):
        outs = jax.vmap(model)(x)
        return jnp.mean(jnp.sum((outs - y) ** 2, 1)), (outs, "text")

    fun = filter_micro_value_and_grad(
        mean, has_aux=True, batched=True, microbatch_size=BLOCK, accumulator=Mean()
    )
    ((value, aux), gradient) = fun(model, x, y)
    truth = eqx.filter_value_and_grad(mean, has_aux=True)
    expected = eqx.filter_jit(truth)(model, x, y)
    assert_same(((value, aux), gradient), expected)
    total_loss = lambda model, x, y: mean(model, x, y)[0] * x.shape[0]
    fun = filter_micro_grad(
        total_loss, batched=True, microbatch_size=BLOCK, accumulator=Sum()
    )
    assert_same(fun(model, x, y), jax.tree.map(lambda g: g * total, expected[1]))


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
    assert_same(value, np.mean(values_of(model, x, y)))
    assert_same(out["sign"], jax.tree.map(lambda g: np.mean(np.sign(g), 0), grads))
    assert_same(out["max"], grads.scale.max())
    assert_same(statistics.metrics, (norms_of(grads), grads.scale))


class Weighted(eqxbatch.AbstractAccumulator):
    """A custom accumulator, with a field that `Sum` and `Mean` have, too."""

    weights: jax.Array

    def init(self, value, blocks):
        return jnp.zeros(value.shape)

    def update(self, state, value, block):
        return state + value

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        return self.weights @ values.reshape(len(values), -1).sum(0)


def test_custom_accumulator_with_weights():
    x = jnp.arange(6.0).reshape(3, 2)
    fun = filter_micro_grad(
        jnp.dot,
        microbatch_size=2,
        transform=jnp.sign,
        accumulator=Weighted(jnp.array([2.0, 3.0])),
        moments=True,
    )
    assert fun(jnp.ones(2), x)[0] == 2 * 2 + 3 * 3


@pytest.mark.parametrize("count", (None, 2, 3))
def test_moments(getkey, count):
    # The gradient of an example is its data.
    x = 3 + np.asarray(normal(getkey(), (11, 5)))
    fun = filter_micro_value_and_grad(
        lambda w, x: jnp.dot(w, x),
        microbatch_size=4,
        moments=True,
        num_real_microbatches=count,
    )
    _, gradient, statistics = fun(jnp.zeros(5), jax.device_put(x))
    x = x if count is None else x[: 4 * count]
    mean, variance, noise_scale = statistics.moments
    assert_same(gradient, np.mean(x, 0))
    assert_same(mean, np.mean(x, 0))
    assert_same(variance, np.var(x, 0, ddof=1))
    noise = np.sum(np.var(x, 0, ddof=1))
    signal = np.sum(np.mean(x, 0) ** 2) - noise / len(x)
    assert_same(noise_scale, noise / signal)


def test_noise_scale_is_that_of_the_distribution():
    # Gradients with mean 1 and variance 4 in each of 50 entries.
    x = jax.device_put(1 + 2 * np.asarray(normal(jr.key(0), (20_000, 50))))
    fun = filter_micro_grad(jnp.dot, microbatch_size=1000, moments=True)
    _, statistics = fun(jnp.zeros(50), x)
    assert abs(statistics.moments.noise_scale - 4) < 0.1


def test_settings_can_be_numbers_of_numpy(getkey):
    x = normal(getkey(), (4, 3))
    fun = lambda w, x: (jnp.dot(w, x), x)
    names = ("has_aux", "return_norms", "nan_safe", "moments")
    settings = dict.fromkeys(names, np.bool_(True)) | {"batched": np.bool_(False)}
    settings |= {"in_axes": (np.int64(0),), "clip_norm": 1.0}
    gradient, aux, statistics = filter_micro_grad(fun, **settings)(jnp.zeros(3), x)
    assert_same(aux, x)
    assert_same(statistics.norms, jnp.linalg.norm(x, axis=1))
    scales = np.minimum(1, 1 / statistics.norms)
    assert_same(gradient, np.mean(scales[:, None] * x, 0))


def test_early_stop(getkey):
    model, x, y = data(getkey(), 7)
    grads, values = each(model, x, y), values_of(model, x, y)
    scale = np.minimum(1, 0.5 / norms_of(grads))
    for number in (2, *jax.device_put([*map(np.array, range(4))])):
        fun = filter_micro_value_and_grad(
            loss,
            microbatch_size=3,
            clip_norm=0.5,
            accumulator=Sum(),
            num_real_microbatches=number,
        )
        has_run = np.float32(np.arange(7) < 3 * int(number))
        expected = np.sum(values * has_run), combined(grads, scale * has_run)
        assert_same(fun(model, x, y), expected)


def test_inside_other_transforms(getkey):
    model, x, y = data(getkey(), 7)
    fun = filter_micro_grad(loss, microbatch_size=3, clip_norm=0.5)
    scales = np.array([1.0, 2.0], np.float32)
    run = jax.jit(jax.vmap(lambda scale: fun(model, x * scale, y)))
    many = jax.device_get(run(scales))
    for i, scale in enumerate(scales):
        one = jax.tree.map(lambda a, i=i: a[i], many)
        assert_same(one, fun(model, np.asarray(x) * scale, y))
    pair = [Model(getkey()) for _ in range(2)]
    stack = lambda *a: jax.device_put(np.stack(a)) if eqx.is_array(a[0]) else a[0]
    of_ensemble = eqx.filter_vmap(fun, in_axes=(eqx.if_array(0), None, None))
    many = jax.device_get(of_ensemble(jax.tree.map(stack, *pair), x, y))
    for i, model in enumerate(pair):
        first = lambda a, i=i: a[i] if isinstance(a, np.ndarray) else a
        assert_same(jax.tree.map(first, many), fun(model, x, y))


@pytest.mark.parametrize("clip_norm", variants((None, 0.5), None))
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

    got, expected = jax.jit(lambda x: [jax.grad(f)(x) for f in (through, truth)])(1.0)
    assert_same(got, expected, tol=1e-9)


def test_derivative_where_a_gradient_is_zero():
    # The gradient of an example is its data, here times a scale.
    x = jnp.array([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]])
    fun = filter_micro_grad(jnp.dot, clip_norm=1.0, microbatch_size=2)
    total = lambda scale: jnp.sum(fun(jnp.zeros(2), scale * x))
    # What is clipped does not change with the scale, so the last example is left.
    assert_same(jax.jit(jax.grad(total))(1.0), np.float32(0.7 / 3))


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
    y = jax.jit(jax.vmap(Model(jr.key(1))))(x)
    optimiser = optax.sgd(0.2)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    step = filter_micro_value_and_grad(loss, microbatch_size=8, clip_norm=5.0)
    first = None

    @eqx.filter_jit
    def moved(model, state):
        value, grads = step(model, x, y)
        updates, state = optimiser.update(grads, state)
        return value, eqx.apply_updates(model, updates), state

    for _ in range(100):
        value, model, state = moved(model, state)
        first = value if first is None else first
    assert value < 0.1 * first
    assert model.count.dtype == jnp.int32
    assert model.name == "model"


def test_accumulators_of_optax(getkey):
    model, x, y = data(getkey(), 7)
    kind = optax.microbatching.AccumulationType.SUM
    fun = filter_micro_value_and_grad(loss, microbatch_size=2, accumulator=kind)
    # As `micro_grad` of optax returns it: the values of all examples.
    values = filter_micro_value_and_grad(
        loss, microbatch_size=2, accumulator=kind, value_accumulator=Concat()
    )
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    theirs = jax.jit(
        optax.microbatching.micro_grad(
            lambda arrays, x, y: loss(eqx.combine(arrays, static), x, y),
            batch_argnums=(1, 2),
            keep_batch_dim=False,
        )
    )
    expected, aux = theirs(arrays, x, y)
    assert_same(values(model, x, y), (aux.values, expected))
    assert_same(fun(model, x, y), (np.sum(aux.values), expected))


@pytest.mark.cpu
@pytest.mark.parametrize("options", spread(({"clip_norm": 1.0}, {}), 1))
def test_memory_is_flat_in_the_number_of_examples(getkey, options):
    arrays, fun = program(mlp(getkey(), 1), 32, **options)
    sizes = [
        memory(
            fun, arrays, np.zeros((n, 8), "f4"), np.zeros((n, 4), "f4")
        ).temp_size_in_bytes
        for n in (128, 4096)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.cpu
def test_memory_budget(getkey):
    model = mlp(getkey(), 1)
    x, y = normal(getkey(), (2000, 8)), normal(getkey(), (2000, 4))
    budget = MemoryBudget("1MB")
    compiled = []
    for size in (budget, None):
        arrays, fun = program(model, size, clip_norm=1.0)
        compiled.append(jax.jit(fun).lower(arrays, x, y).compile())
    sizes = [fun.memory_analysis().temp_size_in_bytes for fun in compiled]
    assert sizes[0] < 1e6 < sizes[1]
    got, expected = (fun(arrays, x, y) for fun in compiled)
    assert_same(got, expected)


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
    "bound of NumPy": (
        loss,
        {"clip_norm": np.array(-1.0)},
        RuntimeError,
        "`clip_norm` must not be negative or NaN",
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
        "`clip_norm` must be at least 0; got -1.0",
    ),
    "nan": ({"clip_norm": (1.0, jnp.nan)}, ValueError, "at least 0; got nan"),
    "matrix of NumPy": (
        {"clip_norm": np.ones((2, 2))},
        ValueError,
        r"array of shape \(2, 2\)",
    ),
    "bool": ({"clip_norm": True}, TypeError, "got True of type bool"),
    "sites": (
        {"transform": jnp.sign, "method": "sites"},
        ValueError,
        "does not materialise per-example gradients, but `transform`",
    ),
    "batched": (
        {"batched": True, "clip_norm": 1.0},
        ValueError,
        "`clip_norm, scale, nan_safe or return_norms` is about single examples",
    ),
    "batched metrics": (
        {"batched": True, "metrics": jnp.sum},
        ValueError,
        "`metrics` is about single examples",
    ),
    "coupled": (
        {"axis_name": "batch", "nan_safe": True},
        ValueError,
        "is about single examples, but `axis_name` couples those of a microbatch",
    ),
    "coupled metrics": (
        {"axis_name": "batch", "metrics": jnp.sum},
        ValueError,
        "`metrics` is about single examples, but `axis_name`",
    ),
    "coupled batched": (
        {"axis_name": "batch", "batched": True, "accumulator": Mean()},
        ValueError,
        "`axis_name` is for the loss of one example, but with `batched=True`",
    ),
    "accumulator": ({"accumulator": Concat()}, TypeError, "must be a Sum or a Mean"),
    "no accumulator": (
        {"accumulator": "mean"},
        TypeError,
        "Unknown accumulator 'mean'",
    ),
    "weighted moments": (
        {"moments": True, "accumulator": Mean(weights=jnp.ones(3))},
        ValueError,
        "`moments` are those of unweighted examples",
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
    with pytest.raises(TypeError, match="`metrics` must be Callable"):
        filter_micro_grad(loss, metrics=3)
    with pytest.raises(TypeError, match="`fun` must be callable"):
        filter_micro_grad(3)


def test_nothing_to_differentiate(getkey):
    _, x, y = data(getkey(), 5)
    with pytest.raises(ValueError, match="no arrays of an inexact dtype"):
        filter_micro_grad(loss)(jnp.arange(3), x, y)
    with pytest.raises(TypeError, match="required positional argument: 'model'"):
        filter_micro_grad(loss)(model=Model(getkey()), x=x, y=y)
    with pytest.raises(ValueError, match="Nothing is batched"):
        filter_micro_grad(loss, in_axes=None)(Model(getkey()), x[0], y[0])


def test_aux_that_differs_between_microbatches(getkey):
    model, x, y = data(getkey(), 5)
    differs = lambda model, x, y: (jnp.mean(jax.vmap(model)(x)), [x] * len(x))
    fun = filter_micro_grad(
        differs, batched=True, has_aux=True, microbatch_size=2, accumulator=Mean()
    )
    with pytest.raises(ValueError, match="for every microbatch"):
        fun(model, x, y)


def test_infinite_derivatives_of_examples_of_two_microbatches_stay_infinite(x64):
    loss = lambda w, x: (w + x) ** 1.5
    w, x = jnp.array(0.0), jnp.arange(7.0).at[4].set(0)
    for size in (2, 3, 5):
        blocked = {"in_axes": 0, "accumulator": Sum(), "microbatch_size": size}
        hessian = eqxbatch.filter_hessian(loss, **blocked)(w, x)
        assert jax.tree.leaves(hessian) == [jnp.inf], size
    root = lambda w, x: jnp.sqrt(w + x)
    for size, weights in ((3, None), (3, jnp.ones(7)), (5, None)):
        gradient = filter_micro_grad(
            root, accumulator=Sum(weights=weights), microbatch_size=size
        )(w, x)
        assert gradient == jnp.inf, size
