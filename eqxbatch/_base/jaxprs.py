"""Programs of leaves and one example: how they run, and which derivatives they have.

Jaxprs are evaluated as they are, or with some equations replaced.
"""

import functools
import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, cast, Literal, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import jaxlib
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .checks import warn_of_new_functions, without_layers
from .mesh import full_varying_as
from .platforms import for_platform, platform
from .primitives import (
    callee,
    equations_in,
    IDENTITIES,
    inner_jaxprs,
    is_flat,
    is_unknown_object,
    name_of,
)
from .trees import array_structs, safe_zip, with_arrays


_T = TypeVar("_T")


_Function = TypeVar("_Function", bound=Callable[..., Any])


_NUMBERS = frozenset((bool, int, float, complex))


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def number_types(leaves: Sequence[Any]) -> str:
    """What tells numbers apart that are equal: `2 == 2.0 == True`, and `0.0 == -0.0`.

    Programs differ for these, so that caches of them need it as a part of their keys.
    """
    return repr([x for x in leaves if type(x) in _NUMBERS])


def compiled(
    fun: _Function,
    *,
    donate: Literal["none", "all-except-first"] = "none",
    inline: bool = False,
) -> _Function:
    """`equinox.filter_jit`, which gives equal numbers of other types other programs.

    So it does for arrays on another platform. With `inline`, other programs that call
    it have its equations in place of a call.
    """
    traces = 0

    # `inspect` binds arguments without names faster.
    def run(*operands: Any) -> Any:
        nonlocal traces
        traces += 1
        *lists, ((treedef, static, _, chosen),) = operands
        arrays = itertools.chain(*lists)
        leaves = [next(arrays) if x is None else x for x in static]
        of_first, of_rest = treedef.unflatten(leaves)
        with for_platform(chosen):
            return fun(of_first, *of_rest)

    run.__name__, run.__qualname__ = fun.__name__, fun.__qualname__
    # Its types lack the settings of `jax.jit`.
    jit: Any = eqx.filter_jit
    jitted = jit(run, donate=donate, inline=inline)

    @functools.wraps(fun)
    def wrapper(first: Any, *rest: Any) -> Any:
        __tracebackhide__ = True
        leaves, treedef = jtu.tree_flatten((first, rest))
        arrays, static = [], []
        for x in leaves:
            is_array = isinstance(x, _ARRAYS)
            static.append(None if is_array else x)
            if is_array:
                arrays.append(x)
        chosen = platform(arrays)
        # A set is one leaf for JAX, which would go through a tuple in each call.
        key = frozenset([(treedef, (*static,), number_types(static), chosen)])
        lists = [arrays]
        if donate != "none":
            num = sum(map(eqx.is_array, jtu.tree_leaves(first)))
            lists = [arrays[:num], arrays[num:]]
        before = traces
        try:
            out = jitted(*lists, key)
        except Exception as e:
            raise e.with_traceback(without_layers(e.__traceback__))  # noqa: B904
        if traces == before:
            return out
        if not any(isinstance(x, Tracer) for x in jtu.tree_leaves(out)):
            warn_of_new_functions(static, (fun, treedef, *map(jax.typeof, arrays)))
        return out

    return cast(_Function, wrapper)


def literal(atom: Any) -> Array:
    """The value of a literal in its dtype, which a Python number does not have."""
    return jnp.asarray(atom.val, atom.aval.dtype)


class _Static(eqx.Module):
    """Holds values that are not arrays and not traced."""

    value: Any = eqx.field(static=True)


def axis_names(jaxpr: Any) -> set:
    """The axis names that a jaxpr uses, of an enclosing `vmap` or mesh."""
    return {effect.name for effect in jaxpr.effects if hasattr(effect, "name")}


def depends(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend on marked inputs.

    The result may include outputs that do not, because inner jaxprs are not inspected.
    """
    dependent = _marked(jaxpr.invars, inputs)
    is_dependent = lambda x: not isinstance(x, jex.Literal) and x in dependent
    for eqn in jaxpr.eqns:
        if any(map(is_dependent, eqn.invars)):
            dependent.update(eqn.outvars)
    return [*map(is_dependent, jaxpr.outvars)]


def evaluate_jaxpr(jaxpr: Any, consts: list, args: list) -> list:
    """Evaluates a jaxpr unchanged."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))(*args)


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
    return evaluate_jaxpr(part, [], [values[v] for v in ins])


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


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many constants a scan has, and how many arrays it carries."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since JAX 0.11, a scan has trees: of constants, of what it carries, and of slices.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts.vals), len(carry.vals)


class TracedFunction:
    """A function of leaves and of one example of a batch, traced.

    - `leaves`: the list of arrays that it was traced with.
    - `arrays`, `axes`: the arrays of a batch, of which only types matter, and their
        batch axes; these are empty if the arrays are those of one example.
    - `closed`: its jaxpr, whose first inputs are the leaves.
    - `out`: its output, with a `jax.ShapeDtypeStruct` for each array.
    """

    def __init__(
        self,
        fun: Callable[[Any, list], PyTree],
        leaves: PyTree,
        arrays: list,
        axes: Sequence[int] = (),
    ):
        self.leaves, self._treedef = jtu.tree_flatten(leaves)
        self.arrays, self.axes = arrays, list(axes)

        def flat(leaves: list, rows: list) -> PyTree:
            return fun(self.tree(leaves), rows)

        trace = lambda rows: eqx.filter_make_jaxpr(flat)(self.leaves, rows)
        self.closed, structs, static = self.at_example(trace)
        self.out = eqx.combine(structs, static)

    def at_example(self, ask: Callable[[list], _T]) -> _T:
        """The untraced output of `ask(rows)` for one example."""
        if not self.axes:
            return ask(self.arrays)
        # Inside `jax.vmap`, an example has the type that it will have there, also on a
        # mesh.
        run = jax.vmap(lambda *rows: _Static(ask([*rows])), self.axes)
        return jax.eval_shape(run, *self.arrays).value

    def zeros(self) -> tuple[list[Array], list[Array]]:
        """Leaves and an example of zeros, of the types that it was traced with."""
        zeros = [full_varying_as(var.aval, 0) for var in self.closed.jaxpr.invars]
        return zeros[: len(self.leaves)], zeros[len(self.leaves) :]

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays that it returns for one example."""
        return array_structs(self.out)

    @functools.cached_property
    def is_narrow(self) -> bool:
        """Whether it uses float16: sums can overflow where their mean does not."""
        return uses_dtype(self.closed.jaxpr, jnp.float16)

    @functools.cached_property
    def has_examples(self) -> list[bool]:
        """Which of the arrays that it returns depend on the example."""
        num = len(self.leaves)
        is_example = [False] * num + [True] * (len(self.closed.jaxpr.invars) - num)
        return depends(self.closed.jaxpr, is_example)

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """A list with an entry for each leaf, as the PyTree that the leaves were."""
        return jtu.tree_unflatten(self._treedef, leaves)

    def one(self, leaves: list, rows: Sequence[Array]) -> list[Array]:
        """The arrays that it returns for one example."""
        consts = list(self.closed.consts)
        return evaluate_jaxpr(self.closed.jaxpr, consts, [*leaves, *rows])

    def many(self, leaves: list, rows: list) -> list[Array]:
        """The arrays for some examples, along axis 0."""
        return jax.vmap(lambda *rows: self.one(leaves, rows), self.axes)(*rows)

    def run(self, rows: list) -> list[Array]:
        """Like `many`, but arrays that do not depend on the example are computed once.

        These arrays have no batch axis; see `has_examples`.
        """
        in_axes = (None, *self.axes)
        out_axes = [0 if has else None for has in self.has_examples]
        one = lambda leaves, *rows: self.one(leaves, rows)
        return jax.vmap(one, in_axes, out_axes)(self.leaves, *rows)

    def output(self, arrays: Sequence[Any]) -> PyTree:
        """The output of the function, with these as its arrays."""
        return with_arrays(self.out, arrays)


_Statement = tuple[type[Exception], str]


# Messages of JAX. A function without any rule, such as a callback, has no derivative at
# all and raises another one.
_NO_FORWARD: list[_Statement] = [
    (TypeError, r"can't apply forward-mode \w+ \(jvp\) to a custom_vjp function"),
    (NotImplementedError, r"for jvp support, subclass"),
]


_NO_REVERSE: list[_Statement] = [
    (ValueError, r"Reverse-mode differentiation does not work for lax\.while_loop"),
    (NotImplementedError, r"Transpose rule \(for reverse-mode differentiation\) for"),
    (TypeError, r"transpose_solve required for backwards mode"),
    (NotImplementedError, r"for grad support, subclass"),
]


# How JAX has products with the Jacobian of a function, and with its transpose: in both
# modes; in reverse mode and its transpose; or in one mode only, so that the Jacobian is
# needed, which reverse mode has by rows and forward mode by columns.
Derivative = Literal["both", "transposed", "rows", "columns"]


def derivative_of(
    name: str, fun: Callable[[list], PyTree], point: list[Array]
) -> Derivative:
    """How JAX can differentiate a function of arrays.

    Raises `TypeError`, with the `name` of the function, if it has neither mode.
    """
    no_reverse, no_forward = (
        ask(fun, point) for ask in (without_reverse_mode, without_forward_mode)
    )
    if no_forward is None:
        return "both" if no_reverse is None else "columns"
    if no_reverse is not None:
        raise TypeError(
            f"JAX can differentiate {name} neither in forward nor in reverse mode, but "
            "one of them is needed. Replace a `jax.custom_vjp` by a `jax.custom_jvp`, "
            "or a `lax.while_loop` by a `lax.scan`. (Forward mode: "
            f"{no_forward} Reverse mode: {no_reverse})"
        )
    no_transpose = without_reverse_mode(fun, point, is_transposed=True)
    return "transposed" if no_transpose is None else "rows"


def derivative_of_program(name: str, program: TracedFunction) -> Derivative:
    """How JAX can differentiate a program of one example in its leaves."""

    def ask(rows: list) -> Derivative:
        one = lambda leaves: program.one(leaves, rows)
        return derivative_of(name, one, program.leaves)

    return program.at_example(ask)


def pushforward(
    fun: Callable[[list], list], point: list, derivative: Derivative
) -> tuple[list, Callable[[list], list]]:
    """The values of a function, and its forward-mode derivative."""
    if derivative != "transposed":
        return jax.linearize(fun, point)
    outs, pull = jax.vjp(fun, point)
    transpose = jax.linear_transpose(lambda outs: pull(outs)[0], outs)
    return outs, lambda seeds: transpose(seeds)[0]


def pushed(
    fun: Callable[[list], list], point: list, tangents: list, derivative: Derivative
) -> list:
    """The product of the Jacobian with one vector.

    It needs no linear function that can be run again.
    """
    if derivative == "transposed":
        return pushforward(fun, point, derivative)[1](tangents)
    return jax.jvp(fun, (point,), (tangents,))[1]


def without_forward_mode(
    fun: Callable[[list], PyTree], point: list[Array]
) -> str | None:
    """Why a function of arrays has no forward-mode derivative; None if it has one."""
    closed = _traced(fun, point)
    # Rules that may be for reverse mode only.
    is_one = lambda eqn: name_of(eqn).startswith("custom_vjp") or is_unknown_object(eqn)
    if not any(map(is_one, equations_in(closed))):
        return None
    run = jex.jaxpr_as_fun(closed)
    push = lambda *seeds: jax.jvp(run, tuple(point), seeds)[1]
    # Some functions fail only if the derivative is vectorised.
    seeds = [jnp.expand_dims(x, 0) for x in point]
    return _stated(lambda: jax.eval_shape(jax.vmap(push), *seeds), _NO_FORWARD)


def without_reverse_mode(
    fun: Callable[[list], PyTree], point: list[Array], *, is_transposed: bool = False
) -> str | None:
    """Why a function of arrays has no reverse-mode derivative; None if it has one.

    With `is_transposed`, this is about the transpose of this derivative.
    """
    run = jex.jaxpr_as_fun(_traced(fun, point))

    def pulled(*point: Array) -> Any:
        outs, pull = jax.vjp(run, *point)
        return jax.linear_transpose(pull, outs)(point) if is_transposed else pull(outs)

    return _stated(lambda: jax.eval_shape(pulled, *point), _NO_REVERSE)


def _traced(fun: Callable[[list], PyTree], point: list[Array]) -> jex.ClosedJaxpr:
    """A function as its jaxpr, so that only JAX and custom rules run any code."""
    return jax.make_jaxpr(lambda *point: fun([*point]))(*point)


def _stated(ask: Callable[[], Any], statements: list[_Statement]) -> str | None:
    try:
        ask()
    except tuple(kind for kind, _ in statements) as e:
        for kind, words in statements:
            if isinstance(e, kind) and re.match(words, str(e)):
                return str(e)
        raise
    return None
