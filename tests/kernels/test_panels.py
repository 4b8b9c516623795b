"""Panels of rows, of which something is kept while columns pass by."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import KernelProduct
from eqxbatch._batch.rows import Rows
from eqxbatch._kernels.engine import on_device
from eqxbatch._kernels.grid import balanced, Grid
from eqxbatch._kernels.kernel import AbstractBlockKernel, flattened, KernelLeaf
from ..helpers import thinned


class Lopsided(AbstractBlockKernel):
    """A kernel that is not quite symmetric, as those with rounding errors are not.

    What is kept of an example takes four bytes.
    """

    first: Rows
    second: Rows

    @classmethod
    def of(cls, x, y, size, room):
        first = Rows([x], (0,), len(x))
        second = first if y is x else Rows([y], (0,), len(y))
        return cls(
            first,
            second,
            symmetric=True,
            sizes=(size, size),
            room=room,
        )

    @property
    def leaves(self):
        return (KernelLeaf("", (0, 1), (2, 3), self.first.arrays[0].dtype),)

    @property
    def out(self):
        return flattened(self.leaves[0].struct((2, 3)))

    @property
    def bytes_kept(self):
        return 4, 4

    @property
    def parts(self):
        return {}

    @property
    def rows(self):
        return self.first, self.second

    def prepare(self):
        pass

    def keep(self, side, rows, size):
        return Rows([jnp.sin(rows.arrays[0])], (0,), rows.total)

    def block(self, first, second, always):
        x, y = (rows.arrays[0] for rows in (first, second or first))
        return [x[:, None] * y[None] + 1e-3 * x[:, None]]

    def tile(self, first, second):
        raise NotImplementedError


@pytest.mark.parametrize(("total", "room"), thinned((2, 7, 13), (10**6, 24, 0)))
def test_panels(total, room):
    x, y = jnp.arange(1.0, total + 1), jnp.arange(4.0)

    @jax.jit
    def run(x, y):
        both = []
        for second in (x, y):
            kernel = Lopsided.of(x, second, 4, room)
            both.append(on_device(kernel))
            both.append(on_device(kernel, KernelProduct(jnp.ones_like(second))))
        return both

    square, sums, rectangle, others = run(x, y)
    dense = np.sin(x)[:, None] * np.sin(y)[None] + 1e-3 * np.sin(x)[:, None]
    np.testing.assert_allclose(rectangle, dense, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(others, dense.sum(1), rtol=1e-6, atol=1e-7)
    # Exactly symmetric, whichever of two images was computed.
    assert (square == square.T).all()
    dense = np.sin(x)[:, None] * np.sin(x)[None]
    np.testing.assert_allclose(square, dense, atol=2e-3)
    np.testing.assert_allclose(sums, dense.sum(1), atol=2e-3 * total)


@pytest.mark.versions
@pytest.mark.parametrize("room", (100, 8))
def test_derivatives_through_panels(room):
    x, y = jnp.linspace(0.0, 1.0, 10), jnp.linspace(1.0, 2.0, 7)

    def run(x, y):
        kernel = Lopsided.of(x, y, 2, room)
        return on_device(kernel)

    def dense(x, y):
        return jnp.sin(x)[:, None] * jnp.sin(y)[None] + 1e-3 * jnp.sin(x)[:, None]

    losses = [lambda x, y, f=f: jnp.sum(f(x, y) ** 2) for f in (run, dense)]
    got, expected = (jax.jit(jax.grad(f, (0, 1)))(x, y) for f in losses)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def visited(grid):
    """The tiles in the order of the engine."""
    for panel in range(grid.num_panels):
        first = panel * grid.height
        for row, column in (*grid.pairs(), *grid.diagonal()):
            yield first + row, column + (first if grid.is_same else 0)
        if grid.is_same:
            for distance in range(1, (grid.num_panels + 1) // 2):
                other = (panel + distance) % grid.num_panels * grid.height
                numbers = range(grid.height)
                for column, row in itertools.product(numbers, numbers):
                    yield first + row, other + column


def new_rows(grid, side, index):
    """The examples of a block that no previous block has."""
    first = index * grid.sizes[side]
    return range(first, min(first + grid.sizes[side], grid.totals[side]))


@pytest.mark.parametrize("is_same", (True, False))
def test_each_entry_counts_once(is_same):
    """For all cuts of up to 24 examples, and what is written last is symmetric."""
    for total in range(1, 25):
        sizes = {balanced(total, size) for size in range(1, total + 1)}
        for size, most in itertools.product(sizes, (0, 1, 2, 3, 5, 8, 13, 21)):
            totals = (total, total if is_same else 3)
            sizes = (size, size if is_same else 2)
            grid = Grid(totals, sizes, is_same, is_same).in_panels(most)
            assert grid.panel_rows <= max(most, grid.sizes[0])
            counts, last = collections.Counter(), {}
            for step, (row, column) in enumerate(visited(grid)):
                tiles = [(row, column, False)]
                if is_same and row != column:
                    tiles.append((column, row, True))
                for first, second, is_mirror in tiles:
                    new = (new_rows(grid, i, x) for i, x in enumerate((first, second)))
                    counts.update(itertools.product(*new))
                    starts = grid.start(0, first), grid.start(1, second)
                    ends = zip(starts, grid.sizes, strict=True)
                    spans = [range(start, start + size) for start, size in ends]
                    for i, j in itertools.product(*spans):
                        at = i - starts[0], j - starts[1]
                        local = at[::-1] if is_mirror else at
                        # Of a tile on the diagonal, both images are one.
                        local = sorted(local) if row == column else local
                        last[i, j] = (step, *local)
            assert {*counts.values()} == {1}
            assert len(counts) == len(last) == totals[0] * totals[1]
            if is_same:
                assert all(last[i, j] == last[j, i] for i, j in last)
