"""`filter_micro_grad`, compared with its peers."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax_privacy.clipping
import optax

from eqxbatch import filter_micro_grad
from . import work
from .harness import Bar, bars_of, Case, measure, OURS, results
from .limit import num_bytes, Work


NAME = "micro_grad"
KEY = jr.key(0)
CLIP = 0.1


def cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


class CNN(eqx.Module):
    """Three convolutions of 32 channels."""

    convs: list[eqx.nn.Conv2d]
    linear: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jr.split(key, 4)
        channels = (1, 32, 32)
        self.convs = [
            eqx.nn.Conv2d(num, 32, 3, padding=1, key=key)
            for num, key in zip(channels, keys, strict=True)
        ]
        self.linear = eqx.nn.Linear(32, 10, key=last)

    def __call__(self, x, label):
        for conv in self.convs:
            x = jax.nn.relu(conv(x))
        return cross_entropy(self.linear(jnp.mean(x, axis=(1, 2))), label)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, width, key, heads=4):
        key1, key2 = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=key1)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, key=key2)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)

    def __call__(self, x, mask=None):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Transformer(eqx.Module):
    """Blocks of width 128, for 64 vectors, or for 64 tokens out of 10,000."""

    embedding: eqx.nn.Embedding | None
    blocks: list[Block]
    linear: eqx.nn.Linear

    def __init__(self, key, *, embeds, depth=2):
        first, *keys, last = jr.split(key, 2 + depth)
        self.embedding = eqx.nn.Embedding(10_000, 128, key=first) if embeds else None
        self.blocks = [Block(128, key) for key in keys]
        self.linear = eqx.nn.Linear(128, 10, key=last)

    def __call__(self, x, label):
        if self.embedding is not None:
            x = jax.vmap(self.embedding)(x)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.linear(jnp.mean(x, axis=0)), label)


class Recurrent(eqx.Module):
    """An embedding of 10,000 words of width 64, and a GRU of 64 over 32 tokens."""

    embedding: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3 = jr.split(key, 3)
        self.embedding = eqx.nn.Embedding(10_000, 64, key=key1)
        self.cell = eqx.nn.GRUCell(64, 64, key=key2)
        self.linear = eqx.nn.Linear(64, 10, key=key3)

    def __call__(self, tokens, label):
        words = jax.vmap(self.embedding)(tokens)
        step = lambda state, word: (self.cell(word, state), None)
        state, _ = jax.lax.scan(step, jnp.zeros(64), words)
        return cross_entropy(self.linear(state), label)


class Dense(eqx.Module):
    """788k parameters."""

    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(256, 256, 512, 3, key=key)

    def __call__(self, x, y):
        return jnp.mean((self.mlp(x) - y) ** 2)


def clipped(model: Any, num: int, size: int) -> dict[str, Callable]:
    """All ways to compute the mean of clipped gradients, as `way(arrays, x, y)`."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x, y):
        return eqx.combine(arrays, static)(x, y)

    def ours(arrays, x, y):
        fun = lambda model, x, y: model(x, y)
        grad = filter_micro_grad(fun, microbatch_size=size, clip_norm=CLIP)
        return grad(eqx.combine(arrays, static), x, y)

    def clip(grads):
        norm = optax.tree.norm(grads)
        return jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads)

    def of_optax(arrays, x, y):
        grad = optax.microbatching.micro_grad(
            loss,
            batch_argnums=(1, 2),
            keep_batch_dim=False,
            microbatch_size=size,
            accumulator=optax.microbatching.AccumulationType.MEAN,
            transform_fn=clip,
        )
        return grad(arrays, x, y)[0]

    def of_jax_privacy(arrays, x, y):
        grad = jax_privacy.clipping.clipped_grad(
            loss,
            batch_argnums=(1, 2),
            keep_batch_dim=False,
            l2_clip_norm=CLIP,
            microbatch_size=size,
            nan_safe=False,
        )
        return jax.tree.map(lambda g: g / num, grad(arrays, x, y))

    def by_hand(arrays, x, y):
        def step(total, rows):
            grads = jax.vmap(jax.grad(loss), (None, 0, 0))(arrays, *rows)
            grads = jax.vmap(clip)(grads)
            return jax.tree.map(lambda t, g: t + jnp.sum(g, 0), total, grads), None

        rows = [a.reshape(-1, size, *a.shape[1:]) for a in (x, y)]
        total, _ = jax.lax.scan(step, jax.tree.map(jnp.zeros_like, arrays), rows)
        return jax.tree.map(lambda t: t / num, total)

    return {
        OURS: ours,
        "optax micro_grad": of_optax,
        "jax_privacy clipped_grad": of_jax_privacy,
        "lax.scan by hand": by_hand,
        "one plain gradient": lambda arrays, x, y: jax.grad(
            lambda arrays: jnp.mean(jax.vmap(loss, (None, 0, 0))(arrays, x, y))
        )(arrays),
    }


def accumulated(model: Any, num: int, size: int) -> dict[str, Callable]:
    """All ways to compute the mean gradient in microbatches, as `way(arrays, x, y)`."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x, y):
        return eqx.combine(arrays, static)(x, y)

    def total(arrays, x, y):
        return jnp.sum(jax.vmap(loss, (None, 0, 0))(arrays, x, y))

    def ours(arrays, x, y):
        grad = filter_micro_grad(lambda model, x, y: model(x, y), microbatch_size=size)
        return grad(eqx.combine(arrays, static), x, y)

    def by_hand(arrays, x, y):
        def step(sums, rows):
            grads = jax.grad(total)(arrays, *rows)
            return jax.tree.map(jnp.add, sums, grads), None

        rows = [a.reshape(-1, size, *a.shape[1:]) for a in (x, y)]
        sums, _ = jax.lax.scan(step, jax.tree.map(jnp.zeros_like, arrays), rows)
        return jax.tree.map(lambda s: s / num, sums)

    return {
        OURS: ours,
        "optax microbatch": optax.microbatching.microbatch(
            jax.grad(lambda *args: total(*args) / size),
            (1, 2),
            size,
            optax.microbatching.AccumulationType.MEAN,
        ),
        "lax.scan by hand": by_hand,
    }


CLIPPED = "eqxbatch, clipped gradient"


def moments(model: Any, num: int, size: int) -> dict[str, Callable]:
    """All ways to compute the moments of gradients, as `way(arrays, x, y)`."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x, y):
        return eqx.combine(arrays, static)(x, y)

    def ours(arrays, x, y):
        fun = lambda model, x, y: model(x, y)
        grad = filter_micro_grad(fun, microbatch_size=size, moments=True)
        found = grad(eqx.combine(arrays, static), x, y)[1].moments
        return jax.tree.leaves((found.mean, found.variance))

    def by_hand(arrays, x, y):
        def step(sums, rows):
            grads = jax.vmap(jax.grad(loss), (None, 0, 0))(arrays, *rows)
            of_rows = [jax.tree.map(lambda g: jnp.sum(g**k, 0), grads) for k in (1, 2)]
            return jax.tree.map(jnp.add, sums, of_rows), None

        rows = [a.reshape(-1, size, *a.shape[1:]) for a in (x, y)]
        zeros = jax.tree.map(jnp.zeros_like, arrays)
        (total, squares), _ = jax.lax.scan(step, [zeros, zeros], rows)
        mean = jax.tree.map(lambda t: t / num, total)
        variance = lambda s, m: (s - num * m**2) / (num - 1)
        return jax.tree.leaves((mean, jax.tree.map(variance, squares, mean)))

    return {
        OURS: ours,
        "lax.scan by hand": by_hand,
        CLIPPED: clipped(model, num, size)[OURS],
    }


def jobs(quick: bool) -> dict[str, tuple[str, Any, tuple, int]]:
    """By name: title, model, data of all examples, and microbatch size."""
    num = 256 if quick else 2048
    large = num // 4
    few = 32 if quick else 128
    labels = lambda n: jr.randint(KEY, (n,), 0, 10)
    tokens = lambda n, length: jr.randint(KEY, (n, length), 0, 10_000)
    dense = (jr.normal(KEY, (num, 256)), jr.normal(KEY, (num, 256)))
    images = (jr.normal(KEY, (few, 1, 28, 28)), labels(few))
    vectors = (jr.normal(KEY, (few, 64, 128)), labels(few))
    mlp = f"MLP, 788k parameters, {num:,} examples"
    return {
        "a": (f"(a) {mlp} by 64", Dense(KEY), dense, 64),
        "b": (f"(b) {mlp} by {large}", Dense(KEY), dense, large),
        "c": (f"(c) CNN, {few} images by 32", CNN(KEY), images, 32),
        "d": (
            f"(d) transformer, {few} times 64 tokens by 16",
            Transformer(KEY, embeds=True),
            (tokens(few, 64), labels(few)),
            16,
        ),
        "e": (
            f"(e) its blocks, {few} times 64 vectors by 16",
            Transformer(KEY, embeds=False),
            vectors,
            16,
        ),
        "f": (
            f"(f) embedding and GRU, {few} times 32 tokens by 32",
            Recurrent(KEY),
            (tokens(few, 32), labels(few)),
            32,
        ),
    }


# Upper limits for the time of eqxbatch, divided by that of these ways.
PLAIN = "one plain gradient"
LIMITS = {
    "a": {PLAIN: 2.0, "optax micro_grad": 1 / 100},
    "b": {PLAIN: 2.0, "optax micro_grad": 1 / 100},
}
BEST = {"d": 1 / 3, "f": 1 / 3}


def cases(quick: bool) -> list[Case]:
    found = []
    for name, (title, model, data, size) in jobs(quick).items():
        arrays = eqx.filter(model, eqx.is_inexact_array)
        num = len(data[0])
        products = work.products_of(lambda model, x, y: model(x, y), model, *data)
        moved = num_bytes(arrays, data, arrays)
        found.append(
            Case(
                name,
                title,
                clipped(model, num, size),
                (arrays, *data),
                Work(
                    work.clipped(products, num),
                    moved,
                ),
                unbounded=(PLAIN,),
                best_memory=None,
                best_time=BEST.get(name, 1.03),
                limits=LIMITS.get(name, {}),
            )
        )
        if name in "bce":
            ways = moments(model, num, size)
            has_peer = name != "b"
            if not has_peer:  # It takes more than a minute.
                del ways["lax.scan by hand"]
            found.append(
                Case(
                    f"{name}, moments",
                    f"{title}, moments",
                    ways,
                    (arrays, *data),
                    Work(work.moments(products, num), moved + num_bytes(arrays)),
                    unbounded=(CLIPPED,),
                    best_memory=None,
                    best_time=1.03 if has_peer else None,
                    limits={CLIPPED: 1.3},
                )
            )
        if name in "ab":
            found.append(
                Case(
                    f"{name}, accumulated",
                    f"{title}, accumulated",
                    accumulated(model, num, size),
                    (arrays, *data),
                    Work(work.accumulated(products, num), moved),
                    # The same memory, up to a loop counter and its alignment.
                    best_memory=1.001,
                )
            )
    return found


def exactness_bars() -> list[Bar]:
    """Clipped gradients from sites in float64, compared with clipping one by one."""
    bars = []
    with jax.enable_x64(True):
        cast = lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x
        for name, (_, model, data, _) in jobs(quick=True).items():
            model, x, y = jax.tree.map(cast, (model, *data))
            x, y = x[:6], y[:6]
            loss = lambda model, x, y: model(x, y)
            grad = filter_micro_grad(
                loss, microbatch_size=4, clip_norm=CLIP, method="sites"
            )
            each = eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(None, 0, 0))
            grads = eqx.filter_jit(each)(model, x, y)
            scales = jnp.minimum(1, CLIP / jax.vmap(optax.tree.norm)(grads)) / 6
            true = jax.tree.map(lambda g: jnp.tensordot(scales, g, 1), grads)
            off = jax.tree.map(jnp.subtract, grad(model, x, y), true)
            error = float(optax.tree.norm(off) / optax.tree.norm(true))
            bars.append(Bar(f"{name}: relative error in float64", error, 1e-10))
    return bars


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    bars, measured = exactness_bars(), []
    for case in cases(quick):
        rows = measure(case, rounds=2 if quick else 15)
        measured.append((case, rows))
        bars += bars_of(case, rows)
    return (*results(measured, bars), bars)
