"""Shared by all empirical kernels: a model, and the tasks for it."""

import abc
import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, PyTree

from .._base.jaxprs import compiled
from .._base.mesh import gathered, within_mesh
from .._base.trees import described
from .._batch.memory import MemoryBudget, resolve_size
from .._batch.objective import Selection
from .._pairs.calls import Call, make_calls
from .._pairs.engine import make_collectors, on_device
from .._pairs.kernel import Plan, SHARE
from .model_kernel import by_name, each, Found, ModelKernel, whole
from .output_axes import Mirror, OutputAxes
from .pairings import AbstractPairing, choose_pairing
from .traced_model import make_settings, Settings, TracedModel


class AbstractTask(eqx.Module):
    """A task for a model."""

    @abc.abstractmethod
    def run(self, model: TracedModel) -> Any:
        """The result of the task."""


class Kernels(eqx.Module):
    """A model, which of its leaves are parameters, and how kernels are computed.

    `selection` is None if only the outputs of the model matter.
    """

    model: Callable
    selection: Selection | None
    settings: Settings

    @property
    def mirror(self) -> Mirror:
        """A function that exchanges the two sides of a returned kernel."""
        return self.settings.mirror

    def __call__(
        self,
        task: AbstractTask,
        x1: PyTree,
        x2: PyTree,
        key: Any,
        kwargs: dict[str, Any],
        *,
        is_diagonal: bool = False,
    ) -> Any:
        """Runs the task for the model on two sides.

        `is_diagonal` says whether each example is only combined with the same example
        of the other side.
        """
        calls, shared = make_calls(x1, x2, key, kwargs)
        kernels = dataclasses.replace(self, settings=self.settings.in_bytes())
        return _run(kernels, task, calls, shared, is_diagonal)

    def run(
        self,
        task: AbstractTask,
        calls: list[Call],
        shared: dict[str, Any],
        is_diagonal: bool,
    ) -> Any:
        model = self.traced(calls, shared, is_diagonal=is_diagonal)
        if isinstance(self.settings.block_size, MemoryBudget):
            total = max(side.rows.total for side in model.sides)
            call = (task, calls, shared, is_diagonal)
            return self._fitted(self.settings.block_size, total, call)
        return task.run(model)

    def of_blocks(self, plan: Plan) -> "Kernels":
        """Runs the task in blocks of a given plan."""
        # Without a size, there is a single block.
        size = None if plan.sizes == (None, None) else plan.sizes
        changes = {"block_size": size, "room": plan.room}
        settings = dataclasses.replace(self.settings, **changes)
        return dataclasses.replace(self, settings=settings)

    def traced(
        self, calls: list[Call], shared: dict[str, Any], *, is_diagonal: bool = False
    ) -> TracedModel:
        """The traced model."""
        return TracedModel(
            self.model,
            self.selection,
            self.settings,
            calls,
            shared,
            is_diagonal=is_diagonal,
        )

    def _fitted(self, budget: MemoryBudget, total: int, call: tuple) -> Any:
        """The kernels with the largest blocks that fit into a budget."""

        def run_with(size: int, room: int) -> Callable[[tuple], Any]:
            def run(operands: tuple) -> Any:
                kernels, call = operands
                settings = dataclasses.replace(
                    kernels.settings, block_size=size, room=room
                )
                return dataclasses.replace(kernels, settings=settings).run(*call)

            return run

        # The memory that the kernels leave is for factors of the rows and for blocks.
        operands = (self, call)
        structs = eqx.filter_eval_shape(run_with(1, 0), operands)
        outputs = sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(structs))
        room = max(budget.resolve() - outputs, 0) // SHARE
        run = lambda size: run_with(size, room)
        return run(resolve_size(budget, total, run, operands))(operands)


# The called object is an argument of the one compiled function, so repeated calls with
# the same shapes are not retraced.
@compiled
def _run(kernels: Kernels, *call: Any) -> Any:
    kernels, call = gathered((kernels, call))
    with within_mesh((kernels, call)):
        return kernels.run(*call)


def make_kernels(
    model: Callable,
    selection: Selection | None,
    *,
    trace_axes: Any = (),
    diagonal_axes: Any = (),
    vmap_axes: Any = 0,
    block_size: Any = None,
    implementation: Any = "auto",
) -> Kernels:
    if not callable(model):
        raise TypeError(f"`model` must be callable; got {described(model)}.")
    settings = make_settings(
        trace_axes, diagonal_axes, vmap_axes, implementation, block_size
    )
    return Kernels(model, selection, settings)


class Probes(eqx.Module):
    """The directions that traced axes are projected on: random signs or ones."""

    num: int = eqx.field(static=True)
    key: Array | None

    def along(
        self, axes: OutputAxes, settings: Settings
    ) -> Inexact[Array, "probes ..."]:
        traced = [axes.shape[axis] for axis in axes.axes_with("trace")]
        if not traced and not settings.traces_last:
            raise ValueError(
                "`trace_axes` must name the axes of the output that are projected; got "
                f"none for an output of shape {axes.shape} for one example."
            )
        if axes.averages_examples and self.key is not None:
            raise ValueError(
                "`trace_axes` has the axis of the examples, but standard errors of "
                "single examples do not give that of their mean. Name it in "
                "`diagonal_axes`, and average the returned `kernel`."
            )
        shape = (self.num, *traced)
        if self.key is None:
            return jnp.ones(shape, axes.dtype)
        return jr.rademacher(jr.fold_in(self.key, axes.index), shape, axes.dtype)


class KernelTask(AbstractTask):
    """Kernels, one for each array that the model returns.

    - `get`: the kinds of kernels.
    - `probes`: directions to project traced axes on, for an estimate with standard
        error.
    """

    get: tuple[str, ...] = eqx.field(static=True)
    probes: Probes | None = None

    def run(self, model: TracedModel) -> list[PyTree[Inexact[Array, "..."]]]:
        """Kernels of all kinds; an estimate is followed by its standard error."""
        found: Found = {}
        num = (model.sides[0].rows.total, model.sides[-1].rows.total)
        empty = [axes for axes in model.axes if axes.is_empty]
        for name, axes in itertools.product(self.get, empty):
            nothing = axes.arranged(axes.nothing(num))
            found[name, axes.index] = [nothing] * (1 if self.probes is None else 2)
        for pairs_examples in (True, False):
            some = [
                axes
                for axes in model.axes
                if axes.pairs_examples == pairs_examples and not axes.is_empty
            ]
            if some:
                found |= self._found(model, some)
        for axes in model.axes:
            for name in self.get:
                for kernel in found[name, axes.index]:
                    axes.check(kernel, num)
        return self.assembled(model, found)

    def assembled(self, model: TracedModel, found: Found) -> list[PyTree]:
        """Assembles the output from the kernels of all outputs of the model."""
        treedef = jtu.tree_structure(model.out)
        return [
            jtu.tree_unflatten(treedef, kernels)
            for name in self.get
            for kernels in zip(
                *(found[name, axes.index] for axes in model.axes), strict=True
            )
        ]

    def _found(self, model: TracedModel, some: list[OutputAxes]) -> Found:
        """The kernels of outputs that all have all pairs of examples, or none has."""
        pairing, names = self.pairing(model, some)
        rows, columns = model.block_sizes()
        if not some[0].pairs_examples:
            return by_name(names, each(model, pairing, rows))
        totals = model.sides[0].rows.total, model.sides[-1].rows.total
        sizes = zip((rows, columns), totals, strict=True)
        if 0 in totals or all(size is None or size >= n for size, n in sizes):
            return by_name(names, whole(model, pairing))
        room = model.settings.room
        plan = Plan(
            mirror=model.settings.mirror,
            sizes=(rows, columns),
            room=sys.maxsize if room is None else room,
        )
        kernel = ModelKernel(plan, model.rows, pairing, names, lambda found: found)
        return kernel.output(on_device(kernel, make_collectors(kernel, None)))

    def pairing(
        self, model: TracedModel, some: list[OutputAxes]
    ) -> tuple[AbstractPairing, list[tuple[str, int]]]:
        """The pairing for some outputs, and the names of its kernels."""
        values = some if "nngp" in self.get else []
        ntk: list[OutputAxes] = []
        directions: tuple[list[Array], list[Array]] = ([], [])
        for axes in some if "ntk" in self.get else []:
            vectors, num = None, None
            if self.probes is not None:
                vectors = self.probes.along(axes, model.settings)
                num = self.probes.num
            axes = dataclasses.replace(axes, probes=num)
            ntk.append(axes)
            for side, of_side in enumerate(directions):
                of_side.append(axes.cotangents(vectors, side))
        pairing = choose_pairing(model, values, ntk, directions)
        names = [
            ("nngp" if i < len(values) else "ntk", axes.index)
            for i, axes in enumerate(pairing.axes)
        ]
        return pairing, names
