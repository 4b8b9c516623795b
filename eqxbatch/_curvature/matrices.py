"""Hessians and Gauss-Newton matrices, their diagonals and their blocks."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Concatenate, Generic, Literal

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from .._base.dtypes import common_dtype
from .._base.mesh import sum_except
from .._base.platforms import products_of
from .._base.trees import safe_zip
from .._base.versions import varying
from .._batch.arguments import Arguments
from .._batch.loss import Loss
from .._batch.memory import check_fits_memory, MemoryBudget
from .._batch.transform import also_decorator, Model, Out, P, run_compiled
from .choose import CurvatureBlocks
from .fisher import AbstractFisher
from .functions import (
    AbstractCurvature,
    AbstractOfLoss,
    AbstractSecondOrder,
    GaussNewtonCurvature,
)
from .jacobian import AbstractColumns
from .pytree import arranged, leaves_of_parts, Pair, RequestedBlocks


_LEAST_COLUMNS = 32


class AbstractBySites(AbstractSecondOrder, AbstractColumns):
    """A transform that computes second derivatives by sites or by products."""

    _: dataclasses.KW_ONLY
    method: Literal["auto", "sites", "products"] = "auto"


class AbstractMatrix(AbstractBySites, Generic[P]):
    """A part of a matrix of second derivatives.

    - `flat`: whether it is returned as an array.
    - `is_block`: which parts of the parameters are blocks, if these are computed.
    """

    _: dataclasses.KW_ONLY
    flat: bool = False
    part: ClassVar[Literal["full", "diagonal", "blocks"]]

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run_compiled(self, *args, **kwargs)

    @property
    def has_gaps(self) -> bool:
        return not self.flat

    @property
    def is_block(self) -> Callable[[Any], bool] | None:
        return None

    def apply(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        sized = self
        if isinstance(self.block_size, MemoryBudget):
            # The batch is cut first, so that the two sizes are chosen one after the
            # other.
            sized = dataclasses.replace(self, block_size=_LEAST_COLUMNS)
        fun = sized.in_microbatches(args, kwargs)
        keys = self.keys_of(fun.blocks) if isinstance(self, AbstractFisher) else None
        # The size of the result is known before anything is computed.
        diff, leaves = fun.diff, jtu.tree_leaves(fun.diff)
        num = sum(x.size for x in leaves)
        if self.part == "full":
            self._check_fits(num, common_dtype(*(x.dtype for x in leaves)))
        # A budget for columns measures a call with the microbatches that were chosen.
        of_fun = None if fun.blocks is None else fun.blocks.size
        size = self.num_columns(num, args, kwargs, microbatch_size=of_fun)
        curvature = self.curvature(fun)
        # The whole matrix has a single part.
        is_block = (lambda _: True) if self.part == "full" else self.is_block
        parts = leaves_of_parts(diff, is_block)
        # Pairs on and above the diagonal, within each part. Of a diagonal, each array
        # is one.
        is_diagonal = self.part == "diagonal"
        all_pairs = functools.partial(itertools.combinations_with_replacement, r=2)
        pairs = itertools.chain.from_iterable(map(all_pairs, parts))
        requested = RequestedBlocks([*pairs], is_diagonal)
        # How they are computed is chosen from one example, before the loop over all.
        blocks = CurvatureBlocks(curvature, requested, self.method, size)
        program = curvature.program
        with products_of(program.closed):
            sums, aux = self.total(fun, program, blocks.sums, curvature.aux, keys)
        # Each device has the sums over its own examples.
        groups = (_over_devices(*x, leaves) for x in safe_zip(blocks.groups, sums))
        matrix = arranged(
            diff,
            [*itertools.chain.from_iterable(groups)],
            is_block,
            flat=self.flat,
            is_diagonal=is_diagonal,
            is_whole=self.part == "full" and blocks.is_whole,
        )
        return (matrix, aux) if self.has_aux else matrix

    def _check_fits(self, num: int, dtype: Any) -> None:
        name = self.public_name
        products = {"filter_hessian": "hvp", "filter_ggn": "ggnvp"}[name]
        check_fits_memory(
            f"The matrix of `{name}` for {num:,} parameters, of shape ({num}, {num}) "
            f"and dtype {dtype},",
            num**2 * dtype.itemsize,
            f"Select fewer parameters with `where`; or use `{name}_diagonal`, "
            f"`{name}_blocks`, products with vectors (`filter_{products}`) or "
            "Kronecker factors (`filter_kfac`).",
        )


def _over_devices(
    pairs: list[Pair], blocks: Array, leaves: list[Array]
) -> Iterator[tuple[list[Pair], Array]]:
    """Sums blocks over the devices that have the same parameters, as for a gradient.

    Devices keep their own block of two leaves if one of these differs between them.
    """
    # A block differs between devices if one of its two leaves does.
    kinds = [
        varying(jax.typeof(leaves[i])) | varying(jax.typeof(leaves[j]))
        for i, j in pairs
    ]
    for names in dict.fromkeys(kinds):
        which = [i for i, kind in enumerate(kinds) if kind == names]
        # Mostly all pairs are of one kind, and stay one array.
        of_names = blocks if len(which) == len(pairs) else blocks[np.array(which)]
        yield [pairs[i] for i in which], sum_except(of_names, names)


class AbstractHessian(AbstractOfLoss, AbstractBySites):
    """A part of the Hessian of a loss."""

    _: dataclasses.KW_ONLY
    num_blocks: int | None = None
    holomorphic: bool = False

    def __check_init__(self) -> None:
        if self.method == "sites" and self.mode == "rev":
            raise ValueError(
                "`method='sites'` differentiates gradients in forward mode; got "
                "`mode='rev'`. Use `method='auto'` or `mode='auto'`."
            )


class Hessian(AbstractMatrix[P], AbstractHessian):
    """The Hessian of a function of a PyTree, in blocks.

    Like `equinox.filter_hessian`, with less time and memory: by symmetry, only the
    blocks on and above the diagonal are computed, and only a block of columns at a
    time. The result is exactly symmetric. The only exception is a single array, all
    columns of which are computed at once by products: as for `jax.hessian`, which does
    the same, entries and their mirror images may differ by rounding.

    **Arguments:**

    - `fun`: a function that returns a real scalar. It is differentiated twice with
        respect to all arrays of an inexact dtype in its first argument. With `in_axes`,
        it is the loss of one example.
    - `block_size`: how many of the `n` columns are computed at a time, at least 1. A
        block has columns of one leaf or of several small leaves. An
        [`eqxbatch.MemoryBudget`][] chooses the largest number that fits; `None`
        computes all columns of a leaf at once.
    - `num_blocks`: an alternative to `block_size`, which becomes `n / num_blocks`,
        rounded up. There may be more blocks than this, since a block can end with its
        leaf.
    - `checkpoint`: whether to recompute intermediate values for each block instead of
        storing them.
    - `has_aux`: whether `fun` returns a pair `(value, aux)`.
    - `flat`: whether to return a matrix, and a function that turns vectors into
        PyTrees.
    - `method`: `"products"` computes one Hessian-vector product for each parameter
        entry. `"sites"` differentiates each example with respect to the outputs of
        layers, which have fewer entries than the parameters, and contracts the result
        with the layers' inputs. Parameters without a rule use products. `"auto"`
        chooses the cheaper one for each parameter, and products where uses or positions
        of a parameter nearly cancel. Without `in_axes`, for a function of many
        examples, this is mostly products.
    - `mode`: how Hessian-vector products differentiate the gradient: in forward mode
        with `"fwd"`, in reverse mode with `"rev"`. Some functions with custom
        derivatives need the latter. `"auto"` uses forward mode; if JAX cannot do that,
        it warns and uses reverse mode.
    - `where`: a function from the first argument to the part (or parts) of it to
        differentiate with respect to, such as the last layer. The default is all of it.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `holomorphic`: whether `fun` is a holomorphic function of complex arrays; it must
        return a complex scalar. For other functions of complex arrays, pass real and
        imaginary parts as separate arrays.
    - `in_axes`: the batch axes of the arguments after the first, as for
        [`eqxbatch.filter_micro_value_and_grad`][]. The result is then the Hessian of
        the mean of `fun` over all examples. With the default, `None`, there is no
        batch, as for `equinox.filter_hessian`: `fun` is called once with all arguments.
    - `microbatch_size`: how many examples are processed at a time, at least 1. An
        [`eqxbatch.MemoryBudget`][] chooses the largest number that fits; `None` means
        all of them.
    - `accumulator`: [`eqxbatch.Mean`][] or [`eqxbatch.Sum`][], over the examples; their
        `weights` weight the examples.

    **Returns:**

    A function with the arguments of `fun` that returns the Hessian, or `(hessian, aux)`
    with `has_aux`. The Hessian is a PyTree of PyTrees: it has the structure of the
    first argument, with `None` for everything that is not differentiated, and each leaf
    is such a PyTree again. The array for two leaves has the axes of the first, then
    those of the second. With `in_axes`, `aux` has the examples along axis 0.

    With `flat`, the Hessian is a pair of a matrix of shape `(n, n)`, in the order of
    `jax.flatten_util.ravel_pytree`, and `unravel` (an [`eqxbatch.results.Unravel`][]),
    which turns vectors of shape `(n,)` into PyTrees. [`eqxbatch.hessian_to_pytree`][]
    turns matrices into PyTrees of PyTrees.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    - `ValueError` for a value that is not a real scalar, if there is nothing to
        differentiate, for an unknown `method` or `mode`, for `method="sites"` with
        `mode="rev"`, for sizes below 1, for both `block_size` and `num_blocks`, and for
        `microbatch_size`, or weights of an `accumulator`, without `in_axes`.
    - `TypeError` for complex arrays without `holomorphic`, for real arrays with it, for
        an `accumulator` of another type, and if `mode="fwd"` or `method="sites"` is
        used for a gradient without a forward-mode derivative.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 2, jnp.tanh, key=jax.random.key(0))
        >>> loss = lambda model, x, y: (model(x) - y) ** 2
        >>> x, y = jnp.ones((100, 2)), jnp.zeros(100)
        >>> hessian = eqxbatch.filter_hessian(loss, in_axes=0)(model, x, y)
        >>> hessian.layers[0].weight.layers[1].bias.shape
        (8, 2, 8)
        >>> of_last = eqxbatch.filter_hessian(
        ...     loss, in_axes=0, where=lambda model: model.layers[-1], flat=True
        ... )
        >>> matrix, unravel = of_last(model, x, y)
        >>> matrix.shape, unravel(matrix[0]).layers[-1].weight.shape
        ((9, 9), (1, 8))

        ```

    ??? cite

        Hessian-vector products follow Pearlmutter, "Fast exact multiplication by the
        Hessian", [Neural Computation 6, 1994](
        https://doi.org/10.1162/neco.1994.6.1.147). Second derivatives with respect to
        the outputs of layers, contracted with the layers' inputs, are used by Botev et
        al., "Practical Gauss-Newton optimisation for deep learning",
        [arXiv:1706.03662](https://arxiv.org/abs/1706.03662), and Dangel et al.,
        "Modular block-diagonal curvature approximations for feedforward architectures",
        [arXiv:1902.01813](https://arxiv.org/abs/1902.01813), for blocks on the
        diagonal.
    """

    fun: Callable[P, Any]
    _: dataclasses.KW_ONLY
    has_aux: bool = False
    part: ClassVar = "full"


class AbstractHessianDiagonal(AbstractHessian, Generic[Model, P]):
    """`filter_hessian_diagonal` with results of the type of the first argument."""

    fun: Callable[Concatenate[Model, P], Any]

    @abc.abstractmethod
    def __call__(self, x: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class HessianDiagonal(
    AbstractMatrix[Concatenate[Model, P]], AbstractHessianDiagonal[Model, P]
):
    """The diagonal of the Hessian of a function of a PyTree, exactly.

    Like [`eqxbatch.filter_hessian`][], with the same errors, but the Hessian is never
    materialised. With `method="sites"`, each example is differentiated only with
    respect to the outputs of layers. The arguments are the same:

    - `fun`, `has_aux`, `where`, `filter_spec`, `holomorphic`: what is differentiated.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`, `mode`: how it is computed.

    The transformed function returns a PyTree with the structure and shapes of the
    parameters. With `flat`, it returns a pair of a vector of shape `(n,)` and
    `unravel`. With `has_aux`, it returns a pair of this and `aux`.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> cubes = lambda x: jnp.sum(x["a"] ** 3) + x["b"] ** 2 * x["a"][0]
        >>> x = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
        >>> diagonal = eqxbatch.filter_hessian_diagonal(cubes)(x)
        >>> print(diagonal["a"], diagonal["b"])
        [ 6. 12.] 2.0

        ```
    """

    _: dataclasses.KW_ONLY
    has_aux: bool = False
    part: ClassVar = "diagonal"


class HessianBlocks(AbstractMatrix[P], AbstractHessian):
    """The block diagonal of the Hessian of a function of a PyTree.

    Like [`eqxbatch.filter_hessian`][], with the same errors, but only the blocks on the
    diagonal are computed: one for each array, or one for each part that `is_block`
    selects.

    **Arguments:**

    All arguments except `is_block` are those of [`eqxbatch.filter_hessian`][].

    - `fun`, `has_aux`, `where`, `filter_spec`, `holomorphic`: what is differentiated.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`, `mode`: how it is computed.
    - `is_block`: a predicate on parts of the first argument: whether the part is one
        block, such as `lambda x: isinstance(x, equinox.nn.Linear)` for layers. The
        default is one block for each array.

    **Returns:**

    A function that returns a PyTree with the structure of the first argument. An array
    of shape `s` is replaced by an array of shape `(*s, *s)`. A part that `is_block`
    selects is replaced by what [`eqxbatch.filter_hessian`][] returns for it. With
    `flat`, each block is a pair of a matrix and `unravel`, or `None` if nothing in it
    is differentiated. With `has_aux`, the function returns a pair of this and `aux`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
        >>> blocks = eqxbatch.filter_hessian_blocks(
        ...     lambda model, x: model(x) ** 2,
        ...     in_axes=0,
        ...     is_block=lambda x: isinstance(x, eqx.nn.Linear),
        ...     flat=True,
        ... )(model, jnp.ones((10, 2)))
        >>> [matrix.shape for matrix, unravel in blocks.layers]
        [(24, 24), (9, 9)]

        ```
    """

    fun: Callable[P, Any]
    _: dataclasses.KW_ONLY
    is_block: Callable[[Any], bool] | None = None
    has_aux: bool = False
    part: ClassVar = "blocks"


class AbstractGGN(AbstractFisher[Model, P, Out], AbstractBySites):
    """A part of a Gauss-Newton matrix."""

    def curvature(self, fun: Loss) -> AbstractCurvature:
        return GaussNewtonCurvature(fun, self.loss, self.checkpoint, self)


class GGN(AbstractMatrix[Concatenate[Model, P]], AbstractGGN[Model, P, Out]):
    """The generalised Gauss-Newton matrix of a function of a PyTree, in blocks.

    Let `J` be the Jacobian of the outputs of `fun` and `H` the Hessian of `loss` with
    respect to these outputs. The matrix is `J.T @ H @ J`, accumulated over the
    examples: the Hessian without the second derivatives of `fun`. It is positive
    semidefinite if `loss` is convex. It equals the Fisher information if `loss` is the
    negative log-likelihood of an exponential family in its natural parameters.

    **Arguments:**

    - `fun`: the model: a function of the parameters and of one example that returns a
        PyTree of arrays of an inexact dtype. It may have a derivative in forward mode
        or in reverse mode only. If it has one mode only, the Jacobian of the examples
        of a microbatch is materialised.
    - `loss`: a function of the output of `fun` and of all arguments of `fun` after the
        first. It returns a real scalar. Pass it by keyword if you use this as a
        decorator.
    - `fisher`: `"exact"` (or `"type-2"`) computes the matrix itself, with one backward
        pass for each output of an example, and a single one for the last layer, each
        entry of which is one output.
        `"mc"` is an unbiased Monte-Carlo estimate, with one backward pass for each
        sample. It uses the gradients for labels drawn by a `sampler` or, without one,
        pulls back random vectors with covariance `H`. `"empirical"` (the empirical
        Fisher) uses the gradients for the given labels. It is a different matrix, not
        an estimate of this one.
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
        for each parameter. For up to 256 parameters, it forms the Jacobian of a block
        of examples instead, if there is one output for each example, or if there are at
        least as many outputs as parameters.
    - `in_axes`: the batch axes of the arguments after the first, as for
        [`eqxbatch.filter_micro_value_and_grad`][]: axis 0 of all arrays by default.
        With None, there is no batch: `fun` is called once with all arguments.
    - `where`, `filter_spec`, `microbatch_size`, `accumulator`, `block_size`,
        `checkpoint`, `flat`: as for [`eqxbatch.filter_hessian`][].

    **Returns:**

    A function with the arguments of `fun` that returns the matrix in the same form as
    [`eqxbatch.filter_hessian`][].

    **Raises:**

    The errors of [`eqxbatch.filter_hessian`][], and:

    - `ValueError` for outputs of `fun` that are not arrays of an inexact dtype, for
        `fisher="mc"` without a `key`, for `key`, `num_samples` or `sampler` with any
        other `fisher`, for an unknown `fisher`, and for a label from `sampler` that
        does not have the structure and shapes of the last argument.
    - `TypeError` for a `loss` that is not callable, and for a `fun` that JAX can
        differentiate in neither mode.
    - `RuntimeError` at run time for a loss that is not convex, with `fisher="mc"` and
        no `sampler`. Inside `jax.shard_map`, the result is NaN instead.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> ggn = eqxbatch.filter_ggn(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
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

    part: ClassVar = "full"


class AbstractGGNDiagonal(AbstractGGN[Model, P, Out]):
    """`filter_ggn_diagonal` with results of the type of the first argument."""

    @abc.abstractmethod
    def __call__(self, x: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class GGNDiagonal(
    AbstractMatrix[Concatenate[Model, P]], AbstractGGNDiagonal[Model, P, Out]
):
    """The diagonal of the generalised Gauss-Newton matrix of a function of a PyTree.

    Like [`eqxbatch.filter_ggn`][], with the same errors, but the matrix is never
    materialised. With `fisher="empirical"`, the diagonal is the mean (or sum) of the
    squared per-example gradients. The arguments are the same:

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `checkpoint`, `method`: how it is computed.

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

    part: ClassVar = "diagonal"


class GGNBlocks(AbstractMatrix[Concatenate[Model, P]], AbstractGGN[Model, P, Out]):
    """The block diagonal of the generalised Gauss-Newton matrix.

    Like [`eqxbatch.filter_ggn`][], with the same errors, but only the blocks on the
    diagonal are computed: one for each array, or one for each part that `is_block`
    selects.

    **Arguments:**

    All arguments except `is_block` are those of [`eqxbatch.filter_ggn`][].

    - `fun`, `loss`, `where`, `filter_spec`: what is differentiated.
    - `fisher`, `key`, `num_samples`, `sampler`: the exact matrix, or an estimate.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `checkpoint`, `method`: how it is computed.
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
        ...     is_block=lambda x: isinstance(x, eqx.nn.Linear),
        ...     flat=True,
        ... )(model, jnp.ones((10, 2)), jnp.zeros((10, 3)))
        >>> [matrix.shape for matrix, unravel in blocks.layers]
        [(24, 24), (27, 27)]

        ```
    """

    _: dataclasses.KW_ONLY
    is_block: Callable[[Any], bool] | None = None
    part: ClassVar = "blocks"


filter_hessian = also_decorator("filter_hessian", Hessian)


filter_hessian_diagonal = also_decorator(
    "filter_hessian_diagonal", HessianDiagonal, AbstractHessianDiagonal
)


filter_hessian_blocks = also_decorator("filter_hessian_blocks", HessianBlocks)


filter_ggn = also_decorator("filter_ggn", GGN)


filter_ggn_diagonal = also_decorator(
    "filter_ggn_diagonal", GGNDiagonal, AbstractGGNDiagonal
)


filter_ggn_blocks = also_decorator("filter_ggn_blocks", GGNBlocks)
