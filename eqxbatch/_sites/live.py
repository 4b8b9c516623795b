"""What of a program is differentiated: all that its outputs have a derivative in."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from .._base.jaxprs import callee, CALLS
from .shared import is_flat


REMAT = ("checkpoint", "remat2")  # Its name depends on the version of JAX.


def live_variables(jaxpr: Any, outs: Sequence[bool]) -> set:
    """What some outputs of a jaxpr have a derivative in, as far as that is known."""
    live = {
        var
        for var, is_live in zip(jaxpr.outvars, outs, strict=True)
        if is_live and not isinstance(var, jex.Literal)
    }
    for eqn in reversed(jaxpr.eqns):
        of_outs = [var in live for var in eqn.outvars]
        if not any(of_outs):
            continue
        pairs = zip(eqn.invars, _live_inputs(eqn, of_outs), strict=True)
        live |= {
            atom
            for atom, is_live in pairs
            if is_live and not isinstance(atom, jex.Literal)
        }
    return live


def _live_inputs(eqn: Any, outs: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if is_flat(eqn):
        return [False for _ in eqn.invars]
    if name in CALLS or name in REMAT:
        jaxpr = callee(eqn).jaxpr if name in CALLS else eqn.params["jaxpr"]
        live = live_variables(jaxpr, outs)
        return [var in live for var in jaxpr.invars]
    if name == "scan":
        return live_in_scan(eqn, outs)[1]
    return [jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars]


def live_in_scan(eqn: Any, outs: list[bool]) -> tuple[list[bool], list[bool]]:
    """Which outputs and inputs of the body of a scan are differentiated."""
    params = eqn.params
    jaxpr, first = params["jaxpr"].jaxpr, params["num_consts"]
    num = params["num_carry"]
    outs = [*outs]
    while True:
        live = live_variables(jaxpr, outs)
        inputs = [var in live for var in jaxpr.invars]
        # What one step hands on is what the next one begins with.
        carried = [a or b for a, b in zip(outs[:num], inputs[first:], strict=False)]
        if carried == outs[:num]:
            return outs, inputs
        outs[:num] = carried
