"""Per-example gradient clipping."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, PyTree, Real

from .._base.dtypes import into_range, is_in_range, widest
from .._base.shapes import as_jax
from .._base.trees import described, is_none, match_prefix


class Clipping(eqx.Module):
    """Bounds on the norms of groups of leaves.

    `clip_norm` is a PyTree prefix of the gradient: a number for each group, or None for
    a group that is not clipped. Norms are Euclidean.
    """

    clip_norm: PyTree
    nan_safe: bool

    def __init__(self, bounds: PyTree, nan_safe: bool):
        jtu.tree_map(_check_bound, bounds)
        # NumPy arrays become JAX arrays, which are arguments of the compiled program.
        self.clip_norm = jtu.tree_map(as_jax, bounds)
        self.nan_safe = nan_safe

    def groups(self, gradient: PyTree) -> "Groups":
        """Groups the leaves of a gradient; their values do not matter.

        Raises `ValueError` if `bounds` is not a prefix of it, and `TypeError` for
        integers, which only a `transform` returns.
        """
        for path, leaf in jtu.tree_leaves_with_path(gradient):
            if not eqx.is_inexact_array(leaf):
                raise TypeError(
                    "`clip_norm`, `nan_safe` and `return_norms` need the norm of what "
                    "`transform` returns, so that it must consist of real or complex "
                    f"arrays; got {described(leaf)} at transform(...)"
                    f"{jtu.keystr(path)}. Cast it to a dtype such as float32 in "
                    "`transform`."
                )
        what = "a number or a PyTree prefix of the gradient, with a number or None for"
        what += " each part"
        places = match_prefix("clip_norm", self.clip_norm, gradient, what)
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
        treedef = jtu.tree_structure(self.clip_norm, is_leaf=is_none)
        return Groups(bounds, members, treedef, self.nan_safe)


def _check_bound(bound: Any) -> None:
    if isinstance(bound, (jax.Array, np.ndarray)):
        kinds = (jnp.floating, jnp.integer)
        is_real = any(jnp.issubdtype(bound.dtype, kind) for kind in kinds)
        if bound.shape == () and is_real:
            if isinstance(bound, np.ndarray):
                _check_bound(bound.item())
            return
        got = f"an array of shape {bound.shape} and dtype {bound.dtype}"
    elif isinstance(bound, numbers.Real) and not isinstance(bound, bool):
        if not float(bound) >= 0:
            raise ValueError(
                f"`clip_norm` must not be negative or NaN; got {bound}. Use None for "
                "parts that are not clipped."
            )
        return
    else:
        got = f"{described(bound)}"
    raise TypeError(
        f"`clip_norm` must consist of real numbers or scalar arrays; got {got}."
    )


@dataclasses.dataclass(frozen=True)
class Clipped:
    """The result of clipping for some examples.

    `scales` has a factor for each leaf; `is_kept` is None if all examples are kept.
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

    def clip(
        self,
        squared_norms: Callable[[list[Array] | None], list[Real[Array, " n"]]],
        are_cheap: bool,
    ) -> Clipped:
        """The factors of each leaf, for some examples.

        `squared_norms(scales)` returns the squared norms of each leaf's gradients,
        scaled first if `scales` is not None. If scaling is not cheap (`are_cheap`), it
        is used only if some square is out of range.
        """
        squared = squared_norms(None)
        dtype = widest(*(x.dtype for x in squared))
        zeros = jnp.zeros(squared[0].shape, dtype)

        def totals(squared: list[Array]) -> list[Array]:
            own = lambda members: (squared[i].astype(dtype) for i in members)
            return [sum(own(members), zeros) for members in self.members]

        def plain() -> list[tuple[Array, Array]]:
            return [(jnp.ones_like(total), total) for total in totals(squared)]

        def scaled() -> list[tuple[Array, Array]]:
            factors = [into_range(total) for total in totals(squared)]
            scales = [zeros] * len(squared)
            for factor, members in zip(factors, self.members, strict=True):
                for i in members:
                    scales[i] = factor
            again = totals(squared_norms(scales))
            return [*zip(factors, again, strict=True)]

        if are_cheap:
            return self._scales(scaled())
        found = [
            is_in_range(total)
            for total, members in zip(totals(squared), self.members, strict=True)
            if members
        ]
        norms = jax.lax.cond(jnp.all(jnp.stack(found)), plain, scaled)
        return self._scales(norms)

    def _scales(self, found: list[tuple[Array, Array]]) -> Clipped:
        """Factors from norms, which are `sqrt(square) / power` for each group."""
        scales, norms = [], []
        is_kept: Bool[Array, "..."] | None = None
        for bound, members, (power, square) in zip(
            self.bounds, self.members, found, strict=True
        ):
            # The derivative of a norm at zero is defined as zero instead of NaN.
            is_positive = square > 0
            root = jnp.sqrt(jnp.where(is_positive, square, 1))
            root = jnp.where(is_positive, root, square)
            norm = root / power
            if self.nan_safe:
                is_finite = jnp.isfinite(norm)
                is_kept = is_finite if is_kept is None else is_kept & is_finite
            factor = _factor(bound, power, root)
            if not self.nan_safe and bound is not None:
                # One non-finite entry makes the whole gradient non-finite.
                factor = jnp.where(jnp.isfinite(root), factor, jnp.nan)
            scales += [factor] * len(members)
            norms.append(norm)
        return Clipped(scales, is_kept, jtu.tree_unflatten(self.treedef, norms))


def _factor(bound: Any, power: Array, root: Array) -> Array:
    """The factor that clips gradients of norm `root / power` to a bound."""
    if bound is None:
        return jnp.ones_like(root)
    limit = jnp.asarray(bound, root.dtype)
    # The norm itself may overflow.
    is_longer = root / power > limit
    return jnp.where(is_longer, limit * power / jnp.where(is_longer, root, 1), 1)
