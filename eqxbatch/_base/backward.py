"""Which backward passes of a program are linear in their cotangents.

JAX derives backward passes that are linear. That of a `jax.custom_vjp` is whatever its
author wrote: it may clip or normalise the cotangent, inject an auxiliary loss, or
return the state of FP8 training in place of a gradient. Then a weight before the
backward pass is not a weight after it, and neither is a sum over examples.

A backward pass counts as linear if each of its equations is known to be, so that an
unknown primitive takes the slower way, and is never wrong.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .jaxpr_types import Atom, Aval, Eqn, Jaxpr, JaxprAndConsts, Var
from .jaxprs import (
    callee,
    inner_jaxprs,
    inner_programs,
    primitive_names,
    run_equations,
)
from .primitives import (
    IDENTITIES,
    LINEAR_IN_ALL,
    LINEAR_IN_EACH,
    LINEAR_IN_SOME,
    name_of,
    OF_CLASSES,
    parameters,
)
from .trees import safe_zip
from .versions import scan_sizes


# The kind of a value with respect to the cotangents.
OTHER, ZERO, LINEAR = "other", "zero", "linear"


def unique_inputs(eqn: Eqn) -> list[int]:
    """The distinct variables among the inputs of an equation."""
    # A variable that is two inputs is one argument: its derivative has both shares.
    first: dict[Var, int] = {}
    for i, atom in enumerate(eqn.invars):
        if not isinstance(atom, jex.Literal):
            first.setdefault(atom, i)
    return list(first.values())


class Along(NamedTuple):
    """An equation as a function of some of its inputs.

    - `avals`: the types of all its distinct inputs.
    - `tangents`, `cotangents`: those of the inputs and outputs that matter.
    - `function`: takes values of all inputs, and returns the function of those that
        matter, given the others.
    - `point`: takes values of all inputs, and returns those that matter.
    """

    avals: list[Aval]
    tangents: list[Aval]
    cotangents: list[Aval]
    function: Callable[[list[Array]], Callable[..., list[Array]]]
    point: Callable[[list[Array]], list[Array]]

    def backward(self) -> JaxprAndConsts:
        """Its backward pass: a jaxpr of all inputs and of the cotangents."""

        def pull(ins: list[Array], cotangents: list[Array]) -> tuple:
            return jax.vjp(self.function(ins), *self.point(ins))[1](cotangents)

        return jax.make_jaxpr(pull)(self.avals, self.cotangents)

    def why_nonlinear(
        self, backward: JaxprAndConsts, *, in_loops: bool = False
    ) -> str | None:
        """Why its backward pass is not known to be linear; None if it is.

        `in_loops` is as for `kinds_of`.
        """
        kinds = [OTHER for _ in self.avals] + [LINEAR for _ in self.cotangents]
        # An effect happens as often for a small cotangent as for a large one.
        if backward.jaxpr.effects:
            return "side effects"
        outs = kinds_of(backward.jaxpr, kinds, in_loops=in_loops)
        if isinstance(outs, str):
            return outs
        if OTHER in outs:
            return "a result that does not depend on the cotangent"
        return None


def along_inputs(
    jaxpr: Jaxpr, eqn: Eqn, moved: Sequence[int], outs: Sequence[int]
) -> Along:
    """An equation as a function of inputs in `moved`, with the outputs in `outs`."""
    unique = unique_inputs(eqn)
    atoms, results = [eqn.invars[i] for i in unique], [eqn.outvars[i] for i in outs]
    numbers = [unique.index(i) for i in moved]

    def function(ins: list[Array]) -> Callable[..., list[Array]]:
        values = dict(safe_zip(atoms, ins))

        def run(*point: Array) -> list[Array]:
            changed = safe_zip((atoms[i] for i in numbers), point)
            return run_equations(jaxpr, [eqn], results, {**values, **dict(changed)})

        return run

    avals = [atom.aval for atom in atoms]
    cotangents = [var.aval for var in results]
    point = lambda ins: [ins[i] for i in numbers]
    return Along(avals, [avals[i] for i in numbers], cotangents, function, point)


class CustomBackward(NamedTuple):
    """The custom backward passes of a program that are not known to be linear.

    - `is_linear`: whether there are none.
    - `has_examples`: whether each of them belongs to one example, because `jax.vmap`
        calls it for each. Otherwise, the cotangents of all examples are summed before.
    """

    is_linear: bool
    has_examples: bool


def custom_backward(
    closed: JaxprAndConsts, is_example: Sequence[bool]
) -> CustomBackward:
    """What is known of a program's backward passes.

    `is_example` says which of its inputs differ between examples.
    """
    # Most programs have none, which the names of their primitives tell at once.
    names = primitive_names(closed)
    if not any(name.startswith(_OWN_BACKWARD) for name in names):
        return CustomBackward(is_linear=True, has_examples=True)
    are_batched: list[bool] = []
    _batched(closed.jaxpr, is_example, are_batched)
    return CustomBackward(not are_batched, all(are_batched))


def _batched(
    jaxpr: Jaxpr, inputs: Sequence[bool], are_batched: list[bool] | None = None
) -> list[bool]:
    """Which outputs of a jaxpr `jax.vmap` batches, if it batches these inputs.

    For each backward pass in it that is not known to be linear, whether it is batched
    is added to `are_batched`.
    """
    differs = {v for v, marked in safe_zip(jaxpr.invars, inputs) if marked}
    marked_among = lambda atoms: [
        not isinstance(x, jex.Literal) and x in differs for x in atoms
    ]
    for eqn in jaxpr.eqns:
        marks = marked_among(eqn.invars)
        if has_own_backward(eqn):
            # Its rule takes the place of all derivatives inside, whatever these are.
            if are_batched is not None and not _is_known(jaxpr, eqn):
                are_batched.append(any(marks))
            outs = _batched_by(eqn, marks, None)
        else:
            outs = _batched_by(eqn, marks, are_batched)
        if any(outs):
            differs |= {v for v, marked in safe_zip(eqn.outvars, outs) if marked}
    return marked_among(jaxpr.outvars)


# How the names of primitives begin whose backward pass may be that of an author. An
# object of a class that no table knows may have one, too.
_OWN_BACKWARD = ("custom_vjp", "linear_call", OF_CLASSES)


def has_own_backward(eqn: Eqn) -> bool:
    """Whether the author of a function wrote the backward pass of an equation."""
    return name_of(eqn).startswith(_OWN_BACKWARD)


def _is_known(jaxpr: Jaxpr, eqn: Eqn) -> bool:
    """Whether the backward pass of an equation is known to be linear."""
    is_inexact = lambda atom: jnp.issubdtype(atom.aval.dtype, jnp.inexact)
    moved = [i for i in unique_inputs(eqn) if is_inexact(eqn.invars[i])]
    outs = [i for i, var in enumerate(eqn.outvars) if is_inexact(var)]
    along = along_inputs(jaxpr, eqn, moved, outs)
    try:
        backward = along.backward()
    except Exception:
        # The rule is the user's, who may never call it, and then need not hear of it.
        return False
    return along.why_nonlinear(backward, in_loops=True) is None


def _batched_by(
    eqn: Eqn, marks: list[bool], are_batched: list[bool] | None
) -> list[bool]:
    """Which outputs of an equation `jax.vmap` batches, as `_batched`."""
    programs = inner_jaxprs(eqn)
    if not programs:
        return [any(marks)] * len(eqn.outvars)
    name, params = name_of(eqn), parameters(eqn)
    # Loops: what one step carries may be batched by a later one.
    if name == "scan":
        sizes = scan_sizes(eqn)
        return _of_loop(programs[0], marks, sizes.consts, sizes.carry, are_batched)
    if name == "while":
        first = params["cond_nconsts"]
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        of_body, num = marks[first:], params["body_nconsts"]
        carried = _of_loop(body, of_body, num, len(of_body) - num, are_batched)
        # With a batched condition, each example takes its own number of steps.
        is_batched = any(_batched(condition, [*marks[:first], *carried]))
        return [is_batched or marked for marked in carried]
    # Branches: with a batched index, all of them run, and outputs are selected.
    if name == "cond" and not marks[0]:
        outs = [_batched(branch, marks[1:], are_batched) for branch in programs]
        return [any(branches) for branches in safe_zip(*outs)]
    if name == "cond":
        for branch in programs:
            _batched(branch, [True for _ in branch.invars], are_batched)
    # Other programs: of unknown ones, only custom backward passes are looked for.
    elif len(programs) == 1 and len(programs[0].invars) == len(marks):
        outs = _batched(programs[0], marks, are_batched)
        if len(outs) == len(eqn.outvars):
            return outs
    else:
        for inner in programs:
            _batched(inner, [False for _ in inner.invars], are_batched)
    return [any(marks) for _ in eqn.outvars]


def _of_loop(
    body: Jaxpr, marks: list[bool], first: int, num: int, are_batched: list[bool] | None
) -> list[bool]:
    """As `_batched_by`, for a body of `first` constants that carries `num` arrays."""
    marks = [*marks]
    while True:
        outs = _batched(body, marks)
        # What a step carries is the input of the next.
        carried = [a or b for a, b in safe_zip(marks[first : first + num], outs[:num])]
        if carried == marks[first : first + num]:
            # Only now, because the marks of earlier rounds may have been too few.
            _batched(body, marks, are_batched)
            return [*carried, *outs[num:]]
        marks[first : first + num] = carried


def needed_equations(jaxpr: Jaxpr) -> list[Eqn]:
    """The equations that the outputs of a jaxpr depend on."""
    # From the end: what reads a result comes after what computes it.
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            eqns.append(eqn)
            needed |= {x for x in eqn.invars if not isinstance(x, jex.Literal)}
    return eqns[::-1]


def kinds_of(
    jaxpr: Jaxpr, inputs: Sequence[str], *, in_loops: bool = False
) -> list[str] | str:
    """The kinds of a jaxpr's outputs, or the equation that is not linear.

    A constant that is added to something linear is not, unless it is known to be zero.
    With `in_loops`, `scan` and `cond` can be linear, too, although JAX does not
    transpose all of these.
    """
    kind_by_var = dict.fromkeys(jaxpr.constvars, OTHER)
    kind_by_var.update(safe_zip(jaxpr.invars, inputs))

    def kind_of(atom: Atom) -> str:
        if isinstance(atom, jex.Literal):
            return OTHER if np.any(np.asarray(atom.val) != 0) else ZERO
        return kind_by_var[atom]

    # An equation that no output depends on may be anything.
    for eqn in needed_equations(jaxpr):
        kinds = [kind_of(atom) for atom in eqn.invars]
        closed = callee(eqn)
        # Programs within are judged by their own equations.
        if closed is not None:
            outs = kinds_of(closed.jaxpr, kinds, in_loops=in_loops)
        elif name_of(eqn) in IDENTITIES:
            outs = kinds
        elif in_loops and name_of(eqn) in _KINDS_WITHIN and LINEAR in kinds:
            outs = _KINDS_WITHIN[name_of(eqn)](eqn, kinds)
        # What depends on a cotangent must be known to be linear in it.
        elif LINEAR in kinds:
            if not _is_linear_equation(eqn, kinds):
                return f"`{name_of(eqn)}`, which is not known to be linear"
            outs = [LINEAR for _ in eqn.outvars]
        else:
            outs = [ZERO if _is_zero(eqn, kinds) else OTHER for _ in eqn.outvars]
        if isinstance(outs, str):
            return outs
        kind_by_var.update(safe_zip(eqn.outvars, outs))
    return [kind_of(atom) for atom in jaxpr.outvars]


def _joined(first: Sequence[str], second: Sequence[str]) -> list[str] | str:
    """The kinds of values that are one or the other."""
    pairs = [*safe_zip(first, second)]
    if any({*pair} == {OTHER, LINEAR} for pair in pairs):
        return "a value that depends on the cotangent in some steps or branches only"
    # Zero is linear as well, and a constant, too.
    return [a if b == ZERO else b for a, b in pairs]


def _in_scan(eqn: Eqn, kinds: list[str]) -> list[str] | str:
    """`*carry, *ys = scan[jaxpr] *consts *carry *xs`: what the carry becomes at last.

    For `carry + g`, from zero and with a cotangent `g`, it is linear; from one, it is
    not known to be.
    """
    first, num = scan_sizes(eqn)
    # A sum begins with zero and is linear after one step: repeat until nothing changes.
    body, kinds = eqn.params["jaxpr"].jaxpr, [*kinds]
    while True:
        outs = kinds_of(body, kinds, in_loops=True)
        if isinstance(outs, str):
            return outs
        carried = _joined(kinds[first : first + num], outs[:num])
        if isinstance(carried, str):
            return carried
        if carried == kinds[first : first + num]:
            return [*carried, *outs[num:]]
        kinds[first : first + num] = carried


def _in_cond(eqn: Eqn, kinds: list[str]) -> list[str] | str:
    """`*ys = cond[branches] i *xs`: what fits all branches.

    Of a cotangent `g`, `2 * g` and 0 are linear, and `2 * g` and 1 are not.
    """
    if kinds[0] == LINEAR:
        return "a `cond` that depends on the cotangent"
    joined: list[str] | str = [ZERO for _ in eqn.outvars]
    for closed in eqn.params["branches"]:
        outs = kinds_of(closed.jaxpr, kinds[1:], in_loops=True)
        if isinstance(outs, str) or isinstance(joined, str):
            return outs if isinstance(outs, str) else joined
        joined = _joined(joined, outs)
    return joined


def _in_linear_call(eqn: Eqn, kinds: list[str]) -> list[str] | str:
    """`*ys = linear_call[jaxpr] *xs`: what its program returns.

    The author promises that it is linear; `3 * g` is, and `g * g` is not.
    """
    (closed,) = inner_programs(eqn)
    return kinds_of(closed.jaxpr, kinds, in_loops=True)


_KINDS_WITHIN = {
    "cond": _in_cond,
    "linear_call": _in_linear_call,
    "scan": _in_scan,
}


def _is_zero(eqn: Eqn, kinds: Sequence[str]) -> bool:
    """Whether an equation returns zeros, because its inputs are zero cotangents."""
    if name_of(eqn) in LINEAR_IN_EACH:
        return ZERO in kinds
    return name_of(eqn) in LINEAR_IN_ALL and {*kinds} == {ZERO}


def _is_linear_equation(eqn: Eqn, kinds: Sequence[str]) -> bool:
    """Whether an equation is linear in its linear inputs."""
    name = name_of(eqn)
    if not all(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in eqn.outvars):
        return False
    if name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        # Entries out of bounds are another number, which a transpose cannot know.
        return eqn.params["fill_value"] == 0
    if name == "convert_element_type" and eqn.params["new_dtype"].itemsize < 2:
        # A cast to so few bits is what the backward pass is for, as in FP8 training.
        return False
    # A product of two values that depend on the cotangent is of second order.
    if name in LINEAR_IN_EACH:
        return [*kinds].count(LINEAR) == 1
    # Linear in the numerator, if the denominator does not depend on the cotangent.
    if name == "div":
        return kinds[1] != LINEAR
    # Inputs that are linear together: a constant among them would be added.
    if name in LINEAR_IN_ALL:
        together = range(len(kinds))
    elif name == "select_n":
        together = range(1, len(kinds))
    else:
        together = LINEAR_IN_SOME.get(name, ())
    return all(
        kind != OTHER if i in together else kind != LINEAR
        for i, kind in enumerate(kinds)
    )
