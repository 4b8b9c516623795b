"""Programs whose products with the weights of experts can be mapped.

In `jax.lax.ragged_dot`, consecutive rows of the left side meet the matrix of one of
several groups. `jax.vmap` maps it only if all of its inputs are mapped, and so not over
examples that share weights. In its place, programs here have a product of their own. It
is a primitive so that rules find it. Anything else, such as its derivative, is that of
a masked product, as which JAX runs it on CPUs, too.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, Integer, Num

from .jaxpr_types import DType, Eqn, Jaxpr, JaxprAndConsts, Params, Value
from .jaxprs import primitive_names
from .trees import safe_zip
from .versions import Closed, with_consts


class RaggedAxes(NamedTuple):
    """The axes of the two sides of a product with the weights of groups.

    - `contracted`: those that are summed over, of each side.
    - `rows`: the axis of the left side whose entries belong to groups.
    - `groups`: the axis of the right side with the groups.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    rows: int
    groups: int


def groups_of_rows(sizes: Value, num: int) -> Integer[Array, " _"]:
    """The group of each of some rows; the number of groups for those in none.

    The dtype of `sizes` may be too small for the number of rows. They may be a constant
    of a program, which JAX keeps as no array of its own.
    """
    # Sizes 2, 0, 1 end at 2, 2, 3: rows 0 to 3 are beyond 0, 0, 2, 3 of these ends,
    # and so in the groups 0, 0, 2 and none.
    ends = jnp.cumsum(jnp.asarray(sizes).astype(jnp.int32))
    return jnp.sum(
        jnp.arange(num, dtype=ends.dtype)[:, None] >= ends[None],
        axis=1,
        dtype=jnp.int32,
    )


def members(which: Integer[Array, " rows"], num: int) -> Bool[Array, "{num} rows"]:
    """Whether each row is in each group."""
    return which[None] == jnp.arange(num, dtype=which.dtype)[:, None]


def product_with_groups(
    lhs: Num[Array, "..."],
    rhs: Num[Array, "..."],
    which: Integer[Array, " rows"],
    *,
    axes: RaggedAxes,
    precision: lax.PrecisionLike,
    preferred_element_type: DType | None,
) -> Num[Array, "..."]:
    """The product of each row with the matrix of its group, and zero without one.

    Rows 1, 2, 3 in groups 0, 0, 1 with the matrices 10 and 20 give 10, 20, 60.
    """
    without_rows = [axis for axis in range(lhs.ndim) if axis != axes.rows]
    is_member = members(which, rhs.shape[axes.groups])
    is_in = jnp.expand_dims(is_member, _after(without_rows))
    # `[groups, *lhs]`, of which each row is zero in all groups but its own: the product
    # sums over groups.
    separate = jnp.where(is_in, lhs[None], jnp.zeros((), lhs.dtype))
    of_left, of_right = axes.contracted
    contracted = (0, *(axis + 1 for axis in of_left)), (axes.groups, *of_right)
    return lax.dot_general(
        separate,
        rhs,
        (contracted, ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _after(axes: list[int]) -> list[int]:
    """These axes of an array with one more in front."""
    return [axis + 1 for axis in axes]


def _ragged_dot(lhs: Value, rhs: Value, sizes: Value, **params: Any) -> Array:
    which = groups_of_rows(sizes, lhs.shape[params["axes"].rows])
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    return product_with_groups(lhs, rhs, which, **params)


# Its parameters are those of `product_with_groups`.
RAGGED_DOT = jex.Primitive("ragged_dot")


def _type_of(*avals: Any, **params: Any) -> Any:
    (aval,) = jax.make_jaxpr(functools.partial(_ragged_dot, **params))(*avals).out_avals
    return aval


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value | ad.Zero], **params: Any
) -> Any:
    # Integers have no tangents.
    moved = [i for i in (0, 1) if not isinstance(tangents[i], ad.Zero)]

    def run(*values: Any) -> Array:
        ins = [*primals]
        for i, x in safe_zip(moved, values):
            ins[i] = x
        return _ragged_dot(*ins, **params)

    of = lambda arrays: tuple(arrays[i] for i in moved)
    return jax.jvp(run, of(primals), of(tangents))


def _vmapped(
    args: Sequence[Value], in_axes: Sequence[int | None], **params: Any
) -> Any:
    # The masked product can be mapped over any of its inputs.
    return jax.vmap(functools.partial(_ragged_dot, **params), in_axes)(*args), 0


RAGGED_DOT.def_impl(_ragged_dot)
RAGGED_DOT.def_abstract_eval(_type_of)
ad.primitive_jvps[RAGGED_DOT] = _jvp
batching.primitive_batchers[RAGGED_DOT] = _vmapped
mlir.register_lowering(RAGGED_DOT, mlir.lower_fun(_ragged_dot, multiple_results=False))


# The primitive that is replaced.
_OF_JAX = "ragged_dot_general"


def with_mapped_products(closed: JaxprAndConsts) -> JaxprAndConsts:
    """A closed jaxpr in which `jax.vmap` maps ragged products.

    Those are left as they are that have axes of a batch, or groups along an axis that
    is summed over, and those in the rules of custom derivatives.
    """
    # Most programs have none, which the names of their primitives tell at once.
    if _OF_JAX not in primitive_names(closed):
        return closed
    jaxpr = _replaced(closed.jaxpr)
    is_same = jaxpr is closed.jaxpr
    return closed if is_same else with_consts(jaxpr, closed.consts)


def _replaced(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr with these products in place of JAX's, also in all that it calls."""
    eqns = [*map(_equation, jaxpr.eqns)]
    if all(new is old for new, old in safe_zip(eqns, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _equation(eqn: Eqn) -> Eqn:
    if eqn.primitive.name == _OF_JAX:
        params = _params(eqn)
        if params is None:
            return eqn
        return eqn.replace(primitive=RAGGED_DOT, params=params)
    params = {name: _with_products(value) for name, value in eqn.params.items()}
    is_same = all(value is eqn.params[name] for name, value in params.items())
    return eqn if is_same else eqn.replace(params=params)


def _with_products(value: Any) -> Any:
    """A parameter of an equation, with these products in the programs that it has."""
    # Newer versions of JAX have one type for both, which keeps its constants.
    if isinstance(value, jex.Jaxpr):
        return _replaced(value)
    if isinstance(value, Closed):
        return with_mapped_products(value)
    if type(value) in (list, tuple):
        parts = [*map(_with_products, value)]
        is_same = all(new is old for new, old in safe_zip(parts, value))
        return value if is_same else type(value)(parts)
    return value


def _params(eqn: Eqn) -> Params | None:
    """The parameters of the product in place of an equation; None if there is none."""
    params = eqn.params
    numbers = params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    rows, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    # A setting of another JAX may mean anything, unless it is None.
    handled = {"group_offset", "precision", "preferred_element_type"}
    unknown = {name: x for name, x in params.items() if name not in handled}
    del unknown["ragged_dot_dimension_numbers"]
    has_unknown = any(x is not None for x in unknown.values())
    is_plain = len(eqn.invars) == 3 and params["group_offset"] is None
    is_plain = is_plain and len(rows) == len(groups) == 1 and not (batch[0] or batch[1])
    if has_unknown or not is_plain or eqn.invars[2].aval.ndim != 1:
        return None
    of_left, of_right = (tuple(int(axis) for axis in part) for part in contracted)
    axes = RaggedAxes((of_left, of_right), int(rows[0]), int(groups[0]))
    if axes.rows in of_left or axes.groups in of_right:
        return None
    settings = ("precision", "preferred_element_type")
    return {"axes": axes, **{name: params[name] for name in settings}}
