"""`EmpiricalNTK`, compared with the three implementations of `neural_tangents`.

`neural_tangents` needs an old JAX, so it runs in its own process
(`neural_tangents/peer.py`), which runs on request, in turn with eqxbatch.
"""

import dataclasses
import json
import math
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from eqxbatch import EmpiricalNTK
from . import harness, work
from .harness import Bar, OURS
from .limit import num_bytes, Shares, Work
from .micro_grad import Block
from .neural_tangents.environment import HERE, python, VERSIONS


NAME = "kernels"
KEY = jr.key(0)
JACOBIANS = "Jacobian contraction"
PRODUCTS = "NTK-vector products"
STRUCTURED = "structured derivatives"


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel of some examples with themselves.

    - `spec`: the model and the number of examples, for both processes.
    - `block`: the block size; None for all at once.
    - `without`: the ways of the peer that take too much memory or time.
    - `limit`: the upper limit for the time of eqxbatch, divided by the best peer's.
    - `limits`: the same for single ways.
    """

    title: str
    spec: dict[str, Any]
    traced: bool = True
    block: int | None = None
    without: tuple[str, ...] = ()
    limit: float = 1.0
    limits: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any]:
        kernel = {"traced": self.traced, "block": self.block, "without": self.without}
        return {**self.spec, **kernel}


def dense(n: int, *sizes: int) -> dict[str, Any]:
    return {"model": "dense", "sizes": sizes, "n": n}


def cnn(n: int, kind: str, outputs: int) -> dict[str, Any]:
    return {"model": kind, "size": 16, "outputs": outputs, "n": n}


def jobs() -> list[Job]:
    slow = (JACOBIANS, PRODUCTS)
    digits = dense(1797, 64, 512, 512, 512, 10)
    words = {"words": 1_000, "width": 32, "length": 16, "outputs": 1, "n": 32}
    tokens = {"width": 64, "length": 16, "outputs": 10, "n": 16}
    unblocked = [
        ("FCN 784-512x3-10, 64 examples", dense(64, 784, 512, 512, 512, 10)),
        ("FCN 784-512x3-1, 256 examples", dense(256, 784, 512, 512, 512, 1)),
        ("CNN with GAP, 10 outputs, 16 examples", cnn(16, "cnn_gap", 10)),
        ("CNN flattened, 1 output, 32 examples", cnn(32, "cnn_flat", 1)),
        ("transformer block, 16 examples", {"model": "transformer", **tokens}),
    ]
    found = [
        Job(f"{title}, {kind}", spec, traced=kind == "traced")
        for title, spec in unblocked
        for kind in ("traced", "full")
    ]
    for width in (64, 256, 1024):
        without = slow if width > 256 else ()
        spec = dense(32, 784, width, width, width, 10)
        found.append(Job(f"FCN of width {width}, traced", spec, without=without))
    for outputs in (1, 10, 100, 1000):
        without = slow if outputs > 10 else ()
        spec = dense(16, 784, 512, 512, 512, outputs)
        title = f"FCN with {outputs} output{'s' * (outputs > 1)}, traced"
        found.append(Job(title, spec, without=without))
    found.append(
        Job(
            "embedding of 1,000 words, 16 tokens, 32 examples",
            {"model": "embedding", **words},
            without=(PRODUCTS,),
            limits={STRUCTURED: 0.1},
        )
    )
    for kind in ("traced", "full"):
        traced = kind == "traced"
        found += [
            Job(
                f"FCN, 512 examples by 32, {kind}",
                dense(512, 784, 512, 512, 512, 10),
                traced,
                32,
                slow,
                1 / 4,
            ),
            Job(
                f"CNN, 64 examples by 8, {kind}",
                cnn(64, "cnn_gap", 10),
                traced,
                8,
                (PRODUCTS,),
                1 / 10,
            ),
        ]
    found.append(Job("FCN, 1,797 digits by 128", digits, True, 128, slow, 1 / 4))
    return found


class CNN(eqx.Module):
    """Three convolutions of 32 channels."""

    convs: list[eqx.nn.Conv2d]
    last: eqx.nn.Linear
    flatten: bool

    def __init__(self, outputs, size, flatten, key):
        *keys, last = jr.split(key, 4)
        self.convs = [
            eqx.nn.Conv2d(num, 32, 3, padding=1, key=key)
            for num, key in zip((3, 32, 32), keys, strict=True)
        ]
        width = 32 * size * size if flatten else 32
        self.last = eqx.nn.Linear(width, outputs, key=last)
        self.flatten = flatten

    def __call__(self, x):
        for conv in self.convs:
            x = jax.nn.relu(conv(x))
        return self.last(x.reshape(-1) if self.flatten else jnp.mean(x, axis=(1, 2)))


class Transformer(eqx.Module):
    block: Block
    last: eqx.nn.Linear

    def __init__(self, width, outputs, key):
        keys = jr.split(key)
        self.block = Block(width, keys[0])
        self.last = eqx.nn.Linear(width, outputs, key=keys[1])

    def __call__(self, x):
        return self.last(jnp.mean(self.block(x), axis=0))


class Words(eqx.Module):
    table: eqx.nn.Embedding
    rest: eqx.nn.MLP

    def __init__(self, words, width, outputs, key):
        keys = jr.split(key)
        self.table = eqx.nn.Embedding(words, width, key=keys[0])
        self.rest = eqx.nn.MLP(width, outputs, width, 1, key=keys[1])

    def __call__(self, tokens):
        return self.rest(jnp.mean(jax.vmap(self.table)(tokens), axis=0))


def build(spec: dict[str, Any]) -> tuple[Callable, jax.Array]:
    """The model and the examples of a job."""
    n, kind = spec["n"], spec["model"]
    if kind == "dense":
        first, *hidden, last = spec["sizes"]
        model = eqx.nn.MLP(first, last, hidden[0], len(hidden), key=KEY)
        return model, jr.normal(KEY, (n, first))
    if kind in ("cnn_gap", "cnn_flat"):
        size = spec["size"]
        model = CNN(spec["outputs"], size, kind == "cnn_flat", KEY)
        return model, jr.normal(KEY, (n, 3, size, size))
    if kind == "transformer":
        model = Transformer(spec["width"], spec["outputs"], KEY)
        return model, jr.normal(KEY, (n, spec["length"], spec["width"]))
    model = Words(spec["words"], spec["width"], spec["outputs"], KEY)
    return model, jr.randint(KEY, (n, spec["length"]), 0, spec["words"])


def compiled(fun: Callable, model: Any, x: jax.Array) -> tuple[Callable, float]:
    """A function that runs the compiled `fun(model, x)`, and its FLOPs."""
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda arrays, x: fun(eqx.combine(arrays, static), x)
    program = jax.jit(run).lower(arrays, x).compile()
    analysis: Any = program.cost_analysis()
    jax.block_until_ready(program(arrays, x))
    return lambda: jax.block_until_ready(program(arrays, x)), analysis["flops"]


def ours(job: Job, method: str = "auto") -> tuple[Callable, float]:
    model, x = build(job.spec)
    axes = (-1,) if job.traced else ()
    ntk = EmpiricalNTK(model, trace_axes=axes, block_size=job.block, method=method)
    return compiled(lambda ntk, x: ntk(x), ntk, x)


def work_of(job: Job) -> Work:
    model, x = build(job.spec)
    num = len(x)
    products = work.products_of(lambda model, x: model(x), model, x)
    outputs = eqx.filter_eval_shape(model, x[0]).size
    tiles = None if job.block is None else work.upper_tiles(num, job.block)
    flops = work.kernel(products, num, outputs=outputs, traced=job.traced, tiles=tiles)
    entries = num**2 * (1 if job.traced else outputs**2)
    return Work(flops, num_bytes(eqx.filter(model, eqx.is_array), x) + 4 * entries)


def backward_pass(model: Callable, x: jax.Array) -> Any:
    return eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(x)))(model)


class Peer:
    """The process with `neural_tangents`."""

    def __init__(self) -> None:
        command = [str(python("timing")), str(HERE / "peer.py")]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def timed(program: Callable) -> float:
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


def ratios(
    programs: dict[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, float], float]:
    """The time of each way divided by that of eqxbatch, and the latter in seconds."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    order = list(programs)
    shuffle = random.Random(0).shuffle
    for _ in range(harness.rounds_of(rounds)):
        shuffle(order)
        for name in order:
            few = len(times[name]) < 2
            if few or not harness.is_slow(times[name], times[OURS]):
                times[name].append(programs[name]())
    harness.rates()  # They are measured after each job.
    found = {
        name: statistics.median(a / b for a, b in zip(own, times[OURS], strict=False))
        for name, own in times.items()
    }
    return found, statistics.median(times[OURS])


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    return run_quickly() if quick else run_beside_peer()


def run_quickly() -> tuple[dict[str, Any], str, list[Bar]]:
    """Compared with Jacobian contraction by eqxbatch, which needs no other JAX."""
    lines = ["| job | time ÷ eqxbatch's | FLOPs ÷ eqxbatch's |", "|---|---:|---:|"]
    bars, seconds = [], {}
    for job in (
        Job("FCN 64-64x3-10, 32 examples", dense(32, 64, 64, 64, 64, 10)),
        Job("the same, by 8", dense(32, 64, 64, 64, 64, 10), block=8),
    ):
        program, flops = ours(job)
        other, other_flops = ours(job, "jacobian_contraction")
        programs = {OURS: lambda p=program: timed(p)}
        programs[JACOBIANS] = lambda p=other: timed(p)
        found, taken = ratios(programs, 5)
        ratio = found[JACOBIANS]
        seconds[job.title] = harness.explained(work_of(job), program), taken
        lines.append(f"| {job.title} | {ratio:.2f} | {other_flops / flops:.2f} |")
        name = f"{job.title}: time, of the Jacobian's"
        bars.append(Bar(name, 1 / ratio, 1.0, is_time=True))
        if job.block is None:
            part = flops / other_flops
            bars.append(Bar(f"{job.title}: FLOPs, of the Jacobian's", part, 0.5))
    shares = Shares.of(seconds, harness.rates())
    figures = {"machine": harness.machine(), "limit": shares.figures}
    return figures, "\n".join([*shares.table(lines), "", shares.notes]), bars


def run_beside_peer() -> tuple[dict[str, Any], str, list[Bar]]:
    lines = [
        "| job | way | time ÷ eqxbatch's | FLOPs ÷ eqxbatch's |",
        "|---|---|---:|---:|",
    ]
    peer = Peer()
    figures: dict[str, Any] = {}
    bars, best, shares = [], [], {}
    for job in jobs():
        program, flops = ours(job)
        peers = peer.ask(prepare=job.message)
        programs = {OURS: lambda p=program: timed(p)}
        programs |= {name: lambda n=name: peer.ask(run=n) for name in peers}
        found, seconds = ratios(programs, 9 if job.block is None else 3)
        print(f"{job.title}: {found}", flush=True)
        figures[job.title] = {"seconds": seconds, "flops": flops, "ratios": found}
        shares[job.title] = harness.explained(work_of(job), program), seconds
        title = job.title
        for name, theirs in peers.items():
            compared = "" if theirs is None else f"{theirs / flops:.2f}"
            way = name if job.block is None else f"batch, {name}"
            lines.append(f"| {title} | {way} | {found[name]:.2f} | {compared} |")
            title = ""
        fastest = min(found[name] for name in peers)
        name = f"{job.title}: time, of the best"
        bars.append(Bar(name, 1 / fastest, job.limit, is_time=True))
        for way, limit in job.limits.items():
            name = f"{job.title}: time, of {way}"
            bars.append(Bar(name, 1 / found[way], limit, is_time=True))
        if job.block is None and not job.limits:
            best.append(fastest)
        jax.clear_caches()
    mean = math.exp(statistics.fmean(map(math.log, best)))
    name = "geometric mean of the unblocked jobs: time, of the best"
    bars.append(Bar(name, 1 / mean, 1 / 1.5, is_time=True))

    model, x = build(cnn(16, "cnn_gap", 10))
    program, _ = compiled(backward_pass, model, x)
    peer.ask(plain=cnn(16, "cnn_gap", 10))
    programs = {OURS: lambda: timed(program), "plain": lambda: peer.ask(run="plain")}
    plain = ratios(programs, 15)[0]["plain"]
    peer.close()

    where, close = harness.machine(), Shares.of(shares, harness.rates())
    notes = (
        f"\n{close.notes}\n\n"
        "Geometric mean of the time of the fastest alternative ÷ eqxbatch's, over "
        f"the jobs without blocks and without an embedding: {mean:.2f}.\n\n"
        f"{harness.describe(where)} neural-tangents 0.6.5 ran in another process with "
        f"{VERSIONS['timing'][0]}, in turn with eqxbatch. There, JAX's backward pass "
        f"through the CNN takes {plain:.2f} times as long as here."
    )
    figures = {"machine": where, "jobs": figures, "geometric_mean": mean}
    figures["limit"] = close.figures
    figures |= {"plain": plain, "bars": [{**vars(b), "holds": b.holds} for b in bars]}
    return figures, "\n".join([*close.table(lines), notes]), bars
