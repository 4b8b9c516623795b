"""Random maps, gradients, grids and kernels against NumPy and `jax.vmap`.

`python -m tests.programs.map_programs --minutes 60 --seed 0 --log FILE` runs one seed
after the other, goes on after a failure, and shrinks the first of each kind.
"""

import argparse
import contextlib
import gc
import os
import pathlib
import re
import sys
import time
import traceback
import warnings
from typing import Any, NamedTuple


if __name__ == "__main__":  # Read when JAX first looks for devices.
    from ..flags import COMPILE_FAST, FOUR_DEVICES

    os.environ.setdefault("XLA_FLAGS", f"{FOUR_DEVICES} {COMPILE_FAST}")

import jax

from ..conftest import enable_x64
from .map_draw import Case, compare, Draw, Mismatch, Skip
from .map_gradients import draw_gradients
from .map_grids import draw_grids
from .map_kernel_gradients import draw_kernel_gradients, draw_kernels_of_gradients
from .map_kernels import draw_kernels
from .map_nested import draw_accumulated, draw_microbatch, draw_nested
from .map_vmaps import draw_vmaps


FAMILIES = (
    draw_vmaps,
    draw_gradients,
    draw_kernels,
    draw_nested,
    draw_vmaps,
    draw_kernel_gradients,
    draw_gradients,
    draw_kernels_of_gradients,
    draw_microbatch,
    draw_grids,
    draw_accumulated,
    draw_vmaps,
    draw_accumulated,
    draw_kernels,
)
_CLEAR_EVERY = 100
_MODES = 4  # The last of them has 64 bits.


class Finding(NamedTuple):
    """A case that does not hold: what was checked, the error, and where it is from."""

    check: str
    error: str
    place: str

    @property
    def kind(self) -> tuple[str, str]:
        """What findings of one cause have in common, as far as that can be told."""
        error = re.sub(
            r"0x\w+|[-+]?[\d.]+(e[-+]?\d+)?|nan|inf|True|False", "#", self.error
        )
        return f"{self.check} {error[:60]}", self.place


def draw_case(seed: int, choices: list[int] | None = None) -> tuple[Case, list[int]]:
    """The case of a seed, and the choices that make it."""
    draw = Draw(seed, choices)
    draw.below(_MODES)  # Whether 64 bits are enabled: see `run_seed`.
    family = FAMILIES[seed % len(FAMILIES)]
    case = family(draw)
    case.text = f"{family.__name__[5:]}: {case.text}"
    return case, draw.choices


def run_case(case: Case) -> Finding | str:
    """A finding, or how it went: "ok", "refused", or "void" where the oracle raises."""
    try:
        expected = None if case.refuses else case.oracle()
    except Skip:
        return "void"
    except Exception as e:
        return Finding("has no oracle", f"{type(e).__name__}: {e}", _place(e))
    try:
        got = jax.block_until_ready(case.package())
    except Exception as e:
        refusal = isinstance(e, TypeError | ValueError)
        if case.refuses and re.search(case.refuses, str(e)):
            return "refused"
        if case.may_refuse and refusal:
            return "refused"
        if case.by_jax is not None and _raises(case.by_jax):
            return f"void: both raise, {type(e).__name__}: {str(e)[:80]}"
        return Finding("raises", f"{type(e).__name__}: {e}", _place(e))
    if case.refuses:
        return Finding("refuses", f"does not raise {case.refuses!r}", "")
    try:
        compare(got, expected)
    except Mismatch as e:
        return Finding("differs", str(e), "")
    return "ok"


def _raises(run: Any) -> bool:
    try:
        jax.block_until_ready(run())
    except Exception:
        return True
    return False


def _place(e: Exception) -> str:
    """The innermost function of the package that an error came through."""
    frames = traceback.extract_tb(e.__traceback__)
    own = [
        x for x in frames if "/eqxbatch/" in x.filename and "site-pac" not in x.filename
    ]
    if not own:
        return ""
    return f"{pathlib.Path(own[-1].filename).name}:{own[-1].name}"


def run_seed(seed: int, choices: list[int] | None = None) -> tuple[Any, str, list[int]]:
    """How it went, the description and the choices."""
    mode = choices[0] if choices else Draw(seed).below(_MODES)
    with enable_x64() if mode == _MODES - 1 else contextlib.nullcontext():
        try:
            case, choices = draw_case(seed, choices)
        except Exception as e:
            trace = traceback.extract_tb(e.__traceback__)[-1]
            error = f"{type(e).__name__}: {e}"
            return Finding("draws", error, f"{trace.name}:{trace.lineno}"), "", []
        return run_case(case), case.text, choices


def shrink(
    seed: int, choices: list[int], kind: tuple, seconds: float = 30.0
) -> tuple[str, list[int], Finding | None]:
    """The description, choices and error of a simpler case with the same finding."""
    end = time.monotonic() + seconds
    best, text, finding = list(choices), "", None

    def holds(trial: list[int]) -> bool:
        nonlocal best, text, finding
        found, shown, made = run_seed(seed, trial)
        if not isinstance(found, Finding) or found.kind[0][:20] != kind[0][:20]:
            return False
        if found.place != kind[1] or (len(made), made) >= (len(best), best):
            return False
        best, text, finding = made, shown, found
        return True

    improved = True
    while improved and time.monotonic() < end:
        improved = False
        for at in range(len(best)):
            if time.monotonic() > end or at >= len(best):
                break
            for value in {0, 1} if best[at] else ():
                if value < best[at] and holds([*best[:at], value, *best[at + 1 :]]):
                    improved = True
                    break
    return text, best, finding


def _run(args: argparse.Namespace, log: Any) -> None:
    def say(line: str) -> None:
        print(line, flush=True)
        if log is not None:
            print(line, file=log, flush=True)

    start, cpu = time.monotonic(), time.process_time()
    counts: dict[str, int] = {}
    kinds: dict[tuple, list[int]] = {}
    seed, done = args.seed, 0
    families = [family.__name__[5:] for family in FAMILIES]
    while time.monotonic() - start < 60 * args.minutes:
        if args.family is not None and families[seed % len(FAMILIES)] != args.family:
            seed += 1
            continue
        if args.number is not None and done >= args.number:
            break
        found, text, choices = run_seed(seed)
        is_finding = isinstance(found, Finding)
        name = found.check if is_finding else found
        counts[name] = counts.get(name, 0) + 1
        if args.verbose:
            say(f"{seed}: {text}: {name}")
        if is_finding:
            seeds = kinds.setdefault(found.kind, [])
            seeds.append(seed)
            say(f"FINDING seed {seed}: {found.check} [{found.place}]\n  {text}")
            say(f"  {found.error[:400]}")
            if len(seeds) == 1 and choices and args.shrink:
                small, made, again = shrink(seed, choices, found.kind, args.shrink)
                if again is not None:
                    say(f"  shrunk to {made}: {small}\n  {again.error[:400]}")
        seed, done = seed + 1, done + 1
        if done % _CLEAR_EVERY == 0:
            jax.clear_caches()
            gc.collect()
    seconds = time.process_time() - cpu
    say(f"{done} programs, seeds {args.seed} to {seed - 1}, {seconds:.0f} s of CPU")
    say(f"outcomes: {counts}")
    for (error, place), seeds in sorted(kinds.items(), key=lambda item: item[1]):
        say(f"  {len(seeds)} times {error!r} [{place}]: seeds {seeds[:12]}")


def main(argv: list[str] | None = None) -> None:
    """Runs seeds for as long as one likes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--number", type=int, help="at most so many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--log", help="a file that findings are appended to")
    parser.add_argument("--shrink", type=float, default=20.0, help="seconds for each")
    parser.add_argument("--family", help="one of them only, such as nested")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args(argv)
    # As the tests have it.
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    warnings.simplefilter("error")
    sys.setrecursionlimit(10_000)
    with contextlib.ExitStack() as stack:
        log = args.log and stack.enter_context(open(args.log, "a"))
        _run(args, log or None)


if __name__ == "__main__":
    main()
