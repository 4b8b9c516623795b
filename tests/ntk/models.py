"""Models whose kernels are taken, and dense kernels."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..helpers import Bent


float64 = pytest.mark.usefixtures("x64")


@eqx.filter_jit
def jacobians(model, x, where=eqx.is_inexact_array):
    """For each array that the model returns, shape `(n, *output, parameters)`."""
    leaves, static = eqx.partition(model, where)
    fun = lambda leaves, x: eqx.combine(leaves, static)(x)
    jac = jax.vmap(jax.jacrev(fun), (None, 0))(leaves, x)
    structs = jax.eval_shape(jax.vmap(fun, (None, 0)), leaves, x)

    def flat(struct, part):
        size = lambda y: math.prod(y.shape[struct.ndim :])
        leaves = jax.tree.leaves(part)
        parts = [y.reshape(*struct.shape, size(y)) for y in leaves]
        return jnp.concatenate(parts, axis=-1)

    return jax.tree.map(flat, structs, jac)


@eqx.filter_jit
def outputs(model, x):
    return jax.vmap(model)(x)


def pairs(a, b, trace=(), diagonal=()):
    """The kernel of two arrays with what they are summed over last, by its meaning.

    In NumPy, unless they are traced.
    """
    if not isinstance(a, jax.core.Tracer):
        a, b = np.asarray(a), np.asarray(b)
    ndim = a.ndim - 1
    trace, diagonal = [{axis % ndim for axis in axes} for axes in (trace, diagonal)]
    left, right, out, size = [], [], [], 1
    for axis in range(ndim):
        one, two = "abcdef"[axis], "uvwxyz"[axis]
        same = axis in trace or axis in diagonal
        left.append(one)
        right.append(one if same else two)
        if axis in trace:
            size *= a.shape[axis]
        else:
            out += [one] if same else [one, two]
    expression = f"{''.join(left)}k,{''.join(right)}k->{''.join(out)}"
    if isinstance(a, jax.core.Tracer):
        return jnp.einsum(expression, a, jnp.conj(b)) / size
    return jnp.asarray(np.einsum(expression, a, np.conj(b)) / size)


def truth(model, x1, x2, trace=(), diagonal=()):
    kernel = functools.partial(pairs, trace=trace, diagonal=diagonal)
    return jax.tree.map(kernel, jacobians(model, x1), jacobians(model, x2))


class Matrices(eqx.Module):
    """Returns an array of shape (2, 3)."""

    mlp: eqx.nn.MLP

    def __init__(self, key, dtype=jnp.float64):
        settings = {"use_bias": False, "key": key, "dtype": dtype}
        self.mlp = eqx.nn.MLP(4, 6, 5, 1, jnp.tanh, **settings)

    def __call__(self, x):
        return self.mlp(x).reshape(2, 3)


class Dict(eqx.Module):
    """Returns a dict of arrays of different shapes, from shared parameters."""

    layer: Bent

    def __init__(self, key):
        self.layer = Bent(4, 3, key=key)

    def __call__(self, x):
        y = self.layer(x)
        return {"sum": y.sum(keepdims=True), "parts": (y**2, None)}


@eqx.filter_jit
def cast(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x, tree
    )


class Counted:
    """Counts the examples that go through a model, when it runs."""

    def __init__(self):
        self.num = 0

        @jax.custom_jvp
        def count(x):
            return jax.pure_callback(self.add, x, x, vmap_method="expand_dims")

        count.defjvp(lambda primals, tangents: (count(*primals), *tangents))
        self.fun = count

    def add(self, x):
        self.num += x.size // 4
        return np.asarray(x)
