"""Factors of examples: what a kernel of a model keeps of a block of rows."""

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
from .._sites.cost import Cost, forming_cost, gram_cost
from .._sites.factors import Factor, Factors
from .._sites.gram import has_gram, of_leaf, OfLeaf
from .._sites.inner_product import AbstractInnerProduct, PlainProduct
from .._sites.program import Program
from .._sites.site import positions, Site
from .metric import InMetric, Metric
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


def divided(factors: PyTree[Factor]) -> tuple[PyTree, PyTree]:
    """The factors without the arrays that all examples share, and with these alone."""
    have_examples = jtu.tree_map(lambda x: x.has_examples, factors, is_leaf=is_factor)
    return eqx.partition(factors, have_examples)


def bytes_of_examples(factors: PyTree[Factor]) -> int:
    return num_bytes(divided(factors)[0])


def _are_plain(rows: list) -> bool:
    """Whether these are numeric arrays that are not explicitly sharded."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return not any(map(is_key, rows)) and explicit_mesh(rows) is None


class ExampleFactors:
    """Computes the factors of the examples of one side, for each output.

    These are those of `Program.factors`. In addition, what examples share is computed
    once, and the factors may be coordinates in a metric.

    - `table`: the sites of the function, or their coordinates in a metric.
    - `inners`: the inner product of the factors of each leaf.
    - `outputs`: the outputs whose Jacobians are combined.
    - `formed`: for each of them, the leaves whose gradients are kept in place of the
        factors of their sites.
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
        are_all: bool = False,
        use_rules: bool = True,
        formed: Collection[int] = (),
        metric: Metric | None = None,
    ):
        """Makes the program of a function of leaves and an example.

        `num_outputs` is the number of all outputs; with `keeps_values`, they are kept,
        too. `side` is the one whose directions are pulled back; without `outputs`,
        nothing is differentiated. Of the `rows`, only
        types matter. `are_all` says whether all examples are processed at once, not in
        blocks. `use_rules` and `formed` are as for `Program`. With a `metric`,
        Jacobians are kept as its coordinates.
        """
        # Without outputs, only values are kept, and no leaf needs sites.
        program = Program(
            traced,
            use_rules=use_rules,
            constant=() if outputs else range(len(traced.leaves)),
            formed=formed,
            num_outputs=num_outputs,
        )
        in_metric = None if metric is None else InMetric(program, metric)
        self.table = program.table if in_metric is None else in_metric.table
        plain = [PlainProduct() for _ in self.table.leaves]
        self.inners = plain if in_metric is None else in_metric.inners()
        self.outputs = outputs
        self.formed: list[list[int]] = [[] for _ in outputs]
        self._rows, self._are_all = rows, are_all
        self._num_values = num_outputs if keeps_values else 0

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
            operands = [a for a, _ in pairs[0] if a is not None]
            return KeptFactors(outs, operands, [[d for _, d in x] for x in pairs])

        inputs = [traced.leaves, [output.cotangents(side) for output in outputs]]
        self._run = TracedFunction(run, inputs, rows.arrays, rows.axes)

    def structs(self, num: int) -> KeptFactors:
        """The shapes of what is computed for `num` examples."""
        return self._output(
            jax.ShapeDtypeStruct((num,) * has + x.shape, x.dtype)
            for x, has in safe_zip(self._run.structs, self._run.has_examples)
        )

    def _output(self, arrays: Iterable[Any]) -> KeptFactors:
        """All factors from the arrays of the traced program."""
        return self._run.output([*map(Factor, arrays, self._run.has_examples)])

    def of(self, rows: list) -> KeptFactors:
        """The factors of some examples.

        XLA for CPUs writes all intermediate values to memory and reads them again. If
        these are larger than the factors and do not fit into the cache, processing a
        few examples at a time is faster and takes less memory.
        """
        axes = self._rows.axes
        num = rows[0].shape[axes[0]]
        if num <= _AT_A_TIME or not self._is_in_turn or not _are_plain(rows):
            return self._of(rows)
        of_examples = lambda rows: divided(self._of(rows.arrays))[0]
        whole = lambda arrays: Rows([*arrays], axes, num)
        in_turn = lambda *arrays: accumulated(
            of_examples, whole(arrays), _AT_A_TIME, Concat()
        )
        at_once = lambda *arrays: of_examples(whole(arrays))
        computed = lax.platform_dependent(*rows, cpu=in_turn, default=at_once)
        _, shared = divided(self._of(whole(rows).one().arrays))
        return eqx.combine(computed, shared)

    @functools.cached_property
    def _is_in_turn(self) -> bool:
        """Whether a CPU processes a few examples at a time."""
        if not self._are_all:
            return False
        made = bytes_of_examples(self.structs(1))
        if made < _CACHE:
            return False
        kept = eqx.filter_eval_shape(self._of, self._rows.one().arrays)
        return made > bytes_of_examples(kept)

    def _of(self, rows: list) -> KeptFactors:
        # What does not depend on the example is computed once for all of them.
        whole = self._output(self._run.run(rows))
        table = self.table
        used = [i for i, _ in enumerate(table.leaves) if table.of(i)]
        jacobians: list[dict[int, Factor]] = []
        cancelled: list[Factor | None] = []
        # The sites of leaves whose factors are kept, for each output.
        by_output: list[list[Site]] = []
        for which, formed in enumerate(self.formed):
            # Whether terms cancel is asked where they are still known: not in tiles.
            factors = self.factors(whole, which)
            leaves = {i: of_leaf(table, factors, i) for i in (*used, *formed)}
            jacobians.append(
                {i: self.inners[i].coordinates(leaves[i].jacobian()) for i in formed}
            )
            as_they_are = [i for i in used if i not in formed]
            inners = [self.inners[i] for i in as_they_are]
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
        values = whole.values[: self._num_values]
        return KeptFactors(
            values, operands, cotangents, jacobians, whole.of_views, cancelled
        )

    def inner(self, which: int, leaf: int) -> AbstractInnerProduct:
        """The inner product of what is kept of a leaf, for an output."""
        return PlainProduct() if leaf in self.formed[which] else self.inners[leaf]

    def factors(self, kept: KeptFactors, which: int, side: int = 0) -> Factors:
        """The factors that belong to an output."""
        return Factors(
            [*kept.operands],
            [*kept.cotangents[which]],
            self.outputs[which].directions(side),
            values=[None if x is None else x.array for x in kept.of_views],
            jacobians=kept.jacobians[which] if kept.jacobians else {},
        )


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
    side = ExampleFactors(
        model.programs[0],
        model.rows[0],
        outputs,
        num_outputs=len(outputs),
        metric=model.request.metric,
    )
    num_leaves = len(side.table.leaves)
    side.formed = [[*range(num_leaves)] for _ in outputs]

    def of_rows(rows: Rows) -> list[Array]:
        results, kept = [], side.of(rows.arrays)
        for output, jacobians in safe_zip(outputs, kept.jacobians):
            lead = [output.sizes[axis] for axis in output.directions(0)]
            whole = []
            for factor in (jacobians[leaf] for leaf in range(num_leaves)):
                x = factor.array if factor.has_examples else factor.array[None]
                size = math.prod(x.shape[1 + len(lead) :])
                x = x.reshape(x.shape[0], *lead, size)
                whole.append(jnp.broadcast_to(x, (rows.total, *lead, size)))
            results.append(jnp.concatenate(whole, axis=-1))
        return results

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
    first: ExampleFactors, second: ExampleFactors, which: int, grid: Grid
) -> Formed:
    """The leaves whose Jacobian is kept, for the output with index `which`."""
    costs = leaf_costs(first, second, which, grid)
    # If a product of factors would start by forming the Jacobians, it is better to form
    # them separately.
    formed = [leaf for leaf, (gram, own) in enumerate(costs) if own < 1.2 * gram]
    return Formed(formed, sum(map(min, costs)))


def leaf_costs(
    first: ExampleFactors, second: ExampleFactors, which: int, grid: Grid
) -> list[LeafCosts]:
    """The costs for each leaf."""
    both, output = (first, second), first.outputs[which]
    example, out = output.examples[-1], (*output.out, *output.parts)

    def products(first: OfLeaf, second: OfLeaf) -> Cost:
        return gram_cost(first, second, example, out) * num_pairs(grid, output)

    def of_one(leaf: int, sides: list[Factors]) -> LeafCosts:
        pairs = safe_zip(both, sides)
        own = [of_leaf(side.table, factors, leaf) for side, factors in pairs]
        sites = [x.sites for x in own]
        if not all(sites):
            return LeafCosts(0.0, math.inf)
        by_gram = math.inf
        if has_gram(*sites):
            by_gram = products(*own).time * first.inners[leaf].num_terms
            # The Jacobian of a leaf that is only added to something is the cotangent
            # there. It is shared with the array that the leaf is added to, and kept
            # once.
            if all(
                len(uses) == 1 and uses[0].operand is None and not positions(uses[0])
                for uses in sites
            ):
                return LeafCosts(by_gram, math.inf)
        forms = Cost()
        for side, (uses, factors, _) in enumerate(own):
            if side == 0 or not grid.is_same:
                forms += forming_cost(uses, factors) * grid.num(side)
        jacobians = (x.perturbed_itself(x.jacobian()) for x in own)
        return LeafCosts(by_gram, (forms + products(*jacobians)).time)

    def count(structs: list[KeptFactors]) -> list[LeafCosts]:
        sides = [
            side.factors(of_side, which, number)
            for number, (side, of_side) in enumerate(safe_zip(both, structs))
        ]
        return [of_one(leaf, sides) for leaf, _ in enumerate(first.table.leaves)]

    pairs = safe_zip(both, grid.sizes)
    return eqx.filter_eval_shape(count, [side.structs(num) for side, num in pairs])
