"""`KroneckerFactors`, the result of `filter_kfac`."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import Array, Real

from .._base.tables import AbstractTabular, Table
from .._base.trees import import_extra, safe_zip
from .kronecker_blocks import AbstractKroneckerFactors, KroneckerBlock
from .pytree import Unravel


if TYPE_CHECKING:
    from .kronecker_operator import KroneckerOperator


class KroneckerFactors(AbstractTabular, AbstractKroneckerFactors):
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
        # Its class is one of lineax, which is optional.
        import_extra("lineax", "KroneckerFactors.operator", "linalg")
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
