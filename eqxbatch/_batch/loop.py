"""The loop over microbatches: one body for all, or for full ones before a remainder.

Each array of the output is for one accumulator (`OutputAccumulator`), and `run_blocks`
is the loop that updates all of them.

A call loops over its batch once, or several times if it needs the results of one pass
for the next. If its batch is one of several, each pass continues from the states of the
batches before, and its states are what the call is for (`Passes`).
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PyTree, Shaped

from .._base.backward import custom_backward
from .._base.checks import check_types, match_prefix
from .._base.jaxprs import (
    array_structs,
    axis_names,
    equations_in,
    is_struct,
    run_jaxpr,
    with_arrays,
)
from .._base.mesh import is_on_mesh, vary_as, with_type_of, zeros_like
from .._base.platforms import after_loop, assigned, calls_host, evaluate_in_loop
from .._base.refs import without_refs
from .._base.trees import (
    described,
    num_batch_axes,
    safe_zip,
    sparse_nodes,
    with_shapes_of_arrays,
)
from .._base.versions import with_consts
from .accumulators import (
    AbstractAccumulator,
    AbstractSummary,
    Concat,
    is_summary,
    Last,
    LogSumExp,
    Max,
    Mean,
    Min,
    Sum,
    Variance,
    with_weights,
)
from .batch import (
    are_split,
    BEFORE_BATCHES,
    Block,
    block_struct,
    Blocks,
    full_block,
    is_state,
    merge_parts,
    rearranged,
    remainder_block,
    split_parts,
)


if TYPE_CHECKING:
    from optax import microbatching


class _OptaxAccumulator(AbstractAccumulator[Any]):
    """An `optax.microbatching.Accumulator`, used as it is."""

    leafwise = False
    accumulator: "microbatching.Accumulator" = eqx.field(static=True)

    def init(self, value: PyTree, blocks: Blocks) -> Any:
        return self.accumulator.init(value)

    def update(self, state: Any, value: PyTree, block: Block) -> Any:
        index: Any = block.index  # optax annotates an int, but passes a traced array.
        return self.accumulator.update(state, value, index)

    def finalize(self, state: Any) -> PyTree:
        return self.accumulator.finalize(state)

    def aggregate(self, values: PyTree, block: Block) -> PyTree:
        return self.accumulator.aggregate(values)


# By their names in `optax.microbatching.AccumulationType`.
_FROM_OPTAX: dict[str, Callable[[], AbstractAccumulator]] = {
    "CONCAT": Concat,
    "SUM": Sum,
    "MEAN": Mean,
    "RUNNING_MEAN": lambda: Mean(running=True),
}


# With these, the result of equal numbers is that number.
_OF_EQUAL = (Concat, Last, Max, Mean, Min)


# An `equinox.nn.State` is none of what these reduce or join.
_NOT_OF_STATES = (Concat, LogSumExp, Max, Mean, Min, Sum, Variance)


_State = PyTree[Shaped[ArrayLike, "..."]]


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputAccumulator:
    """One accumulator and the arrays of the output that it handles.

    `indices` are positions in the flat list of the output's arrays, and `treedef`
    combines them into the sub-PyTree that the accumulator sees. `per_example` says
    whether these arrays have one result for each example, along axis 0, and `in_state`
    whether the array is in an `equinox.nn.State`.

    If the batch is one of several, the slot `continues` from the state `before`, or
    begins if that is None, and returns the state in place of the result. `offset` has
    the numbers of microbatches and examples before.
    """

    accumulator: AbstractAccumulator
    indices: tuple[int, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)
    path: str = eqx.field(static=True)
    per_example: bool = eqx.field(static=True, default=False)
    in_state: bool = eqx.field(static=True, default=False)
    continues: bool = eqx.field(static=True, default=False)
    before: Any = None
    offset: tuple[Any, Any] = (0, 0)

    def value(self, arrays: list, block: Block) -> PyTree[Array]:
        """The value of a microbatch, from all arrays of its output."""
        value = jtu.tree_unflatten(self.treedef, [arrays[i] for i in self.indices])
        with self.named():
            return (
                self.accumulator.aggregate(value, block) if self.per_example else value
            )

    def init(self, value: PyTree, blocks: Blocks) -> Any:
        """The state before the first microbatch; `value` has structs."""
        if self.before is not None and not isinstance(
            self.accumulator, AbstractSummary
        ):
            return self.before
        begins = self.continues and self.before is None
        blocks = dataclasses.replace(blocks, continues=begins)
        with self.named():
            return self._checked("init", self.accumulator.init(value, blocks))

    def update(self, state: Any, value: PyTree, block: Block) -> Any:
        """The state after one more microbatch."""
        if self.continues and not self.is_known:
            index, start = self.offset
            index, start = index + block.index, start + block.start
            block = dataclasses.replace(block, index=index, start=start, total=None)
        return self._checked("update", self.accumulator.update(state, value, block))

    def after(self, state: Any) -> Any:
        """The state with those of the batches before.

        Summaries are added up once for each batch, because this takes more time than to
        add one microbatch: their sums keep what rounding takes from them.
        """
        if isinstance(self.accumulator, AbstractSummary):
            return self.before.plus(state.whole())
        return state

    def finalize(self, state: Any) -> Any:
        """The result; or the state, if more batches come."""
        return state if self.continues else self.accumulator.finalize(state)

    @property
    def is_known(self) -> bool:
        """Whether the accumulator is one of this package, whose states are right."""
        module, _, _ = type(self.accumulator).__module__.partition(".")
        is_foreign = isinstance(self.accumulator, _OptaxAccumulator)
        return module == __name__.partition(".")[0] and not is_foreign

    def _checked(self, name: str, state: Any) -> Any:
        if self.is_known:
            return state
        what = f"the state from `{name}` of `{type(self.accumulator).__name__}`"
        check_types({what: state}, {what: _State})
        return state

    def check_state(self, before: Any, after: Any) -> None:
        """Raises if a microbatch changes the type of the state: both are structs."""
        if types_of(before) != types_of(after):
            raise TypeError(
                f"The accumulator {self.accumulator} of output{self.path} must keep "
                f"structure, shapes and dtypes of its state: `init` returned {before} "
                f"and `update` {after}."
            )

    def is_weak(self, outs: list) -> bool:
        """Whether a result is weakly typed, as it would be with `jax.vmap`.

        `outs` is what a microbatch returns.
        """
        is_state = self.in_state and isinstance(self.accumulator, Mean)
        if not isinstance(self.accumulator, (Concat, Last)) and not is_state:
            return False
        if self.continues:
            return False
        (index,) = self.indices
        return getattr(outs[index], "weak_type", False)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Names the output in error messages."""
        try:
            yield
        except (TypeError, ValueError) as e:
            e.add_note(f"This is about output{self.path}.")
            raise


def is_accumulator(x: Any) -> bool:
    return x is None or isinstance(x, AbstractAccumulator)


# These count an example of two microbatches once. Extremes share derivatives among all
# examples that attain them, and accumulators of users know nothing of it.
_COUNTING = (Concat, Last, LogSumExp, Mean, Sum, Variance)


def all_count_new(accumulators: PyTree) -> bool:
    """Whether overlapping microbatches have the results of separate ones."""
    leaves = jtu.tree_leaves(accumulators, is_leaf=is_accumulator)
    return all(x is None or type(canonicalise(x)) in _COUNTING for x in leaves)


def canonicalise(accumulator: Any) -> AbstractAccumulator | None:
    if is_accumulator(accumulator):
        return accumulator
    # Imported here because the import is slow.
    from optax import microbatching

    if isinstance(accumulator, microbatching.AccumulationType):
        return _FROM_OPTAX[accumulator.name]()
    if isinstance(accumulator, microbatching.Accumulator):
        return _OptaxAccumulator(accumulator)
    raise TypeError(
        f"Unknown accumulator {described(accumulator)}. "
        "`accumulator` takes a PyTree prefix of the output whose leaves are "
        "`eqxbatch.AbstractAccumulator`s (an instance, such as `Sum()`), "
        "`optax.microbatching.AccumulationType`s or "
        "`optax.microbatching.Accumulator`s."
    )


@dataclasses.dataclass(frozen=True)
class Slots:
    """The accumulators of an output: one slot for each place that has arrays."""

    slots: list[OutputAccumulator]
    _parts: list[tuple[AbstractAccumulator | None, PyTree]]
    _treedef: Any

    def with_states(self, output: PyTree) -> "Slots":
        """The same, with each `equinox.nn.State` merged as a whole.

        It is what a microbatch leaves behind, and no result to reduce or join: floats
        are averaged, and of flags and counters there is the last. `Last` and
        accumulators of users are taken at their word. Of one state for each example,
        `Concat` returns all, as `jax.vmap` does.
        """
        arrays = array_structs(output)

        def merged(slot: OutputAccumulator) -> OutputAccumulator:
            keeps_examples = slot.per_example and isinstance(slot.accumulator, Concat)
            if not slot.in_state or keeps_examples:
                return slot
            if not isinstance(slot.accumulator, _NOT_OF_STATES):
                return slot
            dtype = arrays[slot.indices[0]].dtype
            accumulator = of_state(slot.accumulator, dtype)
            return dataclasses.replace(slot, accumulator=accumulator)

        return dataclasses.replace(self, slots=[*map(merged, self.slots)])

    def combine(self, results: list[PyTree]) -> PyTree:
        """The output, from the results of the slots in their order."""
        remaining = iter(results)
        parts = []
        for accumulator, part in self._parts:
            if accumulator is None or _is_leafwise(accumulator, part):
                parts.append(with_arrays(part, remaining))
            else:
                arrays, static = eqx.partition(part, is_struct)
                if not jtu.tree_leaves(arrays):
                    parts.append(part)
                    continue
                result = next(remaining)
                same = jtu.tree_structure(result) == jtu.tree_structure(arrays)
                parts.append(eqx.combine(result, static) if same else result)
        return jtu.tree_unflatten(self._treedef, parts)


def as_slots(accumulator: PyTree, output: PyTree) -> Slots:
    """Matches a PyTree prefix of accumulators to an output.

    `output` has `jax.ShapeDtypeStruct`s for its arrays; everything else in it is
    static. A part without arrays may have None as its accumulator.

    Raises `ValueError` if the accumulators are not a prefix or miss an array, and for a
    Python number that would have to be accumulated. Raises `TypeError` for anything
    that is not an accumulator.
    """
    accumulator = jtu.tree_map(canonicalise, accumulator, is_leaf=is_accumulator)
    places = match_prefix(
        "accumulator",
        accumulator,
        output,
        "a PyTree prefix of what `fun` returns",
        "Give one accumulator for the whole output, or one for each part of it. ",
        is_accumulator,
    )

    slots: list[OutputAccumulator] = []
    for path, acc, part in places:
        _check_numbers(path, acc, part)
        arrays = eqx.filter(part, is_struct)
        paths, treedef = jtu.tree_flatten_with_path(arrays)
        if not paths:
            continue
        if acc is None:
            raise ValueError(
                f"`accumulator` is None for output{jtu.keystr(path)}, which has "
                "arrays. Give an accumulator for them, such as `Concat()`."
            )
        first = sum(len(slot.indices) for slot in slots)
        if _is_leafwise(acc, part):
            leaf = jtu.tree_structure(0)
            are_in_states = _are_in_states(arrays)
            for i, (sub, _) in enumerate(paths):
                name = jtu.keystr((*path, *sub))
                at = (first + i,)
                slots.append(
                    OutputAccumulator(acc, at, leaf, name, in_state=are_in_states[i])
                )
        else:
            indices = tuple(range(first, first + len(paths)))
            slots.append(OutputAccumulator(acc, indices, treedef, jtu.keystr(path)))
    parts = [(acc, part) for _, acc, part in places]
    treedef = jtu.tree_structure(accumulator, is_leaf=is_accumulator)
    return Slots(slots, parts, treedef)


def _is_leafwise(accumulator: AbstractAccumulator, part: PyTree) -> bool:
    """Whether an accumulator is for each array of a part; a summary is one value."""
    return accumulator.leafwise and not is_summary(part)


def _are_in_states(arrays: PyTree) -> list[bool]:
    """For each array, whether it is in an `equinox.nn.State`."""
    return [
        is_state(part)
        for part in jtu.tree_leaves(arrays, is_leaf=is_state)
        for _ in jtu.tree_leaves(part)
    ]


def of_state(accumulator: AbstractAccumulator, dtype: Any) -> AbstractAccumulator:
    """The accumulator for an array in an `equinox.nn.State`."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return Last()
    # The running mean of equal numbers is that number.
    return accumulator if isinstance(accumulator, Mean) else Mean(running=True)


def _check_numbers(path: tuple, accumulator: Any, part: PyTree) -> None:
    if accumulator is None or isinstance(accumulator, _OF_EQUAL):
        return
    # Numbers in a module are its settings, and not results.
    is_module = lambda x: isinstance(x, eqx.Module)
    for sub, leaf in jtu.tree_leaves_with_path(part, is_leaf=is_module):
        if is_number(leaf):
            raise ValueError(
                f"output{jtu.keystr((*path, *sub))} is {described(leaf)}, and only "
                f"arrays are accumulated: {type(accumulator).__name__} would leave it "
                "out. Return it as an array, with `jax.numpy.asarray`; or give this "
                "part of the output the accumulator None, which keeps it as it is."
            )


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number. A bool is a flag instead."""
    return isinstance(x, (int, float, complex)) and not isinstance(x, bool)


def types_of(struct: PyTree) -> tuple:
    """Structure, shapes and dtypes, for comparison."""
    leaves, treedef = jtu.tree_flatten(struct)
    return treedef, [(x.shape, x.dtype) for x in leaves]


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
    run = _Run(
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
        results = _loop(run)
    if blocks.in_order:
        results = [
            _in_order(slot, value, result, blocks)
            for slot, value, result in safe_zip(slots.slots, run.value_structs, results)
        ]
    if passes is not None:
        results = passes.ended(slots.slots, results, blocks)
    return slots.combine(results)


def runs_once(closed: Any) -> bool:
    """Whether no example of a program may run twice.

    Effects would happen twice, and calls of the host are often the whole cost. A custom
    backward pass may return something for an example whose cotangent is zero.
    """
    if len(closed.effects) > len(axis_names(closed.jaxpr)):
        return True
    if any(map(calls_host, equations_in(closed))):
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
    strong = [_as_strong(x) for x in leaves]

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
        _as_weak(x) if slot.is_weak(leaves) else x
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


class _Run(eqx.Module):
    """A run over microbatches, with all arrays that it may be differentiated in.

    - `full`, `remainder`: the jaxprs of a microbatch; the former returns `outs`.
    - `differentiated`: which of the `arrays` are, in a derivative; otherwise None.
    """

    arrays: list
    full_consts: list
    remainder_consts: list
    slots: list[OutputAccumulator]
    limit: Any
    full: Any = eqx.field(static=True)
    remainder: Any = eqx.field(static=True)
    outs: list[jax.ShapeDtypeStruct] = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)
    blocks: Blocks
    checkpoint: bool = eqx.field(static=True)
    differentiated: list[bool] | None = eqx.field(static=True, default=None)

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
        states = self.initial_states(values)
        states, pieces, num_ran = self.full_blocks(states)
        if self.runs_remainder:
            block = remainder_block(self.blocks)
            run, rows, is_after = self, [None] * len(self.arrays), None
            if self.is_loop:
                is_after, states, run = after_loop(
                    num_ran == self.num_steps, states, self
                )
            rest = run.values(block, rows, is_after)
            states = self.updated(states, rest, block)
            pieces.append(rest)
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
            _as_weak(x) if slot.is_weak(outs) else x
            for x, slot in safe_zip(results, self.slots)
        ]

    def initial_states(self, values: list) -> list:
        """The states before the first microbatch, with their types after the first.

        The result of a microbatch may be sharded over a mesh, or vary over the devices
        of a `jax.shard_map`. The state must have that type from the start, although its
        values are the same everywhere. It is None for what is collected.
        """
        init = lambda slot, value: slot.init(value, self.blocks)
        states = self.carried(init, values)
        are_known = all(slot.is_known for slot in self.slots)
        on_mesh = any(map(is_on_mesh, [*self.arrays, *jtu.tree_leaves(values)]))
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
        return [
            is_differentiated and isinstance(slot.accumulator, Concat)
            for slot in self.slots
        ]

    def carried(self, fun: Callable[..., Any], *lists: list) -> list:
        """`fun(slot, ...)` for each slot; None for what is collected."""
        return [
            None if is_collected else fun(*slot_and_entries)
            for is_collected, *slot_and_entries in safe_zip(
                self.collected, self.slots, *lists
            )
        ]

    def full_blocks(self, states: list) -> tuple[list, list[list], Any]:
        """The states after all full microbatches, the collected values, and a count."""
        if self.num_steps == 0:
            return states, [], 0
        if not self.is_loop:
            block = full_block(self.blocks, 0)
            values = self.values(block, [None] * len(self.arrays), None)
            return self.updated(states, values, block), [values], 1

        def step(carry: tuple, rows: list) -> tuple[tuple, list]:
            states, index = carry
            block = full_block(self.blocks, index)
            values = self.values(block, rows, None)
            collected = [
                value if is_collected else None
                for value, is_collected in safe_zip(values, self.collected)
            ]
            return (self.updated(states, values, block), index + 1), collected

        threaded = self.differentiated or [False] * len(self.arrays)
        rows = [
            self.cut(x, axis) if is_threaded else None
            for x, axis, is_threaded in safe_zip(self.arrays, self.axes, threaded)
        ]
        carry = (states, jnp.zeros((), jnp.int32))
        (states, num_ran), collected = lax.scan(step, carry, rows, self.num_steps)
        merged = [
            None if value is None else self.merged(slot, value)
            for slot, value in safe_zip(self.slots, collected)
        ]
        return states, [merged], num_ran

    def cut(self, x: Array, axis: int) -> Array:
        """The full microbatches of an array, along a new axis 0."""
        num, parts = self.num_steps, self.blocks.parts
        is_split = are_split(x, axis, parts)
        if is_split:
            x = split_parts(x, axis, parts)
            axis += 1
        rows = num * self.blocks.size // parts
        if x.shape[axis] != rows:
            x = lax.slice_in_dim(x, 0, rows, 1, axis)
        x = jnp.moveaxis(split_parts(x, axis, num), axis, 0)
        return merge_parts(x, axis) if is_split else x

    def values(self, block: Block, rows: list, condition: Array | None) -> list[PyTree]:
        """The values of a microbatch, or zeros if it is not to run.

        If `rows` is None, the rows are cut out here.
        """
        if self.is_limit_traced:
            in_limit = block.index < self.limit
            condition = in_limit if condition is None else condition & in_limit

        def compute(rows: list) -> list[PyTree]:
            # These have been rearranged.
            of_parts = dataclasses.replace(block, in_order=False)
            arrays = [
                of_parts.take(x, axis) if row is None else row
                for x, axis, row in safe_zip(self.arrays, self.axes, rows)
            ]
            if block.is_remainder:
                jaxpr, consts = self.remainder, self.remainder_consts
            else:
                jaxpr, consts = self.full, self.full_consts
            if self.blocks.overlaps:
                arrays.append(block.shares())
            # Convolutions are as slow in a branch as in a loop.
            is_inside = self.is_loop or condition is not None
            evaluate = evaluate_in_loop if is_inside else run_jaxpr
            outs = [_as_strong(x) for x in evaluate(jaxpr, consts, arrays)]
            return [slot.value(outs, block) for slot in self.slots]

        if self.checkpoint:
            is_in_loop = self.is_loop and not block.is_remainder
            compute = jax.checkpoint(compute, prevent_cse=not is_in_loop)
        with jax.named_scope("microbatch"):
            if condition is None:
                return compute(rows)
            shapes = jax.eval_shape(compute, rows)
            skip = lambda _: jtu.tree_map(zeros_like, shapes)
            return lax.cond(condition, compute, skip, rows)

    def updated(self, states: list, values: list, block: Block) -> list:
        """The states after one more microbatch."""

        def update(slot: OutputAccumulator, state: Any, value: Any) -> Any:
            new = slot.update(state, value, block)
            # Values of microbatches past the limit are zero, and `Concat` writes these:
            # selecting between arrays would cost a copy.
            if self.is_limit_traced and not isinstance(slot.accumulator, Concat):
                choose = functools.partial(lax.select, block.index < self.limit)
                new = jtu.tree_map(choose, new, state)
            return new

        return self.carried(update, states, values)

    def merged(self, slot: OutputAccumulator, stacked: Array) -> Array:
        """Undoes `cut`: merges the new axis 0 of microbatches with their rows."""
        value = jax.eval_shape(lambda x: x[0], stacked)
        axis, parts = self.rows_of(slot, value)
        if are_split(stacked, axis + 1, parts):
            stacked = split_parts(stacked, axis + 1, parts)
            x = merge_parts(jnp.moveaxis(stacked, 0, axis + 1), axis + 1)
        else:
            x = jnp.moveaxis(stacked, 0, axis)
        return merge_parts(x, axis)

    def joined(self, slot: OutputAccumulator, value: Any, pieces: list) -> Array:
        """The result of a collected slot; rows that did not run are zero."""
        axis, parts = self.rows_of(slot, value)
        whole = jax.eval_shape(lambda: slot.accumulator.init(value, self.blocks))
        missing = whole.shape[axis] - sum(piece.shape[axis] for piece in pieces)
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

    def rows_of(self, slot: OutputAccumulator, value: Any) -> tuple[int, int]:
        """The axis of the rows in the value of a full microbatch, and their parts."""
        concat = slot.accumulator
        assert isinstance(concat, Concat)
        return concat.axis_of(value), concat.parts_of(value, full_block(self.blocks, 0))


@eqx.filter_custom_jvp
def _loop(run: _Run) -> list[PyTree]:
    return run.results()


@_loop.def_jvp
def _loop_jvp(primals: tuple, tangents: tuple) -> tuple:
    """The derivative, through a loop whose transpose is efficient, too.

    Microbatches are read with a dynamic slice and written with a dynamic update slice,
    which needs no copy of the batch. In reverse mode, each such slice becomes a sum
    over an array as large as the batch. `lax.scan` over the microbatches transposes in
    place, so differentiated arrays are scanned over.
    """
    (run,), (tangents,) = primals, tangents
    perturbed = jtu.tree_map(lambda _, t: t is not None, run, tangents)
    diff, nondiff = eqx.partition(run, perturbed)
    _check_backward(run, perturbed)

    def results(diff: _Run) -> list[PyTree]:
        run = eqx.combine(diff, nondiff)
        return dataclasses.replace(run, differentiated=perturbed.arrays).results()

    out, t_out = jax.jvp(results, (diff,), (tangents,))
    # There are no tangents of integers.
    is_inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return out, jtu.tree_map(lambda x, t: t if is_inexact(x) else None, out, t_out)


def _check_backward(run: _Run, perturbed: Any) -> None:
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


def _as_strong(x: Any) -> Array:
    # A constant output is a literal of the jaxpr and not an array yet. Loop carries
    # have no weak types, so the first microbatch must not have any either.
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype) if x.weak_type else x


def _as_weak(x: Array) -> Array:
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
