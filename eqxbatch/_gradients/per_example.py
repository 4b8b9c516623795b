"""The gradients of a microbatch: of a whole, of a sum, or one for each example.

Each function here that computes them returns a function of the rows of a microbatch and
of optional weights of its examples. It returns gradients, values, aux and norms by
name: those of the microbatch, and those of its examples. `SiteGradients` gives norms
and weighted sums of per-example gradients without materialising them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Inexact, PyTree, Real, Shaped

from .._base.checks import check_types
from .._base.dtypes import (
    into_range,
    is_in_range,
    largest_of_each,
    power_of_two,
    scaled_examples,
    squared_norm,
    widened,
    widest,
)
from .._base.jaxprs import TracedFunction
from .._base.mesh import is_on_mesh, spec_of, with_auto_axes, with_type_of
from .._base.precision import exact_products, products_of
from .._base.trees import described, is_none, match_prefix, safe_zip
from .._batch.batch import explained_failure
from .._batch.derivative import Loss, weighted_totals
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
from .._sites.gram import OfLeaf, squared_norms
from .._sites.site import is_outer_product, Site
from .._sites.trace import Program


# The results of a microbatch, and those of its examples along axis 0.
Results = tuple[dict[str, PyTree], dict[str, PyTree]]


BlockGradients = Callable[[list, Array | None], Results]


_IF_ONE = "If it is the loss of one example, leave out `batched=True`."


# What a user's function of a gradient returns, without what is no array.
_Result = PyTree[Shaped[ArrayLike, "..."]]


def gradient_of_microbatch(loss: Loss) -> BlockGradients:
    """The gradient of a loss of a whole microbatch."""

    def of_rows(diff: PyTree, rows: list) -> tuple[Array, PyTree]:
        call = functools.partial(loss, diff)
        with explained_failure(call, loss.batch, "microbatch", _IF_ONE, rows):
            return call(rows)

    value_and_grad = eqx.filter_value_and_grad(of_rows, has_aux=True)

    def gradients(rows: list, _: Array | None) -> Results:
        (value, aux), gradient = value_and_grad(loss.parameters, rows)
        return {"value": value, "aux": aux, "gradient": gradient}, {}

    return gradients


def _outputs(example: TracedFunction, arrays: list) -> dict[str, PyTree]:
    """Value and aux, from the arrays that the loss returns."""
    value, aux = example.output(arrays)
    return {"value": value, "aux": aux}


def _total(
    example: TracedFunction,
    sums: Callable[[Array | None, float], list],
    num: int,
    weights: Array | None,
    is_mean: bool,
) -> PyTree:
    """The gradient of a microbatch of `num` examples: their sum or mean.

    `sums(weights, share)` are the weighted sums over the examples, times a number.
    """
    if is_mean and not example.is_narrow:
        return example.tree([widened(x) for x in sums(None, 1 / num)])
    leaves = weighted_totals(sums, num, weights, example.is_narrow)
    return example.tree([x / num for x in leaves] if is_mean else leaves)


def gradient_of_sum(example: TracedFunction, is_mean: bool) -> BlockGradients:
    """The gradient of the sum over the examples, in one backward pass.

    With `is_mean`, it is the gradient of the mean, without forming a sum.
    """

    def gradients(rows: list, weights: Array | None) -> Results:
        def values(leaves: list) -> tuple[Array, list]:
            outs = example.many(leaves, rows)
            return outs[0], outs

        value, pullback, outs = jax.vjp(values, example.leaves, has_aux=True)

        def sums(weights: Array | None, share: float) -> list:
            seeds = with_type_of(jax.typeof(value), jnp.full_like(value, share))
            if weights is not None:
                seeds = seeds * weights.astype(seeds.dtype)
            return pullback(seeds)[0]

        gradient = _total(example, sums, value.shape[0], weights, is_mean)
        return {"gradient": gradient}, _outputs(example, outs)

    return gradients


def materialised_gradients(
    example: TracedFunction,
    groups_of: Callable[[PyTree], "Groups"] | None,
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
            outs = example.one(leaves, rows)
            return outs[0], outs

        leaves, outs = jax.grad(value, has_aux=True)(example.leaves)
        gradient = example.tree(leaves)
        results = {
            name: _called(name, function, gradient)
            for name, function in functions.items()
        }
        if transform is not None:
            gradient = _called("transform", transform, gradient)
        return {**results, "gradient": gradient, "outs": outs}

    def gradients(rows: list, _: Array | None) -> Results:
        results = eqx.filter_vmap(one, in_axes=tuple(example.axes))(*rows)
        outs = results.pop("outs")
        if groups_of is not None:
            groups = groups_of(results["gradient"])
            clipped = _clipped(results["gradient"], groups)
            results["gradient"], results["norms"] = clipped
        return {}, {**results, **_outputs(example, outs)}

    return gradients


def _called(name: str, fun: Callable[[PyTree], PyTree], gradient: PyTree) -> PyTree:
    """The result of a user's function of a gradient, which must have an array."""
    out = fun(gradient)
    arrays = eqx.filter(out, eqx.is_array_like)
    what = f"What `{name}` returns"
    check_types({what: arrays if jtu.tree_leaves(arrays) else out}, {what: _Result})
    return out


def _clipped(gradients: PyTree, groups: "Groups") -> tuple[PyTree, PyTree]:
    """Clipped per-example gradients, and their norms."""
    leaves, treedef = jtu.tree_flatten(gradients)

    def squared_norms(scales: list[Array] | None) -> list[Array]:
        xs = leaves if scales is None else [*map(scaled_examples, leaves, scales)]
        return [squared_norm(x) for x in xs]

    clipped = groups.clip(squared_norms, are_cheap=False)
    scaled = [
        scaled_examples(x, scale).astype(x.dtype)
        for x, scale in safe_zip(leaves, clipped.scales)
    ]
    if clipped.is_kept is not None:
        scaled = [kept_examples(x, clipped.is_kept) for x in scaled]
    return jtu.tree_unflatten(treedef, scaled), clipped.norms


def clipped_by_norms(
    example: TracedFunction,
    groups_of: Callable[[PyTree], "Groups"],
    method: Method,
    is_mean: bool,
) -> BlockGradients:
    """The sum of the clipped gradients from their norms, or their mean if `is_mean`.

    Materialised gradients are contracted with weights, as the factors of sites are.
    Scaling them and adding them up would read them twice more.
    """
    program, contractions = plan(example, method)
    groups = groups_of(example.tree(example.leaves))

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
    ) -> tuple[PyTree, PyTree]:
        of_sites = Factors(*factors, num=num, values=values)
        gradients = SiteGradients(program, contractions, of_sites, leaves)
        clipped = dataclasses.replace(groups, bounds=bounds).clip(
            gradients.squared_norms, gradients.are_cheap
        )
        scales, powers = clipped.scales, []
        if example.is_narrow:
            # If all gradients are long or the bound is small, all scales are small.
            powers = [power_of_two(jnp.max(scale)) for scale in scales]
            scales = [s / power for s, power in safe_zip(scales, powers)]

        def sums(weights: Array | None, share: float) -> list:
            factors = [scale * share for scale in scales]
            if weights is not None:
                factors = [x * weights.astype(x.dtype) for x in factors]
            totals = gradients.weighted_sums(factors, clipped.is_kept)
            if not example.is_narrow:
                return totals
            wide = map(widened, totals)
            return [x * p.astype(x.dtype) for x, p in safe_zip(wide, powers)]

        return _total(example, sums, num, weights, is_mean), clipped.norms

    def gradients(rows: list, weights: Array | None) -> Results:
        outs, *factors = jax.vmap(one, example.axes)(*rows)
        specs = example.tree([*map(spec_of, example.leaves)]), spec_of(outs[0])
        values = program.values()
        num = outs[0].shape[0]
        operands = (groups.bounds, example.leaves, factors, values, weights, num)
        with products_of(example.closed):
            gradient, norms = with_auto_axes(clipped_total, operands, lambda _: specs)
        return {"gradient": gradient}, {**_outputs(example, outs), "norms": norms}

    return gradients


def clipping_groups(clip_norm: PyTree, nan_safe: bool, gradient: PyTree) -> "Groups":
    """Groups the leaves of a gradient by `clip_norm`; their values do not matter.

    Raises `ValueError` if `clip_norm` is not a prefix of it, and `TypeError` for
    integers, which only a `transform` returns.
    """
    for path, leaf in jtu.tree_leaves_with_path(gradient):
        if not eqx.is_inexact_array(leaf):
            raise TypeError(
                "`clip_norm`, `nan_safe` and `return_norms` need the norm of what "
                "`transform` returns, so that it must consist of real or complex "
                f"arrays; got {described(leaf)} at transform(...){jtu.keystr(path)}. "
                "Cast it to a dtype such as float32 in `transform`."
            )
    what = "a number or a PyTree prefix of the gradient, with a number or None for"
    what += " each part"
    bounds, members, first = [], [], 0
    for _, bound, part in match_prefix("clip_norm", clip_norm, gradient, what):
        num = len(jtu.tree_leaves(part))
        if isinstance(bound, jax.Array):
            bound = eqx.error_if(
                bound, ~(bound >= 0), "`clip_norm` must not be negative or NaN."
            )
        bounds.append(bound)
        members.append(range(first, first + num))
        first += num
    treedef = jtu.tree_structure(clip_norm, is_leaf=is_none)
    return Groups(bounds, members, treedef, nan_safe)


@dataclasses.dataclass(frozen=True)
class Clipped:
    """The result of clipping for some examples.

    `scales` has a factor for each leaf; `is_kept` is None if all examples are kept.
    """

    scales: list[Array]
    is_kept: Array | None
    norms: PyTree


@dataclasses.dataclass(frozen=True)
class Groups:
    """The leaves of a gradient in groups, each with its bound."""

    bounds: list[Any]
    members: list[range]
    treedef: Any
    nan_safe: bool

    def clip(
        self,
        squared_norms: Callable[[list[Array] | None], list[Real[Array, " n"]]],
        are_cheap: bool,
    ) -> Clipped:
        """The factors of each leaf, for some examples.

        `squared_norms(scales)` returns the squared norms of each leaf's gradients,
        scaled first if `scales` is not None. If scaling is not cheap (`are_cheap`), it
        is used only if some square is out of range.
        """
        squared = squared_norms(None)
        dtype = widest(*(x.dtype for x in squared))
        zeros = jnp.zeros(squared[0].shape, dtype)

        def totals(squared: list[Array]) -> list[Array]:
            wide = [x.astype(dtype) for x in squared]
            of_group = lambda members: (wide[i] for i in members)
            return [sum(of_group(members), zeros) for members in self.members]

        def plain() -> list[tuple[Array, Array]]:
            return [(jnp.ones_like(total), total) for total in totals(squared)]

        def scaled() -> list[tuple[Array, Array]]:
            factors = [into_range(total) for total in totals(squared)]
            scales = [zeros] * len(squared)
            for factor, members in safe_zip(factors, self.members):
                for i in members:
                    scales[i] = factor
            again = totals(squared_norms(scales))
            return [*safe_zip(factors, again)]

        if are_cheap:
            return self._scales(scaled())
        are_in_range = [
            is_in_range(total)
            for total, members in safe_zip(totals(squared), self.members)
            if members
        ]
        norms = jax.lax.cond(jnp.all(jnp.stack(are_in_range)), plain, scaled)
        return self._scales(norms)

    def _scales(self, powers_and_squares: list[tuple[Array, Array]]) -> Clipped:
        """Factors from norms, which are `sqrt(square) / power` for each group."""
        scales, norms = [], []
        is_kept: Bool[Array, "..."] | None = None
        for bound, members, (power, square) in safe_zip(
            self.bounds, self.members, powers_and_squares
        ):
            # The derivative of a norm at zero is defined as zero instead of NaN.
            is_positive = square > 0
            root = jnp.sqrt(jnp.where(is_positive, square, 1))
            root = jnp.where(is_positive, root, square)
            norm = root / power
            if self.nan_safe:
                is_finite = jnp.isfinite(norm)
                is_kept = is_finite if is_kept is None else is_kept & is_finite
            factor = _factor(bound, power, root)
            if not self.nan_safe and bound is not None:
                # One non-finite entry makes the whole gradient non-finite.
                factor = jnp.where(jnp.isfinite(root), factor, jnp.nan)
            scales += [factor] * len(members)
            norms.append(norm)
        return Clipped(scales, is_kept, jtu.tree_unflatten(self.treedef, norms))


def _factor(bound: Any, power: Array, root: Array) -> Array:
    """The factor that clips gradients of norm `root / power` to a bound."""
    if bound is None:
        return jnp.ones_like(root)
    limit = jnp.asarray(bound, root.dtype)
    # The norm itself may overflow.
    is_longer = root / power > limit
    return jnp.where(is_longer, limit * power / jnp.where(is_longer, root, 1), 1)


@dataclasses.dataclass(frozen=True)
class SiteGradients:
    """Per-example gradients, represented by the factors of their sites.

    Only the types of the `leaves` matter.

    - `formed`: gradients that were formed for their norms, by leaf.
    - `scaled`: norms that are always computed with scaling, by leaf.
    """

    program: Program
    contractions: list[Contraction]
    factors: Factors
    leaves: list
    formed: dict[int, Array] = dataclasses.field(default_factory=dict)
    scaled: dict[int, tuple] = dataclasses.field(default_factory=dict)

    @property
    def are_cheap(self) -> bool:
        """Whether passing `scales` costs nothing extra."""
        return all(c.form == "none" or self._is_product(c) for c in self.contractions)

    def _is_product(self, contraction: Contraction) -> bool:
        """Whether the norm of a leaf's gradient is a product of two norms."""
        if contraction.form != "factors":
            return False
        return is_outer_product(self.program.sites_of(contraction.leaf))

    def squared_norms(
        self, scales: Sequence[Real[Array, " n"]] | None = None
    ) -> list[Real[Array, " n"]]:
        """For each leaf, the squared norms of the per-example gradients.

        With `scales`, one for each leaf, gradients are multiplied by these first, so
        that their squares are in range.
        """
        factors = scales or [None] * len(self.contractions)
        grams = self._of_grams(is_scaled=scales is not None)
        return [
            self._squared_norm(contraction, scale, grams)
            for contraction, scale in safe_zip(self.contractions, factors)
        ]

    def _of_grams(
        self, *, is_scaled: bool
    ) -> dict[int, tuple[Array | None, Real[Array, " n"]]]:
        """For leaves without formed gradients, norms as `power * sqrt(squares)`.

        The power is None if nothing is scaled.
        """
        powers: dict[int, Array | None] = {}
        requested = []
        for contraction in self.contractions:
            leaf = contraction.leaf
            if contraction.form != "factors" or leaf in self.scaled:
                continue
            sites, powers[leaf] = self.program.sites_of(leaf), None
            of_leaf = OfLeaf(sites, self.factors, self.leaves[leaf])
            # If scaling is cheap, it is always used: another way would take time to
            # compile.
            if is_scaled or self._is_product(contraction):
                powers[leaf], of_leaf = _scaled(of_leaf)
            requested.append(of_leaf)
        norms: dict[int, tuple[Array | None, Array]] = {}
        with exact_products():  # Bounds rest on these norms.
            squared = squared_norms(requested)
        for (leaf, power), squares in safe_zip(powers.items(), squared):
            power = None if power is None else jnp.where(squares > 0, power, 1)
            norms[leaf] = power, squares
        if not is_scaled:
            self.scaled.update((i, x) for i, x in norms.items() if x[0] is not None)
        return {**self.scaled, **norms}

    def _squared_norm(
        self, contraction: Contraction, scale: Array | None, grams: dict
    ) -> Array:
        leaf = contraction.leaf
        if contraction.form == "none":
            return jnp.zeros(self.factors.num, widest(self.leaves[leaf].dtype))
        sites = self.program.sites_of(leaf)
        if contraction.form == "factors":
            power, squares = grams[leaf]
            if power is None:
                return squares
            if scale is not None:
                power = power.astype(scale.dtype) * scale
            # Multiplied one after the other: the square of `power` alone may overflow.
            return squares.astype(power.dtype) * power * power
        formed = self.formed.get(leaf)
        if formed is None:
            formed = gradients(sites, self.factors, self.leaves[leaf])
            if not is_on_mesh(formed):
                formed = formed.reshape(formed.shape[0], -1)
        if scale is not None:
            return squared_norm(scaled_examples(formed, scale))
        if contraction.keeps:
            self.formed[leaf] = formed
        return squared_norm(formed)

    def weighted_sums(
        self, weights: Sequence[Real[Array, " n"]], is_kept: Array | None
    ) -> list[Inexact[Array, "..."]]:
        """For each leaf, the weighted sum of the per-example gradients.

        The `weights` are given for each leaf. Examples where `is_kept` is False are
        left out, even if their gradient is not finite. Call `squared_norms` first:
        gradients that it materialised are reused.
        """
        factors = self.factors if is_kept is None else self.factors.where(is_kept)
        return [
            self._weighted_sum(c, factors, weight, is_kept)
            for c, weight in safe_zip(self.contractions, weights)
        ]

    def _weighted_sum(
        self,
        contraction: Contraction,
        factors: Factors,
        weights: Array,
        is_kept: Array | None,
    ) -> Array:
        leaf = contraction.leaf
        struct = self.leaves[leaf]
        if contraction.form == "none":
            return jnp.zeros(struct.shape, struct.dtype)
        if leaf in self.formed:
            formed = self.formed[leaf]
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
            # Adding scaled gradients rounds nothing, unlike products by default.
            whole = jax.lax.Precision.HIGHEST
            total = jnp.tensordot(weights, formed, 1, precision=whole)
            return total.reshape(struct.shape)
        sites = self.program.sites_of(leaf)
        if self.factors.of(sites[0])[1].array.dtype == jnp.float16:
            factors, weights = _balanced(sites, factors, weights)
        return weighted_sum(sites, factors, struct, weights)


def _scaled(uses: OfLeaf) -> tuple[Real[Array, " n"], OfLeaf]:
    """Factors with squares in range, for norms divided by a power of two."""
    (sites, factors, _), separate = uses, uses.with_own_factors()
    pairs = map(separate.factors.of, separate.sites)
    operands, cotangents = safe_zip(*pairs)
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
    scaled = factors.replaced([*operands], cotangents, unit)
    return power, separate._replace(factors=scaled)


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
