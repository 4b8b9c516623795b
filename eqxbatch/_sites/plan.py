"""The plan of a program: which equations have sites, and how to run them."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array

from .._base.primitives import SUMS
from .rules import Axes, Rule
from .shared import Node
from .site import Site
from .view import View


_Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of a jaxpr, and which of its outputs are differentiated.

    `uses` counts how often variables are used.
    """

    jaxpr: Any
    index: int
    eqn: Any
    live: list[bool]
    uses: collections.Counter


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value that is the same for all examples, and its derivative as views.

    - `curved`: the leaves in which it is nonlinear. For those also in `coupled`, some
        entry has a mixed second derivative with another entry of this or another leaf.
    """

    node: Node
    views: tuple[View, ...] = ()
    curved: frozenset[int] = frozenset()
    coupled: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class SharedPerturbation:
    """A perturbed value, after steps that only move its axes.

    - `perturbation`, `shape`: the index and shape of the perturbation.
    - `axes`: for each current axis, the axis that it was; None for an inserted axis of
        size 1. Axes of size 1 may have been removed.
    """

    perturbation: int
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]

    @property
    def is_whole(self) -> bool:
        """Whether no axis has moved."""
        return self.axes == tuple(range(len(self.shape)))

    @property
    def _new(self) -> tuple[int, ...]:
        return tuple(i for i, axis in enumerate(self.axes) if axis is None)

    def after(self, eqn: Any) -> "SharedPerturbation | None":
        """The value after an equation; None if that does more than move axes."""
        name, params = eqn.primitive.name, eqn.params
        if len(eqn.invars) != 1:  # A dynamic shape may be an input.
            return None
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if name == "transpose":
            axes = tuple(self.axes[axis] for axis in params["permutation"])
        elif name in ("reshape", "squeeze", "broadcast_in_dim"):
            kept = [n for n in before if n != 1]
            if kept != [n for n in after if n != 1]:
                return None
            if name == "reshape" and params["dimensions"] is not None:
                return None
            dims = params.get("broadcast_dimensions", ())
            if any(before[i] != after[axis] for i, axis in enumerate(dims)):
                return None
            rest = iter(own for own, n in zip(self.axes, before, strict=True) if n != 1)
            axes = tuple(next(rest) if n != 1 else None for n in after)
        else:
            return None
        return dataclasses.replace(self, axes=axes)

    def apply(self, x: Array) -> Array:
        """Moves the axes of an array with the shape of the perturbation."""
        kept = [axis for axis in self.axes if axis is not None]
        gone = [axis for axis in range(x.ndim) if axis not in kept]
        x = jnp.squeeze(jnp.transpose(x, [*gone, *kept]), tuple(range(len(gone))))
        return jnp.expand_dims(x, self._new)

    def undo(self, x: Array) -> Array:
        """Moves the axes back."""
        kept = [axis for axis in self.axes if axis is not None]
        x = jnp.squeeze(x, self._new)
        x = jnp.transpose(x, sorted(range(len(kept)), key=lambda i: kept[i]))
        gone = [axis for axis, _ in enumerate(self.shape) if axis not in kept]
        return jnp.expand_dims(x, gone)

    def rule(self, rule: Rule) -> Rule:
        """Converts a rule for the current value to one for the perturbed value."""
        if self.is_whole:
            return rule
        named: list[Axes] = [() for _ in self.shape]
        for axis, names in zip(self.axes, rule.y_axes, strict=True):
            if axis is not None:
                named[axis] = names
        return dataclasses.replace(
            rule,
            op=lambda a, w: self.undo(rule.op(a, w)),
            arrange=lambda d: rule.arrange(self.apply(d)),
            outputs=tuple(named),
            key=f"{rule.key} moved by {self.axes} of {self.shape}",
        )


@dataclasses.dataclass(frozen=True)
class Perturbed:
    """An equation with sites: the functions from its inputs to the operands."""

    operands: list[Callable[[list], Array]]


@dataclasses.dataclass(frozen=True)
class Called:
    """An equation that calls a jaxpr with sites in it."""

    jaxpr: Any
    consts: list
    plan: "Plan"


@dataclasses.dataclass(frozen=True)
class Switched:
    """A `cond` with sites in its branches; each branch has its own perturbations."""

    branches: list[Called]


@dataclasses.dataclass(frozen=True)
class Linearized:
    """An equation with a custom derivative that contains sites.

    - `called`: the derivative, linear in tangents.
    - `given`: the inputs of the equation that the derivative takes first.
    - `tangents`: the types of the tangents, which it takes next.
    - `outs`: the outputs of the equation that are used.
    - `live`: the outputs whose tangents it returns.
    """

    called: Called
    given: list[int]
    tangents: list[Any]
    outs: list[int]
    live: list[int]


Step = Perturbed | Called | Switched | Linearized


class Plan:
    """The plan of one jaxpr, built by going through its equations.

    - `outs`: the outputs that are the same for all examples.
    """

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.sites: list[Site] = []
        self.perturbations: list[_Struct] = []
        self.operands: list[_Struct] = []
        self.outs: list[Shared | None] = []
        # Values that have a perturbation and are used only once.
        self.perturbed_by: dict[Any, SharedPerturbation] = {}

    def follow(self, eqn: Any, uses: collections.Counter) -> None:
        """Follows a perturbed value through an equation that moves its axes.

        A value that is used more than once has more than one cotangent.
        """
        for var in eqn.invars:
            before = (
                None if isinstance(var, jex.Literal) else self.perturbed_by.get(var)
            )
            moved = None if before is None else before.after(eqn)
            if moved is not None:
                self.perturbed_by[eqn.outvars[0]] = moved
        self.perturbed_by = {v: x for v, x in self.perturbed_by.items() if uses[v] == 1}

    def follow_out(self, inner: "Plan", inner_outs: list, outs: list) -> None:
        """Follows a perturbed value out of a call that is about to be included."""
        for var, out in zip(inner_outs, outs, strict=True):
            is_literal = isinstance(var, jex.Literal)
            before = None if is_literal else inner.perturbed_by.get(var)
            if before is not None:
                number = before.perturbation + len(self.perturbations)
                self.perturbed_by[out] = dataclasses.replace(
                    before, perturbation=number
                )

    def perturbed_before(
        self, eqn: Any, rules: dict[int, Rule]
    ) -> SharedPerturbation | None:
        """The summand of a parameter, if it is perturbed and as large as the sum."""
        name = eqn.primitive.name
        if name not in SUMS or len(rules) != 1 or (name == "sub" and 0 in rules):
            return None
        (position,) = rules
        other, out = eqn.invars[1 - position], eqn.outvars[0]
        if isinstance(other, jex.Literal) or other.aval.shape != out.aval.shape:
            return None
        return self.perturbed_by.get(other)

    def include(self, inner: "Plan", steps: tuple[int, ...] = ()) -> None:
        """Includes the plan of a call, or of the `steps` of a loop."""
        for site in inner.sites:
            operand = site.operand
            self.sites.append(
                dataclasses.replace(
                    site,
                    perturbation=site.perturbation + len(self.perturbations),
                    operand=None if operand is None else operand + len(self.operands),
                )
            )
        stacked = lambda s: _Struct((*steps, *s.shape), s.dtype)
        self.perturbations += map(stacked, inner.perturbations)
        self.operands += map(stacked, inner.operands)
