"""Jacobians by columns or rows, and functions that have one derivative mode only.

A function such as an ODE solver may have a derivative in forward mode or in reverse
mode only. Columns of its Jacobian need the former, and rows the latter. Once the
Jacobian is known, both modes are: the function is replaced by its linear expansion.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array

from .._base.differentiable import Derivative
from .._base.dtypes import as_complex, as_real, is_complex
from .._base.jaxprs import TracedFunction
from .._base.trees import consecutive_groups
from .by_products import columns, images, LEAST_COLUMNS, Linear, replaced


def by_columns(
    values: Callable[[list], list], leaves: list, structs: list, size: int | None
) -> list[list[Array]]:
    """Forward-mode derivatives with respect to the entries of the leaves.

    There is one array for each output and leaf, in which one axis has the entries of
    the leaf.
    """
    result: list[list[Array]] = [[] for _ in structs]
    for group in consecutive_groups([x.size for x in leaves], LEAST_COLUMNS):
        point = [leaves[i] for i in group]
        at = lambda some, group=group: values(replaced(leaves, group, some))
        found = columns(jax.linearize(at, point)[1], point, size)
        ends = [*itertools.accumulate(x.size for x in point)]
        for of_output, x in zip(result, found, strict=True):
            of_output += jnp.split(x, ends[:-1], axis=-1)
    return result


def by_rows(
    values: Callable[[list], list], leaves: list, structs: list, size: int | None
) -> list[list[Array]]:
    """Reverse-mode derivatives of the entries of the outputs.

    With respect to real arrays, a complex output is pulled back once for its real part
    and once for its imaginary part, because a pullback to a real array is real.
    """
    if any(map(is_complex, leaves)) or not any(map(is_complex, structs)):
        return _pulled_back(values, leaves, structs, size)
    parts, treedef = jtu.tree_flatten(jax.eval_shape(as_real, structs))
    of_parts = lambda leaves: jtu.tree_leaves(as_real(values(leaves)))
    found = _pulled_back(of_parts, leaves, parts, size)
    # One list for each leaf, with an entry for each output.
    joined = [
        as_complex(jtu.tree_unflatten(treedef, of_leaf))
        for of_leaf in zip(*found, strict=True)
    ]
    return [[*of_output] for of_output in zip(*joined, strict=True)]


def _pulled_back(
    values: Callable[[list], list], leaves: list, structs: list, size: int | None
) -> list[list[Array]]:
    """Like `by_rows`, for outputs that are complex only if the leaves are."""
    result: list[list[Array]] = []
    for group in consecutive_groups([x.size for x in structs], LEAST_COLUMNS):
        at = lambda leaves, group=group: [values(leaves)[i] for i in group]
        outs, pull = jax.vjp(at, leaves)
        found = images(lambda seeds, pull=pull: pull(seeds)[0], outs, size)
        ends = [*itertools.accumulate(x.size for x in outs)]
        for out, end in zip(outs, ends, strict=True):
            rows = [x[end - out.size : end] for x in found]
            result.append(
                [
                    x.reshape(*out.shape, leaf.size).astype(out.dtype)
                    for x, leaf in zip(rows, leaves, strict=True)
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
    at = lambda real: fun(as_complex(jtu.tree_unflatten(treedef, real)))
    outs = at(real)
    compute = by_rows if derivative == "rows" else by_columns
    return outs, compute(at, real, outs, LEAST_COLUMNS)


def expanded(found: Expansion, point: list[Array], leaves: list[Array]) -> list[Array]:
    """The linear expansion of a function at `point`, evaluated for some leaves."""
    pairs = zip(*(jtu.tree_leaves(as_real(x)) for x in (leaves, point)), strict=True)
    changes = [(x - start).reshape(-1) for x, start in pairs]
    # On GPUs and TPUs, the default would round the Jacobian.
    whole = lax.Precision.HIGHEST
    result = []
    for out, jacobian in zip(*found, strict=True):
        for part, change in zip(jacobian, changes, strict=True):
            change = change.astype(part.dtype)
            out = out + jnp.tensordot(part, change, 1, precision=whole)
        result.append(out)
    return result


def with_both_modes(
    program: TracedFunction, arrays: list, derivative: Derivative
) -> TracedFunction:
    """A program that has the derivatives of another one, in both modes.

    `arrays` are those of a batch.
    """
    if derivative not in ("rows", "columns"):
        return program
    point = program.leaves

    def run(leaves: list, rows: list) -> list[Array]:
        one = lambda leaves: program.one(leaves, rows)
        return expanded(expansion(one, point, derivative), point, leaves)

    return TracedFunction(run, point, arrays, program.axes)
