"""Which arrays of a PyTree are parameters."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._base.checks import no_arrays_remedy, warn_user
from .._base.trees import described, safe_zip, shown


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
    selected = _selected(model, filter_spec)
    numbers = range(len(leaves)) if where is None else _python_numbers(model, where)
    # Each of the three can leave a leaf out, and none can bring one back.
    mask = [
        x is not _OTHER and i in numbers and eqx.is_inexact_array(leaf)
        for i, (x, leaf) in enumerate(safe_zip(selected, leaves))
    ]
    if not any(mask):
        raise ValueError(
            "`where` and `filter_spec` leave no parameters: no array of an inexact "
            "dtype is selected. Select the arrays that the derivative is to be "
            "with respect to."
        )
    return jtu.tree_unflatten(treedef, mask)


# The remedy for a vector in place of a PyTree like the parameters.
UNRAVEL = (
    "Make a PyTree of a vector with the second output of "
    "`jax.flatten_util.ravel_pytree(eqxbatch.parameters(model))`."
)


# In place of a leaf that is left out. None would lose its place among the leaves.
_OTHER = object()


def _selected(model: PyTree, filter_spec: PyTree) -> list[Any]:
    """The leaves of a model, with a mark in place of those that are left out."""
    try:
        # A function of leaves, as the default, needs no tree: estimators look at all
        # leaves whenever one is made. A module is a tree, also if it can be called.
        if callable(filter_spec) and jtu.all_leaves([filter_spec]):
            leaves = jtu.tree_leaves(model)
            are_selected = [filter_spec(x) for x in leaves]
            # Equinox refuses results such as None, or several for one leaf.
            if jtu.all_leaves(are_selected):
                pairs = safe_zip(leaves, are_selected)
                return [x if is_selected else _OTHER for x, is_selected in pairs]
        return jtu.tree_leaves(eqx.filter(model, filter_spec, replace=_OTHER))
    except Exception as e:
        e.add_note(
            "`filter_spec` must be as for `equinox.filter`: a function of each leaf "
            "that returns a bool, or a PyTree of bools or such functions, which is a "
            "prefix of the model. To select parts by a function of the whole model, "
            "pass `where`."
        )
        raise


def warn_of_numbers(
    model: PyTree, where: Callable | None, filter_spec: PyTree, name: str = "`model`"
) -> None:
    """Warns of Python numbers in the place of parameters.

    Matrices lack their rows and columns, which looks like fewer parameters. Numbers in
    a module are its settings, and those in a partial function are its arguments.
    """
    # Paths take longer than leaves, and most models have no number among these.
    are_numbers = [isinstance(x, (float, complex)) for x in jtu.tree_leaves(model)]
    if not any(are_numbers):
        return
    leaves, _ = jtu.tree_flatten_with_path(model)
    # Numbers inside of these are no suspects: JAX stops at them, so their paths differ.
    holds = lambda x: isinstance(x, (eqx.Module, functools.partial))
    paths = {path for path, _ in jtu.tree_leaves_with_path(model, is_leaf=holds)}
    suspects = [
        i
        for i, (path, x) in enumerate(leaves)
        if path in paths and are_numbers[i] and not eqx.is_inexact_array(x)
    ]
    if not suspects:
        return
    # Only now, because most models have no such numbers.
    selected = _selected(model, filter_spec)
    picked = range(len(leaves)) if where is None else _python_numbers(model, where)
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


def warn_of_flax(model: PyTree) -> None:
    """Warns of layers of `flax.nnx` that change themselves when they are called.

    A program is a function of one example, so that such changes are lost.
    """
    # By the names of its classes and modules: Flax need not be installed.
    is_active = lambda x: any(_active_layers(x))
    nodes = [x for x in jtu.tree_leaves(model, is_leaf=is_active) if is_active(x)]
    if any("Dropout" in type(x).__name__ for x in nodes):
        warn_user(
            "A `Dropout` of `flax.nnx` is active, and has random numbers of its own: "
            "all examples and calls have the same mask, unless `fun` passes `rngs` "
            "made of a key for each example. Pass them, or call `model.eval()`."
        )
    if any("Norm" in type(x).__name__ for x in nodes):
        warn_user(
            "A `BatchNorm` of `flax.nnx` is in training mode: it sees one example, or "
            "one microbatch with `batched=True`, and its new statistics are lost. Call "
            "`model.eval()`, or return the statistics as aux."
        )


def _active_layers(x: Any) -> Iterator[bool]:
    """Whether something is such a layer, by each setting that says so."""
    if type(x).__module__.startswith("flax.nnx"):
        yield getattr(x, "deterministic", None) is False and x.rngs is not None
        yield getattr(x, "use_running_average", None) is False


class _Number:
    """Stands for a leaf of a model while `where` picks parts of it."""

    def __init__(self, number: int):
        self.number = number

    def __getitem__(self, index: Any) -> Any:
        raise _not_a_part("it takes a part of one")


def _python_numbers(model: PyTree, where: Callable) -> set[int]:
    """The indices of the leaves that `where` picks."""
    leaves, treedef = jtu.tree_flatten(model)
    # Numbers in place of leaves tell where `where` goes, without looking at arrays.
    marked = jtu.tree_unflatten(treedef, [_Number(i) for i, _ in enumerate(leaves)])
    try:
        picked = jtu.tree_leaves(where(marked))
    except AttributeError as e:
        # Any other attribute is missing in the model itself: the error is the user's.
        if not isinstance(e.obj, _Number):
            raise
        raise _not_a_part(f"it uses `.{e.name}` of one") from e
    for x in picked:
        if not isinstance(x, _Number):
            raise _not_a_part(f"got {described(x)}")
    return {x.number for x in picked}


WHERE_REMEDY = (
    "Pass a function that returns parts of the model, such as `lambda model: "
    "model.layers[-1]`; or a mask, a PyTree of bools like the model, as `filter_spec`."
)


def as_where(where: PyTree) -> Any:
    """A function that picks parts of a model.

    Raises `TypeError` for a mask or a part of the model. If it is a module, it can be
    called, but as the module that it is like.
    """
    parts = jtu.tree_leaves(where)
    # A module of bools can be called, as the module that it is like. Its strings are
    # settings. A function is a leaf by itself.
    is_mask = len(parts) > 1 and all(isinstance(x, bool | str) for x in parts)
    is_function = callable(where) and not is_mask and not any(map(eqx.is_array, parts))
    if where is not None and not is_function:
        raise TypeError(
            f"`where` must be Callable | None; got {described(where)}. {WHERE_REMEDY}"
        )
    return where


def _not_a_part(what: str) -> ValueError:
    return ValueError(
        "`where` must return parts of the model, whose arrays it must not look at; "
        f"{what}. Select by dtype or shape with `filter_spec`."
    )


def parameters(
    model: PyTree,
    *,
    where: Callable | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
) -> PyTree:
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
    where = as_where(where)
    return eqx.filter(model, are_parameters(model, where, filter_spec))
