"""Clipped gradients of models and patterns that others designed, compared with optax.

Models from other packages need `pip install -e ".[models]"`, and are left out if their
package is not installed.
"""

import collections
import dataclasses
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from eqxbatch import explain_sites, filter_micro_grad
from eqxbatch.results import SitesReport
from . import work, zoo
from .harness import Bar, bars_of, Case, measure, OURS, results, Row
from .limit import NoLimit, num_bytes, Work


NAME = "models"
CLIP = 0.1
SITES, MATERIALISE = "method='sites'", "method='materialise'"
METHODS = {OURS: "auto", SITES: "sites", MATERIALISE: "materialise"}
PEER = "optax micro_grad"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model of the zoo, and the package that it needs.

    - `sizes`: the numbers of examples in total and at a time, in quick and full runs.
    - `is_quick`: whether it compiles fast enough for quick runs.
    """

    name: str
    title: str
    make: Callable[[int, int], zoo.Job]
    package: str | None = None
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((16, 8), (64, 16))
    is_quick: bool = False


# For small models: with many examples, a run takes some milliseconds at least.
SMALL = ((256, 64), (2048, 256))


SUBJECTS = (
    Subject("esm2", "ESM2, 64 residues", zoo.esm2),
    Subject("bert", "BERT, 64 tokens", zoo.bert),
    Subject("vit", "ViT (equimo)", zoo.vit, "equimo"),
    Subject("convnext", "ConvNeXt (equimo)", zoo.convnext, "equimo"),
    Subject("mobilenet", "MobileNetV3 (equimo)", zoo.mobilenet, "equimo"),
    Subject("mixer", "MLP-Mixer", zoo.mixer),
    Subject("megalodon", "Megalodon, 64 tokens", zoo.megalodon),
    Subject("gru", "GRU(64), 64 steps", zoo.gru),
    Subject(
        "maf",
        "masked autoregressive flow (flowjax)",
        zoo.masked_autoregressive,
        "flowjax",
        SMALL,
    ),
    Subject(
        "bnaf",
        "block neural autoregressive flow (flowjax)",
        zoo.block_autoregressive,
        "flowjax",
        SMALL,
    ),
    Subject("lora", "LoRA of an MLP (quax)", zoo.lora, "quax", SMALL),
    Subject("fno", "Fourier operator (pdequinox)", zoo.fourier_operator, "pdequinox"),
    Subject("telescope", "telescope (dLux)", zoo.telescope, "dLux"),
    Subject("ode", "neural ODE (diffrax)", zoo.neural_ode, "diffrax", SMALL),
    Subject(
        "formula", "formula of 15 scalars", zoo.formula, sizes=SMALL, is_quick=True
    ),
    Subject(
        "penalty", "MLP with an L2 penalty", zoo.penalty, sizes=SMALL, is_quick=True
    ),
    Subject(
        "masked", "MLP with constant masks", zoo.masked, sizes=SMALL, is_quick=True
    ),
    Subject(
        "stacked", "layers stacked and scanned", zoo.stacked, sizes=SMALL, is_quick=True
    ),
    Subject(
        "weight norm",
        "MLP with weight norm",
        zoo.weight_norm,
        sizes=SMALL,
        is_quick=True,
    ),
)


def ways(job: zoo.Job, size: int, methods: dict[str, Any]) -> dict[str, Callable]:
    """All ways to compute the mean of clipped gradients, as `way(arrays, *data)`."""
    _, static = eqx.partition(job.model, eqx.is_inexact_array)

    def ours(method):
        grad = filter_micro_grad(
            job.loss, microbatch_size=size, clip_norm=CLIP, method=method
        )
        return lambda arrays, *data: grad(eqx.combine(arrays, static), *data)

    def clip(grads):
        norm = optax.tree.norm(grads)
        return jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads)

    def of_optax(arrays, *data):
        grad = optax.microbatching.micro_grad(
            lambda arrays, *example: job.loss(eqx.combine(arrays, static), *example),
            batch_argnums=tuple(range(1, len(data) + 1)),
            keep_batch_dim=False,
            microbatch_size=size,
            accumulator=optax.microbatching.AccumulationType.MEAN,
            transform_fn=clip,
        )
        return grad(arrays, *data)[0]

    return {**{way: ours(method) for way, method in methods.items()}, PEER: of_optax}


def work_of(job: zoo.Job, num: int) -> Work | NoLimit:
    products = work.products_of(job.loss, job.model, *job.data)
    if not products.is_known:
        return NoLimit("the trips of its loops depend on the data")
    arrays = eqx.filter(job.model, eqx.is_inexact_array)
    moved = num_bytes(arrays, job.data, arrays)
    return Work(work.clipped(products, num), moved)


def compile_distinct(case: Case) -> dict[str, Any]:
    """The compiled ways of a case, without those with the same program as `auto`."""
    lowered = {name: jax.jit(way).lower(*case.args) for name, way in case.ways.items()}
    text = lowered[OURS].as_text()
    return {
        name: program.compile()
        for name, program in lowered.items()
        if name == OURS or program.as_text() != text
    }


def relative_error(got: Any, true: Any) -> float:
    off = optax.tree.norm(jax.tree.map(jnp.subtract, got, true))
    return float(off / optax.tree.norm(true))


@dataclasses.dataclass(frozen=True)
class Measured:
    case: Case
    rows: list[Row]
    report: SitesReport
    error: float

    @property
    def bars(self) -> list[Bar]:
        name = f"{self.case.name}: relative error to {PEER} in float32"
        return [Bar(name, self.error, 1e-4), *bars_of(self.case, self.rows)]


def measure_subject(subject: Subject, quick: bool) -> Measured:
    num, size = subject.sizes[0 if quick else 1]
    job = subject.make(num, 1 if quick else 2)
    arrays = eqx.filter(job.model, eqx.is_inexact_array)
    case = Case(
        subject.name,
        f"{subject.title}, {num:,} by {size}",
        # Quick runs mostly compile, so only full runs compare the methods.
        ways(job, size, {OURS: "auto"} if quick else METHODS),
        (arrays, *job.data),
        work_of(job, num),
        unbounded=(SITES, MATERIALISE),
        # Scalars need 7 kB, and 10 kB more in case that norms are out of range.
        best_memory=1.7 if subject.name == "formula" else 1.05,
        best_time=1.05,
        limits={SITES: 1.1, MATERIALISE: 1.1},
    )
    compiled = compile_distinct(case)
    grads = {name: program(*case.args) for name, program in compiled.items()}
    error = max(relative_error(grads[name], grads[PEER]) for name in grads)
    return Measured(
        case,
        measure(case, rounds=2 if quick else 15, compiled=compiled),
        explain_sites(job.loss, job.model, *job.data),
        error,
    )


def shown(one: Measured, way: str) -> str:
    """Time and temporaries of eqxbatch, divided by those of a way."""
    for row in one.rows:
        if row.way == way:
            return f"{1 / row.time_ratio:.2f}, {1 / max(row.memory_ratio, 1e-9):.2f}"
    return "the same" if way in one.case.ways else "-"


def ratios(measured: list[Measured]) -> list[str]:
    """A table with a line for each model: time and temporaries, as ratios."""
    lines = [
        'Time and temporaries of `method="auto"`, divided by those of the others:',
        "",
        "| model | `auto` chooses | ÷ optax | ÷ `sites` | ÷ `materialise` |",
        "|---|---|---:|---:|---:|",
    ]
    for one in measured:
        cells = [shown(one, way) for way in (PEER, SITES, MATERIALISE)]
        cells = [one.case.title, one.report.method, *cells]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def fallbacks(measured: list[Measured]) -> list[str]:
    """A table of leaves without sites, with a line for each reason."""
    lines = [
        "Leaves without sites, whose per-example gradients are materialised:",
        "",
        "| model | leaves | example | reason |",
        "|---|---:|---|---|",
    ]
    for one in measured:
        leaves = one.report.leaves
        paths = collections.defaultdict(list)
        for leaf in leaves:
            if leaf.reason is not None:
                paths[leaf.reason].append(leaf.path)
        name = one.case.name
        if not paths:
            lines.append(f"| {name} | 0 of {len(leaves)} | | |")
        for reason, found in paths.items():
            count = f"{len(found)} of {len(leaves)}"
            lines.append(f"| {name} | {count} | `{found[0]}` | {reason} |")
            name = ""
    return lines


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the tables for the docs, and the bars."""
    measured, missing, versions = [], [], {}
    for subject in SUBJECTS:
        if quick and not subject.is_quick:
            missing.append(f"- {subject.title}: left out of quick runs")
            continue
        package = subject.package
        if package is not None:
            if importlib.util.find_spec(package) is None:
                missing.append(f"- {subject.title}: left out, {package} is missing")
                continue
            versions[package] = metadata.version(package)
        measured.append(measure_subject(subject, quick))
    bars = [bar for one in measured for bar in one.bars]
    tables = ["\n".join(part(measured)) for part in (ratios, fallbacks)]
    if missing:
        tables.append("\n".join(missing))
    if versions:
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        tables.append(f"With {named}.")
    # The other methods have no bars, but the table must not call them unbounded.
    bounded = lambda row: dataclasses.replace(row, is_unbounded=False)
    cases = [(one.case, list(map(bounded, one.rows))) for one in measured]
    figures, text = results(cases, bars, "\n\n".join(tables))
    figures["machine"] |= versions
    figures["fallbacks"] = {
        one.case.title: {
            leaf.path: leaf.reason
            for leaf in one.report.leaves
            if leaf.reason is not None
        }
        for one in measured
    }
    return figures, text, bars
