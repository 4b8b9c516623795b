"""How a batch is cut: contiguous blocks of rows, the last one perhaps shorter."""

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array, Int, Shaped


class Blocks(eqx.Module):
    """The cut of `total` examples into contiguous blocks of `size`.

    Block `i` holds the examples `[i * size, (i + 1) * size)`; where `size` does not
    divide `total`, one shorter block of `remainder` examples comes last.
    """

    total: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

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
    - `start`: the first example that it holds.
    - `size`: how many examples it holds; known at trace time.
    - `is_remainder`: whether it is the shorter block at the end.
    """

    index: int | Int[Array, ""]
    start: int | Int[Array, ""]
    size: int = eqx.field(static=True)
    is_remainder: bool = eqx.field(static=True)

    def take(self, array: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
        """The rows `[start, start + size)` of an array over all examples."""
        if array.shape[axis] == self.size:
            return array
        if isinstance(self.start, int):
            return lax.slice_in_dim(array, self.start, self.start + self.size, 1, axis)
        return lax.dynamic_slice_in_dim(array, self.start, self.size, axis)


def full_block(blocks: Blocks, index: int | Int[Array, ""]) -> Block:
    """The full block number `index`."""
    return Block(index, index * blocks.size, blocks.size, is_remainder=False)


def remainder_block(blocks: Blocks) -> Block:
    """The shorter block that comes after the full ones."""
    start = blocks.num_full * blocks.size
    return Block(blocks.num_full, start, blocks.remainder, is_remainder=True)


def block_struct(x: Array, axis: int, size: int) -> jax.ShapeDtypeStruct:
    """What is known of `size` rows of `x` along `axis` at trace time.

    Besides shape and dtype, that is over which axes of a mesh it varies.
    """
    if x.shape[axis] < size:  # There are no examples at all.
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return jax.eval_shape(lambda x: lax.slice_in_dim(x, 0, size, 1, axis), x)
