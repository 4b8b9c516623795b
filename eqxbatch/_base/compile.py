"""Programs that are compiled once for equal arguments, and the options of compilers."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast, Literal, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .checks import unhashable, without_layers
from .jaxpr_types import JaxprAndConsts
from .jaxprs import equations_in
from .platforms import for_platform, platform
from .recompiled import warn_of_new_functions, warn_of_new_numbers
from .versions import is_compiler_option


_Function = TypeVar("_Function", bound=Callable[..., Any])


_NUMBERS = frozenset((bool, int, float, complex))


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def number_types(leaves: Sequence[Any]) -> str:
    """What tells numbers apart that are equal: `2 == 2.0 == True`, and `0.0 == -0.0`.

    Programs differ for these, so that caches of them need it as a part of their keys.
    """
    return repr([x for x in leaves if type(x) in _NUMBERS])


# XLA for CPUs assigns memory before LLVM optimises the code. Optimisation takes up to
# half of the time and does not change the memory.
_UNOPTIMISED = {"cpu": {"xla_backend_optimization_level": 0}}


# XLA for CPUs gives a product and what follows it to YNNPACK, as
# one fusion, whose memory it reports as 0: softmax of attention in 36 MB blocks is seen
# to take 72 MB, and 73 MB are reported without such fusions. The value is a list of
# kinds; this one is empty.
_WITHOUT_LIBRARY = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}


def memory_options(
    backend: str, *, optimised: bool = False, with_library: bool = False
) -> dict[str, Any]:
    """Compiler options with which XLA reports the memory that a program may take.

    They are for programs that are compiled only to be measured.
    """
    options: dict[str, Any] = {} if optimised else {**_UNOPTIMISED.get(backend, {})}
    if not with_library and has_library(backend):
        options |= _WITHOUT_LIBRARY[backend]
    return options


def has_library(backend: str) -> bool:
    """Whether the compiler gives products to a library, and can do without."""
    options = _WITHOUT_LIBRARY.get(backend, {})
    return any(is_compiler_option(*x) for x in options.items())


def num_bytes(tree: PyTree) -> int:
    """The number of bytes of some arrays or structs."""
    return sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(tree))


# Not a Module: Equinox would warn of the user's own functions of JAX in the PyTree.
@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Split:
    """A PyTree as its arrays, which programs take and return, and the rest of it."""

    arrays: list
    rest: tuple = eqx.field(static=True)

    @classmethod
    def of(cls, tree: PyTree) -> "_Split":
        leaves, treedef = jtu.tree_flatten(tree)
        arrays, static = eqx.partition(leaves, eqx.is_array)
        return cls([x for x in arrays if x is not None], (treedef, (*static,)))

    @property
    def tree(self) -> PyTree:
        (treedef, static), arrays = self.rest, iter(self.arrays)
        return treedef.unflatten([next(arrays) if x is None else x for x in static])


class _CallsHostError(Exception):
    """Has a program that calls functions on the host."""


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
    # Those that call functions on the host.
    waiting: dict[frozenset, Callable] = {}

    def run(key: frozenset, *lists: list) -> _Split:
        ((treedef, static, _, chosen),) = key

        def called(*lists: list) -> _Split:
            nonlocal traces
            traces += 1
            arrays = [*itertools.chain(*lists)]
            of_first, of_rest = _Split(arrays, (treedef, static)).tree
            with for_platform(chosen):
                return _Split.of(fun(of_first, *of_rest))

        called.__name__, called.__qualname__ = fun.__name__, fun.__qualname__
        if getattr(jax.config, "jax_disable_jit", False):
            return called(*lists)
        inner = jax.jit(called, inline=inline)
        if calls_host(inner.trace(*lists).jaxpr):
            raise _CallsHostError(inner)
        return inner(*lists)

    run.__name__, run.__qualname__ = fun.__name__, fun.__qualname__
    donated = () if donate == "none" else 2
    jitted = jax.jit(run, static_argnums=0, donate_argnums=donated, inline=inline)
    # It waits for the end of a program, and explains errors of `equinox.error_if`. Its
    # types lack the settings of `jax.jit`.
    jit: Any = eqx.filter_jit
    waited = jit(lambda first, *rest: first[0](first[1], *rest), donate=donate)

    def computed(key: frozenset, lists: list[list]) -> _Split:
        if key not in waiting:
            try:
                return jitted(key, *lists)
            except _CallsHostError as e:
                (waiting[key],) = e.args
        return waited((waiting[key], lists[0]), *lists[1:])

    @functools.wraps(fun)
    def wrapper(first: Any, *rest: Any) -> Any:
        __tracebackhide__ = True
        leaves, treedef = jtu.tree_flatten((first, rest))
        arrays, static = [], []
        for x in leaves:
            is_array = isinstance(x, _ARRAYS)
            static.append(None if is_array else x)
            if is_array:
                arrays.append(x)
        # A set is one leaf for JAX, which would go through a tuple in each call.
        content = treedef, (*static,), number_types(static), platform(arrays)
        try:
            key, lists = frozenset([content]), [arrays]
        except TypeError as e:
            raise unhashable(static) or e from None
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
        if traces != before and not any(isinstance(x, Tracer) for x in out.arrays):
            others = fun, treedef, *map(jax.typeof, arrays)
            warn_of_new_functions(static, others)
            is_array = lambda x: isinstance(x, _ARRAYS)
            warn_of_new_numbers((first, *rest), is_array, others)
        return out.tree

    return cast(_Function, wrapper)
