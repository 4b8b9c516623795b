"""Parameters in float8 and float4, which JAX promotes to no other dtype."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch import (
    EmpiricalNTK,
    filter_gauss_newton_step,
    filter_ggn,
    filter_ggn_diagonal,
    filter_ggnvp,
    filter_hessian,
    filter_hvp,
    filter_jacobian,
    filter_kfac,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    Mean,
    Sum,
)
from ..helpers import spread


NARROW = ("float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float4_e2m1fn")
X = jnp.asarray(np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32))


def parameters(dtype, *shape):
    numbers = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    return jnp.asarray(numbers).astype(dtype)


def predict(w, x):
    return x @ w.astype("float32")


def loss(w, x):
    return jnp.sum(predict(w, x) ** 2) / 2


def half_of_squares(out, *_):
    return jnp.sum(out**2) / 2


def as_float32(tree):
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), tree)


def rounded_mean(fun, w):
    """The gradient of the mean loss in float32, rounded once."""
    mean = lambda w: jnp.mean(jax.vmap(fun, (None, 0))(w, X))
    gradient = jax.jit(jax.grad(mean))(w.astype("float32"))
    return np.asarray(gradient.astype(w.dtype)).astype(np.float32)


def moved(w, x):
    """Casts only after steps that move entries, in a program of its own."""
    columns = jax.jit(lambda w: [w.T[i].astype("float32") for i in range(2)])(w)
    return sum(jnp.vdot(x, column) ** 2 for column in columns)


def joined(w, x):
    """Casts only after what puts several arrays, or constants, together."""
    padded = jnp.pad(jnp.concatenate([w, w[:, ::-1]], 1), ((0, 0), (1, 0)))
    chosen = jnp.where(x[0] > 0, padded, jnp.stack([*padded])[::-1])
    updated = lax.dynamic_update_slice(chosen, w[:, :1], (0, 0))
    return jnp.sum((x @ updated.astype("float32")) ** 2)


def rematerialised(w, x):
    return jax.checkpoint(lambda w: loss(w, x))(w)


def branched(w, x):
    return lax.cond(x[0] > 0, loss, lambda w, x: jnp.sum(jnp.sin(predict(w, x))), w, x)


def in_layers(w, x):
    def layer(x, row):
        return jnp.tanh(row.astype("float32") * x), None

    return jnp.sum(lax.scan(layer, x, w.T)[0] ** 2)


@pytest.mark.versions
@pytest.mark.parametrize(
    "fun", (loss, moved, joined, rematerialised, branched, in_layers)
)
def test_gradients_are_rounded_once(fun):
    w = parameters("float8_e5m2", 3, 2)
    settings = ({}, {"clip_norm": 1e6, "method": "materialise"})
    for more in settings if fun is loss else settings[:1]:
        got = filter_micro_grad(fun, microbatch_size=3, **more)(w, X)
        assert got.dtype == w.dtype
        np.testing.assert_array_equal(as_float32(got), rounded_mean(fun, w))


@pytest.mark.parametrize("dtype", spread([x for x in NARROW if hasattr(jnp, x)], 2))
def test_gradients_in_all_dtypes(dtype):
    w = parameters(dtype, 3, 2)
    whole = lambda w, x: jnp.mean(jax.vmap(loss, (None, 0))(w, x))
    for more in (
        {"clip_norm": 1e6},
        {"moments": True},
        {"fun": whole, "batched": True, "accumulator": Mean()},
    ):
        fun = more.pop("fun", loss)
        settings = {"microbatch_size": 2, **more}
        _, got, *_ = filter_micro_value_and_grad(fun, **settings)(w, X)
        got = got if isinstance(got, jax.Array) else got.mean
        assert got.dtype == w.dtype
        np.testing.assert_array_equal(as_float32(got), rounded_mean(loss, w))


def test_functions_of_gradients_get_the_dtype_of_the_parameters():
    w, dtypes = parameters("float8_e5m2", 3, 2), []

    def transform(gradient):
        dtypes.append(gradient.dtype)
        return gradient

    got = filter_micro_grad(loss, transform=transform, microbatch_size=3)(w, X)
    assert {got.dtype, *dtypes} == {w.dtype}


def test_sums_of_results_are_rounded_once():
    x = X.astype("float8_e5m2")
    for accumulator, reduce in ((Sum(), np.sum), (Mean(), np.mean)):
        got = filter_micro_vmap(
            lambda x: x, microbatch_size=2, accumulator=accumulator
        )(x)
        right = jnp.asarray(reduce(as_float32(x), 0)).astype(x.dtype)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(as_float32(got), as_float32(right))


class Model(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return predict(self.w, x)


@pytest.mark.versions
@pytest.mark.parametrize("dtype", ("float8_e5m2", "float8_e4m3fn"))
def test_curvature_and_kernels(dtype):
    """What is of one dtype has that dtype, and is rounded once, in the end."""
    w = parameters(dtype, 3, 2)
    squares = np.asarray(X).T @ np.asarray(X) / 10
    dense = np.kron(squares, np.eye(2)).astype(np.float32)

    def check(got, right, rounded=w.dtype):
        assert got.dtype == rounded
        right = as_float32(jnp.asarray(right).astype(rounded))
        np.testing.assert_allclose(as_float32(got), right, rtol=1e-5, atol=1e-6)

    ggn = {"fun": predict, "loss": half_of_squares}
    check(filter_ggn(**ggn, flat=True, microbatch_size=3)(w, X)[0], dense)
    check(filter_hessian(loss, in_axes=0, flat=True)(w, X)[0], dense)
    check(filter_hessian(loss, in_axes=0, flat=True, method="products")(w, X)[0], dense)
    check(filter_ggn_diagonal(**ggn, flat=True)(w, X)[0], np.diag(dense))
    product = (dense @ as_float32(w).ravel()).reshape(3, 2)
    check(filter_ggnvp(**ggn)(w, w, X), product)
    check(filter_hvp(loss, in_axes=0, microbatch_size=3)(w, w, X), product)
    jacobian = np.einsum("ni,jk->njik", X, np.eye(2))
    check(filter_jacobian(predict, in_axes=0)(w, X), jacobian, np.float32)
    kernel = EmpiricalNTK(Model(w), trace_axes=(-1,))(X)
    check(kernel, np.asarray(X) @ np.asarray(X).T, np.float32)
    _, inputs = jax.tree.leaves(filter_kfac(**ggn)(w, X))
    check(inputs[0], squares, np.float32)
    # With the mean of squares: (J'J / 10 + 1) step = -J'r / 10.
    step = filter_gauss_newton_step(predict, damping=1.0, block_size=3)(w, X)
    right = np.linalg.solve(dense + np.eye(6), product.ravel()).reshape(3, 2)
    np.testing.assert_allclose(np.abs(as_float32(step)), np.abs(right), rtol=0.13)


def test_parameters_of_several_dtypes():
    w = parameters("float8_e5m2", 3, 2), parameters("float8_e4m3fn", 2)
    fun = lambda w, x: predict(w[0], x) + w[1].astype("float32")
    matrix, _ = filter_ggn(fun, half_of_squares, flat=True)(w, X)
    assert matrix.dtype == jnp.float32
    np.testing.assert_allclose(matrix[6:, 6:], np.eye(2), rtol=1e-6)
    mean = np.asarray(X).mean(0)
    expected = np.stack([mean, 0 * mean], 1).ravel()
    np.testing.assert_allclose(matrix[6, :6], expected, rtol=1e-5, atol=1e-6)
