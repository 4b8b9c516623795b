"""`filter_gauss_newton_step` beside dense solutions in float64."""

import functools
import re

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import lineax
import numpy as np
import pytest

import eqxbatch
from ..helpers import (
    drawn,
    forwards_only,
    only_backwards,
    rows_only,
    spread,
    thinned,
    variants,
)
from .oracle import as_numbers, close, step, system


pytestmark = pytest.mark.usefixtures("x64")


WAYS = {
    "sample": {"space": "sample"},
    "sample in blocks": {"space": "sample", "block_size": 4},
    "sample in microbatches": {"space": "sample", "microbatch_size": 4},
    "parameter": {"space": "parameter"},
    "parameter in blocks": {
        "space": "parameter",
        "block_size": 7,
        "microbatch_size": 4,
    },
    "eigh": {"space": "sample", "solver": "eigh"},
    "products of samples": {
        "space": "sample",
        "solver": lineax.CG(rtol=1e-13, atol=1e-13),
        "microbatch_size": 4,
    },
    "products of parameters": {
        "space": "parameter",
        "solver": lineax.CG(rtol=1e-13, atol=1e-13),
    },
}


def network(out=2, seed=0, width=6, use_bias=False):
    settings = {"use_bias": use_bias, "use_final_bias": False, "key": jr.key(seed)}
    return drawn(eqx.nn.MLP, 3, out, width, 1, jnp.tanh, **settings)


def draw(*shape, seed=0):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape))


def fits(model, x, y):
    return model(x) - y


def even(num):
    return np.full(num, 1 / max(num, 1))


# The others are in tests of their own, too.
COMMON_WAYS = ("sample", "sample in blocks", "parameter", "products of samples")


@pytest.mark.parametrize(
    ("way", "centre"),
    (
        *thinned(COMMON_WAYS, (False, True), quick=2),
        *(
            pytest.param(way, centre, marks=pytest.mark.matrix)
            for way in WAYS
            if way not in COMMON_WAYS
            for centre in (False, True)
        ),
    ),
)
def test_equals_dense(way, centre):
    model = network()
    for num in (1, 5) if way == "sample in blocks" else (5,):
        x, y = draw(num, 3), draw(num, 2, seed=1)
        found = eqxbatch.filter_gauss_newton_step(
            fits, damping=0.1, centre=centre, **WAYS[way]
        )(model, x, y)
        dense = system([fits], model, [(x, y)], [even(num)], centre=centre)
        expected = step(*dense, 0.1)
        if centre and num == 1:
            # One example is its own mean.
            np.testing.assert_allclose(as_numbers(found), 0, atol=1e-15)
            continue
        assert np.max(np.abs(expected)) > 1e-3
        close(found, expected)


ONE_MODE = [
    (fun, (("sample", False), ("parameter", True), ("auto", True))[(i + turn) % 3])
    for turn in range(2)
    for i, fun in enumerate((forwards_only, only_backwards, rows_only))
]


@pytest.mark.parametrize(("fun", "case"), variants(ONE_MODE, *ONE_MODE[2:]))
def test_models_with_one_derivative_mode(fun, case):
    way, centre = case
    model = {"a": draw(2, 3), "b": draw(2, seed=1)}
    x, y, previous = draw(5, 3), draw(5, 2, seed=2), {"a": draw(2, 3), "b": draw(2)}

    def residual(fun):
        # Once of parameters and an example, once of parameters alone.
        return lambda model, x, y: (
            fun(model["a"] @ x + model["b"]) * jnp.sum(fun(model["b"])) - y
        )

    solver = {"auto": lineax.CG(rtol=1e-13, atol=1e-13)}.get(way, "cholesky")
    settings = {"damping": 0.1, "centre": centre, "solver": solver, "space": way}
    of_residual = residual(jnp.sin)
    dense = system([of_residual], model, [(x, y)], [even(5)], centre=centre)
    take = eqxbatch.filter_gauss_newton_step(residual(fun), momentum=0.8, **settings)
    expected = step(*dense, 0.1, 0.8, as_numbers(previous))
    close(take(model, previous, x, y), expected)


def test_the_smaller_space_is_chosen():
    small, large = network(width=1), network(width=8)
    x, y = draw(9, 3), draw(9, 2)
    make = lambda space: eqxbatch.filter_gauss_newton_step(
        fits, damping=0.1, space=space
    )

    def program(space, model):
        traced = eqx.filter_make_jaxpr(make(space))(model, x, y)[0]
        # Without the addresses of functions in it.
        return re.sub("0x[0-9a-f]+", "", str(traced))

    for model, space in ((small, "parameter"), (large, "sample")):
        other = {"parameter": "sample", "sample": "parameter"}[space]
        chosen = program("auto", model)
        assert chosen == program(space, model)
        assert chosen != program(other, model)


class Tied(eqx.Module):
    """A weight that is used twice, a table, a scalar, and what is no parameter."""

    table: jax.Array
    weight: jax.Array
    scale: jax.Array
    name: str
    nothing: None = None
    numbers: jax.Array = eqx.field(default_factory=lambda: jnp.arange(3))

    def __call__(self, token, x):
        hidden = jnp.tanh(self.weight @ (self.table[token] + x))
        return self.scale * (self.weight.T @ hidden) + self.numbers.sum().astype(
            x.dtype
        )


class Convolution(eqx.Module):
    first: eqx.nn.Conv1d
    last: eqx.nn.Linear

    def __call__(self, x):
        return self.last(jnp.mean(jnp.tanh(self.first(x)), axis=1))


def laplacian(model, x):
    second = jnp.trace(jax.hessian(lambda x: model(x)[0])(x))
    return second + jnp.sin(x[0])


def nested(model, x):
    """The same by derivatives along each axis."""

    def along(direction):
        first = lambda x: jax.jvp(lambda x: model(x)[0], (x,), (direction,))[1]
        return jax.jvp(first, (x,), (direction,))[1]

    return jnp.sum(jax.vmap(along)(jnp.eye(3))) + jnp.sin(x[0])


def attends(model, x):
    return model(x, x, x).sum(0)


@functools.cache
def programs():
    keys = jr.split(jr.key(1), 4)
    tied = Tied(draw(5, 3), draw(4, 3, seed=1), jnp.asarray(1.5), "tied")
    tokens = jnp.array([0, 3, 3, 1, 4, 2, 0])
    conv = Convolution(
        drawn(eqx.nn.Conv1d, 2, 3, 3, key=keys[0]),
        drawn(eqx.nn.Linear, 3, 2, key=keys[1]),
    )
    attention = drawn(eqx.nn.MultiheadAttention, 2, 4, key=keys[2])
    return {
        "tied": (lambda model, *x: model(*x), tied, (tokens, draw(7, 3))),
        "convolution": (lambda model, x: model(x), conv, (draw(6, 2, 5),)),
        "attention": (attends, attention, (draw(5, 3, 4),)),
        "hessian": (laplacian, network(1), (draw(7, 3),)),
        "tree": (
            lambda model, x: {"a": model(x)[0], "b": [model(2 * x)]},
            network(use_bias=True),
            (draw(5, 3),),
        ),
        "constant": (
            lambda model, x: model.layers[0].bias + 0 * x[0],
            network(use_bias=True),
            (draw(4, 3),),
        ),
    }


# Second derivatives are in a test of several terms, too.
@pytest.mark.parametrize(
    ("name", "way"),
    (
        *thinned(
            ("tied", "tree"),
            ("sample", "sample in blocks", "parameter"),
        ),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("convolution", "sample in blocks"),
                ("attention", "parameter"),
                ("constant", "sample"),
                ("hessian", "sample in blocks"),
            )
        ),
    ),
)
def test_programs_give_the_same_step_in_both_spaces(name, way):
    fun, model, batch = programs()[name]
    num = batch[0].shape[0]
    expected = step(*system([fun], model, [batch], [even(num)], centre=False), 0.05)
    take = eqxbatch.filter_gauss_newton_step(fun, damping=0.05, **WAYS[way])
    close(take(model, *batch), expected, 1e-8 if way == "parameter" else 1e-10)


class Amplitude(eqx.Module):
    """The logarithm of a complex amplitude of real, or of complex, parameters."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        hidden = self.weight @ x.astype(self.weight.dtype) + self.bias
        if jnp.iscomplexobj(hidden):
            return jnp.sum(jnp.log(jnp.cosh(hidden)))
        return jax.lax.complex(jnp.sum(jnp.tanh(hidden)), jnp.sum(hidden[::2] ** 2))


def amplitude(is_holomorphic):
    parts = draw(2, 5, 3), draw(2, 5, seed=1)
    if is_holomorphic:
        return Amplitude(*(0.3 * jax.lax.complex(x[0], x[1]) for x in parts))
    return Amplitude(*(x[0] for x in parts))


def energies(model, x, energy):
    return model(x), energy


@pytest.mark.parametrize(
    ("is_holomorphic", "space"), thinned((False, True), ("sample", "parameter"))
)
def test_stochastic_reconfiguration(is_holomorphic, space):
    model = amplitude(is_holomorphic)
    spins = np.sign(draw(9, 3, seed=2))
    local = np.asarray(draw(9, seed=3)) + 1j * np.asarray(draw(9, seed=4))
    # Of complex numbers, as it is written down in the field.
    flat, unravel = jax.flatten_util.ravel_pytree(model)
    own = lambda flat, x: unravel(flat)(x)
    if is_holomorphic:
        of_each = jax.vmap(jax.grad(own, holomorphic=True), (None, 0))
        derivatives = jax.jit(of_each)(flat, spins)
    else:
        parts = [
            jax.vmap(jax.grad(lambda flat, x, part=part: part(own(flat, x))), (None, 0))
            for part in (jnp.real, jnp.imag)
        ]
        both = jax.jit(lambda flat, x: [part(flat, x) for part in parts])(flat, spins)
        derivatives = np.asarray(both[0]) + 1j * np.asarray(both[1])
    o, e = np.asarray(derivatives), np.asarray(local)
    o, e = o - o.mean(0), e - e.mean()
    matrix, force = o.conj().T @ o / 9, o.conj().T @ e / 9
    if not is_holomorphic:
        matrix, force = matrix.real, force.real
    expected = np.linalg.solve(matrix + 0.02 * np.eye(flat.size), force)
    found = eqxbatch.filter_gauss_newton_step(
        energies, damping=0.02, centre=True, has_residual=True, space=space
    )(model, spins, local)
    got = np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10)


@pytest.mark.cpu
@pytest.mark.matrix
def test_real_amplitudes_have_the_real_part_of_energies():
    model, spins = network(1), jnp.sign(draw(6, 3))
    real, imag = draw(2, 6, 1)
    take = eqxbatch.filter_gauss_newton_step(
        energies, damping=0.02, centre=True, has_residual=True
    )
    of_real = take(model, spins, real)
    of_complex = take(model, spins, jax.lax.complex(real, imag))
    np.testing.assert_array_equal(as_numbers(of_real), as_numbers(of_complex))


@pytest.mark.parametrize("space", variants(("sample", "parameter"), "parameter"))
def test_spring(space):
    model = network(1)
    x, y = np.asarray(draw(3, 8, 3)), np.asarray(draw(3, 8, 1, seed=1))
    take = eqxbatch.filter_gauss_newton_step(
        fits, damping=0.1, centre=True, momentum=0.8, space=space, block_size=3
    )
    previous, expected = None, np.zeros(as_numbers(model).size)
    for own in zip(x, y, strict=True):
        previous = take(model, previous, *own)
        dense = system([fits], model, [own], [even(8)], centre=True)
        # Also as the recursion of the paper has it, with a kernel of the samples.
        jacobian, residual = dense
        kernel = jacobian @ jacobian.T + 0.1 * np.eye(8)
        rest = residual - 0.8 * jacobian @ expected
        by_recursion = jacobian.T @ np.linalg.solve(kernel, rest) + 0.8 * expected
        expected = step(*dense, 0.1, 0.8, expected)
        np.testing.assert_allclose(by_recursion, expected, atol=1e-12)
        close(previous, expected)
    assert not np.allclose(expected, step(*dense, 0.1))


def interior(model, x):
    return nested(model, x)


def boundary(model, pair):
    x, value = pair
    return model(x) - value


@pytest.mark.parametrize(
    ("way", "centre"),
    (
        ("sample in blocks", True),
        pytest.param("parameter", False, marks=pytest.mark.matrix),
        pytest.param("sample", False, marks=pytest.mark.matrix),
        pytest.param("parameter", True, marks=pytest.mark.matrix),
    ),
)
def test_terms_with_batches_of_their_own(way, centre):
    model = network(1)
    inside, edge = draw(7, 3), (draw(3, 3, seed=1), draw(3, 1, seed=2))
    quadrature = np.asarray([0.5, 0.0, 2.0])
    take = eqxbatch.filter_gauss_newton_step(
        [interior, boundary],
        damping=0.1,
        centre=centre,
        weights=(0.5, jnp.asarray(3.0)),
        accumulator=(eqxbatch.Mean(), eqxbatch.Sum(weights=jax.device_put(quadrature))),
        **WAYS[way],
    )
    dense = system(
        [interior, lambda model, x, value: model(x) - value],
        model,
        [(inside,), edge],
        [0.5 * even(7), 3 * quadrature],
        centre=centre,
    )
    close(take(model, inside, edge), step(*dense, 0.1))


def test_axes_of_terms():
    model = network(1)
    inside, edge = draw(5, 3), (draw(3, 2), jnp.array([0.5]))
    inner = lambda model, x: model(x)
    take = eqxbatch.filter_gauss_newton_step(
        (inner, boundary), damping=0.1, in_axes=(0, (1, None))
    )
    dense = system(
        [inner, lambda model, x: model(x) - edge[1]],
        model,
        [(inside,), (edge[0].T,)],
        [even(5), even(2)],
    )
    close(take(model, inside, edge), step(*dense, 0.1))


@pytest.mark.parametrize(
    ("case", "kind"),
    # The others are in a test of all settings together, too.
    variants(
        [
            (("parameter", True), "sum"),
            (("sample", False), "mean"),
            (("sample", True), "count"),
        ],
        (("sample", False), "mean"),
        (("sample", True), "count"),
    ),
)
def test_weights_of_examples(case, kind):
    model, x, y = network(), draw(6, 3), draw(6, 2, seed=1)
    weights = np.asarray([1.0, 0.0, 2.5, 0.5, 1.0, 3.0])
    accumulator, shares = {
        "mean": (
            eqxbatch.Mean(weights=jax.device_put(weights)),
            weights / weights.sum(),
        ),
        "sum": (eqxbatch.Sum(weights=jax.device_put(weights)), weights),
        "count": (eqxbatch.Sum(), np.ones(6)),
    }[kind]
    space, centre = case
    take = eqxbatch.filter_gauss_newton_step(
        fits, damping=0.1, centre=centre, accumulator=accumulator, space=space
    )
    dense = system([fits], model, [(x, y)], [shares], centre=centre)
    close(take(model, x, y), step(*dense, 0.1))


class Mixed(eqx.Module):
    """Complex and real parameters in one product, and leaves that are no parameters."""

    weight: jax.Array
    bias: jax.Array
    scale: jax.Array
    unused: jax.Array
    powers: jax.Array

    def __call__(self, x):
        hidden = jnp.tanh(self.weight @ x.astype(complex) + self.bias)
        size = self.scale * jnp.sum(x ** self.powers[1].astype(x.dtype))
        return size.astype(complex) * hidden


@pytest.mark.parametrize(
    ("space", "centre"),
    variants((("sample", True), ("parameter", False)), ("parameter", False)),
)
def test_all_settings_together(space, centre):
    real, imag = 0.4 * np.asarray(draw(2, 2, 3))
    bias = np.asarray(draw(2, 2, seed=1))
    model = Mixed(
        jax.device_put(real + 1j * imag),
        jax.device_put(bias[0] + 1j * bias[1]),
        jnp.asarray(1.5),
        draw(2, seed=2),
        jnp.array([1, 2]),
    )

    def parts(model, x):
        out = model(x)
        return out, jnp.conj(out) * out**2 - jnp.sum(x).astype(complex)

    def real_part(model, x):
        return {"a": model(x).real}, {"a": jnp.cos(x[:2])}

    batches = [draw(7, 3, seed=3), draw(0, 3), draw(3, 3, seed=4)]
    weights = np.asarray([0.5, 0.0, 2.0, 1.0, 0.0, 3.0, 1.0])
    previous = Mixed(
        jax.device_put(imag + 1j * real), model.bias, model.scale, model.unused, None
    )
    take = eqxbatch.filter_gauss_newton_step(
        [parts, real_part, real_part],
        damping=0.1,
        centre=centre,
        has_residual=True,
        momentum=0.8,
        weights=(2.0, 1.0, 0.5),
        accumulator=(
            eqxbatch.Mean(weights=jax.device_put(weights)),
            eqxbatch.Mean(),
            eqxbatch.Sum(),
        ),
        space=space,
        block_size=2,
        microbatch_size=3,
    )
    found = take(model, previous, *batches)
    dense = system(
        [parts, real_part],
        model,
        [(batches[0],), (batches[2],)],
        [2 * weights / weights.sum(), np.full(3, 0.5)],
        centre=centre,
        has_residual=True,
    )
    close(found, step(*dense, 0.1, 0.8, as_numbers(previous)), 1e-9)
    assert found.powers is None
    # What no residual depends on keeps what momentum leaves of it.
    np.testing.assert_allclose(found.unused, 0.8 * previous.unused, rtol=1e-12)


@pytest.mark.parametrize("space", spread(("sample", "parameter"), 1))
def test_pseudoinverse_without_damping(space):
    model, x, y = network(1), draw(6, 3), draw(6, 1, seed=1)
    # Twice the same example makes the kernel singular.
    x, y = np.concatenate([x, x[:2]]), np.concatenate([y, y[:2] + 0.5])
    found = eqxbatch.filter_gauss_newton_step(
        fits, damping=0.0, solver="eigh", space=space
    )(model, x, y)
    jacobian, residual = system([fits], model, [(x, y)], [even(8)])
    close(found, np.linalg.lstsq(jacobian, residual, rcond=1e-10)[0], 1e-6)


def sum_of_rows(model, x, y):
    return jnp.dot(model, x), y


@pytest.mark.parametrize(
    ("ratio", "way"),
    spread(
        [
            (ratio, way)
            for way in (
                "sample in blocks",
                "sample",
                "parameter in blocks",
                "parameter",
            )
            for ratio in (2e5, 1e4)
        ],
        2,
    ),
)
def test_centred_jacobians_keep_their_digits_in_float32(way, ratio):
    """Held to NumPy in float32, which centres the Jacobian first."""
    rng, num, size, damping = np.random.default_rng(0), 20, 30, 0.01
    x = (np.sqrt(ratio) + rng.normal(size=(num, size))).astype(np.float32)
    y = rng.normal(size=num).astype(np.float32)
    found = eqxbatch.filter_gauss_newton_step(
        sum_of_rows, damping=damping, centre=True, has_residual=True, **WAYS[way]
    )(jnp.zeros(size, jnp.float32), jax.device_put(x), jax.device_put(y))

    def solved(x, y):
        x, y = x - x.mean(0), y - y.mean()
        damped = x.T @ x / num + np.eye(size, dtype=x.dtype) * x.dtype.type(damping)
        return np.linalg.solve(damped, x.T @ y / num)

    truth = solved(x.astype(np.float64), y.astype(np.float64))
    error = lambda step: np.linalg.norm(step - truth) / np.linalg.norm(truth)
    assert error(np.asarray(found)) <= 10 * error(solved(x, y)) + 1e-5


@pytest.mark.parametrize(
    ("damping", "space"), spread(((1e-3, "sample"), (1e-5, "parameter")), 1)
)
def test_small_damping_with_many_parameters(damping, space):
    """Held to Cholesky: eigenvalues may be smaller than the error of the largest."""
    rng, size = np.random.default_rng(0), 200
    values = np.logspace(0, -6, size)
    basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
    x = (basis * np.sqrt(size * values)).T.astype(np.float32)
    y = (x @ rng.normal(size=size)).astype(np.float32)
    wide = x.astype(np.float64)
    damped = wide.T @ wide / size + damping * np.eye(size)
    truth = np.linalg.solve(damped, wide.T @ y / size)

    def error(solver):
        step = eqxbatch.filter_gauss_newton_step(
            sum_of_rows, damping=damping, has_residual=True, space=space, solver=solver
        )(jnp.zeros(size, jnp.float32), jax.device_put(x), jax.device_put(y))
        return np.linalg.norm(np.asarray(step) - truth) / np.linalg.norm(truth)

    assert error("eigh") <= 10 * error("cholesky")


def test_a_singular_matrix_is_an_error():
    model, x, y = network(1), draw(3, 3), draw(3, 1)
    x, y = np.concatenate([x, x]), np.concatenate([y, y])
    take = eqxbatch.filter_gauss_newton_step(
        fits, damping=0.0, accumulator=eqxbatch.Sum(), space="parameter"
    )
    with pytest.raises(Exception, match="not positive definite in float64"):
        take(model, x, y)


def test_gradients_of_steps():
    model, x, y = network(1), draw(4, 3), draw(4, 1, seed=1)

    def norm(damping, space):
        take = eqxbatch.filter_gauss_newton_step(fits, damping=damping, space=space)
        leaves = jax.tree.leaves(eqx.filter(take(model, x, y), eqx.is_array))
        return sum(jnp.sum(x**2) for x in leaves)

    spaces = ("sample", "parameter")
    run = jax.jit(lambda d: [jax.value_and_grad(norm)(d, space) for space in spaces])
    (below, _), _ = run(jnp.asarray(0.2 - 1e-5))
    (above, _), _ = run(jnp.asarray(0.2 + 1e-5))
    for _, found in run(jnp.asarray(0.2)):
        np.testing.assert_allclose(found, (above - below) / 2e-5, rtol=1e-6)
