"""`explain_sites`: batches, selected parameters and wrong input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch import explain_sites
from ..helpers import drawn


def test_batches_are_explained_as_their_examples():
    model = drawn(eqx.nn.Linear, 4, 3, key=jr.key(0))
    fun = lambda model, x, y, scale: jnp.sum((model(x) - y) ** 2) * scale
    of_one = explain_sites(fun, model, jnp.ones(4), jnp.ones(3), 2.0, in_axes=None)
    of_many = explain_sites(
        fun, model, np.ones((4, 5), "f4"), jnp.ones((5, 3)), 2.0, in_axes=(1, 0, None)
    )
    assert of_one == of_many
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    structs = struct(4, 5), struct(5, 3)
    assert explain_sites(fun, model, *structs, 2.0, in_axes=(1, 0, None)) == of_one


def test_selected_parameters():
    model = {"a": jnp.arange(1.0, 4.0), "b": jnp.ones(3), "c": [jnp.ones((2, 3))]}

    def fun(model, x):
        return model["c"][0] @ jnp.tanh(lax.mul(model["a"], model["b"]) * x)

    x = jnp.ones(3)
    spec = {"a": True, "b": False, "c": True}
    of_two = explain_sites(fun, model, x, filter_spec=spec, in_axes=None)
    assert [leaf.path for leaf in of_two.leaves] == ["['a']", "['c'][0]"]
    where = lambda model: (model["b"], model["c"])
    (last,) = explain_sites(
        fun, model, x, where=where, filter_spec=spec, in_axes=None
    ).leaves
    assert last == of_two.leaves[1]
    with pytest.raises(ValueError, match="`where` and `filter_spec` leave no param"):
        explain_sites(fun, model, x, where=lambda model: (), in_axes=None)
    with pytest.raises(ValueError, match="`where` must return parts of the model"):
        explain_sites(fun, model, x, where=lambda model: 1.0, in_axes=None)


def test_wrong_input():
    model = drawn(eqx.nn.Linear, 4, 3, key=jr.key(0))
    fun = lambda model, x: model(x)
    with pytest.raises(ValueError, match="the batch is empty"):
        explain_sites(fun, model, jnp.ones((0, 4)), in_axes=0)
    with pytest.raises(ValueError, match="must have 1 entries"):
        explain_sites(fun, model, jnp.ones((2, 4)), in_axes=(0, 0))
