"""Reductions of kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import (
    AbstractReduction,
    filter_batch_kernel,
    FrobeniusNorm,
    KernelProduct,
    TopK,
)
from ..helpers import assert_same, make_mesh, memory, normal, on_devices, variants
from .kernel_functions import lopsided, rbf


# Reductions.


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("size", "symmetric"), ((1, False), (4, True), ((4, 3), True), (None, False))
)
def test_reductions(size, symmetric, getkey):
    x = normal(getkey(), (13, 3))
    dense = np.asarray(rbf(x)).astype(np.float64)
    v = normal(getkey(), (13, 2))
    expected = [
        (KernelProduct(jnp.ones(13)), dense.sum(1)),
        (KernelProduct(v), dense @ np.asarray(v)),
        (KernelProduct(v[:, 0]), dense @ np.asarray(v[:, 0])),
        (FrobeniusNorm(), np.linalg.norm(dense)),
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


class OfSquares(KernelProduct):
    """Inherits the way of mirror images, which is not that of its own `update`."""

    def update(self, state, tile, rows, columns):
        return super().update(state, tile**2, rows, columns)


def test_updates_of_subclasses_get_mirror_images():
    x = np.arange(1.0, 5.0, dtype=np.float32)[:, None]
    batched = filter_batch_kernel(
        lambda x, y: x @ y.T,
        block_size=2,
        symmetric=True,
        reduce=OfSquares(jnp.ones(4)),
    )
    np.testing.assert_array_equal(batched(x), np.sum((x @ x.T) ** 2, axis=1))


def test_reductions_of_rectangles_and_pytrees(getkey):
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (10, 3))

    def kernel(x, y=None):
        k = lopsided(x, y)
        return {
            "sum": k,
            "norm": jax.lax.complex(k, 2 * k),
            "stack": jnp.stack([k, 2 * k], axis=-1),
        }

    dense = jax.device_get(jax.jit(kernel)(x, y))
    reduce = {
        "sum": KernelProduct(jnp.ones(10)),
        "norm": FrobeniusNorm(),
        "stack": KernelProduct(y[:, 0]),
    }
    got = filter_batch_kernel(kernel, block_size=4, reduce=reduce)(x, y)
    assert got["norm"].dtype == jnp.float32
    np.testing.assert_allclose(got["sum"], dense["sum"].sum(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["norm"], np.linalg.norm(dense["norm"]), rtol=1e-4)
    product = np.einsum("ijk,j->ik", dense["stack"], y[:, 0])
    np.testing.assert_allclose(got["stack"], product, rtol=1e-4, atol=1e-5)
    halves = lambda x, y=None: rbf(x, y).astype(jnp.bfloat16)
    reduce = KernelProduct(jnp.ones(1000, jnp.bfloat16))
    sums = filter_batch_kernel(halves, block_size=7, reduce=reduce)(
        jnp.zeros((1000, 1))
    )
    assert sums.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(sums, np.float32), 1000)


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


@pytest.mark.devices
@pytest.mark.parametrize(
    ("total", "size"), variants(((4, 2), (5, 3), (8, 2)), (4, 2), (8, 2))
)
def test_reductions_that_permute_their_state_on_a_mesh(total, size, getkey):
    x, mesh = normal(getkey(), (total, 3)), make_mesh(AxisType.Auto, (2,))
    settings = {"block_size": size, "mesh": mesh}
    found = filter_batch_kernel(lopsided, reduce=TopK(2), **settings)(x)
    dense = np.asarray(jax.jit(lopsided)(x))
    np.testing.assert_array_equal(found.indices, np.argsort(-dense, axis=1)[:, :2])
    ones = lambda x, y=None: jnp.ones((len(x), len(x if y is None else y)))
    turned = filter_batch_kernel(ones, reduce=Turned(), **settings)(x)
    # However often they took turns.
    np.testing.assert_array_equal(np.asarray(turned).sum(1), 3 * total)


@pytest.mark.devices
def test_reductions_whose_tiles_devices_cannot_share_equally(getkey):
    x, y = (normal(getkey(), (6, 3)) for _ in range(2))
    mesh = make_mesh(AxisType.Auto, (2,))
    reduce = KernelProduct(jnp.ones(6))
    sums = filter_batch_kernel(lopsided, block_size=2, reduce=reduce, mesh=mesh)
    dense = jax.jit(lambda x, y: (lopsided(x).sum(1), lopsided(x, y).sum(1)))(x, y)
    assert_same(jax.device_get((sums(x), sums(x, y))), jax.device_get(dense))


@pytest.mark.devices
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
    mesh = {"mesh": make_mesh(AxisType.Auto, (2,))}
    for settings, without_self in (({}, False), (mesh, True)):
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


def _largest(dense, k):
    """The columns of the `k` largest entries, NaN first, then by column."""
    ranked = np.where(np.isnan(dense), np.inf, dense).astype(np.float64)
    number = np.broadcast_to(~np.isnan(dense), dense.shape)
    columns = np.broadcast_to(np.arange(dense.shape[1]), dense.shape)
    return np.lexsort((columns, -ranked, number), axis=1)[:, :k]


def _with_ties(rng, shape):
    """Few different values, among them NaNs and zeros of both signs."""
    inf, nan = np.inf, np.nan
    values = np.array([-inf, -1, -0.0, 0.0, 1, inf, nan, -nan], np.float32)
    assert [*np.signbit(values[-2:])] == [False, True]
    return rng.choice(values, shape)


_DRIVERS = ({}, {"progress": True}, {"mesh": None})


@pytest.mark.parametrize("dtype", variants((jnp.float32, jnp.bfloat16), jnp.bfloat16))
@pytest.mark.parametrize(
    ("size", "driver"),
    on_devices(
        variants(
            ((2, 0), ((4, 3), 2), (5, 1), (None, 0), (1, 2), (3, 2)),
            *(((4, 3), 2), (None, 0), (1, 2)),
        ),
        lambda size, driver: "mesh" in _DRIVERS[driver],
    ),
)
def test_equal_entries_and_nans(size, driver, dtype):
    """`jax.lax.top_k` ranks NaN by its sign bit, which 0 / 0 sets on x86."""
    settings = {"block_size": size, **_DRIVERS[driver]}
    if "mesh" in settings:
        settings["mesh"] = make_mesh(AxisType.Auto, (2,))
    rng = np.random.default_rng(0)
    square = np.triu(_with_ties(rng, (11, 11)))
    square += np.triu(square, 1).T
    for dense, is_symmetric in ((_with_ties(rng, (9, 13)), False), (square, True)):
        entries, (rows, columns) = (
            jnp.asarray(dense, dtype),
            map(jnp.arange, dense.shape),
        )

        def kernel(i, j=None, entries=entries):
            return entries[i[:, None], (i if j is None else j)[None, :]]

        for k in (1, 6):
            run = filter_batch_kernel(
                kernel, symmetric=is_symmetric, reduce=TopK(k), **settings
            )
            found = run(rows) if is_symmetric else run(rows, columns)
            expected = _largest(dense, k)
            np.testing.assert_array_equal(found.indices, expected)
            values = np.take_along_axis(dense, expected, 1)
            assert found.values.dtype == dtype
            np.testing.assert_array_equal(found.values.astype(jnp.float32), values)


@pytest.mark.parametrize(
    ("total", "size", "k"),
    # With a last group that is smaller, and without; one block, and several.
    variants(((70, 35, 2), (97, 97, 2), (64, 64, 4), (90, (33, 41), 1)), (70, 35, 2)),
)
def test_the_largest_of_groups_of_columns(total, size, k):
    """With many columns, only those are ranked whose group has a large entry."""
    rng = np.random.default_rng(0)
    square = np.triu(_with_ties(rng, (total, total)))
    # Most rows have few NaNs, in any place of a group.
    few = np.triu(rng.integers(-5, 5, (total, total))).astype(np.float32)
    square = np.where(np.triu(rng.random((total, total))) < 0.95, few, square)
    square += np.triu(square, 1).T
    entries, rows = jnp.asarray(square), jnp.arange(total)
    kernel = lambda i, j=None: entries[i[:, None], (i if j is None else j)[None, :]]
    others = np.arange(total - 1) + (np.arange(total - 1) >= np.arange(total)[:, None])
    without_self = _largest(np.take_along_axis(square, others, 1), k)
    for symmetric in (False, True):
        settings = {"block_size": size, "symmetric": symmetric}
        found = filter_batch_kernel(kernel, reduce=TopK(k), **settings)(rows)
        np.testing.assert_array_equal(found.indices, _largest(square, k))
        values = np.take_along_axis(square, np.asarray(found.indices), 1)
        np.testing.assert_array_equal(found.values, values)
        found = filter_batch_kernel(kernel, reduce=TopK(k, True), **settings)(rows)
        expected = np.take_along_axis(others, without_self, 1)
        np.testing.assert_array_equal(found.indices, expected)


@pytest.mark.parametrize("size", variants((4, 5), 5))
def test_products_with_mirror_images(size, getkey):
    """Of a block, without transposing it: of complex numbers, and with more axes."""
    x = normal(getkey(), (13, 3))
    turned = np.exp(1j * np.asarray(x[:, :1] - x[:, :1].T))
    hermitian = (np.asarray(rbf(x)) * turned).astype(np.complex64)
    stack = np.stack([np.asarray(rbf(x)), 2 * np.asarray(rbf(x))], axis=-1)
    one, many = normal(getkey(), (13,)), normal(getkey(), (13, 4))
    dense = {"hermitian": hermitian, "stack": stack}

    def kernel(i, j=None):
        j = i if j is None else j
        return {
            name: jnp.asarray(whole)[i[:, None], j[None, :]]
            for name, whole in dense.items()
        }

    run = lambda reduce: filter_batch_kernel(
        kernel, block_size=size, symmetric=True, reduce=reduce
    )(jnp.arange(13))
    for vectors in (one, many):
        products = run(
            {
                name: KernelProduct(vectors.astype(whole.dtype))
                for name, whole in dense.items()
            }
        )
        for name, whole in dense.items():
            expected = np.tensordot(whole, vectors, ((1,), (0,)))
            np.testing.assert_allclose(
                products[name], expected, rtol=1e-4, atol=1e-5, err_msg=name
            )
    norms = run(FrobeniusNorm())
    for name, whole in dense.items():
        np.testing.assert_allclose(norms[name], np.linalg.norm(whole), rtol=1e-5)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.complex64, jnp.int32))
def test_products_of_a_kernel_that_rounding_makes_asymmetric(dtype, getkey):
    """They are those of a kernel that is exactly symmetric, as stored ones are."""
    half = 3 * np.asarray(normal(getkey(), (4, 4), jnp.complex64))
    half = half if dtype == jnp.complex64 else half.real
    noise = 0 if dtype == jnp.int32 else np.tril(np.full((4, 4), 1e-3), -1)
    dense = (np.rint(half + np.conj(half).T) + noise).astype(half.dtype).astype(dtype)
    kernel = lambda i, j: jnp.asarray(dense)[i[:, None], j[None, :]]
    for size in (None, 2, 3):
        settings = {"block_size": size, "symmetric": True}
        reduce = KernelProduct(jnp.eye(4, dtype=dtype))
        found = filter_batch_kernel(kernel, reduce=reduce, **settings)(jnp.arange(4))
        assert found.dtype == dtype
        np.testing.assert_allclose(found, np.conj(found).T, atol=1e-6)
        np.testing.assert_allclose(found, dense, atol=2e-3)


@pytest.mark.cpu
def test_products_take_the_memory_of_one_block():
    """No block is combined with its transpose, unless vectors are many."""
    num = 600
    for columns, blocks in ((1, 1), (32, 2)):
        reduce = KernelProduct(jnp.ones((num, columns)))
        run = filter_batch_kernel(rbf, block_size=None, symmetric=True, reduce=reduce)
        taken = memory(lambda x: run(x), jnp.ones((num, 3))).temp_size_in_bytes
        assert blocks - 1 < taken / (4 * num**2) < blocks + 0.5


def test_gradient_of_the_largest_entries():
    """Of equal entries, the one that is returned has the derivative."""
    dense = jnp.array([[0.0, -0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 0.0, 2.0]])
    i, j = map(jnp.arange, dense.shape)

    def total(dense):
        kernel = lambda i, j: dense[i[:, None], j[None, :]]
        found = filter_batch_kernel(kernel, block_size=2, reduce=TopK(3))(i, j)
        return jnp.sum(found.values @ jnp.array([1.0, 2.0, 3.0]))

    expected = [[3, 0, 1, 2, 0], [1, 2, 3, 0, 0]]
    np.testing.assert_array_equal(jax.grad(total)(dense), expected)


@pytest.mark.parametrize("dtype", (jnp.int8, jnp.uint8, jnp.bool_, jnp.int32))
def test_sums_of_rows_of_integers(dtype):
    x = jnp.arange(5)
    dense = (x[:, None] + jnp.full((1, 7), 60)).astype(dtype)
    kernel = lambda i, j: dense[i[:, None], j[None, :]]
    reduce = KernelProduct(jnp.ones(7, dtype))
    got = filter_batch_kernel(kernel, block_size=3, reduce=reduce)(x, jnp.arange(7))
    assert_same(got, dense @ jnp.ones(7, dtype))


@pytest.mark.parametrize("on_mesh", on_devices((True, False), bool))
def test_many_blocks_of_equal_values(on_mesh):
    """Adding one by one loses 6e-5 of the sums."""
    value, num = np.float32(0.1), 2**13
    settings = {"mesh": make_mesh(AxisType.Auto, (2,))} if on_mesh else {}
    # With one block for each entry. Devices share the blocks of one row.
    reduce = {
        "norm": FrobeniusNorm(),
        "rows": KernelProduct(jnp.ones(num)),
        "product": KernelProduct(jnp.ones((num, 2))),
        "complex": KernelProduct(jnp.ones(num, complex)),
    }

    def kernel(x, y):
        k = value * x[:, None] * y[None, :]
        return {**dict.fromkeys(reduce, k), "complex": jax.lax.complex(k, 2 * k)}

    run = filter_batch_kernel(kernel, block_size=1, reduce=reduce, **settings)
    found = run(jnp.ones(1), jnp.ones(num))
    total = num * np.float64(value)
    for name, expected in (
        ("norm", total / np.sqrt(num)),
        ("rows", total),
        ("product", total),
        ("complex", total * (1 + 2j)),
    ):
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)


def test_reductions_within_transforms(getkey):
    x, v = normal(getkey(), (9, 3)), normal(getkey(), (9,))

    def loss(x, v):
        reduce = KernelProduct(v)
        return v @ filter_batch_kernel(rbf, block_size=4, reduce=reduce)(x)

    dense = lambda x, v: v @ rbf(x) @ v
    both = jax.jit(lambda x, v: [jax.grad(f, (0, 1))(x, v) for f in (loss, dense)])
    assert_same(*both(x, v), tol=1e-4)


@pytest.mark.parametrize("on_mesh", on_devices((True, False), bool))
def test_norms_whose_squares_are_out_of_range(on_mesh, getkey):
    x = normal(getkey(), (9, 3))
    settings = {"mesh": make_mesh(AxisType.Auto, (2,))} if on_mesh else {}
    # From block to block, entries are larger and smaller by orders of magnitude.
    sizes = jnp.array([1, 10, 1e-9, 1, 1, 100, 1e-3, 1, 1])

    @jax.jit
    def run(scale):
        kernel = lambda x, y: scale * (x @ y.T)
        reduced = filter_batch_kernel(
            kernel, block_size=2, reduce=FrobeniusNorm(), **settings
        )
        return reduced(sizes[:, None] * x, x + 0)

    wide = [np.asarray(a, np.float64) for a in (sizes[:, None] * x, x)]
    norm = np.linalg.norm(wide[0] @ wide[1].T)
    for scale in (1, 1e20, 1e-25, 1e27, 1e-36):
        np.testing.assert_allclose(run(jnp.float32(scale)), scale * norm, rtol=1e-5)
    assert run(jnp.float32(0)) == 0
    assert np.isinf(run(jnp.float32(jnp.inf)))
    assert np.isnan(run(jnp.float32(jnp.nan)))


def test_derivatives_of_norms(getkey):
    x = normal(getkey(), (9, 3))

    @jax.jit
    def slope(scale, x):
        kernel = lambda x, y: scale * lopsided(x, y)
        run = filter_batch_kernel(kernel, block_size=4, reduce=FrobeniusNorm())
        return jax.grad(lambda x: run(x))(x)

    wanted = jax.jit(jax.grad(lambda x: jnp.linalg.norm(lopsided(x))))(x)
    for scale in (1, 1e20, 1e-25):
        assert_same(slope(jnp.float32(scale), x) / scale, wanted, tol=1e-4)


@pytest.mark.parametrize("columns", (0, 1, 5))
def test_the_largest_of_no_rows(columns):
    """A row has fewer than `k` entries, but there is no row."""
    for without_self in (False, True):
        kernel = filter_batch_kernel(
            rbf, block_size=2, reduce=TopK(2, without_self=without_self)
        )
        found = kernel(jnp.zeros((0, 3)), jnp.zeros((columns, 3)))
        assert found.values.shape == found.indices.shape == (0, 2)
        with pytest.raises(ValueError, match="number of entries of a row, 0; got 2"):
            kernel(jnp.zeros((4, 3)), jnp.zeros((0, 3)))


def _loss(reduce, n, symmetric=True):
    """Of vectors and of a number of the kernel."""

    def loss(vectors, scale):
        x = jnp.stack([jnp.linspace(0.0, 3.0, n), jnp.linspace(0.0, 1.0, n) ** 2], 1)
        kernel = filter_batch_kernel(
            rbf, block_size=64, symmetric=symmetric, reduce=reduce(vectors)
        )
        return jnp.sum(kernel(x, scale=scale) ** 2)

    return loss


@pytest.mark.cpu
@pytest.mark.versions
@pytest.mark.parametrize(
    ("reduce", "argnums"),
    variants(
        (
            (KernelProduct, (0,)),
            (KernelProduct, (0, 1)),
            (lambda _: FrobeniusNorm(), (1,)),
        ),
        (KernelProduct, (0,)),
    ),
)
def test_gradients_do_not_keep_the_kernel(reduce, argnums):
    """Blocks and their products are computed again in the backward pass."""
    sizes = []
    for n in (256, 1024):
        gradient = jax.grad(_loss(reduce, n), argnums)
        sizes.append(
            memory(gradient, jnp.ones((n, 2)), jnp.ones(())).temp_size_in_bytes
        )
    # 16 times the blocks, each of 16 kB.
    assert sizes[1] < 4 * sizes[0]
    assert sizes[1] < 1024**2 * 4 / 10


def test_second_derivatives_of_products(getkey):
    n, scale = 70, jnp.asarray(0.7)
    v = normal(getkey(), (n, 2))
    x = jnp.stack([jnp.linspace(0.0, 3.0, n), jnp.linspace(0.0, 1.0, n) ** 2], 1)
    dense = lambda v, scale: jnp.sum((rbf(x, scale=scale) @ v) ** 2)
    derivatives = jax.jit(
        lambda of: jax.jvp(jax.value_and_grad(of, (0, 1)), (v, scale), (v, scale)),
        static_argnums=0,
    )
    assert_same(derivatives(_loss(KernelProduct, n)), derivatives(dense), tol=1e-4)
