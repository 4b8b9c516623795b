"""Passes of a call over its batch, which may be one of several batches.

A call loops over its batch once, or several times if it needs the results of one pass
for the next. If its batch is one of several, each pass continues from the states of the
batches before, and its states are what the call is for.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from .._base.platforms import assigned
from .._base.trees import (
    safe_zip,
)
from .batch import BEFORE_BATCHES
from .blocks import Blocks
from .rows import Rows
from .run import Run
from .slots import OutputAccumulator


class Pass(eqx.Module):
    """A pass over the batches that came so far.

    - `states`: those of the accumulators; None for results that are joined.
    - `num_examples`, `num_microbatches`: how many it has seen.
    - `example`, `axes`: the types of what there is for one example, and the batch axes
        of its arrays.
    - `of_last`: the paths of results that are those of the last example.
    """

    states: list
    num_examples: Int[Array, ""]
    num_microbatches: Int[Array, ""]
    example: tuple = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)
    of_last: tuple[str, ...] = eqx.field(static=True)


@dataclasses.dataclass
class Passes:
    """The passes of a call, while it is traced.

    - `before`: those over the batches before; None for a call that begins them.
    - `active`: the number of the pass that this batch is for; None if it is for none.
    - `number`: how many passes the call has reached.
    - `after`: the passes with this batch.
    - `rows`: its results that are joined, and the paths and axes of these. For a call
        that finishes, they stand for those of all batches.
    - `shared`: the arrays of the call that all batches share.
    """

    before: list[Pass] | None
    active: int | None = None
    number: int = 0
    after: list[Pass] = dataclasses.field(default_factory=list)
    rows: list[tuple[Array, str, int]] = dataclasses.field(default_factory=list)
    shared: Sequence[Any] = ()

    @property
    def runs(self) -> bool:
        """Whether the batch is for the pass that comes now."""
        return self.active == self.number

    @property
    def start(self) -> int | Array:
        """The number of examples before this batch."""
        if self.before is None or self.active is None:
            return 0
        return self.before[self.active].num_examples

    @property
    def num_examples(self) -> Array:
        """The number of examples of all batches."""
        return (self.before or self.after)[-1].num_examples

    def wrapped(
        self, compute: Callable[[Run], list[PyTree]]
    ) -> Callable[[Run], list[PyTree]]:
        """A function like `compute`, for the pass that comes now.

        It continues from the states before this batch, and keeps those after it.
        """

        def results(run: Run) -> list[PyTree]:
            run = dataclasses.replace(run, slots=self._begun(run.slots, run.rows))
            # A batch is for one pass. All others only need the types of states.
            if self.runs:
                of_batch = compute(run)
            else:
                of_batch = run.initial_states(run.value_structs)
            return self._ended(run.slots, of_batch, run.blocks)

        return results

    def _begun(
        self, slots: list[OutputAccumulator], rows: Rows
    ) -> list[OutputAccumulator]:
        """The slots of the pass that comes now, with the states before this batch.

        Raises `ValueError` if an example has other types than those before.
        """
        example = rows.example()
        none = [None] * len(slots)
        zero = jnp.zeros((), jnp.int32)
        # The first batch begins the pass, and says what examples of all others must be.
        if self.before is None:
            of_last = tuple(x.path for x in slots if x.accumulator.of_last)
            self.after.append(Pass(none, zero, zero, example, rows.axes, of_last))
            pass_ = self.after[-1]
        else:
            # A call makes its passes in the same order for each batch.
            pass_ = self.before[self.number]
            self.after.append(pass_)
            if self.runs and example != pass_.example:
                raise ValueError(
                    "Examples must have the shapes, dtypes and weak types of those in "
                    f"the first batch, {pass_.example}; got {example}."
                )
        # Joined rows need no state. All others go on from that of the batches before.
        offset = pass_.num_microbatches, pass_.num_examples
        return [
            slot
            if slot.concat is not None
            else dataclasses.replace(slot, continues=True, before=state, offset=offset)
            for slot, state in safe_zip(slots, pass_.states)
        ]

    def _ended(
        self, slots: list[OutputAccumulator], states: list[PyTree], blocks: Blocks
    ) -> list[PyTree]:
        """The results of a pass, from its states with this batch.

        For what is joined, the states are the results of this batch.
        """
        pass_ = self.after[self.number]
        # A batch for another pass leaves the states as they are.
        if self.before is not None:
            states = [
                x if not s.continues else s.after(x) if self.runs else s.before
                for s, x in safe_zip(slots, states)
            ]
        if self.before is None or self.runs:
            # Rows that are joined leave with each batch, and are no state.
            carried = [x if s.continues else None for s, x in safe_zip(slots, states)]
            pass_ = dataclasses.replace(pass_, states=carried)
        if self.runs:
            pass_ = dataclasses.replace(
                pass_,
                num_examples=pass_.num_examples + blocks.total,
                num_microbatches=pass_.num_microbatches + blocks.num,
            )
        self.after[self.number] = pass_
        # The next pass of the call needs the results of this one, also partial ones.
        results = []
        for slot, state in safe_zip(slots, states):
            if slot.concat is None:
                state = slot.accumulator.finalize(state)
            elif self.runs or self.active is None:
                axis = slot.concat.axis_of(state)
                self.rows.append((state, slot.path, axis))
            results.append(state)
        self.number += 1
        return results


_CURRENT: contextvars.ContextVar[Passes | None] = contextvars.ContextVar(
    "passes", default=None
)


def current_passes() -> Passes | None:
    """The passes of the call that is traced; None if its batch is the only one."""
    return _CURRENT.get()


@contextlib.contextmanager
def of_passes(passes: Passes | None) -> Iterator[None]:
    """A context in which each `run_blocks` is one of these passes."""
    # `split_batch` refuses rows in what all batches share.
    shared = () if passes is None else passes.shared
    with assigned(_CURRENT, passes), assigned(BEFORE_BATCHES, shared):
        yield
