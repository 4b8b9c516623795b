"""The annotations of all public names, as a table in the docs.

`python -m tests.annotations > docs/annotations_table.md` writes it.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import eqxbatch
from eqxbatch import _OPERATORS as OPERATORS
from eqxbatch._base.shapes import CONTRACTS, text_of


# Methods that users call or implement.
METHODS = (
    "__call__",
    "aggregate",
    "begin",
    "close",
    "diagonal",
    "eigh",
    "estimate",
    "finalize",
    "init",
    "inverse",
    "logdet",
    "matvec",
    "merge",
    "mv",
    "as_matrix",
    "operator",
    "sqrt",
    "start",
    "step",
    "take",
    "trace",
    "update",
)


def names() -> list[str]:
    """All public names."""
    own = [x for x in vars(eqxbatch) if not x.startswith("_")]
    public = [x for x in own if not inspect.ismodule(getattr(eqxbatch, x))]
    return sorted({*public, *OPERATORS}, key=str.lower)


def rows() -> Iterator[tuple[str, str, str]]:
    """The call, the name of an argument or `returns`, and the annotation."""
    for name in names():
        public = getattr(eqxbatch, name)
        yield from of_call(name, public)
        methods = [x for x in METHODS if is_own(getattr(public, x, None))]
        if inspect.isclass(public) and "__call__" in methods:
            yield from of_call(f"{name}(...)", public.__call__)
        for contract in CONTRACTS:
            if name in contract.of:
                for argument, hint in contract.annotations.items():
                    yield f"{name}(...)", argument, text_of(hint)
        if inspect.isclass(public):
            for method in methods:
                if method != "__call__":
                    own = getattr(public, method)
                    yield from of_call(f"{name}(...).{method}", own)


def is_own(method: object) -> bool:
    return inspect.isfunction(method) and method.__module__.startswith("eqxbatch")


def of_call(name: str, fun: Callable) -> Iterator[tuple[str, str, str]]:
    signature = inspect.signature(fun)
    # A field may be converted from anything, but its own type is checked.
    fields = {x.name: x.type for x in getattr(fun, "__dataclass_fields__", {}).values()}
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        argument = f"{stars.get(parameter.kind, '')}{parameter.name}"
        hint = parameter.annotation
        if hint is Any:
            hint = fields.get(parameter.name, hint)
        yield name, argument, of_hint(hint)
    if not inspect.isclass(fun):
        yield name, "returns", of_hint(signature.return_annotation)


def of_hint(hint: object) -> str:
    text = "Any" if hint is inspect.Signature.empty else text_of(hint)
    # The name of a private class means nothing to users.
    return "a state" if text.startswith("_") else text


def table() -> str:
    lines = ["| call | argument | annotation |", "|---|---|---|"]
    last = ""
    for call, argument, hint in rows():
        shown = "" if call == last else f"`{call}`"
        lines.append(f"| {shown} | `{argument}` | `{hint}` |")
        last = call
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
