"""The code on all pages of the docs runs as it is written."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from . import pages
from .flags import LLVM_FAST


ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
)
# What a reader can tell from the name of a language: only `python` is run.
LANGUAGES = {"python", "sh", "text", "bibtex"}


def blocks(page: str) -> list[pages.Block]:
    return list(pages.blocks((ROOT / page).read_text()))


def has_code(page: str) -> bool:
    """Whether a page has a program: API pages have docstrings, which are run there."""
    is_api = "<!-- api " in (ROOT / page).read_text()
    return not is_api and any(block.language == "python" for block in blocks(page))


def run(path: pathlib.Path, folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a page in a process of its own, with what users have: JAX's own settings.

    Only LLVM does less, because most of the time goes into programs that run once.
    """
    python = str(pathlib.Path(sys.executable).parent)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "XLA_FLAGS": LLVM_FAST,
        "MPLBACKEND": "agg",
        "PATH": python + os.pathsep + os.environ.get("PATH", ""),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-W", "error", "-m", "tests.pages", str(path)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )


def run_text(text: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    page = folder / "page.md"
    page.write_text(text)
    return run(page, folder)


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)])
def test_code_on_the_pages_runs(page, tmp_path):
    done = run(ROOT / page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_no_code_is_left_out(page):
    found = blocks(page)
    assert len(found) * 2 == (ROOT / page).read_text().count("```")
    assert {block.language for block in found} <= LANGUAGES
    # What is copied runs: no prompts.
    assert not any(">>> " in block.code for block in found)
    # A file on a page is run by a command on the page.
    commands = "".join(block.code for block in found if block.language == "sh")
    assert all(block.title in commands for block in found if block.title)


def test_blocks_of_a_page_are_one_program(tmp_path):
    in_a_list = "- In a list:\n\n    ```python\n    print(x + 1)\n    ```\n"
    text = f"```python\nx = 1\n```\n\n{in_a_list}"
    text += '\n```python title="a.py"\nprint(3)\n```\n\n```sh\npython a.py\n```\n'
    assert {*run_text(text, tmp_path).stdout.split()} == {"2", "3"}
    assert (
        "exit status 1" in run_text(text.replace("print(3)", "1 / 0"), tmp_path).stderr
    )
    failed = run_text("Words.\n\n```python\nx = 1\n\n1 / 0\n```\n", tmp_path)
    assert failed.returncode == 1
    assert 'page.md", line 6' in failed.stderr


@pytest.mark.parametrize(
    ("line", "is_right"),
    (
        ("np.ones((2, 3))  # (2, 3), a matrix", True),
        ("np.ones((2, 3))  # (3, 2)", False),
        ("x = np.ones(2)  # (2,)", True),
        ("x = np.ones(2)  # (3,)", False),
        ("x, y = np.ones(2), np.ones(())  # (2,), ()", True),
        ("x, y = np.ones(2), np.ones(3)  # (2,), ()", False),
        ("max(\n    3,\n    4,\n)  # 5", False),
        ("[1, 2]  # [1, 2]", True),
        ("[1, 2]  # [2, 1]", False),
        ("[1, 2]  # (see above)", True),
    ),
)
def test_comments_are_checked(line, is_right):
    (block,) = pages.blocks(f"```python\nimport numpy as np\n\n{line}\n```\n")
    wrong = pytest.raises(AssertionError, match="is not what the comment says")
    with contextlib.nullcontext() if is_right else wrong:
        pages.run_python(block, "page.md", {})


@pytest.mark.parametrize("page", ("README.md", "docs/index.md"))
def test_numbers_of_the_first_screen_are_measured(page):
    results = ROOT / "benchmarks" / "results" / "first_screen.json"
    sentence = json.loads(results.read_text())["sentence"]
    assert sentence in " ".join((ROOT / page).read_text().split())
