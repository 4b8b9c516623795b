"""Empirical kernels: what a model is asked for, and kernel functions that ask for it.

A kernel function of this package keeps factors of examples for all blocks.
"""

import abc
import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree

from .._base.checks import check_callable, checked
from .._base.jaxprs import compiled
from .._base.mesh import gathered, within_mesh
from .._batch.accumulators import Concat
from .._batch.derivative import Selection
from .._batch.loop import accumulated, Rows
from .._batch.memory import MemoryBudget, resolve_size, resolved
from .._kernels.batch_kernel import AbstractStored, BatchKernel, settings_of
from .._kernels.engine import on_device
from .._kernels.function import (
    AbstractKernelFunction,
    CalledKernel,
    KEY_REMEDY,
    Keys,
    leaves_at,
    make_sides,
    Side,
)
from .._kernels.kernel import (
    AbstractBlockKernel,
    flattened,
    KernelLeaf,
    room_to_keep,
    SAMPLE,
    SHARE,
)
from .._sites.factors import Factor
from .output_axes import OutputAxes
from .pairings import (
    AbstractPairing,
    arrays_of,
    bytes_of_examples,
    choose_pairing,
    filled,
    is_factor,
    Name,
)
from .traced_model import (
    AbstractJacobianKernel,
    AbstractKernelSettings,
    AbstractParameterKernel,
    AbstractRequest,
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


# The requested kernels.
Get = str | Sequence[str] | None


_KINDS = ("nngp", "ntk")


def names_of(get: Any) -> tuple[str, ...]:
    """The kinds of kernels to compute."""
    names = _KINDS if get is None else (get,) if isinstance(get, str) else get
    if isinstance(names, (tuple, list)) and all(isinstance(n, str) for n in names):
        names = tuple(name.lower() for name in names)
        if names and len({*names}) == len(names) and {*names} <= {*_KINDS}:
            return names
    raise ValueError(
        "`get` must be 'nngp', 'ntk', a tuple with one or both of them, each once, or "
        f"None for both; got {get!r}."
    )


def check_get(get: Get) -> str | tuple[str, ...] | None:
    names_of(get)
    return get if get is None or isinstance(get, str) else tuple(get)


def named(get: Any, results: list) -> Any:
    """The kernel itself if it was requested by name, and otherwise a named tuple."""
    if isinstance(get, str):
        return results[0]
    return _named_tuple("Kernel", names_of(get))(*results)


_named_tuple = functools.cache(collections.namedtuple)


class Request(AbstractRequest, AbstractKernelFunction):
    """What is asked of a model, as a kernel function.

    - `get`: which kernels, as for `EmpiricalKernel`; or the type of an estimate and its
        standard error.
    - `num_probes`, `key`: how many directions traced axes are projected on, and the key
        for random signs; without it, the directions are ones.
    - `room`: the number of bytes for factors of examples; None if not known yet.
    """

    get: Any = eqx.field(static=True)
    num_probes: int | None = eqx.field(static=True, default=None)
    key: Array | None = None
    _: dataclasses.KW_ONLY
    room: int | None = eqx.field(static=True, default=None)

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Any = None, **kwargs: Any
    ) -> Any:
        return self.computed(x1, x2, key, kwargs)

    def computed(
        self,
        x1: PyTree,
        x2: PyTree,
        key: Any,
        kwargs: dict[str, Any],
        task: Callable[[TracedModel], Any] | None = None,
    ) -> Any:
        """The kernels, or the result of another task for the traced model."""
        sides = self.sides(x1, x2, key, kwargs)
        return _computed(self.in_bytes(), *sides, task)

    def sides(
        self, x1: PyTree, x2: PyTree, key: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Side], dict[str, Any]]:
        """The two sides of a call, and the arguments that they share."""
        return make_sides(x1, x2, key, kwargs, self.in_axes, self.kwargs_axes)

    def in_bytes(self) -> "Request":
        """The request with memory budgets resolved to bytes."""
        if self.block_size is None or self.room is not None:
            return self
        if isinstance(self.block_size, MemoryBudget):
            return resolved(self)
        return dataclasses.replace(self, room=room_to_keep())

    def run(
        self,
        sides: list[Side],
        shared: dict[str, Any],
        task: Callable[[TracedModel], Any] | None,
    ) -> Any:
        model = TracedModel(self, sides, shared)
        budget = self.block_size
        if not isinstance(budget, MemoryBudget):
            with model.products():
                return self._kernels(model) if task is None else task(model)

        def run_with(size: int, room: int) -> Callable[[tuple], Any]:
            changes = {"block_size": size, "room": room}
            replaced = lambda request: dataclasses.replace(request, **changes)
            return lambda operands: replaced(operands[0]).run(*operands[1])

        # The memory that the kernels leave is for factors of the rows and for blocks.
        operands = (self, (sides, shared, task))
        structs = eqx.filter_eval_shape(run_with(1, 0), operands)
        outputs = sum(x.size * x.dtype.itemsize for x in jtu.tree_leaves(structs))
        room = max(budget.resolve() - outputs, 0) // SHARE
        run = lambda size: run_with(size, room)
        size = resolve_size(budget, max(model.totals), run, operands)
        return run(size)(operands)

    def _kernels(self, model: TracedModel) -> Any:
        kernels: dict[Name, Array] = {}
        empty = [axes for axes in model.axes if axes.is_empty]
        for kind, axes in itertools.product(self._kinds, empty):
            kernels[kind, axes.index] = axes.arranged(axes.nothing(model.totals))
        for pairs_examples in (True, False):
            group = [
                axes
                for axes in model.axes
                if axes.pairs_examples == pairs_examples and not axes.is_empty
            ]
            if group:
                kernels |= self._found(model, group)
        return self._assembled(model, kernels)

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("ntk", "error") if callable(self.get) else names_of(self.get)

    def _assembled(self, model: TracedModel, by_name: dict[Name, Any]) -> Any:
        """The output, from the kernels of all outputs of the model."""
        kernels = [
            model.programs[0].output([by_name[kind, x.index] for x in model.axes])
            for kind in self._kinds
        ]
        return self.get(*kernels) if callable(self.get) else named(self.get, kernels)

    def _found(self, model: TracedModel, group: list[OutputAxes]) -> dict[Name, Array]:
        """The kernels of outputs that all have all pairs of examples, or none has."""
        pairing, grid = self._pairing(model, group), model.grid
        if not group[0].pairs_examples:
            return pairing.each(grid.sizes[0])
        if grid.num(0) * grid.num(1) <= 1:
            return pairing.whole(self.symmetric)
        make = lambda: pairing
        return on_device(ModelKernel(make, self.symmetric, grid.sizes, self.room or 0))

    def _pairing(self, model: TracedModel, group: list[OutputAxes]) -> AbstractPairing:
        values = group if "nngp" in self._kinds else []
        ntk = group if "ntk" in self._kinds else []
        if self.num_probes is not None:
            ntk = [self._probed(axes, self.num_probes) for axes in ntk]
        return choose_pairing(model, values, ntk)

    def _probed(self, axes: OutputAxes, num: int) -> OutputAxes:
        """The output with directions that traced axes are projected on."""
        traced = [axes.shape[axis] for axis in axes.axes_with("trace")]
        if not traced and not self.traces_last:
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
        probes = jnp.ones((num, *traced), axes.dtype)
        if self.key is not None:
            key = jr.fold_in(self.key, axes.index)
            probes = jr.rademacher(key, probes.shape, axes.dtype)
        return dataclasses.replace(axes, probes=probes)

    def in_blocks(self, call: CalledKernel) -> "ModelKernel | None":
        is_asymmetric = len(call.sides) == 1 and call.symmetric is None
        is_whole = self.block_size is not None or self.in_axes is None
        if is_asymmetric or is_whole:
            return None
        # Without a size, there is a single block.
        sizes = None if call.sizes == (None, None) else call.sizes
        request = dataclasses.replace(self, block_size=sizes, room=call.room)
        axes_of = {"in_axes": self.in_axes, "kwargs_axes": self.kwargs_axes}
        sides = [dataclasses.replace(side, **axes_of) for side in call.sides]
        places = [
            [(x.batch.names, x.batch.axes) for x in y] for y in (sides, call.sides)
        ]
        if places[0] != places[1]:
            return None
        model = TracedModel(request, sides, call.shared)
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
        make = eqx.Partial(Request.pairing, model)
        kernel = ModelKernel(make, call.symmetric, call.sizes, call.room)
        if call.out_axes is None:
            return kernel
        expected = leaves_at(call.out_axes, jtu.tree_unflatten(*reversed(kernel.out)))
        is_as_expected = [x.axes for x in expected] == [x.axes for x in kernel.leaves]
        return kernel if is_as_expected else None

    @staticmethod
    def pairing(model: TracedModel) -> AbstractPairing:
        """How the kernel of all outputs of a model is computed."""
        request = model.request
        assert isinstance(request, Request)
        pairing = request._pairing(model, model.axes)
        pairing.assemble = functools.partial(request._assembled, model)
        return pairing


# The called object is an argument of the one compiled function, so repeated calls with
# the same shapes are not retraced.
@compiled
def _computed(request: Request, *call: Any) -> Any:
    request, call = gathered((request, call))
    with within_mesh((request, call)):
        return request.run(*call)


class ModelKernel(AbstractBlockKernel):
    """Kernels of a model, in blocks.

    `make` is called once in each compiled function, because a pairing has traced
    programs.
    """

    make: Callable[[], AbstractPairing]

    def __init__(
        self, make: Callable[[], AbstractPairing], symmetric: Any, sizes: Any, room: int
    ):
        self.make = make
        self.symmetric, self.sizes, self.room = symmetric, sizes, room
        axes = self.pairing.assemble(self.pairing.axes)
        struct = lambda x: jax.ShapeDtypeStruct(x.arranged_shape(SAMPLE), x.dtype)
        self.out = flattened(jtu.tree_map(struct, axes))
        self.leaves = tuple(
            KernelLeaf(
                jtu.keystr(path), x.example_axes, x.arranged_shape(SAMPLE), x.dtype
            )
            for path, x in jtu.tree_leaves_with_path(axes)
        )
        rows, columns = map(bytes_of_examples, self._kept)
        self.bytes_kept = rows, columns

    @functools.cached_property
    def pairing(self) -> AbstractPairing:
        return self.make()

    @property
    def rows(self) -> tuple[Rows, Rows]:
        return self.pairing.rows

    @functools.cached_property
    def _kept(self) -> tuple[PyTree[Factor], PyTree[Factor]]:
        """The factors of an example of each side."""
        structs, of = self.structs((1, 1)), self.pairing.factors
        rows = eqx.filter_eval_shape(of, 0, structs[0])
        same = self.is_same
        return rows, rows if same else eqx.filter_eval_shape(of, 1, structs[1])

    def prepare(self) -> None:
        sides = (0,) if self.is_same else (0, 1)
        self.pairing.shared = [self._shared_by(side) for side in sides]

    def _shared_by(self, side: int) -> list[Array]:
        """The factors that all examples of a side share."""
        if not arrays_of(self._kept[side], has_examples=False):
            return []
        factors = self._factors(side, self.rows[side].one())
        return arrays_of(factors, has_examples=False)

    def _factors(self, side: int, arrays: list) -> PyTree[Factor]:
        with self.pairing.products():
            return self.pairing.factors(side, arrays)

    def keep(self, side: int, rows: Rows, size: int) -> Rows:
        side = 0 if self.is_same else side

        def run(arrays: list, num: int) -> list[Array]:
            factors = self._factors(side, arrays)
            # A dummy array, because a loop needs at least one.
            return arrays_of(factors, has_examples=True) or [jnp.zeros(num)]

        of_examples = accumulated(run, rows, size, Concat())
        shared = self.pairing.shared
        shared = shared[side] if shared else self._shared_by(side)
        kept = filled(self._kept[side], of_examples, shared)
        factors = jtu.tree_leaves(kept, is_leaf=is_factor)
        axes = tuple(0 if x.has_examples else None for x in factors)
        return Rows([x.array for x in factors], axes, rows.total)

    def factors(self, side: int, rows: Rows) -> PyTree[Factor]:
        """The factors that `keep` returns, in the form that the pairing uses."""
        arrays = [*rows.arrays]
        fill = lambda x: x.of(arrays.pop(0))
        return jtu.tree_map(fill, self._kept[side], is_leaf=is_factor)

    def block(
        self, first: Rows, second: Rows | None, always: Bool[Array, ""] | bool = True
    ) -> list[Array]:
        del always
        second = first if second is None else second
        sides = self.factors(0, first), self.factors(1, second)
        pairing = self.pairing
        with pairing.products():
            kernels = pairing.kernels(*sides, (first.total, second.total))
        return jtu.tree_leaves(pairing.assemble(pairing.arranged(kernels)))

    def tile(self, first: list, second: list | None) -> list[Array]:
        kept = []
        for side, arrays in enumerate((first, second)):
            if arrays is not None:
                axes = self.rows[side].axes
                size = arrays[0].shape[axes[0]]
                kept.append(self.keep(side, Rows(arrays, axes, size), size))
        return self.block(kept[0], kept[1] if second is not None else None)


class StatefulModel(eqx.Module):
    """A model with state, or a random model, as a function of an example.

    - `state`: its `equinox.nn.State`, or None.
    - `index`: the index of a sample, which is folded into the keys of calls; or None.
    """

    model: Any
    state: Any
    index: Any = None

    def __call__(self, x: PyTree, **kwargs: Any) -> PyTree:
        key = kwargs.get("key")
        if key is not None and self.index is not None:
            kwargs["key"] = jr.fold_in(key, self.index)
        if self.state is None:
            return self.model(x, **kwargs)
        return self.model(x, self.state, **kwargs)[0]


def has_state(model: Any) -> bool:
    """Whether this is a pair of a model and its state."""
    return (
        isinstance(model, tuple)
        and len(model) == 2
        and isinstance(model[1], eqx.nn.State)
    )


def as_callable(model: Any) -> Any:
    """A model, or a pair of a model and its state, as a function of an example."""
    alone = model[0] if has_state(model) else model
    what = "callable, or a pair of that and an `equinox.nn.State`"
    check_callable("model", alone, what)
    return StatefulModel(*model) if has_state(model) else model


def selection_of(model: Any, where: Callable | None, filter_spec: PyTree) -> Selection:
    """The parameters of a model as a callable; those of its state do not count."""
    if not isinstance(model, StatefulModel):
        return Selection(model, where, filter_spec)
    of_model = lambda both: both.model if where is None else where(both.model)
    # A callable is a valid prefix, too.
    return Selection(model, of_model, StatefulModel(filter_spec, False, False))


class AbstractEstimator(AbstractKernelFunction, AbstractKernelSettings):
    """An empirical kernel: a kernel function with a model."""

    model: Callable | tuple[Callable, eqx.nn.State]
    _selection: Selection | None = eqx.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Once, and not in each call: it looks at all leaves. Later, the model may have
        # other arrays, but not another structure.
        self._selection = None
        if isinstance(self, AbstractParameterKernel):
            model = as_callable(self.model)
            self._selection = selection_of(model, self.where, self.filter_spec)

    def __check_init__(self) -> None:
        request = self._request(None)  # It checks the model.
        if not self._is_plain:
            in_blocks(self, request, out_axes=None)
            self.check_is_batched()

    @abc.abstractmethod
    def _asked(self, **kwargs: Any) -> tuple[Request, dict[str, Any]]:
        """What a call asks of the model, and arguments for the model."""

    def _request(
        self, get: Any, num_probes: int | None = None, key: Array | None = None
    ) -> Request:
        is_jacobian = isinstance(self, AbstractJacobianKernel)
        return Request(
            as_callable(self.model),
            self._selection,
            get,
            num_probes,
            key,
            method=self.method if is_jacobian else "auto",
            **settings_of(self, AbstractKernelSettings),
        )

    @property
    def _is_plain(self) -> bool:
        """Whether kernels are returned as a whole, by one program on the device."""
        if not isinstance(self, AbstractStored):
            return True
        others = (self.mesh, self.mesh_axis, self.progress, self.reduce)
        return not self.is_stored and all(x is None for x in others)

    def __call__(
        self, x1: PyTree, x2: PyTree = None, *, key: Keys = None, **kwargs: Any
    ) -> Any:
        """The kernel of all examples of `x1` with all of `x2`."""
        return self._computed(x1, x2, key, self._asked(**kwargs))

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
        request, kwargs = self._asked(**kwargs)
        request = dataclasses.replace(request, is_diagonal=True)
        return request(x1, x2, key=key, **kwargs)

    def in_blocks(self, call: CalledKernel) -> ModelKernel | None:
        if not self._is_plain:
            return None
        request, kwargs = self._asked(*call.args, **call.shared)
        return request.in_blocks(dataclasses.replace(call, args=(), shared=kwargs))

    def _computed(
        self, x1: PyTree, x2: PyTree, key: Any, asked: tuple[Request, dict[str, Any]]
    ) -> Any:
        """The kernels, after they are stored or reduced."""
        request, kwargs = asked
        if self._is_plain:
            return request(x1, x2, key=key, **kwargs)
        kernel_fn = dataclasses.replace(request, block_size=None)
        return in_blocks(self, kernel_fn, out_axes=None)(x1, x2, key=key, **kwargs)


def in_blocks(
    kernel: AbstractKernelSettings, kernel_fn: Callable, **settings: Any
) -> BatchKernel:
    """A kernel function in blocks, by the settings of a kernel."""
    if isinstance(kernel, AbstractStored):
        settings = {**settings_of(kernel, AbstractStored), **settings}
    axes, size = kernel.in_axes, kernel.block_size
    return BatchKernel(kernel_fn, block_size=size, in_axes=axes, **settings)


def check_axes_of_blocks(settings: AbstractKernelSettings) -> None:
    """Raises unless rows and columns are the first axes of a block."""
    if any(axis != 0 for axis in jtu.tree_leaves(settings.out_axes)):
        raise ValueError(
            "With a `store` or `reduce`, `out_axes` must be 0; got "
            f"{settings.out_axes}. Leave it out, and move axes of the kernel "
            "afterwards."
        )
    if 0 in (*settings.traced_axes, *settings.diagonal_axes):
        raise ValueError(
            "`store` and `reduce` are for kernels of all pairs of examples; got the "
            "batch axis 0 in `trace_axes` or `diagonal_axes`. Remove it from them, or "
            "leave out `store` and `reduce`."
        )
