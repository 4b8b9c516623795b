"""Norms and kernels of gradients that are sums of terms which may nearly cancel.

The terms are uses of a leaf, or positions. Products of pairs of them are much larger
than their sum then, and so are their errors. Such gradients are formed, a few at a
time: the error of a formed gradient is that of plain JAX.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Real

from .._base.dtypes import (
    largest_of_each,
    power_of_two,
    squared_norm,
    widened,
    widest,
)
from .._base.mesh import is_on_mesh, vary, vary_as, varying
from .einsum import Labels
from .factors import Factor, Factors, gradients
from .gram import gram, squares
from .site import is_outer_product, is_sum, Label, leaf_site, Site


# How much larger than the squared norm of a gradient the sum of the squares of its
# terms may be. The error of products of pairs grows with this ratio, that of the
# gradient with its root.
_MOST_CANCELLED = 64.0


# The number of bytes that the gradients which are formed at a time may take.
_FORMED_BYTES = 2**20


class OfLeaf(NamedTuple):
    """A leaf, its sites, and their factors."""

    sites: Sequence[Site]
    factors: Factors
    leaf: Any


def squared_norms(leaves: Sequence[OfLeaf]) -> list[Real[Array, " n"]]:
    """Squared norms of gradients with respect to each leaf, from its sites' factors."""
    norms, summed, separate = [], [], []
    for i, own in enumerate(leaves):
        total, apart = squares(own.sites, own.factors)
        norms.append(total)
        if not is_outer_product(own.sites):
            summed.append(i)
            separate.append(jnp.any(apart > _MOST_CANCELLED * total))
    if not summed:
        return norms

    def norms_of(formed: list[Array]) -> list[Array]:
        found = []
        for i, x in zip(summed, formed, strict=True):
            unit = leaves[i].factors.unit
            x = x if unit is None else x / unit.astype(x.real.dtype)
            found.append(squared_norm(x)[0])
        return found

    own = [leaves[i] for i in summed]
    totals = [norms[i] for i in summed]
    formed = lambda: _for_each_formed(own, totals[0].shape[0], norms_of)
    chosen = unless_cancelled(jnp.stack(separate), _arrays(own), totals, formed)
    for i, norm in zip(summed, chosen, strict=True):
        norms[i] = norm
    return norms


def cancels(leaves: Sequence[OfLeaf]) -> Factor | None:
    """For each example, whether terms of the gradient of all leaves nearly cancel.

    Returns None if this cannot be. The gradient of a single leaf may be zero, as that
    of a bias of attention keys.
    """
    summed = [own for own in leaves if is_sum(own.sites)]
    if not summed:
        return None
    summed = _in_range(summed)
    pairs = (squares(sites, factors) for sites, factors, _ in summed)
    total, apart = (functools.reduce(jnp.add, x) for x in zip(*pairs, strict=True))
    flags = apart > _MOST_CANCELLED * total
    found = jnp.any(flags, axis=tuple(range(1, flags.ndim)))
    if any(factors.has_examples(sites) for sites, factors, _ in summed):
        return Factor(found)
    return Factor(found[0], has_examples=False)


def _in_range(leaves: Sequence[OfLeaf]) -> list[OfLeaf]:
    """The same leaves, with all gradients divided by one number: squares fit then.

    Only cotangents can be that small or large: second derivatives and kernels have
    squares of operands, too.
    """
    factors = [x.factors.of(site)[1] for x in leaves for site in x.sites]
    largest = [jnp.max(largest_of_each(x.array), initial=0) for x in factors]
    dtype = widest(*(x.dtype for x in largest))
    largest = (x.astype(dtype) for x in largest)
    power = power_of_two(functools.reduce(jnp.maximum, largest))

    def scaled(x: Factor) -> Factor:
        wide = widened(x.array)
        return x.of(wide * (1 / power).astype(wide.dtype))

    found = []
    for sites, factors, leaf in leaves:
        used = {site.perturbation for site in sites}
        cotangents = [
            scaled(x) if i in used else x for i, x in enumerate(factors.cotangents)
        ]
        found.append(
            OfLeaf(sites, factors.replaced(factors.operands, cotangents), leaf)
        )
    return found


def grams(
    leaves: Sequence[tuple[OfLeaf, OfLeaf]],
    cancelled: Sequence[Factor | None],
    examples: Labels,
    out: Labels,
    sizes: dict[Label, int],
) -> list[Array]:
    """The inner products of gradients with respect to each leaf, for two sides.

    - `cancelled`: the results of `cancels`.
    - `examples`: the labels of the examples of both sides, which may be the same.
    - `out`: the labels of the result, whose axes have these `sizes`.
    """
    found, summed = [], []
    shape = [sizes[label] for label in out]
    for i, (own, other) in enumerate(leaves):
        pair = own.sites, own.factors, other.sites, other.factors
        found.append(gram(*pair, examples[-1], out))
        if is_sum(own.sites) or is_sum(other.sites):
            found[-1] = jnp.broadcast_to(found[-1], shape)
            summed.append(i)
    if not summed:
        return found
    sides = [*zip(*(leaves[i] for i in summed), strict=True)]
    nums = [sizes[label] for label in examples]
    axes = [out.index(label) for label in examples]

    def products(first: list[Array], second: list[Array]) -> list[Array]:
        result = []
        for own, other, x, y in zip(*sides, first, second, strict=True):
            site = [leaf_site(0, own.leaf, 0)]
            x, y = (
                Factors([], [Factor(jacobian)], of_side.factors.outputs)
                for jacobian, of_side in ((x, own), (y, other))
            )
            one = gram(site, x, site, y, examples[-1], out)
            full = [1 if label in examples else sizes[label] for label in out]
            result.append(jnp.squeeze(jnp.broadcast_to(one, full), axes))
        return result

    def formed() -> list[Array]:
        num = len(summed)
        if len(examples) == 1:
            each = lambda formed: products(formed[:num], formed[num:])
            stacked = _for_each_formed([*sides[0], *sides[1]], nums[0], each)
        else:
            row = lambda first: _for_each_formed(
                sides[1], nums[1], lambda second: products(first, second)
            )
            stacked = _for_each_formed(sides[0], nums[0], row)
        return [jnp.moveaxis(x, [*range(len(axes))], axes) for x in stacked]

    own = [*sides[0], *sides[1]]
    flags = jnp.stack([jnp.any(x.array) for x in cancelled if x is not None])
    totals = [found[i] for i in summed]
    chosen = unless_cancelled(flags, _arrays(own), totals, formed)
    for i, x in zip(summed, chosen, strict=True):
        found[i] = x
    return found


def _arrays(leaves: Sequence[OfLeaf]) -> list[Array]:
    factors = [[*x.factors.operands, *x.factors.cotangents] for x in leaves]
    return [x.array for own in factors for x in own if x.array is not None]


def unless_cancelled(
    flags: Bool[Array, " _"],
    arrays: list[Array],
    totals: list[Array],
    formed: Callable[[], list[Array]],
) -> list[Array]:
    """The totals, or what `formed` returns from some arrays if any flag is set.

    One branch decides for all, because the host of a GPU may wait for each.
    """
    totals = vary_as(arrays, totals)

    def other() -> list[Array]:
        return [
            vary(x.astype(y.dtype), varying(jax.typeof(y)))
            for x, y in zip(formed(), totals, strict=True)
        ]

    return lax.cond(_any(lax.stop_gradient(flags)), other, lambda: totals)


@jax.custom_batching.custom_vmap
def _any(x: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Whether there is a True; under `jax.vmap`, whether there is one in the batch.

    A branch that differs between the entries of a batch would always run.
    """
    return jnp.any(x)


@_any.def_vmap
def _any_of_batch(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    return _any(x), False


def _for_each_formed(
    leaves: Sequence[OfLeaf], num: int, fun: Callable[[list[Array]], list[Array]]
) -> list[Array]:
    """`fun` of the gradients of each example, which are formed a few at a time.

    It takes one gradient with an axis of size 1 in front for each leaf.
    """
    own = [OfLeaf(*with_own_factors(x.sites, x.factors), x.leaf) for x in leaves]
    every = [[*x.factors.operands, *x.factors.cotangents] for x in own]

    def gradient(of_leaf: OfLeaf, kept: list[Factor], arrays: list) -> Array:
        sites, factors, leaf = of_leaf
        arrays = [*arrays]
        of_one = [x.of(arrays.pop(0)[None]) if x.has_examples else x for x in kept]
        operands, cotangents = of_one[: len(sites)], of_one[len(sites) :]
        outputs, values = factors.outputs, factors.values
        parts = Factors(operands, cotangents, outputs, values=values)
        formed = gradients(sites, parts, leaf)
        return formed if parts.has_examples(sites) else formed[None]

    arrays = [[x.array for x in kept if x.has_examples] for kept in every]
    one = lambda args: fun([*map(gradient, own, every, args[1])])
    # There may be no arrays that differ between examples.
    args = jnp.arange(num), arrays
    if any(map(is_on_mesh, jax.tree.leaves(arrays))):
        return jax.vmap(one)(args)  # A loop would gather examples on all devices.
    size = _FORMED_BYTES // max(sum(_bytes_of_gradient(*x) for x in own), 1)
    # Without a remainder, which would be compiled separately.
    size = next(i for i in range(max(min(size, num), 1), 0, -1) if num % i == 0)
    return lax.map(one, args, batch_size=size)


def _bytes_of_gradient(sites: Sequence[Site], factors: Factors, leaf: Any) -> int:
    _, d = factors.of(sites[0])
    outputs = d.array.shape[d.has_examples :][: len(factors.outputs)]
    return math.prod([*outputs, *leaf.shape]) * leaf.dtype.itemsize


def with_own_factors(
    sites: Sequence[Site], factors: Factors
) -> tuple[list[Site], Factors]:
    """Sites in order, and the factors of these only."""
    own, operands, cotangents = [], [], []
    for i, site in enumerate(sites):
        a, d = factors.of(site)
        own.append(site.with_own(i, None if a is None else i))
        operands.append(Factor(None, has_examples=False) if a is None else a)
        cotangents.append(d)
    return own, factors.replaced(operands, cotangents)
