"""`MonteCarloKernel`, compared with `neural_tangents.monte_carlo_kernel_fn`.

The latter runs in its own process, as in `kernels.py`. Both are called as users call
them, a second time, so that everything is compiled.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from sklearn.datasets import load_digits

from eqxbatch import EmpiricalKernel, MonteCarloKernel, ntk_parameterise
from . import harness, work
from .harness import Bar, OURS
from .kernels import CNN, JACOBIANS, Peer, PRODUCTS, ratios, STRUCTURED, timed
from .limit import num_bytes, Shares, Work
from .neural_tangents.environment import VERSIONS


NAME = "monte_carlo"
KEY = jr.key(0)
LOOP = "a loop in Python over `EmpiricalKernel`"
DRAWS = "drawing the models alone"
KINDS = ("nngp", "ntk")
# The standard deviations of weights and biases, for both libraries.
STD = {"weight_std": 2**0.5, "bias_std": 0.1}


@dataclasses.dataclass(frozen=True)
class Job:
    """The mean kernels of some examples with themselves.

    - `spec`: the model, for both processes.
    - `num`: the number of samples.
    - `per_batch`: the number of samples at a time, in a row of its own.
    - `without`: the ways of the peer that take too long, and how long they take.
    """

    name: str
    title: str
    spec: dict[str, Any]
    num: int
    per_batch: int
    without: dict[str, str] = dataclasses.field(default_factory=dict)


def jobs(quick: bool) -> list[Job]:
    if quick:
        spec = {"model": "dense", "sizes": (64, 32, 32, 10), "n": 16}
        return [Job("FCN", "FCN 64-32x2-10, 16 digits, 12 samples", spec, 12, 4)]
    digits = {"model": "dense", "sizes": (64, 512, 512, 512, 10), "n": 64}
    images = {"model": "cnn_gap", "size": 16, "outputs": 10, "n": 16}
    slow = dict.fromkeys((JACOBIANS, PRODUCTS), "minutes")
    return [
        Job("FCN", "FCN 64-512x3-10, 64 digits, 100 samples", digits, 100, 4, slow),
        Job("CNN", "CNN with GAP, 16 images, 20 samples", images, 20, 4),
    ]


def examples(spec: dict[str, Any]) -> jax.Array:
    n = spec["n"]
    if spec["model"] == "dense":
        return jnp.asarray(load_digits().data[:n] / 16, jnp.float32)
    return jr.normal(KEY, (n, 3, spec["size"], spec["size"]))


def make_init(spec: dict[str, Any], calls: list) -> Callable[[Any], Any]:
    """A function that draws a model, and appends to `calls` when Python runs it."""

    def init(key):
        calls.append(None)
        if spec["model"] == "dense":
            first, *hidden, last = spec["sizes"]
            model = eqx.nn.MLP(first, last, hidden[0], len(hidden), key=key)
        else:
            model = CNN(spec["outputs"], spec["size"], False, key)
        return ntk_parameterise(model, **STD, key=key)

    return init


def make_kernel(
    init: Callable, num: int | Iterable[int], per_batch: int = 1
) -> MonteCarloKernel:
    return MonteCarloKernel(
        init, key=KEY, num_samples=num, get=KINDS, samples_per_batch=per_batch
    )


def work_of(job: Job, x: jax.Array) -> Work:
    """The kernels of outputs and of gradients, of all samples, once drawn."""
    model = eqx.filter_eval_shape(make_init(job.spec, []), KEY)
    products = work.products_of(lambda model, x: model(x), model, x)
    num, outputs = len(x), eqx.filter_eval_shape(model, x[0]).size
    one = work.kernel(products, num, outputs=outputs) + 2 * num**2 * outputs
    return Work(job.num * one, num_bytes(x) + len(KINDS) * 4 * num**2)


def batched_name(job: Job) -> str:
    return f"{OURS}, {job.per_batch} samples at a time"


def ours(
    job: Job, init: Callable, x: jax.Array, calls: list
) -> tuple[dict[str, Callable[[], float]], list[Bar]]:
    """The ways of eqxbatch, and how often first and later calls trace `init`."""
    programs, bars = {}, []
    for name, per_batch in ((OURS, 1), (batched_name(job), job.per_batch)):
        kernel = make_kernel(init, job.num, per_batch)
        # Another number of samples, in whole batches.
        other = make_kernel(init, job.num // 2 // per_batch * per_batch, per_batch)
        run = lambda kernel=kernel: jax.block_until_ready(kernel(x))
        for called, again, limit in ((kernel, "", 2), (other, ", another number", 0)):
            before = len(calls)
            jax.block_until_ready(called(x))
            title = f"{job.name}, {per_batch} at a time: traces of `init`{again}"
            bars.append(Bar(title, len(calls) - before, limit))
        programs[name] = lambda run=run: timed(run)
    return programs, bars


def draws(job: Job, init: Callable) -> Callable[[], float]:
    """Draws the models of all samples, without kernels."""
    arrays = lambda key: eqx.filter(init(key), eqx.is_array)
    draw = jax.jit(lambda key: jax.tree.map(jnp.sum, arrays(key)))

    def run():
        for i in range(job.num):
            jax.block_until_ready(draw(jr.fold_in(KEY, i)))

    run()
    return lambda: timed(run)


def traces_of(running: Iterable[tuple]) -> list[list[float]]:
    """The mean diagonal of each kernel, for each number of samples."""
    return [
        [float(jnp.mean(jnp.diagonal(kernel))) for kernel in kernels]
        for kernels in running
    ]


def difference(found: list[list[float]], expected: list[list[float]]) -> np.ndarray:
    """The difference of the last running means of each kind, in standard errors."""
    means, variances = [], []
    for running in (found, expected):
        values = np.asarray(running, np.float64)
        num = len(values)
        totals = values * np.arange(1, num + 1)[:, None]
        samples = np.diff(totals, axis=0, prepend=0)
        means.append(values[-1])
        variances.append(np.var(samples, axis=0, ddof=1) / num)
    return np.abs(means[0] - means[1]) / np.sqrt(sum(variances))


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    return run_quickly() if quick else run_beside_peer()


def run_quickly() -> tuple[dict[str, Any], str, list[Bar]]:
    """Compared with a Python loop over `EmpiricalKernel`, which needs no other JAX."""
    (job,) = jobs(True)
    x, calls = examples(job.spec), []
    init = make_init(job.spec, calls)
    drawn = eqx.filter_jit(init)

    def loop():
        total: Any = None
        for i in range(job.num):
            found = EmpiricalKernel(drawn(jr.fold_in(KEY, i)))(x, get=KINDS)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return jax.block_until_ready(jax.tree.map(lambda x: x / job.num, total))

    expected = loop()
    programs, bars = ours(job, init, x, calls)
    programs[LOOP] = lambda: timed(loop)
    found, seconds = ratios(programs, 5)
    kernels = make_kernel(init, job.num)(x)
    for kind, own, other in zip(KINDS, kernels, expected, strict=True):
        error = float(jnp.linalg.norm(own - other) / jnp.linalg.norm(other))
        bars.append(Bar(f"{job.name}: relative error of {kind}", error, 1e-5))
    name = f"{job.name}: time, of a loop"
    bars.append(Bar(name, 1 / found[LOOP], 1.0, is_time=True))
    shares = Shares.of({job.title: (work_of(job, x), seconds)}, harness.rates())
    lines = [*shares.table([*head(), *rows(job, found)]), "", shares.notes]
    figures = {"machine": harness.machine(), "seconds": seconds, "ratios": found}
    return {**figures, "limit": shares.figures}, "\n".join(lines), bars


def head() -> list[str]:
    return ["| job | way | time ÷ eqxbatch's |", "|---|---|---:|"]


def rows(job: Job, found: dict[str, float]) -> list[str]:
    cells = {way: f"{ratio:.2f}" for way, ratio in found.items() if way != OURS}
    cells |= job.without
    titles = [job.title, *[""] * (len(cells) - 1)]
    return [
        f"| {title} | {way} | {cell} |"
        for title, (way, cell) in zip(titles, cells.items(), strict=True)
    ]


def run_beside_peer() -> tuple[dict[str, Any], str, list[Bar]]:
    lines, figures, bars, shares = head(), {}, [], {}
    peer = Peer()
    for job in jobs(False):
        x, calls = examples(job.spec), []
        init = make_init(job.spec, calls)
        programs, more = ours(job, init, x, calls)
        # neural_tangents has channels last.
        theirs = jnp.moveaxis(x, 1, -1)
        message = {**job.spec, **STD, "num": job.num, "without": list(job.without)}
        peers = peer.ask(monte_carlo={**message, "x": np.asarray(theirs).tolist()})
        programs[DRAWS] = draws(job, init)
        programs |= {name: lambda n=name: peer.ask(run=n) for name in peers}
        found, seconds = ratios(programs, 5)
        print(f"{job.title}: {found}", flush=True)
        fastest = min(found[name] for name in peers)
        name = f"{job.name}: time, of the best"
        bars += [Bar(name, 1 / fastest, 1 / 3, is_time=True), *more]
        # The keys differ, so the kernels only agree within standard errors.
        own = traces_of(make_kernel(init, range(1, job.num + 1))(x))
        off = difference(own, peer.ask(traces=STRUCTURED))
        for kind, value in zip(KINDS, off, strict=True):
            name = f"{job.name}: difference of mean traces of {kind}, standard errors"
            bars.append(Bar(name, float(value), 5.0))
        figures[job.title] = {
            "seconds": seconds,
            "ratios": found,
            "difference": dict(zip(KINDS, off.tolist(), strict=True)),
        }
        run = lambda: make_kernel(init, job.num)(x)
        shares[job.title] = harness.explained(work_of(job, x), run), seconds
        lines += rows(job, found)
        jax.clear_caches()
    peer.close()
    where, close = harness.machine(), Shares.of(shares, harness.rates())
    notes = (
        f"\n{close.notes}\n\n"
        f"{harness.describe(where)} neural-tangents 0.6.5 ran in another process "
        f"with {VERSIONS['timing'][0]}, in turn with ours."
    )
    figures = {"machine": where, "jobs": figures, "limit": close.figures}
    figures["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    return figures, "\n".join([*close.table(lines), notes]), bars
