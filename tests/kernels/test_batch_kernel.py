"""`filter_batch_kernel` on devices, against the kernel function itself."""

import dataclasses

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
    KernelProduct,
    MemoryBudget,
    ProbedNTK,
    PseudoNTK,
    TopK,
)
from ..helpers import (
    assert_same,
    bent,
    BLOCK,
    CountTraces,
    make_mesh,
    memory,
    normal,
    on_devices,
    spread,
    thinned,
    TOTALS,
)
from .kernel_functions import AXES, lopsided, rbf, Structured, white


SIZES = (1, BLOCK, (BLOCK, 3), None)


@pytest.mark.parametrize(
    ("size", "totals"),
    # With the sizes in turn.
    [
        (SIZES[i % 4], totals)
        for i, totals in enumerate([*((n, 7) for n in (0, *TOTALS)), (5, 0), (0, 0)])
    ],
)
def test_two_sides(size, totals, getkey):
    x1, x2 = (normal(getkey(), (n, 3)) for n in totals)
    batched = filter_batch_kernel(lopsided, block_size=size)
    assert_same(batched(x1, x2), jax.jit(lopsided)(x1, x2))


@pytest.mark.parametrize(
    ("size", "total"), thinned(SIZES, (0, 1, BLOCK - 1, BLOCK, 13))
)
def test_one_side(size, total, getkey):
    x = normal(getkey(), (total, 3))
    dense = jax.device_get(jax.jit(lambda x: (white(x), lopsided(x)))(x))
    for kernel, expected in zip((white, lopsided), dense, strict=True):
        batched = filter_batch_kernel(kernel, block_size=size)
        assert_same(batched(x), expected)
    batched = filter_batch_kernel(white, block_size=size, symmetric=True)
    got = np.asarray(batched(x))
    assert_same(got, dense[0])
    np.testing.assert_array_equal(got, got.T)


def test_second_argument_without_a_default(getkey):
    x = normal(getkey(), (7, 3))
    linear = lambda x, y: x @ y.T
    expected = np.asarray(x) @ np.asarray(x).T
    assert_same(filter_batch_kernel(linear, block_size=3)(x), expected)
    batched = filter_batch_kernel(linear, block_size=3, symmetric=True)
    assert_same(batched(x), expected)


@pytest.mark.parametrize("symmetric", (True, False))
def test_the_same_array_twice(symmetric, getkey):
    """Is one side, but not the same as none."""
    x = normal(getkey(), (7, 3))
    batched = filter_batch_kernel(white, block_size=3, symmetric=symmetric)
    expected = jax.jit(rbf)(x)
    assert_same(batched(x, x), expected)
    assert_same(batched(x, jnp.asarray(np.array(x))), expected)

    def as_in_tinygp(x1, x2=None):
        return x1 @ x2.T if x2 is not None else x1[:, 0]

    batched = filter_batch_kernel(as_in_tinygp, block_size=3, symmetric=symmetric)
    assert_same(batched(x, x), np.asarray(x) @ np.asarray(x).T)
    for store in ("device", HostStore()):
        again = filter_batch_kernel(as_in_tinygp, block_size=3, store=store)
        with pytest.raises(ValueError, match=r"expected \(3, 3\) float32 for 3 rows"):
            again(x)


@pytest.mark.parametrize(
    "dtype",
    spread((jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float64, jnp.int32, bool), 3),
)
def test_dtypes(dtype, getkey, x64):
    wide = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    x = jnp.asarray(np.round(3 * np.asarray(normal(getkey(), (7, 2), wide))))

    def kernel(x, y=None):
        y = x if y is None else y
        k = x @ jnp.conj(y).T
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return k.astype(dtype)
        return jnp.real(k).astype(dtype)

    for symmetric in (True, False):
        batched = filter_batch_kernel(kernel, block_size=3, symmetric=symmetric)
        got = np.asarray(batched(x))
        assert_same(got, np.asarray(jax.jit(kernel)(x)))
        if symmetric:
            np.testing.assert_array_equal(got, np.conj(got).T)


def test_symmetry_is_exact_whatever_rounding_does(getkey):
    """Each tile comes with noise of its own, on the diagonal as well."""

    def noisy(x, y=None):
        is_first = jnp.arange(len(x))[:, None] == 0
        return rbf(x, y) + 1e-3 * is_first.astype(x.dtype) * x[:, :1]

    x = normal(getkey(), (11, 2))
    expected = jax.jit(rbf)(x)
    for size in (None, 3, 4, 11):
        got = filter_batch_kernel(noisy, block_size=size, symmetric=True)(x)
        got = np.asarray(got)
        np.testing.assert_array_equal(got, got.T)
        np.testing.assert_allclose(got, expected, atol=1e-2)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.complex64))
def test_large_tiles_are_made_symmetric_in_pieces(dtype, getkey):
    """A whole kernel of 601 examples, with another axis, and rounding of its own."""
    noise = np.asarray(normal(getkey(), (601, 601, 2), dtype))
    noise = noise + np.conj(np.swapaxes(noise, 0, 1)) * noise.dtype.type(1 + 1e-6)
    x = normal(getkey(), (601, 1))
    got = filter_batch_kernel(
        lambda x, y=None: jnp.ones((len(x), len(x if y is None else y), 2)),
        block_size=None,
        symmetric=True,
    )(x)
    np.testing.assert_array_equal(got, 1)

    def whole(x, y=None):
        n = len(x if y is None else y)
        return jnp.asarray(noise)[: len(x), :n]

    got = filter_batch_kernel(whole, block_size=None, symmetric=True)(x)
    got = np.asarray(got)
    np.testing.assert_array_equal(got, np.conj(np.swapaxes(got, 0, 1)))
    assert_same(got, noise, tol=1e-5)


@pytest.mark.parametrize(
    ("one_side", "mesh"),
    on_devices(thinned((True, False), (True, False)), lambda one_side, mesh: mesh),
)
def test_pytrees_and_axes(one_side, mesh, getkey):
    model = Structured(jnp.array(0.7), 2)
    inputs = lambda n: {"a": normal(getkey(), (3, n)), "b": normal(getkey(), (2, n))}
    first, second = inputs(9), None if one_side else inputs(6)
    masks = tuple(normal(getkey(), (n,)) for n in (9, 6))
    masks = (masks[0], masks[0]) if one_side else masks
    flip = lambda x: None if x is None else jax.tree.map(jnp.transpose, x)
    whole = eqx.filter_jit(
        lambda first, second, **kwargs: model(flip(first), flip(second), **kwargs)
    )
    dense, unmasked = whole(first, second, mask=masks), whole(first, second)
    transpose = lambda x: jnp.asarray(np.asarray(x).T)
    rows, columns = jax.tree.map(transpose, (first, second))
    # With two sides, it changes nothing.
    for symmetric in (False, True) if one_side else (False,):
        batched = filter_batch_kernel(
            lambda x, y=None, **kwargs: model(x, y, **kwargs),
            block_size=4,
            out_axes=AXES,
            symmetric=symmetric,
            mesh=make_mesh(AxisType.Auto) if mesh else None,
        )
        assert_same(batched(rows, columns, mask=masks), dense)
    transposed = filter_batch_kernel(
        lambda x, y=None: model(flip(x), flip(y)),
        block_size=4,
        in_axes=1,
        out_axes=AXES,
    )
    assert_same(transposed(first, second), unmasked)


@pytest.mark.devices
@pytest.mark.parametrize("totals", ((0, 3), (3, 0), (0, 0)))
def test_one_side_without_examples(totals, getkey):
    """What there is of the other side alone is there."""

    def kernel(x1, x2):
        return {"pairs": x1 @ x2.T, "rows": x1.sum(1), "columns": jnp.cos(x2.sum(1))}

    out_axes = {"pairs": (0, 1), "rows": (0, None), "columns": (None, 0)}
    x, y = (normal(getkey(), (total, 2)) for total in totals)
    mesh = make_mesh(AxisType.Auto, (2,))
    expected = jax.device_get(jax.jit(kernel)(x, y))
    for settings in ({}, {"store": HostStore()}, {"mesh": mesh}):
        batched = filter_batch_kernel(
            kernel, block_size=2, out_axes=out_axes, **settings
        )
        assert_same(jax.device_get(batched(x, y)), expected)


def test_methods_decorators_and_arguments(getkey):
    class Scaled(eqx.Module):
        scale: jax.Array

        @filter_batch_kernel(block_size=3)
        def kernel(self, x1, x2=None, power=1, *, kind):
            assert kind == "rbf"
            return rbf(x1, x2, self.scale) ** power

    x, y = normal(getkey(), (7, 2)), normal(getkey(), (5, 2))
    model = Scaled(jnp.array(2.0))
    expected = jax.jit(lambda x, y: (rbf(x, y, 2.0), rbf(x, None, 2.0), rbf(x, y, 3.0)))
    two_sides, one_side, wider = jax.device_get(expected(x, y))
    assert_same(model.kernel(x, y, 2, kind="rbf"), two_sides**2)
    assert_same(model.kernel(x, kind="rbf"), one_side)
    assert_same(model.kernel(x1=x, x2=y, kind="rbf"), two_sides)
    batched = filter_batch_kernel(rbf, block_size=3)
    assert batched.__wrapped__ is rbf
    assert batched.__name__ == "rbf"
    assert_same(batched(np.asarray(x), np.asarray(y), scale=3.0), wider)


@pytest.mark.parametrize("store", ("device", HostStore()))
def test_equal_numbers_of_other_types_have_other_programs(store):
    def kernel_fn(x1, x2, by):
        dtype = jnp.result_type(by)
        return by * jnp.outer(x1.astype(dtype), x2.astype(dtype))

    run = filter_batch_kernel(kernel_fn, block_size=2, store=store)
    x = jnp.array([100, 200, 50], jnp.uint8)
    for by in (2, 2.0):
        got = run(x, x, by)
        assert got.dtype == jnp.result_type(by)
        assert_same(got, kernel_fn(x, x, by))


@pytest.mark.parametrize("raw", spread((False, True), 1))
def test_keys_do_not_depend_on_blocks(raw):
    def random(x1, x2=None, *, key):
        first, second = (jax.vmap(jr.normal)(keys) for keys in key)
        return first[:, None] + 2 * second[None, :]

    make = jr.PRNGKey if raw else jr.key
    key, pair = make(0), (make(0), make(5))
    x, y = jnp.ones((7, 1)), jnp.ones((5, 1))
    # What keys are made of does not matter for the others.
    cases = (((x, y), key), ((x, y), pair), ((x,), key))
    for args, keys in cases[:1] if raw else cases[1:]:
        whole, blocked = (
            filter_batch_kernel(random, block_size=size)(*args, key=keys)
            for size in (None, 3)
        )
        assert len(np.unique(whole)) > 20
        assert_same(blocked, whole, tol=1e-5)


def estimators():
    model = bent(3, 4, jr.key(0))
    return {
        "diagonal": EmpiricalNTK(model, trace_axes=(), diagonal_axes=-1),
        "both": EmpiricalKernel(model, trace_axes=()),
        "pseudo": PseudoNTK(model),
        "probed": ProbedNTK(model, num_probes=2, key=jr.key(1)),
    }


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize("name", list(estimators()))
def test_estimators_are_symmetric_by_themselves(name, getkey):
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (5, 3))
    kernel = estimators()[name]
    dense = kernel(x, y), kernel(x)
    # Other estimators on meshes: `tests/ntk/test_estimators_in_blocks.py`.
    on_mesh = name in ("diagonal", "probed")
    for mesh in (None, *([make_mesh(AxisType.Auto)] if on_mesh else [])):
        batched = filter_batch_kernel(kernel, block_size=3, mesh=mesh)
        assert_same(batched(x, y), dense[0])
        got = batched(x)
        assert_same(got, dense[1])
        assert_same(kernel.symmetric(got), got, tol=0)


# In default runs: `tests/ntk/test_estimators_in_blocks.py`.
@pytest.mark.matrix
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


@pytest.mark.devices
def test_within_transforms(getkey):
    x = normal(getkey(), (7, 3))
    batched = filter_batch_kernel(rbf, block_size=3, symmetric=True)
    xs = jnp.asarray(np.stack([x, 2 * np.asarray(x)]))

    def transformed(kernel):
        loss = lambda x: jnp.sum(kernel(x) ** 3)
        return lambda x, xs: (
            kernel(x),
            jax.vmap(kernel)(xs),
            jax.grad(loss)(x),
            jax.jvp(kernel, (x,), (x,)),
        )

    expected = jax.jit(transformed(rbf))(x, xs)
    got = jax.jit(transformed(batched))(x, xs)
    assert_same(got[:2], expected[:2])
    assert_same(got[2:], expected[2:], tol=1e-4)

    mesh = make_mesh(AxisType.Auto)
    spread = filter_batch_kernel(rbf, block_size=3, symmetric=True, mesh=mesh)
    loss = lambda x: jnp.sum(spread(x) ** 3)
    assert_same(jax.jit(jax.grad(loss))(x), expected[2], tol=1e-4)

    model = bent(3, 2, getkey())
    of_model = lambda model: jnp.sum(
        filter_batch_kernel(EmpiricalNTK(model), block_size=3)(x)
    )
    whole = lambda model: jnp.sum(EmpiricalNTK(model)(x))
    got, expected = (
        eqx.filter(eqx.filter_jit(eqx.filter_grad(f))(model), eqx.is_array)
        for f in (of_model, whole)
    )
    assert_same(got, expected, tol=1e-4)


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


@pytest.mark.parametrize("pairwise", (False, True))
@pytest.mark.parametrize("how", ("device", "host", "disk", "progress"))
def test_traces_of_symmetric_kernels(how, pairwise, getkey, tmp_path):
    """One for the shapes and one for all blocks; or one for a pair of examples.

    A store on disk has a digest of the program, and no trace of its own.
    """
    of_pair = lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))
    kernel = CountTraces(of_pair if pairwise else rbf)
    batched = filter_batch_kernel(
        lambda x, y: kernel(x, y),
        block_size=4,
        symmetric=True,
        pairwise=pairwise,
        progress=how == "progress",
        store={"host": "host", "disk": tmp_path}.get(how, "device"),
    )
    x = normal(getkey(), (13, 3))
    got = batched(x)
    np.testing.assert_allclose(got, jax.jit(rbf)(x), rtol=1e-5)
    num = 1 if pairwise else 2
    assert kernel.num == num
    batched(x)
    assert kernel.num == num


@pytest.mark.cpu
def test_memory_is_flat():
    batched = filter_batch_kernel(rbf, block_size=64, symmetric=True)
    reduced = lambda x: dataclasses.replace(
        batched, reduce=KernelProduct(jnp.ones(len(x)))
    )
    sums = lambda x: reduced(x)(x)
    found = {}
    for n in (1024, 4096):
        x = jax.ShapeDtypeStruct((n, 8), jnp.float32)
        found[n] = memory(batched, x), memory(sums, x)
    for small, large in zip(*found.values(), strict=True):
        assert large.temp_size_in_bytes < 1.1 * small.temp_size_in_bytes + 60_000
    dense = memory(rbf, jax.ShapeDtypeStruct((4096, 8), jnp.float32))
    assert found[4096][0].temp_size_in_bytes < dense.output_size_in_bytes / 10
    assert found[4096][1].output_size_in_bytes < 20_000


@pytest.mark.cpu
@pytest.mark.parametrize("stored", spread((True, False), 1))
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
    np.testing.assert_allclose(got, jax.jit(rbf)(x), rtol=1e-5)
    largest = max(size for size in sizes if size < 600)
    assert largest > 30
    if not stored:
        stats = memory(batched, x)
        assert stats.temp_size_in_bytes + stats.output_size_in_bytes <= 2_000_000
        with pytest.raises(ValueError, match="budget of 1,000 bytes is too small") as e:
            filter_batch_kernel(rbf, block_size=MemoryBudget(1000))(x)
        assert "`store='host'`" in str(e.value.__notes__)


# Bad input.


@pytest.mark.devices
def test_wrong_settings(unchecked):
    wrong = [
        ({"block_size": 0}, ValueError, "`block_size` must be at least 1; got 0"),
        ({"block_size": (2, 3, 4)}, ValueError, "for rows and columns; got 3"),
        ({"block_size": 1.5}, TypeError, "`block_size` must be int"),
        ({"symmetric": 1}, TypeError, "`symmetric` must be bool"),
        (
            {"store": 3},
            TypeError,
            r"`store` must be .* str \| PathLike \| .*; got 3",
        ),
        ({"store": "disk"}, ValueError, "'host', a path on disk.*Write './disk'"),
        ({"progress": "yes"}, TypeError, "`progress` must be AbstractProgressMeter"),
        ({"mesh": 4}, TypeError, "`mesh` must be Mesh"),
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
            {"reduce": FrobeniusNorm(), "store": HostStore()},
            ValueError,
            "With `reduce`, no kernel is kept",
        ),
    ]
    for settings, error, match in wrong:
        with pytest.raises(error, match=match):
            filter_batch_kernel(rbf, **{"block_size": 4, **settings})
    with pytest.raises(TypeError, match="`kernel_fn` must be callable"):
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
            "whose axis 2 should be the axis of the columns. Return an array",
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
            {"reduce": FrobeniusNorm(), "out_axes": (0, None)},
            ValueError,
            "`reduce` is for kernels with rows and columns",
        ),
        (
            lambda x, y: x @ y.T,
            {"reduce": KernelProduct(jnp.ones(4))},
            ValueError,
            "The number of rows of `vectors` must be 5; got 4",
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
