"""Running functions over blocks of examples, without the settings of a transform."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._base.mesh import vary_as
from .accumulators import Concat
from .cut import Blocks
from .loop import run_blocks
from .moments import Sum
from .slots import match_accumulators


class Rows(eqx.Module):
    """The arrays of some examples, and the batch axis of each.

    The axis is None for an array that all examples share.
    """

    arrays: list
    axes: tuple[Any, ...] = eqx.field(static=True)
    total: int = eqx.field(static=True)

    def at(self, start: Any, size: int) -> "Rows":
        """A number of rows, starting at a given one."""
        if size == self.total:
            return self
        cut = [
            x if axis is None else lax.dynamic_slice_in_dim(x, start, size, axis)
            for x, axis in zip(self.arrays, self.axes, strict=True)
        ]
        return Rows(cut, self.axes, size)

    def one(self) -> list:
        """An example of zeros, for computations that do not depend on its values."""
        return [
            x
            if axis is None
            else vary_as(
                [x], jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
            )
            for x, axis in zip(self.arrays, self.axes, strict=True)
        ]


def accumulated_sums(
    sums: Callable[[list, Any], Any],
    arrays: list,
    axes: Sequence[int],
    weights: Array | None,
    size: int,
) -> Any:
    """Adds up what `sums(arrays, weights)` returns for blocks of examples.

    `axes` are the batch axes; `weights` has one weight for each example, or is None.
    """
    num, total = len(arrays), arrays[0].shape[axes[0]]
    if weights is None:
        run = lambda arrays, _: sums(arrays, None)
        return accumulated(run, Rows(arrays, tuple(axes), total), size, Sum())
    run = lambda arrays, _: sums(arrays[:num], arrays[num])
    rows = Rows([*arrays, weights], (*axes, 0), total)
    return accumulated(run, rows, size, Sum())


def accumulated(
    fun: Callable[[list, int], Any],
    rows: Rows,
    size: int | None,
    accumulator: Sum | Concat,
) -> Any:
    """Results of `fun` for blocks of rows, summed or concatenated."""
    if size is None or size >= rows.total > 0:
        return fun(rows.arrays, rows.total)
    blocks = Blocks(rows.total, max(1, min(size, rows.total)))
    run = lambda arrays, size: (fun(arrays, size), None)
    slots = lambda output, _: match_accumulators(accumulator, output)
    return run_blocks(run, rows.arrays, rows.axes, blocks, slots, None, False)
