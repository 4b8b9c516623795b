"""Convolutions in the one layout that XLA's CPU compiler runs fast inside of loops."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from .jaxprs import callee, CALLS, evaluate_jaxpr, evaluate_with
from .mesh import where_it_is


def evaluate_in_loop(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr that is about to be the body of a loop, or a branch.

    XLA for CPUs brings the convolutions of a program into the layout that its fast
    kernels take (batch, spatial, features), but only those at the top of the program:
        inside of a loop or a branch, a convolution in the layout of `equinox.nn.Conv`
    (batch, features, spatial) runs several times slower than outside. So it is put into
    that layout here, where the program is compiled for CPUs. On other devices, nothing
    is changed.
    """
    # Effects, such as a debug print, belong to a jaxpr as a whole, so it stays whole.
    if jaxpr.effects or not _has_convolution(jaxpr):
        return evaluate_jaxpr(jaxpr, consts, args)

    def replace(_: int, eqn: Any) -> Callable[[list], list] | None:
        if _is_convolution(eqn):
            return lambda ins: [_convolution(eqn)(*ins)]
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


def _convolution(eqn: Any) -> Callable[[Array, Array], Array]:
    """The convolution of an equation, in the layout that is fast where it runs."""
    bind = functools.partial(eqn.primitive.bind, **eqn.params)
    last = functools.partial(_channels_last, eqn)
    choose = lambda lhs, rhs: lax.platform_dependent(lhs, rhs, cpu=last, default=bind)
    # A choice keeps for its derivative what any of its branches would. Computed again,
    # it keeps what it is given, as a convolution does.
    checkpointed = jax.checkpoint(choose, prevent_cse=False)

    def run(lhs: Array, rhs: Array) -> Array:
        # Axes of a mesh can have been automatic for the time in which it was traced.
        with where_it_is(lhs, rhs):
            return checkpointed(lhs, rhs)

    return run


def _channels_last(eqn: Any, lhs: Array, rhs: Array) -> Array:
    """What a convolution computes of these, done channels last."""
    params = dict(eqn.params)
    numbers = params["dimension_numbers"]
    ndim = lhs.ndim
    last = (0, ndim - 1, *range(1, ndim - 1))
    params["dimension_numbers"] = lax.ConvDimensionNumbers(
        lhs_spec=last, rhs_spec=(ndim - 1, ndim - 2, *range(ndim - 2)), out_spec=last
    )
    back = _moved_last(numbers.out_spec)
    sharding = params.get("out_sharding")
    if sharding is not None:
        spec = [*sharding.spec, *[None] * ndim]
        moved = PartitionSpec(*(spec[axis] for axis in back))
        params["out_sharding"] = NamedSharding(sharding.mesh, moved)
    lhs = jnp.transpose(lhs, _moved_last(numbers.lhs_spec))
    outputs, inputs, *rest = numbers.rhs_spec
    rhs = jnp.transpose(rhs, (*rest, inputs, outputs))
    out = eqn.primitive.bind(lhs, rhs, **params)
    return jnp.transpose(out, sorted(range(ndim), key=back.__getitem__))


def _moved_last(spec: tuple[int, ...]) -> tuple[int, ...]:
    batch, features, *dims = spec
    return (batch, *dims, features)
