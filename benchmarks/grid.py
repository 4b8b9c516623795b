"""`filter_grid_vmap`, compared with nested `jax.vmap`s and `jax.lax.map`s."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from eqxbatch import filter_grid_vmap, Mean
from .harness import Bar, bars_of, Case, measure, OURS, results, temporaries
from .limit import num_bytes, Work
from .work import mapped, products_of


NAME = "grid"
KEY = jr.key(0)
NESTED = "nested jax.vmap"
LOOP = "jax.lax.map of jax.vmap"


def nested(fun: Any, *axes: Any) -> Any:
    """Nested `jax.vmap`s with these `in_axes`, the first ones outermost."""
    for in_axes in reversed(axes):
        fun = jax.vmap(fun, in_axes)
    return fun


def cells(size: int) -> Case:
    """The 50 x 50 grid of the docs, but larger."""
    x, y = jr.normal(KEY, (2, size))
    fun = lambda x, y: jnp.sin(x) * y
    ours = filter_grid_vmap(fun, in_axes=("i", "j"))
    return Case(
        name="cells",
        title=f"sin(x) y, {size:,} x {size:,}, at once",
        ways={OURS: ours, NESTED: nested(fun, (0, None), (None, 0))},
        args=(x, y),
        work=Work(0, num_bytes(x, y) + 4 * size**2),
        unbounded=(),
        # Neither way needs temporaries.
        best_memory=None,
    )


def ensemble(models: int, inputs: int, block: int | None) -> Case:
    """A grid of the members of an ensemble and of inputs."""
    make = lambda key: eqx.nn.MLP(64, 10, 256, 2, key=key)
    members = eqx.filter_vmap(make)(jr.split(KEY, models))
    arrays, static = eqx.partition(members, eqx.is_array)
    x = jr.normal(KEY, (inputs, 64))

    def predict(arrays: Any, x: jax.Array) -> jax.Array:
        return eqx.combine(arrays, static)(x)

    ours = filter_grid_vmap(predict, in_axes=("model", "x"), block_size=block)
    ways = {OURS: ours, NESTED: nested(predict, (0, None), (None, 0))}
    if block is not None:

        def loop(arrays: Any, x: jax.Array) -> jax.Array:
            of_one = lambda arrays: jax.lax.map(
                lambda x: predict(arrays, x), x, batch_size=block
            )
            return jax.lax.map(of_one, arrays)

        ways[LOOP] = loop
    products = products_of(lambda model, x: model(x), make(KEY), x)
    num = models * inputs
    how = "at once" if block is None else f"by {block:,}"
    return Case(
        name=f"ensemble, {how}",
        title=f"{models} MLPs of 86,000 parameters by {inputs:,} inputs, {how}",
        ways=ways,
        args=(arrays, x),
        work=Work(mapped(products, num), num_bytes(arrays, x) + 4 * 10 * num),
        unbounded=() if block is None else (NESTED,),
        best_memory=1.01,
    )


def landscape(points: int, inputs: int) -> Case:
    """The mean loss over inputs, for a plane in the space of parameters."""
    mlp = eqx.nn.MLP(64, 10, 128, 2, key=KEY)
    arrays, static = eqx.partition(mlp, eqx.is_array)
    x = jr.normal(KEY, (inputs, 64))
    a = b = jnp.linspace(-1, 1, points)

    def loss(arrays: Any, a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        moved = jax.tree.map(lambda w: w * (1 + a) + b, arrays)
        return jnp.sum(eqx.combine(moved, static)(x) ** 2)

    ours = filter_grid_vmap(
        loss,
        in_axes=(None, "i", "j", "x"),
        accumulator={"x": Mean()},
        block_size=inputs,
    )

    def all_at_once(arrays: Any, a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        over = nested(
            loss, (None, 0, None, None), (None, None, 0, None), (None, None, None, 0)
        )
        return over(arrays, a, b, x).mean(-1)

    def loop(arrays: Any, a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        one = lambda a, b: jax.vmap(loss, (None, None, None, 0))(arrays, a, b, x).mean()
        return jax.lax.map(lambda a: jax.lax.map(lambda b: one(a, b), b), a)

    products = products_of(lambda model, x: jnp.sum(model(x) ** 2), mlp, x)
    num = points**2
    return Case(
        name="landscape",
        title=f"mean loss over {inputs:,} inputs, {points} x {points}, by {inputs:,}",
        ways={OURS: ours, NESTED: all_at_once, LOOP: loop},
        args=(arrays, a, b, x),
        work=Work(num * mapped(products, inputs), num_bytes(arrays, a, b, x) + 4 * num),
        unbounded=(NESTED,),
        best_memory=1.01,
    )


def flat_bars() -> list[Bar]:
    """Temporaries do not grow with the grid."""

    def taken(models: int) -> int:
        case = ensemble(models, 1024, 256)
        return temporaries(jax.jit(case.ways[OURS]).lower(*case.args))

    growth = taken(32) / taken(2)
    return [Bar("temporaries for 16 times the models, of those for 1", growth, 1.001)]


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    cases = [
        cells(200 if quick else 2_000),
        ensemble(2 if quick else 8, 256 if quick else 4_096, None),
        ensemble(2 if quick else 8, 256 if quick else 4_096, 64 if quick else 512),
        landscape(3 if quick else 21, 128 if quick else 512),
    ]
    bars = flat_bars()
    measured = []
    for case in cases:
        rows = measure(case, rounds=5 if quick else 25)
        measured.append((case, rows))
        bars += bars_of(case, rows)
    return *results(measured, bars), bars
