"""Contractions of arrays with named axes.

Terms are contracted two at a time, in the order that is the cheapest.
"""

import collections
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import opt_einsum
from jaxtyping import Array

from .._base.dtypes import is_inexact
from .._base.platforms import platform
from .._base.trees import safe_zip
from .axes import Axes, axes_in, Axis, Named, SHARED


def contract(terms: Sequence[Named], out: Axes) -> Array:
    """The sum of the product of the terms over all axes that are not in `out`."""
    terms = _without_lone_axes(terms, out)
    of_terms = tuple(axes for _, axes in terms)
    path = _optimal_path(of_terms, tuple(x.shape for x, _ in terms), out)
    # The first of two terms stays the first, so that the compiler recognises equal
    # products.
    items = [*enumerate(terms)]
    for step in path.steps:
        pair = sorted((items[i] for i in step), key=lambda item: item[0])
        items = [item for i, item in enumerate(items) if i not in step]
        needed = {*out, *axes_in(term for _, term in items)}
        wanted = None if items else out
        product = _product_of_terms([term for _, term in pair], needed, wanted)
        items.append((pair[0][0], product))
    ((_, product),) = items
    return product.array


def _product_of_terms(
    terms: list[Named], needed: set[Axis], wanted: Axes | None
) -> Named:
    """The product of one or two terms, summed over axes that are no longer needed.

    Its axes are in the order of `wanted`, or in any order.
    """
    (x, of_x), *second = terms
    of_y: Axes = second[0].axes if second else ()
    if second and needed.issuperset({*of_x, *of_y}):
        # Nothing is summed over. The axes of the larger term are kept.
        y = second[0].array
        if wanted is None:
            large, small = (of_x, of_y) if x.size >= y.size else (of_y, of_x)
            wanted = (*large, *(axis for axis in small if axis not in large))
        product = aligned(x, of_x, wanted) * aligned(y, of_y, wanted)
        return Named(product, wanted)
    if wanted is None:
        # The order in which a matrix product returns its axes, so that nothing is
        # transposed: those of both terms, then those of each.
        wanted = (
            *(axis for axis in of_x if axis in of_y and axis in needed),
            *(axis for axis in of_x if axis not in of_y and axis in needed),
            *(axis for axis in of_y if axis not in of_x and axis in needed),
        )
    sizes = _sizes_of_axes((axes, x.shape) for x, axes in terms)
    terms, out = _fused(terms, wanted)
    order = _order_of_entries(terms, out)
    if order is None:
        expression = _expression([axes for _, axes in terms], out)
        product = jnp.einsum(expression, *(x for x, _ in terms))
    else:
        product = _sum_of_entries(terms, order, out)
    return Named(product.reshape([sizes[axis] for axis in wanted]), wanted)


def _order_of_entries(terms: Sequence[Named], out: Axes) -> Axes | None:
    """The order of the axes in which to multiply the entries of two terms, and add up.

    XLA does so for a product of matrices, too, if both terms have the same axes; but
    first, it moves those of the sum to the end. None if they are there, or if products
    of entries have fewer digits than an accumulator.
    """
    if len(terms) == 1:
        return None
    (x, of_x), (y, of_y) = terms
    if set(of_x) != set(of_y) or not (is_inexact(x) and is_inexact(y)):
        return None
    if jnp.finfo(jnp.result_type(x, y)).nmant < jnp.finfo(jnp.float32).nmant:
        return None
    return next((axes for axes in (of_x, of_y) if axes and axes[-1] in out), None)


def _sum_of_entries(terms: Sequence[Named], order: Axes, out: Axes) -> Array:
    """The sum of products of entries over all axes that are not in `out`."""
    factors = [aligned(x, axes, order) for x, axes in terms]
    summed = [i for i, axis in enumerate(order) if axis not in out]
    left = [axis for axis in order if axis in out]
    total = jnp.sum(math.prod(factors), summed)
    return jnp.transpose(total, [left.index(axis) for axis in out])


def aligned(x: Array, axes: Axes, wanted: Axes) -> Array:
    """`x` with all `wanted` axes, of size 1 for missing ones."""
    order = sorted(range(len(axes)), key=lambda number: wanted.index(axes[number]))
    missing = [number for number, axis in enumerate(wanted) if axis not in axes]
    return jnp.expand_dims(jnp.transpose(x, order), missing)


def _expression(terms: Sequence[Axes], out: Axes) -> str:
    symbols: dict[Axis, str] = {}
    parts = [
        "".join(
            [
                # There may be more axes than letters.
                symbols.setdefault(axis, opt_einsum.get_symbol(len(symbols)))
                for axis in term
            ]
        )
        for term in terms
    ]
    return ",".join(parts) + "->" + "".join([symbols[axis] for axis in out])


class ContractCost(NamedTuple):
    """The FLOPs of `contract`, and the size of its largest intermediate array."""

    flops: float
    largest: float


def contract_cost(terms: Sequence[Named], out: Axes) -> ContractCost:
    """The cost of `contract`, which depends on shapes only."""
    flops = float(sum(x.size for x, _ in terms))
    terms = _without_lone_axes(terms, out)
    of_terms = tuple(axes for _, axes in terms)
    info = _optimal_path(of_terms, tuple(x.shape for x, _ in terms), out).info
    if info is None:
        return ContractCost(flops, 0.0)
    largest = float(info.largest_intermediate)
    return ContractCost(flops + float(info.opt_cost), largest)


def _sizes_of_axes(shapes: Iterable[tuple[Axes, tuple[int, ...]]]) -> dict[Axis, int]:
    return {x: size for axes, shape in shapes for x, size in safe_zip(axes, shape)}


class _Fused(NamedTuple):
    """Terms, and the axes of their product."""

    terms: list[Named]
    out: Axes


def _fused(terms: Sequence[Named], out: Axes) -> _Fused:
    """Equal terms with fewer axes: drops those of size 1 and merges neighbours.

    A matrix product runs faster than the same product over many axes.
    """
    sizes = _sizes_of_axes((axes, x.shape) for x, axes in terms)
    # Axes of size 1 stand between no neighbours.
    lists = [
        [axis for axis in axes if sizes[axis] != 1]
        for axes in (*(axes for _, axes in terms), out)
    ]
    # Each axis takes in the one behind it for as long as it can.
    for axis in sizes:
        while True:
            # Wherever one of the two appears, they must be adjacent.
            following = {
                names[names.index(axis) + 1] if names[-1] != axis else None
                for names in lists
                if axis in names
            }
            other = following.pop() if len(following) == 1 else None
            if other is None or other == axis:
                break
            if any(axis not in names for names in lists if other in names):
                break
            for names in lists:
                if other in names:
                    names.remove(other)
            sizes[axis] *= sizes[other]
    fused = [
        Named(x.reshape([sizes[axis] for axis in names]), tuple(names))
        for (x, _), names in safe_zip(terms, lists[:-1])
    ]
    return _Fused(fused, tuple(lists[-1]))


def _diagonal(term: Named) -> Named:
    """A term that has each axis once; an axis that it has twice is its diagonal."""
    x, axes = term
    left = tuple(dict.fromkeys(axes))
    if len(left) == len(axes):
        return term
    return Named(jnp.einsum(_expression([axes], left), x), left)


def _without_lone_axes(terms: Sequence[Named], out: Axes) -> list[Named]:
    """The terms, each with an axis once and summed over the axes that only it has."""
    terms = [*map(_diagonal, terms)]
    counts = collections.Counter(itertools.chain.from_iterable(x.axes for x in terms))
    summed = []
    for x, axes in terms:
        alone = [i for i, n in enumerate(axes) if counts[n] == 1 and n not in out]
        left = tuple(axis for i, axis in enumerate(axes) if i not in alone)
        # A sum over no axes is an equation, too, and widens integers.
        is_sum = alone or not is_inexact(x)
        summed.append(Named(_summed(x, alone) if is_sum else x, left))
    return summed


def _summed(x: Array, axes: Sequence[int]) -> Array:
    """The sum over some axes."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    if platform().channels_last and len(kept) > 1 and axes and min(axes) > max(kept):
        # XLA would write images with their channels first to add up their pixels.
        x = jnp.moveaxis(x, kept[-1], -1)
        axes = [axis - 1 for axis in axes]
    return jnp.sum(x, axis=tuple(axes))


class _Path(NamedTuple):
    """The order of a contraction.

    - `steps`: the positions of the terms that are contracted next.
    - `info`: what opt_einsum says of it; None if an array has no entries.
    """

    steps: Collection[tuple[int, ...]]
    info: Any


@functools.lru_cache(maxsize=4096)
def _optimal_path(
    axes: tuple[Axes, ...], shapes: tuple[tuple[int, ...], ...], out: Axes
) -> _Path:
    """The cheapest order without a large intermediate array."""
    if any(0 in shape for shape in shapes):
        # One after the other.
        steps = [(0,), *[(0, 1)] * (len(axes) - 1)]
        return _Path(steps[len(axes) > 1 :], None)
    expression = _expression(axes, out)
    # No intermediate may be larger than the existing arrays, or else than the smaller
    # of a Gram matrix and a gradient.
    sizes = _sizes_of_axes(safe_zip(axes, shapes))
    everywhere = set.intersection(*map(set, axes))
    of_leaf = {x for x in sizes if x.is_of_leaf and x.side == SHARED}
    num = lambda axes: math.prod([sizes[axis] for axis in axes])
    gram = num((set(sizes) - of_leaf) | everywhere)
    gradient = num(of_leaf | set(out))
    limit = max(min(gram, gradient), *map(math.prod, shapes))
    find = functools.partial(
        opt_einsum.contract_path, expression, *shapes, shapes=True, optimize="optimal"
    )
    path, info = find(memory_limit=limit)
    if any(len(step) > 2 for step in path):
        # No pair of terms has a small enough product.
        path, info = find()
    return _Path(path, info)
