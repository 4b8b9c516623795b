"""Runs the examples and writes them as pages, with what they print and plot.

`python docs/theme/examples.py` writes `build/examples/NAME.md` for each
`examples/NAME.py`, and its pictures; `mkdocs build` does so, too, and adds them to the
site. Each example runs in a process of its own, as many at a time as there are cores. A
page that was made with the same code stays as it is.
"""

import ast
import concurrent.futures
import contextlib
import hashlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGES = ROOT / "build" / "examples"
CELL = re.compile(r"^# %%(?P<text> \[markdown\])?\n", re.MULTILINE)
MARKUP = re.compile(r"\[([^\]]*)\]\([^)]*\)|[`*]")


def cells(code: str) -> Iterator[tuple[bool, str]]:
    """The cells of an example: whether it is text, and its lines without the marks."""
    _, *parts = CELL.split(code)
    for mark, content in zip(parts[::2], parts[1::2], strict=True):
        is_text = mark is not None
        lines = content.strip("\n").splitlines()
        yield is_text, "\n".join(x[2:] if is_text else x for x in lines)


def run(code: str, variables: dict[str, Any]) -> str:
    """What a cell prints, and the value of its last line, as in a Python session."""
    tree = ast.parse(code)
    value = isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";")
    last = ast.Expression(tree.body.pop().value) if value else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "example", "exec"), variables)
        if last is not None:
            sys.displayhook(eval(compile(last, "example", "eval"), variables))
    return printed.getvalue()


def pictures(name: str, text: str, first: int) -> Iterator[str]:
    """Saves the open plots, and describes them by the paragraph above them."""
    import matplotlib.pyplot as plt

    paragraph = " ".join(MARKUP.sub(r"\1", text.split("\n\n")[-1]).split())
    for number, figure in enumerate(plt.get_fignums(), first):
        file = f"{name}_{number}.png"
        plt.figure(figure).savefig(PAGES / file, dpi=144, bbox_inches="tight")
        yield f"![Plot. {paragraph}]({file})"
    plt.close("all")


def page(name: str, code: str) -> str:
    """Runs an example, here and now."""
    link = f"[Download this example: `{name}.py`]({name}.py){{ download=true }}"
    parts, text, plotted = [], "", 0
    variables = {"__name__": "__main__"}
    for is_text, content in cells(code):
        if is_text:
            text = content
            parts.append(content)
            continue
        printed = run(content, variables).rstrip("\n")
        plots = list(pictures(name, text, plotted + 1))
        plotted += len(plots)
        parts.append(f"```python\n{content}\n```")
        if printed:
            parts.append(f"```{{ .text .output .no-copy }}\n{printed}\n```")
        parts.extend(plots)
    # Below the heading.
    heading, _, rest = "\n\n".join(parts).partition("\n")
    return f"{heading}\n\n{link}\n{rest}\n"


def write(example: pathlib.Path, package: str) -> None:
    """Writes the page of an example, unless it is there."""
    code = example.read_text()
    key = hashlib.sha256((package + code).encode()).hexdigest()
    comment = f"\n<!-- {key} -->\n"
    path = PAGES / f"{example.stem}.md"
    if path.exists() and path.read_text().endswith(comment):
        return
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), str(example)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **variables}, stdout=subprocess.PIPE
        )
    if done.returncode:
        raise SystemExit(f"{example.name} failed; see above.")
    path.write_text(done.stdout.decode() + comment)


def write_all() -> list[pathlib.Path]:
    """Makes the folder of pages, and returns what is in it."""
    PAGES.mkdir(parents=True, exist_ok=True)
    sources = [pathlib.Path(__file__), *sorted((ROOT / "eqxbatch").rglob("*.py"))]
    package = "".join(x.read_text() for x in sources)
    examples = sorted(EXAMPLES.glob("*.py"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda x: write(x, package), examples))
    names = {x.stem for x in examples}
    pages = [x for x in PAGES.iterdir() if re.sub(r"_\d+$", "", x.stem) in names]
    return examples + pages


def on_files(files: Any, *, config: Any) -> Any:
    """A hook of MkDocs."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in write_all():
        name = f"examples/{path.name}"
        file = File.generated(
            config, name, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED
        )
        files.append(file)
    return files


if __name__ == "__main__":
    if len(sys.argv) > 1:
        path = pathlib.Path(sys.argv[1])
        sys.stdout.write(page(path.stem, path.read_text()))
    else:
        write_all()
