"""Inner products in a damped Kronecker metric, as sums of products of factors.

In the eigenbasis of two factors with eigenvalues `x` and `y`, the metric is the table
`1 / (x y + damping)`. Scale both to `a` and `b` with `a b = x y / damping`. With
`w = (a + t) / (1 - a t)` and `v = (1 - b t) / (b + t)`,

    damping / (x y + damping) = 1 / (1 + a b)
                              = (1 + t^2) / ((1 - a t) (b + t)) * 1 / (w + v).

For any nodes `w_1, ..., w_r`, let `m_j(w)` be the product of `(w - w_i) / (w + w_i)`
over `i <= j`. Then

    1 / (w + v) - sum_j 2 w_j m_{j-1}(w) m_{j-1}(v) / ((w + w_j) (v + w_j))
        = m_r(w) m_r(v) / (w + v),

because `2 w_j (w + v) / ((w + w_j) (v + w_j)) = 1 - m(w) m(v)` for each factor `m`.
Each summand is a product of a function of `x` and one of `y`, and the error of each
entry, relative to the entry, is `m_r(w) m_r(v)`. The angle whose tangent is `t` is such
that `w` and `v` are in one interval `[q, 1 / q]`; Zolotarev's nodes are best there, and
`r` grows as `log(16 (1 + x y / damping)) log(4 / eps) / pi^2`. In ascending order, the
summands hardly cancel. Nodes need few digits, as the identity holds for any.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Integer, PyTree, Real

from .._base.branches import is_any
from .._base.dtypes import common_dtype, widened
from .._base.mesh import vary_as, zeros_like
from .._base.trees import safe_zip
from .._curvature.spectrum import DampedProduct
from .._sites.axes import Axes, Axis, EXAMPLE
from .._sites.cost import Cost, gram_cost
from .._sites.factors import Factor
from .._sites.gram import gram, OfLeaf, SquaredNorms
from .._sites.inner_product import AbstractInnerProduct
from .eigenvalue_table import scaled, TableProduct


# A largest eigenvalue of a usual metric, over its damping. It counts in costs only.
_USUAL = 1e3


# Terms that one branch computes or skips.
_CHUNK = 16


class Scales(eqx.Module):
    """How eigenvalues are mapped to `rows` and `columns` of one interval, see above.

    - `sizes`: the eigenvalues that become 1, or -1.
    - `tops`: what `a` and `b` are then.
    - `shift`: the tangent `t`.
    - `scale`: the root of `(1 + t^2) / damping`.
    - `span`: the logarithm of the largest number in the interval.
    """

    sizes: tuple[Array, Array]
    tops: tuple[Array, Array]
    shift: Real[Array, "batch 1"]
    scale: Real[Array, "batch 1"]
    span: Real[Array, "batch 1"]


class SeparableProduct(AbstractInnerProduct):
    """The inner product in a metric whose eigenvalues are damped products.

    Gradients are in its eigenbasis.

    - `table`: the eigenvalues as a table, which small layers multiply by.
    """

    damped: DampedProduct
    scales: Scales
    table: TableProduct

    def gram(
        self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes
    ) -> Inexact[Array, "..."]:
        if self._prefers_table(uses, other, example, out):
            return self.table.gram(uses, other, example, out)
        return _sum_of_terms(
            *(self.damped, self.scales),
            lambda *scales: gram(scaled(uses, *scales), other, example, out),
            _cotangents(uses) + _cotangents(other),
        )

    def squares(self, uses: OfLeaf) -> SquaredNorms:
        out = (EXAMPLE, *uses.factors.outputs)
        if self._prefers_table(uses, uses, EXAMPLE, out):
            return self.table.squares(uses)
        # If no two terms met, the norm would be a sum of squares of entries, of which a
        # summand scales each once, as it scales one of two equal sides.
        squared = _squared(uses)

        def term(*scales: Array) -> tuple[Array, Array]:
            total = gram(scaled(uses, *scales), uses, EXAMPLE, out)
            return total, _sum_of_entries(scaled(squared, *scales))

        sums = _sum_of_terms(self.damped, self.scales, term, _cotangents(uses))
        total, apart = sums
        # Summands have both signs, so that rounding may leave less than 0.
        return SquaredNorms(jnp.maximum(total, 0), jnp.maximum(apart, 0))

    def coordinates(self, jacobian: Factor) -> Factor:
        return self.table.coordinates(jacobian)

    def cost(self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes) -> Cost:
        by_table = self.table.cost(uses, other, example, out)
        by_terms = self._cost_of_terms(uses, other, example, out)
        return min(by_table, by_terms, key=lambda cost: cost.time)

    @property
    def num_terms(self) -> int:
        """How many plain products of factors take about the same time as the sum."""
        if self.damped.power == 1:
            return 2
        # As in `_cauchy`, for a spectrum that is not known before the program runs.
        span = 2 * math.asinh(math.sqrt(_USUAL)) + math.log(4)
        return math.ceil(_rate(self.damped.outputs.dtype) * span)

    def _prefers_table(
        self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes
    ) -> bool:
        by_terms = self._cost_of_terms(uses, other, example, out)
        return self.table.cost(uses, other, example, out).time < by_terms.time

    def _cost_of_terms(
        self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes
    ) -> Cost:
        return gram_cost(uses, other, example, out) * self.num_terms


def _cotangents(uses: OfLeaf) -> list[Array]:
    return [x.array for x in uses.factors.cotangents if x is not None]


def _squared(uses: OfLeaf) -> OfLeaf:
    """The leaf with the squares of the entries of its factors."""
    factors = uses.factors
    operands, cotangents = (
        [None if x is None else x.of(jnp.square(widened(x.array))) for x in group]
        for group in (factors.operands, factors.cotangents)
    )
    return uses._replace(factors=factors.replaced(operands, cotangents))


def _sum_of_entries(uses: OfLeaf) -> Real[Array, "n *outputs"]:
    """The sum of all entries of the gradients."""
    # Of `d a^T`, it is `sum(d) sum(a)`.
    total: Any = 0
    for site in uses.sites:
        a, d, _ = uses.factors.of(site)
        assert a is not None
        x, y = (
            jnp.sum(factor.array if factor.has_examples else factor.array[None], -1)
            for factor in (d, a)
        )
        y = jnp.expand_dims(y, range(1, 1 + len(uses.factors.outputs)))
        total += jnp.sum(x * y, axis=(-2, -1))
    return total


def _sum_of_terms(
    damped: DampedProduct,
    scales: Scales,
    fun: Callable[[Array, Array], PyTree[Array]],
    arrays: list[Array],
) -> PyTree[Array]:
    """The sum of `fun` of scales of rows and columns, whose products are the metric.

    `arrays` are those that `fun` depends on.
    """
    rows, columns, damping = damped.outputs, damped.inputs, damped.damping
    # `x y + damping * 1` itself has two terms.
    if damped.power == 1:
        added = jnp.broadcast_to(damping, rows.shape)
        terms = fun(rows, columns), fun(added, jnp.ones_like(columns))
        return jax.tree.map(jnp.add, *terms)
    table = _cauchy(damped, scales)

    # What is not kept is computed again where a derivative needs it.
    @jax.checkpoint
    def add(state: tuple, node: Array) -> tuple:
        # `of_rows` and `of_columns` hold `m(w)` and `m(v)` for the nodes so far.
        total, of_rows, of_columns = state
        root = jnp.sqrt(2 * node)
        below, above = table.rows + node, table.columns + node
        term = fun(of_rows * (root / below), of_columns * (root / above))
        return (
            jax.tree.map(jnp.add, total, term),
            of_rows * ((table.rows - node) / below),
            of_columns * ((table.columns - node) / above),
        )

    def step(state: tuple, x: tuple) -> tuple[tuple, None]:
        number, node = x
        is_needed = is_any(number < table.num)
        return lax.cond(is_needed, add, lambda state, _: state, state, node), None

    def chunk(state: tuple, xs: tuple) -> tuple[tuple, None]:
        # How many terms there are is known at run time; most chunks have none.
        steps = lambda state: lax.scan(step, state, xs)[0]
        is_needed = is_any(xs[0][0] < table.num)
        return lax.cond(is_needed, steps, lambda state: state, state), None

    # Zeros of what `fun` returns, and the empty product.
    structs = eqx.filter_eval_shape(fun, table.of_rows, table.of_columns)
    state = jax.tree.map(zeros_like, structs), table.of_rows, table.of_columns
    varying = [*arrays, *jax.tree.leaves((damped, scales))]
    num_chunks = math.ceil(_most_terms(rows.dtype) / _CHUNK)
    numbers = jnp.arange(num_chunks * _CHUNK, dtype="int32")
    nodes = table.nodes(numbers)
    xs = [x.reshape(num_chunks, _CHUNK, *x.shape[1:]) for x in (numbers, nodes)]
    # In `jax.shard_map`, a carry must vary over all axes of the mesh that terms vary
    # over.
    return lax.scan(chunk, vary_as(varying, state), tuple(xs))[0][0]


class _Cauchy(NamedTuple):
    """The table `of_rows * of_columns / (rows + columns)`, which is a metric.

    - `span`: that of its `Scales`.
    - `num`: the number of terms.
    """

    rows: Inexact[Array, "batch rows"]
    columns: Inexact[Array, "batch columns"]
    of_rows: Inexact[Array, "batch rows"]
    of_columns: Inexact[Array, "batch columns"]
    span: Real[Array, "batch 1"]
    num: Integer[Array, ""]

    def nodes(self, numbers: Integer[Array, " terms"]) -> Real[Array, "terms batch 1"]:
        """Zolotarev's nodes with some numbers, in ascending order.

        These are values of the elliptic function dn, as for a large span. Those with
        numbers above `num` do not matter.
        """
        # The quarter period `K` for an interval of length `2 * span` in logarithms.
        span = self.span[None]
        quarter = 2 * span + math.log(4)
        share = (2 * (self.num - numbers) - 1) / (2 * self.num)
        share = jnp.maximum(share.astype(span.dtype), 0)[:, None, None]
        # `dn(u)` is the sum of `sech(u - 2 i K)`, of which two count for `u` from 0 to
        # `K`; no exponential of these overflows.
        place = quarter * share
        first = 1 / (1 + jnp.exp(-2 * place))
        mirrored = 1 / (1 + jnp.exp(2 * place - 4 * quarter))
        second = jnp.exp(2 * (place - quarter)) * mirrored
        return 2 * jnp.exp(span - place) * (first + second)


def _cauchy(damped: DampedProduct, scales: Scales) -> _Cauchy:
    shift, span = scales.shift, scales.span
    # `a` and `b`: eigenvalues of these sizes become `tops`.
    both = safe_zip((damped.outputs, damped.inputs), scales.sizes, scales.tops)
    a, b = (x / size * top for x, size, top in both)
    below, above = 1 - a * shift, b + shift
    # As many terms as the longest interval needs. Where a span is not finite, the
    # result is not, either.
    num = jnp.ceil(jnp.max(2 * span + math.log(4)) * _rate(span.dtype))
    return _Cauchy(
        (a + shift) / below,
        (1 - b * shift) / above,
        scales.scale / below,
        scales.scale / above,
        span,
        jnp.where(jnp.isfinite(num), num, 1).astype("int32"),
    )


# The smallest damping over the largest product of eigenvalues. Less changes nothing if
# no product is that small, and is not in range otherwise.
_LEAST = 2.0**-120


# The largest span that follows, where products are close to minus the damping.
_LONGEST = 114 * math.log(2)


def _rate(dtype: Any) -> float:
    """The number of terms for each unit of the span, for the rounding of a dtype."""
    return math.log(4 / float(jnp.finfo(dtype).eps)) / math.pi**2


def _most_terms(dtype: Any) -> int:
    return math.ceil(_rate(dtype) * (2 * _LONGEST + math.log(4)))


def scales_of(products: Sequence[DampedProduct]) -> list[Scales]:
    """The scales for several metrics, whose few numbers are computed together."""
    if not products:
        return []
    # The table is the same for any scale and shift, so that these have no derivative.
    fixed = lax.stop_gradient
    # The ends of all spectra, `[matrices of all products, 1]` for each side.
    sides = [(x.outputs, x.inputs) for x in products]
    dtype = common_dtype(*(x.dtype for side in sides for x in side))
    ends_of = [[(_ends(fixed(x))) for x in side] for side in safe_zip(*sides)]
    joined = lambda arrays: jnp.concatenate([x.astype(dtype) for x in arrays])
    ends = [tuple(map(joined, safe_zip(*side))) for side in ends_of]
    ones = [jnp.ones((len(x.outputs), 1), dtype) for x in products]
    damping = joined([x.damping * one for x, one in safe_zip(products, ones)])
    # Two negative factors have a positive product.
    is_flipped = functools.reduce(jnp.logical_and, (low < -high for low, high in ends))
    # What is far below the damping may have any unit, and one that does not overflow.
    floor = jnp.sqrt(fixed(damping)) * 2.0**-50
    sizes = [jnp.maximum(jnp.maximum(high, -low), floor) for low, high in ends]
    sizes = [jnp.where(size == 0, 1, size) for size in sizes]
    # From here on, the largest eigenvalue of each side is 1, and `share` the damping.
    lows = [
        jnp.where(is_flipped, -high, low) / size
        for (low, high), size in safe_zip(ends, sizes)
    ]
    share = damping / sizes[0] / sizes[1]
    least = math.prod(jnp.maximum(low, 0) for low in lows)
    # A damping that is raised is noticed where a product is as small. Its derivative is
    # that of what it was.
    is_lost = (share < _LEAST) & (least < _LEAST / jnp.finfo(dtype).eps)
    share = share + fixed(jnp.maximum(share, _LEAST) - share)

    # Tangents of angles: of the ends of the interval that has both, and of the shift.
    top = 1 / jnp.sqrt(fixed(share))
    other = 1 / (share * top)
    bottom = -jnp.minimum(jnp.minimum(lows[0] * top, lows[1] * fixed(other)), 0)
    first = 1 / (top + jnp.sqrt(1 + top**2))
    second = bottom / (1 + jnp.sqrt(1 + bottom**2))
    shift = (first + second) / (1 - first * second)
    smallest = (first - second) / (1 + first * second)
    span = jnp.maximum(-jnp.log(smallest), 1)

    # A metric that is not positive definite, or out of range, is NaN in place of wrong.
    is_known = (smallest > 0) & ~is_lost & (span <= _LONGEST)
    # The root of the damping, by roots because the product of sizes may overflow.
    root = jnp.sqrt(share) * jnp.sqrt(sizes[0]) * jnp.sqrt(sizes[1])
    scale = jnp.where(is_known, jnp.sqrt(1 + shift**2), jnp.nan) / root
    sizes = [jnp.where(is_flipped, -size, size) for size in sizes]
    stacked = Scales((sizes[0], sizes[1]), (top, other), shift, scale, span)
    # Each product gets the rows of its matrices, in its own dtype.
    results, end = [], 0
    for x in products:
        start, end = end, end + len(x.outputs)
        take = lambda y, rows=slice(start, end), of=x: y[rows].astype(of.outputs.dtype)
        results.append(jax.tree.map(take, stacked))
    return results


def _ends(x: Inexact[Array, "batch entries"]) -> tuple[Array, Array]:
    """The smallest and the largest entry for each matrix."""
    return jnp.min(x, 1, keepdims=True), jnp.max(x, 1, keepdims=True)
