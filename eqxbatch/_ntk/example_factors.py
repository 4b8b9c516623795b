"""Factors of examples: what a kernel of a model keeps of a block of rows."""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._base.compile import num_bytes
from .._base.mesh import explicit_mesh
from .._base.structs import vary
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._base.versions import varying
from .._batch.accumulators import Concat
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._kernels.grid import Grid, Sizes
from .._sites.cancel import cancels
from .._sites.cost import Cost, forming_cost, gram_cost
from .._sites.factors import Factor, Factors
from .._sites.gram import has_gram, OfLeaf
from .._sites.inner_product import AbstractInnerProduct, PlainProduct
from .._sites.program import Program
from .._sites.site import positions
from .._sites.table import SiteTable
from .metric import InMetric, Metric
from .output_axes import OutputAxes
from .traced_model import TracedModel


def num_pairs(grid: Grid, output: OutputAxes) -> int:
    """The number of pairs of blocks that are combined."""
    return grid.num(0) * (grid.num(1) if output.pairs_examples else 1)


class KeptFactors(eqx.Module):
    """The factors of some examples.

    - `values`: the outputs of the function, if requested.
    - `operands`: the operands of sites, by index.
    - `cotangents`: for each output, cotangents of sites and Jacobians, by index.
    - `of_views`: the arrays that views of sites read.
    - `cancelled`: for each output, whether terms of a gradient nearly cancel; None if
        this cannot be.
    - `residuals`: those of the derivative, which `Products` needs for rows.
    """

    values: list[Factor] = eqx.field(default_factory=list)
    operands: dict[int, Factor] = eqx.field(default_factory=dict)
    cotangents: list[dict[int, Factor]] = eqx.field(default_factory=list)
    of_views: list[Factor | None] = eqx.field(default_factory=list)
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


def _arrays(factors: list[Factor | None]) -> list:
    return [None if x is None else x.array for x in factors]


class ExampleFactors:
    """Computes the factors of the examples of one side, for each output.

    - `table`: the sites of the function, or their coordinates in a metric.
    - `inners`: the inner product of the factors of each leaf.
    - `outputs`: the outputs whose Jacobians are combined.
    - `kept`: for each of them, the table with a Jacobian in place of the sites of
        some leaves; see `form`.
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
        self.kept = [self.table for _ in outputs]
        self._rows, self._are_all = rows, are_all
        self._num_values = num_outputs if keeps_values else 0

        def run(operands: list, rows: list) -> tuple[list, list, list[list], list]:
            leaves, cotangents = operands
            outs, a, pullback = program.linearize(leaves, rows, num_outputs)
            pulled, leads = [], []
            for output, directions in safe_zip(outputs, cotangents):
                num = len(output.directions(0))
                lead, shape = directions.shape[:num], directions.shape[num:]
                leads.append(lead)

                def pull(direction: Array, index: int = output.index) -> list:
                    zeros = [jnp.zeros_like(out) for out in outs]
                    direction = vary(direction, varying(jax.typeof(outs[index])))
                    return pullback([*zeros[:index], direction, *zeros[index + 1 :]])

                each = directions.reshape(-1, *shape)
                if each.shape[0] == 1:
                    # An axis of size 1 would lead to other, slower matrix products.
                    found = [d[None] for d in pull(each[0])]
                else:
                    found = jax.vmap(pull)(each)
                pulled.append([d.reshape(*lead, *d.shape[1:]) for d in found])
            values = program.values(leaves)
            if in_metric is None:
                return outs, a, pulled, values
            pairs = [
                [*itertools.chain(*in_metric.pairs(a, d, lead, values))]
                for d, lead in safe_zip(pulled, leads)
            ]
            operands = [a for a, _ in pairs[0] if a is not None]
            return outs, operands, [[d for _, d in of_out] for of_out in pairs], []

        operands = [traced.leaves, [output.cotangents(side) for output in outputs]]
        self._run = TracedFunction(run, operands, rows.arrays, rows.axes)

    def form(self, leaves: Sequence[Sequence[int]]) -> None:
        """Keeps Jacobians in place of factors, for some leaves of each output."""
        self.kept = [self.table.with_jacobians(formed) for formed in leaves]

    def structs(self, num: int) -> tuple[list, list, list[list], list]:
        """The shapes of what is computed for `num` examples."""
        return self._output(
            jax.ShapeDtypeStruct((num,) * has + x.shape, x.dtype)
            for x, has in safe_zip(self._run.structs, self._run.has_examples)
        )

    def _output(self, arrays: Iterable) -> tuple[list, list, list[list], list]:
        """Outputs, operands, cotangents of each output, and values, as `Factor`s."""
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
        outs, operands, cotangents, of_views = self._output(self._run.run(rows))
        table, num = self.table, len(self.table.perturbations)
        kept: list[dict[int, Factor]] = []
        cancelled: list[Factor | None] = []
        for output, own, pulled in safe_zip(self.outputs, self.kept, cotangents):
            factors = Factors(
                operands, pulled, output.directions(0), values=_arrays(of_views)
            )
            found, as_they_are = {}, {}
            for site in own.sites:
                of_leaf = factors_of_leaf(table, factors, site.leaf)
                if site.perturbation < num:
                    as_they_are[site.leaf] = of_leaf
                    found[site.perturbation] = pulled[site.perturbation]
                else:
                    inner = self.inners[site.leaf]
                    found[site.perturbation] = inner.coordinates(of_leaf.jacobian())
            kept.append(found)
            leaves = sorted(as_they_are)
            of_leaves = [as_they_are[leaf] for leaf in leaves]
            cancelled.append(cancels(of_leaves, [self.inners[i] for i in leaves]))
        every = [site for own in self.kept for site in own.sites]
        used = {i for site in every for i in (site.operand, site.which)}
        operands = {i: x for i, x in enumerate(operands) if i in used}
        values = outs[: self._num_values]
        return KeptFactors(values, operands, kept, of_views, cancelled)

    def inner(self, which: int, leaf: int) -> AbstractInnerProduct:
        """The inner product of what is kept of a leaf, for an output."""
        num = len(self.table.perturbations)
        is_formed = any(x.perturbation >= num for x in self.kept[which].of(leaf))
        return PlainProduct() if is_formed else self.inners[leaf]

    def factors(self, kept: KeptFactors, which: int, side: int) -> Factors:
        """The factors that belong to an output, for `sites` of `kept[which]`."""
        none = Factor(None, has_examples=False)
        of = lambda found, num: [found.get(i, none) for i in range(num)]
        table, output = self.kept[which], self.outputs[which]
        return Factors(
            of(kept.operands, len(table.operands)),
            of(kept.cotangents[which], len(table.perturbations)),
            output.directions(side),
            values=_arrays(kept.of_views),
        )


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
    num_leaves, first = len(side.table.leaves), len(side.table.perturbations)
    side.form([range(num_leaves) for _ in outputs])

    def of_rows(rows: Rows) -> list[Array]:
        results, kept = [], side.of(rows.arrays)
        for output, found in safe_zip(outputs, kept.cotangents):
            lead = [output.sizes[axis] for axis in output.directions(0)]
            whole = []
            for factor in (found[first + leaf] for leaf in range(num_leaves)):
                x = factor.array if factor.has_examples else factor.array[None]
                size = math.prod(x.shape[1 + len(lead) :])
                x = x.reshape(x.shape[0], *lead, size)
                whole.append(jnp.broadcast_to(x, (rows.total, *lead, size)))
            results.append(jnp.concatenate(whole, axis=-1))
        return results

    rows, size = model.rows[0], model.grid(sizes).sizes[0]
    return model.programs[0].output(accumulated(of_rows, rows, size, Concat()))


def factors_of_leaf(table: SiteTable, factors: Factors, leaf: int) -> OfLeaf:
    return OfLeaf(table.of(leaf), factors, table.leaves[leaf])


def choose_formed(
    first: ExampleFactors, second: ExampleFactors, which: int, grid: Grid
) -> tuple[list[int], float]:
    """The leaves whose Jacobian is kept, for the output with index `which`.

    Also returns the cost of all contractions, in floating-point operations.
    """
    costs = leaf_costs(first, second, which, grid)
    # If a product of factors would start by forming the Jacobians, it is better to form
    # them separately.
    formed = [leaf for leaf, (gram, own) in enumerate(costs) if own < 1.2 * gram]
    return formed, sum(map(min, costs))


def leaf_costs(
    first: ExampleFactors, second: ExampleFactors, which: int, grid: Grid
) -> list[tuple[float, float]]:
    """For each leaf, the cost with its factors, and that with its Jacobian."""
    both, output = (first, second), first.outputs[which]
    example, out = output.examples[-1], (*output.out, *output.parts)

    def products(first: OfLeaf, second: OfLeaf) -> Cost:
        return gram_cost(first, second, example, out) * num_pairs(grid, output)

    def of_leaf(leaf: int, sides: list[Factors]) -> tuple[float, float]:
        pairs = safe_zip(both, sides)
        own = [factors_of_leaf(side.table, factors, leaf) for side, factors in pairs]
        sites = [x.sites for x in own]
        if not all(sites):
            return 0.0, math.inf
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
                return by_gram, math.inf
        forms = Cost()
        for side, (uses, factors, _) in enumerate(own):
            if side == 0 or not grid.is_same:
                forms += forming_cost(uses, factors) * grid.num(side)
        jacobians = (x.perturbed_itself(x.jacobian()) for x in own)
        return by_gram, (forms + products(*jacobians)).time

    def count(structs: list) -> list[tuple[float, float]]:
        sides = [
            Factors(
                operands,
                pulled[which],
                output.directions(side),
                values=_arrays(of_views),
            )
            for side, (_, operands, pulled, of_views) in enumerate(structs)
        ]
        return [of_leaf(leaf, sides) for leaf, _ in enumerate(first.table.leaves)]

    pairs = safe_zip(both, grid.sizes)
    return eqx.filter_eval_shape(count, [side.structs(num) for side, num in pairs])
