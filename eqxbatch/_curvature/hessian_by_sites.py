"""Hessians by sites.

With `d` the cotangent of a site's output `y = w(a)`, the gradient with respect to `w`
is `d a`. A second parameter that enters at `y' = w'(a')` changes `d` (and `a`, if the
first site comes later) only through `y'`. So the second derivatives of one example are

    (∂d/∂z') a a' + d (∂a/∂z') a' + d' (∂a'/∂z) a,

for small perturbations `z` of `y` and `z'` of `y'`. These have few entries compared to
the parameters. Only the products with the operands, summed over all examples, are as
large as the Hessian.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._base.cpu import computed_once
from .._base.dtypes import widened
from .._base.jaxprs import depends, run_jaxpr
from .._base.mesh import vary_as
from .._base.structs import full_varying_as
from .._base.trees import safe_zip
from .._batch.arguments import RowArrays
from .._batch.rows import Rows
from .._sites.axes import Axis, EXAMPLE, Named
from .._sites.cancel import cancels
from .._sites.cost import pushed_cost
from .._sites.factors import Factors
from .._sites.gram import of_leaf
from .._sites.program import Program
from .._sites.site import is_sum, Site
from .._sites.table import SiteTable
from .._sites.values import evaluated, Node
from .by_sites import AbstractSiteMatrix, alone, PairFactors, struct_of, Use
from .columns import hessian_products, images, one_hot_seeds, replaced
from .pytree import RequestedBlocks


# The maximal number of programs in which derivatives are taken. Each contains what
# comes after its first perturbation, so more programs compute less, but take longer to
# compile.
_MOST_PUSHES = 3


class _Changed(NamedTuple):
    """The factors of one example, or of several, and how they change.

    - `changes`: for each push, those of the cotangents and operands that it changes.
        The axis after that of examples has the entries of its perturbations.
    """

    operands: list[Array]
    cotangents: list[Array]
    changes: list[list[Array]]


class _OfUse(NamedTuple):
    """How the factors of two sites change with each other's perturbation.

    - `cotangent`: the change of the later cotangent; None for zero.
    - `first`, `second`: the changes of the two operands.
    """

    cotangent: Array | None
    first: Array | None
    second: Array | None


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
        # What may change with each perturbation: only the factors of sites that meet in
        # a requested block.
        needed = {
            (z, i)
            for pair in requested.pairs
            for use in itertools.product(*map(program.table.of, pair))
            for z, i in _keys(program.table, Use(*use))
            if i is not None
        }
        # A perturbation changes only what is computed from it.
        depend = {
            z: depends(jaxpr, [i == z for i, _ in enumerate(jaxpr.invars)])
            for z in sorted({z for z, _ in needed})
        }
        self.changes = {(z, i) for z, i in needed if depend[z][i]}
        # Perturbations are numbered in the order of their sites, so those of a push
        # have what comes after them in common.
        every = sorted({z for z, _ in self.changes})
        size = -(-len(every) // _MOST_PUSHES) or 1
        groups = [every[i : i + size] for i in range(0, len(every), size)]
        changed = lambda push: sorted({i for z, i in self.changes if z in push})
        self.pushes = [(push, changed(push)) for push in groups]
        super().__init__(program, requested)
        # The leaves whose gradient is a sum of terms, which may nearly cancel.
        self._summed = [
            i for i in sorted(requested.leaves) if is_sum(program.table.of(i))
        ]
        self._counts_cancelled = counts_cancelled and len(self._summed) > 0

    def kind(self, site: Site, other: Site) -> tuple:
        # Which of both comes later, and which of the terms are not zero.
        z, y = site.perturbation, other.perturbation
        keys = _keys(self.program.table, Use(site, other))
        return (z > y) - (z < y), *(key in self.changes for key in keys)

    def blocks_of(self, factors: Factors) -> list[Inexact[Array, "..."]]:
        sources = _sources(self.program.table, factors)
        return _with_curved(self, sources, self.contracted_blocks(factors))

    def num_cancelled(self, factors: Factors) -> Real[Array, ""] | None:
        if not self._counts_cancelled:
            return None
        # Blocks are sums over pairs of the terms of gradients, which keep no digits if
        # these terms nearly cancel.
        table = self.program.table
        flags = cancels([of_leaf(table, factors, i) for i in self._summed])
        assert flags is not None
        return jnp.sum(flags.array, dtype=jnp.float32)

    def factors(self, rows: Rows) -> Factors:
        """Those of the program, with the changes of each push as their `curve`."""
        every = rows.of_each(self._of_example)
        if not rows.axes:
            every = jax.tree.map(lambda x: x[None], every)
        operands, cotangents, changes = every
        # Each of them is cut and stacked for several groups of blocks.
        curve = computed_once(changes)
        values = self.program.values()
        return Factors(operands, cotangents, (), values=values, curve=curve)

    def _of_example(self, example: Rows) -> _Changed:
        """The factors of one example, and how they change."""
        program, closed = self.program, self._closed
        # Perturbations are zero at the point where derivatives are taken.
        point = program.zeros(self.leaves, example.arrays)
        aval = program.jaxpr.outvars[0].aval
        # A weight multiplies the loss, and with it all derivatives.
        seed = full_varying_as(aval, 1)
        if example.weights is not None:
            seed = seed * example.weights.astype(aval.dtype)

        def run(point: list[Array]) -> list:
            args = [*point, *self.leaves, *example.arrays, seed]
            return run_jaxpr(closed.jaxpr, list(closed.consts), args)

        # The values themselves are needed as well as their derivatives.
        outs, changes = run(point), []
        for push, numbers in self.pushes:
            # Only these perturbations move, so that nothing before the first is
            # differentiated.
            zeros = [point[z] for z in push]

            def results(
                zs: list[Array], push: list[int] = push, numbers: list[int] = numbers
            ) -> list:
                outs = run(replaced(point, push, zs))
                return [outs[i] for i in numbers]

            product = functools.partial(jax.jvp, results, [zeros])
            # One direction for each entry of the perturbations.
            seeds = one_hot_seeds(jnp.arange(sum(x.size for x in zeros)), zeros)
            changes.append(
                jax.vmap(lambda seed, product=product: product([seed])[1])(seeds)
            )
        return _Changed(outs[len(point) :], outs[: len(point)], changes)

    def structs(self, num: int) -> Factors:
        table = self.program.table
        every = [*table.perturbations, *table.operands]
        total = lambda push: sum(table.perturbations[z].size for z in push)
        changes = [
            [struct_of(every[i], num, total(push)) for i in numbers]
            for push, numbers in self.pushes
        ]
        operands = [struct_of(x, num) for x in table.operands]
        cotangents = [struct_of(x, num) for x in table.perturbations]
        return Factors(operands, cotangents, (), num, curve=changes)

    def curve_of(self, use: Use, factors: Factors) -> _OfUse:
        """Those changes that are not zero."""

        def change(z: int, i: int | None) -> Array | None:
            if i is None or (z, i) not in self.changes:
                return None
            return self._at(factors.curve, z, i)

        return _OfUse(*(change(z, i) for z, i in _keys(self.program.table, use)))

    def _at(self, changes: list[list[Array]], z: int, i: int) -> Array:
        """A derivative in one perturbation, of a cotangent or operand."""
        # A push has the entries of all its perturbations along one axis: cut out those
        # of `z`.
        of_push = safe_zip(self.pushes, changes)
        (push, numbers), arrays = next(pair for pair in of_push if z in pair[0][0])
        sizes = {k: self.program.table.perturbations[k].size for k in push}
        start, x = sum(sizes[k] for k in push if k < z), arrays[numbers.index(i)]
        return lax.slice_in_dim(x, start, start + sizes[z], axis=1)

    def costs_of_factors(self, num: int, factors: Factors) -> dict[int, float]:
        del factors
        jaxpr, costs = self._closed.jaxpr, dict[int, float]()
        for push, _ in self.pushes:
            # A direction of a push costs the same for whichever of its perturbations.
            marks = [i in push for i, _ in enumerate(jaxpr.invars)]
            of_one = num * pushed_cost(jaxpr, marks).time
            for z in push:
                costs[z] = of_one * self.program.table.perturbations[z].size
        return costs

    def terms(
        self, use: Use, axes: Sequence[dict[str, Axis]], pair: PairFactors
    ) -> Iterator[list[Named]]:
        changes: _OfUse = pair.curve
        # Tokens become the one-hot rows that they stand for, which can be contracted.
        sides = [
            factors.terms(alone(site), tokens="one_hot", by_name=names)
            for site, factors, names in safe_zip(use, pair.sides, axes)
        ]
        operands = [[] if x.operand is None else [x.operand] for x in sides]
        # (∂d/∂z') a a', with the later of the two cotangents.
        if changes.cotangent is not None:
            later = 1 if use[0].perturbation < use[1].perturbation else 0
            change = self._change(changes.cotangent, use, axes, later, is_operand=False)
            yield [change, *operands[0], *operands[1]]
        # d (∂a/∂z') a' and d' (∂a'/∂z) a.
        for side, change in enumerate((changes.first, changes.second)):
            if change is not None:
                change = self._change(change, use, axes, side, is_operand=True)
                yield [sides[side].cotangent, change, *operands[1 - side]]

    def _change(
        self,
        x: Array,
        use: Use,
        axes: Sequence[dict[str, Axis]],
        side: int,
        *,
        is_operand: bool,
    ) -> Named:
        """How a site's cotangent or operand changes with the other's perturbation.

        The entries of the latter are along axis 1 of `x`.
        """
        site, other = use[side], use[1 - side]
        arrange = site.expand if is_operand else site.arrange
        names = site.a_axes if is_operand else site.d_axes
        # Each site names the axes of its own array.
        x = jax.vmap(jax.vmap(arrange))(site.at_steps(x, 2))
        # Then the other site names those of its perturbation, which are one axis so
        # far.
        num, rest = x.shape[0], x.shape[2:]
        shape = self.program.table.perturbations[other.perturbation].shape
        split = other.at_steps(x.reshape(num, *shape, math.prod(rest)), 1)
        arrange_other = jax.vmap(other.arrange, in_axes=-1, out_axes=-1)
        x = jax.vmap(arrange_other)(split)
        x = widened(x.reshape(*x.shape[:-1], *rest))
        of_other = (axes[1 - side][name] for name in other.d_axes)
        return Named(x, (EXAMPLE, *of_other, *(axes[side][name] for name in names)))


def _perturbed_gradient(program: Program, remat: bool) -> Any:
    """The jaxpr of cotangents and operands, from perturbations and one example."""
    leaves, rows = program.traced.zeros()

    def gradient(
        point: list[Array], leaves: list[Array], rows: RowArrays, weight: Array
    ) -> list:
        at_point = program.linearize(leaves, rows, point, remat=remat)
        return [*at_point.pullback([weight]), *at_point.operands]

    weight = full_varying_as(program.jaxpr.outvars[0].aval, 1)
    return jax.make_jaxpr(gradient)(program.zeros(leaves, rows), leaves, rows, weight)


def _keys(table: SiteTable, use: Use) -> list[tuple[int, int | None]]:
    """The derivatives that the terms of two sites need.

    Each is a pair of a perturbation and of what changes with it: the later of the two
    cotangents, and each operand with the other site, or None if it has none. Operands
    come after all cotangents.
    """
    pair, first = [site.perturbation for site in use], len(table.perturbations)
    operands = (
        None
        if site.operand is None or site.rule.token is not None
        else first + site.operand
        for site in use
    )
    return [(min(pair), max(pair)), *safe_zip(pair[::-1], operands)]


def _sources(table: SiteTable, factors: Factors) -> list[tuple[Node, Array]]:
    """The values that are not linear in leaves, and their gradients.

    The gradients are those of the sum over the examples.
    """
    # Sites of several leaves may have the same value, whose gradient counts once.
    uses: dict[tuple, Site] = {}
    for site in table.sites:
        if site.source is not None:
            key = (site.source, site.perturbation, site.operand, id(site.rule))
            uses.setdefault(key, site)

    def gradient(site: Site, source: Node) -> Array:
        # The output of the site is linear in the value, so its transpose takes `d`
        # back.
        d = factors.cotangents[site.perturbation].array
        operands = [x.array for x in factors.operands]
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
    table, requested, leaves = hessian.program.table, hessian.requested, hessian.leaves
    # By leaf, whether the second derivatives of its values are more than a diagonal.
    curved = {s.leaf: False for s in table.sites if s.source is not None}
    curved |= {s.leaf: True for s in table.sites if s.is_coupled}

    def gradient(leaves: list[Array], which: Sequence[int]) -> list:
        def value(point: list[Array]) -> Array:
            nodes = [x for x, _ in sources]
            values = evaluated(nodes, replaced(leaves, which, point))
            terms = (jnp.sum(values[x] * weight) for x, weight in sources)
            return functools.reduce(jnp.add, terms)

        return jax.grad(value)([leaves[i] for i in which])

    # This gradient is one of leaves alone: it costs nothing for each example.
    products = hessian_products(gradient, is_reverse=False, is_single=False)
    result = []
    for pairs, block in safe_zip(hessian.groups, blocks):
        first, second = pairs[0]
        if first in curved and second in curved:
            # Such leaves are unlike all others, so this is the block of a single pair.
            product = products(leaves, [second], [first])
            if curved[first] and curved[second]:
                # All columns, behind the axes of the rows, as in a block.
                (of_pair,) = images(product, [leaves[second]], None, -1)
                block = block + of_pair.astype(block.dtype).reshape(block.shape)
            elif first == second:
                # A diagonal matrix times a vector of ones has the diagonal.
                (diagonal,) = product([jnp.ones_like(leaves[first])])
                diagonal = diagonal.astype(block.dtype)
                block = _plus_diagonal(block, diagonal, requested.is_diagonal)
        result.append(block)
    return result


def _plus_diagonal(block: Array, diagonal: Array, is_diagonal: bool) -> Array:
    if is_diagonal:
        return block + diagonal
    # A whole block has both axes of the leaf, of which only equal entries are changed.
    entries = jnp.arange(diagonal.size)
    flat = block.reshape(diagonal.size, diagonal.size)
    return flat.at[entries, entries].add(diagonal.ravel()).reshape(block.shape)
