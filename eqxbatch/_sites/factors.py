"""The factors of sites for some examples, and the names of their axes.

At a dense layer `y = w a`, they are the operand `a` and the cotangent `d` of `y`: the
gradient of one example is `w_ij = d_i a_j`. All arrays here have examples along axis 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree

from .._base.dtypes import widened
from .._base.structs import full_varying_as
from .axes import Axes, Axis, EXAMPLE, Named, Shape
from .contract import aligned
from .site import axes_of, AxisNames, has_named_axes, Site


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factor:
    """One operand or cotangent of some examples.

    `has_examples` says whether axis 0 has the examples; otherwise the factor is shared
    by all of them.
    """

    array: Any
    has_examples: bool = eqx.field(static=True, default=True)

    def __repr__(self) -> str:
        shape = getattr(self.array, "shape", "?")
        of = "for each example" if self.has_examples else "shared by all examples"
        return f"<factor of shape {shape}, {of}>"

    def vmap(self, fun: Callable[[Array], Array], num: int = 0) -> "Factor":
        """Applies `fun` to the factor of each example, and over `num` further axes."""
        for _ in range(num + self.has_examples):
            fun = jax.vmap(fun)
        return self.of(fun(self.array))

    def of(self, array: Array) -> "Factor":
        """Another array with the same examples."""
        return Factor(array, self.has_examples)

    def shape_of_one(self, num: int | None = None) -> Shape:
        """The shape for one example, or the first `num` sizes of it."""
        return self.array.shape[self.has_examples :][:num]


class SiteFactors(NamedTuple):
    """The factors of one site, for the steps of loops that it has.

    - `operand`: None if the site has none.
    - `which`: the group that each position meets; None if there are no groups.
    """

    operand: Factor | None
    cotangent: Factor
    which: Factor | None

    @property
    def have_examples(self) -> bool:
        """Whether the gradient differs between examples."""
        return any(x is not None and x.has_examples for x in self)


class SiteTerms(NamedTuple):
    """The factors of one site with their axes: their contraction is its gradient.

    - `operand`: None if the site has none.
    - `met`: one where a position meets a group, and zero elsewhere; None if there are
        no groups.
    """

    operand: Named | None
    met: Named | None
    cotangent: Named

    @property
    def present(self) -> list[Named]:
        """Those that the site has; the cotangent is last."""
        return [term for term in self if term is not None]


# Tokens that select rows are integers, or the one-hot rows that they stand for.
TokenForm = Literal["keep", "one_hot"]


@functools.partial(
    jtu.register_dataclass,
    data_fields=[
        "operands",
        "cotangents",
        "values",
        "unit",
        "outs",
        "curve",
        "jacobians",
    ],
    meta_fields=["outputs", "num"],
)
@dataclasses.dataclass(eq=False)
class Factors:
    """The operands and cotangents of all sites, for some examples.

    - `operands`, `cotangents`: a `Factor`, or an array of examples, for each; None for
        one that no contraction needs.
    - `outputs`: the axes of the cotangents after the examples: those of the
        differentiated output, if it is not a scalar.
    - `num`: the number of examples, in case there are no factors.
    - `values`: the values of the program; `unit`: a divisor of weights.
    - `outs`: what the function returned; `curve`: the curvature along `outputs`.
    - `jacobians`: the gradients of the leaves that have been formed, by leaf. They take
        the place of the factors of these leaves.
    """

    operands: list[Any]
    cotangents: list[Any]
    outputs: Axes = ()
    num: Any = None
    values: list[Array | None] = dataclasses.field(default_factory=list)
    unit: Array | None = None
    outs: list[Array] = dataclasses.field(default_factory=list)
    curve: PyTree = None
    jacobians: dict[int, Factor] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Traced programs return bare arrays, with examples along axis 0.
        is_made = lambda x: x is None or isinstance(x, Factor)
        as_factor = lambda x: x if is_made(x) else Factor(x)
        self.operands = [*map(as_factor, self.operands)]
        self.cotangents = [*map(as_factor, self.cotangents)]
        if self.num is None:
            factors = [*self.present, *self.jacobians.values()]
            arrays = (x.array for x in factors if x.has_examples)
            self.num = next((x.shape[0] for x in arrays if x is not None), None)

    def __repr__(self) -> str:
        count = lambda name, x: f"{len(x)} {name}{'s' * (len(x) != 1)}"
        of_sites = count("operand", self.operands), count("cotangent", self.cotangents)
        along = f" along {', '.join(map(repr, self.outputs))}" if self.outputs else ""
        formed = [count("Jacobian", self.jacobians)] if self.jacobians else []
        present = ", ".join([*of_sites, *formed])
        examples = f"{self.num} example{'s' * (self.num != 1)}"
        return f"<factors of {examples}: {present}{along}>"

    @property
    def present(self) -> list[Factor]:
        """All operands and cotangents that are not None."""
        return [x for x in (*self.operands, *self.cotangents) if x is not None]

    def where(self, is_kept: Bool[Array, " n"]) -> "Factors":
        """Zeros in place of the factors of the examples that are not kept."""

        def keep(x: Factor | None) -> Factor | None:
            # Integers stay: the cotangents that they meet are zero.
            if x is None or not jnp.issubdtype(x.array.dtype, jnp.inexact):
                return x
            return Factor(kept_examples(x.array, is_kept))

        return self.replaced([*map(keep, self.operands)], [*map(keep, self.cotangents)])

    def are_finite(self) -> Bool[Array, " n"]:
        """Whether all factors of each example are finite."""

        def is_finite(x: Array) -> Array:
            return jnp.all(jnp.isfinite(x.reshape(x.shape[0], -1)), axis=1)

        finite = jnp.ones(self.num, bool)
        for x in self.present:
            is_inexact = jnp.issubdtype(x.array.dtype, jnp.inexact)
            if x.has_examples and is_inexact:
                finite &= is_finite(x.array)
        return finite

    def replaced(
        self,
        operands: Sequence[Factor | None],
        cotangents: Sequence[Factor | None],
        unit: Array | None = None,
    ) -> "Factors":
        """Other factors of the same examples."""
        unit = self.unit if unit is None else unit
        return dataclasses.replace(
            self, operands=[*operands], cotangents=[*cotangents], unit=unit
        )

    def of(self, site: Site) -> SiteFactors:
        """The factors of a site."""

        def at_steps(x: Factor, num: int = 0) -> Factor:
            return x.of(site.at_steps(x.array, x.has_examples + num))

        def operand(number: int | None) -> Factor | None:
            return None if number is None else at_steps(self.operands[number])

        # Axes of loops follow those of examples and, in cotangents, of outputs.
        d = at_steps(self.cotangents[site.perturbation], len(self.outputs))
        return SiteFactors(operand(site.operand), d, operand(site.which))

    def has_examples(self, sites: Sequence[Site]) -> bool:
        """Whether the gradients at some sites differ between examples."""
        return any(self.of(site).have_examples for site in sites)

    def terms(
        self,
        site: Site,
        side: int = 0,
        tokens: TokenForm = "keep",
        *,
        example: Axis = EXAMPLE,
        by_name: Mapping[str, Axis] | None = None,
    ) -> SiteTerms:
        """The factors of a site with their axes.

        For a dense layer, the operand has the axes `(EXAMPLE, LEAF 1)`, and the
        cotangent has `(EXAMPLE, *outputs, LEAF 0)`.

        - `side`: the side of positions; see `axes_of`.
        - `tokens`: whether tokens stay integers, or become the rows that they select,
            which then have the axis of the table that is indexed.
        - `example`: the axis of the examples.
        - `by_name`: the axes of the site, if they are not those of `axes_of`.
        """
        # Names say which axes of two sites are the same when terms are contracted.
        names = axes_of(site, side) if by_name is None else by_name
        a, d, which = self.of(site)

        def named(factor: Factor, outputs: Axes, of_site: AxisNames) -> Named:
            lead = (example,) if factor.has_examples else ()
            axes = (*lead, *outputs, *(names[name] for name in of_site))
            return Named(factor.array, axes)

        # Sums over positions in half precision would lose digits.
        d = d.vmap(site.arrange, len(self.outputs))
        d = d.of(widened(d.array))
        cotangent = named(d, self.outputs, site.d_axes)
        if a is None:
            return SiteTerms(None, None, cotangent)

        # Integers are tokens, or a mask or counts, which are multiplied.
        def expand(x: Array) -> Array:
            x = site.expand(x)
            if site.rule.token:
                return x
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x.astype(d.array.dtype)
            return widened(x)

        a = a.vmap(expand)
        if tokens == "one_hot" and site.rule.token is not None:
            # An index that is out of range selects no row.
            size = site.sizes[site.rule.token]
            rows = a.of(jax.nn.one_hot(a.array, size, dtype=jnp.float32))
            operand = named(rows, (), (*site.a_axes, site.rule.token))
            return SiteTerms(operand, None, cotangent)
        operand = named(a, (), site.a_axes)
        # A token that selects no row has no gradient, so its cotangent must not count.
        if site.rule.drops:
            cotangent = _without_dropped(cotangent, operand, site)
        if which is None:
            return SiteTerms(operand, None, cotangent)
        # No group is past the last one.
        group = str(site.rule.group)
        is_met = jax.nn.one_hot(which.array, site.sizes[group], dtype=d.array.dtype)
        met = named(which.of(is_met), (), (*site.which_axes, group))
        return SiteTerms(operand, met, cotangent)

    def weights(self, site: Site, by_name: Mapping[str, Axis]) -> list[Named]:
        """The weights of a leaf's entries on the way to a site, if there are any.

        They are divided by the `unit`, if there is one.
        """
        if not has_weights(site):
            return []
        weights = weights_of(site, self.values)
        weights = weights if self.unit is None else weights / self.unit
        return [Named(weights, tuple(by_name[name] for name in site.w_axes))]

    def gradient_terms(self, site: Site) -> list[Named]:
        """The arrays whose contraction is a site's gradient, pulled back to the leaf.

        If the view's axes are not those of the leaf, it is the gradient with respect to
        the view.
        """
        by_name = axes_of(site, 0)
        terms = self.terms(site, by_name=by_name)
        return [*terms.present, *self.weights(site, by_name)]


def kept_examples(x: Array, is_kept: Bool[Array, " n"]) -> Array:
    """Zeros in place of the examples that are not kept."""
    mask = jnp.expand_dims(is_kept, range(1, x.ndim))
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def _without_dropped(cotangent: Named, tokens: Named, site: Site) -> Named:
    """Replaces entries by zero where a token selects no row of a table."""
    (d, axes), (rows, of_rows) = cotangent, tokens
    # Which tokens are dropped may differ along axes that the cotangent lacks.
    missing = tuple(axis for axis in of_rows if axis not in axes)
    # Examples come first.
    joined = (*missing, *axes)
    is_in = aligned(rows < site.sizes[str(site.rule.token)], of_rows, joined)
    d = aligned(d, axes, joined)
    return Named(jnp.where(is_in, d, jnp.zeros((), d.dtype)), joined)


def scale_of(site: Site) -> int | float | complex:
    """The number that multiplies the terms of a site."""
    # Weights are the view of ones, and pulling back applies the view: both have its
    # scale in them.
    is_in_terms = site.view.is_weighted or not has_named_axes(site)
    return site.rule.scale * (1.0 if is_in_terms else site.view.scale)


def has_weights(site: Site) -> bool:
    """Whether a site multiplies each entry of a leaf by its own weight.

    If the axes of the view are not those of the leaf, this is part of the view.
    """
    return site.view.is_weighted and has_named_axes(site)


def weights_of(site: Site, values: list[Array | None]) -> Array:
    """The weights of a leaf's entries, in the shape of the view."""
    # The view multiplies each entry by its weight, so that of ones has the weights.
    ones = full_varying_as(site.view.type_of_leaf, 1)
    return widened(site.view.apply(ones, values))
