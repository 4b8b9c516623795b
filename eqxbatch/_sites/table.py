"""What contractions need to know of a program: its leaves, and where they enter."""

import collections
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from .._base.structs import varying
from .site import Site
from .values import Node


_Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(eq=False)
class SiteTable:
    """Leaves and their sites.

    - `leaves`: the leaves, of which only types matter.
    - `sites`: all sites; every leaf that is used has at least one.
    - `perturbations`, `operands`: the types of cotangents and operands for one example,
        by the numbers that sites have for theirs.
    - `nodes`: the values that views of sites read, by index.
    - `fallbacks`: the leaves that no rule covers, by index, with reasons. Their only
        site is the leaf itself.
    """

    leaves: Sequence[Any]
    sites: list[Site]
    perturbations: list[_Struct]
    operands: list[_Struct]
    nodes: list[Node] = dataclasses.field(default_factory=list)
    fallbacks: dict[int, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        lines = []
        for leaf, x in enumerate(self.leaves):
            uses = [repr(site) for site in self.of(leaf)] or ["not used"]
            # The site of a leaf without a rule is the leaf itself.
            uses = [self.fallbacks[leaf]] if leaf in self.fallbacks else uses
            lines += [f"leaf {leaf} {x.shape}", *(f"    {use}" for use in uses)]
        return "\n".join(lines)

    # Asked for each leaf, so a search through all sites would be quadratic in depth.
    @functools.cached_property
    def _by_leaf(self) -> dict[int, list[Site]]:
        sites: dict[int, list[Site]] = collections.defaultdict(list)
        for site in self.sites:
            sites[site.leaf].append(site)
        return sites

    def of(self, leaf: int) -> list[Site]:
        """The sites of a leaf."""
        return self._by_leaf.get(leaf, [])

    def family(self, leaf: int) -> Hashable:
        """A key that is equal for leaves whose sites are equal functions."""
        struct = self.leaves[leaf]
        # On a mesh, leaves may differ in the axes along which they vary over devices.
        key = [struct.shape, struct.dtype, varying(jax.typeof(struct))]
        key.append(leaf in self.fallbacks)
        for site in self.of(leaf):
            view, rule, operand = site.view, site.rule, site.operand
            structs = [self.perturbations[site.perturbation]]
            if operand is not None:
                structs.append(self.operands[operand])
            key += [view.key, view.loops, rule.kind, rule.key, site.loops]
            key += [(struct.shape, struct.dtype) for struct in structs]
            key += [site.is_complex, site.is_coupled, site.is_reverse]
            # Keys do not tell which values a view reads, so such a leaf is like no
            # other.
            if site.source is not None or view.reads:
                key.append(leaf)
        return tuple(key)
