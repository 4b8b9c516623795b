"""Sums and means over a batch of examples, or over the one example that there is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Real

from .._base.jaxprs import uses_dtype
from .._batch.accumulators import Concat
from .._batch.axes import Batch
from .._batch.cut import Blocks
from .._batch.moments import check_real, check_weights, Mean, OfTotals, Sum
from .._batch.objective import Objective, weighted_totals
from .._batch.slots import array_structs, match_accumulators, Slots
from .._batch.transform import AbstractAutoSharded, Blocking


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a call, in microbatches; `blocks` is None if there is but one."""

    batch: Batch
    blocks: Blocks | None
    blocking: Blocking
    accumulator: Sum | Mean

    def total(
        self,
        fun: Callable[[list, Real[Array, " n"] | None], tuple[list, PyTree]],
        closed: Any,
    ) -> tuple[list, PyTree]:
        """Accumulates what `fun` makes of the rows of a microbatch and their weights.

        It returns the (weighted) sums over the microbatch, and what there is for each
        example, along axis 0. The results are in float32 at least. The jaxpr `closed`
        is that of one example.
        """
        if self.blocks is None:
            return fun([], None)
        arrays, axes = self.batch.arrays, self.batch.axes
        num, weights = len(arrays), self.accumulator.weights
        if weights is not None:
            name = type(self.accumulator).__name__
            check_weights(name, weights, self.blocks)
            check_real(name, weights)
            arrays, axes = [*arrays, weights], (*axes, 0)

        is_narrow = uses_dtype(closed.jaxpr, jnp.float16)

        def run(rows: list, size: int) -> tuple[tuple[list, PyTree], None]:
            each: list[PyTree] = []

            def sums(weights: Array | None, share: float) -> list:
                if share != 1:
                    ones = jnp.ones(size) if weights is None else weights
                    weights = ones * share
                found, extra = fun(rows[:num], weights)
                each.append(extra)
                return found

            own = None if weights is None else rows[-1]
            found = weighted_totals(sums, size, own, is_narrow)
            return (found, each[0]), None

        def slots(output: tuple, _: Any) -> Slots:
            has_each = bool(array_structs(output[1]))
            each = Concat() if has_each else None
            return match_accumulators((OfTotals(self.accumulator), each), output)

        return self.blocking.run(arrays, axes, self.blocks, run, slots)

    def fixed(self) -> Blocking:
        """Microbatches of the size that these have."""
        size = None if self.blocks is None else self.blocks.size
        return dataclasses.replace(self.blocking, microbatch_size=size)


class AbstractOverExamples(AbstractAutoSharded):
    """A transform whose result is a sum or mean over examples.

    With `in_axes=None`, there are no examples: the function is one of all arguments.
    """

    objective: eqx.AbstractVar[Objective]
    blocking: eqx.AbstractVar[Blocking]
    accumulator: eqx.AbstractVar[Sum | Mean]


def check_over_examples(transform: AbstractOverExamples) -> None:
    """Raises for settings that do not fit to each other."""
    if not isinstance(transform.accumulator, (Sum, Mean)):
        raise TypeError(
            "`accumulator` must be a Sum or a Mean, over the losses of the "
            f"examples; got {transform.accumulator!r}."
        )
    if (
        transform.objective.in_axes is None
        and transform.blocking.microbatch_size is not None
    ):
        raise ValueError(
            "`microbatch_size` is about a batch of examples, but `in_axes` is "
            "None: `fun` is one function of all its arguments. Give the batch "
            "axes of the arguments after the first, or leave it out."
        )


Call = tuple[Callable, tuple, dict[str, Any]]


def split_call(transform: AbstractOverExamples, call: Call, one: Call) -> Examples:
    """The examples of a `call` of a transform.

    `one` is what is called for each example, which may be without some argument.
    """
    fun, args, kwargs = one
    blocking, accumulator = transform.blocking, transform.accumulator
    batch = transform.objective.batch(fun, args, kwargs)
    if transform.objective.in_axes is None:
        return Examples(batch, None, blocking, accumulator)
    blocks = blocking.blocks(batch, batch.total(), transform, call)
    return Examples(batch, blocks, blocking, accumulator)
