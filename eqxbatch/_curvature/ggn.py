"""`filter_ggn`, its diagonal and its blocks, exactly or as estimates of Fisher."""

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

    With `J` the Jacobian of what `fun` returns, and `H` the Hessian of `loss` in that,
    it is $J^T H J$, summed over the examples: the Hessian without the second
    derivatives of `fun`. It is positive semidefinite if `loss` is convex, and the
    Fisher information if `loss` is the negative log-likelihood of an exponential
    family in its natural parameters.

    **Arguments:**

    - `fun`: takes the parameters first, and returns a PyTree of arrays of an inexact
        dtype: a model, for the example that the other arguments are.
    - `loss`: takes what `fun` returns in the place of the first argument, and the same
        other arguments. It returns a real scalar.
    - `fisher`: `"type-2"` is the matrix itself, which takes one backward pass for each
        output of an example. `"mc"` is an unbiased estimate of it, which takes one for
        each sample: of gradients for labels that a `sampler` draws, or else of random
        vectors with the covariance `H`. `"empirical"` has the gradients for the labels
        at hand in their place. That is another matrix, whose mean is not this one.
    - `key`: for `fisher="mc"`. Each example has its own part of it, whatever the
        microbatch size.
    - `num_samples`: how many of them each example has for `fisher="mc"`, at least 1.
    - `sampler`: draws a label as `sampler(key, out)`, where `out` is what `fun` returns
        for an example. The label takes the place of the last argument, and all
        arguments are given by position. It must be drawn from the model's own
        likelihood, of which `loss` is the negative logarithm, for the estimate to be
        unbiased. Without one, `loss` must be convex in `out`.
    - `method`: `"products"` multiplies the matrix with one-hot vectors; `"sites"` pulls
        each output of an example back to the outputs of layers, and contracts that with
        their inputs; `"auto"` takes, for each parameter, what costs less.

    - `where`, `filter_spec`, `in_axes`, `microbatch_size`, `accumulator`, `block_size`,
        `num_blocks`, `checkpoint`, `flat`: as for [`eqxbatch.filter_hessian`][].

    What the function that it returns returns, and the errors, are those of that. As a
    decorator, it needs `loss` by name. A loss that is not convex raises an error at run
    time for `fisher="mc"` without a `sampler`.

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

    As [`eqxbatch.filter_ggn`][], with the same errors, but the matrix itself is never
    there. With `fisher="empirical"`, it has the squares of the gradients of single
    examples. The arguments mean what they mean there:

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the matrix itself, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`: how it is computed.

    The function that it returns returns a PyTree in the structure of the first
    argument, with arrays of the same shapes as there; with `flat`, a pair of a vector
    of shape `(n,)` and of `unravel`.

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
        [arXiv:1912.10985](https://arxiv.org/abs/1912.10985), has the exact diagonal and
        its estimate by samples.
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
    """The blocks on the diagonal of the generalised Gauss-Newton matrix.

    As [`eqxbatch.filter_ggn`][], with the same errors, for the blocks that
    [`eqxbatch.filter_hessian_blocks`][] has: of each array with itself, or of the parts
    that `is_block` says are one. The arguments mean what they mean there:

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the matrix itself, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`: how it is computed.

    It returns what [`eqxbatch.filter_hessian_blocks`][] returns, with `flat` too.

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
