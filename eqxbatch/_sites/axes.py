"""Axes of factors, told apart by what they run along."""

import enum
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Array


# Axes sort by role, then by name: those of a leaf in the order of its shape.
class Role(enum.IntEnum):
    """What an axis runs along.

    - `EXAMPLE`: the examples of one side.
    - `LEAF`, `VIEW`: an axis of a leaf; an axis of a view whose axes are not known to
        be those of its leaf.
    - `POSITION`: what a rule has besides, such as the positions that share a weight.
    - `OUTPUT`: an axis of the function's output, or the vectors that are pulled back.
    - `PROBE`: random directions in outputs.
    - `COMPLEX`: real and imaginary parts.
    - `SMALL`: all entries of a small view.
    - `ENTRY`: all entries of a leaf, or the entries of an axis of an output.
    """

    EXAMPLE = 0
    LEAF = 1
    VIEW = 2
    POSITION = 3
    OUTPUT = 4
    PROBE = 5
    COMPLEX = 6
    SMALL = 7
    ENTRY = 8


# The side of axes that both sides have in common.
SHARED = -1


class Axis(NamedTuple):
    """One axis of the factors of two sides, which are sites, or blocks of examples.

    - `role`: what it runs along.
    - `name`: its number, or its name in a rule.
    - `side`: 0 or 1 if the other side has an axis of its own; else `SHARED`.

    The weight of a dense layer has `LEAF 0` and `LEAF 1`; its cotangents have
    `EXAMPLE 0 of side 0` and `LEAF 0`.
    """

    role: Role
    name: int | str = 0
    side: int = SHARED

    @property
    def is_of_leaf(self) -> bool:
        """Whether it is an axis of a leaf, or of a view of one."""
        return self.role in (Role.LEAF, Role.VIEW)

    @property
    def is_position(self) -> bool:
        return self.role is Role.POSITION

    @property
    def number(self) -> int:
        """The name of an axis of a leaf, a view or an output."""
        assert isinstance(self.name, int)
        return self.name

    def of_side(self, side: int) -> "Axis":
        return self._replace(side=side)

    def __repr__(self) -> str:
        side = "" if self.side == SHARED else f" of side {self.side}"
        return f"{self.role.name} {self.name}{side}"


Axes = tuple[Axis, ...]


Shape = tuple[int, ...]


# The examples of each side. Where each example only meets itself, as in its norm, both
# sides have the first of the two axes.
EXAMPLE = Axis(Role.EXAMPLE, side=0)
OTHER_EXAMPLE = Axis(Role.EXAMPLE, side=1)


class Named(NamedTuple):
    """An array with its axes: a term of a contraction.

    With the axes `EXAMPLE` and `LEAF 1`, it is the operand of a dense layer.
    """

    array: Array
    axes: Axes

    def __repr__(self) -> str:
        along = ", ".join(map(repr, self.axes)) or "no axis"
        return f"<array of shape {self.array.shape} along {along}>"


def axes_in(terms: Iterable[Named]) -> dict[Axis, None]:
    """The axes that some terms have, in their order."""
    # Names are strings, so a set would have another order in each process, and programs
    # would differ.
    return dict.fromkeys(itertools.chain.from_iterable(x.axes for x in terms))
