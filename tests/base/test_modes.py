"""Which modes JAX has for a function: only the text of its exceptions tells."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqxbatch._base.modes import (
    derivative_of,
    without_forward_mode,
    without_reverse_mode,
)
from ..helpers import forwards_only, rows_only


pytestmark = [pytest.mark.versions, pytest.mark.flags]


@jax.custom_vjp
def in_reverse(x):
    return jnp.sin(x)


in_reverse.defvjp(lambda x: (jnp.sin(x), x), lambda x, d: (d * jnp.cos(x),))


@jax.custom_jvp
def pushed_only(x):
    return jnp.sin(x)


def _pushed_by_loop(primals, tangents):
    loop = lambda t: lax.while_loop(lambda t: jnp.sum(t) > 9, lambda t: t / 2, t)
    return pushed_only(*primals), loop(*tangents)


pushed_only.defjvp(_pushed_by_loop)


def solved(x):
    matvec = lambda y: 2 * y
    return lax.custom_linear_solve(matvec, x, lambda _, b: b / 2)


def looped(x):
    return lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: 2 * y + 1, x)


WAYS = (
    (jnp.sin, "both"),
    (forwards_only, "columns"),
    (solved, "columns"),
    (in_reverse, "transposed"),
    (rows_only, "rows"),
)


# If JAX words an exception differently, one of these raises it. `_NO_FORWARD` and
# `_NO_REVERSE` then need its words, too.


@pytest.mark.parametrize("fun", (jnp.sin, in_reverse))
def test_forward_mode(fun):
    reason = without_forward_mode(lambda ins: fun(*ins), [jnp.ones(3)])
    if fun is in_reverse:
        assert reason is not None
        assert "custom_vjp" in reason
    else:
        assert reason is None


@pytest.mark.parametrize("fun", (jnp.sin, in_reverse, looped, pushed_only, solved))
def test_reverse_mode(fun):
    reason = without_reverse_mode(lambda ins: fun(*ins), [jnp.ones(3)])
    assert (reason is None) == (fun in (jnp.sin, in_reverse))


@pytest.mark.parametrize(("fun", "way"), WAYS)
def test_how_a_function_is_differentiated(fun, way):
    assert derivative_of("`fun`", lambda ins: fun(*ins), [jnp.ones(3)]) == way


def test_functions_with_neither_mode():
    fun = lambda ins: looped(in_reverse(*ins))
    with pytest.raises(TypeError, match="neither in forward nor in reverse mode"):
        derivative_of("`fun`", fun, [jnp.ones(3)])
