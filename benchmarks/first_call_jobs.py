"""First calls of eqxbatch and of alternatives, for `benchmarks.first_call`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree

from eqxbatch import (
    EmpiricalNTK,
    filter_ggn,
    filter_hessian,
    filter_hvp,
    filter_micro_grad,
    MemoryBudget,
)
from . import harness, kernels, micro_grad, zoo


KEY = jr.key(0)
DEPTHS = (2, 4, 8, 16, 32)


# A function and its arguments, both created for each first call.
Call = tuple[Callable, tuple]


@dataclasses.dataclass(frozen=True)
class Job:
    """A first call of eqxbatch, which should take at most `limit` times that of `way`.

    - `depth`: the depth of the network, if the growth with the depth is shown.
    - `is_quick`: whether it compiles fast enough for quick runs.
    - `compiles`: whether both are compiled, too, or only traced.
    """

    title: str
    way: str
    limit: float
    ours: Callable[[], Call]
    theirs: Callable[[], Call]
    depth: int | None = None
    is_quick: bool = True
    compiles: bool = True

    @property
    def name(self) -> str:
        """What its figures are stored as; jobs with several ways share a title."""
        return f"{self.title}: first call, of that of {self.way}"


# Second derivatives.


def squared_error(model, x, y):
    return (model(x) - y) ** 2


def network(depth: int, num: int = 64) -> tuple[Any, tuple]:
    model = eqx.nn.MLP(4, "scalar", 16, depth, jnp.tanh, key=KEY)
    return model, (jr.normal(KEY, (num, 4)), jr.normal(KEY, (num,)))


def mean_loss(model: Any, loss: Callable, *data: Any) -> tuple[Callable, Any]:
    """The mean loss that users differentiate without eqxbatch, and the parameters."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def total(arrays):
        one = lambda *row: loss(eqx.combine(arrays, static), *row)
        return jnp.mean(jax.vmap(one)(*data))

    return total, arrays


def our_hessian(depth: int, num: int = 64, **settings: Any) -> Call:
    model, data = network(depth, num)
    loss = lambda *args: squared_error(*args)
    return filter_hessian(loss, in_axes=0, **settings), (model, *data)


def hessian_of_jax(depth: int) -> Call:
    model, data = network(depth)

    def run(model, *data):
        total, arrays = mean_loss(model, squared_error, *data)
        return jax.hessian(total)(arrays)

    return run, (model, *data)


def raveled_hessian_of_jax(depth: int) -> Call:
    model, data = network(depth)

    def run(model, *data):
        total, arrays = mean_loss(model, squared_error, *data)
        flat, unravel = ravel_pytree(arrays)
        return jax.hessian(lambda flat: total(unravel(flat)))(flat)

    return run, (model, *data)


def our_product(depth: int) -> Call:
    model, data = network(depth)
    loss = lambda *args: squared_error(*args)
    product = filter_hvp(loss, in_axes=0)
    return product, (model, eqx.filter(model, eqx.is_inexact_array), *data)


def product_of_jax(depth: int) -> Call:
    model, data = network(depth)

    def run(model, vector, *data):
        total, arrays = mean_loss(model, squared_error, *data)
        return jax.jvp(jax.grad(total), (arrays,), (vector,))[1]

    return run, (model, eqx.filter(model, eqx.is_inexact_array), *data)


class Wave(eqx.Module):
    """A formula of four scalars."""

    height: jax.Array
    rate: jax.Array
    phase: jax.Array
    offset: jax.Array

    def __init__(self):
        values = jnp.split(0.5 + jr.uniform(KEY, (4,)), 4)
        self.height, self.rate, self.phase, self.offset = map(jnp.squeeze, values)

    def __call__(self, x):
        return self.height * jnp.sin(self.rate * x + self.phase) + self.offset


class MaskedLayer(eqx.Module):
    """The shift and log-scale of each variable, from the variables before it."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    size: int

    def __init__(self, size, width, key):
        keys = jr.split(key)
        self.first = eqx.nn.Linear(size, width, key=keys[0])
        self.second = eqx.nn.Linear(width, 2 * size, key=keys[1])
        self.size = size

    def __call__(self, x):
        places = jnp.arange(self.size)
        hidden = jnp.arange(self.first.out_features) % (self.size - 1)
        mask1 = hidden[:, None] >= places
        mask2 = jnp.tile(places, 2)[:, None] > hidden
        h = jnp.tanh((self.first.weight * mask1) @ x + self.first.bias)
        shift, log_scale = jnp.split(
            (self.second.weight * mask2) @ h + self.second.bias, 2
        )
        return (x - shift) * jnp.exp(-log_scale), -jnp.sum(log_scale)


class Flow(eqx.Module):
    """A masked autoregressive flow of two layers: base variables and log-volume."""

    layers: list[MaskedLayer]

    def __init__(self):
        self.layers = [MaskedLayer(3, 8, key) for key in jr.split(KEY)]

    def __call__(self, x):
        volume = jnp.zeros(())
        for layer in self.layers:
            x, change = layer(x)
            x, volume = x[::-1], volume + change
        return jnp.append(x, volume)


def wave() -> tuple[Any, tuple, Callable]:
    half_square = lambda out, x: out**2 / 2
    return Wave(), (jr.normal(KEY, (64,)),), half_square


def flow() -> tuple[Any, tuple, Callable]:
    likelihood = lambda out, x: jnp.sum(out[:-1] ** 2) / 2 - out[-1]
    return Flow(), (jr.normal(KEY, (64, 3)),), likelihood


def our_ggn(make: Callable) -> Call:
    model, data, loss = make()
    run = lambda model, x: model(x)
    return filter_ggn(run, loss, flat=True), (model, *data)


def dense_ggn(make: Callable) -> Call:
    """The mean of J^T H J over all examples, from dense Jacobians and Hessians."""
    model, data, loss = make()

    def run(model, xs):
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        flat, unravel = ravel_pytree(arrays)

        def one(x):
            out = lambda flat: eqx.combine(unravel(flat), static)(x)
            jacobian = jnp.atleast_2d(jax.jacrev(out)(flat))
            hessian = jnp.atleast_2d(jax.hessian(lambda y: loss(y, x))(out(flat)))
            return jacobian.T @ hessian @ jacobian

        return jnp.mean(jax.vmap(one)(xs), axis=0)

    return run, (model, *data)


# Gradients in microbatches.


def dense(num: int = 64) -> tuple[Any, tuple]:
    return micro_grad.Dense(KEY), (jr.normal(KEY, (num, 256)),) * 2


def cnn() -> tuple[Any, tuple]:
    labels = jr.randint(KEY, (64,), 0, 10)
    return micro_grad.CNN(KEY), (jr.normal(KEY, (64, 1, 28, 28)), labels)


def transformer(depth: int = 4) -> tuple[Any, tuple]:
    model = micro_grad.Transformer(KEY, embeds=True, depth=depth)
    tokens = jr.randint(KEY, (64, 64), 0, 10_000)
    return model, (tokens, jr.randint(KEY, (64,), 0, 10))


def gradient(make: Callable, ways: Callable, way: str) -> Call:
    """A way of `benchmarks.micro_grad`."""
    model, data = make()
    run = ways(model, len(data[0]), 16)[way]
    return run, (eqx.filter(model, eqx.is_inexact_array), *data)


def budgeted(size: int | MemoryBudget) -> Call:
    job = zoo.bert(256, 4)
    loss = lambda *args: job.loss(*args)
    return filter_micro_grad(loss, microbatch_size=size), (job.model, *job.data)


# Kernels.


DENSE = kernels.dense(32, 64, 64, 64, 64, 10)
CNN = kernels.cnn(16, "cnn_gap", 10)


def our_kernel(spec: dict[str, Any], block: int | None = None) -> Call:
    model, x = kernels.build(spec)
    return (lambda ntk, x: ntk(x)), (EmpiricalNTK(model, block_size=block), x)


def contraction(spec: dict[str, Any]) -> Call:
    """Jacobians of all examples, and their products."""
    model, x = kernels.build(spec)

    def run(model, xs):
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        out = lambda arrays, x: eqx.combine(arrays, static)(x)
        jacobians = jax.vmap(jax.jacrev(out), (None, 0))(arrays, xs)
        total = 0.0
        for jacobian in jax.tree.leaves(jacobians):
            flat = jacobian.reshape(*jacobian.shape[:2], -1)
            total += jnp.einsum("aip,bjp->abij", flat, flat)
        return total

    return run, (model, x)


def hessian_jobs() -> list[Job]:
    part = functools.partial
    found = [
        Job(
            f"`filter_hessian` by sites, MLP of depth {depth}",
            "`jax.hessian`",
            1.5,
            part(our_hessian, depth, method="sites"),
            part(hessian_of_jax, depth),
            depth=depth,
            is_quick=depth <= 4,
        )
        for depth in DEPTHS
    ]
    found += [
        Job(
            f"`filter_hessian(flat=True)`, MLP of depth {depth}",
            "`jax.hessian` of the raveled vector",
            1.5,
            part(our_hessian, depth, flat=True),
            part(raveled_hessian_of_jax, depth),
            is_quick=False,
        )
        for depth in (4, 16)
    ]
    found += [
        Job(
            "`filter_hessian`, auto, MLP of depth 4",
            "`jax.hessian`",
            1.7,
            part(our_hessian, 4),
            part(hessian_of_jax, 4),
            is_quick=False,
        ),
        Job(
            "`filter_hessian`, 70 examples by 32, MLP of depth 2",
            "64 examples by 32",
            1.3,
            part(our_hessian, 2, 70, microbatch_size=32),
            part(our_hessian, 2, 64, microbatch_size=32),
            is_quick=False,
        ),
        Job(
            "`filter_hvp`, MLP of depth 4",
            "`jax.jvp` of `jax.grad`",
            1.3,
            part(our_product, 4),
            part(product_of_jax, 4),
        ),
    ]
    for title, make in (("formula of 4 scalars", wave), ("autoregressive flow", flow)):
        ours, theirs = part(our_ggn, make), part(dense_ggn, make)
        found.append(
            Job(
                f"`filter_ggn`, {title}",
                "dense",
                2.0,
                ours,
                theirs,
                is_quick=make is wave,
            )
        )
    return found


def gradient_jobs() -> list[Job]:
    part = functools.partial
    found = []
    for title, make in (
        ("MLP", dense),
        ("CNN", cnn),
        ("transformer of 4 layers", transformer),
    ):
        clipped = part(gradient, make, micro_grad.clipped)
        accumulated = part(gradient, make, micro_grad.accumulated)
        found += [
            Job(
                f"clipped gradients, {title}",
                "scan over clipped gradients",
                1.5,
                part(clipped, harness.OURS),
                part(clipped, "lax.scan by hand"),
                is_quick=make is dense,
            ),
            Job(
                f"accumulated gradients, {title}",
                "one plain gradient",
                1.4,
                part(accumulated, harness.OURS),
                part(clipped, micro_grad.PLAIN),
                is_quick=make is dense,
            ),
            Job(
                f"accumulated gradients, {title}",
                "`lax.scan` by hand",
                1.5,
                part(accumulated, harness.OURS),
                part(accumulated, "lax.scan by hand"),
                is_quick=make is dense,
            ),
        ]
    return found


def remainder_jobs() -> list[Job]:
    """A size that does not divide the batch, compared with one that does."""
    part = functools.partial
    return [
        Job(
            f"{name} gradients, MLP, 67 examples by 16",
            "64 examples by 16",
            1.15,
            part(gradient, part(dense, 67), ways, harness.OURS),
            part(gradient, dense, ways, harness.OURS),
            is_quick=False,
        )
        for name, ways in (
            ("accumulated", micro_grad.accumulated),
            ("clipped", micro_grad.clipped),
        )
    ]


def tracing_jobs() -> list[Job]:
    """Times that should grow with the number of layers, and no faster."""
    part = functools.partial
    return [
        Job(
            f"trace of clipped gradients, transformer of {depth} layers",
            "scan over clipped gradients",
            2.0,
            part(gradient, part(transformer, depth), micro_grad.clipped, harness.OURS),
            part(
                gradient,
                part(transformer, depth),
                micro_grad.clipped,
                "lax.scan by hand",
            ),
            is_quick=False,
            compiles=False,
        )
        for depth in (4, 24, 48)
    ]


def jobs() -> list[Job]:
    part = functools.partial
    found = [*hessian_jobs(), *gradient_jobs(), *remainder_jobs(), *tracing_jobs()]
    for title, spec, block in (("MLP", DENSE, 8), ("CNN", CNN, 4)):
        found += [
            Job(
                f"NTK, {title}",
                "Jacobians by hand",
                1.2,
                part(our_kernel, spec),
                part(contraction, spec),
                is_quick=spec is DENSE,
            ),
            Job(
                f"NTK in blocks, {title}",
                "without blocks",
                2.0,
                part(our_kernel, spec, block),
                part(our_kernel, spec),
                is_quick=spec is DENSE,
            ),
        ]
    found.append(
        Job(
            "`MemoryBudget`, BERT of 4 layers",
            "the size given",
            2.5,
            part(budgeted, MemoryBudget("300MB")),
            # About the size that the budget chooses, which also leaves a remainder.
            part(budgeted, 109),
            is_quick=False,
        )
    )
    return found
