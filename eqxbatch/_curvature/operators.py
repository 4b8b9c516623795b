"""Hessians and Gauss-Newton matrices as lineax linear operators."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import lineax
from jaxtyping import Array, Inexact, PyTree

from .._base.checks import checked
from .._base.linear_operator import AbstractTaggedOperator, as_tags
from .curvature_matrices import (
    filter_ggn,
    filter_ggn_diagonal,
    filter_hessian,
    filter_hessian_diagonal,
)
from .hvp import AbstractHVP, AbstractProduct, filter_ggnvp, filter_hvp, GGNVP


class AbstractSymmetricOperator(AbstractTaggedOperator):
    """A symmetric matrix over PyTrees of parameters."""

    @abc.abstractmethod
    def as_pytree(self) -> PyTree:
        """The matrix as a PyTree of PyTrees."""


class _AbstractCurvatureOperator(AbstractSymmetricOperator):
    """The matrix of a function, at the parameters in its first argument."""

    args: eqx.AbstractVar[tuple]
    kwargs: eqx.AbstractVar[dict[str, Any]]
    _product: eqx.AbstractVar[Any]
    _parameters: eqx.AbstractVar[PyTree]

    @property
    @abc.abstractmethod
    def _transforms(self) -> tuple[Callable, Callable]:
        """The transforms for the matrix and for its diagonal."""

    def _evaluated(self, transform: Callable, **settings: Any) -> Any:
        """The result of a transform with the settings of the product."""
        fields = dataclasses.fields(self._product)
        settings |= {field.name: getattr(self._product, field.name) for field in fields}
        return transform(**settings)(*self.args, **self.kwargs)

    def mv(self, vector: PyTree) -> PyTree:
        first, *rest = self.args
        return self._product(first, vector, *rest, **self.kwargs)

    def as_pytree(self) -> PyTree:
        return self._evaluated(self._transforms[0])

    def as_matrix(self) -> Inexact[Array, "n n"]:
        return self._evaluated(self._transforms[0], flat=True)[0]

    def diagonal(self) -> Inexact[Array, " n"]:
        return self._evaluated(self._transforms[1], flat=True)[0]

    def transpose(self) -> "_AbstractCurvatureOperator":
        return self

    def in_structure(self) -> PyTree:
        return self._parameters

    def out_structure(self) -> PyTree:
        return self._parameters


_Operator = AbstractSymmetricOperator


def _split(
    transform: Any, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a transform, and the arguments of its function."""
    names = {field.name for field in dataclasses.fields(transform) if field.kw_only}
    settings = {name: x for name, x in kwargs.items() if name in names}
    return settings, {name: x for name, x in kwargs.items() if name not in names}


def _parameters(product: AbstractProduct, args: tuple, kwargs: dict) -> PyTree:
    """The shapes and dtypes of the differentiated leaves."""
    diff, _ = product.real_parameters(args, kwargs)
    return jax.eval_shape(lambda: diff)


class HessianOperator(_AbstractCurvatureOperator):
    """The Hessian of a function of a PyTree, as a `lineax.AbstractLinearOperator`.

    `mv(vector)` uses [`eqxbatch.filter_hvp`][]: it works in microbatches and never
    materialises the Hessian. `as_matrix()` and `as_pytree()` use
    [`eqxbatch.filter_hessian`][], and `lineax.diagonal` uses
    [`eqxbatch.filter_hessian_diagonal`][]. Pass the operator to lineax solvers. Pass
    its `mv` to libraries that need only matrix-vector products, such as matfree for
    eigenvalues, traces and spectral densities.

    **Arguments:**

    - `fun`, `*args`, `**kwargs`: the function and its arguments. The first argument
        contains the parameters.
    - `in_axes`, `microbatch_size`, `accumulator`, `where`, `filter_spec`, `checkpoint`,
        `mode`: as for [`eqxbatch.filter_hessian`][].
    - `tags`: further lineax tags, such as `lineax.positive_semidefinite_tag`. The
        operator is always tagged as symmetric.

    Raises the errors of these transforms, and `ImportError` if lineax is not installed.

    !!! example

        A step of Newton's method:

        ```python
        >>> import eqxbatch, jax, jax.numpy as jnp, lineax
        >>> loss = lambda w, x, y: (jnp.dot(w, x) - y) ** 2
        >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> y = jnp.array([1.0, 2.0, 3.0])
        >>> w = jnp.zeros(2)
        >>> hessian = eqxbatch.HessianOperator(
        ...     loss, w, x, y, in_axes=0, tags=lineax.positive_semidefinite_tag
        ... )
        >>> grad = eqxbatch.filter_micro_grad(loss)(w, x, y)
        >>> step = lineax.linear_solve(hessian, grad, lineax.CG(1e-6, 1e-6)).value
        >>> print((w - step).round(3))
        [1. 2.]

        ```
    """

    args: tuple
    kwargs: dict[str, Any]
    tags: frozenset = eqx.field(static=True)
    _product: Any
    _parameters: PyTree = eqx.field(static=True)

    @checked
    def __init__(self, fun: Callable, /, *args: Any, tags: Any = (), **kwargs: Any):
        settings, self.kwargs = _split(AbstractHVP, kwargs)
        self._product, self.args = filter_hvp(fun, **settings), args
        self._parameters = _parameters(self._product, args, self.kwargs)
        self.tags = as_tags(tags)

    @property
    def _transforms(self) -> tuple[Callable, Callable]:
        return filter_hessian, filter_hessian_diagonal


class GGNOperator(_AbstractCurvatureOperator):
    """A generalised Gauss-Newton matrix, as a `lineax.AbstractLinearOperator`.

    Like [`eqxbatch.HessianOperator`][], for the matrix of [`eqxbatch.filter_ggn`][].

    **Arguments:**

    - `fun`, `loss`: as for [`eqxbatch.filter_ggn`][].
    - `is_convex`: whether `loss` is known to be convex in the output of `fun`, as a
        squared error and the cross entropy of logits are, and no weight of the
        `accumulator` is negative. This cannot be checked. If so, the operator is tagged
        as positive semidefinite, which `lineax.CG` requires.
    - `*args`, `**kwargs`, `in_axes`, `microbatch_size`, `accumulator`, `where`,
        `filter_spec`, `checkpoint`, `tags`: as for [`eqxbatch.HessianOperator`][].

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, lineax
        >>> model = lambda w, x, y: jnp.tanh(jnp.dot(w, x))
        >>> loss = lambda out, x, y: (out - y) ** 2
        >>> x, y, w = jnp.eye(3), jnp.ones(3), jnp.zeros(3)
        >>> ggn = eqxbatch.GGNOperator(model, loss, w, x, y, in_axes=0, is_convex=True)
        >>> print(ggn.mv(jnp.array([3.0, 0.0, 0.0])))
        [2. 0. 0.]
        >>> lineax.is_positive_semidefinite(ggn)
        True

        ```
    """

    args: tuple
    kwargs: dict[str, Any]
    tags: frozenset = eqx.field(static=True)
    _product: Any
    _parameters: PyTree = eqx.field(static=True)

    @checked
    def __init__(
        self,
        fun: Callable,
        loss: Callable,
        /,
        *args: Any,
        is_convex: bool = False,
        tags: Any = (),
        **kwargs: Any,
    ):
        settings, self.kwargs = _split(GGNVP, kwargs)
        self._product, self.args = filter_ggnvp(fun, loss, **settings), args
        self._parameters = _parameters(self._product, args, self.kwargs)
        convex = {lineax.positive_semidefinite_tag} if is_convex else set()
        self.tags = as_tags(tags) | convex

    @property
    def _transforms(self) -> tuple[Callable, Callable]:
        return filter_ggn, filter_ggn_diagonal


@lineax.materialise.register(_Operator)
def _materialise(operator: _Operator) -> lineax.AbstractLinearOperator:
    tags = operator.tags | {lineax.symmetric_tag}
    if lineax.is_positive_semidefinite(operator):
        tags |= {lineax.positive_semidefinite_tag}
    structure = operator.out_structure()
    return lineax.PyTreeLinearOperator(operator.as_pytree(), structure, tags)


@lineax.conj.register(_Operator)
def _conj(operator: _Operator) -> _Operator:
    return operator


@lineax.is_symmetric.register(_Operator)
def _is_symmetric(operator: _Operator) -> bool:
    del operator
    return True
