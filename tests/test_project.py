"""The README, the examples and the benchmarks do what they say."""

import pathlib
import re
import subprocess
import sys

import pytest

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


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert commands[0] == "pip install equinox-batch\n"
    assert len(commands) == 3
    ci = (ROOT / ".ci" / "run").read_text()
    for part in commands[2].strip().split(" && "):
        assert part in ci
    assert "examples/quickstart.py" in commands[1]


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
