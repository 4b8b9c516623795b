"""`filter_batch_kernel`: any kernel function, in blocks of rows and columns."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Concatenate, Generic, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._base.checks import check_at_least, check_exclusive
from .._base.compile import compiled, num_bytes
from .._base.mesh import explicit_mesh, gathered, within_mesh
from .._base.run_time_checks import on_devices_of
from .._batch.memory import MemoryBudget, resolve_size
from .._batch.progress import AbstractProgressMeter, as_meter, Progress
from .._batch.rows import Rows
from .._batch.store import AbstractStore, IN_FLIGHT
from .._batch.transform import AbstractTransform, also_decorator, Out, P
from .._batch.zarr_store import as_store
from .called import (
    AbstractKernelCall,
    AbstractKernelFunction,
    FunctionCall,
    in_memory,
    on_mesh_of_results,
)
from .collect import checked_output, KernelOutput
from .engine import output_on_device
from .grid import BlockSize, check_block_size, sizes_of
from .kernel import AbstractBlockKernel, room_of, SHARE
from .on_devices import check_mesh, MeshAxis, on_mesh
from .on_host import (
    check_concrete,
    Destination,
    on_no_mesh,
    tile_by_tile,
    tile_program,
    to_store,
)
from .sides import as_jax_array, Examples, Stored


_X1 = TypeVar("_X1", bound=Any)


_X2 = TypeVar("_X2")


def settings_of(module: eqx.Module, cls: type[eqx.Module]) -> dict[str, Any]:
    """The settings of a module that a base class of it declares."""
    return {
        field.name: getattr(module, field.name) for field in dataclasses.fields(cls)
    }


def _as_meter(progress: Progress) -> AbstractProgressMeter | None:
    return None if progress is None else as_meter(progress)


class AbstractOnMesh(eqx.Module):
    """A kernel function whose rows can be distributed over an axis of a mesh."""

    _: dataclasses.KW_ONLY
    mesh: Mesh | None = eqx.field(static=True, default=None)
    mesh_axis: str | None = eqx.field(static=True, default=None)
    # Static, so that the meter stays the same object while it counts.
    progress: AbstractProgressMeter | None = eqx.field(
        static=True, converter=_as_meter, default=None
    )

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel."""

    @property
    def row_axis(self) -> MeshAxis | None:
        """The axis of the mesh over which rows are distributed."""
        return check_mesh(self.mesh, self.mesh_axis)


class AbstractStored(AbstractOnMesh):
    """A kernel function whose results can be stored elsewhere, or reduced."""

    _: dataclasses.KW_ONLY
    store: AbstractStore | Literal["device"] = eqx.field(
        converter=as_store, default="device"
    )
    reduce: PyTree = None

    @property
    def is_stored(self) -> bool:
        return isinstance(self.store, AbstractStore)

    @property
    def destination(self) -> Destination:
        fields = vars(self)  # Attributes of a Module take longer.
        settings = fields["reduce"], fields["store"], fields["progress"]
        return Destination(self.row_axis, *settings)

    def __check_init__(self) -> None:
        remedy = "With `reduce`, no kernel is kept. Leave one of them out."
        store = self.store if self.is_stored else None
        check_exclusive(remedy, store=store, reduce=self.reduce)

    @property
    def is_plain(self) -> bool:
        """Whether a kernel is returned as a whole, by one program on the device."""
        # Attributes of a Module take longer.
        fields = vars(self)
        is_whole = fields["reduce"] is None and fields["progress"] is None
        is_on_one = fields["mesh"] is None and fields["mesh_axis"] is None
        return is_whole and is_on_one and type(fields["store"]) is str

    def check_progress(self) -> None:
        """Raises for a meter of blocks that one program on several devices computes."""
        # For a store, tiles are programs of their own, which can be counted.
        on_mesh = self.row_axis is not None
        if on_mesh and not self.is_stored and self.progress is not None:
            raise ValueError(
                "`progress` on a `mesh` needs a `store`: on the devices, the kernel is "
                "one program. Use `store='host'`, or leave one of them out."
            )


class AbstractBatchKernel(AbstractTransform, AbstractOnMesh, Generic[_X1, _X2, P, Out]):
    """`filter_batch_kernel` with results of the type of the kernel function's."""

    kernel_fn: Callable[Concatenate[_X1, _X2, P], Out]
    _: dataclasses.KW_ONLY
    block_size: BlockSize = eqx.field(
        static=True, converter=check_block_size, default=MemoryBudget()
    )
    in_axes: PyTree = eqx.if_array(0)
    out_axes: PyTree = (0, 1)
    symmetric: bool | Callable[[PyTree], PyTree] | None = None
    pairwise: bool = False

    def __call__(
        self, x1: _X1, x2: _X2 | None = None, *args: P.args, **kwargs: P.kwargs
    ) -> Out:
        __tracebackhide__ = True
        return self.apply((x1, x2, *args), kwargs)


class BatchKernel(AbstractBatchKernel[_X1, _X2, P, Out], AbstractStored):
    """Computes any kernel function in blocks of rows and columns.

    A kernel function `kernel_fn(x1, x2=None, *args, **kwargs)` takes `n1` and `n2`
    examples and returns a value for each pair of them. The transformed function calls
    it for one block of rows and one block of columns at a time. It assembles the
    results on the device, in host memory or on disk, or reduces them on the fly without
    storing the kernel.

    If `x2` is omitted, or is `x1` itself, both inputs are the same. For a symmetric
    kernel, only the blocks on and above the diagonal are then computed, and the result
    is exactly symmetric. If `x2` is omitted, `kernel_fn` is also called without it for
    blocks on the diagonal.

    It can be used as a decorator with arguments, and on methods.

    **Arguments:**

    - `kernel_fn`: the kernel function, such as an [`eqxbatch.EmpiricalNTK`][].
    - `block_size`: the largest number of rows and columns in a block: an int, a pair of
        ints, an [`eqxbatch.MemoryBudget`][], or None to compute the whole kernel at
        once. The default is `MemoryBudget()`, the free memory of the device. All blocks
        have the same shape and are balanced. If their size does not divide the number
        of examples, the last block overlaps with the previous one. Blocks are square
        without `x2`.
    - `in_axes`: the axes of the examples, which are the same in `x1` and `x2`: a PyTree
        prefix of either, as for `equinox.filter_vmap`. The default is axis 0 of all
        arrays.
    - `out_axes`: the axes of the rows and of the columns in the result of `kernel_fn`:
        a pair, `(0, 1)` by default, or a PyTree prefix of the result with such pairs.
        None stands for a missing axis: `(0, None)` is for a result with one value for
        each row, such as a diagonal or a mask.
    - `symmetric`: whether exchanging `x1` and `x2` transposes the result (and
        conjugates it if it is complex). If exchanging them changes more than that, pass
        a function from the result for a block to the result with the inputs exchanged,
        such as `lambda k: k.transpose(1, 0, 3, 2)` for one matrix for each pair of
        examples, which is transposed as well. `True` is refused if further axes of the
        result have the same size, because it does not say whether they are exchanged.
        The default is the attribute `symmetric` of `kernel_fn`, which the estimators of
        this package have, or False without it. Blocks on the diagonal are compared with
        their mirror images, up to a third of the digits, to find mistakes. This finds
        none in blocks of one row, nor if only the other blocks lack symmetry.
    - `pairwise`: whether `kernel_fn` is a function of one example of each input, such
        as `lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))`. It then receives a pair of
        keys as `key`, and keyword arguments that are pairs have one element for each of
        the two examples. Rows and columns are the first axes of the result.
    - `reduce`: reduces the kernel on the fly instead of storing it: an
        [`eqxbatch.AbstractReduction`][] such as [`eqxbatch.KernelProduct`][] or
        [`eqxbatch.TopK`][], or a PyTree prefix of the result with reductions as leaves.
    - `mesh`: a `jax.sharding.Mesh` to distribute the rows over; each device computes
        its own blocks. The number of devices need not divide the number of examples,
        but if it does not divide the number of rows, the result is replicated on all
        devices. The mesh can span the processes of `jax.distributed`; all processes
        must then call the function with the same arguments. With a `store`, it must
        have devices of all processes, or only of the one that calls it.
    - `mesh_axis`: the name of the mesh axis; optional if there is only one.
    - `store`: where the kernel is stored: `"device"`, `"host"` for NumPy arrays in host
        memory, or a path for arrays on disk, where a run can be resumed. Or the URL of
        a bucket and a prefix, such as `"s3://bucket/kernel"`, or a store of zarr. Or an
        [`eqxbatch.HostStore`][] or [`eqxbatch.ZarrStore`][], whose settings a path
        leaves at their defaults.
    - `progress`: True for a progress bar, an [`eqxbatch.TqdmProgressMeter`][], which
        also counts NaNs; another [`eqxbatch.AbstractProgressMeter`][]; None or False
        for none. With a `mesh`, it needs a `store`.

    **Returns:**

    A function `(x1, x2=None, *args, key=None, **kwargs)` that returns the same PyTree
    as `kernel_fn`, with arrays of shape `(n1, n2, ...)`. Everything else in the result
    must be the same for all blocks.

    - `x1`, `x2`: PyTrees whose arrays have the examples along the same axis. Some can
        be on disk, such as `numpy.memmap` and `zarr.Array`, or be anything else with a
        shape that is read by slices, with the examples along axis 0. Rows are read when
        their block is computed.
    - `args`: passed on unchanged.
    - `key`: a random key, which is split into a pair, or a pair of keys for the two
        inputs. Each of them is split into one key for each example, and `kernel_fn` is
        called with `key=(keys1, keys2)`. The keys do not depend on the block size.
    - `kwargs`: a pair (tuple) of arrays, or of PyTrees of arrays, belongs to the
        examples of the two inputs, along axis 0. `kernel_fn` receives the same rows of
        them as of `x1` and `x2`. Without `x2`, the second element can be None.
        Everything else is passed on unchanged.

    With `store="device"`, without `progress`, and with examples in memory, the function
    is a single compiled program. It can be used inside `jax.jit`, `jax.vmap`,
    `jax.grad` and other transforms; reverse mode recomputes blocks instead of storing
    them. Otherwise, it is a Python loop over compiled blocks. After an error or Ctrl-C,
    a run with an [`eqxbatch.ZarrStore`][] can be resumed.

    **Raises:**

    - `ValueError` for a size below 1, different numbers of examples, an axis out of
        range, a result that lacks the axes in `out_axes` or changes in other ways with
        the block, an unknown `mesh_axis`, `out_axes` together with `pairwise`, a
        `store` together with `reduce`, `progress` with a `mesh` but no `store`,
        `symmetric=True` for a kernel of `x1` with itself whose further axes have the
        same size, a `symmetric` that blocks on the diagonal contradict, and examples on
        disk with another batch axis than 0, or on several devices. Within `jax.jit` and
        other transforms, a wrong `symmetric` is an error at run time, as of
        `equinox.error_if`, or on several devices a result of NaNs.
    - `TypeError` for settings of the wrong type, and for stores, `progress` or examples
        on disk inside `jax.jit` and other transforms.

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

    def __check_init__(self) -> None:
        if self.pairwise and self.out_axes != (0, 1):
            raise ValueError(
                "With `pairwise=True`, rows and columns are the first axes of the "
                f"result; got `out_axes={self.out_axes!r}`. Leave it out."
            )
        self.check_progress()

    def __call__(
        self, x1: _X1, x2: _X2 | None = None, *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        __tracebackhide__ = True
        # A method that is read from a Module is a new Module, which takes longer.
        return BatchKernel.apply(self, (x1, x2, *args), kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        # The examples are the first arguments, so the instance belongs to the function.
        del owner
        if instance is None:
            return self
        return dataclasses.replace(
            self, kernel_fn=eqx.Partial(self.kernel_fn, instance)
        )

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        return computed(BatchKernel.called(self, *args, **kwargs), self.destination)

    def called(
        self,
        x1: PyTree,
        x2: PyTree = None,
        /,
        *args: Any,
        key: Any = None,
        **kwargs: Any,
    ) -> FunctionCall:
        """A call with these examples."""
        fun: Any = self.kernel_fn
        # Estimators and other kernel functions may know that they are symmetric.
        symmetric = self.symmetric
        if symmetric is None:
            symmetric = getattr(fun, "symmetric", False)
        # The free memory is looked up before tracing.
        sizes = sizes_of(self.block_size)
        axes = self.in_axes, getattr(fun, "kwargs_axes", {})
        # Sides are told apart by identity, which only the caller's own objects have.
        sides, shared = Examples(x1, x2, key, kwargs).in_sides(*axes)
        call = FunctionCall(
            kernel_fn=fun,
            args=args,
            sides=sides,
            shared=shared,
            out_axes=self.out_axes,
            is_alone=x2 is None,
            pairwise=self.pairwise,
            symmetric=None if symmetric is False else symmetric,
            sizes=sizes,
            room=0,
        )
        # Only factors, and rows that are read, are kept. For all else `room` is 0,
        # because it is static: another amount of free memory would be another program.
        keeps = isinstance(fun, AbstractKernelFunction) or call.has_stored
        return dataclasses.replace(call, room=room_of(sizes)) if keeps else call


def computed(call: AbstractKernelCall, destination: Destination) -> PyTree:
    """The arrays of a kernel."""
    return _driver(call, destination)(call, destination)


_Driver = Callable[[AbstractKernelCall, Destination], PyTree]


def _driver(call: AbstractKernelCall, destination: Destination) -> _Driver:
    """What computes a kernel: one program, or a loop in Python."""
    if isinstance(destination.store, AbstractStore):
        return _to_store
    # Programs cannot read, nor tell how far they are.
    if call.has_stored or destination.meter is not None:
        return _tile_by_tile
    return _on_device


def _on_device(call: AbstractKernelCall, destination: Destination) -> PyTree:
    # Blocks can start anywhere, which a mesh with explicit axes does not allow.
    call, reduce = gathered((call, destination.reduce), destination.mesh)
    output = _run_on_device(call, reduce, destination.mesh_axis)
    # Types of results need not say that they are on a mesh with automatic axes.
    with on_devices_of(call):
        return checked_output(output, is_sharded=destination.mesh_axis is not None)


@compiled
def _run_on_device(
    call: AbstractKernelCall, reduce: PyTree, mesh_axis: MeshAxis | None
) -> KernelOutput:
    with within_mesh((call, reduce)):
        return _on_devices(ready(call, reduce, mesh_axis), reduce, mesh_axis)


def _on_devices(
    kernel: AbstractBlockKernel, reduce: PyTree, mesh_axis: MeshAxis | None
) -> KernelOutput:
    if mesh_axis is not None:
        return on_mesh(kernel, reduce, mesh_axis)
    # A function may return arrays on a mesh that none of its arguments is on.
    kernel, reduce = on_mesh_of_results(kernel, reduce)
    with within_mesh((kernel, reduce)):
        return output_on_device(kernel, reduce)


def _tile_by_tile(call: AbstractKernelCall, destination: Destination) -> PyTree:
    stored, (call, reduce) = _stored_of(call), _on_host(call, destination)
    kernel = ready(call, reduce, by_tiles=bool(stored))
    return tile_by_tile(kernel, stored, destination._replace(reduce=reduce))


def _to_store(call: AbstractKernelCall, destination: Destination) -> PyTree:
    stored, (call, _) = _stored_of(call), _on_host(call, destination)
    # Each tile is a program of its own devices, whatever mesh the caller has set.
    with on_no_mesh():
        kernel = ready(call, by_tiles=True, on_device=False)
        return to_store(kernel, stored, destination)


def _stored_of(call: AbstractKernelCall) -> list[Stored | None]:
    """What is read for each block of the sides; empty if all are in memory."""
    return [side.stored for side in call.sides] if call.has_stored else []


class _Operands(NamedTuple):
    """What compiled programs of blocks are called with."""

    call: AbstractKernelCall
    reduce: PyTree


def _on_host(call: AbstractKernelCall, destination: Destination) -> _Operands:
    """A call and a reduction for a loop in Python, which is not transformed."""
    is_read, is_stored = call.has_stored, isinstance(destination.store, AbstractStore)
    call, reduce = jtu.tree_map(as_jax_array, in_memory(call)), destination.reduce
    what = "a `store`" if is_stored else "`progress`"
    if is_read:
        what = "examples that are not in memory"
    check_concrete((call, reduce), what)
    if is_read:
        mesh = destination.mesh
        # Rows are read for one device: on several, each would need blocks of its own.
        fits = mesh is None or (is_stored and len(mesh.local_devices) == 1)
        if not fits or explicit_mesh((call, reduce)):
            raise ValueError(
                "Examples that are not in memory go to one device of each process: a "
                "`mesh` needs a `store`, one device of this process, and no arrays on "
                "Explicit axes. Read them by `numpy.asarray`, or leave it out."
            )
    return _Operands(*gathered((call, reduce), destination.mesh))


def on_one_device(call: AbstractKernelCall) -> AbstractBlockKernel:
    """The kernel as one device computes it, in blocks."""
    # As for a store, because the whole kernel may not fit.
    return ready(gathered(in_memory(call)), by_tiles=True, on_device=False)


class _Sized(NamedTuple):
    """What the program is called with that is measured, with arguments of `ready`."""

    call: AbstractKernelCall
    reduce: PyTree
    mesh_axis: MeshAxis | None
    by_tiles: bool


def ready(
    call: AbstractKernelCall,
    reduce: PyTree = None,
    mesh_axis: MeshAxis | None = None,
    *,
    by_tiles: bool = False,
    on_device: bool = True,
) -> AbstractBlockKernel:
    """The kernel of a call, in blocks that fit into its budget, if it has one.

    A kernel is computed by one program, or by one for each tile. It is kept
    `on_device` unless it is reduced.
    """
    size = call.sizes
    if not isinstance(size, MemoryBudget):
        return call.kernel()
    replace: Any = dataclasses.replace
    # A single block of everything has the sizes by which memory is shared out.
    whole = replace(call, sizes=(None, None)).kernel()
    if by_tiles and whole.grid.is_empty:
        return whole

    # The memory that the kernel leaves is for factors of examples and for blocks.
    budget, taken = size.resolve(), 0
    if on_device and reduce is None:
        taken = num_bytes([leaf.struct(whole.totals) for leaf in whole.leaves])
    left = max(budget - taken, 0)
    largest = max(whole.totals)
    if by_tiles:
        # Some blocks are being copied while the next one is computed.
        left //= IN_FLIGHT + 1
        if any(rows.are_stored for rows in whole.rows):
            # Half of the memory is for rows that are read.
            pair = num_bytes([x.arrays for x in whole.structs((1, 1))])
            left, least = left // 2, taken + 2 * (IN_FLIGHT + 1) * pair
            check_at_least("block_size", budget, least, "Blocks of a row take so much.")
            largest = min(largest, left // max(pair, 1))
        size = MemoryBudget(max(left, 1))
    elif any(whole.bytes_kept):
        call = replace(call, room=left // SHARE)
    with_area = lambda call, area: replace(
        call, sizes=(math.isqrt(area), math.isqrt(area))
    )
    operands = _Sized(call, reduce, mesh_axis, by_tiles)

    # Memory is affine in the area of a block.
    def run(area: int) -> Callable[[_Sized], Any]:
        def program(blocks: list[Rows | None], operands: _Sized) -> Any:
            kernel = with_area(operands.call, area).kernel()
            if operands.by_tiles:
                return tile_program(kernel, blocks)
            return _on_devices(kernel, operands.reduce, operands.mesh_axis)

        # Rows that are not in memory are arguments, as once they have been read.
        structs = whole.structs(with_area(whole, area).grid.sizes)
        pairs = zip(whole.rows, structs, strict=True)
        return eqx.Partial(program, [y if x.are_stored else None for x, y in pairs])

    try:
        area = resolve_size(size, largest**2, run, operands, first=16**2)
    except ValueError as e:
        e.add_note("A kernel that is too large itself can go to `store='host'`.")
        raise
    return with_area(call, area).kernel()


filter_batch_kernel = also_decorator(
    "filter_batch_kernel", BatchKernel, AbstractBatchKernel
)
