"""Programs as lines of text, and which programs a call compiles."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.extend.core as jex
import numpy as np
from jax.core import Tracer


# What names functions, or says where they are.
_LEFT_OUT = frozenset(("name", "debug_info", "ctx_mesh"))


@dataclasses.dataclass(frozen=True)
class Line:
    """An equation.

    - `text`: its primitive, parameters and results, and the primitives that its inputs
        are from. This stays the same if equations elsewhere are added.
    - `inputs`: the positions of the inputs.
    """

    text: str
    inputs: str


@dataclasses.dataclass
class Totals:
    equations: int = 0
    flops: int = 0
    largest: int = 0


def lines_of(closed: Any, totals: Totals) -> Iterator[Line]:
    """The lines of a closed jaxpr, and of all programs in it."""
    yield from _lines(closed.jaxpr, closed.consts, totals, "", 1)


def digest(lines: list[Line]) -> str:
    text = "\n".join(f"{line.text} @ {line.inputs}" for line in lines)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _lines(
    jaxpr: Any, consts: list | None, totals: Totals, indent: str, times: int
) -> Iterator[Line]:
    sources: dict[Any, str] = {}
    numbers: dict[Any, int] = {}

    def add(var: Any, source: str) -> None:
        sources[var], numbers[var] = source, len(numbers)

    def read(atoms: list) -> tuple[str, str]:
        is_literal = [isinstance(x, jex.Literal) for x in atoms]
        pairs = [*zip(atoms, is_literal, strict=True)]
        texts = [_value(x.val) if literal else sources[x] for x, literal in pairs]
        places = ["-" if literal else str(numbers[x]) for x, literal in pairs]
        return ", ".join(texts), " ".join(places)

    # Constants and arguments.
    for i, var in enumerate(jaxpr.constvars):
        add(var, f"constant{i}")
        value = f" {_value(consts[i])}" if consts else ""
        yield Line(f"{indent}constant{i} {_type(var)}{value}", "")
    for i, var in enumerate(jaxpr.invars):
        add(var, f"input{i}")
    types = ", ".join(map(_type, jaxpr.invars))
    yield Line(f"{indent}inputs {types}", "")

    # Equations, each with the programs in its parameters.
    for eqn in jaxpr.eqns:
        name, params = _primitive(eqn)
        texts, places = read(eqn.invars)
        outs = ", ".join(map(_type, eqn.outvars))
        yield Line(f"{indent}{name}{_shown(params)} {outs} <- {texts}", places)
        for i, var in enumerate(eqn.outvars):
            add(var, name if len(eqn.outvars) == 1 else f"{name}.{i}")
        _count(eqn, params, totals, times)
        inner = times * params.get("length", 1) if name == "scan" else times
        for label, program in _programs(params):
            yield Line(f"{indent}  {label}:", "")
            is_closed = isinstance(program, jex.ClosedJaxpr)
            body = program.jaxpr if is_closed else program
            values = program.consts if is_closed else None
            yield from _lines(body, values, totals, indent + "    ", inner)

    texts, places = read(jaxpr.outvars)
    yield Line(f"{indent}return {texts}", places)


def _primitive(eqn: Any) -> tuple[str, dict[str, Any]]:
    """The name and parameters, also of objects in place of primitives."""
    if "_prim" not in eqn.params:
        return eqn.primitive.name, eqn.params
    prim = eqn.params["_prim"]
    return f"{eqn.primitive.name}:{type(prim).__name__}", prim.params


def _programs(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in sorted(params):
        value = params[key]
        for x in value if isinstance(value, (tuple, list)) else (value,):
            x = x.jaxpr if isinstance(x, jax.stages.Traced) else x
            if isinstance(x, (jex.ClosedJaxpr, jex.Jaxpr)):
                yield key, x


def _shown(params: dict[str, Any]) -> str:
    with_programs = {key for key, _ in _programs(params)}
    shown = []
    for key in sorted(params.keys() - with_programs - _LEFT_OUT):
        value = params[key]
        # Most of what is not given says nothing.
        if not callable(value) and (value is not None or key == "precision"):
            # Objects without a text of their own have an address.
            text = re.sub(r" at 0x[0-9a-f]+", "", str(value))
            shown.append(f"{key}={text}")
    return f"[{' '.join(shown)}]" if shown else ""


def _type(atom: Any) -> str:
    weak = "~" if getattr(atom.aval, "weak_type", False) else ""
    return f"{atom.aval}{weak}"


def _value(x: Any) -> str:
    if np.ndim(x) == 0 and not isinstance(x, jax.Array):
        return str(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.size == 1:
        return str(x)
    return "#" + hashlib.blake2b(x.tobytes(), digest_size=4).hexdigest()


def _count(eqn: Any, params: dict[str, Any], totals: Totals, times: int) -> None:
    """Adds an equation that runs so many times; of `cond`, all branches."""
    totals.equations += 1
    totals.flops += times * _flops(eqn, params)
    for var in eqn.outvars:
        dtype = getattr(var.aval, "dtype", None)
        size = math.prod(getattr(var.aval, "shape", ()))
        totals.largest = max(totals.largest, size * getattr(dtype, "itemsize", 0))


def _flops(eqn: Any, params: dict[str, Any]) -> int:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        length = math.prod(shape[i] for i in contracted)
    elif eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        length = kernel.size // kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    else:
        return 0
    return 2 * length * eqn.outvars[0].aval.size


class _Recording:
    """What `jax.jit` returns, which notes each program that it traces by itself."""

    def __init__(self, fun: Callable, settings: dict[str, Any]):
        @functools.wraps(fun)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num += 1
            return fun(*args, **kwargs)

        self.num = 0
        self.jitted = _JIT(counted, **settings)
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        if not any(isinstance(x, Tracer) for x in leaves):
            before, traced = self.num, self.jitted.trace(*args, **kwargs)
            if self.num != before:
                _FOUND.append(traced.jaxpr)
        return self.jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


_JIT = jax.jit
_FOUND: list[Any] = []


def _jit(fun: Callable, **settings: Any) -> _Recording:
    return _Recording(fun, settings)


def noting_programs() -> contextlib.AbstractContextManager:
    """A context in which `jax.jit` makes functions that note what they compile.

    The package is imported in it, and called in it.
    """
    return mock.patch.object(jax, "jit", _jit)


def noted(call: Callable[[], Any]) -> list[Any]:
    """The programs that a call compiles, in their order."""
    _FOUND.clear()
    call()
    return [*_FOUND]
