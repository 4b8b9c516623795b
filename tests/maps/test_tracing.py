"""How often functions are traced and compiled, and what stays out of programs."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import (
    Concat,
    filter_ggn_diagonal,
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    Max,
    Mean,
    over_batches,
    Sum,
)
from ..helpers import assert_same, CountTraces, drawn, memory, normal, thinned


pytestmark = pytest.mark.versions


@pytest.mark.parametrize(
    ("case", "total"),
    thinned(
        ((Concat(), 0), ((Concat(), Mean()), 0), (Max(), 1), ((Sum(), Max()), 1)),
        (0, 3, 4, 8, 5, 9),
    ),
)
def test_one_trace_and_one_for_a_remainder(total, case):
    """Microbatches overlap if the accumulators count the examples that are new."""
    accumulator, of_remainder = case
    fun = CountTraces(lambda x: (x, 2 * x))
    micro = filter_micro_vmap(fun, microbatch_size=4, accumulator=accumulator)
    traces = 1 + of_remainder * (total in (5, 9))
    for i in range(3):
        micro(jnp.full(total, float(i)))
    assert fun.num == traces
    micro(jnp.ones((total, 2)))
    assert fun.num == 2 * traces


@pytest.mark.parametrize("total", (5, 23, 24))
def test_effects_happen_once_for_an_example(total):
    seen = []

    def fun(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x

    filter_micro_vmap(fun, microbatch_size=4)(jnp.arange(1.0 * total))
    jax.effects_barrier()
    assert sorted(seen) == [*range(total)]


@pytest.mark.parametrize("total", (5, 101))
def test_a_remainder_is_no_program_of_its_own(total):
    """A product of each example is in the program once, whatever the size."""
    gradient = filter_micro_grad(lambda w, x: jnp.sum(jnp.sin(w @ x)))
    settings = ({}, {"clip_norm": 1.0, "method": "sites"}, {"moments": True})
    for more in settings:
        count = lambda size, more=more: str(
            jax.make_jaxpr(dataclasses.replace(gradient, microbatch_size=size, **more))(
                jnp.ones((3, 3)), jnp.ones((total, 3))
            )
        ).count(" sin ")
        assert count(4) == count(total)


def test_rows_of_smaller_microbatches_are_a_multiple_of_eight():
    """XLA for GPUs copies the factors of products with other numbers of rows."""
    micro = filter_micro_vmap(lambda x: jnp.sin(x), microbatch_size=512)
    program = jax.make_jaxpr(micro)(jnp.ones(5 * 461))
    assert "f32[464] = sin" in str(program)


def test_eager_calls_are_cached_by_structure(getkey):
    fun = CountTraces(lambda model, x: model(x))

    def evaluate(model, x):
        # All of the wrapper is new each time.
        micro = filter_micro_vmap(fun, in_axes=(None, 0), microbatch_size=4)
        return micro(model, x)

    x = normal(getkey(), (8, 2))
    for _ in range(3):
        model = drawn(eqx.nn.Linear, 2, 2, key=getkey())
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


@pytest.mark.cpu
@pytest.mark.parametrize(("total", "axis"), thinned((256, 256 + 3), (0, 1)))
def test_no_copy_of_the_batch(total, axis):
    # Neither of the inputs nor of the outputs, wherever their batch axis is.
    shape = (total, 128) if axis == 0 else (128, total)
    run = filter_micro_vmap(
        lambda x: jnp.sin(x) * x.sum(), in_axes=axis, out_axes=axis, microbatch_size=8
    )
    stats = memory(run, jnp.zeros(shape))
    assert stats.temp_size_in_bytes < 8 * 4 * 8 * 128


@pytest.mark.cpu
def test_temporaries_are_flat_in_the_batch():
    fun = lambda x: jnp.tanh(jnp.outer(x, x)) @ x
    run = filter_micro_vmap(fun, microbatch_size=16)
    sizes = [memory(run, jnp.zeros((n, 64))).temp_size_in_bytes for n in (64, 1024)]
    assert sizes[1] <= sizes[0] + 256
    dense = memory(jax.vmap(fun), jnp.zeros((1024, 64))).temp_size_in_bytes
    assert sizes[1] < dense / 4


@pytest.mark.cpu
def test_microbatch_temporaries_are_flat_in_the_batch(getkey):
    model = drawn(eqx.nn.MLP, 16, 1, 64, 3, key=getkey())
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


@pytest.mark.parametrize("total", (9, 10, 23))
@pytest.mark.parametrize(
    "of",
    ("map", "gradient", "curvature", "Jacobian", "batches", "padding with values"),
)
def test_the_host_is_called_once_for_an_example(of, total):
    seen = []

    def simulate(x):
        seen.append(x.size)
        return np.sin(x)

    def fun(w, x):
        struct = jax.ShapeDtypeStruct((), jnp.float32)
        simulated = jax.pure_callback(simulate, struct, x, vmap_method="expand_dims")
        return w * simulated

    squares = lambda out, x: out**2
    transform = {
        "map": filter_micro_vmap(fun, in_axes=(None, 0), microbatch_size=4),
        "gradient": filter_micro_grad(fun, microbatch_size=4),
        "curvature": filter_ggn_diagonal(
            fun, squares, method="sites", microbatch_size=4
        ),
        "Jacobian": filter_ggn_diagonal(fun, squares, microbatch_size=4),
        "batches": over_batches(filter_micro_grad(fun, microbatch_size=4)),
        "padding with values": filter_micro_grad(
            lambda w, x: (fun(w, x), x),
            has_aux=True,
            microbatch_size=4,
            accumulator=Sum(weights=np.arange(total) > 2),
        ),
    }[of]
    x = np.arange(total, dtype=np.float32)
    jax.block_until_ready(transform(jnp.ones(()), [x] if of == "batches" else x))
    assert sum(seen) == total
