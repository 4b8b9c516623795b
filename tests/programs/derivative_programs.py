"""Random functions with derivatives of a network, for Kronecker factors.

They use weights and biases in all ways that could be taken for a position of a layer
and are none: squared, in products with constants, multiplied with each other, shared,
without a derivative.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import jet


ACTIVATIONS = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "square": lambda x: x**2,
    "linear": lambda x: x,
}
# What `jax.experimental.jet` has rules for.
_OF_JET = ("tanh", "sin", "square", "linear")


class Program(NamedTuple):
    """A function of parameters and of an example `(x, z)` that returns a vector."""

    fun: object
    parameters: dict
    examples: tuple
    name: str


def program(seed, num=3):
    """A random program, and some examples."""
    rng = np.random.default_rng(seed)
    size, width = (int(rng.integers(1, 4)) for _ in range(2))
    depth = int(rng.integers(1, 4))
    is_tied = depth == 3 and rng.random() < 0.4
    act = str(rng.choice([*ACTIVATIONS]))
    sizes = [size, *[width] * (depth - 1), 1]
    draw = lambda *shape: rng.normal(size=shape) / np.sqrt(max(shape[-1:] or (1,)))
    parameters = {f"w{i}": draw(sizes[i + 1], sizes[i]) for i in range(depth)}
    biased = [i for i in range(depth) if rng.random() < 0.7]
    parameters |= {f"b{i}": draw(sizes[i + 1]) for i in biased}
    if is_tied:
        del parameters["w1"]
    sign = rng.choice([1.0, -1.0, 2.0], p=[0.8, 0.1, 0.1])
    is_scaled = rng.random() < 0.2

    def network(p, x):
        for i in range(depth):
            if is_tied and i == 1:
                w = jnp.eye(width) + p["w0"] @ p["w0"].T if size != width else p["w0"].T
            else:
                w = p[f"w{i}"]
            h = (0.5 * w if is_scaled else w) @ x
            h = h + sign * p[f"b{i}"] if i in biased else h
            x = ACTIVATIONS[act](h) if i + 1 < depth else h
        return x[0]

    directions = draw(int(rng.integers(1, 4)), size)
    derivatives = _derivatives(network, jnp.asarray(directions), act)
    extras = _extras(network, rng, size, sizes[1])
    names = [str(x) for x in rng.choice([*derivatives], int(rng.integers(1, 3)))]
    more = [str(x) for x in rng.choice([*extras], int(rng.integers(0, 3)), False)]
    every = {**derivatives, **extras}

    def fun(p, x, z):
        return jnp.stack([every[name](p, x, z) for name in (*names, *more)])

    examples = tuple(rng.normal(size=(num, size)) for _ in range(2))
    title = f"{act} {sizes} biases {biased} {sign}: {names} + {more}"
    title += " tied" * is_tied + " scaled" * is_scaled
    return Program(fun, jax.device_put(parameters), examples, title)


def _derivatives(network, directions, act):
    """Sums of derivatives at `x`, along constants and along what depends on `z`."""
    at = lambda p: lambda x: network(p, x)

    def first(p, x, e):
        return jax.jvp(at(p), (x,), (e,))[1]

    def second(p, x, e):
        return jax.jvp(lambda x: first(p, x, e), (x,), (e,))[1]

    def mapped(of):
        return lambda p, x, z: jnp.sum(jax.vmap(lambda e: of(p, x, e))(directions))

    def by_map(p, x, z):
        return jnp.sum(jax.lax.map(lambda e: second(p, x, e), directions))

    def by_jet(p, x, z):
        along = lambda e: jet.jet(at(p), (x,), ((e, jnp.zeros_like(e)),))[1][1]
        return jnp.sum(jax.vmap(along)(directions))

    def mixed(p, x, z):
        inner = lambda x: first(p, x, directions[0])
        return jax.jvp(inner, (x,), (jnp.sin(z),))[1]

    found = {
        "first": mapped(first),
        "second": mapped(second),
        "python": lambda p, x, z: sum(second(p, x, e) for e in directions),
        "map": by_map,
        "mixed": mixed,
        "along": lambda p, x, z: second(p, x, z),
        "hessian": lambda p, x, z: jnp.trace(jax.hessian(at(p))(x)),
        "gradient": lambda p, x, z: jnp.sum(jax.grad(at(p))(x) ** 2),
        "jacfwd": lambda p, x, z: jax.jacfwd(at(p))(x) @ z,
        "twice": lambda p, x, z: second(p, x, directions[0]) * first(p, z, z),
    }
    return {**found, "jet": by_jet} if act in _OF_JET else found


def _extras(network, rng, size, width):
    """Other uses of the first weight, of shape `(width, size)`, and of its bias."""
    constant = jnp.asarray(rng.normal(size=(size, 3)))
    vector = jnp.asarray(rng.normal(size=size))
    left = jnp.asarray(rng.normal(size=(3, width)))
    bias = lambda p: p.get("b0", jnp.zeros(width))
    frozen = lambda p: {**p, "w0": jax.lax.stop_gradient(p["w0"])}
    return {
        "value": lambda p, x, z: network(p, x),
        "boundary": lambda p, x, z: network(p, z),
        "squared": lambda p, x, z: jnp.sum(p["w0"] ** 2, 1) @ jnp.tanh(p["w0"] @ x),
        "penalty": lambda p, x, z: jnp.sum(p["w0"] ** 2),
        "composed": lambda p, x, z: (
            jnp.sum(jnp.sin(p["w0"] @ constant) @ constant.T) * x[0]
        ),
        "of_left": lambda p, x, z: jnp.sum((left @ p["w0"]) @ x),
        "added": lambda p, x, z: jnp.sum(jnp.tanh(p["w0"] @ vector + p["w0"] @ x)),
        "product": lambda p, x, z: (p["w0"] @ vector) @ (p["w0"] @ x),
        "of_constant": lambda p, x, z: jnp.sum(jnp.exp(p["w0"] @ vector / 4)) * x[0],
        "column": lambda p, x, z: p["w0"][:, 0] ** 2 @ jnp.cos(p["w0"] @ z),
        "frozen": lambda p, x, z: jax.jvp(
            lambda x: network(frozen(p), x), (x,), (vector,)
        )[1],
        "bias": lambda p, x, z: jnp.sum(jnp.sin(bias(p)) * x[0]),
        "more_bias": lambda p, x, z: jnp.sum(jnp.tanh(p["w0"] @ z + 2 * bias(p))),
        "no_bias": lambda p, x, z: jnp.sum(jnp.tanh(p["w0"] @ z)),
    }
