"""Convolutions in the one layout that XLA's CPU compiler runs fast inside of loops."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


_CALLS = ("pjit", "jit", "closed_call")


def evaluate_jaxpr(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr as it is."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))(*args)


def evaluate_in_loop(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr whose convolutions are about to run in the body of a loop.

    XLA for CPUs brings the convolutions of a program into the layout that its fast
    kernels take (batch, spatial, features), but only those at the top of the program:
    inside of a loop, a convolution in the layout of `equinox.nn.Conv` (batch, features,
    spatial) runs several times slower than outside. So it is put into that layout here.
    On other devices, nothing is changed.
    """
    # Effects, such as a debug print, belong to a jaxpr as a whole, so it stays whole.
    is_cpu = jax.default_backend() == "cpu"
    if not is_cpu or jaxpr.effects or not _has_convolution(jaxpr):
        return evaluate_jaxpr(jaxpr, consts, args)

    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jex.Literal) else values[var]

    pending: list = []
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    used = {atom for atom in atoms if not isinstance(atom, jex.Literal)}

    def flush() -> None:
        # What lies between two convolutions runs as JAX itself would run it.
        if pending:
            outs = [var for eqn in pending for var in eqn.outvars if var in used]
            results = _run_equations(jaxpr, pending, outs, values)
            values.update(zip(outs, results, strict=True))
            pending.clear()

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if _is_convolution(eqn):
            flush()
            results = [_channels_last(*map(read, eqn.invars), **eqn.params)]
        elif name in _CALLS and _has_convolution(_callee(eqn).jaxpr):
            flush()
            callee = _callee(eqn)
            results = evaluate_in_loop(
                callee.jaxpr, callee.consts, [read(v) for v in eqn.invars]
            )
        else:
            pending.append(eqn)
            continue
        values.update(zip(eqn.outvars, results, strict=True))
    flush()
    return [read(v) for v in jaxpr.outvars]


def _callee(eqn: Any) -> Any:
    params = eqn.params
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def _is_convolution(eqn: Any) -> bool:
    is_convolution = eqn.primitive.name == "conv_general_dilated"
    return is_convolution and eqn.invars[0].aval.dtype in (jnp.float32, jnp.float16)


def _has_convolution(jaxpr: Any) -> bool:
    return any(
        _is_convolution(eqn)
        or (eqn.primitive.name in _CALLS and _has_convolution(_callee(eqn).jaxpr))
        for eqn in jaxpr.eqns
    )


def _run_equations(jaxpr: Any, eqns: list, outs: list, values: dict) -> list:
    made: set = set()
    ins: dict = {}
    for eqn in eqns:
        for var in eqn.invars:
            if not isinstance(var, jex.Literal) and var not in made:
                ins[var] = None
        made.update(eqn.outvars)
    part = jaxpr.replace(constvars=[], invars=list(ins), outvars=outs, eqns=list(eqns))
    return evaluate_jaxpr(part, [], [values[v] for v in ins])


def _channels_last(lhs: Array, rhs: Array, **params: Any) -> Array:
    """What `conv_general_dilated` computes of these, done channels last."""
    numbers = params["dimension_numbers"]
    ndim = lhs.ndim
    spatial = tuple(range(1, ndim - 1))
    last = (0, ndim - 1, *spatial)
    params["dimension_numbers"] = lax.ConvDimensionNumbers(
        lhs_spec=last, rhs_spec=(ndim - 1, ndim - 2, *range(ndim - 2)), out_spec=last
    )
    batch, features, *dims = numbers.lhs_spec
    lhs = jnp.transpose(lhs, (batch, *dims, features))
    outputs, inputs, *dims = numbers.rhs_spec
    rhs = jnp.transpose(rhs, (*dims, inputs, outputs))
    params = {name: params[name] for name in _CONVOLUTION_PARAMS}
    out = lax.conv_general_dilated(lhs, rhs, **params)
    batch, features, *dims = numbers.out_spec
    order = [0] * ndim
    for source, target in enumerate((batch, *dims, features)):
        order[target] = source
    return jnp.transpose(out, order)


_CONVOLUTION_PARAMS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)
