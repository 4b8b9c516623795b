# pyright: reportUnnecessaryTypeIgnoreComment=true
"""A gradient has the type of the model that it is of."""

from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox.nn import MLP
from jaxtyping import Array, Float

from eqxbatch import (
    filter_micro_grad,
    filter_micro_value_and_grad,
    Mean,
    parameters,
    Sum,
    Variance,
)


def loss(model: MLP, x: Float[Array, " d"], y: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.sum((model(x) - y) ** 2)


def loss_with_aux(model: MLP, x: Array, y: Array) -> tuple[Array, dict[str, Array]]:
    out = model(x)
    return jnp.sum((out - y) ** 2), {"out": out}


model = MLP(3, "scalar", 4, 1, key=jax.random.key(0))
x, y = jnp.ones((5, 3)), jnp.zeros(5)


# Gradients.
assert_type(filter_micro_grad(loss)(model, x, y), MLP)
assert_type(filter_micro_grad(loss, clip_norm=1.0, nan_safe=True)(model, x, y=y), MLP)
assert_type(filter_micro_grad(loss, where=lambda m: m.layers[-1])(model, x, y), MLP)
# Settings that change the result make it `Any`.
watched = filter_micro_grad(loss, return_norms=True)
assert_type(watched(model, x, y), Any)
watched = filter_micro_grad(loss, moments=True)
assert_type(watched(model, x, y), Any)
watched = filter_micro_grad(loss, metrics=lambda g: jnp.sum(g.layers[0].weight))
assert_type(watched(model, x, y), Any)
with_aux = filter_micro_grad(loss_with_aux, has_aux=True, return_norms=True)
assert_type(with_aux(model, x, y), Any)


# Values and gradients.
value_and_grad = filter_micro_value_and_grad(loss, microbatch_size=2)
assert_type(value_and_grad(model, x, y), tuple[Array, MLP])
summed = filter_micro_value_and_grad(loss, accumulator=Sum(), clip_norm=1.0)
assert_type(summed(model, x, y), tuple[Array, MLP])
watched = filter_micro_value_and_grad(loss, return_norms=True)
assert_type(watched(model, x, y), Any)
with_aux = filter_micro_value_and_grad(loss_with_aux, has_aux=True)
assert_type(with_aux(model, x, y), Any)


# Optax takes the parameters of a model.
optimiser = optax.adam(1e-3)
state = optimiser.init(parameters(model, where=lambda m: m.layers[-1]))
state = optimiser.init(parameters(model))
updates, state = optimiser.update(parameters(model), state, parameters(model))


# As decorators.
@filter_micro_grad
def grad(w: Array, x: Array) -> Array:
    return jnp.dot(w, x)


assert_type(grad(x[0], x), Array)


@filter_micro_grad(microbatch_size=2)
def grad_in_microbatches(w: Array, x: Array) -> Array:
    return jnp.dot(w, x)


assert_type(grad_in_microbatches(x[0], x), Array)


@filter_micro_grad(microbatch_size=2, return_norms=True)
def grad_and_norms(w: dict[str, Array], x: Array) -> Array:
    return jnp.dot(w["weight"], x)


weights = {"weight": x[0]}
assert_type(grad_and_norms(weights, x), Any)


@filter_micro_value_and_grad(microbatch_size=2)
def plain(w: Array, x: Array) -> Array:
    return jnp.dot(w, x)


assert_type(plain(x[0], x), tuple[Array, Array])


@filter_micro_value_and_grad(has_aux=True)
def value_and_out(w: Array, x: Array) -> tuple[Array, Array]:
    return jnp.dot(w, x), x


assert_type(value_and_out(x[0], x), Any)


# A setting that is known at run time only.
def either(return_norms: bool) -> None:
    found = filter_micro_grad(loss, return_norms=return_norms)
    assert_type(found(model, x, y), Any)


either(False)


# What replaces gradients, values or aux can be anything.
signs = filter_micro_grad(loss, transform=lambda g: jax.tree.leaves(g)[0])
assert_type(signs(model, x, y), Any)
variances = filter_micro_value_and_grad(loss, value_accumulator=Variance())
assert_type(variances(model, x, y), Any)
replaced = filter_micro_grad(
    loss_with_aux, has_aux=True, aux_accumulator={"out": Mean()}
)
assert_type(replaced(model, x, y), Any)
replaced = filter_micro_value_and_grad(
    loss_with_aux, has_aux=True, aux_accumulator={"out": Mean()}
)
assert_type(replaced(model, x, y), Any)
assert_type(filter_micro_grad(transform=jax.tree.leaves)(loss)(model, x, y), Any)


# What is not annotated can be anything, too.
filter_micro_grad(lambda w, x: jnp.dot(w, x), has_aux=False)(x[0], x)
filter_micro_grad(lambda w, x: (jnp.dot(w, x), x), has_aux=True)(x[0], x)


class Quadratic(eqx.Module):
    centre: Array

    @filter_micro_grad
    def slope(self, x: Array) -> Array:
        return jnp.sum((x - self.centre) ** 2)


assert_type(Quadratic(x[0]).slope(x), Quadratic)
