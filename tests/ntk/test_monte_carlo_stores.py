"""Monte-Carlo kernels on devices, in stores, and within memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import (
    AbstractProgressMeter,
    HostStore,
    MemoryBudget,
    ZarrStore,
)
from ..helpers import make_mesh, memory, normal, spread
from .random_kernels import as_jax, assert_same, init, kernel, network, sampled


@pytest.mark.devices
class TestDevices:
    @pytest.mark.parametrize(
        ("axes", "types"),
        (
            ({"sample_axis": "s"}, AxisType.Auto),
            ({"sample_axis": "s", "mesh_axis": "r"}, AxisType.Explicit),
            pytest.param(
                {"mesh_axis": "r"}, AxisType.Explicit, marks=pytest.mark.matrix
            ),
            pytest.param(
                {"sample_axis": "s", "mesh_axis": "r"},
                AxisType.Auto,
                marks=pytest.mark.matrix,
            ),
        ),
    )
    def test_meshes(self, axes, types, getkey):
        mesh = make_mesh(types, (2, 2), ("s", "r"))
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (3, 3))
        # Both kernels, where both axes are used.
        get = None if len(axes) == 2 else "nngp"
        means, errors = sampled(x, y, get=get)
        got = kernel(mesh=mesh, get=get, **axes).estimate(x, y)
        assert_same(got.kernel, means)
        assert_same(got.standard_error, errors, tol=1e-3)

    def test_batches_on_devices(self, getkey):
        mesh = make_mesh(None, names=("s",))
        x = normal(getkey(), (5, 3))
        settings = {"mesh": mesh, "sample_axis": "s", "samples_per_batch": 2}
        jitted = eqx.filter_jit(lambda k, x: k(x))
        got = jitted(kernel(15, get="nngp", **settings), x)
        assert_same(got, sampled(x, num=15, get="nngp")[0])

    @pytest.mark.cpu
    def test_samples_are_shared(self):
        """Each of four devices has a quarter of the models in memory."""
        mesh = make_mesh(None, names=("s",))
        wide = lambda key: network(key, width=256)

        def program(**settings):
            monte_carlo = kernel(8, init=wide, get="nngp", **settings)
            run = lambda x: monte_carlo(x)
            return memory(run, jnp.ones((64, 3))).temp_size_in_bytes

        alone = program(samples_per_batch=8)
        shared = program(samples_per_batch=2, mesh=mesh, sample_axis="s")
        assert shared < 0.4 * alone

    @pytest.mark.parametrize("axis", spread(("mesh_axis", "sample_axis"), 1))
    def test_stores(self, axis, getkey):
        if axis == "sample_axis" and jax.__version__.startswith("0.9."):
            pytest.skip("JAX 0.9 does not find the axis of the keys within the loop")
        mesh = make_mesh(None, names=("r",))
        x = normal(getkey(), (9, 3))
        settings = {"mesh": mesh, axis: "r", "store": HostStore(), "block_size": 2}
        got = as_jax(kernel(**settings, get="nngp")(x))
        assert_same(got, sampled(x, get="nngp")[0])

    def test_other_axes(self, getkey):
        """With the examples of inputs and of a keyword argument last."""
        x, y = normal(getkey(), (5, 3)), normal(getkey(), (4, 3))
        own = normal(getkey(), (1, 5)), normal(getkey(), (1, 4))

        def make(key):
            return eqx.Partial(lambda model, x, own: model(x) * own[0], init(key))

        axes = {"in_axes": 1, "kwargs_axes": {"own": 1}, "get": "nngp", "init": make}
        x, y = (jnp.asarray(np.asarray(z).T) for z in (x, y))
        expected = np.asarray(kernel(2, **axes)(x, y, own=own))
        mesh = {"mesh": make_mesh(None, names=("r",)), "mesh_axis": "r"}
        for place in ({"store": HostStore(), "block_size": 2}, mesh):
            got = kernel(2, **axes, **place)(x, y, own=own)
            np.testing.assert_allclose(np.asarray(got), expected, rtol=2e-4, atol=1e-5)
        with pytest.raises(ValueError, match="pairs no examples"):
            kernel(2, diagonal_axes=0, **mesh)(normal(getkey(), (5, 3)))


class TestStores:
    @pytest.mark.matrix
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
        run = kernel(store=store, block_size=2, progress=meter, get="nngp")
        with pytest.raises(KeyboardInterrupt):
            run(x)
        got = run(x)
        assert meter.done[0] == 0
        assert meter.done[1] > 0
        assert_same(jnp.asarray(np.asarray(got)), sampled(x, get="nngp")[0])

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


@pytest.mark.cpu
class TestMemory:
    def program(self, num, **settings):
        wide = lambda key: network(key, width=64)
        monte_carlo = kernel(num, init=wide, **settings)
        return memory(lambda x: monte_carlo(x), jnp.ones((40, 3)))

    def test_flat_in_the_number_of_samples(self):
        sizes = [self.program(n, get="nngp").temp_size_in_bytes for n in (10, 1_000)]
        assert sizes[1] <= 1.01 * sizes[0] + 4 * 1_000

    @pytest.mark.matrix
    def test_grows_with_the_samples_of_a_batch(self):
        sizes = [
            self.program(32, samples_per_batch=n).temp_size_in_bytes for n in (1, 32)
        ]
        assert sizes[1] > 4 * sizes[0]

    def test_budget(self):
        budget = MemoryBudget("3MB")
        stats = self.program(100, samples_per_batch=budget, get="nngp")
        used = stats.temp_size_in_bytes + stats.output_size_in_bytes
        assert 300_000 < used <= 3_000_000

    @pytest.mark.matrix
    def test_budget_of_a_block(self, getkey):
        """The whole kernel need not fit."""
        x = normal(getkey(), (300, 3))
        settings = {"get": "nngp", "block_size": 50, "store": HostStore()}
        budget = MemoryBudget("200KB")
        got = kernel(3, samples_per_batch=budget, **settings)(x)
        assert_same(jnp.asarray(got), jnp.asarray(kernel(3, **settings)(x)))
        with pytest.raises(ValueError, match="A memory budget of 200,000 bytes is too"):
            kernel(3, samples_per_batch=budget, get="nngp")(x)
