"""Kernels with `symmetric` that are not symmetric, and those that nearly are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import filter_batch_kernel, KernelOperator, KernelProduct, TopK
from eqxbatch._base.platforms import for_platform, GPU
from ..helpers import make_mesh, normal, on_devices, variants


def uneven(x, y):
    """A kernel whose width is that of the first example."""
    return jnp.exp(-jnp.sum((x - y) ** 2 / (1 + x**2)))


def even(x, y):
    return uneven(x, y) + uneven(y, x)


NOT_TRUE = "`symmetric` is not true of `kernel_fn`"


DRIVERS = {
    "one program": {},
    "product": {"reduce": KernelProduct(jnp.ones(13))},
    "progress": {"progress": True},
    "host": {"store": "host"},
    "mesh": {"mesh": True},
    "reduced on a mesh": {"mesh": True, "reduce": TopK(2)},
    "mesh and host": {"mesh": True, "store": "host"},
}


@pytest.mark.parametrize(
    "name",
    on_devices(
        variants(DRIVERS, "progress", "reduced on a mesh", "mesh and host"),
        lambda name: "mesh" in DRIVERS[name],
    ),
)
def test_kernels_that_are_not_symmetric(name, getkey):
    x, settings = normal(getkey(), (13, 2)), {**DRIVERS[name], "block_size": 4}
    if "mesh" in settings:
        settings["mesh"] = make_mesh(AxisType.Auto, (2,))
    run = lambda kernel: filter_batch_kernel(
        kernel, pairwise=True, symmetric=True, **settings
    )
    with pytest.raises(ValueError, match=NOT_TRUE):
        run(uneven)(x)
    # With the second side, no half is left out.
    np.testing.assert_array_equal(run(uneven)(x, x + 0), run(uneven)(x, x + 0))


@pytest.mark.versions
def test_within_transformations(getkey):
    x = normal(getkey(), (7, 2))
    settings = {"block_size": 3, "pairwise": True, "symmetric": True}
    kernel = filter_batch_kernel(uneven, **settings)
    true = filter_batch_kernel(even, **settings)
    reduced = filter_batch_kernel(uneven, reduce=KernelProduct(jnp.ones(7)), **settings)
    whole = filter_batch_kernel(lambda x, y: x[0] > y[0], **settings)
    of_each = jax.vmap(kernel, 2)
    for run, of in ((kernel, x), (reduced, x), (of_each, x[..., None]), (whole, x)):
        with pytest.raises(RuntimeError, match=NOT_TRUE):
            eqx.filter_jit(lambda x, run=run: run(x))(of)
    dense = jax.vmap(jax.vmap(even, (None, 0)), (0, None))
    got = jax.jit(jax.grad(lambda x: jnp.sum(true(x) ** 2)))(x)
    expected = jax.jit(jax.grad(lambda x: jnp.sum(dense(x, x) ** 2)))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="JAX does not transpose such loops"
)
def test_products_stay_linear_in_the_vector(getkey):
    x = normal(getkey(), (7, 2))
    settings = {"block_size": 3, "pairwise": True, "symmetric": True}
    operator = KernelOperator(even, x, **settings)
    transpose = jax.linear_transpose(operator.mv, jnp.ones(7))
    np.testing.assert_allclose(transpose(jnp.ones(7))[0], operator.mv(jnp.ones(7)))


@pytest.mark.devices
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_within_transformations_on_a_mesh(kind, getkey):
    """Other devices would wait for one that raises an error."""
    x, mesh = normal(getkey(), (8, 2)), make_mesh(kind, (2,))
    settings = {"block_size": 3, "pairwise": True, "symmetric": True, "mesh": mesh}
    kernel = filter_batch_kernel(uneven, **settings)
    assert np.isnan(jax.jit(kernel)(x)).all()
    true = filter_batch_kernel(even, **settings)
    assert np.isfinite(jax.jit(true)(x)).all()


def test_functions_that_are_no_mirror_image(getkey):
    x, w = normal(getkey(), (7, 2)), normal(getkey(), (2, 2, 2))
    # One matrix for each pair, which is transposed as well.
    kernel = lambda x, y: jnp.einsum("ia,jb,aco,bcp->ijop", x, y, w, w)
    right, wrong = (lambda k: k.transpose(1, 0, 3, 2)), (lambda k: k.swapaxes(0, 1))
    run = lambda symmetric: filter_batch_kernel(
        kernel, block_size=3, symmetric=symmetric
    )(x, x)
    np.testing.assert_allclose(run(right), kernel(x, x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=NOT_TRUE):
        run(wrong)


def in_bfloat16(x, y):
    short = lambda a: (a @ jnp.array([[1.0, 0.3], [0.3, 2.0]])).astype(jnp.bfloat16)
    product = short(x) @ y.astype(jnp.bfloat16).T
    return product.astype(jnp.float32)


def of_distances(x, y):
    # In an order in which the two examples are not alike.
    x, y = x + 300, y + 300
    squares = jnp.sum(x**2, 1)[:, None] - 2 * x @ y.T
    return jnp.exp(-(squares + jnp.sum(y**2, 1)[None]) / 100)


def of_all_sizes(x, y):
    sizes = lambda x: 10.0 ** (9 * x)
    return sizes(x) @ sizes(y).T


def with_nans(x, y):
    k = x @ y.T
    a, b = x[:, None, 0], y[None, :, 0]
    return jnp.where(a + b > 1.5, jnp.inf, jnp.where((a > 0.5) & (b < 0), jnp.nan, k))


def hermitian(x, y):
    angles, k = x[:, None, 0] - y[None, :, 0], x @ y.T
    return jax.lax.complex(k * jnp.cos(angles), k * jnp.sin(angles))


@pytest.mark.parametrize(
    "kernel",
    (
        in_bfloat16,
        of_distances,
        of_all_sizes,
        with_nans,
        hermitian,
        lambda x, y: (x @ y.T).astype(jnp.float16),
        lambda x, y: (x[:, None, 0] > y[None, :, 0]) ^ (x[:, None, 0] < y[None, :, 0]),
        lambda x, y: (
            jnp.round(10 * x[:, None, 0]).astype(int)
            * jnp.round(10 * y[None, :, 0]).astype(int)
        ),
        lambda x, y: 0 * (x @ y.T),
    ),
)
def test_kernels_that_are_symmetric_within_rounding(kernel, getkey):
    x = normal(getkey(), (300, 2))
    filter_batch_kernel(kernel, symmetric=True, block_size=None)(x)


@pytest.mark.parametrize(
    "kernel",
    (
        lambda x, y: x[:, None, 0] > y[None, :, 0],
        lambda x, y: jax.lax.complex(0 * (x @ y.T), x @ y.T),
        lambda x, y: x[:, None, 0] + 1.1 * y[None, :, 0],
    ),
)
def test_kernels_that_are_nearly_symmetric(kernel, getkey):
    with pytest.raises(ValueError, match=NOT_TRUE):
        filter_batch_kernel(kernel, symmetric=True)(normal(getkey(), (300, 2)))


def by_ragged_dot(x, y):
    return jax.lax.ragged_dot(x, y.T[None], jnp.array([len(x)]))


@pytest.mark.parametrize("product", (lambda x, y: x @ y.T, by_ragged_dot))
def test_products_of_rounded_operands_are_symmetric_within_their_digits(
    product, getkey
):
    # An asymmetry that operands in bfloat16 could have, and float32 could not.
    above = lambda x, y: jnp.sign(x[:, None, 0] - y[None, :, 0])
    kernel = lambda x, y: product(x, y) + 0.03 * above(x, y)
    x = normal(getkey(), (30, 3))
    call = lambda: filter_batch_kernel(kernel, symmetric=True, block_size=None)(x)
    with pytest.raises(ValueError, match=NOT_TRUE):
        call()
    with for_platform(GPU):
        call()


@pytest.mark.parametrize("dtype", (np.float32, np.complex64, np.int32))
def test_stored_kernels(dtype, getkey):
    k = np.asarray(10 * normal(getkey(), (9, 9))).astype(dtype)
    for stored in (k + k.T, k + k.T * (1 + 1e-5)):
        operator = KernelOperator(stored.astype(dtype), symmetric=True)
        if dtype != np.int32:
            np.testing.assert_allclose(
                operator.mv(jnp.ones(9, dtype)), stored.sum(1), rtol=1e-3, atol=1e-3
            )
    with pytest.raises(ValueError, match="is not true of the stored kernel"):
        KernelOperator(k, symmetric=True).as_matrix()


def test_the_first_block_in_a_store_tells(tmp_path, getkey):
    calls = []

    def kernel(x, y):
        jax.debug.callback(lambda: calls.append(None))
        return uneven(x, y)

    settings = {"pairwise": True, "symmetric": True, "store": tmp_path / "kernel"}
    batched = filter_batch_kernel(kernel, block_size=2, **settings)
    with pytest.raises(ValueError, match=NOT_TRUE):
        batched(normal(getkey(), (40, 2)))
    # Of 210 blocks, each of four entries.
    jax.effects_barrier()
    assert len(calls) < 400
