"""Hessians, their parts, and Gauss-Newton matrices against what JAX says of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from eqxbatch import (
    filter_ggn,
    filter_hessian,
    filter_hessian_blocks,
    filter_hessian_diagonal,
    filter_hvp,
    hessian_to_pytree,
    Mean,
    Sum,
)
from ..helpers import assert_bits, assert_same, BLOCK, drawn, normal, spread, thinned
from ..layers import LAYERS
from .oracle import (
    batch,
    CHOICES,
    close,
    compare,
    count,
    dense,
    error,
    matrix_of,
    mean_of,
    METHODS,
    network,
    of_each,
)


@pytest.mark.matrix
@pytest.mark.usefixtures("x64")
class TestTruth:
    @pytest.mark.parametrize(
        ("method", "total"),
        (*(("sites", total) for total in (1, BLOCK, 13)), ("products", 13)),
    )
    def test_any_number_of_examples(self, method, total, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 13)
        each = jax.device_get(of_each(model, x, y))
        expected = jax.tree.map(lambda x: np.mean(x[:total], 0), each)
        x, y = [jnp.asarray(np.asarray(a)[:total]) for a in (x, y)]
        hessian = filter_hessian(error, in_axes=0, microbatch_size=BLOCK, method=method)
        close(hessian(model, x, y), expected)

    @pytest.mark.parametrize("method", METHODS)
    def test_no_examples(self, method, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 0)
        settings = {"in_axes": 0, "method": method, "flat": True}
        total, _ = filter_hessian(error, accumulator=Sum(), **settings)(model, x, y)
        np.testing.assert_array_equal(total, np.zeros_like(total))
        mean, _ = filter_hessian(error, **settings)(model, x, y)
        assert np.isnan(mean).all()

    @pytest.mark.parametrize(
        ("method", "size"),
        (*(("products", size) for size in (1, 4, 10, 11)), ("sites", 4)),
    )
    def test_any_number_of_columns(self, method, size, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        assert count(model) == 10
        expected = dense(error, model, x, y)
        settings = {"block_size": size, "method": method}
        close(filter_hessian(mean_of(error), **settings)(model, x, y), expected)
        if size in (4, 11):
            hessian = filter_hessian(error, in_axes=0, **settings)
            close(hessian(model, x, y), expected)

    @pytest.mark.parametrize("num", (3, 100))
    def test_number_of_blocks(self, num, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        hessian = filter_hessian(mean_of(error), num_blocks=num)
        close(hessian(model, x, y), dense(error, model, x, y))

    # Gradients and products with Hessians of all: `tests/sites/test_sites.py`.
    @pytest.mark.parametrize(
        "name",
        (
            "Conv2d, in groups",
            "ConvTranspose2d",
            "Embedding, of a sequence",
            "GroupNorm",
            "PReLU",
            "MultiheadAttention",
            "LSTMCell, in a scan",
            "WeightNorm",
        ),
    )
    def test_layer(self, name):
        compare(LAYERS[name]())

    @pytest.mark.parametrize("method", CHOICES)
    def test_rosenbrock(self, method):
        def rosenbrock(x):
            return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

        # The second derivatives of the function as they are written in textbooks.
        x = np.linspace(-1.2, 1.0, 7)
        expected = np.diag([*(1200 * x[:-1] ** 2 - 400 * x[1:] + 2), 0.0])
        expected += np.diag([0.0, *([200.0] * 6)])
        expected += np.diag(-400 * x[:-1], 1) + np.diag(-400 * x[:-1], -1)
        got = filter_hessian(rosenbrock, method=method, block_size=3)(jnp.asarray(x))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
        diagonal = filter_hessian_diagonal(rosenbrock, method=method)(jnp.asarray(x))
        np.testing.assert_allclose(diagonal, np.diag(expected), rtol=1e-12)

    @pytest.mark.parametrize("method", CHOICES)
    def test_quadratic_form(self, method, getkey):
        matrix = normal(getkey(), (6, 6), float)
        x = {"a": normal(getkey(), (2, 2), float), "b": normal(getkey(), (2,), float)}

        def form(x):
            flat = jnp.concatenate([x["a"].reshape(-1), x["b"]])
            return flat @ matrix @ flat

        got, _ = filter_hessian(form, flat=True, method=method)(x)
        np.testing.assert_allclose(got, matrix + matrix.T, rtol=1e-12)

    def test_linear_function_has_none(self, getkey):
        x = normal(getkey(), (3,), float)
        for method in METHODS:
            got = filter_hessian(lambda w, x: jnp.sum(w * x), method=method)(x, x)
            np.testing.assert_array_equal(got, np.zeros((3, 3)))

    @pytest.mark.parametrize(
        ("method", "activation"),
        (
            *(("sites", function) for function in (jax.nn.relu, jax.nn.gelu)),
            *(("products", function) for function in (jax.nn.relu, jnp.tanh)),
            ("auto", jax.nn.gelu),
        ),
    )
    def test_activations(self, method, activation, getkey):
        # Also where the derivative of relu is a matter of convention.
        model = network(getkey(), activation=activation, use_bias=True)
        x, y = batch(getkey(), 5)
        x = x.at[0].set(0.0)
        model = eqx.tree_at(
            lambda m: m.layers[0].bias, model, jnp.zeros(3), is_leaf=lambda x: x is None
        )
        expected = dense(error, model, x, y)
        close(filter_hessian(error, in_axes=0, method=method)(model, x, y), expected)


@pytest.mark.usefixtures("x64")
class TestParameters:
    def test_products_of_parameters(self, getkey):
        model = {
            "left": normal(getkey(), (4, 2), float),
            "right": normal(getkey(), (2, 3), float),
            "square": normal(getkey(), (3, 3), float),
            "scale": jnp.array(1.5),
        }

        def loss(model, x):
            weight = model["left"] @ model["right"] * model["scale"]
            out = jnp.tanh(weight @ (model["square"] @ model["square"].T @ x))
            return jnp.sum(out**2)

        x = normal(getkey(), (5, 3), float)
        got = filter_hessian(loss, in_axes=0, method="sites")(model, x)
        close(got, dense(loss, model, x))

    def test_mixed_ways(self, getkey):
        # Its first array has no rule, its second has one, and its third is not used.
        model = {
            "a": normal(getkey(), (3,), float),
            "b": normal(getkey(), (4, 3), float),
        }
        model["c"] = jnp.zeros(2)

        def loss(model, x):
            return jnp.sum(jnp.tanh(model["b"] @ (jnp.sin(model["a"]) * x)) ** 2)

        x = normal(getkey(), (5, 3), float)
        expected = dense(loss, model, x)
        for method in ("sites", "auto"):
            hessian = filter_hessian(loss, in_axes=0, method=method, block_size=2)
            close(hessian(model, x), expected)

    def test_weights_are_shared(self, getkey):
        cell = drawn(eqx.nn.Linear, 3, 3, key=getkey())
        x = normal(getkey(), (4, 3), float)

        def loss(cell, x):
            for _ in range(3):
                x = jnp.tanh(cell(x))
            return jnp.sum(x**2)

        expected = dense(loss, cell, x)
        settings = {"in_axes": 0, "method": "sites"}
        close(filter_hessian(loss, **settings)(cell, x), expected)
        diagonal = filter_hessian_diagonal(loss, **settings)(cell, x)
        close(diagonal.bias, np.diagonal(expected.bias.bias))

    def test_where(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        last = lambda model: model.layers[-1]
        full = dense(error, model, x, y)
        own = jax.tree.map(
            last, last(full), is_leaf=lambda x: isinstance(x, eqx.nn.MLP)
        )
        settings = {"in_axes": 0, "where": last}
        got = filter_hessian(error, method="products", **settings)(model, x, y)
        assert got.layers[0].weight is None
        close(jtu.tree_leaves(got), jtu.tree_leaves(own))
        matrix, unravel = filter_hessian(error, method="sites", flat=True, **settings)(
            model, x, y
        )
        np.testing.assert_allclose(matrix, matrix_of(own), rtol=1e-9)
        assert unravel(matrix[0]).layers[0].weight is None

    def test_filter_spec(self, getkey):
        model, (x, y) = network(getkey(), use_bias=True), batch(getkey(), 5)
        spec = jtu.tree_map(lambda x: eqx.is_array(x) and x.ndim == 1, model)
        got, unravel = filter_hessian(error, in_axes=0, filter_spec=spec, flat=True)(
            model, x, y
        )
        biases = [layer.bias for layer in model.layers]

        def loss(biases):
            where = lambda m: [layer.bias for layer in m.layers]
            return mean_of(error)(eqx.tree_at(where, model, biases), x, y)

        expected = matrix_of(jax.jit(jax.hessian(loss))(biases))
        np.testing.assert_allclose(got, expected, atol=1e-9)
        assert unravel(got[0]).layers[0].weight is None

    def test_what_is_not_differentiated(self, getkey):
        model = {
            "w": normal(getkey(), (3,), float),
            "steps": jnp.arange(3),
            "name": "tanh",
            "nothing": None,
            "number": 2.0,
            "fun": jnp.tanh,
        }

        def loss(model, x):
            out = model["fun"](model["w"] * x * model["number"])
            return jnp.sum(out[model["steps"]])

        x = normal(getkey(), (5, 3), float)
        hessian = filter_hessian(loss, in_axes=0)(model, x)
        assert [key for key, value in hessian.items() if value is not None] == ["w"]
        plain = lambda w: mean_of(loss)({**model, "w": w}, x)
        close(hessian["w"]["w"], jax.jit(jax.hessian(plain))(model["w"]))

    def test_empty_array(self, getkey):
        model = {"a": jnp.zeros((0, 2)), "b": normal(getkey(), (2,), float)}
        loss = lambda model, x: jnp.sum(model["a"] @ x) + jnp.sum(model["b"] * x) ** 2
        x = normal(getkey(), (3, 2), float)
        expected = dense(loss, model, x)
        for method in CHOICES:
            close(filter_hessian(loss, in_axes=0, method=method)(model, x), expected)

    def test_holomorphic(self, getkey):
        z = {"a": normal(getkey(), (3,), jnp.complex128), "b": jnp.array(1 + 2j)}
        fun = lambda z: jnp.sum(jnp.sin(z["a"]) * z["a"][::-1] ** 2) * z["b"] ** 3
        expected = jax.jit(jax.hessian(fun, holomorphic=True))(z)
        close(filter_hessian(fun, holomorphic=True, block_size=2)(z), expected)

    def test_complex_function_of_real_parts(self, getkey):
        parts = {
            "re": normal(getkey(), (3,), float),
            "im": normal(getkey(), (3,), float),
        }
        fun = lambda p: jnp.sum(jnp.abs(jnp.sin(lax.complex(p["re"], p["im"]))) ** 2)
        expected = jax.jit(jax.hessian(fun))(parts)
        for method in CHOICES:
            close(filter_hessian(fun, method=method)(parts), expected)


class TestTypes:
    @pytest.mark.parametrize("method", spread(CHOICES, 1))
    def test_bfloat16(self, method, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 64)
        expected = matrix_of(dense(error, model, x, y))
        cast = lambda x: jax.device_put(np.asarray(x).astype(jnp.bfloat16))
        half = lambda x: cast(x) if eqx.is_inexact_array(x) else x
        model, x, y = jax.tree.map(half, (model, x, y))
        hessian = filter_hessian(
            error, in_axes=0, flat=True, method=method, microbatch_size=5
        )
        got, _ = hessian(model, x, y)
        assert got.dtype == jnp.bfloat16
        scale = np.max(np.abs(expected))
        got = np.asarray(got).astype(np.float32)
        np.testing.assert_allclose(got, expected, atol=0.1 * scale)

    @pytest.mark.parametrize("method", spread(CHOICES, 1))
    def test_mixed(self, method, getkey, x64):
        model = {
            "a": normal(getkey(), (3,), jnp.float32),
            "b": normal(getkey(), (3,), jnp.float64),
        }

        def loss(model, x):
            a = model["a"].astype(jnp.float64)
            return jnp.sum(jnp.tanh(a * x) * model["b"] ** 2)

        x = normal(getkey(), (4, 3), float)
        got = filter_hessian(loss, in_axes=0, method=method)(model, x)
        # JAX itself promotes there.
        with jax.numpy_dtype_promotion("standard"):
            expected = dense(loss, model, x)
        close(got, expected, tol=1e-5)
        matrix, unravel = filter_hessian(loss, in_axes=0, flat=True)(model, x)
        assert matrix.dtype == jnp.float64
        assert unravel(matrix[0])["a"].dtype == jnp.float32


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num", (128, 129))
def test_flat_matrices_on_both_sides_of_a_size(num, getkey):
    """Entries of small matrices are looked up, and blocks of large ones written."""
    sizes = {"a": (3, 2), "b": (), "c": (5,), "d": (5,), "e": ()}
    x = {name: normal(getkey(), shape, float) for name, shape in sizes.items()}
    x["f"] = normal(getkey(), (num - 18,), float)
    mix = normal(getkey(), (9, num), float)
    loss = lambda x: jnp.sum(jnp.tanh(mix @ ravel_pytree(x)[0]))
    vector, unravel = ravel_pytree(x)
    of_vector = lambda vector: loss(unravel(vector))
    expected, outer = jax.jit(
        lambda x: (jax.hessian(of_vector)(x), jax.grad(of_vector)(x))
    )(vector)
    hessian, _ = filter_hessian(loss, flat=True)(x)
    close(hessian, expected)
    np.testing.assert_array_equal(hessian, hessian.T)
    ggn, _ = filter_ggn(loss, lambda out: out**2 / 2, in_axes=None, flat=True)(x)
    close(ggn, jnp.outer(outer, outer))
    is_block = lambda part: part is x["f"] or isinstance(part, list)
    parts = {"all but one": [x[name] for name in sizes], "f": x["f"]}
    of_parts = lambda parts: loss(
        {**dict(zip(sizes, parts["all but one"], strict=True)), "f": parts["f"]}
    )
    blocks = filter_hessian_blocks(of_parts, is_block=is_block, flat=True)(parts)
    close(blocks["all but one"][0], expected[:18, :18])
    close(blocks["f"][0], expected[18:, 18:])


class TestResults:
    @pytest.mark.parametrize("method", spread(CHOICES, 1))
    def test_exactly_symmetric(self, method, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        matrix, _ = filter_hessian(error, in_axes=0, method=method, flat=True)(
            model, x, y
        )
        np.testing.assert_array_equal(matrix, np.asarray(matrix).T)
        tree = filter_hessian(error, in_axes=0, method=method)(model, x, y)
        assert_bits(np.asarray(matrix), np.asarray(matrix_of(tree)))
        as_tree = eqx.filter_jit(hessian_to_pytree)(matrix, model)
        assert_same(as_tree, tree)

    def test_unravel_is_that_of_jax(self, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        diff = eqx.filter(model, eqx.is_inexact_array)
        _, unravel = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        # One program in place of one for each operation.
        run = jax.jit(lambda diff: [*unravelled(*ravel_pytree(diff))])

        def unravelled(flat, theirs):
            yield unravel(flat), theirs(flat)
            several = unravel(jnp.stack([flat, 2 * flat]))
            yield jax.tree.map(lambda x: x[1], several), theirs(2 * flat)

        for got, expected in run(diff):
            assert_same(got, expected)
        with pytest.raises(ValueError, match=r'"\*batch 10".; got'):
            unravel(np.zeros(9))

    def test_blocks_of_layers(self, getkey, x64):
        model, (x, y) = network(getkey(), use_bias=True), batch(getkey(), 5)
        full = dense(error, model, x, y)
        settings = {"in_axes": 0, "is_block": lambda x: isinstance(x, eqx.nn.Linear)}
        blocks = filter_hessian_blocks(error, **settings)(model, x, y)
        flat = filter_hessian_blocks(error, flat=True, **settings)(model, x, y)
        for i, block in enumerate(blocks.layers):
            expected = full.layers[i].weight.layers[i]
            close(block.weight, expected)
            close(block.bias.weight, full.layers[i].bias.layers[i].weight)
            matrix, unravel = flat.layers[i]
            close(matrix, matrix_of(block))
            assert unravel(matrix[0]).weight.shape == model.layers[i].weight.shape

    @pytest.mark.parametrize("method", spread(CHOICES, 1))
    def test_blocks_without_parameters(self, method, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        last = lambda model: model.layers[-1]
        settings = {"in_axes": 0, "where": last, "method": method}
        settings["is_block"] = lambda x: isinstance(x, eqx.nn.Linear)
        expected, _ = filter_hessian(error, in_axes=0, where=last, flat=True)(
            model, x, y
        )
        blocks = filter_hessian_blocks(error, flat=True, **settings)(model, x, y)
        assert blocks.layers[0] is None
        matrix, unravel = blocks.layers[1]
        close(matrix, expected)
        assert unravel(matrix[0]).weight.shape == (1, 3)
        blocks = filter_hessian_blocks(error, **settings)(model, x, y)
        assert not jtu.tree_leaves(blocks.layers[0])
        assert isinstance(blocks.layers[0], eqx.nn.Linear)
        assert blocks.layers[1].weight.bias.shape == (1, 3, 1)

    def test_flat_diagonal(self, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        matrix, _ = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        vector, unravel = filter_hessian_diagonal(error, in_axes=0, flat=True)(
            model, x, y
        )
        close(vector, np.diagonal(matrix))
        tree = filter_hessian_diagonal(error, in_axes=0)(model, x, y)
        close(jtu.tree_leaves(unravel(vector)), jtu.tree_leaves(tree))

    @pytest.mark.parametrize(("method", "kind"), thinned(CHOICES, (Sum, Mean)))
    def test_sum_and_weights(self, method, kind, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 7)
        weights = jnp.arange(7.0)
        settings = {"in_axes": 0, "microbatch_size": 3, "method": method}

        each = jax.device_get(of_each(model, x, y))
        got = filter_hessian(error, accumulator=kind(weights=weights), **settings)
        shares = np.arange(7.0) / (np.sum(np.arange(7.0)) if kind is Mean else 1)
        expected = jax.tree.map(lambda x: np.tensordot(shares, x, 1), each)
        close(got(model, x, y), expected)

    def test_aux(self, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)

        def loss(model, x, y):
            out = model(x)
            return (out - y) ** 2, {"out": out, "name": "mlp"}

        settings = {"has_aux": True, "in_axes": 0, "microbatch_size": 3}
        outs = jax.jit(jax.vmap(model))(x)
        truth = dense(error, model, x, y)
        hessian, aux = filter_hessian(loss, **settings)(model, x, y)
        close(hessian, truth)
        assert_same(aux, {"out": outs, "name": "mlp"})
        matrix = matrix_of(truth)
        flat = lambda tree: np.concatenate(
            [np.ravel(leaf) for leaf in jtu.tree_leaves(tree)]
        )
        diagonal, aux = filter_hessian_diagonal(loss, **settings)(model, x, y)
        close(flat(diagonal), np.diagonal(matrix))
        assert_same(aux, {"out": outs, "name": "mlp"})
        vector = eqx.filter(model, eqx.is_inexact_array)
        product, aux = filter_hvp(loss, **settings)(model, vector, x, y)
        close(flat(product), matrix @ flat(vector))
        assert_same(aux, {"out": outs, "name": "mlp"})
        whole = lambda model, x, y: (mean_of(error)(model, x, y), x.shape)
        (matrix, _), shape = filter_hessian(whole, has_aux=True, flat=True)(model, x, y)
        assert matrix.shape == (10, 10)
        assert shape == (5, 2)

    def test_batch_axes(self, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        expected = dense(error, model, x, y)
        fun = lambda model, x, *, y: error(model, x, y)
        turned = jax.device_put(np.asarray(x).T)
        close(filter_hessian(fun, in_axes={"x": -1})(model, turned, y=y), expected)
        scaled = lambda model, x, y, scale: scale * error(model, x, y)
        got = filter_hessian(scaled, in_axes=(0, 0, None))(model, x, y, jnp.array(2.0))
        close(got, jax.tree.map(lambda x: 2 * np.asarray(x), expected))


@pytest.mark.usefixtures("x64")
def test_scaled_parameters(getkey):
    """As in the NTK parameterisation, by different numbers."""

    def loss(parameters, x, y):
        first, second = parameters
        return (jnp.dot(3.0 * second, jnp.tanh((0.5 * first) @ x)) - y) ** 2

    parameters = normal(getkey(), (3, 2), float), normal(getkey(), (3,), float)
    x, y = batch(getkey(), 5)
    got = filter_hessian(loss, in_axes=0, method="sites")(parameters, x, y)
    close(got, dense(loss, parameters, x, y))


@pytest.mark.parametrize(
    ("transform", "are_positions", "scale"),
    spread(
        (
            (filter_hessian, False, 1.0),
            (filter_hessian_diagonal, True, 1.0),
            (filter_hessian_diagonal, True, 1e28),
            (filter_hessian, False, 1e-18),
        ),
        1,
    ),
)
def test_terms_that_cancel_in_float32(transform, are_positions, scale, x64):
    """Pairs of uses, or of positions, are much larger than their sum.

    The squares of gradients may underflow or overflow where the Hessian does not.
    """
    settings = {"use_final_bias": False, "key": jr.key(0)}
    net = drawn(eqx.nn.MLP, 4, 3, 5, 1, jnp.tanh, **settings)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 1, 4)) + 1e-3 * rng.normal(size=(6, 2, 4))
    y = 1e-3 * rng.normal(size=(6, 3))

    def loss(net, x, y):
        rows = jax.vmap(net)(x) if are_positions else (net(x[0]), net(x[1]))
        return scale * jnp.sum((rows[0] - rows[1] - y) ** 2) / 2

    def plain(net, x, y):
        params, static = eqx.partition(net, eqx.is_inexact_array)
        flat, unravel = ravel_pytree(params)
        of_one = lambda flat, *row: loss(eqx.combine(unravel(flat), static), *row)
        value = lambda flat: jnp.mean(jax.vmap(of_one, (None, 0, 0))(flat, x, y))
        matrix = jax.hessian(value)(flat)
        return matrix if transform is filter_hessian else jnp.diagonal(matrix)

    def cast(dtype):
        arrays, rest = eqx.partition((net, x, y), eqx.is_inexact_array_like)
        short = lambda x: np.asarray(x).astype(np.float32).astype(dtype)
        return eqx.combine(
            jax.tree.map(lambda x: jax.device_put(short(x)), arrays), rest
        )

    truth = np.asarray(eqx.filter_jit(plain)(*cast(float)))
    found, _ = transform(loss, in_axes=0, flat=True)(*cast(jnp.float32))
    error = lambda got: np.max(np.abs(np.asarray(got) - truth))
    assert error(found) <= 10 * error(eqx.filter_jit(plain)(*cast(jnp.float32)))
