"""Kernels on the host and on disk: continued, damaged, shared, and metered."""

import json
import pathlib
import shutil
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zarr
from jax.sharding import AxisType

from eqxbatch import (
    AbstractProgressMeter,
    EmpiricalKernel,
    filter_batch_kernel,
    HostStore,
    KernelOperator,
    MemoryBudget,
    TqdmProgressMeter,
    ZarrStore,
)
from ..helpers import bent, make_mesh, normal, on_devices, thinned
from .kernel_functions import AXES, lopsided, rbf, Structured, white
from .on_disk import chunks, Stops


pytestmark = pytest.mark.versions


SIZES = (1, 4, (4, 3), 20)


def numpy(tree):
    return jax.tree.map(lambda x: np.asarray(x) if hasattr(x, "shape") else x, tree)


def assert_close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if isinstance(b, str):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_names_of_stores(getkey, tmp_path):
    x = normal(getkey(), (5, 3))
    expected_kernel = np.asarray(jax.jit(rbf)(x))
    for store, expected in (
        ("host", HostStore()),
        (tmp_path / "path", ZarrStore(tmp_path / "path")),
        (str(tmp_path / "text"), ZarrStore(tmp_path / "text")),
        (f"{tmp_path}/host", ZarrStore(tmp_path / "host")),
    ):
        batched = filter_batch_kernel(rbf, block_size=4, store=store)
        assert batched.store == expected
        assert_close(numpy(batched(x)), expected_kernel)
        operator = KernelOperator(rbf, x, block_size=4, store=store)
        assert_close(operator.as_matrix(), expected_kernel)
    model = bent(3, 2, getkey())
    assert EmpiricalKernel(model, store="host").store == HostStore()


@pytest.mark.parametrize(
    ("size", "mesh"),
    on_devices(thinned(SIZES, (True, False)), lambda size, mesh: mesh),
)
def test_stores_equal_the_device(size, mesh, getkey, tmp_path):
    x, y = normal(getkey(), (13, 3)), normal(getkey(), (7, 3))
    mesh = make_mesh(AxisType.Explicit) if mesh else None
    cases = [(lopsided, (x, y), {}), (lopsided, (x,), {})]
    cases += [(white, (x,), {"symmetric": True})]
    for i, (kernel, args, settings) in enumerate(cases):
        # In turn, so that each has each size.
        store = HostStore() if i % 2 else ZarrStore(tmp_path / str(i))
        batched = filter_batch_kernel(
            kernel, block_size=size, mesh=mesh, store=store, **settings
        )
        got = batched(*args)
        assert isinstance(got, np.ndarray | zarr.Array)
        assert_close(np.asarray(got), np.asarray(jax.jit(kernel)(*args)))
        if "symmetric" in settings:
            got = np.asarray(got)
            np.testing.assert_array_equal(got, got.T)


@pytest.mark.parametrize("one_side", (True, False))
def test_pytrees(one_side, getkey, tmp_path):
    model = Structured(jnp.array(0.7), 2)
    inputs = lambda n: {"a": normal(getkey(), (n, 3)), "b": normal(getkey(), (n, 2))}
    args = (inputs(9),) if one_side else (inputs(9), inputs(6))
    expected = numpy(eqx.filter_jit(model)(*args))
    cases = [(False, HostStore()), (one_side, ZarrStore(tmp_path / "kernel"))]
    for symmetric, store in cases:
        batched = filter_batch_kernel(
            model, block_size=4, out_axes=AXES, symmetric=symmetric, store=store
        )
        got = batched(*args)
        assert_close(numpy(got), expected)
    names = {x.name for x in (tmp_path / "kernel").iterdir() if x.is_dir()}
    assert names == {"k", "behind", "swapped", "rows", "columns", "both_0"}
    assert got["k"].chunks == ((3, 3))
    assert got["rows"].chunks == (3,)


# In default runs: `tests/ntk/test_estimators_in_blocks.py`.
@pytest.mark.matrix
def test_estimators(getkey, tmp_path):
    kernel = EmpiricalKernel(bent(3, 2, getkey()), trace_axes=())
    x = normal(getkey(), (7, 3))
    store = ZarrStore(tmp_path / "kernels")
    got = filter_batch_kernel(kernel, block_size=3, store=store)(x)
    assert type(got).__name__ == "Kernel"
    assert_close(numpy(tuple(got)), numpy(tuple(kernel(x))))


@pytest.mark.parametrize("totals", ((0, 5), (5, 0), (0, 0)))
def test_no_examples(totals, tmp_path):
    x, y = (jnp.zeros((n, 3)) for n in totals)
    for store in (HostStore(), ZarrStore(tmp_path)):
        got = filter_batch_kernel(lopsided, block_size=4, store=store)(x, y)
        assert got.shape == totals


@pytest.mark.parametrize(
    "size", (2, pytest.param(MemoryBudget(4_000), marks=pytest.mark.cpu))
)
def test_arrays_without_entries(size, tmp_path):
    def kernel(x, y):
        return {"k": x @ y.T, "rows": x[:, 0], "none": jnp.zeros((len(x), len(y), 0))}

    out_axes = {"k": (0, 1), "rows": (0, None), "none": (0, 1)}
    for i, totals in enumerate(((0, 5), (5, 0), (0, 0), (3, 5))):
        x, y = (np.ones((total, 2), np.float32) for total in totals)
        stored = filter_batch_kernel(
            kernel, block_size=size, out_axes=out_axes, store=tmp_path / f"{i}"
        )(x, y)
        for got, expected in zip(
            jax.tree.leaves(numpy(stored)),
            jax.tree.leaves(jax.jit(kernel)(x, y)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, expected)


# Kernels in other processes, and of earlier versions.


@pytest.mark.quick
@pytest.mark.parametrize("shapes", (((5, 2), (3, 2)), ((4, 2), None), ((0, 2), (3, 2))))
def test_kernels_are_opened_by_zarr(shapes, getkey, tmp_path):
    args = [None if shape is None else normal(getkey(), shape) for shape in shapes]
    path = tmp_path / "kernel"
    stored = filter_batch_kernel(white, block_size=2, store=path)(*args)
    opened = zarr.open_group(path, mode="r")["kernel"]
    assert opened.nchunks_initialized == opened.nchunks
    np.testing.assert_array_equal(opened[:], stored[:])
    if opened.nchunks:
        # One that is not finished has fewer.
        (path / "kernel" / [*chunks(path / "kernel")][-1]).unlink()
        assert opened.nchunks_initialized < opened.nchunks


def test_half_of_a_kernel_is_refused(tmp_path):
    """Earlier versions could leave out the blocks below the diagonal."""
    path, x = tmp_path / "kernel", jnp.ones((5, 2))
    kernel = filter_batch_kernel(white, block_size=2, symmetric=True, store=path)
    whole = kernel(x)[:]
    record = json.loads((path / "zarr.json").read_text())
    of_kernel = record["attributes"]["eqxbatch"]
    assert "upper_only" not in of_kernel
    # Whole kernels can still be resumed.
    of_kernel["upper_only"] = False
    (path / "zarr.json").write_text(json.dumps(record))
    np.testing.assert_array_equal(kernel(x)[:], whole)
    of_kernel["upper_only"] = True
    (path / "zarr.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="half of a kernel, stored by eqxbatch"):
        kernel(x)


def test_dtypes_that_zarr_lacks(getkey, tmp_path):
    x = normal(getkey(), (9, 3))
    store = ZarrStore(tmp_path / "kernel")
    # NumPy takes the last of these for a number of its own kind.
    for name in ("bfloat16", "float8_e5m2"):
        halves = lambda x, y=None, name=name: rbf(x, y).astype(name)
        with pytest.raises(TypeError, match=f"zarr has no arrays of dtype {name}"):
            filter_batch_kernel(halves, block_size=4, store=store)(x)
        assert not (tmp_path / "kernel").exists()
    halves = lambda x, y=None: rbf(x, y).astype(jnp.bfloat16)
    got = filter_batch_kernel(halves, block_size=4, store=HostStore())(x)
    assert got.dtype == ml_dtypes.bfloat16


def test_stores_are_not_for_transforms(getkey):
    x = normal(getkey(), (9, 3))
    batched = filter_batch_kernel(rbf, block_size=4, store=HostStore())
    for transform in (jax.jit, jax.vmap, jax.jacfwd):
        with pytest.raises(TypeError, match="with a `store` runs a loop in Python"):
            transform(batched)(x[None] if transform is jax.vmap else x)
    metered = filter_batch_kernel(rbf, block_size=4, progress=TqdmProgressMeter())
    with pytest.raises(TypeError, match="with `progress` runs a loop in Python"):
        jax.jit(metered)(x)


@pytest.mark.parametrize("name", ("zarr", "tqdm"))
def test_missing_extras(name, getkey, tmp_path, monkeypatch):
    x = normal(getkey(), (9, 3))
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    settings, extra = {
        "zarr": ({"store": ZarrStore(tmp_path / "kernel")}, "store"),
        "tqdm": ({"progress": TqdmProgressMeter()}, "progress"),
    }[name]
    batched = filter_batch_kernel(rbf, block_size=4, **settings)
    with pytest.raises(ImportError, match=rf'pip install "equinox-batch\[{extra}\]"'):
        batched(x)


# Stores that others have changed.


def difference(x, y):
    return x - y.T


def kept(path, meter=None):
    """A stored kernel of chunks of equal sizes, and what its meter has counted."""
    log = []
    meter = Stops(None, None, log) if meter is None else meter
    batched = filter_batch_kernel(
        difference, block_size=2, store=ZarrStore(path), progress=meter
    )
    return batched(jnp.asarray([[1.0], [2.0], [3.0], [4.0]])), log


def test_chunks_that_have_changed_places(tmp_path):
    expected = np.asarray(kept(tmp_path)[0])
    before, folder = chunks(tmp_path), tmp_path / "kernel" / "c"
    (folder / "0" / "0").rename(folder / "first")
    (folder / "0" / "1").rename(folder / "0" / "0")
    (folder / "first").rename(folder / "0" / "1")
    assert chunks(tmp_path) != before
    found, log = kept(tmp_path)
    assert log[0] == ("start", 4, 2)
    np.testing.assert_array_equal(np.asarray(found), expected)
    assert chunks(tmp_path) == before


def edited(node, *path, value):
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value


@pytest.mark.parametrize(
    "edit",
    (
        lambda node: edited(node, "shape", value=[4, 8]),
        lambda node: edited(node, "data_type", value="int32"),
        lambda node: edited(node, "fill_value", value=1.0),
        lambda node: edited(
            node, "chunk_grid", "configuration", "chunk_shape", value=[4, 1]
        ),
        lambda node: edited(node, "codecs", 0, "configuration", "endian", value="big"),
        lambda node: edited(node, "codecs", value=node["codecs"][:1]),
        lambda node: edited(
            node, "chunk_key_encoding", "configuration", "separator", value="."
        ),
        lambda node: edited(node, "zarr_format", value=2),
        lambda node: edited(node, "data_type", value="float99"),
        lambda node: node.pop("codecs"),
    ),
)
def test_metadata_of_arrays_that_were_edited(edit, tmp_path):
    expected = np.asarray(kept(tmp_path)[0])
    before, file = chunks(tmp_path), tmp_path / "kernel" / "zarr.json"
    node = json.loads(file.read_text())
    node["attributes"]["mine"] = 1
    file.write_text(json.dumps(node))
    assert kept(tmp_path)[1][0] == ("start", 4, 4)
    edit(node)
    file.write_text(json.dumps(node))
    with pytest.raises(ValueError, match=r"kernel/zarr\.json.*Chunks are kept"):
        kept(tmp_path)
    assert chunks(tmp_path) == before
    file.unlink()
    found, log = kept(tmp_path)
    assert log[0] == ("start", 4, 4)
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("name", ("zarr.json", "kernel/zarr.json"))
def test_flipped_bits_of_metadata(name, tmp_path):
    expected = np.asarray(kept(tmp_path)[0])
    file = tmp_path / name
    data = file.read_bytes()
    for at in range(0, len(data), 29):
        flipped = bytes([data[at] ^ (1 << at % 8)])
        file.write_bytes(data[:at] + flipped + data[at + 1 :])
        error = None
        try:
            found = np.asarray(kept(tmp_path)[0])
        except ValueError as e:
            error = str(e)
        if error is None:
            np.testing.assert_array_equal(found, expected)
        else:
            assert error.startswith("`path` has ")
            assert str(tmp_path) in error


class RunsAnother(AbstractProgressMeter):
    """Stores the same kernel, while a chunk of this run is unfinished."""

    path: pathlib.Path

    def start(self, num_blocks, num_done):
        pass

    def step(self, state, num_nans):
        unfinished = self.path / "kernel" / "c" / "1" / f"1.{'0' * 32}.partial"
        unfinished.parent.mkdir(exist_ok=True)
        unfinished.write_text("half a chunk")
        kept(self.path)
        assert unfinished.exists()

    def close(self, state):
        pass


def test_two_runs_keep_their_unfinished_files(tmp_path):
    kept(tmp_path, RunsAnother(tmp_path))
    own = [tmp_path / "thesis.partial", tmp_path / "kernel" / "c" / "thesis.partial"]
    for file in own:
        file.write_text("mine")
    assert sum("partial" in name for name in chunks(tmp_path)) == 2
    # Now there is no other run.
    found, _ = kept(tmp_path)
    assert sum("partial" in name for name in chunks(tmp_path)) == 1
    assert all(file.exists() for file in own)
    assert np.asarray(found)[3, 0] == 3


def test_unfinished_files_are_kept_without_locks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # As on Windows.
    kept(tmp_path)
    unfinished = tmp_path / "kernel" / "c" / "1" / f"1.{'0' * 32}.partial"
    unfinished.write_text("half a chunk")
    assert kept(tmp_path)[1][0] == ("start", 4, 4)
    assert unfinished.exists()


class Deletes(AbstractProgressMeter):
    """Deletes a folder after each block."""

    path: str

    def start(self, num_blocks, num_done):
        pass

    def step(self, state, num_nans):
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self, state):
        pass


@pytest.mark.parametrize("name", ("kernel/c/0", "kernel", "."))
def test_files_deleted_while_a_kernel_is_computed(name, tmp_path):
    folder = tmp_path / "store"
    meter = Deletes(str(folder / name))
    with pytest.raises(OSError, match="store"):
        kept(folder, meter)
    # Blocks that were being written may have come after.
    shutil.rmtree(folder / name, ignore_errors=True)
    found, _ = kept(folder)
    assert np.asarray(found)[3, 0] == 3


def test_settings_of_zarr_are_not_changed(tmp_path, monkeypatch):
    """They are global, and several threads may store kernels."""

    def raises(*_, **__):
        raise AssertionError

    monkeypatch.setattr(zarr.config, "set", raises)
    assert np.asarray(kept(tmp_path)[0])[1, 1] == 0
    assert len(chunks(tmp_path)) == 4
