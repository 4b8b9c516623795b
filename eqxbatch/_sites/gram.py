"""Inner products of gradients, from the factors of pairs of sites.

No gradient is formed. See `site.py` for the sites where this is exact.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import (
    product_of_squares,
    Squares,
    squares_in_range,
    widened,
)
from .._base.structs import full_varying_as, vary
from .._base.trees import safe_zip
from .._base.versions import varying
from .axes import Axes, axes_in, Axis, EXAMPLE, Named, Role
from .contract import aligned, contract
from .factors import Factor, Factors, has_weights, SiteTerms
from .formed import gradients
from .site import (
    axes_of,
    has_few_directions,
    is_allowed,
    is_outer_product,
    leaf_site,
    Site,
)
from .table import SiteTable
from .views import Loop


# A leaf with more sites, as in an unrolled loop, has so many pairs of sites that
# tracing their products takes seconds.
MOST_SITES = 16


def has_gram(sites: Sequence[Site], others: Sequence[Site] | None = None) -> bool:
    """Whether factors suffice for inner products of the gradients at the sites.

    All sites are those of one leaf, and so are the `others`.
    """
    others = sites if others is None else others
    if len(_groups(sites)) * len(_groups(others)) > MOST_SITES**2:
        return False
    return has_products(sites, others)


def has_products(sites: Sequence[Site], others: Sequence[Site]) -> bool:
    """Whether inner products of the gradients at sites follow from their factors."""
    # Sites of a group are alike, so the first one answers for all.
    first, second = ([group for group, *_ in _groups(x)] for x in (sites, others))
    return all(is_allowed("gram", site, other) for site in first for other in second)


def _groups(sites: Sequence[Site]) -> list[list[Site]]:
    """Groups the sites: if there are many, those that are alike are merged.

    Uses of a leaf in an unrolled loop are then handled like those in a `scan`.
    """
    if len(sites) <= MOST_SITES:
        return [[site] for site in sites]
    groups: dict[tuple, list[Site]] = {}
    for number, site in enumerate(sites):
        view, rule = site.view, site.rule
        key = (view.key, view.loops, rule.kind, rule.key, site.loops)
        # A small site is no longer small once it is merged into a loop.
        key = (number,) if has_few_directions(site) else key
        groups.setdefault(key, []).append(site)
    return [*groups.values()]


class OfLeaf(NamedTuple):
    """A leaf, its sites, and their factors."""

    sites: Sequence[Site]
    factors: Factors
    leaf: Any

    def with_own_factors(self) -> "OfLeaf":
        """The sites in order, and the factors of these only."""
        return self._grouped([[site] for site in self.sites])

    def merged(self) -> "OfLeaf":
        """Merges sites that are alike into the steps of a loop."""
        groups = _groups(self.sites)
        return self if len(groups) == len(self.sites) else self._grouped(groups)

    def jacobian(self) -> Factor:
        """The gradients, which are formed."""
        return Factor(gradients(*self), self.factors.has_examples(self.sites))

    def perturbed_itself(self, jacobian: Factor) -> "OfLeaf":
        """The leaf with its gradients as the cotangent of its only site."""
        factors = Factors([], [jacobian], self.factors.outputs)
        return OfLeaf([leaf_site(0, self.leaf, 0)], factors, self.leaf)

    def _grouped(self, groups: Sequence[Sequence[Site]]) -> "OfLeaf":
        """A site for each group, and the factors of these only."""
        factors = self.factors
        merged, operands, cotangents, every_which = [], [], [], []
        for number, group in enumerate(groups):
            of_a, of_d, of_which = map(list, safe_zip(*map(factors.of, group)))
            of_which = [x for x in of_which if x is not None]
            # What says which groups are met comes after all other operands.
            site = group[0].with_own(number, number, len(groups) + len(every_which))
            if len(group) > 1:
                # As a loop whose number no loop of a program has.
                site = site.within(Loop(-1, len(group)))
                of_d = [_as_steps(of_d, len(factors.outputs))]
                of_a = [None if of_a[0] is None else _as_steps(of_a, 0)]
                of_which = [_as_steps(of_which, 0)] if of_which else []
            merged.append(site)
            operands.append(of_a[0])
            cotangents.append(of_d[0])
            every_which += of_which
        factors = factors.replaced([*operands, *every_which], cotangents)
        return OfLeaf(merged, factors, self.leaf)


def of_leaf(table: SiteTable, factors: Factors, leaf: int) -> OfLeaf:
    """A leaf with the factors of its sites, or with its gradients if formed."""
    uses = OfLeaf(table.of(leaf), factors, table.leaves[leaf])
    jacobian = factors.jacobians.get(leaf)
    return uses if jacobian is None else uses.perturbed_itself(jacobian)


def _as_steps(parts: Sequence[Factor], num_outputs: int) -> Factor:
    """Factors of several sites as those of the steps of a loop.

    The new axis comes after those of examples and outputs.
    """
    arrays = [x.array for x in parts]
    has_examples = any(x.has_examples for x in parts)
    if has_examples:
        # If one factor differs between examples, the shared ones are repeated.
        num = next(x.array.shape[0] for x in parts if x.has_examples)
        arrays = [
            x.array
            if x.has_examples
            else jnp.broadcast_to(x.array, (num, *x.array.shape))
            for x in parts
        ]
    return Factor(jnp.stack(arrays, has_examples + num_outputs), has_examples)


class ScaledTerms(NamedTuple):
    """Arrays whose contraction, times a number, is what is wanted."""

    terms: list[Named]
    scale: Any

    def contracted(self, out: Axes) -> Array:
        """Has axes of size 1 for those of `out` that no term has."""
        # A sum over terms that lack an axis has one entry along it, which broadcasts.
        present = axes_in(self.terms)
        product = contract(self.terms, tuple(axis for axis in out if axis in present))
        missing = [i for i, axis in enumerate(out) if axis not in present]
        return jnp.expand_dims(product * self.scale, missing)

    def squared(self) -> "ScaledTerms":
        """The squares, of absolute values, of terms that have all axes."""
        squares = [Named(jnp.real(x * jnp.conj(x)), axes) for x, axes in self.terms]
        return ScaledTerms(squares, abs(self.scale) ** 2)


class _Tokens(NamedTuple):
    """The rows of a table that each entry selects, and the axis of the table."""

    rows: Named
    axis: Axis


@dataclasses.dataclass(frozen=True)
class _Side:
    """The site with a `number` in a pair, its factors, and the axis of examples."""

    site: Site
    factors: Factors
    example: Axis = EXAMPLE
    number: int = 0

    @functools.cached_property
    def axes(self) -> dict[str, Axis]:
        """Its axes by name."""
        return axes_of(self.site, self.number)

    @property
    def small(self) -> Axis:
        """The axis of the entries of a small view."""
        return Axis(Role.SMALL, side=self.number)

    @property
    def tokens(self) -> _Tokens | None:
        if self.site.rule.token is None:
            return None
        rows = self.site_terms.operand
        assert rows is not None
        return _Tokens(rows, self.axes[self.site.rule.token])

    @functools.cached_property
    def site_terms(self) -> SiteTerms:
        """The factors with their axes."""
        return self.factors.terms(self.site, self.number, example=self.example)

    @property
    def terms(self) -> list[Named]:
        """The cotangent, weights, and the operand if it does not consist of tokens."""
        return self._times(self.factors.weights(self.site, self.axes))

    def _times(self, weights: list[Named]) -> list[Named]:
        # Rows that tokens select are read, not multiplied with one-hot rows.
        *operand, cotangent = self.site_terms.present
        if self.tokens is not None:
            return [cotangent, *(_at_rows(term, self.tokens) for term in weights)]
        return [cotangent, *operand, *weights]

    @property
    def coefficients(self) -> Named:
        """The gradient with respect to a small view, flattened."""
        terms = self.site_terms.present
        present = axes_in(terms)
        lead = (self.example, *self.factors.outputs)
        # [examples, outputs, entries of the view], as far as factors have these.
        lead = tuple(axis for axis in lead if axis in present)
        of_view = [self.axes[name] for name in self.site.w_axes]
        out = (*lead, *(axis for axis in of_view if axis in present))
        x = contract(terms, out)
        num = math.prod(self.site.view.shape)
        return Named(x.reshape(*x.shape[: len(lead)], num), (*lead, self.small))

    @functools.cached_property
    def directions(self) -> Array:
        """The Jacobian of a small view with respect to the leaf, row by row."""
        view, values = self.site.view, self.factors.values
        leaf = full_varying_as(view.type_of_leaf, 0)
        struct = view.struct(leaf, values)
        num = math.prod(struct.shape)
        # A row of the Jacobian is the transpose of one entry of the view.
        seeds = jnp.eye(num, dtype=struct.dtype).reshape(num, *struct.shape)
        back = view.transposed(leaf, values)
        return widened(jax.vmap(back)(vary(seeds, varying(struct))))

    @property
    def small_terms(self) -> list[Named]:
        """The arrays whose contraction is the gradient at a small site, flattened."""
        num, *shape = self.directions.shape
        flat = self.directions.reshape(num, math.prod(shape))
        return [self.coefficients, Named(flat, (self.small, Axis(Role.ENTRY)))]

    def along(self, directions: Array, small: Axis) -> list[Named]:
        """The inner products of the gradients at the site with some directions."""
        view, values = self.site.view, self.factors.values
        dtype = view.type_of_leaf.dtype
        apply = lambda x: view.apply(x.astype(dtype), values)
        sizes = [self.site.sizes[name] for name in self.site.w_axes]
        pushed = widened(jax.vmap(apply)(directions))
        pushed = pushed.reshape(pushed.shape[0], *sizes)
        of_view = (self.axes[name] for name in self.site.w_axes)
        return self._times([Named(pushed, (small, *of_view))])


def _scale(site: Site) -> Any:
    """The number that multiplies the terms of a site; no view is transposed here."""
    return site.rule.scale * (1.0 if has_weights(site) else site.view.scale)


def _pair_terms(first: _Side, second: _Side) -> ScaledTerms:
    """The terms of the inner product of two sites' gradients."""
    if has_few_directions(first.site) or has_few_directions(second.site):
        return _small_terms(first, second)
    terms = [first.terms, second.terms]
    both = [first.tokens, second.tokens]
    if both[0] is not None and both[1] is not None and both[0].axis == both[1].axis:
        # Only entries that select the same row meet.
        same, axes = _equal(both[0].rows, both[1].rows)
        terms[0].append(Named(same.astype(terms[0][0].array.real.dtype), axes))
    else:
        # The other side is read at the rows that tokens select.
        for side, tokens in enumerate(both):
            if tokens is not None:
                terms[1 - side] = [_at_rows(term, tokens) for term in terms[1 - side]]
    # The inner product of complex gradients is the real part of `x` times the conjugate
    # of `y`.
    conjugated = [Named(jnp.conj(x), axes) for x, axes in terms[1]]
    scale = _scale(first.site) * _scale(second.site).conjugate()
    return ScaledTerms([*terms[0], *conjugated], scale)


def _small_terms(first: _Side, second: _Side) -> ScaledTerms:
    """Like `_pair_terms`, if one of the sites is small, such as that of a penalty."""
    scale = first.site.rule.scale * second.site.rule.scale
    if has_few_directions(first.site) and has_few_directions(second.site):
        return ScaledTerms([*first.small_terms, *second.small_terms], scale)
    if has_few_directions(first.site):
        # The other gradient is needed along these directions only, and is not formed.
        terms = second.along(first.directions, first.small)
        return ScaledTerms([first.coefficients, *terms], scale)
    terms = first.along(second.directions, second.small)
    return ScaledTerms([*terms, second.coefficients], scale)


def _equal(first: Named, second: Named) -> Named:
    """A mask of tokens that select the same row."""
    # [tokens of one side, tokens of the other], with one axis for what both have.
    axes = tuple(axes_in([first, second]))
    return Named(aligned(*first, axes) == aligned(*second, axes), axes)


def _at_rows(term: Named, selected: _Tokens) -> Named:
    """A term at the rows of a table that the tokens select.

    Along shared axes, such as those of the examples or of the steps of a `scan` over
    tables, each entry has its own tokens.
    """
    (x, axes), ((tokens, of_tokens), chosen) = term, selected
    if chosen not in axes:
        return term
    shared = [axis for axis in of_tokens if axis in axes]
    unshared = tuple(axis for axis in axes if axis not in shared)
    free = tuple(axis for axis in of_tokens if axis not in shared)
    place = unshared.index(chosen)

    def take(x: Array, tokens: Array) -> Array:
        return jnp.take(x, tokens, axis=place, mode="fill", fill_value=0)

    # The innermost axis comes first, so that outer axes still exist.
    for i, axis in reversed([*enumerate(shared)]):
        mapped = shared[:i]
        in_axes = [
            [other for other in both if other not in mapped].index(axis)
            for both in (axes, of_tokens)
        ]
        take = jax.vmap(take, tuple(in_axes))
    taken = (*shared, *unshared[:place], *free, *unshared[place + 1 :])
    return Named(take(x, tokens), taken)


def gram(
    uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes
) -> Inexact[Array, "..."]:
    """Inner products of gradients with respect to a leaf, from its sites' factors.

    `example` is the axis of the other side's examples, and `out` are the axes of the
    result; axes that no factor has get size 1. A complex leaf counts as its real and
    its imaginary part.
    """
    pairs = gram_terms(uses, other, example)
    products = [jnp.real(pair.contracted(out)) for pair in pairs]
    if not products:
        return jnp.zeros([1] * len(out), uses.leaf.dtype).real
    return functools.reduce(jnp.add, products)


def gram_terms(
    uses: OfLeaf, other: OfLeaf, example: Axis = EXAMPLE
) -> Iterator[ScaledTerms]:
    """The terms of `gram` for each pair of sites.

    If both are the same object and each example only meets itself, these are for
    squared norms, the sums of the real parts: each pair of two sites counts twice.
    """
    # In a norm, the pair of `j` and `i` has the same real part as that of `i` and `j`.
    is_norm = uses is other and example == EXAMPLE
    uses = uses.merged()
    other = uses if is_norm else other.merged()
    for i, site in enumerate(uses.sites):
        first = _Side(site, uses.factors)
        for j, second in enumerate(other.sites):
            if (is_norm and j < i) or site.view.is_apart(second.view):
                continue
            # The norm of an outer product is the product of norms, of one side only.
            if is_norm and i == j and _has_product(site):
                terms = uses.factors.gradient_terms(site)
                yield ScaledTerms(terms, _scale(site)).squared()
                continue
            pair = _pair_terms(first, _Side(second, other.factors, example, number=1))
            is_twice = is_norm and j > i
            yield pair._replace(scale=2 * pair.scale) if is_twice else pair


def _has_product(site: Site) -> bool:
    """Whether the norm of a site's gradient is the product of those of its factors."""
    return is_outer_product([site]) and not has_few_directions(site)


class SquaredNorms(NamedTuple):
    """Squared norms of gradients, and what they would be if no two terms met."""

    total: Real[Array, "n *outputs"]
    separate: Real[Array, "n *outputs"]


def squares(uses: OfLeaf) -> SquaredNorms:
    """The squared norms of gradients, from the factors of pairs of sites.

    An axis along which no factor differs has size 1.
    """
    total, out = 0, (EXAMPLE, *uses.factors.outputs)
    for pair in gram_terms(uses, uses):
        total += jnp.real(pair.contracted(out))
    separate = [pair.contracted(out) for pair in separate_terms(uses)]
    # Rounding may leave a negative number where terms cancel.
    return SquaredNorms(jnp.maximum(total, 0), functools.reduce(jnp.add, separate))


def separate_terms(uses: OfLeaf) -> Iterator[ScaledTerms]:
    """The terms of the squared norms at each site if no two positions met."""
    uses = uses.merged()
    for site in uses.sites:
        side = _Side(site, uses.factors)
        if has_few_directions(site):
            scaled = ScaledTerms(side.small_terms, site.rule.scale)
        else:
            scaled = ScaledTerms(side.terms, _scale(site))
        yield scaled.squared()


def has_norms_of_factors(sites: Sequence[Site]) -> bool:
    """Whether a gradient is a product whose norm follows from those of its factors.

    They have no axes in common, or one of them has all axes.
    """
    if not is_outer_product(sites) or any(map(has_weights, sites)):
        return False
    (site,) = sites
    axes = _axes_of_factors(site)
    common = set.intersection(*axes)
    return not has_few_directions(site) and (not common or common in axes)


def _axes_of_factors(site: Site) -> list[set[str]]:
    """The axes of each factor that are longer than 1."""
    names = site.a_axes, site.d_axes
    return [{x for x in axes if site.sizes[x] != 1} for axes in names]


def squares_of_factors(leaves: Sequence[OfLeaf]) -> list[Squares]:
    """The squared norms of gradients, if `has_norms_of_factors`."""
    # A weight and a bias share cotangents.
    arrays: dict[tuple, Array] = {}
    by_leaf = []
    for uses in leaves:
        (site,) = uses.sites
        terms = uses.factors.gradient_terms(site)
        # Entry by entry, the product is no larger than the larger factor, and is
        # formed.
        if set.intersection(*_axes_of_factors(site)):
            axes = tuple(axes_in(terms))
            terms = [Named(contract(terms, axes), axes)]
        keys = [(id(x), EXAMPLE in axes) for x, axes in terms]
        arrays.update(safe_zip(keys, (x for x, _ in terms)))
        by_leaf.append((keys, abs(_scale(site)) ** 2))
    # All arrays go through one pass, each of them once.
    every = [x if has_examples else x[None] for (_, has_examples), x in arrays.items()]
    squares = dict(safe_zip(arrays, squares_in_range(every)))
    products = []
    for keys, scale in by_leaf:
        value, exponent = product_of_squares([squares[key] for key in keys])
        products.append(Squares(value if scale == 1 else value * scale, exponent))
    return products
