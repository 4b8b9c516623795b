"""Programs without mutable arrays (`jax.Ref`).

A `Ref` that a function makes for itself is a value that changes: the program without it
passes that value from one equation to the next. JAX does the same when it compiles, but
that is too late for derivatives: through a `jax.lax.map`, that of a function which
makes a `Ref` is zero, and a `jax.custom_jvp` refuses it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array

from .jaxpr_types import Eqn, Jaxpr, JaxprAndConsts, Rule, Value
from .jaxprs import as_remat, callee, evaluate_with, inner_jaxprs, source_line
from .primitives import is_remat, name_of
from .trees import safe_zip
from .versions import is_ref, is_type_of_ref, scan_sizes


def without_refs(closed: JaxprAndConsts) -> JaxprAndConsts:
    """A closed jaxpr that computes the same without any `Ref` of its own.

    A `Ref` from outside is read once, before the program.

    Raises `ValueError` if the program writes to a `Ref` from outside, and for one in a
    primitive that is not known here, such as a function with a custom derivative.
    """
    jaxpr = closed.jaxpr
    if not _has_refs(jaxpr):
        return closed
    outside = {id(x): _Cell(x[...]) for x in closed.consts if is_ref(x)}
    before = {key: cell.value for key, cell in outside.items()}
    consts = [outside.get(id(x), x) for x in closed.consts]

    def run(*args: Any) -> list:
        outs = _evaluate_cells(jaxpr, consts, [*args])
        # What is written is another object, even if its numbers are the same.
        if any(cell.value is not before[key] for key, cell in outside.items()):
            raise ValueError(
                "The function writes to a `jax.Ref` that was made outside of it, which "
                "would depend on the order of the examples. Make the `Ref` inside of "
                "the function, or return what it is to hold."
            )
        return outs

    return jax.make_jaxpr(run)(*(var.aval for var in jaxpr.invars))


@dataclasses.dataclass
class _Cell:
    """The value of a `Ref` while its program is traced."""

    value: Array


if TYPE_CHECKING:
    _Operand = Any
else:
    # What goes into equations and comes out of them.
    _Operand = Value | _Cell


class _State(NamedTuple):
    """The values in the cells, and what a loop carries or a program returns."""

    cells: list[Value]
    outs: list[Value]


def _has_refs(jaxpr: Jaxpr) -> bool:
    # What reads, writes or makes a `Ref` has an effect. Kernels of Pallas have none.
    return bool(jaxpr.effects) and any(map(_uses_refs, jaxpr.eqns))


def _uses_refs(eqn: Eqn) -> bool:
    if not eqn.effects:
        return False
    if any(is_type_of_ref(atom.aval) for atom in [*eqn.invars, *eqn.outvars]):
        return True
    return any(map(_has_refs, inner_jaxprs(eqn)))


def _evaluate_cells(
    jaxpr: Jaxpr, consts: Sequence[_Operand], args: list[_Operand]
) -> list[_Operand]:
    """Evaluates a jaxpr with a cell for each `Ref`."""

    def replace(_: int, eqn: Eqn) -> Rule | None:
        return functools.partial(_rule_of(eqn), eqn) if _uses_refs(eqn) else None

    return evaluate_with(jaxpr, [*consts], args, replace)


def _rule_of(eqn: Eqn) -> Callable[[Eqn, list], list]:
    """How an equation that uses a `Ref` is evaluated."""
    rule = _RULES.get(name_of(eqn))
    if rule is None and callee(eqn) is not None:
        rule = _call
    if rule is None:
        place = source_line(eqn)
        raise ValueError(
            f"A `jax.Ref` is used in `{name_of(eqn)}`{place and f' ({place})'}, where "
            "its derivatives are not known. Use it outside of this, or compute with "
            "arrays in place of it, such as `x.at[i].set(y)`."
        )
    return rule


def _new_ref(_: Eqn, ins: list[_Operand]) -> list:
    """`r = new_ref x`: a cell with the value of `x`, such as 3."""
    return [_Cell(ins[0])]


def _empty_ref(eqn: Eqn, _: list[_Operand]) -> list:
    """`r = empty_ref`: a cell of the type of `r`, with zeros such as [0, 0]."""
    # No entry is defined, and zeros are as good as any.
    aval = eqn.outvars[0].aval
    return [_Cell(jnp.zeros(aval.shape, aval.dtype))]


def _freeze(_: Eqn, ins: list[_Operand]) -> list:
    """`x = freeze r`: the value in the cell, such as 3; nothing uses `r` later."""
    return [ins[0].value]


def _free(_: Eqn, __: list[_Operand]) -> list:
    """`free_ref r`: nothing, because nothing uses the cell later."""
    return []


def _get(eqn: Eqn, ins: list[_Operand]) -> list:
    """`x = get r *indices`: entries of the value. `r[1:]` of [1, 2, 3] is [2, 3]."""
    cell, *indices = ins
    return [_read_places(cell.value, _places(eqn, indices))]


def _swap(eqn: Eqn, ins: list[_Operand]) -> list:
    """`y = swap r x *indices`: writes `x`, and returns what was there.

    Of [1, 2], `r[0] = 5` leaves [5, 2], and `y` is 1.
    """
    cell, value, *indices = ins
    places = _places(eqn, indices)
    before = _read_places(cell.value, places)
    cell.value = _with_value(cell.value, places, value, adds=False)
    return [before]


def _add(eqn: Eqn, ins: list[_Operand]) -> list:
    """`addupdate r x *indices`: adds `x`, once for each time that an entry is named.

    Of [1, 2], with 5 at the indices [0, 0], it leaves [11, 2].
    """
    cell, value, *indices = ins
    cell.value = _with_value(cell.value, _places(eqn, indices), value, adds=True)
    return []


class _Inputs:
    """The inputs of an equation, of which some are cells."""

    def __init__(self, ins: list[_Operand]):
        self._ins = ins
        # A cell can be several inputs, and has one value.
        self.cells = [*{id(x): x for x in ins if isinstance(x, _Cell)}.values()]

    @property
    def values(self) -> list:
        return [cell.value for cell in self.cells]

    def run(
        self,
        closed: JaxprAndConsts,
        values: list[Value],
        ins: list[_Operand] | None = None,
    ) -> _State:
        """The values in the cells after a program, and its outputs.

        It begins with other `values` in cells of its own. `ins` replace the inputs.
        """
        cells = [*map(_Cell, values)]
        new = {id(cell): one for cell, one in safe_zip(self.cells, cells)}
        args = [new.get(id(x), x) for x in (self._ins if ins is None else ins)]
        outs = _evaluate_cells(closed.jaxpr, closed.consts, args)
        return _State([cell.value for cell in cells], outs)

    def write(self, values: list[Value]) -> None:
        for cell, value in safe_zip(self.cells, values):
            cell.value = value


def _call(eqn: Eqn, ins: list[_Operand]) -> list:
    """`*ys = jit[jaxpr] r *xs`: the equations of the program, with the same cells.

    A program that doubles `r` leaves 6 where 3 was.
    """
    closed = callee(eqn)
    assert closed is not None
    if not is_remat(eqn):
        return _evaluate_cells(closed.jaxpr, closed.consts, ins)
    # Run again for the derivative, it must read what was there before it wrote: values
    # of the cells go in, and their new values come out.
    inputs = _Inputs(ins)
    flat = [x.value if isinstance(x, _Cell) else x for x in ins]

    def run(*flat: Value) -> _State:
        # The same cell can be several inputs, which have the same value.
        begun = {id(x): value for x, value in safe_zip(ins, flat)}
        args = [x if isinstance(x, _Cell) else y for x, y in safe_zip(ins, flat)]
        return inputs.run(closed, [begun[id(cell)] for cell in inputs.cells], args)

    state = as_remat(eqn, run)(*flat)
    inputs.write(state.cells)
    return state.outs


def _cond(eqn: Eqn, ins: list[_Operand]) -> list:
    """`*ys = cond[branches] i r *xs`: the values of cells go through the branches.

    If the second of two writes 5 where 3 was, there is 3 for `i = 0` and 5 for 1.
    """
    index, *operands = ins
    inputs = _Inputs(operands)
    # Each branch returns the values of all cells, whether it wrote to them or not.
    branches = [functools.partial(inputs.run, x) for x in eqn.params["branches"]]
    state = lax.switch(index, branches, inputs.values)
    inputs.write(state.cells)
    return state.outs


def _scan_cells(eqn: Eqn, ins: list[_Operand]) -> list:
    """`*carry, *ys = scan[jaxpr] r *carry *xs`: the loop carries the values of cells.

    If a step adds its `x` to `r`, and `xs` is [1, 2, 3], it carries 0, 1, 3 and 6.
    """
    first, num = scan_sizes(eqn)
    consts, carry, xs = ins[:first], ins[first : first + num], ins[first + num :]
    inputs, closed = _Inputs(consts), eqn.params["jaxpr"]

    def step(state: _State, xs: list[Value]) -> tuple:
        ins = [*consts, *state.outs, *xs]
        cells, outs = inputs.run(closed, state.cells, ins)
        return _State(cells, outs[:num]), outs[num:]

    # Besides its own carry, the loop carries the values of the cells.
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    state, ys = lax.scan(step, _State(inputs.values, carry), xs, **options)
    inputs.write(state.cells)
    return [*state.outs, *ys]


def _while(eqn: Eqn, ins: list[_Operand]) -> list:
    """`*carry = while[cond, body] r *carry`: the loop carries the values of cells.

    If three steps double `r`, it carries 1, 2, 4 and 8.
    """
    params = eqn.params
    num, more = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body, carry = ins[:num], ins[num : num + more], ins[num + more :]
    inputs = _Inputs([*of_test, *of_body])

    def test(state: _State) -> Array:
        ins = [*of_test, *state.outs]
        (is_on,) = inputs.run(params["cond_jaxpr"], state.cells, ins).outs
        return is_on

    def body(state: _State) -> _State:
        ins = [*of_body, *state.outs]
        return inputs.run(params["body_jaxpr"], state.cells, ins)

    state = lax.while_loop(test, body, _State(inputs.values, carry))
    inputs.write(state.cells)
    return state.outs


_RULES: dict[str, Callable[[Eqn, list], list]] = {
    "addupdate": _add,
    "cond": _cond,
    "empty_ref": _empty_ref,
    "free_ref": _free,
    "freeze": _freeze,
    "get": _get,
    "new_ref": _new_ref,
    "scan": _scan_cells,
    "swap": _swap,
    "while": _while,
}


@dataclasses.dataclass
class _Place:
    """The entries of an array that an equation reads or writes.

    `starts`, `sizes` and `strides` cut a part out of it. If there is an `index`, it
    takes entries of this part; otherwise, the part has `shape` without axes of one
    entry.
    """

    starts: list
    sizes: list[int]
    strides: list[int]
    index: tuple | None
    shape: tuple[int, ...]

    @property
    def is_known(self) -> bool:
        return all(isinstance(start, int) for start in self.starts)

    def part(self, x: Array) -> Array:
        if (*self.sizes,) == x.shape:
            return x
        if not self.is_known:
            return lax.dynamic_slice(x, self.starts, self.sizes)
        sides = safe_zip(self.starts, self.sizes, self.strides)
        # One past the last entry, which a slice without entries does not have.
        limits = [
            start + (size - 1) * step + 1 if size > 0 else start
            for start, size, step in sides
        ]
        return lax.slice(x, self.starts, limits, self.strides)

    def with_part(self, x: Array, part: Array) -> Array:
        if (*self.sizes,) == x.shape:
            return part
        if {*self.strides} <= {1}:
            return lax.dynamic_update_slice(x, part, self.starts)
        sides = safe_zip(self.starts, self.sizes, self.strides)
        # With strides, the entries between stay: a scatter, as JAX has no such update.
        where = [start + jnp.arange(size) * step for start, size, step in sides]
        return x.at[jnp.ix_(*where)].set(part)


def _places(eqn: Eqn, indices: list[Value]) -> list[_Place]:
    """The places of an equation, each in the one before."""
    places = []
    for indexer in jtu.tree_unflatten(eqn.params["tree"], indices):
        place = _place(indexer) if type(indexer).__name__ == "NDIndexer" else None
        if place is None:
            raise ValueError(
                f"A `jax.Ref` is indexed by {indexer}, which is unknown here. Index it "
                "by integers, integer arrays and slices."
            )
        places.append(place)
    return places


def _place(indexer: Any) -> _Place | None:
    starts, sizes, strides, index, shape = [], [], [], [], []
    # Arrays of indices take entries of a part with all entries along their axes.
    has_arrays = indexer.int_indexer_shape != ()
    # An integer takes one entry of an axis, and a slice has a length of its own.
    for i, size in safe_zip(indexer.indices, indexer.shape):
        is_slice = hasattr(i, "stride")
        index.append(slice(None) if is_slice else i)
        if is_slice:
            starts.append(i.start)
            sizes.append(i.size)
            strides.append(i.stride)
            shape.append(i.size)
        else:
            starts.append(0 if has_arrays else i)
            sizes.append(size if has_arrays else 1)
            strides.append(1)
    # JAX cuts no part of a traced size, and with a traced start none with strides.
    if not all(isinstance(x, int) for x in (*sizes, *strides)):
        return None
    if not all(isinstance(start, int) for start in starts):
        if {*strides} > {1}:
            return None
        starts = [jnp.asarray(start, jnp.int32) for start in starts]
    return _Place(starts, sizes, strides, (*index,) if has_arrays else None, (*shape,))


def _read_places(x: Array, places: list[_Place]) -> Array:
    """The entries in the innermost of some places."""
    for place in places:
        part = place.part(x)
        x = part.reshape(place.shape) if place.index is None else part[place.index]
    return x


def _with_value(x: Array, places: list[_Place], value: Array, *, adds: bool) -> Array:
    """`x` with a value in, or added to, the innermost of some places."""
    if not places:
        return x + value if adds else value
    place, *inner = places
    part = place.part(x)
    if place.index is None:
        new = _with_value(part.reshape(place.shape), inner, value, adds=adds)
        new = new.reshape(part.shape)
    elif inner or not adds:
        new = _with_value(part[place.index], inner, value, adds=adds)
        new = part.at[place.index].set(new)
    else:
        # The same entry can be in it several times.
        new = part.at[place.index].add(value)
    return place.with_part(x, new)
