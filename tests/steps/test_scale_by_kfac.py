"""K-FAC in optax, against dense matrices of its factors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxbatch
from ..helpers import drawn, normal


pytestmark = pytest.mark.usefixtures("x64")


DAMPING, DECAY = 0.1, 0.5


def predict(model, x, y):
    return model(x)


def loss(out, x, y):
    return jnp.sum((out - y) ** 2) / 2


KFAC = eqxbatch.filter_kfac(predict, loss)
GRADIENT = eqxbatch.filter_micro_grad(lambda model, x, y: loss(model(x), x, y))


@pytest.fixture
def model(x64):
    # An activation and a normalisation without parameters are static.
    return drawn(eqx.nn.MLP, 3, 2, 4, 1, jnp.tanh, key=jr.key(0))


@pytest.fixture
def batches(x64):
    """Three batches: two are drawn, and one has a gradient of zero."""
    shapes = (3, 6, 3), (3, 6, 2)
    return [np.asarray(normal(jr.key(i), s, float)) for i, s in enumerate(shapes, 1)]


def flat(tree):
    leaves = jax.device_get(jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
    return np.concatenate([np.ravel(x) for x in leaves])


@eqx.filter_jit
def matrix_of(factors):
    return factors.operator().as_matrix()


def averaged(found, weights):
    """A matrix from the weighted means of factors, in a dense solve."""
    mean = lambda *xs: sum(w * x for w, x in zip(weights, xs, strict=True))
    matrix = np.asarray(matrix_of(jax.tree.map(mean, *jax.device_get(found))))
    return matrix + DAMPING * np.eye(len(matrix))


@pytest.mark.quick
def test_steps(model, batches):
    """The first step, averages after others, and when inverses are computed anew."""
    settings = {"damping": DAMPING, "decay": DECAY, "inverse_update_period": 2}
    shapes = eqx.filter_eval_shape(KFAC, model, *(x[0] for x in batches))
    optimiser = eqxbatch.scale_by_kfac(shapes, **settings)
    found = [KFAC(model, x, y) for x, y in zip(*batches, strict=True)]
    gradients = [GRADIENT(model, x, y) for x, y in zip(*batches, strict=True)]
    state = optimiser.init(eqxbatch.parameters(model))
    update = jax.jit(optimiser.update)
    # The average of a step has the weights (1 - d) d^k, whose sum is 1.
    weights = ([1.0], [1.0, 0.0], [1 / 7, 2 / 7, 4 / 7])
    for i, of_batches in enumerate(weights):
        step, state = update(gradients[i], state, factors=found[i])
        expected = np.linalg.solve(
            averaged(found[: i + 1], of_batches), flat(gradients[i])
        )
        np.testing.assert_allclose(flat(step), expected, rtol=1e-8)
        assert jax.tree.structure(step) == jax.tree.structure(gradients[i])
    assert state.count == 3
    # The second average was not inverted.
    mean = averaged(found[:2], [1 / 3, 2 / 3])
    assert not np.allclose(averaged(found[:1], [1.0]), mean)


def test_constraint(model, batches):
    call = model, batches[0][0], batches[1][0]
    factors, gradient = KFAC(*call), GRADIENT(*call)
    step = np.linalg.solve(averaged([factors], [1.0]), flat(gradient))
    squared = step @ flat(gradient)

    @jax.jit
    def run(gradient):
        found = []
        for bound in (squared / 4, 2 * squared):
            optimiser = eqxbatch.scale_by_kfac(
                factors, damping=DAMPING, norm_constraint=bound
            )
            state = optimiser.init(None)
            found.append(optimiser.update(gradient, state, factors=factors)[0])
        return found

    for got, scale in zip(run(gradient), (0.5, 1.0), strict=True):
        np.testing.assert_allclose(flat(got), scale * step, rtol=1e-8)
    for got in run(jax.tree.map(np.zeros_like, jax.device_get(gradient))):
        assert not np.any(flat(got))


@pytest.mark.versions
def test_training(model, batches, tmp_path):
    """In a chain, a scan, with a schedule and from a file, for some parameters."""
    last = lambda model: model.layers[-1]
    kfac = eqxbatch.filter_kfac(
        predict, loss, where=last, fisher="mc", key=jr.key(3), sampler=sampler
    )
    gradient = eqxbatch.filter_micro_value_and_grad(
        lambda model, x, y: loss(model(x), x, y), where=last
    )
    x, y = (x[0] for x in batches)
    shapes = eqx.filter_eval_shape(kfac, model, x, y)

    @optax.inject_hyperparams
    def scaled(damping):
        return eqxbatch.scale_by_kfac(shapes, damping=damping)

    schedule = optax.exponential_decay(1e-2, 1, 0.9)
    optimiser = optax.chain(scaled(schedule), optax.scale_by_learning_rate(0.5))
    parameters = eqxbatch.parameters(model, where=last)

    def step(carry, _):
        parameters, state = carry
        trained = eqx.combine(parameters, model)
        value, grads = gradient(trained, x, y)
        updates, state = optimiser.update(
            grads, state, parameters, factors=kfac(trained, x, y)
        )
        return (eqx.apply_updates(parameters, updates), state), value

    start = parameters, optimiser.init(parameters)
    run = jax.jit(lambda start: jax.lax.scan(step, start, length=4))
    end, values = run(start)
    assert np.all(np.diff(values) < 0)
    path = tmp_path / "state.eqx"
    eqx.tree_serialise_leaves(path, end)
    loaded = eqx.tree_deserialise_leaves(path, start)
    assert eqx.tree_equal(*jax.device_get((loaded, end)))
    after = run(loaded)[1]
    assert after[-1] < values[-1]


def sampler(key, out):
    return out + jr.normal(key, out.shape, out.dtype)


def test_the_state_keeps_its_types(model, batches):
    """Also whether they are weak: a step is compiled once."""
    x, y = (x[0] for x in batches)
    found = KFAC(model, x, y)
    optimiser = eqxbatch.scale_by_kfac(found, damping=DAMPING)
    state = optimiser.init(eqxbatch.parameters(model))
    update = lambda state: optimiser.update(GRADIENT(model, x, y), state, factors=found)
    _, after = jax.eval_shape(update, state)
    types = lambda state: [(x.dtype, x.weak_type) for x in jax.tree.leaves(state)]
    assert types(after) == types(state)
