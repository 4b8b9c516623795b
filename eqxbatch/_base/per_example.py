"""One program of leaves and one example, run for one example or for many."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .jaxprs import at_example, depends, evaluate_jaxpr


class PerExample:
    """A function of leaves and of one example of a batch, traced.

    - `leaves`: the arrays that it was traced with, a list.
    - `axes`: where the arrays of a batch have the examples. None of a batch without.
    - `closed`: its jaxpr, whose first inputs are the leaves.
    - `out`: what it returns, with a `jax.ShapeDtypeStruct` for each array.
    """

    def __init__(
        self,
        fun: Callable[[Any, list], PyTree],
        leaves: PyTree[Array],
        arrays: list,
        axes: Sequence[int],
    ):
        self.leaves, treedef = jtu.tree_flatten(leaves)
        self.axes = list(axes)

        def flat(leaves: list, rows: list) -> PyTree:
            return fun(jtu.tree_unflatten(treedef, leaves), rows)

        trace = lambda rows: eqx.filter_make_jaxpr(flat)(self.leaves, rows)
        self.closed, structs, static = at_example(trace, arrays, axes)
        self.out = eqx.combine(structs, static)

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays that it returns for one example."""
        leaves = jtu.tree_leaves(self.out)
        return [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]

    @functools.cached_property
    def has_examples(self) -> list[bool]:
        """Which of the arrays that it returns depend on the example."""
        num = len(self.leaves)
        is_example = [False] * num + [True] * (len(self.closed.jaxpr.invars) - num)
        return depends(self.closed.jaxpr, is_example)

    def one(self, leaves: list, rows: Sequence[Array]) -> list[Array]:
        """The arrays that it returns for one example."""
        consts = list(self.closed.consts)
        return evaluate_jaxpr(self.closed.jaxpr, consts, [*leaves, *rows])

    def many(self, leaves: list, rows: list) -> list[Array]:
        """The arrays for some examples, along axis 0."""
        return jax.vmap(lambda *rows: self.one(leaves, rows), self.axes)(*rows)

    def run(self, rows: list) -> list[Array]:
        """The same, of which those that `has_examples` denies are there once for all.

        They are computed once, and have no axis for the examples.
        """
        in_axes = (None, *self.axes)
        out_axes = [0 if has else None for has in self.has_examples]
        one = lambda leaves, *rows: self.one(leaves, rows)
        return jax.vmap(one, in_axes, out_axes)(self.leaves, *rows)

    def output(self, arrays: Sequence[Any]) -> PyTree:
        """What it returns, with these in the place of the arrays."""
        remaining = list(arrays)
        is_struct = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        return jtu.tree_map(lambda x: remaining.pop(0) if is_struct(x) else x, self.out)
