"""The precision of products, which GPUs and TPUs round by default."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from .primitives import equations_in, parameters


_PRECISIONS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


# The setting in one of the contexts below, and that of the user around all of them.
_INSIDE: contextvars.ContextVar[tuple[str, str | None] | None]
_INSIDE = contextvars.ContextVar("inside", default=None)


def _setting() -> str | None:
    return getattr(jax.config, "jax_default_matmul_precision", None)


def user_precision() -> str | None:
    """The user's `jax.default_matmul_precision`, in the contexts below as outside."""
    inside, now = _INSIDE.get(), _setting()
    # A function of the user may set it again in one of them.
    return inside[1] if inside is not None and inside[0] == now else now


def exact_products() -> contextlib.AbstractContextManager:
    """A context in which products of float32 arrays keep their digits.

    On GPUs and TPUs, JAX rounds the factors of products to 10 or 7 bits by default.
    This is for results that are judged to more digits. The user's own context
    `jax.default_matmul_precision` has the last word.
    """
    is_chosen = user_precision() is not None
    return contextlib.nullcontext() if is_chosen else _with_precision("highest")


def products_of(*programs: Any) -> contextlib.AbstractContextManager:
    """A context in which products have the precision that closed jaxprs ask for.

    If they ask for several, it is the highest. Without it, a contraction that stands
    for a derivative of `jnp.dot(x, y, precision="highest")` would be rounded on GPUs
    and TPUs. Programs that ask for none leave JAX's own setting. `exact_products`
    around it is not lowered.
    """
    inside = _INSIDE.get()
    is_exact = inside is not None and inside[0] == _setting() == "highest"
    named = {x for closed in programs for x in _precisions(closed)}
    if is_exact or not named:
        return contextlib.nullcontext()
    if len(named) == 1:
        (one,) = named
        is_preset = isinstance(one, lax.DotAlgorithmPreset)
        name = one.name if is_preset else _name(one)
    else:
        name = max(map(_name, named), key=_NAMES.index)
    return _with_precision(name)


_NAMES = [x.name.lower() for x in _PRECISIONS]


def _name(precision: Any) -> str:
    """The name of a precision; "highest" for what has no order among them."""
    return precision.name.lower() if precision in _PRECISIONS else "highest"


def _precisions(closed: Any) -> Iterator[Any]:
    """The precisions that the equations of a program name."""
    for eqn in equations_in(closed):
        precision = parameters(eqn).get("precision")
        # One for each factor; an algorithm is a tuple, too.
        is_pair = type(precision) is tuple
        yield from (x for x in (precision if is_pair else [precision]) if x is not None)


@contextlib.contextmanager
def _with_precision(name: str) -> Iterator[None]:
    token = _INSIDE.set((name, user_precision()))
    try:
        with jax.default_matmul_precision(name):
            yield
    finally:
        _INSIDE.reset(token)
