"""The README, the examples and the benchmarks do what they say."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from .flags import COMPILE_FAST
from .layers import table


ROOT = pathlib.Path(__file__).parent.parent


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "agg", "XLA_FLAGS": COMPILE_FAST},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_in_the_docs():
    nav = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in nav
        assert (ROOT / "docs" / "examples" / path.name).resolve() == path


@pytest.mark.matrix
@pytest.mark.parametrize(
    "page",
    (
        "README.md",
        "docs/index.md",
        "docs/gradients.md",
        "docs/kernels.md",
        "docs/batched_kernels.md",
        "docs/curvature.md",
        "docs/grids.md",
    ),
)
def test_code_on_the_pages_runs(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    run(script, cwd=tmp_path)


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text()
    for part in commands[1].strip().split(" && "):
        assert part in ci
    assert "examples/quickstart.py" in commands[0]


def test_lowest_versions_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    for line in (ROOT / ".ci" / "lowest.txt").read_text().split():
        name, version = line.split("==")
        (declared,) = re.findall(rf'^    "{name}>=([\d.]+)",$', project, re.M)
        assert declared == version


def test_table_of_layers_in_the_docs():
    page = ROOT / "docs" / "sites_layers.md"
    command = "python -m tests.layers > docs/sites_layers.md"
    assert page.read_text() == table(), f"Run `{command}`."
