"""Large jobs on one GPU: kernels, a solve, a Hessian, clipping, Kronecker factors.

`python -m benchmarks --suite records --device gpu` measures all of them, each of which
is to take less than two minutes; `--jobs hessian` measures one row again, and keeps the
others. `--quick` has small jobs for a CPU.

All ways of a job multiply in the same precision, that of its `Work`.
"""

import dataclasses
import functools
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from . import harness, kfac
from .harness import Bar, OURS
from .limit import Share, Shares, Work
from .programs import HERE
from .record_rows import Record, records


NAME = "records"
# In all rounds of a job together, which are at most this many.
SECONDS, ROUNDS = 40.0, 7


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of a record, by way; ratios are of the time of eqxbatch."""

    seconds: dict[str, float]
    ratios: dict[str, float]
    temporaries: dict[str, int]
    missing: dict[str, str]
    bars: list[Bar]

    @classmethod
    def read(cls, figures: dict[str, Any]) -> "Measured":
        """What `dataclasses.asdict` made of one."""
        return cls(**{**figures, "bars": [Bar(**bar) for bar in figures["bars"]]})


def compile_ways(record: Record) -> tuple[dict[str, Callable], dict[str, int]]:
    """The ways without arguments, compiled, and the temporaries of programs."""
    run = lambda way: functools.partial(way, *record.args)
    programs = {name: run(way) for name, way in record.ways.items()}
    if not record.is_program:
        first = record.first or programs[OURS]
        jax.block_until_ready(first())
        return programs, {}
    compiled = {
        name: jax.jit(way).lower(*record.args).compile()
        for name, way in record.ways.items()
    }
    memory = {
        name: program.memory_analysis().temp_size_in_bytes
        for name, program in compiled.items()
    }
    programs = {name: run(program) for name, program in compiled.items()}
    # The first run of a program loads it.
    for program in programs.values():
        jax.block_until_ready(program())
    return programs, memory


def run_in_turn(
    programs: dict[str, Callable],
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The seconds of each run, in rounds of all ways, and the last results."""
    times: dict[str, list[float]] = {way: [] for way in programs}
    results: dict[str, Any] = {}
    begin = time.perf_counter()
    for _ in range(harness.rounds_of(ROUNDS)):
        for way, program in programs.items():
            # There may be no room for a result beside the one of the same way before.
            results.pop(way, None)
            start = time.perf_counter()
            results[way] = jax.block_until_ready(program())
            times[way].append(time.perf_counter() - start)
        if time.perf_counter() - begin > SECONDS:
            break
    return times, results


def measure(record: Record, quick: bool) -> tuple[Measured, Work]:
    """The figures of a record, and the work that was done."""
    with jax.default_matmul_precision(record.work.precision):
        programs, memory = compile_ways(record)
        times, results = run_in_turn(programs)
        error = None if record.error is None else record.error(results)
    # The machine is about equally busy within a round.
    ratios = {
        way: statistics.median(a / b for a, b in zip(own, times[OURS], strict=True))
        for way, own in times.items()
    }
    bars = []
    if error is not None:
        bars.append(Bar(f"{record.title}: error", error, record.most))
    # The time of a small job is that of calling it.
    for way, most in {} if quick else record.limits.items():
        name = f"{record.title}: time, of {way}'s"
        bars.append(Bar(name, 1 / ratios[way], most, is_time=True))
    seconds = {way: statistics.median(own) for way, own in times.items()}
    repeats = record.repeats(results[OURS])
    flops, moved = repeats * record.work.flops, repeats * record.work.bytes
    done = dataclasses.replace(record.work, flops=flops, bytes=moved)
    return Measured(seconds, ratios, memory, record.missing, bars), done


def table(found: dict[str, Measured], shares: Shares) -> str:
    """One line for each way of a job, that of eqxbatch first."""
    lines = [
        "| job | way | seconds | TFLOP | temporaries, GB | time ÷ eqxbatch's |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for title, measured in found.items():
        flops = getattr(shares.by_title[title].work, "flops", np.nan)
        cells = [title, OURS, f"{measured.seconds[OURS]:.3g}", f"{flops / 1e12:.3g}"]
        for way, ratio in measured.ratios.items():
            if way != OURS:
                cells = ["", way, f"{measured.seconds[way]:.3g}", ""]
            memory = measured.temporaries.get(way)
            shown = "-" if memory is None else f"{memory / 1e9:.3g}"
            lines.append(f"| {' | '.join([*cells, shown, f'{ratio:.2f}'])} |")
        for way, why in measured.missing.items():
            lines.append(f"|  | {way} | {why} | | | |")
    exact = dict.fromkeys(
        title.partition(":")[0]
        for title, share in shares.by_title.items()
        if isinstance(share.work, Work) and share.work.precision == "highest"
    )
    rows = ", ".join(f"`{name}`" for name in exact)
    notes = (
        "All examples are drawn at random on the device. All ways of a job multiply in "
        f"the same precision: with all digits of float32 in {rows or 'no row'}, and "
        "with JAX's default elsewhere."
    )
    return "\n".join([*shares.table(lines), "", notes, "", shares.notes])


def find(name: str | None, quick: bool) -> str | None:
    """Where records run: on an accelerator; small ones anywhere. None if they cannot.

    - `name`: that of the device which is asked for.
    """
    backend = jax.default_backend()
    is_here = name in (None, HERE) and (quick or backend != "cpu")
    return backend if is_here else None


def how_to_use() -> str:
    return "\n".join(
        [
            "Records need a GPU or TPU that JAX finds; on a CPU, they take hours:",
            "",
            f"python -m benchmarks --suite {NAME} --device {HERE}",
            "",
            "Small ones run anywhere:",
            "",
            f"python -m benchmarks --suite {NAME} --quick",
        ]
    )


def describe() -> str:
    names = ("jax", "equinox", "optax", *(["kfac-jax"] if kfac.has_peer() else []))
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    device = jax.devices()[0].device_kind
    return f"Measured on one {device}, with {', '.join(versions)}."


def run(
    quick: bool, only: str, before: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, list[Bar]]]:
    """After each job: the figures as JSON, the table for the docs, and the bars.

    `before` are the figures of an earlier run: the jobs whose titles do not start with
    `only` are taken from there, if device and versions are the same.
    """
    earlier = before if before.get("device") == describe() else {"jobs": {}}
    found = {title: Measured.read(x) for title, x in earlier["jobs"].items()}
    by_title = {title: Share.read(earlier["limit"]["jobs"][title]) for title in found}
    shares = Shares(by_title, harness.rates())
    for record in records(quick, only):
        measured, done = measure(record, quick)
        found[record.title] = measured
        seconds = measured.seconds[OURS]
        shares.by_title[record.title] = Share.by(shares.rates, done, seconds)
        print(f"{record.title}: {measured.seconds}", flush=True)
        jax.clear_caches()
        yield results(found, shares)


def results(
    found: dict[str, Measured], shares: Shares
) -> tuple[dict[str, Any], str, list[Bar]]:
    figures = {
        "device": describe(),
        "jobs": {title: dataclasses.asdict(x) for title, x in found.items()},
        "limit": shares.figures,
    }
    bars = [bar for x in found.values() for bar in x.bars]
    return figures, f"{table(found, shares)}\n\n{describe()}", bars
