"""The two sides of a kernel: examples, where they are stored, and keys."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Key, PyTree, UInt32

from .._base.checks import called, check_equal
from .._base.compile import compiled
from .._base.trees import safe_zip, shown
from .._base.types import AnyArray, check_types
from .._batch.batch import Batch, split_batch
from .._batch.memory import explained_failure
from .._batch.reading import is_stored, read_rows
from .._batch.rows import Rows


# One key, or one for each example.
OneKey = Key[Array, "..."] | UInt32[AnyArray, "... 2"] | None


# Keys for both sides, or a pair with those for each side.
Keys = OneKey | tuple[OneKey, ...] | list[OneKey]


KEY_REMEDY = {"key": "`jax.random.key(seed)` makes one."}


class Examples(NamedTuple):
    """The arguments of a call of a kernel: `x1`, `x2`, `key`, and by keyword."""

    x1: PyTree
    x2: PyTree
    key: Any
    kwargs: dict[str, Any]

    def in_sides(self, in_axes: PyTree, kwargs_axes: dict[str, PyTree]) -> "InSides":
        """The sides, without rows of arrays that are not in memory."""
        sides, shared = self.split(in_axes, kwargs_axes)
        return InSides([*map(_with_stored, sides)], shared)

    def split(self, in_axes: PyTree, kwargs_axes: dict[str, PyTree]) -> "InSides":
        """The examples of the two sides, or of one if both are the same.

        It must see the objects of the call: within a program, they are not the same
        any more.
        """
        x1, x2, key, kwargs = self
        # Pairs of arrays belong to the examples, and all else to the function.
        pairs = {name: x for name, x in kwargs.items() if is_pair(x)}
        shared = {name: x for name, x in kwargs.items() if name not in pairs}
        has_one_x = x2 is None or x2 is x1
        for name, (_, second) in pairs.items():
            if second is None and not has_one_x:
                raise ValueError(
                    f"`{name}` must be a pair of arrays for the examples of `x1` and "
                    "of `x2`; got None for those of `x2`, which is for calls without "
                    "`x2`."
                )
        # Both sides are the same only if nothing at all differs, keys included.
        keys = _key_pair(key, has_one_x)
        are_one = (x is None or x is first for first, x in pairs.values())
        is_same = has_one_x and keys.first is keys.second and all(are_one)
        axes = in_axes, kwargs_axes
        first = {name: pair[0] for name, pair in pairs.items()}
        sides = [Side(x1, keys.first, first, *axes, is_second=False)]
        if not is_same:
            # Sides that differ by keys or in one pair share all other arguments.
            second = {name: x if y is None else y for name, (x, y) in pairs.items()}
            x2 = x1 if x2 is None else x2
            sides.append(Side(x2, keys.second, second, *axes, is_second=True))
        return InSides(sides, shared)


class InSides(NamedTuple):
    """The sides of a call, one if both are the same, and the arguments they share."""

    sides: list["Side"]
    shared: dict[str, Any]


def is_pair(x: object) -> bool:
    """Whether a keyword argument has arrays for each of the two sides."""
    is_two = type(x) is tuple and len(x) == 2
    is_array = lambda leaf: isinstance(leaf, (jax.Array, np.ndarray)) or is_stored(leaf)
    return is_two and any(map(is_array, jtu.tree_leaves(x)))


class _KeyPair(NamedTuple):
    """The keys of the two sides."""

    first: Any
    second: Any


def _key_pair(key: Any, has_one_x: bool) -> _KeyPair:
    if key is None:
        return _KeyPair(None, None)
    check_types({"key": key}, {"key": Keys}, KEY_REMEDY)
    if isinstance(key, (tuple, list)):
        if len(key) != 2:
            raise ValueError(
                "`key` must be one key, or a pair of them for the two sides; got "
                f"{len(key)} keys."
            )
        return _KeyPair(*key)
    is_single = isinstance(key, (jax.Array, np.ndarray)) and _is_single(key)
    if has_one_x and not is_single:
        return _KeyPair(key, key)
    if not is_single:
        raise ValueError(
            f"`key` must be one key, or a pair of them for the two sides; got "
            f"{shown(key)}."
        )
    # Without `x2`, `x1` has the keys that it has with one.
    first, second = jr.split(key)
    return _KeyPair(first, first if has_one_x else second)


def _is_single(key: AnyArray) -> bool:
    return key.ndim == (0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1)


class SideArguments(NamedTuple):
    """What a function is called with for the examples of one side."""

    x: PyTree
    kwargs: dict[str, Any]


class Stored:
    """The arrays of a side, of which some are not in memory.

    Two of them are equal only if they are the same object, which is a leaf of a PyTree.
    """

    def __init__(self, arrays: list):
        self.arrays = arrays

    def read(self, start: int, like: Rows) -> list:
        """As many rows as in `like`, in memory."""
        read, stop = [], start + like.total
        for x, struct, axis in safe_zip(self.arrays, like.arrays, like.axes):
            # An array in memory, beside others that are not.
            if isinstance(x, jax.Array):
                rows = lax.dynamic_slice_in_dim(x, start, like.total, axis)
            else:
                rows = read_rows(x, start, stop)
                of = rows.shape, jax.dtypes.canonicalize_dtype(rows.dtype)
                expected = struct.shape, struct.dtype
                check_equal(f"Rows {start} to {stop} of {shown(x)}", of, expected)
            read.append(rows)
        return read


def each_key(key: Any, total: int) -> Any:
    """The keys of all examples."""
    return jr.split(key, total) if key is not None and _is_single(key) else key


# Not a Module, which takes many times as long to make, in each call of a kernel.
@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """The examples of one side, and how to call a model with one of them.

    - `x`, `key`, `kwargs`: the arguments that have the examples.
    - `in_axes`, `kwargs_axes`: their batch axes. If `in_axes` is None, the model takes
        a whole batch at once.
    - `stored`, `total`: if some of the arguments are not in memory, what is read for
        each block, and the number of examples. All arguments have no rows then.
    """

    x: PyTree
    key: Any
    kwargs: dict[str, Any]
    in_axes: PyTree
    kwargs_axes: dict[str, PyTree]
    is_second: bool = eqx.field(static=True)
    stored: Any = None
    total: int | None = eqx.field(static=True, default=None)

    @functools.cached_property
    def batch(self) -> Batch:
        """The examples as a batch, each of which has a key of its own."""
        x, key, kwargs = self.x, self.key, self.kwargs
        default = eqx.if_array(0)
        axes = default if self.in_axes is None else self.in_axes
        if self.in_axes is None:
            # The whole batch is treated as one example; its output has a batch axis.
            x, key, kwargs = jtu.tree_map(_with_axis, (x, key, kwargs))
        kwargs_axes = {name: self.kwargs_axes.get(name, default) for name in kwargs}
        name = _CALLS[self.is_second]
        try:
            # All keys are split at once, so that they do not depend on the blocks.
            if key is not None:
                if self.in_axes is not None:
                    of_x = split_batch(name, (axes,), (x,), {}, num_leading=None)
                    key = each_key(key, of_x.total())
                kwargs, kwargs_axes = {**kwargs, "key": key}, {**kwargs_axes, "key": 0}
            both = (axes, kwargs_axes), (x, kwargs), {}
            # Lengths are compared here, where the argument of the user still has its
            # name.
            batch = split_batch(name, *both, num_leading=None)
            batch.total()
        except ValueError as e:
            e.add_note(
                "Keyword arguments for the examples come in pairs, batched along axis "
                "0 unless `kwargs_axes` names another one."
            )
            raise
        return batch

    @functools.cached_property
    def rows(self) -> Rows:
        total = self.batch.total() if self.total is None else self.total
        return Rows(self.batch.arrays, self.batch.axes, total)

    @property
    def type(self) -> tuple:
        """What a program depends on: two sides with equal types are traced once."""
        batch = self.batch
        shared = [id(x) if eqx.is_array(x) else x for x in batch.shared]
        rows = safe_zip(batch.arrays, batch.axes)
        shapes = [(x.shape[:axis] + x.shape[axis + 1 :], x.dtype) for x, axis in rows]
        return batch.treedef, shared, batch.axes, shapes

    def arguments(self, rows: list[Any]) -> SideArguments:
        """The input and the keyword arguments, with these arrays for the examples."""
        (x, kwargs), _ = self.batch.arguments(rows)
        return SideArguments(x, kwargs)

    def call(self, model: Callable, shared: dict[str, Any], rows: list) -> PyTree:
        """The output of the model for one example."""
        return _of_model(model, *self.arguments(rows), shared)

    def explained_failure(
        self, model: Callable, shared: dict[str, Any]
    ) -> AbstractContextManager:
        """A context that tells models of a batch from models of one example."""
        call, batch = functools.partial(self.call, model, shared), self.batch
        if self.in_axes is not None:
            return explained_failure(call, batch, "example", _IF_WHOLE)
        # The whole batch is the single row of a batch.
        whole = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in batch.arrays]
        has_examples = all(x.shape for x in whole)
        batch = dataclasses.replace(batch, arrays=whole if has_examples else [])
        return explained_failure(call, batch, "microbatch", _IF_ONE)


_IF_WHOLE = "Pass `in_axes=None`, or a model of one example."


_IF_ONE = "If it is a model of one example, leave out `in_axes=None`."


def _with_stored(side: Side) -> Side:
    """A side without rows, if some of its arrays are not in memory."""
    leaves = [x for x in jtu.tree_leaves((side.x, side.kwargs)) if is_stored(x)]
    if not leaves:
        return side
    # Arrays without memory stand for those that are read, to find their axes.
    stored = {id(x): (x, _stand_in(x)) for x in leaves}
    whole = jtu.tree_map(lambda x: stored.get(id(x), (x, x))[1], side)
    batch, arrays = whole.batch, {id(y): x for x, y in stored.values()}
    axes = {id(x): axis for x, axis in safe_zip(batch.arrays, batch.axes)}
    # Rows must be next to each other where they are stored, to be read alone.
    for key, x in arrays.items():
        if axes.get(key) != 0:
            raise ValueError(
                "The batch axis of arrays that are not in memory must be 0, because "
                f"rows of them are read; got {axes.get(key)} for {shown(x)}. Read it "
                "by `numpy.asarray`."
            )
    # The side has no rows; what has them is read for each block.
    source = lambda x: arrays[id(x)] if id(x) in arrays else jnp.asarray(x)
    none = [
        jnp.asarray(x[(*[slice(None)] * axis, slice(0))])
        for x, axis in safe_zip(batch.arrays, batch.axes)
    ]
    x, kwargs = whole.arguments(none)
    parts = {"x": x, "key": kwargs.pop("key", None), "kwargs": kwargs}
    read = Stored([*map(source, batch.arrays)])
    return dataclasses.replace(side, **parts, stored=read, total=batch.total())


def _stand_in(x: Any) -> np.ndarray:
    """An array without memory, with the shape and dtype of one that is not there."""
    none = read_rows(x, 0, 0)
    is_number = any(jnp.issubdtype(none.dtype, kind) for kind in (np.number, np.bool_))
    if none.shape != (0, *x.shape[1:]) or not is_number:
        raise TypeError(
            "Slices of arrays that are not in memory must be rows of numbers or bools; "
            f"got {shown(none)} for no rows of {shown(x)}."
        )
    return np.broadcast_to(np.zeros((), none.dtype), tuple(x.shape))


# The names of the arguments of a side, for error messages.
_CALLS: tuple[Callable, Callable] = (lambda x1, kwargs: None, lambda x2, kwargs: None)


def _with_axis(x: Any) -> Any:
    return x[None] if eqx.is_array(x) else x


# Compiled, so that a model is traced once for all programs of its kernel.
@functools.partial(compiled, inline=True)
def _of_model(
    model: Callable, x: PyTree, kwargs: dict[str, Any], shared: dict[str, Any]
) -> PyTree:
    """The output of a model for one example."""
    out = called(model, (x,), {**kwargs, **shared}, "The model")
    return jtu.tree_map(as_jax_array, out)


def as_jax_array(x: object) -> Any:
    """An array of JAX for one of NumPy."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x
