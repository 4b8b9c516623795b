"""Random projections of gradients, which are metrics whose mean is the identity."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Inexact, Integer, Key, UInt32

from .._base.checks import check_at_least
from .._base.dtypes import widened
from .._base.types import check_fields
from .._curvature.kronecker_sums import flat_use, rotated
from .._sites.factors import Factors
from .._sites.kronecker import AxisRoles, Layout, Part


class Projection(eqx.Module):
    """A random projection of gradients, as a `metric` of [`eqxbatch.EmpiricalNTK`][].

    Each gradient becomes `dim` numbers, whose inner products estimate those of the
    gradients without bias. An entry of a matrix is multiplied by a random sign for its
    row and one for its column, so that for layers, the projection is one of inputs and
    one of gradients of outputs: no gradient is formed, and no large random matrix. The
    other axes of a weight count as one. The variance falls as `1 / dim`.

    **Arguments:**

    - `dim`: the number of random directions, at least 1.
    - `key`: the random key. The same key has the same directions for all examples.

    Raises `ValueError` for a `dim` below 1.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 32, 2, key=jax.random.key(0))
        >>> sketch = eqxbatch.Projection(256, jax.random.key(1))
        >>> eqxbatch.EmpiricalNTK(model, metric=sketch)(jnp.ones((5, 2))).shape
        (5, 5)

        ```

    ??? cite

        Projected gradients as features of examples are those of Park et al., "TRAK:
        attributing model behavior at scale",
        [arXiv:2303.14186](https://arxiv.org/abs/2303.14186), and projections of the
        two factors of a layer those of Choe et al., "What is your data worth to GPT?",
        [arXiv:2405.13954](https://arxiv.org/abs/2405.13954). Random directions that
        are products are due to Rakhshan and Rabusseau, "Tensorized random
        projections", [arXiv:2003.05101](https://arxiv.org/abs/2003.05101).
    """

    dim: int = eqx.field(static=True)
    key: Key[Array, ""] | UInt32[Array, "2"]

    def __check_init__(self) -> None:
        check_fields(self)
        check_at_least("dim", self.dim, 1)

    def signs(self, leaf: int, struct: Any) -> list[Array]:
        """Random signs for the first axis of a leaf, and for all others together.

        The latter are missing for a vector.
        """
        # A scalar is a vector with one entry.
        rows, *columns = struct.shape or (1,)
        sizes = [rows, math.prod(columns)] if columns else [rows]
        # From the number of the leaf alone, so that all examples have the same signs.
        keys = jr.split(jr.fold_in(self.key, leaf), 2)
        dtype = widened(jnp.zeros((), struct.dtype)).dtype
        # A vector leaves the second key.
        pairs = zip(keys, sizes, strict=False)
        return [self._random_signs(key, size).astype(dtype) for key, size in pairs]

    def _random_signs(self, key: Array, size: int) -> Integer[Array, "size dim"]:
        # One for each random bit, as every batch of examples draws them again.
        numbers = jr.bits(key, (size, -(-self.dim // 8)), jnp.uint8)
        bits = jnp.unpackbits(numbers, axis=1, count=self.dim)
        return 2 * bits.astype(jnp.int8) - 1

    def coordinates(self, gradients: list[Array]) -> Inexact[Array, " dim"]:
        """The coordinates of the gradients for one output."""
        # Leaves have independent signs, so that products between them are 0 on average
        # and one sum over all leaves will do. Both sides of a kernel are divided by the
        # root, so that their product is a mean over the directions.
        summands = (self.of_gradient(i, x[None])[0] for i, x in enumerate(gradients))
        return functools.reduce(jnp.add, summands) / math.sqrt(self.dim)

    def of_gradient(
        self, leaf: int, x: Inexact[Array, "vectors ..."]
    ) -> Inexact[Array, "vectors dim"]:
        """What a leaf adds, before scaling, from its gradients for several outputs."""
        signs = self.signs(leaf, jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        # `[vectors, rows, columns]`, or `[vectors, rows]` for a vector.
        wide = widened(x).reshape(x.shape[0], *(y.shape[0] for y in signs))
        if len(signs) == 1:
            return wide @ signs[0]
        return jnp.einsum("vab,aj,bj->vj", wide, *signs)

    def of_product(
        self, part: Part, uses: list[AxisRoles], factors: Factors, like: Any
    ) -> Inexact[Array, "vectors dim"] | None:
        """The same from the factors of one example, for a leaf of the type of `like`.

        None if rows and columns of the leaf are not those of the factors.
        """
        if part.layout is None:
            return None
        sides = _signs_of_sides(part.layout, self.signs(part.leaves[0], like))
        if sides is None:
            return None
        # Along a direction `s t^T`, `d a^T` is `(s . d) (t . a)`: no gradient is
        # formed.
        total: Any = 0
        for use in uses:
            flat = flat_use(use, factors, part.layout)
            a, d = rotated(flat, part.layout, sides)
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
        # Axes of no kind have size 1, so that they may go first.
        units = tuple(axis for axis in pieces if axis not in (*batch, *group))
        x = signs[which[0]]
        x = x.reshape(*(layout.shape[axis] for axis in pieces), x.shape[-1])
        order = [pieces.index(axis) for axis in (*units, *batch, *group)]
        x = jnp.transpose(x, (*order, len(order)))
        x = x.reshape(size(batch), size(group), x.shape[-1])
        sides.append(jnp.broadcast_to(x, (size(layout.batch), *x.shape[1:])))
    return sides[0], sides[1]
