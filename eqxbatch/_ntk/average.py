"""Running averages of kernels, on devices or the host."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .._base.checks import check_equal
from .._base.compile import compiled
from .._base.cpu import in_opaque_branch, opaque_true
from .._base.dtypes import accumulation_dtype
from .._base.jaxprs import run_jaxpr
from .._base.mesh import is_explicit
from .._base.trees import described, safe_zip
from .._batch.blocks import Block
from .._batch.memory import MemoryBudget, resolve_size
from .._batch.sums import AbstractSummary, is_summary, Mean, Variance, VarianceState
from .._kernels.grid import BlockSize
from .._kernels.on_devices import MeshAxis, on_each_device
from .._kernels.sides import Examples
from .._maps.micro_vmap import MicroVmap
from .output_axes import Mirror
from .settings import (
    named,
    names_of,
)
from .traced_model import has_state, StatefulModel


class _Moments(AbstractSummary[VarianceState]):
    """Accumulates moments without finalizing them, to be merged with others."""

    moments: AbstractSummary

    def whole(self, value: PyTree, block: Block) -> VarianceState:
        return self.moments.whole(value, block)

    def finalize(self, state: VarianceState) -> Any:
        return state.whole()

    def aggregate(self, values: PyTree, block: Block) -> VarianceState:
        return self.moments.aggregate(values, block)


def _map(fun: Callable, *states: PyTree[VarianceState]) -> PyTree:
    """`jax.tree.map`, with moments as leaves."""
    return jtu.tree_map(fun, *states, is_leaf=is_summary)


class Average(eqx.Module):
    """The average of the kernels of random models, as a kernel function.

    - `of_model`: makes the estimator of a model, which has these `symmetric` and
        `kwargs_axes`.
    - `get`: the kernels, as for `EmpiricalKernel`.
    - `init`, `key`: the models.
    - `block_size`: the sizes of blocks of a kernel.
    - `per_batch`: the number of samples that are computed at a time, on each device.
    - `rows`, `samples`: the axes of the mesh over which rows of kernels and samples are
        distributed.
    - `with_error`: whether standard errors are computed, too.
    - `start`, `num`: the index of the first sample, and the number of samples.
    - `form`: what a call returns: "moments" to merge with others, the means and errors
        of an "estimate", or the "mean" in the form in which estimators return kernels.
    """

    of_model: Callable
    symmetric: Mirror
    kwargs_axes: dict[str, PyTree]
    get: Any = eqx.field(static=True)
    init: Callable
    key: Array
    block_size: BlockSize = eqx.field(static=True)
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
    def num_devices(self) -> int:
        return 1 if self.samples is None else self.samples.num

    def of(self, start: int, num: int, **changes: Any) -> "Average":
        """The average of `num` samples from index `start`."""
        # An array, so that batches at other places run the same compiled program.
        first = jnp.asarray(start, jnp.int32)
        return dataclasses.replace(self, start=first, num=num, **changes)

    def of_blocks(self, start: int, num: int, form: str, **changes: Any) -> "Average":
        """As `of`, for blocks of a kernel, each of which is computed as a whole."""
        changes = {"block_size": None, "rows": None, "form": form, **changes}
        return self.of(start, num, **changes)

    def fitted(self, examples: Examples) -> "Average":
        """With the largest batches of samples that fit into a budget."""
        # The memory of a candidate is that of the program with its loop over batches.
        of = lambda average, size: dataclasses.replace(average, per_batch=size)
        run = lambda size: lambda operands: of(operands[0], size).moments(operands[1])
        largest = -(-self.num // self.num_devices)
        size = resolve_size(self.per_batch, largest, run, (self, examples))
        return of(self, size)

    def sizes(self, num: int) -> list[int]:
        """The batch sizes of samples, so that all devices have equally many."""
        assert isinstance(self.per_batch, int)
        step = self.per_batch * self.num_devices
        # What remains is one batch that all devices share, and one that they cannot.
        remainder = num % step
        shared = remainder - remainder % self.num_devices
        return [*[step] * (num // step), *filter(None, (shared, remainder - shared))]

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Any = None, **kwargs: Any
    ) -> PyTree:
        examples = Examples(x1, x2, key, kwargs)
        # With a budget, the program of a block is the one that must fit.
        state = self.fitted(examples).moments(examples)
        if self.form == "moments":
            # Counts have no rows or columns.
            without = lambda x: dataclasses.replace(x, count=None, observations=None)
            return _map(without, state)
        means, errors = estimated(state, self.with_error)
        return named(self.get, means) if self.form == "mean" else (means, errors)

    def moments(self, examples: Examples) -> PyTree[VarianceState]:
        """The moments of the samples."""
        # A running mean has the state of a variance, of which `plus` merges two.
        moments = Variance(ddof=1) if self.with_error else Mean(running=True)
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
            accumulator=_Moments(moments),
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
            return on_each_device(run, operands, self.samples, PartitionSpec())

        # The estimator of this model, whose rows may be spread over devices as well.
        settings: dict[str, Any] = {"block_size": self.block_size}
        if self.rows is not None:
            settings |= {"mesh": self.rows.mesh, "mesh_axis": self.rows.name}
        kernel = self.of_model(self._drawn(index), **settings)
        (x1, x2, key, kwargs), names = examples, names_of(self.get)
        if "ntk" in names:
            return [*kernel(x1, x2, names, key=key, **kwargs)]
        return [kernel(x1, x2, key=key, **kwargs)]

    def _drawn(self, index: Array) -> StatefulModel:
        """The model with this index.

        It is drawn in a separate step: otherwise, XLA for CPUs would draw its numbers
        on one core, and again for each use.
        """
        # Outside of the condition, in which only one of the keys would be batched.
        key = jr.fold_in(self.key, index)
        # As a jaxpr, `init` is traced once for both of its uses below.
        closed, structs, static = eqx.filter_make_jaxpr(self.init)(key)
        evaluate = functools.partial(run_jaxpr, closed.jaxpr, closed.consts)
        # Keys and weakly typed numbers cannot be passed through a condition.
        avals: list[Any] = list(closed.out_avals)
        is_random = [
            jnp.issubdtype(aval.dtype, jnp.inexact) and not aval.weak_type
            for aval in avals
        ]
        pick = lambda leaves: list(itertools.compress(leaves, is_random))
        run = lambda key: pick(evaluate([key]))
        # A condition that is true, from an array that XLA does not know.
        bits = jr.key_data(self.key).astype(jnp.float32)
        numbers = in_opaque_branch(run, opaque_true(bits))(key)
        # Of the second evaluation, only what the condition could not return is
        # computed.
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

    def run(rows: list[Array]) -> Any:
        (num,) = {x.shape[0] for x in rows}
        name = axis.name if num % axis.num == 0 else None
        if name is not None:
            # Types on a mesh with Explicit axes must say so, too.
            along = NamedSharding(axis.mesh, PartitionSpec(name))
            to = lambda x: jax.sharding.reshard(x, along) if is_explicit(x) else x
            rows = [*map(to, rows)]
        return jax.vmap(fun, in_axes, out_axes, spmd_axis_name=name)(rows)

    return run


# Everything that changes between batches of samples is donated, or is a number.
@functools.partial(compiled, donate="all-except-first")
def _advanced(call: tuple[Average, Examples], state: PyTree) -> PyTree[VarianceState]:
    average, examples = call
    return _map(lambda old, new: old.plus(new), state, average.moments(examples))


@compiled
def _start(average: Average, examples: Examples) -> PyTree[VarianceState]:
    """The moments of zero samples."""
    structs = eqx.filter_eval_shape(average.moments, examples)
    return jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), structs)


class Estimated(NamedTuple):
    """The mean of each kernel, and standard errors if requested."""

    means: list[PyTree]
    errors: list[PyTree]


def estimated(
    state: list[PyTree], with_error: bool, xp: types.ModuleType = jnp
) -> Estimated:
    """The means, and their standard errors.

    `xp` is the library of the arrays.
    """

    def error(spread: VarianceState) -> Any:
        # The variance may be out of the range of the mean's dtype.
        count = xp.asarray(spread.count).astype(spread.squares.dtype)
        deviation = xp.sqrt(spread.squares / count / (count - 1))
        return deviation.astype(jnp.finfo(spread.dtype).dtype)

    # Moments are in the accumulation dtype, and results in that of the kernels.
    means = _map(lambda spread: spread.mean.astype(spread.dtype), state)
    return Estimated(means, _map(error, state) if with_error else [])


_estimated = compiled(estimated)


def _resumed(
    spread: VarianceState, mean: Any, error: Any, num: int, xp: types.ModuleType
) -> VarianceState:
    """The moments of an earlier estimate, with the types of those in `spread`."""
    # What users pass may be of another kernel.
    remedy = "Pass an estimate for the same examples, from the same model."
    for name, x in {"kernel": mean, "standard_error": error}.items():
        what = f"`{name}` of `previous`"
        if not hasattr(x, "shape") or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"{what} must be an array of an inexact dtype; got {described(x)}. "
                f"{remedy}"
            )
        check_equal(f"The shape of {what}", x.shape, spread.mean.shape, remedy)
    # The error is `sqrt(squares / (num (num - 1)))`; that of one sample is NaN, and its
    # squared distance to the mean 0.
    squares = xp.zeros(mean.shape, spread.squares.dtype)
    if num > 1:
        squares = xp.asarray(error).astype(squares.dtype) ** 2 * (num * (num - 1.0))
    # Copies: the state is donated, but the estimate is the user's.
    count, observations = (xp.array(num, "int32") for _ in range(2))
    mean = xp.array(mean, spread.mean.dtype)
    return VarianceState(mean, squares, count, observations, spread.dtype)


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


def relative_error(estimate: Estimated) -> float:
    """The norm of the errors divided by that of the kernel, for the worst kernel."""
    norm = lambda tree: float(np.linalg.norm([*map(_norm, jtu.tree_leaves(tree))]))
    pairs = [(norm(e), norm(m)) for m, e in safe_zip(*estimate)]
    # A kernel of zeros is exact only without any error.
    return max(error / mean if mean else float(error > 0) for error, mean in pairs)


def _norm(x: Any) -> float:
    """The norm of all entries in at least float32; that of a NumPy array by NumPy."""
    dtype = accumulation_dtype("Sum", x.dtype, None, inexact=True)
    module: Any = np if isinstance(x, np.ndarray) else jnp
    return float(module.linalg.norm(module.ravel(module.asarray(x, dtype))))


def count_nans(means: list[PyTree]) -> int:
    return sum(int(jnp.sum(jnp.isnan(x))) for x in jtu.tree_leaves(means))


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

    def resume(self, previous: Any) -> None:
        """Starts from the moments of an earlier estimate."""
        # Means and errors, each as a tuple of the kernels that `get` names.
        get = self.average.get
        both = [previous.kernel, previous.standard_error]
        if isinstance(get, str):
            both = [(kernels,) for kernels in both]
        names = names_of(get)
        if not all(isinstance(x, tuple) and len(x) == len(names) for x in both):
            raise ValueError(
                f"`previous` must be of the kernels {names}, as `get` says; got "
                f"{jtu.tree_structure(both[0])}. Pass the `get` that it was made with."
            )
        # Moments that the host keeps have shapes only before the first samples.
        xp, like = jnp, self.state
        if self.run_blocks is not None:
            one = self.average.of_blocks(0, 1, "moments", per_batch=1)
            xp, like = np, eqx.filter_eval_shape(one.moments, self.examples)
        # An estimate of another model has other arrays, or another structure.
        spreads, treedef = jtu.tree_flatten(like, is_leaf=is_summary)
        try:
            moments_of = [treedef.flatten_up_to([*kernels]) for kernels in both]
        except ValueError as e:
            raise ValueError(
                "`previous` must have the structure of what the model returns; got "
                f"{jtu.tree_structure([*both[0]])} for {treedef}. Pass an estimate "
                "from the same model."
            ) from e
        # From here on, the estimate is the state that its samples left behind.
        moments = [
            _resumed(spread, mean, error, previous.num_samples, xp)
            for spread, mean, error in safe_zip(spreads, *moments_of)
        ]
        self.state = jtu.tree_unflatten(treedef, moments)

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
        # Blocks return moments without counts, which are the same for all entries.
        counted = lambda x: dataclasses.replace(x, count=num, observations=num)
        more = _map(counted, more)
        # NumPy would warn of numbers that are not finite; JAX does not.
        if self.state is not None:
            with np.errstate(all="ignore"):
                more = _map(lambda old, new: old.plus(new, np), self.state, more)
        self.state = more

    def estimated(self) -> Estimated:
        """The means, and their standard errors if requested."""
        with_error = self.average.with_error
        if self.run_blocks is None:
            return _estimated(self.state, with_error)
        with np.errstate(all="ignore"):
            return estimated(self.state, with_error, np)
