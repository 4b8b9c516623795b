"""Rows of examples in arrays of any library: on devices, in host memory, on disk."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .._base.trees import (
    shown,
)
from .._base.types import check_unmasked


def is_state(x: object) -> bool:
    return isinstance(x, eqx.nn.State)


def is_stored(x: object) -> bool:
    """Whether an array is not in memory: it has a shape, and is read by slices."""
    is_in_memory = eqx.is_array(x) and not isinstance(x, np.memmap)
    return not is_in_memory and hasattr(x, "__getitem__") and has_rows(x)


def has_rows(x: object) -> bool:
    """Whether this is an array of any library, with at least one axis."""
    return bool(getattr(x, "shape", ()))


def read_rows(x: PyTree, start: int, stop: int) -> Any:
    """Some rows of an array, in memory that reading others does not overwrite.

    Raises `ValueError` if other rows come than were asked for.
    """
    try:
        part = x[start:stop]
    except StopIteration as e:
        # It would end a loop of Python, as if there were no more rows.
        raise RuntimeError(f"Reading rows of {shown(x)} raised StopIteration.") from e
    if isinstance(x, jax.Array):
        return part
    part = as_numpy(part)
    if part.shape[:1] != (stop - start,):
        raise ValueError(
            f"Rows {start} to {stop} of {shown(x)} must be {stop - start} rows; got "
            f"{shown(part)}. Slices must return all rows within `shape`."
        )
    # JAX has no arrays of the other byte order.
    is_other = part.dtype != part.dtype.newbyteorder("=")
    return copied(part) if is_other or is_stored(x) else part


def as_numpy(x: PyTree) -> np.ndarray:
    """An array of any library as one of NumPy, which may share its memory.

    Raises `ValueError` if it has masked entries.
    """
    try:
        # Unlike `numpy.asarray`, this keeps a mask.
        array = np.asanyarray(x)
    except TypeError as e:
        # PyTorch knows no NumPy arrays of bfloat16 and float8, and JAX does
        # (https://github.com/pytorch/pytorch/issues/110285).
        array = _by_dlpack(x, e)
    check_unmasked(array)
    return np.asarray(array)


# The number of CPUs in DLPack.
_CPU = 1


def _by_dlpack(x: PyTree, error: TypeError) -> np.ndarray:
    """The entries of an array of which NumPy has raised an error."""
    if not hasattr(x, "__dlpack__"):
        raise error
    try:
        device, _ = x.__dlpack_device__()
        if device == _CPU:
            # JAX reads no arrays with gaps, which PyTorch can close.
            whole = x.contiguous() if hasattr(x, "contiguous") else x
            return np.asarray(jax.dlpack.from_dlpack(whole))
    except Exception as e:
        raise TypeError(
            f"NumPy and JAX cannot read {shown(x)}: {error}; {e}. Convert it to a "
            "dtype that both have, such as float32."
        ) from e
    raise error


# Where XLA for CPUs takes arrays as they are.
_ALIGNED = 64


def copied(x: PyTree) -> np.ndarray:
    """A copy that nobody writes to, and that JAX does not copy again on a CPU.

    JAX shares memory that is aligned, even if it is told not to
    (https://github.com/jax-ml/jax/issues/37830).
    """
    x = np.asarray(x)
    dtype = x.dtype.newbyteorder("=")
    # Objects are references, which bytes must not stand for.
    if dtype.hasobject:
        return np.array(x)
    # NumPy promises no such alignment, so there is room to begin later.
    memory = np.empty(x.nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    copy = memory[start : start + x.nbytes].view(dtype).reshape(x.shape)
    copy[...] = x
    return copy
