"""Random programs in float32, held to what a plain float32 program keeps.

Each program is computed three times: by the package in float32, by plain JAX in
float32, and by plain JAX in float64. The error of the package may be ten times that of
plain JAX. The programs have what cancels or saturates: differences of almost equal
outputs, alternating sums over positions, and confident classifiers. Inputs and the
curvatures of losses may be of very different sizes, and there may be many microbatches.

`python -m tests.programs.float32_programs --minutes 60 --seed 0` goes on after what it
finds, and says at the end how many programs and comparisons ran.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..flags import COMPILE_FAST


os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)
# Plain JAX has NaNs where there would be an error at run time.
os.environ.setdefault("EQX_ON_ERROR", "nan")

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

import eqxbatch as eb
from ..conftest import enable_x64


# How much larger an error may be than that of plain JAX in float32, and a relative
# error that is no finding: sums in another order.
MOST, ROUNDING = 10.0, 1e-5

# In how many orders plain JAX sums. It may be exact by luck in one of them.
ORDERS = 4

# How many programs, with other numbers, are compiled once.
OF_KIND = 5

USES = ("once", "difference", "second_difference", "positions", "attention")
LOSSES = ("squares", "weighted_squares", "cross_entropy")
ACTIVATIONS = (jax.nn.tanh, jax.nn.softplus, jax.nn.gelu, jax.nn.relu)


class Model(eqx.Module):
    """A network whose outputs at several rows of one example are combined."""

    net: eqx.nn.MLP
    use: str = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        uses = {
            "once": [1.0],
            "difference": [1.0, -1.0],
            "second_difference": [1.0, -2.0, 1.0],
        }.get(self.use)
        if uses is not None:
            # Uses of their own, rather than positions of one use.
            return sum(w * self.net(row) for w, row in zip(uses, x, strict=True))
        rows = jax.vmap(self.net)(x)
        if self.use == "attention":
            rows = jax.nn.softmax(rows @ rows.T, axis=-1) @ rows
        return jnp.asarray([(-1.0) ** i for i in range(len(x))], x.dtype) @ rows


@dataclasses.dataclass(frozen=True)
class Kind:
    """All that a program is compiled for.

    - `sizes`: the numbers of examples, rows, inputs, outputs, units and layers.
    - `centre`, `solver`: those of a Gauss-Newton step.
    """

    use: str
    loss: str
    sizes: tuple[int, ...]
    activation: int
    centre: bool
    solver: str
    microbatch_size: int

    def of_output(self, out: Array, x: Array, y: Array) -> Array:
        """The loss; `y` has a curvature and a target for each output."""
        curvatures, targets = y
        if self.loss == "squares":
            return jnp.sum((out - targets) ** 2) / 2
        if self.loss == "weighted_squares":
            return jnp.sum(curvatures * (out - targets) ** 2) / 2
        return jax.nn.logsumexp(out) - out[jnp.argmax(targets)]

    def value(self, model: Model, x: Array, y: Array) -> Array:
        return self.of_output(model(x), x, y)


class Program(NamedTuple):
    """A model, examples, and the damping of a step.

    The damping is relative to the mean squared Jacobian.
    """

    seed: int
    kind: Kind
    drawn: dict[str, float]
    model: Model
    x: np.ndarray
    y: np.ndarray
    damping: float

    def __str__(self) -> str:
        drawn = ", ".join(f"{name} {x:.1e}" for name, x in self.drawn.items())
        return f"seed {self.seed}: {self.kind}, {drawn}, damping {self.damping:.0e}"

    def cast(self, dtype: Any) -> tuple[Model, Array, Array]:
        """The same numbers in another precision."""
        cast = lambda x: jnp.asarray(np.asarray(x, np.float32), dtype)
        is_number = lambda x: isinstance(x, np.ndarray) or eqx.is_inexact_array(x)
        arrays = self.model, self.x, self.y
        return jax.tree.map(lambda x: cast(x) if is_number(x) else x, arrays)


def draw_kind(seed: int) -> Kind:
    rng = np.random.default_rng(seed)
    use = str(rng.choice(USES))
    num_rows = {"once": 1, "difference": 2, "second_difference": 3}.get(use)
    has_many = rng.random() < 0.2
    num = int(10 ** rng.uniform(2, 3)) if has_many else int(rng.integers(3, 9))
    sizes = num, num_rows or rng.integers(2, 7), *rng.integers(2, 7, 3)
    return Kind(
        use,
        loss=str(rng.choice(LOSSES)),
        sizes=(*map(int, sizes), int(rng.integers(1, 3))),
        activation=int(rng.integers(len(ACTIVATIONS))),
        centre=bool(rng.random() < 0.5),
        solver=str(rng.choice(["cholesky", "eigh"])),
        microbatch_size=int(rng.integers(1, 4 if has_many else num + 1)),
    )


def draw(seed: int) -> Program:
    """A program, which follows from its seed.

    The sizes of inputs and curvatures differ by as many orders as `decades` says.
    """
    kind = draw_kind(seed // OF_KIND)
    num, num_rows, inputs, outputs, width, depth = kind.sizes
    rng = np.random.default_rng((seed, 1))
    distance = 10 ** rng.uniform(-4, 0)
    decades = rng.uniform(0, 10) if rng.random() < 0.4 else 0.0
    is_confident = kind.loss == "cross_entropy" and rng.random() < 0.5
    confidence = 10 ** rng.uniform(0, 2) if is_confident else 1.0
    x = rng.normal(size=(num, 1, inputs))
    x = x + distance * rng.normal(size=(num, num_rows, inputs))
    x *= 10 ** (-rng.uniform(0, 1, inputs) * decades / 2)
    curvatures = np.broadcast_to(
        10 ** (-rng.uniform(0, 1, outputs) * decades), (num, outputs)
    )
    net = eqx.nn.MLP(
        inputs,
        outputs,
        width,
        depth,
        activation=ACTIVATIONS[kind.activation],
        key=jax.random.key(seed),
    )
    last = lambda net: (net.layers[-1].weight, net.layers[-1].bias)
    net = eqx.tree_at(last, net, [x * np.float32(confidence) for x in last(net)])
    drawn = {"distance": distance, "decades": decades, "confidence": confidence}
    y = np.stack([curvatures, rng.normal(size=(num, outputs))], axis=1)
    damping = float(10 ** rng.uniform(-5, 0))
    return Program(seed, kind, drawn, Model(net, kind.use), x, y, damping)


def orders(program: Program, num: int) -> list[Array]:
    """Orders of the examples and of the units of each layer: the given one first."""
    rng = np.random.default_rng(program.seed)
    sizes = [len(program.x), *(x.in_features for x in program.model.net.layers)]
    each = [[rng.permutation(size) for _ in range(num - 1)] for size in sizes]
    pairs = zip(sizes, each, strict=True)
    return [jnp.asarray([np.arange(size), *found]) for size, found in pairs]


def reordered(model: Model, units: list[Array]) -> Model:
    """The same function, whose sums have the terms in another order."""
    layers = model.net.layers
    found = []
    for i, layer in enumerate(layers):
        weight, bias = layer.weight[:, units[i]], layer.bias
        if i + 1 < len(layers):
            weight, bias = weight[units[i + 1]], bias[units[i + 1]]
        own = lambda x: (x.weight, x.bias)
        found.append(eqx.tree_at(own, layer, (weight, bias)))
    return eqx.tree_at(lambda x: x.net.layers, model, tuple(found))


def plain(
    kind: Kind,
    model: Model,
    x: Array,
    y: Array,
    order: list[Array],
    damping: float | Array,
    bound: Array | None,
) -> dict:
    """All quantities by plain JAX.

    Without a `bound`, there are the bound and the damping to use among them.
    """
    params, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(params)
    examples, *units = order
    x, y, back = x[examples], y[examples], jnp.argsort(examples)

    def output(flat: Array, row: Array) -> Array:
        model = eqx.combine(unravel(flat), static)
        return reordered(model, units)(row[:, units[0]])

    def mean(flat: Array) -> Array:
        return jnp.mean(jax.vmap(value, (None, 0, 0))(flat, x, y))

    def step_of(jacobian: Array, residuals: Array) -> Array:
        if kind.centre:
            jacobian -= jnp.mean(jacobian, axis=0)
            residuals -= jnp.mean(residuals, axis=0)
        root = len(x) ** -0.5
        rows = jacobian.reshape(-1, len(flat)) * root
        residuals = residuals.reshape(-1) * root
        in_samples = rows.shape[0] <= rows.shape[1]
        matrix = rows @ rows.T if in_samples else rows.T @ rows
        vector = residuals if in_samples else rows.T @ residuals
        factor = jsl.cho_factor(matrix + damping * jnp.eye(len(matrix), dtype=x.dtype))
        found = jsl.cho_solve(factor, vector)
        return rows.T @ found if in_samples else found

    value = lambda flat, x, y: kind.of_output(output(flat, x), x, y)
    gradients = jax.vmap(jax.grad(value), (None, 0, 0))(flat, x, y)
    norms = jnp.linalg.norm(gradients, axis=1)
    jacobian = jax.vmap(jax.jacrev(output), (None, 0))(flat, x)
    rounded = lambda x: x.astype(jnp.float32).astype(flat.dtype)
    chosen = {}
    if bound is None:
        damping *= jnp.sum(jacobian**2) / len(x)
        bound = jnp.median(norms) / 2
        chosen = {"damping": rounded(damping), "bound": rounded(bound)}
    damping, bound = rounded(damping), rounded(bound)
    outputs = jax.vmap(output, (None, 0))(flat, x)
    inner = jax.vmap(jax.hessian(kind.of_output))(outputs, x, y)
    scaled = gradients * jnp.minimum(1, bound / norms)[:, None]
    ntk = jnp.einsum("nkp,mkp->nm", jacobian, jacobian) / jacobian.shape[1]
    ggn = jnp.einsum("nkp,nkl,nlq->pq", jacobian, inner, jacobian) / len(x)
    return {
        **chosen,
        "norms": norms[back],
        "clipped": jnp.mean(scaled, axis=0),
        "gradient": jnp.mean(gradients, axis=0),
        "ntk": ntk[back][:, back],
        "ntk_diagonal": jnp.diagonal(ntk)[back],
        "ggn": ggn,
        "ggn_diagonal": jnp.diagonal(ggn),
        "hessian": jax.hessian(mean)(flat),
        "step": step_of(jacobian, outputs - y[:, 1]),
    }


def by_package(
    kind: Kind, model: Model, x: Array, y: Array, damping: Array, bound: Array
) -> dict:
    """All quantities by the package."""
    size = kind.microbatch_size
    ravel = lambda tree: ravel_pytree(eqx.filter(tree, eqx.is_inexact_array))[0]
    batch = {"in_axes": 0, "microbatch_size": size}
    output = lambda model, x, y: model(x)
    grad = eb.filter_micro_grad(kind.value, microbatch_size=size)
    clipped, statistics = eb.filter_micro_grad(
        kind.value, microbatch_size=size, clip_norm=bound, return_norms=True
    )(model, x, y)
    ggn = eb.filter_ggn(output, kind.of_output, flat=True, **batch)
    diagonal = eb.filter_ggn_diagonal(output, kind.of_output, **batch)
    hessian = eb.filter_hessian(kind.value, flat=True, **batch)
    ntk = eb.EmpiricalNTK(model, block_size=max(size, -(-len(x) // 4)))
    step = eb.filter_gauss_newton_step(
        lambda model, x, y: model(x) - y[1],
        damping=damping,
        centre=kind.centre,
        solver=kind.solver,
        microbatch_size=size,
    )
    return {
        "norms": statistics.norms,
        "clipped": ravel(clipped),
        "gradient": ravel(grad(model, x, y)),
        "ntk": ntk(x),
        "ntk_diagonal": ntk.diagonal(x),
        "ggn": ggn(model, x, y)[0],
        "ggn_diagonal": ravel(diagonal(model, x, y)),
        "hessian": hessian(model, x, y)[0],
        "step": ravel(step(model, x, y)),
    }


@functools.lru_cache(maxsize=1)
def compiled(kind: Kind) -> tuple[Callable, Callable]:
    """Both ways for one kind: plain JAX for a stack of orders."""
    in_axes = (None, None, None, 0, None, None)
    stacked = eqx.filter_vmap(functools.partial(plain, kind), in_axes=in_axes)
    return eqx.filter_jit(stacked), eqx.filter_jit(functools.partial(by_package, kind))


def error(name: str, found: np.ndarray, truth: np.ndarray) -> float:
    """The largest error, relative to what it is judged by.

    Norms and diagonals are judged one by one, entries of a kernel or a Gauss-Newton
    matrix by their diagonal entries, all others by the largest.
    """
    if name in ("norms", "ntk_diagonal", "ggn_diagonal"):
        scale = np.abs(truth)
    elif name in ("ntk", "ggn"):
        roots = np.sqrt(np.abs(np.diagonal(truth)))
        scale = roots[:, None] * roots
    else:
        scale = np.max(np.abs(truth), initial=0)
    tiny = np.finfo(np.float32).tiny
    worst = np.max(np.abs(found - truth) / np.maximum(scale, tiny), initial=0)
    return float(worst) if np.isfinite(worst) else np.inf


def examine(program: Program) -> dict[str, tuple[float, float]]:
    """For each quantity, the error of the package and the largest of plain JAX."""
    with (
        enable_x64(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        by_plain, by_own = compiled(program.kind)
        wide, narrow = program.cast(jnp.float64), program.cast(jnp.float32)
        truth = by_plain(*wide, orders(program, 1), jnp.asarray(program.damping), None)
        truth = {name: np.asarray(x[0]) for name, x in truth.items()}
        chosen = [np.float32(truth.pop(name)) for name in ("damping", "bound")]
        chosen = [*map(jnp.asarray, chosen)]
        single = by_plain(*narrow, orders(program, ORDERS), *chosen)
        found = by_own(*narrow, *chosen)
    judge = lambda name, x: error(name, np.asarray(x, np.float64), truth[name])
    return {
        name: (judge(name, x), max(judge(name, one) for one in single[name]))
        for name, x in found.items()
    }


def findings(examined: dict[str, tuple[float, float]]) -> list[str]:
    """The quantities that lose more than the plain way does."""
    return [
        f"{name}: {error:.1e}, plain {plain:.1e}"
        for name, (error, plain) in examined.items()
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
        examined = examine(program)
        found = findings(examined)
        totals["comparisons"] += len(examined)
        totals[program.kind.use] += 1
        totals["with decades"] += program.drawn["decades"] > 0
        totals["with many microbatches"] += len(program.x) > 99
        totals["with findings"] += bool(found)
        totals.update(f"found by {text.split(':')[0]}" for text in found)
        if found:
            print("\n    ".join([str(program), *found]), flush=True)
        seed += 1
        if seed % (10 * OF_KIND) == 0:
            jax.clear_caches()
            gc.collect()
    print(
        f"seeds {args.seed} to {seed - 1}, {time.process_time():.0f} s of CPU: "
        f"{dict(totals)}"
    )


if __name__ == "__main__":
    main()
