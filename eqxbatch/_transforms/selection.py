"""Which leaves of the first argument are differentiated."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._blocks.axes import positional_names


class Selection(eqx.Module):
    """Which leaves of a model are its parameters."""

    _is_parameter: tuple[bool, ...] = eqx.field(static=True)

    def __init__(self, model: PyTree, where: Callable | None, filter_spec: PyTree):
        selected = jtu.tree_leaves(eqx.filter(model, filter_spec, replace=_OTHER))
        leaves = jtu.tree_leaves(model)
        chosen = [x is not _OTHER for x in selected]
        if where is not None:
            numbers = _numbers(model, where)
            chosen = [is_chosen and i in numbers for i, is_chosen in enumerate(chosen)]
        self._is_parameter = tuple(
            is_chosen and eqx.is_inexact_array(leaf)
            for is_chosen, leaf in zip(chosen, leaves, strict=True)
        )
        if not any(self._is_parameter):
            raise ValueError(
                "`where` and `filter_spec` leave no parameters: no array of an inexact "
                "dtype is selected. Select the arrays that the derivative is to be "
                "with respect to."
            )

    def partition(self, model: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters and all the rest, each with None for the other."""
        leaves, treedef = jtu.tree_flatten(model)
        if len(leaves) != len(self._is_parameter):
            raise ValueError(
                "The model has another structure than when the kernel was made: "
                f"{len(leaves)} leaves in place of {len(self._is_parameter)}. Make a "
                "new one."
            )
        return eqx.partition(model, jtu.tree_unflatten(treedef, self._is_parameter))

    def split(self, model: PyTree) -> tuple[list[Array], Callable[[list], PyTree]]:
        """The parameters, and what puts others in their place."""
        parameters, rest = self.partition(model)
        leaves, treedef = jtu.tree_flatten(parameters)
        combine = lambda leaves: eqx.combine(jtu.tree_unflatten(treedef, leaves), rest)
        return leaves, combine


_OTHER = object()


class _Number:
    """Stands for a leaf of a model while `where` picks parts of it."""

    def __init__(self, number: int):
        self.number = number


def _numbers(model: PyTree, where: Callable) -> set[int]:
    """The numbers of the leaves that `where` picks; parts of it may have none."""
    leaves, treedef = jtu.tree_flatten(model)
    marked = jtu.tree_unflatten(treedef, [_Number(i) for i, _ in enumerate(leaves)])
    found = jtu.tree_leaves(where(marked))
    for x in found:
        if not isinstance(x, _Number):
            raise ValueError(
                "`where` must return parts of the model, whose arrays it must not "
                f"look at; got {x!r} of type {type(x).__name__}. Select by dtype or "
                "shape with `filter_spec`."
            )
    return {x.number for x in found}


def differentiated(
    args: tuple,
    kwargs: dict[str, Any],
    where: Callable | None = None,
    filter_spec: PyTree = eqx.is_inexact_array,
) -> tuple[PyTree, PyTree]:
    """What of the first argument is differentiated, and the rest of it."""
    if not args:
        raise ValueError(
            "The argument that is differentiated comes first, by position; got "
            f"only keyword arguments, {tuple(kwargs)}."
        )
    if not jtu.tree_leaves(eqx.filter(args[0], eqx.is_inexact_array)):
        raise ValueError(
            "The first argument has no arrays of an inexact dtype, so that there "
            f"is nothing to differentiate; got {args[0]!r}. Give what the "
            "derivative is with respect to as the first argument."
        )
    return Selection(args[0], where, filter_spec).partition(args[0])


def axes_of_all(fun: Callable, in_axes: PyTree, args: tuple) -> PyTree:
    """`in_axes` for all arguments, from those for all but the first."""
    if isinstance(in_axes, dict):
        (first,) = positional_names(fun, 1)
        if in_axes.get(first) is not None:
            raise ValueError(
                f"`in_axes` gives `{first}` the batch axis {in_axes[first]!r}, but the "
                "first argument is the one that is differentiated, and is the same "
                "for all examples. Leave it out."
            )
        return {**in_axes, first: None}
    num = len(args) - 1
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != num:
            raise ValueError(
                "`in_axes` is for the arguments after the first, which is never "
                f"batched: it must have {num} entries for {len(args)} positional "
                f"arguments; got {in_axes!r}."
            )
        return (None, *in_axes)
    return (None, *[in_axes] * num)


def check_complex(diff: PyTree, holomorphic: bool) -> None:
    """Raises `TypeError` if `holomorphic` does not fit the parameters."""
    are_complex = [jnp.iscomplexobj(x) for x in jtu.tree_leaves(diff)]
    if holomorphic and not all(are_complex):
        raise TypeError(
            "With `holomorphic=True`, all arrays that are differentiated must be "
            f"complex; got {_dtypes(diff)}."
        )
    if any(are_complex) and not holomorphic:
        raise TypeError(
            "A function of complex arrays has a derivative in their real and "
            f"imaginary parts; got {_dtypes(diff)}. Give these as two real arrays, and "
            "make the complex one of them inside of `fun`; or, if `fun` is "
            "holomorphic, say `holomorphic=True`."
        )


def _dtypes(diff: PyTree) -> list[str]:
    return [str(x.dtype) for x in jtu.tree_leaves(diff)]
