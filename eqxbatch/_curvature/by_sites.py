"""Second derivatives with respect to parameters, from the sites where they enter.

With `d` the cotangent of a site's output `y = w(a)`, the gradient with respect to `w`
is `d a`. A second parameter that enters at `y' = w'(a')` changes `d`, and `a` if it
comes later, by way of `y'` only. So the second derivatives of one example are

    (∂d/∂z') a a' + d (∂a/∂z') a' + d' (∂a'/∂z) a,

for small perturbations `z` of `y` and `z'` of `y'`. These have few entries as compared
to parameters, and only the products with the operands, summed over all examples, are
as large as the Hessian.
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
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import widened
from .._base.jaxprs import depends, evaluate_jaxpr
from .._base.mesh import vary, varying
from .._batch.slots import is_struct
from .._sites.cost import program_cost
from .._sites.einsum import EXAMPLE, Term
from .._sites.shared import evaluate, Node
from .._sites.site import is_allowed, Label, Site
from .._sites.trace import Program
from .site_blocks import Blocks, named_labels, operand_term, Pair, Wanted


def is_covered(program: Program, leaf: int, wanted: Wanted) -> bool:
    """Whether the blocks of a leaf that are wanted follow from sites."""
    sites = program.sites_of(leaf)
    if leaf in program.fallbacks or any(site.is_reverse for site in sites):
        return False
    if wanted.is_diagonal and any(site.is_coupled for site in sites):
        return False
    form = "diagonal" if wanted.is_diagonal else "hessian"
    return all(is_allowed(form, site, site) for site in sites)


@dataclasses.dataclass(frozen=True)
class _Along:
    """What changes with one perturbation, and is to be known of that."""

    perturbation: int
    cotangents: tuple[int, ...]
    operands: tuple[int, ...]


class _Needs:
    """What sites ask for, so that each derivative is computed once."""

    def __init__(self, program: Program, wanted: Wanted):
        self.cotangents: dict[int, set[int]] = {}
        self.operands: dict[int, set[int]] = {}
        for site, other in site_pairs(program, wanted):
            first, last = sorted((site.perturbation, other.perturbation))
            self.cotangents.setdefault(first, set()).add(last)
            for changed, by in ((site, other), (other, site)):
                if changed.operand is not None and changed.rule.token is None:
                    self.operands.setdefault(by.perturbation, set()).add(
                        changed.operand
                    )

    def along(self, jaxpr: Any, num_perturbations: int) -> list[_Along]:
        """One for each perturbation that something depends on.

        The inputs of the `jaxpr` are the perturbations, its outputs the cotangents and
        the operands.
        """
        result = []
        for perturbation in sorted({*self.cotangents, *self.operands}):
            marks = [i == perturbation for i in range(num_perturbations)]
            depend = depends(jaxpr, marks)
            cotangents = [i for i in self.cotangents.get(perturbation, ()) if depend[i]]
            operands = [
                i
                for i in self.operands.get(perturbation, ())
                if depend[num_perturbations + i]
            ]
            if cotangents or operands:
                result.append(
                    _Along(
                        perturbation, tuple(sorted(cotangents)), tuple(sorted(operands))
                    )
                )
        return result


def site_pairs(program: Program, wanted: Wanted) -> Iterator[tuple[Site, Site]]:
    for first, second in wanted.pairs:
        yield from itertools.product(program.sites_of(first), program.sites_of(second))


class _Derivatives:
    """Cotangents and operands of some examples, and how perturbations change them.

    All have the examples along axis 0. A derivative has the entries of the
    perturbation along axis 1, all of them in one axis.
    """

    def __init__(
        self,
        program: Program,
        cotangents: list,
        operands: list,
        changes: list[tuple[_Along, list]],
    ):
        self.program = program
        self._cotangents, self._operands = cotangents, operands
        self._of_cotangents: dict[tuple[int, int], Array] = {}
        self._of_operands: dict[tuple[int, int], Array] = {}
        for along, found in changes:
            num, z = len(along.cotangents), along.perturbation
            for perturbation, x in zip(along.cotangents, found[:num], strict=True):
                self._of_cotangents[z, perturbation] = x
            for operand, x in zip(along.operands, found[num:], strict=True):
                self._of_operands[z, operand] = x

    def terms(
        self, site: Site, other: Site, labels: list[dict[str, Label]]
    ) -> Iterator[list[Term]]:
        """Arrays to contract, the sum of which is the block of two sites."""
        curvature = self._curvature(site, other, labels)
        sides = ((site, labels[0]), (other, labels[1]))
        operands = [self._operand(*side) for side in sides]
        if curvature is not None:
            yield [curvature, *operands[0], *operands[1]]
        for index in (0, 1):
            changed, by = sides[index], sides[1 - index]
            change = self._change(*changed, *by)
            if change is not None:
                yield [self._cotangent(*changed), change, *operands[1 - index]]

    def of_sources(self) -> list[tuple[Node, Array]]:
        """The values that are not linear in leaves, and the gradient of each.

        That is the gradient of the sum over the examples.
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

    def _cotangent(self, site: Site, labels: dict[str, Label]) -> Term:
        d = site.at_steps(self._cotangents[site.perturbation], 1)
        d = widened(jax.vmap(site.arrange)(d))
        return d, (EXAMPLE, *named_labels(labels, site.d_axes))

    def _operand(self, site: Site, labels: dict[str, Label]) -> list[Term]:
        if site.operand is None:
            return []
        return [operand_term(site, self._operands[site.operand], labels)]

    def _curvature(
        self, site: Site, other: Site, labels: list[dict[str, Label]]
    ) -> Term | None:
        """How the cotangent of one site changes with the perturbation of the other."""
        sides = [(site, labels[0]), (other, labels[1])]
        if site.perturbation < other.perturbation:
            sides.reverse()
        (changed, names), (by, others) = sides
        x = self._of_cotangents.get((by.perturbation, changed.perturbation))
        if x is None:
            return None
        x = jax.vmap(jax.vmap(changed.arrange))(changed.at_steps(x, 2))
        x = self._arranged(by, x)
        axes = (*named_labels(others, by.d_axes), *named_labels(names, changed.d_axes))
        return widened(x), (EXAMPLE, *axes)

    def _change(
        self, changed: Site, names: dict[str, Label], by: Site, others: dict[str, Label]
    ) -> Term | None:
        """How the operand of one site changes with the perturbation of the other."""
        if changed.operand is None:
            return None
        x = self._of_operands.get((by.perturbation, changed.operand))
        if x is None:
            return None
        x = jax.vmap(jax.vmap(changed.expand))(changed.at_steps(x, 2))
        x = self._arranged(by, x)
        axes = (*named_labels(others, by.d_axes), *named_labels(names, changed.a_axes))
        return widened(x), (EXAMPLE, *axes)

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
    """Blocks of the Hessian of a sum over examples, by the sites of its leaves.

    The first output of the `program` is what is summed.
    """

    def __init__(
        self,
        program: Program,
        leaves: list,
        wanted: Wanted,
        *,
        checkpoint: bool = False,
    ):
        self.program = program
        self.blocks = Blocks(program, leaves, wanted)
        self._needs = _Needs(program, wanted)
        self._checkpoint = checkpoint

    def sums(
        self,
        leaves: list,
        rows: list,
        axes: Sequence[int],
        weights: Real[Array, " n"] | None,
    ) -> list[Inexact[Array, "..."]]:
        """The blocks that are wanted, of the (weighted) sum over the examples."""
        derivatives = self._derivatives(leaves, rows, axes, weights)
        found = self.blocks.sums(derivatives.terms, self.program.values(leaves))
        linear = derivatives.of_sources()
        return with_curved(self.program, leaves, self.blocks.wanted, linear, found)

    def estimate(self, leaves: list, rows: list, num: int) -> "Estimate":
        """What the sums of `num` examples take.

        `rows` are those of one example. Here and there, only types matter.
        """

        def one(leaves: list, rows: list) -> tuple[list, list, list, dict]:
            point, run, found = self._at(leaves, rows, None)
            changes, costs = [], {}
            for along in found:
                z, push = point[along.perturbation], self._pushed(point, run, along)
                of_one = program_cost(jax.make_jaxpr(push)(z).jaxpr).time
                costs[along.perturbation] = num * z.size * of_one
                changes.append((along, jax.vmap(push)(basis(z))))
            outs = run(point)
            return outs[: len(point)], outs[len(point) :], changes, costs

        *arrays, costs = eqx.filter_eval_shape(one, leaves, rows)
        arrays, along = eqx.partition(arrays, is_struct)
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))

        def count(arrays: list, values: list) -> list[float]:
            cotangents, operands, changes = eqx.combine(arrays, along)
            derivatives = _Derivatives(self.program, cotangents, operands, changes)
            cost = functools.partial(self.blocks.cost, terms=derivatives.terms)
            return [cost(pair, values=values) for pair in self.blocks.wanted.pairs]

        batched = lambda x: jax.ShapeDtypeStruct((num, *x.shape), x.dtype)
        values = self.program.value_structs()
        found = eqx.filter_eval_shape(count, jax.tree.map(batched, arrays), values)
        pairs = dict(zip(self.blocks.wanted.pairs, found, strict=True))
        return Estimate(costs, pairs, kept)

    def _derivatives(
        self, leaves: list, rows: list, axes: Sequence[int], weights: Array | None
    ) -> _Derivatives:

        def one(rows: list, weight: Array | None) -> tuple[list, list, list]:
            point, run, found = self._at(leaves, rows, weight)
            outs = run(point)
            num = len(point)
            changes = []
            for along in found:
                push = self._pushed(point, run, along)
                seeds = basis(point[along.perturbation])
                changes.append((along, jax.vmap(push)(seeds)))
            return outs[:num], outs[num:], changes

        found = of_examples(one, rows, axes, weights)
        return _Derivatives(self.program, *found)

    def _at(
        self, leaves: list, rows: list, weight: Array | None
    ) -> tuple[list, Callable[[list], list], list[_Along]]:
        """Where to differentiate, cotangents and operands, and what is to be known."""
        point = self.program.zeros(leaves, rows)

        def gradient(perturbations: list) -> list:
            def value(perturbations: list) -> tuple[Array, list]:
                outs, operands = self.program.perturbed(leaves, rows, perturbations)
                value = outs[0]
                if weight is not None:
                    value = value * weight.astype(value.dtype)
                return value, operands

            if self._checkpoint:
                value = jax.checkpoint(value)
            cotangents, operands = jax.grad(value, has_aux=True)(perturbations)
            return [*cotangents, *operands]

        closed = jax.make_jaxpr(gradient)(point)
        run = functools.partial(evaluate_jaxpr, closed.jaxpr, list(closed.consts))
        return point, run, self._needs.along(closed.jaxpr, len(point))

    def _pushed(
        self, point: list, run: Callable[[list], list], along: _Along
    ) -> Callable[[Array], list]:
        """How what is to be known changes with a perturbation, as a linear function."""
        num = len(point)

        def at(z: Array) -> list:
            outs = run(
                [*point[: along.perturbation], z, *point[along.perturbation + 1 :]]
            )
            return [
                *(outs[i] for i in along.cotangents),
                *(outs[num + i] for i in along.operands),
            ]

        return jax.linearize(at, point[along.perturbation])[1]


def with_curved(
    program: Program,
    leaves: list,
    wanted: Wanted,
    sources: list[tuple[Node, Array]],
    blocks: list[Array],
) -> list[Array]:
    """Adds the second derivatives of what is computed from leaves alone.

    `sources` are such values, and the gradients of the sum with respect to them. What
    is elementwise in a leaf has a diagonal there, which takes one product.
    """
    if not sources:
        return blocks
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

    pushes = {second: pushed(second) for _, second in wanted.pairs if second in curved}
    found = []
    for (first, second), block in zip(wanted.pairs, blocks, strict=True):
        if first in curved and second in curved:
            push = lambda x, first=first, second=second: pushes[second](x)[
                numbers.index(first)
            ].astype(block.dtype)
            if curved[first] and curved[second]:
                columns = jax.vmap(push, 0, -1)(basis(leaves[second]))
                block = block + columns.reshape(block.shape)
            elif first == second:
                diagonal = push(jnp.ones_like(leaves[first]))
                block = _plus_diagonal(block, diagonal, wanted.is_diagonal)
        found.append(block)
    return found


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
    """`one(rows, weight)` of each example, along axis 0; there may be just one."""
    if rows:
        in_axes = ([*axes], None if weights is None else 0)
        return eqx.filter_vmap(one, in_axes=in_axes)(rows, weights)
    with_axis = lambda x: x[None] if eqx.is_array(x) else x
    return jax.tree.map(with_axis, one(rows, weights))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What blocks of a Hessian take: floating-point operations, and memory.

    - `perturbations`, `pairs`: operations, by the perturbations that derivatives are
        taken with respect to, and by the pairs of leaves that they are contracted for.
    - `bytes`: of what is kept of one example.
    """

    perturbations: dict[int, float]
    pairs: dict[Pair, float]
    bytes: int


def basis(x: Array) -> Array:
    """All directions in which one entry of `x` changes, along a new axis 0."""
    seeds = jnp.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)
    return vary(seeds, varying(jax.typeof(x)))
