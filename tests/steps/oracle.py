"""Gauss-Newton steps in dense float64, with parameters as real numbers."""

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np


def as_numbers(tree):
    """All numbers of a step, complex ones as two."""
    found = []
    for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)):
        wide = np.asarray(x).reshape(-1)
        parts = (wide.real, wide.imag) if np.iscomplexobj(wide) else (wide,)
        found += [part.astype(np.float64) for part in parts]
    return np.concatenate(found)


def of_numbers(model):
    """The model as a function of them, and they."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(arrays)
    split = [[x.real, x.imag] if jnp.iscomplexobj(x) else [x] for x in leaves]
    flat, unravel = jax.flatten_util.ravel_pytree(split)

    def make(flat):
        parts = unravel(flat)
        joined = [p[0] if len(p) == 1 else jax.lax.complex(*p) for p in parts]
        return eqx.combine(jax.tree.unflatten(treedef, joined), static)

    return make, flat


def real_rows(tree, like):
    """The outputs of all examples, with an axis for the numbers of each."""
    parts = []
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True):
        x = x.reshape(x.shape[0], -1)
        parts += [x.real, x.imag] if jnp.iscomplexobj(y) else [x.real]
    return jnp.concatenate(parts, axis=1)


@eqx.filter_jit
def derivatives(fun, model, batch, has_residual):
    """The Jacobians and the residuals of all examples.

    One program for all calls with the same function and shapes.
    """
    make, flat = of_numbers(model)

    def values(flat):
        model = make(flat)
        out = jax.vmap(lambda *example: fun(model, *example))(*batch)
        out, residual = out if has_residual else (out, out)
        return real_rows(out, out), real_rows(residual, out)

    return jax.jacfwd(values, has_aux=True)(flat)


def system(terms, model, batches, shares, *, centre=False, has_residual=False):
    """The Jacobian and the residuals, with roots of weights, all terms together.

    `shares` are what the squares of the examples of each term count.
    """
    jacobians, residuals = [], []
    for fun, batch, share in zip(terms, batches, shares, strict=True):
        own, of_term = jax.device_get(derivatives(fun, model, batch, has_residual))
        weights = np.asarray(share)
        if centre:
            mean = weights / weights.sum()
            own = own - np.tensordot(mean, own, 1)
            of_term = of_term - mean @ of_term
        roots = np.sqrt(weights)[:, None]
        jacobians.append((own * roots[..., None]).reshape(-1, own.shape[-1]))
        residuals.append((of_term * roots).reshape(-1))
    return np.concatenate(jacobians), np.concatenate(residuals)


def step(jacobian, residual, damping, momentum=0.0, previous=0.0):
    """The solution in the space of parameters; with a previous step, by its definition.

    That is the minimum of `|J s - r|^2 + damping |s - momentum * previous|^2`.
    """
    matrix = jacobian.T @ jacobian + damping * np.eye(jacobian.shape[1])
    right = jacobian.T @ residual + damping * momentum * previous
    return np.linalg.solve(matrix, right)


def close(got, expected, tol=1e-10):
    """Whether a step is that, relative to its largest entry."""
    found = as_numbers(got)
    scale = np.max(np.abs(expected), initial=1e-300)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tol * scale)
