import contextlib
import gc
import itertools
import os
import random
import zlib

import jax
import jaxtyping
import numpy as np
import pytest

from . import on_cpu
from .flags import COMPILE_FAST, FOUR_DEVICES, turn_on_coming_defaults


# Read when JAX first looks for devices, which is later than here.
FLAGS = COMPILE_FAST if on_cpu.pretends() else f"{FOUR_DEVICES} {COMPILE_FAST}"
os.environ.setdefault("XLA_FLAGS", FLAGS)
# Otherwise, the first of several processes takes most of the memory of a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Warnings are errors in the processes that tests start, as they are in the tests.
os.environ.setdefault("PYTHONWARNINGS", "error")

# A tenth of the time went into looking for garbage among all that JAX keeps.
gc.set_threshold(100_000, 20, 50)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Failing tests show all frames.
jax.config.update("jax_traceback_filtering", "off")
# XLA is not told which line each operation is from.
jax.config.update("jax_traceback_in_locations_limit", 0)
turn_on_coming_defaults()
if on_cpu.has_accelerator():
    # Products of float32 have all digits, as on CPUs. Those of a result have other
    # operands than those of its reference, and would round these.
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_configure(config):
    on_cpu.register(config)


def pytest_sessionstart():
    if on_cpu.pretends():
        # The package takes it for a GPU, too. An import hook must be there before.
        from eqxbatch._base import platforms

        platforms._PLATFORMS["cpu"] = platforms.GPU


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    items[:] = on_cpu.moved(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    on_cpu.begin(item)


@pytest.fixture
def getkey(request):
    """Gives new keys; the seed is shown where a test fails.

    It follows from the name of the test, or is another one in each run if the variable
    `EQXBATCH_NEW_SEEDS` is set. NumPy draws the keys: for JAX to make and split them,
    programs would be compiled in each module.
    """
    seed = zlib.crc32(request.node.name.encode()) % 2**31
    if os.environ.get("EQXBATCH_NEW_SEEDS"):
        seed = random.SystemRandom().randrange(2**31)
    request.node.add_report_section("setup", "seed", f"getkey seed: {seed}")
    draw = np.random.default_rng(seed)

    def get():
        numbers = jax.device_put(draw.integers(0, 2**32, 2, np.uint32))
        return jax.random.wrap_key_data(numbers)

    return get


@pytest.fixture
def x64():
    """Runs a test with 64-bit types."""
    with enable_x64():
        yield


def enable_x64() -> contextlib.AbstractContextManager:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)


def pytest_collection_finish():
    # What is imported stays, and is not garbage.
    gc.collect()
    gc.freeze()


_MODULES = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    # A long run would otherwise keep all programs of all tests. A fifth of the programs
    # of a module are small ones that the module before it has, too.
    yield
    if next(_MODULES) % 8 == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unchecked():
    """Without the run-time type checks of the test suite, as users have it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
