"""Runs that are stopped, continued, damaged or shared."""

import errno
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

from benchmarks.local import free_port
from eqxbatch import (
    filter_batch_kernel,
    ZarrStore,
)
from eqxbatch._kernels.on_devices import MeshAxis
from eqxbatch._kernels.team import Team
from ..conftest import enable_x64
from ..flags import COMPILE_FAST
from ..helpers import CountTraces, drawn, normal, thinned
from ..on_cpu import environment
from .kernel_functions import rbf, white
from .on_disk import chunks, Stops


@pytest.mark.versions
@pytest.mark.parametrize(
    ("error", "symmetric"), thinned((RuntimeError, KeyboardInterrupt), (True, False))
)
def test_a_run_that_was_stopped(error, symmetric, getkey, tmp_path):
    x = normal(getkey(), (13, 3))

    def run(path, after=None):
        log = []
        batched = filter_batch_kernel(
            rbf,
            block_size=4,
            symmetric=symmetric,
            store=ZarrStore(path),
            progress=Stops(after, error, log),
        )
        if after is None:
            return batched(x), log
        with pytest.raises(error, match="stopped"):
            batched(x)
        assert log[-1][0] == "close"
        return None, log

    whole, log = run(tmp_path / "whole")
    num = 10 if symmetric else 16
    assert log[0] == ("start", num, 0)
    assert [entry[0] for entry in log[1:]] == ["step"] * num + ["close"]
    done = 0
    for after in (1, 3):
        _, log = run(tmp_path / "stopped", after)
        assert log[0] == ("start", num, done)
        places = [name.split("/")[-2:] for name in chunks(tmp_path / "stopped")]
        done = len({frozenset(p) for p in places if p[::-1] in places})
        done = done if symmetric else len(places)
        assert done >= after
    got, log = run(tmp_path / "stopped")
    assert log[0][2] >= 4
    assert chunks(tmp_path / "stopped") == chunks(tmp_path / "whole")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(whole))
    _, log = run(tmp_path / "stopped")
    assert log == [("start", num, num), ("close", 0)]


def damage(path, how):
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "short":
        path.write_bytes(data[:3])
    elif how == "half":
        path.write_bytes(data[: len(data) // 2])
    elif how == "long":
        path.write_bytes(data + data)
    elif how == "bit":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.versions
@pytest.mark.parametrize(
    "how", ("missing", "empty", "short", "half", "long", "bit", "checksum")
)
def test_damaged_chunks(how, getkey, tmp_path):
    x = normal(getkey(), (13, 3))
    log = []
    batched = filter_batch_kernel(
        rbf,
        block_size=4,
        symmetric=True,
        store=ZarrStore(tmp_path),
        progress=Stops(None, None, log),
    )
    batched(x)
    undisturbed = chunks(tmp_path)
    # One in the middle, one at an edge, and one that is a mirror image.
    for chunk in ("1/1", "3/3", "3/0"):
        damage(tmp_path / "kernel" / "c" / chunk, how)
    leftover = tmp_path / "kernel" / "c" / "1" / f"2.{'0123456789abcdef' * 2}.partial"
    leftover.write_bytes(b"half a chunk")
    log.clear()
    batched(x)
    assert log[0] == ("start", 10, 7)
    assert len(log) == 5
    assert chunks(tmp_path) == undisturbed


def test_a_chunk_that_another_process_removes_is_written_again(
    getkey, tmp_path, monkeypatch
):
    x = normal(getkey(), (4, 3))
    batched = filter_batch_kernel(rbf, block_size=2, store=ZarrStore(tmp_path))
    batched(x)
    whole = chunks(tmp_path)
    read = pathlib.Path.read_bytes

    def removed(path):
        # It found the chunk damaged, after this one saw its size.
        if path.parts[-2:] == ("1", "0"):
            path.unlink()
        return read(path)

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "read_bytes", removed)
        batched(x)
    assert chunks(tmp_path) == whole


@pytest.mark.versions
@pytest.mark.parametrize(
    "error", (OSError(errno.EIO, "no disk"), MemoryError("no memory"))
)
def test_chunks_that_cannot_be_read_are_kept(error, getkey, tmp_path, monkeypatch):
    x = normal(getkey(), (4, 3))
    batched = filter_batch_kernel(rbf, block_size=2, store=ZarrStore(tmp_path))
    batched(x)
    whole = chunks(tmp_path)

    def raises(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "read_bytes", raises)
        with pytest.raises(type(error), match=str(error.args[-1])):
            batched(x)
    assert chunks(tmp_path) == whole


RUN = """
    import pathlib, resource, signal, sys, time
    import jax.numpy as jnp, numpy as np
    import eqxbatch

    folder, stops = pathlib.Path(sys.argv[1]), sys.argv[2:]
    passed, go_on = [], folder / "on"

    def wait():
        while not go_on.exists():
            time.sleep(0.01)

    def reach(name):
        passed.append(name)
        if stops and stops[0] == f"{name} {passed.count(name)}":
            print("waits", flush=True)
            wait()  # Until it is killed, or interrupted.

    class Waits(eqxbatch.AbstractProgressMeter):
        def start(self, num_blocks, num_done):
            reach("start")

        def step(self, state, num_nans):
            reach("block")

        def close(self, state):
            pass

    def replace(self, target, replace=pathlib.Path.replace):
        # The chunk is whole, but has another name.
        if "/c/" in str(target):
            reach("chunk")
        return replace(self, target)

    def kernel(x, y=None):
        y = x if y is None else y
        return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, axis=-1))

    def full():
        x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
        store = eqxbatch.ZarrStore(folder / "full")
        # A chunk of the second kernel is larger than files may be.
        outer = lambda x, y: {"a": x @ y.T, "b": jnp.tile((x @ y.T)[..., None], 64)}
        batched = eqxbatch.filter_batch_kernel(outer, block_size=16, store=store)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        try:
            batched(x)
        except OSError as e:
            print(e.errno, flush=True)
        # Without the limit, it goes on.
        sys.stdin.readline()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        batched(x)

    if stops[:1] == ["full"]:
        full()
        del stops[0]
    pathlib.Path.replace = replace
    # A shell in the background makes its children ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x = np.random.default_rng(0).standard_normal((29, 3)).astype(np.float32)
    batched = eqxbatch.filter_batch_kernel(
        kernel,
        block_size=4,
        symmetric=True,
        store=eqxbatch.ZarrStore(folder / "stopped"),
        progress=Waits(),
    )
    while len(stops) > 1:
        try:
            batched(x)
        except KeyboardInterrupt:
            wait()
            go_on.unlink()
            passed.clear()
            del stops[0]
    batched(x)
"""


def start_run(folder, *stops):
    """A process that runs a kernel, and stops at some moments to wait for a signal."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), str(folder), *stops],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def check_full_disk(process, folder):
    assert process.stdout.readline() == f"{errno.EFBIG}\n"
    found = chunks(folder)
    process.stdin.write("\n")
    process.stdin.flush()
    whole = {name for name, data in found.items() if len(data) == 16 * 16 * 4 + 4}
    # Some versions of zarr leave a part of a chunk; the checksum tells.
    assert whole == {name for name in found if name.startswith("a/")}
    assert whole


@pytest.mark.cpu
@pytest.mark.versions
@pytest.mark.parametrize(
    "processes",
    (
        # An interrupted run goes on in the same process, whose disk was full before.
        (("full", "SIGINT block 5", "SIGKILL chunk 4"),),
        pytest.param(
            (("SIGKILL start 1",), ("SIGKILL block 3",), ("SIGINT chunk 6",)),
            marks=pytest.mark.matrix,
        ),
    ),
)
def test_runs_that_are_killed_or_interrupted(processes, tmp_path):
    """One run after the other of one kernel, each of which goes on where it was."""
    size = 4 * 4 * 4 + 4
    num_chunks = []
    for stops in processes:
        signals = [stop.split()[0] for stop in stops if stop != "full"]
        moments = [stop.split(maxsplit=1)[-1] for stop in stops]
        with start_run(tmp_path, *moments) as process:
            if stops[0] == "full":
                check_full_disk(process, tmp_path / "full")
            for i, name in enumerate(signals, 1):
                assert process.stdout.readline() == "waits\n"
                if i < len(signals):
                    process.send_signal(getattr(signal, name))
                    (tmp_path / "on").touch()
            process.send_signal(getattr(signal, name))
            # An interrupt comes to the main thread, which may wait for the writer.
            (tmp_path / "on").touch()
            out, err = process.stdout.read(), process.stderr.read()
        (tmp_path / "on").unlink()
        assert process.returncode != 0
        assert out == ""
        assert ("KeyboardInterrupt" in err) == (name == "SIGINT")
        found = chunks(tmp_path / "stopped")
        whole = {name: x for name, x in found.items() if "partial" not in name}
        assert {len(data) for data in whole.values()} <= {size}
        # Several chunks are written at a time. Only who is killed leaves parts of them.
        assert name == "SIGKILL" or len(found) == len(whole)
        num_chunks.append(len(whole))
    assert (num_chunks[0] == 0) == (processes[0][0] == "SIGKILL start 1")
    assert sorted(set(num_chunks)) == num_chunks
    assert num_chunks[-1] < 8**2
    with start_run(tmp_path) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    whole = filter_batch_kernel(
        rbf, block_size=4, symmetric=True, store=ZarrStore(tmp_path / "whole")
    )
    whole(np.random.default_rng(0).standard_normal((29, 3)).astype(np.float32))
    found = chunks(tmp_path / "stopped")
    assert len(found) == 8**2
    assert found == chunks(tmp_path / "whole")
    if (tmp_path / "full").exists():
        got = zarr.open_group(str(tmp_path / "full"), mode="r")
        x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
        np.testing.assert_allclose(got["a"][:], x @ x.T, rtol=1e-4, atol=1e-4)
        expected = np.repeat((x @ x.T)[..., None], 64, axis=-1)
        np.testing.assert_allclose(got["b"][:], expected, rtol=1e-4, atol=1e-4)


# Stores with something else in them.


def test_another_kernel_is_not_mixed_in(getkey, tmp_path):
    x, y = normal(getkey(), (9, 3)), normal(getkey(), (7, 3))
    model = drawn(eqx.nn.MLP, 3, 1, 4, 1, key=getkey())
    other = eqx.tree_at(lambda m: m.layers[0].bias, model, replace_fn=lambda b: b + 1)

    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        shift: float = 0.0
        dtype: str = "float32"

        def __call__(self, x, y, scale=1.0):
            features = [jax.vmap(self.mlp)(z) for z in (x, y)]
            kernel = features[0] @ features[1].T + self.shift
            return (scale * kernel).astype(self.dtype)

    def run(kernel, *args, size=4, **kwargs):
        store = ZarrStore(tmp_path / "kernel")
        return filter_batch_kernel(kernel, block_size=size, store=store)(
            *args, **kwargs
        )

    run(Model(model), x, y)
    undisturbed = chunks(tmp_path)
    changed = {
        "the contents of inputs differ": lambda: run(Model(model), x + 1, y),
        "kernel than this one.*the contents of inputs differ": lambda: run(
            Model(model), x, y + 1
        ),
        "the contents of kernel_fn differ": lambda: run(Model(other), x, y),
        "the contents of program differ": lambda: run(Model(model, 1.0), x, y),
        "kernel than this one.*the contents of program differ": lambda: run(
            Model(model), x, y, scale=2.0
        ),
        "another kernel.*the contents of inputs differ": lambda: run(
            Model(model), x, y, scale=jnp.array(1.0)
        ),
        "grid is .*'sizes': .3, 4.*'sizes': .3, 3": lambda: run(
            Model(model), x, y, size=3
        ),
        "arrays is .*'float16'": lambda: run(Model(model, dtype="float16"), x, y),
        "Delete it, or pass another path": lambda: run(Model(model), y, x),
    }
    for match, again in changed.items():
        with pytest.raises(ValueError, match=match) as e:
            again()
        assert "`path` has another kernel than this one" in str(e.value)
        assert chunks(tmp_path) == undisturbed
    run(Model(model), x, y)
    metadata = tmp_path / "kernel" / "zarr.json"
    text = metadata.read_text()
    # Format 2 has other digests of chunks.
    for part, value in (("package", "eqxbatch 0.0.1"), ("format", 2)):
        found = json.loads(text)
        found["attributes"]["eqxbatch"][part] = value
        metadata.write_text(json.dumps(found))
        there = re.escape(f"{part} is {value!r} there and")
        with pytest.raises(ValueError, match=there):
            run(Model(model), x, y)


@pytest.mark.versions
def test_closures_are_part_of_the_fingerprint(getkey, tmp_path):
    x = normal(getkey(), (9, 3))

    def run(weights):
        store = ZarrStore(tmp_path)
        kernel = lambda x, y: (x * weights) @ jnp.tanh(y * weights).T
        return filter_batch_kernel(kernel, block_size=4, store=store)(x)

    weights = normal(getkey(), (1, 3))
    run(weights)
    run(jnp.array(weights))
    with pytest.raises(ValueError, match="contents of program differ"):
        run(weights.at[0, 0].add(1))


@pytest.mark.versions
def test_settings_are_part_of_the_fingerprint(tmp_path):
    """The text of a program is the same for all of them."""
    x = jnp.arange(3.0)[:, None]

    def run():
        draw = lambda: jax.random.normal(jax.random.key(0), (1, 1), jnp.float32)
        kernel = lambda x, y: x - y.T + draw()
        return filter_batch_kernel(kernel, block_size=2, store=ZarrStore(tmp_path))(x)

    run()
    run()
    is_partitionable = jax.config.jax_threefry_partitionable
    changed = {
        "threefry_partitionable": jax.threefry_partitionable(not is_partitionable),
        "default_matmul": jax.default_matmul_precision("high"),
        "enable_x64': True": enable_x64(),
    }
    for match, context in changed.items():
        with context, pytest.raises(ValueError, match=f"settings is .*{match}"):
            run()


@pytest.mark.versions
def test_callbacks_need_a_version(tmp_path):
    x, table = jnp.arange(3.0)[:, None], {"scale": 2.0}

    def kernel(x, y):
        x = eqx.error_if(x, jnp.any(x < 0), "negative")
        jax.debug.print("{}", x[0, 0])
        return x * y.T

    def looked_up(x, y):
        k = kernel(x, y)
        look = lambda k: np.asarray(k * np.float32(table["scale"]))
        return jax.pure_callback(look, jax.ShapeDtypeStruct(k.shape, k.dtype), k)

    run = lambda kernel, name, version=None: filter_batch_kernel(
        kernel, block_size=2, store=ZarrStore(tmp_path / name, version=version)
    )(x)
    # Their callbacks raise or print.
    assert run(kernel, "none")[2, 2] == 4
    with pytest.raises(ValueError, match=r"by \['pure_callback'\].*version='1'"):
        run(looked_up, "callback")
    assert not (tmp_path / "callback").exists()
    assert run(looked_up, "callback", "1")[2, 2] == 8
    table["scale"] = 3.0
    with pytest.raises(ValueError, match="version is '1' there and '2' now"):
        run(looked_up, "callback", "2")
    assert run(looked_up, "other", "2")[2, 2] == 12


def test_mirror_images_are_part_of_the_fingerprint(tmp_path):
    x = jnp.arange(5.0)[:, None]

    def run(symmetric):
        store = ZarrStore(tmp_path)
        differences = lambda x, y: x - y.T
        return filter_batch_kernel(
            differences, block_size=2, symmetric=symmetric, store=store
        )(x)

    run(lambda block: -block.T)
    run(lambda block: -block.T)
    for other in (True, lambda block: block.T):
        with pytest.raises(ValueError, match="the contents of symmetric differ"):
            run(other)


@pytest.mark.versions
def test_folders_with_something_else(getkey, tmp_path):
    x = normal(getkey(), (9, 3))

    def run(path):
        return filter_batch_kernel(rbf, block_size=4, store=ZarrStore(path))(x)

    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="`path` is a folder that contains something"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "notes.txt").rename(tmp_path / "notes.partial")
    with pytest.raises(ValueError, match="`path` is a folder that contains something"):
        run(tmp_path)
    zarr.create_group(str(tmp_path / "group"))
    zarr.create_array(str(tmp_path / "array"), shape=(3,), dtype="f4")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "zarr.json").write_text('{"zarr_format"')
    for name in ("group", "array"):
        with pytest.raises(ValueError, match="`path` has zarr arrays that are not a k"):
            run(tmp_path / name)
    with pytest.raises(ValueError, match=r"damaged/zarr\.json is not a JSON object"):
        run(tmp_path / "damaged")


def test_paths_that_cannot_be_written(getkey, tmp_path):
    x = normal(getkey(), (9, 3))
    kernel = CountTraces(rbf)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "kernel", "/proc/kernel"):
        log = []
        batched = filter_batch_kernel(
            kernel,
            block_size=4,
            store=ZarrStore(path),
            progress=Stops(None, None, log),
        )
        with pytest.raises(OSError, match="kernel"):
            batched(x)
        assert log == []  # Nothing was computed.


def test_a_disk_that_is_too_small(getkey, tmp_path, monkeypatch):
    x = normal(getkey(), (9, 3))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    batched = filter_batch_kernel(rbf, block_size=4, store=ZarrStore(tmp_path))
    with pytest.raises(OSError, match="has 100 bytes left, and the kernel needs 324"):
        batched(x)
    assert chunks(tmp_path) == {}


# Several processes.

TOGETHER = """
    import sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    import jax.numpy as jnp, numpy as np
    import eqxbatch
    from eqxbatch import filter_batch_kernel

    def kernel(x, y=None):
        noise = jnp.eye(len(x)) if y is None else 0.0
        y = x if y is None else y
        return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)) + noise

    n = 22
    x = np.random.default_rng(0).standard_normal((n, 3)).astype(np.float32)
    dense = np.exp(-np.sum((x[:, None] - x[None]) ** 2, axis=-1)) + np.eye(n)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    settings = {"block_size": 4, "symmetric": True, "mesh": mesh}

    even = filter_batch_kernel(kernel, **settings)(x[:20])
    assert len(even.addressable_shards) == 2
    for shard in even.addressable_shards:
        assert shard.data.shape == (5, 20)
        rows = np.asarray(shard.data)
        np.testing.assert_allclose(rows, dense[:20, :20][shard.index], atol=1e-6)
    odd = filter_batch_kernel(kernel, **settings)(x)
    np.testing.assert_allclose(
        np.asarray(odd.addressable_shards[0].data), dense, atol=1e-6
    )
    reduce = eqxbatch.KernelProduct(jnp.ones(n))
    sums = filter_batch_kernel(kernel, reduce=reduce, **settings)(x)
    np.testing.assert_allclose(
        np.asarray(sums.addressable_shards[0].data), dense.sum(1), atol=1e-5
    )

    class Counts(eqxbatch.AbstractProgressMeter):
        def start(self, num_blocks, num_done):
            print("blocks", num_blocks, num_done, flush=True)
        def step(self, state, num_nans):
            pass
        def close(self, state):
            pass

    stored = filter_batch_kernel(
        kernel, store=eqxbatch.ZarrStore(path), progress=Counts(), **settings
    )
    for _ in range(2):
        got = np.asarray(stored(x))
        np.testing.assert_allclose(got, dense, atol=1e-6)
        np.testing.assert_array_equal(got, got.T)
    try:
        filter_batch_kernel(kernel, store=eqxbatch.HostStore(), **settings)(x)
    except ValueError as e:
        assert "memory of their own" in str(e)
    try:
        # Another kernel, as the first process finds out. The second does not wait.
        stored(x + 1)
    except (ValueError, RuntimeError) as e:
        print("refused", type(e).__name__, flush=True)
"""


@pytest.mark.usefixtures("unchecked")
def test_meshes_of_some_processes(monkeypatch):
    """Are refused by all processes, also by those that would wait for the others."""
    devices = [types.SimpleNamespace(process_index=index) for index in (0, 1)]
    mesh = types.SimpleNamespace(
        axis_names=("rows",), devices=np.array(devices), shape={"rows": 2}
    )
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        with pytest.raises(ValueError, match="has devices of 2 of 3 processes"):
            Team(MeshAxis(mesh, "rows"))


@pytest.mark.cpu
@pytest.mark.versions
def test_two_processes(tmp_path):
    port = free_port()
    flags = f"{COMPILE_FAST} --xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(TOGETHER),
                str(rank),
                str(port),
                str(tmp_path / "kernel"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(flags),
        )
        for rank in range(2)
    ]
    found = [process.communicate(timeout=300) for process in processes]
    for process, (_, err) in zip(processes, found, strict=True):
        assert process.returncode == 0, err
    own_words = ("blocks", "refused")
    lines = [
        [line for line in out.splitlines() if line.startswith(own_words)]
        for out, _ in found
    ]
    assert lines[0][-1] == "refused ValueError"
    assert lines[1][-1] == "refused RuntimeError"
    shares = [[int(x) for x in own[0].split()[1:]] for own in lines]
    assert sum(share[0] for share in shares) == 21
    assert all(share[0] > 6 and share[1] == 0 for share in shares)
    assert [own[1] for own in lines] == [
        f"blocks {share[0]} {share[0]}" for share in shares
    ]

    # What two processes have made is what one makes, bit for bit.
    alone = tmp_path / "alone"
    x = np.random.default_rng(0).standard_normal((22, 3)).astype(np.float32)
    filter_batch_kernel(white, store=alone, block_size=4, symmetric=True)(x)
    assert chunks(alone) == chunks(tmp_path / "kernel")
