"""What primitives do: the only table of their names.

Whatever goes through a program asks here. With some flags of JAX, and in its newer
versions, primitives are objects of JAX's own classes in one primitive; these have the
names of the primitives that they replace.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


# The primitives of which something is known, a line for each:
#
# - what they do, in words that are explained below;
# - after a colon, all parameters that rules and views know: those that they use, and
#   those that do not change the linear function. An equation with any other, such as
#   one of a newer JAX, is declined. Without a colon, no rule or view is for it.
#
# `call`: runs a program, and has its derivative. `remat`: likewise, but computes the
# program again for the derivative. `expand`: likewise, but has to be asked for its
# program. `custom`: has a derivative of its own. `identity`: each output is the input
# in the same place.
# `flat`: has a derivative of zero wherever it exists. `entries`: each entry of the
# outputs depends on the same entry of the inputs only. `linear`: in all inputs
# together; `linear-0-2`: in some of them together, where others are indices;
# `bilinear`: in each of the two. `straight`: has no second derivative, as these, but is
# not transposed. `sum`: adds or subtracts. `product`: costs more than it writes.
_TABLE = """
abs entries
acos entries
acosh entries
add entries linear sum :
add_any entries linear sum :
and entries
asin entries
asinh entries
atan entries
atan2 entries
atanh entries
broadcast_in_dim linear : shape broadcast_dimensions sharding
call call
cbrt entries
ceil entries flat
checkpoint remat
clamp entries
closed_call call
complex straight
concatenate linear : dimension
cond : branches
conv_general_dilated bilinear product : window_strides padding lhs_dilation \
    rhs_dilation dimension_numbers feature_group_count batch_group_count precision \
    preferred_element_type out_sharding
convert_element_type entries linear : new_dtype weak_type sharding
copy entries linear :
copy_p entries linear :
core_call call
cos entries
cosh entries
cumsum linear
custom_jvp_call custom
custom_vjp_call custom
custom_vjp_call_jaxpr custom
digamma entries
div entries :
dot_general bilinear product : dimension_numbers precision preferred_element_type \
    out_sharding
dynamic_slice linear-0 : slice_sizes
dynamic_update_slice linear-0-1 :
einsum expand
eq entries
erf entries
erf_inv entries
erfc entries
eval_jaxpr call
exp entries
exp2 entries
expm1 entries
fft straight
floor entries flat
gather linear-0 : dimension_numbers slice_sizes mode fill_value indices_are_sorted \
    unique_indices
ge entries
gt entries
imag straight
integer_pow entries
is_finite entries
jit call
le entries
lgamma entries
log entries
log1p entries
logistic entries
lt entries
max entries
min entries
mul entries bilinear : out_dtype
name identity
ne entries
neg entries linear :
nextafter entries flat
not entries
optimization_barrier identity
or entries
pad linear
pcast entries straight
pjit call
pow entries
pvary entries straight
real straight
reduce_sum linear : axes out_sharding
rem entries
remat2 remat
reshape linear : new_sizes dimensions sharding
rev linear : dimensions
round entries flat
rsqrt entries
scan : jaxpr length reverse unroll num_consts num_carry linear _split_transpose ft_in \
    ft_out
scatter straight
scatter-add linear-0-2
select_n entries :
sign entries flat
sin entries
sinh entries
slice linear : start_indices limit_indices strides
split linear : sizes axis
sqrt entries
square entries
squeeze linear : dimensions
stack linear : axis
stop_gradient entries flat
sub entries linear sum :
tan entries
tanh entries
tile straight
transpose linear : permutation
xor entries
"""


def _parsed() -> Iterator[tuple[str, tuple[Sequence[str], frozenset[str] | None]]]:
    for line in _TABLE.strip().splitlines():
        (name, *words), *rest = (part.split() for part in line.split(":"))
        yield name, (words, frozenset(rest[0]) if rest else None)


_KNOWN = dict(_parsed())


def with_trait(word: str) -> frozenset[str]:
    """The names of the primitives that have a word of the table."""
    return frozenset(name for name, (words, _) in _KNOWN.items() if word in words)


def known_parameters(name: str) -> frozenset[str] | None:
    """The parameters of a primitive that rules and views know; None without these."""
    return _KNOWN[name][1] if name in _KNOWN else None


CUSTOM = with_trait("custom")
IDENTITIES = with_trait("identity")
LINEAR_IN_ALL = with_trait("linear")
LINEAR_IN_EACH = with_trait("bilinear")
LINEAR_IN_SOME = {
    name: tuple(map(int, word.split("-")[1:]))
    for name, (words, _) in _KNOWN.items()
    for word in words
    if word.startswith("linear-")
}
PRODUCTS = with_trait("product")
SUMS = with_trait("sum")


_CALLS, _EXPANDED, _REMAT = map(with_trait, ("call", "expand", "remat"))


_FLAT = with_trait("flat")


# JAX's primitive for objects of classes.
_OF_CLASSES = "call_hi_primitive"


# JAX's classes that stand for a primitive with other flags, or in older versions.
_CLASSES = {
    "CheckpointName": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "Einsum": "einsum",
    "RematTraced": "checkpoint",
}


def name_of(eqn: Any) -> str:
    """The name of the primitive of an equation, with any flags of JAX.

    `jax_remat3` and similar flags replace primitives by objects of JAX's own classes.
    """
    if eqn.primitive.name != _OF_CLASSES:
        return eqn.primitive.name
    kind = type(eqn.params["_prim"])
    unknown = f"{_OF_CLASSES}[{kind.__name__}]"
    is_of_jax = kind.__module__.startswith("jax.")
    return _CLASSES.get(kind.__name__, unknown) if is_of_jax else unknown


def is_unknown_object(eqn: Any) -> bool:
    """Whether an equation is an object of a class that no table knows.

    It may have a derivative in one mode only, and no transpose.
    """
    return name_of(eqn).startswith(_OF_CLASSES)


def parameters(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation, with any flags of JAX."""
    is_object = eqn.primitive.name == _OF_CLASSES
    return eqn.params["_prim"].params if is_object else eqn.params


def callee(eqn: Any) -> Any:
    """The closed jaxpr in place of which an equation stands; None for others.

    The derivative of the equation is that of the jaxpr. So functions with custom
    derivatives are not called in this sense.
    """
    name, params = name_of(eqn), parameters(eqn)
    if name in _EXPANDED:
        closed = _expanded(eqn)
    elif name in _CALLS or name in _REMAT:
        closed = _as_closed(params["jaxpr" if "jaxpr" in params else "call_jaxpr"])
    else:
        return None
    if closed is None:
        return None
    # Some types of JAX have neither.
    types = lambda atoms: [
        [getattr(x.aval, attribute, None) for attribute in ("shape", "dtype")]
        for x in atoms
    ]
    jaxpr = closed.jaxpr
    fits = types(jaxpr.invars) == types(eqn.invars)
    fits = fits and types(jaxpr.outvars) == types(eqn.outvars)
    # An object may hide the effects of its program.
    return closed if fits and bool(jaxpr.effects) <= bool(eqn.effects) else None


def _expanded(eqn: Any) -> Any:
    """The program that an object stands for."""
    kind = eqn.params["_prim"]

    def run(*ins: Any) -> list:
        return jtu.tree_leaves(kind.expand(*jtu.tree_unflatten(kind.in_tree, ins)))

    return jax.make_jaxpr(run)(*(atom.aval for atom in eqn.invars))


def _as_closed(x: Any) -> Any:
    """A jaxpr, or what was traced to one, as a closed jaxpr; None for others."""
    if isinstance(x, jax.stages.Traced):
        x = x.jaxpr
    if isinstance(x, jex.ClosedJaxpr):
        return x
    return jex.ClosedJaxpr(x, ()) if isinstance(x, jex.Jaxpr) else None


def is_remat(eqn: Any) -> bool:
    """Whether an equation computes its program again for the derivative."""
    return name_of(eqn) in _REMAT


def as_remat(
    eqn: Any, run: Callable[..., Any], num_more: int = 0
) -> Callable[..., Any]:
    """`run`, rematerialised as the program of an equation is.

    It takes the inputs of the equation and so many more.
    """
    params = parameters(eqn)
    prevent_cse, policy = params.get("prevent_cse", True), params["policy"]
    if isinstance(prevent_cse, tuple):  # One for each input.
        prevent_cse = (*prevent_cse, *(True,) * num_more)
    return jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)


def is_flat(eqn: Any) -> bool:
    """Whether the derivative of an equation is zero or does not exist."""
    if name_of(eqn) in _FLAT:
        return True
    return not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)


def inner_programs(eqn: Any) -> Iterator[Any]:
    """The closed jaxprs that an equation has in its parameters, or stands for."""
    if name_of(eqn) in _EXPANDED:
        yield _expanded(eqn)
    for value in parameters(eqn).values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            closed = _as_closed(x)
            if closed is not None:
                yield closed


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs of these programs, without constants."""
    return (closed.jaxpr for closed in inner_programs(eqn))


def programs_in(closed: Any) -> Iterator[Any]:
    """A closed jaxpr, and all in it."""
    yield closed
    for eqn in closed.jaxpr.eqns:
        for inner in inner_programs(eqn):
            yield from programs_in(inner)


def equations_in(closed: Any) -> Iterator[Any]:
    """The equations of a closed jaxpr, and of all in it."""
    return (eqn for part in programs_in(closed) for eqn in part.jaxpr.eqns)


def constants(closed: Any) -> Iterator[Any]:
    """All arrays that are part of a closed jaxpr."""
    for part in programs_in(closed):
        yield from part.consts
        for eqn in part.jaxpr.eqns:
            for atom in eqn.invars:
                if isinstance(atom, jex.Literal):
                    is_array = isinstance(atom.val, jax.Array)
                    yield atom.val if is_array else np.asarray(atom.val)
