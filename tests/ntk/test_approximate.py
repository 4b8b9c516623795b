"""Estimates of kernels, and expansions of models."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxbatch import (
    EmpiricalNTK,
    filter_linearize,
    filter_taylor_expand,
    ProbedNTK,
    PseudoNTK,
)
from ..helpers import assert_same, drawn, normal, spread
from .models import jacobians, pairs


def mlp(key, out=6):
    return drawn(eqx.nn.MLP, 4, out, 8, 1, activation=jnp.tanh, key=key)


def test_pseudo(getkey):
    model = mlp(getkey())
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (3, 4), float)
    jac1, jac2 = (np.asarray(jacobians(model, x)) for x in (x1, x2))
    total = lambda jac: jac.sum(1, keepdims=True) / 6**0.5
    # With one entry left, the trace is over nothing.
    trace = lambda *sides: np.asarray(pairs(*map(total, sides), (-1,)))
    assert_same(PseudoNTK(model)(x1, x2), trace(jac1, jac2), 1e-4)
    assert_same(PseudoNTK(model).diagonal(x1), np.diagonal(trace(jac1, jac1)), 1e-4)
    blocked = PseudoNTK(model, block_size=2)(x1)
    assert_same(blocked, trace(jac1, jac1), 1e-4)
    # Some axes are summed over, others are not.
    square = eqx.Partial(lambda model, x: model(x).reshape(2, 3), model)
    rows = [jac.reshape(len(jac), 2, 3, -1).sum(2) for jac in (jac1, jac2)]
    expected = np.einsum("nap,map->nma", *rows) / 3
    assert_same(PseudoNTK(square, diagonal_axes=1)(x1, x2), expected, 1e-4)


def test_probes_are_unbiased(getkey):
    model = mlp(getkey())
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (3, 4), float)
    full = np.asarray(EmpiricalNTK(model, trace_axes=())(x1, x2))
    exact = np.einsum("nmoo->nm", full) / 6
    estimate = ProbedNTK(model, num_probes=4096, key=jr.key(1))(x1, x2)
    error = np.abs(np.asarray(estimate.kernel) - exact) / estimate.standard_error
    assert error.max() < 5
    # The standard error is that of the mean of so many.
    fewer = ProbedNTK(model, num_probes=1024, key=jr.key(2))(x1, x2)
    ratio = np.asarray(fewer.standard_error) / np.asarray(estimate.standard_error)
    np.testing.assert_allclose(ratio, 2, rtol=0.2)
    # The estimate by hand, from the same signs.
    estimate = ProbedNTK(model, num_probes=5, key=jr.key(1))(x1, x2)
    signs = jr.rademacher(jr.fold_in(jr.key(1), 0), (5, 6), jnp.float32)
    single = np.einsum("qo,nmop,qp->qnm", signs, full, signs) / 6
    assert_same(estimate.kernel, single.mean(axis=0), 1e-4)
    expected = single.std(axis=0, ddof=1) / 5**0.5
    assert_same(estimate.standard_error, expected, 1e-3)


def test_probes_in_blocks(getkey):
    model = mlp(getkey())
    x = normal(getkey(), (5, 4), float)
    whole = ProbedNTK(model, num_probes=3, key=jr.key(1))(x)
    blocked = ProbedNTK(model, num_probes=3, key=jr.key(1), block_size=2)(x)
    assert_same(tuple(blocked), tuple(whole), 1e-4)
    np.testing.assert_array_equal(blocked.kernel, np.asarray(blocked.kernel).T)
    estimator = ProbedNTK(model, num_probes=3, key=jr.key(1))
    expected = jax.tree.map(np.diagonal, jax.device_get(whole))
    assert_same(tuple(estimator.diagonal(x)), tuple(expected), 1e-4)
    other = ProbedNTK(model, num_probes=3, key=jr.key(2))(x)
    assert not np.allclose(other.kernel, whole.kernel)
    one = ProbedNTK(model, num_probes=1, key=jr.key(1))(x)
    assert np.isnan(one.standard_error).all()
    with pytest.raises(ValueError, match="`num_probes` must be at least 1"):
        ProbedNTK(model, num_probes=0, key=jr.key(1))
    with pytest.raises(ValueError, match="`trace_axes` must name the axes"):
        PseudoNTK(model, trace_axes=())(x)


class Cubic(eqx.Module):
    """A polynomial of degree 3 in its parameters."""

    w: jax.Array
    num: jax.Array

    def __call__(self, x, *, scale=1.0):
        y = self.w @ x
        return {"y": scale * (y + y**2 + y**3), "num": self.num}


@pytest.mark.parametrize("degree", spread((0, 1, 2, 3, 4), 3))
@pytest.mark.usefixtures("x64")
def test_taylor(degree, getkey):
    centre = Cubic(normal(getkey(), (3, 4), float), jnp.array(2))
    model = Cubic(normal(getkey(), (3, 4), float), jnp.array(5))
    x = normal(getkey(), (4,), float)
    at, to, point = (np.asarray(a) for a in (centre.w, model.w, x))
    y, z = at @ point, (to - at) @ point
    terms = [
        y + y**2 + y**3,
        z * (1 + 2 * y + 3 * y**2),
        z**2 * (1 + 3 * y),
        z**3,
        0 * z,
    ]
    expansion = filter_taylor_expand(centre, degree)
    out = eqx.filter_jit(expansion)(model, x, scale=2.0)
    assert_same(out["y"], 2 * sum(terms[: degree + 1]))
    assert out["num"] == 2
    unchanged = eqx.filter_jit(expansion)(centre, x, scale=2.0)
    assert_same(unchanged["y"], 2 * terms[0])


def test_factorials_beyond_32_bits():
    centre, model = (eqx.Partial(jnp.multiply, jnp.asarray(w)) for w in (1.0, 3.0))
    assert_same(filter_taylor_expand(centre, 13)(model, 2.0), jnp.asarray(6.0))


def test_linearized(getkey):
    centre, model = mlp(getkey()), mlp(getkey())
    x = normal(getkey(), (5, 4), float)
    linear = filter_linearize(centre)
    # The kernel does not change with the parameters.
    ntk = EmpiricalNTK(eqx.Partial(linear, model), where=lambda f: f.args)
    assert_same(ntk(x), EmpiricalNTK(centre)(x), 1e-4)
    with pytest.raises(ValueError, match="must have the structure and shapes"):
        linear(mlp(getkey(), 6).layers[0], x[0])
    with pytest.raises(ValueError, match="`degree` must be at least 0"):
        filter_taylor_expand(centre, -1)
