"""A kernel function as it is called for blocks of rows and of columns."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from .._base.mesh import vary, varying
from .._base.trees import match_prefix
from .._batch.cut import block_struct
from .._batch.slots import is_struct
from .calls import Call, Side, VmapAxes
from .grid import balanced, Grid, starts


# Shapes are looked up with so many rows and columns, so that they are told apart.
SAMPLE = _ROWS, _COLUMNS = 2, 3


_LEADING = (0, 1)


_PIECE = 256


class KernelCall(eqx.Module):
    """A kernel function, and all that it is called with.

    - `calls`: one for each side, or one for both if they are the same examples.
    - `is_alone`: whether the second argument was left out.
    - `mirror`: None if the kernel is not known to be symmetric; True if it is so under
        exchange of its two axes; or a function from a block to its mirror image.
    """

    kernel_fn: Callable
    args: tuple
    calls: list[Call]
    shared: dict[str, Any]
    in_axes: PyTree
    out_axes: PyTree
    mirror: Any
    is_alone: bool

    @property
    def is_symmetric(self) -> bool:
        return self.mirror is not None and len(self.calls) == 1


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


@dataclasses.dataclass(frozen=True)
class TileMirror:
    """Exchanges rows and columns of tiles. Keeps no arrays of the kernel function.

    - `mirror`: as in `KernelCall`, but not None.
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


class BlockKernel:
    """A kernel function, traced as it is called for blocks of two sides.

    - `sides`: the examples; one if both sides are the same.
    - `leaves`: the arrays that it returns, in the order of `tile`.
    """

    def __init__(self, call: KernelCall):
        self.call = call
        self.sides = _sides(call)
        self.is_same = len(self.sides) == 1
        structs = [self._structs(0, _ROWS), self._structs(-1, _COLUMNS)]
        self._out = eqx.filter_eval_shape(_out, call, *structs)
        self.leaves = self._find_leaves()

    @property
    def totals(self) -> tuple[int, int]:
        return self.sides[0].rows.total, self.sides[-1].rows.total

    def grid(self, sizes: tuple[int | None, int | None]) -> Grid:
        """The cut into tiles of at most these sizes."""
        if self.is_same:
            # A square tile has its mirror image in a tile.
            found = [size for size in sizes if size is not None]
            sizes = (min(found), min(found)) if found else (None, None)
        rows, columns = map(balanced, self.totals, sizes)
        if any(not leaf.is_pairwise for leaf in self.leaves) and any(self.totals):
            rows, columns = (
                min(x) for x in zip((rows, columns), self.totals, strict=True)
            )
        return Grid(self.totals, (rows, columns), self.is_same, self.call.is_symmetric)

    def _structs(self, side: int, size: int) -> list[jax.ShapeDtypeStruct]:
        rows = self.sides[side].rows
        return [
            block_struct(x, axis, size)
            for x, axis in zip(rows.arrays, rows.axes, strict=True)
        ]

    def structs(self, sizes: tuple[int, int]) -> list[list[jax.ShapeDtypeStruct]]:
        """The shapes of blocks of both sides."""
        return [self._structs(0, sizes[0]), self._structs(-1, sizes[1])]

    def _find_leaves(self) -> list[KernelLeaf]:
        places = match_prefix(
            "out_axes",
            self.call.out_axes,
            self._out,
            "a PyTree prefix of what `kernel_fn` returns, with a pair of axes, or None "
            "in place of one, for each part",
            is_leaf=is_axes,
        )
        found = []
        for path, axes, part in places:
            for sub, leaf in jtu.tree_leaves_with_path(part):
                if is_struct(leaf):
                    path_of_leaf = jtu.keystr((*path, *sub))
                    found.append(_make_leaf(path_of_leaf, axes, leaf))
        if not found:
            raise ValueError(
                "`kernel_fn` must return at least one array; got "
                f"{self._out!r}. Return the kernel of `x1` with `x2`."
            )
        return found

    def tile(self, first: list, second: list | None) -> list[Array]:
        """The arrays for a block of rows and one of columns.

        Without `second`, the rows are the columns.
        """
        sizes = [
            x.shape[axis]
            for side, arrays in ((0, first), (-1, first if second is None else second))
            for x, axis in [(arrays[0], self.sides[side].rows.axes[0])]
        ]
        try:
            out = _run(self.call, self.sides, first, second)
        except Exception as e:
            if second is None:
                e.add_note(
                    "This is a block of examples with themselves, for which `x2` is "
                    "None, as it is in the call."
                )
            raise
        arrays = [x for x in jtu.tree_leaves(out) if eqx.is_array(x)]
        expected = [leaf.shape((sizes[0], sizes[1])) for leaf in self.leaves]
        found = [x.shape for x in arrays]
        dtypes = [leaf.dtype for leaf in self.leaves]
        if found != expected or [x.dtype for x in arrays] != dtypes:
            raise ValueError(
                "`kernel_fn` must return arrays of the same structure, rank and dtype "
                "for all blocks, with axes other than those of the examples as long; "
                f"expected {_shown(expected, dtypes)} for {sizes[0]} rows and "
                f"{sizes[1]} columns, got {_shown(found, [x.dtype for x in arrays])}."
            )
        return [jnp.asarray(x, x.dtype) for x in arrays]

    def output(self, arrays: list) -> PyTree:
        """What the kernel function returns, with these arrays in it."""
        return _filled(self._out, arrays)

    @property
    def mirror(self) -> "TileMirror":
        return TileMirror(self.call.mirror, self.leaves, self._out)

    def mirrored(self, tile: list[Array]) -> list[Array]:
        """The tile with rows and columns exchanged."""
        return self.mirror(tile)

    def symmetrised(self, tile: list[Array]) -> list[Array]:
        """A tile on the diagonal, made exactly symmetric, whatever rounding did."""
        if self.call.mirror is True:
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
    at_once = lambda x: _common(x, _exchanged(x))
    if x.shape[0] <= 2 * _PIECE:
        return at_once(x)
    return lax.platform_dependent(x, cpu=_common_in_pieces, default=at_once)


def _exchanged(x: Shaped[Array, "rows columns ..."]) -> Array:
    return jnp.conj(jnp.swapaxes(x, 0, 1))


def _common_in_pieces(x: Shaped[Array, "n n ..."]) -> Shaped[Array, "n n ..."]:
    """A tile, made symmetric in pieces of which both mirror images fit into a cache.

    XLA for CPUs reads the columns of a large array one number at a time, each of them
    from far away.
    """
    total, rest = x.shape[0], x.shape[2:]
    pairs = itertools.combinations_with_replacement(starts(total, _PIECE), 2)
    zeros = [jnp.zeros((), jnp.int32) for _ in rest]

    def step(result: Array, at: Array) -> tuple[Array, None]:
        here, there = [*at, *zeros], [*at[::-1], *zeros]
        pieces = [
            lax.dynamic_slice(x, place, (_PIECE, _PIECE, *rest))
            for place in (here, there)
        ]
        piece = _common(pieces[0], _exchanged(pieces[1]))
        result = lax.dynamic_update_slice(result, piece, here)
        return lax.dynamic_update_slice(result, _exchanged(piece), there), None

    at = jnp.array(list(pairs), jnp.int32)
    return lax.scan(step, vary(jnp.zeros_like(x), varying(jax.typeof(x))), at)[0]


def _sides(call: KernelCall) -> list[Side]:
    axes = VmapAxes(call.in_axes, 0, {})
    note = "Keyword arguments for the examples come in pairs, batched along axis 0."
    return [
        Side(position, own, {}, axes, note) for position, own in enumerate(call.calls)
    ]


def _run(
    call: KernelCall, sides: list[Side], first: list, second: list | None
) -> PyTree:
    """What the kernel function returns for a block of rows and one of columns."""
    x1, own = sides[0].arguments(first)
    x2, other = None, own
    if second is not None:
        x2, other = sides[-1].arguments(second)
    elif not call.is_alone or not _takes_none(call.kernel_fn):
        x2 = x1
    pairs = {name: (own[name], other[name]) for name in own}
    out = call.kernel_fn(x1, x2, *call.args, **pairs, **call.shared)
    return jtu.tree_map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, out
    )


# Compiled, so that it is looked up and not traced where shapes are all that is wanted.
@eqx.filter_jit
def _out(call: KernelCall, first: list, second: list) -> PyTree:
    return _run(call, _sides(call), first, second)


def _sizes(leaves: list[KernelLeaf], tile: list[Array]) -> tuple[int, int]:
    """How many rows and columns a tile has."""
    found = [0, 0]
    for leaf, x in zip(leaves, tile, strict=True):
        for side, axis in enumerate(leaf.axes):
            if axis is not None:
                found[side] = x.shape[axis]
    return found[0], found[1]


def is_axes(x: Any) -> bool:
    """Whether that is a pair of axes, and no PyTree of such."""
    return (
        isinstance(x, tuple)
        and len(x) == 2
        and all(
            a is None or (isinstance(a, int) and not isinstance(a, bool)) for a in x
        )
    )


def _make_leaf(path: str, axes: Any, struct: jax.ShapeDtypeStruct) -> KernelLeaf:
    shape = tuple(struct.shape)
    if not is_axes(axes):
        raise TypeError(
            "`out_axes` must consist of pairs `(axis of the rows, axis of the "
            f"columns)`, with None for one that is not there; got {axes!r}."
        )
    got = (
        f"`kernel_fn` returned shape {shape} in output{path} for {_ROWS} rows and "
        f"{_COLUMNS} columns"
    )
    remedy = (
        "Return an array with these axes, or declare by `out_axes` what there is, with "
        "None for an axis that is missing, as in `(0, None)` for a value for each row."
    )
    if axes == (None, None):
        raise ValueError(
            f"`out_axes` gives output{path} neither rows nor columns, so that there "
            "would be one for each block. Return it apart from the kernel."
        )
    resolved: list[int | None] = []
    sizes = {"rows": _ROWS, "columns": _COLUMNS}
    for (name, size), axis in zip(sizes.items(), axes, strict=True):
        if axis is None:
            resolved.append(None)
            continue
        if not -len(shape) <= axis < len(shape) or shape[axis] != size:
            raise ValueError(
                f"{got}, whose axis {axis} should be that of the {name}. {remedy}"
            )
        resolved.append(axis % len(shape))
    return KernelLeaf(path, (resolved[0], resolved[1]), shape, struct.dtype)


def _takes_none(fun: Callable) -> bool:
    """Whether a kernel function can be called without a second argument."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # Some builtins have no signature.
        return True
    if len(parameters) < 2:
        return True
    is_required = parameters[1].default is inspect.Parameter.empty
    return not is_required or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL


def _shown(shapes: list, dtypes: list) -> str:
    pairs = zip(shapes, dtypes, strict=True)
    return ", ".join(f"{shape} {dtype}" for shape, dtype in pairs)
