"""Coordinates of outer products in a metric, from those of their two factors."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.trees import safe_zip
from .._curvature.kronecker_sums import flat_use, rotated
from .._curvature.spectrum import DampedProduct
from .._sites.factors import Factors
from .._sites.kronecker import AxisRoles, Part


class Coordinates(NamedTuple):
    """Coordinates of gradients at a site, as its operand and its cotangent.

    Their contraction has the coordinates of the gradients; without an operand, the
    cotangent itself has them.
    """

    operand: Array | None
    cotangent: Array


class ProductBasis(eqx.Module):
    """Coordinates of outer products, from those of operands and cotangents.

    - `part`: the axes of the weight, and its bias if there is one.
    - `outputs`, `inputs`: a matrix for each, whose columns are directions. For an
        embedding, `inputs` is a factor for each token, or None for one.
    - `values`: factors of the coordinates of the product; None for one.
    - `damped`: what their squares are made of, if they are damped products.
    - `times`: how often coordinates are taken; the second time, by the transpose.
    """

    part: Part = eqx.field(static=True)
    outputs: Inexact[Array, "batch outputs rows"]
    inputs: Inexact[Array, "batch inputs *columns"] | None
    values: Inexact[Array, "batch rows columns"] | None = None
    damped: DampedProduct | None = None
    times: int = eqx.field(static=True, default=1)

    @property
    def inner(self) -> Inexact[Array, "batch rows columns"] | None:
        """The values that coordinates of the two factors do not have yet."""
        # A token selects values for the rows, which scale its cotangent.
        return None if self.part.is_counted else self.values

    def pairs(self, uses: list[AxisRoles], factors: Factors) -> list[Coordinates]:
        """Operand and cotangent in the coordinates, for each use.

        Their products must still be multiplied by `inner`, as by `eigenvalue_table.py`.
        """
        layout, bases = self.part.layout, (self.outputs, self.inputs)
        assert layout is not None
        flat = [flat_use(use, factors, layout) for use in uses]
        # One factor for each token: inputs are counted, as those of an embedding.
        if self.part.is_counted:
            return [self.of_tokens(use.tokens, use.d) for use in flat]
        # A side with none of the steps keeps the factors of the plain kernel.
        steps = bases if self.times else (None, None)
        pairs = [rotated(use, layout, steps) for use in flat]
        if self.times < 2:
            return [Coordinates(*pair) for pair in pairs]
        both = safe_zip(pairs, flat)
        return [self._back(*pair, use.is_swapped) for pair, use in both]

    def of_tokens(self, tokens: Any, d: Array) -> Coordinates:
        """The tokens, and their cotangents in the coordinates."""
        # Inputs are one-hot, so that their coordinates only scale the cotangents, each
        # row by itself if values couple both.
        table = self.values
        if table is None:
            assert self.inputs is not None
            table = self.inputs[:, None]
        scale = jnp.take(table[0], tokens, axis=1, mode="fill", fill_value=0)
        # `[examples, 1, positions, 1, rows]`, as the cotangent.
        scale = jnp.moveaxis(scale, 0, -1)[:, None, :, None]
        # `R^T d`, and `R` times that the second time.
        turned = self.outputs
        for _ in range(self.times):
            d = jnp.einsum("nvpbo,boq->nvpbq", d, turned.astype(d.dtype))
            d = d * scale.astype(d.dtype)
            turned = jnp.swapaxes(turned, 1, 2)
        return Coordinates(tokens, d)

    def _back(self, a: Array, d: Array, is_swapped: bool) -> Coordinates:
        # One step after the other: in the product of a matrix with its transpose, small
        # eigenvalues have the rounding of the largest.
        assert self.inputs is not None
        sides = self.inputs, self.outputs
        of_a, of_d = sides[::-1] if is_swapped else sides
        a = jnp.einsum("npbj,bij->npbi", a, of_a.astype(a.dtype))
        return Coordinates(a, jnp.einsum("nvpbq,boq->nvpbo", d, of_d.astype(d.dtype)))
