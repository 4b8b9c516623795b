"""Random programs, compared with dense derivatives for as long as one likes.

`python -m tests.programs.site_programs --minutes 60 --seed 0 --log findings.txt` goes
on after what it finds, and says at the end how many programs and checks ran. To print
and check one: `--seed 17 --count 1 --show`.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import os
import time
import traceback
from collections.abc import Iterator, Sequence

from ..flags import COMPILE_FAST, compiler_options


os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)

import equinox as eqx
import jax
import numpy as np

from ..conftest import enable_x64
from .program_checks import CHECKS, EXERCISED, some_checks, Subject
from .program_draw import draw, Program, REJECTED, SINGLE


TOLERANCE = {False: 1e-9, True: 1e-4}
# For these alone, JAX's Hessian is not compiled, which takes longest of all.
WITHOUT_HESSIANS = {"norms_and_sums", "kernels_by_factors", "gauss_newton_by_sites"}
# The package refuses these, and says so in its documentation.
REFUSED = (
    "`fun` must return arrays of an inexact dtype",
    "can't apply forward-mode autodiff (jvp) to a custom_vjp function",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number that differs, or an exception: `error` is relative, or infinite."""

    seed: int
    check: str
    what: str
    error: float

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.check}: {self.what} ({self.error:.1e})"


@dataclasses.dataclass
class Result:
    """What came out of the checks of one program."""

    findings: list[Finding]
    num_compared: int = 0
    skipped: str | None = None


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """What users have by default, in double precision."""
    with (
        enable_x64(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def examine(program: Program, names: Sequence[str] = tuple(CHECKS)) -> Result:
    """Runs checks of a program; all at once, and one by one where that fails."""
    with settings():
        try:
            return _compared(program, names)
        except _RefusedByJax as e:
            return Result([], skipped=str(e))
        except Exception:
            try:
                result = _compared(program, [])
            except Exception as e:
                return Result([], skipped=f"JAX raises {type(e).__name__}")
            for name in names:
                try:
                    one = _compared(program, [name])
                except Exception as e:
                    what = f"raises as it runs: {type(e).__name__}: {e}"[:400]
                    result.findings.append(Finding(program.seed, name, what, np.inf))
                    continue
                result.findings += one.findings
                result.num_compared += one.num_compared
            return result


class _RefusedByJax(Exception):
    pass


def _leaves(program: Program) -> list:
    return jax.tree.leaves(eqx.filter(program.parameters, eqx.is_inexact_array_like))


def _compared(program: Program, names: Sequence[str]) -> Result:
    labels: list[tuple[str, str]] = []
    result = Result([])
    of_hessians = not names or not WITHOUT_HESSIANS.issuperset(names)

    def run(leaves: list, examples: tuple, others: tuple) -> tuple[list, list]:
        labels.clear()
        result.findings.clear()
        subject = Subject(program, leaves, examples, others)
        try:
            truth = [subject.total(leaves), subject.gradients]
            truth += [subject.hessian] if of_hessians and not subject.is_complex else []
        except Exception as e:
            raise _RefusedByJax(f"JAX raises {type(e).__name__}") from e
        pairs = []
        for name in names:
            try:
                for what, got, expected in CHECKS[name](subject):
                    labels.append((name, what))
                    pairs.append((got, expected))
            except Exception as e:
                if not any(text in str(e) for text in REFUSED):
                    result.findings.append(_raised(program.seed, name, e))
        return truth, pairs

    options = compiler_options(program.examples)
    compiled = jax.jit(run, compiler_options=options)
    truth, pairs = compiled(_leaves(program), program.examples, program.others)
    if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(truth)):
        return Result([], skipped="not finite")
    if max(np.max(np.abs(x), initial=0) for x in jax.tree.leaves(truth)) > 1e6:
        return Result([], skipped="too large")
    # That of custom rules that contradict each other; ours are symmetric.
    if len(truth) > 2 and _error(truth[2], truth[2].T) > 1e-6:
        return Result([], skipped="JAX's Hessian is not symmetric")
    tolerance = TOLERANCE[SINGLE in program.source or _is_single(program)]
    for (name, what), (got, expected) in zip(labels, pairs, strict=True):
        result.num_compared += 1
        error = _error(np.asarray(got), np.asarray(expected))
        if not error <= tolerance:
            result.findings.append(Finding(program.seed, name, what, error))
    return result


def _is_single(program: Program) -> bool:
    return any(x.dtype == np.float32 for x in _leaves(program))


def _raised(seed: int, name: str, e: Exception) -> Finding:
    frames = [
        f for f in traceback.extract_tb(e.__traceback__) if "/eqxbatch/" in f.filename
    ]
    where = (
        f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else ""
    )
    what = f"raises {type(e).__name__} in {where}: {e}".replace("\n", " ")
    return Finding(seed, name, what[:400], np.inf)


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative to the largest entry."""
    if got.shape != expected.shape or np.iscomplexobj(got) != np.iscomplexobj(expected):
        return np.inf
    scale = np.max(np.abs(expected), initial=1e-2)
    error = np.max(np.abs(got - expected), initial=0) / scale
    return float(error) if np.isfinite(error) else np.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--log", default=None)
    parser.add_argument("--checks", nargs="*", default=None, choices=CHECKS)
    parser.add_argument("--uses", nargs="*", default=[])
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    started, count = time.time(), 0
    totals: collections.Counter = collections.Counter()
    blocks: collections.Counter = collections.Counter()
    seed = args.seed
    log = open(args.log, "a") if args.log else None  # noqa: SIM115

    def say(text: str) -> None:
        print(text, flush=True)
        if log is not None:
            log.write(text + "\n")
            log.flush()

    while True:
        if args.count is not None and count >= args.count:
            break
        if args.minutes is not None and time.time() - started > 60 * args.minutes:
            break
        try:
            with settings():
                program = draw(seed, tuple(args.uses))
            if args.show:
                say(str(program))
            result = examine(program, args.checks or some_checks(seed))
        except Exception:
            say(f"seed {seed}: the generator raises\n{traceback.format_exc()}")
            totals["failed in the generator"] += 1
        else:
            blocks.update(set(program.blocks))
            totals["skipped, " + result.skipped if result.skipped else "ran"] += 1
            totals["compared"] += result.num_compared
            totals["programs with findings"] += bool(result.findings)
            if result.findings:
                say("\n".join([str(program), *map(str, result.findings), ""]))
            for finding in result.findings:
                totals[f"found by {finding.check}"] += 1
        seed, count = seed + 1, count + 1
        if count % 25 == 0:
            jax.clear_caches()
            gc.collect()
    say(
        f"seeds {args.seed} to {seed - 1}, {time.process_time():.0f} s of CPU: "
        f"{dict(totals)}"
    )
    say(f"blocks: {dict(blocks.most_common())}")
    for key, num in sorted(EXERCISED.items()):
        say(f"{num:6d}  {', '.join(key)}")
    say(f"rejected: {dict(REJECTED.most_common(12))}")


if __name__ == "__main__":
    main()
