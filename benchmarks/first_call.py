"""First calls: the time to trace and compile, compared with a way without eqxbatch.

Caches are cleared and functions are created before each first call. Both ways take
turns in one process; a ratio is the median over rounds.
"""

import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import matplotlib.pyplot as plt

from eqxbatch import (
    EmpiricalNTK,
    filter_batch_kernel,
    filter_hessian,
    filter_micro_grad,
    filter_micro_vmap,
)
from . import harness
from .first_call_jobs import (
    Call,
    hessian_of_jax,
    Job,
    jobs,
    our_hessian,
    squared_error,
)
from .harness import Bar
from .limit import NoLimit


NAME = "first_call"
NO_LIMIT = NoLimit("tracing and compiling are no work of the program")
ROOT = pathlib.Path(__file__).parent.parent
KEY = jr.key(0)
# The seconds that an import may take in addition to `import equinox`.
IMPORT = 0.4


def first_call(make: Callable[[], Call], compiles: bool = True) -> tuple[float, ...]:
    """Seconds to trace, to trace and compile, and to run afterwards."""
    fun, args = make()
    jax.clear_caches()
    start = time.perf_counter()
    lowered = eqx.filter_jit(fun).lower(*args)
    traced = time.perf_counter() - start
    if not compiles:
        return traced, traced, 0.0
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
    return traced, seconds, time.perf_counter() - start


def measure(job: Job, rounds: int) -> dict[str, float]:
    ours, theirs = [], []
    for i in range(rounds):
        for make, times in ((job.ours, ours), (job.theirs, theirs))[:: (-1) ** i]:
            times.append(first_call(make, job.compiles))
    middle = lambda times: [*map(statistics.median, zip(*times, strict=True))]
    (traced, seconds, call), other = map(middle, (ours, theirs))
    ratios = (mine[1] / other[1] for mine, other in zip(ours, theirs, strict=True))
    return {
        "seconds": seconds,
        "other_seconds": other[1],
        "ratio": statistics.median(ratios),
        "trace_seconds": traced,
        "other_trace_seconds": other[0],
        "call_seconds": call,
        "other_call_seconds": other[2],
    }


# Imports, and second calls.


def import_seconds(rounds: int) -> dict[str, float]:
    """The seconds of an import in a fresh process, with cached byte code."""
    times: dict[str, list[float]] = {"equinox": [], "eqxbatch": []}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(rounds + 1):
            for name, found in times.items():
                code = (
                    "import time; start = time.perf_counter(); "
                    f"import {name}; print(time.perf_counter() - start)"
                )
                done = subprocess.run(
                    [sys.executable, "-c", code],
                    env=environment,
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                found.append(float(done.stdout))
    # The first import wrote the byte code.
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def second_calls() -> dict[str, tuple[Callable, tuple]]:
    """Functions with almost nothing to compute."""
    model = eqx.nn.MLP(2, "scalar", 2, 1, key=KEY)
    x, y = jnp.ones((4, 2)), jnp.ones(4)
    product = lambda x, y: x @ y.T
    return {
        "filter_batch_kernel": (filter_batch_kernel(product, block_size=2), (x,)),
        "EmpiricalNTK": (lambda ntk, x: ntk(x), (EmpiricalNTK(model), x)),
        "EmpiricalNTK(model)(x)": (
            lambda model, x: EmpiricalNTK(model)(x),
            (model, x),
        ),
        "filter_micro_vmap": (
            filter_micro_vmap(
                lambda model, x: model(x), in_axes=(None, 0), microbatch_size=2
            ),
            (model, x),
        ),
        "filter_micro_grad": (
            filter_micro_grad(squared_error, microbatch_size=2),
            (model, x, y),
        ),
        "filter_hessian": (filter_hessian(squared_error, in_axes=0), (model, x, y)),
    }


def overhead(fun: Callable, args: tuple, rounds: int) -> dict[str, float]:
    """The seconds of a call outside of `jax.jit`, and inside of `eqx.filter_jit`."""
    compiled = eqx.filter_jit(lambda *args: fun(*args))
    times: dict[Callable, list[float]] = {fun: [], compiled: []}
    for i in range(rounds):
        for run, found in times.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            if i > rounds // 10:
                found.append(time.perf_counter() - start)
    ours, theirs = map(statistics.median, times.values())
    return {"seconds": ours, "other_seconds": theirs, "ratio": ours / theirs}


def plot(found: dict[int, dict[str, float]], path: pathlib.Path) -> None:
    matplotlib.use("agg")
    # Equal figures give an identical file.
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for name, key, marker in (
        ("eqxbatch, by sites", "seconds", "o"),
        ("jax.hessian", "other_seconds", "^"),
    ):
        seconds = [figures[key] for figures in found.values()]
        axis.loglog(list(found), seconds, marker=marker, label=name)
    axis.set_xticks(list(found), labels=map(str, found))
    axis.minorticks_off()
    axis.set_xlabel("depth")
    axis.set_ylabel("seconds to trace and compile")
    axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def trace(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """Traces all calls, where no times are judged: this suite has no other bars."""
    titles = []
    for job in jobs():
        if job.is_quick or not quick:
            for make in (job.ours, job.theirs):
                fun, args = make()
                eqx.filter_jit(fun).lower(*args)
            titles.append(f"- {job.title}")
    return {}, "\n".join(["Traced, not measured:", "", *titles]), []


def ahead_from(found: dict[str, float]) -> str:
    """The number of the call after which ours took less time in all; a dash for none.

    The seconds that the first call takes more are over those that each later one saves.
    """
    more = found["seconds"] - found["other_seconds"]
    saved = found["other_call_seconds"] - found["call_seconds"]
    # A first call that takes less is not ahead for long then.
    if saved <= 0:
        return "-"
    return f"{1 + max(0, math.ceil(more / saved)):,}"


def table(figures: dict[str, dict[str, float]]) -> str:
    """The first calls of all jobs that are among the figures."""
    lines = [
        "| first call | alternative | seconds | tracing | a later call, in ms "
        "| ahead from call | ratio | target |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for job in jobs():
        if job.name not in figures:
            continue
        found = figures[job.name]
        cells = [
            f"{found[key]:.1f} : {found[f'other_{key}']:.1f}"
            for key in ("seconds", "trace_seconds")
        ]
        calls = [1e3 * found["call_seconds"], 1e3 * found["other_call_seconds"]]
        # What is only traced has no later calls.
        later = (" : ".join(f"{x:.3g}" for x in calls), ahead_from(found))
        cells += later if job.compiles else ("", "")
        cells += f"{found['ratio']:.2f}", f"{job.limit:.3g}"
        lines.append(f"| {job.title} | {job.way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the tables for the docs, and the bars."""
    if not harness.judges_times():
        return trace(quick)
    rounds = 1 if quick else 3
    bars, depths, figures = [], {}, {}
    # These are not measured, because they include what JAX does once in a process.
    for make in (our_hessian, hessian_of_jax):
        first_call(lambda make=make: make(1))
    for job in jobs():
        if quick and not job.is_quick:
            continue
        found = figures[job.name] = measure(job, rounds)
        print(f"{job.title}: {found}", flush=True)
        if job.depth is not None:
            depths[job.depth] = found
        bars.append(Bar(job.name, found["ratio"], job.limit, is_time=True))
    first_calls = table(figures)
    jax.clear_caches()
    imports = import_seconds(2 if quick else 7)
    more = imports["eqxbatch"] - imports["equinox"]
    bars.append(Bar("import, seconds more than equinox", more, IMPORT, is_time=True))
    again = [
        "| second call | microseconds | of `eqx.filter_jit`'s |",
        "|---|---:|---:|",
    ]
    for name, call in second_calls().items():
        found = figures[f"{name}, again"] = overhead(*call, 200 if quick else 2_000)
        seconds, ratio = found["seconds"], found["ratio"]
        again.append(f"| `{name}` | {1e6 * seconds:.0f} | {ratio:.2f} |")
        title = f"{name}: second call, of eqx.filter_jit's"
        bars.append(Bar(title, ratio, 1.3, is_time=True))
    where = harness.machine()
    note = (
        f"`import eqxbatch` takes {more:.2f} s more than `import equinox`, which takes "
        f"{imports['equinox']:.2f} s."
    )
    folder = ROOT / "build" / "benchmarks" if quick else ROOT / "docs"
    plot(depths, folder / f"{NAME}.svg")
    results = {
        "machine": where,
        "figures": figures,
        "imports": imports,
        "bars": [{**vars(bar), "holds": bar.holds} for bar in bars],
    }
    tables = (first_calls, note, "\n".join(again), harness.describe(where))
    return results, "\n\n".join(tables), bars
