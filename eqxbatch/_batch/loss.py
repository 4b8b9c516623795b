"""A function that is differentiated, with the arguments of a call."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.checks import called, unseen_arrays
from .._base.mesh import vary_as
from .._base.structs import is_struct, vary
from .._base.traced_function import TracedFunction
from .._base.trees import described, shown
from .._base.versions import varying
from .arguments import Arguments, OutputAndAux, RowArrays, ValueAndAux
from .batch import Batch, positional_names, split_batch
from .blocks import Blocks
from .memory import explained_failure, OTHER_AXIS_NAME
from .padding import Padding
from .reading import is_state


def split_examples(
    fun: Callable,
    in_axes: PyTree,
    args: Arguments,
    kwargs: dict[str, Any],
    *,
    shares_states: bool = False,
) -> Batch:
    """The arguments of a call, with `in_axes` for those after the first.

    `shares_states` is as for `split_batch`.
    """
    num = len(args) - 1
    # A dict names arguments, so that it could give an axis to the first one.
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
        # The first argument is not in the user's prefix, and is never batched.
        in_axes = (None, *in_axes)
    else:
        in_axes = (None, *[in_axes] * num)
    shares = {"shares_states": shares_states}
    batch = split_batch(fun, in_axes, args, kwargs, **shares, num_leading=1)
    # JAX sees no arrays in an instance that is no PyTree, and so nothing is batched.
    unseen = unseen_arrays(getattr(fun, "__self__", None))
    if not batch.arrays and unseen:
        raise ValueError(
            "Nothing is batched: the first argument is differentiated, and no other "
            f"has a batch axis. `fun` is a method of {unseen}"
        )
    return batch


# For a function that uses a named axis, as BatchNorm does in training mode.
_IF_NAMED = (
    "To train such layers, pass this name to `filter_micro_grad` as `axis_name`. Other "
    "derivatives for examples are not defined if `fun` couples examples: switch such "
    "layers to inference mode, in which they use their running statistics."
)


# For a function of one microbatch, which is called for one example of it.
_IF_COUPLED = "With an `axis_name`, pass the loss of one example."


class _OfExample(NamedTuple):
    """What the loss of one of several coupled examples returns, by how it is mapped."""

    value: Any
    state: PyTree
    aux: PyTree


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

    def __call__(self, diff: PyTree, rows: RowArrays) -> ValueAndAux:
        """Value and aux for one example, or for a microbatch."""
        value, aux = self.outputs(diff, rows)
        return check_value(value, self.holomorphic), aux

    def outputs(self, diff: PyTree, rows: RowArrays) -> OutputAndAux:
        """The output of the function, of any type, and aux."""
        (_, *following), kwargs = self.batch.arguments(rows)
        # `batch` has the first argument as it was; here, `diff` may be another point.
        first = eqx.combine(diff, self.nondiff)
        fun, setting, pair = self.names
        out = called(self.fun, (first, *following), kwargs, f"`{fun}`")
        is_pair = isinstance(out, tuple) and len(out) == 2
        if not self.has_aux:
            # The new state of layers such as BatchNorm needs no `has_aux`.
            has_state = self.axis_name is not None and is_pair and is_state(out[1])
            return out if has_state else (out, None)
        if not is_pair:
            raise ValueError(
                f"With `{setting}=True`, `{fun}` must return a pair `{pair}`; got "
                f"{described(out)}."
            )
        return out

    def together(self, diff: PyTree, rows: RowArrays) -> ValueAndAux:
        """Values and aux of the examples of a microbatch, along axis 0.

        An `equinox.nn.State` in aux is that of the microbatch.
        """
        call = functools.partial(self, diff)
        other_name = OTHER_AXIS_NAME.format(self.axis_name)

        # An error says whether the function wants another axis name than it gets here.
        def one(rows: RowArrays) -> _OfExample:
            with explained_failure(
                call, self.batch, "example", _IF_COUPLED, None, other_name
            ):
                value, aux = call(rows)
            return _OfExample(value, *eqx.partition(aux, is_state, is_leaf=is_state))

        # Coupled examples have one state, and each has its value and the rest of aux.
        in_axes, out_axes = ([*self.batch.axes],), _OfExample(0, None, eqx.if_array(0))
        axes = {"in_axes": in_axes, "out_axes": out_axes, "axis_name": self.axis_name}
        mapped = eqx.filter_vmap(one, **axes)
        try:
            # JAX finds out whether the state is the same for all of them.
            values, states, aux = mapped(rows)
        except ValueError as e:
            if "out_axes is None" in str(e):
                e.add_note(
                    "The `equinox.nn.State` that `fun` returns differs between "
                    "examples. Update it by means over them, as with `jax.lax.pmean`, "
                    "or return the part of each example as aux, outside of the state."
                )
            raise
        return values, eqx.combine(states, aux, is_leaf=is_state)

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
            # Without a batch, the function may be one of a single example.
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
            of_one = dataclasses.replace(self, batch=batch)
            run = of_one if is_value else of_one.outputs
            # Whatever it raises, it is no function of one example.
            TracedFunction(run, self.diff, batch.arrays, batch.axes)
        except Exception:
            return False
        return True


def check_value(value: PyTree, holomorphic: bool = False, what: str = "fun") -> Array:
    kind = jnp.complexfloating if holomorphic else jnp.floating
    # Python's and NumPy's floats are values, too.
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
