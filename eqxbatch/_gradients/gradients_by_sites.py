"""Norms and weighted sums of per-example gradients, without materialising them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._base.dtypes import (
    common_power_of_two,
    exponent_of,
    largest_of_each,
    power_of_two,
    Scale,
    scaled_examples,
    Squares,
    squares_in_range,
    widened,
    widest,
)
from .._base.mesh import is_on_mesh, spec_of, with_auto_axes
from .._base.platforms import exact_products, products_of
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._batch.rows import Rows
from .._batch.sums import is_summary, VarianceState
from .._sites.cancel import (
    norms_unless_cancelled,
    squared_distances,
    squared_norms,
)
from .._sites.cost import Contraction, Method, plan
from .._sites.factors import (
    Factor,
    Factors,
    has_weights,
    kept_examples,
    weights_of,
)
from .._sites.features import AbstractFeatures, AbstractFeaturesOfSites
from .._sites.formed import gradients, inner_products, weighted_sum
from .._sites.gram import has_norms_of_factors, OfLeaf, squares_of_factors
from .._sites.program import OF_LOSS
from .._sites.site import Site
from .._sites.table import SiteTable
from .clipping import (
    Clipped,
    Groups,
    PlainSquares,
    squares_of_examples,
    squares_one_by_one,
)
from .per_example import BlockGradients, Results, total_of, value_and_aux


def gradients_by_sites(
    example: TracedFunction,
    groups_of: Callable[[PyTree], "Groups"] | None,
    method: Method,
    is_mean: bool,
    has_moments: bool,
    direction: list | None,
    features: AbstractFeatures | None,
    has_padding: bool,
) -> BlockGradients:
    """The sum of the gradients, clipped by their norms, or their mean if `is_mean`.

    Materialised gradients are contracted with weights, as the factors of sites are.
    Scaling them and adding them up would read them twice more. Moments, `features` and
    inner products with a `direction` are those of the gradients before clipping. With
    `has_padding`, an example of weight 0 has no influence beyond rounding, even if it
    is NaN.
    """
    # What depends on types alone is decided here, once for all microbatches. Of the
    # parameters, only structure and shapes matter for groups.
    at = None if features is None else functools.cache(features.at)
    costs = None if at is None else lambda table: at(table).cost
    # Only features need no norms to choose by.
    has_norms = features is None or groups_of is not None
    program, contractions = plan(example, method, costs, has_norms)
    at_sites = None if at is None else at(program.table)
    groups = None if groups_of is None else groups_of(example.tree(example.leaves))

    def totals(
        bounds: list,
        direction: list | None,
        at_sites: AbstractFeaturesOfSites | None,
        leaves: list,
        factors: Factors,
        weights: Array | None,
    ) -> Results:
        num = factors.num
        gradients = SiteGradients(program.table, contractions, factors, leaves)
        of_whole, of_each = {}, {}
        # Statistics are those of the gradients as they are.
        if has_moments:
            of_whole["moments"] = example.tree(gradients.moments(weights))
        if direction is not None:
            of_each["inner_products"] = gradients.inner_products(direction)
        if at_sites is not None:
            of_each["features"] = gradients.features(at_sites)
        # What clipping multiplies a gradient by is a weight in the sum, so that clipped
        # gradients are never formed.
        clipped = Clipped([jnp.ones(num)] * len(leaves), None, None)
        if groups is not None:
            clipped = dataclasses.replace(groups, bounds=bounds).clip(
                gradients.plain_squares(), gradients.squares
            )
            of_each["norms"] = clipped.norms
        scales, powers, is_kept = clipped.scales, [], clipped.is_kept
        # A weight of 0 does not remove NaN, so that padding is left out before.
        if has_padding and weights is not None:
            # What is finite stays: it is the derivative with respect to the weight.
            finite = [*map(jnp.isfinite, jtu.tree_leaves(clipped.norms))]
            finite = finite or [factors.are_finite()]
            is_real = weights.astype(bool) | functools.reduce(jnp.logical_and, finite)
            is_kept = is_real if is_kept is None else is_kept & is_real
            scales = [jnp.where(is_real, scale, 0) for scale in scales]
        if example.is_narrow:
            # If all gradients are long or the bound is small, all scales are small, and
            # float16 would lose them. Divided by this, the largest is from 1 to 2.
            powers = [power_of_two(jnp.max(scale)) for scale in scales]
            scales = [s / power for s, power in safe_zip(scales, powers)]

        # For each leaf, the sum over examples of `scale * weight * share * gradient`.
        def sums(weights: Array | None, share: float) -> list:
            shares = [scale * share for scale in scales]
            if weights is not None:
                shares = [x * weights.astype(x.dtype) for x in shares]
            totals = gradients.weighted_sums(shares, is_kept)
            if not example.is_narrow:
                return totals
            wide = map(widened, totals)
            return [x * p.astype(x.dtype) for x, p in safe_zip(wide, powers)]

        if has_moments and groups is None:
            # The mean of the moments is that of the gradients.
            of_whole["gradient"] = jtu.tree_map(
                lambda x: x.mean if is_mean else x.mean * x.count.astype(x.mean.dtype),
                of_whole["moments"],
                is_leaf=is_summary,
            )
        else:
            of_whole["gradient"] = total_of(example, sums, num, weights, is_mean)
        return Results(of_whole, of_each)

    def gradients(rows: Rows) -> Results:
        # One forward and one backward pass for everything.
        factors = program.factors(rows, OF_LOSS)
        outs, factors = factors.outs, dataclasses.replace(factors, outs=[])

        # On a mesh with explicit axes, contractions name no sharding of their own: sums
        # have that of the parameters, and results of examples that of the values.
        def specs(out: Results) -> Results:
            of_leaves = example.tree([*map(spec_of, example.leaves)])
            of_each = dict.fromkeys(out.of_each, spec_of(outs[0]))
            return Results(dict.fromkeys(out.of_whole, of_leaves), of_each)

        bounds = [] if groups is None else groups.of_rows(rows.bounds).bounds
        operands = (bounds, direction, at_sites, example.leaves, factors, rows.weights)
        # Contractions have the precision of the program's own products.
        with products_of(example.closed):
            results = with_auto_axes(totals, operands, specs)
        outputs = value_and_aux(example, outs)
        return results._replace(of_each={**outputs, **results.of_each})

    return gradients


@dataclasses.dataclass(frozen=True)
class SiteGradients:
    """Per-example gradients, represented by the factors of their sites.

    Only the types of the `leaves` matter.
    """

    table: SiteTable
    contractions: list[Contraction]
    factors: Factors
    leaves: list

    @functools.cached_property
    def formed(self) -> dict[int, Array]:
        """The gradients that are formed for their norms and kept, by leaf."""
        return {c.leaf: self._gradients(c.leaf) for c in self.contractions if c.keeps}

    @functools.cached_property
    def products(self) -> dict[int, Squares]:
        """The norms that follow from those of factors, by leaf."""
        # All at once, because programs with many small arrays take long to compile.
        leaves = [
            c.leaf
            for c in self.contractions
            if c.form == "factors" and has_norms_of_factors(self.table.of(c.leaf))
        ]
        squares = squares_of_factors([*map(self._of_leaf, leaves)])
        return dict(safe_zip(leaves, squares))

    def _of_leaf(self, leaf: int) -> OfLeaf:
        return OfLeaf(self.table.of(leaf), self.factors, self.leaves[leaf])

    def _gradients(self, leaf: int) -> Array:
        return gradients(*self._of_leaf(leaf))

    def plain_squares(self) -> PlainSquares:
        """The squared norms; None if all of them follow from those of factors."""
        # Norms of products are right in any range.
        forms = {c.form for c in self.contractions if c.leaf not in self.products}
        if forms <= {"none"}:
            return PlainSquares(None, [])
        with exact_products():  # Bounds rest on these norms.
            norms, flags = norms_unless_cancelled([*self._sums.values()])
        products = {leaf: x.number for leaf, x in self.products.items()}
        squares = self._of_leaves(lambda x, _: squares_of_examples(x), norms, products)
        return PlainSquares(squares, [*flags.values()])

    def squares(self, scales: Sequence[Scale] = ()) -> list[Squares]:
        """For each leaf, the squared norms of the per-example gradients.

        Gradients that are formed are multiplied by the scales of their leaves first, so
        that their squares are in range.
        """
        # Where no gradient is formed, its factors are brought into range.
        powers, scaled = [], []
        for uses in self._sums.values():
            in_range = _with_squares_in_range(uses)
            powers.append(in_range.exponent)
            scaled.append(in_range.uses)
        with exact_products():
            norms = squared_norms(scaled)

        scaled_square = squares_one_by_one()

        # Without scales, a leaf is squared as it is, scaled up and scaled down.
        def square(x: Array, leaf: int) -> Squares:
            if scales:
                return scaled_square(x, scales[leaf])
            return squares_in_range([x])[0]

        sums = [*map(Squares, norms, powers)]
        return self._of_leaves(square, sums, self.products)

    @functools.cached_property
    def _sums(self) -> dict[int, OfLeaf]:
        """The leaves whose gradients are not formed, and are no products."""
        leaves = (c.leaf for c in self.contractions if c.form == "factors")
        return {i: self._of_leaf(i) for i in leaves if i not in self.products}

    def _of_leaves(
        self, square: Callable[[Array, int], Any], sums: list, products: dict[int, Any]
    ) -> list:
        """Squared norms for each leaf, from `square` where gradients are formed."""
        squares = {**products, **dict(safe_zip(self._sums, sums))}
        for contraction in self.contractions:
            leaf, struct = contraction.leaf, self.leaves[contraction.leaf]
            if contraction.form == "none":
                squares[leaf] = square(jnp.zeros(self.factors.num, struct.dtype), leaf)
            elif contraction.form != "factors":
                # Those that are not kept for the sum are formed again there.
                x = self.formed.get(leaf)
                squares[leaf] = square(self._gradients(leaf) if x is None else x, leaf)
        return [squares[c.leaf] for c in self.contractions]

    def moments(self, weights: Array | None) -> list[VarianceState]:
        """For each leaf, the mean and the squared distances to it, entry by entry.

        The squares of an outer product are the product of the squares of its factors.
        Where a sum of them nearly cancels with the mean, and for all other gradients,
        a few gradients are formed at a time.
        """
        # Weights are the shares of examples in microbatches that overlap.
        num, real = self.factors.num, jnp.result_type(float)
        count = jnp.asarray(num, real) if weights is None else jnp.sum(weights)
        shares = jnp.ones(num, count.dtype) if weights is None else weights
        uses = [self._of_leaf(c.leaf) for c in self.contractions]
        # Distances are small differences to the mean, which need all of its digits.
        with exact_products():
            sums = self.weighted_sums([shares / count] * len(uses), None)
            means = [*map(widened, sums)]
            squares = squared_distances(uses, means, shares)
        return [
            VarianceState(mean, square, count, count, mean.dtype)
            for mean, square in safe_zip(means, squares)
        ]

    def inner_products(self, direction: list) -> Real[Array, " n"]:
        """The inner products of the gradients with a direction, a list of leaves."""
        # A leaf that is not used has a gradient of zero, and no factors.
        products = [
            inner_products(self.table.of(c.leaf), self.factors, x)
            for c, x in safe_zip(self.contractions, direction)
            if c.form != "none"
        ]
        dtypes = [x.dtype for x in products] or [jnp.result_type(float)]
        dtype = widest(*dtypes)
        zeros = jnp.zeros(self.factors.num, dtype)
        return sum((x.astype(dtype) for x in products), zeros)

    def features(self, at_sites: AbstractFeaturesOfSites) -> Inexact[Array, "n dim"]:
        """The features of the gradients, some of which are kept for the sum."""
        return at_sites.of_factors(self.factors, self.formed)

    def weighted_sums(
        self, weights: Sequence[Real[Array, " n"]], is_kept: Array | None
    ) -> list[Inexact[Array, "..."]]:
        """For each leaf, the weighted sum of the per-example gradients.

        The `weights` are given for each leaf. Examples where `is_kept` is False are
        left out, even if their gradient is not finite.
        """
        # Factors of zero, because 0 times NaN is NaN.
        factors = self.factors if is_kept is None else self.factors.where(is_kept)
        return [
            self._weighted_sum(c, factors, weight, is_kept)
            for c, weight in safe_zip(self.contractions, weights)
        ]

    def _weighted_sum(
        self,
        contraction: Contraction,
        factors: Factors,
        weights: Array,
        is_kept: Array | None,
    ) -> Array:
        leaf = contraction.leaf
        struct = self.leaves[leaf]
        if contraction.form == "none":
            return jnp.zeros(struct.shape, struct.dtype)
        if leaf in self.formed:
            formed = self.formed[leaf]
            if is_kept is not None:
                formed = kept_examples(formed, is_kept)
            if formed.dtype == jnp.float16:  # Their sum may overflow.
                formed = widened(formed)
            weights = weights.astype(formed.dtype)
            if is_on_mesh(formed):
                # A product would gather an axis that is sharded. `is_kept` can be on a
                # mesh even if `formed`, which is flat then, was not.
                weights = jnp.expand_dims(weights, range(1, formed.ndim))
                return jnp.sum(weights * formed, axis=0).reshape(struct.shape)
            # Adding scaled gradients rounds nothing, unlike products by default.
            whole = jax.lax.Precision.HIGHEST
            total = jnp.tensordot(weights, formed, 1, precision=whole)
            return total.reshape(struct.shape)
        # Nothing is formed: sites are transposed at once, with weighted cotangents.
        sites = self.table.of(leaf)
        if self.factors.of(sites[0]).cotangent.array.dtype == jnp.float16:
            factors, weights = _balanced(_WeightedFactors(factors, weights), sites)
        return weighted_sum(sites, factors, struct, weights)


class _InRange(NamedTuple):
    """A leaf with factors such that norms are divided by `2**exponent`."""

    exponent: Int[Array, " n"]
    uses: OfLeaf


def _with_squares_in_range(uses: OfLeaf) -> _InRange:
    """Factors with squares in range, for norms divided by a power of two."""
    # For each example, all sites are divided by the same power of two, so that the norm
    # of their sum is. Sites may share an operand, and are given their own.
    (sites, factors, _), separate = uses, uses.with_own_factors()
    of_sites = map(separate.factors.of, separate.sites)
    operands, cotangents, _ = safe_zip(*of_sites)
    power = _common_power(cotangents)
    cotangents = [_over(d, power) for d in cotangents]
    exponent = exponent_of(power)
    # A gradient is a product, so that operands are divided by another power.
    if _have_size(sites, factors):
        power = _common_power(operands)
        operands = [_over(a, power) for a in operands]
        exponent += exponent_of(power)
    # All examples share the weights of a leaf's entries, such as a mask.
    unit = None
    if all(map(has_weights, sites)):
        weights = [weights_of(site, factors.values) for site in sites]
        largest = [jnp.max(jnp.abs(x), initial=0) for x in weights]
        unit = common_power_of_two(largest)
        exponent += exponent_of(unit)
    # What says which group a position meets comes last, and stays.
    groups = separate.factors.operands[len(sites) :]
    scaled = factors.replaced([*operands, *groups], cotangents, unit)
    return _InRange(exponent, separate._replace(factors=scaled))


class _WeightedFactors(NamedTuple):
    """Factors of some examples, and a weight for each of them."""

    factors: Factors
    weights: Array


def _balanced(weighted: _WeightedFactors, sites: Sequence[Site]) -> _WeightedFactors:
    """Equal products, rescaled so that no weighted cotangent is out of range."""
    factors, weights = weighted
    if not _have_size(sites, factors):
        return weighted
    # Clipping divides by about `|d| |a|`. A cotangent `d` times such a weight may leave
    # the range of float16, but not if `|a|` goes from the operand `a` to the weight.
    numbers = {s.operand for s in sites if s.operand is not None}
    power = _common_power([factors.operands[i] for i in numbers])
    operands = [
        a.of(_over(a, power).array.astype(a.array.dtype))
        if i in numbers and a is not None
        else a
        for i, a in enumerate(factors.operands)
    ]
    balanced = factors.replaced(operands, factors.cotangents)
    return _WeightedFactors(balanced, weights * power.astype(weights.dtype))


def _have_size(sites: Sequence[Site], factors: Factors) -> bool:
    """Whether the operands of all sites can be scaled.

    Tokens cannot be scaled, a missing operand stands for ones, and integers and bools
    must keep their values.
    """
    operands = [factors.of(site).operand for site in sites]
    return all(
        a is not None and jnp.issubdtype(a.array.dtype, jnp.inexact) for a in operands
    )


def _common_power(factors: Sequence[Factor]) -> Real[Array, " n"]:
    return common_power_of_two([largest_of_each(x.array) for x in factors])


def _over(x: Factor, power: Array) -> Factor:
    return x.of(scaled_examples(x.array, 1 / power))
