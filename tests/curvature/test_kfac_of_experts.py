"""Kronecker factors of the matrices of groups, against a loop over their rows."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch import filter_ggn_blocks, filter_kfac, Mean
from ..helpers import normal, thinned


pytestmark = pytest.mark.usefixtures("x64")

NUM, ROWS, GROUPS, INPUTS, OUTPUTS = 5, 4, 4, 2, 3
# Of all rows, of one group, of some rows, and of none. No row is in the last group.
SIZES = np.asarray(
    [[1, 1, 2, 0], [0, 4, 0, 0], [2, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], np.int32
)


def predict(ws, x, sizes):
    return jnp.tanh(lax.ragged_dot(x, ws, sizes))


def squares(out, x, sizes):
    return jnp.sum(out**2) / 2


def arrays():
    ws = normal(jr.key(0), (GROUPS, INPUTS, OUTPUTS), float)
    return ws, normal(jr.key(1), (NUM, ROWS, INPUTS), float)


def in_a_loop(ws, x, weights, sharing):
    """The second moments of operands and cotangents of each group, and the block."""
    size = INPUTS * OUTPUTS
    inputs = np.zeros((GROUPS, INPUTS, INPUTS))
    outputs, blocks = (
        np.zeros((GROUPS, OUTPUTS, OUTPUTS)),
        np.zeros((GROUPS, size, size)),
    )
    counts = np.zeros(GROUPS)
    for row, sizes, weight in zip(x, SIZES, weights, strict=True):
        ends = np.cumsum(sizes)
        for group, (end, num) in enumerate(zip(ends, sizes, strict=True)):
            a = row[end - num : end]
            slopes = 1 - np.tanh(a @ ws[group]) ** 2
            if sharing == "reduce" and num:
                a = np.broadcast_to(a.mean(0), a.shape)
            share = 1 / max(num, 1) if sharing == "reduce" else 1
            for one, slope in zip(a, slopes, strict=True):
                inputs[group] += weight * share * np.outer(one, one)
                counts[group] += weight * share
                outputs[group] += weight * np.diag(slope**2)
                # The Jacobian of one row; the curvature is the identity.
                jacobian = np.einsum("i,jo->jio", one, np.diag(slope))
                flat = jacobian.reshape(OUTPUTS, size)
                blocks[group] += weight * flat.T @ flat
    inputs /= np.maximum(counts, 1e-300)[:, None, None]
    return inputs, outputs / np.sum(weights), blocks / np.sum(weights)


@pytest.mark.parametrize(
    ("sharing", "weights", "size"),
    thinned(
        ("expand", "reduce"), (np.ones(NUM), np.arange(1.0, 1 + NUM)), (None, 1, 2, 5)
    ),
)
def test_factors_of_each_group(sharing, weights, size):
    ws, x = arrays()
    settings = {
        "accumulator": Mean(weights=jnp.asarray(weights)),
        "microbatch_size": size,
    }
    (block,) = filter_kfac(predict, squares, weight_sharing=sharing, **settings)(
        ws, x, SIZES
    ).blocks
    assert str(block.part) == "4 of 3 (x) 2"
    inputs, outputs, _ = in_a_loop(ws, x, weights, sharing)
    np.testing.assert_allclose(block.inputs, inputs, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(block.outputs, outputs, rtol=1e-12, atol=1e-14)
    # Nothing is known of a group that no row is in.
    assert not np.any(block.inputs[-1])
    assert not np.any(block.outputs[-1])


def test_corrected_factors_have_the_diagonal_of_the_block():
    ws, x = arrays()
    (block,) = filter_kfac(predict, squares, corrected=True)(ws, x, SIZES).blocks
    _, _, blocks = in_a_loop(ws, x, np.ones(NUM), "expand")
    for group in range(GROUPS):
        basis = np.kron(block.input_basis[group], block.output_basis[group])
        along = np.diag(basis.T @ blocks[group] @ basis).reshape(INPUTS, OUTPUTS)
        np.testing.assert_allclose(
            block.moments[group], along.T, rtol=1e-10, atol=1e-13
        )


def test_one_row_of_each_group_is_exact():
    ws, x = arrays()
    x, sizes = x[:1, :GROUPS], np.ones((1, GROUPS), np.int32)
    factors = filter_kfac(predict, squares)(ws, x, sizes)
    exact = filter_ggn_blocks(predict, squares, in_axes=0)(ws, x, sizes)
    exact = np.reshape(exact, (GROUPS, INPUTS * OUTPUTS, GROUPS, INPUTS * OUTPUTS))
    (block,) = factors.blocks
    for group in range(GROUPS):
        product = np.kron(block.inputs[group], block.outputs[group])
        np.testing.assert_allclose(
            product, exact[group, :, group], rtol=1e-10, atol=1e-13
        )


def test_a_bias_of_all_rows_is_a_block_of_its_own():
    ws, x = arrays()
    params = {"w": ws[:1], "b": np.ones(OUTPUTS)}
    call = filter_kfac(
        lambda p, x: (
            lax.ragged_dot(x, p["w"], np.asarray([2], np.int32)) + p["b"][None]
        ),
        lambda out, x: squares(out, x, None),
    )
    parts = [block.part for block in call(params, x).blocks]
    assert [str(part) for part in parts] == ["block", "3 (x) 2"]


def test_layers_of_a_loop_have_separate_factors():
    _, x = arrays()
    square = normal(jr.key(3), (2, GROUPS, INPUTS, INPUTS), float)

    def stack(ws, x, sizes):
        step = lambda x, w: (x + jnp.tanh(lax.ragged_dot(x, w, sizes)), None)
        return lax.scan(step, x, ws)[0]

    together = filter_kfac(stack, squares)(square, x, SIZES).blocks

    def apart(ws, x, sizes):
        for w in ws:
            x = x + jnp.tanh(lax.ragged_dot(x, w, sizes))
        return x

    separate = filter_kfac(apart, squares)([*square], x, SIZES).blocks
    assert str(together[0].part) == f"{2 * GROUPS} of 2 (x) 2"
    for name in ("inputs", "outputs"):
        expected = np.concatenate([getattr(block, name) for block in separate])
        np.testing.assert_allclose(getattr(together[0], name), expected, atol=1e-12)
