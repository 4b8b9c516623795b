"""The generalised Gauss-Newton matrix, from the sites where parameters enter.

With `d` the cotangents of a site's output, one for each entry `o` of what a function
returns, the Jacobian with respect to the site's parameter is `d a`, and the matrix is a
sum over two sites of `a d (∂²loss/∂o∂p) d' a'`. It is contracted as Hessians are, with
`d (∂²loss/∂o∂p) d'` in the place of their second derivatives.
"""

from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import widened
from .._sites.cost import num_products
from .._sites.einsum import EXAMPLE, Term
from .._sites.site import Label, Site
from .._sites.trace import Program
from .by_sites import basis, Estimate, of_examples
from .site_blocks import Blocks, operand_term, Wanted


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
        self.blocks = Blocks(program, leaves, wanted)
        self._curve, self._num_outputs = curve, num_outputs

    def sums(
        self,
        leaves: list,
        rows: list,
        axes: Sequence[int],
        weights: Real[Array, " n"] | None,
    ) -> list[Inexact[Array, "..."]]:
        """The blocks that are wanted, of the (weighted) sum over the examples."""

        def one(rows: list, weight: Array | None) -> tuple[Array, list, list]:
            curve, operands, cotangents = self._at(leaves, rows)
            if weight is not None:
                curve = curve * weight.astype(curve.dtype)
            return curve, operands, cotangents

        factors = _Factors(*of_examples(one, rows, axes, weights))
        return self.blocks.sums(factors.terms, self.program.values(leaves))

    def estimate(self, leaves: list, rows: list, num: int) -> Estimate:
        """What the sums of `num` examples take.

        `rows` are those of one example. Here and there, only types matter.
        """
        factors = jax.eval_shape(self._at, leaves, rows)
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(factors))
        outputs = factors[0].shape[0]
        # A backward pass for each output.
        perturbations: dict[int, float] = {}
        for site in self.program.sites:
            cost = num * outputs * num_products(site)
            perturbations[site.perturbation] = (
                perturbations.get(site.perturbation, 0.0) + cost
            )
        wanted = self.blocks.wanted

        def count(factors: tuple, values: list) -> list[float]:
            terms = _Factors(*factors).terms
            return [self.blocks.cost(pair, terms, values) for pair in wanted.pairs]

        batched = lambda x: jax.ShapeDtypeStruct((num, *x.shape), x.dtype)
        values = self.program.value_structs()
        found = eqx.filter_eval_shape(count, jax.tree.map(batched, factors), values)
        pairs = dict(zip(wanted.pairs, found, strict=True))
        return Estimate(perturbations, pairs, kept)

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
    def __init__(self, curve: Array, operands: list, cotangents: list):
        self._curve, self._operands, self._cotangents = curve, operands, cotangents

    def terms(
        self, site: Site, other: Site, labels: list[dict[str, Label]]
    ) -> Iterator[list[Term]]:
        terms: list[Term] = [(widened(self._curve), (EXAMPLE, _FIRST, _SECOND))]
        sides = zip((site, other), labels, (_FIRST, _SECOND), strict=True)
        for use, names, output in sides:
            d = use.at_steps(self._cotangents[use.perturbation], 2)
            d = jax.vmap(jax.vmap(use.arrange))(d)
            named = (names[name] for name in use.d_axes)
            terms.append((widened(d), (EXAMPLE, output, *named)))
            if use.operand is not None:
                terms.append(operand_term(use, self._operands[use.operand], names))
        yield terms
