"""The axes of a grid."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx

from .._base.shapes import check_fields, checked
from .._base.trees import as_int, described


class GridAxis(eqx.Module):
    """What [`eqxbatch.grid`][] returns.

    - `names`: the names of the grid axes.
    - `axes`: for each name, the axis of the argument's arrays.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)

    def __check_init__(self) -> None:
        check_fields(self)


@checked
def grid(name: str | Sequence[str], axis: int | Sequence[int] = 0) -> GridAxis:
    """Assigns an argument of [`eqxbatch.filter_grid_vmap`][] to an axis of the grid.

    **Arguments:**

    - `name`: the name of the grid axis, or a tuple of names for arrays with several
        grid axes.
    - `axis`: the axis of the argument's arrays that is mapped: an int, or one for each
        name. Leaves that are not arrays are not mapped.

    Raises `TypeError` for names that are not strings and axes that are not ints. Raises
    `ValueError` for repeated names or axes, and for different numbers of names and
    axes.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> f = eqxbatch.filter_grid_vmap(
        ...     lambda weight, x: weight * x,
        ...     in_axes=(eqxbatch.grid(("i", "j"), (0, 1)), eqxbatch.grid("j")),
        ... )
        >>> print(f(jnp.ones((2, 3)), jnp.arange(3.0)))
        [[0. 1. 2.]
         [0. 1. 2.]]

        ```
    """
    names = (name,) if isinstance(name, str) else tuple(name)
    for one in names:
        if not isinstance(one, str):
            raise TypeError(
                f"`name` must be a string, or several; got {described(one)}."
            )
    given: Any = axis if isinstance(axis, Sequence) else (axis,)
    axes = tuple(map(as_axis, given))
    if not names or len(names) != len(axes) or len({*names}) < len(names):
        raise ValueError(
            "`grid` must be given names that differ, and an axis for each of them; got "
            f"{name!r} and {axis!r}."
        )
    return GridAxis(names, axes)


def as_axis(axis: Any) -> int:
    number = as_int(axis)
    if number is None:
        raise TypeError(f"The number of an axis must be an int; got {described(axis)}.")
    return number


def is_grid_axis(x: Any) -> bool:
    return isinstance(x, GridAxis)
