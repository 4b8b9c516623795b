"""Factors of examples, from which kernels of the Jacobian are computed.

For each parameter, either the factors of its sites are kept and their Gram matrices
multiplied, or the factors are contracted to the Jacobian, which is kept. The former is
cheaper for large weights that are used at few positions, the latter for small weights
that are used at many positions, such as those of convolutions.
"""

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._base.jaxprs import TracedFunction
from .._base.mesh import explicit_mesh, vary, varying
from .._base.trees import safe_zip
from .._batch.accumulators import Concat
from .._batch.loop import accumulated, Rows
from .._kernels.kernel import Grid
from .._sites.cost import contraction_cost, Cost, forming_cost, total_cost
from .._sites.factors import Factor, Factors, gradients
from .._sites.gram import cancels, gram_terms, grams, has_gram, OfLeaf
from .._sites.site import leaf_site, positions
from .._sites.trace import Program
from .output_axes import OutputAxes


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
    """

    values: list[Factor]
    operands: dict[int, Factor]
    cotangents: list[dict[int, Factor]]
    of_views: list[Factor | None]
    cancelled: list[Factor | None]


# The approximate size of a CPU core's cache, in bytes.
_CACHE = 2**19


# The number of large examples at a time, which should keep all cores busy.
_AT_A_TIME = 4


def is_factor(x: Any) -> bool:
    return isinstance(x, Factor)


def arrays_of(factors: PyTree[Factor], *, has_examples: bool) -> list:
    """The arrays or structs that differ between examples, or those that do not."""
    found = jtu.tree_leaves(factors, is_leaf=is_factor)
    return [x.array for x in found if x.has_examples is has_examples]


def filled(
    factors: PyTree[Factor], of_examples: Iterable[Array], shared: Iterable[Array]
) -> PyTree[Factor]:
    """The same factors with other arrays: those of `arrays_of`."""
    rest = {True: [*of_examples], False: [*shared]}
    with_array = lambda x: x.of(rest[x.has_examples].pop(0))
    return jtu.tree_map(with_array, factors, is_leaf=is_factor)


def bytes_of_examples(factors: PyTree[Factor]) -> int:
    """The bytes of the factors that differ between examples."""
    arrays = arrays_of(factors, has_examples=True)
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _are_plain(rows: list) -> bool:
    """Whether these are numeric arrays that are not explicitly sharded."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return not any(map(is_key, rows)) and explicit_mesh(rows) is None


def _arrays(factors: list[Factor | None]) -> list:
    return [None if x is None else x.array for x in factors]


class ExampleFactors:
    """Computes the factors of the examples of one side, for each output.

    - `program`: the function, with its sites.
    - `outputs`: the outputs whose Jacobians are combined.
    - `kept`: for each of them, the program with a Jacobian in place of the sites of
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
    ):
        """Makes the program of a function of leaves and an example.

        `num_outputs` is the number of all outputs; with `keeps_values`, they are kept,
        too. `side` is the one whose directions are pulled back. Of the `rows`, only
        types matter. `are_all` says whether all examples are processed at once, not in
        blocks. `use_rules` and `formed` are as for `Program`.
        """
        program = Program(
            traced, use_rules=use_rules, formed=formed, num_outputs=num_outputs
        )
        self.program, self.outputs = program, outputs
        self.kept = [program for _ in outputs]
        self._rows, self._are_all = rows, are_all
        self._num_values = num_outputs if keeps_values else 0

        def run(operands: list, rows: list) -> tuple[list, list, list[list], list]:
            leaves, cotangents = operands
            outs, a, pullback = program.linearize(leaves, rows, num_outputs)
            pulled = []
            for output, directions in safe_zip(outputs, cotangents):
                num = len(output.directions(0))
                lead, shape = directions.shape[:num], directions.shape[num:]

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
            return outs, a, pulled, program.values(leaves)

        operands = [traced.leaves, [output.cotangents(side) for output in outputs]]
        self._run = TracedFunction(run, operands, rows.arrays, rows.axes)

    def form(self, leaves: Sequence[Sequence[int]]) -> None:
        """Keeps Jacobians in place of factors, for some leaves of each output."""
        self.kept = [self.program.with_jacobians(formed) for formed in leaves]

    def structs(self, num: int) -> tuple[list, list, list[list], list]:
        """The shapes of what `_computed` returns for `num` examples."""
        return self._output(
            jax.ShapeDtypeStruct((num,) * has + x.shape, x.dtype)
            for x, has in safe_zip(self._run.structs, self._run.has_examples)
        )

    def _computed(self, rows: list) -> tuple[list, list, list[list], list]:
        """Outputs, operands, cotangents of each output, and values, as `Factor`s.

        Whatever does not depend on the example is computed once for all of them.
        """
        return self._output(self._run.run(rows))

    def _output(self, arrays: Iterable) -> tuple[list, list, list[list], list]:
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
        arrays = lambda rows: arrays_of(self._of(rows), has_examples=True)
        in_turn = lambda *rows: [
            *accumulated(
                lambda some, _: arrays(some),
                Rows([*rows], axes, num),
                _AT_A_TIME,
                Concat(),
            )
        ]
        at_once = lambda *rows: arrays([*rows])
        of_examples = lax.platform_dependent(*rows, cpu=in_turn, default=at_once)
        one = Rows(rows, axes, num).one()
        structs = eqx.filter_eval_shape(self._of, one)
        shared = arrays_of(self._of(one), has_examples=False)
        return filled(structs, of_examples, shared)

    @functools.cached_property
    def _is_in_turn(self) -> bool:
        """Whether a CPU processes a few examples at a time."""
        if not self._are_all:
            return False
        made = bytes_of_examples(self.structs(1))
        if made < _CACHE:
            return False
        kept = eqx.filter_eval_shape(self._of, self._rows.one())
        return made > bytes_of_examples(kept)

    def _of(self, rows: list) -> KeptFactors:
        outs, operands, cotangents, of_views = self._computed(rows)
        program, num = self.program, len(self.program.perturbations)
        kept: list[dict[int, Factor]] = []
        cancelled: list[Factor | None] = []
        for output, own, pulled in safe_zip(self.outputs, self.kept, cotangents):
            factors = Factors(
                operands, pulled, output.directions(0), values=_arrays(of_views)
            )
            found, as_they_are = {}, {}
            for site in own.sites:
                of_leaf = _of_leaf(program, factors, site.leaf)
                if site.perturbation < num:
                    as_they_are[site.leaf] = of_leaf
                    found[site.perturbation] = pulled[site.perturbation]
                else:
                    has_examples = factors.has_examples(of_leaf.sites)
                    jacobian = Factor(gradients(*of_leaf), has_examples)
                    found[site.perturbation] = jacobian
            kept.append(found)
            cancelled.append(
                cancels([as_they_are[leaf] for leaf in sorted(as_they_are)])
            )
        used = {site.operand for own in self.kept for site in own.sites}
        operands = {i: x for i, x in enumerate(operands) if i in used}
        values = outs[: self._num_values]
        return KeptFactors(values, operands, kept, of_views, cancelled)

    def factors(self, kept: KeptFactors, which: int, side: int) -> Factors:
        """The factors that belong to an output, for `sites` of `kept[which]`."""
        none = Factor(None, has_examples=False)
        of = lambda found, num: [found.get(i, none) for i in range(num)]
        program, output = self.kept[which], self.outputs[which]
        return Factors(
            of(kept.operands, len(program.operands)),
            of(kept.cotangents[which], len(program.perturbations)),
            output.directions(side),
            values=_arrays(kept.of_views),
        )


def _of_leaf(program: Program, factors: Factors, leaf: int) -> OfLeaf:
    return OfLeaf(program.sites_of(leaf), factors, program.leaves[leaf])


def kernel(
    output: OutputAxes,
    which: int,
    sides: tuple[ExampleFactors, ExampleFactors],
    kept: tuple[KeptFactors, KeptFactors],
    num: tuple[int, int],
) -> Inexact[Array, "..."]:
    """The kernel of the Jacobian of an output, before its axes are arranged.

    `which` is the position among the outputs whose factors are kept, and `num` gives
    the numbers of examples.
    """
    out = (*output.out, *output.parts)
    # The axes of a matrix product: shared axes, then those of one side, then those of
    # the other. They are put in order once, at the end.
    first = {*output.examples[:1], *output.directions(0)}
    second = {*output.examples[1:], *output.directions(1)}
    place = lambda label: 0 if label in first & second else 1 if label in first else 2
    labels = tuple(sorted(out, key=place))
    total: Array = jnp.zeros((1,) * len(labels), jnp.float32)
    sizes = {**output.sizes, **dict(zip(output.examples, num, strict=False))}
    of_sides: list[dict[int, OfLeaf]] = []
    for side, (own, of_side) in enumerate(safe_zip(sides, kept)):
        program, factors = own.kept[which], own.factors(of_side, which, side)
        leaves = {site.leaf for site in program.sites}
        of_sides.append({i: _of_leaf(program, factors, i) for i in leaves})
    leaves = sides[0].program.leaves
    both = sorted(of_sides[0].keys() & of_sides[1].keys())
    pairs = [(of_sides[0][leaf], of_sides[1][leaf]) for leaf in both]
    cancelled = [of_side.cancelled[which] for of_side in kept]
    products = grams(pairs, cancelled, output.examples, labels, sizes)
    for leaf, product in safe_zip(both, products):
        is_complex = jnp.issubdtype(leaves[leaf].dtype, jnp.complexfloating)
        # A complex parameter counts as two real ones. If there is a complex derivative,
        # each of them contributes its square.
        product = product * (0.5 if output.is_complex and is_complex else 1.0)
        dtype = np.promote_types(total.dtype, product.dtype)
        total = total.astype(dtype) + product.astype(dtype)
    total = jnp.broadcast_to(total, [sizes[label] for label in labels])
    return jnp.transpose(total, [labels.index(label) for label in out])


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
        pairs = gram_terms(first, second, example)
        total = total_cost(contraction_cost(terms, out) for terms, _ in pairs)
        return total * num_pairs(grid, output)

    def of_leaf(leaf: int, sides: list[Factors]) -> tuple[float, float]:
        pairs = safe_zip(both, sides)
        own = [_of_leaf(side.program, factors, leaf) for side, factors in pairs]
        sites = [x.sites for x in own]
        if not all(sites):
            return 0.0, math.inf
        by_gram = math.inf
        if has_gram(*sites):
            by_gram = products(*own).time
            # The Jacobian of a leaf that is only added to something is the cotangent
            # there. It is shared with the array that the leaf is added to, and kept
            # once.
            if all(
                len(uses) == 1 and uses[0].operand is None and not positions(uses[0])
                for uses in sites
            ):
                return by_gram, math.inf
        forms, jacobians, struct = Cost(), [], first.program.leaves[leaf]
        site = [leaf_site(leaf, struct, 0)]
        for side, (uses, factors, _) in enumerate(own):
            if side == 0 or not grid.is_same:
                forms += forming_cost(uses, factors) * grid.num(side)
            jacobian = gradients(uses, factors, struct)
            factor = Factor(jacobian, factors.has_examples(uses))
            formed = Factors([], [factor], factors.outputs)
            jacobians.append(OfLeaf(site, formed, struct))
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
        return [of_leaf(leaf, sides) for leaf, _ in enumerate(first.program.leaves)]

    pairs = safe_zip(both, grid.sizes)
    return eqx.filter_eval_shape(count, [side.structs(num) for side, num in pairs])
