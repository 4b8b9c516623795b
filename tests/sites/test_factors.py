"""Contractions of random factors, without a program, compared with NumPy in float64.

A case is one equation in which a parameter meets data. The factors of its site are
random, so that the gradient is known from the equation alone.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .adapter import close_to, printed, RandomSites


pytestmark = pytest.mark.usefixtures("x64")


NUM, OTHERS, OUTPUTS, STEPS = 4, 3, 2, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """An equation `fun(w, *ins)`, and the gradient at its operand `a` for `d`.

    - `shape`: that of `w`; `ins`: the shapes of the other inputs, or values of them.
    - `num_uses`, `num_steps`: how often the equation is there, and in how many steps of
        a loop.
    """

    fun: Callable
    shape: tuple[int, ...]
    ins: tuple
    gradient: Callable
    num_uses: int = 1
    num_steps: int | None = None


def looked_up(w, tokens):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.gather(w, tokens[:, None], numbers, (1, w.shape[1]), mode=mode)


def of_rows(num):
    def gradient(tokens, d, _):
        table = np.zeros((num + 1, d.shape[-1]))  # The last row stands for none.
        np.add.at(table, tokens, d)
        return table[:num]

    return gradient


def convolved(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "VALID")


def of_kernel(x, d, _):
    total = np.zeros((3, 2, 2, 2))
    for i in range(d.shape[2]):
        for j in range(d.shape[3]):
            patch = x[0, :, i : i + 2, j : j + 2]
            total += np.multiply.outer(d[0, :, i, j], patch)
    return total


def of_experts(x, d, which):
    total = np.zeros((3, 3, 2))
    for row, (a, b) in enumerate(zip(x, d, strict=True)):
        if which[row] < 3:
            total[which[row]] += np.outer(a, b)
    return total


def dense(a, d, _):
    return np.einsum("pi,po->io", a, d)


CASES = {
    "dense": Case(jnp.matmul, (3, 2), ((1, 3),), dense),
    "positions": Case(jnp.matmul, (3, 2), ((5, 3),), dense),
    "uses": Case(jnp.matmul, (3, 2), ((5, 3),), dense, num_uses=2),
    "steps": Case(jnp.matmul, (3, 2), ((2, 3),), dense, num_steps=STEPS),
    "matrices": Case(
        lambda w, x: lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,)))),
        (4, 3, 2),
        ((4, 5, 3),),
        lambda a, d, _: np.einsum("bpi,bpo->bio", a, d),
    ),
    "product": Case(lax.mul, (4,), ((4,),), lambda a, d, _: a * d),
    "rows": Case(lax.mul, (1, 4), ((1, 4),), lambda a, d, _: a * d, num_steps=STEPS),
    "sum": Case(lax.add, (3,), ((3,),), lambda _, d, __: d),
    "embedding": Case(looked_up, (6, 3), (np.zeros(5, np.int32),), of_rows(6)),
    "convolution": Case(convolved, (3, 2, 2, 2), ((1, 2, 5, 4),), of_kernel),
    "experts": Case(
        lambda w, x, sizes: lax.ragged_dot(x, w, sizes),
        (3, 3, 2),
        ((5, 3), np.zeros(3, np.int32)),
        of_experts,
    ),
}


def random_sites(case, num, seed):
    """Random factors of the sites, and the Jacobian of each example, by output."""
    of = np.random.default_rng(seed)
    sites = RandomSites.of(
        lambda w, *ins: (
            case.fun(w, *ins) if case.fun is not jnp.matmul else case.fun(*ins, w)
        ),
        case.shape,
        case.ins,
        case.num_uses,
        case.num_steps,
    )
    drawn = sites.draw(of, num, OUTPUTS)
    jacobian = np.zeros((num, OUTPUTS, *case.shape))
    for use in drawn.uses:
        for n, o, step in np.ndindex(num, OUTPUTS, case.num_steps or 1):
            at = (step,) if case.num_steps else ()
            a, which = (
                None if x is None else np.asarray(x[n][at])
                for x in (use.operand, use.which)
            )
            jacobian[n, o] += case.gradient(a, use.cotangent[n, o][at], which)
    return drawn, jacobian


def compiled(contraction, **settings):
    """A contraction of factors that are arguments, which XLA cannot fold."""
    # With JAX 0.7.2, XLA folds a convolution of constants in float64 to wrong numbers.
    run = lambda drawn, *args: getattr(drawn, contraction)(*args, **settings)
    return jax.jit(run)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_norms(name):
    case = CASES[name]
    drawn, jacobian = random_sites(case, NUM, 0)
    other, jacobian_of_other = random_sites(case, OTHERS, 1)
    weights = np.random.default_rng(2).normal(size=(NUM, OUTPUTS))
    got = compiled("contracted")(drawn, other, weights)
    flat, flat_of_other = (
        x.reshape(*x.shape[:2], -1) for x in (jacobian, jacobian_of_other)
    )
    first, shares = jacobian[:, 0], np.abs(weights[:, 0])
    mean = np.tensordot(shares, first, 1) / shares.sum()
    expected = {
        "jacobian": jacobian,
        "sum": np.einsum("no,no...->...", weights, jacobian),
        "products": flat[:, 0] @ mean.ravel(),
        "kernel": np.einsum("nox,mpx->nomp", flat, flat_of_other),
        "squares": np.sum(flat[:, 0] ** 2, 1),
        "distances": np.einsum("n,n...->...", shares, (first - mean) ** 2),
    }
    assert {*got} == {*expected}
    for key, x in expected.items():
        close_to(got[key], x)


@pytest.mark.parametrize("name", tuple(x for x in CASES if x != "experts"))
@pytest.mark.parametrize("has_curve", (False, True))
def test_gauss_newton_blocks(name, has_curve):
    drawn, jacobian = random_sites(CASES[name], NUM, 3)
    of = np.random.default_rng(4)
    curve, weights = of.normal(size=(NUM, OUTPUTS, OUTPUTS)), of.normal(size=NUM)
    curve = curve + np.swapaxes(curve, 1, 2)
    scale = curve if has_curve else weights
    full = curve if has_curve else np.einsum("n,op->nop", weights, np.eye(OUTPUTS))
    flat = jacobian.reshape(NUM, OUTPUTS, -1)
    block = np.einsum("nox,nop,npy->xy", flat, full, flat)
    got = compiled("gauss_newton", is_diagonal=False)(drawn, scale)
    close_to(got.reshape(block.shape), block)
    got = compiled("gauss_newton", is_diagonal=True)(drawn, scale)
    close_to(got.ravel(), np.diag(block))


@pytest.mark.parametrize("name", ("dense", "positions", "uses", "steps"))
def test_kronecker_sums(name):
    case = CASES[name]
    drawn, _ = random_sites(case, NUM, 5)
    weights = np.random.default_rng(6).uniform(size=NUM)
    (got,) = compiled("kronecker")(drawn, weights)
    a = np.concatenate([x.operand.reshape(NUM, -1, 3) for x in drawn.uses], 1)
    of_d = [x.cotangent.reshape(NUM, OUTPUTS, -1, 2) for x in drawn.uses]
    d = np.concatenate(of_d, 2)
    close_to(got.inputs[0], np.einsum("n,npi,npj->ij", weights, a, a))
    close_to(got.mixed[0], np.einsum("n,npi->i", weights, a))
    close_to(got.outputs[0], np.einsum("n,nopi,nopj->ij", weights, d, d))
    close_to(got.count, weights.sum() * a.shape[1])


def test_kronecker_sums_of_tokens():
    drawn, _ = random_sites(CASES["embedding"], NUM, 7)
    weights = np.random.default_rng(8).uniform(size=NUM)
    (got,) = compiled("kronecker")(drawn, weights)
    (use,) = drawn.uses
    ones = (use.operand[..., None] == np.arange(6)).astype(float)
    close_to(got.inputs[0], np.einsum("n,npv->v", weights, ones))
    is_in = (use.operand < 6).astype(float)[:, None, :, None]
    d = use.cotangent * is_in
    close_to(got.outputs[0], np.einsum("n,nopi,nopj->ij", weights, d, d))
    close_to(got.count, weights.sum() * 5)


def test_exact_sum_of_a_leaf_without_factors():
    drawn, jacobian = random_sites(CASES["product"], NUM, 9)
    weights = np.random.default_rng(10).uniform(size=NUM)
    got = compiled("kronecker")(drawn, weights)
    close_to(got, np.einsum("n,noi,noj->ij", weights, jacobian, jacobian))


def test_programs_print_as_a_person_describes_them():
    def fun(leaves, rows):
        weight, bias = leaves
        return jnp.sum(jnp.tanh(rows[0] @ (2 * weight.T)) + bias)

    text = printed(fun, [jnp.ones((3, 2)), jnp.ones(3)], [jnp.ones((5, 2))])
    view = "leaf 0 > transpose > mul (2, 3) scaled by 2"
    rule = "dot_general: a(c0) d(r1) -> w(c0, r1)"
    site = f"<{view} in {rule}; d = cotangent 0, a = operand 0>"
    bias = "<leaf 1 (3,) in add: d(m0) -> w(m0); d = cotangent 1>"
    assert text == {
        "program": "Program with the sites\n"
        f"leaf 0 (3, 2)\n    {site}\nleaf 1 (3,)\n    {bias}",
        "plan": "<plan of 6 equations, of which 2 have 2 sites>",
        "site": site,
        "view": view,
        "rule": rule,
        "values": "[]",
        "directions": "[<a single direction>, "
        "<directions along OUTPUT 0 of side 0, OUTPUT 0 of side 1>]",
        "factors": "<factors of 5 examples: 1 operand, 2 cotangents>",
        "factor": "<factor of shape (5, 2), for each example>",
        "term": "<array of shape (5, 3) along EXAMPLE 0 of side 0, LEAF 0>",
        "axis": "EXAMPLE 0 of side 0",
        "blocks": "[<block of the leaves 0: 3 (x) 2>, <block of the leaves 1: block>]",
    }


def test_programs_of_loops_and_lookups_print_as_a_person_describes_them():
    def fun(leaves, rows):
        layers, last, table, experts, bound = leaves
        x, token = rows
        step = lambda x, w: (jnp.tanh(w @ x), None)
        x, _ = lax.scan(step, x, jnp.concatenate([layers, jnp.exp(last)[None]]))
        x = lax.ragged_dot(x[None], experts, jnp.asarray(token)[None])
        return jnp.sum(x) * table[token, 0] + jnp.sum(jnp.maximum(bound, x))

    shapes = ((2, 3, 3), (3, 3), (7, 1), (1, 3, 2), (1, 2))
    leaves = [jnp.ones(shape) for shape in shapes]
    text = printed(fun, leaves, [jnp.ones((1, 3)), jnp.zeros(1, int)])
    assert text["values"] == "[<value (3, 3): computed from 1 value>]"
    assert text["factors"] == "<factors of 1 example: 4 operands, 4 cotangents>"
    *lines, reason = text["program"].splitlines()
    product = "dot_general: a(c0) d(l0) -> w(l0, c0), sliced in"
    experts = "ragged_dot: a(l0, c0) m(l0, group) d(l0, r2) -> w(group, c0, r2)"
    assert [line.split(";")[0].strip() for line in lines[1:]] == [
        "leaf 0 (2, 3, 3)",
        f"<leaf 0 (3, 3) in {product} 2 steps of 3, from 0 on",
        "leaf 1 (3, 3)",
        f"<leaf 1 > times > broadcast_in_dim (3, 3) in {product} 1 step of 3, "
        "from 2 on",
        "leaf 2 (7, 1)",
        "<leaf 2 (7, 1) in dynamic_slice: tokens() d(one, w1) -> w(v, w1)",
        "leaf 3 (1, 3, 2)",
        f"<leaf 3 (1, 3, 2) in {experts}",
        "leaf 4 (1, 2)",
    ]
    assert reason.startswith("    no rule for `max` with a parameter in this place, at")
