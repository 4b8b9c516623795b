"""The generalised Gauss-Newton matrix, from the sites where parameters enter.

Let `d` be the cotangents of a site's output, one for each entry `o` of the function's
output. The Jacobian with respect to the site's parameter is `d a`, and the matrix is a
sum over pairs of sites of `a d (∂²loss/∂o∂p) d' a'`. It is contracted like a Hessian,
with `d (∂²loss/∂o∂p) d'` instead of second derivatives.

If the Jacobian is a sum over uses of a parameter or over positions, it is formed first:
its terms may nearly cancel, and products of pairs of them would be much larger than
their sum. Along an axis that outputs share with a site, as in the last layer, `d` is
zero unless both indices are the same, and nothing is summed. So it is stored for one of
the two only.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import common_dtype, widened
from .._base.mesh import vary, varying
from .._sites.cost import forming_cost, num_products
from .._sites.einsum import EXAMPLE, Term
from .._sites.factors import Factors, gradients
from .._sites.site import is_sum, Label, Site
from .._sites.trace import Program
from .by_sites import Estimate, of_examples
from .paired_axes import Paired, paired_outputs
from .site_blocks import (
    Blocks,
    for_each,
    named_labels,
    operand_term,
    RequestedBlocks,
    Stacks,
    Use,
)


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
        requested: RequestedBlocks,
        of_outputs: OfOutputs,
        num_outputs: int,
        num_vectors: int,
        has_curve: bool,
    ):
        self.program = program
        self._of_outputs, self._num_outputs = of_outputs, num_outputs
        self._num_vectors, self._has_curve = num_vectors, has_curve
        self._paired: list[Paired | None] = [None for _ in program.perturbations]
        if has_curve and num_vectors > 1:
            self._paired = paired_outputs(program, num_outputs)
        for i in sorted(requested.leaves):
            if self._is_sum(i):
                for site in program.sites_of(i):
                    self._paired[site.perturbation] = None
        self._formed = [i for i in sorted(requested.leaves) if self._is_sum(i)]
        self._paired += (None for _ in self._formed)
        own = program.with_jacobians(self._formed)
        self.blocks = Blocks(own, leaves, requested, self._kind)

    def _is_sum(self, leaf: int) -> bool:
        """Whether a row of the Jacobian of a leaf is a sum of terms."""
        sites = self.program.sites_of(leaf)
        paired = [(site, self._paired[site.perturbation]) for site in sites]
        names = (own.names(site) for site, own in paired if own is not None)
        # Each output is computed from one position.
        apart = {name for axes in itertools.chain(*names) for name in axes or ()}
        return is_sum(sites, apart)

    def _kind(self, site: Site, other: Site) -> tuple:
        """A key that is equal for pairs of sites with the same terms."""
        return tuple(self._paired[x.perturbation] for x in (site, other))

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
        factors = self._factors(scale, operands, cotangents, are_stacked=are_stacked)
        return self.blocks.sums(factors.terms, values)

    @property
    def bytes(self) -> int:
        """The bytes kept for one example."""
        program, num = self.program, self._num_vectors
        kept = [(x, 1) for x in program.operands]
        structs = self.blocks.program.perturbations
        kept += zip(structs, self._nums, strict=True)
        of_sites = sum(times * x.size * x.dtype.itemsize for x, times in kept)
        return of_sites + self._has_curve * num**2 * self._dtype.itemsize

    def estimate(self, num: int) -> Estimate:
        """The cost of the sums over `num` examples. It depends on shapes only."""
        program, vectors = self.program, self._num_vectors
        # One backward pass for each vector.
        perturbations: dict[int, float] = {}
        for site in program.sites:
            cost = num * self._nums[site.perturbation] * num_products(site)
            perturbations[site.perturbation] = (
                perturbations.get(site.perturbation, 0.0) + cost
            )
        of = lambda x, *lead: jax.ShapeDtypeStruct((num, *lead, *x.shape), x.dtype)
        curve = None
        if self._has_curve:
            curve = jax.ShapeDtypeStruct((num, vectors, vectors), self._dtype)
        operands = [*map(of, program.operands)]
        # Jacobians come after these.
        nums = self._nums[: len(program.perturbations)]
        cotangents = [*map(of, program.perturbations, nums)]

        def count(
            curve: Array | None, operands: list, cotangents: list, values: list
        ) -> tuple[dict, dict]:
            factors = Factors(operands, cotangents, (_vectors(0),), values=values)
            of_leaves = {i: program.sites_of(i) for i in self._formed}
            forming = {i: forming_cost(x, factors).time for i, x in of_leaves.items()}
            cotangents = self._with_jacobians(operands, cotangents, values)
            own = self._factors(curve, operands, cotangents, are_stacked=False)
            return forming, self.blocks.costs(own.terms, values)

        args = (curve, operands, cotangents, program.value_structs())
        forming, pairs = eqx.filter_eval_shape(count, *args)
        for leaf, cost in forming.items():
            perturbations[program.sites_of(leaf)[0].perturbation] += cost
        return Estimate(perturbations, pairs)

    def _with_jacobians(self, operands: list, cotangents: list, values: list) -> list:
        """The cotangents of some examples, then the Jacobians that are formed."""
        factors = Factors(operands, cotangents, (_vectors(0),), values=values)
        of = lambda i: (self.program.sites_of(i), factors, self.program.leaves[i])
        return [*cotangents, *(gradients(*of(i)) for i in self._formed)]

    @property
    def _outputs(self) -> list:
        return [var.aval for var in self.program.jaxpr.outvars[: self._num_outputs]]

    @property
    def _dtype(self) -> Any:
        return common_dtype(*(x.dtype for x in self._outputs))

    @property
    def _nums(self) -> list[int]:
        """The number of vectors that are pulled back to each perturbation."""
        return [self._num_vectors if x is None else x.num for x in self._paired]

    def _at(self, leaves: list, rows: list) -> tuple[Array | None, list, list]:
        """The curvature of the loss, the operands, and a cotangent for each vector."""
        return linearized(
            self.program,
            leaves,
            rows,
            self._of_outputs,
            self._num_outputs,
            self._paired,
        )

    def _factors(
        self,
        scale: Array | None,
        operands: list,
        cotangents: list,
        *,
        are_stacked: bool,
    ) -> "_Factors":
        starts = [0, *itertools.accumulate(x.size for x in self._outputs)]
        arrays = scale, operands, cotangents
        return _Factors(*arrays, self._paired, starts, are_stacked=are_stacked)


def linearized(
    program: Program,
    leaves: list,
    rows: list,
    of_outputs: OfOutputs,
    num_outputs: int,
    paired: Sequence[Paired | None] = (),
) -> tuple[Curve, list, list]:
    """For one example: the curvature along vectors, operands and cotangents.

    The cotangents of perturbations that are `paired` are those of fewer vectors.
    """
    outs, operands, pullback = program.linearize(leaves, rows, num_outputs)
    outs = outs[:num_outputs]
    seeds, curve = of_outputs(outs, rows)
    # These may be the same for all examples and devices.
    seeds = [
        vary(seed, varying(jax.typeof(out)))
        for seed, out in zip(seeds, outs, strict=True)
    ]
    # What is not used of the result of a pullback is not computed.
    cotangents = jax.vmap(pullback)(seeds)
    found: dict[tuple, list] = {}
    for i, own in enumerate(paired):
        if own is not None:
            if own.key not in found:
                found[own.key] = jax.vmap(pullback)(own.seeds(outs))
            cotangents[i] = found[own.key][i]
    return curve, operands, cotangents


class _Factors:
    """The factors of some examples.

    - `paired`: how the cotangents of each perturbation are stored.
    - `starts`: where each output starts among the vectors.
    """

    def __init__(
        self,
        scale: Array | None,
        operands: list,
        cotangents: list,
        paired: Sequence[Paired | None],
        starts: Sequence[int],
        *,
        are_stacked: bool,
    ):
        self._scale, self._paired, self._starts = scale, paired, starts
        stacks = lambda x: Stacks(dict(enumerate(x)), are_stacked=are_stacked)
        self._operands, self._cotangents = stacks(operands), stacks(cotangents)

    def terms(
        self, uses: Sequence[Use], labels: list[dict[str, Label]]
    ) -> Iterator[list[Term]]:
        terms: list[Term] = []
        # The scale is a curvature, or the weight of each example.
        has_curve = self._scale is not None and self._scale.ndim == 3
        sides = (0, 1) if has_curve else (0, 0)
        if self._scale is not None:
            vectors = [_vectors(side) for side in sides] if has_curve else []
            scale: Term = (widened(self._scale), (EXAMPLE, *vectors))
            if has_curve:
                for side, names in enumerate(labels):
                    scale = self._of_site(scale, uses[0][side], names, side)
            terms.append(scale)
        for sites, names, side in zip(
            zip(*uses, strict=True), labels, sides, strict=True
        ):
            use = sites[0]
            d, lead = self._cotangents.take([site.perturbation for site in sites])
            arrange = lambda d, use=use: jax.vmap(jax.vmap(use.arrange))(
                use.at_steps(d, 2)
            )
            named = named_labels(names, use.d_axes)
            d = widened(for_each(arrange, d, lead))
            own, vectors = self._paired[use.perturbation], (_vectors(side),)
            if own is not None:
                start = len(lead) + 1
                d = d.reshape(*d.shape[:start], *own.left, *d.shape[start + 1 :])
                vectors = tuple(_vectors(side, axis) for axis in own.axes_left)
            terms.append((d, (*lead, EXAMPLE, *vectors, *named)))
            if use.operand is not None:
                terms.append(operand_term(sites, self._operands, names))
        yield terms

    def _of_site(
        self, curve: Term, site: Site, names: dict[str, Label], side: int
    ) -> Term:
        """The curvature in the outputs that a site is paired with.

        Paired axes get the names that they have at the site.
        """
        own = self._paired[site.perturbation]
        if own is None:
            return curve
        x, labels = curve
        at, start = labels.index(_vectors(side)), self._starts[own.output]
        x = lax.slice_in_dim(x, start, start + math.prod(own.shape), axis=at)
        sizes: list[int] = []
        axes: list[Label] = []
        for i, named in enumerate(own.names(site)):
            if named is None:
                sizes.append(own.shape[i])
                axes.append(_vectors(side, i))
            else:
                sizes += (site.sizes[name] for name in named)
                axes += named_labels(names, named)
        x = x.reshape(*x.shape[:at], *sizes, *x.shape[at + 1 :])
        return x, (*labels[:at], *axes, *labels[at + 1 :])


def _vectors(side: int, axis: int | None = None) -> Label:
    """The label of the vectors of one side, or of those along an axis of an output."""
    return "output", (side if axis is None else (side, axis))
