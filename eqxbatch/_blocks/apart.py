"""Keeping XLA from merging what is faster, or more exact, when it is not."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Bool, Inexact

from .mesh import zeros_like


def apart(
    run: Callable[..., list[Array]], always: Bool[Array, ""]
) -> Callable[..., list[Array]]:
    """`run`, in a program of its own as far as XLA for CPUs can tell.

    It would merge what computes a block with what writes it to its place, and again
    with what writes the mirror image: the block is then computed twice, rounded in two
    ways, and each time on one core, as writing in place is. It does not look through a
    condition, even one that is `always` true.
    """

    def run_apart(*args: Any) -> list:
        structs = jax.eval_shape(run, *args)
        skip = lambda *_: jtu.tree_map(zeros_like, structs)
        # Where the program is compiled for another device, it may see that it is true.
        is_true = lambda x: x | True
        known = lax.platform_dependent(always, cpu=lambda x: x, default=is_true)
        return lax.cond(known, run, skip, *args)

    return run_apart


def settled(arrays: list[Array], always: Bool[Array, ""]) -> list[Array]:
    """`arrays`, all written before anything is made of them.

    XLA for CPUs writes rows of an array in place, and reads what they are made of from
    the same memory as it does so. It sees to it that nothing is read after it was
    overwritten, but not where the array is then reshaped:
    `lax.dynamic_update_slice(x, y, at)[None]` is wrong if `y` permutes a slice of `x`
    (https://github.com/openxla/xla/issues/49176).
    """
    is_number = [not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays]
    numbers = list(itertools.compress(arrays, is_number))
    numbers = apart(lambda *numbers: list(numbers), always)(*numbers)
    return [
        numbers.pop(0) if is_one else x
        for x, is_one in zip(arrays, is_number, strict=True)
    ]


def true_of(x: Inexact[Array, "..."]) -> Bool[Array, ""]:
    """True, which only shows when it runs."""
    return jnp.all((x == x) | (x != x))
