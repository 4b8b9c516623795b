"""`filter_ggn`, its diagonal and its blocks, exact or as Fisher estimates."""

from collections.abc import Callable
from typing import Any, cast, TYPE_CHECKING

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray, PyTree, UInt32

from .._batch.memory import MemoryBudget
from .._batch.moments import Mean, Sum
from .._batch.objective import Objective
from .._batch.transform import also_decorator, transformed
from .curvature_of import check_loss
from .fisher import Fisher, Kind
from .hessian import second_derivatives
from .methods import CurvatureMethod


if TYPE_CHECKING:
    from .._batch.signatures import Typed
    from .ggn_signatures import (
        GGNBlocksSignature,
        GGNDiagonalSignature,
        GGNSignature,
    )


Key = PRNGKeyArray | UInt32[Array, "2"]


@cast("Typed[GGNSignature]", also_decorator)
def filter_ggn(
    fun: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    fisher: Kind = "type-2",
    key: Key | None = None,
    num_samples: int = 1,
    sampler: Callable[..., Any] | None = None,
    block_size: int | MemoryBudget | None = None,
    num_blocks: int | None = None,
    checkpoint: bool = False,
    flat: bool = False,
    method: CurvatureMethod = "auto",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
    r"""The generalised Gauss-Newton matrix of a function of a PyTree, in blocks.

    Let `J` be the Jacobian of the outputs of `fun` and `H` the Hessian of `loss` with
    respect to these outputs. The matrix is $J^T H J$, accumulated over the examples:
    the Hessian without the second derivatives of `fun`. It is positive semidefinite if
    `loss` is convex. It equals the Fisher information if `loss` is the negative
    log-likelihood of an exponential family in its natural parameters.

    **Arguments:**

    - `fun`: the model: a function of the parameters and of one example that returns a
        PyTree of arrays of an inexact dtype. It may have a derivative in forward mode
        or in reverse mode only. If it has one mode only, the Jacobian of the examples
        of a microbatch is materialised.
    - `loss`: a function of the output of `fun` and of all arguments of `fun` after the
        first. It returns a real scalar. Pass it by keyword if you use this as a
        decorator.
    - `fisher`: `"type-2"` computes the matrix itself, with one backward pass for each
        output of an example. It is a single one for the last layer, each entry of which
        is one output, and one for each class where positions do not mix. `"mc"` is an
        unbiased Monte-Carlo estimate, with one backward pass for each sample. It uses
        the gradients for labels drawn by a `sampler` or, without one, pulls back random
        vectors with covariance `H`. `"empirical"` (the empirical Fisher) uses the
        gradients for the given labels. It is a different matrix, not an estimate of
        this one.
    - `key`: the random key, which `fisher="mc"` requires. Samples of an example do not
        depend on the microbatch size.
    - `num_samples`: how many samples to draw for each example with `fisher="mc"`, at
        least 1.
    - `sampler`: draws a label as `sampler(key, out)`, where `out` is the output of
        `fun` for an example. The label replaces the last argument, so all arguments
        must be given by position. The estimate is unbiased if `loss` is the model's
        negative log-likelihood and labels are drawn from this likelihood. Without a
        `sampler`, `loss` must be convex in `out`.
    - `method`: `"products"` computes products of the matrix with one-hot vectors.
        `"sites"` pulls each output of an example back to the outputs of layers and
        contracts the result with the layers' inputs. `"auto"` chooses the cheaper one
        for each parameter.
    - `where`, `filter_spec`, `in_axes`, `microbatch_size`, `accumulator`, `block_size`,
        `num_blocks`, `checkpoint`, `flat`: as for [`eqxbatch.filter_hessian`][].

    **Returns:**

    A function with the arguments of `fun` that returns the matrix in the same form as
    [`eqxbatch.filter_hessian`][].

    **Raises:**

    The errors of [`eqxbatch.filter_hessian`][], and:

    - `ValueError` for outputs of `fun` that are not arrays of an inexact dtype, for
        `fisher="mc"` without a `key`, for `key`, `num_samples` or `sampler` with any
        other `fisher`, and for a label from `sampler` that does not have the structure
        and shapes of the last argument.
    - `TypeError` for a `loss` that is not callable, for an unknown `fisher`, and for a
        `fun` that JAX can differentiate in neither mode.
    - `RuntimeError` at run time for a loss that is not convex, with `fisher="mc"` and
        no `sampler`. Inside `jax.shard_map`, the result is NaN instead.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> ggn = eqxbatch.filter_ggn(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
        ...     in_axes=0,
        ...     flat=True,
        ... )
        >>> matrix, unravel = ggn(model, jnp.ones((10, 2)), jnp.arange(10) % 3)
        >>> matrix.shape
        (9, 9)

        ```

    ??? cite

        Schraudolph, "Fast curvature matrix-vector products for second-order gradient
        descent", [Neural Computation 14, 2002](
        https://doi.org/10.1162/08997660260028683); Martens, "New insights and
        perspectives on the natural gradient method",
        [arXiv:1412.1193](https://arxiv.org/abs/1412.1193), for the three kinds of
        Fisher matrices; Kunstner et al., "Limitations of the empirical Fisher
        approximation", [arXiv:1905.12558](https://arxiv.org/abs/1905.12558).
    """
    check_loss(loss)
    sizes = block_size, num_blocks, microbatch_size
    objective = Objective(where, filter_spec, in_axes)
    matrix = second_derivatives(
        "full",
        sizes,
        objective,
        accumulator,
        loss=loss,
        of_loss=Fisher(fisher, key, num_samples, sampler),
        checkpoint=checkpoint,
        flat=flat,
        method=method,
    )
    return transformed(matrix, fun, "filter_ggn")


@cast("Typed[GGNDiagonalSignature]", also_decorator)
def filter_ggn_diagonal(
    fun: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    fisher: Kind = "type-2",
    key: Key | None = None,
    num_samples: int = 1,
    sampler: Callable[..., Any] | None = None,
    block_size: int | MemoryBudget | None = None,
    num_blocks: int | None = None,
    checkpoint: bool = False,
    flat: bool = False,
    method: CurvatureMethod = "auto",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
    """The diagonal of the generalised Gauss-Newton matrix of a function of a PyTree.

    Like [`eqxbatch.filter_ggn`][], with the same errors, but the matrix is never
    materialised. With `fisher="empirical"`, the diagonal is the mean (or sum) of the
    squared per-example gradients. The arguments are the same:

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`: how it is computed.

    The transformed function returns a PyTree with the structure and shapes of the
    parameters. With `flat`, it returns a pair of a vector of shape `(n,)` and
    `unravel`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> diagonal = eqxbatch.filter_ggn_diagonal(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
        ...     in_axes=0,
        ...     fisher="mc",
        ...     key=jax.random.key(1),
        ...     sampler=jax.random.categorical,
        ... )
        >>> found = diagonal(model, jnp.ones((10, 2)), jnp.arange(10) % 3)
        >>> found.layers[0].weight.shape
        (8, 2)

        ```

    ??? cite

        Dangel et al., "BackPACK: packing more into backprop",
        [arXiv:1912.10985](https://arxiv.org/abs/1912.10985), for the exact diagonal and
        its Monte-Carlo estimate.
    """
    check_loss(loss)
    sizes = block_size, num_blocks, microbatch_size
    objective = Objective(where, filter_spec, in_axes)
    matrix = second_derivatives(
        "diagonal",
        sizes,
        objective,
        accumulator,
        loss=loss,
        of_loss=Fisher(fisher, key, num_samples, sampler),
        checkpoint=checkpoint,
        flat=flat,
        method=method,
    )
    return transformed(matrix, fun, "filter_ggn_diagonal")


@cast("Typed[GGNBlocksSignature]", also_decorator)
def filter_ggn_blocks(
    fun: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    is_block: Callable[[Any], bool] | None = None,
    fisher: Kind = "type-2",
    key: Key | None = None,
    num_samples: int = 1,
    sampler: Callable[..., Any] | None = None,
    block_size: int | MemoryBudget | None = None,
    num_blocks: int | None = None,
    checkpoint: bool = False,
    flat: bool = False,
    method: CurvatureMethod = "auto",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
    """The block diagonal of the generalised Gauss-Newton matrix.

    Like [`eqxbatch.filter_ggn`][], with the same errors, but only the blocks on the
    diagonal are computed: one for each array, or one for each part that `is_block`
    selects.

    **Arguments:**

    All arguments except `is_block` are those of [`eqxbatch.filter_ggn`][].

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`: how it is computed.
    - `is_block`: which parts are one block, as for
        [`eqxbatch.filter_hessian_blocks`][].

    **Returns:**

    The transformed function returns a PyTree of the same form as for
    [`eqxbatch.filter_hessian_blocks`][], also with `flat`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> blocks = eqxbatch.filter_ggn_blocks(
        ...     lambda model, x, y: model(x),
        ...     lambda out, x, y: jnp.sum((out - y) ** 2),
        ...     in_axes=0,
        ...     is_block=lambda x: isinstance(x, eqx.nn.Linear),
        ...     flat=True,
        ... )(model, jnp.ones((10, 2)), jnp.zeros((10, 3)))
        >>> [matrix.shape for matrix, unravel in blocks.layers]
        [(24, 24), (27, 27)]

        ```
    """
    check_loss(loss)
    sizes = block_size, num_blocks, microbatch_size
    objective = Objective(where, filter_spec, in_axes)
    matrix = second_derivatives(
        "blocks",
        sizes,
        objective,
        accumulator,
        is_block=is_block,
        loss=loss,
        of_loss=Fisher(fisher, key, num_samples, sampler),
        checkpoint=checkpoint,
        flat=flat,
        method=method,
    )
    return transformed(matrix, fun, "filter_ggn_blocks")
