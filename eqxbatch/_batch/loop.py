"""The loop over microbatches, which updates the accumulators of all outputs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.backward import custom_backward
from .._base.compile import calls_host
from .._base.jaxpr_types import JaxprAndConsts
from .._base.jaxprs import axis_names, run_jaxpr
from .._base.mesh import is_on_mesh
from .._base.refs import without_refs
from .._base.run_time_checks import can_raise, nan_if
from .._base.structs import array_structs, is_struct, with_arrays
from .._base.trees import (
    num_batch_axes,
    safe_zip,
    sparse_nodes,
    with_shapes_of_arrays,
)
from .accumulators import Concat
from .blocks import Blocks, full_block, rearranged
from .passes import current_passes, of_passes
from .rows import Rows
from .run import as_strong, as_weak, Run, run_loop
from .slots import as_slots, OutputAccumulator, Slots
from .sums import AbstractSummary, Sum


# A function of the rows of a microbatch.
MicrobatchFunction = Callable[[Rows], PyTree]


def run_blocks(
    fun: MicrobatchFunction,
    rows: Rows,
    blocks: Blocks,
    accumulators: Callable[[PyTree], Slots],
    limit: int | Array | None = None,
    checkpoint: bool = False,
) -> PyTree:
    """Runs `fun` over the microbatches of a batch and accumulates its results.

    **Arguments:**

    - `fun`: takes the rows of one microbatch, with their `shares` if microbatches
        overlap. It is traced once for the full microbatches and, unless they overlap,
        once for the remainder.
    - `rows`: those of the batch.
    - `blocks`: how they are cut.
    - `accumulators`: takes the shapes of a full microbatch's output.
    - `limit`: how many microbatches to run: `None`, an int, or an integer scalar array.
    - `checkpoint`: whether microbatches are rematerialised in reverse mode.

    **Returns:**

    The output, in which each array is replaced by the result of its accumulator. If the
    batch is one of several, this is one of the `Passes` over them.
    """
    passes = current_passes()
    if blocks.in_order:
        deal = lambda x, axis: rearranged(x, axis, blocks)
        rows = rows.mapped(deal, rows.total)

    def slots_of(output: PyTree) -> Slots:
        slots = accumulators(output).with_states(output)
        _check_sparse(slots, output)
        if isinstance(limit, int) and limit == 0:
            _check_needs_none(slots)
        return slots

    # A single microbatch needs no loop, and no trace before it runs.
    is_one = blocks.num_full == blocks.num == 1
    if is_one and limit is None and not checkpoint and passes is None:
        return _at_once(fun, rows, blocks, slots_of)

    # Rows of two microbatches run twice, which effects forbid, for example.
    full = _traced_block(fun, rows, blocks.size, blocks)
    if blocks.overlaps and runs_once(full.closed):
        blocks = dataclasses.replace(blocks, overlaps=False)
        full = _traced_block(fun, rows, blocks.size, blocks)
    # A remainder has its own program, whose results must fit those of the others.
    slots, remainder = slots_of(full.output), full
    if blocks.num_full > 0 and blocks.remainder > 0 and not blocks.overlaps:
        remainder = _traced_block(fun, rows, blocks.remainder, blocks)
        _check_remainder(full.output, remainder.output, blocks)
        _check_rows(slots.slots, full.output, remainder.output, blocks)

    # On several devices, no wrong limit can be an error.
    is_wrong = None
    if isinstance(limit, jax.Array) and not can_raise(limit):
        is_wrong = (limit < 0) | (limit > blocks.num)
        limit = jnp.clip(limit, 0, blocks.num)
    run = Run(
        rows=rows,
        full_consts=list(full.closed.consts),
        remainder_consts=list(remainder.closed.consts),
        slots=slots.slots,
        limit=limit,
        full=full.closed.jaxpr,
        outs=full.outs(rows),
        remainder=remainder.closed.jaxpr,
        blocks=blocks,
        checkpoint=checkpoint,
    )
    # A stream wraps the run: it brings states from before, and keeps those after it.
    compute = _results_of_run if passes is None else passes.wrapped(_results_of_run)
    results = compute(run)
    if is_wrong is not None:
        results = jtu.tree_map(functools.partial(nan_if, is_wrong), results)
    return slots.combine(results)


@dataclasses.dataclass(frozen=True)
class _TracedBlock:
    """The program of a microbatch, its output, and the types of the rows that it takes.

    The output has structs in place of its arrays.
    """

    closed: JaxprAndConsts
    output: PyTree
    structs: Rows

    def outs(self, rows: Rows) -> list[jax.ShapeDtypeStruct]:
        """The types of its arrays."""
        if not any(map(is_on_mesh, [*jtu.tree_leaves(rows), *self.closed.consts])):
            return array_structs(self.output)
        # Those of `jax.make_jaxpr` need not have their sharding.
        evaluate = functools.partial(run_jaxpr, self.closed.jaxpr, self.closed.consts)
        return jax.eval_shape(evaluate, array_structs(self.structs))


def _traced_block(
    fun: MicrobatchFunction, rows: Rows, size: int, blocks: Blocks
) -> _TracedBlock:
    """The function of the rows of a microbatch of a given size, traced."""
    structs = rows.structs(size)
    if blocks.overlaps:
        shares = jax.ShapeDtypeStruct((size,), jnp.result_type(float))
        structs = structs.with_(shares=shares)
    with of_passes(None):  # Loops within `fun` are no passes.
        jaxpr, struct, static = eqx.filter_make_jaxpr(fun)(structs)
    return _TracedBlock(without_refs(jaxpr), eqx.combine(struct, static), structs)


def _results_of_run(run: Run) -> list[PyTree]:
    """The results of all microbatches."""
    # JAX would call a derivative rule again after these axis names are unbound.
    if any(axis_names(jaxpr) for jaxpr in (run.full, run.remainder)):
        # The loop whose transpose is efficient, differentiated or not.
        is_inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        are_inexact = jtu.tree_map(is_inexact, run.rows)
        results = dataclasses.replace(run, differentiated=are_inexact).results()
    else:
        results = run_loop(run)
    if not run.blocks.in_order:
        return results
    return [
        _in_order_of_examples(slot, value, result, run.blocks)
        for slot, value, result in safe_zip(run.slots, run.value_structs, results)
    ]


def runs_once(closed: JaxprAndConsts) -> bool:
    """Whether no example of a program may run twice.

    Effects would happen twice, and calls of the host are often the whole cost. A custom
    backward pass may return something for an example whose cotangent is zero.
    """
    # The use of an axis name is an effect, too, but nothing happens twice by it.
    if len(closed.effects) > len(axis_names(closed.jaxpr)):
        return True
    if calls_host(closed):
        return True
    return not custom_backward(closed, [True for _ in closed.jaxpr.invars]).is_linear


def _in_order_of_examples(
    slot: OutputAccumulator,
    value: PyTree,
    result: PyTree,
    blocks: Blocks,
) -> Any:
    """A result, with its rows in the order of the examples."""
    if slot.concat is None:
        return result
    axis = slot.concat.axis_of(value)
    num = result.shape[axis]
    # Other rows are those of microbatches and are in order.
    if value.shape[axis] * blocks.total != num * blocks.size:
        return result
    return rearranged(result, axis, blocks, back=True)


def _at_once(
    fun: MicrobatchFunction,
    rows: Rows,
    blocks: Blocks,
    accumulators: Callable[[PyTree], Slots],
) -> PyTree:
    """Runs a single microbatch, without tracing a loop body first."""
    block = full_block(blocks, 0)
    with jax.named_scope("microbatch"):
        output = fun(rows)
    # What is no array needs no accumulator, and is returned as it is.
    outs, static = eqx.partition(output, eqx.is_array)
    slots = accumulators(eqx.combine(jax.eval_shape(lambda x: x, outs), static))
    leaves = jtu.tree_leaves(outs)
    # Accumulators see what they would see in a loop, whose carries have no weak types.
    strong = [as_strong(x) for x in leaves]

    def result(slot: OutputAccumulator) -> PyTree:
        value = slot.value(strong, block)
        if slot.concat is not None:
            struct = jax.eval_shape(lambda x: x, value)
            jax.eval_shape(lambda: slot.init(struct, blocks))  # For its errors.
            return value
        if isinstance(slot.accumulator, AbstractSummary):
            # Nothing is added to the summary of the only microbatch.
            with slot.named():
                return slot.accumulator.finalize(slot.accumulator.summary(value, block))
        state = slot.init(jax.eval_shape(lambda x: x, value), blocks)
        new = slot.update(state, value, block)
        slot.check_state(*jax.eval_shape(lambda *states: states, state, new))
        return slot.accumulator.finalize(new)

    results = [
        as_weak(x) if slot.is_weak(leaves) else x
        for x, slot in ((result(slot), slot) for slot in slots.slots)
    ]
    return slots.combine(results)


def _check_sparse(slots: Slots, output: PyTree) -> None:
    """Raises if the arrays of a sparse array would be accumulated one by one.

    Joined along a batch axis of all of them, they are those of a sparse array.
    """
    by_number = {i: slot for slot in slots.slots for i in slot.indices}
    numbered = with_arrays(output, range(len(by_number)))
    # The numbers of its arrays say which accumulators a sparse array has.
    for (path, x), (_, numbers) in safe_zip(*map(sparse_nodes, (output, numbered))):
        if not all(map(is_struct, x.tree_flatten()[0])):
            continue  # The others are the same for all examples.
        used = [by_number[i].accumulator for i in jtu.tree_leaves(numbers)]
        name = f"output{jtu.keystr(path)}, a {type(x).__name__},"
        axes = {acc.axis for acc in used if isinstance(acc, Concat)}
        # These take a sparse array as it is, and add nothing to its arrays.
        if all(acc.of_last or not acc.leafwise for acc in used):
            continue
        if not all(isinstance(acc, Concat) for acc in used):
            names = " and ".join(sorted({type(acc).__name__ for acc in used}))
            raise ValueError(
                f"{name} cannot be accumulated by {names}: its entries are at other "
                "places in each microbatch. Return it as `.todense()`, or only its "
                "`.data` if all examples have the same indices."
            )
        # Along a batch axis only, rows of all its arrays belong to the same examples.
        num = num_batch_axes(x)
        if len(axes) > 1 or min(axes) not in range(num):
            raise ValueError(
                f"{name} cannot be joined along axis {min(axes)}: examples are along "
                f"its leading axes only, of which it has {num}. Use axis 0, as for "
                "`jax.vmap`; or return it as `.todense()`."
            )


def _check_needs_none(slots: Slots) -> None:
    """Raises for results that do not exist if no microbatch runs."""
    for slot in slots.slots:
        if slot.accumulator.of_last:
            name = type(slot.accumulator).__name__
            raise ValueError(
                f"output{slot.path} comes from the last example that runs, because of "
                f"`{name}` or None in `out_axes`, but `num_real_microbatches` is 0, so "
                "that none runs. Run at least one microbatch."
            )


def _check_remainder(output: PyTree, remainder: PyTree, blocks: Blocks) -> None:
    # The shape of a sparse array is static, and differs with the number of examples.
    alike = functools.partial(with_shapes_of_arrays, is_sized=False)
    output, remainder = alike(output), alike(remainder)
    # What is no array is returned once, for all microbatches.
    arrays, static = eqx.partition(output, is_struct)
    other_arrays, other_static = eqx.partition(remainder, is_struct)
    if not eqx.tree_equal(static, other_static):
        raise ValueError(
            "What `fun` returns besides arrays must be the same for every microbatch; "
            f"got {static} for {blocks.size} examples and {other_static} for the "
            f"remainder of {blocks.remainder}. Return it as an array, or choose a "
            f"microbatch size that divides {blocks.total}."
        )
    # Sizes may differ, as there are fewer rows; structure, dtype and rank may not.
    ranks = [
        (jtu.tree_structure(tree), [(x.dtype, x.ndim) for x in jtu.tree_leaves(tree)])
        for tree in (arrays, other_arrays)
    ]
    if ranks[0] != ranks[1]:
        raise ValueError(
            "`fun` must return arrays of the same structure, rank and dtype for every "
            f"microbatch; got {arrays} for {blocks.size} examples and {other_arrays} "
            f"for the remainder of {blocks.remainder}."
        )


def _check_rows(
    slots: list[OutputAccumulator], output: PyTree, remainder: PyTree, blocks: Blocks
) -> None:
    full, remainders = array_structs(output), array_structs(remainder)
    for slot in slots:
        accumulator, concat = slot.accumulator, slot.concat
        # Results for each example fit any number of them. An accumulator that takes
        # several arrays at once has rules of its own.
        if slot.per_example or len(slot.indices) != 1:
            continue
        (index,) = slot.indices
        shape, last_shape = full[index].shape, remainders[index].shape
        if concat is None:
            # Most would broadcast the result of a remainder of one example.
            if accumulator.one_shape and shape != last_shape:
                raise ValueError(
                    f"{type(accumulator).__name__} needs results of one shape, but "
                    f"output{slot.path} has shape {shape} for a microbatch of "
                    f"{blocks.size} examples and {last_shape} for the remainder of "
                    f"{blocks.remainder}. Reduce it over the examples in `fun`, or use "
                    "`Concat()`."
                )
            continue
        axis = concat.axis_of(full[index])
        # The result has room for what full microbatches leave of its rows.
        rows, last_rows = shape[axis], last_shape[axis]
        expected = concat.extent(full[index], blocks) - blocks.num_full * rows
        if last_rows != expected:
            raise ValueError(
                f"Concat cannot join the parts of output{slot.path}: it has {rows} "
                f"rows for a microbatch of {blocks.size} examples, so that {expected} "
                f"were expected, but there are {last_rows} rows for the remainder of "
                f"{blocks.remainder}. Choose a microbatch size that divides "
                f"{blocks.total}, or one that does not divide {rows}; or use another "
                "accumulator, such as `Last()` for what each microbatch replaces."
            )


def accumulated(
    fun: Callable[[Rows], PyTree],
    rows: Rows,
    size: int | None,
    accumulator: Sum | Concat,
) -> PyTree:
    """Results of `fun` for blocks of rows, summed or concatenated."""
    if size is None or size >= rows.total > 0:
        return fun(rows)
    blocks = Blocks(rows.total, max(1, min(size, rows.total)))
    with of_passes(None):
        return run_blocks(fun, rows, blocks, lambda out: as_slots(accumulator, out))
