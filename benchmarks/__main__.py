"""Runs all benchmarks: `python -m benchmarks`, with `--help` for options."""

import argparse
import pathlib
import sys

from . import (
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
    micro_grad,
    micro_vmap,
    models,
    monte_carlo,
    solve,
    steps,
)


# Each has `NAME` and `run(quick) -> (results, table, bars)`.
SUITES = (
    micro_vmap,
    grid,
    micro_grad,
    models,
    curvature,
    kfac,
    steps,
    kernels,
    monte_carlo,
    batch_kernel,
    solve,
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
        help="run each way once and do not judge its time, on a busy machine",
    )
    parser.add_argument(
        "--suite",
        choices=[suite.NAME for suite in SUITES],
        help="run only this suite",
    )
    options = parser.parse_args()
    if options.no_time_bars:
        harness.judge_no_times()
    root = HERE.parent / "build" / "benchmarks" if options.quick else HERE / "results"
    missed = 0
    for suite in SUITES:
        if options.suite not in (None, suite.NAME):
            continue
        results, table, bars = suite.run(options.quick)
        harness.write(root, suite.NAME, results, table)
        print(f"# {suite.NAME}\n\n{table}\n")
        for bar in bars:
            counts = not (bar.is_time and options.no_time_bars)
            missed += counts and not bar.holds
            verdict = "ok" if bar.holds else "MISSED" if counts else "missed (no bar)"
            print(f"{verdict:15} {bar.value:8.3g} <= {bar.limit:.3g}  {bar.name}")
    if not options.quick:
        chart.main()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
