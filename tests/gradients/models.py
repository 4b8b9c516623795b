"""Models and losses whose gradients are taken, and dense gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from eqxbatch import filter_micro_grad
from ..helpers import drawn, normal


METHODS = ("auto", "sites", "materialise")


class Model(eqx.Module):
    """A model with a layer that has a rule, one that has none, and static leaves."""

    linear: eqx.nn.Linear
    scale: jax.Array
    unused: jax.Array
    count: jax.Array
    name: str = "model"
    nothing: None = None

    def __init__(self, key, dtype=jnp.float32):
        key1, key2 = jr.split(key)
        self.linear = drawn(eqx.nn.Linear, 3, 2, key=key1, dtype=dtype)
        self.scale = normal(key2, (2,), dtype)
        self.unused = jax.device_put(np.ones(4, dtype))
        self.count = jax.device_put(np.arange(3, dtype=np.int32))

    def __call__(self, x):
        return jnp.tanh(self.linear(x)) * jnp.exp(self.scale)


def loss(model, x, y):
    return jnp.sum(jnp.abs(model(x) - y) ** 2)


def data(key, total, dtype=jnp.float32):
    key1, key2, key3 = jr.split(key, 3)
    model = Model(key1, dtype)
    return model, normal(key2, (total, 3), dtype), normal(key3, (total, 2), dtype)


def fetched(tree):
    """Arrays of NumPy, with which tests go on without compiling, unless traced."""
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
    return tree if is_traced else jax.device_get(tree)


def each(model, x, y, fun=loss):
    """The gradient of each example, the truth for all of this."""
    grads = eqx.filter_vmap(eqx.filter_grad(fun), in_axes=(None, 0, 0))
    return fetched(eqx.filter_jit(grads)(model, x, y))


def values_of(model, x, y):
    values = eqx.filter_vmap(loss, in_axes=(None, 0, 0))
    return fetched(eqx.filter_jit(values)(model, x, y))


@jax.jit
def combined(grads, weights):
    """The weighted sum of the examples' gradients."""
    return jax.tree.map(
        lambda g: jnp.tensordot(weights.astype(g.dtype), g, 1).astype(g.dtype), grads
    )


@jax.jit
def _norms_of(grads):
    return jax.vmap(optax.tree.norm)(grads)


def norms_of(grads):
    return fetched(_norms_of(grads))


def mlp(key, depth=2):
    settings = {"use_bias": False, "use_final_bias": False}
    return drawn(eqx.nn.MLP, 8, 4, 64, depth, **settings, key=key)


def program(model, size, **options):
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    fun = filter_micro_grad(loss, microbatch_size=size, **options)
    return arrays, lambda arrays, x, y: fun(eqx.combine(arrays, static), x, y)
