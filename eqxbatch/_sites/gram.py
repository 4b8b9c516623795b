"""Inner products and norms of gradients, from the factors of pairs of sites.

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

from .._base.dtypes import widened
from .._base.mesh import full_varying_as, vary, varying
from .einsum import aligned, contract, EXAMPLE, Labels, Term
from .factors import (
    Factor,
    Factors,
    has_weights,
    labelled_terms,
    site_terms,
    weight_terms,
)
from .site import (
    has_few_directions,
    is_allowed,
    is_outer_product,
    Label,
    labels_of,
    Site,
    SiteLoop,
)


# A leaf with more sites, as in an unrolled loop, has so many pairs of sites that
# tracing their products takes seconds.
MOST_SITES = 16


def has_gram(sites: Sequence[Site], others: Sequence[Site] | None = None) -> bool:
    """Whether factors suffice for inner products of the gradients at the sites.

    All sites are those of one leaf, and so are the `others`.
    """
    first = [own for own, *_ in _groups(sites)]
    second = first if others is None else [own for own, *_ in _groups(others)]
    if len(first) * len(second) > MOST_SITES**2:
        return False
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
        key = (view.key, view.windows, rule.kind, rule.key, site.loops)
        # A small site is no longer small once it is merged into a loop.
        key = (number,) if has_few_directions(site) else key
        groups.setdefault(key, []).append(site)
    return [*groups.values()]


def _merged(sites: Sequence[Site], factors: Factors) -> tuple[list[Site], Factors]:
    """Merges sites that are alike into the steps of a loop."""
    groups = _groups(sites)
    if len(groups) == len(sites):
        return [*sites], factors
    no_factor = Factor(None, False)
    merged, operands, cotangents = [], [], []
    for number, group in enumerate(groups):
        pairs = [factors.of(site) for site in group]
        own = group[0].with_own(number, None if pairs[0][0] is None else number)
        if len(group) > 1:
            loop = SiteLoop((-1, len(group)), False, len(group))
            own = dataclasses.replace(own, loops=(loop, *own.loops))
            stacked = _stacked([d for _, d in pairs], len(factors.outputs))
            cotangents.append(stacked)
            found = [a for a, _ in pairs if a is not None]
            operands.append(_stacked(found, 0) if found else no_factor)
        else:
            operands.append(pairs[0][0] or no_factor)
            cotangents.append(pairs[0][1])
        merged.append(own)
    return merged, factors.replaced(operands, cotangents)


def _stacked(parts: list[Factor], num_outputs: int) -> Factor:
    """Stacks factors of several sites on a new axis after examples and outputs."""
    arrays = [x.array for x in parts]
    has_examples = any(x.has_examples for x in parts)
    if has_examples:
        num = next(x.array.shape[0] for x in parts if x.has_examples)
        arrays = [
            x.array
            if x.has_examples
            else jnp.broadcast_to(x.array, (num, *x.array.shape))
            for x in parts
        ]
    return Factor(jnp.stack(arrays, has_examples + num_outputs), has_examples)


class _Side(NamedTuple):
    """A site in a pair: its factors, and the labels of the examples and its axes."""

    site: Site
    factors: Factors
    example: Label
    labels: dict[str, Label]
    small: Label

    @property
    def token(self) -> tuple[Array, Labels, Label] | None:
        """The tokens, if there are any, and the axis that they index."""
        if self.site.rule.token is None:
            return None
        a, _ = self.site_terms
        return *a, self.labels[self.site.rule.token]

    @property
    def site_terms(self) -> list[Term]:
        return labelled_terms(self.site, self.factors, self.example, self.labels)

    @property
    def terms(self) -> list[Term]:
        """The cotangent, weights, and the operand if it does not consist of tokens."""
        *operand, cotangent = self.site_terms
        values, unit = self.factors.values, self.factors.unit
        weights = weight_terms(self.site, values, self.labels, unit)
        if self.token is not None:
            return [cotangent, *(_taken(term, self.token) for term in weights)]
        return [cotangent, *operand, *weights]

    @property
    def coefficients(self) -> Term:
        """The gradient with respect to a small view, flattened."""
        present = {label for _, own in self.site_terms for label in own}
        lead = (self.example, *self.factors.outputs)
        lead = tuple(label for label in lead if label in present)
        of_view = [self.labels[name] for name in self.site.w_axes]
        out = (*lead, *(label for label in of_view if label in present))
        x = contract(self.site_terms, out)
        num = math.prod(self.site.view.shape)
        return x.reshape(*x.shape[: len(lead)], num), (*lead, self.small)

    @property
    def directions(self) -> Array:
        """The Jacobian of a small view with respect to the leaf, row by row."""
        view, values = self.site.view, self.factors.values
        leaf = full_varying_as(view.type_of_leaf, 0)
        struct = view.struct(leaf, values)
        num = math.prod(struct.shape)
        seeds = jnp.eye(num, dtype=struct.dtype).reshape(num, *struct.shape)
        back = view.transposed(leaf, values)
        return widened(jax.vmap(back)(vary(seeds, varying(struct))))

    def along(self, directions: Array, small: Label) -> list[Term]:
        """The inner products of the gradients at the site with some directions."""
        view, values = self.site.view, self.factors.values
        dtype = view.type_of_leaf.dtype
        apply = lambda x: view.apply(x.astype(dtype), values)
        sizes = [self.site.sizes[name] for name in self.site.w_axes]
        pushed = widened(jax.vmap(apply)(directions))
        pushed = pushed.reshape(pushed.shape[0], *sizes)
        names = tuple(self.labels[name] for name in self.site.w_axes)
        term = (pushed, (small, *names))
        *operand, cotangent = self.site_terms
        if self.token is not None:
            return [cotangent, _taken(term, self.token)]
        return [cotangent, *operand, term]


def _scale(site: Site) -> Any:
    """The number that multiplies the terms of a site; no view is transposed here."""
    return site.rule.scale * (1.0 if has_weights(site) else site.view.scale)


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def pair_terms(
    site: Site, factors: Factors, other: Site, other_factors: Factors, example: Label
) -> tuple[list[Term], Any]:
    """The arrays whose contraction is the inner product of two sites' gradients.

    Also returns a factor for it. `example` is the label of the other side's examples.
    """
    first, second = (
        _Side(s, f, lead, labels_of(s, side), ("small", side))
        for side, (s, f, lead) in enumerate(
            [(site, factors, EXAMPLE), (other, other_factors, example)]
        )
    )
    if has_few_directions(site) or has_few_directions(other):
        return _small_terms(first, second)
    terms = [first.terms, second.terms]
    tokens = [first.token, second.token]
    if tokens[0] is not None and tokens[1] is not None and tokens[0][2] == tokens[1][2]:
        same, labels = _equal(tokens[0][:2], tokens[1][:2])
        terms[0].append((same.astype(terms[0][0][0].real.dtype), labels))
    else:
        for side, token in enumerate(tokens):
            if token is not None:
                terms[1 - side] = [_taken(term, token) for term in terms[1 - side]]
    conjugated = [(jnp.conj(x), labels) for x, labels in terms[1]]
    return [*terms[0], *conjugated], _scale(site) * _scale(other).conjugate()


def _small_terms(first: _Side, second: _Side) -> tuple[list[Term], Any]:
    """Like `pair_terms`, if one of the sites is small, such as that of a penalty."""
    scale = first.site.rule.scale * second.site.rule.scale
    if has_few_directions(first.site) and has_few_directions(second.site):
        flat = ("flat", 0)
        directions = [
            (_flat(side.directions), (side.small, flat)) for side in (first, second)
        ]
        return [first.coefficients, *directions, second.coefficients], scale
    if has_few_directions(first.site):
        terms = second.along(first.directions, first.small)
        return [first.coefficients, *terms], scale
    terms = first.along(second.directions, second.small)
    return [*terms, second.coefficients], scale


def _equal(first: Term, second: Term) -> Term:
    """A mask of tokens that select the same row."""
    (x, x_labels), (y, y_labels) = first, second
    labels = (*x_labels, *(label for label in y_labels if label not in x_labels))
    return aligned(x, x_labels, labels) == aligned(y, y_labels, labels), labels


def _taken(term: Term, token: tuple[Array, Labels, Label]) -> Term:
    """A term at the rows of a table that the tokens select.

    Along shared axes, such as those of the examples or of the steps of a `scan` over
    tables, each entry has its own tokens.
    """
    (x, labels), (tokens, token_labels, chosen) = term, token
    if chosen not in labels:
        return term
    shared = [label for label in token_labels if label in labels]
    rest = tuple(label for label in labels if label not in shared)
    own = tuple(label for label in token_labels if label not in shared)
    axis = rest.index(chosen)

    def take(x: Array, tokens: Array) -> Array:
        return jnp.take(x, tokens, axis=axis, mode="fill", fill_value=0)

    # The innermost axis comes first, so that outer axes still exist.
    for i, label in reversed([*enumerate(shared)]):
        later = shared[i:]
        in_axes = [
            [other for other in names if other not in shared or other in later].index(
                label
            )
            for names in (labels, token_labels)
        ]
        take = jax.vmap(take, tuple(in_axes))
    return take(x, tokens), (*shared, *rest[:axis], *own, *rest[axis + 1 :])


def gram(
    sites: Sequence[Site],
    factors: Factors,
    others: Sequence[Site],
    other_factors: Factors,
    example: Label,
    out: Labels,
) -> Inexact[Array, "..."]:
    """Inner products of gradients with respect to a leaf, from its sites' factors.

    `example` is the label of the other side's examples, and `out` are the labels of the
    result; axes that no factor has get size 1. A complex leaf counts as its real and
    its imaginary part.
    """
    total = 0
    for terms, scale in gram_terms(sites, factors, others, other_factors, example):
        present = {label for _, labels in terms for label in labels}
        product = contract(terms, tuple(label for label in out if label in present))
        missing = [axis for axis, label in enumerate(out) if label not in present]
        total += jnp.expand_dims(jnp.real(product * scale), missing)
    return jnp.asarray(total)


def gram_terms(
    sites: Sequence[Site],
    factors: Factors,
    others: Sequence[Site],
    other_factors: Factors,
    example: Label,
) -> Iterator[tuple[list[Term], Any]]:
    """The arrays to contract for `gram`, each with a factor."""
    sites, factors = _merged(sites, factors)
    others, other_factors = _merged(others, other_factors)
    for site in sites:
        for other in others:
            yield pair_terms(site, factors, other, other_factors, example)


def norm_terms(
    sites: Sequence[Site], factors: Factors
) -> Iterator[tuple[list[Term], Any]]:
    """The arrays to contract for a squared norm, each with a factor.

    The squared norm is the sum of the real parts, for each site and each pair of sites.
    """
    sites, factors = _merged(sites, factors)
    for i, site in enumerate(sites):
        yield _own_terms(site, factors)
        for other in sites[i + 1 :]:
            terms, scale = pair_terms(site, factors, other, factors, EXAMPLE)
            yield terms, 2 * scale


def _own_terms(site: Site, factors: Factors) -> tuple[list[Term], Any]:
    """The arrays whose contraction is the squared norm of a site's gradient."""
    if not is_outer_product([site]) or has_few_directions(site):
        return pair_terms(site, factors, site, factors, EXAMPLE)
    # The norm of an outer product is the product of the norms.
    terms = [
        (jnp.real(x * jnp.conj(x)), labels) for x, labels in site_terms(site, factors)
    ]
    return terms, abs(_scale(site)) ** 2


def squares(
    sites: Sequence[Site], factors: Factors
) -> tuple[Real[Array, "n *outputs"], Real[Array, "n *outputs"]]:
    """The squared norms of gradients, and what they would be if no two terms met.

    An axis along which no factor differs has size 1.
    """
    sites, factors = _merged(sites, factors)
    total: Any = 0
    for terms, scale in norm_terms(sites, factors):
        total += jnp.real(_for_each(terms, factors) * scale)
    separate = [_separate_squares(site, factors) for site in sites]
    return jnp.maximum(total, 0), functools.reduce(jnp.add, separate)


def _for_each(terms: list[Term], factors: Factors) -> Array:
    out = EXAMPLE, *factors.outputs
    present = {label for _, labels in terms for label in labels}
    found = contract(terms, tuple(label for label in out if label in present))
    return jnp.expand_dims(found, [i for i, x in enumerate(out) if x not in present])


def _separate_squares(site: Site, factors: Factors) -> Array:
    """The squared norms of the gradients at a site if no two positions met."""
    side = _Side(site, factors, EXAMPLE, labels_of(site, 0), ("small", 0))
    terms, scale = side.terms, _scale(site)
    if has_few_directions(site):
        directions = _flat(side.directions), (side.small, ("flat", 0))
        terms, scale = [side.coefficients, directions], site.rule.scale
    terms = [(jnp.real(x * jnp.conj(x)), labels) for x, labels in terms]
    return _for_each(terms, factors) * abs(scale) ** 2
