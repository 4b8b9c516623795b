"""Inner products in a metric whose eigenvalues are any table over two eigenbases.

In the eigenbases of two factors, gradients are sums of outer products `d a^T`, and a
metric is a table `S` that scales entries. The inner product of two gradients,

    sum over q and p of S[q, p] d1[q] a1[p] d2[q] a2[p],

is one contraction of five arrays: `S` scales operands for each `q`, products of these
meet those of cotangents, and no gradient is formed for an output. What is rounded is
`S`, and products and sums, as for gradients that are formed.
"""

import functools
from collections.abc import Iterator

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.dtypes import widened
from .._base.platforms import platform
from .._base.trees import safe_zip
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._batch.sums import Sum
from .._sites.axes import Axes, axes_in, Axis, EXAMPLE, Named, Role
from .._sites.contract import contract_cost
from .._sites.cost import contraction_cost, Cost
from .._sites.factors import Factor
from .._sites.gram import (
    gram_terms,
    OfLeaf,
    ScaledTerms,
    separate_terms,
    SquaredNorms,
)
from .._sites.inner_product import AbstractInnerProduct


# The axes of a leaf of coordinates.
_BATCH, _ROWS, _COLUMNS = (Axis(Role.LEAF, number) for number in range(3))


class TableProduct(AbstractInnerProduct):
    """The inner product in a metric with any eigenvalues.

    Gradients are in its eigenbasis.

    - `root`: the roots of the eigenvalues.
    """

    root: Inexact[Array, "batch rows columns"]

    def gram(
        self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes
    ) -> Inexact[Array, "..."]:
        # Large eigenvalues meet cotangents that may be small first, whose products
        # could be out of range.
        top = jnp.max(self.root, axis=2)
        table = jnp.square(self.root / jnp.where(top == 0, 1, top)[:, :, None])
        ones = jnp.ones_like(self.root[:, 0])
        sides = scaled(uses, top, ones), scaled(other, top, ones)
        pairs = _with_table(gram_terms(*sides, example), table)
        return functools.reduce(jnp.add, (_in_slices(pair, out) for pair in pairs))

    def squares(self, uses: OfLeaf) -> SquaredNorms:
        table = jnp.square(self.root)
        sums = (
            functools.reduce(
                jnp.add,
                (_in_slices(x, (EXAMPLE, *uses.factors.outputs)) for x in terms),
            )
            for terms in (
                _with_table(gram_terms(uses, uses), table),
                _with_table(separate_terms(uses), table),
            )
        )
        total, separate = sums
        # Rounding may leave a negative number where terms cancel.
        return SquaredNorms(jnp.maximum(total, 0), separate)

    def coordinates(self, jacobian: Factor) -> Factor:
        return times(jacobian, self.root)

    def cost(self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes) -> Cost:
        pairs = _with_table(gram_terms(uses, other, example), self.root)
        return contraction_cost((terms, out) for terms, _ in pairs)


def _with_table(
    pairs: Iterator[ScaledTerms], table: Inexact[Array, "batch rows columns"]
) -> Iterator[ScaledTerms]:
    """The terms of each pair of sites, times a table over the entries of the leaf."""
    for terms, scale in pairs:
        wide = [Named(widened(x), axes) for x, axes in terms]
        entries = Named(table.astype(wide[0].array.dtype), (_BATCH, _ROWS, _COLUMNS))
        yield ScaledTerms([*wide, entries], scale)


def _in_slices(pair: ScaledTerms, out: Axes) -> Array:
    """The contraction, for as many rows at a time as a block may have."""
    terms = pair.terms
    present = tuple(axis for axis in out if axis in axes_in(terms))
    # Products of operands have an entry for each pair of examples and each row.
    largest = contract_cost(terms, present).largest * terms[0].array.dtype.itemsize
    num = terms[-1].array.shape[1]
    # Only what has rows is cut. On a mesh, a loop over blocks takes no other arrays.
    cut = [i for i, (_, axes) in enumerate(terms) if _ROWS in axes]
    places = tuple(terms[i].axes.index(_ROWS) for i in cut)
    size = max(1, int(num * platform().block_bytes / max(largest, 1)))

    def of_rows(rows: Rows) -> Array:
        of_block = [*terms]
        for i, x in safe_zip(cut, rows.arrays):
            of_block[i] = Named(x, terms[i].axes)
        return ScaledTerms(of_block, pair.scale).contracted(out)

    rows = Rows([terms[i].array for i in cut], places, num)
    return accumulated(of_rows, rows, size, Sum())


def scaled(uses: OfLeaf, of_rows: Array, of_columns: Array) -> OfLeaf:
    """The leaf with its gradients, as matrices, scaled by rows and by columns."""
    scales = {"rows": of_rows, "columns": of_columns}
    factors = uses.factors
    operands, cotangents = [*factors.operands], [*factors.cotangents]
    for site in uses.sites:
        assert site.operand is not None
        a, d = operands[site.operand], cotangents[site.perturbation]
        assert a is not None
        assert d is not None
        # Rows are the last axis of the cotangent, or of the operand if it is swapped.
        cotangents[site.perturbation] = times(d, scales[site.rule.d_axes[-1]])
        operands[site.operand] = times(a, scales[site.rule.a_axes[-1]])
    return uses._replace(factors=factors.replaced(operands, cotangents))


def times(x: Factor, scale: Array) -> Factor:
    """Scales the last axes."""
    wide = widened(x.array)
    scale = jnp.expand_dims(scale, range(wide.ndim - scale.ndim))
    return x.of(wide * scale.astype(wide.dtype))
