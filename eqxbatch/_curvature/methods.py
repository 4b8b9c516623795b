"""Blocks of a matrix of second derivatives, with the cheaper method for each leaf."""

from typing import Literal

from jaxtyping import Array, Inexact, Real

from .._base.cpu import separate
from .._base.jaxprs import first_use
from .._base.mesh import full_varying_as
from .._base.trees import log
from .._batch.rows import accumulated_sums
from .._sites.trace import Program
from .by_products import (
    ProductBlocks,
)
from .by_sites import cheapest, is_covered, SiteHessian
from .curvature_of import AbstractCurvature, LossCurvature
from .gauss_newton import SiteGaussNewton
from .site_blocks import Pair, Wanted


CurvatureMethod = Literal["auto", "sites", "products"]


# The number of examples for which contractions are estimated, and the number of bytes
# that factors of examples may take if the result is smaller.
_COUNTED = 32


_LEAST_BYTES = 2**24


class CurvatureBlocks:
    """Blocks of a matrix of second derivatives.

    - `method`: `"sites"` for all leaves that have rules, `"products"` for none, or
        `"auto"` for those where that is cheaper.
    - `size`: the number of columns that products compute at a time.
    """

    def __init__(
        self,
        curvature: AbstractCurvature,
        wanted: Wanted,
        method: CurvatureMethod,
        size: int | None,
    ):
        self.curvature, self.wanted = curvature, wanted
        self.method, self.size = method, size
        self._sites = self._choose()
        by_sites = self._sites.blocks.wanted.leaves if self._sites else ()
        log.debug(
            "Second derivatives: method=%r takes %d of %d arrays by sites.",
            *(method, len(by_sites), len(wanted.leaves)),
        )

    @property
    def is_whole(self) -> bool:
        """Whether this is a Hessian of one array, with all columns at once.

        There is nothing to gain by symmetry then: a copy of all entries above the
        diagonal would only come on top.
        """
        if self._sites is not None or not isinstance(self.curvature, LossCurvature):
            return False
        sizes = [x.size for x in self.curvature.leaves]
        return len(sizes) == 1 and (self.size is None or self.size >= sizes[0])

    def sums(
        self, rows: list, weights: Real[Array, " n"] | None
    ) -> list[Inexact[Array, "pairs ..."]]:
        """The blocks of each group of pairs, summed over some examples."""
        found: list[Array] = []
        rest = self.wanted.leaves
        if self._sites is not None:
            found += self._by_sites(self._sites, rows, weights)
            rest -= self._sites.blocks.wanted.leaves
        others = [pair for (pair,) in self.groups[len(found) :]]
        if others:
            by_products = self._by_products(others, rest, rows, weights)
            found += (by_products[pair][None] for pair in others)
        return found

    def by_pairs(self, sums: list[Array]) -> dict[Pair, Inexact[Array, "..."]]:
        """The requested blocks, from what `sums` returns."""
        found = {}
        separated = separate(sums, self.curvature.leaves)
        for pairs, blocks in zip(self.groups, separated, strict=True):
            found.update(zip(pairs, blocks, strict=True))
        return {pair: found[pair] for pair in self.wanted.pairs}

    @property
    def groups(self) -> list[list[Pair]]:
        """The requested pairs of leaves, in the groups that `sums` uses."""
        groups = [] if self._sites is None else self._sites.blocks.groups
        known = {pair for pairs in groups for pair in pairs}
        return [*groups, *([pair] for pair in self.wanted.pairs if pair not in known)]

    def _by_sites(
        self,
        sites: SiteHessian | SiteGaussNewton,
        rows: list,
        weights: Array | None,
    ) -> list[Array]:
        """Computes sums from sites, in blocks of examples whose factors are small."""
        leaves, axes = self.curvature.leaves, self.curvature.axes
        if not axes:
            return sites.sums(leaves, rows, axes, weights)
        total = rows[0].shape[axes[0]]
        result = sum(self._num_bytes(pair) for pair in self.wanted.pairs)
        most = max(result // 4, _LEAST_BYTES)
        size = _even(total, max(1, min(total, most // max(sites.bytes, 1))))
        sums = lambda rows, weights: sites.sums(leaves, rows, axes, weights)
        return accumulated_sums(sums, rows, axes, weights, size)

    def _num_bytes(self, pair: Pair) -> int:
        """The size of the block of a pair, or of its diagonal."""
        first, second = (self.curvature.leaves[i] for i in pair)
        entries = first.size * (1 if self.wanted.is_diagonal else second.size)
        return entries * first.dtype.itemsize

    def _by_products(
        self,
        pairs: list[Pair],
        columns: set[int],
        rows: list,
        weights: Array | None,
    ) -> dict[Pair, Array]:
        products = self.curvature.products(rows, weights)
        wanted = Wanted(pairs, self.wanted.is_diagonal)
        order, leaves = self._in_order(columns), self.curvature.leaves
        return ProductBlocks(products, leaves, order, wanted, self.size).blocks()

    def _in_order(self, leaves: set[int]) -> list[int]:
        """The leaves in the order in which the function uses them."""
        jaxpr = self.curvature.program.closed.jaxpr
        return sorted(leaves, key=lambda i: first_use(jaxpr, jaxpr.invars[i]))

    def _choose(self) -> SiteHessian | SiteGaussNewton | None:
        """The leaves that are computed from sites."""
        curvature, num = self.curvature, len(self.curvature.leaves)
        if self.method == "products" or not curvature.allows_sites:
            return None
        program, covered = self._program(set(range(num)))
        if not self.wanted.among(covered).pairs:
            return None
        if self.method == "auto" and curvature.excludes_sites(covered):
            return None
        sites = curvature.of_sites(program, self.wanted.among(covered))
        if self.method == "sites" or curvature.forms_rest:
            return sites
        counted = _COUNTED if curvature.axes else 1
        zeros = [
            full_varying_as(var.aval, 0)
            for var in curvature.program.closed.jaxpr.invars[num:]
        ]
        products = curvature.products_of_one(zeros)
        order = self._in_order(self.wanted.leaves)
        columns = ProductBlocks(
            products, curvature.leaves, order, self.wanted, self.size
        ).estimate()
        columns = {leaf: counted * cost for leaf, cost in columns.items()}
        chosen = cheapest(program, covered, sites.estimate(counted), columns)
        if chosen == covered:
            return sites
        if not self.wanted.among(chosen).pairs:
            return None
        program, covered = self._program(chosen)
        return curvature.of_sites(program, self.wanted.among(covered))

    def _program(self, leaves: set[int]) -> tuple[Program, set[int]]:
        """The function with the sites of some leaves, and the leaves that have rules.

        Leaves without a rule are not perturbed, or their Jacobian is formed.
        """
        curvature, num = self.curvature, len(self.curvature.leaves)
        formed: set[int] = set()
        while True:
            program = Program(
                curvature.program.closed,
                num,
                constant=set(range(num)) - leaves,
                formed=formed,
                num_outputs=curvature.num_outputs,
                order=2,
            )
            covered = {
                i for i in leaves if i in formed or is_covered(program, i, self.wanted)
            }
            if covered == leaves:
                return program, covered
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
