"""Hessians and Gauss-Newton matrices as operators of lineax."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax
import numpy as np
import pytest

import eqxbatch
from eqxbatch import (
    filter_ggn,
    filter_hessian,
    GGNOperator,
    HessianOperator,
    Mean,
    Sum,
)
from ..helpers import normal, only_backwards
from .oracle import batch, close, error, network


pytestmark = pytest.mark.usefixtures("x64")


def apply(model, x, y):
    return model(x)


def squared(out, x, y):
    return (out - y) ** 2


def make(kind, *args, **settings):
    if kind == "hessian":
        operator = HessianOperator(error, *args, **settings)
        dense = filter_hessian(error, flat=True, **settings)
    else:
        operator = GGNOperator(apply, squared, *args, **settings)
        dense = filter_ggn(apply, squared, flat=True, **settings)
    return operator, *dense(*args)


# The other accumulator of each is that of other tests here.
@pytest.mark.parametrize(("kind", "accumulator"), (("hessian", Sum()), ("ggn", Mean())))
def test_is_the_matrix(kind, accumulator, getkey):
    model, (x, y) = network(getkey()), batch(getkey(), 7)
    where = lambda model: model.layers[1:]
    settings = {"in_axes": 0, "microbatch_size": 3, "where": where}
    settings["accumulator"] = accumulator
    operator, matrix, unravel = make(kind, model, x, y, **settings)
    matrix, num = np.asarray(matrix), matrix.shape[0]
    vector = np.asarray(normal(getkey(), (num,), float))
    close(operator.mv(unravel(vector)), unravel(matrix @ vector))
    close(operator.as_matrix(), matrix)
    materialised = lineax.materialise(operator)
    close(materialised.as_matrix(), matrix)
    assert lineax.is_symmetric(materialised)
    close(lineax.diagonal(operator), np.diagonal(matrix))
    lower, upper = np.diagonal(matrix, -1), np.diagonal(matrix, 1)
    close(lineax.tridiagonal(operator), (np.diagonal(matrix), lower, upper))
    assert operator.transpose() is operator
    assert lineax.linearise(operator) is operator
    assert lineax.conj(operator) is operator
    assert lineax.is_symmetric(operator)
    assert not lineax.is_diagonal(operator)
    assert operator.in_size() == operator.out_size() == num
    structure = jtu.tree_structure(operator.in_structure())
    assert structure == jtu.tree_structure(unravel(vector))


def test_is_a_pytree(getkey):
    model, (x, y) = network(getkey()), batch(getkey(), 7)
    settings = {"in_axes": np.int64(0), "checkpoint": np.bool_(True)}
    operator, matrix, unravel = make("hessian", model, x, y, **settings)
    matrix = np.asarray(matrix)
    vector = np.asarray(normal(getkey(), (matrix.shape[0],), float))
    run = eqx.filter_jit(lambda operator, vector: operator.mv(vector))
    close(run(operator, unravel(vector)), unravel(matrix @ vector))
    scaled = 2.0 * operator + operator
    close(scaled.mv(unravel(vector)), unravel(3 * matrix @ vector))


def test_solve(getkey):
    x, y = normal(getkey(), (9, 4), float), normal(getkey(), (9,), float)
    model = lambda w, x, y: jnp.dot(w, x)
    settings = {"in_axes": 0, "microbatch_size": 2, "accumulator": Sum()}
    settings["is_convex"] = True
    operator = GGNOperator(model, squared, jnp.zeros(4), x, y, **settings)
    assert lineax.is_positive_semidefinite(operator)
    expected, right = np.linalg.lstsq(x, y)[0], 2 * np.asarray(x).T @ np.asarray(y)
    auto = lineax.AutoLinearSolver(well_posed=None)
    for solver in (lineax.CG(1e-12, 1e-12), lineax.Cholesky(), auto):
        got = lineax.linear_solve(operator, jax.device_put(right), solver).value
        np.testing.assert_allclose(got, expected, rtol=1e-8)


def test_tags():
    total = lambda w: jnp.sum(w**2)
    plain = HessianOperator(total, jnp.ones(3))
    assert not lineax.is_positive_semidefinite(plain)
    tags = (lineax.positive_semidefinite_tag, lineax.diagonal_tag)
    tagged = HessianOperator(total, jnp.ones(3), tags=tags)
    assert lineax.is_positive_semidefinite(tagged)
    assert lineax.is_diagonal(tagged)
    model = lambda w: w
    concave = GGNOperator(model, lambda w: -total(w), jnp.ones(3))
    assert not lineax.is_positive_semidefinite(concave)
    with pytest.raises(ValueError, match="positive or negative definite"):
        lineax.linear_solve(concave, jnp.ones(3), lineax.CG(1e-6, 1e-6))
    convex = GGNOperator(model, total, jnp.ones(3), is_convex=True)
    assert lineax.is_positive_semidefinite(convex)


def test_keywords(getkey):
    x, y = batch(getkey(), 5)
    loss = lambda w, x, *, y: (jnp.dot(w, x) - y) ** 2
    operator = HessianOperator(loss, jnp.ones(2), x, y=y, in_axes=0)
    x = np.asarray(x)
    close(operator.as_matrix(), 2 * x.T @ x / 5)


def test_mode(getkey):
    w, x = normal(getkey(), (3,), float), normal(getkey(), (4, 3), float)
    loss = lambda w, x: jnp.sum(only_backwards(w * x))
    operator = HessianOperator(loss, w, x, in_axes=0, mode="rev")
    w, x = jax.device_get((w, x))
    expected = np.diag(-np.mean(x**2 * np.sin(w * x), 0))
    close(operator.as_matrix(), expected)
    close(operator.mv(jnp.ones(3)), np.diagonal(expected))


def test_bad_input():
    with pytest.raises(ValueError, match="nothing to differentiate"):
        HessianOperator(jnp.sum, jnp.arange(3))
    with pytest.raises(TypeError, match="real and imaginary parts"):
        GGNOperator(jnp.sum, jnp.sum, jnp.ones(2, complex))
    with pytest.raises(AttributeError, match="no attribute 'MatrixOperator'"):
        _ = eqxbatch.MatrixOperator


def test_without_lineax(monkeypatch):
    real = importlib.import_module

    def without(name, *args):
        if name == "lineax":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ImportError, match=r"`GGNOperator` needs lineax.*\[linalg\]"):
        _ = eqxbatch.GGNOperator
