"""The two sides of a kernel: the arguments of a model on each side."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree, UInt32

from .._base.checks import AnyArray, check_types
from .._base.mistakes import called
from .._base.trees import safe_zip, shown
from .._batch.batch import broadcast_axes, explained_failure, split_batch
from .._batch.loop import Rows
from .._batch.memory import check_size, MemoryBudget


# One key, or one for each example.
OneKey = Key[Array, "..."] | UInt32[AnyArray, "... 2"] | None


# Keys for both sides, or a pair with those for each side.
Keys = OneKey | tuple[OneKey, ...] | list[OneKey]


KEY_REMEDY = {"key": "`jax.random.key(seed)` makes one."}


class BatchAxes(eqx.Module):
    """The batch axes of the inputs, the outputs, and keyword arguments.

    `inputs` is None if the model takes a whole batch at once.
    """

    inputs: PyTree
    outputs: PyTree
    kwargs: dict[str, PyTree]

    @property
    def is_batched(self) -> bool:
        return self.inputs is not None


class Call(eqx.Module):
    """The arguments of the model on one side."""

    x: PyTree
    key: Array | None
    kwargs: dict[str, Any]


def make_calls(
    x1: PyTree, x2: PyTree, key: Any, kwargs: dict[str, Any]
) -> tuple[list[Call], dict[str, Any]]:
    """The calls for the two sides, or one if they are equal, and shared arguments."""
    pairs = {name: x for name, x in kwargs.items() if is_pair(x)}
    shared = {name: x for name, x in kwargs.items() if name not in pairs}
    is_one = x2 is None or x2 is x1
    for name, (_, second) in pairs.items():
        if second is None and not is_one:
            raise ValueError(
                f"`{name}` must be a pair of arrays for the examples of `x1` and of "
                "`x2`; got None for those of `x2`, which is for calls without `x2`."
            )
    keys = _key_pair(key, is_one)
    is_same = (
        is_one
        and keys[0] is keys[1]
        and all(second is None or second is first for first, second in pairs.values())
    )
    calls = [Call(x1, keys[0], {name: pair[0] for name, pair in pairs.items()})]
    if not is_same:
        second = {name: x if y is None else y for name, (x, y) in pairs.items()}
        calls.append(Call(x1 if x2 is None else x2, keys[1], second))
    return calls, shared


def is_pair(x: Any) -> bool:
    """Whether a keyword argument has arrays for each of the two sides."""
    is_two = type(x) is tuple and len(x) == 2
    is_array = lambda leaf: isinstance(leaf, (jax.Array, np.ndarray))
    return is_two and any(map(is_array, jtu.tree_leaves(x)))


def _key_pair(key: Any, is_one: bool) -> tuple:
    check_types({"key": key}, {"key": Keys}, KEY_REMEDY)
    if isinstance(key, (tuple, list)):
        if len(key) != 2:
            raise ValueError(
                "`key` must be one key, or a pair of them for the two sides; got "
                f"{len(key)} keys."
            )
        if not is_one or key[0] is not key[1]:
            return tuple(key)
        key = key[0]
    if key is None:
        return None, None
    is_single = isinstance(key, (jax.Array, np.ndarray)) and _is_single(key)
    if is_one and not is_single:
        return key, key
    if not is_single:
        raise ValueError(
            f"`key` must be one key, or a pair of them for the two sides; got "
            f"{shown(key)}."
        )
    # Without `x2`, `x1` has the keys that it has with one.
    first, second = jr.split(key)
    return first, first if is_one else second


def _is_single(key: AnyArray) -> bool:
    return key.ndim == (0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1)


class Side:
    """The examples of one side, and how to call the model with one of them."""

    def __init__(
        self,
        position: int,
        call: Call,
        shared: dict[str, Any],
        axes: BatchAxes,
    ):
        x, key, mapped = call.x, call.key, call.kwargs
        name, default = _CALLS[position], eqx.if_array(0)
        if not axes.is_batched:
            # The whole batch is treated as one example; its output has a batch axis.
            x, mapped = jtu.tree_map(_with_axis, (x, mapped))
            key = None if key is None else key[None]
        kwargs = {**mapped, **shared}
        kwargs_axes = {n: axes.kwargs.get(n, default) for n in mapped}
        kwargs_axes |= dict.fromkeys(shared)
        x_axes = axes.inputs if axes.is_batched else default
        try:
            if key is not None:
                if axes.is_batched and _is_single(key):
                    num = split_batch(name, (x_axes,), (x,), {}).total()
                    key = jr.split(key, num)
                kwargs["key"], kwargs_axes["key"] = key, 0
            batch = split_batch(name, (x_axes, kwargs_axes), (x, kwargs), {})
            self.rows = Rows(batch.arrays, batch.axes, batch.total())
        except ValueError as e:
            e.add_note(
                "Keyword arguments for the examples come in pairs, batched along axis "
                "0 unless `kwargs_axes` names another one."
            )
            raise
        self._batch, self._is_batched = batch, axes.is_batched
        # What is batched, along which axes.
        self.places = batch.names, batch.axes
        # Two sides with equal static parts are traced once.
        static = eqx.filter((x, mapped), eqx.is_array, inverse=True)
        arrays = safe_zip(batch.arrays, batch.axes)
        self.type = (
            jtu.tree_structure((x, mapped)),
            jtu.tree_leaves(static),
            batch.axes,
            [(x.shape[:axis] + x.shape[axis + 1 :], x.dtype) for x, axis in arrays],
        )

    def arguments(self, rows: list) -> tuple[PyTree, dict[str, Any]]:
        """The input and the keyword arguments, with these arrays for the examples."""
        (x, kwargs), _ = self._batch.arguments(rows)
        return x, kwargs

    def call(self, model: Callable, rows: list) -> PyTree:
        """The output of the model for one example."""
        x, kwargs = self.arguments(rows)
        return called(model, (x,), kwargs, "The model")

    def explained_failure(self, model: Callable) -> AbstractContextManager:
        """A context that tells models of a batch from models of one example."""
        call, batch = functools.partial(self.call, model), self._batch
        if self._is_batched:
            return explained_failure(call, batch, "example", _IF_WHOLE)
        # The whole batch is the single row of a batch.
        whole = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in batch.arrays]
        has_examples = all(x.shape for x in whole)
        batch = dataclasses.replace(batch, arrays=whole if has_examples else [])
        return explained_failure(call, batch, "microbatch", _IF_ONE)


_IF_WHOLE = "Pass `in_axes=None`, or a model of one example."


_IF_ONE = "If it is a model of one example, leave out `in_axes=None`."


# The names of the arguments of a side, for error messages.
_CALLS: tuple[Callable, Callable] = (lambda x1, kwargs: None, lambda x2, kwargs: None)


def _with_axis(x: Any) -> Any:
    return x[None] if eqx.is_array(x) else x


def output_axis(axes: BatchAxes, out: PyTree) -> list[int | None]:
    """The batch axis of each output array, for the whole batch."""
    leaves = jtu.tree_leaves(out)
    if not axes.is_batched:
        return [None] * len(leaves)
    resolved = []
    specs = broadcast_axes("out_axes", axes.outputs, out)
    for leaf, axis in safe_zip(leaves, specs):
        ndim = len(leaf.shape) + 1
        if axis is None or not -ndim <= axis < ndim:
            raise ValueError(
                f"`out_axes` gives an output of shape {leaf.shape} for one example "
                f"the batch axis {axis}, which is none of the {ndim} that it has then."
            )
        resolved.append(axis % ndim)
    return resolved


BlockSize = int | tuple[int, int] | MemoryBudget | None


def check_block_size(size: BlockSize | str) -> BlockSize:
    if isinstance(size, tuple):
        if len(size) != 2:
            raise ValueError(
                "`block_size` must be one size, or a pair of them for rows and "
                f"columns; got {len(size)}."
            )
        rows, columns = (check_size("block_size", one) for one in size)
        if not isinstance(rows, int) or not isinstance(columns, int):
            raise TypeError(
                f"A pair of sizes must consist of ints; got {shown(size)}. A "
                "`MemoryBudget` is for both: pass it alone."
            )
        return rows, columns
    return check_size("block_size", size)


class MeshAxis(eqx.Module):
    """A mesh axis, over which the rows of a kernel are distributed."""

    mesh: Mesh = eqx.field(static=True)
    name: str = eqx.field(static=True)

    @property
    def num(self) -> int:
        return self.mesh.shape[self.name]

    def __repr__(self) -> str:
        return repr(self.name)


def check_mesh(mesh: Any, axis: str | None) -> MeshAxis | None:
    """The selected mesh axis, or None without a mesh."""
    hints = {"mesh": Mesh | None, "mesh_axis": str | None}
    check_types({"mesh": mesh, "mesh_axis": axis}, hints)
    if mesh is None:
        if axis is not None:
            raise ValueError(
                f"`mesh_axis` is {axis!r}, but there is no `mesh`. Pass a mesh, or "
                "leave the axis out."
            )
        return None
    if axis is None and len(mesh.axis_names) == 1:
        (axis,) = mesh.axis_names
    if axis not in mesh.axis_names:
        raise ValueError(
            f"`mesh_axis` must name one of the axes of the mesh, {mesh.axis_names}; "
            f"got {axis!r}."
        )
    assert axis is not None
    return MeshAxis(mesh, axis)
