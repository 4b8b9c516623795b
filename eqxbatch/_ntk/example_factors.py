"""What is kept of each example so that kernels of the Jacobian follow from it.

For each parameter, that is either the factors of its sites, whose Gram matrices are
multiplied with each other, or the Jacobian that they are contracted to. The first is
cheaper for large weights that are used at few positions, the second for small ones that
are used at many, as those of convolutions.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from .._base.jaxprs import depends, evaluate_jaxpr, trace_example
from .._base.mesh import vary, varying
from .._sites.cost import FLOPS_PER_BYTE, MOST_SITES
from .._sites.einsum import contract_cost, EXAMPLE, Labels, Term
from .._sites.factors import Factor, Factors, gradients, gram, gram_terms, site_terms
from .._sites.site import is_allowed, Label, leaf_site, positions, Site
from .._sites.trace import Program
from .output_axes import OutputAxes


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How many examples are worked with at a time, and how often.

    - `blocks`: the sizes of blocks of the two sides, and `num_blocks` their numbers.
    - `num_pairs`: how many pairs of blocks meet.
    - `is_symmetric`: whether the two sides are the same.
    """

    blocks: tuple[int, int]
    num_blocks: tuple[int, int]
    num_pairs: int
    is_symmetric: bool


class Linearization:
    """A function at each example of a batch, and its pullback along some directions.

    - `program`: what the function is.
    - `cotangents`: for each of the `outputs`, the directions along its first axes.
    - `arrays`, `axes`: the batch. Only its types matter.
    """

    def __init__(
        self,
        program: Program,
        leaves: list,
        outputs: Sequence[OutputAxes],
        cotangents: list[Array],
        arrays: list,
        axes: Sequence[int],
        num_outputs: int,
    ):
        self.program, self.outputs, self.axes = program, outputs, list(axes)
        self.num_outputs = num_outputs

        def run(operands: list, rows: list) -> list:
            leaves, cotangents = operands
            outs, a, pullback = program.linearize(leaves, rows, num_outputs)
            pulled = []
            for output, directions in zip(outputs, cotangents, strict=True):
                num = len(output.directions(0))
                lead, shape = directions.shape[:num], directions.shape[num:]

                def pull(direction: Array, index: int = output.index) -> list:
                    zeros = [jnp.zeros_like(out) for out in outs]
                    direction = vary(direction, varying(jax.typeof(outs[index])))
                    return pullback([*zeros[:index], direction, *zeros[index + 1 :]])

                found = jax.vmap(pull)(directions.reshape(-1, *shape))
                pulled.append([d.reshape(*lead, *d.shape[1:]) for d in found])
            return [outs, a, pulled]

        self._operands = jax.tree.leaves([leaves, cotangents])
        treedef = jax.tree.structure([leaves, cotangents])
        flat = lambda operands, rows: run(jax.tree.unflatten(treedef, operands), rows)
        closed, out = trace_example(flat, self._operands, arrays, axes)
        self._jaxpr, self._consts = closed.jaxpr, list(closed.consts)
        num = len(self._operands)
        is_example = [False] * num + [True] * (len(self._jaxpr.invars) - num)
        self._has_examples = depends(self._jaxpr, is_example)
        self._treedef = jax.tree.structure(out)
        self._structs = jax.tree.leaves(out)

    def structs(self, num: int) -> tuple[list, list, list[list]]:
        """The shapes of what `run` returns for `num` examples."""
        factors = [
            Factor(jax.ShapeDtypeStruct((num,) * has + s.shape, s.dtype), has)
            for s, has in zip(self._structs, self._has_examples, strict=True)
        ]
        return self._unflatten(factors)

    def run(self, rows: list) -> tuple[list, list, list[list]]:
        """Outputs, operands, and for each output cotangents, as `Factor`s.

        What does not depend on the example is computed once for all of them.
        """
        num = len(self._operands)
        program = lambda *args: evaluate_jaxpr(self._jaxpr, self._consts, [*args])
        in_axes = (None,) * num + tuple(self.axes)
        out_axes = [0 if has else None for has in self._has_examples]
        outs = jax.vmap(program, in_axes, out_axes)(*self._operands, *rows)
        return self._unflatten(map(Factor, outs, self._has_examples))

    def _unflatten(self, factors: Any) -> tuple[list, list, list[list]]:
        return tuple(jax.tree.unflatten(self._treedef, list(factors)))


@dataclasses.dataclass(frozen=True)
class OutputFactors:
    """Which of a program's factors are kept for one output, and the sites about them.

    - `perturbations`: the cotangents that are kept as they are.
    - `formed`: the leaves of which the Jacobian is kept, after those.
    - `sites`: for each leaf that is used.
    """

    perturbations: tuple[int, ...]
    formed: tuple[int, ...]
    sites: dict[int, list[Site]]


def output_factors(program: Program, formed: Sequence[int]) -> OutputFactors:
    """What to keep if the Jacobian of the leaves in `formed` is."""
    used = [leaf for leaf in range(len(program.leaves)) if program.sites_of(leaf)]
    as_they_are = [leaf for leaf in used if leaf not in formed]
    sites = {leaf: program.sites_of(leaf) for leaf in as_they_are}
    perturbations = sorted(
        {site.perturbation for own in sites.values() for site in own}
    )
    kept = {
        leaf: [
            dataclasses.replace(
                site, perturbation=perturbations.index(site.perturbation)
            )
            for site in own
        ]
        for leaf, own in sites.items()
    }
    for position, leaf in enumerate(formed):
        kept[leaf] = [
            leaf_site(leaf, program.leaves[leaf], len(perturbations) + position)
        ]
    return OutputFactors(tuple(perturbations), tuple(formed), kept)


class ExampleFactors:
    """What is kept of the examples of one side, for each output.

    With `keeps_values`, that is what the function returns, too.

    `factors` makes a flat list of it from the rows of some examples, and `split`
    tells what belongs to which output.
    """

    def __init__(
        self,
        linearization: Linearization,
        kept: list[OutputFactors],
        *,
        keeps_values: bool,
    ):
        self.linearization, self.kept = linearization, kept
        program = linearization.program
        used = {
            site.operand
            for one in kept
            for own in one.sites.values()
            for site in own
            if site.operand is not None
        }
        self._operands = sorted(used)
        self._num_outs = linearization.num_outputs if keeps_values else 0
        self._leaves = program.leaves

    @property
    def size(self) -> int:
        """How many arrays are kept."""
        kept = (len(one.perturbations) + len(one.formed) for one in self.kept)
        return self._num_outs + len(self._operands) + sum(kept)

    def factors(self, rows: list) -> list[Factor]:
        return self._kept_of(*self.linearization.run(rows))

    def _kept_of(
        self, outs: list, operands: list, cotangents: list[list]
    ) -> list[Factor]:
        flat = [*outs[: self._num_outs], *(operands[i] for i in self._operands)]
        outputs = self.linearization.outputs
        program = self.linearization.program
        for output, kept, pulled in zip(outputs, self.kept, cotangents, strict=True):
            flat += [pulled[perturbation] for perturbation in kept.perturbations]
            factors = Factors(operands, pulled, output.directions(0))
            for leaf in kept.formed:
                sites = program.sites_of(leaf)
                jacobian = gradients(sites, factors, self._leaves[leaf])
                flat.append(Factor(jacobian, factors.has_examples(sites)))
        return flat

    def split(
        self, flat: Sequence[Factor], side: int
    ) -> tuple[list[Factor], list[Factors]]:
        """The outputs, and the factors for the kernel of each."""
        remaining = list(flat)

        def take(num: int) -> list:
            taken = remaining[:num]
            del remaining[:num]
            return taken

        outs = take(self._num_outs)
        operands: list = [Factor(None, False)] * len(
            self.linearization.program.operands
        )
        for i, factor in zip(self._operands, take(len(self._operands)), strict=True):
            operands[i] = factor
        factors = [
            Factors(
                operands,
                take(len(kept.perturbations) + len(kept.formed)),
                output.directions(side),
            )
            for output, kept in zip(self.linearization.outputs, self.kept, strict=True)
        ]
        return outs, factors


def kernel(
    output: OutputAxes,
    leaves: list,
    kept: tuple[OutputFactors, OutputFactors],
    factors: tuple[Factors, Factors],
    num: tuple[int, int],
) -> Inexact[Array, "..."]:
    """The kernel of the Jacobian of an output, before it is arranged.

    `num` says how many examples there are.
    """
    out = (*output.out, *output.parts)
    # What comes out of a matrix product: what both sides have, then that of one side,
    # then that of the other. It is put in order once, at the end.
    names = [{*output.examples[:1], *output.directions(0)}]
    names.append({*output.examples[1:], *output.directions(1)})
    labels = (
        *(label for label in out if label in names[0] & names[1]),
        *(label for label in out if label in names[0] - names[1]),
        *(label for label in out if label in names[1] - names[0]),
    )
    total: Array = jnp.zeros((1,) * len(labels), jnp.float32)
    for leaf, sites in kept[0].sites.items():
        others = kept[1].sites.get(leaf)
        if others is None:
            continue
        example = output.examples[-1]
        product = gram(sites, factors[0], others, factors[1], example, labels)
        is_complex = jnp.issubdtype(leaves[leaf].dtype, jnp.complexfloating)
        # A function of a complex number is one of two real numbers; if it has a
        # complex derivative, each of these contributes the square of it.
        product = product * (0.5 if output.is_complex and is_complex else 1.0)
        dtype = np.promote_types(total.dtype, product.dtype)
        total = total.astype(dtype) + product.astype(dtype)
    sizes = {**output.sizes, **dict(zip(output.examples, num, strict=False))}
    total = jnp.broadcast_to(total, [sizes[label] for label in labels])
    return jnp.transpose(total, [labels.index(label) for label in out])


def choose_formed(
    first: Linearization, second: Linearization, which: int, schedule: Schedule
) -> tuple[list[int], float]:
    """The leaves of which the Jacobian is to be kept, for the output number `which`.

    Also what all contractions cost then, in floating-point operations.
    """
    formed, total = [], 0.0
    for leaf in range(len(first.program.leaves)):
        costs = _costs(first, second, leaf, which, schedule)
        total += min(costs)
        # Where a product of factors is best begun by forming the Jacobians, that is
        # better done apart.
        if costs[1] < 1.2 * costs[0]:
            formed.append(leaf)
    return formed, total


def _costs(
    first: Linearization,
    second: Linearization,
    leaf: int,
    which: int,
    schedule: Schedule,
) -> tuple[float, float]:
    """What a leaf costs by its factors, and by the Jacobian formed of them."""
    sites = first.program.sites_of(leaf)
    others = second.program.sites_of(leaf)
    if not sites or not others:
        return 0.0, math.inf
    has_gram = len(sites) * len(others) <= MOST_SITES**2 and all(
        is_allowed("gram", site, other) for site in sites for other in others
    )
    # What is only added to something has its cotangent as Jacobian. It is kept but once
    # for what is added, and for what it is added to.
    are_formed = has_gram and all(
        len(own) == 1 and own[0].operand is None and not positions(own[0])
        for own in (sites, others)
    )
    output = first.outputs[which]
    struct = first.program.leaves[leaf]
    pair = zip((first, second), schedule.blocks, strict=True)
    structs = [side.structs(num) for side, num in pair]
    grams, forms, products = [0.0], [0.0], [0.0]

    def count(structs: list) -> list:
        sides = [
            Factors(operands, pulled[which], output.directions(side))
            for side, (_, operands, pulled) in enumerate(structs)
        ]
        example, out = output.examples[-1], (*output.out, *output.parts)
        if has_gram:
            for terms, _ in gram_terms(sites, sides[0], others, sides[1], example):
                grams.append(_cost(terms, out))
        jacobians = []
        rows = zip((sites, others), sides, schedule.num_blocks, strict=True)
        for side, (own, factors, num) in enumerate(rows):
            if side == 0 or not schedule.is_symmetric:
                forms.extend(num * _cost_of_forming(site, factors) for site in own)
            jacobian = gradients(own, factors, struct)
            factor = Factor(jacobian, factors.has_examples(own))
            jacobians.append(Factors([], [factor], output.directions(side)))
        site = [leaf_site(leaf, struct, 0)]
        for terms, _ in gram_terms(site, jacobians[0], site, jacobians[1], example):
            products.append(_cost(terms, out))
        return []

    if 0 in schedule.blocks:
        return (0.0, math.inf) if has_gram else (math.inf, 0.0)
    jax.eval_shape(count, structs)
    by_gram = schedule.num_pairs * sum(grams) if has_gram else math.inf
    by_jacobian = sum(forms) + schedule.num_pairs * sum(products)
    return by_gram, math.inf if are_formed else by_jacobian


def _cost(terms: list[Term], out: Labels) -> float:
    """In floating-point operations."""
    flops, largest = contract_cost(terms, tuple(x for x in out if _has(terms, x)))
    size = sum(x.size for x, _ in terms) + 2 * largest
    return flops + FLOPS_PER_BYTE * terms[0][0].dtype.itemsize * size


def _cost_of_forming(site: Site, factors: Factors) -> float:
    terms = site_terms(site, factors)
    labels = dict.fromkeys(label for _, own in terms for label in own)
    of_leaf = [label for label in labels if label[0] in ("leaf", "view")]
    return _cost(terms, (EXAMPLE, *factors.outputs, *of_leaf))


def _has(terms: list[Term], label: Label) -> bool:
    return any(label in labels for _, labels in terms)
