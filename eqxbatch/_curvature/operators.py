"""Hessians and Gauss-Newton matrices as lineax operators.

They multiply by products with the model, and have no entries.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import lineax
from jaxtyping import Array, Inexact, PyTree

from .._base.linear_operator import AbstractTaggedOperator, as_tags
from .._base.types import checked
from .._batch.arguments import Arguments
from .directional import AbstractHVP, filter_ggnvp, filter_hvp, GGNVP
from .matrices import (
    filter_ggn,
    filter_ggn_diagonal,
    filter_hessian,
    filter_hessian_diagonal,
)


class AbstractSymmetricOperator(AbstractTaggedOperator):
    """A symmetric matrix over PyTrees of parameters."""

    @abc.abstractmethod
    def as_pytree(self) -> PyTree:
        """The matrix as a PyTree of PyTrees."""

    def transpose(self) -> "AbstractSymmetricOperator":
        return self

    def out_structure(self) -> PyTree:
        return self.in_structure()


class _Transforms(NamedTuple):
    """The transforms for a matrix and for its diagonal."""

    matrix: Callable
    diagonal: Callable


class _AbstractCurvatureOperator(AbstractSymmetricOperator):
    """The matrix of a function, at the parameters in its first argument.

    - `args`, `kwargs`: those of the function.
    - `_product`: the transform for products with the matrix.
    """

    args: tuple
    kwargs: dict[str, Any]
    tags: frozenset = eqx.field(static=True)
    _product: Any
    _parameters: PyTree = eqx.field(static=True)

    def _bind(
        self,
        make: Callable,
        cls: type,
        funs: tuple[Callable, ...],
        args: Arguments,
        kwargs: dict[str, Any],
    ) -> None:
        """Sets all fields but the tags.

        `cls` is the class of the transform for products, which `make` returns. Of
        `kwargs`, some are its settings, and some are arguments of the function.
        """
        # Settings of transforms are keyword-only fields.
        names = {field.name for field in dataclasses.fields(cls) if field.kw_only}
        settings = {name: x for name, x in kwargs.items() if name in names}
        self._product, self.args = make(*funs, **settings), args
        self.kwargs = {name: x for name, x in kwargs.items() if name not in names}
        # lineax asks for the structure of vectors without a call.
        diff, _ = self._product.parameters(args, self.kwargs)
        self._parameters = jax.eval_shape(lambda: diff)

    @property
    @abc.abstractmethod
    def _transforms(self) -> _Transforms: ...

    def _evaluated(self, transform: Callable, **settings: Any) -> Any:
        """The result of a transform with the settings of the product."""
        # Functions and settings are fields of the same names in all transforms of a
        # family.
        fields = dataclasses.fields(self._product)
        settings |= {field.name: getattr(self._product, field.name) for field in fields}
        return transform(**settings)(*self.args, **self.kwargs)

    def mv(self, vector: PyTree) -> PyTree:
        first, *rest = self.args
        return self._product(first, vector, *rest, **self.kwargs)

    def as_pytree(self) -> PyTree:
        return self._evaluated(self._transforms.matrix)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        return self._evaluated(self._transforms.matrix, flat=True)[0]

    def diagonal(self) -> Inexact[Array, " n"]:
        return self._evaluated(self._transforms.diagonal, flat=True)[0]

    def in_structure(self) -> PyTree:
        return self._parameters


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

    @checked
    def __init__(self, fun: Callable, /, *args: Any, tags: object = (), **kwargs: Any):
        self._bind(filter_hvp, AbstractHVP, (fun,), args, kwargs)
        self.tags = as_tags(tags) | {lineax.symmetric_tag}

    @property
    def _transforms(self) -> _Transforms:
        return _Transforms(filter_hessian, filter_hessian_diagonal)


class GGNOperator(_AbstractCurvatureOperator):
    """A generalised Gauss-Newton matrix, as a `lineax.AbstractLinearOperator`.

    Like [`eqxbatch.HessianOperator`][], for the matrix of [`eqxbatch.filter_ggn`][].

    **Arguments:**

    - `fun`, `loss`: as for [`eqxbatch.filter_ggn`][].
    - `is_convex`: whether `loss` is known to be convex in the output of `fun`, as a
        squared error and the cross entropy of logits are, and no weight of the
        `accumulator` is negative. This cannot be checked. If so, the operator is tagged
        as positive semidefinite, which `lineax.CG` requires.
    - `in_axes`: as for [`eqxbatch.filter_ggn`][].
    - `*args`, `**kwargs`, `microbatch_size`, `accumulator`, `where`, `filter_spec`,
        `checkpoint`, `tags`: as for [`eqxbatch.HessianOperator`][].

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp, lineax
        >>> model = lambda w, x, y: jnp.tanh(jnp.dot(w, x))
        >>> loss = lambda out, x, y: (out - y) ** 2
        >>> x, y, w = jnp.eye(3), jnp.ones(3), jnp.zeros(3)
        >>> ggn = eqxbatch.GGNOperator(model, loss, w, x, y, is_convex=True)
        >>> print(ggn.mv(jnp.array([3.0, 0.0, 0.0])))
        [2. 0. 0.]
        >>> lineax.is_positive_semidefinite(ggn)
        True

        ```
    """

    @checked
    def __init__(
        self,
        fun: Callable,
        loss: Callable,
        /,
        *args: Any,
        is_convex: bool = False,
        tags: object = (),
        **kwargs: Any,
    ):
        self._bind(filter_ggnvp, GGNVP, (fun, loss), args, kwargs)
        convex = {lineax.positive_semidefinite_tag} if is_convex else set()
        self.tags = as_tags(tags) | {lineax.symmetric_tag} | convex

    @property
    def _transforms(self) -> _Transforms:
        return _Transforms(filter_ggn, filter_ggn_diagonal)


@lineax.materialise.register(AbstractSymmetricOperator)
def _materialise(operator: AbstractSymmetricOperator) -> lineax.AbstractLinearOperator:
    # Some operators know this without a tag.
    is_known = lineax.is_positive_semidefinite(operator)
    tags = operator.tags | ({lineax.positive_semidefinite_tag} if is_known else set())
    structure = operator.out_structure()
    return lineax.PyTreeLinearOperator(operator.as_pytree(), structure, tags)


@lineax.conj.register(AbstractSymmetricOperator)
def _conj(operator: AbstractSymmetricOperator) -> AbstractSymmetricOperator:
    return operator
