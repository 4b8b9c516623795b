"""What models do with their parameters besides using them in layers.

`python -m tests.patterns` prints the table of the docs, which a test compares with.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax

from .experts import ragged_dot
from .helpers import drawn
from .layers import Case, KEY, table_of, tokens, vectors, weight


def mlp():
    return drawn(eqx.nn.MLP, 4, 4, 6, 1, jnp.tanh, key=jr.key(3))


def arrays_of(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


def data(out):
    return jnp.sum(jnp.sin(out) * jnp.arange(1.0, 1 + out.size))


def squares(model):
    return sum(jnp.sum(jnp.square(w)) for w in arrays_of(model))


def decayed_by_group(model, x):
    weights = sum(jnp.sum(layer.weight**2) for layer in model.layers)
    biases = sum(jnp.sum(jnp.abs(layer.bias)) for layer in model.layers)
    return data(model(x)) + 0.1 * weights + 0.01 * biases


def log_prior(model, x):
    """That of a horseshoe on the first layer, and of a Gaussian on the last."""
    shrunk = jnp.sum(jnp.log(jnp.log1p(2 / model.layers[0].weight ** 2)))
    return data(model(x)) - 0.1 * (shrunk - jnp.sum(model.layers[-1].bias ** 2) / 2)


def spectral_penalty(model, x):
    largest = jnp.linalg.norm(model.layers[1].weight, 2)
    return data(model(x)) + largest**2


def orthogonal_penalty(model, x):
    w = model.layers[0].weight
    return data(model(x)) + jnp.sum((w.T @ w - jnp.eye(w.shape[1])) ** 2)


MASK = np.asarray(jr.bernoulli(jr.key(5), 0.5, (4, 4)), np.float32)


def masked(w, x):
    """A mask that is multiplied with, one that chooses, and a triangle."""
    x = jnp.tanh((w[0] * jnp.asarray(MASK, w[0].dtype)) @ x)
    x = jnp.tanh(jnp.where(jnp.asarray(MASK) > 0, 0, w[1]) @ x)
    return data(jnp.tril(w[2]) @ x)


class LoRA(eqx.Module):
    weight: jax.Array
    a: jax.Array
    b: jax.Array

    def __init__(self, size, rank):
        self.weight = weight(size, size)
        self.a, self.b = weight(rank, size), weight(size, rank) / 2

    def __call__(self, x):
        return lax.stop_gradient(self.weight) @ x + self.b @ (self.a @ x)


def lora(layers, x):
    for layer in layers:
        x = jnp.tanh(layer(x))
    return data(x)


def target_network(models, x):
    model, target = models
    return jnp.sum((model(x) - lax.stop_gradient(target(x))) ** 2)


def weight_normed(w, x):
    direction, length = w
    norm = jnp.linalg.norm(direction, axis=1, keepdims=True)
    return data(jnp.tanh((length * direction / norm) @ x))


def scales(w, x):
    """Positive scales, as flows and likelihoods have them."""
    centred = (x - w["mean"]) / jax.nn.softplus(w["scale"])
    return data(jnp.exp(w["log_scale"]) * centred) + jnp.sum(w["log_scale"])


def quantised(w, x):
    rounded = w + lax.stop_gradient(jnp.round(4 * w) / 4 - w)
    return data(jnp.tanh(rounded @ x))


def stacked(layers, x):
    """Layers of a list, stacked for a scan."""
    stack = lambda *xs: jnp.stack(xs)
    arrays, static = eqx.partition(layers, eqx.is_array)
    step = lambda x, layer: (jnp.tanh(eqx.combine(layer, static[0])(x)), None)
    return data(lax.scan(step, x, jax.tree.map(stack, *arrays))[0])


def unrolled(layer, x):
    for _ in range(3):
        x = jnp.tanh(layer(x))
    return data(x)


def tied(table, x):
    return data(jnp.tanh(table[x].sum(0)) @ table.T)


def class_token(w, x):
    """A token before those of the data, and positions added to all."""
    x = jnp.concatenate([w["token"], x]) + w["positions"]
    return data(jnp.tanh(x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)))[0])


def residual(model, x):
    """That of a differential equation, which has the model's own derivatives."""
    u = lambda x: model(x)[0]
    second = jax.jvp(jax.grad(u), (x,), (jnp.ones_like(x),))[1]
    return (jnp.sin(u(x)) - jnp.sum(second)) ** 2


def branched(ws, x):
    """Layers of which the data choose one, as routers and halting rules do."""
    first, second, last = ws
    hidden = lax.cond(
        jnp.sum(x) > 0,
        lambda x: jnp.tanh(first @ x),
        lambda x: jnp.tanh(second @ x) + first[0],
        x,
    )
    return data(last @ hidden)


@jax.custom_vjp
def rounded_matmul(w, x):
    return jnp.round(4 * w) / 4 @ x


def _rounded_backward(saved, cotangent):
    w, x = saved
    return jnp.einsum("i,j->ij", cotangent, x), cotangent @ w


rounded_matmul.defvjp(lambda w, x: (rounded_matmul(w, x), (w, x)), _rounded_backward)


def with_own_derivative(ws, x):
    return data(rounded_matmul(ws[1], jnp.tanh(rounded_matmul(ws[0], x))))


def of_experts(ws, x):
    """Every token goes to the expert with the highest score."""
    router, experts, last = ws
    scores = x @ router
    chosen = jnp.argmax(scores, -1)
    hidden = jnp.einsum("ti,tij->tj", x, experts[chosen])
    gates = jnp.take_along_axis(jax.nn.softmax(scores), chosen[:, None], 1)
    return data((gates * jnp.tanh(hidden)).sum(0) @ last)


def of_sorted_experts(ws, x):
    """Every token goes to two of the experts; those of one are neighbours."""
    router, up, down = ws
    gates, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=up.shape[0])
    hidden = jnp.tanh(ragged_dot(x[order // 2], up, sizes))
    out = gates.reshape(-1, 1)[order] * ragged_dot(hidden, down, sizes)
    return data(jnp.zeros_like(x).at[order // 2].add(out).sum(0))


def linears(num):
    return [drawn(eqx.nn.Linear, 4, 4, key=key) for key in jr.split(jr.key(6), num)]


PATTERNS = {
    "Weight decay": lambda: Case(
        mlp(), lambda m, x: data(m(x)) + squares(m) / 2, vectors(4)
    ),
    "Weight decay by group": lambda: Case(mlp(), decayed_by_group, vectors(4)),
    "Log prior": lambda: Case(mlp(), log_prior, vectors(4)),
    "Spectral penalty": lambda: Case(mlp(), spectral_penalty, vectors(4)),
    "Orthogonality penalty": lambda: Case(mlp(), orthogonal_penalty, vectors(4)),
    "Constant masks": lambda: Case(
        [weight(4, 4), 2 * weight(4, 4), -weight(4, 4)], masked, vectors(4)
    ),
    "LoRA with `stop_gradient`": lambda: Case(
        [LoRA(4, 2), LoRA(4, 1)], lora, vectors(4)
    ),
    "Target network": lambda: Case((mlp(), mlp()), target_network, vectors(4)),
    "Weight normalisation": lambda: Case(
        (weight(4, 4), weight(4, 1)), weight_normed, vectors(4)
    ),
    "Positive scales": lambda: Case(
        {name: weight(4) for name in ("mean", "scale", "log_scale")}, scales, vectors(4)
    ),
    "Straight-through quantisation": lambda: Case(weight(4, 4), quantised, vectors(4)),
    "Stacked layers, in a scan": lambda: Case(linears(3), stacked, vectors(4)),
    "A layer used several times": lambda: Case(
        eqx.nn.Linear(2, 2, key=KEY), unrolled, vectors(2)
    ),
    "Tied embedding": lambda: Case(weight(7, 4), tied, tokens(3)),
    "Class token and positions": lambda: Case(
        {"token": weight(1, 4), "positions": weight(4, 4)}, class_token, vectors(3, 4)
    ),
    "A branch chosen by the data (`lax.cond`)": lambda: Case(
        [weight(4, 4), 2 * weight(4, 4), -weight(4, 4)], branched, vectors(4)
    ),
    "A matmul with its own derivative (`custom_vjp`)": lambda: Case(
        [weight(4, 4), 2 * weight(4, 4)], with_own_derivative, vectors(4)
    ),
    "A mixture of experts, one for each token": lambda: Case(
        [weight(4, 3), weight(3, 4, 5), weight(5, 2)], of_experts, vectors(6, 4)
    ),
    "A mixture of experts, with `jax.lax.ragged_dot`": lambda: Case(
        [weight(4, 3), weight(3, 4, 5), weight(3, 5, 4)],
        of_sorted_experts,
        vectors(6, 4),
    ),
    "PINN residual": lambda: Case(
        drawn(eqx.nn.MLP, 2, 1, 4, 1, jnp.tanh, key=jr.key(4)), residual, vectors(2)
    ),
}


def table() -> str:
    """Which patterns have rules for all their parameters, in the words of the docs."""
    return table_of("pattern", PATTERNS)


if __name__ == "__main__":
    print(table(), end="")
