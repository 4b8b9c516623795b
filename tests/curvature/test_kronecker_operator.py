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
from .kfac_models import kfac, KNOWN, loss_of_four, predict
from .oracle import close


NUM = 5
pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def y(x64):
    return jr.normal(jr.key(2), (NUM, 2))


@pytest.fixture(params=(False, True))
def mixed(request, x64):
    """Factors of every kind of block."""
    keys = jr.split(jr.key(0), 3)
    model = {
        "table": eqx.nn.Embedding(5, 3, key=keys[0]),
        "norm": eqx.nn.LayerNorm(3),
        "groups": eqx.nn.Conv1d(4, 4, 1, groups=2, key=keys[1]),
        "layer": eqx.nn.Linear(3, 4, key=keys[2]),
        "large": jnp.linspace(0.5, 1.5, 516),
    }

    def apply(model, x, y):
        hidden = jnp.tanh(jax.vmap(model["table"])(x))
        hidden = jax.vmap(model["layer"])(jax.vmap(model["norm"])(hidden))
        hidden = jnp.tanh(model["groups"](jnp.tanh(hidden).T)).sum(1)
        return hidden * jnp.sum(model["large"].reshape(4, 129) * hidden[:, None], 1)

    x, y = jr.randint(jr.key(1), (NUM, 2), 0, 5), jnp.zeros((NUM, 4))
    settings = {"in_axes": 0, "corrected": request.param}
    found = filter_kfac(apply, loss_of_four, **settings)(model, x, y)
    kinds = {block.part.structure for block in found.blocks}
    assert kinds == {"kronecker", "block", "diagonal"}
    return found, eqx.filter(model, eqx.is_inexact_array)


class TestOperator:
    def test_against_dense(self, mixed):
        found, model = mixed
        damping = 0.3
        operator = found.operator(damping=damping)
        matrix = np.asarray(operator.as_matrix())
        plain = np.asarray(found.operator().as_matrix())
        close(jnp.asarray(matrix), jnp.asarray(plain + damping * np.eye(len(plain))))
        flat, unravel = jax.flatten_util.ravel_pytree(model)
        ravel = lambda tree: jax.flatten_util.ravel_pytree(tree)[0]
        inverse = np.linalg.inv(matrix)
        values, vectors = np.linalg.eigh(matrix)
        for name, own, expected in (
            ("itself", operator, matrix),
            ("inverse", operator.inverse(), inverse),
            ("root", operator.sqrt(), vectors * np.sqrt(values) @ vectors.T),
            ("back", operator.inverse().inverse(), matrix),
        ):
            got = ravel(own.mv(model))
            np.testing.assert_allclose(got, expected @ flat, rtol=1e-8, err_msg=name)
            diagonal = np.diag(expected)
            np.testing.assert_allclose(own.diagonal(), diagonal, rtol=1e-8)
            np.testing.assert_allclose(own.trace(), np.sum(diagonal), rtol=1e-8)
            logdet = np.linalg.slogdet(expected)[1]
            np.testing.assert_allclose(own.logdet(), logdet, rtol=1e-8)
        found_values, found_vectors = operator.eigh()
        np.testing.assert_allclose(np.sort(found_values), values, rtol=1e-8)
        basis = np.asarray(found_vectors.as_matrix())
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(flat)), atol=1e-9)
        np.testing.assert_allclose(
            basis * np.asarray(found_values) @ basis.T, matrix, atol=1e-8
        )
        back = found_vectors.transpose().mv(model)
        np.testing.assert_allclose(back, basis.T @ flat, rtol=1e-8)
        # The blocks are those of the factors.
        for block in found.blocks:
            if block.part.structure == "kronecker" and block.moments is None:
                self._compare(block, plain, unravel)

    def _compare(self, block, matrix, unravel):
        """A Kronecker product, entry by entry, at some places."""
        layout = block.part.layout
        places = jax.tree.leaves(unravel(jnp.arange(float(len(matrix)))))
        places = [places[leaf] for leaf in block.part.leaves]
        places = np.asarray(layout.matrices(places)).astype(int)
        close(layout.leaves(layout.matrices(own := layout_leaves(block))), own)
        for i, own in enumerate(places):
            inputs = np.asarray(block.inputs[i])
            inputs = np.diag(inputs) if inputs.ndim == 1 else inputs
            expected = np.kron(block.outputs[i], inputs)
            got = matrix[np.ix_(own.ravel(), own.ravel())]
            np.testing.assert_allclose(got, expected, atol=1e-10)

    @pytest.mark.versions
    def test_in_lineax(self, mixed):
        found, model = mixed
        operator = found.operator(damping=0.3)
        assert lineax.is_symmetric(operator)
        # With `fisher="exact"`, nothing says that the loss is convex.
        assert not lineax.is_positive_semidefinite(operator)
        assert lineax.is_positive_semidefinite(operator.inverse())
        assert lineax.is_positive_semidefinite(operator.sqrt())
        squared = dataclasses.replace(found, is_semidefinite=True)
        assert lineax.is_positive_semidefinite(squared.operator(damping=0.3))
        close(lineax.diagonal(operator), operator.diagonal())
        tagged = lineax.TaggedLinearOperator(operator, lineax.positive_semidefinite_tag)
        solution = lineax.linear_solve(tagged, model, lineax.CG(1e-9, 1e-9)).value
        close(solution, operator.inverse().mv(model), tol=1e-6)
        tree = lineax.materialise(operator)
        close(tree.mv(model), operator.mv(model))
        run = eqx.filter_jit(lambda found, x: found.operator(damping=0.3).mv(x))
        close(run(found, model), operator.mv(model))

    @pytest.mark.quick
    def test_refused(self, y):
        known = KNOWN["mlp"](jr.key(1), 2)
        found = kfac(known, y[:2])
        parameters = eqx.filter(known.model, eqx.is_inexact_array)
        with pytest.raises(ValueError, match=r"`damping` must be at least 0; got -0.1"):
            found.operator(damping=-0.1)
        with pytest.raises(RuntimeError, match="`damping` must be at least 0"):
            eqx.filter_jit(lambda x: found.operator(damping=x).mv(parameters))(
                jnp.asarray(-1.0)
            )
        singular = found.operator()
        with pytest.raises(RuntimeError, match=r"singular.*damping"):
            eqx.filter_jit(lambda x: x.inverse())(singular)
        with pytest.raises(RuntimeError, match=r"singular.*damping"):
            eqx.filter_jit(lambda x: x.logdet())(singular)
        other = eqx.nn.MLP(3, 2, 5, 1, key=jr.key(0))
        with pytest.raises(ValueError, match=r"factors belong to.*got"):
            singular.mv(eqx.filter(other, eqx.is_inexact_array))
        with pytest.raises(ValueError, match=r"factors belong to.*got"):
            singular.mv(known.model)
        concave = filter_kfac(
            predict(known), lambda out, x, y: -jnp.sum(out**2), in_axes=0
        )(known.model, known.x, y[:2])
        with pytest.raises(RuntimeError, match="`sqrt` needs a positive"):
            eqx.filter_jit(lambda x: x.sqrt())(concave.operator())


def test_rounding_is_that_of_each_factor():
    """Large blocks are neither called singular, nor are negative eigenvalues lost."""
    x = jnp.ones((2, 100), jnp.float32)
    model = eqx.nn.Linear(100, 100, use_bias=False, dtype=jnp.float32, key=jr.key(0))
    found = filter_kfac(
        lambda model, x: model(x), lambda out, x: jnp.sum(out**2), in_axes=0
    )(model, x)
    spread = jnp.diag(jnp.geomspace(0.01, 1, 100, dtype=jnp.float32))[None]
    both = lambda factors: (factors.blocks[0].outputs, factors.blocks[0].inputs)
    of = lambda *pair: eqx.tree_at(both, found, pair).operator()
    logs = 2 * 100 * np.sum(np.log(np.geomspace(0.01, 1, 100)))
    run = eqx.filter_jit(lambda x: (x.logdet(), x.inverse().trace()))
    logdet, trace = run(of(spread, spread))
    np.testing.assert_allclose(logdet, logs, rtol=1e-5)
    expected = np.sum(1 / np.geomspace(0.01, 1, 100)) ** 2
    np.testing.assert_allclose(trace, expected, rtol=1e-5)
    negative = jnp.eye(100, dtype=jnp.float32).at[3, 3].set(-5e-4)[None]
    with pytest.raises(RuntimeError, match="`sqrt` needs a positive"):
        eqx.filter_jit(lambda x: x.sqrt())(of(negative, jnp.abs(negative)))


def layout_leaves(block):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in block.part.shapes]
