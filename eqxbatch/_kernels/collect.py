"""What becomes of the blocks of a kernel: they are stored or reduced."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import get_abstract_mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, PyTree, Shaped

from .._base.checks import match_prefix
from .._base.run_time_checks import can_raise
from .._base.trees import safe_zip, shown
from .._base.types import check_types
from .._batch.blocks import Block
from .kernel import AbstractBlockKernel, KernelLeaf
from .reductions import AbstractReduction, AbstractSymmetrised, AbstractTwoSided


def where_new(
    are_new: Bool[Array, "rows columns"] | None, x: Array, other: Any
) -> Array:
    """A tile with rows and columns first, and `other` for entries that are not new."""
    if are_new is None:
        return x
    are_new = jnp.expand_dims(are_new, range(2, x.ndim))
    return jnp.where(are_new, x, jnp.asarray(other).astype(x.dtype))


_KERNEL = Shaped[jax.ShapeDtypeStruct, "n1 n2 *out"]


_State = PyTree[Shaped[ArrayLike, "..."]]


# The methods that update the state of a reduction.
Update = Literal["update", "update_mirrored", "update_symmetrised"]


@dataclasses.dataclass(frozen=True)
class Collector:
    """Collects the tiles of one array of a kernel, or reduces them."""

    leaf: KernelLeaf
    reduction: AbstractReduction | None = None

    def init(self, totals: tuple[int, int]) -> PyTree[Array]:
        """The state before the first tile."""
        if self.reduction is None:
            return jnp.zeros(self.leaf.struct(totals).shape, self.leaf.dtype)
        try:
            hint = float | Shaped[ArrayLike, ""]
            self._check("neutral", self.reduction.neutral, hint)
            state = self.reduction.init(self._struct(totals))
            self._check("init(...)", state, _State)
        except (TypeError, ValueError) as e:
            # `reduce` can be a PyTree, so that its type alone does not tell the output.
            e.add_note(f"This is about output{self.leaf.path}.")
            raise
        return state

    @property
    def takes_mirrored(self) -> bool:
        """Whether the reduction takes mirror images without a transpose."""
        reduction = self.reduction
        return isinstance(reduction, AbstractTwoSided) and reduction.takes_mirrored

    @property
    def takes_asymmetric(self) -> bool:
        """Whether the reduction makes tiles on the diagonal symmetric itself."""
        reduction = self.reduction
        return isinstance(reduction, AbstractSymmetrised) and reduction.takes_asymmetric

    def update(
        self,
        state: PyTree[Array],
        tile: Array,
        rows: Block,
        columns: Block,
        are_new: Bool[Array, "rows columns"] | None,
        *,
        by: Update = "update",
    ) -> PyTree[Array]:
        """The state after one more tile, of which some entries may not be new.

        `by` is another method of the reduction than `update` for the mirror image of
        the tile if it `takes_mirrored`, or on the diagonal if it `takes_asymmetric`.
        """
        reduction = self.reduction
        if reduction is None:
            # Entries that are written twice need no mask: the later tile has the last
            # word.
            return self.leaf.written(state, tile, rows.start, columns.start)
        # Each entry must count once; a neutral one does not count.
        tile = where_new(are_new, self.leaf.front(tile), reduction.neutral)
        state = getattr(reduction, by)(state, tile, rows, columns)
        self._check("update(...)", state, _State)
        return state

    def finalize(self, state: PyTree[Array], totals: tuple[int, int]) -> Any:
        """The result."""
        if self.reduction is None:
            return state
        result = self.reduction.finalize(state)
        # Names of sizes in a user's annotation, such as `n1`, are those of the kernel.
        annotations = getattr(type(self.reduction).finalize, "__annotations__", {})
        struct = self._struct(totals)
        self._check("finalize(...)", result, annotations.get("return", Any), struct)
        return result

    def _check(self, name: str, value: Any, hint: Any, kernel: Any = None) -> None:
        """Raises if an attribute or a result of the reduction has another type."""
        name = f"{type(self.reduction).__name__}.{name}"
        values, hints, remedies = {name: value}, {name: hint}, {}
        if kernel is not None:
            # It binds the names of sizes.
            values, hints = {"kernel": kernel, **values}, {"kernel": _KERNEL, **hints}
            remedies = {name: f"The kernel has the shape {kernel.shape}."}
        check_types(values, hints, remedies)

    def _struct(self, totals: tuple[int, int]) -> jax.ShapeDtypeStruct:
        """The shape of the kernel, with rows and columns first."""
        return jax.eval_shape(self.leaf.front, self.leaf.struct(totals))


class States(NamedTuple):
    """The states of all collectors.

    `is_symmetric` is whether all blocks of examples with themselves were symmetric so
    far; None if that is not checked.
    """

    arrays: list[PyTree[Array]]
    is_symmetric: Bool[Array, ""] | None = None


class CheckedTile(NamedTuple):
    """The arrays of a tile, and whether it was symmetric; None if not checked."""

    arrays: list[Array]
    is_symmetric: Bool[Array, ""] | None

    def and_before(self, before: Bool[Array, ""] | None) -> Bool[Array, ""] | None:
        """Whether all tiles were symmetric, including those before."""
        now = self.is_symmetric
        return before if now is None or before is None else before & now


class KernelOutput(NamedTuple):
    """The output of the kernel function, with `is_symmetric` as in `States`."""

    out: PyTree
    is_symmetric: Bool[Array, ""] | None


def finalized(
    kernel: AbstractBlockKernel,
    collectors: Sequence[Collector],
    states: States,
) -> KernelOutput:
    """The output of the kernel function, from the states after the last tile."""
    pairs = safe_zip(collectors, states.arrays)
    results = [x.finalize(state, kernel.totals) for x, state in pairs]
    return KernelOutput(kernel.output(results), states.is_symmetric)


NOT_SYMMETRIC = (
    "`symmetric` is not true of `kernel_fn`: a block of examples with themselves is "
    "not its mirror image within rounding, and half of the kernel would be wrong. "
    "Leave `symmetric` out, or exchange the examples in a way that changes nothing "
    "else. For a kernel that is symmetric but for rounding, use a longer dtype."
)


def checked_output(output: KernelOutput, *, is_sharded: bool = False) -> PyTree:
    """The output of a kernel. Raises `ValueError` if it should have been symmetric.

    Within a transformed function, that is an error at run time; or, if the kernel may
    be on several devices, the result is NaN: the others would wait for the one that
    raises an error.
    """
    out, is_symmetric = output
    if is_symmetric is None:
        return out
    # Outside of transforms, the flag has a value, and so this is an ordinary error.
    if not isinstance(is_symmetric, Tracer):
        if not np.asarray(is_symmetric):
            raise ValueError(NOT_SYMMETRIC)
        return out
    leaves, treedef = jtu.tree_flatten(out)
    # An array without entries cannot carry the error.
    numbers = [i for i, x in enumerate(leaves) if eqx.is_array(x) and x.size]
    is_sharded |= not get_abstract_mesh().empty or not can_raise(
        *filter(eqx.is_array, leaves)
    )
    if is_sharded:
        # NaN reaches all devices without stopping any. Integers have none.
        factor = jnp.where(is_symmetric, 1.0, jnp.nan)
        for i in filter(lambda i: eqx.is_inexact_array(leaves[i]), numbers):
            leaves[i] = leaves[i] * factor.astype(leaves[i].dtype)
    elif numbers:
        # One array is enough: what a program returns is returned together.
        i = min(numbers, key=lambda i: leaves[i].size)
        leaves[i] = _waiting(leaves[i], ~is_symmetric)
    return jtu.tree_unflatten(treedef, leaves)


def _waiting(x: Shaped[Array, "..."], is_wrong: Bool[Array, ""]) -> Array:
    """An array of which one entry waits for the check.

    Unlike a condition on all of it, that copies nothing, and it is linear in the array.
    """
    factor = eqx.error_if(jnp.ones((), x.dtype), is_wrong, NOT_SYMMETRIC)
    entry = x[(slice(0, 1),) * x.ndim] * factor
    return lax.dynamic_update_slice(x, entry, [jnp.zeros((), jnp.int32)] * x.ndim)


def make_collectors(kernel: AbstractBlockKernel, reduce: PyTree) -> list[Collector]:
    """One collector for each array, from a PyTree prefix of reductions or None."""
    # Without reductions, tiles are kept as they are.
    if reduce is None:
        return [*map(Collector, kernel.leaves)]
    places = match_prefix(
        "reduce",
        reduce,
        kernel.output(kernel.leaves),
        "a reduction, or a PyTree prefix of what `kernel_fn` returns with one for each "
        "part",
        is_leaf=lambda x: x is None or isinstance(x, AbstractReduction),
    )
    # A reduction for a part of the output reduces each array in it.
    collectors: list[Collector] = []
    for _, reduction, part in places:
        for leaf in jtu.tree_leaves(part):
            # What the function returns beside arrays, such as a name, stays as it is.
            if not isinstance(leaf, KernelLeaf):
                continue
            if not isinstance(reduction, AbstractReduction):
                raise TypeError(
                    "`reduce` must consist of `eqxbatch.AbstractReduction`s, such as "
                    f"`TopK(10)`; got {shown(reduction)} for output{leaf.path}."
                )
            if not leaf.is_pairwise:
                raise ValueError(
                    f"`reduce` is for kernels with rows and columns, but output"
                    f"{leaf.path} has the axes {leaf.axes}. Compute it "
                    "separately."
                )
            collectors.append(Collector(leaf, reduction))
    return collectors
