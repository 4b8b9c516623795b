"""Kernels and maps to a server of S3, compared with the same bytes put by obstore.

The server runs on this machine (`moto`, which the extra `benchmarks` installs), and
takes most of the time itself: without it, a network would.
"""

import concurrent.futures
import functools
import itertools
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import obstore
import zarr

from eqxbatch import filter_batch_kernel, filter_micro_vmap, over_batches
from . import harness
from .harness import Bar
from .local import BUCKET, bucket_server


NAME = "buckets"
NO_LIMIT = "the time is that of the server"


def opened(port: int, prefix: str) -> Any:
    """A store of obstore, below a prefix of the bucket."""
    return obstore.store.S3Store(
        BUCKET,
        prefix=prefix,
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id="test",
        secret_access_key="test",
        client_options={"allow_http": True},
    )


def jobs(quick: bool) -> dict[str, tuple[Callable[[Any], Any], list[np.ndarray]]]:
    """By title, what writes to a `store`, and the bytes that its chunks have."""
    size = 256 if quick else 2_048
    x = np.random.default_rng(0).standard_normal((4 * size, 16), np.float32)
    kernel = functools.partial(
        filter_batch_kernel, lambda x, y: x @ y.T, block_size=size
    )
    wide = filter_micro_vmap(lambda x: jnp.tile(x, size // 16))
    rows = functools.partial(over_batches, wide, batch_size=size)
    many = np.tile(x, (4, 1))
    chunk = np.random.default_rng(1).random((size, size), np.float32)
    num, megabytes = 4 * size, 4 * size**2 / 1e6
    return {
        f"kernel of {num:,} by {num:,} numbers, chunks of {megabytes:.1f} MB": (
            lambda store: kernel(store=store)(x),
            [chunk] * 16,
        ),
        f"map to {4 * num:,} rows, chunks of {megabytes:.1f} MB": (
            lambda store: rows(store=store)(many),
            [chunk] * 16,
        ),
    }


def put(store: Any, chunks: list[np.ndarray]) -> None:
    """Two at a time, as eqxbatch writes them."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        keys = (f"kernel/c/{i}" for i in range(len(chunks)))
        run = lambda key, chunk: obstore.put(store, key, memoryview(chunk).cast("B"))
        for _ in pool.map(run, keys, chunks):
            pass


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    lines = ["| job | way | time ÷ eqxbatch's |", "|---|---|---:|"]
    bars, figures, number = [], {}, itertools.count()
    rounds = harness.rounds_of(2 if quick else 7)
    with bucket_server() as port, tempfile.TemporaryDirectory() as folder:
        for title, (write, chunks) in jobs(quick).items():
            # Each writes to a place of its own, once.
            ways = {
                "eqxbatch": lambda _, store, write=write: write(
                    zarr.storage.ObjectStore(store)
                ),
                "eqxbatch, to a folder": lambda path, _, write=write: write(path),
                "the same bytes put by obstore": lambda _, store, chunks=chunks: put(
                    store, chunks
                ),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for i, (name, way) in itertools.product(range(rounds + 1), ways.items()):
                place = str(next(number))
                path, store = pathlib.Path(folder, place), opened(port, place)
                begin = time.perf_counter()
                way(path, store)
                if i:
                    times[name].append(time.perf_counter() - begin)
                shutil.rmtree(path, ignore_errors=True)
                store.delete([x["path"] for x in itertools.chain(*store.list())])
            seconds = {name: statistics.median(x) for name, x in times.items()}
            figures[title] = seconds
            shown = title
            for name in [*ways][1:]:
                ratio = seconds[name] / seconds["eqxbatch"]
                lines.append(f"| {shown} | {name} | {ratio:.2f} |")
                shown = ""
            of_puts = seconds["eqxbatch"] / seconds["the same bytes put by obstore"]
            name = f"{title}: time, of the same bytes put"
            bars.append(Bar(name, of_puts, 1.3, is_time=True))
    where = harness.machine()
    results = {"machine": where, "jobs": figures}
    results["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    note = (
        f"The server is moto, in Python, on the same cores.\n\n"
        f"{harness.describe(where)}"
    )
    return results, "\n".join([*lines, "", note]), bars
