"""A function and a few examples, to differentiate with JAX and with sites."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Inexact, PyTree, Real

from .oracle import cast


# Larger outputs are projected to this many numbers, as each of them is pulled back.
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
        one = [np.asarray(row)[0] for row in self.rows]
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


def make_subject(fun: Callable, model: PyTree, xs: PyTree) -> Subject:
    """A function of a model and one example, in double precision."""
    diff, static = eqx.partition(cast(model), eqx.is_inexact_array)
    leaves, treedef = jtu.tree_flatten(diff)
    rows, tree_of_rows = jtu.tree_flatten(cast(xs))

    def returned(leaves: list, rows: list) -> list[Array]:
        filled = eqx.combine(treedef.unflatten(leaves), static)
        out = fun(filled, tree_of_rows.unflatten(rows))
        return jtu.tree_leaves(eqx.filter(out, eqx.is_inexact_array))

    def outputs(leaves: list, rows: list) -> Array:
        parts = [
            part
            for x in returned(leaves, rows)
            for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))
        ]
        flat = jnp.concatenate([x.reshape(-1) for x in parts])
        if flat.size <= _MOST_OUTPUTS:
            return flat
        directions = jr.normal(jr.key(0), (_MOST_OUTPUTS, flat.size), flat.dtype)
        return directions @ flat / flat.size**0.5

    structs = jax.eval_shape(returned, leaves, [np.asarray(row)[0] for row in rows])
    is_scalar = [x.shape for x in structs] == [()] and structs[0].dtype.kind != "c"
    return Subject(outputs, leaves, rows, is_scalar)


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
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else float)
