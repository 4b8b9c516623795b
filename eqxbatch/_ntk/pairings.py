"""The methods for kernels: which factors are kept, and how they are combined."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._base.differentiable import without_forward_mode
from .._base.dtypes import widened
from .._base.mesh import full_varying_as
from .._base.trees import log
from .._sites.cost import Cost, num_products
from .._sites.einsum import contract, EXAMPLE, OTHER_EXAMPLE
from .._sites.factors import Factor
from .._sites.trace import Program
from .example_factors import (
    choose_formed,
    ExampleFactors,
    KeptFactors,
    kernel,
    Linearization,
    output_factors,
    Schedule,
)
from .output_axes import OutputAxes
from .pushforward import pushed_kernel, PushedFactors, Pushforward
from .request import TracedModel


class AbstractPairing(abc.ABC):
    """Factors of examples, and the kernels of two sets of examples."""

    axes: list[OutputAxes]  # For all kernels.

    @abc.abstractmethod
    def factors(self, side: int, rows: list) -> Any:
        """The factors of the examples of a side: a PyTree of `Factor`s."""

    @abc.abstractmethod
    def kernels(self, first: Any, second: Any, num: tuple[int, int]) -> list[Array]:
        """All kernels of `num` examples, before their axes are arranged."""


class Values(AbstractPairing):
    """The second moments of the model's outputs: an NNGP without an NTK."""

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
    """Kernels from the factors of the parameters' sites."""

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

    def factors(self, side: int, rows: list) -> KeptFactors:
        return self._example_factors[side].of(rows)

    def kernels(
        self, first: KeptFactors, second: KeptFactors, num: tuple[int, int]
    ) -> list[Array]:
        pair = self._example_factors[0], self._example_factors[-1]
        factors, others = pair[0].of_outputs(first, 0), pair[1].of_outputs(second, 1)
        kernels = [
            moment(axes, first.values[axes.index], second.values[axes.index], num)
            for axes in self._values
        ]
        leaves = pair[0].linearization.program.leaves
        for i, axes in enumerate(self._ntk):
            kept = pair[0].kept[i], pair[1].kept[i]
            cancelled = first.cancelled[i], second.cancelled[i]
            own = factors[i], others[i]
            found = kernel(axes, leaves, kept, own, cancelled, num)
            joined = axes.join(found)
            kernels += [joined] if axes.probes is None else _estimates(axes, joined)
        return kernels


class _Sided(eqx.Module):
    """Factors of examples as rows and as columns; None if not needed."""

    pushed: PushedFactors | None
    pulled: KeptFactors | None


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

    def factors(self, side: int, rows: list) -> _Sided:
        return _Sided(
            self._pushforward.of(rows) if side == 0 else None,
            self._example_factors.of(rows) if side or self._is_symmetric else None,
        )

    def kernels(
        self, first: _Sided, second: _Sided, num: tuple[int, int]
    ) -> list[Array]:
        pushed, pulled = first.pushed, second.pulled
        assert pushed is not None
        assert pulled is not None
        kernels = [
            moment(axes, pushed.values[axes.index], pulled.values[axes.index], num)
            for axes in self._values
        ]
        others = self._example_factors.of_outputs(pulled, 1)
        for axes, factors in zip(self._ntk, others, strict=True):
            jacobians = factors.cotangents
            found = pushed_kernel(
                self._pushforward, axes, pushed.factors, jacobians, num
            )
            kernels.append(axes.join(found))
        return kernels


def moment(
    axes: OutputAxes, first: Factor, second: Factor, num: tuple[int, int]
) -> Inexact[Array, "..."]:
    """The products of the outputs of two sides, before axes are arranged."""
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


def choose_pairing(
    model: TracedModel,
    values: list[OutputAxes],
    ntk: list[OutputAxes],
    directions: tuple[list[Array], list[Array]],
) -> AbstractPairing:
    """The pairing for the NNGPs of outputs in `values` and the NTKs of those in `ntk`.

    Either all of them have all pairs of examples, or none has. `directions` are pulled
    back for the NTKs, on each side.
    """
    if not ntk:
        return Values([_forward(model, i) for i in range(len(model.sides))], values)
    name = model.request.implementation
    if name == "jacobian_contraction":
        return _by_sites(model, values, ntk, directions, use_rules=False)[0]
    is_probed = any(axes.probes is not None for axes in ntk)
    if name != "ntk_vector_products":
        pairing, cost = _by_sites(model, values, ntk, directions, use_rules=True)
        if name == "sites" or is_probed:
            return pairing
        cost_of_products = _cost_of_products(model, ntk)
        is_by_sites = cost <= cost_of_products or _without_products(model) is not None
        log.debug(
            "NTK: implementation='auto' is %r; about %.2g operations by sites, and "
            "%.2g by products.",
            *("sites" if is_by_sites else "ntk_vector_products", cost),
            cost_of_products,
        )
        if is_by_sites:
            return pairing
    elif (reason := _without_products(model)) is not None:
        raise TypeError(
            "`implementation='ntk_vector_products'` needs the model's derivative in "
            "forward mode, which JAX does not have. Use 'auto' or 'sites', which need "
            f"reverse mode only. ({reason})"
        )
    return _by_products(model, values, ntk, directions)


def _forward(model: TracedModel, position: int) -> Callable[[list], list[Factor]]:
    program = model.programs[position]
    return lambda arrays: [*map(Factor, program.run(arrays), program.has_examples)]


def _linearization(
    model: TracedModel,
    position: int,
    program: Program,
    ntk: list[OutputAxes],
    directions: tuple[list[Array], list[Array]],
) -> Linearization:
    rows = model.sides[position].rows
    of_side, num = directions[position], len(model.axes)
    return Linearization(
        program, model.leaves, ntk, of_side, rows.arrays, rows.axes, num
    )


def _by_sites(
    model: TracedModel,
    values: list[OutputAxes],
    ntk: list[OutputAxes],
    directions: tuple[list[Array], list[Array]],
    *,
    use_rules: bool,
) -> tuple[Sites, float]:
    """The pairing, and its cost in floating-point operations."""
    linearizations: list[Linearization] = []
    for position, one in enumerate(model.programs):
        if position and one is model.programs[0]:
            linearizations.append(linearizations[0])
            continue
        program = Program(
            one.closed,
            len(model.leaves),
            use_rules=use_rules,
            num_outputs=len(model.axes),
        )
        linearizations.append(_linearization(model, position, program, ntk, directions))
    schedule = _schedule(model, ntk)
    pair = linearizations[0], linearizations[-1]
    formed, costs = zip(
        *(choose_formed(*pair, i, schedule) for i in range(len(ntk))), strict=True
    )
    example_factors = [
        ExampleFactors(
            side,
            [output_factors(side.program, leaves) for leaves in formed],
            keeps_values=bool(values),
            are_all=schedule.num_pairs == 1,
        )
        for side in linearizations
    ]
    return Sites(example_factors, values, ntk), sum(costs)


def _by_products(
    model: TracedModel,
    values: list[OutputAxes],
    ntk: list[OutputAxes],
    directions: tuple[list[Array], list[Array]],
) -> Products:
    pushforward = Pushforward(model.programs[0], model.sides[0].rows)
    last = len(model.sides) - 1
    closed = model.programs[last].closed
    program = Program(closed, len(model.leaves), use_rules=False)
    linearization = _linearization(model, last, program, ntk, directions)
    example_factors = ExampleFactors(
        linearization,
        [output_factors(program, []) for _ in ntk],
        keeps_values=bool(values),
    )
    return Products(pushforward, example_factors, values, ntk, is_symmetric=last == 0)


def _without_products(model: TracedModel) -> str | None:
    """Why Jacobians cannot be pushed through the model; None if they can."""
    closed, num = model.programs[0].closed, len(model.leaves)
    rows = [full_varying_as(var.aval, 0) for var in closed.jaxpr.invars[num:]]
    of_leaves = lambda leaves: model.programs[0].one(leaves, rows)
    return without_forward_mode(of_leaves, model.leaves)


def _cost_of_products(model: TracedModel, ntk: list[OutputAxes]) -> float:
    """The cost of pushing Jacobians through the model, in operations."""
    program = Program(model.programs[0].closed, len(model.leaves))
    schedule = _schedule(model, ntk)
    products = sum(map(num_products, program.sites))
    size = sum(math.prod(leaf.shape) for leaf in program.leaves)
    directions = sum(
        math.prod(axes.sizes[label] for label in axes.directions(1)) for axes in ntk
    )
    pairs = schedule.num_pairs * schedule.blocks[0]
    if ntk[0].pairs_examples:
        pairs *= schedule.blocks[1]
    # Each product reads a tangent.
    each = Cost(2.0 * products, 4.0 * size)
    return (each * (pairs * directions)).time


def _schedule(model: TracedModel, ntk: list[OutputAxes]) -> Schedule:
    """The numbers of examples that are combined at a time."""
    is_each = not ntk[0].pairs_examples
    totals = [model.sides[0].rows.total, model.sides[-1].rows.total]
    rows, columns = model.block_sizes()
    sizes = (rows, rows) if is_each else (rows, columns)
    blocks = [
        total if size is None else min(size, total)
        for size, total in zip(sizes, totals, strict=True)
    ]
    num = [
        math.ceil(total / max(size, 1))
        for size, total in zip(blocks, totals, strict=True)
    ]
    pairs = num[0] if is_each else num[0] * num[1]
    is_symmetric = len(model.sides) == 1
    return Schedule((blocks[0], blocks[1]), (num[0], num[1]), pairs, is_symmetric)
