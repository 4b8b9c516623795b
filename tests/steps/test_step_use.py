"""How `filter_gauss_newton_step` is used: dtypes, transforms, methods, wrong calls."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqxbatch
from ..helpers import assert_same, drawn, make_mesh, put, spread, thinned, variants
from .oracle import as_numbers, close, step, system


def network(dtype=jnp.float32, key=0):
    settings = {"dtype": jnp.float32, "use_final_bias": False, "key": jr.key(key)}
    return cast(drawn(eqx.nn.MLP, 3, 2, 6, 1, jnp.tanh, **settings), dtype)


def cast(tree, dtype):
    """By NumPy, which needs no program for each shape."""
    to_dtype = lambda x: jax.device_put(np.asarray(x).astype(dtype))
    return jax.tree.map(lambda x: to_dtype(x) if eqx.is_array(x) else x, tree)


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def fits(model, x, y):
    return model(x) - y


def take(residual=fits, **settings):
    return eqxbatch.filter_gauss_newton_step(residual, **{"damping": 0.1, **settings})


X, Y = (draw(7, 3), draw(7, 2, seed=1))


@pytest.mark.quick
def test_descends_by_itself_and_in_a_chain():
    model = network()
    found = take()(model, X, Y)
    optimiser = optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.5))

    @eqx.filter_jit
    def run(model, found):
        loss = lambda model: jnp.mean((jax.vmap(model)(X) - Y) ** 2)
        moved = eqx.apply_updates(model, jax.tree.map(lambda s: -0.5 * s, found))
        state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        in_chain, _ = optimiser.update(found, state)
        by_chain = eqx.apply_updates(model, in_chain)
        return moved, by_chain, loss(model), loss(moved)

    moved, by_chain, before, after = run(model, found)
    assert after < 0.95 * before
    assert_same(by_chain, moved)


@pytest.mark.parametrize(
    ("dtype", "space"),
    variants(
        (
            (jnp.bfloat16, "sample"),
            (jnp.float16, "parameter"),
            (jnp.float32, "parameter"),
        ),
        (jnp.float16, "parameter"),
        (jnp.float32, "parameter"),
    ),
)
def test_narrow_dtypes(dtype, space):
    model = network(dtype)
    x, y = cast((X, Y), dtype)
    found = take(space=space, microbatch_size=3)(model, x, y)
    leaves = jax.tree.leaves(found)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    # In the same space for all, which takes one program.
    expected = take()(*cast((model, x, y), jnp.float32))
    tol = {"bfloat16": 6e-2, "float16": 1e-2, "float32": 1e-4}[jnp.dtype(dtype).name]
    close(found, as_numbers(expected), tol)


@pytest.mark.parametrize("space", spread(("sample", "parameter"), 1))
def test_small_residuals_do_not_vanish_in_half_precision(space):
    # Their products with weights are out of the range of float16.
    model, x = network(jnp.float16), cast(X, jnp.float16)
    of = take(
        lambda model, x, size: (model(x), jnp.full(2, size, jnp.float32)),
        has_residual=True,
        in_axes=(0, None),
        space=space,
        filter_spec=eqx.is_inexact_array,
    )
    small, large = (as_numbers(of(model, x, np.float32(s))) for s in (1e-3, 1.0))
    np.testing.assert_allclose(1e3 * small, large, rtol=2e-2, atol=2e-3)


def test_matrices_of_half_precision_are_in_float32():
    # The columns are almost the same, so the matrix needs its digits.
    a, b, y = (np.asarray(draw(256, seed=i)) for i in range(3))
    rows = np.stack([a, a + 0.05 * b], 1)
    rows = rows.astype(jnp.bfloat16).astype(np.float32)
    wide = rows.astype(np.float64)
    exact = step(wide / 16, -y.astype(np.float64) / 16, 1e-4)
    for space in ("sample", "parameter"):
        of = take(
            lambda w, row, y: row @ w.astype(jnp.float32) - y, damping=1e-4, space=space
        )
        close(of(jnp.zeros(2, jnp.bfloat16), rows, y), exact, 5e-2)


@pytest.mark.parametrize(
    ("space", "in_blocks"), thinned(("sample", "parameter"), (False, True))
)
def test_sums_beyond_float16(space, in_blocks):
    # Neither the matrix nor sums of derivatives over the examples are in its range.
    x, w = np.full((400, 2), 300, np.float16), np.array([0.5, 0.5], np.float16)
    wide = np.asarray(x, np.float64)
    expected = step(wide / 20, wide @ np.asarray(w, np.float64) / 20, 1.0)
    size = {"sample": "block_size", "parameter": "microbatch_size"}[space]
    sizes = {size: 150} if in_blocks else {}
    found = take(lambda w, x: w @ x, damping=1.0, space=space, **sizes)(w, x)
    close(found, expected, 1e-2)


def test_data_of_another_dtype(x64):
    model = network()
    x, y = X, cast(Y, jnp.float64)
    fun = lambda model, x, y: model(x).astype(jnp.float64) - y
    # Two terms, of which one is in float32.
    terms = take([lambda model, x: model(x), lambda model, pair: fun(model, *pair)])
    dense = system(
        [lambda model, x: model(x), fun], model, [(x,), (x, y)], [np.full(7, 1 / 7)] * 2
    )
    found = terms(model, x, (x, y))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    close(found, step(*dense, 0.1), 1e-5)


@pytest.mark.parametrize("space", spread(("sample", "parameter"), 1))
def test_inside_of_transforms(space):
    model, one = network(), take(space=space, block_size=3)
    both = [eqx.filter(network(key=i), eqx.is_array) for i in range(2)]
    static = eqx.filter(model, eqx.is_array, inverse=True)
    stacked = jax.tree.map(lambda *x: jax.device_put(np.stack(x)), *both)
    models = eqx.combine(stacked, static)
    found = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None, None))(models, X, Y)
    for i in range(2):
        got = jax.tree.map(lambda x, i=i: x[i], jax.device_get(found))
        assert_same(got, jax.device_get(one(network(key=i), X, Y)), tol=1e-4)

    def body(model, xy):
        moved = one(eqx.combine(model, static), *xy)
        return jax.tree.map(lambda x, s: x - s, model, moved), None

    first, other = both[1], np.asarray(X) + 1
    last, _ = jax.lax.scan(body, first, (np.stack([X, other]), np.stack([Y, Y])))
    for x in (X, other):
        # By NumPy.
        moved = one(eqx.combine(first, static), x, Y)
        first = jax.tree.map(lambda x, s: np.asarray(x) - np.asarray(s), first, moved)
        first = jax.device_put(first)
    assert_same(last, first, tol=1e-4)


def test_nothing_is_traced_twice():
    count = 0

    def fun(model, x, y):
        nonlocal count
        count += 1
        return fits(model, x, y)

    of = lambda damping: take(fun, damping=jnp.asarray(damping), momentum=0.5)
    previous = take()(network(), X, Y)
    of(0.1)(network(), previous, X, Y)
    traced = count
    of(0.2)(network(key=1), previous, X + 1, Y)
    assert count == traced


def test_no_examples():
    model, empty = network(), (np.asarray(X)[:0], np.asarray(Y)[:0])
    for space in ("sample", "parameter"):
        found = take(space=space, centre=True)(model, *empty)
        assert not np.any(as_numbers(found))
    previous = eqx.filter(model, eqx.is_array)
    kept = take(momentum=0.5)(model, previous, *empty)
    close(kept, 0.5 * as_numbers(previous), 1e-6)


@pytest.mark.parametrize(
    ("space", "damping"), spread((("sample", 1e-3), ("parameter", 0.1)), 1)
)
def test_products_in_float32(space, damping):
    """With the tolerances that the docs recommend, for residuals of any size."""
    settings = {"use_final_bias": False, "key": jr.key(0)}
    model = drawn(eqx.nn.MLP, 1, 1, 32, 1, **settings)
    x = np.linspace(-1.0, 1.0, 20, dtype=np.float32)[:, None]
    of = lambda solver, space: take(
        lambda model, x, size: (model(x), size * (model(x) - x**2)),
        has_residual=True,
        in_axes=(0, None),
        solver=solver,
        space=space,
        damping=jnp.asarray(damping),
    )
    by_products = of(lineax.CG(rtol=1e-4, atol=1e-4), space)
    exact = of("cholesky", "sample")
    for size in np.array([1.0, 1e-4], np.float32):
        expected = as_numbers(exact(model, x, size))
        close(by_products(model, x, size), expected, 1e-2)


def test_parameters_without_entries():
    for solver in ("cholesky", "eigh"):
        one = take(
            lambda w, x: x + jnp.sum(w), space="parameter", solver=solver, damping=0.0
        )
        assert one(jnp.ones(0), jnp.ones(3)).shape == (0,)


class Owner(eqx.Module):
    model: eqx.nn.MLP
    numbers: jax.Array
    name: str = "owner"
    nothing: None = None

    @eqxbatch.filter_gauss_newton_step(damping=0.1)
    def gauss_newton(self, x, y):
        return self.model(x) - y + self.numbers.sum().astype(x.dtype)


def test_methods_and_parts():
    owner = Owner(network(), jnp.zeros(2, jnp.int32))
    found = owner.gauss_newton(X, Y)
    assert found.numbers is None
    assert_same(found.model, take()(owner.model, X, Y), tol=1e-5)
    last = lambda model: model.layers[-1]
    of_last = take(where=last)(owner.model, X, Y)
    assert of_last.layers[0].weight is None
    first = jax.device_get(owner.model.layers[0])
    hidden = np.tanh(np.asarray(X) @ first.weight.T + first.bias)
    alone = take()(last(owner.model), hidden, Y)
    assert_same(last(of_last), alone, tol=1e-4)


def test_keys_and_shared_arguments():
    model = network()

    def fun(model, x, scale, *, key):
        return model(x) * scale + jr.normal(key, (2,))

    keys, scale = jr.split(jr.key(1), 7), jnp.asarray(2.0)
    in_axes = {"x": 0, "scale": None}
    found = take(fun, in_axes=in_axes, block_size=3)(model, X, scale, key=keys)
    noise = jax.jit(jax.vmap(lambda key: jr.normal(key, (2,))))(keys)
    expected = take(lambda model, x, n: 2 * model(x) + n)(model, X, noise)
    assert_same(found, expected, tol=1e-4)


def test_closed_over_arrays():
    model, offset = network(), draw(2, seed=5)

    @jax.jit
    def run(offset):
        own = take(lambda model, x: model(x) - offset, space="parameter")
        return own(model, X)

    expected = take()(model, X, np.tile(offset, (7, 1)))
    assert_same(run(offset), expected, tol=1e-3)


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize("space", ("sample", "parameter"))
def test_within_shard_map(space):
    # A step is that of the examples on its device.
    mesh = make_mesh(jax.sharding.AxisType.Auto)
    x, y = draw(8, 3), draw(8, 2, seed=1)
    model = network()
    arrays, static = eqx.partition(model, eqx.is_array)

    def local(arrays, x, y):
        found = take(space=space)(eqx.combine(arrays, static), x, y)
        return jax.tree.map(lambda s: s[None], found)

    run = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data")
        )
    )
    found = run(arrays, put(x, mesh, "data"), put(y, mesh, "data"))
    for i in range(4):
        own = slice(2 * i, 2 * i + 2)
        expected = take(space=space)(model, np.asarray(x)[own], np.asarray(y)[own])
        got = jax.tree.map(lambda s, i=i: s[i], jax.device_get(found))
        assert_same(got, jax.device_get(expected), tol=1e-3)


@pytest.mark.devices
def test_settings_of_each_device():
    """With `momentum`, the previous step may be the same on all devices."""
    mesh, model = make_mesh(jax.sharding.AxisType.Auto), draw(3, 2)
    x, y = draw(8, 3), draw(8, 2, seed=1)
    weights = jnp.arange(8.0) - 0.5
    previous = draw(3, 2, seed=2)
    fun = lambda w, x, y: x @ w - y
    step_of = lambda weights, damping, *args: take(
        fun,
        damping=damping,
        momentum=0.5,
        solver="eigh",
        accumulator=eqxbatch.Mean(weights=weights),
    )(*args)
    dampings = jnp.array([0.1, 0.1, -0.1, 0.3])
    local = lambda model, previous, x, y, weights, damping: step_of(
        weights, damping[0], model, previous, x, y
    )[None]
    each = P("data")
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), *[each] * 4), out_specs=each
    )
    found = jax.jit(run)(model, previous, x, y, weights, dampings)
    # Neither weights nor damping may be negative: on the first and the third device.
    for i in (0, 2):
        assert np.all(np.isnan(found[i]))
    for i in (1, 3):
        own = slice(2 * i, 2 * i + 2)
        expected = step_of(weights[own], dampings[i], model, previous, x[own], y[own])
        np.testing.assert_allclose(found[i], expected, rtol=1e-3, atol=1e-5)


WRONG = {
    "space": (lambda: take(space="kernel"), ValueError, "`space` must be one of"),
    "damping": (
        lambda: take(damping=-0.1),
        ValueError,
        "`damping` must not be negative, NaN or infinite; got -0.1",
    ),
    "damping array": (
        lambda: take(damping=jnp.ones(2)),
        ValueError,
        r"`damping` must be float \| .*an array of shape \(2,\)",
    ),
    "momentum": (lambda: take(momentum="0.9"), TypeError, "`momentum` must be"),
    "weights": (lambda: take(weights=-1), ValueError, "`weights` must not be negative"),
    "number of weights": (
        lambda: take(weights=(1.0, 2.0))(network(), X, Y),
        ValueError,
        "`weights` must have one entry for each of 1 terms; got 2",
    ),
    "solver": (
        lambda: take(solver="cg"),
        TypeError,
        r"`solver` must be one of \('cholesky', 'eigh'\), or a solver of lineax",
    ),
    "accumulator": (
        lambda: take(accumulator=eqxbatch.Concat()),
        TypeError,
        r"`accumulator` must be Sum \| Mean",
    ),
    "block_size": (
        lambda: take(block_size=1.5),
        TypeError,
        r"`block_size` must be int \| MemoryBudget \| None; got 1.5",
    ),
    "microbatch_size": (
        lambda: take(microbatch_size=0),
        ValueError,
        "`microbatch_size` must be at least 1",
    ),
    "integers": (
        lambda: take(lambda model, x, y: jnp.round(x).astype(int))(network(), X, Y),
        ValueError,
        "`residual` must return arrays of an inexact dtype.*got dtype int32",
    ),
    "nothing": (
        lambda: take(lambda model, x, y: None)(network(), X, Y),
        ValueError,
        "`residual` must return at least one array",
    ),
    "pair": (
        lambda: take(has_residual=True)(network(), X, Y),
        ValueError,
        r"must return a pair `\(output, residual\)`",
    ),
    "shapes of a pair": (
        lambda: take(lambda model, x, y: (model(x), y[0]), has_residual=True)(
            network(), X, Y
        ),
        ValueError,
        "the second output of `residual` must be",
    ),
    "previous": (
        lambda: take(momentum=0.9)(network(), X, X, Y),
        ValueError,
        "The previous step must have the structure",
    ),
    "no previous": (
        lambda: take(momentum=0.9)(network()),
        ValueError,
        "the previous step, or None for the first; got 1 positional",
    ),
    "batches": (
        lambda: take([fits, fits])(network(), X),
        ValueError,
        "For 2 terms, the model is followed by one batch for each",
    ),
    "axes": (
        lambda: take([fits, fits], in_axes={"x": 0})(network(), X, X),
        ValueError,
        "For several terms, `in_axes` must be a tuple",
    ),
    "number of axes": (
        lambda: take([fits, fits], in_axes=(0,))(network(), X, X),
        ValueError,
        "`in_axes` must have one entry for each of 2 terms; got 1",
    ),
    "sizes": (
        lambda: take()(network(), X, Y[:3]),
        ValueError,
        "must agree on the number of examples",
    ),
    "weights of examples": (
        lambda: take(accumulator=eqxbatch.Mean(weights=jnp.ones(3)))(network(), X, Y),
        ValueError,
        "needs one weight for each example",
    ),
    "negative weights": (
        lambda: take(accumulator=eqxbatch.Mean(weights=-jnp.ones(7)))(network(), X, Y),
        RuntimeError,
        "must not be negative or NaN here",
    ),
    "negative damping": (
        lambda: take(damping=jnp.asarray(-0.1))(network(), X, Y),
        RuntimeError,
        "`damping` must not be negative",
    ),
    "function": (lambda: take(3), TypeError, "`residual` must be callable"),
    "terms": (lambda: take([fits, 3]), TypeError, "must be a sequence of functions"),
    "no terms": (lambda: take([]), ValueError, "at least one function"),
    "no parameters": (
        lambda: take()(jnp.arange(3), X, Y),
        ValueError,
        "no arrays of an inexact dtype",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        call()


def test_missing_damping():
    with pytest.raises(TypeError, match="damping"):
        eqxbatch.filter_gauss_newton_step(fits)
