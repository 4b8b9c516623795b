"""Empirical kernels of a model: NTK, NNGP, both, and estimates of the NTK."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, Key, PyTree, Shaped, UInt32

from .._base.checks import check_at_least
from .._base.trees import import_extra
from .._base.types import AnyArray
from .._batch.accumulators import Concat
from .._batch.memory import MemoryBudget
from .._batch.stream import over_batches
from .._batch.zarr_store import Store
from .._kernels.batch_kernel import AbstractStored
from .._kernels.grid import sizes_of
from .._kernels.sides import each_key, Examples, Keys
from .._maps.microbatch import filter_microbatch
from .estimator import (
    AbstractEstimator,
    checked_constructor,
    computed_kernels,
    in_one_program,
)
from .example_factors import features
from .settings import (
    AbstractMetricKernel,
    AbstractParameterKernel,
    check_get,
    Get,
)
from .traced_model import (
    kernel_product,
    zero_outputs,
)


_Inputs = PyTree[Shaped[AnyArray, "..."]]


_Result = PyTree[Inexact[Array, "..."]]


_Vector = PyTree[Inexact[AnyArray, "..."]]


@checked_constructor
class EmpiricalNTK(AbstractEstimator, AbstractMetricKernel, AbstractStored):
    """The empirical neural tangent kernel (NTK) of a model: products of its Jacobians.

    For examples `x` of `x1` and `y` of `x2`, and entries `o` and `p` of the model's
    output, the kernel is the sum over all parameters `w` of

    ```
    d model(x)[o] / dw * conj(d model(y)[p] / dw)
    ```

    The kernel is a function `ntk(x1, x2=None, *, key=None, **kwargs)`. It is also a
    PyTree whose arrays are those of the model: it can be differentiated, mapped over an
    ensemble of models, and saved.

    **Arguments:**

    - `model`: a callable PyTree, called as `model(x, **kwargs)` for one example; or a
        pair of a model and its `equinox.nn.State`, called as
        `model(x, state, **kwargs)`, whose first result is used. If the model returns a
        PyTree of arrays, the result is a PyTree of kernels, one for each array; kernels
        between different arrays are not computed.
    - `trace_axes`: axes of the whole output (including the batch axis) to average over:
        each output is paired with itself, and the mean is taken, not the sum. The
        default is the last axis, if the model returns more than a scalar for each
        example. Count the batch axis from the front.
    - `diagonal_axes`: axes along which only the diagonal is computed. The batch axis is
        allowed.
    - `in_axes`: the axes of the examples, which are the same in `x1` and `x2`: an int,
        or a PyTree prefix of either with ints as leaves. Use None for a model that
        takes a whole batch at once, as it must if examples interact. Its kernel has no
        blocks.
    - `out_axes`: the axes of the examples in the whole output: an int, or a PyTree
        prefix of the output.
    - `kwargs_axes`: a dict from names of paired keyword arguments to their axes of the
        examples, for those that are not batched along axis 0.
    - `method`: `"sites"` uses structured derivatives (layer inputs, and the gradients
        of their outputs), with the cheaper of two contractions for each parameter.
        `"jacobian_contraction"` materialises the Jacobian. `"ntk_vector_products"`
        pushes the Jacobian of one input through the linearised model at the other.
        `"auto"` counts operations and chooses the method that should be fastest. The
        numbers `3`, `1`, `2` and `0` stand for these names, in this order.
    - `block_size`: the number of rows and columns of the kernel that are computed at a
        time: an int, a pair of ints, an [`eqxbatch.MemoryBudget`][], or None to compute
        all at once.
    - `where`: a function from the model to the part (or parts) of it that contains the
        parameters, as for `eqx.tree_at`. The default is the whole model.
    - `filter_spec`: which leaves are parameters, as for `eqx.filter`.
    - `metric`: a positive semidefinite matrix `M` over the parameters, for the kernel
        `J(x1) M J(x2)^T` in place of `J(x1) J(x2)^T`: a PyTree of non-negative arrays
        like the parameters, which are the diagonal; an [`eqxbatch.KroneckerOperator`][]
        or its inverse; an [`eqxbatch.Projection`][], for an estimate of the plain
        kernel, or of that in a metric; or a matrix of shape `(p, p)` over all `p`
        parameters, in the order of `jax.flatten_util.ravel_pytree`, or another lineax
        operator over them, with 8,192 rows at most. With the inverse of a curvature
        matrix, this is the influence of training examples, or the covariance of the
        predictions of a Laplace approximation. If `model` adds a loss to another model,
        the metric may be that of the latter, if it has all parameters. Parameters must
        be real.
    - `store`, `mesh`, `mesh_axis`, `reduce`, `progress`: where the kernel is computed
        and stored, and how it is reduced, as for [`eqxbatch.filter_batch_kernel`][].
        Derivatives of examples are still shared by all blocks.

    **Returns:**

    For `n1` and `n2` examples and an output of shape `(n, a, b)`, a call returns an
    array of shape `(n1, n2, a, a, b, b)` with the dtype of the output. Axes in
    `trace_axes` are removed, and axes in `diagonal_axes` appear only once.

    **Raises:**

    `ValueError` for axes that are out of range or repeated, a model without parameters,
    an unknown `method`, and inputs that do not match each other; for a `metric` of
    other parameters, with negative entries or NaN, that is singular or not symmetric if
    it is a dense matrix, or too large for one, and for `"ntk_vector_products"` with a
    `metric`. `TypeError` for settings of the wrong type. Errors of the model are passed
    on. If the values of a `metric` are traced, wrong ones give NaN.

    **Inputs and keys:** examples can be on disk, as for
    [`eqxbatch.filter_batch_kernel`][]. Without `x2` (or if it is `x1` itself), the
    kernel is exactly symmetric and only about half of the blocks are computed. A `key`
    is split into one for `x1` and one for `x2`, and each of these into one key for each
    example. Or pass a pair of keys for `x1` and `x2`. Keyword arguments with one value
    for each example are passed as pairs of arrays, for `x1` and for `x2`; all others
    are shared.

    **Memory:** what blocks need of each example is computed once if it fits into half
    of the free device memory, or of the budget. If memory is short, examples pass
    through the model several times.

    **Complex numbers:** complex parameters of complex outputs are assumed to have a
    complex derivative. If they do not, the kernel is the sum of the kernels of both
    Wirtinger derivatives.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 10, 32, 2, key=jax.random.key(0))
        >>> ntk = eqxbatch.EmpiricalNTK(model)
        >>> x = jnp.ones((5, 2))
        >>> ntk(x).shape
        (5, 5)
        >>> eqxbatch.EmpiricalNTK(model, trace_axes=())(x, x[:3]).shape
        (5, 3, 10, 10)

        ```

        The kernel of the last layer only, in blocks:

        ```python
        >>> last = eqxbatch.EmpiricalNTK(
        ...     model, where=lambda model: model.layers[-1], block_size=2
        ... )
        >>> last(x).shape
        (5, 5)

        ```

        The variances of the predictions of a Laplace approximation, averaged over the
        outputs:

        ```python
        >>> factors = eqxbatch.filter_kfac(
        ...     lambda model, x: model(x), lambda out, x: jnp.sum(out**2) / 2
        ... )(model, x)
        >>> covariance = factors.operator(damping=0.1, factored=True).inverse()
        >>> eqxbatch.EmpiricalNTK(model, metric=covariance).diagonal(x).shape
        (5,)

        ```

    ??? cite

        The kernel is due to [Jacot, Gabriel and Hongler,
        2018](https://arxiv.org/abs/1806.07572); structured derivatives are due to
        [Novak, Sohl-Dickstein and Schoenholz, 2022](https://arxiv.org/abs/2206.08720).
    """

    _get: ClassVar[Any] = "ntk"

    def untraced_matvec(
        self,
        x1: _Inputs,
        x2: _Inputs | None,
        v: _Vector,
        *,
        key: Keys = None,
        **kwargs: Any,
    ) -> _Result:
        """The product of the untraced kernel with a vector, without materialising it.

        `v` has the structure and shape of the model's output for `x2` (for `x1`, if
        `x2` is None), and the result those of the output for `x1`. No axis is traced,
        whatever `trace_axes` and `diagonal_axes` are, and entries between different
        outputs are included. Raises `ValueError` if `v` does not match the output, and
        `TypeError` if JAX has neither forward mode for the model nor the transpose of
        reverse mode.
        """
        task = eqx.Partial(kernel_product, v)
        return in_one_program(self, "ntk", Examples(x1, x2, key, kwargs), task)

    def features(
        self, x: PyTree, *, key: Keys = None, store: Store | None = None, **kwargs: Any
    ) -> Any:
        """The gradients of the outputs of each example, in coordinates of the `metric`.

        The product of those of two examples, along the last axis, is the untraced
        kernel: of shape `(n, dim)` for a scalar model and a [`eqxbatch.Projection`][],
        and `(n, *output, dim)` for others. Later kernels are one product, such as
        `features(x1) @ features(x2).T`.

        With a `store`, they are written as [`eqxbatch.over_batches`][] does it: to a
        path on disk, from where a run that was stopped is resumed, or to `"host"`.
        `block_size` examples are read, computed and stored at a time, along axis 0 of
        arrays, or of what is indexed like them, such as `numpy.memmap`.

        Raises `ValueError` without a `metric`, for complex outputs, with
        `in_axes=None`, and for a `store` without a number of rows as `block_size`.
        """
        if self.metric is None:
            raise ValueError(
                "`features` needs a `metric`, as there are as many of them as "
                "parameters without one. Pass `metric=eqxbatch.Projection(dim, key)`."
            )
        self.check_is_batched()
        examples = Examples(x, None, key, kwargs)
        if store is not None:
            return _stored_features(self, store, examples)
        return in_one_program(self, "ntk", examples, features)

    def untraced_operator(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """`untraced_matvec` as a `lineax.AbstractLinearOperator`.

        For the kernel that a call returns, use [`eqxbatch.KernelOperator`][]. If both
        sides are the same, as they are without `x2` and without pairs, it is tagged as
        positive semidefinite. Raises `ImportError` without lineax.
        """
        lineax = import_extra("lineax", "untraced_operator", "linalg")
        product = lambda v: self.untraced_matvec(x1, x2, v, key=key, **kwargs)
        examples = Examples(x1, x2, key, kwargs)
        sides = examples.in_sides(self.in_axes, self.kwargs_axes).sides
        # Only the structure of a product is asked for: no output is computed.
        run = lambda: in_one_program(self, "ntk", examples, zero_outputs)
        structs = eqx.filter_eval_shape(run)
        # The kernel of one side with itself is `J J^T`.
        tags = lineax.positive_semidefinite_tag if len(sides) == 1 else ()
        return lineax.FunctionLinearOperator(product, structs, tags)


def _stored_features(ntk: EmpiricalNTK, store: Store, examples: Examples) -> Any:
    # A store reads rows as they are needed, and takes whole chunks of them.
    sizes, axes = sizes_of(ntk.block_size), (ntk.in_axes, ntk.kwargs_axes)
    size = None if isinstance(sizes, MemoryBudget) else sizes[0]
    of_leaves = jtu.tree_leaves(axes, is_leaf=lambda axis: axis is None)
    if size is None or any(axis != 0 for axis in of_leaves):
        raise ValueError(
            "`features` with a `store` needs a `block_size`, the number of rows that "
            "are read and stored together, and examples along axis 0; got "
            f"`block_size={ntk.block_size}`, and the axes {axes}."
        )
    # The arguments themselves, of which some may not be in memory.
    sides, shared = examples.split(*axes)
    side, x = sides[0], examples.x1
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in jtu.tree_leaves(x)]
    # What has no rows raises as it does without a store.
    total = shapes[0][0] if shapes and all(shapes) else side.rows.total
    # The key of each row is made here, so that it does not depend on the batches.
    batches = x, each_key(side.key, total), side.kwargs
    rows = filter_microbatch(
        _features_of_rows,
        in_axes=(None, None, 0, 0, 0),
        microbatch_size=size,
        accumulator=Concat(),
    )
    to_store = over_batches(rows, batch_size=size, store=store, progress=ntk.progress)
    return to_store(ntk, shared, batches)


def _features_of_rows(
    ntk: EmpiricalNTK, shared: dict[str, Any], x: PyTree, key: Any, kwargs: dict
) -> Any:
    # Keyword arguments of examples are pairs, of which features have one side.
    pairs: dict[str, Any] = {name: (rows, None) for name, rows in kwargs.items()}
    return ntk.features(x, key=key, **shared, **pairs)


@checked_constructor
class EmpiricalNNGP(AbstractEstimator, AbstractStored):
    """The empirical NNGP kernel of a model: second moments of its outputs.

    For examples `x` of `x1` and `y` of `x2`, and entries `o` and `p` of the model's
    output, the kernel is `model(x)[o] * conj(model(y)[p])`. Its average over random
    models is their covariance as random functions.

    It is called like an [`eqxbatch.EmpiricalNTK`][] and returns kernels of the same
    shapes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `in_axes`, `out_axes`, `kwargs_axes`,
        `block_size`, `store`, `mesh`, `mesh_axis`, `reduce`, `progress`: as for
        [`eqxbatch.EmpiricalNTK`][].

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 10, 32, 2, key=jax.random.key(0))
        >>> eqxbatch.EmpiricalNNGP(model)(jnp.ones((5, 2))).shape
        (5, 5)

        ```

    ??? cite

        [Lee et al., 2018](https://arxiv.org/abs/1711.00165).
    """

    _get: ClassVar[Any] = "nngp"


@checked_constructor
class EmpiricalKernel(AbstractEstimator, AbstractMetricKernel, AbstractStored):
    """NTK and NNGP of a model, from one pass over the examples.

    It is called like an [`eqxbatch.EmpiricalNTK`][], with an additional argument `get`
    that selects the kernels: `"ntk"` or `"nngp"` for one kernel, a tuple of both names
    for a named tuple in that order, or None for `("nngp", "ntk")`. Case does not
    matter. Raises `ValueError` for other values.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `in_axes`, `out_axes`, `kwargs_axes`,
        `method`, `block_size`, `where`, `filter_spec`, `metric` (of the NTK), `store`,
        `mesh`, `mesh_axis`, `reduce`, `progress`: as for [`eqxbatch.EmpiricalNTK`][].

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 10, 32, 2, key=jax.random.key(0))
        >>> kernel = eqxbatch.EmpiricalKernel(model, block_size=2)
        >>> both = kernel(jnp.ones((5, 2)))
        >>> both.ntk.shape, both.nngp.shape
        ((5, 5), (5, 5))
        >>> kernel(jnp.ones((5, 2)), get="ntk").shape
        (5, 5)

        ```
    """

    _get: ClassVar[Any] = None

    def __call__(
        self,
        x1: PyTree,
        x2: PyTree = None,
        get: Get = None,
        *,
        key: Keys = None,
        **kwargs: Any,
    ) -> Any:
        """The kernels of all examples of `x1` with all of `x2`."""
        examples = Examples(x1, x2, key, kwargs)
        return computed_kernels(self, check_get(get), examples)


@checked_constructor
class PseudoNTK(AbstractEstimator, AbstractParameterKernel):
    """The NTK of the sum of a model's outputs: one backward pass per example.

    For `k` outputs along the `trace_axes`, this is the kernel of their sum divided by
    `sqrt(k)`. For wide models at initialisation, it is close to the result of
    [`eqxbatch.EmpiricalNTK`][]. It is biased, because it includes products between
    different outputs.

    It is called like an [`eqxbatch.EmpiricalNTK`][], and its results have the same
    shapes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `in_axes`, `out_axes`, `kwargs_axes`,
        `block_size`, `where`, `filter_spec`: as for [`eqxbatch.EmpiricalNTK`][].

    Raises the errors of [`eqxbatch.EmpiricalNTK`][], and `ValueError` when called if
    `trace_axes=()`.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 10, 32, 2, key=jax.random.key(0))
        >>> eqxbatch.PseudoNTK(model)(jnp.ones((5, 2))).shape
        (5, 5)

        ```

    ??? cite

        The pseudo-NTK of
        [Mohamadi, Bae and Sutherland, 2023](https://arxiv.org/abs/2206.12543).
    """

    _get: ClassVar[Any] = "ntk"
    # Without a key for signs, it is a direction of ones: the sum of the outputs.
    num_probes: ClassVar[int] = 1


class KernelEstimate(NamedTuple):
    """What [`eqxbatch.ProbedNTK`][] returns.

    - `kernel`: the mean over the probes.
    - `standard_error`: the standard error of each entry; NaN for a single probe.
    """

    kernel: PyTree[Inexact[Array, "..."]]
    standard_error: PyTree[Inexact[Array, "..."]]


@checked_constructor
class ProbedNTK(AbstractEstimator, AbstractParameterKernel):
    """An unbiased estimate of a traced NTK, from random directions of the outputs.

    Instead of every output entry along the `trace_axes`, `num_probes` sums of these
    entries with random signs are pulled back, with the same signs for all examples. The
    mean of the kernels of the sums is an unbiased estimate of the kernel of
    [`eqxbatch.EmpiricalNTK`][]. It is positive semidefinite and comes with a standard
    error. It saves time if there are more outputs than probes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `in_axes`, `out_axes`, `kwargs_axes`,
        `block_size`, `where`, `filter_spec`: as for [`eqxbatch.EmpiricalNTK`][]. Calls
        take the same arguments, too.
    - `num_probes`: the number of random directions, at least 1.
    - `key`: the random key for the directions.

    **Returns:**

    A call returns an [`eqxbatch.results.KernelEstimate`][].

    **Raises:**

    The errors of [`eqxbatch.EmpiricalNTK`][], and `ValueError` if `num_probes` is below
    1 and, when called, if `trace_axes` is empty or names the axis of the examples.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 1_000, 32, 2, key=jax.random.key(0))
        >>> ntk = eqxbatch.ProbedNTK(model, num_probes=16, key=jax.random.key(1))
        >>> estimate = ntk(jnp.ones((5, 2)))
        >>> estimate.kernel.shape, estimate.standard_error.shape
        ((5, 5), (5, 5))

        ```

    ??? cite

        The estimator of the trace is that of [Hutchinson,
        1989](https://doi.org/10.1080/03610918908812806).
    """

    _get: ClassVar[Any] = KernelEstimate  # Of the kinds "ntk" and "error".
    _: dataclasses.KW_ONLY
    num_probes: int = eqx.field(static=True)
    key: Key[Array, ""] | UInt32[Array, "2"]

    def __check_init__(self) -> None:
        check_at_least("num_probes", self.num_probes, 1)

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Keys = None, **kwargs: Any
    ) -> KernelEstimate:
        """The estimated kernel of all examples of `x1` with all of `x2`."""
        return computed_kernels(self, self._get, Examples(x1, x2, key, kwargs))
