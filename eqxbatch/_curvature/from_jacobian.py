"""Gauss-Newton matrices of few parameters, from the Jacobian of the outputs.

Once the Jacobian `J` of an example is formed, `J^T C J` is one matrix product for all
parameters together. Sites contract each pair of parameters by itself, and products with
one-hot vectors take a backward pass for each column.

With `p` parameters and `v` outputs of an example, the product takes `2 v p^2`
operations. Sites do not take fewer

- if `p` is at most `v`: they contract the `v^2` entries of `C`. `J` has columns, from
  `p` passes in forward mode;
- if `v` is 1: they form `J`, too. It is a row, from one pass in reverse mode.
"""

import functools
import itertools
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from .._base.dtypes import common_dtype
from .._base.mesh import coupled_axes, vary_as
from .._base.modes import pushforward
from .._base.trees import safe_zip
from .._batch.rows import Rows
from .._sites.axes import Axis, Named, Role
from .._sites.contract import contract
from .columns import LEAST_COLUMNS, one_hot_seeds
from .functions import GaussNewtonCurvature
from .pytree import BlockSums, joined, Pair, RequestedBlocks


class _Sides(NamedTuple):
    """The two factors of a matrix, with a row for each parameter.

    - `left`: the transposed Jacobian of an output of some examples.
    - `right`: the same, times the curvature of the loss and the weights.
    """

    left: Inexact[Array, "parameters *outputs"]
    right: Inexact[Array, "parameters *outputs"]


class JacobianMatrix:
    """Blocks of a Gauss-Newton matrix, from the Jacobian of all outputs.

    They are summed over examples, as by an `AbstractSiteMatrix`.
    """

    def __init__(self, curvature: GaussNewtonCurvature, requested: RequestedBlocks):
        self._curvature, self.requested = curvature, requested
        self.leaves = curvature.leaves
        self._num_parameters = sum(x.size for x in self.leaves)
        self._dtype = common_dtype(jnp.float32, *(x.dtype for x in self.leaves))
        self._starts = [0, *itertools.accumulate(x.size for x in self.leaves)]
        # The first leaf of the part of each leaf; all pairs of a part are requested.
        self._part_of: dict[int, int] = {}
        for first, second in sorted(requested.pairs):
            self._part_of.setdefault(second, first)
        self.is_by_columns = self._num_parameters <= curvature.num_vectors

    def is_cheapest_with(self, size: int | None) -> bool:
        """Whether no other way takes fewer operations, or less memory.

        Products compute a number of columns at a time, its `size`.
        """
        curvature, num = self._curvature, self._num_parameters
        if curvature.forms_rest or not curvature.program.backward.is_linear:
            return False
        # Products keep as much for the columns that they compute at a time.
        if not 0 < num <= min(LEAST_COLUMNS, num if size is None else size):
            return False
        if not self.is_by_columns and curvature.num_vectors > 1:
            return False
        closed, num = curvature.program.closed, len(self.leaves)
        are_leaves = [i < num for i, _ in enumerate(closed.jaxpr.invars)]
        # The Jacobian would be that of the outputs of all devices.
        return not coupled_axes(closed, are_leaves)

    @property
    def groups(self) -> list[list[Pair]]:
        """The requested pairs of leaves, grouped with those that are alike."""
        # Blocks of equal shapes in one matrix are read by a single operation.
        alike: dict[Hashable, list[Pair]] = {}
        for first, second in self.requested.pairs:
            structs = (self.leaves[first], self.leaves[second])
            kind = tuple((x.shape, x.dtype) for x in structs)
            alike.setdefault((self._part_of[first], kind), []).append((first, second))
        return [*alike.values()]

    @property
    def bytes(self) -> int:
        """The bytes kept for one example."""
        entries = self._num_parameters * self._curvature.num_vectors
        return 2 * entries * self._dtype.itemsize

    def sums(self, rows: Rows) -> BlockSums:
        """The blocks of the (weighted) sum over the examples."""
        # The gradient of a leaf that is the same on all devices would be summed over
        # them.
        leaves = vary_as([*self.leaves, *rows.arrays], self.leaves)
        compute = self._columns if self.is_by_columns else self._rows
        sides = compute(leaves, rows)
        multiply = _sums_of_rows if self.requested.is_diagonal else _square
        # Blocks between parts are not requested, so each part is a product of its own.
        parts: dict[int, Array] = {}
        for part in {*self._part_of.values()}:
            of_part = [leaf for leaf, x in self._part_of.items() if x == part]
            entries = slice(self._starts[of_part[0]], self._starts[of_part[-1] + 1])
            chosen = (_Sides(*(x[entries] for x in pair)) for pair in sides)
            parts[part] = functools.reduce(jnp.add, map(multiply, chosen))
        matrices = (parts[self._part_of[pairs[0][0]]] for pairs in self.groups)
        return BlockSums([*map(self._blocks, self.groups, matrices)])

    def _columns(self, leaves: list[Array], rows: Rows) -> list[_Sides]:
        """The two sides for each output, in forward mode."""
        outputs = self._curvature.outputs(rows)
        outs, push = pushforward(outputs, leaves, self._curvature.derivative)
        curve = self._curvature.curved(outs, rows)
        # All columns at once, along axis 0: there are at most `LEAST_COLUMNS`.
        seeds = one_hot_seeds(jnp.arange(self._num_parameters), leaves)
        columns = jax.vmap(push)(seeds)
        pairs = safe_zip(columns, jax.vmap(curve)(columns))
        return [_Sides(*(x.astype(self._dtype) for x in pair)) for pair in pairs]

    def _rows(self, leaves: list[Array], rows: Rows) -> list[_Sides]:
        """The two sides for the only vector of each example, in reverse mode."""

        def of_example(example: Rows) -> _Sides:
            # With a single vector, the curvature is a number, as the weight is.
            outs, pull = jax.vjp(self._curvature.outputs(example), leaves)
            vectors, curve = self._curvature.of_outputs(outs, example)
            seeds = [vary_as([out], x[0]) for out, x in safe_zip(outs, vectors)]
            row = joined(pull(seeds)[0], self._dtype)
            scales = [x.ravel() for x in (curve, example.weights) if x is not None]
            scales = [x.astype(self._dtype) for x in scales]
            return _Sides(row, functools.reduce(jnp.multiply, scales, row))

        # With examples last, the leaves are joined without a transpose.
        sides = rows.of_each(of_example, out_axes=-1)
        return [sides if rows.axes else _Sides(*(x[:, None] for x in sides))]

    def _blocks(
        self, pairs: list[Pair], matrix: Inexact[Array, "..."]
    ) -> Inexact[Array, "pairs ..."]:
        """The blocks of some pairs that are alike, from the matrix of their part."""
        leaves = [self.leaves[leaf] for leaf in pairs[0]]
        if self.requested.is_diagonal:
            return matrix.reshape(1, *leaves[0].shape)
        # The matrix of a part begins with its first leaf.
        start = self._starts[self._part_of[pairs[0][0]]]
        corners = [[self._starts[leaf] - start for leaf in pair] for pair in pairs]
        # A single operation, however many of the parameters are scalars.
        blocks = lax.gather(
            matrix,
            jnp.array(corners, "int32"),
            lax.GatherDimensionNumbers((1, 2), (), (0, 1)),
            slice_sizes=tuple(leaf.size for leaf in leaves),
            unique_indices=True,
            mode="promise_in_bounds",
        )
        return blocks.reshape(len(pairs), *leaves[0].shape, *leaves[1].shape)


def _square(sides: _Sides) -> Inexact[Array, "parameters parameters"]:
    # Examples and outputs are behind the parameters on both sides, and summed over.
    rows = [Axis(Role.ENTRY, side=side) for side in (0, 1)]
    outputs = tuple(Axis(Role.OUTPUT, i) for i in range(sides.left.ndim - 1))
    terms = [Named(x, (row, *outputs)) for x, row in safe_zip(sides, rows)]
    return contract(terms, tuple(rows))


def _sums_of_rows(sides: _Sides) -> Inexact[Array, " parameters"]:
    return jnp.sum(sides.left * sides.right, range(1, sides.left.ndim))
