"""Second derivatives with respect to parameters, from the sites where they enter.

With `d` the cotangent of a site's output `y = w(a)`, the gradient with respect to `w`
is `d a`. A second parameter that enters at `y' = w'(a')` changes `d` (and `a`, if the
first site comes later) only through `y'`. So the second derivatives of one example are

    (∂d/∂z') a a' + d (∂a/∂z') a' + d' (∂a'/∂z) a,

for small perturbations `z` of `y` and `z'` of `y'`. These have few entries compared to
the parameters. Only the products with the operands, summed over all examples, are as
large as the Hessian.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import widened
from .._base.jaxprs import depends, evaluate_jaxpr
from .._base.mesh import full_varying_as, vary, varying
from .._sites.cancellation import cancels, OfLeaf
from .._sites.cost import pushed_cost
from .._sites.einsum import EXAMPLE, Labels, Term
from .._sites.factors import Factors
from .._sites.shared import evaluate, Node
from .._sites.site import is_allowed, is_sum, Label, Site
from .._sites.trace import Program
from .by_products import replaced
from .site_blocks import (
    Blocks,
    for_each,
    named_labels,
    operand_term,
    PAIR,
    Pair,
    RequestedBlocks,
    Stacks,
    Use,
)


def is_covered(program: Program, leaf: int, requested: RequestedBlocks) -> bool:
    """Whether the requested blocks of a leaf can be computed from sites."""
    sites = program.sites_of(leaf)
    if leaf in program.fallbacks or any(site.is_reverse for site in sites):
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

    - `sizes`: the sizes of the perturbations. Perturbations of equal shapes are
        adjacent; `alike` lists them for each.
    """

    perturbations: tuple[int, ...]
    sizes: tuple[int, ...]
    alike: dict[int, list[int]]
    cotangents: tuple[int, ...]
    operands: tuple[int, ...]

    @property
    def num(self) -> int:
        """The number of directions."""
        return sum(self.sizes)

    def directions(self, perturbations: Sequence[int]) -> tuple[int, int]:
        """The range of directions of some adjacent perturbations."""
        first = self.perturbations.index(perturbations[0])
        start = sum(self.sizes[:first])
        return start, start + sum(self.sizes[first : first + len(perturbations)])


class PerturbedGradient:
    """The cotangents and operands of one example, as a function of perturbations.

    This is traced once. The trace shows which values depend on which perturbation and
    what their derivatives cost, and it is what runs.

    - `of_cotangents`, `of_operands`: pairs of a perturbation and a cotangent or operand
        that depends on it, among those that sites need.
    """

    def __init__(
        self, program: Program, leaves: list, requested: RequestedBlocks, remat: bool
    ):
        self.program = program
        num = len(program.perturbations)
        avals = [var.aval for var in program.jaxpr.invars]
        zeros = [full_varying_as(aval, 0) for aval in avals]
        own, rows = zeros[: len(leaves)], zeros[len(leaves) :]

        def gradient(point: list, leaves: list, rows: list, weight: Array) -> list:
            def value(point: list) -> tuple[Array, list]:
                outs, operands = program.perturbed(leaves, rows, point)
                return outs[0], operands

            value = jax.checkpoint(value) if remat else value
            _, pull, operands = jax.vjp(value, point, has_aux=True)
            return [*pull(weight)[0], *operands]

        point = program.zeros(own, rows)
        weight = full_varying_as(program.jaxpr.outvars[0].aval, 1)
        self.closed = jax.make_jaxpr(gradient)(point, own, rows, weight)
        marks = [False for _ in self.closed.jaxpr.invars]
        needs = _Needs(program, requested)
        self.of_cotangents: set[tuple[int, int]] = set()
        self.of_operands: set[tuple[int, int]] = set()
        for z in sorted({*needs.cotangents, *needs.operands}):
            depend = depends(self.closed.jaxpr, [*marks[:z], True, *marks[z + 1 :]])
            cotangents = needs.cotangents.get(z, ())
            self.of_cotangents |= {(z, i) for i in cotangents if depend[i]}
            operands = needs.operands.get(z, ())
            self.of_operands |= {(z, i) for i in operands if depend[num + i]}

    def at(
        self, leaves: list, rows: list, weight: Array | None
    ) -> tuple[list, Callable[[list], list]]:
        """The point to differentiate at, and the function to differentiate."""
        point = self.program.zeros(leaves, rows)
        aval = self.program.jaxpr.outvars[0].aval
        seed = full_varying_as(aval, 1)
        seed = seed if weight is None else seed * weight.astype(aval.dtype)
        closed = self.closed

        def run(point: list) -> list:
            args = [*point, *leaves, *rows, seed]
            return evaluate_jaxpr(closed.jaxpr, list(closed.consts), args)

        return point, run

    def pushes(self) -> list[Push]:
        """The programs for derivatives."""
        every = sorted({z for z, _ in (*self.of_cotangents, *self.of_operands)})
        size = -(-len(every) // _MOST_PUSHES) or 1
        return [
            self._push(every[start : start + size])
            for start in range(0, len(every), size)
        ]

    def _push(self, perturbations: list[int]) -> Push:
        structs = self.program.perturbations
        alike: dict[tuple, list[int]] = {}
        for z in perturbations:
            key = (structs[z].shape, structs[z].dtype)
            alike.setdefault(key, []).append(z)
        ordered = [z for own in alike.values() for z in own]
        return Push(
            tuple(ordered),
            tuple(structs[z].size for z in ordered),
            {z: own for own in alike.values() for z in own},
            tuple(sorted({i for z, i in self.of_cotangents if z in perturbations})),
            tuple(sorted({i for z, i in self.of_operands if z in perturbations})),
        )

    def kind(self, site: Site, other: Site) -> tuple:
        """A key that is equal for pairs of sites with the same terms."""
        z, y = site.perturbation, other.perturbation
        return (
            (z > y) - (z < y),
            (min(z, y), max(z, y)) in self.of_cotangents,
            (y, site.operand) in self.of_operands,
            (z, other.operand) in self.of_operands,
        )


class _Needs:
    """What sites need, so that each derivative is computed once."""

    def __init__(self, program: Program, requested: RequestedBlocks):
        self.cotangents: dict[int, set[int]] = {}
        self.operands: dict[int, set[int]] = {}
        pairs = itertools.chain.from_iterable(
            itertools.product(*map(program.sites_of, pair)) for pair in requested.pairs
        )
        for site, other in pairs:
            first, last = sorted((site.perturbation, other.perturbation))
            self.cotangents.setdefault(first, set()).add(last)
            for changed, by in ((site, other), (other, site)):
                if changed.operand is not None and changed.rule.token is None:
                    self.operands.setdefault(by.perturbation, set()).add(
                        changed.operand
                    )


class _Derivatives:
    """Cotangents and operands of some examples, and their derivatives.

    Derivatives are with respect to perturbations. All arrays have the examples along
    axis 0. A derivative has the directions of its `Push` along axis 1.
    """

    def __init__(
        self,
        gradient: PerturbedGradient,
        cotangents: list,
        operands: list,
        changes: list[tuple[Push, list]],
        *,
        are_stacked: bool,
    ):
        self.program, self._gradient = gradient.program, gradient
        stacks = functools.partial(Stacks, are_stacked=are_stacked)
        self._cotangents = stacks(dict(enumerate(cotangents)))
        self._operands = stacks(dict(enumerate(operands)))
        self._pushes: dict[int, int] = {}
        self._of_cotangents: list[tuple[Push, Stacks]] = []
        self._of_operands: list[tuple[Push, Stacks]] = []
        for i, (push, found) in enumerate(changes):
            self._pushes.update(dict.fromkeys(push.perturbations, i))
            num = len(push.cotangents)
            known = stacks(dict(zip(push.cotangents, found[:num], strict=True)))
            self._of_cotangents.append((push, known))
            known = stacks(dict(zip(push.operands, found[num:], strict=True)))
            self._of_operands.append((push, known))

    def terms(
        self, uses: Sequence[Use], labels: list[dict[str, Label]]
    ) -> Iterator[list[Term]]:
        """Arrays to contract; the block of two sites is the sum of the contractions."""
        curvature = self._curvature(uses, labels)
        sites, others = zip(*uses, strict=True)
        sides = ((sites, labels[0]), (others, labels[1]))
        operands = [self._operand(*side) for side in sides]
        if curvature is not None:
            yield [curvature, *operands[0], *operands[1]]
        for index in (0, 1):
            changed, by = sides[index], sides[1 - index]
            change = self._change(*changed, *by)
            if change is not None:
                yield [self._cotangent(*changed), change, *operands[1 - index]]

    def of_sources(self) -> list[tuple[Node, Array]]:
        """The values that are not linear in leaves, and their gradients.

        The gradients are those of the sum over the examples.
        """
        uses: dict[tuple, Site] = {}
        for site in self.program.sites:
            if site.source is not None:
                key = (site.source, site.perturbation, site.operand, id(site.rule))
                uses.setdefault(key, site)
        return [(key[0], self._of_source(site)) for key, site in uses.items()]

    def _of_source(self, site: Site) -> Array:
        d = self._cotangents[site.perturbation]
        a = None if site.operand is None else self._operands[site.operand]
        source = site.source
        assert source is not None
        shape = (*(length for _, length in source.loops), *source.shape)

        def outputs(value: Array) -> Array:
            in_axes = (None if a is None else 0, None)
            each = jax.vmap(site.output_of_source, in_axes, axis_size=d.shape[0])
            return each(a, value)

        zeros = vary(jnp.zeros(shape, source.dtype), varying(jax.typeof(d)))
        return jax.linear_transpose(outputs, zeros)(d)[0]

    def _cotangent(self, sites: Sequence[Site], labels: dict[str, Label]) -> Term:
        site = sites[0]
        d, lead = self._cotangents.take([each.perturbation for each in sites])
        arrange = lambda d: jax.vmap(site.arrange)(site.at_steps(d, 1))
        d = widened(for_each(arrange, d, lead))
        return d, (*lead, EXAMPLE, *named_labels(labels, site.d_axes))

    def _operand(self, sites: Sequence[Site], labels: dict[str, Label]) -> list[Term]:
        if sites[0].operand is None:
            return []
        return [operand_term(sites, self._operands, labels)]

    def _curvature(
        self, uses: Sequence[Use], labels: list[dict[str, Label]]
    ) -> Term | None:
        """How the cotangents of sites change with the perturbations of others."""
        sites, others = zip(*uses, strict=True)
        sides = [(sites, labels[0]), (others, labels[1])]
        if sites[0].perturbation < others[0].perturbation:
            sides.reverse()
        (changed, names), (by, other_names) = sides
        keys = [
            (second.perturbation, first.perturbation)
            for first, second in zip(changed, by, strict=True)
        ]
        if keys[0] not in self._gradient.of_cotangents:
            return None
        x = self._changes(self._of_cotangents, keys)
        own = changed[0]
        named = named_labels(names, own.d_axes)
        return self._changed(x, own, own.arrange, named, by[0], other_names)

    def _change(
        self,
        changed: Sequence[Site],
        names: dict[str, Label],
        by: Sequence[Site],
        other_names: dict[str, Label],
    ) -> Term | None:
        """How the operands of sites change with the perturbations of others."""
        keys = [
            (second.perturbation, first.operand)
            for first, second in zip(changed, by, strict=True)
        ]
        if keys[0] not in self._gradient.of_operands:
            return None
        x = self._changes(self._of_operands, keys)
        own = changed[0]
        named = named_labels(names, own.a_axes)
        return self._changed(x, own, own.expand, named, by[0], other_names)

    def _changed(
        self,
        changes: tuple[Array, Labels],
        own: Site,
        arrange: Callable[[Array], Array],
        named: Labels,
        by: Site,
        other_names: dict[str, Label],
    ) -> Term:
        """Changes of an array that `arrange` gives the axes of a site."""
        x, lead = changes

        def arranged(x: Array) -> Array:
            return self._arranged(by, jax.vmap(jax.vmap(arrange))(own.at_steps(x, 2)))

        axes = (*named_labels(other_names, by.d_axes), *named)
        return widened(for_each(arranged, x, lead)), (*lead, EXAMPLE, *axes)

    def _changes(
        self, known: list[tuple[Push, Stacks]], keys: list[tuple[int, Any]]
    ) -> tuple[Array, Labels]:
        """Derivatives with respect to perturbations, for one pair or for several.

        The entries of a pair's perturbation are along axis 1.
        """
        if len(keys) == 1:
            ((z, number),) = keys
            push, stacks = known[self._pushes[z]]
            start, stop = push.directions([z])
            return stacks[number][:, start:stop], ()
        size = self.program.perturbations[keys[0][0]].size
        parts = []
        of_key = lambda key: self._pushes[key[0]]
        for i, own in [(i, [*own]) for i, own in itertools.groupby(keys, of_key)]:
            push, stacks = known[i]
            x, positions = stacks.stack([number for _, number in own])
            # Perturbations of the same shape are adjacent.
            alike = push.alike[own[0][0]]
            start, stop = push.directions(alike)
            x = x[:, :, start:stop]
            x = x.reshape(*x.shape[:2], len(alike), size, *x.shape[3:])
            parts.append(x[positions, :, np.array([alike.index(z) for z, _ in own])])
        return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)), (PAIR,)

    def _arranged(self, by: Site, x: Array) -> Array:
        """The axes of the perturbation in a derivative, as its site names them."""
        num, rest = x.shape[0], x.shape[2:]
        split = x.reshape(
            num, *self.program.perturbations[by.perturbation].shape, math.prod(rest)
        )
        arrange = jax.vmap(by.arrange, in_axes=-1, out_axes=-1)
        arranged = jax.vmap(arrange)(by.at_steps(split, 1))
        return arranged.reshape(*arranged.shape[:-1], *rest)


class SiteHessian:
    """Blocks of the Hessian of a sum over examples, from the sites of its leaves.

    The first output of the `program` is summed.
    """

    def __init__(
        self,
        program: Program,
        leaves: list,
        requested: RequestedBlocks,
        *,
        checkpoint: bool = False,
    ):
        self.program = program
        self._gradient = PerturbedGradient(program, leaves, requested, checkpoint)
        self._pushes = self._gradient.pushes()
        self.blocks = Blocks(program, leaves, requested, self._gradient.kind)

    def sums(
        self,
        leaves: list,
        rows: list,
        axes: Sequence[int],
        weights: Real[Array, " n"] | None,
        *,
        counts_cancelled: bool = False,
    ) -> list[Inexact[Array, "..."]]:
        """The blocks of each group, of the (weighted) sum over the examples.

        With `counts_cancelled`, the number of examples for which the terms of gradients
        nearly cancel comes last. Blocks are sums over pairs of these terms, which keep
        no digits then.
        """

        def one(rows: list, weight: Array | None) -> tuple[list, list, list]:
            point, run = self._gradient.at(leaves, rows, weight)
            outs = run(point)
            changes = [
                (push, jax.vmap(self._pushed(point, run, push))(_basis_of(point, push)))
                for push in self._pushes
            ]
            return outs[: len(point)], outs[len(point) :], changes

        found = of_examples(one, rows, axes, weights)
        are_stacked = self.blocks.are_stacked
        derivatives = _Derivatives(self._gradient, *found, are_stacked=are_stacked)
        values = self.program.values(leaves)
        blocks = self.blocks.sums(derivatives.terms, values)
        blocks = with_curved(self.blocks, leaves, derivatives.of_sources(), blocks)
        if counts_cancelled:
            cotangents, operands, _ = found
            factors = Factors(operands, cotangents, values=values)
            blocks.append(self._num_cancelled(leaves, factors))
        return blocks

    @property
    def summed(self) -> list[int]:
        """The leaves whose gradient is a sum of terms, which may nearly cancel."""
        program, leaves = self.program, sorted(self.blocks.requested.leaves)
        return [i for i in leaves if is_sum(program.sites_of(i))]

    def _num_cancelled(self, leaves: list, factors: Factors) -> Real[Array, ""]:
        sites = self.program.sites_of
        flags = cancels([OfLeaf(sites(i), factors, leaves[i]) for i in self.summed])
        assert flags is not None
        return jnp.sum(flags.array, dtype=jnp.float32)

    @property
    def bytes(self) -> int:
        """The bytes kept for one example."""
        program = self.program
        structs = [*program.perturbations, *program.operands]
        kept = [(x, 1) for x in structs]
        for push in self._pushes:
            kept += ((program.perturbations[i], push.num) for i in push.cotangents)
            kept += ((program.operands[i], push.num) for i in push.operands)
        return sum(num * x.size * x.dtype.itemsize for x, num in kept)

    def estimate(self, num: int) -> "Estimate":
        """The cost of the sums over `num` examples. It depends on shapes only."""
        program, jaxpr = self.program, self._gradient.closed.jaxpr
        costs: dict[int, float] = {}
        for push in self._pushes:
            marks = [i in push.perturbations for i, _ in enumerate(jaxpr.invars)]
            of_one = num * pushed_cost(jaxpr, marks).time
            for z in push.perturbations:
                costs[z] = of_one * program.perturbations[z].size
        of = lambda x, *lead: jax.ShapeDtypeStruct((num, *lead, *x.shape), x.dtype)
        cotangents = [*map(of, program.perturbations)]
        operands = [*map(of, program.operands)]
        changes = [
            [
                *(of(program.perturbations[i], push.num) for i in push.cotangents),
                *(of(program.operands[i], push.num) for i in push.operands),
            ]
            for push in self._pushes
        ]

        def count(
            cotangents: list, operands: list, changes: list, values: list
        ) -> dict:
            pairs = [*zip(self._pushes, changes, strict=True)]
            known = (cotangents, operands, pairs)
            derivatives = _Derivatives(self._gradient, *known, are_stacked=False)
            return self.blocks.costs(derivatives.terms, values)

        values = program.value_structs()
        args = (cotangents, operands, changes, values)
        return Estimate(costs, eqx.filter_eval_shape(count, *args))

    def _pushed(
        self, point: list, run: Callable[[list], list], push: Push
    ) -> Callable[[list], list]:
        """The derivative with respect to some perturbations, as a linear function."""
        num = len(point)

        def at(zs: list) -> list:
            outs = run(replaced(point, push.perturbations, zs))
            return [
                *(outs[i] for i in push.cotangents),
                *(outs[num + i] for i in push.operands),
            ]

        own = [point[z] for z in push.perturbations]
        return lambda change: jax.jvp(at, [own], [change])[1]


def _basis_of(point: list, push: Push) -> list[Array]:
    """All one-hot directions of the perturbations of a push."""
    seeds = []
    for z in push.perturbations:
        x, (start, _) = point[z], push.directions([z])
        own = jnp.eye(push.num, x.size, -start, dtype=x.dtype)
        seeds.append(vary(own.reshape(push.num, *x.shape), varying(jax.typeof(x))))
    return seeds


def with_curved(
    blocks: Blocks,
    leaves: list,
    sources: list[tuple[Node, Array]],
    found: list[Array],
) -> list[Array]:
    """Adds the second derivatives of values that are computed from leaves alone.

    `sources` are these values, and the gradients of the sum with respect to them. An
    elementwise function of a leaf has a diagonal Hessian, which takes one product.
    """
    if not sources:
        return found
    program, requested = blocks.program, blocks.requested
    curved = {s.leaf: False for s in program.sites if s.source is not None}
    curved |= {s.leaf: True for s in program.sites if s.is_coupled}
    numbers = sorted(curved)

    def gradient(own: list) -> list:
        def value(own: list) -> Array:
            every = [*leaves]
            for number, x in zip(numbers, own, strict=True):
                every[number] = x
            values = evaluate([node for node, _ in sources], every)
            pairs = zip(values, sources, strict=True)
            terms = (jnp.sum(x * weight) for x, (_, weight) in pairs)
            return functools.reduce(jnp.add, terms)

        return jax.grad(value)(own)

    point = [leaves[number] for number in numbers]

    def pushed(second: int) -> Callable[[Array], list]:
        position = numbers.index(second)
        at = lambda x: gradient([*point[:position], x, *point[position + 1 :]])
        return jax.linearize(at, point[position])[1]

    pushes = {
        second: pushed(second) for _, second in requested.pairs if second in curved
    }
    result = []
    for pairs, block in zip(blocks.groups, found, strict=True):
        first, second = pairs[0]
        if first in curved and second in curved:
            # Such leaves are unlike all others, so this is the block of a single pair.
            push = lambda x, first=first, second=second: pushes[second](x)[
                numbers.index(first)
            ].astype(block.dtype)
            if curved[first] and curved[second]:
                columns = jax.vmap(push, 0, -1)(basis(leaves[second]))
                block = block + columns.reshape(block.shape)
            elif first == second:
                diagonal = push(jnp.ones_like(leaves[first]))
                block = _plus_diagonal(block, diagonal, requested.is_diagonal)
        result.append(block)
    return result


def _plus_diagonal(block: Array, diagonal: Array, is_diagonal: bool) -> Array:
    if is_diagonal:
        return block + diagonal
    entries = jnp.arange(diagonal.size)
    flat = block.reshape(diagonal.size, diagonal.size)
    return flat.at[entries, entries].add(diagonal.ravel()).reshape(block.shape)


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


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The number of floating-point operations for blocks of a Hessian.

    - `perturbations`: for each perturbation, its derivatives.
    - `pairs`: for each pair of leaves, the contraction of these derivatives.
    """

    perturbations: dict[int, float]
    pairs: dict[Pair, float]


def cheapest(
    program: Program,
    covered: set[int],
    estimate: Estimate,
    columns: dict[int, float],
) -> set[int]:
    """The leaves to compute from sites, so that the total cost is minimal.

    Leaves that share a perturbation, such as a weight and its bias, are chosen
    together.
    """
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
        by_sites = sum(estimate.perturbations.get(number, 0.0) for number in used)
        by_sites += sum(
            flops for pair, flops in estimate.pairs.items() if leaves.issuperset(pair)
        )
        return by_sites + sum(columns[i] for i in columns if i not in leaves)

    best = min(({*covered}, set[int]()), key=cost)
    for _ in clusters:
        candidates = [best ^ cluster for cluster in clusters]
        better = min(candidates, key=cost)
        if cost(better) >= cost(best):
            break
        best = better
    return best


def basis(x: Array) -> Array:
    """All one-hot directions of `x`, along a new axis 0."""
    seeds = jnp.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)
    return vary(seeds, varying(jax.typeof(x)))
