"""The methods for kernels: which factors are kept, and how they are combined."""

import abc
import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from .._base.differentiable import without_forward_mode
from .._base.dtypes import widened
from .._base.jaxprs import evaluate_jaxpr, TracedFunction
from .._base.mesh import full_varying_as
from .._base.trees import log, safe_zip
from .._batch.accumulators import Concat
from .._batch.loop import accumulated, Rows
from .._kernels.kernel import Grid
from .._sites.cost import Cost, num_products
from .._sites.einsum import contract, EXAMPLE, OTHER_EXAMPLE
from .._sites.factors import Factor
from .._sites.trace import Program
from .example_factors import (
    choose_formed,
    ExampleFactors,
    KeptFactors,
    kernel,
    num_pairs,
)
from .output_axes import Mirror, OutputAxes
from .traced_model import TracedModel


# The kind of a kernel ("nngp", "ntk", or "error" for a standard error), and the index
# of the output.
Name = tuple[str, int]


@dataclasses.dataclass(eq=False)
class AbstractPairing(abc.ABC):
    """Factors of examples, and the kernels of two sets of examples.

    `values` are the outputs whose NNGP is computed, and `ntk` those whose NTK is.
    """

    values: list[OutputAxes]
    ntk: list[OutputAxes]

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
            arranged = jtu.tree_map(
                lambda x, y: (x + y) / 2, arranged, mirror(arranged)
            )
        return {name: x.astype(self.axes[name].dtype) for name, x in arranged.items()}

    def whole(self, rows: list[Rows], mirror: Mirror) -> dict[Name, Array]:
        """All kernels at once. They are exactly symmetric if both sides are the same.

        `rows` are the examples of both sides, or of one if they are the same.
        """
        factors = [self.factors(side, x.arrays) for side, x in enumerate(rows)]
        num = rows[0].total, rows[-1].total
        kernels = self.kernels(factors[0], factors[-1], num)
        return self.arranged(kernels, mirror if len(rows) == 1 else None)

    def each(self, rows: list[Rows], size: int | None) -> dict[Name, Array]:
        """The kernels of each example of one side with the same one of the other."""
        first, *others = rows
        num = len(first.arrays)

        def run(arrays: list, size: int) -> dict[Name, Array]:
            factors = [self.factors(0, arrays[:num])]
            if others:
                factors.append(self.factors(1, arrays[num:]))
            return self.kernels(factors[0], factors[-1], (size, size))

        arrays = [x for side in rows for x in side.arrays]
        axes = tuple(axis for side in rows for axis in side.axes)
        both = Rows(arrays, axes, first.total)
        return self.arranged(accumulated(run, both, size, Concat()))


class _Sided(eqx.Module):
    """The outputs of some examples, and their factors as rows and as columns.

    - `residuals`: those of the model's derivative, which are only needed for rows.
    - `pulled`: the Jacobians, or None if they are not needed.
    """

    values: list[Factor]
    residuals: list[Factor]
    pulled: KeptFactors | None


@dataclasses.dataclass(eq=False)
class Values(AbstractPairing):
    """The second moments of the model's outputs: an NNGP without an NTK."""

    programs: list[TracedFunction]

    def factors(self, side: int, rows: list) -> _Sided:
        program = self.programs[side]
        values = [*map(Factor, program.run(rows), program.has_examples)]
        return _Sided(values, [], None)

    def of_jacobian(
        self, which: int, first: Any, second: Any, num: tuple[int, int]
    ) -> Inexact[Array, "..."]:
        raise NotImplementedError("There are no Jacobians.")


@dataclasses.dataclass(eq=False)
class Sites(AbstractPairing):
    """Kernels from the factors of the parameters' sites."""

    sides: list[ExampleFactors]

    def factors(self, side: int, rows: list) -> KeptFactors:
        return self.sides[side].of(rows)

    def of_jacobian(
        self, which: int, first: Any, second: Any, num: tuple[int, int]
    ) -> Inexact[Array, "..."]:
        sides = self.sides[0], self.sides[-1]
        return kernel(self.ntk[which], which, sides, (first, second), num)


class Products(AbstractPairing):
    """Kernels from Jacobians of one side, pushed through the model at the other.

    Residuals of the derivative are computed once, not again for each tangent.
    """

    def __init__(
        self,
        values: list[OutputAxes],
        ntk: list[OutputAxes],
        model: TracedModel,
        example_factors: ExampleFactors,
    ):
        super().__init__(values, ntk)
        self._example_factors = example_factors
        self._is_symmetric = len(model.sides) == 1
        program, rows = model.programs[0], model.sides[0].rows

        def residuals(leaves: list, rows: list) -> tuple[list, Any]:
            outs, push = jax.linearize(lambda leaves: program.one(leaves, rows), leaves)
            pushed = jax.make_jaxpr(push)(leaves)
            return [*outs, *pushed.consts], pushed.jaxpr

        self._num = len(program.structs)
        self._program = TracedFunction(
            residuals, program.leaves, rows.arrays, rows.axes
        )

    def factors(self, side: int, rows: list) -> _Sided:
        is_pulled = side or self._is_symmetric
        pulled = self._example_factors.of(rows) if is_pulled else None
        if side == 0:
            program = self._program
            factors = [*map(Factor, program.run(rows), program.has_examples)]
            return _Sided(factors[: self._num], factors[self._num :], pulled)
        assert pulled is not None
        return _Sided(pulled.values, [], pulled)

    def of_jacobian(
        self, which: int, first: Any, second: Any, num: tuple[int, int]
    ) -> Inexact[Array, "..."]:
        output = self.ntk[which]
        # Without rules, the cotangents are the Jacobians of all leaves.
        jacobians = self._example_factors.factors(second.pulled, which, 1).cotangents
        labels = output.directions(1)
        lead = [output.sizes[label] for label in labels]
        tangents = []
        for jacobian in jacobians:
            x = jacobian.array
            shape = x.shape[jacobian.has_examples :][len(labels) :]
            if not jacobian.has_examples:
                x = jnp.broadcast_to(x, (num[1], *x.shape))
            x = jnp.conj(x.reshape(num[1], math.prod(lead), *shape))
            if output.is_complex and jnp.iscomplexobj(x):
                x = x / 2  # As for Gram matrices; see `example_factors.kernel`.
            tangents.append(x)
        arrays = [x.array for x in first.residuals]
        has_examples = [0 if x.has_examples else None for x in first.residuals]

        def push(arrays: list, tangents: list) -> Array:
            _, jaxpr = self._program.out
            # A derivative that is zero everywhere is a NumPy constant.
            return jnp.asarray(evaluate_jaxpr(jaxpr, arrays, tangents)[output.index])

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
    model: TracedModel,
    values: list[OutputAxes],
    ntk: list[OutputAxes],
) -> AbstractPairing:
    """The pairing for the NNGPs of outputs in `values` and the NTKs of those in `ntk`.

    Either all of them have all pairs of examples, or none has.
    """
    if not ntk:
        return Values(values, [], model.programs)
    grid = model.grid
    if not ntk[0].pairs_examples:
        grid = dataclasses.replace(grid, sizes=(grid.sizes[0], grid.sizes[0]))

    def factors(position: int, **settings: Any) -> ExampleFactors:
        return ExampleFactors(
            model.programs[position],
            model.sides[position].rows,
            ntk,
            num_outputs=len(model.axes),
            side=position,
            keeps_values=bool(values),
            **settings,
        )

    method = model.request.method
    if method != "ntk_vector_products":
        # Two sides of the same type have the same program.
        first = [model.programs.index(program) for program in model.programs]
        settings = {
            "use_rules": method != "jacobian_contraction",
            "are_all": num_pairs(grid, ntk[0]) == 1,
        }
        made = {position: factors(position, **settings) for position in {*first}}
        sides = [made[position] for position in first]
        formed, costs = safe_zip(
            *(
                choose_formed(sides[0], sides[-1], which, grid)
                for which, _ in enumerate(ntk)
            ),
        )
        for side in made.values():
            side.form(formed)
        pairing = Sites(values, ntk, sides)
        if method != "auto" or any(axes.probes is not None for axes in ntk):
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
    return Products(values, ntk, model, factors(last, use_rules=False))


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
