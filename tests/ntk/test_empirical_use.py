"""Empirical kernels in use: blocks, memory, keys, transforms, errors."""

import functools
import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from eqxbatch import (
    EmpiricalKernel,
    EmpiricalNTK,
    HostStore,
    MemoryBudget,
    ProbedNTK,
    TopK,
)
from eqxbatch._ntk import estimator
from ..helpers import (
    assert_same,
    Bent,
    bent,
    BLOCK,
    CountTraces,
    drawn,
    normal,
    thinned,
    variants,
)
from .models import (
    cast,
    Counted,
    Dict,
    float64,
    jacobians,
    Matrices,
    outputs,
    pairs,
    truth,
)


@float64
@pytest.mark.parametrize(
    ("total", "method"),
    (
        (5, "auto"),
        *(pytest.param(x, "auto", marks=pytest.mark.matrix) for x in (0, 1, 13)),
        pytest.param(5, "ntk_vector_products", marks=pytest.mark.matrix),
    ),
)
def test_any_size_and_exact_symmetry(total, method, getkey):
    model = drawn(Matrices, key=getkey())
    x = normal(getkey(), (13 + BLOCK - 1, 4), float)
    jac, x = np.asarray(jacobians(model, x)), np.asarray(x)
    # The same with two sides, one of them a single block.
    other, jac_other = jnp.asarray(x[-BLOCK + 1 :]), jac[-BLOCK + 1 :]
    x, jac = jnp.asarray(x[:total]), jac[:total]
    ntk = lambda size, axes=(): EmpiricalNTK(
        model, trace_axes=axes, block_size=size, method=method
    )
    kernel = ntk(BLOCK)(x)
    assert_same(kernel, pairs(jac, jac))
    kernel = np.asarray(kernel)
    assert (kernel == np.transpose(kernel, (1, 0, 3, 2, 5, 4))).all()
    if total != 1:
        unblocked = np.asarray(ntk(None, (1, 2))(x))
        assert (unblocked == unblocked.T).all()
    assert_same(ntk((3, BLOCK), (-1,))(x, other), pairs(jac, jac_other, (-1,)))
    # By default, one order of the sides.
    if total not in (1, 5):
        kernel = ntk((BLOCK, 1), (-1,))(other, x)
        assert_same(kernel, pairs(jac_other, jac, (-1,)))


@pytest.fixture
def keep_at_most(monkeypatch):
    """Kernels may keep only so much of their examples."""
    patch = functools.partial(monkeypatch.setattr, estimator, "room_of")
    return lambda num_bytes: patch(lambda _: num_bytes)


@pytest.mark.parametrize(
    # One panel, which is the usual case: `tests/ntk/test_estimators_in_blocks.py`.
    ("num_panels", "total"),
    variants(((1, 13), (2, 13), (3, 16)), (1, 13), (2, 13)),
)
def test_each_example_runs_once_a_panel(num_panels, total, getkey, keep_at_most):
    counted = Counted()
    mlp = drawn(eqx.nn.MLP, 4, 3, 8, 2, key=getkey())
    model = lambda mlp, x: mlp(counted.fun(x))
    partial = eqx.Partial(model, mlp)
    x1, x2 = normal(getkey(), (total, 4), float), normal(getkey(), (9, 4), float)
    ntk = EmpiricalNTK(partial, block_size=2)
    blocks = -(-total // 2)
    rows = total if num_panels == 1 else 2 * -(-blocks // num_panels)
    if num_panels > 1:
        # What is kept of an example: 4 inputs, 16 activations, cotangents of 3 outputs.
        keep_at_most(rows * 4 * (4 + 16 + 3 * 16))
    jac1, jac2 = [np.asarray(jacobians(mlp, x)) for x in (x1, x2)]
    result = jax.block_until_ready(ntk(x1, x2))
    # Columns are taken in 5 blocks of 2.
    assert counted.num == num_panels * (rows + 10)
    assert_same(result, pairs(jac1, jac2, (-1,)))
    counted.num = 0
    result = jax.block_until_ready(ntk(x1))
    # Of an odd number of panels, each meets half of the others.
    odd = num_panels + (num_panels % 2 == 0)
    rows = total if odd == 1 else 2 * -(-blocks // odd)
    assert counted.num == odd * rows * (odd + 1) // 2
    assert_same(result, pairs(jac1, jac1, (-1,)))
    assert (np.asarray(result) == np.asarray(result).T).all()


@pytest.mark.cpu
def test_memory_is_flat(getkey, keep_at_most):
    model = drawn(eqx.nn.MLP, 16, 10, 256, 1, key=getkey())

    def temporaries(total, block_size, room):
        keep_at_most(room)
        ntk = EmpiricalNTK(model, block_size=block_size)
        struct = jax.ShapeDtypeStruct((total, 16), jnp.float32)
        arrays, static = eqx.partition(ntk, eqx.is_array)
        run = lambda arrays, x1, x2: eqx.combine(arrays, static)(x1, x2)
        stats = jax.jit(run).lower(arrays, struct, struct).compile().memory_analysis()
        return stats.temp_size_in_bytes

    # Besides the kernel itself, nothing grows if there is no room to keep it, but for
    # the numbers of blocks.
    small, large = [temporaries(n, 16, 0) for n in (256, 1024)]
    assert large - small <= 4 * (1024 - 256) // 16
    assert large < 0.1 * temporaries(1024, None, None)


@pytest.mark.cpu
def test_memory_budget(getkey):
    model = drawn(eqx.nn.MLP, 16, 10, 256, 1, key=getkey())
    x = normal(getkey(), (150, 16), float)
    budget = MemoryBudget("3MB")
    ntk = EmpiricalNTK(model, block_size=budget)
    arrays, static = eqx.partition(ntk, eqx.is_array)
    run = jax.jit(lambda arrays, x: eqx.combine(arrays, static)(x))
    run = run.lower(arrays, x).compile()
    stats = run.memory_analysis()
    assert stats.temp_size_in_bytes + stats.output_size_in_bytes <= 3_000_000
    assert_same(run(arrays, x), EmpiricalNTK(model)(x))


class Noisy(eqx.Module):
    """A linear layer with dropout."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(4, 3, use_bias=False, key=key)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, scale=1.0, *, key=None):
        return scale * self.linear(self.dropout(x, key=key))


def test_keys(getkey):
    make = jr.key
    model = drawn(Noisy, key=getkey())
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (4, 4), float)
    ntk = EmpiricalNTK(model)
    drop = jax.jit(jax.vmap(lambda k, x: model.dropout(x, key=k)))
    dropped = lambda key, x: np.asarray(drop(key, x))
    product = lambda a, b: jnp.asarray(a @ b.T)
    key = make(3)
    sides = jr.split(key)
    one, two = [jr.split(k, n) for k, n in zip(sides, (5, 4), strict=True)]
    left, right = dropped(one, x1), dropped(two, x2)
    assert_same(ntk(x1, x2, key=key), product(left, right))
    for kernel in (ntk(x1, key=key), ntk(x1, x1, key=key)):
        assert_same(kernel, product(left, left))
        assert (np.asarray(kernel) == np.asarray(kernel).T).all()
    # Keys do not depend on the blocks: `tests/ntk/test_estimators_in_blocks.py`.
    # A pair is taken as it is, and so is a key for each example.
    first = sides[0]
    other = dropped(jr.split(make(4), 5), x1)
    for pair in ((first, make(4)), (one, make(4))):
        assert_same(ntk(x1, key=pair), product(left, other))
    # Compiled functions do not see that both are one object.
    assert_same(ntk(x1, key=(first, first)), product(left, left))
    # Keys that are arrays of integers do as well.
    raw = jr.PRNGKey(3)
    assert_same(ntk(x1, key=raw), product(left, left))
    # Both sides have the same keys where only a keyword argument differs.
    scales = jnp.ones(5), 2 * jnp.ones(5)
    expected = 2 * ntk(x1, key=key)
    assert_same(ntk(x1, scale=scales, key=key), expected)
    with pytest.raises(ValueError, match="`key` must be one key, or a pair"):
        ntk(x1, x2, key=jr.split(key, 3))


def test_keyword_arguments(getkey):
    model = eqx.nn.inference_mode(drawn(Noisy, key=getkey()))
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (4, 4), float)
    x1, x2, s1, s2 = map(np.asarray, (x1, x2, np.arange(1.0, 6.0), np.arange(4.0)))
    s1, s2 = (s.astype(np.float32) for s in (s1, s2))
    ntk = EmpiricalNTK(model)
    expected = (s1[:, None] * x1) @ (s2[:, None] * x2).T
    put = jax.device_put
    assert_same(ntk(x1, x2, scale=put((s1, s2))), expected)
    assert_same(ntk(x1, x2, scale=put(np.float32(3))), 9 * x1 @ x2.T)
    assert_same(ntk(x1, x2, scale=3.0), 9 * x1 @ x2.T)
    both = (s1[:, None] * x1) @ (s1[:, None] * x1).T
    assert_same(ntk(x1, scale=put((s1, None))), both)
    assert_same(ntk(x1, scale=put((s1, 2 * s1))), 2 * both)
    last = EmpiricalNTK(model, in_axes=-1, kwargs_axes={"scale": 1})
    assert_same(last(x1.T, x2.T, scale=put((s1[None], s2[None]))), expected)


def test_arrays_without_examples_differ_between_the_sides(getkey):
    class Scaled(eqx.Module):
        weights: jax.Array

        def __call__(self, inputs):
            x, scale = inputs
            return scale * (x @ self.weights)

    ntk = EmpiricalNTK(Scaled(normal(getkey(), (3,))), in_axes=(0, None))
    x1, x2 = (np.asarray(normal(getkey(), (n, 3))) for n in (5, 4))
    got = ntk((x1, jnp.asarray(2.0)), (x2, jnp.asarray(5.0)))
    assert_same(got, 10 * x1 @ x2.T, 1e-5)
    assert_same(ntk((x1, jnp.asarray(2.0))), 4 * x1 @ x1.T, 1e-5)


class Both(NamedTuple):
    scale: jax.Array
    power: int


def test_keyword_arguments_that_are_no_arrays(getkey):
    class Power(eqx.Module):
        weights: jax.Array

        def __call__(self, x, power):
            scale, power = power
            return jnp.dot(self.weights, scale * x**power)[None]

    model = Power(normal(getkey(), (4,), float))
    x1, x2 = (np.asarray(normal(getkey(), (n, 4))) for n in (5, 3))
    ntk = EmpiricalNTK(model)
    ones = jax.device_put([np.ones(n, np.float32) for n in (5, 3)])
    pair = ((ones[0], 2), (ones[1], 3))
    assert_same(ntk(x1, x2, power=pair), x1**2 @ (x2**3).T)
    assert_same(ntk(x1, power=((ones[0], 1), (ones[0], 2))), x1 @ (x1**2).T)
    # What has no arrays has no values of examples, and neither has a named tuple.
    stored = EmpiricalNTK(model, store=HostStore(), block_size=2)
    for shared in ((1, 2), Both(jnp.array(1.0), 2)):
        for kernel in (ntk, stored):
            assert_same(jnp.asarray(kernel(x1, x2, power=shared)), x1**2 @ (x2**2).T)


@float64
def test_axes_of_examples(getkey):
    model = drawn(Matrices, key=getkey())
    x1, x2 = normal(getkey(), (3, 4), float), normal(getkey(), (2, 4), float)
    jac1, jac2 = (np.asarray(jacobians(model, x)) for x in (x1, x2))
    expected = np.asarray(pairs(jac1, jac2))
    t1, t2 = (jnp.asarray(np.asarray(x).T) for x in (x1, x2))
    # The examples in the middle of the outputs: (2, n, 3).
    ntk = EmpiricalNTK(model, trace_axes=(), in_axes=1, out_axes=1, block_size=2)
    assert_same(ntk(t1, t2), np.transpose(expected, (2, 3, 0, 1, 4, 5)))
    ntk = EmpiricalNTK(
        model, trace_axes=(0,), diagonal_axes=(-1,), in_axes=1, out_axes=1
    )
    assert_same(ntk(t1, t2), np.einsum("nmaabb->nmb", expected) / 2)
    # A whole batch at once, first where examples do not interact.
    diagonal = EmpiricalNTK(
        eqx.filter_vmap(model), in_axes=None, trace_axes=(), diagonal_axes=(0,)
    )
    assert_same(diagonal(x1), pairs(jac1, jac1, (), (0,)))

    class Interacting(eqx.Module):
        mlp: Matrices

        def __call__(self, x):
            y = jax.vmap(self.mlp)(x)
            return y - y.mean(axis=0, keepdims=True)

    interacting = Interacting(model)
    kernel = EmpiricalNTK(interacting, in_axes=None, trace_axes=())(x1, x2)
    jac1, jac2 = [jac - jac.mean(axis=0, keepdims=True) for jac in (jac1, jac2)]
    assert_same(kernel, pairs(jac1, jac2))


@float64
def test_matvec_and_operator(getkey):
    model = cast(drawn(Dict, key=getkey()))
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (3, 4), float)
    vector = outputs(model, x2)
    jac = jax.device_get(jacobians(model, np.concatenate([x1, x2])))
    jac1, jac2 = (
        jax.tree.map(lambda y: y[:5], jac),
        jax.tree.map(lambda y: y[5:], jac),
    )
    # Different outputs have something in common.
    pulled = sum(
        np.tensordot(np.asarray(v), jac, v.ndim)
        for v, jac in zip(*map(jax.tree.leaves, (vector, jac2)), strict=True)
    )
    expected = jax.tree.map(lambda jac: jnp.asarray(jac @ pulled), jac1)
    for size in (None, (2, 2)):
        ntk = EmpiricalNTK(model, block_size=size)
        assert_same(ntk.untraced_matvec(x1, x2, vector), expected)
    with pytest.raises(ValueError, match="The shape and dtype of `v` must be"):
        ntk.untraced_matvec(x1, None, vector)
    with pytest.raises(ValueError, match="The structure of `v` must be"):
        ntk.untraced_matvec(x1, x2, vector["sum"])

    lineax = pytest.importorskip("lineax")
    model = drawn(Matrices, key=getkey())
    ntk = EmpiricalNTK(model, block_size=2)
    operator = ntk.untraced_operator(x1)
    assert lineax.is_positive_semidefinite(operator)
    full = np.transpose(truth(model, x1, x1), (0, 2, 4, 1, 3, 5)).reshape(30, 30)
    assert_same(operator.as_matrix(), jnp.asarray(full))
    operator = ntk.untraced_operator(x1, x2)
    assert operator.in_structure().shape == (3, 2, 3)
    assert operator.out_structure().shape == (5, 2, 3)
    # The sides differ without `x2`, too.
    model = eqx.Partial(lambda model, x, s: s * model(x), model)
    s1, s2 = normal(getkey(), (5,), float), normal(getkey(), (5,), float)
    ntk = EmpiricalNTK(model, block_size=2)
    for pair in ((s1, None), (s1, s1)):
        assert lineax.is_positive_semidefinite(ntk.untraced_operator(x1, s=pair))
    assert not lineax.is_positive_semidefinite(ntk.untraced_operator(x1, s=(s1, s2)))
    operator = ntk.untraced_operator(x1, x2, s=(s1, s2[:3]))
    assert operator.in_structure().shape == (3, 2, 3)
    with pytest.raises(ValueError, match=r"`s` must be a pair of arrays .*got None"):
        ntk(x1, x2, s=(s1[:3], None))


def test_operator_needs_lineax(monkeypatch, getkey):
    monkeypatch.setitem(sys.modules, "lineax", None)
    ntk = EmpiricalNTK(drawn(Matrices, dtype=jnp.float32, key=getkey()))
    with pytest.raises(ImportError, match=r"equinox-batch\[linalg\]"):
        ntk.untraced_operator(jnp.ones((2, 4)))


@float64
@pytest.mark.parametrize("sides", variants((1, 2), 2))
def test_derivatives(sides, getkey):
    """Kernel alignment, and its gradient."""
    model = cast(bent(4, 3, getkey()))
    x = normal(getkey(), (5, 4), float)
    target = np.sign(normal(getkey(), (5, 5), float))

    def alignment(kernel):
        return jnp.sum(kernel * target) / jnp.linalg.norm(kernel)

    def dense(pair):
        model, x = pair
        return alignment(truth(model, x, x, (-1,)))

    grad = lambda fun: eqx.filter_jit(eqx.filter_grad(fun))
    expected = jax.tree.leaves(grad(dense)((model, x)))
    settings = {"block_size": 2} if sides == 1 else {"method": 2}
    others = lambda x: (x + 0.0,) * (sides - 1)
    of_pair = lambda pair: alignment(pair[0](pair[1], *others(pair[1])))
    ntk = EmpiricalNTK(model, **settings)
    assert_same(jax.tree.leaves(grad(of_pair)((ntk, x))), expected)


def test_as_a_pytree(getkey, tmp_path):
    make = lambda key: EmpiricalNTK(Bent(4, 3, key=key), block_size=2)
    x = normal(getkey(), (5, 4), float)
    ensemble = eqx.filter_jit(eqx.filter_vmap(make))(jr.split(getkey(), 3))
    number = lambda leaf, i: jnp.asarray(np.asarray(leaf)[i])
    arrays, static = eqx.partition(ensemble, eqx.is_array)
    ntks = [
        eqx.combine(jax.tree.map(lambda leaf: number(leaf, i), arrays), static)
        for i in range(3)
    ]
    assert [x.shape for x in jax.tree.leaves(eqx.filter(ntks[0], eqx.is_array))] == [
        x.shape for x in jax.tree.leaves(eqx.filter(ntks[0].model, eqx.is_array))
    ]
    got = eqx.filter_vmap(lambda ntk: ntk(x))(ensemble)
    assert_same(got, np.stack([ntk(x) for ntk in ntks]), 1e-5)
    assert_same(eqx.filter_jit(ntks[0])(x), ntks[0](x))
    path = tmp_path / "ntk.eqx"
    eqx.tree_serialise_leaves(path, ntks[0])
    loaded = eqx.tree_deserialise_leaves(path, ntks[1])
    assert_same(loaded(x), ntks[0](x))


def test_an_equal_call_traces_nothing(getkey):
    mlp = bent(4, 3, getkey())
    call = CountTraces(lambda mlp, x: mlp(x))
    for block_size in (None, 2):
        kernel = EmpiricalKernel(eqx.Partial(call, mlp), block_size=block_size)
        x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (4, 4), float)
        kernel(x1, x2)
        kernel(x1)
        others = [2 * x1, 3 * x1]
        changed = eqx.tree_at(
            lambda k: k.model.args[0].layers[0].bias, kernel, jnp.ones(3)
        )
        with jax.no_tracing():
            kernel(others[0], x2)
            kernel(others[1])
            changed(x1, x2)
    # Alike examples share one trace in all programs.
    assert call.num == 1


class Scalar(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return self.linear(x)[0]


ERRORS = [
    ({"trace_axes": (3,)}, ValueError, r"`trace_axes` has the axis 3, which is out of"),
    ({"trace_axes": (1, -2)}, ValueError, r"`trace_axes` has axis 1 of output twice"),
    ({"trace_axes": (-3,)}, ValueError, r"the batch axis .* or `trace_axes=0` for"),
    ({"diagonal_axes": (-1,)}, ValueError, "is both in `trace_axes`"),
    ({"trace_axes": 1.0}, TypeError, "`trace_axes` must be an int or a tuple"),
    ({"method": "fast"}, ValueError, "`method` must be one of"),
    ({"method": 4}, ValueError, "`method` must be one of"),
    ({"block_size": 0}, ValueError, "`block_size` must be at least 1"),
    ({"block_size": (1, 2, 3)}, ValueError, "`block_size` must be one size, or a pair"),
    ({"block_size": (1, None)}, TypeError, "A pair of sizes must consist of ints"),
    ({"block_size": 2, "in_axes": None}, ValueError, "blocks of a `block_size`"),
    ({"in_axes": (0, 0)}, ValueError, "`in_axes` must be a PyTree prefix"),
    ({"out_axes": None}, ValueError, "`out_axes` gives an output .* batch axis None"),
    ({"kwargs_axes": 0}, TypeError, "`kwargs_axes` must be dict"),
    ({"in_axes": None, "out_axes": 1}, ValueError, "are for a model of one example"),
    ({"vmap_axes": 0}, TypeError, "Did you mean `in_axes`"),
    ({"implementation": 0}, TypeError, "Did you mean `method`"),
    ({"in_axes": 5}, ValueError, "`x1` the batch axis 5"),
]


@pytest.mark.parametrize(("kwargs", "error", "match"), ERRORS)
@pytest.mark.usefixtures("unchecked")
def test_wrong_settings(kwargs, error, match, getkey):
    model = drawn(Matrices, dtype=jnp.float32, key=getkey())
    with pytest.raises(error, match=match):
        EmpiricalNTK(model, **kwargs)(jnp.ones((2, 4)))
    with pytest.raises(TypeError, match="`model` must be callable"):
        EmpiricalNTK(jnp.ones(3))


def test_wrong_calls(getkey):
    model = drawn(Matrices, dtype=jnp.float32, key=getkey())
    mean = EmpiricalNTK(model, trace_axes=(0,))
    with pytest.raises(ValueError, match="over which the diagonal has its mean"):
        mean.diagonal(jnp.ones((2, 4)))
    probed = ProbedNTK(model, num_probes=2, key=getkey(), trace_axes=(0, 1))
    with pytest.raises(ValueError, match="standard errors of single examples"):
        probed(jnp.ones((2, 4)))
    ntk = EmpiricalNTK(model, diagonal_axes=(0,))
    with pytest.raises(ValueError, match="same number of them; got 2 and 3"):
        ntk(jnp.ones((2, 4)), jnp.ones((3, 4)))
    scalar = Scalar(drawn(eqx.nn.Linear, 4, 1, key=getkey()))
    with pytest.raises(ValueError, match=r"Use `trace_axes=\(\)`"):
        EmpiricalNTK(scalar, trace_axes=-1)(jnp.ones((2, 4)))
    partial = eqx.Partial(lambda m, x: (m(x), x.shape), scalar)
    with pytest.raises(ValueError, match="must return arrays of an inexact dtype"):
        EmpiricalNTK(partial, trace_axes=())(jnp.ones((2, 4)))
    partial = eqx.Partial(lambda m, x: x * m.linear.weight[0, 0], scalar)
    with pytest.raises(ValueError, match="must have the same sizes for `x1` and `x2`"):
        EmpiricalNTK(partial)(jnp.ones((2, 4)), jnp.ones((2, 5)))
    with pytest.raises(ValueError, match="the same structure, rank and dtype"):
        EmpiricalNTK(partial)(jnp.ones((2, 4)), jnp.ones((2, 4, 4)))
    with pytest.raises(ValueError, match="With `in_axes=None`"):
        EmpiricalNTK(partial, in_axes=None).diagonal(jnp.ones((2, 4)))
    # Data is checked for every user; some versions of jaxtyping leave it to us.
    with pytest.raises((jaxtyping.TypeCheckError, ValueError), match="x1"):
        EmpiricalNTK(scalar)("not data")


class SameDerivative(eqx.Module):
    weight: jax.Array
    is_used: bool = eqx.field(static=True)

    def __call__(self, x):
        return x.sum() + (jnp.sin(self.weight.sum()) if self.is_used else 0)


@pytest.mark.parametrize(
    ("is_used", "symmetric"), thinned((True, False), (True, False))
)
def test_blocks_of_what_is_the_same_for_all_examples(is_used, symmetric):
    model = SameDerivative(jnp.ones(3), is_used)
    x, y = jnp.ones((5, 2)), jnp.ones((3, 2))
    second = x if symmetric else y
    expected = jnp.full((5, len(second)), 3 * jnp.cos(3.0) ** 2 * float(is_used))
    for name in ("sites", "jacobian_contraction", "ntk_vector_products"):
        ntk = EmpiricalNTK(model, trace_axes=(), method=name, block_size=2)
        assert_same(ntk(x, None if symmetric else y), expected)


class _Losses(eqx.Module):
    """The losses of two models, of an example that is an input, a label and a sign."""

    models: list[Bent]

    def __call__(self, example):
        x, label, sign = example
        losses = [-jax.nn.log_softmax(model(x))[label] for model in self.models]
        return sign * sum(losses)


@float64
def test_products_of_gradients_of_a_loss(getkey):
    """The kernel of a loss, whose labels belong to the examples, over checkpoints."""
    models = [bent(3, 4, getkey()) for _ in range(2)]
    kernel = EmpiricalNTK(cast(_Losses(models)), block_size=BLOCK)
    draw = np.random.default_rng(0)
    sides = [
        (draw.normal(size=(n, 3)), draw.integers(0, 4, n), np.full(n, sign))
        for n, sign in ((7, -1.0), (9, 1.0))
    ]
    first, second = (jax.tree.map(jnp.asarray, side) for side in sides)
    gradient = eqx.filter_grad(lambda losses, example: losses(example))
    flat = lambda losses, x: ravel_pytree(gradient(losses, x))[0]
    of_all = eqx.filter_jit(eqx.filter_vmap(flat, in_axes=(None, 0)))
    losses = cast(_Losses(models))
    g1, g2 = (np.asarray(of_all(losses, side)) for side in (first, second))
    np.testing.assert_allclose(kernel(first, second), g1 @ g2.T, atol=1e-12)
    np.testing.assert_allclose(kernel.diagonal(first), (g1**2).sum(1), atol=1e-12)
    top = EmpiricalNTK(cast(_Losses(models)), block_size=BLOCK, reduce=TopK(3))
    expected = np.argsort(-(g1 @ g2.T), axis=1)[:, :3]
    np.testing.assert_array_equal(top(first, second).indices, expected)
