"""Leaves whose sites are alike, so that their blocks are contracted together."""

import functools
import random
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from eqxbatch import (
    filter_ggn,
    filter_hessian,
    filter_hessian_blocks,
    filter_hessian_diagonal,
    Mean,
)
from eqxbatch._base.jaxprs import inner_jaxprs
from ..helpers import drawn, normal
from .oracle import close


WIDTH, NUM = 3, 7


class Drawn(eqx.Module):
    """Steps of a few kinds in any order, with weights of their own or shared ones."""

    matrices: list
    shifts: list
    scales: list
    table: list
    steps: tuple = eqx.field(static=True)

    def __init__(self, seed: int, key):
        rng = random.Random(seed)
        kinds = ["linear", "linear", "shift", "scale", "twice", "side", "row", "halved"]
        self.steps = tuple(
            (rng.choice(kinds), rng.randrange(4), rng.randrange(4)) for _ in range(7)
        )
        keys = iter(jr.split(key, 16))
        of = lambda *shape: [normal(next(keys), shape, float) / 2 for _ in range(4)]
        self.matrices, self.shifts = of(WIDTH, WIDTH), of(WIDTH)
        self.scales, self.table = of(WIDTH), of(4, WIDTH)

    def __call__(self, x, token):
        sides = []
        for kind, i, k in self.steps:
            w, b = self.matrices[i], self.shifts[i]
            if kind == "linear":
                x = jnp.tanh(w @ x + b)
            elif kind == "shift":
                x = jnp.sin(x) + b + self.shifts[k]
            elif kind == "scale":
                x = x * self.scales[i]
            elif kind == "twice":
                x = jnp.tanh(w @ x) + w.T @ x
            elif kind == "side":
                sides.append(jnp.tanh(w @ x) + self.scales[k])
            elif kind == "row":
                x = x + self.table[i][token]
            else:
                x = jnp.tanh((w * 0.5)[::-1] @ x) + jnp.concatenate([b[:2], x[2:]])
        return jnp.sum(jnp.stack([x, *sides]), 0)


def loss_of(out, x, token, y):
    del x, token
    return jnp.sum((out - y) ** 2) ** 2


def error(model, x, token, y):
    return loss_of(model(x, token), x, token, y)


def case(seed):
    x, y = (
        normal(jr.key(1), (NUM, WIDTH), float),
        normal(jr.key(2), (NUM, WIDTH), float),
    )
    return Drawn(seed, jr.key(seed)), x, jnp.arange(NUM) % 4, y


def compare(seed):
    model, *args = case(seed)
    weights = jnp.arange(1.0, NUM + 1)
    shares = weights / jnp.sum(weights)
    diff, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(diff)
    model_at = lambda flat: eqx.combine(unravel(flat), static)

    @jax.jit
    def dense(flat):
        total = lambda flat: (
            shares @ jax.vmap(error, (None, 0, 0, 0))(model_at(flat), *args)
        )

        def ggn(x, token, y):
            output = lambda flat: model_at(flat)(x, token)
            jac = jax.jacrev(output)(flat)
            curve = jax.hessian(lambda out: loss_of(out, x, token, y))(output(flat))
            return jac.T @ curve @ jac

        return jax.hessian(total)(flat), jnp.einsum(
            "n,nij->ij", shares, jax.vmap(ggn)(*args)
        )

    hessian, ggn = dense(flat)
    settings = {
        "in_axes": 0,
        "method": "sites",
        "accumulator": Mean(weights),
    }
    got, _ = filter_hessian(error, flat=True, **settings)(model, *args)
    close(got, hessian)
    got, _ = filter_hessian_diagonal(error, flat=True, **settings)(model, *args)
    close(got, jnp.diag(hessian))
    predict = lambda model, x, token, y: model(x, token)
    got, _ = filter_ggn(predict, loss_of, flat=True, **settings)(model, *args)
    close(got, ggn)


@pytest.mark.matrix
@pytest.mark.usefixtures("x64")
def test_drawn_steps():
    compare(0)


def deep(depth, key):
    settings = {"use_bias": False, "use_final_bias": False, "key": key}
    model = drawn(eqx.nn.MLP, 2, "scalar", 4, depth, jnp.tanh, **settings)
    return model, normal(key, (6, 2), float), normal(key, (6,), float)


def squared(model, x, y):
    return (model(x) - y) ** 2


@pytest.mark.usefixtures("x64")
def test_deep_network():
    model, x, y = deep(3, jr.key(0))
    mean = lambda model: jnp.mean(jax.vmap(squared, (None, 0, 0))(model, x, y))
    expected = eqx.filter_jit(eqx.filter_hessian(mean))(model)
    settings = {"in_axes": 0, "method": "sites"}
    close(filter_hessian(squared, **settings)(model, x, y), expected)
    blocks = filter_hessian_blocks(squared, **settings)(model, x, y)
    for i, layer in enumerate(blocks.layers):
        own = expected.layers[i].weight.layers[i].weight
        np.testing.assert_allclose(layer.weight, own, rtol=1e-9, atol=1e-12)


def num_equations(depth):
    """Of the program of a diagonal; and how many contractions a whole Hessian has."""
    model, x, y = deep(depth, jr.key(0))
    diff, static = eqx.partition(model, eqx.is_inexact_array)

    def names(transform):
        def run(diff, x, y):
            hessian = transform(squared, in_axes=0, method="sites")
            return hessian(eqx.combine(diff, static), x, y)

        return [*names_in(jax.make_jaxpr(run)(diff, x, y).jaxpr)]

    whole = names(filter_hessian).count("dot_general")
    return len(names(filter_hessian_diagonal)), whole


def names_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in inner_jaxprs(eqn):
            yield from names_in(inner)


def test_the_program_grows_with_the_depth_and_not_with_its_square():
    for sizes in zip(*map(num_equations, (2, 4, 8)), strict=True):
        assert sizes[2] - sizes[1] <= 2.4 * (sizes[1] - sizes[0])


def flat_hessian(width, depth):
    """A function that returns the flat Hessian of a network, and its arguments."""
    model = drawn(eqx.nn.MLP, 4, "scalar", width, depth, jnp.tanh, key=jr.key(0))
    diff, static = eqx.partition(model, eqx.is_inexact_array)
    hessian = filter_hessian(squared, in_axes=0, flat=True, method="sites")
    run = lambda diff, x, y: hessian(eqx.combine(diff, static), x, y)[0]
    return run, diff, normal(jr.key(1), (6, 4)), normal(jr.key(2), (6,))


def test_blocks_of_one_shape_are_written_by_one_operation():
    run, diff, *data = flat_hessian(8, 3)
    names = [*names_in(jax.make_jaxpr(run)(diff, *data).jaxpr)]
    sizes = [x.size for x in jax.tree.leaves(diff)]
    shapes = {(m, n) for i, m in enumerate(sizes) for n in sizes[i:]}
    # There are more kinds of pairs: a weight and its bias, or that of a later layer.
    assert 128 < sum(sizes) <= 256
    assert names.count("scatter") + names.count("dynamic_update_slice") == len(shapes)


@pytest.mark.cpu
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA takes barriers away before it fuses"
)
def test_what_is_stacked_is_computed_before():
    run, *args = flat_hessian(8, 3)
    program = str(jax.jit(run).lower(*args).compile().as_text())
    # XLA would compute derivatives in the kernels that stack them.
    is_stacking = functools.partial(re.search, r" concatenate\(.*/stack")
    kernels = [*filter(is_stacking, program.split("\n\n"))]
    assert len(kernels) > 0
    assert not any(" multiply(" in kernel for kernel in kernels)


class Stack(eqx.Module):
    """Layers that are alike, a leaf without entries, and one between them."""

    layers: list
    empty: jax.Array
    scale: jax.Array

    def __init__(self, key):
        layer = lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key, dtype=float)
        self.layers = [layer(key) for key in jr.split(key, 4)]
        self.empty, self.scale = jnp.zeros((0, 2)), jnp.ones(())

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x)) * self.scale
        return jnp.sum(x) + jnp.sum(self.empty)


@pytest.mark.usefixtures("x64")
def test_flat_matrices_of_alike_layers():
    """Blocks of alike pairs are placed together, among others and in several parts."""
    model, x = Stack(jr.key(0)), normal(jr.key(1), (NUM, WIDTH), float)
    loss = lambda model, x: model(x) ** 2

    @eqx.filter_jit
    def run(model):
        settings = {"in_axes": 0, "method": "sites", "flat": True}
        whole, _ = filter_hessian(loss, **settings)(model, x)
        is_block = lambda x: isinstance(x, eqx.nn.Linear)
        blocks = filter_hessian_blocks(loss, is_block=is_block, **settings)(model, x)
        flat, unravel = ravel_pytree(model)
        total = lambda flat: jnp.mean(jax.vmap(lambda x: loss(unravel(flat), x))(x))
        return whole, blocks, jax.hessian(total)(flat)

    whole, blocks, expected = run(model)
    close(whole, expected)
    size = WIDTH * (WIDTH + 1)
    for i, (block, _) in enumerate(blocks.layers):
        part = slice(i * size, (i + 1) * size)
        close(block, expected[part, part])
    assert blocks.empty[0].shape == (0, 0)
    close(blocks.scale[0], expected[-1:, -1:])
