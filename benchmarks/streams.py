"""`over_batches`, compared with one batch of all examples, and with loops by hand.

Some measurements need a process of their own, which runs this file as a script:
`python -m benchmarks.streams`.
"""

import concurrent.futures
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import zarr

from eqxbatch import (
    AbstractProgressMeter,
    filter_batch_kernel,
    filter_ggn_diagonal,
    filter_kfac,
    filter_micro_grad,
    filter_micro_vmap,
    MemoryBudget,
    over_batches,
    Variance,
)
from . import harness, local, work
from .batch_kernel import in_own_process, runner, Works
from .harness import Bar, OURS
from .kernels import ratios
from .limit import NoLimit, num_bytes, Shares, Work


NAME = "streams"
COLUMNS, CLASSES = 256, 10
BY_DISK = NoLimit("the other way is what the disk can do")


def predict(model: Any, x: Any, label: Any) -> jax.Array:
    del label
    return model(x)


def loss_of(logits: jax.Array, x: Any, label: Any) -> jax.Array:
    del x
    return -jax.nn.log_softmax(logits)[label]


def loss(model: Any, x: Any, label: Any) -> jax.Array:
    return loss_of(model(x), x, label)


def model_of(width: int) -> eqx.nn.MLP:
    return eqx.nn.MLP(COLUMNS, CLASSES, width, 2, key=jr.key(0))


def in_memory(quick: bool) -> tuple[list[str], list[Bar], dict[str, Any], Works]:
    """Batches that are on the device, compared with one batch of their examples."""
    num, size, micro = (512, 128, 64) if quick else (8_192, 1_024, 128)
    model = model_of(64 if quick else 512)
    x, label = jr.normal(jr.key(1), (num, COLUMNS)), jnp.arange(num) % CLASSES
    batches = [
        jax.block_until_ready((x[i : i + size], label[i : i + size]))
        for i in range(0, num, size)
    ]
    settings = {"microbatch_size": micro}
    jobs = {
        "gradient": filter_micro_grad(loss, **settings),
        "clipped gradient": filter_micro_grad(loss, clip_norm=1.0, **settings),
        "Gauss-Newton diagonal": filter_ggn_diagonal(predict, loss_of, **settings),
        "K-FAC": filter_kfac(predict, loss_of, **settings),
    }
    least = works_of(model, x, label)
    lines, bars, figures, works = [], [], {}, {}
    for name, transform in jobs.items():
        programs = {
            OURS: runner(over_batches(transform), model, batches),
            "one batch": runner(transform, model, x, label),
        }
        found, seconds = ratios(programs, 3 if quick else 15)
        ratio = found["one batch"]
        title = f"{name}, {num // size} batches of {size:,}"
        works[title] = least[name], seconds
        lines.append(f"| {title} | one batch of all | {ratio:.2f} |")
        figures[name] = {"seconds": seconds, "ratio": ratio}
        bars.append(Bar(f"{name}: time, of one batch", 1 / ratio, 1.05, is_time=True))
    return lines, bars, figures, works


def works_of(model: Any, x: jax.Array, label: jax.Array) -> dict[str, Work]:
    """The work of all examples, by job."""
    num, weights = len(x), eqx.filter(model, eqx.is_array)
    of_loss, of_logits = (
        work.products_of(fun, model, x, label) for fun in (loss, predict)
    )
    moved = num_bytes(weights, x, label)
    like_model = moved + num_bytes(weights)
    return {
        "gradient": Work(work.accumulated(of_loss, num), like_model),
        "clipped gradient": Work(work.clipped(of_loss, num), like_model),
        "Gauss-Newton diagonal": Work(
            work.ggn_diagonal(of_logits, num, CLASSES), like_model
        ),
        "K-FAC": Work(
            work.kfac(of_logits, num, CLASSES),
            moved + 4 * work.kfac_size(of_logits),
            "highest",
        ),
    }


def from_disk(quick: bool) -> tuple[list[str], list[Bar], dict[str, Any], Works]:
    """Rows on disk, compared with a loop that reads ahead in another thread."""
    num, size, micro = (2_048, 512, 128) if quick else (200_000, 4_096, 512)
    model = model_of(64 if quick else 256)
    transform = filter_micro_vmap(model, microbatch_size=micro, accumulator=Variance())
    rows = eqx.filter_jit(
        lambda x: jnp.sum(
            filter_micro_vmap(model, microbatch_size=micro)(x) ** 2, axis=0
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        x = stored(pathlib.Path(folder) / "examples", num, size)
        stream = over_batches(transform, batch_size=size)

        def by_hand() -> list:
            totals = []
            starts = range(0, num, size)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                read = lambda start: jax.device_put(x[start : start + size])
                ahead = pool.submit(read, 0)
                for start in starts:
                    batch, ahead = ahead.result(), pool.submit(read, start + size)
                    totals.append(rows(batch))
                    if len(totals) > 1:
                        jax.block_until_ready(totals[-2])
            return totals

        programs = {OURS: runner(stream, x), "by hand": runner(by_hand)}
        found, seconds = ratios(programs, 3 if quick else 5)
    ratio = found["by hand"]
    title = f"variance of logits, {num:,} rows on disk, {size:,} at a time"
    line = f"| {title} | sums in a loop that reads ahead | {ratio:.2f} |"
    name = "from disk: time, of a loop that reads ahead"
    figures = {"from disk": {"seconds": seconds, "ratio": ratio}}
    bars = [Bar(name, 1 / ratio, 1.1, is_time=True)]
    return [line], bars, figures, {title: (BY_DISK, seconds)}


def stored(path: pathlib.Path, num: int, size: int) -> Any:
    """Examples on disk, as a zarr array."""
    chunk = np.random.default_rng(0).standard_normal((size, COLUMNS), np.float32)
    array = zarr.create_array(
        str(path),
        shape=(num, COLUMNS),
        chunks=chunk.shape,
        dtype=chunk.dtype,
        compressors=None,
    )
    for start in range(0, num, size):
        array[start : start + size] = chunk[: num - start]
    return array


def resident(num: int, size: int) -> dict[str, float]:
    """The growth of the peak memory with batches from a generator, in batches."""
    transform = filter_micro_vmap(
        lambda x: x, microbatch_size=256, accumulator=Variance()
    )

    def batches(num: int) -> Iterator[np.ndarray]:
        for i in range(num):
            yield np.full((size, COLUMNS), i, np.float32)

    run = over_batches(transform)
    small = np.zeros((256, COLUMNS), np.float32)
    jax.block_until_ready(run([small]))
    before = local.peak_resident()
    jax.block_until_ready(run(batches(4)))
    few = local.peak_resident()
    jax.block_until_ready(run(batches(num)))
    many = local.peak_resident()
    batch = size * COLUMNS * 4
    return {"few": (few - before) / batch, "many": (many - before) / batch}


def to_disk(num: int, size: int) -> dict[str, float]:
    """Maps of rows on disk to disk, and as many bytes without a model."""
    embed = filter_micro_vmap(model_of(256), microbatch_size=1_024)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        x = stored(path / "examples", num, size)
        wide = filter_micro_vmap(lambda x: jnp.tanh(x), microbatch_size=1_024)
        chunk = np.random.default_rng(0).random((size, COLUMNS), np.float32)

        def own(folder: pathlib.Path) -> None:
            over_batches(wide, batch_size=size, store=folder / "rows")(x)

        def plain(folder: pathlib.Path) -> None:
            for i in range(num // size):
                (folder / str(i)).write_bytes(memoryview(chunk))

        over_batches(wide, batch_size=size, store=path / "warm")(x[:size])
        before = local.peak_resident()
        times = local.write_in_turn(own, plain)
        start = time.perf_counter()
        over_batches(embed, batch_size=size, store=path / "embeddings")(x)
        embeddings = time.perf_counter() - start
        start = time.perf_counter()
        for i in range(0, num, size):
            x[i : i + size]
        read = time.perf_counter() - start
    return {
        "seconds": times.own,
        "embeddings": embeddings,
        "read": read,
        "ratio": times.own / times.plain,
        "resident": times.resident - before,
    }


class Anonymous(AbstractProgressMeter):
    """Records the most memory beside that of files, which the system can take back."""

    most: list[int] = eqx.field(static=True)

    def start(self, num_blocks: int | None, num_done: int) -> None:
        self.step(None, 0)

    def step(self, state: None, num_nans: int) -> None:
        status = pathlib.Path("/proc/self/status").read_text()
        (line,) = [x for x in status.splitlines() if x.startswith("RssAnon:")]
        self.most.append(1024 * int(line.split()[1]))

    def close(self, state: None) -> None:
        pass


def kernel(num: int, columns: int) -> dict[str, float]:
    """A kernel of a memory-mapped array to disk, and one of the array in memory."""
    with tempfile.TemporaryDirectory() as folder:
        path, rng = pathlib.Path(folder), np.random.default_rng(0)
        x = np.memmap(path / "x", np.float32, mode="w+", shape=(num, columns))
        for row in x:
            row[:] = rng.standard_normal(columns, np.float32)
        os.sync()

        def seconds(name: str, x: np.ndarray, meter: Anonymous | None) -> float:
            run = filter_batch_kernel(
                lambda x, y: x @ y.T,
                block_size=MemoryBudget("200MB"),
                symmetric=True,
                store=path / name,
                progress=meter,
            )
            start = time.perf_counter()
            run(x)
            return time.perf_counter() - start

        seconds("warm", x[:64], None)
        meter = Anonymous([])
        own = seconds("own", x, meter)
        in_memory = seconds("in memory", np.array(x), None)
    return {
        "seconds": own,
        "ratio": own / in_memory,
        "resident": max(meter.most) - meter.most[0],
        "examples": 4 * num * columns,
    }


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    lines = ["| job | way | time ÷ eqxbatch's |", "|---|---|---:|"]
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    works: Works = {}
    # These only compare times.
    compared = (in_memory, from_disk) if harness.judges_times() else ()
    for measure in compared:
        rows, more, found, done = measure(quick)
        lines, bars = [*lines, *rows], [*bars, *more]
        figures, works = {**figures, **found}, {**works, **done}
    num, size = 8 if quick else 64, 65_536
    memory = in_own_process("resident", num, size, module="benchmarks.streams")
    # Mostly 3.2. XLA frees a batch in a thread of its own, on a busy machine after the
    # next one is made.
    growth = memory["many"] - memory["few"]
    bars += [
        Bar("resident memory, in batches", memory["many"], 4.5),
        Bar(f"resident memory, {num} batches over 4, in batches", growth, 1.2),
    ]
    num, size = (20_000, 2_000) if quick else (1_000_000, 8_000)
    disk = in_own_process("to_disk", num, size, module="benchmarks.streams")
    title = f"{num:,} rows of {COLUMNS} numbers from disk to disk"
    ratio = 1 / disk["ratio"]
    works[title] = BY_DISK, disk["seconds"]
    lines.append(f"| {title} | the same bytes written, not read | {ratio:.2f} |")
    bars += [
        Bar("to disk: resident memory in MB", disk["resident"] / 1e6, 200),
        Bar("to disk: time, of the same bytes", disk["ratio"], 1.3, is_time=True),
    ]
    num, columns = (512, 4_096) if quick else (16_384, 16_384)
    mapped = in_own_process("kernel", num, columns, module="benchmarks.streams")
    title = f"kernel of {num:,} memory-mapped rows of {columns:,} numbers, to disk"
    works[title] = BY_DISK, mapped["seconds"]
    lines.append(f"| {title} | of rows in memory | {1 / mapped['ratio']:.2f} |")
    bars += [
        Bar(
            "kernel of rows on disk: resident memory in MB",
            mapped["resident"] / 1e6,
            200,
        ),
        Bar(
            "kernel of rows on disk: time, of rows in memory",
            mapped["ratio"],
            1.1,
            is_time=True,
        ),
    ]
    where, shares = harness.machine(), Shares.of(works, harness.rates())
    figures = {"machine": where, "jobs": figures, "memory": memory, "disk": disk}
    figures["kernel"], figures["limit"] = mapped, shares.figures
    figures["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    notes = (
        f"\n{shares.notes}\n\n"
        f"Peak memory above that before the first batch: {memory['many']:.1f} "
        f"batches over many of them, {disk['resident'] / 1e6:.0f} MB from disk to "
        f"disk, and {mapped['resident'] / 1e6:.0f} MB for the kernel of "
        f"{mapped['examples'] / 1e9:.1f} GB of rows, within a budget of 200 MB.\n\n"
        f"{harness.describe(where)}"
    )
    return figures, "\n".join([*shares.table(lines), notes]), bars


if __name__ == "__main__":
    _, what, *numbers = sys.argv
    tasks = {"resident": resident, "to_disk": to_disk, "kernel": kernel}
    print(json.dumps(tasks[what](*map(int, numbers))))
