"""Products with the matrices of groups, mapped over examples that share these."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch._base.jaxprs import equations_in
from eqxbatch._base.ragged import with_mapped_products
from ..experts import masked_products, ragged_dot
from ..helpers import normal, thinned


pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.versions]

NUM, ROWS, GROUPS, WIDTH = 4, 5, 3, 2
# All rows, one group only, rows in no group, and no row in any group.
SIZES = np.asarray([[1, 0, 4], [0, 5, 0], [1, 2, 0], [0, 0, 0]], np.int32)


def arrays():
    lhs = normal(jr.key(0), (NUM, ROWS, WIDTH), float)
    rhs = normal(jr.key(1), (NUM, GROUPS, WIDTH, WIDTH), float)
    return lhs, rhs, SIZES


def with_maps(fun, *args):
    """`fun` of such arrays, which can be mapped."""
    closed = with_mapped_products(jax.make_jaxpr(fun)(*args))
    assert not any(
        eqn.primitive.name == "ragged_dot_general" for eqn in equations_in(closed)
    )
    return lambda *args: jex.jaxpr_as_fun(closed)(*args)[0]


def loss(lhs, rhs, sizes):
    return jnp.sum(jnp.sin(ragged_dot(lhs, rhs, sizes)))


def close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


DERIVATIVES = {
    "value": lambda fun: fun,
    "gradient": lambda fun: jax.grad(fun, (0, 1)),
    "hessian": lambda fun: jax.hessian(fun, (0, 1)),
    "reverse_of_reverse": lambda fun: jax.jacrev(jax.grad(fun, (0, 1)), (0, 1)),
}
AXES = [
    (lhs, rhs, sizes)
    for lhs in (0, None)
    for rhs in (None, 0)
    for sizes in (0, None)
    if (lhs, rhs, sizes) != (None, None, None)
]


@pytest.mark.parametrize(("name", "axes"), thinned([*DERIVATIVES], AXES))
def test_any_inputs_are_mapped(name, axes):
    pairs = [*zip(arrays(), axes, strict=True)]
    args = [x[0] if axis is None else x for x, axis in pairs]
    derivative = DERIVATIVES[name]
    run = with_maps(loss, *(x[0] for x in arrays()))
    got = jax.jit(jax.vmap(derivative(run), axes))(*args)
    with masked_products():
        expected = jax.jit(jax.vmap(derivative(loss), axes))(*args)
    close(got, expected)


@jax.custom_jvp
def rounded(lhs, rhs, sizes):
    return lax.ragged_dot(lhs, rhs, sizes)


@rounded.defjvp
def _rounded_jvp(primals, tangents):
    return rounded(*primals), tangents[0] @ jnp.ones((WIDTH, WIDTH))


def within(call):
    product = lambda rhs, sizes: lambda x: jnp.tanh(lax.ragged_dot(x, rhs, sizes))
    return lambda lhs, rhs, sizes: jnp.sum(call(product(rhs, sizes), lhs) ** 2)


WITHIN = {
    "jit": within(lambda product, x: jax.jit(product)(x)),
    "checkpoint": within(lambda product, x: jax.checkpoint(product)(x)),
    "scan": within(
        lambda product, x: lax.scan(lambda c, _: (product(c) + c, None), x, None, 2)[0]
    ),
    "cond": within(
        lambda product, x: lax.cond(x[0, 0] > 0, product, lambda x: product(2 * x), x)
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_products_within_other_programs(name):
    fun, (lhs, rhs, sizes) = WITHIN[name], arrays()
    rhs = rhs[0]
    gradient = lambda fun: jax.grad(fun, (0, 1))
    run = with_maps(fun, lhs[0], rhs, sizes[0])
    got = jax.jit(jax.vmap(gradient(run), (0, None, 0)))(lhs, rhs, sizes)
    # A loop over examples, which maps nothing.
    one = lambda row: gradient(fun)(row[0], rhs, row[1])
    close(got, jax.jit(lambda rows: lax.map(one, rows))((lhs, sizes)))


def test_the_rule_of_a_custom_derivative_is_left_as_it_is():
    lhs, rhs, sizes = arrays()
    run = with_maps(rounded, lhs[0], rhs[0], sizes[0])
    axes = (0, None, 0)
    got = jax.vmap(run, axes)(lhs, rhs[0], sizes)
    with masked_products():
        close(got, jax.vmap(ragged_dot, axes)(lhs, rhs[0], sizes))
    gradient = jax.grad(lambda *args: jnp.sum(run(*args)))
    with pytest.raises(NotImplementedError, match="ragged_dot vmap"):
        jax.vmap(gradient, axes)(lhs, rhs[0], sizes)


# For each, the axes of both sides, the dimensions, and the groups' axis.
ARRANGED = {
    "groups_last": ("mk", "kng", (((1,), (0,)), ((), ())), 0, 2),
    "rows_in_the_middle": ("umk", "gnk", (((2,), (2,)), ((), ())), 1, 0),
    "two_summed": ("kml", "lgnk", (((0, 2), (3, 0)), ((), ())), 1, 1),
    "none_summed": ("mk", "gn", (((), ()), ((), ())), 0, 0),
}
LENGTHS = {"m": ROWS, "k": 2, "l": 3, "n": 2, "u": 2, "g": GROUPS}


@pytest.mark.parametrize("name", ARRANGED)
def test_axes_in_any_order(name):
    left, right, dims, rows, groups = ARRANGED[name]
    shape = lambda axes: tuple(LENGTHS[axis] for axis in axes)
    lhs = normal(jr.key(2), (NUM, *shape(left)), float)
    rhs = normal(jr.key(3), shape(right), float)
    numbers = lax.RaggedDotDimensionNumbers(dims, [rows], [groups])
    one = lambda lhs, sizes: lax.ragged_dot_general(lhs, rhs, sizes, numbers)
    run = with_maps(one, lhs[0], SIZES[0])
    got = jax.jit(jax.vmap(run))(lhs, SIZES)
    row, ends = np.arange(ROWS)[:, None], np.cumsum(SIZES, 1)[:, None]
    is_in = (row < ends) & (row >= ends - SIZES[:, None])
    out = "".join(
        x for x in left + right if x in "munk" and (left + right).count(x) < 2
    )
    out = out if "k" in out else out.replace("g", "")
    expected = np.einsum(f"z{left},{right},zmg->z{out}", lhs, rhs, is_in)
    close(got, expected)


def test_sizes_of_few_bits():
    # The ends of the groups do not fit into the dtype of their sizes.
    sizes = np.asarray([[200, 100], [250, 50]], np.uint8)
    lhs, rhs = np.ones((2, 300, 1)), np.asarray([1.0, 2.0]).reshape(2, 1, 1)
    run = with_maps(
        lambda lhs, sizes: lax.ragged_dot(lhs, rhs, sizes), lhs[0], sizes[0]
    )
    got = jax.jit(jax.vmap(run))(lhs, sizes)[..., 0]
    close(got, np.asarray([[1.0] * 200 + [2.0] * 100, [1.0] * 250 + [2.0] * 50]))


def test_rows_of_integers():
    _, rhs, sizes = arrays()
    lhs = np.arange(NUM * ROWS * WIDTH, dtype=np.int8).reshape(NUM, ROWS, WIDTH)
    one = lambda rhs, lhs, sizes: jnp.sum(
        jnp.sin(lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=np.float64))
    )
    run = with_maps(one, rhs[0], lhs[0], sizes[0])
    got = jax.jit(jax.vmap(jax.grad(run), (None, 0, 0)))(rhs[0], lhs, sizes)
    of_row = lambda row: jax.grad(one)(rhs[0], *row)
    close(got, jax.jit(lambda rows: lax.map(of_row, rows))((lhs, sizes)))


@pytest.mark.parametrize("groups", (0, 1))
def test_few_groups_and_rows(groups):
    rhs, sizes = np.ones((groups, 2, 3)), np.ones((NUM, groups), np.int32)
    one = lambda lhs, sizes: lax.ragged_dot(lhs, rhs, sizes)
    for rows in (0, 2):
        lhs = np.ones((NUM, rows, 2))
        run = with_maps(one, lhs[0], sizes[0])
        expected = np.zeros((NUM, rows, 3))
        expected[:, :groups] = 2
        close(jax.vmap(run)(lhs, sizes), expected)


def test_what_is_left_as_it_is():
    # Batches, and rows that are summed over.
    batched = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])
    summed = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    lhs, rhs, sizes = arrays()
    for args, numbers in (
        ((lhs, rhs, sizes), batched),
        ((lhs[0], lhs[1], sizes[0]), summed),
    ):
        run = lambda *args, numbers=numbers: lax.ragged_dot_general(*args, numbers)
        closed = jax.make_jaxpr(run)(*args)
        assert with_mapped_products(closed) is closed
        with pytest.raises(NotImplementedError, match="ragged_dot vmap"):
            jax.vmap(jex.jaxpr_as_fun(closed), (0, None, None))(
                args[0][None], *args[1:]
            )
