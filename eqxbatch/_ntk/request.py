"""What is requested: a model, its parameters, and how its kernel is computed.

For a call, the model is traced on the two sides of the kernel.
"""

import abc
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

from .._base.jaxprs import compiled, TracedFunction
from .._base.mesh import gathered, vary_as, within_mesh
from .._base.trees import type_of
from .._batch.derivative import Selection
from .._batch.loop import Rows
from .._batch.memory import MemoryBudget, resolve_size, resolved
from .._kernels.calls import (
    BlockSize,
    Call,
    check_block_size,
    check_vmap_axes,
    make_calls,
    output_axis,
    Side,
    VmapAxes,
)
from .._kernels.kernel import room_to_keep, SHARE
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


def check_implementation(implementation: str | int) -> Implementation:
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


def _check_trace_axes(axes: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if axes is None else check_axes("trace_axes", axes)


def _check_diagonal_axes(axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return check_axes("diagonal_axes", axes)


class AbstractKernelSettings(eqx.Module):
    """How the kernel of a model is computed; see `EmpiricalNTK`."""

    _: dataclasses.KW_ONLY
    trace_axes: tuple[int, ...] | None = eqx.field(
        static=True, converter=_check_trace_axes, default=None
    )
    diagonal_axes: tuple[int, ...] = eqx.field(
        static=True, converter=_check_diagonal_axes, default=()
    )
    vmap_axes: VmapAxes = eqx.field(converter=check_vmap_axes, default=0)
    block_size: BlockSize = eqx.field(
        static=True, converter=check_block_size, default=None
    )

    def __check_init__(self) -> None:
        if self.block_size is not None and not self.vmap_axes.is_batched:
            raise ValueError(
                "`block_size` must be None with `vmap_axes=None`: a model of a whole "
                "batch cannot be evaluated for blocks of it. Use `vmap_axes=0` if "
                "examples do not interact."
            )

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel."""

    @property
    def traces_last(self) -> bool:
        """Whether the last axis is traced if an output has one besides the batch."""
        return self.trace_axes is None

    @property
    def traced_axes(self) -> tuple[int, ...]:
        return (-1,) if self.trace_axes is None else self.trace_axes

    @property
    def symmetric(self) -> Mirror:
        """A function that exchanges the two sides of a kernel, for symmetry."""
        return Mirror(self.traced_axes, self.diagonal_axes)

    @property
    def takes_blocks(self) -> bool:
        """Whether blocks of a kernel are kernels of blocks of the examples."""
        return self.vmap_axes.is_batched


class AbstractParameterKernel(AbstractKernelSettings):
    """A kernel of derivatives with respect to parameters of a model."""

    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any] | None = None
    filter_spec: PyTree = eqx.is_inexact_array


class AbstractJacobianKernel(AbstractParameterKernel):
    """A kernel of Jacobians, which can be multiplied in several ways."""

    _: dataclasses.KW_ONLY
    implementation: Implementation = eqx.field(
        static=True, converter=check_implementation, default="auto"
    )


class AbstractRequest(AbstractKernelSettings):
    """How a requested kernel is computed.

    `room` is the number of bytes for factors of examples; None for no limit.
    """

    _: dataclasses.KW_ONLY
    implementation: Implementation = eqx.field(static=True, default="auto")
    room: int | None = eqx.field(static=True, default=None)

    def in_bytes(self) -> Any:
        """The request with memory budgets resolved to bytes."""
        if self.block_size is None or self.room is not None:
            return self
        if isinstance(self.block_size, MemoryBudget):
            return resolved(self)
        return dataclasses.replace(self, room=room_to_keep())


class TracedModel:
    """A model and its calls on the two sides, or on one if they are the same.

    - `sides`, `programs`: for each side, its examples and the program of one.
    - `leaves`: the parameters, which are the first inputs of the jaxprs.
    - `axes`: the axes of each output and their roles in the kernel.
    """

    def __init__(
        self,
        request: "ModelRequest",
        calls: list[Call],
        shared: dict[str, Any],
        *,
        is_diagonal: bool = False,
    ):
        self.request, model = request, request.model
        axes = request.vmap_axes
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
        if request.selection is not None:
            self.leaves, combine = request.selection.split(model)
        self.leaves = vary_as(arrays, self.leaves)
        self.programs: list[TracedFunction] = []
        for side in self.sides:
            if self.programs and side.type == self.sides[0].type:
                self.programs.append(self.programs[0])
                continue
            run = lambda leaves, rows, side=side: side.call(combine(leaves), rows)
            rows = side.rows
            with side.explained_failure(model):
                program = TracedFunction(run, self.leaves, rows.arrays, rows.axes)
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
        request = self.request
        leaves = jtu.tree_leaves_with_path(self.out)
        for path, leaf in leaves:
            is_array = isinstance(leaf, jax.ShapeDtypeStruct)
            if not is_array or not jnp.issubdtype(leaf.dtype, jnp.inexact):
                got = f"dtype {leaf.dtype}" if is_array else f"{leaf!r}"
                raise ValueError(
                    f"The model must return arrays of an inexact dtype; got {got} for "
                    f"output{jtu.keystr(path)}. Return only outputs that have a "
                    "kernel."
                )
        result = []
        others = self._others()
        batch_axes = output_axis(request.vmap_axes, self.out)
        for index, ((path, leaf), other, batch) in enumerate(
            zip(leaves, others, batch_axes, strict=True)
        ):
            ndim = len(leaf.shape) + (batch is not None)
            is_scalar = request.traces_last and len(leaf.shape) == 0
            trace_axes = () if is_scalar else request.traced_axes
            roles = list(
                axis_roles(
                    jtu.keystr(path), ndim, batch, trace_axes, request.diagonal_axes
                )
            )
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
                        "`trace_axes` and `diagonal_axes` must have the same sizes for "
                        f"`x1` and `x2`; got outputs of shapes {shapes[0]} and "
                        f"{shapes[1]}."
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
        size = self.request.block_size
        if not isinstance(size, tuple):
            assert size is None or isinstance(size, int)
            size = (size, size)
        rows, columns = size
        if len(self.sides) == 1 and rows is not None and columns is not None:
            # The mirror image of a square tile is a tile, too.
            rows = columns = min(rows, columns)
        return rows, columns


class AbstractTask(eqx.Module):
    """A task for a model."""

    @abc.abstractmethod
    def run(self, model: TracedModel) -> Any:
        """The result of the task."""


class ModelRequest(AbstractRequest):
    """A model, which of its leaves are parameters, and how kernels are computed.

    `selection` is None if only the outputs of the model matter.
    """

    model: Callable
    selection: Selection | None

    def __call__(
        self,
        task: AbstractTask,
        x1: PyTree,
        x2: PyTree,
        key: Any,
        kwargs: dict[str, Any],
        *,
        is_diagonal: bool = False,
    ) -> Any:
        """Runs the task for the model on two sides.

        `is_diagonal` says whether each example is only combined with the same example
        of the other side.
        """
        calls, shared = make_calls(x1, x2, key, kwargs)
        return _run(self.in_bytes(), task, calls, shared, is_diagonal)

    def run(
        self,
        task: AbstractTask,
        calls: list[Call],
        shared: dict[str, Any],
        is_diagonal: bool,
    ) -> Any:
        model = TracedModel(self, calls, shared, is_diagonal=is_diagonal)
        if isinstance(self.block_size, MemoryBudget):
            total = max(side.rows.total for side in model.sides)
            call = (task, calls, shared, is_diagonal)
            return self._fitted(self.block_size, total, call)
        return task.run(model)

    def _fitted(self, budget: MemoryBudget, total: int, call: tuple) -> Any:
        """The result of the task with the largest blocks that fit into a budget."""

        def run_with(size: int, room: int) -> Callable[[tuple], Any]:
            def run(operands: tuple) -> Any:
                request, call = operands
                request = dataclasses.replace(request, block_size=size, room=room)
                return request.run(*call)

            return run

        # The memory that the kernels leave is for factors of the rows and for blocks.
        operands = (self, call)
        structs = eqx.filter_eval_shape(run_with(1, 0), operands)
        outputs = sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(structs))
        room = max(budget.resolve() - outputs, 0) // SHARE
        run = lambda size: run_with(size, room)
        return run(resolve_size(budget, total, run, operands))(operands)


# The called object is an argument of the one compiled function, so repeated calls with
# the same shapes are not retraced.
@compiled
def _run(request: ModelRequest, *call: Any) -> Any:
    request, call = gathered((request, call))
    with within_mesh((request, call)):
        return request.run(*call)
