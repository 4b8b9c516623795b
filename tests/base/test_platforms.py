"""Choices among programs are those of the platform that a program is for."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import explain_sites, filter_ggn_diagonal, filter_micro_grad
from eqxbatch._base.compile import compiled
from eqxbatch._base.platforms import CPU, for_platform, GPU, platform, TPU


@pytest.mark.cpu
def test_arguments_come_before_the_default_device():
    x = jnp.ones(3)
    here = jax.device_put(x, jax.devices()[0])
    assert platform([x, here]) == CPU
    for name, expected in (("gpu", GPU), ("tpu", TPU)):
        with jax.default_device(name):
            assert platform([x, "a setting"]) == platform() == expected
            assert platform([x, here]) == CPU
    with jax.default_device(jax.devices()[0]):
        assert platform() == CPU
    with for_platform(TPU):
        assert platform([here]) == TPU
    assert platform() == CPU


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


CHOSEN = ((CPU, "materialise"), (GPU, "sites"), (TPU, "sites"))


@pytest.mark.parametrize(("chosen", "method"), CHOSEN)
def test_a_layer_of_a_vision_transformer_is_clipped(chosen, method, caplog):
    w, x = jnp.ones((768, 3072)), jax.ShapeDtypeStruct((2, 197, 768), jnp.float32)
    grad = filter_micro_grad(loss, microbatch_size=1, clip_norm=1.0)
    one = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    with for_platform(chosen), caplog.at_level("DEBUG", "eqxbatch"):
        assert eqx.filter_eval_shape(grad, w, x).shape == w.shape
        assert explain_sites(loss, w, one, in_axes=None).method == method
    assert f"method='auto' is '{method}'" in caplog.text


def test_examples_are_processed_at_once_where_memory_allows():
    w, x = jnp.ones((3, 8)), jnp.ones((16, 4, 8))
    ggn = filter_ggn_diagonal(
        lambda w, x: jnp.sum(jnp.tanh(x @ w.T), axis=0),
        lambda out, x: jnp.sum(out**2),
        in_axes=0,
        method="sites",
    )
    small = dataclasses.replace(CPU, factor_bytes=2**10)
    for chosen, is_loop in ((CPU, False), (small, True)):
        with for_platform(chosen):
            program = str(eqx.filter_make_jaxpr(ggn)(w, x)[0])
        assert ("scan" in program) is is_loop


def test_programs_are_compiled_for_each_platform():
    traced = []

    def count(w, x):
        traced.append(platform())
        return loss(w, x)

    grad = filter_micro_grad(count)
    w, x = jnp.ones((2, 2)), jnp.ones((3, 1, 2))
    for chosen in (CPU, CPU, GPU, CPU):
        with for_platform(chosen):
            grad(w, x)
    assert {*traced} == {CPU, GPU}
    assert traced == sorted(traced, key=(CPU, GPU).index)


def slow(x):
    """The first entry, read at the end of a program that takes a while."""
    y = jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ y), x)
    return x[(0 * y[0, 0]).astype(jnp.int32), 0]


@pytest.mark.cpu
def test_programs_that_do_not_wait():
    x = jnp.ones((500, 500))
    assert not compiled(slow, waits=False)(x).is_ready()
    assert compiled(slow)(x).is_ready()
    # JAX reads the memory of the user while the program runs.
    mine = np.ones((500, 500), np.float32)
    got = compiled(slow, waits=False)(mine)
    mine[:] = 7
    assert got == 1


@pytest.mark.versions
def test_errors_of_the_host_belong_to_the_call():
    """And are those that Equinox makes of them."""
    checked = lambda x: eqx.error_if(x, x < 0, "negative")
    run, theirs = compiled(checked, waits=False), eqx.filter_jit(checked)
    for x in (1.0, 2.0):
        assert run(jnp.array(x)) == theirs(jnp.array(x)) == x
        with pytest.raises(Exception, match="negative") as expected:
            theirs(jnp.array(-x))
        with pytest.raises(expected.type, match="negative"):
            run(jnp.array(-x))
