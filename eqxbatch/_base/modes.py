"""Whether JAX has the derivative of a function in forward mode, and in reverse mode."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .jaxprs import inner_jaxprs


_Statement = tuple[type[Exception], str]


# What JAX says. What has no rule at all, such as a callback, has no derivative at all,
# and is none of these.
_NO_FORWARD: list[_Statement] = [
    (TypeError, r"can't apply forward-mode \w+ \(jvp\) to a custom_vjp function"),
]


_NO_REVERSE: list[_Statement] = [
    (ValueError, r"Reverse-mode differentiation does not work for lax\.while_loop"),
    (NotImplementedError, r"Transpose rule \(for reverse-mode differentiation\) for"),
    (TypeError, r"transpose_solve required for backwards mode"),
]


def without_forward_mode(
    fun: Callable[[list], PyTree], point: list[Array]
) -> str | None:
    """Why a function of arrays has no derivative in forward mode; None if it has."""
    closed = _traced(fun, point)
    if not _has_custom_rules(closed.jaxpr):
        return None
    run = jex.jaxpr_as_fun(closed)
    push = lambda *seeds: jax.jvp(run, tuple(point), seeds)[1]
    # That there is none comes out only when it is vectorised.
    seeds = [jnp.expand_dims(x, 0) for x in point]
    return _stated(lambda: jax.eval_shape(jax.vmap(push), *seeds), _NO_FORWARD)


def without_reverse_mode(
    fun: Callable[[list], PyTree], point: list[Array]
) -> str | None:
    """Why a function of arrays has no derivative in reverse mode; None if it has."""
    run = jex.jaxpr_as_fun(_traced(fun, point))

    def pulled(*point: Array) -> Any:
        outs, pull = jax.vjp(run, *point)
        return pull(outs)

    return _stated(lambda: jax.eval_shape(pulled, *point), _NO_REVERSE)


def _traced(fun: Callable[[list], PyTree], point: list[Array]) -> jex.ClosedJaxpr:
    """A function as its jaxpr: no code runs in it but that of JAX and custom rules."""
    return jax.make_jaxpr(lambda *point: fun([*point]))(*point)


def _has_custom_rules(jaxpr: Any) -> bool:
    """Whether something has a rule that may only be there for one mode."""
    if any(eqn.primitive.name.startswith("custom") for eqn in jaxpr.eqns):
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
