"""`filter_gauss_newton_step`, compared with Jacobians, dense and in chunks."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import jax.scipy.linalg as jsl
import jax.tree_util as jtu

from eqxbatch import filter_gauss_newton_step
from . import work
from .harness import Bar, bars_of, Case, measure, OURS, results
from .limit import num_bytes, Work


NAME = "steps"
KEY = jr.key(0)
DENSE = "dense Jacobian"
CHUNKED = "Jacobians contracted in chunks"
RECOMPUTED = f"{CHUNKED}, without XLA's hoisting"
DAMPING = 1e-3


def solved(kernel: jax.Array, residuals: jax.Array, centre: bool) -> jax.Array:
    """The vector that the transposed Jacobian maps to the step."""
    num = kernel.shape[0]
    if centre:
        kernel = kernel - kernel.mean(0)
        kernel = kernel - kernel.mean(1, keepdims=True)
        residuals = residuals - residuals.mean()
    shifted = kernel / num + DAMPING * jnp.eye(num)
    found = jsl.cho_solve(jsl.cho_factor(shifted), residuals / num)
    return found - found.mean() if centre else found


def by_dense_jacobian(fun: Callable, centre: bool) -> Callable:
    """A step with the gradients of all examples in one matrix."""

    def step(leaves: Any, *batch: Any) -> Any:
        flat, unravel = jax.flatten_util.ravel_pytree(leaves)
        own = lambda flat, *example: fun(unravel(flat), *example)
        axes = (None, *(0 for _ in batch))
        of_all = jax.vmap(jax.value_and_grad(own, has_aux=True), axes)
        (_, residuals), jacobian = of_all(flat, *batch)
        found = solved(jacobian @ jacobian.T, residuals, centre)
        return unravel(found @ jacobian)

    return step


def by_chunks(
    fun: Callable, centre: bool, chunk: int, *, is_hoisted: bool = True
) -> Callable:
    """A step with all rows of the kernel and a chunk of its columns at a time.

    NetKet contracts Jacobians on the fly like this, leaf by leaf. The Jacobian of all
    rows is inside the loop over the chunks. XLA moves it out of the loop if
    `is_hoisted`; otherwise, each chunk computes it again.
    """

    def step(leaves: Any, *batch: Any) -> Any:
        axes = (None, *(0 for _ in batch))
        jacobian = jax.vmap(jax.grad(lambda *call: fun(*call)[0]), axes)

        def contract(x: jax.Array, y: jax.Array) -> jax.Array:
            return x.reshape(x.shape[0], -1) @ y.reshape(y.shape[0], -1).T

        def columns(some: Any) -> jax.Array:
            own = leaves
            if not is_hoisted:
                own, some = jax.lax.optimization_barrier((leaves, some))
            pairs = jtu.tree_map(contract, jacobian(own, *batch), jacobian(own, *some))
            return functools.reduce(jnp.add, jtu.tree_leaves(pairs))

        chunks = [x.reshape(-1, chunk, *x.shape[1:]) for x in batch]
        blocks = jax.lax.map(lambda some: columns(some), chunks)
        kernel = jnp.swapaxes(blocks, 0, 1).reshape(batch[0].shape[0], -1)
        outputs = lambda leaves: jax.vmap(fun, axes)(leaves, *batch)
        _, pullback, residuals = jax.vjp(outputs, leaves, has_aux=True)
        return pullback(solved(kernel, residuals, centre))[0]

    return step


class Block(eqx.Module):
    """A layer of a transformer, with normalised inputs (pre-norm)."""

    norms: list
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: Any):
        keys = jr.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Wave(eqx.Module):
    """The logarithm of an amplitude: a vision transformer on patches of spins."""

    embed: eqx.nn.Linear
    positions: jax.Array
    blocks: list
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, spins: int, width: int, depth: int, key: Any):
        keys = jr.split(key, depth + 3)
        self.patch = 4
        self.embed = eqx.nn.Linear(4, width, key=keys[0])
        self.positions = 0.1 * jr.normal(keys[1], (spins // 4, width))
        self.blocks = [Block(width, key) for key in keys[3:]]
        self.head = eqx.nn.Linear(width, width, key=keys[2])

    def __call__(self, spins: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(spins.reshape(-1, self.patch)) + self.positions
        for block in self.blocks:
            x = block(x)
        return jnp.sum(jnp.log(jnp.cosh(self.head(jnp.mean(x, axis=0)))))


def laplacian(model: Callable, x: jax.Array) -> jax.Array:
    """The Laplacian, with two nested forward-mode derivatives for each variable."""

    def second(direction: jax.Array) -> jax.Array:
        along = lambda x: jax.jvp(model, (x,), (direction,))[1]
        return jax.jvp(along, (x,), (direction,))[1]

    return jnp.sum(jax.vmap(second)(jnp.eye(x.size)))


def case(
    name: str, title: str, model: Any, fun: Callable, batch: tuple, **settings: Any
) -> Case:
    """A case; `fun` returns the output to differentiate, and the residual."""
    centre, limit = settings["centre"], settings["limit"]
    leaves, static = eqx.partition(model, eqx.is_inexact_array)
    own = lambda leaves, *example: fun(eqx.combine(leaves, static), *example)
    ours = filter_gauss_newton_step(
        own,
        damping=DAMPING,
        centre=centre,
        has_residual=True,
        space="sample",
        microbatch_size=settings.get("microbatch"),
    )
    num, products = len(batch[0]), work.products_of(fun, model, *batch)
    # The kernel and its decomposition, and the gradients that the step sums.
    flops = work.kernel(products, num) + work.solve(num)
    flops += work.accumulated(products, num)
    return Case(
        name=name,
        title=title,
        ways={
            OURS: ours,
            DENSE: by_dense_jacobian(own, centre),
            CHUNKED: by_chunks(own, centre, settings["chunk"]),
            RECOMPUTED: by_chunks(own, centre, settings["chunk"], is_hoisted=False),
        },
        args=(leaves, *batch),
        work=Work(flops, num_bytes(leaves, batch, leaves)),
        unbounded=(),
        best_memory=settings["memory"],
        best_time=1 / settings["best"],
        limits={CHUNKED: 1 / limit},
    )


def wave(num: int, spins: int) -> Case:
    """A centred step of stochastic reconfiguration."""
    model = Wave(spins, 48, 2, KEY)
    samples = jr.rademacher(jr.key(1), (num, spins), jnp.float32)
    energies = jr.normal(jr.key(2), (num,))
    return case(
        "wave function",
        f"vision transformer of {size_of(model):,} parameters, {num} samples of "
        f"{spins} spins, centred",
        model,
        lambda model, spins, energy: (model(spins), energy),
        (samples, energies),
        centre=True,
        chunk=num // 8,
        limit=3.0,
        best=1.0,
        # Means are subtracted from the Jacobian of each sample, which is stored for
        # all of them; the best peer stores those of a chunk, and computes them again.
        # (2.5 of what XLA reports with fusions whose memory it leaves out.)
        memory=3.1,
    )


def pinn(num: int, microbatch: int) -> Case:
    """The residuals of a Poisson equation."""
    model = eqx.nn.MLP(2, "scalar", 64, 4, jnp.tanh, key=KEY)
    points = jr.uniform(jr.key(1), (num, 2))

    def residual(model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = laplacian(model, x) + jnp.prod(jnp.sin(jnp.pi * x))
        return found, found

    return case(
        f"Poisson equation, {microbatch} at a time",
        f"network of {size_of(model):,} parameters, its Laplacian at {num} points, "
        f"{microbatch} at a time",
        model,
        residual,
        (points,),
        centre=False,
        microbatch=microbatch,
        chunk=num // 8,
        limit=2.0,
        best=2.0,
        # The uses of a parameter in nested derivatives may cancel, so its Jacobian is
        # stored.
        memory=1.25,
    )


def size_of(model: Any) -> int:
    leaves = jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(x.size for x in leaves)


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    cases = [
        wave(32 if quick else 256, 16 if quick else 64),
        pinn(64, 8) if quick else pinn(512, 64),
        pinn(64, 32) if quick else pinn(512, 256),
    ]
    bars: list[Bar] = []
    measured = []
    for one in cases:
        rows = measure(one, rounds=3 if quick else 15)
        measured.append((one, rows))
        bars += bars_of(one, rows)
    return *results(measured, bars), bars
