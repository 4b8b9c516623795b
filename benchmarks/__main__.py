"""Runs all benchmarks: `python -m benchmarks`, with `--help` for options."""

import argparse
import json
import pathlib
import sys
from typing import Any

import jax

from . import (
    accelerators,
    batch_kernel,
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
    sharded,
    costs,
    first_call,
    first_screen,
)

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
        choices=[*(suite.NAME for suite in SUITES), accelerators.NAME],
        help=f"run only this suite; {accelerators.NAME} runs only if it is named",
    )
    parser.add_argument(
        "--device",
        choices=accelerators.DEVICES,
        help=f"for which device {accelerators.NAME} compiles; {accelerators.HERE} also "
        "runs its programs; by default, the first one whose plug-in is installed. "
        f"{sharded.NAME} compiles for eight of them; by default, for CPUs",
    )
    parser.add_argument(
        "--jobs",
        default="",
        help=f"of {accelerators.NAME}, measure only the jobs again whose titles start "
        "with this, such as `micro_grad`",
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
        name = f"{accelerators.NAME}_{device}"
        earlier = root / f"{name}.json"
        is_there = options.jobs and earlier.exists()
        before = json.loads(earlier.read_text()) if is_there else {}
        found = None
        for found in accelerators.run(options.quick, device, options.jobs, before):
            limit.check(found[1], None)
            harness.write(root, name, *found[:2])
        if found is None:
            parser.error(f"no job starts with {options.jobs!r}")
        return 1 if report(root, name, *found) else 0
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
    if not options.quick and not suffix:
        chart.main()
    return 1 if missed else 0


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
