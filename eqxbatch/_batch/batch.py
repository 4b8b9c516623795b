"""Which axis of which argument is the batch.

Batch axes are given as for `eqx.filter_vmap`.
"""

import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._base.checks import (
    called,
    has_numbers,
    is_one_key,
    key_remedy,
    match_prefix,
    NUMBERS,
    unseen_arrays,
)
from .._base.mesh import (
    examples_spec,
    spec_of,
    whole_rows,
)
from .._base.refs import is_ref
from .._base.trees import (
    described,
    safe_zip,
    with_shapes_of_arrays,
)
from .arguments import Arguments, CallArguments, KeyPath, Leaves, RowArrays
from .blocks import Blocks
from .reading import is_state
from .rows import Rows


def broadcast_axes(
    name: str, spec: PyTree, tree: PyTree, *, shares_states: bool = False
) -> list[int | None]:
    """Resolves a prefix of `int | None | callable` to one axis for each leaf.

    Returns the axes in the order of `jax.tree_util.tree_leaves(tree)`. With
    `shares_states`, callables do not apply to an `equinox.nn.State`, which has none.
    """
    places = match_prefix(name, spec, tree, "a PyTree prefix of what it describes")

    def axis_of(axis: PyTree, part: PyTree, leaf: PyTree) -> Any:
        if not callable(axis):
            return axis
        if shares_states and is_state(part):
            return None
        # Equinox takes no `Ref` for an array, and would share its rows.
        return axis(leaf[...] if is_ref(leaf) else leaf)

    return [
        _resolve_axis(name, axis_of(axis, part, leaf))
        for _, axis, subtree in places
        for part in jtu.tree_leaves(subtree, is_leaf=is_state)
        for leaf in jtu.tree_leaves(part)
    ]


def _resolve_axis(name: str, axis: object) -> int | None:
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return axis
    raise ValueError(
        f"`{name}` must consist of ints, None, and callables that return those; got "
        f"{described(axis)}. Give the number of the batch axis, "
        "or None for what is not batched."
    )


def positional_names(fun: Callable, num: int) -> list[str]:
    """The names of the first `num` positional arguments of a function."""
    names = []
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        parameters = ()
    # Arguments without a name of their own are entries of `*args`, whatever its name.
    variadic = "args"
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            variadic = parameter.name
        elif parameter.kind in _POSITIONAL:
            names.append(parameter.name)
    names += [f"{variadic}[{i}]" for i in range(num - len(names))]
    return names[:num]


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


# The axes of positional arguments, and of keyword arguments.
_CallAxes = tuple[PyTree, dict[str, PyTree]]


def split_axes(
    fun: Callable,
    in_axes: PyTree,
    args: Arguments,
    kwargs: dict[str, Any],
    default: PyTree,
) -> _CallAxes:
    """Splits `in_axes` into the axes of `args` and those of `kwargs`.

    `in_axes` is a prefix of `args`, or a dict by argument name. Arguments that it does
    not name, including keyword arguments, get the `default`.
    """
    if not isinstance(in_axes, dict):
        return in_axes, dict.fromkeys(kwargs, default)
    in_axes = dict(in_axes)
    names = positional_names(fun, len(args))
    args_spec = [in_axes.pop(name, default) for name in names]
    kwargs_spec = {name: in_axes.pop(name, default) for name in kwargs}
    # A name that is left is misspelt, and its argument would get the default instead.
    if in_axes:
        raise ValueError(
            f"The following `in_axes` did not correspond to any argument: "
            f"{tuple(in_axes)}. The arguments passed are {(*names, *kwargs)}."
        )
    return tuple(args_spec), kwargs_spec


class Batch(eqx.Module):
    """The arguments of a call, split into batched leaves and everything else.

    `arrays` and `axes` (non-negative) list the batched leaves in the same order;
    `names` says where each of them came from, for error messages. `shared` has all
    other leaves, and a mark in place of each batched one.
    """

    arrays: list
    axes: tuple[int, ...] = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    shared: list
    treedef: Any = eqx.field(static=True)

    def arguments(self, arrays: RowArrays) -> CallArguments:
        """`(args, kwargs)` of the call, with `arrays` as the batched leaves."""
        # `shared` has a mark for each batched leaf, in the order of `arrays`. Sparse
        # arrays among the arguments still say the shape that the whole batch has.
        arrays = list(arrays)
        leaves = [arrays.pop(0) if x is _Batched else x for x in self.shared]
        return with_shapes_of_arrays(jtu.tree_unflatten(self.treedef, leaves))

    def call(self, fun: Callable, arrays: RowArrays) -> PyTree:
        """Calls `fun` with `arrays` as the batched leaves."""
        args, kwargs = self.arguments(arrays)
        return called(fun, args, kwargs)

    def on_devices_of(self, blocks: "Blocks") -> "Batch":
        """The batch, of which each device has all rows if there is one part."""
        # The devices cannot share a microbatch of coupled examples equally: each has
        # all of it.
        if not (blocks.in_order and blocks.parts == 1 < blocks.num):
            return self
        arrays = [whole_rows(x, axis) for x, axis in safe_zip(self.arrays, self.axes)]
        return dataclasses.replace(self, arrays=arrays)

    def example(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the batched leaves of one example."""
        return [
            jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
            for x, axis in safe_zip(self.arrays, self.axes)
        ]

    def rows(self, axis_size: int | None = None) -> Rows:
        """The rows of all examples, of which there are `total(axis_size)`."""
        return Rows(self.arrays, self.axes, self.total(axis_size))

    def total(self, axis_size: int | None = None) -> int:
        """The number of examples; all batched arrays must agree on it."""
        sizes = [x.shape[a] for x, a in safe_zip(self.arrays, self.axes)]
        # Without arrays, only `axis_size` says how many examples there are.
        if axis_size is None and not sizes:
            raise ValueError(
                "Nothing is batched: `in_axes` gives no array a batch axis, so the "
                "number of examples is not known. Mark an array argument as batched "
                "in `in_axes`; or pass `axis_size`, or `in_axes=None` for one call "
                "with all arguments, where the transform has it."
                f"{_not_arrays(self.shared)}"
            )
        # One size must remain: that of all arrays, and of `axis_size` if it is given.
        totals = {*sizes} if axis_size is None else {*sizes, axis_size}
        if len(totals) > 1:
            listing = [
                f"{name} has {size} (axis {axis} of shape {x.shape})"
                for name, size, axis, x in safe_zip(
                    self.names, sizes, self.axes, self.arrays
                )
            ]
            if axis_size is not None:
                listing.append(f"`axis_size` is {axis_size}")
            remedy = "Fix the shapes, or use `in_axes` to name another axis or None."
            # A model is most often meant to be shared.
            first = self.names[0].strip("`").partition(".")[0]
            num = sum(name.startswith(f"`{first}.") for name in self.names)
            if 1 < num < len(self.names):
                remedy += (
                    f" If all examples share `{first}`, as they do a model, its axis "
                    "is None: of two arguments, `in_axes=(None, 0)`."
                )
            # One key in place of one for each example has a remedy of its own.
            for name, x in safe_zip(self.names, self.arrays):
                if is_one_key(x):
                    num = max(totals) if len(totals) == 2 else None
                    remedy = key_remedy(name, num)
            raise ValueError(
                "Batched arguments must agree on the number of examples, but "
                f"{'; '.join(listing)}. {remedy}"
            )
        return totals.pop()


def _not_arrays(leaves: Leaves) -> str:
    """The remedy for arguments that are mistaken for arrays, if there are any."""
    for x in leaves:
        # A class has the `__iter__` of its instances, but cannot be iterated over.
        if eqx.is_array(x) or isinstance(x, type):
            continue
        if unseen_arrays(x):
            return f" One argument is {unseen_arrays(x)}"
        if hasattr(x, "__iter__") and not isinstance(x, (str, bytes)):
            return (
                f" One argument is {described(x)}, which is iterable: transforms take "
                "its batches by `eqxbatch.over_batches`, and kernels need arrays."
            )
    return ""


class _Batched:
    """Marks the place of a batched leaf."""


# The arrays that all batches share, in a call whose batch is one of several.
BEFORE_BATCHES: contextvars.ContextVar[Sequence] = contextvars.ContextVar(
    "before_batches", default=()
)


def split_batch(
    fun: Callable,
    in_axes: PyTree,
    args: Arguments,
    kwargs: dict[str, Any],
    *,
    shares_states: bool = False,
    num_leading: int | None = 0,
) -> Batch:
    """Resolves `in_axes` against a call of `fun` as `eqx.filter_vmap` does.

    Unlike `eqx.filter_vmap`, keyword arguments are supported: an `in_axes` dict may
    name them, and all others use `eqx.if_array(0)`. `shares_states` is as for
    `broadcast_axes`. For messages, `num_leading` is the number of arguments before
    those that the user's `in_axes` describes; None if these are not arguments.

    Raises `ValueError` if `in_axes` does not fit the arguments, if an axis is out of
    range, or if something that is not an array gets a batch axis.
    """
    default = eqx.if_array(0)
    args_spec, kwargs_spec = split_axes(fun, in_axes, args, kwargs, default)
    states = {"shares_states": shares_states}
    # One axis for each leaf of `(args, kwargs)`, in the order in which JAX has them.
    axes = broadcast_axes("in_axes", args_spec, args, **states)
    axes += broadcast_axes("in_axes", kwargs_spec, kwargs, **states)
    paths, treedef = jtu.tree_flatten_with_path((args, kwargs))
    parameters = positional_names(fun, len(args))
    # By default, the numbers of a list would be shared without a word.
    _check_lists(args_spec, args, parameters)
    _check_lists(kwargs_spec, kwargs, [*kwargs])

    # A state gets another remedy: most want it shared, with an `axis_name`.
    parts = jtu.tree_leaves((args, kwargs), is_leaf=is_state)
    in_states = [is_state(part) for part in parts for _ in jtu.tree_leaves(part)]
    # What is not batched stays in place, so that a call is put together without axes.
    arrays, batch_axes, names, shared = [], [], [], []
    in_batched_states = []
    for (path, leaf), axis, in_state in safe_zip(paths, axes, in_states):
        if axis is None:
            shared.append(leaf)
            continue
        shared.append(_Batched)
        name = leaf_name(path, parameters)
        # `filter_micro_vmap` passes the value of a `Ref`; others do not map it.
        if is_ref(leaf):
            raise ValueError(no_ref(name))
        if not eqx.is_array(leaf):
            raise ValueError(
                f"`in_axes` gives {name} the batch axis {axis}, but it is a "
                f"{type(leaf).__name__}, not an array. Make an array of it with "
                f"`jax.numpy.asarray`, or use `eqx.if_array({axis})` to batch just the "
                "arrays of an argument, or None."
            )
        # An axis that is not there has several causes, each with a remedy of its own.
        if not -leaf.ndim <= axis < leaf.ndim:
            remedy = (
                f"Name one of its {leaf.ndim} axes, or None for an argument that is "
                "not batched."
            )
            if in_state:
                remedy = _STATE_REMEDY
            elif is_one_key(leaf):
                remedy = key_remedy(name, None)
            elif leaf.ndim == 0:
                remedy = _scalar_remedy(path, args, axes, num_leading)
            raise ValueError(
                f"`in_axes` gives {name} the batch axis {axis}, which is out of range "
                f"for its shape {leaf.shape}. {remedy}"
            )
        # All batches share this array: its rows would meet those of each of them.
        if any(leaf is x for x in BEFORE_BATCHES.get()):
            raise ValueError(
                f"{name}, before the batches, has the batch axis {axis}. Batches are "
                "one argument, the last: if it has examples, give `(x, y)` in place of "
                "`x, y`; if all examples share it, give it None in `in_axes`."
            )
        arrays.append(leaf)
        batch_axes.append(axis % leaf.ndim)
        names.append(name)
        if in_state:
            in_batched_states.append(name)
    # The sizes of a state's axes are those of channels, which tells that it is mapped
    # by mistake, unless they agree with the number of examples by chance.
    sizes = {x.shape[axis] for x, axis in safe_zip(arrays, batch_axes)}
    if in_batched_states and len(sizes) > 1:
        raise ValueError(
            f"`in_axes` gives {in_batched_states[0]} a batch axis, but not all batched "
            f"arrays have as many examples: sizes are {sorted(sizes)}. {_STATE_REMEDY}"
        )
    return Batch(arrays, tuple(batch_axes), tuple(names), shared, treedef)


_STATE_REMEDY = (
    "It is in an `equinox.nn.State`, which is not batched. In training, examples are "
    "coupled: pass the `axis_name` of the layers that update it to `filter_micro_grad` "
    "or `filter_micro_value_and_grad`. With layers in inference mode, give the state "
    "None in `in_axes`."
)


def _scalar_remedy(
    path: KeyPath, args: Arguments, axes: list[int | None], num_leading: int | None
) -> str:
    """What to do with a scalar, with an example of `in_axes` for an argument."""
    in_kwargs, argument, *inner = path
    remedy = "A scalar has no axis of examples: what all examples share gets None in "
    # Deeper inside, an example of `in_axes` would need the structure of the argument.
    if inner or num_leading is None:
        return f"{remedy}`in_axes`."
    if in_kwargs.idx == 1:
        return f"{remedy}`in_axes`, as in `in_axes={{{argument.key!r}: None}}`."
    of_leaves, entries = iter(axes), []
    for i, x in enumerate(args):
        of_x = {next(of_leaves) for _ in jtu.tree_leaves(x)}
        # What is mapped in several ways has no single entry.
        if len(of_x) > 1:
            return f"{remedy}`in_axes`."
        entries.append(None if i == argument.idx else next(iter(of_x), None))
    return f"{remedy}`in_axes`, as in `in_axes={(*entries[num_leading:],)}`."


def no_ref(name: str) -> str:
    """The message for a `Ref` that has rows, where it cannot be mapped."""
    return (
        f"{name} is a `jax.Ref` with a batch axis, which only `filter_micro_vmap` maps "
        f"over. Pass its value, as in `ref[...]`, and return what is to be written; or "
        "give it None in `in_axes` if all examples read the same."
    )


def _check_lists(spec: PyTree, arguments: PyTree, names: list[str]) -> None:
    """Raises for an argument that is a list of numbers, which would not be batched.

    None in the prefix of axes says that the list is shared by all examples.
    """
    keys = [*arguments] if isinstance(arguments, dict) else range(len(arguments))
    for path, axis, part in match_prefix("in_axes", spec, arguments, "a prefix"):
        # A number raises for what is no array, and None shares the list on purpose.
        # Axes inside an argument are given by who knows what is there.
        if not callable(axis) or len(path) > 1:
            continue
        for key, name in safe_zip(keys, names):
            if path and key != getattr(path[0], "key", getattr(path[0], "idx", None)):
                continue
            # Without a path, one axis is for all arguments.
            x = part if path else part[key]
            if isinstance(x, list) and has_numbers(x):
                raise ValueError(
                    f"`{name}` is a list of {len(x)} entries that are numbers or lists "
                    f"of them, and only arrays are batched. {NUMBERS} If it is the "
                    "same for all examples, give it None in `in_axes`."
                )


def unbatched(args: Arguments, kwargs: dict[str, Any]) -> Batch:
    """The arguments of a call without a batch."""
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    return Batch([], (), (), leaves, treedef)


def leaf_name(path: KeyPath, parameters: list[str]) -> str:
    """The name of a leaf of `(args, kwargs)`."""
    in_kwargs, argument, *inner = path
    name = argument.key if in_kwargs.idx == 1 else parameters[argument.idx]
    return f"`{name}{jtu.keystr(tuple(inner))}`"


def spec_of_rows(shape: tuple[int, ...], batch: Batch) -> PartitionSpec:
    """The sharding of results with examples of the given `shape` along axis 0.

    If the examples of an argument have this shape, its sharding is used. Otherwise the
    results are sharded along their examples only.
    """
    for x, axis in safe_zip(batch.arrays, batch.axes):
        if (*x.shape[:axis], *x.shape[axis + 1 :]) == shape:
            # The axis of the examples comes first, before those of one example.
            spec = [*spec_of(x)]
            return PartitionSpec(spec.pop(axis), *spec)
    return examples_spec(batch.arrays, batch.axes)
