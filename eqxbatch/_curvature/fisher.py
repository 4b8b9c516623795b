"""The curvature of a loss in the outputs of a model, or a square root of an estimate.

A generalised Gauss-Newton matrix is `J^T C J` for each example, with `C` the Hessian of
the loss in the outputs. For random vectors `s` with covariance `C`, the mean of
`(J^T s) (J^T s)^T` is this matrix. It takes one backward pass for each vector, while
the matrix itself takes one for each output.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Concatenate, Generic, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact, Key, PRNGKeyArray, Real, UInt32

from .._base.checks import check_at_least
from .._base.dtypes import widened
from .._base.mesh import error_if
from .._batch.derivative import AbstractOverExamples, Microbatches
from .._batch.transform import Model, Out, P
from .pytree import Unravel


# How far below zero eigenvalues may be, in units of the rounding error.
_ROUNDING = 8.0


class AbstractOfOutputs(AbstractOverExamples, Generic[Model, P, Out]):
    """A transform of a model and a `loss` of its outputs."""

    fun: Callable[Concatenate[Model, P], Out]
    loss: Callable[Concatenate[Out, ...], ArrayLike]

    @property
    def has_aux(self) -> bool:
        return False

    @property
    def holomorphic(self) -> None:
        return None


class AbstractFisher(AbstractOfOutputs[Model, P, Out]):
    """A transform with a choice of what replaces the Hessian of the loss.

    - `fisher`: `"type-2"` uses this Hessian. `"mc"` uses its square root times random
        vectors, or gradients for drawn labels. `"empirical"` uses the gradient.
    - `key`, `num_samples`: settings for random draws, shared by all examples.
    - `sampler`: draws labels, as `sampler(key, out)`.
    """

    _: dataclasses.KW_ONLY
    fisher: Literal["type-2", "mc", "empirical"] = "type-2"
    key: PRNGKeyArray | UInt32[Array, "2"] | None = None
    num_samples: int = 1
    sampler: Callable[..., Any] | None = None

    def __check_init__(self) -> None:
        check_at_least("num_samples", self.num_samples, 1)
        is_mc = self.fisher == "mc"
        if is_mc and self.key is None:
            raise ValueError(
                "`fisher='mc'` draws random vectors: give it a `key`, such as "
                "`jax.random.key(0)`; got `key=None`."
            )
        for name, is_passed in (
            ("key", self.key is not None),
            ("sampler", self.sampler is not None),
            ("num_samples", self.num_samples != 1),
        ):
            if is_passed and not is_mc:
                raise ValueError(
                    f"`{name}` is for `fisher='mc'`, as nothing is drawn otherwise; "
                    f"got it with `fisher={self.fisher!r}`. Leave it out."
                )

    def with_keys(self, microbatches: Microbatches) -> Microbatches:
        """Appends keys as the last of the rows if anything is drawn at random."""
        batch, blocks = microbatches.batch, microbatches.blocks
        if self.key is None or blocks is None:
            return microbatches
        # The numbers that the key of each example is made from.
        keys = jr.key_data(jr.split(self._typed_key, blocks.total))
        batch = dataclasses.replace(
            batch,
            arrays=[*batch.arrays, keys],
            axes=(*batch.axes, 0),
            names=(*batch.names, "`key`"),
        )
        return dataclasses.replace(microbatches, batch=batch)

    @property
    def _typed_key(self) -> Key[Array, ""]:
        key = self.key
        assert key is not None
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return key if is_typed else jr.wrap_key_data(key)

    def _keys(self, row: UInt32[Array, " words"] | None) -> Key[Array, " samples"]:
        """The keys of all samples of an example, from its `row`."""
        key = self._typed_key
        if row is not None:
            key = jr.wrap_key_data(row, impl=jr.key_impl(key))
        return jr.split(key, self.num_samples)

    def seeds(
        self,
        gradient: Callable[..., list],
        curvature: Callable[[list], Inexact[Array, "outputs outputs"]],
        outs: list,
        row: Array | None,
    ) -> list[Inexact[Array, "samples *out"]]:
        """For each output of an example, vectors whose outer products give the matrix.

        `gradient(outs)` is that of the loss, `gradient(outs, key)` that for a label
        drawn with `key`, and `curvature(outs)` the Hessian of the loss.
        """
        outs = lax.stop_gradient(outs)
        if self.fisher == "empirical":
            vectors = [x[None] for x in gradient(outs)]
        elif self.sampler is None:
            # Terms that cancel where a classifier is confident do not cancel at zero.
            terms = jnp.abs(curvature([jnp.zeros_like(x) for x in outs]))
            terms = jnp.where(jnp.isfinite(terms), terms, 0)
            vectors = _probes(curvature(outs), terms, outs, self._keys(row))
        else:
            vectors = jax.vmap(lambda key: gradient(outs, key))(self._keys(row))
        scale = self.num_samples**-0.5
        return [lax.stop_gradient(x * scale) for x in vectors]


def _probes(
    matrix: Real[Array, "outputs outputs"],
    terms: Real[Array, "outputs outputs"],
    outs: list,
    keys: Key[Array, " samples"],
) -> list[Inexact[Array, "samples *out"]]:
    """The square root of a matrix times random signs, structured like the outputs."""
    factor = root(matrix, terms)
    signs = jax.vmap(lambda key: jr.rademacher(key, factor.shape[:1], factor.dtype))(
        keys
    )
    return Unravel(outs)(signs @ factor)


def root(
    matrix: Real[Array, "outputs outputs"], terms: Real[Array, "outputs outputs"]
) -> Real[Array, "outputs outputs"]:
    """An array `x` with `x.T @ x` equal to a positive semidefinite matrix.

    `terms` is as large as what was subtracted to form the matrix: eigenvalues below
    zero by its rounding count as zero.
    """
    eps = float(jnp.finfo(matrix.dtype).eps)
    matrix, terms = widened(matrix), widened(terms)
    lowest = jnp.min(jnp.linalg.eigvalsh(matrix), initial=0)
    largest = jnp.max(jnp.maximum(jnp.abs(matrix), terms), initial=0)
    # Each row is judged by its own size, so that small curvatures beside large ones
    # keep their digits. It is that of the diagonal, which is bounded below by the other
    # entries, as its own digits may have cancelled.
    sizes = jnp.diagonal(matrix)
    sizes = matrix / jnp.where(sizes > 0, sizes, jnp.inf)[None] * matrix
    sizes = jnp.max(sizes, axis=1, initial=0)
    scales = jnp.sqrt(jnp.where(sizes == 0, 1, sizes))
    values, vectors = jnp.linalg.eigh(matrix / scales[:, None] / scales[None])
    values = error_if(
        values,
        lowest < -_ROUNDING * matrix.shape[0] * eps * largest,
        "`fisher='mc'` takes the square root of the loss's Hessian in what `fun` "
        "returns, but that has a negative eigenvalue: the loss is not convex there. "
        "Use `fisher='type-2'`, which needs no root, or pass a `sampler`.",
    )
    # The root of an eigenvalue that is zero up to rounding would be as large as that of
    # eps. The symmetric root does not depend on the choice of eigenvectors.
    least = 4 * eps * jnp.max(values, initial=0)
    roots = jnp.where(values <= least, 0, jnp.sqrt(jnp.maximum(values, 0)))
    return (vectors * roots[None]) @ vectors.T * scales[None]
