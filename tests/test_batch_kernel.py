"""`filter_batch_kernel` on devices, against the kernel function itself."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import (
    AbstractReduction,
    EmpiricalKernel,
    EmpiricalNTK,
    filter_batch_kernel,
    FrobeniusNorm,
    HostStore,
    KernelAlignment,
    KernelProduct,
    MemoryBudget,
    ProbedNTK,
    PseudoNTK,
    RowSums,
    TopK,
)
from .helpers import (
    assert_same,
    BLOCK,
    CountTraces,
    make_mesh,
    memory,
    normal,
    put,
    TOTALS,
)
from .kernel_functions import AXES, lopsided, rbf, Structured, white


SIZES = (1, BLOCK, (BLOCK, 3), None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("totals", [(n, 7) for n in (0, *TOTALS)] + [(5, 0), (0, 0)])
def test_two_sides(size, totals, getkey):
    x1, x2 = (normal(getkey(), (n, 3)) for n in totals)
    batched = filter_batch_kernel(lopsided, block_size=size)
    assert_same(batched(x1, x2), lopsided(x1, x2))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("total", (0, *TOTALS))
def test_one_side(size, total, getkey):
    x = normal(getkey(), (total, 3))
    for kernel in (white, lopsided):
        batched = filter_batch_kernel(kernel, block_size=size)
        assert_same(batched(x), kernel(x))
    batched = filter_batch_kernel(white, block_size=size, symmetric=True)
    got = batched(x)
    assert_same(got, white(x))
    np.testing.assert_array_equal(got, got.T)


def test_second_argument_without_a_default(getkey):
    x = normal(getkey(), (7, 3))
    linear = lambda x, y: x @ y.T
    assert_same(filter_batch_kernel(linear, block_size=3)(x), linear(x, x))
    batched = filter_batch_kernel(linear, block_size=3, symmetric=True)
    assert_same(batched(x), linear(x, x))


@pytest.mark.parametrize("symmetric", (True, False))
def test_the_same_array_twice(symmetric, getkey):
    """Is one side, but not the same as none."""
    x = normal(getkey(), (7, 3))
    batched = filter_batch_kernel(white, block_size=3, symmetric=symmetric)
    assert_same(batched(x, x), rbf(x))
    assert_same(batched(x, x + 0), rbf(x))

    def as_in_tinygp(x1, x2=None):
        return x1 @ x2.T if x2 is not None else x1[:, 0]

    batched = filter_batch_kernel(as_in_tinygp, block_size=3, symmetric=symmetric)
    assert_same(batched(x, x), x @ x.T)
    for store in ("device", HostStore()):
        again = filter_batch_kernel(as_in_tinygp, block_size=3, store=store)
        with pytest.raises(ValueError, match=r"expected \(3, 3\) float32 for 3 rows"):
            again(x)


@pytest.mark.parametrize(
    "dtype", (jnp.float32, jnp.bfloat16, jnp.float64, jnp.complex64, jnp.int32, bool)
)
def test_dtypes(dtype, getkey, x64):
    wide = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    x = jnp.round(3 * normal(getkey(), (7, 2), wide))

    def kernel(x, y=None):
        y = x if y is None else y
        k = x @ jnp.conj(y).T
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return k.astype(dtype)
        return jnp.real(k).astype(dtype)

    for symmetric in (True, False):
        batched = filter_batch_kernel(kernel, block_size=3, symmetric=symmetric)
        got = batched(x)
        assert_same(got, kernel(x))
        if symmetric:
            np.testing.assert_array_equal(got, jnp.conj(got).T)


def test_symmetry_is_exact_whatever_rounding_does(getkey):
    """Each tile comes with noise of its own, on the diagonal as well."""

    def noisy(x, y=None):
        is_first = jnp.arange(len(x))[:, None] == 0
        return rbf(x, y) + 1e-3 * is_first.astype(x.dtype) * x[:, :1]

    x = normal(getkey(), (11, 2))
    for size in (None, 3, 4, 11):
        got = filter_batch_kernel(noisy, block_size=size, symmetric=True)(x)
        np.testing.assert_array_equal(got, got.T)
        np.testing.assert_allclose(got, rbf(x), atol=1e-2)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.complex64))
def test_large_tiles_are_made_symmetric_in_pieces(dtype, getkey):
    """A whole kernel of 601 examples, with another axis, and rounding of its own."""
    noise = normal(getkey(), (601, 601, 2), dtype)
    x = normal(getkey(), (601, 1))

    def kernel(x, y=None):
        return noise + jnp.conj(jnp.swapaxes(noise, 0, 1)) * (1 + 1e-6)

    got = filter_batch_kernel(
        lambda x, y=None: jnp.ones((len(x), len(x if y is None else y), 2)),
        block_size=None,
        symmetric=True,
    )(x)
    np.testing.assert_array_equal(got, 1)

    def whole(x, y=None):
        n = len(x if y is None else y)
        return kernel(x)[: len(x), :n]

    got = filter_batch_kernel(whole, block_size=None, symmetric=True)(x)
    np.testing.assert_array_equal(got, jnp.conj(jnp.swapaxes(got, 0, 1)))
    assert_same(got, kernel(x), tol=1e-5)


@pytest.mark.parametrize("one_side", (True, False))
@pytest.mark.parametrize("mesh", (True, False))
def test_pytrees_and_axes(one_side, mesh, getkey):
    model = Structured(jnp.array(0.7), 2)
    inputs = lambda n: {"a": normal(getkey(), (3, n)), "b": normal(getkey(), (2, n))}
    first, second = inputs(9), None if one_side else inputs(6)
    masks = tuple(normal(getkey(), (n,)) for n in (9, 6))
    masks = (masks[0], masks[0]) if one_side else masks
    flip = lambda x: None if x is None else jax.tree.map(jnp.transpose, x)
    dense = model(flip(first), flip(second), mask=masks)
    for symmetric in (False, True):
        batched = filter_batch_kernel(
            lambda x, y=None, **kwargs: model(x, y, **kwargs),
            block_size=4,
            out_axes=AXES,
            symmetric=symmetric,
            mesh=make_mesh(AxisType.Auto) if mesh else None,
        )
        assert_same(batched(flip(first), flip(second), mask=masks), dense)
    transposed = filter_batch_kernel(
        lambda x, y=None: model(flip(x), flip(y)),
        block_size=4,
        in_axes=1,
        out_axes=AXES,
    )
    assert_same(transposed(first, second), model(flip(first), flip(second)))


@pytest.mark.parametrize("totals", ((0, 3), (3, 0), (0, 0)))
def test_one_side_without_examples(totals, getkey):
    """What there is of the other side alone is there."""

    def kernel(x1, x2):
        return {"pairs": x1 @ x2.T, "rows": x1.sum(1), "columns": jnp.cos(x2.sum(1))}

    out_axes = {"pairs": (0, 1), "rows": (0, None), "columns": (None, 0)}
    x, y = (normal(getkey(), (total, 2)) for total in totals)
    mesh = make_mesh(AxisType.Auto, (2,))
    for settings in ({}, {"store": HostStore()}, {"mesh": mesh}):
        batched = filter_batch_kernel(
            kernel, block_size=2, out_axes=out_axes, **settings
        )
        assert_same(jax.device_get(batched(x, y)), jax.device_get(kernel(x, y)))


def test_methods_decorators_and_arguments(getkey):
    class Scaled(eqx.Module):
        scale: jax.Array

        @filter_batch_kernel(block_size=3)
        def kernel(self, x1, x2=None, power=1, *, kind):
            assert kind == "rbf"
            return rbf(x1, x2, self.scale) ** power

    x, y = normal(getkey(), (7, 2)), normal(getkey(), (5, 2))
    model = Scaled(jnp.array(2.0))
    assert_same(model.kernel(x, y, 2, kind="rbf"), rbf(x, y, 2.0) ** 2)
    assert_same(model.kernel(x, kind="rbf"), rbf(x, None, 2.0))
    assert_same(model.kernel(x1=x, x2=y, kind="rbf"), rbf(x, y, 2.0))
    batched = filter_batch_kernel(rbf, block_size=3)
    assert batched.__wrapped__ is rbf
    assert batched.__name__ == "rbf"
    assert_same(batched(np.asarray(x), np.asarray(y), scale=3.0), rbf(x, y, 3.0))


@pytest.mark.parametrize("raw", (True, False))
def test_keys_do_not_depend_on_blocks(raw, getkey):
    def random(x1, x2=None, *, key):
        first, second = (jax.vmap(jr.normal)(keys) for keys in key)
        return first[:, None] + 2 * second[None, :]

    key = jr.PRNGKey(0) if raw else jr.key(0)
    x, y = jnp.ones((7, 1)), jnp.ones((5, 1))
    for args in ((x, y), (x,)):
        for keys in (key, (key, jr.fold_in(key, 5))):
            whole, *others = (
                filter_batch_kernel(random, block_size=size)(*args, key=keys)
                for size in (None, 2, 3)
            )
            assert len(np.unique(whole)) > 20
            for other in others:
                assert_same(other, whole, tol=1e-5)


def estimators():
    model = eqx.nn.MLP(3, 4, 6, 1, jnp.tanh, key=jr.key(0))
    return {
        "traced": EmpiricalNTK(model),
        "full": EmpiricalNTK(model, trace_axes=()),
        "diagonal": EmpiricalNTK(model, trace_axes=(), diagonal_axes=-1),
        "both": EmpiricalKernel(model, trace_axes=()),
        "pseudo": PseudoNTK(model),
        "probed": ProbedNTK(model, num_probes=2, key=jr.key(1)),
    }


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(estimators()))
def test_estimators_are_symmetric_by_themselves(name, getkey):
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (5, 3))
    kernel = estimators()[name]
    for mesh in (None, make_mesh(AxisType.Auto)):
        batched = filter_batch_kernel(kernel, block_size=3, mesh=mesh)
        assert_same(batched(x, y), kernel(x, y))
        got = batched(x)
        assert_same(got, kernel(x))
        assert_same(kernel.symmetric(got), got, tol=0)


def test_estimators_with_keys_and_pairs(getkey):
    class Noisy(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x, scale, key):
            return self.linear(x) * scale * jr.normal(key)

    kernel = EmpiricalNTK(Noisy(eqx.nn.Linear(3, 2, key=jr.key(0))))
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (5, 3))
    s, t = normal(getkey(), (7,)), normal(getkey(), (5,))
    batched = filter_batch_kernel(kernel, block_size=3)
    key = jr.key(1)
    assert_same(
        batched(x, y, key=key, scale=(s, t)), kernel(x, y, key=key, scale=(s, t))
    )
    got = batched(x, key=key, scale=(s, None))
    assert_same(got, kernel(x, key=key, scale=(s, None)))


def test_within_transforms(getkey):
    x = normal(getkey(), (7, 3))
    batched = filter_batch_kernel(rbf, block_size=3, symmetric=True)
    assert_same(jax.jit(batched)(x), rbf(x))
    xs = jnp.stack([x, 2 * x])
    assert_same(jax.vmap(batched)(xs), jax.vmap(rbf)(xs))
    loss = lambda f: lambda x: jnp.sum(f(x) ** 3)
    assert_same(jax.grad(loss(batched))(x), jax.grad(loss(rbf))(x), tol=1e-4)
    tangent = jax.jvp(batched, (x,), (x,))
    assert_same(tangent, jax.jvp(rbf, (x,), (x,)), tol=1e-4)

    mesh = make_mesh(AxisType.Auto)
    spread = filter_batch_kernel(rbf, block_size=3, symmetric=True, mesh=mesh)
    assert_same(jax.grad(loss(spread))(x), jax.grad(loss(rbf))(x), tol=1e-4)

    model = eqx.nn.MLP(3, 2, 4, 1, jnp.tanh, key=getkey())
    of_model = lambda model: jnp.sum(
        filter_batch_kernel(EmpiricalNTK(model), block_size=3)(x)
    )
    expected = eqx.filter_grad(lambda model: jnp.sum(EmpiricalNTK(model)(x)))(model)
    got = eqx.filter_grad(of_model)(model)
    arrays = lambda tree: eqx.filter(tree, eqx.is_array)
    assert_same(arrays(got), arrays(expected), tol=1e-4)


def test_traces(unchecked, getkey):
    kernel = CountTraces(lambda x, y=None: rbf(x, y))
    batched = filter_batch_kernel(kernel, block_size=4)
    x, y = normal(getkey(), (13, 3)), normal(getkey(), (9, 3))
    batched(x, y)
    assert kernel.num == 2  # For the shapes, and for all blocks.
    batched(x + 1, y)
    assert kernel.num == 2
    batched(x)
    assert kernel.num == 5  # And for the blocks on the diagonal, without `x2`.
    batched(x)
    assert kernel.num == 5
    hosted = filter_batch_kernel(kernel, block_size=4, store=HostStore())
    hosted(x, y)
    num = kernel.num
    hosted(x + 1, y)
    assert kernel.num == num


def test_memory_is_flat():
    batched = filter_batch_kernel(rbf, block_size=64, symmetric=True)
    sums = filter_batch_kernel(rbf, block_size=64, symmetric=True, reduce=RowSums())
    found = {}
    for n in (1024, 4096):
        x = jax.ShapeDtypeStruct((n, 8), jnp.float32)
        found[n] = memory(batched, x), memory(sums, x)
    for small, large in zip(*found.values(), strict=True):
        assert large.temp_size_in_bytes < 1.1 * small.temp_size_in_bytes + 60_000
    dense = memory(rbf, jax.ShapeDtypeStruct((4096, 8), jnp.float32))
    assert found[4096][0].temp_size_in_bytes < dense.output_size_in_bytes / 10
    assert found[4096][1].output_size_in_bytes < 20_000


@pytest.mark.parametrize("stored", (True, False))
def test_budget(stored, unchecked, getkey):
    x = normal(getkey(), (600, 3))
    sizes = []

    def kernel(x, y=None):
        sizes.append(len(x))
        return rbf(x, y)

    store = HostStore() if stored else "device"
    batched = filter_batch_kernel(
        kernel, block_size=MemoryBudget("2MB"), store=store, symmetric=True
    )
    got = batched(x)
    np.testing.assert_allclose(got, rbf(x), rtol=1e-5)
    largest = max(size for size in sizes if size < 600)
    assert largest > 30
    if not stored:
        stats = memory(batched, x)
        assert stats.temp_size_in_bytes + stats.output_size_in_bytes <= 2_000_000
        with pytest.raises(ValueError, match="budget of 1,000 bytes is too small") as e:
            filter_batch_kernel(rbf, block_size=MemoryBudget(1000))(x)
        assert "HostStore" in str(e.value.__notes__)


# Meshes.


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("total", (2, 13, 16))
def test_mesh_equals_one_device(kind, total, getkey):
    x, y = normal(getkey(), (total, 3)), normal(getkey(), (6, 3))
    labels = x[:, 0]
    cases = [
        (white, (x,), {"symmetric": True}),
        (lopsided, (x,), {}),
        (lopsided, (x, y), {}),
        (rbf, (x,), {"symmetric": True, "reduce": RowSums()}),
        (lopsided, (x, y), {"reduce": TopK(2)}),
        (rbf, (x,), {"symmetric": True, "reduce": KernelAlignment(labels)}),
    ]
    for kernel, args, settings in cases:
        one = filter_batch_kernel(kernel, block_size=3, **settings)
        many = filter_batch_kernel(
            kernel, block_size=3, mesh=make_mesh(kind), **settings
        )
        got = many(*args)
        assert_same(jax.device_get(got), jax.device_get(one(*args)))
        if "reduce" not in settings:
            if total % 4 == 0:
                assert got.sharding.spec[0] == "data"
            if "symmetric" in settings:
                np.testing.assert_array_equal(got, got.T)


def of_gradients(w):
    """A kernel of derivatives in what it closes over."""

    def kernel(x1, x2=None):
        x2 = x1 if x2 is None else x2
        of_one = jax.grad(lambda w, x: jnp.sin(w @ x))
        first, second = (jax.vmap(of_one, (None, 0))(w, x) for x in (x1, x2))
        return first @ second.T

    return kernel


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_what_a_kernel_function_closes_over_on_a_mesh(kind, getkey):
    x, w = normal(getkey(), (7, 3)), normal(getkey(), (3,))
    mesh = make_mesh(kind, (2,))
    if kind == AxisType.Auto:
        w = put(w, mesh)
    closure = of_gradients(w)
    expected = np.asarray(closure(x))
    for settings, result in (
        ({"symmetric": True}, expected),
        ({"store": HostStore()}, expected),
        ({"reduce": RowSums()}, expected.sum(1)),
    ):
        got = filter_batch_kernel(closure, block_size=2, mesh=mesh, **settings)(x)
        assert_same(jax.device_get(got), result)


def test_estimators_in_a_lambda_on_a_mesh(getkey):
    x, mesh = normal(getkey(), (4, 3)), make_mesh(AxisType.Auto, (2,))
    ntk = EmpiricalNTK(eqx.nn.MLP(3, 2, 4, 1, key=getkey()))
    closure = lambda x1, x2=None: ntk(x1, x2)
    got = filter_batch_kernel(closure, block_size=2, mesh=mesh)(x)
    assert_same(jax.device_get(got), jax.device_get(ntk(x)))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
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
    for derivative in (
        lambda f: lambda *args: jax.grad(f, (0, 1, 2))(*args),
        lambda f: lambda *args: jax.jvp(f, args, args)[1],
    ):
        got, expected = (jax.jit(derivative(f))(*args) for f in (loss, dense))
        assert_same(jax.device_get(got), jax.device_get(expected), tol=1e-4)


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
    assert_same(jax.device_get(got), jax.device_get(of_gradients(w)(x)))


@pytest.mark.parametrize("num", (1, 2, 3))
def test_other_numbers_of_devices(num, getkey):
    x = normal(getkey(), (11, 3))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num]), ("data",))
    got = filter_batch_kernel(white, block_size=2, symmetric=True, mesh=mesh)(x)
    assert_same(jax.device_get(got), jax.device_get(white(x)))
    np.testing.assert_array_equal(got, got.T)


def test_one_axis_of_a_mesh(getkey):
    x = normal(getkey(), (8, 3))
    mesh = make_mesh(AxisType.Auto, (2, 2), ("rows", "other"))
    batched = filter_batch_kernel(rbf, block_size=3, mesh=mesh, mesh_axis="rows")
    got = batched(x)
    assert got.sharding.spec == jax.sharding.PartitionSpec("rows")
    assert_same(jax.device_get(got), jax.device_get(rbf(x)))
    hosted = filter_batch_kernel(
        rbf, block_size=3, mesh=mesh, mesh_axis="rows", store=HostStore()
    )
    np.testing.assert_allclose(hosted(x), rbf(x), rtol=1e-5)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_budget_on_a_mesh(kind, getkey):
    x = normal(getkey(), (40, 3))
    for store in ("device", HostStore()):
        batched = filter_batch_kernel(
            rbf,
            block_size=MemoryBudget("1MB"),
            symmetric=True,
            mesh=make_mesh(kind),
            store=store,
        )
        np.testing.assert_allclose(batched(x), rbf(x), rtol=1e-5)


# Reductions.


@pytest.mark.matrix
@pytest.mark.parametrize("size", (1, 4, (4, 3), None))
@pytest.mark.parametrize("symmetric", (True, False))
def test_reductions(size, symmetric, getkey):
    x = normal(getkey(), (13, 3))
    dense = np.asarray(rbf(x)).astype(np.float64)
    v, y = normal(getkey(), (13, 2)), normal(getkey(), (13,))
    target = np.outer(y, y)
    alignment = np.sum(dense * target)
    alignment /= np.linalg.norm(dense) * np.linalg.norm(target)
    expected = [
        (RowSums(), dense.sum(1)),
        (KernelProduct(v), dense @ np.asarray(v)),
        (KernelProduct(v[:, 0]), dense @ np.asarray(v[:, 0])),
        (FrobeniusNorm(), np.linalg.norm(dense)),
        (KernelAlignment(y), alignment),
        (KernelAlignment(y[:, None], y[:, None]), alignment),
    ]
    for reduction, result in expected:
        batched = filter_batch_kernel(
            rbf, block_size=size, symmetric=symmetric, reduce=reduction
        )
        np.testing.assert_allclose(batched(x), result, rtol=2e-5, atol=1e-5)
    for without_self in (True, False):
        found = filter_batch_kernel(
            rbf, block_size=size, symmetric=symmetric, reduce=TopK(3, without_self)
        )(x)
        scores = dense - 10 * np.eye(13) if without_self else dense
        order = np.argsort(-scores, axis=1)[:, :3]
        np.testing.assert_array_equal(found.indices, order)
        values = np.take_along_axis(scores, order, axis=1)
        np.testing.assert_allclose(found.values, values, rtol=1e-5)


def test_reductions_of_rectangles_and_pytrees(getkey):
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (10, 3))

    def kernel(x, y=None):
        k = lopsided(x, y)
        return {
            "sum": k,
            "norm": jax.lax.complex(k, 2 * k),
            "stack": jnp.stack([k, 2 * k], axis=-1),
        }

    dense = kernel(x, y)
    reduce = {
        "sum": RowSums(),
        "norm": FrobeniusNorm(),
        "stack": KernelProduct(y[:, 0]),
    }
    got = filter_batch_kernel(kernel, block_size=4, reduce=reduce)(x, y)
    assert got["norm"].dtype == jnp.float32
    np.testing.assert_allclose(got["sum"], dense["sum"].sum(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["norm"], jnp.linalg.norm(dense["norm"]), rtol=1e-4)
    product = jnp.einsum("ijk,j->ik", dense["stack"], y[:, 0])
    np.testing.assert_allclose(got["stack"], product, rtol=1e-4, atol=1e-5)
    halves = lambda x, y=None: rbf(x, y).astype(jnp.bfloat16)
    ones = jnp.zeros((1000, 1))
    sums = filter_batch_kernel(halves, block_size=7, reduce=RowSums())(ones)
    assert sums.dtype == jnp.bfloat16
    np.testing.assert_array_equal(sums.astype(jnp.float32), 1000)


class Turned(AbstractReduction):
    """Sums of rows, once and twice, which take turns with each block."""

    @property
    def neutral(self):
        return 0.0

    def init(self, kernel):
        return jnp.zeros((kernel.shape[0], 2), kernel.dtype)

    def update(self, state, tile, rows, columns):
        weights = jnp.tile(jnp.array([[1.0, 2.0]]), (columns.size, 1))
        new = rows.take(state)[:, ::-1] + tile @ weights
        return jax.lax.dynamic_update_slice_in_dim(state, new, rows.start, 0)

    def merge(self, first, second):
        return first + second

    def finalize(self, state):
        return state


@pytest.mark.parametrize(("total", "size"), ((4, 2), (5, 3), (8, 2)))
def test_reductions_that_permute_their_state_on_a_mesh(total, size, getkey):
    x, mesh = normal(getkey(), (total, 3)), make_mesh(AxisType.Auto, (2,))
    settings = {"block_size": size, "mesh": mesh}
    found = filter_batch_kernel(lopsided, reduce=TopK(2), **settings)(x)
    dense = np.asarray(lopsided(x))
    np.testing.assert_array_equal(found.indices, np.argsort(-dense, axis=1)[:, :2])
    ones = lambda x, y=None: jnp.ones((len(x), len(x if y is None else y)))
    turned = filter_batch_kernel(ones, reduce=Turned(), **settings)(x)
    # However often they took turns.
    np.testing.assert_array_equal(np.asarray(turned).sum(1), 3 * total)


def test_reductions_whose_tiles_devices_cannot_share_equally(getkey):
    x, y, mesh = *normal(getkey(), (2, 6, 3)), make_mesh(AxisType.Auto, (2,))
    sums = filter_batch_kernel(lopsided, block_size=2, reduce=RowSums(), mesh=mesh)
    assert_same(sums(x), lopsided(x).sum(1))
    assert_same(sums(x, y), lopsided(x, y).sum(1))


def test_entries_of_minus_infinity_among_the_largest():
    inf = np.inf
    dense = np.array(
        [
            [-inf, 3.0, -inf, 1.0, -inf],
            [-inf, -inf, -inf, -inf, -inf],
            [2.0, -inf, np.nan, 4.0, -inf],
        ],
        np.float32,
    )
    entries = jnp.asarray(dense)
    rows, columns = jnp.arange(3), jnp.arange(5)
    kernel = lambda i, j: entries[i[:, None], j[None, :]]
    for settings in ({}, {"mesh": make_mesh(AxisType.Auto, (2,))}):
        for without_self in (False, True):
            found = filter_batch_kernel(
                kernel, block_size=2, reduce=TopK(4, without_self), **settings
            )(rows, columns)
            np.testing.assert_array_equal(
                np.take_along_axis(dense, np.asarray(found.indices), 1), found.values
            )
            for row, indices in enumerate(np.asarray(found.indices)):
                allowed = {*range(5)} - ({row} if without_self else set())
                assert {*indices} <= allowed
                assert len({*indices}) == 4


@pytest.mark.parametrize("dtype", (jnp.int8, jnp.uint8, jnp.bool_, jnp.int32))
def test_sums_of_rows_of_integers(dtype):
    x = jnp.arange(5)
    dense = (x[:, None] + jnp.full((1, 7), 60)).astype(dtype)
    kernel = lambda i, j: dense[i[:, None], j[None, :]]
    got = filter_batch_kernel(kernel, block_size=3, reduce=RowSums())(x, jnp.arange(7))
    assert_same(got, jnp.sum(dense, axis=1))


def test_reductions_within_transforms(getkey):
    x, v = normal(getkey(), (9, 3)), normal(getkey(), (9,))

    def loss(x, v):
        reduce = KernelProduct(v)
        return v @ filter_batch_kernel(rbf, block_size=4, reduce=reduce)(x)

    dense = lambda x, v: v @ rbf(x) @ v
    for argnum in (0, 1):
        got, expected = (jax.grad(f, argnum)(x, v) for f in (loss, dense))
        assert_same(got, expected, tol=1e-4)


# Bad input.


def test_wrong_settings(unchecked):
    wrong = [
        ({"block_size": 0}, ValueError, "`block_size` must be at least 1; got 0"),
        ({"block_size": (2, 3, 4)}, ValueError, "`block_size` must be one size, or"),
        ({"block_size": 1.5}, TypeError, "`block_size` must be an int"),
        ({"symmetric": 1}, TypeError, "`symmetric` must be a bool, None, or a"),
        ({"store": "disk"}, TypeError, "`store` must be 'device', a `HostStore"),
        ({"progress": True}, TypeError, "`progress` must be a progress meter"),
        ({"mesh": 4}, TypeError, "`mesh` must be a `jax.sharding.Mesh`; got 4"),
        ({"mesh_axis": "data"}, ValueError, "`mesh_axis` is 'data', but there is no"),
        (
            {"mesh": make_mesh(AxisType.Auto), "mesh_axis": "rows"},
            ValueError,
            r"`mesh_axis` must name one of the axes of the mesh, \('data',\); got 'ro",
        ),
        (
            {"mesh": make_mesh(AxisType.Auto, (2, 2), ("a", "b"))},
            ValueError,
            "`mesh_axis` must name one of the axes",
        ),
        (
            {"reduce": RowSums(), "store": HostStore()},
            ValueError,
            "With `reduce`, no kernel is kept",
        ),
    ]
    for settings, error, match in wrong:
        with pytest.raises(error, match=match):
            filter_batch_kernel(rbf, **{"block_size": 4, **settings})
    with pytest.raises(TypeError, match="`fun` must be callable"):
        filter_batch_kernel(3, block_size=4)


def test_wrong_inputs(unchecked, getkey):
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (5, 3))
    batched = filter_batch_kernel(rbf, block_size=4)
    with pytest.raises(ValueError, match="must agree on the number of examples"):
        filter_batch_kernel(lambda x, y: 0, block_size=4)((x, y), (x, x))
    with pytest.raises(ValueError, match="Nothing is batched"):
        batched(3.0, x)
    masked = filter_batch_kernel(
        lambda x, y, mask: mask[0][:, None] * mask[1][None], block_size=4
    )
    with pytest.raises(ValueError, match="must agree on the number of examples") as e:
        masked(x, y, mask=(jnp.ones(6), jnp.ones(5)))
    assert "Keyword arguments" in str(e.value.__notes__)
    with pytest.raises(ValueError, match="`key` must be one key, or a pair"):
        batched(x, y, key=3)


def test_wrong_kernels(unchecked, getkey):
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (5, 3))
    wrong = [
        (
            lambda x, y: x @ y.T @ jnp.ones(len(y)),
            {},
            ValueError,
            r"returned shape \(2,\) in output for 2 rows and 3 columns, whose axis 1",
        ),
        (lambda x, y: y @ x.T, {}, ValueError, r"shape \(3, 2\) in output.*whose axis"),
        (
            lambda x, y: x @ y.T,
            {"out_axes": (0, 2)},
            ValueError,
            "whose axis 2 should be that of the columns. Return an array with",
        ),
        (
            lambda x, y: jnp.ones(()),
            {"out_axes": (None, None)},
            ValueError,
            "`out_axes` gives output neither rows nor columns",
        ),
        (
            lambda x, y: (x @ y.T,),
            {"out_axes": {"a": (0, 1)}},
            ValueError,
            "`out_axes` must be a PyTree prefix of what `kernel_fn` returns",
        ),
        (
            lambda x, y: x @ y.T,
            {"out_axes": 0},
            TypeError,
            "`out_axes` must consist of",
        ),
        (lambda x, y: "kernel", {}, ValueError, "`kernel_fn` must return at least one"),
        (
            lambda x, y: jnp.ones((len(x), len(y), len(x))),
            {},
            ValueError,
            r"expected \(4, 3, 2\) float32 for 4 rows and 3 columns, got \(4, 3, 4\)",
        ),
        (
            lambda x, y: x @ y.T,
            {"reduce": 3},
            TypeError,
            "`reduce` must consist of `eqxbatch.AbstractReduction`s",
        ),
        (
            lambda x, y: x[:, 0],
            {"reduce": RowSums(), "out_axes": (0, None)},
            ValueError,
            "`reduce` is for kernels with rows and columns",
        ),
        (
            lambda x, y: x @ y.T,
            {"reduce": KernelProduct(jnp.ones(4))},
            ValueError,
            "`vectors` must be one vector",
        ),
        (
            lambda x, y: x @ y.T,
            {"reduce": TopK(6)},
            ValueError,
            "`k` must be at most the number of entries of a row, 5; got 6",
        ),
        (
            lambda x, y: (x @ y.T).astype(jnp.int32),
            {"reduce": FrobeniusNorm()},
            TypeError,
            "FrobeniusNorm needs a kernel of an inexact dtype; got int32",
        ),
        (
            lambda x, y: (x @ y.T)[..., None],
            {"reduce": TopK(1)},
            ValueError,
            "TopK needs a kernel with one number for each pair",
        ),
        (
            lambda x, y: x @ y.T,
            {"reduce": KernelAlignment(jnp.ones(3))},
            ValueError,
            "KernelAlignment needs a kernel of shape",
        ),
    ]
    for kernel, settings, error, match in wrong:
        with pytest.raises(error, match=match):
            filter_batch_kernel(kernel, block_size=(4, 3), **settings)(x, y)
    with pytest.raises(ValueError, match="`k` must be at least 1; got 0"):
        TopK(0)
    shifted = filter_batch_kernel(rbf, block_size=4, symmetric=lambda k: k[:2])
    with pytest.raises(ValueError, match="`symmetric` must return the block with rows"):
        shifted(x)
    with pytest.raises(AttributeError, match=r"transpose|NoneType") as e:
        filter_batch_kernel(lambda x, y=None: x @ y.T, block_size=4)(x)
    assert "`x2` is None" in str(e.value.__notes__)


def test_states_that_change_their_type(unchecked, getkey):
    class Growing(AbstractReduction):
        @property
        def neutral(self):
            return 0

        def init(self, kernel):
            return jnp.zeros(1)

        def update(self, state, tile, rows, columns):
            return jnp.concatenate([state, state])

        def merge(self, first, second):
            return first

        def finalize(self, state):
            return state

    x = normal(getkey(), (7, 3))
    with pytest.raises(TypeError, match="must keep structure, shapes and dtypes"):
        filter_batch_kernel(rbf, block_size=4, reduce=Growing())(x)
