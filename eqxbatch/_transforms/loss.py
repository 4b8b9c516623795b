"""A loss, and the ways to the gradients of a block of its examples.

Each way is a function of the rows of a block and the weights of its examples, if there
are any. It returns a dict of dicts: `"whole"` has results for the block as a whole,
`"total"` sums over its examples, and `"each"` one result for each, along axis 0.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._blocks.accumulators import widened
from .._blocks.axes import Batch
from .._blocks.explicit import with_auto_axes
from .._blocks.jaxprs import evaluate_jaxpr, trace_example, uses_dtype
from .._blocks.mesh import spec_of, with_type_of
from .._blocks.scaling import (
    finite_sums,
    normalised,
    power_of_two,
    scaled_examples,
    squared_norm,
)
from .._blocks.slots import is_struct
from .._sites.choose import Method, plan
from .._sites.contract import Factors, kept_examples
from .._sites.gradients import SiteGradients
from .clip import Clipping


Way = Callable[[list, Array | None], dict[str, dict[str, PyTree]]]


@dataclasses.dataclass(frozen=True)
class Loss:
    """A function whose first argument is differentiated, and a call of it.

    `diff` and `nondiff` are the two parts of that argument, and `batch` splits all
    arguments. With `holomorphic`, values are complex.
    """

    fun: Callable
    batch: Batch
    diff: PyTree
    nondiff: PyTree
    has_aux: bool
    holomorphic: bool = False

    def __call__(self, diff: PyTree, rows: list) -> tuple[Array, PyTree]:
        """Value and aux for one example, or for a microbatch."""
        value, aux = self.outputs(diff, rows)
        return check_value(value, self.holomorphic), aux

    def outputs(self, diff: PyTree, rows: list) -> tuple[PyTree, PyTree]:
        """What the function returns, whatever it is, and aux."""
        (_, *rest), kwargs = self.batch.arguments(rows)
        out = self.fun(eqx.combine(diff, self.nondiff), *rest, **kwargs)
        if not self.has_aux:
            return out, None
        if not isinstance(out, tuple) or len(out) != 2:
            raise ValueError(
                "With `has_aux=True`, `fun` must return a pair `(value, aux)`; "
                f"got {_describe(out)}."
            )
        return out


def _describe(x: Any) -> str:
    if eqx.is_array(x):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    return f"{x!r} of type {type(x).__name__}"


def check_value(value: Any, holomorphic: bool = False) -> Array:
    kind = jnp.complexfloating if holomorphic else jnp.floating
    if eqx.is_array_like(value):
        value = jnp.asarray(value)
        if value.shape == () and jnp.issubdtype(value.dtype, kind):
            return value
    if holomorphic:
        raise ValueError(
            "With `holomorphic=True`, the value must be a complex scalar; `fun` "
            f"returned {_describe(value)}."
        )
    raise ValueError(
        "The value that is differentiated must be a real floating-point scalar; `fun` "
        f"returned {_describe(value)}. Take the sum, the mean or the real part of it, "
        "or use `has_aux=True` to return more than the value."
    )


def weighted_totals(
    sums: Callable[[Array | None, float], list],
    num: int,
    weights: Array | None,
    is_narrow: bool,
) -> list[Array]:
    """`sums(weights, 1.0)` of `num` terms, in float32 at least, without overflow.

    Weights are scaled first, so that the range of the loss's dtype does not matter.
    """
    scale = None
    if weights is not None:
        weights, scale = normalised(weights)
    total = finite_sums(
        sums(weights, 1.0), lambda share: sums(weights, share), num, is_narrow
    )
    if scale is None:
        return total
    return [x * scale.astype(x.dtype) for x in total]


def of_microbatch(loss: Loss) -> Way:
    """For a loss of a whole microbatch: its gradient."""
    value_and_grad = eqx.filter_value_and_grad(loss, has_aux=True)

    def way(rows: list, _: Array | None) -> dict:
        (value, aux), gradient = value_and_grad(loss.diff, rows)
        return {"whole": {"value": value, "aux": aux, "gradient": gradient}}

    return way


class Example:
    """A loss of one example, traced."""

    def __init__(self, loss: Loss):
        batch = loss.batch
        self.has_aux = loss.has_aux
        self.leaves, self.treedef = jtu.tree_flatten(loss.diff)
        self.axes = list(batch.axes)

        def flat(leaves: list, rows: list) -> tuple[Array, PyTree]:
            return loss(jtu.tree_unflatten(self.treedef, leaves), rows)

        try:
            self.closed, self._out = trace_example(
                flat, self.leaves, batch.arrays, self.axes
            )
        except NameError as e:
            if "unbound axis name" not in str(e):
                raise
            raise ValueError(
                "`fun` is the loss of one example, but it uses a named axis, as "
                f"BatchNorm does in training mode ({e}). The gradient of an example is "
                "not defined if the loss couples them: bring such layers to inference "
                "mode. Or, for gradients without anything about single examples, give "
                "the loss of a whole microbatch, which uses `jax.vmap` with that "
                "`axis_name` itself, and say `batched=True`."
            ) from e
        # Whether sums over examples can overflow where their mean does not.
        self.is_narrow = uses_dtype(self.closed.jaxpr, jnp.float16)

    def run(self, leaves: list, rows: tuple) -> list:
        """The arrays that the loss returns, the value first."""
        jaxpr, consts = self.closed.jaxpr, list(self.closed.consts)
        return evaluate_jaxpr(jaxpr, consts, [*leaves, *rows])

    def vmap(self, one: Callable, rows: list) -> Any:
        """`one(*rows)` for all examples of a block; it may return more than arrays."""
        return eqx.filter_vmap(one, in_axes=tuple(self.axes))(*rows)

    def outputs(self, arrays: list) -> dict[str, PyTree]:
        """Value and aux, from the arrays that the loss returns."""
        remaining = list(arrays)
        value, aux = jtu.tree_map(
            lambda x: remaining.pop(0) if is_struct(x) else x, self._out
        )
        return {"value": value, "aux": aux}

    def gradient(self, leaves: list) -> PyTree:
        """Arrays for the leaves, in the structure of the gradient."""
        return jtu.tree_unflatten(self.treedef, leaves)

    def totals(
        self,
        sums: Callable[[Array | None, float], list],
        num: int,
        weights: Array | None,
        is_mean: bool,
    ) -> dict[str, dict[str, PyTree]]:
        """The gradient of a block of `num` examples: its total, or its mean.

        `sums(weights, share)` are the weighted sums over the examples, times a number.
        """
        if is_mean and not self.is_narrow:
            mean = [widened(x) for x in sums(None, 1 / num)]
            return {"whole": {"gradient": self.gradient(mean)}}
        total = weighted_totals(sums, num, weights, self.is_narrow)
        if is_mean:
            mean = [x / num for x in total]
            return {"whole": {"gradient": self.gradient(mean)}}
        return {"total": {"gradient": self.gradient(total)}}


def of_sum(example: Example, is_mean: bool) -> Way:
    """The gradient of the sum over the examples, in one backward pass.

    With `is_mean`, it is that of the mean, and no sum is formed.
    """

    def way(rows: list, weights: Array | None) -> dict:
        def values(leaves: list) -> tuple[Array, list]:
            outs = example.vmap(lambda *rows: example.run(leaves, rows), rows)
            return outs[0], outs

        value, pullback, outs = jax.vjp(values, example.leaves, has_aux=True)

        def sums(weights: Array | None, share: float) -> list:
            seeds = with_type_of(jax.typeof(value), jnp.full_like(value, share))
            if weights is not None:
                seeds = seeds * weights.astype(seeds.dtype)
            return pullback(seeds)[0]

        gradient = example.totals(sums, value.shape[0], weights, is_mean)
        return {**gradient, "each": example.outputs(outs)}

    return way


def of_each(
    example: Example,
    clipping: Clipping | None,
    functions: dict[str, Callable[[PyTree], PyTree]],
) -> Way:
    """The gradient of each example, as it is.

    `functions` are what is computed from it besides. That which is called
    `"transform"` takes its place before it is clipped.
    """
    functions = dict(functions)
    transform = functions.pop("transform", None)

    def one(*rows: Array) -> dict[str, PyTree]:
        def value(leaves: list) -> tuple[Array, list]:
            outs = example.run(leaves, rows)
            return outs[0], outs

        leaves, outs = jax.grad(value, has_aux=True)(example.leaves)
        gradient = example.gradient(leaves)
        each = {name: function(gradient) for name, function in functions.items()}
        if transform is not None:
            gradient = transform(gradient)
        return {**each, "gradient": gradient, "outs": outs}

    def way(rows: list, _: Array | None) -> dict:
        each = example.vmap(one, rows)
        outs = each.pop("outs")
        if clipping is not None:
            each["gradient"], each["norms"] = _clipped(each["gradient"], clipping)
        return {"each": {**each, **example.outputs(outs)}}

    return way


def _clipped(gradients: PyTree, clipping: Clipping) -> tuple[PyTree, PyTree]:
    """The gradients of some examples, clipped, and their norms."""
    groups = clipping.groups(gradients)
    leaves, treedef = jtu.tree_flatten(gradients)

    def squared_norms(scales: list[Array] | None) -> list[Array]:
        xs = leaves if scales is None else [*map(scaled_examples, leaves, scales)]
        return [squared_norm(x) for x in xs]

    clipped = groups.clip(squared_norms, are_cheap=False)
    scaled = [
        scaled_examples(x, scale).astype(x.dtype)
        for x, scale in zip(leaves, clipped.scales, strict=True)
    ]
    if clipped.is_kept is not None:
        scaled = [kept_examples(x, clipped.is_kept) for x in scaled]
    return jtu.tree_unflatten(treedef, scaled), clipped.norms


def by_norms(
    example: Example, clipping: Clipping, method: Method, is_mean: bool
) -> Way:
    """The sum of the clipped gradients, from their norms; or, `is_mean`, their mean.

    What `materialise` forms for each example is not scaled and added up, as that would
    go through it twice more: like the factors of sites, it is contracted with weights.
    """
    program, contractions = plan(example.closed, len(example.leaves), method)
    groups = clipping.groups(example.gradient(example.leaves))

    def one(*rows: Array) -> tuple[list, list, list]:
        outs, operands, pullback = program.linearize(example.leaves, list(rows), 1)
        return outs, operands, pullback([jnp.ones_like(outs[0])])

    def clipped_total(
        bounds: list, leaves: list, factors: list, weights: Array | None, num: int
    ) -> tuple[dict[str, dict[str, PyTree]], PyTree]:
        of_sites = Factors(*factors, num=num)
        gradients = SiteGradients(program, contractions, of_sites, leaves)
        own = dataclasses.replace(groups, bounds=bounds)
        clipped = own.clip(gradients.squared_norms, gradients.are_cheap)
        scales, powers = clipped.scales, []
        if example.is_narrow:
            # Small in common where all gradients are long, or the bound is small.
            powers = [power_of_two(jnp.max(scale)) for scale in scales]
            scales = [s / power for s, power in zip(scales, powers, strict=True)]

        def sums(weights: Array | None, share: float) -> list:
            own = [scale * share for scale in scales]
            if weights is not None:
                own = [scale * weights.astype(scale.dtype) for scale in own]
            found = gradients.weighted_sums(own, clipped.is_kept)
            if not example.is_narrow:
                return found
            wide = map(widened, found)
            return [x * p.astype(x.dtype) for x, p in zip(wide, powers, strict=True)]

        return example.totals(sums, num, weights, is_mean), clipped.norms

    def way(rows: list, weights: Array | None) -> dict:
        outs, *factors = example.vmap(one, rows)
        of_leaves = example.gradient([spec_of(x) for x in example.leaves])
        specs = lambda out: (
            {section: {"gradient": of_leaves} for section in out[0]},
            spec_of(outs[0]),
        )
        operands = (groups.bounds, example.leaves, factors, weights, outs[0].shape[0])
        gradient, norms = with_auto_axes(clipped_total, operands, specs)
        return {**gradient, "each": {**example.outputs(outs), "norms": norms}}

    return way
