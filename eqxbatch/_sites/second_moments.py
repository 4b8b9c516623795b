"""Sums of squares of per-example gradients, entry by entry, from the factors of sites.

The squares of an outer product are the outer product of the squares of its factors, so
that their sum over examples is one product more. Gradients of a table are zero but for
the rows that tokens select. Other gradients are formed, a few at a time.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Real

from .._base.dtypes import (
    exponent_of,
    largest_of_each,
    power_of_two,
    scaled_examples,
    times_two_to,
    widened,
)
from .._base.mesh import vary_as
from .._base.trees import safe_zip
from .einsum import contract, EXAMPLE
from .factors import has_rows, rows_of_tokens, scale_of, site_terms
from .gram import formed_gradients, MOST_CANCELLED, OfLeaf, unless_cancelled
from .site import has_named_axes, is_outer_product, labels_of, Site


# A sum of fewer squares may be close to the square of their mean by chance.
_FEWEST = 16


# Factors of up to `2**_SPARE` times a mean gradient are squared without underflow.
_SPARE = 40


def has_products_of_squares(sites: Sequence[Site]) -> bool:
    """Whether squares of the gradients are products of smaller squares of factors."""
    if len(sites) != 1 or not is_outer_product(sites):
        return False
    (site,) = sites
    size = lambda axes: math.prod(site.sizes[name] for name in axes)
    entries = math.prod(site.view.type_of_leaf.shape)
    is_smaller = size(site.a_axes) + size(site.d_axes) < entries
    return is_smaller and has_named_axes(site) and not site.takes_real_part


def squared_distances(
    leaves: Sequence[OfLeaf], means: Sequence[Array], weights: Real[Array, " n"]
) -> list[Real[Array, "..."]]:
    """The weighted sums over examples of `abs(gradient - mean) ** 2`, entry by entry.

    `means` are the weighted means. No sum loses more digits than the square of the
    mean has more than one in `MOST_CANCELLED` distances: other gradients are formed.
    """
    num = weights.shape[0]
    results = [jnp.zeros(x.shape, x.real.dtype) for x in means]
    chosen, others = [], []
    for i, x in enumerate(leaves):
        if has_rows(x.sites):
            results[i] = _distances_of_rows(x, means[i], weights)
        elif x.sites:
            is_product = num >= _FEWEST and has_products_of_squares(x.sites)
            (chosen if is_product else others).append(i)

    def formed(which: Sequence[int]) -> list[Array]:
        return _formed_distances(
            [leaves[i] for i in which], [means[i] for i in which], weights
        )

    for i, x in safe_zip(others, formed(others)):
        results[i] = x
    if not chosen:
        return results
    distances, flags = [], []
    for i in chosen:
        square, is_in_range = squared_sum(leaves[i], weights)
        mean = means[i]
        distance = square - jnp.sum(weights) * (mean * jnp.conj(mean)).real
        is_exact = (square <= MOST_CANCELLED * distance) | (square == 0)
        flags.append(~(jnp.all(is_exact) & is_in_range))
        distances.append(distance)
    arrays = [*means, weights]
    totals = unless_cancelled(
        jnp.stack(flags), arrays, distances, lambda: formed(chosen)
    )
    for i, x in safe_zip(chosen, totals):
        results[i] = x
    return results


def squared_sum(
    uses: OfLeaf, weights: Real[Array, " n"]
) -> tuple[Real[Array, "..."], Bool[Array, ""]]:
    """The sum of squared outer products, and whether all of their entries are in range.

    Factors are scaled first: the square of one may be out of range where that of the
    product is not.
    """
    (site,), factors, leaf = uses
    terms = site_terms(site, factors)
    spare = _SPARE // len(terms)
    exponents, squares = jnp.zeros(weights.shape, "int32"), []
    is_zero = weights == 0
    for x, labels in terms:
        if EXAMPLE in labels:
            assert labels[0] == EXAMPLE
            largest = largest_of_each(x)
        else:
            largest = jnp.max(jnp.abs(x), initial=0)[None]
        power = power_of_two(largest)
        is_zero = is_zero | (largest == 0)
        exponents = exponents + exponent_of(power)
        inverse = 2.0**spare / power
        x = scaled_examples(x, inverse) if EXAMPLE in labels else x * inverse[0]
        squares.append(((x * jnp.conj(x)).real, labels))
    top = jnp.max(jnp.where(is_zero, -(2**20), exponents))
    shares = times_two_to(weights, 2 * jnp.where(is_zero, -(2**10), exponents - top))
    squares.append((shares.astype(squares[0][0].dtype), (EXAMPLE,)))
    # An axis of size 1 may be missing from all terms; the reshape restores it.
    present = {label for _, labels in terms for label in labels}
    of_leaf = tuple(sorted(label for label in present if label[0] == "leaf"))
    total = contract(squares, of_leaf).reshape(leaf.shape)
    total = total * (2.0 ** (-2 * spare * len(terms)) * abs(scale_of(site)) ** 2)
    exponent = jnp.broadcast_to(2 * top, total.shape)
    return times_two_to(total, exponent), top <= _SPARE // 2


def _distances_of_rows(
    uses: OfLeaf, mean: Array, weights: Real[Array, " n"]
) -> Real[Array, "..."]:
    """The sum of squared distances, if `has_rows`.

    The rows of an example that no token selects are as far from the mean as zero is.
    """
    (site,), factors, _ = uses
    tokens, rows = rows_of_tokens(site, factors)
    _, axis = labels_of(site, 0)[str(site.rule.token)]
    moved = jnp.moveaxis(mean, axis, 0)
    mean = moved.reshape(moved.shape[0], -1)
    square = lambda x: (x * jnp.conj(x)).real
    shares = jnp.broadcast_to(weights[:, None], tokens.shape).astype(mean.real.dtype)
    apart = jnp.full(len(mean), jnp.sum(weights), shares.dtype)
    apart = apart.at[tokens].add(-shares, mode="drop")
    total = apart[:, None] * square(mean)
    distances = square(rows - mean.at[tokens].get(mode="clip"))
    total = total.at[tokens].add(shares[..., None] * distances, mode="drop")
    return jnp.moveaxis(total.reshape(moved.shape), 0, axis)


def _formed_distances(
    leaves: Sequence[OfLeaf], means: Sequence[Array], weights: Real[Array, " n"]
) -> list[Array]:
    if not leaves:
        return []
    num = weights.shape[0]
    form, arrays, size = formed_gradients(leaves, num)

    def add(totals: list[Array], block: tuple[Array, list]) -> tuple[list[Array], None]:
        weights, arrays = block
        results = []
        for total, mean, x in safe_zip(totals, means, jax.vmap(form)(arrays)):
            distance = widened(x[:, 0]) - mean[None]
            square = (distance * jnp.conj(distance)).real
            shares = jnp.expand_dims(weights.astype(total.dtype), range(1, square.ndim))
            results.append(total + jnp.sum(shares * square, axis=0))
        return results, None

    zeros = [jnp.zeros(x.shape, x.real.dtype) for x in means]
    zeros = vary_as([weights, *means, *jax.tree.leaves(arrays)], zeros)
    cut = lambda x: x.reshape(num // size, size, *x.shape[1:])
    if size == num:
        return add(zeros, (weights, arrays))[0]
    return lax.scan(add, zeros, jax.tree.map(cut, (weights, arrays)))[0]
