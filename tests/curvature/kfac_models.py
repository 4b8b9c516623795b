"""Models whose layers are known, for the definition of Kronecker factors.

Each is a function `run(model, x, taps)` that adds `taps` to what its layers return, for
each layer of shape `(positions, outputs)`, and returns its output, and the inputs of
its layers, of shape `(positions, inputs)`.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from eqxbatch import filter_kfac
from ..helpers import drawn, normal


class Known(NamedTuple):
    """A model with `leaves(model)`: for each layer, its weight and perhaps its bias."""

    run: object
    model: object
    x: object
    shapes: list  # Those of the taps.
    leaves: object


@functools.cache
def known_model(name, num):
    """The same for all tests, so that they share their programs."""
    return KNOWN[name](jr.key(1), num)


def predict(known):
    return _predict(known.run, tuple(known.shapes))


@functools.cache
def _predict(run, shapes):
    return lambda model, x, y: run(model, x, list(map(jnp.zeros, shapes)))[0]


def loss(out, x, y):
    """Convex, and with a Hessian that depends on the output."""
    return jax.nn.logsumexp(out) + jnp.sum((out - y) ** 2) / 3


def loss_of_four(out, x, y):
    return jax.nn.logsumexp(out) + jnp.sum((out - y) ** 2) / 3


def kfac(known, y, **settings):
    return filter_kfac(predict(known), loss, in_axes=0, **settings)(
        known.model, known.x, y
    )


def per_example(known, y):
    """Inputs, cotangents of each output, Hessian and gradient of the loss."""
    shapes = tuple(known.shapes)
    return jax.device_get(_per_example(known.run, shapes, known.model, known.x, y))


@eqx.filter_jit
def _per_example(run, shapes, model, x, y):
    def one(x, y):
        zeros = list(map(jnp.zeros, shapes))
        out, inputs = run(model, x, zeros)
        jacobians = jax.jacrev(lambda taps: run(model, x, taps)[0])(zeros)
        of_loss = lambda out: loss(out, x, y)
        return inputs, jacobians, jax.hessian(of_loss)(out), jax.grad(of_loss)(out)

    return jax.vmap(one)(x, y)


def factors(known, y, *, sharing="expand", fisher="exact", weights=None):
    """For each layer the two factors, by loops over examples and positions."""
    inputs, jacobians, curves, gradients = per_example(known, y)
    num = len(y)
    weights = np.ones(num) if weights is None else np.asarray(weights)
    found = []
    with_bias = [len(own) == 2 for own in known.leaves(known.model)]
    for a, d, has_bias in zip(inputs, jacobians, with_bias, strict=True):
        if has_bias:
            a = np.concatenate([a, np.ones((*a.shape[:-1], 1))], -1)
        if sharing == "reduce":
            a, d = a.mean(1, keepdims=True), d.sum(2, keepdims=True)
        first = second = count = 0.0
        for n in range(num):
            curve = curves[n]
            if fisher == "empirical":
                curve = np.outer(gradients[n], gradients[n])
            for t in range(a.shape[1]):
                first = first + weights[n] * np.outer(a[n, t], a[n, t])
                second = second + weights[n] * d[n, :, t].T @ curve @ d[n, :, t]
                count += weights[n]
        found.append((first / count, second / weights.sum()))
    return found


def exact_blocks(known, y):
    """Those of the Gauss-Newton matrix, of shape `(out, in, out, in)`."""
    inputs, jacobians, curves, _ = per_example(known, y)
    found = []
    for layer, leaves in enumerate(known.leaves(known.model)):
        total = 0.0
        for n in range(len(y)):
            a = inputs[layer][n]
            if len(leaves) == 2:
                a = np.concatenate([a, np.ones((len(a), 1))], -1)
            gradient = np.einsum("cto,ti->coi", jacobians[layer][n], a)
            curved = np.einsum("coi,cd->doi", gradient, curves[n])
            total = total + np.tensordot(curved, gradient, (0, 0))
        found.append(total / len(y))
    return found


# One program in place of one for each operation.
@eqx.filter_jit
def matrix_of(found):
    return found.operator().as_matrix()


@eqx.filter_jit
def diagonal_of(found):
    return found.operator().diagonal()


def with_bias(*layers):
    return [(layer.weight, layer.bias) for layer in layers]


def mlp(key, num):
    model = drawn(eqx.nn.MLP, 3, 2, 4, 1, jnp.tanh, key=key)

    def run(model, x, taps):
        first, second = model.layers
        hidden = jnp.tanh(first(x) + taps[0][0])
        return second(hidden) + taps[1][0], [x[None], hidden[None]]

    x = normal(key, (num, 3), float)
    return Known(run, model, x, [(1, 4), (1, 2)], lambda m: with_bias(*m.layers))


def pooled(key, num):
    """A layer at four positions, and another one after their mean."""
    keys = jr.split(key, 2)
    linear = functools.partial(drawn, eqx.nn.Linear)
    model = [linear(3, 4, key=keys[0]), linear(4, 2, key=keys[1])]

    def run(model, x, taps):
        hidden = jnp.tanh(jax.vmap(model[0])(x) + taps[0])
        mean = jnp.mean(hidden, 0)
        return model[1](mean) + taps[1][0], [x, mean[None]]

    x = normal(key, (num, 4, 3), float)
    return Known(run, model, x, [(4, 4), (1, 2)], lambda m: with_bias(*m))


def convolution(key, num):
    keys = jr.split(key, 2)
    settings = {"stride": (2, 1), "padding": 1}
    first = drawn(eqx.nn.Conv2d, 2, 3, (3, 2), **settings, key=keys[0])
    model = [first, drawn(eqx.nn.Linear, 3 * 3 * 6, 2, key=keys[1])]

    def run(model, x, taps):
        out = model[0](x) + taps[0].T.reshape(3, 3, 6)
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1)))
        seen = jnp.stack(
            [
                padded[:, 2 * i : 2 * i + 3, j : j + 2].ravel()
                for i in range(3)
                for j in range(6)
            ]
        )
        hidden = jnp.tanh(out).ravel()
        return model[1](hidden) + taps[1][0], [seen, hidden[None]]

    x = normal(key, (num, 2, 5, 5), float)
    return Known(run, model, x, [(18, 3), (1, 2)], lambda m: with_bias(*m))


def scanned(key, num):
    """A weight in the steps of a `scan`, and its bias."""
    model = [drawn(eqx.nn.Linear, 5, 3, key=key)]

    def run(model, x, taps):
        def step(hidden, now):
            x, tap = now
            into = jnp.concatenate([hidden, x])
            hidden = jnp.tanh(model[0](into) + tap)
            return hidden, into

        hidden, inputs = jax.lax.scan(step, jnp.zeros(3), (x, taps[0]))
        return hidden[:2], [inputs]

    x = normal(key, (num, 4, 2), float)
    return Known(run, model, x, [(4, 3)], lambda m: with_bias(*m))


def repeated(key, num):
    """A layer that is used three times, one after the other."""
    model = [drawn(eqx.nn.Linear, 3, 3, key=key)]

    def run(model, x, taps):
        inputs = []
        for tap in taps[0]:
            inputs.append(x)
            x = jnp.tanh(model[0](x) + tap)
        return x[:2], [jnp.stack(inputs)]

    x = normal(key, (num, 3), float)
    return Known(run, model, x, [(3, 3)], lambda m: with_bias(*m))


def heads(key, num):
    """Weights with several axes on each side, as attention has, and a vector."""
    keys = jr.split(key, 3)
    model = {
        "into": normal(keys[0], (2, 3, 4), float),  # Heads, entries, inputs.
        "out": normal(keys[1], (3, 2), float),
    }

    def run(model, x, taps):
        hidden = jnp.einsum("hki,ti->thk", model["into"], x)
        hidden = jnp.tanh(hidden + taps[0].reshape(5, 2, 3))
        out = jnp.einsum("thk,kh->t", hidden, model["out"]) + taps[1][:, 0]
        into = jnp.swapaxes(hidden, 1, 2).reshape(5, 6)
        return jnp.stack([jnp.sum(out), jnp.prod(out)]), [x, into]

    x = normal(key, (num, 5, 4), float) / 2
    leaves = lambda m: [(m["into"],), (m["out"],)]
    return Known(run, model, x, [(5, 6), (5, 1)], leaves)


KNOWN = {
    own.__name__: own for own in (mlp, pooled, convolution, scanned, repeated, heads)
}


def product(seed):
    """A random product of a weight with an example, and a bias: one output, `n = 1`.

    Returns the function, the parameters, and for each of their entries the matrix that
    it is in: entries of two matrices have no curvature in common.
    """
    rng = np.random.default_rng(seed)
    letters = "abcdefg"[: rng.integers(2, 6)]
    kinds = dict.fromkeys(letters, "")
    for i, letter in enumerate(letters):
        # Of the batch, of the outputs, of the inputs; the last one is an input.
        kinds[letter] = "boi"[rng.integers(3)] if i + 1 < len(letters) else "i"
    sizes = {letter: int(rng.integers(1, 4)) for letter in letters}
    of = lambda *wanted: [x for x in letters if kinds[x] in wanted]
    shuffled = lambda names: "".join(rng.permutation(list(names)))
    w, x, out = (
        shuffled(letters),
        shuffled([*of("b", "i"), "z"]),
        shuffled(of("b", "o")),
    )
    sizes["z"] = 2  # Summed over before.
    bias, last = shuffled(out), shuffled(out)
    shape = lambda names: tuple(sizes[name] for name in names)
    put = [out.index(name) for name in last]
    parameters = {
        "weight": rng.normal(size=shape(w)),
        "bias": rng.normal(size=shape(bias)),
    }
    weights = rng.normal(size=shape(last))

    def fun(p, x_, y):
        product = jnp.einsum(f"{w},{x}->{out}", p["weight"], x_)
        product = jnp.transpose(product, put)[None]
        moved = jnp.transpose(p["bias"], [bias.index(name) for name in last])
        return jnp.sum(jnp.tanh(product + moved[None]) * weights[None])[None]

    batch = of("b")
    index = np.arange(int(np.prod(shape(batch), dtype=int))).reshape(shape(batch))

    def belongs(names):
        own = [name for name in names if name in batch]
        found = np.transpose(index, [batch.index(name) for name in own])
        found = np.expand_dims(
            found, [i for i, n in enumerate(names) if n not in batch]
        )
        return np.broadcast_to(found, shape(names)).ravel()

    matrix = np.concatenate([belongs(bias), belongs(w)])
    return (
        fun,
        jax.device_put(parameters),
        rng.normal(size=(1, *shape(x))),
        matrix,
    )
