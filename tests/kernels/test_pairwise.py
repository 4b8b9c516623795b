"""Kernels of single examples, and numbers where scalar arrays are meant."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxbatch import (
    filter_batch_kernel,
    filter_hessian,
    filter_hvp,
    filter_jacobian,
    filter_micro_grad,
    HostStore,
    KernelProduct,
)
from ..helpers import assert_same, normal, thinned


pytestmark = pytest.mark.quick


X = normal(jr.key(0), (5, 3))
Y = normal(jr.key(1), (7, 3))


class RBF(eqx.Module):
    scale: jax.Array

    def __call__(self, x, y):
        return jnp.exp(-jnp.sum((x - y) ** 2) / self.scale)


@jax.jit
def rbf(x1, x2=None):
    x2 = x1 if x2 is None else x2
    return jnp.exp(-jnp.sum((x1[:, None] - x2[None]) ** 2, -1) / 2.0)


KERNEL = RBF(jnp.array(2.0))


@pytest.mark.parametrize(
    ("size", "symmetric"), thinned((None, 2, (2, 3)), (False, True))
)
def test_kernels_of_single_examples(size, symmetric):
    kernel = filter_batch_kernel(
        KERNEL, block_size=size, symmetric=symmetric, pairwise=True
    )
    assert_same(kernel(X, Y), rbf(X, Y))
    assert_same(kernel(X), rbf(X))
    assert_same(kernel(X, X), rbf(X))


def test_to_a_store_and_reduced():
    stored = filter_batch_kernel(
        KERNEL, block_size=2, pairwise=True, store=HostStore()
    )(X, Y)
    assert_same(jnp.asarray(stored), rbf(X, Y))
    reduce = KernelProduct(jnp.ones(7))
    sums = filter_batch_kernel(KERNEL, block_size=2, pairwise=True, reduce=reduce)
    assert_same(sums(X, Y), np.asarray(rbf(X, Y)).sum(1))


def test_outputs_numbers_and_trees():
    def kernel(x, y, shift=0.0):
        return {"outer": jnp.outer(x["a"], y["a"]) + shift, "one": 1.0, "name": "k"}

    found = filter_batch_kernel(kernel, block_size=2, pairwise=True)(
        {"a": X}, {"a": Y}, shift=2.0
    )
    assert_same(found["outer"], np.einsum("ia,jb->ijab", X, Y) + 2)
    assert_same(found["one"], jnp.ones((5, 7)))
    assert found["name"] == "k"


def test_other_axes_and_what_comes_in_pairs():
    kernel = filter_batch_kernel(
        lambda x, y, weights, key: jnp.dot(x, y) * weights[0] * weights[1],
        block_size=2,
        in_axes=1,
        pairwise=True,
    )
    weights = jnp.arange(5.0), jnp.arange(7.0)
    x, y = np.asarray(X).T, np.asarray(Y).T
    found = kernel(jnp.asarray(x), jnp.asarray(y), weights=weights, key=jr.key(0))
    assert_same(found, x.T @ y * np.outer(*weights))


def test_keys_are_those_of_the_examples():
    kernel = lambda x, y, key: jr.uniform(key[0]) - jr.uniform(key[1])
    whole = filter_batch_kernel(kernel, block_size=None, pairwise=True)
    blocks = filter_batch_kernel(kernel, block_size=2, pairwise=True)
    pair = jr.split(jr.key(0), 5), jr.split(jr.key(1), 7)
    draw = jax.jit(jax.vmap(jr.uniform))
    one, two = (np.asarray(draw(keys)) for keys in pair)
    expected = one[:, None] - two
    assert_same(whole(X, Y, key=pair), expected)
    assert_same(blocks(X, Y, key=pair), expected)


def test_no_two_examples_share_a_key_or_one_that_is_split_from_it():
    both = lambda x, y, key: jnp.stack([jr.key_data(k) for k in key])
    kernel = filter_batch_kernel(both, block_size=2, pairwise=True)
    found = np.asarray(kernel(X, Y, key=jr.key(0)))
    alone = np.asarray(kernel(X, key=jr.key(0)))
    # Without `y`, both sides have the keys that `x` has with it.
    assert_same(alone[:, 0, 0], found[:, 0, 0])
    assert_same(alone[0, :, 1], found[:, 0, 0])
    split = lambda keys: jax.vmap(lambda key: jr.split(key, 13))(keys).ravel()

    @jax.jit
    def descendants(data):
        children = split(jr.wrap_key_data(data))
        return jr.key_data(children), jr.key_data(split(children))

    keys = np.concatenate([found[:, 0, 0], found[0, :, 1]])
    first = np.asarray(jr.key_data(jr.key(0)))[None]
    streams = np.concatenate([keys, *descendants(keys), first])
    assert len(np.unique(streams, axis=0)) == len(streams)


def test_derivatives_of_kernels_of_single_examples():
    total = lambda kernel: filter_batch_kernel(kernel, block_size=2, pairwise=True)(
        X, Y
    ).sum()
    found = eqx.filter_grad(total)(KERNEL).scale
    # The derivative of exp(-d / s) is that times d / s**2.
    distances = ((np.asarray(X)[:, None] - np.asarray(Y)) ** 2).sum(-1)
    expected = (np.exp(-distances / 2) * distances).sum() / np.float32(4)
    assert_same(found, expected)


@pytest.mark.parametrize("number", (2.0, np.float32(2.0), jnp.array(2.0)))
def test_numbers_are_scalar_arrays(number):
    cube = lambda x, *args: x**3
    assert filter_hessian(cube)(number) == 12
    assert filter_jacobian(cube)(number) == 12
    assert filter_micro_grad(lambda x, y: x**2 * y)(number, jnp.ones(3)) == 4
    assert filter_hvp(cube)(jnp.array(2.0), number) == 24


@pytest.mark.parametrize(
    "settings", ({}, {"store": HostStore()}, {"reduce": KernelProduct(jnp.ones(5))})
)
def test_what_is_transposed_where_each_pair_has_a_matrix(settings):
    """`symmetric=True` does not say whether the small matrices are transposed."""
    make = functools.partial(
        filter_batch_kernel, jnp.outer, block_size=2, pairwise=True, **settings
    )
    with pytest.raises(ValueError, match=r"further axes \(3, 3\).*`symmetric=lambda k"):
        make(symmetric=True)(X)
    found = make(symmetric=lambda k: k.transpose(1, 0, 3, 2))(X)
    expected = np.einsum("ia,jb->ijab", X, X)
    expected = expected.sum(1) if "reduce" in settings else expected
    assert_same(jnp.asarray(found), jnp.asarray(expected))
