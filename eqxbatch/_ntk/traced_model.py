"""A model, traced as it is called on the two sides of a kernel."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.jaxprs import evaluate_jaxpr, trace_example
from .._base.mesh import vary_as
from .._base.trees import type_of
from .._batch.objective import Selection
from .._pairs.calls import Call, output_axis, Side
from .output_axes import axis_roles, OutputAxes
from .settings import Settings


class TracedModel:
    """A model and its calls on the two sides, or on one if they are the same.

    - `sides`, `programs`: the examples of each, and the jaxpr and output for one.
    - `leaves`: the parameters, which are the first inputs of the jaxprs.
    - `axes`: what the kernel is to have of the axes of each output.
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
        # Inside of `jax.shard_map`, a derivative in what is the same on all devices is
        # summed over them. A kernel is that of the examples on its device, and both
        # sides have one program.
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
        self.programs: list[tuple[Any, PyTree]] = []
        for side in self.sides:
            if self.programs and side.type == self.sides[0].type:
                self.programs.append(self.programs[0])
                continue
            self.programs.append(
                trace_example(
                    lambda leaves, rows, side=side: side.call(combine(leaves), rows),
                    self.leaves,
                    side.rows.arrays,
                    side.rows.axes,
                )
            )
        self.out = self.programs[0][1]
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
            roles = list(axis_roles(jtu.keystr(path), ndim, batch, trace, diagonal))
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
        """What the model returns on the second side, which must fit to the first."""
        found = [self.out, self.programs[-1][1]]
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

    def values(self, position: int, leaves: list, arrays: list) -> list[Array]:
        """All arrays that the model returns for some examples of a side."""
        closed, _ = self.programs[position]
        run = lambda *rows: evaluate_jaxpr(
            closed.jaxpr, list(closed.consts), [*leaves, *rows]
        )
        return jax.vmap(run, self.sides[position].rows.axes)(*arrays)

    def block_sizes(self) -> tuple[int | None, int | None]:
        """The sizes of blocks of rows and of columns; None for a single block."""
        size = self.settings.block_size
        if not isinstance(size, tuple):
            assert size is None or isinstance(size, int)
            size = (size, size)
        rows, columns = size
        if len(self.sides) == 1 and rows is not None and columns is not None:
            # A square tile has its mirror image in a tile.
            rows = columns = min(rows, columns)
        return rows, columns
