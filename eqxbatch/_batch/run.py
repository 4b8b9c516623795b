"""A run over microbatches: one body for all, or for full ones before a remainder.

Its derivative is that of the loop, with each microbatch computed again if asked for.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, PyTree

from .._base.backward import custom_backward
from .._base.cpu import after_loop, evaluate_in_loop
from .._base.jaxprs import run_jaxpr
from .._base.mesh import is_on_mesh, with_type_of, zeros_like
from .._base.trees import (
    safe_zip,
)
from .._base.versions import with_consts
from .arguments import Primals, Tangents
from .blocks import (
    are_split,
    Block,
    block_struct,
    Blocks,
    cut_rows,
    full_block,
    join_rows,
    merge_parts,
    remainder_block,
    split_parts,
)
from .rows import Rows
from .slots import OutputAccumulator


# What a step of the loop takes and returns: the states, and the number of the step.
_Carry = tuple[list[PyTree], Array]


class _RowAxis(NamedTuple):
    """The axis of the rows in a value, and how many parts these are from."""

    axis: int
    parts: int


class _Ran(NamedTuple):
    """What full microbatches leave behind.

    - `states`: those of the accumulators.
    - `pieces`: lists of values that are collected, which come before the remainder.
    - `num`: how many microbatches ran.
    """

    states: list[PyTree]
    pieces: list[list[PyTree]]
    num: Any


class Run(eqx.Module):
    """A run over microbatches, with all arrays that it may be differentiated in.

    - `full`, `remainder`: the jaxprs of a microbatch; the former returns `outs`.
    - `differentiated`: which of the `rows` are, in a derivative; otherwise None.
    """

    rows: Rows
    full_consts: list
    remainder_consts: list
    slots: list[OutputAccumulator]
    limit: Any
    full: Any = eqx.field(static=True)
    remainder: Any = eqx.field(static=True)
    outs: list[jax.ShapeDtypeStruct] = eqx.field(static=True)
    blocks: Blocks
    checkpoint: bool = eqx.field(static=True)
    differentiated: Rows | None = eqx.field(static=True, default=None)

    def __repr__(self) -> str:
        blocks = self.blocks
        return f"Run({blocks.num} microbatches of {blocks.size}: {self.slots})"

    @property
    def is_limit_traced(self) -> bool:
        return eqx.is_array(self.limit)

    @property
    def num_steps(self) -> int:
        """The number of microbatches in the loop, or at most in it."""
        blocks, limit = self.blocks, self.limit
        # Arrays that are scanned over have no overlapping parts.
        is_one_loop = blocks.overlaps and self.differentiated is None
        num = blocks.num if is_one_loop else blocks.num_full
        return num if limit is None or self.is_limit_traced else min(limit, num)

    @property
    def runs_remainder(self) -> bool:
        is_reached = self.is_limit_traced or self.limit in (None, self.blocks.num)
        return self.num_steps < self.blocks.num and is_reached

    @property
    def is_loop(self) -> bool:
        # One step needs no loop, and XLA optimises code outside of loops better.
        return self.num_steps > 1

    @property
    def value_structs(self) -> list[PyTree]:
        """The types of the values of a full microbatch."""
        first = full_block(self.blocks, 0)
        return jax.eval_shape(
            lambda outs: [slot.value(outs, first) for slot in self.slots], self.outs
        )

    def results(self) -> list[PyTree]:
        values = self.value_structs
        # Full microbatches share a program, and so a loop.
        states = self.initial_states(values)
        states, pieces, num_ran = self.full_blocks(states)
        # XLA would run a remainder beside the loop, in other memory: it comes after.
        if self.runs_remainder:
            block = remainder_block(self.blocks)
            run, is_after = self, None
            if self.is_loop:
                is_after, states, run = after_loop(
                    num_ran == self.num_steps, states, self
                )
            values_after = run.values(block, None, is_after)
            states = self.updated(states, values_after, block)
            pieces.append(values_after)
        # Outputs of the loop transpose in place, so values are joined only now.
        results = [
            self.joined(slot, value, [piece[i] for piece in pieces])
            if is_collected
            else slot.finalize(state)
            for i, (slot, value, state, is_collected) in enumerate(
                safe_zip(self.slots, values, states, self.collected)
            )
        ]
        outs = [var.aval for var in self.full.outvars]
        return [
            as_weak(x) if slot.is_weak(outs) else x
            for x, slot in safe_zip(results, self.slots)
        ]

    def initial_states(self, values: list[PyTree]) -> list:
        """The states before the first microbatch, with their types after the first.

        The result of a microbatch may be sharded over a mesh, or vary over the devices
        of a `jax.shard_map`. The state must have that type from the start, although its
        values are the same everywhere. It is None for what is collected.
        """
        init = lambda slot, value: slot.init(value, self.blocks)
        states = self.carried(init, values)
        are_known = all(slot.is_known for slot in self.slots)
        on_mesh = any(map(is_on_mesh, jtu.tree_leaves((self.rows, values))))
        if self.blocks.total == 0 or (are_known and not on_mesh):
            return states
        block = full_block(self.blocks, 0)

        update = lambda slot, state, value: slot.update(state, value, block)
        updated = lambda *both: (both[0], self.carried(update, *both))
        every = jax.eval_shape(updated, states, values)
        for slot, *before_and_after in safe_zip(self.slots, *every):
            slot.check_state(*before_and_after)
        return jtu.tree_map(with_type_of, every[1], states)

    @property
    def collected(self) -> list[bool]:
        """For each slot, whether its values are outputs of the scan, and not carried.

        Only outputs transpose in place; see `_loop_jvp`. This is one list for all,
        because each access to a method of a Module flattens the Module.
        """
        is_differentiated = self.differentiated is not None
        return [is_differentiated and slot.concat is not None for slot in self.slots]

    def carried(self, fun: Callable[..., Any], *lists: list) -> list:
        """`fun(slot, ...)` for each slot; None for what is collected."""
        return [
            None if is_collected else fun(*slot_and_entries)
            for is_collected, *slot_and_entries in safe_zip(
                self.collected, self.slots, *lists
            )
        ]

    def full_blocks(self, states: list[PyTree]) -> _Ran:
        """The states after all full microbatches, the collected values, and a count."""
        if self.num_steps == 0:
            return _Ran(states, [], 0)
        if not self.is_loop:
            # One step is known to be the first: its rows are a static slice.
            block = full_block(self.blocks, 0)
            values = self.values(block, None, None)
            return _Ran(self.updated(states, values, block), [values], 1)

        def step(carry: _Carry, rows: Rows | None) -> tuple[_Carry, list]:
            states, index = carry
            block = full_block(self.blocks, index)
            values = self.values(block, rows, None)
            collected = [
                value if is_collected else None
                for value, is_collected in safe_zip(values, self.collected)
            ]
            return (self.updated(states, values, block), index + 1), collected

        # Inputs of the scan transpose in place, so differentiated rows are cut before.
        rows = None
        if self.differentiated is not None:
            scanned = eqx.filter(self.rows, self.differentiated)
            rows = scanned.mapped(self.cut, self.blocks.size)
        # Only the loop tells how many ran, which `results` needs as a condition.
        carry = (states, jnp.zeros((), jnp.int32))
        (states, num_ran), collected = lax.scan(step, carry, rows, self.num_steps)
        merged = [
            None if value is None else self.merged(slot, value)
            for slot, value in safe_zip(self.slots, collected)
        ]
        return _Ran(states, [merged], num_ran)

    def cut(self, x: Array, axis: int) -> Array:
        """The full microbatches of an array, along a new axis 0."""
        num, size = self.num_steps, self.blocks.size
        return cut_rows(x, axis, num, size, self.blocks.parts)

    def values(
        self, block: Block, rows: Rows | None, condition: Array | None
    ) -> list[PyTree]:
        """The values of a microbatch, or zeros if it is not to run.

        Of its rows, those that are not in `rows` are cut out here.
        """
        # Past the limit, a microbatch costs nothing: it does not run at all.
        if self.is_limit_traced:
            in_limit = block.index < self.limit
            condition = in_limit if condition is None else condition & in_limit

        def compute(rows: Rows | None) -> list[PyTree]:
            # These have been rearranged.
            of_parts = dataclasses.replace(block, in_order=False)
            if rows is None:
                rows = self.rows.at(of_parts)
            else:
                # The scan has cut the rows to differentiate; others are read here.
                unscanned = eqx.filter(self.rows, self.differentiated, inverse=True)
                rows = eqx.combine(rows, unscanned.at(of_parts))
            if block.is_remainder:
                jaxpr, consts = self.remainder, self.remainder_consts
            else:
                jaxpr, consts = self.full, self.full_consts
            if self.blocks.overlaps:
                rows = rows.with_(shares=block.shares())
            # Convolutions are as slow in a branch as in a loop.
            is_inside = self.is_loop or condition is not None
            evaluate = evaluate_in_loop if is_inside else run_jaxpr
            outs = [
                as_strong(x) for x in evaluate(jaxpr, consts, jtu.tree_leaves(rows))
            ]
            return [slot.value(outs, block) for slot in self.slots]

        # In a loop, XLA cannot merge both computations anyway.
        if self.checkpoint:
            is_in_loop = self.is_loop and not block.is_remainder
            compute = jax.checkpoint(compute, prevent_cse=not is_in_loop)
        with jax.named_scope("microbatch"):
            if condition is None:
                return compute(rows)
            shapes = jax.eval_shape(compute, rows)
            skip = lambda _: jtu.tree_map(zeros_like, shapes)
            return lax.cond(condition, compute, skip, rows)

    def updated(self, states: list[PyTree], values: list[PyTree], block: Block) -> list:
        """The states after one more microbatch."""

        def update(slot: OutputAccumulator, state: PyTree, value: PyTree) -> Any:
            new = slot.update(state, value, block)
            # Values of microbatches past the limit are zero, and `Concat` writes these:
            # selecting between arrays would cost a copy.
            if self.is_limit_traced and slot.concat is None:
                choose = functools.partial(lax.select, block.index < self.limit)
                new = jtu.tree_map(choose, new, state)
            return new

        return self.carried(update, states, values)

    def merged(self, slot: OutputAccumulator, stacked: Array) -> Array:
        """Undoes `cut`: merges the new axis 0 of microbatches with their rows."""
        value = jax.eval_shape(lambda x: x[0], stacked)
        return join_rows(stacked, *self.rows_of(slot, value))

    def joined(
        self, slot: OutputAccumulator, value: jax.ShapeDtypeStruct, pieces: list[Array]
    ) -> Array:
        """The result of a collected slot; rows that did not run are zero."""
        axis, parts = self.rows_of(slot, value)
        whole = jax.eval_shape(lambda: slot.accumulator.init(value, self.blocks))
        missing = whole.shape[axis] - sum(piece.shape[axis] for piece in pieces)
        # Microbatches past a limit did not run: their rows are zero, as in `Concat`.
        if missing > 0 or not pieces:
            pieces = [*pieces, zeros_like(block_struct(whole, axis, missing))]
        if len(pieces) == 1:
            return pieces[0]
        along, is_split = axis, are_split(pieces[0], axis, parts)
        if is_split:
            pieces = [split_parts(piece, axis, parts) for piece in pieces]
            along, missing = axis + 1, missing // parts
        if missing < 0:  # The first rows of the last piece are not new.
            *pieces, last = pieces
            pieces.append(lax.slice_in_dim(last, -missing, None, 1, along))
        x = jnp.concatenate(pieces, along)
        return merge_parts(x, axis) if is_split else x

    def rows_of(self, slot: OutputAccumulator, value: jax.ShapeDtypeStruct) -> _RowAxis:
        """The axis of the rows in the value of a full microbatch, and their parts."""
        concat = slot.concat
        assert concat is not None
        first = full_block(self.blocks, 0)
        return _RowAxis(concat.axis_of(value), concat.parts_of(value, first))


@eqx.filter_custom_jvp
def run_loop(run: Run) -> list[PyTree]:
    return run.results()


@run_loop.def_jvp
def _loop_jvp(primals: Primals, tangents: Tangents) -> tuple:
    """The derivative, through a loop whose transpose is efficient, too.

    Microbatches are read with a dynamic slice and written with a dynamic update slice,
    which needs no copy of the batch. In reverse mode, each such slice becomes a sum
    over an array as large as the batch. `lax.scan` over the microbatches transposes in
    place, so differentiated arrays are scanned over
    (https://github.com/jax-ml/jax/issues/15906).
    """
    (run,), (tangents,) = primals, tangents
    perturbed = jtu.tree_map(lambda _, t: t is not None, run, tangents)
    # Only what is perturbed gets tangents: the scan cuts no other rows.
    diff, nondiff = eqx.partition(run, perturbed)
    _check_backward(run, perturbed)

    def results(diff: Run) -> list[PyTree]:
        run = eqx.combine(diff, nondiff)
        return dataclasses.replace(run, differentiated=perturbed.rows).results()

    out, t_out = jax.jvp(results, (diff,), (tangents,))
    # There are no tangents of integers.
    is_inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return out, jtu.tree_map(lambda x, t: t if is_inexact(x) else None, out, t_out)


def _check_backward(run: Run, perturbed: PyTree) -> None:
    """Raises for a backward pass whose result would depend on the microbatch size.

    In `jax.vmap`, it is called once with the sum of the cotangents of all examples, and
    would be called here for each microbatch.
    """
    if run.blocks.num <= 1 or not any(perturbed.full_consts):
        return
    closed = with_consts(run.full, run.full_consts)
    if not custom_backward(closed, [True for _ in run.full.invars]).has_examples:
        raise ValueError(
            "The function applies a custom backward pass (`jax.custom_vjp`) to what "
            "all examples share, and this is not known to be linear in the cotangent. "
            f"Its derivative through {run.blocks.num} microbatches would not be that "
            "through one. Apply it outside, and pass its result as an argument; or use "
            "a single microbatch, with `microbatch_size=None`."
        )


def as_strong(x: PyTree) -> Array:
    # A constant output is a literal of the jaxpr and not an array yet. Loop carries
    # have no weak types, so the first microbatch must not have any either.
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype) if x.weak_type else x


def as_weak(x: Array) -> Array:
    """`x` with a weak type."""
    # `full_like` gives the result the type of `x`.
    zero = {"f": 0.0, "c": 0j}.get(x.dtype.kind, 0)
    like = lax.full((), zero)
    if like.dtype != x.dtype:
        return x
    fill = functools.partial(lax.full_like, like)
    for _ in x.shape:
        fill = jax.vmap(fill)
    return fill(x)
