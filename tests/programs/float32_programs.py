"""Random programs in float32, held to what a plain float32 program keeps.

Each program is computed three times: by the package in float32, by plain JAX in
float32, and by plain JAX in float64. The error of the package may be ten times that of
plain JAX. The programs have what cancels or saturates: differences of almost equal
outputs, alternating sums over positions, and confident classifiers.

`python -m tests.programs.float32_programs --minutes 60 --seed 0` goes on after what it
finds, and says at the end how many programs and comparisons ran.
"""

import argparse
import collections
import dataclasses
import gc
import os
import time
from typing import Any

from ..flags import COMPILE_FAST


os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

import eqxbatch as eb
from ..conftest import enable_x64


# How much larger an error may be than that of plain JAX in float32, and a relative
# error that is no finding: sums in another order.
MOST, ROUNDING = 10.0, 1e-5

USES = ("once", "difference", "second_difference", "positions", "attention")
ACTIVATIONS = (jax.nn.tanh, jax.nn.softplus, jax.nn.gelu, jax.nn.relu)


class Model(eqx.Module):
    """A network whose outputs at several rows of one example are combined."""

    net: eqx.nn.MLP
    use: str = eqx.field(static=True)
    confidence: float = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        uses = {
            "once": [1.0],
            "difference": [1.0, -1.0],
            "second_difference": [1.0, -2.0, 1.0],
        }.get(self.use)
        if uses is not None:
            # Uses of their own, rather than positions of one use.
            out = sum(w * self.net(row) for w, row in zip(uses, x, strict=True))
        else:
            rows = jax.vmap(self.net)(x)
            if self.use == "attention":
                rows = jax.nn.softmax(rows @ rows.T, axis=-1) @ rows
            out = jnp.asarray([(-1.0) ** i for i in range(len(x))], x.dtype) @ rows
        return out * jnp.asarray(self.confidence, x.dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, the loss of its output, and examples."""

    seed: int
    loss: str
    model: Model
    distance: float
    x: np.ndarray
    y: np.ndarray
    microbatch_size: int

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.model.use}, {self.loss}, distance "
            f"{self.distance:.0e}, confidence {self.model.confidence:.0f}, x of "
            f"{self.x.shape}, microbatches of {self.microbatch_size}"
        )

    def of_output(self, out: Array, x: Array, y: Array) -> Array:
        if self.loss == "squares":
            return jnp.sum((out - y) ** 2) / 2
        return jax.nn.logsumexp(out) - out[jnp.argmax(y)]

    def value(self, model: Model, x: Array, y: Array) -> Array:
        return self.of_output(model(x), x, y)

    def cast(self, dtype: Any) -> tuple[Model, Array, Array]:
        """The same numbers in another precision."""
        cast = lambda x: jnp.asarray(np.asarray(x, np.float32), dtype)
        model = jax.tree.map(
            lambda x: cast(x) if eqx.is_inexact_array(x) else x, self.model
        )
        return model, cast(self.x), cast(self.y)


def draw(seed: int) -> Program:
    """A program, which follows from its seed."""
    rng = np.random.default_rng(seed)
    use = str(rng.choice(USES))
    loss = str(rng.choice(["squares", "cross_entropy"]))
    num_rows = {"once": 1, "difference": 2, "second_difference": 3}.get(use)
    num_rows = num_rows or int(rng.integers(2, 7))
    num = int(rng.integers(3, 9))
    inputs, outputs, width = (int(size) for size in rng.integers(2, 7, 3))
    distance = float(10 ** rng.uniform(-4, 0))
    x = rng.normal(size=(num, 1, inputs))
    x = x + distance * rng.normal(size=(num, num_rows, inputs))
    is_confident = loss == "cross_entropy" and rng.random() < 0.5
    confidence = float(10 ** rng.uniform(0, 2)) if is_confident else 1.0
    net = eqx.nn.MLP(
        inputs,
        outputs,
        width,
        int(rng.integers(1, 3)),
        activation=ACTIVATIONS[int(rng.integers(len(ACTIVATIONS)))],
        key=jax.random.key(seed),
    )
    y = rng.normal(size=(num, outputs))
    size = int(rng.integers(1, num + 1))
    return Program(
        seed, loss, Model(net, use, confidence), distance, x, y, microbatch_size=size
    )


def plain(program: Program, dtype: Any, bound: Any = None) -> tuple[dict, Any]:
    """All quantities by plain JAX, and the bound to which gradients were clipped."""
    model, x, y = program.cast(dtype)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(params)
    output = lambda flat, x: eqx.combine(unravel(flat), static)(x)
    value = lambda flat, x, y: program.of_output(output(flat, x), x, y)
    mean = lambda flat, x, y: jnp.mean(jax.vmap(value, (None, 0, 0))(flat, x, y))

    def run(flat: Array, x: Array, y: Array, bound: Any) -> dict:
        gradients = jax.vmap(jax.grad(value), (None, 0, 0))(flat, x, y)
        norms = jnp.linalg.norm(gradients, axis=1)
        bound = jnp.median(norms) / 2 if bound is None else bound.astype(dtype)
        jacobian = jax.vmap(jax.jacrev(output), (None, 0))(flat, x)
        outputs = jax.vmap(output, (None, 0))(flat, x)
        inner = jax.vmap(jax.hessian(program.of_output))(outputs, x, y)
        scaled = gradients * jnp.minimum(1, bound / norms)[:, None]
        ntk = jnp.einsum("nkp,mkp->nm", jacobian, jacobian) / jacobian.shape[1]
        ggn = jnp.einsum("nkp,nkl,nlq->pq", jacobian, inner, jacobian) / len(x)
        return {
            "bound": bound,
            "norms": norms,
            "clipped": jnp.mean(scaled, axis=0),
            "gradient": jnp.mean(gradients, axis=0),
            "ntk": ntk,
            "ntk_diagonal": jnp.diagonal(ntk),
            "ggn": ggn,
            "ggn_diagonal": jnp.diagonal(ggn),
            "hessian": jax.hessian(mean)(flat, x, y),
        }

    found = jax.jit(run)(flat, x, y, bound)
    bound = found.pop("bound")
    return {name: np.asarray(x, np.float64) for name, x in found.items()}, bound


def by_package(program: Program, bound: Any) -> dict:
    """All quantities by the package, in float32."""
    model, x, y = program.cast(jnp.float32)
    size = program.microbatch_size
    ravel = lambda tree: ravel_pytree(eqx.filter(tree, eqx.is_inexact_array))[0]
    batch = {"in_axes": 0, "microbatch_size": size}
    output = lambda model, x, y: model(x)

    def run(model: Model, x: Array, y: Array, bound: Array) -> dict:
        grad = eb.filter_micro_grad(program.value, microbatch_size=size)
        clipped, statistics = eb.filter_micro_grad(
            program.value, microbatch_size=size, clip_norm=bound, return_norms=True
        )(model, x, y)
        ggn = eb.filter_ggn(output, program.of_output, flat=True, **batch)
        diagonal = eb.filter_ggn_diagonal(output, program.of_output, **batch)
        hessian = eb.filter_hessian(program.value, flat=True, **batch)
        ntk = eb.EmpiricalNTK(model)
        return {
            "norms": statistics.norms,
            "clipped": ravel(clipped),
            "gradient": ravel(grad(model, x, y)),
            "ntk": ntk(x),
            "ntk_diagonal": ntk.diagonal(x),
            "ggn": ggn(model, x, y)[0],
            "ggn_diagonal": ravel(diagonal(model, x, y)),
            "hessian": hessian(model, x, y)[0],
        }

    found = eqx.filter_jit(run)(model, x, y, jnp.asarray(bound, jnp.float32))
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def error(name: str, found: np.ndarray, truth: np.ndarray) -> float:
    """The largest error, relative to what it is judged by.

    Norms and diagonals are judged one by one, entries of a kernel by their diagonal
    entries, all others by the largest.
    """
    if name in ("norms", "ntk_diagonal"):
        scale = np.abs(truth)
    elif name == "ntk":
        roots = np.sqrt(np.abs(np.diagonal(truth)))
        scale = roots[:, None] * roots
    else:
        scale = np.max(np.abs(truth), initial=0)
    tiny = np.finfo(np.float32).tiny
    worst = np.max(np.abs(found - truth) / np.maximum(scale, tiny), initial=0)
    return float(worst) if np.isfinite(worst) else np.inf


def examine(program: Program) -> dict[str, tuple[float, float]]:
    """For each quantity, the error of the package and that of plain JAX."""
    with (
        enable_x64(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        single, bound = plain(program, jnp.float32)
        truth, _ = plain(program, jnp.float64, bound)
        found = by_package(program, bound)
    return {
        name: (error(name, x, truth[name]), error(name, single[name], truth[name]))
        for name, x in found.items()
    }


def findings(program: Program) -> list[str]:
    """The quantities that lose more than the plain way does."""
    return [
        f"{name}: {error:.1e}, plain {plain:.1e}"
        for name, (error, plain) in examine(program).items()
        if not error <= MOST * plain + ROUNDING
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    args = parser.parse_args()
    started, seed = time.time(), args.seed
    totals: collections.Counter = collections.Counter()
    while True:
        if args.count is not None and seed - args.seed >= args.count:
            break
        if args.minutes is not None and time.time() - started > 60 * args.minutes:
            break
        program = draw(seed)
        found = findings(program)
        totals[program.model.use] += 1
        totals["with findings"] += bool(found)
        totals.update(f"found by {text.split(':')[0]}" for text in found)
        if found:
            print("\n    ".join([str(program), *found]), flush=True)
        seed += 1
        if seed % 25 == 0:
            jax.clear_caches()
            gc.collect()
    print(
        f"seeds {args.seed} to {seed - 1}, {time.process_time():.0f} s of CPU: "
        f"{dict(totals)}"
    )


if __name__ == "__main__":
    main()
