"""Equations that a program has twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch._base.jaxprs import equations_in, primitive_names, run_jaxpr
from eqxbatch._base.repeats import without_repeats


ONES = np.ones(3, np.float32)


def count(closed, name):
    return sum(eqn.primitive.name == name for eqn in equations_in(closed))


def second(w, x):
    first = lambda x: jax.jvp(lambda x: jax.nn.silu(w * x), (x,), (ONES,))[1]
    return jax.jvp(first, (x,), (ONES,))[1]


def called(w, x):
    return jax.jit(jnp.sin)(w) + jax.jit(jnp.sin)(w) * x


def twice(x):
    return jnp.sin(x) * jnp.sin(x)


def in_scan(w, x):
    return lax.scan(lambda c, y: (c + twice(w * y), y), x, jnp.stack([x, 2 * x]))[0]


def remat(w, x):
    return jax.checkpoint(twice)(w) + jax.checkpoint(twice)(x)


def of_rule(w, x):
    """Values that are equal, with other derivatives."""
    rule = jax.custom_jvp(jnp.sin)
    rule.defjvp(lambda x, t: (jnp.sin(*x), 2 * t[0]))
    return rule(w) + jnp.sin(w) * x


@pytest.mark.parametrize(
    ("fun", "name", "num"),
    (
        (called, "sin", 1),
        (in_scan, "sin", 1),
        (second, "logistic", 1),
        (lambda w, x: jnp.sin(w) + jnp.sin(w * 1) + lax.sin(w + 0), "sin", 3),
        (lambda w, x: w[:2] + w[1:], "slice", 2),
        # Numbers that look the same when they are printed.
        (lambda w, x: w * np.float32(1 / 3) + w * np.float32(0.33333334), "mul", 1),
        (lambda w, x: w * np.float32(1 / 3) + w * np.float32(0.3333333), "mul", 2),
        (lambda w, x: w * 2.0 + w * 3.0 + w * 2.0, "mul", 2),
    ),
)
def test_counts(fun, name, num):
    closed = jax.make_jaxpr(fun)(ONES, ONES)
    merged = without_repeats(closed, 1)
    assert count(merged, name) == num
    x = np.asarray([0.5, -1.0, 2.0], np.float32)
    run = lambda closed: run_jaxpr(closed.jaxpr, closed.consts, [x, x + 1])
    np.testing.assert_allclose(run(merged), run(closed), rtol=1e-6)


def effectful(w, x):
    jax.debug.print("{}", w)
    return jnp.sin(w) + jnp.sin(w)


@pytest.mark.parametrize(
    "fun",
    (
        # Only what depends on the first inputs counts.
        lambda w, x: w + jnp.sin(x) + jnp.sin(x),
        lambda w, x: w * x,
        effectful,
        of_rule,
    ),
)
def test_programs_without_repeats_stay(fun):
    closed = jax.make_jaxpr(fun)(ONES, ONES)
    assert without_repeats(closed, 1) is closed


def test_calls_keep_their_promises():
    closed = jax.make_jaxpr(lambda w, x: remat(w, x) + twice(w))(ONES, ONES)
    names = primitive_names(without_repeats(closed, 1))
    assert names & {"checkpoint", "remat2", "remat"}


def test_derivatives_of_rules():
    both = lambda w, x: of_rule(w, x) + twice(w)
    closed = jax.make_jaxpr(both)(ONES, ONES)
    merged = without_repeats(closed, 1)
    assert merged is not closed

    def gradient(closed):
        run = lambda w: jnp.sum(run_jaxpr(closed.jaxpr, closed.consts, [w, ONES])[0])
        return jax.grad(run)(ONES)

    np.testing.assert_allclose(gradient(merged), gradient(closed), rtol=1e-6)


@functools.partial(jax.jit, inline=False)
def layer(w, x):
    return jnp.tanh(w * x)


def test_one_program_called_for_other_inputs():
    """The variables of both calls are the same."""
    fun = lambda w, x: layer(w, layer(w, x)) + layer(w, x)
    closed = jax.make_jaxpr(fun)(ONES, ONES)
    merged = without_repeats(closed, 1)
    assert count(merged, "tanh") == 2
    expected = fun(ONES, 2 * ONES)
    got = run_jaxpr(merged.jaxpr, merged.consts, [ONES, 2 * ONES])[0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
