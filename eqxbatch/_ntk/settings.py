"""What an empirical kernel is told: kinds, parameters, axes, sizes."""

import collections
import dataclasses
import functools
from typing import Any, get_args, Literal

import equinox as eqx

from .._batch.memory import free_bytes, MemoryBudget, resolved
from .._pairs.calls import BlockSize, check_block_size, check_vmap_axes, VmapAxes
from .output_axes import check_axes, Mirror


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


Implementation = Literal["auto", "jacobian_contraction", "ntk_vector_products", "sites"]


def check_implementation(implementation: Any) -> Implementation:
    """One of the four names; numbers are those that `neural_tangents` has for them."""
    names: tuple[Implementation, ...] = get_args(Implementation)
    for number, name in enumerate(names):
        is_number = implementation == number and not isinstance(implementation, bool)
        if is_number or str(implementation).lower() == name:
            return name
    raise ValueError(
        f"`implementation` must be one of {names}, or 0, 1, 2 or 3 for them; got "
        f"{implementation!r}."
    )


# What is kept of examples takes as much room as the blocks that are worked with.
SHARE = 2


class Settings(eqx.Module):
    """How a kernel is computed.

    `keep` is how many bytes what is kept of examples may take; None for all.
    """

    trace_axes: tuple[int, ...] = eqx.field(static=True)
    diagonal_axes: tuple[int, ...] = eqx.field(static=True)
    vmap_axes: VmapAxes
    block_size: BlockSize = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True, default="auto")
    keep: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if self.block_size is not None and not self.vmap_axes.is_batched:
            raise ValueError(
                "`block_size` must be None with `vmap_axes=None`: examples that the "
                "model takes together cannot be taken apart. Use `vmap_axes=0` if they "
                "do not interact."
            )

    def in_bytes(self) -> "Settings":
        """The settings with all that depends on free memory as it is now."""
        if self.block_size is None or self.keep is not None:
            return self
        if isinstance(self.block_size, MemoryBudget):
            return resolved(self)
        # Rounded to a power of two: it makes panels, and few of them are enough.
        return dataclasses.replace(self, keep=free_bytes(1) // SHARE)

    @property
    def mirror(self) -> Mirror:
        """What exchanges the two sides of a kernel."""
        return Mirror(self.trace_axes, self.diagonal_axes)


def make_settings(
    trace_axes: Any,
    diagonal_axes: Any,
    vmap_axes: Any,
    implementation: Any,
    block_size: Any,
) -> Settings:
    """The settings, all of them checked."""
    return Settings(
        trace_axes=check_axes("trace_axes", trace_axes),
        diagonal_axes=check_axes("diagonal_axes", diagonal_axes),
        vmap_axes=check_vmap_axes(vmap_axes),
        block_size=check_block_size(block_size),
        implementation=check_implementation(implementation),
    )
