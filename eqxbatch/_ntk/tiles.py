"""Kernels in tiles: for each pair of a block of rows and a block of columns.

What is kept of a block of examples is made once, for as many blocks of rows as there is
room for. Such a panel of rows is kept while all columns pass by. If rows and columns
are the same, a panel meets itself in a triangle of tiles, and about half of the other
panels: of each two, one meets the other, so that all meet.
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array

from .._base.mesh import vary, varying
from .._batch.accumulators import AbstractAccumulator, Concat
from .._batch.cut import Block, Blocks
from .._batch.rows import accumulated, Rows
from .._pairs.grid import starts
from .._sites.factors import Factor
from .output_axes import OutputAxes


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of blocks, and how many bytes may be kept of examples."""

    rows: int
    columns: int
    keep: int


class AbstractPairing(abc.ABC):
    """What is kept of examples, and the kernels of two sets of them."""

    axes: list[OutputAxes]  # Of all kernels.

    @abc.abstractmethod
    def factors(self, side: int, rows: list) -> list[Factor]:
        """What is kept of the examples of a side."""

    @abc.abstractmethod
    def kernels(
        self, first: list[Factor], second: list[Factor], num: tuple[int, int]
    ) -> list[Array]:
        """All kernels, before they are arranged, of `num` examples."""


class _Shared:
    """What is kept of the examples of a side, apart from what all have in common."""

    def __init__(self, pairing: AbstractPairing, side: int, rows: Rows):
        self.pairing, self.side = pairing, side
        factors = pairing.factors(side, rows.one())
        self.has_examples = tuple(factor.has_examples for factor in factors)
        self.arrays = [factor.array for factor in factors if not factor.has_examples]
        kept = [factor.array for factor in factors if factor.has_examples]
        self.bytes = sum(x.size * x.dtype.itemsize for x in kept)

    def own(self, rows: Rows, size: int, accumulator: AbstractAccumulator) -> Any:
        """What is kept of each of some examples, made in blocks and accumulated."""

        def run(arrays: list, num: int) -> list[Array]:
            factors = self.pairing.factors(self.side, arrays)
            kept = [factor.array for factor in factors if factor.has_examples]
            # Without any array, nothing would run. `join` does not use this one.
            return kept or [jnp.zeros(num)]

        return accumulated(run, rows, size, accumulator)


def join(own: list[Array], shared: list[Array], has_examples: tuple) -> list[Factor]:
    own, shared = list(own), list(shared)
    return [Factor((own if has else shared).pop(0), has) for has in has_examples]


def all_pairs(
    first: Rows, second: Rows | None, pairing: AbstractPairing, tiling: Tiling | None
) -> list[Array]:
    """The kernels of all examples of one side with all of the other.

    Without `second`, that is the first, and the kernels are exactly symmetric.
    """
    columns = first if second is None else second
    num = (first.total, columns.total)
    is_small = tiling is None or (num[0] <= tiling.rows and num[1] <= tiling.columns)
    if is_small or 0 in num:
        factors = pairing.factors(0, first.arrays)
        others = factors if second is None else pairing.factors(1, columns.arrays)
        kernels = pairing.kernels(factors, others, num)
        if second is not None:
            return kernels
        return [
            _symmetric(kernel, axes)
            for kernel, axes in zip(kernels, pairing.axes, strict=True)
        ]
    assert tiling is not None
    return _Tiles(first, second, pairing, tiling).run()


def each(
    first: Rows, second: Rows | None, pairing: AbstractPairing, size: int | None
) -> list[Array]:
    """The kernels of each example of one side with that of the other in its place."""
    num = len(first.arrays)
    both = [first] if second is None else [first, second]

    def run(arrays: list, size: int) -> list[Array]:
        factors = pairing.factors(0, arrays[:num])
        others = factors if second is None else pairing.factors(1, arrays[num:])
        return pairing.kernels(factors, others, (size, size))

    arrays = [x for rows in both for x in rows.arrays]
    axes = tuple(axis for rows in both for axis in rows.axes)
    return accumulated(run, Rows(arrays, axes, first.total), size, Concat())


def _symmetric(kernel: Array, axes: OutputAxes) -> Array:
    return (kernel + axes.mirrored(kernel)) / 2


class _Tiles:
    """The kernels of two sets of examples, tile by tile."""

    def __init__(
        self,
        first: Rows,
        second: Rows | None,
        pairing: AbstractPairing,
        tiling: Tiling,
    ):
        self.first, self.second, self.pairing = first, second, pairing
        columns = first if second is None else second
        self.shared = _Shared(pairing, 0, first)
        self.others = self.shared if second is None else _Shared(pairing, 1, columns)
        self.rows = min(tiling.rows, first.total)
        self.columns = min(tiling.columns, columns.total)
        room = int(tiling.keep // max(self.shared.bytes, 1))
        # A panel of rows, and how many there are.
        self.panel = min(first.total, max(self.rows, room - room % self.rows))
        self.num_panels = math.ceil(first.total / self.panel)

    def run(self) -> list[Array]:
        columns = self.first if self.second is None else self.second
        structs = jax.eval_shape(
            lambda: self.pairing.kernels(
                self.pairing.factors(0, self.first.one()),
                self.pairing.factors(self.others.side, columns.one()),
                (1, 1),
            )
        )
        num = (self.first.total, columns.total)
        kernels = [
            vary(jnp.zeros((*num, *x.shape[2:]), x.dtype), varying(x)) for x in structs
        ]
        if self.num_panels == 1:
            return self.with_panel(kernels, 0)

        def step(kernels: list, index: Array) -> tuple[list, None]:
            return self.with_panel(kernels, index), None

        kernels, _ = lax.scan(step, kernels, _indices(range(self.num_panels)))
        if self.second is None:
            kernels = self.symmetric(kernels)
        return kernels

    def start_of(self, index: Any) -> Any:
        """Where a panel starts; the last one overlaps with the one before."""
        return jnp.minimum(index * self.panel, self.first.total - self.panel)

    def with_panel(self, kernels: list[Array], index: Any) -> list[Array]:
        """The kernels with all tiles of a panel of rows."""
        start = self.start_of(index)
        rows = self.first.at(start, self.panel)
        panel = self.shared.own(rows, self.rows, Concat())
        if self.second is not None:
            return self.rectangle(kernels, panel, start, self.second, 0)
        kernels = self.triangle(kernels, panel, start)
        if self.num_panels == 1:
            return kernels

        def step(kernels: list, distance: Array) -> tuple[list, None]:
            other = self.start_of((index + distance) % self.num_panels)
            columns = self.first.at(other, self.panel)
            return self.rectangle(kernels, panel, start, columns, other), None

        distances = _indices(range(1, self.num_panels // 2 + 1))
        return lax.scan(step, kernels, distances)[0]

    def triangle(self, kernels: list[Array], panel: list, start: Any) -> list[Array]:
        """The kernels with the tiles of a panel with itself.

        A block of rows is cut out once. It meets itself and the half of the others that
        follow, the first after the last as if in a circle, so that of each two blocks
        one meets the other.
        """
        size = self.rows
        firsts = _indices(starts(self.panel, size))
        num = len(firsts)
        cut = lambda at: [lax.dynamic_slice_in_dim(x, at, size) for x in panel]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def tiles(row: list, panel: list, shared: list, at: Array) -> list[Array]:
            column = [lax.dynamic_slice_in_dim(x, at[1], size) for x in panel]
            sides = [join(x, shared, self.shared.has_examples) for x in (row, column)]
            tiles = self.pairing.kernels(sides[0], sides[1], (size, size))
            symmetric = lambda tiles: [
                _symmetric(tile, axes)
                for tile, axes in zip(tiles, self.pairing.axes, strict=True)
            ]
            return lax.cond(at[0] == at[1], symmetric, lambda tiles: tiles, tiles)

        def with_tile(kernels: list, row: list, at: Array) -> list[Array]:
            with jax.named_scope("tile"):
                new = tiles(row, panel, self.shared.arrays, at)
                return self.written(kernels, new, start + at[0], start + at[1])

        def opposite(kernels: list, index: Array) -> tuple[list, None]:
            at = firsts[jnp.stack([index, index + num // 2])]
            return with_tile(kernels, cut(at[0]), at), None

        def rows(kernels: list, index: Array) -> tuple[list, None]:
            row = cut(firsts[index])

            def columns(kernels: list, distance: Array) -> tuple[list, None]:
                at = firsts[jnp.stack([index, (index + distance) % num])]
                return with_tile(kernels, row, at), None

            # The last block overlaps with the one before. Its own rows come last, to
            # settle what the two have in common.
            distances = _indices(range((num + 1) // 2))
            return lax.scan(columns, kernels, distances)[0], None

        if num % 2 == 0:
            kernels, _ = lax.scan(opposite, kernels, _indices(range(num // 2)))
        return lax.scan(rows, kernels, _indices(range(num)))[0]

    def written(
        self, kernels: list[Array], tiles: list[Array], row: Any, column: Any
    ) -> list[Array]:
        """The kernels with a tile and its mirror image."""
        axes = self.pairing.axes
        kernels = _write(kernels, tiles, row, column)
        mirrored = [a.mirrored(x) for a, x in zip(axes, tiles, strict=True)]
        return _write(kernels, mirrored, column, row)

    def rectangle(
        self,
        kernels: list[Array],
        panel: list,
        start: Any,
        columns: Rows,
        column: Any,
    ) -> list[Array]:
        """The kernels with the tiles of a panel with other examples."""
        accumulator = _Columns(
            panel=panel,
            shared=(self.shared.arrays, self.others.arrays),
            kernels=kernels,
            start=(jnp.asarray(start), jnp.asarray(column)),
            tiles=self,
        )
        return self.others.own(columns, self.columns, accumulator)

    def symmetric(self, kernels: list[Array]) -> list[Array]:
        """Where panels overlap, the mean of what they say."""
        size = self.rows
        firsts = starts(self.first.total, size)
        pairs = list(itertools.combinations_with_replacement(firsts, 2))

        def step(kernels: list, at: Array) -> tuple[list, None]:
            def cut(row: Array, column: Array) -> list[Array]:
                return [
                    lax.dynamic_slice(
                        x, _at(row, column, x), (size, size, *x.shape[2:])
                    )
                    for x in kernels
                ]

            tiles = [
                (tile + axes.mirrored(other)) / 2
                for tile, other, axes in zip(
                    cut(at[0], at[1]), cut(at[1], at[0]), self.pairing.axes, strict=True
                )
            ]
            return self.written(kernels, tiles, at[0], at[1]), None

        return lax.scan(step, kernels, _indices(pairs))[0]


def _write(
    kernels: list[Array], tiles: Sequence[Array], row: Any, column: Any
) -> list[Array]:
    return [
        lax.dynamic_update_slice(x, tile, _at(row, column, tile))
        for x, tile in zip(kernels, tiles, strict=True)
    ]


def _indices(x: Sequence) -> Array:
    return jnp.array(x, jnp.int32)


def _at(row: Any, column: Any, x: Array) -> list[Array]:
    """The indices of a place in kernels, which must be of one type."""
    return [jnp.asarray(i, jnp.int32) for i in (row, column, *(0 for _ in x.shape[2:]))]


class _Columns(AbstractAccumulator[Any]):
    """Takes blocks of columns past a panel of rows, and writes down the tiles."""

    leafwise = False
    panel: list
    shared: tuple[list, list]
    kernels: list
    start: tuple
    tiles: Any = eqx.field(static=True)

    def init(self, value: Any, blocks: Blocks) -> list:
        del value, blocks
        return self.kernels

    def update(self, state: list, value: Any, block: Block) -> list:
        tiles: _Tiles = self.tiles
        columns = jtu.tree_leaves(value)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def tile(panel: list, columns: list, shared: tuple, start: Array) -> list:
            cut = [lax.dynamic_slice_in_dim(x, start, tiles.rows) for x in panel]
            return tiles.pairing.kernels(
                join(cut, shared[0], tiles.shared.has_examples),
                join(columns, shared[1], tiles.others.has_examples),
                (tiles.rows, block.size),
            )

        def step(kernels: list, start: Array) -> tuple[list, None]:
            with jax.named_scope("tile"):
                new = tile(self.panel, columns, self.shared, start)
                row, column = self.start[0] + start, self.start[1] + block.start
                if tiles.second is None:
                    return tiles.written(kernels, new, row, column), None
                return _write(kernels, new, row, column), None

        firsts = _indices(starts(tiles.panel, tiles.rows))
        return lax.scan(step, state, firsts)[0]

    def finalize(self, state: list) -> list:
        return state

    def aggregate(self, values: Any, block: Block) -> Any:
        del block
        return values
