"""What `jax.vjp(...).with_refs` saves for gradients in microbatches.

`python -m benchmarks.with_refs` prints the temporary memory that XLA reports for
JAX's recipe for microbatches (https://docs.jax.dev/en/latest/301/refs.html), the same
loop with the sum as its carry, and `filter_micro_grad`. It compares the gradients.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from eqxbatch import filter_micro_grad
from .micro_grad import Dense, Transformer


SIZE, NUM = 32, 16


def ways(model: Any, x: np.ndarray, y: np.ndarray) -> dict[str, Callable]:
    """All ways to compute the mean of the gradients, as `way(arrays, x, y)`."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x, y):
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x, y))

    def cut(*rows):
        return [x.reshape(NUM, SIZE, *x.shape[1:]) for x in rows]

    def with_refs(arrays, x, y):
        sums = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), arrays)

        def step(_, rows):
            value, pull = jax.vjp(lambda arrays: loss(arrays, *rows), arrays)
            pull.with_refs(sums)(jnp.ones_like(value) / NUM)
            return (), None

        jax.lax.scan(step, (), cut(x, y))
        return jax.tree.map(jax.freeze, sums)

    def with_carry(arrays, x, y):
        def step(sums, rows):
            grads = jax.grad(loss)(arrays, *rows)
            return jax.tree.map(lambda total, g: total + g / NUM, sums, grads), None

        zeros = jax.tree.map(jnp.zeros_like, arrays)
        return jax.lax.scan(step, zeros, cut(x, y))[0]

    def ours(arrays, x, y):
        fun = lambda model, x, y: model(x, y)
        grad = filter_micro_grad(fun, microbatch_size=SIZE)
        return eqx.filter(grad(eqx.combine(arrays, static), x, y), eqx.is_array)

    return {
        "whole batch": jax.grad(loss),
        "scan with a carry": with_carry,
        "with_refs": with_refs,
        "filter_micro_grad": ours,
    }


def run() -> None:
    draw = np.random.default_rng(0)
    numbers = lambda *shape: draw.standard_normal((SIZE * NUM, *shape), np.float32)
    labels = draw.integers(10, size=SIZE * NUM).astype(np.int32)
    for name, model, x, y in (
        ("Dense", Dense(jr.key(0)), numbers(256), numbers(256)),
        ("Transformer", Transformer(jr.key(0), embeds=False), numbers(64, 128), labels),
    ):
        arrays = eqx.filter(model, eqx.is_inexact_array)
        expected = None
        for way, fun in ways(model, x, y).items():
            compiled = jax.jit(fun).lower(arrays, x, y).compile()
            memory = compiled.memory_analysis()
            got = jax.device_get(compiled(arrays, x, y))
            expected = got if expected is None else expected
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
                *(got, expected),
            )
            print(f"{name}, {way}: {memory.temp_size_in_bytes / 1e6:.2f} MB")


if __name__ == "__main__":
    run()
