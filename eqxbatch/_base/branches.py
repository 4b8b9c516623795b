"""Conditions of branches that a batch of `jax.vmap` shares."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool


def is_any(flags: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Whether there is a True; under `jax.vmap`, whether there is one in the batch.

    With a condition that differs between the entries of a batch, all branches would
    run. If that depends on a tangent, JAX cannot transpose it, either.
    """
    return _is_any(lax.stop_gradient(flags))


@jax.custom_batching.custom_vmap
def _is_any(flags: Bool[Array, "..."]) -> Bool[Array, ""]:
    return jnp.any(flags)


@_is_any.def_vmap
def _any_of_batch(size: int, batched: list[bool], flags: Array) -> tuple[Array, bool]:
    del size, batched
    return _is_any(flags), False
