"""What is said where a function of a batch is taken for one of an example, or not.

Both mistakes end in an error of JAX's about shapes, deep in the user's function. Which
of them it is, if any, is found by giving the function what it might have been meant
for: this is done only after it has failed, and traces it without running it.
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
    """Raises `ValueError` where a function fails that works for the other of the two.

    `call(rows)` calls it with these in the place of the batched arrays. `given` is what
    it is given here, `rows` if that is a microbatch, and `remedy` what to do if it
    should have been the other. Other errors are as they are.
    """
    try:
        yield
    except Exception as e:
        if not batch.arrays or not _works(call, batch, given):
            raise
        other = "a whole batch" if given == "example" else "a single example"
        what = "one example" if given == "example" else "a microbatch"
        raise ValueError(
            f"`fun` is called with {what}, {_shapes(batch, given, rows)}, and raises "
            f"{_first_line(e)} It works for {other}. {remedy}"
        ) from e


def _first_line(e: Exception) -> str:
    text = (str(e).strip().splitlines() or [""])[0].strip()
    text = f"{type(e).__name__}: {text}" if text else type(e).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


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
    """The batched arrays by name, with the shapes that the function was given."""
    if given == "example":
        pairs = zip(batch.arrays, batch.axes, strict=True)
        rows = [_without(x, axis) for x, axis in pairs]
    shapes = [x.shape for x in rows or batch.arrays]
    pairs = zip(batch.names, shapes, strict=True)
    return ", ".join(f"{name} of shape {shape}" for name, shape in pairs)
