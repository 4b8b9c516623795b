"""A function with its sites: where its parameters enter the computation.

A zero perturbation is added to the output of each site. The derivative with respect to
it is the cotangent `d` in the gradient of the parameter. `jax.vjp` computes it, so no
derivative rules of our own are needed.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._base.jaxprs import run_jaxpr
from .._base.mesh import is_on_mesh, vary_as, zeros_like
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip
from .._batch.rows import Rows
from .axes import Axes
from .factors import Factors
from .finder import Finder, Inputs, views_of
from .plan import Run
from .site import leaf_site
from .table import SiteTable
from .values import evaluated, Node
from .views import leaf_view, Values


_Struct = jax.ShapeDtypeStruct


class Seeds(NamedTuple):
    """What is pulled back from the outputs of one example.

    - `cotangents`: those of the outputs, after the axes of directions if there are any;
        None for zeros.
    - `curve`: the curvature between these directions, if there is one.
    """

    cotangents: Sequence[Any]
    curve: Array | None = None


@dataclasses.dataclass(frozen=True)
class Directions:
    """The directions in outputs that are pulled back for each example.

    - `seeds`: takes the differentiated outputs of an example, and its rows.
    - `axes`: the axes of directions, if there are any.
    - `paired`: for each perturbation, the output for which a vector of ones is pulled
        back to it in place of all directions; None for no such output.
    """

    seeds: Callable[[list[Array], Rows], Seeds]
    axes: Axes = ()
    paired: Sequence[int | None] = ()

    def __repr__(self) -> str:
        along = ", ".join(map(repr, self.axes))
        return f"<directions along {along}>" if along else "<a single direction>"


# The gradient of a loss, which is the only differentiated output.
OF_LOSS = Directions(lambda outs, _: Seeds([jnp.ones_like(outs[0])]))


class Linearized(NamedTuple):
    """A program at one example.

    - `outs`: its outputs; `operands`: those of the sites.
    - `pullback`: takes cotangents of the differentiated outputs, and returns those of
        the sites.
    """

    outs: list[Array]
    operands: list[Array]
    pullback: Callable[[list[Array]], list[Array]]


class Pulled(NamedTuple):
    """The cotangents of the sites of one example, and the curvature of its seeds."""

    cotangents: list[Array]
    curve: Array | None


class OfExample(NamedTuple):
    """What `Factors` have for many examples, for one.

    - `pulled`: what is pulled back from each of several `Directions`.
    """

    outs: list[Array]
    operands: list[Array]
    pulled: list[Pulled]


class Program:
    """A traced function with its sites.

    With `use_rules=False`, all leaves are treated as if no rule covered them. Leaves in
    `constant` are not differentiated. For leaves in `formed`, the gradient itself is
    requested, as if no rule covered them. The first `num_outputs` outputs are
    differentiated; None for all of them. `order` is 2 if second derivatives are needed.
    The products of leaves in `uses` with constants are sites, too.

    - `traced`, `leaves`, `jaxpr`: the traced function, its leaves and jaxpr.
    - `num_outputs`: the number of differentiated outputs.
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
        uses: Collection[int] = (),
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
        self.num_outputs = num if num_outputs is None else num_outputs
        # Sites matter only for outputs that are differentiated.
        live = [i < self.num_outputs for i in range(num)]
        # A search finds leaves that no rule covers. It is repeated without them until
        # it finds none.
        while True:
            finder = Finder(order, uses)
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
        # The only site of a leaf without a rule is the leaf itself. The cotangents
        # there come last, and are its gradients.
        sites, perturbations = [*plan.sites], [*plan.perturbations]
        for leaf in self._perturbed:
            like = self.leaves[leaf]
            sites.append(leaf_site(leaf, like, len(perturbations)))
            perturbations.append(_Struct(like.shape, like.dtype))
        self.table = SiteTable(
            self.leaves,
            sites,
            perturbations,
            [*plan.operands],
            finder.values,
            fallbacks,
        )

    def __repr__(self) -> str:
        return f"Program with the sites\n{self.table!r}"

    def values(self, leaves: Values | None = None) -> Values:
        """The values that views of sites read, besides their leaf, at some `leaves`.

        They are the same for all examples. Values that no view reads are None.
        """
        nodes = self.table.nodes
        read = {nodes[i] for site in self.table.sites for i in site.view.reads}
        values = evaluated(read, self.leaves if leaves is None else leaves)
        return [values[x] if x in read else None for x in nodes]

    def value_structs(self) -> Values:
        """The types of the values."""
        return jax.eval_shape(lambda: self.values(self.traced.zeros()[0]))

    def factors(self, rows: Rows, directions: Directions) -> Factors:
        """The factors of some examples, or of a single one."""
        of_one = lambda example: self.of_example(example, [directions])
        examples = rows.unweighted().of_each(of_one)
        if not rows.axes:
            # Factors have an axis of examples, also of a single one.
            examples = jax.tree.map(lambda x: x[None], examples)
        # Outputs have their examples along axis 0, whatever the axes of the rows.
        (pulled,) = examples.pulled
        return Factors(
            examples.operands,
            pulled.cotangents,
            directions.axes,
            examples.outs[0].shape[0],
            self.values(),
            outs=examples.outs,
            curve=pulled.curve,
        )

    def of_example(
        self,
        example: Rows,
        directions: Sequence[Directions],
        leaves: list[Array] | None = None,
    ) -> OfExample:
        """The factors of one example, at the program's leaves or at others."""
        leaves = self.leaves if leaves is None else leaves
        outs, operands, pullback = self.linearize(leaves, example.arrays)
        seeded = outs[: self.num_outputs]
        pulled = [_pulled(x, seeded, example, pullback) for x in directions]
        return OfExample(outs, operands, pulled)

    def linearize(
        self,
        leaves: list[Array],
        example: list[Array],
        point: list[Array] | None = None,
        *,
        remat: bool = False,
    ) -> Linearized:
        """Runs the function on one example.

        `point` has other perturbations than zeros. With `remat`, the pullback computes
        the values of the function again.
        """
        num = self.num_outputs

        def run(perturbations: Values) -> tuple[list, tuple[list, list]]:
            outs, operands, _ = self.evaluate(leaves, example, perturbations)
            # What is not differentiated comes along as auxiliary outputs.
            return outs[:num], (outs[num:], operands)

        run = jax.checkpoint(run) if remat else run
        point = self.zeros(leaves, example) if point is None else point
        outs, pullback, (constant, operands) = jax.vjp(run, point, has_aux=True)
        outs = [*outs, *constant]
        return Linearized(outs, operands, lambda seeds: pullback(seeds)[0])

    def zeros(self, leaves: Values, example: Values) -> list[Array]:
        """Perturbations of zero."""
        # On a mesh, a perturbation must have the type of the value that it perturbs.
        structs = self.table.perturbations
        if any(map(is_on_mesh, [*leaves, *example])):
            perturbed = lambda leaves, example: self.evaluate(leaves, example, None)[2]
            structs = jax.eval_shape(perturbed, leaves, example)
        return [*map(zeros_like, structs)]

    def evaluate(
        self, leaves: Values, example: Values, perturbations: Values | None
    ) -> Run:
        """Runs the function with perturbations of the outputs of its sites."""
        leaves = list(leaves)
        of_leaves = [leaves[leaf] for leaf in self._perturbed]
        if perturbations is not None:
            perturbations = list(perturbations)
            # Perturbations of leaves come last, so they are taken off the end in
            # reverse.
            for leaf in reversed(self._perturbed):
                leaves[leaf] = leaves[leaf] + perturbations.pop()
        args = [*leaves, *example]
        # Without a plan, effects stay where the program has them.
        if self.jaxpr.effects:
            return Run(run_jaxpr(self.jaxpr, self._consts, args), [], of_leaves)
        outs, operands, perturbed = self._plan.run(args, perturbations)
        return Run(outs, operands, perturbed + of_leaves)


def _pulled(
    directions: Directions,
    outs: list[Array],
    example: Rows,
    pullback: Callable[[list[Array]], list[Array]],
) -> Pulled:
    """The cotangents of one example, along the axes of the directions."""
    seeds, curve = directions.seeds(outs, example)

    def pull(seeds: Sequence[Array | None]) -> list[Array]:
        # Seeds may be the same for all examples and devices; outputs are not.
        return pullback(
            [
                jnp.zeros_like(out) if seed is None else vary_as([out], seed)
                for seed, out in safe_zip(seeds, outs)
            ]
        )

    if not directions.axes:
        return Pulled(pull(seeds), curve)
    # All axes of directions are one while they are pulled back.
    num = len(directions.axes)
    lead = next(seed.shape[:num] for seed in seeds if seed is not None)
    flat = [None if x is None else x.reshape(-1, *x.shape[num:]) for x in seeds]
    if math.prod(lead) == 1:
        # An axis of size 1 would lead to other, slower matrix products.
        only = [None if x is None else x[0] for x in flat]
        cotangents = [d[None] for d in pull(only)]
    else:
        # What is not used of the result of a pullback is not computed.
        cotangents = jax.vmap(pull)(flat)
    cotangents = [d.reshape(*lead, *d.shape[1:]) for d in cotangents]
    # An entry of these cotangents is a multiple of one entry of the output, so that
    # ones give all of them at once: an axis of size 1 in place of all directions.
    for number in {*directions.paired} - {None}:
        ones = [jnp.full_like(out, i == number) for i, out in enumerate(outs)]
        for i, x in enumerate(pull(ones)):
            if directions.paired[i] == number:
                cotangents[i] = x[None]
    return Pulled(cotangents, curve)
