"""How often functions are traced and compiled, and what stays out of programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqxbatch import Concat, filter_micro_vmap, filter_microbatch, Mean, Sum
from ..helpers import assert_same, CountTraces, memory, normal, thinned


pytestmark = pytest.mark.versions


@pytest.mark.parametrize(
    ("case", "accumulator"),
    thinned(
        ((3, 1), (4, 1), (8, 1), (5, 2), (9, 2), (0, 1)),
        (Concat(), Sum(), (Concat(), Mean())),
    ),
)
def test_one_trace_for_the_loop_and_one_for_a_remainder(case, accumulator):
    total, traces = case
    fun = CountTraces(lambda x: (x, 2 * x))
    micro = filter_micro_vmap(fun, microbatch_size=4, accumulator=accumulator)
    for i in range(3):
        micro(jnp.full(total, float(i)))
    assert fun.num == traces
    micro(jnp.ones((total, 2)))
    assert fun.num == 2 * traces


def test_eager_calls_are_cached_by_structure(getkey):
    fun = CountTraces(lambda model, x: model(x))

    def evaluate(model, x):
        # All of the wrapper is new each time.
        micro = filter_micro_vmap(fun, in_axes=(None, 0), microbatch_size=4)
        return micro(model, x)

    x = normal(getkey(), (8, 2))
    for _ in range(3):
        model = eqx.nn.Linear(2, 2, key=getkey())
        assert_same(evaluate(model, x), x @ model.weight.T + model.bias[None])
    assert fun.num == 1


@pytest.mark.parametrize("order", ("jit_of_grad", "grad", "vmap", "jit_of_vmap"))
def test_derivatives_and_batches_do_not_trace_again(order):
    fun = CountTraces(lambda x: jnp.sin(x))
    micro = filter_micro_vmap(fun, microbatch_size=4)
    if "grad" in order:
        run = jax.grad(lambda x: micro(x).sum())
        x = jnp.ones(8)
    else:
        run = jax.vmap(micro)
        x = jnp.ones((3, 8))
    if "jit" in order:
        run = jax.jit(run)
    for _ in range(3):
        run(x)
    assert fun.num == 1


def test_methods_do_not_trace_again(getkey):
    num = []

    class Model(eqx.Module):
        weight: jax.Array

        @filter_micro_vmap(in_axes=(None, 0), microbatch_size=4)
        def __call__(self, x):
            num.append(x)
            return self.weight * x

    for _ in range(3):
        model = Model(normal(getkey(), (2,)))
        x = normal(getkey(), (8, 2))
        assert_same(model(x), model.weight[None] * x)
    assert len(num) == 1


@pytest.mark.parametrize(("total", "axis"), thinned((256, 256 + 3), (0, 1)))
def test_no_copy_of_the_batch(total, axis):
    # Neither of the inputs nor of the outputs, wherever their batch axis is.
    shape = (total, 128) if axis == 0 else (128, total)
    run = filter_micro_vmap(
        lambda x: jnp.sin(x) * x.sum(), in_axes=axis, out_axes=axis, microbatch_size=8
    )
    stats = memory(run, jnp.zeros(shape))
    assert stats.temp_size_in_bytes < 8 * 4 * 8 * 128


def test_temporaries_are_flat_in_the_batch():
    fun = lambda x: jnp.tanh(jnp.outer(x, x)) @ x
    run = filter_micro_vmap(fun, microbatch_size=16)
    sizes = [memory(run, jnp.zeros((n, 64))).temp_size_in_bytes for n in (64, 1024)]
    assert sizes[1] <= sizes[0] + 256
    dense = memory(jax.vmap(fun), jnp.zeros((1024, 64))).temp_size_in_bytes
    assert sizes[1] < dense / 4


def test_microbatch_temporaries_are_flat_in_the_batch(getkey):
    model = eqx.nn.MLP(16, 1, 64, 3, key=getkey())
    arrays, static = eqx.partition(model, eqx.is_array)

    def run(arrays, x):
        grad = eqx.filter_grad(
            lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2),
        )
        micro = filter_microbatch(
            grad, in_axes=(None, 0), microbatch_size=16, accumulator=Mean()
        )
        return eqx.filter(micro(eqx.combine(arrays, static), x), eqx.is_array)

    sizes = [
        memory(run, arrays, jnp.zeros((n, 16))).temp_size_in_bytes for n in (64, 1024)
    ]
    assert sizes[1] <= sizes[0] + 256


def test_microbatches_are_named_in_profiles():
    hlo = (
        jax.jit(filter_micro_vmap(jnp.sin, microbatch_size=4))
        .lower(jnp.ones(12))
        .compile()
        .as_text()
    )
    assert "microbatch" in hlo
