"""Entries of the API pages in plain Markdown, from signatures and docstrings."""

import functools
import pathlib
import re
import subprocess
import sys
import textwrap

import griffe
import ruff


ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

from constructors import Constructors  # noqa: E402


WIDTH = 80
# How the kinds of parameters are written.
STARS = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}
ADMONITION = re.compile(r"^(?:!!!|\?\?\?) (\w+)\n\n((?:    .*\n|\n)+)", re.MULTILINE)
TITLES = {"example": "**Example:**", "cite": "**References:**"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@functools.cache
def package() -> griffe.Object | griffe.Alias:
    """The package, as its source says, with the constructors that users call."""
    extensions = griffe.Extensions(Constructors())
    return griffe.load("eqxbatch", search_paths=[ROOT], extensions=extensions)


def heading(name: str) -> str:
    return name.removeprefix("eqxbatch.")


def entry(name: str, members: list[str]) -> str:
    """A public name, its signature and its docstring; and those of some members."""
    parts = [object_text(package()[heading(name)], heading(name), "###")]
    for member in members:
        found = package()[heading(name)].all_members[member]
        parts.append(object_text(found, f"{heading(name)}.{member}", "####"))
    return "\n\n".join(parts)


def object_text(obj: griffe.Object | griffe.Alias, name: str, level: str) -> str:
    if obj.is_alias:
        obj = obj.final_target
    docstring = "" if obj.docstring is None else obj.docstring.value
    parts = [f"{level} `{name}`"]
    parameters, returns = parameters_of(obj)
    if parameters is not None:
        called = name if level == "###" else name.rpartition(".")[2]
        parts.append(f"```python\n{signature(called, parameters, returns)}\n```")
    return "\n\n".join([*parts, plain(docstring)]).rstrip()


def parameters_of(obj: griffe.Object) -> tuple[griffe.Parameters | None, str]:
    if obj.is_function:
        returns = "" if obj.returns is None else str(obj.returns)
        return obj.parameters, returns
    if obj.is_class and "__init__" in obj.all_members:
        init = obj.all_members["__init__"]
        return getattr(init, "final_target", init).parameters, ""
    return None, ""


def signature(name: str, parameters: griffe.Parameters, returns: str) -> str:
    """On one line if it fits, and otherwise with a line for each parameter."""
    words = []
    star = slash = False
    for parameter in parameters:
        kind = parameter.kind
        if parameter.name in ("self", "cls"):
            continue
        if slash and kind is not griffe.ParameterKind.positional_only:
            words.append("/")
        slash = kind is griffe.ParameterKind.positional_only
        if kind is griffe.ParameterKind.keyword_only and not star:
            words.append("*")
        star |= kind in (
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_positional,
        )
        words.append(STARS.get(kind, "") + with_annotation(parameter))
    if slash:
        words.append("/")
    arrow = f" -> {returns}" if returns else ""
    line = f"{name}({', '.join(words)}){arrow}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"


def with_annotation(parameter: griffe.Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
    is_star = parameter.kind in STARS
    if parameter.default is None or is_star:
        return text
    space = " " if parameter.annotation is not None else ""
    return f"{text}{space}={space}{parameter.default}"


def plain(docstring: str) -> str:
    """A docstring without the marks that only some viewers of Markdown know."""
    text = ADMONITION.sub(admonition, docstring + "\n")
    return FENCE.sub(fence, text).rstrip()


def fence(found: re.Match[str]) -> str:
    """A block of code as one that is copied and runs, or as text."""
    language, code = found.groups()
    if code.startswith(">>> "):
        return program(code)
    return f"```{language or 'text'}\n{code}```"


def admonition(found: re.Match[str]) -> str:
    return f"{TITLES[found[1]]}\n\n{textwrap.dedent(found[2])}"


def program(session: str) -> str:
    """A Python session as a program, with what it prints in comments."""
    lines: list[str] = []
    for line in session.splitlines():
        if line.startswith((">>> ", "... ")) or line in (">>>", "..."):
            lines.append(line[4:])
        elif line:
            lines.append(f"# {line}")
    code = formatted("\n".join(lines))
    return f"```python\n{code}```"


def formatted(code: str) -> str:
    """Code as `ruff format`, which also reads pages, leaves it."""
    command = [ruff.find_ruff_bin(), "format", "--stdin-filename", "page.py", "-"]
    done = subprocess.run(
        command, input=code, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout
