"""Whether JAX can differentiate a function in forward mode and in reverse mode."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .primitives import inner_jaxprs, is_unknown_object, name_of


_Statement = tuple[type[Exception], str]


# Messages of JAX. A function without any rule, such as a callback, has no derivative at
# all and raises another one.
_NO_FORWARD: list[_Statement] = [
    (TypeError, r"can't apply forward-mode \w+ \(jvp\) to a custom_vjp function"),
    (NotImplementedError, r"for jvp support, subclass"),
]


_NO_REVERSE: list[_Statement] = [
    (ValueError, r"Reverse-mode differentiation does not work for lax\.while_loop"),
    (NotImplementedError, r"Transpose rule \(for reverse-mode differentiation\) for"),
    (TypeError, r"transpose_solve required for backwards mode"),
    (NotImplementedError, r"for grad support, subclass"),
]


def without_forward_mode(
    fun: Callable[[list], PyTree], point: list[Array]
) -> str | None:
    """Why a function of arrays has no forward-mode derivative; None if it has one."""
    closed = _traced(fun, point)
    if not _has_custom_rules(closed.jaxpr):
        return None
    run = jex.jaxpr_as_fun(closed)
    push = lambda *seeds: jax.jvp(run, tuple(point), seeds)[1]
    # Some functions fail only if the derivative is vectorised.
    seeds = [jnp.expand_dims(x, 0) for x in point]
    return _stated(lambda: jax.eval_shape(jax.vmap(push), *seeds), _NO_FORWARD)


def without_reverse_mode(
    fun: Callable[[list], PyTree], point: list[Array]
) -> str | None:
    """Why a function of arrays has no reverse-mode derivative; None if it has one."""
    run = jex.jaxpr_as_fun(_traced(fun, point))

    def pulled(*point: Array) -> Any:
        outs, pull = jax.vjp(run, *point)
        return pull(outs)

    return _stated(lambda: jax.eval_shape(pulled, *point), _NO_REVERSE)


def _traced(fun: Callable[[list], PyTree], point: list[Array]) -> jex.ClosedJaxpr:
    """A function as its jaxpr, so that only JAX and custom rules run any code."""
    return jax.make_jaxpr(lambda *point: fun([*point]))(*point)


def _has_custom_rules(jaxpr: Any) -> bool:
    """Whether a jaxpr has a custom rule, which may exist for one mode only."""
    is_custom = lambda eqn: name_of(eqn).startswith("custom") or is_unknown_object(eqn)
    if any(map(is_custom, jaxpr.eqns)):
        return True
    inner = (sub for eqn in jaxpr.eqns for sub in inner_jaxprs(eqn))
    return any(map(_has_custom_rules, inner))


def _stated(ask: Callable[[], Any], statements: list[_Statement]) -> str | None:
    try:
        ask()
    except tuple(kind for kind, _ in statements) as e:
        for kind, words in statements:
            if isinstance(e, kind) and re.match(words, str(e)):
                return str(e)
        raise
    return None
