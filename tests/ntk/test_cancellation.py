"""Kernels of differences, whose Jacobians are sums of terms that nearly cancel."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqxbatch import EmpiricalNTK
from eqxbatch._sites import cancel
from ..conftest import enable_x64
from ..helpers import drawn, make_mesh, spread
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


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_examples_on_a_mesh_whose_terms_cancel(kind):
    with enable_x64():
        model, x = cast(MODEL), jnp.asarray(pairs(8, 1e-3), jnp.float64)
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


def test_jacobians_are_formed_only_where_the_kernel_cancels(monkeypatch):
    # The bias of the last layer has a Jacobian of zero in any case.
    formed = cancel._for_each_formed
    is_nan = lambda *args: [jnp.full_like(x, jnp.nan) for x in formed(*args)]
    monkeypatch.setattr(cancel, "_for_each_formed", is_nan)
    far, near = (kernel(MODEL, jnp.asarray(pairs(6, d))) for d in (1.0, 1e-3))
    assert np.all(np.isfinite(far))
    assert np.any(np.isnan(near))
