"""Losses, and their Hessians as JAX has them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from eqxbatch import (
    filter_hessian,
    filter_hessian_diagonal,
)
from ..helpers import drawn, normal
from ..layers import Case, examples


METHODS = ("sites", "products", "auto")


# Those that `auto` chooses from, where it is no case of its own.
CHOICES = METHODS[:2]


# What JAX says in these that a function has no derivative in one mode.
FAILURES = (TypeError, ValueError, NotImplementedError)


def close(got, expected, tol=1e-9):
    """The same but for rounding, as compared to the largest entry of all."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    leaves = jax.device_get((jax.tree.leaves(got), jax.tree.leaves(expected)))
    scale = max([float(np.max(np.abs(b), initial=0)) for b in leaves[1]])
    for a, b in zip(*leaves, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol * scale)


def error(model, x, y):
    return (model(x) - y) ** 2


def mean_of(loss):
    def mean(model, *args):
        return jnp.mean(jax.vmap(loss, (None, *(0 for _ in args)))(model, *args))

    return mean


@eqx.filter_jit
def dense(loss, *args):
    """The Hessian of the mean of a loss over all examples, as JAX has it."""
    return eqx.filter_hessian(mean_of(loss))(*args)


def network(key, width=3, depth=1, activation=jnp.tanh, use_bias=False):
    """With a bias in the last layer; every array more is a row of blocks to compile."""
    settings = {"use_bias": use_bias, "key": key}
    return drawn(eqx.nn.MLP, 2, "scalar", width, depth, activation, **settings)


def batch(key, num):
    key1, key2 = jr.split(key)
    dtype = jnp.result_type(float)
    return normal(key1, (num, 2), dtype), normal(key2, (num,), dtype)


def count(model):
    return sum(x.size for x in jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array)))


def matrix_of(hessian):
    """A PyTree of PyTrees as one matrix."""
    rows = jtu.tree_leaves(jax.device_get(hessian))
    num = round(len(rows) ** 0.5)
    sizes = [round(rows[i * num + i].size ** 0.5) for i in range(num)]
    return np.block(
        [
            [rows[i * num + j].reshape(sizes[i], sizes[j]) for j in range(num)]
            for i in range(num)
        ]
    )


@eqx.filter_jit
def of_each(model, x, y):
    """The Hessians of all examples."""
    return eqx.filter_vmap(eqx.filter_hessian(error), in_axes=(None, 0, 0))(model, x, y)


def compare(case: Case):
    """The Hessian of a loss by sites, and its diagonal."""
    model, fun, _ = case
    to_64 = lambda x: jax.device_put(np.asarray(x).astype(np.float64))
    cast = lambda x: to_64(x) if eqx.is_inexact_array(x) else x
    model = jax.tree.map(cast, model)
    xs = jax.tree.map(cast, examples(case, jr.key(1), 3))

    def loss(model, x):
        outs = jtu.tree_leaves(eqx.filter(fun(model, x), eqx.is_inexact_array))
        ravelled = [x.reshape(-1) for x in outs]
        return sum(jnp.sum(jnp.sin(x) * jnp.arange(1.0, 1 + x.size)) for x in ravelled)

    expected = dense(loss, model, xs)
    got = filter_hessian(loss, in_axes=0, method="sites")(model, xs)
    close(jtu.tree_leaves(got), jtu.tree_leaves(expected))
    leaves = jtu.tree_leaves(expected)
    num = round(len(leaves) ** 0.5)
    own = leaves[:: num + 1]
    diagonal = filter_hessian_diagonal(loss, in_axes=0, method="sites")(model, xs)
    flat = [np.diagonal(np.reshape(x, (round(x.size**0.5), -1))) for x in own]
    close([np.ravel(x) for x in jtu.tree_leaves(diagonal)], flat)


@eqx.filter_jit
def grad_of_trace(hessian, model, x, y):
    def trace(model):
        blocks = jtu.tree_leaves(hessian(model, x, y))
        own = blocks[:: round(len(blocks) ** 0.5) + 1]
        return sum(jnp.trace(a.reshape(round(a.size**0.5), -1)) for a in own)

    return eqx.filter_grad(trace)(model)
