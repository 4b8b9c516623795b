"""`filter_microbatch`: a function of a whole batch, one microbatch at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._base.mesh import auto_sharded, examples_spec
from .._base.structs import is_struct
from .._batch.accumulators import Concat, Last, Max, Min
from .._batch.batch import Batch, split_batch
from .._batch.log_sum_exp import LogSumExp
from .._batch.loop import run_blocks
from .._batch.memory import explained_failure
from .._batch.slots import as_slots
from .._batch.sums import Mean, Sum
from .._batch.transform import AbstractEarlyStop, also_decorator, Out, P, run_compiled


_INSIDE = "Pass this `axis_name` to the `jax.vmap` inside of `fun`."


_IF_ONE = "Use `filter_micro_vmap` for a function of one example."


# For an array these return an array. Others, such as `Variance`, do not.
ArrayAccumulator = Concat | Last | LogSumExp | Max | Mean | Min | Sum


class AbstractMicrobatch(AbstractEarlyStop, Generic[P, Out]):
    """`filter_microbatch` with results of the type of the function's."""

    fun: Callable[P, Out]
    _: dataclasses.KW_ONLY
    in_axes: PyTree = eqx.if_array(0)
    accumulator: ArrayAccumulator
    checkpoint: bool = False

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Out:
        return run_compiled(self, *args, **kwargs)


# Type checkers see no default, and refuse a call without an accumulator.
_NO_DEFAULT: dict[str, Any] = {"default": None}


class Microbatch(AbstractMicrobatch[P, Out]):
    """Runs a function of a batch one microbatch at a time and accumulates the results.

    The counterpart of [`eqxbatch.filter_micro_vmap`][] for functions that take a whole
    batch, such as a loss or its gradient (gradient accumulation). Peak temporary memory
    is that of one microbatch.

    **Arguments:**

    - `fun`: a function of arrays with `n` examples along some axis. It is called with
        microbatches: contiguous blocks of `microbatch_size` examples; the last one may
        be shorter. On a mesh, a microbatch has such a block of the rows of each device.
        Arguments and results may be any PyTrees, including modules.
    - `in_axes`: the batch axes of the arguments: a prefix of the tuple of positional
        arguments, with ints, `None` (not batched), or callables from a leaf to these;
        or a dict from argument names to such prefixes. As for `equinox.filter_vmap`,
        the default is axis 0 of all arrays. It also applies to positional and keyword
        arguments that a dict does not name.
    - `microbatch_size`: the number of examples in a microbatch, at least 1. It need not
        divide `n`. An [`eqxbatch.MemoryBudget`][] chooses the largest size that fits;
        `None` means a single microbatch.
    - `accumulator`: required; how the results of the microbatches are combined: an
        [`eqxbatch.AbstractAccumulator`][], or a PyTree prefix of the output with
        accumulators as leaves. Use [`eqxbatch.Sum`][] for sums over examples,
        [`eqxbatch.Mean`][] for means over examples, such as the gradient of a mean
        loss, and [`eqxbatch.Concat`][] for results with one row for each example.
        `optax.microbatching.AccumulationType`s and `Accumulator`s are accepted, too. An
        `equinox.nn.State` needs none of its own: its floats are averaged over the
        examples, and of other arrays, such as counters, the last one is returned.
    - `num_real_microbatches`: if given, only this many microbatches run: an int or an
        integer array, which may be traced. Reverse mode works in both cases.
    - `checkpoint`: whether reverse-mode differentiation saves only the inputs and
        recomputes each microbatch in the backward pass.

    **Returns:**

    A function with the arguments of `fun` that returns the accumulated results. Outputs
    that are not arrays must be the same for all microbatches. If `n` is 0, `fun` is
    traced but not run.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced. As with `equinox.filter_jit`, `fun` must be pure.
    Arrays in a module or in an `equinox.Partial` are arguments of the compiled program;
    arrays that a Python function closes over are constants.

    **Raises:**

    - `ValueError` for a size below 1, unequal batch sizes, an axis out of range, no
        batched argument, an accumulator that does not fit the output, non-array outputs
        that differ between microbatches, and a `num_real_microbatches` that is negative
        or larger than the number of microbatches.
    - `TypeError` without an `accumulator`, for a size that is not an int, and for a
        mean of integers.
    - `RuntimeError` at run time, if `num_real_microbatches` is a JAX array that is out
        of this range.

    !!! example

        The exact gradient of a mean, although 32 does not divide 100:

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> @eqxbatch.filter_microbatch(
        ...     in_axes=(None, 0), microbatch_size=32, accumulator=eqxbatch.Mean()
        ... )
        ... @eqx.filter_grad
        ... def grad_of_loss(model, x):
        ...     return jnp.mean(jax.vmap(model)(x) ** 2)
        >>> model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        >>> grads = grad_of_loss(model, jnp.ones((100, 2)))
        >>> grads.layers[0].weight.shape
        (8, 2)

        ```
    """

    _: dataclasses.KW_ONLY
    accumulator: PyTree = eqx.field(**_NO_DEFAULT)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run_compiled(self, *args, **kwargs)

    def __check_init__(self) -> None:
        if self.accumulator is None:
            raise TypeError(
                "`filter_microbatch` needs an `accumulator`, because it cannot tell "
                "what the result of a microbatch is: `Sum()` if it is a sum over the "
                "examples, `Mean()` if it is a mean over them, such as the gradient of "
                "a mean loss, and `Concat()` if it has a row for each. The wrong one "
                "of them makes the result depend on the microbatch size."
            )

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Microbatches do not overlap, because `fun` may couple the examples of one.
        batch = split_batch(self.fun, self.in_axes, args, kwargs)
        blocks = self.blocks(batch, args, kwargs, batch.total())

        def call(fun: Callable, batch: Batch, rows: list) -> PyTree:
            # A function of one example fails in ways that do not say so.
            call = functools.partial(batch.call, fun)
            with explained_failure(call, batch, "microbatch", _IF_ONE, rows, _INSIDE):
                return call(rows)

        # A mesh with explicit axes is told how the results of a microbatch are sharded.
        specs = lambda out: self._specs(out, batch)
        call_on_mesh = auto_sharded(call, (self.fun, batch), (batch.arrays,), specs)

        # No result is of single examples, so that slots keep the axes of the user's.
        run = lambda rows: call_on_mesh(rows.arrays)
        accumulators = functools.partial(as_slots, self.accumulator)
        limits = self.limit(blocks), self.checkpoint
        return run_blocks(run, batch.rows(), blocks, accumulators, *limits)

    def _specs(self, out: PyTree, batch: Batch) -> PyTree:
        """The sharding of the results: that of the batch, if they have its rows."""
        structs = eqx.filter_eval_shape(lambda: out)
        arrays, treedef = jtu.tree_flatten(eqx.filter(structs, is_struct))
        rows = examples_spec(batch.arrays, batch.axes)
        # Results that are joined have rows; all others are the same on all devices.
        specs = [PartitionSpec() for _ in arrays]
        slots = as_slots(self.accumulator, structs).with_states(structs)
        for slot in slots.slots:
            if slot.concat is not None:
                # `Concat` takes one array at a time.
                (i,) = slot.indices
                axis = slot.concat.axis_of(arrays[i])
                specs[i] = PartitionSpec(*[None] * axis, *rows)
        return jtu.tree_unflatten(treedef, specs)


filter_microbatch = also_decorator("filter_microbatch", Microbatch, AbstractMicrobatch)
