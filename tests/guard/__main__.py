"""The command line, as the docstring of the package says."""

import argparse
import difflib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from ..flags import COMPILE_FAST, FOUR_DEVICES


# Read when JAX first looks for devices.
os.environ["XLA_FLAGS"] = f"{FOUR_DEVICES} {COMPILE_FAST}"
ROOT = pathlib.Path(__file__).parents[2]
# What the differences of one call take at most.
_MOST_LINES = 60
HEADER = (
    *("traces", "programs", "equations", "flops"),
    *("largest", "digest", "call"),
)


def traced(wanted: list[str]) -> dict[str, Any]:
    """The calls whose names have one of these words; all if there are none."""
    # Programs are noted from when the package is imported.
    from .programs import noting_programs

    with noting_programs():
        from .calls import calls

        some: dict[str, Callable] = {
            name: call
            for name, call in calls().items()
            if not wanted or any(word in name for word in wanted)
        }
        return {name: _as_json(call()) for name, call in some.items()}


def _as_json(call: Any) -> dict[str, Any]:
    lines = [[line.text, line.inputs] for line in call.lines]
    return {"row": call.row, "lines": lines}


def versions() -> str:
    return ", ".join(f"{x} {importlib.metadata.version(x)}" for x in ("jax", "equinox"))


def table(found: dict[str, Any]) -> str:
    rows = [HEADER, *([*call["row"], name] for name, call in found.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    cells = lambda row: [x.rjust(n) for x, n in zip(row, widths, strict=False)]
    lines = ["  ".join([*cells(row), row[-1]]) for row in rows]
    return "\n".join([f"Traced with {versions()}.", "", *lines, ""])


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, call by call."""
    shown: list[str] = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            shown += [f"{name}: {'new' if old is None else 'gone'}", ""]
        elif old != new:
            changed = [
                f"{title} {a} -> {b}"
                for title, a, b in zip(HEADER, old["row"], new["row"], strict=False)
                if a != b
            ]
            shown += [f"{name}: {', '.join(changed)}", *_of_lines(old, new), ""]
    return shown


def _of_lines(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    before, after = ([text for text, _ in call["lines"]] for call in (old, new))
    if before != after:
        found = [*difflib.unified_diff(before, after, n=2, lineterm="")][2:]
        left_out = len(found) - _MOST_LINES
        more = [f"... and {left_out} more lines"] if left_out > 0 else []
        return [*found[:_MOST_LINES], *more]
    pairs = zip(old["lines"], new["lines"], strict=True)
    other = [(a, b) for a, b in pairs if a != b]
    return [
        f"{len(other)} equations have the same text, and other inputs; the first one:",
        *(f"  {text} @ {a} -> {b}" for (text, a), (_, b) in other[:1]),
    ]


def of_revision(revision: str, wanted: list[str]) -> dict[str, Any]:
    """What this script traces with the package of another commit."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        archive = subprocess.run(
            ["git", "archive", revision, "eqxbatch"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        subprocess.run(["tar", "-x"], cwd=root, input=archive.stdout, check=True)
        (root / "tests").symlink_to(ROOT / "tests")
        saved = root / "saved.json"
        subprocess.run(
            [sys.executable, "-m", "tests.guard", *wanted, "--save", str(saved)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            check=True,
        )
        return json.loads(saved.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the programs of many calls.")
    parser.add_argument("calls", nargs="*", help="words in their names; default: all")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--save", metavar="FILE", help="write all equations to a file")
    ways.add_argument("--compare", metavar="FILE", help="compare with such a file")
    ways.add_argument("--against", metavar="COMMIT", help="compare with a commit")
    ways.add_argument("--show", action="store_true", help="print all equations")
    options = parser.parse_args()
    # It calls many functions that are made anew.
    warnings.simplefilter("ignore")
    before = None
    if options.compare:
        before = json.loads(pathlib.Path(options.compare).read_text())
    elif options.against:
        before = of_revision(options.against, options.calls)
    found = traced(options.calls)
    if options.save:
        pathlib.Path(options.save).write_text(json.dumps(found))
    elif options.show:
        for name, call in found.items():
            print(name, *(text for text, _ in call["lines"]), "", sep="\n")
    elif before is None:
        print(table(found), end="")
    else:
        if options.calls:
            before = {name: call for name, call in before.items() if name in found}
        shown = differences(before, found)
        print("\n".join(shown) or f"The programs of {len(found)} calls are equal.")
        sys.exit(1 if shown else 0)


if __name__ == "__main__":
    main()
