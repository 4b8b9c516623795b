"""Second derivatives with respect to parameters, from the sites where they enter.

With `d` the cotangent of a site's output `y = w(a)`, the gradient with respect to `w`
is `d a`. A second parameter that enters at `y' = w'(a')` changes `d` (and `a`, if the
first site comes later) only through `y'`. So the second derivatives of one example are

    (∂d/∂z') a a' + d (∂a/∂z') a' + d' (∂a'/∂z) a,

for small perturbations `z` of `y` and `z'` of `y'`. These have few entries compared to
the parameters. Only the products with the operands, summed over all examples, are as
large as the Hessian.

`AbstractSiteMatrix` has what Hessians and Gauss-Newton matrices have in common.
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Real, UInt

from .._base.cpu import in_opaque_branch, opaque_true
from .._base.dtypes import common_dtype, num_bytes, widened
from .._base.jaxprs import depends, evaluate_jaxpr
from .._base.mesh import full_varying_as, vary_as, varying
from .._base.platforms import platform
from .._base.trees import consecutive_groups, safe_zip, type_of
from .._sites.cost import contraction_cost, pushed_cost, total_cost
from .._sites.einsum import contract, EXAMPLE, Labels, Term
from .._sites.factors import Factors, scale_of, weight_terms
from .._sites.gram import cancels, has_products, OfLeaf
from .._sites.rules import Axes
from .._sites.shared import evaluated, Node
from .._sites.site import has_named_axes, is_allowed, is_sum, Label, labels_of, Site
from .._sites.trace import Program
from .columns import hessian_products, images, one_hot_seeds, replaced
from .pytree import Pair, RequestedBlocks


# Pairs of leaves that are alike are contracted together if there are at least this
# many. This compiles faster.
_FEWEST_ALIKE = 3


PAIR: Label = ("pair", 0)


class Stacks:
    """Arrays by index; arrays of one shape can be taken together.

    Everything that uses some of them takes them from the same stack, so that it
    compiles to the same code.
    """

    def __init__(self, arrays: dict[int, Array], are_stacked: bool):
        self._arrays = arrays
        alike: dict[Hashable, list[int]] = {}
        for i, x in arrays.items():
            alike.setdefault(_kind_of(x), []).append(i)
        self._stacks = {
            kind: (jnp.stack([arrays[i] for i in numbers]), numbers)
            for kind, numbers in alike.items()
            if are_stacked
        }

    def __getitem__(self, number: int) -> Array:
        return self._arrays[number]

    def stack(self, numbers: Sequence[int]) -> tuple[Array, UInt[np.ndarray, " pairs"]]:
        """All arrays with the shape of the indexed ones, and the positions of these."""
        x, members = self._stacks[_kind_of(self._arrays[numbers[0]])]
        return x, np.array([members.index(i) for i in numbers], np.uint32)

    def take(self, numbers: Sequence[int]) -> tuple[Array, Labels]:
        """One array for each pair along a new axis, or a single array for all."""
        if len({*numbers}) == 1:
            return self._arrays[numbers[0]], ()
        x, positions = self.stack(numbers)
        return _entries_at(x, positions), (PAIR,)


def _entries_at(x: Array, index: Any) -> Array:
    """The entries at indices that are known to be in range.

    JAX normalises other indices, also where they are constants, and masks the result.
    """
    return x.at[index].get(mode="promise_in_bounds")


def _kind_of(x: Array) -> Hashable:
    return x.shape, x.dtype, varying(jax.typeof(x))


def over_pairs(fun: Callable[[Array], Array], x: Array, lead: Labels) -> Array:
    """Applies `fun` to an array, or to the array of each pair."""
    return jax.vmap(fun)(x) if lead else fun(x)


def cotangent_term(
    sites: Sequence[Site],
    cotangents: Stacks,
    labels: dict[str, Label],
    *vectors: Label,
) -> Term:
    """The cotangents of sites that are alike, with their named axes.

    - `vectors`: the label of the axis after that of examples, if there is one.
    """
    site = sites[0]
    d, lead = cotangents.take([x.perturbation for x in sites])
    axes = (EXAMPLE, *vectors)

    def arrange(d: Array) -> Array:
        mapped = functools.reduce(lambda fun, _: jax.vmap(fun), axes, site.arrange)
        return mapped(site.at_steps(d, len(axes)))

    return widened(over_pairs(arrange, d, lead)), (
        *(*lead, *axes),
        *named_labels(labels, site.d_axes),
    )


def operand_term(
    sites: Sequence[Site], operands: Stacks, labels: dict[str, Label]
) -> Term:
    """The operands of sites that are alike, with their named axes."""
    site = sites[0]
    a, lead = operands.take([x.operand for x in sites if x.operand is not None])
    a = over_pairs(lambda a: jax.vmap(site.expand)(site.at_steps(a, 1)), a, lead)
    names = site.a_axes
    if site.rule.token is not None:
        # An index that is out of range selects no row.
        a = jax.nn.one_hot(a, site.sizes[site.rule.token], dtype=jnp.float32)
        names = (*names, site.rule.token)
    return widened(a), (*lead, EXAMPLE, *named_labels(labels, names))


def named_labels(labels: dict[str, Label], names: Axes) -> Labels:
    return tuple(labels[name] for name in names)


Use = tuple[Site, Site]

# The arrays to contract for pairs of sites that are alike, and the labels of their
# axes. Those that differ from pair to pair have the label `PAIR`.
Terms = Callable[[Sequence[Use], list[dict[str, Label]]], Iterable[list[Term]]]


# Cotangents and operands of one example, or of several, and what else terms need.
Kept = tuple[list, list, Any]


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
        self,
        program: Program,
        contracted: Program,
        requested: RequestedBlocks,
    ):
        self.program, self.contracted = program, contracted
        self.leaves, self.requested = program.leaves, requested
        families = {leaf: self._family(leaf) for leaf in requested.leaves}
        alike: dict[Hashable, list[Pair]] = {}
        for pair in requested.pairs:
            first, second = pair
            kinds = tuple(itertools.starmap(self.kind, self._uses(pair)))
            key = (families[first], families[second], kinds)
            alike.setdefault(key, []).append(pair)
        self.groups: list[list[Pair]] = []
        for pairs in alike.values():
            most = platform().block_bytes * len(pairs) // max(self._num_bytes(pairs), 1)
            num = -(-len(pairs) // max(min(most, len(pairs)), 1))
            size = -(-len(pairs) // num)
            size = size if size >= _FEWEST_ALIKE else 1
            pairs = sorted(pairs, key=self._place)
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
    def terms(self, factors: Kept, values: list) -> Terms:
        """The arrays to contract, from the factors of some examples.

        `values` are those of the program.
        """

    def stacks(self, arrays: dict[int, Array]) -> Stacks:
        """Cotangents or operands; stacked if a group has pairs to contract at once."""
        return Stacks(arrays, any(len(pairs) > 1 for pairs in self.groups))

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
            return of_factors, self._costs(self.terms(factors, values), values)

        values = self.program.value_structs()
        return eqx.filter_eval_shape(count, factors, values)

    def _family(self, leaf: int) -> Hashable:
        """A key that is equal for leaves whose sites are equal functions."""
        struct, program = self.leaves[leaf], self.contracted
        key = [struct.shape, struct.dtype, varying(jax.typeof(struct))]
        for site in program.sites_of(leaf):
            view, rule, operand = site.view, site.rule, site.operand
            structs = [program.perturbations[site.perturbation]]
            if operand is not None:
                structs.append(program.operands[operand])
            key += [view.key, view.windows, rule.kind, rule.key, site.loops]
            key += [(struct.shape, struct.dtype) for struct in structs]
            if site.source is not None or view.reads:
                key.append(leaf)
        return tuple(key)

    def _uses(self, pair: Pair) -> list[Use]:
        first, second = map(self.contracted.sites_of, pair)
        return [*itertools.product(first, second)]

    def _place(self, pair: Pair) -> list[int]:
        """Sorts pairs by the first perturbation of each."""
        return [min(s.perturbation, t.perturbation) for s, t in self._uses(pair)]

    def contracted_blocks(
        self, factors: Kept, values: list
    ) -> list[Inexact[Array, "pairs ..."]]:
        """The sum of the contractions of `terms`, for each group."""
        terms = self.terms(factors, values)
        sizes = [self._num_bytes(pairs) for pairs in self.groups]
        # Smaller sums need not be computed one after the other: their terms are small
        # compared to the arrays they are computed from, which are all live until the
        # last sum is done.
        if sum(sizes) <= platform().factor_bytes:
            return [self._sum(pairs, terms, values) for pairs in self.groups]
        blocks: list[Array] = []
        for group in consecutive_groups(sizes, least=0):
            run = lambda group=group: [
                self._sum(self.groups[i], terms, values) for i in group
            ]
            # XLA for CPUs would compute the terms of all pairs before it adds any. So
            # each group depends on a number from the previous one.
            before = blocks[-1] if blocks else self.leaves[0]
            blocks += in_opaque_branch(run, opaque_true(before.ravel()[:1]))()
        return blocks

    def _num_bytes(self, pairs: list[Pair]) -> int:
        return len(pairs) * self.requested.num_bytes(pairs[0], self.leaves)

    def _sum(self, pairs: list[Pair], terms: Terms, values: list) -> Array:
        first, second = (self.leaves[leaf] for leaf in pairs[0])
        shape = first.shape
        if not self.requested.is_diagonal:
            shape = (*shape, *second.shape)
        dtype = common_dtype(jnp.float32, first.dtype, second.dtype)
        total = None
        for use, arrays, out in self._labelled(pairs, terms, values):
            block = contract(arrays, out)
            back = functools.partial(self._of_leaves, use, values)
            block = jax.vmap(back)(block if PAIR in out else block[None])
            block = block.astype(dtype)
            total = block if total is None else total + block
        if total is None:
            return jnp.zeros((len(pairs), *shape), dtype)
        return jnp.broadcast_to(total, (len(pairs), *shape))

    def _costs(self, terms: Terms, values: list) -> dict[Pair, float]:
        costs = {}
        for pairs in self.groups:
            # Pairs that are alike have the same cost.
            cost = total_cost(
                contraction_cost(arrays, out)
                for _, arrays, out in self._labelled(pairs[:1], terms, values)
            )
            costs.update(dict.fromkeys(pairs, cost.time))
        return costs

    def _labelled(
        self, pairs: list[Pair], terms: Terms, values: list
    ) -> Iterator[tuple[Use, list[Term], Labels]]:
        """The arrays to contract, the resulting axes, and two sites with these axes."""
        for uses in safe_zip(*map(self._uses, pairs)):
            labels = [
                {
                    name: _of_side(label, side)
                    if label[0] == "view" or not self.requested.is_diagonal
                    else label
                    for name, label in labels_of(site, side).items()
                }
                for side, site in enumerate(uses[0])
            ]
            pairs_of_sides = safe_zip(uses[0], labels)
            weights = [
                term
                for site, names in pairs_of_sides
                for term in weight_terms(site, values, names)
            ]
            for arrays in terms(uses, labels):
                arrays = [*arrays, *weights]
                dtype = common_dtype(*(x.dtype for x, _ in arrays))
                arrays = [_without_repeats(x.astype(dtype), y) for x, y in arrays]
                present = {label for _, axes in arrays for label in axes}
                lead = (PAIR,) if PAIR in present else ()
                # An axis of size 1 may be missing from all arrays; a reshape restores
                # it.
                of_leaves = sorted(filter(_is_of_leaf, present), key=_key)
                yield uses[0], arrays, (*lead, *of_leaves)

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


@dataclasses.dataclass(frozen=True)
class Push:
    """Some perturbations, and the cotangents and operands that depend on them.

    - `sizes`: the sizes of the perturbations. Those of equal types are adjacent.
    - `outputs`: the indices of the cotangents; those of operands come after all of
        them.
    """

    perturbations: tuple[int, ...]
    sizes: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def num(self) -> int:
        """The number of directions."""
        return sum(self.sizes)

    def directions(self, perturbations: Sequence[int]) -> tuple[int, int]:
        """The range of directions of some adjacent perturbations."""
        first = self.perturbations.index(perturbations[0])
        start = sum(self.sizes[:first])
        return start, start + sum(self.sizes[first : first + len(perturbations)])


class SiteHessian(AbstractSiteMatrix):
    """Blocks of the Hessian of a sum over examples, from the sites of its leaves.

    The first output of the `program` is summed. The cotangents and operands of one
    example are a function of perturbations, which is traced once. The trace shows which
    values depend on which perturbation and what their derivatives cost, and it is what
    runs.

    - `changes`: pairs of a perturbation and a cotangent or operand that depends on it,
        among those that sites need.
    - `pushes`: the programs for derivatives.
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
        jaxpr, needed = self._closed.jaxpr, _needed(program, requested)
        depend = {
            z: depends(jaxpr, [i == z for i, _ in enumerate(jaxpr.invars)])
            for z in sorted({z for z, _ in needed})
        }
        self.changes = {(z, i) for z, i in needed if depend[z][i]}
        every = sorted({z for z, _ in self.changes})
        size = -(-len(every) // _MOST_PUSHES) or 1
        self.pushes = [
            self._push(program, every[start : start + size])
            for start in range(0, len(every), size)
        ]
        self._pushes = {
            z: i for i, x in enumerate(self.pushes) for z in x.perturbations
        }
        super().__init__(program, program, requested)
        # The leaves whose gradient is a sum of terms, which may nearly cancel.
        self._summed = [
            i for i in sorted(requested.leaves) if is_sum(program.sites_of(i))
        ]
        self.counts_cancelled = counts_cancelled and len(self._summed) > 0

    def _push(self, program: Program, perturbations: list[int]) -> Push:
        structs = program.perturbations
        ordered = sorted(perturbations, key=lambda z: type_of(structs[z]))
        return Push(
            tuple(ordered),
            tuple(structs[z].size for z in ordered),
            tuple(sorted({i for z, i in self.changes if z in perturbations})),
        )

    def kind(self, site: Site, other: Site) -> tuple:
        z, y = site.perturbation, other.perturbation
        return (
            (z > y) - (z < y),
            (min(z, y), max(z, y)) in self.changes,
            (y, _operand_of(self.program, site)) in self.changes,
            (z, _operand_of(self.program, other)) in self.changes,
        )

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
        """The cotangents, the operands, and the derivatives of each push."""
        program, closed = self.program, self._closed
        point = program.zeros(self.leaves, rows)
        aval = program.jaxpr.outvars[0].aval
        seed = full_varying_as(aval, 1)
        seed = seed if weight is None else seed * weight.astype(aval.dtype)

        def run(point: list) -> list:
            args = [*point, *self.leaves, *rows, seed]
            return evaluate_jaxpr(closed.jaxpr, list(closed.consts), args)

        def pushed(push: Push) -> list[Array]:
            def results(zs: list) -> list:
                outs = run(replaced(point, push.perturbations, zs))
                return [outs[i] for i in push.outputs]

            zeros = [point[z] for z in push.perturbations]
            return jax.vmap(lambda change: jax.jvp(results, [zeros], [change])[1])(
                one_hot_seeds(jnp.arange(push.num), zeros)
            )

        outs = run(point)
        changes = [pushed(push) for push in self.pushes]
        return outs[: len(point)], outs[len(point) :], changes

    def structs(self) -> Kept:
        cotangents = [*map(struct_of, self.program.perturbations)]
        operands = [*map(struct_of, self.program.operands)]
        changes = [
            [struct_of([*cotangents, *operands][i], push.num) for i in push.outputs]
            for push in self.pushes
        ]
        return cotangents, operands, changes

    def terms(self, factors: Kept, values: list) -> Terms:
        del values
        cotangents, operands, changes = factors
        known = [
            self.stacks(dict(safe_zip(push.outputs, arrays)))
            for push, arrays in safe_zip(self.pushes, changes)
        ]
        stacks = (self.stacks(dict(enumerate(x))) for x in (cotangents, operands))
        return functools.partial(self._terms, *stacks, known)

    def costs_of_factors(
        self, num: int, factors: Kept, values: list
    ) -> dict[int, float]:
        del factors, values
        jaxpr, costs = self._closed.jaxpr, dict[int, float]()
        for push in self.pushes:
            marks = [i in push.perturbations for i, _ in enumerate(jaxpr.invars)]
            of_one = num * pushed_cost(jaxpr, marks).time
            for z in push.perturbations:
                costs[z] = of_one * self.program.perturbations[z].size
        return costs

    def _terms(
        self,
        cotangents: Stacks,
        operands: Stacks,
        changes: list[Stacks],
        uses: Sequence[Use],
        labels: list[dict[str, Label]],
    ) -> Iterator[list[Term]]:
        """Arrays to contract; the block of two sites is the sum of the contractions.

        All arrays have the examples along axis 0. `changes` are derivatives with
        respect to perturbations, for each `Push`. These have its directions along axis
        1.
        """
        sites, others = safe_zip(*uses)
        sides = [(sites, labels[0]), (others, labels[1])]
        terms_of_operands = [
            [operand_term(alike, operands, names)]
            if alike[0].operand is not None
            else []
            for alike, names in sides
        ]
        is_first = sites[0].perturbation < others[0].perturbation
        changed, by = sides[::-1] if is_first else sides
        curvature = self._change(changes, *changed, *by, is_operand=False)
        if curvature is not None:
            yield [curvature, *itertools.chain(*terms_of_operands)]
        for index in (0, 1):
            changed, by = sides[index], sides[1 - index]
            change = self._change(changes, *changed, *by, is_operand=True)
            if change is not None:
                cotangent = cotangent_term(changed[0], cotangents, changed[1])
                yield [cotangent, change, *terms_of_operands[1 - index]]

    def _change(
        self,
        known: list[Stacks],
        changed: Sequence[Site],
        names: dict[str, Label],
        by: Sequence[Site],
        other_names: dict[str, Label],
        *,
        is_operand: bool,
    ) -> Term | None:
        """How cotangents or operands of sites change with perturbations of others."""
        site, other = changed[0], by[0]
        number = lambda x: (
            _operand_of(self.program, x) if is_operand else x.perturbation
        )
        keys = [(y.perturbation, number(x)) for x, y in safe_zip(changed, by)]
        if keys[0] not in self.changes:
            return None
        arrange = site.expand if is_operand else site.arrange
        axes = site.a_axes if is_operand else site.d_axes

        def arranged(x: Array) -> Array:
            # Each site names the axes of its own array.
            x = jax.vmap(jax.vmap(arrange))(site.at_steps(x, 2))
            num, rest = x.shape[0], x.shape[2:]
            shape = self.program.perturbations[other.perturbation].shape
            split = other.at_steps(x.reshape(num, *shape, math.prod(rest)), 1)
            arrange_other = jax.vmap(other.arrange, in_axes=-1, out_axes=-1)
            x = jax.vmap(arrange_other)(split)
            return x.reshape(*x.shape[:-1], *rest)

        x, lead = self._changes(known, keys)
        labels = named_labels(other_names, other.d_axes), named_labels(names, axes)
        x = widened(over_pairs(arranged, x, lead))
        return x, (*lead, EXAMPLE, *labels[0], *labels[1])

    def _changes(
        self, known: list[Stacks], keys: list[tuple[int, Any]]
    ) -> tuple[Array, Labels]:
        """Derivatives with respect to perturbations, for one pair or for several.

        The entries of a pair's perturbation are along axis 1.
        """
        pushes, structs = self.pushes, self.program.perturbations
        if len(keys) == 1:
            ((z, number),) = keys
            push = self._pushes[z]
            start, stop = pushes[push].directions([z])
            return known[push][number][:, start:stop], ()
        struct = structs[keys[0][0]]
        is_alike = lambda z: type_of(structs[z]) == type_of(struct)
        parts = []
        groups = itertools.groupby(keys, lambda key: self._pushes[key[0]])
        for push, group in [(i, [*pairs]) for i, pairs in groups]:
            x, positions = known[push].stack([number for _, number in group])
            # Perturbations of the same type are adjacent.
            alike = [z for z in pushes[push].perturbations if is_alike(z)]
            start, stop = pushes[push].directions(alike)
            x = x[:, :, start:stop]
            x = x.reshape(*x.shape[:2], len(alike), struct.size, *x.shape[3:])
            kinds = np.array([alike.index(z) for z, _ in group], np.uint32)
            parts.append(_entries_at(x, (positions, slice(None), kinds)))
        return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)), (PAIR,)


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


def _needed(program: Program, requested: RequestedBlocks) -> set[tuple[int, int]]:
    """Pairs of a perturbation and of a cotangent, or operand, to differentiate."""
    needed = set[tuple[int, int]]()
    for pair in requested.pairs:
        for site, other in itertools.product(*map(program.sites_of, pair)):
            first, last = sorted((site.perturbation, other.perturbation))
            needed.add((first, last))
            for changed, by in ((site, other), (other, site)):
                operand = _operand_of(program, changed)
                if operand is not None and changed.rule.token is None:
                    needed.add((by.perturbation, operand))
    return needed


def _operand_of(program: Program, site: Site) -> int | None:
    """The index of a site's operand, after all cotangents; None without one."""
    return None if site.operand is None else len(program.perturbations) + site.operand


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
        a = None if site.operand is None else operands[site.operand]
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
