"""Runs the tests for each breakage, as the docstring of the package says."""

import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from . import __doc__ as _DOC, BREAKAGES
from .breakage import Breakage, broken, place


ROOT = pathlib.Path(__file__).parents[2]

# Not imported, as the import hook of the tests must be there before.
_RUN = """
import importlib.util, pathlib, sys, pytest
found = pathlib.Path(importlib.util.find_spec("eqxbatch").origin)
if found.parents[1].resolve() != pathlib.Path.cwd().resolve():
    sys.exit(f"{found} would be imported, and not the copy")
sys.exit(pytest.main(sys.argv[1:]))
"""
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", "shared", "site"
)


def outcome(arguments: list[str], root: pathlib.Path) -> str:
    """What pytest says of the copy, in a word or with the first test that fails."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not docs"]
    run = subprocess.run(
        [sys.executable, "-c", _RUN, *options, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return "SURVIVED"
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", run.stdout, re.M)
    if run.returncode == 1 and failed:
        return f"caught by {failed[1]}"
    # What cannot be imported or collected says nothing about the tests.
    shown = "\n".join([*run.stdout.splitlines()[-15:], *run.stderr.splitlines()[-15:]])
    return f"ERROR of the breakage itself (pytest returns {run.returncode}):\n{shown}"


def chosen(wanted: list[str]) -> list[tuple[int, Breakage]]:
    found = []
    for number, breakage in enumerate(BREAKAGES, 1):
        if not wanted or str(number) in wanted or breakage.name in wanted:
            found.append((number, breakage))
    known = {str(number) for number, _ in found} | {b.name for _, b in found}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"No such breakage: {unknown}. See --list.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(_DOC or "").splitlines()[0])
    parser.add_argument("breakages", nargs="*", help="numbers or names; default: all")
    parser.add_argument("--tests", nargs="+", help="tests in place of the named ones")
    parser.add_argument("--list", action="store_true", help="show all, and run none")
    options = parser.parse_args()
    some = [(number, b, place(b, ROOT)) for number, b in chosen(options.breakages)]
    if options.list:
        for number, breakage, path in some:
            shown = path.relative_to(ROOT / "eqxbatch")
            print(f"{number:2} {shown}, {breakage.where}: {breakage.name}")
        return
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=_NOT_COPIED)
        for number, breakage, path in some:
            file = root / path.relative_to(ROOT)
            file.write_text(broken(breakage, ROOT))
            # Python must not take what it compiled before for this.
            os.utime(file, (number, number))
            begin = time.monotonic()
            tests = " ".join(options.tests) if options.tests else breakage.tests
            found = outcome(shlex.split(tests), root)
            outcomes.append(found.split()[0])
            seconds = time.monotonic() - begin
            print(f"{number:2} {breakage.name}: {found} ({seconds:.0f} s)", flush=True)
            shutil.copy2(path, file)
    counts = [outcomes.count(word) for word in ("caught", "SURVIVED", "ERROR")]
    print("{} caught, {} survived, {} errors".format(*counts))
    sys.exit(1 if counts[1] or counts[2] else 0)


if __name__ == "__main__":
    main()
