"""Systems with kernels: against dense solves, stopped, continued, refused."""

import gc
import itertools
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import (
    AbstractProgressMeter,
    EmpiricalNTK,
    HostStore,
    kernel_solve,
    KernelOperator,
    TqdmProgressMeter,
    ZarrStore,
)
from eqxbatch._kernels.conjugate_gradients import ConjugateGradients, initial
from ..helpers import drawn, spread, thinned, variants
from ..on_cpu import environment
from .kernel_functions import rbf, white
from .on_disk import Stops


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


X, Y = numbers(61, 3), numbers(61, 2, seed=1)


def hermitian(x1, x2=None):
    x2 = x1 if x2 is None else x2
    phase = x1[:, None, 1] - x2[None, :, 1]
    k = rbf(x1, x2)
    return jax.lax.complex(k * jnp.cos(phase), k * jnp.sin(phase))


def make(kernel=rbf, x=X, dtype=jnp.float64, **settings):
    settings = {"block_size": 16, "symmetric": True, **settings}
    return KernelOperator(kernel, jnp.asarray(x, dtype), **settings)


@pytest.mark.quick
@pytest.mark.usefixtures("x64")
def test_a_kernel_with_its_examples():
    x, ridge = jnp.asarray(X), {"ridge": 0.1, "rtol": 1e-12}
    model = drawn(eqx.nn.Linear, 3, 2, key=jax.random.key(0), dtype=float)
    ntk = EmpiricalNTK(model)
    calls = (
        ((rbf, x, Y), {"symmetric": True, "block_size": 16}),
        # An estimator is symmetric, and a stored kernel has its examples.
        ((ntk, x, Y), {"store": "host"}),
        ((np.asarray(ntk(x)), Y), {"symmetric": True}),
    )
    of_ntk = solution(lambda x: ntk(x), Y, 0.1)
    expected = solution(rbf, Y, 0.1), of_ntk, of_ntk
    for (args, settings), weights in zip(calls, expected, strict=True):
        found = kernel_solve(*args, **ridge, **settings).weights
        np.testing.assert_allclose(found, weights, rtol=1e-9, atol=1e-10)


def solution(kernel, y, ridge):
    matrix = np.asarray(jax.jit(kernel)(jnp.asarray(X)))
    return np.linalg.solve(matrix + ridge * np.eye(len(X)), y)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("rank", "store"), thinned((0, 1, 10, 61), ("device", HostStore()))
)
@pytest.mark.usefixtures("x64")
def test_is_the_solution(store, rank):
    operator = make(store=store)
    for y in (jnp.asarray(Y), Y[:, 0]):
        expected = solution(rbf, y, 0.1)
        found = kernel_solve(
            operator, y, ridge=0.1, preconditioner_rank=rank, rtol=1e-13
        )
        assert found.weights.shape == y.shape
        assert found.residuals.shape == y.shape[1:]
        assert found.weights.dtype == jnp.float64
        np.testing.assert_allclose(found.weights, expected, rtol=1e-10, atol=1e-11)
        assert np.max(found.residuals) <= 1e-13
        if rank == 61:
            assert found.num_products <= 5


@pytest.mark.usefixtures("x64")
def test_preconditioners_take_fewer_products():
    x = jnp.asarray(numbers(200, 2) / 3)
    operator = KernelOperator(rbf, x, block_size=50, symmetric=True)
    y = jnp.asarray(numbers(200))
    nums = [
        kernel_solve(operator, y, ridge=1e-4, preconditioner_rank=rank).num_products
        for rank in (0, 10, 40)
    ]
    assert nums[1] < nums[0] / 1.5
    assert nums[2] < nums[1] / 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rank", spread((10, 0), 1))
def test_kernels_with_noise_on_the_diagonal(rank):
    found = kernel_solve(
        make(white),
        jnp.asarray(Y),
        ridge=0.1,
        preconditioner_rank=rank,
        rtol=1e-12,
    )
    np.testing.assert_allclose(found.weights, solution(white, Y, 0.1), rtol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("has_source", (True, False))
def test_kernels_are_freed_after_solves(has_source):
    for _ in range(2):
        operator = make(store=HostStore())
        if not has_source:
            operator = KernelOperator(operator.matrix.reader.array, symmetric=True)
        reader = weakref.ref(operator.matrix.reader)
        kernel_solve(operator, jnp.asarray(Y), ridge=0.1, preconditioner_rank=3)
        del operator
        gc.collect()
        assert reader() is None


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
def test_complex_kernels():
    for y in (Y, Y + 1j * numbers(61, 2, seed=2)):
        found = kernel_solve(
            make(hermitian, store=HostStore()), jnp.asarray(y), ridge=0.1, rtol=1e-12
        )
        assert found.weights.dtype == jnp.complex128
        expected = solution(hermitian, y, 0.1)
        np.testing.assert_allclose(found.weights, expected, rtol=1e-9, atol=1e-10)
        assert found.residuals.dtype == jnp.float64


@pytest.mark.parametrize(
    ("rank", "store"),
    variants(
        [(rank, store) for rank in (0, 10) for store in ("device", HostStore())],
        *((0, "device"), (0, HostStore()), (10, "device")),
    ),
)
@pytest.mark.usefixtures("x64")
def test_complex_right_hand_sides_of_real_kernels(store, rank):
    y = Y + 1j * numbers(61, 2, seed=2)
    for dtype in (jnp.float64, jnp.float32):
        found = kernel_solve(
            make(store=store, dtype=dtype),
            jnp.asarray(y),
            ridge=0.1,
            preconditioner_rank=rank,
            rtol=1e-12 if dtype == jnp.float64 else 1e-5,
        )
        assert found.weights.dtype == jnp.complex128
        rtol = 1e-9 if dtype == jnp.float64 else 1e-3
        np.testing.assert_allclose(
            found.weights, solution(rbf, y, 0.1), rtol=rtol, atol=rtol / 10
        )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float64))
def test_tiny_and_huge_right_hand_sides(dtype):
    """Their squares, or they themselves, are outside of the range of the dtype."""
    operator = make(dtype=dtype, store=HostStore())
    settings = {"ridge": 0.1, "preconditioner_rank": 5, "rtol": 1e-10}
    sizes = np.array([2.0**-1000, 2.0**-140, 0, 1, 2.0**140, 2.0**1000])
    y = Y[:, :1] * np.where(sizes == 0, 0, 1)
    expected = kernel_solve(operator, jnp.asarray(y), **settings)
    found = kernel_solve(operator, jnp.asarray(y * sizes), **settings)
    assert np.array_equal(found.weights, np.asarray(expected.weights) * sizes)
    assert np.array_equal(found.residuals, expected.residuals)


@pytest.mark.versions
def test_single_precision():
    """A stored kernel is multiplied in float64 where the residual asks for it."""
    # Examples that are close to each other make the largest eigenvalue large.
    x = numbers(400, 2) / 5
    y = jnp.asarray(numbers(400), jnp.float32)
    computed = KernelOperator(
        rbf, jnp.asarray(x, jnp.float32), block_size=100, symmetric=True
    )
    stored = KernelOperator(np.asarray(computed.as_matrix()), symmetric=True)
    found = kernel_solve(stored, y, ridge=1e-3, preconditioner_rank=30)
    assert found.weights.dtype == jnp.float32
    assert found.residuals <= 1e-6
    matrix = np.asarray(computed.as_matrix(), np.float64) + 1e-3 * np.eye(400)
    exact = np.linalg.solve(matrix, np.asarray(y, np.float64))
    error = np.linalg.norm(found.weights - exact) / np.linalg.norm(exact)
    assert error < 1e-5
    with pytest.raises(RuntimeError, match="The relative residual does not fall below"):
        kernel_solve(computed, y, ridge=1e-3, rtol=1e-9)


@pytest.mark.usefixtures("x64")
def test_computed_in_single_precision_with_double_vectors():
    """As exact as a stored one, where 64-bit types are enabled."""
    x = jnp.asarray(numbers(200, 2) / 5, jnp.float32)
    operator = KernelOperator(rbf, x, block_size=100, symmetric=True)
    y = numbers(200)
    with jax.numpy_dtype_promotion("standard"):
        found = kernel_solve(operator, jnp.asarray(y), ridge=1e-2, rtol=1e-9)
    matrix = np.asarray(jax.jit(rbf)(x), np.float64) + 1e-2 * np.eye(200)
    # Blocks may differ from the whole kernel by rounding in single precision.
    residual = matrix @ np.asarray(found.weights) - y
    assert np.linalg.norm(residual) < 1e-4 * np.linalg.norm(y)
    assert found.residuals <= 1e-9


@pytest.mark.parametrize("block_size", spread((100, None), 1))
def test_defaults_fit_single_precision(block_size):
    """A wide kernel, which took hundreds of products or failed by default."""
    x = jnp.asarray(numbers(300, 2) / 3, jnp.float32)
    y = np.sin(3 * np.asarray(x[:, 0], np.float64))
    operator = KernelOperator(rbf, x, block_size=block_size, symmetric=True)
    for ridge in (1e-1, 1e-3):
        found = kernel_solve(operator, jnp.asarray(y, jnp.float32), ridge=ridge)
        assert found.residuals <= 1000 * jnp.finfo(jnp.float32).eps
        assert found.num_products < 20
        matrix = np.asarray(jax.jit(rbf)(x), np.float64) + ridge * np.eye(300)
        residual = matrix @ np.asarray(found.weights, np.float64) - y
        assert np.linalg.norm(residual) < 2e-3 * np.linalg.norm(y)
    # No preconditioner where there can be none.
    with pytest.raises(RuntimeError, match=r"After 2 products|not fall below"):
        kernel_solve(operator, jnp.asarray(y, jnp.float32), ridge=0.0, max_steps=2)


class LateNaNs:
    """A matrix whose products have NaNs from the third one on."""

    def __init__(self):
        self.num = 0

    def __call__(self, vectors, is_exact):
        self.num += 1
        return 2 * vectors if self.num < 2 else np.nan * vectors


def test_late_nans():
    method = ConjugateGradients(LateNaNs(), lambda x: x, numbers(5, 2), 1e-6)
    steps = method.steps(initial(numbers(5, 2)))
    with pytest.raises(RuntimeError, match="has NaNs or infinities"):
        list(itertools.islice(steps, 5))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num", variants((0, 1, 16, 17), 1, 16))
def test_sizes(num):
    operator = make(x=X[:num])
    for y in (Y[:num], Y[:num, 0], 0 * Y[:num], Y[:num, :0]):
        found = kernel_solve(operator, jnp.asarray(y), ridge=1.0, rtol=1e-12)
        matrix = np.asarray(jax.jit(rbf)(jnp.asarray(X[:num]))) + np.eye(num)
        np.testing.assert_allclose(
            found.weights, np.linalg.solve(matrix, y), rtol=1e-9, atol=1e-12
        )
        if not np.any(y):
            assert found.num_products == 0


class Residuals(AbstractProgressMeter):
    log: list

    def start(self, num_blocks, num_done):
        self.log.append((num_blocks, num_done))

    def step(self, state, num_nans, residual=None):
        self.log.append(residual)

    def close(self, state):
        self.log.append("closed")


@pytest.mark.usefixtures("x64")
def test_meters_get_residuals(capsys):
    log = []
    found = kernel_solve(
        make(),
        jnp.asarray(Y),
        ridge=0.1,
        preconditioner_rank=0,
        progress=Residuals(log),
        max_steps=99,
    )
    assert log[0] == (99, 0)
    assert log[-1] == "closed"
    assert len(log) == found.num_products + 2
    assert log[-2] == pytest.approx(float(np.max(found.residuals)))
    assert log[-2] <= 1e-6 < log[1]
    kernel_solve(make(), jnp.asarray(Y), ridge=0.1, progress=TqdmProgressMeter("cg"))
    shown = capsys.readouterr().err
    assert "cg" in shown
    assert "residual=" in shown
    with pytest.raises(TypeError, match="must take a third argument, the residual"):
        kernel_solve(make(), jnp.asarray(Y), ridge=0.1, progress=Stops(None, None, []))


class StopsAt(AbstractProgressMeter):
    """Raises at a product, as Ctrl-C does."""

    num: int

    def start(self, num_blocks, num_done):
        return num_done

    def step(self, state, num_nans, residual=None):
        if state + 1 == self.num:
            raise KeyboardInterrupt
        return state + 1

    def close(self, state):
        pass


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
def test_a_solve_that_was_stopped(tmp_path):
    settings = {"ridge": 1e-3, "preconditioner_rank": 5, "rtol": 1e-10}
    operator, y = make(store=HostStore()), jnp.asarray(Y)
    whole = kernel_solve(operator, y, **settings)
    for num in (1, 3, 4, whole.num_products):
        with pytest.raises(KeyboardInterrupt):
            kernel_solve(
                operator, y, checkpoint=tmp_path, progress=StopsAt(num), **settings
            )
    log = []
    found = kernel_solve(
        operator, y, checkpoint=tmp_path, progress=Residuals(log), **settings
    )
    assert log[0][1] > 0
    np.testing.assert_array_equal(found.weights, whole.weights)
    np.testing.assert_array_equal(found.residuals, whole.residuals)
    assert found.num_products == whole.num_products
    log.clear()
    again = kernel_solve(
        operator, y, checkpoint=tmp_path, progress=Residuals(log), **settings
    )
    np.testing.assert_array_equal(again.weights, whole.weights)
    assert log == [(1000, whole.num_products), "closed"]


@pytest.mark.usefixtures("x64")
def test_a_finished_solve_of_another_kernel(tmp_path):
    """The first product is the same: the right-hand side has one entry."""
    matrix, y = np.diag(np.full(61, 2.0)), np.zeros(61)
    y[0] = 1.0
    other = matrix.copy()
    other[30:, 30:] += np.eye(31) + 0.1
    run = lambda matrix: kernel_solve(
        KernelOperator(matrix, symmetric=True),
        jnp.asarray(y),
        ridge=0.1,
        checkpoint=tmp_path,
    )
    run(matrix)
    with pytest.raises(ValueError, match="`checkpoint` belongs to another kernel"):
        run(other)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num", (4, None))
def test_a_solve_continues_where_products_round_otherwise(num, tmp_path):
    """And the residual of a finished one is that of the kernel at hand."""
    matrix, y = np.asarray(jax.jit(rbf)(jnp.asarray(X))), jnp.asarray(Y)
    noise = numbers(61, 61, seed=3)
    other = matrix + 1e-9 * (noise + noise.T)
    run = lambda matrix, **settings: kernel_solve(
        KernelOperator(matrix, symmetric=True),
        y,
        ridge=1e-2,
        rtol=1e-10,
        preconditioner_rank=0,
        checkpoint=tmp_path,
        **settings,
    )
    if num is None:
        run(matrix)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(matrix, progress=StopsAt(num))
    log = []
    found = run(other, progress=Residuals(log))
    assert log[0][1] > 0
    residual = other @ np.asarray(found.weights) + 1e-2 * found.weights - y
    true = np.linalg.norm(residual, axis=0) / np.linalg.norm(y, axis=0)
    assert np.max(true) <= 1.001e-10
    np.testing.assert_allclose(found.residuals, true, rtol=1e-3)


SCRIPT = """
    import sys

    import jax.numpy as jnp
    import numpy as np

    import eqxbatch


    def rbf(x1, x2=None):
        x2 = x1 if x2 is None else x2
        return jnp.exp(-jnp.sum((x1[:, None] - x2[None]) ** 2, axis=-1))


    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(300, 2)), jnp.float32)
    y = jnp.asarray(random.normal(size=(300, 3)), jnp.float32)
    operator = eqxbatch.KernelOperator(
        rbf,
        x,
        block_size=100,
        symmetric=True,
        store=eqxbatch.ZarrStore(sys.argv[1] + "/kernel"),
    )
    print("begin", flush=True)
    found = eqxbatch.kernel_solve(
        operator,
        y,
        ridge=1e-2,
        preconditioner_rank=5,
        checkpoint=sys.argv[1] + "/solve",
    )
    np.save(sys.argv[1] + "/weights.npy", found.weights)
"""


@pytest.mark.matrix
def test_a_solve_that_is_killed_four_times(tmp_path):
    """At random, while it runs; it ends with the bits of one that was never killed."""
    rng = random.Random(0)

    def begin(folder):
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder)],
            stdout=subprocess.PIPE,
            env=environment(),
        )
        with process.stdout as out:
            out.readline()
        return process

    process = begin(tmp_path / "whole")
    assert process.wait() == 0
    num_killed, folder = 0, tmp_path / "killed"
    while num_killed < 4:
        process = begin(folder)
        try:
            process.wait(rng.uniform(0.0, 1.2))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            num_killed += 1
        else:
            # It ended before: once more, from the beginning.
            assert process.returncode == 0
            shutil.rmtree(folder / "solve")
    process = begin(folder)
    assert process.wait() == 0
    got, expected = (
        np.load(path / "weights.npy") for path in (folder, tmp_path / "whole")
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.usefixtures("unchecked")
def test_checkpoints_of_other_problems(tmp_path):
    y = jnp.asarray(Y)
    run = lambda operator, y=y, **settings: kernel_solve(
        operator, y, **{"ridge": 0.1, "checkpoint": tmp_path, **settings}
    )
    # A run was killed before it had written what the problem is.
    (tmp_path / "problem.json.partial").write_text("{")
    run(make())
    numpy = {"preconditioner_rank": np.int64(2), "rtol": np.float32(1e-4)}
    run(make(), checkpoint=tmp_path / "numpy", **numpy)
    for settings in ({"ridge": 0.2}, {"rtol": 1e-5}, {"y": 2 * y}):
        with pytest.raises(ValueError, match="`checkpoint` belongs to another problem"):
            run(make(), **settings)
    with pytest.raises(ValueError, match="`checkpoint` belongs to another kernel"):
        run(make(scale=1.001))
    (tmp_path / "state.npz").write_bytes(b"half of it")
    with pytest.raises(ValueError, match="`checkpoint` has a damaged file"):
        run(make())
    (tmp_path / "problem.json").unlink()
    with pytest.raises(ValueError, match="something other than a checkpoint"):
        run(make())
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.partial").write_text("mine")
    with pytest.raises(ValueError, match="something other than a checkpoint"):
        run(make(), checkpoint=own)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        kernel_solve(make(), y, ridge=0.1, checkpoint=file)


@pytest.mark.usefixtures("x64")
def test_damaged_checkpoints(tmp_path):
    """Every flipped bit and every cut is an error that names the file."""
    operator = KernelOperator(np.eye(3), symmetric=True)
    solve = lambda: kernel_solve(
        operator, jnp.ones(3), ridge=0.1, preconditioner_rank=1, checkpoint=tmp_path
    )
    expected = solve()
    for name in ("problem.json", "state.npz", "preconditioner.npz"):
        file = tmp_path / name
        data = file.read_bytes()
        places = range(0, len(data), 1 + len(data) // 40)
        flips = [
            data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
            for at in places
        ]
        for damaged in (*flips, data[:-1], data[:3], b"", b"[]"):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="`checkpoint` ") as e:
                solve()
            assert str(tmp_path) in str(e.value)
        file.unlink()
        if name == "problem.json":
            file.write_bytes(data)
        # What is left is used, and the rest is computed.
        np.testing.assert_allclose(solve().weights, expected.weights, rtol=1e-9)


def negative(x1, x2=None):
    return -rbf(x1, x2)


def broken(x1, x2=None):
    return rbf(x1, x2) / jnp.where(x1[:, :1] > 1.5, jnp.nan, 1.0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kernel", "settings", "error", "match"),
    (
        (negative, {}, RuntimeError, "not positive definite: a vector"),
        (broken, {}, RuntimeError, "has NaNs or infinities"),
        (
            rbf,
            {"max_steps": 3, "preconditioner_rank": 0},
            RuntimeError,
            "After 3 products, the largest",
        ),
        (rbf, {"max_steps": 0}, ValueError, "`max_steps` must be at least 1; got 0"),
        (rbf, {"ridge": -1.0}, ValueError, "`ridge` must not be negative.*got -1"),
        (rbf, {"ridge": float("nan")}, ValueError, "`ridge` must not be negative"),
        (rbf, {"rtol": 0.0}, ValueError, "`rtol` must be between 0 and 1; got 0"),
        (rbf, {"preconditioner_rank": 62}, ValueError, "between 0 and 61.*got 62"),
        (
            rbf,
            {"preconditioner_rank": 2, "ridge": 0.0},
            ValueError,
            "A preconditioner needs a `ridge` above 0",
        ),
        (
            hermitian,
            {"preconditioner_rank": 2},
            ValueError,
            "`preconditioner_rank` is for real kernels; got dtype complex128",
        ),
        (rbf, {"y": jnp.ones(60)}, ValueError, "`y` must have 61 rows.*got shape .60"),
        (rbf, {"y": jnp.full(61, jnp.inf)}, ValueError, "`y` must be finite"),
        (rbf, {"y": np.ones(61, int)}, TypeError, "`y` must be"),
        (rbf, {"progress": "tqdm"}, TypeError, "`progress` must be"),
    ),
)
def test_wrong_systems(kernel, settings, error, match):
    settings = {"y": jnp.asarray(Y), "ridge": 0.1, **settings}
    with pytest.raises(error, match=match):
        kernel_solve(make(kernel), **settings)


@pytest.mark.versions
def test_solves_are_not_within_transformations():
    operator = make(dtype=jnp.float32)
    run = lambda y: kernel_solve(operator, y, ridge=0.1).weights
    with pytest.raises(TypeError, match="`kernel_solve` runs a loop in Python"):
        jax.jit(run)(jnp.ones(61))

    def fit(scale, rank):
        kernel = lambda x, y: scale * x * y
        settings = {"ridge": 0.1, "pairwise": True, "symmetric": True}
        x = jnp.arange(3.0)
        solved = kernel_solve(kernel, x, x, preconditioner_rank=rank, **settings)
        return solved.weights[0]

    for rank in (0, 1):  # Only the kernel function is traced.
        with pytest.raises(TypeError, match="`KernelOperator` and `lineax"):
            jax.grad(fit)(1.0, rank)
    with pytest.raises(TypeError, match=r"`kernel` must be a kernel function.*; got 3"):
        kernel_solve(3, jnp.ones(3), ridge=0.1)
    with pytest.raises(ValueError, match="must be of a symmetric kernel"):
        kernel_solve(jnp.eye(3), jnp.ones(3), ridge=0.1)


@pytest.mark.usefixtures("x64")
def test_kernels_on_disk(tmp_path):
    operator = make(store=ZarrStore(tmp_path))
    found = kernel_solve(
        operator, jnp.asarray(Y), ridge=0.1, preconditioner_rank=7, rtol=1e-12
    )
    np.testing.assert_allclose(found.weights, solution(rbf, Y, 0.1), rtol=1e-9)
