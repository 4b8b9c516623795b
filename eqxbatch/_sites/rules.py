"""How a parameter meets the rest of an equation that is linear in it.

At `y = w(a)`, the gradient of anything with respect to `w` is a contraction of the
operand `a` and the cotangent `d` of `y`. A rule names the axes of both and of `w`: the
gradient is the sum over all axes that `w` does not have.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Integer

from .._base.dtypes import is_complex
from .._base.jaxpr_types import Eqn
from .._base.jaxprs import literal
from .._base.primitives import SUMS
from .._base.ragged import groups_of_rows, product_with_groups, RaggedAxes
from .._base.structs import full_varying_as
from .._base.trees import safe_zip
from .convolution import convolved_kernel
from .site import AxisNames, leaf_rule, numbered, Rule, sizes_by_name
from .views import Values


def find_rule(eqn: Eqn, index: int) -> Rule | None:
    """The rule for the input `index` of an equation; None if there is none."""
    name = eqn.primitive.name
    rule = _RULES[name](eqn, index) if name in _RULES else None
    if rule is None:
        return None
    # Two rules of a primitive differ only by the input, by types and by parameters.
    avals = [str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)]
    return dataclasses.replace(rule, key=f"{name}[{index}]({avals}, {eqn.params})")


def _shapes(eqn: Eqn) -> list[tuple[int, ...]]:
    return [var.aval.shape for var in (*eqn.invars, *eqn.outvars)]


def _binary_op(eqn: Eqn, index: int) -> Callable[[Array, Array], Array]:
    def op(a: Array, w: Array) -> Array:
        ins = (w, a) if index == 0 else (a, w)
        return eqn.primitive.bind(*ins, **eqn.params)

    return op


def _dot_general(eqn: Eqn, index: int) -> Rule:
    """A matrix product, with any contracted and batch axes.

    The axes of the inputs are `c` where they are contracted, `b` where both have them,
    and `l` or `r` where only the left or the right one has them.

    For `y = x @ w` with `x` of shape `(5, 3)` and `w` of shape `(3, 2)`, the operand
    `x` has the axes `(l0, c0)`, the cotangent `(l0, r1)` and `w` `(c0, r1)`: its
    gradient is the sum over the 5 positions `l0`, `einsum("lc,lr->cr", x, d)`.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    left, right, _ = _shapes(eqn)
    # Axes with one name are one axis: JAX puts those of the result in a fixed order.
    names: list[AxisNames] = []
    for side, shape in enumerate((left, right)):
        named = {axis: f"b{i}" for i, axis in enumerate(batched[side])}
        named.update((axis, f"c{i}") for i, axis in enumerate(contracted[side]))
        axes = range(len(shape))
        names.append(tuple(named.get(axis, f"{'lr'[side]}{axis}") for axis in axes))
    free = (name for axes in names for name in axes if name[0] in "lr")
    return Rule(
        kind="dot_general",
        op=_binary_op(eqn, index),
        operand=lambda ins: ins[1 - index],
        a_axes=names[1 - index],
        d_axes=(*numbered("b", len(batched[0])), *free),
        w_axes=names[index],
        sizes=sizes_by_name(names[0], left) | sizes_by_name(names[1], right),
    )


def _elementwise(eqn: Eqn, index: int) -> Rule | None:
    """A sum, difference, product or quotient, entry by entry.

    The axes are `m`, or `one` where an input has size 1 and is broadcast.

    For `y = w * x` with `w` of shape `(1, 4)` and `x` of shape `(3, 4)`, the operand
    `x` has the axes `(m0, m1)`, as the cotangent, and `w` has `(one0, m1)`: its
    gradient is `einsum("mn,mn->n", x, d)[None]`. In `y = w + x`, there is no operand,
    and the gradient is the sum of `d` over the first axis.
    """
    name = eqn.primitive.name
    shapes = _shapes(eqn)
    out = shapes[-1]
    sizes = sizes_by_name(numbered("m", len(out)), out)
    # An input may be a scalar, or have axes of size 1 that are broadcast.
    named = []
    for shape in shapes[:2]:
        axis = lambda i, size: f"m{i}" if size == out[i] else f"one{i}"
        named.append(tuple(axis(i, size) for i, size in enumerate(shape)))
        sizes |= sizes_by_name(named[-1], shape)
    d_axes, w_axes, a_axes = numbered("m", len(out)), named[index], named[1 - index]
    # The derivative of a sum needs no other value, so there is no operand.
    if name in SUMS:
        scale = -1.0 if name == "sub" and index == 1 else 1.0
        repeat = lambda _, w: jnp.broadcast_to(-w if scale < 0 else w, out)
        return Rule(name, repeat, None, (), d_axes, w_axes, sizes, scale=scale)
    op, operand = _binary_op(eqn, index), lambda ins: ins[1 - index]
    is_of_inverse = name == "div" and index == 1
    if is_of_inverse and is_complex(eqn.outvars[0].aval):
        return None
    # A quotient is a product with one over the divisor.
    if name == "div":
        op = lambda a, w: w * a
        operand = operand if is_of_inverse else lambda ins: 1 / ins[1]
    rule = Rule(name, op, operand, a_axes, d_axes, w_axes, sizes)
    return dataclasses.replace(rule, is_of_inverse=is_of_inverse)


def _in_place(eqn: Eqn, index: int) -> Rule | None:
    """A parameter that is put into a larger array at a fixed place.

    There is no operand: the gradient is the part of the cotangent at this place. For
    `y = concatenate([w, x])` with `w` of shape `(2,)`, it is `d[:2]`.
    """
    name = eqn.primitive.name
    starts = eqn.invars[2:] if name == "dynamic_update_slice" else []
    if not all(isinstance(atom, jex.Literal) for atom in starts):
        return None

    def put(w: Array) -> Array:
        # All but the parameter is zero, except for literals that say where it goes.
        ins = [
            literal(atom) if atom in starts else full_varying_as(atom.aval, 0)
            for atom in eqn.invars
        ]
        ins[index] = w
        return eqn.primitive.bind(*ins, **eqn.params)

    aval = eqn.invars[index].aval
    take = lambda d: jax.linear_transpose(put, full_varying_as(aval, 0))(d)[0]
    changes = {"op": lambda _, w: put(w), "arrange": take, "outputs": ()}
    return dataclasses.replace(leaf_rule(aval.shape), kind=name, **changes)


def _select(eqn: Eqn, index: int) -> Rule | None:
    """Elementwise selection that depends on the example.

    The operand is 1 where the parameter is selected, and 0 elsewhere. For
    `y = where(x > 0, w, 0)`, the gradient is `(x > 0) * d`.
    """
    if index == 0:
        return None
    which, out = eqn.invars[0].aval, eqn.outvars[0].aval
    rule = leaf_rule(out.shape)

    def operand(ins: Values) -> Array:
        case = ins[0].astype(jnp.int32)
        return (case == index - 1).astype(out.dtype)

    return dataclasses.replace(
        rule,
        kind=eqn.primitive.name,
        op=lambda a, w: a * w,
        operand=operand,
        a_axes=rule.d_axes if which.shape else (),
    )


def _gather(eqn: Eqn, index: int) -> Rule | None:
    """Rows of a table, selected along one of its axes, as in an embedding.

    The operand has the tokens, and stands for one-hot vectors along the axis `v`. For a
    table of 100 rows of 8 and tokens of shape `(5,)`, these have the axis `t0`, and the
    gradient adds the row `d[t]` of the cotangent to the row `tokens[t]`, for each `t`.
    """
    table, indices, _ = _shapes(eqn)
    params = eqn.params
    numbers = params["dimension_numbers"]
    # `jax.vmap` over tables gives batching dimensions.
    has_batch = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    if index != 0 or has_batch:
        return None
    sizes = params["slice_sizes"]
    token = _axis_of_rows(params, table)
    if token is None:
        return None
    # If an index breaks the promise to be in bounds, JAX's gradient drops it, too.
    is_dropping = params["mode"] != lax.GatherScatterMode.CLIP
    # An index may have a column for each of several axes.
    column = numbers.start_index_map.index(token)
    token_size = table[token]

    def operand(ins: Values) -> Integer[Array, "..."]:
        return _selected_rows(ins[1][..., column], token_size, drops=is_dropping)

    def op(tokens: Array, w: Array) -> Array:
        # If only one axis is indexed, the others start at zero.
        columns = range(len(numbers.start_index_map))
        where = jnp.stack([tokens if i == column else 0 * tokens for i in columns], -1)
        dropping = lax.GatherScatterMode.FILL_OR_DROP
        return lax.gather(
            w,
            where,
            numbers,
            sizes,
            mode=dropping if is_dropping else lax.GatherScatterMode.CLIP,
            # What is dropped counts for nothing in products with a direction.
            fill_value=0,
        )

    rule = _row_rule("gather", op, operand, table, token)
    # Axes of the result are those of tokens, and, at `offset_dims`, those of a row.
    batch_axes = numbered("t", len(indices) - 1)
    collapsed = numbers.collapsed_slice_dims
    offsets = iter(axis for axis in range(len(table)) if axis not in collapsed)
    batch = iter(batch_axes)
    d_axes = tuple(
        rule.d_axes[next(offsets)] if position in numbers.offset_dims else next(batch)
        for position in range(len(eqn.outvars[0].aval.shape))
    )
    return dataclasses.replace(
        rule,
        a_axes=batch_axes,
        d_axes=d_axes,
        sizes=rule.sizes | sizes_by_name(batch_axes, indices[:-1]),
        drops=is_dropping,
    )


def _ragged_dot(eqn: Eqn, index: int) -> Rule | None:
    """The matrices of groups, as those of experts, each for the positions that meet it.

    No position meets more than one of them. The axes are `group`, and those of a matrix
    product: `c` where they are contracted, `l` and `r` where only one side has them.

    For 5 tokens `x` of 3 numbers and 4 experts `w` of shape `(4, 3, 2)`, the operand
    has the axes `(l0, c0)`, the cotangent `(l0, r2)`, and `w` `(group, c0, r2)`. With
    `m` of shape `(5, 4)`, one where a token meets an expert, the gradient is
    `einsum("tc,tr,tg->gcr", x, d, m)`.
    """
    # As tokens, a parameter has no rule.
    if index != 1:
        return None
    axes: RaggedAxes = eqn.params["axes"]
    left, right, _, _ = _shapes(eqn)
    names: list[AxisNames] = []
    for side, (shape, summed) in enumerate(safe_zip((left, right), axes.contracted)):
        # As in a matrix product. Only the matrices have an axis of groups: `which` says
        # which of them a row meets.
        named = {axis: f"c{i}" for i, axis in enumerate(summed)}
        named |= {axes.groups: "group"} if side == 1 else {}
        sides = range(len(shape))
        names.append(tuple(named.get(axis, f"{'lr'[side]}{axis}") for axis in sides))
    num, params = left[axes.rows], eqn.params

    # Groups differ between examples, so they come with the operand.
    def op(a: tuple[Array, Array], w: Array) -> Array:
        lhs, which = a
        return product_with_groups(lhs, w, which, **params)

    return Rule(
        kind="ragged_dot",
        op=op,
        operand=lambda ins: ins[0],
        a_axes=names[0],
        d_axes=tuple(name for side in names for name in side if name[0] in "lr"),
        w_axes=names[1],
        sizes=sizes_by_name(names[0], left) | sizes_by_name(names[1], right),
        group="group",
        # From the sizes of groups to the group of each row.
        which=lambda ins: groups_of_rows(ins[2], num),
        which_axes=(names[0][axes.rows],),
    )


def _axis_of_rows(params: dict[str, Any], table: tuple[int, ...]) -> int | None:
    """The axis of a table along which rows are selected; None if not exactly one."""
    index_map = params["dimension_numbers"].start_index_map
    sizes = params["slice_sizes"]
    selected = [axis for axis, size in enumerate(sizes) if size != table[axis]]
    if not selected:  # A table with one row: any axis of size 1 will do.
        selected = [axis for axis in index_map if table[axis] == 1][:1]
    whole = [axis for axis in index_map if axis not in selected]
    mode, modes = params["mode"], lax.GatherScatterMode
    if mode not in (modes.FILL_OR_DROP, modes.CLIP, modes.PROMISE_IN_BOUNDS):
        return None
    if len(selected) != 1 or sizes[selected[0]] != 1:
        return None
    # Along the others, rows are as long as the table. Their index is clipped to 0, but
    # an index that is dropped would drop the row, which tokens do not tell.
    if whole and mode == modes.FILL_OR_DROP:
        return None
    return selected[0] if selected[0] in index_map else None


def _selected_rows(
    tokens: Integer[Array, "..."], num_rows: int, *, drops: bool
) -> Integer[Array, "..."]:
    """The rows that tokens of any dtype select; `num_rows` stands for no row.

    They are compared in their own dtype. It may be too small for the number of rows,
    and another dtype may be too small for the tokens.
    """
    last = min(num_rows - 1, jnp.iinfo(tokens.dtype).max)
    rows = jnp.clip(tokens, 0, last).astype(jnp.int32)
    if not drops:
        return rows
    is_in = (tokens >= 0) & (tokens <= last)
    return jnp.where(is_in, rows, num_rows)


def _row_rule(
    kind: str, op: Callable, operand: Callable, table: tuple[int, ...], token: int
) -> Rule:
    """The rule for one row of a table, which a token selects along an axis."""
    axes = numbered("w", len(table))
    named = lambda name: (*axes[:token], name, *axes[token + 1 :])
    return Rule(
        kind=kind,
        op=op,
        operand=operand,
        a_axes=(),
        d_axes=named("one"),
        w_axes=named("v"),
        sizes={"one": 1, **sizes_by_name(named("v"), table)},
        token="v",
    )


def _dynamic_slice(eqn: Eqn, index: int) -> Rule | None:
    """One row of a table, as in the embedding of a single token.

    For row 2 of a table of shape `(4, 3)`, the operand is the token 2 and has no axes,
    the cotangent has `(one, w1)`, and the table `(v, w1)`: the gradient is `d` in row 2
    and zero elsewhere.
    """
    table = eqn.invars[0].aval.shape
    sizes = eqn.params["slice_sizes"]
    selected = [axis for axis, size in enumerate(sizes) if size != table[axis]]
    # Of a table with a single row, any axis of size 1 will do.
    if not selected and 1 in table:
        selected = [table.index(1)]
    if index != 0 or len(selected) != 1 or sizes[selected[0]] != 1:
        return None
    (token,) = selected

    def operand(ins: Values) -> Integer[Array, ""]:
        return _selected_rows(ins[1 + token], table[token], drops=False)

    def op(row: Array, w: Array) -> Array:
        return lax.dynamic_slice_in_dim(w, row, 1, token)

    return _row_rule("dynamic_slice", op, operand, table, token)


# Products whose positions all meet the weight, unlike those of groups.
DENSE_PRODUCTS = ("dot_general", "conv_general_dilated")


_RULES: dict[str, Callable[[Any, int], Rule | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": convolved_kernel,
    "mul": _elementwise,
    "div": _elementwise,
    **dict.fromkeys(SUMS, _elementwise),
    "gather": _gather,
    "ragged_dot": _ragged_dot,
    "dynamic_slice": _dynamic_slice,
    "concatenate": _in_place,
    "stack": _in_place,
    "dynamic_update_slice": _in_place,
    "select_n": _select,
}
