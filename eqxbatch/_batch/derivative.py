"""The settings of transforms that differentiate a function of parameters."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree, Real

from .._base.jaxprs import uses_dtype
from .._base.mistakes import no_arrays_remedy
from .._base.trees import shown
from .accumulators import Concat
from .cut import Batch, Blocks, unbatched
from .loop import run_blocks
from .moments import Mean, OfTotals, Sum
from .objective import (
    _check_complex,
    Loss,
    Selection,
    split_examples,
    weighted_totals,
)
from .slots import array_structs, match_accumulators, Slots
from .transform import AbstractAutoSharded, AbstractMicrobatched, AbstractTransform
from .weights import check_real, check_weights


class AbstractDerivative(AbstractTransform):
    """A derivative with respect to parameters in the first argument.

    - `where`, `filter_spec`: which leaves of the first argument are parameters.
    - `in_axes`: the batch axes of all other arguments; None if there is no batch.
    - `has_aux`: whether the function returns `(value, aux)`.
    - `holomorphic`: whether it is a holomorphic function of complex arrays; None if the
        transform has no such setting.
    """

    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any] | None = None
    filter_spec: PyTree = eqx.is_inexact_array

    # Not `equinox.AbstractVar`s, which type checkers take for settings.
    @property
    @abc.abstractmethod
    def in_axes(self) -> PyTree: ...

    @property
    @abc.abstractmethod
    def has_aux(self) -> bool: ...

    @property
    @abc.abstractmethod
    def holomorphic(self) -> bool | None: ...

    def batch(self, args: tuple, kwargs: dict[str, Any]) -> Batch:
        """The arguments of a call; the first one is not batched."""
        if self.in_axes is None:
            return unbatched(args, kwargs)
        return split_examples(self.__wrapped__, self.in_axes, args, kwargs)

    def parameters(self, args: tuple, kwargs: dict[str, Any]) -> tuple[PyTree, PyTree]:
        """The differentiated part of the first argument, and the rest of it."""
        if not args:
            raise ValueError(
                "The argument that is differentiated comes first, by position; got "
                f"only keyword arguments, {tuple(kwargs)}."
            )
        first = args[0]
        if isinstance(first, (float, complex)):
            first = jnp.asarray(first)  # A number counts as a scalar array.
        if not jtu.tree_leaves(eqx.filter(first, eqx.is_inexact_array)):
            raise ValueError(
                "The first argument has no arrays of an inexact dtype, so that there "
                f"is nothing to differentiate; got {shown(args[0])}. Pass what the "
                "derivative is with respect to as the first argument."
                f"{no_arrays_remedy(args[0])}"
            )
        return Selection(first, self.where, self.filter_spec).partition(first)

    def real_parameters(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Like `parameters`, for real arrays, or complex ones if `holomorphic`.

        Raises `TypeError` for other dtypes.
        """
        diff, nondiff = self.parameters(args, kwargs)
        _check_complex(diff, self.holomorphic)
        return diff, nondiff

    def loss_of(self, batch: Batch, diff: PyTree, nondiff: PyTree) -> Loss:
        """The function of the parameters and of the rows of a batch."""
        holomorphic = bool(self.holomorphic)
        fun = self.__wrapped__
        return Loss(fun, batch, diff, nondiff, self.has_aux, holomorphic)


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """The examples of a call, in microbatches; `blocks` is None for a single call."""

    batch: Batch
    blocks: Blocks | None
    accumulator: Sum | Mean

    @property
    def size(self) -> int | None:
        """The number of examples that are processed at a time."""
        return None if self.blocks is None else self.blocks.size

    def total(
        self,
        sums: Callable[[list, Real[Array, " n"] | None], list],
        per_example: Callable[[list], PyTree],
        closed: Any,
    ) -> tuple[list, PyTree]:
        """Accumulates results over all microbatches.

        `sums(rows, weights)` returns (weighted) sums over a microbatch, and
        `per_example(rows)` results along axis 0. The results are in at least float32.
        The jaxpr `closed` is that of one example.
        """
        if self.blocks is None:
            return sums([], None), per_example([])
        arrays, axes = self.batch.arrays, self.batch.axes
        num, weights = len(arrays), self.accumulator.weights
        if weights is not None:
            name = type(self.accumulator).__name__
            check_weights(name, weights, self.blocks)
            check_real(name, weights)
            arrays, axes = [*arrays, weights], (*axes, 0)

        is_narrow = uses_dtype(closed.jaxpr, jnp.float16)

        def run(rows: list, size: int) -> tuple[tuple[list, PyTree], None]:
            batch, weights_of_rows = rows[:num], None if weights is None else rows[num]

            def shares(weights: Array | None, share: float) -> list:
                if share != 1:
                    ones = jnp.ones(size) if weights is None else weights
                    weights = ones * share
                return sums(batch, weights)

            totals = weighted_totals(shares, size, weights_of_rows, is_narrow)
            return (totals, per_example(batch)), None

        def slots(output: tuple, _: Any) -> Slots:
            of_each = Concat() if array_structs(output[1]) else None
            slots = match_accumulators((OfTotals(self.accumulator), of_each), output)
            return slots.with_states(output)

        return run_blocks(run, arrays, axes, self.blocks, slots, None, False)


class AbstractOverExamples(
    AbstractDerivative, AbstractMicrobatched, AbstractAutoSharded
):
    """A derivative whose result is a sum or mean over examples.

    With `in_axes=None` there is no batch: the function is called once with all
    arguments.
    """

    _: dataclasses.KW_ONLY
    in_axes: PyTree = None
    accumulator: Sum | Mean = Mean()

    def __check_init__(self) -> None:
        if self.in_axes is not None:
            return
        if self.microbatch_size is not None:
            raise ValueError(
                "`microbatch_size` needs a batch of examples, but `in_axes` is None: "
                "`fun` is one function of all its arguments. Pass the batch axes of "
                "the arguments after the first, or leave it out."
            )
        if self.accumulator.weights is not None:
            name = type(self.accumulator).__name__
            raise ValueError(
                f"`accumulator={name}(weights=...)` weights the examples of a batch, "
                "but `in_axes` is None: `fun` is one function of all its arguments. "
                "Pass the batch axes of the arguments after the first, or leave out "
                "`weights`."
            )

    def microbatches(
        self, args: tuple, kwargs: dict[str, Any], args_of_fun: tuple
    ) -> Microbatches:
        """The examples of a call; `fun` may take fewer arguments."""
        batch = self.batch(args_of_fun, kwargs)
        if self.in_axes is None:
            return Microbatches(batch, None, self.accumulator)
        blocks = self.blocks(batch, args, kwargs, batch.total())
        return Microbatches(batch, blocks, self.accumulator)
