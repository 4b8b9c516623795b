"""Derivatives through the loops, and what they keep in memory."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from eqxbatch import (
    Concat,
    filter_micro_vmap,
    filter_microbatch,
    LogSumExp,
    Max,
    Mean,
    Sum,
    Variance,
)
from ..helpers import assert_same, bent, BLOCK, memory, normal, spread, thinned


REDUCE = {
    "concat": (Concat(), lambda y: y),
    "sum": (Sum(), lambda y: y.sum(0)),
    "mean": (Mean(), lambda y: y.mean(0)),
    "running_mean": (Mean(running=True), lambda y: y.mean(0)),
    "max": (Max(), lambda y: y.max(0)),
    "logsumexp": (LogSumExp(), lambda y: jax.nn.logsumexp(y, 0)),
    "variance": (Variance(), lambda y: (y.mean(0), y.var(0))),
}


def losses(name, total, getkey, dtype=jnp.float32, **kwargs):
    """A loss of a model and data in microbatches, and the dense one."""
    accumulator, reduce = REDUCE[name]
    model = bent(3, 2, getkey())
    x, y = (normal(getkey(), shape, dtype) for shape in ((3, total), (total,)))

    def fun(model, x, y):
        return model(x) * y

    micro = filter_micro_vmap(
        fun,
        in_axes=(None, 1, 0),
        microbatch_size=BLOCK,
        accumulator=accumulator,
        **kwargs,
    )
    dense = jax.vmap(fun, in_axes=(None, 1, 0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def blocked_loss(arrays, x, y):
        out = micro(eqx.combine(arrays, static), x, y)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out))

    def dense_loss(arrays, x, y):
        out = reduce(dense(eqx.combine(arrays, static), x, y))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out))

    return blocked_loss, dense_loss, (arrays, x, y)


@pytest.mark.parametrize("derivative", (jax.grad, jax.jacfwd))
def test_derivative_of_no_examples(derivative):
    mapped = lambda x: filter_micro_vmap(jnp.sin, microbatch_size=2)(x).sum()
    whole = lambda x: filter_microbatch(jnp.sin, accumulator=Sum(), microbatch_size=2)(
        x
    ).sum()
    both = jax.jit(lambda x: [derivative(fun)(x) for fun in (mapped, whole)])
    assert_same(both(jnp.zeros(0)), [jnp.zeros(0)] * 2)


@pytest.mark.parametrize(
    ("name", "total", "checkpoint"),
    (
        *thinned(("concat", "mean", "max", "variance"), (1, 5, 13), (True, False)),
        *(
            pytest.param(name, total, total == 5, marks=pytest.mark.matrix)
            for name in ("sum", "running_mean", "logsumexp")
            for total in (5, 13)
        ),
    ),
)
@pytest.mark.usefixtures("x64")
def test_reverse_and_forward_mode(name, total, checkpoint, getkey):
    *both, args = losses(name, total, getkey, jnp.float64, checkpoint=checkpoint)
    tangents = jax.tree.map(lambda x: normal(getkey(), x.shape, x.dtype), args)

    @jax.jit
    def derivatives(args, tangents):
        return [
            (jax.grad(f, argnums=(0, 1, 2))(*args), jax.jvp(f, args, tangents))
            for f in both
        ]

    got, expected = derivatives(args, tangents)
    assert_same(got, expected, tol=1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ("concat", "mean"))
def test_second_derivatives(name, getkey):
    blocked, dense, (arrays, x, y) = losses(name, 9, getkey)
    run = lambda loss: jax.jit(jax.hessian(loss, argnums=2))(arrays, x, y)
    assert_same(run(blocked), run(dense), tol=1e-3)
    mixed = lambda loss: jax.jacrev(jax.grad(loss, argnums=2), argnums=1)
    both = jax.jit(lambda *args: (mixed(blocked)(*args), mixed(dense)(*args)))
    assert_same(*both(arrays, x, y), tol=1e-3)


def test_under_vmap_of_grad_and_grad_of_vmap(getkey):
    x, w = normal(getkey(), (9, 2)), normal(getkey(), (3, 2))
    micro = lambda w: filter_micro_vmap(
        lambda x: jnp.sin(x * w), microbatch_size=BLOCK
    )(x)
    dense = lambda w: jnp.sin(x * w[None])
    loss = lambda f: lambda w: jnp.sum(f(w) ** 2)
    total_loss = lambda f: lambda w: jax.vmap(loss(f))(w).sum()

    def derivatives(f):
        each = jax.vmap(jax.grad(loss(f)))(w)
        total = jax.grad(total_loss(f))(w)
        return each, total, jax.jacfwd(f)(w[0]), jax.jacrev(f)(w[0])

    got, expected = jax.jit(lambda: (derivatives(micro), derivatives(dense)))()
    assert_same(got, expected, 1e-4)


def test_only_what_is_differentiated_has_a_gradient(getkey):
    # Integers, keys and what is closed over by stop_gradient pass through.
    x, i = normal(getkey(), (9,)), jnp.arange(9)
    keys = jax.random.split(getkey(), 9)

    def fun(x, i, key):
        return x * i.astype(x.dtype) + jax.random.normal(key, ()), i, key

    def loss(x):
        y, i_out, keys_out = filter_micro_vmap(fun, microbatch_size=4)(x, i, keys)
        assert i_out.dtype == i.dtype
        assert keys_out.dtype == keys.dtype
        return y.sum()

    expected = np.arange(9, dtype=np.float32)
    assert_same(jax.grad(loss)(x), expected)
    assert_same(jax.jit(jax.grad(loss))(x), expected)


@pytest.mark.flags
def test_custom_rules_are_kept(getkey):
    x = np.array(normal(getkey(), (9,)))
    x[0] = 0
    x = jnp.asarray(x)

    @jax.custom_vjp
    def f(x):
        return 2 * x

    f.defvjp(lambda x: (2 * x, None), lambda _, ct: (100 * ct,))
    micro = filter_micro_vmap(f, microbatch_size=4)
    assert_same(jax.grad(lambda x: micro(x).sum())(x), jnp.full(9, 100.0))
    # Second derivative of relu, and its first at 0.
    micro = filter_micro_vmap(jax.nn.relu, microbatch_size=4)
    total = lambda x: micro(x).sum()
    first, second = jax.jit(lambda x: (jax.grad(total)(x), jax.hessian(total)(x)))(x)
    assert_same(first, (np.asarray(x) > 0).astype(np.float32))
    assert_same(second, np.zeros((9, 9), np.float32))


def test_complex(getkey):
    x = normal(getkey(), (9,), jnp.complex64)
    micro = filter_micro_vmap(lambda x: x**2, microbatch_size=4)
    loss = lambda f: lambda x: jnp.sum(jnp.abs(f(x)) ** 2)
    both = jax.jit(lambda x: [jax.grad(loss(f))(x) for f in (micro, lambda x: x**2)])
    assert_same(*both(x), tol=1e-4)


def test_gradient_through_microbatch(getkey):
    x, w = normal(getkey(), (13, 3)), normal(getkey(), (3,))
    fun = lambda w, x: (jnp.mean((x @ w) ** 2), x @ w)
    micro = filter_microbatch(
        fun, in_axes=(None, 0), microbatch_size=4, accumulator=(Mean(), Concat())
    )
    loss = lambda f: lambda w, x: f(w, x)[0] ** 2 + jnp.sum(f(w, x)[1] ** 3)
    grads = lambda w, x: [jax.grad(loss(f), argnums=(0, 1))(w, x) for f in (micro, fun)]
    assert_same(*jax.jit(grads)(w, x), tol=1e-4)


# Memory


DEPTH, WIDTH, SIZE = 6, 64, 32

# The loop over microbatches has a rule for its derivative.
LOST = pytest.mark.xfail(
    getattr(jax.config, "jax_remat3", False),
    reason="with `jax_remat3`, JAX forgets checkpoints in rules of `jax.custom_jvp`",
)


def deep(w, x):
    for _ in range(DEPTH):
        x = jnp.tanh(w @ x)
    return x


def gradient_memory(total, accumulator, **kwargs):
    micro = filter_micro_vmap(
        deep,
        in_axes=(None, 0),
        microbatch_size=SIZE,
        accumulator=accumulator,
        **kwargs,
    )
    loss = lambda w, x: jnp.sum(micro(w, x) ** 2)
    w, x = jnp.zeros((WIDTH, WIDTH)), jnp.zeros((total, WIDTH))
    return memory(jax.grad(loss), w, x).temp_size_in_bytes


@pytest.mark.cpu
@LOST
@pytest.mark.flags
def test_checkpoint_keeps_one_microbatch_of_activations():
    small, large = (
        gradient_memory(n, Sum(), checkpoint=True) for n in (4 * SIZE, 64 * SIZE)
    )
    # Nothing but the inputs, which are arguments, is kept for each microbatch.
    assert large <= small + 1024
    activations = 4 * SIZE * WIDTH * (DEPTH + 1)
    weights = 4 * WIDTH * WIDTH
    assert large < 3 * activations + 4 * weights
    # Without, it is all activations of all microbatches.
    assert gradient_memory(64 * SIZE, Sum()) > 60 * activations


@pytest.mark.cpu
@pytest.mark.parametrize("total", (64 * SIZE, 64 * SIZE + 5))
def test_checkpointed_concat_keeps_the_output_only(total):
    rows = 4 * total * WIDTH
    activations = 4 * SIZE * WIDTH * (DEPTH + 1)
    used = gradient_memory(total, Concat(), checkpoint=True)
    # The output and its cotangent, which `jnp.sum(... ** 2)` makes and not the map.
    # With a remainder, what is differentiated is copied up to it.
    copies = 2 if total % SIZE == 0 else 3
    assert used < copies * rows + 4 * activations


def residuals(checkpoint):
    micro = functools.partial(
        filter_micro_vmap, deep, in_axes=(None, 0), microbatch_size=SIZE
    )
    w, x = jnp.zeros((WIDTH, WIDTH)), jnp.zeros((16 * SIZE, WIDTH))
    run = micro(accumulator=Sum(), checkpoint=checkpoint)
    _, pullback = jax.vjp(run, w, x)
    return sum(x.nbytes for x in jax.tree.leaves(pullback)), w.nbytes + x.nbytes


@LOST
@pytest.mark.flags
def test_saved_residuals():
    saved, inputs = residuals(checkpoint=True)
    assert saved <= inputs + 1024
    saved, inputs = residuals(checkpoint=False)
    assert saved > (DEPTH - 1) * 4 * 16 * SIZE * WIDTH


def shapes_in_loops(jaxpr, inside=False):
    """The shapes of all that is computed in the bodies of loops."""
    for eqn in jaxpr.eqns:
        if inside:
            yield from (var.aval.shape for var in eqn.outvars)
        is_loop = eqn.primitive.name in ("scan", "while")
        for value in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr):
            if is_jaxpr(value):
                sub = getattr(value, "jaxpr", value)
                yield from shapes_in_loops(sub, inside or is_loop)


def is_jaxpr(x):
    return isinstance(x, (Jaxpr, ClosedJaxpr))


@pytest.mark.parametrize(("total", "checkpoint"), thinned((64, 67), (True, False)))
def test_no_step_of_a_gradient_is_as_large_as_the_batch(total, checkpoint):
    # Reverse mode of a dynamic slice would make, for each microbatch, a cotangent of
    # the size of the batch: time would be quadratic.
    micro = filter_micro_vmap(
        lambda x: jnp.sin(x) * x.sum(), microbatch_size=8, checkpoint=checkpoint
    )
    grad = jax.grad(lambda x: jnp.sum(micro(x) ** 2))
    shapes = list(shapes_in_loops(jax.make_jaxpr(grad)(jnp.zeros((total, 7))).jaxpr))
    assert (8, 7) in shapes
    assert not [shape for shape in shapes if total in shape]


@pytest.mark.parametrize("checkpoint", spread((True, False), 1))
def test_collectives_over_an_axis_of_a_transform_outside(checkpoint, getkey):
    x, w = normal(getkey(), (4, 5)), normal(getkey(), (5,))

    def inner(w, x):
        return jnp.tanh(w * x) * jax.lax.psum(jnp.sin(w * x), "i")

    def row(w, x):
        return filter_micro_vmap(inner, microbatch_size=2, checkpoint=checkpoint)(w, x)

    micro = filter_micro_vmap(
        row, in_axes=(None, 0), axis_name="i", checkpoint=checkpoint
    )
    dense = jax.vmap(jax.vmap(inner), (None, 0), axis_name="i")

    def derivatives(run):
        grad = jax.grad(lambda w, x: jnp.sum(run(w, x) ** 2), argnums=(0, 1))(w, x)
        return grad, jax.jvp(run, (w, x), (w, x))

    got, expected = jax.jit(lambda: (derivatives(micro), derivatives(dense)))()
    assert_same(got, expected, tol=1e-4)
