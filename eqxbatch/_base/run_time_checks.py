"""Checks of numbers that only a program knows, also of a program on several devices."""

import contextlib
import contextvars

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import Array, Bool, PyTree

from .mesh import mesh_axes, vary_as
from .platforms import assigned
from .trees import safe_zip
from .versions import varying


_ON_SEVERAL = contextvars.ContextVar("on several devices", default=False)


def on_devices_of(tree: PyTree) -> contextlib.AbstractContextManager:
    """A context in which programs run on the devices of some arrays."""
    arrays = (x for x in jtu.tree_leaves(tree) if isinstance(x, jax.Array))
    several = any(map(_is_on_several, arrays))
    return assigned(_ON_SEVERAL, several or _ON_SEVERAL.get())


def can_raise(*arrays: Array) -> bool:
    """Whether a check of these numbers can raise an error in this program.

    Of the devices of a mesh, one would raise, and all others wait for it until the
    process is ended; inside `jax.shard_map`, they may disagree.
    """
    return not (_ON_SEVERAL.get() or any(map(_is_on_several, arrays)))


def _is_on_several(x: Array) -> bool:
    struct = jax.typeof(x)
    sizes = [size for size, _ in mesh_axes(struct).values()]
    return bool(varying(struct)) or max(sizes, default=1) > 1


def error_if(x: Array, *checks: tuple[Array, str]) -> Array:
    """`equinox.error_if` for several checks, or NaN on several devices.

    A check is whether something is wrong, and the message; the first wrong one counts.
    The host of a GPU waits for each condition, so there is one for all.
    """
    if not checks:
        return x
    flags = [jnp.any(is_wrong) for is_wrong, _ in checks]
    are_wrong = jnp.stack(vary_as(flags, flags))
    messages = [message for _, message in checks]
    if can_raise(x, are_wrong):
        # Of bools, `argmax` finds the first that is true.
        return eqx.branched_error_if(x, are_wrong, jnp.argmax(are_wrong), messages)
    if any(isinstance(y, Tracer) for y in (x, are_wrong)):
        return nan_if(jnp.any(are_wrong), x)
    # Outside of programs, nobody waits.
    for is_wrong, message in safe_zip(are_wrong.tolist(), messages):
        if is_wrong:
            raise RuntimeError(message)
    return x


def nan_if(is_wrong: Bool[Array, ""], x: Array) -> Array:
    """NaN in place of numbers that are wrong; integers are as they are."""
    return jnp.where(is_wrong, jnp.nan, x) if eqx.is_inexact_array(x) else x
