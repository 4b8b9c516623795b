"""The state of a transform between two batches, and the programs that update it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from .._base.compile import compiled
from .._base.structs import is_struct
from .._base.trees import difference
from .._base.types import check_types
from .accumulators import AbstractAccumulator, Concat
from .arguments import Arguments
from .batches import kind_of
from .passes import of_passes, Pass, Passes
from .slots import accumulators_of, canonicalise, is_accumulator
from .sums import AbstractTotal
from .transform import (
    AbstractTransform,
    on_their_mesh,
)


class StreamState(eqx.Module):
    """What [`eqxbatch.over_batches`][] knows of the batches so far.

    It is a PyTree of arrays, which can be saved with `equinox.tree_serialise_leaves`.

    - `passes`: the passes over all batches: two for K-FAC with `corrected=True`, and
        one for everything else. Each has `num_examples`, and the `states` of its
        accumulators.
    - `treedef`, `leaves`: the structure and the types of the first batch.
    """

    passes: list[Pass]
    treedef: Any = eqx.field(static=True)
    leaves: tuple = eqx.field(static=True)

    @property
    def batch(self) -> tuple:
        """A batch with the types of the first one, with structs for its arrays."""
        return jtu.tree_unflatten(self.treedef, self.leaves)

    def __repr__(self) -> str:
        counts = [x.num_examples for x in self.passes]
        are_traced = any(isinstance(x, Tracer) for x in counts)
        texts = ["?" if are_traced else str(x) for x in counts]
        return f"StreamState(examples in each pass: {', '.join(texts)})"


def check_state(state: PyTree) -> None:
    check_types({"state": state}, {"state": StreamState}, always=True)
    # JAX's own error for memory that was donated does not say what to do.
    arrays = [x for x in jtu.tree_leaves(state) if isinstance(x, jax.Array)]
    if any(x.is_deleted() for x in arrays if not isinstance(x, Tracer)):
        raise ValueError(
            "`state` has no arrays any more: `update` reuses its memory. Go on with "
            "the state that `update` returned, or copy it before."
        )


def first_leaf(tree: PyTree, condition: Callable[[Any], Any]) -> Any:
    leaves = jtu.tree_leaves(tree, is_leaf=is_accumulator)
    return next((x for x in leaves if x is not None and condition(x)), None)


def reductions_of(transform: AbstractTransform) -> list[AbstractAccumulator]:
    """The accumulators of a transform that do not join rows."""
    trees = accumulators_of(transform)
    leaves = map(canonicalise, jtu.tree_leaves(trees, is_leaf=is_accumulator))
    return [x for x in leaves if x is not None and not isinstance(x, Concat)]


def _weighted(transform: AbstractTransform, weights: Array) -> AbstractTransform:
    """A transform with other weights of the examples."""

    def replaced(accumulator: PyTree) -> Any:
        accumulator = canonicalise(accumulator)
        if isinstance(accumulator, AbstractTotal):
            return dataclasses.replace(accumulator, weights=weights)
        return accumulator

    changes = {
        name: jtu.tree_map(replaced, value, is_leaf=is_accumulator)
        for name, value in accumulators_of(transform).items()
    }
    return dataclasses.replace(transform, **changes)


class PassesAndRows(NamedTuple):
    """The passes with a batch, and its rows along axis 0."""

    passes: list[Pass]
    rows: list[Array]


# The arguments that all batches share, and a batch.
_Arguments = tuple[tuple, tuple]


class Call(NamedTuple):
    """A call of a transform for one batch.

    - `is_weighted`: whether the batch has weights.
    - `number`: that of the pass that the batch is for.
    """

    transform: AbstractTransform
    args: _Arguments
    is_weighted: bool
    number: int


def applied(
    select: Callable[[Any, Passes], PyTree],
    transform: AbstractTransform,
    args: _Arguments,
    is_weighted: bool,
    *of_passes_: Any,
) -> PyTree:
    """What `select` returns for the result of a call, and its passes."""

    def run(transform: AbstractTransform, args: _Arguments, *rest: Any) -> PyTree:
        leading, batch = args
        # Each batch sees these: `split_batch` refuses them as arrays of examples.
        shared = [x for x in jtu.tree_leaves(leading) if eqx.is_array(x)]
        passes = Passes(*rest, shared=shared)
        if is_weighted:
            transform, batch = _weighted(transform, batch[-1]), batch[:-1]
        with of_passes(passes):
            return select(transform.apply((*leading, *batch), {}), passes)

    # The states are the same on all devices, whatever the results are.
    specs = lambda *_: PartitionSpec()
    return on_their_mesh(run, (transform, args, *of_passes_), specs)


@compiled
def begun(
    transform: AbstractTransform, args: _Arguments, is_weighted: bool
) -> list[Pass]:
    select = lambda _, passes: passes.after
    return applied(select, transform, args, is_weighted, None)


# The old state gives its memory to the new one. The call returns at once, so that the
# next batch is loaded meanwhile.
@functools.partial(compiled, donate="all-except-first", waits=False)
def updated(call: Call, before: list[Pass]) -> PassesAndRows:
    transform, args, is_weighted, number = call
    return applied(with_rows, transform, args, is_weighted, before, number)


class Updates:
    """Adds batches to the passes of a stream.

    What does not change from batch to batch is looked up once: for a small batch, this
    takes longer than to compute it.
    """

    def __init__(
        self,
        transform: AbstractTransform,
        leading: tuple,
        is_weighted: bool,
        state: StreamState,
    ):
        self._transform, self._leading = transform, leading
        self._is_weighted, self._state = is_weighted, state
        self._treedef, self._num = state.treedef, len(state.passes)
        self._kinds = [kind_of(x) for x in state.leaves]

    def call(self, batch: tuple, number: int) -> Call:
        """The call for a batch; what can be wrong is said before it runs.

        To run it reuses the memory of the passes before.
        """
        if number not in range(self._num):
            raise ValueError(
                f"`number` must be that of a pass, and {self._transform} takes "
                f"{self._num}: from 0 to {self._num - 1}; got {number}."
            )
        # Another form would be another program, whose states need not fit.
        leaves, treedef = jtu.tree_flatten(batch)
        kinds = [kind_of(x) for x in leaves]
        if treedef != self._treedef or kinds != self._kinds:
            remedy = " Batches are one argument, the last: give `(x, y)` for several."
            expected = self._state.batch
            raise ValueError(
                "All batches must have the structure, dtypes and weak types of the "
                f"first one. {difference(expected, batch)} Their arrays are "
                f"{', '.join(map(str, self._kinds))}; got {', '.join(map(str, kinds))}."
                f"{remedy * (len(batch) < len(expected))}"
            )
        args = self._leading, batch
        return Call(self._transform, args, self._is_weighted, number)


def with_rows(_: PyTree, passes: Passes) -> PassesAndRows:
    """What a batch brings."""
    rows = [jnp.moveaxis(x, axis, 0) for x, _, axis in passes.rows]
    return PassesAndRows(passes.after, rows)


@dataclasses.dataclass(frozen=True)
class RowsOfBatches:
    """Stands for the rows of all batches: those of a path in the output, by number."""

    number: int
    path: str
    axis: int


@compiled
def finished_stream(
    transform: AbstractTransform,
    leading: Arguments,
    state: StreamState,
    is_weighted: bool,
) -> Any:
    # Of the batch, only the types matter.
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if is_struct(x) else x
    args = leading, jtu.tree_map(zeros, state.batch)

    def select(result: PyTree, passes: Passes) -> PyTree:
        # Joined rows are in the result as they are in the passes: the same objects.
        places = {id(x[0]): RowsOfBatches(i, *x[1:]) for i, x in enumerate(passes.rows)}
        return jtu.tree_map(lambda x: places.get(id(x), x), result)

    return applied(select, transform, args, is_weighted, state.passes)
