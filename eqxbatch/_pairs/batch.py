"""`filter_batch_kernel`: any kernel function, in blocks of rows and columns."""

import math
from collections.abc import Callable
from typing import Any, cast, ClassVar, Literal, TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._base.mesh import gathered, within_mesh
from .._base.trees import described
from .._batch.memory import MemoryBudget, resolve_size
from .._batch.transform import AbstractTransform, also_decorator, transformed
from .calls import BlockSize, check_block_size, check_mesh, make_calls, MeshAxis
from .engine import make_collectors, on_device
from .function import block_kernel, PairwiseKernel
from .kernel import AbstractKernelFunction, KernelCall, Plan, room_to_keep, SHARE, Sizes
from .on_host import IN_FLIGHT, tile_program, to_store, with_progress
from .on_mesh import on_mesh
from .progress import AbstractProgressMeter, NoProgressMeter
from .reductions import RowSums
from .stores import AbstractStore


if TYPE_CHECKING:
    from .._batch.signatures import Typed
    from .kernel_signature import BatchKernelSignature


class BatchKernel(AbstractTransform):
    """What `filter_batch_kernel` is."""

    is_compiled: ClassVar[bool] = False
    takes_instance: ClassVar[bool] = False

    block_size: BlockSize = eqx.field(static=True)
    in_axes: PyTree = eqx.if_array(0)
    kwargs_axes: dict[str, PyTree] = eqx.field(default_factory=dict)
    out_axes: PyTree = (0, 1)
    symmetric: Any = None
    pairwise: bool = False
    reduce: PyTree = None
    mesh_axis: MeshAxis | None = None
    store: AbstractStore | None = None
    # Static, so that it stays the very object that it is, whatever it counts.
    meter: AbstractProgressMeter = eqx.field(static=True, default=NoProgressMeter())

    def apply(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Blocks are cut anywhere, and not where a mesh with explicit axes is.
        mesh = None if self.mesh_axis is None else self.mesh_axis.mesh
        call, reduce = gathered((self._call(fun, *args, **kwargs), self.reduce), mesh)
        block_size, call = _with_room(self.block_size, call)
        has_meter = not isinstance(self.meter, NoProgressMeter)
        if self.store is not None:
            call = _sized(block_size, call, None, None, is_stored=True)
            return to_store(call, self.store, self.meter, self.mesh_axis, has_meter)
        if has_meter:
            call = _sized(block_size, call, reduce, None)
            return with_progress(call, reduce, self.meter)
        return _run(call, block_size, reduce, self.mesh_axis)

    def on_one_device(self, fun: Callable, args: tuple, kwargs: dict) -> KernelCall:
        """The call of `fun`, with sizes of blocks, as one device computes it."""
        call = gathered(self._call(fun, *args, **kwargs), None)
        block_size, call = _with_room(self.block_size, call)
        # A budget is for what is reduced, as the whole kernel may not fit.
        return _sized(block_size, call, RowSums(), None)

    def _call(
        self,
        fun: Callable,
        /,
        x1: PyTree,
        x2: PyTree = None,
        *args: Any,
        key: Any = None,
        **kwargs: Any,
    ) -> KernelCall:
        if self.pairwise:
            # Its symmetry is that of the function.
            symmetric = getattr(fun, "symmetric", False)
            fun = PairwiseKernel(fun, self.in_axes, symmetric)
        is_alone = x2 is None
        x2 = None if x2 is x1 else x2
        x1, x2, args, key, kwargs = jtu.tree_map(_as_array, (x1, x2, args, key, kwargs))
        has_arrays = lambda x: any(map(eqx.is_array, jtu.tree_leaves(x)))
        arrays = {name: x for name, x in kwargs.items() if has_arrays(x)}
        calls, shared = make_calls(x1, x2, key, arrays)
        shared |= {name: x for name, x in kwargs.items() if name not in arrays}
        symmetric = self.symmetric
        if symmetric is None:
            symmetric = getattr(fun, "symmetric", False)
        mirror = None if symmetric is False else symmetric
        return KernelCall(
            kernel_fn=fun,
            args=args,
            calls=calls,
            shared=shared,
            in_axes=self.in_axes,
            kwargs_axes=self.kwargs_axes,
            out_axes=self.out_axes,
            is_alone=is_alone,
            plan=Plan(mirror),
        )


def _with_room(size: BlockSize, call: KernelCall) -> tuple[BlockSize, KernelCall]:
    """The block size, and the call with what may be kept of examples.

    What is free is looked up before anything is traced.
    """
    if isinstance(size, MemoryBudget):
        return MemoryBudget(size.resolve()), call
    if isinstance(call.kernel_fn, AbstractKernelFunction):
        return size, call.planned(room=room_to_keep())
    return size, call


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


@eqx.filter_jit
def _run(
    call: KernelCall, block_size: BlockSize, reduce: PyTree, mesh_axis: MeshAxis | None
) -> PyTree:
    with within_mesh((call, reduce)):
        call = _sized(block_size, call, reduce, mesh_axis)
        return _on_devices(call, reduce, mesh_axis)


def _on_devices(call: KernelCall, reduce: PyTree, mesh_axis: MeshAxis | None) -> PyTree:
    kernel = block_kernel(call)
    if mesh_axis is not None:
        return kernel.output(on_mesh(call, kernel, reduce, mesh_axis))
    return kernel.output(on_device(kernel, make_collectors(kernel, reduce)))


def _sized(
    size: BlockSize,
    call: KernelCall,
    reduce: PyTree,
    mesh_axis: MeshAxis | None,
    *,
    is_stored: bool = False,
) -> KernelCall:
    """The call, with how many rows and columns a block may have."""
    if not isinstance(size, MemoryBudget):
        sizes = size if isinstance(size, tuple) else (size, size)
        return call.planned(sizes=sizes)
    kernel = block_kernel(call)
    budget = size.resolve()
    if is_stored:
        # Some blocks are on their way while the next is computed.
        size = MemoryBudget(max(budget // (IN_FLIGHT + 1), 1))
    elif any(kernel.bytes_kept):
        # What the kernel leaves is for what is kept of examples, and for the blocks.
        shapes = [
            math.prod(leaf.shape(kernel.totals)) * leaf.dtype.itemsize
            for leaf in kernel.leaves
        ]
        left = budget if reduce is not None else budget - sum(shapes)
        call = call.planned(room=max(left, 0) // SHARE)
    operands = (call, reduce, mesh_axis, is_stored)

    # Memory is affine in the area of a block.
    def run(area: int) -> Callable[[tuple], Any]:
        def program(operands: tuple) -> Any:
            call, reduce, mesh_axis, is_stored = operands
            call = call.planned(sizes=_square(area))
            if is_stored:
                return tile_program(call)
            return _on_devices(call, reduce, mesh_axis)

        return program

    try:
        area = resolve_size(size, max(kernel.totals) ** 2, run, operands)
    except ValueError as e:
        e.add_note("A kernel that is too large itself can go to `store=HostStore()`.")
        raise
    return call.planned(sizes=_square(area))


def _square(area: int) -> Sizes:
    size = math.isqrt(area)
    return size, size


@cast("Typed[BatchKernelSignature]", also_decorator)
def filter_batch_kernel(
    kernel_fn: Any = None,
    *,
    block_size: BlockSize,
    in_axes: PyTree = eqx.if_array(0),
    out_axes: PyTree = (0, 1),
    symmetric: bool | Callable[[PyTree], PyTree] | None = None,
    pairwise: bool = False,
    reduce: PyTree = None,
    mesh: Mesh | None = None,
    mesh_axis: str | None = None,
    store: AbstractStore | Literal["device"] = "device",
    progress: AbstractProgressMeter | None = None,
) -> Any:
    """Any kernel function, computed in blocks of rows by columns.

    A kernel function takes `n1` examples and `n2`, and returns something for each pair
    of them: `kernel_fn(x1, x2=None, *args, **kwargs)`. Here it is called for a block of
    the ones and a block of the others at a time, and what it returns is put together,
    on the device, on the host, or on disk; or reduced to something smaller.

    Without `x2`, or if it is `x1` itself, the two sides are the same. If the kernel is
    symmetric, only the blocks on and above the diagonal are computed then, and the
    result is exactly symmetric. Where `x2` is left out, it is so for blocks on the
    diagonal, too.

    It can be used as a decorator with arguments, and on methods.

    **Arguments:**

    - `kernel_fn`: the kernel function, such as an [`eqxbatch.EmpiricalNTK`][].
    - `block_size`: the most rows and columns that a block may have: an int, a pair of
        them, an [`eqxbatch.MemoryBudget`][], or None for all at once. Blocks are as
        equal as can be, and all have the same shape: where the number of examples is
        not divided, the last block overlaps with the one before. Blocks are square
        without `x2`.
    - `in_axes`: which axes of `x1` and `x2` are the examples, as for
        `equinox.filter_vmap`; by default, axis 0 of all arrays.
    - `out_axes`: a pair for the axes of the rows and of the columns in what `kernel_fn`
        returns, `(0, 1)` by default, or a PyTree prefix of it with such pairs. None for
        an axis that is not there: `(0, None)` is what there is for each row, such as a
        diagonal or a mask.
    - `symmetric`: whether exchanging both sides exchanges the two axes of the result,
        conjugated if it is complex. A function that takes the result for a block, and
        returns that with sides exchanged, if it is more than that. By default, what the
        attribute `symmetric` of `kernel_fn` says, as estimators of this package have
        it, and otherwise False.
    - `pairwise`: whether `kernel_fn` is a function of one example of each side, such as
        `lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))`. A `key` and keyword arguments
        that come in pairs are pairs for the two examples, then. Rows and columns of
        the result come first.
    - `reduce`: what to make of the kernel instead of keeping it: an
        [`eqxbatch.AbstractReduction`][] such as [`eqxbatch.RowSums`][],
        [`eqxbatch.KernelProduct`][] or [`eqxbatch.TopK`][], or a PyTree prefix of the
        result.
    - `mesh`: a `jax.sharding.Mesh` over which the rows are spread, each device looping
        over blocks of its own; numbers of examples need not be divided by that of the
        devices, but where it does not divide that of rows, each device gets the whole
        result in the end. The mesh can span the processes of `jax.distributed`; each
        must then be called with the same arguments.
    - `mesh_axis`: the axis of the mesh; need not be given if there is only one.
    - `store`: `"device"`, an [`eqxbatch.HostStore`][] for arrays of NumPy, or an
        [`eqxbatch.ZarrStore`][] for arrays on disk, which can be continued.
    - `progress`: an [`eqxbatch.AbstractProgressMeter`][] such as
        [`eqxbatch.TqdmProgressMeter`][], which also counts NaNs; None for nothing.

    **Returns:**

    A function `(x1, x2=None, *args, key=None, **kwargs)` that returns what `kernel_fn`
    does: arrays of shape `(n1, n2, ...)`. All else in its result must be the same for
    all blocks.

    - `x1`, `x2`: PyTrees whose arrays have the examples along the same axis.
    - `args`: is passed on as it is.
    - `key`: one key, or a pair of them for both sides, is split into one for each
        example, and `kernel_fn` is called with `key=(keys1, keys2)`, whatever the
        blocks are.
    - `kwargs`: a pair (tuple) of arrays, or of PyTrees of arrays, is for the examples
        of both sides, with these along axis 0, and `kernel_fn` gets the same rows of
        them as of `x1` and `x2`; without `x2`, the second one can be None. All else is
        passed on.

    With `store="device"` and without `progress`, it is one compiled program, and can be
    used within `jax.jit`, `jax.vmap`, `jax.grad` and the like; in reverse mode, blocks
    are computed again and not kept. Otherwise, it is a loop in Python over blocks that
    are compiled, and an error or Ctrl-C leaves a store that can be continued.

    **Raises:**

    `ValueError` for a size below 1, examples that differ in number, an axis that is not
    there, a result without rows and columns where `out_axes` says, or one that changes
    with the block otherwise, a `mesh_axis` that the mesh does not have, and a store
    where there can be none: with `reduce`, or with `upper_only` and a kernel that is
    not symmetric; `TypeError` for arguments of other types than these, and for stores
    or `progress` within `jax.jit` and the like.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> @eqxbatch.filter_batch_kernel(block_size=256, symmetric=True)
        ... def rbf(x1, x2=None, scale=1.0):
        ...     x2 = x1 if x2 is None else x2
        ...     squares = [jnp.sum(x**2, axis=-1) for x in (x1, x2)]
        ...     distances = squares[0][:, None] + squares[1][None, :] - 2 * x1 @ x2.T
        ...     return jnp.exp(-distances / (2 * scale**2))
        >>> rbf(jnp.ones((1_000, 3))).shape
        (1000, 1000)
        >>> rbf(jnp.ones((1_000, 3)), jnp.ones((50, 3)), scale=2.0).shape
        (1000, 50)
        >>> laplace = eqxbatch.filter_batch_kernel(
        ...     lambda x, y: jnp.exp(-jnp.sum(jnp.abs(x - y))),
        ...     block_size=256,
        ...     pairwise=True,
        ... )
        >>> laplace(jnp.ones((1_000, 3))).shape
        (1000, 1000)

        ```
    """
    transform = make_batch_kernel(
        block_size,
        reduce=reduce,
        mesh=mesh,
        mesh_axis=mesh_axis,
        store=store,
        progress=progress,
        in_axes=in_axes,
        out_axes=out_axes,
        symmetric=_check_symmetric(symmetric),
        pairwise=_check_pairwise(pairwise, out_axes),
    )
    return transformed(transform, kernel_fn, "filter_batch_kernel")


def make_batch_kernel(
    block_size: BlockSize,
    *,
    reduce: PyTree,
    mesh: Mesh | None,
    mesh_axis: str | None,
    store: Any,
    progress: Any,
    **axes: Any,
) -> BatchKernel:
    """The settings, all of them checked."""
    transform = BatchKernel(
        block_size=check_block_size(block_size),
        reduce=reduce,
        mesh_axis=check_mesh(mesh, mesh_axis),
        store=check_store(store),
        meter=check_progress(progress),
        **axes,
    )
    if transform.store is not None and reduce is not None:
        raise ValueError(
            "With `reduce`, no kernel is kept that could go to a `store`. Leave one of "
            "them out."
        )
    is_silent = isinstance(transform.meter, NoProgressMeter)
    if transform.store is None and mesh is not None and not is_silent:
        raise ValueError(
            "`progress` on a `mesh` needs a `store`: on the devices, the kernel is one "
            "program. Use `store=HostStore()`, or leave one of them out."
        )
    return transform


def _check_symmetric(symmetric: Any) -> Any:
    if symmetric is None or isinstance(symmetric, bool) or callable(symmetric):
        return symmetric
    raise TypeError(
        "`symmetric` must be a bool, None, or a function from a block to its mirror "
        f"image; got {described(symmetric)}."
    )


def _check_pairwise(pairwise: bool, out_axes: PyTree) -> bool:
    if pairwise and out_axes != (0, 1):
        raise ValueError(
            "With `pairwise=True`, rows and columns are the first axes of the result; "
            f"got `out_axes={out_axes!r}`. Leave it out."
        )
    return bool(pairwise)


def check_store(store: Any) -> AbstractStore | None:
    if isinstance(store, AbstractStore):
        return store
    if isinstance(store, str) and store == "device":
        return None
    raise TypeError(
        "`store` must be 'device', a `HostStore()` or a `ZarrStore(path)`; got "
        f"{described(store)}."
    )


def check_progress(progress: Any) -> AbstractProgressMeter:
    if progress is None:
        return NoProgressMeter()
    if isinstance(progress, AbstractProgressMeter):
        return progress
    raise TypeError(
        "`progress` must be a progress meter, such as `TqdmProgressMeter()`, or None; "
        f"got {described(progress)}."
    )
