"""The one type that every transform returns."""

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._blocks.explicit import (
    on_one_mesh,
    spread_freely,
    within_mesh,
)
from .._blocks.memory import resolved


class AbstractTransform(eqx.Module):
    """The settings of a transform, and what it does with a call.

    - `is_compiled`: whether calls are compiled as a whole. If not, `apply` runs as it
        is, and compiles what it sees fit.
    - `takes_instance`: whether the instance of a method is an argument as all others
        are. If not, it belongs to the function.
    """

    is_compiled: ClassVar[bool]
    takes_instance: ClassVar[bool]

    @abc.abstractmethod
    def apply(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of calling the transformed `fun`."""


class AbstractSpread(AbstractTransform):
    """A transform for which the compiler decides how arrays are spread over a mesh.

    That is also so where the axes of the mesh are explicit.
    """

    @abc.abstractmethod
    def specs(
        self, call: tuple[Callable, tuple, dict[str, Any]], out: PyTree
    ) -> PyTree:
        """How the results of a call are spread: a prefix with `PartitionSpec`s."""


class Transformed(eqx.Module):
    """A transformed function.

    It is a PyTree whose leaves are those of the function that it wraps and of the
    transform's settings, it works as a method, and it looks like what it wraps.
    """

    _transform: AbstractTransform
    _fun: Callable

    def __hash__(self) -> int:
        # Fields can be dicts, such as `in_axes`, but for PyTrees that is structure.
        leaves, treedef = jtu.tree_flatten(self)
        return hash((treedef, *leaves))

    @property
    def __wrapped__(self) -> Callable:
        return self._fun

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if self._transform.is_compiled:
            return _apply(resolved(self._transform), self._fun, args, kwargs)
        return self._transform.apply(self._fun, args, kwargs)

    def __get__(self, instance: Any, owner: Any) -> Callable:
        del owner
        if instance is None:
            return self
        if self._transform.takes_instance:
            return eqx.Partial(self, instance)
        return Transformed(self._transform, eqx.Partial(self._fun, instance))


# One compiled function serves all transforms: what is called is an argument of it, so
# that the arrays of modules are arguments of the program, and so that an equal call
# finds the compiled program again.
@eqx.filter_jit
def _apply(
    transform: AbstractTransform, fun: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    operands = on_one_mesh((transform, fun, args, kwargs))
    apply = lambda transform, *call: transform.apply(*call)
    with within_mesh(operands):
        spread = operands[0]
        if not isinstance(spread, AbstractSpread):
            return apply(*operands)
        specs = functools.partial(spread.specs, operands[1:])
        return spread_freely(apply, operands, (), specs)()


def transformed(transform: AbstractTransform, fun: Callable) -> Transformed:
    """Wraps `fun`. Raises `TypeError` if it is not callable."""
    if not callable(fun):
        raise TypeError(
            f"`fun` must be callable; got {fun!r} of type {type(fun).__name__}."
        )
    wrapper: Any = eqx.module_update_wrapper(Transformed(transform, fun))
    return wrapper
