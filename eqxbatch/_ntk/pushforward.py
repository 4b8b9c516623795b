"""Pushing Jacobians of one side through the linearised model at the other."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.dtypes import widened
from .._base.jaxprs import evaluate_jaxpr, TracedFunction
from .._batch.loop import Rows
from .._sites.einsum import contract
from .._sites.factors import Factor
from .output_axes import OutputAxes


class _Push(eqx.Module):
    """A linear function, whose residuals are its first inputs."""

    jaxpr: Any = eqx.field(static=True)


class PushedFactors(eqx.Module):
    """The outputs of a function for some examples, and residuals of its derivative."""

    values: list[Factor]
    factors: list[Factor]


class Pushforward:
    """A function's derivative at each example of a batch, stored as residuals.

    Residuals are computed once, not again for each tangent.
    """

    def __init__(self, program: TracedFunction, batch: Rows):
        def factors(leaves: list, rows: list) -> tuple[list, "_Push"]:
            outs, push = jax.linearize(lambda leaves: program.one(leaves, rows), leaves)
            pushed = jax.make_jaxpr(push)(leaves)
            return [*outs, *pushed.consts], _Push(pushed.jaxpr)

        leaves, self._num = program.leaves, len(program.structs)
        self._program = TracedFunction(factors, leaves, batch.arrays, batch.axes)
        self._push = self._program.out[1].jaxpr

    def of(self, rows: list) -> PushedFactors:
        """The residuals of some examples."""
        program = self._program
        factors = [*map(Factor, program.run(rows), program.has_examples)]
        return PushedFactors(factors[: self._num], factors[self._num :])

    def push(
        self, factors: list, tangents: list[Array], index: int
    ) -> Inexact[Array, "..."]:
        """The derivative of an output at one example along one tangent."""
        # A derivative that is zero everywhere is a NumPy constant.
        return jnp.asarray(evaluate_jaxpr(self._push, factors, tangents)[index])


def pushed_kernel(
    pushforward: Pushforward,
    output: OutputAxes,
    factors: list[Factor],
    jacobians: list[Factor],
    num: tuple[int, int],
) -> Inexact[Array, "..."]:
    """The kernel of an output, before its axes are arranged.

    The `jacobians` are those of the other side, one for each leaf.
    """
    labels = output.directions(1)
    lead = [output.sizes[label] for label in labels]
    tangents = []
    for jacobian in jacobians:
        x = jacobian.array
        shape = x.shape[jacobian.has_examples :][len(labels) :]
        if not jacobian.has_examples:
            x = jnp.broadcast_to(x, (num[1], *x.shape))
        x = jnp.conj(x.reshape(num[1], math.prod(lead), *shape))
        if output.is_complex and jnp.iscomplexobj(x):
            x = x / 2  # As for Gram matrices; see `example_factors.kernel`.
        tangents.append(x)
    arrays = [residual.array for residual in factors]
    has_examples = [0 if residual.has_examples else None for residual in factors]

    def push(arrays: list, tangents: list) -> Array:
        return pushforward.push(arrays, tangents, output.index)

    along = jax.vmap(push, (None, 0))
    if output.pairs_examples:
        along = jax.vmap(along, (None, 0))
        along = jax.vmap(along, (has_examples, None), axis_size=num[0])
    else:
        along = jax.vmap(along, (has_examples, 0), axis_size=num[0])
    pushed = widened(along(arrays, tangents))
    examples = pushed.shape[: len(output.examples)]
    values = pushed.shape[len(examples) + 1 :]
    pushed = pushed.reshape(*examples, *lead, *values)
    names = (*output.examples, *labels, *output.values(0))
    if output.is_complex:
        pushed = jnp.stack([jnp.real(pushed), jnp.imag(pushed)], axis=-1)
        names = (*names, output.parts[0])
    return contract([(pushed, names)], (*output.out, *output.parts))
