"""Derivatives inside of `jax.shard_map`: what is a device's own, and what is a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import eqxbatch
from ..helpers import KINDS, make_mesh, normal, put, thinned


pytestmark = [pytest.mark.devices, pytest.mark.versions]


NUM = 3  # The examples on each of four devices.
ARGUMENTS = {
    "w": normal(jax.random.key(0), (2, 3)),
    "b": normal(jax.random.key(1), (4, 2)),
    "x": normal(jax.random.key(2), (4 * NUM, 3)),
}


def model(p, x):
    return jnp.tanh(p["w"] @ x + p["b"])


def of_batch(p, x):
    return jax.vmap(model, (None, 0))(p, x)


def loss(p, x):
    return jnp.sum(model(p, x) ** 3)


def total(p, x):
    return jnp.sum(jax.vmap(loss, (None, 0))(p, x))


def of_output(out, x):
    return jnp.sum(out**3)


def in_loop(p, x):
    """A model that JAX differentiates in forward mode only."""
    step = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
    return lax.while_loop(lambda carry: carry[0] < 2, step, (0, model(p, x)))[1]


def on_each_device(run, mesh, *args, spread, check_vma=True):
    """What `run` returns on each of the devices, along axis 0.

    Arguments with these names have a part for each device.
    """
    specs = [P("data") if name in spread else P() for name in args]
    arrays = [
        put(ARGUMENTS[name], mesh, *spec)
        for name, spec in zip(args, specs, strict=True)
    ]
    local = lambda *xs: jax.tree.map(lambda x: jnp.asarray(x)[None], run(*xs))
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )(*arrays)


def jacobians(p, x):
    """The same Jacobian in all modes and forms, with the examples along axis 0."""
    found = []
    for mode in ("fwd", "rev"):
        transform = lambda fun, mode=mode, **more: eqxbatch.filter_jacobian(
            fun, mode=mode, **more
        )
        mapped = eqxbatch.filter_micro_vmap(model, in_axes=(None, 0), microbatch_size=2)
        found += [
            transform(of_batch, checkpoint=mode == "rev")(p, x),
            transform(lambda p, x=x: of_batch(p, x), block_size=3)(p),
            transform(model, in_axes=0, microbatch_size=2)(p, x),
            transform(mapped)(p, x),
        ]
    return found


def sums(p, x):
    """Derivatives that are sums over examples, or have no rows for them."""
    add, vector = {"accumulator": eqxbatch.Sum()}, jax.tree.map(jnp.cos, p)
    in_batch = {"in_axes": 0, "microbatch_size": 2, **add}
    ggn = lambda **more: eqxbatch.filter_ggn(model, of_output, **in_batch, **more)
    hessians = [
        eqxbatch.filter_hessian(loss, mode="fwd", method="sites", **in_batch)(p, x),
        eqxbatch.filter_hessian(loss, mode="rev", **in_batch)(p, x),
        eqxbatch.filter_hessian(total, mode="fwd", method="products")(p, x),
        eqxbatch.filter_hessian(total, mode="rev")(p, x),
    ]
    products = [
        eqxbatch.filter_hvp(fun, mode=mode, **more)(p, vector, x)
        for fun, more in ((loss, in_batch), (total, {}))
        for mode in ("fwd", "rev")
    ]
    gradients = [
        eqxbatch.filter_micro_grad(loss, microbatch_size=2, **add)(p, x),
        eqxbatch.filter_micro_grad(loss, clip_norm=1e9, **add)(p, x),
    ]
    # A model with one mode has its Jacobian formed, in a batch and without.
    formed = eqxbatch.filter_ggn(
        lambda p, x: jax.vmap(in_loop, (None, 0))(p, x), of_output, in_axes=None
    )
    ggns = [
        formed(p, x),
        eqxbatch.filter_ggn(in_loop, of_output, **in_batch)(p, x),
    ]
    of_model = [ggn(method=method)(p, x) for method in ("sites", "products")]
    return hessians, products, gradients, ggns, of_model


def assert_all(found, expected):
    for got in found:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
            jax.device_get(got),
            expected,
        )


@pytest.mark.parametrize(("kind", "check_vma"), thinned(KINDS, (True, False)))
def test_jacobians_are_those_of_a_device_in_both_modes(kind, check_vma):
    def run(w, b, x):
        return jacobians({"w": w, "b": b[0]}, x), jacobians({"w": w, "b": w[:, 0]}, x)

    mesh, spread = make_mesh(kind), ("b", "x")
    settings = {"spread": spread, "check_vma": check_vma}
    differ, same = on_each_device(run, mesh, "w", "b", "x", **settings)
    w, b = ARGUMENTS["w"], ARGUMENTS["b"]
    rows = ARGUMENTS["x"].reshape(4, NUM, 3)
    each = jax.jit(jax.vmap(jax.jacfwd(of_batch), ({"w": None, "b": 0}, 0)))
    assert_all(differ, jax.device_get(each({"w": w, "b": b}, rows)))
    shared = jnp.broadcast_to(w[:, 0], b.shape)
    assert_all(same, jax.device_get(each({"w": w, "b": shared}, rows)))


@pytest.mark.parametrize(("kind", "check_vma"), thinned(KINDS, (True, False)))
def test_sums_are_those_over_devices_in_both_modes(kind, check_vma):
    """Over those that have the same parameters, as far as JAX knows."""
    run = lambda w, b, x: sums({"w": w, "b": b[0]}, x)
    settings = {"spread": ("b", "x"), "check_vma": check_vma}
    found = on_each_device(run, make_mesh(kind), "w", "b", "x", **settings)
    w, rows = ARGUMENTS["w"], ARGUMENTS["x"].reshape(4, NUM, 3)
    p, axes = {"w": w, "b": ARGUMENTS["b"]}, {"w": None, "b": 0}
    summed = lambda x: np.broadcast_to(x.sum(0), x.shape) if check_vma else x

    def dense(fun):
        return jax.device_get(jax.jit(jax.vmap(fun, (axes, 0)))(p, rows))

    def products(p, x):
        vector = jax.tree.map(jnp.cos, p)
        return jax.jvp(lambda p: jax.grad(total)(p, x), (p,), (vector,))[1]

    def ggn(fun):
        def matrix(p, x):
            jacobian = jax.jacfwd(lambda p, x: jax.vmap(fun, (None, 0))(p, x))(p, x)
            out = 6 * jax.vmap(fun, (None, 0))(p, x)
            entry = lambda j, k: jnp.tensordot(
                j * expanded(out, j), k, ((0, 1), (0, 1))
            )
            expanded = lambda x, like: x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))
            return {a: {b: entry(jacobian[a], jacobian[b]) for b in p} for a in p}

        return matrix

    # Two arrays that differ between devices in one of them have a block on each.
    hessian, formed, plain = (
        dense(fun) for fun in (jax.hessian(total), ggn(in_loop), ggn(model))
    )
    for matrix in (hessian, formed, plain):
        matrix["w"]["w"] = summed(matrix["w"]["w"])
    hessians, found_products, gradients, ggns, ggns_of_model = found
    assert_all(hessians, hessian)
    assert_all(ggns, formed)
    assert_all(ggns_of_model, plain)
    for got, fun in ((found_products, products), (gradients, jax.grad(total))):
        expected = dense(fun)
        expected["w"] = summed(expected["w"])
        assert_all(got, expected)


@pytest.mark.parametrize("check_vma", (True, False))
def test_jacobians_of_functions_that_exchange_values(check_vma):
    """Reverse mode would be about the outputs of all devices at once."""
    mesh = make_mesh(AxisType.Auto)

    def between(w, x):
        out = jnp.tanh(x @ w.T)
        return out * lax.pmean(jnp.sum(out, 0), "data")[None]

    def run(fun, mode):
        of_mode = lambda w, x: eqxbatch.filter_jacobian(fun, mode=mode)(w, x)
        settings = {"spread": ("x",), "check_vma": check_vma}
        return on_each_device(of_mode, mesh, "w", "x", **settings)

    def dense(fun):
        of_device = lambda w, x: jax.jacfwd(fun)(w, x)
        settings = {"spread": ("x",), "check_vma": check_vma}
        return on_each_device(of_device, mesh, "w", "x", **settings)

    # There are 6 parameters and 2 rows.
    first = lambda w, x: between(w, x)[0]
    with pytest.warns(UserWarning, match=r"reverse mode \(passes: 2\), as `fun` exch"):
        got = run(first, "auto")
    assert_all([got, run(first, "fwd")], jax.device_get(dense(first)))
    with pytest.raises(ValueError, match=r"`fun` exchanges values.*\(along 'data'\)"):
        run(first, "rev")
    # What does not depend on parameters can be exchanged in either mode.
    centred = lambda w, x: jnp.tanh((x - lax.pmean(x, "data")) @ w.T)
    assert_all([run(centred, "rev")], jax.device_get(dense(centred)))
    if check_vma:  # The outputs of all devices are one.
        one = lambda w, x: lax.psum(jnp.sum(jnp.tanh(x @ w.T), 0), "data")
        assert_all([run(one, "rev")], jax.device_get(dense(one)))


def test_outputs_that_differ_between_devices_beside_others():
    mesh = make_mesh(AxisType.Auto)
    fun = lambda w, x: {"own": jnp.tanh(x @ w.T), "same": jnp.sin(w)}
    jacobian = eqxbatch.filter_jacobian(fun, mode="rev")
    run = jax.shard_map(
        jacobian,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs={"own": P("data"), "same": P()},
    )
    w, x = ARGUMENTS["w"], ARGUMENTS["x"]
    got = jax.jit(run)(w, x)
    assert_all([got], jax.device_get(jax.jit(jax.jacfwd(fun))(w, x)))


def test_vectors_of_products_are_those_of_all_devices():
    """Devices of which each has its own vector would add up their products."""
    mesh = make_mesh(AxisType.Auto)
    ggnvp = eqxbatch.filter_ggnvp(model, of_output)
    hvp = eqxbatch.filter_hvp(loss, in_axes=0)
    for product in (ggnvp, hvp):
        # Another vector on each device, with examples of its own or without.
        run = lambda w, b, x, product=product: product(
            {"w": w, "b": jnp.zeros(2)}, {"w": w, "b": b[0]}, x
        )
        for spread in ("bx", "b"):
            with pytest.raises(ValueError, match=r"differ between devices.*\['data'\]"):
                on_each_device(run, mesh, "w", "b", "x", spread=spread)
        # With parameters of its own, each device has its own product.
        own = lambda b, x, product=product: product(
            {"w": jnp.outer(b[0], jnp.ones(3)), "b": b[0]},
            {"w": jnp.outer(b[0], jnp.arange(3.0)), "b": b[0]},
            x,
        )
        found = on_each_device(own, mesh, "b", "x", spread="bx")
        batches = ARGUMENTS["x"].reshape(4, NUM, 3)
        expected = [own(ARGUMENTS["b"][i : i + 1], batches[i]) for i in range(4)]
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *expected)
        jax.tree.map(np.testing.assert_allclose, found, stacked)
