"""Calls of kernels, and kernels that are computed by calling a function."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

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
from .._batch.memory import MemoryBudget
from .._batch.rows import Rows
from .grid import Sizes
from .kernel import (
    AbstractBlockKernel,
    Flat,
    flattened,
    KernelLeaf,
    leaves_at,
    RowsOfSides,
    SAMPLE,
)
from .sides import as_jax_array, Side, SideArguments


_Call = TypeVar("_Call", bound="AbstractKernelCall")


class AbstractKernelCall(abc.ABC):
    """The arguments of a call, a PyTree from which each program makes its kernel.

    It is made in each call of a kernel, and the kernel when a program is traced.

    - `sides`: the two sides, or one if they are the same examples.
    - `symmetric`, `sizes`, `room`: as for the kernel.
    """

    sides: list[Side]
    symmetric: Any
    sizes: Sizes | MemoryBudget
    room: int

    @abc.abstractmethod
    def kernel(self) -> AbstractBlockKernel:
        """The kernel, which has blocks."""

    @property
    def is_same(self) -> bool:
        """Whether both sides are the same examples."""
        return len(self.sides) == 1

    @property
    def has_stored(self) -> bool:
        """Whether some examples are not in memory."""
        return any(side.stored is not None for side in self.sides)


def in_memory(call: _Call) -> _Call:
    """A call for compiled programs, without what is read for each block."""
    if not call.has_stored:
        return call
    sides = [dataclasses.replace(side, stored=None) for side in call.sides]
    replace: Any = dataclasses.replace
    return replace(call, sides=sides)


def checked_kernel(kernel: AbstractBlockKernel) -> AbstractBlockKernel:
    """A kernel whose mirror images are those of its blocks, as far as shapes tell."""
    if kernel.is_same and kernel.mirror.is_transpose:
        _check_transpose(kernel.leaves)
    return kernel


def _check_transpose(leaves: Sequence[KernelLeaf]) -> None:
    """Raises if exchanging the examples may exchange further axes of the kernel."""
    for leaf in leaves:
        sizes = leaf.further
        # Axes of size 1 are the same whether they are exchanged or not.
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


class Reduced(NamedTuple):
    """A kernel and what reduces it, on one mesh."""

    kernel: AbstractBlockKernel
    reduce: PyTree


def on_mesh_of_results(kernel: AbstractBlockKernel, reduce: PyTree) -> Reduced:
    """A kernel on the mesh with explicit axes where its results are.

    `kernel_fn` may close over arrays there, or move arrays itself. What is on no mesh
    could not be combined with its blocks, so the kernel and `reduce` are moved.
    """
    is_on_mesh = explicit_mesh((kernel, reduce)) is not None
    if is_on_mesh or not isinstance(kernel, CalledKernel):
        return Reduced(kernel, reduce)
    if not any(map(has_explicit_axes, kernel.out.leaves)):
        return Reduced(kernel, reduce)
    # The mesh is known by name from the results. Its devices are known from what the
    # function closes over or names.
    closed = kernel.program(*kernel.structs(SAMPLE))
    mesh = mesh_of_results(closed, list(constants(closed)))
    reduced = Reduced(kernel, reduce)
    return reduced if mesh is None else put_on(reduced, mesh)


# Not a Module, which takes longer to make, in each call.
@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FunctionCall(AbstractKernelCall):
    """A call of any kernel function.

    - `out_axes`, `pairwise`: as for `BatchKernel`.
    - `is_alone`: whether the second argument was omitted.
    """

    kernel_fn: Any
    args: Any
    sides: list[Side]
    shared: dict[str, Any]
    out_axes: PyTree
    is_alone: Any
    pairwise: Any
    symmetric: Any
    sizes: Sizes | MemoryBudget = eqx.field(static=True)
    room: int = eqx.field(static=True)

    def kernel(self) -> AbstractBlockKernel:
        kernel = None
        if self.is_ours:
            # None if blocks cannot share factors; it is then called like any function.
            kernel = self.kernel_fn.in_blocks(self)
        if kernel is None:
            settings = {"sizes": self.sizes, "room": self.room}
            kernel = CalledKernel(
                self, self.sampled(), symmetric=self.symmetric, **settings
            )
        return checked_kernel(kernel)

    @property
    def is_ours(self) -> bool:
        """Whether the function may compute factors of examples for all blocks."""
        return isinstance(self.kernel_fn, AbstractKernelFunction) and not self.pairwise

    @functools.cached_property
    def rows(self) -> RowsOfSides:
        return RowsOfSides(self.sides[0].rows, self.sides[-1].rows)

    @functools.cached_property
    def takes_none(self) -> bool:
        """Whether the second argument is omitted for a block with itself."""
        is_alone = self.is_alone and not self.pairwise
        return is_alone and _can_omit_second(self.kernel_fn)

    def sampled(self) -> Flat:
        """The output of the function for a sample."""
        structs = self.rows.structs(SAMPLE)
        try:
            return flattened(eqx.filter_eval_shape(self.output, *structs))
        except Exception as e:
            sides = (", ".join(str(x.shape) for x in side.arrays) for side in structs)
            remedy = " For a kernel of single examples, pass `pairwise=True`."
            e.add_note(
                "`kernel_fn` is called with blocks of examples, here of shape "
                f"{' and '.join(sides)}.{'' if self.pairwise else remedy}"
            )
            raise

    def output(self, first: Rows, second: Rows | None) -> PyTree:
        """The output of the function for a block of rows and one of columns."""
        if second is None and not self.takes_none and not self.is_ours:
            # As for other blocks, so that one trace of the function serves all.
            second = first
        call = _BlockCall(self.kernel_fn, self.args, self.shared, self.takes_none)
        left, right = self.sides[0], self.sides[-1]
        if second is None:
            return _output_of_block(call, left.arguments(first.arrays), None)
        block = functools.partial(_output_of_block, call)
        both = lambda x, y: block(left.arguments(x), right.arguments(y))
        if not self.pairwise:
            return both(first.arrays, second.arrays)

        # Columns are mapped inside, so that entries are [rows, columns, ...]. A Python
        # number becomes an array, because only arrays have an entry for each pair.
        def of_pair(x: list, y: list) -> PyTree:
            to_array = lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x
            return jtu.tree_map(to_array, both(x, y))

        rows, columns = ([*rows.axes] for rows in self.rows)
        row = eqx.filter_vmap(of_pair, in_axes=(None, columns))
        run = eqx.filter_vmap(row, in_axes=(rows, None))
        return run(first.arrays, second.arrays)


class CalledKernel(AbstractBlockKernel):
    """The kernel of a function that is called for each block.

    - `sampled`: the output of the function.
    """

    is_users: ClassVar[bool] = True

    call: FunctionCall
    sampled: Flat = eqx.field(static=True)

    @property
    def out(self) -> Flat:
        return self.sampled

    @functools.cached_property
    def rows(self) -> RowsOfSides:
        return self.call.rows

    @property
    def parts(self) -> dict[str, PyTree]:
        inputs = self.call.sides, self.call.args, self.call.shared
        return {"inputs": inputs, "kernel_fn": self.call.kernel_fn}

    @property
    def bytes_kept(self) -> tuple[int, int]:
        return 0, 0

    @functools.cached_property
    def leaves(self) -> tuple[KernelLeaf, ...]:
        return tuple(leaves_at(self.call.out_axes, self.out.tree))

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        del side, size
        return rows

    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""]
    ) -> list[Array]:
        # Constants of the program are arguments, too: derivatives with respect to
        # arrays that the function closes over are refused like all others.
        closed = self.program(first, second)
        arrays = list(closed.consts), jtu.tree_leaves((first, second))
        sizes = first.total, (first if second is None else second).total
        # The derivative is a sum over blocks only if the backward pass is linear.
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
        kernel_fn: Any = self.call.kernel_fn
        is_part = sizes != self.totals
        # A model of a whole batch would give other numbers for a part of it.
        if is_part and hasattr(kernel_fn, "check_is_batched"):
            kernel_fn.check_is_batched()
        try:
            out = self.call.output(first, second)
        except Exception as e:
            if second is None:
                e.add_note(
                    "This is a block of examples with themselves, for which `x2` is "
                    "None, as it is in the call."
                )
            raise
        arrays = [x for x in jtu.tree_leaves(out) if eqx.is_array(x)]
        # Tiles are written into one array, or update one state.
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


class _BlockCall(NamedTuple):
    """A kernel function and the arguments that all of its blocks share."""

    kernel_fn: Callable
    args: Any
    shared: dict[str, Any]
    takes_none: bool


# Compiled, so that a function is traced once for each shape of its blocks.
@compiled
def _output_of_block(
    call: _BlockCall, first: SideArguments, second: SideArguments | None
) -> PyTree:
    """The output of a kernel function for the arguments of two sides.

    Without the second, both are the same.
    """
    other = first if second is None else second
    x2 = None if second is None and call.takes_none else other.x
    pairs = {name: (x, other.kwargs[name]) for name, x in first.kwargs.items()}
    kwargs = {**pairs, **call.shared}
    out = called(call.kernel_fn, (first.x, x2, *call.args), kwargs, "`kernel_fn`")
    return jtu.tree_map(as_jax_array, out)


class AbstractKernelFunction(eqx.Module):
    """A kernel function that computes factors of examples once for all blocks."""

    @abc.abstractmethod
    def in_blocks(self, call: FunctionCall) -> AbstractBlockKernel | None:
        """The kernel of a call; None if the function is to be called for each block."""


def _can_omit_second(fun: Callable) -> bool:
    """Whether a kernel function can be called without a second argument."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # Some builtins have no signature.
        return True
    if len(parameters) < 2:
        return True
    # `*args` in front takes a second argument as well.
    is_required = parameters[1].default is inspect.Parameter.empty
    return not is_required or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL


def _shown(arrays: Sequence) -> str:
    return ", ".join(f"{x.shape} {x.dtype}" for x in arrays)
