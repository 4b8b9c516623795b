"""How a batch is cut into microbatches.

Microbatches are contiguous rows; the last one may be shorter. On a mesh, each has the
same share of the rows of all devices.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from .._base.checks import check_at_least
from .._base.mesh import (
    is_explicit,
    mesh_axes,
    names_of,
    spec_of,
    spread_rows,
    whole_rows,
    with_auto_axes,
)


class Blocks(eqx.Module):
    """How `total` examples are cut into contiguous microbatches of `size`.

    Microbatch `i` holds the examples `[i * size, (i + 1) * size)`. If `size` does not
    divide `total`, the last microbatch is shorter and holds the `remainder` examples.

    Examples that are sharded over a mesh lie in `parts` equal parts, one after the
    other. Each microbatch then takes the same share of every part: microbatch `i` holds
    the examples `[i * size / parts, (i + 1) * size / parts)` of each. All devices work
    on every microbatch, and no example leaves its device.

    With `in_order`, microbatch `i` holds the examples `[i * size, (i + 1) * size)` all
    the same, for functions that couple those of a microbatch. The batch is rearranged
    once, so that each device has the same share of every microbatch.

    With `overlaps`, the last microbatch has `size` examples instead, of which the first
    ones are those of the one before. It is the same program then, and no example counts
    twice.

    `num` is the number of all microbatches, and `num_full` of those with `size`
    examples.

    If the batch `continues`, as in [`eqxbatch.over_batches`][], other batches follow,
    which can be cut in another way.
    """

    total: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    parts: int = eqx.field(static=True, default=1)
    overlaps: bool = eqx.field(static=True, default=False)
    continues: bool = eqx.field(static=True, default=False)
    in_order: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        for name in ("size", "parts"):
            check_at_least(f"{name}` of `Blocks", getattr(self, name), 1)

    @property
    def num_full(self) -> int:
        return self.total // self.size

    @property
    def remainder(self) -> int:
        return self.total % self.size

    @property
    def num(self) -> int:
        return -(-self.total // self.size)


class Block(eqx.Module):
    """One microbatch, as it is described to an [`eqxbatch.AbstractAccumulator`][].

    - `index`: the index of the microbatch, starting at 0.
    - `start`: the number of examples before it.
    - `size`: the number of examples in it, known at trace time.
    - `is_remainder`: whether it is the shorter microbatch at the end.
    - `parts`: as in [`eqxbatch.Blocks`][].
    - `total`: the number of all examples, or None if it is not known.
    - `repeated`: how many examples of the microbatch before it are in it, too.
    - `in_order`: as in [`eqxbatch.Blocks`][].
    """

    index: int | Int[Array, ""]
    start: int | Int[Array, ""]
    size: int = eqx.field(static=True)
    is_remainder: bool = eqx.field(static=True)
    parts: int = eqx.field(static=True)
    total: int | None = eqx.field(static=True, default=None)
    repeated: int | Int[Array, ""] = 0
    in_order: bool = eqx.field(static=True, default=False)

    @property
    def num_new(self) -> Int[Array, ""]:
        """The number of examples that no microbatch before it has."""
        return jnp.asarray(self.size - self.repeated, jnp.int32)

    @property
    def _numbers(self) -> Int[Array, " size"]:
        """The number of each of its examples, within its part."""
        return jnp.arange(self.size, dtype=jnp.int32) % (self.size // self.parts)

    def is_new(self) -> Bool[Array, " size"]:
        """Whether each of its examples is in no microbatch before it."""
        # Of each part, the first rows are those that the microbatch before has, too.
        return self._numbers >= self.repeated // self.parts

    def shares(self) -> Float[Array, " size"]:
        """The weight of each of its examples: a half for those of two microbatches.

        A weight of zero would turn an infinite derivative into NaN.
        """
        assert self.total is not None
        # In each part, the last microbatch begins at `last`, and the one before it ends
        # at `full`: rows from `last` to `full` are in both.
        numbers = self._numbers + self.start // self.parts
        last, full = self.total - self.size, self.total // self.size * self.size
        is_first = numbers < last // self.parts
        is_both = ~is_first & (numbers < full // self.parts)
        return jnp.where(is_both, 0.5, 1.0).astype(jnp.result_type(float))

    def new(
        self,
        values: Shaped[Array, "size ..."],
        other: int | float | complex | Array = 0,
    ) -> Shaped[Array, "size ..."]:
        """`values` of its new examples, and `other` in place of the repeated ones."""
        if isinstance(self.repeated, int) and self.repeated == 0:
            return values
        is_new = jnp.expand_dims(self.is_new(), range(1, values.ndim))
        return jnp.where(is_new, values, jnp.asarray(other, values.dtype))

    def take(self, array: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
        """Returns the rows of this microbatch from an array over all examples.

        **Arguments:**

        - `array`: an array with all examples along `axis`.
        - `axis`: the axis of the examples.

        Raises `ValueError` if `axis` is out of range, or if the array does not have
        `total` examples along it.
        """
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"`axis` must be one of the {array.ndim} axes of `array`, of shape "
                f"{array.shape}; got {axis}."
            )
        # Of a batch that is one of several, the number of all examples is not known.
        if self.total is not None and array.shape[axis] != self.total:
            raise ValueError(
                f"`array` must have all {self.total} examples along axis {axis}; got "
                f"shape {array.shape}. Pass the array for the whole batch: `take` "
                "returns the rows of this microbatch."
            )
        if array.shape[axis] == self.size:
            return array
        if array.shape[axis] < self.size:  # There are no examples at all.
            shape = (*array.shape[:axis], self.size, *array.shape[axis + 1 :])
            return jnp.zeros(shape, array.dtype)
        # In order, a block has rows of all devices; otherwise, a share of each of them.
        if self.in_order:
            return _block_of_rows(whole_rows(array, axis), self.start, self.size, axis)
        if not are_split(array, axis, self.parts):
            return _block_of_rows(array, self.start, self.size, axis)
        array = split_parts(array, axis, self.parts)
        start, size = self.start // self.parts, self.size // self.parts
        return merge_parts(_block_of_rows(array, start, size, axis + 1), axis)


def _block_of_rows(
    array: Shaped[Array, "..."], start: int | Int[Array, ""], size: int, axis: int
) -> Shaped[Array, "..."]:
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, 1, axis)
    # No start is negative: nothing has to be selected in each step.
    return lax.dynamic_slice_in_dim(
        array, start, size, axis, allow_negative_indices=False
    )


def are_split(x: Shaped[Array, "..."], axis: int, parts: int) -> bool:
    """Whether each part of an axis must be sliced separately.

    This holds even for a single part if the type of the array says that the axis is
    sharded, although over one device.
    """
    names = names_of(spec_of(x)[axis])
    sizes = [mesh_axes(jax.typeof(x))[name][0] for name in names]
    return parts > 1 or (bool(sizes) and max(sizes) == 1)


def split_parts(x: Shaped[Array, "..."], axis: int, parts: int) -> Shaped[Array, "..."]:
    """Splits an axis into an axis of parts and an axis of rows within a part."""
    rows = x.shape[axis] // parts
    shape = (*x.shape[:axis], parts, rows, *x.shape[axis + 1 :])
    # The parts are what devices share; the rows of a part are on one of them.
    spec = [*spec_of(x)]
    return _reshape(x, shape, [*spec[: axis + 1], None, *spec[axis + 1 :]])


def merge_parts(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Merges an axis with the next one."""
    rows = x.shape[axis] * x.shape[axis + 1]
    shape = (*x.shape[:axis], rows, *x.shape[axis + 2 :])
    spec = [*spec_of(x)]
    # If all parts are on one device, the type may name the axis of the rows.
    merged = spec.pop(axis + 1) or spec[axis]
    return _reshape(x, shape, [*spec[:axis], merged, *spec[axis + 1 :]])


def cut_rows(
    x: Shaped[Array, "..."], axis: int, num: int, size: int, parts: int
) -> Shaped[Array, "..."]:
    """`num` pieces of `size` rows along a new axis 0, with a share of every part each.

    The rows behind them are left out.
    """
    # `[..., rows, ...]` to `[num, ..., size, ...]`, in each part by itself.
    is_split = are_split(x, axis, parts)
    if is_split:
        x = split_parts(x, axis, parts)
        axis += 1
    rows = num * size // parts
    if x.shape[axis] != rows:
        x = lax.slice_in_dim(x, 0, rows, 1, axis)
    x = jnp.moveaxis(split_parts(x, axis, num), axis, 0)
    return merge_parts(x, axis) if is_split else x


def join_rows(
    pieces: Shaped[Array, "num ..."], axis: int, parts: int
) -> Shaped[Array, "..."]:
    """The inverse of `cut_rows`."""
    if are_split(pieces, axis + 1, parts):
        pieces = split_parts(pieces, axis + 1, parts)
        x = merge_parts(jnp.moveaxis(pieces, 0, axis + 1), axis + 1)
    else:
        x = jnp.moveaxis(pieces, 0, axis)
    return merge_parts(x, axis)


def _reshape(
    x: Shaped[Array, "..."], shape: tuple[int, ...], spec: list[Any]
) -> Shaped[Array, "..."]:
    if not is_explicit(x):
        return x.reshape(shape)
    # With explicit axes, JAX does not guess the sharding of an axis that is split.
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return jnp.reshape(x, shape, out_sharding=sharding)


def rearranged(
    x: Shaped[Array, "..."], axis: int, blocks: Blocks, *, back: bool = False
) -> Shaped[Array, "..."]:
    """The rows of a batch, such that each part has its share of every microbatch.

    Of 8 rows in microbatches of 4 and two parts, these are 0, 1, 4, 5 and 2, 3, 6, 7.
    With `back`, this is undone. There can be several rows for each example.
    """
    if blocks.num <= 1 or x.size == 0:
        return x
    if blocks.parts == 1:
        return whole_rows(x, axis)
    move = functools.partial(_put_back if back else _dealt, axis=axis, blocks=blocks)
    # Without this, XLA would give each device all rows on the way.
    spread = lambda x: spread_rows(x, axis, blocks.parts)
    run = lambda x: spread(move(spread(x)))
    return with_auto_axes(run, (x,), lambda _: spec_of(x))


def _dealt(x: Array, axis: int, blocks: Blocks) -> Array:
    """Rows in the order of the examples, dealt out to the parts."""
    num, parts = blocks.num_full, blocks.parts
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    full, *remainder = _full_and_rest(x, axis, blocks)
    # `[num, parts, share]` to `[parts, num, share]`: a part has a share of each.
    full = full.reshape(*before, num, parts, -1, *after)
    full = jnp.swapaxes(full, axis, axis + 1)
    shares = [x.reshape(*before, parts, -1, *after) for x in (full, *remainder)]
    # Its share of the remainder comes last in each part.
    return jnp.concatenate(shares, axis + 1).reshape(x.shape)


def _put_back(x: Array, axis: int, blocks: Blocks) -> Array:
    """The inverse of `_dealt`."""
    num, parts = blocks.num_full, blocks.parts
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, parts, -1, *after)
    full, *remainder = _full_and_rest(x, axis + 1, blocks)
    # `[parts, num, share]` to `[num, parts, share]`, as the examples were.
    full = full.reshape(*before, parts, num, -1, *after)
    full = jnp.swapaxes(full, axis, axis + 1)
    shares = [x.reshape(*before, -1, *after) for x in (full, *remainder)]
    return jnp.concatenate(shares, axis)


def _full_and_rest(x: Array, axis: int, blocks: Blocks) -> list[Array]:
    """The rows of full microbatches, and those of the remainder if there are any."""
    if blocks.remainder == 0:
        return [x]
    # There can be several rows for each example, or those of one part only.
    cut = x.shape[axis] * (blocks.total - blocks.remainder) // blocks.total
    return jnp.split(x, [cut], axis)


def full_block(blocks: Blocks, index: int | Int[Array, ""]) -> Block:
    """The full microbatch number `index`."""
    first, size = index * blocks.size, blocks.size
    start, repeated = first, 0
    # The last one starts earlier and repeats rows of the one before. As an int, the
    # index is 0, of which this is not so.
    if blocks.overlaps and not isinstance(index, int):
        start = jnp.minimum(first, blocks.total - size)
        repeated = first - start
    more = blocks.total, repeated, blocks.in_order
    return Block(index, start, size, False, blocks.parts, *more)


def remainder_block(blocks: Blocks) -> Block:
    """The microbatch that comes after the full ones."""
    # With the repeated rows, it is as large as the full ones.
    repeated = blocks.size - blocks.remainder if blocks.overlaps else 0
    index, size = blocks.num_full, blocks.remainder + repeated
    start = index * blocks.size - repeated
    more = blocks.total, repeated, blocks.in_order
    return Block(index, start, size, True, blocks.parts, *more)


def block_struct(
    x: Array | jax.ShapeDtypeStruct, axis: int, size: int
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `size` rows of `x` along `axis`.

    It also says over which axes of a mesh the rows vary.
    """
    if x.shape[axis] < size:  # There are no examples at all.
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return jax.eval_shape(lambda x: lax.slice_in_dim(x, 0, size, 1, axis), x)
