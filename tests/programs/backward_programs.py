"""Random losses with custom backward passes, and rows that must not count.

A backward pass may clip or normalise its cotangent, inject the gradient of an auxiliary
loss, return a state in place of a gradient, or be linear. It is on data, on parameters
or on both, within calls, loops and branches. Rows may have weights, and those of weight
0 may be NaN; the host may be called for each row.

What is right is always the same: the sum over `jax.vmap(jax.grad(loss))` of those rows
that count, in float64.

`python -m tests.programs.backward_programs --minutes 60 --seed 0` goes on after what it
finds, and says at the end how many programs and comparisons ran.
"""

import argparse
import collections
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..flags import COMPILE_FAST


os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

import eqxbatch as eb
from ..conftest import enable_x64


DIM, WIDTH = 3, 2


def _with_backward(backward: Callable) -> Callable:
    """The identity of its first argument, with this backward pass."""

    @jax.custom_vjp
    def fun(x, other):
        return x

    fun.defvjp(lambda x, other: (x, (x, other)), backward)
    return fun


def _norm(x):
    return jnp.sqrt(jnp.sum(x**2) + 1e-3)


BACKWARD = {
    "clip": _with_backward(lambda r, g: (jnp.clip(g, -0.3, 0.3), 0 * r[1])),
    "unit": _with_backward(lambda r, g: (g / _norm(g), 0 * r[1])),
    "inject": _with_backward(lambda r, g: (g, jnp.full_like(r[1], 0.1))),
    "state": _with_backward(lambda r, g: (g, jnp.max(jnp.abs(g)) + 0 * r[1])),
    "own": _with_backward(lambda r, g: (g + 0.1 * r[0], 0 * r[1])),
    # These are linear.
    "double": _with_backward(lambda r, g: (2 * g, jnp.zeros_like(r[1]))),
    "loop": _with_backward(
        lambda r, g: (
            lax.scan(lambda c, _: (c * 0.9 + 0.1 * g, None), g, None, length=2)[0],
            jnp.zeros_like(r[1]),
        )
    ),
}
PLACES = ("data", "parameter", "both")
WITHIN = ("plain", "jit", "checkpoint", "scan", "cond", "vmap")


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, and a call of what is compared; `seed` draws the numbers."""

    seed: int
    kind: str
    place: str
    within: str
    total: int
    size: int | None
    weights: str
    calls_host: bool
    method: str


def draw(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    pick = lambda options: options[rng.integers(len(options))]
    total = int(pick((1, 2, 3, 5, 7, 11)))
    return Program(
        seed,
        kind=pick([*BACKWARD]),
        place=pick(PLACES),
        within=pick(WITHIN),
        total=total,
        size=pick((None, *range(1, total + 2))),
        weights=pick(("none", "ones", "numbers", "mask")),
        calls_host=bool(rng.random() < 0.2),
        method=pick(("auto", "sites", "materialise")),
    )


CALLED: list[int] = []


def _on_host(x):
    CALLED.append(int(np.prod(x.shape)))
    return np.cos(x)


def loss_of(program: Program) -> Callable:
    """The loss of one example; `x` has length 0 where it is padding."""
    custom = BACKWARD[program.kind]

    def apply(x, other):
        """`custom`, within something that `jax.vmap` goes through."""
        if program.within == "jit":
            return jax.jit(custom)(x, other)
        if program.within == "checkpoint":
            return jax.checkpoint(custom)(x, other)
        if program.within == "scan":
            step = lambda c, _: (custom(c, other) * 1.0, None)
            return lax.scan(step, x, None, length=2)[0]
        if program.within == "cond":
            is_large = jnp.sum(other) > -1e6
            return lax.cond(is_large, custom, lambda x, _: x, x, other)
        if program.within == "vmap":
            return jax.vmap(custom, (0, None))(jnp.stack([x, 2 * x]), other).sum(0)
        return custom(x, other)

    def loss(params, x, length):
        w, v, b = params["w"], params["v"], params["b"]
        other = jnp.sum(b**2)
        if program.place == "parameter":
            v = apply(v, other)
        h = jnp.tanh(x @ v + b) / length
        if program.place == "data":
            h = apply(h, jnp.sum(x) / length)
        if program.place == "both":
            h = apply(h, other * jnp.sum(x))
        if program.calls_host:
            struct = jax.ShapeDtypeStruct((), x.dtype)
            arg = lax.stop_gradient(x[0])
            h = h * jax.pure_callback(_on_host, struct, arg, vmap_method="expand_dims")
        return jnp.sum(h**2) + jnp.sum(w * x) * jnp.sum(h) / length

    return loss


@dataclasses.dataclass(frozen=True)
class Data:
    params: dict
    x: np.ndarray
    length: np.ndarray
    weights: np.ndarray | None

    @property
    def rows(self) -> tuple:
        return self.x, self.length

    @property
    def counts(self) -> np.ndarray:
        """The weight of each row, as numbers."""
        ones = np.ones(len(self.x))
        return ones if self.weights is None else self.weights.astype(np.float64)


def data_of(program: Program) -> Data:
    rng = np.random.default_rng(program.seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    n = program.total
    params = {"w": normal(DIM), "v": normal(DIM, WIDTH), "b": normal(WIDTH)}
    x, length = normal(n, DIM), 1 + np.abs(normal(n))
    weights = None
    if program.weights == "ones":
        weights = np.ones(n, np.float32)
    elif program.weights == "numbers":
        weights = (np.abs(normal(n)) + 0.1) * (rng.random(n) < 0.7)
        weights = weights.astype(np.float32)
    elif program.weights == "mask":
        weights = rng.random(n) < 0.6
    if weights is not None:
        # Padding has length 0.
        length = np.where(weights, length, 0).astype(np.float32)
        x = np.where(np.asarray(weights)[:, None] != 0, x, 0).astype(np.float32)
    return Data(params, x, length, weights)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(tree)])


def dense(program: Program, data: Data) -> np.ndarray:
    """The gradient of each example in float64; zero for those that do not count."""
    with enable_x64():
        wide = lambda x: jnp.asarray(x, jnp.float64)
        params, x, length = jax.tree.map(wide, (data.params, *data.rows))
        every = jax.vmap(jax.grad(loss_of(program)), (None, 0, 0))(params, x, length)
        leaves = [np.asarray(g).reshape(len(x), -1) for g in jax.tree.leaves(every)]
    return np.where(data.counts[:, None] != 0, np.concatenate(leaves, 1), 0)


Triples = Iterator[tuple[str, Any, Any]]


def compared(program: Program) -> Triples:
    """Names, results of the package, and what is right."""
    data, loss = data_of(program), loss_of(program)
    params = jax.tree.map(jnp.asarray, data.params)
    gradients, counts = dense(program, data), data.counts
    total = counts @ gradients
    weights = None if data.weights is None else jnp.asarray(data.weights)
    sizes = {"microbatch_size": program.size, "method": program.method}
    rng = np.random.default_rng(program.seed + 1)

    accumulator = eb.Sum(weights=weights)
    CALLED.clear()
    micro = eb.filter_micro_grad(loss, accumulator=accumulator, **sizes)
    yield "sum", flat(micro(params, *data.rows)), total
    if program.calls_host:
        jax.effects_barrier()
        yield "calls of the host", sum(CALLED), program.total
        return
    if counts.sum() > 0:
        micro = eb.filter_micro_value_and_grad(
            loss, accumulator=eb.Mean(weights=weights), **sizes
        )
        value, gradient = micro(params, *data.rows)
        yield "mean", flat(gradient), total / counts.sum()
        values = jax.vmap(loss, (None, 0, 0))(params, *data.rows)
        values = np.where(counts != 0, values, 0)
        yield "value", value, counts @ values / counts.sum()
    if weights is None:
        running = eb.filter_micro_grad(loss, accumulator=eb.Mean(running=True), **sizes)
        yield "running", flat(running(params, *data.rows)), total / program.total

    # What is computed for each example.
    norms = np.linalg.norm(gradients, axis=1)
    bound = float(np.median(norms)) + 1e-3
    clipped = counts * np.minimum(1, bound / np.maximum(norms, 1e-9)) @ gradients
    micro = eb.filter_micro_grad(
        loss, accumulator=accumulator, clip_norm=bound, return_norms=True, **sizes
    )
    got, statistics = micro(params, *data.rows)
    yield "clipped", flat(got), clipped
    seen = np.where(counts != 0, np.asarray(statistics.norms), 0)
    yield "norms", seen, norms
    direction = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params
    )
    micro = eb.filter_micro_grad(
        loss, accumulator=accumulator, against=direction, **sizes
    )
    got, statistics = micro(params, *data.rows)
    yield "beside products", flat(got), total
    products = np.where(counts != 0, np.asarray(statistics.inner_products), 0)
    yield "products", products, gradients @ flat(direction)

    sketch = eb.Projection(4, jax.random.key(program.seed))
    micro = eb.filter_micro_grad(
        loss, accumulator=accumulator, features=sketch, **sizes
    )
    got, statistics = micro(params, *data.rows)
    yield "beside features", flat(got), total
    features = np.where(counts[:, None] != 0, np.asarray(statistics.features), 0)
    units = jax.vmap(ravel_pytree(params)[1])(jnp.eye(gradients.shape[1]))
    drawn = sketch.drawn(params)
    yield "features", features, gradients @ drawn.of_gradients(jax.tree.leaves(units))

    # Batch by batch, of any sizes, among them 0.
    cuts = np.sort(rng.integers(0, program.total + 1, 2))
    parts = [np.split(x, cuts) for x in (*data.rows, counts.astype(np.float32))]
    micro = eb.filter_micro_grad(loss, accumulator=eb.Sum(), **sizes)
    over = eb.over_batches(micro, weighted=True)
    batches = list(zip(*parts, strict=True))
    yield "batches", flat(over(params, batches)), total
    yield from through_maps(program, data, params, total)


def through_maps(program: Program, data: Data, params: Any, total: Any) -> Triples:
    """Derivatives through a map, in what differs between examples."""
    loss, weights = loss_of(program), data.weights
    accumulator = eb.Sum(weights=None if weights is None else jnp.asarray(weights))

    def through(params, x, length):
        one = functools.partial(loss, params)
        mapped = eb.filter_micro_vmap(
            one, microbatch_size=program.size, accumulator=accumulator
        )
        return mapped(x, length)

    if program.place != "parameter" or program.kind in ("double", "loop"):
        got = jax.grad(through)(params, *data.rows)
        # Without weights, and with data that differ, `jax.vmap` sums after each.
        is_linear = program.kind in ("double", "loop")
        if is_linear or set(np.unique(data.counts)) == {1.0}:
            yield "through a map", flat(got), total


def examine(program: Program) -> list[str]:
    """What is wrong with a program."""
    found = []
    for name, got, expected in compared(program):
        EXERCISED[name] += 1
        got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        scale = max(1.0, np.abs(expected).max(initial=0))
        if got.shape != expected.shape or not np.allclose(
            got, expected, rtol=2e-4, atol=2e-5 * scale
        ):
            found.append(f"{name}: got {got}, right {expected}")
    return found


EXERCISED: collections.Counter = collections.Counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    args = parser.parse_args()
    started, seed, num = time.time(), args.seed, 0
    while args.programs is None or num < args.programs:
        if args.minutes is not None and time.time() - started > 60 * args.minutes:
            break
        program = draw(seed)
        try:
            found = examine(program)
        except Exception as e:
            found = [f"{type(e).__name__}: {e}"]
        for line in found:
            print(program, line, sep="\n    ", flush=True)
        seed, num = seed + 1, num + 1
        if num % 50 == 0:
            jax.clear_caches()
    print(f"{num} programs, {sum(EXERCISED.values())} comparisons: {dict(EXERCISED)}")


if __name__ == "__main__":
    main()
