"""`explain_sites`: what the sites of a function are, and what is made of them."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .choose import choose, Contraction, Method, prefers_sites, vmapped_cost
from .trace import Program, Site


_CONTRACTIONS = {
    "gram": "factors",
    "gradient": "gradient",
    "leaf": "derivative",
    "unused": "none",
}


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One leaf of a [`eqxbatch.SitesReport`][].

    - `path`, `shape`: which array of the model it is.
    - `sites`: the operations that it enters, as a loop's number of steps times the
        name of the operation.
    - `contraction`: how its share in the norms is computed. `"factors"`: from the
        operands and cotangents of the sites, with no gradient formed. `"gradient"`: the
        gradient of each example is formed from those. `"derivative"`: automatic
        differentiation forms it. `"none"`: the function does not use the leaf.
    - `flops`, `bytes`: what the norm and the share in the sum take for one example:
        floating-point operations, and bytes read and written.
    - `reason`: why no rule covers it; None if one does.
    """

    path: str
    shape: tuple[int, ...]
    sites: tuple[str, ...]
    contraction: str
    flops: float
    bytes: float
    reason: str | None


@dataclasses.dataclass(frozen=True)
class SitesReport:
    """What [`eqxbatch.explain_sites`][] returns; print it for a table.

    - `leaves`: a [`eqxbatch.LeafReport`][] for each array that is differentiated.
    - `method`: what `method="auto"` is for this function, `"sites"` or
        `"materialise"`.
    - `flops`, `bytes`: for one example by its sites, beyond forward and backward pass.
    - `materialised_flops`, `materialised_bytes`: the same, if `jax.vmap` forms the
        gradient of each example.
    """

    leaves: tuple[LeafReport, ...]
    method: Method
    flops: float
    bytes: float
    materialised_flops: float
    materialised_bytes: float

    def __str__(self) -> str:
        rows = [("leaf", "shape", "sites", "contraction", "kFLOP", "kB")]
        for leaf in self.leaves:
            counts = collections.Counter(leaf.sites)
            sites = [
                f"{num} x {name}" if num > 1 else name for name, num in counts.items()
            ]
            shape = "x".join(map(str, leaf.shape)) or "()"
            rows.append(
                (
                    leaf.path,
                    shape,
                    ", ".join(sites) or "-",
                    leaf.contraction,
                    *_thousands(leaf.flops, leaf.bytes),
                )
            )
        sums = [
            ("by sites", self.flops, self.bytes),
            ("materialised", self.materialised_flops, self.materialised_bytes),
        ]
        rows += [(name, "", "", "", *_thousands(*cost)) for name, *cost in sums]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_line(row, widths) for row in rows]
        rule = "-" * len(lines[0])
        lines = [lines[0], rule, *lines[1:-2], rule, *lines[-2:]]
        lines.append(f'method="auto" is "{self.method}"')
        lines += [f"{leaf.path}: {leaf.reason}" for leaf in self.leaves if leaf.reason]
        return "\n".join(line.rstrip() for line in lines)


def _thousands(flops: float, traffic: float) -> tuple[str, str]:
    return f"{flops / 1e3:,.1f}", f"{traffic / 1e3:,.1f}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    *texts, flops, traffic = row
    cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
    return "  ".join([*cells, flops.rjust(widths[-2]), traffic.rjust(widths[-1])])


def explain_sites(
    fun: Callable[..., PyTree], model: PyTree, /, *args: Any, **kwargs: Any
) -> SitesReport:
    """Shows where the parameters of a function enter it, and what follows from that.

    A site is an operation in which a parameter meets the rest of the computation, such
    as a matrix product. There, the gradient of one example is a contraction of two
    small factors, so that its norm, and weighted sums of gradients, can be had without
    the gradient itself. This is what `clip_norm` of
    [`eqxbatch.filter_micro_value_and_grad`][] builds on.

    **Arguments:**

    - `fun`: called as `fun(model, *args, **kwargs)`, to be traced and not run. It is a
        function of one example, such as a loss.
    - `model`: all of its arrays of an inexact dtype are parameters.
    - `args`, `kwargs`: those of one example, without a batch axis. Shapes and dtypes
        suffice: anything with these is as good as an array, such as a
        `jax.ShapeDtypeStruct`.

    **Returns:**

    An [`eqxbatch.SitesReport`][]. Its text is a table with the sites of each parameter,
    the contraction that is cheapest by an estimate of operations and memory traffic,
    and why there is no rule for a parameter where there is none.

    **Raises:**

    `ValueError` if `model` has no arrays of an inexact dtype.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.Linear(256, 128, use_bias=False, key=jax.random.key(0))
        >>> def loss(model, x):
        ...     return jnp.sum(model(x) ** 2)
        >>> print(eqxbatch.explain_sites(loss, model, jnp.ones(256)))
        leaf          shape    sites        contraction  kFLOP     kB
        -------------------------------------------------------------
        .weight       128x256  dot_general  factors       65.9    3.1
        -------------------------------------------------------------
        by sites                                          65.9    3.1
        materialised                                     196.6  393.2
        method="auto" is "sites"

        ```
    """
    diff, nondiff = eqx.partition(model, eqx.is_inexact_array)
    leaves, treedef = jtu.tree_flatten(diff)
    if not leaves:
        raise ValueError(
            "`model` has no arrays of an inexact dtype, so it has no parameters; got "
            f"{model!r}."
        )
    dynamic, static = eqx.partition((args, kwargs), _has_shape)

    def flat(leaves: list, dynamic: PyTree) -> PyTree:
        args, kwargs = eqx.combine(dynamic, static)
        model = eqx.combine(jtu.tree_unflatten(treedef, leaves), nondiff)
        return fun(model, *args, **kwargs)

    closed, _, _ = eqx.filter_make_jaxpr(flat)(leaves, dynamic)
    program = Program(closed, len(leaves))
    contractions = choose(program)
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(diff)]
    flops, traffic = vmapped_cost(program)
    return SitesReport(
        leaves=tuple(
            _report(program, contraction, path)
            for contraction, path in zip(contractions, paths, strict=True)
        ),
        method="sites" if prefers_sites(program, contractions) else "materialise",
        flops=sum(contraction.flops for contraction in contractions),
        bytes=sum(contraction.bytes for contraction in contractions),
        materialised_flops=flops,
        materialised_bytes=traffic,
    )


def _has_shape(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _report(program: Program, contraction: Contraction, path: str) -> LeafReport:
    leaf = contraction.leaf
    reason = program.fallbacks.get(leaf)
    sites = () if reason else tuple(map(_name, program.sites_of(leaf)))
    return LeafReport(
        path=path,
        shape=program.leaves[leaf].shape,
        sites=sites,
        contraction=_CONTRACTIONS[contraction.form],
        flops=contraction.flops,
        bytes=contraction.bytes,
        reason=reason,
    )


def _name(site: Site) -> str:
    loops = "".join(f"scan({length}) " for _, length in site.loops)
    return loops + site.rule.kind
