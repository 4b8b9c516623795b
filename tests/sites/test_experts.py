"""Sites of the matrices of groups, as those of experts, which examples share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch import explain_sites, filter_micro_grad, Sum
from ..experts import ragged_dot
from ..helpers import normal, thinned, variants
from ..layers import Case, weight
from .contractions import contraction_errors
from .oracle import compare


pytestmark = pytest.mark.usefixtures("x64")

ROWS, GROUPS, WIDTH = 6, 3, 4


class Experts(eqx.Module):
    """Each token goes to two experts of two layers, which a router chooses."""

    router: jax.Array
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        gates, chosen = lax.top_k(jax.nn.softmax(x @ self.router), 2)
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=self.up.shape[0])
        hidden = jnp.tanh(ragged_dot(x[order // 2], self.up, sizes))
        y = ragged_dot(hidden, self.down, sizes) * gates.reshape(-1)[order][:, None]
        return jnp.zeros_like(x).at[order // 2].add(y)


def model():
    return Experts(weight(WIDTH, 5), weight(5, WIDTH, 2), weight(5, 2, WIDTH) / 2)


def sizes_of(x):
    """The sizes of groups, of all rows, some or none of them, or of more."""
    return jnp.clip(2 * jnp.abs(x[0, :GROUPS]), 0, 3).astype(jnp.int32)


def vectors(num=ROWS):
    return lambda key: normal(key, (num, WIDTH), float)


def wave(x):
    return lax.complex(jnp.cos(x), jnp.sin(x))


def stack(ws, x):
    """A loop over layers of experts, each of which is rematerialised."""
    step = jax.checkpoint(lambda x, w: (x + jnp.tanh(ragged_dot(x, w, of_all)), None))
    return lax.scan(step, x, ws)[0]


of_all = np.asarray([2, 0, 4], np.int32)


USES = {
    "sizes_of_the_example": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: ragged_dot(x, w, sizes_of(x)),
        vectors(),
    ),
    "one_row": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: ragged_dot(x, w, sizes_of(x)),
        vectors(1),
    ),
    "more_than_all_rows": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: ragged_dot(x, w, sizes_of(x)),
        vectors(2),
    ),
    "routed": (model(), lambda m, x: m(x), vectors(3)),
    "layers": (weight(2, GROUPS, WIDTH, WIDTH), stack, vectors()),
    "in_each_step": (
        weight(GROUPS, WIDTH, WIDTH),
        lambda w, x: lax.scan(
            lambda x, _: (jnp.tanh(ragged_dot(x, w, of_all)), None), x, None, 3
        )[0],
        vectors(),
    ),
    "transposed": (
        weight(WIDTH, GROUPS, 2),
        lambda w, x: ragged_dot(x, 2 * w.transpose(1, 0, 2), sizes_of(x)),
        vectors(),
    ),
    "tied": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: ragged_dot(
            jnp.tanh(ragged_dot(x, w, sizes_of(x))), w.swapaxes(1, 2), sizes_of(x)
        ),
        vectors(),
    ),
    "looked_up_too": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: ragged_dot(x, w, sizes_of(x)) + w[sizes_of(x) % GROUPS].sum(),
        vectors(),
    ),
    "all_experts_too": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: (
            ragged_dot(x, w, sizes_of(x)) + jnp.einsum("mk,gkn->mgn", x, w).sum(1)
        ),
        vectors(),
    ),
    "decayed": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: ragged_dot(x, w, sizes_of(x)).sum() + jnp.sum(w**2),
        vectors(),
    ),
    "masked": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: ragged_dot(x, jnp.tanh(w), sizes_of(x)),
        vectors(),
    ),
    "in_a_branch": (
        weight(GROUPS, WIDTH, 2),
        lambda w, x: lax.cond(
            x[0, 0] > 0,
            lambda: ragged_dot(x, w, sizes_of(x)),
            lambda: jnp.sin(ragged_dot(2 * x, w, of_all)),
        ),
        vectors(),
    ),
    "complex": (
        lax.complex(weight(GROUPS, WIDTH, 2), -weight(GROUPS, WIDTH, 2)),
        lambda w, x: ragged_dot(wave(x), w, sizes_of(x)),
        vectors(),
    ),
    "several_of_many": (
        weight(GROUPS, WIDTH, WIDTH),
        lambda w, x: sum(
            ragged_dot(jnp.sin(float(i) * x), w, (sizes_of(x) + i) % 3)
            for i in range(18)
        ),
        vectors(2),
    ),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", variants(USES, "in_each_step", "transposed", "masked"))
def test_use(name):
    program, comparable = compare(Case(*USES[name]))
    assert not program.fallbacks
    assert all(comparable)
    assert any(x.kind == "ragged_dot" for x in program.places)


def routed(model, x, label):
    return jnp.sum((jnp.sin(model(x)) - label) ** 2)


def batch(num):
    return normal(jr.key(5), (num, ROWS, WIDTH), float), normal(
        jr.key(6), (num,), float
    )


def gradients_in_a_loop(fun, model, *args):
    """Those of each example, by JAX, which maps nothing."""
    one = lambda row: jax.grad(fun)(model, *row)
    return jax.jit(lambda rows: lax.map(one, rows))(args)


def clipped(each, bound):
    """The sum of gradients, each clipped to a norm."""
    each = [np.asarray(x, float) for x in jax.tree.leaves(each)]
    squares = [np.sum(x**2, tuple(range(1, x.ndim))) for x in each]
    scales = np.minimum(1, bound / np.maximum(np.sqrt(sum(squares)), 1e-300))
    return [np.tensordot(scales, x, 1) for x in each]


@pytest.mark.versions
@pytest.mark.parametrize(
    ("num", "method"), thinned((0, 1, 3, 4, 5, 7), ("sites", "materialise"))
)
def test_clipped_gradients_against_a_loop(num, method):
    x, labels = batch(num)
    each = gradients_in_a_loop(routed, model(), x, labels)
    settings = {"microbatch_size": 4, "method": method, "accumulator": Sum()}
    found = filter_micro_grad(routed, clip_norm=0.5, **settings)(model(), x, labels)
    for got, own in zip(jax.tree.leaves(found), clipped(each, 0.5), strict=True):
        np.testing.assert_allclose(got, own, rtol=1e-12, atol=1e-13)


@pytest.mark.versions
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_products_of_few_bits(dtype):
    x, w = (
        normal(jr.key(7), shape, float).astype(dtype)
        for shape in ((5, 6, 4), (3, 4, 2))
    )

    def loss(w, x):
        out = ragged_dot(x, w, of_all, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.sin(out))

    (expected,) = clipped(gradients_in_a_loop(loss, w, x), 0.5)
    for method in ("sites", "materialise"):
        gradient = filter_micro_grad(
            loss, clip_norm=0.5, method=method, accumulator=Sum()
        )
        got = gradient(w, x)
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, float), expected, rtol=0.02, atol=0.01
        )


def test_any_axes():
    """Groups along the last axis, and rows in the middle of three."""
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), [1], [2])
    w, x = weight(2, WIDTH, GROUPS), normal(jr.key(8), (4, 2, ROWS, WIDTH), float)

    def loss(w, x):
        out = lax.ragged_dot_general(x, w, sizes_of(x[0]), numbers)
        return jnp.sum(jnp.sin(out) * jnp.arange(1.0, 1 + out.size).reshape(out.shape))

    (expected,) = clipped(gradients_in_a_loop(loss, w, x), 0.5)
    settings = {"method": "sites", "accumulator": Sum()}
    got = filter_micro_grad(loss, clip_norm=0.5, **settings)(w, x)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
    (report,) = explain_sites(loss, w, x, in_axes=0).leaves
    assert report.reason is None


def test_rows_that_are_parameters_fall_back():
    loss = lambda ws, x: jnp.sum(ragged_dot(jnp.sin(ws[0]) * x, ws[1], of_all) ** 2)
    also = lambda ws, x: jnp.sum(ragged_dot(ws[0], ws[1], sizes_of(x)) ** 2)
    ws, x = [weight(ROWS, WIDTH), weight(GROUPS, WIDTH, 2)], batch(3)[0]
    for fun, has_rule in ((loss, [True, True]), (also, [False, True])):
        each = gradients_in_a_loop(fun, ws, x)
        got = filter_micro_grad(fun, clip_norm=1e6, method="sites")(ws, x)
        for a, b in zip(got, each, strict=True):
            np.testing.assert_allclose(a, np.mean(b, 0), rtol=1e-12, atol=1e-13)
        leaves = explain_sites(fun, ws, x, in_axes=0).leaves
        assert [leaf.reason is None for leaf in leaves] == has_rule
    assert "no rule for `ragged_dot`" in leaves[0].reason


@pytest.mark.matrix
@pytest.mark.parametrize("name", ("sizes_of_the_example", "routed", "layers"))
def test_second_derivatives_and_kernels(name):
    case = Case(*USES[name])
    xs = normal(jr.key(9), (3, *case.example(jr.key(0)).shape), float)
    for errors in contraction_errors(case.fun, case.model, xs):
        assert max(errors.values()) < 1e-10, errors
