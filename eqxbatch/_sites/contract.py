"""What follows from the factors of the sites: norms, Gram matrices, weighted sums.

All arrays here have examples along axis 0. The gradient of an example with respect to a
leaf is the sum over the leaf's sites of `einsum(a, d)`, brought from the view back to
the leaf. It is only formed where that is cheaper than to do without.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum
from jaxtyping import Array, Bool, Inexact

from .._blocks.accumulators import widened
from .._blocks.mesh import is_on_mesh
from .trace import Site


_Label = tuple[Any, Any]  # Of one side, or of a leaf or view that both share.
_Labels = tuple[_Label, ...]
_Term = tuple[Array, _Labels]
_Leaf = Array | jax.ShapeDtypeStruct  # Only its type matters.
EXAMPLE: _Label = ("example", 0)
OTHER_EXAMPLE: _Label = ("example", 1)


class Factors:
    """The operands and cotangents of all sites, for some examples."""

    def __init__(self, operands: list, cotangents: list):
        self.operands = operands
        self.cotangents = cotangents

    @property
    def num(self) -> int:
        """The number of examples."""
        return self.cotangents[0].shape[0]

    def where(self, is_kept: Bool[Array, " n"]) -> "Factors":
        """Zeros in place of the factors of the examples that are not kept."""

        def keep(x: Array) -> Array:
            is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
            return kept_examples(x, is_kept) if is_inexact else x

        return Factors([*map(keep, self.operands)], [*map(keep, self.cotangents)])

    def of(self, site: Site) -> tuple[Array | None, Array]:
        """`a` and `d` of a site, as it has them."""
        a = None if site.operand is None else self.operands[site.operand]
        return a, self.cotangents[site.tap]

    def expanded(self, site: Site) -> tuple[Array | None, Array]:
        """`a` and `d` with the axes that the site names."""
        a, d = self.of(site)
        d = jax.vmap(site.arrange)(d)
        if a is None:
            return None, widened(d)
        a = jax.vmap(site.expand)(a)
        return a if site.rule.token else widened(a), widened(d)


def kept_examples(x: Array, is_kept: Bool[Array, " n"]) -> Array:
    """Zeros in place of the examples that are not kept."""
    mask = jnp.expand_dims(is_kept, range(1, x.ndim))
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def _is_lettered(site: Site) -> bool:
    """Whether the axes of `w` at the site are axes of the leaf."""
    return site.view.axes is not None and not site.rule.splits


def are_comparable(site: Site, other: Site) -> bool:
    """Whether the inner product of their gradients follows from their factors."""
    if site.rule.kind == "leaf" or other.rule.kind == "leaf":
        return False
    if _is_lettered(site) and _is_lettered(other):
        return True
    same = _view_identity(site) == _view_identity(other)
    return same and site.view.is_isometry


def _view_identity(site: Site) -> tuple:
    shape = tuple(site.sizes[name] for name in site.w_axes)
    return (_is_lettered(site), site.view.key, site.rule.splits, shape)


def _labels(site: Site, side: int) -> dict[str, _Label]:
    """The labels of the named axes of a site: equal where two sites share an axis."""
    labels: dict[str, _Label] = {name: (side, name) for name in site.sizes}
    if _is_lettered(site):
        assert site.view.axes is not None
        for name, axis in zip(site.w_axes, site.view.axes, strict=True):
            if axis is not None:
                labels[name] = ("leaf", axis)
    else:
        labels.update((name, ("view", i)) for i, name in enumerate(site.w_axes))
    return labels


def _scale(site: Site) -> Any:
    return site.view.scale * site.rule.scale


def pair_terms(
    site: Site, factors: Factors, other: Site, other_factors: Factors, example: _Label
) -> list[_Term]:
    """The arrays whose contraction is the inner product of two sites' gradients.

    `example` is the label of the other's examples.
    """
    sides = [(site, factors, EXAMPLE), (other, other_factors, example)]
    terms: list[list[_Term]] = []
    tokens: list[tuple[Array, _Labels, _Label] | None] = []
    for side, (s, f, lead) in enumerate(sides):
        labels = _labels(s, side)
        a, d = f.expanded(s)
        terms.append([(d, (lead, *(labels[name] for name in s.d_axes)))])
        a_labels = (lead, *(labels[name] for name in s.a_axes))
        if s.rule.token is not None:
            assert a is not None
            tokens.append((a, a_labels, labels[s.rule.token]))
        else:
            tokens.append(None)
            if a is not None:
                terms[-1].append((a, a_labels))
    first, second = tokens
    if first is not None and second is not None and first[2] == second[2]:
        same, labels = _equal(first[:2], second[:2], site.sizes[str(site.rule.token)])
        terms[0].append((same.astype(terms[0][0][0].real.dtype), labels))
    else:
        for side, token in enumerate(tokens):
            if token is not None:
                terms[1 - side] = [_taken(term, token) for term in terms[1 - side]]
    conjugated = [(jnp.conj(x), labels) for x, labels in terms[1]]
    return [*terms[0], *conjugated]


def _equal(first: _Term, second: _Term, num_rows: int) -> _Term:
    """Where tokens choose the same row, if it is a row at all."""
    (x, x_labels), (y, y_labels) = first, second
    labels = (*x_labels, *(label for label in y_labels if label not in x_labels))

    def spread(x: Array, own: _Labels) -> Array:
        shape = [1] * len(labels)
        for size, label in zip(x.shape, own, strict=True):
            shape[labels.index(label)] = size
        order = sorted(range(len(own)), key=lambda i: labels.index(own[i]))
        return jnp.transpose(x, order).reshape(shape)

    spread_x = spread(x, x_labels)
    return (spread_x == spread(y, y_labels)) & (spread_x < num_rows), labels


def _taken(term: _Term, token: tuple[Array, _Labels, _Label]) -> _Term:
    """A term at the rows of a table that the tokens choose, if it has these rows."""
    (x, labels), (tokens, token_labels, chosen) = term, token
    if chosen not in labels:
        return term
    axis = labels.index(chosen)
    take = functools.partial(jnp.take, mode="fill", fill_value=0)
    if labels[0] == token_labels[0]:
        taken = jax.vmap(lambda x, t: take(x, t, axis=axis - 1))(x, tokens)
        new = token_labels[1:]
    else:
        taken = take(x, tokens, axis=axis)
        new = token_labels
    return taken, (*labels[:axis], *new, *labels[axis + 1 :])


def contract(terms: Sequence[_Term], out: _Labels) -> Array:
    """The sum of the product of the terms over all labels that are not in `out`."""
    terms = _summed(terms, out)
    expression, path, _ = _optimal_path(
        tuple(labels for _, labels in terms),
        tuple(x.shape for x, _ in terms),
        out,
    )
    return jnp.einsum(expression, *(x for x, _ in terms), optimize=path)


def contract_cost(terms: Sequence[_Term], out: _Labels) -> tuple[float, float]:
    """FLOPs of `contract`, and the number of elements of its largest intermediate."""
    flops = float(sum(x.size for x, _ in terms))
    terms = _summed(terms, out)
    labels = tuple(labels for _, labels in terms)
    _, _, info = _optimal_path(labels, tuple(x.shape for x, _ in terms), out)
    if info is None:
        return flops, 0.0
    return flops + float(info.opt_cost), float(info.largest_intermediate)


def _summed(terms: Sequence[_Term], out: _Labels) -> list[_Term]:
    """The terms, each summed over the labels that only it has."""
    counts = collections.Counter(label for _, labels in terms for label in labels)
    summed = []
    for x, labels in terms:
        own = [i for i, n in enumerate(labels) if counts[n] == 1 and n not in out]
        kept = tuple(label for i, label in enumerate(labels) if i not in own)
        summed.append((jnp.sum(x, axis=tuple(own)), kept))
    return summed


@functools.lru_cache(maxsize=4096)
def _optimal_path(
    labels: tuple[_Labels, ...], shapes: tuple[tuple[int, ...], ...], out: _Labels
) -> tuple[str, Any, Any]:
    symbols: dict[_Label, str] = {}
    parts = [
        "".join(
            symbols.setdefault(label, opt_einsum.get_symbol(len(symbols)))
            for label in term
        )
        for term in labels
    ]
    expression = ",".join(parts) + "->" + "".join(symbols[label] for label in out)
    if any(0 in shape for shape in shapes):
        return expression, "optimal", None
    # Nothing that is formed on the way may be larger than what is there already, or
    # else than the smaller of a Gram matrix and a gradient.
    sizes = {
        label: size
        for term, shape in zip(labels, shapes, strict=True)
        for label, size in zip(term, shape, strict=True)
    }
    everywhere = set.intersection(*map(set, labels))
    of_leaf = {label for label in sizes if label[0] in ("leaf", "view")}
    num = lambda labels: math.prod(sizes[label] for label in labels)
    gram = num((set(sizes) - of_leaf) | everywhere)
    gradient = num(of_leaf | set(out))
    limit = max(min(gram, gradient), *map(math.prod, shapes))
    path, info = opt_einsum.contract_path(
        expression, *shapes, shapes=True, optimize="optimal", memory_limit=limit
    )
    return expression, path, info


def inner_product(
    sites: Sequence[Site], factors: Factors, others: Factors | None = None
) -> Inexact[Array, "..."]:
    """Inner products of gradients with respect to a leaf, by the factors of its sites.

    Of each example with itself: shape `(n,)`. With `others`, of each example with each
    of those: shape `(n, m)`.
    """
    total = 0
    if others is None:
        for terms, scale in norm_terms(sites, factors):
            total += jnp.real(contract(terms, (EXAMPLE,)) * scale)
        return jnp.maximum(total, 0)
    for site in sites:
        for other in sites:
            terms = pair_terms(site, factors, other, others, OTHER_EXAMPLE)
            product = contract(terms, (EXAMPLE, OTHER_EXAMPLE))
            total += product * (_scale(site) * _scale(other).conjugate())
    return jnp.asarray(total)


def norm_terms(
    sites: Sequence[Site], factors: Factors
) -> Iterator[tuple[list[_Term], Any]]:
    """The arrays to contract for a squared norm, and what to multiply each with.

    It is the sum of the real parts: one for each site, and one for each pair of them.
    """
    for i, site in enumerate(sites):
        yield _own_terms(site, factors), abs(_scale(site)) ** 2
        for other in sites[i + 1 :]:
            scale = 2 * _scale(site) * _scale(other).conjugate()
            yield pair_terms(site, factors, other, factors, EXAMPLE), scale


def _own_terms(site: Site, factors: Factors) -> list[_Term]:
    """The arrays whose contraction is the squared norm of a site's gradient."""
    if site.rule.token is not None or positions(site):
        return pair_terms(site, factors, site, factors, EXAMPLE)
    # An outer product, whose norm is the product of the norms.
    return [
        (jnp.real(x * jnp.conj(x)), labels) for x, labels in _site_terms(site, factors)
    ]


def _site_terms(site: Site, factors: Factors) -> list[_Term]:
    """The arrays whose contraction is a site's gradient with respect to the view."""
    labels = _labels(site, 0)
    return [
        (x, (EXAMPLE, *(labels[name] for name in names)))
        for x, names in zip(
            factors.expanded(site), (site.a_axes, site.d_axes), strict=True
        )
        if x is not None
    ]


def positions(site: Site) -> list[str]:
    """The axes of a site's factors that `w` lacks, so that its gradient is a sum."""
    labels = _labels(site, 0)
    names = dict.fromkeys((*site.a_axes, *site.d_axes))
    return [name for name in names if labels[name][0] == 0 and site.sizes[name] != 1]


def gradients(
    sites: Sequence[Site], factors: Factors, leaf: _Leaf
) -> Inexact[Array, "n ..."]:
    """The gradient of each example with respect to a leaf, shape `(n, *leaf.shape)`."""
    return functools.reduce(
        jnp.add, (_gradients_at(site, factors, leaf) for site in sites)
    )


def _gradients_at(site: Site, factors: Factors, leaf: _Leaf) -> Array:
    a, d = factors.of(site)
    if site.rule.token is not None:
        return jax.vmap(lambda a, d: _transposed([site], leaf, [a], [d]))(a, d)

    def form(a: Array | None, d: Array) -> Array:
        return _formed(site, Factors([a], [d]), leaf)

    if a is None or is_on_mesh(a):
        return form(a, d)
    # Patches are several times as large as what they are taken from, so they are made
    # for some examples at a time: for so many that they are no larger than that. It is
    # faster, too, as they stay in the caches. (On a mesh, each device would be asked
    # for the same examples at the same time, so there it is done at once.)
    growth = math.prod(site.sizes[name] for name in site.a_axes) * factors.num / a.size
    if growth <= 1:
        return form(a, d)
    one = lambda pair: form(pair[0][None], pair[1][None])[0]
    return jax.lax.map(one, (a, d), batch_size=max(1, int(factors.num / growth)))


def _formed(site: Site, factors: Factors, leaf: _Leaf) -> Array:
    """The gradients at a site from its own factors."""
    site = dataclasses.replace(site, tap=0, operand=None if site.operand is None else 0)
    terms = _site_terms(site, factors)
    present = {label for _, own in terms for label in own}
    # An axis of size 1 may be in neither, and is put back by the reshape.
    of_leaf = sorted(label for label in present if label[0] in ("leaf", "view"))
    product = contract(terms, (EXAMPLE, *of_leaf))
    if _is_lettered(site):
        product = (product * _scale(site)).reshape(factors.num, *leaf.shape)
        return product.astype(leaf.dtype)
    view = jax.eval_shape(site.view.apply, leaf)
    product = (product * site.rule.scale).reshape(factors.num, *view.shape)
    transpose = jax.linear_transpose(site.view.apply, leaf)
    return jax.vmap(lambda x: transpose(x)[0])(product.astype(view.dtype))


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
        operands.append(a)
        weight = weights.astype(d.dtype)
        cotangents.append(d * jnp.expand_dims(weight, range(1, d.ndim)))
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
