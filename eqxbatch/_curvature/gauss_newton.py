"""The generalised Gauss-Newton matrix, from the sites where parameters enter.

Let `d` be the cotangents of a site's output, one for each entry `o` of the function's
output. The Jacobian with respect to the site's parameter is `d a`, and the matrix is a
sum over pairs of sites of `a d (∂²loss/∂o∂p) d' a'`. It is contracted like a Hessian,
with `d (∂²loss/∂o∂p) d'` instead of second derivatives. If the Jacobian is a sum over
uses of a parameter or over positions, it is formed first: its terms may nearly cancel,
and products of pairs of them would be much larger than their sum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import common_dtype, widened
from .._base.mesh import vary, varying
from .._sites.cost import forming_cost, num_products
from .._sites.einsum import EXAMPLE, Term
from .._sites.factors import Factors, gradients
from .._sites.site import is_sum, Label
from .._sites.trace import Program
from .by_sites import Estimate, of_examples
from .site_blocks import (
    Blocks,
    for_each,
    named_labels,
    operand_term,
    Stacks,
    Use,
    Wanted,
)


_FIRST: Label = ("output", 0)


_SECOND: Label = ("output", 1)


# The curvature in the directions of some vectors; None for the identity.
Curve = Inexact[Array, "vectors vectors"] | None


# Takes the output of the function for one example, and the example. The vectors are
# cotangents of the outputs, along a new axis 0.
OfOutputs = Callable[[list, list], tuple[list, Curve]]


class SiteGaussNewton:
    """Blocks of a Gauss-Newton matrix, summed over examples, from sites.

    - `program`: the function; its first `num_outputs` outputs are differentiated.
    - `of_outputs`: the curvature of the loss of one example in these outputs, in the
        directions of `num_vectors` vectors.
    """

    def __init__(
        self,
        program: Program,
        leaves: list,
        wanted: Wanted,
        of_outputs: OfOutputs,
        num_outputs: int,
        num_vectors: int,
        has_curve: bool,
    ):
        self.program = program
        self._formed = [i for i in sorted(wanted.leaves) if is_sum(program.sites_of(i))]
        own = program.with_jacobians(self._formed)
        self.blocks = Blocks(own, leaves, wanted, kind=lambda site, other: None)
        self._of_outputs, self._num_outputs = of_outputs, num_outputs
        self._num_vectors, self._has_curve = num_vectors, has_curve

    def sums(
        self,
        leaves: list,
        rows: list,
        axes: Sequence[int],
        weights: Real[Array, " n"] | None,
    ) -> list[Inexact[Array, "pairs ..."]]:
        """The blocks of each group, of the (weighted) sum over the examples."""

        def one(rows: list, weight: Array | None) -> tuple[Array | None, list, list]:
            scale, operands, cotangents = self._at(leaves, rows)
            if weight is not None:
                weight = weight.astype(self._dtype)
                scale = weight if scale is None else scale * weight
            return scale, operands, cotangents

        scale, operands, cotangents = of_examples(one, rows, axes, weights)
        values = self.program.values(leaves)
        cotangents = self._with_jacobians(operands, cotangents, values)
        are_stacked = self.blocks.are_stacked
        factors = _Factors(scale, operands, cotangents, are_stacked=are_stacked)
        return self.blocks.sums(factors.terms, values)

    @property
    def bytes(self) -> int:
        """The bytes kept for one example."""
        program, num = self.program, self._num_vectors
        kept = [(x, 1) for x in program.operands]
        kept += ((x, num) for x in self.blocks.program.perturbations)
        of_sites = sum(times * x.size * x.dtype.itemsize for x, times in kept)
        return of_sites + self._has_curve * num**2 * self._dtype.itemsize

    def estimate(self, num: int) -> Estimate:
        """The cost of the sums over `num` examples. It depends on shapes only."""
        program, vectors = self.program, self._num_vectors
        # One backward pass for each vector.
        perturbations: dict[int, float] = {}
        for site in program.sites:
            cost = num * vectors * num_products(site)
            perturbations[site.perturbation] = (
                perturbations.get(site.perturbation, 0.0) + cost
            )
        of = lambda x, *lead: jax.ShapeDtypeStruct((num, *lead, *x.shape), x.dtype)
        curve = None
        if self._has_curve:
            curve = jax.ShapeDtypeStruct((num, vectors, vectors), self._dtype)
        operands = [*map(of, program.operands)]
        cotangents = [of(x, vectors) for x in program.perturbations]

        def count(
            curve: Array | None, operands: list, cotangents: list, values: list
        ) -> tuple[dict, dict]:
            factors = Factors(operands, cotangents, (_FIRST,), values=values)
            of_leaves = {i: program.sites_of(i) for i in self._formed}
            forming = {i: forming_cost(x, factors).time for i, x in of_leaves.items()}
            cotangents = self._with_jacobians(operands, cotangents, values)
            own = _Factors(curve, operands, cotangents, are_stacked=False)
            return forming, self.blocks.costs(own.terms, values)

        args = (curve, operands, cotangents, program.value_structs())
        forming, pairs = eqx.filter_eval_shape(count, *args)
        for leaf, cost in forming.items():
            perturbations[program.sites_of(leaf)[0].perturbation] += cost
        return Estimate(perturbations, pairs)

    def _with_jacobians(self, operands: list, cotangents: list, values: list) -> list:
        """The cotangents of some examples, then the Jacobians that are formed."""
        factors = Factors(operands, cotangents, (_FIRST,), values=values)
        of = lambda i: (self.program.sites_of(i), factors, self.program.leaves[i])
        return [*cotangents, *(gradients(*of(i)) for i in self._formed)]

    @property
    def _outputs(self) -> list:
        return [var.aval for var in self.program.jaxpr.outvars[: self._num_outputs]]

    @property
    def _dtype(self) -> Any:
        return common_dtype(*(x.dtype for x in self._outputs))

    def _at(self, leaves: list, rows: list) -> tuple[Array | None, list, list]:
        """The curvature of the loss, the operands, and a cotangent for each vector."""
        return linearized(
            self.program, leaves, rows, self._of_outputs, self._num_outputs
        )


def linearized(
    program: Program, leaves: list, rows: list, of_outputs: OfOutputs, num_outputs: int
) -> tuple[Curve, list, list]:
    """For one example: the curvature along vectors, operands and cotangents."""
    outs, operands, pullback = program.linearize(leaves, rows, num_outputs)
    outs = outs[:num_outputs]
    seeds, curve = of_outputs(outs, rows)
    # These may be the same for all examples and devices.
    seeds = [
        vary(seed, varying(jax.typeof(out)))
        for seed, out in zip(seeds, outs, strict=True)
    ]
    return curve, operands, jax.vmap(pullback)(seeds)


class _Factors:
    def __init__(
        self,
        scale: Array | None,
        operands: list,
        cotangents: list,
        *,
        are_stacked: bool,
    ):
        self._scale = scale
        stacks = lambda x: Stacks(dict(enumerate(x)), are_stacked=are_stacked)
        self._operands, self._cotangents = stacks(operands), stacks(cotangents)

    def terms(
        self, uses: Sequence[Use], labels: list[dict[str, Label]]
    ) -> Iterator[list[Term]]:
        terms: list[Term] = []
        vectors = [_FIRST, _FIRST]
        if self._scale is not None:
            # The scale is a curvature, or the weight of each example.
            has_curve = self._scale.ndim == 3
            vectors = [_FIRST, _SECOND] if has_curve else vectors
            between = tuple(vectors) if has_curve else ()
            terms.append((widened(self._scale), (EXAMPLE, *between)))
        for sites, names, output in zip(
            zip(*uses, strict=True), labels, vectors, strict=True
        ):
            use = sites[0]
            d, lead = self._cotangents.take([site.perturbation for site in sites])
            arrange = lambda d, use=use: jax.vmap(jax.vmap(use.arrange))(
                use.at_steps(d, 2)
            )
            named = named_labels(names, use.d_axes)
            d = widened(for_each(arrange, d, lead))
            terms.append((d, (*lead, EXAMPLE, output, *named)))
            if use.operand is not None:
                terms.append(operand_term(sites, self._operands, names))
        yield terms
