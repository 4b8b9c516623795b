"""Branches, and functions with derivatives of their own, beside what JAX says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, PartitionSpec as P

from eqxbatch import explain_sites, filter_hessian, filter_micro_grad, Sum
from ..helpers import KINDS, make_mesh, put, rows_only, variants
from ..layers import Case, tokens, vectors, weight
from .adapter import Sites
from .oracle import compare


pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.versions,
    pytest.mark.flags,
]


def ruled(backward):
    """A product with a derivative of its own; `backward` takes `w`, `x` and `d`."""

    @jax.custom_vjp
    def product(w, x):
        return jnp.round(4 * w) / 4 * x

    product.defvjp(lambda w, x: (product(w, x), (w, x)), lambda s, d: backward(*s, d))
    return product


@jax.custom_vjp
def matmul(w, x):
    """Has the derivative of twice the product with `clip(w)`, and two outputs."""
    return jnp.round(4 * w) / 4 @ x, jnp.sum(x)


def _matmul_backward(saved, cotangents):
    (w, x), (d, s) = saved, cotangents
    dw = jnp.where(jnp.abs(w) < 0.5, 2 * jnp.einsum("i,j->ij", d, x), 0)
    return dw, 2 * jnp.clip(w, -0.5, 0.5).T @ d + s


matmul.defvjp(lambda w, x: (matmul(w, x), (w, x)), _matmul_backward)


@jax.custom_jvp
def sine_matmul(w, x):
    """Has the derivative of `3 sin(w) x`."""
    return w @ x


@sine_matmul.defjvp
def _sine_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return sine_matmul(w, x), 3 * ((jnp.cos(w) * dw) @ x + jnp.sin(w) @ dx)


@jax.custom_vjp
def layer(w, b, x):
    """Has the derivative of `tanh(w) x + 3 b`."""
    return w @ x + b


layer.defvjp(
    lambda w, b, x: (layer(w, b, x), (w, x)),
    lambda saved, d: (
        jnp.einsum("i,j->ij", d, saved[1]) / jnp.cosh(saved[0]) ** 2,
        3 * d,
        jnp.tanh(saved[0]).T @ d,
    ),
)


def chosen(ws, x):
    """A leaf in both branches, one in a loop in one, and one where `x` comes later."""
    first, stacked, last = ws

    def loop(x):
        step = lambda x, w: (jnp.tanh(w * x + first[0]), None)
        return lax.scan(step, x, stacked)[0]

    branches = [lambda x: jnp.tanh(first @ x), loop, lax.stop_gradient]
    index = jnp.int32(2 * jnp.abs(x[0])) % 3
    return last @ lax.switch(index, branches, jnp.sin(last.T @ x))


def by_step(ws, x):
    """Steps that are not alike; and a branch that parameters alone choose."""
    first, bias = ws

    def step(x, i):
        layers = [lambda x: jnp.tanh(first @ x), lambda x: x * bias + bias]
        return lax.switch(i % 2, layers, x), x

    x = lax.scan(step, x, jnp.arange(3))[0]
    return lax.cond(jnp.sum(bias) > 0, lambda x: first.T @ x, lambda x: x, x)


def looked_up(ws, t):
    table, w = ws
    rows = lambda t: table[t].sum(0)
    others = lambda t: w @ jnp.tanh(table[t + 1]).sum(0)
    return lax.cond(t.sum() % 2 == 0, rows, others, t)


def of_rules(ws, x):
    first, second = ws
    y, total = matmul(first, jnp.tanh(sine_matmul(second, x)))
    y = jax.checkpoint(sine_matmul)(second.T, jnp.sin(y) * total)
    steps = lambda x, w: (jnp.tanh(matmul(w, x)[0]), None)
    return lax.scan(steps, y, jnp.stack([first, second]))[0]


def with_bias(ws, x):
    w, b = ws
    y = jnp.tanh(layer(w, b, x))
    # The derivative of a derivative adds up as `add_any`.
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(w @ x + b) * (w @ x - b)))(y)
    return layer(w.T, jnp.sin(b), y) + slope


CASES = {
    "chosen": lambda: Case(
        [weight(4, 4), weight(3, 4), 2 * weight(4, 4)], chosen, vectors(4)
    ),
    "by_step": lambda: Case([weight(4, 4), weight(4)], by_step, vectors(4)),
    "looked_up": lambda: Case([weight(7, 4), weight(4, 4)], looked_up, tokens(3)),
    "of_rules": lambda: Case([weight(4, 4), weight(4, 4) / 2], of_rules, vectors(4)),
    "with_bias": lambda: Case([weight(4, 4), weight(4)], with_bias, vectors(4)),
}


@pytest.mark.parametrize("name", variants(CASES, "by_step", "looked_up"))
def test_derivatives(name):
    program, comparable = compare(CASES[name]())
    assert not program.fallbacks
    assert any(comparable)


NOT_LINEAR = {
    "clipped": (lambda w, x, d: (jnp.clip(d, -0.1, 0.1) * x, d * w), "`max`"),
    "shifted": (lambda w, x, d: (d * x + 0.3, d * w), "`add`"),
    "of_signs": (lambda w, x, d: (jnp.where(d > 0, d, 0) * x, d * w), "`gt`"),
    "squared": (lambda w, x, d: (d * d * x, d * w), "`mul`"),
}


def test_backward_passes_that_are_not_linear():
    products = {name: ruled(backward) for name, (backward, _) in NOT_LINEAR.items()}

    def fun(ws, x):
        return [product(ws[name], x) for name, product in products.items()]

    program, _ = compare(Case({name: weight(4) for name in products}, fun, vectors(4)))
    for leaf, name in enumerate(sorted(products)):
        reason = f"the backward pass of a `custom_vjp_call` has {NOT_LINEAR[name][1]}"
        assert reason in program.fallbacks[leaf]


@pytest.mark.parametrize(("fill", "is_linear"), ((0.5, False), (0.0, True)))
def test_backward_passes_that_take_what_is_out_of_bounds(fill, is_linear):
    take = lambda d: d.at[jnp.array([0, 3, 9, 1])].get(mode="fill", fill_value=fill)
    product = ruled(lambda w, x, d: (take(d) * x, d * w))
    program, _ = compare(Case([weight(4)], lambda w, x: product(w[0], x), vectors(4)))
    assert is_linear != bool(program.fallbacks)


def test_a_backward_pass_of_parameters_alone_that_has_no_transpose():
    w, x = jnp.arange(1.0, 4.0), jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)
    loss = lambda fun: lambda w, x: jnp.sum(fun(w) * x) ** 2
    of, (report,) = (
        loss(rows_only),
        explain_sites(loss(rows_only), w, x[0], in_axes=None).leaves,
    )
    assert "no derivative in forward mode" in report.reason
    clip = lambda loss: filter_micro_grad(loss, clip_norm=0.7)(w, x)
    np.testing.assert_allclose(clip(of), clip(loss(jnp.sin)), rtol=1e-12)


def test_what_the_backward_pass_does_for_data_is_its_own():
    product = ruled(lambda w, x, d: (d * x, jnp.clip(d, -0.1, 0.1)))
    fun = lambda w, x: product(w[1], jnp.tanh(product(w[0], x)))
    assert not compare(Case([weight(4), weight(4)], fun, vectors(4)))[0].fallbacks


def program_of(fun, *ws, order=1):
    run = lambda ws, rows: fun(*ws, *rows)
    return Sites.of(run, ws, [jnp.ones(4)], order=order)


def test_asks_which_inputs_are_differentiated():
    @jax.custom_jvp
    def product(w, x):
        return w * x

    def rule(primals, tangents):
        return product(*primals), tangents[0] * primals[1]

    product.defjvp(rule, symbolic_zeros=True)
    program = program_of(lambda w, x: jnp.sum(product(w, x)), weight(4))
    assert "asks which inputs are differentiated" in program.fallbacks[0]


def test_branches_that_are_not_followed():
    def fun(w, v, x):
        guarded = lambda w: lax.cond(w[0] > 0, lambda x: x / w, lambda x: x, x)
        returned = lax.cond(jnp.sum(x) > 0, lambda x: v, lambda x: x, x)
        return jnp.sum(jnp.sin(guarded(w) * returned))

    program = program_of(fun, weight(4), weight(4))
    assert "a branch of a `cond` has a function of a parameter" in program.fallbacks[0]
    assert "a `cond` returns a parameter" in program.fallbacks[1]
    # The slope in the branch that is not taken is infinite.
    w, v = jax.device_put((-np.eye(4)[0], np.ones(4)))
    xs = np.arange(12.0).reshape(3, 4)
    got = filter_micro_grad(lambda ws, x: fun(*ws, x), clip_norm=1e6, method="sites")
    mean = lambda ws: jnp.mean(jax.vmap(lambda x: fun(*ws, x))(xs))
    truth = jax.jit(jax.grad(mean))
    for a, b in zip(got([w, v], xs), truth([w, v]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_a_guarded_quotient():
    def fun(ws, x):
        w, norm = ws
        quotient = lambda x: (w / lax.stop_gradient(norm)) * x
        return jnp.sum(lax.cond(jnp.sum(norm) > 0, quotient, lambda x: w * x, x))

    ws, xs = [jnp.ones(4), jnp.zeros(4)], jnp.arange(12.0).reshape(3, 4)
    got = filter_micro_grad(fun, clip_norm=1e6, method="sites")(ws, xs)
    np.testing.assert_allclose(got[0], xs.mean(0), rtol=1e-10)


def test_a_rule_in_a_branch_that_is_not_taken():
    @jax.custom_jvp
    def root(w, x):
        return w * x

    root.defjvp(lambda p, t: (root(*p), t[0] / p[0] * p[1] + p[0] * t[1]))
    fun = lambda w, x: jnp.sum(
        lax.cond(jnp.sum(w) > 0, lambda x: root(w, x), lambda x: w * x, x)
    )
    program = program_of(fun, jnp.zeros(4))
    assert "a branch of a `cond` has a function of a parameter" in program.fallbacks[0]
    assert not program_of(lambda w, x: jnp.sum(root(w, x)), jnp.ones(4)).fallbacks
    xs = jnp.arange(12.0).reshape(3, 4)
    got = filter_micro_grad(fun, clip_norm=1e6, method="sites")(jnp.zeros(4), xs)
    np.testing.assert_allclose(got, xs.mean(0), rtol=1e-10)


@jax.custom_jvp
def _nothing(w):
    return ()


_nothing.defjvp(lambda primals, tangents: ((), ()))


@jax.custom_vjp
def _nothing_in_reverse(w):
    return ()


_nothing_in_reverse.defvjp(lambda w: ((), w), lambda w, _: (jnp.zeros_like(w),))


@pytest.mark.parametrize(
    "checked",
    (
        lambda w: lax.cond(w[0, 0] > 0, lambda w: None, lambda w: None, w),
        _nothing,
        _nothing_in_reverse,
    ),
)
def test_parameters_alone_where_nothing_is_returned(checked):
    def fun(w, x):
        checked(jnp.sin(w))
        return jnp.sum(jnp.sin(w @ x))

    w, xs = np.arange(6.0).reshape(2, 3) / 7, np.arange(12.0).reshape(4, 3) / 5
    grads = [np.cos(w @ x)[:, None] * x for x in xs]
    norms = [np.sqrt(np.sum(grad**2)) for grad in grads]
    clipped = [g * min(1, 0.9 / norm) for g, norm in zip(grads, norms, strict=True)]
    got = filter_micro_grad(fun, clip_norm=0.9, method="sites")(w, xs)
    np.testing.assert_allclose(got, np.mean(clipped, 0), rtol=1e-10)
    assert explain_sites(fun, w, xs, in_axes=0).leaves[0].reason is None


def test_branches_without_a_derivative():
    stopped = lambda w, x: lax.cond(
        jnp.sum(x) > 0, lambda x: lax.stop_gradient(x), jnp.round, w @ x
    )
    assert not program_of(lambda w, x: jnp.sum(stopped(w, x)), weight(4, 4)).places


def test_second_derivatives():
    ws, xs = [weight(4, 4), weight(4, 4) / 2], vectors(3, 4)(jax.random.key(7))

    def loss(ws, x):
        x = lax.cond(x[0] > 0, lambda x: jnp.tanh(ws[0] @ x), lambda x: x, x)
        return jnp.sum(jnp.sin(matmul(ws[0], sine_matmul(ws[1], x))[0]))

    report = explain_sites(loss, ws, xs, in_axes=0)
    assert not [leaf.reason for leaf in report.leaves if leaf.reason]
    program = program_of(lambda *args: loss(args[:-1], args[-1]), *ws, order=2)
    assert all("and no second" in program.fallbacks[i] for i in (0, 1))
    flat, unravel = ravel_pytree(ws)
    total = lambda v: jnp.mean(jax.vmap(loss, (None, 0))(unravel(v), xs))
    truth = jax.jit(jax.jacrev(jax.grad(total)))(flat)
    with pytest.warns(UserWarning, match="forward"):
        got, _ = filter_hessian(loss, in_axes=0, flat=True)(ws, xs)
    np.testing.assert_allclose(got, truth, rtol=1e-10, atol=1e-10)


def test_derivatives_of_clipped_gradients():
    ws, xs = [weight(4, 4), weight(4, 4) / 2], vectors(3, 4)(jax.random.key(7))

    def loss(ws, x):
        y, total = matmul(ws[0], jnp.tanh(sine_matmul(ws[1], x)))
        return jnp.sum(jnp.sin(ws[0].T @ y * total))

    def clipped(ws, xs):
        each = jax.vmap(jax.grad(loss), (None, 0))(ws, xs)
        norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in each))
        return [jnp.tensordot(jnp.minimum(1, 0.3 / norms), g, 1) / 3 for g in each]

    by_sites = filter_micro_grad(loss, clip_norm=0.3, method="sites")
    value = lambda fun: lambda *args: sum(jnp.sum(jnp.sin(9 * g)) for g in fun(*args))
    grad = lambda fun: jax.jit(jax.value_and_grad(value(fun), (0, 1)))
    got, truth = (jax.tree.leaves(grad(fun)(ws, xs)) for fun in (by_sites, clipped))
    for a, b in zip(got, truth, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_a_mesh(kind):
    ws, xs = [weight(4, 4), weight(3, 4)], vectors(8, 4)(jax.random.key(7))
    mesh = make_mesh(kind)

    def loss(ws, x):
        first, stacked = ws
        return jnp.sum(jnp.sin(chosen([first, stacked, first], sine_matmul(first, x))))

    settings = {"clip_norm": 0.3, "method": "sites", "accumulator": Sum()}
    grad = filter_micro_grad(loss, microbatch_size=2, **settings)
    expected = grad(ws, xs)
    got = grad([put(w, mesh) for w in ws], put(xs, mesh, "data"))
    for a, b in zip(jax.device_get(got), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    if kind == AxisType.Explicit:
        return
    # As that of `jax.grad`, the gradient is summed over the devices.
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.jit(jax.shard_map(grad, mesh=mesh, **specs))
    for a, b in zip(mapped(ws, xs), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_infinite_derivatives_do_not_reach_the_value():
    @jax.custom_jvp
    def product(w, x):
        return w * x

    product.defjvp(lambda p, t: (product(*p), t[0] / p[1] + p[0] * t[1]))
    fun = lambda ws, x: jnp.sum(ws[0] * product(ws[1], jnp.sin(ws[2] * x)))
    ws, x = [jnp.ones(3) for _ in range(3)], jnp.arange(3.0)
    sites = Sites.of(lambda ws, rows: fun(ws, *rows), ws, [x])

    @jax.jit
    def run(ws, x):
        found = sites.examples(ws, [x[None]])
        return found.outputs[0], [found.gradients(i)[0] for i, _ in enumerate(ws)]

    value, truth = jax.jit(jax.value_and_grad(fun))(ws, x)
    assert np.isinf(truth[1][0])
    out, found = run(ws, x)
    np.testing.assert_allclose(out, value, rtol=1e-10)
    for got, expected in zip(found, truth, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10)
