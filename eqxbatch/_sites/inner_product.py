"""Inner products of the gradients of a leaf, with or without a metric."""

import abc

import equinox as eqx
from jaxtyping import Array, Inexact

from .axes import Axes, Axis
from .cost import Cost, gram_cost
from .factors import Factor
from .gram import gram, OfLeaf, SquaredNorms, squares


class AbstractInnerProduct(eqx.Module):
    """An inner product of the gradients of one leaf."""

    @abc.abstractmethod
    def gram(
        self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes
    ) -> Inexact[Array, "..."]:
        """As `gram` of sites, in this inner product."""

    @abc.abstractmethod
    def squares(self, uses: OfLeaf) -> SquaredNorms:
        """As `squares` of sites, in this inner product."""

    @abc.abstractmethod
    def coordinates(self, jacobian: Factor) -> Factor:
        """Coordinates of formed gradients whose plain inner product this is."""

    @abc.abstractmethod
    def cost(self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes) -> Cost:
        """The cost of `gram`, from shapes only."""


class PlainProduct(AbstractInnerProduct):
    """The sum of the products of the entries."""

    def gram(
        self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes
    ) -> Inexact[Array, "..."]:
        return gram(uses, other, example, out)

    def squares(self, uses: OfLeaf) -> SquaredNorms:
        return squares(uses)

    def coordinates(self, jacobian: Factor) -> Factor:
        return jacobian

    def cost(self, uses: OfLeaf, other: OfLeaf, example: Axis, out: Axes) -> Cost:
        return gram_cost(uses, other, example, out)
