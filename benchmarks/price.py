"""The price of clipping and of features, over that of accumulated gradients."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from eqxbatch import EmpiricalNTK, filter_micro_grad, Projection
from . import work
from .harness import Bar, bars_of, Case, measure, OURS, results, Row
from .limit import num_bytes, Work
from .micro_grad import (
    accumulated,
    Block,
    clipped,
    CNN,
    cross_entropy,
    Dense,
    Recurrent,
)


NAME = "price"
KEY = jr.key(0)
ACCUMULATED = "accumulated"
SECOND_PASS = "a second pass, for the features of the estimator"
DIM = 64


class ViTBlock(eqx.Module):
    """A block of width 192, for the 65 patches of an image."""

    block: Block
    linear: eqx.nn.Linear

    def __init__(self, key):
        key1, key2 = jr.split(key)
        self.block = Block(192, key1)
        self.linear = eqx.nn.Linear(192, 10, key=key2)

    def __call__(self, x, label):
        return cross_entropy(self.linear(self.block(x)[0]), label)


class GPT2(eqx.Module):
    """GPT-2 with 2 layers: causal attention, GELU, and one table for both its ends."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, key, *, width, words, length):
        first, second, *keys = jr.split(key, 4)
        self.tokens = eqx.nn.Embedding(words, width, key=first)
        self.positions = eqx.nn.Embedding(length, width, key=second)
        blocks = [Block(width, key, heads=width // 64) for key in keys]
        self.blocks = eqx.tree_at(
            lambda blocks: [block.mlp.activation for block in blocks],
            blocks,
            [jax.nn.gelu] * len(blocks),
        )
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, tokens, targets):
        x = jax.vmap(self.tokens)(tokens)
        x = x + self.positions.weight
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        for block in self.blocks:
            x = block(x, mask)
        logits = jax.vmap(self.norm)(x) @ self.tokens.weight.T
        return jnp.mean(cross_entropy(logits, targets))


def jobs(quick: bool) -> Iterator[tuple[str, Any, tuple, int]]:
    """Title, model, data of all examples, and microbatch size.

    Quick ones leave out what the suite of `micro_grad` has.
    """
    labels = lambda num: jr.randint(KEY, (num,), 0, 10)
    width, words = (128, 100) if quick else (768, 2000)
    if not quick:
        dense = jr.normal(KEY, (1024, 256))
        yield "MLP, 1,024 examples by 256", Dense(KEY), (dense, dense), 256
        images = jr.normal(KEY, (64, 1, 28, 28))
        yield "CNN, 64 images by 16", CNN(KEY), (images, labels(64)), 16
        title = "embedding and GRU, 64 times 32 tokens by 16"
        tokens = jr.randint(KEY, (64, 32), 0, 10_000)
        yield title, Recurrent(KEY), (tokens, labels(64)), 16
    few = 8 if quick else 64
    title = f"ViT block, {few} times 65 patches by {few // 4}"
    patches = jr.normal(KEY, (few, 65, 192))
    yield title, ViTBlock(KEY), (patches, labels(few)), few // 4
    for length in (64,) if quick else (64, 256, 512):
        num = 8 if length == 64 and not quick else 4
        tokens = jr.randint(KEY, (num, length + 1), 0, words)
        title = f"GPT-2 of 2 layers, {num} times {length} tokens by {num // 2}"
        model = GPT2(KEY, width=width, words=words, length=length)
        yield title, model, (tokens[:, :-1], tokens[:, 1:]), num // 2


def cases(quick: bool) -> Iterator[Case]:
    for title, model, data, size in jobs(quick):
        arrays = eqx.filter(model, eqx.is_inexact_array)
        num = len(data[0])
        ways = clipped(model, num, size)
        del ways["one plain gradient"]
        products = work.products_of(lambda model, x, y: model(x, y), model, *data)
        ways[ACCUMULATED] = accumulated(model, num, size)[OURS]
        yield Case(
            title,
            title,
            ways,
            (arrays, *data),
            Work(
                work.clipped(products, num),
                num_bytes(arrays, data, arrays),
            ),
            unbounded=(ACCUMULATED,),
            best_memory=None,
            best_time=None,
            limits={ACCUMULATED: 1.3},
        )


def featured(model: Any, num: int, size: int) -> dict[str, Callable]:
    """Ways to compute the mean gradient, and projections of that of each example."""
    _, static = eqx.partition(model, eqx.is_inexact_array)
    sketch = Projection(DIM, jr.key(1))
    plain = accumulated(model, num, size)[OURS]

    def ours(arrays, x, y):
        loss = lambda model, x, y: model(x, y)
        grad = filter_micro_grad(loss, microbatch_size=size, features=sketch)
        gradient, statistics = grad(eqx.combine(arrays, static), x, y)
        return gradient, statistics.features

    def second(arrays, x, y):
        loss = OfPair(eqx.combine(arrays, static))
        estimator = EmpiricalNTK(loss, metric=sketch, block_size=size)
        return plain(arrays, x, y), estimator.features((x, y))

    return {OURS: ours, SECOND_PASS: second, ACCUMULATED: plain}


class OfPair(eqx.Module):
    """A loss as a function of one argument."""

    model: Any

    def __call__(self, pair):
        return self.model(*pair)


def feature_cases(quick: bool) -> Iterator[Case]:
    for title, model, data, size in jobs(quick):
        arrays, num = eqx.filter(model, eqx.is_inexact_array), len(data[0])
        products = work.products_of(lambda model, x, y: model(x, y), model, *data)
        title = f"{title}, {DIM} features"
        yield Case(
            title,
            title,
            featured(model, num, size),
            (arrays, *data),
            Work(
                work.projected(products, num, DIM),
                num_bytes(arrays, data, arrays),
            ),
            unbounded=(ACCUMULATED,),
            best_memory=None,
            best_time=None,
            limits={ACCUMULATED: 1.2},
        )


def table(measured: list[tuple[Case, list[Row]]]) -> list[str]:
    """Times and temporaries, divided by those of the accumulated gradient."""
    lines = [
        "| job | way | time ÷ accumulated | temporaries ÷ accumulated |",
        "|---|---|---:|---:|",
    ]
    for case, rows in measured:
        title = case.title
        by_way = {row.way: row for row in rows}
        base = by_way.pop(ACCUMULATED, None)
        for row in by_way.values():
            if base is None:  # Its time is not compared.
                continue
            time = row.time_ratio / base.time_ratio
            memory = row.memory_ratio / base.memory_ratio
            lines.append(f"| {title} | {row.way} | {time:.2f} | {memory:.2f} |")
            title = ""
    return lines


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    measured, bars = [], []
    for case in itertools.chain(cases(quick), feature_cases(quick)):
        rows = measure(case, rounds=2 if quick else 7)
        measured.append((case, rows))
        bars += bars_of(case, rows)
    return *results(measured, bars, lines=table(measured)), bars
