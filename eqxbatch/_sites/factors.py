"""What follows from the factors of the sites: norms, Gram matrices, weighted sums.

All arrays here have examples along axis 0. The gradient of an example with respect to a
leaf is the sum over the leaf's sites of `einsum(a, d)`, brought from the view back to
the leaf. It is only formed where that is cheaper than to do without.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._base.dtypes import widened
from .._base.mesh import is_on_mesh
from .einsum import aligned, contract, EXAMPLE, Labels, Term
from .rules import Axes
from .site import is_lettered, Label, labels_of, positions, Site


_Leaf = Array | jax.ShapeDtypeStruct  # Only its type matters.


class Factor(eqx.Module):
    """One operand or cotangent of some examples.

    `has_examples` says whether it has them along axis 0; otherwise it is the same for
    all of them.
    """

    array: Any
    has_examples: bool = eqx.field(static=True, default=True)

    def vmap(self, fun: Callable[[Array], Array], num: int = 0) -> "Factor":
        """Applies `fun` to that of each example, and along `num` axes after that."""
        for _ in range(num + self.has_examples):
            fun = jax.vmap(fun)
        return self.of(fun(self.array))

    def of(self, array: Array) -> "Factor":
        """Another array with the same examples."""
        return Factor(array, self.has_examples)


class Factors:
    """The operands and cotangents of all sites, for some examples.

    `outputs` labels the axes that the cotangents have after the examples: those of
    what is differentiated, if it is more than a scalar. `num` is the number of
    examples, where there may be no factors to tell.
    """

    def __init__(
        self,
        operands: list,
        cotangents: list,
        outputs: Labels = (),
        num: int | None = None,
    ):
        as_factor = lambda x: x if isinstance(x, Factor) else Factor(x)
        self.operands = [*map(as_factor, operands)]
        self.cotangents = [*map(as_factor, cotangents)]
        self.outputs = outputs
        self._num = num

    @property
    def num(self) -> int:
        """The number of examples."""
        if self._num is not None:
            return self._num
        factors = [*self.operands, *self.cotangents]
        return next(x.array.shape[0] for x in factors if x.has_examples)

    def where(self, is_kept: Bool[Array, " n"]) -> "Factors":
        """Zeros in place of the factors of the examples that are not kept."""

        def keep(x: Factor) -> Factor:
            is_inexact = jnp.issubdtype(x.array.dtype, jnp.inexact)
            return Factor(kept_examples(x.array, is_kept)) if is_inexact else x

        operands, cotangents = map(keep, self.operands), map(keep, self.cotangents)
        return Factors([*operands], [*cotangents], num=self._num)

    def of(self, site: Site) -> tuple[Factor | None, Factor]:
        """`a` and `d` of a site, as it has them."""
        a = None if site.operand is None else self.operands[site.operand]
        return a, self.cotangents[site.perturbation]

    def expanded(self, site: Site) -> tuple[Factor | None, Factor]:
        """`a` and `d` with the axes that the site names."""
        a, d = self.of(site)
        d = d.vmap(site.arrange, len(self.outputs))
        d = d.of(widened(d.array))
        if a is None:
            return None, d

        def expand(x: Array) -> Array:
            x = site.expand(x)
            if site.rule.token:
                return x
            if not jnp.issubdtype(x.dtype, jnp.inexact):  # A mask, or counts.
                return x.astype(d.array.dtype)
            return widened(x)

        return a.vmap(expand), d

    def has_examples(self, sites: Sequence[Site]) -> bool:
        """Whether the gradients at some sites differ from example to example."""
        return any(
            factor is not None and factor.has_examples
            for site in sites
            for factor in self.of(site)
        )


def kept_examples(x: Array, is_kept: Bool[Array, " n"]) -> Array:
    """Zeros in place of the examples that are not kept."""
    mask = jnp.expand_dims(is_kept, range(1, x.ndim))
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def _labelled(
    site: Site, factors: Factors, example: Label, labels: dict[str, Label]
) -> list[Term]:
    """The operand of a site, if it has one, and the cotangent."""
    a, d = factors.expanded(site)

    def labelled(factor: Factor, outputs: Labels, names: Axes) -> Term:
        lead = (example,) if factor.has_examples else ()
        return factor.array, (*lead, *outputs, *(labels[name] for name in names))

    cotangent = labelled(d, factors.outputs, site.d_axes)
    if a is None:
        return [cotangent]
    operand = labelled(a, (), site.a_axes)
    if site.rule.drops:
        cotangent = _without_dropped(cotangent, operand, site)
    return [operand, cotangent]


def _without_dropped(cotangent: Term, tokens: Term, site: Site) -> Term:
    """Zeros where a token chooses no row of a table at all."""
    (d, labels), (rows, token_labels) = cotangent, tokens
    missing = tuple(label for label in token_labels if label not in labels)
    # Examples come first.
    joined = (*missing, *labels)
    is_in = aligned(rows < site.sizes[str(site.rule.token)], token_labels, joined)
    d = aligned(d, labels, joined)
    return jnp.where(is_in, d, jnp.zeros((), d.dtype)), joined


def _scale(site: Site) -> Any:
    return site.view.scale * site.rule.scale


def pair_terms(
    site: Site, factors: Factors, other: Site, other_factors: Factors, example: Label
) -> list[Term]:
    """The arrays whose contraction is the inner product of two sites' gradients.

    `example` is the label of the other's examples.
    """
    sides = [(site, factors, EXAMPLE), (other, other_factors, example)]
    terms: list[list[Term]] = []
    tokens: list[tuple[Array, Labels, Label] | None] = []
    for side, (s, f, lead) in enumerate(sides):
        labels = labels_of(s, side)
        *operand, cotangent = _labelled(s, f, lead, labels)
        terms.append([cotangent])
        if s.rule.token is not None:
            ((a, a_labels),) = operand
            tokens.append((a, a_labels, labels[s.rule.token]))
        else:
            tokens.append(None)
            terms[-1] += operand
    first, second = tokens
    if first is not None and second is not None and first[2] == second[2]:
        same, labels = _equal(first[:2], second[:2])
        terms[0].append((same.astype(terms[0][0][0].real.dtype), labels))
    else:
        for side, token in enumerate(tokens):
            if token is not None:
                terms[1 - side] = [_taken(term, token) for term in terms[1 - side]]
    conjugated = [(jnp.conj(x), labels) for x, labels in terms[1]]
    return [*terms[0], *conjugated]


def _equal(first: Term, second: Term) -> Term:
    """Where tokens choose the same row."""
    (x, x_labels), (y, y_labels) = first, second
    labels = (*x_labels, *(label for label in y_labels if label not in x_labels))
    return aligned(x, x_labels, labels) == aligned(y, y_labels, labels), labels


def _taken(term: Term, token: tuple[Array, Labels, Label]) -> Term:
    """A term at the rows of a table that the tokens choose.

    Along axes that both have, such as that of the examples or the steps of a `scan`
    over tables, each has its own tokens.
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

    # The innermost first, so that the axes of the outer ones are still there.
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


def squared_norms(sites: Sequence[Site], factors: Factors) -> Real[Array, " n"]:
    """Squared norms of gradients with respect to a leaf, by its sites' factors."""
    total = 0
    for terms, scale in norm_terms(sites, factors):
        total += jnp.real(contract(terms, (EXAMPLE,)) * scale)
    return jnp.maximum(total, 0)


def gram(
    sites: Sequence[Site],
    factors: Factors,
    others: Sequence[Site],
    other_factors: Factors,
    example: Label,
    out: Labels,
) -> Inexact[Array, "..."]:
    """Inner products of gradients with respect to a leaf, by its sites' factors.

    `example` is the label of the other's examples, and `out` are those of the result;
    along those that no factor has, its size is 1. A complex leaf counts as its real and
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
    """The arrays to contract for `gram`, and what to multiply each with."""
    for site in sites:
        for other in others:
            scale = _scale(site) * _scale(other).conjugate()
            yield pair_terms(site, factors, other, other_factors, example), scale


def norm_terms(
    sites: Sequence[Site], factors: Factors
) -> Iterator[tuple[list[Term], Any]]:
    """The arrays to contract for a squared norm, and what to multiply each with.

    It is the sum of the real parts: one for each site, and one for each pair of them.
    """
    for i, site in enumerate(sites):
        yield _own_terms(site, factors), abs(_scale(site)) ** 2
        for other in sites[i + 1 :]:
            scale = 2 * _scale(site) * _scale(other).conjugate()
            yield pair_terms(site, factors, other, factors, EXAMPLE), scale


def _own_terms(site: Site, factors: Factors) -> list[Term]:
    """The arrays whose contraction is the squared norm of a site's gradient."""
    if site.rule.token is not None or positions(site):
        return pair_terms(site, factors, site, factors, EXAMPLE)
    # An outer product, whose norm is the product of the norms.
    return [
        (jnp.real(x * jnp.conj(x)), labels) for x, labels in site_terms(site, factors)
    ]


def site_terms(site: Site, factors: Factors) -> list[Term]:
    """The arrays whose contraction is a site's gradient with respect to the view."""
    return _labelled(site, factors, EXAMPLE, labels_of(site, 0))


def gradients(
    sites: Sequence[Site], factors: Factors, leaf: _Leaf
) -> Inexact[Array, "..."]:
    """The gradient of each example with respect to a leaf, from all its sites.

    Shape `(n, *outputs, *leaf.shape)`, or `(*outputs, *leaf.shape)` if all factors are
    the same for all examples.
    """
    has_examples = factors.has_examples(sites)
    parts = []
    for site in sites:
        part = _gradients_at(site, factors, leaf)
        is_shared = has_examples and not factors.has_examples([site])
        parts.append(part[None] if is_shared else part)
    return functools.reduce(jnp.add, parts)


def _gradients_at(site: Site, factors: Factors, leaf: _Leaf) -> Array:
    a, d = factors.of(site)
    num_outputs = len(factors.outputs)
    if site.rule.token is not None:
        assert a is not None
        transposed = lambda a, d: _transposed([site], leaf, [a], [d])
        for _ in range(num_outputs):
            transposed = jax.vmap(transposed, (None, 0))
        axes = [0 if factor.has_examples else None for factor in (a, d)]
        if factors.has_examples([site]):
            transposed = jax.vmap(transposed, axes)
        return transposed(a.array, d.array)

    def form(a: Factor | None, d: Factor) -> Array:
        return _formed(site, Factors([a], [d], factors.outputs), leaf)

    if a is None or not a.has_examples or is_on_mesh(a.array):
        return form(a, d)
    # Patches are several times as large as what they are taken from, so they are made
    # for some examples at a time: for so many that they are no larger than that, or
    # than the cotangents of several outputs. It is faster, too, as they stay in the
    # caches. (On a mesh, each device would be asked for the same examples at the same
    # time, so there it is done at once.)
    num = factors.num
    outputs = math.prod(d.array.shape[d.has_examples :][:num_outputs])
    size = max(a.array.size * outputs, 1)
    growth = math.prod(site.sizes[name] for name in site.a_axes) * num / size
    if growth <= 1:
        return form(a, d)

    def one(rows: tuple) -> Array:
        row = [
            Factor(x[None]) if factor.has_examples else factor
            for factor, x in zip((a, d), rows, strict=True)
        ]
        return form(*row)[0]

    rows = tuple(factor.array if factor.has_examples else None for factor in (a, d))
    return jax.lax.map(one, rows, batch_size=max(1, int(num / growth)))


def _formed(site: Site, factors: Factors, leaf: _Leaf) -> Array:
    """The gradients at a site from its own factors."""
    site = dataclasses.replace(
        site, perturbation=0, operand=None if site.operand is None else 0
    )
    terms = site_terms(site, factors)
    present = {label for _, own in terms for label in own}
    lead = (EXAMPLE, *factors.outputs) if EXAMPLE in present else factors.outputs
    # An axis of size 1 may be in neither, and is put back by the reshape.
    of_leaf = sorted(label for label in present if label[0] in ("leaf", "view"))
    product = contract(terms, (*lead, *of_leaf))
    shape = product.shape[: len(lead)]
    if is_lettered(site):
        product = (product * _scale(site)).reshape(*shape, *leaf.shape)
        return _in_dtype(product, leaf.dtype)
    view = jax.eval_shape(site.view.apply, leaf)
    product = (product * site.rule.scale).reshape(*shape, *view.shape)
    transpose = jax.linear_transpose(site.view.apply, leaf)
    one = lambda x: transpose(x)[0]
    for _ in shape:
        one = jax.vmap(one)
    return one(_in_dtype(product, view.dtype))


def _in_dtype(x: Array, dtype: Any) -> Array:
    """The real part of it, if a real array meets complex ones."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        x = jnp.real(x)
    return x.astype(dtype)


def weighted_sum(
    sites: Sequence[Site],
    factors: Factors,
    leaf: _Leaf,
    weights: Inexact[Array, " n"],
) -> Inexact[Array, "..."]:
    """The weighted sum of the examples' gradients with respect to a leaf.

    No gradient of one example is formed: it is the transpose of all examples' sites at
    once, as in an ordinary backward pass.
    """
    operands, cotangents = [], []
    for site in sites:
        a, d = factors.of(site)
        operands.append(None if a is None else a.array)
        # What is scaled by may be out of the range of half precision.
        wide = widened(d.array)
        weight = jnp.expand_dims(weights.astype(wide.dtype), range(1, wide.ndim))
        cotangents.append((wide * weight).astype(d.array.dtype))
    return _transposed(sites, leaf, operands, cotangents, num=weights.shape[0])


def _transposed(
    sites: Sequence[Site],
    leaf: _Leaf,
    operands: list,
    cotangents: list,
    num: int | None = None,
) -> Array:
    """The transpose of the sites of one example, or of `num` of them, in the leaf."""

    def outputs(leaf: Array) -> list[Array]:
        outs = []
        for site, a in zip(sites, operands, strict=True):
            output = site.output
            if num is not None:
                in_axes = (None if a is None else 0, None)
                output = jax.vmap(output, in_axes, axis_size=num)
            outs.append(output(a, leaf))
        return outs

    return jax.linear_transpose(outputs, leaf)(cotangents)[0]
