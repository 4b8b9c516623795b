"""Factors of examples, from which kernels of the Jacobian are computed.

For each parameter, either the factors of its sites are kept and their Gram matrices
multiplied, or the factors are contracted to the Jacobian, which is kept. The former is
cheaper for large weights that are used at few positions, the latter for small weights
that are used at many positions, such as those of convolutions.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact

from .._base.jaxprs import TracedFunction
from .._base.mesh import explicit_mesh, vary, varying
from .._batch.accumulators import Concat
from .._batch.loop import accumulated, Rows
from .._sites.cost import contraction_cost, Cost, forming_cost, total_cost
from .._sites.factors import Factor, Factors, gradients
from .._sites.gram import cancels, gram_terms, grams, has_gram, OfLeaf
from .._sites.site import leaf_site, positions, Site
from .._sites.trace import Program
from .output_axes import OutputAxes


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The number of examples that are processed at a time, and how often.

    - `blocks`: the block sizes of the two sides; `num_blocks` are the numbers of
        blocks.
    - `num_pairs`: the number of pairs of blocks that are computed.
    - `is_symmetric`: whether the two sides are the same.
    """

    blocks: tuple[int, int]
    num_blocks: tuple[int, int]
    num_pairs: int
    is_symmetric: bool


class Linearization:
    """A function at each example of a batch, and its pullback along some directions.

    - `program`: the program of the function.
    - `cotangents`: for each of the `outputs`, the directions along its first axes.
    - `arrays`, `axes`: the batch. Only its types matter.
    """

    def __init__(
        self,
        program: Program,
        leaves: list,
        outputs: Sequence[OutputAxes],
        cotangents: list[Array],
        arrays: list,
        axes: Sequence[int],
        num_outputs: int,
    ):
        self.program, self.outputs = program, outputs
        self.num_outputs = num_outputs
        self.arrays, self.axes = arrays, list(axes)

        def run(operands: list, rows: list) -> tuple[list, list, list[list], list]:
            leaves, cotangents = operands
            outs, a, pullback = program.linearize(leaves, rows, num_outputs)
            pulled = []
            for output, directions in zip(outputs, cotangents, strict=True):
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

        self._run = TracedFunction(run, [leaves, cotangents], arrays, axes)

    def structs(self, num: int) -> tuple[list, list, list[list], list]:
        """The shapes of what `run` returns for `num` examples."""
        factors = [
            Factor(jax.ShapeDtypeStruct((num,) * has + s.shape, s.dtype), has)
            for s, has in zip(self._run.structs, self._run.has_examples, strict=True)
        ]
        return self._run.output(factors)

    def run(self, rows: list) -> tuple[list, list, list[list], list]:
        """Outputs, operands, cotangents of each output, and values, as `Factor`s.

        Whatever does not depend on the example is computed once for all of them.
        """
        arrays = self._run.run(rows)
        return self._run.output([*map(Factor, arrays, self._run.has_examples)])


@dataclasses.dataclass(frozen=True)
class OutputFactors:
    """Which of a program's factors are kept for one output, and their sites.

    - `perturbations`: the cotangents that are kept unchanged.
    - `formed`: the leaves whose Jacobian is kept, after the cotangents.
    - `sites`: the sites of each leaf that is used.
    """

    perturbations: tuple[int, ...]
    formed: tuple[int, ...]
    sites: dict[int, list[Site]]


def output_factors(program: Program, formed: Sequence[int]) -> OutputFactors:
    """What to keep, if Jacobians are kept for the leaves in `formed`."""
    used = [leaf for leaf in range(len(program.leaves)) if program.sites_of(leaf)]
    as_they_are = [leaf for leaf in used if leaf not in formed]
    sites = {leaf: program.sites_of(leaf) for leaf in as_they_are}
    perturbations = sorted(
        {site.perturbation for of_leaf in sites.values() for site in of_leaf}
    )
    kept = {
        leaf: [
            dataclasses.replace(
                site, perturbation=perturbations.index(site.perturbation)
            )
            for site in of_leaf
        ]
        for leaf, of_leaf in sites.items()
    }
    for position, leaf in enumerate(formed):
        kept[leaf] = [
            leaf_site(leaf, program.leaves[leaf], len(perturbations) + position)
        ]
    return OutputFactors(tuple(perturbations), tuple(formed), kept)


class KeptFactors(eqx.Module):
    """The factors of some examples.

    - `values`: the outputs of the function, if requested.
    - `operands`: the operands of sites, by index.
    - `cotangents`: for each output, cotangents of sites, then Jacobians.
    - `of_views`: the arrays that views of sites read.
    - `cancelled`: for each output, whether terms of a gradient nearly cancel; None if
        this cannot be.
    """

    values: list[Factor]
    operands: dict[int, Factor]
    cotangents: list[list[Factor]]
    of_views: list[Factor | None]
    cancelled: list[Factor | None]


# The approximate size of a CPU core's cache, in bytes.
_CACHE = 2**19


# The number of large examples at a time, which should keep all cores busy.
_AT_A_TIME = 4


def _is_factor(x: Any) -> bool:
    return isinstance(x, Factor)


def _bytes_of_examples(tree: Any) -> int:
    """The bytes of the factors that differ between examples."""
    factors = jtu.tree_leaves(tree, is_leaf=_is_factor)
    arrays = [x.array for x in factors if _is_factor(x) and x.has_examples]
    return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)


def _are_plain(rows: list) -> bool:
    """Whether these are numeric arrays that are not explicitly sharded."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return not any(map(is_key, rows)) and explicit_mesh(rows) is None


class ExampleFactors:
    """Computes the factors of the examples of one side, for each output.

    With `keeps_values`, the outputs of the function are kept, too. `are_all` says
    whether all examples are processed at once, not in blocks.
    """

    def __init__(
        self,
        linearization: Linearization,
        kept: list[OutputFactors],
        *,
        keeps_values: bool,
        are_all: bool = False,
    ):
        self.linearization, self.kept, self._are_all = linearization, kept, are_all
        used = {
            site.operand
            for one in kept
            for of_leaf in one.sites.values()
            for site in of_leaf
            if site.operand is not None
        }
        self._operands = sorted(used)
        self._keeps_values = keeps_values

    def of(self, rows: list) -> KeptFactors:
        """The factors of some examples.

        XLA for CPUs writes all intermediate values to memory and reads them again. If
        these are larger than the factors and do not fit into the cache, processing a
        few examples at a time is faster and takes less memory.
        """
        axes = self.linearization.axes
        num = rows[0].shape[axes[0]]
        if num <= _AT_A_TIME or not self._is_in_turn or not _are_plain(rows):
            return self._of(rows)
        all_rows = Rows(rows, tuple(axes), num)
        structs = eqx.filter_eval_shape(self._of, all_rows.one())
        factors, treedef = jtu.tree_flatten(structs, is_leaf=_is_factor)

        def arrays(rows: list, has_examples: bool) -> list[Array]:
            found = jtu.tree_leaves(self._of(rows), is_leaf=_is_factor)
            return [x.array for x in found if x.has_examples is has_examples]

        in_turn = lambda *rows: [
            *accumulated(
                lambda some, _: arrays(some, True),
                Rows([*rows], all_rows.axes, num),
                _AT_A_TIME,
                Concat(),
            )
        ]
        at_once = lambda *rows: arrays([*rows], True)
        of_examples = lax.platform_dependent(*rows, cpu=in_turn, default=at_once)
        shared = arrays(all_rows.one(), False)
        found = [(of_examples if x.has_examples else shared).pop(0) for x in factors]
        pairs = zip(factors, found, strict=True)
        return jtu.tree_unflatten(treedef, [x.of(array) for x, array in pairs])

    @functools.cached_property
    def _is_in_turn(self) -> bool:
        """Whether a CPU processes a few examples at a time."""
        if not self._are_all:
            return False
        made = _bytes_of_examples(self.linearization.structs(1))
        if made < _CACHE:
            return False
        rows = Rows(self.linearization.arrays, tuple(self.linearization.axes), 1)
        kept = _bytes_of_examples(eqx.filter_eval_shape(self._of, rows.one()))
        return made > kept

    def _of(self, rows: list) -> KeptFactors:
        outs, operands, cotangents, of_views = self.linearization.run(rows)
        values_of_views = [None if x is None else x.array for x in of_views]
        outputs, program = self.linearization.outputs, self.linearization.program
        kept: list[list[Factor]] = []
        cancelled: list[Factor | None] = []
        for output, own, pulled in zip(outputs, self.kept, cotangents, strict=True):
            kept.append([pulled[perturbation] for perturbation in own.perturbations])
            factors = Factors(
                operands, pulled, output.directions(0), values=values_of_views
            )
            for leaf in own.formed:
                sites = program.sites_of(leaf)
                jacobian = gradients(sites, factors, program.leaves[leaf])
                kept[-1].append(Factor(jacobian, factors.has_examples(sites)))
            of = lambda leaf: (program.sites_of(leaf), factors, program.leaves[leaf])
            as_they_are = [leaf for leaf in own.sites if leaf not in own.formed]
            cancelled.append(cancels([OfLeaf(*of(leaf)) for leaf in as_they_are]))
        values = outs[: self.linearization.num_outputs] if self._keeps_values else []
        operands = {i: operands[i] for i in self._operands}
        return KeptFactors(values, operands, kept, of_views, cancelled)

    def of_outputs(self, kept: KeptFactors, side: int) -> list[Factors]:
        """The factors that belong to each output."""
        operands = [
            kept.operands.get(i, Factor(None, False))
            for i, _ in enumerate(self.linearization.program.operands)
        ]
        outputs = self.linearization.outputs
        values = [None if x is None else x.array for x in kept.of_views]
        return [
            Factors(operands, own, output.directions(side), values=values)
            for output, own in zip(outputs, kept.cotangents, strict=True)
        ]


def kernel(
    output: OutputAxes,
    leaves: list,
    kept: tuple[OutputFactors, OutputFactors],
    factors: tuple[Factors, Factors],
    cancelled: Sequence[Factor | None],
    num: tuple[int, int],
) -> Inexact[Array, "..."]:
    """The kernel of the Jacobian of an output, before its axes are arranged.

    `cancelled` is that of both sides, and `num` gives the numbers of examples.
    """
    out = (*output.out, *output.parts)
    # The axes of a matrix product: shared axes, then those of one side, then those of
    # the other. They are put in order once, at the end.
    names = [{*output.examples[:1], *output.directions(0)}]
    names.append({*output.examples[1:], *output.directions(1)})
    labels = (
        *(label for label in out if label in names[0] & names[1]),
        *(label for label in out if label in names[0] - names[1]),
        *(label for label in out if label in names[1] - names[0]),
    )
    total: Array = jnp.zeros((1,) * len(labels), jnp.float32)
    sizes = {**output.sizes, **dict(zip(output.examples, num, strict=False))}
    both = [leaf for leaf in kept[0].sites if leaf in kept[1].sites]
    pairs = [
        (
            OfLeaf(kept[0].sites[leaf], factors[0], leaves[leaf]),
            OfLeaf(kept[1].sites[leaf], factors[1], leaves[leaf]),
        )
        for leaf in both
    ]
    products = grams(pairs, cancelled, output.examples, labels, sizes)
    for leaf, product in zip(both, products, strict=True):
        is_complex = jnp.issubdtype(leaves[leaf].dtype, jnp.complexfloating)
        # A complex parameter counts as two real ones. If there is a complex derivative,
        # each of them contributes its square.
        product = product * (0.5 if output.is_complex and is_complex else 1.0)
        dtype = np.promote_types(total.dtype, product.dtype)
        total = total.astype(dtype) + product.astype(dtype)
    total = jnp.broadcast_to(total, [sizes[label] for label in labels])
    return jnp.transpose(total, [labels.index(label) for label in out])


def choose_formed(
    first: Linearization, second: Linearization, which: int, schedule: Schedule
) -> tuple[list[int], float]:
    """The leaves whose Jacobian is kept, for the output with index `which`.

    Also returns the cost of all contractions, in floating-point operations.
    """
    formed, total = [], 0.0
    for leaf in range(len(first.program.leaves)):
        costs = _costs(first, second, leaf, which, schedule)
        total += min(costs)
        # If a product of factors would start by forming the Jacobians, it is better to
        # form them separately.
        if costs[1] < 1.2 * costs[0]:
            formed.append(leaf)
    return formed, total


def _costs(
    first: Linearization,
    second: Linearization,
    leaf: int,
    which: int,
    schedule: Schedule,
) -> tuple[float, float]:
    """The cost of a leaf with its factors, and with the Jacobian formed from them."""
    sites = first.program.sites_of(leaf)
    others = second.program.sites_of(leaf)
    if not sites or not others:
        return 0.0, math.inf
    by_factors = has_gram(sites, others)
    # The Jacobian of a leaf that is only added to something is the cotangent there. It
    # is shared with the array that the leaf is added to, and kept once.
    are_formed = by_factors and all(
        len(uses) == 1 and uses[0].operand is None and not positions(uses[0])
        for uses in (sites, others)
    )
    output = first.outputs[which]
    struct = first.program.leaves[leaf]
    pair = zip((first, second), schedule.blocks, strict=True)
    structs = [side.structs(num) for side, num in pair]
    if 0 in schedule.blocks:
        return (0.0, math.inf) if by_factors else (math.inf, 0.0)

    def count(structs: list) -> tuple[Cost, Cost, Cost]:
        """The costs of Gram matrices, of forming Jacobians, and of their products."""
        sides = [
            Factors(
                operands,
                pulled[which],
                output.directions(side),
                values=[None if x is None else x.array for x in of_views],
            )
            for side, (_, operands, pulled, of_views) in enumerate(structs)
        ]
        example, out = output.examples[-1], (*output.out, *output.parts)
        grams = forms = Cost()
        if by_factors:
            pairs = gram_terms(sites, sides[0], others, sides[1], example)
            grams = total_cost(contraction_cost(terms, out) for terms, _ in pairs)
        jacobians = []
        rows = zip((sites, others), sides, schedule.num_blocks, strict=True)
        for side, (uses, factors, num) in enumerate(rows):
            if side == 0 or not schedule.is_symmetric:
                forms += forming_cost(uses, factors) * num
            jacobian = gradients(uses, factors, struct)
            factor = Factor(jacobian, factors.has_examples(uses))
            jacobians.append(Factors([], [factor], output.directions(side)))
        site = [leaf_site(leaf, struct, 0)]
        pairs = gram_terms(site, jacobians[0], site, jacobians[1], example)
        products = total_cost(contraction_cost(terms, out) for terms, _ in pairs)
        return grams, forms, products

    grams, forms, products = eqx.filter_eval_shape(count, structs)
    by_gram = (grams * schedule.num_pairs).time if by_factors else math.inf
    by_jacobian = (forms + products * schedule.num_pairs).time
    return by_gram, math.inf if are_formed else by_jacobian
