"""Hessians, their parts, and Gauss-Newton matrices against what JAX says of them."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import eqxbatch
from eqxbatch import (
    filter_ggn,
    filter_ggnvp,
    filter_hessian,
    filter_hessian_blocks,
    filter_hessian_diagonal,
    filter_hvp,
    filter_micro_grad,
    hessian_to_pytree,
    Mean,
    MemoryBudget,
    Sum,
    Variance,
)
from .helpers import assert_same, BLOCK, CountTraces, memory, normal, TOTALS
from .layers import Case, LAYERS, random_network


METHODS = ("sites", "products", "auto")
# Those that `auto` chooses from, where it is no case of its own.
CHOICES = METHODS[:2]
# What JAX says in these that a function has no derivative in one mode.
FAILURES = (TypeError, ValueError, NotImplementedError)


def close(got, expected, tol=1e-9):
    """The same but for rounding, as compared to the largest entry of all."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    leaves = jax.device_get((jax.tree.leaves(got), jax.tree.leaves(expected)))
    scale = max([float(np.max(np.abs(b), initial=0)) for b in leaves[1]])
    for a, b in zip(*leaves, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol * scale)


def error(model, x, y):
    return (model(x) - y) ** 2


def mean_of(loss):
    def mean(model, *args):
        return jnp.mean(jax.vmap(loss, (None, *(0 for _ in args)))(model, *args))

    return mean


@eqx.filter_jit
def dense(loss, *args):
    """The Hessian of the mean of a loss over all examples, as JAX has it."""
    return eqx.filter_hessian(mean_of(loss))(*args)


def network(key, width=3, depth=1, activation=jnp.tanh):
    return eqx.nn.MLP(2, "scalar", width, depth, activation, key=key)


def batch(key, num):
    key1, key2 = jr.split(key)
    return jr.normal(key1, (num, 2)), jr.normal(key2, (num,))


def count(model):
    return sum(x.size for x in jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array)))


def matrix_of(hessian):
    """A PyTree of PyTrees as one matrix."""
    rows = jtu.tree_leaves(jax.device_get(hessian))
    num = round(len(rows) ** 0.5)
    sizes = [round(rows[i * num + i].size ** 0.5) for i in range(num)]
    return np.block(
        [
            [rows[i * num + j].reshape(sizes[i], sizes[j]) for j in range(num)]
            for i in range(num)
        ]
    )


@eqx.filter_jit
def _of_each(model, x, y):
    """The Hessians of all examples."""
    return eqx.filter_vmap(eqx.filter_hessian(error), in_axes=(None, 0, 0))(model, x, y)


@pytest.mark.matrix
@pytest.mark.usefixtures("x64")
class TestTruth:
    @pytest.mark.parametrize(
        ("method", "total"),
        (*(("sites", total) for total in TOTALS), ("products", 5), ("products", 13)),
    )
    def test_any_number_of_examples(self, method, total, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), max(TOTALS))
        each = jax.device_get(_of_each(model, x, y))
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
        (*(("products", size) for size in (1, 4, 12, 13, 14, None)), ("sites", 4)),
    )
    def test_any_number_of_columns(self, method, size, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        assert count(model) == 13
        expected = dense(error, model, x, y)
        settings = {"block_size": size, "method": method}
        close(filter_hessian(mean_of(error), **settings)(model, x, y), expected)
        if size in (4, 14):
            hessian = filter_hessian(error, in_axes=0, **settings)
            close(hessian(model, x, y), expected)

    @pytest.mark.parametrize("num", (1, 3, 100))
    def test_number_of_blocks(self, num, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        hessian = filter_hessian(mean_of(error), num_blocks=num)
        close(hessian(model, x, y), dense(error, model, x, y))

    @pytest.mark.parametrize("name", LAYERS)
    def test_layer(self, name):
        _compare(LAYERS[name]())

    def test_random_network(self):
        _compare(random_network(jr.key(0)))

    @pytest.mark.parametrize("method", METHODS)
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

    @pytest.mark.parametrize("method", METHODS)
    def test_quadratic_form(self, method, getkey):
        matrix = jr.normal(getkey(), (6, 6))
        x = {"a": jr.normal(getkey(), (2, 2)), "b": jr.normal(getkey(), (2,))}

        def form(x):
            flat = jnp.concatenate([x["a"].reshape(-1), x["b"]])
            return flat @ matrix @ flat

        got, _ = filter_hessian(form, flat=True, method=method)(x)
        np.testing.assert_allclose(got, matrix + matrix.T, rtol=1e-12)

    def test_linear_function_has_none(self, getkey):
        x = jr.normal(getkey(), (3,))
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
        model = network(getkey(), activation=activation)
        x, y = batch(getkey(), 5)
        x = x.at[0].set(0.0)
        model = eqx.tree_at(
            lambda m: m.layers[0].bias, model, jnp.zeros(3), is_leaf=lambda x: x is None
        )
        expected = dense(error, model, x, y)
        close(filter_hessian(error, in_axes=0, method=method)(model, x, y), expected)


def _compare(case: Case):
    """The Hessian of a loss by sites, and its diagonal."""
    model, fun, example = case
    cast = lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x
    cast_all = eqx.filter_jit(lambda tree: jax.tree.map(cast, tree))
    model = cast_all(model)
    xs = cast_all(eqx.filter_jit(jax.vmap(example))(jr.split(jr.key(1), 3)))

    def loss(model, x):
        outs = jtu.tree_leaves(eqx.filter(fun(model, x), eqx.is_inexact_array))
        ravelled = [x.reshape(-1) for x in outs]
        return sum(jnp.sum(jnp.sin(x) * jnp.arange(1.0, 1 + x.size)) for x in ravelled)

    expected = dense(loss, model, xs)
    got = filter_hessian(loss, in_axes=0, method="sites")(model, xs)
    close(jtu.tree_leaves(got), jtu.tree_leaves(expected))
    leaves = jtu.tree_leaves(expected)
    num = round(len(leaves) ** 0.5)
    own = leaves[:: num + 1]
    diagonal = filter_hessian_diagonal(loss, in_axes=0, method="sites")(model, xs)
    flat = [np.diagonal(np.reshape(x, (round(x.size**0.5), -1))) for x in own]
    close([np.ravel(x) for x in jtu.tree_leaves(diagonal)], flat)


@pytest.mark.usefixtures("x64")
class TestParameters:
    def test_products_of_parameters(self, getkey):
        model = {
            "left": jr.normal(getkey(), (4, 2)),
            "right": jr.normal(getkey(), (2, 3)),
            "square": jr.normal(getkey(), (3, 3)),
            "scale": jnp.array(1.5),
        }

        def loss(model, x):
            weight = model["left"] @ model["right"] * model["scale"]
            out = jnp.tanh(weight @ (model["square"] @ model["square"].T @ x))
            return jnp.sum(out**2)

        x = jr.normal(getkey(), (5, 3))
        expected = dense(loss, model, x)
        for method in CHOICES:
            close(filter_hessian(loss, in_axes=0, method=method)(model, x), expected)

    def test_mixed_ways(self, getkey):
        # Its first array has no rule, its second has one, and its third is not used.
        model = {"a": jr.normal(getkey(), (3,)), "b": jr.normal(getkey(), (4, 3))}
        model["c"] = jnp.zeros(2)

        def loss(model, x):
            return jnp.sum(jnp.tanh(model["b"] @ (jnp.sin(model["a"]) * x)) ** 2)

        x = jr.normal(getkey(), (5, 3))
        expected = dense(loss, model, x)
        for method in METHODS:
            hessian = filter_hessian(loss, in_axes=0, method=method, block_size=2)
            close(hessian(model, x), expected)

    def test_weights_are_shared(self, getkey):
        cell, x = eqx.nn.Linear(3, 3, key=getkey()), jr.normal(getkey(), (4, 3))

        def loss(cell, x):
            for _ in range(3):
                x = jnp.tanh(cell(x))
            return jnp.sum(x**2)

        expected = dense(loss, cell, x)
        for method in CHOICES:
            got = filter_hessian(loss, in_axes=0, method=method)(cell, x)
            close(got, expected)
            diagonal = filter_hessian_diagonal(loss, in_axes=0, method=method)(cell, x)
            close(diagonal.bias, jnp.diagonal(expected.bias.bias))

    def test_where(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        last = lambda model: model.layers[-1]
        full = dense(error, model, x, y)
        for method in METHODS:
            hessian = filter_hessian(error, in_axes=0, where=last, method=method)
            got = hessian(model, x, y)
            assert got.layers[0].weight is None
            own = last(last(full).weight).bias
            np.testing.assert_allclose(last(last(got).weight).bias, own, rtol=1e-9)
            matrix, unravel = filter_hessian(
                error, in_axes=0, where=last, method=method, flat=True
            )(model, x, y)
            assert matrix.shape == (4, 4)
            assert unravel(matrix[0]).layers[0].weight is None

    def test_filter_spec(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
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
            "w": jr.normal(getkey(), (3,)),
            "steps": jnp.arange(3),
            "name": "tanh",
            "nothing": None,
            "number": 2.0,
            "fun": jnp.tanh,
        }

        def loss(model, x):
            out = model["fun"](model["w"] * x * model["number"])
            return jnp.sum(out[model["steps"]])

        x = jr.normal(getkey(), (5, 3))
        hessian = filter_hessian(loss, in_axes=0)(model, x)
        assert [key for key, value in hessian.items() if value is not None] == ["w"]
        plain = lambda w: mean_of(loss)({**model, "w": w}, x)
        close(hessian["w"]["w"], jax.jit(jax.hessian(plain))(model["w"]))

    def test_empty_array(self, getkey):
        model = {"a": jnp.zeros((0, 2)), "b": jr.normal(getkey(), (2,))}
        loss = lambda model, x: jnp.sum(model["a"] @ x) + jnp.sum(model["b"] * x) ** 2
        x = jr.normal(getkey(), (3, 2))
        expected = dense(loss, model, x)
        for method in METHODS:
            close(filter_hessian(loss, in_axes=0, method=method)(model, x), expected)

    def test_holomorphic(self, getkey):
        z = {"a": normal(getkey(), (3,), jnp.complex128), "b": jnp.array(1 + 2j)}
        fun = lambda z: jnp.sum(jnp.sin(z["a"]) * z["a"][::-1] ** 2) * z["b"] ** 3
        expected = jax.jit(jax.hessian(fun, holomorphic=True))(z)
        close(filter_hessian(fun, holomorphic=True, block_size=2)(z), expected)

    def test_complex_function_of_real_parts(self, getkey):
        parts = {"re": jr.normal(getkey(), (3,)), "im": jr.normal(getkey(), (3,))}
        fun = lambda p: jnp.sum(jnp.abs(jnp.sin(lax.complex(p["re"], p["im"]))) ** 2)
        expected = jax.jit(jax.hessian(fun))(parts)
        for method in CHOICES:
            close(filter_hessian(fun, method=method)(parts), expected)


class TestTypes:
    @pytest.mark.parametrize("method", CHOICES)
    def test_bfloat16(self, method, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 64)
        expected, _ = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
        model, x, y = jax.tree.map(half, (model, x, y))
        hessian = filter_hessian(
            error, in_axes=0, flat=True, method=method, microbatch_size=5
        )
        got, _ = hessian(model, x, y)
        assert got.dtype == jnp.bfloat16
        scale = np.max(np.abs(expected))
        got = np.asarray(got.astype(jnp.float32))
        np.testing.assert_allclose(got, expected, atol=0.1 * scale)

    @pytest.mark.parametrize("method", METHODS)
    def test_mixed(self, method, getkey, x64):
        model = {
            "a": jr.normal(getkey(), (3,), jnp.float32),
            "b": jr.normal(getkey(), (3,), jnp.float64),
        }

        def loss(model, x):
            a = model["a"].astype(jnp.float64)
            return jnp.sum(jnp.tanh(a * x) * model["b"] ** 2)

        x = jr.normal(getkey(), (4, 3))
        got = filter_hessian(loss, in_axes=0, method=method)(model, x)
        # JAX itself promotes there.
        with jax.numpy_dtype_promotion("standard"):
            expected = dense(loss, model, x)
        close(got, expected, tol=1e-5)
        matrix, unravel = filter_hessian(loss, in_axes=0, flat=True)(model, x)
        assert matrix.dtype == jnp.float64
        assert unravel(matrix[0])["a"].dtype == jnp.float32


class TestResults:
    @pytest.mark.parametrize("method", METHODS)
    def test_exactly_symmetric(self, method, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        matrix, _ = filter_hessian(error, in_axes=0, method=method, flat=True)(
            model, x, y
        )
        np.testing.assert_array_equal(matrix, matrix.T)
        tree = filter_hessian(error, in_axes=0, method=method)(model, x, y)
        np.testing.assert_array_equal(matrix, matrix_of(tree))
        assert_same(hessian_to_pytree(matrix, model), tree)

    def test_unravel_is_that_of_jax(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        diff = eqx.filter(model, eqx.is_inexact_array)
        _, unravel = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        flat, theirs = jax.flatten_util.ravel_pytree(diff)
        assert_same(unravel(flat), theirs(flat))
        several = unravel(jnp.stack([flat, 2 * flat]))
        assert_same(jax.tree.map(lambda x: x[1], several), theirs(2 * flat))
        with pytest.raises(ValueError, match="13 entries"):
            unravel(flat[1:])

    def test_blocks_of_layers(self, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
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

    @pytest.mark.parametrize("method", ("sites", "products"))
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
        close(vector, jnp.diagonal(matrix))
        tree = filter_hessian_diagonal(error, in_axes=0)(model, x, y)
        close(jtu.tree_leaves(unravel(vector)), jtu.tree_leaves(tree))

    @pytest.mark.parametrize("method", CHOICES)
    def test_sum_and_weights(self, method, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 7)
        weights = jnp.arange(7.0)
        settings = {"in_axes": 0, "microbatch_size": 3, "method": method}

        def total(model, x, y):
            return jnp.sum(weights * jax.vmap(error, (None, 0, 0))(model, x, y))

        expected = eqx.filter_jit(eqx.filter_hessian(total))(model, x, y)
        got = filter_hessian(error, accumulator=Sum(weights=weights), **settings)
        close(got(model, x, y), expected)
        got = filter_hessian(error, accumulator=Mean(weights=weights), **settings)
        mean = jax.tree.map(lambda x: np.asarray(x) / np.sum(weights), expected)
        close(got(model, x, y), mean)

    def test_aux(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 7)

        def loss(model, x, y):
            out = model(x)
            return (out - y) ** 2, {"out": out, "name": "mlp"}

        settings = {"has_aux": True, "in_axes": 0, "microbatch_size": 3}
        outs = jax.jit(jax.vmap(model))(x)
        truth = dense(error, model, x, y)
        hessian, aux = filter_hessian(loss, **settings)(model, x, y)
        close(hessian, truth, tol=1e-4)
        assert_same(aux, {"out": outs, "name": "mlp"})
        matrix = matrix_of(truth)
        flat = lambda tree: np.concatenate(
            [np.ravel(leaf) for leaf in jtu.tree_leaves(tree)]
        )
        diagonal, aux = filter_hessian_diagonal(loss, **settings)(model, x, y)
        close(flat(diagonal), np.diagonal(matrix), tol=1e-4)
        assert_same(aux, {"out": outs, "name": "mlp"})
        vector = eqx.filter(model, eqx.is_inexact_array)
        product, aux = filter_hvp(loss, **settings)(model, vector, x, y)
        close(flat(product), matrix @ flat(vector), tol=1e-4)
        assert_same(aux, {"out": outs, "name": "mlp"})
        whole = lambda model, x, y: (mean_of(error)(model, x, y), x.shape)
        (matrix, _), shape = filter_hessian(whole, has_aux=True, flat=True)(model, x, y)
        assert matrix.shape == (13, 13)
        assert shape == (7, 2)

    def test_batch_axes(self, getkey, x64):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        expected = dense(error, model, x, y)
        fun = lambda model, x, *, y: error(model, x, y)
        close(filter_hessian(fun, in_axes=1)(model, x.T, y=y), expected)
        close(filter_hessian(fun, in_axes={"x": -1})(model, x.T, y=y), expected)
        scaled = lambda model, x, y, scale: scale * error(model, x, y)
        got = filter_hessian(scaled, in_axes=(0, 0, None))(model, x, y, jnp.array(2.0))
        close(got, jax.tree.map(lambda x: 2 * np.asarray(x), expected))


@eqx.filter_jit
def _grad_of_trace(hessian, model, x, y):
    def trace(model):
        blocks = jtu.tree_leaves(hessian(model, x, y))
        own = blocks[:: round(len(blocks) ** 0.5) + 1]
        return sum(jnp.trace(a.reshape(round(a.size**0.5), -1)) for a in own)

    return eqx.filter_grad(trace)(model)


class TestUse:
    def test_decorators_and_methods(self, getkey):
        class Model(eqx.Module):
            w: jax.Array

            @filter_hessian
            def loss(self, x):
                return jnp.sum(jnp.sin(self.w) * x)

            @filter_hessian(in_axes=0, flat=True)
            def mean_loss(self, x):
                return jnp.sum(jnp.sin(self.w) * x)

        model, x = Model(jr.normal(getkey(), (3,))), jr.normal(getkey(), (3,))
        expected = jnp.diag(-jnp.sin(model.w) * x)
        assert_same(model.loss(x).w.w, expected)
        assert_same(model.mean_loss(jnp.stack([x, x]))[0], expected)
        assert Model.loss.__name__ == "loss"

    def test_second_call_traces_nothing(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 7)
        loss = CountTraces(error)
        for transform in (filter_hessian, filter_hessian_diagonal):
            hessian = transform(loss, in_axes=0, microbatch_size=3)
            hessian(model, x, y)
            num = loss.num
            assert num > 0
            hessian(jax.tree.map(lambda x: x, model), x + 1, y)
            transform(loss, in_axes=0, microbatch_size=3)(model, x, y)
            assert loss.num == num

    def test_loss_is_traced_once(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 7)
        loss = CountTraces(error)
        filter_hessian(loss, in_axes=0, microbatch_size=3)(model, x, y)
        assert loss.num == 1

    def test_nested(self, getkey, x64):
        x, y = batch(getkey(), 5)
        models = eqx.filter_vmap(network)(jr.split(getkey(), 3))
        hessian = filter_hessian(error, in_axes=0, microbatch_size=2)
        truth = functools.partial(dense, error)
        over = (eqx.if_array(0), None, None)
        got = eqx.filter_jit(eqx.filter_vmap(hessian, in_axes=over))(models, x, y)
        expected = eqx.filter_jit(eqx.filter_vmap(truth, in_axes=over))(models, x, y)
        close(got, expected)

    @pytest.mark.parametrize("method", ("sites", "products"))
    def test_derivative(self, method, getkey, x64):
        whole = functools.partial(dense, error)
        model, (x, y) = network(getkey(), 2, 1), batch(getkey(), 3)
        ours = filter_hessian(error, in_axes=0, microbatch_size=2, method=method)
        close(_grad_of_trace(ours, model, x, y), _grad_of_trace(whole, model, x, y))

    def test_closed_over_arrays_are_differentiated(self, getkey):
        x, y = batch(getkey(), 5)
        w = jr.normal(getkey(), (2,))

        def curvature(scale):
            loss = lambda w, x, y: scale * (jnp.dot(w, x) - y) ** 2
            return jnp.trace(
                filter_hessian(loss, in_axes=0, microbatch_size=2)(w, x, y)
            )

        expected = 2 * jnp.mean(jnp.sum(x**2, 1))
        np.testing.assert_allclose(jax.grad(curvature)(3.0), expected, rtol=1e-5)

    @pytest.mark.parametrize("method", ("sites", "products"))
    def test_shard_map(self, method, getkey, x64):
        mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
        model, (x, y) = network(getkey()), batch(getkey(), 8)
        diff, static = eqx.partition(model, eqx.is_inexact_array)

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P()
        )
        def run(diff, x, y):
            hessian = filter_hessian(
                error, in_axes=0, accumulator=Sum(), method=method, microbatch_size=1
            )
            return hessian(eqx.combine(diff, static), x, y)

        expected = dense(error, model, x, y)
        got = jax.tree.map(lambda x: x / 8, run(diff, x, y))
        close(jtu.tree_leaves(got), jtu.tree_leaves(expected))

    def test_effects(self, getkey, capfd):
        def loss(w, x):
            jax.debug.print("seen")
            return jnp.sum(jnp.sin(w) * x)

        w, x = jr.normal(getkey(), (3,)), jr.normal(getkey(), (2, 3))
        got = filter_hessian(loss, in_axes=0)(w, x)
        jax.effects_barrier()
        assert "seen" in capfd.readouterr().out
        assert_same(got, jnp.diag(-jnp.sin(w) * jnp.mean(x, 0)))


@jax.custom_vjp
def _only_backwards(x):
    return jnp.sin(x)


@jax.custom_vjp
def _cosine(x):
    return jnp.cos(x)


_cosine.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (-g * jnp.sin(x),))
# Its derivative has no forward mode either.
_only_backwards.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * _cosine(x),))


@pytest.mark.usefixtures("x64")
class TestModes:
    def test_functions_without_forward_mode(self, getkey):
        w, x = jr.normal(getkey(), (3,)), jr.normal(getkey(), (4, 3))
        loss = lambda w, x: jnp.sum(_only_backwards(w * x))
        expected = dense(lambda w, x: jnp.sum(jnp.sin(w * x)), w, x)
        vector = jnp.arange(3.0)
        with pytest.warns(UserWarning, match="no forward-mode derivative"):
            close(filter_hessian(loss, in_axes=0)(w, x), expected)
        with pytest.warns(UserWarning, match="no forward-mode derivative"):
            got = filter_hvp(loss, in_axes=0)(w, vector, x)
        close(got, expected @ vector)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(filter_hessian(loss, in_axes=0, mode="rev")(w, x), expected)
            got = filter_hvp(loss, in_axes=0, mode="rev")(w, vector, x)
            close(got, expected @ vector)
            got = filter_hessian_diagonal(loss, in_axes=0, mode="rev")(w, x)
            close(got, jnp.diagonal(expected))
        for settings in ({"mode": "fwd"}, {"method": "sites"}):
            with pytest.raises(TypeError, match="forward-mode"):
                filter_hessian(loss, in_axes=0, **settings)(w, x)
        with pytest.raises(TypeError, match="forward-mode"):
            filter_hvp(loss, in_axes=0, mode="fwd")(w, vector, x)

    def test_gauss_newton_without_forward_mode(self, getkey):
        w, x = jr.normal(getkey(), (3,)), jr.normal(getkey(), (4, 3))
        loss = lambda out, x: jnp.sum(out**2)
        expected, _ = filter_ggn(
            lambda w, x: jnp.sin(w * x), loss, in_axes=0, flat=True
        )(w, x)
        model = lambda w, x: _only_backwards(w * x)
        for method in METHODS:
            ggn = filter_ggn(model, loss, in_axes=0, flat=True, method=method)
            close(ggn(w, x)[0], expected)
        vector = jnp.arange(3.0)
        close(filter_ggnvp(model, loss, in_axes=0)(w, vector, x), expected @ vector)

    def test_gauss_newton_of_a_loss_without_forward_mode(self, getkey):
        w, x = jr.normal(getkey(), (3,)), jr.normal(getkey(), (4, 3))
        model = lambda w, x: jnp.tanh(w * x)
        expected, _ = filter_ggn(
            model, lambda out, x: jnp.sum(jnp.sin(out)), in_axes=0, flat=True
        )(w, x)
        loss = lambda out, x: jnp.sum(_only_backwards(out))
        for method in ("sites", "products"):
            ggn = filter_ggn(model, loss, in_axes=0, flat=True, method=method)
            close(ggn(w, x)[0], expected)

    def test_only_parameters_without_forward_mode_are_left_to_products(self, getkey):
        w = {"a": jr.normal(getkey(), (3,)), "b": jr.normal(getkey(), (4, 3))}
        x = jr.normal(getkey(), (5, 3))

        def loss(fun):
            return lambda w, x: jnp.sum(jnp.tanh(w["b"] @ x)) + jnp.sum(fun(w["a"]))

        expected = dense(loss(jnp.sin), w, x)
        with pytest.warns(UserWarning, match="no forward-mode derivative"):
            got = filter_hessian(loss(_only_backwards), in_axes=0, method="sites")(w, x)
        close(got, expected)

    @pytest.mark.parametrize("error", FAILURES)
    @pytest.mark.parametrize(
        "place",
        (
            "_transforms.curvature.replaced",
            "_transforms.curvature.weighted_sum",
            "_transforms.products.grouped",
            "_sites.curvature.contract",
            "_sites.curvature.contract_cost",
            "_sites.gauss_newton.operand_term",
        ),
    )
    def test_no_failure_is_taken_for_a_missing_mode(self, place, error, monkeypatch):
        def fail(*args, **kwargs):
            raise error("on purpose")

        monkeypatch.setattr(f"eqxbatch.{place}", fail)
        model, (x, y) = network(jr.key(0)), batch(jr.key(1), 5)
        is_ggn = "gauss_newton" in place
        loss = lambda model, x, y: error_of(model(x), x, y)
        error_of = lambda out, x, y: (out - y) ** 2
        of_products = "_sites" not in place
        settings = {"in_axes": 0, "method": "products" if of_products else "auto"}
        if is_ggn:
            run = filter_ggn(lambda model, x, y: model(x), error_of, **settings)
        else:
            run = filter_hessian(loss, **settings)
        with pytest.raises(error, match="on purpose"):
            run(model, x, y)

    def test_reverse_mode_of_networks(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        expected = dense(error, model, x, y)
        for mode in ("fwd", "rev"):
            hessian = filter_hessian(error, in_axes=0, mode=mode, block_size=4)
            close(hessian(model, x, y), expected)

    def test_custom_derivatives_are_kept(self, getkey):
        @jax.custom_jvp
        def odd(x):
            return jnp.sin(x)

        # Not what the body says: it is the rule that counts.
        @odd.defjvp
        def _(primals, tangents):
            (x,), (dx,) = primals, tangents
            return odd(x), 3 * x * dx

        @jax.custom_vjp
        def strange(x):
            return jnp.sin(x)

        strange.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x**2,))

        w, x = jr.normal(getkey(), (3,)), jr.normal(getkey(), (4, 3))
        for fun in (odd, strange):
            # Of elementwise functions, so that what they say is symmetric at least.
            loss = lambda w, x: jnp.sum(fun(w * x))
            expected = dense(loss, w, x)
            for method in CHOICES:
                got = filter_hessian(loss, in_axes=0, method=method)(w, x)
                close(got, expected)

    def test_checkpoint(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        expected = dense(error, model, x, y)
        settings = {"checkpoint": True, "block_size": 3}
        for method in METHODS:
            hessian = filter_hessian(error, in_axes=0, method=method, **settings)
            close(hessian(model, x, y), expected)
        hessian = filter_hessian(mean_of(error), method="products", **settings)
        close(hessian(model, x, y), expected)


@pytest.mark.usefixtures("x64")
def test_scaled_parameters(getkey):
    """As in the NTK parameterisation, by different numbers."""

    def loss(parameters, x, y):
        first, second = parameters
        return (jnp.dot(3.0 * second, jnp.tanh((0.5 * first) @ x)) - y) ** 2

    parameters = jr.normal(getkey(), (3, 2)), jr.normal(getkey(), (3,))
    x, y = batch(getkey(), 5)
    got = filter_hessian(loss, in_axes=0, method="sites")(parameters, x, y)
    close(got, dense(loss, parameters, x, y))


class TestMemory:
    def of(self, num, static, loss=error, **settings):
        settings = {"in_axes": 0, "flat": True, **settings}

        def run(diff, x, y):
            model = eqx.combine(diff, static)
            return filter_hessian(loss, **settings)(model, x, y)[0]

        return run

    def model(self, getkey, width=16, depth=2):
        model = network(getkey(), width, depth)
        return eqx.partition(model, eqx.is_inexact_array)

    @pytest.mark.parametrize("method", ("sites", "products"))
    def test_flat_in_the_number_of_examples(self, method, getkey):
        diff, static = self.model(getkey)
        sizes = [
            memory(
                self.of(num, static, method=method, microbatch_size=16, block_size=8),
                diff,
                *batch(getkey(), num),
            ).temp_size_in_bytes
            for num in (64, 256)
        ]
        assert sizes[1] <= 1.02 * sizes[0]

    def test_sites_take_blocks_of_examples_themselves(self, getkey):
        diff, static = self.model(getkey)
        sizes = [
            memory(
                self.of(num, static, method="sites"), diff, *batch(getkey(), num)
            ).temp_size_in_bytes
            for num in (4_096, 16_384)
        ]
        assert sizes[1] <= 1.1 * sizes[0]

    def test_terms_of_few_pairs_are_there_at_once(self, getkey):
        model = eqx.nn.MLP(32, "scalar", 32, 3, jnp.tanh, key=getkey())
        diff, static = eqx.partition(model, eqx.is_inexact_array)
        args = (diff, jr.normal(getkey(), (5, 32)), jr.normal(getkey(), (5,)))
        result = memory(self.of(5, static, method="sites"), *args)
        # With those of all pairs, it is as large as the matrix.
        assert result.temp_size_in_bytes <= 0.7 * result.output_size_in_bytes

    def test_flat_in_the_number_of_columns(self, getkey):
        diff, static = self.model(getkey, depth=3)
        args = (diff, *batch(getkey(), 256))
        sizes = [
            memory(
                self.of(256, static, method="products", block_size=size), *args
            ).temp_size_in_bytes
            for size in (4, 32, None)
        ]
        assert 2 * sizes[0] < sizes[1]
        assert 3 * sizes[1] < sizes[2]

    def test_less_than_jax(self, getkey):
        diff, static = self.model(getkey)
        args = (diff, *batch(getkey(), 256))

        def dense(diff, x, y):
            loss = lambda diff: mean_of(error)(eqx.combine(diff, static), x, y)
            return jax.hessian(loss)(diff)

        theirs = memory(dense, *args).temp_size_in_bytes
        for method, part in (("auto", 0.2), ("products", 1.0)):
            ours = memory(self.of(256, static, method=method), *args).temp_size_in_bytes
            assert ours <= part * theirs

    def test_budget(self, getkey):
        diff, static = self.model(getkey, width=8, depth=1)
        args = (diff, *batch(getkey(), 1_024))
        budget = MemoryBudget(200_000)
        settings = {"microbatch_size": budget, "block_size": budget}
        run = self.of(1_024, static, method="products", **settings)
        run = jax.jit(run).lower(*args).compile()
        stats = run.memory_analysis()
        used = stats.temp_size_in_bytes + stats.output_size_in_bytes
        assert 100_000 < used <= 200_000
        expected = self.of(1_024, static, method="products")(*args)
        assert_same(run(*args), expected, tol=1e-4)

    def test_auto_takes_what_costs_less(self, getkey):
        diff, static = self.model(getkey)
        args = (diff, *batch(getkey(), 64))

        def flops(method, loss, **settings):
            run = self.of(64, static, loss, method=method, **settings)
            analysis = jax.jit(run).lower(*args).compile().cost_analysis()
            return analysis["flops"]

        # Of one example at a time, what layers see has few entries.
        ours = [flops(method, error) for method in METHODS]
        assert ours[2] <= 1.01 * min(ours)
        assert ours[0] < 0.7 * ours[1]
        # Of all of them together, it has more than there are parameters.
        ours = [flops(m, mean_of(error), in_axes=None) for m in ("products", "auto")]
        assert ours[1] <= 1.01 * ours[0]


@pytest.mark.usefixtures("x64")
class TestProducts:
    @pytest.mark.parametrize("total", (1, 5, 13))
    def test_hvp(self, total, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), total)
        diff = eqx.filter(model, eqx.is_inexact_array)
        vector = jax.tree.map(lambda x: jr.normal(getkey(), x.shape), diff)
        flat, unravel = jax.flatten_util.ravel_pytree(vector)
        expected, _ = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        hvp = filter_hvp(error, in_axes=0, microbatch_size=BLOCK)
        close(hvp(model, vector, x, y), unravel(expected @ flat))
        whole = filter_hvp(mean_of(error), checkpoint=True)
        close(whole(model, vector, x, y), unravel(expected @ flat))
        total = filter_hvp(error, in_axes=0, accumulator=Sum())
        close(total(model, vector, x, y), unravel(len(x) * expected @ flat))

    def test_many_vectors(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        matrix, unravel = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        hvp = filter_hvp(error, in_axes=0, microbatch_size=2)
        columns = jax.vmap(lambda v: hvp(model, unravel(v), x, y))(jnp.eye(13))
        close(columns, unravel(matrix))

    def test_hvp_of_a_part(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        where = lambda model: model.layers[-1]
        settings = {"in_axes": 0, "where": where}
        matrix, unravel = filter_hessian(error, flat=True, **settings)(model, x, y)
        vector = jnp.arange(4.0)
        got = filter_hvp(error, **settings)(model, unravel(vector), x, y)
        close(got, unravel(matrix @ vector))

    @pytest.mark.parametrize(
        ("method", "num_outputs"), (*((method, 3) for method in METHODS), ("sites", 1))
    )
    def test_ggn(self, method, num_outputs, getkey):
        model = eqx.nn.MLP(2, num_outputs, 4, 1, jnp.tanh, key=getkey())
        x, _ = batch(getkey(), 7)
        labels = jr.randint(getkey(), (7,), 0, num_outputs)
        apply = lambda model, x, label: {"logits": model(x), "none": None}

        def loss(out, x, label):
            terms = jnp.sum(jnp.sin(out["logits"]) ** 2)
            return terms - jax.nn.log_softmax(out["logits"])[label]

        diff, static = eqx.partition(model, eqx.is_inexact_array)
        flat, unravel = jax.flatten_util.ravel_pytree(diff)

        def one(x, label):
            out = lambda p: eqx.combine(unravel(p), static)(x)
            J = jax.jacrev(out)(flat)
            H = jax.hessian(lambda out: loss({"logits": out}, x, label))(out(flat))
            return J.T @ H @ J

        expected = jax.jit(lambda x, y: jnp.mean(jax.vmap(one)(x, y), 0))(x, labels)
        ggn = filter_ggn(
            apply, loss, in_axes=0, flat=True, method=method, microbatch_size=3
        )
        got = np.asarray(ggn(model, x, labels)[0])
        close(got, expected)
        np.testing.assert_array_equal(got, got.T)
        tree = filter_ggn(apply, loss, in_axes=0, method=method)(model, x, labels)
        close(tree, hessian_to_pytree(expected, model))
        product = filter_ggnvp(apply, loss, in_axes=0, microbatch_size=3)
        vector = jnp.sin(jnp.arange(flat.size))
        got = product(model, unravel(vector), x, labels)
        close(got, unravel(expected @ vector))

    @pytest.mark.parametrize("method", CHOICES)
    def test_ggn_of_many_outputs(self, method, getkey):
        w, x = jr.normal(getkey(), (3,)), jr.normal(getkey(), (50,))
        curve = lambda w, x: w[0] * jnp.exp(-(w[1] ** 2) * x) + w[2]
        loss = lambda out, x: jnp.sum((out - x) ** 2) / 2
        J = np.asarray(jax.jit(jax.jacfwd(curve))(w, x))
        for size in (1, None):
            ggn = filter_ggn(curve, loss, method=method, block_size=size)
            close(ggn(w, x), J.T @ J)

    @pytest.mark.parametrize("method", METHODS)
    def test_ggn_of_complex_outputs(self, method, getkey):
        w, x = jr.normal(getkey(), (2, 3)), jr.normal(getkey(), (4, 3))

        def model(w, x):
            z = lax.complex(w[0] @ x, jnp.tanh(w[1] @ x))
            return {"z": z, "abs": jnp.abs(z)}

        loss = lambda out, x: jnp.abs(out["z"] ** 2 + 1j) ** 2 * out["abs"]

        def parts(w, x):
            z = model(w, x)["z"]
            return jnp.stack([jnp.real(z), jnp.imag(z), jnp.abs(z)])

        def matrix(x):
            of_parts = lambda p: loss({"z": lax.complex(*p[:2]), "abs": p[2]}, x)
            jacobian = jax.jacrev(parts)(w, x).reshape(3, -1)
            curve = jax.hessian(of_parts)(parts(w, x))
            return jacobian.T @ curve @ jacobian

        expected = jax.jit(lambda x: jnp.mean(jax.vmap(matrix)(x), 0))(x)
        ggn = filter_ggn(model, loss, in_axes=0, flat=True, method=method)
        close(ggn(w, x)[0], expected)
        vector = jr.normal(getkey(), w.shape)
        got = filter_ggnvp(model, loss, in_axes=0)(w, vector, x)
        close(got.reshape(-1), expected @ vector.reshape(-1))

    @pytest.mark.parametrize("method", METHODS)
    def test_ggn_with_weights(self, method, getkey):
        w, x = jr.normal(getkey(), (2, 3)), jr.normal(getkey(), (4, 3))
        model = lambda w, x: jnp.tanh(w @ x)
        loss = lambda out, x: jnp.sum(jnp.sin(out))
        weights = jnp.arange(4.0)
        one = jax.vmap(filter_ggn(model, loss, method="products"), (None, 0))
        expected = jnp.tensordot(weights, one(w, x), 1)
        for accumulator, total in ((Sum(weights), 1), (Mean(weights), 6)):
            ggn = filter_ggn(
                model, loss, in_axes=0, method=method, accumulator=accumulator
            )
            close(ggn(w, x), expected / total)

    def test_ggn_is_the_hessian_of_linear_models(self, getkey):
        model, (x, _) = eqx.nn.Linear(2, 3, key=getkey()), batch(getkey(), 6)
        labels = jr.randint(getkey(), (6,), 0, 3)
        apply = lambda model, x, label: model(x)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        loss = lambda out, x, label: cross_entropy(out, label)
        whole = lambda model, x, label: cross_entropy(model(x), label)
        ggn, _ = filter_ggn(apply, loss, in_axes=0, flat=True)(model, x, labels)
        hessian, _ = filter_hessian(whole, in_axes=0, flat=True)(model, x, labels)
        close(ggn, hessian)
        assert np.linalg.eigvalsh(ggn).min() > -1e-12

    def test_products_trace_nothing_the_second_time(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 7)
        vector = eqx.filter(model, eqx.is_inexact_array)
        fun = CountTraces(error)
        hvp = filter_hvp(fun, in_axes=0, microbatch_size=3)
        hvp(model, vector, x, y)
        num = fun.num
        hvp(model, jax.tree.map(lambda x: 2 * x, vector), x, y)
        assert fun.num == num

    def test_newton_finds_the_minimum(self, getkey):
        # One step, as the loss is a quadratic form.
        x, y = jr.normal(getkey(), (9, 4)), jr.normal(getkey(), (9,))
        loss = lambda w, x, y: (jnp.dot(w, x) - y) ** 2
        w = jnp.zeros(4)
        step = jnp.linalg.solve(
            filter_hessian(loss, in_axes=0)(w, x, y),
            filter_micro_grad(loss)(w, x, y),
        )
        np.testing.assert_allclose(w - step, np.linalg.lstsq(x, y)[0], rtol=1e-9)


class TestBadInput:
    def hessian(self, fun, *args, **settings):
        return filter_hessian(fun, **settings)(*args)

    def test_values(self, getkey):
        w, x = jnp.ones(3), jnp.ones((2, 3))
        for value in (
            lambda w: w,
            lambda w: "no",
            lambda w: jnp.sum(w).astype(complex),
        ):
            with pytest.raises(ValueError, match="real floating-point scalar"):
                self.hessian(value, w)
        with pytest.raises(ValueError, match="real floating-point scalar"):
            self.hessian(lambda w, x: w, w, x, in_axes=0)
        with pytest.raises(ValueError, match="complex scalar"):
            self.hessian(lambda z: jnp.abs(z[0]), w.astype(complex), holomorphic=True)
        with pytest.raises(ValueError, match=r"pair `\(value, aux\)`"):
            self.hessian(jnp.sum, w, has_aux=True)
        with pytest.raises(ValueError, match="real floating-point scalar"):
            filter_ggn(lambda w: w, lambda out: out)(w)
        with pytest.raises(ValueError, match="arrays of an inexact dtype"):
            filter_ggn(lambda w: {"a": w, "b": "no"}, lambda out: jnp.sum(out["a"]))(w)

    def test_parameters(self):
        total = lambda w: jnp.array(1.0)
        for empty in (
            {},
            None,
            jnp.arange(3),
            {"name": "relu", "steps": jnp.arange(2)},
        ):
            with pytest.raises(ValueError, match="nothing to differentiate"):
                self.hessian(total, empty)
        with pytest.raises(ValueError, match="leave no parameters"):
            self.hessian(total, {"a": jnp.ones(2)}, filter_spec=False)
        with pytest.raises(ValueError, match="comes first, by position"):
            filter_hessian(total)(w=jnp.ones(2))
        with pytest.raises(TypeError, match=r"holomorphic=True.*all.*must be complex"):
            self.hessian(total, jnp.ones(2), holomorphic=True)
        with pytest.raises(TypeError, match="real and imaginary parts"):
            self.hessian(total, jnp.ones(2, complex))

    def test_settings(self, unchecked):
        with pytest.raises(ValueError, match="Give one of them"):
            filter_hessian(jnp.sum, block_size=2, num_blocks=2)
        for name in ("block_size", "num_blocks"):
            with pytest.raises(ValueError, match=f"`{name}` must be at least 1; got 0"):
                filter_hessian(jnp.sum, **{name: 0})
            with pytest.raises(TypeError, match=f"`{name}` must be an int"):
                filter_hessian(jnp.sum, **{name: 1.5})
        with pytest.raises(TypeError, match="Give the `MemoryBudget` as `block_size`"):
            filter_hessian(jnp.sum, num_blocks=MemoryBudget())
        with pytest.raises(ValueError, match="`method` must be one of"):
            filter_hessian(jnp.sum, method="magic")
        with pytest.raises(ValueError, match="`mode` must be one of"):
            filter_hessian(jnp.sum, mode="sideways")
        with pytest.raises(ValueError, match="`mode` must be one of"):
            filter_hvp(jnp.sum, mode="sideways")
        with pytest.raises(ValueError, match="forward mode; got `mode='rev'`"):
            filter_hessian(jnp.sum, method="sites", mode="rev")
        for transform in (filter_hessian, filter_hvp):
            with pytest.raises(ValueError, match="`microbatch_size` is about a batch"):
                transform(jnp.sum, microbatch_size=2)
            with pytest.raises(TypeError, match="must be a Sum or a Mean"):
                transform(jnp.sum, accumulator=Variance())
        for transform in (filter_ggn, filter_ggnvp):
            with pytest.raises(TypeError, match="`loss` must be a function"):
                transform(jnp.sum, None)
        with pytest.raises(TypeError, match="`fun` must be callable"):
            filter_hessian(3)

    def test_batches(self):
        loss = lambda w, x, y: jnp.sum(w * x) * y
        w, x, y = jnp.ones(3), jnp.ones((4, 3)), jnp.ones(5)
        with pytest.raises(ValueError, match="agree on the number of examples"):
            self.hessian(loss, w, x, y, in_axes=0)
        with pytest.raises(ValueError, match="must have 2 entries"):
            self.hessian(loss, w, x, y, in_axes=(0,))
        with pytest.raises(ValueError, match="first argument is the one"):
            self.hessian(loss, w, x, y, in_axes={"w": 0})
        weights = Sum(weights=jnp.ones(3))
        with pytest.raises(ValueError, match="weights"):
            self.hessian(loss, w, x, y[:4], in_axes=0, accumulator=weights)

    def test_vectors(self):
        hvp = filter_hvp(lambda w, x: jnp.sum(w["a"] * x) ** 2)
        w, x = {"a": jnp.ones(3)}, jnp.ones(3)
        for vector in ({"b": jnp.ones(3)}, {"a": jnp.ones(2)}, {"a": 1.0}, None):
            with pytest.raises(ValueError, match="what is differentiated"):
                hvp(w, vector, x)
        with pytest.raises(ValueError, match="got 1 positional"):
            hvp(w)

    def test_budget_that_is_too_small(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        hessian = filter_hessian(mean_of(error), block_size=MemoryBudget(100))
        with pytest.raises(ValueError, match="memory budget of 100 bytes is too small"):
            hessian(model, x, y)

    def test_hessian_to_pytree(self):
        x = {"a": jnp.ones((2, 2)), "b": jnp.ones(3), "name": "x"}
        with pytest.raises(ValueError, match=r"shape \(7, 7\).*got \(4, 4\)"):
            hessian_to_pytree(jnp.eye(4), x)
        with pytest.raises(ValueError, match=r"shape \(7, 7\).*got \(7, 4\)"):
            hessian_to_pytree(jnp.ones((7, 4)), x)
        with pytest.raises(ValueError, match="no arrays of an inexact dtype"):
            hessian_to_pytree(jnp.eye(3), jnp.arange(3))


class TestRangeOfFloat16:
    """Sums over examples that float16 does not hold, of means that it does."""

    @pytest.mark.parametrize("method", ("sites", "products"))
    @pytest.mark.parametrize("weight", (None, 1e-9))
    def test_hessian(self, method, weight):
        w, x = jnp.ones(2, jnp.float16), jnp.array([[150.0, 1.0]] * 40, jnp.float16)
        weights = None if weight is None else jnp.full(40, weight)
        expected = np.array([[22500, 150], [150, 1]])
        for size in (1, 7, None):
            hessian = eqxbatch.filter_hessian(
                lambda w, x: 0.5 * (w @ x - 151) ** 2,
                in_axes=0,
                microbatch_size=size,
                method=method,
                accumulator=eqxbatch.Mean(weights),
            )(w, x)
            assert hessian.dtype == jnp.float16
            wide = np.asarray(hessian, np.float64)
            np.testing.assert_allclose(wide, expected, rtol=2e-3)

    @pytest.mark.parametrize("product", ("hvp", "ggnvp"))
    def test_products(self, product):
        w, x = jnp.ones(2, jnp.float16), jnp.array([[150.0, 1.0]] * 40, jnp.float16)
        if product == "hvp":
            apply = eqxbatch.filter_hvp(
                lambda w, x: 0.5 * (w @ x - 151) ** 2, in_axes=0
            )
        else:
            apply = eqxbatch.filter_ggnvp(
                lambda w, x: w @ x, lambda y, x: 0.5 * (y - 151) ** 2, in_axes=0
            )
        got = apply(w, jnp.array([1.0, 0.0], jnp.float16), x)
        assert got.dtype == jnp.float16
        np.testing.assert_allclose(np.asarray(got, np.float64), [22500, 150], rtol=2e-3)


def test_parts_without_parameters():
    model = {"a": (jnp.arange(2.0), ()), "b": jnp.ones(3), "c": None}
    loss = lambda model: jnp.sum(model["a"][0] ** 3) + jnp.sum(model["b"])
    where = lambda model: (model["a"], model["c"])
    matrix, _ = eqxbatch.filter_hessian(loss, where=where, flat=True)(model)
    assert_same(matrix, jnp.diag(jnp.array([0.0, 6.0])))
    blocks = eqxbatch.filter_hessian_blocks(
        loss, where=where, flat=True, is_block=eqx.is_array
    )(model)
    assert_same(blocks["a"][0][0], matrix)
    blocks = eqxbatch.filter_hessian_blocks(
        lambda model: jnp.sum(model["a"] ** 2),
        where=lambda model: model["a"],
        flat=True,
        is_block=lambda x: isinstance(x, tuple),
    )({"a": jnp.ones(1), "b": (jnp.ones(3),)})
    assert blocks["b"] is None


def test_where_looks_at_structure_only():
    where = lambda model: [x for x in model if x.ndim == 1]
    with pytest.raises(AttributeError):
        eqxbatch.filter_hessian(lambda m: m[0].sum(), where=where)([jnp.ones(2)])
    with pytest.raises(ValueError, match="`where` must return parts of the model"):
        eqxbatch.filter_hessian(lambda m: m.sum(), where=lambda m: 1)(jnp.ones(2))
