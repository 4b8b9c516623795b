"""Passes of a call over its batch, which may be one of several batches.

A call loops over its batch once, or several times if it needs the results of one pass
for the next. If its batch is one of several, each pass continues from the states of the
batches before, and its states are what the call is for.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._base.platforms import assigned
from .._base.trees import (
    safe_zip,
)
from .accumulators import Concat, Last
from .batch import BEFORE_BATCHES
from .blocks import (
    Blocks,
)


if TYPE_CHECKING:
    pass


class Pass(eqx.Module):
    """A pass over the batches that came so far.

    - `states`: those of the accumulators; None for results that are joined.
    - `num_examples`, `num_microbatches`: how many it has seen.
    - `example`, `axes`: the types of the batched arrays of one example, and the batch
        axes of these.
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

    def begun(self, slots: list, arrays: list, axes: tuple[int, ...]) -> list:
        """The slots of the pass that comes now, with the states before this batch.

        Raises `ValueError` if an example has other types than those before.
        """
        example = tuple(
            jax.ShapeDtypeStruct(
                (*x.shape[:axis], *x.shape[axis + 1 :]),
                x.dtype,
                weak_type=jax.typeof(x).weak_type,
            )
            for x, axis in safe_zip(arrays, axes)
        )
        none = [None] * len(slots)
        zero = jnp.zeros((), jnp.int32)
        if self.before is None:
            of_last = tuple(x.path for x in slots if isinstance(x.accumulator, Last))
            self.after.append(Pass(none, zero, zero, example, tuple(axes), of_last))
            pass_ = self.after[-1]
        else:
            pass_ = self.before[self.number]
            self.after.append(pass_)
            if self.runs and example != pass_.example:
                raise ValueError(
                    "Examples must have the shapes, dtypes and weak types of those in "
                    f"the first batch, {pass_.example}; got {example}."
                )
        offset = pass_.num_microbatches, pass_.num_examples
        return [
            slot
            if isinstance(slot.accumulator, Concat)
            else dataclasses.replace(slot, continues=True, before=state, offset=offset)
            for slot, state in safe_zip(slots, pass_.states)
        ]

    def ended(self, slots: list, states: list, blocks: Blocks) -> list:
        """The results of a pass, from its states with this batch.

        For what is joined, the states are the results of this batch.
        """
        pass_ = self.after[self.number]
        if self.before is not None:
            states = [
                x if not s.continues else s.after(x) if self.runs else s.before
                for s, x in safe_zip(slots, states)
            ]
        if self.before is None or self.runs:
            kept = [x if s.continues else None for s, x in safe_zip(slots, states)]
            pass_ = dataclasses.replace(pass_, states=kept)
        if self.runs:
            pass_ = dataclasses.replace(
                pass_,
                num_examples=pass_.num_examples + blocks.total,
                num_microbatches=pass_.num_microbatches + blocks.num,
            )
        self.after[self.number] = pass_
        results = []
        for slot, state in safe_zip(slots, states):
            if slot.continues:
                state = slot.accumulator.finalize(state)
            elif self.runs or self.active is None:
                axis = slot.accumulator.axis_of(state)
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
    shared = () if passes is None else passes.shared
    with assigned(_CURRENT, passes), assigned(BEFORE_BATCHES, shared):
        yield
