"""What devices exchange for gradients of a transformer whose parameters they share.

Parameters and examples are spread over eight devices. Programs are compiled and not
run: `python -m benchmarks --suite sharded` compiles for eight CPUs, and, with
`--device h100` or `--device v5e`, for these where their plug-in is installed.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from eqxbatch import filter_micro_grad, Sum
from .collectives import Collectives
from .harness import Bar, OURS
from .large import Block
from .limit import NoLimit
from .micro_grad import cross_entropy
from .programs import ACCELERATORS


NAME = "sharded"
NO_LIMIT = NoLimit("it is compiled and not run")
CPU = "cpu"
DEVICES = 8
PLAIN, HAND = "jax.grad, accumulated", "clipped by hand"
OURS_ACCUMULATED, OURS_NORMS, OURS_CLIPPED = (
    f"{OURS}, {way}" for way in ("accumulated", "norms", "clipped")
)
BOUND = 0.5
# libtpu takes more than half an hour for each of the others.
COMPILED = {"v5e": (PLAIN, OURS_ACCUMULATED, OURS_CLIPPED)}


@dataclasses.dataclass(frozen=True)
class Job:
    """A transformer of `depth` blocks, and microbatches of texts for it.

    - `axes`: the axes of the mesh and their sizes; examples are on the first.
    - `spread`: those that each parameter is on.
    """

    title: str
    width: int
    depth: int
    words: int
    length: int
    num: int
    size: int
    axes: dict[str, int]
    spread: tuple[str, ...]


class Transformer(eqx.Module):
    """The loss of the words that follow, with one table for both its ends."""

    table: jax.Array
    blocks: list[Block]

    def __init__(self, job: Job, key: jax.Array):
        first, *keys = jr.split(key, 1 + job.depth)
        self.table = jr.normal(first, (job.words, job.width))
        self.blocks = [Block(job.width, key) for key in keys]

    def __call__(self, tokens):
        x, places = self.table[tokens], jnp.arange(len(tokens))
        for block in self.blocks:
            x = block(x, places[:, None] >= places)
        return jnp.mean(cross_entropy(x[:-1] @ self.table.T, tokens[1:]))


FSDP = {"data": DEVICES}
BOTH = {"data": DEVICES // 2, "model": 2}


def jobs(device: str, quick: bool) -> list[Job]:
    """Those of a device, whose memory the parameters alone do not fit."""
    if quick:
        return [Job("quick", 128, 1, 512, 32, 32, 16, FSDP, ("data",))]
    # 23 billion parameters for 80 GB, and 5 billion for 16 GB.
    wide = {"h100": (30_720, 1_024)}
    width, length = wide.get(device, (14_336, 512))
    depth = 2
    sizes = (width, depth, 32_768, length, 64, 16)
    title = f"{depth} blocks of width {width:,}, 64 times {length:,} tokens by 16"
    return [
        Job(f"{title}, FSDP", *sizes, FSDP, ("data",)),
        Job(f"{title}, two axes", *sizes, BOTH, ("data", "model")),
    ]


def arguments(job: Job, devices: list[Any]) -> tuple[Any, Any, Any]:
    """The arrays of the model and its examples as shapes on devices, and the model."""
    grid = np.array(devices).reshape(*job.axes.values())
    mesh = Mesh(grid, (*job.axes,), axis_types=(AxisType.Auto,) * len(job.axes))
    model = eqx.filter_eval_shape(lambda key: Transformer(job, key), jr.key(0))
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def put(x: Any, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def spread(x: Any) -> Any:
        # Each axis of the mesh divides the next axis of the array that it can.
        spec: list[Any] = [None] * x.ndim
        free = [*range(x.ndim)]
        for name in job.spread:
            fitting = [i for i in free if x.shape[i] % job.axes[name] == 0]
            if fitting:
                spec[fitting[0]] = name
                free.remove(fitting[0])
        return put(x, *spec)

    tokens = jax.ShapeDtypeStruct((job.num, job.length), jnp.int32)
    return jax.tree.map(spread, arrays), put(tokens, "data"), static


def ways(job: Job, static: Any) -> dict[str, Callable]:
    """Functions of the arrays of a model and of all examples."""
    loss = lambda arrays, tokens: eqx.combine(arrays, static)(tokens)
    total = lambda arrays, rows: jnp.sum(jax.vmap(loss, (None, 0))(arrays, rows))

    def by_hand(arrays: Any, rows: jax.Array) -> Any:
        formed = jax.vmap(jax.grad(loss), (None, 0))(arrays, rows)
        squares = (
            jnp.sum(x**2, axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(formed)
        )
        scales = jnp.minimum(1, BOUND / jnp.sqrt(sum(squares)))
        return jax.tree.map(lambda x: jnp.tensordot(scales, x, 1), formed)

    def in_microbatches(one: Callable) -> Callable:
        def run(arrays: Any, tokens: jax.Array) -> Any:
            # No example leaves its device: microbatches have a share of each.
            num, parts = job.num // job.size, job.axes["data"]
            dealt = tokens.reshape(parts, num, -1, job.length)
            rows = jnp.swapaxes(dealt, 0, 1).reshape(num, job.size, job.length)
            add = lambda sums, x: (jax.tree.map(jnp.add, sums, one(arrays, x)), None)
            return lax.scan(add, jax.tree.map(jnp.zeros_like, arrays), rows)[0]

        return run

    def ours(**settings: Any) -> Callable:
        return filter_micro_grad(
            loss, microbatch_size=job.size, accumulator=Sum(), **settings
        )

    return {
        PLAIN: in_microbatches(jax.grad(total)),
        HAND: in_microbatches(by_hand),
        OURS_ACCUMULATED: ours(),
        OURS_NORMS: ours(return_norms=True),
        OURS_CLIPPED: ours(clip_norm=BOUND),
    }


@dataclasses.dataclass(frozen=True)
class Reading:
    """What each device sends, its temporaries, and the largest array it gathers."""

    sent: dict[str, float]
    temporaries: int
    gathered: int

    @property
    def total(self) -> float:
        return math.fsum(self.sent.values())


def read(job: Job, device: str, only: tuple[str, ...]) -> dict[str, Reading | str]:
    """The ways of a job, compiled, or some of them; in words, what does not fit."""
    is_cpu = device == CPU
    devices = jax.devices() if is_cpu else ACCELERATORS[device].devices(DEVICES)
    arrays, tokens, static = arguments(job, devices[:DEVICES])
    places = jax.tree.map(lambda x: x.sharding, arrays)
    found: dict[str, Reading | str] = {}
    for name, way in ways(job, static).items():
        if only and name not in only:
            continue

        # Gradients are where the parameters are, as an optimiser needs them.
        def run(arrays: Any, tokens: Any, way: Callable = way) -> Any:
            out = way(arrays, tokens)
            gradient, rest = out if isinstance(out, tuple) else (out, None)
            return lax.with_sharding_constraint(gradient, places), rest

        try:
            if is_cpu:
                compiled = jax.jit(run).lower(arrays, tokens).compile()
            else:
                compiled = ACCELERATORS[device].compile_placed(run, arrays, tokens)
        except RuntimeError as e:
            found[name] = why_not(e)
            continue
        exchanges = Collectives(compiled.as_text())
        found[name] = Reading(
            exchanges.sent(),
            compiled.memory_analysis().temp_size_in_bytes,
            max(exchanges.gathered(), default=0),
        )
        print(f"{job.title}: {name}: {found[name]}", file=sys.stderr, flush=True)
        jax.clear_caches()
    return found


def why_not(error: RuntimeError) -> str:
    """In words, why there is no program; any other error is raised."""
    # XLA for GPUs merges the axes of a gradient to one of more than 2**31 entries.
    for part, words in (
        ("RESOURCE_EXHAUSTED", "does not fit"),
        ("Negative dimension", "XLA counts beyond 32 bits"),
    ):
        if part in str(error):
            return words
    raise error


def table(found: dict[str, dict[str, Reading | str]]) -> str:
    lines = [
        "| job | way | sent by each device, GB | ÷ plain | temporaries, GB | ÷ plain "
        "| largest array gathered, GB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for title, readings in found.items():
        plain = readings[PLAIN]
        for way, x in readings.items():
            if isinstance(x, str) or isinstance(plain, str):
                lines.append(f"| {title} | {way} | {x} | | | | |")
            else:
                cells = [
                    f"{x.total / 1e9:.3g}",
                    f"{x.total / plain.total:.2f}",
                    f"{x.temporaries / 1e9:.3g}",
                    f"{x.temporaries / plain.temporaries:.2f}",
                    f"{x.gathered / 1e9:.3g}",
                ]
                lines.append(f"| {title} | {way} | {' | '.join(cells)} |")
            title = ""
    return "\n".join(lines)


def bars(found: dict[str, dict[str, Reading | str]], quick: bool) -> list[Bar]:
    """Norms add a number for each example, and no array is gathered for them.

    The temporaries of a quick job are too small to be those of a model.
    """
    limits = []
    for title, readings in found.items():
        plain, clipped = readings[PLAIN], readings[OURS_CLIPPED]
        if isinstance(plain, str):
            continue
        if isinstance(clipped, str):
            name = f"{title}: temporaries, of the plain gradient's ({clipped})"
            limits.append(Bar(name, math.inf, 1.15))
            continue
        for name, ratio, limit in (
            ("sent", clipped.total / plain.total, 1.2),
            ("temporaries", clipped.temporaries / plain.temporaries, 1.15),
            ("gathered", clipped.gathered / max(plain.gathered, 1), 1.0),
        ):
            if not (quick and name == "temporaries"):
                name = f"{title}: {name}, of the plain gradient's"
                limits.append(Bar(name, ratio, limit))
    return limits


def describe(device: str) -> str:
    where = "CPUs" if device == CPU else f"of {ACCELERATORS[device].name}"
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "equinox")
    )
    return f"Compiled for {DEVICES} {where} with {versions}, and not run."


def readings(device: str, quick: bool) -> dict[str, dict[str, Reading | str]]:
    only = (PLAIN, OURS_CLIPPED) if quick else COMPILED.get(device, ())
    return {job.title: read(job, device, only) for job in jobs(device, quick)}


def readings_on_cpus(quick: bool) -> dict[str, dict[str, Reading | str]]:
    """Those of a process with as many CPU devices."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    code = f"from benchmarks import sharded; sharded.print_readings({quick})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    of = lambda x: x if isinstance(x, str) else Reading(**x)
    found = json.loads(done.stdout)
    return {
        title: {way: of(x) for way, x in by_way.items()}
        for title, by_way in found.items()
    }


def print_readings(quick: bool) -> None:
    print(json.dumps(as_json(readings(CPU, quick))))


def as_json(found: dict[str, dict[str, Reading | str]]) -> dict[str, Any]:
    of = lambda x: x if isinstance(x, str) else dataclasses.asdict(x)
    return {
        title: {way: of(x) for way, x in by_way.items()}
        for title, by_way in found.items()
    }


def run(quick: bool, device: str = CPU) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    found = readings_on_cpus(quick) if device == CPU else readings(device, quick)
    limits = bars(found, quick)
    figures = {
        "device": describe(device),
        "jobs": as_json(found),
        "bars": [{**vars(bar), "holds": bar.holds} for bar in limits],
    }
    return figures, f"{table(found)}\n\n{describe(device)}", limits
