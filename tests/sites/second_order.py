"""Compares Hessians, diagonals and Gauss-Newton matrices from sites with JAX.

Blocks are left out if they are large, or if the sites of a leaf return many numbers,
because these are materialised. Instead of one Hessian-vector product for each of many
entries, JAX computes a few for random directions.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..experts import masked_products
from .adapter import Curvature
from .subject import as_numpy, largest_entry, largest_error, Subject


# The largest number of entries that a site may return; the same for all leaves
# together; and the largest size of a leaf that is left to products.
_MOST_OF_PERTURBATION, _MOST_PERTURBED, _MOST_COLUMNS = 1024, 4096, 256


# The largest number of blocks of a matrix, and of entries in all of them.
_MOST_BLOCKS, _MOST_OF_BLOCKS = 128, 2**23


# Leaves with at most this many entries are compared in all of them; larger leaves in
# this many entries, and in as many random directions.
_MOST_EXACT, _NUM_DIRECTIONS = 64, 8


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The blocks of a matrix that are compared, or their diagonals."""

    pairs: list[tuple[int, int]]
    is_diagonal: bool

    @property
    def leaves(self) -> set[int]:
        return {leaf for pair in self.pairs for leaf in pair}


@dataclasses.dataclass(frozen=True)
class _Product:
    """JAX's products of the Hessian and Gauss-Newton matrix with one direction.

    The direction is in one leaf, and along a single `entry` if that is given. There are
    products for the leaves that are compared.
    """

    leaf: int
    entry: int | None
    direction: np.ndarray
    hessian: dict[int, np.ndarray]
    gauss_newton: dict[int, np.ndarray]


def second_order(
    subject: Subject, jacobians: list[np.ndarray]
) -> list[dict[str, float]]:
    """The errors of each leaf, given the Jacobians of each example."""
    errors: list[dict[str, float]] = [{} for _ in subject.leaves]
    if any(map(jnp.iscomplexobj, subject.leaves)):
        # Complex parameters have a Hessian only in their real and imaginary parts.
        return errors
    requested = {
        "hessian": _requested(subject, is_diagonal=False, is_ggn=False),
        "diagonal": _requested(subject, is_diagonal=True, is_ggn=False),
        "gauss_newton": _requested(subject, is_diagonal=False, is_ggn=True),
    }
    compared = set().union(*(blocks.leaves for blocks in requested.values()))
    if not compared:
        return errors
    found = _by_sites(subject, requested)
    curved = sorted(requested["hessian"].leaves | requested["diagonal"].leaves)
    products = [*_products(subject, jacobians, sorted(compared), curved)]
    for quantity, blocks in requested.items():
        errors_of = _compared(blocks, found[quantity], products, quantity)
        for leaf, error in errors_of.items():
            errors[leaf][quantity] = error
    return errors


def _curvature(
    subject: Subject, leaves: list, rows: list, *, is_ggn: bool
) -> Curvature:
    if is_ggn:
        return Curvature(subject.outputs, subject.loss, leaves, rows)
    return Curvature(subject.value, None, leaves, rows)


def _requested(subject: Subject, *, is_diagonal: bool, is_ggn: bool) -> _Blocks:
    """The blocks that are small enough, of leaves whose sites return few numbers."""
    curvature = _curvature(subject, subject.leaves, subject.rows, is_ggn=is_ggn)
    sites = curvature.sites
    chosen: list[int] = []
    perturbations: set[int] = set()
    sizes = sites.sizes
    # Leaves with small perturbations come first, so that most leaves are compared.
    perturbations_of = lambda leaf: {
        place.perturbation for place in sites.places if place.leaf == leaf
    }
    for leaf in sorted(
        range(len(subject.leaves)),
        key=lambda i: sum(sizes[t] for t in perturbations_of(i)),
    ):
        perturbed = perturbations_of(leaf)
        if not curvature.is_covered(leaf, is_diagonal=is_diagonal):
            if subject.leaves[leaf].size <= _MOST_COLUMNS:
                chosen.append(leaf)
            continue
        has_few_directions = all(
            sizes[perturbation] <= _MOST_OF_PERTURBATION for perturbation in perturbed
        )
        if (
            has_few_directions
            and sum(sizes[perturbation] for perturbation in perturbations | perturbed)
            <= _MOST_PERTURBED
        ):
            chosen.append(leaf)
            perturbations |= perturbed
    if curvature.excludes_sites(set(chosen)):
        return _Blocks([], is_diagonal)
    return _Blocks(_small_pairs(subject, chosen, is_diagonal), is_diagonal)


def _small_pairs(
    subject: Subject, leaves: list[int], is_diagonal: bool
) -> list[tuple[int, int]]:
    if is_diagonal:
        return [(leaf, leaf) for leaf in sorted(leaves)]
    with_itself = [(leaf, leaf) for leaf in leaves]
    others = [*itertools.combinations(sorted(leaves), 2)]
    # A random choice has blocks of all sizes, if not all can be compared.
    np.random.default_rng(0).shuffle(others)
    room, chosen = _MOST_OF_BLOCKS, []
    for first, second in (*with_itself, *map(tuple, others)):
        size = subject.leaves[first].size * subject.leaves[second].size
        if size <= room and len(chosen) < _MOST_BLOCKS:
            room -= size
            chosen.append((int(first), int(second)))
    return chosen


def _by_sites(subject: Subject, requested: dict[str, _Blocks]) -> dict[str, list]:
    """The requested blocks, summed over the examples."""

    @jax.jit
    def run(leaves: list, rows: list) -> dict[str, list[Array]]:
        result: dict[str, list[Array]] = {}
        for quantity, blocks in requested.items():
            is_ggn = quantity == "gauss_newton"
            curvature = _curvature(subject, leaves, rows, is_ggn=is_ggn)
            result[quantity] = curvature.blocks(
                blocks.pairs, is_diagonal=blocks.is_diagonal
            )
        return result

    return run(subject.leaves, subject.rows)


def _products(
    subject: Subject,
    jacobians: list[np.ndarray],
    leaves: list[int],
    curved: list[int],
) -> Iterator[_Product]:
    """Products with directions in `leaves`; Hessians only in the leaves `curved`."""
    point = [subject.leaves[leaf] for leaf in curved]

    def total(at: list) -> Array:
        moved = dict(zip(curved, at, strict=True))
        leaves = [moved.get(i, leaf) for i, leaf in enumerate(subject.leaves)]
        return jnp.sum(jax.vmap(subject.value, (None, 0))(leaves, subject.rows))

    @jax.jit
    @masked_products()
    def hessian(vector: list) -> list:
        return jax.jvp(jax.grad(total), (point,), (vector,))[1]

    one = np.zeros(jacobians[0].shape[1], subject.leaves[0].dtype)
    curve = as_numpy(jax.jit(jax.hessian(subject.loss))(one))
    for leaf, entry, direction in _directions(subject, leaves):
        products: dict[int, np.ndarray] = {}
        if leaf in curved:
            vector = [np.zeros(x.shape, x.dtype) for x in point]
            dtype = subject.leaves[leaf].dtype
            vector[curved.index(leaf)] = np.asarray(direction, dtype)
            found = zip(curved, hessian(vector), strict=True)
            products = {other: as_numpy(x) for other, x in found}
        pushed = jacobians[leaf].reshape(*jacobians[leaf].shape[:2], -1)
        pushed = pushed @ direction.reshape(-1) @ curve
        pulled = {i: np.tensordot(pushed, jacobians[i], 2) for i in leaves}
        yield _Product(leaf, entry, direction, products, pulled)


def _directions(
    subject: Subject, leaves: list[int]
) -> Iterator[tuple[int, int | None, np.ndarray]]:
    generator = np.random.default_rng(0)
    for leaf in leaves:
        size, shape = subject.leaves[leaf].size, subject.leaves[leaf].shape
        is_exact = size <= _MOST_EXACT
        num = size if is_exact else _NUM_DIRECTIONS
        for entry in generator.choice(size, num, replace=False):
            one_hot = np.zeros(size)
            one_hot[entry] = 1.0
            yield leaf, int(entry), one_hot.reshape(shape)
        for _ in range(0 if is_exact else _NUM_DIRECTIONS):
            yield leaf, None, generator.standard_normal(shape)


def _compared(
    requested: _Blocks, found: list, products: list[_Product], quantity: str
) -> dict[int, float]:
    """For each leaf, the largest error of its blocks."""
    name = "gauss_newton" if quantity == "gauss_newton" else "hessian"
    blocks = {pair: as_numpy(x) for pair, x in zip(requested.pairs, found, strict=True)}
    pairs: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for product in products:
        for (first, second), block in blocks.items():
            for leaf, other in {(first, second), (second, first)}:
                if leaf != product.leaf:
                    continue
                true = getattr(product, name)[other]
                got = _applied(block, product, leaf == first, requested.is_diagonal)
                if got is None:
                    continue
                if requested.is_diagonal:
                    true = true.reshape(-1)[product.entry, None]
                for index in {leaf, other}:
                    pairs.setdefault(index, []).append((got, true))
    scales = {
        leaf: max(largest_entry(true) for _, true in compared)
        for leaf, compared in pairs.items()
    }
    floor = max(scales.values(), default=0.0) * 1e-8
    return {
        leaf: max(largest_error(*pair, max(scales[leaf], floor)) for pair in compared)
        for leaf, compared in pairs.items()
    }


def _applied(
    block: np.ndarray, product: _Product, is_first: bool, is_diagonal: bool
) -> np.ndarray | None:
    """A block times the direction of a product, in the leaf of that direction."""
    if is_diagonal:
        entry = product.entry
        return None if entry is None else block.reshape(-1)[entry, None]
    num = product.direction.ndim
    if is_first:
        return np.tensordot(product.direction, block, num)
    return np.tensordot(block, product.direction, num)
