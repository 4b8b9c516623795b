"""Measurements: programs are compiled once and take turns; ratios are medians."""

import dataclasses
import json
import math
import os
import pathlib
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax

from eqxbatch._base.compiler_options import memory_options
from . import limit, profiled


OURS = "eqxbatch"
PEERS = ("adv-jax-math", "jax-privacy", "zodiax", "folx")
_judges_times = True


def judge_no_times() -> None:
    """From now on, what only serves to compare times is traced and does not run."""
    global _judges_times
    _judges_times = False


def judges_times() -> bool:
    return _judges_times


def rounds_of(rounds: int) -> int:
    return rounds if _judges_times else 1


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, and several ways to do it.

    - `ways`: functions of `args`, by name; `eqxbatch` is one of them.
    - `work`: what has to be done at least, or why there is no limit.
    - `unbounded`: the ways whose memory is not meant to be bounded. They are shown, but
        bars do not compare with them.
    - `missing`: the peers that cannot do the job, and why.
    - `best_memory`, `best_time`: upper limits for temporaries and time, divided by
        those of the best peer; None for no bar.
    - `limits`: upper limits for the time, divided by that of single ways.
    """

    name: str
    title: str
    ways: dict[str, Callable]
    args: tuple
    work: limit.Work | limit.NoLimit
    unbounded: tuple[str, ...] = ("jax.vmap",)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    best_memory: float | None = 1.0
    best_time: float | None = 1.03
    limits: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bar:
    """A target: `value <= limit`."""

    name: str
    value: float
    limit: float
    is_time: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one way to do a job.

    - `spent`: for eqxbatch, the shares of its time by the kind of operation.
    """

    way: str
    seconds: float
    temporaries: int
    time_ratio: float
    memory_ratio: float
    is_unbounded: bool
    spent: dict[str, float] = dataclasses.field(default_factory=dict)


_rates: list[limit.Rates] = []


def rates() -> limit.Rates:
    """The highest rates of this machine so far in this run, if times are judged.

    They are measured again after each job, because a shared machine is not always as
    fast.
    """
    if not _judges_times:
        return limit.measured(0)
    _rates.append(limit.measured(3))
    return limit.Rates(
        {name: max(x.flops[name] for x in _rates) for name in limit.PRECISIONS},
        max(x.bytes for x in _rates),
    )


def compile_ways(case: Case) -> dict[str, Any]:
    """All ways of a case, compiled for its arguments.

    Where times are not judged, these are eqxbatch, and the peers whose memory a bar
    compares; all other ways are only traced.
    """
    compiled = {}
    for name, way in case.ways.items():
        lowered = jax.jit(way).lower(*case.args)
        has_bar = case.best_memory is not None and name not in case.unbounded
        if _judges_times or name == OURS or has_bar:
            compiled[name] = lowered.compile()
    return compiled


# After so many rounds, and so many seconds, a case has enough of them.
_FEWEST, _SECONDS = 5, 15.0


def measure(
    case: Case, rounds: int, compiled: dict[str, Any] | None = None
) -> list[Row]:
    """Compiles all ways of a case, unless they are given, and runs them in turn.

    A ratio of times is the median of the ratios of all rounds, because the machine is
    about equally busy for both within a round. Rounds that take long are fewer. If this
    misses a bar, as many rounds are added, at most twice: some peers compile to the
    same program as eqxbatch, and such ratios vary by a few percent. A way that takes
    more than 20 times as long as eqxbatch runs in the first two rounds only. Ways that
    need far more memory have rounds of their own. Where times are not judged, only
    eqxbatch runs, once.
    """
    compiled = compiled or compile_ways(case)
    if not _judges_times:
        jax.block_until_ready(compiled[OURS](*case.args))
        memory = _temporaries(case, compiled)
        return summarise(case, {name: [math.nan] for name in compiled}, memory)
    for program in compiled.values():
        jax.block_until_ready(program(*case.args))
    memory = _temporaries(case, compiled)
    groups = [Turns(case, compiled, names) for names in _groups(memory)]
    rows: list[Row] = []
    for _ in range(3):
        for turns in groups:
            turns.take(rounds)
        rows = [
            row
            for turns, first in zip(groups, (True, False), strict=False)
            for row in summarise(case, turns.times, memory)
            if first or row.way != OURS
        ]
        if all(bar.holds for bar in bars_of(case, rows) if bar.is_time):
            break
    rates()  # They are measured after each job.
    ours = compiled[OURS]
    found = profiled.profile(lambda: ours(*case.args))
    return [
        dataclasses.replace(row, spent=found if row.way == OURS else {}) for row in rows
    ]


# A system takes freed memory of this size back, and whatever runs next pays for pages.
_LARGE = 2**25


def _groups(memory: dict[str, int]) -> list[list[str]]:
    """The ways that take turns, with eqxbatch in each group.

    Ways with far more memory than eqxbatch have turns of their own, because what runs
    after them is slower: a call of 15 ms took 22.
    """
    bound = max(8 * memory[OURS], _LARGE)
    large = [name for name in memory if memory[name] > bound]
    others = [name for name in memory if name not in large]
    return [others, [OURS, *large]] if large else [others]


class Turns:
    """Programs that take turns, and the seconds of each."""

    def __init__(self, case: Case, compiled: dict[str, Any], names: list[str]):
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self._programs = {name: compiled[name] for name in names}
        self._args = case.args
        self._random = random.Random(0)

    def take(self, rounds: int) -> None:
        begin = time.perf_counter()
        order = list(self.times)
        for done in range(rounds):
            if done >= _FEWEST and time.perf_counter() - begin > _SECONDS:
                break
            # Each one finds the caches as another one left them.
            self._random.shuffle(order)
            for name in order:
                found = self.times[name]
                if len(found) < 2 or not is_slow(found, self.times[OURS]):
                    start = time.perf_counter()
                    jax.block_until_ready(self._programs[name](*self._args))
                    found.append(time.perf_counter() - start)


def temporaries(lowered: Any) -> int:
    """The bytes of temporary memory of a lowered program.

    It is compiled for this alone, with options under which XLA reports all of it.
    """
    options = memory_options(jax.default_backend())
    compiled = lowered.compile(compiler_options=options or None)
    return compiled.memory_analysis().temp_size_in_bytes


def _temporaries(case: Case, compiled: dict[str, Any]) -> dict[str, int]:
    return {
        name: temporaries(jax.jit(case.ways[name]).lower(*case.args))
        for name in compiled
    }


def is_slow(theirs: list[float], ours: list[float]) -> bool:
    return min(theirs) > 20 * min(ours)


def summarise(
    case: Case, times: dict[str, list[float]], memory: dict[str, int]
) -> list[Row]:
    return [
        Row(
            way=name,
            seconds=statistics.median(times[name]),
            temporaries=memory[name],
            time_ratio=statistics.median(
                theirs / ours
                for theirs, ours in zip(times[name], times[OURS], strict=False)
            ),
            memory_ratio=memory[name] / max(memory[OURS], 1),
            is_unbounded=name in case.unbounded,
        )
        for name in times
    ]


def bars_of(case: Case, rows: list[Row]) -> list[Bar]:
    """The bars of a case."""
    peers = [row for row in rows if row.way != OURS and not row.is_unbounded]
    bars = []
    if case.best_memory is not None:
        part = 1 / min(row.memory_ratio for row in peers)
        name = f"{case.name}: temporaries, of the best peer's"
        bars.append(Bar(name, part, case.best_memory))
    if not _judges_times:
        return bars
    if case.best_time is not None:
        part = 1 / min(row.time_ratio for row in peers)
        name = f"{case.name}: time, of the best peer's"
        bars.append(Bar(name, part, case.best_time, is_time=True))
    for row in rows:
        if row.way in case.limits:
            name = f"{case.name}: time, of {row.way}'s"
            limit = case.limits[row.way]
            bars.append(Bar(name, 1 / row.time_ratio, limit, is_time=True))
    return bars


def table(cases: list[tuple[Case, list[Row]]]) -> list[str]:
    """The lines of a table for the docs: all figures are ratios within one run."""
    lines = [
        "| job | way | time ÷ eqxbatch's | temporaries ÷ eqxbatch's |",
        "|---|---|---:|---:|",
    ]
    for case, rows in cases:
        title = case.title
        for row in rows:
            if row.way == OURS:
                continue
            way = f"{row.way} (unbounded)" if row.is_unbounded else row.way
            lines.append(
                f"| {title} | {way} | {row.time_ratio:.2f} | {row.memory_ratio:.2f} |"
            )
            title = ""
        for way, why in case.missing.items():
            lines.append(f"| {title} | {way} | {why} | |")
            title = ""
    return lines


def machine() -> dict[str, Any]:
    """The machine and the versions of the measurements."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    packages = ("jax", "jaxlib", "equinox", "optax", *PEERS)
    return {
        "device": jax.devices()[0].device_kind,
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def describe(machine: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("jax", "equinox", "optax", *PEERS)
    )
    return (
        f"Measured on {machine['cores']} cores of an {machine['processor']} (device: "
        f"{machine['device']}), with Python {machine['python']}, {versions}."
    )


def write(folder: pathlib.Path, name: str, results: dict[str, Any], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    (folder / f"{name}.md").write_text(text + "\n")


def explained(
    work: limit.Work | limit.NoLimit, call: Callable[[], Any]
) -> limit.Work | limit.NoLimit:
    """Work with where the time of a call goes."""
    return _with_spent(work, profiled.profile(call) if _judges_times else {})


def _with_spent(
    work: limit.Work | limit.NoLimit, spent: dict[str, float]
) -> limit.Work | limit.NoLimit:
    if isinstance(work, limit.NoLimit):
        return work
    return dataclasses.replace(work, spent=spent)


def results(
    measured: list[tuple[Case, list[Row]]],
    bars: list[Bar],
    more: str = "",
    *,
    lines: list[str] | None = None,
    machine_rates: limit.Rates | None = None,
) -> tuple[dict[str, Any], str]:
    """The figures as JSON, and the table for the docs, with `more` below it.

    - `lines`: those of the table of a suite that has its own.
    - `machine_rates`: those of the same run, if they were measured already.
    """
    where = machine()
    shares = limit.Shares.of(
        {
            case.title: (_with_spent(case.work, row.spent), row.seconds)
            for case, rows in measured
            for row in rows
            if row.way == OURS
        },
        machine_rates or rates(),
    )
    figures = {
        "machine": where,
        "cases": {
            case.title: [*map(dataclasses.asdict, rows)] for case, rows in measured
        },
        "limit": shares.figures,
        "bars": [{**vars(bar), "holds": bar.holds} for bar in bars],
    }
    shown = "\n".join(shares.table(table(measured) if lines is None else lines))
    parts = (shown, shares.notes, more, describe(where))
    return figures, "\n\n".join(part for part in parts if part)
