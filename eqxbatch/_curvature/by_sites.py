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
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from .._base.dtypes import widened
from .._base.jaxprs import depends, evaluate_jaxpr
from .._base.mesh import full_varying_as, vary_as
from .._base.trees import safe_zip, type_of
from .._sites.cost import pushed_cost
from .._sites.einsum import EXAMPLE, Labels, Term
from .._sites.factors import Factors
from .._sites.gram import cancels, has_products, OfLeaf
from .._sites.shared import evaluated, Node
from .._sites.site import is_allowed, is_sum, Label, Site
from .._sites.trace import Program
from .columns import hessian_products, images, one_hot_seeds, replaced
from .site_blocks import (
    AbstractSiteMatrix,
    cotangent_term,
    for_each,
    Kept,
    named_labels,
    operand_term,
    PAIR,
    Pair,
    RequestedBlocks,
    Stacks,
    struct_of,
    Terms,
    Use,
)


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
        x = widened(for_each(arranged, x, lead))
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
            parts.append(x[positions, :, np.array([alike.index(z) for z, _ in group])])
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
