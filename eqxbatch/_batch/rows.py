"""The rows of some examples: their arrays, and what else there is for each of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Int, PyTree

from .._base.checks import is_none
from .._base.mesh import vary_as
from .._base.trees import safe_zip
from .blocks import Block, block_struct


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows of some examples, and what comes with each of them.

    - `arrays`, `axes`: the arrays of the examples, and the batch axis of each. It is
        None for an array that all examples share. Arrays without rows stand for those
        whose rows are read in blocks. A single example has no axes.
    - `total`: the number of examples.
    - `seeds`: a cotangent of the outputs for each example, `[examples, entries]`.
    - `weights`: the weights of the examples, if they have any.
    - `bounds`: bounds on norms, with one number for each example.
    - `shares`: the share that each example has in a microbatch which overlaps another;
        see `Block.shares`.
    - `keys`: the numbers of a key for each example, if anything is drawn at random.
    """

    arrays: list
    axes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
    total: int = dataclasses.field(metadata={"static": True})
    seeds: Any = None
    weights: Any = None
    bounds: Any = ()
    shares: Any = None
    keys: Any = None

    def __repr__(self) -> str:
        names = ("seeds", "weights", "bounds", "shares", "keys")
        present = [x for x in names if jtu.tree_leaves(getattr(self, x))]
        more = f" with {' and '.join(present)}" if present else ""
        arrays = eqx.tree_pformat(self.arrays, struct_as_array=True)
        return f"Rows({self.total} examples in {arrays}{more})"

    @property
    def are_stored(self) -> bool:
        """Whether these are not in memory."""
        pairs = safe_zip(self.arrays, self.axes)
        return any(
            axis is not None and x.shape[axis] != self.total for x, axis in pairs
        )

    def with_(self, **more: Any) -> "Rows":
        """The same examples, with more of what comes with them."""
        return dataclasses.replace(self, **more)

    def weighted(self) -> "Rows":
        """The same rows, with the shares of the examples as a part of their weights."""
        if self.shares is None:
            return self
        weights = self.shares
        if self.weights is not None:
            # In the dtype of the shares, because weights can be bools.
            weights = self.weights.astype(weights.dtype) * weights
        return self.with_(weights=weights, shares=None)

    def unweighted(self) -> "Rows":
        """The same examples, with what each of them has but weights, bounds and shares.

        On a mesh, numbers of examples may lie otherwise than their arrays, so that
        `jax.vmap` cannot map both.
        """
        return self.with_(weights=None, bounds=(), shares=None)

    def at(self, block: Block) -> "Rows":
        """The rows of a microbatch."""
        return self.mapped(block.take, block.size)

    def slice(self, start: int | Int[Array, ""], size: int) -> "Rows":
        """A number of rows, starting at a given one."""
        if size == self.total:
            return self
        cut = lambda x, axis: lax.dynamic_slice_in_dim(x, start, size, axis)
        return self.mapped(cut, size)

    def structs(self, size: int) -> "Rows":
        """The types of a number of rows."""
        return self.mapped(lambda x, axis: block_struct(x, axis, size), size)

    def one(self) -> "Rows":
        """An example of zeros, for computations that do not depend on its values."""

        def zero(x: Array, axis: int) -> Array:
            shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
            # Inside `jax.shard_map`, it varies over the same devices as the rows.
            return vary_as([x], jnp.zeros(shape, x.dtype))

        return self.mapped(zero, 1)

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of one example, without the batch axes."""

        def struct(x: Array, axis: int) -> jax.ShapeDtypeStruct:
            shape = (*x.shape[:axis], *x.shape[axis + 1 :])
            is_weak = jax.typeof(x).weak_type
            return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=is_weak)

        return tuple(jtu.tree_leaves(self.mapped(struct, 1)))

    def of_each(
        self, fun: Callable[..., Any], *others: PyTree, out_axes: int = 0
    ) -> Any:
        """Maps `fun(example, *others)` over the examples.

        An `example` is the rows of a single one. `others` have the examples along axis
        0. If these rows are a single example already, `fun` is called with them.
        """
        if not self.axes:
            return fun(self, *others)
        leaves, treedef = jtu.tree_flatten(self, is_leaf=is_none)

        def of_one(leaves: list[Array | None], *others: PyTree) -> Any:
            example = treedef.unflatten(leaves)
            return fun(dataclasses.replace(example, axes=(), total=1), *others)

        in_axes = (self._axes_of(leaves), *(0 for _ in others))
        return jax.vmap(of_one, in_axes, out_axes)(leaves, *others)

    def mapped(self, fun: Callable[[Any, int], Any], total: int) -> "Rows":
        """The rows of `total` examples: `fun(x, axis)` for each array that has some."""
        # None is in place of arrays that a filter took out, and keeps their axes right.
        leaves, treedef = jtu.tree_flatten(self, is_leaf=is_none)
        changed = [
            x if x is None or axis is None else fun(x, axis)
            for x, axis in safe_zip(leaves, self._axes_of(leaves))
        ]
        return dataclasses.replace(treedef.unflatten(changed), total=total)

    def _axes_of(self, leaves: list[Any]) -> list[int | None]:
        """The batch axes of all leaves: the arrays, then what comes with them."""
        # All but the arrays have the examples along axis 0.
        return [*self.axes, *(0 for _ in leaves[len(self.axes) :])]
