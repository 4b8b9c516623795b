"""Which way to a kernel is taken."""

import math
from collections.abc import Callable

from jaxtyping import Array

from .._sites.cost import FLOPS_PER_BYTE, num_products
from .._sites.factors import Factor
from .._sites.trace import Program
from .example_factors import (
    choose_formed,
    ExampleFactors,
    Linearization,
    output_factors,
    Schedule,
)
from .output_axes import OutputAxes
from .pairings import Products, Sites, Values
from .pushforward import Pushforward
from .tiles import AbstractPairing
from .traced_model import TracedModel


def choose_pairing(
    model: TracedModel,
    values: list[OutputAxes],
    ntk: list[OutputAxes],
    directions: tuple[list[Array], list[Array]],
) -> AbstractPairing:
    """For the NNGPs of the outputs in `values`, and the NTKs of those in `ntk`.

    All of them pair the examples, or none does. `directions` are what is pulled back
    for the latter, on each side.
    """
    if not ntk:
        return Values([_forward(model, i) for i in range(len(model.sides))], values)
    name = model.settings.implementation
    if name == "jacobian_contraction":
        return _by_sites(model, values, ntk, directions, use_rules=False)[0]
    is_probed = any(axes.probes is not None for axes in ntk)
    if name != "ntk_vector_products":
        pairing, cost = _by_sites(model, values, ntk, directions, use_rules=True)
        if name == "sites" or is_probed or cost <= _cost_of_products(model, ntk):
            return pairing
    return _by_products(model, values, ntk, directions)


def _forward(model: TracedModel, position: int) -> Callable[[list], list[Factor]]:
    values = lambda arrays: model.values(position, model.leaves, arrays)
    return lambda arrays: [*map(Factor, values(arrays))]


def _linearization(
    model: TracedModel,
    position: int,
    program: Program,
    ntk: list[OutputAxes],
    directions: tuple[list[Array], list[Array]],
) -> Linearization:
    rows = model.sides[position].rows
    own, num = directions[position], len(model.axes)
    return Linearization(program, model.leaves, ntk, own, rows.arrays, rows.axes, num)


def _by_sites(
    model: TracedModel,
    values: list[OutputAxes],
    ntk: list[OutputAxes],
    directions: tuple[list[Array], list[Array]],
    *,
    use_rules: bool,
) -> tuple[Sites, float]:
    """The pairing, and what it costs in floating-point operations."""
    linearizations: list[Linearization] = []
    for position, (closed, _) in enumerate(model.programs):
        if position and closed is model.programs[0][0]:
            linearizations.append(linearizations[0])
            continue
        program = Program(closed, len(model.leaves), use_rules=use_rules)
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
    rows = model.sides[0].rows
    closed, _ = model.programs[0]
    pushforward = Pushforward(closed, model.leaves, rows.arrays, rows.axes)
    last = len(model.sides) - 1
    closed, _ = model.programs[last]
    program = Program(closed, len(model.leaves), use_rules=False)
    linearization = _linearization(model, last, program, ntk, directions)
    example_factors = ExampleFactors(
        linearization,
        [output_factors(program, []) for _ in ntk],
        keeps_values=bool(values),
    )
    return Products(pushforward, example_factors, values, ntk, is_symmetric=last == 0)


def _cost_of_products(model: TracedModel, ntk: list[OutputAxes]) -> float:
    """What it costs to push Jacobians through the model, in operations."""
    program = Program(model.programs[0][0], len(model.leaves))
    schedule = _schedule(model, ntk)
    products = sum(map(num_products, program.sites))
    size = sum(math.prod(leaf.shape) for leaf in program.leaves)
    directions = sum(
        math.prod(axes.sizes[label] for label in axes.directions(1)) for axes in ntk
    )
    pairs = schedule.num_pairs * schedule.blocks[0]
    if ntk[0].pairs_examples:
        pairs *= schedule.blocks[1]
    # A tangent is read for each.
    each = 2 * products + FLOPS_PER_BYTE * 4 * size
    return float(pairs * directions * each)


def _schedule(model: TracedModel, ntk: list[OutputAxes]) -> Schedule:
    """How many examples meet at a time."""
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
