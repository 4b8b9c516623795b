"""What type checkers are told is true, and tells of every setting.

That checkers see it, and refuse wrong programs, is the step `pyright` of `.ci/run`.
"""

import inspect
import pathlib
import runpy
import tomllib
import typing

import jax
import pytest
from beartype.door import is_bearable

import eqxbatch
from eqxbatch._ntk import estimator_signatures as estimators
from eqxbatch._pairs import kernel_signature as kernels


HERE = pathlib.Path(__file__).parent
PROGRAMS = sorted(HERE.glob("*_types.py"))
SIGNATURES = {
    "filter_batch_kernel": kernels.BatchKernelSignature,
}


def overloads(signature):
    # A method of a Protocol has no implementation, whose name they are found by.
    method = lambda: None
    method.__module__ = signature.__module__
    method.__qualname__ = f"{signature.__qualname__}.__call__"
    return typing.get_overloads(method)


def settings(overload):
    return typing.get_args(overload.__annotations__["settings"])[0]


def parameters(overload):
    """The names that an overload takes, with those of its settings."""
    names = {*inspect.signature(overload).parameters} - {"self", "settings"}
    return names | {*settings(overload).__annotations__}


@pytest.mark.quick
@pytest.mark.parametrize("name", SIGNATURES)
def test_every_overload_knows_every_setting(name):
    expected = {*inspect.signature(getattr(eqxbatch, name)).parameters}
    found = overloads(SIGNATURES[name])
    assert found
    for overload in found:
        assert parameters(overload) == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "kinds"),
    (
        ("EmpiricalNTK", (estimators.NTKOnDevice, estimators.NTKElsewhere)),
        ("EmpiricalKernel", (estimators.NTKOnDevice, estimators.NTKElsewhere)),
        ("EmpiricalNNGP", (estimators.NNGPOnDevice, estimators.NNGPElsewhere)),
    ),
)
def test_estimators_know_every_setting(name, kinds):
    expected = {*inspect.signature(getattr(eqxbatch, name)).parameters} - {"model"}
    for kind in kinds:
        assert {*kind.__annotations__} == expected


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
    # Written for users, whose configuration is the default one.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        runpy.run_path(str(path))
    assert len(checked) >= path.read_text().count("assert_type(") > 5
