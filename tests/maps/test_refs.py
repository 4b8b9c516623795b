"""Functions with mutable arrays (`jax.Ref`), in maps and all that has microbatches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch import (
    filter_batch_kernel,
    filter_ggn,
    filter_grid_vmap,
    filter_hvp,
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    Mean,
)
from ..helpers import assert_same


X = jnp.asarray(np.linspace(-1, 1, 15, dtype="float32").reshape(5, 3))
W = jnp.array([0.5, 1.0, 1.5])


def with_ref(x):
    ref = jax.new_ref(jnp.zeros(3))
    ref[...] = 2 * x
    ref[0] = jnp.ones(())

    def step(i, carry):
        ref[i] = ref[i] * jnp.sin(ref[i]) + carry
        return carry + ref[i]

    lax.fori_loop(0, 3, step, x[0])
    return jnp.sum(ref[...] ** 2)


def without_ref(x):
    entries, carry = [jnp.ones(()), 2 * x[1], 2 * x[2]], x[0]
    for i, entry in enumerate(entries):
        entries[i] = entry * jnp.sin(entry) + carry
        carry = carry + entries[i]
    return entries[0] ** 2 + entries[1] ** 2 + entries[2] ** 2


def results(fun, *, size):
    """What depends on a function of an example, by all that has microbatches."""
    loss = lambda w, x: fun(w * x)
    pair = lambda a, b: fun(a * b[0]) + jnp.vdot(a, b)
    model = lambda w, x: jnp.stack([fun(w * x), jnp.vdot(w, x)])
    sizes = {"microbatch_size": size}
    grad = filter_micro_grad(loss, clip_norm=1.0, nan_safe=True, **sizes)
    mean = filter_microbatch(
        lambda w, x: jax.vmap(loss, (None, 0))(w, x).mean(),
        in_axes=(None, 0),
        accumulator=Mean(),
        **sizes,
    )
    kernel = filter_batch_kernel(pair, pairwise=True, block_size=size)
    grid = filter_grid_vmap(pair, in_axes={"a": "i", "b": "j"}, block_size=size)
    squares = lambda y, x: jnp.sum(y**2)
    yield "map", filter_micro_vmap(fun, **sizes)
    yield "derivative", jax.grad(lambda x: filter_micro_vmap(fun, **sizes)(x).sum())
    yield "gradient", lambda x: filter_micro_grad(loss, **sizes)(W, x)
    yield "clipped", lambda x: grad(W, x)
    yield "microbatch", lambda x: jax.grad(mean)(W, x)
    yield "hvp", lambda x: filter_hvp(loss, in_axes=0, **sizes)(W, W, x)
    yield "ggn", lambda x: filter_ggn(model, squares, flat=True, **sizes)(W, x)[0]
    yield "kernel", jax.grad(lambda x: kernel(x, x).sum())
    yield "grid", lambda x: grid(x, x)


@pytest.mark.versions
@pytest.mark.parametrize("size", (2, None))
def test_equal_those_without_a_ref(size):
    expected = results(without_ref, size=None)
    for (name, run), (_, right) in zip(
        results(with_ref, size=size), expected, strict=True
    ):
        tol = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(run(X), right(X), err_msg=name, **tol)


def scaled(ref, y):
    ref[...] = ref[...] * y
    return ref[0] + y


@pytest.mark.versions
@pytest.mark.parametrize("size", (2, None))
def test_mapped_refs_are_written(size):
    refs = [{"a": jax.new_ref(X)} for _ in range(2)]
    expected = jax.vmap(lambda refs, y: scaled(refs["a"], y))(refs[0], X[:, 1])
    mapped = filter_micro_vmap(
        lambda refs, y: scaled(refs["a"], y), microbatch_size=size
    )
    got = mapped(refs[1], X[:, 1])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(refs[1]["a"][...], refs[0]["a"][...], rtol=1e-6)
    # Along another axis, and by name.
    ref = jax.new_ref(X.T)
    axes = {"ref": 1, "y": eqx.if_array(0)}
    again = filter_micro_vmap(scaled, in_axes=axes, microbatch_size=size)
    np.testing.assert_allclose(again(y=X[:, 1], ref=ref), expected, rtol=1e-6)
    np.testing.assert_allclose(ref[...], refs[0]["a"][...].T, rtol=1e-6)


def test_a_shared_ref_is_read():
    ref = jax.new_ref(W)
    mapped = filter_micro_vmap(
        lambda ref, x: ref[...] * x, in_axes=(None, 0), microbatch_size=2
    )
    for _ in range(2):
        np.testing.assert_array_equal(mapped(ref, X), ref[...][None] * X)
        ref[...] = 2 * ref[...]


@pytest.mark.versions
def test_refs_of_a_program_around_it():
    @jax.jit
    def run(x):
        ref, factor = jax.new_ref(x), jax.new_ref(x[0])
        factor[...] += 1
        scale = lambda ref, y: scaled(ref, y * factor[1])
        return filter_micro_vmap(scale, microbatch_size=2)(ref, x[:, 1]), ref[...]

    y = X[:, 1] * (X[0, 1] + 1)
    assert_same(run(X), (X[:, 0] * y + y, X * y[:, None]), 1e-6)


def test_refuses_refs_with_rows_elsewhere():
    ref = jax.new_ref(X)
    total = lambda w, x: jnp.vdot(w, x[...])
    with pytest.raises(ValueError, match="Ref` with a batch axis, which only"):
        filter_micro_grad(total)(W, ref)
    with pytest.raises(ValueError, match="Ref` with a batch axis, which only"):
        filter_grid_vmap(total, in_axes={"w": None, "x": "i"})(W, ref)
    twice = filter_micro_vmap(lambda a, b: a[...] + b[...])
    with pytest.raises(ValueError, match="is mapped more than once"):
        twice(ref, ref)
    some = filter_micro_vmap(scaled, microbatch_size=2, num_real_microbatches=1)
    with pytest.raises(ValueError, match="`num_real_microbatches` leaves out rows"):
        some(ref, X[:, 1])
