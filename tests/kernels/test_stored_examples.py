"""Kernels of examples that are not in memory, against those of the same arrays."""

import functools
import pathlib
import random
import shutil
import subprocess
import sys
import textwrap
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
import zarr
from jax.sharding import AxisType

from eqxbatch import (
    Concat,
    EmpiricalKernel,
    EmpiricalNNGP,
    EmpiricalNTK,
    filter_batch_kernel,
    filter_micro_vmap,
    filter_microbatch,
    FrobeniusNorm,
    kernel_solve,
    KernelOperator,
    KernelProduct,
    MemoryBudget,
    over_batches,
    ProbedNTK,
    PseudoNTK,
    TopK,
)
from eqxbatch._kernels import batch_kernel
from ..helpers import (
    aligned,
    assert_bits,
    bent,
    BLOCK,
    make_mesh,
    normal,
    thinned,
    TOTALS,
)
from ..on_cpu import environment
from .kernel_functions import AXES, rbf, Structured, white
from .on_disk import chunks, Stops


pytestmark = pytest.mark.versions


class Recorded:
    """Rows that are read by slices; counts how often each one is, and may fail."""

    def __init__(self, rows, fails=None):
        self.rows, self.fails, self.read = np.asarray(rows), fails, []
        self.shape, self.dtype = self.rows.shape, self.rows.dtype

    def __getitem__(self, rows):
        start, stop, _ = rows.indices(len(self.rows))
        if stop == 0:  # For the dtype.
            return self.rows[rows]
        if len(self.read) == self.fails:
            raise OSError("a disk")
        self.read.append((start, stop))
        return self.rows[rows]

    @property
    def most(self):
        """The largest number of rows that are read at a time."""
        return max((stop - start for start, stop in self.read), default=0)


def numbers(num, seed=0):
    return np.random.default_rng(seed).standard_normal((num, 3)).astype(np.float32)


X, Y = numbers(13), numbers(7, 1)


def same(got, expected):
    got, expected = (
        jax.tree.map(np.asarray, eqx.filter(x, lambda x: hasattr(x, "shape")))
        for x in (got, expected)
    )
    assert_bits(got, expected)


@pytest.mark.parametrize(
    ("num", "sides", "store"),
    thinned(
        (13, 0, *TOTALS[:-1]),
        ("symmetric", "same", "two", "second"),
        ("device", "host", "disk"),
    ),
)
def test_equals_examples_in_memory(num, sides, store, tmp_path):
    x, y, symmetric = numbers(num), numbers(7, 1), sides == "symmetric"
    settings = {"block_size": BLOCK, "symmetric": symmetric}
    expected = filter_batch_kernel(white, store="host", **settings)
    place = tmp_path / "kernel" if store == "disk" else store
    kernel = filter_batch_kernel(white, store=place, **settings)
    first = Recorded(x)
    if sides in ("symmetric", "same"):
        same(kernel(first), expected(x))
    elif sides == "two":
        second = Recorded(y)
        same(kernel(first, second), expected(x, y))
        assert second.read == ([(0, 4), (3, 7)] if num else [])
    else:
        same(kernel(y, first), expected(y, x))
    # All blocks fit, so that each is read once.
    starts = range(0, num, BLOCK)
    size = -(-num // max(len(starts), 1))
    starts = [min(i * size, num - size) for i in range(len(starts))]
    assert sorted(first.read) == [(i, i + size) for i in starts]


@pytest.mark.parametrize(
    "make",
    (
        EmpiricalNTK,
        EmpiricalKernel,
        pytest.param(EmpiricalNNGP, marks=pytest.mark.matrix),
        pytest.param(PseudoNTK, marks=pytest.mark.matrix),
        pytest.param(
            functools.partial(ProbedNTK, num_probes=2, key=jr.key(0)),
            marks=pytest.mark.matrix,
        ),
    ),
)
def test_estimators(make, getkey):
    ntk = make(bent(3, 2, getkey()), block_size=BLOCK)
    in_blocks = functools.partial(filter_batch_kernel, ntk, block_size=BLOCK)
    for args in ((X,), (X, Y)):
        stored = [*map(Recorded, args)]
        expected = in_blocks(store="host")(*args)
        same(ntk(*stored), expected)
        same(in_blocks()(*stored), expected)
        assert all(x.most <= BLOCK for x in stored)


def test_results_of_examples(getkey):
    """A diagonal, or features, by batches."""
    ntk = EmpiricalNTK(bent(3, 2, getkey()))
    x = Recorded(X)
    with pytest.raises(ValueError, match=r"over_batches\(filter_microbatch\(ntk\.diag"):
        ntk.diagonal(x)
    diagonal = filter_microbatch(ntk.diagonal, accumulator=Concat())
    got = over_batches(diagonal, batch_size=BLOCK)(x)
    np.testing.assert_allclose(got, ntk.diagonal(X), rtol=1e-5)


@pytest.mark.parametrize("symmetric", (True, False))
def test_reductions(symmetric):
    args = (X,) if symmetric else (X, Y)
    vectors = np.ones(len(args[-1]), np.float32)
    reductions = {"k": KernelProduct(vectors), "top": TopK(3), "norm": FrobeniusNorm()}
    kernel = filter_batch_kernel(
        lambda x, y=None: dict.fromkeys(reductions, rbf(x, y)),
        block_size=BLOCK,
        symmetric=symmetric,
        reduce=reductions,
    )
    same(kernel(*map(Recorded, args)), kernel(*args))


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize(("store", "height"), (("device", 2), ("disk", 2), ("disk", 3)))
def test_each_row_is_read_once_for_a_panel(
    symmetric, store, height, tmp_path, monkeypatch
):
    """And little is kept."""
    # Panels of two blocks of one row, and a column; or of three, as for a budget.
    room = {2: 3 * 12, 3: 0}[height]
    monkeypatch.setattr(batch_kernel, "room_of", lambda _: room)
    store = tmp_path / "kernel" if store == "disk" else store
    settings = {"block_size": 1, "symmetric": symmetric}
    kernel, x = filter_batch_kernel(white, store=store, **settings), Recorded(X[:8])
    got = np.asarray(kernel(x))
    same(got, filter_batch_kernel(white, store="host", **settings)(X[:8]))
    # A panel of a symmetric kernel has the columns from its own rows on.
    panels = [range(i if symmetric else 0, 8) for i in range(0, 8, height)]
    at_most = sum(map(len, panels))
    assert len(x.read) <= at_most + 2
    assert x.most == 1


@pytest.mark.parametrize("which", ("first", "second", "both", "pairs", "all"))
def test_parts_of_examples_may_be_in_memory(which, getkey):
    def kernel(x, y, *, shift, key):
        draw = jax.vmap(lambda key: jr.normal(key, (), jnp.float32))
        rows, columns = (
            a["x"][:, 0] * b + draw(c)
            for a, b, c in zip((x, y), shift, key, strict=True)
        )
        return rows[:, None] * columns[None]

    shift, key = (X[:, 1], Y[:, 1]), getkey()
    batched = filter_batch_kernel(kernel, block_size=BLOCK)
    expected = batched({"x": X}, {"x": Y}, shift=shift, key=key)
    x, y = ({"x": a} for a in (X, Y))
    if which in ("first", "both", "all"):
        x = {"x": Recorded(X)}
    if which in ("second", "both", "all"):
        y = {"x": Recorded(Y)}
    if which in ("pairs", "all"):
        shift = tuple(map(Recorded, shift))
    same(batched(x, y, shift=shift, key=key), expected)


def test_several_arrays(getkey, tmp_path):
    """In one PyTree, with one value for each row or column among the results."""
    model = Structured(jnp.array(0.7), 2)
    x, y = ({"a": numbers(n), "b": numbers(n, 1)} for n in (9, 6))
    settings = {"block_size": BLOCK, "out_axes": AXES}
    kernel = filter_batch_kernel(model, store=tmp_path / "kernel", **settings)
    expected = filter_batch_kernel(model, store="host", **settings)(x, y)
    got = kernel(jax.tree.map(Recorded, x), {"a": Recorded(y["a"]), "b": y["b"]})
    same(got, expected)


@pytest.mark.parametrize(
    "dtype", ("f4", ">f4", "f8", "i8", "bool", ml_dtypes.bfloat16), ids=str
)
def test_memory_maps(dtype, tmp_path):
    values = (10 * X).astype(np.dtype(dtype).newbyteorder("="))
    x = np.memmap(tmp_path / "x", np.dtype(dtype), mode="w+", shape=values.shape)
    x[:] = values
    kernel = lambda x, y: jnp.sum(x[:, None] == y[None], axis=-1, dtype=jnp.float32)
    batched = filter_batch_kernel(kernel, block_size=BLOCK)
    same(batched(x, x[:7]), batched(values, values[:7]))


def test_zarr_arrays(tmp_path):
    x = zarr.create_array(str(tmp_path / "x"), shape=X.shape, dtype="f4", chunks=(5, 3))
    x[:] = X
    batched = filter_batch_kernel(rbf, block_size=BLOCK, symmetric=True)
    same(batched(x), batched(X))
    # What a kernel has stored can be the examples of another one.
    path = tmp_path / "kernel"
    whole = filter_batch_kernel(rbf, block_size=BLOCK, symmetric=True, store=path)(x)
    same(batched(whole), batched(np.asarray(whole)))


@pytest.mark.cpu
def test_memory_maps_are_not_copied(tmp_path):
    x = np.memmap(tmp_path / "x", "f4", mode="w+", shape=(1_000, 1_000))
    kernel = filter_batch_kernel(
        lambda x, y: x[:, :1] @ y[:, :1].T, block_size=MemoryBudget("1MB"), store="host"
    )
    tracemalloc.start()
    try:
        kernel(x, x[:3])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 2


class Reused(Recorded):
    """Rows in memory that the next ones overwrite, also those of others."""

    memory = aligned((BLOCK, 16), np.float32)

    def __getitem__(self, rows):
        rows = super().__getitem__(rows)
        self.memory[: len(rows)] = rows
        return self.memory[: len(rows)]


@pytest.mark.parametrize("store", ("device", "host"))
def test_memory_may_be_used_again(store):
    a, b = (np.float32([[i] * 16 for i in range(k, k + 9)]) for k in (0, 3))
    kernel = filter_batch_kernel(
        lambda x, y: x["a"] @ y["b"].T, block_size=BLOCK, store=store
    )
    same(kernel({"a": Reused(a), "b": Reused(b)}), kernel({"a": a, "b": b}))


def test_digests_are_of_the_rows_that_are_computed(tmp_path):
    """Not of the next ones, which may be in the same memory."""
    x = np.float32([[i] * 16 for i in range(16)])
    to_disk("map", Reused(x), tmp_path / "map")
    moved = np.roll(x, -2, axis=0)
    same(to_disk("map", moved, tmp_path / "map"), np.square(moved))


def test_rows_that_change_during_a_run(tmp_path, monkeypatch):
    """Chunks are sealed with the rows that they are computed from."""
    monkeypatch.setattr(batch_kernel, "room_of", lambda _: 2 * BLOCK * 12)

    class Changing(Recorded):
        def __getitem__(self, rows):
            self.rows = X + (len(self.read) >= 4)
            return super().__getitem__(rows)

    kernel = filter_batch_kernel(rbf, block_size=BLOCK, store=tmp_path / "kernel")
    kernel(Changing(X))
    same(
        np.asarray(kernel(Recorded(X))),
        filter_batch_kernel(rbf, block_size=BLOCK, store="host")(X),
    )


class Wide:
    """Rows of a million bytes each, which are made when they are read."""

    shape, dtype = (40, 250_000), np.dtype("f4")
    most = 0

    def __getitem__(self, rows):
        num = len(range(*rows.indices(40)))
        self.most = max(self.most, num)
        return np.zeros((num, self.shape[1]), np.float32)


@pytest.mark.cpu
@pytest.mark.parametrize("store", ("device", "host"))
def test_a_budget_counts_blocks_of_rows(store):
    """Of both sides, while two tiles are copied; the other half is for the kernel."""
    x, budget = Wide(), 61_000_000
    kernel = lambda x, y: x[:, :1] @ y[:, :1].T
    filter_batch_kernel(kernel, block_size=MemoryBudget(budget), store=store)(x)
    assert x.most == budget // (3 * 2 * 2_000_000)
    with pytest.raises(
        ValueError, match=r"must be at least 1200\d{4}; got 5000000. Blocks of a row"
    ):
        filter_batch_kernel(kernel, block_size="5MB", store=store)(x)


def test_runs_are_resumed(tmp_path):
    """With the same bits; rows that have changed are computed again."""
    log = []
    settings = {"block_size": 4, "symmetric": True}
    kernel = filter_batch_kernel(
        rbf, store=tmp_path / "kernel", progress=Stops(None, None, log), **settings
    )
    plain = filter_batch_kernel(rbf, store="host", **settings)
    with pytest.raises(OSError, match="a disk"):
        kernel(Recorded(X, fails=3))
    x = Recorded(X)
    same(kernel(x), plain(X))
    num, done = next(entry[1:] for entry in log[2:][::-1] if entry[0] == "start")
    assert num == 10
    assert 1 <= done <= 6
    # Rows of intact chunks are compared once, and read once more for others.
    assert len(x.read) <= 2 * 4
    log.clear()
    x = Recorded(X)
    same(kernel(x), plain(X))
    assert log[0] == ("start", 10, 10)
    assert len(x.read) == 4

    changed = np.where(np.arange(13)[:, None] == 5, np.float32(1), X)
    log.clear()
    same(kernel(Recorded(changed)), plain(changed))
    assert log[0] == ("start", 10, 6)
    alone = filter_batch_kernel(rbf, store=tmp_path / "alone", **settings)
    alone(Recorded(changed))
    assert chunks(tmp_path / "alone") == chunks(tmp_path / "kernel")
    with pytest.raises(
        ValueError, match=r"another kernel.*the contents of inputs diff"
    ):
        kernel(Recorded(X.astype(np.float16)))
    with pytest.raises(ValueError, match=r"another kernel.*grid is"):
        kernel(Recorded(X[:12]))
    with pytest.raises(
        ValueError, match=r"another kernel.*the contents of inputs diff"
    ):
        kernel(X)


def to_disk(name, x, path):
    """A kernel of examples that are not in memory, or a map over them, to disk."""
    if name == "map":
        square = over_batches(filter_micro_vmap(jnp.square), batch_size=2, store=path)
        return square(x)
    kernel = filter_batch_kernel(rbf, block_size=2, symmetric=True, store=path)
    return kernel(x)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ("kernel", "map"))
def test_twenty_runs_that_fail_at_random(name, tmp_path, monkeypatch):
    """At any read or write; each run goes on where the ones before were."""
    to_disk(name, Recorded(X), tmp_path / "whole")
    whole, path = chunks(tmp_path / "whole"), tmp_path / "failed"
    rng, left = random.Random(0), [0]
    replace = pathlib.Path.replace

    def fail():
        left[0] -= 1
        if left[0] == 0:
            raise OSError("at random")

    def replaced(self, target):
        if "/c/" in str(target):
            fail()
        return replace(self, target)

    class Failing(Recorded):
        def __getitem__(self, rows):
            fail()
            return super().__getitem__(rows)

    monkeypatch.setattr(pathlib.Path, "replace", replaced)
    num_failed = 0
    while num_failed < 20:
        left[0] = rng.randrange(1, 15)
        try:
            got = to_disk(name, Failing(X), path)
        except OSError as e:
            assert "at random" in str(e)  # noqa: PT017
            num_failed += 1
        else:
            assert chunks(path) == whole
            same(got, to_disk(name, X, "host"))
            shutil.rmtree(path)
    left[0] = 0
    to_disk(name, Failing(X), path)
    assert chunks(path) == whole


def test_dtypes_that_are_copies(tmp_path):
    # NumPy does not count these as built in, as those of readers may be.
    x = np.asarray(X).view(np.dtype(X.dtype).newbyteorder("<"))
    assert x.dtype.isbuiltin == 0
    same(to_disk("kernel", Recorded(x), tmp_path), to_disk("kernel", X, "host"))


KILLED = """
    import sys, time
    import numpy as np
    from tests.kernels.test_stored_examples import Recorded, to_disk, X

    class Slow(Recorded):
        def __getitem__(self, rows):
            time.sleep(0.02)
            return super().__getitem__(rows)

    print("begins", flush=True)
    to_disk(sys.argv[1], Slow(X), sys.argv[2])
"""


@pytest.mark.matrix
@pytest.mark.parametrize("name", ("kernel", "map"))
def test_runs_that_are_killed_at_random(name, tmp_path):
    rng, num_killed = random.Random(0), 0

    def begin(path):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), name, str(path)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        with process.stdout as out:
            assert out.readline() == "begins\n"
        return process

    assert begin(tmp_path / "whole").wait() == 0
    path = tmp_path / "killed"
    while num_killed < 3:
        process = begin(path)
        try:
            process.wait(rng.uniform(0.0, 2.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            num_killed += 1
        else:
            assert process.returncode == 0
            shutil.rmtree(path)
    assert begin(path).wait() == 0
    found = {k: x for k, x in chunks(path).items() if "partial" not in k}
    assert found == chunks(tmp_path / "whole")


@pytest.mark.parametrize(
    ("args", "symmetric"), (((X,), True), ((X, Y), None), ((Y, X), None))
)
def test_operators(args, symmetric):
    settings = {"block_size": BLOCK, "symmetric": symmetric}
    expected = KernelOperator(white, *args, **settings)
    matrix = np.asarray(expected.as_matrix())
    n1, n2 = matrix.shape
    operator = KernelOperator(white, *map(Recorded, args), store="host", **settings)
    same(operator.as_matrix(), matrix)
    np.testing.assert_allclose(operator.diagonal(), matrix.diagonal(), rtol=1e-6)
    for i in (0, 5):
        np.testing.assert_allclose(operator.column(i), matrix[:, i], rtol=1e-6)
    for op, num in ((operator, n2), (operator.transpose(), n1)):
        dense = matrix if op is operator else matrix.T
        got = op.mv(jnp.eye(num, 2, dtype=jnp.float32))
        np.testing.assert_allclose(got, dense[:, :2], rtol=1e-5, atol=1e-6)
    # A stored kernel works within transforms.
    product = jax.jit(lambda v: operator.mv(v))(jnp.ones(n2))
    np.testing.assert_allclose(product, matrix.sum(1), rtol=1e-5)


@pytest.mark.cpu
def test_a_solve(getkey):
    right = normal(getkey(), (13,))
    settings = {"ridge": 0.1, "symmetric": True, "block_size": BLOCK, "store": "host"}
    got = kernel_solve(rbf, Recorded(X), right, **settings)
    same(got, kernel_solve(rbf, X, right, **settings))


@pytest.mark.devices
def test_meshes():
    kernel = functools.partial(filter_batch_kernel, rbf, block_size=BLOCK)
    one, four = make_mesh(AxisType.Auto, (1,)), make_mesh(AxisType.Explicit)
    same(kernel(mesh=one, store="host")(Recorded(X)), kernel(store="host")(X))
    for settings in ({"store": "host"}, {}, {"reduce": FrobeniusNorm()}):
        with pytest.raises(ValueError, match=r"`mesh` needs a `store`, one device"):
            kernel(mesh=four, **settings)(Recorded(X))
    scale = jax.device_put(jnp.ones(()), jax.NamedSharding(four, jax.P()))
    with pytest.raises(ValueError, match="arrays on Explicit axes"):
        kernel()(Recorded(X), None, scale)


@pytest.mark.parametrize("transform", (jax.jit, jax.grad, jax.vmap))
def test_transforms_are_refused(transform):
    kernel = filter_batch_kernel(rbf, block_size=BLOCK)
    run = lambda scale: jnp.sum(kernel(Recorded(X), None, scale))
    scale = jnp.ones(2 if transform is jax.vmap else ())
    with pytest.raises(TypeError, match=r"not in memory.*cannot be within `jax.jit`"):
        transform(run)(scale)
    with pytest.raises(TypeError, match=r"not in memory.*cannot be within `jax.jit`"):
        jax.jit(lambda: kernel(Recorded(X)))()


@pytest.mark.parametrize("error", (IndexError, StopIteration))
@pytest.mark.parametrize("store", ("device", "host"))
def test_no_error_of_a_reader_is_the_end(error, store):
    class Damaged(Recorded):
        def __getitem__(self, rows):
            if rows.stop == 13:
                raise error("a row")
            return super().__getitem__(rows)

    kernel = filter_batch_kernel(rbf, block_size=BLOCK, store=store)
    raised = RuntimeError if error is StopIteration else error
    for args in ((Damaged(X),), (X, Damaged(X))):
        with pytest.raises(raised):
            kernel(*args)


class Wrong:
    """What `read` makes of rows is read."""

    shape, dtype = X.shape, X.dtype

    def __init__(self, read):
        self.read = read

    def __getitem__(self, rows):
        return self.read(X[rows])


def whole(x):
    return jax.vmap(bent(3, 2, jr.key(0)))(x)


@pytest.mark.parametrize(
    ("run", "error", "match"),
    (
        (
            lambda: EmpiricalNTK(bent(3, 2, jr.key(0)), in_axes=1)(Recorded(X)),
            ValueError,
            r"must be 0.*got 1 for an array of shape \(13, 3\)",
        ),
        (
            lambda: filter_batch_kernel(
                lambda x, y: x["a"] @ y["a"].T, in_axes={"a": 0, "b": None}
            )({"a": X, "b": Recorded(X)}),
            ValueError,
            "must be 0.*got None",
        ),
        (
            lambda: EmpiricalNNGP(whole, in_axes=None)(Recorded(X)),
            ValueError,
            "must be 0.*got None for an array",
        ),
        (
            lambda: KernelOperator(rbf, Recorded(X), block_size=4),
            ValueError,
            "read once, to compute the kernel into a `store`",
        ),
        (
            lambda: filter_batch_kernel(rbf)({"a": Recorded(X), "b": Recorded(Y)}),
            ValueError,
            r"must agree on the number of examples.*has 13.*has 7",
        ),
        (
            lambda: filter_batch_kernel(rbf)(Recorded(X.astype(object))),
            TypeError,
            "rows of numbers or bools; got an array .* dtype object",
        ),
        (
            lambda: filter_batch_kernel(rbf)(
                Wrong(lambda x: np.ma.array(x, mask=x > 1))
            ),
            ValueError,
            "must not have masked entries, which stand for no number",
        ),
        (
            lambda: filter_batch_kernel(rbf)(Wrong(lambda x: x.T)),
            ValueError,
            r"Rows 0 to 0 of .* must be 0 rows; got an array of shape \(3, 0\)",
        ),
        (
            lambda: filter_batch_kernel(rbf)(Wrong(lambda x: x[:, :2])),
            TypeError,
            r"rows of numbers or bools; got an array of shape \(0, 2\)",
        ),
        (
            lambda: filter_batch_kernel(rbf)(Wrong(lambda x: x[:, : 3 - x.size // 39])),
            ValueError,
            r"Rows 0 to 13 of .* must be .*\(13, 3\).*; got .*\(13, 2\)",
        ),
        (
            lambda: filter_batch_kernel(rbf, block_size=4)(Wrong(lambda x: x[:3])),
            ValueError,
            r"Rows 0 to 4 of .* must be 4 rows; got an array of shape \(3, 3\)",
        ),
    ),
)
def test_wrong_examples(run, error, match):
    with pytest.raises(error, match=match):
        run()
