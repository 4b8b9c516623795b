"""`kernel_solve` of kernels on disk, compared with reading them.

Each job runs this file in its own process: `python -m benchmarks.solve`.
"""

import json
import math
import sys
import tempfile
import time
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import zarr
from sklearn.datasets import load_digits

from eqxbatch import (
    AbstractProgressMeter,
    EmpiricalNTK,
    kernel_solve,
    KernelOperator,
    ZarrStore,
)
from . import harness, local
from .batch_kernel import in_own_process, rbf
from .harness import Bar
from .limit import NoLimit


NAME = "solve"
NO_LIMIT = NoLimit("its tables compare with reading the blocks, which is the limit")
RTOL = 1e-6


def ntk_of_digits(n: int, size: int, rank: int) -> dict[str, Any]:
    """Ten classes of handwritten digits, with the kernel of a network."""
    digits = load_digits()
    x = jnp.asarray(digits.data[:n] / 16, jnp.float32)
    y = jnp.asarray(np.eye(10)[digits.target[:n]] - 0.1, jnp.float32)
    model = eqx.nn.MLP(64, 10, 256, 3, key=jr.key(0))
    return solved(EmpiricalNTK(model), x, y, 1.0, size, rank)


def rbf_ridge(n: int, size: int, rank: int) -> dict[str, Any]:
    """A smooth function of four variables with noise, with an RBF kernel."""
    random = np.random.default_rng(0)
    x = random.uniform(size=(n, 4)).astype(np.float32) * 6
    y = np.sin(x).sum(1) + 0.1 * random.standard_normal(n)
    y = jnp.asarray(y, jnp.float32)
    return solved(rbf, jnp.asarray(x), y, 10.0, size, rank)


class Clock(AbstractProgressMeter):
    """Records when a solve begins, and when each product is done."""

    times: list[float]

    def start(self, num_blocks: int, num_done: int) -> None:
        self.times.append(time.perf_counter())

    def step(self, state: None, num_nans: int, residual: float | None = None) -> None:
        self.times.append(time.perf_counter())

    def close(self, state: None) -> None:
        pass


def solved(
    kernel: Any, x: Any, y: Any, ridge: float, size: int, rank: int
) -> dict[str, Any]:
    """The seconds of a solve, and of reading the stored blocks once."""
    with tempfile.TemporaryDirectory() as folder:
        operator = KernelOperator(
            kernel,
            x,
            block_size=size,
            symmetric=True if kernel is rbf else None,
            store=ZarrStore(folder),
        )
        # Read before and after, because the machine may be busier at one of the times.
        reads = [read_once(folder)]
        clock = Clock([])
        begin = time.perf_counter()
        found = kernel_solve(
            operator,
            y,
            ridge=ridge,
            preconditioner_rank=rank,
            rtol=RTOL,
            progress=clock,
        )
        before, first, *_, last = clock.times
        resident = local.peak_resident()
        reads.append(read_once(folder))
    return {
        "preconditioner": before - begin,
        # The time of the first product includes compiling the preconditioner.
        "product": (last - first) / (found.num_products - 1),
        "products": found.num_products,
        "read": sum(reads) / len(reads),
        "residual": float(np.max(found.residuals)),
        "resident": resident,
    }


def read_once(folder: str) -> float:
    """The seconds to read the stored blocks, one after another."""
    stored = zarr.open_array(f"{folder}/kernel", mode="r")
    size = stored.chunks[0]
    num = math.ceil(stored.shape[0] / size)
    start = time.perf_counter()
    for row in range(num):
        for column in range(row, num):
            rows = slice(row * size, (row + 1) * size)
            _ = stored[rows, column * size : (column + 1) * size]
    return time.perf_counter() - start


JOBS = {"ntk_of_digits": ntk_of_digits, "rbf_ridge": rbf_ridge}


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    jobs = {
        "ntk_of_digits": (300, 100, 50) if quick else (1_797, 512, 200),
        "rbf_ridge": (2_000, 500, 50) if quick else (50_000, 1_000, 100),
    }
    titles = {
        "ntk_of_digits": "NTK of an MLP, {:,} digits, 10 right-hand sides",
        "rbf_ridge": "RBF kernel, {:,} examples",
    }
    lines = [
        "| job | products | product ÷ reading | preconditioner ÷ reading | memory |",
        "|---|---:|---:|---:|---:|",
    ]
    bars, figures = [], {}
    for name, (n, size, rank) in jobs.items():
        own = in_own_process(
            name,
            *(n, size, rank),
            module=__name__,
            # The threads of BLAS would compete with those that read.
            environment={"OPENBLAS_NUM_THREADS": "1"},
        )
        title = titles[name].format(n)
        product, before = (own[x] / own["read"] for x in ("product", "preconditioner"))
        lines.append(
            f"| {title}, rank {rank} | {own['products']} | {product:.2f} | "
            f"{before:.1f} | {own['resident'] / 1e9:.2f} GB |"
        )
        figures[title] = own
        bars += [
            Bar(f"{title}: relative residual", own["residual"], RTOL),
            Bar(f"{title}: resident memory in GB", own["resident"] / 1e9, 1.0),
            Bar(f"{title}: time of a product, of reading", product, 1.25, True),
        ]
    where = harness.machine()
    results = {"machine": where, "jobs": figures}
    results["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    return results, "\n".join([*lines, "", harness.describe(where)]), bars


if __name__ == "__main__":
    _, what, *numbers = sys.argv
    print(json.dumps(JOBS[what](*map(int, numbers))))
