"""Shapes and dtypes of arrays."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .jaxpr_types import Aval
from .trees import with_shapes_of_arrays
from .versions import made_varying, varying


def vary(x: Array, names: frozenset) -> Array:
    """Marks `x` as varying over mesh axes inside `jax.shard_map`.

    Its derivative is then that of one device, not the sum over all devices.
    """
    # Marking an axis twice is an error of JAX.
    missing = names - varying(jax.typeof(x))
    return made_varying(x, tuple(missing)) if missing else x


def full_varying_as(aval: Aval, value: int | float) -> Array:
    """An array filled with a number, with the type of a struct."""
    return vary(jnp.full(aval.shape, value, aval.dtype), varying(aval))


def is_struct(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def array_structs(output: PyTree) -> list[jax.ShapeDtypeStruct]:
    """The arrays of an output, as shapes and dtypes."""
    return [x for x in jtu.tree_leaves(output) if is_struct(x)]


def with_arrays(output: PyTree, arrays: Iterable[Any]) -> PyTree:
    """An output with these in place of shapes and dtypes, in their order."""
    remaining = iter(arrays)
    filled = jtu.tree_map(lambda x: next(remaining) if is_struct(x) else x, output)
    return with_shapes_of_arrays(filled)
