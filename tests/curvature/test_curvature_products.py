"""Products with Hessians, Gauss-Newton matrices, and wrong inputs."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from eqxbatch import (
    filter_ggn,
    filter_ggnvp,
    filter_hessian,
    filter_hvp,
    filter_micro_grad,
    hessian_to_pytree,
    Mean,
    MemoryBudget,
    Sum,
    Variance,
)
from ..helpers import BLOCK, CountTraces, drawn, integers, normal, variants
from .oracle import batch, CHOICES, close, error, matrix_of, mean_of, network


@pytest.mark.usefixtures("x64")
class TestProducts:
    @pytest.mark.parametrize("total", variants((1, 5, 13), 1, 13))
    def test_hvp(self, total, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), total)
        diff = eqx.filter(model, eqx.is_inexact_array)
        vector = jax.tree.map(lambda x: normal(getkey(), x.shape, float), diff)
        flat, unravel = ravel_pytree(vector)
        expected, _ = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        hvp = filter_hvp(error, in_axes=0, microbatch_size=BLOCK)
        expected = np.asarray(expected) @ np.asarray(flat)
        close(hvp(model, vector, x, y), unravel(expected))
        whole = filter_hvp(mean_of(error), checkpoint=True)
        close(whole(model, vector, x, y), unravel(expected))
        total = filter_hvp(error, in_axes=0, accumulator=Sum())
        close(total(model, vector, x, y), unravel(len(x) * expected))

    def test_signature(self, getkey):
        hvp = filter_hvp(error, in_axes=0)
        assert [*inspect.signature(hvp).parameters] == ["model", "vector", "x", "y"]
        assert hvp.__wrapped__ is error
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        got = eqx.filter_jit(hvp)(model, model, x, y)
        close(got, hvp(model, model, x, y))
        assert "vector" in inspect.signature(filter_hvp(lambda vector, x: x)).parameters

    def test_many_vectors(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        matrix, unravel = filter_hessian(error, in_axes=0, flat=True)(model, x, y)
        hvp = filter_hvp(error, in_axes=0, microbatch_size=2)
        run = jax.jit(jax.vmap(lambda v: hvp(model, unravel(v), x, y)))
        columns = run(np.eye(10))
        close(columns, unravel(matrix))

    def test_hvp_of_a_part(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        where = lambda model: model.layers[-1]
        settings = {"in_axes": 0, "where": where}
        matrix, unravel = filter_hessian(error, flat=True, **settings)(model, x, y)
        vector = np.arange(4.0)
        got = filter_hvp(error, **settings)(model, unravel(vector), x, y)
        close(got, unravel(np.asarray(matrix) @ vector))

    @pytest.mark.parametrize(
        ("method", "num_outputs"),
        variants(
            (("products", 3), ("sites", 1), ("sites", 3), ("auto", 3)),
            ("sites", 1),
            ("sites", 3),
            ("auto", 3),
        ),
    )
    def test_ggn(self, method, num_outputs, getkey):
        model = drawn(eqx.nn.MLP, 2, num_outputs, 4, 1, jnp.tanh, key=getkey())
        x, _ = batch(getkey(), 7)
        labels = integers(getkey(), (7,), num_outputs)
        apply = lambda model, x, label: {"logits": model(x), "none": None}

        def loss(out, x, label):
            terms = jnp.sum(jnp.sin(out["logits"]) ** 2)
            return terms - jax.nn.log_softmax(out["logits"])[label]

        diff, static = eqx.partition(model, eqx.is_inexact_array)
        flat, unravel = ravel_pytree(diff)

        def one(x, label):
            out = lambda p: eqx.combine(unravel(p), static)(x)
            J = jax.jacrev(out)(flat)
            H = jax.hessian(lambda out: loss({"logits": out}, x, label))(out(flat))
            return J.T @ H @ J

        run = jax.jit(lambda x, y: jnp.mean(jax.vmap(one)(x, y), 0))
        expected = np.asarray(run(x, labels))
        # What is returned does not depend on the method.
        settings = {"in_axes": 0, "method": method, "microbatch_size": 3}
        settings["flat"] = method != "products"
        got = filter_ggn(apply, loss, **settings)(model, x, labels)
        got = np.asarray(got[0] if settings["flat"] else matrix_of(got))
        close(got, expected)
        np.testing.assert_array_equal(got, got.T)
        if method == "products":
            product = filter_ggnvp(apply, loss, in_axes=0, microbatch_size=3)
            vector = np.sin(np.arange(flat.size))
            got = product(model, unravel(vector), x, labels)
            close(got, unravel(expected @ vector))

    @pytest.mark.parametrize("method", CHOICES)
    def test_ggn_of_many_outputs(self, method, getkey):
        w, x = normal(getkey(), (3,), float), normal(getkey(), (50,), float)
        curve = lambda w, x: w[0] * jnp.exp(-(w[1] ** 2) * x) + w[2]
        loss = lambda out, x: jnp.sum((out - x) ** 2) / 2
        J = np.asarray(jax.jit(jax.jacfwd(curve))(w, x))
        for size in (1, None) if method == "products" else (None,):
            ggn = filter_ggn(curve, loss, method=method, block_size=size, in_axes=None)
            got = np.asarray(ggn(w, x))
            close(got, J.T @ J)
            np.testing.assert_array_equal(got, got.T)

    # Also in `tests/sites/test_forms.py`.
    @pytest.mark.matrix
    def test_ggn_of_complex_outputs(self, getkey):
        w, x = normal(getkey(), (2, 3), float), normal(getkey(), (4, 3), float)

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

        run = jax.jit(lambda x: jnp.mean(jax.vmap(matrix)(x), 0))
        expected = np.asarray(run(x))
        for method in CHOICES:
            ggn = filter_ggn(model, loss, in_axes=0, flat=True, method=method)
            close(ggn(w, x)[0], expected)
        vector = normal(getkey(), w.shape, float)
        got = np.asarray(filter_ggnvp(model, loss, in_axes=0)(w, vector, x))
        close(got.reshape(-1), expected @ np.asarray(vector).reshape(-1))

    def test_ggn_with_weights(self, getkey):
        w, x = normal(getkey(), (2, 3), float), normal(getkey(), (4, 3), float)
        model = lambda w, x: jnp.tanh(w @ x)
        loss = lambda out, x: jnp.sum(jnp.sin(out))
        weights = jax.device_put(np.arange(4.0))
        one = filter_ggn(model, loss, method="products", in_axes=None)
        each = jax.jit(jax.vmap(one, (None, 0)))(w, x)
        expected = np.tensordot(weights, each, 1)
        for accumulator, total, method in (
            (Sum(weights), 1, "sites"),
            (Mean(weights), 6, "products"),
        ):
            ggn = filter_ggn(
                model, loss, in_axes=0, method=method, accumulator=accumulator
            )
            close(ggn(w, x), expected / total)

    def test_ggn_is_the_hessian_of_linear_models(self, getkey):
        model, (x, _) = drawn(eqx.nn.Linear, 2, 3, key=getkey()), batch(getkey(), 6)
        labels = integers(getkey(), (6,), 3)
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
        hvp(model, jax.device_put(jax.tree.map(np.ones_like, vector)), x, y)
        assert fun.num == num

    def test_newton_finds_the_minimum(self, getkey):
        # One step, as the loss is a quadratic form.
        x, y = normal(getkey(), (9, 4), float), normal(getkey(), (9,), float)
        loss = lambda w, x, y: (jnp.dot(w, x) - y) ** 2
        w = jnp.zeros(4)
        step = np.linalg.solve(
            filter_hessian(loss, in_axes=0)(w, x, y),
            filter_micro_grad(loss)(w, x, y),
        )
        np.testing.assert_allclose(-step, np.linalg.lstsq(x, y)[0], rtol=1e-9)


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
            filter_ggn(lambda w: w, lambda out: out, in_axes=None)(w)
        with pytest.raises(ValueError, match="arrays of an inexact dtype"):
            filter_ggn(
                lambda w, x: {"a": w, "b": "no"}, lambda out, x: jnp.sum(out["a"])
            )(w, x)

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
        with pytest.raises(ValueError, match="exclude each other"):
            filter_hessian(jnp.sum, block_size=2, num_blocks=2)
        for name in ("block_size", "num_blocks"):
            with pytest.raises(ValueError, match=f"`{name}` must be at least 1; got 0"):
                filter_hessian(jnp.sum, **{name: 0})
            with pytest.raises(TypeError, match=f"`{name}` must be int"):
                filter_hessian(jnp.sum, **{name: 1.5})
        with pytest.raises(TypeError, match=r"`num_blocks` must be int . None; got"):
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
            with pytest.raises(ValueError, match="`microbatch_size` is for a batch"):
                transform(jnp.sum, microbatch_size=2)
            with pytest.raises(ValueError, match=r"weights=...\)` is for a batch"):
                transform(jnp.sum, accumulator=Mean(weights=jnp.ones(1)))
            with pytest.raises(TypeError, match=r"`accumulator` must be Sum . Mean"):
                transform(jnp.sum, accumulator=Variance())
        for transform in (filter_ggn, filter_ggnvp):
            with pytest.raises(TypeError, match="`loss` must be Callable"):
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
        with pytest.raises(TypeError, match="argument: 'vector'"):
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
        with pytest.raises(ValueError, match=r'"n n".*an array of shape \(7, 4\)'):
            hessian_to_pytree(jnp.ones((7, 4)), x)
        with pytest.raises(ValueError, match="no arrays of an inexact dtype"):
            hessian_to_pytree(jnp.eye(3), jnp.arange(3))
