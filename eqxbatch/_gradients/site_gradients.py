"""The gradients of the examples of a microbatch, known by norms and weighted sums."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._base.dtypes import (
    largest_of_each,
    power_of_two,
    scaled_examples,
    squared_norm,
    widened,
    widest,
)
from .._base.mesh import is_on_mesh
from .._sites.cost import Contraction
from .._sites.factors import (
    Factor,
    Factors,
    gradients,
    kept_examples,
    squared_norms,
    weighted_sum,
)
from .._sites.site import positions, Site
from .._sites.trace import Program


class SiteGradients:
    """The gradients of some examples, by the factors of their sites.

    Only the types of the `leaves` matter.
    """

    def __init__(
        self,
        program: Program,
        contractions: list[Contraction],
        factors: Factors,
        leaves: list,
    ):
        self._program = program
        self._leaves = leaves
        self._contractions = contractions
        self._factors = factors
        self._formed: dict[int, Array] = {}
        self._scaled: dict[int, tuple[Array, Array]] = {}

    @property
    def are_cheap(self) -> bool:
        """Whether `scales` take nothing that is not there without them."""
        return all(
            c.form == "unused" or self._is_product(c) for c in self._contractions
        )

    def _is_product(self, contraction: Contraction) -> bool:
        """Whether the norm of a leaf's gradient is the product of two norms."""
        if contraction.form != "gram":
            return False
        (site, *others) = self._program.sites_of(contraction.leaf)
        return not (others or site.rule.token is not None or positions(site))

    def squared_norms(
        self, scales: Sequence[Real[Array, " n"]] | None = None
    ) -> list[Real[Array, " n"]]:
        """For each leaf, the squared norms of the examples' gradients.

        With `scales`, for each leaf, gradients are multiplied with these first, so that
        their squares are in range.
        """
        factors = scales or [None] * len(self._contractions)
        return [
            self._squared_norm(contraction, scale)
            for contraction, scale in zip(self._contractions, factors, strict=True)
        ]

    def _squared_norm(self, contraction: Contraction, scale: Array | None) -> Array:
        leaf = contraction.leaf
        if contraction.form == "unused":
            return jnp.zeros(self._factors.num, widest(self._leaves[leaf].dtype))
        sites = self._program.sites_of(leaf)
        if contraction.form == "gram":
            # What is cheap is never done in another way, which takes time to compile.
            if scale is None and not self._is_product(contraction):
                return squared_norms(sites, self._factors)
            found = self._scaled.get(leaf)
            if found is None:
                found = _scaled_squared_norms(sites, self._factors)
            power, squares = found
            if scale is None:
                self._scaled[leaf] = found
            else:
                power = power.astype(scale.dtype) * scale
            # One after the other: the square of the power alone may overflow.
            return squares.astype(power.dtype) * power * power
        formed = self._formed.get(leaf)
        if formed is None:
            formed = gradients(sites, self._factors, self._leaves[leaf])
            if not is_on_mesh(formed):
                formed = formed.reshape(formed.shape[0], -1)
        if scale is not None:
            return squared_norm(scaled_examples(formed, scale))
        if contraction.keeps:
            self._formed[leaf] = formed
        return squared_norm(formed)

    def weighted_sums(
        self, weights: Sequence[Real[Array, " n"]], is_kept: Array | None
    ) -> list[Inexact[Array, "..."]]:
        """For each leaf, the weighted sum of the examples' gradients.

        The `weights` are given for each leaf. Examples where `is_kept` is False are
        left out, whatever their gradient is. Call `squared_norms` first: what it formed
        is used again.
        """
        factors = self._factors if is_kept is None else self._factors.where(is_kept)
        return [
            self._weighted_sum(c, factors, weight, is_kept)
            for c, weight in zip(self._contractions, weights, strict=True)
        ]

    def _weighted_sum(
        self,
        contraction: Contraction,
        factors: Factors,
        weights: Array,
        is_kept: Array | None,
    ) -> Array:
        leaf = contraction.leaf
        struct = self._leaves[leaf]
        if contraction.form == "unused":
            return jnp.zeros(struct.shape, struct.dtype)
        if leaf in self._formed:
            formed = self._formed[leaf]
            if is_kept is not None:
                formed = kept_examples(formed, is_kept)
            if formed.dtype == jnp.float16:  # Their sum may overflow.
                formed = widened(formed)
            weights = weights.astype(formed.dtype)
            if is_on_mesh(formed):
                # A product would ask for all of an axis that is sharded. `is_kept` can
                # be on a mesh where `formed`, which is flat then, was not.
                weights = jnp.expand_dims(weights, range(1, formed.ndim))
                return jnp.sum(weights * formed, axis=0).reshape(struct.shape)
            return jnp.tensordot(weights, formed, 1).reshape(struct.shape)
        sites = self._program.sites_of(leaf)
        if self._factors.of(sites[0])[1].array.dtype == jnp.float16:
            factors, weights = _balanced(sites, factors, weights)
        return weighted_sum(sites, factors, struct, weights)


def _scaled_squared_norms(
    sites: Sequence[Site], factors: Factors
) -> tuple[Real[Array, " n"], Real[Array, " n"]]:
    """Norms as the root of the second, times the first: no square is out of range."""
    operands, cotangents, own = [], [], []
    for i, site in enumerate(sites):
        a, d = factors.of(site)
        operands.append(a)
        cotangents.append(d)
        operand = None if a is None else i
        own.append(dataclasses.replace(site, perturbation=i, operand=operand))
    power = _common_power(cotangents)
    cotangents = [_over(d, power) for d in cotangents]
    if _have_size(sites, factors):
        of_operands = _common_power(operands)
        operands = [_over(a, of_operands) for a in operands]
        power = power * of_operands.astype(power.dtype)
    squares = squared_norms(own, Factors(operands, cotangents))
    return jnp.where(squares > 0, power, 1), squares


def _balanced(
    sites: Sequence[Site], factors: Factors, weights: Array
) -> tuple[Factors, Array]:
    """The same products, where no cotangent times its weight is out of range."""
    if not _have_size(sites, factors):
        return factors, weights
    numbers = {s.operand for s in sites if s.operand is not None}
    power = _common_power([factors.operands[i] for i in numbers])
    operands = [
        a.of(_over(a, power).array.astype(a.array.dtype)) if i in numbers else a
        for i, a in enumerate(factors.operands)
    ]
    return Factors(operands, factors.cotangents), weights * power.astype(weights.dtype)


def _have_size(sites: Sequence[Site], factors: Factors) -> bool:
    """Whether the operands of all sites can be scaled.

    Tokens have no size, what has no operand has ones in its place, and whole numbers
    and bools must stay what they are.
    """
    operands = [factors.of(site)[0] for site in sites]
    return all(
        a is not None and jnp.issubdtype(a.array.dtype, jnp.inexact) for a in operands
    )


def _common_power(factors: Sequence[Factor]) -> Real[Array, " n"]:
    largest = [largest_of_each(x.array) for x in factors]
    dtype = widest(*(x.dtype for x in largest))
    largest = (x.astype(dtype) for x in largest)
    return power_of_two(functools.reduce(jnp.maximum, largest))


def _over(x: Factor, power: Array) -> Factor:
    return x.of(scaled_examples(x.array, 1 / power))
