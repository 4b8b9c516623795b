"""Sites inside functions with custom derivatives.

A `jax.custom_jvp` or `jax.custom_vjp` may have any derivative, independent of the code
of the function. So the finder never goes through the function, but through its
derivative: this is linear in the tangents of parameters, and where these meet data,
there are sites as elsewhere.

The derivative is written down as JAX computes it. A backward pass is transposed, but
only if each of its equations is known to be linear in the cotangents.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._base.backward import along_inputs, needed_equations
from .._base.dtypes import is_complex
from .._base.jaxpr_types import Eqn, Jaxpr, JaxprAndConsts
from .._base.jaxprs import callee, evaluate_with
from .._base.mesh import has_explicit_axes
from .._base.primitives import IDENTITIES, name_of, parameters
from .._base.trees import safe_zip
from .._base.versions import Closed
from .views import Values


def linearized(
    jaxpr: Jaxpr, eqn: Eqn, moved: Sequence[int], outs: Sequence[int]
) -> Closed | str:
    """The custom derivative of an equation, or the reason why there is none.

    Its inputs are those of `unique_inputs`, followed by tangents of the inputs in
    `moved`. It returns the tangents of the outputs in `outs`.
    """
    name = name_of(eqn)
    # Such a rule may compute something else for other inputs than it does here.
    if parameters(eqn).get("symbolic_zeros") is not False:
        return f"the rule of a `{name}` asks which inputs are differentiated"
    if any(is_complex(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return f"`{name}` with complex numbers"
    if any(has_explicit_axes(atom.aval) for atom in eqn.invars):
        # The derivative names mesh axes, which are automatic in contractions.
        return f"`{name}` on a mesh with explicit axes"
    along = along_inputs(jaxpr, eqn, moved, outs)

    def push(ins: Values, tangents: Values) -> Values:
        return jax.jvp(along.function(ins), along.point(ins), tangents)[1]

    avals, tangents, cotangents = along.avals, along.tangents, along.cotangents
    # JAX transposes a forward rule for gradients, so it is linear in tangents. Nothing
    # makes sure that a backward pass is linear in cotangents, so this is looked up.
    if name.startswith("custom_jvp"):
        closed = jax.make_jaxpr(push)(avals, tangents)
    else:
        backward = along.backward()
        reason = along.why_nonlinear(backward)
        if reason is not None:
            return f"the backward pass of a `{name}` has {reason}"

        def transpose(ins: Values, tangents: Values) -> tuple:
            # Only what the outputs need, because only that was checked.
            run = lambda *cotangents: _evaluate_needed(backward, [*ins, *cotangents])
            return jax.linear_transpose(run, *cotangents)(tangents)

        closed = jax.make_jaxpr(transpose)(avals, tangents)
    # Programs with effects are not taken apart: these belong to the whole.
    if closed.jaxpr.effects:
        return f"the derivative of a `{name}` has side effects"
    return closed


def _evaluate_needed(closed: JaxprAndConsts, args: Values) -> Values:
    jaxpr = closed.jaxpr.replace(eqns=needed_equations(closed.jaxpr))
    return evaluate_with(jaxpr, list(closed.consts), args, _to_transpose)


def _to_transpose(_: int, eqn: Eqn) -> Callable[[list], list] | None:
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
    # An outer product has two factors that extend along different axes.
    shapes = [atom.aval.shape for atom in eqn.invars]
    axes = [[i for i, size in enumerate(shape) if size != 1] for shape in shapes]
    if not all(axes) or {*axes[0]} & {*axes[1]} or len(shapes[0]) != len(shapes[1]):
        return None
    out = eqn.outvars[0].aval.shape

    def multiply(ins: Values) -> Values:
        # Without the axes of size 1, a product of two arrays is left.
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
