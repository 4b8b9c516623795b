"""Batches that are spread over devices; `conftest.py` makes four of one."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqxbatch import (
    Concat,
    EmpiricalNTK,
    filter_batch_kernel,
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    Last,
    Max,
    Mean,
    Sum,
    Variance,
)
from eqxbatch.results import GradientStatistics
from ..helpers import (
    assert_same,
    bent,
    drawn,
    KINDS,
    make_mesh,
    normal,
    put,
    spread,
    thinned,
    variants,
)


pytestmark = pytest.mark.devices


def fun(x):
    return jnp.sin(x) * x.sum()


def dense(x):
    x = np.asarray(x)
    return np.sin(x) * x.sum(tuple(range(1, x.ndim)), keepdims=True)


def without_collectives(run, x):
    """The result of a compiled program in which devices exchange nothing."""
    compiled = jax.jit(run).lower(x).compile()
    names = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    assert [name for name in names if f" {name}(" in compiled.as_text()] == []
    return compiled(x)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("kind", "total", "size"), thinned(KINDS, (4, 20, 52), (1, 6, 8, None))
)
def test_equals_dense_and_stays_where_it_is(kind, total, size, getkey):
    x = normal(getkey(), (total, 3))
    sharded = put(x, make_mesh(kind), "data")
    micro = filter_micro_vmap(fun, microbatch_size=size)
    for got in (micro(sharded), without_collectives(micro, sharded)):
        assert got.sharding.spec[0] == "data"
        assert_same(jax.device_get(got), dense(x))


@pytest.mark.parametrize(("kind", "axis"), thinned(KINDS, (1, 2)))
def test_other_axes(kind, axis, getkey):
    x = normal(getkey(), (20, 2, 3))
    spec = [None] * 3
    spec[axis] = "data"
    sharded = put(np.moveaxis(x, 0, axis), make_mesh(kind), *spec)
    micro = filter_micro_vmap(fun, in_axes=axis, out_axes=axis, microbatch_size=8)
    got = without_collectives(micro, sharded)
    assert got.sharding.spec[axis] == "data"
    assert_same(jax.device_get(got), np.moveaxis(dense(x), 0, axis))


@pytest.mark.parametrize(
    ("kind", "total", "traced"), thinned(KINDS, (16, 20), (True, False))
)
def test_accumulators(kind, total, traced, getkey):
    x, weights = normal(getkey(), (total, 3)), np.arange(1, total + 1, dtype="f4")
    outs = dense(x)
    sharded = put(x, make_mesh(kind), "data")
    num = -(-total // 8)
    weighted = (outs * weights[:, None]).sum(0)
    counting = (
        (Sum(), outs.sum(0)),
        (Mean(), outs.mean(0)),
        (Mean(jnp.asarray(weights)), weighted / weights.sum()),
        (Sum(jnp.asarray(weights)), weighted),
        (Last(), outs[-1]),
        (Variance(), (outs.mean(0), outs.var(0))),
        (Concat(), outs),
    )
    # Beside an extreme, no microbatches overlap.
    for cases in (counting, ((Max(), outs.max(0)),)):
        accumulators, expected = zip(*cases, strict=True)
        micro = filter_micro_vmap(
            lambda x: (fun(x),) * len(cases),
            microbatch_size=8,
            accumulator=accumulators,
            num_real_microbatches=jnp.array(num) if traced else None,
        )
        got = jax.device_get(micro(sharded))
        assert_same(jax.tree.leaves(got), jax.tree.leaves(expected), tol=1e-4)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("kind", "total", "checkpoint"), thinned(KINDS, (16, 20), (True, False))
)
def test_derivatives(kind, total, checkpoint, getkey):
    x, w = normal(getkey(), (total, 3)), normal(getkey(), (3,))
    mesh = make_mesh(kind)
    sharded, w_sharded = put(x, mesh, "data"), put(w, mesh, None)

    def loss(w, x):
        micro = filter_micro_vmap(
            lambda x: jnp.tanh(w * x), microbatch_size=8, checkpoint=checkpoint
        )
        return jnp.sum(micro(x) ** 2)

    whole = lambda w, x: jnp.sum(jnp.tanh(w[None] * x) ** 2)
    # Not eagerly, which JAX does not do for explicit axes: not for `whole` either.
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(w_sharded, sharded)
    assert got[1].sharding.spec[0] == "data"
    expected = jax.jit(jax.grad(whole, argnums=(0, 1)))(w, x)
    assert_same(jax.device_get(got), jax.device_get(expected), tol=1e-4)


@pytest.mark.parametrize("kind", spread(KINDS, 1))
def test_gradients_of_modules_in_microbatches(kind, getkey):
    mesh = make_mesh(kind)
    model = bent(3, 1, getkey())
    x = normal(getkey(), (40, 3))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    grad = eqx.filter_grad(loss)
    micro = filter_microbatch(
        grad, in_axes=(None, 0), microbatch_size=12, accumulator=Mean()
    )
    arrays, static = eqx.partition(model, eqx.is_array)
    placed = jax.tree.map(lambda x: put(x, mesh), arrays)
    got = micro(eqx.combine(placed, static), put(x, mesh, "data"))
    expected = eqx.filter_jit(grad)(model, x)
    assert_same(
        jax.device_get(eqx.filter(got, eqx.is_array)),
        jax.device_get(eqx.filter(expected, eqx.is_array)),
        tol=1e-4,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_have_the_same_share_of_each_device(kind):
    x = put(jnp.arange(16), make_mesh(kind), "data")
    seen = filter_microbatch(
        lambda x: x[None], microbatch_size=8, accumulator=Concat()
    )(x)
    expected = jnp.array([[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]])
    assert_same(jax.device_get(seen), jax.device_get(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_no_device_count_divides(kind, getkey):
    # On the mesh, but the same on all devices; and with another axis spread over it.
    mesh = make_mesh(kind)
    x = normal(getkey(), (13, 4))
    micro = filter_micro_vmap(jnp.sin, microbatch_size=5)
    for spec in ((), (None, "data")):
        got = micro(put(x, mesh, *spec))
        assert_same(jax.device_get(got), np.sin(x))


@pytest.mark.versions
@pytest.mark.parametrize("kind", variants(KINDS, AxisType.Auto))
def test_meshes_of_two_axes(kind, getkey):
    mesh = make_mesh(kind, (2, 2), ("data", "model"))
    x = normal(getkey(), (24, 4))
    micro = filter_micro_vmap(jnp.sin, microbatch_size=8)
    for spec in (("data",), ("data", "model"), (("data", "model"),), (None, "model")):
        got = without_collectives(micro, put(x, mesh, *spec))
        assert_same(jax.device_get(got), np.sin(x))


@pytest.mark.versions
@pytest.mark.parametrize(("kind", "size"), thinned(KINDS, (3, 8)))
def test_inside_of_shard_map(kind, size, getkey):
    mesh = make_mesh(kind)
    x, w = normal(getkey(), (32, 3)), normal(getkey(), (3,))
    sharded, w_sharded = put(x, mesh, "data"), put(w, mesh)

    def run(w, x):
        micro = filter_micro_vmap(
            lambda x: (w * x, x.sum()),
            microbatch_size=size,
            accumulator=(Concat(), Sum()),
        )
        rows, total = micro(x)
        return rows, jax.lax.psum(total, "data")

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P())
    )
    whole = lambda w, x: (w[None] * x, x.sum())

    def gradient(f):
        def loss(w, x):
            rows, total = f(w, x)
            return jnp.sum(rows**2) + total**2, (rows, total)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    got = gradient(mapped)(w_sharded, sharded)
    expected = gradient(whole)(w, x)
    assert_same(jax.device_get(got), jax.device_get(expected), tol=1e-4)


@pytest.mark.parametrize("count", (0, 1, 2))
def test_early_stop_inside_of_shard_map(count, getkey):
    mesh = make_mesh(AxisType.Auto)
    x = normal(getkey(), (32,))

    def run(x, count):
        micro = filter_micro_vmap(
            jnp.sin,
            microbatch_size=4,
            num_real_microbatches=count,
            accumulator=Sum(),
        )
        return jax.lax.psum(micro(x), "data")

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    got = mapped(put(x, mesh, "data"), jnp.array(count))
    expected = np.sin(np.asarray(x).reshape(4, 8)[:, : 4 * count]).sum()
    assert_same(jax.device_get(got), np.asarray(expected), tol=1e-4)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("kind", "clip_norm"), spread([*itertools.product(KINDS[::-1], (0.5, None))], 1)
)
def test_gradients(kind, clip_norm, getkey):
    mlp = drawn(eqx.nn.MLP, 3, 2, 4, 1, key=getkey())
    loss = lambda model, x: jnp.sum(jnp.tanh(jax.vmap(model)(x)) ** 2)
    x = normal(getkey(), (16, 5, 3))
    is_clipped = clip_norm is not None
    grad = filter_micro_grad(
        loss, microbatch_size=8, clip_norm=clip_norm, return_norms=is_clipped
    )
    mesh = make_mesh(kind)
    arrays, static = eqx.partition(mlp, eqx.is_array)
    placed = eqx.combine(jax.tree.map(lambda x: put(x, mesh), arrays), static)
    got = grad(placed, put(x, mesh, "data"))
    assert_same(jax.device_get(got), jax.device_get(grad(mlp, x)))


@pytest.mark.versions
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, marks=() if is_kept else pytest.mark.matrix)
        for kind in KINDS
        for options, is_kept in (
            ({}, kind == AxisType.Auto),
            ({"clip_norm": 0.5, "method": "sites"}, kind == AxisType.Explicit),
            ({"clip_norm": 0.5, "method": "materialise"}, False),
            (
                {"clip_norm": 0.5, "metrics": lambda gradient: gradient.cell.bias[0]},
                False,
            ),
        )
    ],
)
def test_gradients_inside_of_shard_map(kind, options, getkey):
    class Model(eqx.Module):
        embedding: eqx.nn.Embedding
        cell: eqx.nn.Linear
        scale: jax.Array

        def __call__(self, tokens):
            step = lambda state, word: (jnp.tanh(self.cell(word) + state), None)
            words = jax.vmap(self.embedding)(tokens)
            state, _ = jax.lax.scan(step, 0 * self.cell.bias, words)
            return jnp.sum(state * jnp.exp(self.scale))

    def make(key):
        embedding = eqx.nn.Embedding(7, 3, key=key)
        return Model(embedding, eqx.nn.Linear(3, 2, key=key), jnp.ones(2))

    model = drawn(make, key=getkey())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 7, (24, 5)), jnp.int32)
    grad = filter_micro_grad(
        lambda model, x: model(x),
        microbatch_size=4,
        accumulator=Sum(),
        return_norms="clip_norm" in options,
        **options,
    )
    arrays, static = eqx.partition(model, eqx.is_array)
    # As for `jax.grad`, the gradient is the sum over the devices.
    out_specs = (P(), GradientStatistics(P("data"), P("data"), None))
    mesh = make_mesh(kind)
    mapped = jax.shard_map(
        lambda arrays, x: grad(eqx.combine(arrays, static), x),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=out_specs if options else P(),
    )
    expected = jax.device_get(grad(model, tokens))
    placed = jax.tree.map(lambda x: put(x, mesh), arrays)
    got = jax.jit(mapped)(placed, put(tokens, mesh, "data"))
    assert_same(jax.device_get(got), expected, tol=1e-4)


@pytest.mark.versions
@pytest.mark.parametrize("kind", variants(KINDS, AxisType.Auto))
def test_kernels_inside_of_shard_map(kind, getkey):
    model = bent(3, 2, getkey())
    x, z, v = normal(getkey(), (8, 3)), normal(getkey(), (3, 3)), jnp.ones((3, 2))
    arrays, static = eqx.partition(model, eqx.is_array)

    def kernels(arrays, x, z):
        ntk = EmpiricalNTK(eqx.combine(arrays, static))
        blocks = filter_batch_kernel(ntk, block_size=2)(x)
        return (
            ntk(x, z),
            ntk(z, x).T,
            ntk.untraced_matvec(x, z, v),
            ntk.diagonal(x),
            blocks,
        )

    whole = jax.jit(kernels)
    parts = [whole(arrays, part, z) for part in np.split(np.asarray(x), 2)]
    expected = jax.tree.map(lambda *parts: np.concatenate(parts), *parts)
    mesh = make_mesh(kind, (2,))
    mapped = jax.shard_map(
        kernels, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P("data")
    )
    # A kernel is that of the examples of a device: nothing is summed over them.
    got = jax.jit(mapped)(arrays, put(x, mesh, "data"), z)
    assert_same(jax.device_get(got), expected)


@pytest.mark.parametrize(("kind", "num"), thinned(KINDS, (2, 4)))
def test_rows_of_no_example(kind, num):
    """As many for each microbatch, and for the remainder as it has examples."""
    x = jnp.arange(60.0).reshape(20, 3)
    micro = filter_microbatch(
        lambda x: jnp.stack([x.sum(0)] * num), microbatch_size=8, accumulator=Concat()
    )
    got = jax.device_get(micro(put(x, make_mesh(kind, (2, 2), ("data", "i")), "data")))
    assert got.shape == (3 * num, 3)
    rows = got.reshape(3, num, 3)
    assert (rows == rows[:, :1]).all()
    assert_same(rows[:, 0].sum(0), jax.device_get(x.sum(0)))
