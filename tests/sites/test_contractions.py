"""What compares all contractions finds what is wrong in any of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ..layers import LAYERS
from .adapter import broken_products, doubled_norms, first_entry_of_blocks_scaled
from .contractions import contraction_errors


# What it tests, other tests use.
pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.matrix]
FIRST = ("gradient", "norm", "kernel")
SECOND = ("hessian", "diagonal", "gauss_newton")


def of_linear(rows=3, columns=2, fun=lambda model, x: model(x)):
    model = eqx.nn.Linear(columns, rows, key=jr.key(0))
    return contraction_errors(fun, model, jnp.ones((1, columns)))


def of_layer(name, num=2):
    model, fun, example = LAYERS[name]()
    return contraction_errors(fun, model, jax.vmap(example)(jr.split(jr.key(1), num)))


def test_a_good_model():
    for leaf in of_layer("Embedding, of a sequence"):
        # Nothing is left out of what is as small as that.
        assert [*leaf] == [*FIRST, *SECOND]
        assert max(leaf.values()) < 1e-12


def test_broken_rule():
    with broken_products(scale=1.01):
        weight, bias = of_linear()
    for error in weight.values():
        assert 5e-3 < error < 5e-2
    # Blocks with the weight are the bias's, too.
    assert max(bias[name] for name in (*FIRST, "diagonal")) < 1e-12


def test_broken_sums():
    # What a sum over examples is the transpose of.
    with broken_products(change=lambda op: lambda a, w: 2 * op(a, w)):
        weight, bias = of_linear()
    assert weight["gradient"] > 0.1
    assert max(weight["norm"], weight["kernel"], bias["gradient"]) < 1e-12


def test_what_is_not_finite_is_an_error():
    with broken_products(scale=float("nan")):
        weight, bias = of_linear()
    assert {*weight.values()} == {np.inf}
    assert bias["gradient"] < 1e-12


def test_contractions_that_are_not_chosen():
    with doubled_norms():
        weight = of_layer("Conv2d, in groups", num=1)[0]
    assert weight["norm"] == pytest.approx(2**0.5 - 1)
    assert weight["gradient"] < 1e-12


def test_broken_curvature_of_large_leaves():
    # So large that it is compared along random directions.
    fun = lambda model, x: jnp.sum(jnp.sin(model(x)))
    with first_entry_of_blocks_scaled(1.5):
        weight, bias = of_linear(15, 20, fun)
    assert max(weight[name] for name in FIRST) < 1e-12
    assert min(weight["hessian"], weight["gauss_newton"]) > 1e-3
    assert min(bias[name] for name in SECOND) > 1e-3
