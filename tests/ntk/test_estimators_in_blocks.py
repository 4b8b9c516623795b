"""Kernels of models in blocks that are stored, spread over devices or reduced."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxbatch import (
    AbstractProgressMeter,
    EmpiricalKernel,
    EmpiricalNNGP,
    EmpiricalNTK,
    filter_batch_kernel,
    FrobeniusNorm,
    HostStore,
    KernelProduct,
    MonteCarloKernel,
    TopK,
    ZarrStore,
)
from ..helpers import bent, make_mesh, normal, on_devices, variants
from .models import Counted
from .random_kernels import init


class Count(AbstractProgressMeter):
    """Counts the blocks, and keeps the number."""

    totals: list = dataclasses.field(default_factory=list)

    def start(self, num_blocks, num_done):
        self.totals.append(num_blocks)
        return 0

    def step(self, state, num_nans):
        return state + 1

    def close(self, state):
        self.totals.append(state)


def assert_close(got, expected):
    got, expected = map(jax.tree.leaves, (got, expected))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=2e-5, atol=2e-5)


def places(folder):
    return {
        "disk": lambda: {"store": ZarrStore(folder / "kernel")},
        "mesh": lambda: {"mesh": make_mesh(AxisType.Auto, (3,))},
        "explicit": lambda: {"mesh": make_mesh(AxisType.Explicit, (2,))},
        "host of a mesh": lambda: {
            "mesh": make_mesh(AxisType.Auto, (3,)),
            "store": HostStore(),
        },
        "progress": lambda: {"progress": Count()},
    }


ESTIMATORS = {
    "ntk": lambda model, **kw: EmpiricalNTK(model, **kw),
    "products": lambda model, **kw: EmpiricalNTK(model, method=1, **kw),
    "full": lambda model, **kw: EmpiricalNTK(model, trace_axes=(), **kw),
    "nngp": lambda model, **kw: EmpiricalNNGP(model, **kw),
    "both": lambda model, **kw: EmpiricalKernel(model, **kw),
    "random": lambda model, **kw: MonteCarloKernel(
        init, key=jr.key(3), num_samples=2, **kw
    ),
}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "place"),
    on_devices(
        (
            ("ntk", "disk"),
            ("full", "explicit"),
            ("both", "host of a mesh"),
            ("products", "mesh"),
            ("nngp", "progress"),
        ),
        lambda name, place: place not in ("disk", "progress"),
    ),
)
def test_places(name, place, tmp_path, getkey):
    model = bent(3, 2, getkey())
    x1 = normal(getkey(), (7, 3))
    make = ESTIMATORS[name]
    dense = jax.tree.map(np.asarray, make(model)(x1))
    # Of both sides, the columns are some of the rows.
    sides = [(x1,)]
    if name in ("full", "both"):
        sides.append((x1, jnp.asarray(np.asarray(x1)[2:6])))
    for i, args in enumerate(sides):
        (tmp_path / str(i)).mkdir()
        settings = places(tmp_path / str(i))[place]()
        got = make(model, block_size=3, **settings)(*args)
        assert_close(got, dense if i == 0 else jax.tree.map(lambda k: k[:, 2:6], dense))


@pytest.mark.devices
@pytest.mark.parametrize("name", variants(("ntk", "both", "random"), "random"))
def test_reductions(name, getkey):
    model = bent(3, 2, getkey())
    x1, x2 = normal(getkey(), (7, 3)), normal(getkey(), (4, 3))
    make = ESTIMATORS[name]
    args = (x1,) if name == "ntk" else (x1, x2)
    others = {"mesh": make_mesh(AxisType.Auto, (3,))}, {"progress": Count()}
    kernels = jax.device_get(make(model)(*args))
    dense = jax.tree.map(lambda k: k.sum(1), kernels)
    for settings in ({}, *(others if name == "ntk" else ())):
        reduce = KernelProduct(jnp.ones(len(args[-1])))
        kernel = make(model, block_size=3, reduce=reduce, **settings)
        assert_close(kernel(*args), dense)


def test_reductions_of_estimates(getkey):
    """One for each kernel; and those that only see averages."""
    x, v = normal(getkey(), (7, 3)), normal(getkey(), (7,))
    model = bent(3, 1, getkey())
    ntk = EmpiricalKernel(model, block_size=3, reduce=KernelProduct(v))
    assert_close(ntk(x, get="ntk"), np.asarray(EmpiricalNTK(model)(x)) @ v)
    options = {"key": getkey(), "num_samples": 3, "get": "nngp"}
    nearest = MonteCarloKernel(init, block_size=3, reduce=TopK(2), **options)(x)
    dense = MonteCarloKernel(init, **options)(x)
    assert_close(nearest.values, -np.sort(-np.asarray(dense))[:, :2])


@pytest.mark.quick
def test_blocks_of_a_model_run_once(getkey):
    """Each example goes through the model once, and not once for each block."""
    counted = Counted()
    model = eqx.Partial(lambda mlp, x: mlp(counted.fun(x)), bent(4, 3, getkey()))
    x, y = normal(getkey(), (12, 4)), normal(getkey(), (9, 4))
    ntk = EmpiricalNTK(model)
    for kernel, args in (
        (filter_batch_kernel(ntk, block_size=3), (x,)),
        (filter_batch_kernel(ntk, block_size=3, store=HostStore()), (x, y)),
        (filter_batch_kernel(ntk, block_size=3, reduce=FrobeniusNorm()), (x, y)),
        (EmpiricalNTK(model, block_size=3, progress=Count()), (x,)),
    ):
        counted.num = 0
        jax.block_until_ready(kernel(*args))
        assert counted.num == sum(map(len, args))


@pytest.mark.devices
def test_estimators_as_kernel_functions(getkey):
    """Whatever is told of their axes, with factors or without."""
    model = bent(3, 2, getkey())
    x, y = normal(getkey(), (7, 3)), normal(getkey(), (4, 3))
    cases = {
        "inner blocks": (EmpiricalKernel(model, block_size=2), {}, (x, y, "ntk")),
        "examples last": (
            EmpiricalNTK(model, in_axes=1),
            {"in_axes": 1},
            tuple(jnp.asarray(np.asarray(z).T) for z in (x, y)),
        ),
        "outputs last": (
            EmpiricalNTK(model, out_axes=1, trace_axes=()),
            {"out_axes": (2, 3)},
            (x, y),
        ),
    }
    ntk = EmpiricalNTK(model)
    expected = ntk(x, y), ntk(x)
    for name, (kernel, settings, args) in cases.items():
        batched = filter_batch_kernel(kernel, block_size=3, **settings)
        if name == "inner blocks":
            assert_close(batched(*args), expected[0])
        else:
            is_full = name == "outputs last"
            square = kernel(args[0]) if is_full else expected[1]
            assert_close(batched(args[0]), square)
    # It is computed whole if it is not to be symmetric.
    batched = filter_batch_kernel(ntk, block_size=(2, 5), symmetric=False)
    assert_close(batched(x), expected[1])
    # A model of a whole batch is not one of its blocks.
    whole = EmpiricalNNGP(eqx.filter_vmap(model), in_axes=None)
    batched = filter_batch_kernel(whole, block_size=None)
    assert_close(batched(x, y), whole(x, y))
    mesh = {"block_size": None, "mesh": make_mesh(AxisType.Auto, (2,))}
    make = lambda key: eqx.filter_vmap(init(key))
    carlo = MonteCarloKernel(make, key=getkey(), num_samples=2, in_axes=None)
    for kernel, settings in ((whole, {"block_size": 2}), (whole, mesh), (carlo, mesh)):
        batched = filter_batch_kernel(kernel, **settings)
        with pytest.raises(ValueError, match="a model of a whole batch cannot"):
            batched(x)


def test_keys_and_pairs(getkey):
    """Each example keeps its key and its arguments, whatever the blocks are."""
    dropout = eqx.nn.Dropout(0.5)
    model = eqx.Partial(
        lambda layer, x, key, scale: layer(scale * dropout(x, key=key)),
        bent(3, 2, getkey()),
    )
    x, y, key = normal(getkey(), (7, 3)), normal(getkey(), (4, 3)), getkey()
    scales = normal(getkey(), (7,)), normal(getkey(), (4,))
    dense = EmpiricalNTK(model)
    ntk = EmpiricalNTK(model, block_size=3, store=HostStore())
    for args, scale in (((x,), (scales[0], None)), ((x, y), scales)):
        expected = dense(*args, key=key, scale=scale)
        assert_close(ntk(*args, key=key, scale=scale), expected)


@pytest.mark.devices
@pytest.mark.versions
def test_derivatives(getkey):
    model = bent(3, 2, getkey())
    x = normal(getkey(), (5, 3))
    mesh = make_mesh(AxisType.Auto, (2,))
    # In blocks on one device: `tests/kernels/test_batch_kernel.py`.
    expected, got = (
        eqx.filter_jit(
            eqx.filter_grad(
                lambda model, x, kw=kw: jnp.sum(EmpiricalNTK(model, **kw)(x) ** 2)
            )
        )(model, x)
        for kw in ({}, {"block_size": 2, "mesh": mesh})
    )
    assert_close(got, expected)


def test_wrong_settings(getkey):
    model = bent(3, 2, getkey())
    x = normal(getkey(), (5, 3))
    host = {"store": HostStore()}
    for settings, message in (
        ({"reduce": FrobeniusNorm(), **host}, "With `reduce`, no kernel is kept"),
        ({"mesh_axis": "data"}, "`mesh_axis` is 'data', but there is no `mesh`"),
        ({"in_axes": None, **host}, "With `in_axes=None`, a kernel cannot go to"),
    ):
        for cls in (EmpiricalNTK, EmpiricalNNGP, EmpiricalKernel):
            with pytest.raises(ValueError, match=message):
                cls(model, **settings)
    for settings in ({"diagonal_axes": 0}, {"trace_axes": 0}):
        with pytest.raises(ValueError, match=r"pairs no examples\. Leave them out"):
            EmpiricalNTK(model, **{"trace_axes": (), **settings}, **host)(x)
    with pytest.raises(TypeError, match=r"cannot be within `jax\.jit`"):
        eqx.filter_jit(EmpiricalNTK(model, **host))(x)
    options = {"key": getkey(), "reduce": FrobeniusNorm()}
    for settings in ({"num_samples": (2, 4)}, {"num_samples": 20, "tol": 0.1}):
        with pytest.raises(ValueError, match="averaged over all samples once"):
            MonteCarloKernel(init, **settings, **options)
    with pytest.raises(ValueError, match="has no standard error"):
        MonteCarloKernel(init, num_samples=2, **options).estimate(x)
