"""Factors, Gram matrices and norms against the Jacobians themselves, in float64."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch import explain_sites, filter_micro_grad
from ..helpers import drawn, thinned, variants
from ..layers import Case, examples, LAYERS, random_network, tokens, vectors, weight
from .adapter import most_sites, Sites, with_most_sites
from .oracle import cast, compare, NUM


pytestmark = pytest.mark.usefixtures("x64")


# With the rules of others, in other dimensions or with fewer of them.
ALIKE = (
    "Linear, of a sequence",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose3d",
    "Embedding",
    "LayerNorm",
    "MultiheadAttention",
    "GRUCell, in a scan",
    "MLP",
    "SpectralNorm",
    "WeightNorm",
)


@pytest.mark.parametrize("name", variants(LAYERS, *ALIKE))
def test_layer(name):
    compare(LAYERS[name]())


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(3))
def test_random_network(seed):
    program, _ = compare(random_network(jr.key(seed)))
    assert not program.fallbacks


def linear():
    return drawn(eqx.nn.Linear, 4, 4, key=jr.key(3))


def stacked(num):
    one = lambda key: eqx.nn.Linear(3, 3, key=key)
    several = lambda key: eqx.filter_vmap(one)(jr.split(key, num))
    return drawn(several, key=jr.key(4))


def scanned(layers, x):
    arrays, static = eqx.partition(layers, eqx.is_array)
    step = lambda x, layer: (jnp.tanh(eqx.combine(layer, static)(x)), None)
    return lax.scan(step, x, arrays)[0]


def scanned_within(layers, x):
    """A scan over layers, around one that uses each of them three times."""
    arrays, static = eqx.partition(layers, eqx.is_array)

    def outer(x, layer):
        inner = lambda x, _: (jnp.tanh(eqx.combine(layer, static)(x)), x)
        return lax.scan(inner, x, None, length=3)

    return lax.scan(outer, x, arrays)


def repeated(layers, x):
    step = lambda x, _: (scanned_within(layers, x)[0], None)
    return lax.scan(step, x, None, length=2)[0]


def wave(x):
    return lax.complex(jnp.cos(x), jnp.sin(x))


@jax.custom_jvp
def odd(w, x):
    return w @ x


@odd.defjvp
def _odd_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return w @ x, 3 * (dw @ x) + w @ dx


@jax.custom_vjp
def strange(w, x):
    return w @ x


strange.defvjp(
    lambda w, x: (w @ x, (w, x)), lambda res, d: (5 * jnp.outer(d, res[1]), d @ res[0])
)


@jax.custom_vjp
def bent(w):
    return w**2


bent.defvjp(lambda w: (w**2, w), lambda w, d: (3 * w.T * d,))


# Uses whose norms follow from the factors, with no gradient formed.
BY_FACTORS = {
    "custom_jvp": (weight(4, 4), odd, vectors(4)),
    "custom_vjp": (weight(4, 4), strange, vectors(4)),
    "tied_by_transpose": (
        linear(),
        lambda m, x: m.weight.T @ jnp.tanh(m.weight @ x) + m.bias,
        vectors(4),
    ),
    "tied_embedding": (weight(7, 3), lambda w, x: w[x] @ w.T, tokens(4)),
    "tied_embedding_of_one": (weight(7, 3), lambda w, x: w @ w[x], tokens()),
    "tokens_out_of_range": (
        weight(7, 3),
        lambda w, x: jnp.take(w, x + 3, axis=0, mode="fill", fill_value=0) @ w.T,
        tokens(4),
    ),
    "tokens_below_zero": (
        weight(7, 3),
        lambda w, x: jnp.take(w, x - 10, axis=0, mode="fill", fill_value=0) @ w.T,
        tokens(4),
    ),
    "tokens_clipped": (
        weight(7, 3),
        lambda w, x: jnp.take(w, x + 3, axis=0, mode="clip") @ w.T,
        tokens(4),
    ),
    "tokens_along_another_axis": (
        weight(3, 7),
        lambda w, x: jnp.take(w, x, axis=1),
        tokens(2, 2),
    ),
    "tokens_one_by_one_along_another_axis": (
        weight(3, 7),
        lambda w, x: jax.vmap(lambda i: lax.dynamic_index_in_dim(w, i, 1, False))(x),
        tokens(4),
    ),
    "tokens_of_two_axes": (
        weight(7, 7),
        lambda w, x: w[x] @ jnp.take(w, x, axis=1),
        tokens(4),
    ),
    "one_row": (weight(1, 3), lambda w, x: w[0 * x], tokens(4)),
    "reshaped": (weight(4, 4), lambda w, x: w.reshape(2, 2, 4) @ x, vectors(4)),
    # The parameter that is added has the cotangent of the product, whose axes moved.
    "moved_and_shifted": (
        (weight(2, 3, 4), weight(3, 5, 2)),
        lambda w, x: jnp.einsum("ijk,lk->ijl", w[0], x).transpose(1, 2, 0) + w[1],
        vectors(5, 4),
    ),
    "scaled": (weight(4, 4), lambda w, x: (-w * 2 / 3 + 1) @ x, vectors(4)),
    "split": (weight(4, 4), lambda w, x: jnp.split(w, [3])[0] @ x, vectors(4)),
    "cast": (
        weight(4, 4),
        lambda w, x: w.astype(jnp.float64).T.astype(jnp.float64) @ x,
        vectors(4),
    ),
    # The sum of the squares of the rest, and of functions of them, is one number.
    "penalty": (
        (weight(4, 4), weight(3), weight(2, 2)),
        lambda w, x: (
            jnp.tanh(w[0] @ x).sum()
            + 0.1 * jnp.sum(w[0] ** 2)
            + jnp.sum(jnp.abs(w[1])) * x[0]
            + jnp.linalg.norm(w[0] @ w[0].T)
            + jnp.sqrt(jnp.sum(w[2] ** 2) + jnp.sum(w[1] ** 2))
        ),
        vectors(4),
    ),
    "masked": (
        weight(4, 4),
        lambda w, x: (
            jnp.tril(w) @ x
            + jnp.where(jnp.eye(4, dtype=bool), 0, w) @ x**2
            + (w * jnp.arange(4.0)[None]) @ x**3
        ),
        vectors(4),
    ),
    "parametrised": (
        (weight(4, 4), weight(4)),
        lambda w, x: (
            jax.nn.softplus(w[0]) @ x
            + (w[0] * jax.nn.sigmoid(w[0]) * w[0].T) @ x**2
            + jnp.exp(w[1]) * x
            + w[1] ** 3
        ),
        vectors(4),
    ),
    "straight_through": (
        weight(4, 4),
        lambda w, x: (w + lax.stop_gradient(jnp.round(w) - w)) @ x,
        vectors(4),
    ),
    "stacked": (
        [weight(3, 3) for _ in range(3)],
        lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, jnp.stack(ws))[
            0
        ],
        vectors(3),
    ),
    # What a layer is stacked with has no part in it.
    "stacked_and_taken_out": (
        [weight(3, 3), weight(3, 3), weight(2, 3)],
        lambda ws, x: (
            jnp.stack([ws[0], jnp.sin(ws[1])])[1] @ x
            + jnp.concatenate(ws)[3:6].T @ x
            + jnp.split(jnp.concatenate([ws[2], ws[0], x[None]]), [2, 5])[1] @ x
            + jnp.concatenate([ws[0], ws[2], ws[1]])[3:][:2].T @ x[:2]
        ),
        vectors(3),
    ),
    "stacked_and_parametrised": (
        [weight(2, 3, 3), weight(1, 3, 3)],
        lambda ws, x: lax.scan(
            lambda x, w: (jnp.tanh((w * jnp.exp(ws[1][0])) @ x), None),
            x,
            jnp.sinh(jnp.concatenate(ws)),
        )[0],
        vectors(3),
    ),
    "concatenated": (
        weight(4, 4),
        lambda w, x: jnp.concatenate([w * 2, -w.T + 1, jnp.outer(x, x)]) @ x,
        vectors(4),
    ),
    "among_data": (
        (weight(3), weight(7)),
        lambda w, x: jnp.square(jnp.concatenate([x[:2], w[0], x[2:]]) + w[1]),
        vectors(4),
    ),
    "divided_by": (
        (weight(4), weight(3, 1)),
        lambda w, x: jnp.tanh(x / (3 + w[0])) + (x[:3, None] / jnp.exp(w[1])).sum(0),
        vectors(4),
    ),
    "scaled_and_reversed": (
        weight(4, 4),
        lambda w, x: (3 * w)[::-1] @ x,
        vectors(4),
    ),
    "chosen_by_the_example": (
        (weight(4), weight(4)),
        lambda w, x: jnp.where(x > 0, w[0], w[1] * 2) ** 3,
        vectors(4),
    ),
    "divided": (
        weight(4),
        lambda w, x: w / (1 + x**2) + (w - x) ** 2 + (x - w) ** 3,
        vectors(4),
    ),
    "repeated": (
        weight(1, 4),
        lambda w, x: jnp.repeat(w, 3, 0) * x + w * x[:1],
        vectors(3, 4),
    ),
    "scalar": (weight(), lambda w, x: w * x + w - x / 2, vectors(4)),
    "whole_and_sliced": (
        weight(4, 4),
        lambda w, x: lax.scan(lambda x, row: (w @ x + row, None), x, w)[0],
        vectors(4),
    ),
    "scan_in_scan": (stacked(4), scanned_within, vectors(3)),
    "scan_in_scan_in_scan": (stacked(2), repeated, vectors(3)),
    "remat": (
        stacked(2),
        lambda m, x: eqx.filter_checkpoint(scanned)(m, x),
        vectors(3),
    ),
    "jit": (linear(), lambda m, x: eqx.filter_jit(m)(x), vectors(4)),
    "complex": (
        jax.lax.complex(weight(4, 4), weight(4, 4).T),
        lambda w, x: (1j * w) @ wave(x),
        vectors(4),
    ),
}

# Uses in which each example's gradient is formed, from the factors.
BY_GRADIENTS = {
    "normed": (
        weight(4, 4),
        lambda w, x: (w / jnp.sqrt(jnp.sum(w * w))) @ x,
        vectors(4),
    ),
    "product": (
        (weight(4, 2), weight(2, 4)),
        lambda w, x: (w[0] @ w[1]) @ x,
        vectors(4),
    ),
    "parts_of_several": (
        (weight(4, 4), weight(3, 4)),
        lambda w, x: (
            jnp.concatenate(w)[2:] @ x[:, None] * jnp.concatenate([w[1], w[1]])[1:]
        ),
        vectors(4),
    ),
    "same_in_all_examples": (weight(4, 4), lambda w, x: (w @ w) * x[None], vectors(4)),
    "primitives": (
        (weight(6, 6), weight(6, 6)),
        # Each of these of one of the two.
        lambda w, x: sum(
            f(w[i % 2]) @ x[:6]
            for i, f in enumerate(
                (
                    lambda v: jnp.tile(v, (2, 1))[3:9],
                    lambda v: jnp.pad(v, 1)[1:7, :6],
                    lambda v: jnp.cumsum(v, 0),
                    lambda v: jnp.fft.fft(v).real + jnp.imag(jnp.fft.fft(v.T)),
                    lambda v: jnp.zeros((7, 6)).at[1:, :].set(v)[:6],
                    lambda v: jnp.zeros((9, 6)).at[jnp.array([1, 4])].add(v[:2])[:6],
                    lambda v: lax.complex(v, v.T).real,
                    lambda v: jnp.roll(v, 2, 1) + jnp.stack([v, v.T])[1],
                    lambda v: jax.nn.softmax(v),
                    lambda v: v / jnp.linalg.norm(v, axis=1, keepdims=True),
                    lambda v: jnp.linalg.inv(v + 9 * jnp.eye(6)),
                    lambda v: lax.cond(True, jnp.sin, jnp.cos, v),
                    lambda v: lax.scan(lambda c, r: (c + r**2, c * r), v[0], v)[1],
                    lambda v: odd(v, jnp.eye(6)) + bent(v),
                )
            )
        ),
        vectors(6),
    ),
    "sliced": (
        weight(6, 6),
        lambda w, x: w[::-1] @ x + w[1:, :5].sum(0) @ x[:5] + w[:1] @ x,
        vectors(6),
    ),
    "real_part_of_the_use": (
        weight(4, 4),
        lambda w, x: w.astype(jnp.complex128) @ wave(x),
        vectors(4),
    ),
}


# Other uses of the same rules as those before them.
VARIANTS = (
    "tied_embedding_of_one",
    "tokens_below_zero",
    "tokens_clipped",
    "tokens_along_another_axis",
    "tokens_one_by_one_along_another_axis",
    "tokens_of_two_axes",
    "one_row",
    "scaled",
    "split",
    "stacked",
    "stacked_and_parametrised",
    "scaled_and_reversed",
    "repeated",
    "scalar",
    "scan_in_scan_in_scan",
)


@pytest.mark.flags
@pytest.mark.parametrize("name", variants(BY_FACTORS, *VARIANTS))
def test_use_by_factors(name):
    program, comparable = compare(Case(*BY_FACTORS[name]))
    assert all(comparable)
    assert not program.fallbacks


@pytest.mark.flags
@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_use_by_gradients(name):
    program, comparable = compare(Case(*BY_GRADIENTS[name]))
    assert not any(comparable)
    assert not program.fallbacks


# For each: a function of a matrix that has no rule and one that has, and what it says.
FALLBACKS = {
    "max": (lambda w, x: jnp.maximum(w, x[:, None]), "no rule for `max`"),
    "returned_by_cond": (
        lambda w, x: lax.cond(x[0] > 0, lambda: w @ w[0], lambda: w @ x),
        "a `cond` returns a parameter",
    ),
    "carried": (
        lambda w, x: lax.scan(lambda w, a: (w * a, w @ x), w, x)[1],
        "carried through a `scan`",
    ),
    "returned_by_scan": (
        lambda w, x: lax.scan(lambda x, _: (w @ x, w), x, None, length=2)[1],
        "a `scan` returns a parameter",
    ),
    "tables": (
        lambda w, x: jax.vmap(lambda row, i: row[i])(w, jnp.argsort(x)),
        "no rule for `gather`",
    ),
    "data_kernel": (
        lambda w, x: lax.conv(
            w[None, None], jnp.outer(x, x)[None, None], (1, 1), "SAME"
        ),
        "no rule for `conv_general_dilated`",
    ),
}


def test_leaves_without_a_rule_fall_back_alone():
    def fun(ws, x):
        return {name: (use(ws[name], x), ws["other"] @ x) for name, (use, _) in pairs}

    pairs = FALLBACKS.items()
    leaves = {name: weight(4, 4) for name in (*FALLBACKS, "other")}
    program, comparable = compare(Case(leaves, fun, vectors(4)))
    # Leaves are in the order of their names.
    reasons = {sorted(leaves).index(name): reason for name, (_, reason) in pairs}
    assert {*program.fallbacks} == {*reasons}
    for leaf, reason in reasons.items():
        assert reason in program.fallbacks[leaf]
    # Their own sites are the leaves themselves, whose cotangents are the gradients.
    assert all(comparable)


def test_many_uses_are_the_steps_of_a_loop():
    num = 5

    def unrolled(w, x):
        for i in range(num):
            x = jnp.tanh(w[0] @ x + w[1]) + (w[0].T @ x) * (i % 2)
        return x

    with with_most_sites(num - 1):
        _, comparable = compare(Case((weight(4, 4), weight(4)), unrolled, vectors(4)))
        assert comparable == [True, True]
        leaves = explain_sites(
            unrolled, (weight(9, 9), weight(9)), weight(9), in_axes=None
        ).leaves
    assert [leaf.contraction for leaf in leaves] == ["factors", "gradient"]
    assert len(leaves[1].sites) == num


def test_many_uses_of_one_number():
    def penalised(w, x):
        penalty = jnp.sum(w**2)
        for _ in range(2):
            x = jnp.sin(x + penalty)
        return x

    with with_most_sites(1):
        compare(Case(weight(2), penalised, vectors(2)))
        report = explain_sites(
            lambda w, x: jnp.sum(penalised(w, x)), weight(8), weight(4), in_axes=None
        )
    assert [leaf.contraction for leaf in report.leaves] == ["gradient"]


@pytest.mark.matrix
def test_many_different_uses_have_no_gram_matrices():
    # Their number of pairs is what a trace would take its time for.
    def unrolled(w, x):
        for i in range(most_sites() + 1):
            x = jnp.tanh((w[: 2 + i, : 2 + i] * (1 + i)) @ jnp.resize(x, 2 + i))
        return x

    (leaf,) = explain_sites(unrolled, weight(32, 32), weight(4), in_axes=None).leaves
    assert len(leaf.sites) == most_sites() + 1
    assert leaf.contraction == "gradient"


def _layers(w, x):
    for i in range(3):
        x = jnp.tanh(w[i] @ x)
    return x


def _flat(w, x):
    x = jnp.tanh(w[:16].reshape(4, 4) @ x + w[32:36])
    return w[16:32].reshape(4, 4) @ x + w[36:40]


def _split(w, x):
    first, second, last = jnp.split(w, [4, 6])
    return jnp.tanh(second @ jnp.tanh(first @ x)) * jnp.sum(last, 0)[:2]


def _scaled(w, x):
    x, whole = x.astype(w.dtype), -2.0 * w.T
    return jnp.tanh(whole[:, :3].T @ x)[0] * (whole[:, 3:].T @ x) + 1.5 * whole[0, 3]


def _tables(w, x):
    rows = jnp.round(4 * x).astype(int) % 5
    return jnp.take(w[:5], rows, 0) * jnp.take(w[5:], rows, 0)[::-1]


def _nested(w, x):
    rest = w[2:]
    return jnp.tanh(rest[:3] @ x) * (w[:2] @ x)[0] + rest[3:, 0].sum() * (rest[3:] @ x)


def _overlapping(w, x):
    return jnp.tanh(w[:4] @ x) * (w[2:] @ x) + jnp.tanh(w[::2] @ x)[:1]


def _across(w, x):
    return jnp.tanh(w[:2] @ x) * (w[:, 2:] @ x[2:])[:2]


def _in_steps(w, x):
    step = lambda x, v: (jnp.tanh(v @ x), None)
    first, _ = jax.lax.scan(step, x, w[:2])
    return w[2] @ first + jax.lax.scan(step, x, w[3:])[0]


@pytest.mark.parametrize(
    ("fun", "shape", "dtype", "form"),
    (
        pytest.param(_layers, (3, 4, 4), float, "factors", marks=pytest.mark.matrix),
        pytest.param(_flat, (40,), float, "factors"),
        pytest.param(_split, (9, 4), float, "factors", marks=pytest.mark.matrix),
        pytest.param(_scaled, (6, 4), float, "factors", marks=pytest.mark.matrix),
        pytest.param(_scaled, (6, 4), complex, "gradient", marks=pytest.mark.matrix),
        pytest.param(_tables, (10, 3), float, "factors", marks=pytest.mark.matrix),
        pytest.param(_nested, (8, 4), float, "gradient", marks=pytest.mark.matrix),
        pytest.param(_in_steps, (5, 4, 4), float, "factors", marks=pytest.mark.matrix),
        pytest.param(_overlapping, (6, 4), float, "gradient"),
        pytest.param(_across, (6, 4), float, "gradient"),
    ),
)
def test_slices_with_no_entry_in_common(fun, shape, dtype, form):
    w = jr.normal(jr.key(0), shape, dtype)
    _, comparable = compare(Case(w, fun, vectors(4)))
    assert comparable == [form == "factors"]


@pytest.mark.cpu
def test_layers_of_one_array_take_the_memory_of_their_factors():
    w, x = weight(4, 64, 64), jnp.ones((256, 64))

    def loss(w, x):
        for i in range(4):
            x = jnp.tanh(w[i] @ x)
        return jnp.sum(x)

    def temporaries(method):
        grad = filter_micro_grad(loss, clip_norm=1.0, method=method)
        program = jax.jit(lambda w, x: grad(w, x)).lower(w, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert explain_sites(loss, w, x).method == "sites"
    assert temporaries("auto") < temporaries("materialise") / 2


def test_effects_keep_the_function_whole(capfd):
    def fun(w, x):
        jax.debug.print("seen {}", x[0])
        return w @ x

    program, _ = compare(Case(weight(4, 4), fun, vectors(4)))
    assert "side effects" in program.fallbacks[0]
    jax.effects_barrier()
    assert "seen" in capfd.readouterr().out


def test_unused_leaf():
    program, _ = compare(
        Case((weight(2), weight(4)), lambda w, x: w[1] * x, vectors(4))
    )
    assert not program.is_used(0)
    report = explain_sites(
        lambda w, x: w[1] * x, (weight(2), weight(4)), weight(4), in_axes=None
    )
    assert [leaf.contraction for leaf in report.leaves] == ["none", "factors"]


@pytest.mark.matrix
def test_leaf_of_size_zero():
    compare(
        Case(
            (weight(0, 4), weight(4)),
            lambda w, x: w[1] * x + (w[0] @ x).sum(),
            vectors(4),
        )
    )


CONTRACTED = ("Conv2d, in groups", "Embedding, of a sequence")


@pytest.mark.parametrize(
    ("form", "name"),
    thinned(
        ("factors", "once", "twice", "derivative"),
        ("Conv2d, in groups", "MultiheadAttention", "Embedding, of a sequence"),
    ),
)
def test_all_contractions_agree(name, form):
    model, fun, _ = case = LAYERS[name]()
    diff, static = eqx.partition(cast(model), eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(diff)
    xs = cast(examples(case, jr.key(1), NUM))
    loss = lambda leaves, x: jnp.sum(
        jnp.sin(fun(eqx.combine(treedef.unflatten(leaves), static), x))
    )
    one = np.asarray(xs)[0]
    sites = Sites.of(lambda ws, rows: loss(ws, *rows), leaves, [one])
    if form == "derivative":
        sites = sites.without_rules()
    kind = {"once": "gradient kept", "twice": "gradient"}
    kind |= {"factors": "factors", "derivative": "derivative kept"}
    assert {*sites.forms(form)} == {kind[form]}
    is_kept, weights = jnp.array([True, False, True]), jnp.arange(1.0, NUM + 1)

    @jax.jit
    def run(xs):
        return sites.examples(leaves, [xs]).contracted(form, weights, is_kept)

    norms, sums = run(xs)
    truth = jax.device_get(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(leaves, xs))
    for norm, total, true in zip(norms, sums, truth, strict=True):
        expected = np.sum(true.reshape(NUM, -1) ** 2, 1)
        np.testing.assert_allclose(norm, expected, rtol=1e-10)
        expected = np.tensordot(np.array([1.0, 0.0, 3.0]), true, 1)
        np.testing.assert_allclose(total, expected, rtol=1e-10, atol=1e-12)


def forms(model, fun, x):
    report = explain_sites(fun, model, x, in_axes=None)
    return {leaf.path: leaf.contraction for leaf in report.leaves}


def test_choice_follows_the_shapes():
    wide = drawn(eqx.nn.Linear, 64, 64, use_bias=False, key=jr.key(0))
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float64)
    mapped = lambda m, x: jnp.sum(jnp.tanh(jax.vmap(m)(x)))
    # Few positions: two small factors. Many: the gradient is smaller than they are.
    assert forms(wide, mapped, struct(2, 64)) == {".weight": "factors"}
    assert forms(wide, mapped, struct(512, 64)) == {".weight": "gradient"}
    conv = drawn(eqx.nn.Conv2d, 3, 4, 3, use_bias=False, key=jr.key(0))
    assert forms(conv, lambda m, x: jnp.sum(m(x) ** 2), struct(3, 16, 16)) == {
        ".weight": "gradient"
    }
    table = drawn(eqx.nn.Embedding, 1000, 8, key=jr.key(0))
    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    assert forms(table, mapped, ids) == {".weight": "factors"}


def test_auto_takes_what_costs_less():
    wide = drawn(eqx.nn.Linear, 64, 64, key=jr.key(0))
    report = explain_sites(
        lambda m, x: jnp.sum(m(x) ** 2), wide, jnp.ones(64), in_axes=None
    )
    assert report.method == "sites"
    assert report.bytes < report.materialised_bytes
    # One weight at very many positions: its factors are all that is large.
    scalar = eqx.nn.PReLU()
    report = explain_sites(
        lambda m, x: jnp.sum(m(x)), scalar, jnp.ones(10_000), in_axes=None
    )
    assert report.method == "materialise"
    assert report.bytes >= report.materialised_bytes
    # A norm and a direction are computed from one gradient of the weight together.
    normed = eqx.nn.WeightNorm(wide)
    report = explain_sites(
        lambda m, x: jnp.sum(m(x) ** 2), normed, jnp.ones(64), in_axes=None
    )
    assert report.method == "materialise"


def test_report():
    model = (linear(), weight(3), weight())
    fun = lambda m, x: jnp.sum(m[0](m[0](x))) + jnp.max(m[1]) * jnp.maximum(-m[2], x[0])
    report = explain_sites(fun, model, jnp.ones(4), in_axes=None)
    shown = [(leaf.path, leaf.shape, leaf.sites) for leaf in report.leaves]
    assert shown == [
        ("[0].weight", (4, 4), ("dot_general", "dot_general")),
        ("[0].bias", (4,), ("add", "add")),
        ("[1]", (3,), ("mul",)),
        ("[2]", (), ()),
    ]
    text = str(report)
    assert "2 x dot_general" in text
    *_, place, factors = text.splitlines()
    assert place.startswith("[2]: no rule for `max` with a parameter in this place, at")
    assert factors.startswith(
        "[1]: no Kronecker factors, as it is used after `reduce_max`"
    )
    assert re.search(r"at test_sites\.py:\d+ in `.*<lambda>`, after `neg`$", place)
    assert f'method="auto" is "{report.method}"' in text
    lines = text.splitlines()
    assert len(lines[1]) == max(map(len, lines[:7]))


def test_report_of_a_function_that_returns_its_parameter():
    (leaf,) = explain_sites(lambda w, x: w, weight(2), weight(2), in_axes=None).leaves
    assert leaf.contraction == "derivative"
    assert leaf.reason == "the function returns the parameter itself"


def test_report_of_nothing():
    with pytest.raises(ValueError, match="`model` has no arrays of an inexact dtype"):
        explain_sites(lambda m, x: x, jnp.arange(3), jnp.ones(4), in_axes=None)


def test_what_is_added_shares_the_cotangent_of_what_it_is_added_to():
    model = drawn(eqx.nn.MLP, 4, 3, 5, 2, key=jr.key(0))
    diff, static = eqx.partition(model, eqx.is_array)

    def perturbations(call):
        fun = lambda diff, rows: call(eqx.combine(diff, static), *rows)
        sites = Sites.of(fun, diff, [jnp.ones(4)])
        assert not sites.fallbacks
        return len(sites.sizes)

    assert perturbations(lambda model, x: model(x)) == 3

    def reused(model, x):
        # The product is used once more, so its cotangent is not that of the sum.
        y = model.layers[0].weight @ x
        return (y + model.layers[0].bias) * y

    assert perturbations(reused) == 2
    # Subtracted from it is as good as added, but not the other way round.
    bias = lambda model: model.layers[0].bias
    product = lambda model, x: model.layers[0].weight @ x
    assert perturbations(lambda model, x: jnp.sin(product(model, x) - bias(model))) == 1
    assert perturbations(lambda model, x: jnp.sin(bias(model) - product(model, x))) == 2
