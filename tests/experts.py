"""Products with the matrices of groups, as JAX can differentiate and map them.

`jax.vmap` does not map `jax.lax.ragged_dot` over examples that share their weights, so
that references need the same product in another form.
"""

import contextlib
import contextvars

import jax.numpy as jnp
from jax import lax


_IS_MASKED = contextvars.ContextVar("is_masked", default=False)


@contextlib.contextmanager
def masked_products():
    """Within, `ragged_dot` is a sum over groups that JAX maps."""
    token = _IS_MASKED.set(True)
    try:
        yield
    finally:
        _IS_MASKED.reset(token)


def ragged_dot(lhs, rhs, sizes, **settings):
    if not _IS_MASKED.get():
        return lax.ragged_dot(lhs, rhs, sizes, **settings)
    dtype = settings.pop("preferred_element_type", None)
    sizes = jnp.asarray(sizes, jnp.int32)[None]
    ends = jnp.cumsum(sizes, 1)
    row = jnp.arange(lhs.shape[0], dtype=jnp.int32)[:, None]
    is_in = (row < ends) & (row >= ends - sizes)
    product = jnp.einsum("mg,mk,gkn->mn", is_in.astype(lhs.dtype), lhs, rhs, **settings)
    return product if dtype is None else product.astype(dtype)
