"""A few numbers for each example, which are linear in its gradient."""

import abc
from collections.abc import Mapping
from typing import Any

import equinox as eqx
from jaxtyping import Array, Inexact, PyTree

from .cost import FeatureCost
from .factors import Factors
from .table import SiteTable


class AbstractFeatures(eqx.Module):
    """Linear functions of gradients, whose random numbers are drawn."""

    @abc.abstractmethod
    def of_gradients(
        self, leaves: list[Inexact[Array, "n ..."]]
    ) -> Inexact[Array, "n dim"]:
        """The features of some gradients."""

    @abc.abstractmethod
    def at(self, table: SiteTable) -> "AbstractFeaturesOfSites":
        """The same for a program with these sites."""


class AbstractFeaturesOfSites(eqx.Module):
    """Linear functions of the gradients of a program with sites."""

    @abc.abstractmethod
    def cost(self, leaf: int) -> FeatureCost:
        """The cost of what a leaf adds."""

    @abc.abstractmethod
    def of_factors(
        self, factors: Factors, formed: Mapping[int, Array]
    ) -> Inexact[Array, "n dim"]:
        """The features of some examples.

        - `formed`: the gradients that are kept, by leaf.
        """


class AbstractProjection(eqx.Module):
    """What `features=` takes: a projection of gradients to a few numbers."""

    @abc.abstractmethod
    def drawn(self, parameters: PyTree[Any]) -> AbstractFeatures:
        """The projection of the gradients of these parameters."""
