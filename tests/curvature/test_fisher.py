"""Gauss-Newton matrices in parts, and estimates of Fisher, against dense ones."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from eqxbatch import (
    filter_ggn,
    filter_ggn_blocks,
    filter_ggn_diagonal,
    filter_kfac,
    MemoryBudget,
    Sum,
)
from eqxbatch._base.mesh import vary_as
from eqxbatch._curvature.fisher import root
from ..helpers import (
    assert_bits,
    drawn,
    integers,
    KINDS,
    make_mesh,
    normal,
    put,
    spread,
)
from .oracle import CHOICES, close, count


NUM = 7
pytestmark = pytest.mark.usefixtures("x64")


def apply(model, x, label):
    return model(x)


def cross_entropy(logits, x, label):
    return -jax.nn.log_softmax(logits)[label]


@pytest.fixture
def job(x64):
    keys = jr.split(jr.key(0), 3)
    settings = {"use_bias": False, "key": keys[0]}
    model = drawn(eqx.nn.MLP, 3, 4, 5, 1, jnp.tanh, **settings)
    return model, normal(keys[1], (NUM, 3), float), integers(keys[2], (NUM,), 4)


def per_example(job):
    """For each example, the Jacobian, and gradient and Hessian of the loss."""
    return jax.device_get(_per_example(*job))


@eqx.filter_jit
def _per_example(model, x, labels):
    flat, unravel = ravel_pytree(eqx.filter(model, eqx.is_inexact_array))
    static = eqx.filter(model, eqx.is_inexact_array, inverse=True)
    outputs = lambda flat, x: eqx.combine(unravel(flat), static)(x)

    def one(x, label):
        out = outputs(flat, x)
        loss = lambda out: cross_entropy(out, x, label)
        jacobian = jax.jacrev(outputs)(flat, x)
        return jacobian, jax.grad(loss)(out), jax.hessian(loss)(out)

    return jax.vmap(one)(x, labels)


DRAWN = (
    {"fisher": "mc", "key": jr.key(3)},
    {"fisher": "mc", "key": jr.key(3), "num_samples": 2, "sampler": jr.categorical},
)
ALL = ({}, {"fisher": "empirical"}, *DRAWN)
NAMES = ("exact", "empirical", "probes", "labels")


def matrix(job, transform=filter_ggn, **settings):
    settings = {"in_axes": 0, "flat": True, **settings}
    return transform(apply, cross_entropy, **settings)(*job)


EXACT = pytest.mark.parametrize("settings", spread(ALL, 1), ids=NAMES)
# What is drawn depends on more.
PROBES = pytest.mark.parametrize("settings", spread(DRAWN, 1), ids=NAMES[2:])


class TestEveryKind:
    @pytest.mark.parametrize(
        ("settings", "method"),
        spread([*zip(ALL, ("sites", "products", "products", "sites"), strict=True)], 1),
        ids=NAMES,
    )
    def test_parts(self, job, settings, method):
        whole, _ = matrix(job, **settings)
        is_block = lambda x: isinstance(x, eqx.nn.Linear)
        sizes = [count(layer) for layer in job[0].layers]
        whole = np.asarray(whole)
        diagonal, _ = matrix(job, filter_ggn_diagonal, method=method, **settings)
        close(diagonal, np.diagonal(whole))
        blocks = matrix(
            job, filter_ggn_blocks, is_block=is_block, method=method, **settings
        )
        start = 0
        for (block, _), size in zip(blocks.layers, sizes, strict=True):
            own = slice(start, start + size)
            close(block, whole[own, own])
            start += size

    @pytest.mark.matrix
    @PROBES
    def test_microbatches_make_no_difference(self, job, settings):
        expected, _ = matrix(job, filter_ggn_diagonal, **settings)
        got, _ = matrix(job, filter_ggn_diagonal, microbatch_size=3, **settings)
        close(got, expected)

    @pytest.mark.matrix
    def test_budget(self, job):
        expected, _ = matrix(job, filter_ggn_diagonal)
        budget = MemoryBudget(2**24)
        got, _ = matrix(job, filter_ggn_diagonal, microbatch_size=budget)
        close(got, expected)

    @EXACT
    def test_weights(self, job, settings):
        weights = np.array([1.0, 0, 2, -1, 0.5, 3, 1])
        if settings:
            run = jax.jit(lambda w: matrix(job, accumulator=Sum(w), **settings)[0])
            each = np.stack([run(row) for row in np.eye(NUM)])
        else:
            jacobians, _, hessians = per_example(job)
            each = np.einsum("nop,nol,nlq->npq", jacobians, hessians, jacobians)
        accumulator = Sum(jax.device_put(weights))
        for method in CHOICES if settings else ("sites",):
            got = matrix(job, accumulator=accumulator, method=method, **settings)[0]
            close(got, np.tensordot(weights, each, 1))

    @pytest.mark.devices
    @pytest.mark.parametrize(
        ("kind", "settings"),
        spread([*zip(KINDS + KINDS, ALL, strict=True)], 1),
        ids=NAMES,
    )
    def test_on_a_mesh(self, job, settings, kind):
        model, x, labels = job
        mesh = make_mesh(kind)
        num = 8
        x, labels = np.resize(x, (num, 3)), np.resize(labels, num)
        expected = matrix((model, x, labels), filter_ggn_diagonal, **settings)[0]
        spread = [put(a, mesh, "data") for a in (x, labels)]
        got = matrix((model, *spread), filter_ggn_diagonal, **settings)[0]
        close(jax.device_get(got), jax.device_get(expected))

    @PROBES
    def test_within_jit_and_vmap(self, job, settings):
        model, x, labels = job
        run = lambda x: matrix((model, x, labels), filter_ggn_diagonal, **settings)[0]
        xs = np.stack([x, 2 * np.asarray(x)])
        got = jax.jit(jax.vmap(run))(xs)
        close(got, np.stack([run(x) for x in xs]))


def test_truth(job):
    jacobians, gradients, hessians = per_example(job)
    exact = np.einsum("nop,nol,nlq->pq", jacobians, hessians, jacobians) / NUM
    close(matrix(job)[0], exact)
    pulled = np.einsum("nop,no->np", jacobians, gradients)
    close(matrix(job, fisher="empirical")[0], pulled.T @ pulled / NUM)
    diagonal, _ = matrix(job, filter_ggn_diagonal, fisher="empirical")
    close(diagonal, np.mean(pulled**2, 0))


@PROBES
def test_estimates_are_unbiased(job, settings):
    exact, num = np.asarray(matrix(job)[0]), 400

    def estimate(key):
        return matrix(job, **{**settings, "key": key, "num_samples": 4})[0]

    found = np.asarray(
        jax.jit(lambda keys: jax.lax.map(estimate, keys))(jr.split(jr.key(5), num))
    )
    errors = found.std(0, ddof=1) / num**0.5
    scores = (found.mean(0) - exact)[errors > 1e-12] / errors[errors > 1e-12]
    # These are nearly normal: far from it with a factor that is wrong.
    assert 0.5 < np.mean(scores**2) < 1.6
    assert np.max(np.abs(scores)) < 6
    # Where nothing varies, it is exact.
    np.testing.assert_allclose(
        found.mean(0)[errors <= 1e-12], exact[errors <= 1e-12], atol=1e-10
    )


def test_keys_are_of_examples(job):
    settings = DRAWN[1]
    same = matrix(job, filter_ggn_diagonal, **settings)[0]
    np.testing.assert_array_equal(same, matrix(job, filter_ggn_diagonal, **settings)[0])
    other = matrix(job, filter_ggn_diagonal, **{**settings, "key": jr.key(4)})[0]
    assert not np.allclose(same, other)
    raw = jr.key_data(settings["key"])
    assert_bits(same, matrix(job, filter_ggn_diagonal, **{**settings, "key": raw})[0])


@pytest.mark.matrix
@PROBES
def test_one_example(job, settings):
    model, x, labels = job
    settings = {"in_axes": None, "flat": True, **settings}
    ggn = filter_ggn(apply, cross_entropy, **settings)
    first = np.asarray(x)[0], np.asarray(labels)[0]
    got = ggn(model, *first)[0]
    other = filter_ggn(apply, cross_entropy, method="products", **settings)
    close(got, other(model, *first)[0])


def test_several_outputs():
    w, x = normal(jr.key(0), (2, 3), float), normal(jr.key(1), (4, 3), float)
    model = lambda w, x: {"a": jnp.tanh(w @ x), "b": (w[0] @ x) ** 2}
    loss = lambda out, x: jnp.sum(out["a"] ** 2) * 2 + out["b"] ** 2 + out["b"]
    exact = np.asarray(filter_ggn(model, loss, in_axes=0)(w, x))
    estimate = lambda key: filter_ggn(
        model, loss, in_axes=0, fisher="mc", key=key, num_samples=64
    )(w, x)
    run = jax.jit(lambda key: jax.lax.map(estimate, jr.split(key, 64)))
    found, scale = np.asarray(run(jr.key(2))), np.max(np.abs(exact))
    np.testing.assert_allclose(found.mean(0), exact, rtol=0, atol=0.05 * scale)


@pytest.mark.parametrize("dtype", spread((jnp.float16, jnp.bfloat16), 1))
def test_half_precision(job, dtype):
    model, x, labels = job
    to_half = lambda x: jax.device_put(np.asarray(x).astype(dtype))
    cast = lambda x: to_half(x) if eqx.is_inexact_array(x) else x
    half = jax.tree.map(cast, (model, x))
    # With a sampler, other labels may be drawn.
    for settings in ALL[1:3]:
        got, _ = matrix((*half, labels), filter_ggn_diagonal, **settings)
        assert got.dtype == dtype
        expected = np.asarray(matrix(job, filter_ggn_diagonal, **settings)[0])
        got, scale = np.asarray(got).astype(float), np.max(expected)
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.1 * scale)


@pytest.mark.devices
@pytest.mark.matrix
def test_roots_on_each_device(job):
    """Where devices may disagree, there are NaNs in place of errors."""
    model, x, labels = job
    x, labels = jnp.resize(x, (8, 3)), jnp.resize(labels, 8)
    mesh = make_mesh(KINDS[0])
    arrays, static = eqx.partition(model, eqx.is_array)
    signs = jnp.array([1.0, 1, 1, 1, 1, 1, -1, -1])
    settings = {"in_axes": 0, "fisher": "mc", "key": jr.key(3)}
    loss = lambda out, x, label, sign: sign * cross_entropy(out, x, label)
    apply_ = lambda model, x, label, sign: model(x)
    one = lambda method: (
        lambda *args: filter_ggn_diagonal(
            apply_, loss, flat=True, method=method, **settings
        )(*args)[0]
    )

    def traces(*args):
        factors = filter_kfac(apply_, loss, **settings)(*args)
        return factors.operator(damping=0.1).inverse().trace()

    def local(arrays, *batch):
        model = eqx.combine(vary_as(batch, arrays), static)
        found = one("sites")(model, *batch), one("products")(model, *batch)
        return [x[None] for x in (*found, traces(model, *batch))]

    own = P("data")
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), own, own, own), out_specs=own)
    by_sites, by_products, by_factors = map(
        np.asarray, jax.jit(run)(arrays, x, labels, signs)
    )
    first = (x[:2], labels[:2], signs[:2])
    for got, expected in (
        (by_sites, one("sites")(model, *first)),
        (by_products, one("sites")(model, *first)),
        (by_factors, traces(model, *first)),
    ):
        np.testing.assert_allclose(got[0], expected, rtol=1e-8)
        assert np.all(np.isfinite(got[:3]))
        assert np.any(np.isnan(got[3]))


class TestBadInput:
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        (
            ({"fisher": "type-1"}, ValueError, "`fisher` must be one of"),
            ({"fisher": "mc"}, ValueError, "give it a `key`"),
            ({"fisher": "mc", "key": 0}, TypeError, "`key` must be Key"),
            (
                {"fisher": "mc", "key": jr.split(jr.key(0))},
                ValueError,
                "`key` must be Key",
            ),
            ({"key": jr.key(0)}, ValueError, "`key` is for `fisher='mc'`"),
            ({"num_samples": 2}, ValueError, "`num_samples` is for `fisher='mc'`"),
            ({"sampler": jr.categorical}, ValueError, "`sampler` is for"),
            ({**DRAWN[0], "num_samples": 0}, ValueError, "at least 1; got 0"),
            ({**DRAWN[0], "num_samples": 1.5}, TypeError, "must be int; got 1.5"),
            (
                {**DRAWN[0], "sampler": "normal"},
                TypeError,
                "`sampler` must be Callable",
            ),
        ),
    )
    def test_settings(self, settings, error, message):
        with pytest.raises(error, match=message):
            filter_ggn_diagonal(apply, cross_entropy, in_axes=0, **settings)

    def test_labels_of_another_shape(self, job):
        sampler = lambda key, out: out
        settings = {"fisher": "mc", "key": jr.key(0), "sampler": sampler}
        with pytest.raises(ValueError, match="shapes of the last positional argument"):
            matrix(job, filter_ggn_diagonal, **settings)

    def test_no_label(self, job):
        model, x, _ = job
        ggn = filter_ggn(
            lambda m: m(x[0]), lambda out: jnp.sum(out**2), in_axes=None, **DRAWN[1]
        )
        with pytest.raises(ValueError, match="without arguments after the first"):
            ggn(model)

    def test_a_label_by_keyword(self, job):
        model, x, labels = job
        ggn = filter_ggn_diagonal(apply, cross_entropy, in_axes=0, **DRAWN[1])
        with pytest.raises(ValueError, match=r"keyword arguments \('label',\)"):
            ggn(model, x, label=labels)

    def test_a_loss_that_is_not_convex(self, job):
        model, x, labels = job
        ggn = filter_ggn_diagonal(
            apply, lambda out, x, label: -jnp.sum(out**2), in_axes=0, **DRAWN[0]
        )
        with pytest.raises(eqx.EquinoxRuntimeError, match="the loss is not convex"):
            jax.block_until_ready(ggn(model, x, labels))


def squares(out, factor):
    return 0.5 * jnp.sum((factor @ out) ** 2)


def entropy(out, scale):
    return jax.nn.logsumexp(scale * out) - scale[0] * out[0]


def losses():
    """Losses whose curvatures are of very different sizes, and their arguments."""
    yield squares, np.ones(4), np.diag([1, 1e-2, 1e-4, 1e-6])
    rng = np.random.default_rng(0)
    for num, rank in ((4, 4), (4, 1), (300, 300), (300, 10)):
        factor = rng.normal(size=(num, num)) * 10 ** -np.linspace(0, 6, num)
        factor[rank:] = 0
        yield squares, np.ones(num), factor
    factor = np.eye(300)
    factor[0, 1], factor[1, 1] = 1, 5e-3  # Two outputs that are almost the same.
    yield squares, np.ones(300), factor
    for doubt in (0.1, 1e-3, 1e-5, 1e-6, 1e-7, 1e-9):
        for num, decades in ((2, 0), (10, 0), (10, 6)):
            scale, logits = (
                10 ** -np.linspace(0, decades, num),
                3 * rng.normal(size=num),
            )
            # All other classes have the probability `doubt`.
            logits[0] = np.log(np.exp(logits[1:]).sum()) + np.log((1 - doubt) / doubt)
            yield entropy, logits / scale, scale


@pytest.mark.matrix
def test_mean_of_estimates_in_float32():
    """Each entry is judged by its row and column, as curvatures differ by 1e12."""
    hessian = jax.jit(jax.hessian(lambda out, loss, x: loss(out, x)), static_argnums=1)
    for loss, out, numbers in losses():
        out, numbers = jnp.asarray(out, jnp.float32), jnp.asarray(numbers, jnp.float32)
        terms = jnp.abs(hessian(0 * out, loss, numbers))
        plain = hessian(out, loss, numbers)
        factor = np.asarray(jax.jit(root)(plain, terms), float)
        wide = jnp.asarray(out, float), loss, jnp.asarray(numbers, float)
        truth = np.asarray(hessian(*wide))
        scale = np.sqrt(np.outer(np.diag(truth), np.diag(truth)))
        error, of_plain = (
            np.max(np.abs(np.asarray(x) - truth) / scale)
            for x in (factor.T @ factor, plain)
        )
        assert error <= 10 * of_plain + 5e-6


def test_roots_keep_small_curvatures_and_confident_classifiers():
    scales = np.array([1.0, 2.5e-9], np.float32)
    quadratic = lambda out: 0.5 * jnp.sum(scales * out**2)
    settings = {"fisher": "mc", "key": jr.key(0), "num_samples": 4, "flat": True}
    ggn = filter_ggn(lambda w: w, quadratic, in_axes=None, **settings)
    matrix = ggn(jnp.ones(2, jnp.float32))[0]
    np.testing.assert_allclose(np.diag(matrix), scales, rtol=1e-5)

    entropy = lambda out: jax.nn.logsumexp(out) - out[0]
    ggn = filter_ggn(lambda w: w, entropy, in_axes=None, **settings)
    for confidence in (7.0, 12.0, 17.0, 25.0):
        out = np.zeros(10, np.float32)
        out[0] = confidence
        found = ggn(jnp.asarray(out))[0]
        p = np.exp(out.astype(float) - confidence)
        p /= p.sum()
        bound = 10 * p[1:].sum() + 1e-6
        assert np.max(np.abs(found)) < bound
