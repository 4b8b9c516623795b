"""Each array of the output of a function with the accumulator it is for."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree, Shaped

from .._base.checks import match_prefix
from .._base.structs import array_structs, is_struct, with_arrays
from .._base.trees import (
    described,
)
from .._base.types import check_types
from .accumulators import AbstractAccumulator, Concat, Last
from .arguments import Dtype, KeyPath
from .blocks import (
    Block,
    Blocks,
)
from .reading import is_state
from .sums import AbstractSummary, is_summary, Mean, Sum


if TYPE_CHECKING:
    from optax import microbatching


class _OptaxAccumulator(AbstractAccumulator[Any]):
    """An `optax.microbatching.Accumulator`, used as it is."""

    leafwise = False
    accumulator: "microbatching.Accumulator" = eqx.field(static=True)

    def init(self, value: PyTree, blocks: Blocks) -> Any:
        return self.accumulator.init(value)

    def update(self, state: PyTree, value: PyTree, block: Block) -> Any:
        index: Any = block.index  # optax annotates an int, but passes a traced array.
        return self.accumulator.update(state, value, index)

    def finalize(self, state: PyTree) -> PyTree:
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

    def __repr__(self) -> str:
        return f"{self.accumulator} for output{self.path}"

    def value(self, arrays: list[Array], block: Block) -> PyTree[Array]:
        """The value of a microbatch, from all arrays of its output."""
        value = jtu.tree_unflatten(self.treedef, [arrays[i] for i in self.indices])
        with self.named():
            return (
                self.accumulator.aggregate(value, block) if self.per_example else value
            )

    def init(self, value: PyTree, blocks: Blocks) -> Any:
        """The state before the first microbatch; `value` has structs."""
        # Summaries begin anew for each batch: `after` adds those before.
        if self.before is not None and not isinstance(
            self.accumulator, AbstractSummary
        ):
            return self.before
        begins = self.continues and self.before is None
        blocks = dataclasses.replace(blocks, continues=begins)
        with self.named():
            return self._checked("init", self.accumulator.init(value, blocks))

    def update(self, state: PyTree, value: PyTree, block: Block) -> Any:
        """The state after one more microbatch."""
        # Accumulators of users see the numbers of all batches; their total is unknown.
        if self.continues and not self.is_known:
            index, start = self.offset
            index, start = index + block.index, start + block.start
            block = dataclasses.replace(block, index=index, start=start, total=None)
        return self._checked("update", self.accumulator.update(state, value, block))

    def after(self, state: PyTree) -> Any:
        """The state with those of the batches before.

        Summaries are added up once for each batch, because this takes more time than to
        add one microbatch: their sums keep what rounding takes from them.
        """
        if isinstance(self.accumulator, AbstractSummary):
            return self.before.plus(state.whole())
        return state

    def finalize(self, state: PyTree) -> Any:
        """The result; or the state, if more batches come."""
        return state if self.continues else self.accumulator.finalize(state)

    @property
    def concat(self) -> Concat | None:
        """The accumulator, if it joins rows."""
        return self.accumulator if isinstance(self.accumulator, Concat) else None

    @property
    def is_known(self) -> bool:
        """Whether the accumulator is one of this package, whose states are right."""
        # By its module, so that a subclass of a user is not taken for one of them.
        module, _, _ = type(self.accumulator).__module__.partition(".")
        is_foreign = isinstance(self.accumulator, _OptaxAccumulator)
        return module == __name__.partition(".")[0] and not is_foreign

    def _checked(self, name: str, state: PyTree) -> Any:
        if self.is_known:
            return state
        what = f"the state from `{name}` of `{type(self.accumulator).__name__}`"
        check_types({what: state}, {what: _State})
        return state

    def check_state(self, before: PyTree, after: PyTree) -> None:
        """Raises if a microbatch changes the type of the state: both are structs."""
        if types_of(before) != types_of(after):
            raise TypeError(
                f"The accumulator {self.accumulator} of output{self.path} must keep "
                f"structure, shapes and dtypes of its state: `init` returned {before} "
                f"and `update` {after}."
            )

    def is_weak(self, outs: Sequence[Any]) -> bool:
        """Whether a result is weakly typed, as it would be with `jax.vmap`.

        `outs` is what a microbatch returns.
        """
        # The mean of floats in a state has their type.
        is_mean = self.in_state and self.accumulator.state_as == "mean"
        keeps_weak = self.accumulator.keeps_weak or is_mean
        if not keeps_weak or self.continues or len(self.indices) != 1:
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


def is_accumulator(x: object) -> bool:
    return x is None or isinstance(x, AbstractAccumulator)


def all_count_new(accumulators: PyTree) -> bool:
    """Whether overlapping microbatches have the results of separate ones."""
    leaves = jtu.tree_leaves(accumulators, is_leaf=is_accumulator)
    # A subclass may have another `aggregate`, so it says this for itself.
    classes = [type(canonicalise(x)) for x in leaves if x is not None]
    return all(vars(cls).get("counts_new", False) for cls in classes)


def accumulators_of(accumulated: eqx.Module) -> dict[str, PyTree]:
    """The fields of a transform that are accumulators, whatever their names are.

    Accumulators in its functions are those of other transforms.
    """
    fields = {
        x.name: getattr(accumulated, x.name) for x in dataclasses.fields(accumulated)
    }
    return {
        name: value
        for name, value in fields.items()
        if not callable(value) and _are_accumulators(value)
    }


def _are_accumulators(value: PyTree) -> bool:
    leaves = jtu.tree_leaves(value, is_leaf=is_accumulator)
    leaves = [x for x in leaves if x is not None]
    # Those of optax are told by their module, because its import is slow.
    return bool(leaves) and all(
        is_accumulator(x) or type(x).__module__.split(".")[0] == "optax" for x in leaves
    )


def canonicalise(accumulator: PyTree) -> AbstractAccumulator | None:
    """What a leaf of a setting stands for; None stays None."""
    if is_accumulator(accumulator):
        return accumulator
    # Imported here because the import is slow.
    from optax import microbatching

    if isinstance(accumulator, microbatching.AccumulationType):
        return _FROM_OPTAX[accumulator.name]()
    if isinstance(accumulator, microbatching.Accumulator):
        return _OptaxAccumulator(accumulator)
    is_class = isinstance(accumulator, type)
    if is_class and issubclass(accumulator, AbstractAccumulator):
        name = accumulator.__name__
        raise TypeError(
            f"Unknown accumulator {name}, which is a class. Pass an instance of it, "
            f"such as `{name}()`."
        )
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

    def __repr__(self) -> str:
        return f"Slots({', '.join(map(repr, self.slots))})"

    def with_states(self, output: PyTree) -> "Slots":
        """The same, with each `equinox.nn.State` merged as a whole.

        It is what a microbatch leaves behind, and no result to reduce or join: floats
        are averaged, and of flags and counters there is the last. `Last` and
        accumulators of users are taken at their word. Of one state for each example,
        `Concat` returns all, as `jax.vmap` does.
        """
        arrays = array_structs(output)

        def merged(slot: OutputAccumulator) -> OutputAccumulator:
            keeps_examples = slot.per_example and slot.concat is not None
            if not slot.in_state or keeps_examples:
                return slot
            if slot.accumulator.state_as == "itself":
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
                # Each array has a result of its own, which goes to its place.
                parts.append(with_arrays(part, remaining))
            else:
                # One result stands for the part. What is no array can only go back into
                # one of the same structure.
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
        # A number would stay as it is, whatever is accumulated around it.
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
        # A slot takes its arrays from the flat list of all by their positions.
        first = sum(len(slot.indices) for slot in slots)
        if _is_leafwise(acc, part):
            leaf = jtu.tree_structure(0)
            are_in_states = _are_in_states(arrays)
            for i, (sub, _) in enumerate(paths):
                name = jtu.keystr((*path, *sub))
                index, in_state = (first + i,), are_in_states[i]
                slot = OutputAccumulator(acc, index, leaf, name, in_state=in_state)
                slots.append(slot)
        else:
            # It sees all arrays of its part at once, as a PyTree like it.
            indices = tuple(range(first, first + len(paths)))
            slots.append(OutputAccumulator(acc, indices, treedef, jtu.keystr(path)))
    # Parts without arrays have no slot, but return as they are.
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


def of_state(accumulator: AbstractAccumulator, dtype: Dtype) -> AbstractAccumulator:
    """The accumulator for an array in an `equinox.nn.State`."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return Last()
    # The running mean of equal numbers is that number.
    return accumulator if isinstance(accumulator, Mean) else Mean(running=True)


def _check_numbers(
    path: KeyPath, accumulator: AbstractAccumulator | None, part: PyTree
) -> None:
    if accumulator is None or accumulator.of_equal:
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


def is_number(x: object) -> bool:
    """Whether `x` is a Python number. A bool is a flag instead."""
    return isinstance(x, (int, float, complex)) and not isinstance(x, bool)


def types_of(struct: PyTree) -> tuple:
    """Structure, shapes and dtypes, for comparison."""
    leaves, treedef = jtu.tree_flatten(struct)
    return treedef, [(x.shape, x.dtype) for x in leaves]
