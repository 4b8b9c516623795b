"""`filter_batch_kernel`, compared with kernels at once, a disk, and `nt.batch`.

Some measurements need a process of their own, which runs this file as a script:
`python -m benchmarks.batch_kernel`. `nt` is `neural_tangents`.
"""

import functools
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import AxisType
from sklearn.datasets import load_digits

from eqxbatch import (
    EmpiricalNTK,
    filter_batch_kernel,
    KernelProduct,
    TopK,
    ZarrStore,
)
from . import harness, local, work
from .harness import Bar, OURS, temporaries
from .kernels import CNN, Peer, ratios, timed
from .limit import NoLimit, num_bytes, Shares, Work
from .neural_tangents.models import arc_cosine


NAME = "batch_kernel"
DENSE = "all at once"


def rbf(x1: Any, x2: Any = None, *, scale: float = 1.5) -> jax.Array:
    x2 = x1 if x2 is None else x2
    squares = [jnp.sum(x**2, axis=-1) for x in (x1, x2)]
    distances = squares[0][:, None] + squares[1][None, :] - 2 * x1 @ x2.T
    return jnp.exp(-distances / (2 * scale**2))


# The work of each job, or why there is no limit, and the seconds that it took.
Works = dict[str, tuple[Work | NoLimit, float]]


def of_blocks(x: jax.Array, size: int) -> float:
    """The FLOPs of the inner products that an RBF kernel is made of."""
    return 2.0 * math.prod(x.shape[1:]) * work.upper_tiles(len(x), size)


def of_ntk(model: Any, x: jax.Array, size: int) -> float:
    products = work.products_of(lambda model, x: model(x), model, x)
    outputs = eqx.filter_eval_shape(model, x[0]).size
    tiles = work.upper_tiles(len(x), size)
    return work.kernel(products, len(x), outputs=outputs, tiles=tiles)


def whole(flops: float, x: jax.Array) -> Work:
    """A kernel that is also stored."""
    return Work(flops, num_bytes(x) + 4 * len(x) ** 2)


def temporaries_of(fun: Callable, n: int) -> int:
    x = jax.ShapeDtypeStruct((n, 64), jnp.float32)
    return temporaries(jax.jit(lambda x: fun(x)).lower(x))


def runner(fun: Callable, *args: Any) -> Callable[[], float]:
    """A function that runs the compiled `fun(*args)` and returns the seconds."""
    run = lambda: jax.block_until_ready(fun(*args))
    run()
    return lambda: timed(run)


def on_digits(quick: bool) -> tuple[list[str], list[Bar], dict[str, Any], Works]:
    """Compared with the kernel at once, for examples whose kernel fits in memory."""
    x = jnp.asarray(load_digits().data / 16, jnp.float32)
    x = x[:300] if quick else x
    size = 64 if quick else 512
    model = eqx.nn.MLP(64, 10, 32 if quick else 256, 3, key=jr.key(0))
    ntk = EmpiricalNTK(model)
    lines, bars, figures, works = [], [], {}, {}
    flops = {"RBF kernel": of_blocks(x, size), "NTK of an MLP": of_ntk(model, x, size)}
    for name, kernel in (("RBF kernel", rbf), ("NTK of an MLP", ntk)):
        dense = eqx.filter_jit(kernel)
        batch = functools.partial(filter_batch_kernel, kernel, block_size=size)
        # The estimator itself declares that it is symmetric.
        blocked = {OURS: batch(symmetric=True if kernel is rbf else None)}
        blocked["every block"] = batch(symmetric=False)
        ways = {DENSE: dense, **blocked}
        programs = {key: runner(fun, x) for key, fun in ways.items()}
        found, seconds = ratios(programs, 5 if quick else 25)
        flat = [temporaries_of(blocked[OURS], n) for n in (2048, 8192)]
        at_once = temporaries_of(dense, 2048) or 1
        title = f"{name}, {len(x):,} digits by {size}"
        done = harness.explained(whole(flops[name], x), programs[OURS])
        works[title] = done, seconds
        for way in (DENSE, "every block"):
            lines.append(f"| {title} | {way} | {found[way]:.2f} |")
            title = ""
        figures[name] = {"seconds": seconds, "ratios": found, "temporaries": flat}
        figures[name]["temporaries_at_once"] = at_once
        # The kept factors of the examples grow with their number.
        growth = 1.3 if kernel is rbf else 4.0
        bars += [
            Bar(f"{name}: time, of all at once", 1 / found[DENSE], 1.05, is_time=True),
            Bar(f"{name}: temporaries, 8,192 of 2,048", flat[1] / flat[0], growth),
        ]
    return lines, bars, figures, works


def beside_estimators(
    quick: bool,
) -> tuple[list[str], list[Bar], dict[str, Any], Works]:
    """An estimator as the kernel function, compared with its own `block_size`."""
    mlp = eqx.nn.MLP(64, 10, 128, 2, key=jr.key(0))
    images = jr.normal(jr.key(1), (32 if quick else 256, 3, 16, 16))
    jobs = {
        "NTK of an MLP": (mlp, jr.normal(jr.key(1), (64 if quick else 512, 64)), 16),
        "NTK of a CNN": (CNN(10, 16, False, jr.key(0)), images, 16),
    }
    lines, bars, figures, works = [], [], {}, {}
    for name, (model, x, size) in jobs.items():
        ways = {
            OURS: filter_batch_kernel(EmpiricalNTK(model), block_size=size),
            "EmpiricalNTK": EmpiricalNTK(model, block_size=size),
        }
        programs = {key: runner(fun, x) for key, fun in ways.items()}
        found, seconds = ratios(programs, 5 if quick else 25)
        ratio = found["EmpiricalNTK"]
        title = f"{name}, {len(x):,} examples by {size}"
        done = harness.explained(whole(of_ntk(model, x, size), x), programs[OURS])
        works[title] = done, seconds
        lines.append(f"| {title} | `EmpiricalNTK(block_size={size})` | {ratio:.2f} |")
        figures[f"{name}, own blocks"] = {"seconds": seconds, "ratio": ratio}
        title = f"{name}: time, of the estimator's own blocks"
        bars.append(Bar(title, 1 / ratio, 1.15, is_time=True))
    return lines, bars, figures, works


# How many of the largest entries of each row are looked for.
_LARGEST = 20


def product_by_hand(size: int, x: jax.Array, v: jax.Array) -> jax.Array:
    """A product with an RBF kernel, from the blocks on and above the diagonal."""
    block = lambda array, i: jax.lax.dynamic_slice_in_dim(array, i * size, size)
    put = jax.lax.dynamic_update_slice_in_dim

    def step(out: jax.Array, pair: jax.Array) -> tuple[jax.Array, None]:
        i, j = pair
        tile = rbf(block(x, i), block(x, j))
        out = put(out, block(out, i) + tile @ block(v, j), i * size, 0)
        mirrored = jnp.where(i == j, 0.0, 1.0) * (block(v, i) @ tile)
        return put(out, block(out, j) + mirrored, j * size, 0), None

    pairs = jnp.stack(jnp.triu_indices(len(x) // size), axis=1)
    return jax.lax.scan(step, jnp.zeros_like(v), pairs)[0]


def largest_by_hand(size: int, x: jax.Array) -> list[jax.Array]:
    """The largest entries of rows, by panels of all columns as large as a block."""
    height = size**2 // len(x)

    def panel(i: jax.Array) -> list[jax.Array]:
        rows = jax.lax.dynamic_slice_in_dim(x, i * height, height)
        return jax.lax.top_k(rbf(rows, x), _LARGEST)

    return jax.lax.map(panel, jnp.arange(len(x) // height))


def reductions(quick: bool) -> tuple[list[str], list[Bar], dict[str, Any], Works]:
    """Reductions of a plain kernel, compared with a few lines of JAX."""
    n, size = (2_000, 200) if quick else (20_000, 1_000)
    x, v = jr.normal(jr.key(0), (n, 16)), jr.normal(jr.key(1), (n,))
    lines, bars, figures, works = [], [], {}, {}
    jobs = {
        "product": (KernelProduct(v), jax.jit(product_by_hand, static_argnums=0), (v,)),
        f"{_LARGEST} largest entries of each row": (
            TopK(_LARGEST),
            jax.jit(largest_by_hand, static_argnums=0),
            (),
        ),
    }
    for name, (reduce, by_hand, more) in jobs.items():
        batch = functools.partial(
            filter_batch_kernel, rbf, block_size=size, reduce=reduce
        )
        programs = {
            OURS: runner(batch(symmetric=True), x),
            "every block": runner(batch(symmetric=False), x),
            "by hand": runner(by_hand, size, x, *more),
        }
        found, seconds = ratios(programs, 3 if quick else 9)
        title = f"{name}, {n:,} examples by {size:,}"
        # Each entry is multiplied and added, if anything is done with it.
        flops = of_blocks(x, size) + (2.0 * n**2 if more else 0.0)
        results = num_bytes(v) if more else 8.0 * n * _LARGEST
        done = Work(flops, num_bytes(x, more) + results)
        works[title] = harness.explained(done, programs[OURS]), seconds
        for way in ("by hand", "every block"):
            lines.append(f"| {title} | {way} | {found[way]:.2f} |")
            title = ""
        figures[name] = {"seconds": seconds, "ratios": found}
        # The best of ours, of the fastest way within the memory of a block.
        ratio = min(1.0, found["every block"]) / found["by hand"]
        bars.append(Bar(f"{name}: time, of by hand", ratio, 1.1, is_time=True))
    ratio = 1 / figures["product"]["ratios"]["every block"]
    bars.append(Bar("product: time, of every block", ratio, 0.65, is_time=True))
    return lines, bars, figures, works


def beside_peer() -> tuple[list[str], list[Bar], dict[str, Any], Works]:
    """Compared with `nt.batch` of an analytic kernel; the block size must divide."""
    n, size, depth = 1792, 256, 3
    x = jr.normal(jr.key(0), (n, 64))
    kernel = lambda x1, x2=None: arc_cosine(x1, x2, depth)
    own = filter_batch_kernel(kernel, block_size=size, symmetric=True)
    peer = Peer()
    peer.ask(analytic={"n": n, "block": size, "depth": depth})
    programs = {
        OURS: runner(own, x),
        "batch": lambda: peer.ask(run="analytic"),
    }
    found, seconds = ratios(programs, 9)
    peer.close()
    ratio = found["batch"]
    title = f"analytic NTK of depth {depth}, {n:,} examples by {size}"
    lines = [f"| {title} | neural_tangents.batch | {ratio:.2f} |"]
    name = "analytic NTK: time, of neural_tangents.batch"
    figures = {"analytic": {"seconds": seconds, "ratio": ratio}}
    done = harness.explained(whole(of_blocks(x, size), x), programs[OURS])
    works: Works = {title: (done, seconds)}
    return lines, [Bar(name, 1 / ratio, 0.5, is_time=True)], figures, works


def in_own_process(
    what: str,
    *args: Any,
    devices: int = 1,
    module: str = "benchmarks.batch_kernel",
    environment: dict[str, str] | None = None,
) -> Any:
    """The JSON that a module prints last when it runs as a script."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", module, what, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parent.parent,
        env={**os.environ, "XLA_FLAGS": flags, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def to_disk(n: int, size: int) -> dict[str, float]:
    """A kernel on disk, and as many bytes without a kernel."""
    x = np.random.default_rng(0).standard_normal((n, 64)).astype(np.float32) / 8
    chunk = np.random.default_rng(0).random((size, size), np.float32)

    def own(folder: pathlib.Path) -> None:
        store = ZarrStore(folder / "kernel")
        filter_batch_kernel(rbf, block_size=size, symmetric=True, store=store)(x)

    def plain(folder: pathlib.Path) -> None:
        for i in range((n // size) ** 2):
            (folder / str(i)).write_bytes(memoryview(chunk))

    times = local.write_in_turn(own, plain)
    ratio = times.own / times.plain
    return {"seconds": times.own, "ratio": ratio, "resident": times.resident}


def scaling(n: int, size: int) -> dict[str, Any]:
    """The time on two devices on two cores, and that on one device divided by it."""
    x = jr.normal(jr.key(0), (n, 64))
    model = eqx.nn.MLP(64, 10, 128, 3, key=jr.key(0))
    found = {}
    for name, kernel in (("rbf", rbf), ("ntk", EmpiricalNTK(model))):
        programs = {}
        for num in (1, 2):
            mesh = jax.make_mesh(
                (num,),
                ("rows",),
                axis_types=(AxisType.Auto,),
                devices=jax.devices()[:num],
            )
            symmetric = True if kernel is rbf else None
            batched = filter_batch_kernel(
                kernel, block_size=size, symmetric=symmetric, mesh=mesh
            )
            programs[OURS if num == 2 else "one"] = runner(batched, x)
        of_two, seconds = ratios(programs, 9)
        found[name] = {"ratio": of_two["one"], "seconds": seconds}
    return found


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    lines = ["| job | way | time ÷ eqxbatch's |", "|---|---|---:|"]
    measured = [
        measure(quick) for measure in (on_digits, beside_estimators, reductions)
    ]
    if not quick:
        measured.append(beside_peer())
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    works: Works = {}
    for rows, more, found, done in measured:
        lines, bars = [*lines, *rows], [*bars, *more]
        figures, works = {**figures, **found}, {**works, **done}
    n, size = (4_000, 1_000) if quick else (50_000, 2_000)
    disk = in_own_process("to_disk", n, size)
    title = f"RBF kernel, {n:,} examples by {size:,}, to disk"
    works[title] = NoLimit("the other way is what the disk can do"), disk["seconds"]
    lines.append(
        f"| {title} | "
        f"the same bytes written, without a kernel | {1 / disk['ratio']:.2f} |"
    )
    bars += [
        Bar("to disk: resident memory in GB", disk["resident"] / 1e9, 1.5),
        Bar("to disk: time, of the same bytes", disk["ratio"], 1.5, is_time=True),
    ]
    n, size = (512, 128) if quick else (4_096, 512)
    devices = in_own_process("scaling", n, size, devices=2)
    for name, one in devices.items():
        title = {"rbf": "RBF kernel", "ntk": "NTK of an MLP"}[name]
        title = f"{title}, {n:,} examples by {size}, two devices on two cores"
        works[title] = NoLimit("the devices share the cores"), one["seconds"]
        lines.append(f"| {title} | one device | {one['ratio']:.2f} |")
    where, shares = harness.machine(), Shares.of(works, harness.rates())
    figures = {"machine": where, "jobs": figures, "disk": disk, "devices": devices}
    figures["bars"] = [{**vars(bar), "holds": bar.holds} for bar in bars]
    figures["limit"] = shares.figures
    resident = f"{disk['resident'] / 1e9:.2f} GB"
    notes = (
        f"\n{shares.notes}\n\n"
        f"Peak memory of the process that wrote to disk: {resident}.\n\n"
        f"{harness.describe(where)}"
    )
    return figures, "\n".join([*shares.table(lines), notes]), bars


if __name__ == "__main__":
    _, what, *numbers = sys.argv
    tasks = {"to_disk": to_disk, "scaling": scaling}
    print(json.dumps(tasks[what](*map(int, numbers))))
