"""Second derivatives with respect to parameters, from the sites where they enter.

`AbstractSiteMatrix` has what Hessians and Gauss-Newton matrices have in common.
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._base.compile import num_bytes
from .._base.cpu import in_opaque_branch, opaque_true
from .._base.dtypes import common_dtype, size_groups, widened
from .._base.platforms import platform
from .._base.trees import safe_zip
from .._sites.axes import Axes, axes_in, Axis, EXAMPLE, Named, Role
from .._sites.contract import contract
from .._sites.cost import contraction_cost
from .._sites.factors import Factors, scale_of, weight_terms
from .._sites.gram import has_products
from .._sites.program import Program
from .._sites.site import axes_of, has_named_axes, is_allowed, is_sum, Site
from .._sites.table import SiteTable
from .pytree import Pair, RequestedBlocks


# Pairs of leaves that are alike are contracted together if there are at least this
# many. This compiles faster.
_FEWEST_ALIKE = 3


def site_terms(
    site: Site, d: Array, a: Array | None, by_name: dict[str, Axis], *vectors: Axis
) -> tuple[Named, list[Named]]:
    """The cotangent of a site, and its operand if it has one, with their named axes.

    - `vectors`: the axis of the cotangent after that of examples, if any.
    """
    alone = dataclasses.replace(site, perturbation=0, operand=None if a is None else 0)
    operand, cotangent = Factors([a], [d], vectors).expanded(alone)
    lead = (EXAMPLE, *vectors)
    of_d = Named(cotangent.array, (*lead, *axes_named(by_name, site.d_axes)))
    if operand is None:
        return of_d, []
    x, names, token = operand.array, site.a_axes, site.rule.token
    if token is not None:
        # An index that is out of range selects no row.
        x = jax.nn.one_hot(x, site.sizes[token], dtype=jnp.float32)
        names = (*names, token)
    return of_d, [Named(x, (EXAMPLE, *axes_named(by_name, names)))]


def axes_named(by_name: dict[str, Axis], names: Sequence[str]) -> Axes:
    return tuple(by_name[name] for name in names)


Use = tuple[Site, Site]


# Cotangents and operands of one example, or of several, and what else terms need.
Kept = tuple[list, list, Any]


def uses_of(table: SiteTable, pair: Pair) -> list[Use]:
    first, second = map(table.of, pair)
    return [*itertools.product(first, second)]


def kept_of(use: Use, cotangents: list, operands: list) -> Iterator[Array | None]:
    """The cotangent and the operand of each site."""
    for site in use:
        yield cotangents[site.perturbation]
        yield None if site.operand is None else operands[site.operand]


def struct_of(x: Any, *lead: int) -> jax.ShapeDtypeStruct:
    """The type of several arrays like `x`."""
    return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)


class AbstractSiteMatrix(abc.ABC):
    """Blocks of a sum over examples of second derivatives, from those of sites.

    - `program`: the function with its sites, and `leaves` its leaves.
    - `contracted`: the sites that are contracted, if these are others.
    - `groups`: the requested pairs of leaves, grouped with those that are alike.
    - `counts_cancelled`: whether `sums` ends with a count of examples for which blocks
        lose digits.
    """

    counts_cancelled: bool = False

    def __init__(
        self, program: Program, contracted: SiteTable, requested: RequestedBlocks
    ):
        self.program, self.contracted = program, contracted
        self.leaves, self.requested = program.leaves, requested
        families = {leaf: contracted.family(leaf) for leaf in requested.leaves}
        alike: dict[Hashable, list[Pair]] = {}
        for pair in requested.pairs:
            first, second = pair
            kinds = tuple(itertools.starmap(self.kind, uses_of(self.contracted, pair)))
            key = (families[first], families[second], kinds)
            alike.setdefault(key, []).append(pair)
        self.groups: list[list[Pair]] = []
        for pairs in alike.values():
            most = platform().block_bytes * len(pairs) // max(self._num_bytes(pairs), 1)
            num = -(-len(pairs) // max(min(most, len(pairs)), 1))
            size = -(-len(pairs) // num)
            size = size if size >= _FEWEST_ALIKE else 1
            self.groups += (
                pairs[start : start + size] for start in range(0, len(pairs), size)
            )

    @abc.abstractmethod
    def kind(self, site: Site, other: Site) -> Hashable:
        """A key that is equal for pairs of sites with the same terms."""

    @abc.abstractmethod
    def of_example(self, rows: list, weight: Array | None) -> Kept:
        """The cotangents, the operands, and what else terms need of an example."""

    def sums(
        self, rows: list, axes: Sequence[int], weights: Real[Array, " n"] | None
    ) -> list[Inexact[Array, "..."]]:
        """The blocks of each group, of the (weighted) sum over the examples."""
        factors = of_examples(self.of_example, rows, axes, weights)
        return self.blocks_of(factors, self.program.values())

    @abc.abstractmethod
    def blocks_of(self, factors: Kept, values: list) -> list[Inexact[Array, "..."]]:
        """The blocks of each group, from the factors of all examples."""

    @abc.abstractmethod
    def structs(self) -> Kept:
        """The types of the factors of one example."""

    @abc.abstractmethod
    def arrays(self, use: Use, factors: Kept) -> list[Array | None]:
        """What the terms of two sites are computed from, with examples along axis 0."""

    @abc.abstractmethod
    def terms(
        self, use: Use, axes: list[dict[str, Axis]], arrays: list
    ) -> Iterator[list[Named]]:
        """Arrays to contract; the block of two sites is the sum of the contractions.

        `arrays` are those of the same method, for these sites or for any that are
        alike. `axes` are those of each site, by name.
        """

    @abc.abstractmethod
    def costs_of_factors(
        self, num: int, factors: Kept, values: list
    ) -> dict[int, float]:
        """The cost of what `num` examples need of each perturbation."""

    @property
    def bytes(self) -> int:
        """The bytes kept for one example."""
        return num_bytes(self.structs())

    def estimate(self, num: int) -> tuple[dict[int, float], dict[Pair, float]]:
        """The cost of the sums over `num` examples, which depends on shapes only.

        These are the numbers of floating-point operations for the factors of each
        perturbation, and for the contraction of each pair of leaves.
        """
        factors = jtu.tree_map(lambda x: struct_of(x, num), self.structs())

        def count(factors: Any, values: list) -> tuple[dict, dict]:
            of_factors = self.costs_of_factors(num, factors, values)
            return of_factors, self._costs(factors, values)

        values = self.program.value_structs()
        return eqx.filter_eval_shape(count, factors, values)

    def contracted_blocks(
        self, factors: Kept, values: list
    ) -> list[Inexact[Array, "pairs ..."]]:
        """The sum of the contractions of `terms`, for each group."""
        sizes = [self._num_bytes(pairs) for pairs in self.groups]
        # Smaller sums need not be computed one after the other: their terms are small
        # compared to the arrays they are computed from, which are all live until the
        # last sum is done.
        if sum(sizes) <= platform().factor_bytes:
            return [self._sum(pairs, factors, values) for pairs in self.groups]
        blocks: list[Array] = []
        for group in size_groups(sizes, least=0):
            run = lambda group=group: [
                self._sum(self.groups[i], factors, values) for i in group
            ]
            # XLA for CPUs would compute the terms of all pairs before it adds any. So
            # each group depends on a number from the previous one.
            before = blocks[-1] if blocks else self.leaves[0]
            blocks += in_opaque_branch(run, opaque_true(before.ravel()[:1]))()
        return blocks

    def _num_bytes(self, pairs: list[Pair]) -> int:
        return len(pairs) * self.requested.num_bytes(pairs[0], self.leaves)

    def _sum(self, pairs: list[Pair], factors: Kept, values: list) -> Array:
        first, second = (self.leaves[leaf] for leaf in pairs[0])
        shape = first.shape
        if not self.requested.is_diagonal:
            shape = (*shape, *second.shape)
        dtype = common_dtype(jnp.float32, first.dtype, second.dtype)
        sums = []
        for uses in safe_zip(*(uses_of(self.contracted, pair) for pair in pairs)):

            def block(arrays: list, use: Use = uses[0]) -> Array:
                blocks = (
                    self._of_leaves(use, values, contract(*term)).astype(dtype)
                    for term in self._labelled(use, arrays, values)
                )
                return functools.reduce(jnp.add, blocks, jnp.zeros(shape, dtype))

            sums.append(_over(block, [self.arrays(use, factors) for use in uses]))
        total = functools.reduce(jnp.add, sums, jnp.zeros((), dtype))
        return jnp.broadcast_to(total, (len(pairs), *shape))

    def _costs(self, factors: Kept, values: list) -> dict[Pair, float]:
        costs = {}
        for pairs in self.groups:
            # Pairs that are alike have the same cost.
            cost = contraction_cost(
                term
                for use in uses_of(self.contracted, pairs[0])
                for term in self._labelled(use, self.arrays(use, factors), values)
            )
            costs.update(dict.fromkeys(pairs, cost.time))
        return costs

    def _labelled(
        self, use: Use, arrays: list, values: list
    ) -> Iterator[tuple[list[Named], Axes]]:
        """The arrays to contract for two sites, and the axes of the results."""
        axes = [
            {
                name: axis.of_side(side) if self._is_apart(axis) else axis
                for name, axis in axes_of(site, side).items()
            }
            for side, site in enumerate(use)
        ]
        weights = [
            term
            for site, names in safe_zip(use, axes)
            for term in weight_terms(site, values, names)
        ]
        for terms in self.terms(use, axes, arrays):
            terms = [*terms, *weights]
            dtype = common_dtype(*(x.dtype for x, _ in terms))
            terms = [_without_repeats(x.astype(dtype), y) for x, y in terms]
            of_leaves = (axis for axis in axes_in(terms) if axis.is_of_leaf)
            # An axis of size 1 may be missing from all arrays; a reshape restores it.
            by_side = lambda axis: (axis.side, axis.name)
            yield terms, tuple(sorted(of_leaves, key=by_side))

    def _is_apart(self, axis: Axis) -> bool:
        """Whether blocks have an axis once for each of their two leaves."""
        if self.requested.is_diagonal:
            return axis.role is Role.VIEW
        return axis.is_of_leaf

    def _of_leaves(self, use: Use, values: list, block: Array) -> Array:
        """The block of two leaves, from the block of their sites' views."""
        site, other = use
        block = block * (scale_of(site) * scale_of(other))
        structs = [self.leaves[site.leaf], self.leaves[other.leaf]]
        views = [
            struct if has_named_axes(x) else x.view.struct(struct, values)
            for x, struct in safe_zip(use, structs)
        ]
        if self.requested.is_diagonal:
            return _diagonal_of(block, use, structs[0], views, values)
        if not has_named_axes(site):
            block = block.reshape(*views[0].shape, math.prod(views[1].shape))
            back = _transposed(site, structs[0], views[0], values)
            block = jax.vmap(back, -1, -1)(block)
        if not has_named_axes(other):
            block = block.reshape(math.prod(structs[0].shape), *views[1].shape)
            block = jax.vmap(_transposed(other, structs[1], views[1], values))(block)
        return block.reshape(*structs[0].shape, *structs[1].shape)


def _over(fun: Callable[[list], Array], arrays: list[list]) -> Array:
    """Maps `fun` over lists of arrays of equal types; what they share is not copied."""
    columns = [*safe_zip(*arrays)]
    is_shared = [all(x is column[0] for x in column) for column in columns]
    if all(is_shared):
        return fun(arrays[0])[None]
    stacked = [
        column[0] if shared else jnp.stack(column)
        for column, shared in safe_zip(columns, is_shared)
    ]
    return jax.vmap(fun, ([None if shared else 0 for shared in is_shared],))(stacked)


def of_examples(
    one: Callable[[list, Array | None], Any],
    rows: list,
    axes: Sequence[int],
    weights: Array | None,
) -> Any:
    """`one(rows, weight)` for each example, along axis 0; there may be only one."""
    if rows:
        in_axes = ([*axes], None if weights is None else 0)
        return eqx.filter_vmap(one, in_axes=in_axes)(rows, weights)
    with_axis = lambda x: x[None] if eqx.is_array(x) else x
    return jax.tree.map(with_axis, one(rows, weights))


def _diagonal_of(
    block: Array, use: Use, struct: Any, views: list, values: list
) -> Array:
    """The diagonal of a block of two sites of a leaf, in the shape of the leaf.

    Along the axes of a small view, the block is multiplied with the view's Jacobian.
    """
    is_unnamed = [not has_named_axes(x) for x in use]
    nums = [math.prod(x.shape) if y else 1 for x, y in safe_zip(views, is_unnamed)]
    of_leaf = 1 if all(is_unnamed) else math.prod(struct.shape)
    block = block.reshape(of_leaf, *nums)
    for side in (1, 0):
        view, axis = views[side], side + 1
        if is_unnamed[side]:
            back = _transposed(use[side], struct, view, values)
            seeds = jnp.eye(nums[side], dtype=view.dtype)
            directions = jax.vmap(back)(seeds.reshape(nums[side], *view.shape))
            directions = directions.reshape(nums[side], math.prod(struct.shape)).T
            block = block * jnp.expand_dims(directions, range(1, axis))
        block = jnp.sum(block, axis)
    return block.reshape(struct.shape)


def _transposed(
    site: Site, struct: Any, view: Any, values: list
) -> Callable[[Array], Array]:
    """Pulls an array back from a view of a leaf to the leaf."""
    back = site.view.transposed(struct, values)
    return lambda x: widened(back(x.astype(view.dtype)))


def _without_repeats(x: Array, axes: Axes) -> Named:
    """The diagonal of axes that are the same."""
    while len({*axes}) < len(axes):
        first, second = next(
            pair
            for pair in itertools.combinations(range(len(axes)), 2)
            if axes[pair[0]] == axes[pair[1]]
        )
        size = x.shape[first]
        x = jnp.moveaxis(x, (first, second), (-2, -1))
        x = x.reshape(*x.shape[:-2], size**2)
        # On CPUs, this is several times faster than `jnp.einsum`.
        x = lax.slice_in_dim(x, 0, size**2, size + 1, axis=-1)
        rest = [axis for i, axis in enumerate(axes) if i not in (first, second)]
        axes = (*rest, axes[first])
    return Named(x, axes)


def is_covered(
    table: SiteTable, leaf: int, requested: RequestedBlocks, counts_cancelled: bool
) -> bool:
    """Whether the requested blocks of a leaf can be computed from sites.

    With `counts_cancelled`, it must be known whether terms of its gradient cancel.
    """
    sites = table.of(leaf)
    if leaf in table.fallbacks or any(site.is_reverse for site in sites):
        return False
    if counts_cancelled and is_sum(sites) and not has_products(sites, sites):
        return False
    if requested.is_diagonal and any(site.is_coupled for site in sites):
        return False
    form = "diagonal" if requested.is_diagonal else "hessian"
    return all(is_allowed(form, site, site) for site in sites)


# Two ways take two programs. Savings of less than a fifth are not worth compiling both.
_WORTH_TWO = 0.8


def cheapest(
    table: SiteTable,
    covered: set[int],
    estimate: tuple[dict[int, float], dict[Pair, float]],
    columns: dict[int, float],
) -> set[int]:
    """The leaves to compute from sites, so that the total cost is minimal.

    `estimate` has the costs of perturbations and of pairs of leaves by sites, and
    `columns` those of leaves by products. Leaves that share a perturbation, such as a
    weight and its bias, are chosen together.
    """
    of_factors, of_pairs = estimate
    met = {leaf: {site.perturbation for site in table.of(leaf)} for leaf in covered}
    clusters: list[set[int]] = []
    for leaf in sorted(covered):
        meeting = [c for c in clusters if any(met[leaf] & met[other] for other in c)]
        clusters = [c for c in clusters if c not in meeting]
        clusters.append({leaf}.union(*meeting))

    def cost(leaves: set[int]) -> float:
        used = set().union(*(met[leaf] for leaf in leaves))
        by_sites = sum(of_factors.get(number, 0.0) for number in used)
        by_sites += sum(
            flops for pair, flops in of_pairs.items() if leaves.issuperset(pair)
        )
        return by_sites + sum(columns[i] for i in columns if i not in leaves)

    best = simplest = min(({*covered}, set[int]()), key=cost)
    for _ in clusters:
        candidates = [best ^ cluster for cluster in clusters]
        better = min(candidates, key=cost)
        if cost(better) >= cost(best):
            break
        best = better
    return best if cost(best) < _WORTH_TWO * cost(simplest) else simplest
