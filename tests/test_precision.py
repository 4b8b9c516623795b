"""Products keep the precision that a model asks for, and digits that results need.

On CPUs, all float32 products have all digits, so the programs are read.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch import (
    filter_batch_kernel,
    filter_gauss_newton_step,
    filter_micro_grad,
    KernelProduct,
)
from .derivatives import clip, DERIVATIVES, Net, outputs, X, Y


# Elsewhere, the tests have a precision of their own: see conftest.py.
pytestmark = pytest.mark.cpu

DEFAULT, HIGH, HIGHEST = lax.Precision
PRODUCTS = ("dot_general", "conv_general_dilated")


STEPS = {
    space: filter_gauss_newton_step(
        outputs, in_axes=0, damping=1e-3, space=space, microbatch_size=2
    )
    for space in ("sample", "parameter")
}


def programs(jaxpr):
    """A jaxpr and all that its equations run."""
    yield jaxpr
    is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    for eqn in jaxpr.eqns:
        for x in jax.tree.leaves([*eqn.params.values()], is_leaf=is_program):
            if is_program(x):
                yield from programs(getattr(x, "jaxpr", x))


def precisions(fun, *args):
    """The precisions of all products of a program."""
    closed, _, _ = eqx.filter_make_jaxpr(fun)(*args)
    found = [
        eqn.params["precision"]
        for jaxpr in programs(closed.jaxpr)
        for eqn in jaxpr.eqns
        if eqn.primitive.name in PRODUCTS
    ]
    return {x[0] if isinstance(x, tuple) else x for x in found}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_contractions_have_the_precision_of_the_model(name):
    assert precisions(DERIVATIVES[name], Net(HIGHEST), X, Y) == {HIGHEST}


def test_a_model_without_a_precision_leaves_that_of_jax():
    run = DERIVATIVES["ntk"]
    assert precisions(run, Net(None), X, Y) == {None}
    assert precisions(run, Net(HIGH), X, Y) == {HIGH}
    with jax.default_matmul_precision("high"):
        assert precisions(run, Net(None), X, Y) == {HIGH}
        # What the model says itself comes first.
        assert precisions(run, Net(HIGHEST), X, Y) == {HIGHEST}


def test_norms_of_clipping_keep_digits():
    # A Gram matrix of two positions is smaller than a gradient.
    run = filter_micro_grad(
        lambda w, x: jnp.sum(jnp.tanh(x @ w)), **clip, method="sites"
    )
    w, x = jnp.ones((32, 32)), jnp.ones((3, 2, 32))
    assert precisions(run, w, x) == {None, HIGHEST}
    with jax.default_matmul_precision("default"):
        assert precisions(run, w, x) == {DEFAULT}


NAMED = (DEFAULT, HIGH, lax.DotAlgorithmPreset.BF16_BF16_F32)


@pytest.mark.parametrize("precision", NAMED)
def test_norms_of_clipping_keep_digits_that_the_model_does_not(precision):
    run = filter_micro_grad(
        lambda w, x: jnp.sum(jnp.tanh(lax.dot(x, w, precision=precision))),
        **clip,
        method="sites",
    )
    w, x = jnp.ones((32, 32)), jnp.ones((3, 2, 32))
    assert precisions(run, w, x) == {precision, HIGHEST}
    with jax.default_matmul_precision("default"):
        # Nothing is raised above what the model says.
        assert precisions(run, w, x) == {precision}


@pytest.mark.parametrize("space", STEPS)
def test_steps_keep_digits(space):
    step = lambda net, x, y: STEPS[space](net, x, y)
    assert HIGHEST in precisions(step, Net(None), X, Y)
    # What the model says of itself lowers nothing else.
    assert HIGHEST in precisions(step, Net(HIGH), X, Y)
    with jax.default_matmul_precision("default"):
        assert precisions(step, Net(HIGHEST), X, Y) == {HIGHEST}


def test_products_of_kernels_keep_digits():
    x = jnp.asarray(np.linspace(0.0, 1.0, 12, dtype=np.float32)[:, None])
    # A kernel without products of its own.
    reduce = KernelProduct(x[:, 0])
    kernel = filter_batch_kernel(
        lambda x, y: jnp.exp(-jnp.abs(x - y.T)), block_size=5, reduce=reduce
    )
    assert precisions(kernel, x, x) == {HIGHEST}
    with jax.default_matmul_precision("default"):
        assert precisions(kernel, x, x) == {DEFAULT}
