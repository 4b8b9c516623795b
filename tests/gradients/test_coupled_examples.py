"""Gradients of models whose layers couple the examples of a microbatch."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqxbatch import (
    filter_hessian,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    Mean,
    Sum,
)
from ..helpers import assert_same, KINDS, make_mesh, normal, spread


class Normed(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        # A bias before the normalisation would have no gradient.
        self.first = eqx.nn.Linear(3, 4, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.3)
        self.last = eqx.nn.Linear(4, "scalar", key=key)

    def __call__(self, x, state, key=None):
        hidden, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jnp.tanh(hidden), key=key)), state


def loss(model, state, x, y, key):
    out, state = model(x, state, key)
    return (out - y) ** 2, state


def with_outputs(model, state, x, y, key):
    out, state = model(x, state, key)
    return (out - y) ** 2, {"state": state, "out": out, "text": "text"}


NUM, SIZE = 10, 4
EVEN = np.full(NUM, 1 / NUM, np.float32)


@pytest.fixture
def call():
    model, state = eqx.nn.make_with_state(Normed)(jr.key(0))
    x, y = (np.asarray(normal(jr.key(i), s)) for i, s in ((1, (NUM, 3)), (2, (NUM,))))
    return model, state, x, y, jr.split(jr.key(3), NUM)


@eqx.filter_jit
@functools.partial(eqx.filter_value_and_grad, has_aux=True)
def of_microbatch(model, state, weights, x, y, key):
    axes = (None, None, 0, 0, 0), (0, None)
    values, state = jax.vmap(loss, *axes, axis_name="batch")(model, state, x, y, key)
    return jnp.sum(weights * values), (values, state)


def expected(weights, model, state, *rows):
    """Sums over the microbatches: values, their sum, merged state, and gradient."""
    found = [
        of_microbatch(model, state, *(x[i : i + SIZE] for x in (weights, *rows)))
        for i in range(0, NUM, SIZE)
    ]
    found = jax.device_get(found)
    add = lambda *xs: sum(xs[1:], xs[0])
    total, gradient = (
        jax.tree.map(add, *parts)
        for parts in zip(*((v, g) for (v, _), g in found), strict=True)
    )
    states = [state for (_, (_, state)), _ in found]
    shares = np.asarray([4, 4, 2], np.float32) / NUM
    merged = jax.tree.map(
        lambda *xs: (
            sum(x * s for x, s in zip(xs, shares, strict=True))
            if eqx.is_inexact_array(xs[0])
            else xs[-1]
        ),
        *states,
    )
    return total, merged, gradient


def same(got, wanted):
    leaves = zip(*map(jax.tree.leaves, (got, wanted)), strict=True)
    for x, y in leaves:
        assert_same(x, y)


@pytest.mark.quick
def test_one_setting(call):
    value_and_grad = filter_micro_value_and_grad(
        loss, axis_name="batch", microbatch_size=SIZE
    )
    (value, state), gradient = value_and_grad(*call)
    same((value, state, gradient), expected(EVEN, *call))
    assert jax.tree.structure(state) == jax.tree.structure(call[1])
    # Other sums over the examples, and what is returned for each of them.
    weights = np.arange(1, NUM + 1, dtype=np.float32)
    gradient, aux = filter_micro_grad(
        with_outputs,
        axis_name="batch",
        has_aux=True,
        microbatch_size=SIZE,
        accumulator=Sum(weights=weights),
    )(*call)
    same((aux["state"], gradient), expected(weights, *call)[1:])
    assert aux["out"].shape == (NUM,)
    assert aux["text"] == "text"
    # One line at inference.
    model, _, x, *_ = call
    inference = eqx.nn.inference_mode(model)
    axes = {"in_axes": (0, None), "out_axes": (0, None)}
    out, after = filter_micro_vmap(inference, **axes, microbatch_size=3)(x, state)
    one_by_one = jax.jit(lambda rows: [inference(row, state)[0] for row in rows])
    assert_same(np.asarray(out)[:3], np.stack(one_by_one([*x[:3]])))
    same(after, state)


def test_running_means_and_other_arguments(call):
    """A state by name, and a mean without sums."""
    model, state, *rows = call
    run = filter_micro_value_and_grad(
        lambda model, *rows, state: loss(model, state, *rows),
        axis_name="batch",
        microbatch_size=SIZE,
        accumulator=Mean(running=True),
    )
    (value, merged), gradient = run(model, *rows, state=state)
    same((value, merged, gradient), expected(EVEN, *call))
    # A loss without a state.
    only = filter_micro_grad(
        lambda *args: loss(*args)[0], axis_name="batch", microbatch_size=SIZE
    )
    same(only(*call), gradient)


@pytest.mark.devices
@pytest.mark.parametrize("kind", spread(KINDS, 1))
def test_on_meshes(call, kind):
    """All devices share each microbatch."""
    model, state, *rows = call
    rows = [x[:8] for x in rows]
    run = filter_micro_grad(
        with_outputs, axis_name="batch", has_aux=True, microbatch_size=8
    )
    wanted = eqx.filter(run(model, state, *rows), eqx.is_array)
    mesh = make_mesh(kind, names=("i",))
    placed = jax.device_put(rows, NamedSharding(mesh, P("i")))
    got = run(model, state, *placed)
    same(jax.device_get(eqx.filter(got, eqx.is_array)), wanted)


def test_hints(call):
    axes = (None, 0, 0, 0)
    for transform in (filter_micro_grad, filter_hessian):
        with pytest.raises(NameError, match="unbound axis name") as found:
            transform(loss, in_axes=axes, has_aux=True)(*call)
        assert "`filter_micro_grad` as `axis_name`" in found.value.__notes__[0]

    def differs(model, state, x, y, key):
        value, state = loss(model, state, x, y, key)
        return value, state.set(model.norm.batch_state_index, (model.first(x),) * 2)

    with pytest.raises(ValueError, match="out_axes is None") as found:
        filter_micro_grad(differs, axis_name="batch")(*call)
    assert "differs between examples" in found.value.__notes__[0]
