"""What follows from the sites of a loss, beside what JAX says."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ..experts import masked_products
from ..flags import compiler_options
from ..layers import examples
from .adapter import Sites


NUM = 3
WEIGHTS = np.arange(1.0, NUM + 1)


def cast(tree):
    def to_64(x):
        # By NumPy, which needs no program for each shape.
        wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
        return jax.device_put(np.asarray(x).astype(wide))

    return jax.tree.map(lambda x: to_64(x) if eqx.is_inexact_array(x) else x, tree)


def real(x):
    return x.real + 2 * x.imag if jnp.iscomplexobj(x) else x


def expected_of(sites, leaf, gradients):
    """What follows from the gradients of a leaf, by NumPy, which compiles nothing."""
    if not sites.is_used(leaf):
        return [gradients]
    distances = lambda mean: np.tensordot(WEIGHTS, np.abs(gradients - mean) ** 2, 1)
    found = [gradients, np.tensordot(WEIGHTS, gradients, 1), distances(gradients[0])]
    if sites.has_products_of_squares(leaf):
        found.append(distances(0))
    flat = gradients.reshape(NUM, -1)
    kernel = (flat @ flat.conj().T).real
    found.append(kernel[:, 1])
    if sites.has_products(leaf):
        found += [np.diag(kernel), kernel]
    return found


def compare(case, key=None):
    """Compares all that follows from the sites of a loss with what JAX says.

    Returns the sites and, for each leaf, whether it is contracted without a gradient.
    """
    key = jr.key(1) if key is None else key
    model, fun, _ = case
    diff, static = eqx.partition(cast(model), eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(diff)
    xs = cast(examples(case, key, NUM))

    def loss(leaves, x):
        out = fun(eqx.combine(treedef.unflatten(leaves), static), x)
        outs = [x for x in jax.tree.leaves(out) if eqx.is_inexact_array(x)]
        # Every entry of the output gets a cotangent of its own.
        ravelled = [real(x).reshape(-1) for x in outs]
        return sum(jnp.sum(jnp.sin(x) * jnp.arange(1.0, 1 + x.size)) for x in ravelled)

    one = jax.tree.map(lambda x: np.asarray(x)[0], xs)
    sites = Sites.of(lambda ws, rows: loss(ws, *rows), leaves, [one])
    weights = jnp.asarray(WEIGHTS)

    @functools.partial(jax.jit, compiler_options=compiler_options(xs))
    def run(leaves, xs):
        found = sites.examples(leaves, [xs])
        values, truth = jax.vmap(jax.value_and_grad(loss), (None, 0))(leaves, xs)
        got = [found.outputs]
        for leaf, true in enumerate(truth):
            if not sites.is_used(leaf):
                got.append(jnp.zeros_like(true))
                continue
            got.append(found.gradients(leaf))
            got.append(found.weighted_sum(leaf, weights))
            got.append(found.squared_distances(leaf, true[0], weights))
            if sites.has_products_of_squares(leaf):
                got.append(found.squared_sum(leaf, weights))
            got.append(found.inner_products(leaf, true[1]))
            if sites.has_products(leaf):
                got += found.squared_norms(leaf)
                got.append(found.kernel(leaf))
        return got, values, truth

    # The program is traced; what is traced now is JAX's reference.
    with masked_products():
        got, values, truth = jax.device_get(run(leaves, xs))
    expected = [values]
    for leaf, true in enumerate(truth):
        expected += expected_of(sites, leaf, true)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert jnp.iscomplexobj(a) == jnp.iscomplexobj(b)
        scale = np.max(np.abs(b), initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * scale)
    return sites, [*map(sites.has_products, range(len(leaves)))]
