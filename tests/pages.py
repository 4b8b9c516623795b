"""Runs the code on a page of the docs: `python -m tests.pages docs/index.md`.

All blocks of Python on a page are one program: they run in order, in this process. A
block with a title is a file instead: it is written to the working directory, and the
commands on the page that name it run in the shell.

Comments with results are checked: `f(x)  # (50, 3)` for a shape, `f(x)  # [1, 2]` for a
value.
"""

import ast
import dataclasses
import io
import pathlib
import re
import subprocess
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterator
from typing import Any


FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<attributes>[^\n]*)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHAPE = r"\((?:\d[\d_]*(?:, \d[\d_]*)*,?)?\)"
SHAPES = re.compile(rf"{SHAPE}(?:, {SHAPE})*(?=$|[\s,;:.])")
NUMBERS = re.compile(r"[\d_]+$|\[.*\]$")
# The seconds that one command of a page may take.
TIMEOUT = 600


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of code, and the line of the page where it begins."""

    language: str
    title: str | None
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        title = re.search(r'title="([^"]*)"', found["attributes"])
        yield Block(
            language=found["language"],
            title=title and title[1],
            code=textwrap.dedent(found["code"]),
            line=text.count("\n", 0, found.start("code")) + 1,
        )


def stated(comment: str) -> tuple[str, Any] | None:
    """The shapes or the value of a result, as a comment states them."""
    if found := SHAPES.match(comment):
        shapes = re.findall(SHAPE, found[0])
        return "shapes", [ast.literal_eval(shape) for shape in shapes]
    if NUMBERS.match(comment):
        return "value", ast.literal_eval(comment)
    return None


def comments(code: str) -> dict[int, str]:
    """The comment behind the code of each line."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {
        token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.lstrip()[:1] != "#"
    }


def check(result: Any, comment: str) -> None:
    said = stated(comment)
    if said is None:
        return
    kind, expected = said
    if kind == "value":
        found = result
    else:
        results = [result] if len(expected) == 1 else result
        found = [tuple(x.shape) for x in results]
    assert found == expected, f"{found} is not what the comment says: {comment}"


def run_python(block: Block, page: str, names: dict[str, Any]) -> None:
    """Runs a block statement by statement, with the line numbers of the page."""
    tree = ast.parse(block.code)
    ast.increment_lineno(tree, block.line - 1)
    behind = comments(block.code)
    for node in tree.body:
        comment = behind.get((node.end_lineno or 0) - block.line + 1, "")
        if isinstance(node, ast.Expr):
            code = compile(ast.Expression(node.value), page, "eval")
            check(eval(code, names), comment)
            continue
        exec(compile(ast.Module([node], []), page, "exec"), names)
        if isinstance(node, ast.Assign):
            # Evaluates the target, which a name, an attribute or a tuple allows.
            target = ast.parse(ast.unparse(node.targets[0]), mode="eval")
            check(eval(compile(target, page, "eval"), names), comment)


def run_page(path: str) -> None:
    # As if the page were a program of its own.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    titles = []
    for block in blocks(pathlib.Path(path).read_text()):
        if block.title is not None:
            pathlib.Path(block.title).write_text(block.code)
            titles.append(block.title)
        elif block.language == "python":
            run_python(block, path, vars(main))
        elif block.language == "sh" and any(x in block.code for x in titles):
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            subprocess.run(command, check=True, timeout=TIMEOUT)


if __name__ == "__main__":
    run_page(sys.argv[1])
