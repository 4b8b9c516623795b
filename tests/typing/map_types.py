# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Maps keep the parameters and the result of the function."""

from typing import Any, assert_type, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import eqxbatch
from eqxbatch import filter_grid_vmap, filter_micro_vmap, filter_microbatch, grid


class Moments(NamedTuple):
    first: Array
    second: Array


def moments(x: Float[Array, " d"], scale: float = 1.0) -> Moments:
    return Moments(scale * jnp.sum(x), jnp.sum(x**2))


def total(x: Float[Array, "n d"], *, scale: float = 1.0) -> Array:
    return scale * jnp.sum(x)


class Model(eqx.Module):
    weight: Array

    @filter_micro_vmap(in_axes=(None, 0), microbatch_size=2)
    def many(self, x: Array) -> Moments:
        return moments(self.weight * x)

    @filter_micro_vmap
    def all_at_once(self, x: Array) -> Array:
        return x * 2


xs = jnp.ones((5, 3))


# As a call.
assert_type(filter_micro_vmap(moments)(xs), Moments)
assert_type(filter_micro_vmap(moments, microbatch_size=2)(xs, scale=2.0), Moments)
assert_type(filter_micro_vmap(moments, accumulator=eqxbatch.Sum())(xs), Any)
add_up = filter_microbatch(total, microbatch_size=2, accumulator=eqxbatch.Sum())
assert_type(add_up(xs, scale=2.0), Array)
assert_type(filter_micro_vmap(lambda x: jnp.sum(x))(xs), Array)
mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
filter_micro_vmap(mlp, microbatch_size=eqxbatch.MemoryBudget("1MB"))(xs)


# As a decorator, with arguments or without.
@filter_micro_vmap(microbatch_size=2, checkpoint=True)
def scaled(x: Array, by: Array) -> dict[str, Array]:
    return {"out": x * by}


assert_type(scaled(xs, xs), dict[str, Array])
assert_type(scaled(xs, by=xs), dict[str, Array])


@filter_micro_vmap
def twice(x: Array) -> Array:
    return 2 * x


assert_type(twice(xs), Array)


@filter_microbatch(microbatch_size=2, accumulator=eqxbatch.Max())
def largest(x: Array) -> Array:
    return jnp.max(x)


assert_type(largest(xs), Array)


# As a method.
model = Model(jnp.ones(3))
assert_type(model.many(xs), Moments)
assert_type(Model.many(model, xs), Moments)


# What an accumulator makes of an array is not known where it is no array.
assert_type(filter_micro_vmap(moments, accumulator=eqxbatch.Variance())(xs), Any)
several = filter_micro_vmap(
    lambda x: (x, 2 * x), accumulator=(eqxbatch.Sum(), eqxbatch.Max())
)
assert_type(several(xs), Any)
variances = filter_microbatch(total, accumulator=eqxbatch.Variance())
assert_type(variances(xs), Any)
assert_type(filter_micro_vmap(accumulator=eqxbatch.Variance())(moments)(xs), Any)


# Grids.
def product(x: Array, y: Array) -> Array:
    return x * y


axes = (grid("i"), grid("j"))
surface = filter_grid_vmap(product, in_axes=axes, block_size=4)
assert_type(surface(xs[0], xs[0]), Array)
mean = filter_grid_vmap(product, in_axes=axes, accumulator={"j": eqxbatch.Mean()})
assert_type(mean(xs[0], xs[0]), Any)
variance = filter_grid_vmap(
    product, in_axes=axes, accumulator={"j": eqxbatch.Variance()}
)
assert_type(variance(xs[0], xs[0]), Any)


@filter_grid_vmap(in_axes={"x": grid("i"), "y": grid("j")})
def difference(x: Array, y: Array) -> Array:
    return x - y


assert_type(difference(xs[0], xs[0]), Array)
