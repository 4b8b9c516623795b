"""Where the time of a program goes: the shares of its operations, by kind."""

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

from . import limit


PRODUCTS, OTHER = "products", "moving data"
# What the operations of a program are said to be, in the order in which they are asked
# for: what contains a product is one.
_KINDS = {
    PRODUCTS: ("dot", "convolution", "custom-call", "ragged-dot"),
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


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of a program by the kind of its operations, as shares of the whole."""

    shares: dict[str, float]

    def explain(self, work: limit.Work) -> limit.Work:
        """The work with a reason: the kinds with at least a tenth of the time."""
        kinds = sorted(self.shares.items(), key=lambda item: -item[1])
        named = [f"{kind} {share:.0%}" for kind, share in kinds if share >= 0.1]
        share = self.shares.get(PRODUCTS, 0.0)
        return dataclasses.replace(work, reason=", ".join(named), products=share)


def profile(call: Callable[[], Any], rounds: int = 3) -> Profile | None:
    """That of all programs that `call` runs; None if JAX's profiler saw none.

    It was called before, so that everything is compiled. Of a fusion, all counts for
    the first kind that it contains.
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
    kinds = _kinds_of_operations({module for module, _ in spent})
    shares: collections.Counter[str] = collections.Counter()
    for operation, seconds in spent.items():
        kind = kinds.get(operation, OTHER)
        if kind is not None:
            shares[kind] += seconds
    total = sum(shares.values())
    return Profile({kind: x / total for kind, x in shares.items()}) if total else None


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


def _kinds_of_operations(modules: Iterable[str]) -> dict[tuple[str, str], str | None]:
    """The kind of each operation of the compiled programs with some names.

    None is for what contains other operations.
    """
    kinds: dict[tuple[str, str], str | None] = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name in modules:
                found = _kinds_in(module.to_string())
                kinds |= {(module.name, name): kind for name, kind in found.items()}
    return kinds


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
