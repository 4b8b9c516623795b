"""Batches that come one after the other, against the batch of all of their examples."""

import dataclasses
import functools
import io
import itertools
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks.local import free_port
from eqxbatch import (
    AbstractAccumulator,
    AbstractProgressMeter,
    Concat,
    filter_ggn,
    filter_ggn_blocks,
    filter_ggn_diagonal,
    filter_ggnvp,
    filter_hessian,
    filter_hessian_blocks,
    filter_hessian_diagonal,
    filter_hvp,
    filter_jacobian,
    filter_kfac,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    filter_microbatch,
    Last,
    LogSumExp,
    Max,
    Mean,
    Min,
    over_batches,
    Sum,
    Variance,
)
from ..flags import COMPILE_FAST
from ..helpers import (
    aligned,
    assert_bits,
    assert_same,
    Counted,
    KINDS,
    make_mesh,
    thinned,
)
from ..on_cpu import environment


pytestmark = pytest.mark.usefixtures("x64")


NUM = 11
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((NUM, 3)), RNG.integers(0, 2, NUM)
WEIGHTS = RNG.integers(0, 3, NUM).astype(float)
SIZES = (0, 4, 0, 3, 4)


class Net(eqx.Module):
    inner: jax.Array
    outer: jax.Array

    def __call__(self, x):
        return self.outer @ jnp.tanh(self.inner @ x)


@pytest.fixture
def net():
    rng = np.random.default_rng(1)
    return jax.device_put(Net(rng.standard_normal((4, 3)), rng.standard_normal((2, 4))))


def out(net, x, y):
    return net(x)


def of_out(logits, x, y):
    return -jax.nn.log_softmax(logits)[y]


def loss(net, x, y):
    return of_out(net(x), x, y)


class Numbered(AbstractAccumulator):
    """A sum with the numbers of the microbatches and examples as weights."""

    def init(self, value, blocks):
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state, value, block):
        factor = (1 + block.index) * (2 + block.start)
        return state + value * factor.astype(value.dtype)

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        return values.sum(axis=0)


class Spread(type(filter_micro_vmap(lambda x: x))):
    """A map with a second accumulator, whose name no other transform has."""

    of_squares: object = dataclasses.field(default=Sum(), kw_only=True)

    def apply(self, args, kwargs):
        map_ = type(filter_micro_vmap(lambda x: x))
        outs = self.accumulator, self.of_squares
        fun = lambda *x: (self.fun(*x), self.fun(*x) ** 2)
        both = map_(fun, accumulator=outs, microbatch_size=self.microbatch_size)
        return both.apply(args, kwargs)


def test_accumulators_are_found_by_what_they_are():
    x, weights = jnp.arange(5.0), jnp.array([1.0, 0.0, 2.0, 1.0, 0.0])
    spread = Spread(lambda x: x, accumulator=Mean(), microbatch_size=2)
    batches = [(x[:3], weights[:3]), (x[3:], weights[3:])]
    mean, squares = over_batches(spread, weighted=True)(batches)
    np.testing.assert_allclose(mean, 7 / 4)
    np.testing.assert_allclose(squares, 17.0)


REDUCED = {
    "sum": Sum(),
    "mean": Mean(),
    "running": Mean(running=True),
    "variance": Variance(),
    "max": Max(),
    "min": Min(),
    "log": LogSumExp(),
    "last": Last(),
    "rows": Concat(),
}


def every(net, x, y):
    return dict.fromkeys(REDUCED, net(x))


MAP = functools.partial(filter_micro_vmap, in_axes=(None, 0, 0), microbatch_size=3)
TRANSFORMS = {
    "map": MAP(every, accumulator=REDUCED, out_axes=eqx.if_array(-1)),
    "gradient": filter_micro_value_and_grad(
        lambda net, x, y: (loss(net, x, y), net(x)),
        has_aux=True,
        microbatch_size=3,
        clip_norm=0.5,
        return_norms=True,
        moments=True,
    ),
    "monte carlo": filter_ggn_diagonal(
        out, of_out, microbatch_size=4, fisher="mc", key=jr.key(0)
    ),
    "corrected": filter_kfac(out, of_out, microbatch_size=4, corrected=True),
    "hessian": filter_hessian(loss, in_axes=0, microbatch_size=4),
}
MORE = {
    "microbatch": filter_microbatch(
        lambda net, x, y: jax.vmap(loss, (None, 0, 0))(net, x, y).mean(),
        in_axes=(None, 0, 0),
        microbatch_size=3,
        accumulator=Mean(),
    ),
    "accumulated": filter_micro_grad(loss, microbatch_size=3),
    "hessian diagonal": filter_hessian_diagonal(loss, in_axes=0, microbatch_size=3),
    "hessian blocks": filter_hessian_blocks(loss, in_axes=0, flat=True),
    "ggn": filter_ggn(out, of_out, microbatch_size=3, accumulator=Sum()),
    "ggn blocks": filter_ggn_blocks(out, of_out, fisher="empirical"),
    "drawn": filter_kfac(
        out, of_out, fisher="mc", key=jr.key(0), sampler=jr.categorical
    ),
    "jacobian": filter_jacobian(out, in_axes=0, accumulator=Mean()),
}


def whole(name):
    """A transform that takes all examples at once, which is the smallest program."""
    return dataclasses.replace({**TRANSFORMS, **MORE}[name], microbatch_size=None)


def batches(*arrays, sizes=SIZES):
    starts = itertools.accumulate((0, *sizes[:-1]))
    for start, size in zip(starts, sizes, strict=True):
        yield tuple(x[start : start + size] for x in arrays)


@pytest.mark.parametrize(
    ("name", "sizes"),
    (
        *((name, SIZES) for name in TRANSFORMS),
        *(pytest.param(name, SIZES, marks=pytest.mark.matrix) for name in MORE),
        *(
            # Sizes are none of the transform's business: half of them tell.
            pytest.param(name, (1, 7, 64, 0, 5), marks=pytest.mark.matrix)
            for name in [*{**TRANSFORMS, **MORE}][::2]
        ),
    ),
)
def test_equals_one_batch(name, sizes, net):
    transform, num = {**TRANSFORMS, **MORE}[name], sum(sizes)
    x, y = (np.resize(a, (num, *a.shape[1:])) for a in (X, Y))
    got = over_batches(transform)(net, [*batches(x, y, sizes=sizes)])
    expected = whole(name)(net, x, y)
    if name == "corrected":  # Eigenvectors have any sign.
        got, expected = (jax.tree.map(abs, part) for part in (got, expected))
    assert_same(got, expected, tol=1e-11)


@pytest.mark.matrix
@pytest.mark.parametrize("make", (filter_hvp, filter_ggnvp))
def test_products(make, net):
    functions = (loss,) if make is filter_hvp else (out, of_out)
    transform = make(*functions, in_axes=0)
    got = over_batches(transform)(net, net, batches(X, Y))
    assert_same(got, transform(net, net, X, Y))


@pytest.mark.parametrize("weights", (WEIGHTS, WEIGHTS > 0), ids=["numbers", "mask"])
def test_weights_come_with_the_batches(weights, net):
    """As for a loader that pads its last batch; examples of weight 0 are NaN."""
    x = np.where(WEIGHTS[:, None] == 0, np.nan, X)
    grad = functools.partial(filter_micro_value_and_grad, loss, microbatch_size=3)
    got = over_batches(grad(), weighted=True)(net, batches(x, Y, weights))
    assert_same(got, grad(accumulator=Mean(weights=weights))(net, x, Y), tol=1e-11)


def test_accumulators_of_users_have_numbers_that_go_on():
    stream = over_batches(filter_micro_vmap(jnp.sum, accumulator=Numbered()))
    got = stream(batches(X, sizes=(4, 7)))
    assert_same(got, np.asarray(X[:4].sum() * 2 + X[4:].sum() * 2 * 6))


def test_float32_keeps_its_digits():
    """Over as many batches, a sum of float32 would lose some."""
    x = np.full((1_000, 1), 0.1, np.float32)
    got = over_batches(filter_micro_vmap(jnp.sum, accumulator=Sum()))([x[:1]] * 1_000)
    assert_same(got, np.asarray(x.sum(dtype=float)).astype(np.float32), tol=1e-7)


def test_derivatives_with_an_empty_first_batch():
    kinds = {name: x for name, x in REDUCED.items() if name != "rows"}
    transform = filter_micro_vmap(
        lambda factor, x: dict.fromkeys(kinds, jnp.sin(factor * x)),
        in_axes=(None, 0),
        accumulator=kinds,
    )
    stream = over_batches(transform)

    def in_batches(factor):
        state = stream.init(factor, X[:0])
        for x in (X[:0], X[:4], X[4:]):
            state, _ = stream.update(state, factor, x)
        return stream.finish(state, factor)

    factor = jnp.asarray(1.3)
    got = jax.jacrev(in_batches)(factor)
    assert_same(got, jax.jacrev(lambda factor: transform(factor, X))(factor), tol=1e-11)


def test_no_examples():
    """As for one empty batch; within `jax.jit`, nothing is known of their number."""
    kinds = {name: x for name, x in REDUCED.items() if name not in ("last", "rows")}
    transform = filter_micro_vmap(
        lambda x: dict.fromkeys(kinds, x.sum()), accumulator=kinds
    )
    assert_same(over_batches(transform)([X[:0], X[:0]]), transform(X[:0]))
    last = over_batches(filter_micro_vmap(jnp.sum, accumulator=Last()))
    with pytest.raises(ValueError, match="no batch has an example"):
        last.finish(last.init(X[:0]))
    assert_same(jax.jit(last)([X[:0]]), np.zeros(()))


@pytest.mark.versions
def test_steps_and_scan(net):
    """A run that is saved and resumed after each batch has the same bits."""
    transform = TRANSFORMS["gradient"]
    stream, rows = over_batches(transform), []
    state = stream.init(net, (X[:4], Y[:4]))
    for batch in batches(X, Y):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, state)
        file.seek(0)
        like = stream.init(net, (X[:4], Y[:4]))
        state = eqx.tree_deserialise_leaves(file, like)
        state, new = stream.update(state, net, batch)
        rows.append(new)
    assert state.passes[0].num_examples == NUM
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
    got = stream.finish(state, net, rows=joined)
    assert_bits(got, stream(net, batches(X, Y)))

    state = stream.init(net, (X[:4], Y[:4]))
    stacked = X[:8].reshape(2, 4, 3), Y[:8].reshape(2, 4)
    step = lambda state, batch: stream.update(state, net, batch)
    state, rows = jax.lax.scan(step, state, stacked)
    rows = [x.reshape(8, *x.shape[2:]) for x in rows]
    assert_same(
        stream.finish(state, net, rows=rows), transform(net, X[:8], Y[:8]), tol=1e-11
    )


def test_one_program_for_each_size(net):
    calls = []

    def counted(net, x, y):
        calls.append(None)
        return loss(net, x, y)

    stream = over_batches(filter_micro_grad(counted))
    stream(net, batches(X, Y, sizes=(4, 4, 3)))
    num = len(calls)
    stream(net, batches(X, Y, sizes=(4, 4, 3)))
    stream(net, [(X[:4], Y[:4])] * 5)
    assert len(calls) == num


class Tensor:
    """An array of another library."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return self.x


class Sliced:
    """What is read by slices, as arrays on disk are."""

    shape = (NUM, 3)

    def __getitem__(self, index):
        assert index.start < index.stop <= NUM
        return X[index]


class Steps(AbstractProgressMeter):
    log: list = eqx.field(static=True)

    def start(self, num_blocks, num_done):
        self.log.append(num_blocks)
        return 0

    def step(self, state, num_nans):
        return state + 1

    def close(self, state):
        self.log.append(state)


def test_what_batches_can_be(net):
    mean = filter_micro_vmap(lambda x: x["x"] ** 2, accumulator=Mean())
    expected, log = (X**2).mean(axis=0), []
    stream = over_batches(mean, progress=Steps(log))
    assert_same(stream([{"x": Tensor(X[:4])}, {"x": Tensor(X[4:])}]), expected)
    assert_same(stream(iter(({"x": jnp.asarray(X)},))), expected)
    sliced = over_batches(mean, batch_size=4, progress=Steps(log))
    assert_same(sliced({"x": Sliced()}), expected)
    assert log == [2, 2, 1, 1, 3, 3]


@pytest.mark.parametrize("as_batch", (np.asarray, jnp.asarray))
def test_a_loader_may_use_its_memory_again(as_batch):
    """Also behind an array of JAX, which may share it."""

    def loader():
        x = aligned((2_000, 100))
        for i in range(20):
            x[:] = i
            yield as_batch(x)

    def slow(x):
        return jnp.sum(jnp.cos(jnp.cumsum(x)) ** 2) * 0 + jnp.sum(x)

    total = over_batches(filter_micro_vmap(slow, accumulator=Sum()))(loader())
    assert total == 190 * 200_000


@pytest.mark.devices
@pytest.mark.versions
@pytest.mark.parametrize(("kind", "name"), thinned(KINDS, ("gradient", "monte carlo")))
def test_on_a_mesh(kind, name, net):
    sharding = NamedSharding(make_mesh(kind), P("data"))
    stream = over_batches(TRANSFORMS[name], sharding=sharding)
    got = stream(net, batches(X, Y, sizes=(4, 4, 3)))
    expected = whole(name)(net, X, Y)
    assert_same(jax.device_get(got), jax.device_get(expected), 1e-11)


@pytest.mark.cpu
@pytest.mark.versions
def test_rows_go_to_disk(net, tmp_path):
    def features(net, x):
        return {"out": net(x), "norm": jnp.sum(x**2)}

    transform, log = filter_micro_vmap(features, in_axes=(None, 0)), []
    expected = transform(net, X)
    stored = functools.partial(over_batches, transform, batch_size=2)
    run = stored(store=tmp_path / "rows", progress=Steps(log))
    with pytest.raises(OSError, match="a disk") as info:
        run(net, Counted(X, fails=8))
    assert "batch 4" in info.value.__notes__[-1]
    got = run(net, Counted(X))
    # The rows of stored chunks are compared, but not computed again.
    num, done, _, left = log
    assert num == 6
    assert 2 <= done <= 4
    assert 2 <= left <= 4
    assert got["out"].chunks == (2, 2)
    got = jax.tree.map(np.asarray, got)
    assert_same(got, expected)
    assert_bits(got, stored(store="host")(net, X))

    changed = np.where(np.arange(NUM)[:, None] == 5, 1.0, X)
    got = run(net, Counted(changed))
    assert log[4:] == [6, 1]
    assert_same(np.asarray(got["norm"]), transform(net, changed)["norm"])
    with pytest.raises(ValueError, match="has another map than this one"):
        run(jax.tree.map(jnp.zeros_like, net), Counted(X))


def test_processes_share_what_goes_to_disk(tmp_path, monkeypatch):
    log = []
    run = over_batches(
        filter_micro_vmap(jnp.sin), batch_size=2, store=tmp_path, progress=Steps(log)
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for rank in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        assert_same(np.asarray(run(X)), np.sin(X))
    # The first one has done what the other one did not.
    assert log == [3, 3, 3, 0]


def test_nan(net):
    x = np.where(np.arange(NUM)[:, None] == 5, np.nan, X)
    got = over_batches(TRANSFORMS["map"])(net, batches(x, Y))
    assert_same(got, whole("map")(net, x, Y))
    assert np.isnan(got["mean"]).all()


def test_passes_see_the_same_examples(net):
    class Shorter:
        num = 3

        def __iter__(self):
            self.num -= 1
            return iter([(X[:4], Y[:4])] * self.num)

    stream = over_batches(TRANSFORMS["corrected"])
    with pytest.raises(ValueError, match=r"examples in each pass.* got \[8, 4\]"):
        stream(net, Shorter())


def test_rows_that_numpy_has_not():
    def row(x):
        return {"key": jr.key(x), "x": x, "none": jnp.zeros(0)}

    stream = over_batches(filter_micro_vmap(row))
    expected = jax.vmap(row)(Y)
    assert_same(
        jax.tree.map(jr.key_data, stream([Y[:4], Y[4:]])["key"]),
        jr.key_data(expected["key"]),
    )
    square = over_batches(filter_micro_vmap(jnp.square))
    assert_same(jax.jit(square)([X[:4], X[4:]]), X**2)


def failing():
    yield X, Y
    yield X, Y
    raise OSError("a disk")


@pytest.mark.parametrize(
    ("others", "error", "match", "number"),
    (
        ((X, Y, Y), ValueError, "must have the structure", 2),
        ((X.astype(np.float32), Y), ValueError, "dtypes and weak types", 2),
        ((jnp.broadcast_to(1.0, (4, 3)), Y[:4]), ValueError, "weak types", 2),
        ((X[:, :2], Y), TypeError, "contracting dimensions", 2),
        ((X[:, :, None], Y), ValueError, "float64 with 2 axes, int64.*; got", 2),
        ((X, Y[1:]), ValueError, "must agree on the number of examples", 2),
        (None, OSError, "a disk", 2),
    ),
)
def test_errors_name_the_batch(others, error, match, number, net):
    stream = over_batches(filter_micro_grad(loss))
    data = failing() if others is None else [(X, Y), (X, Y), others]
    with pytest.raises(error, match=match) as info:
        stream(net, data)
    assert info.value.__notes__[-1] == f"This is about batch {number}, counted from 0."


TOGETHER = """
    import sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    import jax.numpy as jnp, numpy as np
    from eqxbatch import filter_micro_value_and_grad, over_batches
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    x, w = np.random.default_rng(0).standard_normal((16, 3)), jnp.ones(3)
    x = x.astype(np.float32)
    gradient = filter_micro_value_and_grad(
        lambda w, x: jnp.dot(w, x) ** 2, microbatch_size=2, return_norms=True
    )
    expected = jax.tree.leaves(gradient(w, x))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("rows",), axis_types=(kind,))
        sharding = NamedSharding(mesh, PartitionSpec("rows"))
        shares = [half[4 * rank : 4 * rank + 4] for half in (x[:8], x[8:])]
        got = jax.tree.leaves(over_batches(gradient, sharding=sharding)(w, shares))
        for a, b in zip(got, expected, strict=True):
            if isinstance(a, jax.Array):
                a = a.addressable_shards[0].data
            np.testing.assert_allclose(a, b, rtol=1e-5)
"""


@pytest.mark.matrix
def test_two_processes_with_a_loader_each():
    port = free_port()
    flags = f"{COMPILE_FAST} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-c", textwrap.dedent(TOGETHER)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(flags),
        )
        for rank in range(2)
    ]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
