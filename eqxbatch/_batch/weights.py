"""The weights of examples in sums and means."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from .._base.dtypes import widest
from .cut import Block, Blocks


def check_weights(name: str, weights: Any, blocks: Blocks | Block) -> None:
    if weights is not None and blocks.total not in (None, weights.shape[0]):
        raise ValueError(
            f"{name}(weights=...) needs one weight for each example, shape "
            f"({blocks.total},); got shape {weights.shape}."
        )


def check_real(name: str, weights: Any) -> None:
    if weights is not None and not any(
        jnp.issubdtype(weights.dtype, kind)
        for kind in (jnp.floating, jnp.integer, jnp.bool_)
    ):
        raise TypeError(
            f"{name}(weights=...) needs real numbers or bools here; got dtype "
            f"{weights.dtype}. For complex weights, use `Sum` over the results of "
            "`filter_micro_vmap`."
        )


def weighted_sum(values: Array, weights: Array | None, block: Block) -> Array:
    if weights is not None:
        rows = block.take(weights).astype(values.dtype)
        values = values * jnp.expand_dims(rows, tuple(range(1, values.ndim)))
    return jnp.sum(values, axis=0, dtype=values.dtype)


def block_weight(dtype: Any, weights: Array | None, block: Block) -> Array:
    if weights is None:
        return jnp.asarray(block.size, jnp.int32)
    check_weights("Mean", weights, block)
    check_real("Mean", weights)
    return jnp.sum(block.take(weights).astype(widest(dtype)))
