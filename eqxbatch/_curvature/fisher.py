"""The curvature of a loss in the outputs of a model, or a square root of an estimate.

A generalised Gauss-Newton matrix is `J^T C J` for each example, with `C` the Hessian of
the loss in the outputs. For random vectors `s` with covariance `C`, the mean of
`(J^T s) (J^T s)^T` is this matrix. It takes one backward pass for each vector, while
the matrix itself takes one for each output.
"""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Inexact, Key, PRNGKeyArray, Real, UInt32

from .._base.dtypes import widened
from .._base.mesh import error_if
from .pytree import Unravel


Kind = Literal["type-2", "mc", "empirical"]


# How far below zero eigenvalues may be, in units of the rounding error.
_ROUNDING = 8.0


class Fisher(eqx.Module):
    """The matrix that replaces the Hessian of a loss in the outputs.

    - `fisher`: `"type-2"` uses this Hessian. `"mc"` uses its square root times random
        vectors, or gradients for drawn labels. `"empirical"` uses the gradient.
    - `key`, `num_samples`: settings for random draws, shared by all examples.
    - `sampler`: draws labels, as `sampler(key, out)`.
    """

    fisher: Kind = eqx.field(static=True)
    key: PRNGKeyArray | UInt32[Array, "2"] | None
    num_samples: int = eqx.field(static=True)
    sampler: Callable | None

    def __init__(
        self,
        fisher: Kind,
        key: PRNGKeyArray | UInt32[Array, " words"] | None,
        num_samples: int,
        sampler: Callable | None,
    ):
        is_mc = fisher == "mc"
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1; got {num_samples}.")
        if is_mc and key is None:
            raise ValueError(
                "`fisher='mc'` draws random vectors: give it a `key`, such as "
                "`jax.random.key(0)`; got `key=None`."
            )
        for name, is_given in (
            ("key", key is not None),
            ("sampler", sampler is not None),
            ("num_samples", num_samples != 1),
        ):
            if is_given and not is_mc:
                raise ValueError(
                    f"`{name}` is for `fisher='mc'`, as nothing is drawn otherwise; "
                    f"got it with `fisher={fisher!r}`. Leave it out."
                )
        self.fisher, self.num_samples, self.sampler = fisher, num_samples, sampler
        if key is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jr.wrap_key_data(key)
        self.key = key

    def rows(self, num: int) -> UInt32[Array, "num words"] | None:
        """For each example, the numbers that its key is made from."""
        if self.key is None:
            return None
        return jr.key_data(jr.split(self.key, num))

    def _keys(self, row: UInt32[Array, " words"] | None) -> Key[Array, " samples"]:
        """The keys of all samples of an example, from its `row`."""
        assert self.key is not None
        key = self.key
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
            found = [x[None] for x in gradient(outs)]
        elif self.sampler is None:
            # Terms that cancel where a classifier is confident do not cancel at zero.
            terms = jnp.abs(curvature([jnp.zeros_like(x) for x in outs]))
            terms = jnp.where(jnp.isfinite(terms), terms, 0)
            found = _probes(curvature(outs), terms, outs, self._keys(row))
        else:
            found = jax.vmap(lambda key: gradient(outs, key))(self._keys(row))
        scale = self.num_samples**-0.5
        return [lax.stop_gradient(x * scale) for x in found]


def _probes(
    matrix: Real[Array, "outputs outputs"],
    terms: Real[Array, "outputs outputs"],
    outs: list,
    keys: Key[Array, " samples"],
) -> list[Inexact[Array, "samples *out"]]:
    """The square root of a matrix times random signs, structured like the outputs.

    `terms` is as large as what was subtracted to form the matrix: eigenvalues below
    zero by its rounding count as zero.
    """
    rounding = matrix.shape[0] * float(jnp.finfo(matrix.dtype).eps)
    matrix, terms = widened(matrix), widened(terms)
    # Each row is judged by its own size, so that small curvatures beside large ones
    # keep their digits. No entry of the scaled matrix is above one.
    sizes = jnp.max(jnp.abs(matrix), axis=1, initial=0)
    scales = jnp.sqrt(jnp.where(sizes == 0, 1, sizes))
    values, vectors = jnp.linalg.eigh(matrix / scales[:, None] / scales[None])
    lowest = jnp.min(jnp.linalg.eigvalsh(matrix), initial=0)
    largest = jnp.max(jnp.maximum(jnp.abs(matrix), terms), initial=0)
    values = error_if(
        values,
        lowest < -_ROUNDING * rounding * largest,
        "`fisher='mc'` takes the square root of the loss's Hessian in what `fun` "
        "returns, but that has a negative eigenvalue: the loss is not convex there. "
        "Use `fisher='type-2'`, which needs no root, or give a `sampler`.",
    )
    # The root of an eigenvalue that is zero up to rounding would be as large as that of
    # eps. The symmetric root does not depend on the choice of eigenvectors.
    roots = jnp.where(values <= rounding, 0, jnp.sqrt(jnp.maximum(values, 0)))
    signs = jax.vmap(lambda key: jr.rademacher(key, values.shape, matrix.dtype))(keys)
    return Unravel(outs)(((signs @ vectors) * roots[None]) @ vectors.T * scales[None])


TYPE_2 = Fisher("type-2", None, 1, None)
