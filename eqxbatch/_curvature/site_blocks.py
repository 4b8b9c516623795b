"""The blocks of a matrix of second derivatives, from pairs of sites."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.cpu import as_own_program, true_of
from .._base.dtypes import common_dtype, widened
from .._base.trees import consecutive_groups
from .._sites.cost import contraction_cost, total_cost
from .._sites.einsum import contract, EXAMPLE, Labels, Term
from .._sites.factors import scale_of, weight_terms
from .._sites.rules import Axes
from .._sites.site import is_lettered, Label, labels_of, Site
from .._sites.trace import Program


Pair = tuple[int, int]

# Less than that is not worth keeping apart: the terms of its sums are small beside what
# they are made of, all of which is there until the last one is.
_LEAST_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The blocks of a Hessian that are wanted.

    - `pairs`: of leaves, by number; the block of a pair has the axes of its first leaf,
        and then those of its second one.
    - `is_diagonal`: whether only the diagonals of the blocks are, which are of a leaf
        with itself then.
    """

    pairs: list[Pair]
    is_diagonal: bool = False

    @property
    def leaves(self) -> set[int]:
        return {leaf for pair in self.pairs for leaf in pair}

    def among(self, leaves: Iterable[int]) -> "Wanted":
        """The blocks of pairs of these leaves."""
        chosen = set(leaves)
        pairs = [pair for pair in self.pairs if chosen.issuperset(pair)]
        return Wanted(pairs, self.is_diagonal)


def operand_term(site: Site, operand: Array, labels: dict[str, Label]) -> Term:
    """The operand of a site with the axes that the site names."""
    a = jax.vmap(site.expand)(site.at_steps(operand, 1))
    names = site.a_axes
    if site.rule.token is not None:
        # A row of a table that is not there is no row at all.
        a = jax.nn.one_hot(a, site.sizes[site.rule.token], dtype=jnp.float32)
        names = (*names, site.rule.token)
    return widened(a), (EXAMPLE, *named_labels(labels, names))


def named_labels(labels: dict[str, Label], names: Axes) -> Labels:
    return tuple(labels[name] for name in names)


Terms = Callable[[Site, Site, list[dict[str, Label]]], Iterable[list[Term]]]


class Blocks:
    """Blocks of second derivatives with respect to leaves, from those of their sites.

    `leaves` are of their shapes and dtypes; `terms` gives the arrays to contract for a
    pair of sites and the labels of their axes.
    """

    def __init__(self, program: Program, leaves: list, wanted: Wanted):
        self.program, self.leaves, self.wanted = program, leaves, wanted

    def sums(self, terms: Terms, values: list) -> list[Inexact[Array, "..."]]:
        """One for each pair that is wanted, summed over the examples.

        `values` are those of the program.
        """
        pairs = self.wanted.pairs
        sizes = [self._num_bytes(pair) for pair in pairs]
        if sum(sizes) <= _LEAST_BYTES:
            return [self._sum(pair, terms, values) for pair in pairs]
        found: list[Array] = []
        for group in consecutive_groups(sizes, least=0):
            run = lambda group=group: [
                self._sum(pairs[i], terms, values) for i in group
            ]
            # XLA for CPUs would compute the terms of all pairs before it adds any. Here
            # what a group waits for is a number of the one before.
            before = found[-1] if found else self.leaves[0]
            found += as_own_program(run, true_of(before.ravel()[:1]))()
        return found

    def _num_bytes(self, pair: Pair) -> int:
        first, second = (self.leaves[leaf] for leaf in pair)
        entries = first.size * (1 if self.wanted.is_diagonal else second.size)
        return entries * first.dtype.itemsize

    def _sum(self, pair: Pair, terms: Terms, values: list) -> Array:
        first, second = (self.leaves[leaf] for leaf in pair)
        shape = first.shape
        if not self.wanted.is_diagonal:
            shape = (*shape, *second.shape)
        dtype = common_dtype(jnp.float32, first.dtype, second.dtype)
        total = None
        for site, other in itertools.product(*map(self.program.sites_of, pair)):
            for arrays, out in self._labelled(site, other, terms, values):
                block = contract(arrays, out)
                block = self._of_leaves(block, site, other, values).astype(dtype)
                total = block if total is None else total + block
        return jnp.zeros(shape, dtype) if total is None else total

    def cost(self, pair: Pair, terms: Terms, values: list) -> float:
        """What a pair's block takes, in floating-point operations."""
        return total_cost(
            contraction_cost(arrays, out)
            for site, other in itertools.product(*map(self.program.sites_of, pair))
            for arrays, out in self._labelled(site, other, terms, values)
        ).time

    def _labelled(
        self, site: Site, other: Site, terms: Terms, values: list
    ) -> Iterator[tuple[list[Term], Labels]]:
        """What to contract, and to which axes."""
        labels = [labels_of(site, 0), labels_of(other, 1)]
        labels = [
            {
                name: _of_side(label, side)
                if label[0] == "view" or not self.wanted.is_diagonal
                else label
                for name, label in names.items()
            }
            for side, names in enumerate(labels)
        ]
        weights = [
            weight_terms(use, values, names)
            for use, names in zip((site, other), labels, strict=True)
        ]
        for arrays in terms(site, other, labels):
            arrays = [*arrays, *weights[0], *weights[1]]
            arrays = [_without_repeats(term) for term in _alike(arrays)]
            present = {label for _, axes in arrays for label in axes}
            # An axis of size 1 may be in none of them, and is put back by a reshape.
            yield arrays, tuple(sorted(filter(_is_of_leaf, present), key=_key))

    def _of_leaves(self, block: Array, site: Site, other: Site, values: list) -> Array:
        """The block of two leaves, from that of the views of them that sites have."""
        block = block * (scale_of(site) * scale_of(other))
        structs = [self.leaves[site.leaf], self.leaves[other.leaf]]
        if self.wanted.is_diagonal:
            return _diagonal_of(block, (site, other), structs[0], values)
        views = [
            struct if is_lettered(use) else use.view.struct(struct, values)
            for use, struct in zip((site, other), structs, strict=True)
        ]
        if not is_lettered(site):
            block = block.reshape(*views[0].shape, math.prod(views[1].shape))
            back = _transposed(site, structs[0], views[0], values)
            block = jax.vmap(back, -1, -1)(block)
        if not is_lettered(other):
            block = block.reshape(math.prod(structs[0].shape), *views[1].shape)
            block = jax.vmap(_transposed(other, structs[1], views[1], values))(block)
        return block.reshape(*structs[0].shape, *structs[1].shape)


def _diagonal_of(
    block: Array, sites: tuple[Site, Site], struct: Any, values: list
) -> Array:
    """The diagonal of a block of two sites of a leaf, in the shape of the leaf.

    Along the axes of a small view, the block is multiplied with what its entries are
    of the leaf.
    """
    views = [
        None if is_lettered(use) else use.view.struct(struct, values) for use in sites
    ]
    nums = [1 if view is None else math.prod(view.shape) for view in views]
    are_small = all(view is not None for view in views)
    of_leaf = 1 if are_small else math.prod(struct.shape)
    block = block.reshape(of_leaf, *nums)
    for side in (1, 0):
        view, axis = views[side], side + 1
        if view is not None:
            back = _transposed(sites[side], struct, view, values)
            seeds = jnp.eye(nums[side], dtype=view.dtype)
            directions = jax.vmap(back)(seeds.reshape(nums[side], *view.shape))
            directions = directions.reshape(nums[side], math.prod(struct.shape)).T
            block = block * jnp.expand_dims(directions, range(1, axis))
        block = jnp.sum(block, axis)
    return block.reshape(struct.shape)


def _transposed(
    site: Site, struct: Any, view: Any, values: list
) -> Callable[[Array], Array]:
    """Takes what belongs to a view of a leaf back to the leaf."""
    back = site.view.transposed(struct, values)
    return lambda x: widened(back(x.astype(view.dtype)))


def _alike(terms: list[Term]) -> list[Term]:
    """The same in one dtype, the widest."""
    dtype = common_dtype(*(x.dtype for x, _ in terms))
    return [(x.astype(dtype), labels) for x, labels in terms]


def _of_side(label: Label, side: int) -> Label:
    return ((label[0], side), label[1]) if label[0] in ("leaf", "view") else label


def _is_of_leaf(label: Label) -> bool:
    kind = label[0]
    return kind in ("leaf", "view") or isinstance(kind, tuple)


def _key(label: Label) -> tuple[int, int]:
    kind, axis = label
    return (kind[1] if isinstance(kind, tuple) else -1), axis


def _without_repeats(term: Term) -> Term:
    """The diagonal of axes that have the same label."""
    x, labels = term
    kept = tuple(dict.fromkeys(labels))
    if len(kept) == len(labels):
        return term
    numbers = [kept.index(label) for label in labels]
    return jnp.einsum(x, numbers, [*range(len(kept))]), kept
