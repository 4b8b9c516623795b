"""Random models, and running averages of their kernels, on devices and on the host."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .._base.checks import check_callable, check_equal
from .._base.cpu import in_opaque_branch, opaque_true
from .._base.dtypes import accumulation_dtype
from .._base.jaxprs import compiled, evaluate_jaxpr
from .._base.mesh import is_explicit
from .._base.mistakes import no_arrays_remedy
from .._base.trees import described, safe_zip, shown, type_of
from .._batch.accumulators import AbstractAccumulator
from .._batch.memory import MemoryBudget, resolve_size, resolved
from .._batch.moments import AbstractSummary, Mean, Variance, VarianceState
from .._kernels.on_mesh import MeshAxis, on_devices
from .._maps.micro_vmap import MicroVmap
from .estimator import (
    has_state,
    in_blocks,
    named,
    names_of,
    Request,
    selection_of,
    StatefulModel,
)
from .output_axes import Mirror


class _Resumed(AbstractAccumulator[VarianceState]):
    """Accumulates moments starting from earlier ones, without finalizing them."""

    moments: AbstractSummary
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


# `x1`, `x2`, the key and keyword arguments of a call.
Examples = tuple[PyTree, PyTree, Any, dict[str, Any]]


class Average(eqx.Module):
    """The average of the kernels of random models, as a kernel function.

    - `request`: the kernels, and how they are computed for one model.
    - `init`, `key`, `where`, `filter_spec`: the models, and which of their leaves are
        parameters.
    - `per_batch`: the number of samples that are computed at a time, on each device.
    - `rows`, `samples`: the axes of the mesh over which rows of kernels and samples are
        distributed.
    - `with_error`: whether standard errors are computed, too.
    - `start`, `num`: the index of the first sample, and the number of samples.
    - `form`: what a call returns: "moments" to merge with others, the means and errors
        of an "estimate", or the "mean" in the form in which estimators return kernels.
    """

    request: Request
    init: Callable
    key: Array
    where: Callable | None
    filter_spec: PyTree
    per_batch: int | MemoryBudget = eqx.field(static=True)
    rows: MeshAxis | None
    samples: MeshAxis | None
    with_error: bool = eqx.field(static=True)
    start: Array | int = 0
    num: int = eqx.field(static=True, default=1)
    form: Literal["moments", "estimate", "mean"] = eqx.field(
        static=True, default="estimate"
    )

    @property
    def symmetric(self) -> Mirror:
        return self.request.symmetric

    @property
    def kwargs_axes(self) -> dict[str, PyTree]:
        return self.request.kwargs_axes

    @property
    def num_devices(self) -> int:
        return 1 if self.samples is None else self.samples.num

    def of(self, start: int, num: int, **changes: Any) -> "Average":
        """The average of `num` samples from index `start`."""
        first = jnp.asarray(start, jnp.int32)
        return dataclasses.replace(self, start=first, num=num, **changes)

    def of_blocks(self, start: int, num: int, form: str) -> "Average":
        """As `of`, for blocks of a kernel, each of which is computed as a whole."""
        request = dataclasses.replace(self.request, block_size=None)
        return self.of(start, num, request=request, rows=None, form=form)

    def in_bytes(self) -> "Average":
        """The average with memory budgets resolved to bytes."""
        request = self.request.in_bytes()
        return dataclasses.replace(resolved(self), request=request)

    def fitted(self, examples: Examples) -> "Average":
        """With the largest batches of samples that fit into a budget."""
        if not isinstance(self.per_batch, MemoryBudget):
            return self

        of = lambda average, size: dataclasses.replace(average, per_batch=size)
        run = lambda size: (
            lambda operands: of(operands[0], size).advanced(operands[1], None)
        )
        largest = -(-self.num // self.num_devices)
        size = resolve_size(self.per_batch, largest, run, (self, examples))
        return of(self, size)

    def sizes(self, num: int) -> list[int]:
        """The batch sizes of samples, so that all devices have equally many."""
        assert isinstance(self.per_batch, int)
        step = self.per_batch * self.num_devices
        rest = num % step
        shared = rest - rest % self.num_devices
        return [*[step] * (num // step), *filter(None, (shared, rest - shared))]

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Any = None, **kwargs: Any
    ) -> PyTree:
        examples = x1, x2, key, kwargs
        # With a budget, the program of a block is the one that must fit.
        state = self.fitted(examples).advanced(examples, None)
        if self.form == "moments":
            # Counts have no rows or columns.
            without = lambda x: dataclasses.replace(x, count=None, observations=None)
            return jtu.tree_map(without, state, is_leaf=_is_spread)
        means, errors = estimated(state, self.with_error)
        return (
            named(self.request.get, means) if self.form == "mean" else (means, errors)
        )

    def advanced(self, examples: Examples, state: PyTree) -> PyTree[VarianceState]:
        """The moments after the samples, from those of earlier ones, or None."""
        moments = Variance(ddof=1) if self.with_error else Mean(running=True)
        accumulator: PyTree = _Resumed(moments, None)
        if state is not None:
            accumulator = jtu.tree_map(
                lambda spread: _Resumed(moments, spread), state, is_leaf=_is_spread
            )
        size = self.per_batch
        if isinstance(size, int):
            size *= self.num_devices
        vmap_fn = jax.vmap
        if self.samples is not None:
            vmap_fn = functools.partial(_spread_vmap, self.samples)
        transform = MicroVmap(
            functools.partial(self._of_one, examples),
            in_axes=(0,),
            out_axes=eqx.if_array(0),
            accumulator=accumulator,
            microbatch_size=size,
            vmap_fn=vmap_fn,
        )
        index = self.start + jnp.arange(self.num, dtype=jnp.int32)
        return transform.apply((index,), {})

    def _of_one(self, examples: Examples, index: Array) -> list[PyTree[Array]]:
        """The kernels of one sample."""
        if self.rows is None and self.samples is not None:
            # `vmap` gives each device its own samples.
            operands = dataclasses.replace(self, samples=None), examples, index
            run = lambda operands: operands[0]._of_one(*operands[1:])
            return on_devices(run, operands, self.samples, PartitionSpec())

        model, selection, request = self._drawn(index), None, self.request
        if "ntk" in names_of(request.get):
            selection = selection_of(model, self.where, self.filter_spec)
        size = request.block_size if self.rows is None else None
        kernel_fn = dataclasses.replace(
            request, model=model, selection=selection, block_size=size
        )
        if self.rows is not None:
            mesh, name = self.rows.mesh, self.rows.name
            kernel_fn = in_blocks(
                request, kernel_fn, out_axes=None, mesh=mesh, mesh_axis=name
            )
        x1, x2, key, kwargs = examples
        kernels = kernel_fn(x1, x2, key=key, **kwargs)
        return [kernels] if isinstance(request.get, str) else [*kernels]

    def _drawn(self, index: Array) -> StatefulModel:
        """The model with this index.

        It is drawn in a separate step: otherwise, XLA for CPUs would draw its numbers
        on one core, and again for each use.
        """
        # Outside of the condition: in JAX 0.7, its derivative would raise because only
        # one of the keys is batched.
        key = jr.fold_in(self.key, index)
        closed, structs, static = eqx.filter_make_jaxpr(self.init)(key)
        evaluate = functools.partial(evaluate_jaxpr, closed.jaxpr, closed.consts)
        # Keys and weakly typed numbers cannot be passed through a condition.
        avals: list[Any] = list(closed.out_avals)
        is_random = [
            jnp.issubdtype(aval.dtype, jnp.inexact) and not aval.weak_type
            for aval in avals
        ]
        pick = lambda leaves: list(itertools.compress(leaves, is_random))
        run = lambda key: pick(evaluate([key]))
        bits = jr.key_data(self.key).astype(jnp.float32)
        numbers = in_opaque_branch(run, opaque_true(bits))(key)
        leaves = [
            numbers.pop(0) if is_number else x
            for x, is_number in safe_zip(evaluate([key]), is_random)
        ]
        treedef = jtu.tree_structure(structs)
        drawn = eqx.combine(jtu.tree_unflatten(treedef, leaves), static)
        model, state = drawn if has_state(drawn) else (drawn, None)
        return StatefulModel(model, state, index)


def _spread_vmap(
    axis: MeshAxis, fun: Callable, in_axes: Any, out_axes: Any
) -> Callable[[list], Any]:
    """`jax.vmap` over samples, which are distributed over devices if possible."""

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


# Everything that changes between batches of samples is donated, or is a number.
@functools.partial(compiled, donate="all-except-first")
def _advanced(call: tuple[Average, Examples], state: PyTree) -> PyTree[VarianceState]:
    average, examples = call
    return average.advanced(examples, state)


@compiled
def _start(average: Average, examples: Examples) -> PyTree[VarianceState]:
    """The moments of zero samples."""
    structs = eqx.filter_eval_shape(average.advanced, examples, None)
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
        deviation = xp.sqrt(spread.squares / count / (count - 1))
        return deviation.astype(jnp.finfo(spread.dtype).dtype)

    mean = lambda spread: spread.mean.astype(spread.dtype)
    means = jtu.tree_map(mean, state, is_leaf=_is_spread)
    errors = jtu.tree_map(error, state, is_leaf=_is_spread) if with_error else []
    return means, errors


def _resumed(
    mean: Any, error: Any, num: int, spread: VarianceState | None, xp: Any
) -> VarianceState:
    """The moments of an earlier estimate, like those in `spread` if they are known."""
    _check_previous(mean, error, None if spread is None else spread.mean.shape)
    # Moments are accumulated in a wider dtype than that of the kernels.
    dtype = mean.dtype if spread is None else spread.dtype
    wide = accumulation_dtype("Mean", dtype, None, inexact=True)
    squares = xp.zeros(mean.shape, jnp.finfo(wide).dtype)
    if num > 1:
        squares = xp.asarray(error).astype(squares.dtype) ** 2 * (num * (num - 1.0))
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
    pairs = [(norm(e), norm(m)) for m, e in safe_zip(means, errors)]
    return max(error / mean if mean else float(error > 0) for error, mean in pairs)


def _norm(x: Any) -> float:
    """The norm of all entries in at least float32; that of a NumPy array by NumPy."""
    dtype = accumulation_dtype("Sum", x.dtype, None, inexact=True)
    module: Any = np if isinstance(x, np.ndarray) else jnp
    return float(module.linalg.norm(module.ravel(module.asarray(x, dtype))))


def count_nans(means: list) -> int:
    return sum(int(jnp.sum(jnp.isnan(x))) for x in jtu.tree_leaves(means))


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


def parts_of(previous: Any, get: Any) -> tuple[list, list]:
    """The kernels of an earlier estimate, and their standard errors."""
    parts, names = (previous.kernel, previous.standard_error), names_of(get)
    if isinstance(get, str):
        return [parts[0]], [parts[1]]
    if not all(isinstance(x, tuple) and len(x) == len(names) for x in parts):
        raise ValueError(
            f"`previous` must be of the kernels {names}, as `get` says; got "
            f"{jtu.tree_structure(parts[0])}. Pass the `get` that it was made with."
        )
    return [*parts[0]], [*parts[1]]


@dataclasses.dataclass
class Moments:
    """Running moments, updated by one batch of samples at a time.

    They are on the devices; or in NumPy, for kernels that do not fit there, if
    `run_blocks` computes averages block by block. With `at_once`, all samples are one
    batch.
    """

    average: Average
    examples: Examples
    run_blocks: Callable[[Average, Examples], PyTree] | None
    at_once: bool
    state: PyTree = None

    def __post_init__(self) -> None:
        if self.run_blocks is None:
            self.state = _start(self.average.of(0, 1), self.examples)

    def resume(self, means: list, errors: list, num: int) -> None:
        """Starts from the moments of an earlier estimate."""
        if self.run_blocks is not None:
            of_host = lambda mean, error: _resumed(mean, error, num, None, np)
            self.state = jtu.tree_map(of_host, means, errors)
            return

        def moments(spread: VarianceState, mean: Any, error: Any) -> VarianceState:
            resumed = _resumed(mean, error, num, spread, jnp)
            # Copies: the state is donated, but the estimate is the user's.
            counts = {
                name: jnp.array(num, jnp.int32) for name in ("count", "observations")
            }
            return dataclasses.replace(resumed, mean=jnp.array(resumed.mean), **counts)

        spreads, treedef = jtu.tree_flatten(self.state, is_leaf=_is_spread)
        try:
            moments_of = [treedef.flatten_up_to(part) for part in (means, errors)]
        except ValueError as e:
            raise ValueError(
                "`previous` must have the structure of what the model returns; got "
                f"{jtu.tree_structure(means)} for {treedef}. Pass an estimate from the "
                "same model."
            ) from e
        self.state = jtu.tree_unflatten(treedef, [*map(moments, spreads, *moments_of)])

    def sizes(self, num: int) -> list[int]:
        """The sizes of batches of samples; the estimate is inspected after each."""
        return [num] if self.at_once else self.average.sizes(num)

    def advance(self, start: int, num: int) -> None:
        """Includes `num` more samples, from index `start`."""
        if self.run_blocks is None:
            call = self.average.of(start, num), self.examples
            self.state = _advanced(call, self.state)
            return
        average = self.average.of_blocks(start, num, "moments")
        more = self.run_blocks(average, self.examples)
        counted = lambda x: dataclasses.replace(x, count=num, observations=num)
        more = jtu.tree_map(counted, more, is_leaf=_is_spread)
        if self.state is not None:
            more = jtu.tree_map(_merged_on_host, self.state, more, is_leaf=_is_spread)
        self.state = more

    def estimated(self) -> tuple[list, list]:
        """The means, and their standard errors if requested."""
        with_error = self.average.with_error
        if self.run_blocks is None:
            return estimated(self.state, with_error)
        with np.errstate(all="ignore"):
            return _estimated(self.state, with_error, np)


def _merged_on_host(state: VarianceState, more: VarianceState) -> VarianceState:
    _check_previous(state.mean, state.mean, more.mean.shape)
    with np.errstate(all="ignore"):
        return state.plus(more, np)


def check_models(init: Callable, key: Any) -> None:
    """Raises if `init` returns no models, or models of different structures."""
    check_callable("init", init, "a function from a key to a model")
    drawn = [eqx.filter_eval_shape(init, key) for _ in range(2)]
    model = drawn[0][0] if has_state(drawn[0]) else drawn[0]
    if not callable(model):
        raise TypeError(
            "`init` must return a callable model, or a pair of it and an "
            f"`equinox.nn.State`; got {described(model)}."
        )
    first, second = (
        {
            jtu.keystr(path): type_of(x)
            for path, x in jtu.tree_leaves_with_path(one)
            if hasattr(x, "dtype")
        }
        for one in drawn
    )
    if not first:
        raise ValueError(
            f"`init` must return a model with arrays in it; got {shown(drawn[0])}, "
            f"which is the same for all keys.{no_arrays_remedy(drawn[0])}"
        )
    differing = [
        f"{path}: {first.get(path)} and {second.get(path)}"
        for path in {**first, **second}
        if first.get(path) != second.get(path)
    ]
    if differing:
        raise ValueError(
            "`init` must return models of the same structure for all keys; got "
            f"different arrays for two keys at {'; '.join(differing)}. Only the values "
            "of arrays may depend on the key, and nothing on earlier calls."
        )
