"""Random projections of gradients, which are metrics whose mean is another metric."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Inexact, Integer, Key, UInt32

from .._base.checks import check_at_least
from .._base.dtypes import common_dtype, widened
from .._base.trees import safe_zip
from .._base.types import check_fields
from .._curvature.kronecker_sums import flat_use, FlatUse, product_in_basis, rotated
from .._sites.factors import Factors
from .._sites.kronecker import AxisRoles, Layout, MatrixSizes, Part
from .product_basis import ProductBasis


# How a projection draws its directions for each array.
Kind = Literal["dense", "sparse", "auto"]


# The operations of one signed entry, as long as its reads from memory.
_ENTRY = 8


class Projection(eqx.Module):
    """A random projection of gradients, as a `metric` of [`eqxbatch.EmpiricalNTK`][].

    Each gradient becomes `dim` numbers, whose inner products estimate those of the
    gradients without bias. With a `metric`, gradients are preconditioned first: the
    inner products estimate `J M J^T`.

    A dense projection multiplies an entry of a matrix by a random sign for its row and
    one for its column, so that for layers, the projection is one of inputs and one of
    gradients of outputs: no gradient is formed, and no large random matrix. The other
    axes of a weight count as one. A sparse projection forms the gradient of one example
    after the other, and adds each of its numbers to a few of the results. The variance
    of both falls as `1 / dim`. That of a sparse one is at most
    `(|g|^2 |h|^2 + (g . h)^2) / dim` for gradients `g` and `h`, and that of a dense one
    up to four times as large if these are outer products.

    **Arguments:**

    - `dim`: the number of random directions, at least 1.
    - `key`: the random key. The same key has the same directions for all examples.
    - `metric`: a positive semidefinite matrix `M` over the parameters, as for
        [`eqxbatch.EmpiricalNTK`][], but no other projection; None for the identity.
        Directions are drawn in its eigenvectors. The projection of Kronecker factors is
        multiplied by them once for a block of examples, and costs each example what it
        does without a metric. Other eigenvalues need the gradient.
    - `kind`: `"dense"` or `"sparse"` for all arrays, or `"auto"` for what takes fewer
        operations for each array. That depends on nothing but the array, `dim`,
        `entries` and the metric, so that features of different examples match.
    - `entries`: how many of the `dim` results a number of a gradient is added to if the
        projection is sparse: a divisor of `dim`. More make large errors rarer, with the
        same variance.

    **Raises:**

    `ValueError` for a `dim` or `entries` below 1, for `entries` that do not divide
    `dim`, for an unknown `kind`, and for a `metric` that is another projection. An
    estimator raises the errors of its `metric`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 32, 2, key=jax.random.key(0))
        >>> sketch = eqxbatch.Projection(256, jax.random.key(1))
        >>> eqxbatch.EmpiricalNTK(model, metric=sketch)(jnp.ones((5, 2))).shape
        (5, 5)

        ```

        Features whose inner products estimate influences:

        ```python
        >>> x = jnp.ones((5, 2))
        >>> factors = eqxbatch.filter_kfac(
        ...     lambda model, x: model(x), lambda out, x: out**2 / 2
        ... )(model, x)
        >>> inverse = factors.operator(damping=0.1, factored=True).inverse()
        >>> sketch = eqxbatch.Projection(256, jax.random.key(1), metric=inverse)
        >>> eqxbatch.EmpiricalNTK(model, metric=sketch).features(x).shape
        (5, 256)

        ```

    ??? cite

        Projected gradients as features of examples are those of Park et al., "TRAK:
        attributing model behavior at scale",
        [arXiv:2303.14186](https://arxiv.org/abs/2303.14186), and projections of the
        two factors of a layer those of Choe et al., "What is your data worth to GPT?",
        [arXiv:2405.13954](https://arxiv.org/abs/2405.13954), who precondition, too.
        Random directions that are products are due to Rakhshan and Rabusseau,
        "Tensorized random projections",
        [arXiv:2003.05101](https://arxiv.org/abs/2003.05101). Sparse ones are those in
        blocks of Kane and Nelson, "Sparser Johnson-Lindenstrauss transforms",
        [arXiv:1012.1577](https://arxiv.org/abs/1012.1577), except that neighbours never
        meet.
    """

    dim: int = eqx.field(static=True)
    key: Key[Array, ""] | UInt32[Array, "2"]
    _: dataclasses.KW_ONLY
    metric: Any = None
    kind: Kind = eqx.field(static=True, default="dense")
    entries: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        check_fields(self)
        check_at_least("dim", self.dim, 1)
        check_at_least("entries", self.entries, 1)
        if self.dim % self.entries:
            raise ValueError(
                "`entries` must divide `dim`, as each of that many blocks of results "
                f"has one; got `dim={self.dim}` and `entries={self.entries}`. Take "
                "powers of two for both."
            )
        if isinstance(self.metric, Projection):
            raise ValueError(
                "The `metric` of a `Projection` must be the matrix itself; got another "
                "`Projection`. Pass the `metric` of that one."
            )

    def signs(self, leaf: int, struct: Any) -> list[Array]:
        """Random signs for the first axis of a leaf, and for all others together.

        The latter are missing for a vector.
        """
        # A scalar is a vector with one entry.
        rows, *columns = struct.shape or (1,)
        sizes = [rows, math.prod(columns)] if columns else [rows]
        return self._signs_of(leaf, sizes, struct.dtype)

    def signs_of_matrices(
        self, part: int, sizes: MatrixSizes, dtype: Any
    ) -> tuple[Array, Array]:
        """Random signs for the rows and the columns of each matrix of a part.

        Their shapes are `(batch, rows, dim)` and `(batch, columns, dim)`.
        """
        batch, *sides = sizes
        signs = self._signs_of(part, [batch * size for size in sides], dtype)
        rows, columns = (
            x.reshape(batch, size, self.dim) for x, size in safe_zip(signs, sides)
        )
        return rows, columns

    def _signs_of(self, number: int, sizes: list[int], dtype: Any) -> list[Array]:
        # From the number of the leaf alone, so that all examples have the same signs.
        keys = jr.split(jr.fold_in(self.key, number), 2)
        dtype = widened(jnp.zeros((), dtype)).dtype
        # A vector leaves the second key.
        pairs = zip(keys, sizes, strict=False)
        return [self._random_signs(key, size).astype(dtype) for key, size in pairs]

    def _random_signs(self, key: Array, size: int) -> Integer[Array, "size dim"]:
        # One for each random bit, as every batch of examples draws them again.
        numbers = jr.bits(key, (size, -(-self.dim // 8)), jnp.uint8)
        bits = jnp.unpackbits(numbers, axis=1, count=self.dim)
        return 2 * bits.astype(jnp.int8) - 1

    def is_sparse(self, shape: tuple[int, ...], *, is_formed: bool = False) -> bool:
        """Whether an array of this shape has a sparse projection.

        - `is_formed`: whether it has no factors, whatever the model is.
        """
        if self.kind != "auto":
            return self.kind == "sparse"
        # Nothing about the examples or the model may count here: two sides that chose
        # differently would have a wrong product.
        size, operations = math.prod(shape), _ENTRY * self.entries
        if len(shape) < 2 or is_formed:
            return operations < 2 * self.dim
        # Factors that meet `dim` directions each, against a product for each entry.
        *batch, rows, columns = shape
        num = math.prod(batch) * (rows + columns)
        return size * (2 + operations) < 2 * num * self.dim

    def total(
        self, summands: list[Inexact[Array, "*vectors dim"]]
    ) -> Inexact[Array, "*vectors dim"]:
        """The projection, from what each part adds."""
        # Parts have independent signs, so that products between them are 0 on average
        # and one sum over all parts will do. Both sides of a kernel are divided by the
        # root, so that their product is a mean over the directions.
        dtype = common_dtype(*(x.dtype for x in summands))
        total = functools.reduce(jnp.add, (x.astype(dtype) for x in summands))
        return total / math.sqrt(self.dim)

    def of_gradient(
        self, leaf: int, x: Inexact[Array, "vectors ..."]
    ) -> Inexact[Array, "vectors dim"]:
        """What a leaf adds, before scaling, from its gradients for several outputs."""
        struct = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        if self.is_sparse(_as_matrix(struct.shape)):
            return self._sparse(leaf, x)
        signs = self.signs(leaf, struct)
        # `[vectors, rows, columns]`, or `[vectors, rows]` for a vector.
        wide = widened(x).reshape(x.shape[0], *(y.shape[0] for y in signs))
        if len(signs) == 1:
            return wide @ signs[0]
        return jnp.einsum("vab,aj,bj->vj", wide, *signs)

    def of_product(
        self, part: Part, uses: list[AxisRoles], factors: Factors, like: Any
    ) -> Inexact[Array, "vectors dim"] | None:
        """The same from the factors of one example, for a leaf of the type of `like`.

        None if rows and columns of the leaf are not those of the factors, or if its
        projection is sparse.
        """
        if part.layout is None or self.is_sparse(_as_matrix(like.shape)):
            return None
        sides = _signs_of_sides(part.layout, self.signs(part.leaves[0], like))
        if sides is None:
            return None
        flat = (flat_use(use, factors, part.layout) for use in uses)
        return _along_products(flat, part.layout, sides)

    def of_matrices(
        self,
        part: int,
        x: Inexact[Array, "vectors batch rows columns"],
        *,
        is_formed: bool,
    ) -> Inexact[Array, "vectors dim"]:
        """What a part of a metric adds, from its coordinates, which are matrices.

        - `is_formed`: as in `is_sparse`.
        """
        sizes = MatrixSizes(*x.shape[1:])
        if self.is_sparse(sizes, is_formed=is_formed):
            return self._sparse(part, x)
        wide = widened(x)
        signs = self.signs_of_matrices(part, sizes, wide.dtype)
        return jnp.einsum("vbrc,brj,bcj->vj", wide, *signs)

    def of_basis(
        self, number: int, basis: ProductBasis, uses: list[AxisRoles], factors: Factors
    ) -> Inexact[Array, "vectors dim"] | None:
        """The same from the factors of one example.

        None if coordinates must be formed, and this is cheaper from the gradient.
        """
        layout, is_counted = basis.part.layout, basis.part.is_counted
        assert layout is not None
        flat = [_wide(flat_use(use, factors, layout)) for use in uses]
        dtype = flat[0].d.dtype
        is_formed = basis.inner is not None
        is_sparse = self.is_sparse(layout.sizes, is_formed=is_formed)
        # Tokens look up signs, after eigenvalues scaled their cotangents.
        if is_counted and not is_sparse:
            rows, columns = self.signs_of_matrices(number, layout.sizes, dtype)
            total: Any = 0
            for use in flat:
                _, d = basis.of_tokens(use.tokens, use.d)
                assert use.tokens is not None
                a = jnp.take(columns[0], use.tokens, axis=0, mode="fill", fill_value=0)
                d = jnp.einsum("nvpbo,boj->nvpj", d, rows)
                total += jnp.einsum("npj,nvpj->vj", a, d)
            return total
        # Along a direction `s t^T`, `R1^T d a^T R2` is `(R1 s . d) (R2 t . a)`.
        if not is_formed and not is_sparse:
            rows, columns = self.signs_of_matrices(number, layout.sizes, dtype)
            assert basis.inputs is not None
            outputs, inputs = basis.outputs.astype(dtype), basis.inputs.astype(dtype)
            sides = (
                jnp.einsum("boq,bqj->boj", outputs, rows),
                jnp.einsum("biq,bqj->bij", inputs, columns),
            )
            return _along_products(flat, layout, sides)
        # Coordinates of factors, for few positions, or else of their sum.
        _, outputs, inputs = layout.sizes
        each = sum(use.d.shape[2] for use in flat) * (outputs**2 + inputs**2)
        if is_counted or each > outputs * inputs * (outputs + inputs):
            return None
        bases = basis.outputs, basis.inputs
        formed = (product_in_basis(use, layout, bases)[0] for use in flat)
        x = functools.reduce(jnp.add, formed)
        if basis.inner is not None:
            x = x * basis.inner[None].astype(x.dtype)
        return self.of_matrices(number, x, is_formed=is_formed)

    def _sparse(
        self, number: int, x: Inexact[Array, "vectors ..."]
    ) -> Inexact[Array, "vectors dim"]:
        """A sparse projection, multiplied by the root of `dim` as dense ones are.

        Each of `entries` blocks of results, of `width` each, is the sum of pieces of
        this length with random signs, each piece rolled by a random number of places.
        Two numbers of one piece never meet, and those of two pieces do with a
        probability of `1 / width`. With a width of 3, pieces `a` and `b`, rolled by 1
        and by 0, add up to `(a3 +- b1, a1 +- b2, a2 +- b3)`.
        """
        wide, width = widened(x).reshape(x.shape[0], -1), self.dim // self.entries
        vectors, size = wide.shape
        num = -(-size // width)
        if num == 0:
            return jnp.zeros((vectors, self.dim), wide.dtype)
        pieces = jnp.pad(wide, ((0, 0), (0, num * width - size)))
        pieces = pieces.reshape(vectors, num, width)
        of_signs, of_places = jr.split(jr.fold_in(self.key, number), 2)
        signs = self._random_signs(of_signs, num).reshape(num, self.entries, width)
        places = jr.randint(of_places, (num, self.entries), 0, width)

        def rolled(i: int | Array) -> Inexact[Array, "vectors entries width"]:
            piece, of_piece, first = (
                jax.lax.dynamic_index_in_dim(y, i, axis, keepdims=False)
                for y, axis in ((pieces, 1), (signs, 0), (places, 0))
            )
            blocks = (
                jnp.roll(piece * of_piece[k][None].astype(piece.dtype), first[k], 1)
                for k in range(self.entries)
            )
            return jnp.stack([*blocks], axis=1)

        # XLA for CPUs takes ten times as long to gather the numbers of all pieces.
        # Some at a time are few kernels on GPUs.
        add = lambda i, total: total + rolled(i)
        total = jax.lax.fori_loop(1, num, add, rolled(0), unroll=4)
        return total.reshape(vectors, self.dim) * math.sqrt(width)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a leaf as a matrix, if it has several axes."""
    return shape if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _wide(use: FlatUse) -> FlatUse:
    a = None if use.a is None else widened(use.a)
    return dataclasses.replace(use, a=a, d=widened(use.d))


def _along_products(
    flat: Iterable[FlatUse], layout: Layout, sides: tuple[Array, Array]
) -> Inexact[Array, "vectors dim"]:
    # Along a direction `s t^T`, `d a^T` is `(s . d) (t . a)`: no gradient is formed.
    total: Any = 0
    for use in flat:
        a, d = rotated(use, layout, sides)
        total += jnp.einsum("npbj,nvpbj->vj", a.astype(d.dtype), d)
    return total


def _signs_of_sides(layout: Layout, signs: list[Array]) -> tuple[Array, Array] | None:
    """Signs of shape `(batch, entries, dim)` for outputs and inputs.

    None if one of them is not a product of signs for its entries.
    """
    # The signs have two groups of axes: the first axis of the leaf, which the layout
    # may have cut into `num` pieces, and all others.
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
        # Entries of one side must have signs of their own: those of both sides in one
        # array, or one side in both arrays, are no product.
        which = [i for i in (0, 1) if all(axis in axes[i] for axis in group)]
        if len(which) != 1 or len(signs) != 2 or which[0] in taken:
            return None
        taken += which
        pieces = axes[which[0]]
        # Either all matrices of the batch have the same signs here, or each its own.
        batch = tuple(axis for axis in layout.batch if axis in pieces)
        if size(batch) not in (1, size(layout.batch)):
            return None
        # Axes of no kind have size 1, so that they may go first. Others are of the side
        # that has axes in both arrays.
        units = tuple(axis for axis in pieces if axis not in (*batch, *group))
        if size(units) != 1:
            return None
        x = signs[which[0]]
        x = x.reshape(*(layout.shape[axis] for axis in pieces), x.shape[-1])
        order = [pieces.index(axis) for axis in (*units, *batch, *group)]
        x = jnp.transpose(x, (*order, len(order)))
        x = x.reshape(size(batch), size(group), x.shape[-1])
        sides.append(jnp.broadcast_to(x, (size(layout.batch), *x.shape[1:])))
    return sides[0], sides[1]
