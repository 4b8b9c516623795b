"""Names for what programs of JAX are made of, as annotations.

Types of equations, variables and arrays have attributes that JAX does not promise, so
that type checkers look no further; the tests check each annotation at run time.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable, TYPE_CHECKING

import jax
import jax.extend.core as jex
from jax.core import AbstractValue, Tracer

from .versions import Closed


@runtime_checkable
class _HasShape(Protocol):
    """An array of JAX or NumPy, or one of the classes that JAX has for constants."""

    shape: Any
    dtype: Any


@runtime_checkable
class _HasSize(Protocol):
    """A dtype of NumPy, or of PRNG keys."""

    name: Any
    itemsize: Any


if TYPE_CHECKING:
    Eqn = Any
    Jaxpr = Any
    JaxprAndConsts = Any
    Var = Any
    Atom = Any
    Aval = Any
    Value = Any
    DType = Any
else:
    # One equation: a primitive, its operands, its results and its parameters.
    Eqn = jex.JaxprEqn
    # A program with or without its constants.
    Jaxpr = jex.Jaxpr | Closed
    # A program with its constants.
    JaxprAndConsts = Closed
    # A variable of a program.
    Var = jex.Var
    # An operand of an equation: a variable or a number.
    Atom = jex.Var | jex.Literal
    # The type of an array, as JAX or as `jax.eval_shape` describes it.
    Aval = AbstractValue | jax.ShapeDtypeStruct
    # What a variable stands for while a program runs. Constants of programs that are
    # linear functions can be None, because they are inputs.
    Value = _HasShape | Tracer | bool | int | float | complex | None
    # The dtype of an array, also of one of PRNG keys, or the class of its numbers.
    DType = _HasSize | type


# The parameters of a primitive.
Params = Mapping[str, Any]


# How an equation runs: from the values of its operands to those of its results. Either
# can be what stands for an array, such as the cell of a mutable one.
Rule = Callable[[list[Any]], list[Any]]
