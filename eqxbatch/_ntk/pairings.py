"""Factors of examples, and the methods that combine them to kernels.

For each parameter, either the factors of its sites are kept and their Gram matrices
multiplied, or the factors are contracted to the Jacobian, which is kept. The former is
cheaper for large weights that are used at few positions, the latter for small weights
that are used at many positions, such as those of convolutions.
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact, PyTree

from .._base.dtypes import is_complex, widened
from .._base.jaxprs import full_varying_as, run_jaxpr, vary, varying
from .._base.mesh import explicit_mesh
from .._base.modes import without_forward_mode
from .._base.platforms import in_opaque_branch, num_bytes, opaque_true
from .._base.traced_function import TracedFunction
from .._base.trees import log, safe_zip
from .._batch.accumulators import Concat
from .._batch.loop import accumulated, Rows
from .._kernels.kernel import AbstractBlockKernel, Flat, Grid, KernelLeaf, SAMPLE, Sizes
from .._sites.cost import Cost, forming_cost, gram_cost, num_products
from .._sites.factors import contract, EXAMPLE, Factor, Factors, OTHER_EXAMPLE
from .._sites.gram import cancels, grams, has_gram, OfLeaf
from .._sites.site import positions
from .._sites.trace import Program
from .metric import InMetric, Metric
from .traced_model import Mirror, Name, OutputAxes, TracedModel


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


def _is_factor(x: Any) -> bool:
    return isinstance(x, Factor)


def _divided(factors: PyTree[Factor]) -> tuple[PyTree, PyTree]:
    """The factors without the arrays that all examples share, and with these alone."""
    have_examples = jtu.tree_map(lambda x: x.has_examples, factors, is_leaf=_is_factor)
    return eqx.partition(factors, have_examples)


def _bytes_of_examples(factors: PyTree[Factor]) -> int:
    return num_bytes(_divided(factors)[0])


def _are_plain(rows: list) -> bool:
    """Whether these are numeric arrays that are not explicitly sharded."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return not any(map(is_key, rows)) and explicit_mesh(rows) is None


def _symmetrised(kernels: PyTree[Array], mirror: Mirror) -> PyTree[Array]:
    """The mean of kernels and their mirror images.

    XLA would compute a mirror image of products as products of its own, with other
    rounding. It does not look through a barrier or, for CPUs, through a condition.
    """
    leaves, treedef = jtu.tree_flatten(lax.optimization_barrier(kernels))
    if not all(x.size for x in leaves):
        return kernels

    def mean(*leaves: Array) -> list[Array]:
        mirrored = jtu.tree_leaves(mirror(treedef.unflatten(leaves)))
        return [(x + y) / 2 for x, y in safe_zip(leaves, mirrored)]

    always = opaque_true(leaves[0][(0,) * leaves[0].ndim])
    return treedef.unflatten(in_opaque_branch(mean, always)(*leaves))


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
        self.program = program if in_metric is None else in_metric.program
        self.outputs = outputs
        self.kept = [self.program for _ in outputs]
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
        self.kept = [self.program.with_jacobians(formed) for formed in leaves]

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
        of_examples = lambda rows, _: _divided(self._of(rows))[0]
        in_turn = lambda *rows: accumulated(
            of_examples, Rows([*rows], axes, num), _AT_A_TIME, Concat()
        )
        at_once = lambda *rows: of_examples([*rows], num)
        computed = lax.platform_dependent(*rows, cpu=in_turn, default=at_once)
        _, shared = _divided(self._of(Rows(rows, axes, num).one()))
        return eqx.combine(computed, shared)

    @functools.cached_property
    def _is_in_turn(self) -> bool:
        """Whether a CPU processes a few examples at a time."""
        if not self._are_all:
            return False
        made = _bytes_of_examples(self.structs(1))
        if made < _CACHE:
            return False
        kept = eqx.filter_eval_shape(self._of, self._rows.one())
        return made > _bytes_of_examples(kept)

    def _of(self, rows: list) -> KeptFactors:
        # What does not depend on the example is computed once for all of them.
        outs, operands, cotangents, of_views = self._output(self._run.run(rows))
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
                    found[site.perturbation] = of_leaf.jacobian()
            kept.append(found)
            cancelled.append(
                cancels([as_they_are[leaf] for leaf in sorted(as_they_are)])
            )
        every = [site for own in self.kept for site in own.sites]
        used = {i for site in every for i in (site.operand, site.which)}
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
    num_leaves, first = len(side.program.leaves), len(side.program.perturbations)
    side.form([range(num_leaves) for _ in outputs])

    def of_rows(arrays: list, num: int) -> list[Array]:
        results, kept = [], side.of(arrays)
        for output, found in safe_zip(outputs, kept.cotangents):
            lead = [output.sizes[label] for label in output.directions(0)]
            whole = []
            for factor in (found[first + leaf] for leaf in range(num_leaves)):
                x = factor.array if factor.has_examples else factor.array[None]
                size = math.prod(x.shape[1 + len(lead) :])
                x = x.reshape(x.shape[0], *lead, size)
                whole.append(jnp.broadcast_to(x, (num, *lead, size)))
            results.append(jnp.concatenate(whole, axis=-1))
        return results

    rows, size = model.rows[0], model.grid(sizes).sizes[0]
    return model.programs[0].output(accumulated(of_rows, rows, size, Concat()))


def _of_leaf(program: Program, factors: Factors, leaf: int) -> OfLeaf:
    return OfLeaf(program.sites_of(leaf), factors, program.leaves[leaf])


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
        return [of_leaf(leaf, sides) for leaf, _ in enumerate(first.program.leaves)]

    pairs = safe_zip(both, grid.sizes)
    return eqx.filter_eval_shape(count, [side.structs(num) for side, num in pairs])


@dataclasses.dataclass(eq=False)
class AbstractPairing(abc.ABC):
    """Factors of examples, and the kernels of two sets of examples.

    - `values`, `ntk`: the outputs whose NNGP and whose NTK is computed.
    - `rows`: the examples of both sides; a single object if they are the same.
    - `products`: a context in which products have the precision of the model's.
    - `assemble`: makes the output from the kernels, by name.
    - `shared`: for each side, the factors that all examples share, once computed.
    """

    values: list[OutputAxes]
    ntk: list[OutputAxes]
    rows: tuple[Rows, Rows]
    products: Callable[[], AbstractContextManager]
    _: dataclasses.KW_ONLY
    assemble: Callable[[dict[Name, Any]], PyTree] = lambda kernels: kernels
    shared: list[PyTree] = dataclasses.field(default_factory=list)

    @property
    def axes(self) -> dict[Name, OutputAxes]:
        """The axes of all kernels."""
        axes_of = {("nngp", axes.index): axes for axes in self.values}
        for axes in self.ntk:
            kinds = ("ntk",) if axes.probes is None else ("ntk", "error")
            whole = dataclasses.replace(axes, probes=None)
            axes_of |= {(kind, axes.index): whole for kind in kinds}
        return axes_of

    @abc.abstractmethod
    def factors(self, side: int, rows: list) -> Any:
        """The factors of the examples of a side: a PyTree of `Factor`s.

        The `values` of a side are the outputs.
        """

    @abc.abstractmethod
    def of_jacobian(
        self, which: int, first: Any, second: Any, num: tuple[int, int]
    ) -> Inexact[Array, "..."]:
        """An NTK of `num` examples, with real and imaginary parts on its last axes."""

    def kernels(
        self, first: Any, second: Any, num: tuple[int, int]
    ) -> dict[Name, Array]:
        """All kernels of `num` examples, before their axes are arranged."""
        kernels = {
            ("nngp", axes.index): _moment(
                axes, first.values[axes.index], second.values[axes.index], num
            )
            for axes in self.values
        }
        for which, axes in enumerate(self.ntk):
            joined = axes.join(self.of_jacobian(which, first, second, num))
            if axes.probes is not None:
                joined, error = _estimate(axes, joined)
                kernels["error", axes.index] = error
            kernels["ntk", axes.index] = joined
        return kernels

    def arranged(
        self, kernels: dict[Name, Array], mirror: Mirror | None = None
    ) -> dict[Name, Array]:
        """The kernels with their axes in the final order, and made symmetric."""
        arranged = {
            name: axes.arranged(kernels[name]) for name, axes in self.axes.items()
        }
        if mirror is not None:
            arranged = _symmetrised(arranged, mirror)
        return {name: x.astype(self.axes[name].dtype) for name, x in arranged.items()}

    @property
    def is_same(self) -> bool:
        """Whether both sides are the same examples."""
        return self.rows[0] is self.rows[1]

    def whole(self, mirror: Mirror) -> dict[Name, Array]:
        """All kernels at once, exactly symmetric if both sides are the same."""
        (first, second), num = self.rows, (self.rows[0].total, self.rows[1].total)
        kernels = self._of_rows(first.arrays, second.arrays, num)
        return self.arranged(kernels, mirror if self.is_same else None)

    def each(self, size: int | None) -> dict[Name, Array]:
        """The kernels of each example of one side with the same one of the other."""
        first, second = self.rows
        num = len(first.arrays)
        run = lambda arrays, size: self._of_rows(
            arrays[:num], arrays[num:], (size, size)
        )
        both = first
        if not self.is_same:
            axes = first.axes + second.axes
            both = Rows([*first.arrays, *second.arrays], axes, first.total)
        return self.arranged(accumulated(run, both, size, Concat()))

    def _of_rows(
        self, first: list, second: list, num: tuple[int, int]
    ) -> dict[Name, Array]:
        """All kernels of some examples; `second` does not matter if they are one."""
        factors = [self.factors(0, first)]
        if not self.is_same:
            factors.append(self.factors(1, second))
        return self.kernels(factors[0], factors[-1], num)


@dataclasses.dataclass(eq=False)
class Sites(AbstractPairing):
    """Kernels from the factors of the parameters' sites."""

    sides: list[ExampleFactors]

    def factors(self, side: int, rows: list) -> KeptFactors:
        return self.sides[side].of(rows)

    def of_jacobian(
        self, which: int, first: Any, second: Any, num: tuple[int, int]
    ) -> Inexact[Array, "..."]:
        output = self.ntk[which]
        out = (*output.out, *output.parts)
        # The axes of a matrix product: shared axes, then those of one side, then those
        # of the other. They are put in order once, at the end.
        rows = {*output.examples[:1], *output.directions(0)}
        columns = {*output.examples[1:], *output.directions(1)}
        place = lambda x: 0 if x in rows & columns else 1 if x in rows else 2
        labels = tuple(sorted(out, key=place))
        total: Array = jnp.zeros((1,) * len(labels), jnp.float32)
        sizes = {**output.sizes, **dict(zip(output.examples, num, strict=False))}
        of_sides: list[dict[int, OfLeaf]] = []
        sides = self.sides[0], self.sides[-1]
        for number, (side, kept) in enumerate(safe_zip(sides, (first, second))):
            program, factors = side.kept[which], side.factors(kept, which, number)
            leaves = {site.leaf for site in program.sites}
            of_sides.append({i: _of_leaf(program, factors, i) for i in leaves})
        both = sorted(of_sides[0].keys() & of_sides[1].keys())
        pairs = [(of_sides[0][leaf], of_sides[1][leaf]) for leaf in both]
        cancelled = [kept.cancelled[which] for kept in (first, second)]
        products = grams(pairs, cancelled, output.examples, labels, sizes)
        for leaf, product in safe_zip(both, products):
            # A complex parameter counts as two real ones. If there is a complex
            # derivative, each of them contributes its square.
            is_twice = output.is_complex and is_complex(sides[0].program.leaves[leaf])
            product = product * (0.5 if is_twice else 1.0)
            dtype = np.promote_types(total.dtype, product.dtype)
            total = total.astype(dtype) + product.astype(dtype)
        total = jnp.broadcast_to(total, [sizes[label] for label in labels])
        return jnp.transpose(total, [labels.index(label) for label in out])


@dataclasses.dataclass(eq=False)
class Products(AbstractPairing):
    """Kernels from Jacobians of one side, pushed through the model at the other.

    Residuals of the derivative are computed once, not again for each tangent.
    """

    program: TracedFunction
    example_factors: ExampleFactors

    def __post_init__(self) -> None:
        program, rows = self.program, self.rows[0]

        def residuals(leaves: list, rows: list) -> tuple[list, Any]:
            outs, push = jax.linearize(lambda leaves: program.one(leaves, rows), leaves)
            pushed = jax.make_jaxpr(push)(leaves)
            return [*outs, *pushed.consts], pushed.jaxpr

        args = program.leaves, rows.arrays, rows.axes
        self._residuals = TracedFunction(residuals, *args)

    def factors(self, side: int, rows: list) -> KeptFactors:
        is_pulled = side or self.is_same
        kept = self.example_factors.of(rows) if is_pulled else KeptFactors()
        if side:
            return kept
        program, num = self._residuals, len(self.program.structs)
        factors = [*map(Factor, program.run(rows), program.has_examples)]
        return dataclasses.replace(kept, values=factors[:num], residuals=factors[num:])

    def of_jacobian(
        self, which: int, first: Any, second: Any, num: tuple[int, int]
    ) -> Inexact[Array, "..."]:
        output = self.ntk[which]
        # Without rules, the cotangents are the Jacobians of all leaves.
        jacobians = self.example_factors.factors(second, which, 1).cotangents
        labels = output.directions(1)
        lead = [output.sizes[label] for label in labels]
        tangents = []
        for jacobian in jacobians:
            x = jacobian.array
            shape = x.shape[jacobian.has_examples :][len(labels) :]
            if not jacobian.has_examples:
                x = jnp.broadcast_to(x, (num[1], *x.shape))
            x = jnp.conj(x.reshape(num[1], math.prod(lead), *shape))
            if output.is_complex and is_complex(x):
                x = x / 2  # As for Gram matrices.
            tangents.append(x)
        arrays = [x.array for x in first.residuals]
        has_examples = [0 if x.has_examples else None for x in first.residuals]

        def push(arrays: list, tangents: list) -> Array:
            _, jaxpr = self._residuals.out
            # A derivative that is zero everywhere is a NumPy constant.
            return jnp.asarray(run_jaxpr(jaxpr, arrays, tangents)[output.index])

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


def _moment(
    axes: OutputAxes, first: Factor, second: Factor, num: tuple[int, int]
) -> Inexact[Array, "..."]:
    """The products of the outputs of two sides, before axes are arranged."""
    terms = []
    sides = safe_zip((first, second), num, (EXAMPLE, OTHER_EXAMPLE))
    for side, (factor, size, example) in enumerate(sides):
        x = widened(factor.array)
        if not factor.has_examples:
            x = jnp.broadcast_to(x, (size, *x.shape))
        example = example if axes.pairs_examples else EXAMPLE
        terms.append((jnp.conj(x) if side else x, (example, *axes.values(side))))
    return contract(terms, axes.out)


def _estimate(axes: OutputAxes, kernel: Inexact[Array, "..."]) -> tuple[Array, Array]:
    """The mean over probes, and its standard error."""
    axis = len(axes.examples)
    num = kernel.shape[axis]
    mean = jnp.mean(kernel, axis=axis)
    if num == 1:
        return mean, jnp.full(mean.shape, jnp.nan, mean.dtype)
    deviation = jnp.std(kernel, axis=axis, ddof=1).astype(mean.dtype)
    return mean, deviation / jnp.sqrt(jnp.asarray(num, mean.real.dtype))


def choose_pairing(
    model: TracedModel, outputs: list[OutputAxes], sizes: Sizes
) -> AbstractPairing:
    """The pairing for the kernels of some outputs, in blocks of at most these sizes.

    Either all of the outputs have all pairs of examples, or none has.
    """
    values = outputs if "nngp" in model.kinds else []
    ntk = [*map(model.probed, outputs)] if "ntk" in model.kinds else []
    of_model = values, ntk, model.rows, model.products
    grid = model.grid(sizes)
    if not outputs[0].pairs_examples:
        grid = dataclasses.replace(grid, sizes=(grid.sizes[0], grid.sizes[0]))

    metrics: list[Any] = [model.request.metric if ntk else None] * len(model.sides)
    if metrics[0] is not None and len(metrics) == 2:
        metrics = metrics[0].on_sides(model.totals)

    def factors(position: int, **settings: Any) -> ExampleFactors:
        return ExampleFactors(
            model.programs[position],
            model.sides[position].rows,
            ntk,
            num_outputs=len(model.axes),
            side=position,
            keeps_values=bool(values),
            metric=metrics[position],
            **settings,
        )

    method = model.request.method
    if not ntk or method != "ntk_vector_products":
        # Two sides of the same type have the same program.
        programs = [*safe_zip(map(id, model.programs), map(id, metrics))]
        first = [programs.index(program) for program in programs]
        settings = {
            "use_rules": method != "jacobian_contraction",
            "are_all": num_pairs(grid, outputs[0]) == 1,
        }
        made = {position: factors(position, **settings) for position in {*first}}
        sides = [made[position] for position in first]
        pairing = Sites(*of_model, sides)
        if not ntk:
            return pairing
        formed, costs = safe_zip(
            *(
                choose_formed(sides[0], sides[-1], which, grid)
                for which, _ in enumerate(ntk)
            )
        )
        for side in made.values():
            side.form(formed)
        is_only = method != "auto" or model.request.metric is not None
        if is_only or any(axes.probes is not None for axes in ntk):
            return pairing
        cost_of_products = _cost_of_products(sides[0].program, ntk, grid)
        is_by_sites = (
            sum(costs) <= cost_of_products or _without_products(model) is not None
        )
        log.debug(
            "NTK: method='auto' is %r; about %.2g operations by sites, and "
            "%.2g by products.",
            *("sites" if is_by_sites else "ntk_vector_products", sum(costs)),
            cost_of_products,
        )
        if is_by_sites:
            return pairing
    elif (reason := _without_products(model)) is not None:
        raise TypeError(
            "`method='ntk_vector_products'` needs the model's derivative in "
            "forward mode, which JAX does not have. Use 'auto' or 'sites', which need "
            f"reverse mode only. ({reason})"
        )
    last = len(model.sides) - 1
    return Products(*of_model, model.programs[0], factors(last, use_rules=False))


def _without_products(model: TracedModel) -> str | None:
    """Why Jacobians cannot be pushed through the model; None if they can."""
    closed, num = model.programs[0].closed, len(model.leaves)
    rows = [full_varying_as(var.aval, 0) for var in closed.jaxpr.invars[num:]]
    of_leaves = lambda leaves: model.programs[0].one(leaves, rows)
    return without_forward_mode(of_leaves, model.leaves)


def _cost_of_products(program: Program, ntk: list[OutputAxes], grid: Grid) -> float:
    """The cost of pushing Jacobians through the model, in operations."""
    products = sum(map(num_products, program.sites))
    size = sum(math.prod(leaf.shape) for leaf in program.leaves)
    directions = sum(
        math.prod(axes.sizes[label] for label in axes.directions(1)) for axes in ntk
    )
    rows, columns = grid.sizes
    pairs = num_pairs(grid, ntk[0]) * rows
    pairs *= columns if ntk[0].pairs_examples else 1
    # Each product reads a tangent.
    one = Cost(2.0 * products, 4.0 * size)
    return (one * (pairs * directions)).time


def pairing_of_all(model: TracedModel, sizes: Sizes) -> AbstractPairing:
    """The pairing for all outputs of a model, which must have all pairs of examples."""
    for axes in model.axes:
        if axes.is_empty or not axes.pairs_examples:
            what = "has no entries" if axes.is_empty else "pairs no examples"
            raise ValueError(
                "`store`, `mesh`, `reduce` and `progress` are for kernels of all pairs "
                f"of examples, but that of output number {axes.index}, of shape "
                f"{axes.shape} for one example, {what}. Leave them out, or remove the "
                "batch axis from `trace_axes` and `diagonal_axes`."
            )
    pairing = choose_pairing(model, model.axes, sizes)
    pairing.assemble = model.assembled
    return pairing


class ModelKernel(AbstractBlockKernel):
    """Kernels of a model, in blocks.

    `make` is called once in each compiled function, because a pairing has traced
    programs.
    """

    make: Callable[[Any], AbstractPairing]

    @functools.cached_property
    def pairing(self) -> AbstractPairing:
        return self.make(self.sizes)

    @property
    def parts(self) -> dict[str, PyTree]:
        (model,) = cast(eqx.Partial, self.make).args
        return model.parts

    @functools.cached_property
    def leaves(self) -> tuple[KernelLeaf, ...]:
        axes = self.pairing.assemble(self.pairing.axes)
        return tuple(
            KernelLeaf(
                jtu.keystr(path), x.example_axes, x.arranged_shape(SAMPLE), x.dtype
            )
            for path, x in jtu.tree_leaves_with_path(axes)
        )

    @property
    def out(self) -> Flat:
        structs = tuple(leaf.struct(SAMPLE) for leaf in self.leaves)
        return structs, jtu.tree_structure(self.pairing.assemble(self.pairing.axes))

    @property
    def rows(self) -> tuple[Rows, Rows]:
        return self.pairing.rows

    @functools.cached_property
    def bytes_kept(self) -> tuple[int, int]:
        rows, columns = map(_bytes_of_examples, self._kept)
        return rows, columns

    @functools.cached_property
    def _kept(self) -> tuple[PyTree[Factor], PyTree[Factor]]:
        """The factors of an example of each side."""
        structs, of = self.structs((1, 1)), self.pairing.factors
        rows = eqx.filter_eval_shape(of, 0, structs[0].arrays)
        same = self.is_same
        return rows, rows if same else eqx.filter_eval_shape(of, 1, structs[1].arrays)

    def prepare(self) -> None:
        sides = (0,) if self.is_same else (0, 1)
        self.pairing.shared = [self._shared_by(side) for side in sides]

    def _shared_by(self, side: int) -> PyTree:
        """The factors that all examples of a side share."""
        _, structs = _divided(self._kept[side])
        if not jtu.tree_leaves(structs):
            return structs
        return _divided(self._factors(side, self.rows[side].one()))[1]

    def _factors(self, side: int, arrays: list) -> PyTree[Factor]:
        with self.pairing.products():
            return self.pairing.factors(side, arrays)

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        side = 0 if self.is_same else side

        def run(arrays: list, num: int) -> tuple[PyTree, Array | None]:
            of_examples, _ = _divided(self._factors(side, arrays))
            # A dummy array, because a loop needs at least one.
            return of_examples, None if jtu.tree_leaves(of_examples) else jnp.zeros(num)

        of_examples, _ = accumulated(run, rows, size, Concat())
        shared = self.pairing.shared
        shared = shared[side] if shared else self._shared_by(side)
        factors = jtu.tree_leaves(self._kept[side], is_leaf=_is_factor)
        axes = tuple(0 if x.has_examples else None for x in factors)
        return Rows(jtu.tree_leaves(eqx.combine(of_examples, shared)), axes, rows.total)

    def factors(self, side: int, rows: Rows) -> PyTree[Factor]:
        """The factors that `keep` returns, in the form that the pairing uses."""
        return jtu.tree_unflatten(jtu.tree_structure(self._kept[side]), rows.arrays)

    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""] | bool = True
    ) -> list[Array]:
        del always
        second = first if second is None else second
        sides = self.factors(0, first), self.factors(1, second)
        pairing = self.pairing
        with pairing.products():
            kernels = pairing.kernels(*sides, (first.total, second.total))
        return jtu.tree_leaves(pairing.assemble(pairing.arranged(kernels)))

    def tile(self, first: Rows, second: Rows | None) -> list[Array]:
        rows = self.keep(0, first, first.total)
        columns = None if second is None else self.keep(1, second, second.total)
        return self.block(rows, columns)
