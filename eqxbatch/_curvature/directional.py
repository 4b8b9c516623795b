"""Derivatives along a direction: products with curvature, and Taylor expansions."""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from .._base.checks import check_at_least, check_callable
from .._base.mesh import check_shared, spec_of, sum_except, vary_as
from .._base.narrow import wide
from .._base.trees import safe_zip, shown
from .._base.types import check_types
from .._base.versions import varying
from .._batch.arguments import Arguments
from .._batch.derivative import like_parameters
from .._batch.loss import Loss
from .._batch.rows import Rows
from .._batch.transform import also_decorator, Model, Out, P, run_compiled
from .fisher import AbstractOfOutputs
from .functions import (
    AbstractCurvature,
    AbstractOfLoss,
    AbstractSecondOrder,
    GaussNewtonCurvature,
)
from .pytree import form_of


class AbstractProduct(AbstractSecondOrder):
    """The product of a matrix of second derivatives with a vector."""

    second_argument: ClassVar[str | None] = "vector"

    def specs(self, args: Arguments, kwargs: dict[str, Any], out: PyTree) -> PyTree:
        diff, _ = self.parameters(args, kwargs)
        like = jtu.tree_map(spec_of, diff)
        return (like, PartitionSpec()) if self.has_aux else like

    def apply(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        loss = self.in_microbatches(args, kwargs)
        tangents = like_parameters("The vector", args[1], loss.diff)
        both = tangents, jtu.tree_leaves(loss.diff)
        structs = ([*map(jax.typeof, arrays)] for arrays in both)
        check_shared("the vectors of a product", *structs)
        curvature = self.curvature(loss)

        def products(rows: Rows) -> list[Array]:
            # All leaves move along the vector, and all rows of the product are wanted.
            leaves, every = curvature.leaves, [*range(len(tangents))]
            pairs = safe_zip(leaves, tangents)
            local = [vary_as([x], wide(tangent)) for x, tangent in pairs]
            products = curvature.products(rows, is_single=True)
            return products(leaves, every, every)(local)

        # The vector is the same for all examples, so their products add up.
        totals, aux = self.total(loss, curvature.program, products, curvature.aux)
        leaves, treedef = jtu.tree_flatten(loss.diff)
        # Inside of `jax.shard_map`, devices have other examples of the same parameters.
        totals = [
            sum_except(x.astype(leaf.dtype), varying(jax.typeof(leaf)))
            for x, leaf in safe_zip(totals, leaves)
        ]
        product = jtu.tree_unflatten(treedef, totals)
        return (product, aux) if self.has_aux else product


class AbstractHVP(AbstractOfLoss, AbstractProduct, Generic[Model, P]):
    """`filter_hvp` with products of the type of the first argument."""

    fun: Callable[Concatenate[Model, P], Any]
    holomorphic: ClassVar[None] = None

    @abc.abstractmethod
    def __call__(
        self, x: Model, vector: Model, /, *args: P.args, **kwargs: P.kwargs
    ) -> Model: ...


class HVP(AbstractHVP[Model, P]):
    """Hessian-vector products, one microbatch at a time.

    The Hessian is never materialised.

    **Arguments:**

    - `fun`, `has_aux`, `where`, `filter_spec`, `mode`, `checkpoint`, `microbatch_size`,
        `accumulator`: as for [`eqxbatch.filter_hessian`][].
    - `in_axes`: as for [`eqxbatch.filter_hessian`][]. It applies to the arguments of
        `fun` after its first, without `vector`.

    **Returns:**

    A function `(x, vector, *args, **kwargs)`, where everything except `vector` is an
    argument of `fun`. `vector` has the structure of `x`; leaves that are not
    differentiated are `None` or anything that is not an inexact array. The product has
    this structure, too. With `has_aux`, the function returns a pair of the product and
    `aux`.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced. For several vectors, use `jax.vmap`.

    **Raises:**

    The errors of [`eqxbatch.filter_hessian`][], and `ValueError` for a vector that does
    not match the differentiated leaves, or that differs between devices which share
    them inside of `jax.shard_map`.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> square = lambda w, x: jnp.dot(w, x) ** 2
        >>> hvp = eqxbatch.filter_hvp(square, in_axes=0, microbatch_size=2)
        >>> print(hvp(jnp.zeros(2), jnp.array([1.0, 0.0]), jnp.ones((5, 2))))
        [2. 2.]

        ```

    ??? cite

        Pearlmutter, "Fast exact multiplication by the Hessian",
        [Neural Computation 6, 1994](https://doi.org/10.1162/neco.1994.6.1.147).
    """

    _: dataclasses.KW_ONLY
    has_aux: bool = False

    def __call__(
        self, x: Model, vector: Model, /, *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        return run_compiled(self, x, vector, *args, **kwargs)


class GGNVP(AbstractOfOutputs[Model, P, Out], AbstractProduct):
    """Generalised Gauss-Newton-vector products, one microbatch at a time.

    Like [`eqxbatch.filter_hvp`][], for the matrix of [`eqxbatch.filter_ggn`][].

    **Arguments:**

    - `fun`, `loss`: as for [`eqxbatch.filter_ggn`][]. Pass `loss` by keyword if you use
        this as a decorator. Without forward mode, a product may take one pass for each
        output of an example; without reverse mode, one for each parameter.
    - `in_axes`: as for [`eqxbatch.filter_ggn`][].
    - `where`, `filter_spec`, `checkpoint`, `microbatch_size`, `accumulator`: as for
        [`eqxbatch.filter_hvp`][].

    The transformed function is called like that of [`eqxbatch.filter_hvp`][]. Raises
    the same errors, and `TypeError` for a `loss` that is not callable.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> ggnvp = eqxbatch.filter_ggnvp(
        ...     lambda w, x, y: jnp.tanh(jnp.dot(w, x)),
        ...     lambda out, x, y: (out - y) ** 2,
        ... )
        >>> w, vector = jnp.zeros(2), jnp.array([1.0, 0.0])
        >>> print(ggnvp(w, vector, jnp.ones((5, 2)), jnp.ones(5)))
        [2. 2.]

        ```

    ??? cite

        Schraudolph, "Fast curvature matrix-vector products for second-order gradient
        descent", [Neural Computation 14, 2002](
        https://doi.org/10.1162/08997660260028683).
    """

    def __call__(
        self, x: Model, vector: Model, /, *args: P.args, **kwargs: P.kwargs
    ) -> Model:
        return run_compiled(self, x, vector, *args, **kwargs)

    def curvature(self, fun: Loss) -> AbstractCurvature:
        return GaussNewtonCurvature(fun, self.loss, self.checkpoint)


filter_hvp = also_decorator("filter_hvp", HVP, AbstractHVP)


filter_ggnvp = also_decorator("filter_ggnvp", GGNVP)


_Out = TypeVar("_Out")


class _Jet(NamedTuple):
    """The derivatives of outputs along a line, and the outputs that have none."""

    derivatives: list[PyTree]
    rest: PyTree


class TaylorExpansion(eqx.Module, Generic[_Out]):
    """A Taylor polynomial of a model in its parameters.

    This is what [`eqxbatch.filter_taylor_expand`][] and [`eqxbatch.filter_linearize`][]
    return. `expansion(model, *args, **kwargs)` evaluates the expansion around the
    original model at the parameters of `model`.
    """

    _centre: Callable
    _degree: int = eqx.field(static=True)

    def __call__(
        self, model: Callable[..., _Out], /, *args: Any, **kwargs: Any
    ) -> _Out:
        """The value of the expansion at the inexact arrays of `model`.

        Raises `ValueError` if `model` has another structure or other shapes than the
        original model.
        """
        # Only inexact arrays are expanded in; everything else is that of the original
        # model.
        start, static = eqx.partition(self._centre, eqx.is_inexact_array)
        end = eqx.filter(model, eqx.is_inexact_array)
        if form_of(start) != form_of(end):
            raise ValueError(
                "`model` must have the structure and shapes of the model that was "
                f"expanded, {shown(start)}; got {shown(end)}."
            )

        # The polynomial of the parameters is one of a single number, on the line from
        # the original model (0) to the given one (1).
        def along(t: Array) -> _Jet:
            move = lambda a, b: a + t.astype(a.dtype) * (b - a)
            moved = jtu.tree_map(move, start, end)
            out = eqx.combine(moved, static)(*args, **kwargs)
            dynamic, rest = eqx.partition(out, eqx.is_inexact_array)
            return _Jet([dynamic], rest)

        def derivatives(degree: int) -> Callable[[Array], _Jet]:
            """The derivatives up to this degree."""
            if degree == 0:
                return along

            def next_one(t: Array) -> _Jet:
                lower, tangents, rest = jax.jvp(
                    derivatives(degree - 1), (t,), (one,), has_aux=True
                )
                return _Jet([*lower, tangents[-1]], rest)

            return next_one

        # Each degree is the derivative of the one before, nested: outputs without a
        # derivative come along as an auxiliary output.
        one = jnp.ones((), jnp.float32)
        values, rest = derivatives(self._degree)(jnp.zeros((), jnp.float32))
        # Taylor's formula at 1, where powers of the number are all 1.
        terms = [
            jtu.tree_map(lambda x, k=k: x / float(math.factorial(k)), term)
            for k, term in enumerate(values)
        ]
        total = functools.reduce(lambda a, b: jtu.tree_map(jnp.add, a, b), terms)
        return eqx.combine(total, rest)


def filter_taylor_expand(
    model: Callable[..., _Out], degree: int
) -> TaylorExpansion[_Out]:
    """The Taylor polynomial of a model in its parameters, around their current values.

    Returns an [`eqxbatch.results.TaylorExpansion`][]: a function
    `expansion(model, *args, **kwargs)` of a model with the same structure, whose
    inexact arrays are the parameters. Outputs of inexact dtypes are expanded; others
    are those of the original model.

    **Arguments:**

    - `model`: a callable PyTree.
    - `degree`: the degree of the polynomial, at least 0. Each degree takes about twice
        as long as the previous one.

    Raises `ValueError` for a negative degree and, when called, for a model with another
    structure. Raises `TypeError` for a model that is not callable and for a degree that
    is not an int.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 2, key=jax.random.key(0))
        >>> quadratic = eqxbatch.filter_taylor_expand(model, degree=2)
        >>> x = jnp.ones(2)
        >>> bool(quadratic(model, x) == model(x))
        True

        ```

    The counterpart of `neural_tangents.taylor_expand` for callable PyTrees.
    """
    check_callable("model", model)
    check_types({"degree": degree}, {"degree": int})
    check_at_least("degree", degree, 0)
    return TaylorExpansion(model, operator.index(degree))


def filter_linearize(model: Callable[..., _Out]) -> TaylorExpansion[_Out]:
    """Linearises a model in its parameters, around their current values.

    This is [`eqxbatch.filter_taylor_expand`][] with degree 1, for a callable PyTree
    `model`. The tangent kernel of the linearised model is that of the original model,
    and stays constant during training. Raises `TypeError` if `model` is not callable.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 2, key=jax.random.key(0))
        >>> linear = eqxbatch.filter_linearize(model)
        >>> loss = lambda model, x: linear(model, x) ** 2
        >>> grads = eqx.filter_grad(loss)(model, jnp.ones(2))
        >>> trained = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        >>> ntk = eqxbatch.EmpiricalNTK(
        ...     eqx.Partial(linear, trained), trace_axes=(), where=lambda f: f.args
        ... )
        >>> ntk(jnp.ones((3, 2))).shape
        (3, 3)

        ```

    The counterpart of `neural_tangents.linearize` for callable PyTrees.
    """
    return filter_taylor_expand(model, 1)
