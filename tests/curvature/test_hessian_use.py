"""How Hessians are used: within other transforms, without forward mode, in memory."""

import functools
import inspect
import itertools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, PartitionSpec as P

import eqxbatch
from eqxbatch import (
    filter_ggn,
    filter_ggn_diagonal,
    filter_ggnvp,
    filter_hessian,
    filter_hessian_diagonal,
    filter_hvp,
    HessianOperator,
    MemoryBudget,
    Sum,
)
from ..helpers import (
    assert_same,
    CountTraces,
    drawn,
    forwards_only,
    make_mesh,
    memory,
    normal,
    only_backwards,
    rows_only,
    spread,
    thinned,
    variants,
)
from .oracle import (
    batch,
    CHOICES,
    close,
    dense,
    error,
    FAILURES,
    grad_of_trace,
    mean_of,
    METHODS,
    network,
)


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

        model, x = Model(normal(getkey(), (3,), float)), normal(getkey(), (3,), float)
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
            assert num == 1 or transform is filter_hessian_diagonal
            hessian(jax.tree.map(lambda x: x, model), x + 1, y)
            transform(loss, in_axes=0, microbatch_size=3)(model, x, y)
            assert loss.num == num

    def test_nested(self, getkey, x64):
        x, y = batch(getkey(), 5)
        make = lambda key: eqx.nn.MLP(2, "scalar", 3, 1, jnp.tanh, key=key)
        several = lambda key: eqx.filter_vmap(make)(jr.split(key, 3))
        models = drawn(several, key=getkey())
        hessian = filter_hessian(error, in_axes=0, microbatch_size=2)
        truth = functools.partial(dense, error)
        over = (eqx.if_array(0), None, None)
        got = eqx.filter_jit(eqx.filter_vmap(hessian, in_axes=over))(models, x, y)
        expected = eqx.filter_jit(eqx.filter_vmap(truth, in_axes=over))(models, x, y)
        close(got, expected)

    @pytest.mark.parametrize("method", spread(CHOICES, 1))
    def test_derivative(self, method, getkey, x64):
        whole = functools.partial(dense, error)
        model, (x, y) = network(getkey(), 2, 1), batch(getkey(), 3)
        ours = filter_hessian(error, in_axes=0, microbatch_size=2, method=method)
        close(grad_of_trace(ours, model, x, y), grad_of_trace(whole, model, x, y))

    def test_closed_over_arrays_are_differentiated(self, getkey):
        x, y = batch(getkey(), 5)
        w = normal(getkey(), (2,), float)

        def curvature(scale):
            loss = lambda w, x, y: scale * (jnp.dot(w, x) - y) ** 2
            return jnp.trace(
                filter_hessian(loss, in_axes=0, microbatch_size=2)(w, x, y)
            )

        expected = 2 * jnp.mean(jnp.sum(x**2, 1))
        slope = jax.jit(jax.grad(curvature))(3.0)
        np.testing.assert_allclose(slope, expected, rtol=1e-5)

    @pytest.mark.devices
    @pytest.mark.parametrize("method", spread(CHOICES, 1))
    def test_shard_map(self, method, getkey, x64):
        mesh = make_mesh(AxisType.Auto, names=("i",))
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
        got = jax.tree.map(lambda x: np.asarray(x) / 8, run(diff, x, y))
        close(jtu.tree_leaves(got), jtu.tree_leaves(expected))

    def test_effects(self, getkey, capfd):
        def loss(w, x):
            jax.debug.print("seen")
            return jnp.sum(jnp.sin(w) * x)

        w, x = normal(getkey(), (3,), float), normal(getkey(), (2, 3), float)
        got = filter_hessian(loss, in_axes=0)(w, x)
        jax.effects_barrier()
        assert "seen" in capfd.readouterr().out
        assert_same(got, jnp.diag(-jnp.sin(w) * jnp.mean(x, 0)))


@eqx.filter_jit
def truth(model, loss, w, x, y):
    """The Jacobians of all examples, and derivatives of their losses."""

    def outs(w):
        outs = jax.vmap(model, (None, 0, 0))(w, x, y)
        return outs, outs

    parts, outs = jax.jacfwd(outs, has_aux=True)(w)
    rows = [part.reshape(*outs.shape, -1) for part in jax.tree.leaves(parts)]
    slopes, curves = (jax.vmap(of(loss))(outs, x, y) for of in (jax.grad, jax.hessian))
    return jnp.concatenate(rows, -1), slopes, curves


def solver(step):
    """Two steps of `step`, which is `sin`, in loops of a dynamic length."""

    def run(z, num):
        body = lambda carry: (carry[0] + 1, step(carry[1]))
        return lax.while_loop(lambda carry: carry[0] < num, body, (0, z))[1]

    def backward(z, g):
        body = lambda carry: (carry[0] - 1, carry[1] * jnp.cos(run(z, carry[0] - 1)))
        return (lax.while_loop(lambda carry: carry[0] > 0, body, (2, g))[1],)

    @jax.custom_vjp
    def solve(z):
        return run(z, 2)

    solve.defvjp(lambda z: (run(z, 2), z), backward)
    return solve


@pytest.mark.usefixtures("x64")
class TestModes:
    @pytest.mark.flags
    def test_functions_without_forward_mode(self, getkey):
        w, x = normal(getkey(), (3,), float), normal(getkey(), (4, 3), float)
        loss = lambda w, x: jnp.sum(only_backwards(w * x))
        expected = dense(lambda w, x: jnp.sum(jnp.sin(w * x)), w, x)
        vector = jnp.arange(3.0)
        with pytest.warns(UserWarning, match="no forward-mode derivative") as record:
            close(filter_hessian(loss, in_axes=0)(w, x), expected)
        assert {warning.filename for warning in record} == {__file__}
        with pytest.warns(UserWarning, match="no forward-mode derivative"):
            got = filter_hvp(loss, in_axes=0)(w, vector, x)
        close(got, expected @ vector)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(filter_hessian(loss, in_axes=0, mode="rev")(w, x), expected)
            got = filter_hvp(loss, in_axes=0, mode="rev")(w, vector, x)
            close(got, expected @ vector)
            got = filter_hessian_diagonal(loss, in_axes=0, mode="rev")(w, x)
            close(got, np.diagonal(expected))
        for settings in ({"mode": "fwd"}, {"method": "sites"}):
            with pytest.raises(TypeError, match="forward-mode"):
                filter_hessian(loss, in_axes=0, **settings)(w, x)
        with pytest.raises(TypeError, match="forward-mode"):
            filter_hvp(loss, in_axes=0, mode="fwd")(w, vector, x)

    @pytest.mark.flags
    @pytest.mark.versions
    def test_gradients_that_are_loops(self, getkey):
        """As of an ODE solver that stores some steps, and computes others again."""
        w, x = normal(getkey(), (3,), float), normal(getkey(), (4, 3), float)
        vector, twice = jnp.arange(3.0), lambda z: jnp.sin(jnp.sin(z))
        loss_of = lambda fun: lambda w, x: jnp.sum(fun(w * x))
        expected = dense(loss_of(twice), w, x)
        # JAX cannot transpose the loop of the backward pass.
        loss = loss_of(solver(jnp.sin))
        close(filter_hvp(loss, in_axes=0)(w, vector, x), expected @ vector)
        close(filter_hessian(loss, in_axes=0, mode="fwd")(w, x), expected)
        got = filter_hessian_diagonal(loss, in_axes=0)(w, x)
        close(got, np.diagonal(expected))
        with pytest.raises(TypeError, match=r"with `mode='rev'`. Use `mode='auto'`"):
            filter_hvp(loss, in_axes=0, mode="rev")(w, vector, x)
        # No mode is recommended that fails, and none is tried with a warning.
        loss = loss_of(solver(only_backwards))
        neither = r"the gradient of `fun` neither in .* another adjoint, such as"
        for transform in (filter_hessian, filter_hessian_diagonal):
            with pytest.raises(TypeError, match=neither):
                transform(loss, in_axes=0)(w, x)
        for mode in ("auto", "fwd", "rev"):
            with pytest.raises(TypeError, match=neither):
                filter_hvp(loss, in_axes=0, mode=mode)(w, vector, x)
        # A Gauss-Newton matrix needs first derivatives only.
        outs, cube = solver(only_backwards), lambda out, x: jnp.sum(out**3)
        product = filter_ggnvp(lambda w, x: outs(w * x), cube)(w, vector, x)
        plain = filter_ggnvp(lambda w, x: twice(w * x), cube)(w, vector, x)
        close(product, plain)
        # The same for the loss of an output.
        with pytest.raises(TypeError, match="gradient of `loss` neither in forward"):
            filter_ggnvp(jnp.multiply, lambda out, x: jnp.sum(outs(out)))(w, vector, x)

    def test_warnings_point_to_the_line_of_the_user(self):
        class Model(eqx.Module):
            weight: jax.Array

            @filter_hessian(in_axes=0)
            def loss(self, x):
                return jnp.sum(only_backwards(self.weight * x))

        w, x = jnp.ones(3), jnp.ones((2, 3))
        loss = lambda w, x: jnp.sum(only_backwards(w * x))
        hessian = filter_hessian(loss, in_axes=0)
        jitted = eqx.filter_jit(lambda w: filter_hvp(loss, in_axes=0)(w, w, x))
        solve = lambda matrix: lineax.linear_solve(matrix, w, lineax.LU()).value
        matrix = HessianOperator(loss, w, x, in_axes=0)
        for inner, call in (
            (None, lambda: hessian(w, x)),
            (jitted, lambda: jitted(w)),
            (None, lambda: Model(w).loss(x)),
            (solve, lambda: solve(matrix)),
        ):
            with pytest.warns(UserWarning, match="no forward-mode") as found:
                call()
            line = inspect.unwrap(inner or call).__code__.co_firstlineno
            assert {(x.filename, x.lineno) for x in found} == {(__file__, line)}

    def test_gauss_newton_without_forward_mode(self, getkey):
        w, x = normal(getkey(), (3,), float), normal(getkey(), (4, 3), float)
        loss = lambda out, x: jnp.sum(out**2)
        expected, _ = filter_ggn(
            lambda w, x: jnp.sin(w * x), loss, in_axes=0, flat=True
        )(w, x)
        model = lambda w, x: only_backwards(w * x)
        for method in METHODS:
            ggn = filter_ggn(model, loss, in_axes=0, flat=True, method=method)
            close(ggn(w, x)[0], expected)
        vector = jnp.arange(3.0)
        close(filter_ggnvp(model, loss, in_axes=0)(w, vector, x), expected @ vector)

    @pytest.mark.matrix
    def test_gauss_newton_of_a_loss_without_forward_mode(self, getkey):
        w, x = normal(getkey(), (3,), float), normal(getkey(), (4, 3), float)
        model = lambda w, x: jnp.tanh(w * x)
        expected, _ = filter_ggn(
            model, lambda out, x: jnp.sum(jnp.sin(out)), in_axes=0, flat=True
        )(w, x)
        loss = lambda out, x: jnp.sum(only_backwards(out))
        for method in ("sites", "products"):
            ggn = filter_ggn(model, loss, in_axes=0, flat=True, method=method)
            close(ggn(w, x)[0], expected)

    @pytest.mark.parametrize(
        ("fisher", "activation"),
        variants(
            [
                *itertools.product(
                    ("exact", "mc", "empirical"), (forwards_only, rows_only)
                )
            ],
            ("exact", rows_only),
            ("mc", forwards_only),
            ("mc", rows_only),
            ("empirical", forwards_only),
            ("empirical", rows_only),
        ),
    )
    def test_gauss_newton_of_models_with_one_mode(self, activation, fisher, getkey):
        w = {"a": normal(getkey(), (2, 3), float), "b": normal(getkey(), (2,), float)}
        x, y = normal(getkey(), (5, 3), float), normal(getkey(), (5, 2), float)

        def model(fun):
            # Once of parameters and an example, once of parameters alone.
            return lambda w, x, y: fun(w["a"] @ x + w["b"]) * jnp.sum(fun(w["b"]))

        loss = lambda out, x, y: jnp.sum((out - y) ** 2 / 2 + jnp.cosh(out))
        settings = {"fisher": fisher, "in_axes": 0, "flat": True}
        if fisher == "mc":
            settings |= {"key": getkey(), "num_samples": 2}
            # Of the same labels; that is compared with a dense matrix elsewhere.
            expected, _ = filter_ggn(model(jnp.sin), loss, **settings)(w, x, y)
        else:
            rows, slopes, curves = jax.device_get(truth(model(jnp.sin), loss, w, x, y))
            if fisher == "empirical":
                gradients = np.einsum("nop,no->np", rows, slopes)
                expected = gradients.T @ gradients / 5
            else:
                expected = np.einsum("nop,noq,nqr->pr", rows, curves, rows) / 5
        expected = np.asarray(expected)
        for method in CHOICES:
            ggn = filter_ggn(model(activation), loss, method=method, **settings)
            close(ggn(w, x, y)[0], expected)
        diagonal = filter_ggn_diagonal(model(activation), loss, **settings)
        close(diagonal(w, x, y)[0], np.diagonal(expected))
        if fisher == "exact":
            vector = jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape) / 2, w)
            product = filter_ggnvp(
                model(activation), loss, in_axes=0, microbatch_size=2
            )(w, vector, x, y)
            flat, _ = ravel_pytree(vector)
            close(ravel_pytree(product)[0], expected @ flat)

    @pytest.mark.parametrize("fun", spread((forwards_only, rows_only), 1))
    def test_gauss_newton_of_losses_with_one_mode(self, fun, getkey):
        w, x = normal(getkey(), (3,), float), normal(getkey(), (4, 3), float)
        model, vector = lambda w, x: jnp.tanh(w * x), jnp.arange(3.0)
        of = lambda fun: lambda out, x: jnp.sum(fun(out))
        for fisher in ("exact", "empirical"):
            settings = {"in_axes": 0, "flat": True, "fisher": fisher}
            expected, _ = filter_ggn(model, of(jnp.sin), **settings)(w, x)
            for method in CHOICES:
                ggn = filter_ggn(model, of(fun), method=method, **settings)
                close(ggn(w, x)[0], expected)
        expected, _ = filter_ggn(model, of(jnp.sin), in_axes=0, flat=True)(w, x)
        product = filter_ggnvp(model, of(fun), in_axes=0)(w, vector, x)
        close(product, expected @ vector)

    def test_gauss_newton_of_models_with_neither_mode(self):
        model = lambda w, x: forwards_only(rows_only(w * x))
        ggn = filter_ggn(model, lambda out, x: jnp.sum(out**2), in_axes=0)
        with pytest.raises(TypeError, match="`fun` neither in forward nor in reverse"):
            ggn(jnp.ones(3), jnp.ones((4, 3)))

    @pytest.mark.matrix
    def test_only_parameters_without_forward_mode_are_left_to_products(self, getkey):
        w = {"a": normal(getkey(), (3,), float), "b": normal(getkey(), (4, 3), float)}
        x = normal(getkey(), (5, 3), float)

        def loss(fun):
            return lambda w, x: jnp.sum(jnp.tanh(w["b"] @ x)) + jnp.sum(fun(w["a"]))

        expected = dense(loss(jnp.sin), w, x)
        with pytest.warns(UserWarning, match="no forward-mode derivative"):
            got = filter_hessian(loss(only_backwards), in_axes=0, method="sites")(w, x)
        close(got, expected)

    @pytest.mark.parametrize(
        ("error", "place"),
        thinned(
            FAILURES,
            (
                "_curvature.functions.replaced",
                "_curvature.functions.total_loss",
                "_curvature.columns.size_groups",
                "_curvature.by_sites.contract",
                "_curvature.by_sites.contraction_cost",
                "_curvature.hessian_by_sites.alone",
            ),
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
        of_products = "functions" in place or "columns" in place
        settings = {"in_axes": 0, "method": "products" if of_products else "auto"}
        if is_ggn:
            run = filter_ggn(lambda model, x, y: model(x), error_of, **settings)
        else:
            run = filter_hessian(loss, **settings)
        with pytest.raises(error, match="on purpose"):
            run(model, x, y)

    def test_reverse_mode_of_networks(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        hessian = filter_hessian(error, in_axes=0, mode="rev", block_size=4)
        close(hessian(model, x, y), dense(error, model, x, y))

    @pytest.mark.flags
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

        w, x = normal(getkey(), (3,), float), normal(getkey(), (4, 3), float)
        for fun in (odd, strange):
            # Of elementwise functions, so that what they say is symmetric at least.
            loss = lambda w, x: jnp.sum(fun(w * x))
            expected = dense(loss, w, x)
            for method in CHOICES:
                got = filter_hessian(loss, in_axes=0, method=method)(w, x)
                close(got, expected)

    @pytest.mark.flags
    def test_checkpoint(self, getkey):
        model, (x, y) = network(getkey()), batch(getkey(), 5)
        expected = dense(error, model, x, y)
        settings = {"checkpoint": True, "block_size": 3}
        hessian = filter_hessian(error, in_axes=0, method="sites", **settings)
        close(hessian(model, x, y), expected)
        hessian = filter_hessian(mean_of(error), mode="fwd", **settings)
        close(hessian(model, x, y), expected)


class TestMemory:
    def of(self, num, static, loss=error, **settings):
        settings = {"in_axes": 0, "flat": True, **settings}

        def run(diff, x, y):
            model = eqx.combine(diff, static)
            return filter_hessian(loss, **settings)(model, x, y)[0]

        return run

    def model(self, getkey, width=16, depth=2):
        model = network(getkey(), width, depth, use_bias=True)
        return eqx.partition(model, eqx.is_inexact_array)

    @pytest.mark.cpu
    @pytest.mark.parametrize("method", spread(("sites", "products"), 1))
    def test_flat_in_the_number_of_examples(self, method, getkey):
        diff, static = self.model(getkey, depth=1)
        sizes = [
            memory(
                self.of(num, static, method=method, microbatch_size=16, block_size=8),
                diff,
                *batch(getkey(), num),
            ).temp_size_in_bytes
            for num in (64, 256)
        ]
        assert sizes[1] <= 1.02 * sizes[0]

    @pytest.mark.cpu
    @pytest.mark.matrix
    def test_sites_take_blocks_of_examples_themselves(self, getkey):
        diff, static = self.model(getkey)
        sizes = [
            memory(
                self.of(num, static, method="sites"), diff, *batch(getkey(), num)
            ).temp_size_in_bytes
            for num in (4_096, 16_384)
        ]
        assert sizes[1] <= 1.1 * sizes[0]

    @pytest.mark.cpu
    @pytest.mark.matrix
    def test_terms_of_few_pairs_are_there_at_once(self, getkey):
        model = eqx.nn.MLP(32, "scalar", 32, 3, jnp.tanh, key=getkey())
        diff, static = eqx.partition(model, eqx.is_inexact_array)
        args = (diff, normal(getkey(), (5, 32), float), normal(getkey(), (5,), float))
        result = memory(self.of(5, static, method="sites"), *args)
        # With those of all pairs, it is as large as the matrix.
        assert result.temp_size_in_bytes <= 0.7 * result.output_size_in_bytes

    @pytest.mark.cpu
    def test_flat_in_the_number_of_columns(self, getkey):
        # It has 257 parameters.
        diff, static = self.model(getkey, width=64, depth=1)
        args = (diff, *batch(getkey(), 256))
        sizes = [
            memory(
                self.of(256, static, method="products", block_size=size), *args
            ).temp_size_in_bytes
            for size in (16, None)
        ]
        assert 6 * sizes[0] < sizes[1]

    @pytest.mark.cpu
    @pytest.mark.matrix
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

    @pytest.mark.cpu
    def test_budget(self, getkey):
        loss = lambda w, x, y: (jnp.sum(jnp.tanh(w @ x)) - y) ** 2
        args = (normal(getkey(), (16, 2), float), *batch(getkey(), 1_024))
        budget, plain = MemoryBudget(200_000), {"method": "products"}
        settings = {"microbatch_size": budget, "block_size": budget, **plain}
        run = self.of(1_024, None, loss, **settings)
        run = jax.jit(run).lower(*args).compile()
        stats = run.memory_analysis()
        used = stats.temp_size_in_bytes + stats.output_size_in_bytes
        assert 100_000 < used <= 200_000
        expected = self.of(1_024, None, loss, **plain)(*args)
        assert_same(run(*args), expected, tol=1e-4)

    @pytest.mark.cpu
    @pytest.mark.matrix
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


class TestRangeOfFloat16:
    """Sums over examples that float16 does not hold, of means that it does."""

    @pytest.mark.parametrize(
        ("method", "weight"), thinned(("sites", "products"), (None, 1e-9))
    )
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


@pytest.mark.cpu
@pytest.mark.matrix
def test_one_array_is_differentiated_as_by_jax(getkey):
    def chain(x):
        steps = 100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2
        return jnp.sum(steps) + jax.nn.logsumexp(x), x[0]

    x = normal(getkey(), (600,), float)
    run = lambda size: filter_hessian(chain, block_size=size, has_aux=True, flat=True)
    ours = lambda x, size=None: run(size)(x)[0][0]
    theirs = jax.jit(jax.hessian(lambda x: chain(x)[0]))
    most = memory(theirs, x).temp_size_in_bytes
    expected = theirs(x)
    assert_same(run(None)(x)[1], x[0])
    for size in (None, 600, 1_000):
        assert_same(ours(x, size), expected, tol=1e-5)
        assert memory(functools.partial(ours, size=size), x).temp_size_in_bytes <= most
    in_blocks = ours(x, 64)
    assert_same(in_blocks, expected, tol=1e-5)
    np.testing.assert_array_equal(in_blocks, in_blocks.T)


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


@pytest.mark.parametrize("method", METHODS)
def test_arrays_of_size_0(method):
    loss = lambda p, x: jnp.sum(p["a"]) + x**2
    p, x = {"a": jnp.zeros((2, 0))}, jnp.ones(3)
    diagonal = filter_hessian_diagonal(loss, in_axes=0, method=method)(p, x)
    assert diagonal["a"].shape == (2, 0)
    matrix, _ = filter_hessian(loss, in_axes=0, method=method, flat=True)(p, x)
    assert matrix.shape == (0, 0)


def test_where_looks_at_structure_only():
    where = lambda model: [x for x in model if x.ndim == 1]
    with pytest.raises(ValueError, match=r"it uses `.ndim` of one"):
        eqxbatch.filter_hessian(lambda m: m[0].sum(), where=where)([jnp.ones(2)])
    with pytest.raises(ValueError, match="`where` must return parts of the model"):
        eqxbatch.filter_hessian(lambda m: m.sum(), where=lambda m: 1)(jnp.ones(2))


def test_arrays_of_numpy_as_pytrees():
    x = {"a": np.zeros(2), "b": np.zeros(())}
    matrix = np.arange(9.0).reshape(3, 3)
    found = eqxbatch.hessian_to_pytree(matrix, x)
    expected = eqxbatch.hessian_to_pytree(jnp.asarray(matrix), x)
    matrix[:] = -1
    for got, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(got, wanted)
