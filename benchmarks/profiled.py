"""Where the time of a program goes: the shares of its operations, by kind."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

from . import limit


OTHER = "moving data"
# What the operations of a program are said to be, in the order in which they are asked
# for: what contains a product is one.
_KINDS = {
    limit.PRODUCTS: ("dot", "convolution", "ragged-dot"),
    "calls of libraries": ("custom-call",),
    "sorting": ("sort", "topk"),
    "lookups": ("gather", "scatter"),
    "sums": ("reduce", "reduce-window"),
    "random numbers": ("rng-bit-generator", "shift-right-logical"),
    "functions of single entries": (
        *("exponential", "tanh", "log", "logistic", "sine", "cosine", "power"),
        *("divide", "sqrt", "rsqrt", "multiply", "add", "subtract", "maximum"),
        *("select", "compare", "minimum", "and", "or", "negate", "abs"),
    ),
}
# They contain others, whose time is counted.
_CONTAINERS = ("while", "conditional", "call")


def profile(call: Callable[[], Any], rounds: int = 3) -> dict[str, float]:
    """The shares of the time of all programs that `call` runs, by kind of operation.

    They are empty if JAX's profiler saw none, or one that no compiled program has.

    `call` ran before, so that everything is compiled. A fusion counts for the first
    kind that it contains.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                jax.block_until_ready(call())
        spent: collections.Counter[tuple[str, str]] = collections.Counter()
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            spent += _seconds_by_operation(
                jax.profiler.ProfileData.from_file(str(path))
            )
    kinds = _kinds_of_operations(spent)
    if not spent.keys() <= kinds.keys():
        return {}
    shares: collections.Counter[str] = collections.Counter()
    for operation, seconds in spent.items():
        kind = kinds[operation]
        if kind is not None:
            shares[kind] += seconds
    total = sum(shares.values())
    return {kind: x / total for kind, x in shares.items()} if total else {}


def _seconds_by_operation(data: Any) -> "collections.Counter[tuple[str, str]]":
    """By the names of module and operation."""
    spent: collections.Counter[tuple[str, str]] = collections.Counter()
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and not event.name.startswith("end:"):
                    name = str(stats.get("hlo_module", "")), str(stats["hlo_op"])
                    spent[name] += event.duration_ns / 1e9
    return spent


def _kinds_of_operations(
    found: Iterable[tuple[str, str]],
) -> dict[tuple[str, str], str | None]:
    """The kind of each operation, by the names of module and operation.

    None is for what contains other operations.
    """
    names: dict[str, set[str]] = {}
    for module, operation in found:
        names.setdefault(module, set()).add(operation)
    # Several programs can have one name: that which has all operations, and few others.
    programs: dict[str, dict[str, str | None]] = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            kinds = _kinds_in(module.to_string()) if module.name in names else {}
            best = programs.get(module.name)
            is_smaller = best is None or len(kinds) < len(best)
            if is_smaller and names.get(module.name, {""}) <= kinds.keys():
                programs[module.name] = kinds
    return {
        (module, name): kind
        for module, kinds in programs.items()
        for name, kind in kinds.items()
    }


_EQUATION = re.compile(r"^\s*(?:ROOT )?%(\S+) = .*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)


def _kinds_in(text: str) -> dict[str, str | None]:
    bodies = {}
    for part in re.split(r"\n(?=%|ENTRY)", text):
        head = re.match(r"(?:ENTRY )?%(\S+) \(", part)
        if head is not None:
            bodies[head[1]] = part
    kinds: dict[str, str | None] = {}
    for part in bodies.values():
        for line in part.splitlines():
            found = _EQUATION.match(line)
            if found is None:
                continue
            name, operation = found.groups()
            called = re.search(r"calls=%([^\s,]+)", line)
            inside = {operation}
            if called is not None:
                inside |= {x[2] for x in _EQUATION.finditer(bodies.get(called[1], ""))}
            kinds[name] = None if operation in _CONTAINERS else _kind(inside)
    return kinds


def _kind(operations: set[str]) -> str:
    found = (kind for kind, names in _KINDS.items() if operations & {*names})
    return next(found, OTHER)
