"""Kronecker factors as linear operators, against dense matrices."""

import dataclasses

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import lineax
import numpy as np
import pytest

from eqxbatch import filter_kfac
from ..helpers import drawn, integers, normal
from .kfac_models import kfac, known_model, loss_of_four, predict
from .oracle import close


NUM = 5
pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def y(x64):
    return normal(jr.key(2), (NUM, 2), float)


@pytest.fixture(params=(False, True))
def mixed(request, x64, y):
    """Factors and their parameters; corrections are of products only."""
    if not request.param:
        return factors_of_every_kind()
    known = known_model("mlp", NUM)
    found = kfac(known, y, corrected=True)
    return found, eqx.filter(known.model, eqx.is_inexact_array)


def apply(model, x, y):
    hidden = jnp.tanh(jax.vmap(model["table"])(x))
    hidden = jax.vmap(model["layer"])(jax.vmap(model["norm"])(hidden))
    hidden = jnp.tanh(model["groups"](jnp.tanh(hidden).T)).sum(1)
    return hidden * jnp.sum(model["large"].reshape(4, 129) * hidden[:, None], 1)


def factors_of_every_kind():
    """Factors of every kind of block."""
    keys = jr.split(jr.key(0), 3)
    model = {
        "table": drawn(eqx.nn.Embedding, 5, 3, key=keys[0]),
        "norm": eqx.nn.LayerNorm(3, use_bias=False),
        "groups": drawn(eqx.nn.Conv1d, 4, 4, 1, groups=2, key=keys[1]),
        "layer": drawn(eqx.nn.Linear, 3, 4, key=keys[2]),
        "large": jax.device_put(np.linspace(0.5, 1.5, 516)),
    }

    x, y = integers(jr.key(1), (NUM, 2), 5), np.zeros((NUM, 4))
    found = filter_kfac(apply, loss_of_four, in_axes=0)(model, x, y)
    kinds = {block.part.structure for block in found.blocks}
    assert kinds == {"kronecker", "block", "diagonal"}
    return found, eqx.filter(model, eqx.is_inexact_array)


class TestOperator:
    def test_against_dense(self, mixed):
        found, model = mixed
        damping = 0.3

        @eqx.filter_jit
        def run(found, model):
            operator = found.operator(damping=damping)
            operators = {
                "itself": operator,
                "inverse": operator.inverse(),
                "root": operator.sqrt(),
            }
            back = operator.inverse().inverse().mv(model)
            values, vectors = operator.eigh()
            turned = vectors.transpose().mv(model)
            eigen = values, vectors.as_matrix(), turned
            of = lambda x: (ravel(x.mv(model)), x.diagonal(), x.trace(), x.logdet())
            plain = found.operator().as_matrix()
            got = {k: of(x) for k, x in operators.items()}
            return plain, got, ravel(back), eigen

        flat, unravel = jax.flatten_util.ravel_pytree(model)
        ravel = lambda tree: jax.flatten_util.ravel_pytree(tree)[0]
        plain, got, back, eigen = jax.device_get(run(found, model))
        matrix = plain + damping * np.eye(len(plain))
        np.testing.assert_allclose(back, matrix @ flat, rtol=1e-8)
        inverse = np.linalg.inv(matrix)
        values, vectors = np.linalg.eigh(matrix)
        for name, expected in (
            ("itself", matrix),
            ("inverse", inverse),
            ("root", vectors * np.sqrt(values) @ vectors.T),
        ):
            product, diagonal, trace, logdet = got[name]
            np.testing.assert_allclose(
                product, expected @ flat, rtol=1e-8, err_msg=name
            )
            np.testing.assert_allclose(diagonal, np.diag(expected), rtol=1e-8)
            np.testing.assert_allclose(trace, np.trace(expected), rtol=1e-8)
            of_expected = np.linalg.slogdet(expected)[1]
            np.testing.assert_allclose(logdet, of_expected, rtol=1e-8)
        found_values, basis, turned = eigen
        np.testing.assert_allclose(np.sort(found_values), values, rtol=1e-8)
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(flat)), atol=1e-9)
        np.testing.assert_allclose(basis * found_values @ basis.T, matrix, atol=1e-8)
        np.testing.assert_allclose(turned, basis.T @ flat, rtol=1e-8)
        # The blocks are those of the factors.
        for block in found.blocks:
            if block.part.structure == "kronecker" and block.moments is None:
                self._compare(block, plain, unravel)

    def test_marginal_likelihood(self, mixed):
        """Of a Laplace approximation, and its gradient in noise and prior."""
        found, model = mixed
        # Corrected eigenvalues are no products; others are those of the dense matrix.
        factored = all(x.moments is None for x in found.blocks)
        flat, _ = jax.flatten_util.ravel_pytree(model)

        def marginal(logs, logdet):
            noise, prior = jnp.exp(logs)
            squares = prior * jnp.sum(flat**2) + 3 / noise
            volume = logdet(noise * prior) - flat.size * logs[0]
            return (flat.size * logs[1] - NUM * logs[0] - squares - volume) / 2

        @eqx.filter_jit
        def run(found, logs):
            damped = lambda x: found.operator(damping=x, factored=factored)
            plain = found.operator().as_matrix()
            eye = jnp.eye(len(plain))
            dense = lambda x: damped(x).as_matrix() if factored else plain + x * eye
            ours = lambda x: damped(x).logdet()
            exact = lambda x: jnp.linalg.slogdet(dense(x))[1]
            ways = (lambda x, way=way: marginal(x, way) for way in (ours, exact))
            return [jax.value_and_grad(way)(logs) for way in ways]

        close(*run(found, jax.device_put(np.log([0.3, 2.0]))))

    def _compare(self, block, matrix, unravel):
        """A Kronecker product, entry by entry, at some places."""
        layout = block.part.layout

        @jax.jit
        def run(numbers, own):
            places = jax.tree.leaves(unravel(numbers))
            places = [places[leaf] for leaf in block.part.leaves]
            return layout.matrices(places), layout.leaves(layout.matrices(own))

        own = layout_leaves(block)
        places, back = run(np.arange(float(len(matrix))), own)
        places = np.asarray(places).astype(int)
        close(back, own)
        for i, own in enumerate(places):
            inputs = np.asarray(block.inputs[i])
            inputs = np.diag(inputs) if inputs.ndim == 1 else inputs
            expected = np.kron(block.outputs[i], inputs)
            got = matrix[np.ix_(own.ravel(), own.ravel())]
            np.testing.assert_allclose(got, expected, atol=1e-10)

    @pytest.mark.versions
    def test_in_lineax(self, y):
        known = known_model("mlp", NUM)
        found = kfac(known, y)
        model = eqx.filter(known.model, eqx.is_inexact_array)

        @eqx.filter_jit
        def run(found, model):
            operator = found.operator(0.3)
            assert lineax.is_symmetric(operator)
            # With `fisher="exact"`, nothing says that the loss is convex.
            assert not lineax.is_positive_semidefinite(operator)
            assert lineax.is_positive_semidefinite(operator.inverse())
            assert lineax.is_positive_semidefinite(operator.sqrt())
            squared = dataclasses.replace(found, is_semidefinite=True)
            assert lineax.is_positive_semidefinite(squared.operator(damping=0.3))
            tag = lineax.positive_semidefinite_tag
            tagged = lineax.TaggedLinearOperator(operator, tag)
            solution = lineax.linear_solve(tagged, model, lineax.CG(1e-9, 1e-9)).value
            product = operator.mv(model)
            return (
                (lineax.diagonal(operator), operator.diagonal(), 1e-9),
                (solution, operator.inverse().mv(model), 1e-6),
                (lineax.materialise(operator).mv(model), product, 1e-9),
            )

        for got, expected, tol in run(found, model):
            close(got, expected, tol)

    @pytest.mark.quick
    def test_refused(self, y):
        known = known_model("mlp", 2)
        found = kfac(known, y[:2])
        parameters = eqx.filter(known.model, eqx.is_inexact_array)
        with pytest.raises(ValueError, match=r"`damping` must be at least 0; got -0.1"):
            found.operator(damping=-0.1)
        with pytest.raises(RuntimeError, match="`damping` must be at least 0"):
            eqx.filter_jit(lambda x: found.operator(damping=x).mv(parameters))(
                jnp.asarray(-1.0)
            )
        operator_of = eqx.filter_jit(lambda found: found.operator())
        singular = operator_of(found)
        with pytest.raises(RuntimeError, match=r"singular.*damping"):
            eqx.filter_jit(lambda x: x.inverse())(singular)
        with pytest.raises(RuntimeError, match=r"singular.*damping"):
            eqx.filter_jit(lambda x: x.logdet())(singular)
        other = drawn(eqx.nn.MLP, 3, 2, 5, 1, key=jr.key(0))
        with pytest.raises(ValueError, match=r"factors belong to.*got"):
            singular.mv(eqx.filter(other, eqx.is_inexact_array))
        with pytest.raises(ValueError, match=r"factors belong to.*got"):
            singular.mv(known.model)
        concave = filter_kfac(
            predict(known), lambda out, x, y: -jnp.sum(out**2), in_axes=0
        )(known.model, known.x, y[:2])
        with pytest.raises(RuntimeError, match="`sqrt` needs a positive"):
            eqx.filter_jit(lambda x: x.sqrt())(operator_of(concave))


def test_rounding_is_that_of_each_factor():
    """Large blocks are neither called singular, nor are negative eigenvalues lost."""
    x, settings = np.ones((2, 100), np.float32), {"use_bias": False, "key": jr.key(0)}
    model = drawn(eqx.nn.Linear, 100, 100, dtype=jnp.float32, **settings)
    found = filter_kfac(
        lambda model, x: model(x), lambda out, x: jnp.sum(out**2), in_axes=0
    )(model, x)
    wide = np.diag(np.geomspace(0.01, 1, 100, dtype=np.float32))[None]
    both = lambda factors: (factors.blocks[0].outputs, factors.blocks[0].inputs)
    of = lambda *pair: eqx.tree_at(both, found, jax.device_put(pair))
    logs = 2 * 100 * np.sum(np.log(np.geomspace(0.01, 1, 100)))

    @eqx.filter_jit
    def run(found):
        operator = found.operator()
        return operator.logdet(), operator.inverse().trace()

    logdet, trace = run(of(wide, wide))
    np.testing.assert_allclose(logdet, logs, rtol=1e-5)
    expected = np.sum(1 / np.geomspace(0.01, 1, 100)) ** 2
    np.testing.assert_allclose(trace, expected, rtol=1e-5)
    negative = np.eye(100, dtype=np.float32)[None]
    negative[0, 3, 3] = -5e-4
    with pytest.raises(RuntimeError, match="`sqrt` needs a positive"):
        eqx.filter_jit(lambda x: x.operator().sqrt())(of(negative, np.abs(negative)))


def layout_leaves(block):
    rng = np.random.default_rng(0)
    return [jax.device_put(rng.normal(size=shape)) for shape in block.part.shapes]


def test_damping_of_both_factors_and_relative_damping():
    model = drawn(eqx.nn.Linear, 3, 4, use_bias=False, key=jr.key(0))
    x = normal(jr.key(1), (NUM, 3), float)
    fun, loss = lambda model, x: model(x), lambda out, x: jnp.sum(jnp.cosh(out))
    found = filter_kfac(fun, loss)(model, x)
    (block,) = found.blocks
    outputs, inputs = (np.asarray(x[0]) for x in (block.outputs, block.inputs))
    mean = np.trace(outputs) / 4 * np.trace(inputs) / 3

    @eqx.filter_jit
    def run(found):
        results = []
        for relative in (False, True):
            settings = {"damping": 0.3, "relative": relative}
            added = found.operator(**settings)
            operator = found.operator(**settings, factored=True)
            matrices = [x.as_matrix() for x in (added, operator, operator.inverse())]
            results.append((*matrices, operator.logdet()))
        return results

    for damping, got in zip((0.3, 0.3 * mean), run(found), strict=True):
        ratio = np.sqrt(np.trace(inputs) / 3 / (np.trace(outputs) / 4))
        first = outputs + np.sqrt(damping) / ratio * np.eye(4)
        second = inputs + np.sqrt(damping) * ratio * np.eye(3)
        product = np.kron(first, second)
        added = np.kron(outputs, inputs) + damping * np.eye(12)
        logdet = np.linalg.slogdet(product)[1]
        close(got, (added, product, np.linalg.inv(product), logdet))
    corrected = eqx.filter_eval_shape(filter_kfac(fun, loss, corrected=True), model, x)
    factored = lambda found: found.operator(damping=0.3, factored=True)
    with pytest.raises(ValueError, match="`factored=True` adds damping to two factors"):
        eqx.filter_eval_shape(factored, corrected)
