"""`over_batches`: a transform of all examples of a loader, batch by batch."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jaxtyping import Array, PyTree

from .._base.checks import check_at_least, check_equal, warn_user
from .._base.mesh import is_explicit
from .._base.structs import is_struct
from .._base.trees import described, with_shapes_of_arrays
from .arguments import Arguments, Leaves
from .batches import (
    arguments_of,
    concatenated,
    fetched_rows,
    iterate,
    length_of,
    moved,
    naming_batch,
    Slices,
    type_of_leaf,
    write_rows,
)
from .fingerprint import digest_of_rows, fingerprint
from .memory import resolved
from .progress import AbstractProgressMeter, as_meter, metered
from .reading import copied, is_stored
from .store import (
    AbstractStore,
    AbstractWriter,
    Chunk,
    IN_FLIGHT,
    in_threads,
    StoredArray,
)
from .stream_state import (
    applied,
    begun,
    check_state,
    finished_stream,
    first_leaf,
    reductions_of,
    RowsOfBatches,
    StreamState,
    updated,
    Updates,
    with_rows,
)
from .sums import AbstractTotal
from .transform import (
    AbstractMicrobatched,
    AbstractTransform,
    also_decorator,
)
from .zarr_store import as_store, Store


def _as_store(store: Store | None) -> AbstractStore | None:
    made = None if store is None else as_store(store)
    if made == "device":
        raise ValueError(
            "`store` must be 'host', a path on disk, the URL of a bucket, or a store; "
            "got 'device'. Leave it out to keep all rows in memory."
        )
    return made


class OverBatches(AbstractTransform):
    """Applies a transform to the examples of many batches, as if they were one batch.

    `over_batches(transform)(model, batches)` equals `transform(model, *examples)` for
    the concatenated examples, up to rounding, whatever the sizes of the batches. Means
    are weighted by the number of examples, and random numbers belong to the number of
    an example. The next batch is loaded, and moved to the device, while one is
    computed, so that three batches are in memory at most.

    **Arguments:**

    - `transform`: what [`eqxbatch.filter_micro_vmap`][],
        [`eqxbatch.filter_microbatch`][], [`eqxbatch.filter_micro_grad`][],
        [`eqxbatch.filter_micro_value_and_grad`][], [`eqxbatch.filter_jacobian`][],
        [`eqxbatch.filter_hessian`][], [`eqxbatch.filter_ggn`][],
        [`eqxbatch.filter_kfac`][], [`eqxbatch.filter_hvp`][],
        [`eqxbatch.filter_ggnvp`][], and their diagonals and blocks return, with a
        batch axis. Each batch is cut into microbatches as the transform says.
    - `weighted`: whether the last entry of each batch is no argument, but the weights
        of its examples: numbers, or bools for a mask. They are the `weights` of each
        [`eqxbatch.Sum`][] and [`eqxbatch.Mean`][] of the transform, which must have no
        other accumulators. Rows, such as norms, are those of all examples.
    - `batch_size`: if given, `batches` are all examples: arrays, or what is indexed
        like them, such as `numpy.memmap`, `zarr.Array` or an HDF5 data set. So many
        rows at a time are read along axis 0.
    - `store`: where results with a row for each example are stored, with a
        `batch_size`: a path on disk, the URL of a bucket, a store of zarr, or an
        [`eqxbatch.ZarrStore`][], for zarr arrays with a chunk for each batch; or
        `"host"`. All results of the transform must be such rows. To resume a run that
        was stopped or killed, call it again: it computes the chunks that are missing,
        or whose rows were others.
    - `sharding`: where batches are put, such as
        `NamedSharding(mesh, PartitionSpec("data"))`. With several processes, each gives
        its own rows of a batch. The default is the default device, and arrays of JAX
        stay where they are.
    - `progress`: True for a progress bar, or an [`eqxbatch.AbstractProgressMeter`][].

    **Returns:**

    A function of the arguments before the batch, such as the model, and of `batches`:
    an iterable of the remaining arguments of the transform, which all have a batch
    axis. A tuple or list is several arguments, and anything else a single one, also a
    NamedTuple. Arrays are those of JAX, NumPy, or any library with `__array__`, such as
    PyTorch: a `torch.utils.data.DataLoader` is such an iterable. Its tensors may have
    dtypes that only JAX has arrays of, such as bfloat16, if they are on the CPU. Full
    batches share one compiled program, and each other size has another. A batch may be
    empty.

    Accumulators of your own get the numbers of all microbatches and examples before, as
    `block.index` and `block.start`, and `blocks` of the first batch, which `continues`.

    Results with a row for each example, such as norms, are joined in host memory, as
    NumPy arrays, unless there is a `store`.

    It has three methods for a loop of your own, with the same arguments for the same
    batch:

    - `init(model, batch)` returns an [`eqxbatch.results.StreamState`][] before the
        first batch. Only the types of `batch` matter.
    - `update(state, model, batch, number=0)` returns `(state, rows)`: the state with
        one more batch, and the results with a row for each of its examples, an empty
        list if there are none. The memory of the old state is reused. `number` is the
        number of the pass.
    - `finish(state, model, rows=())` returns the result. `rows` is the list of all
        rows, joined along axis 0.

    **Raises:**

    - `ValueError` if there are no batches, for a batch whose examples have other types
        than those of the first one, for arrays with masked entries, for arguments
        before the batches that have a batch axis, for a transform that has `weights`,
        bounds for each example, or `num_real_microbatches`, and for an iterator if it
        takes two passes; with a `batch_size`, if other rows come than were asked for.
    - `TypeError` for what is no such transform.
    - What a loader or reader raises, with the number of the batch. Only the end of an
        iterator, and an `IndexError` of what has neither `__iter__` nor `__len__`, end
        the batches. If they are fewer than the `len` of a loader, there is a warning.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, numpy as np
        >>> model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> diagonal = eqxbatch.filter_ggn_diagonal(
        ...     lambda model, x, label: model(x),
        ...     lambda logits, x, label: -jax.nn.log_softmax(logits)[label],
        ... )
        >>> def batches():
        ...     for size in (4, 4, 2):
        ...         yield np.ones((size, 2), np.float32), np.zeros(size, np.int32)
        >>> result = eqxbatch.over_batches(diagonal)(model, batches())
        >>> result.weight.shape
        (3, 2)

        ```
    """

    transform: Callable
    _: dataclasses.KW_ONLY
    weighted: bool = False
    batch_size: int | None = None
    store: AbstractStore | None = eqx.field(default=None, converter=_as_store)
    sharding: Sharding | None = eqx.field(static=True, default=None)
    progress: AbstractProgressMeter | None = eqx.field(
        static=True, converter=as_meter, default=None
    )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self).__call__)

    def __check_init__(self) -> None:
        transform: Any = self.transform
        # Others loop over no batch, and have no states to keep.
        if not isinstance(transform, AbstractMicrobatched):
            raise TypeError(
                "`over_batches` takes a transform that accumulates over a batch, such "
                "as `eqxbatch.filter_micro_grad(loss)` returns; got "
                f"{described(transform)}."
            )
        if self.batch_size is not None:
            check_at_least("batch_size", self.batch_size, 1)
        # A chunk is found again by the number of its rows, which iterators do not have.
        store, size = self.store, self.batch_size
        if store is not None and size is None:
            raise ValueError(
                "`store` needs a `batch_size`, the number of rows that are stored "
                "together, with arrays of all examples in place of batches; got "
                f"`batch_size={size}` and {store}."
            )
        # No other accumulator would take the weights that come with the batches.
        reductions = reductions_of(transform)
        unweighted = [x for x in reductions if not isinstance(x, AbstractTotal)]
        if self.weighted and (unweighted or not reductions):
            raise ValueError(
                "`weighted=True` gives weights to each `Sum` and `Mean` of the "
                f"transform, but {transform} has {unweighted or 'none'}. Leave it out."
            )
        # What is for the examples of one batch says nothing of those of another.
        has_weights = lambda x: getattr(x, "weights", None) is not None
        of_batch = {
            "num_real_microbatches": getattr(transform, "num_real_microbatches", None),
            "clip_norm": first_leaf(getattr(transform, "clip_norm", None), np.ndim),
            "weights": first_leaf(reductions, has_weights),
        }
        for name, value in of_batch.items():
            if value is not None:
                raise ValueError(
                    f"The transform has `{name}` for the examples of one batch, but "
                    "`over_batches` has many. Leave it out. For weights, or a mask, "
                    "pass `weighted=True`, and yield them last in each batch."
                )

    def __call__(self, /, *args: Any) -> Any:
        return self.apply(args, {})

    def init(self, *args: Any) -> StreamState:
        """The state before the first batch, the last argument."""
        # Weights come last in a batch, and need something that they are the weights of.
        *leading, batch = args
        if self.weighted and len(arguments_of(batch)) < 2:
            raise ValueError(
                "With `weighted=True`, a batch must be a tuple or list that has the "
                f"weights of its examples last, such as `(x, weights)`; got "
                f"{described(batch)}."
            )
        batch = moved(batch, self.sharding)
        # Only types matter, so the program that begins the passes reads no batch.
        leaves, treedef = jtu.tree_flatten(jtu.tree_map(type_of_leaf, batch))
        args = tuple(leading), batch
        arrays = [x for x in jtu.tree_leaves(args) if eqx.is_array(x)]
        mesh = next((x.sharding.mesh for x in arrays if is_explicit(x)), None)
        is_traced = any(isinstance(x, Tracer) for x in arrays)
        # The program reads no array that would tell the devices.
        around = (
            contextlib.nullcontext()
            if mesh is None or is_traced
            else jax.set_mesh(mesh)
        )
        with around:
            passes = begun(self._transform, args, self.weighted)
        if not passes:
            raise TypeError(
                f"`over_batches` takes a transform that accumulates over a batch, and "
                f"{self.transform} does not. Give it a batch axis with `in_axes`."
            )
        self._check_axes(passes[0].axes, sum(map(is_struct, leaves)) - self.weighted)
        return StreamState(passes, treedef, tuple(leaves))

    def _check_axes(self, axes: tuple[int, ...], num: int) -> None:
        # Without a batch axis, an array would be another one in each batch.
        if len(axes) < num:
            raise ValueError(
                f"Each array of a batch must have a batch axis, but `in_axes` of "
                f"{self.transform} gives one to {len(axes)} of {num}. Pass what all "
                "examples share before the batches, or hold it in the model."
            )
        if self.batch_size is not None and any(axes):
            raise ValueError(
                "`batch_size` reads rows along axis 0, so that all batch axes must be "
                f"0; got {axes}. Leave `batch_size` out, and yield batches."
            )

    def update(
        self, state: StreamState, *args: Any, number: int = 0
    ) -> tuple[StreamState, list[Array]]:
        """The state with one more batch, the last argument, and its rows."""
        check_state(state)
        *leading, batch = args
        batch = moved(batch, self.sharding)
        call = self._updates(tuple(leading), state).call(batch, number)
        passes, rows = updated(call, state.passes)
        return dataclasses.replace(state, passes=passes), rows

    def _updates(self, leading: Arguments, state: StreamState) -> Updates:
        return Updates(self._transform, leading, self.weighted, state)

    def finish(self, state: StreamState, *leading: Any, rows: Iterable = ()) -> Any:
        """The result for all batches."""
        check_state(state)
        # Without tracing, the counts tell of passes that saw other batches.
        counts = [x.num_examples for x in state.passes]
        if not any(isinstance(x, Tracer) for x in counts):
            numbers = [*map(int, counts)]
            what = "The number of examples in each pass over all batches"
            check_equal(what, numbers, [numbers[0]] * len(numbers))
            of_last = [path for x in state.passes for path in x.of_last]
            # The result of the last example does not exist without one.
            if of_last and numbers[0] == 0:
                raise ValueError(
                    f"output{of_last[0]} comes from the last example, because of "
                    "`Last` or None in `out_axes`, but no batch has an example."
                )
        # Marks in the result say where the joined rows of all batches belong.
        result, rows = self._finished(state, leading), [*rows]

        def place(x: PyTree) -> Any:
            if not isinstance(x, RowsOfBatches):
                return x
            if len(rows) <= x.number:
                raise ValueError(
                    f"`rows` must have the rows of output{x.path}: join what `update` "
                    "returned for all batches along axis 0."
                )
            array = rows[x.number]
            return array if x.axis == 0 else np.moveaxis(np.asarray(array), 0, x.axis)

        return with_shapes_of_arrays(jtu.tree_map(place, result))

    def _finished(self, state: StreamState, leading: Arguments) -> Any:
        return finished_stream(self._transform, tuple(leading), state, self.weighted)

    def apply(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        *leading, batches = args
        self._check_batches(leading, batches)
        if self.store is not None:
            return self._to_store(self.store, tuple(leading), batches)
        # Each pass reads all batches; the first batch says how many passes there are.
        state, updates, passes, rows, number = None, None, [], [], 0
        while updates is None or number < len(passes):
            upcoming = self._each(batches)
            (batch, is_users), index = next(upcoming, _NO_BATCH), 0
            if batch is None:
                raise ValueError(
                    f"`batches` must have a batch; got {described(batches)}, which is "
                    "empty. A generator is, once it has run: make it anew."
                )
            if updates is None:
                with naming_batch(0):
                    state = self.init(*leading, batch)
                updates, passes = self._updates(tuple(leading), state), state.passes
            # The first pass would use up an iterator, and all its time be lost.
            if len(passes) > 1 and isinstance(batches, Iterator):
                raise ValueError(
                    f"{self.transform} takes {len(passes)} passes over all "
                    "batches, but `batches` is an iterator, which has one. Pass a "
                    "list, or a loader that can be iterated again."
                )
            with naming_batch(index):
                call = updates.call(batch, number)
            while batch is not None:
                with naming_batch(index):
                    passes, new = updated(call, passes)
                # A loader may write its next batch to memory that this one still reads.
                if is_users:
                    jax.block_until_ready(passes)
                # The next batch is loaded and checked while this one is computed.
                batch, is_users = next(upcoming, _NO_BATCH)
                if batch is not None:
                    with naming_batch(index + 1):
                        call = updates.call(batch, number)
                with naming_batch(index):
                    jax.block_until_ready(passes)
                # Rows of all batches may be more than a device has room for.
                rows.append(fetched_rows(new))
                index += 1
            number += 1
        joined = [*map(concatenated, zip(*rows, strict=True))]
        assert state is not None
        state = dataclasses.replace(state, passes=passes)
        return self.finish(state, *leading, rows=joined)

    def _check_batches(self, leading: Leaves, batches: PyTree) -> None:
        stored = [x for x in leading if self.batch_size is not None and is_stored(x)]
        if stored:
            raise TypeError(
                f"Before the batches, there is {described(stored[0])}, of which rows "
                "are read. Batches are one argument, the last: give `(x, y)` in place "
                "of `x, y`."
            )
        # An array can be iterated over, too, but its entries are examples.
        has = functools.partial(hasattr, batches)
        is_iterable = (has("__iter__") or has("__getitem__")) and not has("__array__")
        # Its entries are not batches, but parts of one.
        is_named = isinstance(batches, tuple) and hasattr(batches, "_fields")
        is_one = isinstance(batches, dict) or is_named
        if self.batch_size is None and (is_one or not is_iterable):
            raise TypeError(
                "`batches`, the last argument, must be an iterable of batches, such as "
                "`[(x, y)]`, or arrays of all examples, such as `(x, y)`, with a "
                f"`batch_size`; got {described(batches)} without one."
            )

    def _to_store(
        self, store: AbstractStore, leading: Arguments, examples: PyTree
    ) -> Any:
        """The rows of all batches, in a store that may have some of them already."""
        assert self.batch_size is not None
        # The first batch tells the types of the rows, and that all results are rows.
        batches = Slices(examples, self.batch_size, is_stored=True)
        _check_concrete((leading, examples))
        with naming_batch(0):
            batch = moved(batches[0], self.sharding, np.asarray)
            state = self.init(*leading, batch)
        result = self._finished(state, leading)
        leaves = jtu.tree_leaves(result)
        rows = [x for x in leaves if isinstance(x, RowsOfBatches)]
        is_other = any(map(eqx.is_array, leaves)) or any(x.axis for x in rows)
        if is_other or not rows:
            raise ValueError(
                "`store` is for results with a row for each example, along axis 0. "
                f"{self.transform} has others: compute them without a `store`."
            )
        # The program is a part of the record: rows of another one are not kept.
        update = functools.partial(applied, with_rows)
        args = leading, batch
        call = self._transform, args, self.weighted, state.passes, 0
        program, (_, structs), _ = eqx.filter_make_jaxpr(update)(*call)
        paths = {x.number: x.path for x in rows}
        arrays = [
            StoredArray(
                paths[i],
                (batches.total, *x.shape[1:]),
                (self.batch_size, *(max(1, size) for size in x.shape[1:])),
                x.dtype,
                kind="map",
            )
            for i, x in enumerate(structs)
        ]
        parts = {"transform": self.transform, "arguments": leading}
        record = lambda: fingerprint(parts, [program])
        # The number of a chunk along axis 0 is that of the batch whose rows it has.
        indices = [x.indices() for x in arrays]
        chunks = [Chunk(i, x) for i, part in enumerate(indices) for x in part]

        # Rows that were changed since make another chunk: their digest tells.
        def source(chunk: Chunk) -> str:
            with naming_batch(chunk.index[0]):
                return digest_of_rows(batches[chunk.index[0]])

        def computed(writer: AbstractWriter, numbers: list[int]) -> Iterator[tuple]:
            nonlocal state
            for number in numbers:
                with naming_batch(number):
                    batch = batches[number]
                    placed = moved(batch, self.sharding, np.asarray)
                    state, rows = self.update(state, *leading, placed)
                _check_concrete(rows)  # The transform may close over traced arrays.
                for x in rows:
                    x.copy_to_host_async()
                yield writer, number, rows, batch if store.is_resumed else None

        # Missing chunks only: a run that was killed goes on where it was.
        rank, num = jax.process_index(), jax.process_count()
        with contextlib.closing(store.begin(arrays, record, True)) as writer:
            # In the end, each process does what others have not done.
            for is_own in (True, False):
                share = [x for x in chunks if (x.index[0] % num == rank) == is_own]
                missing = sorted({x.index[0] for x in writer.missing(share, source)})
                total = len({x.index[0] for x in share})
                meter = self.progress if is_own else None
                # Writing takes place in threads while the next batches are computed.
                writes = in_threads(write_rows, computed(writer, missing), IN_FLIGHT)
                with (
                    metered(meter, total, total - len(missing), *_TEXTS) as step,
                    contextlib.closing(writes),
                ):
                    for _ in writes:
                        step(0)
            return self.finish(state, *leading, rows=writer.finish())

    @property
    def _transform(self) -> AbstractTransform:
        transform: Any = self.transform
        return resolved(transform)

    def _each(self, batches: PyTree) -> Iterator[tuple[tuple, bool]]:
        """The batches on the device, and whether a loader may still write to them.

        JAX may share the memory of its arrays with those of NumPy.
        """
        # A list or tuple keeps its batches; others may use their memory again.
        of_host: Callable = copied
        is_shared = not isinstance(batches, (list, tuple))
        # A loader may write to its arrays once it is asked for the next batch.
        if self.batch_size is not None:
            # What is on disk was copied as it was read.
            batches, of_host = Slices(batches, self.batch_size), np.asarray
            is_shared = False
        iterator, promised = iterate(batches), length_of(batches)
        hint = operator.length_hint(batches) or None
        with metered(self.progress, hint, 0, *_TEXTS) as step:
            for i in itertools.count():
                with naming_batch(i):
                    batch = next(iterator, _END)
                    if batch is _END:
                        # No error, because some loaders only estimate their length.
                        if promised is not None and 0 < i < promised:
                            warn_user(
                                f"`batches` ended after {i} of {promised} batches, its "
                                f"`len`. The result is that of {i}. If a loader hides "
                                "its errors, make it raise them."
                            )
                        return
                    are_of_jax = [
                        isinstance(x, jax.Array) for x in jtu.tree_leaves(batch)
                    ]
                    batch = moved(batch, self.sharding, of_host)
                yield batch, is_shared and any(are_of_jax)
                step(0)


def _check_concrete(arrays: PyTree) -> None:
    """Raises `TypeError` if rows to store are being transformed."""
    if any(isinstance(x, Tracer) for x in jtu.tree_leaves(arrays)):
        raise TypeError(
            "Rows are stored by a loop in Python, which cannot be within `jax.jit`, "
            "`jax.grad` or the like. Call it outside of them, or leave out the `store`."
        )


# What a progress bar shows, and what it counts.
_TEXTS = "batches", "batch"


_END: Any = object()


_NO_BATCH: Any = (None, False)


over_batches = also_decorator("over_batches", OverBatches)
