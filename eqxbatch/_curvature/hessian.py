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
    """A Hessian; or, with a `loss` of outputs, a Gauss-Newton matrix."""

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
        # Its blocks have the axes of two arrays: they are whole on each device.
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
        result = arranged(diff, pairs, self.part, self.is_block, self.flat)
        return (result, aux) if self.objective.has_aux else result

    def _examples(self, call: Call) -> Examples:
        fixed = self
        if isinstance(self.column_size.block_size, MemoryBudget):
            # The batch is cut first, so that not both sizes are looked for at once.
            few = ColumnSize(_LEAST_COLUMNS, None)
            fixed = dataclasses.replace(self, column_size=few)
        return split_call(fixed, call, call)

    def _size(self, examples: Examples, total: int, call: Call) -> int | None:
        """How many columns are computed at a time."""

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
    """The settings; `sizes` are those of blocks, their number, and of microbatches."""
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

    `equinox.filter_hessian`, in less time and memory: of a symmetric matrix, only the
    blocks of leaves on and above the diagonal are computed. It is exactly symmetric.

    **Arguments:**

    - `fun`: a function that returns a real scalar. It is differentiated twice with
        respect to all arrays of an inexact dtype in its first argument. With `in_axes`,
        it is the loss of one example.
    - `block_size`: how many of the `n` columns are computed at a time, at least 1. They
        are those of one leaf, or of several small ones. An [`eqxbatch.MemoryBudget`][]
        chooses the largest number that fits; `None` is all of a leaf.
    - `num_blocks`: in how many blocks they are computed instead; more than there are
        columns means one at a time.
    - `checkpoint`: whether intermediate values are computed anew for each block, and
        not kept.
    - `has_aux`: whether `fun` returns a pair `(value, aux)`.
    - `flat`: whether to return a matrix, and what turns vectors into PyTrees.
    - `method`: `"products"` multiplies the Hessian with one-hot vectors, one for each
        parameter; `"sites"` follows what single examples give with respect to the
        outputs of layers, of which there are fewer than parameters, and contracts that
        with their inputs. Parameters that it has no rule for are done by products.
        `"auto"` takes, for each parameter, what costs less. With many examples in one
        function, and `in_axes` not given, that is mostly products.
    - `mode`: products are those of the gradient's forward-mode derivative with
        `"fwd"`, and of its reverse-mode derivative with `"rev"`, which some functions
        with custom derivatives need. `"auto"` is the former, unless JAX says that there
        is none: then it warns, and takes the latter.
    - `where`: takes the first argument and returns the part of it, or parts, that it is
        differentiated in: the last layer, say. The default is all of it.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `holomorphic`: whether `fun` is a holomorphic function of complex arrays. For one
        that is not, give their real and imaginary parts as arrays of their own.
    - `in_axes`: which axes of the arguments after the first are the batch, as for
        [`eqxbatch.filter_micro_value_and_grad`][]. The Hessian is then that of the mean
        of `fun` over all examples. With `None`, the default, `fun` is one function of
        all its arguments.
    - `microbatch_size`: how many examples are worked with at a time, at least 1. An
        [`eqxbatch.MemoryBudget`][] chooses the largest number that fits; `None` is all
        of them.
    - `accumulator`: [`eqxbatch.Mean`][] or [`eqxbatch.Sum`][], over the examples;
        their `weights` weight the examples.

    **Returns:**

    A function with the arguments of `fun` that returns the Hessian, or `(hessian,
    aux)`. It is a PyTree in the structure of the first argument, `None` for what is not
    differentiated, whose leaves are such PyTrees again. The array for two leaves has
    the axes of the first, then those of the second. With `flat`, it is a pair of a
    matrix of shape `(n, n)`, in the order of `jax.flatten_util.ravel_pytree`, and of
    `unravel`, which turns vectors of shape `(n,)` into PyTrees;
    [`eqxbatch.hessian_to_pytree`][] does that to matrices. `aux` is that of all
    examples, along axis 0.

    It compiles itself, and an equal call later on traces nothing.

    **Raises:**

    `ValueError` for a value that is not a real scalar, if there is nothing to
    differentiate, for sizes below 1, for both `block_size` and `num_blocks`, and for
    `microbatch_size` without `in_axes`; `TypeError` for complex arrays without
    `holomorphic`, and with `mode="fwd"` or `method="sites"` for a gradient that has no
    forward-mode derivative.

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

        Products with Hessians are those of Pearlmutter, "Fast exact multiplication by
        the Hessian", [Neural Computation 6, 1994](
        https://doi.org/10.1162/neco.1994.6.1.147). Second derivatives with respect to
        the outputs of layers, dressed with their inputs, are what Botev et al.,
        "Practical Gauss-Newton optimisation for deep learning",
        [arXiv:1706.03662](https://arxiv.org/abs/1706.03662), and Dangel et al.,
        "Modular block-diagonal curvature approximations for feedforward
        architectures", [arXiv:1902.01813](https://arxiv.org/abs/1902.01813), pass
        backwards for blocks on the diagonal.
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

    As [`eqxbatch.filter_hessian`][], with the same errors, but the Hessian itself is
    never there. By `method="sites"`, the derivatives of single examples are only taken
    with respect to the outputs of layers. The arguments mean what they mean there:

    - `fun`, `has_aux`, `where`, `filter_spec`, `holomorphic`: what is differentiated.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`, `mode`: how it is computed.

    The function that it returns returns a PyTree in the structure of the first
    argument, with arrays of the same shapes as there; with `flat`, a pair of a vector
    of shape `(n,)` and of `unravel`; with `has_aux`, a pair of that and `aux`.

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
    """The blocks on the diagonal of the Hessian of a function of a PyTree.

    As [`eqxbatch.filter_hessian`][], with the same errors, but each array is only
    differentiated twice with respect to itself, or to those of the same block. The
    other arguments mean what they mean there.

    **Arguments:**

    - `fun`, `has_aux`, `where`, `filter_spec`, `holomorphic`: what is differentiated.
    - `in_axes`, `microbatch_size`, `accumulator`: over which examples.
    - `block_size`, `num_blocks`, `checkpoint`, `method`, `mode`: how it is computed.
    - `is_block`: takes a part of the first argument, and says whether that is one
        block: `lambda x: isinstance(x, equinox.nn.Linear)` for layers. The default is
        a block for each array.

    **Returns:**

    A function that returns a PyTree in the structure of the first argument. For an
    array of shape `s`, it has one of shape `(*s, *s)`; for a part that `is_block` says
    is one, what [`eqxbatch.filter_hessian`][] returns for that part. With `flat`, it
    has a pair of a matrix and of `unravel` for each block, and `None` for a block of
    which nothing is differentiated; with `has_aux`, the function returns a pair of that
    and `aux`.

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
