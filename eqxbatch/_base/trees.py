"""PyTrees, and what is said of arguments."""

import importlib
import inspect
import logging
import operator
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree


# Says what takes a while, and what is chosen.
log = logging.getLogger("eqxbatch")


def is_none(x: Any) -> bool:
    return x is None


def match_prefix(
    name: str,
    spec: PyTree,
    tree: PyTree,
    what: str,
    remedy: str = "",
    is_leaf: Callable[[Any], bool] = is_none,
) -> list[tuple[tuple, Any, PyTree]]:
    """The leaves of a prefix of `tree`, each with its path and what it stands for.

    Raises `ValueError` where `spec` is no prefix; `name`, `what` the argument is to be,
    and the `remedy` are for its message.
    """
    places: list[tuple[tuple, Any, PyTree]] = []
    try:
        jtu.tree_map_with_path(
            lambda *place: places.append(place), spec, tree, is_leaf=is_leaf
        )
    except (TypeError, ValueError) as e:
        got = f"got {shown(spec)} for {shown(tree)}"
        raise ValueError(f"`{name}` must be {what}; {got}. {remedy}".rstrip()) from e
    return places


_MOST_GROUPS = 8


def consecutive_groups(sizes: list[int], least: int) -> list[list[int]]:
    """Consecutive ones, about an eighth of all together, or `least` if that is more."""
    most = max(sum(sizes) // _MOST_GROUPS, least)
    groups: list[list[int]] = []
    for i, size in enumerate(sizes):
        if groups and sum(sizes[k] for k in groups[-1]) + size <= most:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def type_of(x: Any) -> Any:
    """The shape and dtype of an array or of a struct; all else as it is."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), str(x.dtype)
    return x


# Scalars of NumPy are numbers, and what they are is worth saying.
_NO_ARRAYS = (type, np.generic)


def _is_array(x: Any) -> bool:
    """Whether that is an array, of whatever library, or a struct."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, _NO_ARRAYS)


# How many paths a message lists, and how long what it quotes can be.
_MOST_PATHS = 6


_LONGEST = 200


def shown(x: Any) -> str:
    """What a message says of an argument: in one line, without the values of arrays.

    An array is its shape and dtype, and a PyTree with arrays the paths of these.
    """
    if _is_array(x):
        return f"an array of shape {tuple(x.shape)} and dtype {x.dtype}"
    if inspect.isroutine(x) or isinstance(x, type):
        return str(getattr(x, "__qualname__", type(x).__name__))
    paths = [
        f"`{jtu.keystr(path)}` of shape {tuple(leaf.shape)} and dtype {leaf.dtype}"
        for path, leaf in jtu.tree_leaves_with_path(x)
        if _is_array(leaf)
    ]
    if paths:
        more = len(paths) - _MOST_PATHS
        rest = [f"{more} more"] if more > 0 else []
        listed = ", ".join([*paths[:_MOST_PATHS], *rest])
        return f"a {type(x).__name__} with the arrays {listed}"
    text = " ".join(repr(x).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def described(x: Any) -> str:
    """The same, with the type of what is no array."""
    text = shown(x)
    return text if _is_array(x) else f"{text} of type {type(x).__name__}"


def as_int(x: Any) -> int | None:
    """An int, or what stands for one, as an int; None for all else, and for bools."""
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


def import_extra(module: str, what: str, extra: str) -> Any:
    """Imports a module of a package that may not be there.

    Raises `ImportError` then, with how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(
            f'`{what}` needs {package}: pip install "equinox-batch[{extra}]".'
        ) from e
