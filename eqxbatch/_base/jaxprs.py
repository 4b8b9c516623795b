"""Jaxprs: what primitives do, how programs run, and which derivatives they have.

Whatever goes through a program asks here what a primitive is: this is the only table of
their names. With some flags of JAX, and in its newer versions, primitives are objects
of JAX's own classes in one primitive; these have the names of the primitives that they
replace.

Jaxprs are evaluated as they are, or with some equations replaced.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import jaxlib
import numpy as np
from jaxtyping import Array, PyTree

from .trees import safe_zip, with_shapes_of_arrays
from .versions import Closed, made_varying, scan_sizes, varying, with_consts


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
ragged_dot bilinear product : axes precision preferred_element_type
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


def unknown_parameters(eqn: Any) -> str:
    """The parameters of an equation that are unknown to rules and views.

    Parameters with unknown values are included. Empty if there are none, or if there is
    no rule for the equation at all.
    """
    _, known = _KNOWN.get(eqn.primitive.name, ((), None))
    if known is None:
        return ""
    unknown = sorted({*eqn.params} - known)
    # The dtype of a product may differ from that of its factors.
    if eqn.params.get("out_dtype") is not None:
        unknown.append("out_dtype")
    return ", ".join(f"`{name}`" for name in unknown)


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
    if isinstance(x, Closed):
        return x
    if not isinstance(x, jex.Jaxpr):
        return None
    # Programs of `jax.custom_derivatives.linear_call` have constants that are inputs.
    return with_consts(x, [None] * len(x.constvars))


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


def literal(atom: Any) -> Array:
    """The value of a literal in its dtype, which a Python number does not have."""
    return jnp.asarray(atom.val, atom.aval.dtype)


def axis_names(jaxpr: Any) -> set:
    """The axis names that a jaxpr uses, of an enclosing `vmap` or mesh."""
    return {effect.name for effect in jaxpr.effects if hasattr(effect, "name")}


def depends(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend on marked inputs.

    The result may include outputs that do not, because inner jaxprs are not inspected.
    """
    dependent = _marked(jaxpr.invars, inputs)
    for eqn in dependent_equations(jaxpr, inputs):
        dependent.update(eqn.outvars)
    return [not isinstance(x, jex.Literal) and x in dependent for x in jaxpr.outvars]


def dependent_equations(jaxpr: Any, inputs: Sequence[bool]) -> Iterator[Any]:
    """The equations of a jaxpr that depend on marked inputs, as in `depends`."""
    dependent = _marked(jaxpr.invars, inputs)
    is_dependent = lambda x: not isinstance(x, jex.Literal) and x in dependent
    for eqn in jaxpr.eqns:
        if any(map(is_dependent, eqn.invars)):
            dependent.update(eqn.outvars)
            yield eqn


def run_jaxpr(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr unchanged."""
    return jex.jaxpr_as_fun(with_consts(jaxpr, consts))(*args)


def evaluate_with(
    jaxpr: Any,
    consts: list,
    args: list,
    replace: Callable[[int, Any], Callable[[list], list] | None],
) -> list:
    """Evaluates a jaxpr with some equations replaced.

    `replace(index, eqn)` returns a function from the inputs of the equation to its
    outputs, or None to keep the equation. All other equations run as JAX itself would
    run them, with all custom derivatives.

    The jaxpr must have no effects, because these belong to the whole jaxpr.
    """
    values = dict(safe_zip(jaxpr.constvars, consts))
    values.update(safe_zip(jaxpr.invars, args))

    def read(var: Any) -> Any:
        return literal(var) if isinstance(var, jex.Literal) else values[var]

    pending: list = []
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    used = {atom for atom in atoms if not isinstance(atom, jex.Literal)}

    def flush() -> None:
        if pending:
            outs = [var for eqn in pending for var in eqn.outvars if var in used]
            results = run_equations(jaxpr, pending, outs, values)
            values.update(safe_zip(outs, results))
            pending.clear()

    for index, eqn in enumerate(jaxpr.eqns):
        run = replace(index, eqn)
        if run is None:
            pending.append(eqn)
            continue
        flush()
        results = run([read(var) for var in eqn.invars])
        values.update(safe_zip(eqn.outvars, results))
    flush()
    return [read(var) for var in jaxpr.outvars]


def run_equations(jaxpr: Any, eqns: list, outs: list, values: dict) -> list:
    """The values of `outs` after some consecutive equations of a jaxpr."""
    made: set = set()
    ins: dict = {}
    for eqn in eqns:
        for var in eqn.invars:
            if not isinstance(var, jex.Literal) and var not in made:
                ins[var] = None
        made.update(eqn.outvars)
    part = jaxpr.replace(constvars=[], invars=list(ins), outvars=outs, eqns=list(eqns))
    return run_jaxpr(part, [], [values[v] for v in ins])


def run_equation(jaxpr: Any, eqn: Any, outs: list) -> Callable[..., list]:
    """An equation as a function of its inputs that returns `outs`.

    It runs as JAX itself would run it, with all custom derivatives.
    """

    def run(*ins: Any) -> list:
        if not any(inner_jaxprs(eqn)) and not name_of(eqn).startswith("custom"):
            results = eqn.primitive.bind(*ins, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
            return [results[eqn.outvars.index(var)] for var in outs]
        pairs = safe_zip(eqn.invars, ins)
        values = {atom: x for atom, x in pairs if not isinstance(atom, jex.Literal)}
        return run_equations(jaxpr, [eqn], outs, values)

    return run


_OTHERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (jax.__file__, jaxlib.__file__, os.path.dirname(__file__))
)


def source_line(eqn: Any) -> str:
    """The source of an equation, as `file:line in function`; empty if unknown."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not os.path.abspath(frame.file_name).startswith(_OTHERS):
            file, function = os.path.basename(frame.file_name), frame.function_name
            return f"{file}:{frame.line_num} in `{function}`"
    return ""


def first_use(jaxpr: Any, var: Any) -> tuple[int, ...]:
    """The position of a variable's first use, comparable within one jaxpr."""
    for index, eqn in enumerate(jaxpr.eqns):
        positions = [i for i, atom in enumerate(eqn.invars) if atom is var]
        if not positions:
            continue
        closed = callee(eqn)
        if closed is None:
            return (index,)
        inner = closed.jaxpr
        return (index, *min(first_use(inner, inner.invars[i]) for i in positions))
    return (len(jaxpr.eqns),)


def uses_dtype(jaxpr: Any, dtype: Any) -> bool:
    """Whether a jaxpr uses a dtype."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars]
    atoms += [var for eqn in jaxpr.eqns for var in eqn.outvars]
    if any(getattr(atom.aval, "dtype", None) == dtype for atom in atoms):
        return True
    inner = (sub for eqn in jaxpr.eqns for sub in inner_jaxprs(eqn))
    return any(uses_dtype(sub, dtype) for sub in inner)


def live_variables(jaxpr: Any, outs: Sequence[bool]) -> set:
    """The variables in which some outputs have a derivative, as far as is known."""
    live = _marked(jaxpr.outvars, outs)
    for eqn in reversed(jaxpr.eqns):
        of_outs = [var in live for var in eqn.outvars]
        if any(of_outs):
            live |= _marked(eqn.invars, _live_inputs(eqn, of_outs))
    return live


def _marked(atoms: list, marks: Sequence[bool]) -> set:
    """The marked variables; literals are none."""
    pairs = safe_zip(atoms, marks)
    return {x for x, is_one in pairs if is_one and not isinstance(x, jex.Literal)}


def _live_inputs(eqn: Any, outs: list[bool]) -> list[bool]:
    name, closed = name_of(eqn), callee(eqn)
    if is_flat(eqn):
        return [False for _ in eqn.invars]
    if closed is not None:
        live = live_variables(closed.jaxpr, outs)
        return [var in live for var in closed.jaxpr.invars]
    if name == "scan":
        return live_in_scan(eqn, outs)[1]
    if name == "cond":
        jaxprs = [closed.jaxpr for closed in eqn.params["branches"]]
        marked = [(jaxpr.invars, live_variables(jaxpr, outs)) for jaxpr in jaxprs]
        by_input = safe_zip(*([v in live for v in ins] for ins, live in marked))
        return [False, *map(any, by_input)]
    if name in IDENTITIES:
        return outs
    return [jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars]


def live_in_scan(eqn: Any, outs: list[bool]) -> tuple[list[bool], list[bool]]:
    """Which outputs and inputs of the body of a scan are differentiated."""
    jaxpr, (first, num) = eqn.params["jaxpr"].jaxpr, scan_sizes(eqn)
    outs = [*outs]
    while True:
        live = live_variables(jaxpr, outs)
        inputs = [var in live for var in jaxpr.invars]
        # The carry of one step is the input of the next.
        carried = [a or b for a, b in zip(outs[:num], inputs[first:], strict=False)]
        if carried == outs[:num]:
            return outs, inputs
        outs[:num] = carried


def vary(x: Array, names: frozenset) -> Array:
    """Marks `x` as varying over mesh axes inside `jax.shard_map`.

    Its derivative is then that of one device, not the sum over all devices.
    """
    missing = names - varying(jax.typeof(x))
    return made_varying(x, tuple(missing)) if missing else x


def full_varying_as(aval: Any, value: int | float) -> Array:
    """An array filled with a number, with the type of a struct."""
    return vary(jnp.full(aval.shape, value, aval.dtype), varying(aval))


def is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def array_structs(output: PyTree) -> list[jax.ShapeDtypeStruct]:
    """The arrays of an output, as shapes and dtypes."""
    return [x for x in jtu.tree_leaves(output) if is_struct(x)]


def with_arrays(output: PyTree, arrays: Iterable[Any]) -> PyTree:
    """An output with these in place of shapes and dtypes, in their order."""
    remaining = iter(arrays)
    filled = jtu.tree_map(lambda x: next(remaining) if is_struct(x) else x, output)
    return with_shapes_of_arrays(filled)
