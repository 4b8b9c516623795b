"""Gauss-Newton matrices by sites.

Let `d` be the cotangents of a site's output, one for each entry `o` of the function's
output. The Jacobian with respect to the site's parameter is `d a`, and the matrix is a
sum over pairs of sites of `a d (∂²loss/∂o∂p) d' a'`. It is contracted like a Hessian,
with `d (∂²loss/∂o∂p) d'` instead of second derivatives.

If the Jacobian is a sum over uses of a parameter or over positions, it is formed first:
its terms may nearly cancel, and products of pairs of them would be much larger than
their sum.

Where an output is computed entry by entry from the output of a layer, as from that of
the last one, `d` is zero unless both entries are the same. All others are found with a
vector of ones, in place of one vector for each entry.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from .._base.dtypes import common_dtype, widened
from .._base.jaxpr_types import Atom, Eqn, Jaxpr
from .._base.jaxprs import callee
from .._base.primitives import LINEAR_IN_ALL, name_of, with_trait
from .._base.structs import full_varying_as
from .._base.trees import safe_zip
from .._batch.arguments import RowArrays
from .._batch.rows import Rows
from .._sites.axes import Axis, EXAMPLE, Named, Role
from .._sites.cost import forming_cost, num_products
from .._sites.factors import Factor, Factors
from .._sites.gram import of_leaf
from .._sites.program import Directions, Program, Seeds
from .._sites.site import is_sum, Site
from .._sites.table import SiteTable
from .by_sites import AbstractSiteMatrix, alone, PairFactors, struct_of, Use
from .pytree import RequestedBlocks


# The curvature in the directions of some vectors; None for the identity.
Curve = Inexact[Array, "vectors vectors"] | None


class SiteGaussNewton(AbstractSiteMatrix):
    """Blocks of a Gauss-Newton matrix, summed over examples, from sites.

    - `program`: the function, all outputs of which are differentiated.
    - `of_outputs`: the curvature of the loss of one example in these outputs, in the
        directions of `num_vectors` vectors.
    """

    def __init__(
        self,
        program: Program,
        requested: RequestedBlocks,
        of_outputs: Callable[[list[Array], Rows], Seeds],
        *,
        num_vectors: int,
        has_curve: bool,
    ):
        self._num_vectors = num_vectors
        self._has_curve = has_curve
        table = program.table
        self._outputs = [var.aval for var in program.jaxpr.outvars]
        self._dtype = common_dtype(*(x.dtype for x in self._outputs))
        self._paired: list[int | None] = [None for _ in table.perturbations]
        # Vectors that come with a curvature are one-hot, one for each entry of the
        # outputs. Others, such as gradients of drawn labels, are not the entries of
        # anything.
        if has_curve and num_vectors > 1:
            self._paired = paired_outputs(program)
        # A Jacobian that is formed needs the directions of all outputs.
        for i in sorted(requested.leaves):
            if self._is_sum(table, i):
                for site in table.of(i):
                    self._paired[site.perturbation] = None
        formed = [i for i in sorted(requested.leaves) if self._is_sum(table, i)]
        super().__init__(program, requested, formed)
        self._directions = Directions(of_outputs, (_vectors(0),), paired=self._paired)

    def _is_sum(self, table: SiteTable, leaf: int) -> bool:
        """Whether a row of the Jacobian of a leaf is a sum of terms."""
        sites = table.of(leaf)
        # The axes of outputs of paired sites, whose positions are not summed over.
        axes = (
            x.rule.y_axes for x in sites if self._paired[x.perturbation] is not None
        )
        # Each output is computed from one position.
        apart = {name for names in itertools.chain(*axes) for name in names}
        return is_sum(sites, apart)

    def kind(self, site: Site, other: Site) -> tuple[int | None, int | None]:
        return self._paired_with(site), self._paired_with(other)

    def factors(self, rows: Rows) -> Factors:
        """Those of the program; the curvature is multiplied by the weights."""
        # Weights come in with the curvature, after the backward pass.
        factors = self.program.factors(rows, self._directions)
        if rows.weights is None:
            return factors
        weights = rows.weights.astype(self._dtype)
        curve = factors.curve
        curve = weights if curve is None else jax.vmap(jnp.multiply)(curve, weights)
        return dataclasses.replace(factors, curve=curve)

    def blocks_of(self, factors: Factors) -> list[Inexact[Array, "..."]]:
        table = self.program.table
        jacobians = {i: of_leaf(table, factors, i).jacobian() for i in self.formed}
        return self.contracted_blocks(dataclasses.replace(factors, jacobians=jacobians))

    def num_cancelled(self, factors: Factors) -> None:
        del factors  # Jacobians whose terms may cancel are formed.

    def structs(self, num: int) -> Factors:
        table, vectors = self.program.table, self._num_vectors
        of_jacobian = lambda i: struct_of(table.leaves[i], num, vectors)
        curve = jax.ShapeDtypeStruct((num, vectors, vectors), self._dtype)
        # As in `factors` and `blocks_of`, with one vector only where a site is paired.
        return Factors(
            [struct_of(x, num) for x in table.operands],
            [
                struct_of(x, num, y)
                for x, y in safe_zip(table.perturbations, self._nums)
            ],
            (_vectors(0),),
            num,
            curve=curve if self._has_curve else None,
            jacobians={i: Factor(of_jacobian(i)) for i in self.formed},
        )

    def costs_of_factors(self, num: int, factors: Factors) -> dict[int, float]:
        costs: dict[int, float] = {}
        # One backward pass for each vector.
        for site in self.program.table.sites:
            z = site.perturbation
            cost = num * self._nums[z] * num_products(site)
            costs[z] = costs.get(z, 0.0) + cost
        for leaf in self.formed:
            sites = self.program.table.of(leaf)
            costs[sites[0].perturbation] += forming_cost(sites, factors).time
        return costs

    @property
    def _nums(self) -> list[int]:
        """The number of vectors that are pulled back to each perturbation."""
        return [self._num_vectors if x is None else 1 for x in self._paired]

    def _paired_with(self, site: Site) -> int | None:
        """The output whose entries the cotangent of a site has, if there is one."""
        is_formed = site.leaf in self.formed
        return None if is_formed else self._paired[site.perturbation]

    def curve_of(self, use: Use, factors: Factors) -> Array | None:
        del use
        return factors.curve

    def terms(
        self, use: Use, axes: Sequence[dict[str, Axis]], pair: PairFactors
    ) -> Iterator[list[Named]]:
        # `[examples, vectors, vectors]` for a curvature, `[examples]` for weights.
        scale, terms = pair.curve, list[Named]()
        # The scale is a curvature, or the weight of each example.
        has_curve = scale is not None and scale.ndim == 3
        # Without a curvature, the same vector is on both sides.
        sides = (0, 1) if has_curve else (0, 0)
        if scale is not None:
            vectors = [_vectors(side) for side in sides] if has_curve else []
            scaled = Named(widened(scale), (EXAMPLE, *vectors))
            if has_curve:
                # The vectors of a paired site are the entries of its own output.
                for side, names in enumerate(axes):
                    scaled = self._of_site(scaled, use[side], names, side)
            terms.append(scaled)
        for site, factors, names, side in safe_zip(use, pair.sides, axes, sides):
            # In a paired site, this axis has size 1, and a contraction sums over it.
            factors = dataclasses.replace(factors, outputs=(_vectors(side),))
            of_site = factors.terms(alone(site), tokens="one_hot", by_name=names)
            operand, _, cotangent = of_site
            terms += [cotangent, *([] if operand is None else [operand])]
        yield terms

    def _of_site(
        self, curve: Named, site: Site, names: dict[str, Axis], side: int
    ) -> Named:
        """The curvature in the output that a site is paired with.

        Its entries are those of the site's output.
        """
        number = self._paired_with(site)
        if number is None:
            return curve
        x, axes = curve
        position = axes.index(_vectors(side))
        # Where the output starts among the vectors.
        start = sum(x.size for x in self._outputs[:number])
        end = start + self._outputs[number].size
        x = lax.slice_in_dim(x, start, end, axis=position)
        of_output = [*itertools.chain(*site.rule.y_axes)]
        # The entries of the output, as the axes of the site that they are.
        sizes = (site.sizes[name] for name in of_output)
        x = x.reshape(*x.shape[:position], *sizes, *x.shape[position + 1 :])
        of_site = [names[name] for name in of_output]
        return Named(x, (*axes[:position], *of_site, *axes[position + 1 :]))


def _vectors(side: int) -> Axis:
    """The axis of the vectors of one side."""
    return Axis(Role.OUTPUT, side=side)


def paired_outputs(program: Program) -> list[int | None]:
    """For each perturbation, the output that its cotangent has the entries of.

    Each entry of the cotangent is a multiple of one entry of this output, in the same
    order. It is None for all other perturbations. Everything is read off the jaxpr of
    the pullback, which has the derivative of every custom rule.
    """

    def pulled(seeds: list[Array], leaves: list[Array], rows: RowArrays) -> list:
        return program.linearize(leaves, rows).pullback(seeds)

    # Outputs are numbered as inputs of the pullback, and their numbers followed through
    # it.
    table, outs = program.table, [var.aval for var in program.jaxpr.outvars]
    seeds = [full_varying_as(out, 0) for out in outs]
    jaxpr = jax.make_jaxpr(pulled)(seeds, *program.traced.zeros()).jaxpr
    # Leaves and rows are coefficients: the pullback is linear in seeds only.
    constants = (None for _ in jaxpr.invars[len(outs) :])
    of_cotangents = _followed(jaxpr, [*range(len(outs)), *constants])
    return [
        None
        if number in (None, _MIXED)
        or not all(
            _names_entries(site, table.perturbations[i])
            for site in table.sites
            if site.perturbation == i
        )
        else number
        for i, number in enumerate(of_cotangents)
    ]


def _names_entries(site: Site, struct: Any) -> bool:
    """Whether the factor `d` of a site has all axes of its perturbation."""
    named = site.rule.y_axes
    sizes = tuple(math.prod(site.sizes[name] for name in names) for names in named)
    return not site.loops and sizes == tuple(struct.shape)


# Stands for values that are not known to be computed entry by entry.
_MIXED = -1


# Entry by entry, and linear in all inputs together, or in a single one.
_ADDED = LINEAR_IN_ALL & with_trait("entries")


_MULTIPLIED = frozenset(("mul", "div"))


def _followed(jaxpr: Jaxpr, inputs: Sequence[int | None]) -> list[int | None]:
    """The number that each output has, from those of the inputs.

    Values with the same number have the same entries, each with a factor of its own.
    None stands for values that do not depend on numbered inputs.
    """
    numbers = dict(safe_zip(jaxpr.invars, inputs))

    def of(atom: Atom) -> int | None:
        return None if isinstance(atom, jex.Literal) else numbers.get(atom)

    for eqn in jaxpr.eqns:
        # What depends on two outputs, or on a reduction, is not computed entry by
        # entry.
        ins = [of(atom) for atom in eqn.invars]
        known, closed = {*ins} - {None}, callee(eqn)
        if known and closed is not None:
            numbers.update(safe_zip(eqn.outvars, _followed(closed.jaxpr, ins)))
        elif known:
            is_kept = len(known) == 1 and _keeps_entries(
                eqn, [x is not None for x in ins]
            )
            number = known.pop() if is_kept else _MIXED
            numbers.update(dict.fromkeys(eqn.outvars, number))
    return [of(var) for var in jaxpr.outvars]


def _keeps_entries(eqn: Eqn, depend: list[bool]) -> bool:
    """Whether an equation multiplies each entry of an input, and keeps their order.

    `depend` marks the inputs that depend on what is followed.
    """
    name, is_only = name_of(eqn), sum(depend) == 1
    # An operation keeps entries if it changes no size.
    followed = [
        atom for atom, is_followed in safe_zip(eqn.invars, depend) if is_followed
    ]
    if len({math.prod(x.aval.shape) for x in (*followed, *eqn.outvars)}) > 1:
        return False
    if name == "reshape":
        return eqn.params["dimensions"] is None
    # A division by what is followed, or a selection by it, would not be linear in it.
    return (
        name in ("squeeze", "broadcast_in_dim", "reduce_sum")
        or (name in _ADDED and all(depend))
        or (name in _MULTIPLIED and is_only and (name == "mul" or depend[0]))
        or (name == "select_n" and not depend[0])
    )
