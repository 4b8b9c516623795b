# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Programs that are wrong. Type checkers refuse them; they are not run."""

import jax
import jax.numpy as jnp
from equinox.nn import MLP
from jaxtyping import Array

import eqxbatch
from eqxbatch import (
    EmpiricalNTK,
    filter_batch_kernel,
    filter_ggn,
    filter_grid_vmap,
    filter_hessian,
    filter_hvp,
    filter_jacobian,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    filter_microbatch,
    grid,
    Sum,
)


def loss(model: MLP, x: Array, y: Array) -> Array:
    return jnp.sum((model(x) - y) ** 2)


def loss_with_aux(model: MLP, x: Array) -> tuple[Array, str]:
    return jnp.sum(model(x)), "aux"


def outputs(model: MLP, x: Array) -> Array:
    return model(x)


def scaled(x: Array, scale: float) -> Array:
    return scale * x


def kernel(x1: Array, x2: Array, scale: float = 1.0) -> Array:
    return scale * x1 @ x2.T


model = MLP(3, "scalar", 4, 1, key=jax.random.key(0))
x, y = jnp.ones((5, 3)), jnp.zeros(5)


# Arguments are left out, too many, of another type, or of another name.
grad = filter_micro_grad(loss, microbatch_size=2)
grad(model)  # pyright: ignore[reportCallIssue]
grad(model, x)  # pyright: ignore[reportCallIssue]
grad("model", x, y)  # pyright: ignore[reportArgumentType]
grad(model, x, y, y)  # pyright: ignore[reportCallIssue]
grad(model, x, z=y)  # pyright: ignore[reportCallIssue]
filter_micro_vmap(scaled)(x)  # pyright: ignore[reportCallIssue]
filter_micro_vmap(scaled)(x, "2")  # pyright: ignore[reportArgumentType]
filter_microbatch(scaled, accumulator=Sum())(x, scales=2.0)  # pyright: ignore[reportCallIssue]
filter_microbatch(scaled)  # pyright: ignore[reportCallIssue]
filter_grid_vmap(scaled, in_axes=(grid("i"), None))(x)  # pyright: ignore[reportCallIssue]
filter_hessian(loss)(x, x, y)  # pyright: ignore[reportArgumentType]
filter_jacobian(outputs)(model)  # pyright: ignore[reportCallIssue]
filter_hvp(loss)(model, x, y)  # pyright: ignore[reportCallIssue]
filter_hvp(loss)(model, x, x, y)  # pyright: ignore[reportArgumentType]
filter_batch_kernel(kernel, block_size=2)("x")  # pyright: ignore[reportArgumentType]
filter_batch_kernel(kernel, block_size=2)(x, x, "scale")  # pyright: ignore[reportArgumentType]


# The same of decorators.
@filter_micro_grad(microbatch_size=2, return_norms=True)
def watched(w: Array, x: Array) -> Array:
    return jnp.dot(w, x)


watched(x[0])  # pyright: ignore[reportCallIssue]
watched("w", x)  # pyright: ignore[reportArgumentType]


# Results are taken for something else.
number: int = filter_micro_vmap(scaled)(x, 2.0)  # pyright: ignore[reportAssignmentType]
gradient: Array = grad(model, x, y)  # pyright: ignore[reportAssignmentType]
weights = grad(model, x, y).weights  # pyright: ignore[reportAttributeAccessIssue]
value, gradient_of_model, aux = filter_micro_value_and_grad(loss)(model, x, y)  # pyright: ignore[reportAssignmentType]


# Settings of another type, or of another name.
filter_micro_vmap(scaled, microbatch_size=2.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_micro_vmap(microbatch_size=[2])  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_micro_grad(loss, microbatch_size=2.5)  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_micro_grad(loss, microbatch_sizes=2)  # pyright: ignore[reportCallIssue]
filter_micro_grad(loss, return_norms="yes")  # pyright: ignore[reportArgumentType]
filter_micro_grad(loss, method="site")  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_micro_grad(metrics=1.0)  # pyright: ignore[reportArgumentType]
filter_jacobian(outputs, mode="reverse")  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_jacobian(outputs, flat="no")  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_hessian(loss, accumulator=eqxbatch.Max())  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_hessian(loss, num_blocks=2.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_grid_vmap(scaled)  # pyright: ignore[reportCallIssue]
filter_batch_kernel(kernel, block_size=2.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_batch_kernel(kernel, block_size=2, store=3)  # pyright: ignore[reportArgumentType]


EmpiricalNTK(model, block_size=2.0)  # pyright: ignore[reportArgumentType]
EmpiricalNTK(model, trace_axes="all")  # pyright: ignore[reportArgumentType]


# Functions that do not fit.
EmpiricalNTK(x)  # pyright: ignore[reportArgumentType]
filter_micro_vmap(2)  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_ggn(outputs, jnp.sum, fisher="type-1")  # pyright: ignore[reportArgumentType, reportCallIssue]
filter_ggn(outputs, lambda out: "loss")  # pyright: ignore[reportArgumentType, reportCallIssue]
