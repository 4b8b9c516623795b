"""`where` and `filter_spec`: gradients in some of the parameters only."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqxbatch import (
    filter_ggn,
    filter_hessian,
    filter_hvp,
    filter_jacobian,
    filter_micro_grad,
    filter_micro_value_and_grad,
    Mean,
    parameters,
    Sum,
)
from ..helpers import assert_same, KINDS, make_mesh, memory, put, spread, variants
from .models import combined, data, loss, METHODS, norms_of, values_of


def has_one_axis(x):
    return eqx.is_inexact_array(x) and x.ndim == 1


# What selects them, and what of the model that is.
SELECTIONS = {
    "where": (
        {"where": lambda model: (model.linear, model.count)},
        lambda model: (model.linear.weight, model.linear.bias),
    ),
    "filter_spec": (
        {"filter_spec": has_one_axis},
        lambda model: (model.linear.bias, model.scale, model.unused),
    ),
    "both": (
        {"where": lambda model: model.linear, "filter_spec": has_one_axis},
        lambda model: (model.linear.bias,),
    ),
}


def gradients(model, x, y, parts):
    """Those of each example in some parts, with None for all else: the truth."""
    spec = eqx.tree_at(
        parts, jax.tree.map(lambda _: False, model), [True] * len(parts(model))
    )
    selected, rest = eqx.partition(model, spec)
    of_one = jax.grad(lambda selected, x, y: loss(eqx.combine(selected, rest), x, y))
    return jax.device_get(jax.jit(jax.vmap(of_one, (None, 0, 0)))(selected, x, y))


@pytest.mark.quick
@pytest.mark.parametrize("name", SELECTIONS)
def test_gradients_of_a_selection(getkey, name):
    model, x, y = data(getkey(), 7)
    settings, parts = SELECTIONS[name]
    value, gradient = filter_micro_value_and_grad(loss, microbatch_size=3, **settings)(
        model, x, y
    )
    assert_same(value, np.mean(values_of(model, x, y)))
    each = gradients(model, x, y, parts)
    assert_same(gradient, jax.tree.map(lambda g: np.mean(g, 0), each))
    assert len(jax.tree.leaves(gradient)) == len(parts(model))
    # What an optimiser begins with has the structure of the gradient.
    selected = parameters(model, **settings)
    assert jax.tree.structure(selected) == jax.tree.structure(gradient)
    same = zip(jax.tree.leaves(selected), parts(model), strict=True)
    assert all(x is y for x, y in same)


@pytest.mark.parametrize("method", variants(METHODS, "auto", "materialise"))
def test_norms_are_those_of_the_selection(getkey, method):
    model, x, y = data(getkey(), 7)
    settings, parts = SELECTIONS["where"]
    each = gradients(model, x, y, parts)
    norms = norms_of(each)
    bound = float(np.median(norms))
    weights = jnp.arange(7.0)
    fun = filter_micro_grad(
        loss,
        microbatch_size=3,
        clip_norm=bound,
        return_norms=True,
        method=method,
        accumulator=Sum(weights=weights),
        **settings,
    )
    gradient, statistics = fun(model, x, y)
    assert_same(statistics.norms, norms)
    assert_same(gradient, combined(each, weights * np.minimum(1, bound / norms)))


def test_bounds_of_parts_of_a_selection(getkey):
    model, x, y = data(getkey(), 5)
    settings, parts = SELECTIONS["filter_spec"]
    each = gradients(model, x, y, parts)
    # A bound for what is constant has nothing to clip.
    bounds = eqx.tree_at(
        lambda m: (m.linear.weight, m.linear.bias, m.scale, m.unused),
        eqx.filter(model, eqx.is_inexact_array),
        (0.1, 0.2, None, 0.3),
    )
    fun = filter_micro_grad(
        loss, microbatch_size=2, clip_norm=bounds, return_norms=True, **settings
    )
    gradient, statistics = fun(model, x, y)
    norms = norms_of(each.linear)
    assert_same(statistics.norms.linear.bias, norms)
    assert_same(statistics.norms.linear.weight, jnp.zeros(5))
    scale = np.minimum(1, 0.2 / norms) / 5
    assert_same(gradient.linear.bias, combined(each.linear.bias, scale))
    assert_same(gradient.scale, np.mean(each.scale, 0))
    assert gradient.linear.weight is None


def test_functions_of_the_gradients_of_a_selection(getkey):
    model, x, y = data(getkey(), 7)
    settings, parts = SELECTIONS["both"]
    each = gradients(model, x, y, parts)
    norms = norms_of(each)
    fun = filter_micro_grad(
        loss,
        microbatch_size=3,
        transform=lambda g: jax.tree.map(lambda x: 2 * x, g),
        metrics=optax.tree.norm,
        moments=True,
        clip_norm=0.5,
        return_norms=True,
        nan_safe=True,
        **settings,
    )
    gradient, statistics = fun(model, x, y)
    doubled = jax.tree.map(lambda g: 2 * g, each)
    assert_same(gradient, combined(doubled, np.minimum(1, 0.25 / norms) / 7))
    assert_same(statistics.norms, 2 * norms)
    assert_same(statistics.metrics, norms)
    assert_same(statistics.moments.mean, jax.tree.map(lambda g: np.mean(g, 0), each))
    variance = jax.tree.map(lambda g: np.var(g, 0, ddof=1), each)
    assert_same(statistics.moments.variance, variance)


def test_batched_methods_in_a_jit(getkey):
    model, x, y = data(getkey(), 7)
    settings, parts = SELECTIONS["where"]

    class Task(eqx.Module):
        model: eqx.Module

        @filter_micro_grad(
            batched=True,
            has_aux=True,
            microbatch_size=3,
            accumulator=Mean(),
            where=lambda self: settings["where"](self.model),
        )
        def gradient(self, x, y):
            outs = jax.vmap(self.model)(x)
            return jnp.mean(jnp.sum((outs - y) ** 2, 1)), outs

    gradient, outs = eqx.filter_jit(Task.gradient)(Task(model), x, y)
    each = gradients(model, x, y, parts)
    assert_same(gradient.model, jax.tree.map(lambda g: np.mean(g, 0), each))
    assert_same(outs, jax.vmap(model)(x))
    assert_same(Task(model).gradient(x, y)[0], gradient)


@pytest.mark.devices
@pytest.mark.parametrize("kind", spread(KINDS, 1))
def test_selections_on_a_mesh(getkey, kind):
    model, x, y = data(getkey(), 8)
    settings, parts = SELECTIONS["where"]
    fun = filter_micro_grad(loss, microbatch_size=4, clip_norm=0.5, **settings)
    each = gradients(model, x, y, parts)
    expected = combined(each, np.minimum(1, 0.5 / norms_of(each)) / 8)
    mesh = make_mesh(kind)
    placed = jax.tree.map(lambda x: put(x, mesh) if eqx.is_array(x) else x, model)
    xs, ys = put(x, mesh, "data"), put(y, mesh, "data")
    for start in (model, placed):
        assert_same(jax.device_get(fun(start, xs, ys)), jax.device_get(expected))
    if kind == AxisType.Explicit:
        return
    local = filter_micro_grad(loss, accumulator=Sum(), **settings)
    mapped = jax.shard_map(
        functools.partial(local, model),
        mesh=mesh,
        in_specs=(P("data"), P("data")),
        out_specs=P(),
    )
    total = jax.tree.map(lambda g: np.sum(g, 0), each)
    assert_same(jax.device_get(jax.jit(mapped)(xs, ys)), jax.device_get(total))


@pytest.mark.cpu
@pytest.mark.parametrize(
    "options", ({}, {"clip_norm": 1.0, "method": "materialise"}, {"moments": True})
)
def test_what_is_constant_has_no_gradient_in_memory(options):
    size, num = 256, 4

    def run(model, x, **selected):
        fun = filter_micro_grad(
            lambda model, x: jnp.sum(
                jnp.sin(jnp.sin(x @ model["body"]) @ model["head"])
            ),
            microbatch_size=num,
            **options,
            **selected,
        )
        return fun(model, x)

    ones = lambda *shape: jax.device_put(np.ones(shape, np.float32))
    model = {"body": ones(size, size), "head": ones(size, 1)}
    x = ones(5 * num, size)
    head = functools.partial(run, where=lambda model: model["head"])

    def used(fun):
        stats = memory(fun, model, x)
        return stats.temp_size_in_bytes + stats.output_size_in_bytes

    assert used(head) < model["body"].nbytes / 2
    if not options:
        assert used(run) > model["body"].nbytes


def test_wrong_selections(getkey):
    model, x, y = data(getkey(), 5)
    make = functools.partial(filter_micro_grad, loss, microbatch_size=2)
    with pytest.raises(ValueError, match="`where` and `filter_spec` leave no param"):
        make(where=lambda model: model.count)(model, x, y)
    with pytest.raises(ValueError, match="`where` and `filter_spec` leave no param"):
        make(filter_spec=False)(model, x, y)
    for where in (
        lambda model: 1.0,
        lambda model: [model.scale] if model.scale.ndim == 2 else [],
        lambda model: model.scale[0],
    ):
        with pytest.raises(ValueError, match="`where` must return parts of the model"):
            make(where=where)(model, x, y)
    for spec in (lambda x: None, lambda x: (False,), lambda x: [True, x.ndim == 1]):
        with pytest.raises(ValueError, match="`filter_spec` must be as for"):
            make(filter_spec=spec)(model, x, y)
    with pytest.raises(AttributeError, match="no attribute 'scales'"):
        make(where=lambda model: model.scales)(model, x, y)
    with pytest.raises(ValueError, match="`clip_norm` must be a number or a PyTree"):
        make(where=lambda m: m.scale, clip_norm={"scale": 1.0})(model, x, y)


def test_one_step_of_an_optimiser(getkey):
    model, x, y = data(getkey(), 5)
    spec = jax.tree.map(has_one_axis, model)
    optimiser = optax.sgd(0.1, momentum=0.9)
    state = optimiser.init(parameters(model, filter_spec=spec))
    gradient = filter_micro_grad(loss, filter_spec=spec)(model, x, y)
    updates, _ = optimiser.update(gradient, state)
    trained = eqx.apply_updates(model, updates)
    np.testing.assert_array_equal(trained.linear.weight, model.linear.weight)
    assert not np.array_equal(trained.linear.bias, model.linear.bias)


def test_numbers_of_python_in_place_of_parameters():
    """A matrix without their rows looks like that of fewer parameters."""
    p = {"a": jnp.arange(2.0), "b": 0.5, "dropout": eqx.nn.Dropout(0.5), "power": 2}
    fun = lambda p: p["a"] ** p["power"] + p["b"]
    total = lambda p: jnp.sum(fun(p))
    match = r"Python numbers: 0.5 at \['b'\]\..*`jax.numpy.asarray`.* by `where`"
    mask = {**jax.tree.map(lambda _: False, p), "a": True}
    for run in (
        filter_jacobian(fun, flat=True),
        filter_jacobian(fun, where=lambda p: (p["a"], p["b"])),
        filter_jacobian(fun, filter_spec={**mask, "b": True}),
        filter_ggn(fun, lambda out: jnp.sum(out**2), in_axes=None, flat=True),
        filter_hessian(total, flat=True),
        lambda p: filter_hvp(total)(p, {**p, "b": 1.0}),
    ):
        with pytest.warns(UserWarning, match=match):
            run(p)
    # Left out on purpose; settings of modules and integers are no parameters.
    for settings in ({"where": lambda p: p["a"]}, {"filter_spec": mask}):
        matrix, _ = filter_jacobian(fun, flat=True, **settings)(p)
        assert matrix.shape == (2, 2)
    matrix, _ = filter_jacobian(fun, flat=True)({**p, "b": jnp.asarray(0.5)})
    assert matrix.shape == (2, 3)
    # In a gradient, there is None in its place.
    gradient = filter_micro_grad(lambda p, x: total(p) * x)(p, jnp.ones(3))
    assert gradient["b"] is None


class Layer(eqx.Module):
    """Stands for a layer of `flax.nnx`, which has settings of these names."""

    weight: jax.Array
    deterministic: bool = eqx.field(static=True, default=True)
    use_running_average: bool = eqx.field(static=True, default=True)
    rngs: object = eqx.field(static=True, default="own")


def test_layers_of_flax_that_change_themselves_are_warned_of():
    layers = {
        name: type(name, (Layer,), {"__module__": "flax.nnx.nn.layers"})
        for name in ("Dropout", "BatchNorm")
    }
    loss = lambda model, x: jnp.sum(model["layer"].weight * x)
    for name, settings, match in (
        ("Dropout", {"deterministic": False}, "same mask, .* call `model.eval"),
        ("BatchNorm", {"use_running_average": False}, "its new statistics are lost"),
        ("Dropout", {"deterministic": False, "rngs": None}, None),
        ("Dropout", {}, None),
        ("BatchNorm", {}, None),
    ):
        model = {"layer": layers[name](jnp.ones(2), **settings)}
        run = lambda model=model: filter_micro_grad(loss)(model, jnp.ones((3, 2)))
        if match is None:
            run()
        else:
            with pytest.warns(UserWarning, match=f"A `{name}` of .*{match}"):
                run()
