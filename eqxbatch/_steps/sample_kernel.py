"""The Jacobian of residuals times its transpose: a kernel of examples."""

from collections.abc import Collection, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from .._base.dtypes import (
    weighted_totals,
    widened,
)
from .._base.platforms import products_of
from .._batch.arguments import Dtype
from .._batch.rows import Rows
from .._kernels.engine import on_device
from .._kernels.grid import Grid
from .._kernels.kernel import room_of, RowsOfSides
from .._ntk.example_factors import choose_formed, ExampleFactors, FactorPlan
from .._ntk.output_axes import Mirror, OutputAxes
from .._ntk.pairings import ModelKernel, Sites
from .._sites.factors import Factors
from .._sites.formed import weighted_sum
from .._sites.site import Site
from .residuals import centred_along, in_range, Residuals, shares, Vectors


class SampleKernel:
    """The inner products of the derivatives of all residuals.

    - `block_size`: the number of examples in the rows or columns of a block; None for
        all.
    - `microbatch_size`: the number of examples whose factors are computed at a time.
    """

    def __init__(
        self, residuals: Residuals, block_size: int | None, microbatch_size: int | None
    ):
        self._residuals, self._size = residuals, block_size
        self._microbatch_size = microbatch_size
        self._programs = residuals.centred_programs
        # The kernel of two terms contracts factors of both, so that a leaf is formed
        # for all terms or for none. Costs are those of factors that are not formed yet.
        formed = self._formed([self._plan_of(i, ()) for i in residuals.numbers])
        # One backward pass computes all gradients of a leaf. That is faster than
        # contracting the factors of its sites.
        plans = [self._plan_of(i, formed) for i in residuals.numbers]
        self._factors = [ExampleFactors(plan, [()]) for plan in plans]
        self._kernels = {pair: self._kernel(*pair) for pair in self._pairs()}
        self._kept: list[Rows] = []

    def _plan_of(self, number: int, formed: Collection[int]) -> FactorPlan:
        rows, program = self._residuals.rows[number], self._programs[number]
        axes = self._axes(number, number, program.structs[0].dtype)
        return FactorPlan(program, rows, [axes], num_outputs=1, formed=formed)

    def _formed(self, plans: list[FactorPlan]) -> set[int]:
        """The leaves whose gradients are formed, for all terms."""
        if self._residuals.centre:  # Products would cancel.
            return {*range(len(self._residuals.leaves))}
        # What is formed for one pair is there for all others.
        formed: set[int] = set()
        for i, j in self._pairs():
            totals = self._residuals.rows[i].total, self._residuals.rows[j].total
            grid = Grid.of(totals, (self._size, self._size), i == j)
            formed |= {*choose_formed(plans[i], plans[j], 0, grid).leaves}
        return formed

    def _axes(self, first: int, second: int, dtype: Dtype) -> OutputAxes:
        entries = self._residuals.entries
        shapes = (entries[first],), (entries[second],)
        return OutputAxes(0, shapes, dtype, batch=0, roles=("full", "full"))

    def _kernel(self, first: int, second: int) -> ModelKernel:
        """The kernel of two terms, which may be the same."""
        # Both sides of a term with itself are one, whose factors are computed once.
        rows, is_same = self._residuals.rows, first == second
        factors = [self._factors[first], self._factors[second]][: 1 if is_same else 2]
        axes = self._axes(first, second, self._residuals.dtype)
        pairing = Sites(
            [],
            [axes],
            RowsOfSides(rows[first], rows[second]),
            lambda: products_of(*(program.closed for program in self._programs)),
            factors,
            assemble=lambda blocks: blocks["ntk", 0],
        )
        sizes = self._size, self._size
        return ModelKernel(
            lambda _: pairing,
            symmetric=Mirror((), ()) if is_same else None,
            sizes=sizes,
            room=0 if self._size is None else room_of(sizes),
        )

    def matrix(self) -> Float[Array, "num num"]:
        """The kernel of all residuals in order, weighted and centred."""
        all_rows, size = self._residuals.rows, self._size
        blocks: dict[tuple[int, int], Array] = {}
        # In one block, factors of all examples are kept, and `pull` uses them in place
        # of another backward pass.
        if size is None or all(size >= rows.total for rows in all_rows):
            for i, rows in enumerate(all_rows):
                most = self._microbatch_size or max(rows.total, 1)
                self._kept.append(self._kernels[i, i].keep(0, rows, most))
            for (i, j), kernel in self._kernels.items():
                second = None if i == j else self._kept[j]
                (blocks[i, j],) = kernel.block(self._kept[i], second)
        # In several, they are kept for a block at a time.
        else:
            for pair, kernel in self._kernels.items():
                blocks[pair] = on_device(kernel)
        # The kernel of two terms is computed once: the other order is its transpose.
        arranged = {pair: self._arranged(x, *pair) for pair, x in blocks.items()}
        numbers = self._residuals.numbers
        of_pair = lambda i, j: arranged[i, j] if j <= i else arranged[j, i].T
        return jnp.block([[of_pair(i, j) for j in numbers] for i in numbers])

    def pull(self, vectors: Vectors) -> list[Array]:
        """Like `Residuals.pull`, from the factors that were kept for the kernel."""
        residuals = self._residuals
        if not self._kept:
            return residuals.pull_by_example(vectors, self._size)
        # As clipped gradients are: sums over examples, with the vectors as weights.
        totals = residuals.zeros()
        vectors, size = in_range(residuals.centred(vectors, is_transpose=True))
        for number, vector in enumerate(vectors):
            of_term, traced = self._factors[number].plan, self._programs[number]
            of_rows = self._kernels[number, number].factors(0, self._kept[number])
            factors = of_term.factors(of_rows, 0, 0)
            for leaf, array in enumerate(residuals.leaves):
                sites = of_term.table.of(leaf)
                if not sites:  # The term does not use this parameter.
                    continue
                with products_of(traced.closed):
                    gradient = _product(sites, factors, array, vector, traced.is_narrow)
                totals[leaf] += jnp.conj(gradient).astype(totals[leaf].dtype)
        return [x * size.astype(x.dtype) for x in totals]

    def _pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in self._residuals.numbers for j in range(i + 1)]

    def _arranged(
        self, kernel: Float[Array, "n1 n2 out1 out2"], first: int, second: int
    ) -> Float[Array, "rows columns"]:
        """A block with adjacent entries for each example, weighted and centred."""
        residuals = self._residuals
        # `R C K C^T R`, with roots `R` of weights, and `C` that subtracts means.
        weights = residuals.weights[first], residuals.weights[second]
        if residuals.centre:
            for axis, of_side in enumerate(weights):
                kernel = centred_along(kernel, shares(of_side), axis)
        roots = [jnp.sqrt(x) for x in weights]
        kernel = kernel * jnp.expand_dims(jnp.outer(roots[0], roots[1]), (2, 3))
        # As in the vectors of residuals, the entries of an example are neighbours.
        n1, n2, out1, out2 = kernel.shape
        return jnp.swapaxes(kernel, 1, 2).reshape(n1 * out1, n2 * out2)


def _product(
    sites: Sequence[Site],
    factors: Factors,
    leaf: Array,
    vector: Float[Array, "n entries"],
    is_narrow: bool,
) -> Inexact[Array, "..."]:
    """The weighted sum of a leaf's gradients at all examples.

    `is_narrow` says whether the program uses float16.
    """
    # A leaf that is formed has one site, whose cotangent is its gradient.
    (site, *_) = sites
    if site.rule.kind != "leaf":
        sums = lambda _, share: [weighted_sum(sites, factors, leaf, share * vector)]
        (total,) = weighted_totals(sums, vector.shape[0], None, is_narrow)
        return total
    # Gradients `[n, entries, *leaf]`; if examples share them, `[entries, *leaf]`.
    gradients = factors.of(site).cotangent
    if not gradients.has_examples:
        vector = jnp.sum(vector, axis=0)
    wide = widened(gradients.array)
    return jnp.tensordot(vector.astype(wide.dtype), wide, vector.ndim)
