"""Empirical kernels of a model: NTK, NNGP, and both."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Inexact, PyTree, Shaped

from .._base.checks import AnyArray
from .._base.trees import import_extra
from .._kernels.batch_kernel import AbstractStored
from .._kernels.calls import Keys, make_calls
from .estimator import AbstractEstimator, checked_constructor, KernelTask
from .matvec import ProductTask, StructTask
from .request import AbstractJacobianKernel, Get, named, names_of


_Inputs = PyTree[Shaped[AnyArray, "..."]]


_Result = PyTree[Inexact[Array, "..."]]


_Vector = PyTree[Inexact[AnyArray, "..."]]


@checked_constructor
class EmpiricalNTK(AbstractEstimator, AbstractJacobianKernel, AbstractStored):
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
    - `trace_axes`: axes of the whole output (including the batch axis) over which to
        average the diagonal. The default is the last axis, if the model returns more
        than a scalar for each example. Count the batch axis from the front.
    - `diagonal_axes`: axes along which only the diagonal is computed. The batch axis is
        allowed.
    - `vmap_axes`: the batch axis of inputs, outputs and paired keyword arguments: an
        int for all, or a triple of PyTree prefixes of ints,
        `(inputs, outputs, {name: axis})`. Use None for a model that takes a whole batch
        at once, as it must if examples interact. Its kernel has no blocks.
    - `implementation`: `"sites"` uses structured derivatives (layer inputs and output
        cotangents), with the cheaper of two contractions for each parameter.
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
    - `store`, `mesh`, `mesh_axis`, `reduce`, `progress`: where the kernel is computed
        and stored, and how it is reduced, as for [`eqxbatch.filter_batch_kernel`][].
        Derivatives of examples are still shared by all blocks.

    **Returns:**

    For `n1` and `n2` examples and an output of shape `(n, a, b)`, a call returns an
    array of shape `(n1, n2, a, a, b, b)` with the dtype of the output. Axes in
    `trace_axes` are removed, and axes in `diagonal_axes` appear only once.

    **Raises:**

    `ValueError` for axes that are out of range or repeated, a model without parameters,
    an unknown `implementation`, and inputs that do not match each other. `TypeError`
    for settings of the wrong type. Errors of the model are passed on.

    **Inputs and keys:** without `x2` (or if it is `x1` itself), the kernel is exactly
    symmetric and only about half of the blocks are computed. A `key` is split
    into one for `x1` and one for `x2`, and each of these into one key for each example.
    Or pass a pair of keys for `x1` and `x2`. Keyword arguments with one value for each
    example are passed as pairs of arrays, for `x1` and for `x2`; all others are shared.

    **Memory:** what blocks need of each example (its factors) is computed once if it
    fits into half of the free device memory, or of the budget. Otherwise, factors are
    kept for one panel of rows at a time and recomputed for the columns of each panel.

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

    ??? cite

        The kernel is due to [Jacot, Gabriel and Hongler,
        2018](https://arxiv.org/abs/1806.07572); structured derivatives are due to
        [Novak, Sohl-Dickstein and Schoenholz, 2022](https://arxiv.org/abs/2206.08720).
    """

    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        return KernelTask(("ntk",)), "ntk", kwargs

    def __call__(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """The kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))

    def diagonal(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> _Result:
        """The kernel of each example of `x1` with the same example of `x2`.

        This is the result of a call with the batch axis among the `diagonal_axes`.
        """
        task = KernelTask(("ntk",))
        return self._request(task, x1, x2, key, kwargs, is_diagonal=True)[0]

    def matvec(
        self,
        x1: _Inputs,
        x2: _Inputs | None,
        v: _Vector,
        *,
        key: Keys = None,
        **kwargs: Any,
    ) -> _Result:
        """The product of the kernel with a vector, without materialising the kernel.

        `v` has the structure and shape of the model's output for `x2` (for `x1`, if
        `x2` is None), and the result those of the output for `x1`. The product is with
        the full kernel: no axis is traced, and entries between different outputs are
        included. Raises `ValueError` if `v` does not match the output, and `TypeError`
        if JAX has neither forward mode for the model nor the transpose of reverse mode.
        """
        return self._request(ProductTask(v), x1, x2, key, kwargs)

    def operator(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """`matvec` as a `lineax.AbstractLinearOperator`.

        If both sides are the same, as they are without `x2` and without pairs, it is
        tagged as positive semidefinite. Raises `ImportError` without lineax.
        """
        lineax = import_extra("lineax", "operator", "linalg")
        product = lambda v: self.matvec(x1, x2, v, key=key, **kwargs)
        call = x1, x2, key, kwargs
        structs = eqx.filter_eval_shape(lambda: self._request(StructTask(), *call))
        is_same = len(make_calls(*call)[0]) == 1
        tags = lineax.positive_semidefinite_tag if is_same else ()
        return lineax.FunctionLinearOperator(product, structs, tags)


@checked_constructor
class EmpiricalNNGP(AbstractEstimator, AbstractStored):
    """The empirical NNGP kernel of a model: second moments of its outputs.

    For examples `x` of `x1` and `y` of `x2`, and entries `o` and `p` of the model's
    output, the kernel is `model(x)[o] * conj(model(y)[p])`. Its average over random
    models is their covariance as random functions.

    It is called like an [`eqxbatch.EmpiricalNTK`][] and returns kernels of the same
    shapes.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`, `block_size`, `store`,
        `mesh`, `mesh_axis`, `reduce`, `progress`: as for [`eqxbatch.EmpiricalNTK`][].

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

    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        return KernelTask(("nngp",)), "nngp", kwargs

    def __call__(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """The kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))

    def diagonal(
        self, x1: _Inputs, x2: _Inputs | None = None, *, key: Keys = None, **kwargs: Any
    ) -> _Result:
        """The kernel of each example of `x1` with the same example of `x2`."""
        task = KernelTask(("nngp",))
        return self._request(task, x1, x2, key, kwargs, is_diagonal=True)[0]


@checked_constructor
class EmpiricalKernel(AbstractEstimator, AbstractJacobianKernel, AbstractStored):
    """NTK and NNGP of a model, from one pass over the examples.

    It is called like an [`eqxbatch.EmpiricalNTK`][], with an additional argument `get`
    that selects the kernels: `"ntk"` or `"nngp"` for one kernel, a tuple of both names
    for a named tuple in that order, or None for `("nngp", "ntk")`. Case does not
    matter. Raises `ValueError` for other values.

    **Arguments:**

    - `model`, `trace_axes`, `diagonal_axes`, `vmap_axes`, `implementation`,
        `block_size`, `where`, `filter_spec`, `store`, `mesh`, `mesh_axis`, `reduce`,
        `progress`: as for [`eqxbatch.EmpiricalNTK`][].

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

    def _asked(
        self, get: Get = None, **kwargs: Any
    ) -> tuple[KernelTask, Any, dict[str, Any]]:
        get = tuple(get) if isinstance(get, list) else get
        return KernelTask(names_of(get)), get, kwargs

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
        """The kernels of each example of `x1` with the same example of `x2`."""
        names = names_of(get)
        task = KernelTask(names)
        results = self._request(task, x1, x2, key, kwargs, is_diagonal=True)
        return named(get, names, results)
