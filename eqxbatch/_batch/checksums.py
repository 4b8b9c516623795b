"""CRC32C, by which zarr checks a chunk, of bytes that are read once."""

import functools
import importlib
from collections.abc import Callable

import numpy as np


# So many bytes at a time cost a call of Python a tenth of reading them.
_SEGMENT = 2**15


def checksums(data: np.ndarray) -> np.ndarray:
    """The CRC32C of the bytes before each segment, and behind the last, that of all.

    Bytes of equal length for which all of these are equal have equal checksums in each
    segment: bytes that differ in several segments pass for equal with the probability
    of several checksums.
    """
    extended = _extended()
    sums = [0]
    for start in range(0, len(data), _SEGMENT):
        sums.append(extended(sums[-1], data[start : start + _SEGMENT]))
    # In the byte order in which zarr writes them.
    return np.array(sums, "<u4")


@functools.cache
def _extended() -> Callable[[int, np.ndarray], int]:
    """The CRC32C of some bytes and of those behind them."""
    # zarr 3.1.3 depends on another package than later versions.
    try:
        return importlib.import_module("google_crc32c").extend
    except ImportError:
        crc32c = importlib.import_module("crc32c").crc32c
        return lambda before, data: crc32c(data, before)
