"""Making jaxprs, and evaluating them with some of their equations replaced."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, PyTree


CALLS = ("pjit", "jit", "closed_call", "core_call")


def callee(eqn: Any) -> Any:
    """The closed jaxpr that an equation in `CALLS` calls."""
    params = eqn.params
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def literal(atom: Any) -> Array:
    """The value of a literal in its own dtype, which a Python number does not have."""
    return jnp.asarray(atom.val, atom.aval.dtype)


def trace_example(
    fun: Callable[[list, list], PyTree],
    leaves: list,
    arrays: list,
    axes: Sequence[int],
) -> tuple[Any, PyTree]:
    """Traces `fun(leaves, rows)` for one example of a batch.

    Returns its closed jaxpr, whose first inputs are the leaves, and what it returns
    with a `jax.ShapeDtypeStruct` for each array.
    """
    traced: list = []

    def trace(*rows: Array) -> list:
        # Within `jax.vmap`, an example is of the type that it will have there, also on
        # a mesh.
        traced.append(eqx.filter_make_jaxpr(fun)(leaves, list(rows)))
        return []

    if arrays:
        jax.eval_shape(jax.vmap(trace, list(axes)), *arrays)
    else:
        trace()
    closed, structs, static = traced[-1]
    return closed, eqx.combine(structs, static)


def depends(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend on those inputs that are marked.

    Some that do not may be said to, as equations are not looked into.
    """
    pairs = zip(jaxpr.invars, inputs, strict=True)
    dependent = {var for var, is_marked in pairs if is_marked}
    is_dependent = lambda x: not isinstance(x, jex.Literal) and x in dependent
    for eqn in jaxpr.eqns:
        if any(map(is_dependent, eqn.invars)):
            dependent.update(eqn.outvars)
    return [*map(is_dependent, jaxpr.outvars)]


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
