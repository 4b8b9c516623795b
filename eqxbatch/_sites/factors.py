"""Gradients, and weighted sums of them, from the factors of sites.

All arrays here have examples along axis 0. A per-example gradient with respect to a
leaf is the sum over the leaf's sites of `einsum(a, d)`, pulled back from the view to
the leaf. It is only formed if that is cheaper.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Inexact, Integer, Real

from .._base.dtypes import widened
from .._base.mesh import is_on_mesh
from .._base.platforms import platform
from .._base.structs import full_varying_as
from .._base.trees import safe_zip
from .axes import Axes, axes_in, Axis, EXAMPLE, Named, Role
from .contract import aligned, contract
from .site import axes_of, AxisNames, has_named_axes, positions, Site


_Leaf = Array | jax.ShapeDtypeStruct  # Only the type matters.


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factor:
    """One operand or cotangent of some examples.

    `has_examples` says whether axis 0 has the examples; otherwise the factor is shared
    by all of them.
    """

    array: Any
    has_examples: bool = eqx.field(static=True, default=True)

    def vmap(self, fun: Callable[[Array], Array], num: int = 0) -> "Factor":
        """Applies `fun` to the factor of each example, and over `num` further axes."""
        for _ in range(num + self.has_examples):
            fun = jax.vmap(fun)
        return self.of(fun(self.array))

    def of(self, array: Array) -> "Factor":
        """Another array with the same examples."""
        return Factor(array, self.has_examples)


@functools.partial(
    jtu.register_dataclass,
    data_fields=["operands", "cotangents", "values", "unit", "outs", "curve"],
    meta_fields=["outputs", "num"],
)
@dataclasses.dataclass(eq=False)
class Factors:
    """The operands and cotangents of all sites, for some examples.

    - `operands`, `cotangents`: a `Factor`, or an array of examples, for each.
    - `outputs`: the axes of the cotangents after the examples: those of the
        differentiated output, if it is not a scalar.
    - `num`: the number of examples, in case there are no factors.
    - `values`: the values of the program; `unit`: a divisor of weights.
    - `outs`, `curve`: what the function returned, and the curvature along `outputs`.
    """

    operands: list
    cotangents: list
    outputs: Axes = ()
    num: Any = None
    values: list = dataclasses.field(default_factory=list)
    unit: Array | None = None
    outs: list = dataclasses.field(default_factory=list)
    curve: Array | None = None

    def __post_init__(self) -> None:
        as_factor = lambda x: x if isinstance(x, Factor) else Factor(x)
        self.operands = [*map(as_factor, self.operands)]
        self.cotangents = [*map(as_factor, self.cotangents)]
        if self.num is None:
            factors = [*self.operands, *self.cotangents]
            arrays = (x.array for x in factors if x.has_examples)
            self.num = next((x.shape[0] for x in arrays if x is not None), None)

    def __repr__(self) -> str:
        numbers = f"{len(self.operands)} operands, {len(self.cotangents)} cotangents"
        along = f" along {', '.join(map(repr, self.outputs))}" if self.outputs else ""
        return f"<factors of {self.num} examples: {numbers}{along}>"

    def where(self, is_kept: Bool[Array, " n"]) -> "Factors":
        """Zeros in place of the factors of the examples that are not kept."""

        def keep(x: Factor) -> Factor:
            is_inexact = jnp.issubdtype(x.array.dtype, jnp.inexact)
            return Factor(kept_examples(x.array, is_kept)) if is_inexact else x

        return self.replaced([*map(keep, self.operands)], [*map(keep, self.cotangents)])

    def are_finite(self) -> Bool[Array, " n"]:
        """Whether all factors of each example are finite."""

        def is_finite(x: Array) -> Array:
            return jnp.all(jnp.isfinite(x.reshape(x.shape[0], -1)), axis=1)

        finite = jnp.ones(self.num, bool)
        for x in (*self.operands, *self.cotangents):
            is_inexact = jnp.issubdtype(x.array.dtype, jnp.inexact)
            if x.has_examples and is_inexact:
                finite &= is_finite(x.array)
        return finite

    def replaced(
        self, operands: list, cotangents: list, unit: Array | None = None
    ) -> "Factors":
        """Other factors of the same examples."""
        unit = self.unit if unit is None else unit
        factors = {"operands": operands, "cotangents": cotangents}
        return dataclasses.replace(self, unit=unit, **factors)

    def of(self, site: Site) -> tuple[Factor | None, Factor]:
        """The factors `a` and `d` of a site."""

        def at_steps(x: Factor, num: int) -> Factor:
            return x.of(site.at_steps(x.array, x.has_examples + num))

        d = at_steps(self.cotangents[site.perturbation], len(self.outputs))
        if site.operand is None:
            return None, d
        return at_steps(self.operands[site.operand], 0), d

    def which(self, site: Site) -> Factor | None:
        """The group that each position of a site meets, if it has groups."""
        if site.which is None:
            return None
        x = self.operands[site.which]
        return x.of(site.at_steps(x.array, x.has_examples))

    def expanded(self, site: Site) -> tuple[Factor | None, Factor]:
        """The factors `a` and `d` with the axes that the site names."""
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
        """Whether the gradients at some sites differ between examples."""
        return any(
            factor is not None and factor.has_examples
            for site in sites
            for factor in (*self.of(site), self.which(site))
        )


def kept_examples(x: Array, is_kept: Bool[Array, " n"]) -> Array:
    """Zeros in place of the examples that are not kept."""
    mask = jnp.expand_dims(is_kept, range(1, x.ndim))
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def named_terms(
    site: Site, factors: Factors, example: Axis, by_name: dict[str, Axis]
) -> list[Named]:
    """The operand of a site, if it has one, and the cotangent, which comes last.

    Between them is the group of each position, if the site has groups.
    """
    a, d = factors.expanded(site)

    def named(factor: Factor, outputs: Axes, names: AxisNames) -> Named:
        lead = (example,) if factor.has_examples else ()
        axes = (*lead, *outputs, *(by_name[name] for name in names))
        return Named(factor.array, axes)

    cotangent = named(d, factors.outputs, site.d_axes)
    if a is None:
        return [cotangent]
    operand = named(a, (), site.a_axes)
    if site.rule.drops:
        cotangent = _without_dropped(cotangent, operand, site)
    which = factors.which(site)
    if which is None:
        return [operand, cotangent]
    # No group is past the last one.
    group = str(site.rule.group)
    is_met = jax.nn.one_hot(which.array, site.sizes[group], dtype=d.array.dtype)
    names = (*site.which_axes, group)
    return [operand, named(which.of(is_met), (), names), cotangent]


def _without_dropped(cotangent: Named, tokens: Named, site: Site) -> Named:
    """Replaces entries by zero where a token selects no row of a table."""
    (d, axes), (rows, of_rows) = cotangent, tokens
    missing = tuple(axis for axis in of_rows if axis not in axes)
    # Examples come first.
    joined = (*missing, *axes)
    is_in = aligned(rows < site.sizes[str(site.rule.token)], of_rows, joined)
    d = aligned(d, axes, joined)
    return Named(jnp.where(is_in, d, jnp.zeros((), d.dtype)), joined)


def scale_of(site: Site) -> Any:
    """The number that multiplies the terms of a site."""
    is_in_terms = site.view.is_weighted or not has_named_axes(site)
    return site.rule.scale * (1.0 if is_in_terms else site.view.scale)


def has_weights(site: Site) -> bool:
    """Whether a site multiplies each entry of a leaf by its own weight.

    If the axes of the view are not those of the leaf, this is part of the view.
    """
    return site.view.is_weighted and has_named_axes(site)


def weights_of(site: Site, values: list) -> Array:
    """The weights of a leaf's entries, in the shape of the view."""
    ones = full_varying_as(site.view.type_of_leaf, 1)
    return widened(site.view.apply(ones, values))


def weight_terms(
    site: Site, values: list, by_name: dict[str, Axis], unit: Array | None = None
) -> list[Named]:
    """The weights of a leaf's entries on the way to a site, if there are any.

    They are divided by the `unit`, if there is one.
    """
    if not has_weights(site):
        return []
    weights = weights_of(site, values)
    weights = weights if unit is None else weights / unit
    return [Named(weights, tuple(by_name[name] for name in site.w_axes))]


def site_terms(site: Site, factors: Factors) -> list[Named]:
    """The arrays whose contraction is a site's gradient, pulled back to the leaf.

    If the view's axes are not those of the leaf, it is the gradient with respect to the
    view.
    """
    by_name = axes_of(site, 0)
    terms = named_terms(site, factors, EXAMPLE, by_name)
    return [*terms, *weight_terms(site, factors.values, by_name, factors.unit)]


def has_rows(sites: Sequence[Site]) -> bool:
    """Whether the gradient consists of the rows that tokens select, if at all."""
    if len(sites) != 1 or sites[0].rule.token is None:
        return False
    (site,) = sites
    of_token = axes_of(site, 0)[str(site.rule.token)]
    is_plain = has_named_axes(site) and not has_weights(site)
    are_rows = of_token.role is Role.LEAF
    are_places = {*positions(site)} <= {*site.a_axes}
    is_sliced = any(loop.is_sliced for loop in site.loops)
    is_other = is_sliced or site.takes_real_part
    return is_plain and are_rows and are_places and not is_other


def rows_of_tokens(
    site: Site, factors: Factors
) -> tuple[Integer[Array, "n tokens"], Inexact[Array, "n tokens row"]]:
    """The tokens of each example, and the rows of its gradient that they select.

    Of equal tokens, the first has the row. The others have zero, and no token.
    """
    by_name = axes_of(site, 0)
    (tokens, places), (d, axes) = named_terms(site, factors, EXAMPLE, by_name)
    of_row = sorted(axis for axis in axes if axis.role is Role.LEAF)
    lead = (EXAMPLE, *(axis for axis in places if axis != EXAMPLE))
    rest = (axis for axis in axes if axis not in lead and axis not in of_row)
    d = aligned(d, axes, (*lead, *rest, *of_row))
    num, total = factors.num, math.prod(site.sizes[name] for name in site.a_axes)
    d = jnp.broadcast_to(d, (num, *d.shape[1:])).reshape(num, total, -1)
    tokens = aligned(tokens, places, lead).reshape(-1, total)
    tokens = jnp.broadcast_to(tokens, (num, total))
    no_token = site.sizes[str(site.rule.token)]

    def add(tokens: Array, d: Array) -> tuple[Array, Array]:
        place = jnp.arange(total)
        is_equal = tokens[:, None] == tokens[None]
        first = jnp.min(jnp.where(is_equal, place[None], total), axis=1)
        rows = jax.ops.segment_sum(d, first, total)
        return jnp.where(first == place, tokens, no_token), rows

    return jax.vmap(add)(tokens, d * scale_of(site))


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

    which = factors.which(site)

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
    num, patches = factors.num, math.prod(site.sizes[name] for name in site.a_axes)
    outputs = math.prod(d.array.shape[d.has_examples :][:num_outputs])
    allowed = platform().patch_bytes / a.array.dtype.itemsize
    at_a_time = int(max(a.array.size * outputs, allowed) / max(patches, 1))
    if at_a_time >= num:
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


def _formed(site: Site, factors: Factors, leaf: _Leaf) -> Array:
    """The gradients at a site from its own factors, for the steps that it has."""
    site = site.with_own(0, 0, 1)
    terms = site_terms(site, factors)
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
        (a, d), which = factors.of(site), factors.which(site)
        operand = None if a is None else of_each(a)
        operands.append(operand if which is None else (operand, of_each(which)))
        # The scale may be out of the range of half precision.
        wide = widened(d.array)
        wide = wide if d.has_examples else wide[None]
        weight = weights.astype(wide.dtype)
        weight = jnp.expand_dims(weight, range(lead, wide.ndim))
        product = wide * weight
        if lead > 1:
            product = jnp.sum(product, axis=tuple(range(1, lead)))
        cotangents.append(product.astype(d.array.dtype))
    return _transposed(sites, leaf, operands, cotangents, factors.values, num=num)


def inner_products(
    sites: Sequence[Site], factors: Factors, direction: Array
) -> Real[Array, " n"]:
    """The inner products of the gradients of some examples with a direction.

    A complex leaf counts as its real and its imaginary part.
    """
    num = factors.num
    pairs = [factors.of(site) for site in sites]
    operands: list = [None if a is None else a.array for a, _ in pairs]
    for i, which in enumerate(map(factors.which, sites)):
        if which is not None:
            operands[i] = operands[i], which.array
    outs = _outputs(sites, jnp.conj(direction), operands, factors.values, num)
    products = [
        jnp.real(widened(d.array) * widened(x)) for (_, d), x in safe_zip(pairs, outs)
    ]
    sums = [jnp.sum(x, axis=tuple(range(1, x.ndim))) for x in products]
    return functools.reduce(jnp.add, sums)


def _transposed(
    sites: Sequence[Site],
    leaf: _Leaf,
    operands: list,
    cotangents: list,
    values: list,
    num: int | None = None,
) -> Array:
    """The transpose of the sites of one example, or of `num` of them, in the leaf."""
    outputs = lambda leaf: _outputs(sites, leaf, operands, values, num)
    return jax.linear_transpose(outputs, leaf)(cotangents)[0]


def _outputs(
    sites: Sequence[Site], leaf: Array, operands: list, values: list, num: int | None
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
