"""`filter_hvp` and `filter_ggnvp`: products with one vector, in microbatches."""

import inspect
from collections.abc import Callable
from typing import Any, cast, ClassVar, get_args, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Inexact, PyTree

from .._base.mesh import spec_of, sum_varying, vary, varying
from .._base.shapes import AnyArray, Contract
from .._base.trees import shown
from .._batch.memory import MemoryBudget
from .._batch.moments import Mean, Sum
from .._batch.objective import (
    AbstractOverExamples,
    Call,
    check_over_examples,
    Objective,
    split_call,
)
from .._batch.transform import (
    AbstractOtherArguments,
    also_decorator,
    Blocking,
    transformed,
    with_second,
)
from .by_products import Mode
from .curvature_of import check_loss, make_curvature


if TYPE_CHECKING:
    from .._batch.signatures import Typed
    from .curvature_signatures import GGNProductSignature, ProductSignature


_Parameters = PyTree[Inexact[AnyArray, "?*a"], "parameters"]


PRODUCT = Contract(
    {"x": _Parameters, "vector": _Parameters, "product": _Parameters},
    of=["filter_ggnvp", "filter_hvp", "GGNOperator", "HessianOperator"],
)


class _Product(AbstractOverExamples, AbstractOtherArguments):
    """A product with a Hessian or, with a `loss`, with a Gauss-Newton matrix."""

    is_compiled: ClassVar[bool] = True
    takes_instance: ClassVar[bool] = True
    objective: Objective
    blocking: Blocking
    accumulator: Sum | Mean
    checkpoint: bool
    mode: Mode = "auto"
    loss: Callable | None = None

    def __check_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(
                f"`mode` must be one of {get_args(Mode)}; got {self.mode!r}."
            )
        check_over_examples(self)

    def specs(self, call: Call, out: PyTree) -> PyTree:
        _, args, kwargs = call
        diff, _ = self.objective.parameters(args, kwargs)
        like = jtu.tree_map(spec_of, diff)
        return (like, PartitionSpec()) if self.objective.has_aux else like

    def signature(self, own: inspect.Signature) -> inspect.Signature:
        return with_second(own, "vector")

    def apply(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if len(args) < 2:
            raise ValueError(
                "The first two arguments, by position, are what is differentiated and "
                f"the vector; got {len(args)} positional arguments."
            )
        first, vector, *rest = args
        one = (fun, (first, *rest), kwargs)
        diff, nondiff = self.objective.real_parameters(*one[1:])
        call = PRODUCT.begin()
        call.check("x", diff)
        tangents = like_parameters("The vector", vector, diff)
        examples = split_call(self, (fun, args, kwargs), one)
        loss = self.objective.loss(fun, examples.batch, diff, nondiff)
        curvature = make_curvature(loss, self.loss, self.mode, self.checkpoint)

        def products(rows: list, weights: Array | None) -> list[Array]:
            local = [
                vary(tangent, varying(jax.typeof(x)))
                for tangent, x in zip(tangents, curvature.leaves, strict=True)
            ]
            return curvature.product(rows, weights, local)

        closed = curvature.program.closed
        found, aux = examples.total(products, curvature.aux, closed)
        leaves, treedef = jtu.tree_flatten(diff)
        found = [
            sum_varying(x.astype(leaf.dtype), varying(jax.typeof(leaf)))
            for x, leaf in zip(found, leaves, strict=True)
        ]
        result = jtu.tree_unflatten(treedef, found)
        call.check("product", result)
        return (result, aux) if self.objective.has_aux else result


def like_parameters(what: str, vector: PyTree, diff: PyTree) -> list[Array]:
    """The arrays of a vector, which must match the differentiated leaves.

    Python numbers are accepted as scalar arrays.
    """

    def as_array(x: Any, like: Any) -> Any:
        is_number = isinstance(x, (float, complex)) and getattr(like, "shape", 1) == ()
        return jnp.asarray(x, like.dtype) if is_number else x

    if jtu.tree_structure(vector) == jtu.tree_structure(diff):
        vector = jtu.tree_map(as_array, vector, diff)
    types = [
        (jtu.tree_structure(tree), [(x.shape, x.dtype) for x in jtu.tree_leaves(tree)])
        for tree in (eqx.filter(vector, eqx.is_inexact_array), diff)
    ]
    if types[0] != types[1]:
        raise ValueError(
            f"{what} must have the structure, shapes and dtypes of what is "
            f"differentiated, {shown(diff)}; got {shown(vector)}."
        )
    return jtu.tree_leaves(eqx.filter(vector, eqx.is_inexact_array))


@cast("Typed[ProductSignature]", also_decorator)
def filter_hvp(
    fun: Callable[..., Any] | None = None,
    *,
    checkpoint: bool = False,
    has_aux: bool = False,
    mode: Mode = "auto",
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
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

    The errors of [`eqxbatch.filter_hessian`][], and `ValueError` for a vector that is
    missing or does not match the differentiated leaves.

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
    product = _Product(
        objective=Objective(where, filter_spec, in_axes, has_aux),
        blocking=Blocking(microbatch_size, None, checkpoint=False),
        accumulator=accumulator,
        checkpoint=checkpoint,
        mode=mode,
    )
    return transformed(product, fun, "filter_hvp")


@cast("Typed[GGNProductSignature]", also_decorator)
def filter_ggnvp(
    fun: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    checkpoint: bool = False,
    where: Callable[[Any], Any] | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
    in_axes: PyTree = None,
    microbatch_size: int | MemoryBudget | None = None,
    accumulator: Sum | Mean = Mean(),
) -> Callable[..., Any]:
    """Generalised Gauss-Newton-vector products, one microbatch at a time.

    Like [`eqxbatch.filter_hvp`][], for the matrix of [`eqxbatch.filter_ggn`][].

    **Arguments:**

    - `fun`, `loss`: as for [`eqxbatch.filter_ggn`][]. Pass `loss` by keyword if you use
        this as a decorator. Without forward mode, a product may take one pass for each
        output of an example; without reverse mode, one for each parameter.
    - `where`, `filter_spec`, `checkpoint`, `in_axes`, `microbatch_size`, `accumulator`:
        as for [`eqxbatch.filter_hvp`][].

    The transformed function is called like that of [`eqxbatch.filter_hvp`][]. Raises
    the same errors, and `TypeError` for a `loss` that is not callable.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> ggnvp = eqxbatch.filter_ggnvp(
        ...     lambda w, x, y: jnp.tanh(jnp.dot(w, x)),
        ...     lambda out, x, y: (out - y) ** 2,
        ...     in_axes=0,
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
    check_loss(loss)
    product = _Product(
        objective=Objective(where, filter_spec, in_axes),
        blocking=Blocking(microbatch_size, None, checkpoint=False),
        accumulator=accumulator,
        checkpoint=checkpoint,
        loss=loss,
    )
    return transformed(product, fun, "filter_ggnvp")
