# pyright: reportUnnecessaryTypeIgnoreComment=true
"""A kernel function in blocks takes what it took before, but can leave out `x2`."""

from typing import Any, assert_type, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import eqxbatch
from eqxbatch import (
    EmpiricalKernel,
    EmpiricalNNGP,
    EmpiricalNTK,
    filter_batch_kernel,
    ProbedNTK,
)
from eqxbatch.results import KernelEstimate


def linear(
    x1: Float[Array, "n1 d"], x2: Float[Array, "n2 d"], scale: float = 1.0
) -> Float[Array, "n1 n2"]:
    return scale * x1 @ x2.T


class Both(NamedTuple):
    inner: Array
    distance: Array


x, y = jnp.ones((5, 3)), jnp.ones((4, 3))


in_blocks = filter_batch_kernel(linear, block_size=2, symmetric=True)
assert_type(in_blocks(x), Array)
assert_type(in_blocks(x, y), Array)
assert_type(in_blocks(x, y, 2.0), Array)
assert_type(in_blocks(x, scale=2.0), Array)


@filter_batch_kernel(block_size=(2, 3))
def both(x1: Array, x2: Array | None = None) -> Both:
    x2 = x1 if x2 is None else x2
    return Both(x1 @ x2.T, jnp.sum((x1[:, None] - x2) ** 2, axis=-1))


assert_type(both(x), Both)
assert_type(both(x, y), Both)


# What a store or a reduction returns depends on the kernel.
host = filter_batch_kernel(linear, block_size=2, store=eqxbatch.HostStore())
assert_type(host(x), Any)
sums = filter_batch_kernel(linear, block_size=2, reduce=eqxbatch.FrobeniusNorm())
assert_type(sums(x, y), Any)


@filter_batch_kernel(block_size=2, store=eqxbatch.HostStore())
def on_host(x1: Array, x2: Array) -> Array:
    return x1 @ x2.T


assert_type(on_host(x, y), Any)


# The kernel of a model depends on settings, such as `store`, `reduce` and `get`.
class TwoHeads(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x: Array) -> dict[str, Array]:
        return {"first": self.first(x), "second": self.second(x)}


key = jax.random.key(0)
layer = eqx.nn.Linear(3, 2, key=key)
heads = TwoHeads(eqx.nn.Linear(3, 2, key=key), eqx.nn.Linear(3, 1, key=key))
assert_type(EmpiricalNTK(layer, block_size=2)(x, y), Any)
assert_type(EmpiricalNTK(heads, trace_axes=())(x), Any)
assert_type(EmpiricalNNGP(layer)(x), Any)
assert_type(EmpiricalKernel(layer)(x, get="ntk"), Any)
assert_type(EmpiricalKernel(layer)(x, None, "nngp"), Any)
assert_type(EmpiricalKernel(layer)(x).nngp, Any)
assert_type(EmpiricalKernel(layer)(x, get=("ntk",)), Any)
assert_type(EmpiricalNTK(layer, block_size=2, store=eqxbatch.HostStore())(x), Any)
assert_type(EmpiricalNTK(layer, reduce=eqxbatch.FrobeniusNorm())(x), Any)
assert_type(ProbedNTK(layer, num_probes=2, key=key)(x), KernelEstimate)
assert_type(filter_batch_kernel(EmpiricalNTK(layer), block_size=2)(x, y), Any)
