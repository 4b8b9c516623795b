"""Programs that are compiled once for equal arguments, as by `equinox.filter_jit`."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .checks import unhashable, without_layers
from .jaxpr_types import JaxprAndConsts, Value
from .jaxprs import equations_in
from .platforms import for_platform, Platform, platform
from .recompiled import warn_of_new_functions, warn_of_new_numbers


_Function = TypeVar("_Function", bound=Callable[..., Any])


_NUMBERS = frozenset((bool, int, float, complex))


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def number_types(leaves: Sequence[Any]) -> str:
    """What tells numbers apart that are equal: `2 == 2.0 == True`, and `0.0 == -0.0`.

    Programs differ for these, so that caches of them need it as a part of their keys.
    """
    return repr([x for x in leaves if type(x) in _NUMBERS])


def num_bytes(tree: PyTree) -> int:
    """The number of bytes of some arrays or structs."""
    return sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(tree))


class _Frame(NamedTuple):
    """A PyTree without its arrays, which are None among its leaves."""

    treedef: Any
    leaves: tuple[Hashable, ...]


# Not a Module: Equinox would warn of the user's own functions of JAX in the PyTree.
@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Split:
    """A PyTree as its arrays, which programs take and return, and the rest of it.

    There is no rest if a program is not to be run as it is, because it calls the host.
    """

    arrays: list
    frame: _Frame | None = eqx.field(static=True)

    @classmethod
    def of(cls, tree: PyTree) -> "_Split":
        leaves, treedef = jtu.tree_flatten(tree)
        arrays, static = eqx.partition(leaves, eqx.is_array)
        return cls([x for x in arrays if x is not None], _Frame(treedef, (*static,)))

    @property
    def tree(self) -> PyTree:
        assert self.frame is not None
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x for x in self.frame.leaves]
        return self.frame.treedef.unflatten(leaves)


class _Fixed(NamedTuple):
    """What a program depends on, other than its arrays.

    - `frame`: the rest of the arguments.
    - `numbers`: as of `number_types`.
    - `platform`: that which the program is for.
    """

    frame: _Frame
    numbers: str
    platform: Platform


# A set of one `_Fixed`: it is one leaf for JAX, which would go through a tuple in
# each call.
_Key = frozenset


def calls_host(closed: JaxprAndConsts) -> bool:
    """Whether a program calls a function on the host."""
    names = {eqn.primitive.name for eqn in equations_in(closed)}
    # `equinox` hides programs in its own primitive.
    return any("callback" in name or "noinline" in name for name in names)


def compiled(
    fun: _Function,
    *,
    donate: Literal["none", "all-except-first"] = "none",
    inline: bool = False,
    waits: bool = True,
) -> _Function:
    """`equinox.filter_jit`, which gives equal numbers of other types other programs.

    So it does for arrays on another platform. With `inline`, other programs that call
    it have its equations in place of a call. With `waits=False`, a call returns before
    its program has ended, unless that reads memory of the user, or calls functions on
    the host, whose errors belong to the call.
    """
    traces = 0
    # The keys of programs that call functions on the host.
    host_callers: set[_Key] = set()

    def called(key: _Key, *lists: list[Value]) -> _Split:
        nonlocal traces
        traces += 1
        (content,) = key
        first, rest = _Split([*itertools.chain(*lists)], content.frame).tree
        with for_platform(content.platform):
            return _Split.of(fun(first, *rest))

    def is_of_host(key: _Key, lists: Sequence[list[Value]]) -> bool:
        # JAX traces the program once, wherever it runs.
        return calls_host(program.trace(key, *lists).jaxpr)

    def run(key: _Key, *lists: list[Value]) -> _Split:
        if getattr(jax.config, "jax_disable_jit", False):
            return called(key, *lists)
        return _Split([], None) if is_of_host(key, lists) else program(key, *lists)

    for function in (called, run):
        function.__name__, function.__qualname__ = fun.__name__, fun.__qualname__
    program: Any = jax.jit(called, static_argnums=0, inline=inline)
    donated = () if donate == "none" else 2
    jitted = jax.jit(run, static_argnums=0, donate_argnums=donated, inline=inline)
    # It waits for the end of a program, and explains errors of `equinox.error_if`. Its
    # types lack the settings of `jax.jit`.
    jit: Any = eqx.filter_jit
    waited = jit(lambda first, *rest: program(*first, *rest), donate=donate)

    def computed(key: _Key, lists: list[list[Value]], is_inside: bool) -> _Split:
        is_known = key in host_callers
        # Another program would keep the equation of what is not run.
        if not is_known and not (is_inside and is_of_host(key, lists)):
            out = jitted(key, *lists)
            if out.frame is not None:
                return out
            host_callers.add(key)
        return waited((key, lists[0]), *lists[1:])

    @functools.wraps(fun)
    def wrapper(first: PyTree, *rest: PyTree) -> PyTree:
        __tracebackhide__ = True
        # Arrays are arguments of the program, and all else tells it from others.
        leaves, treedef = jtu.tree_flatten((first, rest))
        arrays, static = [], []
        for x in leaves:
            is_array = isinstance(x, _ARRAYS)
            static.append(None if is_array else x)
            if is_array:
                arrays.append(x)
        frame = _Frame(treedef, (*static,))
        content = _Fixed(frame, number_types(static), platform(arrays))
        try:
            key, lists = frozenset([content]), [arrays]
        except TypeError as e:
            raise unhashable(static) or e from None
        if donate != "none":
            # In place of an array there is None, which is no leaf itself.
            of_first = treedef.children()[0].num_leaves
            num = static[:of_first].count(None)
            lists = [arrays[:num], arrays[num:]]
        # There are few types of arrays, and many arrays.
        types = {*map(type, arrays)}
        is_inside = any(issubclass(x, Tracer) for x in types)
        before = traces
        try:
            out = computed(key, lists, is_inside)
        except Exception as e:
            raise e.with_traceback(without_layers(e.__traceback__))  # noqa: B904
        # JAX reads arrays of NumPy later, when their owner may have changed them.
        if waits or any(issubclass(x, np.ndarray) for x in types):
            jax.block_until_ready(out)
        # A function that is made anew for each call is compiled in each call.
        if traces != before and not any(isinstance(x, Tracer) for x in out.arrays):
            context = fun, treedef, *map(jax.typeof, arrays)
            warn_of_new_functions(static, context)
            is_array = lambda x: isinstance(x, _ARRAYS)
            warn_of_new_numbers((first, *rest), is_array, context)
        return out.tree

    return cast(_Function, wrapper)
