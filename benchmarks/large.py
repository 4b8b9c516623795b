"""GPT-2 small, ViT-B/16 and ResNet-50, as losses of one example `model(x, label)`.

`eqx.filter_eval_shape` makes them from shapes alone, without weights.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from .micro_grad import cross_entropy


class Block(eqx.Module):
    """Attention and an MLP, each after a layer norm."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array):
        key1, key2 = jr.split(key)
        biases = dict.fromkeys(("query", "key", "value", "output"), True)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(
            width // 64,
            width,
            **{f"use_{name}_bias": use for name, use in biases.items()},
            key=key1,
        )
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key2)

    def __call__(self, x, mask=None):
        first, second = map(jax.vmap, self.norms)
        y = first(x)
        x = x + self.attention(y, y, y, mask)
        return x + jax.vmap(self.mlp)(second(x))


class GPT2(eqx.Module):
    """GPT-2 small: 124M parameters, the embedding also in the last layer."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array, depth: int = 12):
        first, second, *keys = jr.split(key, 2 + depth)
        self.tokens = eqx.nn.Embedding(50_257, 768, key=first)
        self.positions = eqx.nn.Embedding(1_024, 768, key=second)
        self.blocks = [Block(768, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(768)

    def __call__(self, tokens, following):
        places = jnp.arange(len(tokens))
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(places)
        for block in self.blocks:
            x = block(x, places[:, None] >= places)
        logits = jax.vmap(self.norm)(x) @ self.tokens.weight.T
        return jnp.mean(cross_entropy(logits, following))


class ViT(eqx.Module):
    """ViT-B/16: 86M parameters, for images of 224 x 224."""

    patch: eqx.nn.Conv2d
    token: jax.Array
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array, depth: int = 12):
        first, second, third, last, *keys = jr.split(key, 4 + depth)
        self.patch = eqx.nn.Conv2d(3, 768, 16, 16, key=first)
        self.token = jr.normal(second, (1, 768))
        self.positions = jr.normal(third, (197, 768))
        self.blocks = [Block(768, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(768)
        self.last = eqx.nn.Linear(768, 1_000, key=last)

    def __call__(self, x, label):
        x = self.patch(x).reshape(768, -1).T
        x = jnp.concatenate([self.token, x]) + self.positions
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.last(self.norm(x[0])), label)


class Bottleneck(eqx.Module):
    """Convolutions of 1, 3 and 1 pixels, each with a group norm."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]
    skip: eqx.nn.Conv2d | None

    def __init__(self, before: int, width: int, stride: int, key: jax.Array):
        keys = jr.split(key, 4)
        sizes = ((before, width, 1, 1), (width, width, 3, stride))
        sizes += ((width, 4 * width, 1, 1),)
        self.convs = [
            eqx.nn.Conv2d(*size, padding="SAME", use_bias=False, key=key)
            for size, key in zip(sizes, keys, strict=False)
        ]
        self.norms = [eqx.nn.GroupNorm(32, size[1]) for size in sizes]
        change = before != 4 * width
        self.skip = (
            eqx.nn.Conv2d(before, 4 * width, 1, stride, use_bias=False, key=keys[3])
            if change
            else None
        )

    def __call__(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(jax.nn.relu(y) if i else y))
        return jax.nn.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet(eqx.Module):
    """ResNet-50 with group norms: 26M parameters, for images of 224 x 224."""

    first: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    blocks: list[Bottleneck]
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array, depths: tuple[int, ...] = (3, 4, 6, 3)):
        first, last, *keys = jr.split(key, 2 + sum(depths))
        self.first = eqx.nn.Conv2d(3, 64, 7, 2, 3, use_bias=False, key=first)
        self.norm = eqx.nn.GroupNorm(32, 64)
        self.blocks, before = [], 64
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if stage and not i else 1
                block = Bottleneck(before, 64 * 2**stage, stride, keys.pop())
                self.blocks.append(block)
                before = 256 * 2**stage
        self.last = eqx.nn.Linear(before, 1_000, key=last)

    def __call__(self, x, label):
        x = jax.nn.relu(self.norm(self.first(x)))
        x = eqx.nn.MaxPool2d(3, 2, 1)(x)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.last(jnp.mean(x, (1, 2))), label)


def shapes_of(
    make: Callable[[jax.Array], Any], num: int, *example: tuple[tuple[int, ...], Any]
) -> tuple[Any, tuple]:
    """A model and some examples of it, as shapes."""
    model = eqx.filter_eval_shape(make, jr.key(0))
    data = [jax.ShapeDtypeStruct((num, *shape), dtype) for shape, dtype in example]
    return model, tuple(data)


# By name: title, how to make the model, an example of it, and how many at a time.
IMAGE = (((3, 224, 224), jnp.float32), ((), jnp.int32))
TOKENS = (((1_024,), jnp.int32), ((1_024,), jnp.int32))
MODELS: dict[str, tuple[str, Callable, tuple, int]] = {
    "gpt2": ("GPT-2 small, 1,024 tokens", GPT2, TOKENS, 8),
    "vit": ("ViT-B/16", ViT, IMAGE, 32),
    "resnet": ("ResNet-50 with group norms", ResNet, IMAGE, 32),
}
