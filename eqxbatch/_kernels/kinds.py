"""Which kinds of kernels to return, and in what."""

import collections
import functools
from typing import Any


_KINDS = ("nngp", "ntk")


def names_of(get: Any) -> tuple[str, ...]:
    """The kinds of kernels to compute."""
    names = _KINDS if get is None else (get,) if isinstance(get, str) else get
    if isinstance(names, (tuple, list)) and all(isinstance(n, str) for n in names):
        names = tuple(name.lower() for name in names)
        if names and len({*names}) == len(names) and {*names} <= {*_KINDS}:
            return names
    raise ValueError(
        "`get` must be 'nngp', 'ntk', a tuple with one or both of them, each once, or "
        f"None for both; got {get!r}."
    )


def named(get: Any, names: tuple[str, ...], results: list) -> Any:
    """The kernel itself if one was asked for by its name, and else a named tuple."""
    return results[0] if isinstance(get, str) else _kernel_type(names)(*results)


@functools.cache
def _kernel_type(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Kernel", names)
