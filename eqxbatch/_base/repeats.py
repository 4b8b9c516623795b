"""Programs in which equal equations run once.

Nested derivatives compute many values again: the second derivative by `jax.jvp` of
`jax.jvp` along one direction computes the first one twice. XLA removes such repeats;
what looks at the uses of a value must not count them twice.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from .jaxpr_types import Eqn, Jaxpr, JaxprAndConsts, Rule, Value
from .jaxprs import as_called, callee, evaluate_with, run_equation
from .primitives import CALLS, name_of
from .trees import safe_zip
from .versions import scan_sizes


def without_repeats(closed: JaxprAndConsts, num: int) -> JaxprAndConsts:
    """A closed jaxpr without repeats of what depends on its first `num` inputs.

    It is returned as it is if it has none of these. Two equations are equal if they
    have the same primitive, operands and parameters.
    """
    if closed.jaxpr.effects:
        return closed
    repeats: list[Eqn] = []

    def run(*args: Any) -> list:
        return _Evaluation(args[:num], repeats).of(closed, args)

    merged = jax.make_jaxpr(run)(*(var.aval for var in closed.jaxpr.invars))
    return merged if repeats else closed


class _Evaluation:
    """Evaluates programs, each equation once.

    Repeats of equations that depend on `moved` are added to `repeats`.
    """

    def __init__(self, moved: Sequence[Value], repeats: list[Eqn]) -> None:
        # Values are told apart by identity, so all that were seen are kept.
        self._moved, self._repeats = {id(x): x for x in moved}, repeats
        self._known: dict[Hashable, tuple[Sequence[Value], list]] = {}

    def of(self, closed: JaxprAndConsts, args: Sequence[Value]) -> list:
        """The outputs of a program, each of whose equations may be known."""
        jaxpr = closed.jaxpr

        def replace(_: int, eqn: Eqn) -> Rule:
            return lambda ins: self._outputs(jaxpr, eqn, ins)

        return evaluate_with(jaxpr, closed.consts, args, replace)

    def _outputs(self, jaxpr: Jaxpr, eqn: Eqn, ins: list[Value]) -> list:
        # Only inside of calls are their values known to be equal.
        inner = callee(eqn) if name_of(eqn) in CALLS else None
        if inner is not None and not eqn.effects and _is_plain(eqn):
            return self.of(inner, ins)
        key = _key(eqn, ins)
        is_moved = any(id(x) in self._moved for x in ins)
        if key in self._known:
            self._repeats += [eqn] if is_moved else []
            return self._known[key][1]
        run: Callable[..., list] = run_equation(jaxpr, eqn, eqn.outvars)
        outs = self._scan(eqn, ins) if name_of(eqn) == "scan" else run(*ins)
        self._moved.update((id(x), x) for x in (outs if is_moved else []))
        if key is not None:
            self._known[key] = (ins, outs)
        return outs

    def _scan(self, eqn: Eqn, ins: list[Value]) -> list:
        """A `scan` whose body has no repeats."""
        params, (first, num) = eqn.params, scan_sizes(eqn)
        consts, carry, xs = ins[:first], ins[first : first + num], ins[first + num :]
        are_moved = [id(x) in self._moved for x in ins]

        def body(carry: list[Value], slices: list[Value]) -> tuple[list, list]:
            args = [*consts, *carry, *slices]
            moved = [x for x, is_one in safe_zip(args, are_moved) if is_one]
            outs = _Evaluation(moved, self._repeats).of(params["jaxpr"], args)
            return outs[:num], outs[num:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, carry, xs, **options)
        return [*carry, *ys]


def _is_plain(eqn: Eqn) -> bool:
    """Whether a call says no more than what it computes."""
    run: Callable[..., Any] = lambda *_: None
    return as_called(eqn, run) is run


def _key(eqn: Eqn, ins: Sequence[Value]) -> Hashable:
    """Equal for two equations with equal outputs; None if that is not known."""
    if name_of(eqn) == "rng_uniform":  # Each draws anew.
        return None
    operands = (
        (repr(atom.aval), np.asarray(atom.val).tobytes())
        if isinstance(atom, jex.Literal)
        else id(x)
        for atom, x in safe_zip(eqn.invars, ins)
    )
    key = (eqn.primitive, *operands, *sorted(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key
