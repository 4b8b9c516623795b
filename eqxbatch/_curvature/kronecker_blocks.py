"""Blocks of a matrix, most of them Kronecker products."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._sites.kronecker import Part
from .pytree import Unravel


class KroneckerBlock(eqx.Module):
    """A block that is a Kronecker product, or a block diagonal of several.

    - `part`: names the parameters, and says why the block has this structure.
    - `outputs`, `inputs`: the second moments of the cotangents and of the operands, of
        shapes `(batch, outputs, outputs)` and `(batch, inputs, inputs)`, or
        `(batch, inputs)` if the latter is diagonal. An exact or diagonal block is a
        single factor, `inputs`, over all entries.
    - `moments`: with `corrected=True`, the eigenvalues, of shape
        `(batch, outputs, inputs)`. The eigenvectors are in `output_basis` and
        `input_basis`.
    """

    part: Part = eqx.field(static=True)
    outputs: Inexact[Array, "batch outputs outputs"] | None
    inputs: Inexact[Array, "batch inputs *inputs"]
    moments: Inexact[Array, "batch outputs inputs"] | None = None
    output_basis: Inexact[Array, "batch outputs outputs"] | None = None
    input_basis: Inexact[Array, "batch inputs inputs"] | None = None

    @property
    def matrix(self) -> Inexact[Array, "entries entries"]:
        """An exact block."""
        return self._only("block")

    @property
    def diagonal(self) -> Inexact[Array, " entries"]:
        """The entries of a diagonal block."""
        return self._only("diagonal")

    def _only(self, structure: str) -> Array:
        if self.part.structure != structure:
            raise AttributeError(f"The structure of this block is {self.part}.")
        return self.inputs[0]

    def eigenvectors(self) -> list[tuple[Array, Array | None]]:
        """Eigenvalues and eigenvectors of the factors of outputs and inputs.

        For a diagonal factor, or for one that is missing, eigenvalues are in the order
        of the entries, and there is no array of eigenvectors.
        """
        # A block of a single factor is one of a Kronecker product with the number 1.
        outputs = jnp.ones((1, 1), self.inputs.dtype)
        outputs = outputs if self.outputs is None else self.outputs
        # Diagonal factors have two axes, `(batch, entries)`, others three.
        factors = (outputs, self.inputs)
        return [(x, None) if x.ndim == 2 else jnp.linalg.eigh(x) for x in factors]


class AbstractKroneckerFactors(eqx.Module):
    """A matrix in blocks, from which a `KroneckerOperator` is made.

    - `blocks`, `unravel`: the blocks, and the parameters that the matrix is over.
    - `is_semidefinite`: whether it is known to be positive semidefinite.
    """

    blocks: eqx.AbstractVar[tuple[KroneckerBlock, ...]]
    unravel: eqx.AbstractVar[Unravel]
    is_semidefinite: eqx.AbstractVar[bool]
