"""Projections of the gradients of some parameters, and of the factors of a program."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from .._base.dtypes import common_dtype, widened
from .._base.mesh import is_on_mesh
from .._base.platforms import exact_products, platform
from .._base.trees import safe_zip
from .._batch.accumulators import Concat
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._curvature.kronecker_sums import (
    flat_use,
    FlatUse,
    product_in_basis,
    VECTOR,
)
from .._sites.cost import Cost, FeatureCost, num_products
from .._sites.factors import Factor, Factors
from .._sites.features import AbstractFeatures, AbstractFeaturesOfSites
from .._sites.formed import gradients
from .._sites.site import Site
from .._sites.table import SiteTable
from .directions import DenseDirections, Directions, SparseDirections
from .metric_part import MetricPart, PartUses, PlainBasis, uses_of_parts
from .product_basis import ProductBasis
from .projection import ENTRY_COST, Projected, Projection


class ProjectedPart(eqx.Module):
    """A part of a metric, whose coordinates are projected.

    - `directions`: those of the coordinates.
    - `sides`: the same in place of the coordinates of operands and cotangents, if the
        basis has them and dense directions.
    """

    part: MetricPart
    directions: Directions
    sides: DenseDirections | None

    def of_gradients(
        self, leaves: list[Inexact[Array, "vectors ..."]]
    ) -> Inexact[Array, "vectors dim"]:
        """What it adds to a projection, before scaling, from gradients."""
        # Eigenvalues may differ by many orders of magnitude, and signs by none.
        if isinstance(self.part.basis, PlainBasis):
            return self.directions.of_array(*leaves)
        with exact_products():
            return self.directions.of_array(jax.vmap(self.part.coordinates)(leaves))

    def has_products(self, uses: PartUses) -> bool:
        """Whether factors suffice in a program, and take less than gradients."""
        in_program, basis, directions = uses.part, self.part.basis, self.directions
        layout = in_program.layout
        if not uses.uses or layout is None:
            return False
        if isinstance(directions, DenseDirections):
            if isinstance(basis, PlainBasis):
                return directions.of_layout(layout) is not None
            if self.sides is not None or in_program.is_counted:
                return True
        elif isinstance(basis, PlainBasis):
            return False
        # Coordinates of factors, for few positions, or else of their sum.
        _, outputs, inputs = layout.sizes
        each = uses.num_positions * (outputs**2 + inputs**2)
        is_less = each <= outputs * inputs * (outputs + inputs)
        return is_less and not in_program.is_counted

    def of_products(
        self, uses: PartUses, factors: Factors
    ) -> Inexact[Array, "n vectors dim"]:
        """The same from factors, if it `has_products`."""
        in_program, basis, directions = uses.part, self.part.basis, self.directions
        layout = in_program.layout
        assert layout is not None
        flat = [flat_use(use, factors, layout) for use in uses.uses]
        if isinstance(basis, PlainBasis):
            assert isinstance(directions, DenseDirections)
            of_layout = directions.of_layout(layout)
            assert of_layout is not None
            return of_layout.of_products(flat, layout)
        assert isinstance(basis, ProductBasis)
        flat = [*map(_wide, flat)]
        with exact_products():
            if self.sides is not None:
                return self.sides.of_products(flat, layout)
            # Tokens look up signs, after eigenvalues scaled their cotangents.
            if in_program.is_counted and isinstance(directions, DenseDirections):
                scaled = [
                    dataclasses.replace(use, d=basis.of_tokens(use.tokens, use.d)[1])
                    for use in flat
                ]
                return directions.of_products(scaled, layout)
            bases = basis.outputs, basis.inputs
            formed = (product_in_basis(use, layout, bases) for use in flat)
            x = functools.reduce(jnp.add, formed)
            if basis.inner is not None:
                x = x * basis.inner[None, None].astype(x.dtype)
            lead = x.shape[:2]
            total = directions.of_array(x.reshape(math.prod(lead), *x.shape[2:]))
            return total.reshape(*lead, total.shape[1])


class ProjectedGradients(AbstractFeatures):
    """A projection of the coordinates of all parts of a metric."""

    parts: tuple[ProjectedPart, ...]
    dim: int = eqx.field(static=True)

    def of_gradients(
        self, leaves: Sequence[Inexact[Array, "n ..."]]
    ) -> Inexact[Array, "n dim"]:
        of_parts = [
            x.of_gradients([leaves[i] for i in x.part.leaves]) for x in self.parts
        ]
        return _total(of_parts, self.dim)

    def at(self, table: SiteTable) -> "ProjectedFactors":
        every = uses_of_parts(table, [x.part for x in self.parts])
        uses: list[PartUses] = []
        costs: dict[int, FeatureCost] = {}
        for part, of_part in safe_zip(self.parts, every):
            leaves = part.part.leaves
            entries = sum(math.prod(table.leaves[i].shape) for i in leaves)
            by_gradient = _cost_of_gradient(part.directions, entries)
            sites = [site for i in leaves for site in table.of(i)]
            forming = sum(
                (Cost(num_products(site), 8.0 * entries) for site in sites), Cost()
            )
            by_factors, kept = by_gradient + forming, of_part._replace(uses=[])
            if part.has_products(of_part):
                cost = of_part.cost(self.dim)
                # Gradients of all examples must not take more memory than factors.
                is_large = entries > 2 * of_part.num_entries
                are_wide = all(_is_wide(table.leaves[i]) for i in leaves)
                if cost.time <= by_factors.time or is_large or not are_wide:
                    by_factors, kept = cost, of_part
            uses.append(kept)
            # The first leaf, the weight, stands for all.
            costs |= dict.fromkeys(leaves, FeatureCost())
            costs[leaves[0]] = FeatureCost(by_factors, by_gradient)
        return ProjectedFactors(self, table, uses, costs)


class ProjectedFactors(AbstractFeaturesOfSites):
    """The projection of what the factors of a program are contracted to."""

    of_gradients: ProjectedGradients
    table: SiteTable = eqx.field(static=True)
    uses: list[PartUses] = eqx.field(static=True)
    costs: dict[int, FeatureCost] = eqx.field(static=True)

    def cost(self, leaf: int) -> FeatureCost:
        return self.costs[leaf]

    def of_factors(
        self, factors: Factors, formed: Mapping[int, Array]
    ) -> Inexact[Array, "n dim"]:
        # A loss has one vector.
        one = lambda x: x if x is None else x.vmap(lambda d: d[None])
        cotangents = [*map(one, factors.cotangents)]
        of_loss = {"cotangents": cotangents, "outputs": (VECTOR,)}
        return self.of_vectors(dataclasses.replace(factors, **of_loss), formed, 1)[:, 0]

    def of_vectors(
        self, factors: Factors, formed: Mapping[int, Array], vectors: int
    ) -> Inexact[Array, "n vectors dim"]:
        """The same for several vectors that were pulled back for each example."""
        results = []
        for part, uses in safe_zip(self.of_gradients.parts, self.uses):
            leaves = part.part.leaves
            # Factors in half precision are widened, and gradients have been rounded.
            if all(i in formed and _is_wide(formed[i]) for i in leaves):
                shapes = ((factors.num, *self.table.leaves[i].shape) for i in leaves)
                pairs = safe_zip(leaves, shapes)
                x = part.of_gradients([formed[i].reshape(s) for i, s in pairs])[:, None]
            elif uses.uses:
                x = part.of_products(uses, factors)
            else:
                x = self._formed(part, factors, vectors)
            results.append(x)
        return _total(results, self.of_gradients.dim)

    def _formed(
        self, part: ProjectedPart, factors: Factors, vectors: int
    ) -> Inexact[Array, "n vectors dim"]:
        """What a part adds, from gradients that are formed, some at a time."""
        leaves = part.part.leaves
        structs = [self.table.leaves[i] for i in leaves]
        sites = [site for i in leaves for site in self.table.of(i)]
        items, treedef = jtu.tree_flatten(_of_sites(factors, sites), is_leaf=_is_factor)
        axes = [0 if _is_factor(x) and x.has_examples else None for x in items]
        arrays = [x.array if _is_factor(x) else x for x in items]

        def of_rows(rows: Rows) -> Array:
            pairs = safe_zip(items, rows.arrays)
            own = treedef.unflatten([x.of(y) if _is_factor(x) else y for x, y in pairs])
            own = dataclasses.replace(own, num=rows.total)
            formed = [self._gradients(i, own, vectors) for i in leaves]
            lead = formed[0].shape[:2]
            flat = [x.reshape(math.prod(lead), *x.shape[2:]) for x in formed]
            total = part.of_gradients(flat)
            return total.reshape(*lead, total.shape[1])

        # On a mesh, cutting would gather the same examples from all devices.
        size = None
        if not any(map(is_on_mesh, arrays)):
            entries = vectors * sum(x.size * x.dtype.itemsize for x in structs)
            size = max(1, platform().block_bytes // max(entries, 1))
        return accumulated(
            of_rows, Rows(arrays, tuple(axes), factors.num), size, Concat()
        )

    def _gradients(
        self, leaf: int, factors: Factors, vectors: int
    ) -> Inexact[Array, "n vectors ..."]:
        sites, struct = self.table.of(leaf), self.table.leaves[leaf]
        if not sites:
            # The function does not use this parameter.
            return jnp.zeros((factors.num, vectors, *struct.shape), struct.dtype)
        formed = gradients(sites, factors, struct)
        if factors.has_examples(sites):
            return formed
        return jnp.broadcast_to(formed[None], (factors.num, *formed.shape))


def _is_wide(x: Any) -> bool:
    return jnp.finfo(x.dtype).bits >= 32


def _is_factor(x: Any) -> bool:
    return isinstance(x, Factor)


def _of_sites(factors: Factors, sites: Sequence[Site]) -> Factors:
    """Only those of some sites."""
    operands = {i for x in sites for i in (x.operand, x.which)}
    cotangents = {x.perturbation for x in sites}
    only = lambda numbers, xs: [x if i in numbers else None for i, x in enumerate(xs)]
    own = factors.replaced(
        only(operands, factors.operands), only(cotangents, factors.cotangents)
    )
    return dataclasses.replace(own, outs=[], curve=None)


def _wide(use: FlatUse) -> FlatUse:
    a = None if use.a is None else widened(use.a)
    return dataclasses.replace(use, a=a, d=widened(use.d))


def _total(
    summands: list[Inexact[Array, "*lead dim"]], dim: int
) -> Inexact[Array, "*lead dim"]:
    # Parts have independent signs, so that products between them are 0 on average
    # and one sum over all parts will do. Both sides of a kernel are divided by the
    # root, so that their product is a mean over the directions.
    dtype = common_dtype(*(x.dtype for x in summands))
    total = functools.reduce(jnp.add, (x.astype(dtype) for x in summands))
    return total / math.sqrt(dim)


def _cost_of_gradient(directions: Directions, entries: int) -> Cost:
    """The cost of projecting a gradient that is there."""
    if isinstance(directions, SparseDirections):
        each = float(ENTRY_COST * directions.places.shape[1])
    else:
        each = 2.0 * directions.rows.shape[-1]
    return Cost(each * entries, 4.0 * entries)


def projected(
    parts: Sequence[MetricPart], structs: Sequence[Any], projection: Projection
) -> ProjectedGradients:
    """The projection of the coordinates of a metric of parameters like `structs`."""
    arrays = [_projected_array(part, structs) for part in parts]
    drawn = safe_zip(parts, projection.directions(arrays))
    every = tuple(ProjectedPart(part, x, _sides(part, x)) for part, x in drawn)
    return ProjectedGradients(every, projection.dim)


def _projected_array(part: MetricPart, structs: Sequence[Any]) -> Projected:
    if isinstance(part.basis, ProductBasis):
        layout = part.basis.part.layout
        assert layout is not None
        return Projected((*layout.sizes,), part.basis.inner is not None)
    leaves = [structs[i] for i in part.leaves]
    shape = jax.eval_shape(part.coordinates, leaves).shape
    # A scalar is a vector with one entry. All axes but the first are columns.
    if len(shape) < 2:
        return Projected(shape or (1,))
    return Projected((1, shape[0], math.prod(shape[1:])))


def _sides(part: MetricPart, directions: Directions) -> DenseDirections | None:
    basis = part.basis
    if isinstance(directions, SparseDirections) or not isinstance(basis, ProductBasis):
        return None
    if basis.part.is_counted or basis.inner is not None:
        return None
    # `R1^T d a^T R2` along `s t^T` is `(R1 s . d) (R2 t . a)`.
    assert basis.inputs is not None
    assert directions.columns is not None
    turn = lambda basis, x: jnp.einsum("boq,bqj->boj", basis, x.astype(basis.dtype))
    with exact_products():
        return DenseDirections(
            turn(basis.outputs, directions.rows), turn(basis.inputs, directions.columns)
        )
