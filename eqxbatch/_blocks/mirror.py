"""Transposes and mirror images of large matrices, in pieces that fit into a cache.

XLA for CPUs reads the columns of a large array one number at a time, each of them from
far away.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .apart import apart, true_of
from .mesh import vary, varying


_PIECE = 256


def transposed(x: Shaped[Array, "rows columns"]) -> Shaped[Array, "columns rows"]:
    """`x.T`."""
    if min(x.shape) <= _PIECE:
        return x.T
    return lax.platform_dependent(x, cpu=_transposed_in_pieces, default=jnp.transpose)


def _transposed_in_pieces(x: Array) -> Array:
    rows, columns = _starts(x.shape[0]), _starts(x.shape[1])
    places = jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"), -1).reshape(-1, 2)
    sizes = (_PIECE, _PIECE)

    def step(out: Array, at: Array) -> tuple[Array, None]:
        piece = lax.dynamic_slice(x, at, sizes)
        return lax.dynamic_update_slice(out, piece.T, at[::-1]), None

    zeros = vary(jnp.zeros(x.shape[::-1], x.dtype), varying(jax.typeof(x)))
    return lax.scan(step, zeros, places)[0]


def mirrored(x: Shaped[Array, "n n"]) -> Shaped[Array, "n n"]:
    """What is on and above the diagonal, and its mirror image below."""
    default = _mirrored_at_once
    return lax.platform_dependent(x, cpu=_mirrored_in_pieces, default=default)


def _mirrored_at_once(x: Array) -> Array:
    # An entry and its mirror image must not be computed apart, and rounded in two ways.
    x = lax.optimization_barrier(x)
    index = jnp.arange(x.shape[0])
    return jnp.where(index[:, None] <= index[None], x, x.T)


def _mirrored_in_pieces(x: Array) -> Array:
    n = x.shape[0]
    num = n // _PIECE
    rest = n - num * _PIECE
    corner = x.ravel()[:1]
    always = true_of(corner)

    def run(x: Array, places: Array, read: Callable[[Array, Array], Array]) -> Array:
        def step(x: Array, at: Array) -> tuple[Array, None]:
            # Read before anything is written, so that it is written in place.
            (piece,) = apart(lambda x, at: [read(x, at)], always)(x, at)
            return lax.dynamic_update_slice(x, piece, at[::-1]), None

        return lax.scan(step, x, places * _PIECE)[0] if places.size else x

    def diagonal(size: int) -> Callable[[Array, Array], Array]:
        index = jnp.arange(size)

        def read(x: Array, at: Array) -> Array:
            piece = lax.dynamic_slice(x, at, (size, size))
            return jnp.where(index[:, None] <= index[None], piece, piece.T)

        return read

    above = lambda size: lambda x, at: lax.dynamic_slice(x, at, (_PIECE, size)).T
    rows = jnp.arange(num)
    x = run(x, jnp.stack(jnp.triu_indices(num, 1), -1), above(_PIECE))
    x = run(x, jnp.stack([rows, rows], -1), diagonal(_PIECE))
    if rest:
        x = run(x, jnp.stack([rows, jnp.full_like(rows, num)], -1), above(rest))
        x = run(x, jnp.full((1, 2), num), diagonal(rest))
    return x


def _starts(num: int) -> Array:
    """Where pieces begin, so that all of them have the same size."""
    size = min(num, _PIECE)
    return jnp.minimum(jnp.arange(0, max(num, 1), max(size, 1)), num - size)
