"""Complex arrays as two real ones each: derivatives with respect to real arrays."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, PyTree


class _Parts(eqx.Module):
    """Real and imaginary part of an array."""

    real: Array
    imag: Array


def is_complex(x: Any) -> bool:
    """Whether something with a dtype, such as an array or its struct, is complex."""
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def split_parts(tree: PyTree) -> PyTree:
    """Two real leaves in the place of each complex array."""
    split = lambda x: _Parts(jnp.real(x), jnp.imag(x))
    return jtu.tree_map(
        lambda x: split(x) if eqx.is_array(x) and is_complex(x) else x, tree
    )


def join_parts(tree: PyTree) -> PyTree:
    """What `split_parts` takes apart."""
    is_split = lambda x: isinstance(x, _Parts)
    return jtu.tree_map(
        lambda x: lax.complex(x.real, x.imag) if is_split(x) else x,
        tree,
        is_leaf=is_split,
    )
