"""Where JAX has another backend: tests that need CPU devices, in processes with these.

Tests marked `devices` need four devices, and those marked `cpu` state what is so on
CPUs. Where the default backend is not a CPU, each module's run in a process of their
own, with four CPU devices. It is pytest, too, and runs one test at a time, when asked.
"""

import contextlib
import multiprocessing.connection
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import jax
import pytest

from .flags import COMPILE_FAST, FOUR_DEVICES


MARKS = ("devices", "cpu")
# Set it to have a single CPU device count as an accelerator.
PRETEND = "EQXBATCH_PRETEND_ACCELERATOR"
_CONNECTION = "EQXBATCH_TESTS_ON_CPU"
# What the environment has for one test only, or for the process that runs all.
_OWN = (PRETEND, "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")


def pretends() -> bool:
    return bool(os.environ.get(PRETEND))


def has_accelerator() -> bool:
    return pretends() or jax.default_backend() != "cpu"


_marks: set[str] | None = None


def environment(flags: str = COMPILE_FAST) -> dict[str, str]:
    """That of a process with CPU devices."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def begin(item: pytest.Item) -> None:
    """Notes the marks of the test that comes."""
    global _marks
    _marks = {mark.name for mark in item.iter_markers()}


def require(mark: str) -> None:
    """Fails where the test that runs needs a mark, and does not have it."""
    if _marks is not None and mark not in _marks:
        pytest.fail(f"this test needs `@pytest.mark.{mark}`: see tests/on_cpu.py")


class FailedOnCPU(Exception):
    """Has what pytest says of it there."""


class OnCPU(pytest.Item):
    """A test that runs in the process for its module."""

    def __init__(self, *, test: pytest.Item, processes: "Processes", **kwargs):
        super().__init__(**kwargs)
        self.test, self.processes = test, processes

    def runtest(self) -> None:
        for report in self.processes.run(self.test):
            self._report_sections += [(report.when, *x) for x in report.sections]
            reason = getattr(report, "wasxfail", None)
            if report.failed:
                raise FailedOnCPU(report.longreprtext)
            if report.skipped and reason is not None:
                pytest.xfail(reason)
            if report.skipped:
                pytest.skip(report.longrepr[-1].removeprefix("Skipped: "))

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, FailedOnCPU):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.test.reportinfo()


# Runs the test of a name, in a process.
Ask = Callable[[str], list[pytest.TestReport]]


class Processes:
    """The process of one module after the other."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._path: pathlib.Path | None = None
        self._ask: Ask | None = None
        self._process = contextlib.ExitStack()

    def run(self, test: pytest.Item) -> list[pytest.TestReport]:
        if test.path != self._path:
            self.close()
            self._ask = self._process.enter_context(_started(self._config, test.path))
            self._path = test.path
        try:
            return self._ask(test.nodeid)
        except FailedOnCPU:
            self.close()
            raise

    def close(self) -> None:
        self._path = None
        self._process.close()


def _options(config: pytest.Config) -> list[str]:
    """Those of this process that say how tests run, and how failures are shown."""
    options = [f"--tb={config.getoption('tbstyle', 'auto')}"]
    options += [f"-W{x}" for x in config.getoption("pythonwarnings", None) or ()]
    for name in ("showlocals", "runxfail"):
        options += [f"--{name}"] if config.getoption(name, False) else []
    packages = config.getoption("jaxtyping_packages", None)
    return options + ([f"--jaxtyping-packages={packages}"] if packages else [])


@contextlib.contextmanager
def _started(config: pytest.Config, path: pathlib.Path) -> Iterator[Ask]:
    """A process for the tests of a module."""
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider"]
    command += ["-c", str(config.inipath), f"--rootdir={config.rootpath}"]
    command += [*_options(config), "-m", " or ".join(MARKS), str(path)]
    theirs_too = environment(f"{FOUR_DEVICES} {COMPILE_FAST}").items()
    ours, theirs = multiprocessing.connection.Pipe()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=config.rootpath,
            env={
                **{name: x for name, x in theirs_too if name not in _OWN},
                _CONNECTION: str(theirs.fileno()),
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

        def ask(nodeid: str) -> list[pytest.TestReport]:
            try:
                ours.send(nodeid)
                found = ours.recv()
            except (EOFError, OSError):
                status = process.wait()
                output.seek(0)
                shown = f"The process on the CPU ended with {status}:\n{output.read()}"
                raise FailedOnCPU(shown) from None
            make = config.hook.pytest_report_from_serializable
            return [make(config=config, data=data) for data in found]

        # It ends when no test can come any more.
        with process, ours:
            yield ask


class _Answers:
    """What pytest does in the process on the CPU."""

    def __init__(self, connection: multiprocessing.connection.Connection):
        self._connection = connection
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = {item.nodeid: item for item in session.items}
        make = session.config.hook.pytest_report_to_serializable
        with self._connection, contextlib.suppress(EOFError):
            # A test is not there where the module cannot be imported.
            while test := tests.get(self._connection.recv()):
                self._reports.clear()
                test.ihook.pytest_runtest_protocol(item=test, nextitem=None)
                self._connection.send(
                    [make(config=session.config, report=x) for x in self._reports]
                )
        return True


def register(config: pytest.Config) -> None:
    """In the process on the CPU, tests run when asked."""
    if number := os.environ.pop(_CONNECTION, None):
        connection = multiprocessing.connection.Connection(int(number))
        config.pluginmanager.register(_Answers(connection))


def moved(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests, of which some run on the CPU where there is an accelerator."""
    if not has_accelerator():
        return items
    processes = Processes(config)
    config.add_cleanup(processes.close)
    make = lambda item: OnCPU.from_parent(
        item.parent, name=item.name, test=item, processes=processes
    )
    belongs = lambda item: any(map(item.get_closest_marker, MARKS))
    return [make(item) if belongs(item) else item for item in items]
