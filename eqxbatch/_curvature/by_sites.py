"""Second derivatives with respect to parameters, from the sites where they enter.

With `d` the cotangent of a site's output `y = w(a)`, the gradient with respect to `w`
is `d a`. A second parameter that enters at `y' = w'(a')` changes `d` (and `a`, if the
first site comes later) only through `y'`. So the second derivatives of one example are

    (∂d/∂z') a a' + d (∂a/∂z') a' + d' (∂a'/∂z) a,

for small perturbations `z` of `y` and `z'` of `y'`. These have few entries compared to
the parameters. Only the products with the operands, summed over all examples, are as
large as the Hessian.

`AbstractSiteMatrix` has what Hessians and Gauss-Newton matrices have in common.

For the generalised Gauss-Newton matrix, let `d` be the cotangents of a site's output,
one for each entry `o` of the function's output. The Jacobian with respect to the site's
parameter is `d a`, and the matrix is a sum over pairs of sites of
`a d (∂²loss/∂o∂p) d' a'`. It is contracted like a Hessian, with
`d (∂²loss/∂o∂p) d'` instead of second derivatives.

If the Jacobian is a sum over uses of a parameter or over positions, it is formed first:
its terms may nearly cancel, and products of pairs of them would be much larger than
their sum.

Where an output is computed entry by entry from the output of a layer, as from that of
the last one, `d` is zero unless both entries are the same. All others are found with a
vector of ones, in place of one vector for each entry.
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
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import common_dtype, size_groups, widened
from .._base.jaxprs import (
    callee,
    depends,
    full_varying_as,
    LINEAR_IN_ALL,
    name_of,
    run_jaxpr,
    with_trait,
)
from .._base.mesh import vary_as
from .._base.platforms import in_opaque_branch, num_bytes, opaque_true, platform
from .._base.trees import safe_zip
from .._sites.cost import contraction_cost, forming_cost, num_products, pushed_cost
from .._sites.factors import (
    contract,
    EXAMPLE,
    Factors,
    gradients,
    Labels,
    scale_of,
    Term,
    weight_terms,
)
from .._sites.gram import cancels, has_products, OfLeaf
from .._sites.shared import evaluated, Node
from .._sites.site import has_named_axes, is_allowed, is_sum, Label, labels_of, Site
from .._sites.trace import Program
from .columns import hessian_products, images, one_hot_seeds, replaced
from .pytree import Pair, RequestedBlocks


# Pairs of leaves that are alike are contracted together if there are at least this
# many. This compiles faster.
_FEWEST_ALIKE = 3


def site_terms(
    site: Site, d: Array, a: Array | None, labels: dict[str, Label], *vectors: Label
) -> tuple[Term, list[Term]]:
    """The cotangent of a site, and its operand if it has one, with their named axes.

    - `vectors`: the label of the axis of the cotangent after that of examples, if any.
    """
    alone = dataclasses.replace(site, perturbation=0, operand=None if a is None else 0)
    operand, cotangent = Factors([a], [d], vectors).expanded(alone)
    lead = (EXAMPLE, *vectors)
    of_d = cotangent.array, (*lead, *named_labels(labels, site.d_axes))
    if operand is None:
        return of_d, []
    x, names, token = operand.array, site.a_axes, site.rule.token
    if token is not None:
        # An index that is out of range selects no row.
        x = jax.nn.one_hot(x, site.sizes[token], dtype=jnp.float32)
        names = (*names, token)
    return of_d, [(x, (EXAMPLE, *named_labels(labels, names)))]


def named_labels(labels: dict[str, Label], names: Sequence[str]) -> Labels:
    return tuple(labels[name] for name in names)


Use = tuple[Site, Site]

# Cotangents and operands of one example, or of several, and what else terms need.
Kept = tuple[list, list, Any]


def _uses(program: Program, pair: Pair) -> list[Use]:
    first, second = map(program.sites_of, pair)
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
        self, program: Program, contracted: Program, requested: RequestedBlocks
    ):
        self.program, self.contracted = program, contracted
        self.leaves, self.requested = program.leaves, requested
        families = {leaf: contracted.family(leaf) for leaf in requested.leaves}
        alike: dict[Hashable, list[Pair]] = {}
        for pair in requested.pairs:
            first, second = pair
            kinds = tuple(itertools.starmap(self.kind, _uses(self.contracted, pair)))
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
        self, use: Use, labels: list[dict[str, Label]], arrays: list
    ) -> Iterator[list[Term]]:
        """Arrays to contract; the block of two sites is the sum of the contractions.

        `arrays` are those of the same method, for these sites or for any that are
        alike. `labels` are those of the named axes of each site.
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
        for uses in safe_zip(*(_uses(self.contracted, pair) for pair in pairs)):

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
                for use in _uses(self.contracted, pairs[0])
                for term in self._labelled(use, self.arrays(use, factors), values)
            )
            costs.update(dict.fromkeys(pairs, cost.time))
        return costs

    def _labelled(
        self, use: Use, arrays: list, values: list
    ) -> Iterator[tuple[list[Term], Labels]]:
        """The arrays to contract for two sites, and the axes of the results."""
        labels = [
            {
                name: _of_side(label, side)
                if label[0] == "view" or not self.requested.is_diagonal
                else label
                for name, label in labels_of(site, side).items()
            }
            for side, site in enumerate(use)
        ]
        weights = [
            term
            for site, names in safe_zip(use, labels)
            for term in weight_terms(site, values, names)
        ]
        for terms in self.terms(use, labels, arrays):
            terms = [*terms, *weights]
            dtype = common_dtype(*(x.dtype for x, _ in terms))
            terms = [_without_repeats(x.astype(dtype), y) for x, y in terms]
            present = {label for _, axes in terms for label in axes}
            # An axis of size 1 may be missing from all arrays; a reshape restores it.
            yield terms, tuple(sorted(filter(_is_of_leaf, present), key=_key))

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


def _of_side(label: Label, side: int) -> Label:
    return ((label[0], side), label[1]) if label[0] in ("leaf", "view") else label


def _is_of_leaf(label: Label) -> bool:
    kind = label[0]
    return kind in ("leaf", "view") or isinstance(kind, tuple)


def _key(label: Label) -> tuple[int, int]:
    kind, axis = label
    return (kind[1] if isinstance(kind, tuple) else -1), axis


def _without_repeats(x: Array, labels: Labels) -> Term:
    """The diagonal of axes that have the same label."""
    while len({*labels}) < len(labels):
        first, second = next(
            pair
            for pair in itertools.combinations(range(len(labels)), 2)
            if labels[pair[0]] == labels[pair[1]]
        )
        size = x.shape[first]
        x = jnp.moveaxis(x, (first, second), (-2, -1))
        x = x.reshape(*x.shape[:-2], size**2)
        # On CPUs, this is several times faster than `jnp.einsum`.
        x = lax.slice_in_dim(x, 0, size**2, size + 1, axis=-1)
        rest = [label for i, label in enumerate(labels) if i not in (first, second)]
        labels = (*rest, labels[first])
    return x, labels


def is_covered(
    program: Program, leaf: int, requested: RequestedBlocks, counts_cancelled: bool
) -> bool:
    """Whether the requested blocks of a leaf can be computed from sites.

    With `counts_cancelled`, it must be known whether terms of its gradient cancel.
    """
    sites = program.sites_of(leaf)
    if leaf in program.fallbacks or any(site.is_reverse for site in sites):
        return False
    if counts_cancelled and is_sum(sites) and not has_products(sites, sites):
        return False
    if requested.is_diagonal and any(site.is_coupled for site in sites):
        return False
    form = "diagonal" if requested.is_diagonal else "hessian"
    return all(is_allowed(form, site, site) for site in sites)


# The maximal number of programs in which derivatives are taken. Each contains what
# comes after its first perturbation, so more programs compute less, but take longer to
# compile.
_MOST_PUSHES = 3


class SiteHessian(AbstractSiteMatrix):
    """Blocks of the Hessian of a sum over examples, from the sites of its leaves.

    The first output of the `program` is summed. The cotangents and operands of one
    example are a function of perturbations, which is traced once. The trace shows which
    values depend on which perturbation and what their derivatives cost, and it is what
    runs.

    - `changes`: pairs of a perturbation and a cotangent or operand that depends on it,
        among those that sites need.
    - `pushes`: for each program in which derivatives are taken, its perturbations, and
        what they change: indices of cotangents, then those of operands.
    """

    def __init__(
        self,
        program: Program,
        requested: RequestedBlocks,
        *,
        checkpoint: bool,
        counts_cancelled: bool,
    ):
        self._closed = _perturbed_gradient(program, checkpoint)
        jaxpr = self._closed.jaxpr
        needed = {
            (z, i)
            for pair in requested.pairs
            for use in _uses(program, pair)
            for z, i in _keys(program, use)
            if i is not None
        }
        depend = {
            z: depends(jaxpr, [i == z for i, _ in enumerate(jaxpr.invars)])
            for z in sorted({z for z, _ in needed})
        }
        self.changes = {(z, i) for z, i in needed if depend[z][i]}
        every = sorted({z for z, _ in self.changes})
        size = -(-len(every) // _MOST_PUSHES) or 1
        groups = [every[i : i + size] for i in range(0, len(every), size)]
        changed = lambda push: sorted({i for z, i in self.changes if z in push})
        self.pushes = [(push, changed(push)) for push in groups]
        super().__init__(program, program, requested)
        # The leaves whose gradient is a sum of terms, which may nearly cancel.
        self._summed = [
            i for i in sorted(requested.leaves) if is_sum(program.sites_of(i))
        ]
        self.counts_cancelled = counts_cancelled and len(self._summed) > 0

    def kind(self, site: Site, other: Site) -> tuple:
        z, y = site.perturbation, other.perturbation
        keys = _keys(self.program, (site, other))
        return (z > y) - (z < y), *(key in self.changes for key in keys)

    def blocks_of(self, factors: Kept, values: list) -> list[Inexact[Array, "..."]]:
        cotangents, operands, _ = factors
        sources = _sources(self.program, cotangents, operands)
        blocks = _with_curved(self, sources, self.contracted_blocks(factors, values))
        if self.counts_cancelled:
            # Blocks are sums over pairs of the terms of gradients, which keep no digits
            # if these terms nearly cancel.
            kept, sites = Factors(operands, cotangents, values=values), self.program
            flags = cancels(
                [OfLeaf(sites.sites_of(i), kept, self.leaves[i]) for i in self._summed]
            )
            assert flags is not None
            blocks.append(jnp.sum(flags.array, dtype=jnp.float32))
        return blocks

    def of_example(self, rows: list, weight: Array | None) -> Kept:
        """The cotangents, the operands, and the derivatives of pushes.

        The latter are those of the cotangents and operands that a push changes. Axis 0
        has the entries of its perturbations.
        """
        program, closed = self.program, self._closed
        point = program.zeros(self.leaves, rows)
        aval = program.jaxpr.outvars[0].aval
        seed = full_varying_as(aval, 1)
        seed = seed if weight is None else seed * weight.astype(aval.dtype)

        def run(point: list) -> list:
            args = [*point, *self.leaves, *rows, seed]
            return run_jaxpr(closed.jaxpr, list(closed.consts), args)

        outs, changes = run(point), []
        for push, numbers in self.pushes:
            zeros = [point[z] for z in push]

            def results(zs: list, push: list = push, numbers: list = numbers) -> list:
                outs = run(replaced(point, push, zs))
                return [outs[i] for i in numbers]

            product = functools.partial(jax.jvp, results, [zeros])
            seeds = one_hot_seeds(jnp.arange(sum(x.size for x in zeros)), zeros)
            changes.append(
                jax.vmap(lambda seed, product=product: product([seed])[1])(seeds)
            )
        return outs[: len(point)], outs[len(point) :], changes

    def structs(self) -> Kept:
        cotangents = [*map(struct_of, self.program.perturbations)]
        operands = [*map(struct_of, self.program.operands)]
        every = [*cotangents, *operands]
        total = lambda push: sum(cotangents[z].size for z in push)
        changes = [
            [struct_of(every[i], total(push)) for i in numbers]
            for push, numbers in self.pushes
        ]
        return cotangents, operands, changes

    def arrays(self, use: Use, factors: Kept) -> list[Array | None]:
        """Cotangent and operand of each site, and those `changes` that are not zero."""
        cotangents, operands, changes = factors
        known = (
            self._at(changes, z, i)
            if i is not None and (z, i) in self.changes
            else None
            for z, i in _keys(self.program, use)
        )
        return [*kept_of(use, cotangents, operands), *known]

    def _at(self, changes: list[list], z: int, i: int) -> Array:
        """A derivative in one perturbation, of what `of_example` returns."""
        of_push = safe_zip(self.pushes, changes)
        (push, numbers), arrays = next(pair for pair in of_push if z in pair[0][0])
        sizes = {k: self.program.perturbations[k].size for k in push}
        start, x = sum(sizes[k] for k in push if k < z), arrays[numbers.index(i)]
        return lax.slice_in_dim(x, start, start + sizes[z], axis=1)

    def costs_of_factors(
        self, num: int, factors: Kept, values: list
    ) -> dict[int, float]:
        del factors, values
        jaxpr, costs = self._closed.jaxpr, dict[int, float]()
        for push, _ in self.pushes:
            marks = [i in push for i, _ in enumerate(jaxpr.invars)]
            of_one = num * pushed_cost(jaxpr, marks).time
            for z in push:
                costs[z] = of_one * self.program.perturbations[z].size
        return costs

    def terms(
        self, use: Use, labels: list[dict[str, Label]], arrays: list
    ) -> Iterator[list[Term]]:
        *kept, curvature, first, second = arrays
        triples = safe_zip(use, (kept[:2], kept[2:]), labels)
        sides = [site_terms(site, d, a, names) for site, (d, a), names in triples]
        if curvature is not None:
            later = 1 if use[0].perturbation < use[1].perturbation else 0
            change = self._change(curvature, use, labels, later, is_operand=False)
            yield [change, *sides[0][1], *sides[1][1]]
        for side, change in enumerate((first, second)):
            if change is not None:
                change = self._change(change, use, labels, side, is_operand=True)
                yield [sides[side][0], change, *sides[1 - side][1]]

    def _change(
        self,
        x: Array,
        use: Use,
        labels: list[dict[str, Label]],
        side: int,
        *,
        is_operand: bool,
    ) -> Term:
        """How a site's cotangent or operand changes with the other's perturbation.

        The entries of the latter are along axis 1 of `x`.
        """
        site, other = use[side], use[1 - side]
        arrange = site.expand if is_operand else site.arrange
        axes = site.a_axes if is_operand else site.d_axes
        # Each site names the axes of its own array.
        x = jax.vmap(jax.vmap(arrange))(site.at_steps(x, 2))
        num, rest = x.shape[0], x.shape[2:]
        shape = self.program.perturbations[other.perturbation].shape
        split = other.at_steps(x.reshape(num, *shape, math.prod(rest)), 1)
        arrange_other = jax.vmap(other.arrange, in_axes=-1, out_axes=-1)
        x = jax.vmap(arrange_other)(split)
        x = widened(x.reshape(*x.shape[:-1], *rest))
        of_other = named_labels(labels[1 - side], other.d_axes)
        return x, (EXAMPLE, *of_other, *named_labels(labels[side], axes))


def _perturbed_gradient(program: Program, remat: bool) -> Any:
    """The jaxpr of cotangents and operands, from perturbations and one example."""
    leaves, rows = program.traced.zeros()

    def gradient(point: list, leaves: list, rows: list, weight: Array) -> list:
        def value(point: list) -> tuple[Array, list]:
            outs, operands, _ = program.evaluate(leaves, rows, point)
            return outs[0], operands

        value = jax.checkpoint(value) if remat else value
        _, pull, operands = jax.vjp(value, point, has_aux=True)
        return [*pull(weight)[0], *operands]

    weight = full_varying_as(program.jaxpr.outvars[0].aval, 1)
    return jax.make_jaxpr(gradient)(program.zeros(leaves, rows), leaves, rows, weight)


def _keys(program: Program, use: Use) -> list[tuple[int, int | None]]:
    """The derivatives that the terms of two sites need.

    Each is a pair of a perturbation and of what changes with it: the later of the two
    cotangents, and each operand with the other site, or None if it has none. Operands
    come after all cotangents.
    """
    pair, first = [site.perturbation for site in use], len(program.perturbations)
    operands = (
        None
        if site.operand is None or site.rule.token is not None
        else first + site.operand
        for site in use
    )
    return [(min(pair), max(pair)), *safe_zip(pair[::-1], operands)]


def _sources(
    program: Program, cotangents: list, operands: list
) -> list[tuple[Node, Array]]:
    """The values that are not linear in leaves, and their gradients.

    The gradients are those of the sum over the examples.
    """
    uses: dict[tuple, Site] = {}
    for site in program.sites:
        if site.source is not None:
            key = (site.source, site.perturbation, site.operand, id(site.rule))
            uses.setdefault(key, site)

    def gradient(site: Site, source: Node) -> Array:
        d = cotangents[site.perturbation]
        a = site.operand_of(operands)
        shape = (*(length for _, length in source.loops), *source.shape)

        def outputs(value: Array) -> Array:
            in_axes = (None if a is None else 0, None)
            output = jax.vmap(site.output_of_source, in_axes, axis_size=d.shape[0])
            return output(a, value)

        zeros = vary_as([d], jnp.zeros(shape, source.dtype))
        return jax.linear_transpose(outputs, zeros)(d)[0]

    return [(key[0], gradient(site, key[0])) for key, site in uses.items()]


def _with_curved(
    hessian: SiteHessian, sources: list[tuple[Node, Array]], blocks: list[Array]
) -> list[Array]:
    """Adds the second derivatives of values that are computed from leaves alone.

    `sources` are these values, and the gradients of the sum with respect to them. An
    elementwise function of a leaf has a diagonal Hessian, which takes one product.
    """
    if not sources:
        return blocks
    program, requested, leaves = hessian.program, hessian.requested, hessian.leaves
    curved = {s.leaf: False for s in program.sites if s.source is not None}
    curved |= {s.leaf: True for s in program.sites if s.is_coupled}

    def gradient(leaves: list, which: Sequence[int]) -> list:
        def value(point: list) -> Array:
            nodes = [x for x, _ in sources]
            values = evaluated(nodes, replaced(leaves, which, point))
            terms = (jnp.sum(values[x] * weight) for x, weight in sources)
            return functools.reduce(jnp.add, terms)

        return jax.grad(value)([leaves[i] for i in which])

    products = hessian_products(gradient, is_reverse=False, is_single=False)
    result = []
    for pairs, block in safe_zip(hessian.groups, blocks):
        first, second = pairs[0]
        if first in curved and second in curved:
            # Such leaves are unlike all others, so this is the block of a single pair.
            product = products(leaves, [second], [first])
            if curved[first] and curved[second]:
                (of_pair,) = images(product, [leaves[second]], None, -1)
                block = block + of_pair.astype(block.dtype).reshape(block.shape)
            elif first == second:
                (diagonal,) = product([jnp.ones_like(leaves[first])])
                diagonal = diagonal.astype(block.dtype)
                block = _plus_diagonal(block, diagonal, requested.is_diagonal)
        result.append(block)
    return result


def _plus_diagonal(block: Array, diagonal: Array, is_diagonal: bool) -> Array:
    if is_diagonal:
        return block + diagonal
    entries = jnp.arange(diagonal.size)
    flat = block.reshape(diagonal.size, diagonal.size)
    return flat.at[entries, entries].add(diagonal.ravel()).reshape(block.shape)


# Two ways take two programs. Savings of less than a fifth are not worth compiling both.
_WORTH_TWO = 0.8


def cheapest(
    program: Program,
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
    met = {
        leaf: {site.perturbation for site in program.sites_of(leaf)} for leaf in covered
    }
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


# The curvature in the directions of some vectors; None for the identity.
Curve = Inexact[Array, "vectors vectors"] | None


# Takes the output of the function for one example, and the example. The vectors are
# cotangents of the outputs, along a new axis 0.
OfOutputs = Callable[[list, list], tuple[list, Curve]]


class SiteGaussNewton(AbstractSiteMatrix):
    """Blocks of a Gauss-Newton matrix, summed over examples, from sites.

    - `program`: the function, all outputs of which are differentiated.
    - `of_outputs`: the curvature of the loss of one example in these outputs, in the
        directions of `num_vectors` vectors.
    """

    def __init__(
        self,
        program: Program,
        requested: RequestedBlocks,
        of_outputs: OfOutputs,
        *,
        num_vectors: int,
        has_curve: bool,
    ):
        self._of_outputs, self._num_vectors = of_outputs, num_vectors
        self._has_curve = has_curve
        self._outputs = [var.aval for var in program.jaxpr.outvars]
        self._dtype = common_dtype(*(x.dtype for x in self._outputs))
        self._paired: list[int | None] = [None for _ in program.perturbations]
        if has_curve and num_vectors > 1:
            self._paired = paired_outputs(program)
        for i in sorted(requested.leaves):
            if self._is_sum(program, i):
                for site in program.sites_of(i):
                    self._paired[site.perturbation] = None
        self._formed = [i for i in sorted(requested.leaves) if self._is_sum(program, i)]
        self._paired += (None for _ in self._formed)
        with_jacobians = program.with_jacobians(self._formed)
        super().__init__(program, with_jacobians, requested)

    def _is_sum(self, program: Program, leaf: int) -> bool:
        """Whether a row of the Jacobian of a leaf is a sum of terms."""
        sites = program.sites_of(leaf)
        axes = (
            x.rule.y_axes for x in sites if self._paired[x.perturbation] is not None
        )
        # Each output is computed from one position.
        apart = {name for names in itertools.chain(*axes) for name in names}
        return is_sum(sites, apart)

    def kind(self, site: Site, other: Site) -> tuple:
        return tuple(self._paired[x.perturbation] for x in (site, other))

    def of_example(self, rows: list, weight: Array | None) -> Kept:
        """The cotangents, the operands, and the curvature or weight of an example."""
        cotangents, operands, scale = pulled_back(
            self.program, rows, self._of_outputs, self._paired
        )
        if weight is not None:
            weight = weight.astype(self._dtype)
            scale = weight if scale is None else scale * weight
        return cotangents, operands, scale

    def blocks_of(self, factors: Kept, values: list) -> list[Inexact[Array, "..."]]:
        cotangents, operands, scale = factors
        program, unformed = self.program, self._unformed(factors, values)
        formed = (
            gradients(program.sites_of(i), unformed, program.leaves[i])
            for i in self._formed
        )
        factors = [*cotangents, *formed], operands, scale
        return self.contracted_blocks(factors, values)

    def structs(self) -> Kept:
        # Jacobians that are formed come after the cotangents.
        cotangents = [*map(struct_of, self.contracted.perturbations, self._nums)]
        operands = [*map(struct_of, self.program.operands)]
        square = (self._num_vectors, self._num_vectors)
        curve = jax.ShapeDtypeStruct(square, self._dtype) if self._has_curve else None
        return cotangents, operands, curve

    def costs_of_factors(
        self, num: int, factors: Kept, values: list
    ) -> dict[int, float]:
        costs: dict[int, float] = {}
        # One backward pass for each vector.
        for site in self.program.sites:
            z = site.perturbation
            cost = num * self._nums[z] * num_products(site)
            costs[z] = costs.get(z, 0.0) + cost
        for leaf in self._formed:
            sites = self.program.sites_of(leaf)
            cost = forming_cost(sites, self._unformed(factors, values))
            costs[sites[0].perturbation] += cost.time
        return costs

    def _unformed(self, factors: Kept, values: list) -> Factors:
        """The factors that Jacobians are formed from."""
        cotangents, operands, _ = factors
        cotangents = cotangents[: len(self.program.perturbations)]
        return Factors(operands, cotangents, (_vectors(0),), values=values)

    @property
    def _nums(self) -> list[int]:
        """The number of vectors that are pulled back to each perturbation."""
        return [self._num_vectors if x is None else 1 for x in self._paired]

    def arrays(self, use: Use, factors: Kept) -> list[Array | None]:
        cotangents, operands, scale = factors
        return [*kept_of(use, cotangents, operands), scale]

    def terms(
        self, use: Use, labels: list[dict[str, Label]], arrays: list
    ) -> Iterator[list[Term]]:
        *kept, scale = arrays
        terms: list[Term] = []
        # The scale is a curvature, or the weight of each example.
        has_curve = scale is not None and scale.ndim == 3
        sides = (0, 1) if has_curve else (0, 0)
        if scale is not None:
            vectors = [_vectors(side) for side in sides] if has_curve else []
            scaled: Term = (widened(scale), (EXAMPLE, *vectors))
            if has_curve:
                for side, names in enumerate(labels):
                    scaled = self._of_site(scaled, use[side], names, side)
            terms.append(scaled)
        pairs = kept[:2], kept[2:]
        for site, (d, a), names, side in safe_zip(use, pairs, labels, sides):
            cotangent, operand = site_terms(site, d, a, names, _vectors(side))
            terms += [cotangent, *operand]
        yield terms

    def _of_site(
        self, curve: Term, site: Site, names: dict[str, Label], side: int
    ) -> Term:
        """The curvature in the output that a site is paired with.

        Its entries are those of the site's output.
        """
        number = self._paired[site.perturbation]
        if number is None:
            return curve
        x, labels = curve
        position = labels.index(_vectors(side))
        # Where the output starts among the vectors.
        start = sum(x.size for x in self._outputs[:number])
        end = start + self._outputs[number].size
        x = lax.slice_in_dim(x, start, end, axis=position)
        axes = [*itertools.chain(*site.rule.y_axes)]
        sizes = (site.sizes[name] for name in axes)
        x = x.reshape(*x.shape[:position], *sizes, *x.shape[position + 1 :])
        of_site = named_labels(names, tuple(axes))
        return x, (*labels[:position], *of_site, *labels[position + 1 :])


def pulled_back(
    program: Program,
    rows: list,
    of_outputs: OfOutputs,
    paired: Sequence[int | None] = (),
) -> Kept:
    """For one example: cotangents, operands, and the curvature along vectors.

    The cotangent of a perturbation that is `paired` with an output is that of ones.
    """
    num_outputs = len(program.jaxpr.outvars)
    outs, operands, pullback = program.linearize(program.leaves, rows, num_outputs)
    seeds, curve = of_outputs(outs, rows)
    # These may be the same for all examples and devices.
    seeds = [vary_as([out], seed) for seed, out in safe_zip(seeds, outs)]
    # What is not used of the result of a pullback is not computed.
    cotangents = jax.vmap(pullback)(seeds)
    for number in {*paired} - {None}:
        ones = [jnp.full_like(out, i == number) for i, out in enumerate(outs)]
        pulled = pullback([vary_as([out], x) for out, x in safe_zip(outs, ones)])
        for i, x in enumerate(pulled):
            if paired[i] == number:
                cotangents[i] = x[None]
    return cotangents, operands, curve


def _vectors(side: int) -> Label:
    """The label of the vectors of one side."""
    return "output", side


def paired_outputs(program: Program) -> list[int | None]:
    """For each perturbation, the output that its cotangent has the entries of.

    Each entry of the cotangent is a multiple of one entry of this output, in the same
    order. It is None for all other perturbations. Everything is read off the jaxpr of
    the pullback, which has the derivative of every custom rule.
    """

    def pulled(seeds: list, leaves: list, rows: list) -> list:
        return program.linearize(leaves, rows, len(outs))[2](seeds)

    outs = [var.aval for var in program.jaxpr.outvars]
    seeds = [full_varying_as(out, 0) for out in outs]
    jaxpr = jax.make_jaxpr(pulled)(seeds, *program.traced.zeros()).jaxpr
    constants = (None for _ in jaxpr.invars[len(outs) :])
    of_cotangents = _followed(jaxpr, [*range(len(outs)), *constants])
    return [
        None
        if number in (None, _MIXED)
        or not all(
            _names_entries(site, program.perturbations[i])
            for site in program.sites
            if site.perturbation == i
        )
        else number
        for i, number in enumerate(of_cotangents)
    ]


def _names_entries(site: Site, struct: Any) -> bool:
    """Whether the factor `d` of a site has all axes of its perturbation."""
    named = site.rule.y_axes
    sizes = tuple(math.prod(site.sizes[name] for name in names) for names in named)
    return not site.loops and sizes == tuple(struct.shape)


# Stands for values that are not known to be computed entry by entry.
_MIXED = -1


# Entry by entry, and linear in all inputs together, or in a single one.
_ADDED = LINEAR_IN_ALL & with_trait("entries")
_MULTIPLIED = frozenset(("mul", "div"))


def _followed(jaxpr: Any, inputs: Sequence[int | None]) -> list[int | None]:
    """The number that each output has, from those of the inputs.

    Values with the same number have the same entries, each with a factor of its own.
    None stands for values that do not depend on numbered inputs.
    """
    numbers = dict(safe_zip(jaxpr.invars, inputs))

    def of(atom: Any) -> int | None:
        return None if isinstance(atom, jex.Literal) else numbers.get(atom)

    for eqn in jaxpr.eqns:
        ins = [of(atom) for atom in eqn.invars]
        known, closed = {*ins} - {None}, callee(eqn)
        if known and closed is not None:
            numbers.update(safe_zip(eqn.outvars, _followed(closed.jaxpr, ins)))
        elif known:
            is_kept = len(known) == 1 and _keeps_entries(
                eqn, [x is not None for x in ins]
            )
            number = known.pop() if is_kept else _MIXED
            numbers.update(dict.fromkeys(eqn.outvars, number))
    return [of(var) for var in jaxpr.outvars]


def _keeps_entries(eqn: Any, depend: list[bool]) -> bool:
    """Whether an equation multiplies each entry of an input, and keeps their order.

    `depend` marks the inputs that depend on what is followed.
    """
    name, is_only = name_of(eqn), sum(depend) == 1
    followed = [
        atom for atom, is_followed in safe_zip(eqn.invars, depend) if is_followed
    ]
    if len({math.prod(x.aval.shape) for x in (*followed, *eqn.outvars)}) > 1:
        return False
    if name == "reshape":
        return eqn.params["dimensions"] is None
    return (
        name in ("squeeze", "broadcast_in_dim", "reduce_sum")
        or (name in _ADDED and all(depend))
        or (name in _MULTIPLIED and is_only and (name == "mul" or depend[0]))
        or (name == "select_n" and not depend[0])
    )
