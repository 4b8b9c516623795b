"""Clipping the gradient of each example by its norm."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree, Real

from .._blocks.accumulators import widest
from .._blocks.prefix import is_none, match_prefix


class Clipping(eqx.Module):
    """Bounds on the norms of groups of leaves.

    `bounds` is a PyTree prefix of the gradient: a number for each group, or None for
    one that is not clipped. Norms are those of Euclid.
    """

    bounds: PyTree
    nan_safe: bool

    def __init__(self, bounds: PyTree, nan_safe: bool):
        jtu.tree_map(_check_bound, bounds)
        self.bounds = bounds
        self.nan_safe = nan_safe

    def groups(self, gradient: PyTree) -> "Groups":
        """The groups of the leaves of a gradient, of which only the structure counts.

        Raises `ValueError` where `bounds` is no prefix of it.
        """
        what = "a number or a PyTree prefix of the gradient, with a number or None for"
        what += " each part"
        places = match_prefix("clip_norm", self.bounds, gradient, what)
        bounds, members, first = [], [], 0
        for _, bound, part in places:
            num = len(jtu.tree_leaves(part))
            if isinstance(bound, jax.Array):
                bound = eqx.error_if(
                    bound, ~(bound >= 0), "`clip_norm` must not be negative or NaN."
                )
            bounds.append(bound)
            members.append(range(first, first + num))
            first += num
        treedef = jtu.tree_structure(self.bounds, is_leaf=is_none)
        return Groups(bounds, members, treedef, self.nan_safe)


def _check_bound(bound: Any) -> None:
    if isinstance(bound, jax.Array):
        kinds = (jnp.floating, jnp.integer)
        is_real = any(jnp.issubdtype(bound.dtype, kind) for kind in kinds)
        if bound.shape == () and is_real:
            return
        got = f"an array of shape {bound.shape} and dtype {bound.dtype}"
    elif isinstance(bound, numbers.Real) and not isinstance(bound, bool):
        if not float(bound) >= 0:
            raise ValueError(
                f"`clip_norm` must not be negative or NaN; got {bound}. Use None for "
                "what is not to be clipped."
            )
        return
    else:
        got = f"{bound!r} of type {type(bound).__name__}"
    raise TypeError(
        f"`clip_norm` must consist of real numbers or scalar arrays; got {got}."
    )


@dataclasses.dataclass(frozen=True)
class Clipped:
    """What clipping says of some examples.

    `scales` has a factor for each leaf, `is_kept` is None if all examples are kept.
    """

    scales: list[Array]
    is_kept: Array | None
    norms: PyTree


@dataclasses.dataclass(frozen=True)
class Groups:
    """The leaves of a gradient in groups, each with its bound."""

    bounds: list[Any]
    members: list[range]
    treedef: Any
    nan_safe: bool

    def clip(self, squared_norms: Sequence[Real[Array, "..."]]) -> Clipped:
        """Factors from the squared norms of each leaf, of one or of many examples."""
        dtype = widest(*(x.dtype for x in squared_norms))
        squared = [x.astype(dtype) for x in squared_norms]
        scales, norms = [], []
        is_kept: Bool[Array, "..."] | None = None
        for bound, members in zip(self.bounds, self.members, strict=True):
            square = jnp.zeros_like(squared[0])
            for i in members:
                square += squared[i]
            # The derivative of a norm at zero is taken to be zero, and not NaN.
            is_positive = square > 0
            root = jnp.sqrt(jnp.where(is_positive, square, 1))
            norm = jnp.where(is_positive, root, square)
            if self.nan_safe:
                is_finite = jnp.isfinite(norm)
                is_kept = is_finite if is_kept is None else is_kept & is_finite
            if bound is None:
                scale = jnp.ones_like(norm)
            else:
                limit = jnp.asarray(bound, dtype)
                is_longer = norm > limit
                scale = jnp.where(is_longer, limit / jnp.where(is_longer, norm, 1), 1)
            scales += [scale] * len(members)
            norms.append(norm)
        return Clipped(scales, is_kept, jtu.tree_unflatten(self.treedef, norms))
