"""Runs all benchmarks: `python -m benchmarks`, with `--help` for options."""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from . import (
    accelerators,
    batch_kernel,
    buckets,
    chart,
    costs,
    curvature,
    first_call,
    first_screen,
    grid,
    harness,
    kernels,
    kfac,
    limit,
    metric,
    micro_grad,
    micro_vmap,
    models,
    monte_carlo,
    price,
    processes,
    records,
    sharded,
    solve,
    steps,
    streams,
)


# Each has `NAME` and `run(quick) -> (results, table, bars)`; `NO_LIMIT`, if it has no
# table of jobs.
SUITES = (
    micro_vmap,
    grid,
    price,
    micro_grad,
    models,
    curvature,
    kfac,
    steps,
    kernels,
    metric,
    monte_carlo,
    batch_kernel,
    solve,
    streams,
    buckets,
    processes,
    sharded,
    costs,
    first_call,
    first_screen,
)
# These run if they are named, and write their results after each job.
NAMED = (accelerators, records)

HERE = pathlib.Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small jobs and few rounds, written to build/benchmarks, not to the docs",
    )
    parser.add_argument(
        "--no-time-bars",
        action="store_true",
        help="judge only memory, traces and errors, on a busy machine; what serves to "
        "compare times alone is traced at most",
    )
    parser.add_argument(
        "--suite",
        choices=[suite.NAME for suite in (*SUITES, *NAMED)],
        help="run only this suite; "
        f"{' and '.join(suite.NAME for suite in NAMED)} run only if they are named",
    )
    parser.add_argument(
        "--device",
        choices=accelerators.DEVICES,
        help=f"for which device {accelerators.NAME} compiles; {accelerators.HERE} also "
        "runs its programs; by default, the first one whose plug-in is installed. "
        f"{records.NAME} are always of {accelerators.HERE}; {sharded.NAME} compiles "
        "for eight of them, by default for CPUs",
    )
    parser.add_argument(
        "--jobs",
        default="",
        help=f"of {' and '.join(suite.NAME for suite in NAMED)}, measure only the jobs "
        "again whose titles start with this, such as `micro_grad`",
    )
    options = parser.parse_args()
    if options.no_time_bars:
        harness.judge_no_times()
    root = HERE.parent / "build" / "benchmarks" if options.quick else HERE / "results"
    if options.suite == accelerators.NAME:
        device = accelerators.find(options.device)
        if device is None:
            print(accelerators.how_to_use())
            return 2
        run = lambda before: accelerators.run(
            options.quick, device, options.jobs, before
        )
        name = f"{accelerators.NAME}_{device}"
        return 1 if run_by_jobs(root, name, options.jobs, run) else 0
    if options.suite == records.NAME:
        device = records.find(options.device, options.quick)
        if device is None:
            print(records.how_to_use())
            return 2
        run = lambda before: records.run(options.quick, options.jobs, before)
        name = f"{records.NAME}_{device}"
        return 1 if run_by_jobs(root, name, options.jobs, run) else 0
    if options.suite == sharded.NAME and options.device is not None:
        device = accelerators.find(options.device)
        if device is None or device == accelerators.HERE:
            print(accelerators.how_to_use())
            return 2
        found = sharded.run(options.quick, device)
        return 1 if report(root, f"{sharded.NAME}_{device}", *found) else 0
    missed = 0
    # Results of a GPU stand beside those of a CPU.
    backend = jax.default_backend()
    suffix = "" if backend == "cpu" else f"_{backend}"
    for suite in SUITES:
        if options.suite in (None, suite.NAME):
            found = suite.run(options.quick)
            limit.check(found[1], getattr(suite, "NO_LIMIT", None))
            missed += report(root, suite.NAME + suffix, *found)
    if options.quick and options.suite is None:
        # Tests try all others small, but for those whose peers they lack.
        run = lambda before: records.run(True, "lora", before)
        missed += run_by_jobs(root, f"{records.NAME}_{backend}", "lora", run)
    if not options.quick and not suffix:
        chart.main()
    return 1 if missed else 0


# Given the figures of an earlier run: figures, a table and bars, after each job.
Run = Callable[
    [dict[str, Any]], Iterator[tuple[dict[str, Any], str, list[harness.Bar]]]
]


def run_by_jobs(root: pathlib.Path, name: str, jobs: str, run: Run) -> int:
    """Writes results after each job, and reports the last ones.

    - `jobs`: how the titles of those begin that are measured; others are kept.
    """
    earlier = root / f"{name}.json"
    is_there = jobs and earlier.exists()
    found = None
    for found in run(json.loads(earlier.read_text()) if is_there else {}):
        limit.check(found[1], None)
        harness.write(root, name, *found[:2])
    if found is None:
        sys.exit(f"No job starts with {jobs!r}.")
    return report(root, name, *found)


def report(
    root: pathlib.Path,
    name: str,
    results: dict[str, Any],
    table: str,
    bars: list[harness.Bar],
) -> int:
    """Writes and prints the results of a suite; the number of bars that it misses."""
    harness.write(root, name, results, table)
    print(f"# {name}\n\n{table}\n")
    missed = 0
    for bar in bars:
        if bar.is_time and not harness.judges_times():
            continue
        missed += not bar.holds
        verdict = "ok" if bar.holds else "MISSED"
        print(f"{verdict:8} {bar.value:8.3g} <= {bar.limit:.3g}  {bar.name}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
