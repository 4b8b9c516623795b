"""A function of parameters and of one example of a batch, traced to a jaxpr."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .backward import custom_backward, CustomBackward
from .jaxpr_types import Value
from .jaxprs import depends, run_jaxpr, uses_dtype
from .narrow import wide, without_narrow_casts
from .ragged import with_mapped_products
from .refs import without_refs
from .repeats import without_repeats
from .structs import array_structs, full_varying_as, with_arrays
from .trees import safe_zip


_T = TypeVar("_T")


class _Static(eqx.Module):
    """Holds values that are not arrays and not traced."""

    value: Any = eqx.field(static=True)


class Inputs(NamedTuple):
    """Leaves, and the arrays of one example."""

    leaves: list[Array]
    rows: list[Array]


class TracedFunction:
    """A function of leaves and of one example of a batch, traced.

    - `leaves`: the list of arrays that it was traced with; those of fewer than 16 bits
        in float32, as which they are differentiated.
    - `arrays`, `axes`: the arrays of a batch, of which only types matter, and their
        batch axes; these are empty if the arrays are those of one example.
    - `closed`: its jaxpr, whose first inputs are the leaves.
    - `out`: its output, with a `jax.ShapeDtypeStruct` for each array.
    """

    def __init__(
        self,
        fun: Callable[[Any, list], PyTree],
        leaves: PyTree,
        arrays: list[PyTree],
        axes: Sequence[int] = (),
    ):
        given, self._treedef = jtu.tree_flatten(leaves)
        self._dtypes = [x.dtype for x in given]
        self.leaves = [*map(wide, given)]
        self.arrays, self.axes = arrays, list(axes)

        def flat(leaves: list[Value], rows: list[PyTree]) -> PyTree:
            # The function sees the dtypes that were given, though the leaves are wide.
            return fun(self.cast(leaves), rows)

        trace = lambda rows: eqx.filter_make_jaxpr(flat)(self.leaves, rows)
        closed, structs, static = self.at_example(trace)
        closed = with_mapped_products(without_refs(closed))
        self.closed = without_narrow_casts(closed, self._dtypes)
        self.out = eqx.combine(structs, static)

    def __repr__(self) -> str:
        text = functools.partial(eqx.tree_pformat, struct_as_array=True)
        leaves, arrays, out = map(text, (self.leaves, self.arrays, self.out))
        return f"{type(self).__name__}({leaves} and {arrays} -> {out})"

    def at_example(self, ask: Callable[[list], _T]) -> _T:
        """The untraced output of `ask(rows)` for one example."""
        if not self.axes:
            return ask(self.arrays)
        # Inside `jax.vmap`, an example has the type that it will have there, also on a
        # mesh.
        run = jax.vmap(lambda *rows: _Static(ask([*rows])), self.axes)
        return jax.eval_shape(run, *self.arrays).value

    def zeros(self) -> Inputs:
        """Leaves and an example of zeros, of the types that it was traced with."""
        zeros = [full_varying_as(var.aval, 0) for var in self.closed.jaxpr.invars]
        return Inputs(zeros[: len(self.leaves)], zeros[len(self.leaves) :])

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays that it returns for one example."""
        return array_structs(self.out)

    @functools.cached_property
    def is_narrow(self) -> bool:
        """Whether it uses float16: sums can overflow where their mean does not."""
        return uses_dtype(self.closed.jaxpr, jnp.float16)

    @property
    def _are_examples(self) -> list[bool]:
        """Which inputs of its jaxpr differ between examples."""
        num = len(self.leaves)
        return [False] * num + [True] * (len(self.closed.jaxpr.invars) - num)

    @functools.cached_property
    def has_examples(self) -> list[bool]:
        """Which of the arrays that it returns depend on the example."""
        return depends(self.closed.jaxpr, self._are_examples)

    @functools.cached_property
    def backward(self) -> CustomBackward:
        """What is known of its backward passes, for many examples."""
        return custom_backward(self.closed, self._are_examples)

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """A list with an entry for each leaf, as the PyTree that the leaves were."""
        return jtu.tree_unflatten(self._treedef, leaves)

    def without_repeats(self) -> "TracedFunction":
        """The same function, which computes what depends on leaves once."""
        # The cotangent of what is merged is a sum. Only linear backward passes return
        # the same for it as for each of its terms, added up.
        if not self.backward.is_linear:
            return self
        other = copy.copy(self)
        other.closed = without_repeats(self.closed, len(self.leaves))
        return other

    def cast(self, leaves: Sequence[Any]) -> PyTree:
        """The same, with each entry in the dtype of its leaf as it was given."""
        pairs = safe_zip(leaves, self._dtypes)
        # A cast to the same dtype would be an equation if the type is weak.
        return self.tree([x if x.dtype == d else x.astype(d) for x, d in pairs])

    def one(self, leaves: Sequence[Value], rows: Sequence[Value]) -> list[Array]:
        """The arrays that it returns for one example."""
        consts = list(self.closed.consts)
        return run_jaxpr(self.closed.jaxpr, consts, [*leaves, *rows])

    def many(self, leaves: Sequence[Value], rows: Sequence[Value]) -> list[Array]:
        """The arrays for some examples, along axis 0."""
        return jax.vmap(lambda *rows: self.one(leaves, rows), self.axes)(*rows)

    def run(self, rows: Sequence[Value]) -> list[Array]:
        """Like `many`, but arrays that do not depend on the example are computed once.

        These arrays have no batch axis; see `has_examples`.
        """
        in_axes = (None, *self.axes)
        out_axes = [0 if has else None for has in self.has_examples]
        of_one = lambda leaves, *rows: self.one(leaves, rows)
        # JAX computes what has no mapped axis once, and None keeps it without one.
        return jax.vmap(of_one, in_axes, out_axes)(self.leaves, *rows)

    def output(self, arrays: Sequence[Any]) -> PyTree:
        """The output of the function, with these as its arrays."""
        return with_arrays(self.out, arrays)
