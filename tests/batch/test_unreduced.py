"""Arrays of which each device has a summand (`unreduced`), or all of it (`reduced`)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

import eqxbatch as eb
from ..helpers import assert_same, make_mesh, normal, put


pytestmark = [pytest.mark.devices, pytest.mark.versions]


KEY = jax.random.key(0)
W, X = normal(KEY, (4, 3)), normal(jax.random.key(1), (8, 4))


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def clipped(fun, method="auto"):
    return eb.filter_micro_grad(fun, microbatch_size=4, clip_norm=0.5, method=method)


def clipped_gradient():
    of_one = np.asarray(jax.vmap(jax.grad(loss), (None, 0))(W, X), np.float64)
    norms = np.sqrt((of_one**2).sum((1, 2)))
    assert norms.max() > 0.5
    scales = np.minimum(1, 0.5 / norms)
    return np.float32((scales[:, None, None] * of_one).mean(0))


def of_kind(x, mesh, **kind):
    """An array that is unreduced or reduced over an axis of a mesh."""
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: reshard(x, P(**kind)))(put(x, mesh))


def kernel(w, x):
    return eb.EmpiricalNTK(Model(w))(x)


class Model(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


def stream(w, x):
    return eb.over_batches(clipped(loss))(w, [x])


TRANSFORMS = {
    "`args": (
        eb.filter_micro_vmap(loss, in_axes=(None, 0), microbatch_size=4),
        clipped(loss),
        eb.filter_hessian(loss, in_axes=0),
    ),
    "An array": (kernel, stream),
}


@pytest.mark.parametrize("which", (0, 1))
def test_unreduced_arguments_are_refused(which):
    mesh = make_mesh(AxisType.Explicit)
    args = [put(W, mesh), put(X, mesh)]
    args[which] = of_kind(args[which], mesh, unreduced={"data"})
    for name, transforms in TRANSFORMS.items():
        place = rf"{name}\[{which}\]`" if name == "`args" else name
        message = f"{place} is unreduced over the mesh axis 'data'.*reshard"
        for transform in transforms:
            with pytest.raises(ValueError, match=message):
                transform(*args)


def test_reduced_parameters_are_as_replicated():
    mesh = make_mesh(AxisType.Explicit)
    w, x = of_kind(W, mesh, reduced={"data"}), put(X, mesh, "data")
    got = clipped(loss)(w, x)
    assert_same(jax.device_get(got), clipped_gradient(), tol=1e-4)
    for transform in (*TRANSFORMS["`args"], kernel):
        got, wanted = jax.device_get((transform(w, x), transform(W, X)))
        assert_same(got, wanted, tol=1e-4)


@pytest.mark.parametrize("method", ("sites", "materialise"))
def test_unreduced_products_within_a_function(method):
    mesh = make_mesh(AxisType.Explicit, (2, 2), ("data", "model"))
    sharding = lambda **kind: NamedSharding(mesh.abstract_mesh, P(None, **kind))

    def fun(w, x):
        product = jnp.dot(x, w, out_sharding=sharding(unreduced={"model"}))
        return jnp.sum(jnp.tanh(reshard(product, sharding())) ** 2)

    w, x = put(W, mesh, "model"), put(X, mesh, "data", "model")
    if jax.__version__.startswith("0.9"):
        with pytest.raises(ValueError, match=r"{U:model}"):
            clipped(fun, method)(w, x)
    else:
        got = clipped(fun, method)(w, x)
        assert_same(jax.device_get(got), clipped_gradient(), tol=1e-4)
    mapped = eb.filter_micro_vmap(fun, in_axes=(None, 0), microbatch_size=4)(w, x)
    expected = jax.device_get(jax.vmap(loss, (None, 0))(W, X))
    assert_same(jax.device_get(mapped), expected, tol=1e-4)


@pytest.mark.parametrize("method", ("sites", "materialise"))
def test_sums_over_devices_do_not_mix_examples(method):
    """The sum that the derivative of a cast has would add up their gradients."""
    mesh = make_mesh(AxisType.Explicit)
    reduced = NamedSharding(mesh.abstract_mesh, P(reduced={"data"}))
    fun = lambda w, x: loss(reshard(w, reduced), x)
    args = put(W, mesh), put(X, mesh, "data")
    if jax.__version__.startswith("0.7"):
        got = clipped(fun, method)(*args)
        assert_same(jax.device_get(got), clipped_gradient(), tol=1e-4)
    else:
        with pytest.raises(ValueError, match=r"unreduced|{U:") as raised:
            clipped(fun, method)(*args)
        notes = getattr(raised.value, "__notes__", ())
        is_said = any("leave parameters replicated" in note for note in notes)
        assert is_said or jax.__version__.startswith("0.9")
    # Without a derivative for each example, there is nothing to mix.
    plain = eb.filter_micro_grad(fun, microbatch_size=4)(*args)
    expected = eb.filter_micro_grad(loss, microbatch_size=4)(W, X)
    assert_same(jax.device_get(plain), jax.device_get(expected), tol=1e-4)
