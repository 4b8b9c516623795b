"""The gradients of a microbatch: of a whole, of a sum, or one for each example.

Each function here that computes them returns a function of the rows of a microbatch,
with its weights and bounds. It returns gradients, values, aux and norms by name: those
of the microbatch, and those of its examples.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree, Real, Shaped

from .._base.dtypes import (
    scaled_examples,
    weighted_totals,
    widened,
    widest,
)
from .._base.mesh import with_type_of
from .._base.narrow import is_narrow_dtype
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._base.types import check_types
from .._batch.arguments import Leaves, RowArrays, ValueAndAux
from .._batch.loss import Loss
from .._batch.memory import explained_failure
from .._batch.padding import Padding, unless_padding
from .._batch.rows import Rows
from .._sites.factors import (
    kept_examples,
)
from .._sites.features import AbstractFeatures
from .clipping import Groups, PlainSquares, squares_of_examples, squares_one_by_one


class Results(NamedTuple):
    """The results of a microbatch by name, and those of its examples along axis 0."""

    of_whole: dict[str, PyTree]
    of_each: dict[str, PyTree]


BlockGradients = Callable[[Rows], Results]


_IF_ONE = "If it is the loss of one example, leave out `batched=True`."


_INSIDE = (
    "Pass this `axis_name` to the `jax.vmap` inside of `fun`; or, for the loss of one "
    "example, to the transform in place of `batched=True`."
)


# What a user's function of a gradient returns, without what is no array.
_Result = PyTree[Shaped[ArrayLike, "..."]]


# What `equinox.filter_value_and_grad` returns for a function with aux.
_ValueAndGradient = tuple[ValueAndAux, PyTree]


def gradient_of_microbatch(loss: Loss) -> BlockGradients:
    """The gradient of a loss of a whole microbatch."""

    def of_rows(diff: PyTree, rows: RowArrays) -> ValueAndAux:
        call = functools.partial(loss, diff)
        setting = "microbatch", _IF_ONE, rows, _INSIDE
        with explained_failure(call, loss.batch, *setting):
            return call(rows)

    # The loss may couple its examples, so that there is nothing to do for each of them.
    value_and_grad = eqx.filter_value_and_grad(of_rows, has_aux=True)
    if any(is_narrow_dtype(x.dtype) for x in jtu.tree_leaves(loss.parameters)):
        value_and_grad = _unrounded(of_rows)

    def gradients(rows: Rows) -> Results:
        (value, aux), gradient = value_and_grad(loss.parameters, rows.arrays)
        return Results({"value": value, "aux": aux, "gradient": gradient}, {})

    return gradients


def _unrounded(fun: Callable[[PyTree, list], tuple[Array, PyTree]]) -> Callable:
    """Values and gradients as of Equinox, in float32 for parameters in float8."""

    def value_and_grad(diff: PyTree, rows: RowArrays) -> _ValueAndGradient:
        # A traced function takes such parameters in float32, and casts them inside.
        whole = TracedFunction(fun, diff, rows)

        def value(leaves: list[Array]) -> ValueAndAux:
            outs = whole.one(leaves, rows)
            return outs[0], outs

        leaves, outs = jax.grad(value, has_aux=True)(whole.leaves)
        return whole.output(outs), whole.tree(leaves)

    return value_and_grad


def value_and_aux(example: TracedFunction, arrays: Leaves) -> dict[str, PyTree]:
    """Value and aux, from the arrays that the loss returns."""
    value, aux = example.output(arrays)
    return {"value": value, "aux": aux}


def total_of(
    example: TracedFunction,
    sums: Callable[[Array | None, float], list],
    num: int,
    weights: Array | None,
    is_mean: bool,
) -> PyTree:
    """The gradient of a microbatch of `num` examples: their sum or mean.

    `sums(weights, share)` are the weighted sums over the examples, times a number.
    """
    # A share of `1 / num` in each cotangent gives the mean without a sum, but could
    # underflow in float16.
    if is_mean and not example.is_narrow:
        return example.tree([widened(x) for x in sums(None, 1 / num)])
    leaves = weighted_totals(sums, num, weights, example.is_narrow)
    return example.tree([x / num for x in leaves] if is_mean else leaves)


def gradient_of_sum(
    example: TracedFunction,
    is_mean: bool,
    *,
    padding: Padding | None,
    keeps_outputs: bool,
) -> BlockGradients:
    """The gradient of the sum over the examples, in one backward pass.

    With `is_mean`, it is the gradient of the mean, without forming a sum. `padding`
    replaces examples of weight 0; `keeps_outputs` says whether their values and aux
    matter nevertheless.
    """

    def gradients(rows: Rows) -> Results:
        if padding is None or rows.weights is None:
            return _of_sum(example, example.many, rows, is_mean)
        # A weight of 0 does not remove a derivative of NaN: another row takes the place
        # of each such row. If no row counts, the result is zero.
        counting = padding.replaced(rows)
        results = _of_sum(example, example.many, counting, is_mean)
        leaves, treedef = jtu.tree_flatten(results.of_whole["gradient"])
        gradient = treedef.unflatten(unless_padding(leaves, rows.weights))
        # Users who keep them get the values of their own rows.
        outputs = results.of_each
        if keeps_outputs:
            outputs = value_and_aux(example, example.many(example.leaves, rows.arrays))
        return Results({"gradient": gradient}, outputs)

    return gradients


def gradient_of_nonlinear(
    by_sum: BlockGradients,
    by_examples: Callable[[], BlockGradients],
    *,
    is_of_sum: bool,
) -> BlockGradients:
    """The gradient with backward passes that are not linear in their cotangents.

    A cotangent of 1 is that of each example alone, so one backward pass is right if
    nothing is weighted, and, as `is_of_sum` says, nothing is summed before. Otherwise,
    gradients of examples are weighted after it.
    """

    def gradients(rows: Rows) -> Results:
        run = by_sum if is_of_sum and rows.weights is None else by_examples()
        return run(rows)

    return gradients


def gradient_of_coupled(loss: Loss, is_mean: bool) -> BlockGradients:
    """Like `gradient_of_sum`, for examples that a named axis couples."""

    def gradients(rows: Rows) -> Results:
        # The examples of a microbatch are one function, traced for its size.
        whole = TracedFunction(loss.together, loss.parameters, rows.arrays)
        is_scaled = rows.weights is not None or is_mean or whole.is_narrow
        if is_scaled and not whole.backward.is_linear:
            raise ValueError(
                "`fun` has a custom backward pass (`jax.custom_vjp`) that is not known "
                "to be linear in the cotangent. With an `axis_name`, weights, running "
                "means and float16 scale cotangents before it, which gives another "
                "gradient. Use `Mean()` or `Sum()` without weights, in float32."
            )
        return _of_sum(whole, whole.one, rows, is_mean)

    return gradients


def _of_sum(
    traced: TracedFunction,
    run: Callable[[list, list], list[Array]],
    rows: Rows,
    is_mean: bool,
) -> Results:
    """The gradient of the sum of the values that `run` returns first."""

    def values(leaves: list[Array]) -> ValueAndAux:
        outs = run(leaves, rows.arrays)
        return outs[0], outs

    value, pullback, outs = jax.vjp(values, traced.leaves, has_aux=True)

    # Weights of examples are their cotangents: one backward pass is the weighted sum.
    def sums(weights: Array | None, share: float) -> list:
        # On a mesh, cotangents have the type of values, with its sharding.
        seeds = with_type_of(jax.typeof(value), jnp.full_like(value, share))
        if weights is not None:
            seeds = seeds * weights.astype(seeds.dtype)
        return pullback(seeds)[0]

    gradient = total_of(traced, sums, rows.total, rows.weights, is_mean)
    return Results({"gradient": gradient}, value_and_aux(traced, outs))


def materialised_gradients(
    example: TracedFunction,
    groups_of: Callable[[PyTree], "Groups"] | None,
    functions: dict[str, Callable[[PyTree], PyTree]],
    features: AbstractFeatures | None,
) -> BlockGradients:
    """Materialises each per-example gradient.

    `functions` are applied to each gradient, of which there may be `features`. The
    result of the function named `"transform"` replaces the gradient before clipping.
    """
    # The caller's dict stays as it is.
    functions = dict(functions)
    transform = functions.pop("transform", None)

    # All that is asked of one gradient happens while it is there.
    def of_example(*rows: Array) -> dict[str, PyTree]:
        def value(leaves: list[Array]) -> ValueAndAux:
            outs = example.one(leaves, rows)
            return outs[0], outs

        leaves, outs = jax.grad(value, has_aux=True)(example.leaves)
        gradient = example.tree(leaves)
        # Functions of the user get gradients in the dtypes of their parameters.
        given = example.cast(leaves)
        results = {
            name: _result_of_user(name, function, given)
            for name, function in functions.items()
        }
        if features is not None:
            (results["features"],) = features.of_gradients([x[None] for x in leaves])
        if transform is not None:
            gradient = _result_of_user("transform", transform, given)
        return {**results, "gradient": gradient, "outs": outs}

    def gradients(rows: Rows) -> Results:
        results = eqx.filter_vmap(of_example, in_axes=rows.axes)(*rows.arrays)
        # Clipping comes last: `transform` changes what is clipped.
        outs = results.pop("outs")
        if groups_of is not None:
            groups = groups_of(results["gradient"]).of_rows(rows.bounds)
            results.update(_clipped_gradients(results["gradient"], groups))
        return Results({}, {**results, **value_and_aux(example, outs)})

    return gradients


def inner_product(direction: list[Array], gradient: PyTree) -> Real[Array, ""]:
    """The inner product of a gradient with a direction, a list of leaves.

    A complex leaf counts as its real and its imaginary part.
    """
    # Products of half precision would leave its range; they are added up in the widest
    # dtype of any leaf.
    leaves = [*map(widened, jtu.tree_leaves(gradient))]
    dtype = widest(*(x.real.dtype for x in leaves))
    products = (
        jnp.sum((jnp.conj(widened(x)) * y).real).astype(dtype)
        for x, y in safe_zip(direction, leaves)
    )
    return sum(products, jnp.zeros((), dtype))


def _result_of_user(
    name: str, fun: Callable[[PyTree], PyTree], gradient: PyTree
) -> PyTree:
    """The result of a user's function of a gradient, which must have an array."""
    # What is no array is returned as it is, but a result without any is a mistake.
    out = fun(gradient)
    arrays = eqx.filter(out, eqx.is_array_like)
    what = f"What `{name}` returns"
    check_types({what: arrays if jtu.tree_leaves(arrays) else out}, {what: _Result})
    return out


def _clipped_gradients(gradients: PyTree, groups: "Groups") -> dict[str, PyTree]:
    """Clipped per-example gradients, and their norms."""
    # Gradients are there to be squared again, so that no flag but that of the range is
    # needed: nothing cancels.
    leaves, treedef = jtu.tree_flatten(gradients)
    scaled = lambda scales: [*map(squares_one_by_one(), leaves, scales)]
    plain = PlainSquares([*map(squares_of_examples, leaves)], [])
    clipped = groups.clip(plain, scaled)
    scaled = [
        scaled_examples(x, scale).astype(x.dtype)
        for x, scale in safe_zip(leaves, clipped.scales)
    ]
    # A factor of 0 does not remove NaN.
    if clipped.is_kept is not None:
        scaled = [kept_examples(x, clipped.is_kept) for x in scaled]
    gradients = jtu.tree_unflatten(treedef, scaled)
    return {"gradient": gradients, "norms": clipped.norms}
