"""The blocks of a matrix, by sites, by products or from the Jacobian.

The cheapest way is chosen.
"""

import functools
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.compile import num_bytes
from .._base.jaxprs import first_use
from .._base.platforms import platform
from .._base.trees import log
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._batch.sums import Sum
from .._sites.cancel import unless_cancelled
from .._sites.program import Program
from .by_sites import AbstractSiteMatrix, cheapest, is_covered
from .columns import (
    product_blocks,
    product_costs,
)
from .from_jacobian import JacobianMatrix
from .functions import AbstractCurvature, GaussNewtonCurvature, LossCurvature
from .pytree import BlockSums, Pair, RequestedBlocks


# What has sums of blocks over examples.
ByExample = AbstractSiteMatrix | JacobianMatrix


# The number of examples for which contractions are estimated.
_COUNTED = 32


class _Covered(NamedTuple):
    """A function with its sites, and the leaves that have rules there."""

    program: Program
    leaves: set[int]


class CurvatureBlocks:
    """Blocks of a matrix of second derivatives.

    - `method`: `"sites"` for all leaves that have rules, `"products"` for none, or
        `"auto"` for those where that is cheaper.
    - `size`: the number of columns that products compute at a time.
    """

    def __init__(
        self,
        curvature: AbstractCurvature,
        requested: RequestedBlocks,
        method: Literal["auto", "sites", "products"],
        size: int | None,
    ):
        self.curvature, self.requested = curvature, requested
        self.method, self.size = method, size
        self._by_example = self._choose()
        leaves = self._by_example.requested.leaves if self._by_example else ()
        is_formed = isinstance(self._by_example, JacobianMatrix)
        log.debug(
            "Second derivatives: method=%r takes %d of %d arrays %s.",
            *(method, len(leaves), len(requested.leaves)),
            "from the Jacobian" if is_formed else "by sites",
        )

    @property
    def is_whole(self) -> bool:
        """Whether this is a Hessian of one array, with all columns at once.

        There is nothing to gain by symmetry then: a copy of all entries above the
        diagonal would only come on top.
        """
        if self._by_example is not None or not isinstance(
            self.curvature, LossCurvature
        ):
            return False
        sizes = [x.size for x in self.curvature.leaves]
        return len(sizes) == 1 and (self.size is None or self.size >= sizes[0])

    def sums(self, rows: Rows) -> list[Inexact[Array, "_ ..."]]:
        """The blocks of each group of pairs, summed over some examples."""
        sums: list[Array] = []
        rest = self.requested.leaves
        # Blocks by example come first, as their groups do.
        if self._by_example is not None:
            of_examples = self._by_examples(self._by_example, rows)
            sums += self._unless_cancelled(of_examples, rows)
            rest -= self._by_example.requested.leaves
        # All later groups are single pairs, and take the columns of leaves without
        # sites.
        others = [pair for (pair,) in self.groups[len(sums) :]]
        if others:
            by_products = self._by_products(others, rest, rows, self.size)
            sums += (by_products[pair][None] for pair in others)
        return sums

    def _unless_cancelled(self, sums: BlockSums, rows: Rows) -> list[Array]:
        """The blocks from sites, or from products if terms cancel for some examples."""
        if sums.num_cancelled is None:
            return sums.blocks
        assert isinstance(self._by_example, AbstractSiteMatrix)
        groups, table = self._by_example.groups, self._by_example.program.table
        leaves = self._by_example.requested.leaves
        total = rows.total
        kept = num_bytes([table.perturbations, table.operands])
        # The branch takes no more memory than the blocks from sites. A column keeps the
        # tangents of values and of their cotangents.
        most = min(total * self._by_example.bytes, platform().factor_bytes)
        size = max(1, most // max(2 * total * kept, 1))
        size = size if self.size is None else min(size, self.size)

        def products() -> list[Array]:
            pairs = [pair for pairs in groups for pair in pairs]
            blocks = self._by_products(pairs, leaves, rows, size)
            return [jnp.stack([blocks[pair] for pair in pairs]) for pairs in groups]

        arrays = [*self.curvature.leaves, *rows.arrays]
        flags = sums.num_cancelled[None] > 0
        return unless_cancelled(flags, arrays, sums.blocks, products)

    @property
    def groups(self) -> list[list[Pair]]:
        """The requested pairs of leaves, in the groups that `sums` uses."""
        groups = [] if self._by_example is None else self._by_example.groups
        known = {pair for pairs in groups for pair in pairs}
        return [
            *groups,
            *([pair] for pair in self.requested.pairs if pair not in known),
        ]

    def _by_examples(self, matrix: ByExample, rows: Rows) -> BlockSums:
        """Computes sums of blocks, for examples whose factors are small at a time."""
        # A function of all its arguments is a single example.
        if not rows.axes:
            return matrix.sums(rows)
        requested, total = self.requested, rows.total
        sizes = (requested.num_bytes(x, matrix.leaves) for x in requested.pairs)
        # Beside a large result, factors of a quarter of its size do not matter.
        most = max(sum(sizes) // 4, platform().factor_bytes)
        size = _even(total, max(1, min(total, most // max(matrix.bytes, 1))))
        return accumulated(matrix.sums, rows, size, Sum())

    def _by_products(
        self,
        pairs: list[Pair],
        columns: set[int],
        rows: Rows,
        size: int | None,
    ) -> dict[Pair, Array]:
        products = self.curvature.products(rows)
        requested = RequestedBlocks(pairs, self.requested.is_diagonal)
        order, leaves = self._in_order(columns), self.curvature.leaves
        return product_blocks(products, leaves, order, requested, size)

    def _in_order(self, leaves: set[int]) -> list[int]:
        """The leaves in the order in which the function uses them."""
        jaxpr = self.curvature.program.closed.jaxpr
        return sorted(leaves, key=lambda i: first_use(jaxpr, jaxpr.invars[i]))

    def _choose(self) -> ByExample | None:
        """What has the blocks that need no products."""
        curvature, num = self.curvature, len(self.curvature.leaves)
        # This comes first: it takes no trace of the sites.
        if self.method == "auto" and isinstance(curvature, GaussNewtonCurvature):
            matrix = JacobianMatrix(curvature, self.requested)
            if matrix.is_cheapest_with(self.size):
                return matrix
        # The sites are traced only if they may be used.
        if self.method == "products" or not curvature.allows_sites:
            return None

        def of_sites(program: Program, leaves: set[int]) -> AbstractSiteMatrix:
            requested = self.requested.among(leaves)
            return curvature.of_sites(program, requested, self.method == "auto")

        program, covered = self._program(set(range(num)))
        if not self.requested.among(covered).pairs:
            return None
        # `method="sites"` is taken at its word: JAX raises an error then.
        if self.method == "auto" and curvature.excludes_sites(covered):
            return None
        sites = of_sites(program, covered)
        # These need no estimate: there is one way only.
        if self.method == "sites" or curvature.forms_rest:
            return sites
        # Products take as long for each example. Contractions sum over examples, and
        # write their result once.
        counted = _COUNTED if curvature.axes else 1
        products = curvature.products(Rows(curvature.program.zeros().rows, (), 1))
        order = self._in_order(self.requested.leaves)
        columns = {
            leaf: counted * cost
            for leaf, cost in product_costs(products, curvature.leaves, order).items()
        }
        chosen = cheapest(program.table, covered, sites.estimate(counted), columns)
        if chosen == covered:
            return sites
        # Leaves that are left to products need no perturbations, so there is less to
        # differentiate without theirs.
        if not self.requested.among(chosen).pairs:
            return None
        return of_sites(*self._program(chosen))

    def _program(self, leaves: set[int]) -> _Covered:
        """The function with the sites of those leaves, among some, that have rules.

        Leaves without a rule are not perturbed, or their Jacobian is formed.
        """
        curvature, num = self.curvature, len(self.curvature.leaves)
        formed: set[int] = set()
        # Gauss-Newton matrices form the Jacobians whose terms may cancel.
        is_of_loss = isinstance(curvature, LossCurvature)
        counts_cancelled = self.method == "auto" and is_of_loss
        is_known = functools.partial(
            is_covered, requested=self.requested, counts_cancelled=counts_cancelled
        )
        # With fewer leaves to follow, the sites of the remaining ones may be others, so
        # rules are asked for again until all leaves have one.
        while True:
            program = Program(
                curvature.program,
                constant=set(range(num)) - leaves,
                formed=formed,
                num_outputs=curvature.num_outputs,
                order=2,
            )
            covered = {i for i in leaves if i in formed or is_known(program.table, i)}
            if covered == leaves:
                return _Covered(program, covered)
            if curvature.forms_rest:
                formed |= leaves - covered
            else:
                leaves = covered


def _even(total: int, size: int) -> int:
    """A size without a remainder, if one is at least half as large.

    A remainder would need a program of its own.
    """
    divisors = (i for i in range(size, size // 2, -1) if total % i == 0)
    return next(divisors, size)
