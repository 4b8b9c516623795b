"""Monte-Carlo kernels against loops over models, and against what they tend to."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import (
    AbstractProgressMeter,
    EmpiricalKernel,
    HostStore,
    MemoryBudget,
    MonteCarloEstimate,
    MonteCarloKernel,
    ntk_parameterise,
    ZarrStore,
)
from . import helpers
from .helpers import CountTraces, memory, normal


KEY = jr.key(7)


def init(key, width=8, depth=1, out=2, activation=jax.nn.relu):
    mlp = eqx.nn.MLP(3, out, width, depth, activation, key=key)
    return ntk_parameterise(mlp, weight_std=1.3, bias_std=0.2, key=key)


def assert_same(got, expected, tol=None):
    """As means of kernels are the same, which cancel: wider in float32."""
    singles = (jnp.float32, jnp.complex64)
    arrays = filter(eqx.is_array, jax.tree.leaves(expected))
    if tol is None and any(x.dtype in singles for x in arrays):
        tol = 2e-4
    helpers.assert_same(got, expected, tol)


def in_bfloat16(key):
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x
    return jax.tree.map(cast, init(key))


def with_dropout(key):
    dropout = eqx.nn.Dropout(0.3)
    return eqx.Partial(lambda model, x, key: dropout(model(x), key=key), init(key))


def data(getkey, *totals):
    return [normal(getkey(), (total, 3)).astype(float) for total in totals]


@eqx.filter_jit
def each(init, num, settings, x1, x2=None, keys=None):
    """The kernels of all samples, from a loop over models in one program."""

    def one(i):
        fold = jax.vmap(lambda key: jr.fold_in(key, i))
        key = None if keys is None else tuple(fold(key) for key in keys)
        return EmpiricalKernel(init(jr.fold_in(KEY, i)), **settings)(x1, x2, key=key)

    return jax.lax.map(one, jnp.arange(num))


def sampled(x1, x2=None, num=7, init=init, keys=None, **settings):
    """Means and their standard errors.

    Fewer than 15 samples are the first of those, for which there is a program.
    """
    kernels = jax.device_get(each(init, max(num, 15), settings, x1, x2, keys))

    def mean(k):
        wide = np.mean(k[:num], 0, np.result_type(k, np.float64))
        return jnp.asarray(wide.astype(k.dtype))

    def error(k):
        wide = np.std(k[:num].astype(np.result_type(k, np.float64)), 0, ddof=1)
        return jnp.asarray((wide / num**0.5).astype(k.real.dtype))

    return jax.tree.map(mean, kernels), jax.tree.map(error, kernels)


def as_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


def kernel(num=7, init=init, **settings):
    return MonteCarloKernel(init, key=KEY, n_samples=num, **settings)


@pytest.mark.matrix
@pytest.mark.usefixtures("x64")
class TestTruth:
    @pytest.mark.parametrize(
        "settings",
        (
            {},
            {"samples_per_batch": 3},
            {"samples_per_batch": 7},
            {"samples_per_batch": 100},
            {"samples_per_batch": MemoryBudget("1MB")},
            {"block_size": 2},
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
            {"trace_axes": ()},
            {"trace_axes": (), "diagonal_axes": (-1,)},
            {"trace_axes": (), "diagonal_axes": (0,)},
            {"implementation": "jacobian_contraction"},
            {"implementation": "ntk_vector_products"},
            {"implementation": "sites"},
            {"vmap_axes": 1},
        ),
    )
    def test_settings_of_kernels(self, settings, getkey):
        (x,) = data(getkey, 5)
        if settings.get("vmap_axes") == 1:
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
        blocks = MonteCarloKernel(init, key=KEY, n_samples=7, store=HostStore())
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
        last = lambda model: model.layers[-1]
        assert_same(kernel(where=last)(x), sampled(x, where=last)[0])
        drawn = init(KEY)
        spec = jax.tree.map(lambda _: False, drawn)
        spec = eqx.tree_at(lambda m: m.layers[0].layer.weight, spec, True)
        first = lambda model: model.layers[0].layer.weight
        assert_same(kernel(filter_spec=spec)(x), sampled(x, where=first)[0])

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
    @pytest.mark.parametrize("store", ("device", HostStore()))
    def test_bfloat16(self, store, getkey):
        make = in_bfloat16
        x = normal(getkey(), (4, 3), jnp.bfloat16)
        got = kernel(40, init=make, store=store).estimate(x, get="nngp")
        assert got.kernel.dtype == got.standard_error.dtype == jnp.bfloat16
        # Added in float32: the error is that of the last rounding.
        nngps = np.asarray(each(make, 40, {}, x).nngp)
        expected = np.mean(nngps.astype(np.float64), 0)
        wide = np.asarray(got.kernel).astype(np.float64)
        np.testing.assert_allclose(wide, expected, rtol=2**-8)

    def test_complex(self, getkey):
        make = lambda key: eqx.Partial(jnp.dot, jr.normal(key, (2, 3), jnp.complex64))
        x = normal(getkey(), (4, 3), jnp.complex64)
        got = kernel(init=make).estimate(x)
        means, _ = sampled(x, init=make)
        assert_same(got.kernel, means)
        assert got.standard_error.nngp.dtype == jnp.float32


class TestCounts:
    @pytest.mark.parametrize("store", ("device", HostStore()))
    def test_generator(self, store, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        kernels = kernel((5, 2, 7, 5), samples_per_batch=2, store=store)
        estimates = kernels.estimate(x, y)
        found = [*estimates]
        assert [estimate.num_samples for estimate in found] == [2, 5, 7]
        for estimate, alone in zip(found, kernels(x, y), strict=True):
            means, errors = sampled(x, y, estimate.num_samples)
            assert_same(as_jax(estimate.kernel), means)
            assert_same(as_jax(estimate.standard_error), errors, tol=1e-3)
            assert_same(as_jax(alone), means)

    def test_lazy_and_from_any_iterable(self, getkey):
        x = normal(getkey(), (5, 3))
        kernels = kernel((n for n in (1_000_000, 2)), get="nngp")(x)
        assert_same(next(kernels), sampled(x, num=2)[0].nngp)
        assert_same(next(kernel(range(3, 5))(x)).nngp, sampled(x, num=3)[0].nngp)
        assert_same(next(kernel(np.array([3]))(x)).nngp, sampled(x, num=3)[0].nngp)

    @pytest.mark.parametrize("store", ("device", HostStore()))
    def test_previous(self, store, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        for first in (1, 3, 7):
            start = kernel(first, store=store).estimate(x, y)
            got = kernel(store=store).estimate(x, y, previous=start)
            assert got.num_samples == 7
            means, errors = sampled(x, y)
            assert_same(as_jax(got.kernel), means)
            assert_same(as_jax(got.standard_error), errors, tol=1e-3)
        several = kernel((2, 5, 7), get="ntk", store=store)
        start = kernel(4, get="ntk", store=store).estimate(x, y)
        found = [*several.estimate(x, y, previous=start)]
        assert [estimate.num_samples for estimate in found] == [5, 7]
        assert_same(jnp.asarray(found[1].kernel), sampled(x, y)[0].ntk)

    @pytest.mark.parametrize("store", ("device", HostStore()))
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
        got = kernel(5, init=with_dropout)(x, y, key=key)
        one, two = key if pair else (key, jr.fold_in(key, 1))
        keys = jr.split(one, 4), jr.split(two, 5)
        expected, _ = sampled(x, y, 5, with_dropout, keys)
        assert_same(got, expected)
        blocks, stored = {"block_size": 2}, {"block_size": 2, "store": HostStore()}
        for settings in (stored,) if pair else (blocks, {"samples_per_batch": 2}):
            other = kernel(5, init=with_dropout, **settings)(x, y, key=key)
            assert_same(as_jax(other), expected)

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
        got = kernel(init=make)(x)

        def without(key):
            model, state = make(key)
            return eqx.Partial(lambda model, x: model(x, state)[0], model)

        assert_same(got, sampled(x, init=without)[0])

    def test_keys_in_models(self, getkey):
        """As a layer has that is random in itself, with new and with old keys."""
        for fold in (lambda key: key, jr.key_data):

            def make(key, fold=fold):
                noise = lambda model, key, x: (
                    model(x)
                    + jr.normal(
                        jr.wrap_key_data(key) if fold is jr.key_data else key, (2,)
                    )
                )
                return eqx.Partial(noise, init(key), fold(key))

            x = normal(getkey(), (4, 3))
            got = kernel(init=make, samples_per_batch=2)(x)
            assert_same(got, sampled(x, init=make)[0])

    def test_keyword_arguments(self, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        own = normal(getkey(), (5,)), normal(getkey(), (3,))

        def make(key):
            return eqx.Partial(
                lambda model, x, own, scale: model(x) * own * scale, init(key)
            )

        got = kernel(init=make, samples_per_batch=2)(x, y, own=own, scale=2.0)
        expected = 4 * np.asarray(sampled(x, y)[0].nngp) * np.outer(*own)
        assert_same(got.nngp, jnp.asarray(expected))

    def test_transformed(self, getkey):
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        monte_carlo = kernel(samples_per_batch=2)
        means, errors = sampled(x, y)
        got = eqx.filter_jit(lambda k, x: k.estimate(x, y))(monte_carlo, x)
        assert_same(got.kernel, means)
        assert_same(got.standard_error, errors, tol=1e-3)

        total = lambda x: monte_carlo(x, y, get="ntk").sum()
        dense = lambda x: each(init, 7, {}, x, y).ntk.mean(0).sum()
        assert_same(jax.jit(jax.grad(total))(x), jax.jit(jax.grad(dense))(x))

        keys = jr.split(KEY, 3)
        of_key = lambda key: MonteCarloKernel(init, key=key, n_samples=3)(x, y).nngp
        got = jax.jit(jax.vmap(of_key))(keys)
        one_by_one = jax.jit(lambda keys: jax.lax.map(of_key, keys))
        assert_same(got, one_by_one(keys))

    def test_traces(self, getkey):
        x = normal(getkey(), (4, 3))
        make = CountTraces(init)
        kernel(5, init=make)(x)
        num = make.num
        # Of two, the constructor asks whether they are the same.
        assert num <= 4
        for count in (5, 50):
            again = kernel(count, init=make)
            assert make.num == num + 2
            num = make.num
            again(x + 1)
            assert make.num == num
        [*kernel((3, 30), init=make)(x)]
        assert make.num == num + 2


class TestDevices:
    @pytest.mark.parametrize(
        ("axes", "types"),
        (
            ({"sample_axis": "s"}, AxisType.Auto),
            ({"mesh_axis": "r"}, AxisType.Explicit),
            ({"sample_axis": "s", "mesh_axis": "r"}, AxisType.Auto),
            ({"sample_axis": "s", "mesh_axis": "r"}, AxisType.Explicit),
        ),
    )
    def test_meshes(self, axes, types, getkey):
        mesh = jax.make_mesh((2, 2), ("s", "r"), axis_types=(types,) * 2)
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        means, errors = sampled(x, y)
        got = kernel(mesh=mesh, **axes).estimate(x, y)
        assert_same(got.kernel, means)
        assert_same(got.standard_error, errors, tol=1e-3)

    def test_batches_on_devices(self, getkey):
        mesh = jax.make_mesh((4,), ("s",))
        x = normal(getkey(), (5, 3))
        settings = {"mesh": mesh, "sample_axis": "s", "samples_per_batch": 2}
        assert_same(kernel(15, **settings)(x), sampled(x, num=15)[0])
        jitted = eqx.filter_jit(lambda k, x: k(x))
        assert_same(jitted(kernel(15, **settings), x), sampled(x, num=15)[0])

    def test_samples_are_shared(self):
        """Each of four devices has a quarter of the models in memory."""
        mesh = jax.make_mesh((4,), ("s",))
        wide = lambda key: init(key, width=256)

        def program(**settings):
            monte_carlo = kernel(8, init=wide, get="nngp", **settings)
            run = lambda x: monte_carlo(x)
            return memory(run, jnp.ones((64, 3))).temp_size_in_bytes

        alone = program(samples_per_batch=8)
        shared = program(samples_per_batch=2, mesh=mesh, sample_axis="s")
        assert shared < 0.4 * alone

    @pytest.mark.parametrize("axis", ("mesh_axis", "sample_axis"))
    def test_stores(self, axis, getkey):
        mesh = jax.make_mesh((4,), ("r",))
        x = normal(getkey(), (9, 3))
        settings = {"mesh": mesh, axis: "r", "store": HostStore(), "block_size": 2}
        got = as_jax(kernel(**settings)(x))
        assert_same(got, sampled(x)[0])


class TestStores:
    def test_disk(self, tmp_path, getkey):
        x = normal(getkey(), (5, 3))
        store = ZarrStore(tmp_path / "kernel")
        got = kernel(store=store, block_size=2).estimate(x)
        means, errors = sampled(x)
        as_jax = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)
        assert_same(as_jax(got.kernel), means)
        assert_same(as_jax(got.standard_error), errors, tol=1e-3)

    def test_interrupted_run_continues(self, tmp_path, getkey):
        class Stop(AbstractProgressMeter):
            done: list

            def start(self, num_blocks, num_done):
                self.done.append(num_done)
                return 0

            def step(self, state, num_nans):
                if len(self.done) == 1 and state == 2:
                    raise KeyboardInterrupt
                return state + 1

            def close(self, state):
                pass

        x = normal(getkey(), (6, 3))
        store, meter = ZarrStore(tmp_path / "kernel"), Stop([])
        run = kernel(store=store, block_size=2, progress=meter)
        with pytest.raises(KeyboardInterrupt):
            run(x)
        got = run(x, get=None)
        assert meter.done[0] == 0
        assert meter.done[1] > 0
        assert_same(jnp.asarray(np.asarray(got.ntk)), sampled(x)[0].ntk)

    def test_progress(self, getkey):
        class Log(AbstractProgressMeter):
            calls: list

            def start(self, num_blocks, num_done):
                self.calls.append(("start", num_blocks, num_done))

            def step(self, state, num_nans):
                self.calls.append(("step", num_nans))

            def close(self, state):
                self.calls.append(("close",))

        def make(key):
            """NaN in about every second sample."""
            model = init(key)
            bad = jnp.where(jr.bernoulli(key), jnp.nan, 1.0)
            return eqx.Partial(lambda model, bad, x: model(x) * bad, model, bad)

        x = normal(getkey(), (3, 3))
        meter = Log([])
        kernel(7, init=make, samples_per_batch=2, progress=meter, get="nngp")(x)
        assert meter.calls[0] == ("start", 4, 0)
        assert [call[0] for call in meter.calls] == ["start", *["step"] * 4, "close"]
        assert sum(call[1] for call in meter.calls[1:-1]) == 9
        meter.calls.clear()
        running = kernel((2, 7), progress=meter, get="nngp")(x)
        next(running)
        running.close()
        assert [call[0] for call in meter.calls] == ["start", "step", "step", "close"]


class TestMemory:
    def program(self, num, **settings):
        wide = lambda key: init(key, width=64)
        monte_carlo = kernel(num, init=wide, **settings)
        return memory(lambda x: monte_carlo(x), jnp.ones((40, 3)))

    def test_flat_in_the_number_of_samples(self):
        sizes = [self.program(n).temp_size_in_bytes for n in (10, 1_000)]
        assert sizes[1] <= 1.01 * sizes[0] + 4 * 1_000

    def test_grows_with_the_samples_of_a_batch(self):
        sizes = [
            self.program(32, samples_per_batch=n).temp_size_in_bytes for n in (1, 32)
        ]
        assert sizes[1] > 4 * sizes[0]

    def test_budget(self):
        budget = MemoryBudget("3MB")
        stats = self.program(100, samples_per_batch=budget)
        used = stats.temp_size_in_bytes + stats.output_size_in_bytes
        assert 300_000 < used <= 3_000_000


class TestBadInput:
    @pytest.mark.parametrize("num", (0, -3, (), (3, 0), [2, -1]))
    def test_too_few_samples(self, num):
        with pytest.raises(ValueError, match="`n_samples` must be at least 1"):
            kernel(num)

    @pytest.mark.parametrize("num", (1.5, "3", None, True, (2, 3.0), jnp.ones(2)))
    def test_samples_that_are_no_ints(self, num, unchecked):
        with pytest.raises(TypeError, match="`n_samples` must be an int or"):
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

    def test_settings(self, tmp_path, unchecked):
        mesh = jax.make_mesh((2, 2), ("s", "r"))
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
            ({"tol": 0.1, **disk}, ValueError, "a store on disk is not made for"),
            ({"num": (1, 2), **disk}, ValueError, "a store on disk is not made for"),
            ({"implementation": 7}, ValueError, "`implementation` must be"),
            ({"trace_axes": 0.5}, TypeError, "`trace_axes`"),
        ):
            with pytest.raises(error, match=match):
                kernel(**settings)

    def test_calls(self, tmp_path, unchecked):
        x = jnp.ones((3, 3))
        start = kernel(5).estimate(x)
        with pytest.raises(ValueError, match="has 5 samples, more than `n_samples`, 3"):
            kernel(3).estimate(x, previous=start)
        with pytest.raises(TypeError, match="must be a `MonteCarloEstimate`"):
            kernel(9).estimate(x, previous=start.kernel)
        disk = kernel(9, store=ZarrStore(tmp_path), block_size=2)
        with pytest.raises(ValueError, match="a store on disk is not made for"):
            disk.estimate(x, previous=start)
        with pytest.raises(TypeError, match="with `tol` runs a loop in Python"):
            jax.jit(lambda x: kernel(tol=0.1)(x))(x)
        with pytest.raises(TypeError, match="with a `store` runs a loop in Python"):
            jax.jit(lambda x: kernel(store=HostStore())(x))(x)
        with pytest.raises(ValueError, match="`get` must be"):
            kernel((3, 4))(x, get="x")
        assert isinstance(start, MonteCarloEstimate)


class TestParameterise:
    def test_linear(self, getkey):
        layer = eqx.nn.Linear(4, 3, key=getkey())
        drawn = ntk_parameterise(layer, weight_std=1.5, bias_std=0.5, key=getkey())
        x = normal(getkey(), (4,))
        inner = drawn.layer
        expected = 1.5 / 2.0 * inner.weight @ x + 0.5 * inner.bias
        assert_same(drawn(x), expected)
        assert (inner.weight != layer.weight).all()

    @pytest.mark.parametrize(
        ("make", "fan_in"),
        (
            (lambda key: eqx.nn.Conv2d(4, 6, (3, 2), groups=2, key=key), 12),
            (lambda key: eqx.nn.Conv2d(4, 6, (3, 2), use_bias=False, key=key), 24),
            (lambda key: eqx.nn.ConvTranspose2d(4, 6, 3, stride=2, key=key), 36),
        ),
    )
    def test_convolutions(self, make, fan_in, getkey):
        layer = ntk_parameterise(make(getkey()), weight_std=2.0, key=getkey())
        x = normal(getkey(), (4, 5, 5))
        plain = layer.layer
        scaled = eqx.tree_at(
            lambda m: m.weight, plain, plain.weight * (2 / fan_in**0.5)
        )
        if plain.bias is not None:
            scaled = eqx.tree_at(lambda m: m.bias, scaled, 0 * plain.bias)
        assert_same(layer(x), scaled(x))

    def test_standard_normal(self):
        drawn = ntk_parameterise(eqx.nn.Linear(100, 100, key=KEY), key=KEY).layer
        values = jnp.concatenate([jnp.ravel(drawn.weight), drawn.bias])
        assert abs(values.mean()) < 0.05
        assert abs(values.std() - 1) < 0.05

    def test_all_else_stays(self, getkey):
        norm = eqx.nn.LayerNorm(3)
        model = [eqx.nn.Linear(2, 3, dtype=jnp.bfloat16, key=KEY), norm, None, "name"]
        drawn = ntk_parameterise(model, key=KEY)
        assert eqx.tree_equal(drawn[1:], model[1:])
        assert drawn[0].layer.weight.dtype == jnp.bfloat16
        twins = [eqx.nn.Linear(2, 3, key=KEY), eqx.nn.Linear(2, 3, key=KEY)]
        first, second = ntk_parameterise(twins, key=KEY)
        assert (first.layer.weight != second.layer.weight).all()

    def test_bad_input(self):
        layer = eqx.nn.Linear(2, 3, key=KEY)
        with pytest.raises(ValueError, match="`model` must have layers of"):
            ntk_parameterise(eqx.nn.LayerNorm(3), key=KEY)
        for std in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="`weight_std` must be finite"):
                ntk_parameterise(layer, weight_std=std, key=KEY)


def arc_cosine(covariance):
    """What a ReLU makes of Gaussians: second moments, and those of its derivative."""
    scales = np.sqrt(np.diag(covariance))
    product = np.outer(scales, scales)
    cosine = np.clip(covariance / product, -1, 1)
    angle = np.arccos(cosine)
    values = product * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)
    return values, (np.pi - angle) / (2 * np.pi)


def arc_sine(covariance):
    """The same for erf."""
    scales = 1 + 2 * np.diag(covariance)
    product = np.outer(scales, scales)
    values = 2 / np.pi * np.arcsin(2 * covariance / np.sqrt(product))
    return values, 4 / np.pi / np.sqrt(product - 4 * covariance**2)


def limit(x, activation, depth, weight_std=1.3, bias_std=0.2):
    """NNGP and NTK of infinitely wide networks, in float64."""
    x = np.asarray(x, np.float64)
    affine = lambda k: weight_std**2 * k + bias_std**2
    nngp = affine(x @ x.T / x.shape[1])
    ntk = nngp
    for _ in range(depth):
        values, slopes = activation(nngp)
        nngp = affine(values)
        ntk = nngp + weight_std**2 * ntk * slopes
    return {"nngp": nngp, "ntk": ntk}


@pytest.mark.matrix
class TestLimits:
    """Cho and Saul, 2009, and Williams, 1997; the NTK as Jacot et al., 2018, have it.

    Keys are fixed: at four standard errors, one in some thousand entries is further.
    """

    x = jr.normal(jr.key(1), (4, 3))
    functions = ((jax.nn.relu, arc_cosine), (jax.lax.erf, arc_sine))

    @pytest.mark.parametrize("number", (0, 1))
    @pytest.mark.parametrize("width", (8, 128))
    def test_within_standard_errors(self, width, number):
        """With one hidden layer, there is no bias at any width."""
        activation, analytic = self.functions[number]
        make = lambda key: init(key, width, activation=activation)
        expected = limit(self.x, analytic, 1)
        kernels = kernel((100, 1_000), init=make, samples_per_batch=100)
        for estimate in kernels.estimate(self.x):
            for name, exact in expected.items():
                mean = getattr(estimate.kernel, name)
                error = getattr(estimate.standard_error, name)
                assert jnp.max(jnp.abs(mean - exact) / error) < 4
                assert jnp.max(error / jnp.abs(exact).max()) < 0.15

    def test_error_falls_with_samples(self):
        counts = (4, 16, 64)
        expected = limit(self.x, arc_cosine, 1)["ntk"]

        def errors(key):
            kernels = MonteCarloKernel(
                init, key=key, n_samples=counts, get="ntk", samples_per_batch=4
            )
            return jnp.stack([jnp.sum((k - expected) ** 2) for k in kernels(self.x)])

        squared = jnp.mean(jax.jit(jax.vmap(errors))(jr.split(KEY, 200)), 0)
        slope = np.polyfit(np.log(counts), np.log(squared) / 2, 1)[0]
        assert abs(slope + 0.5) < 0.1

    def test_bias_falls_with_width(self):
        widths = (2, 4, 8)
        expected = limit(self.x, arc_sine, 3)["ntk"]
        biases = []
        for width in widths:
            make = lambda key, width=width: init(key, width, 3, 4, jax.lax.erf)
            monte_carlo = kernel(20_000, init=make, get="ntk", samples_per_batch=500)
            got = monte_carlo.estimate(self.x)
            bias = jnp.linalg.norm(got.kernel - expected)
            assert jnp.linalg.norm(got.standard_error) < 0.25 * bias
            biases.append(float(bias))
        slope = np.polyfit(np.log(widths), np.log(biases), 1)[0]
        assert abs(slope + 1) < 0.2
