"""Inner products and norms of gradients, from the factors of pairs of sites.

No gradient is formed. See `site.py` for the sites where this is exact.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Real

from .._base.dtypes import (
    common_power_of_two,
    exponent_of,
    largest_of_each,
    power_of_two,
    product_of_squares,
    scaled_examples,
    squared_norm,
    Squares,
    squares_in_range,
    times_two_to,
    widened,
)
from .._base.jaxprs import full_varying_as, vary, varying
from .._base.mesh import is_on_mesh, vary_as
from .._base.platforms import platform
from .._base.trees import safe_zip
from .factors import (
    aligned,
    contract,
    EXAMPLE,
    Factor,
    Factors,
    gradients,
    has_rows,
    has_weights,
    label_terms,
    Labels,
    rows_of_tokens,
    scale_of,
    site_terms,
    Term,
    weight_terms,
)
from .site import (
    has_few_directions,
    has_named_axes,
    is_allowed,
    is_outer_product,
    is_sum,
    Label,
    labels_of,
    leaf_site,
    Site,
)


# A leaf with more sites, as in an unrolled loop, has so many pairs of sites that
# tracing their products takes seconds.
MOST_SITES = 16


# How much larger than the squared norm of a gradient the sum of the squares of its
# terms may be. The error of products of pairs grows with this ratio, that of the
# gradient with its root.
MOST_CANCELLED = 64.0


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
            of_a, of_d = safe_zip(*map(factors.of, group))
            of_which = [x for x in map(factors.which, group) if x is not None]
            # What says which groups are met comes after all other operands.
            site = group[0].with_own(number, number, len(groups) + len(every_which))
            if len(group) > 1:
                site = site.within((-1, len(group)))
                of_d = [_stacked(of_d, len(factors.outputs))]
                of_a = [None if of_a[0] is None else _stacked(of_a, 0)]
                of_which = [_stacked(of_which, 0)] if of_which else []
            merged.append(site)
            operands.append(of_a[0] or Factor(None, has_examples=False))
            cotangents.append(of_d[0])
            every_which += of_which
        factors = factors.replaced([*operands, *every_which], cotangents)
        return OfLeaf(merged, factors, self.leaf)


def _stacked(parts: Sequence[Factor], num_outputs: int) -> Factor:
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
    """The site with a `number` in a pair, its factors, and the label of examples."""

    site: Site
    factors: Factors
    example: Label = EXAMPLE
    number: int = 0

    @property
    def labels(self) -> dict[str, Label]:
        """The labels of its axes."""
        return labels_of(self.site, self.number)

    @property
    def small(self) -> Label:
        """The label of the entries of a small view."""
        return "small", self.number

    @property
    def token(self) -> tuple[Array, Labels, Label] | None:
        """The tokens, if there are any, and the axis that they index."""
        if self.site.rule.token is None:
            return None
        a, _ = self.site_terms
        return *a, self.labels[self.site.rule.token]

    @property
    def site_terms(self) -> list[Term]:
        return label_terms(self.site, self.factors, self.example, self.labels)

    @property
    def terms(self) -> list[Term]:
        """The cotangent, weights, and the operand if it does not consist of tokens."""
        values, unit = self.factors.values, self.factors.unit
        return self._times(weight_terms(self.site, values, self.labels, unit))

    def _times(self, weights: list[Term]) -> list[Term]:
        *operand, cotangent = self.site_terms
        if self.token is not None:
            return [cotangent, *(_taken(term, self.token) for term in weights)]
        return [cotangent, *operand, *weights]

    @property
    def coefficients(self) -> Term:
        """The gradient with respect to a small view, flattened."""
        present = {label for _, labels in self.site_terms for label in labels}
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

    @property
    def small_terms(self) -> list[Term]:
        """The arrays whose contraction is the gradient at a small site, flattened."""
        num, *shape = self.directions.shape
        flat = self.directions.reshape(num, math.prod(shape))
        return [self.coefficients, (flat, (self.small, ("flat", 0)))]

    def along(self, directions: Array, small: Label) -> list[Term]:
        """The inner products of the gradients at the site with some directions."""
        view, values = self.site.view, self.factors.values
        dtype = view.type_of_leaf.dtype
        apply = lambda x: view.apply(x.astype(dtype), values)
        sizes = [self.site.sizes[name] for name in self.site.w_axes]
        pushed = widened(jax.vmap(apply)(directions))
        pushed = pushed.reshape(pushed.shape[0], *sizes)
        names = tuple(self.labels[name] for name in self.site.w_axes)
        return self._times([(pushed, (small, *names))])


def _scale(site: Site) -> Any:
    """The number that multiplies the terms of a site; no view is transposed here."""
    return site.rule.scale * (1.0 if has_weights(site) else site.view.scale)


def _pair_terms(first: _Side, second: _Side) -> tuple[list[Term], Any]:
    """The arrays whose contraction is the inner product of two sites' gradients.

    Also returns a factor for it.
    """
    if has_few_directions(first.site) or has_few_directions(second.site):
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
    scale = _scale(first.site) * _scale(second.site).conjugate()
    return [*terms[0], *conjugated], scale


def _small_terms(first: _Side, second: _Side) -> tuple[list[Term], Any]:
    """Like `_pair_terms`, if one of the sites is small, such as that of a penalty."""
    scale = first.site.rule.scale * second.site.rule.scale
    if has_few_directions(first.site) and has_few_directions(second.site):
        return [*first.small_terms, *second.small_terms], scale
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
    free = tuple(label for label in token_labels if label not in shared)
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
    return take(x, tokens), (*shared, *rest[:axis], *free, *rest[axis + 1 :])


def gram(
    uses: OfLeaf, other: OfLeaf, example: Label, out: Labels
) -> Inexact[Array, "..."]:
    """Inner products of gradients with respect to a leaf, from its sites' factors.

    `example` is the label of the other side's examples, and `out` are the labels of the
    result; axes that no factor has get size 1. A complex leaf counts as its real and
    its imaginary part.
    """
    pairs = gram_terms(uses, other, example)
    products = [jnp.real(_contracted(*pair, out)) for pair in pairs]
    if not products:
        return jnp.zeros([1] * len(out), uses.leaf.dtype).real
    return functools.reduce(jnp.add, products)


def _contracted(terms: list[Term], scale: Any, out: Labels) -> Array:
    """The scaled product of terms, with axes of size 1 for labels that none has."""
    present = {label for _, labels in terms for label in labels}
    product = contract(terms, tuple(label for label in out if label in present)) * scale
    return jnp.expand_dims(product, [i for i, x in enumerate(out) if x not in present])


def gram_terms(
    uses: OfLeaf, other: OfLeaf, example: Label = EXAMPLE
) -> Iterator[tuple[list[Term], Any]]:
    """The arrays to contract for `gram`, each with a factor.

    If both are the same object and each example only meets itself, these are for
    squared norms, the sums of the real parts: each pair of two sites counts twice.
    """
    is_norm = uses is other and example == EXAMPLE
    uses = uses.merged()
    other = uses if is_norm else other.merged()
    for i, site in enumerate(uses.sites):
        first = _Side(site, uses.factors)
        for j, second in enumerate(other.sites):
            if (is_norm and j < i) or site.view.is_apart(second.view):
                continue
            if is_norm and i == j and _has_product(site):
                yield _squared_terms(site_terms(site, uses.factors), _scale(site))
                continue
            terms, scale = _pair_terms(
                first, _Side(second, other.factors, example, number=1)
            )
            yield terms, 2 * scale if is_norm and j > i else scale


def _has_product(site: Site) -> bool:
    """Whether the norm of a site's gradient is the product of those of its factors."""
    return is_outer_product([site]) and not has_few_directions(site)


def _squared_terms(terms: list[Term], scale: Any) -> tuple[list[Term], Any]:
    squares = [(jnp.real(x * jnp.conj(x)), labels) for x, labels in terms]
    return squares, abs(scale) ** 2


def squares(
    uses: OfLeaf,
) -> tuple[Real[Array, "n *outputs"], Real[Array, "n *outputs"]]:
    """The squared norms of gradients, and what they would be if no two terms met.

    An axis along which no factor differs has size 1.
    """
    uses = uses.merged()
    total, out = 0, (EXAMPLE, *uses.factors.outputs)
    for pair in gram_terms(uses, uses):
        total += jnp.real(_contracted(*pair, out))
    separate = [_separate_squares(site, uses.factors) for site in uses.sites]
    return jnp.maximum(total, 0), functools.reduce(jnp.add, separate)


def _separate_squares(site: Site, factors: Factors) -> Array:
    """The squared norms of the gradients at a site if no two positions met."""
    side = _Side(site, factors)
    terms, scale = side.terms, _scale(site)
    if has_few_directions(site):
        terms, scale = side.small_terms, site.rule.scale
    return _contracted(*_squared_terms(terms, scale), (EXAMPLE, *factors.outputs))


def squared_norms(leaves: Sequence[OfLeaf]) -> list[Real[Array, " n"]]:
    """Squared norms of gradients with respect to each leaf, from its sites' factors."""
    norms, separate = norms_unless_cancelled(leaves)
    if not separate:
        return norms
    parts = [leaves[i] for i in separate]

    def norms_of(formed: list[Array]) -> list[Array]:
        results = []
        for (_, factors, _), x in safe_zip(parts, formed):
            unit = factors.unit
            x = x if unit is None else x / unit.astype(x.real.dtype)
            results.append(squared_norm(x)[0])
        return results

    totals = [norms[i] for i in separate]
    formed = lambda: _for_each_formed(parts, totals[0].shape[0], norms_of)
    flags = jnp.stack([*separate.values()])
    chosen = unless_cancelled(flags, _arrays(parts), totals, formed)
    for i, norm in safe_zip(separate, chosen):
        norms[i] = norm
    return norms


def norms_unless_cancelled(
    leaves: Sequence[OfLeaf],
) -> tuple[list[Real[Array, " n"]], dict[int, Bool[Array, ""]]]:
    """Squared norms of gradients with respect to each leaf.

    Also returns for each leaf whose terms may cancel whether they nearly do: the norm
    is not exact then.
    """
    norms, separate = [], {}
    for i, uses in enumerate(leaves):
        if has_rows(uses.sites):
            (site,) = uses.sites
            _, rows = rows_of_tokens(site, uses.factors)
            norms.append(squared_norm(rows))
            continue
        total, apart = squares(uses)
        norms.append(total)
        if not is_outer_product(uses.sites):
            separate[i] = jnp.any(apart > MOST_CANCELLED * total)
    return norms, separate


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
        terms = site_terms(site, uses.factors)
        if set.intersection(*_axes_of_factors(site)):
            labels = tuple(dict.fromkeys(x for _, labels in terms for x in labels))
            terms = [(contract(terms, labels), labels)]
        keys = [(id(x), EXAMPLE in labels) for x, labels in terms]
        arrays.update(safe_zip(keys, (x for x, _ in terms)))
        by_leaf.append((keys, abs(_scale(site)) ** 2))
    every = [x if has_examples else x[None] for (_, has_examples), x in arrays.items()]
    squares = dict(safe_zip(arrays, squares_in_range(every)))
    products = []
    for keys, scale in by_leaf:
        value, exponent = product_of_squares([squares[key] for key in keys])
        products.append(Squares(value if scale == 1 else value * scale, exponent))
    return products


def cancels(leaves: Sequence[OfLeaf]) -> Factor | None:
    """For each example, whether terms of the gradient of all leaves nearly cancel.

    Returns None if this cannot be. The gradient of a single leaf may be zero, as that
    of a bias of attention keys.
    """
    summed = [uses for uses in leaves if is_sum(uses.sites)]
    if not summed:
        return None
    summed = _in_range(summed)
    pairs = safe_zip(*map(squares, summed))
    total, apart = (functools.reduce(jnp.add, x) for x in pairs)
    flags = apart > MOST_CANCELLED * total
    cancelled = jnp.any(flags, axis=tuple(range(1, flags.ndim)))
    if any(factors.has_examples(sites) for sites, factors, _ in summed):
        return Factor(cancelled)
    return Factor(cancelled[0], has_examples=False)


def _in_range(leaves: Sequence[OfLeaf]) -> list[OfLeaf]:
    """The same leaves, with all gradients divided by one number: squares fit then.

    Only cotangents can be that small or large: second derivatives and kernels have
    squares of operands, too.
    """
    factors = [x.factors.of(site)[1] for x in leaves for site in x.sites]
    largest = [jnp.max(largest_of_each(x.array), initial=0) for x in factors]
    power = common_power_of_two(largest)

    def scaled(x: Factor) -> Factor:
        wide = widened(x.array)
        return x.of(wide * (1 / power).astype(wide.dtype))

    replaced = []
    for sites, factors, leaf in leaves:
        used = {site.perturbation for site in sites}
        cotangents = [
            scaled(x) if i in used else x for i, x in enumerate(factors.cotangents)
        ]
        replaced.append(
            OfLeaf(sites, factors.replaced(factors.operands, cotangents), leaf)
        )
    return replaced


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
    kernels, summed = [], []
    shape = [sizes[label] for label in out]
    for i, (uses, other) in enumerate(leaves):
        kernels.append(gram(uses, other, examples[-1], out))
        if is_sum(uses.sites) or is_sum(other.sites):
            kernels[-1] = jnp.broadcast_to(kernels[-1], shape)
            summed.append(i)
    if not summed:
        return kernels
    sides = [*safe_zip(*(leaves[i] for i in summed))]
    nums = [sizes[label] for label in examples]
    axes = [out.index(label) for label in examples]

    def products(first: list[Array], second: list[Array]) -> list[Array]:
        result = []
        for uses, other, x, y in safe_zip(*sides, first, second):
            formed = uses.perturbed_itself(Factor(x)), other.perturbed_itself(Factor(y))
            one = gram(*formed, examples[-1], out)
            full = [1 if label in examples else sizes[label] for label in out]
            result.append(jnp.squeeze(jnp.broadcast_to(one, full), axes))
        return result

    def formed() -> list[Array]:
        num = len(summed)
        if len(examples) == 1:
            pair = lambda formed: products(formed[:num], formed[num:])
            stacked = _for_each_formed([*sides[0], *sides[1]], nums[0], pair)
        else:
            row = lambda first: _for_each_formed(
                sides[1], nums[1], lambda second: products(first, second)
            )
            stacked = _for_each_formed(sides[0], nums[0], row)
        return [jnp.moveaxis(x, [*range(len(axes))], axes) for x in stacked]

    both = [*sides[0], *sides[1]]
    flags = jnp.stack([jnp.any(x.array) for x in cancelled if x is not None])
    totals = [kernels[i] for i in summed]
    chosen = unless_cancelled(flags, _arrays(both), totals, formed)
    for i, x in safe_zip(summed, chosen):
        kernels[i] = x
    return kernels


def _arrays(leaves: Sequence[OfLeaf]) -> list[Array]:
    factors = [[*x.factors.operands, *x.factors.cotangents] for x in leaves]
    return [x.array for arrays in factors for x in arrays if x.array is not None]


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
            for x, y in safe_zip(formed(), totals)
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
    form, arrays, size = formed_gradients(leaves, num)
    one = lambda args: fun(form(args[1]))
    # There may be no arrays that differ between examples.
    args = jnp.arange(num), arrays
    return jax.vmap(one)(args) if size == num else lax.map(one, args, batch_size=size)


def formed_gradients(
    leaves: Sequence[OfLeaf], num: int
) -> tuple[Callable[[list], list[Array]], list, int]:
    """How to form the gradients of one example.

    Returns a function that takes the arrays of an example, and returns one gradient
    with an axis of size 1 in front for each leaf; the arrays of all examples; and a
    number of examples that divides `num`, whose gradients are formed at once.
    """
    parts = [x.with_own_factors() for x in leaves]
    every = [[*x.factors.operands, *x.factors.cotangents] for x in parts]

    def gradient(of_leaf: OfLeaf, kept: list[Factor], arrays: list) -> Array:
        sites, factors, leaf = of_leaf
        arrays = [*arrays]
        of_one = [x.of(arrays.pop(0)[None]) if x.has_examples else x for x in kept]
        num = len(factors.operands)
        operands, cotangents = of_one[:num], of_one[num:]
        outputs, values = factors.outputs, factors.values
        parts = Factors(operands, cotangents, outputs, values=values)
        formed = gradients(sites, parts, leaf)
        return formed if parts.has_examples(sites) else formed[None]

    arrays = [[x.array for x in kept if x.has_examples] for kept in every]
    form = lambda arrays: [*map(gradient, parts, every, arrays)]
    if any(map(is_on_mesh, jax.tree.leaves(arrays))):
        return form, arrays, num  # A loop would gather examples on all devices.
    formed = sum(_bytes_of_gradient(*x) for x in parts)
    size = platform().block_bytes // max(4 * formed, 1)
    # Without a remainder, which would be compiled separately.
    size = next(i for i in range(max(min(size, num), 1), 0, -1) if num % i == 0)
    return form, arrays, size


def _bytes_of_gradient(sites: Sequence[Site], factors: Factors, leaf: Any) -> int:
    _, d = factors.of(sites[0])
    outputs = d.array.shape[d.has_examples :][: len(factors.outputs)]
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
