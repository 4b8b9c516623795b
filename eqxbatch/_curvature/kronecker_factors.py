"""Kronecker factors of blocks of a matrix, and running averages of them."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, Real

from .._base.tables import AbstractTabular, Table
from .._base.trees import safe_zip
from .._sites.kronecker import Part
from .pytree import Unravel


if TYPE_CHECKING:
    from .kronecker_operator import KroneckerOperator


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


class KroneckerFactors(AbstractTabular, eqx.Module):
    """A Gauss-Newton or Fisher matrix in blocks, most of them Kronecker products.

    This is what [`eqxbatch.filter_kfac`][] returns. It is a PyTree of arrays: it can be
    averaged over steps with `optax.incremental_update` (unless `corrected=True`), saved
    with `equinox.tree_serialise_leaves`, sharded, and passed to functions under
    `jax.jit`.

    - `blocks`: one block for each weight (together with its bias if that counts as one
        more input), and one for each other array. A Kronecker block has two factors:
        `outputs`, the second moments of the gradients of the layer's outputs, of shape
        `(batch, rows, rows)`, and `inputs`, the second moments of the inputs, of shape
        `(batch, columns, columns)`, or `(batch, columns)` if they are diagonal, as for
        an embedding. `batch` is the number of stacked matrices, such as the groups of a
        convolution. With `corrected=True`, `moments` are the eigenvalues, of shape
        `(batch, rows, columns)`. An exact block has a `matrix`, and a diagonal block a
        `diagonal`. The `part` of each block says which structure it has, and why, if it
        is not a Kronecker product.
    - `unravel`: an [`eqxbatch.results.Unravel`][], which turns vectors into PyTrees of
        parameters.
    - `is_semidefinite`: whether the matrix is known to be positive semidefinite, as it
        is with `fisher="mc"` or `"empirical"` and without `weights`.

    `print` shows a table of the blocks with the sizes of their factors.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> factors = eqxbatch.filter_kfac(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
        ... )(model, jnp.ones((10, 2)), jnp.arange(10) % 3)
        >>> print(factors)
        leaves                              structure
        .layers[0].weight, .layers[0].bias  8 (x) 3
        .layers[1].weight, .layers[1].bias  3 (x) 9
        >>> factors.blocks[0].outputs.shape
        (1, 8, 8)

        ```
    """

    blocks: tuple[KroneckerBlock, ...]
    unravel: Unravel
    is_semidefinite: bool = eqx.field(static=True, default=False)

    def operator(
        self,
        damping: Real[Array, ""] | float = 0.0,
        *,
        relative: bool = False,
        factored: bool = False,
    ) -> "KroneckerOperator":
        """The matrix plus `damping` times the identity, as a lineax linear operator.

        Returns an [`eqxbatch.KroneckerOperator`][], from an eigendecomposition of each
        factor; see there for `relative` and `factored`. Raises `ValueError` for
        negative damping, and `ImportError` if lineax is
        not installed. Raises `RuntimeError` at run time if the eigenvectors of a
        `corrected` block are not orthogonal because they were averaged.
        """
        from .kronecker_operator import KroneckerOperator

        return KroneckerOperator(self, damping, relative=relative, factored=factored)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The paths of the parameters in each block."""
        tree = jtu.tree_unflatten(self.unravel.treedef, self.unravel.structs)
        paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)]
        return tuple(
            tuple(paths[leaf] for leaf in block.part.leaves) for block in self.blocks
        )

    @property
    def table(self) -> Table:
        rows = [("leaves", "structure", "")]
        for names, block in safe_zip(self.names, self.blocks):
            part = block.part
            rows.append((", ".join(names), str(part), part.reason or ""))
        return Table(rows, num_texts=3)
