"""What several processes cost that share a kernel or a solve, compared with one.

CPU time counts, because they share the cores of this machine. Each process runs this
file as a script: `python -m benchmarks.processes`.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqxbatch import filter_batch_kernel, kernel_solve, MonteCarloKernel
from . import harness
from .harness import Bar
from .local import free_port


NAME = "processes"
# Rounds in turns; the median of the ratios counts.
ROUNDS = 7
NO_LIMIT = "several processes are compared with one"
TITLES = {
    "kernel": "kernel to a store",
    "computed": "solve, with a kernel that is computed for each product",
    "stored": "solve, with the kernel in the store",
    "models": "average over random networks",
}


def rbf(x: jax.Array, y: jax.Array) -> jax.Array:
    squares = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1) - 2 * x @ y.T
    return jnp.exp(-squares / 16)


def work(folder: pathlib.Path, num: int) -> dict[str, float]:
    """CPU seconds of each job in this process, once its programs are compiled."""
    mesh = jax.make_mesh(
        (jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    x = np.random.default_rng(0).standard_normal((num, 16), np.float32)
    y = np.sin(x[:, 0])
    settings = {"symmetric": True, "mesh": mesh}
    blocks = {**settings, "block_size": max(num // 20, 1)}
    solve = {"ridge": num / 20, "preconditioner_rank": 0, "rtol": 1e-3}

    def init(key: jax.Array) -> Any:
        return eqx.nn.MLP(16, "scalar", 256, 2, key=key)

    average = MonteCarloKernel(
        init,
        key=jax.random.key(0),
        num_samples=16,
        get="ntk",
        mesh=mesh,
        sample_axis="x",
    )
    stored = filter_batch_kernel(rbf, store=folder / "kernel", **blocks)
    few = filter_batch_kernel(rbf, store=folder / "few", **blocks)
    few(x)
    jobs: dict[str, Callable[[], Any]] = {
        "kernel": lambda: stored(x),
        "computed": lambda: kernel_solve(rbf, x, y, **blocks, **solve),
        "stored": lambda: kernel_solve(few(x), y, **settings, **solve),
        "models": lambda: jax.block_until_ready(average(x[: num // 10])),
    }
    found = {}
    for name, job in jobs.items():
        if name != "kernel":
            job()
        begin = time.process_time()
        job()
        found[name] = time.process_time() - begin
    return found


def together(num_processes: int, num: int) -> dict[str, float]:
    """CPU seconds of each job in all processes."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.processes"]
                + [str(x) for x in (rank, num_processes, port, folder, num)],
                stdout=subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
            for rank in range(num_processes)
        ]
        outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes)
    parts = [json.loads(out.splitlines()[-1]) for out in outputs]
    return {name: sum(part[name] for part in parts) for name in TITLES}


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    num, numbers = (400, (1, 2)) if quick else (20_000, (1, 2, 4))
    # Where times are not judged, the others only have to run.
    numbers = numbers if harness.judges_times() else (2,)
    rounds = [
        [together(n, num) for n in numbers] for _ in range(1 if quick else ROUNDS)
    ]
    lines = [
        "| job | processes | CPU time ÷ that of one |",
        "|---|---:|---:|",
    ]
    bars, figures = [], {}
    for name, title in TITLES.items():
        for i, n in enumerate(numbers[1:], 1):
            ratio = statistics.median(x[i][name] / x[0][name] for x in rounds)
            figures[f"{title}, {n} processes"] = ratio
            points = num // 10 if name == "models" else num
            shown = f"{title}, {points:,} points" if i == 1 else ""
            lines.append(f"| {shown} | {n} | {ratio:.2f} |")
            bars.append(Bar(f"{title}: CPU time of {n}", ratio, 1.1, is_time=True))
    where = harness.machine()
    results = {"machine": where, "jobs": figures}
    results["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    return results, "\n".join([*lines, "", harness.describe(where)]), bars


if __name__ == "__main__":
    rank, num_processes, port = map(int, sys.argv[1:4])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if num_processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
    print(json.dumps(work(pathlib.Path(sys.argv[4]), int(sys.argv[5]))))
