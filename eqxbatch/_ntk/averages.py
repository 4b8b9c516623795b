"""Running averages of kernels of random models, on devices and on the host."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .._base.checks import check_equal
from .._base.dtypes import accumulation_dtype
from .._base.jaxprs import compiled
from .._base.mesh import is_explicit
from .._base.trees import described
from .._batch.accumulators import AbstractAccumulator
from .._batch.memory import MemoryBudget, resolve_size
from .._batch.moments import merged, RunningMean, Variance, VarianceState
from .._kernels.batch_kernel import settings_of
from .._kernels.calls import MeshAxis
from .._maps.micro_vmap import MicroVmap
from .estimator import in_blocks, KernelTask, TaskKernel
from .output_axes import Mirror
from .random_model import RandomModels
from .request import AbstractRequest, ModelRequest, named


class _Resumed(AbstractAccumulator[VarianceState]):
    """Accumulates moments starting from earlier ones, without finalizing them."""

    moments: RunningMean | Variance
    state: VarianceState | None

    def init(self, value: Any, blocks: Any) -> VarianceState:
        return self.moments.init(value, blocks) if self.state is None else self.state

    def update(self, state: VarianceState, value: Any, block: Any) -> VarianceState:
        return self.moments.update(state, value, block)

    def finalize(self, state: VarianceState) -> Any:
        return state.whole()

    def aggregate(self, values: Any, block: Any) -> VarianceState:
        return self.moments.aggregate(values, block)


def _is_spread(x: Any) -> bool:
    return isinstance(x, VarianceState)


class Request(eqx.Module):
    """The requested kernels, and their examples."""

    names: tuple[str, ...] = eqx.field(static=True)
    with_error: bool = eqx.field(static=True)
    x1: PyTree
    x2: PyTree
    key: Any
    kwargs: dict[str, Any]

    @property
    def moments(self) -> RunningMean | Variance:
        return Variance(ddof=1) if self.with_error else RunningMean()

    def average(
        self, samples: "Samples", start: int, num: int, *, is_final: bool
    ) -> "Average":
        """The average of `num` samples from index `start`, for any block."""
        at = jnp.asarray(start, jnp.int32)
        of_block = samples.of_block()
        return Average(of_block, self.names, self.with_error, at, num, is_final)


def _in_a_list(*kernels: PyTree) -> list[PyTree]:
    return [*kernels]


class Samples(AbstractRequest):
    """Random models, and how many of their kernels are computed at once, and how."""

    models: RandomModels
    per_batch: int | MemoryBudget | None = eqx.field(static=True)
    rows: MeshAxis | None
    samples: MeshAxis | None

    @property
    def num_devices(self) -> int:
        return 1 if self.samples is None else self.samples.num

    def of_block(self) -> "Samples":
        """The same samples for a block of a kernel, which is computed as a whole."""
        return dataclasses.replace(self, rows=None, block_size=None)

    def sizes(self, num: int) -> list[int]:
        """The batch sizes of samples, so that all devices have equally many."""
        assert isinstance(self.per_batch, int)
        step = self.per_batch * self.num_devices
        rest = num % step
        shared = rest - rest % self.num_devices
        return [*[step] * (num // step), *filter(None, (shared, rest - shared))]

    def __call__(self, request: Request, index: Array) -> list[PyTree[Array]]:
        """The kernels of one sample."""
        if self.rows is None and self.samples is not None:
            # `vmap` gives each device its own samples.
            of_one = dataclasses.replace(self, samples=None)
            dynamic, static = eqx.partition((of_one, request), eqx.is_array)

            def body(dynamic: PyTree, index: Array) -> list:
                of_one, request = eqx.combine(dynamic, static)
                return of_one(request, index)

            everywhere = PartitionSpec()
            return jax.shard_map(
                body,
                mesh=self.samples.mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                # As in `on_devices`. Besides, only `vmap` knows what varies.
                check_vma=False,
            )(dynamic, index)

        model = self.models.draw(index)
        selection = self.models.selection(model) if "ntk" in request.names else None
        of_kernel = self if self.rows is None else self.of_block()
        settings = settings_of(of_kernel, AbstractRequest)
        model_request = ModelRequest(model, selection, **settings)
        task = KernelTask(request.names)
        kernel_fn = TaskKernel(model_request, task, _in_a_list)
        if self.rows is not None:
            mesh, name = self.rows.mesh, self.rows.name
            kernel_fn = in_blocks(
                self, kernel_fn, out_axes=None, mesh=mesh, mesh_axis=name
            )
        return kernel_fn(request.x1, request.x2, key=request.key, **request.kwargs)

    def advanced(
        self, request: Request, state: PyTree, start: Any, num: int
    ) -> PyTree[VarianceState]:
        """The moments after `num` more samples, from index `start`."""
        moments = request.moments
        accumulator: PyTree = _Resumed(moments, None)
        if state is not None:
            accumulator = jtu.tree_map(
                lambda spread: _Resumed(moments, spread), state, is_leaf=_is_spread
            )
        size = self.per_batch
        if isinstance(size, int):
            size *= self.num_devices
        transform = MicroVmap(
            functools.partial(self, request),
            in_axes=(0,),
            out_axes=eqx.if_array(0),
            accumulator=accumulator,
            microbatch_size=size,
            vmap_fn=jax.vmap if self.samples is None else _spread_vmap(self.samples),
        )
        index = start + jnp.arange(num, dtype=jnp.int32)
        return transform.apply((index,), {})


def _spread_vmap(axis: MeshAxis) -> Callable[..., Callable[[list], Any]]:
    """`jax.vmap` over samples, which are distributed over devices if possible."""

    def vmap(fun: Callable, in_axes: Any, out_axes: Any) -> Callable[[list], Any]:
        def run(rows: list) -> Any:
            (num,) = {x.shape[0] for x in rows}
            name = axis.name if num % axis.num == 0 else None
            if name is not None:
                # With JAX 0.12, types on a mesh with Explicit axes must say so, too.
                along = NamedSharding(axis.mesh, PartitionSpec(name))
                to = lambda x: jax.sharding.reshard(x, along) if is_explicit(x) else x
                rows = [*map(to, rows)]
            return jax.vmap(fun, in_axes, out_axes, spmd_axis_name=name)(rows)

        return run

    return vmap


# Everything that changes between batches of samples is donated, or is a number.
@functools.partial(compiled, donate="all-except-first")
def _advanced(call: tuple, state: PyTree) -> PyTree[VarianceState]:
    samples, request, start, num = call
    return samples.advanced(request, state, start, num)


@compiled
def _start(samples: Samples, request: Request) -> PyTree[VarianceState]:
    """The moments of zero samples."""
    structs = eqx.filter_eval_shape(samples.advanced, request, None, 0, 1)
    return jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), structs)


@compiled
def estimated(state: PyTree[VarianceState], with_error: bool) -> tuple[list, list]:
    """The means, and their standard errors if requested."""
    return _estimated(state, with_error, jnp)


def _estimated(state: PyTree, with_error: bool, xp: Any) -> tuple[list, list]:
    """As `estimated`, with the library of the arrays."""

    def error(spread: VarianceState) -> Any:
        # The variance may be out of the range of the mean's dtype.
        count = xp.asarray(spread.count).astype(spread.squares.dtype)
        found = xp.sqrt(spread.squares / count / (count - 1))
        return found.astype(jnp.finfo(spread.dtype).dtype)

    mean = lambda spread: spread.mean.astype(spread.dtype)
    means = jtu.tree_map(mean, state, is_leaf=_is_spread)
    errors = jtu.tree_map(error, state, is_leaf=_is_spread) if with_error else []
    return means, errors


def _resumed(mean: Any, error: Any, num: int, dtype: Any, xp: Any) -> VarianceState:
    """The moments of an earlier estimate.

    `dtype` is that of the kernels; moments are accumulated in a wider one.
    """
    wide = accumulation_dtype("Mean", dtype, None, inexact=True)
    real = jnp.finfo(wide).dtype
    squares = xp.zeros(mean.shape, real)
    if num > 1:
        squares = xp.asarray(error).astype(real) ** 2 * (num * (num - 1.0))
    return VarianceState(xp.asarray(mean, wide), squares, num, num, dtype)


def check_tol(tol: float | None) -> float | None:
    """The tolerance as a number; raises `ValueError` if it is not positive."""
    try:
        value = None if tol is None else float(tol)
    except (TypeError, ValueError):
        value = float("nan")
    if value is not None and not value > 0:
        raise ValueError(
            "`tol` must be a positive number, the relative standard error to reach, or "
            f"None; got {tol!r}."
        )
    return value


def relative_error(means: list, errors: list) -> float:
    """The norm of the errors divided by that of the kernel, for the worst kernel."""
    norm = lambda tree: float(np.linalg.norm([*map(_norm, jtu.tree_leaves(tree))]))
    pairs = [(norm(e), norm(m)) for m, e in zip(means, errors, strict=True)]
    return max(error / mean if mean else float(error > 0) for error, mean in pairs)


def _norm(x: Any) -> float:
    """The norm of all entries in at least float32; that of a NumPy array by NumPy."""
    dtype = accumulation_dtype("Sum", x.dtype, None, inexact=True)
    module: Any = np if isinstance(x, np.ndarray) else jnp
    return float(module.linalg.norm(module.ravel(module.asarray(x, dtype))))


def count_nans(means: list) -> int:
    return sum(int(jnp.sum(jnp.isnan(x))) for x in jtu.tree_leaves(means))


class Average(eqx.Module):
    """The average of some samples over a block of examples, as a kernel function.

    `is_final` says whether it returns means and errors, or moments to merge.
    """

    samples: Samples
    names: tuple[str, ...] = eqx.field(static=True)
    with_error: bool = eqx.field(static=True)
    start: Array
    num: int = eqx.field(static=True)
    is_final: bool = eqx.field(static=True)

    @property
    def symmetric(self) -> Mirror:
        return self.samples.symmetric

    @property
    def kwargs_axes(self) -> dict[str, PyTree]:
        return self.samples.vmap_axes.kwargs

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Any = None, **kwargs: Any
    ) -> PyTree:
        request = Request(self.names, self.with_error, x1, x2, key, kwargs)
        samples = self.samples
        if isinstance(samples.per_batch, MemoryBudget):
            # The program of a block is the one that must fit.
            samples = fitted(samples, request, self.num)
        state = samples.advanced(request, None, self.start, self.num)
        if self.is_final:
            return estimated(state, self.with_error)
        # Counts have no rows or columns.
        without = lambda x: VarianceState(x.mean, x.squares, None, None, x.dtype)
        return jtu.tree_map(without, state, is_leaf=_is_spread)


class Mean(eqx.Module):
    """Only the means of an average, in the form in which estimators return kernels."""

    average: Average
    get: Any = eqx.field(static=True)

    @property
    def symmetric(self) -> Mirror:
        return self.average.symmetric

    @property
    def kwargs_axes(self) -> dict[str, PyTree]:
        return self.average.kwargs_axes

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        means, _ = self.average(*args, **kwargs)
        return named(self.get, self.average.names, means)


def _check_previous(mean: Any, error: Any, shape: tuple[int, ...] | None) -> None:
    """Raises if the moments of an earlier estimate do not fit this one.

    The shape is None if it is not known yet.
    """
    remedy = "Pass an estimate for the same examples, from the same model."
    parts = {"kernel": mean, "standard_error": error}
    for name, x in parts.items():
        what = f"`{name}` of `previous`"
        if not hasattr(x, "shape") or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"{what} must be an array of an inexact dtype; got {described(x)}. "
                f"{remedy}"
            )
        shape = x.shape if shape is None else shape
        check_equal(f"The shape of {what}", x.shape, shape, remedy)


def parts_of(previous: Any, get: Any, names: tuple[str, ...]) -> tuple[list, list]:
    """The kernels of an earlier estimate, and their standard errors."""
    parts = previous.kernel, previous.standard_error
    if isinstance(get, str):
        return [parts[0]], [parts[1]]
    if not all(isinstance(x, tuple) and len(x) == len(names) for x in parts):
        raise ValueError(
            f"`previous` must be of the kernels {names}, as `get` says; got "
            f"{jtu.tree_structure(parts[0])}. Pass the `get` that it was made with."
        )
    return [*parts[0]], [*parts[1]]


class OnDevice:
    """Moments on the devices, updated by one compiled batch of samples at a time."""

    def __init__(self, samples: Samples, request: Request):
        self.samples = samples
        self.request = request
        self.is_traced = any(
            isinstance(x, Tracer) for x in jtu.tree_leaves((samples, request))
        )

    def start(self) -> PyTree[VarianceState]:
        return _start(self.samples, self.request)

    def resumed(self, means: list, errors: list, num: int) -> PyTree[VarianceState]:
        """The moments of an earlier estimate."""

        def moments(spread: VarianceState, mean: Any, error: Any) -> VarianceState:
            _check_previous(mean, error, spread.mean.shape)
            found = _resumed(mean, error, num, spread.dtype, jnp)
            count = jnp.array(num, jnp.int32)
            # Copies: the state is donated, but the estimate is the user's.
            mean, again = jnp.array(found.mean), jnp.array(count)
            return VarianceState(mean, found.squares, count, again, found.dtype)

        state = self.start()
        spreads, treedef = jtu.tree_flatten(state, is_leaf=_is_spread)
        try:
            found = [treedef.flatten_up_to(part) for part in (means, errors)]
        except ValueError as e:
            raise ValueError(
                "`previous` must have the structure of what the model returns; got "
                f"{jtu.tree_structure(means)} for {treedef}. Pass an estimate from the "
                "same model."
            ) from e
        return jtu.tree_unflatten(treedef, [*map(moments, spreads, *found)])

    def sizes(self, num: int) -> list[int]:
        """The sizes of batches of samples; the estimate is inspected after each."""
        # A traced call is one program, in which this loop would be unrolled.
        return [num] if self.is_traced else self.samples.sizes(num)

    def advanced(
        self, state: PyTree[VarianceState], start: int, num: int
    ) -> PyTree[VarianceState]:
        at = jnp.asarray(start, jnp.int32)
        return _advanced((self.samples, self.request, at, num), state)

    def estimated(self, state: PyTree[VarianceState]) -> tuple[list, list]:
        return estimated(state, self.request.with_error)


class OnHost:
    """Moments in NumPy, for kernels that do not fit on a device."""

    def __init__(
        self,
        samples: Samples,
        request: Request,
        run: Callable[[Average, Request], PyTree],
        *,
        in_batches: bool,
    ):
        self.samples = samples
        self.request = request
        self.run = run
        self.in_batches = in_batches

    def start(self) -> None:
        return None

    def resumed(self, means: list, errors: list, num: int) -> list[PyTree]:
        """The moments of an earlier estimate."""

        def moments(mean: Any, error: Any) -> VarianceState:
            _check_previous(mean, error, None)
            return _resumed(mean, error, num, mean.dtype, np)

        return jtu.tree_map(moments, means, errors)

    def sizes(self, num: int) -> list[int]:
        # If possible, each block is copied to the host only once, for all samples.
        return self.samples.sizes(num) if self.in_batches else [num]

    def advanced(self, state: Any, start: int, num: int) -> list[PyTree]:
        average = self.request.average(self.samples, start, num, is_final=False)
        more = self.run(average, self.request)
        counted = lambda x: VarianceState(x.mean, x.squares, num, num, x.dtype)
        more = jtu.tree_map(counted, more, is_leaf=_is_spread)
        if state is None:
            return more
        return jtu.tree_map(_merged_on_host, state, more, is_leaf=_is_spread)

    def estimated(self, state: list[PyTree]) -> tuple[list, list]:
        with np.errstate(all="ignore"):
            return _estimated(state, self.request.with_error, np)


def _merged_on_host(state: VarianceState, more: VarianceState) -> VarianceState:
    _check_previous(state.mean, state.mean, more.mean.shape)
    with np.errstate(all="ignore"):
        return merged(state, more, np)


def fitted(samples: Samples, request: Request, num: int) -> Samples:
    """With the largest batches of samples that fit into a budget."""

    def run(size: int) -> Callable[[tuple], PyTree]:
        def program(operands: tuple) -> PyTree:
            samples, request = operands
            samples = dataclasses.replace(samples, per_batch=size)
            return samples.advanced(request, None, 0, num)

        return program

    assert isinstance(samples.per_batch, MemoryBudget)
    largest = -(-num // samples.num_devices)
    size = resolve_size(samples.per_batch, largest, run, (samples, request))
    return dataclasses.replace(samples, per_batch=size)
