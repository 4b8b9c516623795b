"""A model traced on the two sides of a kernel, and the settings of kernels."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.jaxprs import PerExample
from .._base.mesh import vary_as
from .._base.trees import type_of
from .._batch.memory import MemoryBudget, resolved
from .._batch.objective import Selection
from .._batch.rows import Rows
from .._pairs.calls import (
    BlockSize,
    Call,
    check_block_size,
    check_vmap_axes,
    output_axis,
    Side,
    VmapAxes,
)
from .._pairs.kernel import room_to_keep
from .output_axes import axis_roles, check_axes, Mirror, OutputAxes


# The requested kernels.
Get = str | Sequence[str] | None


_KINDS = ("nngp", "ntk")


def names_of(get: Any) -> tuple[str, ...]:
    """The kinds of kernels to compute."""
    names = _KINDS if get is None else (get,) if isinstance(get, str) else get
    if isinstance(names, (tuple, list)) and all(isinstance(n, str) for n in names):
        names = tuple(name.lower() for name in names)
        if names and len({*names}) == len(names) and {*names} <= {*_KINDS}:
            return names
    raise ValueError(
        "`get` must be 'nngp', 'ntk', a tuple with one or both of them, each once, or "
        f"None for both; got {get!r}."
    )


def named(get: Any, names: tuple[str, ...], results: list) -> Any:
    """The kernel itself if it was requested by name, and otherwise a named tuple.

    `get` can also be a function of the kernels.
    """
    if isinstance(get, str):
        return results[0]
    return (get if callable(get) else _kernel_type(names))(*results)


@functools.cache
def _kernel_type(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Kernel", names)


Implementation = Literal["auto", "jacobian_contraction", "ntk_vector_products", "sites"]


def check_implementation(implementation: Any) -> Implementation:
    """The name of an implementation; numbers are those of `neural_tangents`."""
    names: tuple[Implementation, ...] = get_args(Implementation)
    for number, name in enumerate(names):
        is_number = implementation == number and not isinstance(implementation, bool)
        if is_number or str(implementation).lower() == name:
            return name
    raise ValueError(
        f"`implementation` must be one of {names}, or 0, 1, 2 or 3 for them; got "
        f"{implementation!r}."
    )


class Settings(eqx.Module):
    """How a kernel is computed.

    `room` is the number of bytes for factors of examples; None for no limit.
    `traces_last` says whether `trace_axes` is the default: the last axis, if an output
    has one besides the batch axis.
    """

    trace_axes: tuple[int, ...] = eqx.field(static=True)
    diagonal_axes: tuple[int, ...] = eqx.field(static=True)
    vmap_axes: VmapAxes
    block_size: BlockSize = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True, default="auto")
    room: int | None = eqx.field(static=True, default=None)
    traces_last: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        if self.block_size is not None and not self.vmap_axes.is_batched:
            raise ValueError(
                "`block_size` must be None with `vmap_axes=None`: a model of a whole "
                "batch cannot be evaluated for blocks of it. Use `vmap_axes=0` if "
                "examples do not interact."
            )

    def in_bytes(self) -> "Settings":
        """The settings with memory budgets resolved to bytes."""
        if self.block_size is None or self.room is not None:
            return self
        if isinstance(self.block_size, MemoryBudget):
            return resolved(self)
        return dataclasses.replace(self, room=room_to_keep())

    @property
    def mirror(self) -> Mirror:
        """A function that exchanges the two sides of a kernel."""
        return Mirror(self.trace_axes, self.diagonal_axes)


def make_settings(
    trace_axes: Any,
    diagonal_axes: Any,
    vmap_axes: Any,
    implementation: Any,
    block_size: Any,
) -> Settings:
    """Makes the settings, which are checked."""
    is_last = trace_axes is None
    return Settings(
        trace_axes=(-1,) if is_last else check_axes("trace_axes", trace_axes),
        diagonal_axes=check_axes("diagonal_axes", diagonal_axes),
        vmap_axes=check_vmap_axes(vmap_axes),
        block_size=check_block_size(block_size),
        implementation=check_implementation(implementation),
        traces_last=is_last,
    )


class TracedModel:
    """A model and its calls on the two sides, or on one if they are the same.

    - `sides`, `programs`: for each side, its examples and the program of one.
    - `leaves`: the parameters, which are the first inputs of the jaxprs.
    - `axes`: the axes of each output and their roles in the kernel.
    """

    def __init__(
        self,
        model: Callable,
        selection: Selection | None,
        settings: Settings,
        calls: list[Call],
        shared: dict[str, Any],
        *,
        is_diagonal: bool = False,
    ):
        self.settings = settings
        axes = settings.vmap_axes
        if is_diagonal and not axes.is_batched:
            raise ValueError(
                "With `vmap_axes=None`, the axis of the examples is not known. Name it "
                "in `diagonal_axes`."
            )
        # Inside `jax.shard_map`, JAX sums a derivative over devices if its input is the
        # same on all of them. A kernel is that of the examples on its device, and both
        # sides have the same program.
        arrays, static = eqx.partition(calls, eqx.is_array)
        arrays = vary_as(jtu.tree_leaves(arrays), arrays)
        calls = eqx.combine(arrays, static)
        arrays = jtu.tree_leaves(arrays)
        self.sides = [
            Side(position, call, shared, axes) for position, call in enumerate(calls)
        ]
        self.leaves: list[Array] = []
        combine: Callable[[list], PyTree] = lambda _: model
        if selection is not None:
            self.leaves, combine = selection.split(model)
        self.leaves = vary_as(arrays, self.leaves)
        self.programs: list[PerExample] = []
        for side in self.sides:
            if self.programs and side.type == self.sides[0].type:
                self.programs.append(self.programs[0])
                continue
            run = lambda leaves, rows, side=side: side.call(combine(leaves), rows)
            rows = side.rows
            with side.told_apart(model):
                program = PerExample(run, self.leaves, rows.arrays, rows.axes)
            self.programs.append(program)
        self.out = self.programs[0].out
        self.axes = self._output_axes(is_diagonal)
        if not all(axes.pairs_examples for axes in self.axes):
            totals = [side.rows.total for side in self.sides]
            if totals[0] != totals[-1]:
                raise ValueError(
                    "Examples are compared one by one, so that `x1` and `x2` must have "
                    f"the same number of them; got {totals[0]} and {totals[-1]}."
                )

    def _output_axes(self, is_diagonal: bool) -> list[OutputAxes]:
        trace, diagonal = self.settings.trace_axes, self.settings.diagonal_axes
        leaves = jtu.tree_leaves_with_path(self.out)
        for path, leaf in leaves:
            is_array = isinstance(leaf, jax.ShapeDtypeStruct)
            if not is_array or not jnp.issubdtype(leaf.dtype, jnp.inexact):
                got = f"dtype {leaf.dtype}" if is_array else f"{leaf!r}"
                raise ValueError(
                    f"The model must return arrays of an inexact dtype; got {got} for "
                    f"output{jtu.keystr(path)}. Return only what the kernel is of."
                )
        result = []
        others = self._others()
        batch_axes = output_axis(self.settings.vmap_axes, self.out)
        for index, ((path, leaf), other, batch) in enumerate(
            zip(leaves, others, batch_axes, strict=True)
        ):
            ndim = len(leaf.shape) + (batch is not None)
            is_scalar = self.settings.traces_last and len(leaf.shape) == 0
            traced = () if is_scalar else trace
            roles = list(axis_roles(jtu.keystr(path), ndim, batch, traced, diagonal))
            if is_diagonal and batch is not None:
                if roles[batch] == "trace":
                    raise ValueError(
                        f"`trace_axes` has the axis {batch} of the examples, over "
                        "which the diagonal has its mean. Call the kernel instead of "
                        "`diagonal`."
                    )
                roles[batch] = "diagonal"
            shapes = tuple(leaf.shape), tuple(other.shape)
            axes = OutputAxes(index, shapes, leaf.dtype, batch, tuple(roles))
            full = axes.axes_with("full")
            for axis, sizes in enumerate(zip(*shapes, strict=True)):
                if axis not in full and sizes[0] != sizes[1]:
                    raise ValueError(
                        "`trace_axes` and `diagonal_axes` must be as long for `x1` as "
                        f"for `x2`; got outputs of shapes {shapes[0]} and {shapes[1]}."
                    )
            result.append(axes)
        if not result:
            raise ValueError("The model must return at least one array; got none.")
        return result

    def _others(self) -> list:
        """The model's outputs on the second side, which must match the first."""
        found = [self.out, self.programs[-1].out]
        types = [
            jtu.tree_map(lambda x: (len(x.shape), str(x.dtype)), out) for out in found
        ]
        if types[0] != types[1]:
            types = [jtu.tree_map(type_of, out) for out in found]
            raise ValueError(
                "The model must return arrays of the same structure, rank and dtype "
                f"for an example of `x1` and for one of `x2`; got {types[0]} and "
                f"{types[1]}."
            )
        return jtu.tree_leaves(found[1])

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """The examples of both sides; a single object if they are the same."""
        return self.sides[0].rows, self.sides[-1].rows

    def block_sizes(self) -> tuple[int | None, int | None]:
        """The sizes of blocks of rows and of columns; None for a single block."""
        size = self.settings.block_size
        if not isinstance(size, tuple):
            assert size is None or isinstance(size, int)
            size = (size, size)
        rows, columns = size
        if len(self.sides) == 1 and rows is not None and columns is not None:
            # The mirror image of a square tile is a tile, too.
            rows = columns = min(rows, columns)
        return rows, columns
