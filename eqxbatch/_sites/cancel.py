"""Norms and inner products of gradients whose terms may nearly cancel.

A gradient may be a sum of terms which nearly cancel: uses of a leaf, or positions.
Products of pairs of them are much larger than their sum then, and so are their errors.
Such gradients are formed, a few at a time: the error of a formed gradient is that of
plain JAX.

Sums of squares of per-example gradients, entry by entry, follow at the end. The squares
of an outer product are the outer product of the squares of its factors, so that their
sum over examples is one product more. Gradients of a table are zero but for the rows
that tokens select. Other gradients are formed, a few at a time.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree, Real

from .._base.branches import is_any
from .._base.dtypes import (
    common_power_of_two,
    exponent_of,
    largest_of_each,
    power_of_two,
    scaled_examples,
    squared_norm,
    times_two_to,
    widened,
)
from .._base.mesh import is_on_mesh, num_parts, vary_as
from .._base.platforms import platform
from .._base.structs import vary
from .._base.trees import safe_zip
from .._base.versions import varying
from .._batch.blocks import cut_rows, join_rows
from .axes import Axes, axes_in, Axis, EXAMPLE, Named, Role
from .contract import contract
from .factors import Factor, Factors, scale_of
from .formed import gradients, rows_of_tokens, selects_rows
from .gram import gram, OfLeaf, squares
from .inner_product import AbstractInnerProduct, PlainProduct
from .site import axes_of, has_named_axes, is_outer_product, is_sum, Site


# How much larger than the squared norm of a gradient the sum of the squares of its
# terms may be. The error of products of pairs grows with this ratio, that of the
# gradient with its root.
MOST_CANCELLED = 64.0


def squared_norms(leaves: Sequence[OfLeaf]) -> list[Real[Array, " n"]]:
    """Squared norms of gradients with respect to each leaf, from its sites' factors."""
    norms, separate = norms_unless_cancelled(leaves)
    if not separate:
        return norms
    summed = [leaves[i] for i in separate]

    def norms_of(formed: list[Array]) -> list[Array]:
        results = []
        for (_, factors, _), x in safe_zip(summed, formed):
            unit = factors.unit
            # Weights in norms from factors are divided by the unit; in these gradients,
            # not.
            x = x if unit is None else x / unit.astype(x.real.dtype)
            results.append(squared_norm(x)[0])
        return results

    # One branch forms the gradients of all leaves that may cancel.
    totals = [norms[i] for i in separate]
    formed = lambda: _for_each_formed(summed, totals[0].shape[0], norms_of)
    flags = jnp.stack([*separate.values()])
    corrected = unless_cancelled(flags, _arrays_of(summed), totals, formed)
    for i, norm in safe_zip(separate, corrected):
        norms[i] = norm
    return norms


class Norms(NamedTuple):
    """Squared norms of gradients with respect to each leaf.

    - `cancelled`: for each leaf whose terms may cancel, by its position, whether they
        nearly do: the norm is not exact then.
    """

    squares: list[Real[Array, " n"]]
    cancelled: dict[int, Bool[Array, ""]]


def norms_unless_cancelled(leaves: Sequence[OfLeaf]) -> Norms:
    """Norms from the factors of sites, which are exact unless terms cancel."""
    norms, separate = [], {}
    for i, uses in enumerate(leaves):
        # Equal tokens are summed before they are squared, so nothing cancels later.
        if selects_rows(uses.sites):
            (site,) = uses.sites
            _, rows = rows_of_tokens(site, uses.factors)
            norms.append(squared_norm(rows))
            continue
        total, apart = squares(uses)
        norms.append(total)
        if not is_outer_product(uses.sites):
            separate[i] = jnp.any(apart > MOST_CANCELLED * total)
    return Norms(norms, separate)


def cancels(
    leaves: Sequence[OfLeaf], inners: Sequence[AbstractInnerProduct] | None = None
) -> Factor | None:
    """For each example, whether terms of the gradient of all leaves nearly cancel.

    `inners` are inner products for each leaf, plain ones by default. Returns None if
    this cannot be. The gradient of a single leaf may be zero, as that of a bias of
    attention keys.
    """
    inners = [PlainProduct()] * len(leaves) if inners is None else inners
    # A gradient that is one product has the digits of its factors.
    numbers = [i for i, uses in enumerate(leaves) if is_sum(uses.sites)]
    if not numbers:
        return None
    summed = _divided_into_range([leaves[i] for i in numbers])
    of_leaf = (inners[i].squares(uses) for i, uses in safe_zip(numbers, summed))
    pairs = safe_zip(*of_leaf)
    total, apart = (functools.reduce(jnp.add, x) for x in pairs)
    flags = apart > MOST_CANCELLED * total
    # An example is formed with all its outputs, so one that cancels is enough.
    cancelled = jnp.any(flags, axis=tuple(range(1, flags.ndim)))
    if any(factors.has_examples(sites) for sites, factors, _ in summed):
        return Factor(cancelled)
    return Factor(cancelled[0], has_examples=False)


def _divided_into_range(leaves: Sequence[OfLeaf]) -> list[OfLeaf]:
    """The same leaves, with all gradients divided by one number: squares fit then.

    Only cotangents can be that small or large: second derivatives and kernels have
    squares of operands, too.
    """
    factors = [x.factors.of(site).cotangent for x in leaves for site in x.sites]
    largest = [jnp.max(largest_of_each(x.array), initial=0) for x in factors]
    power = common_power_of_two(largest)

    def scaled(x: Factor) -> Factor:
        wide = widened(x.array)
        return x.of(wide * (1 / power).astype(wide.dtype))

    replaced = []
    for sites, factors, leaf in leaves:
        used = {site.perturbation for site in sites}
        cotangents = [
            scaled(x) if i in used and x is not None else x
            for i, x in enumerate(factors.cotangents)
        ]
        replaced.append(
            OfLeaf(sites, factors.replaced(factors.operands, cotangents), leaf)
        )
    return replaced


def grams(
    leaves: Sequence[tuple[OfLeaf, OfLeaf]],
    cancelled: Sequence[Factor | None],
    examples: Axes,
    out: Axes,
    sizes: dict[Axis, int],
    inners: Sequence[AbstractInnerProduct] | None = None,
) -> list[Array]:
    """The inner products of gradients with respect to each leaf, for two sides.

    - `cancelled`: the results of `cancels`.
    - `inners`: which inner product each leaf has; the plain one by default.
    - `examples`: the axes of the examples of both sides, which may be the same.
    - `out`: the axes of the result, which have these `sizes`.
    """
    # From factors first. These products are right unless terms cancel.
    kernels, summed = [], []
    inners = [PlainProduct()] * len(leaves) if inners is None else inners
    shape = [sizes[axis] for axis in out]
    for i, (uses, other) in enumerate(leaves):
        kernels.append(inners[i].gram(uses, other, examples[-1], out))
        if is_sum(uses.sites) or is_sum(other.sites):
            # The branch returns full arrays, also along axes that no factor has.
            kernels[-1] = jnp.broadcast_to(kernels[-1], shape)
            summed.append(i)
    if not summed:
        return kernels
    # If they do, both sides are formed, a few examples at a time, and multiplied.
    sides = [*safe_zip(*(leaves[i] for i in summed))]
    nums = [sizes[axis] for axis in examples]
    places = [out.index(axis) for axis in examples]

    def products(first: list[Array], second: list[Array]) -> list[Array]:
        result = []
        for i, uses, other, x, y in safe_zip(summed, *sides, first, second):
            # In a metric, coordinates are what has the plain product.
            x, y = (inners[i].coordinates(Factor(z)) for z in (x, y))
            formed = uses.perturbed_itself(x), other.perturbed_itself(y)
            product = gram(*formed, examples[-1], out)
            # Of one example on each side; a loop puts the axes of examples in front.
            full = [1 if axis in examples else sizes[axis] for axis in out]
            result.append(jnp.squeeze(jnp.broadcast_to(product, full), places))
        return result

    def formed() -> list[Array]:
        num = len(summed)
        if len(examples) == 1:
            # Each example meets itself only, so one loop forms both sides.
            pair = lambda formed: products(formed[:num], formed[num:])
            stacked = _for_each_formed([*sides[0], *sides[1]], nums[0], pair)
        else:
            # For each example of the first side, all of the second are formed again.
            row = lambda first: _for_each_formed(
                sides[1], nums[1], lambda second: products(first, second)
            )
            stacked = _for_each_formed(sides[0], nums[0], row)
        return [jnp.moveaxis(x, [*range(len(places))], places) for x in stacked]

    both = [*sides[0], *sides[1]]
    # One example that cancels decides for the whole block.
    flags = jnp.stack([jnp.any(x.array) for x in cancelled if x is not None])
    totals = [kernels[i] for i in summed]
    corrected = unless_cancelled(flags, _arrays_of(both), totals, formed)
    for i, x in safe_zip(summed, corrected):
        kernels[i] = x
    return kernels


def _arrays_of(leaves: Sequence[OfLeaf]) -> list[Array]:
    return [x.array for uses in leaves for x in uses.factors.present]


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
            # Branches must have equal types, on a mesh also in what they vary over.
            vary(x.astype(y.dtype), varying(jax.typeof(y)))
            for x, y in safe_zip(formed(), totals)
        ]

    return lax.cond(is_any(flags), other, lambda: totals)


def _for_each_formed(
    leaves: Sequence[OfLeaf], num: int, fun: Callable[[list[Array]], list[Array]]
) -> list[Array]:
    """`fun` of the gradients of each example, which are formed a few at a time.

    It takes one gradient with an axis of size 1 in front for each leaf.
    """
    forming = formed_gradients(leaves, num)
    one = lambda args: fun(forming.form(args[1]))
    # There may be no arrays that differ between examples.
    args = jnp.arange(num), forming.arrays
    if forming.steps == 1:
        return jax.vmap(one)(args)
    stacked = lax.map(jax.vmap(one), forming.cut(args))
    return [join_rows(x, 0, forming.parts) for x in stacked]


class Forming(NamedTuple):
    """How to form the gradients of one example.

    - `form`: takes the arrays of an example, and returns one gradient with an axis of
        size 1 in front for each leaf.
    - `arrays`: those of all examples.
    - `steps`: how many times gradients are formed, each time of as many examples.
    - `parts`: as in [`eqxbatch.Blocks`][]: each step has a share of every part.
    """

    form: Callable[[list[list[Array]]], list[Array]]
    arrays: list[list[Array]]
    steps: int
    parts: int = 1

    def cut(self, tree: PyTree) -> PyTree:
        """The rows of each step, along a new axis 0."""
        size = lambda x: x.shape[0] // self.steps
        cut = lambda x: cut_rows(x, 0, self.steps, size(x), self.parts)
        return jax.tree.map(cut, tree)


def formed_gradients(leaves: Sequence[OfLeaf], num: int) -> Forming:
    """How to form the gradients of `num` examples, a few at a time."""
    separate = [x.with_own_factors() for x in leaves]

    def gradient(of_leaf: OfLeaf, arrays: list[Array]) -> Array:
        sites, factors, leaf = of_leaf
        remaining = iter(arrays)

        def of_one(x: Factor | None) -> Factor | None:
            if x is None or not x.has_examples:
                return x
            return x.of(next(remaining)[None])

        operands = [*map(of_one, factors.operands)]
        cotangents = [*map(of_one, factors.cotangents)]
        outputs, values = factors.outputs, factors.values
        of_example = Factors(operands, cotangents, outputs, values=values)
        formed = gradients(sites, of_example, leaf)
        return formed if of_example.has_examples(sites) else formed[None]

    # A loop cuts what has examples. What they share is the same in each step.
    arrays = [[x.array for x in y.factors.present if x.has_examples] for y in separate]
    form = lambda arrays: [*map(gradient, separate, arrays)]
    rows, parts = jax.tree.leaves(arrays), 1
    if any(map(is_on_mesh, rows)):
        parts = num_parts(rows, (0,) * len(rows), num)
        if parts == 1:
            # A loop would gather examples on all devices.
            return Forming(form, arrays, 1)
    formed, num = sum(map(_bytes_of_gradient, separate)), num // parts
    size = platform().block_bytes // max(4 * formed, 1)
    # Without a remainder, which would be compiled separately.
    size = next(i for i in range(max(min(size, num), 1), 0, -1) if num % i == 0)
    return Forming(form, arrays, max(num // size, 1), parts)


def _bytes_of_gradient(uses: OfLeaf) -> int:
    sites, factors, leaf = uses
    outputs = factors.of(sites[0]).cotangent.shape_of_one(len(factors.outputs))
    return math.prod([*outputs, *leaf.shape]) * leaf.dtype.itemsize


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
    # Squares of factors save nothing if the gradient has no more entries.
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
    # Rows of tables, then sums of squares where these are products, or else formed
    # gradients. A leaf without sites has zeros.
    results = [jnp.zeros(x.shape, x.real.dtype) for x in means]
    squared, apart = [], []
    for i, x in enumerate(leaves):
        if selects_rows(x.sites):
            results[i] = _distances_of_rows(x, means[i], weights)
        elif x.sites:
            is_product = num >= _FEWEST and has_products_of_squares(x.sites)
            (squared if is_product else apart).append(i)

    def formed(which: Sequence[int]) -> list[Array]:
        return _formed_distances(
            [leaves[i] for i in which], [means[i] for i in which], weights
        )

    for i, x in safe_zip(apart, formed(apart)):
        results[i] = x
    if not squared:
        return results
    # A sum of squares minus that of the mean loses digits where both are close: one
    # entry, or a square out of range, is enough to form the gradients.
    distances, flags = [], []
    for i in squared:
        square, is_in_range = squared_sum(leaves[i], weights)
        mean = means[i]
        distance = square - jnp.sum(weights) * (mean * jnp.conj(mean)).real
        is_exact = (square <= MOST_CANCELLED * distance) | (square == 0)
        flags.append(~(jnp.all(is_exact) & is_in_range))
        distances.append(distance)
    arrays = [*means, weights]
    totals = unless_cancelled(
        jnp.stack(flags), arrays, distances, lambda: formed(squared)
    )
    for i, x in safe_zip(squared, totals):
        results[i] = x
    return results


class SquaredSum(NamedTuple):
    """A sum of squares, and whether all of them are in range."""

    total: Real[Array, "..."]
    is_in_range: Bool[Array, ""]


def squared_sum(uses: OfLeaf, weights: Real[Array, " n"]) -> SquaredSum:
    """The sum of squared outer products.

    Factors are scaled first: the square of one may be out of range where that of the
    product is not.
    """
    (site,), factors, leaf = uses
    # Each factor of an example is divided by a power of two, which is exact, and times
    # `2**spare`, so that small entries keep digits when they are squared.
    terms = factors.gradient_terms(site)
    spare = _SPARE // len(terms)
    exponents, squares = jnp.zeros(weights.shape, "int32"), []
    is_zero = weights == 0
    for x, axes in terms:
        if EXAMPLE in axes:
            assert axes[0] == EXAMPLE
            largest = largest_of_each(x)
        else:
            largest = jnp.max(jnp.abs(x), initial=0)[None]
        power = power_of_two(largest)
        is_zero = is_zero | (largest == 0)
        exponents = exponents + exponent_of(power)
        inverse = 2.0**spare / power
        x = scaled_examples(x, inverse) if EXAMPLE in axes else x * inverse[0]
        squares.append(Named((x * jnp.conj(x)).real, axes))
    # Examples are weighted relative to the largest one. Zeros have no exponent: they
    # are below all others, and their share is 0.
    top = jnp.max(jnp.where(is_zero, -(2**20), exponents))
    shares = times_two_to(weights, 2 * jnp.where(is_zero, -(2**10), exponents - top))
    squares.append(Named(shares.astype(squares[0].array.dtype), (EXAMPLE,)))
    # An axis of size 1 may be missing from all terms; the reshape restores it.
    of_leaf = tuple(sorted(x for x in axes_in(terms) if x.role is Role.LEAF))
    total = contract(squares, of_leaf).reshape(leaf.shape)
    # All powers of two are taken back at the end.
    total = total * (2.0 ** (-2 * spare * len(terms)) * abs(scale_of(site)) ** 2)
    exponent = jnp.broadcast_to(2 * top, total.shape)
    return SquaredSum(times_two_to(total, exponent), top <= _SPARE // 2)


def _distances_of_rows(
    uses: OfLeaf, mean: Array, weights: Real[Array, " n"]
) -> Real[Array, "..."]:
    """The sum of squared distances, if `selects_rows`.

    The rows of an example that no token selects are as far from the mean as zero is.
    """
    (site,), factors, _ = uses
    tokens, rows = rows_of_tokens(site, factors)
    axis = axes_of(site, 0)[str(site.rule.token)].number
    # The mean as [rows of the table, entries of a row].
    moved = jnp.moveaxis(mean, axis, 0)
    mean = moved.reshape(moved.shape[0], -1)
    square = lambda x: (x * jnp.conj(x)).real
    shares = jnp.broadcast_to(weights[:, None], tokens.shape).astype(mean.real.dtype)
    # The weight of the examples that do not select a row. A place without a token has
    # the number of rows for one, which is dropped.
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
    forming = formed_gradients(leaves, num)

    def add(totals: list[Array], block: tuple[Array, list]) -> tuple[list[Array], None]:
        weights, arrays = block
        results = []
        formed = jax.vmap(forming.form)(arrays)
        for total, mean, x in safe_zip(totals, means, formed):
            distance = widened(x[:, 0]) - mean[None]
            square = (distance * jnp.conj(distance)).real
            shares = jnp.expand_dims(weights.astype(total.dtype), range(1, square.ndim))
            results.append(total + jnp.sum(shares * square, axis=0))
        return results, None

    zeros = [jnp.zeros(x.shape, x.real.dtype) for x in means]
    # What a loop carries must vary over a mesh as what is added to it.
    rows = weights, forming.arrays
    zeros = vary_as([*means, *jax.tree.leaves(rows)], zeros)
    if forming.steps == 1:
        return add(zeros, rows)[0]
    return lax.scan(add, zeros, forming.cut(rows))[0]
