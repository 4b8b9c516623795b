"""Evaluating jaxprs, wholly or with some of their equations replaced."""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array


CALLS = ("pjit", "jit", "closed_call", "core_call")


def callee(eqn: Any) -> Any:
    """The closed jaxpr that an equation in `CALLS` calls."""
    params = eqn.params
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def literal(atom: Any) -> Array:
    """The value of a literal in its own dtype, which a Python number does not have."""
    return jnp.asarray(atom.val, atom.aval.dtype)


def evaluate_jaxpr(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr as it is."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))(*args)


def evaluate_with(
    jaxpr: Any,
    consts: list,
    args: list,
    replace: Callable[[int, Any], Callable[[list], list] | None],
) -> list:
    """Evaluates a jaxpr, some equations of which are replaced.

    `replace(index, eqn)` gives a function from the inputs of that equation to its
    outputs, or None for an equation that is to stay. What lies between two equations
    that are replaced runs as JAX itself would run it, with all custom derivatives.

    The jaxpr must have no effects: these belong to it as a whole.
    """
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return literal(var) if isinstance(var, jex.Literal) else values[var]

    pending: list = []
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    used = {atom for atom in atoms if not isinstance(atom, jex.Literal)}

    def flush() -> None:
        if pending:
            outs = [var for eqn in pending for var in eqn.outvars if var in used]
            results = run_equations(jaxpr, pending, outs, values)
            values.update(zip(outs, results, strict=True))
            pending.clear()

    for index, eqn in enumerate(jaxpr.eqns):
        run = replace(index, eqn)
        if run is None:
            pending.append(eqn)
            continue
        flush()
        results = run([read(var) for var in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    flush()
    return [read(var) for var in jaxpr.outvars]


def run_equations(jaxpr: Any, eqns: list, outs: list, values: dict) -> list:
    """The values of `outs` after some consecutive equations of a jaxpr."""
    made: set = set()
    ins: dict = {}
    for eqn in eqns:
        for var in eqn.invars:
            if not isinstance(var, jex.Literal) and var not in made:
                ins[var] = None
        made.update(eqn.outvars)
    part = jaxpr.replace(constvars=[], invars=list(ins), outvars=outs, eqns=list(eqns))
    return evaluate_jaxpr(part, [], [values[v] for v in ins])
