"""Finds the Pythons of `.ci/run`: `.ci/pythons.py lowest` and `.ci/pythons.py newest`.

The lowest is the one that the project requires, with which the lowest versions of its
dependencies run. The newest has wheels of JAX, and is newer than the lowest, which new
versions of JAX do not support. uv looks on the path, among its own Pythons and, with
the folders below, among those of version managers. It downloads none.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib


ROOT = pathlib.Path(__file__).resolve().parents[1]
UV = [sys.executable, "-m", "uv"]
# Where version managers keep their Pythons: a variable, its default, and what follows.
MANAGERS = (
    ("PYENV_ROOT", "~/.pyenv", "versions/*/bin"),
    ("ASDF_DATA_DIR", "~/.asdf", "installs/python/*/bin"),
    ("MISE_DATA_DIR", "~/.local/share/mise", "installs/python/*/bin"),
)

Version = tuple[int, int, int]


def installed() -> list[tuple[Version, str]]:
    """Releases of CPython and their paths, the newest first."""
    folders = [
        str(folder)
        for variable, default, pattern in MANAGERS
        for folder in pathlib.Path(
            os.environ.get(variable) or os.path.expanduser(default)
        ).glob(pattern)
    ]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    command = [*UV, "python", "list", "--only-installed", "--output-format", "json"]
    listed = subprocess.run(
        command,
        check=True,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        # Commands of version managers that lead nowhere, one by one.
        stderr=subprocess.DEVNULL,
    )
    found = {}
    for python in json.loads(listed.stdout):
        is_release = re.fullmatch(r"\d+\.\d+\.\d+", python["version"])
        is_usual = (python["implementation"], python["variant"]) == (
            "cpython",
            "default",
        )
        if is_release and is_usual:
            major, minor, patch = map(int, python["version"].split("."))
            found.setdefault((major, minor, patch), python["path"])
    return sorted(found.items(), reverse=True)


def has_wheels(python: str) -> bool:
    """Whether the tests can be installed, with JAX from a wheel."""
    command = [*UV, "pip", "compile", "--quiet", "--python", python]
    command += ["--only-binary", "jaxlib", "--extra", "test", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    return done.returncode == 0


def find(which: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    pythons = installed()
    for version, path in pythons:
        fits = version[:2] == lowest if which == "lowest" else version[:2] > lowest
        if fits and has_wheels(path):
            return path
    wanted = f"{lowest[0]}.{lowest[1] + (which == 'newest')}"
    if which == "newest":
        wanted += " or newer that has wheels of JAX"
    names = ", ".join(".".join(map(str, version)) for version, _ in pythons)
    raise SystemExit(
        f"No Python {wanted} was found, only: {names or 'none'}. Install one with your "
        f"system or a version manager, or with `{' '.join(UV)} python install`."
    )


if __name__ == "__main__":
    print(find(sys.argv[1]))
