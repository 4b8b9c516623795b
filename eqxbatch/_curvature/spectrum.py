"""Eigenvalues and eigenvectors of blocks, plus damping."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._base.platforms import exact_products
from .._base.trees import safe_zip
from .._sites.kronecker import Part
from .kronecker_blocks import KroneckerBlock
from .pytree import joined, Unravel


class DampedProduct(eqx.Module):
    """What the eigenvalues of a damped Kronecker product are made of.

    These are `(outputs[:, :, None] * inputs[:, None] + damping) ** power`.
    """

    outputs: Inexact[Array, "batch outputs"]
    inputs: Inexact[Array, "batch inputs"]
    damping: Real[Array, ""]
    power: float = eqx.field(static=True, default=1.0)

    def to_the(self, power: int | float) -> "DampedProduct":
        return dataclasses.replace(self, power=power * self.power)

    def changed(self, change: Callable[[Array], Array]) -> "DampedProduct":
        """The same, where `change` returns the same numbers, such as checked ones."""
        return dataclasses.replace(self, damping=change(self.damping))


class Spectrum(eqx.Module):
    """The eigenvalues and eigenvectors of a block.

    Coordinates along the eigenvectors are arrays of the shape of `values`. If there is
    no array of eigenvectors for a factor, these are one-hot. `is_semidefinite` says
    whether no eigenvalue is known to be negative. If the block is a Kronecker product,
    `factors` are the eigenvalues of both factors; if it is one plus damping, or a power
    of this, `damped` has them.
    """

    part: Part = eqx.field(static=True)
    values: Inexact[Array, "batch outputs inputs"]
    outputs: Inexact[Array, "batch outputs outputs"] | None
    inputs: Inexact[Array, "batch inputs inputs"] | None
    factors: tuple[Array, Array] | None = None
    damped: DampedProduct | None = None
    is_semidefinite: bool = eqx.field(static=True, default=False)

    @property
    def rounding(self) -> Inexact[Array, "..."]:
        """The size below which an eigenvalue is zero up to rounding."""
        # Rounding mixes eigenvalues along the axes on which eigenvectors are computed;
        # entries of a diagonal are exact.
        bases = ((1, self.outputs), (2, self.inputs))
        axes = tuple(axis for axis, basis in bases if basis is not None)
        if not axes:
            return jnp.zeros((), self.values.dtype)
        size = sum(self.values.shape[axis] for axis in axes)
        return _rounding(self.values, size, axes)

    def coordinates(self, leaves: list[Array]) -> Array:
        """The coordinates of the parameters of the block."""
        # An exact or diagonal block is one row of a matrix: `(1, 1, entries)`.
        dtype, layout = self.values.dtype, self.part.layout
        if layout is None:
            return self._rotated(joined(leaves, dtype)[None, None], back=False)
        return self._rotated(layout.matrices(leaves).astype(dtype), back=False)

    def product(self, leaves: list[Array]) -> Array:
        """The coordinates of the block times the parameters."""
        return self.values * self.coordinates(leaves)

    def leaves(self, coordinates: Array) -> list[Array]:
        """The parameters with these coordinates."""
        return self._split(self._rotated(coordinates, back=True))

    def diagonal(self) -> list[Array]:
        """The diagonal of the block, in the shapes of its parameters."""
        # Entry `i` of the diagonal is `sum_k Q_ik^2 values_k`.
        outputs, inputs = jax.tree.map(jnp.square, (self.outputs, self.inputs))
        squared = dataclasses.replace(self, outputs=outputs, inputs=inputs)
        return squared.leaves(self.values)

    def _rotated(self, matrices: Array, *, back: bool) -> Array:
        # `Q_out^T W Q_in` on the way there, and `Q_out W Q_in^T` on the way back.
        turned = lambda basis: jnp.swapaxes(basis, -1, -2) if back else basis
        with exact_products():
            if self.outputs is not None:
                matrices = jnp.einsum("boq,boi->bqi", turned(self.outputs), matrices)
            if self.inputs is not None:
                matrices = jnp.einsum("bqi,bij->bqj", matrices, turned(self.inputs))
        return matrices

    def _split(self, matrices: Array) -> list[Array]:
        if self.part.layout is not None:
            return self.part.layout.leaves(matrices)
        like = [jax.ShapeDtypeStruct(x, matrices.dtype) for x in self.part.shapes]
        return Unravel(like).split(matrices.ravel())


def spectrum_of(block: KroneckerBlock) -> Spectrum:
    """Eigenvalues and eigenvectors of a block."""
    # Corrected blocks have their eigenvalues, which are no products.
    if block.moments is None:
        factors = block.eigenvectors()
        # Each entry of a diagonal factor is computed by itself.
        of_outputs, of_inputs = (
            _without_rounding(values, 8 if basis is None else values.shape[-1])
            for values, basis in factors
        )
        (_, outputs), (_, inputs) = factors
        values = of_outputs, of_inputs
        return Spectrum(block.part, _products(*values), outputs, inputs, values)
    return Spectrum(block.part, block.moments, block.output_basis, block.input_basis)


def _products(outputs: Array, inputs: Array) -> Inexact[Array, "batch outputs inputs"]:
    return outputs[:, :, None] * inputs[:, None, :]


def with_damping(
    spectrum: Spectrum, damping: Array, *, relative: bool, factored: bool
) -> Spectrum:
    """A block plus damping, or the product of two factors plus damping each.

    The latter share out the root of the damping by their mean eigenvalues.
    """
    added = damping.astype(spectrum.values.dtype)
    if relative:
        added = added * jnp.maximum(jnp.mean(spectrum.values), 0)
    # Added to all eigenvalues, or to those of blocks that are no products.
    if not factored or spectrum.part.layout is None:
        values, damped = spectrum.values + added, None
        if spectrum.factors is not None:
            damped = DampedProduct(*spectrum.factors, added)
        return dataclasses.replace(spectrum, values=values, factors=None, damped=damped)
    assert spectrum.factors is not None
    # (outputs + share) (inputs + share) with shares `root / ratio` and `root * ratio`,
    # whose product is the damping.
    means = [jnp.mean(x, axis=1, keepdims=True) for x in spectrum.factors]
    # Without a ratio of the means, both get the root.
    is_zero = (means[0] <= 0) | (means[1] <= 0)
    outputs, inputs = (jnp.where(is_zero, 1, x) for x in means)
    root, ratio = jnp.sqrt(added), jnp.sqrt(inputs / outputs)
    shares = root / ratio, root * ratio
    factors = tuple(x + share for x, share in safe_zip(spectrum.factors, shares))
    return dataclasses.replace(spectrum, values=_products(*factors), factors=factors)


def _rounding(values: Array, size: int, axes: tuple[int, ...] = (-1,)) -> Array:
    """The rounding errors of eigenvalues of matrices, or of products of some.

    - `size`: the number of rows of a matrix, or the sum of these.
    """
    largest = jnp.max(jnp.abs(values), axis=axes, keepdims=True, initial=0)
    return size * float(jnp.finfo(values.dtype).eps) * largest


def _without_rounding(
    values: Inexact[Array, "*batch k"], size: int
) -> Inexact[Array, "*batch k"]:
    """Replaces values that are negative because of rounding by zero."""
    is_zero = (values < 0) & (values >= -_rounding(values, size))
    return jnp.where(is_zero, 0, values)
