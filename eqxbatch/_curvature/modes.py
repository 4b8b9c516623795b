"""Whether JAX can differentiate a function in forward mode, and in reverse mode.

JAX has no way to ask but to differentiate, and says in an exception that it cannot. So
a function is traced first, by itself, and what is differentiated here is the program
that comes out: nothing runs where exceptions are caught but JAX, and what it says is
known by its words. All other exceptions, such as those of custom rules, go through.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, PyTree


_Statement = tuple[type[Exception], str]


# What has no rule at all, such
# as a callback, has a derivative in neither mode, and is none of these.
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
    run = _traced(fun, point)
    push = lambda *seeds: jax.jvp(run, tuple(point), seeds)[1]
    # That there is none comes out only when it is vectorised.
    seeds = [jnp.expand_dims(x, 0) for x in point]
    return _stated(lambda: jax.eval_shape(jax.vmap(push), *seeds), _NO_FORWARD)


def without_reverse_mode(
    fun: Callable[[list], PyTree], point: list[Array]
) -> str | None:
    """Why a function of arrays has no derivative in reverse mode; None if it has."""
    run = _traced(fun, point)

    def pulled(*point: Array) -> Any:
        outs, pull = jax.vjp(run, *point)
        return pull(outs)

    return _stated(lambda: jax.eval_shape(pulled, *point), _NO_REVERSE)


def _traced(fun: Callable[[list], PyTree], point: list[Array]) -> Callable[..., list]:
    """A function as its jaxpr: no code runs in it but that of JAX and custom rules."""
    closed = jax.make_jaxpr(lambda *point: fun([*point]))(*point)
    return jex.jaxpr_as_fun(closed)


def _stated(ask: Callable[[], Any], statements: list[_Statement]) -> str | None:
    try:
        ask()
    except tuple(kind for kind, _ in statements) as e:
        for kind, words in statements:
            if isinstance(e, kind) and re.match(words, str(e)):
                return str(e)
        raise
    return None
