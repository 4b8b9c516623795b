"""Sites inside functions with custom derivatives.

A `jax.custom_jvp` or `jax.custom_vjp` may have any derivative, independent of the code
of the function. So the finder never goes through the function, but through its
derivative: this is linear in the tangents of parameters, and where these meet data,
there are sites as elsewhere.

The derivative is written down as JAX computes it. A backward pass is transposed, but
only if each of its equations is known to be linear in the cotangents.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.dtypes import is_complex
from .._base.jaxprs import (
    callee,
    evaluate_with,
    IDENTITIES,
    LINEAR_IN_ALL,
    LINEAR_IN_EACH,
    LINEAR_IN_SOME,
    name_of,
    parameters,
    run_equations,
)
from .._base.mesh import has_explicit_axes
from .._base.trees import safe_zip


# The kind of an input of an equation with respect to the cotangents.
_OTHER, _ZERO, _LINEAR = "other", "zero", "linear"


def unique_inputs(eqn: Any) -> list[int]:
    """The distinct variables among the inputs of an equation."""
    first: dict[Any, int] = {}
    for i, atom in enumerate(eqn.invars):
        if not isinstance(atom, jex.Literal):
            first.setdefault(atom, i)
    return list(first.values())


def linearized(
    jaxpr: Any, eqn: Any, moved: Sequence[int], outs: Sequence[int]
) -> jex.ClosedJaxpr | str:
    """The custom derivative of an equation, or the reason why there is none.

    Its inputs are those of `unique_inputs`, followed by tangents of the inputs in
    `moved`. It returns the tangents of the outputs in `outs`.
    """
    name = name_of(eqn)
    if parameters(eqn).get("symbolic_zeros") is not False:
        return f"the rule of a `{name}` asks which inputs are differentiated"
    if any(is_complex(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return f"`{name}` with complex numbers"
    if any(has_explicit_axes(atom.aval) for atom in eqn.invars):
        # The derivative names mesh axes, which are automatic in contractions.
        return f"`{name}` on a mesh with explicit axes"
    unique = unique_inputs(eqn)
    atoms, results = [eqn.invars[i] for i in unique], [eqn.outvars[i] for i in outs]
    numbers = [unique.index(i) for i in moved]

    def along(ins: list) -> tuple[Callable[..., list], list]:
        """The equation as a function of the inputs in `moved`, and their values."""
        values = dict(safe_zip(atoms, ins))

        def run(*point: Any) -> list:
            changed = safe_zip((atoms[i] for i in numbers), point)
            return run_equations(jaxpr, [eqn], results, {**values, **dict(changed)})

        return run, [ins[i] for i in numbers]

    def push(ins: list, tangents: list) -> list:
        run, point = along(ins)
        return jax.jvp(run, point, tangents)[1]

    def pull(ins: list, cotangents: list) -> tuple:
        run, point = along(ins)
        return jax.vjp(run, *point)[1](cotangents)

    avals = [atom.aval for atom in atoms]
    tangents = [avals[i] for i in numbers]
    if name.startswith("custom_jvp"):
        closed = jax.make_jaxpr(push)(avals, tangents)
    else:
        cotangents = [var.aval for var in results]
        backward = jax.make_jaxpr(pull)(avals, cotangents)
        kinds = [_OTHER] * len(avals) + [_LINEAR] * len(cotangents)
        reason = _kinds(backward.jaxpr, kinds)
        if backward.jaxpr.effects:
            reason = "side effects"
        if isinstance(reason, str):
            return f"the backward pass of a `{name}` has {reason}"

        def transpose(ins: list, tangents: list) -> tuple:
            # Only what the outputs need, because only that was checked.
            run = lambda *cotangents: _evaluate_needed(backward, [*ins, *cotangents])
            return jax.linear_transpose(run, *cotangents)(tangents)

        closed = jax.make_jaxpr(transpose)(avals, tangents)
    if closed.jaxpr.effects:
        return f"the derivative of a `{name}` has side effects"
    return closed


def _evaluate_needed(closed: Any, args: list) -> list:
    jaxpr = closed.jaxpr.replace(eqns=_needed(closed.jaxpr))
    return evaluate_with(jaxpr, list(closed.consts), args, _to_transpose)


def _to_transpose(_: int, eqn: Any) -> Callable[[list], list] | None:
    """Replaces calls, identities, and the products of `jnp.outer`.

    Some of them have no transpose. The products would repeat factors.
    """
    closed = callee(eqn)
    if closed is not None:
        return lambda ins: _evaluate_needed(closed, ins)
    if name_of(eqn) in IDENTITIES:
        return lambda ins: ins
    if name_of(eqn) != "mul":
        return None
    shapes = [atom.aval.shape for atom in eqn.invars]
    axes = [[i for i, size in enumerate(shape) if size != 1] for shape in shapes]
    if not all(axes) or {*axes[0]} & {*axes[1]} or len(shapes[0]) != len(shapes[1]):
        return None
    out = eqn.outvars[0].aval.shape

    def multiply(ins: list) -> list:
        x, y = (
            jnp.reshape(x, [out[i] for i in names]) for x, names in safe_zip(ins, axes)
        )
        # Elementwise products are not rounded as matrix products may be.
        whole = lax.Precision.HIGHEST
        product = jnp.einsum(
            x, axes[0], y, axes[1], sorted([*axes[0], *axes[1]]), precision=whole
        )
        return [jnp.reshape(product, out)]

    return multiply


def _needed(jaxpr: Any) -> list:
    """The equations that the outputs of a jaxpr depend on."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            eqns.append(eqn)
            needed |= {x for x in eqn.invars if not isinstance(x, jex.Literal)}
    return eqns[::-1]


def _kinds(jaxpr: Any, inputs: Sequence[str]) -> list[str] | str:
    """The kinds of a jaxpr's outputs, or the equation that is not linear.

    A constant that is added to something linear is not, unless it is known to be zero.
    """
    known = dict.fromkeys(jaxpr.constvars, _OTHER)
    known.update(safe_zip(jaxpr.invars, inputs))

    def kind_of(atom: Any) -> str:
        if isinstance(atom, jex.Literal):
            return _OTHER if np.any(np.asarray(atom.val) != 0) else _ZERO
        return known[atom]

    for eqn in _needed(jaxpr):
        kinds = [kind_of(atom) for atom in eqn.invars]
        closed = callee(eqn)
        if closed is not None:
            outs = _kinds(closed.jaxpr, kinds)
            if isinstance(outs, str):
                return outs
        elif name_of(eqn) in IDENTITIES:
            outs = kinds
        elif _LINEAR in kinds:
            if not _is_linear(eqn, kinds):
                return f"`{name_of(eqn)}`, which is not known to be linear"
            outs = [_LINEAR for _ in eqn.outvars]
        else:
            outs = [_ZERO if _is_zero(eqn, kinds) else _OTHER for _ in eqn.outvars]
        known.update(safe_zip(eqn.outvars, outs))
    return [kind_of(atom) for atom in jaxpr.outvars]


def _is_zero(eqn: Any, kinds: Sequence[str]) -> bool:
    """Whether an equation returns zeros, because its inputs are zero cotangents."""
    if name_of(eqn) in LINEAR_IN_EACH:
        return _ZERO in kinds
    return name_of(eqn) in LINEAR_IN_ALL and {*kinds} == {_ZERO}


def _is_linear(eqn: Any, kinds: Sequence[str]) -> bool:
    """Whether an equation is linear in its linear inputs."""
    name = name_of(eqn)
    if not all(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in eqn.outvars):
        return False
    if name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        # Entries out of bounds are another number, which a transpose cannot know.
        return eqn.params["fill_value"] == 0
    if name in LINEAR_IN_EACH:
        return [*kinds].count(_LINEAR) == 1
    if name == "div":
        return kinds[1] != _LINEAR
    if name in LINEAR_IN_ALL:
        together = range(len(kinds))
    elif name == "select_n":
        together = range(1, len(kinds))
    else:
        together = LINEAR_IN_SOME.get(name, ())
    return all(
        kind != _OTHER if i in together else kind != _LINEAR
        for i, kind in enumerate(kinds)
    )
