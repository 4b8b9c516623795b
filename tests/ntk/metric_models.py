"""Models whose kernels are taken in a metric, and their Kronecker factors."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from eqxbatch import filter_kfac
from ..helpers import drawn, integers, normal
from .models import jacobians


OUTPUTS = 3


class Net(eqx.Module):
    """Weights with and without biases, shared, and arrays that are no weights."""

    conv: eqx.nn.Conv1d
    shared: eqx.nn.Linear
    scale: jax.Array
    last: eqx.nn.Linear
    unused: jax.Array
    name: str = eqx.field(static=True, default="net")

    def __init__(self, key):
        keys = jr.split(key, 3)
        settings = {"padding": 1, "use_bias": False, "key": keys[0]}
        self.conv = drawn(eqx.nn.Conv1d, 2, 4, 3, **settings)
        self.shared = drawn(eqx.nn.Linear, 4, 4, key=keys[1])
        self.scale = normal(keys[2], (4,), float)
        self.last = drawn(eqx.nn.Linear, 4, OUTPUTS, use_bias=False, key=keys[2])
        self.unused = jax.device_put(np.ones(2))

    def __call__(self, x):
        hidden = jnp.tanh(jax.vmap(self.shared)(jnp.tanh(self.conv(x)).T))
        # Once without the bias.
        hidden = (hidden @ self.shared.weight.T).sum(0) * self.scale
        return self.last(jnp.tanh(hidden))


@functools.cache
def subject():
    model, x = Net(jr.key(0)), normal(jr.key(1), (7, 2, 5), float)
    return model, x, np.asarray(jacobians(model, x))


@functools.cache
def factors(corrected):
    model, x, _ = subject()
    loss = lambda out, x: jnp.sum(jnp.cosh(out))
    call = filter_kfac(lambda model, x: model(x), loss, corrected=corrected)
    return call(model, x)


@eqx.filter_jit
def operator_of(found, is_inverse, settings):
    """One program in place of one for each operation."""
    operator = found.operator(**settings)
    operator = operator.inverse() if is_inverse else operator
    return operator, operator.as_matrix()


def of_operator(corrected=False, is_inverse=True, **settings):
    operator, dense = operator_of(factors(corrected), is_inverse, settings)
    return operator, np.asarray(dense)


def parameters(model):
    return eqx.filter(model, eqx.is_inexact_array)


def diagonal():
    leaves, treedef = jax.tree.flatten(parameters(subject()[0]))
    rng = np.random.default_rng(0)
    entries = [rng.uniform(size=x.shape) * (rng.uniform() < 0.8) for x in leaves]
    dense = np.diag(np.concatenate([x.ravel() for x in entries]))
    return jax.tree.unflatten(treedef, entries), dense


def matrix():
    num = subject()[2].shape[-1]
    root = np.random.default_rng(1).normal(size=(num, num))
    dense = root @ root.T / num + np.eye(num)
    return dense, dense


class Lookup(eqx.Module):
    """An embedding, which drops tokens that it does not have, and a weight twice."""

    table: eqx.nn.Embedding
    tied: jax.Array

    def __init__(self, key):
        keys = jr.split(key, 2)
        self.table = drawn(eqx.nn.Embedding, 6, 4, key=keys[0])
        self.tied = normal(keys[1], (OUTPUTS, 4), float)

    def __call__(self, tokens):
        table = self.table.weight.at[tokens].get(mode="fill", fill_value=0)
        hidden = jnp.tanh(self.tied @ table.T)
        return jnp.sum(self.tied @ jnp.tanh(self.tied.T @ hidden), 1)


@functools.cache
def of_lookup():
    model, x = Lookup(jr.key(0)), integers(jr.key(2), (7, 5), 8)
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(jnp.cosh(o)))
    settings = {"damping": 0.1, "relative": True, "factored": True}
    metric, dense = operator_of(call(model, x), True, settings)
    return model, x, metric, np.asarray(dense)


class Tokens(eqx.Module):
    """A table, also as a weight; groups; and a weight whose inputs come first."""

    table: jax.Array
    groups: eqx.nn.Conv1d
    last: jax.Array

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.table = normal(keys[0], (6, 4), float)
        self.groups = drawn(eqx.nn.Conv1d, 4, 4, 3, groups=2, padding=1, key=keys[1])
        self.last = normal(keys[2], (4, 1, OUTPUTS), float)

    def __call__(self, tokens):
        x = self.table[tokens]
        hidden = jnp.tanh(self.groups(x.T)).sum(1)
        scores = jnp.tanh(self.table @ hidden)
        return (hidden @ self.last[:, 0]) * jnp.sum(scores)
