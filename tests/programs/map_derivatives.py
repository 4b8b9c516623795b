"""Derivatives of random maps, against those of the same function in JAX."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .map_draw import Case, coarsest, Expected, Skip, widen


def differentiated(
    mode: str,
    text: str,
    package: Callable,
    plain: Callable,
    values: list,
    placed: list | None = None,
) -> Case:
    """Compares a function, or a derivative of it, with the same in JAX."""
    run = {
        "": lambda fun, args: fun(*args),
        "jit": lambda fun, args: eqx.filter_jit(fun)(*args),
        "grad": _gradient,
        "jvp": _tangent,
        "vmap": _mapped,
        "shift": _shifted,
    }[mode]
    placed = values if placed is None else placed
    by_jax = run if mode else lambda fun, args: eqx.filter_jit(fun)(*args)

    def oracle() -> Any:
        found = by_jax(plain, values)
        if mode == "shift" and not np.isfinite(found):
            raise Skip
        return loosely(found, coarsest(values))

    return Case(
        text,
        lambda: run(package, placed),
        oracle,
        by_jax=lambda: by_jax(plain, placed),
    )


def loosely(tree: Any, eps: float) -> Any:
    """These arrays, up to the rounding of longer programs."""

    def loose(x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        tolerance = 50.0 if eps > 1e-4 else 500.0
        wide = widen(x)
        # Zeros may be differences of numbers that are not small.
        finite = np.abs(np.where(np.isfinite(wide), wide, 0))
        scale = float(np.max(finite, initial=0.1))
        return Expected(wide, x.dtype, scale=scale, tolerance=tolerance, eps=eps)

    return jtu.tree_map(loose, tree)


def _objective(fun: Callable, args: list) -> tuple[Callable, Any]:
    """A number that is made of all results, and what it is differentiated in."""
    diff, rest = eqx.partition(args, eqx.is_inexact_array)

    def value(diff: Any) -> Any:
        out = fun(*eqx.combine(diff, rest))
        total = jnp.zeros(())
        wide = total.dtype
        for x in jtu.tree_leaves(out):
            if eqx.is_inexact_array(x):
                weights = jnp.cos(jnp.arange(x.size, dtype=wide)) + 1.5
                real = jnp.real(x) + jnp.imag(x) if jnp.iscomplexobj(x) else x
                total += jnp.sum(real.ravel().astype(wide) * weights)
        return total

    return value, diff


# Where nothing is used that is on a mesh, JAX compiles for one device.
_jit = functools.partial(jax.jit, keep_unused=True)


def _gradient(fun: Callable, args: list) -> Any:
    value, diff = _objective(fun, args)
    return _jit(jax.grad(value))(diff)


def _tangent(fun: Callable, args: list) -> Any:
    value, diff = _objective(fun, args)
    tangents = jtu.tree_map(lambda x: jnp.cos(x), diff)
    return _jit(lambda x, t: jax.jvp(value, (x,), (t,)))(diff, tangents)


def _shifted(fun: Callable, args: list) -> Any:
    """The derivative in something that is added to all numbers.

    Of equal numbers, that does not depend on which of them are taken for the largest.
    """
    value, diff = _objective(fun, args)
    tangents = jtu.tree_map(lambda x: jnp.ones_like(x), diff)
    return _jit(lambda x, t: jax.jvp(value, (x,), (t,))[1])(diff, tangents)


def _mapped(fun: Callable, args: list) -> Any:
    """Over scales of all inexact arguments."""
    diff, rest = eqx.partition(args, eqx.is_inexact_array)

    def run(scale: Any, diff: Any) -> Any:
        scaled = jtu.tree_map(lambda x: x * scale.astype(x.dtype), diff)
        out = fun(*eqx.combine(scaled, rest))
        return [x for x in jtu.tree_leaves(out) if eqx.is_array(x)]

    return _jit(jax.vmap(run, (0, None)))(jnp.array([1.0, 2.0]), diff)
