"""Examples that a named axis couples: microbatches are those of one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import eqxbatch
from eqxbatch import Concat, Mean, Sum
from ..helpers import assert_same, KINDS, make_mesh, normal, put, thinned, variants


pytestmark = pytest.mark.devices

TOTAL = 40
X = (
    normal(jax.random.key(0), (TOTAL, 3))
    * np.linspace(0.5, 2, TOTAL, dtype="f4")[:, None]
)
W = normal(jax.random.key(1), (3, 2))
WEIGHTS = jnp.arange(1.0, TOTAL + 1)


def loss(w, x):
    """With batch normalisation, and what is known of an example."""
    out = x @ w
    mean = lax.pmean(out, "batch")
    out = (out - mean) / jnp.sqrt(lax.pmean((out - mean) ** 2, "batch") + 0.1)
    return jnp.sum(jnp.tanh(out) ** 3), (out**2, x[0])


def calls(w, x, size):
    """Gradients, values and what is joined, in all ways that see the rows."""
    grad = lambda **more: eqxbatch.filter_micro_value_and_grad(
        loss, has_aux=True, axis_name="batch", microbatch_size=size, **more
    )
    mapped = lambda **more: eqxbatch.filter_micro_vmap(
        loss, in_axes=(None, 0), axis_name="batch", microbatch_size=size, **more
    )
    num = max(TOTAL // size - 1, 1)
    return {
        "gradient": grad()(w, x),
        "weights": grad(accumulator=Sum(WEIGHTS), value_accumulator=Mean(WEIGHTS))(
            w, x
        ),
        "some": grad(num_real_microbatches=num, aux_accumulator=Concat())(w, x),
        "map": mapped(out_axes=(0, (1, 0)))(w, x),
        "mean": mapped(accumulator=(Mean(WEIGHTS), Mean(running=True)))(w, x),
    }


# Sizes that devices divide, with and without a remainder, and others.
@pytest.mark.versions
@pytest.mark.parametrize(("kind", "size"), thinned(KINDS, (8, 16, 6, 5)))
def test_microbatches_are_those_of_one_device(kind, size):
    mesh, run = make_mesh(kind), eqx.filter_jit(calls)
    expected = jax.device_get(run(W, X, size))
    got = run(put(W, mesh), put(X, mesh, "data"), size)
    assert_same(jax.device_get(got), expected, tol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_maps(kind):
    """JAX 0.7 has none of coupled examples on explicit axes."""
    mapped = eqxbatch.filter_micro_vmap(
        loss, in_axes=(None, 0), axis_name="batch", microbatch_size=16
    )
    total = lambda w, x: jnp.sum(mapped(w, x)[1][0] ** 3)
    run, mesh = jax.jit(jax.grad(total, argnums=(0, 1))), make_mesh(kind)
    got = run(put(W, mesh), put(X, mesh, "data"))
    assert_same(jax.device_get(got), jax.device_get(run(W, X)), tol=1e-4)


@pytest.mark.versions
@pytest.mark.parametrize("kind", variants(KINDS, AxisType.Auto))
def test_other_meshes_and_axes(kind):
    """Rows along another axis; features that are spread, too; and none at all."""
    mesh = make_mesh(kind, (2, 2), ("data", "model"))
    centred = lambda x: x - lax.pmean(x, "batch")
    run = eqxbatch.filter_micro_vmap(
        centred, in_axes=1, out_axes=1, axis_name="batch", microbatch_size=8
    )
    x = normal(jax.random.key(2), (4, TOTAL))
    expected = jax.device_get(run(x))
    for spec in (("model", "data"), (None, ("data", "model")), ("data", None)):
        assert_same(jax.device_get(run(put(x, mesh, *spec))), expected, tol=1e-5)
    assert run(put(x[:, :0], mesh)).shape == (4, 0)


@pytest.mark.cpu
def test_no_device_gets_all_rows():
    mesh = make_mesh(AxisType.Auto)
    x, w = put(normal(jax.random.key(3), (1024, 64)), mesh, "data"), put(W, mesh)
    wide = lambda w, x: loss(w, x[:3])[0]

    def temporaries(size):
        grad = eqxbatch.filter_micro_grad(wide, axis_name="batch", microbatch_size=size)
        compiled = jax.jit(lambda w, x: grad(w, x)).lower(w, x).compile()
        assert " all-gather(" not in compiled.as_text()
        return compiled.memory_analysis().temp_size_in_bytes

    # Two copies of a share, on their way.
    assert temporaries(64) < 3 * x.nbytes / 4


def test_states_and_batch_normalisation():
    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
            self.linear = eqx.nn.Linear(3, 2, key=key)

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return jnp.sum(jnp.tanh(self.linear(x)) ** 3), state

    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    grad = eqxbatch.filter_micro_value_and_grad(
        lambda net, state, x: net(x, state), axis_name="batch", microbatch_size=8
    )
    plain = eqxbatch.filter_micro_grad(lambda net, state, x: net(x, state)[0])
    with pytest.raises(ValueError, match="`axis_name` of the layers that update it"):
        plain(net, state, X)
    mesh = make_mesh(AxisType.Auto)
    arrays, static = eqx.partition((net, state), eqx.is_array)
    there = eqx.combine(jax.tree.map(lambda x: put(x, mesh), arrays), static)
    leaves = lambda out: jax.device_get(jax.tree.leaves(eqx.filter(out, eqx.is_array)))
    got = grad(*there, put(X, mesh, "data"))
    assert_same(leaves(got), leaves(grad(net, state, X)), tol=1e-4)
