"""The ways to compute the gradients of a microbatch.

Each way is a function of the rows of a microbatch and of optional weights of its
examples. It returns a `MicrobatchResult` of gradients, values, aux and norms.
`SiteGradients` gives norms and weighted sums of per-example gradients without
materialising them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact, PyTree, Real, Shaped

from .._base.dtypes import (
    largest_of_each,
    power_of_two,
    scaled_examples,
    squared_norm,
    widened,
    widest,
)
from .._base.mesh import is_on_mesh, spec_of, with_auto_axes, with_type_of
from .._base.shapes import AnyArray, Contract
from .._batch.example_or_batch import told_apart
from .._batch.objective import Example, Loss, MicrobatchResult
from .._sites.cancellation import OfLeaf, squared_norms, with_own_factors
from .._sites.cost import Contraction, Method, plan
from .._sites.factors import (
    Factor,
    Factors,
    gradients,
    has_weights,
    kept_examples,
    weighted_sum,
    weights_of,
)
from .._sites.site import is_outer_product, Site
from .._sites.trace import Program
from .clip import Clipping
from .gradient_settings import IF_ONE


class SiteGradients:
    """Per-example gradients, represented by the factors of their sites.

    Only the types of the `leaves` matter.
    """

    def __init__(
        self,
        program: Program,
        contractions: list[Contraction],
        factors: Factors,
        leaves: list,
    ):
        self._program = program
        self._leaves = leaves
        self._contractions = contractions
        self._factors = factors
        self._formed: dict[int, Array] = {}
        self._scaled: dict[int, tuple[Array | None, Array]] = {}

    @property
    def are_cheap(self) -> bool:
        """Whether passing `scales` costs nothing extra."""
        return all(
            c.form == "unused" or self._is_product(c) for c in self._contractions
        )

    def _is_product(self, contraction: Contraction) -> bool:
        """Whether the norm of a leaf's gradient is a product of two norms."""
        if contraction.form != "gram":
            return False
        return is_outer_product(self._program.sites_of(contraction.leaf))

    def squared_norms(
        self, scales: Sequence[Real[Array, " n"]] | None = None
    ) -> list[Real[Array, " n"]]:
        """For each leaf, the squared norms of the per-example gradients.

        With `scales`, one for each leaf, gradients are multiplied by these first, so
        that their squares are in range.
        """
        factors = scales or [None] * len(self._contractions)
        grams = self._of_grams(is_scaled=scales is not None)
        return [
            self._squared_norm(contraction, scale, grams)
            for contraction, scale in zip(self._contractions, factors, strict=True)
        ]

    def _of_grams(
        self, *, is_scaled: bool
    ) -> dict[int, tuple[Array | None, Real[Array, " n"]]]:
        """For leaves without formed gradients, norms as `power * sqrt(squares)`.

        The power is None if nothing is scaled.
        """
        powers: dict[int, Array | None] = {}
        asked = []
        for contraction in self._contractions:
            leaf = contraction.leaf
            if contraction.form != "gram" or leaf in self._scaled:
                continue
            sites, factors, power = self._program.sites_of(leaf), self._factors, None
            # If scaling is cheap, it is always used: another way would take time to
            # compile.
            if is_scaled or self._is_product(contraction):
                power, sites, factors = _scaled(sites, factors)
            powers[leaf] = power
            asked.append(OfLeaf(sites, factors, self._leaves[leaf]))
        found: dict[int, tuple[Array | None, Array]] = {}
        for (leaf, power), squares in zip(
            powers.items(), squared_norms(asked), strict=True
        ):
            power = None if power is None else jnp.where(squares > 0, power, 1)
            found[leaf] = power, squares
        if not is_scaled:
            self._scaled = {i: x for i, x in found.items() if x[0] is not None}
        return {**self._scaled, **found}

    def _squared_norm(
        self, contraction: Contraction, scale: Array | None, grams: dict
    ) -> Array:
        leaf = contraction.leaf
        if contraction.form == "unused":
            return jnp.zeros(self._factors.num, widest(self._leaves[leaf].dtype))
        sites = self._program.sites_of(leaf)
        if contraction.form == "gram":
            power, squares = grams[leaf]
            if power is None:
                return squares
            if scale is not None:
                power = power.astype(scale.dtype) * scale
            # Multiplied one after the other: the square of `power` alone may overflow.
            return squares.astype(power.dtype) * power * power
        formed = self._formed.get(leaf)
        if formed is None:
            formed = gradients(sites, self._factors, self._leaves[leaf])
            if not is_on_mesh(formed):
                formed = formed.reshape(formed.shape[0], -1)
        if scale is not None:
            return squared_norm(scaled_examples(formed, scale))
        if contraction.keeps:
            self._formed[leaf] = formed
        return squared_norm(formed)

    def weighted_sums(
        self, weights: Sequence[Real[Array, " n"]], is_kept: Array | None
    ) -> list[Inexact[Array, "..."]]:
        """For each leaf, the weighted sum of the per-example gradients.

        The `weights` are given for each leaf. Examples where `is_kept` is False are
        left out, even if their gradient is not finite. Call `squared_norms` first:
        gradients that it materialised are reused.
        """
        factors = self._factors if is_kept is None else self._factors.where(is_kept)
        return [
            self._weighted_sum(c, factors, weight, is_kept)
            for c, weight in zip(self._contractions, weights, strict=True)
        ]

    def _weighted_sum(
        self,
        contraction: Contraction,
        factors: Factors,
        weights: Array,
        is_kept: Array | None,
    ) -> Array:
        leaf = contraction.leaf
        struct = self._leaves[leaf]
        if contraction.form == "unused":
            return jnp.zeros(struct.shape, struct.dtype)
        if leaf in self._formed:
            formed = self._formed[leaf]
            if is_kept is not None:
                formed = kept_examples(formed, is_kept)
            if formed.dtype == jnp.float16:  # Their sum may overflow.
                formed = widened(formed)
            weights = weights.astype(formed.dtype)
            if is_on_mesh(formed):
                # A product would gather an axis that is sharded. `is_kept` can be on a
                # mesh even if `formed`, which is flat then, was not.
                weights = jnp.expand_dims(weights, range(1, formed.ndim))
                return jnp.sum(weights * formed, axis=0).reshape(struct.shape)
            return jnp.tensordot(weights, formed, 1).reshape(struct.shape)
        sites = self._program.sites_of(leaf)
        if self._factors.of(sites[0])[1].array.dtype == jnp.float16:
            factors, weights = _balanced(sites, factors, weights)
        return weighted_sum(sites, factors, struct, weights)


def _scaled(
    sites: Sequence[Site], factors: Factors
) -> tuple[Real[Array, " n"], list[Site], Factors]:
    """Sites and factors with squares in range, for norms divided by a power of two."""
    own, of_own = with_own_factors(sites, factors)
    operands, cotangents = zip(*map(of_own.of, own), strict=True)
    power = _common_power(cotangents)
    cotangents = [_over(d, power) for d in cotangents]
    if _have_size(sites, factors):
        of_operands = _common_power(operands)
        operands = [_over(a, of_operands) for a in operands]
        power = power * of_operands.astype(power.dtype)
    unit = None
    if all(map(has_weights, sites)):
        weights = [weights_of(site, factors.values) for site in sites]
        largest = [jnp.max(jnp.abs(x), initial=0) for x in weights]
        unit = power_of_two(functools.reduce(jnp.maximum, largest))
        power = power * unit.astype(power.dtype)
    return power, own, factors.replaced([*operands], cotangents, unit)


def _balanced(
    sites: Sequence[Site], factors: Factors, weights: Array
) -> tuple[Factors, Array]:
    """Equal products, rescaled so that no weighted cotangent is out of range."""
    if not _have_size(sites, factors):
        return factors, weights
    numbers = {s.operand for s in sites if s.operand is not None}
    power = _common_power([factors.operands[i] for i in numbers])
    operands = [
        a.of(_over(a, power).array.astype(a.array.dtype)) if i in numbers else a
        for i, a in enumerate(factors.operands)
    ]
    balanced = factors.replaced(operands, factors.cotangents)
    return balanced, weights * power.astype(weights.dtype)


def _have_size(sites: Sequence[Site], factors: Factors) -> bool:
    """Whether the operands of all sites can be scaled.

    Tokens cannot be scaled, a missing operand stands for ones, and integers and bools
    must keep their values.
    """
    operands = [factors.of(site)[0] for site in sites]
    return all(
        a is not None and jnp.issubdtype(a.array.dtype, jnp.inexact) for a in operands
    )


def _common_power(factors: Sequence[Factor]) -> Real[Array, " n"]:
    largest = [largest_of_each(x.array) for x in factors]
    dtype = widest(*(x.dtype for x in largest))
    largest = (x.astype(dtype) for x in largest)
    return power_of_two(functools.reduce(jnp.maximum, largest))


def _over(x: Factor, power: Array) -> Factor:
    return x.of(scaled_examples(x.array, 1 / power))


BlockGradients = Callable[[list, Array | None], MicrobatchResult]


def of_microbatch(loss: Loss) -> BlockGradients:
    """The gradient of a loss of a whole microbatch."""

    def of_rows(diff: PyTree, rows: list) -> tuple[Array, PyTree]:
        call = functools.partial(loss, diff)
        with told_apart(call, loss.batch, "microbatch", IF_ONE, rows):
            return call(rows)

    value_and_grad = eqx.filter_value_and_grad(of_rows, has_aux=True)

    def gradients(rows: list, _: Array | None) -> MicrobatchResult:
        (value, aux), gradient = value_and_grad(loss.diff, rows)
        return MicrobatchResult({"value": value, "aux": aux, "gradient": gradient})

    return gradients


def of_sum(example: Example, is_mean: bool) -> BlockGradients:
    """The gradient of the sum over the examples, in one backward pass.

    With `is_mean`, it is the gradient of the mean, without forming a sum.
    """

    def gradients(rows: list, weights: Array | None) -> MicrobatchResult:
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
        return dataclasses.replace(gradient, each=example.outputs(outs))

    return gradients


class GradientMoments(NamedTuple):
    """What [`eqxbatch.filter_micro_value_and_grad`][] returns with `moments=True`.

    - `mean`: the mean of the per-example gradients, a PyTree like the gradient.
    - `variance`: the variance of each entry over the examples, with divisor `n - 1`, in
        the dtype of the gradient.
    - `noise_scale`: the sum of all variances divided by the squared norm of the true
        gradient, shape `()`. The squared norm is estimated without bias, so it can be
        zero or negative if noise dominates the gradient. Batch sizes much larger than
        the noise scale bring little benefit.
    """

    mean: PyTree
    variance: PyTree
    noise_scale: Real[Array, ""]


class GradientStatistics(NamedTuple):
    """Per-example statistics of [`eqxbatch.filter_micro_value_and_grad`][].

    - `norms`: the norms of the per-example gradients before clipping, shape `(n,)`. If
        `clip_norm` is a PyTree of bounds, a PyTree with one such array for each. With a
        `transform`, these are the norms of its results.
    - `metrics`: the results of `metrics`, with the examples along axis 0.
    - `moments`: an [`eqxbatch.GradientMoments`][].

    Statistics that were not requested are None.
    """

    norms: PyTree[Real[Array, " n"]]
    metrics: PyTree[Shaped[Array, "n ..."]]
    moments: GradientMoments | None


# The result of a user's function of a gradient must have at least one array.
OF_GRADIENTS = Contract(
    {
        "x": PyTree[Inexact[AnyArray, "?*a"], "parameters"],
        "gradient": PyTree[Inexact[Array, "?*a"], "parameters"],
        "transform": PyTree[Shaped[ArrayLike, "..."]],
        "metrics": PyTree[Shaped[ArrayLike, "..."]],
        "statistics": GradientStatistics,
    },
    of=["filter_micro_grad", "filter_micro_value_and_grad"],
)


def check_gradient(diff: PyTree, gradient: PyTree) -> None:
    """Raises if a gradient does not match the differentiated leaves."""
    call = OF_GRADIENTS.begin()
    call.check("x", diff)
    call.check("gradient", gradient)


def statistics_of(
    norms: PyTree, metrics: PyTree, moments: GradientMoments | None, num: int
) -> GradientStatistics:
    """The statistics that are returned besides a gradient."""
    # Metrics can contain non-arrays.
    arrays = eqx.filter(metrics, eqx.is_array)
    call = OF_GRADIENTS.begin(n=num)
    call.check("statistics", GradientStatistics(norms, arrays, moments))
    return GradientStatistics(norms, metrics, moments)


def _of_gradient(
    name: str, fun: Callable[[PyTree], PyTree], gradient: PyTree
) -> PyTree:
    out = fun(gradient)
    if name in ("transform", "metrics"):
        arrays = eqx.filter(out, eqx.is_array_like)
        # Non-arrays are allowed beside arrays, but not alone.
        found = arrays if jtu.tree_leaves(arrays) else out
        OF_GRADIENTS.begin().check(name, found, f"What `{name}` returns")
    return out


def of_each(
    example: Example,
    clipping: Clipping | None,
    functions: dict[str, Callable[[PyTree], PyTree]],
) -> BlockGradients:
    """Materialises each per-example gradient.

    `functions` are applied to each gradient. The result of the one named `"transform"`
    replaces the gradient before clipping.
    """
    functions = dict(functions)
    transform = functions.pop("transform", None)

    def one(*rows: Array) -> dict[str, PyTree]:
        def value(leaves: list) -> tuple[Array, list]:
            outs = example.program.one(leaves, rows)
            return outs[0], outs

        leaves, outs = jax.grad(value, has_aux=True)(example.leaves)
        gradient = example.gradient(leaves)
        each = {
            name: _of_gradient(name, function, gradient)
            for name, function in functions.items()
        }
        if transform is not None:
            gradient = _of_gradient("transform", transform, gradient)
        return {**each, "gradient": gradient, "outs": outs}

    def gradients(rows: list, _: Array | None) -> MicrobatchResult:
        each = example.vmap(one, rows)
        outs = each.pop("outs")
        if clipping is not None:
            each["gradient"], each["norms"] = _clipped(each["gradient"], clipping)
        return MicrobatchResult(each={**each, **example.outputs(outs)})

    return gradients


def _clipped(gradients: PyTree, clipping: Clipping) -> tuple[PyTree, PyTree]:
    """Clipped per-example gradients, and their norms."""
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
    """The sum of the clipped gradients from their norms, or their mean if `is_mean`.

    Materialised gradients are contracted with weights, as the factors of sites are.
    Scaling them and adding them up would read them twice more.
    """
    program, contractions = plan(example.program.closed, len(example.leaves), method)
    groups = clipping.groups(example.gradient(example.leaves))

    def one(*rows: Array) -> tuple[list, list, list]:
        outs, operands, pullback = program.linearize(example.leaves, list(rows), 1)
        return outs, operands, pullback([jnp.ones_like(outs[0])])

    def clipped_total(
        bounds: list,
        leaves: list,
        factors: list,
        values: list,
        weights: Array | None,
        num: int,
    ) -> tuple[MicrobatchResult, PyTree]:
        of_sites = Factors(*factors, num=num, values=values)
        gradients = SiteGradients(program, contractions, of_sites, leaves)
        own = dataclasses.replace(groups, bounds=bounds)
        clipped = own.clip(gradients.squared_norms, gradients.are_cheap)
        scales, powers = clipped.scales, []
        if example.is_narrow:
            # If all gradients are long or the bound is small, all scales are small.
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

    def gradients(rows: list, weights: Array | None) -> MicrobatchResult:
        outs, *factors = example.vmap(one, rows)
        of_leaves = example.gradient([spec_of(x) for x in example.leaves])
        of_names = lambda names: dict.fromkeys(names, of_leaves)
        specs = lambda out: (
            MicrobatchResult(of_names(out[0].whole), of_names(out[0].total)),
            spec_of(outs[0]),
        )
        values = program.values(example.leaves)
        num = outs[0].shape[0]
        operands = (groups.bounds, example.leaves, factors, values, weights, num)
        gradient, norms = with_auto_axes(clipped_total, operands, specs)
        each = {**example.outputs(outs), "norms": norms}
        return dataclasses.replace(gradient, each=each)

    return gradients


def moments_of(diff: PyTree, moments: PyTree, num: int | Array) -> GradientMoments:
    """The moments of gradients with respect to `diff`, from those in a wider dtype."""
    leaves, treedef = jtu.tree_flatten(diff)
    means, variances = zip(*treedef.flatten_up_to(moments), strict=True)
    dtype = widest(*(x.dtype for x in variances))
    total = lambda xs: sum(jnp.sum(x).astype(dtype) for x in xs)
    noise = total(variances)
    signal = total(jnp.abs(x) ** 2 for x in means)
    # The squared mean overestimates by the variance of the mean.
    signal = signal - noise / jnp.asarray(num).astype(dtype)
    mean, variance = (
        treedef.unflatten(x.astype(d) for x, d in zip(xs, dtypes, strict=True))
        for xs, dtypes in (
            (means, [x.dtype for x in leaves]),
            (variances, [x.real.dtype for x in leaves]),
        )
    )
    return GradientMoments(mean, variance, noise / signal)
