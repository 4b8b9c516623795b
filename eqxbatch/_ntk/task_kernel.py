"""The kernels of a model as a kernel function that keeps factors of examples."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._base.shapes import checked
from .._base.trees import match_prefix
from .._batch.cut import broadcast_axes
from .._pairs.batch import BatchKernel, make_batch_kernel
from .._pairs.calls import check_vmap_axes, VmapAxes
from .._pairs.function import is_axes
from .._pairs.kernel import AbstractKernelFunction, KernelCall
from .model_kernel import ModelKernel
from .output_axes import Mirror
from .random_model import ModelWithState
from .request import Kernels, KernelTask
from .traced_model import named, Settings


class TaskKernel(AbstractKernelFunction):
    """A task for a model, as a kernel function.

    - `get`: as for `named`.
    """

    kernels: Kernels
    task: KernelTask
    get: Any = eqx.field(static=True)

    @property
    def symmetric(self) -> Mirror:
        return self.kernels.mirror

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Any = None, **kwargs: Any
    ) -> Any:
        return self._named(self.kernels(self.task, x1, x2, key, kwargs))

    def _named(self, kernels: list[PyTree]) -> Any:
        return named(self.get, self.task.get, kernels)

    def in_blocks(self, call: KernelCall) -> ModelKernel | None:
        is_asymmetric = len(call.calls) == 1 and call.plan.mirror is None
        if is_asymmetric or not _has_axes_of(self.kernels, call):
            return None
        kernels = self.kernels.of_blocks(call.plan)
        model = kernels.traced(call.calls, call.shared)
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


class AbstractEstimator(AbstractKernelFunction):
    """An empirical kernel: a kernel function with a model.

    - `_kernels`: the model, and how its kernels are computed.
    - `_blocks`: where they are stored or reduced; None for the device.
    """

    _kernels: eqx.AbstractVar[Kernels]
    _blocks: eqx.AbstractVar[BatchKernel | None]

    @abc.abstractmethod
    def _asked(self, **kwargs: Any) -> tuple[KernelTask, Any, dict[str, Any]]:
        """The requested kernels of a call, their names, and arguments for the model."""

    @property
    def model(self) -> Callable | tuple[Callable, eqx.nn.State]:
        """The model, together with its state if one was given."""
        model = self._kernels.model
        if isinstance(model, ModelWithState):
            return model.model, model.state
        return model

    @property
    def symmetric(self) -> Mirror:
        """A function that exchanges the two sides of a kernel, for symmetry."""
        return self._kernels.mirror

    @property
    def takes_blocks(self) -> bool:
        """Whether blocks of a kernel are kernels of blocks of the examples."""
        return self._kernels.settings.vmap_axes.is_batched

    def in_blocks(self, call: KernelCall) -> ModelKernel | None:
        if self._blocks is not None:
            return None
        task, get, kwargs = self._asked(*call.args, **call.shared)
        kernel = TaskKernel(self._kernels, task, get)
        return kernel.in_blocks(dataclasses.replace(call, args=(), shared=kwargs))

    def _computed(self, x1: PyTree, x2: PyTree, key: Any, asked: tuple) -> Any:
        """The kernels, after they are stored or reduced."""
        task, get, kwargs = asked
        if self._blocks is None:
            return TaskKernel(self._kernels, task, get)(x1, x2, key=key, **kwargs)
        settings = dataclasses.replace(self._kernels.settings, block_size=None)
        kernels = dataclasses.replace(self._kernels, settings=settings)
        call = {"key": key, **kwargs}
        return self._blocks.apply(TaskKernel(kernels, task, get), (x1, x2), call)


_Constructor = TypeVar("_Constructor", bound=Callable)


# Settings that are converted; the conversion checks their types.
_CONVERTED = (
    "block_size",
    "diagonal_axes",
    "implementation",
    "init",
    "mesh",
    "mesh_axis",
    "model",
    "n_samples",
    "progress",
    "samples_per_batch",
    "store",
    "tol",
    "trace_axes",
    "vmap_axes",
    "get",
)


def checked_settings(constructor: _Constructor) -> _Constructor:
    """A constructor that checks the settings of a kernel against annotations."""
    remedies = {"key": "`jax.random.key(seed)` makes one."}
    return checked(constructor, remedies, _CONVERTED)


def make_blocks(
    block_size: Any,
    vmap_axes: Any,
    *,
    store: Any,
    mesh: Any,
    mesh_axis: str | None,
    reduce: PyTree,
    progress: Any,
) -> BatchKernel | None:
    """Where kernels are stored or reduced; None to return them on the device."""
    settings = mesh, mesh_axis, reduce, progress
    if (
        all(x is None for x in settings)
        and isinstance(store, str)
        and store == "device"
    ):
        return None
    axes = check_vmap_axes(vmap_axes)
    blocks = make_batch_kernel(
        block_size,
        reduce=reduce,
        mesh=mesh,
        mesh_axis=mesh_axis,
        store=store,
        progress=progress,
        in_axes=axes.inputs,
        kwargs_axes=axes.kwargs,
        out_axes=None,
    )
    check_is_batched(axes)
    return blocks


def check_is_batched(axes: VmapAxes) -> None:
    """Raises for a model of a whole batch."""
    if not axes.is_batched:
        raise ValueError(
            "With `vmap_axes=None`, a kernel cannot go to a `store` or a `mesh`, be "
            "reduced, be computed in blocks, or show its `progress`: a model of a "
            "whole batch cannot be evaluated for blocks of it. Use `vmap_axes=0` if "
            "examples do not interact."
        )


def check_axes_of_blocks(settings: Settings) -> None:
    """Raises unless rows and columns are the first axes of a block."""
    outputs = settings.vmap_axes.outputs
    if any(axis != 0 for axis in jtu.tree_leaves(outputs)):
        raise ValueError(
            "With a `store` or `reduce`, `vmap_axes` must give outputs the batch axis "
            f"0; got {outputs}. Use `vmap_axes=(inputs, 0, kwargs)`, and move axes of "
            "the kernel afterwards."
        )
    if 0 in (*settings.trace_axes, *settings.diagonal_axes):
        raise ValueError(
            "`store` and `reduce` are for kernels of all pairs of examples; got the "
            "batch axis 0 in `trace_axes` or `diagonal_axes`. Remove it from them, or "
            "leave out `store` and `reduce`."
        )


def _has_axes_of(kernels: Kernels, call: KernelCall) -> bool:
    """Whether the model and the kernel function have the same input batch axes."""
    axes = kernels.settings.vmap_axes
    if kernels.settings.block_size is not None or not axes.is_batched:
        return False
    default = eqx.if_array(0)
    for one in call.calls:
        trees = [(one.x, call.in_axes, axes.inputs)]
        for name, x in one.own.items():
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
