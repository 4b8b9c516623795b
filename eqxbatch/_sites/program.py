"""A function with its sites: where its parameters enter the computation.

A zero perturbation is added to the output of each site. The derivative with respect to
it is the cotangent `d` in the gradient of the parameter. `jax.vjp` computes it, so no
derivative rules of our own are needed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base.jaxprs import run_jaxpr
from .._base.mesh import is_on_mesh, vary_as, zeros_like
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .axes import Axes
from .factors import Factors
from .finder import Finder, Inputs, views_of
from .table import SiteTable
from .values import evaluated, Node
from .views import leaf_view


_Struct = jax.ShapeDtypeStruct


class Seeds(NamedTuple):
    """What is pulled back from the outputs of one example.

    - `cotangents`: those of the outputs, after an axis of vectors if there is one.
    - `curve`: the curvature between these vectors, if there is one.
    """

    cotangents: list[Array]
    curve: Array | None = None


@dataclasses.dataclass(frozen=True)
class Directions:
    """The directions in outputs that are pulled back for each example.

    - `seeds`: takes the outputs of an example and its rows.
    - `axes`: the axis of vectors, if there is one.
    - `num_outputs`: how many outputs are differentiated; None for all.
    - `paired`: for each perturbation, the output for which a vector of ones is pulled
        back to it in place of all vectors; None for no such output.
    """

    seeds: Callable[[list[Array], list[Array]], Seeds]
    axes: Axes = ()
    num_outputs: int | None = None
    paired: Sequence[int | None] = ()


# The gradient of a loss, which is the first output.
OF_LOSS = Directions(lambda outs, _: Seeds([jnp.ones_like(outs[0])]), num_outputs=1)


class OfExample(NamedTuple):
    """What `Factors` have for many examples, for one."""

    outs: list[Array]
    operands: list[Array]
    cotangents: list[Array]
    curve: Array | None


class Program:
    """A traced function with its sites.

    With `use_rules=False`, all leaves are treated as if no rule covered them. Leaves in
    `constant` are not differentiated. For leaves in `formed`, the gradient itself is
    requested, as if no rule covered them. The first `num_outputs` outputs are
    differentiated; None for all of them. `order` is 2 if second derivatives are needed.

    - `traced`, `leaves`, `jaxpr`: the traced function, its leaves and jaxpr.
    - `table`: the sites.
    """

    def __init__(
        self,
        traced: TracedFunction,
        *,
        use_rules: bool = True,
        constant: Collection[int] = (),
        formed: Collection[int] = (),
        num_outputs: int | None = None,
        order: int = 1,
    ):
        self.traced, self.leaves, closed = traced, traced.leaves, traced.closed
        self.jaxpr: Any = closed.jaxpr
        self._consts = list(closed.consts)
        avals, num_leaves = [var.aval for var in self.jaxpr.invars], len(self.leaves)
        fallbacks = dict.fromkeys(formed, "its gradient is formed")
        reason = None if use_rules else "no rules are used"
        if self.jaxpr.effects:
            reason = "the function has side effects, so it is run as it is"
        if reason is not None:
            leaves = (leaf for leaf in range(num_leaves) if leaf not in constant)
            fallbacks = dict.fromkeys(leaves, reason)
        num = len(self.jaxpr.outvars)
        live = [num_outputs is None or i < num_outputs for i in range(num)]
        while True:
            finder = Finder(order)
            inputs: Inputs = [None for _ in avals]
            for i, aval in enumerate(avals[:num_leaves]):
                # A leaf that is not followed has no sites.
                is_followed = i not in fallbacks and i not in constant
                views = (leaf_view(i, aval),) if is_followed else ()
                inputs[i] = Node.of(aval, is_followed, leaf=i, views=views)
            self._plan = finder.plan(self.jaxpr, self._consts, inputs, live)
            for view in views_of(itertools.compress(self._plan.outs, live)):
                reason = "the function returns the parameter itself"
                finder.failed.setdefault(view.leaf, reason)
            if not finder.failed:
                break
            # Leaves that are no longer followed cannot block others.
            fallbacks.update(finder.failed)
        self._perturbed, plan = sorted(fallbacks), self._plan
        found = SiteTable(
            self.leaves,
            [*plan.sites],
            [*plan.perturbations],
            [*plan.operands],
            finder.values,
            fallbacks,
        )
        # These leaves have no other sites.
        self.table = found.with_jacobians(self._perturbed)

    def __repr__(self) -> str:
        return f"Program with the sites\n{self.table!r}"

    def values(self, leaves: list | None = None) -> list:
        """The values that views of sites read, besides their leaf, at some `leaves`.

        They are the same for all examples. Values that no view reads are None.
        """
        nodes = self.table.nodes
        read = {nodes[i] for site in self.table.sites for i in site.view.reads}
        values = evaluated(read, self.leaves if leaves is None else leaves)
        return [values[x] if x in read else None for x in nodes]

    def value_structs(self) -> list:
        """The types of the values."""
        return jax.eval_shape(lambda: self.values(self.traced.zeros()[0]))

    def linearize(
        self, leaves: list, example: list, num_outputs: int
    ) -> tuple[list, list, Callable[[list], list]]:
        """Runs the function on one example.

        Returns its outputs, the operands `a` of the sites, and the pullback from
        cotangents of the first `num_outputs` outputs to the cotangents `d`.
        """

        def run(perturbations: list) -> tuple[list, tuple[list, list]]:
            outs, operands, _ = self.evaluate(leaves, example, perturbations)
            return outs[:num_outputs], (outs[num_outputs:], operands)

        zeros = self.zeros(leaves, example)
        outs, pullback, (rest, operands) = jax.vjp(run, zeros, has_aux=True)
        return [*outs, *rest], operands, lambda cotangents: pullback(cotangents)[0]

    def factors(
        self, rows: list[Array], axes: Sequence[int], directions: Directions
    ) -> Factors:
        """The factors of some examples, which are the `rows` along these axes."""
        one = lambda rows: self.of_example(rows, directions)
        outs, operands, cotangents, curve = jax.vmap(one, ([*axes],))(rows)
        return Factors(
            operands,
            cotangents,
            directions.axes,
            outs[0].shape[0],
            self.values(),
            outs=outs,
            curve=curve,
        )

    def of_example(self, rows: list[Array], directions: Directions) -> OfExample:
        """The factors of one example."""
        num = directions.num_outputs
        num = len(self.jaxpr.outvars) if num is None else num
        outs, operands, pullback = self.linearize(self.leaves, rows, num)
        seeds, curve = directions.seeds(outs, rows)
        if not directions.axes:
            return OfExample(outs, operands, pullback(seeds), curve)
        # These may be the same for all examples and devices.
        seeds = [vary_as([out], seed) for seed, out in safe_zip(seeds, outs)]
        # What is not used of the result of a pullback is not computed.
        cotangents = jax.vmap(pullback)(seeds)
        for number in {*directions.paired} - {None}:
            ones = [jnp.full_like(out, i == number) for i, out in enumerate(outs)]
            pulled = pullback([vary_as([out], x) for out, x in safe_zip(outs, ones)])
            for i, x in enumerate(pulled):
                if directions.paired[i] == number:
                    cotangents[i] = x[None]
        return OfExample(outs, operands, cotangents, curve)

    def zeros(self, leaves: list, example: list) -> list[Array]:
        """Perturbations of zero."""
        # On a mesh, a perturbation must have the type of the value that it perturbs.
        structs = self.table.perturbations
        if any(map(is_on_mesh, [*leaves, *example])):
            perturbed = lambda leaves, example: self.evaluate(leaves, example, None)[2]
            structs = jax.eval_shape(perturbed, leaves, example)
        return [*map(zeros_like, structs)]

    def evaluate(
        self, leaves: list, example: list, perturbations: list | None
    ) -> tuple[list, list, list]:
        """Outputs, operands and, without perturbations, the values to perturb."""
        leaves = list(leaves)
        of_leaves = [leaves[leaf] for leaf in self._perturbed]
        if perturbations is not None:
            perturbations = list(perturbations)
            for leaf in reversed(self._perturbed):
                leaves[leaf] = leaves[leaf] + perturbations.pop()
        args = [*leaves, *example]
        if self.jaxpr.effects:
            return run_jaxpr(self.jaxpr, self._consts, args), [], of_leaves
        outs, operands, perturbed = self._plan.run(args, perturbations)
        return outs, operands, perturbed + of_leaves
