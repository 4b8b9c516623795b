"""Programs of parameters with fewer than 16 bits, as programs of these in float32.

The derivative with respect to a parameter in float8 is rounded to float8 where the
program casts the parameter to a wider dtype, so that a sum over microbatches adds up
rounded terms. The program of the same parameter in float32 casts it there, or not at
all, and its derivative is rounded once, in the end.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .jaxpr_types import Atom, DType, Eqn, Jaxpr, JaxprAndConsts, Rule, Value, Var
from .jaxprs import as_remat, callee, evaluate_with, run_equation
from .primitives import is_remat, name_of
from .trees import safe_zip
from .versions import scan_sizes


def is_narrow_dtype(dtype: DType) -> bool:
    """Whether this is a floating-point dtype of fewer than 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


def wide(x: Value) -> Value:
    """`x` in float32, if it has fewer than 16 bits."""
    return x.astype(jnp.float32) if is_narrow_dtype(x.dtype) else x


def without_narrow_casts(
    closed: JaxprAndConsts, dtypes: Sequence[DType]
) -> JaxprAndConsts:
    """A closed jaxpr whose first inputs are not rounded, although it casts them.

    `dtypes` are those of the parameters that the inputs stand for: the program begins
    by casting each to its dtype, which changes no value. Where it casts the result to a
    wider one, at once or after steps that only move entries, both casts are left out.
    """
    jaxpr = closed.jaxpr
    pairs = zip(jaxpr.invars, dtypes, strict=False)
    seeds = {var: dtype for var, dtype in pairs if is_narrow_dtype(dtype)}
    if not seeds:
        return closed

    def run(*args: Any) -> list:
        return [*map(_narrow, _evaluate_wide(jaxpr, closed.consts, [*args], seeds))]

    return jax.make_jaxpr(run)(*(var.aval for var in jaxpr.invars))


class _Wide(NamedTuple):
    """What has a narrow `dtype` in the program, in float32."""

    array: Array
    dtype: DType


if TYPE_CHECKING:
    _Operand = Any
else:
    # What goes into equations and comes out of them.
    _Operand = Value | _Wide


def _narrow(x: _Operand) -> Value:
    return x.array.astype(x.dtype) if isinstance(x, _Wide) else x


# They move the entries of their first input.
_MOVES = (
    *("broadcast_in_dim", "copy", "dynamic_slice", "gather", "reshape"),
    *("rev", "slice", "split", "squeeze", "transpose", "unstack"),
)


# They put the entries of all their inputs in other places.
_JOINS = ("concatenate", "dynamic_update_slice", "pad", "select_n", "stack")


def _evaluate_wide(
    jaxpr: Jaxpr,
    consts: Sequence[Value],
    args: list[_Operand],
    seeds: Mapping[Var, DType],
) -> list:
    """Evaluates a jaxpr, of which some inputs and results are wide.

    `seeds` are inputs in float32 that it casts to these dtypes.
    """
    are_wide = {x for x, arg in safe_zip(jaxpr.invars, args) if isinstance(arg, _Wide)}

    # It is known only during the evaluation which results are wide.
    def is_wide(atom: Atom) -> bool:
        return not isinstance(atom, jex.Literal) and atom in are_wide

    def replace(_: int, eqn: Eqn) -> Rule | None:
        atom = eqn.invars[0] if eqn.invars else None
        is_cast = name_of(eqn) == "convert_element_type"
        is_seed = is_cast and not isinstance(atom, jex.Literal) and atom in seeds
        if not is_seed and not any(map(is_wide, eqn.invars)):
            return None

        def run(ins: list[_Operand]) -> list:
            if is_seed:
                outs = [_Wide(ins[0], eqn.params["new_dtype"])]
            else:
                outs = _run_wide(jaxpr, eqn, ins)
            pairs = safe_zip(eqn.outvars, outs)
            are_wide.update(var for var, x in pairs if isinstance(x, _Wide))
            return outs

        return run

    return evaluate_with(jaxpr, [*consts], args, replace)


def _run_wide(jaxpr: Jaxpr, eqn: Eqn, ins: list[_Operand]) -> list:
    """The outputs of an equation with wide inputs."""
    name, closed, first = name_of(eqn), callee(eqn), ins[0]
    are_more_wide = any(isinstance(x, _Wide) for x in ins[1:])
    # A cast to a wider dtype is where the parameter is used: no rounding before it.
    if name == "convert_element_type" and _is_wider(eqn.params["new_dtype"], first):
        return [first.array.astype(eqn.params["new_dtype"])]
    # What moves entries keeps them as they are.
    if name in _MOVES and not are_more_wide:
        outs = eqn.primitive.bind(first.array, *ins[1:], **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        return [_Wide(x, first.dtype) for x in outs]
    if name in _JOINS:
        # In float32, constants have the same values.
        arrays = [wide(_array(x)) for x in ins]
        dtype = next(x.dtype for x in ins if isinstance(x, _Wide))
        return [_Wide(eqn.primitive.bind(*arrays, **eqn.params), dtype)]
    # Programs within: these may cast, too.
    if closed is not None and not is_remat(eqn):
        return _evaluate_wide(closed.jaxpr, closed.consts, ins, {})
    if closed is not None:
        return as_remat(eqn, _of_arrays(closed, ins))(*map(_array, ins))
    if name == "cond":
        index, *operands = ins
        branches = [_of_arrays(branch, operands) for branch in eqn.params["branches"]]
        return lax.switch(index, branches, *map(_array, operands))
    if name == "scan":
        return _scan_wide(eqn, ins)
    # Anything else computes with the narrow dtype.
    return run_equation(jaxpr, eqn, eqn.outvars)(*map(_narrow, ins))


def _is_wider(dtype: DType, x: _Wide) -> bool:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return is_float and jnp.finfo(dtype).bits > jnp.finfo(x.dtype).bits


def _array(x: _Operand) -> Value:
    return x.array if isinstance(x, _Wide) else x


def _of_arrays(closed: JaxprAndConsts, like: Sequence[_Operand]) -> Callable[..., list]:
    """A program as a function of arrays, which stand for such inputs."""

    def run(*arrays: Any) -> list:
        pairs = safe_zip(like, arrays)
        args = [_Wide(y, x.dtype) if isinstance(x, _Wide) else y for x, y in pairs]
        return [*map(_narrow, _evaluate_wide(closed.jaxpr, closed.consts, args, {}))]

    return run


def _scan_wide(eqn: Eqn, ins: list[_Operand]) -> list:
    """A loop over layers, say, whose parameters are wide."""
    first, num = scan_sizes(eqn)
    consts, xs = ins[:first], ins[first + num :]
    carry = [*map(_narrow, ins[first : first + num])]
    run = _of_arrays(eqn.params["jaxpr"], [*consts, *carry, *xs])

    def step(carry: list[Value], rows: list[Value]) -> tuple[list, list]:
        outs = run(*map(_array, consts), *carry, *rows)
        return outs[:num], outs[num:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, carry, [*map(_array, xs)], **options)
    return [*carry, *ys]
