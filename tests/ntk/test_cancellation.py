"""Kernels of differences, whose Jacobians are sums of terms that nearly cancel."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqxbatch import EmpiricalNTK, filter_micro_value_and_grad
from eqxbatch._base import platforms
from eqxbatch._sites import cancel
from ..conftest import enable_x64
from ..helpers import assert_same, drawn, make_mesh, spread, variants
from .models import cast, jacobians


class Difference(eqx.Module):
    """One use of each layer at two positions; the last bias has no gradient at all."""

    net: eqx.nn.MLP

    def __call__(self, x):
        first, second = jax.vmap(self.net)(x)
        return first - second


MLP = drawn(eqx.nn.MLP, 3, 2, 24, 1, activation=jnp.tanh, key=jr.key(0))
MODEL = Difference(MLP)


def pairs(num, distance, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 1, 3)) + distance * rng.normal(size=(num, 2, 3))
    return x.astype(np.float32)


def kernel(model, x1, x2=None, **settings):
    return EmpiricalNTK(model, method="sites", **settings)(x1, x2)


def dense(jac1, jac2):
    return np.tensordot(jac1, jac2, ((1, 2), (1, 2))) / 2


@pytest.mark.parametrize("mapped", spread((False, True), 1))
def test_blocks_diagonals_and_maps_whose_terms_cancel(mapped):
    with enable_x64():
        model = cast(MODEL)
        x1, x2 = (
            pairs(n, 1e-3, seed).astype(np.float64) for seed, n in enumerate((5, 4))
        )
        # The terms of one of the models' examples cancel, those of the other do not.
        far = pairs(5, 1.0).astype(np.float64)
        jac = np.asarray(jacobians(model, np.concatenate([x1, x2, far])))
        jac1, jac2, jac_far = np.split(jac, (5, 9))
        square = dense(jac1, jac1)
        close = {"rtol": 1e-9, "atol": 1e-10 * np.max(np.abs(square))}
        if mapped:
            several = jnp.asarray(np.stack([x1, far]))
            found = np.asarray(jax.vmap(lambda x: kernel(model, x, x2))(several))
            for got, jac in zip(found, (jac1, jac_far), strict=True):
                np.testing.assert_allclose(got, dense(jac, jac2), **close)
            return
        found = kernel(model, x1, block_size=2)
        np.testing.assert_allclose(found, square, **close)
        np.testing.assert_allclose(
            EmpiricalNTK(model, method="sites").diagonal(x1),
            np.diagonal(square),
            **close,
        )


KINDS_OF_MESH = (AxisType.Auto, AxisType.Explicit)
# Gradients are formed for one example of each device at a time.
ONE_BY_ONE = dataclasses.replace(platforms.CPU, block_bytes=1)


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS_OF_MESH)
@pytest.mark.parametrize(("num", "platform"), ((8, platforms.CPU), (12, ONE_BY_ONE)))
def test_examples_on_a_mesh_whose_terms_cancel(num, platform, kind):
    with enable_x64(), platforms.for_platform(platform):
        model, x = cast(MODEL), jnp.asarray(pairs(num, 1e-3), jnp.float64)
        jac = np.asarray(jacobians(model, x))
        expected = dense(jac, jac)
        mesh = make_mesh(kind, names=("r",))
        spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("r")))
        close = {"rtol": 1e-9, "atol": 1e-10 * np.max(np.abs(expected))}
        np.testing.assert_allclose(kernel(model, spread), expected, **close)
        own = jax.shard_map(
            lambda x1: kernel(model, x1, x),
            mesh=mesh,
            in_specs=PartitionSpec("r"),
            out_specs=PartitionSpec("r"),
        )
        np.testing.assert_allclose(jax.jit(own)(spread), expected, **close)


def loss(model, x):
    return jnp.sum(jnp.array([1.0, -2.0]) * model(x))


def clipped(model, x, bound):
    settings = {"moments": True, "return_norms": True, "method": "sites"}
    clip = filter_micro_value_and_grad(
        loss, microbatch_size=12, clip_norm=bound, **settings
    )
    return eqx.filter_jit(clip)(model, x)


@pytest.mark.devices
@pytest.mark.parametrize("kind", variants(KINDS_OF_MESH, AxisType.Auto))
def test_gradients_on_a_mesh_that_are_formed_in_steps(kind):
    """Norms, clipped gradients and squared distances, of which each step has a part."""
    with enable_x64():
        model, x = cast(MODEL), jnp.asarray(pairs(12, 1e-6), jnp.float64)
        of_each = eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(None, 0))
        formed = eqx.filter_jit(of_each)(model, x)
        rows = [np.asarray(x).reshape(12, -1) for x in jax.tree.leaves(formed)]
        norms = np.linalg.norm(np.concatenate(rows, axis=1), axis=1)
        bound = float(np.median(norms))
        expected = clipped(model, x, bound)
        mesh = make_mesh(kind, names=("r",))
        spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("r")))
        with platforms.for_platform(ONE_BY_ONE):
            found = clipped(model, spread, bound)
        np.testing.assert_allclose(found[2].norms, norms, rtol=1e-8)
        assert_same(jax.device_get(found), jax.device_get(expected), tol=1e-8)


def test_jacobians_are_formed_only_where_the_kernel_cancels(monkeypatch):
    # The bias of the last layer has a Jacobian of zero in any case.
    formed = cancel._for_each_formed
    is_nan = lambda *args: [jnp.full_like(x, jnp.nan) for x in formed(*args)]
    monkeypatch.setattr(cancel, "_for_each_formed", is_nan)
    far, near = (kernel(MODEL, jnp.asarray(pairs(6, d))) for d in (1.0, 1e-3))
    assert np.all(np.isfinite(far))
    assert np.any(np.isnan(near))
