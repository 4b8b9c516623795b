"""Kronecker factors of functions with derivatives of a network."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from eqxbatch import (
    explain_sites,
    filter_ggn,
    filter_kfac,
    filter_micro_grad,
    parameters,
    scale_by_kfac,
)
from ..helpers import make_mesh, put, thinned, variants
from ..programs.derivative_programs import program
from .oracle import close, matrix_of
from .pinn_models import (
    check_moments,
    factors,
    loss,
    network,
    points,
    residuals,
    WAYS,
)


NUM = 3
pytestmark = pytest.mark.usefixtures("x64")

# In reverse mode, the products with a weight have it as it is, and transposed.
FORWARD = [way for way in WAYS if way != "hessian"]


@pytest.mark.flags
@pytest.mark.versions
@pytest.mark.parametrize(("way", "sharing"), thinned(FORWARD, ("expand", "reduce")))
def test_factors(way, sharing):
    """Derivatives are further positions of each layer, and meet no bias."""
    model, of_points = network(), points(NUM)
    found = filter_kfac(residuals(way), loss, weight_sharing=sharing)(model, *of_points)
    got = [(block.inputs[0], block.outputs[0]) for block in found.blocks]
    expected = factors(way, sharing, model, *of_points)
    close(got, [tuple(map(jnp.asarray, pair)) for pair in expected])


@pytest.mark.parametrize("way", variants(WAYS, *({*WAYS} - {"vmap", "hessian"})))
def test_corrected(way):
    model, of_points = network(), points(NUM)
    fun = residuals(way)
    found = filter_kfac(fun, loss, corrected=True)(model, *of_points)
    assert [x.part.structure for x in found.blocks].count("kronecker") == 3
    check_moments(found, fun, loss, model, *of_points)


@pytest.mark.devices
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_on_a_mesh(kind):
    model, of_points = network(), points(4)
    call = filter_kfac(residuals("vmap"), loss)
    expected, mesh = call(model, *of_points), make_mesh(kind)
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(put(arrays, mesh), static)
    with jax.set_mesh(mesh):
        got = call(model, *(put(x, mesh, "data") for x in of_points))
    close(jax.tree.leaves(got), jax.tree.leaves(expected))


def test_operator():
    model, of_points = network(), points(NUM)
    found = filter_kfac(residuals("vmap"), loss)(model, *of_points)
    matrices = [np.kron(x.outputs[0], x.inputs[0]) for x in found.blocks]
    operator = found.operator(damping=0.1)
    ones = jax.tree.map(jnp.ones_like, parameters(model))
    product, solved = operator.mv(ones), operator.inverse().mv(ones)
    for layer, (dense, block) in enumerate(zip(matrices, found.blocks, strict=True)):
        damped = dense + 0.1 * np.eye(len(dense))
        of_layer = lambda tree, layer=layer: [
            tree.layers[layer].weight,
            tree.layers[layer].bias,
        ]
        vector = np.ones(len(dense))
        for got, expected in (
            (product, damped @ vector),
            (solved, np.linalg.solve(damped, vector)),
        ):
            flat = np.ravel(block.part.layout.matrices(of_layer(got)))
            np.testing.assert_allclose(flat, expected, rtol=1e-9)


def test_a_single_position_is_exact():
    """Where each layer meets one vector, the product of the factors is the block."""

    def slope(model, x, e):
        # Of both layers, the first one meets a constant.
        return jax.jvp(lambda x: model[1] @ (model[0] @ x), (x,), (CONSTANT,))[1] * x[0]

    def square(out, x, e):
        return jnp.sum(out**2) / 2

    CONSTANT = jnp.asarray([1.0, -2.0])
    inside, edge, _ = points(NUM)
    model = [network().layers[0].weight, network().layers[1].weight]
    found = filter_kfac(slope, square)(model, inside, edge)
    assert [str(x.part) for x in found.blocks] == ["3 (x) 2", "3 (x) 3"]
    dense = matrix_of(filter_ggn(slope, square)(model, inside, edge))
    first = model[0].size
    # The output is a product with each weight, and the curvature is the identity.
    assert found.blocks[0].part.leaves == (0,)
    block = np.kron(found.blocks[1].outputs[0], found.blocks[1].inputs[0])
    np.testing.assert_allclose(block, dense[first:, first:], atol=1e-12)
    block = np.kron(found.blocks[0].outputs[0], found.blocks[0].inputs[0])
    np.testing.assert_allclose(block, dense[:first, :first], atol=1e-12)


OTHERS = {
    # The square is not linear in the weight.
    "squared": lambda w, b, x: jnp.sum(w**2, 1) * jnp.tanh(w @ x + b),
    "column": lambda w, b, x: w[:, 0] ** 2 * jnp.tanh(w @ x + b),
    "penalty": lambda w, b, x: jnp.tanh(w @ x + b) + jnp.sum(w**2),
    # Weights that are composed of others, and none of a layer.
    "composed": lambda w, b, x: (w @ EYE) @ x + b,
    "resized": lambda w, b, x: (w @ EYE)[:, 0] * x[0] + (w @ EYE)[:, 1] + b,
}
EYE = np.asarray([[0.0, 2.0], [1.0, 1.0]])


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_position(name):
    model, inside = network().layers[0], points(NUM)[0]
    fun = lambda model, x: OTHERS[name](model.weight, model.bias, x)
    square = lambda out, x: jnp.sum(out**2) / 2
    found = filter_kfac(fun, square)(model, inside)
    assert [x.part.structure for x in found.blocks] == ["block", "block"]
    check_moments(found, fun, square, model, inside)


def second_use(case):
    """A layer with a bias, and another use of its weight or of its bias."""

    def fun(model, x):
        w, b = model.weight, model.bias
        first = jnp.tanh(w @ x + b)
        return first + jnp.cos(
            {
                "without": lambda: w @ x[::-1],
                "constant": lambda: w @ EYE[0],
                "frozen": lambda: jax.lax.stop_gradient(w) @ x[::-1] + b,
                "alone": lambda: b,
                "twice": lambda: w @ x[::-1] + 2 * b,
                "transposed": lambda: w @ (w.T @ first),
            }[case]()
        )

    return fun


@pytest.mark.parametrize(
    ("case", "blocks"),
    (
        ("without", ["3 (x) 3"]),
        ("constant", ["3 (x) 3"]),
        ("frozen", ["3 (x) 2", "block"]),
        ("alone", ["3 (x) 2", "block"]),
        ("twice", ["3 (x) 2", "block"]),
        ("transposed", ["3 (x) 2", "block"]),
    ),
)
def test_biases(case, blocks):
    """A bias belongs to a weight if it is added to nothing else."""
    model, inside = network().layers[0], points(NUM)[0]
    fun, square = second_use(case), lambda out, x: jnp.sum(out**2) / 2
    found = filter_kfac(fun, square, corrected=True)(model, inside)
    assert [str(x.part) for x in found.blocks] == blocks
    check_moments(found, fun, square, model, inside)


def test_report():
    model = network()
    report = explain_sites(residuals("jet"), model, *points(NUM))
    assert [x.kfac for x in report.leaves] == [
        *("3 (x) 3", "with .layers[0].weight"),
        *("3 (x) 4", "with .layers[1].weight"),
        *("1 (x) 4", "with .layers[2].weight"),
    ]


def test_training():
    """Steps of K-FAC on a differential equation, compiled as one loop."""
    model, (inside, edge, _) = network(), points(12)
    fun = residuals("vmap")
    # Those of another network.
    of_example = lambda *x: fun(network(5), *x, None)
    targets = jax.vmap(of_example)(inside, edge)
    square = lambda out, inside, edge, y: jnp.sum((out - y) ** 2) / 2
    total = lambda model, *args: square(fun(model, *args), *args)
    kfac, batch = filter_kfac(fun, square), (inside, edge, targets)
    shapes = eqx.filter_eval_shape(kfac, model, *batch)
    settings = {"damping": 1e-3, "decay": 0.9, "norm_constraint": 0.01}
    optimiser = optax.chain(
        scale_by_kfac(shapes, **settings), optax.scale_by_learning_rate(0.5)
    )
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(carry, _):
        arrays, state = carry
        model = eqx.combine(arrays, static)
        gradient = filter_micro_grad(total)(model, *batch)
        updates, state = optimiser.update(gradient, state, factors=kfac(model, *batch))
        loss = jnp.mean(jax.vmap(total, (None, 0, 0, 0))(model, *batch))
        return (eqx.apply_updates(arrays, updates), state), loss

    run = eqx.filter_jit(lambda carry: jax.lax.scan(step, carry, None, 40)[1])
    losses = run((arrays, optimiser.init(arrays)))
    assert losses[-1] < 0.15 * losses[0]


@jax.custom_vjp
def normalised(x):
    return x


normalised.defvjp(lambda x: (x, None), lambda _, d: (d / (1 + jnp.abs(d)),))


def test_repeats_with_a_nonlinear_backward_pass():
    """The cotangents of two equal calls are normalised before they are added."""
    layer = jax.jit(lambda model, x: normalised(model[0] @ x + model[1]))

    def fun(model, x):
        return jnp.sum(layer(model, x) ** 2) + jnp.sum(jnp.sin(layer(model, x)))

    convex = lambda out, x: out**2 / 2
    model, x = [jnp.eye(3, 2), jnp.ones(3)], points(NUM)[0]
    found = filter_kfac(fun, convex, is_block=eqx.is_array)(model, x)
    exact, _ = filter_ggn(fun, convex, flat=True)(model, x)
    close(found.blocks[1].matrix, exact[6:, 6:])


def test_weights_multiplied_with_each_other():
    fun = lambda model, x: (model[0] @ model[1]) @ x
    model = [jnp.ones((1, 3)), jnp.ones((3, 2))]
    with pytest.raises(ValueError, match="multiplied with each other"):
        filter_kfac(fun, lambda out, x: jnp.sum(out**2))(model, points(NUM)[0])


SEEDS = (3, 11, 17)


@pytest.mark.parametrize(
    "seed",
    (*SEEDS, *(pytest.param(x, marks=pytest.mark.matrix) for x in range(100, 140))),
)
def test_random_programs(seed):
    fun, model, examples, _ = program(seed)
    convex = lambda out, x, z: jax.nn.logsumexp(out) + jnp.sum(out**2) / 3
    settings = {"corrected": True}
    try:
        found = filter_kfac(fun, convex, **settings)(model, *examples)
    except ValueError as error:
        if "multiplied with each other" not in str(error):
            raise
        settings["is_block"] = eqx.is_array
        found = filter_kfac(fun, convex, **settings)(model, *examples)
    check_moments(found, fun, convex, model, *examples)
