"""Kernel functions that several test modules use."""

import equinox as eqx
import jax
import jax.numpy as jnp


def rbf(x1, x2=None, scale=1.0):
    x2 = x1 if x2 is None else x2
    differences = x1[:, None, :] - x2[None, :, :]
    return jnp.exp(-jnp.sum(differences**2, axis=-1) / scale)


def white(x1, x2=None):
    """A kernel that is another one without `x2`."""
    noise = jnp.eye(len(x1)) if x2 is None else 0.0
    return rbf(x1, x2) + noise


def lopsided(x1, x2=None):
    x2 = x1 if x2 is None else x2
    return jnp.sin(x1[:, None, 0] + 2 * x2[None, :, 1])


class Structured(eqx.Module):
    """A module with static leaves that returns a PyTree."""

    scale: jax.Array
    power: int = eqx.field(static=True)
    name: str = "structured"
    nothing: None = None

    def __call__(self, x1, x2=None, *, mask=(None, None)):
        x2 = x1 if x2 is None else x2
        k = (self.scale * (x1["a"] @ x2["a"].T)) ** self.power
        rows = jnp.sum(x1["b"], axis=1)
        columns = jnp.sum(x2["b"], axis=1)
        if mask[0] is not None:
            k = k * mask[0][:, None] * mask[1][None, :]
        return {
            "k": k,
            "behind": jnp.stack([k, -k]),
            "swapped": k.T,
            "rows": rows,
            "columns": columns,
            "both": (jnp.outer(rows, columns), self.name),
        }


AXES = {
    "k": (0, 1),
    "behind": (-2, 2),
    "swapped": (1, 0),
    "rows": (0, None),
    "columns": (None, 0),
    "both": (0, 1),
}
