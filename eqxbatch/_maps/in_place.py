"""Mutable arrays (`jax.Ref`) as mapped arguments of `filter_micro_vmap`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._base.refs import is_ref
from .._base.trees import safe_zip
from .._batch.accumulators import Concat
from .._batch.batch import broadcast_axes, split_axes
from .._batch.transform import run_compiled


def has_ref(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an argument is or has a `Ref`."""
    return any(map(is_ref, jtu.tree_leaves((args, kwargs))))


def run_in_place(transform: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a map, and writes the rows of each mapped `Ref` back to it.

    Each example has its row in a `Ref` of its own. So rows of two microbatches are
    read before they are written, and no example sees what another one wrote.
    """
    # The axes are those of the map itself, one for each leaf of the call.
    default = eqx.if_array(0)
    specs = split_axes(transform.fun, transform.in_axes, args, kwargs, default)
    axes = [
        axis
        for spec, tree in safe_zip(specs, (args, kwargs))
        for axis in broadcast_axes("in_axes", spec, tree)
    ]
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    places = [
        i
        for i, (x, axis) in enumerate(safe_zip(leaves, axes))
        if is_ref(x) and axis is not None
    ]
    # What all examples share they can only read, which needs no way back.
    if not places:
        return run_compiled(transform, *args, **kwargs)
    if len({id(leaves[i]) for i in places}) < len(places):
        raise ValueError(
            "The same `jax.Ref` is mapped more than once, so that its rows would be "
            "written twice. Pass it once."
        )
    if transform.num_real_microbatches is not None:
        raise ValueError(
            "`num_real_microbatches` leaves out rows, but a mapped argument is a "
            "`jax.Ref`, all rows of which are written. Pass its value, as in "
            "`ref[...]`, and return the new one."
        )
    # Microbatches are cut from arrays, which a `Ref` is not.
    refs = [leaves[i] for i in places]
    for i, ref in safe_zip(places, refs):
        leaves[i] = ref[...]
    args, kwargs = jtu.tree_unflatten(treedef, leaves)
    # What an example leaves in its `Ref` is one more output, at the axis it came from.
    both = dataclasses.replace(
        transform,
        fun=_OnRows(transform.fun, (*places,)),
        out_axes=(transform.out_axes, [axes[i] for i in places]),
        accumulator=(transform.accumulator, Concat()),
    )
    out, values = run_compiled(both, *args, **kwargs)
    # Only now, so that a call that raises has written nothing.
    for ref, value in safe_zip(refs, values):
        ref[...] = value
    return out


class _OnRows(eqx.Module):
    """A function that gets some arrays as a `Ref`, and returns what it leaves there.

    `places` are positions among the leaves of the arguments.
    """

    fun: Callable
    places: tuple[int, ...] = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable:
        # Names of arguments are those of the function.
        return self.fun

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[PyTree, list]:
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        # Each example has a new one, under the `vmap` that maps its value.
        refs = [jax.new_ref(leaves[i]) for i in self.places]
        for i, ref in safe_zip(self.places, refs):
            leaves[i] = ref
        args, kwargs = jtu.tree_unflatten(treedef, leaves)
        return self.fun(*args, **kwargs), [ref[...] for ref in refs]
