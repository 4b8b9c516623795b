"""The cost of computations, and the cheapest way to gradients and their norms.

Costs depend on shapes and on the platform only.
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex

from .._base.compile import num_bytes
from .._base.jaxpr_types import Eqn, Jaxpr
from .._base.jaxprs import callee, inner_jaxprs
from .._base.platforms import platform
from .._base.primitives import name_of, PRODUCTS
from .._base.traced_function import TracedFunction
from .._base.trees import log
from .axes import Axes, axes_in, Axis, EXAMPLE, Named, OTHER_EXAMPLE
from .contract import contract_cost
from .factors import Factors
from .formed import moved, selects_rows
from .gram import gram_terms, has_gram, OfLeaf
from .program import Program
from .site import has_named_axes, Site
from .table import SiteTable
from .views import Values


# The relative cost below which sites are used: they must be cheaper, because they take
# longer to compile, or take less than half of the memory.
SITES_AT_MOST = 0.95
SMALL_SITES_AT_MOST = 1.05


# The relative cost below which gradients are kept, because they take memory.
KEPT_AT_MOST = 0.9


_EXAMPLES = {EXAMPLE, OTHER_EXAMPLE}


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a computation: floating-point operations, and bytes moved."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int | float) -> "Cost":
        return Cost(self.flops * times, self.bytes * times)

    @property
    def time(self) -> float:
        """The time that it takes, in floating-point operations."""
        return self.flops + platform().flops_per_byte * self.bytes


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The total cost of several computations, one after the other."""
    return sum(costs, Cost())


def contraction_cost(contractions: Iterable[tuple[Sequence[Named], Axes]]) -> Cost:
    """The cost of contractions, which read their factors and move intermediates."""
    total = Cost()
    for terms, out in contractions:
        present = axes_in(terms)
        flops, largest = contract_cost(terms, tuple(x for x in out if x in present))
        # Factors shared by all examples stay in the caches.
        of_examples = [x for x, axes in terms if not _EXAMPLES.isdisjoint(axes)]
        entries = sum(math.prod(x.shape) for x in of_examples) + 2 * largest
        total += Cost(flops, float(terms[0][0].dtype.itemsize * entries))
    return total


def gram_cost(uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes) -> Cost:
    """The cost of inner products of gradients by `gram`, or of their squared norms."""
    pairs = gram_terms(uses, other, example)
    return contraction_cost((terms, out) for terms, _ in pairs)


def forming_cost(sites: Sequence[Site], factors: Factors) -> Cost:
    """The cost of forming the gradients at some sites from their factors."""
    contractions = []
    for site in sites:
        site, (a, d, which) = moved(site, factors)
        own = Factors([a, which], [d], factors.outputs, values=factors.values)
        terms = own.gradient_terms(site.with_own(0, 0, 1))
        of_leaf = [axis for axis in axes_in(terms) if axis.is_of_leaf]
        contractions.append((terms, (EXAMPLE, *factors.outputs, *of_leaf)))
    return contraction_cost(contractions)


def pushed_cost(jaxpr: Jaxpr, inputs: Sequence[bool]) -> Cost:
    """The approximate cost of a jaxpr's derivative in directions of marked inputs."""
    dependent = set(itertools.compress(jaxpr.invars, inputs))
    total = Cost()
    for eqn in jaxpr.eqns:
        live = [not isinstance(x, jex.Literal) and x in dependent for x in eqn.invars]
        if not any(live):
            continue
        dependent.update(eqn.outvars)
        closed = callee(eqn)
        if closed is not None:
            total += pushed_cost(closed.jaxpr, live)
        else:
            is_product = name_of(eqn) in PRODUCTS
            total += _cost_of(eqn) * (sum(live) if is_product else 1)
    return total


def _cost_of(eqn: Eqn) -> Cost:
    """The approximate cost of an equation: of matrix products, and of its writes."""
    name = name_of(eqn)
    # Some types have neither a shape nor a dtype.
    sizes = [math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars]
    dtypes = [getattr(var.aval, "dtype", None) for var in eqn.outvars]
    widths = [getattr(dtype, "itemsize", 4) for dtype in dtypes]
    written = float(sum(map(operator.mul, sizes, widths)))
    if name in PRODUCTS:
        lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
        numbers = eqn.params["axes" if name == "ragged_dot" else "dimension_numbers"]
        if name == "ragged_dot":
            # Each row is multiplied with the matrices of all groups, and masked.
            products = math.prod(lhs[axis] for axis in numbers.contracted[0])
            products *= rhs[numbers.groups]
        elif name == "dot_general":
            products = math.prod(lhs[axis] for axis in numbers[0][0])
        else:
            # An output of a convolution sums over a kernel's inputs and positions.
            products = math.prod(rhs) / max(rhs[numbers.rhs_spec[0]], 1)
        return Cost(2.0 * products * sizes[0], written)
    inner = [total_cost(map(_cost_of, sub.eqns)) for sub in inner_jaxprs(eqn)]
    if not inner:
        return Cost(0.0, written)
    # Of a conditional, the slowest branch; of a loop, all steps.
    if name == "cond":
        return max(inner, key=lambda cost: cost.time)
    return total_cost(inner) * eqn.params.get("length", 1)


Method = Literal["auto", "sites", "materialise"]


Form = Literal["factors", "gradient", "derivative", "none"]


@dataclasses.dataclass(frozen=True)
class Contraction:
    """How per-example gradients with respect to one leaf are handled.

    - `form`: `"factors"` works with the factors of sites without forming gradients.
        `"gradient"` forms each per-example gradient from its factors. `"derivative"`
        leaves this to automatic differentiation, if there is no rule. `"none"` is for a
        leaf that the function does not use.
    - `keeps`: whether gradients of a microbatch that were formed for the norms are kept
        for the sum. Otherwise the sum takes another pass over the factors.
    - `cost`: the cost of the norm and of the share in the sum, for one example.
    """

    leaf: int
    form: Form
    keeps: bool
    cost: Cost


class FeatureCost(NamedTuple):
    """What features of one example cost for a leaf, besides what else is computed.

    - `by_factors`: from factors, or from a gradient that is formed for this alone.
    - `by_gradient`: from a gradient that is there.
    """

    by_factors: Cost = Cost()
    by_gradient: Cost = Cost()


# The cost of features of gradients, for each leaf of a program.
FeatureCosts = Callable[[SiteTable], Callable[[int], FeatureCost]]


class Planned(NamedTuple):
    """A function with its sites, and how each leaf is contracted."""

    program: Program
    contractions: list[Contraction]


def plan(
    traced: TracedFunction,
    method: Method,
    features: FeatureCosts | None = None,
    has_norms: bool = True,
) -> Planned:
    """A function with its sites, and how each leaf is contracted.

    `"sites"` chooses the cheapest contraction for each leaf, `"materialise"` leaves all
    of them to automatic differentiation, and `"auto"` chooses the cheaper of the two.
    `features` are computed, too, and norms only if `has_norms`.
    """
    if method != "materialise":
        program = Program(traced, num_outputs=1)
        contractions = choose(program, features, has_norms)
        if method == "sites" or prefers_sites(program.table, contractions, features):
            _say("sites", method, contractions)
            return Planned(program, contractions)
    program = Program(traced, use_rules=False, num_outputs=1)
    contractions = choose(program, features, has_norms)
    _say("materialise", method, contractions)
    return Planned(program, contractions)


def _say(taken: str, method: Method, contractions: list[Contraction]) -> None:
    forms = collections.Counter(contraction.form for contraction in contractions)
    counts = ", ".join(f"{form}: {num}" for form, num in sorted(forms.items()))
    log.debug("Clipping: method=%r is %r (%s).", method, taken, counts)


def choose(
    program: Program, features: FeatureCosts | None = None, has_norms: bool = True
) -> list[Contraction]:
    """The cheapest contraction for each leaf."""
    table = program.table
    one = lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype)
    factors = [*map(one, table.operands)], [*map(one, table.perturbations)]
    leaves = range(len(table.leaves))

    def norms(
        operands: Values, cotangents: Values, values: Values
    ) -> list[Cost | None]:
        factors = Factors(operands, cotangents, values=values)
        # Leaves that are alike have the same cost.
        families = [table.family(leaf) for leaf in leaves]
        of_family = {
            family: _norm_cost(table, leaf, factors)
            for family, leaf in dict(zip(families, leaves, strict=True)).items()
        }
        return [of_family[family] for family in families]

    costs: Sequence[Cost | None] = [Cost() for _ in leaves]
    if has_norms:
        costs = eqx.filter_eval_shape(norms, *factors, program.value_structs())
    nothing = lambda leaf: FeatureCost()
    of_features = map(nothing if features is None else features(table), leaves)
    return [*map(functools.partial(_choose, table), leaves, costs, of_features)]


def _norm_cost(table: SiteTable, leaf: int, factors: Factors) -> Cost | None:
    """The cost of the norm of a gradient without forming it, if it is possible."""
    sites = table.of(leaf)
    if not sites or leaf in table.fallbacks or not has_gram(sites):
        return None
    if selects_rows(sites):
        num = 2 * _num_factors(sites[0])
        return Cost(num, table.leaves[leaf].dtype.itemsize * num)
    uses = OfLeaf(sites, factors, table.leaves[leaf])
    cost = gram_cost(uses, uses, EXAMPLE, (EXAMPLE,))
    # Bounds rest on these norms, so they keep all digits.
    return Cost(platform().exact_product * cost.flops, cost.bytes)


def _choose(
    table: SiteTable, leaf: int, norm: Cost | None, features: FeatureCost
) -> Contraction:
    """The cheapest contraction, from the cost of the norm by factors."""
    struct = table.leaves[leaf]
    sites = table.of(leaf)
    if not sites:
        return Contraction(leaf, "none", False, Cost())
    size = float(math.prod(struct.shape))
    width = struct.dtype.itemsize
    if leaf in table.fallbacks:
        # The gradient is written once and read twice: for the norm and for the sum.
        forming = Cost(4 * size, 3 * width * size)
        return Contraction(leaf, "derivative", True, forming + features.by_gradient)
    factors = sum(map(_num_factors, sites))
    reading = Cost(sum(map(num_products, sites)), width * factors)
    # It is computed from the gradients with respect to the views of sites.
    num_moved = len(sites) * size + 2 * sum(map(_num_viewed, sites))
    once = reading + Cost(4 * size, width * (num_moved + 2 * size))
    twice = reading * 2 + Cost(2 * size, width * (num_moved + size))
    # Features form a few gradients at a time, unless these are kept.
    once, twice = once + features.by_gradient, twice + features.by_factors
    candidates = [Contraction(leaf, "gradient", False, twice)]
    # Gradients are kept for all leaves at the same time, so they must not be much
    # larger than what a backward pass stores anyway, and save some time.
    if size <= 2 * factors and once.time <= KEPT_AT_MOST * twice.time:
        candidates.append(Contraction(leaf, "gradient", True, once))
    if norm is not None:
        # The sum reads the factors once more.
        by_factors = norm + reading + features.by_factors
        candidates.append(Contraction(leaf, "factors", False, by_factors))
    return min(candidates, key=lambda contraction: contraction.cost.time)


def prefers_sites(
    table: SiteTable,
    contractions: list[Contraction],
    features: FeatureCosts | None = None,
) -> bool:
    """Whether the contractions are cheaper than forming all gradients by `vmap`."""
    by_sites = total_cost(contraction.cost for contraction in contractions)
    formed = num_bytes(table.leaves)
    gradients = num_bytes([table.leaves[x.leaf] for x in contractions if x.keeps])
    factors = num_bytes([*table.operands, *table.perturbations])
    is_small = gradients + factors <= formed / 2
    most = SMALL_SITES_AT_MOST if is_small else SITES_AT_MOST
    vmapped = vmapped_cost(table)
    if features is not None:
        of_leaves = map(features(table), range(len(table.leaves)))
        vmapped += total_cost(cost.by_gradient for cost in of_leaves)
    return by_sites.time <= most * vmapped.time


def vmapped_cost(table: SiteTable) -> Cost:
    """The cost of one example if `vmap` forms all its gradients."""
    total = Cost()
    viewed: set[tuple] = set()
    for leaf, struct in enumerate(table.leaves):
        size, width = float(math.prod(struct.shape)), struct.dtype.itemsize
        # The gradient is read for the norm and for the sum.
        total += Cost(4 * size, 2 * width * size)
        for site in table.of(leaf):
            # Each use adds to the gradient; in a loop, each step reads and writes it.
            steps = [loop.length for loop in site.loops if not loop.is_sliced]
            uses = 2 * math.prod(steps) if steps else 1
            total += Cost(0.0, width * size * uses)
            if site.rule.kind == "leaf":
                # The cost of forming it is not known for either method.
                continue
            # Leaves that share a site's view share its gradient.
            key = (site.perturbation, site.operand, site.rule.key)
            if key not in viewed:
                viewed.add(key)
                total += Cost(0.0, 2 * width * _num_viewed(site))
            slow = site.rule.kind == "conv_general_dilated"
            factor = platform().grouped_convolution if slow else 1.0
            total += Cost(factor * num_products(site), width * _num_factors(site))
    return total


def _num_factors(site: Site) -> float:
    """The number of entries of a site's factors in contractions."""
    return float(_size(site, site.a_axes) + _size(site, site.d_axes))


def _num_viewed(site: Site) -> float:
    """The number of entries of a site's view, if they are not entries of the leaf."""
    if has_named_axes(site):
        return 0.0
    return float(math.prod(site.view_shape))


def num_products(site: Site) -> float:
    """The FLOPs of a site's gradient for one example, or of its share in a sum."""
    return 2.0 * _size(site, {*site.a_axes, *site.d_axes})


def _size(site: Site, axes: Iterable[str]) -> int:
    return math.prod(site.sizes[name] for name in axes)
