"""PyTree prefixes: one thing said of all that is below a place of a PyTree."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree


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
        raise ValueError(
            f"`{name}` must be {what}; got {spec!r} for the structure "
            f"{jtu.tree_structure(tree)}. {remedy}({e})"
        ) from e
    return places
