"""What counts as an int in an argument."""

import operator
from typing import Any


def as_int(x: Any) -> int | None:
    """An int, or what stands for one, as an int; None for all else, and for bools."""
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None
