"""Metrics with exact damping or any eigenvalues, whose kernels form no gradients."""

import contextlib
import dataclasses
import functools
import types
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqxbatch import EmpiricalNTK, filter_kfac
from eqxbatch._curvature.spectrum import DampedProduct
from eqxbatch._ntk import eigenvalue_table, separable
from eqxbatch._ntk.eigenvalue_table import TableProduct
from eqxbatch._ntk.separable import SeparableProduct
from eqxbatch._sites.cost import Cost
from ..conftest import enable_x64
from ..helpers import assert_same, drawn, integers, make_mesh, normal, spread
from .metric_models import factors, Lookup, Net, operator_of, subject, Tokens
from .models import cast, float64, jacobians, pairs


class Marked(eqx.Module):
    """A model whose kernels have a program for each way."""

    model: eqx.Module
    way: str = eqx.field(static=True)

    def __call__(self, x):
        return self.model(x)


@contextlib.contextmanager
def preferring(way):
    """Costs would choose otherwise for most layers of small models."""
    table, terms = {
        "terms": (1e99, 0),
        "table": (0.0, 1e99),
        "formed": (1e99, 1e99),
    }[way]
    cost = lambda *args: Cost(table)
    of_table = mock.patch.object(TableProduct, "cost", cost)
    with of_table, mock.patch.object(SeparableProduct, "num_terms", terms):
        yield


@pytest.fixture
def few_rows():
    """Tables are multiplied by a few rows at a time."""
    small = types.SimpleNamespace(block_bytes=200)
    with mock.patch.object(eigenvalue_table, "platform", return_value=small):
        yield


@pytest.fixture
def by_terms():
    with preferring("terms"):
        yield


@jax.jit
def terms(damped):
    """The table, and the sum of the absolute values of its terms."""

    def term(rows, columns):
        product = rows[:, :, None] * columns[:, None]
        return product, jnp.abs(product)

    (scales,) = separable.scales_of([damped])
    return separable._sum_of_terms(damped, scales, term, [])


def wide(dtype, rows, columns, damping):
    """The metric that is wanted, in more digits, and what is found for it."""
    arrays = (jnp.asarray(x, dtype) for x in (rows, columns, damping))
    damped = DampedProduct(*arrays, -1.0)
    more = [np.asarray(x).astype(np.longdouble) for x in jax.tree.leaves(damped)]
    expected = 1 / (more[0][:, :, None] * more[1][:, None] + more[2])
    found, absolute = (np.asarray(x).astype(np.longdouble) for x in terms(damped))
    return found / expected, absolute / np.abs(expected)


def spectrum(rng, size):
    """Eigenvalues over many decades, some of them zero, for two matrices."""
    values = 10.0 ** rng.uniform(-rng.choice([2, 8, 20]), 0, (2, size))
    values[:, : rng.integers(size)] *= rng.integers(2)
    return values * [[1], [rng.choice([1, 1e-4])]]


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float64))
def test_every_entry_has_all_digits(dtype):
    # Each entry, relative to itself: the kernel then has the error of such a metric,
    # relative to the sum of the absolute terms, whatever the examples are.
    rng = np.random.default_rng(0)
    eps = float(jnp.finfo(dtype).eps)
    with enable_x64():
        for decade in (-20, -6, -1, 0, 1, 2, 4, 7, 12, 20, 28, *rng.uniform(-3, 9, 20)):
            rows, columns = spectrum(rng, 12), spectrum(rng, 15)
            rows[0, -1] = columns[0, -1] = 1
            unit = 10.0 ** rng.uniform(-3, 3)
            damping = unit * 10.0**-decade
            found, absolute = wide(dtype, unit * rows, columns, damping)
            limit = eps * (16 + 1.5 * max(decade, 0))
            np.testing.assert_allclose(found.astype(float), 1, atol=limit, rtol=0)
            assert absolute.max() < 1.2


@float64
def test_negative_eigenvalues_are_followed_while_the_sum_is_positive():
    rng = np.random.default_rng(0)
    rows, columns = rng.uniform(-1, 4, (2, 12)), rng.uniform(0, 5, (2, 15))
    rows[0, :2], columns[0, :2] = (-1, 4), (0, 5)
    for signs in ((1, 1), (-1, -1)):
        both = signs[0] * rows, signs[1] * columns
        found, _ = wide(jnp.float64, *both, 5.5)
        np.testing.assert_allclose(found.astype(float), 1, rtol=1e-13)
    found, _ = wide(jnp.float64, -rows, columns, 20.5)
    np.testing.assert_allclose(found.astype(float), 1, rtol=1e-13)
    found, _ = wide(jnp.float64, rows, columns, 4.9)
    assert np.isnan(found[0]).all()


def test_damping_out_of_range():
    # Zero damping changes nothing if no eigenvalue is zero.
    rng = np.random.default_rng(0)
    rows, columns = rng.uniform(1, 4, (2, 12)), rng.uniform(1, 5, (2, 15))
    found, _ = wide(jnp.float32, rows, columns, 0.0)
    np.testing.assert_allclose(found.astype(float), 1, rtol=4e-6)
    rows[0, 0] = 0
    found, _ = wide(jnp.float32, rows, columns, 1e-37)
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1].astype(float), 1, rtol=4e-6)


@functools.cache
def corrected(kind):
    model = kind(jr.key(0))
    x = integers(jr.key(2), (7, 5), 8 if kind is Lookup else 6)
    call = filter_kfac(
        lambda m, x: m(x), lambda o, x: jnp.sum(jnp.cosh(o)), corrected=True
    )
    return model, x, eqx.filter_jit(call)(model, x)


@float64
@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(
    "kind", (Net, Lookup, pytest.param(Tokens, marks=pytest.mark.matrix))
)
def test_kernels_are_the_dense_product(kind):
    # Convolutions, shared weights and biases by terms. Tokens, weights in both roles,
    # also those of tokens, and groups by tables, a few rows at a time.
    if kind is Net:
        model, x, found = *subject()[:2], factors(corrected=False)
    else:
        model, x, found = corrected(kind)
    metric, dense = operator_of(found, True, {"damping": 0.1})
    jac = np.asarray(jacobians(model, x))
    first = jax.device_put(np.asarray(x)[:2])

    @eqx.filter_jit
    def results(model, metric, x, first):
        kernel = EmpiricalNTK(model, metric=metric)
        sides = dataclasses.replace(kernel, trace_axes=(), block_size=3)(x, first)
        return sides, kernel.diagonal(x)

    way = "terms" if kind is Net else "table"
    with preferring(way):
        sides, diagonal = results(Marked(model, way), metric, x, first)
    right = jac @ np.asarray(dense)
    # Rounding of large derivatives reaches directions with large eigenvalues.
    assert_same(sides, pairs(right, jac[:2]), tol=1e-11)
    assert_same(diagonal, pairs(right, jac, (-1,), (0,)), tol=1e-11)


@float64
@pytest.mark.devices
@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("kind", spread((AxisType.Explicit, AxisType.Auto), 1))
def test_tables_on_devices(kind):
    # A few rows at a time; each device has some of the examples.
    model = drawn(eqx.nn.MLP, 3, 2, 4, 1, jnp.tanh, key=jr.key(0))
    x = normal(jr.key(1), (4, 3), float)
    call = filter_kfac(
        lambda m, x: m(x), lambda o, x: jnp.sum(jnp.cosh(o)), corrected=True
    )
    metric, dense = operator_of(eqx.filter_jit(call)(model, x), True, {"damping": 0.1})
    jac = np.asarray(jacobians(model, x))
    expected = pairs(jac @ np.asarray(dense), jac)
    mesh, axis = make_mesh(kind, (2,)), PartitionSpec("data")
    own = jax.shard_map(
        lambda x, y: scores(Marked(model, "table"), metric, x, y),
        mesh=mesh,
        in_specs=(axis, PartitionSpec()),
        out_specs=axis,
    )
    placed = jax.device_put(x, NamedSharding(mesh, axis))
    with preferring("table"):
        whole = eqx.filter_jit(scores)(Marked(model, "table"), metric, placed)
        kernels = whole, jax.jit(own)(placed, x)
    for kernel in jax.device_get(kernels):
        np.testing.assert_allclose(kernel, expected, rtol=1e-11, atol=1e-13)


@float64
@pytest.mark.usefixtures("by_terms")
def test_an_operator_plus_damping_has_two_terms():
    model, x, found = *subject()[:2], factors(corrected=False)
    metric, dense = operator_of(found, False, {"damping": 0.1})
    jac = np.asarray(jacobians(model, x))
    expected = pairs(jac @ np.asarray(dense), jac)
    assert_same(eqx.filter_jit(scores)(Marked(model, "terms"), metric, x), expected)


class Often(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.layer)(x).sum(0)


class Summed(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return jnp.sum(jnp.cosh(self.layer(x)))


@pytest.mark.parametrize("way", ("terms", "table", "formed"))
def test_costs_choose(way):
    # Terms keep factors of a large layer, and a table those of many outputs. Gradients
    # of a layer that is used often are formed.
    layer = drawn(eqx.nn.Linear, 400, 300, key=jr.key(0))
    model = {"terms": Summed, "table": lambda x: x, "formed": Often}[way](layer)
    x = normal(jr.key(1), (6, 999, 400) if way == "formed" else (6, 400), "float32")

    def run(x):
        call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(o**2))
        metric = call(model, x).operator(damping=0.1).inverse()
        return EmpiricalNTK(model, metric=metric)(x)

    terms = mock.patch.object(
        separable, "_sum_of_terms", side_effect=separable._sum_of_terms
    )
    slices = mock.patch.object(
        eigenvalue_table, "_in_slices", side_effect=eigenvalue_table._in_slices
    )
    with terms as by_terms, slices as by_table:
        jax.eval_shape(run, x)
    assert bool(by_terms.call_count) is (way == "terms")
    assert bool(by_table.call_count) is (way == "table")


def scores(model, metric, *examples):
    return EmpiricalNTK(model, metric=metric, trace_axes=())(*examples)


def test_rounding_is_that_of_formed_gradients():
    # Far from the examples of the factors, too, where eigenvalues say nothing.
    rng = np.random.default_rng(0)
    model = drawn(eqx.nn.MLP, 5, 2, 12, 2, jnp.tanh, key=jr.key(0))
    x = rng.normal(size=(9, 5)) * 10.0 ** rng.uniform(-3, 1, (9, 5))
    x = x.astype("float32")
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(o**2))
    factors = call(model, x[:3])
    run = eqx.filter_jit(scores)
    for damping in (1e-5, 0.1, 1e3):
        metric = factors.operator(damping=damping).inverse()
        with enable_x64():
            jac = np.asarray(jacobians(cast(model), x.astype(float)))
            dense = np.asarray(cast(metric).as_matrix())
        expected = np.asarray(pairs(jac @ dense, jac))
        norms = np.sqrt(np.einsum("aabb->ab", expected))
        scale = norms[:, None, :, None] * norms[None, :, None]
        errors = []
        for way in ("terms", "table", "formed"):
            with preferring(way):
                found = np.asarray(run(Marked(model, way), metric, x), float)
            assert (found == found.transpose(1, 0, 3, 2)).all()
            errors.append(np.max(np.abs(found - expected) / scale))
        *others, formed = errors
        assert max(others) <= 10 * formed


@float64
@pytest.mark.parametrize("way", ("terms", "table"))
def test_derivatives_and_maps_over_damping(way):
    model = drawn(eqx.nn.MLP, 3, 2, 4, 1, jnp.tanh, key=jr.key(0))
    x = normal(jr.key(1), (4, 3), float)
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(jnp.cosh(o)))
    found = call(model, x)

    def total(args, dense):
        model, found, damping = args
        metric = found.operator(damping=damping).inverse()
        if dense:
            jac = jacobians(model, x)
            return jnp.sum(jnp.sin(pairs(jac @ metric.as_matrix(), jac)))
        return jnp.sum(jnp.sin(scores(Marked(model, way), metric, x)))

    @eqx.filter_jit
    def run(args, several):
        grads = [eqx.filter_value_and_grad(total)(args, x) for x in (False, True)]
        each = lambda damping: total((*args[:2], damping), False)
        return *grads, jax.vmap(each)(several), jax.lax.map(each, several)

    args = model, found, jnp.asarray(1e-3)
    with preferring(way):
        got, expected, mapped, looped = run(args, jnp.asarray([1e-9, 1e-3, 10.0]))
    arrays = lambda tree: eqx.filter(tree, eqx.is_inexact_array)
    assert_same(arrays(got), arrays(expected), tol=1e-8)
    assert_same(mapped, looped)


class Twice(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer(x[0]) - self.layer(x[1])


@pytest.mark.usefixtures("by_terms")
def test_terms_that_cancel_in_the_metric_only():
    # A metric hides what does not cancel: an input that is large in the examples.
    rng = np.random.default_rng(0)
    model = Twice(drawn(eqx.nn.Linear, 3, 2, use_bias=False, key=jr.key(0)))
    x = rng.normal(size=(6, 1, 3)) + 1e-3 * rng.normal(size=(6, 2, 3))
    x[:, 0, 0] *= 3e3
    x = x.astype("float32")
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(o**2))
    metric = call(model, x).operator(damping=1e-2).inverse()
    ours = np.asarray(eqx.filter_jit(scores)(Marked(model, "terms"), metric, x))
    with enable_x64():
        jac = np.asarray(jacobians(cast(model), x.astype(float)))
        dense = np.asarray(cast(metric).as_matrix())
    expected = np.asarray(pairs(jac @ dense, jac))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * expected.max(), rtol=0)


class Small(eqx.Module):
    layer: eqx.nn.Linear
    way: str = eqx.field(static=True)

    def __call__(self, x):
        return 1e-21 * self.layer(x)


def test_small_cotangents_meet_large_eigenvalues_first():
    # Products of cotangents alone would be out of range.
    layer = drawn(eqx.nn.Linear, 3, 2, key=jr.key(0))
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    call = filter_kfac(lambda m, x: 1e-9 * m(x), lambda o, x: jnp.sum(o**2))
    metric = call(layer, x).operator(damping=1e-18).inverse()
    kernels = []
    for way in ("table", "formed"):
        with preferring(way):
            kernels.append(EmpiricalNTK(Small(layer, way), metric=metric)(x))
    largest = np.max(kernels[1])
    assert largest > 0
    np.testing.assert_allclose(*kernels, rtol=0, atol=1e-5 * largest)
