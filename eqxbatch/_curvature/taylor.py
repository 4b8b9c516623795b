"""Taylor expansions of a model in its parameters."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._base.checks import check_at_least, check_callable, check_types
from .._base.trees import shown
from .pytree import form_of


_Out = TypeVar("_Out")


class TaylorExpansion(eqx.Module, Generic[_Out]):
    """A Taylor polynomial of a model in its parameters.

    This is what [`eqxbatch.filter_taylor_expand`][] and [`eqxbatch.filter_linearize`][]
    return. `expansion(model, *args, **kwargs)` evaluates the expansion around the
    original model at the parameters of `model`.
    """

    _centre: Callable
    _degree: int = eqx.field(static=True)

    def __call__(
        self, model: Callable[..., _Out], /, *args: Any, **kwargs: Any
    ) -> _Out:
        """The value of the expansion at the inexact arrays of `model`.

        Raises `ValueError` if `model` has another structure or other shapes than the
        original model.
        """
        start, static = eqx.partition(self._centre, eqx.is_inexact_array)
        end = eqx.filter(model, eqx.is_inexact_array)
        if form_of(start) != form_of(end):
            raise ValueError(
                "`model` must have the structure and shapes of the model that was "
                f"expanded, {shown(start)}; got {shown(end)}."
            )

        def along(t: Array) -> tuple[list[PyTree], PyTree]:
            move = lambda a, b: a + t.astype(a.dtype) * (b - a)
            moved = jtu.tree_map(move, start, end)
            out = eqx.combine(moved, static)(*args, **kwargs)
            dynamic, rest = eqx.partition(out, eqx.is_inexact_array)
            return [dynamic], rest

        def derivatives(degree: int) -> Callable[[Array], tuple[list[PyTree], PyTree]]:
            """The derivatives up to this degree, and the outputs that have none."""
            if degree == 0:
                return along

            def next_one(t: Array) -> tuple[list[PyTree], PyTree]:
                lower, tangents, rest = jax.jvp(
                    derivatives(degree - 1), (t,), (one,), has_aux=True
                )
                return [*lower, tangents[-1]], rest

            return next_one

        one = jnp.ones((), jnp.float32)
        values, rest = derivatives(self._degree)(jnp.zeros((), jnp.float32))
        terms = [
            jtu.tree_map(lambda x, k=k: x / float(math.factorial(k)), term)
            for k, term in enumerate(values)
        ]
        total = functools.reduce(lambda a, b: jtu.tree_map(jnp.add, a, b), terms)
        return eqx.combine(total, rest)


def filter_taylor_expand(
    model: Callable[..., _Out], degree: int
) -> TaylorExpansion[_Out]:
    """The Taylor polynomial of a model in its parameters, around their current values.

    Returns an [`eqxbatch.TaylorExpansion`][]: a function
    `expansion(model, *args, **kwargs)` of a model with the same structure, whose
    inexact arrays are the parameters. Outputs of inexact dtypes are expanded; others
    are those of the original model.

    **Arguments:**

    - `model`: a callable PyTree.
    - `degree`: the degree of the polynomial, at least 0. Each degree takes about twice
        as long as the previous one.

    Raises `ValueError` for a negative degree and, when called, for a model with another
    structure. Raises `TypeError` for a model that is not callable and for a degree that
    is not an int.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 2, key=jax.random.key(0))
        >>> quadratic = eqxbatch.filter_taylor_expand(model, degree=2)
        >>> x = jnp.ones(2)
        >>> bool(quadratic(model, x) == model(x))
        True

        ```

    The counterpart of `neural_tangents.taylor_expand` for callable PyTrees.
    """
    check_callable("model", model)
    check_types({"degree": degree}, {"degree": int})
    check_at_least("degree", degree, 0)
    return TaylorExpansion(model, operator.index(degree))


def filter_linearize(model: Callable[..., _Out]) -> TaylorExpansion[_Out]:
    """Linearises a model in its parameters, around their current values.

    This is [`eqxbatch.filter_taylor_expand`][] with degree 1, for a callable PyTree
    `model`. The tangent kernel of the linearised model is that of the original model,
    and stays constant during training. Raises `TypeError` if `model` is not callable.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(2, "scalar", 8, 2, key=jax.random.key(0))
        >>> linear = eqxbatch.filter_linearize(model)
        >>> loss = lambda model, x: linear(model, x) ** 2
        >>> grads = eqx.filter_grad(loss)(model, jnp.ones(2))
        >>> trained = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        >>> ntk = eqxbatch.EmpiricalNTK(
        ...     eqx.Partial(linear, trained), trace_axes=(), where=lambda f: f.args
        ... )
        >>> ntk(jnp.ones((3, 2))).shape
        (3, 3)

        ```

    The counterpart of `neural_tangents.linearize` for callable PyTrees.
    """
    return filter_taylor_expand(model, 1)
