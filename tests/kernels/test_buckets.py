"""Kernels and maps in buckets: the same bits as in folders, whatever requests do."""

import os
import pathlib
import random
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import obstore.store
import pytest
import zarr

from eqxbatch import (
    filter_batch_kernel,
    filter_micro_vmap,
    kernel_solve,
    KernelOperator,
    over_batches,
    ZarrStore,
)
from eqxbatch._batch import zarr_objects
from ..buckets import always, at, BUCKET, first, Request, served
from ..helpers import assert_bits
from ..on_cpu import environment
from .kernel_functions import rbf
from .on_disk import chunks, Stops


pytestmark = pytest.mark.cpu


X = np.random.default_rng(0).standard_normal((13, 3)).astype(np.float32)
NUM = 4 * 4  # Chunks in blocks of 4.


@pytest.fixture(scope="module")
def bucket():
    with served() as proxy:
        yield proxy


@pytest.fixture
def urls(bucket, monkeypatch):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The chunks of the kernel in a folder."""
    folder = tmp_path_factory.mktemp("kernel")
    stored(folder)()
    return chunks(folder)


def stored(store, log=None, after=None):
    """The kernel that all tests store: a map without arguments."""
    meter = Stops(after, OSError, [] if log is None else log)
    batched = filter_batch_kernel(rbf, block_size=4, store=store, progress=meter)
    return lambda x=X: batched(x)


def chunks_of(objects):
    return {key: data for key, data in objects.items() if "/c/" in key}


@pytest.mark.quick
def test_urls(urls, expected, tmp_path):
    got = stored(f"s3://{BUCKET}/urls/kernel")()
    assert isinstance(got, zarr.Array)
    assert got.read_only
    assert_bits(got[:], stored("host")())
    assert chunks_of(urls.objects("urls/kernel")) == expected
    # What is there is read, and nothing is put.
    log = []
    with urls.faulty(lambda request: None) as requests:
        stored(f"s3://{BUCKET}/urls/kernel/", log)()
    assert log == [("start", NUM, NUM), ("close", 0)]
    assert not [x for x in requests if x.method == "PUT"]
    with pytest.raises(ValueError, match=r"has another kernel than this one: .*urls"):
        stored(f"s3://{BUCKET}/urls/kernel")(X + 1)


@pytest.mark.versions
@pytest.mark.parametrize("kind", ("objects", "memory", "local", "rust", "fsspec"))
def test_stores_of_zarr(kind, bucket, expected, tmp_path):
    store = {
        "objects": lambda: bucket.store("stores"),
        "memory": zarr.storage.MemoryStore,
        "local": lambda: zarr.storage.LocalStore(tmp_path / "kernel"),
        "fsspec": lambda: zarr.storage.FsspecStore.from_url("memory://stores"),
        "rust": lambda: zarr.storage.ObjectStore(obstore.store.MemoryStore()),
    }[kind]()
    log = []
    with pytest.raises(OSError, match="stopped"):
        stored(store, log, after=6)()
    got = stored(store, log)()
    assert_bits(got[:], stored("host")())
    starts = [entry for entry in log if entry[0] == "start"]
    assert starts[0] == ("start", NUM, 0)
    assert 4 <= starts[1][2] < NUM
    assert ZarrStore(store) == ZarrStore(store)
    if kind == "local":
        assert chunks(tmp_path / "kernel") == expected
        assert ZarrStore(store) == ZarrStore(tmp_path / "kernel")


@pytest.mark.versions
def test_maps_products_and_solves(urls):
    run = over_batches(
        filter_micro_vmap(jnp.sin), batch_size=4, store=urls.store("maps")
    )
    assert_bits(run(X)[:], np.asarray(jnp.sin(X)))
    # Examples are read from a bucket, too.
    examples = run(X)
    again = over_batches(
        filter_micro_vmap(jnp.cos), batch_size=4, store=f"s3://{BUCKET}/again"
    )
    assert_bits(again(examples)[:], np.asarray(jnp.cos(jnp.sin(X))))
    settings = {"block_size": 4, "symmetric": True}
    operator = KernelOperator(rbf, X, store=urls.store("operator"), **settings)
    dense = np.asarray(rbf(jnp.asarray(X)), np.float64)
    np.testing.assert_allclose(operator.as_matrix(), dense, rtol=1e-5)
    vector = jnp.arange(13.0)
    np.testing.assert_allclose(operator.mv(vector), dense @ np.arange(13.0), rtol=1e-4)
    read = zarr.open_group(urls.store("operator"), mode="r")["kernel"]
    found = kernel_solve(read, vector, ridge=1.0, symmetric=True)
    exact = np.linalg.solve(dense + np.eye(13), np.arange(13.0))
    np.testing.assert_allclose(found.weights, exact, rtol=1e-3, atol=1e-3)
    got = filter_batch_kernel(rbf, block_size=4, store="host")(examples)
    np.testing.assert_allclose(got, rbf(jnp.sin(X)), rtol=1e-5)


def test_more_objects_than_a_listing_has(bucket, expected):
    store, log = bucket.store("long"), []
    is_listing = lambda request: "list-type" in request.path
    with bucket.faulty(always(is_listing, "few")) as requests:
        stored(store)()
        stored(store, log)()
    assert log[0] == ("start", NUM, NUM)
    assert sum("continuation-token" in x.path for x in requests) >= 2 * NUM // 7
    assert chunks_of(bucket.objects("long")) == expected


# Requests that fail.


def is_put(request: Request) -> bool:
    return request.is_of_chunk("PUT", "1/2")


def is_get(request: Request) -> bool:
    return request.is_of_chunk("GET", "1/2")


@pytest.mark.parametrize("what", ("500", "503", "delay", "lost"))
def test_requests_that_are_repeated(what, bucket, expected):
    store = bucket.store(f"repeated/{what}")
    is_any = lambda request: request.method == "PUT"
    with bucket.faulty(first(is_put if what == "delay" else is_any, what)):
        stored(store)()
    assert chunks_of(bucket.objects(f"repeated/{what}")) == expected
    # Answers that are cut off in the middle of a chunk are no chunks.
    log, what = [], "cut" if what == "delay" else what
    with bucket.faulty(first(is_get, what)) as requests:
        stored(store, log)()
    assert log[0] == ("start", NUM, NUM)
    assert sum(map(is_get, requests)) == 3
    assert not any(map(is_put, requests))


@pytest.mark.parametrize("what", ("500", "503", "403", "lost"))
def test_requests_that_fail_for_good(what, bucket, expected):
    prefix = f"failing/{what}"
    store, log = bucket.store(prefix), []
    error = rf"could not write .*{prefix}.*/kernel/c/1/2: \w+Error"
    with (
        bucket.faulty(always(is_put, what)) as requests,
        pytest.raises(OSError, match=error),
    ):
        stored(store)()
    written = {x.key for x in requests if x.is_of_chunk("PUT") and not is_put(x)}
    assert written
    # What is there cannot be read: that says nothing about what is there.
    key = sorted(written)[0].partition("/c/")[2]
    get = lambda request: request.is_of_chunk("GET", key)
    cut = "cut" if what == "lost" else what
    with (
        bucket.faulty(always(get, cut)) as requests,
        pytest.raises(OSError, match=rf"could not read .*/kernel/c/{key}: \w+Error"),
    ):
        stored(store)()
    assert not [x for x in requests if x.method in ("PUT", "DELETE")]
    with bucket.faulty(lambda request: None) as requests:
        stored(store, log)()
    assert not [x for x in requests if x.method == "PUT" and x.key in written]
    assert log[0][2] >= len(written)
    assert chunks_of(bucket.objects(prefix)) == expected


@pytest.mark.parametrize("what", ("500", "403"))
@pytest.mark.parametrize("kind", ("metadata", "list"))
def test_failing_requests_before_anything_is_computed(kind, what, bucket):
    store, log = bucket.store(f"before/{kind}/{what}"), []
    which = {
        "metadata": lambda request: request.key.endswith("zarr.json"),
        "list": lambda request: "list-type" in request.path,
    }[kind]
    with (
        bucket.faulty(always(which, what)) as requests,
        pytest.raises(OSError, match=r"`path` could not (read|list) .*before/"),
    ):
        stored(store, log)()
    assert log == []
    assert not [x for x in requests if x.method == "PUT" and "/c/" in x.key]


@pytest.mark.versions
def test_damaged_objects_are_computed_again(bucket, expected):
    store = bucket.store("damaged")
    stored(store)()
    objects = bucket.objects("damaged")
    for i, (key, data) in enumerate(sorted(chunks_of(expected).items())[:4]):
        changed = [data[:-1], b"", data[:5] + b"\0" + data[6:], objects["zarr.json"]][i]
        store.store.put(key, changed)
    store.store.delete(sorted(chunks_of(expected))[4])
    log = []
    stored(store, log)()
    assert log[0][:2] == ("start", NUM)
    assert NUM - 5 <= log[0][2] < NUM - 2
    assert chunks_of(bucket.objects("damaged")) == expected


@pytest.mark.skipif(
    "read_missing_chunks" not in zarr.config.get("array"),
    reason="zarr fills in what is missing, and has no setting yet.",
)
def test_what_is_removed_later_is_no_zero(bucket, tmp_path):
    store = bucket.store("removed")
    for found, remove in (
        (stored(store)(), lambda: store.store.delete("kernel/c/1/2")),
        (stored(tmp_path)(), (tmp_path / "kernel" / "c" / "1" / "2").unlink),
    ):
        operator = KernelOperator(found, symmetric=True)
        remove()
        assert_bits(found[:4, :4], stored("host")()[:4, :4])
        with pytest.raises(zarr.errors.ChunkNotFoundError, match="1/2"):
            found[:]
        with pytest.raises(zarr.errors.ChunkNotFoundError, match="1/2"):
            operator.mv(jnp.ones(13))


# Runs that are killed, and several of them.

RUN = """
    import os, sys
    import jax, jax.numpy as jnp, numpy as np, obstore.store, zarr
    import eqxbatch
    from tests.buckets import RETRIES
    from tests.kernels.kernel_functions import rbf

    for line in sys.stdin:
        # Nothing has run yet, so there are no threads.
        child = os.fork()
        if not child:
            x = np.random.default_rng(0).standard_normal((13, 3)).astype(np.float32)
            eqxbatch.filter_batch_kernel(rbf, block_size=4, store=line.strip())(x)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Children:
    """A process that forks one for each run; looks like the one that runs now."""

    def __init__(self, bucket):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RUN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), **bucket.environment, "PYTHONWARNINGS": "ignore"},
        )
        self.pid, self.is_known = -1, threading.Event()

    def send_signal(self, number):
        self.is_known.wait()
        os.kill(self.pid, number)

    def run(self, url):
        """The exit status of a run."""
        self.is_known.clear()
        self.process.stdin.write(f"{url}\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())
        self.is_known.set()
        return int(self.process.stdout.readline())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="There are no forks.")
@pytest.mark.parametrize("num", (4, pytest.param(20, marks=pytest.mark.matrix)))
def test_runs_that_are_killed(num, bucket, expected):
    children, generator = Children(bucket), random.Random(num)
    bucket.process = children
    url, before = f"s3://{BUCKET}/killed/{num}", 0
    with children.process:
        for _ in range(num):
            with bucket.faulty(at(generator.randrange(28), "kill")):
                assert children.run(url) == -9
            found = chunks_of(bucket.objects(f"killed/{num}"))
            assert found.items() <= expected.items()
            assert len(found) >= before
            before = len(found)
        assert children.run(url) == 0
        children.process.stdin.close()
    assert chunks_of(bucket.objects(f"killed/{num}")) == expected


@pytest.mark.parametrize("kind", ("bucket", "bucket again", "folder", "fsspec"))
def test_two_kernels_at_one_place(kind, bucket, tmp_path):
    """Who is first wins, and the other one gets to know."""
    errors, found, began = [], [], threading.Barrier(2)
    store = {
        "folder": lambda: tmp_path,
        "fsspec": lambda: zarr.storage.FsspecStore.from_url("memory://two"),
    }.get(kind, lambda: bucket.store(f"two/{kind}"))

    def run(x):
        batched = stored(store())
        began.wait()
        try:
            found.append((x, batched(x)[:]))
        except ValueError as e:
            errors.append(str(e))

    threads = [threading.Thread(target=run, args=(x,)) for x in (X, 2 * X)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert "has another kernel than this one" in errors[0]
    ((x, got),) = found
    assert_bits(got, stored("host")(x))


@pytest.mark.parametrize("first_name", ("0" * 64, "f" * 64))
def test_claims_of_other_runs(first_name, bucket, monkeypatch):
    """One that is left is named; one that goes away is waited for."""
    monkeypatch.setattr(zarr_objects, "_PATIENCE", 0.3)
    store = bucket.store(f"claimed/{first_name[0]}")
    claim = f".claims/zarr.json/{first_name}-1"
    store.store.put(claim, b"")
    with pytest.raises(OSError, match=rf"another run for 0 s: .*{claim}.* delete this"):
        stored(store)()
    assert [*bucket.objects(f"claimed/{first_name[0]}")] == [claim]
    monkeypatch.setattr(zarr_objects, "_PATIENCE", 60.0)
    timer = threading.Timer(0.5, store.store.delete, [claim])
    timer.start()
    assert_bits(stored(store)()[:], stored("host")())
    timer.join()
    assert not [x for x in bucket.objects("claimed") if ".claims" in x]


# Wrong inputs.


class CannotDelete(zarr.storage.MemoryStore):
    supports_deletes = False


class CannotBeReadOnly(zarr.storage.MemoryStore):
    def with_read_only(self, read_only=False):
        raise NotImplementedError


@pytest.mark.versions
@pytest.mark.parametrize(
    ("store", "error", "match"),
    (
        ("s3://bucket/kernel?region=x", ValueError, "without a query; got 's3://buck"),
        ("s3://bucket/kernel#1", ValueError, "without a query"),
        ("s3://", ValueError, "must be a bucket and a prefix, as in 's3://bucket/k"),
        ("https://host/kernel", ValueError, "begins with 's3://', 'gs://', 'az://'"),
        (zarr.storage.MemoryStore(read_only=True), ValueError, "which is read-only"),
        (CannotDelete(), ValueError, "supports_deletes is False"),
        (CannotBeReadOnly(), ValueError, "with_read_only is not implemented"),
        (pathlib.Path("s3://bucket/kernel"), ValueError, "must be a string for a URL"),
        (3, TypeError, "store"),
    ),
)
def test_stores_that_are_refused(store, error, match):
    with pytest.raises(error, match=match):
        filter_batch_kernel(rbf, block_size=4, store=store)


@pytest.mark.versions
def test_buckets_that_are_refused(urls):
    store, log = urls.store("other"), []
    with pytest.raises(OSError, match=r"(?s)could not list .*missing.*NoSuchBucket"):
        stored("s3://missing/kernel", log)()
    zarr.create_array(store, name="x", shape=(2,), dtype="int8", zarr_format=2)
    with pytest.raises(ValueError, match="contains something other than a kernel"):
        stored(store, log)()
    zarr.create_group(urls.store("group"), zarr_format=3)
    with pytest.raises(ValueError, match=r"that are not a kernel of eqxbatch: .*group"):
        stored(urls.store("group"), log)()
    assert log == []


@pytest.mark.versions
def test_without_credentials(urls, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{urls.port}")
    asked = lambda request: request.path.startswith("/latest")
    with (
        urls.faulty(always(asked, "403")) as requests,
        pytest.raises(OSError, match=r"There are no credentials, .*AWS_ACCESS_KEY_ID"),
    ):
        stored(f"s3://{BUCKET}/none")()
    assert requests


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ImportError, match=r'pip install "equinox-batch\[cloud\]"'):
        stored("s3://bucket/kernel")()


def test_stores_are_not_for_transforms():
    batched = filter_batch_kernel(rbf, block_size=4, store=zarr.storage.MemoryStore())
    with pytest.raises(TypeError, match="with a `store` runs a loop in Python"):
        jax.jit(batched)(X)
