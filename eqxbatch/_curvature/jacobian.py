"""`filter_jacobian`: Jacobians in blocks of columns or rows."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from .._base.checks import check_at_least, check_exclusive, warn_user
from .._base.dtypes import is_complex
from .._base.mesh import coupled_axes, variation_is_known
from .._base.modes import (
    derivative_of,
    without_forward_mode,
    without_reverse_mode,
)
from .._base.traced_function import TracedFunction
from .._base.trees import log, safe_zip
from .._base.versions import varying
from .._batch.accumulators import Concat
from .._batch.arguments import Arguments, Leaves, RowArrays
from .._batch.derivative import AbstractDerivative, check_has_batch
from .._batch.loop import run_blocks
from .._batch.loss import check_outputs
from .._batch.memory import as_block_size, check_fits_memory, MemoryBudget, Size
from .._batch.rows import Rows
from .._batch.slots import as_slots, Slots
from .._batch.transform import (
    AbstractMicrobatched,
    AbstractSharded,
    also_decorator,
    P,
    run_compiled,
)
from .columns import by_columns, by_rows, Linear, Mode
from .pytree import Unravel


class AbstractReplicated(AbstractSharded):
    """A transform whose results have the axes of one or of two arrays.

    They are replicated on all devices.
    """

    def specs(self, args: Arguments, kwargs: dict[str, Any], out: PyTree) -> PyTree:
        del args, kwargs, out
        return PartitionSpec()


class AbstractColumns(AbstractReplicated):
    """A transform that computes some columns (or rows) of a matrix at a time."""

    _: dataclasses.KW_ONLY
    block_size: Size = eqx.field(default=None, converter=as_block_size)

    @property
    def num_blocks(self) -> int | None:
        """The number of blocks, if the transform has this setting."""
        return None

    def __check_init__(self) -> None:
        sizes = {"block_size": self.block_size, "num_blocks": self.num_blocks}
        check_exclusive("Pass one of them.", **sizes)
        if self.num_blocks is not None:
            check_at_least("num_blocks", self.num_blocks, 1)

    def num_columns(
        self, total: int, args: Arguments, kwargs: dict[str, Any], **settings: Any
    ) -> int | None:
        """How many of all columns are computed at a time; None for all of a group.

        A budget measures a call with these `settings`.
        """
        if self.num_blocks is not None:
            return max(1, -(-total // self.num_blocks))
        if self.block_size is None:
            return None
        return self.fitting_size("block_size", total, args, kwargs, **settings)


def check_mode(
    mode: str,
    what: str,
    reason: str | None,
    fun: Callable[[list], PyTree],
    point: list[Array],
) -> None:
    """Raises `TypeError` if there is a reason why JAX does not have a chosen mode.

    It also raises if JAX does not have the other mode of the function.
    """
    if reason is None:
        return
    # If it has neither mode, another `mode` would not help, and the error says so.
    derivative_of(what, fun, point)
    if mode != "auto":
        raise TypeError(
            f"JAX cannot differentiate {what} with `mode={mode!r}`. Use `mode='auto'`, "
            f"which takes the one that it can. ({reason})"
        )


_IF_ONE = "For the Jacobian of each example, pass `in_axes=0`."


def _exchanged(program: TracedFunction) -> list:
    """The axes of `jax.shard_map` over which rows are not those of one device.

    If all devices have the same leaves and outputs, exchanges in between do not matter.
    If JAX does not know which arrays are the same, they do.
    """
    outs = program.closed.out_avals
    num, total = len(program.leaves), len(program.closed.jaxpr.invars)
    axes = coupled_axes(program.closed, [i < num for i in range(total)])
    if axes and variation_is_known():
        types = [*map(jax.typeof, program.leaves), *outs]
        axes &= frozenset().union(*map(varying, types))
    return sorted(axes, key=str)


class Jacobian(AbstractDerivative, AbstractMicrobatched, AbstractColumns, Generic[P]):
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
    - `in_axes`: the batch axes of the arguments after the first, as for
        [`eqxbatch.filter_micro_grad`][], if `fun` is a function of one example. The
        default is None: `fun` is called once with all arguments.
    - `microbatch_size`: the number of examples whose Jacobians are computed at once.
    - `accumulator`: how the Jacobians (and `aux`) of the examples are combined, as for
        [`eqxbatch.filter_micro_vmap`][]. The default, None, is
        [`eqxbatch.Concat`][]: all of them, along axis 0.
    - `holomorphic`: whether `fun` is a holomorphic function of complex arrays; it must
        return complex arrays. For other functions of complex arrays, pass real and
        imaginary parts as separate arrays. Complex outputs of real parameters need no
        setting, in either mode.

    Inside `jax.shard_map`, the Jacobian is that of the outputs on each device, in both
    modes.

    **Returns:**

    A function with the arguments of `fun` that returns the Jacobian, or
    `(jacobian, aux)` with `has_aux`. The Jacobian is the output of `fun`, where each
    array is replaced by a PyTree with the structure of the first argument, and `None`
    for everything that is not differentiated. Its arrays have the axes of the output,
    then those of the parameter.

    With `flat`, the Jacobian is a pair: the output of `fun`, where each array is
    replaced by one of shape `(*output, n)`, and `unravel` (an
    [`eqxbatch.results.Unravel`][]), which turns vectors of shape `(n,)` into PyTrees.

    The function is compiled on the first call; repeated calls with the same function
    and shapes are not retraced.

    **Raises:**

    - `ValueError` if there is nothing to differentiate, for outputs that are not arrays
        of an inexact dtype, for an unknown `mode`, for sizes below 1, if both
        `block_size` and `num_blocks` are given, for a `microbatch_size` or an
        `accumulator` without `in_axes`, and with it for a budget as `block_size`.
        Inside `jax.shard_map`, also for `mode="rev"` if `fun` exchanges values that
        depend on its first argument between devices.
    - `TypeError` for complex arrays without `holomorphic`, for real parameters or
        outputs with it, and for a `fun` that JAX can differentiate in neither mode, or
        not in the given `mode`.

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
    num_blocks: int | None = None
    mode: Mode = "auto"
    checkpoint: bool = False
    has_aux: bool = False
    flat: bool = False
    holomorphic: bool = False
    in_axes: PyTree = None
    accumulator: PyTree = None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run_compiled(self, *args, **kwargs)

    @property
    def has_gaps(self) -> bool:
        return not self.flat

    def __check_init__(self) -> None:
        settings = {
            "microbatch_size": self.microbatch_size,
            "accumulator": self.accumulator,
        }
        check_has_batch(self.in_axes, settings)
        if self.in_axes is not None and isinstance(self.block_size, MemoryBudget):
            raise ValueError(
                "`block_size` is a `MemoryBudget`, which measures one example, but "
                "with `in_axes` the blocks of a microbatch are computed at once. Pass "
                "the budget as `microbatch_size`."
            )

    def apply(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        if self.in_axes is None:
            return self._of_one(args, kwargs)
        first, batch = args[:1], self.batch(args, kwargs)
        # The same transform of a single example, without the settings of a batch.
        one = dataclasses.replace(
            self, in_axes=None, microbatch_size=None, accumulator=None
        )

        def of_example(*rows: Array) -> Any:
            (_, *rest), kwargs = batch.arguments([*rows])
            return one.apply((*first, *rest), kwargs)

        def run(rows: Rows) -> PyTree:
            return eqx.filter_vmap(of_example, in_axes=rows.axes)(*rows.arrays)

        def slots(output: PyTree) -> Slots:
            accumulator = Concat() if self.accumulator is None else self.accumulator
            slots = as_slots(accumulator, output)
            # The output has the examples along axis 0, which an accumulator reduces.
            flagged = (
                dataclasses.replace(slot, per_example=True) for slot in slots.slots
            )
            return dataclasses.replace(slots, slots=[*flagged])

        blocks = self.blocks(batch, args, kwargs, batch.total())
        return run_blocks(run, batch.rows(), blocks, slots)

    def _of_one(self, args: Arguments, kwargs: dict[str, Any]) -> Any:
        fun = self.loss_of(args, kwargs)
        diff = fun.diff

        def run(diff: PyTree, _: RowArrays) -> PyTree:
            out, aux = fun.outputs(diff, [])
            as_array = lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x
            return jtu.tree_map(as_array, out), aux

        program = fun.traced(None, run, _IF_ONE)
        leaves, (out, _) = program.leaves, program.out
        structs = check_outputs(out)
        # Ask before anything is computed: the result itself may be too large.
        shape = self._num_rows(structs), sum(x.size for x in leaves)
        check_fits_memory(
            f"The Jacobian, of shape {shape},",
            math.prod(shape) * min(x.dtype.itemsize for x in structs),
            "Select fewer parameters with `where`; or use products with vectors: "
            "`filter_linearize`, or `jax.vjp` of `fun`.",
        )
        values = self._values(program, range(len(structs)))

        # Columns or rows: whichever are fewer, and can be differentiated.
        mode = self._checked_mode(program, values, structs)
        log.debug("Jacobian: mode=%r is %r.", self.mode, mode)
        num_columns = sum(x.size for x in leaves)
        # A budget measures calls with some of these columns or rows.
        total = num_columns if mode == "fwd" else self._num_rows(structs)
        size = self.num_columns(total, args, kwargs)
        try:
            if mode == "fwd":
                blocks = by_columns(values, leaves, structs, size)
            else:
                # Inside of `jax.shard_map`, rows may need leaves of another type.
                again = lambda names: fun.varying_over(names).traced(None, run, _IF_ONE)
                blocks = self._rows(program, again, structs, size)
        except Exception:
            # Asked only here, because it takes another trace of the derivative.
            ask = without_forward_mode if mode == "fwd" else without_reverse_mode
            check_mode(self.mode, "`fun`", ask(values, leaves), values, leaves)
            raise
        jacobian = self._arranged(blocks, leaves, diff, out)
        if not self.has_aux:
            return jacobian
        _, aux = program.output(program.one(leaves, []))
        return jacobian, aux

    def _values(self, program: TracedFunction, which: Sequence[int]) -> Linear:
        """Some outputs of a program as a function of its leaves."""

        def values(leaves: list[Array]) -> list:
            outs = program.one(leaves, [])
            return [outs[i] for i in which]

        return jax.checkpoint(values) if self.checkpoint else values

    def _rows(
        self,
        program: TracedFunction,
        again: Callable[[frozenset], TracedFunction],
        structs: Leaves,
        size: int | None,
    ) -> list[list[Array]]:
        """The Jacobian by rows; inside `jax.shard_map`, that of this device.

        `again(names)` is the program of leaves that vary over these axes.
        """
        # Reverse mode sums over devices that have the same leaves but other outputs.
        # Columns are those of one device; so are rows, if leaves vary as outputs do.
        kinds = [varying(x) for x in program.closed.out_avals[: len(structs)]]
        blocks: dict[int, list[Array]] = {}
        for names in dict.fromkeys(kinds):
            which = [i for i, kind in enumerate(kinds) if kind == names]
            is_same = all(names <= varying(jax.typeof(x)) for x in program.leaves)
            local = program if is_same else again(names)
            values, of_names = self._values(local, which), [structs[i] for i in which]
            rows = by_rows(values, local.leaves, of_names, size)
            blocks.update(safe_zip(which, rows))
        return [blocks[i] for i in range(len(structs))]

    def _checked_mode(
        self, program: TracedFunction, values: Linear, structs: Leaves
    ) -> Literal["fwd", "rev"]:
        """The mode that needs fewer passes, among those that are differentiable."""
        # A derivative of a real output is not a complex number.
        if self.holomorphic and not all(map(is_complex, structs)):
            raise TypeError(
                "With `holomorphic=True`, all arrays that `fun` returns must be "
                f"complex; got {[str(struct.dtype) for struct in structs]}. For "
                "a function that is not holomorphic, pass real and imaginary parts of "
                "the parameters as two real arrays, without `holomorphic`."
            )
        # First what is known without differentiating: some modes would give wrong
        # numbers here.
        leaves, exchanged = program.leaves, _exchanged(program)
        exchange = (
            "`fun` exchanges values that depend on its first argument between devices "
            f"(along {', '.join(map(repr, exchanged))}), so that reverse mode is about "
            "the outputs of all devices at once"
        )
        if self.mode == "rev" and exchanged:
            raise ValueError(
                f"The Jacobian is that of the outputs on each device, but {exchange}. "
                "Use `mode='fwd'` or `mode='auto'`; got `mode='rev'`."
            )
        if self.mode != "auto":
            return self.mode
        # Forward mode takes one pass for each column, reverse mode one for each row.
        num_columns, num_rows = sum(x.size for x in leaves), self._num_rows(structs)
        is_forward = num_columns <= num_rows
        # Only forward mode is right here, and it may be the slower one.
        if exchanged:
            if not is_forward:
                warn_user(
                    f"The Jacobian of `fun` is computed in forward mode (passes: "
                    f"{num_columns}) instead of reverse mode (passes: {num_rows}), as "
                    f"{exchange}. Set `mode='fwd'` to do so without a warning."
                )
            return "fwd"
        # The other mode is asked for only if the better one is missing.
        ask = without_forward_mode if is_forward else without_reverse_mode
        reason = ask(values, leaves)
        if reason is not None:
            is_forward = derivative_of("`fun`", values, leaves) == "columns"
            # The user hears what it costs, and what would help.
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

    def _num_rows(self, structs: Leaves) -> int:
        """The number of pullbacks in reverse mode."""
        # Real and imaginary part of an output are pulled back one after the other.
        parts = lambda struct: 1 if self.holomorphic or not is_complex(struct) else 2
        return sum(parts(struct) * struct.size for struct in structs)

    def _arranged(
        self, blocks: list[list[Array]], leaves: list[Array], diff: PyTree, out: PyTree
    ) -> Any:
        unravel = Unravel(diff)
        trees: list[PyTree] = []
        for parts in blocks:
            if self.flat:
                trees.append(jnp.concatenate(parts, axis=-1))
                continue
            split = [
                part.reshape(*part.shape[:-1], *leaf.shape)
                for part, leaf in safe_zip(parts, leaves)
            ]
            trees.append(jtu.tree_unflatten(unravel.treedef, split))
        # Outside, the structure of the output; inside, that of the parameters.
        tree = jtu.tree_unflatten(jtu.tree_structure(out), trees)
        return (tree, unravel) if self.flat else tree


filter_jacobian = also_decorator("filter_jacobian", Jacobian)
