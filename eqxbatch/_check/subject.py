"""A function and a few examples, to differentiate with JAX and with sites."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Inexact, PyTree, Real

from .._base.dtypes import as_real, common_dtype, is_complex
from .._batch.batch import Batch


# The number of examples, and the number of outputs. Larger outputs are projected to
# this many numbers, because each of them is pulled back.
NUM_EXAMPLES = 3


_MOST_OUTPUTS = 8


@dataclasses.dataclass(frozen=True)
class Subject:
    """The function whose derivatives are compared.

    - `outputs`: takes leaves and the rows of one example, and returns a real vector.
    - `leaves`: the differentiated leaves.
    - `rows`: arrays with the examples along axis 0, at least one array.
    - `is_scalar`: whether the function itself returns a real scalar.
    """

    outputs: Callable[[list, list], Real[Array, " k"]]
    leaves: list[Inexact[Array, "..."]]
    rows: list[Array]
    is_scalar: bool

    @property
    def num(self) -> int:
        return self.rows[0].shape[0]

    @property
    def num_outputs(self) -> int:
        one = [row[0] for row in self.rows]
        return jax.eval_shape(self.outputs, self.leaves, one).size

    def scalar(self, outs: Real[Array, " k"]) -> Real[Array, ""]:
        """The scalar function of the outputs that has the gradients and Hessians."""
        if self.is_scalar:
            return outs[0]
        weights = jnp.linspace(0.5, 1.5, outs.size, dtype=outs.dtype)
        return jnp.sum(weights * outs) + jnp.sum(outs**2) / 2

    def value(self, leaves: list, rows: list) -> Real[Array, ""]:
        """The scalar of one example."""
        return self.scalar(self.outputs(leaves, rows))

    def loss(self, outs: Real[Array, " k"]) -> Real[Array, ""]:
        """The loss of the Gauss-Newton matrix, convex in the outputs."""
        weights = jnp.linspace(0.5, 1.5, outs.size, dtype=outs.dtype)
        return (jnp.sum(weights * outs**2) + jnp.sum(outs) ** 2) / 2


@dataclasses.dataclass(frozen=True)
class Call:
    """A function and its arguments.

    `batch` splits all arguments; `diff` and `nondiff` are the parts of the first one.
    """

    fun: Callable
    diff: PyTree
    nondiff: PyTree
    batch: Batch

    @property
    def leaves(self) -> list:
        return jtu.tree_leaves(self.diff)

    @property
    def rows(self) -> list[Array]:
        """Some examples. The last array is for functions without batched arguments."""
        num = self.batch.total() if self.batch.arrays else 1
        moved = [
            jnp.moveaxis(x, axis, 0)[:NUM_EXAMPLES]
            for x, axis in zip(self.batch.arrays, self.batch.axes, strict=True)
        ]
        return [*moved, jnp.zeros(min(num, NUM_EXAMPLES))]

    def returned(self, leaves: list, rows: list) -> list[Array]:
        """The arrays of inexact dtypes that the function returns for one example."""
        (_, *args), kwargs = self.batch.arguments(rows[:-1])
        diff = jtu.tree_unflatten(jtu.tree_structure(self.diff), leaves)
        out = self.fun(eqx.combine(diff, self.nondiff), *args, **kwargs)
        return jtu.tree_leaves(eqx.filter(out, eqx.is_inexact_array))

    def widened(self) -> "Call":
        """The call in double precision, which must be enabled."""
        names = ("diff", "nondiff", "batch")
        wide = {name: _widened(getattr(self, name)) for name in names}
        return dataclasses.replace(self, **wide)

    def refusal(self) -> str | None:
        """Why the function cannot be differentiated as it is called; None if it can.

        This only traces the function. If it fails here, it is an error of the function,
        of any type.
        """
        one = [row[0] for row in self.rows]

        def gradients(leaves: list) -> Any:
            outs, pull = jax.vjp(lambda leaves: self.returned(leaves, one), leaves)
            return pull(outs)

        try:
            jax.eval_shape(gradients, self.leaves)
        except Exception as e:
            name, lines = type(e).__name__, str(e).strip().splitlines()
            return f"{name}: {lines[0]}" if lines else name
        return None


def make_subject(call: Call) -> Subject:
    leaves, rows = call.leaves, call.rows
    structs = jax.eval_shape(call.returned, leaves, [row[0] for row in rows])
    if not sum(struct.size for struct in structs):
        raise ValueError(
            "With `check=True`, `fun` must return an array of an inexact dtype, as "
            "only these have a derivative; it returned none. Return what is to be "
            "differentiated, or leave out `check`."
        )

    def outputs(leaves: list, rows: list) -> Array:
        parts = jtu.tree_leaves(as_real(call.returned(leaves, rows)))
        dtype = common_dtype(*(x.dtype for x in parts))
        flat = jnp.concatenate([x.reshape(-1).astype(dtype) for x in parts])
        if flat.size <= _MOST_OUTPUTS:
            return flat
        directions = jr.normal(jr.key(0), (_MOST_OUTPUTS, flat.size), dtype)
        return directions @ flat / flat.size**0.5

    is_scalar = [x.shape for x in structs] == [()] and not is_complex(structs[0])
    return Subject(outputs, leaves, rows, is_scalar)


def _widened(tree: PyTree) -> PyTree:
    def widen(x: Any) -> Any:
        if not eqx.is_inexact_array(x):
            return x
        return x.astype(jnp.complex128 if is_complex(x) else jnp.float64)

    return jtu.tree_map(widen, tree)


def double_precision() -> contextlib.AbstractContextManager:
    """Enables 64-bit types."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    # Its location in older versions.
    return importlib.import_module("jax.experimental").enable_x64(True)


def largest_error(found: Any, expected: Any, scale: float | None = None) -> float:
    """The largest difference, relative to a scale or to the largest expected entry."""
    a, b = as_numpy(found), as_numpy(expected)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(a - b))
    largest = float(np.max(difference, initial=0.0))
    if not np.isfinite(largest):
        return float("inf")
    return largest / (scale or largest_entry(b) or 1.0)


def largest_entry(x: Any) -> float:
    """The largest finite absolute value in an array."""
    x = np.abs(as_numpy(x))
    return float(np.max(x, initial=0.0, where=np.isfinite(x)))


def as_numpy(x: Any) -> np.ndarray:
    """Converts an array to NumPy, in double precision."""
    if is_complex(x):
        return np.asarray(x, np.complex128)
    return np.asarray(jnp.asarray(x).astype(jnp.float32) if _is_small(x) else x, float)


def _is_small(x: Any) -> bool:
    # NumPy has no bfloat16.
    return jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4
