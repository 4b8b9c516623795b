"""Kernels in blocks on several devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import (
    EmpiricalNTK,
    filter_batch_kernel,
    FrobeniusNorm,
    HostStore,
    KernelOperator,
    KernelProduct,
    MemoryBudget,
    TopK,
    TqdmProgressMeter,
)
from ..helpers import (
    assert_same,
    bent,
    CountTraces,
    make_mesh,
    normal,
    put,
    spread,
    variants,
)
from .kernel_functions import lopsided, rbf, white


# Meshes.


EACH = slice(None)
# With all cases, or with half of them on each kind of mesh.
MESHES = [
    (AxisType.Auto, 13, slice(0, None, 2)),
    (AxisType.Explicit, 16, slice(1, None, 2)),
    *((AxisType.Auto, 13, EACH), (AxisType.Explicit, 16, EACH)),
    *((AxisType.Auto, 2, EACH), (AxisType.Explicit, 13, EACH)),
]


@pytest.mark.devices
@pytest.mark.parametrize(
    ("kind", "total", "some"),
    (*MESHES[:2], *(pytest.param(*x, marks=pytest.mark.matrix) for x in MESHES[2:])),
)
def test_mesh_equals_one_device(kind, total, some, getkey):
    x, y = normal(getkey(), (total, 3)), normal(getkey(), (6, 3))

    @jax.jit
    def expected(x, y):
        symmetric, rectangle = rbf(x), lopsided(x, y)
        norm = jnp.linalg.norm(symmetric)
        top = jax.lax.top_k(rectangle, 2)
        return white(x), lopsided(x), rectangle, symmetric.sum(1), top, norm

    cases = [
        (white, (x,), {"symmetric": True}),
        (lopsided, (x,), {}),
        (lopsided, (x, y), {}),
        (rbf, (x,), {"symmetric": True, "reduce": KernelProduct(jnp.ones(total))}),
        (lopsided, (x, y), {"reduce": TopK(2)}),
        (rbf, (x,), {"symmetric": True, "reduce": FrobeniusNorm()}),
    ]
    pairs = [*zip(cases, expected(x, y), strict=True)]
    for (kernel, args, settings), dense in pairs[some]:
        many = filter_batch_kernel(
            kernel, block_size=3, mesh=make_mesh(kind), **settings
        )
        got = many(*args)
        leaves = [jax.tree.leaves(jax.device_get(tree)) for tree in (got, dense)]
        assert_same(*leaves, tol=1e-4 if "reduce" in settings else None)
        if "reduce" not in settings:
            if total % 4 == 0:
                assert got.sharding.spec[0] == "data"
            if "symmetric" in settings:
                got = np.asarray(got)
                np.testing.assert_array_equal(got, got.T)


def of_gradients(w):
    """A kernel of derivatives in what it closes over."""

    def kernel(x1, x2=None):
        x2 = x1 if x2 is None else x2
        of_one = jax.grad(lambda w, x: jnp.sin(w @ x))
        first, second = (jax.vmap(of_one, (None, 0))(w, x) for x in (x1, x2))
        return first @ second.T

    return kernel


@pytest.mark.devices
@pytest.mark.parametrize("kind", spread((AxisType.Auto, AxisType.Explicit), 1))
def test_what_a_kernel_function_closes_over_on_a_mesh(kind, getkey):
    x, w = normal(getkey(), (7, 3)), normal(getkey(), (3,))
    mesh = make_mesh(kind, (2,))
    if kind == AxisType.Auto:
        w = put(w, mesh)
    closure = of_gradients(w)
    expected = np.asarray(jax.jit(closure)(x))
    for settings, result in (
        ({"symmetric": True}, expected),
        ({"store": HostStore()}, expected),
        ({"reduce": KernelProduct(jnp.ones(7))}, expected.sum(1)),
    ):
        got = filter_batch_kernel(closure, block_size=2, mesh=mesh, **settings)(x)
        assert_same(jax.device_get(got), result)


@pytest.mark.devices
def test_estimators_in_a_lambda_on_a_mesh(getkey):
    x, mesh = normal(getkey(), (4, 3)), make_mesh(AxisType.Auto, (2,))
    ntk = EmpiricalNTK(bent(3, 2, getkey()))
    closure = lambda x1, x2=None: ntk(x1, x2)
    got = filter_batch_kernel(closure, block_size=2, mesh=mesh)(x)
    assert_same(jax.device_get(got), jax.device_get(ntk(x)))


@pytest.mark.devices
@pytest.mark.parametrize("kind", spread((AxisType.Explicit, AxisType.Auto), 1))
def test_derivatives_in_what_is_closed_over_on_a_mesh(kind, getkey):
    x, y, w = normal(getkey(), (7, 3)), normal(getkey(), (4, 3)), normal(getkey(), (3,))
    # Along the other axis, devices do the same.
    mesh = make_mesh(kind, (2, 2), ("rows", "other"))

    def loss(w, x, y):
        batched = filter_batch_kernel(
            of_gradients(w), block_size=2, mesh=mesh, mesh_axis="rows"
        )
        return jnp.sum(jnp.tanh(batched(x, y)))

    dense = lambda w, x, y: jnp.sum(jnp.tanh(of_gradients(w)(x, y)))
    args = (w, x, y)
    both = lambda f: (
        lambda *args: (
            jax.grad(f, (0, 1, 2))(*args),
            jax.jvp(f, args, args)[1],
        )
    )
    got, expected = (jax.jit(both(f))(*args) for f in (loss, dense))
    assert_same(jax.device_get(got), jax.device_get(expected), tol=1e-4)


@pytest.mark.devices
def test_explicit_axes_of_what_is_closed_over(getkey):
    x, w = normal(getkey(), (7, 3)), normal(getkey(), (3,))
    mesh = make_mesh(AxisType.Explicit, (2,))
    w_on_mesh = put(w, mesh)
    for store in ("device", HostStore()):
        settings = {"block_size": 2, "mesh": mesh, "store": store}
        with pytest.raises(ValueError, match="closes over an array on a mesh with"):
            filter_batch_kernel(of_gradients(w_on_mesh), **settings)(x)
    argument = eqx.Partial(lambda w, *x: of_gradients(w)(*x), w_on_mesh)
    got = filter_batch_kernel(argument, block_size=2, mesh=mesh)(x)
    assert_same(jax.device_get(got), jax.device_get(jax.jit(of_gradients(w))(x)))


@pytest.mark.devices
@pytest.mark.parametrize("num", variants((1, 2, 3), 2))
def test_other_numbers_of_devices(num, getkey):
    x = normal(getkey(), (11, 3))
    mesh = make_mesh(AxisType.Auto, (num,))
    got = filter_batch_kernel(white, block_size=2, symmetric=True, mesh=mesh)(x)
    got = np.asarray(got)
    assert_same(got, np.asarray(jax.jit(white)(x)))
    np.testing.assert_array_equal(got, got.T)


@pytest.mark.devices
def test_one_axis_of_a_mesh(getkey):
    x = normal(getkey(), (8, 3))
    mesh = make_mesh(AxisType.Auto, (2, 2), ("rows", "other"))
    batched = filter_batch_kernel(rbf, block_size=3, mesh=mesh, mesh_axis="rows")
    got = batched(x)
    assert got.sharding.spec == jax.sharding.PartitionSpec("rows")
    expected = np.asarray(jax.jit(rbf)(x))
    assert_same(jax.device_get(got), expected)
    hosted = filter_batch_kernel(
        rbf, block_size=3, mesh=mesh, mesh_axis="rows", store=HostStore()
    )
    np.testing.assert_allclose(hosted(x), expected, rtol=1e-5)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("kind", "store"), ((AxisType.Auto, "device"), (AxisType.Explicit, HostStore()))
)
def test_budget_on_a_mesh(kind, store, getkey):
    x = normal(getkey(), (40, 3))
    batched = filter_batch_kernel(
        rbf,
        block_size=MemoryBudget("1MB"),
        symmetric=True,
        mesh=make_mesh(kind),
        store=store,
    )
    np.testing.assert_allclose(batched(x), jax.jit(rbf)(x), rtol=1e-5)


@pytest.mark.devices
@pytest.mark.parametrize("how", spread(("closed over", "moved", "field"), 1))
def test_results_on_a_mesh_with_explicit_axes(how, getkey):
    """No array of the call is on the mesh, or the result is sharded over it."""
    x, mesh = normal(getkey(), (8, 3)), make_mesh(AxisType.Explicit, (2,))
    scale = put(jnp.array(1.0), mesh)
    kernel = {
        "closed over": lambda x, y=None: rbf(x, y) * scale,
        "moved": lambda x, y=None: put(rbf(x, y), mesh, "data"),
        "field": eqx.Partial(lambda scale, x, y=None: rbf(x, y) * scale, scale),
    }[how]
    dense, vector = np.asarray(jax.jit(rbf)(x)), np.asarray(normal(getkey(), (8,)))
    settings = {"block_size": 4, "symmetric": how == "moved"}
    whole, hosted = (
        filter_batch_kernel(kernel, store=store, **settings)(x)
        for store in ("device", HostStore())
    )
    counted = filter_batch_kernel(kernel, progress=TqdmProgressMeter(), **settings)(x)
    for got in (whole, hosted, counted):
        np.testing.assert_allclose(jax.device_get(got), dense, rtol=1e-5)
    operator = KernelOperator(kernel, x, **settings)
    np.testing.assert_allclose(operator.mv(vector), dense @ vector, atol=1e-5)
    np.testing.assert_allclose(operator.diagonal(), np.diagonal(dense), rtol=1e-5)
    if how != "moved":  # Devices cannot share a single column.
        np.testing.assert_allclose(operator.column(2), dense[:, 2], rtol=1e-5)


@pytest.mark.devices
def test_how_often_a_kernel_function_is_traced(getkey):
    """Once for shapes and once for a block, also where results are moved."""
    x, y = normal(getkey(), (4, 3)), normal(getkey(), (6, 3))
    scale = put(jnp.array(1.0), make_mesh(AxisType.Explicit, (2,)))
    for factor in (np.float32(1), scale):
        calls = []

        def kernel(x1, x2, factor=factor, calls=calls):
            calls.append(None)
            return rbf(x1, x2) * factor

        filter_batch_kernel(kernel, block_size=2)(x, y)
        assert len(calls) == 2

    # Devices get arrays that are not closed over.
    for store in ("device", "host"):
        linear = CountTraces(lambda x, y: x @ y.T)
        filter_batch_kernel(
            linear, block_size=2, mesh=make_mesh(AxisType.Auto, (2,)), store=store
        )(x, y)
        assert linear.num == 2


@pytest.mark.devices
def test_rows_beside_a_kernel_with_a_function_for_its_mirror_image(getkey):
    """Two devices share the rows of a block, whose number is odd."""
    x = normal(getkey(), (13, 2))
    kernel = lambda x, y: (jnp.einsum("na,mb->nmab", x, y), x[:, 0])
    pairs, rows = filter_batch_kernel(
        kernel,
        block_size=1,
        out_axes=((0, 1), (0, None)),
        symmetric=lambda out: (out[0].transpose(1, 0, 3, 2), out[1]),
        mesh=make_mesh(AxisType.Auto, (2,)),
    )(x)
    assert_same(pairs, kernel(x, x)[0])
    assert_same(rows, x[:, 0])


@pytest.mark.devices
@pytest.mark.parametrize("trace_axes", variants((-1, None), -1))
def test_estimators_whose_model_is_on_a_mesh_with_explicit_axes(trace_axes, getkey):
    x, mesh = normal(getkey(), (4, 3)), make_mesh(AxisType.Explicit, (2,))
    model = bent(3, 2, getkey())
    trace_axes = () if trace_axes is None else trace_axes
    dense = EmpiricalNTK(model, trace_axes=trace_axes)(x)
    there = jax.tree.map(lambda x: put(x, mesh) if eqx.is_array(x) else x, model)
    ntk = EmpiricalNTK(there, trace_axes=trace_axes, mesh=mesh, block_size=2)
    assert_same(jax.device_get(ntk(x)), jax.device_get(dense))
