"""Eigenvalues that are products of two, plus damping."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Inexact, Real


class DampedProduct(eqx.Module):
    """What the eigenvalues of a damped Kronecker product are made of.

    These are `(outputs[:, :, None] * inputs[:, None] + damping) ** power`.
    """

    outputs: Inexact[Array, "batch outputs"]
    inputs: Inexact[Array, "batch inputs"]
    damping: Real[Array, ""]
    power: float = eqx.field(static=True, default=1.0)

    def to_the(self, power: int | float) -> "DampedProduct":
        return dataclasses.replace(self, power=power * self.power)

    def changed(self, change: Callable[[Array], Array]) -> "DampedProduct":
        """The same, where `change` returns the same numbers, such as checked ones."""
        return dataclasses.replace(self, damping=change(self.damping))
