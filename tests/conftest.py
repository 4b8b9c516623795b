import contextlib
import gc
import os
import random

import jax
import jaxtyping
import pytest


# Read when JAX first looks for devices, which is later than here. Programs run once, or
# twice: to compile them takes longer, and half of that is spent to make them faster.
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("XLA_FLAGS", " ".join(_XLA_FLAGS))

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def getkey(request):
    """Gives new keys; the seed is shown where a test fails."""
    seed = random.randint(0, 2**31 - 1)
    request.node.add_report_section("setup", "seed", f"getkey seed: {seed}")
    keys = [jax.random.key(seed)]

    def get():
        keys[0], key = jax.random.split(keys[0])
        return key

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


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    # A long run would otherwise keep all programs of all tests.
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def unchecked():
    """Without the run-time type checks of the test suite, as users have it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
