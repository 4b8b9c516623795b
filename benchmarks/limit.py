"""How close a job is to the machine: the column *of the limit* of all tables.

A job declares its `Work`: the FLOPs of its products, and the bytes that it reads and
writes at least. The limit is the time of one large product with as many FLOPs, or of
one copy with as many bytes, whichever is longer. Both rates are measured in the same
run. A job whose time is not that of products or bytes has `NoLimit`, and says why.
"""

import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


COLUMN = "of the limit"
PRODUCTS = "products"
# Rows below this have a reason.
CLOSE = 0.5
# As JAX names them: of a GPU, they have different units. Of a CPU, they are the same.
PRECISIONS = ("default", "highest")


@dataclasses.dataclass(frozen=True)
class Work:
    """What a job has to do at least.

    - `flops`: the FLOPs of its products.
    - `bytes`: the bytes of its inputs and results.
    - `precision`: one of `PRECISIONS`, in which it multiplies.
    - `reason`: why the job takes more than twice the limit, if it does.
    - `spent`: the shares of its time by the kind of operation, if there is no reason.
    """

    flops: float
    bytes: float
    precision: str = "default"
    reason: str = ""
    spent: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"`precision` is {self.precision!r}; it must be one of {PRECISIONS}."
            )
        if not (self.flops > 0 or self.bytes > 0):
            raise ValueError("Some work is needed; `NoLimit` says why there is none.")


@dataclasses.dataclass(frozen=True)
class NoLimit:
    """Why a job has no limit."""

    reason: str


def num_bytes(*trees: Any) -> float:
    """The bytes of arrays, or of shapes."""
    leaves = jax.tree.leaves(trees)
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves))


@dataclasses.dataclass(frozen=True)
class Rates:
    """FLOPs per second of one large product, by precision, and bytes per second."""

    flops: dict[str, float]
    bytes: float

    def seconds(self, work: Work) -> float:
        """The limit of a job."""
        return max(work.flops / self.flops[work.precision], work.bytes / self.bytes)


def measured(rounds: int) -> Rates:
    """The rates of this machine: medians of programs that take turns.

    A copy reads and writes, so that each byte of an array counts twice. Without rounds,
    rates are unknown.
    """
    if not rounds:
        return Rates(dict.fromkeys(PRECISIONS, math.nan), math.nan)
    # An accelerator is only busy with large ones.
    is_cpu = jax.default_backend() == "cpu"
    size, copied = (2_048, 2**26) if is_cpu else (8_192, 2**28)
    programs: dict[str, Callable[[], Any]] = {}
    a = jnp.ones((size, size), jnp.float32)
    for precision in PRECISIONS:
        product = jax.jit(functools.partial(jnp.matmul, precision=precision))
        programs[precision] = functools.partial(product, a, a)
    # Adding zero is no copy that XLA could leave out, because the zero is an argument.
    add = jax.jit(lambda x, zero: x + zero)
    programs["copy"] = functools.partial(add, jnp.ones(copied, jnp.float32), 0.0)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if i:  # The first round compiles.
                times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    flops = {name: 2.0 * size**3 / seconds[name] for name in PRECISIONS}
    return Rates(flops, 2.0 * 4 * copied / seconds["copy"])


@dataclasses.dataclass(frozen=True)
class Share:
    """A job's work, the seconds that eqxbatch took, and the limit of these."""

    work: Work | NoLimit
    seconds: float
    limit: float | None

    @classmethod
    def by(cls, rates: Rates, work: Work | NoLimit, seconds: float) -> "Share":
        limit = rates.seconds(work) if isinstance(work, Work) else None
        return cls(work, seconds, limit)

    @classmethod
    def read(cls, figures: dict[str, Any]) -> "Share":
        """One from the figures of earlier results."""
        kind = NoLimit if figures["limit"] is None else Work
        work = kind(**figures["work"])
        return cls(work, figures["seconds"], figures["limit"])

    @property
    def of_limit(self) -> float | None:
        return None if self.limit is None else self.limit / self.seconds

    @property
    def cell(self) -> str:
        return "-" if self.of_limit is None else f"{self.of_limit:.2f}"

    @property
    def is_far(self) -> bool:
        return self.of_limit is not None and self.of_limit < CLOSE


@dataclasses.dataclass(frozen=True)
class Shares:
    """Those of the jobs of a suite, by title, and the rates of the same run."""

    by_title: dict[str, Share]
    rates: Rates

    @classmethod
    def of(
        cls, jobs: dict[str, tuple[Work | NoLimit, float]], rates: Rates
    ) -> "Shares":
        """From the work of each job and the seconds of eqxbatch."""
        return cls({title: Share.by(rates, *job) for title, job in jobs.items()}, rates)

    def table(self, lines: Sequence[str]) -> list[str]:
        """A table of jobs with one more column, in the first row of each job.

        The first cell of such a row has the title of the job; it is empty in others.
        """
        header, rule, *rows = lines
        found = [f"{header} {COLUMN} |", f"{rule}---:|"]
        for row in rows:
            title = _cells(row)[0]
            if title and title not in self.by_title:
                raise ValueError(f"{title!r} declares neither `Work` nor `NoLimit`.")
            found.append(f"{row} {self.by_title[title].cell if title else ''} |")
        return found

    @property
    def notes(self) -> str:
        """What the column means, and the reasons of rows below a half."""
        is_measured = math.isfinite(self.rates.bytes)
        has_limits = any(x.limit is not None for x in self.by_title.values())
        lines = [self._meaning] if is_measured and has_limits else []
        why: dict[str, list[str]] = {}
        for title, share in self.by_title.items():
            if isinstance(share.work, NoLimit):
                why.setdefault(f"No limit, because {share.work.reason}", []).append(
                    title
                )
            elif share.is_far:
                why.setdefault(f"Below a half, {self._reason(share)}", []).append(title)
        lists = [f"- {reason}: {'; '.join(titles)}." for reason, titles in why.items()]
        return "\n\n".join([*lines, *(["\n".join(lists)] if lists else [])])

    def _reason(self, share: Share) -> str:
        work = share.work
        assert isinstance(work, Work)
        if work.reason or not work.spent:
            return work.reason or "for no known reason"
        kinds = sorted(work.spent.items(), key=lambda item: -item[1])
        products = work.spent.get(PRODUCTS, 0.0)
        seconds = work.flops / self.rates.flops[work.precision]
        shown = []
        for kind, part in kinds[:3]:
            text = f"{part:.0%} on {kind}"
            if kind == PRODUCTS:
                # Programs may compute less than is counted.
                rate = min(seconds / (products * share.seconds), 1.0)
                text += f" at {rate:.2f} of the rate of a large one"
            shown.append(text)
        return f"of its time {', '.join(shown)}"

    @property
    def _meaning(self) -> str:
        works = [x.work for x in self.by_title.values() if isinstance(x.work, Work)]
        # On a CPU, all precisions are the same.
        is_cpu = jax.default_backend() == "cpu"
        names = PRECISIONS[:1] if is_cpu else sorted({x.precision for x in works})
        shown = " and ".join(
            f"{self.rates.flops[name] / 1e9:,.0f} GFLOP/s"
            + (f' with precision "{name}"' if len(names) > 1 else "")
            for name in names
        )
        return (
            f"*Of the limit*: the time of one large product with as many FLOPs "
            f"({shown}), or of one copy with as many bytes "
            f"({self.rates.bytes / 1e9:,.1f} GB/s), whichever is longer, divided by "
            "that of eqxbatch."
        )

    @property
    def figures(self) -> dict[str, Any]:
        """What the results have of it as JSON."""
        return {
            "rates": dataclasses.asdict(self.rates),
            "jobs": {
                title: {
                    **dataclasses.asdict(share),
                    "of_limit": share.of_limit,
                }
                for title, share in self.by_title.items()
            },
        }


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


TABLE = re.compile(r"^(\|.*\|)\n\|(?::?-+:?\|)+$", re.MULTILINE)


def check(text: str, no_limit: NoLimit | None) -> None:
    """Each table of jobs of a suite has the column, or `NO_LIMIT` says why none has."""
    headers = [_cells(found[1]) for found in TABLE.finditer(text)]
    if no_limit is not None:
        headers = [cells for cells in headers if COLUMN in cells]
        if headers:
            raise ValueError(f"With `NO_LIMIT`, a table has {COLUMN!r}: {headers[0]}.")
        return
    of_jobs = [cells for cells in headers if cells[0].startswith("job")]
    if not of_jobs:
        raise ValueError("A suite without a table of jobs must say so by `NO_LIMIT`.")
    for cells in of_jobs:
        if COLUMN not in cells:
            raise ValueError(f"A table of jobs has no column {COLUMN!r}: {cells}.")


def sentence(figures: Iterable[dict[str, Any]]) -> str:
    """How close all jobs are; empty if no results have the column."""
    found = [
        job["of_limit"]
        for results in figures
        for job in results.get("limit", {"jobs": {}})["jobs"].values()
        if job["of_limit"] is not None and math.isfinite(job["of_limit"])
    ]
    if not found:
        return ""
    close = sum(x >= CLOSE for x in found)
    return (
        f"{close} of {len(found)} jobs take at most twice the time that the machine "
        "needs for their products alone, or for reading their inputs and writing their "
        f"results; the median job reaches {statistics.median(found):.2f} of this limit."
    )
