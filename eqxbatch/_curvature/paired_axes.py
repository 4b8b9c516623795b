"""Axes of a function's outputs that are also axes of what the outputs depend on.

Where an output is computed entry by entry from the output of a layer, or for each
position by itself, most entries of the Jacobian are zero: those of which the indices
differ along the axis that both share. All others are found with a vector of ones along
this axis, in place of one vector for each index.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array

from .._base.mesh import full_varying_as, vary, varying
from .._base.primitives import callee, LINEAR_IN_ALL, name_of, with_trait
from .._sites.rules import Axes
from .._sites.site import Site
from .._sites.trace import Program


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

    @property
    def key(self) -> tuple:
        """Equal for those that take the same vectors."""
        return self.output, self.axes_left

    def seeds(self, outs: Sequence[Array]) -> list[Array]:
        """These vectors: one-hot along axes that are not paired, ones along others."""
        seeds = []
        for i, out in enumerate(outs):
            seed = jnp.zeros((self.num, *out.shape), out.dtype)
            if i == self.output:
                pairs = zip(self.shape, self.axes, strict=True)
                sizes = [size if axis is None else 1 for size, axis in pairs]
                every = jnp.eye(self.num, dtype=out.dtype).reshape(self.num, *sizes)
                seed = jnp.broadcast_to(every, seed.shape)
            seeds.append(vary(seed, varying(jax.typeof(out))))
        return seeds

    def names(self, site: Site) -> list[Axes | None]:
        """For each axis of the output, its names at a site of the perturbation."""
        named = site.rule.y_axes
        return [None if axis is None else named[axis] for axis in self.axes]


def paired_outputs(program: Program, num_outputs: int) -> list[Paired | None]:
    """For each perturbation, the only output that its cotangent depends on.

    It is None if there are several, or if nothing would be gained by it. Everything is
    read off the jaxpr of the pullback, which has the derivative of every custom rule.
    """
    avals = [var.aval for var in program.jaxpr.invars]
    num_leaves = len(program.leaves)

    def pulled(seeds: list, args: list) -> list:
        leaves, rows = args[:num_leaves], args[num_leaves:]
        return program.linearize(leaves, rows, num_outputs)[2](seeds)

    outs = [var.aval for var in program.jaxpr.outvars[:num_outputs]]
    zeros = [[full_varying_as(aval, 0) for aval in own] for own in (outs, avals)]
    jaxpr = jax.make_jaxpr(pulled)(*zeros).jaxpr
    states: list[_State] = [
        {i: frozenset((axis, axis) for axis in range(out.ndim))}
        for i, out in enumerate(outs)
    ]
    found = _followed(jaxpr, [*states, *({} for _ in avals)])
    sites: dict[int, list[Site]] = {}
    for site in program.sites:
        sites.setdefault(site.perturbation, []).append(site)
    total = sum(math.prod(out.shape) for out in outs)
    result: list[Paired | None] = []
    for number, state in enumerate(found):
        own = None
        if len(state) == 1:
            ((output, pairs),) = state.items()
            struct = program.perturbations[number]
            of_sites = sites.get(number, [])
            axes = {
                axis: other
                for axis, other in sorted(pairs)
                if all(_has_axis(site, struct, other) for site in of_sites)
            }
            shape = tuple(outs[output].shape)
            own = Paired(output, shape, tuple(axes.get(i) for i, _ in enumerate(shape)))
        result.append(own if own is not None and own.num < total else None)
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
    states = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> _State:
        return {} if isinstance(atom, jex.Literal) else states.get(atom, {})

    for eqn in jaxpr.eqns:
        ins = [of(atom) for atom in eqn.invars]
        if any(ins):
            states.update(zip(eqn.outvars, _after(eqn, ins), strict=True))
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
    if name == "transpose":
        yield from ((axis, i) for i, axis in enumerate(params["permutation"]))
    elif name == "broadcast_in_dim":
        axes = enumerate(params["broadcast_dimensions"])
        yield from ((i, axis) for i, axis in axes if before[i] == after[axis])
    elif name == "reduce_sum":
        kept = [axis for axis, _ in enumerate(before) if axis not in params["axes"]]
        yield from zip(kept, range(len(kept)), strict=True)
    elif name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
        # An axis is kept if equally many entries are before it.
        at = {(math.prod(after[:i]), size): i for i, size in enumerate(after)}
        keys = [(math.prod(before[:i]), size) for i, size in enumerate(before)]
        yield from ((i, at[key]) for i, key in enumerate(keys) if key in at)
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
        yield from zip(batched[index], range(start), strict=True)
        start += len(free[0]) if index == 1 else 0
        yield from zip(free[index], itertools.count(start), strict=False)
    elif (
        (name in _ADDED and all(depend))
        or (name in _MULTIPLIED and is_only and (name == "mul" or index == 0))
        or (name == "select_n" and not depend[0])
    ) and len(before) == len(after):
        axes = enumerate(zip(before, after, strict=True))
        yield from ((i, i) for i, (size, other) in axes if size == other)
