"""Columns and rows of matrices, from products with one-hot vectors.

Columns of symmetric matrices are computed for some leaves at a time. What does not
depend on these leaves is not differentiated, and the rows of earlier leaves are known
by symmetry. So each product needs only a part of the function.

A function such as an ODE solver may have a derivative in forward mode or in reverse
mode only. Columns of its Jacobian need the former, and rows the latter. Once the
Jacobian is known, both modes are: the function is replaced by its linear expansion.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Int

from .._base.dtypes import as_complex, as_real, common_dtype, is_complex, size_groups
from .._base.mesh import vary_as
from .._base.modes import (
    Derivative,
)
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._batch.accumulators import Concat
from .._batch.arguments import Leaves, RowArrays
from .._batch.loop import accumulated
from .._batch.rows import Rows
from .._sites.cost import pushed_cost
from .pytree import Pair, RequestedBlocks


Linear = Callable[[list], list]


Mode = Literal["auto", "fwd", "rev"]


# The number of entries of small leaves that one product may include.
LEAST_COLUMNS = 256


# Takes the leaves, the indices of those that change, and the indices of those whose
# rows are requested. Returns the linear function from directions of the former to rows
# of the latter.
Products = Callable[[list, list[int], list[int]], Linear]


# Takes the leaves, and the indices of those to differentiate with respect to.
Gradient = Callable[[list, Sequence[int]], list]


def product_blocks(
    products: Products,
    leaves: list[Array],
    order: list[int],
    requested: RequestedBlocks,
    size: int | None,
) -> dict[Pair, Inexact[Array, "..."]]:
    """Blocks of a symmetric matrix over `leaves`, from products with it.

    - `order`: the indices of the leaves that columns are computed for, in the order in
        which the function uses them. Each requested pair contains one of them.
    - `size`: the number of columns that are computed at a time; None for a whole group.
    """
    result: dict[Pair, Array] = {}
    done: list[int] = []
    # Columns of small leaves are computed together.
    for numbers in size_groups([leaves[i].size for i in order], LEAST_COLUMNS):
        # The columns of these leaves, once, for all rows that no earlier group had.
        group = [order[i] for i in numbers]
        # For each pair, the leaf of the columns and the other one.
        pairs: dict[Pair, tuple[int, int]] = {}
        for pair in requested.pairs:
            for column, row in (pair, pair[::-1]):
                if column in group and row not in done:
                    pairs.setdefault(pair, (column, row))
        done += group
        if not pairs:
            continue
        point = [leaves[leaf] for leaf in group]
        # Rows and columns of a diagonal have the same entries in the same order.
        rows = sorted({row for _, row in pairs.values()})
        rows = group if requested.is_diagonal else rows
        # `images_of_rows` has the columns along axis 0, and the entries of a row's leaf
        # behind.
        compute = diagonal_entries if requested.is_diagonal else images
        images_of_rows = compute(products(leaves, group, rows), point, size)
        start = 0
        # One-hot directions are numbered over all leaves of the group together.
        for leaf, x in safe_zip(group, point):
            of_leaf = [image[start : start + x.size] for image in images_of_rows]
            start += x.size
            if requested.is_diagonal:
                result[leaf, leaf] = of_leaf[0].reshape(x.shape)
                continue
            for pair, (column, row) in pairs.items():
                if column == leaf:
                    block = of_leaf[rows.index(row)]
                    # The block has the axes of the column's leaf, then those of the
                    # row's. By symmetry, it is also the block of the pair the other way
                    # round.
                    block = block.reshape(*x.shape, *block.shape[1:])
                    is_first = pair[0] == leaf
                    last = range(-x.ndim, 0)
                    moved = jnp.moveaxis(block, range(x.ndim), last)
                    result[pair] = block if is_first else moved
    return result


def product_costs(
    products: Products, leaves: list[Array], order: list[int]
) -> dict[int, float]:
    """The number of floating-point operations for all columns of each leaf."""

    def count(leaves: list[Array]) -> dict[int, float]:
        # Costs are read off the jaxpr of one product: that of what depends on a leaf.
        point = [leaves[i] for i in order]
        linear = products(leaves, order, [*range(len(leaves))])
        jaxpr = jax.make_jaxpr(linear)(point).jaxpr
        cost = lambda leaf: pushed_cost(jaxpr, [i == leaf for i in order])
        return {leaf: leaves[leaf].size * cost(leaf).time for leaf in order}

    return eqx.filter_eval_shape(count, leaves)


def hessian_products(
    gradient: Gradient, *, is_reverse: bool, is_single: bool
) -> Products:
    """Hessian-vector products, as derivatives of the `gradient` in the given mode.

    With `is_single`, the product is run only once.
    """

    def forward(leaves: list[Array], group: list[int], rows: list[int]) -> Linear:
        changed = lambda values: gradient(replaced(leaves, group, values), rows)
        point = [leaves[i] for i in group]
        if is_single:
            # This needs no linear function that can be run again.
            return lambda vector: jax.jvp(changed, (point,), (vector,))[1]
        return jax.linearize(changed, point)[1]

    def reverse(leaves: list[Array], group: list[int], rows: list[int]) -> Linear:
        # By symmetry, the gradient with respect to the columns' leaves is
        # differentiated in the rows' leaves: a pullback then goes from columns to rows.
        changed = lambda values: gradient(replaced(leaves, rows, values), group)
        pull = jax.vjp(changed, [leaves[i] for i in rows])[1]
        return lambda seeds: pull(seeds)[0]

    return reverse if is_reverse else forward


def replaced(leaves: Sequence, which: Sequence[int], values: Sequence) -> list:
    result = list(leaves)
    for i, value in safe_zip(which, values):
        result[i] = value
    return result


def images(
    linear: Linear, point: Sequence[Array], size: int | None, axis: int = 0
) -> list[Inexact[Array, "..."]]:
    """The images of all one-hot directions under a linear function.

    `point` is like the argument of the function. The directions are along an `axis` of
    all results, and `size` of them are computed at a time.
    """
    return _of_one_hot(jax.vmap(linear, out_axes=axis), point, size, axis)


def diagonal_entries(
    linear: Linear, point: Sequence[Array], size: int | None
) -> list[Inexact[Array, " n"]]:
    """The diagonal of a linear function whose result is like its argument."""

    def entries(seeds: list[Array]) -> list:
        # Of each image, only the entry in its own direction is wanted.
        outs = jax.vmap(linear)(seeds)
        dtype = common_dtype(*(out.dtype for out in outs))
        parts = [
            jnp.sum(seed * out, axis=tuple(range(1, seed.ndim))).astype(dtype)
            for seed, out in safe_zip(seeds, outs)
        ]
        return [sum(parts[1:], parts[0])]

    return _of_one_hot(entries, point, size, 0)


def _of_one_hot(
    fun: Linear, point: Sequence[Array], size: int | None, axis: int
) -> list[Array]:
    total = sum(x.size for x in point)
    run = lambda rows: fun(one_hot_seeds(rows.arrays[0], point))
    rows = Rows([jnp.arange(total)], (0,), total)
    return accumulated(run, rows, size, Concat(axis=axis))


def one_hot_seeds(index: Int[Array, " b"], point: Sequence[Array]) -> list[Array]:
    """One-hot directions for entries, numbered over all arrays together."""
    seeds, start = [], 0
    for x in point:
        # A number below zero or past the end gives zeros: the entry is in another
        # array.
        seed = jax.nn.one_hot(index - start, x.size, dtype=x.dtype)
        seeds.append(vary_as([x], seed.reshape(index.size, *x.shape)))
        start += x.size
    return seeds


def by_columns(
    values: Callable[[list], list],
    leaves: list[Array],
    structs: Leaves,
    size: int | None,
) -> list[list[Array]]:
    """Forward-mode derivatives with respect to the entries of the leaves.

    There is one array for each output and leaf, in which one axis has the entries of
    the leaf.
    """
    result: list[list[Array]] = [[] for _ in structs]
    for group in size_groups([x.size for x in leaves], LEAST_COLUMNS):
        point = [leaves[i] for i in group]
        outputs = lambda changed, group=group: values(replaced(leaves, group, changed))
        # Directions are behind the axes of the output, where a Jacobian has its
        # columns.
        blocks = images(jax.linearize(outputs, point)[1], point, size, -1)
        ends = [*itertools.accumulate(x.size for x in point)]
        for of_output, x in safe_zip(result, blocks):
            of_output += jnp.split(x, ends[:-1], axis=-1)
    return result


def by_rows(
    values: Callable[[list], list],
    leaves: list[Array],
    structs: Leaves,
    size: int | None,
) -> list[list[Array]]:
    """Reverse-mode derivatives of the entries of the outputs.

    With respect to real arrays, a complex output is pulled back once for its real part
    and once for its imaginary part, because a pullback to a real array is real.
    """
    if any(map(is_complex, leaves)) or not any(map(is_complex, structs)):
        return _pulled_back(values, leaves, structs, size)
    # Each complex output has become two real ones.
    parts, treedef = jtu.tree_flatten(jax.eval_shape(as_real, structs))
    of_parts = lambda leaves: jtu.tree_leaves(as_real(values(leaves)))
    pulled = _pulled_back(of_parts, leaves, parts, size)
    # One list for each leaf, with an entry for each output.
    joined = [
        as_complex(jtu.tree_unflatten(treedef, of_leaf))
        for of_leaf in safe_zip(*pulled)
    ]
    return [[*of_output] for of_output in safe_zip(*joined)]


def _pulled_back(
    values: Callable[[list], list],
    leaves: list[Array],
    structs: Leaves,
    size: int | None,
) -> list[list[Array]]:
    """Like `by_rows`, for outputs that are complex only if the leaves are."""
    result: list[list[Array]] = []
    for group in size_groups([x.size for x in structs], LEAST_COLUMNS):
        # A pullback of these outputs needs only what they are computed from.
        outputs = lambda leaves, group=group: [values(leaves)[i] for i in group]
        outs, pull = jax.vjp(outputs, leaves)
        pulled = images(lambda seeds, pull=pull: pull(seeds)[0], outs, size)
        ends = [*itertools.accumulate(x.size for x in outs)]
        for out, end in safe_zip(outs, ends):
            # Those directions that are entries of this output.
            rows = [x[end - out.size : end] for x in pulled]
            result.append(
                [
                    x.reshape(*out.shape, leaf.size).astype(out.dtype)
                    for x, leaf in safe_zip(rows, leaves)
                ]
            )
    return result


# The outputs of a function, and for each output its Jacobian in each real leaf, with
# the entries of the leaf in the last axis.
Expansion = tuple[list[Array], list[list[Array]]]


def expansion(fun: Linear, point: list[Array], derivative: Derivative) -> Expansion:
    """The outputs of a function of leaves, all real, and its Jacobian.

    A complex leaf counts as two real ones. The Jacobian has rows if that is the
    `derivative` of the function, else columns.
    """
    real, treedef = jtu.tree_flatten(as_real(point))
    of_real = lambda real: fun(as_complex(jtu.tree_unflatten(treedef, real)))
    outs = of_real(real)
    compute = by_rows if derivative == "rows" else by_columns
    return outs, compute(of_real, real, outs, LEAST_COLUMNS)


def expanded(known: Expansion, point: list[Array], leaves: list[Array]) -> list[Array]:
    """The linear expansion of a function at `point`, evaluated for some leaves."""
    pairs = safe_zip(*(jtu.tree_leaves(as_real(x)) for x in (leaves, point)))
    changes = [(x - start).reshape(-1) for x, start in pairs]
    # On GPUs and TPUs, the default would round the Jacobian.
    whole = lax.Precision.HIGHEST
    result = []
    for out, jacobian in safe_zip(*known):
        for part, change in safe_zip(jacobian, changes):
            change = change.astype(part.dtype)
            out = out + jnp.tensordot(part, change, 1, precision=whole)
        result.append(out)
    return result


def with_both_modes(program: TracedFunction, derivative: Derivative) -> TracedFunction:
    """A program that has the derivatives of another one, in both modes.

    The latter has rows or columns only.
    """
    point = program.leaves

    def run(leaves: list[Array], rows: RowArrays) -> list[Array]:
        # Both derivatives are those of products with the Jacobian, which is an array
        # now.
        one = lambda leaves: program.one(leaves, rows)
        return expanded(expansion(one, point, derivative), point, leaves)

    return TracedFunction(run, point, program.arrays, program.axes)
