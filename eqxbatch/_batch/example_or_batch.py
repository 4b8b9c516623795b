"""Errors for functions of a batch used as functions of one example, or vice versa.

Either mistake ends in a shape error of JAX, deep inside the user's function. To find
out which one it is, the function is traced again with the other kind of argument. This
happens only after it has failed, and nothing is run.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import equinox as eqx
import jax

from .cut import Batch


@contextlib.contextmanager
def told_apart(
    call: Callable[[list], Any],
    batch: Batch,
    given: Literal["example", "microbatch"],
    remedy: str,
    rows: list | None = None,
) -> Iterator[None]:
    """Adds a note if a function fails here, but works for the other kind.

    The two kinds are one example and a microbatch. `call(rows)` calls the function with
    these as the batched arrays. `given` is the kind that it is called with here, `rows`
    are the arrays of a microbatch, and `remedy` says what to do if the other kind was
    meant. The exception is still the user's.
    """
    try:
        yield
    except Exception as e:
        if batch.arrays and _works(call, batch, given):
            other = "a whole batch" if given == "example" else "a single example"
            what = "one example" if given == "example" else "a microbatch"
            e.add_note(
                f"`fun` is called with {what}, {_shapes(batch, given, rows)}, and "
                f"raises this error. It works for {other}. {remedy}"
            )
        raise


def _works(call: Callable[[list], Any], batch: Batch, given: str) -> bool:
    rows = batch.arrays
    if given == "microbatch":
        pairs = zip(rows, batch.axes, strict=True)
        rows = [_without(x, axis) for x, axis in pairs]
    try:
        eqx.filter_eval_shape(call, rows)
    except Exception:
        return False
    return True


def _without(x: Any, axis: int) -> jax.ShapeDtypeStruct:
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _shapes(batch: Batch, given: str, rows: list | None) -> str:
    """Names and shapes of the batched arrays, as the function was given them."""
    if given == "example":
        pairs = zip(batch.arrays, batch.axes, strict=True)
        rows = [_without(x, axis) for x, axis in pairs]
    shapes = [x.shape for x in rows or batch.arrays]
    pairs = zip(batch.names, shapes, strict=True)
    return ", ".join(f"{name} of shape {shape}" for name, shape in pairs)
