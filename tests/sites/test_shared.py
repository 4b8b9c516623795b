"""What of parameters alone is elementwise, and what is differentiated at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch import explain_sites, filter_hessian, filter_hessian_diagonal
from ..layers import Case, vectors, weight
from .adapter import Sites
from .oracle import compare


pytestmark = pytest.mark.usefixtures("x64")


def rule_of(derivative):
    """A function with a derivative of its own."""

    @jax.custom_jvp
    def fun(w):
        return jnp.sin(w)

    @fun.defjvp
    def _jvp(primals, tangents):
        return fun(*primals), derivative(*primals, *tangents)

    return fun


# Of each, whether the derivative of an entry is one of this entry alone.
RULES = {
    "plain": (lambda w, t: 2 * t * jnp.cos(w), True),
    "calls_itself": (lambda w, t: t * jnp.where(w > 0, jnp.cos(w), jnp.exp(w)), True),
    "constants": (lambda w, t: t * jnp.arange(4.0)[None] * jnp.ones((4, 1)), False),
    "clipped_by_its_norm": (lambda w, t: t / jnp.linalg.norm(w), False),
    "mean": (lambda w, t: t - jnp.mean(t), False),
    "reversed": (lambda w, t: t[::-1], False),
    "sorted_slopes": (lambda w, t: t * jnp.sort(w), False),
}


@pytest.mark.flags
@pytest.mark.parametrize("name", RULES)
def test_custom_rules_are_elementwise_as_their_derivative_is(name):
    derivative, is_elementwise = RULES[name]
    fun = rule_of(derivative)
    loss = lambda w, x: fun(w) @ x
    program, _ = compare(Case(weight(4, 4), loss, vectors(4)))
    assert not program.fallbacks
    assert [place.has_named_axes for place in program.places] == [is_elementwise]


@pytest.mark.flags
def test_custom_rule_whose_second_derivative_is_not_elementwise():
    inner = rule_of(lambda w, t: t - jnp.mean(t))
    fun = rule_of(lambda w, t: t * inner(w))
    w, x = weight(4), jnp.arange(12.0).reshape(3, 4) / 7
    # With equal cotangents, the second derivatives of this rule are symmetric.
    loss = lambda w, x: jnp.sum(fun(w)) * jnp.sum(jnp.sin(x))
    mean = lambda w: jnp.mean(jax.vmap(loss, (None, 0))(w, x))
    truth = jax.jit(jax.hessian(mean))(w)
    settings = {"in_axes": 0, "flat": True}
    for method in ("sites", "auto"):
        hessian, _ = filter_hessian(loss, method=method, **settings)(w, x)
        np.testing.assert_allclose(hessian, truth, rtol=1e-10, atol=1e-12)
        diagonal, _ = filter_hessian_diagonal(loss, method=method, **settings)(w, x)
        np.testing.assert_allclose(diagonal, np.diag(truth), rtol=1e-10, atol=1e-12)


def program_of(fun, *ws, num_outputs=None):
    run = lambda ws, rows: fun(*ws, *rows)
    return Sites.of(run, ws, [jnp.ones(4)], num_outputs=num_outputs)


def test_sites_are_of_what_is_differentiated():
    def fun(w, x):
        hidden = jnp.tanh(w[0] @ x)
        seen = lax.stop_gradient(w[1] @ x) + jnp.round(w[2] @ x)
        counted = (w[3] @ x > 0).astype(x.dtype)
        carry, _ = lax.scan(
            lambda c, _: ((c[0] + seen, c[1] * 2), None), (hidden, w[4] @ x), length=2
        )
        return jnp.sum(carry[0] * counted), {"penalty": jnp.sum(w[5] ** 2), "all": w[6]}

    ws = [weight(4, 4) for _ in range(7)]
    program = program_of(lambda *args: fun(args[:-1], args[-1]), *ws, num_outputs=1)
    assert {place.leaf for place in program.places} == {0}
    assert not program.fallbacks
    report = explain_sites(lambda w, x: fun(w, x)[0], ws, jnp.ones(4), in_axes=None)
    contractions = [leaf.contraction for leaf in report.leaves]
    assert contractions == ["factors", *["none"] * 6]


def test_too_many_ways_to_a_parameter():
    def fun(w, x):
        for _ in range(5):
            w = w @ w
        return w @ x

    program, _ = compare(Case(weight(4, 4) / 4, fun, vectors(4)))
    assert "makes too much of a parameter" in program.fallbacks[0]


def test_slopes_add_up():
    # Several ways through functions of each entry are one view.
    fun = lambda w, x: (w * jnp.exp(w) + jnp.sin(w) * w**2 - w / (1 + w**2)) @ x
    program, comparable = compare(Case(weight(4, 4), fun, vectors(4)))
    assert comparable == [True]
    assert len(program.places) == 1
