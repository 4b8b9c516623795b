"""The settings of transforms that differentiate a function of parameters."""

import abc
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree, UInt32

from .._base.compile import num_bytes
from .._base.dtypes import weighted_totals, widened
from .._base.platforms import platform
from .._base.structs import array_structs
from .._base.traced_function import TracedFunction
from .._base.trees import difference, safe_zip, shown
from .accumulators import Concat
from .arguments import Arguments
from .batch import Batch, unbatched
from .loop import accumulated, run_blocks
from .loss import Loss, split_examples
from .padding import Padding, unless_padding
from .parameters import are_parameters, as_where, UNRAVEL, warn_of_flax, warn_of_numbers
from .rows import Rows
from .slots import as_slots, Slots, types_of
from .sums import check_adds, Mean, OfTotals, rows_and_weights, Sum
from .transform import AbstractMicrobatched, AbstractSharded, AbstractTransform


def _check_complex(diff: PyTree, holomorphic: bool | None) -> None:
    """Raises `TypeError` if `holomorphic` does not fit the parameters."""
    leaves = jtu.tree_leaves(diff)
    are_complex = [jnp.iscomplexobj(x) for x in leaves]
    dtypes = [str(x.dtype) for x in leaves]
    if holomorphic and not all(are_complex):
        raise TypeError(
            "With `holomorphic=True`, all arrays that are differentiated must be "
            f"complex; got {dtypes}."
        )
    if any(are_complex) and not holomorphic:
        or_else = "; or, if `fun` is holomorphic, pass `holomorphic=True`"
        raise TypeError(
            "Complex arrays are only differentiated through their real and imaginary "
            f"parts; got {dtypes}. Give these as two real arrays and combine "
            f"them inside `fun`{or_else if holomorphic is False else ''}."
        )


def like_parameters(what: str, vector: PyTree, diff: PyTree) -> list[Array]:
    """The arrays of a vector, which must match the differentiated leaves.

    Python numbers are accepted as scalar arrays.
    """

    def as_array(x: PyTree, like: PyTree) -> Any:
        # Only a number has no dtype to compare: that of an array must be right.
        is_number = isinstance(x, (float, complex)) and getattr(like, "shape", 1) == ()
        return jnp.asarray(x, like.dtype) if is_number else x

    if jtu.tree_structure(vector) == jtu.tree_structure(diff):
        vector = jtu.tree_map(as_array, vector, diff)
    arrays = eqx.filter(vector, eqx.is_inexact_array)
    if types_of(arrays) != types_of(diff):
        remedy = UNRAVEL if eqx.is_array(vector) else difference(diff, arrays)
        raise ValueError(
            f"{what} must have the structure, shapes and dtypes of what is "
            f"differentiated, {shown(diff)}; got {shown(vector)}. {remedy}"
        )
    return jtu.tree_leaves(arrays)


class SplitArgument(NamedTuple):
    """The differentiated part of an argument, and the rest of it."""

    diff: PyTree
    nondiff: PyTree


class Totals(NamedTuple):
    """Sums over examples, and what there is for each of them."""

    sums: Any
    aux: Any


class AbstractDerivative(AbstractTransform):
    """A derivative with respect to parameters in the first argument.

    - `where`, `filter_spec`: which leaves of the first argument are parameters.
    - `in_axes`: the batch axes of all other arguments; None if there is no batch.
    - `has_aux`: whether the function returns `(value, aux)`.
    - `holomorphic`: whether it is a holomorphic function of complex arrays; None if the
        transform has no such setting.
    - `allows_complex`: whether complex parameters need no `holomorphic`.
    - `has_gaps`: whether the result has a visible None for leaves that are no arrays.
    """

    allows_complex: ClassVar[bool] = False

    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any] | None = eqx.field(default=None, converter=as_where)
    filter_spec: PyTree = eqx.is_inexact_array

    @property
    def has_gaps(self) -> bool:
        return False

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

    @property
    def coupling_axis(self) -> Hashable | None:
        """The name of an axis that couples the examples of a microbatch, if any."""
        return None

    def batch(self, args: Arguments, kwargs: dict[str, Any]) -> Batch:
        """The arguments of a call; the first one is not batched."""
        if self.in_axes is None:
            return unbatched(args, kwargs)
        fun, shares = self.__wrapped__, self.coupling_axis is not None
        return split_examples(fun, self.in_axes, args, kwargs, shares_states=shares)

    def parameters(self, args: Arguments, kwargs: dict[str, Any]) -> SplitArgument:
        """The differentiated part of the first argument, and the rest of it.

        Raises `TypeError` for dtypes that do not fit `holomorphic`. Warns of Python
        numbers that a matrix leaves out.
        """
        if not args:
            raise ValueError(
                "The argument that is differentiated comes first, by position; got "
                f"only keyword arguments, {tuple(kwargs)}."
            )
        first = args[0]
        if isinstance(first, (float, complex)):
            first = jnp.asarray(first)  # A number counts as a scalar array.
        name = "The first argument, which the derivative is with respect to,"
        mask = are_parameters(first, self.where, self.filter_spec, name)
        # What a result shows as None is only worth a word if it was asked for.
        is_default = self.where is None and self.filter_spec is eqx.is_inexact_array
        if not (self.has_gaps and is_default):
            warn_of_numbers(first, self.where, self.filter_spec, name)
        warn_of_flax(first)
        diff, nondiff = eqx.partition(first, mask)
        # Only what is differentiated has to fit: constants may be complex.
        if not self.allows_complex:
            _check_complex(diff, self.holomorphic)
        return SplitArgument(diff, nondiff)

    def loss_of(self, args: Arguments, kwargs: dict[str, Any]) -> Loss:
        """The function and its arguments in a call of the transformed function."""
        # It belongs to the transform, as the vector of a product does.
        if self.second_argument is not None:
            args = (*args[:1], *args[2:])
        diff, nondiff = self.parameters(args, kwargs)
        batch, holomorphic = self.batch(args, kwargs), bool(self.holomorphic)
        fun, settings = self.__wrapped__, (self.has_aux, holomorphic)
        return Loss(fun, batch, diff, nondiff, *settings, axis_name=self.coupling_axis)


def check_has_batch(in_axes: PyTree, settings: dict[str, Any]) -> None:
    """Raises for settings of a batch where there is none."""
    for name, value in settings.items():
        if in_axes is None and value is not None:
            raise ValueError(
                f"`{name}` is for a batch of examples, but `in_axes` is None: `fun` is "
                "one function of all its arguments. Pass the batch axes of the "
                "arguments after the first, as in `in_axes=0`, or leave it out."
            )


class AbstractOverExamples(AbstractDerivative, AbstractMicrobatched, AbstractSharded):
    """A derivative whose result is a sum or mean over examples.

    With `in_axes=None` there is no batch: the function is called once with all
    arguments.
    """

    _: dataclasses.KW_ONLY
    accumulator: Sum | Mean = Mean()

    @property
    def overlaps(self) -> bool:
        # Sums weight the examples of two microbatches by one half each.
        return True

    def __check_init__(self) -> None:
        check_adds(self.accumulator)
        name = f"accumulator={type(self.accumulator).__name__}(weights=...)"
        of_batch = {
            "microbatch_size": self.microbatch_size,
            name: self.accumulator.weights,
        }
        check_has_batch(self.in_axes, of_batch)

    def in_microbatches(self, args: Arguments, kwargs: dict[str, Any]) -> Loss:
        """Like `loss_of`, with the batch cut into microbatches."""
        loss = self.loss_of(args, kwargs)
        if self.in_axes is None:
            return loss
        blocks = self.blocks(loss.batch, args, kwargs, loss.batch.total())
        return dataclasses.replace(loss, blocks=blocks)

    def total(
        self,
        loss: Loss,
        program: TracedFunction,
        sums: Callable[[Rows], list],
        per_example: Callable[[list], PyTree],
        keys: UInt32[Array, "n words"] | None = None,
    ) -> Totals:
        """Accumulates results over all microbatches.

        `sums(rows)` returns (weighted) sums over a microbatch, whose rows have the
        `keys`, and `per_example(arrays)` results along axis 0. The results are in at
        least float32. The `program` is that of one example, and examples of weight 0
        have no influence on sums.
        """
        blocks, accumulator = loss.blocks, self.accumulator
        if blocks is None:
            return Totals(sums(Rows([], (), 1)), per_example([]))
        # A weight of the value is one of the gradient only if that is linear in it.
        if not program.backward.is_linear:
            sums = weighted_after(sums)
        # Rows of weight 0 may be NaN, which times 0 is NaN: others take their places.
        batch = rows_and_weights(accumulator, loss.batch).with_(keys=keys)
        padding = Padding.of(batch)

        def run(rows: Rows) -> Totals:
            rows = rows.weighted()
            counting = rows if padding is None else padding.replaced(rows)

            # In float16, sums may overflow where a share of them does not.
            def shares(weights: Array | None, share: float) -> list[Array]:
                if share != 1:
                    ones = jnp.ones(rows.total) if weights is None else weights
                    weights = ones * share
                return sums(counting.with_(weights=weights))

            is_narrow = program.is_narrow
            totals = weighted_totals(shares, rows.total, rows.weights, is_narrow)
            # Of rows that do not count, one took the place of all: leave it out, too.
            if padding is not None and rows.weights is not None:
                totals = unless_padding(totals, rows.weights)
            return Totals(totals, per_example(rows.arrays))

        def slots(output: Totals) -> Slots:
            # A part without arrays, such as None, needs no accumulator.
            of_examples = Concat() if array_structs(output.aux) else None
            return as_slots(Totals(OfTotals(accumulator), of_examples), output)

        return run_blocks(run, batch, blocks, slots)


# Sums over the rows of a microbatch, with weights or without.
_Sums = Callable[[Rows], list]


def weighted_after(sums: _Sums) -> _Sums:
    """Weighted sums of the results for each example.

    They are right if the results are not linear in a weight that comes before a
    backward pass.
    """

    def of_each(rows: Rows) -> list[Array]:
        def of_one(example: Rows) -> list:
            # As a microbatch of one example, which needs no weights.
            pairs = safe_zip(example.arrays, rows.axes)
            arrays = [jnp.expand_dims(x, axis) for x, axis in pairs]
            keys = None if example.keys is None else example.keys[None]
            return sums(Rows(arrays, rows.axes, 1, keys=keys))

        # Each example has its own backward pass, and weights come after it.
        results = rows.unweighted().of_each(of_one)
        whole = jax.lax.Precision.HIGHEST
        return [
            jnp.tensordot(rows.weights.astype(x.dtype), x, 1, precision=whole)
            for x in map(widened, results)
        ]

    def weighted(rows: Rows) -> list:
        if rows.weights is None:
            rows = rows.with_(weights=jnp.ones(rows.total))
        one = jax.eval_shape(lambda: of_each(rows.slice(0, 1)))
        # As many results at a time as factors of sites would be kept.
        size = platform().factor_bytes // max(num_bytes(one), 1)
        return accumulated(of_each, rows, max(1, size), Sum())

    return weighted
