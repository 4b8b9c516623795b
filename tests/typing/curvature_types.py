# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Flat matrices are arrays; what is like a gradient has the type of the model."""

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
    KroneckerFactors,
    TaylorExpansion,
    Unravel,
)


def loss(model: MLP, x: Array) -> Array:
    return model(x) ** 2


def loss_with_aux(model: MLP, x: Array) -> tuple[Array, Array]:
    return model(x) ** 2, x


def outputs(model: MLP, x: Array) -> Array:
    return jnp.stack([model(x), model(2 * x)])


def two_outputs(model: MLP, x: Array) -> dict[str, Array]:
    return {"a": model(x), "b": model(2 * x)}


def outputs_with_aux(model: MLP, x: Array) -> tuple[Array, Array]:
    return outputs(model, x), x


def loss_of_outputs(out: Array, x: Array) -> Array:
    return jnp.sum(out**2)


model = MLP(3, "scalar", 2, 1, jnp.tanh, key=jax.random.key(0))
x, xs = jnp.ones(3), jnp.ones((4, 3))


# Jacobians.
assert_type(filter_jacobian(outputs, mode="rev")(model, x), MLP)
assert_type(filter_jacobian(two_outputs)(model, x), Any)
flat = filter_jacobian(outputs, flat=True, block_size=2)
assert_type(flat(model, x), tuple[Array, Unravel[MLP]])
flat = filter_jacobian(two_outputs, flat=True)
assert_type(flat(model, x), tuple[dict[str, Array], Unravel[MLP]])
aux = filter_jacobian(outputs_with_aux, has_aux=True)
assert_type(aux(model, x), tuple[MLP, Array])
flat_aux = filter_jacobian(outputs_with_aux, has_aux=True, flat=True)
assert_type(flat_aux(model, x), tuple[tuple[Array, Unravel[MLP]], Array])


@filter_jacobian(mode="fwd")
def squares(w: Array) -> Array:
    return w**2


assert_type(squares(x), Array)


@filter_jacobian(flat=True)
def cubes(w: Array) -> Array:
    return w**3


assert_type(cubes(x), tuple[Array, Unravel[Array]])


def two_outputs_with_aux(model: MLP, x: Array) -> tuple[dict[str, Array], Array]:
    return two_outputs(model, x), x


aux = filter_jacobian(two_outputs_with_aux, has_aux=True)
assert_type(aux(model, x), tuple[Any, Array])
assert_type(filter_jacobian(block_size=2)(two_outputs)(model, x), Any)
decorator = filter_jacobian(has_aux=True)
assert_type(decorator(outputs_with_aux)(model, x), tuple[MLP, Array])
assert_type(decorator(two_outputs_with_aux)(model, x), tuple[Any, Array])
flat_aux = filter_jacobian(has_aux=True, flat=True)(outputs_with_aux)
assert_type(flat_aux(model, x), tuple[tuple[Array, Unravel[MLP]], Array])


# Hessians.
assert_type(filter_hessian(loss)(model, x), Any)
flat = filter_hessian(loss, in_axes=0, flat=True, accumulator=eqxbatch.Sum())
matrix, unravel = flat(model, xs)
assert_type(matrix, Array)
assert_type(unravel(matrix[0]), MLP)
aux = filter_hessian(loss_with_aux, has_aux=True)
assert_type(aux(model, x), tuple[Any, Array])
flat_aux = filter_hessian(loss_with_aux, has_aux=True, flat=True)
assert_type(flat_aux(model, x), tuple[tuple[Array, Unravel[MLP]], Array])


@filter_hessian(flat=True, microbatch_size=2, in_axes=0)
def of_examples(model: MLP, x: Array) -> Array:
    return model(x) ** 2


assert_type(of_examples(model, xs), tuple[Array, Unravel[MLP]])


@filter_hessian
def of_one(w: Array) -> Array:
    return jnp.sum(w**3)


assert_type(of_one(x), Any)
assert_type(filter_hessian(num_blocks=2)(loss)(model, x), Any)
aux = filter_hessian(has_aux=True)(loss_with_aux)
assert_type(aux(model, x), tuple[Any, Array])


# Their diagonals and blocks.
assert_type(filter_hessian_diagonal(loss)(model, x), MLP)
flat = filter_hessian_diagonal(loss, flat=True)
assert_type(flat(model, x), tuple[Array, Unravel[MLP]])
aux = filter_hessian_diagonal(loss_with_aux, has_aux=True)
assert_type(aux(model, x), tuple[MLP, Array])
flat_aux = filter_hessian_diagonal(loss_with_aux, has_aux=True, flat=True)
assert_type(flat_aux(model, x), tuple[tuple[Array, Unravel[MLP]], Array])
assert_type(filter_hessian_diagonal(mode="fwd")(loss)(model, x), MLP)
aux = filter_hessian_diagonal(has_aux=True)(loss_with_aux)
assert_type(aux(model, x), tuple[MLP, Array])
assert_type(filter_hessian_blocks(loss, flat=True)(model, x), Any)
aux = filter_hessian_blocks(loss_with_aux, has_aux=True)
assert_type(aux(model, x), tuple[Any, Array])


@filter_hessian_diagonal(has_aux=True, flat=True)
def diagonal(model: MLP, x: Array) -> tuple[Array, Array]:
    return model(x) ** 2, x


assert_type(diagonal(model, x), tuple[tuple[Array, Unravel[MLP]], Array])


# A setting that is known at run time only.
def either(flat: bool) -> None:
    found = filter_hessian_diagonal(loss, flat=flat)
    assert_type(found(model, x), MLP | tuple[Array, Unravel[MLP]])


either(True)


# Gauss-Newton matrices.
assert_type(filter_ggn(outputs, loss_of_outputs)(model, x), Any)
flat = filter_ggn(outputs, loss_of_outputs, flat=True, in_axes=0)
assert_type(flat(model, xs), tuple[Array, Unravel[MLP]])
assert_type(filter_ggn(outputs, lambda out, x: jnp.sum(out**2))(model, x), Any)


@filter_ggn(loss=loss_of_outputs, flat=True)
def ggn(model: MLP, x: Array) -> Array:
    return outputs(model, x)


assert_type(ggn(model, x), tuple[Array, Unravel[MLP]])


assert_type(filter_ggn(loss=loss_of_outputs)(outputs)(model, x), Any)


# Products.
vector = jax.tree.map(lambda leaf: leaf, model)
assert_type(filter_hvp(loss)(model, vector, x), MLP)
assert_type(filter_hvp(loss, in_axes=0)(model, vector, x=xs), MLP)
aux = filter_hvp(loss_with_aux, has_aux=True)
assert_type(aux(model, vector, x), tuple[MLP, Array])
aux = filter_hvp(has_aux=True)(loss_with_aux)
assert_type(aux(model, vector, x), tuple[MLP, Array])
assert_type(filter_ggn_diagonal(outputs, loss_of_outputs)(model, x), MLP)
flat_diagonal = filter_ggn_diagonal(outputs, loss_of_outputs, flat=True)
assert_type(flat_diagonal(model, x), tuple[Array, Unravel[MLP]])
assert_type(filter_ggn_diagonal(loss=loss_of_outputs)(outputs)(model, x), MLP)
assert_type(
    filter_ggn_diagonal(loss=loss_of_outputs, flat=True)(outputs)(model, x),
    tuple[Array, Unravel[MLP]],
)
assert_type(filter_ggn_blocks(outputs, loss_of_outputs)(model, x), Any)
kfac = filter_kfac(outputs, loss_of_outputs, in_axes=0)
assert_type(kfac(model, xs), KroneckerFactors)
kfac = filter_kfac(loss=loss_of_outputs, in_axes=0)(outputs)
assert_type(kfac(model, xs), KroneckerFactors)
assert_type(filter_ggn_blocks(loss=loss_of_outputs, flat=True)(outputs)(model, x), Any)


assert_type(filter_ggnvp(outputs, loss_of_outputs)(model, vector, x), MLP)


@filter_hvp(microbatch_size=2, in_axes=0)
def product(w: Array, x: Array) -> Array:
    return jnp.dot(w, x) ** 2


assert_type(product(x, x, xs), Array)


@filter_ggnvp(loss=loss_of_outputs)
def ggn_product(model: MLP, x: Array) -> Array:
    return outputs(model, x)


assert_type(ggn_product(model, vector, x), MLP)


# Expansions return what the model returns.
assert_type(filter_linearize(model), TaylorExpansion[Array])
assert_type(filter_taylor_expand(model, degree=2)(model, x), Array)


# A step is like the model; with momentum, the previous one comes second.
assert_type(filter_gauss_newton_step(outputs, damping=0.1)(model, xs), MLP)
assert_type(filter_gauss_newton_step(damping=0.1)(outputs)(model, xs), MLP)
spring = filter_gauss_newton_step(outputs, damping=0.1, momentum=0.9)
assert_type(spring(model, None, xs), MLP)
