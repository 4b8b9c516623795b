"""The generalised Gauss-Newton matrix, from the sites where parameters enter.

Let `d` be the cotangents of a site's output, one for each entry `o` of the function's
output. The Jacobian with respect to the site's parameter is `d a`, and the matrix is a
sum over pairs of sites of `a d (∂²loss/∂o∂p) d' a'`. It is contracted like a Hessian,
with `d (∂²loss/∂o∂p) d'` instead of second derivatives.

If the Jacobian is a sum over uses of a parameter or over positions, it is formed first:
its terms may nearly cancel, and products of pairs of them would be much larger than
their sum.

Where an output is computed entry by entry from the output of a layer, or for each
position by itself, both share an axis, and `d` is zero unless both indices along it are
the same. All other entries are found with a vector of ones along this axis, in place of
one vector for each index, and `d` is stored for one of the two only.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from .._base.dtypes import common_dtype, widened
from .._base.mesh import full_varying_as, vary_as
from .._base.primitives import callee, LINEAR_IN_ALL, name_of, with_trait
from .._base.trees import safe_zip
from .._sites.cost import forming_cost, num_products
from .._sites.einsum import EXAMPLE, Term
from .._sites.factors import Factors, gradients
from .._sites.rules import Axes
from .._sites.shared import kept_axes
from .._sites.site import is_sum, Label, Site
from .._sites.trace import Program
from .by_sites import (
    AbstractSiteMatrix,
    Kept,
    kept_of,
    named_labels,
    site_terms,
    struct_of,
    Use,
)
from .pytree import RequestedBlocks


# The curvature in the directions of some vectors; None for the identity.
Curve = Inexact[Array, "vectors vectors"] | None


# Takes the output of the function for one example, and the example. The vectors are
# cotangents of the outputs, along a new axis 0.
OfOutputs = Callable[[list, list], tuple[list, Curve]]


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
        of_outputs: OfOutputs,
        *,
        num_vectors: int,
        has_curve: bool,
    ):
        self._of_outputs, self._num_vectors = of_outputs, num_vectors
        self._has_curve = has_curve
        self._outputs = [var.aval for var in program.jaxpr.outvars]
        self._dtype = common_dtype(*(x.dtype for x in self._outputs))
        self._paired: list[Paired | None] = [None for _ in program.perturbations]
        if has_curve and num_vectors > 1:
            self._paired = paired_outputs(program)
        for i in sorted(requested.leaves):
            if self._is_sum(program, i):
                for site in program.sites_of(i):
                    self._paired[site.perturbation] = None
        self._formed = [i for i in sorted(requested.leaves) if self._is_sum(program, i)]
        self._paired += (None for _ in self._formed)
        with_jacobians = program.with_jacobians(self._formed)
        super().__init__(program, with_jacobians, requested)

    def _is_sum(self, program: Program, leaf: int) -> bool:
        """Whether a row of the Jacobian of a leaf is a sum of terms."""
        sites = program.sites_of(leaf)
        paired = [(site, self._paired[site.perturbation]) for site in sites]
        names = (pairing.names(site) for site, pairing in paired if pairing is not None)
        # Each output is computed from one position.
        apart = {name for axes in itertools.chain(*names) for name in axes or ()}
        return is_sum(sites, apart)

    def kind(self, site: Site, other: Site) -> tuple:
        return tuple(self._paired[x.perturbation] for x in (site, other))

    def of_example(self, rows: list, weight: Array | None) -> Kept:
        """The cotangents, the operands, and the curvature or weight of an example."""
        cotangents, operands, scale = pulled_back(
            self.program, rows, self._of_outputs, self._paired
        )
        if weight is not None:
            weight = weight.astype(self._dtype)
            scale = weight if scale is None else scale * weight
        return cotangents, operands, scale

    def blocks_of(self, factors: Kept, values: list) -> list[Inexact[Array, "..."]]:
        cotangents, operands, scale = factors
        program, unformed = self.program, self._unformed(factors, values)
        formed = (
            gradients(program.sites_of(i), unformed, program.leaves[i])
            for i in self._formed
        )
        factors = [*cotangents, *formed], operands, scale
        return self.contracted_blocks(factors, values)

    def structs(self) -> Kept:
        # Jacobians that are formed come after the cotangents.
        cotangents = [*map(struct_of, self.contracted.perturbations, self._nums)]
        operands = [*map(struct_of, self.program.operands)]
        square = (self._num_vectors, self._num_vectors)
        curve = jax.ShapeDtypeStruct(square, self._dtype) if self._has_curve else None
        return cotangents, operands, curve

    def costs_of_factors(
        self, num: int, factors: Kept, values: list
    ) -> dict[int, float]:
        costs: dict[int, float] = {}
        # One backward pass for each vector.
        for site in self.program.sites:
            z = site.perturbation
            cost = num * self._nums[z] * num_products(site)
            costs[z] = costs.get(z, 0.0) + cost
        for leaf in self._formed:
            sites = self.program.sites_of(leaf)
            cost = forming_cost(sites, self._unformed(factors, values))
            costs[sites[0].perturbation] += cost.time
        return costs

    def _unformed(self, factors: Kept, values: list) -> Factors:
        """The factors that Jacobians are formed from."""
        cotangents, operands, _ = factors
        cotangents = cotangents[: len(self.program.perturbations)]
        return Factors(operands, cotangents, (_vectors(0),), values=values)

    @property
    def _nums(self) -> list[int]:
        """The number of vectors that are pulled back to each perturbation."""
        return [self._num_vectors if x is None else x.num for x in self._paired]

    def arrays(self, use: Use, factors: Kept) -> list[Array | None]:
        cotangents, operands, scale = factors
        return [*kept_of(use, cotangents, operands), scale]

    def terms(
        self, use: Use, labels: list[dict[str, Label]], arrays: list
    ) -> Iterator[list[Term]]:
        *kept, scale = arrays
        terms: list[Term] = []
        # The scale is a curvature, or the weight of each example.
        has_curve = scale is not None and scale.ndim == 3
        sides = (0, 1) if has_curve else (0, 0)
        if scale is not None:
            vectors = [_vectors(side) for side in sides] if has_curve else []
            scaled: Term = (widened(scale), (EXAMPLE, *vectors))
            if has_curve:
                for side, names in enumerate(labels):
                    scaled = self._of_site(scaled, use[side], names, side)
            terms.append(scaled)
        pairs = kept[:2], kept[2:]
        for site, pair, names, side in safe_zip(use, pairs, labels, sides):
            (d, axes), operand = site_terms(site, *pair, names, _vectors(side))
            pairing = self._paired[site.perturbation]
            if pairing is not None:
                i = axes.index(_vectors(side))
                d = d.reshape(*d.shape[:i], *pairing.left, *d.shape[i + 1 :])
                vectors = (_vectors(side, axis) for axis in pairing.axes_left)
                axes = (*axes[:i], *vectors, *axes[i + 1 :])
            terms += [(d, axes), *operand]
        yield terms

    def _of_site(
        self, curve: Term, site: Site, names: dict[str, Label], side: int
    ) -> Term:
        """The curvature in the outputs that a site is paired with.

        Paired axes get the names that they have at the site.
        """
        pairing = self._paired[site.perturbation]
        if pairing is None:
            return curve
        x, labels = curve
        position = labels.index(_vectors(side))
        # Where the output starts among the vectors.
        start = sum(x.size for x in self._outputs[: pairing.output])
        x = lax.slice_in_dim(x, start, start + math.prod(pairing.shape), axis=position)
        sizes: list[int] = []
        axes: list[Label] = []
        for i, named in enumerate(pairing.names(site)):
            if named is None:
                sizes.append(pairing.shape[i])
                axes.append(_vectors(side, i))
            else:
                sizes += (site.sizes[name] for name in named)
                axes += named_labels(names, named)
        x = x.reshape(*x.shape[:position], *sizes, *x.shape[position + 1 :])
        return x, (*labels[:position], *axes, *labels[position + 1 :])


def pulled_back(
    program: Program,
    rows: list,
    of_outputs: OfOutputs,
    paired: "Sequence[Paired | None]" = (),
) -> Kept:
    """For one example: cotangents, operands, and the curvature along vectors.

    The cotangents of perturbations that are `paired` are those of fewer vectors.
    """
    num_outputs = len(program.jaxpr.outvars)
    outs, operands, pullback = program.linearize(program.leaves, rows, num_outputs)
    seeds, curve = of_outputs(outs, rows)
    # These may be the same for all examples and devices.
    seeds = [vary_as([out], seed) for seed, out in safe_zip(seeds, outs)]
    # What is not used of the result of a pullback is not computed.
    cotangents = jax.vmap(pullback)(seeds)
    pulled: dict[tuple, list] = {}
    for i, pairing in enumerate(paired):
        if pairing is not None:
            # Equal for those that take the same vectors.
            key = pairing.output, pairing.axes_left
            if key not in pulled:
                pulled[key] = jax.vmap(pullback)(pairing.seeds(outs))
            cotangents[i] = pulled[key][i]
    return cotangents, operands, curve


def _vectors(side: int, axis: int | None = None) -> Label:
    """The label of the vectors of one side, or of those along an axis of an output."""
    return "output", (side if axis is None else (side, axis))


@dataclasses.dataclass(frozen=True)
class Paired:
    """The only output on which the cotangent of a perturbation depends.

    - `output`, `shape`: the index of the output, and its shape.
    - `axes`: for each of its axes, the axis of the perturbation that it is paired with,
        or None: entries whose indices differ along both have a derivative of zero.
    """

    output: int
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]

    @property
    def axes_left(self) -> tuple[int, ...]:
        """The axes that are not paired."""
        return tuple(i for i, axis in enumerate(self.axes) if axis is None)

    @property
    def left(self) -> tuple[int, ...]:
        """The sizes of the axes that are not paired."""
        return tuple(self.shape[i] for i in self.axes_left)

    @property
    def num(self) -> int:
        """The number of vectors that find all entries of the Jacobian."""
        return math.prod(self.left)

    def seeds(self, outs: Sequence[Array]) -> list[Array]:
        """These vectors: one-hot along axes that are not paired, ones along others."""
        seeds = []
        for i, out in enumerate(outs):
            seed = jnp.zeros((self.num, *out.shape), out.dtype)
            if i == self.output:
                pairs = safe_zip(self.shape, self.axes)
                sizes = [size if axis is None else 1 for size, axis in pairs]
                every = jnp.eye(self.num, dtype=out.dtype).reshape(self.num, *sizes)
                seed = jnp.broadcast_to(every, seed.shape)
            seeds.append(vary_as([out], seed))
        return seeds

    def names(self, site: Site) -> list[Axes | None]:
        """For each axis of the output, its names at a site of the perturbation."""
        named = site.rule.y_axes
        return [None if axis is None else named[axis] for axis in self.axes]


def paired_outputs(program: Program) -> list[Paired | None]:
    """For each perturbation, the only output that its cotangent depends on.

    It is None if there are several, or if nothing would be gained by it. Everything is
    read off the jaxpr of the pullback, which has the derivative of every custom rule.
    """

    def pulled(seeds: list, leaves: list, rows: list) -> list:
        return program.linearize(leaves, rows, len(outs))[2](seeds)

    outs = [var.aval for var in program.jaxpr.outvars]
    seeds = [full_varying_as(out, 0) for out in outs]
    jaxpr = jax.make_jaxpr(pulled)(seeds, *program.traced.zeros()).jaxpr
    states: list[_State] = [
        {i: frozenset((axis, axis) for axis in range(out.ndim))}
        for i, out in enumerate(outs)
    ]
    of_cotangents = _followed(jaxpr, [*states, *({} for _ in program.jaxpr.invars)])
    total = sum(math.prod(out.shape) for out in outs)
    result: list[Paired | None] = []
    for number, state in enumerate(of_cotangents):
        pairing = None
        if len(state) == 1:
            ((output, pairs),) = state.items()
            struct, shape = program.perturbations[number], tuple(outs[output].shape)
            sites = [x for x in program.sites if x.perturbation == number]
            axes = {
                axis: other
                for axis, other in sorted(pairs)
                if all(_has_axis(site, struct, other) for site in sites)
            }
            pairing = Paired(output, shape, tuple(map(axes.get, range(len(shape)))))
        result.append(pairing if pairing is not None and pairing.num < total else None)
    return result


def _has_axis(site: Site, struct: Any, axis: int) -> bool:
    """Whether the factor `d` of a site has all of an axis of its perturbation."""
    named = site.rule.y_axes
    if site.loops or len(named) != len(struct.shape):
        return False
    return math.prod(site.sizes[name] for name in named[axis]) == struct.shape[axis]


# For each input that a value depends on, pairs of an axis of the input and an axis of
# the value: entries depend only on those entries of the input with the same index.
_State = Mapping[int, frozenset[tuple[int, int]]]

# Entry by entry, and linear in all inputs together, or in a single one.
_ADDED = LINEAR_IN_ALL & with_trait("entries")
_MULTIPLIED = frozenset(("mul", "div"))


def _followed(jaxpr: Any, inputs: Sequence[_State]) -> list[_State]:
    """The states of a jaxpr's outputs, from those of its inputs."""
    states = dict(safe_zip(jaxpr.invars, inputs))

    def of(atom: Any) -> _State:
        return {} if isinstance(atom, jex.Literal) else states.get(atom, {})

    for eqn in jaxpr.eqns:
        ins = [of(atom) for atom in eqn.invars]
        if any(ins):
            states.update(safe_zip(eqn.outvars, _after(eqn, ins)))
    return [of(var) for var in jaxpr.outvars]


def _after(eqn: Any, ins: list[_State]) -> list[_State]:
    closed = callee(eqn)
    if closed is not None:
        return _followed(closed.jaxpr, ins)
    moved: list[_State] = []
    for i, state in enumerate(ins):
        moves = dict(_moves(eqn, i, [bool(x) for x in ins]))
        moved.append(
            {
                number: frozenset((axis, moves[x]) for axis, x in pairs if x in moves)
                for number, pairs in state.items()
            }
        )
    joined = {
        number: frozenset.intersection(*(x[number] for x in moved if number in x))
        for number in itertools.chain(*moved)
    }
    return [joined for _ in eqn.outvars]


def _moves(eqn: Any, index: int, depend: list[bool]) -> Iterator[tuple[int, int]]:
    """Pairs of an axis of an equation's input and the same axis of its output.

    There are none if the equation is not known to keep entries apart, or to be linear.
    `depend` marks the inputs that depend on what is followed.
    """
    name, params = name_of(eqn), eqn.params
    before, after = eqn.invars[index].aval.shape, eqn.outvars[0].aval.shape
    is_only = sum(depend) == 1
    if name in ("transpose", "broadcast_in_dim"):
        axes = enumerate(kept_axes(name, before, after, params) or ())
        yield from ((axis, i) for i, axis in axes if axis is not None)
    elif name == "reduce_sum":
        kept = [axis for axis, _ in enumerate(before) if axis not in params["axes"]]
        yield from safe_zip(kept, range(len(kept)))
    elif name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
        # An axis is kept if equally many entries are before it.
        places = {(math.prod(after[:i]), size): i for i, size in enumerate(after)}
        keys = [(math.prod(before[:i]), size) for i, size in enumerate(before)]
        yield from ((i, places[key]) for i, key in enumerate(keys) if key in places)
    elif name == "dot_general" and is_only:
        contracted, batched = params["dimension_numbers"]
        free = [
            [
                axis
                for axis, _ in enumerate(atom.aval.shape)
                if axis not in (*contracted[side], *batched[side])
            ]
            for side, atom in enumerate(eqn.invars[:2])
        ]
        start = len(batched[0])
        yield from safe_zip(batched[index], range(start))
        start += len(free[0]) if index == 1 else 0
        yield from zip(free[index], itertools.count(start), strict=False)
    elif (
        (name in _ADDED and all(depend))
        or (name in _MULTIPLIED and is_only and (name == "mul" or index == 0))
        or (name == "select_n" and not depend[0])
    ) and len(before) == len(after):
        axes = enumerate(safe_zip(before, after))
        yield from ((i, i) for i, (size, other) in axes if size == other)
