"""Blocks of a Hessian by products of it with one-hot vectors.

Columns are computed for some leaves at a time. What does not depend on those is not
differentiated, and rows of what comes earlier are not computed: they are known by
symmetry. So each product goes through a part of the function only.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.trees import consecutive_groups
from .._sites.cost import program_cost
from .columns import images, Linear, own_entries
from .site_blocks import Pair, Wanted


Mode = Literal["auto", "fwd", "rev"]


# How many entries of small leaves one product may take along.
LEAST_COLUMNS = 256


# Takes leaves, the numbers of those that change, and of those whose rows are wanted. It
# returns the linear function from directions of the former to rows of the latter.
Products = Callable[[list, list[int], list[int]], Linear]


# Takes leaves, and the numbers of those that the gradient is with respect to.
Gradient = Callable[[list, Sequence[int]], list]


@dataclasses.dataclass(frozen=True)
class ProductBlocks:
    """Blocks of a symmetric matrix over `leaves`, of which products are known.

    - `order`: the numbers of those leaves that columns are computed for, in the order
        in which the function uses them. Each pair that is wanted has one of them.
    - `size`: how many columns are computed at a time; None for all of a group.
    """

    products: Products
    leaves: list
    order: list[int]
    wanted: Wanted
    size: int | None

    def blocks(self) -> dict[Pair, Inexact[Array, "..."]]:
        """The blocks that are wanted."""
        result: dict[Pair, Array] = {}
        for group in self._groups():
            pairs = self._pairs(group)
            if not pairs:
                continue
            point = [self.leaves[leaf] for leaf in group]
            others = sorted({row for _, row in pairs.values()})
            if self.wanted.is_diagonal:
                # Rows and columns are the same entries, in the same order.
                others = group
            linear = self.products(self.leaves, group, others)
            compute = own_entries if self.wanted.is_diagonal else images
            rows = compute(linear, point, self.size)
            start = 0
            for leaf, x in zip(group, point, strict=True):
                own = [row[start : start + x.size] for row in rows]
                start += x.size
                if self.wanted.is_diagonal:
                    result[leaf, leaf] = own[0].reshape(x.shape)
                    continue
                for pair, (column, other) in pairs.items():
                    if column == leaf:
                        block = own[others.index(other)]
                        block = block.reshape(*x.shape, *block.shape[1:])
                        is_first = pair[0] == leaf
                        result[pair] = block if is_first else swapped(block, x.ndim)
        return result

    def estimate(self) -> dict[int, float]:
        """How many floating-point operations all columns of each leaf take."""
        everything = list(range(len(self.leaves)))

        def count(leaves: list) -> dict[int, float]:
            found = {}
            for leaf in self.order:
                linear = self.products(leaves, [leaf], everything)
                jaxpr = jax.make_jaxpr(linear)([leaves[leaf]]).jaxpr
                found[leaf] = leaves[leaf].size * program_cost(jaxpr).time
            return found

        return eqx.filter_eval_shape(count, self.leaves)

    def _pairs(self, group: list[int]) -> dict[Pair, tuple[int, int]]:
        """The pairs that a group gives: which leaf has the columns, and the other."""
        done = self.order[: self.order.index(group[0])]
        result: dict[Pair, tuple[int, int]] = {}
        for pair in self.wanted.pairs:
            for column, row in (pair, pair[::-1]):
                if column in group and row not in done:
                    result.setdefault(pair, (column, row))
        return result

    def _groups(self) -> list[list[int]]:
        """The leaves whose columns are computed together: small ones with others."""
        sizes = [self.leaves[leaf].size for leaf in self.order]
        groups = consecutive_groups(sizes, LEAST_COLUMNS)
        return [[self.order[i] for i in group] for group in groups]


def hessian_products(gradient: Gradient, *, is_reverse: bool) -> Products:
    """Products with a Hessian, as derivatives of the `gradient` in one mode."""

    def forward(leaves: list, group: list[int], rows: list[int]) -> Linear:
        at = lambda own: gradient(replaced(leaves, group, own), rows)
        return jax.linearize(at, [leaves[i] for i in group])[1]

    def reverse(leaves: list, group: list[int], rows: list[int]) -> Linear:
        at = lambda own: gradient(replaced(leaves, rows, own), group)
        pull = jax.vjp(at, [leaves[i] for i in rows])[1]
        return lambda seeds: pull(seeds)[0]

    return reverse if is_reverse else forward


def _pushforward(fun: Linear, point: list, *, is_reverse: bool) -> tuple[list, Linear]:
    """The values of a function, and its derivative in forward mode.

    With `is_reverse`, that is the transpose of the one in reverse mode.
    """
    if not is_reverse:
        return jax.linearize(fun, point)
    outs, pull = jax.vjp(fun, point)
    transpose = jax.linear_transpose(lambda outs: pull(outs)[0], outs)
    return outs, lambda seeds: transpose(seeds)[0]


def gauss_newton_products(
    outputs: Callable[[list], list],
    value: Callable[[list], Array],
    are_reverse: tuple[bool, bool],
) -> Products:
    """Products with `J^T H J`, of the Jacobian of outputs, and a Hessian in them.

    `are_reverse` says which of the two have no derivative in forward mode: the outputs,
    and the gradient of `value` in them.
    """

    def products(leaves: list, group: list[int], rows: list[int]) -> Linear:
        changed = lambda own: outputs(replaced(leaves, group, own))
        point = [leaves[i] for i in group]
        outs, push = _pushforward(changed, point, is_reverse=are_reverse[0])
        curve = _pushforward(jax.grad(value), outs, is_reverse=are_reverse[1])[1]
        changed = lambda own: outputs(replaced(leaves, rows, own))
        pull = jax.vjp(changed, [leaves[i] for i in rows])[1]
        return lambda seeds: pull(curve(push(seeds)))[0]

    return products


def warn_reverse(reason: str) -> None:
    warnings.warn(
        "The gradient has no forward-mode derivative, so it is differentiated in "
        "reverse mode, which is slower and takes more memory. Say `mode='rev'` if that "
        f"is meant. ({reason})",
        stacklevel=2,
    )


def replaced(leaves: Sequence, which: Sequence[int], values: Sequence) -> list:
    result = list(leaves)
    for i, value in zip(which, values, strict=True):
        result[i] = value
    return result


def swapped(block: Array, num: int) -> Array:
    """Exchanges the first `num` axes of an array with all others."""
    return jnp.transpose(block, (*range(num, block.ndim), *range(num)))
