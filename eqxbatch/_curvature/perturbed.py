"""The gradient of an example, as a function of perturbations at the sites.

It is traced once. The trace shows which values depend on which perturbation and what
their derivatives cost, and it is what runs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array

from .._base.jaxprs import depends, evaluate_jaxpr
from .._base.mesh import full_varying_as
from .._sites.site import Site
from .._sites.trace import Program
from .site_blocks import Wanted


# The maximal number of programs in which derivatives are taken. Each contains what
# comes after its first perturbation, so more programs compute less, but take longer to
# compile.
_MOST_PUSHES = 3


@dataclasses.dataclass(frozen=True)
class Push:
    """Some perturbations, and the cotangents and operands that depend on them.

    - `sizes`: the sizes of the perturbations. Perturbations of equal shapes are
        adjacent; `alike` lists them for each.
    """

    perturbations: tuple[int, ...]
    sizes: tuple[int, ...]
    alike: dict[int, list[int]]
    cotangents: tuple[int, ...]
    operands: tuple[int, ...]

    @property
    def num(self) -> int:
        """The number of directions."""
        return sum(self.sizes)

    def directions(self, perturbations: Sequence[int]) -> tuple[int, int]:
        """The range of directions of some adjacent perturbations."""
        first = self.perturbations.index(perturbations[0])
        start = sum(self.sizes[:first])
        return start, start + sum(self.sizes[first : first + len(perturbations)])


class PerturbedGradient:
    """The cotangents and operands of one example, as a function of perturbations.

    - `of_cotangents`, `of_operands`: pairs of a perturbation and a cotangent or operand
        that depends on it, among those that sites need.
    """

    def __init__(self, program: Program, leaves: list, wanted: Wanted, remat: bool):
        self.program = program
        num = len(program.perturbations)
        avals = [var.aval for var in program.jaxpr.invars]
        zeros = [full_varying_as(aval, 0) for aval in avals]
        own, rows = zeros[: len(leaves)], zeros[len(leaves) :]

        def gradient(point: list, leaves: list, rows: list, weight: Array) -> list:
            def value(point: list) -> tuple[Array, list]:
                outs, operands = program.perturbed(leaves, rows, point)
                return outs[0], operands

            value = jax.checkpoint(value) if remat else value
            _, pull, operands = jax.vjp(value, point, has_aux=True)
            return [*pull(weight)[0], *operands]

        point = program.zeros(own, rows)
        weight = full_varying_as(program.jaxpr.outvars[0].aval, 1)
        self.closed = jax.make_jaxpr(gradient)(point, own, rows, weight)
        marks = [False for _ in self.closed.jaxpr.invars]
        needs = _Needs(program, wanted)
        self.of_cotangents: set[tuple[int, int]] = set()
        self.of_operands: set[tuple[int, int]] = set()
        for z in sorted({*needs.cotangents, *needs.operands}):
            depend = depends(self.closed.jaxpr, [*marks[:z], True, *marks[z + 1 :]])
            cotangents = needs.cotangents.get(z, ())
            self.of_cotangents |= {(z, i) for i in cotangents if depend[i]}
            operands = needs.operands.get(z, ())
            self.of_operands |= {(z, i) for i in operands if depend[num + i]}

    def at(
        self, leaves: list, rows: list, weight: Array | None
    ) -> tuple[list, Callable[[list], list]]:
        """The point to differentiate at, and the function to differentiate."""
        point = self.program.zeros(leaves, rows)
        aval = self.program.jaxpr.outvars[0].aval
        seed = full_varying_as(aval, 1)
        seed = seed if weight is None else seed * weight.astype(aval.dtype)
        closed = self.closed

        def run(point: list) -> list:
            args = [*point, *leaves, *rows, seed]
            return evaluate_jaxpr(closed.jaxpr, list(closed.consts), args)

        return point, run

    def pushes(self) -> list[Push]:
        """The programs for derivatives."""
        every = sorted({z for z, _ in (*self.of_cotangents, *self.of_operands)})
        size = -(-len(every) // _MOST_PUSHES) or 1
        return [
            self._push(every[start : start + size])
            for start in range(0, len(every), size)
        ]

    def _push(self, perturbations: list[int]) -> Push:
        structs = self.program.perturbations
        alike: dict[tuple, list[int]] = {}
        for z in perturbations:
            key = (structs[z].shape, structs[z].dtype)
            alike.setdefault(key, []).append(z)
        ordered = [z for own in alike.values() for z in own]
        return Push(
            tuple(ordered),
            tuple(structs[z].size for z in ordered),
            {z: own for own in alike.values() for z in own},
            tuple(sorted({i for z, i in self.of_cotangents if z in perturbations})),
            tuple(sorted({i for z, i in self.of_operands if z in perturbations})),
        )

    def kind(self, site: Site, other: Site) -> tuple:
        """A key that is equal for pairs of sites with the same terms."""
        z, y = site.perturbation, other.perturbation
        return (
            (z > y) - (z < y),
            (min(z, y), max(z, y)) in self.of_cotangents,
            (y, site.operand) in self.of_operands,
            (z, other.operand) in self.of_operands,
        )


class _Needs:
    """What sites need, so that each derivative is computed once."""

    def __init__(self, program: Program, wanted: Wanted):
        self.cotangents: dict[int, set[int]] = {}
        self.operands: dict[int, set[int]] = {}
        pairs = itertools.chain.from_iterable(
            itertools.product(*map(program.sites_of, pair)) for pair in wanted.pairs
        )
        for site, other in pairs:
            first, last = sorted((site.perturbation, other.perturbation))
            self.cotangents.setdefault(first, set()).add(last)
            for changed, by in ((site, other), (other, site)):
                if changed.operand is not None and changed.rule.token is None:
                    self.operands.setdefault(by.perturbation, set()).add(
                        changed.operand
                    )
