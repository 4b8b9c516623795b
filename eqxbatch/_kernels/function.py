"""Kernel functions that are called for blocks of rows and columns."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._base.cpu import evaluate_in_loop, in_opaque_branch
from .._base.jaxprs import compiled
from .._base.mesh import (
    explicit_mesh,
    gathered,
    has_explicit_axes,
    mesh_of_results,
    put_on,
)
from .._base.mistakes import called
from .._base.primitives import constants
from .._base.trees import is_struct, match_prefix, safe_zip, shown
from .._batch.loop import Rows
from .calls import BatchAxes, Call, is_pair, Side
from .kernel import AbstractBlockKernel, flattened, KernelLeaf, SAMPLE


_ROWS, _COLUMNS = SAMPLE


def block_kernel(call: "CalledKernel") -> AbstractBlockKernel:
    """The kernel of a call, with its `leaves`.

    Kernels of this package keep factors of examples.
    """
    kernel = None
    if isinstance(call.kernel_fn, AbstractKernelFunction):
        kernel = call.kernel_fn.in_blocks(call)
    kernel = call.evaluated() if kernel is None else kernel
    if kernel.is_same and kernel.mirror.is_transpose:
        _check_transpose(kernel.leaves)
    return kernel


def _check_transpose(leaves: Sequence[KernelLeaf]) -> None:
    """Raises if exchanging the examples may exchange further axes of the kernel."""
    for leaf in leaves:
        sizes = leaf.further
        if leaf.is_pairwise and any(n > 1 and sizes.count(n) > 1 for n in sizes):
            raise ValueError(
                "`symmetric=True` exchanges rows and columns only, but output"
                f"{leaf.path} has the further axes {sizes} for each pair of examples. "
                "Exchanging two examples may exchange axes of the same size as well. "
                "Pass a function from a block to its mirror image: `symmetric=lambda "
                "k: k.transpose(1, 0, 3, 2)` if it transposes the matrix of each pair, "
                "or `symmetric=lambda k: k.swapaxes(0, 1)` if it does not (and "
                "conjugate a complex result). Leave `symmetric` out if `kernel_fn` has "
                "it as an attribute, as the estimators of this package do."
            )


def on_mesh_of_results(
    kernel: AbstractBlockKernel, reduce: PyTree
) -> tuple[AbstractBlockKernel, PyTree]:
    """A kernel on the mesh with explicit axes where its results are.

    `kernel_fn` may close over arrays there, or move arrays itself. What is on no mesh
    could not be combined with its blocks, so the kernel and `reduce` are moved.
    """
    is_on_mesh = explicit_mesh((kernel, reduce)) is not None
    if is_on_mesh or not isinstance(kernel, CalledKernel):
        return kernel, reduce
    if not any(map(has_explicit_axes, kernel.out[0])):
        return kernel, reduce
    closed = eqx.filter_make_jaxpr(_out)(kernel, *kernel.structs(SAMPLE))[0]
    mesh = mesh_of_results(closed, list(constants(closed)))
    return (kernel, reduce) if mesh is None else put_on((kernel, reduce), mesh)


class CalledKernel(AbstractBlockKernel):
    """Any kernel function, which is called for each block, and its arguments.

    - `calls`: one for each side, or one for both if they are the same examples.
    - `axes`: the batch axes of the calls; those of outputs do not matter.
    - `is_alone`: whether the second argument was omitted.
    """

    kernel_fn: Callable
    args: tuple
    calls: list[Call]
    shared: dict[str, Any]
    axes: BatchAxes
    out_axes: PyTree
    is_alone: bool

    @functools.cached_property
    def sides(self) -> list[Side]:
        sides = enumerate(self.calls)
        return [Side(position, one, {}, self.axes) for position, one in sides]

    @property
    def rows(self) -> tuple[Rows, Rows]:
        return self.sides[0].rows, self.sides[-1].rows

    def evaluated(self) -> "CalledKernel":
        """The same kernel, with its `leaves`."""
        if self.leaves:
            return self
        structs = self.structs(SAMPLE)
        try:
            out = eqx.filter_eval_shape(_out, self, *structs)
        except Exception as e:
            sides = (", ".join(str(x.shape) for x in rows) for rows in structs)
            remedy = " For a kernel of single examples, pass `pairwise=True`."
            is_pairwise = isinstance(self.kernel_fn, PairwiseKernel)
            e.add_note(
                "`kernel_fn` is called with blocks of examples, here of shape "
                f"{' and '.join(sides)}.{'' if is_pairwise else remedy}"
            )
            raise
        leaves = tuple(leaves_at(self.out_axes, out))
        return dataclasses.replace(self, leaves=leaves, out=flattened(out))

    def called(self, first: list, second: list | None) -> PyTree:
        """The output of the function for a block of rows and one of columns."""
        x1, first_kwargs = self.sides[0].arguments(first)
        x2, other = None, first_kwargs
        if second is not None:
            x2, other = self.sides[-1].arguments(second)
        elif not self.is_alone or not _takes_none(self.kernel_fn):
            x2 = x1
        pairs = {name: (first_kwargs[name], other[name]) for name in first_kwargs}
        kwargs = {**pairs, **self.shared}
        out = called(self.kernel_fn, (x1, x2, *self.args), kwargs, "`kernel_fn`")
        as_jax = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
        return jtu.tree_map(as_jax, out)

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        del side, size
        return rows

    @functools.cached_property
    def _programs(self) -> dict[Any, Any]:
        return {}

    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""]
    ) -> list[Array]:
        arrays = [first.arrays, *([] if second is None else [second.arrays])]
        key = tuple(x.shape for x in jtu.tree_leaves(arrays)), second is None
        if key not in self._programs:
            none = [None] if second is None else []
            tile = lambda first, second: self.tile(first, second)
            make = eqx.filter_make_jaxpr(tile)
            self._programs[key] = make(*arrays, *none)[0]
        closed = self._programs[key]
        # As its own program, it is in a branch, where convolutions are as slow as in a
        # loop.
        run = in_opaque_branch(
            functools.partial(evaluate_in_loop, closed.jaxpr), always
        )
        return run(list(closed.consts), jtu.tree_leaves(arrays))

    def tile(self, first: list, second: list | None) -> list[Array]:
        """The arrays for a block of rows and a block of columns.

        Without `second`, both are the same.
        """
        sizes = [
            x.shape[axis]
            for rows, arrays in safe_zip(
                self.rows, (first, first if second is None else second)
            )
            for x, axis in [(arrays[0], rows.axes[0])]
        ]
        kernel_fn: Any = self.kernel_fn
        is_part = (sizes[0], sizes[1]) != self.totals
        if is_part and hasattr(kernel_fn, "check_is_batched"):
            kernel_fn.check_is_batched()
        try:
            out = self.called(first, second)
        except Exception as e:
            if second is None:
                e.add_note(
                    "This is a block of examples with themselves, for which `x2` is "
                    "None, as it is in the call."
                )
            raise
        arrays = [x for x in jtu.tree_leaves(out) if eqx.is_array(x)]
        expected = [leaf.shape_for((sizes[0], sizes[1])) for leaf in self.leaves]
        shapes = [x.shape for x in arrays]
        dtypes = [leaf.dtype for leaf in self.leaves]
        if shapes != expected or [x.dtype for x in arrays] != dtypes:
            raise ValueError(
                "`kernel_fn` must return arrays of the same structure, rank and dtype "
                "for all blocks, whose other axes have the same sizes for all of them; "
                f"expected {_shown(expected, dtypes)} for {sizes[0]} rows and "
                f"{sizes[1]} columns, got {_shown(shapes, [x.dtype for x in arrays])}."
            )
        # Blocks can start anywhere, which a mesh with explicit axes does not allow.
        return gathered([jnp.asarray(x, x.dtype) for x in arrays])


# Compiled, so that repeated requests for shapes do not trace it again.
@compiled
def _out(kernel: CalledKernel, first: list, second: list) -> PyTree:
    return kernel.called(first, second)


class AbstractKernelFunction(eqx.Module):
    """A kernel function that computes factors of examples once for all blocks."""

    @abc.abstractmethod
    def in_blocks(self, call: CalledKernel) -> AbstractBlockKernel | None:
        """The kernel of a call; None if the function is to be called for each block."""


def leaves_at(out_axes: PyTree, out: PyTree) -> list[KernelLeaf]:
    """The arrays that a kernel function returns, with rows and columns on these axes.

    `out` has their shapes for a sample. Raises `ValueError` or `TypeError` for axes
    that do not fit.
    """
    places = match_prefix(
        "out_axes",
        out_axes,
        out,
        "a PyTree prefix of what `kernel_fn` returns, with a pair of axes, or None in "
        "place of one, for each part",
        is_leaf=is_axes,
    )
    leaves = [
        _make_leaf(jtu.keystr((*path, *sub)), axes, leaf)
        for path, axes, part in places
        for sub, leaf in jtu.tree_leaves_with_path(part)
        if is_struct(leaf)
    ]
    if not leaves:
        raise ValueError(
            f"`kernel_fn` must return at least one array; got {shown(out)}. Return the "
            "kernel of `x1` with `x2`."
        )
    return leaves


class PairwiseKernel(eqx.Module):
    """A kernel of one example of each side, mapped over blocks of them.

    - `in_axes`: the batch axes of both sides.
    """

    fun: Callable
    in_axes: PyTree

    def __call__(self, x1: PyTree, x2: PyTree = None, *args: Any, **kwargs: Any) -> Any:
        x2 = x1 if x2 is None else x2
        pairs = {name: x for name, x in kwargs.items() if is_pair(x)}
        shared = {name: x for name, x in kwargs.items() if name not in pairs}
        first, second = (
            {name: pair[side] for name, pair in pairs.items()} for side in (0, 1)
        )
        axes = (self.in_axes, eqx.if_array(0))

        def one(x: PyTree, of_x: dict, y: PyTree, of_y: dict) -> Any:
            of_both = {name: (of_x[name], of_y[name]) for name in pairs}
            out = called(self.fun, (x, y, *args), {**of_both, **shared}, "`kernel_fn`")
            as_array = lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x
            return jtu.tree_map(as_array, out)

        def row(x: PyTree, of_x: dict) -> Any:
            of_one = lambda y, of_y: one(x, of_x, y, of_y)
            return eqx.filter_vmap(of_one, in_axes=axes)(x2, second)

        return eqx.filter_vmap(row, in_axes=axes)(x1, first)


def is_axes(x: Any) -> bool:
    """Whether `axes` is a pair of axes, not a PyTree of pairs."""
    return (
        isinstance(x, tuple)
        and len(x) == 2
        and all(
            a is None or (isinstance(a, int) and not isinstance(a, bool)) for a in x
        )
    )


def _make_leaf(path: str, axes: Any, struct: jax.ShapeDtypeStruct) -> KernelLeaf:
    shape = tuple(struct.shape)
    if not is_axes(axes):
        raise TypeError(
            "`out_axes` must consist of pairs `(axis of the rows, axis of the "
            f"columns)`, with None for one that is not there; got {shown(axes)}."
        )
    got = (
        f"`kernel_fn` returned shape {shape} in output{path} for {_ROWS} rows and "
        f"{_COLUMNS} columns"
    )
    remedy = (
        "Return an array with these axes, or declare by `out_axes` what there is, with "
        "None for an axis that is missing, as in `(0, None)` for a value for each row. "
        "For a kernel of single examples, pass `pairwise=True`."
    )
    if axes == (None, None):
        raise ValueError(
            f"`out_axes` gives output{path} neither rows nor columns, so that there "
            "would be one for each block. Return it separately."
        )
    resolved: list[int | None] = []
    sizes = {"rows": _ROWS, "columns": _COLUMNS}
    for (name, size), axis in safe_zip(sizes.items(), axes):
        if axis is None:
            resolved.append(None)
            continue
        if not -len(shape) <= axis < len(shape) or shape[axis] != size:
            raise ValueError(
                f"{got}, whose axis {axis} should be the axis of the {name}. {remedy}"
            )
        resolved.append(axis % len(shape))
    return KernelLeaf(path, (resolved[0], resolved[1]), shape, struct.dtype)


def _takes_none(fun: Callable) -> bool:
    """Whether a kernel function can be called without a second argument."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # Some builtins have no signature.
        return True
    if len(parameters) < 2:
        return True
    is_required = parameters[1].default is inspect.Parameter.empty
    return not is_required or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL


def _shown(shapes: list, dtypes: list) -> str:
    pairs = safe_zip(shapes, dtypes)
    return ", ".join(f"{shape} {dtype}" for shape, dtype in pairs)
