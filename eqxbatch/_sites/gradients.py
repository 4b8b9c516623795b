"""The gradients of the examples of a microbatch, known by norms and weighted sums."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._blocks.accumulators import widened, widest
from .._blocks.mesh import is_on_mesh
from .choose import Contraction
from .contract import Factors, gradients, kept_examples, squared_norms, weighted_sum
from .trace import Program


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

    def squared_norms(self) -> list[Real[Array, " n"]]:
        """For each leaf, the squared norms of the examples' gradients."""
        return [self._squared_norm(c) for c in self._contractions]

    def _squared_norm(self, contraction: Contraction) -> Array:
        leaf = contraction.leaf
        if contraction.form == "unused":
            return jnp.zeros(self._factors.num, widest(self._leaves[leaf].dtype))
        sites = self._program.sites_of(leaf)
        if contraction.form == "gram":
            return squared_norms(sites, self._factors)
        formed = gradients(sites, self._factors, self._leaves[leaf])
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
            weights = weights.astype(formed.dtype)
            if is_on_mesh(formed):
                # JAX does not contract axes that are sharded explicitly.
                weights = jnp.expand_dims(weights, range(1, formed.ndim))
                return jnp.sum(weights * formed, axis=0)
            return jnp.tensordot(weights, formed, 1)
        sites = self._program.sites_of(leaf)
        return weighted_sum(sites, factors, struct, weights)


def squared_norm(gradient: Inexact[Array, "n ..."]) -> Real[Array, " n"]:
    """The squared norm of each example's gradient, in float32 at least."""
    gradient = widened(gradient)
    squares = jnp.real(gradient * jnp.conj(gradient))
    return jnp.sum(squares, axis=tuple(range(1, squares.ndim)))
