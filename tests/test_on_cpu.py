"""Tests run in a process with CPU devices, with the outcomes that they have there."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

from .on_cpu import PRETEND


ROOT = pathlib.Path(__file__).parents[1]
SETTINGS = """
[tool.pytest.ini_options]
addopts = ["--strict-markers", "--dist=worksteal", "-m not matrix"]
xfail_strict = true
markers = ["devices", "cpu", "matrix"]
"""
HOOKS = """
from tests.conftest import pytest_collection_modifyitems, pytest_configure
from tests.conftest import pytest_runtest_setup
"""
TESTS = """
import os, jax, pytest
from tests.helpers import make_mesh, memory

KNOWN = pytest.mark.xfail(reason="known")
HERE = os.getpid()

def test_elsewhere():
    assert jax.device_count() == 1
    assert jax.config.jax_default_matmul_precision == "highest"

@pytest.mark.devices
def test_mesh():
    assert make_mesh(None).size == jax.device_count() == 4
    assert jax.config.jax_default_matmul_precision is None

def test_mesh_without_a_mark():
    make_mesh(None)

def test_memory_without_a_mark():
    memory(lambda x: x, 1.0)

@pytest.mark.cpu
class TestFacts:
    def test_fails(self):
        print("what is printed")
        assert os.getpid() == 0, "the reason"

    @pytest.mark.parametrize("name", ("a b", "[x]::y"))
    def test_names(self, name, tmp_path):
        assert os.getppid() != HERE

    def test_skipped(self):
        pytest.skip("not today")

    @KNOWN
    def test_known(self):
        raise AssertionError

    @KNOWN
    def test_not_so(self):
        pass

    def test_ends(self):
        os._exit(3)

    def test_after_the_end(self):
        assert jax.device_count() == 4

    @pytest.mark.matrix
    def test_not_selected(self):
        pass
"""
OUTCOMES = {
    "test_elsewhere": "PASSED",
    "test_mesh": "PASSED",
    "test_mesh_without_a_mark": "FAILED",
    "test_memory_without_a_mark": "FAILED",
    "TestFacts::test_fails": "FAILED",
    "TestFacts::test_names[a b]": "PASSED",
    "TestFacts::test_names[[x]::y]": "PASSED",
    "TestFacts::test_known": "XFAIL",
    "TestFacts::test_not_so": "FAILED",
    "TestFacts::test_ends": "FAILED",
    "TestFacts::test_after_the_end": "PASSED",
}


@pytest.mark.matrix
def test_outcomes_are_those_on_the_cpu(tmp_path):
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-n0", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**environment, PRETEND: "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
    )
    found = re.findall(r"^(\w+) test_it.py::(.*?)(?: - .*)?$", done.stdout, re.M)
    assert {name: outcome for outcome, name in found} == OUTCOMES, done.stdout
    assert done.returncode == 1, done.stderr
    (skipped,) = re.findall(r"^SKIPPED \[1\] .*$", done.stdout, re.M)
    assert skipped.endswith(": not today")
    for text in (
        "AssertionError: the reason",
        "what is printed",
        "[XPASS(strict)] known",
        "The process on the CPU ended with 3",
        "this test needs `@pytest.mark.devices`",
        "this test needs `@pytest.mark.cpu`",
    ):
        assert text in done.stdout, text


@pytest.mark.matrix
def test_all_meshes_are_made_where_marks_are_checked():
    """What processes of their own run is text here."""
    found = {
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("jax.make_mesh", "jax.sharding.Mesh")
    }
    assert found == {"helpers.py"}
