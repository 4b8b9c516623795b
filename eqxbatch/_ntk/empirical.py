"""Empirical kernels of a model: NTK, NNGP, and both."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, overload, TYPE_CHECKING, TypeVar, Unpack

import equinox as eqx
from jax.sharding import Mesh
from jaxtyping import Array, Inexact, PyTree, Shaped

from .._base.shapes import AnyArray
from .._base.trees import import_extra
from .._batch.objective import Selection
from .._pairs.batch import BatchKernel
from .._pairs.calls import BlockSize, Keys, VmapSpec
from .._pairs.progress import AbstractProgressMeter
from .._pairs.stores import AbstractStore
from .matvec import ProductTask, StructTask
from .random_model import as_callable, selected
from .request import Kernels, KernelTask, make_kernels
from .task_kernel import AbstractEstimator, checked_settings, make_blocks
from .traced_model import Get, named, names_of


if TYPE_CHECKING:
    from . import estimator_signatures as signatures


_Out = TypeVar("_Out")


_Inputs = PyTree[Shaped[AnyArray, "..."]]


_Result = PyTree[Inexact[Array, "..."]]


_Vector = PyTree[Inexact[AnyArray, "..."]]


def _made(
    model: Callable,
    selection: Selection | None,
    *,
    vmap_axes: Any,
    block_size: BlockSize,
    store: AbstractStore | Literal["device"],
    mesh: Mesh | None,
    mesh_axis: str | None,
    reduce: PyTree,
    progress: AbstractProgressMeter | None,
    **settings: Any,
) -> tuple[Kernels, BatchKernel | None]:
    """How kernels are computed, and where they go to."""
    kernels = make_kernels(
        model, selection, vmap_axes=vmap_axes, block_size=block_size, **settings
    )
    blocks = make_blocks(
        block_size,
        vmap_axes,
        store=store,
        mesh=mesh,
        mesh_axis=mesh_axis,
        reduce=reduce,
        progress=progress,
    )
    return kernels, blocks


class EmpiricalNTK(AbstractEstimator, Generic[_Out]):
    """The neural tangent kernel of a model as it is: products of its Jacobians.

    For an example `x` of one side and `y` of the other, and entries `o` and `p` of what
    the model returns, that is the sum over all parameters `w` of

    ```
    d model(x)[o] / dw * conj(d model(y)[p] / dw)
    ```

    It is a function, `ntk(x1, x2=None, *, key=None, **kwargs)`, and a PyTree whose
    arrays are those of the model: it can be differentiated, mapped over an ensemble of
    models, and saved.

    **Arguments:**

    - `model`: a callable PyTree, called as `model(x, **kwargs)` for one example; or a
        pair of a model and its `equinox.nn.State`, called as
        `model(x, state, **kwargs)`, of whose results the first is taken. What it
        returns is a PyTree of arrays, and the kernel is one of kernels, without those
        between different arrays.
    - `trace_axes`: axes of the whole output, that of the examples included, over which
        to take the mean of the diagonal. By default, that is the last axis, if the
        model returns more than a scalar for an example. The axis of the examples must
        be counted from the front.
    - `diagonal_axes`: axes of which only the diagonal is computed. Can be that of the
        examples.
    - `vmap_axes`: which axis of inputs, outputs and keyword arguments that come in
        pairs has the examples: an int for all, or a triple of PyTree prefixes of
        ints, `(inputs, outputs, {name: axis})`. None if the model takes a whole batch
        at once, as it must where examples interact.
    - `implementation`: `"sites"` contracts structured derivatives, parameter by
        parameter in the cheaper of two ways; `"jacobian_contraction"` forms the
        Jacobian; `"ntk_vector_products"` pushes the Jacobian of one side through the
        linearised model at the other; `"auto"` takes what should be fastest, by
        counting operations. Or `3`, `1`, `2`, `0`.
    - `block_size`: how many rows and columns of the kernel are computed at a time: an
        int, a pair of ints, an [`eqxbatch.MemoryBudget`][], or None for all at once.
    - `where`: takes the model and returns the part of it, or parts, with the
        parameters, as for `eqx.tree_at`. By default, all of it.
    - `filter_spec`: which leaves are parameters, as for `eqx.filter`.
    - `store`, `mesh`, `mesh_axis`, `reduce`, `progress`: where calls bring the kernel
        to, and what they make of it, as for [`eqxbatch.filter_batch_kernel`][]. What is
        kept of examples serves all blocks there, too.

    **Returns:**

    From a call, for `n1` and `n2` examples and an output of shape `(n, a, b)`: an array
    of shape `(n1, n2, a, a, b, b)` in which axes in `trace_axes` are missing and those
    in `diagonal_axes` are there once; in the dtype of the output.

    **Raises:**

    `ValueError` for axes that are out of range or named twice, a model without
    parameters, sides that do not fit each other, and whatever the model raises.

    Without `x2` (or if it is `x1` itself), the kernel is exactly symmetric, and only
    about half of the blocks are computed. A `key` is split for the examples; the second
    side has its own, folded from it with 1. A pair of keys is taken as it is. Keyword
    arguments with one value for each example are given as pairs, for `x1` and for `x2`;
    all others are shared.

    What blocks need of their examples is computed once and kept, as long as there is
    room for it: half of the device's memory, or of the budget's. Where there is not,
    rows are kept in panels, and columns computed for each of them.

    Complex parameters of complex outputs are taken to have a complex derivative. If
    they have not, a kernel is the sum of those of both Wirtinger derivatives.

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

        Of the last layer alone, in blocks:

        ```python
        >>> last = eqxbatch.EmpiricalNTK(
        ...     model, where=lambda model: model.layers[-1], block_size=2
        ... )
        >>> last(x).shape
        (5, 5)

        ```

    ??? cite

        The kernel is that of
        [Jacot, Gabriel and Hongler, 2018](https://arxiv.org/abs/1806.07572), and
        structured derivatives are due to
        [Novak, Sohl-Dickstein and Schoenholz, 2022](https://arxiv.org/abs/2206.08720).
    """

    _kernels: Kernels
    _blocks: BatchKernel | None

    if TYPE_CHECKING:

        @overload
        def __init__(
            self,
            model: signatures.ModelOf[_Out],
            **settings: Unpack[signatures.NTKOnDevice],
        ): ...
        @overload
        def __init__(
            self: "EmpiricalNTK[Any]",
            model: signatures.ModelOf[Any],
            **settings: Unpack[signatures.NTKElsewhere],
        ): ...

    @checked_settings
    def __init__(
        self,
        model: Callable | tuple[Callable, eqx.nn.State],
        *,
        trace_axes: int | tuple[int, ...] | None = None,
        diagonal_axes: int | tuple[int, ...] = (),
        vmap_axes: VmapSpec = 0,
        implementation: str | int = "auto",
        block_size: BlockSize = None,
        where: Callable[[Any], Any] | None = None,
        filter_spec: PyTree = eqx.is_inexact_array,
        store: AbstractStore | Literal["device"] = "device",
        mesh: Mesh | None = None,
        mesh_axis: str | None = None,
        reduce: PyTree = None,
        progress: AbstractProgressMeter | None = None,
    ):
        self._kernels, self._blocks = _made(
            *selected(model, where, filter_spec),
            trace_axes=trace_axes,
            diagonal_axes=diagonal_axes,
            vmap_axes=vmap_axes,
            implementation=implementation,
            block_size=block_size,
            store=store,
            mesh=mesh,
            mesh_axis=mesh_axis,
            reduce=reduce,
            progress=progress,
        )

    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        return KernelTask(("ntk",)), "ntk", kwargs

    def __call__(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> _Out:
        """The kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))

    def diagonal(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> _Result:
        """The kernel of each example with the one in its place in `x2`, or itself.

        What a call returns, with the axis of the examples among the `diagonal_axes`.
        """
        task = KernelTask(("ntk",))
        return self._kernels(task, x1, x2, key, kwargs, is_diagonal=True)[0]

    def matvec(
        self,
        x1: _Inputs,
        x2: _Inputs | None,
        v: _Vector,
        *,
        key: Keys = None,
        **kwargs: Any,
    ) -> _Result:
        """The product of the kernel with a vector, without the kernel.

        `v` is like what the model returns for `x2` (for `x1`, if that is None), and the
        result like what it returns for `x1`. The kernel is the full one: no axis is
        traced, and what different outputs have in common counts.
        """
        return self._kernels(ProductTask(v), x1, x2, key, kwargs)

    def operator(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """`matvec` as a `lineax.AbstractLinearOperator`.

        Without `x2`, it is tagged as positive semidefinite. Raises `ImportError`
        without lineax.
        """
        lineax = import_extra("lineax", "operator", "linalg")
        product = lambda v: self.matvec(x1, x2, v, key=key, **kwargs)
        is_square = x2 is None
        columns = x1 if is_square else x2
        structs = eqx.filter_eval_shape(
            lambda: self._kernels(StructTask(), columns, None, key, kwargs)
        )
        tags = lineax.positive_semidefinite_tag if is_square else ()
        return lineax.FunctionLinearOperator(product, structs, tags)


class EmpiricalNNGP(AbstractEstimator, Generic[_Out]):
    """The second moments of what a model returns: its kernel as a Gaussian process.

    For an example `x` of one side and `y` of the other, and entries `o` and `p` of what
    the model returns, that is `model(x)[o] * conj(model(y)[p])`. Averaged over random
    models, it is the covariance that they have as functions.

    It is called as an [`eqxbatch.EmpiricalNTK`][] is, and returns kernels of the same
    shapes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`, `block_size`, `store`,
        `mesh`, `mesh_axis`, `reduce`, `progress`: as for that.

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

    _kernels: Kernels
    _blocks: BatchKernel | None

    if TYPE_CHECKING:

        @overload
        def __init__(
            self,
            model: signatures.ModelOf[_Out],
            **settings: Unpack[signatures.NNGPOnDevice],
        ): ...
        @overload
        def __init__(
            self: "EmpiricalNNGP[Any]",
            model: signatures.ModelOf[Any],
            **settings: Unpack[signatures.NNGPElsewhere],
        ): ...

    @checked_settings
    def __init__(
        self,
        model: Callable | tuple[Callable, eqx.nn.State],
        *,
        trace_axes: int | tuple[int, ...] | None = None,
        diagonal_axes: int | tuple[int, ...] = (),
        vmap_axes: VmapSpec = 0,
        block_size: BlockSize = None,
        store: AbstractStore | Literal["device"] = "device",
        mesh: Mesh | None = None,
        mesh_axis: str | None = None,
        reduce: PyTree = None,
        progress: AbstractProgressMeter | None = None,
    ):
        self._kernels, self._blocks = _made(
            as_callable(model),
            None,
            trace_axes=trace_axes,
            diagonal_axes=diagonal_axes,
            vmap_axes=vmap_axes,
            block_size=block_size,
            store=store,
            mesh=mesh,
            mesh_axis=mesh_axis,
            reduce=reduce,
            progress=progress,
        )

    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        return KernelTask(("nngp",)), "nngp", kwargs

    def __call__(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> _Out:
        """The kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))

    def diagonal(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> _Result:
        """The kernel of each example with the one in its place in `x2`, or itself."""
        task = KernelTask(("nngp",))
        return self._kernels(task, x1, x2, key, kwargs, is_diagonal=True)[0]


class EmpiricalKernel(AbstractEstimator, Generic[_Out]):
    """NTK and NNGP of a model, from one pass over the examples.

    It is called as an [`eqxbatch.EmpiricalNTK`][] is, but for `get`, which says what to
    return: `"ntk"` or `"nngp"` for one of them, a tuple of both names for a named tuple
    in that order, or None for `("nngp", "ntk")`. Case does not matter. Raises
    `ValueError` for other values.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`, `implementation`,
        `block_size`, `where`, `filter_spec`, `store`, `mesh`, `mesh_axis`, `reduce`,
        `progress`: as for that.

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

    _kernels: Kernels
    _blocks: BatchKernel | None

    if TYPE_CHECKING:

        @overload
        def __init__(
            self,
            model: signatures.ModelOf[_Out],
            **settings: Unpack[signatures.NTKOnDevice],
        ): ...
        @overload
        def __init__(
            self: "EmpiricalKernel[Any]",
            model: signatures.ModelOf[Any],
            **settings: Unpack[signatures.NTKElsewhere],
        ): ...

    @checked_settings
    def __init__(
        self,
        model: Callable | tuple[Callable, eqx.nn.State],
        *,
        trace_axes: int | tuple[int, ...] | None = None,
        diagonal_axes: int | tuple[int, ...] = (),
        vmap_axes: VmapSpec = 0,
        implementation: str | int = "auto",
        block_size: BlockSize = None,
        where: Callable[[Any], Any] | None = None,
        filter_spec: PyTree = eqx.is_inexact_array,
        store: AbstractStore | Literal["device"] = "device",
        mesh: Mesh | None = None,
        mesh_axis: str | None = None,
        reduce: PyTree = None,
        progress: AbstractProgressMeter | None = None,
    ):
        self._kernels, self._blocks = _made(
            *selected(model, where, filter_spec),
            trace_axes=trace_axes,
            diagonal_axes=diagonal_axes,
            vmap_axes=vmap_axes,
            implementation=implementation,
            block_size=block_size,
            store=store,
            mesh=mesh,
            mesh_axis=mesh_axis,
            reduce=reduce,
            progress=progress,
        )

    def _asked(
        self, get: Get = None, **kwargs: Any
    ) -> tuple[KernelTask, Any, dict[str, Any]]:
        get = tuple(get) if isinstance(get, list) else get
        return KernelTask(names_of(get)), get, kwargs

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x1: Any, x2: Any = None, get: None = None, **kwargs: Any
        ) -> signatures.BothKernels[_Out]: ...
        @overload
        def __call__(self, x1: Any, x2: Any, get: str, **kwargs: Any) -> _Out: ...
        @overload
        def __call__(
            self, x1: Any, x2: Any = None, *, get: str, **kwargs: Any
        ) -> _Out: ...
        @overload
        def __call__(
            self, x1: Any, x2: Any = None, get: Sequence[str] = ..., **kwargs: Any
        ) -> Any: ...

    def __call__(
        self,
        x1: _Inputs,
        x2: _Inputs | None = None,
        get: Get = None,
        *,
        key: Keys = None,
        **kwargs: Any,
    ) -> Any:
        """The kernels of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(get, **kwargs))

    def diagonal(
        self,
        x1: _Inputs,
        x2: _Inputs | None = None,
        get: Get = None,
        *,
        key: Keys = None,
        **kwargs: Any,
    ) -> Any:
        """The kernels of each example with the one in its place in `x2`, or itself."""
        names = names_of(get)
        task = KernelTask(names)
        results = self._kernels(task, x1, x2, key, kwargs, is_diagonal=True)
        return named(get, names, results)
