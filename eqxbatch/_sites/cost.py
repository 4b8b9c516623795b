"""How each leaf's share of the gradients' norms is best computed, from shapes alone."""

import dataclasses
import math
from typing import Any, Literal

import jax

from .einsum import contract_cost, EXAMPLE
from .factors import Factors, norm_terms
from .site import is_allowed, Site
from .trace import Program


# How many floating-point operations take as long as moving one byte does: about what
# matrix products give on CPUs and accelerators. Only orders of magnitude matter.
FLOPS_PER_BYTE = 8.0


# Per-example gradients of a convolution, as `vmap` makes them, are grouped
# convolutions, which compilers run several times slower than matrix products.
GROUPED_CONVOLUTION = 4.0


# A leaf with more sites, as in an unrolled loop, has so many pairs of them that tracing
# their products takes seconds; `scan` has one site for all steps.
MOST_SITES = 16


Method = Literal["auto", "sites", "materialise"]


Form = Literal["gram", "gradient", "leaf", "unused"]


@dataclasses.dataclass(frozen=True)
class Contraction:
    """How the gradients of examples with respect to one leaf are worked with.

    - `form`: `"gram"` forms no gradient, and works with the factors of its sites;
        `"gradient"` forms the gradient of each example from its factors; `"leaf"` lets
        automatic differentiation do that, for want of a rule; `"unused"` has no
        gradient, as the function does not use the leaf.
    - `keeps`: whether the gradients of a microbatch, once formed for the norms, are
        kept for the sum. Otherwise the sum is another pass over the factors.
    - `flops`, `bytes`: for one example, its norm and its share in the sum together.
    """

    leaf: int
    form: Form
    keeps: bool
    flops: float
    bytes: float

    @property
    def cost(self) -> float:
        return self.flops + FLOPS_PER_BYTE * self.bytes


def plan(
    closed: Any, num_leaves: int, method: Method
) -> tuple[Program, list[Contraction]]:
    """A function's program, and how each leaf is contracted.

    `"sites"` takes the cheapest contraction for each leaf, `"materialise"` leaves all
    of them to automatic differentiation, and `"auto"` is the cheaper of the two.
    """
    if method != "materialise":
        program = Program(closed, num_leaves)
        contractions = choose(program)
        if method == "sites" or prefers_sites(program, contractions):
            return program, contractions
    program = Program(closed, num_leaves, use_rules=False)
    return program, choose(program)


def choose(program: Program) -> list[Contraction]:
    """The cheapest contraction for each leaf."""
    one = lambda structs: jax.tree.map(
        lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), structs
    )
    operands, cotangents = one(program.operands), one(program.perturbations)
    return [
        _choose(program, leaf, operands, cotangents)
        for leaf in range(len(program.leaves))
    ]


def _choose(
    program: Program, leaf: int, operands: list, cotangents: list
) -> Contraction:
    struct = program.leaves[leaf]
    sites = program.sites_of(leaf)
    if not sites:
        return Contraction(leaf, "unused", False, 0.0, 0.0)
    size = float(math.prod(struct.shape))
    width = struct.dtype.itemsize
    if leaf in program.fallbacks:
        # Written once and read twice: for the norm, and for the sum.
        return Contraction(leaf, "leaf", True, 4 * size, 3 * width * size)
    factors = sum(_num_factors(site) for site in sites)
    products = sum(num_products(site) for site in sites)

    once = Contraction(
        leaf,
        form="gradient",
        keeps=True,
        flops=products + 4 * size,
        bytes=width * (factors + (2 + len(sites)) * size),
    )
    twice = Contraction(
        leaf,
        form="gradient",
        keeps=False,
        flops=2 * products + 2 * size,
        bytes=width * (2 * factors + (1 + len(sites)) * size),
    )
    # What is kept is kept for all leaves at a time, so it must not be much more than
    # what a backward pass keeps anyway.
    candidates = [twice, once] if size <= 2 * factors else [twice]
    best = min(candidates, key=lambda contraction: contraction.cost)
    if not has_gram(sites):
        return best
    gram_flops, gram_size = 0.0, 0.0

    def count(operands: list, cotangents: list) -> list:
        nonlocal gram_flops, gram_size
        factors = Factors(operands, cotangents)
        for terms, _ in norm_terms(sites, factors):
            flops, largest = contract_cost(terms, (EXAMPLE,))
            gram_flops += flops
            gram_size += largest
        return []

    jax.eval_shape(count, operands, cotangents)
    gram = Contraction(
        leaf,
        form="gram",
        keeps=False,
        flops=products + gram_flops,
        bytes=width * (2 * factors + 2 * gram_size),
    )
    return min(best, gram, key=lambda contraction: contraction.cost)


def has_gram(sites: list[Site]) -> bool:
    """Whether norms of the gradients at the sites of a leaf follow from factors."""
    if len(sites) > MOST_SITES:
        return False
    return all(is_allowed("gram", site, other) for site in sites for other in sites)


def prefers_sites(program: Program, contractions: list[Contraction]) -> bool:
    """Whether the contractions are no dearer than forming all gradients by `vmap`."""
    flops, traffic = vmapped_cost(program)
    by_sites = sum(contraction.cost for contraction in contractions)
    return by_sites <= flops + FLOPS_PER_BYTE * traffic


def vmapped_cost(program: Program) -> tuple[float, float]:
    """FLOPs and bytes of one example if all its gradients are formed by `vmap`."""
    flops, traffic = 0.0, 0.0
    for leaf, struct in enumerate(program.leaves):
        sites = program.sites_of(leaf)
        size = float(math.prod(struct.shape))
        for site in sites:
            # What a leaf without a rule takes to be formed is not known, here or there.
            slow = site.rule.kind == "conv_general_dilated"
            factor = GROUPED_CONVOLUTION if slow else 1.0
            flops += 0.0 if site.rule.kind == "leaf" else factor * num_products(site)
        flops += 4 * size
        # Each use adds to the gradient, which is then read for the norm and the sum.
        traffic += struct.dtype.itemsize * size * (2 + len(sites))
    return flops, traffic


def _num_factors(site: Site) -> float:
    """How many numbers the factors of a site have, as they are contracted."""
    sizes = site.sizes
    both = (site.a_axes, site.d_axes)
    return float(sum(math.prod(sizes[name] for name in axes) for axes in both))


def num_products(site: Site) -> float:
    """FLOPs of a site's gradient for one example, or of its share in a sum of them."""
    sizes = site.sizes
    axes = {*site.a_axes, *site.d_axes}
    return 2.0 * math.prod(sizes[name] for name in axes)
