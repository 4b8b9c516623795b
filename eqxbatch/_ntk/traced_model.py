"""A model traced on the two sides of its kernel, and products with this kernel."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, PyTree

from .._base.checks import check_callable, check_equal
from .._base.mesh import vary_as
from .._base.modes import derivative_of_program, pushed
from .._base.platforms import products_of
from .._base.traced_function import TracedFunction
from .._base.trees import safe_zip, type_of
from .._batch.accumulators import Concat
from .._batch.batch import broadcast_axes
from .._batch.loop import accumulated
from .._batch.loss import check_outputs
from .._batch.parameters import are_parameters, warn_of_numbers
from .._batch.rows import Rows
from .._batch.sums import Sum
from .._kernels.grid import Grid, Sizes
from .._kernels.kernel import RowsOfSides
from .._kernels.sides import Side
from .metric import Metric
from .output_axes import Mirror, OutputAxes, OutputRole
from .settings import KernelMethod, named, names_of


# The kind of a kernel ("nngp", "ntk", or "error" for a standard error), and the index
# of the output.
Name = tuple[str, int]


class Request(eqx.Module):
    """What is asked of a model in each call: the settings of `EmpiricalNTK`.

    - `chosen`: the parameters, if they matter.
    - `mirror`: exchanges the two sides of kernels. It has the axes.
    - `traces_last`: whether the last axis is traced if an output has one besides the
        batch.
    - `num_probes`, `key`: the number of directions that traced axes are projected on,
        and the key for random signs; None if they are not, or for ones.
    - `metric`: that of the parameters; None for the identity.
    """

    chosen: "ChosenLeaves | None" = eqx.field(static=True)
    mirror: Mirror
    traces_last: bool = eqx.field(static=True)
    is_batched: bool = eqx.field(static=True)
    out_axes: PyTree
    method: KernelMethod = eqx.field(static=True)
    num_probes: int | None = eqx.field(static=True)
    key: Array | None
    metric: Metric | None

    def roles(self, path: str, ndim: int, batch: int | None) -> list[OutputRole]:
        """The role of each axis of an output with `ndim` axes, including `batch`."""
        # The default axis is none for a scalar of each example.
        roles: list[OutputRole] = ["full"] * ndim
        is_scalar = self.traces_last and ndim == self.is_batched
        trace_axes = () if is_scalar else self.mirror.trace_axes
        pairs: list[tuple[OutputRole, tuple[int, ...]]]
        pairs = [("trace", trace_axes), ("diagonal", self.mirror.diagonal_axes)]
        # Messages name the axis as it was given, and count from the front where two are
        # compared: negative axes depend on the output.
        for role, axes in pairs:
            name = f"{role}_axes"
            for axis in axes:
                if not -ndim <= axis < ndim:
                    raise ValueError(
                        f"`{name}` has the axis {axis}, which is out of range for "
                        f"output{path}: it has {ndim} axes, including the batch axis. "
                        f"Use `{name}=()` if it has no such axis."
                    )
                if roles[axis] == role:
                    raise ValueError(
                        f"`{name}` has axis {axis % ndim} of output{path} twice; got "
                        f"{axes}. Name each axis once."
                    )
                if roles[axis] != "full":
                    raise ValueError(
                        f"Axis {axis % ndim} of output{path} is both in `trace_axes` "
                        f"({trace_axes}) and in `diagonal_axes` ({axes}). It can "
                        "be in one of them only."
                    )
                # The default axis is counted from the end, and would be that of the
                # examples if an output has no other.
                if role == "trace" and axis < 0 and axis % ndim == batch:
                    raise ValueError(
                        f"`trace_axes` has the axis {axis}, which is the batch axis "
                        f"of output{path}. Use `trace_axes=()` for a model that "
                        "returns a scalar for each example, or "
                        f"`trace_axes={batch}` for the mean over the examples."
                    )
                roles[axis] = role
        return roles


class TracedModel(eqx.Module):
    """A model on the two sides of its kernel, or on one if they are the same.

    It is traced on demand, once in each compiled function that it is passed to.

    - `get`: which kernels, as for `EmpiricalKernel`; or the type of an estimate and its
        standard error.
    - `is_diagonal`: whether each example is only combined with the same example of the
        other side.
    """

    request: Request
    model: Any
    get: Any = eqx.field(static=True)
    _sides: list[Side]
    shared: dict[str, Any]
    is_diagonal: bool = eqx.field(static=True, default=False)

    @functools.cached_property
    def sides(self) -> list[Side]:
        """The examples of each side."""
        # Inside `jax.shard_map`, JAX sums a derivative over devices if its input is the
        # same on all of them. A kernel is that of the examples on its device, and both
        # sides have the same program.
        arrays, static = eqx.partition(self._sides, eqx.is_array)
        return eqx.combine(vary_as(jtu.tree_leaves(arrays), arrays), static)

    @functools.cached_property
    def programs(self) -> list[TracedFunction]:
        """The program of an example of each side."""
        sides, model = self.sides, as_callable(self.model)
        # Programs are functions of the parameters, with the rest of the model as
        # constants. An NNGP has none.
        chosen = self.request.chosen
        parameters, static = None, model
        if chosen is not None:
            parameters, static = partitioned(model, chosen)
        leaves, treedef = jtu.tree_flatten(parameters)
        combine = lambda x: eqx.combine(jtu.tree_unflatten(treedef, x), static)
        # As for the examples: no derivative is summed over devices.
        arrays = jtu.tree_leaves(eqx.filter(self.sides, eqx.is_array))
        leaves = vary_as(arrays, leaves)
        # The model is traced once if the examples of both sides have one type.
        programs: list[TracedFunction] = []
        for side in sides:
            if programs and side.type == sides[0].type:
                programs.append(programs[0])
                continue
            run = lambda leaves, rows, side=side: side.call(
                combine(leaves), self.shared, rows
            )
            rows = side.rows
            with side.explained_failure(model, self.shared):
                program = TracedFunction(run, leaves, rows.arrays, rows.axes)
            programs.append(program)
        return programs

    @property
    def leaves(self) -> list[Array]:
        """The parameters, which are the first inputs of the jaxprs."""
        return self.programs[0].leaves

    @property
    def out(self) -> PyTree:
        return self.programs[0].out

    def products(self) -> AbstractContextManager:
        """A context in which products have the precision of the model's."""
        return products_of(*(program.closed for program in self.programs))

    @functools.cached_property
    def axes(self) -> list[OutputAxes]:
        """The axes of each output and their roles in the kernel."""
        check_outputs(self.out, "The model", "outputs that have a kernel")
        outs = [self.out, self.programs[-1].out]
        # Both sides have the same axes, whose sizes may differ.
        of = lambda x: (len(x.shape), str(x.dtype))
        kinds = [jtu.tree_map(of, out) for out in outs]
        if kinds[0] != kinds[1]:
            types = [jtu.tree_map(type_of, out) for out in outs]
            raise ValueError(
                "The model must return arrays of the same structure, rank and dtype "
                f"for an example of `x1` and for one of `x2`; got {types[0]} and "
                f"{types[1]}."
            )
        leaves = [jtu.tree_leaves_with_path(out) for out in outs]
        # A model of a whole batch has outputs without a batch axis.
        specs: list[int | None] = [None for _ in leaves[0]]
        if self.request.is_batched:
            specs = broadcast_axes("out_axes", self.request.out_axes, self.out)
        result = [
            self._output_axes(index, jtu.keystr(path), x, y, batch)
            for index, ((path, x), (_, y), batch) in enumerate(safe_zip(*leaves, specs))
        ]
        # Examples that are no pairs must be as many on both sides.
        first, second = self.totals
        if first != second and not all(axes.pairs_examples for axes in result):
            raise ValueError(
                "Examples are compared one by one, so that `x1` and `x2` must have the "
                f"same number of them; got {first} and {second}."
            )
        return result

    def _output_axes(
        self, index: int, path: str, first: Any, second: Any, batch: int | None
    ) -> OutputAxes:
        """The axes of an output, of which there are structs for both sides."""
        shapes = tuple(first.shape), tuple(second.shape)
        ndim = len(shapes[0]) + self.request.is_batched
        # The shapes are those of one example, and axes are counted in the whole output.
        if self.request.is_batched:
            if batch is None or not -ndim <= batch < ndim:
                raise ValueError(
                    f"`out_axes` gives an output of shape {shapes[0]} for one "
                    f"example the batch axis {batch}, which is none of the {ndim} "
                    "that it has then."
                )
            batch %= ndim
        roles = self.request.roles(path, ndim, batch)
        # The diagonal is one more role of the axis of the examples.
        if self.is_diagonal and batch is not None:
            if roles[batch] == "trace":
                raise ValueError(
                    f"`trace_axes` has the axis {batch} of the examples, over "
                    "which the diagonal has its mean. Call the kernel instead of "
                    "`diagonal`."
                )
            roles[batch] = "diagonal"
        axes = OutputAxes(index, shapes, first.dtype, batch, tuple(roles))
        # What is not apart is one axis of both sides.
        full, pairs = axes.axes_with("full"), enumerate(safe_zip(*shapes))
        if any(axis not in full and n != other for axis, (n, other) in pairs):
            raise ValueError(
                "`trace_axes` and `diagonal_axes` must have the same sizes for "
                f"`x1` and `x2`; got outputs of shapes {shapes[0]} and {shapes[1]}."
            )
        return axes

    @property
    def rows(self) -> RowsOfSides:
        """The examples of both sides; a single object if they are the same."""
        return RowsOfSides(self.sides[0].rows, self.sides[-1].rows)

    @property
    def totals(self) -> tuple[int, int]:
        first, second = self.rows
        return first.total, second.total

    def grid(self, sizes: Sizes) -> Grid:
        """How a kernel of all pairs of examples is cut into tiles."""
        return Grid.of(self.totals, sizes, len(self.sides) == 1)

    @property
    def parts(self) -> dict[str, PyTree]:
        """As those of a kernel."""
        return {
            "inputs": (self._sides, self.shared),
            "kernel_fn": (self.model, self.request.key, self.request.metric),
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of kernels to compute."""
        return ("ntk", "error") if callable(self.get) else names_of(self.get)

    def assembled(self, by_name: dict[Name, Any]) -> Any:
        """The output, from the kernels of all outputs of the model."""
        kernels = [
            self.programs[0].output([by_name[kind, x.index] for x in self.axes])
            for kind in self.kinds
        ]
        return self.get(*kernels) if callable(self.get) else named(self.get, kernels)

    def probed(self, axes: OutputAxes) -> OutputAxes:
        """The output, with directions that traced axes are projected on, if any."""
        num, key = self.request.num_probes, self.request.key
        if num is None:
            return axes
        # Only traced axes can be projected: others have an entry of the kernel each.
        traced = [axes.shape[axis] for axis in axes.axes_with("trace")]
        if not traced and not self.request.traces_last:
            raise ValueError(
                "`trace_axes` must name the axes of the output that are projected; got "
                f"none for an output of shape {axes.shape} for one example."
            )
        if axes.averages_examples and key is not None:
            raise ValueError(
                "`trace_axes` has the axis of the examples, but standard errors of "
                "single examples do not give that of their mean. Name it in "
                "`diagonal_axes`, and average the returned `kernel`."
            )
        # Without a key, the sum of the outputs; else signs that differ between outputs.
        probes = jnp.ones((num, *traced), axes.dtype)
        if key is not None:
            key = jr.fold_in(key, axes.index)
            probes = jr.rademacher(key, probes.shape, axes.dtype)
        return dataclasses.replace(axes, probes=probes)


class StatefulModel(eqx.Module):
    """A model with state, or a random model, as a function of an example.

    - `state`: its `equinox.nn.State`, or None.
    - `index`: the index of a sample, which is folded into the keys of calls; or None.
    """

    model: Any
    state: Any
    index: Any = None

    def __call__(self, x: PyTree, **kwargs: Any) -> PyTree:
        # Models with the same key for an example differ in their dropout, too.
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


# The path of each leaf of a model, and whether it is a parameter.
ChosenLeaves = tuple[tuple[str, bool], ...]


def chosen_leaves(
    model: Any, where: Callable | None, filter_spec: PyTree
) -> ChosenLeaves:
    """The parameters of a model as a callable; those of its state do not count."""
    if isinstance(model, StatefulModel):
        of_model = where
        where = lambda both: both.model if of_model is None else of_model(both.model)
        # A callable is a valid prefix, too.
        filter_spec = StatefulModel(filter_spec, False, False)
    chosen = are_parameters(model, where, filter_spec)
    warn_of_numbers(model, where, filter_spec)
    pairs = jtu.tree_leaves_with_path(chosen)
    return tuple((jtu.keystr(path), is_chosen) for path, is_chosen in pairs)


def partitioned(model: PyTree, chosen: ChosenLeaves) -> tuple[PyTree, PyTree]:
    """The parameters of a model and the rest of it, as from `eqx.partition`.

    Raises `ValueError` for another structure, or if a parameter is no array of an
    inexact dtype any more. Shapes may differ, as within `jax.vmap`.
    """
    # As paths, the leaves are compared without the arrays of the earlier model.
    leaves, treedef = jtu.tree_flatten_with_path(model)
    paths, before = [jtu.keystr(path) for path, _ in leaves], [x for x, _ in chosen]
    wrong = sorted({*paths} ^ {*before})
    if paths == before:
        dtypes = [getattr(x, "dtype", bool) for _, x in leaves]
        triples = safe_zip(paths, dtypes, (is_one for _, is_one in chosen))
        is_inexact = lambda dtype: jnp.issubdtype(dtype, jnp.inexact)
        wrong = [path for path, x, is_one in triples if is_one and not is_inexact(x)]
    if wrong or paths != before:
        raise ValueError(
            "The model has a different structure than when the kernel was created, "
            f"or parameters of no inexact dtype: see its leaves {wrong or paths}. "
            "Create a new kernel."
        )
    return eqx.partition(model, treedef.unflatten(is_one for _, is_one in chosen))


def zero_outputs(model: TracedModel, *_: Any) -> PyTree[Array]:
    """Zeros like the model's output for all examples of the second side."""
    total = model.totals[1]
    zeros = [jnp.zeros(x.whole_shape(total), x.dtype) for x in model.axes]
    return model.programs[0].output(zeros)


def kernel_product(
    vector: PyTree, model: TracedModel, sizes: Sizes, room: int
) -> PyTree[Inexact[Array, "..."]]:
    """`J1 (J2^H vector)`, for the Jacobians of a model on its two sides.

    No axis is traced, and entries between different outputs are included. The kernel is
    not materialised.
    """
    # Tangents are as large as the parameters: there are no factors to keep.
    del room
    vectors, sizes = _checked(vector, model), model.grid(sizes).sizes
    are_complex = [axes.is_complex for axes in model.axes]
    result = _real_product(model, sizes, vectors)
    if all(are_complex):
        # The product above treats the kernel as a real-linear map of real and
        # imaginary parts.
        turned = [x * jnp.asarray(-1j, x.dtype) for x in vectors]
        pairs = safe_zip(result, _real_product(model, sizes, turned))
        result = [a + b * jnp.asarray(1j, b.dtype) for a, b in pairs]
    elif any(are_complex):
        raise ValueError(
            "The outputs must be all real or all complex; got the dtypes "
            f"{[str(axes.dtype) for axes in model.axes]}. Take them one by one."
        )
    return model.programs[0].output(result)


def _checked(vector: PyTree, model: TracedModel) -> list[Array]:
    """The arrays of the vector, with the examples along axis 0."""
    structure = jtu.tree_structure(model.out)
    remedy = "It must be like what the model returns for `x2` (`x1`, without `x2`)."
    check_equal("The structure of `v`", jtu.tree_structure(vector), structure, remedy)
    result = []
    for axes, x in safe_zip(model.axes, jtu.tree_leaves(vector)):
        expected = jax.ShapeDtypeStruct(axes.whole_shape(model.totals[1]), axes.dtype)
        check_equal("The shape and dtype of `v`", type_of(x), type_of(expected), remedy)
        # A model of a whole batch has one example.
        lead = x[None] if axes.batch is None else jnp.moveaxis(x, axes.batch, 0)
        result.append(lead)
    return vary_as([x for side in model.sides for x in side.rows.arrays], result)


def _real_product(
    model: TracedModel, sizes: tuple[int, int], vectors: list[Array]
) -> list[Array]:
    """The real-linear product with a kernel of real numbers."""
    first, second = model.rows
    rows, columns = sizes
    num = len(second.arrays)

    # `J2^H v`, summed over blocks of examples: JAX pulls back without conjugation.
    def pull(rows: Rows) -> list[Array]:
        arrays, vectors = rows.arrays[:num], rows.arrays[num:]
        values = lambda leaves: model.programs[-1].many(leaves, arrays)
        pullback = jax.vjp(values, model.leaves)[1]
        (gradients,) = pullback([jnp.conj(x) for x in vectors])
        return [jnp.conj(x) for x in gradients]

    arrays, axes = [*second.arrays, *vectors], (*second.axes, *(0 for _ in vectors))
    tangents = accumulated(pull, Rows(arrays, axes, second.total), columns, Sum())
    if model.axes[0].is_complex:
        # As in `pairings.Sites`: a complex parameter counts as two real ones.
        tangents = [x / 2 if jnp.iscomplexobj(x) else x for x in tangents]
    # `M J2^H v`, in the dtypes of the parameters.
    if model.request.metric is not None:
        products = model.request.metric.product(tangents)
        tangents = [x.astype(y.dtype) for x, y in safe_zip(products, tangents)]
    # `J1` times that: in forward mode, or as the transpose of reverse mode.
    derivative = derivative_of_program("the model", model.programs[0])
    if derivative == "rows":
        raise TypeError(
            "A product with the kernel needs the model's derivative in forward mode, "
            "but JAX has neither that nor the transpose of its backward pass. Use the "
            "kernel itself, which needs reverse mode only: call the `EmpiricalNTK` on "
            "the examples. A `jax.custom_jvp` instead of a `jax.custom_vjp` has both."
        )

    def push(rows: Rows) -> list[Array]:
        values = lambda leaves: model.programs[0].many(leaves, rows.arrays)
        return pushed(values, model.leaves, tangents, derivative)

    # Examples are along axis 0 until here.
    products = accumulated(push, first, rows, Concat())
    return [
        x[0] if axes.batch is None else jnp.moveaxis(x, 0, axes.batch)
        for axes, x in safe_zip(model.axes, products)
    ]
