"""Warnings of programs that are compiled again and again for the same mistake."""

import dataclasses
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .checks import warn_user


# A function that is made anew now and then is no mistake.
_MOST_NEW = 2


# Neither is a number of which there are a few values.
_MOST_VALUES = 4


# The most programs that are known at a time.
_MOST_PROGRAMS = 1000


# The objects that each program was compiled for, functions first, by the hash of all
# that it depends on.
_COMPILED: dict[int, list[list[weakref.ref]]] = {}


def warn_of_new_functions(static: Sequence[Any], context: Hashable) -> None:
    """Warns if a program was compiled again only because functions in it are new ones.

    Their code and closures are those of functions for which it was compiled before,
    and so is all else in `static`, and `context`.
    """
    # Functions first, so that those of another program are compared one by one.
    functions = [x for x in static if isinstance(x, _FUNCTIONS)]
    content = _Content([*map(weakref.ref, functions)])
    objects = content.objects
    key = hash((content.of((*static,)), context))
    programs = _COMPILED.setdefault(key, [])
    # Another object can be where one was that is gone.
    alive = [refs for refs in programs if all(ref() is not None for ref in refs)]
    programs[:] = alive
    new = functions
    for refs in programs:
        new = [x for x, ref in zip(functions, refs, strict=False) if ref() is not x]
        if not new:
            return
    programs.append(objects)
    if len(_COMPILED) > _MOST_PROGRAMS:
        _COMPILED.pop(next(iter(_COMPILED)))
    # Once, as soon as it is no coincidence.
    if new and len(programs) == _MOST_NEW + 1:
        warn_user(
            f"The same program was compiled {len(programs)} times, because "
            f"`{_name_of(new[0])}` is a new function each time, with the same code and "
            "the same values around it. Define it once, outside of the loop or "
            "function that makes it, and pass values that change as arguments."
        )


@dataclasses.dataclass
class _Compiled:
    """The programs that differ in Python numbers only.

    - `objects`: those that all of them depend on.
    - `numbers`: for each program, its numbers in the same order.
    """

    objects: list[weakref.ref]
    numbers: list[list[Any]]


# By the hash of all that the programs depend on, except for numbers.
_COMPILED_NUMBERS: dict[int, _Compiled] = {}


def warn_of_new_numbers(
    call: tuple[PyTree, ...], is_array: Callable, context: Hashable
) -> None:
    """Warns if a program was compiled again only because a Python number has changed.

    `call` is a transform and the arguments of a call of it, or whatever else has a
    program, and `context` is what else this depends on. Sizes in settings of this
    package are no mistake.
    """
    if isinstance(call[0], tuple) and _is_transform(call[0][0]):
        # A transform of batches, what all of them share, and one of them.
        (transform, (leading, batch), *_), *_ = call
        call = transform, (*leading, *batch), {}
    elif _is_transform(call[0]) and not isinstance(call[2], dict):
        return  # Before and after the batches.
    # Programs have the same key if they differ in the values of numbers only.
    content = _Content([], [])
    parts = [
        _setting(call, path, x) or content.of(x, _label(call, path))
        for path, x in jtu.tree_leaves_with_path(call)
        if not is_array(x)
    ]
    values = [value for _, value in content.numbers or ()]
    key = hash((*parts, context))
    compiled = _COMPILED_NUMBERS.get(key)
    if compiled is None or any(ref() is None for ref in compiled.objects):
        compiled = _COMPILED_NUMBERS[key] = _Compiled(content.objects, [])
    if len(_COMPILED_NUMBERS) > _MOST_PROGRAMS:
        _COMPILED_NUMBERS.pop(next(iter(_COMPILED_NUMBERS)))
    # Once is enough.
    if len(compiled.numbers) > _MOST_VALUES:
        return
    compiled.numbers.append(values)
    num = len(compiled.numbers)
    if num <= _MOST_VALUES:
        return
    labels = [label for label, _ in content.numbers or ()]
    # A number that was another one each time is the cause.
    for label, column in zip(labels, zip(*compiled.numbers, strict=True), strict=True):
        if len({*map(repr, column)}) == num:
            warn_user(
                f"The same program was compiled {num} times, because a Python number "
                f"is a constant of it: {label} was {', '.join(map(repr, column))}. "
                "Pass an array, as in `jax.numpy.asarray(number)`. As an argument that "
                "all examples share, it gets None in `in_axes`."
            )
            return


def _setting(call: tuple[PyTree, ...], path: tuple, x: object) -> Hashable:
    """An integer that is no number of a user, such as a size; None for anything else.

    `call` is a transform, or whatever else has a program, and its arguments.
    """
    if type(x) is not int:
        return None
    if not _is_transform(call[0]):
        return "setting", x
    owner: Any = call
    for entry in path[:-1]:
        owner = _entry(owner, entry)
    package = __name__.partition(".")[0]
    is_ours = type(owner).__module__.partition(".")[0] == package
    return ("setting", x) if is_ours else None


def _is_transform(x: object) -> bool:
    return hasattr(type(x), "public_name")


def _entry(tree: PyTree, key: Any) -> Any:
    """What is at a key of a PyTree; None where its class does not give it back."""
    if isinstance(key, jtu.GetAttrKey):
        return getattr(tree, key.name, None)
    index = key.idx if isinstance(key, jtu.SequenceKey) else getattr(key, "key", None)
    try:
        return tree[index]
    except (TypeError, LookupError):
        return None


def _label(call: tuple[PyTree, ...], path: tuple) -> str:
    """How a message calls a leaf of a transform and the arguments of its call."""
    transform, *_ = call
    number, *inner = path
    if not _is_transform(transform) or number.idx == 0 or not inner:
        name = getattr(path[-1], "key", None)
        return f"`{jtu.keystr(path[1:]) if name is None else name}`"
    first, *inner = inner
    name = getattr(first, "key", None)
    if name is None:
        names = [*inspect.signature(transform).parameters]
        name = names[first.idx] if first.idx < len(names) else f"[{first.idx}]"
    return f"`{name}{jtu.keystr(tuple(inner))}`"


def _name_of(fun: object) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__qualname__", type(fun).__name__)


_FUNCTIONS = (types.FunctionType, functools.partial)


_CONSTANTS = (bool, int, float, complex, str, bytes, types.NoneType)


_NUMBERS = (int, float, complex)


_UNKNOWN = itertools.count()


@dataclasses.dataclass
class _Content:
    """What tells functions apart that compute different things, and constants.

    - `objects`: those that it identifies, because others can take their place later.
    - `numbers`: Python numbers and how messages call them, whose values are left out;
        None to tell them apart like other constants.
    """

    objects: list[weakref.ref]
    numbers: list[tuple[str, Any]] | None = None

    def of(
        self, x: object, label: str = "", around: tuple[object, ...] = ()
    ) -> Hashable:
        """`around` are the functions with `x` in their closures."""
        inner = functools.partial(self.of, around=(*around, x))
        if isinstance(x, tuple):
            return tuple(inner(entry, label) for entry in x)
        if self.numbers is not None and type(x) in _NUMBERS:
            self.numbers.append((label, x))
            return type(x)
        if isinstance(x, _CONSTANTS):
            return type(x), repr(x)
        # A function can be in its own closure.
        for level, function in enumerate(around):
            if x is function:
                return "recursive", level
        if isinstance(x, functools.partial):
            return inner(x.func, label), inner(x.args, label), self._named(x, inner)
        if isinstance(x, types.FunctionType):
            name = f"in `{_name_of(x)}`"
            defaults = x.__defaults__, (*(x.__kwdefaults__ or {}).items(),)
            values = [
                inner(cell.cell_contents, f"`{variable}` {name}")
                for variable, cell in zip(
                    x.__code__.co_freevars, x.__closure__ or (), strict=True
                )
                # The cell of a name that has no value yet is empty.
                if cell != types.CellType()
            ]
            ids = id(x.__code__), id(x.__globals__)
            return *ids, (*values,), inner(defaults, f"a default {name}")
        # Anything else is itself: no other object has its address while it lives.
        try:
            self.objects.append(weakref.ref(x))
        except TypeError:  # A list may have changed.
            return next(_UNKNOWN)
        return id(x)

    def _named(self, x: functools.partial, inner: Callable) -> Hashable:
        items = x.keywords.items()
        return tuple((key, inner(value, f"`{key}`")) for key, value in items)
