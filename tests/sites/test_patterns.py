"""What models do with parameters alone is exact, and takes no more memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax import lax

from eqxbatch import (
    explain_sites,
    filter_hessian,
    filter_micro_grad,
    filter_micro_vmap,
)
from ..helpers import drawn, memory, normal, spread
from ..layers import examples
from ..patterns import PATTERNS, squares
from .contractions import contraction_errors
from .oracle import compare


# Curvatures of the others are compared, too, where products of settings are tested.
WITH_CURVATURE = ("Positive scales",)


@pytest.fixture
def like_jax():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("x64", "like_jax")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in WITH_CURVATURE else pytest.mark.matrix)
        for x in PATTERNS
    ],
)
def test_pattern(name):
    model, fun, _ = case = PATTERNS[name]()
    xs = examples(case, jr.key(1), 3)
    report = explain_sites(fun, model, xs, in_axes=0)
    assert not [leaf.reason for leaf in report.leaves if leaf.reason]
    for leaf in contraction_errors(fun, model, xs):
        assert max(leaf.values()) < 1e-10, leaf


@pytest.mark.usefixtures("x64", "like_jax")
def test_gradients_of_a_pattern():
    program, _ = compare(PATTERNS["A mixture of experts, one for each token"]())
    assert not program.fallbacks


def test_ragged_products_are_not_mapped_without_a_program():
    # The docs say so. Once JAX maps them, this holds for all functions.
    xs, ws, sizes = jnp.ones((2, 4, 3)), jnp.ones((2, 3, 5)), jnp.array([1, 3])
    product = lambda x: lax.ragged_dot(x, ws, sizes)
    with pytest.raises(NotImplementedError, match="ragged_dot vmap"):
        filter_micro_vmap(product)(xs)


NUM, SIZE = 64, 128


def temporaries(fun, model, *args):
    gradient = filter_micro_grad(fun, clip_norm=0.1)
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda arrays, *args: gradient(eqx.combine(arrays, static), *args)
    return memory(run, arrays, *args).temp_size_in_bytes


def mlp():
    settings = {"use_bias": False, "use_final_bias": False, "key": jr.key(0)}
    return drawn(eqx.nn.MLP, SIZE, SIZE, SIZE, 1, **settings)


def total(out):
    return jnp.sum(jnp.sin(out))


XS = normal(jr.key(1), (NUM, SIZE), jnp.float32)
# The gradients of all examples with respect to one weight.
FORMED = 4 * NUM * SIZE**2


@pytest.mark.cpu
def test_memory_of_a_penalty():
    plain = temporaries(lambda m, x: total(m(x)), mlp(), XS)
    fun = lambda m, x: total(m(x)) + squares(m)
    # Its gradient, and nothing for each example.
    assert temporaries(fun, mlp(), XS) <= plain + 3 * 4 * 2 * SIZE**2
    assert plain < FORMED


@pytest.mark.cpu
def test_memory_of_what_is_frozen():
    def fun(ws, x):
        frozen, a, b = ws
        return total(lax.stop_gradient(frozen) @ x + b @ (a @ x))

    ws = [
        normal(jr.key(i), s, jnp.float32)
        for i, s in enumerate([(128, 128), (2, 128), (128, 2)])
    ]
    trained = lambda ws, frozen, x: fun((frozen, *ws), x)
    given = lambda ws, frozen, x: filter_micro_grad(
        trained, in_axes=(None, 0), clip_norm=0.1
    )(ws, frozen, x)
    alone = memory(given, ws[1:], ws[0], XS).temp_size_in_bytes
    assert temporaries(fun, ws, XS) <= 1.05 * alone
    assert alone < FORMED / 10


@pytest.mark.cpu
@pytest.mark.parametrize(
    "used",
    spread(
        (
            lambda w: w * jnp.tri(SIZE),
            jnp.tril,
            lambda w: jnp.where(jnp.tri(SIZE) > 0, 0, w),
            jax.nn.softplus,
            lambda w: w + lax.stop_gradient(jnp.sign(w) - w),
        ),
        1,
    ),
    ids=("product", "triangle", "where", "softplus", "straight_through"),
)
def test_memory_of_masks_and_parametrisations(used):
    weight = normal(jr.key(0), (SIZE, SIZE), jnp.float32)
    plain = temporaries(lambda w, x: total(w @ x), weight, XS)
    # The weights that are used, the slopes, and their squares.
    assert temporaries(lambda w, x: total(used(w) @ x), weight, XS) <= plain + 4 * 4 * (
        SIZE**2
    )
    assert plain < FORMED / 10


@pytest.mark.cpu
@pytest.mark.matrix
def test_memory_of_stacked_layers():
    ws = [normal(key, (SIZE, SIZE), jnp.float32) for key in jr.split(jr.key(0), 4)]
    step = lambda x, w: (jnp.tanh(w @ x), None)
    scanned = lambda ws, x: total(lax.scan(step, x, ws)[0])
    before = temporaries(scanned, jnp.stack(ws), XS)
    for stack in (jnp.stack, lambda ws: jnp.concatenate([w[None] for w in ws])):
        after = temporaries(lambda ws, x, stack=stack: scanned(stack(ws), x), ws, XS)
        # The stack, its gradient, and the factors of each layer.
        assert after <= before + 3 * 4 * 4 * SIZE**2
    assert before < FORMED


@pytest.mark.cpu
@pytest.mark.matrix
def test_hessian_of_a_penalty_is_no_dearer():
    small = eqx.nn.MLP(8, 4, 16, 1, key=jr.key(0))
    arrays, static = eqx.partition(small, eqx.is_array)
    xs = XS[:, :8]

    def needed(fun):
        hessian = filter_hessian(fun, in_axes=0, flat=True)
        run = lambda arrays, xs: hessian(eqx.combine(arrays, static), xs)[0]
        return memory(run, arrays, xs).temp_size_in_bytes

    plain = needed(lambda m, x: total(m(x)))
    size = sum(x.size for x in jax.tree.leaves(arrays))
    assert needed(lambda m, x: total(m(x)) + squares(m)) <= plain + 4 * size**2
