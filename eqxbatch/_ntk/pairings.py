"""The ways to a kernel: what is kept of examples, and what is made of it."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.dtypes import widened
from .._sites.einsum import contract, EXAMPLE, OTHER_EXAMPLE
from .._sites.factors import Factor
from .example_factors import ExampleFactors, kernel
from .output_axes import OutputAxes
from .pushforward import pushed_kernel, Pushforward
from .tiles import AbstractPairing


class Values(AbstractPairing):
    """The second moments of what the model returns: an NNGP alone."""

    def __init__(self, forwards: list, axes: list[OutputAxes]):
        self._forwards, self.axes = forwards, axes

    def factors(self, side: int, rows: list) -> list[Factor]:
        return self._forwards[side](rows)

    def kernels(
        self, first: list[Factor], second: list[Factor], num: tuple[int, int]
    ) -> list[Array]:
        return [
            moment(axes, first[axes.index], second[axes.index], num)
            for axes in self.axes
        ]


class Sites(AbstractPairing):
    """Kernels from what is kept of the sites of the parameters."""

    def __init__(
        self,
        example_factors: list[ExampleFactors],
        values: list[OutputAxes],
        ntk: list[OutputAxes],
    ):
        self._example_factors, self._values, self._ntk = example_factors, values, ntk
        self.axes = [*values]
        for axes in ntk:
            unprobed = dataclasses.replace(axes, probes=None)
            self.axes += [unprobed] if axes.probes is None else [unprobed, unprobed]

    def factors(self, side: int, rows: list) -> list[Factor]:
        return self._example_factors[side].factors(rows)

    def kernels(
        self, first: list[Factor], second: list[Factor], num: tuple[int, int]
    ) -> list[Array]:
        pair = self._example_factors[0], self._example_factors[-1]
        outs, factors = pair[0].split(first, 0)
        other_outs, others = pair[1].split(second, 1)
        kernels = [
            moment(axes, outs[axes.index], other_outs[axes.index], num)
            for axes in self._values
        ]
        leaves = pair[0].linearization.program.leaves
        for i, axes in enumerate(self._ntk):
            kept = pair[0].kept[i], pair[1].kept[i]
            found = kernel(axes, leaves, kept, (factors[i], others[i]), num)
            joined = axes.join(found)
            kernels += [joined] if axes.probes is None else _estimates(axes, joined)
        return kernels


class Products(AbstractPairing):
    """Kernels from Jacobians of one side, pushed through the model at the other."""

    def __init__(
        self,
        pushforward: Pushforward,
        example_factors: ExampleFactors,
        values: list[OutputAxes],
        ntk: list[OutputAxes],
        *,
        is_symmetric: bool,
    ):
        self._pushforward, self._example_factors = pushforward, example_factors
        self._values, self._ntk = values, ntk
        self._is_symmetric = is_symmetric
        self.axes = [*values, *ntk]
        self._num = example_factors.linearization.num_outputs

    def factors(self, side: int, rows: list) -> list[Factor]:
        kept = [] if side == 1 else self._pushforward.factors(rows)
        if side == 1 or self._is_symmetric:
            kept += self._example_factors.factors(rows)
        return kept

    def kernels(
        self, first: list[Factor], second: list[Factor], num: tuple[int, int]
    ) -> list[Array]:
        if self._is_symmetric:
            size = len(first) - self._example_factors.size
            first, second = first[:size], second[size:]
        residuals = first[self._num :]
        outs, others = self._example_factors.split(second, 1)
        kernels = [
            moment(axes, first[axes.index], outs[axes.index], num)
            for axes in self._values
        ]
        for axes, factors in zip(self._ntk, others, strict=True):
            jacobians = factors.cotangents
            found = pushed_kernel(self._pushforward, axes, residuals, jacobians, num)
            kernels.append(axes.join(found))
        return kernels


def moment(
    axes: OutputAxes, first: Factor, second: Factor, num: tuple[int, int]
) -> Inexact[Array, "..."]:
    """The products of two sides' outputs, before they are arranged."""
    terms = []
    sides = zip((first, second), num, (EXAMPLE, OTHER_EXAMPLE), strict=True)
    for side, (factor, size, example) in enumerate(sides):
        x = widened(factor.array)
        if not factor.has_examples:
            x = jnp.broadcast_to(x, (size, *x.shape))
        example = example if axes.pairs_examples else EXAMPLE
        terms.append((jnp.conj(x) if side else x, (example, *axes.values(side))))
    return contract(terms, axes.out)


def _estimates(axes: OutputAxes, kernel: Inexact[Array, "..."]) -> list[Array]:
    """The mean over probes, and its standard error."""
    axis = len(axes.examples)
    num = kernel.shape[axis]
    mean = jnp.mean(kernel, axis=axis)
    if num == 1:
        return [mean, jnp.full(mean.shape, jnp.nan, mean.dtype)]
    deviation = jnp.std(kernel, axis=axis, ddof=1).astype(mean.dtype)
    return [mean, deviation / jnp.sqrt(jnp.asarray(num, mean.real.dtype))]
