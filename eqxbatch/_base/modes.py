"""The modes in which JAX can differentiate a function: forward, reverse or both.

A function with a rule for one mode only, such as a `jax.custom_vjp`, a `lax.while_loop`
or an ODE solver, has products with its Jacobian or with the transpose of it, not both.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .backward import custom_backward
from .jaxpr_types import Value
from .jaxprs import equations_in
from .primitives import is_unknown_object, name_of
from .traced_function import TracedFunction
from .versions import Closed


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


# How JAX has products with the Jacobian of a function, and with its transpose: in both
# modes; in reverse mode and its transpose; or in one mode only, so that the Jacobian is
# needed, which reverse mode has by rows and forward mode by columns.
Derivative = Literal["both", "transposed", "rows", "columns"]


def derivative_of(
    name: str, fun: Callable[[list], PyTree], point: list[Array]
) -> Derivative:
    """How JAX can differentiate a function of arrays.

    Raises `TypeError`, with the `name` of the function, if it has neither mode.
    """
    no_reverse, no_forward = (
        ask(fun, point) for ask in (without_reverse_mode, without_forward_mode)
    )
    if no_forward is None:
        return "both" if no_reverse is None else "columns"
    if no_reverse is not None:
        raise TypeError(
            f"JAX can differentiate {name} neither in forward nor in reverse mode, but "
            "one of them is needed. Replace a `jax.custom_vjp` by a `jax.custom_jvp`, "
            "or a `lax.while_loop` by a `lax.scan`; give an ODE solver another "
            "adjoint, such as `diffrax.DirectAdjoint()`. (Forward mode: "
            f"{no_forward} Reverse mode: {no_reverse})"
        )
    closed = _traced(fun, point)
    if not custom_backward(closed, [False for _ in closed.jaxpr.invars]).is_linear:
        # What is not linear has no transpose, even if JAX finds one: that of a function
        # that adds a constant leaves it out.
        return "rows"
    no_transpose = without_reverse_mode(fun, point, is_transposed=True)
    return "transposed" if no_transpose is None else "rows"


def derivative_of_program(name: str, program: TracedFunction) -> Derivative:
    """How JAX can differentiate a program of one example in its leaves."""

    def ask(rows: list[Value]) -> Derivative:
        run = lambda leaves: program.one(leaves, rows)
        return derivative_of(name, run, program.leaves)

    return program.at_example(ask)


class Pushforward(NamedTuple):
    """The values of a function at a point, and its forward-mode derivative there."""

    outs: list[Array]
    push: Callable[[list[Array]], list[Array]]


def pushforward(
    fun: Callable[[list], list], point: list[Array], derivative: Derivative
) -> Pushforward:
    """The values of a function, and its forward-mode derivative."""
    if derivative != "transposed":
        return Pushforward(*jax.linearize(fun, point))
    outs, pull = jax.vjp(fun, point)
    transpose = jax.linear_transpose(lambda outs: pull(outs)[0], outs)
    return Pushforward(outs, lambda seeds: transpose(seeds)[0])


def pushed(
    fun: Callable[[list], list],
    point: list[Array],
    tangents: list[Array],
    derivative: Derivative,
) -> list:
    """The product of the Jacobian with one vector.

    It needs no linear function that can be run again.
    """
    if derivative == "transposed":
        return pushforward(fun, point, derivative).push(tangents)
    return jax.jvp(fun, (point,), (tangents,))[1]


def without_forward_mode(
    fun: Callable[[list], PyTree], point: list[Array]
) -> str | None:
    """Why a function of arrays has no forward-mode derivative; None if it has one."""
    closed = _traced(fun, point)
    # Rules that may be for reverse mode only.
    is_one = lambda eqn: name_of(eqn).startswith("custom_vjp") or is_unknown_object(eqn)
    if not any(map(is_one, equations_in(closed))):
        return None
    run = jex.jaxpr_as_fun(closed)
    push = lambda *seeds: jax.jvp(run, tuple(point), seeds)[1]
    # Some functions fail only if the derivative is vectorised.
    seeds = [jnp.expand_dims(x, 0) for x in point]
    return _stated(lambda: jax.eval_shape(jax.vmap(push), *seeds), _NO_FORWARD)


def without_reverse_mode(
    fun: Callable[[list], PyTree], point: list[Array], *, is_transposed: bool = False
) -> str | None:
    """Why a function of arrays has no reverse-mode derivative; None if it has one.

    With `is_transposed`, this is about the transpose of this derivative.
    """
    run = jex.jaxpr_as_fun(_traced(fun, point))

    def pulled(*point: Array) -> Any:
        outs, pull = jax.vjp(run, *point)
        return jax.linear_transpose(pull, outs)(point) if is_transposed else pull(outs)

    return _stated(lambda: jax.eval_shape(pulled, *point), _NO_REVERSE)


def _traced(fun: Callable[[list], PyTree], point: list[Array]) -> Closed:
    """A function as its jaxpr, so that only JAX and custom rules run any code."""
    return jax.make_jaxpr(lambda *point: fun([*point]))(*point)


def _stated(ask: Callable[[], Any], statements: list[_Statement]) -> str | None:
    try:
        ask()
    except tuple(kind for kind, _ in statements) as e:
        for kind, words in statements:
            if isinstance(e, kind) and re.match(words, str(e)):
                return str(e)
        raise
    return None
