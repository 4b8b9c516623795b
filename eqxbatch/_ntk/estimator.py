"""Estimators are kernel functions that keep factors of examples for all blocks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.compile import compiled
from .._base.mesh import gathered, within_mesh
from .._base.types import checked
from .._batch.memory import MemoryBudget, resolve_size
from .._batch.parameters import as_where
from .._batch.transform import of_function, of_setting
from .._kernels.batch_kernel import AbstractStored, computed
from .._kernels.called import AbstractKernelCall, AbstractKernelFunction, FunctionCall
from .._kernels.engine import on_device
from .._kernels.grid import Sizes, sizes_of
from .._kernels.kernel import leaves_at, room_of, SHARE
from .._kernels.on_host import Destination
from .._kernels.sides import Examples, KEY_REMEDY, Keys, Side
from .metric import metric_of
from .pairings import choose_pairing, ModelKernel, pairing_of_all
from .settings import (
    AbstractJacobianKernel,
    AbstractKernelSettings,
    AbstractMetricKernel,
    AbstractParameterKernel,
    check_get,
)
from .traced_model import (
    as_callable,
    chosen_leaves,
    ChosenLeaves,
    Name,
    partitioned,
    Request,
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


# What is computed of a model, in blocks of at most some sizes, with some bytes of room
# for factors of examples.
Task = Callable[[TracedModel, Sizes, int], Any]


def kernels_of(model: TracedModel, sizes: Sizes, room: int) -> Any:
    """The kernels of all outputs, with or without all pairs of examples."""
    kernels: dict[Name, Array] = {}
    mirror = model.request.mirror
    # Outputs without entries have no factors.
    for axes in model.axes:
        if axes.is_empty:
            nothing = axes.arranged(axes.nothing(model.totals))
            kernels |= {(kind, axes.index): nothing for kind in model.kinds}
    # Only kernels of all pairs have blocks of columns.
    for pairs_examples in (True, False):
        group = [
            axes
            for axes in model.axes
            if axes.pairs_examples == pairs_examples and not axes.is_empty
        ]
        if not group:
            continue
        pairing, grid = choose_pairing(model, group, sizes), model.grid(sizes)
        # One block needs no loop, and examples one by one have no columns.
        if not pairs_examples:
            kernels |= pairing.each(grid.sizes[0])
        elif grid.num(0) * grid.num(1) <= 1:
            kernels |= pairing.whole(mirror)
        else:
            make = lambda _, pairing=pairing: pairing
            settings = {"symmetric": mirror, "sizes": grid.sizes, "room": room}
            kernels |= on_device(ModelKernel(make, **settings))
    return model.assembled(kernels)


# The model is an argument of the one compiled function, so that repeated calls with the
# same shapes are not retraced.
@compiled
def _run_task(call: "ModelCall", task: Task) -> Any:
    call, task = gathered((call, task))
    with within_mesh((call, task)):
        return _fitted(call.model, task, call.sizes, call.room)


def _fitted(
    model: TracedModel, task: Task, sizes: Sizes | MemoryBudget, room: int
) -> Any:
    """The result of a task, in the largest blocks that fit into a budget."""
    if not isinstance(sizes, MemoryBudget):
        with model.products():
            return task(model, sizes, room)

    def run_with(size: int, room: int) -> Callable[[tuple], Any]:
        return lambda operands: _fitted(operands[0], operands[1], (size, size), room)

    # The memory that the kernels leave is for factors of the rows and for blocks.
    operands = (model, task)
    structs = eqx.filter_eval_shape(run_with(1, 0), operands)
    outputs = sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(structs))
    room = max(sizes.resolve() - outputs, 0) // SHARE
    run = lambda size: run_with(size, room)
    size = resolve_size(sizes, max(model.totals), run, operands)
    return run(size)(operands)


class _ModelArguments(NamedTuple):
    """Which kernels a call asks for, and the arguments of the model by keyword."""

    get: Any
    kwargs: dict[str, Any]


def _model_arguments(asked: Any, /, *args: Any, **kwargs: Any) -> _ModelArguments:
    # As a call of Python binds them: `get` by position or by name, or not at all.
    of_call = lambda get=None, **kwargs: _ModelArguments(check_get(get), kwargs)
    fixed = lambda **kwargs: _ModelArguments(asked, kwargs)
    return (of_call if asked is None else fixed)(*args, **kwargs)


class AbstractEstimator(AbstractKernelFunction, AbstractKernelSettings):
    """An empirical kernel: a kernel function with a model."""

    model: Callable | tuple[Callable, eqx.nn.State]
    _chosen: ChosenLeaves | None = eqx.field(static=True, init=False, repr=False)
    # Which kernels, as for `TracedModel`; None if each call says it.
    _get: eqx.AbstractClassVar[Any]

    def __repr__(self) -> str:
        # Settings that differ from their defaults; a state is not shown.
        model = self.model[0] if isinstance(self.model, tuple) else self.model
        texts = [of_function(model)]
        for field in dataclasses.fields(self):
            if not (field.kw_only and field.repr):
                continue
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            text = of_setting(getattr(self, field.name))
            if text != of_setting(default):
                texts.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(texts)})"

    def __post_init__(self) -> None:
        # Once, and not in each call: it looks at all leaves. Later, the model may have
        # other arrays, but not another structure.
        model, self._chosen = as_callable(self.model), None
        if isinstance(self, AbstractParameterKernel):
            # Equinox converts fields later.
            where = as_where(self.where)
            self._chosen = chosen_leaves(model, where, self.filter_spec)
            if isinstance(self, AbstractMetricKernel) and self.metric is not None:
                parameters, _ = partitioned(model, self._chosen)
                self.metric = metric_of(self.metric, parameters)

    def __check_init__(self) -> None:
        if isinstance(self, AbstractStored) and not self.is_plain:
            self.check_progress()
            self.check_is_batched()

    @functools.cached_property
    def _request(self) -> Request:
        return Request(
            self._chosen,
            self.symmetric,
            self.traces_last,
            self.in_axes is not None,
            self.out_axes,
            self.method if isinstance(self, AbstractJacobianKernel) else "auto",
            getattr(self, "num_probes", None),
            getattr(self, "key", None),
            self.metric if isinstance(self, AbstractMetricKernel) else None,
        )

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether kernels are returned as a whole, by one program on the device."""
        return not isinstance(self, AbstractStored) or self.is_plain

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """The kernel of all examples of `x1` with all of `x2`."""
        return computed_kernels(self, self._get, Examples(x1, x2, key, kwargs))

    def diagonal(
        self, x1: PyTree, x2: PyTree = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """The kernel of each example of `x1` with the same example of `x2`.

        This is the result of a call with the batch axis among the `diagonal_axes`.
        """
        if self.in_axes is None:
            raise ValueError(
                "With `in_axes=None`, the axis of the examples is not known. Name it "
                "in `diagonal_axes`."
            )
        split = _model_arguments(self._get, **kwargs)
        examples = Examples(x1, x2, key, split.kwargs)
        return in_one_program(self, split.get, examples, kernels_of, is_diagonal=True)

    def in_blocks(self, call: FunctionCall) -> ModelKernel | None:
        # One with a destination, blocks or a batch of its own is called for each block;
        # so is one that is not to be symmetric, as this kernel is.
        is_asymmetric = call.is_same and call.symmetric is None
        is_whole = self.block_size is not None or self.in_axes is None
        if not self._is_plain or is_asymmetric or is_whole:
            return None

        # The model is called for examples, so that their axes must be those of blocks.
        split = _model_arguments(self._get, *call.args, **call.shared)
        axes_of = {"in_axes": self.in_axes, "kwargs_axes": self.kwargs_axes}
        sides = [dataclasses.replace(side, **axes_of) for side in call.sides]
        places = [
            [(x.batch.names, x.batch.axes) for x in y] for y in (sides, call.sides)
        ]
        if places[0] != places[1]:
            return None

        # Its kernel may have other axes than the call says, or no pairs of examples.
        settings = {"symmetric": call.symmetric, "sizes": call.sizes, "room": call.room}
        model_call = ModelCall(self, sides, split.kwargs, split.get, **settings)
        axes_of_outputs = model_call.model.axes
        if any(axes.is_empty or not axes.pairs_examples for axes in axes_of_outputs):
            return None
        kernel = model_call.kernel()
        expected = leaves_at(call.out_axes, kernel.out.tree)
        is_as_expected = [x.axes for x in expected] == [x.axes for x in kernel.leaves]
        return kernel if is_as_expected else None


# Not a Module, which takes longer to make, in each call.
@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ModelCall(AbstractKernelCall):
    """A call of an estimator.

    - `get`, `is_diagonal`: as for `TracedModel`.
    - `symmetric`: that of the estimator if None.
    """

    estimator: Any
    sides: list[Side]
    shared: dict[str, Any]
    get: Any = eqx.field(static=True)
    symmetric: Any = None
    is_diagonal: bool = eqx.field(static=True, default=False)
    sizes: Sizes | MemoryBudget = eqx.field(static=True, default=(None, None))
    room: int = eqx.field(static=True, default=0)

    @functools.cached_property
    def model(self) -> TracedModel:
        """The model with the examples, to be traced."""
        request, model = self.estimator._request, self.estimator.model
        examples = self.get, self.sides, self.shared
        return TracedModel(request, model, *examples, self.is_diagonal)

    def kernel(self) -> ModelKernel:
        symmetric = self.symmetric
        if symmetric is None:
            symmetric = self.estimator.symmetric
        make = eqx.Partial(pairing_of_all, self.model)
        settings = {"sizes": self.sizes, "room": self.room}
        return ModelKernel(make, symmetric=symmetric, **settings)


# A call runs functions: to look up a method of a Module makes another Module.
def computed_kernels(estimator: AbstractEstimator, get: Any, examples: Examples) -> Any:
    """The kernels of some examples, after they are stored or reduced."""
    call = _model_call(estimator, get, examples)
    if estimator._is_plain and not call.has_stored:
        return _run_task(call, kernels_of)
    # A kernel in blocks keeps factors, also if all examples are one block.
    call = dataclasses.replace(call, room=room_of(call.sizes))
    is_placed = isinstance(estimator, AbstractStored)
    return computed(call, estimator.destination if is_placed else Destination())


def in_one_program(
    estimator: AbstractEstimator,
    get: Any,
    examples: Examples,
    task: Task,
    *,
    is_diagonal: bool = False,
) -> Any:
    """What is computed of a model with the examples of a call."""
    call = _model_call(estimator, get, examples, is_diagonal=is_diagonal)
    if call.has_stored:
        raise ValueError(
            "This needs all examples in memory: `numpy.asarray(x)`. For a result for "
            "each one, read some at a time: `over_batches(filter_microbatch("
            "ntk.diagonal, accumulator=Concat()), batch_size=...)(x)`."
        )
    return _run_task(call, task)


def _model_call(
    estimator: AbstractEstimator,
    get: Any,
    examples: Examples,
    *,
    is_diagonal: bool = False,
) -> ModelCall:
    axes = estimator.in_axes, estimator.kwargs_axes
    sides, shared = examples.in_sides(*axes)
    call = ModelCall(estimator, sides, shared, get, is_diagonal=is_diagonal)
    if estimator.block_size is None:
        # There is nothing to keep for other blocks.
        return call
    sizes = sizes_of(estimator.block_size)
    return dataclasses.replace(call, sizes=sizes, room=room_of(sizes))
