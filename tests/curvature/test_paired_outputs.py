"""Gauss-Newton matrices where outputs share entries with layers, against dense ones."""

import functools
import random

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from eqxbatch import filter_ggn, filter_ggn_diagonal, Mean
from eqxbatch._base.traced_function import TracedFunction
from eqxbatch._curvature.ggn_by_sites import paired_outputs
from eqxbatch._sites.program import Program
from ..helpers import drawn, memory, normal
from .oracle import close


NUM, LENGTH, WIDTH = 3, 3, 4


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def turned(x):
    return x[::-1]


turned.defvjp(lambda x: (x[::-1], None), lambda _, g: (g[::-1],))


class Drawn(eqx.Module):
    """Layers of many kinds in any order, on a sequence; and the last steps."""

    matrices: list
    mixers: list
    shifts: list
    scales: list
    tables: list
    kernels: list
    steps: tuple = eqx.field(static=True)

    def __init__(self, seed: int):
        rng = random.Random(seed)
        kinds = [
            *("linear", "linear", "grouped", "shift", "scale", "row", "conv", "tied"),
            *("mix", "tanh", "relu", "turned", "reversed", "swapped", "flat", "placed"),
            *("softmax", "cumsum", "mapped", "scanned", "switched", "doubled"),
            *("remat", "masked", "padded", "divided"),
        ]
        num = rng.randint(1, 4)
        inner = [(rng.choice(kinds), rng.randrange(2)) for _ in range(num)]
        ends = ["all", "last", "mean", "total", "heads", "pair", "transposed"]
        self.steps = (*inner, (rng.choice(ends), rng.randrange(2)))
        keys = iter(jr.split(jr.key(seed), 16))
        of = lambda *shape: [normal(next(keys), shape, float) for _ in range(2)]
        self.matrices, self.mixers = of(WIDTH, WIDTH), of(LENGTH, LENGTH)
        self.shifts, self.scales = of(WIDTH), of(LENGTH, WIDTH)
        self.tables, self.kernels = of(5, WIDTH), of(WIDTH, WIDTH, 2)

    def step(self, kind, i, x, token):
        w, b, s = self.matrices[i], self.shifts[i], self.scales[i]
        if kind == "linear":
            return x @ w.T
        if kind == "grouped":
            groups = x.reshape(-1, 2, 2), w.reshape(4, 2, 2)[:2]
            return jnp.einsum("tgi,goi->tgo", *groups).reshape(x.shape)
        if kind == "conv":
            dims = ("NCH", "OIH", "NCH")
            pad = [(1, 0)]
            return lax.conv_general_dilated(
                x.T[None], self.kernels[i], (1,), pad, dimension_numbers=dims
            )[0].T
        if kind == "tied":
            return jnp.tanh(x @ w) @ w.T
        if kind == "switched":
            return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x * s, x)
        if kind == "scanned":
            return lax.scan(lambda c, x: (0.5 * c + x @ w, c * b + x), b, x)[1]
        if kind == "remat":
            return jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w)
        simple = {
            "shift": lambda: x + b[None],
            "scale": lambda: x * s,
            "row": lambda: x + self.tables[i][token][None],
            "mix": lambda: self.mixers[i] @ x,
            "tanh": lambda: jnp.tanh(x),
            "relu": lambda: jax.nn.relu(x) + 0.1 * x,
            "turned": lambda: turned(x @ w),
            "reversed": lambda: (x * s)[:, ::-1],
            "swapped": lambda: jnp.roll(x + s, 1, axis=1),
            "flat": lambda: (x.ravel() * s.ravel()).reshape(x.shape),
            "placed": lambda: jnp.concatenate([b[None], x[1:]]),
            "softmax": lambda: jax.nn.log_softmax(x, axis=i),
            "cumsum": lambda: jnp.cumsum(x * s, axis=i),
            "mapped": lambda: lax.map(lambda x: w @ x + b, x),
            "doubled": lambda: doubled(x @ w),
            "masked": lambda: jnp.where(x[:1] > 0, x * s, x @ w),
            "padded": lambda: jnp.pad(x @ w, ((1, 0), (0, 1)))[:-1, 1:],
            "divided": lambda: x / (1 + b[None] ** 2),
        }
        return simple[kind]()

    def __call__(self, x, token):
        *inner, (end, i) = self.steps
        for kind, number in inner:
            x = self.step(kind, number, x, token)
        ends = {
            "all": lambda: x,
            "last": lambda: x[-1],
            "mean": lambda: jnp.mean(x, 0),
            "total": lambda: jnp.sum(x, 1) + self.mixers[i] @ x[:, 0],
            "heads": lambda: (x @ self.matrices[i], jnp.sum(x * self.scales[i])),
            "pair": lambda: (x[0], x[1:] + self.shifts[i][None]),
            "transposed": lambda: (x * self.scales[i]).T,
        }
        return ends[end]()


def poisson(out, y):
    return jnp.sum(jnp.exp(out / 8) - y * out)


def squared(out, y):
    return jnp.sum((out - y) ** 2 * (1 + y**2))


def entangled(out, y):
    return jnp.sum((out - y) ** 2) ** 2


def cross_entropy(out, y):
    del y
    out = jnp.atleast_1d(out)
    return -jnp.sum(jax.nn.log_softmax(out, axis=-1)[..., 0])


LOSSES = (poisson, squared, entangled, cross_entropy)


def case(seed):
    """A model, a loss of one example's output, and the arrays of some examples."""
    model, of = Drawn(seed), LOSSES[seed % len(LOSSES)]
    x, token = normal(jr.key(1), (NUM, LENGTH, WIDTH), float), jnp.arange(NUM) + 1

    def loss(out, x, token):
        parts = [of(part, 0.3) for part in jax.tree.leaves(out)]
        return functools.reduce(jnp.add, parts) + jnp.prod(jnp.stack(parts)) / 9

    return model, loss, (x, token)


def compare(seed):
    model, loss, args = case(seed)
    weights = np.arange(1.0, NUM + 1)
    diff, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(diff)
    output = lambda flat, x, token: eqx.combine(unravel(flat), static)(x, token)

    def one(x, token):
        out, unravel_out = ravel_pytree(output(flat, x, token))
        of_flat = lambda flat: ravel_pytree(output(flat, x, token))[0]
        of_loss = lambda out: loss(unravel_out(out), x, token)
        return jax.jacrev(of_flat)(flat), jax.hessian(of_loss)(out)

    jac, curve = jax.device_get(jax.jit(jax.vmap(one))(*args))
    shares = weights / np.sum(weights)
    expected = np.einsum("n,noi,nop,npj->ij", shares, jac, curve, jac, optimize=True)
    predict = lambda model, x, token: model(x, token)
    accumulator = Mean(jax.device_put(weights))
    settings = {"in_axes": 0, "accumulator": accumulator, "flat": True}
    got, _ = filter_ggn(predict, loss, method="sites", **settings)(model, *args)
    close(got, expected)
    got, _ = filter_ggn_diagonal(predict, loss, method="sites", **settings)(
        model, *args
    )
    close(got, np.diag(expected))


# Among these are outputs that have the entries of a layer, and others.
@pytest.mark.matrix
@pytest.mark.parametrize("seed", (0, 1))
def test_drawn_programs(seed, x64):
    compare(seed)


def paired(fun, *leaves, x):
    """The output that each place where parameters enter has the entries of."""
    traced = TracedFunction(lambda leaves, rows: fun(*leaves, *rows), leaves, [x])
    return paired_outputs(Program(traced, order=2))


def test_layers_with_the_entries_of_an_output():
    ones = lambda *shape: np.ones(shape, np.float32)
    x, w, v, b = ones(2, 3), ones(3, 5), ones(5, 4), ones(5)
    paired_of = functools.partial(paired, x=x)
    assert paired_of(lambda w, b, x: x @ w + b[None], w, b) == [0]
    assert paired_of(lambda w, v, x: jnp.tanh(x @ w) @ v, w, v) == [None, 0]
    heads = lambda x, v: (x, jnp.sum(x @ v), x @ v)
    assert paired_of(lambda w, v, x: heads(x @ w, v)[::2], w, v) == [None, 1]
    assert paired_of(lambda w, v, x: heads(x @ w, v), w, v) == [None, None, 2]
    assert paired_of(lambda w, x: jnp.exp(jnp.sin(x @ w)).ravel()[None], w) == [0]
    assert paired_of(lambda w, x: jax.nn.relu(x @ w) * 2 / x[0, 0], w) == [0]
    mixed = [
        lambda w, x: jnp.sum(x @ w, keepdims=True) * jnp.ones((2, 5)),
        lambda w, x: (x @ w)[::-1, ::-1],
        lambda w, x: jnp.roll((x @ w).ravel(), 1),
        lambda w, x: turned(turned((x @ w).ravel())),
        lambda w, x: (lambda y: (y, y))(x @ w),
        lambda w, x: (x @ w)[:, ::-1],
        lambda w, x: (x @ w).T,
        lambda w, x: jax.nn.log_softmax(x @ w),
        lambda w, x: jnp.cumsum(x @ w, axis=0),
    ]
    assert [paired_of(fun, w) for fun in mixed] == [[None]] * len(mixed)


@pytest.mark.cpu
def test_memory_is_bounded():
    """It grows neither with the number of examples nor with the square of a leaf."""
    model = drawn(eqx.nn.Linear, 64, 256, dtype=jnp.float32, key=jr.key(0))
    loss = lambda out, x, y: -jax.nn.log_softmax(out)[y]
    diagonal = filter_ggn_diagonal(lambda m, x, y: m(x), loss, in_axes=0)

    def temporaries(num):
        x, y = np.ones((num, 64), np.float32), np.zeros(num, np.int32)
        return memory(functools.partial(diagonal, model), x, y).temp_size_in_bytes

    assert temporaries(512) < 1.5 * temporaries(128) < 2**25
