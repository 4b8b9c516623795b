"""Kernels that are computed by calling a function."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree

from .._base.backward import custom_backward
from .._base.checks import called
from .._base.compile import compiled
from .._base.cpu import evaluate_in_loop, in_opaque_branch
from .._base.jaxprs import constants
from .._base.mesh import (
    explicit_mesh,
    gathered,
    has_explicit_axes,
    mesh_of_results,
    put_on,
)
from .._batch.rows import Rows
from .kernel import AbstractBlockKernel, Flat, flattened, KernelLeaf, leaves_at, SAMPLE
from .sides import as_array, Side, Stored


_Kernel = TypeVar("_Kernel", bound=AbstractBlockKernel)


def detached(kernel: _Kernel) -> tuple[_Kernel, list[Stored | None]]:
    """A kernel for compiled programs, and what is read for each block of its sides.

    The list is empty if all examples are in memory.
    """
    is_side = lambda x: isinstance(x, Side)
    sides = filter(is_side, jtu.tree_leaves(kernel, is_leaf=is_side))
    stored = [side.stored for side in sides]
    if not any(stored):
        return kernel, []
    alone = lambda x: dataclasses.replace(x, stored=None) if is_side(x) else x
    return jtu.tree_map(alone, kernel, is_leaf=is_side), stored


def block_kernel(kernel: AbstractBlockKernel) -> AbstractBlockKernel:
    """The kernel in the form in which it has blocks.

    Kernel functions of this package keep factors of examples.
    """
    if isinstance(kernel, CalledKernel):
        kernel_fn: Any = kernel.kernel_fn
        in_blocks = kernel_fn.in_blocks(kernel) if kernel.is_ours else None
        kernel = in_blocks or dataclasses.replace(kernel, known=kernel.out)
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
    closed = kernel.program(*kernel.structs(SAMPLE))
    mesh = mesh_of_results(closed, list(constants(closed)))
    return (kernel, reduce) if mesh is None else put_on((kernel, reduce), mesh)


class CalledKernel(AbstractBlockKernel):
    """Any kernel function, which is called for each block, and its arguments.

    - `sides`: the two sides, or one if they are the same examples.
    - `is_alone`: whether the second argument was omitted.
    - `pairwise`: whether it is a function of one example of each side.
    - `known`: its output, once it was called for a sample.
    """

    is_users: ClassVar[bool] = True

    kernel_fn: Callable
    args: tuple
    sides: list[Side]
    shared: dict[str, Any]
    out_axes: PyTree
    is_alone: bool
    pairwise: bool
    _: dataclasses.KW_ONLY
    known: Flat | None = eqx.field(static=True, default=None)

    @property
    def is_ours(self) -> bool:
        """Whether the function may compute factors of examples for all blocks."""
        return isinstance(self.kernel_fn, AbstractKernelFunction) and not self.pairwise

    @property
    def rows(self) -> tuple[Rows, Rows]:
        return self.sides[0].rows, self.sides[-1].rows

    @property
    def parts(self) -> dict[str, PyTree]:
        inputs = self.sides, self.args, self.shared
        return {"inputs": inputs, "kernel_fn": self.kernel_fn}

    @property
    def bytes_kept(self) -> tuple[int, int]:
        return 0, 0

    @functools.cached_property
    def leaves(self) -> tuple[KernelLeaf, ...]:
        return tuple(leaves_at(self.out_axes, jtu.tree_unflatten(*reversed(self.out))))

    @functools.cached_property
    def out(self) -> Flat:
        if self.known is not None:
            return self.known
        structs = self.structs(SAMPLE)
        try:
            out = eqx.filter_eval_shape(self.called, *structs)
        except Exception as e:
            sides = (", ".join(str(x.shape) for x in side.arrays) for side in structs)
            remedy = " For a kernel of single examples, pass `pairwise=True`."
            e.add_note(
                "`kernel_fn` is called with blocks of examples, here of shape "
                f"{' and '.join(sides)}.{'' if self.pairwise else remedy}"
            )
            raise
        return flattened(out)

    @functools.cached_property
    def _takes_none(self) -> bool:
        """Whether the second argument is omitted for a block with itself."""
        is_alone = self.is_alone and not self.pairwise
        return is_alone and _can_omit_second(self.kernel_fn)

    def called(self, first: Rows, second: Rows | None) -> PyTree:
        """The output of the function for a block of rows and one of columns."""
        if second is None and not self._takes_none and not self.is_ours:
            # As for other blocks, so that one trace of the function serves all.
            second = first
        call = self.kernel_fn, self.args, self.shared, self._takes_none
        left, right = self.sides[0], self.sides[-1]
        if second is None:
            return _called(call, left.arguments(first.arrays), None)
        both = lambda x, y: _called(call, left.arguments(x), right.arguments(y))
        if not self.pairwise:
            return both(first.arrays, second.arrays)

        def one(x: list, y: list) -> PyTree:
            as_array = lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x
            return jtu.tree_map(as_array, both(x, y))

        rows, columns = ([*rows.axes] for rows in self.rows)
        row = eqx.filter_vmap(one, in_axes=(None, columns))
        run = eqx.filter_vmap(row, in_axes=(rows, None))
        return run(first.arrays, second.arrays)

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        del side, size
        return rows

    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""]
    ) -> list[Array]:
        closed = self.program(first, second)
        arrays = list(closed.consts), jtu.tree_leaves((first, second))
        sizes = first.total, (first if second is None else second).total
        is_example = [True for _ in closed.jaxpr.invars]
        if sizes != self.totals and not custom_backward(closed, is_example).is_linear:
            arrays = _without_derivative(arrays)
        # As its own program, it is in a branch, where convolutions are as slow as in a
        # loop.
        run = in_opaque_branch(
            functools.partial(evaluate_in_loop, closed.jaxpr), always
        )
        return run(*arrays)

    def tile(self, first: Rows, second: Rows | None) -> list[Array]:
        """The arrays for a block of rows and a block of columns.

        Without `second`, both are the same.
        """
        sizes = first.total, (first if second is None else second).total
        kernel_fn: Any = self.kernel_fn
        is_part = sizes != self.totals
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
        structs = [leaf.struct(sizes) for leaf in self.leaves]
        if _shown(arrays) != _shown(structs):
            raise ValueError(
                "`kernel_fn` must return arrays of the same structure, rank and dtype "
                "for all blocks, whose other axes have the same sizes for all of them; "
                f"expected {_shown(structs)} for {sizes[0]} rows and {sizes[1]} "
                f"columns, got {_shown(arrays)}."
            )
        # Blocks can start anywhere, which a mesh with explicit axes does not allow.
        return gathered([jnp.asarray(x, x.dtype) for x in arrays])


@eqx.filter_custom_jvp
def _without_derivative(arrays: PyTree) -> PyTree:
    """The arrays of a block whose derivative is not that of the whole kernel."""
    return arrays


@_without_derivative.def_jvp
def _refuse(primals: tuple, tangents: tuple) -> Any:
    raise ValueError(
        "`kernel_fn` has a custom backward pass (`jax.custom_vjp`) that is not known "
        "to be linear in the cotangent. It would be called for each block of the "
        "kernel, which gives another derivative than one call for all. Pass "
        "`block_size=None`, or differentiate without that function."
    )


# Compiled, so that a function is traced once for each shape of its blocks.
@compiled
def _called(call: tuple, first: tuple, second: tuple | None) -> PyTree:
    """The output of a kernel function for the arguments of two sides.

    Without the second, both are the same.
    """
    kernel_fn, args, shared, takes_none = call
    (x1, kwargs), (x2, other) = first, second or first
    if second is None and takes_none:
        x2 = None
    pairs = {name: (kwargs[name], other[name]) for name in kwargs}
    out = called(kernel_fn, (x1, x2, *args), {**pairs, **shared}, "`kernel_fn`")
    return jtu.tree_map(as_array, out)


class AbstractKernelFunction(eqx.Module):
    """A kernel function that computes factors of examples once for all blocks."""

    @abc.abstractmethod
    def in_blocks(self, call: CalledKernel) -> AbstractBlockKernel | None:
        """The kernel of a call; None if the function is to be called for each block."""


def _can_omit_second(fun: Callable) -> bool:
    """Whether a kernel function can be called without a second argument."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # Some builtins have no signature.
        return True
    if len(parameters) < 2:
        return True
    is_required = parameters[1].default is inspect.Parameter.empty
    return not is_required or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL


def _shown(arrays: Sequence) -> str:
    return ", ".join(f"{x.shape} {x.dtype}" for x in arrays)
