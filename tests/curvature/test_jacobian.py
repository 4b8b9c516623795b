"""Jacobians against what JAX says of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import eqxbatch._curvature.columns as jacobian_module
from eqxbatch import Concat, filter_jacobian, Mean, MemoryBudget
from ..helpers import (
    assert_same,
    BLOCK,
    CountTraces,
    drawn,
    memory,
    normal,
    only_backwards,
    thinned,
    variants,
)
from .oracle import close, FAILURES


MODES = ("fwd", "rev", "auto")

# A primitive that can be differentiated in forward mode only.
_twice = Primitive("twice")
_twice.def_impl(lambda x: 2 * x)
_twice.def_abstract_eval(lambda x: x)
mlir.register_lowering(_twice, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
ad.primitive_jvps[_twice] = lambda x, dx: (_twice.bind(*x), _twice.bind(*dx))
batching.defvectorized(_twice)


def outputs(model, x, scale=1.0):
    """Two outputs of a network, with 7 entries together."""
    ys = jax.vmap(model)(x)
    return {"all": scale * ys, "sum": jnp.sum(ys), "none": None}


dense = eqx.filter_jit(eqx.filter_jacfwd(outputs))


def network(key):
    return drawn(eqx.nn.MLP, 2, 2, 3, 1, jnp.tanh, key=key)


def flattened(tree, num):
    """For each output, the arrays of all parameters in one axis."""
    leaves = jax.device_get(jax.tree.leaves(tree))
    outs = [leaves[i : i + num] for i in range(0, len(leaves), num)]
    return [
        np.concatenate([x.reshape(*shape, -1) for x in out], -1)
        for out, shape in zip(outs, ((3, 2), ()), strict=True)
    ]


@pytest.mark.usefixtures("x64")
class TestTruth:
    @pytest.mark.parametrize(("mode", "size"), thinned(MODES, (1, 4, 18, None)))
    def test_blocks(self, mode, size, getkey):
        model, x = network(getkey()), normal(getkey(), (3, 2), float)
        jacobian = filter_jacobian(outputs, mode=mode, block_size=size)
        close(jacobian(model, x), dense(model, x))

    @pytest.mark.parametrize("mode", variants(MODES, "fwd", "rev"))
    def test_number_of_blocks(self, mode, getkey):
        model, x = network(getkey()), normal(getkey(), (3, 2), float)
        expected = dense(model, x)
        for num in (3, 50):
            got = filter_jacobian(outputs, mode=mode, num_blocks=num)(model, x)
            close(got, expected)

    @pytest.mark.parametrize("mode", variants(MODES, "auto"))
    def test_flat(self, mode, getkey):
        model, x = network(getkey()), normal(getkey(), (3, 2), float)
        expected = flattened(dense(model, x), 4)
        size = None if mode == "auto" else 2
        jacobian = filter_jacobian(outputs, mode=mode, block_size=size, flat=True)
        got, unravel = jacobian(model, x)
        close([got["all"], got["sum"]], expected)
        close(
            jax.tree.leaves(unravel(got["all"])),
            jax.tree.leaves(dense(model, x)["all"]),
        )

    @pytest.mark.parametrize("mode", MODES)
    def test_linear_function(self, mode, getkey):
        matrix = normal(getkey(), (5, 4), float)
        jacobian = filter_jacobian(lambda x: matrix @ x, mode=mode, block_size=3)
        np.testing.assert_array_equal(jacobian(jnp.ones(4)), matrix)

    @pytest.mark.parametrize("mode", variants(MODES, "auto"))
    def test_holomorphic(self, mode, getkey):
        z = {"a": normal(getkey(), (3,), jnp.complex128), "b": jnp.array(1 - 2j)}
        fun = lambda z: jnp.sin(z["a"]) * z["a"][::-1] * z["b"] ** 2
        expected = jax.jit(jax.jacfwd(fun, holomorphic=True))(z)
        jacobian = filter_jacobian(fun, mode=mode, holomorphic=True, block_size=2)
        close(jacobian(z), expected)

    def test_complex_function_of_real_arrays(self, getkey):
        x = {"a": normal(getkey(), (3,), float), "b": normal(getkey(), (2,), float)}

        def fun(x):
            z = jnp.exp(lax.complex(jnp.zeros_like(x["a"]), x["a"]))[:2]
            scale = x["b"].astype(z.dtype)
            return {"z": z * scale, "real": x["a"], "sum": jnp.sum(z)}

        expected = jax.jit(jax.jacfwd(fun))(x)
        for mode in ("fwd", "rev"):
            close(filter_jacobian(fun, mode=mode, block_size=2)(x), expected)
        # Two rows are fewer than five columns.
        got = filter_jacobian(lambda x: fun(x)["sum"])(x)
        close(got, expected["sum"])

    @pytest.mark.flags
    def test_complex_function_without_forward_mode(self, getkey):
        @jax.custom_vjp
        def wave(x):
            return lax.complex(jnp.cos(x), jnp.sin(x))

        pull = lambda x, g: (jnp.real(1j * wave(x) * g),)
        wave.defvjp(lambda x: (wave(x), x), pull)
        x = normal(getkey(), (3,), float)
        expected = jnp.diag(1j * wave(x))
        close(filter_jacobian(wave, mode="rev")(x), expected)
        with pytest.warns(UserWarning, match=r"reverse mode \(passes: 6\) instead of"):
            close(filter_jacobian(wave)(x), expected)

    def test_holomorphic_functions_return_complex_arrays(self):
        z = jnp.ones(3, complex)
        for mode in MODES:
            jacobian = filter_jacobian(
                lambda z: {"z": z, "abs": jnp.abs(z)}, mode=mode, holomorphic=True
            )
            with pytest.raises(TypeError, match=r"must be complex; got \['float64'"):
                jacobian(z)
            with pytest.raises(TypeError, match="are differentiated must be complex"):
                filter_jacobian(jnp.sin, mode=mode, holomorphic=True)(jnp.ones(3))

    @pytest.mark.flags
    def test_functions_with_one_mode_only(self, getkey):
        x = normal(getkey(), (3,), float)
        # It has as many inputs as outputs, so that columns are tried first.
        with pytest.warns(UserWarning, match="Set `mode='rev'` to do so") as record:
            close(filter_jacobian(only_backwards)(x), jnp.diag(jnp.cos(x)))
        # The line is the user's, not one of ours or of JAX.
        assert [warning.filename for warning in record] == [__file__]
        close(filter_jacobian(only_backwards, mode="rev")(x), jnp.diag(jnp.cos(x)))
        with pytest.raises(TypeError, match="forward-mode"):
            filter_jacobian(only_backwards, mode="fwd")(x)

        def loop(x):
            step = lambda state: (state[0] + 1, state[1] * state[1])
            doubled = lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]
            return jnp.sum(doubled)

        with pytest.warns(UserWarning, match="Set `mode='fwd'` to do so"):
            close(filter_jacobian(loop)(x), 4 * x**3)
        close(filter_jacobian(loop, mode="fwd")(x), 4 * x**3)
        with pytest.raises(TypeError, match="neither in forward nor in reverse mode"):
            filter_jacobian(lambda x: loop(only_backwards(x)))(x)
        with pytest.raises(TypeError, match=r"`mode='auto'`.*Reverse-mode different"):
            filter_jacobian(loop, mode="rev")(x)

    def test_functions_without_a_transpose(self, getkey):
        matrix, x = 2 * jnp.eye(3), normal(getkey(), (3,), float)
        product = lambda x: matrix @ x
        # There is one row, so that rows are tried first.
        solve = lambda x: jnp.sum(
            lax.custom_linear_solve(product, x, lambda _, b: b / 2) ** 2
        )
        with pytest.warns(UserWarning, match="transpose_solve required"):
            close(filter_jacobian(solve)(x), x / 2)
        twice = lambda x: jnp.sum(_twice.bind(x))
        with pytest.warns(UserWarning, match="Transpose rule"):
            close(filter_jacobian(twice)(x), jnp.full(3, 2.0))

    def test_functions_without_derivatives(self, getkey):
        x = normal(getkey(), (3,), float)
        struct = jax.ShapeDtypeStruct((3,), x.dtype)
        for fun in (jnp.sin, jnp.sum):
            outside = lambda x, fun=fun: fun(jax.pure_callback(np.sin, struct, x))
            with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
                filter_jacobian(outside)(x)

    @pytest.mark.parametrize("error", FAILURES)
    def test_no_failure_is_taken_for_a_missing_mode(self, error, monkeypatch):
        """Neither of our own code, nor of a function's own rules."""

        def fail(*args, **kwargs):
            raise error("on purpose")

        @jax.custom_vjp
        def broken(x):
            return jnp.sin(x)

        broken.defvjp(lambda x: (jnp.sin(x), x), fail)
        with pytest.raises(error, match="on purpose"):
            filter_jacobian(lambda x: jnp.sum(broken(x)))(jnp.ones(3))
        monkeypatch.setattr(jacobian_module, "images", fail)
        for fun in (jnp.sin, jnp.sum):
            with pytest.raises(error, match="on purpose"):
                filter_jacobian(lambda x, fun=fun: fun(x))(jnp.ones(3))

    def test_empty_arrays(self, getkey):
        x = {"a": jnp.zeros((0, 2)), "b": normal(getkey(), (2,), float)}
        fun = lambda x: {"none": x["a"] @ x["b"], "square": x["b"] ** 2}
        expected = jax.jit(jax.jacfwd(fun))(x)
        for mode in ("fwd", "rev"):
            close(filter_jacobian(fun, mode=mode, block_size=2)(x), expected)


class TestTypes:
    @pytest.mark.parametrize("mode", MODES)
    def test_bfloat16(self, mode, getkey):
        x = normal(getkey(), (5,), float)
        got = filter_jacobian(jnp.sin, mode=mode)(x.astype(jnp.bfloat16))
        assert_same(got, jnp.diag(jnp.cos(x)).astype(jnp.bfloat16))

    def test_results_have_the_dtype_of_outputs(self, getkey, x64):
        x = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(3)}
        fun = lambda x: jnp.sum(x["a"].astype(jnp.float64)) * x["b"]
        for mode in MODES:
            got = filter_jacobian(fun, mode=mode)(x)
            assert got["a"].dtype == got["b"].dtype == jnp.float64
            np.testing.assert_array_equal(got["b"], 2 * np.eye(3))


@pytest.mark.usefixtures("x64")
class TestUse:
    def test_aux_and_keywords(self, getkey):
        model, x = network(getkey()), normal(getkey(), (3, 2), float)
        fun = lambda model, x, *, scale: (outputs(model, x, scale), {"x": x, "s": "a"})
        for mode in ("fwd", "rev"):
            jacobian = filter_jacobian(fun, mode=mode, has_aux=True, block_size=2)
            got, aux = jacobian(model, x, scale=jnp.array(2.0))
            assert_same(got["all"], dense(model, x, 2.0)["all"])
            assert_same(aux, {"x": x, "s": "a"})
        (flat, _), aux = filter_jacobian(fun, has_aux=True, flat=True)(
            model, x, scale=2.0
        )
        assert flat["all"].shape == (3, 2, 17)
        assert_same(aux, {"x": x, "s": "a"})

    def test_where_and_filter_spec(self, getkey):
        model, x = network(getkey()), normal(getkey(), (3, 2), float)
        full = dense(model, x)["all"]
        got = filter_jacobian(outputs, where=lambda m: m.layers[-1])(model, x)["all"]
        assert got.layers[0].weight is None
        assert_same(got.layers[-1], full.layers[-1])
        spec = jax.tree.map(lambda x: eqx.is_array(x) and x.ndim == 2, model)
        got = filter_jacobian(outputs, filter_spec=spec)(model, x)["all"]
        assert got.layers[0].bias is None
        assert_same(got.layers[0].weight, full.layers[0].weight)
        both = {"where": lambda m: m.layers[-1], "filter_spec": spec}
        got = filter_jacobian(outputs, **both)(model, x)["all"]
        assert got.layers[0].weight is got.layers[-1].bias is None
        assert_same(got.layers[-1].weight, full.layers[-1].weight)

    def test_decorators_and_methods(self, getkey):
        class Curve(eqx.Module):
            a: jax.Array

            @filter_jacobian
            def at(self, t):
                return jnp.sin(self.a * t)

            @filter_jacobian(mode="rev", block_size=2, flat=True)
            def flat(self, t):
                return jnp.sin(self.a * t)

        t = jnp.linspace(0.0, 1.0, 5)
        curve = Curve(jnp.array(2.0))
        expected = t * jnp.cos(2 * t)
        assert_same(curve.at(t).a, expected)
        assert_same(curve.flat(t)[0], expected[:, None])

    def test_traces(self, getkey):
        model, x = network(getkey()), normal(getkey(), (3, 2), float)
        for mode in ("fwd", "rev"):
            fun = CountTraces(outputs)
            jacobian = filter_jacobian(fun, mode=mode, block_size=2)
            jacobian(model, x)
            assert fun.num == 1
            jacobian(model, x + 1)
            filter_jacobian(fun, mode=mode, block_size=2)(model, x)
            assert fun.num == 1

    @pytest.mark.matrix
    def test_nested(self, getkey):
        one = lambda key: eqx.nn.MLP(2, 2, 3, 1, jnp.tanh, key=key)
        several = lambda key: eqx.filter_vmap(one)(jr.split(key, 3))
        models = drawn(several, key=getkey())
        x = normal(getkey(), (3, 2), float)
        vmapped = lambda f: eqx.filter_vmap(f, in_axes=(eqx.if_array(0), None))
        leaves = lambda f, model: jax.tree.leaves(f(model, x)["all"])
        norm = lambda f: lambda model: sum(jnp.sum(x**2) for x in leaves(f, model))
        model = network(getkey())
        columns, rows = (
            filter_jacobian(outputs, mode=mode, block_size=2) for mode in MODES[:2]
        )

        @eqx.filter_jit
        def run(models, model, x):
            return [
                (vmapped(f)(models, x), eqx.filter_grad(norm(g))(model))
                for f, g in ((dense, dense), (columns, rows))
            ]

        expected, got = run(models, model, x)
        close(got, expected)


class TestMemory:
    def jacobian(self, **settings):
        def lines(parameters, grid):
            shifts = (grid - parameters["centre"][:, None]) / parameters["width"]
            return parameters["height"] @ jnp.exp(-(shifts**2))

        parameters = {
            "height": jnp.ones(20),
            "centre": jnp.linspace(0.0, 1.0, 20),
            "width": jnp.array(0.1),
        }
        grid = jnp.linspace(0.0, 1.0, 2_000)[None]
        run = lambda p, g: filter_jacobian(lines, flat=True, **settings)(p, g)[0]
        return run, (parameters, grid)

    @pytest.mark.cpu
    def test_smaller_blocks_take_less(self):
        # Older versions of XLA fuse all columns of the lines, which then take nothing.
        def smooth(weights, basis, window):
            return window @ jnp.tanh(basis @ weights)

        args = jnp.ones(40), jnp.ones((2_000, 40)), jnp.ones((10, 2_000))
        sizes = []
        for size in (1, 5, 20, None):
            jacobian = filter_jacobian(smooth, flat=True, block_size=size)
            run = lambda *args, jacobian=jacobian: jacobian(*args)[0]
            sizes.append(memory(run, *args).temp_size_in_bytes)
        assert sizes == sorted(sizes)
        assert 2 * sizes[0] < sizes[2]

    @pytest.mark.flags
    def test_checkpoint(self):
        run, args = self.jacobian(block_size=5, checkpoint=True)
        plain, _ = self.jacobian(block_size=5)
        assert_same(jax.jit(run)(*args), jax.jit(plain)(*args))

    @pytest.mark.cpu
    @pytest.mark.matrix
    @pytest.mark.parametrize("mode", MODES[:2])
    def test_budget(self, mode):
        most = 3_000_000
        run, args = self.jacobian(block_size=MemoryBudget(most), mode=mode)
        compiled = jax.jit(run).lower(*args).compile()
        stats = compiled.memory_analysis()
        assert stats.temp_size_in_bytes + stats.output_size_in_bytes <= most
        dense, _ = self.jacobian()
        assert_same(compiled(*args), dense(*args), tol=1e-4)


class TestBadInput:
    def test_outputs(self):
        x = jnp.ones(3)
        for out in ("no", jnp.arange(3), lambda: None):
            with pytest.raises(ValueError, match="arrays of an inexact dtype"):
                filter_jacobian(lambda x, out=out: {"a": x, "b": out})(x)
        with pytest.raises(ValueError, match=r"for output\['b'\]"):
            filter_jacobian(lambda x: {"a": x, "b": "no"})(x)
        with pytest.raises(ValueError, match="at least one array"):
            filter_jacobian(lambda x: None)(x)
        with pytest.raises(ValueError, match=r"pair `\(value, aux\)`"):
            filter_jacobian(jnp.sin, has_aux=True)(x)

    def test_parameters(self):
        for empty in ({}, None, jnp.arange(3), "no"):
            with pytest.raises(ValueError, match="nothing to differentiate"):
                filter_jacobian(lambda x: jnp.ones(2))(empty)
        with pytest.raises(ValueError, match="comes first, by position"):
            filter_jacobian(jnp.sin)(x=jnp.ones(2))
        with pytest.raises(TypeError, match="real and imaginary parts"):
            filter_jacobian(jnp.sin)(jnp.ones(2, complex))

    def test_settings(self, unchecked):
        with pytest.raises(ValueError, match="exclude each other"):
            filter_jacobian(jnp.sin, block_size=2, num_blocks=2)
        with pytest.raises(ValueError, match="`mode` must be one of"):
            filter_jacobian(jnp.sin, mode="columns")
        with pytest.raises(ValueError, match="`num_blocks` must be at least 1"):
            filter_jacobian(jnp.sin, num_blocks=0)
        with pytest.raises(TypeError, match="`block_size` must be int"):
            filter_jacobian(jnp.sin, block_size="2")

    def test_batch(self):
        for settings in ({"microbatch_size": 2}, {"accumulator": Mean()}):
            (name,) = settings
            with pytest.raises(ValueError, match=f"`{name}` is for a batch"):
                filter_jacobian(jnp.sin, **settings)
        with pytest.raises(ValueError, match="the budget as `microbatch_size`"):
            filter_jacobian(jnp.sin, in_axes=0, block_size="1MB")


def of_examples(getkey, total):
    """A function of one example, a model, examples along axis 1, and all Jacobians."""
    model = {
        "w": normal(getkey(), (3, 4), jnp.float64),
        "b": normal(getkey(), (3,), jnp.float64),
        "name": "model",
        "nothing": None,
    }
    x = normal(getkey(), (4, total), jnp.float64)

    def fun(model, x):
        return {"a": jnp.tanh(model["w"] @ x) * model["b"], "c": x[0] * model["b"][:1]}

    def of_one(w, b, x):
        return jax.jacrev(lambda w, b: fun({"w": w, "b": b}, x), (0, 1))(w, b)

    each = jax.jit(jax.vmap(of_one, (None, None, 1)))(model["w"], model["b"], x)
    jacobians = {
        name: {"w": of_w, "b": of_b, "name": None, "nothing": None}
        for name, (of_w, of_b) in each.items()
    }
    return fun, model, x, jacobians


@pytest.mark.parametrize("total", variants((0, 1, BLOCK, BLOCK + 1, 7), BLOCK, 7))
@pytest.mark.usefixtures("x64")
def test_of_each_example(getkey, total):
    fun, model, x, jacobians = of_examples(getkey, total)
    by_example = filter_jacobian(fun, in_axes=1, microbatch_size=BLOCK)
    assert_same(by_example(model, x), jacobians, tol=1e-12)


@pytest.mark.usefixtures("x64")
def test_mean_over_examples(getkey):
    fun, model, x, jacobians = of_examples(getkey, 7)
    mean, first = filter_jacobian(
        lambda model, x: (fun(model, x), x[0]),
        has_aux=True,
        in_axes=1,
        microbatch_size=BLOCK,
        accumulator=(Mean(), Concat()),
    )(model, x)
    assert_same(mean, jax.tree.map(lambda x: np.mean(x, 0), jacobians), tol=1e-12)
    assert_same(first, x[0], tol=1e-12)
