"""Twelve tasks, as a user would write them from the docs: small, and checked.

None takes more than eight lines that call this package or exist because of it. NumPy
draws the parameters of models, for which JAX would compile programs. Longer versions
with real data are in `examples`: `batch_norm.py` (the first two), `ntk_regression.py`,
`clipped_gradients.py`, `laplace.py`, `natural_gradient.py`, `ensemble_grid.py` and
`gp_regression.py`.
"""

import ast
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import zarr
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqxbatch as eb
from .helpers import drawn, make_mesh, normal, on_devices


KEY = jr.key(0)
N, DIM = 50, 3


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def data():
    x = np.asarray(normal(jr.key(1), (N, DIM)))
    return jax.device_put((x, np.sin(x[:, 0])))


class Network(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first = eqx.nn.Linear(DIM, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.1)
        self.last = eqx.nn.Linear(16, "scalar", key=key)

    def __call__(self, x, state, key=None):
        hidden, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.relu(hidden), key=key)), state


# Otherwise, XLA compiles a program for each array.
network = eqx.filter_jit(eqx.nn.make_with_state(Network))


def batch_normalisation_of_many_inputs():
    model, state = network(KEY)
    x, _ = data()
    inference = eqx.nn.inference_mode(model)
    out, _ = eb.filter_micro_vmap(
        inference, in_axes=(0, None), out_axes=(0, None), microbatch_size="100MB"
    )(x, state)
    expected = eqx.filter_jit(eqx.filter_vmap(inference, in_axes=(0, None)))(x, state)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)


def accumulation_with_dropout_state_bfloat16_and_donation():
    model, state = network(KEY)
    x, y = data()
    optimiser = optax.adam(3e-2)
    opt_state = optimiser.init(eb.parameters(model))
    half = lambda tree: jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, tree
    )

    @eb.filter_micro_value_and_grad(axis_name="batch", microbatch_size=16)
    def value_and_grad(model, state, x, y, key):
        out, state = half(model)(half(x), state, key)
        return (out.astype(jnp.float32) - y) ** 2, state

    @eqx.filter_jit(donate="all-except-first")
    def step(rows, model, state, opt_state, key):
        keys = jr.split(key, N)
        (value, state), grads = value_and_grad(model, state, *rows, keys)
        updates, opt_state = optimiser.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, value

    values, start = [], (model, state, opt_state)
    carry = start
    for i in range(20):
        *carry, value = step((x, y), *carry, jr.key(i))
        values.append(value)
    assert values[-1] < values[0] / 2
    arrays = jax.tree.leaves(eqx.filter(start, eqx.is_array))
    assert all(x.is_deleted() for x in arrays)
    parameters = jax.tree.leaves(eb.parameters(carry[0]))
    assert {x.dtype for x in parameters} == {jnp.dtype(jnp.float32)}


def private_sgd():
    x, y = data()
    model = drawn(eqx.nn.MLP, DIM, "scalar", 16, 1, key=KEY)
    optimiser = optax.sgd(0.1)
    state = optimiser.init(eb.parameters(model))
    clipped = eb.filter_micro_grad(
        lambda model, x, y: (model(x) - y) ** 2,
        clip_norm=1.0,
        nan_safe=True,
        microbatch_size=16,
        accumulator=eb.Sum(),
    )

    @eqx.filter_jit
    def step(model, state, grads):
        noise = optax.tree.random_like(KEY, grads, jr.normal)
        grads = jax.tree.map(lambda g, z: (g + 1.1 * z) / N, grads, noise)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state

    model, state = step(model, state, clipped(model, x, y))
    assert optax.tree.norm(clipped(model, x, y)) <= N


def ntk_classification():
    x, y = data()
    labels = jax.nn.one_hot((y > 0).astype(int), 2) - 0.5
    model = drawn(eqx.nn.MLP, DIM, 2, 64, 1, key=KEY)
    ntk = eb.EmpiricalNTK(model, block_size=25)
    weights = eb.kernel_solve(ntk, x, labels, ridge=0.1).weights
    predicted = ntk(x[:20], x) @ weights
    assert jnp.mean(jnp.argmax(predicted, 1) == (y[:20] > 0)) > 0.8


def rbf(x, y):
    return jnp.exp(-jnp.sum((x - y) ** 2))


def a_kernel_on_disk(folder):
    x, _ = data()
    path = str(folder / "kernel")
    kernel = eb.filter_batch_kernel(
        rbf, pairwise=True, symmetric=True, block_size=20, store=path
    )
    kernel(x)
    # In another process, most often.
    found = zarr.open_group(path, mode="r")["kernel"][:]
    expected = jax.jit(jax.vmap(jax.vmap(rbf, (None, 0)), (0, None)))(x, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def a_newton_step_and_laplace_in_the_last_layer():
    x, y = data()
    model = drawn(eqx.nn.MLP, DIM, "scalar", 8, 1, jnp.tanh, key=KEY)
    loss = lambda model, x, y: (model(x) - y) ** 2 / 2
    last = {"where": lambda model: model.layers[-1]}
    grads = eb.filter_micro_grad(loss, **last)(model, x, y)
    hessian, unravel = eb.filter_hessian(loss, in_axes=0, flat=True, **last)(
        model, x, y
    )
    flat = jax.flatten_util.ravel_pytree(grads)[0]
    step = unravel(jnp.linalg.solve(hessian + 1e-6 * jnp.eye(len(flat)), -flat))
    model = eqx.apply_updates(model, step)
    # The loss is quadratic in the last layer.
    after = eb.filter_micro_grad(loss, **last)(model, x, y)
    assert optax.tree.norm(after) < 1e-3 * optax.tree.norm(grads)
    precision = N * hessian + jnp.eye(len(flat))
    jacobian, _ = eb.filter_jacobian(
        lambda model, x: jax.vmap(model)(x), flat=True, **last
    )(model, x)
    variance = jnp.sum(jacobian.T * jnp.linalg.solve(precision, jacobian.T), 0)
    assert jnp.all(variance > 0)


def kfac_training():
    x, y = data()
    labels = (y > 0).astype(int)
    model = drawn(eqx.nn.MLP, DIM, 2, 16, 1, key=KEY)
    predict = lambda model, x, label: model(x)
    loss = lambda logits, x, label: -jax.nn.log_softmax(logits)[label]
    kfac = eb.filter_kfac(predict, loss)
    value_and_grad = eb.filter_micro_value_and_grad(
        lambda model, x, label: loss(model(x), x, label)
    )
    shapes = eqx.filter_eval_shape(kfac, model, x, labels)
    optimiser = optax.chain(eb.scale_by_kfac(shapes, damping=1e-1), optax.sgd(0.5))
    state = optimiser.init(eb.parameters(model))

    @eqx.filter_jit
    def step(model, state):
        value, grads = value_and_grad(model, x, labels)
        factors = kfac(model, x, labels)
        updates, state = optimiser.update(grads, state, factors=factors)
        return eqx.apply_updates(model, updates), state, value

    values = []
    for _ in range(10):
        model, state, value = step(model, state)
        values.append(value)
    assert values[-1] < values[0] / 5


def an_ensemble_by_data_grid():
    x, _ = data()
    make = lambda key: eqx.nn.MLP(DIM, "scalar", 8, 1, key=key)
    models = eqx.filter_jit(eqx.filter_vmap(make))(jr.split(KEY, 5))
    out = eb.filter_grid_vmap(
        lambda model, x: model(x),
        in_axes={"model": "members", "x": "examples"},
        block_size=32,
    )(models, x)
    first = jax.tree.map(lambda x: np.asarray(x)[0] if eqx.is_array(x) else x, models)
    assert out.shape == (5, N)
    expected = jax.jit(jax.vmap(first))(x)
    np.testing.assert_allclose(out[0], expected, rtol=1e-5, atol=1e-6)


def the_jacobian_of_an_ode():
    """The final state by the parameters of the field; the solver has reverse mode."""
    field = drawn(eqx.nn.MLP, 2, 2, 8, 1, jnp.tanh, key=KEY)

    def solve(field, start):
        step = lambda y, _: (y + 0.1 * field(y + 0.05 * field(y)), None)
        return jax.lax.scan(jax.checkpoint(step), start, length=10)[0]

    starts = jr.normal(jr.key(1), (5, 2))
    jacobian = eb.filter_jacobian(
        lambda field, starts: jax.vmap(lambda y: solve(field, y))(starts),
        block_size=16,
    )(field, starts)
    with_bias = lambda bias: eqx.tree_at(lambda f: f.layers[-1].bias, field, bias)
    expected = jax.jit(jax.jacrev(lambda bias: solve(with_bias(bias), starts[0])))
    got = jacobian.layers[-1].bias[0]
    np.testing.assert_allclose(got, expected(field.layers[-1].bias), rtol=1e-4)


def a_gaussian_process():
    x, y = data()
    kernel = {"pairwise": True, "symmetric": True, "block_size": 25}
    solution = eb.kernel_solve(rbf, x, y, ridge=0.01, **kernel)
    across = eb.filter_batch_kernel(rbf, pairwise=True, block_size=25)(x + 0.01, x)
    assert jnp.mean((across @ solution.weights - y) ** 2) < 0.01


class LowRank(eqx.Module):
    linear: eqx.nn.Linear
    a: jax.Array
    b: jax.Array

    def __call__(self, x):
        return self.linear(x) + self.b @ (self.a @ x)


def lora_with_scores():
    x, y = data()
    base = drawn(eqx.nn.MLP, DIM, "scalar", 16, 2, key=KEY)
    adapted = lambda linear: LowRank(
        linear, jr.normal(KEY, (2, 16)) / 4, jnp.zeros((16, 2))
    )
    model = eqx.tree_at(lambda m: m.layers[1], base, replace_fn=adapted)
    adapter = lambda model: (model.layers[1].a, model.layers[1].b)
    optimiser = optax.adam(1e-2)
    state = optimiser.init(eb.parameters(model, where=adapter))
    grads, statistics = eb.filter_micro_grad(
        lambda model, x, y: (model(x) - y) ** 2,
        where=adapter,
        microbatch_size=16,
        return_norms=True,
    )(model, x, y)
    updates, state = eqx.filter_jit(optimiser.update)(grads, state)
    model = eqx.apply_updates(model, updates)
    assert statistics.norms.shape == (N,)
    assert len(jax.tree.leaves(grads)) == 2
    assert eqx.tree_equal(model.layers[0], base.layers[0])


def a_scanned_loop_on_four_devices():
    mesh = make_mesh(AxisType.Auto)
    x, y = (jnp.tile(z, (8, *[1] * z.ndim))[:, :48] for z in data())
    x, y = jax.device_put((x, y), NamedSharding(mesh, P(None, "data")))
    model = drawn(eqx.nn.MLP, DIM, "scalar", 16, 1, key=KEY)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)
    optimiser = optax.adam(3e-2)
    value_and_grad = eb.filter_micro_value_and_grad(
        lambda model, x, y: (model(x) - y) ** 2, microbatch_size=16
    )

    @jax.jit
    def train(parameters, x, y):
        def step(carry, rows):
            parameters, state = carry
            value, grads = value_and_grad(eqx.combine(parameters, rest), *rows)
            updates, state = optimiser.update(grads, state, parameters)
            return (eqx.apply_updates(parameters, updates), state), value

        return jax.lax.scan(step, (parameters, optimiser.init(parameters)), (x, y))

    _, values = train(parameters, x, y)
    assert values[-1] < values[0]


TASKS = (
    batch_normalisation_of_many_inputs,
    accumulation_with_dropout_state_bfloat16_and_donation,
    private_sgd,
    ntk_classification,
    a_kernel_on_disk,
    a_newton_step_and_laplace_in_the_last_layer,
    kfac_training,
    an_ensemble_by_data_grid,
    the_jacobian_of_an_ode,
    a_gaussian_process,
    lora_with_scores,
    a_scanned_loop_on_four_devices,
)


@pytest.mark.parametrize(
    "task",
    on_devices(TASKS, lambda task: task is a_scanned_loop_on_four_devices),
    ids=lambda task: task.__name__,
)
def test_task(task, tmp_path):
    task(*[tmp_path] * len(inspect.signature(task).parameters))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_few_statements_are_of_this_package(task):
    tree = ast.parse(inspect.getsource(task))
    of_package = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "eb"
    ]
    assert 1 <= len(of_package) <= 8
