"""Kernels of wide networks, and their parameterisation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxbatch import (
    MonteCarloKernel,
    ntk_parameterise,
)
from ..helpers import drawn, normal
from .random_kernels import assert_same, kernel, KEY, network


parameterise = eqx.filter_jit(ntk_parameterise)


class TestParameterise:
    def test_linear(self, getkey):
        layer = drawn(eqx.nn.Linear, 4, 3, key=getkey())
        x, key = normal(getkey(), (4,)), getkey()

        @eqx.filter_jit
        def run(layer, x):
            layer = ntk_parameterise(layer, weight_std=1.5, bias_std=0.5, key=key)
            return layer.layer, layer(x)

        inner, got = run(layer, x)
        weight, bias = np.asarray(inner.weight), np.asarray(inner.bias)
        assert_same(got, 1.5 / 2 * weight @ np.asarray(x) + bias / 2)
        assert (weight != np.asarray(layer.weight)).all()

    @pytest.mark.parametrize(
        ("make", "fan_in"),
        (
            (lambda *, key: eqx.nn.Conv2d(4, 6, (3, 2), groups=2, key=key), 12),
            (lambda *, key: eqx.nn.Conv2d(4, 6, (3, 2), use_bias=False, key=key), 24),
            (lambda *, key: eqx.nn.ConvTranspose2d(4, 6, 3, stride=2, key=key), 36),
        ),
    )
    def test_convolutions(self, make, fan_in, getkey):
        x, key = normal(getkey(), (4, 5, 5)), getkey()

        @eqx.filter_jit
        def run(layer, x):
            layer = ntk_parameterise(layer, weight_std=2.0, key=key)
            plain = layer.layer
            scaled = eqx.tree_at(
                lambda m: m.weight, plain, plain.weight * (2 / fan_in**0.5)
            )
            if plain.bias is not None:
                scaled = eqx.tree_at(lambda m: m.bias, scaled, 0 * plain.bias)
            return layer(x), scaled(x)

        assert_same(*run(drawn(make, key=getkey()), x))

    def test_standard_normal(self):
        layer = drawn(eqx.nn.Linear, 100, 100, key=KEY)
        values = parameterise(layer, key=KEY).layer
        values = np.concatenate([np.ravel(values.weight), values.bias])
        assert abs(values.mean()) < 0.05
        assert abs(values.std() - 1) < 0.05

    def test_all_else_stays(self, getkey):
        linear = lambda dtype: drawn(eqx.nn.Linear, 2, 3, dtype=dtype, key=KEY)
        norm = eqx.nn.LayerNorm(3)
        model = [linear(jnp.bfloat16), norm, None, "name"]
        found = parameterise(model, key=KEY)
        assert eqx.tree_equal(found[1:], model[1:])
        assert found[0].layer.weight.dtype == jnp.bfloat16
        twins = [linear(jnp.float32), linear(jnp.float32)]
        pair = parameterise(twins, key=KEY)
        first, second = (np.asarray(x.layer.weight) for x in pair)
        assert (first != second).all()

    def test_bad_input(self):
        layer = drawn(eqx.nn.Linear, 2, 3, key=KEY)
        with pytest.raises(ValueError, match="`model` must have layers of"):
            ntk_parameterise(eqx.nn.LayerNorm(3), key=KEY)
        for std in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="`weight_std` must be finite"):
                ntk_parameterise(layer, weight_std=std, key=KEY)


def arc_cosine(covariance):
    """What a ReLU makes of Gaussians: second moments, and those of its derivative."""
    scales = np.sqrt(np.diag(covariance))
    product = np.outer(scales, scales)
    cosine = np.clip(covariance / product, -1, 1)
    angle = np.arccos(cosine)
    values = product * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)
    return values, (np.pi - angle) / (2 * np.pi)


def arc_sine(covariance):
    """The same for erf."""
    scales = 1 + 2 * np.diag(covariance)
    product = np.outer(scales, scales)
    values = 2 / np.pi * np.arcsin(2 * covariance / np.sqrt(product))
    return values, 4 / np.pi / np.sqrt(product - 4 * covariance**2)


def limit(x, activation, depth, weight_std=1.3, bias_std=0.2):
    """NNGP and NTK of infinitely wide networks, in float64."""
    x = np.asarray(x, np.float64)
    affine = lambda k: weight_std**2 * k + bias_std**2
    nngp = affine(x @ x.T / x.shape[1])
    ntk = nngp
    for _ in range(depth):
        values, slopes = activation(nngp)
        nngp = affine(values)
        ntk = nngp + weight_std**2 * ntk * slopes
    return {"nngp": nngp, "ntk": ntk}


@pytest.mark.matrix
class TestLimits:
    """Cho and Saul, 2009, and Williams, 1997; the NTK as Jacot et al., 2018, have it.

    Keys are fixed: at four standard errors, one in some thousand entries is further.
    """

    x = jr.normal(jr.key(1), (4, 3))
    functions = ((jax.nn.relu, arc_cosine), (jax.lax.erf, arc_sine))

    @pytest.mark.parametrize("number", (0, 1))
    @pytest.mark.parametrize("width", (8, 128))
    def test_within_standard_errors(self, width, number):
        """With one hidden layer, there is no bias at any width."""
        activation, analytic = self.functions[number]
        make = lambda key: network(key, width, activation=activation)
        expected = limit(self.x, analytic, 1)
        kernels = kernel((100, 1_000), init=make, samples_per_batch=100)
        for estimate in kernels.estimate(self.x):
            for name, exact in expected.items():
                mean = getattr(estimate.kernel, name)
                error = getattr(estimate.standard_error, name)
                assert jnp.max(jnp.abs(mean - exact) / error) < 4
                assert jnp.max(error / jnp.abs(exact).max()) < 0.15

    def test_error_falls_with_samples(self):
        counts = (4, 16, 64)
        expected = limit(self.x, arc_cosine, 1)["ntk"]

        def errors(key):
            kernels = MonteCarloKernel(
                network, key=key, num_samples=counts, get="ntk", samples_per_batch=4
            )
            return jnp.stack([jnp.sum((k - expected) ** 2) for k in kernels(self.x)])

        squared = jnp.mean(jax.jit(jax.vmap(errors))(jr.split(KEY, 200)), 0)
        slope = np.polyfit(np.log(counts), np.log(squared) / 2, 1)[0]
        assert abs(slope + 0.5) < 0.1

    def test_bias_falls_with_width(self):
        widths = (2, 4, 8)
        expected = limit(self.x, arc_sine, 3)["ntk"]
        biases = []
        for width in widths:
            make = lambda key, width=width: network(key, width, 3, 4, jax.lax.erf)
            monte_carlo = kernel(20_000, init=make, get="ntk", samples_per_batch=500)
            got = monte_carlo.estimate(self.x)
            bias = jnp.linalg.norm(got.kernel - expected)
            assert jnp.linalg.norm(got.standard_error) < 0.25 * bias
            biases.append(float(bias))
        slope = np.polyfit(np.log(widths), np.log(biases), 1)[0]
        assert abs(slope + 1) < 0.2
