"""What a case is, and what several files of cases use."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ..helpers import drawn


class Case(NamedTuple):
    """One wrong call of the public `name`."""

    name: str
    call: Callable[[], object]
    error: type[Exception]
    match: str


w = jnp.ones(2)
x = jnp.ones((5, 2))
y = jnp.ones(5)
key = jax.random.key(0)
model = drawn(eqx.nn.MLP, 2, 3, 4, 1, key=key)


def loss(w, x):
    return jnp.dot(w, x) ** 2


def linear(x1, x2):
    return x1 @ x2.T
