"""The README, the examples and the benchmarks do what they say."""

import pathlib
import re
import subprocess
import sys

import jax
import pytest

from benchmarks import chart
from . import annotations, patterns
from .layers import table


ROOT = pathlib.Path(__file__).parent.parent


def test_examples_are_in_the_docs():
    nav = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in nav
        assert (ROOT / "docs" / "examples" / path.name).resolve() == path


def test_import_takes_what_equinox_takes():
    """No package that `import equinox` does not import, too."""
    packages = "{name.partition('.')[0] for name in sys.modules}"
    code = (
        f"import sys, equinox; before = {packages}; import eqxbatch; "
        f"print(*sorted({packages} - before - sys.stdlib_module_names))"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["eqxbatch"], found.stderr


@pytest.mark.docs
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
def test_code_on_the_pages_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    # Written for users, whose configuration is the default one.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile("\n".join(blocks), page, "exec"), {"__name__": "__main__"})


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


@pytest.mark.docs
def test_table_of_layers_in_the_docs():
    page = ROOT / "docs" / "sites_layers.md"
    command = "python -m tests.layers > docs/sites_layers.md"
    assert page.read_text() == table(), f"Run `{command}`."


@pytest.mark.docs
def test_table_of_patterns_in_the_docs():
    page = ROOT / "docs" / "sites_patterns.md"
    command = "python -m tests.patterns > docs/sites_patterns.md"
    assert page.read_text() == patterns.table(), f"Run `{command}`."


def test_table_of_annotations_in_the_docs():
    page = ROOT / "docs" / "annotations_table.md"
    command = "python -m tests.annotations > docs/annotations_table.md"
    assert page.read_text() == annotations.table(), f"Run `{command}`."


def test_table_of_annotations_is_complete():
    calls = {call for call, _, _ in annotations.rows()}
    whole = {call.partition("(")[0] for call in calls}
    assert {*annotations.names()} - whole == set()
    transforms = [x for x in annotations.names() if x.startswith("filter_")]
    of_what_they_return = {f"{name}(...)" for name in transforms}
    # What these return is a module of its own, which is in the table.
    of_what_they_return -= {"filter_linearize(...)", "filter_taylor_expand(...)"}
    assert of_what_they_return - calls == set()


def test_summary_of_the_benchmarks_is_of_their_results():
    page = ROOT / "benchmarks" / "results" / "summary.md"
    command = "python -m benchmarks.chart"
    assert page.read_text() == chart.summary(chart.read()) + "\n", f"Run `{command}`."
