"""`filter_jacobian`: Jacobians in blocks of columns or rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.differentiable import (
    derivative_of,
    without_forward_mode,
    without_reverse_mode,
)
from .._base.dtypes import is_complex
from .._base.jaxprs import TracedFunction
from .._base.mistakes import warn_user
from .._base.trees import log
from .._batch.derivative import AbstractDerivative
from .._batch.transform import also_decorator, P, run_compiled
from .by_products import AbstractColumns, by_columns, by_rows, Mode
from .curvature_of import check_outputs
from .pytree import Unravel


class Jacobian(AbstractDerivative, AbstractColumns, Generic[P]):
    """The Jacobian of a function of a PyTree, in blocks of columns or rows.

    Like `equinox.filter_jacfwd` and `equinox.filter_jacrev`, but peak temporary memory
    is that of one block.

    **Arguments:**

    - `fun`: the function. It is differentiated with respect to all arrays of an
        inexact dtype in its first argument, and returns a PyTree of such arrays.
    - `mode`: `"fwd"` computes columns in forward mode, one for each of the `n`
        parameter entries. `"rev"` computes rows in reverse mode, one for each of the
        `m` output entries. `"auto"` uses whichever mode needs fewer passes; if JAX
        cannot differentiate `fun` in that mode, it warns and uses the other one.
    - `block_size`: how many columns or rows are computed at a time, at least 1. This
        number need not divide their total number. An [`eqxbatch.MemoryBudget`][]
        chooses the largest number that fits; `None` computes all at once.
    - `num_blocks`: the number of blocks, as an alternative to `block_size`. If it
        exceeds the number of columns or rows, these are computed one at a time.
    - `checkpoint`: whether to recompute intermediate values for each block instead of
        storing them.
    - `has_aux`: whether `fun` returns a pair `(out, aux)`.
    - `flat`: whether to flatten the parameters into a single axis, and to return
        `unravel`, too.
    - `where`: a function from the first argument to the part (or parts) of it to
        differentiate with respect to. The default is all of it.
    - `filter_spec`: which leaves are parameters, as for `equinox.filter`.
    - `holomorphic`: whether `fun` is a holomorphic function of complex arrays; it must
        return complex arrays. For other functions of complex arrays, pass real and
        imaginary parts as separate arrays. Complex outputs of real parameters need no
        setting, in either mode.

    **Returns:**

    A function with the arguments of `fun` that returns the Jacobian, or
    `(jacobian, aux)` with `has_aux`. The Jacobian is the output of `fun`, where each
    array is replaced by a PyTree with the structure of the first argument, and `None`
    for everything that is not differentiated. Its arrays have the axes of the output,
    then those of the parameter.

    With `flat`, the Jacobian is a pair: the output of `fun`, where each array is
    replaced by one of shape `(*output, n)`, and `unravel` (an [`eqxbatch.Unravel`][]),
    which turns vectors of shape `(n,)` into PyTrees.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    - `ValueError` if there is nothing to differentiate, for outputs that are not arrays
        of an inexact dtype, for an unknown `mode`, for sizes below 1, and if both
        `block_size` and `num_blocks` are given.
    - `TypeError` for complex arrays without `holomorphic`, for real parameters or
        outputs with it, and for a `fun` that JAX can differentiate in neither mode.

    !!! example

        ```python
        >>> import eqxbatch, jax.numpy as jnp
        >>> def decay(parameters, t):
        ...     return parameters["a"] * jnp.exp(-parameters["k"] * t)
        >>> parameters = {"a": jnp.array(2.0), "k": jnp.array(1.0)}
        >>> t = jnp.linspace(0.0, 1.0, 1_000)
        >>> jacobian = eqxbatch.filter_jacobian(decay, block_size=1)(parameters, t)
        >>> jacobian["a"].shape
        (1000,)
        >>> matrix, unravel = eqxbatch.filter_jacobian(decay, flat=True)(parameters, t)
        >>> matrix.shape
        (1000, 2)

        ```
    """

    fun: Callable[P, Any]
    _: dataclasses.KW_ONLY
    mode: Mode = "auto"
    checkpoint: bool = False
    has_aux: bool = False
    flat: bool = False
    holomorphic: bool = False
    in_axes: ClassVar[None] = None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run_compiled(self, *args, **kwargs)

    def apply(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        diff, nondiff = self.real_parameters(args, kwargs)
        leaves, treedef = jtu.tree_flatten(diff)
        fun = self.loss_of(self.batch(args, kwargs), diff, nondiff)

        def run(leaves: list, _: list) -> PyTree:
            out, aux = fun.outputs(jtu.tree_unflatten(treedef, leaves), [])
            as_array = lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x
            return jtu.tree_map(as_array, out), aux

        program = TracedFunction(run, leaves, [], ())
        out, _ = program.out
        structs = check_outputs(out)
        values = lambda leaves: program.one(leaves, [])[: len(structs)]
        if self.checkpoint:
            values = jax.checkpoint(values)

        mode = self._checked_mode(values, leaves, structs)
        log.debug("Jacobian: mode=%r is %r.", self.mode, mode)
        num_columns = sum(x.size for x in leaves)
        total = num_columns if mode == "fwd" else self._num_rows(structs)
        size = self.num_columns(total, args, kwargs)
        compute = by_columns if mode == "fwd" else by_rows
        blocks = compute(values, leaves, structs, size)
        jacobian = self._arranged(blocks, leaves, diff, out)
        if not self.has_aux:
            return jacobian
        _, aux = program.output(program.one(leaves, []))
        return jacobian, aux

    def _checked_mode(
        self, values: Callable[[list], list], leaves: list, structs: list
    ) -> Literal["fwd", "rev"]:
        """The mode that needs fewer passes, among those that are differentiable."""
        if self.holomorphic and not all(map(is_complex, structs)):
            raise TypeError(
                "With `holomorphic=True`, all arrays that `fun` returns must be "
                f"complex; got {[str(struct.dtype) for struct in structs]}. For "
                "a function that is not holomorphic, pass real and imaginary parts of "
                "the parameters as two real arrays, without `holomorphic`."
            )
        if self.mode != "auto":
            return self.mode
        num_columns, num_rows = sum(x.size for x in leaves), self._num_rows(structs)
        is_forward = num_columns <= num_rows
        ask = without_forward_mode if is_forward else without_reverse_mode
        reason = ask(values, leaves)
        if reason is not None:
            is_forward = derivative_of("`fun`", values, leaves) == "columns"
            ways = (
                f"forward mode (passes: {num_columns})",
                f"reverse mode (passes: {num_rows})",
            )
            used, missing = ways if is_forward else ways[::-1]
            rule = "custom_vjp" if is_forward else "custom_jvp"
            warn_user(
                f"The Jacobian of `fun` is computed in {used} instead of {missing}, "
                "as JAX cannot differentiate `fun` in the latter. Set "
                f"`mode={'fwd' if is_forward else 'rev'!r}` to do so without a "
                f"warning, or give `fun` a `jax.{rule}` to be faster. ({reason})"
            )
        return "fwd" if is_forward else "rev"

    def _num_rows(self, structs: list) -> int:
        """The number of pullbacks in reverse mode."""
        parts = lambda struct: 1 if self.holomorphic or not is_complex(struct) else 2
        return sum(parts(struct) * struct.size for struct in structs)

    def _arranged(
        self, blocks: list[list[Array]], leaves: list, diff: PyTree, out: PyTree
    ) -> Any:
        unravel = Unravel(diff)
        trees: list[PyTree] = []
        for parts in blocks:
            if self.flat:
                trees.append(jnp.concatenate(parts, axis=-1))
                continue
            split = [
                part.reshape(*part.shape[:-1], *leaf.shape)
                for part, leaf in zip(parts, leaves, strict=True)
            ]
            trees.append(jtu.tree_unflatten(unravel.treedef, split))
        tree = jtu.tree_unflatten(jtu.tree_structure(out), trees)
        return (tree, unravel) if self.flat else tree


filter_jacobian = also_decorator("filter_jacobian", Jacobian)
