"""`KroneckerFactors`: an approximate curvature matrix, block by block."""

from collections.abc import Sequence
from typing import Any, TYPE_CHECKING, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, Real

from .._base.trees import shown
from .._sites.kronecker import Part
from .pytree import Unravel


if TYPE_CHECKING:
    from .kronecker_operator import KroneckerOperator


class KroneckerBlock(eqx.Module):
    """A block that is a Kronecker product, or a block diagonal of several.

    - `outputs`, `inputs`: the second moments of the cotangents and of the operands, of
        shapes `(batch, outputs, outputs)` and `(batch, inputs, inputs)`, or
        `(batch, inputs)` if the latter is diagonal.
    - `moments`: with `corrected=True`, the eigenvalues, of shape
        `(batch, outputs, inputs)`. The eigenvectors are in `output_basis` and
        `input_basis`.
    """

    part: Part = eqx.field(static=True)
    outputs: Inexact[Array, "batch outputs outputs"]
    inputs: Inexact[Array, "batch inputs *inputs"]
    moments: Inexact[Array, "batch outputs inputs"] | None = None
    output_basis: Inexact[Array, "batch outputs outputs"] | None = None
    input_basis: Inexact[Array, "batch inputs inputs"] | None = None

    def eigenvectors(self) -> tuple[Array, Array, Array, Array | None]:
        """Eigenvalues and eigenvectors of the two factors.

        For a diagonal factor, eigenvalues are in the order of its entries, and there is
        no array of eigenvectors.
        """
        output_values, output_basis = jnp.linalg.eigh(self.outputs)
        if self.inputs.ndim == 2:
            return output_values, output_basis, self.inputs, None
        return output_values, output_basis, *jnp.linalg.eigh(self.inputs)


class DenseBlock(eqx.Module):
    """A dense block of shape `(entries, entries)`."""

    part: Part = eqx.field(static=True)
    matrix: Inexact[Array, "entries entries"]


class DiagonalBlock(eqx.Module):
    """A diagonal block, stored with shape `(entries,)`."""

    part: Part = eqx.field(static=True)
    diagonal: Inexact[Array, " entries"]


# The `part` of a block names its parameters and says why it has this structure.
FactorBlock: TypeAlias = KroneckerBlock | DenseBlock | DiagonalBlock


class KroneckerFactors(eqx.Module):
    """A Gauss-Newton or Fisher matrix in blocks, most of them Kronecker products.

    This is what [`eqxbatch.filter_kfac`][] returns. It is a PyTree of arrays: it can be
    averaged over steps with `optax.incremental_update` (unless `corrected=True`), saved
    with `equinox.tree_serialise_leaves`, sharded, and passed to functions under
    `jax.jit`.

    - `blocks`: one block for each weight (together with its bias if that counts as one
        more input), and one for each other array. A Kronecker block has two factors:
        `outputs`, the second moments of the output cotangents, of shape
        `(batch, rows, rows)`, and `inputs`, the second moments of the inputs, of shape
        `(batch, columns, columns)`, or `(batch, columns)` if they are diagonal, as for
        an embedding. `batch` is the number of stacked matrices, such as the groups of a
        convolution. With `corrected=True`, `moments` are the eigenvalues, of shape
        `(batch, rows, columns)`. An exact block has a `matrix`, and a diagonal block a
        `diagonal`. The `part` of each block says which structure it has, and why, if it
        is not a Kronecker product.
    - `unravel`: an [`eqxbatch.Unravel`][], which turns vectors into PyTrees of
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
        ...     in_axes=0,
        ... )(model, jnp.ones((10, 2)), jnp.arange(10) % 3)
        >>> print(factors)
        leaves                              structure
        .layers[0].weight, .layers[0].bias  8 (x) 3
        .layers[1].weight, .layers[1].bias  3 (x) 9
        >>> factors.blocks[0].outputs.shape
        (1, 8, 8)

        ```
    """

    blocks: tuple[FactorBlock, ...]
    unravel: Unravel
    is_semidefinite: bool = eqx.field(static=True, default=False)

    def operator(
        self, *, damping: Real[Array, ""] | float = 0.0
    ) -> "KroneckerOperator":
        """The matrix plus `damping` times the identity, as a lineax linear operator.

        Returns an [`eqxbatch.KroneckerOperator`][], from an eigendecomposition of each
        factor. Raises `ValueError` for negative damping, and `ImportError` if lineax is
        not installed. Raises `RuntimeError` at run time if the eigenvectors of a
        `corrected` block are not orthogonal because they were averaged.
        """
        from .kronecker_operator import KroneckerOperator

        return KroneckerOperator(self, damping)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The paths of the parameters in each block."""
        structs = self.unravel.structs
        numbered = jtu.tree_unflatten(self.unravel.treedef, range(len(structs)))
        paths = {
            number: jtu.keystr(path)
            for path, number in jtu.tree_leaves_with_path(numbered)
        }
        return tuple(
            tuple(paths[leaf] for leaf in block.part.leaves) for block in self.blocks
        )

    def __str__(self) -> str:
        rows = [
            (", ".join(names), str(block.part), block.part.reason or "")
            for names, block in zip(self.names, self.blocks, strict=True)
        ]
        rows = [("leaves", "structure", ""), *rows]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines = (
            f"{first:{widths[0]}}  {second:{widths[1]}}  {third}"
            for first, second, third in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def check_vector(unravel: Unravel, vector: Any, what: str) -> list[Array]:
    """The leaves of a PyTree, which must have the structure of the parameters.

    Raises `ValueError` if it does not.
    """
    leaves, treedef = jtu.tree_flatten(vector)
    shapes = [getattr(x, "shape", None) for x in leaves]
    expected_shapes = [struct.shape for struct in unravel.structs]
    if treedef != unravel.treedef or shapes != expected_shapes:
        expected = jtu.tree_unflatten(unravel.treedef, unravel.structs)
        raise ValueError(
            f"`{what}` must have the structure and shapes of the parameters that the "
            f"factors belong to, {shown(expected)}; got {shown(vector)}. Take the "
            "parameters of the same model, such as with `equinox.filter(model, "
            "equinox.is_inexact_array)`."
        )
    return leaves


def of_part(part: Part, leaves: Sequence[Array]) -> list[Array]:
    return [leaves[leaf] for leaf in part.leaves]
