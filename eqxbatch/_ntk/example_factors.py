"""Factors of examples: what a kernel of a model keeps of a block of rows."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._base.compile import num_bytes
from .._base.mesh import explicit_mesh
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._batch.accumulators import Concat
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._kernels.grid import Grid, Sizes
from .._sites.cancel import cancels
from .._sites.cost import Cost, forming_cost
from .._sites.factors import Factor, Factors
from .._sites.gram import has_gram, of_leaf, OfLeaf
from .._sites.inner_product import AbstractInnerProduct, PlainProduct
from .._sites.program import Program
from .._sites.site import positions, Site
from .in_metric import InMetric
from .metric import Metric
from .output_axes import OutputAxes
from .traced_model import TracedModel


def num_pairs(grid: Grid, output: OutputAxes) -> int:
    """The number of pairs of blocks that are combined."""
    return grid.num(0) * (grid.num(1) if output.pairs_examples else 1)


class KeptFactors(eqx.Module):
    """The factors of some examples, for all outputs; while traced, arrays of one.

    - `values`: the outputs of the function, if requested.
    - `operands`: those of the sites; None where no output needs it.
    - `cotangents`: for each output, those of the sites; None where it needs none.
    - `jacobians`: for each output, the gradients that are kept in place of factors, by
        leaf.
    - `of_views`: the arrays that views of sites read.
    - `cancelled`: for each output, whether terms of a gradient nearly cancel; None if
        this cannot be.
    - `residuals`: those of the derivative, which `Products` needs for rows.
    """

    values: Sequence[Any] = eqx.field(default_factory=list)
    operands: Sequence[Any] = eqx.field(default_factory=list)
    cotangents: Sequence[Sequence[Any]] = eqx.field(default_factory=list)
    jacobians: list[dict[int, Factor]] = eqx.field(default_factory=list)
    of_views: Sequence[Any] = eqx.field(default_factory=list)
    cancelled: list[Factor | None] = eqx.field(default_factory=list)
    residuals: list[Factor] = eqx.field(default_factory=list)


# The approximate size of a CPU core's cache, in bytes.
_CACHE = 2**19


# The number of large examples at a time, which should keep all cores busy.
_AT_A_TIME = 4


def is_factor(x: Any) -> bool:
    return isinstance(x, Factor)


class Divided(NamedTuple):
    """Factors without the arrays that all examples share, and with these alone."""

    of_examples: PyTree
    shared: PyTree


def divided(factors: PyTree[Factor]) -> Divided:
    have_examples = jtu.tree_map(lambda x: x.has_examples, factors, is_leaf=is_factor)
    return Divided(*eqx.partition(factors, have_examples))


def bytes_of_examples(factors: PyTree[Factor]) -> int:
    return num_bytes(divided(factors).of_examples)


def _are_plain(rows: list) -> bool:
    """Whether these are numeric arrays that are not explicitly sharded."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return not any(map(is_key, rows)) and explicit_mesh(rows) is None


class FactorPlan:
    """What the factors of examples of one side are, for each output; none is computed.

    They are those of `Program.factors`, or their coordinates in a metric.

    - `table`: the sites of the function, or their coordinates in a metric.
    - `inners`: the inner product of the factors of each leaf.
    - `outputs`: the outputs whose Jacobians are combined.
    - `traced`: the program that computes them, of an example.
    """

    def __init__(
        self,
        traced: TracedFunction,
        rows: Rows,
        outputs: Sequence[OutputAxes],
        *,
        num_outputs: int,
        side: int = 0,
        keeps_values: bool = False,
        use_rules: bool = True,
        formed: Collection[int] = (),
        metric: Metric | None = None,
    ):
        """Makes the program of a function of leaves and an example.

        `num_outputs` is the number of all outputs; with `keeps_values`, they are kept,
        too. `side` is the one whose directions are pulled back; without `outputs`,
        nothing is differentiated. Of the `rows`, only types matter. `use_rules` and
        `formed` are as for `Program`. With a `metric`, Jacobians are kept as its
        coordinates.
        """
        # Without outputs, only values are kept, and no leaf needs sites.
        program = Program(
            traced,
            use_rules=use_rules,
            constant=() if outputs else range(len(traced.leaves)),
            formed=formed,
            num_outputs=num_outputs,
        )
        # In a metric, leaves and sites are those of its coordinates.
        in_metric = None if metric is None else InMetric(program, metric)
        self.table = program.table if in_metric is None else in_metric.table
        plain = [PlainProduct() for _ in self.table.leaves]
        self.inners = plain if in_metric is None else in_metric.inners()
        self.outputs = outputs
        self.num_values = num_outputs if keeps_values else 0
        self.rows = rows

        # The leaves and the directions are inputs of the program, not of each example,
        # so that it is clear which factors all examples share.
        def run(inputs: list, rows: list) -> KeptFactors:
            leaves, seeds = inputs
            directions = [
                output.directions_of(x, num_outputs, side)
                for output, x in safe_zip(outputs, seeds)
            ]
            example = Rows(rows, (), 1)
            outs, operands, pulled = program.of_example(example, directions, leaves)
            cotangents = [x.cotangents for x in pulled]
            values = program.values(leaves)
            if in_metric is None:
                return KeptFactors(outs, operands, cotangents, of_views=values)
            # The table of the metric has the sites of all parts in order.
            of_parts = (
                in_metric.pairs(operands, x, seed.shape[: len(y.axes)], values)
                for x, y, seed in safe_zip(cotangents, directions, seeds)
            )
            pairs = [[*itertools.chain(*x)] for x in of_parts]
            # Operands are those of any output, and cotangents its own.
            operands = [x.operand for x in pairs[0] if x.operand is not None]
            cotangents = [[x.cotangent for x in of_output] for of_output in pairs]
            return KeptFactors(outs, operands, cotangents)

        inputs = [traced.leaves, [output.cotangents(side) for output in outputs]]
        self.traced = TracedFunction(run, inputs, rows.arrays, rows.axes)

    def structs(self, num: int) -> KeptFactors:
        """The shapes of what is computed for `num` examples."""
        return self.output(
            jax.ShapeDtypeStruct((num,) * has + x.shape, x.dtype)
            for x, has in safe_zip(self.traced.structs, self.traced.has_examples)
        )

    def output(self, arrays: Iterable[Any]) -> KeptFactors:
        """All factors from the arrays of the traced program."""
        return self.traced.output([*map(Factor, arrays, self.traced.has_examples)])

    def factors(self, kept: KeptFactors, which: int, side: int = 0) -> Factors:
        """The factors that belong to an output."""
        return Factors(
            [*kept.operands],
            [*kept.cotangents[which]],
            self.outputs[which].directions(side),
            values=[None if x is None else x.array for x in kept.of_views],
            jacobians=kept.jacobians[which] if kept.jacobians else {},
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleFactors:
    """Computes the factors that are kept of the examples of one side.

    - `formed`: for each output, the leaves whose gradients are kept in place of the
        factors of their sites.
    - `are_all`: whether all examples are processed at once, not in blocks.
    """

    plan: FactorPlan
    formed: Sequence[Collection[int]]
    are_all: bool = False

    def of(self, rows: list) -> KeptFactors:
        """The factors of some examples.

        XLA for CPUs writes all intermediate values to memory and reads them again. If
        these are larger than the factors and do not fit into the cache, processing a
        few examples at a time is faster and takes less memory.
        """
        axes = self.plan.rows.axes
        num = rows[0].shape[axes[0]]
        if num <= _AT_A_TIME or not self._is_in_turn or not _are_plain(rows):
            return self._of(rows)
        of_examples = lambda rows: divided(self._of(rows.arrays)).of_examples
        whole = lambda arrays: Rows([*arrays], axes, num)
        in_turn = lambda *arrays: accumulated(
            of_examples, whole(arrays), _AT_A_TIME, Concat()
        )
        at_once = lambda *arrays: of_examples(whole(arrays))
        computed = lax.platform_dependent(*rows, cpu=in_turn, default=at_once)
        # What examples share is that of any one of them.
        shared = divided(self._of(whole(rows).one().arrays)).shared
        return eqx.combine(computed, shared)

    @functools.cached_property
    def _is_in_turn(self) -> bool:
        """Whether a CPU processes a few examples at a time."""
        if not self.are_all:
            return False
        made = bytes_of_examples(self.plan.structs(1))
        if made < _CACHE:
            return False
        kept = eqx.filter_eval_shape(self._of, self.plan.rows.one().arrays)
        return made > bytes_of_examples(kept)

    def _of(self, rows: list) -> KeptFactors:
        plan, table = self.plan, self.plan.table
        # What does not depend on the example is computed once for all of them.
        whole = plan.output(plan.traced.run(rows))
        used = [i for i, _ in enumerate(table.leaves) if table.of(i)]
        jacobians: list[dict[int, Factor]] = []
        cancelled: list[Factor | None] = []
        # The sites of leaves whose factors are kept, for each output.
        by_output: list[list[Site]] = []
        for which, formed in enumerate(self.formed):
            # Whether terms cancel is asked where they are still known: not in tiles.
            factors = plan.factors(whole, which)
            leaves = {i: of_leaf(table, factors, i) for i in (*used, *formed)}
            jacobians.append(
                {i: plan.inners[i].coordinates(leaves[i].jacobian()) for i in formed}
            )
            as_they_are = [i for i in used if i not in formed]
            inners = [plan.inners[i] for i in as_they_are]
            cancelled.append(cancels([leaves[i] for i in as_they_are], inners))
            by_output.append([site for i in as_they_are for site in table.of(i)])
        # Everything else would be kept for nothing.
        sites = [*itertools.chain(*by_output)]
        operands = _only(
            {i for x in sites for i in (x.operand, x.which)}, whole.operands
        )
        cotangents = [
            _only({x.perturbation for x in sites}, of_output)
            for sites, of_output in safe_zip(by_output, whole.cotangents)
        ]
        values = whole.values[: plan.num_values]
        return KeptFactors(
            values, operands, cotangents, jacobians, whole.of_views, cancelled
        )

    def inner(self, which: int, leaf: int) -> AbstractInnerProduct:
        """The inner product of what is kept of a leaf, for an output."""
        is_formed = leaf in self.formed[which]
        return PlainProduct() if is_formed else self.plan.inners[leaf]


def _only(
    numbers: Collection[int | None], factors: Sequence[Factor | None]
) -> list[Factor | None]:
    """The factors with these numbers, and None in place of the others."""
    return [x if i in numbers else None for i, x in enumerate(factors)]


def features(
    model: TracedModel, sizes: Sizes, _: int
) -> PyTree[Inexact[Array, "n ..."]]:
    """The coordinates of the gradients of all examples, in the metric of the model."""
    outputs = model.axes
    if any(output.is_complex for output in outputs):
        raise ValueError(
            "`features` are coordinates of real gradients, but the model returns "
            "complex numbers. Return their real and imaginary parts."
        )
    # Coordinates are gradients that are formed, of all leaves.
    plan = FactorPlan(
        model.programs[0],
        model.rows[0],
        outputs,
        num_outputs=len(outputs),
        metric=model.request.metric,
    )
    num_leaves = len(plan.table.leaves)
    side = ExampleFactors(plan, [range(num_leaves) for _ in outputs])

    def of_rows(rows: Rows) -> list[Array]:
        results, kept = [], side.of(rows.arrays)
        for output, jacobians in safe_zip(outputs, kept.jacobians):
            lead = [output.sizes[axis] for axis in output.directions(0)]
            # `[examples, *directions, coordinates of all leaves]`
            whole = []
            for factor in (jacobians[leaf] for leaf in range(num_leaves)):
                x = factor.array if factor.has_examples else factor.array[None]
                size = math.prod(x.shape[1 + len(lead) :])
                x = x.reshape(x.shape[0], *lead, size)
                whole.append(jnp.broadcast_to(x, (rows.total, *lead, size)))
            results.append(jnp.concatenate(whole, axis=-1))
        return results

    # There are no columns: blocks of rows are all.
    rows, size = model.rows[0], model.grid(sizes).sizes[0]
    return model.programs[0].output(accumulated(of_rows, rows, size, Concat()))


class LeafCosts(NamedTuple):
    """The cost of the products of a leaf in kernels, in floating-point operations.

    - `by_factors`: with the factors of its sites; infinite if they do not suffice.
    - `by_jacobian`: with its Jacobian, which is formed and kept; infinite if it is kept
        as a factor anyway.
    """

    by_factors: float
    by_jacobian: float


class Formed(NamedTuple):
    """The leaves whose Jacobians are kept, and the cost of all contractions."""

    leaves: list[int]
    cost: float


def choose_formed(
    first: FactorPlan, second: FactorPlan, which: int, grid: Grid
) -> Formed:
    """The leaves whose Jacobian is kept, for the output with index `which`."""
    costs = leaf_costs(first, second, which, grid)
    # If a product of factors would start by forming the Jacobians, it is better to form
    # them separately.
    formed = [
        leaf
        for leaf, (by_factors, by_jacobian) in enumerate(costs)
        if by_jacobian < 1.2 * by_factors
    ]
    return Formed(formed, sum(map(min, costs)))


def leaf_costs(
    first: FactorPlan, second: FactorPlan, which: int, grid: Grid
) -> list[LeafCosts]:
    """The costs for each leaf."""
    both, output = (first, second), first.outputs[which]
    example, out = output.examples[-1], (*output.out, *output.parts)

    def products(inner: AbstractInnerProduct, of_sides: Sequence[OfLeaf]) -> Cost:
        first, second = of_sides
        return inner.cost(first, second, example, out) * num_pairs(grid, output)

    def of_one(leaf: int, sides: list[Factors]) -> LeafCosts:
        pairs = safe_zip(both, sides)
        of_sides = [of_leaf(side.table, factors, leaf) for side, factors in pairs]
        sites = [x.sites for x in of_sides]
        # A leaf that a side does not use adds nothing to the kernel.
        if not all(sites):
            return LeafCosts(0.0, math.inf)
        # Some pairs of sites have no product of factors, so that gradients are formed.
        by_gram = math.inf
        if has_gram(*sites):
            by_gram = products(first.inners[leaf], of_sides).time
            # The Jacobian of a leaf that is only added to something is the cotangent
            # there. It is shared with the array that the leaf is added to, and kept
            # once.
            if all(
                len(uses) == 1 and uses[0].operand is None and not positions(uses[0])
                for uses in sites
            ):
                return LeafCosts(by_gram, math.inf)
        # Jacobians are formed once for each block of a side, and multiplied for each
        # pair.
        forms = Cost()
        for side, (uses, factors, _) in enumerate(of_sides):
            if side == 0 or not grid.is_same:
                forms += forming_cost(uses, factors) * grid.num(side)
        jacobians = [x.perturbed_itself(x.jacobian()) for x in of_sides]
        return LeafCosts(by_gram, (forms + products(PlainProduct(), jacobians)).time)

    def count(structs: list[KeptFactors]) -> list[LeafCosts]:
        sides = [
            side.factors(of_side, which, number)
            for number, (side, of_side) in enumerate(safe_zip(both, structs))
        ]
        return [of_one(leaf, sides) for leaf, _ in enumerate(first.table.leaves)]

    # Costs are read off shapes of blocks: nothing is computed.
    pairs = safe_zip(both, grid.sizes)
    return eqx.filter_eval_shape(count, [side.structs(num) for side, num in pairs])
