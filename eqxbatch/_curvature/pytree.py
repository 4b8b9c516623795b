"""Matrices of second derivatives, as PyTrees of PyTrees and flat."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PyTree, Real, Shaped

from .._base.cpu import mirrored, runtime_indices, unstack
from .._base.dtypes import common_dtype, is_complex
from .._base.mesh import vary_as
from .._base.trees import safe_zip, shown
from .._base.types import AnyArray, check_types, checked
from .._batch.arguments import Dtype, Leaves


_Tree = TypeVar("_Tree")


# Anything with a shape and a dtype.
_Arranged = Shaped[AnyArray | jax.ShapeDtypeStruct, "..."]


Pair = tuple[int, int]


# What `jax.tree_util.tree_structure` returns.
Structure = Any


# Pairs of leaves that are alike, and their blocks along axis 0.
Group = tuple[list[Pair], Inexact[Array, "_ ..."]]


# The most rows of a flat matrix whose entries are looked up one by one: the program has
# an index for each.
_MOST_LOOKED_UP = 128


class BlockSums(NamedTuple):
    """Blocks of a sum over some examples.

    - `blocks`: for each group of pairs, those of the pairs along axis 0.
    - `num_cancelled`: for how many of the examples terms cancel, so that blocks lose
        digits; None if they cannot.
    """

    blocks: list[Inexact[Array, "_ ..."]]
    num_cancelled: Real[Array, ""] | None = None


@dataclasses.dataclass(frozen=True)
class RequestedBlocks:
    """The requested blocks of a Hessian.

    - `pairs`: pairs of leaf indices. The block of a pair has the axes of its first
        leaf, then those of its second.
    - `is_diagonal`: whether only diagonals are requested; each pair is then a leaf with
        itself.
    """

    pairs: list[Pair]
    is_diagonal: bool = False

    @property
    def leaves(self) -> set[int]:
        return {leaf for pair in self.pairs for leaf in pair}

    def among(self, leaves: Iterable[int]) -> "RequestedBlocks":
        """The requested blocks of pairs of these leaves."""
        chosen = set(leaves)
        pairs = [pair for pair in self.pairs if chosen.issuperset(pair)]
        return RequestedBlocks(pairs, self.is_diagonal)

    def num_bytes(self, pair: Pair, leaves: Leaves) -> int:
        """The size of the block of a pair, or of its diagonal."""
        first, second = (leaves[leaf] for leaf in pair)
        entries = first.size * (1 if self.is_diagonal else second.size)
        return entries * first.dtype.itemsize


class Unravel(eqx.Module, Generic[_Tree]):
    """Turns vectors into PyTrees of parameters; comes with a flat Hessian or Jacobian.

    `unravel(vector)` takes a vector of shape `(n,)`, or several of shape `(..., n)`,
    and returns a PyTree like the parameters, with the leading axes first. For one
    vector, it matches the function that `jax.flatten_util.ravel_pytree` returns. Raises
    `ValueError` if the number of entries is not `n`, and `TypeError` for anything but
    an array of an inexact dtype, and for a complex vector if all parameters are real.

    **Arguments:**

    - `tree`: the parameters, a PyTree of arrays. Only structure, shapes and dtypes
        matter.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> x = {"a": jnp.ones(2), "b": jnp.ones(())}
        >>> cube = lambda x: jnp.sum(x["a"] ** 3) + x["b"] ** 3
        >>> matrix, unravel = eqxbatch.filter_hessian(cube, flat=True)(x)
        >>> eigenvalues, eigenvectors = jnp.linalg.eigh(matrix)
        >>> unravel(eigenvectors.T)["a"].shape
        (3, 2)

        ```
    """

    structs: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)

    def __repr__(self) -> str:
        num = len(self.structs)
        return f"Unravel({sum(self.sizes)} numbers in {num} array{'s' * (num != 1)})"

    def __init__(self, tree: _Tree):
        check_types({"tree": tree}, {"tree": PyTree[_Arranged]})
        leaves, self.treedef = jtu.tree_flatten(tree)
        self.structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)

    @property
    def sizes(self) -> list[int]:
        return [struct.size for struct in self.structs]

    @property
    def dtype(self) -> Any:
        """The dtype of the vector."""
        return common_dtype(*(struct.dtype for struct in self.structs))

    def __call__(self, vector: Inexact[Array, "*batch n"]) -> _Tree:
        # The hint has the number of entries, so that the message names it.
        hint = Inexact[AnyArray, f"*batch {sum(self.sizes)}"]
        check_types({"vector": vector}, {"vector": hint})
        vector = jnp.asarray(vector)
        if is_complex(vector) and not jnp.issubdtype(self.dtype, jnp.complexfloating):
            raise TypeError(
                "`vector` must be real, as all parameters are; got dtype "
                f"{vector.dtype}. Unravel `vector.real` and `vector.imag` separately."
            )
        leaves = [
            part.astype(struct.dtype)
            for part, struct in safe_zip(self.split(vector), self.structs)
        ]
        return jtu.tree_unflatten(self.treedef, leaves)

    def split(self, vector: Any) -> list[Array]:
        """Splits a vector into leaves, in its own dtype."""
        ends = itertools.accumulate(self.sizes)
        lead = vector.shape[:-1]
        return [
            vector[..., end - struct.size : end].reshape((*lead, *struct.shape))
            for end, struct in safe_zip(ends, self.structs)
        ]


def joined(leaves: Sequence[Array], dtype: Dtype) -> Inexact[Array, " n"]:
    """All entries of some arrays, in one vector."""
    return jnp.concatenate([x.ravel().astype(dtype) for x in leaves])


def square(
    blocks: dict[Pair, Array],
    leaves: Sequence,
    treedef: Structure,
    *,
    is_whole: bool = False,
) -> PyTree:
    """A symmetric matrix as a PyTree of PyTrees, from blocks on and above the diagonal.

    With `is_whole`, it stays as it is below the diagonal.
    """

    def block(row: int, column: int) -> Array:
        # Below the diagonal, a block is the transpose of its mirror image.
        first, second = min(row, column), max(row, column)
        x = blocks[first, second].reshape(leaves[first].size, leaves[second].size)
        if row == column:
            # A block on the diagonal has both halves, of which one is kept.
            x = x if is_whole else mirrored(x)
        elif row > column:
            x = x.T
        shape = (*leaves[row].shape, *leaves[column].shape)
        return x.reshape(shape).astype(leaves[row].dtype)

    num = range(len(leaves))
    rows = [jtu.tree_unflatten(treedef, [block(i, j) for j in num]) for i in num]
    return jtu.tree_unflatten(treedef, rows)


def flat_square(
    groups: Sequence[Group], leaves: Sequence, *, is_whole: bool = False
) -> Inexact[Array, "n n"]:
    """A symmetric matrix, from its blocks on and above the diagonal.

    With `is_whole`, there is a single block, which stays as it is below the diagonal.
    """
    sizes = [x.size for x in leaves]
    starts = [0, *itertools.accumulate(sizes)]
    dtype = common_dtype(*(x.dtype for x in leaves))
    # A single block is the matrix.
    if len(leaves) == 1:
        matrix = groups[0][1].reshape(*sizes, *sizes).astype(dtype)
        return matrix if is_whole else mirrored(matrix)
    if starts[-1] <= _MOST_LOOKED_UP:
        return _looked_up(groups, starts, dtype)
    # Blocks on and above the diagonal are written to an array of zeros, and copied to
    # below it at the end.
    every = [blocks for _, blocks in groups]
    matrix = vary_as(every, jnp.zeros((starts[-1], starts[-1]), dtype))
    at_run_time = runtime_indices(starts, every[0].ravel()[:1])
    for pairs, blocks in _joined_groups(groups, sizes, dtype):
        # A block of its own is written in place, at an index known only at run time.
        if len(pairs) == 1:
            corner = [at_run_time[i] for i in pairs[0]]
            matrix = lax.dynamic_update_slice(
                matrix, blocks[0], corner, allow_negative_indices=False
            )
        else:
            # On CPUs, this is a loop, which compiles faster than many operations.
            matrix = lax.scatter(
                matrix,
                jnp.array([[starts[i] for i in pair] for pair in pairs], "int32"),
                blocks,
                lax.ScatterDimensionNumbers((1, 2), (), (0, 1)),
                unique_indices=True,
                mode="promise_in_bounds",
            )
    return mirrored(matrix)


# Blocks are copied to be joined.
_JOINED_BYTES = 2**22


def _joined_groups(
    groups: Sequence[Group], sizes: list[int], dtype: Dtype
) -> Iterator[Group]:
    """The blocks of some groups as matrices; small ones of equal shape are joined.

    One operation writes all blocks of a group to their places, so that fewer of them
    are compiled.
    """
    by_shape: dict[tuple[int, int], list[Group]] = {}
    for pairs, blocks in groups:
        first, second = pairs[0]
        shape = sizes[first], sizes[second]
        blocks = blocks.reshape(len(pairs), *shape).astype(dtype)
        by_shape.setdefault(shape, []).append((pairs, blocks))
    for alike in by_shape.values():
        joins = sum(blocks.nbytes for _, blocks in alike) <= _JOINED_BYTES
        if len(alike) == 1 or not joins:
            yield from alike
            continue
        pairs, blocks = safe_zip(*alike)
        yield [*itertools.chain(*pairs)], lax.concatenate(blocks, 0)


def _looked_up(
    groups: Sequence[Group], starts: list[int], dtype: Dtype
) -> Inexact[Array, "n n"]:
    """A small symmetric matrix, whose entries are looked up among those of its blocks.

    This is one operation, whatever the number of blocks, and so compiles fast.
    """
    places, num_before = np.zeros((starts[-1], starts[-1]), "int32"), 0
    for pairs, _ in groups:
        # The blocks of a group are one after the other, and their entries by rows.
        for first, second in pairs:
            rows, columns = (slice(starts[i], starts[i + 1]) for i in (first, second))
            block = places[rows, columns]
            block[...] = num_before + np.arange(block.size).reshape(block.shape)
            num_before += block.size
    # Entries below the diagonal are in the same place as their mirror images.
    places = np.triu(places) + np.triu(places, 1).T
    entries = joined([blocks for _, blocks in groups], dtype)
    return entries.at[places].get(mode="promise_in_bounds")


class Form(NamedTuple):
    """The structure of a PyTree, and the shapes of its leaves; None for no array."""

    treedef: Structure
    shapes: list[tuple[int, ...] | None]


def form_of(tree: PyTree) -> Form:
    leaves, treedef = jtu.tree_flatten(tree)
    return Form(treedef, [getattr(x, "shape", None) for x in leaves])


@checked
def hessian_to_pytree(H: Inexact[Array | np.ndarray, "n n"], x: PyTree) -> PyTree:
    """Turns a matrix over all parameters into a PyTree of PyTrees.

    **Arguments:**

    - `H`: a matrix of shape `(n, n)` over the `n` entries of the inexact arrays in `x`,
        in the order of `jax.flatten_util.ravel_pytree`: the result of
        [`eqxbatch.filter_hessian`][] with `flat=True`, or a matrix computed from it,
        such as its inverse.
    - `x`: the parameters, or a PyTree that contains them. Only shapes matter.

    **Returns:**

    A PyTree of PyTrees like that of `equinox.filter_hessian`: it has the structure of
    the inexact arrays of `x`, and each leaf is such a PyTree again. The array for two
    leaves has the axes of the first, then those of the second.

    **Raises:**

    `ValueError` if `H` does not have shape `(n, n)`, or if `x` has no inexact array;
    `TypeError` if `H` is not an array of an inexact dtype.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> x = {"a": jnp.zeros(2), "b": jnp.zeros(())}
        >>> H = eqxbatch.hessian_to_pytree(jnp.arange(9.0).reshape(3, 3), x)
        >>> print(H["a"]["b"], H["b"]["a"])
        [2. 5.] [6. 7.]

        ```

    ??? cite

        The function of this name in [zodiax](https://github.com/LouisDesdoigts/zodiax).
    """
    diff = eqx.filter(x, eqx.is_inexact_array)
    if not jtu.tree_leaves(diff):
        raise ValueError(
            f"`x` has no arrays of an inexact dtype; got {shown(x)}. Pass the "
            "parameters that the matrix belongs to."
        )
    unravel = Unravel(diff)
    n = sum(unravel.sizes)
    if H.shape != (n, n):
        raise ValueError(
            f"`H` must have shape {(n, n)}, for the {n} entries of the inexact arrays "
            f"in `x`; got {H.shape}. Give the `x` that `H` was computed with, or, if "
            "`where` or `filter_spec` selected a part of it, `unravel(H[0])` with the "
            "`unravel` that came with `H`."
        )
    # Otherwise, the result would change with `H`.
    H = H.copy() if isinstance(H, np.ndarray) else H
    # First rows, then columns, by the same sizes.
    ends = itertools.accumulate(unravel.sizes)
    rows = [
        jtu.tree_unflatten(
            unravel.treedef,
            unravel.split(H[end - struct.size : end].reshape(*struct.shape, n)),
        )
        for end, struct in safe_zip(ends, unravel.structs)
    ]
    return jtu.tree_unflatten(unravel.treedef, rows)


def arranged(
    diff: PyTree,
    groups: Sequence[Group],
    is_block: Callable[[Any], bool] | None,
    *,
    flat: bool,
    is_diagonal: bool,
    is_whole: bool,
) -> Any:
    """The return value for a matrix, from its blocks.

    With `is_whole`, nothing was gained by symmetry, so that a full matrix stays as it
    is below the diagonal.
    """
    # A flat matrix takes stacked blocks as they are.
    pairs = {} if flat and not is_diagonal else by_pairs(groups, jtu.tree_leaves(diff))
    # A diagonal has the form of the parameters.
    if is_diagonal:
        leaves, treedef = jtu.tree_flatten(diff)
        if flat:
            unravel = Unravel(diff)
            entries = [pairs[i, i] for i, _ in enumerate(leaves)]
            return joined(entries, unravel.dtype), unravel
        entries = [pairs[i, i].astype(x.dtype) for i, x in enumerate(leaves)]
        return jtu.tree_unflatten(treedef, entries)

    def block(part: PyTree, numbers: range) -> Any:
        leaves, treedef = jtu.tree_flatten(part)
        # A part without differentiated leaves has no matrix.
        if flat and not leaves:
            return None
        if flat:
            chosen = [*_among(groups, numbers)]
            return flat_square(chosen, leaves, is_whole=is_whole), Unravel(part)
        # Pairs are numbered over all leaves, a part has its own numbers from 0.
        blocks = {
            (first - numbers.start, second - numbers.start): pairs[first, second]
            for first, second in itertools.combinations_with_replacement(numbers, 2)
        }
        return square(blocks, leaves, treedef, is_whole=is_whole)

    parts, treedef = jtu.tree_flatten(diff, is_leaf=is_block)
    numbers = leaves_of_parts(diff, is_block)
    return jtu.tree_unflatten(treedef, [*map(block, parts, numbers)])


def _among(groups: Sequence[Group], numbers: range) -> Iterator[Group]:
    """Those blocks of some groups that belong to a range of leaves, from 0."""
    for pairs, blocks in groups:
        # Both leaves of a pair are in the same part.
        chosen = [i for i, (first, _) in enumerate(pairs) if first in numbers]
        if not chosen:
            continue
        if len(chosen) < len(pairs):
            blocks = blocks[np.array(chosen)]
        start, places = numbers.start, (pairs[i] for i in chosen)
        yield [(first - start, second - start) for first, second in places], blocks


def by_pairs(
    groups: Sequence[Group], leaves: Leaves
) -> dict[Pair, Inexact[Array, "..."]]:
    """The block of each pair; `leaves` are arguments of the program."""
    separated = unstack([blocks for _, blocks in groups], leaves)
    each = (safe_zip(pairs, x) for (pairs, _), x in safe_zip(groups, separated))
    return dict(itertools.chain.from_iterable(each))


def leaves_of_parts(
    tree: PyTree, is_block: Callable[[Any], bool] | None
) -> list[range]:
    """The indices of the leaves in each part of a PyTree."""
    parts = jtu.tree_leaves(tree, is_leaf=is_block)
    ends = itertools.accumulate(len(jtu.tree_leaves(part)) for part in parts)
    return [*itertools.starmap(range, itertools.pairwise((0, *ends)))]
