"""Branches that are rarely taken: the same results, computed in a dearer way."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from .mesh import vary_as
from .structs import vary
from .trees import safe_zip
from .versions import varying


def unless_any(
    flags: Bool[Array, "..."],
    arrays: list[Array],
    plain: list[Array],
    otherwise: Callable[[], list[Array]],
) -> list[Array]:
    """What is `plain`, or what is computed from some arrays if any flag is set.

    One branch decides for all, because the host of a GPU may wait for each.
    """
    plain = vary_as(arrays, plain)

    def other() -> list[Array]:
        return [
            # Branches must have equal types, on a mesh also in what they vary over.
            vary(x.astype(y.dtype), varying(jax.typeof(y)))
            for x, y in safe_zip(otherwise(), plain)
        ]

    return lax.cond(is_any(lax.stop_gradient(flags)), other, lambda: plain)


@jax.custom_batching.custom_vmap
def is_any(x: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Whether there is a True; under `jax.vmap`, whether there is one in the batch.

    A branch that differs between the entries of a batch would always run.
    """
    return jnp.any(x)


@is_any.def_vmap
def _any_of_batch(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    return is_any(x), False
