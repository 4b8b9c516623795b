"""Progress meters."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import eqxbatch
from eqxbatch import (
    AbstractReduction,
    filter_batch_kernel,
    filter_micro_vmap,
    HostStore,
    kernel_solve,
    MonteCarloKernel,
    over_batches,
    TqdmProgressMeter,
)
from ..helpers import drawn, make_mesh, normal
from .kernel_functions import rbf, white
from .on_disk import Stops


# Elsewhere, other blocks are done when an event comes.
pytestmark = pytest.mark.cpu

# Meters.


def test_meters_count_nans(getkey):
    x = np.array(normal(getkey(), (13, 3)))
    x[[5, 12]] = np.nan
    for settings in ({}, {"store": HostStore()}):
        for symmetric in (True, False):
            log = []
            got = filter_batch_kernel(
                rbf,
                block_size=5,
                symmetric=symmetric,
                progress=Stops(None, None, log),
                **settings,
            )(x)
            num = int(np.isnan(got).sum())
            assert num == 2 * 2 * 13 - 4
            assert sum(entry[1] for entry in log[1:-1]) == num
            assert len(log) == 2 + (6 if symmetric else 9)


@pytest.mark.devices
def test_meters_on_the_device(getkey):
    x = normal(getkey(), (13, 3))
    log = []
    metered = filter_batch_kernel(
        white, block_size=5, symmetric=True, progress=Stops(None, None, log)
    )
    got = metered(x)
    assert isinstance(got, jax.Array)
    dense = np.asarray(jax.jit(white)(x))
    np.testing.assert_allclose(got, dense, rtol=1e-5)
    sums = filter_batch_kernel(
        white,
        block_size=5,
        reduce=eqxbatch.KernelProduct(jnp.ones(13)),
        progress=Stops(None, None, log),
    )(x)
    np.testing.assert_allclose(sums, dense.sum(1), rtol=1e-5)
    with pytest.raises(RuntimeError, match="stopped"):
        filter_batch_kernel(rbf, block_size=5, progress=Stops(2, RuntimeError, log))(x)
    assert log[-1] == ("close", 1)
    with pytest.raises(ValueError, match="`progress` on a `mesh` needs a `store`"):
        filter_batch_kernel(
            rbf,
            block_size=5,
            mesh=make_mesh(AxisType.Auto),
            progress=TqdmProgressMeter(),
        )


class StartsWithItsOwn(AbstractReduction):
    """Row sums on top of an array of its own."""

    offset: jax.Array

    @property
    def neutral(self):
        return 0.0

    def init(self, kernel):
        return self.offset

    def update(self, state, tile, rows, columns):
        new = rows.take(state) + tile.sum(axis=1)
        return jax.lax.dynamic_update_slice(state, new, (rows.start,))

    def merge(self, first, second):
        return first + second - self.offset

    def finalize(self, state):
        return state


@pytest.mark.devices
def test_arrays_of_reductions_are_not_overwritten(getkey):
    x, offset = normal(getkey(), (13, 3)), normal(getkey(), (13,))
    expected = np.asarray(offset) + np.asarray(jax.jit(rbf)(x)).sum(1)
    for settings in (
        {},
        {"progress": Stops(None, None, [])},
        {"mesh": make_mesh(AxisType.Auto)},
    ):
        reduce = StartsWithItsOwn(offset)
        batched = filter_batch_kernel(rbf, block_size=4, reduce=reduce, **settings)
        np.testing.assert_allclose(batched(x), expected, rtol=1e-5)
        np.testing.assert_allclose(batched(x), expected, rtol=1e-5)


def test_tqdm(getkey, capsys):
    x = np.array(normal(getkey(), (13, 3)))
    x[5] = np.nan
    meter = TqdmProgressMeter("digits")
    filter_batch_kernel(rbf, block_size=5, store=HostStore(), progress=meter)(x)
    shown = capsys.readouterr().err.split("\r")[-1]
    assert shown.startswith("digits: 100%")
    assert "9/9" in shown
    assert "block/s" in shown
    assert "NaN=25" in shown
    metered = filter_batch_kernel(rbf, block_size=5, progress=True)
    assert metered.progress == TqdmProgressMeter()
    metered(x)
    assert "9/9" in capsys.readouterr().err
    assert dataclasses.replace(metered, progress=False).progress is None


@pytest.mark.parametrize("meter", (True, TqdmProgressMeter("mine", "rows")))
def test_a_bar_says_what_it_counts(capsys, meter):
    x = np.ones((6, 2), np.float32)
    model = drawn(eqx.nn.MLP, 2, "scalar", 4, 1, key=jax.random.key(0))
    linear = lambda x, y: x @ y.T
    average = MonteCarloKernel(
        lambda key: model, key=jax.random.key(0), num_samples=2, progress=meter
    )
    runs = {
        ("kernel", "block"): filter_batch_kernel(linear, block_size=3, progress=meter),
        ("kernel solve", "product"): lambda x: kernel_solve(
            linear, x, x[:, 0], ridge=0.1, symmetric=True, progress=meter
        ),
        ("batches", "batch"): over_batches(
            filter_micro_vmap(jnp.sin), batch_size=3, progress=meter
        ),
        ("samples of a kernel", "batch"): average,
    }
    for texts, run in runs.items():
        run(x)
        description, unit = texts if meter is True else ("mine", "rows")
        shown = capsys.readouterr().err.split("\r")[-1]
        assert shown.startswith(f"{description}:")
        assert f"{unit}/s" in shown or f"s/{unit}" in shown
