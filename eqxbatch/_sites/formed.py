"""Per-example gradients from factors, and weighted sums and products of them.

A per-example gradient with respect to a leaf is the sum over the leaf's sites of
`einsum(a, d)`, pulled back from the view to the leaf. It is only formed if that is
cheaper. All arrays here have examples along axis 0.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Integer, Real

from .._base.dtypes import widened
from .._base.mesh import is_on_mesh
from .._base.platforms import platform
from .._base.trees import safe_zip
from .axes import axes_in, EXAMPLE, Role
from .contract import aligned, contract
from .factors import Factor, Factors, has_weights, scale_of, SiteFactors
from .site import axes_of, has_named_axes, positions, Site
from .views import Values


_Leaf = Array | jax.ShapeDtypeStruct  # Only the type matters.


def gradients(
    sites: Sequence[Site], factors: Factors, leaf: _Leaf
) -> Inexact[Array, "..."]:
    """The per-example gradients with respect to a leaf, from all its sites.

    The shape is `(n, *outputs, *leaf.shape)`, or `(*outputs, *leaf.shape)` if no factor
    differs between examples.
    """
    has_examples = factors.has_examples(sites)
    parts = []
    for site in sites:
        part = _gradients_at(site, factors, leaf)
        # What is the same for all examples gets an axis, to be added to what is not.
        is_shared = has_examples and not factors.has_examples([site])
        parts.append(part[None] if is_shared else part)
    return functools.reduce(jnp.add, parts)


def weighted_sum(
    sites: Sequence[Site],
    factors: Factors,
    leaf: _Leaf,
    weights: Inexact[Array, "n *outputs"],
) -> Inexact[Array, "..."]:
    """The weighted sum of per-example gradients with respect to a leaf.

    No per-example gradient is formed: the sites of all examples are transposed at once,
    as in an ordinary backward pass.
    """
    num, lead = weights.shape[0], weights.ndim
    operands, cotangents = [], []

    def of_each(x: Factor) -> Array:
        if x.has_examples:
            return x.array
        return jnp.broadcast_to(x.array, (num, *x.array.shape))

    for site in sites:
        a, d, which = factors.of(site)
        operand = None if a is None else of_each(a)
        operands.append(operand if which is None else (operand, of_each(which)))
        # The scale may be out of the range of half precision.
        wide = widened(d.array)
        wide = wide if d.has_examples else wide[None]
        weight = weights.astype(wide.dtype)
        weight = jnp.expand_dims(weight, range(lead, wide.ndim))
        product = wide * weight
        # Sites are linear in cotangents: outputs are summed before they are transposed.
        if lead > 1:
            product = jnp.sum(product, axis=tuple(range(1, lead)))
        cotangents.append(product.astype(d.array.dtype))
    return _transposed_sites(sites, leaf, operands, cotangents, factors.values, num=num)


def inner_products(
    sites: Sequence[Site], factors: Factors, direction: Array
) -> Real[Array, " n"]:
    """The inner products of the gradients of some examples with a direction.

    A complex leaf counts as its real and its imaginary part.
    """
    num = factors.num
    of_sites = [factors.of(site) for site in sites]
    operands: list[Any] = [
        None if x.operand is None else x.operand.array for x in of_sites
    ]
    for i, (_, _, which) in enumerate(of_sites):
        if which is not None:
            operands[i] = operands[i], which.array
    outs = _outputs_of(sites, jnp.conj(direction), operands, factors.values, num)
    products = [
        jnp.real(widened(of_site.cotangent.array) * widened(x))
        for of_site, x in safe_zip(of_sites, outs)
    ]
    sums = [jnp.sum(x, axis=tuple(range(1, x.ndim))) for x in products]
    return functools.reduce(jnp.add, sums)


def _transposed_sites(
    sites: Sequence[Site],
    leaf: _Leaf,
    operands: Values,
    cotangents: Values,
    values: Values,
    num: int | None = None,
) -> Array:
    """The transpose of the sites of one example, or of `num` of them, in the leaf."""
    outputs = lambda leaf: _outputs_of(sites, leaf, operands, values, num)
    return jax.linear_transpose(outputs, leaf)(cotangents)[0]


def _outputs_of(
    sites: Sequence[Site],
    leaf: Array,
    operands: Values,
    values: Values,
    num: int | None,
) -> list[Array]:
    """The outputs of the sites of one example, or of `num` of them."""
    outs = []
    for site, a in safe_zip(sites, operands):
        output = site.output
        if num is not None:
            in_axes = (None if a is None else 0, None)
            output = jax.vmap(output, in_axes, axis_size=num)
        outs.append(output(a, site.view.apply(leaf, values)))
    return outs


def selects_rows(sites: Sequence[Site]) -> bool:
    """Whether the gradient consists of the rows that tokens select, if at all."""
    if len(sites) != 1 or sites[0].rule.token is None:
        return False
    (site,) = sites
    # Each place of a token must have one row: no sum over other positions, no further
    # table in another step, and nothing that mixes rows on the way to the leaf.
    of_token = axes_of(site, 0)[str(site.rule.token)]
    is_plain = has_named_axes(site) and not has_weights(site)
    are_rows = of_token.role is Role.LEAF
    are_places = {*positions(site)} <= {*site.a_axes}
    is_sliced = any(loop.is_sliced for loop in site.loops)
    is_other = is_sliced or site.takes_real_part
    return is_plain and are_rows and are_places and not is_other


class TokenRows(NamedTuple):
    """The rows of a table that have a gradient, and their gradients."""

    tokens: Integer[Array, "n tokens"]
    rows: Inexact[Array, "n tokens row"]


def rows_of_tokens(site: Site, factors: Factors) -> TokenRows:
    """The tokens of each example, and the rows of its gradient that they select.

    Of equal tokens, the first has the row. The others have zero, and no token.
    """
    terms = factors.terms(site)
    assert terms.operand is not None
    (tokens, places), (d, axes) = terms.operand, terms.cotangent
    of_row = sorted(axis for axis in axes if axis.role is Role.LEAF)
    lead = (EXAMPLE, *(axis for axis in places if axis != EXAMPLE))
    between = (axis for axis in axes if axis not in lead and axis not in of_row)
    # To [examples, places of tokens, entries of a row].
    d = aligned(d, axes, (*lead, *between, *of_row))
    num, total = factors.num, math.prod(site.sizes[name] for name in site.a_axes)
    d = jnp.broadcast_to(d, (num, *d.shape[1:])).reshape(num, total, -1)
    tokens = aligned(tokens, places, lead).reshape(-1, total)
    tokens = jnp.broadcast_to(tokens, (num, total))
    no_token = site.sizes[str(site.rule.token)]

    def add(tokens: Array, d: Array) -> TokenRows:
        # The first place with a token gets the sum of all places with it.
        place = jnp.arange(total)
        is_equal = tokens[:, None] == tokens[None]
        first = jnp.min(jnp.where(is_equal, place[None], total), axis=1)
        rows = jax.ops.segment_sum(d, first, total)
        return TokenRows(jnp.where(first == place, tokens, no_token), rows)

    return jax.vmap(add)(tokens, d * scale_of(site))


def _gradients_at(site: Site, factors: Factors, leaf: _Leaf) -> Array:
    num_outputs = len(factors.outputs)
    if site.rule.token is not None:
        a, d, _ = factors.of(site)
        assert a is not None
        # The transpose of a lookup adds to rows, where a product would need one-hot
        # rows.
        transposed = lambda a, d: _transposed_sites(
            [site], leaf, [a], [d], factors.values
        )
        for _ in range(num_outputs):
            transposed = jax.vmap(transposed, (None, 0))
        axes = [0 if factor.has_examples else None for factor in (a, d)]
        if factors.has_examples([site]):
            transposed = jax.vmap(transposed, axes)
        return transposed(a.array, d.array)

    site, (a, d, which) = moved(site, factors)

    def form(a: Factor | None, d: Factor) -> Array:
        operands = [a] if which is None else [a, which]
        part = Factors(operands, [d], factors.outputs, values=factors.values)
        return _formed(site, part, leaf)

    if a is None or not a.has_examples or is_on_mesh(a.array) or which is not None:
        return form(a, d)
    # Patches are several times as large as their input, so they are computed for some
    # examples at a time: as many as keep them no larger than the input, the cotangents
    # of several outputs, or what the platform allows. (On a mesh, this would gather the
    # same examples from all devices, so all patches are computed at once.)
    num, outputs = factors.num, math.prod(d.shape_of_one(num_outputs))
    allowed = platform().patch_bytes / a.array.dtype.itemsize
    patched = lambda axes: math.prod(site.sizes[name] for name in axes)
    entries = lambda x: num * math.prod(x.shape_of_one())
    of_a = max(outputs * entries(a), allowed) / max(patched(site.a_axes), 1)
    of_d = max(entries(d), allowed) / max(outputs * patched(site.d_axes), 1)
    at_a_time = int(min(of_a, of_d))
    if at_a_time >= num or 0 in d.array.shape:
        return form(a, d)
    # A remainder would be compiled separately.
    fitting = (i for i in range(at_a_time, at_a_time // 2, -1) if num % i == 0)
    at_a_time = next(fitting, max(at_a_time, 1))

    def one(rows: tuple) -> Array:
        row = [
            Factor(x[None]) if factor.has_examples else factor
            for factor, x in safe_zip((a, d), rows)
        ]
        return form(*row)[0]

    rows = tuple(factor.array if factor.has_examples else None for factor in (a, d))
    return jax.lax.map(one, rows, batch_size=at_a_time)


class Moved(NamedTuple):
    """A site, and its factors in the order of axes that it takes."""

    site: Site
    factors: SiteFactors


def moved(site: Site, factors: Factors) -> Moved:
    """The site and the factors from which a gradient is formed."""
    of_site = factors.of(site)
    a, d, which = of_site
    # Those of several outputs are larger than the operand, and stay as they are.
    if math.prod(d.shape_of_one(len(factors.outputs))) > 1:
        return Moved(site, of_site)
    # This is done for all examples at once, whose factors may be in memory like this.
    a = None if a is None else a.vmap(site.moved_operand)
    d = d.vmap(site.moved_cotangent, len(factors.outputs))
    return Moved(site.formed, SiteFactors(a, d, which))


def _formed(site: Site, factors: Factors, leaf: _Leaf) -> Array:
    """The gradients at a site from its own factors, for the steps that it has."""
    site = site.with_own(0, 0, 1)
    terms = factors.gradient_terms(site)
    present = axes_in(terms)
    lead = (EXAMPLE, *factors.outputs) if EXAMPLE in present else factors.outputs
    # An axis of size 1 may be missing from both; the reshape restores it.
    of_leaf = sorted(axis for axis in present if axis.is_of_leaf)
    product = contract(terms, (*lead, *of_leaf))
    shape = product.shape[: len(lead)]
    if has_named_axes(site):
        product = (product * scale_of(site)).reshape(*shape, *leaf.shape)
        return _in_dtype(product, leaf.dtype)
    view = site.view.struct(leaf, factors.values)
    # The scale of the view is applied when it is pulled back.
    product = (product * site.rule.scale).reshape(*shape, *view.shape)
    one = site.view.transposed(leaf, factors.values)
    for _ in shape:
        one = jax.vmap(one)
    return one(_in_dtype(product, view.dtype))


def _in_dtype(x: Array, dtype: Any) -> Array:
    """Casts to a dtype; takes the real part for a real leaf in complex arithmetic."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        x = jnp.real(x)
    return x.astype(dtype)
