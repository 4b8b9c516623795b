"""The generalised Gauss-Newton matrix, from the sites where parameters enter.

With `d` the cotangents of a site's output, one for each entry `o` of what a function
returns, the Jacobian with respect to the site's parameter is `d a`, and the matrix is a
sum over two sites of `a d (∂²loss/∂o∂p) d' a'`. It is contracted as Hessians are, with
`d (∂²loss/∂o∂p) d'` in the place of their second derivatives.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import common_dtype, widened
from .._sites.cost import num_products
from .._sites.einsum import EXAMPLE, Term
from .._sites.site import Label
from .._sites.trace import Program
from .by_sites import basis, Estimate, of_examples
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


# Takes what the function returns for one example, and the example.
Curve = Callable[[list, list], Inexact[Array, "outputs outputs"]]


class SiteGaussNewton:
    """Blocks of a Gauss-Newton matrix, summed over examples, by sites.

    - `program`: the function, whose first `num_outputs` outputs are what it returns.
    - `curve`: the Hessian of the loss of one example in all entries of those.
    """

    def __init__(
        self,
        program: Program,
        leaves: list,
        wanted: Wanted,
        curve: Curve,
        num_outputs: int,
    ):
        self.program = program
        self.blocks = Blocks(program, leaves, wanted, kind=lambda site, other: None)
        self._curve, self._num_outputs = curve, num_outputs

    def sums(
        self,
        leaves: list,
        rows: list,
        axes: Sequence[int],
        weights: Real[Array, " n"] | None,
    ) -> list[Inexact[Array, "pairs ..."]]:
        """The blocks of each group, of the (weighted) sum over the examples."""

        def one(rows: list, weight: Array | None) -> tuple[Array, list, list]:
            curve, operands, cotangents = self._at(leaves, rows)
            if weight is not None:
                curve = curve * weight.astype(curve.dtype)
            return curve, operands, cotangents

        found = of_examples(one, rows, axes, weights)
        factors = _Factors(*found, are_stacked=self.blocks.are_stacked)
        return self.blocks.sums(factors.terms, self.program.values(leaves))

    @property
    def bytes(self) -> int:
        """What is kept of one example."""
        program, num = self.program, self._num_entries
        kept = [(x, 1) for x in program.operands]
        kept += ((x, num) for x in program.perturbations)
        of_sites = sum(times * x.size * x.dtype.itemsize for x, times in kept)
        return of_sites + num**2 * self._dtype.itemsize

    def estimate(self, num: int) -> Estimate:
        """What the sums of `num` examples take. All of it follows from shapes."""
        program, entries = self.program, self._num_entries
        # A backward pass for each output.
        perturbations: dict[int, float] = {}
        for site in program.sites:
            cost = num * entries * num_products(site)
            perturbations[site.perturbation] = (
                perturbations.get(site.perturbation, 0.0) + cost
            )
        of = lambda x, *lead: jax.ShapeDtypeStruct((num, *lead, *x.shape), x.dtype)
        curve = jax.ShapeDtypeStruct((num, entries, entries), self._dtype)
        operands = [*map(of, program.operands)]
        cotangents = [of(x, entries) for x in program.perturbations]

        def count(curve: Array, operands: list, cotangents: list, values: list) -> dict:
            factors = _Factors(curve, operands, cotangents, are_stacked=False)
            return self.blocks.costs(factors.terms, values)

        args = (curve, operands, cotangents, program.value_structs())
        return Estimate(perturbations, eqx.filter_eval_shape(count, *args))

    @property
    def _outputs(self) -> list:
        return [var.aval for var in self.program.jaxpr.outvars[: self._num_outputs]]

    @property
    def _num_entries(self) -> int:
        return sum(x.size for x in self._outputs)

    @property
    def _dtype(self) -> Any:
        return common_dtype(*(x.dtype for x in self._outputs))

    def _at(self, leaves: list, rows: list) -> tuple[Array, list, list]:
        """The curvature of the loss, the operands, and a cotangent for each output."""
        num = self._num_outputs
        outs, operands, pullback = self.program.linearize(leaves, rows, num)
        outs = outs[:num]
        cotangents: list[list[Array]] = []
        for index, out in enumerate(outs):
            zeros = [jnp.zeros_like(other) for other in outs]
            pull = lambda seed, index=index, zeros=zeros: pullback(
                [*zeros[:index], seed, *zeros[index + 1 :]]
            )
            cotangents.append(jax.vmap(pull)(basis(out)))
        joined = [jnp.concatenate(parts) for parts in zip(*cotangents, strict=True)]
        return self._curve(outs, rows), operands, joined


class _Factors:
    def __init__(
        self, curve: Array, operands: list, cotangents: list, *, are_stacked: bool
    ):
        self._curve = curve
        stacks = lambda x: Stacks(dict(enumerate(x)), are_stacked=are_stacked)
        self._operands, self._cotangents = stacks(operands), stacks(cotangents)

    def terms(
        self, uses: Sequence[Use], labels: list[dict[str, Label]]
    ) -> Iterator[list[Term]]:
        terms: list[Term] = [(widened(self._curve), (EXAMPLE, _FIRST, _SECOND))]
        for sites, names, output in zip(
            zip(*uses, strict=True), labels, (_FIRST, _SECOND), strict=True
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
