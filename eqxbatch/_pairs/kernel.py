"""A kernel of two sides of examples, as it is computed for blocks of them."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree, Shaped

from .._base.cpu import with_mirror_image
from .._base.shapes import Arranged, arranged, Contract
from .._batch.cut import block_struct
from .._batch.memory import free_bytes
from .._batch.rows import Rows
from .._batch.slots import is_struct
from .calls import Call
from .grid import balanced, Grid


# Shapes are looked up with so many rows and columns, so that they are told apart.
SAMPLE = 2, 3


Sizes = tuple[int | None, int | None]


_LEADING = (0, 1)


# What is kept of examples takes as much room as the blocks that are worked with.
SHARE = 2


def room_to_keep() -> int:
    """How many bytes may be kept of examples where there is no budget.

    It is a power of two: it makes panels, and few of them are enough.
    """
    return free_bytes(1) // SHARE


class Plan(eqx.Module):
    """How a kernel is computed in blocks.

    - `mirror`: None if the kernel is not known to be symmetric; True if it is so under
        exchange of its two axes; or a function from a block to its mirror image.
    - `sizes`: the most rows and columns of a block; None for all.
    - `room`: how many bytes may be kept of examples.
    """

    mirror: Any
    sizes: Sizes = eqx.field(static=True, default=(None, None))
    room: int = eqx.field(static=True, default=0)


class KernelCall(eqx.Module):
    """A kernel function, and all that it is called with.

    - `calls`: one for each side, or one for both if they are the same examples.
    - `in_axes`, `kwargs_axes`: where the examples are in those.
    - `is_alone`: whether the second argument was left out.
    """

    kernel_fn: Callable
    args: tuple
    calls: list[Call]
    shared: dict[str, Any]
    in_axes: PyTree
    kwargs_axes: dict[str, PyTree]
    out_axes: PyTree
    is_alone: bool
    plan: Plan

    def planned(self, **changes: Any) -> "KernelCall":
        """The call, with changes of its plan."""
        plan = dataclasses.replace(self.plan, **changes)
        return dataclasses.replace(self, plan=plan)


# With rows and columns first.
BLOCK = Contract(
    {
        "x1, by leaf": Shaped[Arranged, "n1 ..."],
        "x2, by leaf": Shaped[Arranged, "n2 ..."],
        "block of `kernel_fn`": Shaped[Arranged, "rows columns *out"],
        "kernel": Shaped[Arranged, "n1 n2 *out"],
    },
    of=["filter_batch_kernel"],
)


class AbstractKernelFunction(eqx.Module):
    """A kernel function that knows what to keep of examples for all their blocks."""

    @abc.abstractmethod
    def in_blocks(self, call: KernelCall) -> "AbstractBlockKernel | None":
        """The kernel of a call of it; None where it is to be called for each block."""


@dataclasses.dataclass(frozen=True)
class KernelLeaf:
    """One array that the kernel function returns.

    - `axes`: those of the rows and of the columns; None for one that it does not have.
    - `sample`: its shape for two rows and three columns.
    """

    path: str
    axes: tuple[int | None, int | None]
    sample: tuple[int, ...]
    dtype: Any

    @property
    def is_pairwise(self) -> bool:
        return None not in self.axes

    def shape(self, sizes: tuple[int, int]) -> tuple[int, ...]:
        """Its shape for so many rows and columns."""
        shape = list(self.sample)
        for axis, size in zip(self.axes, sizes, strict=True):
            if axis is not None:
                shape[axis] = size
        return tuple(shape)

    def front(self, tile: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The tile with its rows and columns as its first two axes."""
        row, column = self.axes
        assert row is not None
        assert column is not None
        return jnp.moveaxis(tile, (row, column), _LEADING)

    def back(self, tile: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        row, column = self.axes
        assert row is not None
        assert column is not None
        return jnp.moveaxis(tile, _LEADING, (row, column))


def check_tile(
    leaves: list[KernelLeaf], tile: list[Array], sizes: tuple[int, int]
) -> None:
    """Raises if the arrays of a tile of that size are not of their shapes."""
    for leaf, x in zip(leaves, tile, strict=True):
        row, column = leaf.axes
        if row is None or column is None:
            continue
        out = [size for i, size in enumerate(leaf.sample) if i not in leaf.axes]
        call = BLOCK.begin(rows=sizes[0], columns=sizes[1], out=tuple(out))
        call.check("block of `kernel_fn`", arranged(x, row, column))


@dataclasses.dataclass(frozen=True)
class TileMirror:
    """Exchanges rows and columns of tiles. Keeps no arrays of the kernel function.

    - `mirror`: as in `Plan`, but not None.
    - `out`: what the kernel function returns, with shapes for its arrays.
    """

    mirror: Any
    leaves: list[KernelLeaf]
    out: PyTree

    @property
    def is_transpose(self) -> bool:
        return self.mirror is True

    def __call__(self, tile: list[Array]) -> list[Array]:
        """The arrays of the mirror image, from those of a tile."""
        if self.is_transpose:
            return [
                leaf.back(jnp.conj(jnp.swapaxes(leaf.front(x), 0, 1)))
                if leaf.is_pairwise
                else x
                for leaf, x in zip(self.leaves, tile, strict=True)
            ]
        arrays = jtu.tree_leaves(self.mirror(_filled(self.out, tile)))
        mirrored = [x for x in arrays if eqx.is_array(x)]
        sizes = _sizes(self.leaves, tile)
        expected = [leaf.shape((sizes[1], sizes[0])) for leaf in self.leaves]
        pairwise = [leaf.is_pairwise for leaf in self.leaves]
        for is_pairwise, x, shape in zip(pairwise, mirrored, expected, strict=True):
            if is_pairwise and x.shape != shape:
                raise ValueError(
                    "`symmetric` must return the block with rows and columns "
                    f"exchanged, of shape {shape}; got {x.shape}."
                )
        return mirrored


def _filled(out: PyTree, arrays: list) -> PyTree:
    """What the kernel function returns, with these arrays in the place of shapes."""
    remaining = list(arrays)
    return jtu.tree_map(lambda x: remaining.pop(0) if is_struct(x) else x, out)


def _sizes(leaves: list[KernelLeaf], tile: list[Array]) -> tuple[int, int]:
    """How many rows and columns a tile has."""
    found = [0, 0]
    for leaf, x in zip(leaves, tile, strict=True):
        for side, axis in enumerate(leaf.axes):
            if axis is not None:
                found[side] = x.shape[axis]
    return found[0], found[1]


class AbstractBlockKernel(abc.ABC):
    """A kernel: what is kept of a block of examples, and what two blocks of it make.

    - `plan`: how it is computed.
    - `rows`: the examples of both sides, which are one object if they are the same.
    - `leaves`: the arrays of the kernel, in the order of its blocks.
    - `out`: what the kernel function returns, with shapes for its arrays.
    - `bytes_kept`: how many bytes are kept of an example of each side; 0 if blocks are
        made of the examples themselves.
    """

    plan: Plan
    rows: tuple[Rows, Rows]
    leaves: list[KernelLeaf]
    out: PyTree
    bytes_kept: tuple[int, int]

    @abc.abstractmethod
    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        """What is kept of some examples, made of blocks of at most that size."""

    @abc.abstractmethod
    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""]
    ) -> list[Array]:
        """The arrays for what is kept of a block of rows and of one of columns.

        Without `second`, the rows are the columns. `always` is true, which only shows
        when it runs.
        """

    @abc.abstractmethod
    def prepare(self) -> None:
        """Computes what is kept that all examples have in common.

        It is called before any loop, so that loops do not compute it again.
        """

    @abc.abstractmethod
    def tile(self, first: list, second: list | None) -> list[Array]:
        """The arrays for the examples of a block of rows and of one of columns.

        Without `second`, the rows are the columns.
        """

    @property
    def is_same(self) -> bool:
        """Whether both sides are the same examples."""
        return self.rows[0] is self.rows[1]

    @property
    def totals(self) -> tuple[int, int]:
        return self.rows[0].total, self.rows[1].total

    def grid(self) -> Grid:
        """The cut into tiles of at most the sizes of the call."""
        sizes = self.plan.sizes
        if self.is_same:
            # A square tile has its mirror image in a tile.
            found = [size for size in sizes if size is not None]
            sizes = (min(found), min(found)) if found else (None, None)
        rows, columns = map(balanced, self.totals, sizes)
        if any(not leaf.is_pairwise for leaf in self.leaves) and any(self.totals):
            rows, columns = (
                min(x) for x in zip((rows, columns), self.totals, strict=True)
            )
        is_symmetric = self.is_same and self.plan.mirror is not None
        return Grid(self.totals, (rows, columns), self.is_same, is_symmetric)

    def num_kept(self, bytes_of_one: int) -> int:
        """How many examples can be kept."""
        return max(self.totals) if not bytes_of_one else self.plan.room // bytes_of_one

    def structs(self, sizes: tuple[int, int]) -> list[list[jax.ShapeDtypeStruct]]:
        """The shapes of blocks of both sides."""
        return [
            [
                block_struct(x, axis, size)
                for x, axis in zip(rows.arrays, rows.axes, strict=True)
                if axis is not None
            ]
            for rows, size in zip(self.rows, sizes, strict=True)
        ]

    def output(self, arrays: list) -> PyTree:
        """What the kernel function returns, with these arrays in it."""
        return _filled(self.out, arrays)

    @property
    def mirror(self) -> TileMirror:
        return TileMirror(self.plan.mirror, self.leaves, self.out)

    def mirrored(self, tile: list[Array]) -> list[Array]:
        """The tile with rows and columns exchanged."""
        return self.mirror(tile)

    def symmetrised(self, tile: list[Array]) -> list[Array]:
        """A tile on the diagonal, made exactly symmetric, whatever rounding did."""
        if self.plan.mirror is True:
            return [
                leaf.back(_symmetrised(leaf.front(x))) if leaf.is_pairwise else x
                for leaf, x in zip(self.leaves, tile, strict=True)
            ]
        return [
            _common(x, y) if leaf.is_pairwise else x
            for leaf, x, y in zip(self.leaves, tile, self.mirrored(tile), strict=True)
        ]


def _common(x: Shaped[Array, "..."], y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Something between both that does not depend on their order."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.where(x == y, x, (x + y) / 2)
    return jnp.maximum(x, y)


def _symmetrised(x: Shaped[Array, "n n ..."]) -> Shaped[Array, "n n ..."]:
    exchanged = lambda x: jnp.conj(jnp.swapaxes(x, 0, 1))
    return with_mirror_image(x, _common, exchanged)
