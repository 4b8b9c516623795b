"""Parameters that the devices of a mesh share, against those of one device."""

import functools
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqxbatch as eb
from benchmarks.collectives import Collectives
from . import on_cpu
from .conftest import enable_x64
from .flags import COMPILE_FAST
from .helpers import (
    assert_same,
    integers,
    KINDS,
    make_mesh,
    normal,
    put,
    thinned,
    variants,
)


# As many rows as there can be devices, and a remainder of as many.
TOTAL, LENGTH, SIZE = 24, 3, 16
# Of this process; `test_eight_devices` runs tests of this file in another one.
DEVICES = jax.device_count()
KEY = jax.random.key(0)


class Words(eqx.Module):
    """A table of words and two layers in two groups, and a sum over the words."""

    below: list
    above: list

    def __call__(self, tokens):
        (table, first), (bias, last) = self.below, self.above
        hidden = jnp.tanh(table[tokens] @ first + bias[None])
        return jnp.sum(jnp.sin(hidden @ last), axis=0)


SHAPES = Words([(16, 8), (8, 16)], [(16,), (16, 2)])
# By name: the axes of the mesh, and where each array is.
PLACES = {
    "fsdp": ({"data": DEVICES}, Words([P("data"), P("data")], [P("data"), P("data")])),
    "apart": (
        {"data": DEVICES // 2, "model": 2},
        Words([P("data"), P(None, "model")], [P("model"), P(("data", "model"))]),
    ),
}


def model_of(dtype):
    is_shape = lambda x: isinstance(x, tuple)
    draw = lambda shape: normal(KEY, shape, dtype)
    return jax.tree.map(draw, SHAPES, is_leaf=is_shape)


def examples():
    return integers(KEY, (TOTAL, LENGTH), 16)


def on_mesh(kind, place):
    axes, specs = PLACES[place]
    mesh = make_mesh(kind, (*axes.values(),), (*axes,))
    is_spec = lambda x: isinstance(x, P)
    return mesh, jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec
    )


def loss(model, tokens):
    return jnp.mean(jnp.tanh(model(tokens)) ** 2)


def of_outputs(out, tokens):
    return jnp.sum(jax.nn.softplus(out) ** 2)


def apply(model, tokens):
    return model(tokens)


def tangent(model):
    return jax.tree.map(jnp.sin, model)


grad = functools.partial(eb.filter_micro_value_and_grad, loss, microbatch_size=SIZE)


def gradients(model, tokens):
    """Accumulated; clipped in two groups; and all statistics of what is clipped."""
    clipped = grad(
        clip_norm=Words(0.3, 0.3),
        return_norms=True,
        moments=True,
        against=tangent(model),
        features=eb.Projection(4, jax.random.key(0)),
    )
    return {
        "accumulated": grad()(model, tokens),
        "clipped": clipped(model, tokens),
    }


def products(model, tokens):
    settings = {"in_axes": 0, "microbatch_size": SIZE}
    hvp = eb.filter_hvp(loss, **settings)
    ggnvp = eb.filter_ggnvp(apply, of_outputs, **settings)
    return [f(model, tangent(model), tokens) for f in (hvp, ggnvp)]


def kronecker(model, tokens, loss=of_outputs):
    kfac = eb.filter_kfac(apply, loss, in_axes=0, microbatch_size=SIZE)
    factors = kfac(model, tokens)
    step = eb.scale_by_kfac(factors, damping=0.1, norm_constraint=0.1)
    updates, _ = step.update(tangent(model), step.init(model), factors=factors)
    return eqx.filter((factors, updates), eqx.is_array)


def steps(model, tokens):
    step = functools.partial(eb.filter_gauss_newton_step, apply, damping=0.5)
    return [
        step(space="sample")(model, tokens),
        step(space="parameter", microbatch_size=SIZE)(model, tokens),
    ]


PROGRAMS = (gradients, products, kronecker, steps)


@functools.cache
def of_one_device(program):
    return jax.device_get(jax.jit(program)(model_of(jnp.float64), examples()))


@pytest.mark.devices
@pytest.mark.parametrize(
    ("program", "kind", "place"),
    thinned(PROGRAMS, (AxisType.Explicit, AxisType.Auto), tuple(PLACES)),
)
def test_equals_one_device(program, kind, place):
    with enable_x64():
        mesh, shardings = on_mesh(kind, place)
        model = jax.device_put(model_of(jnp.float64), shardings)
        got = jax.jit(program)(model, put(examples(), mesh, "data"))
        assert_same(jax.device_get(got), of_one_device(program), tol=1e-10)


@pytest.mark.matrix
def test_eight_devices():
    flags = f"--xla_force_host_platform_device_count=8 {COMPILE_FAST}"
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    command += [
        "-m",
        "devices",
        "-k",
        f"{test_equals_one_device.__name__} and gradients",
    ]
    environment = on_cpu.environment(flags) | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.devices
def test_norms_of_groups_on_different_devices():
    """Against the norms of gradients that are formed, in the dtype of the model."""
    model, tokens = model_of(jnp.float32), examples()
    formed = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(model, tokens)
    formed = [
        [np.asarray(x, np.float64).reshape(TOTAL, -1) for x in group]
        for group in (formed.below, formed.above)
    ]
    wanted = [np.linalg.norm(np.concatenate(x, axis=1), axis=1) for x in formed]
    bounds = [float(np.median(x)) for x in wanted]
    scales = [np.minimum(1, x / y) for x, y in zip(bounds, wanted, strict=True)]

    mesh, shardings = on_mesh(AxisType.Auto, "apart")
    clip = grad(clip_norm=Words(*bounds), return_norms=True)
    _, clipped, statistics = jax.jit(lambda *args: clip(*args))(
        jax.device_put(model, shardings), put(tokens, mesh, "data")
    )
    norms = statistics.norms
    for i, got in enumerate((norms.below, norms.above)):
        np.testing.assert_allclose(got, wanted[i], rtol=1e-5)
    for i, group in enumerate((clipped.below, clipped.above)):
        for got, one in zip(group, formed[i], strict=True):
            mean = np.mean(scales[i][:, None] * one, axis=0)
            np.testing.assert_allclose(got.ravel(), mean, rtol=1e-4, atol=1e-7)


@pytest.mark.devices
@pytest.mark.parametrize("kind", variants(KINDS, AxisType.Explicit))
def test_an_error_of_a_value_is_nan(kind):
    """One device would raise it, and the others wait for that one for ever."""
    mesh, shardings = on_mesh(kind, "fsdp")
    model = jax.device_put(model_of(jnp.float32), shardings)
    not_convex = lambda out, tokens: -of_outputs(out, tokens)
    run = jax.jit(functools.partial(kronecker, loss=not_convex))
    _, updates = jax.device_get(run(model, put(examples(), mesh, "data")))
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(updates))


# What is sent.


@pytest.mark.devices
def test_bytes_that_are_known():
    mesh, trips = make_mesh(AxisType.Auto), 3
    spread = NamedSharding(mesh, P("data"))

    def exchanges(x):
        total = lax.psum(x, "data")
        gathered = lax.all_gather(jnp.sin(x), "data", tiled=True)
        scattered = lax.psum_scatter(jnp.cos(gathered), "data", tiled=True)
        shifted = lax.ppermute(scattered, "data", [(i, (i + 1) % 4) for i in range(4)])
        return shifted + total

    def run(x):
        mapped = jax.shard_map(
            exchanges, mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
        return lax.fori_loop(0, trips, lambda _, x: mapped(x), x)

    x = jax.ShapeDtypeStruct((4 * 1000,), jnp.float32, sharding=spread)
    found = Collectives(jax.jit(run).lower(x).compile().as_text())
    share = 4 * 1000
    assert found.sent() == {
        "all-reduce": trips * 2 * share * 3 / 4,
        "all-gather": trips * share * 3,
        "reduce-scatter": trips * share * 3,
        "collective-permute": trips * share,
    }
    assert found.gathered() == [4 * share]


class Layers(eqx.Module):
    layers: list[jax.Array]

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(x @ layer)
        return x


def compiled(fun, mesh):
    """`fun` of layers and of 32 examples of 16 words, both spread over four devices."""
    struct = lambda *shape: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    model, x = Layers([struct(64, 64)] * 2), struct(32, 16, 64)
    shardings = jax.tree.map(lambda x: x.sharding, model)
    return jax.jit(fun, out_shardings=shardings).lower(model, x).compile()


@pytest.mark.devices
def test_clipping_sends_what_a_gradient_does():
    square = lambda model, x: jnp.mean(model(x) ** 2)
    mesh, settings = make_mesh(AxisType.Auto), {"microbatch_size": 16}
    ways = (
        eb.filter_micro_grad(square, **settings),
        eb.filter_micro_grad(square, clip_norm=0.5, method="sites", **settings),
    )
    plain, clipped = (compiled(lambda *args, way=way: way(*args), mesh) for way in ways)
    sent = [Collectives(x.as_text()) for x in (plain, clipped)]
    totals = [sum(x.sent().values()) for x in sent]
    assert 0 < totals[1] <= 1.2 * totals[0]
    # No array is gathered that an ordinary gradient leaves where it is.
    assert max(sent[1].gathered()) <= max(sent[0].gathered())
