"""What messages say of PyTrees."""

from typing import Any


def type_of(x: Any) -> Any:
    """The shape and dtype of an array or of a struct; all else as it is."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), str(x.dtype)
    return x
