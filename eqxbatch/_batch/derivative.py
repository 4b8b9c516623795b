"""The settings of transforms that differentiate a function of parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._base.mistakes import no_arrays_remedy
from .._base.trees import shown
from .cut import Batch, unbatched
from .declare import AbstractAutoSharded, AbstractMicrobatched, AbstractTransform
from .moments import Mean, Sum
from .objective import _check_complex, Examples, Loss, Selection, split_examples


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
    in_axes: PyTree = None
    has_aux: eqx.AbstractVar[bool]
    holomorphic: eqx.AbstractVar[bool | None]

    def batch(self, args: tuple, kwargs: dict[str, Any]) -> Batch:
        """The arguments of a call; the first one is not batched."""
        if self.in_axes is None:
            return unbatched(args, kwargs)
        return split_examples(self.fun, self.in_axes, args, kwargs)

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

    def loss(self, batch: Batch, diff: PyTree, nondiff: PyTree) -> Loss:
        """The function of the parameters and of the rows of a batch."""
        holomorphic = bool(self.holomorphic)
        return Loss(self.fun, batch, diff, nondiff, self.has_aux, holomorphic)


class AbstractOverExamples(
    AbstractDerivative, AbstractMicrobatched, AbstractAutoSharded
):
    """A derivative whose result is a sum or mean over examples.

    With `in_axes=None` there is no batch: the function is called once with all
    arguments.
    """

    _: dataclasses.KW_ONLY
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

    def examples(self, args: tuple, kwargs: dict[str, Any], one: tuple) -> Examples:
        """The examples of a call.

        `one` are the positional arguments of `fun`, of which there may be fewer.
        """
        batch = self.batch(one, kwargs)
        if self.in_axes is None:
            return Examples(batch, None, self.accumulator)
        blocks = self.blocks(batch, args, kwargs, batch.total())
        return Examples(batch, blocks, self.accumulator)
