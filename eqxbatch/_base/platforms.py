"""What is cheaper on CPUs, on GPUs and on TPUs, in one table."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer


@dataclasses.dataclass(frozen=True)
class Platform:
    """Numbers that choose among programs with the same result.

    Only orders of magnitude matter.

    - `flops_per_byte`: the number of floating-point operations that take as long as
        moving a byte.
    - `exact_product`: how much slower products are that keep all digits of float32.
    - `grouped_convolution`: how much slower per-example gradients of a convolution are
        than matrix products, because `vmap` turns them into grouped convolutions.
    - `block_bytes`: the size of what is read again soon after it was written: gradients
        that are formed for some examples, tiles, and blocks contracted together.
    - `factor_bytes`: what the factors of some examples may take, whatever the size of
        the result.
    - `patch_bytes`: what the patches of some images may take, whatever the size of the
        images.
    """

    flops_per_byte: float
    exact_product: float
    grouped_convolution: float
    block_bytes: int
    factor_bytes: int
    patch_bytes: int


# Rounded from `python -m benchmarks --suite costs` on 2 cores of an AMD EPYC. Blocks
# stay in the caches.
CPU = Platform(8.0, 1.0, 4.0, 2**22, 2**24, 0)


# Measured on an H100: 408 TFLOP/s for float32 in TF32, JAX's default, and 3.0 TB/s. (It
# is 300 FLOP a byte in bfloat16.) With all digits it is 52 TFLOP/s; for transformers of
# the benchmarks, 12 predicts the faster program: a branch comes with such norms. Blocks
# are so large that their kernels take longer than to launch these, and small beside the
# memory of the device. Grouped convolutions were not measured.
GPU = Platform(136.0, 12.0, 4.0, 2**28, 2**28, 2**24)


# From the data sheet of a v5e: 197 TFLOP/s in bfloat16, JAX's default, and 819 GB/s.
# All digits of float32 take six passes.
TPU = Platform(240.0, 6.0, 4.0, 2**27, 2**27, 2**24)


_PLATFORMS = {"cpu": CPU, "tpu": TPU}


_CHOSEN: contextvars.ContextVar[Platform | None]
_CHOSEN = contextvars.ContextVar("platform", default=None)


def platform(arrays: Sequence[Any] = ()) -> Platform:
    """The platform that a program is for, of which some arrays are arguments.

    It is that of arrays which are committed to a device, or else that of JAX's default
    device.
    """
    chosen = _CHOSEN.get()
    if chosen is not None:
        return chosen
    config: Any = jax.config  # Type checkers do not know its settings.
    device = config.jax_default_device
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
            device = next(iter(x.devices()))
            break
    name = getattr(device, "platform", device) or jax.default_backend()
    return _PLATFORMS.get(name, GPU)


@contextlib.contextmanager
def for_platform(chosen: Platform) -> Iterator[None]:
    """A context in which programs are for a platform, whatever devices there are."""
    token = _CHOSEN.set(chosen)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
