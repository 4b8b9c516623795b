"""Monte-Carlo kernels against loops over models, and against what they tend to."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxbatch import (
    HostStore,
    MemoryBudget,
    MonteCarloKernel,
    TopK,
    ZarrStore,
)
from eqxbatch.results import MonteCarloEstimate
from ..helpers import assert_bits, CountTraces, last_bits, make_mesh, normal, spread
from .random_kernels import as_jax, assert_same, each, init, kernel, KEY, sampled


def in_bfloat16(key):
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x
    return jax.tree.map(cast, init(key))


def with_dropout(key):
    dropout = eqx.nn.Dropout(0.3)
    return eqx.Partial(lambda model, x, key: dropout(model(x), key=key), init(key))


def data(getkey, *totals):
    return [normal(getkey(), (total, 3)).astype(float) for total in totals]


@pytest.mark.matrix
@pytest.mark.usefixtures("x64")
class TestTruth:
    @pytest.mark.parametrize(
        "settings",
        (
            {"samples_per_batch": 3},
            {"samples_per_batch": 100},
            {"samples_per_batch": MemoryBudget("1MB")},
            {"block_size": (2, 3), "samples_per_batch": 2},
            {"store": HostStore(), "block_size": 2},
        ),
    )
    def test_settings(self, settings, getkey):
        x, y = data(getkey, 5, 3)
        means, errors = sampled(x, y)
        monte_carlo = kernel(**settings)
        got = monte_carlo.estimate(x, y)
        assert_same(as_jax(got.kernel), means)
        assert_same(as_jax(got.standard_error), errors, tol=1e-9)
        assert got.num_samples == 7
        assert_same(as_jax(monte_carlo(x, y)), means)

    @pytest.mark.parametrize(
        "settings",
        (
            {"trace_axes": (), "diagonal_axes": (-1,)},
            {"trace_axes": (), "diagonal_axes": (0,)},
            {"method": "jacobian_contraction"},
            {"method": "ntk_vector_products"},
            {"in_axes": 1, "out_axes": 1},
        ),
    )
    def test_settings_of_kernels(self, settings, getkey):
        (x,) = data(getkey, 5)
        if "in_axes" in settings:
            x = x.T
            settings = {**settings, "trace_axes": (0,)}
        means, _ = sampled(x, **settings)
        assert_same(kernel(**settings)(x), means)

    @pytest.mark.parametrize("block", (None, 2))
    def test_symmetric(self, block, getkey):
        (x,) = data(getkey, 5)
        got = kernel(block_size=block)(x, get="ntk")
        assert_same(got, sampled(x)[0].ntk)
        assert (got == got.T).all()
        blocks = MonteCarloKernel(init, key=KEY, num_samples=7, store=HostStore())
        assert (blocks(x, get="ntk") == blocks(x, get="ntk").T).all()

    def test_get(self, getkey):
        (x,) = data(getkey, 5)
        means, errors = sampled(x)
        monte_carlo = kernel(get=["ntk", "NNGP"])
        assert monte_carlo(x)._fields == ("ntk", "nngp")
        assert_same(monte_carlo(x, get="nngp"), means.nngp)
        assert_same(monte_carlo(x, get=("ntk",)).ntk, means.ntk)
        one = kernel(get="ntk").estimate(x)
        assert_same(one.kernel, means.ntk)
        assert_same(one.standard_error, errors.ntk, tol=1e-9)

    def test_parameters(self, getkey):
        (x,) = data(getkey, 5)
        bias = lambda model: model.layers[0].layer.bias
        assert_same(kernel(where=bias)(x), sampled(x, where=bias)[0])
        weight = lambda model: model.layers[0].layer.weight
        spec = jax.tree.map(lambda _: False, init(KEY))
        spec = eqx.tree_at(weight, spec, True)
        assert_same(kernel(filter_spec=spec)(x), sampled(x, where=weight)[0])

    def test_no_parameters(self, getkey):
        (x,) = data(getkey, 5)
        fixed = lambda key: eqx.Partial(
            lambda w, x: jnp.cos(jax.lax.stop_gradient(w) @ x), jr.normal(key, (5, 3))
        )
        got = kernel(init=fixed, get="nngp")(x)
        expected = sampled(x, init=fixed)[0].nngp
        assert_same(got, expected)

    def test_one_sample(self, getkey):
        (x,) = data(getkey, 5)
        got = kernel(1).estimate(x, get="ntk")
        assert_same(got.kernel, jnp.asarray(np.asarray(each(init, 15, {}, x).ntk)[0]))
        assert jnp.isnan(got.standard_error).all()

    def test_no_examples(self):
        got = kernel(3)(jnp.zeros((0, 3)), jnp.zeros((4, 3)))
        assert got.nngp.shape == got.ntk.shape == (0, 4)

    def test_pytrees(self, getkey):
        x = {"a": normal(getkey(), (4, 3)).astype(float), "b": jnp.arange(4.0)}

        def make(key):
            model = init(key)
            return eqx.Partial(
                lambda model, x: {"c": model(x["a"]) * x["b"], "d": (model(x["a"]),)},
                model,
            )

        got = kernel(3, init=make)(x)
        assert_same(got, sampled(x, num=3, init=make)[0])


class TestTypes:
    @pytest.mark.parametrize("store", spread(("device", HostStore()), 1))
    def test_bfloat16(self, store, getkey):
        make = in_bfloat16
        x = normal(getkey(), (4, 3), jnp.bfloat16)
        got = kernel(40, init=make, store=store).estimate(x, get="nngp")
        assert got.kernel.dtype == got.standard_error.dtype == jnp.bfloat16
        # Added in float32: the error is that of the last rounding.
        nngps = np.asarray(each(make, 40, {}, x, get="nngp"))
        expected = np.mean(nngps.astype(np.float64), 0)
        wide = np.asarray(got.kernel).astype(np.float64)
        rtol = 2**-8 + last_bits(jnp.bfloat16)
        np.testing.assert_allclose(wide, expected, rtol=rtol)

    @pytest.mark.matrix
    @pytest.mark.parametrize("store", ("device", HostStore()))
    def test_float16(self, store, getkey):
        """The variance is out of range, and so are the squares of errors."""
        x = jnp.array([[40.0], [3e-2]], jnp.float16)

        def make(key, dtype=jnp.float16):
            weights = 2 + jr.uniform(key, (1,), jnp.float16).astype(dtype)
            return eqx.Partial(lambda w, x: w * x.astype(w.dtype), weights)

        in_float32 = lambda key: make(key, jnp.float32)
        settings = {"store": store, "get": "nngp"}
        got = kernel(100, init=make, **settings).estimate(x)
        wide = kernel(100, init=in_float32, **settings).estimate(x)
        assert got.standard_error.dtype == jnp.float16
        error = np.asarray(got.standard_error, np.float32)
        np.testing.assert_allclose(error, wide.standard_error, rtol=2e-2)
        several = kernel(200, init=make, tol=0.02, samples_per_batch=25, **settings)
        again = kernel(200, init=in_float32, tol=0.02, samples_per_batch=25, **settings)
        num = several.estimate(x).num_samples
        assert num == again.estimate(x).num_samples
        assert 25 < num < 200

    def test_complex(self, getkey):
        make = lambda key: eqx.Partial(jnp.dot, jr.normal(key, (2, 3), jnp.complex64))
        x = normal(getkey(), (4, 3), jnp.complex64)
        got = kernel(init=make).estimate(x)
        means, _ = sampled(x, init=make)
        assert_same(got.kernel, means)
        assert got.standard_error.nngp.dtype == jnp.float32


class TestCounts:
    @pytest.mark.parametrize("store", spread(("device", HostStore()), 1))
    def test_generator(self, store, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        settings = {"store": store, "get": "nngp"}
        kernels = kernel((5, 2, 7, 5), samples_per_batch=2, **settings)
        estimates = kernels.estimate(x, y)
        found = [*estimates]
        assert [estimate.num_samples for estimate in found] == [2, 5, 7]
        for estimate, alone in zip(found, kernels(x, y), strict=True):
            means, errors = sampled(x, y, estimate.num_samples, get="nngp")
            assert_same(as_jax(estimate.kernel), means)
            assert_same(as_jax(estimate.standard_error), errors, tol=1e-3)
            assert_same(as_jax(alone), means)

    def test_lazy_and_from_any_iterable(self, getkey):
        x = normal(getkey(), (5, 3))
        kernels = kernel({1_000_000: 0, 2: 1}.keys(), get="nngp")(x)
        assert_same(next(kernels), sampled(x, num=2, get="nngp")[0])
        three = sampled(x, num=3, get="nngp")[0]
        for numbers in (range(3, 5), np.array([3])):
            assert_same(next(kernel(numbers, get="nngp")(x)), three)

    @pytest.mark.parametrize("store", ("device", HostStore()))
    def test_previous(self, store, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        make = functools.partial(kernel, store=store, get="nngp")
        means, errors = sampled(x, y, get="nngp")
        for first in (1, 7) if store == "device" else ():
            start = make(first).estimate(x, y)
            got = make().estimate(x, y, previous=start)
            assert got.num_samples == 7
            assert_same(as_jax(got.kernel), means)
            assert_same(as_jax(got.standard_error), errors, tol=1e-3)
            # The earlier estimate can still be used.
            if first > 1:
                assert_same(as_jax(start.kernel), means)
        start = make(4).estimate(x, y)
        found = [*make((2, 5, 7)).estimate(x, y, previous=start)]
        assert [estimate.num_samples for estimate in found] == [5, 7]
        assert_same(as_jax(found[1].kernel), means)

    @pytest.mark.parametrize("store", spread(("device", HostStore()), 1))
    def test_infinite_kernels(self, store):
        """Infinity minus infinity is no part of a mean."""
        of_one = lambda key: eqx.Partial(lambda scale, x: x * scale, jnp.ones(()))
        kernels = MonteCarloKernel(
            of_one, key=KEY, num_samples=(1, 3), get="nngp", store=store
        )
        x = jnp.array([1.0, 2.0**100], jnp.float32)
        for found in kernels(x):
            np.testing.assert_array_equal(found, [[1, 2.0**100], [2.0**100, np.inf]])

    @pytest.mark.parametrize("store", spread(("device", HostStore()), 1))
    def test_tolerance(self, store, getkey):
        x = normal(getkey(), (5, 3))
        loose = kernel(1_000, tol=10.0, store=store).estimate(x)
        assert loose.num_samples == 8
        got = kernel(1_000, tol=0.1, store=store, samples_per_batch=3).estimate(x)
        norm = lambda x: float(np.linalg.norm(np.asarray(x)))
        relative = lambda e: max(
            norm(error) / norm(mean)
            for error, mean in zip(e.standard_error, e.kernel, strict=True)
        )
        assert 8 < got.num_samples < 1_000
        assert relative(got) <= 0.1
        before = kernel(got.num_samples - 3).estimate(x)
        assert relative(before) > 0.1
        assert kernel(9, tol=1e-9, store=store).estimate(x).num_samples == 9
        found = [*kernel((4, 20, 1_000, 10_000), tol=0.1).estimate(x)]
        assert [e.num_samples for e in found[:2]] == [4, 20]
        assert found[-1].num_samples < 1_000


class TestCalls:
    @pytest.mark.parametrize("pair", (False, True))
    def test_dropout(self, pair, getkey):
        x, y = normal(getkey(), (4, 3)), normal(getkey(), (5, 3))
        key = (getkey(), getkey()) if pair else getkey()
        make = functools.partial(kernel, 4, with_dropout, get="nngp")
        got = make()(x, y, key=key)
        one, two = key if pair else jr.split(key)
        keys = jr.split(one, 4), jr.split(two, 5)
        expected, _ = sampled(x, y, 4, with_dropout, keys, "nngp")
        assert_same(got, expected)
        in_batches = {"samples_per_batch": 2}
        stored = {"block_size": 2, "store": HostStore()}
        for settings in () if pair else (in_batches, stored):
            other = make(**settings)(x, y, key=key)
            assert_same(as_jax(other), expected)

    def test_the_same_examples_twice(self, getkey):
        x, key = normal(getkey(), (4, 3)), getkey()
        monte_carlo = kernel(5, init=with_dropout, get="nngp")
        expected = np.asarray(monte_carlo.estimate(x, key=key).kernel)
        got = monte_carlo.estimate(x, x, key=key).kernel
        assert_bits(np.asarray(got), expected)
        np.testing.assert_array_equal(expected, expected.T)

    def test_state(self, getkey):
        class Model(eqx.Module):
            layer: eqx.Module
            norm: eqx.nn.BatchNorm

            def __init__(self, key):
                self.layer = init(key)
                self.norm = eqx.nn.BatchNorm(2, "batch", mode="batch")

            def __call__(self, x, state):
                return self.norm(self.layer(x), state, inference=True)

        make = eqx.nn.make_with_state(Model)
        x = normal(getkey(), (4, 3))
        got = kernel(init=make, get="nngp")(x)

        def without(key):
            model, state = make(key)
            return eqx.Partial(lambda model, x: model(x, state)[0], model)

        assert_same(got, sampled(x, init=without, get="nngp")[0])

    def test_keys_in_models(self, getkey):
        """As a layer has that is random in itself, with new and with old keys."""
        x, means = normal(getkey(), (4, 3)), None
        for fold in (lambda key: key, jr.key_data):

            def make(key, fold=fold):
                noise = lambda model, key, x: (
                    model(x)
                    + jr.normal(
                        jr.wrap_key_data(key) if fold is jr.key_data else key, (2,)
                    )
                )
                return eqx.Partial(noise, init(key), fold(key))

            if means is None:
                means = sampled(x, num=6, init=make, get="nngp")[0]
            got = kernel(6, init=make, samples_per_batch=2, get="nngp")(x)
            assert_same(got, means)

    def test_keyword_arguments(self, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        own = normal(getkey(), (5,)), normal(getkey(), (3,))

        def make(key):
            return eqx.Partial(
                lambda model, x, own, scale: model(x) * own * scale, init(key)
            )

        settings = {"samples_per_batch": 2, "get": "nngp"}
        got = kernel(6, init=make, **settings)(x, y, own=own, scale=2.0)
        nngp = np.asarray(sampled(x, y, num=6, get="nngp")[0])
        assert_same(got, jnp.asarray(4 * nngp * np.outer(*own)))

    def test_transformed(self, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        monte_carlo = kernel(samples_per_batch=2)
        means, errors = sampled(x, y)
        got = eqx.filter_jit(lambda k, x: k.estimate(x, y))(monte_carlo, x)
        assert_same(got.kernel, means)
        assert_same(got.standard_error, errors, tol=1e-3)

        total = lambda x: monte_carlo(x, y, get="nngp").sum()
        dense = lambda x: each(init, 7, {}, x, y, get="nngp").mean(0).sum()
        gradients = jax.jit(lambda x: (jax.grad(total)(x), jax.grad(dense)(x)))
        assert_same(*gradients(x))

    @pytest.mark.matrix
    def test_mapped_over_keys(self, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        settings = {"num_samples": 3, "get": "nngp"}
        of_key = lambda key: MonteCarloKernel(init, key=key, **settings)(x, y)
        numbers = np.asarray(jr.key_data(KEY))
        numbers = jax.device_put(np.stack([numbers, ~numbers]))
        one, other = np.asarray(jax.jit(jax.vmap(of_key))(jr.wrap_key_data(numbers)))
        assert_same(one, np.asarray(sampled(x, y, num=3)[0].nngp))
        assert not np.allclose(one, other, rtol=0.1)

    def test_traces(self, getkey):
        x = normal(getkey(), (4, 3))
        make = CountTraces(init)
        kernel(5, init=make, get="nngp")(x)
        num = make.num
        # Of two, the constructor asks whether they are the same.
        assert num <= 4
        for count in (5, 50):
            again = kernel(count, init=make, get="nngp")
            assert make.num == num + 2
            num = make.num
            again(x + 1)
            assert make.num == num
        [*kernel((3, 30), init=make, get="nngp")(x)]
        assert make.num == num + 2


class TestBadInput:
    @pytest.mark.parametrize("num", (0, -3, (), (3, 0), [2, -1]))
    def test_too_few_samples(self, num):
        with pytest.raises(ValueError, match="`num_samples` must be at least 1"):
            kernel(num)

    @pytest.mark.parametrize("num", (1.5, "3", None, True, (2, 3.0), jnp.ones(2)))
    def test_samples_that_are_no_ints(self, num, unchecked):
        with pytest.raises(TypeError, match="`num_samples` must be an int or"):
            kernel(num)

    def test_models(self, unchecked):
        calls = []

        def changing(key):
            calls.append(key)
            return eqx.nn.Linear(3, len(calls), key=key)

        for make, error, match in (
            (3, TypeError, "`init` must be a function"),
            (lambda key: jr.normal(key), TypeError, "must return a callable model"),
            (lambda key: jnp.sin, ValueError, "a model with arrays in it"),
            (changing, ValueError, r"same structure for all keys.*\.weight"),
        ):
            with pytest.raises(error, match=match):
                kernel(init=make)

    @pytest.mark.devices
    def test_settings(self, tmp_path, unchecked):
        mesh = make_mesh(None, (2, 2), ("s", "r"))
        disk = {"store": ZarrStore(tmp_path), "block_size": 2}
        for settings, error, match in (
            ({"samples_per_batch": 0}, ValueError, "`samples_per_batch` must be at"),
            ({"samples_per_batch": None}, TypeError, "int or a `MemoryBudget`"),
            ({"tol": 0.0}, ValueError, "`tol` must be a positive number"),
            ({"tol": "a"}, ValueError, "`tol` must be a positive number"),
            ({"get": "x"}, ValueError, "`get` must be"),
            ({"mesh": mesh, "sample_axis": "t"}, ValueError, "one of the axes of the"),
            (
                {"mesh": mesh, "sample_axis": "s", "mesh_axis": "s"},
                ValueError,
                "must be different axes",
            ),
            ({"sample_axis": "s"}, ValueError, "there is no `mesh`"),
            (
                {"mesh": mesh, "sample_axis": "s", "mesh_axis": "r", **disk},
                ValueError,
                "and not both",
            ),
            ({"tol": 0.1, **disk}, ValueError, "a store on disk does not support"),
            ({"num": (1, 2), **disk}, ValueError, "a store on disk does not support"),
            ({"method": 7}, ValueError, "`method` must be"),
            ({"trace_axes": 0.5}, TypeError, "`trace_axes`"),
            ({"in_axes": None, **disk, "block_size": None}, ValueError, "cannot go"),
            (
                {"in_axes": None, "mesh": mesh, "mesh_axis": "r"},
                ValueError,
                "a model of a whole batch cannot",
            ),
            (
                {"in_axes": None, "reduce": TopK(1)},
                ValueError,
                "cannot go to",
            ),
            ({"out_axes": 1, **disk}, ValueError, "`out_axes` must be 0; got 1"),
            (
                {
                    "tol": 0.1,
                    "store": HostStore(),
                    "samples_per_batch": MemoryBudget("1MB"),
                },
                ValueError,
                "`samples_per_batch` must be an int; got",
            ),
            ({"diagonal_axes": 0, **disk}, ValueError, "got the batch axis 0 in"),
        ):
            with pytest.raises(error, match=match):
                kernel(**settings)

    def test_calls(self, tmp_path, unchecked):
        x = jnp.ones((3, 3))
        start = kernel(5, get="nngp").estimate(x)
        with pytest.raises(
            ValueError, match="has 5 samples, more than `num_samples`, 3"
        ):
            kernel(3, get="nngp").estimate(x, previous=start)
        with pytest.raises(TypeError, match="must be a `MonteCarloEstimate`"):
            kernel(9, get="nngp").estimate(x, previous=start.kernel)
        disk = kernel(9, store=ZarrStore(tmp_path), block_size=2, get="nngp")
        with pytest.raises(ValueError, match="a store on disk does not support"):
            disk.estimate(x, previous=start)
        with pytest.raises(TypeError, match="with `tol` runs a loop in Python"):
            jax.jit(lambda x: kernel(tol=0.1)(x))(x)
        with pytest.raises(TypeError, match="with a `store` runs a loop in Python"):
            jax.jit(lambda x: kernel(store=HostStore())(x))(x)
        with pytest.raises(ValueError, match="`get` must be"):
            kernel((3, 4))(x, get="x")
        assert isinstance(start, MonteCarloEstimate)
