"""Gauss-Newton matrices of few parameters, against dense ones."""

import logging

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
    filter_jacobian,
    Mean,
    Sum,
)
from ..helpers import KINDS, make_mesh, normal, put
from .oracle import close


pytestmark = pytest.mark.usefixtures("x64")
NUM = 11
CHOICE = "Second derivatives: method='auto' takes 3 of 3 arrays from the Jacobian."
T = np.linspace(0.1, 1, 6)


def parameters():
    return {
        "rate": jnp.array(1.5),
        "scale": jnp.array([0.5, -0.7]),
        "shift": jnp.array(0.2),
        "name": "decay",
    }


def curve(p, x):
    """Six real and six complex outputs, of four parameters."""
    decay = jnp.exp(-p["rate"] * x[0] * T)
    parts = p["shift"] * decay, p["scale"][1] * x[1] * decay
    return p["scale"][0] * decay, jax.lax.complex(*parts)


def coupled(out, x):
    """Its Hessian couples all outputs of an example."""
    parts = jnp.concatenate([out[0], out[1].real, out[1].imag])
    return jax.nn.logsumexp(parts) + jnp.sum(parts**2) * x[2] + parts[0] * parts[9]


def number(p, x):
    """One output, of the same parameters."""
    return p["scale"] @ x[:2] * jnp.exp(-p["rate"] * x[2]) + p["shift"] ** 2 * x[0]


def quartic(out, x):
    return out**4 + x[1] * out**2 + out


CASES = {"columns": (curve, coupled), "row": (number, quartic)}
ALL = pytest.mark.parametrize("case", CASES)


def xs(num=NUM):
    return 0.5 + normal(jr.key(0), (num, 3), float)


def each(case, x, gradient=False):
    """The matrix of each example, from the whole Jacobian and Hessian."""
    fun, loss = CASES[case]
    flat, unravel = ravel_pytree(eqx.filter(parameters(), eqx.is_array))

    def outputs(flat, x):
        out = fun(unravel(flat), x)
        split = lambda y: [y.real, y.imag] if jnp.iscomplexobj(y) else [y]
        parts = jax.tree.map(split, out)
        return jnp.concatenate([y.ravel() for y in jax.tree.leaves(parts)])

    def of_flat(parts, x):
        if case == "row":
            return loss(parts[0], x)
        return loss((parts[:6], jax.lax.complex(parts[6:12], parts[12:])), x)

    @jax.jit
    @jax.vmap
    def one(x):
        jacobian, out = jax.jacfwd(outputs)(flat, x), outputs(flat, x)
        if gradient:
            row = jax.grad(of_flat)(out, x) @ jacobian
            return jnp.outer(row, row)
        return jacobian.T @ jax.hessian(of_flat)(out, x) @ jacobian

    return np.asarray(one(x))


def matrix(case, x, transform=filter_ggn, **settings):
    return transform(*CASES[case], flat=True, **settings)(parameters(), x)[0]


def is_from_jacobian(run, caplog):
    with caplog.at_level(logging.DEBUG, "eqxbatch"):
        eqx.filter_eval_shape(run)
    return CHOICE in [record.getMessage() for record in caplog.records]


@ALL
class TestValues:
    @pytest.mark.parametrize("size", (None, 4))
    def test_weights_and_microbatches(self, case, size, caplog):
        x, weights = xs(), np.linspace(-1, 2, NUM)
        weights[3] = 0
        run = lambda: matrix(
            case, x, microbatch_size=size, accumulator=Sum(jnp.asarray(weights))
        )
        assert is_from_jacobian(run, caplog)
        got = run()
        close(got, np.tensordot(weights, each(case, x), 1))
        np.testing.assert_array_equal(got, got.T)

    def test_empirical(self, case):
        got = matrix(case, xs(), fisher="empirical", accumulator=Mean())
        close(got, np.mean(each(case, xs(), gradient=True), 0))

    def test_parts(self, case):
        x = xs()
        whole = np.mean(each(case, x), 0)
        close(matrix(case, x, filter_ggn_diagonal), np.diagonal(whole))
        # The leaves are sorted by their names.
        places = {"rate": 0, "scale": slice(1, 3), "shift": 3}
        tree = filter_ggn(*CASES[case])(parameters(), x)
        blocks = filter_ggn_blocks(*CASES[case])(parameters(), x)
        assert tree["name"] is blocks["name"] is None
        for first, i in places.items():
            close(blocks[first], whole[i, i])
            for second, j in places.items():
                close(tree[first][second], whole[i, j])

    def test_a_part_of_the_parameters(self, case):
        where = lambda p: (p["rate"], p["shift"])
        got = matrix(case, xs(), where=where)
        close(got, np.mean(each(case, xs()), 0)[np.ix_([0, 3], [0, 3])])

    @pytest.mark.parametrize("num", (0, 1))
    def test_few_examples(self, case, num):
        got = matrix(case, xs(num), accumulator=Sum())
        close(got, np.sum(each(case, xs(num)), 0))

    def test_one_call(self, case):
        x = xs()[0]
        close(matrix(case, x, in_axes=None), each(case, x[None])[0])

    def test_in_blocks_of_examples(self, case):
        """There is a remainder, as the number is a prime."""
        num = 40_009
        x = xs(num)
        got = jax.jit(lambda x: matrix(case, x))(x)
        parts = np.array_split(np.arange(num), 16)
        expected = sum(np.sum(each(case, x[part]), 0) for part in parts) / num
        close(got, expected)

    def test_derivatives(self, case):
        """The matrix can be differentiated in the examples."""
        x = xs(3)
        got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(matrix(case, x)))))(x)
        step = 1e-6 * normal(jr.key(1), x.shape, float)
        value = lambda x: np.sum(np.sin(np.mean(each(case, x), 0)))
        change = (value(x + step) - value(x - step)) / 2
        np.testing.assert_allclose(np.sum(got * step), change, rtol=1e-6)

    @pytest.mark.devices
    @pytest.mark.parametrize("kind", KINDS)
    def test_on_a_mesh(self, case, kind):
        x = put(xs(8), make_mesh(kind), "data")
        got = matrix(case, x, microbatch_size=4)
        close(jax.device_get(got), np.mean(each(case, xs(8)), 0))

    @pytest.mark.devices
    def test_within_shard_map(self, case):
        """The parameters are the same on all devices, and the examples are not."""
        mesh = make_mesh(KINDS[0])
        run = lambda x: matrix(case, x, accumulator=Sum())
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P())
        close(jax.device_get(jax.jit(mapped)(xs(8))), np.sum(each(case, xs(8)), 0))


class TestChoice:
    def test_where_other_ways_take_less(self, caplog):
        x = xs()
        two = lambda p, x: jnp.stack([number(p, x), p["rate"]])
        loss = lambda out, x: jnp.sum(out**4)
        calls = (
            # More parameters than outputs, of which there are several.
            lambda: filter_ggn(two, loss)(parameters(), x),
            # Two columns at a time.
            lambda: matrix("columns", x, block_size=2),
            lambda: matrix("row", x, method="sites"),
            lambda: matrix("row", x, method="products"),
        )
        for run in calls:
            assert not is_from_jacobian(run, caplog)

    def test_operations(self):
        """A matrix takes what the Jacobian and a product of it take."""
        x = xs(1_000)
        flops = lambda run: jax.jit(run).lower(x).compile().cost_analysis()["flops"]
        of_all = lambda p, x: jax.vmap(number, (None, 0))(p, x)

        def by_hand(x):
            jacobian, _ = filter_jacobian(of_all, flat=True)(parameters(), x)
            return jacobian.T @ jacobian

        got = flops(lambda x: matrix("row", x, accumulator=Sum()))
        assert got < 1.5 * flops(by_hand)

    def test_half_precision(self):
        low = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, parameters()
        )
        x = xs().astype(jnp.bfloat16)
        got, _ = filter_ggn(*CASES["row"], flat=True)(low, x)
        assert got.dtype == jnp.bfloat16
        close(got.astype(float), np.mean(each("row", xs()), 0), tol=5e-2)
