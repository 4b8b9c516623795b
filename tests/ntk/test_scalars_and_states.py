"""Kernels of models that return scalars, and of models with a state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxbatch import (
    EmpiricalKernel,
    EmpiricalNNGP,
    EmpiricalNTK,
    HostStore,
    MonteCarloKernel,
    ProbedNTK,
    PseudoNTK,
)
from ..helpers import assert_same, bent, normal


KEY = jr.key(0)
X, FEWER = normal(jr.key(1), (5, 2)), normal(jr.key(2), (4, 2))
SCALAR = bent(2, "scalar", KEY)
# The same function with an axis, which is traced over.
VECTOR = bent(2, 1, KEY)


@pytest.mark.parametrize(
    ("kernel", "is_ntk"),
    (
        (EmpiricalNTK, True),
        (EmpiricalNNGP, False),
        pytest.param(EmpiricalKernel, False, marks=pytest.mark.matrix),
        (PseudoNTK, False),
        pytest.param(
            lambda model: ProbedNTK(model, num_probes=2, key=KEY),
            False,
            marks=pytest.mark.matrix,
        ),
        (lambda model: EmpiricalNTK(model, block_size=2), True),
        (lambda model: EmpiricalNTK(model, method="ntk_vector_products"), True),
        (lambda model: EmpiricalNTK(model, diagonal_axes=0), False),
        (lambda model: EmpiricalNTK(model, block_size=2, store=HostStore()), True),
    ),
)
def test_scalars_are_traced_over_nothing(kernel, is_ntk):
    same = EmpiricalNTK if is_ntk else kernel
    found = jax.tree.map(jnp.asarray, kernel(SCALAR)(X))
    assert_same(found, same(VECTOR)(X))
    if kernel is EmpiricalNTK:
        assert_same(kernel(SCALAR)(X, FEWER), kernel(VECTOR)(X, FEWER))


class Failing(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        raise NotImplementedError("no value at this input")


@pytest.mark.parametrize("in_axes", (None, 0))
def test_a_model_of_scalars_keeps_its_exception(in_axes):
    kernel = EmpiricalNTK(Failing(jnp.ones(2)), in_axes=in_axes)
    with pytest.raises(NotImplementedError, match="no value at this input"):
        kernel(X[0] if in_axes == 0 else X[0, 0])


def test_averages_of_scalars():
    def average(shape):
        init = lambda key: eqx.nn.Linear(2, shape, key=key)
        return MonteCarloKernel(init, key=KEY, num_samples=3)

    assert_same(average("scalar")(X), average(1)(X))


@pytest.mark.parametrize("axis", (-1, 1))
def test_an_axis_that_is_named_must_be_there(axis):
    with pytest.raises(ValueError, match=f"`trace_axes` has the axis {axis}"):
        EmpiricalNTK(SCALAR, trace_axes=axis)(X)


@pytest.mark.quick
def test_each_output_has_the_last_axis_that_it_has():
    both = lambda model, x: {"scalar": model[0](x), "vector": model[1](x)}
    found = EmpiricalNTK(eqx.Partial(both, (SCALAR, VECTOR)))(X)
    assert_same(found["scalar"], EmpiricalNTK(SCALAR)(X))
    assert_same(found["vector"], EmpiricalNTK(VECTOR)(X))


def test_a_whole_batch_is_traced_over_its_last_axis_as_before():
    whole = eqx.Partial(lambda model, x: jax.vmap(model)(x), SCALAR)
    found = EmpiricalNTK(whole, in_axes=None)(X)
    assert_same(found, EmpiricalNTK(whole, in_axes=None, trace_axes=-1)(X))
    assert found.shape == ()


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(2, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema", inference=True)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key=None):
        out, state = self.norm(self.linear(x), state)
        return self.dropout(out, key=key, inference=key is None), state


make = eqx.filter_jit(eqx.nn.make_with_state(Normed))


@pytest.fixture
def with_state():
    return make(KEY)


@pytest.mark.quick
@pytest.mark.parametrize("kernel", (EmpiricalNTK, EmpiricalNNGP, PseudoNTK))
def test_a_model_with_its_state(kernel, with_state):
    model, state = with_state
    alone = eqx.Partial(lambda model, x: model(x, state)[0], model)
    assert_same(kernel(with_state)(X), kernel(alone)(X))
    # The instance has what it was given: not equal numbers, as a new state may be NaN.
    leaves = jax.tree.leaves((kernel(with_state).model, with_state))
    half = len(leaves) // 2
    assert all(a is b for a, b in zip(leaves[:half], leaves[half:], strict=True))


def test_parameters_are_those_of_the_model(with_state):
    model, state = with_state
    where = lambda model: model.linear.weight
    alone = eqx.Partial(lambda model, x: model(x, state)[0], model)
    expected = EmpiricalNTK(alone, where=lambda alone: where(alone.args[0]))(X)
    assert_same(EmpiricalNTK(with_state, where=where)(X), expected)
    # Moving averages are arrays of the state, and not differentiated in.
    assert_same(EmpiricalNTK(with_state)(X), EmpiricalNTK(alone)(X))


def test_keys_of_a_model_with_its_state(with_state):
    model, state = with_state
    alone = eqx.Partial(lambda model, x, key: model(x, state, key=key)[0], model)
    found = EmpiricalNTK(with_state)(X, key=KEY)
    assert_same(found, EmpiricalNTK(alone)(X, key=KEY))
    assert not np.allclose(found, EmpiricalNTK(with_state)(X, key=jr.key(7)))
    pair = (jr.split(jr.key(3), 5), jr.split(jr.key(4), 4))
    both = (EmpiricalNTK(model)(X, FEWER, key=pair) for model in (with_state, alone))
    assert_same(*both)
