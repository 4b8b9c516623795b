"""The ways to the gradients of a microbatch.

Each way is a function of the rows of a microbatch and the weights of its examples, if
there are any. It returns a dict of dicts: `"whole"` has results for the microbatch as a
whole, `"total"` sums over its examples, and `"each"` one result for each, along axis 0.
What is known of gradients besides is at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree, Real

from .._base.dtypes import (
    power_of_two,
    scaled_examples,
    squared_norm,
    widened,
    widest,
)
from .._base.explicit import with_auto_axes
from .._base.mesh import spec_of, with_type_of
from .._batch.moments import MeanAndVariance
from .._batch.objective import Example, Loss
from .._sites.cost import Method, plan
from .._sites.factors import Factors, kept_examples
from .clip import Clipping
from .site_gradients import SiteGradients


BlockGradients = Callable[[list, Array | None], dict[str, dict[str, PyTree]]]


def of_microbatch(loss: Loss) -> BlockGradients:
    """For a loss of a whole microbatch: its gradient."""
    value_and_grad = eqx.filter_value_and_grad(loss, has_aux=True)

    def gradients(rows: list, _: Array | None) -> dict:
        (value, aux), gradient = value_and_grad(loss.diff, rows)
        return {"whole": {"value": value, "aux": aux, "gradient": gradient}}

    return gradients


def of_sum(example: Example, is_mean: bool) -> BlockGradients:
    """The gradient of the sum over the examples, in one backward pass.

    With `is_mean`, it is that of the mean, and no sum is formed.
    """

    def gradients(rows: list, weights: Array | None) -> dict:
        def values(leaves: list) -> tuple[Array, list]:
            outs = example.program.many(leaves, rows)
            return outs[0], outs

        value, pullback, outs = jax.vjp(values, example.leaves, has_aux=True)

        def sums(weights: Array | None, share: float) -> list:
            seeds = with_type_of(jax.typeof(value), jnp.full_like(value, share))
            if weights is not None:
                seeds = seeds * weights.astype(seeds.dtype)
            return pullback(seeds)[0]

        gradient = example.totals(sums, value.shape[0], weights, is_mean)
        return {**gradient, "each": example.outputs(outs)}

    return gradients


def of_each(
    example: Example,
    clipping: Clipping | None,
    functions: dict[str, Callable[[PyTree], PyTree]],
) -> BlockGradients:
    """The gradient of each example, as it is.

    `functions` are what is computed from it besides. That which is called
    `"transform"` takes its place before it is clipped.
    """
    functions = dict(functions)
    transform = functions.pop("transform", None)

    def one(*rows: Array) -> dict[str, PyTree]:
        def value(leaves: list) -> tuple[Array, list]:
            outs = example.program.one(leaves, rows)
            return outs[0], outs

        leaves, outs = jax.grad(value, has_aux=True)(example.leaves)
        gradient = example.gradient(leaves)
        each = {name: function(gradient) for name, function in functions.items()}
        if transform is not None:
            gradient = transform(gradient)
        return {**each, "gradient": gradient, "outs": outs}

    def gradients(rows: list, _: Array | None) -> dict:
        each = example.vmap(one, rows)
        outs = each.pop("outs")
        if clipping is not None:
            each["gradient"], each["norms"] = _clipped(each["gradient"], clipping)
        return {"each": {**each, **example.outputs(outs)}}

    return gradients


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
) -> BlockGradients:
    """The sum of the clipped gradients, from their norms; or, `is_mean`, their mean.

    What `materialise` forms for each example is not scaled and added up, as that would
    go through it twice more: like the factors of sites, it is contracted with weights.
    """
    program, contractions = plan(example.program.closed, len(example.leaves), method)
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

    def gradients(rows: list, weights: Array | None) -> dict:
        outs, *factors = example.vmap(one, rows)
        of_leaves = example.gradient([spec_of(x) for x in example.leaves])
        specs = lambda out: (
            {section: {"gradient": of_leaves} for section in out[0]},
            spec_of(outs[0]),
        )
        operands = (groups.bounds, example.leaves, factors, weights, outs[0].shape[0])
        gradient, norms = with_auto_axes(clipped_total, operands, specs)
        return {**gradient, "each": {**example.outputs(outs), "norms": norms}}

    return gradients


class GradientMoments(NamedTuple):
    """What `moments=True` asks of [`eqxbatch.filter_micro_value_and_grad`][].

    - `mean`: the mean of the examples' gradients, in the structure of the gradient.
    - `variance`: of each entry, over the examples, divided by `n - 1`.
    - `noise_scale`: shape `()`; the sum of all variances, divided by the squared norm
        of the gradient that infinitely many examples would have. That norm is
        estimated without bias, so that it can come out as zero or negative where the
        gradient is lost in noise. Batches much larger than this, in examples, bring
        little.
    """

    mean: PyTree
    variance: PyTree
    noise_scale: Real[Array, ""]


class GradientStatistics(NamedTuple):
    """What [`eqxbatch.filter_micro_value_and_grad`][] is asked for besides a gradient.

    - `norms`: the norms of the examples' gradients before they are clipped, shape
        `(n,)`; if `clip_norm` has several bounds, then one such array for each.
    - `metrics`: what `metrics` returned, with the examples along axis 0.
    - `moments`: an [`eqxbatch.GradientMoments`][].

    What was not asked for is None.
    """

    norms: PyTree
    metrics: PyTree
    moments: GradientMoments | None


def moments_of(moments: PyTree, num: int | Array) -> GradientMoments:
    is_pair = lambda x: isinstance(x, MeanAndVariance)
    mean = jtu.tree_map(lambda pair: pair.mean, moments, is_leaf=is_pair)
    variance = jtu.tree_map(lambda pair: pair.variance, moments, is_leaf=is_pair)
    dtype = widest(*(x.dtype for x in jtu.tree_leaves(variance)))
    total = lambda xs: sum(jnp.sum(widened(x)).astype(dtype) for x in xs)
    noise = total(jtu.tree_leaves(variance))
    signal = total(jnp.abs(widened(x)) ** 2 for x in jtu.tree_leaves(mean))
    # The square of a mean is too large by the variance of that mean.
    signal = signal - noise / jnp.asarray(num).astype(dtype)
    return GradientMoments(mean, variance, noise / signal)
