"""`filter_hessian`, its diagonal and its blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast, ClassVar, get_args, TYPE_CHECKING

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._base.mesh import sum_varying, varying
from .._batch.memory import MemoryBudget
from .._batch.moments import Mean, Sum
from .._batch.objective import (
    AbstractOverExamples,
    Call,
    check_over_examples,
    Examples,
    Objective,
    split_call,
)
from .._batch.transform import also_decorator, Blocking, transformed
from .by_products import ColumnSize, Mode
from .curvature_of import make_curvature, with_keys
from .fisher import Fisher, TYPE_2
from .methods import CurvatureBlocks, CurvatureMethod
from .pytree import all_pairs, arranged, MatrixPart, part_starts
from .site_blocks import Wanted


if TYPE_CHECKING:
    from .._batch.signatures import Typed
    from .curvature_signatures import (
        DiagonalSignature,
        HessianBlocksSignature,
        HessianSignature,
    )


_LEAST_COLUMNS = 32


class Matrix(AbstractOverExamples):
    """A Hessian or, with a `loss` of outputs, a Gauss-Newton matrix."""

    is_compiled: ClassVar[bool] = True
    takes_instance: ClassVar[bool] = True
    part: MatrixPart = eqx.field(static=True)
    objective: Objective
    column_size: ColumnSize
    blocking: Blocking
    accumulator: Sum | Mean
    checkpoint: bool
    flat: bool
    method: CurvatureMethod
    mode: Mode = "auto"
    loss: Callable | None = None
    of_loss: Fisher = TYPE_2
    is_block: Callable[[Any], bool] | None = None

    def __check_init__(self) -> None:
        for name, kind in (("method", CurvatureMethod), ("mode", Mode)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(
                    f"`{name}` must be one of {get_args(kind)}; got {value!r}."
                )
        if self.method == "sites" and self.mode == "rev":
            raise ValueError(
                "`method='sites'` differentiates gradients in forward mode; got "
                "`mode='rev'`. Use `method='auto'` or `mode='auto'`."
            )
        check_over_examples(self)

    def specs(self, call: Any, out: PyTree) -> PyTree:
        # Blocks have the axes of two arrays, so they are replicated on all devices.
        del call, out
        return PartitionSpec()

    def apply(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        diff, nondiff = self.objective.real_parameters(args, kwargs)
        leaves = jtu.tree_leaves(diff)
        call = (fun, args, kwargs)
        examples = with_keys(self._examples(call), self.of_loss)
        size = self._size(examples, sum(x.size for x in leaves), call)
        loss = self.objective.loss(fun, examples.batch, diff, nondiff)
        settings = self.mode, self.checkpoint, self.of_loss
        curvature = make_curvature(loss, self.loss, *settings)
        wanted = self._wanted(diff)
        blocks = CurvatureBlocks(curvature, wanted, self.method, size)
        closed = curvature.program.closed
        found, aux = examples.total(blocks.sums, curvature.aux, closed)
        found = [
            sum_varying(x, varying(jax.typeof(leaves[own[0][0]])))
            for own, x in zip(blocks.groups, found, strict=True)
        ]
        pairs = blocks.by_pairs(found)
        form = self.part, self.is_block, self.flat
        result = arranged(diff, pairs, *form, is_whole=blocks.is_whole)
        return (result, aux) if self.objective.has_aux else result

    def _examples(self, call: Call) -> Examples:
        fixed = self
        if isinstance(self.column_size.block_size, MemoryBudget):
            # The batch is cut first, so that the two sizes are chosen one after the
            # other.
            few = ColumnSize(_LEAST_COLUMNS, None)
            fixed = dataclasses.replace(self, column_size=few)
        return split_call(fixed, call, call)

    def _size(self, examples: Examples, total: int, call: Call) -> int | None:
        """The number of columns that are computed at a time."""

        def run_with(size: ColumnSize) -> Callable[[PyTree], Any]:
            def run(operands: PyTree) -> Any:
                transform, *call = operands
                sizes = {"column_size": size, "blocking": examples.fixed()}
                return dataclasses.replace(transform, **sizes).apply(*call)

            return run

        return self.column_size.resolve(total, run_with, (self, *call))

    def _wanted(self, diff: PyTree) -> Wanted:
        if self.part == "full":
            return Wanted(all_pairs(jtu.tree_leaves(diff)))
        if self.part == "diagonal":
            return Wanted([(i, i) for i, _ in enumerate(jtu.tree_leaves(diff))], True)
        parts = jtu.tree_leaves(diff, is_leaf=self.is_block)
        return Wanted(
            [
                (first + start, second + start)
                for start, part in zip(part_starts(parts), parts, strict=True)
                for first, second in all_pairs(jtu.tree_leaves(part))
            ]
        )


def second_derivatives(
    part: MatrixPart,
    sizes: tuple[int | MemoryBudget | None, int | None, int | MemoryBudget | None],
    objective: Objective,
    accumulator: Sum | Mean,
    **settings: Any,
) -> Matrix:
    """The transform; `sizes` are block size, number of blocks and microbatch size."""
    return Matrix(
        part=part,
        objective=objective,
        column_size=ColumnSize(*sizes[:2]),
        blocking=Blocking(sizes[2], None, checkpoint=False),
        accumulator=accumulator,
        **settings,
    )


@cast("Typed[HessianSignature]", also_decorator)
def filter_hessian(
    fun: Callable[..., Any] | None = None,
    *,
    block_size: int | MemoryBudget | None = None,
    num_blocks: int | None = None,
    checkpoint: bool = False,
    has_aux: bool = False,
    flat: bool = False,
    method: CurvatureMethod = "auto",
    mode: Mode = "auto",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    holomorphic: bool = False,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
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
        chooses the cheaper one for each parameter. Without `in_axes`, for a function of
        many examples, this is mostly products.
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
        batch: `fun` is called once with all arguments.
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
    `jax.flatten_util.ravel_pytree`, and `unravel` (an [`eqxbatch.Unravel`][]), which
    turns vectors of shape `(n,)` into PyTrees. [`eqxbatch.hessian_to_pytree`][] turns
    matrices into PyTrees of PyTrees.

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
    sizes = block_size, num_blocks, microbatch_size
    objective = Objective(where, filter_spec, in_axes, has_aux, holomorphic)
    matrix = second_derivatives(
        "full",
        sizes,
        objective,
        accumulator,
        checkpoint=checkpoint,
        flat=flat,
        method=method,
        mode=mode,
    )
    return transformed(matrix, fun, "filter_hessian")


@cast("Typed[DiagonalSignature]", also_decorator)
def filter_hessian_diagonal(
    fun: Callable[..., Any] | None = None,
    *,
    block_size: int | MemoryBudget | None = None,
    num_blocks: int | None = None,
    checkpoint: bool = False,
    has_aux: bool = False,
    flat: bool = False,
    method: CurvatureMethod = "auto",
    mode: Mode = "auto",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    holomorphic: bool = False,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
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
    sizes = block_size, num_blocks, microbatch_size
    objective = Objective(where, filter_spec, in_axes, has_aux, holomorphic)
    matrix = second_derivatives(
        "diagonal",
        sizes,
        objective,
        accumulator,
        checkpoint=checkpoint,
        flat=flat,
        method=method,
        mode=mode,
    )
    return transformed(matrix, fun, "filter_hessian_diagonal")


@cast("Typed[HessianBlocksSignature]", also_decorator)
def filter_hessian_blocks(
    fun: Callable[..., Any] | None = None,
    *,
    is_block: Callable[[Any], bool] | None = None,
    block_size: int | MemoryBudget | None = None,
    num_blocks: int | None = None,
    checkpoint: bool = False,
    has_aux: bool = False,
    flat: bool = False,
    method: CurvatureMethod = "auto",
    mode: Mode = "auto",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    holomorphic: bool = False,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
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
    sizes = block_size, num_blocks, microbatch_size
    objective = Objective(where, filter_spec, in_axes, has_aux, holomorphic)
    matrix = second_derivatives(
        "blocks",
        sizes,
        objective,
        accumulator,
        is_block=is_block,
        checkpoint=checkpoint,
        flat=flat,
        method=method,
        mode=mode,
    )
    return transformed(matrix, fun, "filter_hessian_blocks")
