"""Types for type checkers that the signatures of all transforms share.

A transform is called with a function or, as a decorator with arguments, without one.
Some of its settings change what the transformed function returns. For type checkers, a
Protocol has an overload for each of these cases, in a separate file beside the
transforms. The settings of a case are a `TypedDict`: most of them do not change the
type, and would be repeated in each overload.

Files of signatures are not imported at run time, because importing them is slow.

The transformed function is a `Callable` with the parameters of the function that it
wraps. Protocols are `runtime_checkable`, because some tests check all annotations at
run time and refuse those that cannot be checked.
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

from .accumulators import Concat, Last, Max, Min
from .log_sums import LogSumExp
from .moments import Mean, RunningMean, Sum


P = ParamSpec("P")


# Bound to `Any`, so that a lambda without annotations can use its model freely.
Model = TypeVar("Model", bound=Any)


Out = TypeVar("Out")


Aux = TypeVar("Aux")


# A function of a model (or other parameters) and of further arguments.
OfModel = Callable[Concatenate[Model, P], Out]


Loss = Callable[Concatenate[Model, P], ArrayLike]


LossWithAux = Callable[Concatenate[Model, P], tuple[ArrayLike, Aux]]


# For an array these return an array. Others, such as `Variance`, do not.
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
    """A decorator that keeps the return type of the function."""

    def __call__(self, fun: Callable[P, Out], /) -> Callable[P, Out]: ...


@runtime_checkable
class OtherResult(Protocol):
    """A decorator after which the function can return anything."""

    def __call__(self, fun: Callable[P, Any], /) -> Callable[P, Any]: ...
