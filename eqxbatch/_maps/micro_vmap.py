"""`filter_micro_vmap`: `equinox.filter_vmap`, one microbatch at a time."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from .._base.backward import custom_backward
from .._base.checks import check_at_least, is_none
from .._base.cpu import in_turn
from .._base.jaxprs import run_jaxpr
from .._base.mesh import auto_sharded, explicit_mesh
from .._base.refs import without_refs
from .._base.structs import array_structs, with_arrays
from .._base.trees import safe_zip
from .._base.versions import as_array
from .._batch.accumulators import Concat, Last
from .._batch.batch import Batch, broadcast_axes, spec_of_rows, split_batch
from .._batch.blocks import Blocks
from .._batch.loop import run_blocks
from .._batch.memory import explained_failure, OTHER_AXIS_NAME
from .._batch.padding import Padding
from .._batch.rows import Rows
from .._batch.slots import (
    all_count_new,
    as_slots,
    canonicalise,
    is_accumulator,
    of_state,
    OutputAccumulator,
    Slots,
)
from .._batch.sums import AbstractTotal, check_weights
from .._batch.transform import AbstractEarlyStop, also_decorator, Out, P, run_compiled
from .in_place import has_ref, run_in_place


_IF_WHOLE = "Give the function of one example, or use `filter_microbatch`."


_IF_NAMED = (
    "Pass this name as `axis_name`: such layers then see one microbatch at a time. Or "
    "switch them to inference mode."
)


class AbstractMicroVmap(AbstractEarlyStop, Generic[P, Out]):
    """`filter_micro_vmap` with results of the type of the function's."""

    fun: Callable[P, Out]
    _: dataclasses.KW_ONLY
    in_axes: PyTree = eqx.if_array(0)
    out_axes: PyTree = eqx.if_array(0)
    axis_name: Hashable | None = None
    axis_size: int | None = None
    checkpoint: bool = False
    vmap_fn: Callable[..., Callable] = jax.vmap

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Out:
        return run_compiled(self, *args, **kwargs)


class MicroVmap(AbstractMicroVmap[P, Out]):
    """Vectorises a function like `equinox.filter_vmap`, one microbatch at a time.

    The result is the same as for `equinox.filter_vmap`, up to rounding, for any
    microbatch size. Peak temporary memory is that of one microbatch instead of the
    whole batch. Use it if `vmap` runs out of memory.

    **Arguments:**

    - `fun`: a function of one example. Arguments and results may be any PyTrees,
        including modules.
    - `in_axes`: which axes of which arguments are mapped: a prefix of the tuple of
        positional arguments, with ints, `None` (not mapped), or callables from a leaf
        to these; or a dict from argument names to such prefixes. As for
        `equinox.filter_vmap`, the default is axis 0 of all arrays. It also applies to
        positional and keyword arguments that a dict does not name.
    - `out_axes`: the axis of the examples in each output: a prefix of the output, with
        the same leaves. `None` is for outputs that are the same for all examples, and
        for an `equinox.nn.State`: its floats are averaged over all microbatches, and of
        other arrays, such as counters, the last one is returned.
    - `axis_name`: a name for the mapped axis, for collectives. They act within one
        microbatch, not over the whole batch. A microbatch then has the same examples on
        any number of devices.
    - `axis_size`: the number of examples, needed only if no argument is mapped.
    - `microbatch_size`: the number of examples that are computed at a time, at least 1.
        It need not divide the batch size `n`. An [`eqxbatch.MemoryBudget`][] chooses
        the largest size that fits; `None` means `n`.
    - `accumulator`: how per-example results are combined: an
        [`eqxbatch.AbstractAccumulator`][], or a PyTree prefix of the output with
        accumulators as leaves. The default, [`eqxbatch.Concat`][], returns all of them.
        `optax.microbatching.AccumulationType`s and `Accumulator`s are accepted, too.
    - `num_real_microbatches`: if given, only this many microbatches run: an int or an
        integer array, which may be traced. Reverse mode works in both cases. With
        `Concat`, rows that are not reached are zero. For [`eqxbatch.Last`][] and
        `out_axes=None`, the int 0 raises, and an array of value 0 gives zero.
    - `checkpoint`: whether reverse-mode differentiation saves only the inputs and
        recomputes each microbatch in the backward pass.
    - `vmap_fn`: the function that vectorises a microbatch, called as
        `vmap_fn(fun, in_axes, out_axes)`, with `axis_name` and `axis_size` where
        needed; for example `functools.partial(jax.vmap, spmd_axis_name="data")`.

    **Returns:**

    A function with the arguments of `fun`, where each mapped argument has an additional
    batch axis. A `jax.Ref` can be one, as for `jax.vmap`: `fun` gets one for each row,
    and what it writes is written to the row. Outputs that are not arrays must be the
    same for all microbatches; they stay what `fun` returned for one example. Only
    sparse arrays (`BCOO`, `BCSR`) get the shape of the batch, as by `jax.vmap`. If the
    batch is empty, `fun` is traced but not run.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced. As with `equinox.filter_jit`, `fun` must be pure.
    Arrays in a module or in an `equinox.Partial` are arguments of the compiled program;
    arrays that a Python function closes over are constants.

    **Raises:**

    - `ValueError` for a size below 1, unequal batch sizes, an axis out of range, no
        mapped argument, an accumulator that does not fit the output (no reduction fits
        a sparse array), non-array outputs that differ between microbatches, a
        `num_real_microbatches` that is negative or larger than the number of
        microbatches or comes with a mapped `jax.Ref`, and a function that writes to a
        `jax.Ref` that is not mapped.
    - `TypeError` for a size that is not an int, and for a mean of integers.
    - `RuntimeError` at run time, if `num_real_microbatches` is a JAX array that is out
        of this range.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, 3, 8, 2, key=jax.random.key(0))
        >>> xs = jnp.ones((1_000, 2))
        >>> eqxbatch.filter_micro_vmap(model, microbatch_size=64)(xs).shape
        (1000, 3)

        ```

        The mean prediction of an ensemble, two members at a time:

        ```python
        >>> keys = jax.random.split(jax.random.key(0), 5)
        >>> @eqxbatch.filter_micro_vmap(microbatch_size=2)
        ... def make(key):
        ...     return eqx.nn.MLP(2, 3, 8, 2, key=key)
        >>> @eqxbatch.filter_micro_vmap(
        ...     in_axes=(eqx.if_array(0), None),
        ...     microbatch_size=2,
        ...     accumulator=eqxbatch.Mean(),
        ... )
        ... def evaluate(model, x):
        ...     return model(x)
        >>> evaluate(make(keys), jnp.ones(2)).shape
        (3,)

        ```

    ??? cite

        Microbatching with accumulators follows `optax.microbatching`, described in
        [arXiv:2510.00236](https://arxiv.org/abs/2510.00236). The specification of axes
        follows `equinox.filter_vmap`.
    """

    _: dataclasses.KW_ONLY
    accumulator: PyTree = Concat()

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        if has_ref(args, kwargs):
            return run_in_place(self, args, kwargs)
        return run_compiled(self, *args, **kwargs)

    def __check_init__(self) -> None:
        if self.axis_size is not None:
            remedy = "It is the number of examples."
            check_at_least("axis_size", self.axis_size, 0, remedy)
        if self.vmap_fn is jax.pmap:
            raise ValueError(
                "`vmap_fn` must map over examples; got `jax.pmap`, which maps over "
                "devices. Leave it out, and put the examples on a `jax.sharding.Mesh`."
            )

    def apply(
        self, args: tuple, kwargs: dict[str, Any], if_whole: str | None = _IF_WHOLE
    ) -> Any:
        """The result of a call.

        `if_whole` is a remedy for a function of a whole batch; None if the arguments
        are not those of a user's call, so that errors cannot name them.
        """
        batch = split_batch(self.fun, self.in_axes, args, kwargs)
        total = batch.total(self.axis_size)
        blocks = self.blocks(batch, args, kwargs, total)
        batch = batch.on_devices_of(blocks)
        # Weights are cut with the rows, so that a microbatch knows which are padding.
        of_batch = batch.rows(self.axis_size).with_(weights=self._padding(total))
        padding = Padding.of(of_batch)
        mapped = self._run_on_mesh(batch, if_whole)
        # The axes of all results, once a microbatch is traced.
        out_axes: list[int | None] = []

        def run(rows: Rows) -> PyTree:
            if padding is None:
                output, out_axes[:] = mapped(rows.arrays, rows.total)
                return output
            # Whether rows can be replaced is read from the program that then runs, so
            # that `fun` is traced once.
            call = rows.arrays, rows.total
            closed, structs, static = eqx.filter_make_jaxpr(mapped)(*call)
            # A backward pass that is not linear may return something for a row in the
            # place of padding.
            if custom_backward(closed, [True for _ in closed.jaxpr.invars]).is_linear:
                rows = padding.replaced(rows)
            outs = run_jaxpr(closed.jaxpr, list(closed.consts), rows.arrays)
            output, out_axes[:] = with_arrays(eqx.combine(structs, static), outs)
            return output

        def accumulators(output: PyTree) -> Slots:
            # `Concat` needs the axis of each output, which only its trace tells.
            slots = as_slots(self.accumulator, output)
            leaves = array_structs(output)
            return dataclasses.replace(
                slots,
                slots=[_per_example(s, leaves, out_axes, blocks) for s in slots.slots],
            )

        limits = self.limit(blocks), self.checkpoint
        return run_blocks(run, of_batch, blocks, accumulators, *limits)

    def _padding(self, total: int) -> Array | None:
        """The weights of all results, if these are the same: those of 0 are padding.

        Accumulators leave out results that are not finite. Their derivatives are, too,
        if rows are replaced before `fun` sees them.
        """
        # Any other accumulator, such as `Concat`, has results for all rows.
        leaves = jtu.tree_leaves(self.accumulator, is_leaf=is_accumulator)
        every = [*map(canonicalise, leaves)]
        totals = [x for x in every if isinstance(x, AbstractTotal)]
        # So has an output that all examples share: the last. A collective reads all.
        out_axes = jtu.tree_leaves(self.out_axes, is_leaf=is_none)
        is_mapped = self.axis_name is None and None not in out_axes
        if not totals or len(totals) < len(every) or not is_mapped:
            return None
        # A row that pads one output may count in another.
        weights = totals[0].weights
        check_weights(type(totals[0]).__name__, weights, total)
        return weights if all(x.weights is weights for x in totals) else None

    @property
    def overlaps(self) -> bool:
        # Those that overlap can be smaller, but `num_real_microbatches` counts those of
        # the given size. Coupled examples would meet others.
        is_whole = self.num_real_microbatches is None
        return is_whole and self.axis_name is None and all_count_new(self.accumulator)

    @property
    def couples(self) -> bool:
        return self.axis_name is not None

    def _run_on_mesh(
        self, batch: Batch, if_whole: str | None
    ) -> Callable[[list, int], Any]:
        """Maps `fun` over the examples of a microbatch, on any devices."""
        vmap = functools.partial(MicroVmap.vmap, if_whole=if_whole)
        total = batch.total(self.axis_size)
        # Only explicit axes need to be told how results are sharded.
        if total == 0 or explicit_mesh((self, batch)) is None:
            return functools.partial(vmap, self, batch)

        def specs(out: _Mapped) -> _Mapped:
            # Examples are along axis 0 of all mapped arrays, wherever they go later.
            arrays, treedef = jtu.tree_flatten(eqx.filter(out.output, eqx.is_array))
            of_arrays = [
                PartitionSpec() if axis is None else spec_of_rows(x.shape[1:], batch)
                for x, axis in safe_zip(arrays, out.out_axes)
            ]
            return _Mapped(jtu.tree_unflatten(treedef, of_arrays), PartitionSpec())

        like = (batch.arrays, total)
        # The state of an accumulator is not part of the program of a microbatch.
        stateless = dataclasses.replace(self, accumulator=Concat())
        return auto_sharded(vmap, (stateless, batch), like, specs)

    def vmap(
        self, batch: Batch, rows: list, size: int, if_whole: str | None
    ) -> "_Mapped":
        """Maps `fun` over the examples of a microbatch."""
        # Filled when `jax.vmap` traces `of_example`, which can return only arrays.
        traced: dict[str, Any] = {}
        call = functools.partial(batch.call, self.fun)
        if_named = _IF_NAMED
        if self.axis_name is not None:
            if_named = OTHER_AXIS_NAME.format(self.axis_name)

        def of_example(rows: list) -> _Arrays:
            with explained_failure(call, batch, "example", if_whole, None, if_named):
                out = call(rows)
            # The prefix fits what one example returns: `vmap_fn` is given axis 0 for
            # all mapped arrays, and None for all others.
            axes = broadcast_axes("out_axes", self.out_axes, out)
            leaves, traced["treedef"] = jtu.tree_flatten(out)
            traced["leaves"], traced["axes"] = leaves, axes
            pairs = list(safe_zip(leaves, axes))
            mapped = [_as_array(x, axis) for x, axis in pairs if axis is not None]
            unmapped = [x for x, axis in pairs if axis is None and eqx.is_array(x)]
            return _Arrays(mapped, unmapped)

        # Only where they are needed: a function of the user's may not take them.
        kwargs = {}
        if self.axis_name is not None:
            kwargs["axis_name"] = self.axis_name
        if not rows:
            kwargs["axis_size"] = size
        if size == 1 and self.vmap_fn is jax.vmap and self.axis_name is None:
            # XLA's code for a batch of one is slower than its code without a batch.
            mapped, unmapped = _of_one(of_example, rows, batch.axes)
        else:
            axes = (list(batch.axes),), _Arrays(0, None)
            mapped, unmapped = self.vmap_fn(of_example, *axes, **kwargs)(rows)
        # What is no array is that of the one example that was traced.
        leaves, axes = [], []
        for leaf, axis in safe_zip(traced["leaves"], traced["axes"]):
            if axis is not None:
                leaf = mapped.pop(0)
            elif eqx.is_array(leaf):
                leaf = unmapped.pop(0)
            if eqx.is_array(leaf):
                axes.append(axis)
            leaves.append(leaf)
        return _Mapped(jtu.tree_unflatten(traced["treedef"], leaves), tuple(axes))


class _Mapped(NamedTuple):
    """The output for a microbatch, with the examples along axis 0 of mapped arrays.

    - `out_axes`: where they go in each of its arrays; None if it is not mapped.
    """

    output: PyTree
    out_axes: tuple[int | None, ...] | PartitionSpec


class _Arrays(NamedTuple):
    """The arrays of an output that are mapped, and those that all examples share."""

    mapped: Any
    unmapped: Any


def _of_one(
    of_example: Callable[[list], _Arrays], rows: list, axes: tuple[int, ...]
) -> _Arrays:
    """The mapped and unmapped outputs of a single example, without `jax.vmap`.

    Raises as `jax.vmap` does if an unmapped output differs between examples.
    """
    # Traced without a batch axis, once: the program is read, and then run.
    in_axes = [*axes]
    pairs = safe_zip(rows, axes)
    row = [lax.index_in_dim(x, 0, axis, keepdims=False) for x, axis in pairs]
    closed, structs = jax.make_jaxpr(of_example, return_shape=True)(row)
    closed = without_refs(closed)
    treedef = jtu.tree_structure(structs)

    def run(row: list) -> _Arrays:
        outs = run_jaxpr(closed.jaxpr, list(closed.consts), row)
        return jtu.tree_unflatten(treedef, outs)

    # Only `jax.vmap` sees that an unmapped output depends on the example, and raises.
    if structs.unmapped and rows:
        jax.eval_shape(jax.vmap(run, (in_axes,), _Arrays(0, None)), rows)
    # Without barriers, XLA for CPUs overwrites what `x[0].at[1:].set(x[0, :-1])[None]`
    # has still to read (https://github.com/openxla/xla/issues/49176).
    mapped, unmapped = run(in_turn(row))
    # A constant is a literal of the jaxpr and not an array yet.
    mapped = in_turn([jnp.asarray(x) for x in mapped])
    return _Arrays([x[None] for x in mapped], [*map(jnp.asarray, unmapped)])


def _as_array(leaf: Any, axis: int) -> Array:
    if not eqx.is_array_like(leaf):
        raise ValueError(
            f"`out_axes` gives the axis {axis} to a {type(leaf).__name__} that `fun` "
            f"returned, which is not an array. Use `eqx.if_array({axis})` to map just "
            "the arrays of the output, or None."
        )
    return as_array(leaf)


def _per_example(
    slot: OutputAccumulator,
    leaves: list[jax.ShapeDtypeStruct],
    axes: list[int | None],
    blocks: Blocks,
) -> OutputAccumulator:
    """The slot of a per-example output, with its examples at `out_axes`."""
    # `leaves` have the batch axis, so that an axis of the user's can be any of theirs.
    for i in slot.indices:
        ndim, axis = leaves[i].ndim, axes[i]
        if axis is not None and not -ndim <= axis < ndim:
            raise ValueError(
                f"`out_axes` gives output{slot.path} the axis {axis}, which is out "
                f"of range: with the batch axis it has {ndim} axes."
            )
    unmapped = [axes[i] is None for i in slot.indices]
    accumulator = slot.accumulator
    if any(unmapped):
        # Shared by all examples, so there is nothing to accumulate.
        if not accumulator.leafwise:
            # Its `aggregate` takes axis 0 of all arrays, which this one does not have.
            raise ValueError(
                f"The accumulator of output{slot.path} takes a whole part of the "
                "output, but `out_axes` is None for an array of it. Give it an axis, "
                "or that array an accumulator of its own."
            )
        if blocks.total == 0:
            raise ValueError(
                f"`out_axes` is None for output{slot.path}, so that it is the same for "
                "all examples, but there are 0 examples to take it from."
            )
        if slot.in_state and not accumulator.of_last:
            # Layers with a state couple the examples, so that microbatches differ.
            (i,) = slot.indices
            accumulator = of_state(accumulator, leaves[i].dtype)
            return dataclasses.replace(slot, accumulator=accumulator)
        return dataclasses.replace(slot, accumulator=Last())
    # Microbatches are written along this axis, so that no result is transposed.
    if isinstance(accumulator, Concat):
        check_no_axis(accumulator)
        (axis,) = (axes[i] for i in slot.indices)
        assert axis is not None
        accumulator = Concat(axis)
    return dataclasses.replace(slot, accumulator=accumulator, per_example=True)


def check_no_axis(concat: Concat) -> None:
    """Raises for an axis, which `out_axes` sets in maps of single examples."""
    if concat.axis != 0:
        raise ValueError(
            f"Concat(axis={concat.axis}) is for `filter_microbatch`; here the axis is "
            f"set by `out_axes`. Use Concat(), and ask for axis {concat.axis} there."
        )


filter_micro_vmap = also_decorator("filter_micro_vmap", MicroVmap, AbstractMicroVmap)
