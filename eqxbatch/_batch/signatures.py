"""What type checkers are told of transforms: what all of them share.

A transform is called with a function or, as a decorator with arguments, without one.
Some of its settings change what the transformed function returns. A checker sees a
Protocol with an overload for each of these cases, in a file of its own beside the
transforms. The settings of a case are a `TypedDict`: most of them change nothing, and
would be repeated in each overload.

No file of signatures is imported at run time, as that takes a while.

The transformed function is a `Callable` with the parameters of the function that it
wraps. Protocols are `runtime_checkable`, as some tests check all annotations at run
time, and refuse those that cannot be checked.
"""

from collections.abc import Callable, Mapping
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    runtime_checkable,
    TypedDict,
    TypeVar,
)

from jax.typing import ArrayLike

from .accumulators import Concat, Last, LogSumExp, Max, Min
from .moments import Mean, RunningMean, Sum


P = ParamSpec("P")


# Of a bound, so that a lambda without annotations can do anything with its model.
Model = TypeVar("Model", bound=Any)


Out = TypeVar("Out")


Aux = TypeVar("Aux")


# A function of a model, or of other parameters, and of what else it is called with.
OfModel = Callable[Concatenate[Model, P], Out]


Loss = Callable[Concatenate[Model, P], ArrayLike]


LossWithAux = Callable[Concatenate[Model, P], tuple[ArrayLike, Aux]]


# Of an array, these make an array. Others, such as `Variance`, make something else.
ArrayAccumulator = Concat | Last | LogSumExp | Max | Mean | Min | RunningMean | Sum


ArrayAccumulators = Mapping[str, ArrayAccumulator]


# What gives a transform its signature.
Typed = Callable[[Callable[..., Any]], Out]


class NoAux(TypedDict, total=False):
    has_aux: Literal[False]


class HasAux(TypedDict):
    has_aux: Literal[True]


@runtime_checkable
class SameResult(Protocol):
    """A decorator of functions that return the same types as before."""

    def __call__(self, fun: Callable[P, Out], /) -> Callable[P, Out]: ...


@runtime_checkable
class OtherResult(Protocol):
    """A decorator of functions that can return anything then."""

    def __call__(self, fun: Callable[P, Any], /) -> Callable[P, Any]: ...
