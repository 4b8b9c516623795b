"""Derivatives of a model whose products ask for a precision."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eqxbatch import (
    EmpiricalNNGP,
    EmpiricalNTK,
    filter_batch_kernel,
    filter_ggn,
    filter_ggn_diagonal,
    filter_hessian,
    filter_hessian_diagonal,
    filter_kfac,
    filter_micro_grad,
)


class Net(eqx.Module):
    """A convolution, a layer at several positions, an embedding and a last layer."""

    kernel: jax.Array
    weight: jax.Array
    bias: jax.Array
    table: jax.Array
    last: jax.Array
    precision: lax.Precision | None = eqx.field(static=True)

    def __init__(self, precision):
        shapes = (4, 2, 3), (8, 4), (8,), (7, 8), (3, 8)
        rng = np.random.default_rng(0)
        arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
        self.kernel, self.weight, self.bias, self.table, self.last = arrays
        self.precision = precision

    def __call__(self, x):
        times = lambda x, y: jnp.matmul(x, y, precision=self.precision)
        convolve = lax.conv_general_dilated
        h = convolve(x[None], self.kernel, (1,), "SAME", precision=self.precision)
        h = jnp.tanh(times(jnp.tanh(h[0]).T, self.weight.T) + self.bias[None])
        h = h + self.table[jnp.arange(len(h)) % 7]
        return times(h.mean(0), self.last.T)


def loss(net, x, y):
    return -jax.nn.log_softmax(net(x))[y]


def outputs(net, x, y):
    return net(x)


def loss_of_outputs(out, x, y):
    return -jax.nn.log_softmax(out)[y]


ROWS = np.random.default_rng(1)
X = jnp.asarray(ROWS.normal(size=(5, 2, 5)), jnp.float32)
Y = jnp.arange(5) % 3

clip = {"microbatch_size": 2, "clip_norm": 1.0}
of_outputs = {"in_axes": 0, "microbatch_size": 2}
DERIVATIVES = {
    "clipped by sites": filter_micro_grad(loss, **clip, method="sites"),
    "clipped": filter_micro_grad(loss, **clip, method="materialise"),
    "hessian": filter_hessian(loss, in_axes=0, method="sites"),
    "hessian by products": filter_hessian(loss, in_axes=0, method="products"),
    "diagonal": filter_hessian_diagonal(loss, in_axes=0),
    "ggn": filter_ggn(outputs, loss_of_outputs, **of_outputs),
    "ggn diagonal": filter_ggn_diagonal(outputs, loss_of_outputs, **of_outputs),
    "kfac": filter_kfac(outputs, loss_of_outputs, **of_outputs, corrected=True),
    "ntk": lambda net, x, y: EmpiricalNTK(net)(x),
    "ntk in blocks": lambda net, x, y: EmpiricalNTK(net, block_size=2)(x, x[:3]),
    "ntk in a kernel": lambda net, x, y: filter_batch_kernel(
        EmpiricalNTK(net), block_size=2
    )(x),
    "ntk, diagonal": lambda net, x, y: EmpiricalNTK(net).diagonal(x),
    "nngp": lambda net, x, y: EmpiricalNNGP(net)(x),
}
