"""The README, the examples and the benchmarks do what they say."""

import ast
import importlib.metadata
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import jax
import pytest

import eqxbatch
from benchmarks import chart
from . import breakages, patterns
from .layers import table


ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Python files, pages and settings, without what builds and environments leave behind.
TEXTS = [
    path
    for pattern in (
        "*.md",
        "*.toml",
        "*.yml",
        ".ci/*",
        "eqxbatch/**/*.py",
        "tests/**/*.py",
        "docs/**/*.md",
        "examples/*.py",
        "benchmarks/**/*.py",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.is_file()
]


def packages(extra):
    """The packages that an extra installs, also by way of other extras."""
    found = set()
    for requirement in EXTRAS[extra]:
        name, others = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        if name == PROJECT["name"]:
            found = found.union(*map(packages, others.split(",")))
        else:
            found.add(name)
    return found


def test_distribution():
    assert PROJECT["name"] == "equinox-batch"
    assert importlib.metadata.version("equinox-batch") == PROJECT["version"]
    assert eqxbatch.__version__ == PROJECT["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation
    assert [x["name"] for x in PROJECT["authors"]] == ["The eqxbatch authors"]
    assert "\n  - name: The eqxbatch authors\n" in citation


def test_hints_install_this_project():
    """`pip install eqxbatch` would install another one."""
    hints = 0
    this = pathlib.Path(__file__)
    for path in (path for path in TEXTS if path != this):
        text = path.read_text()
        assert "eqxbatch[" not in text, path
        for hint in re.findall(r"(?:equinox-batch|(?<=[\"' ])\.)\[([a-z,]+)\]", text):
            hints += 1
            assert {*hint.split(",")} <= {*EXTRAS}, path
        for line in re.findall(r".*pip install[ \w-]* eqxbatch\b.*", text):
            assert "installs another project" in line, path
    assert hints > 10
    for page in ("README.md", "docs/install.md"):
        assert "`pip install eqxbatch` installs another" in (ROOT / page).read_text()


def test_the_home_page_repeats_little_of_the_readme():
    readme, home = (
        {line for line in (ROOT / page).read_text().splitlines() if len(line) > 40}
        for page in ("README.md", "docs/index.md")
    )
    assert len(readme & home) < 10


def test_all_of_the_package_is_on_one_page():
    text = (ROOT / "docs" / "all_of_eqxbatch.md").read_text()
    assert [x for x in eqxbatch.__all__ if not re.search(rf"\b{x}\b", text)] == []


@pytest.mark.docs
def test_pages_are_current():
    command = [sys.executable, "docs/theme/pages.py", "--check"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stdout}Run `python docs/theme/pages.py`."


def test_pictures_of_the_examples_are_in_their_index():
    index = (ROOT / "examples" / "README.md").read_text()
    names = sorted(x.stem for x in (ROOT / "examples").glob("*.py"))
    assert sorted(re.findall(r"\]\((\w+)\.py\)", index)) == names
    assert sorted(re.findall(r"\]\(pictures/(\w+)\.png\)", index)) == names
    for path in (ROOT / "examples" / "pictures").iterdir():
        assert path.stat().st_size < 30_000, path


def test_errors_name_extras_that_help():
    found = []
    for path in (ROOT / "eqxbatch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", "")
            if isinstance(node, ast.Call) and name.endswith("import_extra"):
                module, _, extra = node.args
                found.append(extra.value)
                assert module.value.partition(".")[0] in packages(extra.value), path
    assert {*found} == {"store", "cloud", "progress", "linalg"}


def test_extras_are_complete():
    parts = {"store", "progress", "linalg"}
    assert packages("store") <= packages("cloud") <= packages("test")
    for extra in EXTRAS.keys() - parts - {"cloud"}:
        for part in parts:
            assert packages(part) <= packages(extra), extra
    assert packages("docs") | packages("test") <= packages("dev")
    checks = runpy.run_path(str(ROOT / ".ci" / "extras.py"))["CHECKS"]
    assert checks.keys() == EXTRAS.keys() | {"none"}


def test_classifiers_are_of_the_versions_that_are_supported():
    found = [x.rpartition(" :: ")[2] for x in PROJECT["classifiers"] if "3." in x]
    assert found == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={found[0]}"


def test_pictures_of_examples_are_ignored_and_others_are_not():
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text()
        assert f'pathlib.Path("pictures", "{path.stem}.png")' in text
        assert re.findall(r"savefig\((\w+)", text) == ["path"], path
    ignored = (ROOT / ".gitignore").read_text().split()
    assert "/pictures/" in ignored
    assert not [x for x in ignored if x.endswith((".png", ".svg"))]


def test_contributing_names_what_there_is():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    for mark in settings["ini_options"]["markers"]:
        assert f"`{mark.partition(':')[0]}`" in text
    folders = [x.parent.name for x in (ROOT / "eqxbatch").glob("_*/__init__.py")]
    listed = re.findall(r"^- `(_\w+)`: ", text, re.M)
    assert sorted(listed) == sorted(folders)
    for path in re.findall(r"`((?:\.ci|tests|benchmarks)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(_\w+/\w+\.py)`", text):
        assert (ROOT / "eqxbatch" / path).exists(), path


def test_the_walk_of_a_call_names_what_there_is():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    stops = re.findall(r"^\| (\d+) \| `([\w/.]+)`: ([^|]+?) \|", text, re.M)
    assert [int(number) for number, *_ in stops] == [*range(1, 16)]
    for _, path, named in stops:
        source = (ROOT / "eqxbatch" / path).read_text()
        for name in re.findall(r"`([\w.]+)`", named.partition(", by")[0]):
            what = re.compile(rf"^ *(class|def) {name.rpartition('.')[2]}\b", re.M)
            assert what.search(source), (path, name)


@pytest.mark.parametrize("breakage", breakages.BREAKAGES, ids=lambda x: x.name)
def test_breakages_are_of_the_code_as_it_is(breakage):
    breakages.place(breakage, ROOT)
    assert breakage.old != breakage.new


def example(old, new, where="Some.method", **settings):
    return breakages.Breakage("an example", where, old, new, "tests", **settings)


BROKEN = """
def other(x):
    return x + 1

class Some:
    table = "a line, another line"

    def method(self, x):
        # Comments and layout do not count.
        if x:
            y = x + (
                1)
            return y * 2
        return x
"""


@pytest.mark.parametrize(
    ("breakage", "expected"),
    (
        (example("x + 1", "x - 1"), "y = x - 1"),
        (example("y = x + 1\nreturn y * 2", "pass"), "if x:\n            pass\n"),
        (example("return x", "return not x"), "return not x"),
        (example("another", "no", "Some.table", in_string=True), "a line, no line"),
        (example("y + 1", "y"), None),
        (example("x", "y"), None),
        (example("x + 1", "x", "method"), None),
        (example("line", "no", "Some.table", in_string=True), None),
    ),
)
def test_breakages_are_compared_as_syntax_trees(breakage, expected, tmp_path):
    file = tmp_path / "eqxbatch" / "module.py"
    file.parent.mkdir()
    file.write_text(BROKEN)
    if expected is None:
        with pytest.raises(SystemExit, match="'an example' is out of date"):
            breakages.broken(breakage, tmp_path)
    else:
        assert expected in breakages.broken(breakage, tmp_path)


def test_examples_are_in_the_docs():
    nav = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.stem}.md" in nav


def test_import_takes_what_equinox_takes():
    """No package that `import equinox` does not import, too."""
    packages = "{name.partition('.')[0] for name in sys.modules}"
    code = (
        f"import sys, equinox; before = {packages}; import eqxbatch; "
        f"print(*sorted({packages} - before - sys.stdlib_module_names))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["eqxbatch"], found.stderr


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert commands[0] == "pip install equinox-batch\n"
    assert len(commands) == 3
    ci = (ROOT / ".ci" / "run").read_text()
    for part in commands[2].strip().split(" && "):
        assert f" {part}\n" in ci
    assert "examples/quickstart.py" in commands[1]
    # Any Python that is supported; CI puts the newest one first on the path.
    assert all(x.startswith("python3 -m venv .venv && ") for x in commands[1:])


def test_lowest_versions_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    for line in (ROOT / ".ci" / "lowest.txt").read_text().split():
        name, version = line.split("==")
        (declared,) = re.findall(
            rf'^    "{name}>=([\d.]+)(?:,!=[\d.]+)*",$', project, re.M
        )
        assert declared == version


WRONG = runpy.run_path(str(ROOT / ".ci" / "wrong_releases.py"))


def test_wrong_releases_are_excluded():
    expected = [release.version for release in WRONG["RELEASES"]]
    for name in ("jax", "jaxlib"):
        (line,) = (x for x in PROJECT["dependencies"] if re.match(rf"{name}>", x))
        assert re.findall(r"!=([\d.]+)", line) == expected
    page = (ROOT / "docs" / "exact.md").read_text()
    assert all(version in page for version in expected)


@pytest.mark.versions
def test_this_release_is_not_known_to_be_wrong():
    assert [*WRONG["problems"]()] == []


@pytest.mark.docs
def test_table_of_layers_in_the_docs():
    page = ROOT / "docs" / "sites_layers.md"
    command = "python -m tests.layers > docs/sites_layers.md"
    assert page.read_text() == table(), f"Run `{command}`."


@pytest.mark.docs
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the table is made with newer JAX"
)
def test_table_of_patterns_in_the_docs():
    page = ROOT / "docs" / "sites_patterns.md"
    command = "python -m tests.patterns > docs/sites_patterns.md"
    assert page.read_text() == patterns.table(), f"Run `{command}`."


def test_summary_of_the_benchmarks_is_of_their_results():
    page = ROOT / "benchmarks" / "results" / "summary.md"
    command = "python -m benchmarks.chart"
    assert page.read_text() == chart.summary(chart.read()) + "\n", f"Run `{command}`."
