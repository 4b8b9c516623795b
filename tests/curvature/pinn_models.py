"""Networks of which a function has the Laplacian, and their Kronecker factors by hand.

Each layer meets a value, its derivatives along directions, and second derivatives. All
are positions of its weight; only the value meets the bias.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.experimental import jet

from eqxbatch import filter_ggn
from ..helpers import drawn, normal
from .oracle import matrix_of


DIM, WIDTH = 2, 3


def network(seed=0, **settings):
    settings = {"depth": 2, "activation": jnp.tanh, **settings}
    key = jr.key(seed)
    return drawn(eqx.nn.MLP, DIM, "scalar", WIDTH, **settings, key=key)


def points(num, seed=1):
    """For each example, a point inside and one on the boundary, and two targets."""
    shapes = (num, DIM), (num, DIM), (num, 2)
    return tuple(normal(jr.key(seed + i), x, float) for i, x in enumerate(shapes))


def second(u, x, e):
    """The second derivative along a direction."""
    first = lambda x: jax.jvp(u, (x,), (e,))[1]
    return jax.jvp(first, (x,), (e,))[1]


def by_vmap(u, x):
    return jnp.sum(jax.vmap(functools.partial(second, u, x))(jnp.eye(DIM)))


def by_python(u, x):
    return sum(second(u, x, jnp.eye(DIM)[i]) for i in range(DIM))


def by_map(u, x):
    return jnp.sum(jax.lax.map(functools.partial(second, u, x), jnp.eye(DIM)))


def by_scan(u, x):
    add = lambda total, e: (total + second(u, x, e), None)
    return jax.lax.scan(add, jnp.zeros(()), jnp.eye(DIM))[0]


def by_fori_loop(u, x):
    add = lambda i, total: total + second(u, x, jnp.eye(DIM)[i])
    return jax.lax.fori_loop(0, DIM, add, jnp.zeros(()))


def by_hessian(u, x):
    return jnp.trace(jax.hessian(u)(x))


def by_jet(u, x):
    def along(e):
        return jet.jet(u, (x,), ((e, jnp.zeros(DIM)),))[1][1]

    return jnp.sum(jax.vmap(along)(jnp.eye(DIM)))


def by_folx(u, x):
    import folx

    # It relies on promotion.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return folx.forward_laplacian(u)(x).laplacian


WAYS = {
    x.__name__.removeprefix("by_"): x
    for x in (
        *(by_vmap, by_python, by_map, by_scan, by_fori_loop),
        *(by_hessian, by_jet, by_folx),
    )
}


@functools.cache
def residuals(way):
    """The Laplacian inside, and the value on the boundary."""

    def fun(model, inside, edge, y):
        return jnp.stack([WAYS[way](model, inside), model(edge)])

    return fun


def loss(out, inside, edge, y):
    """Convex, and with a Hessian that depends on the output."""
    return jax.nn.logsumexp(out) + jnp.sum((out - y) ** 2) / 3


class Position(NamedTuple):
    """What a layer meets at some positions: operands, and that of its bias."""

    operands: object
    bias: int


def by_hand(way, model, inside, edge, taps):
    """The residuals, with `taps` added to the layers' outputs at all positions.

    Also the positions of each layer: of the value inside, its derivatives, and the
    value on the boundary.
    """
    # Steps of a loop compute the value again; folx adds up second derivatives at once.
    num = DIM if way in ("map", "scan", "fori_loop") else 1
    total = way == "folx"
    # `jet` computes with coefficients of a Taylor series.
    scale = 0.5 if way == "jet" else 1.0
    value, edge = jnp.repeat(inside[None], num, 0), edge[None]
    first, second = jnp.eye(DIM), jnp.zeros((1 if total else DIM, DIM))
    positions = []
    *hidden, last = model.layers
    for i, (layer, tap) in enumerate(zip(hidden, taps, strict=False)):
        # A second derivative of zero is an operand where a program computes with it.
        is_met = i or way in ("jet", "folx")
        met = [(value, 1), (first, 0), (edge, 1)]
        met += [(scale * (second if i else second[:1]), 0)] if is_met else []
        positions.append([Position(*x) for x in met])
        run = lambda x, b, layer=layer: x @ layer.weight.T + b * layer.bias[None]
        at = [run(*x) + t for x, t in zip(met, tap, strict=False)]
        value, first, edge = at[:3]
        second = at[3] / scale if is_met else jnp.zeros((DIM, WIDTH))
        second = jnp.broadcast_to(second, (1 if total else DIM, WIDTH))
        # tanh' = 1 - tanh^2, and tanh'' = -2 tanh tanh'.
        of_value = jnp.tanh(value)
        slope = 1 - of_value**2
        curved = -2 * of_value * slope * first**2
        curved = jnp.sum(curved, 0, keepdims=True) if total else curved
        second = curved + slope * second
        value, first, edge = of_value, slope * first, jnp.tanh(edge)
    positions.append([Position(scale * second, 0), Position(edge, 1)])
    laplacian = jnp.sum(scale * second @ last.weight.T + taps[-1][0]) / scale
    value = edge @ last.weight.T + last.bias[None] + taps[-1][1]
    return jnp.stack([laplacian, value[0, 0]]), positions


def factors(way, sharing, model, inside, edge, y):
    """Inputs and outputs of each layer, by a loop over examples."""
    sizes = eqx.filter_eval_shape(_sizes, way, model, inside[0], edge[0])
    taps = [[np.zeros(x.shape) for x in layer] for layer in sizes]

    @jax.jit
    def of_example(inside, edge, y):
        run = functools.partial(by_hand, way, model, inside, edge)
        out, positions = run(taps)
        jacobians = jax.jacrev(lambda taps: run(taps)[0])(taps)
        return positions, jacobians, jax.hessian(lambda x: loss(x, 0, 0, y))(out)

    totals = [(0.0, 0.0)] * len(taps)
    for example in zip(inside, edge, y, strict=True):
        positions, jacobians, curve = jax.device_get(of_example(*example))
        for i, (met, of_taps) in enumerate(zip(positions, jacobians, strict=True)):
            a = [np.pad(x, ((0, 0), (0, 1)), constant_values=b) for x, b in met]
            a, d = np.concatenate(a), np.concatenate(of_taps, 1)
            if sharing == "reduce":
                a, d = a.mean(0, keepdims=True), d.sum(1, keepdims=True)
            inputs, outputs = totals[i]
            inputs = inputs + a.T @ a / len(a) / len(y)
            outputs = outputs + np.einsum("vpi,vw,wpj->ij", d, curve, d) / len(y)
            totals[i] = inputs, outputs
    return totals


def _sizes(way, model, inside, edge):
    """Arrays of the shapes of all taps."""
    outs = [[0.0] * 4 for _ in model.layers]
    widths = [len(layer.weight) for layer in model.layers]
    _, positions = by_hand(way, model, inside, edge, outs)
    return [
        [jnp.zeros((len(x), width)) for x, _ in met]
        for width, met in zip(widths, positions, strict=True)
    ]


def check_moments(found, fun, loss, model, *args):
    """Compares blocks with the dense Gauss-Newton matrix, as its best approximations.

    A Kronecker block with corrected eigenvalues has the second moments of the gradient
    along its eigenvectors; any other block is exact.
    """
    matrix = matrix_of(filter_ggn(fun, loss)(model, *args))
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    starts = np.cumsum([0, *(x.size for x in leaves)])
    for block in found.blocks:
        part = block.part
        at = [np.arange(starts[i], starts[i + 1]) for i in part.leaves]
        exact = matrix[np.ix_(np.concatenate(at), np.concatenate(at))]
        scale = max(np.abs(exact).max(initial=0), 1e-6)
        if part.structure == "kronecker":
            got = np.asarray(block.moments).ravel()
            rows = _eigenvectors(block)
            expected = np.einsum("ki,ij,kj->k", rows, exact, rows)
        else:
            got, expected = np.asarray(block.inputs[0]), exact
            expected = np.diagonal(exact) if got.ndim == 1 else exact
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9 * scale)


def _eigenvectors(block):
    """A row for each eigenvector of a block, in the entries of its leaves."""
    outputs, inputs = np.asarray(block.output_basis), block.input_basis
    if inputs is None:
        inputs = np.broadcast_to(np.eye(block.inputs.shape[-1]), block.inputs.shape)
    num, size, _ = outputs.shape
    columns = inputs.shape[-1]
    rows = []
    for b in range(num):
        for o in range(size):
            for i in range(columns):
                matrix = np.zeros((num, size, columns))
                matrix[b] = np.outer(outputs[b, :, o], np.asarray(inputs)[b, :, i])
                leaves = block.part.layout.leaves(jnp.asarray(matrix))
                rows.append(np.concatenate([np.ravel(x) for x in leaves]))
    return np.stack(rows)
