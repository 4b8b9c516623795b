"""Kernels all at once, for which CPUs take a few large examples after the other."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqxbatch import EmpiricalKernel, EmpiricalNTK
from eqxbatch._ntk import example_factors
from ..helpers import drawn, make_mesh, normal, spread
from .models import cast, float64, jacobians, outputs


ntk_of = functools.partial(EmpiricalNTK, method="sites")


class Net(eqx.Module):
    """Small weights at many positions, a parameter alone, and dropout."""

    conv: eqx.nn.Conv2d
    last: eqx.nn.Linear
    shift: jax.Array
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jr.split(key)
        self.conv = eqx.nn.Conv2d(1, 2, 3, padding=1, key=keys[0])
        self.last = eqx.nn.Linear(2, 3, key=keys[1])
        self.shift = jnp.ones(3)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        x = jnp.tanh(self.conv(x.reshape(1, 10, 10)))
        if key is not None:
            x = self.dropout(x, key=key)
        return self.last(jnp.mean(x, axis=(1, 2))) + self.shift


def make(key):
    return drawn(Net, key=key)


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of examples that are taken in turn, where no example is small."""
    found = []
    accumulated = example_factors.accumulated

    def counted(run, rows, size, accumulator):
        if size == example_factors._AT_A_TIME < rows.total:
            found.append(rows.total)
        return accumulated(run, rows, size, accumulator)

    monkeypatch.setattr(example_factors, "accumulated", counted)
    monkeypatch.setattr(example_factors, "_CACHE", 1_000)
    return found


@float64
@pytest.mark.parametrize("num", spread((5, 8), 1))
def test_kernels(num, sizes, getkey):
    model = cast(make(getkey()))
    x, y = (normal(getkey(), (n, 100), jnp.float64) for n in (num, 3))
    # Both sides at once, in one program.
    both_sides = jnp.asarray(np.concatenate([x, y]))
    jac = np.asarray(jacobians(model, both_sides))
    j, k = jac[:num], jac[num:]
    full = ntk_of(model, trace_axes=())
    np.testing.assert_allclose(full(x, y), np.einsum("aip,bjp->abij", j, k), atol=1e-12)
    expected = np.einsum("aip,bip->ab", j, j) / 3
    both = EmpiricalKernel(model, method="sites")(x)
    np.testing.assert_allclose(both.ntk, expected, atol=1e-12)
    np.testing.assert_array_equal(both.ntk, both.ntk.T)
    outs = np.asarray(outputs(model, both_sides))[:num]
    np.testing.assert_allclose(both.nngp, outs @ outs.T / 3, atol=1e-12)
    diagonal = ntk_of(model).diagonal(x)
    np.testing.assert_allclose(diagonal, np.diag(expected), atol=1e-12)
    assert {*sizes} == {num}
    # Blocks have a size of their own, and a few examples are taken at once.
    sizes.clear()
    eqx.filter_eval_shape(ntk_of(model, block_size=3), x)
    eqx.filter_eval_shape(ntk_of(model), x[:4])
    assert not sizes


@float64
def test_derivatives_and_maps(sizes, getkey):
    x = normal(getkey(), (5, 100), jnp.float64)
    models = [cast(make(getkey())) for _ in range(2)]
    total = lambda model, x: jnp.sum(jnp.sin(ntk_of(model)(x)))
    in_blocks = lambda model, x: jnp.sum(jnp.sin(ntk_of(model, block_size=5)(x)))
    both = lambda f: eqx.filter_jit(eqx.filter_value_and_grad(f))
    in_blocks = both(in_blocks)
    expected = [jax.tree.leaves(in_blocks(model, x)) for model in models]
    sizes.clear()
    stacked = jax.tree.map(
        lambda *xs: jnp.asarray(np.stack(xs)) if eqx.is_array(xs[0]) else xs[0], *models
    )
    mapped = eqx.filter_vmap(both(total), in_axes=(eqx.if_array(0), None))
    found = jax.tree.leaves(mapped(stacked, x))
    for got, *leaves in zip(found, *expected, strict=True):
        np.testing.assert_allclose(got, leaves, atol=1e-12)
    assert sizes


def test_keys_are_left_alone(sizes, getkey):
    model, x, key = make(getkey()), normal(getkey(), (5, 100)), getkey()
    expected = ntk_of(model, block_size=5)(x, key=key)
    # A key that is an array of integers.
    raw = jr.key_data(key)
    np.testing.assert_allclose(ntk_of(model)(x, key=raw), expected, rtol=1e-5)
    assert sizes


@pytest.mark.devices
@pytest.mark.parametrize("kind", spread((AxisType.Explicit, AxisType.Auto), 1))
def test_on_a_mesh(kind, sizes, getkey):
    num, mesh = 2, make_mesh(kind, (2,))
    model, x = make(getkey()), normal(getkey(), (12, 100))
    expected = ntk_of(model, block_size=12)(x)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_allclose(ntk_of(model)(spread), expected, rtol=1e-5)

    arrays, static = eqx.partition(model, eqx.is_array)
    local = lambda arrays, x: ntk_of(eqx.combine(arrays, static))(x)
    spec = PartitionSpec("data")
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec
    )
    found = jax.jit(run)(arrays, spread)
    for i in range(num):
        part = slice(12 // num * i, 12 // num * (i + 1))
        np.testing.assert_allclose(
            np.asarray(found)[part], expected[part, part], rtol=1e-5
        )
