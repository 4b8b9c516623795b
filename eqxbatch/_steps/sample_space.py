"""Steps in sample space: the kernel of all residuals."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from .._base.dtypes import finite_sums, widened
from .._base.jaxprs import uses_dtype
from .._batch.loop import Rows
from .._kernels.engine import make_collectors, on_device
from .._kernels.kernel import Plan, room_to_keep
from .._ntk.example_factors import (
    choose_formed,
    ExampleFactors,
    Linearization,
    output_factors,
    Schedule,
)
from .._ntk.model_kernel import ModelKernel
from .._ntk.output_axes import Mirror, OutputAxes
from .._ntk.pairings import Sites
from .._sites.factors import Factors, weighted_sum
from .._sites.site import Site
from .._sites.trace import Program
from .terms import in_range, Residuals, shares, Vectors


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
        formed = self._formed([self._linearization(i, ()) for i in residuals.numbers])
        # One backward pass computes all gradients of a leaf. That is faster than
        # contracting the factors of its sites.
        linearizations = [self._linearization(i, formed) for i in residuals.numbers]
        self._factors = [
            ExampleFactors(x, [output_factors(x.program, ())], keeps_values=False)
            for x in linearizations
        ]
        self._kernels = {pair: self._kernel(*pair) for pair in self._pairs()}
        self._kept: list[Rows] = []

    def _linearization(self, number: int, formed: Collection[int]) -> Linearization:
        residuals = self._residuals
        rows, program = residuals.rows[number], self._programs[number]
        axes = self._axes(number, number, program.structs[0].dtype)
        return Linearization(
            Program(
                program.closed, len(residuals.leaves), formed=formed, num_outputs=1
            ),
            residuals.leaves,
            [axes],
            [axes.cotangents(None, 0)],
            rows.arrays,
            rows.axes,
            num_outputs=1,
        )

    def _formed(self, linearizations: list[Linearization]) -> set[int]:
        """The leaves whose gradients are formed, for all terms."""
        if self._residuals.centre:  # Products would cancel.
            return {*range(len(self._residuals.leaves))}
        formed: set[int] = set()
        for i, j in self._pairs():
            pair, schedule = (
                (linearizations[i], linearizations[j]),
                self._schedule(i, j),
            )
            formed |= {*choose_formed(*pair, 0, schedule)[0]}
        return formed

    def _axes(self, first: int, second: int, dtype: Any = None) -> OutputAxes:
        entries = self._residuals.entries
        shapes = (entries[first],), (entries[second],)
        dtype = self._residuals.dtype if dtype is None else dtype
        return OutputAxes(0, shapes, dtype, batch=0, roles=("full", "full"))

    def _schedule(self, first: int, second: int) -> Schedule:
        totals = [self._residuals.rows[i].total for i in (first, second)]
        sizes = [min(self._size or total, total) for total in totals]
        rows, columns = (
            -(-total // max(size, 1)) for total, size in zip(totals, sizes, strict=True)
        )
        pairs = (sizes[0], sizes[1]), (rows, columns), rows * columns
        return Schedule(*pairs, is_symmetric=first == second)

    def _kernel(self, first: int, second: int) -> ModelKernel:
        """The kernel of two terms, which may be the same."""
        rows, is_same = self._residuals.rows, first == second
        factors = [self._factors[first], self._factors[second]][: 1 if is_same else 2]
        return ModelKernel(
            Plan(
                Mirror((), ()) if is_same else None,
                (self._size, self._size),
                0 if self._size is None else room_to_keep(),
            ),
            (rows[first], rows[second]),
            Sites(factors, [], [self._axes(first, second)]),
            [("ntk", 0)],
            lambda blocks: blocks["ntk", 0],
        )

    def matrix(self) -> Float[Array, "num num"]:
        """The kernel of all residuals in order, weighted and centred."""
        all_rows, size = self._residuals.rows, self._size
        blocks: dict[tuple[int, int], Array] = {}
        if size is None or all(size >= rows.total for rows in all_rows):
            for i, rows in enumerate(all_rows):
                most = self._microbatch_size or max(rows.total, 1)
                self._kept.append(self._kernels[i, i].keep(0, rows, most))
            for (i, j), kernel in self._kernels.items():
                second = None if i == j else self._kept[j]
                (blocks[i, j],) = kernel.block(self._kept[i], second)
        else:
            for pair, kernel in self._kernels.items():
                (blocks[pair],) = on_device(kernel, make_collectors(kernel, None))
        block_rows: list[Array] = []
        for i in self._residuals.numbers:
            of_row = [
                self._arranged(blocks[i, j], i, j)
                if j <= i
                else self._arranged(blocks[j, i], j, i).T
                for j in self._residuals.numbers
            ]
            block_rows.append(jnp.concatenate(of_row, axis=1))
        return jnp.concatenate(block_rows, axis=0)

    def pull(self, vectors: Vectors) -> list[Array]:
        """Like `Residuals.pull`, from the factors that were kept for the kernel."""
        residuals = self._residuals
        if not self._kept:
            return residuals.pull_by_example(vectors, self._size)
        totals = residuals.zeros()
        vectors, size = in_range(residuals.centred(vectors, is_transpose=True))
        for number, vector in enumerate(vectors):
            of_term = self._factors[number]
            closed = self._programs[number].closed
            is_narrow = uses_dtype(closed.jaxpr, jnp.float16)
            kept = self._kernels[number, number].factors(0, self._kept[number])
            (sites,), (factors,) = of_term.kept, of_term.of_outputs(kept, 0)
            for leaf, of_leaf in sites.sites.items():
                gradient = _product(
                    of_leaf, factors, residuals.leaves[leaf], vector, is_narrow
                )
                totals[leaf] += jnp.conj(gradient).astype(totals[leaf].dtype)
        return [x * size.astype(x.dtype) for x in totals]

    def _pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in self._residuals.numbers for j in range(i + 1)]

    def _arranged(
        self, kernel: Float[Array, "n1 n2 out1 out2"], first: int, second: int
    ) -> Float[Array, "rows columns"]:
        """A block with adjacent entries for each example, weighted and centred."""
        residuals = self._residuals
        weights = residuals.weights[first], residuals.weights[second]
        if residuals.centre:
            for axis, of_side in enumerate(weights):
                kernel = _centred_along(kernel, shares(of_side), axis)
        roots = [jnp.sqrt(x) for x in weights]
        kernel = kernel * jnp.expand_dims(jnp.outer(roots[0], roots[1]), (2, 3))
        n1, n2, out1, out2 = kernel.shape
        return jnp.swapaxes(kernel, 1, 2).reshape(n1 * out1, n2 * out2)


def _centred_along(kernel: Array, weights: Array, axis: int) -> Array:
    mean = jnp.tensordot(weights, kernel, axes=(0, axis))
    return kernel - jnp.expand_dims(mean, axis)


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
    (site, *_) = sites
    if site.rule.kind != "leaf":
        sums = lambda share: [weighted_sum(sites, factors, leaf, share * vector)]
        (total,) = finite_sums(sums(1.0), sums, vector.shape[0], is_narrow)
        return total
    _, gradients = factors.of(site)
    if not gradients.has_examples:
        vector = jnp.sum(vector, axis=0)
    wide = widened(gradients.array)
    return jnp.tensordot(vector.astype(wide.dtype), wide, vector.ndim)
