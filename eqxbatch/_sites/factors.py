"""What follows from the factors of the sites: norms, Gram matrices, weighted sums.

All arrays here have examples along axis 0. The gradient of an example with respect to a
leaf is the sum over the leaf's sites of `einsum(a, d)`, brought from the view back to
the leaf. It is only formed where that is cheaper than to do without.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._base.dtypes import widened
from .._base.mesh import is_on_mesh
from .einsum import aligned, contract, EXAMPLE, Labels, Term
from .rules import Axes
from .site import is_lettered, is_small, Label, labels_of, positions, Site


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
    examples, where there may be no factors to tell. `values` are those of the program.
    """

    def __init__(
        self,
        operands: list,
        cotangents: list,
        outputs: Labels = (),
        num: int | None = None,
        values: Sequence[Any] = (),
    ):
        as_factor = lambda x: x if isinstance(x, Factor) else Factor(x)
        self.operands = [*map(as_factor, operands)]
        self.cotangents = [*map(as_factor, cotangents)]
        self.outputs = outputs
        self.values = list(values)
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
        return self.replaced([*operands], [*cotangents])

    def replaced(self, operands: list, cotangents: list) -> "Factors":
        """Others of the same examples."""
        return Factors(operands, cotangents, self.outputs, self._num, self.values)

    def of(self, site: Site) -> tuple[Factor | None, Factor]:
        """`a` and `d` of a site, as it has them."""

        def at_steps(x: Factor, num: int) -> Factor:
            return x.of(site.at_steps(x.array, x.has_examples + num))

        d = at_steps(self.cotangents[site.perturbation], len(self.outputs))
        if site.operand is None:
            return None, d
        return at_steps(self.operands[site.operand], 0), d

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
    """The operand of a site, if it has one, and the cotangent, which comes last."""
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


def scale_of(site: Site) -> Any:
    """What the terms of a site are multiplied with."""
    is_in_terms = site.view.is_weighted or not is_lettered(site)
    return site.rule.scale * (1.0 if is_in_terms else site.view.scale)


def weight_term(site: Site, values: list, names: Labels) -> list[Term]:
    """What the entries of a leaf are multiplied with on the way to a site, if so.

    Where the axes of the view are not those of the leaf, it is a part of the view.
    """
    if not (site.view.is_weighted and is_lettered(site)):
        return []
    struct = site.view.struct_of_leaf
    ones = jnp.ones(struct.shape, struct.dtype)
    return [(widened(site.view.apply(ones, values)), names)]


def _weight(site: Site, factors: Factors, labels: dict[str, Label]) -> list[Term]:
    names = tuple(labels[name] for name in site.w_axes)
    return weight_term(site, factors.values, names)


class _Side(NamedTuple):
    """A site in a pair: its factors, and the labels of the examples and its axes."""

    site: Site
    factors: Factors
    example: Label
    labels: dict[str, Label]
    small: Label

    @property
    def token(self) -> tuple[Array, Labels, Label] | None:
        """The tokens, if there are any, and what they choose from."""
        if self.site.rule.token is None:
            return None
        a, _ = self.site_terms
        return *a, self.labels[self.site.rule.token]

    @property
    def site_terms(self) -> list[Term]:
        return _labelled(self.site, self.factors, self.example, self.labels)

    @property
    def terms(self) -> list[Term]:
        """The cotangent, and the operand if it is one of numbers; and weights."""
        *operand, cotangent = self.site_terms
        weights = _weight(self.site, self.factors, self.labels)
        if self.token is not None:
            return [cotangent, *(_taken(term, self.token) for term in weights)]
        return [cotangent, *operand, *weights]

    @property
    def coefficients(self) -> Term:
        """The gradient with respect to a view that is small, with one axis."""
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
        """What the entries of a small view are of the leaf, one after the other."""
        view, values = self.site.view, self.factors.values
        struct = view.struct(view.struct_of_leaf, values)
        num = math.prod(struct.shape)
        seeds = jnp.eye(num, dtype=struct.dtype).reshape(num, *struct.shape)
        back = view.transposed(view.struct_of_leaf, values)
        return widened(jax.vmap(back)(seeds))

    def along(self, directions: Array, small: Label) -> list[Term]:
        """The inner products of the gradients at the site with some directions."""
        view, values = self.site.view, self.factors.values
        struct = view.struct_of_leaf
        apply = lambda x: view.apply(x.astype(struct.dtype), values)
        sizes = [self.site.sizes[name] for name in self.site.w_axes]
        pushed = widened(jax.vmap(apply)(directions))
        pushed = pushed.reshape(pushed.shape[0], *sizes)
        names = tuple(self.labels[name] for name in self.site.w_axes)
        term = (pushed, (small, *names))
        *operand, cotangent = self.site_terms
        if self.token is not None:
            return [cotangent, _taken(term, self.token)]
        return [cotangent, *operand, term]


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def pair_terms(
    site: Site, factors: Factors, other: Site, other_factors: Factors, example: Label
) -> tuple[list[Term], Any]:
    """The arrays whose contraction is the inner product of two sites' gradients.

    Also what to multiply it with. `example` is the label of the other's examples.
    """
    first, second = (
        _Side(s, f, lead, labels_of(s, side), ("small", side))
        for side, (s, f, lead) in enumerate(
            [(site, factors, EXAMPLE), (other, other_factors, example)]
        )
    )
    if is_small(site) or is_small(other):
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
    return [*terms[0], *conjugated], scale_of(site) * scale_of(other).conjugate()


def _small_terms(first: _Side, second: _Side) -> tuple[list[Term], Any]:
    """The same, where one of the sites has few numbers of a leaf, as a penalty has."""
    scale = first.site.rule.scale * second.site.rule.scale
    if is_small(first.site) and is_small(second.site):
        flat = ("flat", 0)
        directions = [
            (_flat(side.directions), (side.small, flat)) for side in (first, second)
        ]
        return [first.coefficients, *directions, second.coefficients], scale
    if is_small(first.site):
        terms = second.along(first.directions, first.small)
        return [first.coefficients, *terms], scale
    terms = first.along(second.directions, second.small)
    return [*terms, second.coefficients], scale


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
            yield pair_terms(site, factors, other, other_factors, example)


def norm_terms(
    sites: Sequence[Site], factors: Factors
) -> Iterator[tuple[list[Term], Any]]:
    """The arrays to contract for a squared norm, and what to multiply each with.

    It is the sum of the real parts: one for each site, and one for each pair of them.
    """
    for i, site in enumerate(sites):
        yield _own_terms(site, factors)
        for other in sites[i + 1 :]:
            terms, scale = pair_terms(site, factors, other, factors, EXAMPLE)
            yield terms, 2 * scale


def _own_terms(site: Site, factors: Factors) -> tuple[list[Term], Any]:
    """The arrays whose contraction is the squared norm of a site's gradient."""
    if site.rule.token is not None or positions(site) or is_small(site):
        return pair_terms(site, factors, site, factors, EXAMPLE)
    # An outer product, whose norm is the product of the norms.
    terms = [
        (jnp.real(x * jnp.conj(x)), labels) for x, labels in site_terms(site, factors)
    ]
    return terms, abs(scale_of(site)) ** 2


def site_terms(site: Site, factors: Factors) -> list[Term]:
    """The arrays whose contraction is a site's gradient, brought back to the leaf.

    Or that with respect to the view, where its axes are not those of the leaf.
    """
    labels = labels_of(site, 0)
    terms = _labelled(site, factors, EXAMPLE, labels)
    return [*terms, *_weight(site, factors, labels)]


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
        transposed = lambda a, d: _transposed([site], leaf, [a], [d], factors.values)
        for _ in range(num_outputs):
            transposed = jax.vmap(transposed, (None, 0))
        axes = [0 if factor.has_examples else None for factor in (a, d)]
        if factors.has_examples([site]):
            transposed = jax.vmap(transposed, axes)
        return transposed(a.array, d.array)

    def form(a: Factor | None, d: Factor) -> Array:
        own = Factors([a], [d], factors.outputs, values=factors.values)
        return _formed(site, own, leaf)

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
    """The gradients at a site from its own factors, of the steps that it has."""
    site = site.with_own(0, None if site.operand is None else 0)
    terms = site_terms(site, factors)
    present = {label for _, own in terms for label in own}
    lead = (EXAMPLE, *factors.outputs) if EXAMPLE in present else factors.outputs
    # An axis of size 1 may be in neither, and is put back by the reshape.
    of_leaf = sorted(label for label in present if label[0] in ("leaf", "view"))
    product = contract(terms, (*lead, *of_leaf))
    shape = product.shape[: len(lead)]
    if is_lettered(site):
        product = (product * scale_of(site)).reshape(*shape, *leaf.shape)
        return _in_dtype(product, leaf.dtype)
    view = site.view.struct(leaf, factors.values)
    product = (product * site.rule.scale).reshape(*shape, *view.shape)
    one = site.view.transposed(leaf, factors.values)
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
    num, values = weights.shape[0], factors.values
    return _transposed(sites, leaf, operands, cotangents, values, num=num)


def _transposed(
    sites: Sequence[Site],
    leaf: _Leaf,
    operands: list,
    cotangents: list,
    values: list,
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
            outs.append(output(a, site.view.apply(leaf, values)))
        return outs

    return jax.linear_transpose(outputs, leaf)(cotangents)[0]
