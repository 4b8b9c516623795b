"""Jaxprs: how programs run, and which derivatives they have.

They are evaluated as they are, or with some equations replaced.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import use_abstract_mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from .jaxpr_types import Atom, Eqn, Jaxpr, JaxprAndConsts, Params, Rule, Value, Var
from .primitives import (
    CALLS,
    EXPANDED,
    IDENTITIES,
    is_flat,
    name_of,
    OF_CLASSES,
    parameters,
    REMAT,
)
from .trees import safe_zip
from .versions import Closed, scan_sizes, with_consts


def callee(eqn: Eqn) -> JaxprAndConsts | None:
    """The closed jaxpr in place of which an equation stands; None for others.

    The derivative of the equation is that of the jaxpr. So functions with custom
    derivatives are not called in this sense.
    """
    name, params = name_of(eqn), parameters(eqn)
    if name in EXPANDED:
        closed = _expanded(eqn)
    elif name in CALLS or name in REMAT:
        closed = _as_closed(params["jaxpr" if "jaxpr" in params else "call_jaxpr"])
    else:
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


def _expanded(eqn: Eqn) -> JaxprAndConsts:
    """The program that an equation stands for."""
    # An object of JAX's classes knows its program by itself.
    program = _PROGRAMS.get(name_of(eqn), _of_object)
    run = lambda *ins: program(eqn.params, ins)
    avals = [atom.aval for atom in eqn.invars]
    # The mesh of the equation, whose axes may be of another kind than those that are
    # set now.
    shardings = (getattr(aval, "sharding", None) for aval in avals)
    meshes = [x.mesh for x in shardings if x is not None and not x.mesh.empty]
    with use_abstract_mesh(meshes[0]) if meshes else contextlib.nullcontext():
        return jax.make_jaxpr(run)(*avals)


def _of_object(params: Params, ins: Sequence[Value]) -> list:
    """The program that an object of one of JAX's own classes stands for."""
    kind = params["_prim"]
    return jtu.tree_leaves(kind.expand(*jtu.tree_unflatten(kind.in_tree, ins)))


def _polynomial(_: Params, ins: Sequence[Value]) -> list:
    """Horner's rule, from the coefficients of all powers, the lowest one first.

    At 2, the coefficients 1, 2 and 3 have the value (3 * 2 + 2) * 2 + 1 = 17.
    """
    x, *coefficients, total = ins
    for coefficient in reversed(coefficients):
        total = lax.add(lax.mul(total, x), coefficient)
    return [total]


def _unstack(params: Params, ins: Sequence[Value]) -> list:
    """The entries along an axis: [1, 3] and [2, 4] for [[1, 2], [3, 4]] and axis 1."""
    (x,), axis = ins, params["axis"]
    return [lax.index_in_dim(x, i, axis, False) for i in range(x.shape[axis])]


# The programs of primitives that are no objects.
_PROGRAMS = {"polynomial": _polynomial, "unstack": _unstack}


# What a parameter is that is a program.
_PROGRAM_TYPES = (Closed, jex.Jaxpr, jax.stages.Traced)


def _as_closed(x: Any) -> JaxprAndConsts:
    """A jaxpr, or what was traced to one, as a closed jaxpr."""
    if isinstance(x, jax.stages.Traced):
        x = x.jaxpr
    if isinstance(x, Closed):
        return x
    # Programs of `jax.custom_derivatives.linear_call` have constants that are inputs.
    return with_consts(x, [None] * len(x.constvars))


def as_remat(
    eqn: Eqn, run: Callable[..., Any], num_more: int = 0
) -> Callable[..., Any]:
    """`run`, rematerialised as the program of an equation is.

    It takes the inputs of the equation and so many more.
    """
    params = parameters(eqn)
    prevent_cse, policy = params.get("prevent_cse", True), params["policy"]
    if isinstance(prevent_cse, tuple):  # One for each input.
        prevent_cse = (*prevent_cse, *(True,) * num_more)
    return jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)


def as_called(eqn: Eqn, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with what JAX promises of the program of an equation.

    This is its order, or metadata for XLA. `run` takes the inputs of the equation and
    one more argument.
    """
    name, params = name_of(eqn), eqn.params
    if name == "program_order":
        return _in_program_order(run, params)
    if name == "xla_metadata_call":
        # JAX has neither of the two modules before version 0.12.
        from jax.experimental.xla_metadata import xla_metadata_call2

        backward: Any = params["ad_metadata"]
        backward = backward if backward == "same" else dict(backward)
        metadata = dict(params["xla_metadata"])
        return xla_metadata_call2(run, metadata, ad_metadata=backward)
    return run


def _in_program_order(run: Callable[..., Any], params: Params) -> Callable[..., Any]:
    """`run` with its equations in the order of the program."""
    from jax.experimental.overlap import program_order

    waits = [not is_excluded for is_excluded in params["exclude_mask"]]

    # JAX excludes arguments by name, so that those that do not wait become one.
    def of_groups(waiting: list[Value], others: list[Value], more: object) -> Any:
        groups = {True: iter(waiting), False: iter(others)}
        return run(*(next(groups[is_one]) for is_one in waits), more)

    is_enforced = params["enforce"]
    strict = params["strict_in"], params["strict_out"]
    ordered: Any = program_order(
        of_groups,
        enforce=is_enforced,
        strict_in_out=is_enforced and strict,
        exclude_argnames=None if all(waits) else "others",
    )

    def grouped(*args: Any) -> Any:
        *ins, more = args
        pairs = [*safe_zip(waits, ins)]
        waiting = [x for is_one, x in pairs if is_one]
        return ordered(waiting, [x for is_one, x in pairs if not is_one], more)

    return grouped


def inner_programs(*eqns: Eqn) -> list[JaxprAndConsts]:
    """The closed jaxprs that equations have in their parameters, or stand for."""
    programs: list[JaxprAndConsts] = []
    # Every equation of a program is asked, so the usual one is answered without calls.
    for eqn in eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == OF_CLASSES:
            name, params = name_of(eqn), parameters(eqn)
        if name in EXPANDED:
            programs.append(_expanded(eqn))
        for value in params.values():
            for x in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(x, _PROGRAM_TYPES):
                    programs.append(_as_closed(x))
    return programs


def inner_jaxprs(eqn: Eqn) -> list[Jaxpr]:
    """The jaxprs of these programs, without constants."""
    return [closed.jaxpr for closed in inner_programs(eqn)]


def programs_in(closed: JaxprAndConsts) -> list[JaxprAndConsts]:
    """A closed jaxpr, and all in it."""
    programs = [closed]
    for inner in inner_programs(*closed.jaxpr.eqns):
        programs += programs_in(inner)
    return programs


def equations_in(closed: JaxprAndConsts) -> list[Eqn]:
    """The equations of a closed jaxpr, and of all in it."""
    return [eqn for part in programs_in(closed) for eqn in part.jaxpr.eqns]


def primitive_names(closed: JaxprAndConsts) -> set[str]:
    """The names of the primitives of all equations in a closed jaxpr."""
    return {eqn.primitive.name for eqn in equations_in(closed)}


def constants(closed: JaxprAndConsts) -> Iterator[Value]:
    """All arrays that are part of a closed jaxpr."""
    for part in programs_in(closed):
        yield from part.consts
        for eqn in part.jaxpr.eqns:
            for atom in eqn.invars:
                if isinstance(atom, jex.Literal):
                    is_array = isinstance(atom.val, jax.Array)
                    yield atom.val if is_array else np.asarray(atom.val)


def literal(atom: Atom) -> Array:
    """The value of a literal in its dtype, which a Python number does not have."""
    return jnp.asarray(atom.val, atom.aval.dtype)


def axis_names(jaxpr: Jaxpr) -> set:
    """The axis names that a jaxpr uses, of an enclosing `vmap` or mesh."""
    return {effect.name for effect in jaxpr.effects if hasattr(effect, "name")}


def depends(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend on marked inputs.

    The result may include outputs that do not, because inner jaxprs are not inspected.
    """
    dependent = _marked(jaxpr.invars, inputs)
    for eqn in dependent_equations(jaxpr, inputs):
        dependent.update(eqn.outvars)
    return [not isinstance(x, jex.Literal) and x in dependent for x in jaxpr.outvars]


def dependent_equations(jaxpr: Jaxpr, inputs: Sequence[bool]) -> Iterator[Eqn]:
    """The equations of a jaxpr that depend on marked inputs, as in `depends`."""
    dependent = _marked(jaxpr.invars, inputs)
    is_dependent = lambda x: not isinstance(x, jex.Literal) and x in dependent
    for eqn in jaxpr.eqns:
        if any(map(is_dependent, eqn.invars)):
            dependent.update(eqn.outvars)
            yield eqn


def run_jaxpr(jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list:
    """Evaluates a jaxpr unchanged."""
    return jex.jaxpr_as_fun(with_consts(jaxpr, consts))(*args)


def evaluate_with(
    jaxpr: Jaxpr,
    consts: Sequence[object],
    args: Sequence[object],
    replace: Callable[[int, Eqn], Rule | None],
) -> list:
    """Evaluates a jaxpr with some equations replaced.

    `replace(index, eqn)` returns a function from the inputs of the equation to its
    outputs, or None to keep the equation. All other equations run as JAX itself would
    run them, with all custom derivatives.

    The jaxpr must have no effects, because these belong to the whole jaxpr.
    """
    values = dict(safe_zip(jaxpr.constvars, consts))
    values.update(safe_zip(jaxpr.invars, args))

    def read(atom: Atom) -> Any:
        return literal(atom) if isinstance(atom, jex.Literal) else values[atom]

    # Equations that are kept run together, so that JAX sees them as one program.
    pending: list[Eqn] = []
    # What nothing reads is no output of such a program, so that JAX can drop it.
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    used = {atom for atom in atoms if not isinstance(atom, jex.Literal)}

    def flush() -> None:
        if pending:
            outs = [var for eqn in pending for var in eqn.outvars if var in used]
            results = run_equations(jaxpr, pending, outs, values)
            values.update(safe_zip(outs, results))
            pending.clear()

    # A replaced equation needs the results of all before it.
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


def run_equations(
    jaxpr: Jaxpr, eqns: Sequence[Eqn], outs: Sequence[Var], values: Mapping[Var, object]
) -> list:
    """The values of `outs` after some consecutive equations of a jaxpr."""
    # Variables from outside become inputs, in the order of their first use.
    made: set[Var] = set()
    ins: dict[Var, None] = {}
    for eqn in eqns:
        for var in eqn.invars:
            if not isinstance(var, jex.Literal) and var not in made:
                ins[var] = None
        made.update(eqn.outvars)
    part = jaxpr.replace(constvars=[], invars=list(ins), outvars=[*outs], eqns=[*eqns])
    return run_jaxpr(part, [], [values[v] for v in ins])


def run_equation(jaxpr: Jaxpr, eqn: Eqn, outs: Sequence[Var]) -> Callable[..., list]:
    """An equation as a function of its inputs that returns `outs`.

    It runs as JAX itself would run it, with all custom derivatives.
    """

    def run(*ins: Any) -> list:
        if not any(inner_jaxprs(eqn)) and not name_of(eqn).startswith("custom"):
            # Without programs or rules inside, no jaxpr has to be made of it.
            results = eqn.primitive.bind(*ins, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
            return [results[eqn.outvars.index(var)] for var in outs]
        pairs = safe_zip(eqn.invars, ins)
        values = {atom: x for atom, x in pairs if not isinstance(atom, jex.Literal)}
        return run_equations(jaxpr, [eqn], outs, values)

    return run


# Folders of JAX and of this package. The separator tells `jax` from `jaxopt`.
_OTHERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (jax.__file__, jaxlib.__file__, os.path.dirname(__file__))
)


def source_line(eqn: Eqn) -> str:
    """The source of an equation, as `file:line in function`; empty if unknown."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not os.path.abspath(frame.file_name).startswith(_OTHERS):
            file, function = os.path.basename(frame.file_name), frame.function_name
            return f"{file}:{frame.line_num} in `{function}`"
    return ""


def first_use(jaxpr: Jaxpr, var: Var) -> list[int]:
    """The position of a variable's first use, comparable within one jaxpr."""
    for index, eqn in enumerate(jaxpr.eqns):
        positions = [i for i, atom in enumerate(eqn.invars) if atom is var]
        if not positions:
            continue
        closed = callee(eqn)
        if closed is None:
            return [index]
        # Positions within a program follow that of its call, so that lists compare.
        inner = closed.jaxpr
        return [index, *min(first_use(inner, inner.invars[i]) for i in positions)]
    return [len(jaxpr.eqns)]


def uses_dtype(jaxpr: Jaxpr, dtype: DTypeLike) -> bool:
    """Whether a jaxpr uses a dtype."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars]
    atoms += [var for eqn in jaxpr.eqns for var in eqn.outvars]
    if any(getattr(atom.aval, "dtype", None) == dtype for atom in atoms):
        return True
    inner = (sub for eqn in jaxpr.eqns for sub in inner_jaxprs(eqn))
    return any(uses_dtype(sub, dtype) for sub in inner)


def live_variables(jaxpr: Jaxpr, outs: Sequence[bool]) -> set:
    """The variables in which some outputs have a derivative, as far as is known."""
    live = _marked(jaxpr.outvars, outs)
    for eqn in reversed(jaxpr.eqns):
        of_outs = [var in live for var in eqn.outvars]
        if any(of_outs):
            live |= _marked(eqn.invars, _live_inputs(eqn, of_outs))
    return live


def _marked(atoms: Sequence[Atom], marks: Sequence[bool]) -> set:
    """The marked variables; literals are none."""
    pairs = safe_zip(atoms, marks)
    return {x for x, is_one in pairs if is_one and not isinstance(x, jex.Literal)}


def _live_inputs(eqn: Eqn, outs: list[bool]) -> list[bool]:
    name, closed = name_of(eqn), callee(eqn)
    if is_flat(eqn):
        return [False for _ in eqn.invars]
    if closed is not None:
        live = live_variables(closed.jaxpr, outs)
        return [var in live for var in closed.jaxpr.invars]
    if name == "scan":
        return live_in_scan(eqn, outs).inputs
    if name == "cond":
        jaxprs = [closed.jaxpr for closed in eqn.params["branches"]]
        marked = [(jaxpr.invars, live_variables(jaxpr, outs)) for jaxpr in jaxprs]
        by_input = safe_zip(*([v in live for v in ins] for ins, live in marked))
        # The index that chooses a branch has no derivative.
        return [False, *map(any, by_input)]
    if name in IDENTITIES:
        return outs
    return [jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars]


class LiveInScan(NamedTuple):
    """Which outputs and inputs of the body of a scan are differentiated."""

    outs: list[bool]
    inputs: list[bool]


def live_in_scan(eqn: Eqn, outs: list[bool]) -> LiveInScan:
    """Which outputs and inputs of the body of a scan are differentiated."""
    jaxpr, (first, num) = eqn.params["jaxpr"].jaxpr, scan_sizes(eqn)
    outs = [*outs]
    while True:
        live = live_variables(jaxpr, outs)
        inputs = [var in live for var in jaxpr.invars]
        # The carry of one step is the input of the next.
        carried = [a or b for a, b in zip(outs[:num], inputs[first:], strict=False)]
        if carried == outs[:num]:
            return LiveInScan(outs, inputs)
        outs[:num] = carried
