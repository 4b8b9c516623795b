"""The constants of the cost model, measured on this machine.

`eqxbatch/_base/platforms.py` has them, rounded, for CPUs. With those of its platform, a
program chooses the cheaper method.
"""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from eqxbatch._base.platforms import platform
from . import harness
from .harness import Bar
from .kernels import timed
from .limit import NoLimit


NAME = "costs"
NO_LIMIT = NoLimit("they are the rates of this machine, and ratios of these")


def seconds(fun: Callable, *args: Any, rounds: int) -> float:
    """The median time of a compiled function."""
    run = jax.jit(fun)
    program = lambda: jax.block_until_ready(run(*args))
    program()
    rounds = harness.rounds_of(rounds)
    return statistics.median(timed(program) for _ in range(rounds))


def flops_per_second(is_cpu: bool, rounds: int) -> dict[str, float]:
    """The rates of contractions of factors of some examples, in FLOPs per second."""
    found = {}
    # An accelerator is only busy with large ones.
    num, widths = (256, (64, 256)) if is_cpu else (8192, (1024, 4096))
    for width in widths:
        a, d = (jr.normal(jr.key(i), (num, width)) for i in range(2))
        # Gram matrices, multiplied, as for a dense layer in a kernel.
        gram = lambda a, d: jnp.sum((a @ a.T) * (d @ d.T), axis=1)
        # The sum of the gradients of all examples.
        weighted = lambda a, d: a.T @ d
        flops = 2 * 2 * num * num * width
        found[f"Gram matrices of {width}"] = flops / seconds(gram, a, d, rounds=rounds)
        flops = 2 * num * width * width
        time = seconds(weighted, a, d, rounds=rounds)
        found[f"gradients of {width} by {width}"] = flops / time
    return found


def bytes_per_second(is_cpu: bool, rounds: int) -> float:
    """The rate of reading and writing per-example gradients, in bytes per second."""
    x = jr.normal(jr.key(0), (256 if is_cpu else 4096, 128, 512))
    return 2 * 4 * x.size / seconds(lambda x: 2 * x, x, rounds=rounds)


def grouped_convolution(rounds: int) -> float:
    """The time of per-example gradients of a convolution, over matrix products'."""
    x = jr.normal(jr.key(0), (32, 16, 16, 16))
    w = jr.normal(jr.key(1), (16, 16, 3, 3))
    d = jr.normal(jr.key(2), (32, 16, 16, 16))

    def convolve(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0]

    def gradients(w: jax.Array, x: jax.Array, d: jax.Array) -> jax.Array:
        pull = lambda x, d: jax.vjp(lambda w: convolve(w, x), w)[1](d)[0]
        return jax.vmap(pull)(x, d)

    patches = jr.normal(jr.key(3), (32, 16 * 9, 16 * 16))
    product = lambda p, d: jnp.einsum("nip,nop->noi", p, d)
    flat = d.reshape(32, 16, -1)
    slow = seconds(gradients, w, x, d, rounds=rounds)
    return slow / seconds(product, patches, flat, rounds=rounds)


def from_host(width: int, rounds: int) -> float:
    """Reading kept factors from the host's memory, over the time to compute them again.

    The factors are inputs of four dense layers and the derivatives by their outputs, of
    1,024 examples.
    """
    device = jax.devices()[0]
    x = jr.normal(jr.key(0), (1024, width))
    weights = [jr.normal(jr.key(i), (width, width)) / width**0.5 for i in range(4)]

    def factors(x: jax.Array, *weights: jax.Array) -> tuple[list, list]:
        def outputs(shifts: list) -> tuple[jax.Array, list]:
            y, inputs = x, []
            for weight, shift in zip(weights, shifts, strict=True):
                inputs.append(y)
                y = jnp.tanh(y @ weight + shift)
            return jnp.sum(y), inputs

        shifts = [jnp.zeros_like(x)] * len(weights)
        return jax.grad(outputs, has_aux=True)(shifts)

    again = seconds(factors, x, *weights, rounds=rounds)
    of = lambda kind: jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    kept = jax.device_put([x] * 2 * len(weights), of("pinned_host"))
    read = lambda *kept: jax.device_put(kept, of("device"))
    return seconds(read, *kept, rounds=rounds) / again


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    rounds = 5 if quick else 25
    is_cpu = jax.default_backend() == "cpu"
    flops, moved = (f(is_cpu, rounds) for f in (flops_per_second, bytes_per_second))
    rate = statistics.median(flops.values())
    found = {
        "flops_per_byte": rate / moved,
        "grouped_convolution": grouped_convolution(rounds),
    }
    used = {name: getattr(platform(), name) for name in found}
    lines = ["| constant | measured | used |", "|---|---:|---:|"]
    lines += [f"| `{name}` | {x:.1f} | {used[name]:.1f} |" for name, x in found.items()]
    lines += ["", "| contraction | of the rate of the median |", "|---|---:|"]
    lines += [f"| {name} | {x / rate:.2f} |" for name, x in flops.items()]
    # The memory of a CPU is the host's.
    widths = () if is_cpu else (256, 1024, 4096)
    hosts = {width: from_host(width, rounds) for width in widths}
    if hosts:
        lines += ["", "| width | factors from the host, over computed again |"]
        lines += ["|---:|---:|"]
        lines += [f"| {width} | {x:.1f} |" for width, x in hosts.items()]
    # Only orders of magnitude matter.
    bars = [
        Bar(f"{name}: from what is used", max(x / used[name], used[name] / x), 10, True)
        for name, x in found.items()
    ]
    where = harness.machine()
    figures = {"machine": where, "found": found, "used": used, "flops": flops}
    figures["from_host"] = hosts
    figures["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    return figures, "\n".join([*lines, "", harness.describe(where)]), bars
