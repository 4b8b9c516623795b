"""Names for what programs of JAX are made of, as annotations.

Types of equations, variables and arrays have attributes that JAX does not promise, so
that type checkers look no further; the tests check each annotation at run time.
"""

from typing import Any, TYPE_CHECKING

import jax
import jax.extend.core as jex
from jax.core import AbstractValue

from .versions import Closed


if TYPE_CHECKING:
    Eqn = Any
    Jaxpr = Any
    JaxprAndConsts = Any
    Atom = Any
    Aval = Any
else:
    # One equation: a primitive, its operands, its results and its parameters.
    Eqn = jex.JaxprEqn
    # A program with or without its constants.
    Jaxpr = jex.Jaxpr | Closed
    # A program with its constants.
    JaxprAndConsts = Closed
    # An operand of an equation: a variable or a number.
    Atom = jex.Var | jex.Literal
    # The type of an array, as JAX or as `jax.eval_shape` describes it.
    Aval = AbstractValue | jax.ShapeDtypeStruct
