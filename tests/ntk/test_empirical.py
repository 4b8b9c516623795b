"""Empirical kernels against the Jacobian itself, in float64."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch import (
    EmpiricalKernel,
    EmpiricalNNGP,
    EmpiricalNTK,
    ProbedNTK,
)
from eqxbatch._ntk.pairings import Products, Sites
from ..helpers import assert_same, drawn, normal, rows_only, spread
from ..layers import LAYERS
from .models import cast, Dict, float64, jacobians, Matrices, outputs, pairs, truth


METHODS = ("jacobian_contraction", "ntk_vector_products", "sites")


AXES = [
    ((), (), 2),
    ((-1,), (), None),
    ((1,), (2,), 2),
    ((2, -2), (), None),
    ((), (-1, 1), None),
    ((-1,), (0,), 2),
    ((), (0, 2), None),
    ((1, 2), (0,), None),
    ((0,), (-1,), 2),
    ((0, -1), (), None),
]


@float64
@pytest.mark.parametrize(("trace", "diagonal", "block_size"), spread(AXES, 3))
def test_axes(trace, diagonal, block_size, getkey):
    model = drawn(Matrices, key=getkey())
    x1, x2 = normal(getkey(), (3, 4), float), normal(getkey(), (5, 4), float)
    first = jnp.asarray(np.asarray(x2)[:3])
    x2 = first if 0 in (*trace, *diagonal) else x2
    kwargs = {"trace_axes": trace, "diagonal_axes": diagonal, "block_size": block_size}
    both = EmpiricalKernel(model, **kwargs)
    kernel = both(x1, x2)
    assert_same(kernel.ntk, truth(model, x1, x2, trace, diagonal))
    values = [np.asarray(outputs(model, x))[..., None] for x in (x1, x2)]
    assert_same(kernel.nngp, pairs(*values, trace, diagonal))
    if 0 in (*trace, *diagonal):
        nngp = EmpiricalNNGP(model, **kwargs)(x1)
        assert_same(nngp, pairs(values[0], values[0], trace, diagonal))
    else:
        kernel = both.diagonal(x1, first)
        assert_same(kernel.ntk, truth(model, x1, first, trace, (*diagonal, 0)))
        expected = pairs(values[0], values[1][:3], trace, (*diagonal, 0))
        assert_same(kernel.nngp, expected)


@float64
def test_examples_are_paired_in_some_outputs(getkey):
    model = eqx.Partial(
        lambda mlp, x: {"a": mlp(x)[:2], "b": mlp(x)}, drawn(Dict, key=getkey()).layer
    )
    x1, x2 = normal(getkey(), (3, 4), float), normal(getkey(), (3, 4), float)
    out_axes = {"a": 0, "b": 1}
    settings = {"out_axes": out_axes, "trace_axes": (), "diagonal_axes": (0,)}

    def paired(*sides):
        sides = jax.device_get(sides)
        return {
            "a": pairs(*(side["a"] for side in sides), (), (0,)),
            "b": pairs(*(side["b"].swapaxes(0, 1) for side in sides), (), (0,)),
        }

    both = EmpiricalKernel(model, block_size=2, **settings)(x1, x2)
    assert_same(both.ntk, paired(*(jacobians(model, x) for x in (x1, x2))))
    values = (outputs(model, x) for x in (x1, x2))
    single = lambda tree: jax.tree.map(lambda y: np.asarray(y)[..., None], tree)
    assert_same(both.nngp, paired(*map(single, values)))
    with pytest.raises(ValueError, match="same number of them; got 3 and 2"):
        EmpiricalNTK(model, **settings)(x1, x2[:2])


@float64
def test_outputs_without_entries(getkey):
    mlp, x = drawn(Dict, key=getkey()).layer, normal(getkey(), (3, 4), float)
    model = eqx.Partial(lambda mlp, x: {"all": mlp(x), "none": mlp(x)[:0]}, mlp)
    settings = {"block_size": 2}
    both = EmpiricalKernel(model, trace_axes=(), **settings)(x)
    values = np.asarray(outputs(mlp, x))[..., None]
    alone = pairs(values, values), truth(mlp, x, x)
    for got, expected in zip(both, alone, strict=True):
        assert_same(got["all"], expected)
        assert got["none"].shape == (3, 3, 0, 0)
    # As for `jnp.mean`, the mean of nothing is NaN.
    probed = ProbedNTK(model, num_probes=2, key=getkey(), **settings)(x)
    assert np.isnan(probed.kernel["none"]).all()
    assert np.isnan(probed.standard_error["none"]).all()
    assert np.isfinite(probed.standard_error["all"]).all()
    traced = EmpiricalNTK(model, **settings)(x)["none"]
    assert_same(traced, jnp.asarray(np.full((3, 3), np.nan)))


@pytest.mark.matrix
@float64
@pytest.mark.parametrize(
    ("number", "axes", "block_size"),
    (
        (1, (), (2, 3)),
        (1, (-1,), None),
        (2, (-1,), (2, 3)),
        (2, (1, 2), 2),
        (3, (), 2),
        (3, (1, 2), None),
    ),
)
def test_methods(number, axes, block_size, getkey):
    model = drawn(Matrices, key=getkey())
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (4, 4), float)
    name = METHODS[number - 1]
    ntk = EmpiricalNTK(model, trace_axes=axes, method=name, block_size=block_size)
    assert_same(ntk(x1, x2), truth(model, x1, x2, axes))
    assert_same(ntk(x1), truth(model, x1, x1, axes))
    assert_same(ntk.diagonal(x1), truth(model, x1, x1, axes, (0,)))
    by_number = EmpiricalNTK(model, method=number)
    assert by_number.method == name


class Applied(eqx.Module):
    """A layer and the function that applies it."""

    layer: eqx.Module
    fun: Callable = eqx.field(static=True)

    def __call__(self, x):
        return jnp.tanh(self.fun(self.layer, x))


@eqx.filter_jit
def examples(example, key, num):
    return cast(jax.vmap(example)(jr.split(key, num)))


class Twice(eqx.Module):
    """A table that is used for words and for scores, and a layer used twice."""

    table: eqx.nn.Embedding
    linear: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key)
        self.table = eqx.nn.Embedding(7, 4, key=keys[0])
        self.linear = eqx.nn.Linear(4, 4, key=keys[1])

    def __call__(self, tokens):
        x = jax.vmap(self.table)(tokens)
        for _ in range(2):
            x = jnp.tanh(jax.vmap(self.linear)(x))
        return self.table.weight @ x.mean(axis=0)


class Fallback(eqx.Module):
    """One parameter that no rule covers."""

    odd: jax.Array
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.odd = jr.normal(key, (3,))
        self.linear = eqx.nn.Linear(4, 3, key=key)

    def __call__(self, x):
        return self.linear(x) * jnp.sin(self.odd) + lax.cumsum(self.odd)


def network(name):
    """A model, and how an example is made."""
    if name == "tied":
        return Twice(jr.key(0)), lambda key: jr.randint(key, (5,), 0, 7)
    if name == "fallback":
        return Fallback(jr.key(0)), lambda key: jr.normal(key, (4,))
    model, fun, example = LAYERS[name]()
    return Applied(model, fun), example


@pytest.mark.matrix
@float64
@pytest.mark.parametrize(
    "name",
    (
        "Conv2d, in groups",
        "GRUCell, in a scan",
        "MultiheadAttention",
        "WeightNorm",
        "tied",
        "fallback",
    ),
)
def test_networks(name, getkey):
    model, example = network(name)
    model = cast(model)
    x = examples(example, getkey(), 5)
    kernel = EmpiricalNTK(model, trace_axes=(), method="sites")(x)
    jac = np.asarray(jacobians(model, x))
    assert_same(kernel, pairs(jac, jac))
    traced = EmpiricalNTK(model, block_size=2)(x, jnp.asarray(np.asarray(x)[:3]))
    assert_same(traced, pairs(jac, jac[:3], (-1,)))
    # Positive semidefinite: the axes of one side, then those of the other.
    order = (*range(0, kernel.ndim, 2), *range(1, kernel.ndim, 2))
    num = round(kernel.size**0.5)
    flat = np.transpose(kernel, order).reshape(num, num)
    values = np.linalg.eigvalsh(flat)
    assert values.min() > -1e-10 * values.max()


def test_auto_takes_products_for_many_outputs(monkeypatch, getkey):
    class Odd(eqx.Module):
        """Many outputs of a parameter that no rule covers."""

        w: jax.Array

        def __call__(self, x):
            return jnp.maximum(self.w, x[None]) @ x

    chosen = []
    for pairing in (Products, Sites):
        kernels = pairing.kernels

        def spy(self, *args, kernels=kernels):
            chosen.append(type(self))
            return kernels(self, *args)

        monkeypatch.setattr(pairing, "kernels", spy)
    x = normal(getkey(), (5, 4), float)
    for num, expected in ((64, Products), (2, Sites)):
        odd = Odd(normal(getkey(), (num, 4), float))
        for method in ("auto", "sites"):
            ntk = EmpiricalNTK(odd, trace_axes=(), method=method)
            assert_same(ntk(x), truth(odd, x, x), 1e-4)
            is_auto = method == "auto"
            assert {*chosen} == {expected if is_auto else Sites}
            chosen.clear()


@float64
def test_closed_forms(getkey):
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (3, 4), float)
    linear = drawn(eqx.nn.Linear, 4, 6, use_bias=False, key=getkey(), dtype=jnp.float64)
    one, two = np.asarray(x1), np.asarray(x2)
    assert_same(EmpiricalNTK(linear)(x1, x2), one @ two.T)
    full = EmpiricalNTK(linear, trace_axes=())(x1, x2)
    assert_same(full, np.einsum("nm,op->nmop", one @ two.T, np.eye(6)))

    mlp = drawn(
        eqx.nn.MLP,
        4,
        1,
        8,
        1,
        use_bias=False,
        use_final_bias=False,
        key=getkey(),
        dtype=jnp.float64,
    )
    w, v = np.asarray(mlp.layers[0].weight), np.asarray(mlp.layers[1].weight)[0]
    hidden = [np.maximum(x @ w.T, 0) for x in (one, two)]
    slopes = [np.where(x @ w.T > 0, v[None], 0.0) for x in (one, two)]
    expected = hidden[0] @ hidden[1].T + (slopes[0] @ slopes[1].T) * (one @ two.T)
    assert_same(EmpiricalNTK(mlp)(x1, x2), expected)

    # The kernel of a sum of models with parameters of their own is a sum of kernels.
    class Sum(eqx.Module):
        models: list

        def __call__(self, x):
            return self.models[0](x)[:1] + self.models[1](x)

    total = EmpiricalNTK(Sum([linear, mlp]), trace_axes=())(x1, x2)
    assert_same(total, (one @ two.T + expected)[..., None, None])


def test_outputs_and_kinds(getkey):
    model = drawn(Dict, key=getkey())
    x1, x2 = normal(getkey(), (5, 4), float), normal(getkey(), (3, 4), float)
    expected = truth(model, x1, x2)
    blocked = EmpiricalKernel(model, trace_axes=(), block_size=2)
    both = blocked(x1, x2)
    assert both._fields == ("nngp", "ntk")
    assert_same(both.ntk, expected, 1e-4)
    values = [
        jax.tree.map(lambda y: np.asarray(y)[..., None], outputs(model, x))
        for x in (x1, x2)
    ]
    assert_same(both.nngp, jax.tree.map(pairs, *values), 1e-4)
    turned = blocked(x1, x2, ("NTK", "nngp"))
    assert turned._fields == ("ntk", "nngp")
    assert_same(tuple(turned), (both.ntk, both.nngp))
    assert type(blocked(x1, x2)) is type(both)
    kernel = EmpiricalKernel(model, trace_axes=(), method=2)
    assert_same(kernel(x1, x2, get="NTK"), both.ntk, 1e-4)
    assert_same(kernel(x1, x2, get="nngp"), both.nngp, 1e-4)
    diagonal = truth(model, x1, x1, (), (0,))
    assert_same(blocked.diagonal(x1, get="ntk"), diagonal, 1e-4)
    for get in ((), ("ntk", "ntk"), "cov", ("ntk", "x"), 3, {"ntk"}):
        with pytest.raises(ValueError, match="`get` must be"):
            blocked(x1, x2, get)


def applied(kernel, vector):
    """A kernel with the axes of all outputs, times what a model returns."""
    product = np.einsum("nmop,mp->no", np.asarray(kernel), np.asarray(vector))
    return jnp.asarray(product)


@pytest.mark.matrix
@float64
@pytest.mark.parametrize("method", METHODS[1:])
def test_complex(method, getkey):
    class Model(eqx.Module):
        w: jax.Array
        v: jax.Array
        is_real: bool

        def __call__(self, x):
            y = jnp.sin(self.w @ x.astype(self.w.dtype))
            out = self.v @ y
            return jnp.abs(out) ** 2 if self.is_real else out

    w = normal(getkey(), (5, 4), jnp.complex128)
    v = normal(getkey(), (3, 5), jnp.complex128)
    x1, x2 = normal(getkey(), (4, 4), float), normal(getkey(), (3, 4), float)
    make = lambda model: EmpiricalNTK(model, trace_axes=(), method=method, block_size=2)

    @jax.jit
    def holomorphic(weights, x):
        call = lambda wv, x: Model(*wv, False)(x)
        jac = jax.vmap(jax.jacrev(call, holomorphic=True), (None, 0))
        parts = jac(weights, x.astype(jnp.complex128))
        return jnp.concatenate([p.reshape(len(x), 3, -1) for p in parts], axis=-1)

    model = Model(w, v, False)
    expected = pairs(holomorphic((w, v), x1), holomorphic((w, v), x2))
    assert_same(make(model)(x1, x2), expected)
    hermitian = make(model)(x1)
    hermitian = np.asarray(hermitian)
    assert (hermitian == np.conj(np.transpose(hermitian, (1, 0, 3, 2)))).all()
    vector = outputs(model, x2)
    product = make(model).untraced_matvec(x1, x2, vector)
    assert_same(product, applied(expected, vector))

    # A real function of complex parameters is one of their real and imaginary parts.
    def parts(wv, x):
        (a, b), (c, d) = wv
        return Model(lax.complex(a, b), lax.complex(c, d), True)(x)

    model = Model(w, v, True)
    leaves = ((w.real, w.imag), (v.real, v.imag))
    jac = jax.jit(jax.vmap(jax.jacrev(parts), (None, 0)))
    jac = [
        np.concatenate(
            [np.reshape(y, (len(x), 3, -1)) for y in jax.tree.leaves(jac(leaves, x))],
            axis=-1,
        )
        for x in (x1, x2)
    ]
    assert_same(make(model)(x1, x2), pairs(*jac))

    # A complex function of real parameters.
    class Wave(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return jnp.exp(lax.complex(0 * self.w[:, 0], self.w @ x))

    wave = Wave(w.real)
    one = lambda w, x: [part(Wave(w)(x)) for part in (jnp.real, jnp.imag)]
    jac = jax.jit(jax.vmap(jax.jacrev(one), (None, 0)))
    real_imag = [jax.device_get(jac(wave.w, x)) for x in (x1, x2)]
    jac = [(re + 1j * im).reshape(len(re), 5, -1) for re, im in real_imag]
    assert_same(make(wave)(x1, x2), pairs(*jac))
    vector = outputs(wave, x2)
    product = make(wave).untraced_matvec(x1, x2, vector)
    assert_same(product, applied(pairs(*jac), vector))
    values = [np.asarray(outputs(wave, x))[..., None] for x in (x1, x2)]
    assert_same(EmpiricalNNGP(wave, trace_axes=())(x1, x2), pairs(*values))


def test_parameters(getkey):
    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        steps: jax.Array

        def __call__(self, x):
            return self.mlp(x) * self.steps.astype(x.dtype)

    model = Model(drawn(eqx.nn.MLP, 4, 3, 5, 1, key=getkey()), jnp.array(2))
    x = normal(getkey(), (4, 4), float)
    is_last = jax.tree.map(lambda _: False, model)
    is_last = eqx.tree_at(lambda m: m.mlp.layers[1].weight, is_last, True)
    last = EmpiricalNTK(model, where=lambda m: m.mlp.layers[1].weight)
    weight, bias = (np.asarray(y) for y in jax.tree.leaves(model.mlp.layers[0]))
    hidden = np.maximum(np.asarray(x) @ weight.T + bias, 0)
    last_kernel = last(x)
    assert_same(last_kernel, 4 * hidden @ hidden.T)
    assert_same(EmpiricalNTK(model, filter_spec=is_last)(x), last_kernel)
    whole = EmpiricalNTK(model, where=lambda m: (m.mlp, m.steps))
    # What a bias adds is the same for all examples.
    first = EmpiricalNTK(model, where=lambda m: m.mlp.layers[0])
    assert_same(whole(x), np.asarray(first(x)) + np.asarray(last_kernel) + 4)
    with pytest.raises(ValueError, match="leave no parameters"):
        EmpiricalNTK(model, where=lambda m: m.steps)
    changed = eqx.tree_at(lambda ntk: ntk.model.steps, last, None)
    with pytest.raises(ValueError, match=r"a different structure .*'\.steps'"):
        changed(x)
    whole_numbers = jnp.ones((3, 5), int)
    weight = lambda ntk: ntk.model.mlp.layers[1].weight
    changed = eqx.tree_at(weight, last, whole_numbers)
    with pytest.raises(
        ValueError, match=r"inexact dtype: .*'\.mlp.layers\[1\]\.weight'"
    ):
        changed(x)


def test_parameters_that_move_to_other_places(getkey):
    class Model(eqx.Module):
        first: jax.Array | None
        second: jax.Array | None

        def __call__(self, x):
            return jnp.sum(jnp.sin(x) if self.first is None else self.first * x)

    weight = jnp.ones(4)
    ntk = EmpiricalNTK(Model(None, weight), where=lambda m: m.second)
    both = lambda ntk: (ntk.model.first, ntk.model.second)
    moved = eqx.tree_at(both, ntk, (weight, None), is_leaf=lambda x: x is None)
    with pytest.raises(ValueError, match=r"structure .*'\.first', '\.second'"):
        moved(normal(getkey(), (4, 4), float))


@pytest.mark.parametrize("dtype", spread((jnp.bfloat16, jnp.float16), 1))
def test_dtypes(dtype, getkey):
    model = drawn(eqx.nn.MLP, 4, 3, 64, 1, key=getkey(), dtype=dtype)
    x = normal(getkey(), (5, 4), dtype)
    kernel = EmpiricalKernel(model, block_size=2)(x)
    wide = jax.tree.map(
        lambda y: y.astype(jnp.float32) if eqx.is_inexact_array(y) else y, model
    )
    expected = EmpiricalKernel(wide)(x.astype(jnp.float32))
    for name in ("ntk", "nngp"):
        got = getattr(kernel, name)
        assert got.dtype == dtype
        assert_same(got, getattr(expected, name).astype(dtype), 4e-2)


def test_inputs_that_are_pytrees(getkey):
    class Model(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return self.linear(x["a"]) * x["b"][0]

    model = Model(drawn(eqx.nn.Linear, 4, 2, use_bias=False, key=getkey()))
    a, b = normal(getkey(), (5, 4), float), normal(getkey(), (5,), float)
    ntk = EmpiricalNTK(model, block_size=2)
    expected = (a * b[:, None]) @ (a * b[:, None]).T
    assert_same(ntk({"a": a, "b": (b,)}), expected)
    axes = {"a": 1, "b": 0}
    assert_same(EmpiricalNTK(model, in_axes=axes)({"a": a.T, "b": (b,)}), expected)
    # Numpy arrays are taken, too.
    assert_same(ntk({"a": np.asarray(a), "b": (np.asarray(b),)}), expected)


@jax.custom_vjp
def no_forward_mode(x):
    return jnp.tanh(x)


no_forward_mode.defvjp(lambda x: (jnp.tanh(x), x), lambda x, d: (d / jnp.cosh(x) ** 2,))


@pytest.mark.flags
@float64
def test_models_without_forward_mode(getkey):
    layers = [drawn(eqx.nn.Linear, *sizes, key=getkey()) for sizes in ((3, 4), (4, 1))]
    layers.insert(1, eqx.nn.Lambda(no_forward_mode))
    model, x = eqx.nn.Sequential(layers), normal(getkey(), (5, 3), float)
    expected = truth(model, x, x, (-1,), ())
    assert_same(EmpiricalNTK(model)(x), expected)
    vector = np.asarray(x)[:, :1]
    assert_same(
        EmpiricalNTK(model).untraced_matvec(x, None, jnp.asarray(vector)),
        np.asarray(expected) @ vector,
    )
    with pytest.raises(TypeError, match="needs the model's derivative in forward mode"):
        EmpiricalNTK(model, method="ntk_vector_products")(x)
    layers[1] = eqx.nn.Lambda(rows_only)
    model = eqx.nn.Sequential(layers)
    assert_same(EmpiricalNTK(model)(x), truth(model, x, x, (-1,), ()))
    with pytest.raises(TypeError, match="nor the transpose of its backward pass"):
        EmpiricalNTK(model).untraced_matvec(x, None, x[:, :1])
