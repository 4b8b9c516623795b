"""The settings of transforms that differentiate a function of parameters."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree, Real

from .._base.checks import called, check_types, no_arrays_remedy, warn_user
from .._base.dtypes import weighted_totals, widened
from .._base.jaxprs import array_structs, is_struct, vary, varying
from .._base.mesh import vary_as
from .._base.platforms import num_bytes, platform
from .._base.traced_function import TracedFunction
from .._base.trees import described, difference, safe_zip, shown
from .accumulators import check_adds, Concat, Mean, OfTotals, rows_and_weights, Sum
from .batch import (
    Batch,
    Blocks,
    explained_failure,
    is_state,
    positional_names,
    split_batch,
    unbatched,
)
from .loop import accumulated, as_slots, Rows, run_blocks, Slots, types_of
from .padding import Padding, unless_padding
from .transform import AbstractMicrobatched, AbstractSharded, AbstractTransform, Model


def are_parameters(
    model: PyTree, where: Callable | None, filter_spec: PyTree, name: str = "`model`"
) -> PyTree[bool]:
    """Whether each leaf of a model is one of its parameters, as a PyTree like it."""
    leaves, treedef = jtu.tree_flatten(model)
    if not any(map(eqx.is_inexact_array, leaves)):
        raise ValueError(
            f"{name} has no arrays of an inexact dtype, so that there is nothing "
            f"to differentiate; got {shown(model)}.{no_arrays_remedy(model)}"
        )
    selected = jtu.tree_leaves(eqx.filter(model, filter_spec, replace=_OTHER))
    numbers = range(len(leaves)) if where is None else _numbers(model, where)
    chosen = [
        x is not _OTHER and i in numbers and eqx.is_inexact_array(leaf)
        for i, (x, leaf) in enumerate(safe_zip(selected, leaves))
    ]
    if not any(chosen):
        raise ValueError(
            "`where` and `filter_spec` leave no parameters: no array of an inexact "
            "dtype is selected. Select the arrays that the derivative is to be "
            "with respect to."
        )
    return jtu.tree_unflatten(treedef, chosen)


_OTHER = object()


def warn_of_numbers(
    model: PyTree, where: Callable | None, filter_spec: PyTree, name: str = "`model`"
) -> None:
    """Warns of Python numbers in the place of parameters.

    Matrices lack their rows and columns, which looks like fewer parameters. Numbers in
    a module are its settings, and those in a partial function are its arguments.
    """
    leaves, _ = jtu.tree_flatten_with_path(model)
    holds = lambda x: isinstance(x, (eqx.Module, functools.partial))
    paths = {path for path, _ in jtu.tree_leaves_with_path(model, is_leaf=holds)}
    suspects = [
        i
        for i, (path, x) in enumerate(leaves)
        if path in paths
        and isinstance(x, (float, complex))
        and not eqx.is_inexact_array(x)
    ]
    if not suspects:
        return
    selected = jtu.tree_leaves(eqx.filter(model, filter_spec, replace=_OTHER))
    picked = range(len(leaves)) if where is None else _numbers(model, where)
    # The default does not say that a number is left out on purpose.
    is_default = filter_spec is eqx.is_inexact_array
    missing = [
        f"{leaves[i][1]!r} at {jtu.keystr(leaves[i][0])}"
        for i in suspects
        if i in picked and (is_default or selected[i] is not _OTHER)
    ]
    if missing:
        warn_user(
            f"{name} has Python numbers: {', '.join(missing)}. They are constants, as "
            "in Equinox, and have no rows or columns in the result. Make arrays of "
            "them, with `jax.numpy.asarray`. Or leave them out on purpose, by `where` "
            "or by a `filter_spec` with False there."
        )


class _Number:
    """Stands for a leaf of a model while `where` picks parts of it."""

    def __init__(self, number: int):
        self.number = number

    def __getitem__(self, index: Any) -> Any:
        raise _not_a_part("it takes a part of one")


def _numbers(model: PyTree, where: Callable) -> set[int]:
    """The indices of the leaves that `where` picks."""
    leaves, treedef = jtu.tree_flatten(model)
    marked = jtu.tree_unflatten(treedef, [_Number(i) for i, _ in enumerate(leaves)])
    try:
        picked = jtu.tree_leaves(where(marked))
    except AttributeError as e:
        if not isinstance(e.obj, _Number):
            raise
        raise _not_a_part(f"it uses `.{e.name}` of one") from e
    for x in picked:
        if not isinstance(x, _Number):
            raise _not_a_part(f"got {described(x)}")
    return {x.number for x in picked}


def _not_a_part(what: str) -> ValueError:
    return ValueError(
        "`where` must return parts of the model, whose arrays it must not look at; "
        f"{what}. Select by dtype or shape with `filter_spec`."
    )


def parameters(
    model: Model,
    *,
    where: Callable | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
) -> Model:
    """The parameters that a transform with these settings differentiates.

    Pass them to the `init` of an optimiser, so that its state has the structure of the
    gradients. `equinox.combine` with the model puts them back.

    **Arguments:**

    - `model`: any PyTree, such as an `equinox.Module`.
    - `where`, `filter_spec`: which arrays are parameters, as for
        [`eqxbatch.filter_micro_value_and_grad`][].

    **Returns:**

    The model with `None` for each leaf that is no parameter, as from `equinox.filter`.

    **Raises:**

    - `ValueError` if no array of an inexact dtype is selected, or if `where` returns
        anything but parts of the model.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax
        >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
        >>> last = eqxbatch.parameters(model, where=lambda model: model.layers[-1])
        >>> [x.shape for x in jax.tree.leaves(last)]
        [(3, 8), (3,)]

        ```
    """
    check_types({"where": where}, {"where": Callable | None}, always=True)
    return eqx.filter(model, are_parameters(model, where, filter_spec))


def split_examples(
    fun: Callable,
    in_axes: PyTree,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    shares_states: bool = False,
) -> Batch:
    """The arguments of a call, with `in_axes` for those after the first.

    `shares_states` is as for `split_batch`.
    """
    num = len(args) - 1
    if isinstance(in_axes, dict):
        (first,) = positional_names(fun, 1)
        if in_axes.get(first) is not None:
            raise ValueError(
                f"`in_axes` gives `{first}` the batch axis {shown(in_axes[first])}, "
                "but the first argument is the one that is differentiated, and is the "
                "same for all examples. Leave it out."
            )
        in_axes = {**in_axes, first: None}
    elif isinstance(in_axes, (tuple, list)):
        if len(in_axes) != num:
            raise ValueError(
                "`in_axes` is for the arguments after the first, which is never "
                f"batched: it must have {num} entries for {len(args)} positional "
                f"arguments; got {shown(in_axes)}."
            )
        in_axes = (None, *in_axes)
    else:
        in_axes = (None, *[in_axes] * num)
    return split_batch(fun, in_axes, args, kwargs, shares_states=shares_states)


def _check_complex(diff: PyTree, holomorphic: bool | None) -> None:
    """Raises `TypeError` if `holomorphic` does not fit the parameters."""
    leaves = jtu.tree_leaves(diff)
    are_complex = [jnp.iscomplexobj(x) for x in leaves]
    dtypes = [str(x.dtype) for x in leaves]
    if holomorphic and not all(are_complex):
        raise TypeError(
            "With `holomorphic=True`, all arrays that are differentiated must be "
            f"complex; got {dtypes}."
        )
    if any(are_complex) and not holomorphic:
        or_else = "; or, if `fun` is holomorphic, pass `holomorphic=True`"
        raise TypeError(
            "Complex arrays are only differentiated through their real and imaginary "
            f"parts; got {dtypes}. Give these as two real arrays and combine "
            f"them inside `fun`{or_else if holomorphic is False else ''}."
        )


_IF_NAMED = (
    "Derivatives for examples are not defined if `fun` couples examples: switch such "
    "layers to inference mode. Or, for a gradient of which nothing per-example is "
    "needed, pass this name to `filter_micro_grad` as `axis_name`."
)


_IF_COUPLED = "With an `axis_name`, pass the loss of one example."


class Loss(eqx.Module):
    """A function whose first argument is differentiated, and a call of it.

    `diff` and `nondiff` are the two parts of that argument, and `batch` splits all
    arguments. With `holomorphic`, values are complex. `blocks` says how the batch is
    cut into microbatches; it is None for a single call. `padding` replaces rows of
    weight 0, if there are weights. With an `axis_name`, the function couples the
    examples of a microbatch, and may return `(value, state)`.
    `names` are those of the function, of `has_aux` and of its pair in messages.
    """

    fun: Callable
    batch: Batch
    diff: PyTree
    nondiff: PyTree
    has_aux: bool
    holomorphic: bool = False
    blocks: Blocks | None = None
    padding: Padding | None = None
    axis_name: Hashable | None = None
    names: tuple[str, str, str] = ("fun", "has_aux", "(value, aux)")

    @property
    def parameters(self) -> PyTree:
        """The differentiated part, varying over devices as the examples do.

        Inside `jax.shard_map`, JAX sums a derivative over devices if the parameters do
        not vary over them. Making them vary delays this sum, so that it happens once
        instead of for each example.
        """
        return vary_as(self.batch.arrays, self.diff)

    def varying_over(self, names: frozenset) -> "Loss":
        """The same call, with parameters that vary over these axes, too."""
        diff = jtu.tree_map(lambda x: vary(x, names), self.diff)
        return dataclasses.replace(self, diff=diff)

    def __call__(self, diff: PyTree, rows: list) -> tuple[Array, PyTree]:
        """Value and aux for one example, or for a microbatch."""
        value, aux = self.outputs(diff, rows)
        return check_value(value, self.holomorphic), aux

    def outputs(self, diff: PyTree, rows: list) -> tuple[PyTree, PyTree]:
        """The output of the function, of any type, and aux."""
        (_, *rest), kwargs = self.batch.arguments(rows)
        first = eqx.combine(diff, self.nondiff)
        fun, setting, pair = self.names
        out = called(self.fun, (first, *rest), kwargs, f"`{fun}`")
        is_pair = isinstance(out, tuple) and len(out) == 2
        if not self.has_aux:
            has_state = self.axis_name is not None and is_pair and is_state(out[1])
            return out if has_state else (out, None)
        if not is_pair:
            raise ValueError(
                f"With `{setting}=True`, `{fun}` must return a pair `{pair}`; got "
                f"{described(out)}."
            )
        return out

    def together(self, diff: PyTree, rows: list) -> tuple[Real[Array, " n"], PyTree]:
        """Values and aux of the examples of a microbatch, along axis 0.

        An `equinox.nn.State` in aux is that of the microbatch.
        """
        call = functools.partial(self, diff)

        def one(rows: list) -> tuple[Array, PyTree, PyTree]:
            with explained_failure(call, self.batch, "example", _IF_COUPLED):
                value, aux = call(rows)
            return value, *eqx.partition(aux, is_state, is_leaf=is_state)

        in_axes, out_axes = ([*self.batch.axes],), (0, None, eqx.if_array(0))
        axes = {"in_axes": in_axes, "out_axes": out_axes, "axis_name": self.axis_name}
        mapped = eqx.filter_vmap(one, **axes)
        try:
            values, states, others = mapped(rows)
        except ValueError as e:
            if "out_axes is None" in str(e):
                e.add_note(
                    "The `equinox.nn.State` that `fun` returns differs between "
                    "examples. Update it by means over them, as with `jax.lax.pmean`, "
                    "or return the part of each example as aux, outside of the state."
                )
            raise
        return values, eqx.combine(states, others, is_leaf=is_state)

    def traced(
        self,
        if_whole: str | None,
        fun: Callable[[PyTree, list], PyTree] | None = None,
        if_one: str = "For the mean over the examples, pass `in_axes=0`.",
    ) -> TracedFunction:
        """Value and aux of one example; or what `fun` returns, as this is called.

        `if_whole` is the remedy if it turns out to be a function of a whole batch, and
        `if_one` if there is no batch, but it is a function of one example.
        """
        run, diff, batch = fun or self, self.parameters, self.batch
        try:
            whole = functools.partial(run, diff)
            with explained_failure(whole, batch, "example", if_whole, None, _IF_NAMED):
                return TracedFunction(run, diff, batch.arrays, batch.axes)
        except Exception as e:
            if not batch.arrays and self._is_of_one(is_value=fun is None):
                e.add_note(
                    "`fun` is called once with all arguments, as `in_axes` is None, "
                    "and raises this error. It works for one example at a time, along "
                    f"axis 0 of all arrays. {if_one}"
                )
            raise

    def traced_on_device(self, num_outputs: int | None, *args: Any) -> TracedFunction:
        """Like `traced`, with parameters that vary over devices as outputs do.

        The first `num_outputs` count, or all of them. If there is no batch, they say
        over which devices the derivatives differ, before these are summed.
        """
        program = self.traced(*args)
        outs = program.closed.out_avals[:num_outputs]
        names = frozenset().union(*map(varying, outs))
        if all(names <= varying(jax.typeof(x)) for x in program.leaves):
            return program
        return self.varying_over(names).traced(*args)

    def _is_of_one(self, *, is_value: bool) -> bool:
        """Whether the function works for one example, along axis 0 of all arrays."""
        try:
            args, kwargs = self.batch.arguments([])
            batch = split_examples(self.fun, eqx.if_array(0), args, kwargs)
            one = dataclasses.replace(self, batch=batch)
            run = one if is_value else one.outputs
            TracedFunction(run, self.diff, batch.arrays, batch.axes)
        except Exception:
            return False
        return True


def check_value(value: Any, holomorphic: bool = False, what: str = "fun") -> Array:
    kind = jnp.complexfloating if holomorphic else jnp.floating
    if eqx.is_array_like(value):
        value = jnp.asarray(value)
        if value.shape == () and jnp.issubdtype(value.dtype, kind):
            return value
    if holomorphic:
        raise ValueError(
            "With `holomorphic=True`, the value must be a complex scalar; "
            f"`{what}` returned {described(value)}."
        )
    # The loss of an output has no `has_aux`.
    more = ", or use `has_aux=True` to return more than the value"
    more = "" if what == "loss" else more
    raise ValueError(
        "The value that is differentiated must be a real floating-point scalar; "
        f"`{what}` returned {described(value)}. Take the sum, the mean or the real "
        f"part of it{more}."
    )


def check_outputs(
    out: PyTree, name: str = "`fun`", what: str = "what is to be differentiated"
) -> list:
    """The arrays or structs of an output.

    Raises `ValueError` for anything else in it.
    """
    leaves = jtu.tree_leaves_with_path(out)
    for path, x in leaves:
        is_array = is_struct(x) or eqx.is_array(x)
        if not is_array or not jnp.issubdtype(x.dtype, jnp.inexact):
            got = f"dtype {x.dtype}" if is_array else described(x)
            raise ValueError(
                f"{name} must return arrays of an inexact dtype; got {got} for "
                f"output{jtu.keystr(path)}. Return only {what}."
            )
    if not leaves:
        raise ValueError(f"{name} must return at least one array; got none.")
    return [x for _, x in leaves]


def like_parameters(what: str, vector: PyTree, diff: PyTree) -> list[Array]:
    """The arrays of a vector, which must match the differentiated leaves.

    Python numbers are accepted as scalar arrays.
    """

    def as_array(x: Any, like: Any) -> Any:
        is_number = isinstance(x, (float, complex)) and getattr(like, "shape", 1) == ()
        return jnp.asarray(x, like.dtype) if is_number else x

    if jtu.tree_structure(vector) == jtu.tree_structure(diff):
        vector = jtu.tree_map(as_array, vector, diff)
    arrays = eqx.filter(vector, eqx.is_inexact_array)
    if types_of(arrays) != types_of(diff):
        raise ValueError(
            f"{what} must have the structure, shapes and dtypes of what is "
            f"differentiated, {shown(diff)}; got {shown(vector)}. "
            f"{difference(diff, arrays)}"
        )
    return jtu.tree_leaves(arrays)


class AbstractDerivative(AbstractTransform):
    """A derivative with respect to parameters in the first argument.

    - `where`, `filter_spec`: which leaves of the first argument are parameters.
    - `in_axes`: the batch axes of all other arguments; None if there is no batch.
    - `has_aux`: whether the function returns `(value, aux)`.
    - `holomorphic`: whether it is a holomorphic function of complex arrays; None if the
        transform has no such setting.
    - `allows_complex`: whether complex parameters need no `holomorphic`.
    - `has_gaps`: whether the result has a visible None for leaves that are no arrays.
    """

    allows_complex: ClassVar[bool] = False

    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any] | None = None
    filter_spec: PyTree = eqx.is_inexact_array

    @property
    def has_gaps(self) -> bool:
        return False

    # Not `equinox.AbstractVar`s, which type checkers take for settings.
    @property
    @abc.abstractmethod
    def in_axes(self) -> PyTree: ...

    @property
    @abc.abstractmethod
    def has_aux(self) -> bool: ...

    @property
    @abc.abstractmethod
    def holomorphic(self) -> bool | None: ...

    @property
    def coupling_axis(self) -> Hashable | None:
        """The name of an axis that couples the examples of a microbatch, if any."""
        return None

    def batch(self, args: tuple, kwargs: dict[str, Any]) -> Batch:
        """The arguments of a call; the first one is not batched."""
        if self.in_axes is None:
            return unbatched(args, kwargs)
        fun, shares = self.__wrapped__, self.coupling_axis is not None
        return split_examples(fun, self.in_axes, args, kwargs, shares_states=shares)

    def parameters(self, args: tuple, kwargs: dict[str, Any]) -> tuple[PyTree, PyTree]:
        """The differentiated part of the first argument, and the rest of it.

        Raises `TypeError` for dtypes that do not fit `holomorphic`. Warns of Python
        numbers that a matrix leaves out.
        """
        if not args:
            raise ValueError(
                "The argument that is differentiated comes first, by position; got "
                f"only keyword arguments, {tuple(kwargs)}."
            )
        first = args[0]
        if isinstance(first, (float, complex)):
            first = jnp.asarray(first)  # A number counts as a scalar array.
        name = "The first argument, which the derivative is with respect to,"
        chosen = are_parameters(first, self.where, self.filter_spec, name)
        # What a result shows as None is only worth a word if it was asked for.
        is_default = self.where is None and self.filter_spec is eqx.is_inexact_array
        if not (self.has_gaps and is_default):
            warn_of_numbers(first, self.where, self.filter_spec, name)
        diff, nondiff = eqx.partition(first, chosen)
        if not self.allows_complex:
            _check_complex(diff, self.holomorphic)
        return diff, nondiff

    def loss_of(self, args: tuple, kwargs: dict[str, Any]) -> Loss:
        """The function and its arguments in a call of the transformed function."""
        if self.second_argument is not None:
            args = (*args[:1], *args[2:])
        diff, nondiff = self.parameters(args, kwargs)
        batch, holomorphic = self.batch(args, kwargs), bool(self.holomorphic)
        fun, settings = self.__wrapped__, (self.has_aux, holomorphic)
        return Loss(fun, batch, diff, nondiff, *settings, axis_name=self.coupling_axis)


def check_has_batch(in_axes: PyTree, settings: dict[str, Any]) -> None:
    """Raises for settings of a batch where there is none."""
    for name, value in settings.items():
        if in_axes is None and value is not None:
            raise ValueError(
                f"`{name}` is for a batch of examples, but `in_axes` is None: `fun` is "
                "one function of all its arguments. Pass the batch axes of the "
                "arguments after the first, as in `in_axes=0`, or leave it out."
            )


class AbstractOverExamples(AbstractDerivative, AbstractMicrobatched, AbstractSharded):
    """A derivative whose result is a sum or mean over examples.

    With `in_axes=None` there is no batch: the function is called once with all
    arguments.
    """

    _: dataclasses.KW_ONLY
    accumulator: Sum | Mean = Mean()

    @property
    def overlaps(self) -> bool:
        return True

    def __check_init__(self) -> None:
        check_adds(self.accumulator)
        name = f"accumulator={type(self.accumulator).__name__}(weights=...)"
        of_batch = {
            "microbatch_size": self.microbatch_size,
            name: self.accumulator.weights,
        }
        check_has_batch(self.in_axes, of_batch)

    def in_microbatches(self, args: tuple, kwargs: dict[str, Any]) -> Loss:
        """Like `loss_of`, with the batch cut into microbatches."""
        loss = self.loss_of(args, kwargs)
        if self.in_axes is None:
            return loss
        blocks = self.blocks(loss.batch, args, kwargs, loss.batch.total())
        return dataclasses.replace(loss, blocks=blocks)

    def total(
        self,
        loss: Loss,
        program: TracedFunction,
        sums: Callable[[list, Real[Array, " n"] | None], list],
        per_example: Callable[[list], PyTree],
    ) -> tuple[list, PyTree]:
        """Accumulates results over all microbatches.

        `sums(rows, weights)` returns (weighted) sums over a microbatch, and
        `per_example(rows)` results along axis 0. The results are in at least float32.
        The `program` is that of one example, and examples of weight 0 have no influence
        on sums.
        """
        blocks, accumulator = loss.blocks, self.accumulator
        if blocks is None:
            return sums([], None), per_example([])
        if not program.backward.is_linear:
            sums = weighted_after(sums, loss.batch.axes)
        arrays, axes, split = rows_and_weights(accumulator, loss.batch, blocks)
        padding = Padding.of(loss.batch.arrays, loss.batch.axes, accumulator.weights)

        def run(
            rows: list, size: int, of_rows: Array | None
        ) -> tuple[tuple[list, PyTree], None]:
            batch, weights_of_rows = split(rows, of_rows)
            counting = batch
            if padding is not None:
                counting = padding.replaced(batch, weights_of_rows)

            def shares(weights: Array | None, share: float) -> list:
                if share != 1:
                    ones = jnp.ones(size) if weights is None else weights
                    weights = ones * share
                return sums(counting, weights)

            totals = weighted_totals(shares, size, weights_of_rows, program.is_narrow)
            if padding is not None and weights_of_rows is not None:
                totals = unless_padding(totals, weights_of_rows)
            return (totals, per_example(batch)), None

        def slots(output: tuple, _: Any) -> Slots:
            of_examples = Concat() if array_structs(output[1]) else None
            return as_slots((OfTotals(accumulator), of_examples), output)

        return run_blocks(run, arrays, axes, blocks, slots)


# Sums over the rows of a microbatch, with weights or without.
_Sums = Callable[[list, Real[Array, " n"] | None], list]


def weighted_after(sums: _Sums, axes: Sequence[int]) -> _Sums:
    """Weighted sums of the results for each example.

    They are right if the results are not linear in a weight that comes before a
    backward pass.
    """

    def of_one(rows: list) -> list:
        return sums([jnp.expand_dims(x, a) for x, a in safe_zip(rows, axes)], None)

    def of_each(rows: list, _: int) -> list:
        *rows, weights = rows
        results = jax.vmap(of_one, ([*axes],))(rows)
        whole = jax.lax.Precision.HIGHEST
        return [
            jnp.tensordot(weights.astype(x.dtype), x, 1, precision=whole)
            for x in map(widened, results)
        ]

    def weighted(rows: list, weights: Real[Array, " n"] | None) -> list:
        total = rows[0].shape[axes[0]]
        weights = jnp.ones(total) if weights is None else weights
        both = Rows([*rows, weights], (*axes, 0), total)
        one = jax.eval_shape(lambda: of_each(both.at(0, 1).arrays, 1))
        # As many results at a time as factors of sites would be kept.
        size = platform().factor_bytes // max(num_bytes(one), 1)
        return accumulated(of_each, both, max(1, size), Sum())

    return weighted
