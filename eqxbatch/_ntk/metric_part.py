"""The parts of a metric, and the uses of their leaves in a program."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Inexact

from .._base.trees import safe_zip
from .._sites.cost import Cost
from .._sites.kronecker import AxisRoles, Part, parts_of, uses_of
from .._sites.site import positions, Site
from .._sites.table import SiteTable
from .product_basis import ProductBasis


class PlainBasis(eqx.Module):
    """The coordinates of the identity, which are the gradients of a leaf."""


class MetricPart(eqx.Module):
    """A block of a metric.

    - `leaves`: the indices of its parameters.
    - `coordinates`: a linear function of their gradients for one output.
    - `basis`: the same for outer products of operands and cotangents, if it is known.
    """

    leaves: tuple[int, ...] = eqx.field(static=True)
    coordinates: Callable[[list[Array]], Inexact[Array, "..."]]
    basis: ProductBasis | PlainBasis | None = None

    @property
    def is_factored(self) -> bool:
        return isinstance(self.basis, ProductBasis) and self.basis.values is None

    def taken(self, times: int) -> "MetricPart":
        """The same part, whose root and its transpose are taken this often."""
        if not self.is_factored:
            return self
        assert isinstance(self.basis, ProductBasis)
        basis = dataclasses.replace(self.basis, times=times)
        return dataclasses.replace(self, basis=basis)


class PartUses(NamedTuple):
    """A part of a metric in a program.

    - `part`: the block of the same leaves.
    - `uses`: the sites where its gradients are outer products; where there are none,
        gradients are formed.
    """

    part: Part
    uses: list[AxisRoles]

    @property
    def num_positions(self) -> int:
        return sum(_num_positions(use.site) for use in self.uses)

    @property
    def num_entries(self) -> int:
        """The number of entries of the factors of one example."""
        assert self.part.layout is not None
        num, outputs, inputs = self.part.layout.sizes
        operands = sum(
            _num_positions(use.site) * (use.site.rule.token is None)
            for use in self.uses
        )
        return num * (self.num_positions * outputs + operands * inputs)

    def cost(self, dim: int) -> Cost:
        """The cost of products of the factors of one example with `dim` directions."""
        assert self.part.layout is not None
        products = 3 * self.num_positions * self.part.layout.sizes.batch * dim
        return Cost(2.0 * self.num_entries * dim, 4.0 * (self.num_entries + products))


def uses_of_parts(table: SiteTable, parts: Sequence[MetricPart]) -> list[PartUses]:
    """The uses of each part of a metric in a program."""
    # Once for all: each looks at all leaves.
    in_table = parts_of(table, [part.leaves for part in parts])
    return [
        PartUses(
            in_program,
            uses_of(table, in_program)
            if _has_products(table, part, in_program)
            else [],
        )
        for part, in_program in safe_zip(parts, in_table)
    ]


def _num_positions(site: Site) -> int:
    """The number of positions that share the leaf of a site."""
    return math.prod(site.sizes[axis] for axis in positions(site))


def _has_products(table: SiteTable, part: MetricPart, in_program: Part) -> bool:
    """Whether gradients are outer products for the basis of a part of the metric."""
    basis = part.basis
    if in_program.layout is None or basis is None:
        return False
    if isinstance(basis, PlainBasis):
        return True
    if basis.part != in_program:
        return False
    uses = uses_of(table, in_program)
    of_tokens = [use.site for use in uses if use.site.rule.token is not None]
    # Counts of tokens only rescale what is looked up.
    if in_program.is_counted:
        return len(of_tokens) == len(uses) and not any(x.is_swapped for x in uses)
    # Else tokens are operands as others: rows of the matrix, one for each position. A
    # gradient has one for each output.
    num = max(map(_num_positions, of_tokens), default=0)
    return num <= in_program.layout.sizes.outputs
