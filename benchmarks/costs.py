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


NAME = "costs"


def seconds(fun: Callable, *args: Any, rounds: int) -> float:
    """The median time of a compiled function."""
    run = jax.jit(fun)
    program = lambda: jax.block_until_ready(run(*args))
    program()
    rounds = harness.rounds_of(rounds)
    return statistics.median(timed(program) for _ in range(rounds))


def flops_per_second(rounds: int) -> dict[str, float]:
    """The rates of contractions of factors of some examples, in FLOPs per second."""
    found = {}
    for width in (64, 256):
        a, d = (jr.normal(jr.key(i), (256, width)) for i in range(2))
        # Gram matrices, multiplied, as for a dense layer in a kernel.
        gram = lambda a, d: jnp.sum((a @ a.T) * (d @ d.T), axis=1)
        # The sum of the gradients of all examples.
        weighted = lambda a, d: a.T @ d
        flops = 2 * 2 * 256 * 256 * width
        found[f"Gram matrices of {width}"] = flops / seconds(gram, a, d, rounds=rounds)
        flops = 2 * 256 * width * width
        time = seconds(weighted, a, d, rounds=rounds)
        found[f"gradients of {width} by {width}"] = flops / time
    return found


def bytes_per_second(rounds: int) -> float:
    """The rate of reading and writing per-example gradients, in bytes per second."""
    x = jr.normal(jr.key(0), (256, 128, 512))
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


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    rounds = 5 if quick else 25
    flops, moved = flops_per_second(rounds), bytes_per_second(rounds)
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
    # Only orders of magnitude matter.
    bars = [
        Bar(f"{name}: from what is used", max(x / used[name], used[name] / x), 10, True)
        for name, x in found.items()
    ]
    where = harness.machine()
    figures = {"machine": where, "found": found, "used": used, "flops": flops}
    figures["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    return figures, "\n".join([*lines, "", harness.describe(where)]), bars
