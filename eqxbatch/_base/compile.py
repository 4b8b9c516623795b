"""Programs that are compiled once for equal arguments, as by `equinox.filter_jit`."""

import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .checks import warn_user, without_layers
from .jaxpr_types import Eqn
from .jaxprs import equations_in
from .platforms import for_platform, Platform, platform


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


def calls_host(eqn: Eqn) -> bool:
    """Whether an equation calls a function on the host."""
    # `equinox` hides programs in its own primitive.
    return any(name in eqn.primitive.name for name in ("callback", "noinline"))


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

    def called(key: _Key, *lists: list[Array]) -> _Split:
        nonlocal traces
        traces += 1
        (content,) = key
        first, rest = _Split([*itertools.chain(*lists)], content.frame).tree
        with for_platform(content.platform):
            return _Split.of(fun(first, *rest))

    def is_of_host(key: _Key, lists: Sequence[list[Array]]) -> bool:
        # JAX traces the program once, wherever it runs.
        closed = program.trace(key, *lists).jaxpr
        return any(map(calls_host, equations_in(closed)))

    def run(key: _Key, *lists: list[Array]) -> _Split:
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

    def computed(key: _Key, lists: list[list[Array]]) -> _Split:
        is_known = key in host_callers
        # Another program would keep the equation of what is not run.
        is_inside = any(isinstance(x, Tracer) for x in itertools.chain(*lists))
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
        key, lists = frozenset([content]), [arrays]
        if donate != "none":
            num = sum(map(eqx.is_array, jtu.tree_leaves(first)))
            lists = [arrays[:num], arrays[num:]]
        before = traces
        try:
            out = computed(key, lists)
        except Exception as e:
            raise e.with_traceback(without_layers(e.__traceback__))  # noqa: B904
        # JAX reads arrays of NumPy later, when their owner may have changed them.
        if waits or any(isinstance(x, np.ndarray) for x in arrays):
            jax.block_until_ready(out)
        # A function that is made anew for each call is compiled in each call.
        if traces != before and not any(isinstance(x, Tracer) for x in out.arrays):
            warn_of_new_functions(static, (fun, treedef, *map(jax.typeof, arrays)))
        return out.tree

    return cast(_Function, wrapper)


# A function that is made anew now and then is no mistake.
_MOST_NEW = 2


# The most programs that are known at a time.
_MOST_PROGRAMS = 1000


# The objects that each program was compiled for, functions first, by the hash of all
# that it depends on.
_COMPILED: dict[int, list[list[weakref.ref]]] = {}


def warn_of_new_functions(static: Sequence[Any], others: Hashable) -> None:
    """Warns if a program was compiled again only because functions in it are new ones.

    Their code and closures are those of functions for which it was compiled before,
    and so is all else in `static`, and `others`.
    """
    functions = [x for x in static if isinstance(x, _FUNCTIONS)]
    objects = [*map(weakref.ref, functions)]
    content = _content((*static,), objects)
    # Those for which an equal program was compiled before.
    known = _COMPILED.setdefault(hash((content, others)), [])
    # Another object can be where one was that is gone.
    known[:] = [refs for refs in known if all(ref() is not None for ref in refs)]
    # The same functions were compiled again for another reason.
    new = functions
    for refs in known:
        new = [x for x, ref in zip(functions, refs, strict=False) if ref() is not x]
        if not new:
            return
    known.append(objects)
    if len(_COMPILED) > _MOST_PROGRAMS:
        _COMPILED.pop(next(iter(_COMPILED)))
    if new and len(known) == _MOST_NEW + 1:
        fun = new[0]
        while isinstance(fun, functools.partial):
            fun = fun.func
        name = getattr(fun, "__qualname__", type(fun).__name__)
        warn_user(
            f"The same program was compiled {len(known)} times, because `{name}` is a "
            "new function each time, with the same code and the same values around "
            "it. Define it once, outside of the loop or function that makes it, and "
            "pass values that change as arguments."
        )


_FUNCTIONS = (types.FunctionType, functools.partial)


_CONSTANTS = (bool, int, float, complex, str, bytes, types.NoneType)


_UNKNOWN = itertools.count()


def _content(
    x: object, objects: list[weakref.ref], around: tuple[object, ...] = ()
) -> Hashable:
    """What tells functions apart that compute different things, and constants.

    Objects that it identifies are appended, because others can take their place later.
    `around` are the functions with `x` in their closures.
    """
    content = functools.partial(_content, objects=objects, around=(*around, x))
    if isinstance(x, tuple):
        return tuple(map(content, x))
    if isinstance(x, _CONSTANTS):
        return type(x), repr(x)
    for level, function in enumerate(around):
        if x is function:
            return "recursive", level
    if isinstance(x, functools.partial):
        return content(x.func), content(x.args), content((*x.keywords.items(),))
    if isinstance(x, types.FunctionType):
        # The cell of a name that has no value yet is empty.
        cells = [cell for cell in x.__closure__ or () if cell != types.CellType()]
        values = (*(cell.cell_contents for cell in cells),)
        defaults = x.__defaults__, (*(x.__kwdefaults__ or {}).items(),)
        return id(x.__code__), id(x.__globals__), content(values), content(defaults)
    try:
        objects.append(weakref.ref(x))
    except TypeError:  # A list may have changed.
        return next(_UNKNOWN)
    return id(x)
