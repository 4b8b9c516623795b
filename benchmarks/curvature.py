"""`filter_jacobian`, `filter_hessian` and its diagonal, compared with their peers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import adv_jax_math
import equinox as eqx
import folx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits
from zodiax import diffops

from eqxbatch import filter_hessian, filter_hessian_diagonal, filter_jacobian
from . import harness, work
from .harness import Bar, bars_of, Case, measure, OURS, results, Row, temporaries
from .kernels import ratios, timed
from .limit import NoLimit, num_bytes, Shares, Work


NAME = "curvature"
KEY = jr.key(0)
# Temporaries may be this much larger, for loop counters and their alignment.
SLACK = 1.001


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to differentiate with respect to the arrays of `point`.

    - `fun`: a function of `point` and `data`, as a user writes it; if `is_network`, the
        loss of one example of `data`.
    - `size`: the number of columns that are computed at a time in blocks.
    - `calls`: a list with one entry for each time that Python ran `fun`.
    """

    name: str
    title: str
    fun: Callable
    point: Any
    data: tuple
    size: int
    is_network: bool
    calls: list

    @property
    def args(self) -> tuple:
        return (eqx.filter(self.point, eqx.is_inexact_array), *self.data)

    @property
    def best_time(self) -> float:
        """The upper limit for the time of eqxbatch, divided by the best peer's."""
        return 1 / 3 if self.is_network else 1.03

    def whole(self, arrays: Any) -> Any:
        """`point` with other arrays."""
        rest = eqx.filter(self.point, eqx.is_inexact_array, inverse=True)
        return eqx.combine(arrays, rest)

    def total(self, arrays: Any, *data: Any) -> jax.Array:
        """The function that peers differentiate: the mean over all examples."""
        point = self.whole(arrays)
        if not self.is_network:
            return self.fun(point, *data)
        return jnp.mean(jax.vmap(lambda *row: self.fun(point, *row))(*data))

    def flat(self, arrays: Any, *data: Any) -> tuple[Callable, jax.Array]:
        """The same function, of one vector."""
        vector, unravel = ravel_pytree(arrays)
        return (lambda vector: self.total(unravel(vector), *data)), vector


def make_job(
    name: str,
    title: str,
    fun: Callable,
    point: Any,
    data: tuple = (),
    *,
    size: int = 64,
    is_network: bool = False,
) -> Job:
    calls: list = []

    def counted(*args):
        calls.append(None)
        return fun(*args)

    return Job(name, title, counted, point, data, size, is_network, calls)


def num_parameters(point: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(point, eqx.is_array)))


def squared_error(model, x, y):
    return (model(x) - y) ** 2


def cross_entropy(model, x, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), label)


def chain(x):
    """Rosenbrock-like terms of neighbours, and a term of all variables."""
    valley = 100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2
    return jnp.sum(valley) + jax.nn.logsumexp(x)


def spectrum(parameters, wavelengths):
    """Gaussian lines on a sloping baseline."""
    z = (wavelengths[:, None] - parameters["centre"]) / parameters["width"]
    lines = jnp.sum(parameters["height"] * jnp.exp(-(z**2) / 2), axis=-1)
    offset, slope = parameters["baseline"]
    return offset + slope * wavelengths + lines


class CNN(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    linear: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3 = jr.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 4, 3, padding=1, key=key1)
        self.conv2 = eqx.nn.Conv2d(4, 8, 3, stride=2, padding=1, key=key2)
        self.linear = eqx.nn.Linear(8 * 4 * 4, 10, key=key3)

    def __call__(self, x):
        x = jnp.tanh(self.conv1(x))
        x = jnp.tanh(self.conv2(x))
        return self.linear(x.reshape(-1))


def mlp_jobs(quick: bool) -> list[Job]:
    shapes = ((16, 1, 128),) if quick else ((16, 4, 256), (40, 3, 256), (24, 8, 128))
    found = []
    for width, depth, num in shapes:
        for name, activation in (("tanh", jnp.tanh), ("ReLU", jax.nn.relu)):
            model = eqx.nn.MLP(width, "scalar", width, depth, activation, key=KEY)
            data = (jr.normal(KEY, (num, width)), jr.normal(KEY, (num,)))
            label = f"{name} {width}-{depth}-{num}"
            title = (
                f"{name} MLP of width {width} and depth {depth}, "
                f"{num_parameters(model):,} parameters, {num} examples"
            )
            found.append(
                make_job(label, title, squared_error, model, data, is_network=True)
            )
    return found


def cnn_job(quick: bool) -> Job:
    num = 8 if quick else 256
    digits = load_digits()
    images = jnp.asarray(digits.images[:num, None] / 16, jnp.float32)
    labels = jnp.asarray(digits.target[:num], jnp.int32)
    model = CNN(KEY)
    title = f"CNN, {num_parameters(model):,} parameters, {num} digits"
    data = (images, labels)
    return make_job("CNN", title, cross_entropy, model, data, is_network=True)


def chain_job(quick: bool) -> Job:
    num = 1_000 if quick else 2_000
    title = f"chain of {num:,} variables, no network"
    return make_job("chain", title, chain, jr.normal(KEY, (num,)))


def spectrum_job(quick: bool) -> Job:
    keys = jr.split(KEY)
    parameters = {
        "baseline": jnp.array([1.0, 0.1]),
        "centre": jnp.linspace(0.0, 1.0, 16),
        "height": jr.uniform(keys[0], (16,), minval=0.5, maxval=1.5),
        "width": jr.uniform(keys[1], (16,), minval=0.01, maxval=0.1),
    }
    num = 1_000 if quick else 10_000
    title = f"spectrum, 50 parameters, {num:,} outputs"
    data = (jnp.linspace(0.0, 1.0, num),)
    return make_job("spectrum", title, spectrum, parameters, data, size=10)


def jobs(quick: bool) -> list[Job]:
    networks = mlp_jobs(True)[:1] if quick else [*mlp_jobs(False), cnn_job(False)]
    return [*networks, chain_job(quick), spectrum_job(quick)]


def num_blocks(job: Job, size: int | None) -> int:
    return 1 if size is None else -(-num_parameters(job.point) // size)


def hessians(job: Job, size: int | None) -> dict[str, Callable]:
    """All ways to compute a Hessian, as `way(arrays, *data)`."""

    def ours(arrays, *data):
        hessian = filter_hessian(
            job.fun, in_axes=0 if job.is_network else None, block_size=size, flat=True
        )
        return hessian(job.whole(arrays), *data)[0]

    def of_zodiax(arrays, *data):
        total = lambda arrays: job.total(arrays, *data)
        return diffops.hessian(total, arrays, num_blocks(job, size))[0]

    def of_jax(arrays, *data):
        fun, vector = job.flat(arrays, *data)
        return jax.hessian(fun)(vector)

    def of_adv_jax_math(arrays, *data):
        fun, vector = job.flat(arrays, *data)
        return adv_jax_math.batch_jacfwd(jax.grad(fun), batch_size=size)(vector)

    def of_equinox(arrays, *data):
        return eqx.filter_hessian(job.total)(arrays, *data)

    ways: dict[str, Callable] = {OURS: ours}
    if size is None:
        ways |= {"jax.hessian": of_jax, "eqx.filter_hessian": of_equinox}
    else:
        ways |= {"adv_jax_math batch_jacfwd of jax.grad": of_adv_jax_math}
    return {**ways, "zodiax hessian": of_zodiax}


def jacobians(job: Job, size: int | None) -> dict[str, Callable]:
    """All ways to compute a Jacobian, as `way(arrays, *data)`.

    At once, Jacobians are PyTrees; in blocks, they are matrices, because zodiax returns
    matrices.
    """

    def ours(arrays, *data):
        if size is None:
            return filter_jacobian(job.fun)(arrays, *data)
        return filter_jacobian(job.fun, block_size=size, flat=True)(arrays, *data)[0]

    def of_adv_jax_math(arrays, *data):
        if size is None:
            return adv_jax_math.batch_jacfwd(job.fun)(arrays, *data)
        fun, vector = job.flat(arrays, *data)
        return adv_jax_math.batch_jacfwd(fun, batch_size=size)(vector)

    def of_zodiax(arrays, *data):
        fun = lambda arrays: job.fun(arrays, *data)
        return diffops.jacobian(fun, arrays, num_blocks(job, size))[0]

    ways: dict[str, Callable] = {OURS: ours}
    if size is None:
        ways["jax.jacfwd"] = lambda *args: jax.jacfwd(job.fun)(*args)
        ways["eqx.filter_jacfwd"] = lambda *args: eqx.filter_jacfwd(job.fun)(*args)
    else:
        ways["zodiax jacobian"] = of_zodiax
    return {**ways, "adv_jax_math batch_jacfwd": of_adv_jax_math}


def laplacians(job: Job) -> dict[str, Callable]:
    """All ways to compute the sum of the diagonal of a Hessian, as `way(x)`."""

    def ours(x):
        return jnp.sum(filter_hessian_diagonal(job.fun, block_size=job.size)(x))

    def of_folx(sparsity: int) -> Callable:
        return lambda x: folx.forward_laplacian(job.fun, sparsity)(x).laplacian

    return {
        OURS: ours,
        "folx": of_folx(0),
        "folx, sparse": of_folx(10),
        "trace of jax.hessian": lambda x: jnp.trace(jax.hessian(job.fun)(x)),
    }


def work_of(job: Job) -> Work:
    """That of a whole Hessian or Jacobian."""
    num = num_parameters(job.point)
    rows = num
    if job.name == "spectrum":
        rows = len(job.data[0])
    moved = num_bytes(job.args) + 4 * num * rows
    if not job.is_network:
        return Work(0, moved)
    products = work.products_of(job.fun, job.point, *job.data)
    return Work(work.hessian(products, len(job.data[0])), moved)


def cases(job: Job) -> list[Case]:
    """The compiled cases of a job: all at once, and in blocks."""
    ways = jacobians if job.name == "spectrum" else hessians
    missing = {"folx": "sum of the diagonal only"}
    if ways is jacobians:
        rows = "a row for each output"
        missing = {
            "zodiax jacobian": rows,
            "jax.jacrev": rows,
            "folx": "sum of second derivatives only",
        }
    found = []
    for size, suffix in ((None, ""), (job.size, f", by {job.size}")):
        case = Case(
            f"{job.name}{suffix}",
            f"{job.title}{suffix}",
            ways(job, size),
            job.args,
            work_of(job),
            missing={} if size else missing,
            best_memory=SLACK,
            best_time=job.best_time,
        )
        found.append(case)
    if job.name == "chain":
        found.append(
            Case(
                "chain, sum of the diagonal",
                f"{job.title}, sum of the diagonal by {job.size}",
                laplacians(job),
                job.args,
                NoLimit("its terms are neither products nor many bytes"),
                missing={"zodiax, adv_jax_math": "whole Hessians only"},
                # The sparse mode of folx uses that most intermediate values depend on
                # few variables. This is another method, which is only shown.
                best_memory=None,
                best_time=None,
                limits={"folx": 1.03, "trace of jax.hessian": 1.03},
            )
        )
    return found


def eager_ways(job: Job) -> dict[str, Callable]:
    """All ways as users call them, outside of `jax.jit`."""
    ways = jacobians if job.name == "spectrum" else hessians
    zodiax = f"zodiax {'jacobian' if ways is jacobians else 'hessian'}"
    blocked = ways(job, job.size)[zodiax]
    return {**ways(job, None), f"{zodiax}, by {job.size}": blocked}


def measure_eager(job: Job, quick: bool) -> tuple[list[str], list[Bar], dict[str, Any]]:
    """Repeats calls, and measures their time and how often `fun` is traced.

    The results are compared with those of JAX, too.
    """
    programs, traces, compared = {}, {}, []
    for name, way in eager_ways(job).items():
        is_jax = name in ("jax.hessian", "jax.jacfwd")
        if quick and not is_jax and name != OURS:
            continue
        if is_jax and not harness.judges_times():
            way = jax.jit(way)
        run = lambda way=way: jax.block_until_ready(way(*job.args))
        result = run()
        if is_jax or name == OURS:
            compared.append(result)

        def program(name: str = name, run: Callable = run) -> float:
            before = len(job.calls)
            seconds = timed(run)
            traces[name] = len(job.calls) - before
            return seconds

        programs[name] = program
    error = relative_error(*compared)
    del compared, result
    found, seconds = ratios(programs, 2 if quick else 3 if job.is_network else 15)
    lines, title = [], job.title
    for way in programs:
        if way != OURS:
            lines.append(f"| {title} | {way} | {found[way]:.2f} | {traces[way]} |")
            title = ""
    best = min(ratio for way, ratio in found.items() if way != OURS)
    name = f"{job.name}, called again"
    bars = [
        Bar(f"{name}: time, of the best peer's", 1 / best, job.best_time, is_time=True),
        Bar(f"{name}: traces", traces[OURS], 0),
        Bar(f"{job.name}: relative error in float32", error, 1e-5),
    ]
    return lines, bars, {"seconds": seconds, "ratios": found, "traces": traces}


def relative_error(found: Any, expected: Any) -> float:
    off = jax.tree.map(jnp.subtract, found, expected)
    return float(optax.tree.norm(off) / optax.tree.norm(expected))


def exactness_bars(quick: bool) -> list[Bar]:
    """Small jobs in blocks, compared with JAX in float64."""
    small = [*mlp_jobs(True), chain_job(True), spectrum_job(True)]
    if not quick:
        # This takes long to compile.
        small.append(cnn_job(True))
    bars = []
    with jax.enable_x64(True):
        cast = lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x
        for job in small:
            args = jax.tree.map(cast, job.args)
            is_jacobian = job.name == "spectrum"
            ways = jacobians if is_jacobian else hessians
            derivative = jax.jacfwd if is_jacobian else jax.hessian

            def true(*args, job=job, derivative=derivative):
                fun, vector = job.flat(*args)
                return derivative(fun)(vector)

            expected = jax.jit(true)(*args)
            found = {job.name: (ways(job, job.size)[OURS](*args), expected)}
            if job.name == "chain":
                trace = laplacians(job)[OURS](*args)
                found["chain, sum of the diagonal"] = (trace, jnp.trace(expected))
            for name, pair in found.items():
                error = relative_error(*pair)
                bars.append(Bar(f"{name}: relative error in float64", error, 1e-10))
    return bars


def flat_bars() -> list[Bar]:
    """Temporaries do not grow with the number of blocks of a Jacobian."""
    job = spectrum_job(False)

    def taken(size: int) -> int:
        way = jacobians(job, size)[OURS]
        return temporaries(jax.jit(way).lower(*job.args))

    most = taken(job.size)
    return [
        Bar(
            f"{job.name}: temporaries by {size}, of those by {job.size}",
            taken(size) / most,
            SLACK,
        )
        for size in (5, 1)
    ]


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the tables for the docs, and the bars."""
    bars = [*exactness_bars(quick), *flat_bars()]
    measured: list[tuple[Case, list[Row]]] = []
    lines = [
        "| job, called again | way | time ÷ eqxbatch's | traces |",
        "|---|---|---:|---:|",
    ]
    eager: dict[str, Any] = {}
    again: dict[str, tuple[Work, float]] = {}
    for job in jobs(quick):
        rounds = 2 if quick else 5 if job.is_network else 15
        for case in cases(job):
            rows = measure(case, rounds)
            measured.append((case, rows))
            bars += bars_of(case, rows)
        own, more, eager[job.title] = measure_eager(job, quick)
        again[job.title] = work_of(job), eager[job.title]["seconds"]
        lines += own
        bars += more
        jax.clear_caches()
    rates = harness.rates()
    more = "\n".join(Shares.of(again, rates).table(lines))
    figures, text = results(measured, bars, more, machine_rates=rates)
    return {**figures, "called_again": eager}, text, bars
