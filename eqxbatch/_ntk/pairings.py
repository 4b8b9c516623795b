"""The methods that combine the factors of examples to kernels.

For each parameter, either the factors of its sites are kept and their Gram matrices
multiplied, or the factors are contracted to the Jacobian, which is kept. The former is
cheaper for large weights that are used at few positions, the latter for small weights
that are used at many positions, such as those of convolutions.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact, PyTree

from .._base.cpu import in_opaque_branch, opaque_true
from .._base.dtypes import is_complex, widened
from .._base.jaxprs import run_jaxpr
from .._base.modes import without_forward_mode
from .._base.structs import full_varying_as
from .._base.traced_function import TracedFunction
from .._base.trees import log, safe_zip
from .._batch.accumulators import Concat
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._kernels.grid import Grid, Sizes
from .._kernels.kernel import (
    AbstractBlockKernel,
    Flat,
    KernelLeaf,
    RowsOfSides,
    SAMPLE,
)
from .._sites.axes import EXAMPLE, Named, OTHER_EXAMPLE
from .._sites.cancel import grams
from .._sites.contract import contract
from .._sites.cost import Cost, num_products
from .._sites.factors import Factor
from .._sites.gram import of_leaf, OfLeaf
from .._sites.table import SiteTable
from .example_factors import (
    bytes_of_examples,
    choose_formed,
    divided,
    ExampleFactors,
    FactorPlan,
    is_factor,
    KeptFactors,
    num_pairs,
)
from .metric import Metric
from .output_axes import Mirror, OutputAxes
from .traced_model import Name, TracedModel


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
    rows: RowsOfSides
    products: Callable[[], AbstractContextManager]
    _: dataclasses.KW_ONLY
    assemble: Callable[[dict[Name, Any]], PyTree] = lambda kernels: kernels
    shared: list[PyTree] = dataclasses.field(default_factory=list)

    @property
    def axes(self) -> dict[Name, OutputAxes]:
        """The axes of all kernels."""
        axes_of = {("nngp", axes.index): axes for axes in self.values}
        # Probes become a mean and its error, each with the axes of a traced kernel.
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
        # One loop over both sides: each step has the same examples of both.
        first, second = self.rows
        num = len(first.arrays)
        run = lambda rows: self._of_rows(
            rows.arrays[:num], rows.arrays[num:], (rows.total, rows.total)
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
        axes = tuple(sorted(out, key=place))
        total: Array = jnp.zeros((1,) * len(axes), jnp.float32)
        sizes = {**output.sizes, **dict(zip(output.examples, num, strict=False))}
        # The same side twice if both are the same; labels of axes tell them apart.
        of_sides: list[dict[int, OfLeaf]] = []
        sides = self.sides[0], self.sides[-1]
        for number, (side, kept) in enumerate(safe_zip(sides, (first, second))):
            table = side.plan.table
            factors = side.plan.factors(kept, which, number)
            leaves = {site.leaf for site in table.sites}
            of_sides.append({i: of_leaf(table, factors, i) for i in leaves})
        # A leaf that only one side uses adds nothing to the kernel.
        both = sorted(of_sides[0].keys() & of_sides[1].keys())
        pairs = [(of_sides[0][leaf], of_sides[1][leaf]) for leaf in both]
        cancelled = [kept.cancelled[which] for kept in (first, second)]
        inners = [self.sides[0].inner(which, leaf) for leaf in both]
        products = grams(pairs, cancelled, output.examples, axes, sizes, inners)
        for leaf, product in safe_zip(both, products):
            # A complex parameter counts as two real ones. If there is a complex
            # derivative, each of them contributes its square.
            struct = sides[0].plan.table.leaves[leaf]
            is_twice = output.is_complex and is_complex(struct)
            product = product * (0.5 if is_twice else 1.0)
            dtype = np.promote_types(total.dtype, product.dtype)
            total = total.astype(dtype) + product.astype(dtype)
        # An axis along which no factor differs has size 1 until here.
        total = jnp.broadcast_to(total, [sizes[axis] for axis in axes])
        return jnp.transpose(total, [axes.index(axis) for axis in out])


@dataclasses.dataclass(eq=False)
class Products(AbstractPairing):
    """Kernels from Jacobians of one side, pushed through the model at the other.

    Residuals of the derivative are computed once, not again for each tangent.
    """

    program: TracedFunction
    example_factors: ExampleFactors

    def __post_init__(self) -> None:
        program, rows = self.program, self.rows[0]

        # Of an example: its outputs and the constants of its linear map. The map itself
        # is the same jaxpr for all of them.
        def residuals(leaves: list, rows: list) -> tuple[list, Any]:
            outs, push = jax.linearize(lambda leaves: program.one(leaves, rows), leaves)
            pushed = jax.make_jaxpr(push)(leaves)
            return [*outs, *pushed.consts], pushed.jaxpr

        args = program.leaves, rows.arrays, rows.axes
        self._residuals = TracedFunction(residuals, *args)

    def factors(self, side: int, rows: list) -> KeptFactors:
        # Columns need Jacobians, rows residuals, and both if they are the same
        # examples.
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
        jacobians = self.example_factors.plan.factors(second, which, 1).cotangents
        # `J1 J2^H`: the Jacobian of each example of the second side, conjugated, is a
        # batch of tangents: `[examples, directions, *leaf]`.
        directions = output.directions(1)
        lead = [output.sizes[axis] for axis in directions]
        tangents = []
        for jacobian in jacobians:
            assert jacobian is not None
            x, shape = jacobian.array, jacobian.shape_of_one()[len(directions) :]
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

        # Over directions first, and then over examples: all pairs, or one by one.
        along = jax.vmap(push, (None, 0))
        if output.pairs_examples:
            along = jax.vmap(along, (None, 0))
            along = jax.vmap(along, (has_examples, None), axis_size=num[0])
        else:
            along = jax.vmap(along, (has_examples, 0), axis_size=num[0])
        pushed = widened(along(arrays, tangents))
        # `[*examples, directions, *values of the first side]`, with the axes that the
        # directions stand for.
        examples = pushed.shape[: len(output.examples)]
        values = pushed.shape[len(examples) + 1 :]
        pushed = pushed.reshape(*examples, *lead, *values)
        axes = (*output.examples, *directions, *output.values(0))
        # As Gram matrices have them: real and imaginary parts along an axis.
        if output.is_complex:
            pushed = jnp.stack([jnp.real(pushed), jnp.imag(pushed)], axis=-1)
            axes = (*axes, output.parts[0])
        return contract([Named(pushed, axes)], (*output.out, *output.parts))


def _moment(
    axes: OutputAxes, first: Factor, second: Factor, num: tuple[int, int]
) -> Inexact[Array, "..."]:
    """The products of the outputs of two sides, before axes are arranged."""
    terms: list[Named] = []
    sides = safe_zip((first, second), num, (EXAMPLE, OTHER_EXAMPLE))
    for side, (factor, size, example) in enumerate(sides):
        # A model may return the same for all examples.
        x = widened(factor.array)
        if not factor.has_examples:
            x = jnp.broadcast_to(x, (size, *x.shape))
        example = example if axes.pairs_examples else EXAMPLE
        x = jnp.conj(x) if side else x
        terms.append(Named(x, (example, *axes.values(side))))
    return contract(terms, axes.out)


def _estimate(axes: OutputAxes, kernel: Inexact[Array, "..."]) -> tuple[Array, Array]:
    """The mean over probes, and its standard error."""
    # The axis of the probes, behind those of examples; see `OutputAxes.out`.
    axis = len(axes.examples)
    num = kernel.shape[axis]
    mean = jnp.mean(kernel, axis=axis)
    if num == 1:
        return mean, jnp.full(mean.shape, jnp.nan, mean.dtype)
    deviation = jnp.std(kernel, axis=axis, ddof=1).astype(mean.dtype)
    return mean, deviation / jnp.sqrt(jnp.asarray(num, mean.real.dtype))


def choose_pairing(
    model: TracedModel,
    outputs: list[OutputAxes],
    sizes: Sizes,
    assemble: Callable[[dict[Name, Any]], PyTree] = lambda kernels: kernels,
) -> AbstractPairing:
    """The pairing for the kernels of some outputs, in blocks of at most these sizes.

    Either all of the outputs have all pairs of examples, or none has.
    """
    values = outputs if "nngp" in model.kinds else []
    ntk = [*map(model.probed, outputs)] if "ntk" in model.kinds else []
    of_model = values, ntk, model.rows, model.products
    request, method = model.request, model.request.method
    # Without pairs of examples, a block of one side meets the same block of the other.
    grid = model.grid(sizes)
    if not outputs[0].pairs_examples:
        grid = dataclasses.replace(grid, sizes=(grid.sizes[0], grid.sizes[0]))

    def plan_of(side: int, **settings: Any) -> FactorPlan:
        traced, rows = model.programs[side], model.sides[side].rows
        settings |= {"num_outputs": len(model.axes), "keeps_values": bool(values)}
        return FactorPlan(traced, rows, ntk, side=side, **settings)

    def by_products() -> Products:
        # Without rules, what is pulled back are Jacobians: those of the last side.
        plan = plan_of(len(model.sides) - 1, use_rules=False)
        factors = ExampleFactors(plan, [() for _ in ntk])
        return Products(*of_model, model.programs[0], factors, assemble=assemble)

    # A method that was asked for is refused where it cannot be taken.
    if ntk and method == "ntk_vector_products":
        if (reason := _without_products(model)) is not None:
            raise TypeError(
                "`method='ntk_vector_products'` needs the model's derivative in "
                "forward mode, which JAX does not have. Use 'auto' or 'sites', which "
                f"need reverse mode only. ({reason})"
            )
        return by_products()

    # Shapes of factors are known before any is computed, and what is formed follows
    # from them: one choice for both sides, whose factors are multiplied.
    metric = request.metric if ntk else None
    plans = _plans(model, plan_of, metric, method != "jacobian_contraction")
    numbers = range(len(ntk))
    choices = [choose_formed(plans[0], plans[-1], number, grid) for number in numbers]
    formed = [choice.leaves for choice in choices]
    are_all = num_pairs(grid, outputs[0]) == 1
    made = {id(plan): ExampleFactors(plan, formed, are_all) for plan in plans}
    sides = [made[id(plan)] for plan in plans]
    pairing = Sites(*of_model, sides, assemble=assemble)

    # Products have neither metrics nor probes.
    has_probes = any(axes.probes is not None for axes in ntk)
    if not ntk or method != "auto" or request.metric is not None or has_probes:
        return pairing
    # Whether JAX has a forward mode is asked last, as it takes another trace.
    cost = sum(choice.cost for choice in choices)
    cost_of_products = _cost_of_products(plans[0].table, ntk, grid)
    is_by_sites = cost <= cost_of_products or _without_products(model) is not None
    log.debug(
        "NTK: method='auto' is %r; about %.2g operations by sites, and "
        "%.2g by products.",
        "sites" if is_by_sites else "ntk_vector_products",
        cost,
        cost_of_products,
    )
    return pairing if is_by_sites else by_products()


def _plans(
    model: TracedModel,
    plan_of: Callable[..., FactorPlan],
    metric: Metric | None,
    use_rules: bool,
) -> list[FactorPlan]:
    """The factors of each side; a single object for sides of the same type."""
    metrics: list[Metric | None] = [metric for _ in model.sides]
    if metric is not None and len(metrics) == 2:
        metrics = [*metric.on_sides(model.totals)]
    # Sides of the same type have the same program, but not if only one of them is
    # multiplied by the metric.
    programs = [*safe_zip(map(id, model.programs), map(id, metrics))]
    first = [programs.index(program) for program in programs]
    made = {i: plan_of(i, metric=metrics[i], use_rules=use_rules) for i in {*first}}
    return [made[i] for i in first]


def _without_products(model: TracedModel) -> str | None:
    """Why Jacobians cannot be pushed through the model; None if they can."""
    # Only types of an example matter, so that none is computed.
    closed, num = model.programs[0].closed, len(model.leaves)
    rows = [full_varying_as(var.aval, 0) for var in closed.jaxpr.invars[num:]]
    of_leaves = lambda leaves: model.programs[0].one(leaves, rows)
    return without_forward_mode(of_leaves, model.leaves)


def _cost_of_products(table: SiteTable, ntk: list[OutputAxes], grid: Grid) -> float:
    """The cost of pushing Jacobians through the model, in operations."""
    products = sum(map(num_products, table.sites))
    size = sum(math.prod(leaf.shape) for leaf in table.leaves)
    directions = sum(
        math.prod(output.sizes[axis] for axis in output.directions(1)) for output in ntk
    )
    # Each pair of examples, along each direction, takes every product once.
    rows, columns = grid.sizes
    pairs = num_pairs(grid, ntk[0]) * rows
    pairs *= columns if ntk[0].pairs_examples else 1
    # And reads a tangent, of 4 bytes for each entry.
    of_pair = Cost(2.0 * products, 4.0 * size)
    return (of_pair * (pairs * directions)).time


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
    return choose_pairing(model, model.axes, sizes, model.assembled)


class ModelKernel(AbstractBlockKernel):
    """Kernels of a model, in blocks.

    `make` is called once in each compiled function, because a pairing has traced
    programs.
    """

    make: Callable[[Any], AbstractPairing]

    # Of this program: a kernel that is passed on is flattened, and loses it.
    @functools.cached_property
    def pairing(self) -> AbstractPairing:
        return self.make(self.sizes)

    @property
    def parts(self) -> dict[str, PyTree]:
        (model,) = cast(eqx.Partial, self.make).args
        return model.parts

    @functools.cached_property
    def leaves(self) -> tuple[KernelLeaf, ...]:
        # Axes take the place of kernels, so that their order is that of the output.
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
        structure = jtu.tree_structure(self.pairing.assemble(self.pairing.axes))
        return Flat(structs, structure)

    @property
    def rows(self) -> RowsOfSides:
        return self.pairing.rows

    @functools.cached_property
    def bytes_kept(self) -> tuple[int, int]:
        rows, columns = map(bytes_of_examples, self._kept)
        return rows, columns

    @functools.cached_property
    def _kept(self) -> tuple[PyTree[Factor], PyTree[Factor]]:
        """The factors of an example of each side."""
        # One shape for two sides only if they are the same: types may differ.
        structs, of = self.structs((1, 1)), self.pairing.factors
        rows = eqx.filter_eval_shape(of, 0, structs[0].arrays)
        same = self.is_same
        return rows, rows if same else eqx.filter_eval_shape(of, 1, structs[1].arrays)

    def prepare(self) -> None:
        sides = (0,) if self.is_same else (0, 1)
        self.pairing.shared = [self._shared_by(side) for side in sides]

    def _shared_by(self, side: int) -> PyTree:
        """The factors that all examples of a side share."""
        # Without any, no example needs to be run for them.
        shared = divided(self._kept[side]).shared
        if not jtu.tree_leaves(shared):
            return shared
        return divided(self._factors(side, self.rows[side].one().arrays)).shared

    def _factors(self, side: int, arrays: list) -> PyTree[Factor]:
        with self.pairing.products():
            return self.pairing.factors(side, arrays)

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        side = 0 if self.is_same else side

        def run(rows: Rows) -> tuple[PyTree, Array | None]:
            of_examples = divided(self._factors(side, rows.arrays)).of_examples
            # A dummy array, because a loop needs at least one.
            is_empty = not jtu.tree_leaves(of_examples)
            return of_examples, jnp.zeros(rows.total) if is_empty else None

        of_examples, _ = accumulated(run, rows, size, Concat())
        # `prepare` ran if there is a loop around this.
        shared = self.pairing.shared
        shared = shared[side] if shared else self._shared_by(side)
        factors = jtu.tree_leaves(self._kept[side], is_leaf=is_factor)
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
