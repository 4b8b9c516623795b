"""The factors of a program in the coordinates of a metric."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.platforms import exact_products
from .._base.trees import safe_zip
from .._curvature.kronecker_sums import VECTOR
from .._curvature.spectrum import DampedProduct
from .._sites.factors import Factors
from .._sites.formed import gradients
from .._sites.inner_product import AbstractInnerProduct, PlainProduct
from .._sites.program import Program
from .._sites.site import AxisNames, leaf_site, Rule, Site
from .._sites.table import SiteTable
from .._sites.views import leaf_view
from .eigenvalue_table import TableProduct
from .metric import Metric
from .metric_part import uses_of_parts
from .product_basis import Coordinates, ProductBasis
from .separable import scales_of, SeparableProduct


class InMetric:
    """The factors of a program in the coordinates of a metric.

    - `table`: the leaves and sites that they belong to.
    """

    def __init__(self, program: Program, metric: Metric):
        self._original, self._metric = program, metric
        self._uses = uses_of_parts(program.table, metric.parts)
        project = metric.projected
        self._projected = None if project is None else project.at(program.table)
        self.table = self._in_coordinates()

    def inners(self) -> list[AbstractInnerProduct]:
        """The inner product of the factors of each leaf of the table."""
        inners: list[AbstractInnerProduct] = [PlainProduct()] * len(self.table.leaves)
        if self._projected is not None:
            return inners
        # Leaf `i` of the table has the coordinates of part `i` of the metric.
        damped_leaves: dict[int, DampedProduct] = {}
        for leaf, (part, uses) in enumerate(safe_zip(self._metric.parts, self._uses)):
            if not uses.uses or not isinstance(part.basis, ProductBasis):
                continue
            root, damped = part.basis.inner, part.basis.damped
            if root is not None:
                inners[leaf] = TableProduct(root)
                if damped is not None and abs(damped.power) == 1:
                    damped_leaves[leaf] = damped
        # For all leaves at once: these are few numbers, and many small operations.
        scales_of_leaves = scales_of([*damped_leaves.values()])
        for scales, (leaf, damped) in safe_zip(scales_of_leaves, damped_leaves.items()):
            table = inners[leaf]
            assert isinstance(table, TableProduct)
            inners[leaf] = SeparableProduct(damped, scales, table)
        return inners

    def pairs(
        self,
        operands: list[Array],
        cotangents: list[Array],
        lead: tuple[int, ...],
        values: list,
    ) -> list[list[Coordinates]]:
        """Operand and cotangent of one example, for each site of each part.

        Cotangents have axes of the sizes `lead` first, those of outputs.
        """
        # Sums of Kronecker factors take one axis of examples and one of vectors.
        num, vectors = len(lead), math.prod(lead)
        flat = [x.reshape(1, vectors, *x.shape[num:]) for x in cotangents]
        of_example = [x[None] for x in operands]
        factors = Factors(of_example, flat, (VECTOR,), 1, values)
        # A projection adds up all leaves: they are one leaf of the table.
        if self._projected is not None:
            (total,) = self._projected.of_vectors(factors, {}, vectors)
            return [[Coordinates(None, total.reshape(*lead, total.shape[-1]))]]
        results = []
        for part, uses in safe_zip(self._metric.parts, self._uses):
            if not uses.uses:
                # Formed in the precision of the model. Only coordinates need all digits
                # of products, as eigenvalues may differ by many orders of magnitude.
                jacobians = [self._jacobian(x, factors, vectors) for x in part.leaves]
                with exact_products():
                    coordinates = jax.vmap(part.coordinates)(jacobians)
                pairs = [Coordinates(None, coordinates[None])]
            else:
                assert isinstance(part.basis, ProductBasis)
                with exact_products():
                    pairs = part.basis.pairs(uses.uses, factors)
            # Without the axis of examples, and with those of outputs.
            results.append(
                [
                    Coordinates(
                        None if a is None else a[0], d.reshape(*lead, *d.shape[2:])
                    )
                    for a, d in pairs
                ]
            )
        return results

    def _jacobian(
        self, leaf: int, factors: Factors, vectors: int
    ) -> Inexact[Array, "vectors ..."]:
        table = self._original.table
        sites, struct = table.of(leaf), table.leaves[leaf]
        if sites:
            return gradients(sites, factors, struct)[0]
        # The model does not use this parameter.
        return jnp.zeros((vectors, *struct.shape), struct.dtype)

    def _in_coordinates(self) -> SiteTable:
        """The leaves and sites of the coordinates."""
        leaves: list = []
        sites: list[Site] = []
        operands: list = []
        cotangents: list = []
        # Shapes are those of one example and one direction, as in tables of programs.
        table, values = self._original.table, self._original.value_structs()
        structs = table.operands, table.perturbations, values
        run = lambda operands, cotangents, values: self.pairs(
            operands, cotangents, (), values
        )
        for number, pairs in enumerate(jax.eval_shape(run, *structs)):
            a, d = pairs[0]
            # Coordinates of formed gradients are a leaf that is its own cotangent.
            if a is None:
                leaves.append(d)
                sites.append(leaf_site(number, d, len(cotangents)))
                cotangents.append(d)
                continue
            # Those of outer products belong to one matrix, which all uses share.
            in_program, uses = self._uses[number]
            layout = in_program.layout
            assert layout is not None
            leaves.append(jax.ShapeDtypeStruct(layout.sizes, d.dtype))
            for use, (a, d) in safe_zip(uses, pairs):
                is_counted = in_program.is_counted
                rule = _rule(a.shape[0], layout.sizes, use.is_swapped, is_counted)
                view = leaf_view(number, leaves[-1])
                sites.append(Site(view, rule, len(cotangents), len(operands), False))
                operands.append(a)
                cotangents.append(d)
        return SiteTable(leaves, sites, cotangents, operands)


def _rule(num: int, shape: tuple[int, ...], is_swapped: bool, is_counted: bool) -> Rule:
    """A batch of matrices that meets operands, or tokens, at several positions."""
    axes, token = ("batch", "rows", "columns"), None
    of_a: AxisNames = ("position", "batch", "columns")
    of_d: AxisNames = ("position", "batch", "rows")
    # The operand has the outputs of the layout, as in a last layer that is an
    # embedding.
    if is_swapped:
        of_a, of_d = of_d, of_a
    sizes = {"position": num, **dict(safe_zip(axes, shape))}
    # Such as `"pbc,brc->pbr"`: position, batch, rows and columns.
    letters = lambda axes: "".join(axis[0] for axis in axes)
    equation = f"{letters(of_a)},{letters(axes)}->{letters(of_d)}"
    op: Callable[[Any, Array], Array] = functools.partial(jnp.einsum, equation)
    # Tokens look up columns of each matrix: `[batch, rows, position]` first.
    if is_counted:
        op = lambda tokens, w: jnp.moveaxis(jnp.take(w, tokens, axis=2), 2, 0)
        of_a, token = ("position",), "columns"
    # What the operation depends on: sites with the same key may be stacked.
    key = f"{sizes}{token}{is_swapped}"
    return Rule("metric", op, None, of_a, of_d, axes, sizes, token=token, key=key)
