"""Kernels of the same weights and inputs that `neural_tangents` was asked for.

`python -m benchmarks.neural_tangents.truth` wrote the files.
"""

import functools
import pathlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch import EmpiricalKernel
from ..helpers import variants


pytestmark = pytest.mark.usefixtures("x64")
FOLDER = pathlib.Path(__file__).parent / "neural_tangents"
AXES = {"full": ((), ()), "traced": ((-1,), ()), "diagonal": ((), (-1,))}


def linear(weight, bias):
    layer = eqx.filter_eval_shape(eqx.nn.Linear, *weight.shape, key=jr.key(0))
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight.T, bias))


class Dense(eqx.Module):
    layers: list

    def __init__(self, weights):
        pairs = zip(weights[::2], weights[1::2], strict=True)
        self.layers = [linear(*pair) for pair in pairs]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class CNN(eqx.Module):
    convs: list
    last: eqx.nn.Linear
    flatten: bool

    def __init__(self, weights, *, flatten):
        self.convs = []
        for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            make = functools.partial(eqx.nn.Conv2d, *w.shape[2:], 3, padding=1)
            conv = eqx.filter_eval_shape(make, key=jr.key(0))
            new = (np.transpose(w, (3, 2, 0, 1)), b[:, None, None])
            conv = eqx.tree_at(lambda m: (m.weight, m.bias), conv, new)
            self.convs.append(conv)
        self.last, self.flatten = linear(*weights[-2:]), flatten

    def __call__(self, x):
        x = jnp.transpose(x, (2, 0, 1))
        for conv in self.convs:
            x = jax.nn.relu(conv(x))
        x = jnp.transpose(x, (1, 2, 0))
        return self.last(x.reshape(-1) if self.flatten else x.mean((0, 1)))


class Words(eqx.Module):
    table: eqx.nn.Embedding
    rest: Dense

    def __init__(self, weights):
        self.table = eqx.nn.Embedding(weight=weights[0])
        self.rest = Dense(weights[1:])

    def __call__(self, tokens):
        return self.rest(jax.vmap(self.table)(tokens).mean(axis=0))


class Function(eqx.Module):
    """A function of weights and one example."""

    weights: list
    fun: Callable

    def __call__(self, x):
        return self.fun(*self.weights, x)


def attention(q, k, v, o, x):
    length, width = x.shape
    split = lambda y: y.reshape(length, 2, width // 2)
    scores = jnp.einsum("shd,thd->hst", split(x @ q), split(x @ k))
    weights = jax.nn.softmax(scores / (width // 2) ** 0.5)
    mixed = jnp.einsum("hst,thd->shd", weights, split(x @ v))
    return (mixed.reshape(length, width) @ o).mean(axis=0)


def shared(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return x


def rnn(into, again, out, x):
    step = lambda h, x: (jnp.tanh(x @ into + h @ again), None)
    return lax.scan(step, jnp.zeros(len(again)), x)[0] @ out


MODELS = {
    "fcn": Dense,
    "cnn_gap": lambda weights: CNN(weights, flatten=False),
    "cnn_flat": lambda weights: CNN(weights, flatten=True),
    "attention": lambda weights: Function(weights, attention),
    "embedding": Words,
    "shared": lambda weights: Function(weights, shared),
    "rnn": lambda weights: Function(weights, rnn),
}


def test_all_files_are_replayed():
    assert {path.stem for path in FOLDER.glob("*.npz")} == {*MODELS}


# Each model, with the axes in turn.
CASES = [(name, [*AXES][i % 3]) for i, name in enumerate(MODELS)]


# The convolutions of both are the same.
@pytest.mark.parametrize(("name", "kind"), variants(CASES, CASES[1]))
def test_kernels(name, kind):
    file = np.load(FOLDER / f"{name}.npz")
    num = sum(key.startswith("w") for key in file)
    model = MODELS[name]([file[f"w{i}"] for i in range(num)])
    model = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, model
    )
    trace, diagonal = AXES[kind]
    kernel = EmpiricalKernel(
        model,
        trace_axes=trace,
        diagonal_axes=diagonal,
        block_size=2 if kind == "traced" else None,
    )
    found = kernel(file["x1"], file["x2"])
    for got, what in zip(found, ("nngp", "ntk"), strict=True):
        expected = file[f"{what}_{kind}"]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12 * scale)
