"""How a batch is cut: contiguous blocks of rows, the last one perhaps shorter."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from .._base.mesh import is_explicit, mesh_axes, names_of, spec_of


class Blocks(eqx.Module):
    """The cut of `total` examples into contiguous blocks of `size`.

    Block `i` holds the examples `[i * size, (i + 1) * size)`; where `size` does not
    divide `total`, one shorter block of `remainder` examples comes last.

    Examples that are spread over a mesh lie in `parts` equal parts, one after the
    other. A block then has the same share of each of them, so that all devices work on
    every block and no example leaves its device: of each part, block `i` holds the
    examples `[i * size / parts, (i + 1) * size / parts)`.
    """

    total: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    parts: int = eqx.field(static=True, default=1)

    @property
    def num_full(self) -> int:
        return self.total // self.size

    @property
    def remainder(self) -> int:
        return self.total % self.size

    @property
    def num(self) -> int:
        return self.num_full + (self.remainder > 0)


class Block(eqx.Module):
    """One block of a [`eqxbatch.AbstractAccumulator`][]'s run.

    - `index`: the number of the block, counted from 0.
    - `start`: how many examples come before it.
    - `size`: how many examples it holds; known at trace time.
    - `is_remainder`: whether it is the shorter block at the end.
    - `parts`: as in [`eqxbatch.Blocks`][].
    """

    index: int | Int[Array, ""]
    start: int | Int[Array, ""]
    size: int = eqx.field(static=True)
    is_remainder: bool = eqx.field(static=True)
    parts: int = eqx.field(static=True)

    def take(self, array: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
        """The rows of this block, of an array over all examples."""
        if array.shape[axis] == self.size:
            return array
        if array.shape[axis] < self.size:  # There are no examples at all.
            shape = (*array.shape[:axis], self.size, *array.shape[axis + 1 :])
            return jnp.zeros(shape, array.dtype)
        if not are_split(array, axis, self.parts):
            return _rows(array, self.start, self.size, axis)
        array = split_parts(array, axis, self.parts)
        start, size = self.start // self.parts, self.size // self.parts
        return merge_parts(_rows(array, start, size, axis + 1), axis)


def _rows(
    array: Shaped[Array, "..."], start: int | Int[Array, ""], size: int, axis: int
) -> Shaped[Array, "..."]:
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, 1, axis)
    return lax.dynamic_slice_in_dim(array, start, size, axis)


def are_split(x: Shaped[Array, "..."], axis: int, parts: int) -> bool:
    """Whether rows along an axis are only to be cut out of each of their parts.

    That is so even of one part, where their type says that they are spread, though it
    is over one device.
    """
    names = names_of([*spec_of(x), *[None] * x.ndim][axis])
    sizes = [mesh_axes(jax.typeof(x))[name][0] for name in names]
    return parts > 1 or (bool(sizes) and max(sizes) == 1)


def split_parts(x: Shaped[Array, "..."], axis: int, parts: int) -> Shaped[Array, "..."]:
    """Splits an axis into one for the parts and one for the rows of each."""
    rows = x.shape[axis] // parts
    shape = (*x.shape[:axis], parts, rows, *x.shape[axis + 1 :])
    spec = [*spec_of(x), *[None] * x.ndim][: x.ndim]
    # JAX 0.7 asks for a sharding, if the rest has an axis of size one.
    return _reshape(x, shape, [*spec[: axis + 1], None, *spec[axis + 1 :]])


def merge_parts(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Merges an axis with the one behind it."""
    rows = x.shape[axis] * x.shape[axis + 1]
    shape = (*x.shape[:axis], rows, *x.shape[axis + 2 :])
    spec = [*spec_of(x), *[None] * x.ndim][: x.ndim]
    # If all parts are on one device, the type may say along which axis its rows are.
    merged = spec.pop(axis + 1) or spec[axis]
    return _reshape(x, shape, [*spec[:axis], merged, *spec[axis + 1 :]])


def _reshape(
    x: Shaped[Array, "..."], shape: tuple[int, ...], spec: list
) -> Shaped[Array, "..."]:
    if not is_explicit(x):
        return x.reshape(shape)
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return jnp.reshape(x, shape, out_sharding=sharding)


def full_block(blocks: Blocks, index: int | Int[Array, ""]) -> Block:
    """The full block number `index`."""
    start, size = index * blocks.size, blocks.size
    return Block(index, start, size, is_remainder=False, parts=blocks.parts)


def remainder_block(blocks: Blocks) -> Block:
    """The shorter block that comes after the full ones."""
    index, size = blocks.num_full, blocks.remainder
    start = index * blocks.size
    return Block(index, start, size, is_remainder=True, parts=blocks.parts)


def block_struct(
    x: Array | jax.ShapeDtypeStruct, axis: int, size: int
) -> jax.ShapeDtypeStruct:
    """What is known of `size` rows of `x` along `axis` at trace time.

    Besides shape and dtype, that is over which axes of a mesh it varies.
    """
    if x.shape[axis] < size:  # There are no examples at all.
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return jax.eval_shape(lambda x: lax.slice_in_dim(x, 0, size, 1, axis), x)
