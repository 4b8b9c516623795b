"""Custom backward passes that are not linear in their cotangents.

What is right is the mean over `jax.vmap(jax.grad(loss))`.
"""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch import (
    EmpiricalNTK,
    explain_sites,
    filter_batch_kernel,
    filter_gauss_newton_step,
    filter_ggn,
    filter_grid_vmap,
    filter_hessian,
    filter_hvp,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    Mean,
    over_batches,
    Sum,
)
from eqxbatch._base.traced_function import TracedFunction
from ..helpers import KINDS, make_mesh, put, variants


pytestmark = [pytest.mark.versions, pytest.mark.flags]


def with_backward(backward):
    """The first argument, with a backward pass of what was saved and the cotangent."""
    fun = jax.custom_vjp(lambda x, other: x)
    fun.defvjp(lambda x, other: (x, (x, other)), backward)
    return fun


def norm(x):
    return jnp.sqrt(jnp.sum(x**2) + 1e-3)


NONLINEAR = {
    # As in JAX's tutorial on `jax.custom_vjp`.
    "clipped": lambda r, g: (jnp.clip(g, -0.5, 0.5), 0 * r[1]),
    "normalised": lambda r, g: (g / norm(g), 0 * r[1]),
    # The gradient of an auxiliary loss, as in mixtures of experts.
    "injected": lambda r, g: (g, jnp.full_like(r[1], 0.1)),
    # The state of FP8 training, in place of a gradient.
    "state": lambda r, g: (g, jnp.max(jnp.abs(g)) + 0 * r[1]),
}
LINEAR = {
    "doubled": lambda r, g: (2 * g, jnp.zeros_like(r[1])),
    "times what was saved": lambda r, g: (g * r[1], jnp.sum(g * r[0])),
    "in a loop": lambda r, g: (
        lax.scan(lambda c, _: (c + 0.5 * g, None), g, None, length=2)[0],
        jnp.zeros_like(r[1]),
    ),
    "in a branch": lambda r, g: (
        lax.cond(r[1] > 0, lambda g: 2 * g, lambda g: g, g),
        jnp.zeros_like(r[1]),
    ),
}
FUNCTIONS = {name: with_backward(x) for name, x in {**NONLINEAR, **LINEAR}.items()}
W = np.array([0.5, -1.0, 2.0], np.float32)
X = np.sin(np.arange(21, dtype=np.float32)).reshape(7, 3)
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5, 1.5, 0.0, 3.0], np.float32)


def of_data(name):
    fun = FUNCTIONS[name]
    return lambda w, x: jnp.sum(fun(w * x, jnp.sum(w**2 * x)) ** 2)


def of_parameters(name):
    fun = FUNCTIONS[name]
    return lambda w, x: jnp.sum(fun(w, jnp.sum(w**2)) * x) ** 2


PLACES = {"data": of_data, "parameters": of_parameters}


def each(loss, w=W, x=X):
    return np.asarray(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x))


@pytest.mark.parametrize("size", (3, 4))
@pytest.mark.parametrize("name", variants([*NONLINEAR], "normalised", "state"))
@pytest.mark.parametrize("place", PLACES)
def test_sums_and_means(place, name, size):
    loss = PLACES[place](name)
    of_each = each(loss)
    check = lambda got, expected: np.testing.assert_allclose(got, expected, rtol=2e-5)
    of = lambda **settings: filter_micro_grad(loss, microbatch_size=size, **settings)
    check(of()(W, X), of_each.mean(0))
    weighted = WEIGHTS @ of_each
    check(of(accumulator=Sum(weights=WEIGHTS))(W, X), weighted)
    check(of(accumulator=Mean(weights=np.ones(7)))(W, X), of_each.mean(0))
    check(of(accumulator=Mean(running=True))(W, X), of_each.mean(0))
    batches = [(X[:2], WEIGHTS[:2]), (X[2:], WEIGHTS[2:])]
    many = over_batches(of(accumulator=Sum()), weighted=True)
    check(many(W, batches), weighted)


@pytest.mark.parametrize("method", ("auto", "sites", "materialise"))
@pytest.mark.parametrize("name", variants([*NONLINEAR], "normalised", "state"))
@pytest.mark.parametrize("place", PLACES)
def test_norms_and_clipped_sums(place, name, method):
    loss = PLACES[place](name)
    of_each = each(loss)
    norms = np.linalg.norm(of_each, axis=1)
    clipped = filter_micro_grad(
        loss,
        clip_norm=1.0,
        return_norms=True,
        method=method,
        microbatch_size=3,
        accumulator=Sum(weights=WEIGHTS),
    )
    got, statistics = clipped(W, X)
    np.testing.assert_allclose(statistics.norms, norms, rtol=2e-5)
    expected = WEIGHTS / np.maximum(norms, 1) @ of_each
    np.testing.assert_allclose(got, expected, rtol=2e-5)


@pytest.mark.devices
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh(kind):
    loss, mesh = of_data("injected"), make_mesh(kind)
    x = np.concatenate([X, X])[:12]
    gradient = filter_micro_grad(loss, microbatch_size=8)
    got = gradient(put(jnp.asarray(W), mesh), put(jnp.asarray(x), mesh, "data"))
    np.testing.assert_allclose(got, each(loss, x=x).mean(0), rtol=2e-5)


def test_half_precision():
    loss = of_data("clipped")
    w, x = W.astype(np.float16), X.astype(np.float16)
    got = filter_micro_grad(loss, microbatch_size=3)(w, x)
    np.testing.assert_allclose(got, each(loss, w, x).mean(0), rtol=2e-2)


def test_one_backward_pass_where_it_is_right(caplog):
    caplog.set_level(logging.DEBUG, "eqxbatch")
    gradient = filter_micro_grad(of_data("state"), microbatch_size=3)
    gradient(W, X)
    assert "Clipping" not in caplog.text
    filter_micro_grad(of_data("state"), accumulator=Sum(weights=WEIGHTS))(W, X)
    assert "Clipping" in caplog.text


def backward_of(fun):
    return TracedFunction(fun, jnp.asarray(W), [X], [0]).backward


@pytest.mark.parametrize("place", PLACES)
def test_which_are_linear(place):
    for name in FUNCTIONS:
        loss = PLACES[place](name)
        backward = backward_of(lambda w, rows, loss=loss: loss(w, *rows))
        assert backward.is_linear == (name in LINEAR), name
        assert backward.has_examples == (place == "data" or name in LINEAR), name


def test_which_belong_to_an_example():
    clip = FUNCTIONS["clipped"]
    one = jnp.ones(())

    def looped(w, x):
        """A loop whose carry has examples from its second step on."""
        step = lambda c, _: (clip(c, one) + x, None)
        return jnp.sum(lax.scan(step, w, None, length=2)[0])

    within = {
        "a call": lambda w, x: jax.jit(lambda w, x: (clip(w, one), x))(w, x)[0] @ x,
        # Of a call, only what has examples is batched.
        "what a call returns": lambda w, x: (
            clip(jax.jit(lambda w, x: (2 * w, x))(w, x)[0], one) @ x
        ),
        "a call of data": lambda w, x: jnp.sum(jax.jit(clip)(x * w, one)),
        "a loop": looped,
        "constants of a loop": lambda w, x: jnp.sum(
            lax.scan(lambda c, _: (c + clip(w, one), None), x, None, length=2)[0]
        ),
        "a branch": lambda w, x: jnp.sum(
            lax.cond(w[0] > 0, clip, lambda w, _: w, w, one) * x
        ),
        "a branch by example": lambda w, x: jnp.sum(
            lax.cond(x[0] > 0, clip, lambda w, _: w, w, one) * x
        ),
        "remat": lambda w, x: jnp.sum(jax.checkpoint(clip)(w, one) * x),
    }
    seen = {
        name: backward_of(lambda w, rows, f=f: f(w, *rows)).has_examples
        for name, f in within.items()
    }
    assert seen == {
        "a call": False,
        "what a call returns": False,
        "a call of data": True,
        "a loop": True,
        "constants of a loop": False,
        "a branch": False,
        "a branch by example": True,
        "remat": False,
    }
    for name, f in within.items():
        got = filter_micro_grad(f, microbatch_size=3)(W, X)
        np.testing.assert_allclose(got, each(f).mean(0), rtol=2e-5, err_msg=name)


def test_a_backward_pass_that_raises_is_not_called_for_values():
    def refuse(_, g):
        raise RuntimeError("no derivative")

    fun = with_backward(refuse)
    mapped = filter_micro_vmap(lambda x: fun(x, jnp.ones(())), microbatch_size=3)
    np.testing.assert_array_equal(mapped(X), X)


def test_values_and_aux_are_those_of_all_examples():
    fun = FUNCTIONS["injected"]
    loss = lambda w, x: (jnp.sum(fun(w * x, jnp.sum(w))), x[0])
    both = filter_micro_value_and_grad(loss, has_aux=True, microbatch_size=3)
    (value, aux), _ = both(W, X)
    np.testing.assert_allclose(value, (W * X).sum(1).mean(), rtol=1e-5)
    np.testing.assert_array_equal(aux, X[:, 0])


def test_casts_to_few_bits_are_not_linear():
    # As FP8 training casts cotangents.
    rounded = lambda g: g.astype(jnp.float8_e4m3fn).astype(g.dtype)
    fun = with_backward(lambda r, g: (rounded(g), jnp.zeros_like(r[1])))
    for loss in (
        lambda w, x: jnp.sum(fun(w, x[0]) * x) ** 2,
        lambda w, x: jnp.sum(fun(w * x, x[0])) ** 2,
    ):
        expected = WEIGHTS @ each(loss)
        for settings in ({}, {"clip_norm": 1e9}):
            gradient = filter_micro_grad(
                loss, accumulator=Sum(weights=WEIGHTS), microbatch_size=3, **settings
            )
            np.testing.assert_allclose(gradient(W, X), expected, rtol=2e-5)


@pytest.mark.parametrize("place", PLACES)
def test_primitives_of_users(place):
    # Newer versions of JAX have it.
    hijax = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "HiPrim"):
        pytest.skip("JAX has no classes of primitives")

    class Clip(hijax.HiPrim):
        """A primitive with a backward pass of its own."""

        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {"aval": aval}
            super().__init__()

        def check(self, *avals):
            pass

        def expand(self, x):
            return x * 1.0

        def vjp_fwd(self, nonzeros, x):
            return self(x), None

        def vjp_bwd_retval(self, saved, g):
            return (jnp.clip(g, -0.5, 0.5),)

        def batch(self, axis_data, args, dims):
            (x,), (dim,) = args, dims
            return Clip(jax.typeof(x))(x), dim

        def batch_dim_rule(self, axis_data, dims):
            return dims[0]

        def __hash__(self):
            return hash((type(self), self.aval))

        def __eq__(self, other):
            return type(self) is type(other) and self.aval == other.aval

    clip = lambda x: Clip(jax.typeof(x))(x)
    loss = {
        "data": lambda w, x: jnp.sum(clip(w * x) ** 2),
        "parameters": lambda w, x: jnp.sum(clip(w) * x) ** 2,
    }[place]
    of_each, w = each(loss, jnp.asarray(W)), jnp.asarray(W)
    got = filter_micro_grad(loss, microbatch_size=3)(w, X)
    np.testing.assert_allclose(got, of_each.mean(0), rtol=2e-5)
    got = filter_micro_grad(loss, accumulator=Sum(weights=WEIGHTS))(w, X)
    np.testing.assert_allclose(got, WEIGHTS @ of_each, rtol=2e-5)


def test_examples_that_a_named_axis_couples():
    fun = FUNCTIONS["clipped"]

    def loss(w, x):
        h = w * x
        return jnp.sum(fun(h - lax.pmean(h, "batch"), x[0]) ** 2)

    whole = lambda w: jnp.sum(jax.vmap(loss, (None, 0), axis_name="batch")(w, X))
    settings = {"axis_name": "batch", "microbatch_size": 7}
    got = filter_micro_grad(loss, **settings)(W, X)
    np.testing.assert_allclose(got, jax.jit(jax.grad(whole))(W) / 7, rtol=2e-5)
    for accumulator in (Mean(weights=WEIGHTS), Mean(running=True)):
        gradient = filter_micro_grad(loss, accumulator=accumulator, **settings)
        with pytest.raises(ValueError, match="scale cotangents before it"):
            gradient(W, X)


# Through maps.


@pytest.mark.parametrize("accumulator", (Sum(), Mean(), None))
def test_derivatives_through_maps(accumulator):
    loss = of_data("injected")
    settings = {} if accumulator is None else {"accumulator": accumulator}

    def through(w):
        one = lambda x: loss(w, x)
        return jnp.sum(filter_micro_vmap(one, microbatch_size=3, **settings)(X))

    expected = each(loss).sum(0) / (7 if isinstance(accumulator, Mean) else 1)
    if isinstance(accumulator, Mean):
        # The cotangents of 1/7 come before the backward pass, as in `jax.vmap`.
        dense = lambda w: jnp.mean(jax.vmap(loss, (None, 0))(w, X))
        expected = jax.jit(jax.grad(dense))(W)
    np.testing.assert_allclose(jax.jit(jax.grad(through))(W), expected, rtol=2e-5)


def test_derivatives_through_weighted_maps():
    loss = of_data("injected")
    mask = WEIGHTS != 0

    def through(w):
        one = lambda x: loss(w, x)
        return filter_micro_vmap(one, microbatch_size=3, accumulator=Sum(mask))(X)

    # `jax.vmap` calls the backward pass with cotangents of zero, too.
    dense = lambda w: jnp.sum(jnp.where(mask, jax.vmap(loss, (None, 0))(w, X), 0))
    expected = jax.jit(jax.grad(dense))(W)
    np.testing.assert_allclose(jax.jit(jax.grad(through))(W), expected, rtol=2e-5)


def test_derivatives_through_grids():
    fun = FUNCTIONS["injected"]
    pair = lambda w, x, y: jnp.sum(fun(w * x * y, jnp.sum(w * x)))

    def through(w):
        one = lambda x, y: pair(w, x, y)
        return jnp.sum(
            filter_grid_vmap(one, in_axes=("i", "j"), block_size=4)(X, X[:3])
        )

    def dense(w):
        rows = jax.vmap(jax.vmap(pair, (None, None, 0)), (None, 0, None))
        return jnp.sum(rows(w, X, X[:3]))

    expected = jax.jit(jax.grad(dense))(W)
    np.testing.assert_allclose(jax.jit(jax.grad(through))(W), expected, rtol=2e-5)


def test_derivatives_through_maps_in_what_examples_share():
    loss = of_parameters("clipped")

    def through(w, size):
        one = lambda x: loss(w, x)
        mapped = filter_micro_vmap(one, microbatch_size=size, accumulator=Sum())
        return mapped(X)

    with pytest.raises(ValueError, match="not known to be linear in the cotangent"):
        jax.grad(through)(jnp.asarray(W), 3)
    dense = lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, X))
    got = jax.grad(through)(jnp.asarray(W), None)
    np.testing.assert_allclose(got, jax.jit(jax.grad(dense))(W), rtol=2e-5)
    # Values have no such condition.
    np.testing.assert_allclose(through(W, 3), dense(W), rtol=1e-5)


def test_derivatives_through_kernels():
    fun = FUNCTIONS["normalised"]

    def through(scale, kind, size):
        kernel = lambda x, y: jnp.tanh(scale * fun(x, jnp.sum(x)) @ y.T)
        kernel = kernel if kind else lambda x, y: jnp.tanh(scale * x @ y.T)
        return jnp.sum(filter_batch_kernel(kernel, block_size=size)(X, X[:4]))

    assert np.isfinite(through(0.5, True, 3))
    with pytest.raises(ValueError, match="another derivative than one call for all"):
        jax.grad(through)(0.5, True, 3)
    got = jax.grad(through)(0.5, True, None)
    np.testing.assert_allclose(jax.grad(through)(0.5, False, 3), got, rtol=1e-5)


# Second derivatives.


@pytest.mark.parametrize("name", ("normalised", "injected"))
@pytest.mark.parametrize("place", PLACES)
def test_hessians(place, name):
    loss = PLACES[place](name)
    of_each = jax.jit(jax.vmap(jax.hessian(loss), (None, 0)))(W, X)
    settings = {"in_axes": 0, "microbatch_size": 3}
    accumulator = Sum(weights=WEIGHTS)
    expected = np.tensordot(WEIGHTS, of_each, 1)
    hessian = filter_hessian(loss, accumulator=accumulator, **settings)
    np.testing.assert_allclose(hessian(W, X), expected, rtol=1e-4, atol=1e-5)
    hvp = filter_hvp(loss, **settings)
    expected = np.mean(of_each, 0) @ X[0]
    np.testing.assert_allclose(hvp(W, X[0], X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_gauss_newton_matrices_are_those_of_the_jacobian(place):
    fun = FUNCTIONS["normalised"]
    predict = {
        "data": lambda w, x: fun(w * x, jnp.sum(x))[:2],
        "parameters": lambda w, x: (fun(w, jnp.sum(w)) * x)[:2],
    }[place]
    loss = lambda out, x: jnp.sum(fun(jnp.sin(out), out[0]) ** 2)
    jacobians = jax.jit(jax.vmap(jax.jacrev(predict), (None, 0)))(W, X)
    outs = jax.vmap(predict, (None, 0))(W, X)
    curves = jax.jit(jax.vmap(jax.hessian(loss)))(outs, X)
    expected = np.einsum("n,nik,nij,njl->kl", WEIGHTS, jacobians, curves, jacobians)
    ggn = filter_ggn(predict, loss, microbatch_size=3, accumulator=Sum(weights=WEIGHTS))
    np.testing.assert_allclose(ggn(W, X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_kernels_and_steps_are_those_of_the_jacobian(place):
    fun = FUNCTIONS["normalised"]
    predict = {
        "data": lambda w, x: fun(w * x, jnp.sum(x))[:2],
        "parameters": lambda w, x: (fun(w, jnp.sum(w)) * x)[:2],
    }[place]
    jacobians = jax.jit(jax.vmap(jax.jacrev(predict), (None, 0)))(W, X)
    model = eqx.Partial(predict, jnp.asarray(W))
    expected = np.einsum("nip,mjp->nmij", jacobians, jacobians)
    for method in ("sites", "jacobian_contraction"):
        ntk = EmpiricalNTK(model, trace_axes=(), method=method, block_size=3)
        np.testing.assert_allclose(ntk(X), expected, rtol=1e-4, atol=1e-5)
    residuals = np.ravel(jax.vmap(predict, (None, 0))(W, X))
    flat = np.reshape(jacobians, (14, 3))
    matrix = flat.T @ flat / 7 + 0.1 * np.eye(3)
    expected = np.linalg.solve(matrix, flat.T @ residuals / 7)
    for size in (3, None):
        step = filter_gauss_newton_step(predict, damping=0.1, microbatch_size=size)
        np.testing.assert_allclose(step(W, X), expected, rtol=1e-4, atol=1e-5)


def test_the_report_says_why():
    (report,) = explain_sites(of_parameters("injected"), jnp.asarray(W), X).leaves
    assert "no derivative in forward mode" in report.reason
    loss = lambda w, x: jnp.sum(FUNCTIONS["injected"](x, jnp.sum(w)))
    (report,) = explain_sites(loss, jnp.asarray(W), X).leaves
    assert "does not depend on the cotangent" in report.reason
