"""The summary of the benchmarks in the docs: a table of ten rows, and its chart.

`python -m benchmarks` writes both at the end; `python -m benchmarks.chart` writes them
again, from the existing results.
"""

import dataclasses
import json
import pathlib
from typing import Any

from . import harness, limit
from .programs import ACCELERATORS


HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
CHART = HERE.parent / "docs" / "benchmarks.svg"
# How the names of results end that are of no CPU.
NO_CPUS = ("_gpu", "_tpu", *(f"_{name}" for name in ACCELERATORS))
COLOURS = ("#3b6fb6", "#e39a26")


@dataclasses.dataclass(frozen=True)
class Pick:
    """A job of a suite that the summary compares with the fastest alternative.

    - `task`: its name in the summary.
    - `suite`, `job`: the suite and the title of the job.
    - `of`: the library of the alternatives, if their names do not include it.
    - `ways`: prefixes of the names of alternatives; by default, all ways whose memory
        is bounded.
    """

    task: str
    suite: str
    job: str
    of: str = ""
    ways: tuple[str, ...] = ()


# The section of the page with the whole table of a suite.
SECTIONS = {
    "micro_vmap": "filter_micro_vmap-and-filter_microbatch",
    "micro_grad": "filter_micro_grad",
    "kernels": "empiricalntk",
    "batch_kernel": "filter_batch_kernel",
    "curvature": "filter_hessian-and-filter_jacobian",
    "kfac": "filter_kfac-and-filter_ggn_diagonal",
}

HESSIANS = ("jax.hessian", "eqx.filter_hessian", "zodiax hessian")
NTKS = ("Jacobian contraction", "NTK-vector products", "structured derivatives")

PICKS = (
    Pick("Map over 1,024 images, CNN", "micro_vmap", "(b) CNN, 1,024 images by 32"),
    Pick(
        "Gradient accumulation, CNN",
        "micro_vmap",
        "(f) accumulated gradient of (b)",
    ),
    Pick(
        "Clipped per-example gradients, MLP",
        "micro_grad",
        "(a) MLP, 788k parameters, 2,048 examples by 64",
    ),
    Pick(
        "Clipped per-example gradients, transformer",
        "micro_grad",
        "(d) transformer, 128 times 64 tokens by 16",
    ),
    Pick(
        "NTK, fully connected network",
        "kernels",
        "FCN 784-512x3-10, 64 examples, full",
        of="neural_tangents,",
        ways=NTKS,
    ),
    Pick(
        "NTK in blocks, CNN",
        "kernels",
        "CNN, 64 examples by 8, full",
        of="neural_tangents.batch,",
        ways=NTKS,
    ),
    Pick(
        "Kernel in closed form, in blocks",
        "batch_kernel",
        "analytic",
        ways=("neural_tangents.batch",),
    ),
    Pick(
        "Hessian of an MLP, 1,105 parameters",
        "curvature",
        "tanh MLP of width 16 and depth 4, 1,105 parameters, 256 examples",
        ways=HESSIANS,
    ),
    Pick(
        "Hessian of a function that is no network",
        "curvature",
        "chain of 2,000 variables, no network",
        ways=HESSIANS,
    ),
    Pick(
        "Kronecker factors (K-FAC), MLP",
        "kfac",
        "MLP, 789,830 parameters, 2,048 examples: drawn labels",
        ways=("kfac-jax",),
    ),
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of the summary: figures of the alternative, divided by eqxbatch's."""

    task: str
    other: str
    time: float
    memory: float | None


def lines(results: dict[str, dict[str, Any]]) -> list[Line]:
    """The rows of the summary, from the figures of all suites."""
    return [line_of(pick, results[pick.suite]) for pick in PICKS]


def line_of(pick: Pick, figures: dict[str, Any]) -> Line:
    if "cases" in figures:
        rows = figures["cases"][pick.job]
        found = {
            row["way"]: (row["time_ratio"], row["memory_ratio"])
            for row in rows
            if (row["way"].startswith(pick.ways) if pick.ways else is_alternative(row))
        }
    else:
        job = figures["jobs"][pick.job]
        ratios = job.get("ratios") or {pick.ways[0]: job["ratio"]}
        found = {way: (ratios[way], None) for way in pick.ways if way in ratios}
    way = min(found, key=lambda way: found[way][0])
    time, memory = found[way]
    return Line(pick.task, f"{pick.of} {way}".strip(), time, memory)


def is_alternative(row: dict[str, Any]) -> bool:
    return row["way"] != harness.OURS and not row["is_unbounded"]


def summary(results: dict[str, dict[str, Any]]) -> str:
    """The table, and the machines that it was measured on."""
    text = [
        "| task | time | temporary memory | fastest alternative | suite |",
        "|---|---:|---:|---|---|",
    ]
    for pick, line in zip(PICKS, lines(results), strict=True):
        memory = "-" if line.memory is None else f"{line.memory:.2f}"
        suite = f"[`{pick.suite}`](#{SECTIONS[pick.suite]})"
        figures = f"{line.time:.2f} | {memory}"
        text.append(f"| {line.task} | {figures} | {line.other} | {suite} |")
    close = limit.sentence(results.values())
    parts = ("\n".join(text), close, measured_on(results))
    return "\n\n".join(part for part in parts if part)


def measured_on(results: dict[str, dict[str, Any]]) -> str:
    """One clause for each machine and version of JAX."""
    where: dict[str, list[str]] = {}
    for suite in dict.fromkeys(pick.suite for pick in PICKS):
        machine = results[suite]["machine"]
        of = (
            f"{machine['cores']} cores of an {machine['processor']} (device: "
            f"{machine['device']}) with JAX {machine['jax']}"
        )
        where.setdefault(of, []).append(f"`{suite}`")
    if len(where) == 1:
        return f"Measured on {next(iter(where))}."
    parts = (f"{', '.join(names)} on {of}" for of, names in where.items())
    return f"Measured on these machines: {'; '.join(parts)}."


def plot(shown: list[Line], path: pathlib.Path) -> None:
    """Bars of the ratios, on a logarithmic axis; 1 is as good as eqxbatch."""
    # Tests use the summary without matplotlib.
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")
    # Equal figures give an identical file.
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    # Narrow, with names above the bars, so that it can be read on a phone.
    figure, axis = plt.subplots(figsize=(5, 7.2), layout="constrained")
    for i, line in enumerate(reversed(shown)):
        ratios = (line.time,) if line.memory is None else (line.time, line.memory)
        for ratio, colour, shift in zip(ratios, COLOURS, (0, -0.26), strict=False):
            axis.barh(i + shift, ratio - 1, 0.24, left=1, color=colour)
            right = ratio >= 1
            axis.annotate(
                f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
                (ratio, i + shift),
                (3 if right else -3, 0),
                textcoords="offset points",
                ha="left" if right else "right",
                va="center",
                fontsize=8,
            )
        axis.plot((1, 1), (i - 0.4, i + 0.14), color="black", linewidth=0.8)
        name = f"{line.task}: {line.other}"
        place = axis.get_yaxis_transform()
        axis.text(0, i + 0.25, name, transform=place, va="center", fontsize=8.5)
    axis.set_xscale("log")
    axis.set_yticks([])
    axis.margins(x=0.12)
    axis.set_ylim(-0.5, len(shown) - 0.4)
    ticks = (0.1, 1, 10, 100)
    axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_xlabel("alternative ÷ eqxbatch; above 1, eqxbatch needs less")
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS],
        ["time", "temporary memory"],
        loc="outside upper left",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def read(folder: pathlib.Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The figures of all suites, measured on CPUs."""
    paths = [x for x in sorted(folder.glob("*.json")) if not x.stem.endswith(NO_CPUS)]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def main() -> None:
    results = read()
    (RESULTS / "summary.md").write_text(summary(results) + "\n")
    plot(lines(results), CHART)


if __name__ == "__main__":
    main()
