"""What depends on the platform of a program.

Which program is cheaper, and the precision of products, which some platforms round.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer

from .jaxpr_types import JaxprAndConsts
from .jaxprs import equations_in
from .primitives import parameters


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
    - `channels_last`: whether images have their channels last in memory, as those of
        convolutions in a loop over microbatches on CPUs.
    - `recomputes`: whether kernels compute what they stack, once for each layout that a
        stack is read in.
    - `joins_sums`: whether a kernel takes longer to start than to add up a few numbers.
    """

    flops_per_byte: float
    exact_product: float
    grouped_convolution: float
    block_bytes: int
    factor_bytes: int
    patch_bytes: int
    channels_last: bool
    recomputes: bool
    joins_sums: bool


# Rounded from `python -m benchmarks --suite costs` on 2 cores of an AMD EPYC. Blocks
# stay in the caches.
CPU = Platform(8.0, 1.0, 4.0, 2**22, 2**24, 0, True, True, False)


# Measured on an H100: 408 TFLOP/s for float32 in TF32, JAX's default, and 3.0 TB/s. (It
# is 300 FLOP a byte in bfloat16.) With all digits it is 52 TFLOP/s; for transformers of
# the benchmarks, 12 predicts the faster program: a branch comes with such norms. Blocks
# are so large that their kernels take longer than to launch these, and small beside the
# memory of the device. With contractions as large as these, an H200 does 66 FLOPs a
# byte, and grouped convolutions are 2 times slower.
GPU = Platform(136.0, 12.0, 4.0, 2**28, 2**28, 2**28, False, False, True)


# From the data sheet of a v5e: 197 TFLOP/s in bfloat16, JAX's default, and 819 GB/s.
# All digits of float32 take six passes.
TPU = Platform(240.0, 6.0, 4.0, 2**27, 2**27, 2**24, False, False, False)


_PLATFORMS = {"cpu": CPU, "tpu": TPU}


_CHOSEN: contextvars.ContextVar[Platform | None]


_CHOSEN = contextvars.ContextVar("platform", default=None)


def platform(arrays: Sequence[Any] = ()) -> Platform:
    """The platform that a program is for, of which some arrays are arguments.

    It is that of arrays which are committed to a device, or else that of JAX's default
    device.
    """
    preset = _CHOSEN.get()
    if preset is not None:
        return preset
    config: Any = jax.config  # Type checkers do not know its settings.
    device = config.jax_default_device
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed:
            device = next(iter(x.devices()))
            break
    name = getattr(device, "platform", device) or jax.default_backend()
    return _PLATFORMS.get(name, GPU)


def for_platform(preset: Platform) -> contextlib.AbstractContextManager:
    """A context in which programs are for a platform, whatever devices there are."""
    return assigned(_CHOSEN, preset)


@contextlib.contextmanager
def assigned(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """A context in which a variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_PRECISIONS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


# The setting in one of the contexts below, and that of the user around all of them.
_INSIDE: contextvars.ContextVar[tuple[str, str | None] | None]


_INSIDE = contextvars.ContextVar("inside", default=None)


def _setting() -> str | None:
    return getattr(jax.config, "jax_default_matmul_precision", None)


def user_precision() -> str | None:
    """The user's `jax.default_matmul_precision`, in the contexts below as outside."""
    inside, now = _INSIDE.get(), _setting()
    # A function of the user may set it again in one of them.
    return inside[1] if inside is not None and inside[0] == now else now


def exact_products() -> contextlib.AbstractContextManager:
    """A context in which products of float32 arrays keep their digits.

    On GPUs and TPUs, JAX rounds the factors of products to 10 or 7 bits by default.
    This is for results that are judged to more digits. The user's own context
    `jax.default_matmul_precision` has the last word.
    """
    is_chosen = user_precision() is not None
    return contextlib.nullcontext() if is_chosen else _with_precision("highest")


def products_of(*programs: Any) -> contextlib.AbstractContextManager:
    """A context in which products have the precision that closed jaxprs ask for.

    If they ask for several, it is the highest. Without it, a contraction that stands
    for a derivative of `jnp.dot(x, y, precision="highest")` would be rounded on GPUs
    and TPUs. Programs that ask for none leave JAX's own setting. `exact_products`
    around it is not lowered.
    """
    inside = _INSIDE.get()
    is_exact = inside is not None and inside[0] == _setting() == "highest"
    named = {x for closed in programs for x in _precisions(closed)}
    if is_exact or not named:
        return contextlib.nullcontext()
    if len(named) == 1:
        (precision,) = named
        is_preset = isinstance(precision, lax.DotAlgorithmPreset)
        name = precision.name if is_preset else _precision_name(precision)
    else:
        name = max(map(_precision_name, named), key=_NAMES.index)
    return _with_precision(name)


_NAMES = [x.name.lower() for x in _PRECISIONS]


def _precision_name(precision: object) -> str:
    """The name of a precision; "highest" for what has no order among them."""
    if not isinstance(precision, lax.Precision):
        return "highest"
    return _NAMES[_PRECISIONS.index(precision)]


def _precisions(closed: JaxprAndConsts) -> Iterator[Any]:
    """The precisions that the equations of a program name."""
    for eqn in equations_in(closed):
        precision = parameters(eqn).get("precision")
        # One for each factor; an algorithm is a tuple, too.
        is_pair = type(precision) is tuple
        yield from (x for x in (precision if is_pair else [precision]) if x is not None)


@contextlib.contextmanager
def _with_precision(name: str) -> Iterator[None]:
    inside = name, user_precision()
    with assigned(_INSIDE, inside), jax.default_matmul_precision(name):
        yield
