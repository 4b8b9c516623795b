"""Empirical kernels: what a model is asked for, and kernel functions that ask for it.

A kernel function of this package keeps factors of examples for all blocks.
"""

import abc
import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, PyTree

from .._base.checks import checked
from .._base.trees import match_prefix
from .._batch.batch import broadcast_axes
from .._batch.derivative import Selection
from .._kernels.batch_kernel import AbstractStored, BatchKernel, settings_of
from .._kernels.calls import KEY_REMEDY, VmapAxes
from .._kernels.engine import make_collectors, on_device
from .._kernels.function import is_axes
from .._kernels.kernel import AbstractKernelFunction, KernelCall, Plan
from .model_kernel import by_name, each, Found, ModelKernel, whole
from .output_axes import Mirror, OutputAxes
from .pairings import AbstractPairing, choose_pairing
from .random_model import as_callable, selection_of
from .request import (
    AbstractJacobianKernel,
    AbstractKernelSettings,
    AbstractParameterKernel,
    AbstractTask,
    ModelRequest,
    named,
    TracedModel,
)


_Class = TypeVar("_Class", bound=type)


def checked_constructor(cls: _Class) -> _Class:
    """Checks the arguments of a constructor; converters of fields check their own."""
    fields = dataclasses.fields(cls)
    converted = [field.name for field in fields if "converter" in field.metadata]
    others = [*converted, "model", "init"]
    cls.__init__ = checked(cls.__init__, KEY_REMEDY, others, always=True)
    return cls


class Probes(eqx.Module):
    """The directions that traced axes are projected on: random signs or ones."""

    num: int = eqx.field(static=True)
    key: Array | None

    def along(
        self, axes: OutputAxes, request: ModelRequest
    ) -> Inexact[Array, "probes ..."]:
        traced = [axes.shape[axis] for axis in axes.axes_with("trace")]
        if not traced and not request.traces_last:
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
        room = model.request.room
        plan = Plan(
            mirror=model.request.symmetric,
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
                vectors = self.probes.along(axes, model.request)
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


class TaskKernel(AbstractKernelFunction):
    """A task for a model, as a kernel function.

    - `get`: as for `named`.
    """

    request: ModelRequest
    task: KernelTask
    get: Any = eqx.field(static=True)

    @property
    def symmetric(self) -> Mirror:
        return self.request.symmetric

    @property
    def kwargs_axes(self) -> dict[str, PyTree]:
        return self.request.vmap_axes.kwargs

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Any = None, **kwargs: Any
    ) -> Any:
        return self._named(self.request(self.task, x1, x2, key, kwargs))

    def _named(self, kernels: list[PyTree]) -> Any:
        return named(self.get, self.task.get, kernels)

    def in_blocks(self, call: KernelCall) -> ModelKernel | None:
        is_asymmetric = len(call.calls) == 1 and call.plan.mirror is None
        if is_asymmetric or not _has_axes_of(self.request, call):
            return None
        # Without a size, there is a single block.
        sizes = None if call.plan.sizes == (None, None) else call.plan.sizes
        request = dataclasses.replace(
            self.request, block_size=sizes, room=call.plan.room
        )
        model = TracedModel(request, call.calls, call.shared)
        for axes in model.axes:
            if axes.pairs_examples and not axes.is_empty:
                continue
            if call.out_axes is not None:
                return None
            what = "has no entries" if axes.is_empty else "pairs no examples"
            raise ValueError(
                "`store`, `mesh`, `reduce` and `progress` are for kernels of all pairs "
                f"of examples, but that of output number {axes.index}, of shape "
                f"{axes.shape} for one example, {what}. Leave them out, or remove the "
                "batch axis from `trace_axes` and `diagonal_axes`."
            )
        pairing, names = self.task.pairing(model, model.axes)
        assemble = lambda found: self._named(self.task.assembled(model, found))
        kernel = ModelKernel(call.plan, model.rows, pairing, names, assemble)
        return kernel if _returns_axes_of(kernel, call) else None


class AbstractEstimator(AbstractKernelFunction, AbstractKernelSettings):
    """An empirical kernel: a kernel function with a model."""

    model: Callable | tuple[Callable, eqx.nn.State]
    _selection: Selection | None = eqx.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Once, and not in each call: it looks at all leaves. Later, the model may have
        # other arrays, but not another structure.
        self._selection = None
        if isinstance(self, AbstractParameterKernel):
            self._selection = selection_of(self.model, self.where, self.filter_spec)

    def __check_init__(self) -> None:
        request = self._request  # It checks the model.
        if not self._is_plain:
            self._in_blocks(request)
            check_is_batched(self.vmap_axes)

    @abc.abstractmethod
    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        """The requested kernels of a call, their names, and arguments for the model."""

    @property
    def _request(self) -> ModelRequest:
        """The model and its parameters, and how its kernel is computed."""
        is_jacobian = isinstance(self, AbstractJacobianKernel)
        return ModelRequest(
            as_callable(self.model),
            self._selection,
            implementation=self.implementation if is_jacobian else "auto",
            **settings_of(self, AbstractKernelSettings),
        )

    @property
    def _is_plain(self) -> bool:
        """Whether kernels are returned as a whole, by one program on the device."""
        if not isinstance(self, AbstractStored):
            return True
        others = (self.mesh, self.mesh_axis, self.progress, self.reduce)
        return not self.is_stored and all(x is None for x in others)

    def in_blocks(self, call: KernelCall) -> ModelKernel | None:
        if not self._is_plain:
            return None
        task, get, kwargs = self._asked(*call.args, **call.shared)
        kernel = TaskKernel(self._request, task, get)
        return kernel.in_blocks(dataclasses.replace(call, args=(), shared=kwargs))

    def _computed(self, x1: PyTree, x2: PyTree, key: Any, asked: tuple) -> Any:
        """The kernels, after they are stored or reduced."""
        task, get, kwargs = asked
        kernel_fn = TaskKernel(self._request, task, get)
        if self._is_plain:
            return kernel_fn(x1, x2, key=key, **kwargs)
        request = dataclasses.replace(self._request, block_size=None)
        kernel_fn = dataclasses.replace(kernel_fn, request=request)
        return self._in_blocks(kernel_fn)(x1, x2, key=key, **kwargs)

    def _in_blocks(self, kernel_fn: Callable) -> BatchKernel:
        return in_blocks(self, kernel_fn, out_axes=None)


def in_blocks(
    kernel: AbstractKernelSettings, kernel_fn: Callable, **settings: Any
) -> BatchKernel:
    """A kernel function in blocks, by the settings of a kernel."""
    if isinstance(kernel, AbstractStored):
        settings = {**settings_of(kernel, AbstractStored), **settings}
    axes = kernel.vmap_axes.inputs
    return BatchKernel(
        kernel_fn, block_size=kernel.block_size, in_axes=axes, **settings
    )


def check_is_batched(axes: VmapAxes) -> None:
    """Raises for a model of a whole batch."""
    if not axes.is_batched:
        raise ValueError(
            "With `vmap_axes=None`, a kernel cannot go to a `store` or a `mesh`, be "
            "reduced, be computed in blocks, or show its `progress`: a model of a "
            "whole batch cannot be evaluated for blocks of it. Use `vmap_axes=0` if "
            "examples do not interact."
        )


def check_axes_of_blocks(settings: AbstractKernelSettings) -> None:
    """Raises unless rows and columns are the first axes of a block."""
    outputs = settings.vmap_axes.outputs
    if any(axis != 0 for axis in jtu.tree_leaves(outputs)):
        raise ValueError(
            "With a `store` or `reduce`, `vmap_axes` must give outputs the batch axis "
            f"0; got {outputs}. Use `vmap_axes=(inputs, 0, kwargs)`, and move axes of "
            "the kernel afterwards."
        )
    if 0 in (*settings.traced_axes, *settings.diagonal_axes):
        raise ValueError(
            "`store` and `reduce` are for kernels of all pairs of examples; got the "
            "batch axis 0 in `trace_axes` or `diagonal_axes`. Remove it from them, or "
            "leave out `store` and `reduce`."
        )


def _has_axes_of(request: ModelRequest, call: KernelCall) -> bool:
    """Whether the model and the kernel function have the same input batch axes."""
    axes = request.vmap_axes
    if request.block_size is not None or not axes.is_batched:
        return False
    default = eqx.if_array(0)
    for one in call.calls:
        trees = [(one.x, call.in_axes, axes.inputs)]
        for name, x in one.kwargs.items():
            specs = (x.get(name, default) for x in (call.kwargs_axes, axes.kwargs))
            trees.append((x, *specs))
        for tree, of_call, of_model in trees:
            if _axes(of_call, tree) != _axes(of_model, tree):
                return False
    return True


def _axes(spec: PyTree, tree: PyTree) -> list[int | None]:
    found = broadcast_axes("in_axes", spec, tree)
    return [
        axis % x.ndim if axis is not None and eqx.is_array(x) and x.ndim else axis
        for axis, x in zip(found, jtu.tree_leaves(tree), strict=True)
    ]


def _returns_axes_of(kernel: ModelKernel, call: KernelCall) -> bool:
    """Whether rows and columns are on the axes that the call expects."""
    if call.out_axes is None:
        return True
    places = match_prefix(
        "out_axes", call.out_axes, kernel.out, "a PyTree prefix", is_leaf=is_axes
    )
    expected = [
        tuple(axis if axis is None else axis % len(x.shape) for axis in axes)
        if is_axes(axes)
        else axes
        for _, axes, part in places
        for x in jtu.tree_leaves(part)
    ]
    return expected == [leaf.axes for leaf in kernel.leaves]
