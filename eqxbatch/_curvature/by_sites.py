"""Second derivatives with respect to parameters, from the sites where they enter.

`AbstractSiteMatrix` has what Hessians and Gauss-Newton matrices have in common.
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree, Real

from .._base.compile import num_bytes
from .._base.cpu import computed_once, in_opaque_branch, opaque_true
from .._base.dtypes import common_dtype, size_groups, widened
from .._base.platforms import platform
from .._base.trees import safe_zip
from .._base.versions import varying
from .._batch.arguments import Leaves, Typed
from .._batch.rows import Rows
from .._sites.axes import Axes, axes_in, Axis, Named, Role
from .._sites.contract import contract
from .._sites.cost import contraction_cost
from .._sites.factors import Factors, scale_of
from .._sites.gram import has_products
from .._sites.program import Program
from .._sites.site import (
    axes_of,
    has_named_axes,
    is_allowed,
    is_sum,
    leaf_site,
    Site,
)
from .._sites.table import SiteTable
from .pytree import BlockSums, Pair, RequestedBlocks


# Pairs of leaves that are alike are contracted together if there are at least this
# many. This compiles faster.
_FEWEST_ALIKE = 3


class Use(NamedTuple):
    """A use of each of two leaves, which may be the same."""

    first: Site
    second: Site


class PairFactors(NamedTuple):
    """What the block of two sites is computed from.

    - `sides`: for each site, its own factors.
    - `curve`: the second derivatives between the two.
    """

    sides: tuple[Factors, Factors]
    curve: PyTree


def alone(site: Site) -> Site:
    """The site, among factors that are only its own."""
    return dataclasses.replace(
        site, perturbation=0, operand=None if site.operand is None else 0
    )


def struct_of(x: Typed, *lead: int) -> jax.ShapeDtypeStruct:
    """The type of several arrays like `x`."""
    return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)


class SiteCosts(NamedTuple):
    """Numbers of floating-point operations.

    - `of_factors`: for each perturbation, those for its factors.
    - `of_pairs`: for each pair of leaves, those of its contractions.
    """

    of_factors: dict[int, float]
    of_pairs: dict[Pair, float]


class AbstractSiteMatrix(abc.ABC):
    """Blocks of a sum over examples of second derivatives, from those of sites.

    - `program`: the function with its sites, and `leaves` its leaves.
    - `formed`: the leaves whose gradients are formed and take the place of factors.
    - `groups`: the requested pairs of leaves, grouped with those that are alike.
    """

    def __init__(
        self, program: Program, requested: RequestedBlocks, formed: Sequence[int] = ()
    ):
        self.program, self.formed = program, formed
        self.leaves, self.requested = program.leaves, requested
        # Pairs are alike if their leaves are, and if each of their uses has the same
        # terms. One contraction over stacked factors then has the blocks of all.
        families = {leaf: self._family(leaf) for leaf in requested.leaves}
        self._uses = {pair: self._uses_of(pair) for pair in requested.pairs}
        alike: dict[Hashable, list[Pair]] = {}
        for pair, uses in self._uses.items():
            first, second = pair
            kinds = tuple(itertools.starmap(self.kind, uses))
            key = (families[first], families[second], kinds)
            alike.setdefault(key, []).append(pair)
        self.groups: list[list[Pair]] = []
        for pairs in alike.values():
            # As many at once as have blocks of the size that the platform allows.
            most = platform().block_bytes * len(pairs) // max(self._num_bytes(pairs), 1)
            # Groups of nearly the same size, in place of full ones and a small
            # remainder.
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
    def factors(self, rows: Rows) -> Factors:
        """The factors of some examples, or of a single one.

        Their `curve` has the second derivatives that go with them.
        """

    def sums(self, rows: Rows) -> BlockSums:
        """The blocks of the (weighted) sum over the examples."""
        factors = self.factors(rows)
        return BlockSums(self.blocks_of(factors), self.num_cancelled(factors))

    @abc.abstractmethod
    def blocks_of(self, factors: Factors) -> list[Inexact[Array, "..."]]:
        """The blocks of each group, from the factors of all examples."""

    @abc.abstractmethod
    def num_cancelled(self, factors: Factors) -> Real[Array, ""] | None:
        """For how many examples blocks lose digits; None if they cannot."""

    @abc.abstractmethod
    def structs(self, num: int) -> Factors:
        """The types of the factors of `num` examples."""

    @abc.abstractmethod
    def curve_of(self, use: Use, factors: Factors) -> PyTree:
        """The second derivatives between two sites."""

    @abc.abstractmethod
    def terms(
        self, use: Use, axes: Sequence[dict[str, Axis]], pair: PairFactors
    ) -> Iterator[list[Named]]:
        """Arrays to contract; the block of two sites is the sum of the contractions.

        The factors are those of these sites, or of any that are alike. `axes` are those
        of each site, by name.
        """

    @abc.abstractmethod
    def costs_of_factors(self, num: int, factors: Factors) -> dict[int, float]:
        """The cost of what `num` examples need of each perturbation."""

    @property
    def bytes(self) -> int:
        """The bytes kept for one example."""
        return num_bytes(self.structs(1))

    def estimate(self, num: int) -> SiteCosts:
        """The cost of the sums over `num` examples, which depends on shapes only."""

        def count(factors: Factors, values: Leaves) -> SiteCosts:
            factors = dataclasses.replace(factors, values=values)
            of_factors = self.costs_of_factors(num, factors)
            return SiteCosts(of_factors, self._costs(factors))

        # Costs are read off shapes: no array is computed.
        values = self.program.value_structs()
        return eqx.filter_eval_shape(count, self.structs(num), values)

    def _uses_of(self, pair: Pair) -> list[Use]:
        """All pairs of sites of two leaves."""
        first, second = map(self._sites_of, pair)
        return [*itertools.starmap(Use, itertools.product(first, second))]

    def _sites_of(self, leaf: int) -> list[Site]:
        if leaf in self.formed:
            return [leaf_site(leaf, self.leaves[leaf], 0)]
        return self.program.table.of(leaf)

    def _family(self, leaf: int) -> Hashable:
        """A key that is equal for leaves whose factors are alike."""
        if leaf not in self.formed:
            return self.program.table.family(leaf)
        struct = self.program.table.leaves[leaf]
        return struct.shape, struct.dtype, varying(jax.typeof(struct))

    def _pair(self, use: Use, factors: Factors) -> PairFactors:
        """The factors of two sites, each in its own place."""

        def of_site(site: Site) -> Factors:
            # A Jacobian takes the place of a cotangent, with all axes of its leaf.
            if site.leaf in self.formed:
                return Factors([], [factors.jacobians[site.leaf]], factors.outputs)
            # Only what the site needs, so that pairs that are alike have equal
            # structures.
            operands = [] if site.operand is None else [factors.operands[site.operand]]
            cotangents = [factors.cotangents[site.perturbation]]
            return Factors(operands, cotangents, factors.outputs)

        first, second = map(of_site, use)
        return PairFactors((first, second), self.curve_of(use, factors))

    def contracted_blocks(self, factors: Factors) -> list[Inexact[Array, "_ ..."]]:
        """The sum of the contractions of `terms`, for each group."""
        sizes = [self._num_bytes(pairs) for pairs in self.groups]
        # Smaller sums need not be computed one after the other: their terms are small
        # compared to the arrays they are computed from, which are all live until the
        # last sum is done.
        if sum(sizes) <= platform().factor_bytes:
            return [self._sum(pairs, factors) for pairs in self.groups]
        blocks: list[Array] = []
        for group in size_groups(sizes, least=0):
            run = lambda group=group: [
                self._sum(self.groups[i], factors) for i in group
            ]
            # XLA for CPUs would compute the terms of all pairs before it adds any. So
            # each group depends on a number from the previous one.
            before = blocks[-1] if blocks else self.leaves[0]
            blocks += in_opaque_branch(run, opaque_true(before.ravel()[:1]))()
        return blocks

    def _num_bytes(self, pairs: list[Pair]) -> int:
        return len(pairs) * self.requested.num_bytes(pairs[0], self.leaves)

    def _sum(self, pairs: list[Pair], factors: Factors) -> Array:
        first, second = (self.leaves[leaf] for leaf in pairs[0])
        # A diagonal has the entries of one leaf, any other block those of both.
        shape = first.shape
        if not self.requested.is_diagonal:
            shape = (*shape, *second.shape)
        dtype = common_dtype(jnp.float32, first.dtype, second.dtype)
        sums = []
        # Leaves that are alike have their uses in the same order, so the first uses of
        # all pairs are computed at once, then the second ones.
        for uses in safe_zip(*(self._uses[pair] for pair in pairs)):

            def block(pair: PairFactors, use: Use = uses[0]) -> Array:
                blocks = (
                    self._of_leaves(use, factors.values, contract(*term)).astype(dtype)
                    for term in self._labelled(use, pair, factors)
                )
                return functools.reduce(jnp.add, blocks, jnp.zeros(shape, dtype))

            sums.append(_over(block, [self._pair(use, factors) for use in uses]))
        total = functools.reduce(jnp.add, sums, jnp.zeros((), dtype))
        # One block stands for all if these share their factors, and zero for no use at
        # all.
        return jnp.broadcast_to(total, (len(pairs), *shape))

    def _costs(self, factors: Factors) -> dict[Pair, float]:
        costs = {}
        for pairs in self.groups:
            # Pairs that are alike have the same cost.
            cost = contraction_cost(
                term
                for use in self._uses[pairs[0]]
                for term in self._labelled(use, self._pair(use, factors), factors)
            )
            costs.update(dict.fromkeys(pairs, cost.time))
        return costs

    def _labelled(
        self, use: Use, pair: PairFactors, factors: Factors
    ) -> Iterator[tuple[list[Named], Axes]]:
        """The arrays to contract for two sites, and the axes of the results.

        The `factors` are those of all sites, which have the weights of leaves.
        """
        # A block has the axes of each of its leaves, so the same axis has a name for
        # each side.
        axes = [
            {
                name: axis.of_side(side) if self._is_apart(axis) else axis
                for name, axis in axes_of(site, side).items()
            }
            for side, site in enumerate(use)
        ]
        # Entries of a leaf may be multiplied on the way to a site, as by a mask.
        weights = [
            term
            for site, names in safe_zip(use, axes)
            for term in factors.weights(site, names)
        ]
        for terms in self.terms(use, axes, pair):
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

    def _of_leaves(self, use: Use, values: Leaves, block: Array) -> Array:
        """The block of two leaves, from the block of their sites' views."""
        site, other = use
        # Numbers that multiply a whole site are not in its factors.
        block = block * (scale_of(site) * scale_of(other))
        structs = [self.leaves[site.leaf], self.leaves[other.leaf]]
        # Where the axes of a view are those of its leaf, so are those of the block. Any
        # other view is pulled back: along its own axes, once for each entry of the
        # other side.
        views = [
            struct if has_named_axes(x) else x.view.struct(struct, values)
            for x, struct in safe_zip(use, structs)
        ]
        if self.requested.is_diagonal:
            return _diagonal_of(block, use, structs[0], views, values)
        if not has_named_axes(site):
            block = block.reshape(*views[0].shape, math.prod(views[1].shape))
            back = _pulled_to_leaf(site, structs[0], views[0], values)
            block = jax.vmap(back, -1, -1)(block)
        # Those of the first leaf are in front now, whichever way they came there.
        if not has_named_axes(other):
            block = block.reshape(math.prod(structs[0].shape), *views[1].shape)
            block = jax.vmap(_pulled_to_leaf(other, structs[1], views[1], values))(
                block
            )
        return block.reshape(*structs[0].shape, *structs[1].shape)


def _over(fun: Callable[[PairFactors], Array], pairs: list[PairFactors]) -> Array:
    """Maps `fun` over factors of equal types; what they share is not copied."""
    # What pairs share is the same traced array in all, such as the curvature of a loss.
    treedef = jtu.tree_structure(pairs[0])
    columns = [*safe_zip(*map(jtu.tree_leaves, pairs))]
    is_shared = [all(x is column[0] for x in column) for column in columns]
    if all(is_shared):
        return fun(pairs[0])[None]
    # Without an axis of pairs, what is shared is computed with once.
    stacked = [
        column[0] if shared else computed_once(jnp.stack(column))
        for column, shared in safe_zip(columns, is_shared)
    ]
    of_arrays = lambda arrays: fun(jtu.tree_unflatten(treedef, arrays))
    axes = [None if shared else 0 for shared in is_shared]
    return jax.vmap(of_arrays, (axes,))(stacked)


def _diagonal_of(
    block: Array, use: Use, struct: Any, views: Leaves, values: Leaves
) -> Array:
    """The diagonal of a block of two sites of a leaf, in the shape of the leaf.

    Along the axes of a small view, the block is multiplied with the view's Jacobian.
    """
    # The axes of the block: entries of the leaf, the first view, the second view. A
    # view that has named axes is among the former, and has size 1 here.
    is_unnamed = [not has_named_axes(x) for x in use]
    nums = [math.prod(x.shape) if y else 1 for x, y in safe_zip(views, is_unnamed)]
    of_leaf = 1 if all(is_unnamed) else math.prod(struct.shape)
    block = block.reshape(of_leaf, *nums)
    # The last axis goes first, so that the other one keeps its number.
    for side in (1, 0):
        view, axis = views[side], side + 1
        if is_unnamed[side]:
            back = _pulled_to_leaf(use[side], struct, view, values)
            # The Jacobian of the view, with one pullback for each of its few entries.
            seeds = jnp.eye(nums[side], dtype=view.dtype)
            directions = jax.vmap(back)(seeds.reshape(nums[side], *view.shape))
            directions = directions.reshape(nums[side], math.prod(struct.shape)).T
            block = block * jnp.expand_dims(directions, range(1, axis))
        block = jnp.sum(block, axis)
    return block.reshape(struct.shape)


def _pulled_to_leaf(
    site: Site, struct: Any, view: Any, values: Leaves
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
        # Entry (i, i) of two axes is entry `i * (size + 1)` of the single one.
        size = x.shape[first]
        x = jnp.moveaxis(x, (first, second), (-2, -1))
        x = x.reshape(*x.shape[:-2], size**2)
        # On CPUs, this is several times faster than `jnp.einsum`.
        x = lax.slice_in_dim(x, 0, size**2, size + 1, axis=-1)
        remaining = [x for i, x in enumerate(axes) if i not in (first, second)]
        axes = (*remaining, axes[first])
    return Named(x, axes)


def is_covered(
    table: SiteTable, leaf: int, requested: RequestedBlocks, counts_cancelled: bool
) -> bool:
    """Whether the requested blocks of a leaf can be computed from sites.

    With `counts_cancelled`, it must be known whether terms of its gradient cancel.
    """
    sites = table.of(leaf)
    # Factors are differentiated in forward mode.
    if leaf in table.fallbacks or any(site.is_reverse for site in sites):
        return False
    # Cancellation is told by norms, which are inner products of factors.
    if counts_cancelled and is_sum(sites) and not has_products(sites, sites):
        return False
    # A diagonal has the second derivatives of an elementwise view only.
    if requested.is_diagonal and any(site.is_coupled for site in sites):
        return False
    form = "diagonal" if requested.is_diagonal else "hessian"
    return all(is_allowed(form, site, site) for site in sites)


# Two ways take two programs. Savings of less than a fifth are not worth compiling both.
_WORTH_TWO = 0.8


def cheapest(
    table: SiteTable,
    covered: set[int],
    estimate: SiteCosts,
    columns: dict[int, float],
) -> set[int]:
    """The leaves to compute from sites, so that the total cost is minimal.

    `columns` has the costs of leaves by products. Leaves that share a perturbation,
    such as a weight and its bias, are chosen together.
    """
    # The factors of a perturbation are paid for once, whoever uses them.
    met = {leaf: {site.perturbation for site in table.of(leaf)} for leaf in covered}
    clusters: list[set[int]] = []
    for leaf in sorted(covered):
        meeting = [c for c in clusters if any(met[leaf] & met[other] for other in c)]
        clusters = [c for c in clusters if c not in meeting]
        clusters.append({leaf}.union(*meeting))

    # The columns of a leaf have its blocks with all other leaves, so sites pay only for
    # pairs of two of theirs.
    def cost(leaves: set[int]) -> float:
        used = set().union(*(met[leaf] for leaf in leaves))
        by_sites = sum(estimate.of_factors.get(number, 0.0) for number in used)
        by_sites += sum(
            flops
            for pair, flops in estimate.of_pairs.items()
            if leaves.issuperset(pair)
        )
        return by_sites + sum(columns[i] for i in columns if i not in leaves)

    # There are too many subsets to try them all. From all or none, move one cluster at
    # a time to the other side, as long as that is cheaper.
    best = simplest = min(({*covered}, set[int]()), key=cost)
    for _ in clusters:
        candidates = [best ^ cluster for cluster in clusters]
        better = min(candidates, key=cost)
        if cost(better) >= cost(best):
            break
        best = better
    return best if cost(best) < _WORTH_TWO * cost(simplest) else simplest
