"""What type checkers are told is true, and tells of every setting.

That checkers see it, and refuse wrong programs, is the step `pyright` of `.ci/run`.
"""

import pathlib
import runpy
import tomllib
import typing

import equinox as eqx
import jax
import pytest
from beartype.door import is_bearable


HERE = pathlib.Path(__file__).parent
PROGRAMS = sorted(HERE.glob("*_types.py"))


@pytest.mark.quick
def test_programs_are_checked():
    """By pyright, and so that a mark of an error that there is not is one itself."""
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text())
    assert "tests/typing" in project["tool"]["pyright"]["include"]
    ci = (HERE.parent.parent / ".ci" / "run").read_text()
    assert ".venv/bin/pyright --pythonpath .venv/bin/python" in ci
    refused = HERE / "refused.py"
    for path in (*PROGRAMS, refused):
        first = path.read_text().splitlines()[0]
        assert first == "# pyright: reportUnnecessaryTypeIgnoreComment=true"
        assert ("# pyright: ignore" in path.read_text()) == (path == refused)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_types_are_those_at_run_time(path, monkeypatch):
    checked = []

    def check(value, expected):
        checked.append(value)
        assert is_bearable(value, expected), (value, expected)
        return value

    monkeypatch.setattr(typing, "assert_type", check)

    def run():
        runpy.run_path(str(path))

    # Written for users, whose configuration is the default one.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        # What is traced has the same types, and is not compiled. Stores need values.
        if "HostStore" in path.read_text():
            run()
        else:
            eqx.filter_eval_shape(run)
    assert len(checked) >= path.read_text().count("assert_type(") > 5
