"""Reports on the sites of a function and on checks of their derivatives."""

import collections
import dataclasses

from .._base.tables import AbstractTabular, shape_text, Table
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._base.types import check_fields
from .cost import choose, Method, prefers_sites, total_cost, vmapped_cost
from .kronecker import multiplied, parts_of
from .program import Program
from .site import Site
from .table import SiteTable


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One leaf of an [`eqxbatch.results.SitesReport`][].

    - `path`, `shape`: the path and shape of the leaf in the model.
    - `sites`: the operations that the leaf enters; inside a `scan`, with its length, as
        in `scan(10) dot_general`.
    - `contraction`: how the leaf's share in per-example gradient norms is computed.
        `"factors"`: from inputs at the sites and gradients of outputs, without forming
        gradients. `"gradient"`: each per-example gradient is formed from these.
        `"derivative"`: automatic differentiation forms it. `"none"`: the function does
        not use the leaf.
    - `flops`, `bytes`: the cost of the norm and of the share in the sum for one
        example: floating-point operations, and bytes read and written.
    - `reason`: why no rule covers the leaf: the line and function, and the operations
        on the leaf before that. None if a rule covers it.
    - `kfac`: the block of the leaf in [`eqxbatch.filter_kfac`][]: the sizes of the two
        Kronecker factors, the weight that it forms a block with, or `"block"`,
        `"diagonal"` or `"refused"`.
    - `kfac_reason`: why it has no Kronecker factors; None if it has.
    """

    path: str
    shape: tuple[int, ...]
    sites: tuple[str, ...]
    contraction: str
    flops: float
    bytes: float
    reason: str | None
    kfac: str
    kfac_reason: str | None

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class LeafCheck:
    """A leaf of an [`eqxbatch.results.SitesCheck`][]: differences between two methods.

    Each error is the largest difference between results from sites and without them,
    relative to the largest entry; or, if that is below a ten-thousandth of another
    leaf's, to this. It is None if it was not compared.

    - `path`: the path of the leaf in the model.
    - `gradient`: the error of a weighted sum of clipped gradients.
    - `norm`: the error of per-example gradient norms.
    - `kernel`: the error of the kernel, for all leaves together only.
    - `hessian`: the error of the leaf's Hessian blocks, with itself and with others.
    - `diagonal`: the error of its share in the diagonal of the Hessian.
    - `gauss_newton`: the error of its blocks in the Gauss-Newton matrix.
    """

    path: str
    gradient: float | None = None
    norm: float | None = None
    kernel: float | None = None
    hessian: float | None = None
    diagonal: float | None = None
    gauss_newton: float | None = None

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True, repr=False)
class SitesCheck(AbstractTabular):
    """The result of [`eqxbatch.explain_sites`][] with `check=True`; prints as a table.

    - `leaves`: an [`eqxbatch.results.LeafCheck`][] for each differentiated array.
    - `whole`: an [`eqxbatch.results.LeafCheck`][] for all arrays together: clipped
        gradients and norms of [`eqxbatch.filter_micro_value_and_grad`][], and the
        kernel of [`eqxbatch.EmpiricalNTK`][].
    - `num_examples`: the number of examples.
    - `dtype`: `"float64"`, or the dtypes of the model.
    - `reason`: why the check did not use float64; None if it did.
    - `max_error`: the largest of all errors.
    """

    leaves: tuple[LeafCheck, ...]
    whole: LeafCheck
    num_examples: int
    dtype: str
    reason: str | None

    __post_init__ = check_fields

    @property
    def max_error(self) -> float:
        """The largest of all errors."""
        errors = [x for _, *row in self._rows for x in row if x is not None]
        return max(errors, default=0.0)

    @property
    def _rows(self) -> list[tuple]:
        """The path and all errors, for each leaf and for all together."""
        return [dataclasses.astuple(x) for x in (*self.leaves, self.whole)]

    @property
    def table(self) -> Table:
        heading = ("gradient", "norm", "kernel", "Hessian", "diagonal", "Gauss-Newton")
        shown = lambda x: "-" if x is None else f"{x:.0e}" if x else "0"
        rows = [(path, *map(shown, errors)) for path, *errors in self._rows]
        plural = "" if self.num_examples == 1 else "s"
        notes = [f"{self.num_examples} example{plural}, in {self.dtype}"]
        if self.reason is not None:
            notes.append(f"The function does not run in float64: {self.reason}")
        rows = [("largest error", *heading), *rows]
        return Table(rows, num_texts=1, num_sums=1, notes=notes)


@dataclasses.dataclass(frozen=True, repr=False)
class SitesReport(AbstractTabular):
    """The result of [`eqxbatch.explain_sites`][]; prints as a table.

    - `leaves`: an [`eqxbatch.results.LeafReport`][] for each differentiated array.
    - `method`: what `method="auto"` chooses for this function, `"sites"` or
        `"materialise"`.
    - `flops`, `bytes`: the cost for one example with sites, in addition to the forward
        and backward pass.
    - `materialised_flops`, `materialised_bytes`: the same cost if `jax.vmap`
        materialises per-example gradients.
    - `check`: an [`eqxbatch.results.SitesCheck`][] with `check=True`, otherwise None.
    """

    leaves: tuple[LeafReport, ...]
    method: Method
    flops: float
    bytes: float
    materialised_flops: float
    materialised_bytes: float
    check: SitesCheck | None = None

    __post_init__ = check_fields

    @property
    def table(self) -> Table:
        rows = [("leaf", "shape", "sites", "contraction", "K-FAC", "kFLOP", "kB")]
        for leaf in self.leaves:
            counts = collections.Counter(leaf.sites).items()
            sites = [f"{num} x {name}" if num > 1 else name for name, num in counts]
            texts = (
                leaf.path,
                shape_text(leaf.shape),
                ", ".join(sites) or "-",
                leaf.contraction,
            )
            rows.append((*texts, leaf.kfac, *_thousands(leaf.flops, leaf.bytes)))
        for name, *cost in (
            ("by sites", self.flops, self.bytes),
            ("materialised", self.materialised_flops, self.materialised_bytes),
        ):
            rows.append((name, "", "", "", "", *_thousands(*cost)))
        notes = [f'method="auto" is "{self.method}"']
        notes += [f"{leaf.path}: {leaf.reason}" for leaf in self.leaves if leaf.reason]
        notes += [
            f"{leaf.path}: no Kronecker factors, as {leaf.kfac_reason}"
            for leaf in self.leaves
            if leaf.kfac_reason and not leaf.reason
        ]
        if self.check is not None:
            notes += ["", *str(self.check).splitlines()]
        return Table(rows, num_texts=5, num_sums=2, notes=notes)


def _thousands(flops: float, traffic: float) -> tuple[str, str]:
    return f"{flops / 1e3:,.1f}", f"{traffic / 1e3:,.1f}"


def report_of(traced: TracedFunction, paths: list[str]) -> SitesReport:
    """The report on a function of leaves at these paths."""
    program = Program(traced)
    table = program.table
    contractions = choose(program)
    by_sites = total_cost(contraction.cost for contraction in contractions)
    materialised = vmapped_cost(table)
    kfac = _kfac(table, paths)
    leaves = []
    for contraction, path in safe_zip(contractions, paths):
        leaf = contraction.leaf
        reason = table.fallbacks.get(leaf)
        leaves.append(
            LeafReport(
                path=path,
                shape=table.leaves[leaf].shape,
                sites=() if reason else tuple(map(_name, table.of(leaf))),
                contraction=contraction.form,
                flops=contraction.cost.flops,
                bytes=contraction.cost.bytes,
                reason=reason,
                kfac=kfac[leaf][0],
                kfac_reason=kfac[leaf][1],
            )
        )
    return SitesReport(
        leaves=tuple(leaves),
        method="sites" if prefers_sites(table, contractions) else "materialise",
        flops=by_sites.flops,
        bytes=by_sites.bytes,
        materialised_flops=materialised.flops,
        materialised_bytes=materialised.bytes,
    )


def _kfac(table: SiteTable, paths: list[str]) -> dict[int, tuple[str, str | None]]:
    """The block of each leaf in `filter_kfac`, and why it has no factors, if so."""
    rows: dict[int, tuple[str, str | None]] = {}
    for part in parts_of(table, None):
        first, *rest = part.leaves
        rows[first] = str(part), part.reason
        rows.update((leaf, (f"with {paths[first]}", None)) for leaf in rest)
    for leaf, _ in enumerate(paths):
        other = multiplied(table, leaf)
        if other is not None:
            rows[leaf] = "refused", f"it is multiplied with {paths[other]}"
    return rows


def _name(site: Site) -> str:
    loops = "".join(f"scan({loop.length}) " for loop in site.loops)
    return loops + site.rule.kind
