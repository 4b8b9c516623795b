"""Contractions of arrays with labelled axes, and their cost."""

import collections
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import opt_einsum
from jaxtyping import Array

from .._base.dtypes import is_inexact
from .._base.trees import safe_zip
from .site import Label


Labels = tuple[Label, ...]


Term = tuple[Array, Labels]


EXAMPLE: Label = ("example", 0)


OTHER_EXAMPLE: Label = ("example", 1)


def contract(terms: Sequence[Term], out: Labels) -> Array:
    """The sum of the product of the terms over all labels that are not in `out`."""
    terms = _summed(terms, out)
    labels = tuple(labels for _, labels in terms)
    path, _ = _optimal_path(labels, tuple(x.shape for x, _ in terms), out)
    # The first of two terms stays the first, so that the compiler recognises equal
    # products.
    items = [(i, *term) for i, term in enumerate(terms)]
    for step in path:
        chosen = sorted((items[i] for i in step), key=lambda item: item[0])
        items = [item for i, item in enumerate(items) if i not in step]
        needed = {*out, *(label for _, _, labels in items for label in labels)}
        wanted = None if items else out
        product = _product([(x, labels) for _, x, labels in chosen], needed, wanted)
        items.append((chosen[0][0], *product))
    ((_, product, _),) = items
    return product


def _product(terms: list[Term], needed: set[Label], wanted: Labels | None) -> Term:
    """The product of one or two terms, summed over labels that are no longer needed.

    Its axes are in the order of `wanted`, or in any order.
    """
    (x, labels), *rest = terms
    others: Labels = rest[0][1] if rest else ()
    if rest and needed.issuperset({*labels, *others}):
        # Nothing is summed over. The axes of the larger term are kept.
        (y, _) = rest[0]
        if wanted is None:
            first, second = (labels, others) if x.size >= y.size else (others, labels)
            wanted = (*first, *(label for label in second if label not in first))
        return aligned(x, labels, wanted) * aligned(y, others, wanted), wanted
    if wanted is None:
        wanted = (
            *(label for label in labels if label in others and label in needed),
            *(label for label in labels if label not in others and label in needed),
            *(label for label in others if label not in labels and label in needed),
        )
    sizes = _sizes((labels, x.shape) for x, labels in terms)
    terms, out = _fused(terms, wanted)
    expression = _expression([labels for _, labels in terms], out)
    product = jnp.einsum(expression, *(x for x, _ in terms))
    return product.reshape([sizes[label] for label in wanted]), wanted


def aligned(x: Array, axes: Labels, labels: Labels) -> Array:
    """`x` with axes for all `labels`, of size 1 for missing ones."""
    order = sorted(range(len(axes)), key=lambda axis: labels.index(axes[axis]))
    missing = [axis for axis, label in enumerate(labels) if label not in axes]
    return jnp.expand_dims(jnp.transpose(x, order), missing)


def _expression(terms: Sequence[Labels], out: Labels) -> str:
    symbols: dict[Label, str] = {}
    parts = [
        "".join(
            symbols.setdefault(label, opt_einsum.get_symbol(len(symbols)))
            for label in term
        )
        for term in terms
    ]
    return ",".join(parts) + "->" + "".join(symbols[label] for label in out)


def contract_cost(terms: Sequence[Term], out: Labels) -> tuple[float, float]:
    """The FLOPs of `contract`, and the size of its largest intermediate array."""
    flops = float(sum(x.size for x, _ in terms))
    terms = _summed(terms, out)
    labels = tuple(labels for _, labels in terms)
    _, info = _optimal_path(labels, tuple(x.shape for x, _ in terms), out)
    if info is None:
        return flops, 0.0
    return flops + float(info.opt_cost), float(info.largest_intermediate)


def _sizes(axes: Iterable[tuple[Labels, tuple[int, ...]]]) -> dict[Label, int]:
    return {x: size for labels, shape in axes for x, size in safe_zip(labels, shape)}


def _fused(terms: Sequence[Term], out: Labels) -> tuple[list[Term], Labels]:
    """Equal terms with fewer axes: drops those of size 1 and merges neighbours.

    A matrix product runs faster than the same product over many axes.
    """
    sizes = _sizes((labels, x.shape) for x, labels in terms)
    lists = [
        [label for label in labels if sizes[label] != 1]
        for labels in (*(labels for _, labels in terms), out)
    ]
    for label in sizes:
        while True:
            # Wherever one of the two appears, they must be adjacent.
            following = {
                names[names.index(label) + 1] if names[-1] != label else None
                for names in lists
                if label in names
            }
            other = following.pop() if len(following) == 1 else None
            if other is None or other == label:
                break
            if any(label not in names for names in lists if other in names):
                break
            if any(names.count(x) > 1 for names in lists for x in (label, other)):
                break
            for names in lists:
                if other in names:
                    names.remove(other)
            sizes[label] *= sizes[other]
    fused = [
        (x.reshape([sizes[label] for label in names]), tuple(names))
        for (x, _), names in safe_zip(terms, lists[:-1])
    ]
    return fused, tuple(lists[-1])


def _summed(terms: Sequence[Term], out: Labels) -> list[Term]:
    """The terms, each summed over the labels that only it has."""
    counts = collections.Counter(label for _, labels in terms for label in labels)
    summed = []
    for x, labels in terms:
        alone = [i for i, n in enumerate(labels) if counts[n] == 1 and n not in out]
        kept = tuple(label for i, label in enumerate(labels) if i not in alone)
        # A sum over no axes is an equation, too, and widens integers.
        is_sum = alone or not is_inexact(x)
        summed.append((jnp.sum(x, axis=tuple(alone)) if is_sum else x, kept))
    return summed


@functools.lru_cache(maxsize=4096)
def _optimal_path(
    labels: tuple[Labels, ...], shapes: tuple[tuple[int, ...], ...], out: Labels
) -> tuple[Any, Any]:
    if any(0 in shape for shape in shapes):
        # One after the other.
        return [(0,), *[(0, 1)] * (len(labels) - 1)][len(labels) > 1 :], None
    expression = _expression(labels, out)
    # No intermediate may be larger than the existing arrays, or else than the smaller
    # of a Gram matrix and a gradient.
    sizes = _sizes(safe_zip(labels, shapes))
    everywhere = set.intersection(*map(set, labels))
    of_leaf = {label for label in sizes if label[0] in ("leaf", "view")}
    num = lambda labels: math.prod(sizes[label] for label in labels)
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
    return path, info
