"""Convolutions in the one layout that XLA's CPU compiler runs fast inside of loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .jaxprs import callee, CALLS, evaluate_jaxpr, evaluate_with


def evaluate_in_loop(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr that is about to be the body of a loop, or a branch.

    XLA for CPUs brings the convolutions of a program into the layout that its fast
    kernels take (batch, spatial, features), but only those at the top of the program:
    inside of a loop or a branch, a convolution in the layout of `equinox.nn.Conv`
    (batch, features, spatial) runs several times slower than outside. So it is put into
    that layout here. On other devices, nothing is changed.
    """
    # Effects, such as a debug print, belong to a jaxpr as a whole, so it stays whole.
    is_cpu = jax.default_backend() == "cpu"
    if not is_cpu or jaxpr.effects or not _has_convolution(jaxpr):
        return evaluate_jaxpr(jaxpr, consts, args)

    def replace(_: int, eqn: Any) -> Callable[[list], list] | None:
        if _is_convolution(eqn):
            return lambda ins: [_channels_last(*ins, **eqn.params)]
        if eqn.primitive.name in CALLS and _has_convolution(callee(eqn).jaxpr):
            closed = callee(eqn)
            return lambda ins: evaluate_in_loop(closed.jaxpr, closed.consts, ins)
        return None

    return evaluate_with(jaxpr, consts, args, replace)


def _is_convolution(eqn: Any) -> bool:
    is_convolution = eqn.primitive.name == "conv_general_dilated"
    return is_convolution and eqn.invars[0].aval.dtype in (jnp.float32, jnp.float16)


def _has_convolution(jaxpr: Any) -> bool:
    return any(
        _is_convolution(eqn)
        or (eqn.primitive.name in CALLS and _has_convolution(callee(eqn).jaxpr))
        for eqn in jaxpr.eqns
    )


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
