"""What is to be done in a program: which equations have sites, and what they take."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from .shared import Node
from .site import Site
from .view import View


_Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of a jaxpr, and which of its outputs are differentiated.

    `uses` says how often variables are used.
    """

    jaxpr: Any
    index: int
    eqn: Any
    live: list[bool]
    uses: collections.Counter


@dataclasses.dataclass(frozen=True)
class Shared:
    """What is the same for all examples: a value, and its derivative by views.

    - `curved`: the leaves that it is not linear in. Of those in `coupled`, too, some
        entry has a mixed second derivative with another, or with one of another leaf.
    """

    node: Node
    views: tuple[View, ...] = ()
    curved: frozenset[int] = frozenset()
    coupled: frozenset[int] = frozenset()


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
    """A `cond` with sites in its branches, each of which has its own perturbations."""

    branches: list[Called]


@dataclasses.dataclass(frozen=True)
class Linearized:
    """An equation with a derivative of its own, in which there are sites.

    - `called`: the derivative, linear in tangents.
    - `given`: which inputs of the equation it takes first.
    - `tangents`: the types of the tangents, which it takes after them.
    - `outs`: which outputs of the equation anything uses.
    - `live`: of which outputs it returns the tangents.
    """

    called: Called
    given: list[int]
    tangents: list[Any]
    outs: list[int]
    live: list[int]


Step = Perturbed | Called | Switched | Linearized


class Plan:
    """What is to be done in one jaxpr, found by going through its equations.

    - `outs`: what the outputs are, where it is the same for all examples.
    """

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.sites: list[Site] = []
        self.perturbations: list[_Struct] = []
        self.operands: list[_Struct] = []
        self.outs: list[Shared | None] = []
        # What has a perturbation, and is used only once.
        self.perturbed_by: dict[Any, int] = {}

    def include(self, inner: "Plan", steps: tuple[int, ...] = ()) -> None:
        """Takes over what is in a call, or in the `steps` of a loop."""
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
