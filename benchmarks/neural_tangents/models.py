"""Models without a library, for `neural_tangents` in its own environment.

Each is a pair of functions: `init(key, ...) -> parameters` and `apply(parameters, x)`
for a batch `x`, with the biases and the widths of the corresponding Equinox model.
Convolutions have channels last, which is the fastest layout of XLA on CPUs.
"""

import jax
import jax.numpy as jnp


def dense_init(key, sizes):
    keys = jax.random.split(key, len(sizes))
    return [
        (jax.random.normal(key, (m, n)) / m**0.5, 0.1 * jax.random.normal(key, (n,)))
        for key, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]


def dense(params, x):
    *hidden, (w, b) = params
    for w_, b_ in hidden:
        x = jax.nn.relu(x @ w_ + b_)
    return x @ w + b


def conv_init(key, channels):
    keys = jax.random.split(key, len(channels))
    return [
        (jax.random.normal(key, (3, 3, m, n)) / (9 * m) ** 0.5, jnp.full((n,), 0.1))
        for key, m, n in zip(keys, channels, channels[1:], strict=False)
    ]


def conv(params, x):
    for w, b in params:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers
        )
        x = jax.nn.relu(y + b)
    return x


def cnn_init(key, outputs, size, flatten):
    width = 32 * size * size if flatten else 32
    return conv_init(key, (3, 32, 32, 32)), dense_init(key, (width, outputs))


def cnn_gap(params, x):
    convs, last = params
    return dense(last, jnp.mean(conv(convs, x), axis=(1, 2)))


def cnn_flat(params, x):
    convs, last = params
    return dense(last, conv(convs, x).reshape(x.shape[0], -1))


def normalise(x, scale, shift):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + shift


def attention_init(key, width):
    keys = jax.random.split(key, 4)
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]


def attention(params, x, heads):
    q, k, v, o = params
    *lead, length, width = x.shape
    split = lambda y: y.reshape(*lead, length, heads, width // heads)
    scores = jnp.einsum("...shd,...thd->...hst", split(x @ q), split(x @ k))
    weights = jax.nn.softmax(scores / (width // heads) ** 0.5, axis=-1)
    mixed = jnp.einsum("...hst,...thd->...shd", weights, split(x @ v))
    return mixed.reshape(*lead, length, width) @ o


def transformer_init(key, width, outputs):
    keys = jax.random.split(key, 3)
    scale = lambda: (jnp.ones(width), jnp.zeros(width))
    return {
        "attention": attention_init(keys[0], width),
        "mlp": dense_init(keys[1], (width, 4 * width, width)),
        "norms": [scale(), scale()],
        "last": dense_init(keys[2], (width, outputs)),
    }


def transformer(params, x, heads=4):
    x = x + attention(params["attention"], normalise(x, *params["norms"][0]), heads)
    x = x + dense(params["mlp"], normalise(x, *params["norms"][1]))
    return dense(params["last"], jnp.mean(x, axis=-2))


def embedding_init(key, words, width, outputs):
    keys = jax.random.split(key)
    table = jax.random.normal(keys[0], (words, width))
    return table, dense_init(keys[1], (width, width, outputs))


def embedding(params, tokens):
    table, rest = params
    return dense(rest, jnp.mean(table[tokens], axis=-2))


def arc_cosine(x1, x2=None, depth=3):
    """The NTK of an infinitely wide ReLU network, in closed form."""
    x2 = x1 if x2 is None else x2
    dim = x1.shape[-1]
    squares = [jnp.sum(x**2, axis=-1) / dim for x in (x1, x2)]
    norms = jnp.sqrt(squares[0][:, None] * squares[1][None, :])
    nngp = x1 @ x2.T / dim
    ntk = nngp
    for _ in range(depth):
        cosine = jnp.clip(nngp / norms, -1 + 1e-6, 1 - 1e-6)
        angle = jnp.arccos(cosine)
        slope = (jnp.pi - angle) / jnp.pi
        sine = jnp.sqrt(1 - cosine**2)
        nngp = norms * (sine / jnp.pi + slope * cosine)
        ntk = nngp + ntk * slope
    return ntk
