# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What is like a gradient has the type of the model; matrices can be anything."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
from equinox.nn import MLP
from jaxtyping import Array

import eqxbatch
from eqxbatch import (
    filter_gauss_newton_step,
    filter_ggn,
    filter_ggn_blocks,
    filter_ggn_diagonal,
    filter_ggnvp,
    filter_hessian,
    filter_hessian_blocks,
    filter_hessian_diagonal,
    filter_hvp,
    filter_jacobian,
    filter_kfac,
    filter_linearize,
    filter_taylor_expand,
)
from eqxbatch.results import KroneckerFactors, TaylorExpansion


def loss(model: MLP, x: Array) -> Array:
    return model(x) ** 2


def loss_with_aux(model: MLP, x: Array) -> tuple[Array, Array]:
    return model(x) ** 2, x


def outputs(model: MLP, x: Array) -> Array:
    return jnp.stack([model(x), model(2 * x)])


def loss_of_outputs(out: Array, x: Array) -> Array:
    return jnp.sum(out**2)


model = MLP(3, "scalar", 2, 1, jnp.tanh, key=jax.random.key(0))
x, xs = jnp.ones(3), jnp.ones((4, 3))


# Jacobians.
assert_type(filter_jacobian(outputs, mode="rev")(model, x), Any)
assert_type(filter_jacobian(block_size=2)(outputs)(model, x), Any)


# Hessians.
assert_type(filter_hessian(loss)(model, x), Any)
matrix, unravel = filter_hessian(
    loss, in_axes=0, flat=True, accumulator=eqxbatch.Sum()
)(model, xs)
assert_type(unravel(matrix[0]), Any)


@filter_hessian
def of_one(w: Array) -> Array:
    return jnp.sum(w**3)


assert_type(of_one(x), Any)
assert_type(filter_hessian_blocks(loss, flat=True)(model, x), Any)


# Their diagonals.
assert_type(filter_hessian_diagonal(loss)(model, x), MLP)
assert_type(filter_hessian_diagonal(mode="fwd")(loss)(model, x), MLP)
assert_type(filter_hessian_diagonal(loss, flat=True)(model, x), Any)
assert_type(filter_hessian_diagonal(loss_with_aux, has_aux=True)(model, x), Any)


@filter_hessian_diagonal(has_aux=True, flat=True)
def diagonal(model: MLP, x: Array) -> tuple[Array, Array]:
    return model(x) ** 2, x


assert_type(diagonal(model, x), Any)


# Gauss-Newton matrices.
assert_type(filter_ggn(outputs, loss_of_outputs)(model, xs), Any)
assert_type(filter_ggn(outputs, lambda out, x: jnp.sum(out**2))(model, xs), Any)
assert_type(filter_ggn(loss=loss_of_outputs)(outputs)(model, xs), Any)
assert_type(filter_ggn_diagonal(outputs, loss_of_outputs)(model, xs), MLP)
assert_type(filter_ggn_diagonal(outputs, loss_of_outputs, flat=True)(model, xs), Any)
assert_type(filter_ggn_diagonal(loss=loss_of_outputs)(outputs)(model, xs), MLP)
assert_type(filter_ggn_blocks(outputs, loss_of_outputs)(model, xs), Any)
kfac = filter_kfac(outputs, loss_of_outputs)
assert_type(kfac(model, xs), KroneckerFactors)
kfac = filter_kfac(loss=loss_of_outputs)(outputs)
assert_type(kfac(model, xs), KroneckerFactors)


# Products.
vector = jax.tree.map(lambda leaf: leaf, model)
assert_type(filter_hvp(loss)(model, vector, x), MLP)
assert_type(filter_hvp(loss, in_axes=0)(model, vector, x=xs), MLP)
assert_type(filter_hvp(loss_with_aux, has_aux=True)(model, vector, x), Any)
assert_type(filter_hvp(has_aux=True)(loss_with_aux)(model, vector, x), Any)
assert_type(filter_ggnvp(outputs, loss_of_outputs)(model, vector, xs), MLP)


@filter_hvp(microbatch_size=2, in_axes=0)
def product(w: Array, x: Array) -> Array:
    return jnp.dot(w, x) ** 2


assert_type(product(x, x, xs), Array)


@filter_ggnvp(loss=loss_of_outputs)
def ggn_product(model: MLP, x: Array) -> Array:
    return outputs(model, x)


assert_type(ggn_product(model, vector, xs), MLP)


# Expansions return what the model returns.
assert_type(filter_linearize(model), TaylorExpansion[Array])
assert_type(filter_taylor_expand(model, degree=2)(model, x), Array)


# A step is like the model. With momentum, the previous one comes second.
assert_type(filter_gauss_newton_step(outputs, damping=0.1)(model, xs), MLP)
assert_type(filter_gauss_newton_step(damping=0.1)(outputs)(model, xs), MLP)
spring = filter_gauss_newton_step(outputs, damping=0.1, momentum=0.9)
assert_type(spring(model, None, xs), Any)
terms = filter_gauss_newton_step((outputs, outputs), damping=0.1)
assert_type(terms(model, xs, xs), Any)
