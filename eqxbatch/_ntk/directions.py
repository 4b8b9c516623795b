"""Random directions of one array, which gradients or their factors are projected on."""

import math
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Integer, Num

from .._base.dtypes import widened
from .._curvature.kronecker_sums import along, FlatUse, rotated
from .._sites.kronecker import Layout


class DenseDirections(eqx.Module):
    """Products of a vector for the rows and one for the columns of some matrices.

    - `rows`, `columns`: such as random signs; a vector has no columns.
    """

    rows: Num[Array, "batch rows dim"]
    columns: Num[Array, "batch columns dim"] | None = None

    def of_array(
        self, x: Inexact[Array, "vectors ..."]
    ) -> Inexact[Array, "vectors dim"]:
        """The projections of several arrays."""
        wide, rows = widened(x), self.rows
        if self.columns is None:
            return wide.reshape(len(x), rows.shape[1]) @ rows[0].astype(wide.dtype)
        # `[vectors, rows, batch, columns]`, and one product if there is one matrix.
        batch, size, _ = rows.shape
        wide = wide.reshape(len(x), batch, size, self.columns.shape[1])
        wide = jnp.swapaxes(wide, 1, 2)
        products = along(wide, self.columns)
        products *= jnp.swapaxes(rows, 0, 1)[None].astype(products.dtype)
        return jnp.sum(products, (1, 2))

    def of_products(
        self, uses: Iterable[FlatUse], layout: Layout
    ) -> Inexact[Array, "n vectors dim"]:
        """The same for gradients that are outer products of factors.

        Rows are the outputs of the layout, and columns its inputs.
        """
        # Along `s t^T`, `d a^T` is `(s . d) (t . a)`: no gradient is formed.
        total: Array | float = 0.0
        for use in uses:
            a, d = rotated(use, layout, (self.rows, self.columns))
            total += jnp.sum(a[:, None].astype(d.dtype) * d, (2, 3))
        return jnp.asarray(total)

    def of_layout(self, layout: Layout) -> "DenseDirections | None":
        """Those of outputs and inputs, if these are of rows and columns of a leaf.

        None if one of them is not a product of signs for its entries.
        """
        if self.columns is None:
            return None
        signs = self.rows, self.columns
        # The signs have two groups of axes: the first axis of the leaf, which the
        # layout may have cut into `num` pieces, and all others.
        num = next(
            num
            for num in range(1, len(layout.shape) + 1)
            if math.prod(layout.shape[:num]) == layout.leaf_shape[0]
        )
        axes = range(num), range(num, len(layout.shape))
        size = layout.size
        sides: list[Array] = []
        taken: list[int] = []
        for group in (layout.outputs, layout.inputs):
            # Entries of one side must have signs of their own: those of both sides in
            # one array, or one side in both arrays, are no product.
            which = [i for i in (0, 1) if all(axis in axes[i] for axis in group)]
            if len(which) != 1 or which[0] in taken:
                return None
            taken += which
            pieces = axes[which[0]]
            # Nor is one array for both sides, as of a stack of layers.
            if size([i for i in pieces if i not in (*layout.batch, *group)]) != 1:
                return None
            # Either all matrices of the batch have the same signs, or each its own.
            batch = tuple(axis for axis in layout.batch if axis in pieces)
            if size(batch) not in (1, size(layout.batch)):
                return None
            # Axes of no kind have size 1, so that they may go first.
            units = tuple(axis for axis in pieces if axis not in (*batch, *group))
            x = signs[which[0]][0]
            x = x.reshape(*(layout.shape[axis] for axis in pieces), x.shape[-1])
            order = [pieces.index(axis) for axis in (*units, *batch, *group)]
            x = jnp.transpose(x, (*order, len(order)))
            x = x.reshape(size(batch), size(group), x.shape[-1])
            sides.append(jnp.broadcast_to(x, (size(layout.batch), *x.shape[1:])))
        return DenseDirections(*sides)


class SparseDirections(eqx.Module):
    """A few random entries of each column, times the root of the number of rows.

    Each of `entries` blocks of results, of `width` each, is the sum of pieces of
    this length with random signs, each piece rolled by a random number of places.
    Two numbers of one piece never meet, and those of two pieces do with a
    probability of `1 / width`. With a width of 3, pieces `a` and `b`, rolled by 1
    and by 0, add up to `(a3 +- b1, a1 +- b2, a2 +- b3)`.
    """

    signs: Integer[Array, "pieces entries width"]
    places: Integer[Array, "pieces entries"]

    def of_array(
        self, x: Inexact[Array, "vectors ..."]
    ) -> Inexact[Array, "vectors dim"]:
        """The projections of several arrays."""
        num, entries, width = self.signs.shape
        vectors, size = len(x), math.prod(x.shape[1:])
        wide = widened(x).reshape(vectors, size)
        if num == 0:
            return jnp.zeros((vectors, entries * width), wide.dtype)
        pieces = jnp.pad(wide, ((0, 0), (0, num * width - size)))
        pieces = pieces.reshape(vectors, num, width)

        def rolled(i: int | Array) -> Inexact[Array, "vectors entries width"]:
            piece, of_piece, first = (
                jax.lax.dynamic_index_in_dim(y, i, axis, keepdims=False)
                for y, axis in ((pieces, 1), (self.signs, 0), (self.places, 0))
            )
            blocks = (
                jnp.roll(piece * of_piece[k][None].astype(piece.dtype), first[k], 1)
                for k in range(entries)
            )
            return jnp.stack([*blocks], axis=1)

        # XLA for CPUs takes ten times as long to gather the numbers of all pieces.
        # Some at a time are few kernels on GPUs.
        add = lambda i, total: total + rolled(i)
        total = jax.lax.fori_loop(1, num, add, rolled(0), unroll=4)
        return total.reshape(vectors, entries * width) * math.sqrt(width)


Directions = DenseDirections | SparseDirections
