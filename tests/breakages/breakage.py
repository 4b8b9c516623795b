"""What a breakage is, and how it is applied to the package.

A breakage names a function and a piece of code in it. Code is compared as syntax trees,
so that a breakage outlives changes of the lines around it, of comments and of layout,
and moves of its function to another file.
"""

import ast
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Breakage:
    """In a function, `old` becomes `new`; the tests are what pytest is given.

    - `where`: the function, class, or variable of a module, in any file: `function` or
        `Class.method`. If several have that name, `old` is in one of them.
    - `old`, `new`: two expressions, or else one or more statements each. With
        `in_string`, they are parts of a string, such as the lines of a table.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str
    in_string: bool = False


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where a syntax tree has the old code: some entries of a list, or a field."""

    parent: ast.AST
    field: str
    entries: slice | None

    def put(self, new: list[Any]) -> None:
        if self.entries is None:
            (node,) = new
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.entries] = new


def place(breakage: Breakage, root: pathlib.Path) -> pathlib.Path:
    """The file of a breakage; raises if its old code is not there, or not once."""
    found = [
        path
        for path in _files(root).get(breakage.where, ())
        for _ in _slots(breakage, _named(path)[breakage.where])
    ]
    if len(found) == 1:
        return found[0]
    raise SystemExit(
        f"'{breakage.name}' is out of date: its old code is {len(found)} times in "
        f"`{breakage.where}`, and must be there once."
    )


def broken(breakage: Breakage, root: pathlib.Path) -> str:
    """The text of the broken file, without its comments."""
    module = ast.parse(place(breakage, root).read_text())
    nodes = [node for name, node in _definitions(module) if name == breakage.where]
    ((slot, new),) = _slots(breakage, nodes)
    slot.put(new)
    return ast.unparse(ast.fix_missing_locations(module))


@functools.cache
def _named(path: pathlib.Path) -> dict[str, list[ast.AST]]:
    """The definitions of a file by their qualified names, which may be repeated."""
    named: dict[str, list[ast.AST]] = {}
    for name, node in _definitions(ast.parse(path.read_text())):
        named.setdefault(name, []).append(node)
    return named


@functools.cache
def _files(root: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """The files of the package in which each name is defined."""
    files: dict[str, list[pathlib.Path]] = {}
    for path in sorted((root / "eqxbatch").rglob("*.py")):
        for name in _named(path):
            files.setdefault(name, []).append(path)
    return files


def _definitions(parent: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions, classes, methods and variables of a module, with their names."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x.id for x in targets if isinstance(x, ast.Name)]
            yield from ((prefix + name, node) for name in names)


def _slots(
    breakage: Breakage, nodes: list[ast.AST]
) -> Iterator[tuple[_Slot, list[Any]]]:
    """Each place of the old code in some syntax trees, with the new code for it."""
    old, new = breakage.old, breakage.new
    parents = [parent for node in nodes for parent in ast.walk(node)]
    if breakage.in_string:
        for parent in parents:
            text = getattr(parent, "value", None)
            for _ in range(text.count(old) if isinstance(text, str) else 0):
                yield _Slot(parent, "value", None), [str(text).replace(old, new)]
        return
    wanted, replacement = _parsed(old, new)
    for parent in parents:
        for field, value in ast.iter_fields(parent):
            entries = value if isinstance(value, list) else [value]
            for start in range(len(entries) + 1 - len(wanted)):
                piece = slice(start, start + len(wanted))
                if _dumped(entries[piece]) == _dumped(wanted):
                    is_list = isinstance(value, list)
                    yield _Slot(parent, field, piece if is_list else None), replacement


def _parsed(old: str, new: str) -> tuple[list[ast.AST], list[ast.AST]]:
    """Both as expressions, or as statements if one of them is none."""
    try:
        return [ast.parse(old, mode="eval").body], [ast.parse(new, mode="eval").body]
    except SyntaxError:
        return [*ast.parse(old).body], [*ast.parse(new).body]


def _dumped(nodes: list[Any]) -> list[str | None]:
    return [ast.dump(x) if isinstance(x, ast.AST) else None for x in nodes]
