"""Damped systems with curvature matrices, against dense solves in float64."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqxbatch import (
    AbstractProgressMeter,
    curvature_solve,
    filter_ggn,
    filter_kfac,
    filter_micro_grad,
    GGNOperator,
    HessianOperator,
    KroneckerOperator,
    Sum,
)
from eqxbatch._base.versions import made_varying
from ..helpers import (
    assert_same,
    CountTraces,
    drawn,
    KINDS,
    make_mesh,
    memory,
    normal,
    put,
    variants,
)


DAMPING = 0.05


def predict(model, x, label):
    return model(x)


def cross_entropy(logits, x, label):
    return -jax.nn.log_softmax(logits)[label]


def loss(model, x, label):
    return cross_entropy(model(x), x, label)


@eqx.filter_jit
def gradients(model, x, labels):
    """Those of all examples."""
    of_each = eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(None, 0, 0))
    return of_each(model, x, labels)


def bent(w, x):
    return jnp.tanh(w @ x)


def squared(out, x):
    return out**2


def data(num, dtype=float):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num, 4)).astype(dtype)
    return jax.device_put(x), jax.device_put(np.arange(num, dtype=np.int32) % 3)


def flat(tree):
    """Columns as rows of one matrix in NumPy."""
    leaves = jax.device_get(jax.tree.leaves(tree))
    return np.concatenate(
        [x.reshape(len(x), math.prod(x.shape[1:])).astype(float) for x in leaves], 1
    )


def matrix(num, seed=0):
    """A positive definite matrix with large and small eigenvalues."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((num, num)))
    return basis * np.geomspace(1, 1e-3, num) @ basis.T


def dense(entries, dtype=float, tags=lineax.positive_semidefinite_tag):
    """A matrix as an operator on PyTrees with an array, a scalar and None."""
    size = len(entries)
    entries = jax.device_put(np.asarray(entries, dtype))
    struct = {
        "a": jax.ShapeDtypeStruct((size - 1,), dtype),
        "b": jax.ShapeDtypeStruct((), dtype),
        "none": None,
    }

    def product(vector):
        image = entries @ jnp.append(vector["a"], vector["b"])
        return {"a": image[:-1], "b": image[-1], "none": None}

    return lineax.FunctionLinearOperator(product, struct, tags)


def columns(rows, dtype=float):
    """The rows of a matrix as vectors of `dense`."""
    rows = np.asarray(rows, dtype)
    a, b = jax.device_put((rows[..., :-1], rows[..., -1]))
    return {"a": a, "b": b, "none": None}


def two_steps(entries, inverse, right, num):
    """Preconditioned conjugate gradients as in textbooks, for one column."""
    x, r = np.zeros_like(right), right
    z = p = inverse @ r
    for _ in range(num):
        image = entries @ p
        length = r @ z / (p @ image)
        x, new = x + length * p, r - length * image
        z_new = inverse @ new
        p, r, z = z_new + (new @ z_new) / (r @ z) * p, new, z_new
    return x


class System(NamedTuple):
    """A Gauss-Newton matrix plus damping, by products and dense, and an inverse."""

    operator: GGNOperator
    entries: np.ndarray
    unravel: Callable
    inverse: KroneckerOperator


@functools.cache
def network():
    """Made once, within the first test that needs it."""
    model = drawn(eqx.nn.MLP, 4, 3, 5, 1, jnp.tanh, key=jax.random.key(0))
    batch = data(30)
    operator = GGNOperator(predict, cross_entropy, model, *batch, microbatch_size=7)
    ggn = filter_ggn(predict, cross_entropy, flat=True)
    entries, unravel = ggn(model, *batch)
    factors = filter_kfac(predict, cross_entropy, corrected=True)(model, *batch)
    entries = np.asarray(entries) + DAMPING * np.eye(len(entries))
    return System(operator, entries, unravel, factors.operator(DAMPING).inverse())


@pytest.mark.usefixtures("x64")
class TestGaussNewton:
    """Products of a network, and its Kronecker factors as the preconditioner."""

    # Columns in blocks of 3.
    @pytest.mark.parametrize("num", variants((0, 1, 2, 3, 4, 7), 1, 2, 3, 7))
    def test_is_the_dense_solution(self, num, getkey):
        operator, entries, unravel, inverse = network()
        right = np.asarray(normal(getkey(), (num, len(entries)), float))
        settings = {"damping": DAMPING, "rtol": 1e-12, "block_size": 3}
        found = curvature_solve(
            operator, unravel(jax.device_put(right)), preconditioner=inverse, **settings
        )
        assert found.residuals.shape == found.num_products.shape == (num,)
        assert found.has_converged.all()
        assert not found.is_indefinite.any()
        expected = np.linalg.solve(entries, right.T).T
        np.testing.assert_allclose(flat(found.solution), expected, rtol=1e-8, atol=1e-9)

    def test_two_steps_into_against(self, getkey):
        operator, entries, _, inverse = network()
        model, *batch = operator.args
        queries = [x[:4] for x in batch]
        vectors = gradients(model, *queries)
        settings = {"preconditioner": inverse, "max_steps": 2, "block_size": 3}
        found = curvature_solve(operator, vectors, damping=DAMPING, **settings)
        dense_inverse = np.asarray(inverse.as_matrix())
        right = flat(vectors)
        expected = [two_steps(entries, dense_inverse, x, 2) for x in right]
        np.testing.assert_allclose(
            flat(found.solution), expected, rtol=1e-9, atol=1e-12
        )
        # To stop early is no error, but no solution either.
        assert not found.has_converged.any()
        assert found.num_products.tolist() == [2] * 4
        left = right - np.asarray(expected) @ entries
        norms = np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
        np.testing.assert_allclose(found.residuals, norms, rtol=1e-9)
        # The directions meet all gradients, of which none is stored.
        scores = jax.lax.map(
            lambda direction: (
                filter_micro_grad(loss, against=direction, microbatch_size=7)(
                    model, *batch
                )[1].inner_products
            ),
            found.solution,
        )
        of_batch = flat(gradients(model, *batch))
        np.testing.assert_allclose(
            scores, np.asarray(expected) @ of_batch.T, rtol=1e-8, atol=1e-12
        )

    def test_one_right_hand_side_within_jit(self, getkey):
        operator, entries, unravel, inverse = network()
        right = normal(getkey(), (len(entries),), float)

        @eqx.filter_jit
        def solve(operator, vector, damping):
            return curvature_solve(
                operator, vector, damping=damping, preconditioner=inverse, rtol=1e-12
            )

        found = solve(operator, unravel(right), jnp.asarray(DAMPING))
        assert found.residuals.shape == found.has_converged.shape == ()
        assert found.has_converged
        expected = np.linalg.solve(entries, right)
        solution = jax.tree.map(lambda x: x[None], found.solution)
        np.testing.assert_allclose(flat(solution)[0], expected, rtol=1e-8, atol=1e-9)
        with pytest.raises(Exception, match="`damping` must be at least 0"):
            jax.block_until_ready(solve(operator, unravel(right), jnp.asarray(-1.0)))


@pytest.mark.usefixtures("x64")
class TestColumns:
    """Each column is solved as if it were the only one."""

    entries = matrix(6)

    def solve(self, rows, **settings):
        settings = {"damping": 0.0, "rtol": 1e-10, **settings}
        return curvature_solve(dense(self.entries), columns(rows), **settings)

    @pytest.mark.parametrize("has_preconditioner", (False, True))
    def test_columns_do_not_meet(self, has_preconditioner):
        rng = np.random.default_rng(1)
        rows = rng.standard_normal((5, 6))
        rows[1] = 0
        rows[2, 3], rows[3, 0] = np.nan, np.inf
        # Very small and very large columns need as many steps as others.
        rows[4] = rows[0] * 2.0**-600
        other = dense(np.linalg.inv(self.entries + np.diag(np.arange(6) / 1e3)))
        settings = {"preconditioner": other if has_preconditioner else None}
        found = self.solve(rows, **settings)
        solution = flat(found.solution)
        expected = np.linalg.solve(self.entries, rows[0])
        np.testing.assert_allclose(solution[0], expected, rtol=1e-6)
        np.testing.assert_allclose(solution[4] * 2.0**600, solution[0], rtol=1e-9)
        np.testing.assert_array_equal(solution[1], 0)
        assert np.isnan(solution[2:4]).all()
        assert found.has_converged.tolist() == [True, True, False, False, True]
        assert found.num_products.tolist()[1:4] == [0, 0, 0]
        assert found.num_products[0] == found.num_products[4] > 2
        assert np.isnan(found.residuals[2:4]).all()
        assert found.residuals[1] == 0
        assert not found.is_indefinite.any()
        # The same in another block, with others.
        alone = self.solve(rows[[4, 0]], block_size=1, **settings)
        np.testing.assert_allclose(flat(alone.solution)[1], solution[0], rtol=1e-9)

    def test_columns_stop_at_different_steps(self):
        values, basis = np.linalg.eigh(self.entries)
        # An eigenvector takes one step and one product for the true residual.
        rows = np.stack([basis[:, 2], basis.sum(1)])
        found = self.solve(rows)
        assert found.has_converged.all()
        assert found.num_products[0] == 2 < found.num_products[1]
        np.testing.assert_allclose(flat(found.solution)[0], rows[0] / values[2])

    def test_a_product_of_nan_is_of_its_column(self):
        struct = jax.ShapeDtypeStruct((3,), float)
        operator = lineax.FunctionLinearOperator(
            lambda v: jnp.where(v[0] < 0, jnp.nan, v * jnp.arange(1.0, 4.0)),
            struct,
            lineax.symmetric_tag,
        )
        found = curvature_solve(
            operator, jnp.asarray([[-1.0, 1, 1], [1, 0, 0]]), damping=0.0
        )
        assert jnp.isnan(found.solution[0]).all()
        np.testing.assert_allclose(found.solution[1], [1, 0, 0])
        assert found.has_converged.tolist() == [False, True]
        assert not found.is_indefinite.any()

    def test_indefinite_is_said(self):
        values, basis = np.linalg.eigh(self.entries)
        signs = np.where(np.arange(6) == 2, -1, 1)
        operator = dense(basis * (values * signs) @ basis.T, tags=lineax.symmetric_tag)
        # Only the first column has no share in the negative eigenvector.
        rows = np.stack([basis[:, 0] + basis[:, 5], basis[:, 2], basis.sum(1)])
        settings = {"rtol": 1e-8, "max_steps": 50}
        found = curvature_solve(operator, columns(rows), damping=0.0, **settings)
        assert found.is_indefinite.tolist() == [False, True, True]
        assert found.has_converged.tolist() == [True, False, False]
        # Nothing was added along the direction without positive curvature.
        np.testing.assert_array_equal(flat(found.solution)[1], 0)
        assert found.residuals[1] == 1
        assert np.isfinite(flat(found.solution)).all()
        # The damping makes it positive.
        damped = curvature_solve(operator, columns(rows), damping=2.0, **settings)
        assert damped.has_converged.all()
        # A preconditioner that is not positive is said, too.
        wrong = curvature_solve(
            dense(self.entries), columns(rows), damping=0.0, preconditioner=operator
        )
        assert wrong.is_indefinite.tolist() == [False, True, True]
        assert not wrong.has_converged[1:].any()

    def test_hessian(self, getkey):
        x = normal(getkey(), (5, 3), float)
        operator = HessianOperator(
            lambda w, x: jnp.cosh(w @ x), jnp.zeros(3), x, in_axes=0, accumulator=Sum()
        )
        found = curvature_solve(operator, jnp.ones(3), damping=0.1, rtol=1e-10)
        entries = np.asarray(x).T @ np.asarray(x) + 0.1 * np.eye(3)
        np.testing.assert_allclose(found.solution, np.linalg.solve(entries, np.ones(3)))

    def test_progress(self):
        told = []

        class Meter(AbstractProgressMeter):
            def start(self, num_blocks, num_done):
                told.append(num_blocks)
                return 0

            def step(self, state, num_nans, residual=None):
                told.append(residual)
                return state + 1

            def close(self, state):
                told.append(state)

        rows = np.random.default_rng(3).standard_normal((5, 6))
        settings = {"max_steps": 20, "block_size": 2}
        quiet, loud = self.solve(rows, **settings), None
        loud = self.solve(rows, progress=Meter(), **settings)
        assert_same(loud.solution, quiet.solution, tol=1e-7)
        steps = sum(int(loud.num_products[i : i + 2].max()) for i in (0, 2, 4))
        assert told[0] == 3 * 20
        assert told[-1] == len(told) - 2 == steps
        assert told[-2] == loud.residuals[4]
        # Without columns, there is nothing to tell.
        none = self.solve(rows[:0], progress=True)
        assert none.residuals.shape == (0,)
        with pytest.raises(TypeError, match="`progress` is for calls outside"):
            jax.jit(lambda x: self.solve(rows, progress=True, damping=x))(0.1)

    def test_within_transforms(self):
        right = np.arange(1.0, 7.0)
        solve = lambda damping, right: (
            curvature_solve(
                dense(self.entries), columns(right), damping=damping, rtol=1e-12
            ).solution
        )
        dampings = jnp.asarray([0.5, 1.0])
        found = jax.vmap(solve, (0, None))(dampings, right)
        for x, damping in zip(flat(found), dampings, strict=True):
            entries = self.entries + damping * np.eye(6)
            np.testing.assert_allclose(x, np.linalg.solve(entries, right), rtol=1e-8)
        # The derivative of steps along an eigenvector is not that of the solution.
        of_damping = lambda damping: solve(damping, right)
        for of in (of_damping, jax.jit(of_damping)):
            with pytest.raises(TypeError, match="`curvature_solve` has no derivative"):
                jax.jvp(of, (dampings[0],), (dampings[1],))
        with pytest.raises(TypeError, match="`curvature_solve` has no derivative"):
            jax.grad(lambda x: solve(x, right)["b"])(0.5)
        stopped = lambda x: solve(jax.lax.stop_gradient(x), right)["b"] * x
        np.testing.assert_allclose(jax.grad(stopped)(0.5), found["b"][0])


def test_a_residual_that_does_not_fall_is_no_solution():
    # In float32, the residual of the recurrence falls without end.
    entries = matrix(40)
    right = np.random.default_rng(2).standard_normal((3, 40))
    settings = {"damping": 0.0, "max_steps": 5_000}
    operator, vectors = dense(entries, np.float32), columns(right, np.float32)
    found = curvature_solve(operator, vectors, rtol=1e-7, **settings)
    assert not found.has_converged.any()
    assert not found.is_indefinite.any()
    assert found.num_products.max() < 5_000
    # What is said of the residual is true.
    true = np.linalg.norm(right - flat(found.solution) @ entries, axis=1)
    assert (true < 2 * np.linalg.norm(right, axis=1) * found.residuals).all()
    reached = curvature_solve(operator, vectors, **settings)
    assert reached.has_converged.all()
    assert reached.residuals.max() < 1.2e-4


@pytest.mark.parametrize("scale", (1e-25, 1e25))
def test_the_size_of_a_preconditioner_does_not_matter(scale):
    found = curvature_solve(
        dense(np.diag([1.0, 2.0, 4.0]), np.float32),
        columns([1.0, 2.0, 3.0], np.float32),
        damping=0.0,
        preconditioner=dense(np.diag([scale] * 3), np.float32),
        max_steps=2**40,
    )
    assert found.has_converged
    assert not found.is_indefinite
    np.testing.assert_allclose(found.solution["a"], [1, 1], rtol=1e-4)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_half_precision(dtype):
    # Images of the second operator are larger than numbers in float16.
    for scale in (1, 1e3):
        operator = dense(np.diag([1.0, 2.0, 4.0]) / scale, jnp.dtype(dtype))
        right = columns([[1e-4, 2e-4, 4e-4], [1.0, 1.0, 1.0]], jnp.dtype(dtype))
        inverse = dense(np.diag([1.0, 0.5, 0.125]) * scale, jnp.dtype(dtype))
        found = curvature_solve(operator, right, damping=0.0, preconditioner=inverse)
        assert found.solution["a"].dtype == jnp.dtype(dtype)
        assert found.residuals.dtype == jnp.float32
        assert found.has_converged.all()
        expected = np.asarray([[1e-4, 1e-4, 1e-4], [1.0, 0.5, 0.25]]) * scale
        np.testing.assert_allclose(flat(found.solution), expected, rtol=0.05)


def test_a_solution_out_of_range_has_not_converged():
    found = curvature_solve(
        dense(np.eye(2) * 1e-3, np.float16),
        columns([[1e2, 1.0], [1.0, 1.0]], np.float16),
        damping=0.0,
    )
    assert jnp.isinf(found.solution["a"][0])
    assert found.has_converged.tolist() == [False, True]
    # Nor has one that is too small: some of these entries become zero.
    found = curvature_solve(
        dense(np.eye(2), np.float16),
        columns([[1e-6, 1e-4], [1e-6, 1e-6], [1e-2, 1e-6]], np.float16),
        damping=300.0,
    )
    np.testing.assert_array_equal(flat(found.solution)[1], 0)
    assert found.has_converged.tolist() == [False, False, True]
    np.testing.assert_allclose(found.residuals[1], 1)


@pytest.mark.usefixtures("x64")
def test_dtypes_of_leaves_differ():
    w = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(3)}
    fun = lambda w: jnp.sum(w["a"] ** 2).astype(float) + jnp.sum(w["b"] ** 2)
    found = curvature_solve(HessianOperator(fun, w), w, damping=1.0, rtol=1e-6)
    assert_same(found.solution, jax.tree.map(lambda x: x / 3, w), tol=1e-6)


def test_equal_calls_are_traced_once(getkey):
    traced = CountTraces(bent)
    batch = normal(getkey(), (5, 3))

    def solve(scale, **settings):
        operator = GGNOperator(traced, squared, scale * jnp.ones(3), batch)
        vectors = jnp.ones((4, 3)) * scale
        return curvature_solve(operator, vectors, **{"damping": 0.1, **settings})

    first = solve(1.0)
    before = traced.num
    assert before <= 3
    # Numbers of the solver are arguments of one program.
    solve(2.0, damping=0.2, max_steps=3, rtol=0.01)
    assert_same(solve(1.0), first)
    assert traced.num == before


@pytest.mark.cpu
def test_memory_is_flat():
    model = drawn(eqx.nn.MLP, 4, 3, 16, 1, jnp.tanh, key=jax.random.key(0))
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def solve(parameters, vectors, x, labels):
        model = eqx.combine(parameters, static)
        operator = GGNOperator(
            predict, cross_entropy, model, x, labels, microbatch_size=16
        )
        return curvature_solve(operator, vectors, damping=0.1, block_size=2)

    def temporaries(num, k):
        vectors = jax.tree.map(lambda x: jnp.ones((k, *x.shape)), parameters)
        args = parameters, vectors, *data(num, np.float32)
        return memory(solve, *args).temp_size_in_bytes

    # Neither with examples nor with columns, but for the numbers that are returned.
    assert temporaries(1_600, 40) < 1.2 * temporaries(160, 4)


@pytest.mark.devices
class TestMeshes:
    x = normal(jax.random.key(1), (8, 3))
    rows = normal(jax.random.key(2), (5, 3))
    w = jnp.ones(3)

    def solve(self, w, x, rows, **settings):
        # Inside of `jax.shard_map`, the matrix is a sum over devices.
        operator = GGNOperator(bent, squared, w, x, accumulator=Sum())
        return curvature_solve(operator, rows, damping=0.1, block_size=2, **settings)

    @pytest.mark.parametrize("kind", KINDS)
    def test_on_a_mesh(self, kind):
        mesh = make_mesh(kind)
        x = put(self.x, mesh, "data")
        expected = self.solve(self.w, self.x, self.rows)
        assert expected.has_converged.all()
        for w, rows in ((put(self.w, mesh), put(self.rows, mesh)), (self.w, self.rows)):
            found = self.solve(w, x, rows)
            assert found.has_converged.all()
            np.testing.assert_allclose(found.solution, expected.solution, atol=1e-4)
        found = self.solve(self.w, x, self.rows, progress=True)
        np.testing.assert_allclose(found.solution, expected.solution, atol=1e-4)

    def test_inside_of_shard_map(self):
        mesh = make_mesh(AxisType.Auto)
        expected = self.solve(self.w, self.x, self.rows)
        run = lambda w, x, rows: self.solve(w, x, rows).solution
        apart = (P(), P("data"), P())
        found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=apart, out_specs=P()))(
            self.w, self.x, self.rows
        )
        np.testing.assert_allclose(found, expected.solution, atol=1e-4)
        # Devices with queries of their own would add up products of different vectors.
        rows = jnp.concatenate([self.rows[:4]] * 2)
        apart = (P(), P("data"), P("data"))
        with pytest.raises(ValueError, match="differ between devices that share one"):
            jax.jit(jax.shard_map(run, mesh=mesh, in_specs=apart, out_specs=P("data")))(
                self.w, self.x, rows
            )
        # With all examples and parameters of its own, each device solves by itself.
        apart = (P(), P(), P("data"))

        def own(w, x, rows):
            w, x = (made_varying(y, ("data",)) for y in (w, x))
            return self.solve(w, x, rows).solution

        found = jax.jit(
            jax.shard_map(own, mesh=mesh, in_specs=apart, out_specs=P("data"))
        )(self.w, self.x, rows)
        np.testing.assert_allclose(found[:4], expected.solution[:4], atol=1e-4)

    @pytest.mark.parametrize("kind", variants(KINDS, AxisType.Auto))
    def test_sharded_parameters(self, kind):
        mesh = make_mesh(kind)
        w, x, rows = (jnp.tile(y, 4)[..., :8] for y in (self.w, self.x, self.rows))
        expected = self.solve(w, x, rows)
        for right in (rows, put(rows, mesh, None, "data")):
            found = self.solve(put(w, mesh, "data"), put(x, mesh), right)
            assert found.has_converged.all()
            np.testing.assert_allclose(found.solution, expected.solution, atol=1e-3)


class TestWrongInputs:
    operator = dense(np.eye(3), np.float32)
    vectors = columns(np.eye(3), np.float32)

    @pytest.mark.parametrize(
        ("settings", "error", "match"),
        (
            ({"damping": -1.0}, ValueError, "`damping` must be at least 0; got -1.0"),
            ({"damping": float("nan")}, ValueError, "`damping` must be at least 0"),
            ({"rtol": 1.0}, ValueError, "`rtol` must be between 0 and 1; got 1.0"),
            ({"max_steps": 0}, ValueError, "`max_steps` must be at least 1; got 0"),
            ({"block_size": 0}, ValueError, "`block_size` must be at least 1; got 0"),
            ({"preconditioner": 3}, TypeError, r"`preconditioner` must.*\.inverse\(\)"),
            (
                {"preconditioner": dense(np.eye(2), np.float32)},
                ValueError,
                "`preconditioner` must be for the vectors of `operator`",
            ),
            (
                {"preconditioner": dense(np.eye(3), np.float32, tags=())},
                ValueError,
                "`preconditioner` must be symmetric; got one of type `FunctionLinear",
            ),
        ),
    )
    def test_settings(self, settings, error, match):
        with pytest.raises(error, match=match):
            curvature_solve(self.operator, self.vectors, **{"damping": 0.1, **settings})

    @pytest.mark.parametrize(
        "vectors",
        (
            jnp.ones(3),
            {"a": jnp.ones((4, 2)), "b": jnp.ones(5), "none": None},
            {"a": jnp.ones((4, 2)), "b": jnp.ones(()), "none": None},
            {"a": jnp.ones((1, 4, 2)), "b": jnp.ones((1, 4)), "none": None},
            {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(()), "none": None},
            {"a": jnp.ones(2, int), "b": jnp.ones(()), "none": None},
        ),
    )
    def test_vectors(self, vectors):
        with pytest.raises(
            ValueError, match="`vectors` must have the structure, shape"
        ):
            curvature_solve(self.operator, vectors, damping=0.1)

    def test_operators(self):
        with pytest.raises(TypeError, match="`operator` must be a `lineax"):
            curvature_solve(lambda x: x, self.vectors, damping=0.1)
        z = jnp.ones(2, complex)
        operator = lineax.DiagonalLinearOperator(z)
        with pytest.raises(ValueError, match="`operator` must be for real vectors"):
            curvature_solve(operator, z, damping=0.1)
        nothing = lineax.IdentityLinearOperator({"none": None})
        with pytest.raises(ValueError, match="`operator` must have parameters; got"):
            curvature_solve(nothing, {"none": None}, damping=0.1)
