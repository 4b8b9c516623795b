"""Which axis of which argument is the batch, and how a batch is cut into microbatches.

Batch axes are given as for `eqx.filter_vmap`. Microbatches are contiguous rows; the
last one may be shorter. Their size is a number, or the largest one for which the
compiled program fits into memory.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from .._base.checks import (
    as_int,
    called,
    check_at_least,
    check_types,
    check_unmasked,
    has_numbers,
    is_one_key,
    key_remedy,
    match_prefix,
    NUMBERS,
)
from .._base.jaxprs import axis_names, is_struct
from .._base.mesh import (
    examples_spec,
    explicit_mesh,
    is_explicit,
    manual_axes,
    mesh_axes,
    names_of,
    on_all_devices,
    outside_of_mesh,
    spec_of,
    spread_rows,
    structs_on_devices,
    whole_rows,
    with_auto_axes,
)
from .._base.platforms import has_library, memory_options, number_types, platform
from .._base.refs import is_ref
from .._base.trees import (
    described,
    log,
    safe_zip,
    shown,
    with_shapes_of_arrays,
)
from .._base.versions import with_consts


def is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


def is_stored(x: Any) -> bool:
    """Whether an array is not in memory: it has a shape, and is read by slices."""
    is_in_memory = eqx.is_array(x) and not isinstance(x, np.memmap)
    return not is_in_memory and hasattr(x, "__getitem__") and has_rows(x)


def has_rows(x: Any) -> bool:
    """Whether this is an array of any library, with at least one axis."""
    return bool(getattr(x, "shape", ()))


def read_rows(x: Any, start: int, stop: int) -> Any:
    """Some rows of an array, in memory that reading others does not overwrite.

    Raises `ValueError` if other rows come than were asked for.
    """
    try:
        part = x[start:stop]
    except StopIteration as e:
        # It would end a loop of Python, as if there were no more rows.
        raise RuntimeError(f"Reading rows of {shown(x)} raised StopIteration.") from e
    if isinstance(x, jax.Array):
        return part
    part = as_numpy(part)
    if part.shape[:1] != (stop - start,):
        raise ValueError(
            f"Rows {start} to {stop} of {shown(x)} must be {stop - start} rows; got "
            f"{shown(part)}. Slices must return all rows within `shape`."
        )
    # JAX has no arrays of the other byte order.
    is_other = part.dtype != part.dtype.newbyteorder("=")
    return copied(part) if is_other or is_stored(x) else part


def as_numpy(x: Any) -> np.ndarray:
    """An array of any library as one of NumPy, which may share its memory.

    Raises `ValueError` if it has masked entries.
    """
    try:
        # Unlike `numpy.asarray`, this keeps a mask.
        array = np.asanyarray(x)
    except TypeError as e:
        # PyTorch knows no NumPy arrays of bfloat16 and float8, and JAX does.
        array = _by_dlpack(x, e)
    check_unmasked(array)
    return np.asarray(array)


# The number of CPUs in DLPack.
_CPU = 1


def _by_dlpack(x: Any, error: TypeError) -> np.ndarray:
    """The entries of an array of which NumPy has raised an error."""
    if not hasattr(x, "__dlpack__"):
        raise error
    try:
        device, _ = x.__dlpack_device__()
        if device == _CPU:
            # JAX reads no arrays with gaps, which PyTorch can close.
            whole = x.contiguous() if hasattr(x, "contiguous") else x
            return np.asarray(jax.dlpack.from_dlpack(whole))
    except Exception as e:
        raise TypeError(
            f"NumPy and JAX cannot read {shown(x)}: {error}; {e}. Convert it to a "
            "dtype that both have, such as float32."
        ) from e
    raise error


# Where XLA for CPUs takes arrays as they are.
_ALIGNED = 64


def copied(x: Any) -> np.ndarray:
    """A copy that nobody writes to, and that JAX does not copy again on a CPU.

    JAX shares memory that is aligned, even if it is told not to.
    """
    x = np.asarray(x)
    dtype = x.dtype.newbyteorder("=")
    if dtype.hasobject:
        return np.array(x)
    memory = np.empty(x.nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    copy = memory[start : start + x.nbytes].view(dtype).reshape(x.shape)
    copy[...] = x
    return copy


def broadcast_axes(
    name: str, spec: PyTree, tree: PyTree, *, shares_states: bool = False
) -> list[int | None]:
    """Resolves a prefix of `int | None | callable` to one axis for each leaf.

    Returns the axes in the order of `jax.tree_util.tree_leaves(tree)`. With
    `shares_states`, callables do not apply to an `equinox.nn.State`, which has none.
    """
    places = match_prefix(name, spec, tree, "a PyTree prefix of what it describes")

    def axis_of(axis: Any, part: PyTree, leaf: Any) -> Any:
        if not callable(axis):
            return axis
        if shares_states and is_state(part):
            return None
        # Equinox takes no `Ref` for an array, and would share its rows.
        return axis(leaf[...] if is_ref(leaf) else leaf)

    return [
        _resolve_axis(name, axis_of(axis, part, leaf))
        for _, axis, subtree in places
        for part in jtu.tree_leaves(subtree, is_leaf=is_state)
        for leaf in jtu.tree_leaves(part)
    ]


def _resolve_axis(name: str, axis: Any) -> int | None:
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return axis
    raise ValueError(
        f"`{name}` must consist of ints, None, and callables that return those; got "
        f"{described(axis)}. Give the number of the batch axis, "
        "or None for what is not batched."
    )


def positional_names(fun: Callable, num: int) -> list[str]:
    """The names of the first `num` positional arguments of a function."""
    names = []
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        parameters = ()
    rest = "args"
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = parameter.name
        elif parameter.kind in _POSITIONAL:
            names.append(parameter.name)
    names += [f"{rest}[{i}]" for i in range(num - len(names))]
    return names[:num]


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def split_axes(
    fun: Callable, in_axes: PyTree, args: tuple, kwargs: dict, default: Any
) -> tuple[PyTree, PyTree]:
    """Splits `in_axes` into the axes of `args` and those of `kwargs`.

    `in_axes` is a prefix of `args`, or a dict by argument name. Arguments that it does
    not name, including keyword arguments, get the `default`.
    """
    if not isinstance(in_axes, dict):
        return in_axes, dict.fromkeys(kwargs, default)
    in_axes = dict(in_axes)
    names = positional_names(fun, len(args))
    args_spec = [in_axes.pop(name, default) for name in names]
    kwargs_spec = {name: in_axes.pop(name, default) for name in kwargs}
    if in_axes:
        raise ValueError(
            f"The following `in_axes` did not correspond to any argument: "
            f"{tuple(in_axes)}. The arguments passed are {(*names, *kwargs)}."
        )
    return tuple(args_spec), kwargs_spec


class Batch(eqx.Module):
    """The arguments of a call, split into batched leaves and everything else.

    `arrays` and `axes` (non-negative) list the batched leaves in the same order;
    `names` says where each of them came from, for error messages. `shared` has all
    other leaves, and a mark in place of each batched one.
    """

    arrays: list
    axes: tuple[int, ...] = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    shared: list
    treedef: Any = eqx.field(static=True)

    def arguments(self, arrays: list) -> tuple[tuple, dict]:
        """`(args, kwargs)` of the call, with `arrays` as the batched leaves."""
        arrays = list(arrays)
        leaves = [arrays.pop(0) if x is _Batched else x for x in self.shared]
        return with_shapes_of_arrays(jtu.tree_unflatten(self.treedef, leaves))

    def call(self, fun: Callable, arrays: list) -> PyTree:
        """Calls `fun` with `arrays` as the batched leaves."""
        args, kwargs = self.arguments(arrays)
        return called(fun, args, kwargs)

    def on_devices_of(self, blocks: "Blocks") -> "Batch":
        """The batch, of which each device has all rows if there is one part."""
        if not (blocks.in_order and blocks.parts == 1 < blocks.num):
            return self
        arrays = [whole_rows(x, axis) for x, axis in safe_zip(self.arrays, self.axes)]
        return dataclasses.replace(self, arrays=arrays)

    def example(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the batched leaves of one example."""
        return [
            jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
            for x, axis in safe_zip(self.arrays, self.axes)
        ]

    def total(self, axis_size: int | None = None) -> int:
        """The number of examples; all batched arrays must agree on it."""
        sizes = [x.shape[a] for x, a in safe_zip(self.arrays, self.axes)]
        if axis_size is None and not sizes:
            raise ValueError(
                "Nothing is batched: `in_axes` gives no array a batch axis, so the "
                "number of examples is not known. Mark an array argument as batched "
                "in `in_axes`; or pass `axis_size`, or `in_axes=None` for one call "
                "with all arguments, where the transform has it."
            )
        totals = {*sizes} if axis_size is None else {*sizes, axis_size}
        if len(totals) > 1:
            listing = [
                f"{name} has {size} (axis {axis} of shape {x.shape})"
                for name, size, axis, x in safe_zip(
                    self.names, sizes, self.axes, self.arrays
                )
            ]
            if axis_size is not None:
                listing.append(f"`axis_size` is {axis_size}")
            remedy = "Fix the shapes, or use `in_axes` to name another axis or None."
            for name, x in safe_zip(self.names, self.arrays):
                if is_one_key(x):
                    num = max(totals) if len(totals) == 2 else None
                    remedy = key_remedy(name, num)
            raise ValueError(
                "Batched arguments must agree on the number of examples, but "
                f"{'; '.join(listing)}. {remedy}"
            )
        return totals.pop()


class _Batched:
    """Marks the place of a batched leaf."""


# The arrays that all batches share, in a call whose batch is one of several.
BEFORE_BATCHES: contextvars.ContextVar[Sequence] = contextvars.ContextVar(
    "before_batches", default=()
)


def split_batch(
    fun: Callable,
    in_axes: PyTree,
    args: tuple,
    kwargs: dict,
    *,
    shares_states: bool = False,
) -> Batch:
    """Resolves `in_axes` against a call of `fun` as `eqx.filter_vmap` does.

    Unlike `eqx.filter_vmap`, keyword arguments are supported: an `in_axes` dict may
    name them, and all others use `eqx.if_array(0)`. `shares_states` is as for
    `broadcast_axes`.

    Raises `ValueError` if `in_axes` does not fit the arguments, if an axis is out of
    range, or if something that is not an array gets a batch axis.
    """
    default = eqx.if_array(0)
    args_spec, kwargs_spec = split_axes(fun, in_axes, args, kwargs, default)
    states = {"shares_states": shares_states}
    axes = broadcast_axes("in_axes", args_spec, args, **states)
    axes += broadcast_axes("in_axes", kwargs_spec, kwargs, **states)
    paths, treedef = jtu.tree_flatten_with_path((args, kwargs))
    parameters = positional_names(fun, len(args))
    _check_lists(args_spec, args, parameters)
    _check_lists(kwargs_spec, kwargs, [*kwargs])

    parts = jtu.tree_leaves((args, kwargs), is_leaf=is_state)
    in_states = [is_state(part) for part in parts for _ in jtu.tree_leaves(part)]
    arrays, batch_axes, names, shared = [], [], [], []
    for (path, leaf), axis, in_state in safe_zip(paths, axes, in_states):
        if axis is None:
            shared.append(leaf)
            continue
        shared.append(_Batched)
        name = leaf_name(path, parameters)
        if is_ref(leaf):
            raise ValueError(no_ref(name))
        if not eqx.is_array(leaf):
            raise ValueError(
                f"`in_axes` gives {name} the batch axis {axis}, but it is a "
                f"{type(leaf).__name__}, not an array. Make an array of it with "
                f"`jax.numpy.asarray`, or use `eqx.if_array({axis})` to batch just the "
                "arrays of an argument, or None."
            )
        if not -leaf.ndim <= axis < leaf.ndim:
            remedy = (
                f"Name one of its {leaf.ndim} axes, or None for an argument that is "
                "not batched."
            )
            if in_state:
                remedy = (
                    "It is in an `equinox.nn.State`, which is not batched: pass the "
                    "`axis_name` of the layers that update it, as for batch "
                    "normalisation with `filter_micro_grad`; or give the state None."
                )
            raise ValueError(
                f"`in_axes` gives {name} the batch axis {axis}, which is out of range "
                f"for its shape {leaf.shape}. "
                f"{key_remedy(name, None) if is_one_key(leaf) else remedy}"
            )
        if any(leaf is x for x in BEFORE_BATCHES.get()):
            raise ValueError(
                f"{name}, before the batches, has the batch axis {axis}. Batches are "
                "one argument, the last: if it has examples, give `(x, y)` in place of "
                "`x, y`; if all examples share it, give it None in `in_axes`."
            )
        arrays.append(leaf)
        batch_axes.append(axis % leaf.ndim)
        names.append(name)
    return Batch(arrays, tuple(batch_axes), tuple(names), shared, treedef)


def no_ref(name: str) -> str:
    """The message for a `Ref` that has rows, where it cannot be mapped."""
    return (
        f"{name} is a `jax.Ref` with a batch axis, which only `filter_micro_vmap` maps "
        f"over. Pass its value, as in `ref[...]`, and return what is to be written; or "
        "give it None in `in_axes` if all examples read the same."
    )


def _check_lists(spec: PyTree, arguments: Any, names: list[str]) -> None:
    """Raises for an argument that is a list of numbers, which would not be batched.

    None in the prefix of axes says that the list is shared by all examples.
    """
    keys = [*arguments] if isinstance(arguments, dict) else range(len(arguments))
    for path, axis, part in match_prefix("in_axes", spec, arguments, "a prefix"):
        if not callable(axis) or len(path) > 1:
            continue
        for key, name in safe_zip(keys, names):
            if path and key != getattr(path[0], "key", getattr(path[0], "idx", None)):
                continue
            x = part if path else part[key]
            if isinstance(x, list) and has_numbers(x):
                raise ValueError(
                    f"`{name}` is a list of {len(x)} entries that are numbers or lists "
                    f"of them, and only arrays are batched. {NUMBERS} If it is the "
                    "same for all examples, give it None in `in_axes`."
                )


def unbatched(args: tuple, kwargs: dict) -> Batch:
    """The arguments of a call without a batch."""
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    return Batch([], (), (), leaves, treedef)


def leaf_name(path: tuple, parameters: list[str]) -> str:
    """The name of a leaf of `(args, kwargs)`."""
    in_kwargs, argument, *rest = path
    name = argument.key if in_kwargs.idx == 1 else parameters[argument.idx]
    return f"`{name}{jtu.keystr(tuple(rest))}`"


def spec_of_rows(shape: tuple[int, ...], batch: Batch) -> PartitionSpec:
    """The sharding of results with examples of the given `shape` along axis 0.

    If the examples of an argument have this shape, its sharding is used. Otherwise the
    results are sharded along their examples only.
    """
    for x, axis in safe_zip(batch.arrays, batch.axes):
        if (*x.shape[:axis], *x.shape[axis + 1 :]) == shape:
            spec = [*spec_of(x)]
            return PartitionSpec(spec.pop(axis), *spec)
    return examples_spec(batch.arrays, batch.axes)


class Blocks(eqx.Module):
    """How `total` examples are cut into contiguous microbatches of `size`.

    Microbatch `i` holds the examples `[i * size, (i + 1) * size)`. If `size` does not
    divide `total`, the last microbatch is shorter and holds the `remainder` examples.

    Examples that are sharded over a mesh lie in `parts` equal parts, one after the
    other. Each microbatch then takes the same share of every part: microbatch `i` holds
    the examples `[i * size / parts, (i + 1) * size / parts)` of each. All devices work
    on every microbatch, and no example leaves its device.

    With `in_order`, microbatch `i` holds the examples `[i * size, (i + 1) * size)` all
    the same, for functions that couple those of a microbatch. The batch is rearranged
    once, so that each device has the same share of every microbatch.

    With `overlaps`, the last microbatch has `size` examples instead, of which the first
    ones are those of the one before. It is the same program then, and no example counts
    twice.

    `num` is the number of all microbatches, and `num_full` of those with `size`
    examples.

    If the batch `continues`, as in [`eqxbatch.over_batches`][], other batches follow,
    which can be cut in another way.
    """

    total: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    parts: int = eqx.field(static=True, default=1)
    overlaps: bool = eqx.field(static=True, default=False)
    continues: bool = eqx.field(static=True, default=False)
    in_order: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        for name in ("size", "parts"):
            check_at_least(f"{name}` of `Blocks", getattr(self, name), 1)

    @property
    def num_full(self) -> int:
        return self.total // self.size

    @property
    def remainder(self) -> int:
        return self.total % self.size

    @property
    def num(self) -> int:
        return self.num_full + (self.remainder > 0)


class Block(eqx.Module):
    """One microbatch, as it is described to an [`eqxbatch.AbstractAccumulator`][].

    - `index`: the index of the microbatch, starting at 0.
    - `start`: the number of examples before it.
    - `size`: the number of examples in it, known at trace time.
    - `is_remainder`: whether it is the shorter microbatch at the end.
    - `parts`: as in [`eqxbatch.Blocks`][].
    - `total`: the number of all examples, or None if it is not known.
    - `repeated`: how many examples of the microbatch before it are in it, too.
    - `in_order`: as in [`eqxbatch.Blocks`][].
    """

    index: int | Int[Array, ""]
    start: int | Int[Array, ""]
    size: int = eqx.field(static=True)
    is_remainder: bool = eqx.field(static=True)
    parts: int = eqx.field(static=True)
    total: int | None = eqx.field(static=True, default=None)
    repeated: int | Int[Array, ""] = 0
    in_order: bool = eqx.field(static=True, default=False)

    @property
    def num_new(self) -> Int[Array, ""]:
        """The number of examples that no microbatch before it has."""
        return jnp.asarray(self.size - self.repeated, jnp.int32)

    @property
    def _numbers(self) -> Int[Array, " size"]:
        """The number of each of its examples, within its part."""
        return jnp.arange(self.size, dtype=jnp.int32) % (self.size // self.parts)

    def is_new(self) -> Bool[Array, " size"]:
        """Whether each of its examples is in no microbatch before it."""
        return self._numbers >= self.repeated // self.parts

    def shares(self) -> Float[Array, " size"]:
        """The weight of each of its examples: a half for those of two microbatches.

        A weight of zero would turn an infinite derivative into NaN.
        """
        assert self.total is not None
        numbers = self._numbers + self.start // self.parts
        last, full = self.total - self.size, self.total // self.size * self.size
        is_first = numbers < last // self.parts
        is_both = ~is_first & (numbers < full // self.parts)
        return jnp.where(is_both, 0.5, 1.0).astype(jnp.result_type(float))

    def new(
        self, values: Shaped[Array, "size ..."], other: Any = 0
    ) -> Shaped[Array, "size ..."]:
        """`values` of its new examples, and `other` in place of the repeated ones."""
        if isinstance(self.repeated, int) and self.repeated == 0:
            return values
        is_new = jnp.expand_dims(self.is_new(), range(1, values.ndim))
        return jnp.where(is_new, values, jnp.asarray(other, values.dtype))

    def take(self, array: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
        """Returns the rows of this microbatch from an array over all examples.

        **Arguments:**

        - `array`: an array with all examples along `axis`.
        - `axis`: the axis of the examples.

        Raises `ValueError` if `axis` is out of range, or if the array does not have
        `total` examples along it.
        """
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"`axis` must be one of the {array.ndim} axes of `array`, of shape "
                f"{array.shape}; got {axis}."
            )
        if self.total is not None and array.shape[axis] != self.total:
            raise ValueError(
                f"`array` must have all {self.total} examples along axis {axis}; got "
                f"shape {array.shape}. Pass the array for the whole batch: `take` "
                "returns the rows of this microbatch."
            )
        if array.shape[axis] == self.size:
            return array
        if array.shape[axis] < self.size:  # There are no examples at all.
            shape = (*array.shape[:axis], self.size, *array.shape[axis + 1 :])
            return jnp.zeros(shape, array.dtype)
        if self.in_order:
            return _rows(whole_rows(array, axis), self.start, self.size, axis)
        if not are_split(array, axis, self.parts):
            return _rows(array, self.start, self.size, axis)
        array = split_parts(array, axis, self.parts)
        start, size = self.start // self.parts, self.size // self.parts
        return merge_parts(_rows(array, start, size, axis + 1), axis)


def _rows(
    array: Shaped[Array, "..."], start: int | Int[Array, ""], size: int, axis: int
) -> Shaped[Array, "..."]:
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, 1, axis)
    return lax.dynamic_slice_in_dim(
        array, start, size, axis, allow_negative_indices=False
    )


def are_split(x: Shaped[Array, "..."], axis: int, parts: int) -> bool:
    """Whether each part of an axis must be sliced separately.

    This holds even for a single part if the type of the array says that the axis is
    sharded, although over one device.
    """
    names = names_of(spec_of(x)[axis])
    sizes = [mesh_axes(jax.typeof(x))[name][0] for name in names]
    return parts > 1 or (bool(sizes) and max(sizes) == 1)


def split_parts(x: Shaped[Array, "..."], axis: int, parts: int) -> Shaped[Array, "..."]:
    """Splits an axis into an axis of parts and an axis of rows within a part."""
    rows = x.shape[axis] // parts
    shape = (*x.shape[:axis], parts, rows, *x.shape[axis + 1 :])
    spec = [*spec_of(x)]
    return _reshape(x, shape, [*spec[: axis + 1], None, *spec[axis + 1 :]])


def merge_parts(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Merges an axis with the next one."""
    rows = x.shape[axis] * x.shape[axis + 1]
    shape = (*x.shape[:axis], rows, *x.shape[axis + 2 :])
    spec = [*spec_of(x)]
    # If all parts are on one device, the type may name the axis of the rows.
    merged = spec.pop(axis + 1) or spec[axis]
    return _reshape(x, shape, [*spec[:axis], merged, *spec[axis + 1 :]])


def _reshape(
    x: Shaped[Array, "..."], shape: tuple[int, ...], spec: list
) -> Shaped[Array, "..."]:
    if not is_explicit(x):
        return x.reshape(shape)
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return jnp.reshape(x, shape, out_sharding=sharding)


def rearranged(
    x: Shaped[Array, "..."], axis: int, blocks: Blocks, *, back: bool = False
) -> Shaped[Array, "..."]:
    """The rows of a batch, such that each part has its share of every microbatch.

    Of 8 rows in microbatches of 4 and two parts, these are 0, 1, 4, 5 and 2, 3, 6, 7.
    With `back`, this is undone. There can be several rows for each example.
    """
    if blocks.num <= 1 or x.size == 0:
        return x
    if blocks.parts == 1:
        return whole_rows(x, axis)
    move = functools.partial(_put_back if back else _dealt, axis=axis, blocks=blocks)
    # Without this, XLA would give each device all rows on the way.
    spread = lambda x: spread_rows(x, axis, blocks.parts)
    run = lambda x: spread(move(spread(x)))
    return with_auto_axes(run, (x,), lambda _: spec_of(x))


def _dealt(x: Array, axis: int, blocks: Blocks) -> Array:
    num, parts = blocks.num_full, blocks.parts
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    full, *rest = _full_and_rest(x, axis, blocks)
    full = full.reshape(*before, num, parts, -1, *after)
    full = jnp.swapaxes(full, axis, axis + 1)
    shares = [x.reshape(*before, parts, -1, *after) for x in (full, *rest)]
    return jnp.concatenate(shares, axis + 1).reshape(x.shape)


def _put_back(x: Array, axis: int, blocks: Blocks) -> Array:
    num, parts = blocks.num_full, blocks.parts
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, parts, -1, *after)
    full, *rest = _full_and_rest(x, axis + 1, blocks)
    full = full.reshape(*before, parts, num, -1, *after)
    full = jnp.swapaxes(full, axis, axis + 1)
    shares = [x.reshape(*before, -1, *after) for x in (full, *rest)]
    return jnp.concatenate(shares, axis)


def _full_and_rest(x: Array, axis: int, blocks: Blocks) -> list[Array]:
    """The rows of full microbatches, and those of the remainder if there are any."""
    if blocks.remainder == 0:
        return [x]
    cut = x.shape[axis] * (blocks.total - blocks.remainder) // blocks.total
    return jnp.split(x, [cut], axis)


def full_block(blocks: Blocks, index: int | Int[Array, ""]) -> Block:
    """The full microbatch number `index`."""
    first, size = index * blocks.size, blocks.size
    start, repeated = first, 0
    if blocks.overlaps and not isinstance(index, int):
        start = jnp.minimum(first, blocks.total - size)
        repeated = first - start
    more = blocks.total, repeated, blocks.in_order
    return Block(index, start, size, False, blocks.parts, *more)


def remainder_block(blocks: Blocks) -> Block:
    """The microbatch that comes after the full ones."""
    repeated = blocks.size - blocks.remainder if blocks.overlaps else 0
    index, size = blocks.num_full, blocks.remainder + repeated
    start = index * blocks.size - repeated
    more = blocks.total, repeated, blocks.in_order
    return Block(index, start, size, True, blocks.parts, *more)


def block_struct(
    x: Array | jax.ShapeDtypeStruct, axis: int, size: int
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `size` rows of `x` along `axis`.

    It also says over which axes of a mesh the rows vary.
    """
    if x.shape[axis] < size:  # There are no examples at all.
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return jax.eval_shape(lambda x: lax.slice_in_dim(x, 0, size, 1, axis), x)


@contextlib.contextmanager
def explained_failure(
    call: Callable[[list], Any],
    batch: Batch,
    kind: Literal["example", "microbatch"],
    remedy: str | None,
    rows: list | None = None,
    if_named: str = "Switch such layers to inference mode.",
) -> Iterator[None]:
    """Adds a note if a function fails here: with what, and if it works otherwise.

    It is called with one example or a microbatch. `call(rows)` calls the function with
    these as the batched arrays. `kind` is what it is called with here, `rows`
    are the arrays of a microbatch, and `remedy` says what to do if the other kind was
    meant; without it, there is no note. `if_named` is the remedy if the function uses a
    named axis. The exception is still the user's.
    """
    try:
        yield
    except Exception as e:
        if remedy is None or not batch.arrays:
            raise
        rows = batch.arrays if rows is None else rows
        example = batch.example()
        calls = ("a microbatch", rows), ("a single example", example)
        if kind == "example":
            calls = ("one example", example), ("a whole batch", batch.arrays)
        (what, rows), (other, other_rows) = calls
        shapes = (
            f"{name} of shape {x.shape}" for name, x in safe_zip(batch.names, rows)
        )
        note = (
            f"`fun` is called with {what}, {', '.join(shapes)}, and raises this error."
        )
        if isinstance(e, NameError) and "unbound axis name" in str(e):
            e.add_note(f"{note} {_NAMED} {if_named}")
        elif _works(call, other_rows):
            e.add_note(f"{note} It works for {other}. {remedy}")
        elif isinstance(e, (TypeError, ValueError)) and not hasattr(e, "__notes__"):
            e.add_note(note)  # JAX raises these for shapes that do not fit.
        raise


_NAMED = "It uses a named axis, as BatchNorm does in training mode."


def _works(call: Callable[[list], Any], rows: list) -> bool:
    try:
        eqx.filter_eval_shape(call, rows)
    except Exception:
        return False
    return True


# The first size to try, if the caller knows no better one.
_FIRST = 16


# The program that runs is one more. Two or three suffice unless memory has a kink, as
# where another method becomes cheaper.
_MAX_COMPILATIONS = 4


# A size is large enough if the largest that should fit is at most this many times as
# large: a few more microbatches cost less than another compilation.
_ENOUGH = 1.3


# A first guess assumes that memory is proportional to the size. It is a little low
# because layouts and padding grow, and a guess that does not fit costs another one.
_CAUTION = 0.94


class MemoryBudget(eqx.Module):
    """A block size chosen from a memory budget: the largest that fits into `max_bytes`.

    Pass it in place of a number as `microbatch_size`, `block_size` or
    `samples_per_batch`; a string such as `"500MB"` there is a budget, too. It bounds
    what the compiled program allocates: its outputs and its temporaries (intermediate
    values). Inputs, which exist already, and memory used outside the call are not
    counted.

    Candidates are compiled, but not run, and XLA's reported memory is read. The first
    candidate is a small size; the second one should need slightly less than the budget.
    Memory is roughly `fixed + slope * size`, so these two predict the largest size that
    fits; if it is more than 1.3 times the second one, a third one is tried, and a
    fourth one where that leaves as much room. This is done once for each function and
    shapes of its arguments. The chosen size is always one that was compiled and found
    to fit. If the whole batch does not fit, it runs in at least two parts: a larger
    size needs two parts as well, and XLA may allocate memory for both at once.

    On CPUs, XLA gives some products, with what follows them, to a library (YNNPACK),
    whose memory it reports as 0. Candidates are compiled without that library, which
    reports what products and attention take at most; the chosen size is compiled with
    it, too. What libraries allocate within a
    convolution or a decomposition (LAPACK) is not reported: leave room for as much as
    the largest inputs of the gradient of a convolution.

    The logger `eqxbatch` reports at `logging.DEBUG` what was compiled, how long it
    took, and which size was chosen.

    **Arguments:**

    - `max_bytes`: an int, or a string such as `"500MB"` or `"2GiB"`. The default is the
        free memory that the device reports or, on a CPU, what the machine has available
        and the limits of containers (control groups) leave. That is read on Linux;
        elsewhere it is the physical memory, and 4 GiB on Windows, which does not tell
        Python. Free memory is looked up on every call, on a CPU at most ten times a
        second, and rounded down, on a device by up to 6% and on a CPU to a power of
        two, so that small changes do not cause recompilation. Inside `jax.jit` or
        another transform, it is looked up at trace time; pass a number there.

    Raises `ValueError` if `max_bytes` is not positive or cannot be parsed and, when
    used, if not even a block of one example fits. Raises `RuntimeError`, when used, if
    the compiler does not report how much memory a program takes.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> outer = lambda x: jnp.tanh(x[:, None] * x).sum()
        >>> f = eqxbatch.filter_micro_vmap(
        ...     outer, microbatch_size=eqxbatch.MemoryBudget("100KB")
        ... )
        >>> f(jnp.ones((1_000, 50))).shape
        (1000,)

        ```
    """

    max_bytes: int | None = eqx.field(static=True)

    def __init__(self, max_bytes: int | str | None = None):
        self.max_bytes = None if max_bytes is None else _parse_bytes(max_bytes)

    def resolve(self) -> int:
        """The budget in bytes."""
        return available_bytes() if self.max_bytes is None else self.max_bytes


# A number of rows that are processed at a time. A budget chooses it; None means all.
Size = int | MemoryBudget | None


def _parse_bytes(value: int | str, name: str = "max_bytes") -> int:
    number: Any = value
    if isinstance(value, str):
        match = re.fullmatch(
            r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", value, re.I
        )
        if match is not None:
            power = " kmgt".index((match[2] or " ").lower())
            number = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    number = None if isinstance(number, jax.Array) else as_int(number)
    if number is None:
        raise ValueError(
            f"`{name}` must be an int or a string such as '500MB' or '2GiB'; got "
            f"{value!r}."
        )
    if number <= 0:
        raise ValueError(f"`{name}` must be positive; got {value!r}.")
    return number


def available_bytes(digits: int = 5) -> int:
    """The free memory, rounded down to this many binary digits.

    It is a static argument of programs, so small changes must not recompile them.
    Other programs use a machine's memory, so only one digit of it is kept.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is None or "bytes_limit" not in stats:
        free, digits = _machine_bytes_at(int(10 * time.monotonic())), 1
    else:
        free = max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0)
    shift = max(free.bit_length() - digits, 0)
    return free >> shift << shift


_Settings = TypeVar("_Settings", bound=eqx.Module)


def resolved(settings: _Settings) -> _Settings:
    """Settings with all budgets resolved to bytes.

    Call this before tracing: the free memory is then part of the key of the compiled
    program.
    """
    # Neither `getattr` nor `isinstance`: both take Equinox ten times as long.
    changes, fields = {}, vars(settings)
    for name in _NAMES:
        value = fields.get(name)
        if type(value) is MemoryBudget and value.max_bytes is None:
            changes[name] = MemoryBudget(value.resolve())
    return dataclasses.replace(settings, **changes) if changes else settings


# The names of settings that are sizes.
_NAMES = ("block_size", "microbatch_size", "per_batch")


def check_size(name: str, size: Size | str) -> Size:
    """The size as a Python int, a budget, or `None`.

    Raises `TypeError` for any other type and `ValueError` for a size below 1.
    """
    # Digits alone are a number of rows by mistake.
    if isinstance(size, str) and not size.strip().isdecimal():
        size = MemoryBudget(_parse_bytes(size, name))
    remedy = "It sets the shapes of the compiled program."
    check_types({name: size}, {name: Size}, {name: remedy}, always=True)
    if size is None or isinstance(size, MemoryBudget):
        return size
    check_at_least(name, size, 1, "Use None for one block.")
    return as_int(size)


def as_microbatch_size(size: Size | str) -> Size:
    return check_size("microbatch_size", size)


def as_block_size(size: Size | str) -> Size:
    return check_size("block_size", size)


def resolve_size(
    size: int | MemoryBudget | None,
    total: int,
    run: Callable[[int], Callable[[PyTree], Any]],
    operands: PyTree,
    first: int = _FIRST,
) -> int:
    """The block size, between 1 and `total` (1 if there are no examples).

    For a [`eqxbatch.MemoryBudget`][], `run(size)(operands)` is the program to fit, and
    `first` the first size to try.
    """
    largest = max(total, 1)
    if size is None:
        return largest
    if isinstance(size, int):
        return min(size, largest)

    budget = size.resolve()

    # So that no program is traced twice.
    lowered = functools.cache(lambda size: lowered_program(run(size), operands))

    def bytes_at(size: int, *, with_library: bool = False) -> CompiledBytes:
        start = time.perf_counter()
        used = compiled_bytes(lowered(size), with_library=with_library)
        seconds = time.perf_counter() - start
        log.debug(
            "MemoryBudget(%d): compiled blocks of %d in %.2f s; %d bytes for "
            "temporaries and %d for outputs.",
            *(budget, size, seconds, used.temporaries, used.outputs),
        )
        return used

    def choose() -> int:
        size = fit_size(budget, largest, bytes_at, first)
        if has_library(jax.default_backend()):
            size = _fitting_too(size, budget, bytes_at)
        log.debug("MemoryBudget(%d): chose blocks of %d of %d.", budget, size, largest)
        return size

    # Only a key. `compiled_bytes` compiles for the default backend, because its structs
    # are on no device.
    key = (budget, jax.default_backend(), platform(), total, *_structure(operands))
    try:
        hash(key)
    except TypeError:  # A static argument has no hash.
        return choose()
    if key not in _SIZES:
        _SIZES[key] = choose()
        if len(_SIZES) > _MAX_SIZES:
            _SIZES.pop(next(iter(_SIZES)))
    return _SIZES[key]


_SIZES: dict[Any, int] = {}


_MAX_SIZES = 1024


def _structure(operands: PyTree) -> tuple:
    dynamic, static = eqx.partition(operands, eqx.is_array)
    leaves, treedef = jtu.tree_flatten(jtu.tree_map(jax.typeof, dynamic))
    static_leaves, static_treedef = jtu.tree_flatten(static)
    numbers = number_types(static_leaves)
    return tuple(leaves), treedef, tuple(static_leaves), static_treedef, numbers


class CompiledBytes(NamedTuple):
    """The bytes that a compiled program allocates."""

    temporaries: int
    outputs: int


def lowered_program(
    fun: Callable[[PyTree], Any], operands: PyTree
) -> jax.stages.Lowered:
    """The program of `fun(operands)`, to be compiled.

    Arrays of `fun` are arguments, too, and there can be structs in place of arrays.
    """
    is_array = lambda x: eqx.is_array(x) or is_struct(x)
    operands = (fun, operands)
    # The constants of a jaxpr are what `fun` closes over. Inside another transformation
    # they can be tracers; only their types matter here.
    leaves = jtu.tree_leaves(eqx.filter(operands, is_array))
    trace = eqx.filter_make_jaxpr(lambda operands: operands[0](operands[1]))
    is_manual = bool(manual_axes())
    if is_manual or explicit_mesh(leaves) is not None:
        closed, *_ = trace(operands)
    else:
        with outside_of_mesh():
            struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            types = jtu.tree_map(lambda x: struct(x) if is_array(x) else x, operands)
            closed, *_ = trace(types)
    num = len(closed.consts)

    def program(*args: Any) -> list:
        inner = with_consts(closed.jaxpr, args[:num])
        return jex.jaxpr_as_fun(inner)(*args[num:])

    args = [*closed.consts, *leaves]
    program = _within_vmaps(program, axis_names(closed.jaxpr) - manual_axes())
    if is_manual:
        program, structs = on_all_devices(program, args)
    else:
        structs = structs_on_devices(args)
    with outside_of_mesh():
        return jax.jit(program).lower(*structs)


def compiled_bytes(
    lowered: jax.stages.Lowered, *, with_library: bool = False
) -> CompiledBytes:
    """The temporaries and outputs of a program that is compiled, but not run.

    `with_library` is as for `memory_options`.
    """
    options = memory_options(jax.default_backend(), with_library=with_library)
    with outside_of_mesh():
        stats = lowered.compile(compiler_options=options).memory_analysis()
    if stats is None:
        # Only for the message: it names the backend that was compiled for.
        raise RuntimeError(
            f"The compiler for {jax.default_backend()!r} does not report how much "
            "memory a program takes. Give a size in place of the `MemoryBudget`."
        )
    return CompiledBytes(stats.temp_size_in_bytes, stats.output_size_in_bytes)


def _within_vmaps(program: Callable[..., list], names: set) -> Callable[..., list]:
    """`program` inside `jax.vmap`s that bind the same axis names as here."""
    if not names:
        return program
    sizes = {name: int(lax.psum(1, name)) for name in names}

    def run(*args: Any) -> list:
        # Mapped as here: only what varies along the axes varies in the program.
        mapped = lambda: program(*args)
        for name, size in sizes.items():
            mapped = jax.vmap(mapped, axis_name=name, axis_size=size)
        return [x[(0,) * len(sizes)] for x in mapped()]

    return run


def fit_size(
    budget: int,
    largest: int,
    bytes_at: Callable[[int], CompiledBytes],
    first: int = _FIRST,
) -> int:
    """A size in `[1, largest]` that fits into `budget`, close to the largest such size.

    Assumes that the sum of `bytes_at(size)` is roughly affine and increasing, or that
    it is so on both sides of a kink, and calls it at most four times: a fourth time
    only if the size is far below what should fit. If it is neither, the returned size
    still fits, but much larger ones may fit, too.

    Raises `ValueError` if not even size 1 fits.
    """
    measured: dict[int, CompiledBytes] = {}

    def fits(size: int) -> bool:
        if size not in measured:
            measured[size] = bytes_at(size)
        return sum(measured[size]) <= budget

    # Blocks of one row can need more memory than larger ones.
    if not any(fits(min(size, largest)) for size in (first, _FIRST, 1)):
        raise _too_small(budget, measured[1])
    half = -(-largest // 2)
    while len(measured) < _MAX_COMPILATIONS:
        predicted = _predict(budget, largest, measured)
        exact, lower = (
            _useful(size, largest) for size in (predicted, int(_CAUTION * predicted))
        )
        best = max((size for size in measured if fits(size)), default=0)
        # Nothing between a half and all has fewer blocks than a half.
        most = half if predicted < largest else largest
        if len(measured) > 1 and (best >= most or _ENOUGH * best > predicted):
            break
        # Guesses are low, so that one fits even if memory is not affine. But a half is
        # tried if it should fit, and all rows at once, at first.
        is_first = len(measured) == 1
        is_exact = exact == half < largest or (exact == largest and is_first)
        cautious = exact if is_exact else lower
        if is_first and exact < largest:
            # Far enough from the first one to estimate the slope.
            cautious = max(cautious, min(best + best // 2, largest))
        guesses = [guess for guess in (cautious, exact) if guess not in measured]
        if not guesses or guesses[0] < 1:
            break
        fits(guesses[0])
    return max(filter(fits, measured))


def _fitting_too(size: int, budget: int, bytes_at: Callable[..., CompiledBytes]) -> int:
    """A size that fits with the library of a CPU, too, or a smaller one that does.

    What XLA allocates around the library can be more than what it needs without.
    """
    while sum(used := bytes_at(size, with_library=True)) > budget:
        if size == 1:
            raise _too_small(budget, used)
        size = max(1, min(size - 1, int(_CAUTION * size * budget / sum(used))))
    return size


def _too_small(budget: int, used: CompiledBytes) -> ValueError:
    return ValueError(
        f"A memory budget of {budget:,} bytes is too small: with blocks of one "
        f"example, the program needs {sum(used):,} bytes for temporaries and outputs. "
        "Raise the budget, or reduce the memory of the function: `jax.checkpoint` "
        "keeps fewer intermediate values, and where there is a result for each "
        "example, an accumulator such as `Sum` keeps only one."
    )


def _predict(budget: int, largest: int, measured: dict[int, CompiledBytes]) -> int:
    """Predicts the largest size by a line through the two sizes nearest to the budget.

    With one size only, temporaries are assumed to be proportional to it.
    """
    totals = {size: sum(bytes) for size, bytes in measured.items()}
    below = sorted(size for size in totals if totals[size] <= budget)
    above = [size for size in totals if totals[size] > budget]
    most = min(above) - 1 if above else largest
    if len(measured) == 1:
        ((size, (temporaries, outputs)),) = measured.items()
        guess = size * (budget - outputs) // max(temporaries, 1)
    elif above or totals[below[-1]] > totals[below[-2]]:
        low, high = (below[-1], min(above)) if above else below[-2:]
        slope = (totals[high] - totals[low]) / (high - low)
        guess = int(low + (budget - totals[low]) / slope)
    else:
        guess = largest
    return min(guess, most)


def _useful(size: int, largest: int) -> int:
    """`size`, or half of `largest` for sizes between the two.

    Sizes in between also need two blocks. These are not in a loop, so XLA may allocate
    memory for both at once.
    """
    half = -(-largest // 2)
    return half if half < size < largest else size


# Assumed of a machine that does not say how much memory it has.
_UNKNOWN = 2**32


def machine_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """The memory that this process can allocate, as far as the system says.

    Linux says what is available, and containers (control groups) limit it. Elsewhere,
    or if that cannot be read, it is the physical memory of the machine. `root` is where
    `proc` and `sys` are.
    """
    limits = [*_of_machine(root), *_of_groups(root)]
    return max(min(limits), 0) if limits else _physical_bytes()


# To read so many files takes longer than a small kernel.
@functools.lru_cache(1)
def _machine_bytes_at(tenth: int) -> int:
    """The memory in a tenth of a second."""
    del tenth
    return machine_bytes()


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no `sysconf`.
        return _UNKNOWN


def _of_machine(root: pathlib.Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _of_groups(root: pathlib.Path) -> Iterator[int]:
    """What each control group of this process leaves: limits minus use.

    A group is limited by those above it, too. Inside a container, the path of its group
    is often that on the host, and only the root is mounted.
    """
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, use = "sys/fs/cgroup", "memory.max", "memory.current"
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            use, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        path_of_group = pathlib.PurePosixPath(path.lstrip("/"))
        for group in (path_of_group, *path_of_group.parents):
            folder = root / top / group
            numbers = [*_lines(folder / limit), *_lines(folder / use)]
            if len(numbers) == 2 and all(map(str.isdecimal, numbers)):
                stats = dict(map(str.split, _lines(folder / "memory.stat")))
                # The kernel gives up cached files where memory is needed.
                yield int(numbers[0]) - int(numbers[1]) + int(stats.get(cache, 0))


def _lines(file: pathlib.Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
