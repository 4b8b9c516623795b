"""The programs of the other suites, compiled for a GPU or TPU that need not be there.

`--device h100` or `--device v5e` needs the plug-in of that device, in an environment of
its own, and runs nothing. `--device gpu` runs the same programs on the GPU or TPU that
JAX finds, and measures their time.
"""

import dataclasses
import importlib.metadata
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from eqxbatch import EmpiricalNTK
from . import curvature, kernels, kfac, large, micro_grad, micro_vmap, work
from .harness import Bar, Case, compile_ways, machine, measure, OURS, rates
from .limit import measured, NoLimit, num_bytes, Share, Shares, Work
from .programs import ACCELERATORS, Cost, cost, HERE


NAME = "accelerators"
NOT_RUN = NoLimit("it is compiled and not run")
EARLIER = NoLimit("it was run before limits were measured")
DEVICES = (*ACCELERATORS, HERE)
HAND, ACCUMULATED = "lax.scan by hand", "accumulated gradient"
# These are nearly the programs of others, or have loops whose trips XLA does not know.
LEFT_OUT = (
    "jax_privacy clipped_grad",
    "adv_jax_math.batch_vmap",
    "adv_jax_math batch_jacfwd",
    "eqx.filter_hessian",
    "eqx.filter_jacfwd",
    "zodiax hessian",
    "folx, sparse",
    "reduce",
    "corrected",
    "drawn labels",
    "empirical",
)
# The same, at least in part, as other jobs.
JOBS_LEFT_OUT = (
    *("ReLU 16-4-256", "ReLU 40-3-256", "ReLU 24-8-128"),
    *("tanh 16-4-256", "chain, sum of the diagonal"),
)


def find(name: str | None) -> str | None:
    """The device whose programs are to be read; None if that is not possible."""
    if name == HERE:
        return name if jax.default_backend() in ("gpu", "tpu") else None
    names = ACCELERATORS if name is None else (name,)
    there = [name for name in names if ACCELERATORS[name].is_installed]
    return there[0] if there and os.environ.get("JAX_PLATFORMS") == "cpu" else None


def how_to_use() -> str:
    version = jax.__version__
    lines = ["Each device needs an environment of its own, with its plug-in:"]
    for name, device in ACCELERATORS.items():
        packages = [x + f"=={version}" * x.startswith("jax") for x in device.packages]
        lines += [
            "",
            f'pip install -e ".[benchmarks]" {" ".join(packages)}',
            f"JAX_PLATFORMS=cpu python -m benchmarks --suite {NAME} --device {name}",
        ]
    lines += [
        "",
        "On a machine with a GPU or TPU that JAX finds, run the programs:",
        "",
        f"python -m benchmarks --suite {NAME} --device {HERE}",
    ]
    return "\n".join(lines)


def with_jobs_of(name: str, cases: list[Case]) -> list[Case]:
    """The cases of a suite, without the ways and the bars that do not matter here."""
    return [
        dataclasses.replace(
            case,
            title=f"{name}: {case.title}",
            ways={way: run for way, run in case.ways.items() if way not in LEFT_OUT},
            best_memory=None,
            best_time=None,
            limits={},
        )
        for case in cases
        if not case.name.startswith(JOBS_LEFT_OUT)
    ]


def large_cases() -> list[Case]:
    """Clipped gradients of models that only have shapes."""
    cases = []
    for name, (title, make, example, size) in large.MODELS.items():
        num = 4 * size
        model, data = large.shapes_of(make, num, *example)
        arrays = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        ways = micro_grad.clipped(model, num, size)
        accumulated = micro_grad.accumulated(model, num, size)
        products = work.products_of(lambda model, *x: model(*x), model, *data)
        cases.append(
            Case(
                name,
                f"{title}, {num} examples by {size}",
                {
                    OURS: ways[OURS],
                    HAND: ways[HAND],
                    ACCUMULATED: accumulated[OURS],
                },
                (arrays, *data),
                Work(work.clipped(products, num), num_bytes(arrays, data, arrays)),
                unbounded=(ACCUMULATED,),
            )
        )
    return cases


def kernel_ways(job: kernels.Job, model: Any) -> dict[str, Callable]:
    """All ways to compute a kernel, as `way(arrays, x)`."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def ntk(block: int | None) -> Callable:
        def way(arrays, x):
            model = eqx.combine(arrays, static)
            axes = (-1,) if job.traced else ()
            return EmpiricalNTK(model, trace_axes=axes, block_size=block)(x)

        return way

    def jacobians(arrays, x):
        apply = lambda arrays, x: eqx.combine(arrays, static)(x)
        found = jax.vmap(jax.jacrev(apply), (None, 0))(arrays, x)
        return [leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(found)]

    def contracted(lhs, rhs):
        spec = "nop,mop->nm" if job.traced else "nop,mqp->nmoq"
        return sum(jnp.einsum(spec, a, b) for a, b in zip(lhs, rhs, strict=True))

    def at_once(arrays, x):
        found = jacobians(arrays, x)
        return contracted(found, found)

    def in_blocks(arrays, x):
        size = job.block or len(x)
        missing = -len(x) % size
        x = jnp.concatenate([x, x[:missing]]) if missing else x
        blocks = x.reshape(-1, size, *x.shape[1:])

        def row(block):
            lhs = jacobians(arrays, block)
            return lax.map(
                lambda rows: contracted(lhs, jacobians(arrays, rows)), blocks
            )

        return jnp.concatenate(jnp.moveaxis(lax.map(row, blocks), 1, 2))

    if job.block is None:
        return {OURS: ntk(None), "Jacobians by hand": at_once}
    return {
        OURS: ntk(job.block),
        "Jacobians in blocks by hand": in_blocks,
        "eqxbatch, at once": ntk(None),
    }


def kernel_cases(quick: bool) -> list[Case]:
    jobs = [job for job in kernels.jobs() if not job.title.startswith("FCN of width")]
    jobs = [job for job in jobs if not job.title.startswith("FCN with")]
    dense = kernels.dense
    jobs.append(
        kernels.Job("FCN, 1,024 by 128", dense(1024, 784, *[512] * 3, 10), block=128)
    )
    if quick:
        sizes = (64, 64, 64, 64, 10)
        jobs = [
            kernels.Job("FCN 64-64x3-10, 32 examples", dense(32, *sizes)),
            kernels.Job("FCN 64-64x3-10, 32 by 8", dense(32, *sizes), block=8),
        ]
    cases = []
    for job in jobs:
        model, x = kernels.build(job.spec)
        args = (eqx.filter(model, eqx.is_inexact_array), x)
        ways = kernel_ways(job, model)
        unbounded = ("eqxbatch, at once",)
        least = kernels.work_of(job)
        cases.append(Case(job.title, job.title, ways, args, least, unbounded=unbounded))
    return cases


# Few and small jobs.
QUICK = {
    "micro_grad": ("a", "c"),
    "micro_vmap": ("a", "f"),
    "curvature": ("tanh 16-1-128",),
    "kernels": ("FCN 64-64x3-10, 32 examples", "FCN 64-64x3-10, 32 by 8"),
    "kfac": ("mlp",),
}


def cases(quick: bool, only: str = "") -> Iterator[Case]:
    """The jobs whose titles start with `only`; few and small ones if `quick`."""
    suites: dict[str, Callable[[], list[Case]]] = {
        "micro_grad": lambda: micro_grad.cases(quick),
        "micro_vmap": lambda: micro_vmap.cases(quick),
        "curvature": lambda: [
            case for job in curvature.jobs(quick) for case in curvature.cases(job)
        ],
        "kernels": lambda: kernel_cases(quick),
        "kfac": lambda: kfac.make_cases(quick),
        # These take minutes to compile.
        "large": large_cases,
    }
    for name, make in suites.items():
        chosen = QUICK.get(name, ()) if quick else None
        if chosen == () or not (name.startswith(only) or only.startswith(name)):
            continue
        for case in with_jobs_of(name, make()):
            is_chosen = chosen is None or case.name in chosen
            if is_chosen and case.title.startswith(only):
                yield case


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a way to do a job costs, and the seconds that it took if it ran."""

    way: str
    temporaries: int
    cost: Cost
    seconds: float
    is_alternative: bool

    @classmethod
    def of(cls, cost: dict[str, Any], **fields: Any) -> "Reading":
        """What `dataclasses.asdict` made of one."""
        return cls(cost=Cost(**cost), **fields)

    @property
    def cells(self) -> list[str]:
        trip = self.cost.per_trip or self.cost.kernels
        return [
            shown(self.temporaries / 1e6),
            f"{trip:,.0f} of {self.cost.kernels:,.0f}",
            shown(self.cost.bytes / 1e9),
            f"{self.cost.lower_precision:.0%}",
            shown(1e3 * self.seconds),
        ]


def shown(value: float) -> str:
    """Three digits, or more before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def read(case: Case, device: str) -> list[Reading]:
    """Compiles all ways of a case, and runs them if the device is here."""
    seconds: dict[str, float] = {}
    if device == HERE:
        accelerator = ACCELERATORS["h100" if jax.default_backend() == "gpu" else "v5e"]
        # Large models only have shapes.
        fill = lambda x: x if eqx.is_array(x) else jnp.zeros(x.shape, x.dtype)
        case = dataclasses.replace(case, args=jax.tree.map(fill, case.args))
        compiled = compile_ways(case)
        seconds = {row.way: row.seconds for row in measure(case, 7, compiled)}
    else:
        accelerator = ACCELERATORS[device]
        compiled = {
            way: accelerator.compile(run, *case.args) for way, run in case.ways.items()
        }
    readings = []
    for way, program in compiled.items():
        does = cost(program, accelerator)
        readings.append(
            Reading(
                way,
                program.memory_analysis().temp_size_in_bytes,
                does,
                seconds.get(way, does.seconds),
                way != OURS and way not in case.unbounded,
            )
        )
    return readings


def ratios(ours: Reading, other: Reading) -> dict[str, float]:
    """Temporaries, kernels, bytes and time of eqxbatch, divided by another's."""
    pairs = {
        "temporaries": (ours.temporaries, other.temporaries),
        "kernels": (ours.cost.kernels, other.cost.kernels),
        "bytes": (ours.cost.bytes, other.cost.bytes),
        "time": (ours.seconds, other.seconds),
    }
    # A TPU may need no temporaries in its main memory.
    divided = lambda mine, theirs: mine / theirs if theirs else math.inf
    return {
        name: 1.0 if mine == theirs else divided(mine, theirs)
        for name, (mine, theirs) in pairs.items()
    }


def tables(found: dict[str, list[Reading]], device: str, shares: Shares) -> str:
    """One line for each job, and one for each way."""
    time = "time" if device == HERE else "estimated time"
    lines = [
        f"| job | fastest alternative | temporaries | kernels | bytes | {time} |",
        "|---|---|---:|---:|---:|---:|",
    ]
    ways = [
        f"| job | way | temporaries, MB | kernels of a trip, of all | GB | "
        f"below float32 | {time}, ms |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for title, readings in found.items():
        ours = readings[0]
        others = [x for x in readings if x.is_alternative]
        if others:
            best = min(others, key=lambda x: x.seconds)
            cells = [f"{x:.2f}" for x in ratios(ours, best).values()]
            cells = ["of none" if x == "inf" else x for x in cells]
            lines.append(f"| {' | '.join([title, best.way, *cells])} |")
        for x in readings:
            ways.append(f"| {' | '.join([title, x.way, *x.cells])} |")
            title = ""
    opened = '<details markdown="1">\n<summary>All ways</summary>'
    lines, ways = map(shares.table, (lines, ways))
    notes = [shares.notes] if device == HERE else []
    shown = [*lines, "", *notes, "", opened, "", *ways, "", "</details>"]
    return "\n".join(shown)


def bars(found: dict[str, list[Reading]], device: str) -> list[Bar]:
    """Clipping costs what it costs by hand, and little more than an accumulation."""
    limits = []
    for title, readings in found.items():
        by_way = {x.way: x for x in readings}
        if device == "v5e" or HAND not in by_way or "accumulated" in title:
            continue
        for name, value in ratios(by_way[OURS], by_way[HAND]).items():
            if name != "time":
                limits.append(Bar(f"{title}: {name}, of those by hand", value, 1.05))
        if ACCUMULATED in by_way and not title.startswith("ResNet"):
            value = ratios(by_way[OURS], by_way[ACCUMULATED])["temporaries"]
            name = f"{title}: temporaries, of those of an accumulated gradient"
            limits.append(Bar(name, value, 1.35))
    return limits


def describe(device: str) -> str:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "equinox", "optax")
    )
    if device == HERE:
        return f"Measured on one {jax.devices()[0].device_kind}, with {versions}."
    return f"Compiled for {ACCELERATORS[device].name} with {versions}, and not run."


def run(
    quick: bool, device: str, only: str, before: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, list[Bar]]]:
    """After each job: the figures as JSON, the tables for the docs, and the bars.

    `before` are the figures of an earlier run: the jobs whose titles do not start with
    `only` are taken from there, if the versions are the same.
    """
    same = before.get("device") == describe(device)
    shares = Shares({}, rates() if device == HERE else measured(0))
    found = {
        title: [Reading.of(**x) for x in readings]
        for title, readings in (before["jobs"] if same else {}).items()
    }
    earlier = before.get("limit", {"jobs": {}})["jobs"]
    for title in found:
        has_share = title in earlier
        share = Share.read(earlier[title]) if has_share else Share(EARLIER, 0.0, None)
        shares.by_title[title] = share
    for case in cases(quick, only):
        found[case.title] = read(case, device)
        least = case.work if device == HERE else NOT_RUN
        seconds = found[case.title][0].seconds
        shares.by_title[case.title] = Share.by(shares.rates, least, seconds)
        for x in found[case.title]:
            print(f"{case.title}: {x.way}: {', '.join(x.cells)}", flush=True)
        jax.clear_caches()
        yield results(found, device, shares)


def results(
    found: dict[str, list[Reading]], device: str, shares: Shares
) -> tuple[dict[str, Any], str, list[Bar]]:
    limits = bars(found, device)
    figures = {
        "machine": machine(),
        "device": describe(device),
        "jobs": {
            title: [dataclasses.asdict(x) for x in readings]
            for title, readings in found.items()
        },
        "limit": shares.figures,
        "bars": [{**vars(bar), "holds": bar.holds} for bar in limits],
    }
    shown = f"{tables(found, device, shares)}\n\n{describe(device)}"
    return figures, shown, limits
