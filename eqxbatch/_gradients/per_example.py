"""The gradients of a microbatch: of a whole, of a sum, or one for each example.

Each function here that computes them returns a function of the rows of a microbatch and
of optional weights of its examples. It returns gradients, values, aux and norms by
name: those of the microbatch, and those of its examples. `SiteGradients` gives norms
and weighted sums of per-example gradients without materialising them.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real, Shaped

from .._base.checks import check_types, is_none, match_prefix
from .._base.dtypes import (
    common_power_of_two,
    exponent_of,
    into_range,
    is_in_range,
    largest_of_each,
    power_of_two,
    Scale,
    scaled_examples,
    scaled_squares,
    squared_norm,
    Squares,
    squares_in_range,
    sum_of_squares,
    times_two_to,
    weighted_totals,
    widened,
    widest,
)
from .._base.mesh import is_on_mesh, spec_of, with_auto_axes, with_type_of
from .._base.narrow import is_narrow_dtype
from .._base.platforms import exact_products, in_turn, platform, products_of
from .._base.traced_function import TracedFunction
from .._base.trees import described, safe_zip
from .._batch.accumulators import is_summary, VarianceState
from .._batch.batch import explained_failure
from .._batch.derivative import Loss
from .._batch.padding import Padding, unless_padding
from .._sites.cost import Contraction, Method, plan
from .._sites.factors import (
    Factor,
    Factors,
    gradients,
    has_weights,
    inner_products,
    kept_examples,
    weighted_sum,
    weights_of,
)
from .._sites.gram import (
    has_norms_of_factors,
    norms_unless_cancelled,
    OfLeaf,
    squared_distances,
    squared_norms,
    squares_of_factors,
    unless_cancelled,
)
from .._sites.site import Site
from .._sites.trace import Program


# The results of a microbatch, and those of its examples along axis 0.
Results = tuple[dict[str, PyTree], dict[str, PyTree]]


# The third argument has the bounds of which there is one for each example.
BlockGradients = Callable[[list, Array | None, list], Results]


_IF_ONE = "If it is the loss of one example, leave out `batched=True`."


# What a user's function of a gradient returns, without what is no array.
_Result = PyTree[Shaped[ArrayLike, "..."]]


# What a user's function of the norms of an example returns.
_Factors = PyTree[Real[ArrayLike, ""]]


def gradient_of_microbatch(loss: Loss) -> BlockGradients:
    """The gradient of a loss of a whole microbatch."""

    def of_rows(diff: PyTree, rows: list) -> tuple[Array, PyTree]:
        call = functools.partial(loss, diff)
        with explained_failure(call, loss.batch, "microbatch", _IF_ONE, rows):
            return call(rows)

    value_and_grad = eqx.filter_value_and_grad(of_rows, has_aux=True)
    if any(is_narrow_dtype(x.dtype) for x in jtu.tree_leaves(loss.parameters)):
        value_and_grad = _unrounded(of_rows)

    def gradients(rows: list, *_: Any) -> Results:
        (value, aux), gradient = value_and_grad(loss.parameters, rows)
        return {"value": value, "aux": aux, "gradient": gradient}, {}

    return gradients


def _unrounded(fun: Callable[[PyTree, list], tuple[Array, PyTree]]) -> Callable:
    """Values and gradients as of Equinox, in float32 for parameters in float8."""

    def value_and_grad(diff: PyTree, rows: list) -> tuple[tuple[Array, PyTree], PyTree]:
        whole = TracedFunction(fun, diff, rows)

        def value(leaves: list) -> tuple[Array, list]:
            outs = whole.one(leaves, rows)
            return outs[0], outs

        leaves, outs = jax.grad(value, has_aux=True)(whole.leaves)
        return whole.output(outs), whole.tree(leaves)

    return value_and_grad


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

    def gradients(rows: list, weights: Array | None, _: list) -> Results:
        if padding is None or weights is None:
            return _of_sum(example, example.many, rows, weights, is_mean)
        counting = padding.replaced(rows, weights)
        whole, outputs = _of_sum(example, example.many, counting, weights, is_mean)
        leaves, treedef = jtu.tree_flatten(whole["gradient"])
        gradient = treedef.unflatten(unless_padding(leaves, weights))
        if keeps_outputs:
            outputs = _outputs(example, example.many(example.leaves, rows))
        return {"gradient": gradient}, outputs

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

    def gradients(rows: list, weights: Array | None, bounds: list) -> Results:
        run = by_sum if is_of_sum and weights is None else by_examples()
        return run(rows, weights, bounds)

    return gradients


def gradient_of_coupled(loss: Loss, is_mean: bool) -> BlockGradients:
    """Like `gradient_of_sum`, for examples that a named axis couples."""

    def gradients(rows: list, weights: Array | None, _: list) -> Results:
        whole = TracedFunction(loss.together, loss.parameters, rows)
        is_scaled = weights is not None or is_mean or whole.is_narrow
        if is_scaled and not whole.backward.is_linear:
            raise ValueError(
                "`fun` has a custom backward pass (`jax.custom_vjp`) that is not known "
                "to be linear in the cotangent. With an `axis_name`, weights, running "
                "means and float16 scale cotangents before it, which gives another "
                "gradient. Use `Mean()` or `Sum()` without weights, in float32."
            )
        return _of_sum(whole, whole.one, rows, weights, is_mean)

    return gradients


def _of_sum(
    traced: TracedFunction,
    run: Callable[[list, list], list[Array]],
    rows: list,
    weights: Array | None,
    is_mean: bool,
) -> Results:
    """The gradient of the sum of the values that `run` returns first."""

    def values(leaves: list) -> tuple[Array, list]:
        outs = run(leaves, rows)
        return outs[0], outs

    value, pullback, outs = jax.vjp(values, traced.leaves, has_aux=True)

    def sums(weights: Array | None, share: float) -> list:
        seeds = with_type_of(jax.typeof(value), jnp.full_like(value, share))
        if weights is not None:
            seeds = seeds * weights.astype(seeds.dtype)
        return pullback(seeds)[0]

    gradient = _total(traced, sums, value.shape[0], weights, is_mean)
    return {"gradient": gradient}, _outputs(traced, outs)


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
        given = example.cast(leaves)
        results = {
            name: _called(name, function, given) for name, function in functions.items()
        }
        if transform is not None:
            gradient = _called("transform", transform, given)
        return {**results, "gradient": gradient, "outs": outs}

    def gradients(rows: list, _: Array | None, bounds: list) -> Results:
        results = eqx.filter_vmap(one, in_axes=tuple(example.axes))(*rows)
        outs = results.pop("outs")
        if groups_of is not None:
            groups = groups_of(results["gradient"]).of_rows(bounds)
            clipped = _clipped(results["gradient"], groups)
            results["gradient"], results["norms"] = clipped
        return {}, {**results, **_outputs(example, outs)}

    return gradients


def inner_product(direction: list, gradient: PyTree) -> Real[Array, ""]:
    """The inner product of a gradient with a direction, a list of leaves.

    A complex leaf counts as its real and its imaginary part.
    """
    leaves = [*map(widened, jtu.tree_leaves(gradient))]
    dtype = widest(*(x.real.dtype for x in leaves))
    products = (
        jnp.sum((jnp.conj(widened(x)) * y).real).astype(dtype)
        for x, y in safe_zip(direction, leaves)
    )
    return sum(products, jnp.zeros((), dtype))


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
    scaled = lambda scales: [*map(_one_by_one(), leaves, scales)]
    clipped = groups.clip([*map(_plain_squares, leaves)], [], scaled)
    scaled = [
        scaled_examples(x, scale).astype(x.dtype)
        for x, scale in safe_zip(leaves, clipped.scales)
    ]
    if clipped.is_kept is not None:
        scaled = [kept_examples(x, clipped.is_kept) for x in scaled]
    return jtu.tree_unflatten(treedef, scaled), clipped.norms


def _plain_squares(x: Inexact[Array, "n ..."]) -> Real[Array, "n ..."]:
    """The squared norm of each example.

    On GPUs, it is the sum of what is returned, of which that of all leaves is one
    kernel: many sums of a few numbers take longer to start than to read these.
    """
    is_joined = platform().joins_sums and not is_on_mesh(x)
    return squared_norm(x, first=2 if is_joined else 1)


def _one_by_one() -> Callable[[Inexact[Array, "n ..."], Scale], Squares]:
    """`scaled_squares` for one array after the other.

    Otherwise, XLA for GPUs may form all gradients to square them together. XLA also
    runs a branch whatever its condition is if it only reads numbers and adds them,
    however many there are, but not with a barrier in it.
    """
    last: list[Array] = []

    def square(x: Array, scale: Scale) -> Squares:
        scale, *_ = in_turn([scale, *last])
        square = scaled_squares(x, scale)
        last[:] = [square.value]
        return square

    return square


def gradients_by_sites(
    example: TracedFunction,
    groups_of: Callable[[PyTree], "Groups"] | None,
    method: Method,
    is_mean: bool,
    has_moments: bool,
    direction: list | None,
    has_padding: bool,
) -> BlockGradients:
    """The sum of the gradients, clipped by their norms, or their mean if `is_mean`.

    Materialised gradients are contracted with weights, as the factors of sites are.
    Scaling them and adding them up would read them twice more. Moments, and inner
    products with a `direction`, are those of the gradients before clipping. With
    `has_padding`, an example of weight 0 has no influence beyond rounding, even if it
    is NaN.
    """
    program, contractions = plan(example, method)
    groups = None if groups_of is None else groups_of(example.tree(example.leaves))

    def one(*rows: Array) -> tuple[list, list, list]:
        outs, operands, pullback = program.linearize(example.leaves, list(rows), 1)
        return outs, operands, pullback([jnp.ones_like(outs[0])])

    def totals(
        bounds: list,
        direction: list | None,
        leaves: list,
        factors: list,
        values: list,
        weights: Array | None,
        num: int,
    ) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        of_sites = Factors(*factors, num=num, values=values)
        gradients = SiteGradients(program, contractions, of_sites, leaves)
        of_whole, of_each = {}, {}
        if has_moments:
            of_whole["moments"] = example.tree(gradients.moments(weights))
        if direction is not None:
            of_each["inner_products"] = gradients.inner_products(direction)
        clipped = Clipped([jnp.ones(num)] * len(leaves), None, None)
        if groups is not None:
            clipped = dataclasses.replace(groups, bounds=bounds).clip(
                *gradients.plain_squares(), gradients.squares
            )
            of_each["norms"] = clipped.norms
        scales, powers, is_kept = clipped.scales, [], clipped.is_kept
        if has_padding and weights is not None:
            # What is finite stays: it is the derivative with respect to the weight.
            finite = [*map(jnp.isfinite, jtu.tree_leaves(clipped.norms))]
            finite = finite or [of_sites.are_finite()]
            is_real = weights.astype(bool) | functools.reduce(jnp.logical_and, finite)
            is_kept = is_real if is_kept is None else is_kept & is_real
            scales = [jnp.where(is_real, scale, 0) for scale in scales]
        if example.is_narrow:
            # If all gradients are long or the bound is small, all scales are small.
            powers = [power_of_two(jnp.max(scale)) for scale in scales]
            scales = [s / power for s, power in safe_zip(scales, powers)]

        def sums(weights: Array | None, share: float) -> list:
            factors = [scale * share for scale in scales]
            if weights is not None:
                factors = [x * weights.astype(x.dtype) for x in factors]
            totals = gradients.weighted_sums(factors, is_kept)
            if not example.is_narrow:
                return totals
            wide = map(widened, totals)
            return [x * p.astype(x.dtype) for x, p in safe_zip(wide, powers)]

        if has_moments and groups is None:
            # The mean of the moments is that of the gradients.
            of_whole["gradient"] = jtu.tree_map(
                lambda x: x.mean if is_mean else x.mean * x.count.astype(x.mean.dtype),
                of_whole["moments"],
                is_leaf=is_summary,
            )
        else:
            of_whole["gradient"] = _total(example, sums, num, weights, is_mean)
        return of_whole, of_each

    def gradients(rows: list, weights: Array | None, bounds: list) -> Results:
        outs, *factors = jax.vmap(one, example.axes)(*rows)
        of_leaves = example.tree([*map(spec_of, example.leaves)])
        specs = lambda out: (dict.fromkeys(out[0], of_leaves), spec_of(outs[0]))
        values = program.values()
        num = outs[0].shape[0]
        bounds = [] if groups is None else groups.of_rows(bounds).bounds
        operands = (bounds, direction, example.leaves, factors, values, weights, num)
        with products_of(example.closed):
            of_whole, of_each = with_auto_axes(totals, operands, specs)
        return of_whole, {**_outputs(example, outs), **of_each}

    return gradients


# The groups of a gradient's leaves whose norms are returned: one for each leaf, or for
# each result of a function of the path and the leaf.
Norms = Literal["leaf"] | Callable[[str, Any], Hashable] | None


def checked_bound(bound: Array) -> Array:
    is_wrong = ~jnp.all(bound >= 0)
    return eqx.error_if(bound, is_wrong, "`clip_norm` must not be negative or NaN.")


def clipping_groups(
    clip_norm: PyTree,
    scale: Callable[[PyTree], PyTree] | None,
    norms: Norms,
    nan_safe: bool,
    gradient: PyTree,
) -> "Groups":
    """Groups the leaves of a gradient by `clip_norm` and by `norms`.

    The values of the leaves do not matter. Raises `ValueError` if `clip_norm` is not a
    prefix of the gradient, and `TypeError` for integers, which only a `transform`
    returns.
    """
    for path, leaf in jtu.tree_leaves_with_path(gradient):
        if not eqx.is_inexact_array(leaf):
            raise TypeError(
                "`clip_norm`, `scale`, `nan_safe` and `return_norms` need the norm of "
                "what `transform` returns, so that it must consist of real or complex "
                f"arrays; got {described(leaf)} at transform(...){jtu.keystr(path)}. "
                "Cast it to a dtype such as float32 in `transform`."
            )
    what = "a number or a PyTree prefix of the gradient, with a number or None for"
    what += " each part"
    bounds, members, first = [], [], 0
    for _, bound, part in match_prefix("clip_norm", clip_norm, gradient, what):
        num = len(jtu.tree_leaves(part))
        # Those of the examples are checked before they are cut.
        is_one = isinstance(bound, jax.Array) and bound.shape == ()
        bounds.append(checked_bound(bound) if is_one else bound)
        members.append([*range(first, first + num)])
        first += num
    treedef = jtu.tree_structure(clip_norm, is_leaf=is_none)
    if norms is None:
        return Groups(bounds, members, members, treedef, scale, nan_safe)
    leaves, treedef = jtu.tree_flatten_with_path(gradient)
    if norms == "leaf":
        returned = [[i] for i in range(len(leaves))]
        return Groups(bounds, members, returned, treedef, scale, nan_safe)
    by_name: dict[Any, list[int]] = {}
    for i, (path, leaf) in enumerate(leaves):
        by_name.setdefault(norms(jtu.keystr(path), leaf), []).append(i)
    numbers, treedef = jtu.tree_flatten(dict(safe_zip(by_name, range(len(by_name)))))
    returned = [[*by_name.values()][i] for i in numbers]
    return Groups(bounds, members, returned, treedef, scale, nan_safe)


def _sum_of(terms: list[Real[Array, "n ..."]]) -> Real[Array, " n"]:
    """The sum of some terms, and of the numbers that make up some of them."""
    rows = [x for x in terms if x.ndim > 1]
    terms = [x for x in terms if x.ndim == 1]
    if rows:
        terms.append(jnp.sum(jnp.concatenate(rows, axis=1), axis=1))
    return functools.reduce(jnp.add, terms)


@dataclasses.dataclass(frozen=True)
class Clipped:
    """The result of clipping for some examples.

    `scales` has a factor for each leaf; `is_kept` is None if all examples are kept.
    """

    scales: list[Array]
    is_kept: Array | None
    norms: PyTree


class _Norm(NamedTuple):
    """The norms of some examples: `root * 2**exponent`, of numbers of any size."""

    root: Real[Array, " n"]
    exponent: Int[Array, " n"]

    @property
    def number(self) -> Real[Array, " n"]:
        return times_two_to(self.root, self.exponent)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The leaves of a gradient in groups, each with its bound.

    - `bounds`, `members`: the bound of each group, and its leaves.
    - `returned`, `treedef`: the groups of leaves whose norms are returned, and their
        PyTree.
    - `scale`: a function from these norms to factors, in place of bounds.
    """

    bounds: list[Any]
    members: list[list[int]]
    returned: list[list[int]]
    treedef: Any
    scale: Callable[[PyTree], PyTree] | None
    nan_safe: bool

    def of_rows(self, bounds: list[Array]) -> "Groups":
        """The groups for some examples, with the bounds that each of them has."""
        rows = iter(bounds)
        of_rows = [next(rows) if np.ndim(x) else x for x in self.bounds]
        return dataclasses.replace(self, bounds=of_rows)

    @functools.cached_property
    def parts(self) -> list[list[int]]:
        """The leaves that share both groups."""
        parts: dict[tuple, list[int]] = {}
        groups = [
            {i: number for number, group in enumerate(of_all) for i in group}
            for of_all in (self.members, self.returned)
        ]
        for i in sorted(groups[0]):
            parts.setdefault((groups[0][i], groups[1][i]), []).append(i)
        return [*parts.values()]

    def clip(
        self,
        plain: list[Real[Array, "n ..."]] | None,
        flags: list[Bool[Array, ""]],
        scaled: Callable[[list[Scale]], list[Squares]],
    ) -> Clipped:
        """The factors of each leaf, for some examples.

        `plain` are the squared norms of each leaf's gradients, perhaps as sums, and
        wrong if a flag is set or a sum out of range; None if scaling is cheap.
        `scaled(scales)` are always right. The scales bring those gradients that are
        formed into range.
        """
        if plain is None:
            return self._clipped(self._added(scaled([])))
        dtypes = sorted((x.dtype for x in plain), key=lambda dtype: dtype.itemsize)
        wide = [x.astype(dtypes[-1]) for x in plain]
        totals = []
        for members in self.parts:
            total = _sum_of([wide[i] for i in members])
            totals.append(Squares(total, jnp.zeros_like(total, "int32")))
            flags.append(~jnp.all(is_in_range(total.astype(dtypes[0]))))
        arrays, treedef = jtu.tree_flatten(totals)

        def others() -> list[Array]:
            scales: dict[int, Scale] = {}
            for total, members in safe_zip(totals, self.parts):
                scales.update(dict.fromkeys(members, into_range(total.value)))
            in_order = [scales[i] for i in sorted(scales)]
            return jtu.tree_leaves(self._added(scaled(in_order)))

        # One branch for all, because the host of a GPU may wait for each.
        chosen = unless_cancelled(jnp.stack(flags), arrays, arrays, others)
        return self._clipped(jtu.tree_unflatten(treedef, chosen))

    def _added(self, squares: list[Squares]) -> list[Squares]:
        """The squared norm of each part."""
        return [sum_of_squares([squares[i] for i in part]) for part in self.parts]

    def _norms(self, squares: list[Squares], groups: list[list[int]]) -> list[_Norm]:
        """The norm of each group, from the squared norm of each part."""
        norms = []
        for group in groups:
            within = [
                square
                for square, part in safe_zip(squares, self.parts)
                if part[0] in group
            ]
            zeros = jax.tree.map(jnp.zeros_like, squares[0])
            one = [*within, zeros][0] if len(within) < 2 else sum_of_squares(within)
            # The derivative of a norm at zero is defined as zero instead of NaN.
            is_positive = one.value > 0
            root = jnp.sqrt(jnp.where(is_positive, one.value, 1))
            norms.append(_Norm(jnp.where(is_positive, root, one.value), one.exponent))
        return norms

    def _clipped(self, squares: list[Squares]) -> Clipped:
        """Factors from the squared norm of each part."""
        of_groups = self._norms(squares, self.members)
        is_same = self.returned is self.members
        of_returned = of_groups if is_same else self._norms(squares, self.returned)
        norms = self.treedef.unflatten([norm.number for norm in of_returned])
        factors = self._scaled(norms) if self.scale else self._bounded(of_groups)
        is_kept: Bool[Array, "..."] | None = None
        if self.nan_safe:
            finite = [jnp.isfinite(norm.number) for norm in of_groups]
            is_kept = functools.reduce(jnp.logical_and, finite)
            # The factor that a user's function has for NaN may be NaN, too.
            factors = [jnp.where(is_kept, x, jnp.zeros((), x.dtype)) for x in factors]
        return Clipped(factors, is_kept, norms)

    def _bounded(self, norms: list[_Norm]) -> list[Array]:
        """The factor of each leaf by which no norm is above its bound."""
        factors = {}
        for bound, members, norm in safe_zip(self.bounds, self.members, norms):
            root, exponent = norm
            factor = jnp.ones_like(root)
            if bound is not None:
                limit = jnp.asarray(bound, root.dtype)
                is_longer = norm.number > limit  # The norm itself may overflow.
                divisor = jnp.where(is_longer, root, 1)
                shorter = times_two_to(limit / divisor, -exponent)
                factor = jnp.where(is_longer, shorter, 1)
                if not self.nan_safe:
                    # One non-finite entry makes the whole gradient non-finite.
                    factor = jnp.where(jnp.isfinite(root), factor, jnp.nan)
            factors.update(dict.fromkeys(members, factor))
        return [factors[i] for i in sorted(factors)]

    def _scaled(self, norms: PyTree) -> list[Array]:
        """The factor of each leaf from the user's function."""
        assert self.scale is not None
        call = functools.partial(_called_scale, self.scale)
        factors, of_leaf = jax.vmap(call)(norms), {}
        what = "a function that returns one factor, or one for each norm that it gets"
        numbers = self.treedef.unflatten(range(len(self.returned)))
        for _, factor, part in match_prefix("scale", factors, numbers, what):
            for number in jtu.tree_leaves(part):
                of_leaf.update(dict.fromkeys(self.returned[number], factor))
        return [of_leaf[i] for i in sorted(of_leaf)]


def _called_scale(scale: Callable[[PyTree], PyTree], norms: PyTree) -> PyTree:
    factors = scale(norms)
    what = "What `scale` returns"
    check_types({what: factors}, {what: _Factors})
    return jtu.tree_map(jnp.asarray, factors)


@dataclasses.dataclass(frozen=True)
class SiteGradients:
    """Per-example gradients, represented by the factors of their sites.

    Only the types of the `leaves` matter.
    """

    program: Program
    contractions: list[Contraction]
    factors: Factors
    leaves: list

    @functools.cached_property
    def formed(self) -> dict[int, Array]:
        """The gradients that are formed for their norms and kept, by leaf."""
        return {c.leaf: self._gradients(c.leaf) for c in self.contractions if c.keeps}

    @functools.cached_property
    def products(self) -> dict[int, Squares]:
        """The norms that follow from those of factors, by leaf."""
        leaves = [
            c.leaf
            for c in self.contractions
            if c.form == "factors"
            and has_norms_of_factors(self.program.sites_of(c.leaf))
        ]
        squares = squares_of_factors([*map(self._of_leaf, leaves)])
        return dict(safe_zip(leaves, squares))

    def _of_leaf(self, leaf: int) -> OfLeaf:
        sites = self.program.sites_of(leaf)
        return OfLeaf(sites, self.factors, self.leaves[leaf])

    def _gradients(self, leaf: int) -> Array:
        return gradients(*self._of_leaf(leaf))

    def plain_squares(
        self,
    ) -> tuple[list[Real[Array, "n ..."]] | None, list[Bool[Array, ""]]]:
        """For each leaf, the squared norms, and flags, of which none must be set.

        The norms are None if all follow from those of factors.
        """
        forms = {c.form for c in self.contractions if c.leaf not in self.products}
        if forms <= {"none"}:
            return None, []
        with exact_products():  # Bounds rest on these norms.
            norms, flags = norms_unless_cancelled([*self._sums.values()])
        products = {leaf: x.number for leaf, x in self.products.items()}
        squares = self._of_leaves(lambda x, _: _plain_squares(x), norms, products)
        return squares, [*flags.values()]

    def squares(self, scales: Sequence[Scale] = ()) -> list[Squares]:
        """For each leaf, the squared norms of the per-example gradients.

        Gradients that are formed are multiplied by the scales of their leaves first, so
        that their squares are in range.
        """
        powers, scaled = [], []
        for uses in self._sums.values():
            power, of_leaf = _scaled(uses)
            powers.append(power)
            scaled.append(of_leaf)
        with exact_products():
            norms = squared_norms(scaled)

        scaled_square = _one_by_one()

        def square(x: Array, leaf: int) -> Squares:
            if scales:
                return scaled_square(x, scales[leaf])
            return squares_in_range([x])[0]

        sums = [*map(Squares, norms, powers)]
        return self._of_leaves(square, sums, self.products)

    @functools.cached_property
    def _sums(self) -> dict[int, OfLeaf]:
        """The leaves whose gradients are not formed, and are no products."""
        leaves = (c.leaf for c in self.contractions if c.form == "factors")
        return {i: self._of_leaf(i) for i in leaves if i not in self.products}

    def _of_leaves(
        self, square: Callable[[Array, int], Any], sums: list, products: dict[int, Any]
    ) -> list:
        """Squared norms for each leaf, from `square` where gradients are formed."""
        known = {**products, **dict(safe_zip(self._sums, sums))}
        for contraction in self.contractions:
            leaf, struct = contraction.leaf, self.leaves[contraction.leaf]
            if contraction.form == "none":
                known[leaf] = square(jnp.zeros(self.factors.num, struct.dtype), leaf)
            elif contraction.form != "factors":
                x = self.formed.get(leaf)
                known[leaf] = square(self._gradients(leaf) if x is None else x, leaf)
        return [known[c.leaf] for c in self.contractions]

    def moments(self, weights: Array | None) -> list[VarianceState]:
        """For each leaf, the mean and the squared distances to it, entry by entry.

        The squares of an outer product are the product of the squares of its factors.
        Where a sum of them nearly cancels with the mean, and for all other gradients,
        a few gradients are formed at a time.
        """
        num, real = self.factors.num, jnp.result_type(float)
        count = jnp.asarray(num, real) if weights is None else jnp.sum(weights)
        shares = jnp.ones(num, count.dtype) if weights is None else weights
        uses = [self._of_leaf(c.leaf) for c in self.contractions]
        with exact_products():
            sums = self.weighted_sums([shares / count] * len(uses), None)
            means = [*map(widened, sums)]
            squares = squared_distances(uses, means, shares)
        return [
            VarianceState(mean, square, count, count, mean.dtype)
            for mean, square in safe_zip(means, squares)
        ]

    def inner_products(self, direction: list) -> Real[Array, " n"]:
        """The inner products of the gradients with a direction, a list of leaves."""
        parts = [
            inner_products(self.program.sites_of(c.leaf), self.factors, x)
            for c, x in safe_zip(self.contractions, direction)
            if c.form != "none"
        ]
        dtype = widest(*(x.dtype for x in parts)) if parts else jnp.result_type(float)
        zeros = jnp.zeros(self.factors.num, dtype)
        return sum((x.astype(dtype) for x in parts), zeros)

    def weighted_sums(
        self, weights: Sequence[Real[Array, " n"]], is_kept: Array | None
    ) -> list[Inexact[Array, "..."]]:
        """For each leaf, the weighted sum of the per-example gradients.

        The `weights` are given for each leaf. Examples where `is_kept` is False are
        left out, even if their gradient is not finite.
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


def _scaled(uses: OfLeaf) -> tuple[Int[Array, " n"], OfLeaf]:
    """Factors with squares in range, for norms divided by a power of two.

    Its exponent comes first.
    """
    (sites, factors, _), separate = uses, uses.with_own_factors()
    pairs = map(separate.factors.of, separate.sites)
    operands, cotangents = safe_zip(*pairs)
    power = _common_power(cotangents)
    cotangents = [_over(d, power) for d in cotangents]
    exponent = exponent_of(power)
    if _have_size(sites, factors):
        power = _common_power(operands)
        operands = [_over(a, power) for a in operands]
        exponent += exponent_of(power)
    unit = None
    if all(map(has_weights, sites)):
        weights = [weights_of(site, factors.values) for site in sites]
        largest = [jnp.max(jnp.abs(x), initial=0) for x in weights]
        unit = common_power_of_two(largest)
        exponent += exponent_of(unit)
    others = separate.factors.operands[len(sites) :]
    scaled = factors.replaced([*operands, *others], cotangents, unit)
    return exponent, separate._replace(factors=scaled)


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
    return common_power_of_two([largest_of_each(x.array) for x in factors])


def _over(x: Factor, power: Array) -> Factor:
    return x.of(scaled_examples(x.array, 1 / power))
