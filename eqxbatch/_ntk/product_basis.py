"""Coordinates of outer products in a metric, from those of their two factors."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.trees import safe_zip
from .._curvature.kronecker_sums import flat_use, product_in_basis, rotated
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
        embedding, `inputs` is a factor for each token.
    - `values`: factors of the coordinates of the product; None for one.
    - `damped`: what their squares are made of, if no product needs to be formed.
    - `times`: how often coordinates are taken; the second time, by the transpose.
    """

    part: Part = eqx.field(static=True)
    outputs: Inexact[Array, "batch outputs rows"]
    inputs: Inexact[Array, "batch inputs *columns"]
    values: Inexact[Array, "batch rows columns"] | None = None
    damped: DampedProduct | None = None
    times: int = eqx.field(static=True, default=1)

    def pairs(self, uses: list[AxisRoles], factors: Factors) -> list[Coordinates]:
        """Operand and cotangent in the coordinates, for each use or for their sum."""
        layout, bases = self.part.layout, (self.outputs, self.inputs)
        assert layout is not None
        flat = [flat_use(use, factors, layout) for use in uses]
        # One factor for each token: inputs are counted, as those of an embedding.
        if self.inputs.ndim == 2:
            return [self._of_tokens(use.tokens, use.d) for use in flat]
        # Coordinates of an outer product are one of coordinates. Values that couple
        # rows with columns can wait if they are damped products: the inner product of
        # `separable.py` has them.
        if self.values is None or self.damped is not None:
            # A side with none of the steps keeps the factors of the plain kernel.
            steps = bases if self.times else (None, None)
            pairs = [rotated(use, layout, steps) for use in flat]
            if self.times < 2:
                return [Coordinates(*pair) for pair in pairs]
            both = safe_zip(pairs, flat)
            return [self._back(*pair, use.is_swapped) for pair, use in both]
        # Other values have no such form: the sum of the products is formed, and scaled.
        products = (product_in_basis(use, layout, bases) for use in flat)
        total = functools.reduce(jnp.add, products)
        scaled = total * self.values.astype(total.dtype)[None, None]
        return [Coordinates(None, scaled)]

    def _of_tokens(self, tokens: Any, d: Array) -> Coordinates:
        # Inputs are one-hot, so that their coordinates only scale the cotangents.
        scale = jnp.take(self.inputs[0], tokens, mode="fill", fill_value=0)
        # `R^T d`, and `R` times that the second time.
        turned = self.outputs
        for _ in range(self.times):
            d = jnp.einsum("nvpbo,boq->nvpbq", d, turned.astype(d.dtype))
            d = d * scale.astype(d.dtype)[:, None, :, None, None]
            turned = jnp.swapaxes(turned, 1, 2)
        return Coordinates(tokens, d)

    def _back(self, a: Array, d: Array, is_swapped: bool) -> Coordinates:
        # One step after the other: in the product of a matrix with its transpose, small
        # eigenvalues have the rounding of the largest.
        sides = self.inputs, self.outputs
        of_a, of_d = sides[::-1] if is_swapped else sides
        a = jnp.einsum("npbj,bij->npbi", a, of_a.astype(a.dtype))
        return Coordinates(a, jnp.einsum("nvpbq,boq->nvpbo", d, of_d.astype(d.dtype)))
