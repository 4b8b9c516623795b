"""Run by `truth.py`: writes weights, inputs and kernels to a folder."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import models
import neural_tangents as nt
import numpy as np


jax.config.update("jax_enable_x64", True)
KEY = jax.random.PRNGKey(0)
AXES = {
    "full": ((), ()),
    "traced": ((-1,), ()),
    "diagonal": ((), (-1,)),
}


def rnn_init(key, width, outputs):
    keys = jax.random.split(key, 3)
    normal = lambda key, shape: jax.random.normal(key, shape) / shape[0] ** 0.5
    return (
        normal(keys[0], (3, width)),
        normal(keys[1], (width, width)),
        normal(keys[2], (width, outputs)),
    )


def rnn(params, x):
    into, again, out = params
    step = lambda h, x: (jnp.tanh(x @ into + h @ again), None)
    start = jnp.zeros((x.shape[0], again.shape[0]))
    state, _ = jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))
    return state @ out


def shared(params, x):
    (w,) = params
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return x


def attention(params, x):
    return models.attention(params, x, 2).mean(axis=-2)


def cases():
    normal = lambda *shape: jax.random.normal(jax.random.PRNGKey(1), shape)
    yield "fcn", models.dense, models.dense_init(KEY, (4, 8, 8, 3)), normal(5, 4)
    cnn = lambda flatten: models.cnn_init(KEY, 2, 4, flatten)
    yield "cnn_gap", models.cnn_gap, cnn(False), normal(3, 4, 4, 3)
    yield "cnn_flat", models.cnn_flat, cnn(True), normal(3, 4, 4, 3)
    yield "attention", attention, models.attention_init(KEY, 4), normal(3, 5, 4)
    tokens = jax.random.randint(KEY, (4, 5), 0, 7)
    yield "embedding", models.embedding, models.embedding_init(KEY, 7, 4, 3), tokens
    yield "shared", shared, [jax.random.normal(KEY, (4, 4)) / 2], normal(5, 4)
    yield "rnn", rnn, rnn_init(KEY, 6, 2), normal(4, 5, 3)


def main(folder):
    for name, apply, params, x in cases():
        first, second = x, x[:2] if name == "embedding" else x[:2] + 0.5
        arrays = {"x1": first, "x2": second}
        weights = jax.tree_util.tree_leaves(params)
        arrays |= {f"w{i}": w for i, w in enumerate(weights)}
        for kind, (trace, diagonal) in AXES.items():
            kwargs = {"trace_axes": trace, "diagonal_axes": diagonal}
            # Jacobian contraction works for all models.
            ntk = nt.empirical_ntk_fn(apply, **kwargs, vmap_axes=0, implementation=1)
            nngp = nt.empirical_nngp_fn(apply, **kwargs)
            arrays[f"ntk_{kind}"] = ntk(first, second, params)
            arrays[f"nngp_{kind}"] = nngp(first, second, params)
        arrays = {key: np.asarray(value) for key, value in arrays.items()}
        np.savez_compressed(pathlib.Path(folder) / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
