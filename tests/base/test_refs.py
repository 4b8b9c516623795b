"""Programs with mutable arrays, whose value passes from equation to equation."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch._base.refs import without_refs


def indexed(x, i):
    ref = jax.new_ref(jnp.zeros((3, 4)))
    ref[...] = x
    ref[0, 1:3] = jnp.full(2, 5.0)
    ref[i] = 2 * ref[1]
    ref[:, i] += jnp.sin(ref[:, 2])
    ref[jnp.array([0, 1]), jnp.array([1, 1])] = x[:2, 0]
    ref[0:3:2, 1:4:2] = ref[0:3:2, 1:4:2] ** 2
    ref[2:2] = ref[1:1]
    return ref[...]


def in_loops(x, i):
    ref, total = jax.new_ref(x), jax.new_ref(jnp.zeros(()))

    def step(carry, row):
        inner = jax.new_ref(row)
        inner[0] = carry * inner[i]
        total[...] += inner[0]
        ref[i, 0] = jnp.cos(carry)
        return inner[0], inner[...]

    first, rows = lax.scan(step, x[0, 0], ref[...])
    lax.fori_loop(
        0, 2, lambda k, _: ref.__setitem__((k, i), total[...] / (k + 1)), None
    )
    _, others = lax.scan(step, first, ref[...], reverse=True)
    return rows.sum() + 2 * others.sum() + ref[...].sum()


def in_branches(x, i):
    ref, total = jax.new_ref(x), jax.new_ref(x[0, 0])

    @jax.jit
    def double():
        ref[...] = 2 * ref[...]

    def add():
        total[...] += ref[i, 1]
        return total[...]

    double()
    value = lax.cond(x[0, 0] > 0, add, lambda: jnp.zeros(()))
    last = lax.while_loop(lambda k: k < i, lambda k: (double(), k + 1)[1], 0)
    return value * total[...] + ref[...].sum() * last


def rematerialised(x, i):
    total = jax.new_ref(jnp.zeros(()))

    @jax.checkpoint
    def run(x):
        ref = jax.new_ref(x)
        ref[1] = jnp.sin(ref[1])
        total[...] += ref[...].sum()
        return ref[...]

    return run(x) * total[...] * i.astype("float32")


@pytest.mark.versions
@pytest.mark.parametrize("fun", (indexed, in_loops, in_branches, rematerialised))
def test_equals_what_jax_runs_and_has_its_derivative(fun):
    x = jnp.asarray(np.linspace(0.3, 1.2, 12, dtype="float32").reshape(3, 4))
    direction = jnp.cos(x * 20)
    closed = without_refs(jax.make_jaxpr(fun)(x, jnp.int32(1)))
    assert not closed.effects
    run = lambda x: jex.jaxpr_as_fun(closed)(x, jnp.int32(1))[0]
    values, product = jax.jvp(jax.jit(run), (x,), (direction,))
    program = jax.jit(fun)
    np.testing.assert_allclose(values, program(x, jnp.int32(1)), rtol=1e-5)
    sides = (program(x + s * direction, jnp.int32(1)) for s in (1e-2, -1e-2))
    difference = (np.asarray(next(sides)) - np.asarray(next(sides))) / 2e-2
    np.testing.assert_allclose(product, difference, rtol=5e-3, atol=5e-3)


def test_programs_without_refs_stay():
    closed = jax.make_jaxpr(jnp.sin)(jnp.ones(2))
    assert without_refs(closed) is closed


def test_reads_a_ref_from_outside():
    outside = jax.new_ref(jnp.ones(2))
    closed = without_refs(jax.make_jaxpr(lambda x: x + outside[...])(jnp.ones(2)))
    assert not closed.effects
    np.testing.assert_array_equal(jex.jaxpr_as_fun(closed)(jnp.ones(2))[0], [2, 2])


def with_a_rule(rule):
    @rule
    def fun(x):
        ref = jax.new_ref(x)
        return ref[...]

    if rule is jax.custom_jvp:
        fun.defjvp(lambda x, t: (fun(*x), t[0]))
    else:
        fun.defvjp(lambda x: (fun(x), None), lambda _, c: (c,))
    return fun


def writes_outside(outside, x):
    outside[...] += 1.0
    return x


def test_refuses_what_it_does_not_know():
    outside = jax.new_ref(jnp.ones(2))
    closed = jax.make_jaxpr(lambda x: writes_outside(outside, x))(jnp.ones(2))
    with pytest.raises(ValueError, match="that was made outside of it"):
        without_refs(closed)
    for rule, name in ((jax.custom_jvp, "jvp"), (jax.custom_vjp, "vjp")):
        closed = jax.make_jaxpr(with_a_rule(rule))(jnp.ones(2))
        with pytest.raises(ValueError, match=f"used in `custom_{name}_call`"):
            without_refs(closed)
