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

    Its axes are in the order of `wanted`, or in any order. A matrix product has one
    axis of each kind, which runs faster than the same product over many axes.
    """
    (x, labels), *rest = terms
    if not rest:
        wanted = labels if wanted is None else wanted
        return jnp.einsum(_expression([labels], wanted), x), wanted
    ((y, others),) = rest
    if needed.issuperset({*labels, *others}):
        # Nothing is summed over. The axes of the larger term are kept.
        if wanted is None:
            first, second = (labels, others) if x.size >= y.size else (others, labels)
            wanted = (*first, *(label for label in second if label not in first))
        return aligned(x, labels, wanted) * aligned(y, others, wanted), wanted
    kind_of = lambda label: (label in labels, label in others, label in needed)
    kinds_of = lambda labels: [*dict.fromkeys(map(kind_of, labels))]
    every = [*dict.fromkeys((*labels, *others))]
    members = {
        kind: [x for x in every if kind_of(x) == kind] for kind in kinds_of(every)
    }
    axes_of = lambda kinds: [label for kind in kinds for label in members[kind]]
    sizes = _sizes((labels, x.shape) for x, labels in terms)

    def matrix(x: Array, labels: Labels) -> Array:
        kinds = kinds_of(labels)
        x = jnp.transpose(x, [labels.index(label) for label in axes_of(kinds)])
        shapes = ([sizes[label] for label in members[kind]] for kind in kinds)
        return x.reshape([*map(math.prod, shapes)])

    left = kinds_of(x for x in wanted or every if x in needed)
    expression = _expression([kinds_of(labels), kinds_of(others)], left)
    product = jnp.einsum(expression, matrix(x, labels), matrix(y, others))
    out = tuple(axes_of(left))
    product = product.reshape([sizes[label] for label in out])
    if wanted is None:
        return product, out
    return jnp.transpose(product, [out.index(label) for label in wanted]), wanted


def aligned(x: Array, axes: Labels, labels: Labels) -> Array:
    """`x` with axes for all `labels`, of size 1 for missing ones."""
    order = sorted(range(len(axes)), key=lambda axis: labels.index(axes[axis]))
    missing = [axis for axis, label in enumerate(labels) if label not in axes]
    return jnp.expand_dims(jnp.transpose(x, order), missing)


def _expression(terms: Sequence[Sequence[Label]], out: Sequence[Label]) -> str:
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
