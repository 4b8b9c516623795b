"""The loop over microbatches, which updates the accumulators of all outputs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, PyTree

from .._base.backward import custom_backward
from .._base.compile import calls_host
from .._base.jaxpr_types import JaxprAndConsts
from .._base.jaxprs import axis_names, run_jaxpr
from .._base.mesh import is_on_mesh, vary_as
from .._base.refs import without_refs
from .._base.structs import array_structs, is_struct, with_arrays
from .._base.trees import (
    num_batch_axes,
    safe_zip,
    sparse_nodes,
    with_shapes_of_arrays,
)
from .accumulators import Concat, Last, Max, Min
from .blocks import block_struct, Blocks, full_block, rearranged
from .log_sum_exp import LogSumExp
from .sums import AbstractSummary, Mean, Sum, Variance, with_weights


if TYPE_CHECKING:
    pass
from .passes import current_passes, of_passes
from .run import as_strong, as_weak, Run, run_loop
from .slots import as_slots, OutputAccumulator, Slots


# A function of the rows of a microbatch, of their number, and of their shares.
MicrobatchFunction = Callable[[list, int, Any], tuple[PyTree, Any]]


def run_blocks(
    fun: MicrobatchFunction,
    arrays: list,
    axes: tuple[int, ...],
    blocks: Blocks,
    make_slots: Callable[[PyTree, Any], Slots],
    limit: Any = None,
    checkpoint: bool = False,
) -> PyTree:
    """Runs `fun` over the microbatches of a batch and accumulates its results.

    **Arguments:**

    - `fun`: takes the rows of one microbatch (a list parallel to `arrays`), their
        number, and their `Block.shares` if microbatches overlap, else None. It returns
        `(output, static)`. It is traced once for the full microbatches and, unless they
        overlap, once for the remainder.
    - `arrays`, `axes`: the batched arrays and the axis along which each is cut.
    - `blocks`: how they are cut.
    - `make_slots`: takes the shapes of a full microbatch's output, and `static`.
    - `limit`: how many microbatches to run: `None`, an int, or an integer scalar array.
    - `checkpoint`: whether microbatches are rematerialised in reverse mode.

    **Returns:**

    The output, in which each array is replaced by the result of its accumulator. If the
    batch is one of several, this is one of the `Passes` over them.
    """
    passes = current_passes()
    if blocks.in_order:
        arrays = [rearranged(x, axis, blocks) for x, axis in safe_zip(arrays, axes)]

    def structs(size: int) -> tuple[list, int, jax.ShapeDtypeStruct | None]:
        pairs = safe_zip(arrays, axes)
        rows = [block_struct(x, axis, size) for x, axis in pairs]
        dtype = jnp.result_type(float)
        shares = jax.ShapeDtypeStruct((size,), dtype) if blocks.overlaps else None
        return rows, size, shares

    def trace(size: int) -> tuple[Any, PyTree, Any]:
        with of_passes(None):  # Loops within `fun` are no passes.
            jaxpr, struct, static = eqx.filter_make_jaxpr(fun)(*structs(size))
        output, aux = eqx.combine(struct, static)
        return without_refs(jaxpr), output, aux

    def slots_of(output: PyTree, aux: Any) -> Slots:
        slots = make_slots(output, aux).with_states(output)
        _check_sparse(slots, output)
        if isinstance(limit, int) and limit == 0:
            _check_needs_none(slots)
        return slots

    is_one = blocks.num_full == blocks.num == 1
    if is_one and limit is None and not checkpoint and passes is None:
        return _at_once(fun, arrays, blocks, slots_of)
    full, output, aux = trace(blocks.size)
    if blocks.overlaps and runs_once(full):
        blocks = dataclasses.replace(blocks, overlaps=False)
        full, output, aux = trace(blocks.size)
    slots = slots_of(output, aux)
    if blocks.num_full > 0 and blocks.remainder > 0 and not blocks.overlaps:
        remainder, remainder_output, _ = trace(blocks.remainder)
        _check_same(output, remainder_output, blocks)
        _check_rows(slots.slots, output, remainder_output, blocks)
    else:
        remainder = full

    outs = array_structs(output)
    if any(is_on_mesh(x) for x in [*arrays, *full.consts]):
        # Those of `jax.make_jaxpr` need not have their sharding.
        evaluate = functools.partial(run_jaxpr, full.jaxpr, full.consts)
        outs = jax.eval_shape(evaluate, array_structs(structs(blocks.size)))

    if passes is not None:
        begun = passes.begun(slots.slots, arrays, axes)
        slots = dataclasses.replace(slots, slots=begun)
    run = Run(
        arrays=arrays,
        full_consts=list(full.consts),
        remainder_consts=list(remainder.consts),
        slots=slots.slots,
        limit=limit,
        full=full.jaxpr,
        outs=outs,
        remainder=remainder.jaxpr,
        axes=axes,
        blocks=blocks,
        checkpoint=checkpoint,
    )
    if passes is not None and not passes.runs:
        results = run.initial_states(run.value_structs)
    # JAX would call a derivative rule again after these axis names are unbound.
    elif any(axis_names(jaxpr) for jaxpr in (full.jaxpr, remainder.jaxpr)):
        # The loop whose transpose is efficient, differentiated or not.
        are_inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
        results = dataclasses.replace(run, differentiated=are_inexact).results()
    else:
        results = run_loop(run)
    if blocks.in_order:
        results = [
            _in_order(slot, value, result, blocks)
            for slot, value, result in safe_zip(slots.slots, run.value_structs, results)
        ]
    if passes is not None:
        results = passes.ended(slots.slots, results, blocks)
    return slots.combine(results)


def runs_once(closed: JaxprAndConsts) -> bool:
    """Whether no example of a program may run twice.

    Effects would happen twice, and calls of the host are often the whole cost. A custom
    backward pass may return something for an example whose cotangent is zero.
    """
    if len(closed.effects) > len(axis_names(closed.jaxpr)):
        return True
    if calls_host(closed):
        return True
    return not custom_backward(closed, [True for _ in closed.jaxpr.invars]).is_linear


def _in_order(slot: OutputAccumulator, value: Any, result: Any, blocks: Blocks) -> Any:
    """A result, with its rows in the order of the examples."""
    if not isinstance(slot.accumulator, Concat):
        return result
    axis = slot.accumulator.axis_of(value)
    num = result.shape[axis]
    # Other rows are those of microbatches and are in order.
    if value.shape[axis] * blocks.total != num * blocks.size:
        return result
    return rearranged(result, axis, blocks, back=True)


def _at_once(
    fun: MicrobatchFunction,
    arrays: list,
    blocks: Blocks,
    make_slots: Callable[[PyTree, Any], Slots],
) -> PyTree:
    """Runs a single microbatch, without tracing a loop body first."""
    block = full_block(blocks, 0)
    with jax.named_scope("microbatch"):
        output, aux = fun(arrays, blocks.size, None)
    outs, static = eqx.partition(output, eqx.is_array)
    slots = make_slots(eqx.combine(jax.eval_shape(lambda x: x, outs), static), aux)
    leaves = jtu.tree_leaves(outs)
    strong = [as_strong(x) for x in leaves]

    def result(slot: OutputAccumulator) -> PyTree:
        value = slot.value(strong, block)
        if isinstance(slot.accumulator, Concat):
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
    for (path, x), (_, numbers) in safe_zip(*map(sparse_nodes, (output, numbered))):
        if not all(map(is_struct, x.tree_flatten()[0])):
            continue  # The others are the same for all examples.
        used = [by_number[i].accumulator for i in jtu.tree_leaves(numbers)]
        name = f"output{jtu.keystr(path)}, a {type(x).__name__},"
        axes = {acc.axis for acc in used if isinstance(acc, Concat)}
        if all(isinstance(acc, Last) or not acc.leafwise for acc in used):
            continue
        if not all(isinstance(acc, Concat) for acc in used):
            names = " and ".join(sorted({type(acc).__name__ for acc in used}))
            raise ValueError(
                f"{name} cannot be accumulated by {names}: its entries are at other "
                "places in each microbatch. Return it as `.todense()`, or only its "
                "`.data` if all examples have the same indices."
            )
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
        if isinstance(slot.accumulator, Last):
            raise ValueError(
                f"output{slot.path} comes from the last example that runs, because of "
                "`Last` or None in `out_axes`, but `num_real_microbatches` is 0, so "
                "that none runs. Run at least one microbatch."
            )


def _check_same(output: PyTree, remainder: PyTree, blocks: Blocks) -> None:
    alike = functools.partial(with_shapes_of_arrays, is_sized=False)
    output, remainder = alike(output), alike(remainder)
    arrays, static = eqx.partition(output, is_struct)
    other_arrays, other_static = eqx.partition(remainder, is_struct)
    if not eqx.tree_equal(static, other_static):
        raise ValueError(
            "What `fun` returns besides arrays must be the same for every microbatch; "
            f"got {static} for {blocks.size} examples and {other_static} for the "
            f"remainder of {blocks.remainder}. Return it as an array, or choose a "
            f"microbatch size that divides {blocks.total}."
        )
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
    full, rest = array_structs(output), array_structs(remainder)
    for slot in slots:
        accumulator = slot.accumulator
        is_known = isinstance(accumulator, (Concat, *_OF_ONE_SHAPE))
        if slot.per_example or not is_known or len(slot.indices) != 1:
            continue
        (index,) = slot.indices
        shape, rest_shape = full[index].shape, rest[index].shape
        if not isinstance(accumulator, Concat):
            if shape != rest_shape:
                raise ValueError(
                    f"{type(accumulator).__name__} needs results of one shape, but "
                    f"output{slot.path} has shape {shape} for a microbatch of "
                    f"{blocks.size} examples and {rest_shape} for the remainder of "
                    f"{blocks.remainder}. Reduce it over the examples in `fun`, or use "
                    "`Concat()`."
                )
            continue
        axis = accumulator.axis_of(full[index])
        rows, rest_rows = shape[axis], rest_shape[axis]
        expected = accumulator.extent(full[index], blocks) - blocks.num_full * rows
        if rest_rows != expected:
            raise ValueError(
                f"Concat cannot join the parts of output{slot.path}: it has {rows} "
                f"rows for a microbatch of {blocks.size} examples, so that {expected} "
                f"were expected, but there are {rest_rows} rows for the remainder of "
                f"{blocks.remainder}. Choose a microbatch size that divides "
                f"{blocks.total}, or one that does not divide {rows}; or use another "
                "accumulator, such as `Last()` for what each microbatch replaces."
            )


# These would broadcast the result of a remainder of one example.
_OF_ONE_SHAPE = (LogSumExp, Max, Mean, Min, Sum, Variance)


class Rows(eqx.Module):
    """The arrays of some examples, and the batch axis of each.

    The axis is None for an array that all examples share. Arrays without rows stand for
    those whose rows are read in blocks.
    """

    arrays: list
    axes: tuple[Any, ...] = eqx.field(static=True)
    total: int = eqx.field(static=True)

    @property
    def are_stored(self) -> bool:
        """Whether these are not in memory."""
        pairs = safe_zip(self.arrays, self.axes)
        return any(
            axis is not None and x.shape[axis] != self.total for x, axis in pairs
        )

    def at(self, start: Any, size: int) -> "Rows":
        """A number of rows, starting at a given one."""
        if size == self.total:
            return self
        cut = [
            x if axis is None else lax.dynamic_slice_in_dim(x, start, size, axis)
            for x, axis in safe_zip(self.arrays, self.axes)
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
            for x, axis in safe_zip(self.arrays, self.axes)
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
    total = arrays[0].shape[axes[0]]
    arrays, both_axes, split = with_weights(arrays, axes, weights)
    run = lambda arrays, _: sums(*split(arrays))
    return accumulated(run, Rows(arrays, both_axes, total), size, Sum())


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
    run = lambda arrays, size, _: (fun(arrays, size), None)
    slots = lambda output, _: as_slots(accumulator, output)
    with of_passes(None):
        return run_blocks(run, rows.arrays, rows.axes, blocks, slots)
