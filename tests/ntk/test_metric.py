"""Kernels in a metric of the parameters, against the dense `J M J^T`."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax
import numpy as np
import pytest

from eqxbatch import (
    EmpiricalKernel,
    EmpiricalNTK,
    filter_kfac,
    KernelOperator,
    Mean,
    Projection,
    TopK,
)
from ..helpers import (
    assert_bits,
    assert_same,
    Counted,
    drawn,
    integers,
    normal,
    variants,
)
from .metric_models import (
    diagonal,
    Lookup,
    matrix,
    of_lookup,
    of_operator,
    operator_of,
    OUTPUTS,
    parameters,
    subject,
)
from .models import float64, jacobians, pairs


class Loss(eqx.Module):
    model: eqx.Module

    def __call__(self, x):
        return jnp.sum(jnp.cosh(self.model(x)))


@eqx.filter_jit
def kernel_of(model, metric, **settings):
    return EmpiricalNTK(model, metric=metric, **settings)


def of_lineax():
    operator, dense = of_operator(damping=0.1)
    tags = lineax.positive_semidefinite_tag
    structure = operator.in_structure()
    plain = lineax.PyTreeLinearOperator(operator.as_pytree(), structure, tags)
    return plain, dense


METRICS = {
    "diagonal": diagonal,
    "matrix": matrix,
    "lineax": of_lineax,
    "undamped": functools.partial(of_operator, is_inverse=False),
    "inverse": functools.partial(of_operator, damping=0.1),
    "factored": functools.partial(of_operator, damping=0.1, factored=True),
    "corrected": functools.partial(of_operator, True, damping=0.1),
}


# Two factors are kept, or gradients.
WITH_PRODUCTS = ("factored", "diagonal")


@float64
@pytest.mark.parametrize("kind", variants(METRICS, "lineax", "undamped", "inverse"))
def test_is_the_dense_product(kind):
    model, x, jac = subject()
    metric, dense = METRICS[kind]()
    other, vector = np.asarray(x)[:3], normal(jr.key(2), (3, OUTPUTS), float)

    def results(model, metric, x, other, vector):
        kernel = EmpiricalNTK(model, trace_axes=(), metric=metric)
        yield dataclasses.replace(kernel, block_size=3)(x, other)
        yield kernel.diagonal(x)
        if kind in WITH_PRODUCTS:
            yield kernel.untraced_matvec(x, other, vector)
        if kind == "factored":
            yield EmpiricalKernel(model, metric=metric, method="sites")(x).ntk

    run = eqx.filter_jit(lambda *args: [*results(*args)])
    blocks, diagonal, *products = run(model, metric, x, other, vector)
    right = jac @ dense
    assert_same(blocks, pairs(right, jac[:3]))
    assert_same(diagonal, pairs(right, jac, (), (0,)))
    if kind not in WITH_PRODUCTS:
        return
    product, *traced = products
    expected = np.einsum("aip,bjp,bj->ai", right, jac[:3], np.asarray(vector))
    assert_same(product, jax.device_put(expected))
    for kernel in traced:
        assert_same(kernel, pairs(right, jac, (-1,)))
        assert (np.asarray(kernel) == np.asarray(kernel).T).all()


@float64
def test_factored_metrics_keep_factors():
    # Weights keep two factors, so that a pair costs what it does without a metric.
    metric, _ = METRICS["factored"]()
    make = lambda metric: EmpiricalNTK(subject()[0], metric=metric)
    kernel = eqx.filter_eval_shape(make, metric)
    bases = {part.leaves: part.basis for part in kernel.metric.parts}
    products = [x for x in bases.values() if x is not None]
    assert len(products) == 3
    assert all(x.values is None for x in products)


@float64
def test_tokens_and_both_roles_of_a_weight_keep_factors():
    # The smaller side is multiplied by the whole metric.
    model, x, metric, weights = of_lookup()
    jac = np.asarray(jacobians(model, x))
    first = jax.device_put(np.asarray(x)[:2])

    @eqx.filter_jit
    def results(model, metric, x, first):
        kernel = EmpiricalNTK(model, trace_axes=(), metric=metric)
        assert all(part.is_factored for part in kernel.metric.parts)
        kernels = kernel(x), kernel(x, first), kernel(first, x)
        return kernels, kernel.features(x)

    found, features = jax.device_get(results(model, metric, x, first))
    right = jac @ weights
    expected = pairs(right, jac), pairs(right, jac[:2]), pairs(right[:2], jac)
    assert_same(jax.device_put(found), expected)
    assert_same(pairs(features, features), expected[0])


class TokenLosses(eqx.Module):
    model: Lookup

    def __call__(self, tokens):
        losses = lambda token: jnp.sum(jnp.cosh(self.model(token[None])))
        return jax.vmap(losses)(tokens)


@float64
def test_scores_of_tokens():
    # Between texts of different lengths, with the metric of the model.
    model, _, metric, weights = of_lookup()
    texts = [integers(jr.key(i), (3, num), 6) for i, num in ((2, 5), (3, 2))]
    losses = TokenLosses(model)
    first, second = (np.asarray(jacobians(losses, x)) for x in texts)
    kernel = kernel_of(losses, metric, trace_axes=(), block_size=2)
    expected = np.einsum("asp,pq,btq->abst", first, weights, second)
    assert_same(kernel(*texts), jax.device_put(expected))


@float64
def test_a_loss_around_the_model(tmp_path):
    model = drawn(eqx.nn.Linear, 3, 2, key=jr.key(0))
    x, vector = normal(jr.key(1), (7, 3), float), normal(jr.key(3), (7,), float)
    loss = Loss(model)
    jac = np.asarray(jacobians(loss, x))
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(jnp.cosh(o)))
    settings = {"damping": 0.1, "factored": True}
    metric, dense = operator_of(call(model, x), True, settings)

    @eqx.filter_jit
    def results(loss, metric, x, vector):
        plain = EmpiricalNTK(loss, metric=metric)
        top = dataclasses.replace(plain, block_size=4, reduce=TopK(2))(x)
        return plain, top.values, KernelOperator(plain, x, block_size=4).mv(vector)

    plain, top, product = results(loss, metric, x, vector)
    expected = jac @ np.asarray(dense) @ jac.T
    assert_same(top, jax.device_put(np.sort(expected, axis=1)[:, :-3:-1]))
    assert_same(product, jax.device_put(expected @ np.asarray(vector)))
    stored = dataclasses.replace(plain, block_size=4, store=tmp_path / "kernel")
    assert_same(jnp.asarray(stored(x)[:]), jax.device_put(expected))
    # What is stored belongs to its metric.
    entries = jax.tree.map(np.ones_like, jax.device_get(parameters(loss)))
    other = dataclasses.replace(stored, metric=entries)
    with pytest.raises(ValueError, match="kernel_fn"):
        other(x)


@float64
def test_selected_parameters_and_derivatives():
    model, x, _ = subject()
    where = lambda model: (model.shared, model.last)
    small = jax.device_put(np.asarray(x)[:2])
    chosen = eqx.filter(model, eqx.is_inexact_array)
    chosen = eqx.tree_at(
        lambda m: (m.conv, m.scale, m.unused), chosen, (None, None, None)
    )
    call = filter_kfac(lambda m, x: m(x), lambda o, x: jnp.sum(o**4), where=where)
    settings = {"damping": 0.1, "factored": True}
    metric, weights = operator_of(call(model, x), True, settings)

    @eqx.filter_jit
    def ours(model, metric):
        kernel = EmpiricalNTK(model, metric=metric, where=where, trace_axes=())
        return jnp.sum(jnp.sin(kernel(small)))

    @eqx.filter_jit
    def dense(model, weights):
        is_chosen = jax.tree.map(lambda _: True, chosen)
        spec = eqx.combine(is_chosen, jax.tree.map(lambda _: False, parameters(model)))
        jac = jacobians(model, small, spec)
        return jnp.sum(jnp.sin(pairs(jac @ weights, jac)))

    got = eqx.filter_grad(ours)(model, metric)
    expected = eqx.filter_grad(dense)(model, weights)
    assert_same(parameters(got), parameters(expected), tol=1e-11)


@float64
def test_two_negative_factors_have_a_positive_product():
    layer = drawn(eqx.nn.Linear, 2, 2, use_bias=False, key=jr.key(0))
    x = np.array([[0.1, 0.2], [0.2, -0.1], [1, 2], [2, -1]])
    weights = jax.device_put(np.array([30.0, 30, -1, -1]))
    concave = lambda out, x: -jnp.sum(out**2)
    call = filter_kfac(lambda m, x: m(x), concave, accumulator=Mean(weights=weights))
    found = call(layer, x)
    metric, dense = operator_of(found, False, {})
    (block,) = found.blocks
    for factor in (block.outputs, block.inputs):
        assert np.linalg.eigvalsh(factor).max() < 0
    jac = np.asarray(jacobians(layer, x))
    expected = pairs(jac @ np.asarray(dense), jac)
    kernel = EmpiricalNTK(layer, metric=metric, trace_axes=())
    assert_same(kernel(x), expected)


def test_traced_metrics_that_are_wrong_give_nan():
    # Values that are traced cannot raise.
    model = drawn(eqx.nn.Linear, 3, 2, key=jr.key(0))
    run = lambda metric, x: EmpiricalNTK(model, metric=metric)(x)
    wrong = np.triu(np.ones((8, 8), "float32")) + 8 * np.eye(8, dtype="float32")
    assert np.isnan(eqx.filter_jit(run)(wrong, np.ones((2, 3), "float32"))).all()


class Noisy(eqx.Module):
    """Each example has a key and a mask."""

    weight: jax.Array

    def __call__(self, x, *, key, mask, power):
        noise = (jr.key_data(key)[:1] % 7).astype(x.dtype)
        return jnp.tanh(self.weight @ (x * mask + noise)) ** power


@float64
def test_features_go_to_disk(tmp_path):
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(7, 3)), rng.uniform(size=(7, 3))
    model = Noisy(normal(jr.key(0), (2, 3), float))
    metric = Projection(4, jr.key(1))
    kernel = EmpiricalNTK(model, metric=metric)

    def run(rows, num=7, size=(3, 2), **settings):
        pair, sized = (mask[:num], None), dataclasses.replace(kernel, block_size=size)
        return sized.features(rows, key=jr.key(2), mask=pair, power=2, **settings)

    expected = run(x, size=None)
    for num in (0, 1, 2, 3, 4, 7):
        found = run(x[:num], num, store="host")
        assert_same(jax.device_put(found), expected[:num])

    path = tmp_path / "features"
    with pytest.raises(OSError, match="a disk"):
        run(Counted(x, fails=6), store=path)
    assert_bits(np.asarray(run(Counted(x), store=path)), found)
    kernel = EmpiricalNTK(model, metric=Projection(4, jr.key(3)))
    with pytest.raises(ValueError, match="has another map than this one"):
        run(x, store=path)
