"""Reports on the sites of a function and on checks of their derivatives."""

import collections
import dataclasses
from typing import NamedTuple

from .._base.tables import AbstractTabular, shape_text, Table
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._base.types import check_fields
from .cost import choose, Method, prefers_sites, total_cost, vmapped_cost
from .kronecker import kronecker_program, multiplied, parts_of
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
    """

    leaves: tuple[LeafReport, ...]
    method: Method
    flops: float
    bytes: float
    materialised_flops: float
    materialised_bytes: float

    __post_init__ = check_fields

    @property
    def table(self) -> Table:
        rows: list[tuple[str, ...]] = [
            ("leaf", "shape", "sites", "contraction", "K-FAC", "kFLOP", "kB")
        ]
        for leaf in self.leaves:
            # A leaf in an unrolled loop has many uses that are alike.
            counts = collections.Counter(leaf.sites).items()
            sites = [f"{num} x {name}" if num > 1 else name for name, num in counts]
            texts = (
                leaf.path,
                shape_text(leaf.shape),
                ", ".join(sites) or "-",
                leaf.contraction,
            )
            rows.append((*texts, leaf.kfac, *_thousands(leaf.flops, leaf.bytes)))
        # What `method="auto"` compares.
        for name, *cost in (
            ("by sites", self.flops, self.bytes),
            ("materialised", self.materialised_flops, self.materialised_bytes),
        ):
            rows.append((name, "", "", "", "", *_thousands(*cost)))
        # Reasons are sentences, too long for a column.
        notes = [f'method="auto" is "{self.method}"']
        notes += [f"{leaf.path}: {leaf.reason}" for leaf in self.leaves if leaf.reason]
        # A leaf without a rule has no Kronecker factors for the same reason.
        notes += [
            f"{leaf.path}: no Kronecker factors, as {leaf.kfac_reason}"
            for leaf in self.leaves
            if leaf.kfac_reason and not leaf.reason
        ]
        return Table(rows, num_texts=5, num_sums=2, notes=notes)


def _thousands(*costs: float) -> list[str]:
    return [f"{cost / 1e3:,.1f}" for cost in costs]


def report_of(traced: TracedFunction, paths: list[str]) -> SitesReport:
    """The report on a function of leaves at these paths."""
    program = Program(traced)
    table = program.table
    # The costs that clipping compares to choose its method.
    contractions = choose(program)
    by_sites = total_cost(contraction.cost for contraction in contractions)
    materialised = vmapped_cost(table)
    # Blocks join leaves, so they are found for all leaves at once.
    kfac = _kfac(kronecker_program(traced).table, paths)
    leaves = []
    for contraction, path in safe_zip(contractions, paths):
        # The site of a leaf without a rule is the leaf itself, and tells nothing.
        leaf = contraction.leaf
        reason = table.fallbacks.get(leaf)
        leaves.append(
            LeafReport(
                path=path,
                shape=table.leaves[leaf].shape,
                sites=() if reason else tuple(map(_name_of_site, table.of(leaf))),
                contraction=contraction.form,
                flops=contraction.cost.flops,
                bytes=contraction.cost.bytes,
                reason=reason,
                kfac=kfac[leaf].text,
                kfac_reason=kfac[leaf].reason,
            )
        )
    # Both totals are without the forward and backward pass, which they share.
    return SitesReport(
        leaves=tuple(leaves),
        method="sites" if prefers_sites(table, contractions) else "materialise",
        flops=by_sites.flops,
        bytes=by_sites.bytes,
        materialised_flops=materialised.flops,
        materialised_bytes=materialised.bytes,
    )


class _Block(NamedTuple):
    """The block of a leaf in `filter_kfac`, and why it has no factors, if so."""

    text: str
    reason: str | None = None


def _kfac(table: SiteTable, paths: list[str]) -> dict[int, _Block]:
    """The block of each leaf in `filter_kfac`."""
    blocks: dict[int, _Block] = {}
    for part in parts_of(table, None):
        first, *biases = part.leaves
        blocks[first] = _Block(str(part), part.reason)
        blocks.update((leaf, _Block(f"with {paths[first]}")) for leaf in biases)
    # Last, because such a leaf is refused whatever its block would be.
    for leaf, _ in enumerate(paths):
        other = multiplied(table, leaf)
        if other is not None:
            blocks[leaf] = _Block("refused", f"it is multiplied with {paths[other]}")
    return blocks


def _name_of_site(site: Site) -> str:
    loops = "".join(f"scan({loop.length}) " for loop in site.loops)
    return loops + site.rule.kind
