"""The guard sees what differs between two programs, and its table is current."""

import os
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .guard.programs import digest, lines_of, noted, noting_programs, Totals


TABLE = pathlib.Path(__file__).parent / "guard" / "table.txt"
X = jnp.ones((3, 3))


def program(x, y):
    total = jnp.dot(x, y) + x
    step = lambda c, row: (c * row[None], None)
    return lax.scan(step, total, y, length=3)[0] - jnp.sin(y)


def renamed(first, second):
    @jax.jit
    def inner(other):
        return jnp.sin(other)

    added = jnp.dot(first, second) + first
    times = lambda state, entry: (state * entry[None], None)
    return lax.scan(times, added, second, length=3)[0] - inner(second)


def named_otherwise(first, second):
    @jax.jit
    def another_name(other):
        return jnp.sin(other)

    added = jnp.dot(first, second) + first
    times = lambda state, entry: (state * entry[None], None)
    return lax.scan(times, added, second, length=3)[0] - another_name(second)


def traced(fun, *args):
    totals = Totals()
    return [*lines_of(jax.make_jaxpr(fun)(*args or (X, X)), totals)], totals


def scanned(fun, **settings):
    return lambda x, y: lax.scan(
        lambda c, r: (fun(c, r[None]), None), x, y, **settings
    )[0]


def test_names_do_not_matter():
    # Only one of these has a function in `jax.jit`.
    assert traced(renamed) == traced(named_otherwise) != traced(program)


@pytest.mark.parametrize(
    ("first", "second"),
    (
        (lambda x, y: x + y, lambda x, y: x - y),
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: x @ y, lambda x, y: jnp.matmul(x, y, precision="highest")),
        (lambda x, y: x @ y, lambda x, y: jnp.einsum("ij,kj", x, y)),
        (lambda x, y: x * 2.0, lambda x, y: x * 3.0),
        (lambda x, y: x[0], lambda x, y: x[1]),
        (scanned(lambda c, r: c * r), scanned(lambda c, r: c + r)),
        (scanned(lambda c, r: c * r), scanned(lambda c, r: c * r, reverse=True)),
        (
            lambda x, y: (jnp.sin(x), jnp.sin(y), jnp.cos(x)),
            lambda x, y: (jnp.sin(x), jnp.sin(y), jnp.cos(y)),
        ),
        (lambda x, y: (jnp.sin(x), jnp.cos(y)), lambda x, y: (jnp.cos(y), jnp.sin(x))),
    ),
    ids=range(10),
)
def test_other_programs_have_other_digests(first, second):
    first, second = traced(first)[0], traced(second)[0]
    assert digest(first) != digest(second)


def test_constants_are_compared():
    def digest_of(value):
        held = jax.device_put(np.full(3, value, np.float32))
        return digest(traced(lambda x: x @ held, X)[0])

    assert digest_of(1.0) == digest_of(1.0) != digest_of(2.0)


def test_totals():
    conv = lambda x, y: lax.conv(x[None, None], y[None, None, :2, :2], (1, 1), "VALID")
    looped = lambda x, y: lax.scan(lambda c, _: (c @ y, None), x, length=4)[0]
    fun = lambda x, y: (conv(x, y), looped(x, y), jnp.tile(x, (2, 5)))
    _, totals = traced(fun)
    assert totals.flops == 2 * 4 * 4 + 4 * 2 * 27
    assert totals.largest == 4 * 2 * 5 * 9


def test_programs_of_a_loop_in_python_are_noted():
    with noting_programs():
        double = jax.jit(lambda x: 2 * x)

    def loop():
        for x in (X, X + 1, X[0], X):
            double(x)

    # Once for each shape, and not for those that other programs call.
    assert [p.jaxpr.outvars[0].aval.shape for p in noted(loop)] == [(3, 3), (3,)]
    assert noted(loop) == []
    assert noted(lambda: jax.make_jaxpr(double)(X[0, 0])) == []


def is_of_other_versions():
    found = (f"{x.__name__} {x.__version__}" for x in (jax, eqx))
    return f"Traced with {', '.join(found)}." != TABLE.read_text().splitlines()[0]


# For whoever changes the structure: an upgrade of a dependency may change programs,
# too, and in one run of dozens, the program of one call had two equations less.
@pytest.mark.matrix
@pytest.mark.skipif(is_of_other_versions(), reason="the table is of other versions")
def test_programs_of_many_calls():
    root = TABLE.parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.guard"],
        cwd=root,
        env={**os.environ, "EQXBATCH_JAX_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    message = "Run `python -m tests.guard --against HEAD` for the differences"
    assert done.stdout.splitlines() == TABLE.read_text().splitlines(), message
