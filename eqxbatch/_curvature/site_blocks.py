"""The blocks of a matrix of second derivatives, from pairs of sites."""

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
from jaxtyping import Array, Inexact, Int, Real

from .._base.cpu import in_opaque_branch, opaque_true
from .._base.dtypes import common_dtype, num_bytes, widened
from .._base.mesh import varying
from .._base.platforms import platform
from .._base.trees import consecutive_groups, safe_zip
from .._sites.cost import contraction_cost, total_cost
from .._sites.einsum import contract, EXAMPLE, Labels, Term
from .._sites.factors import scale_of, weight_terms
from .._sites.rules import Axes
from .._sites.site import has_named_axes, Label, labels_of, Site
from .._sites.trace import Program


Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class RequestedBlocks:
    """The requested blocks of a Hessian.

    - `pairs`: pairs of leaf indices. The block of a pair has the axes of its first
        leaf, then those of its second.
    - `is_diagonal`: whether only diagonals are requested; each pair is then a leaf with
        itself.
    """

    pairs: list[Pair]
    is_diagonal: bool = False

    @property
    def leaves(self) -> set[int]:
        return {leaf for pair in self.pairs for leaf in pair}

    def among(self, leaves: Iterable[int]) -> "RequestedBlocks":
        """The requested blocks of pairs of these leaves."""
        chosen = set(leaves)
        pairs = [pair for pair in self.pairs if chosen.issuperset(pair)]
        return RequestedBlocks(pairs, self.is_diagonal)

    def num_bytes(self, pair: Pair, leaves: list) -> int:
        """The size of the block of a pair, or of its diagonal."""
        first, second = (leaves[leaf] for leaf in pair)
        entries = first.size * (1 if self.is_diagonal else second.size)
        return entries * first.dtype.itemsize


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

    def stack(self, numbers: Sequence[int]) -> tuple[Array, Int[np.ndarray, " pairs"]]:
        """All arrays with the shape of the indexed ones, and the positions of these."""
        x, members = self._stacks[_kind_of(self._arrays[numbers[0]])]
        return x, np.array([members.index(i) for i in numbers])

    def take(self, numbers: Sequence[int]) -> tuple[Array, Labels]:
        """One array for each pair along a new axis, or a single array for all."""
        if len({*numbers}) == 1:
            return self._arrays[numbers[0]], ()
        x, positions = self.stack(numbers)
        return x[positions], (PAIR,)


def _kind_of(x: Array) -> Hashable:
    return x.shape, x.dtype, varying(jax.typeof(x))


def for_each(fun: Callable[[Array], Array], x: Array, lead: Labels) -> Array:
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

    return widened(for_each(arrange, d, lead)), (
        *(*lead, *axes),
        *named_labels(labels, site.d_axes),
    )


def operand_term(
    sites: Sequence[Site], operands: Stacks, labels: dict[str, Label]
) -> Term:
    """The operands of sites that are alike, with their named axes."""
    site = sites[0]
    a, lead = operands.take([x.operand for x in sites if x.operand is not None])
    a = for_each(lambda a: jax.vmap(site.expand)(site.at_steps(a, 1)), a, lead)
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
        total = jnp.zeros((len(pairs), *shape), dtype)
        for use, arrays, out in self._labelled(pairs, terms, values):
            block = contract(arrays, out)
            back = functools.partial(self._of_leaves, use, values)
            block = jax.vmap(back)(block if PAIR in out else block[None])
            total += block.astype(dtype)
        return total

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
    is_small = [not has_named_axes(x) for x in use]
    nums = [math.prod(x.shape) if y else 1 for x, y in safe_zip(views, is_small)]
    of_leaf = 1 if all(is_small) else math.prod(struct.shape)
    block = block.reshape(of_leaf, *nums)
    for side in (1, 0):
        view, axis = views[side], side + 1
        if is_small[side]:
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
