"""What follows from the sites of a loss, beside what JAX says."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from eqxbatch._base.jaxprs import TracedFunction
from eqxbatch._sites.einsum import EXAMPLE, OTHER_EXAMPLE
from eqxbatch._sites.factors import (
    Factors,
    gradients,
    inner_products,
    weighted_sum,
)
from eqxbatch._sites.gram import gram, OfLeaf, squared_norms
from eqxbatch._sites.second_moments import (
    has_products_of_squares,
    squared_distances,
    squared_sum,
)
from eqxbatch._sites.site import is_allowed
from eqxbatch._sites.trace import Program
from ..flags import compiler_options
from ..layers import examples


NUM = 3


def cast(tree):
    def to_64(x):
        # By NumPy, which needs no program for each shape.
        wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
        return jax.device_put(np.asarray(x).astype(wide))

    return jax.tree.map(lambda x: to_64(x) if eqx.is_inexact_array(x) else x, tree)


def real(x):
    return x.real + 2 * x.imag if jnp.iscomplexobj(x) else x


def compare(case, key=None):
    """Compares all that follows from the sites of a loss with what JAX says.

    Returns the program and the leaves that could be contracted without a gradient.
    """
    key = jr.key(1) if key is None else key
    model, fun, _ = case
    diff, static = eqx.partition(cast(model), eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(diff)
    xs = cast(examples(case, key, NUM))
    weights = jnp.arange(1.0, NUM + 1)

    def loss(leaves, x):
        out = fun(eqx.combine(treedef.unflatten(leaves), static), x)
        outs = [x for x in jax.tree.leaves(out) if eqx.is_inexact_array(x)]
        # Every entry of the output gets a cotangent of its own.
        ravelled = [real(x).reshape(-1) for x in outs]
        return sum(jnp.sum(jnp.sin(x) * jnp.arange(1.0, 1 + x.size)) for x in ravelled)

    one = jax.tree.map(lambda x: np.asarray(x)[0], xs)
    program = Program(TracedFunction(lambda ws, rows: loss(ws, *rows), leaves, [one]))
    sites = [program.sites_of(i) for i in range(len(leaves))]
    comparable = [
        all(is_allowed("gram", site, other) for site in own for other in own)
        and bool(own)
        for own in sites
    ]

    @functools.partial(jax.jit, compiler_options=compiler_options(xs))
    def run(leaves, xs):
        def one(x):
            outs, operands, pullback = program.linearize(leaves, [x], 1)
            return outs, operands, pullback([jnp.ones_like(outs[0])])

        outs, operands, cotangents = jax.vmap(one)(xs)
        factors = Factors(operands, cotangents, values=program.values(leaves))
        got, expected = [outs[0]], [jax.vmap(loss, (None, 0))(leaves, xs)]
        truth = jax.vmap(jax.grad(loss), (None, 0))(leaves, xs)
        for leaf, own, can, true in zip(
            program.leaves, sites, comparable, truth, strict=True
        ):
            if not own:
                got.append(jnp.zeros_like(true))
                expected.append(true)
                continue
            got.append(gradients(own, factors, leaf))
            expected.append(true)
            got.append(weighted_sum(own, factors, leaf, weights))
            expected.append(jnp.tensordot(weights.astype(true.dtype), true, 1))
            of_leaf = OfLeaf(own, factors, leaf)
            distances = lambda xs, mean: jnp.tensordot(
                weights, jnp.abs(xs - mean[None]) ** 2, 1
            )
            got += squared_distances([of_leaf], [true[0]], weights)
            expected.append(distances(true, true[0]))
            if has_products_of_squares(own):
                got.append(squared_sum(of_leaf, weights)[0])
                expected.append(distances(true, jnp.zeros_like(true[0])))
            got.append(inner_products(own, factors, true[1]))
            expected.append(
                jnp.real(true.conj() * true[1][None]).reshape(NUM, -1).sum(1)
            )
            if can:
                flat = true.reshape(NUM, -1)
                got += squared_norms([of_leaf])
                expected.append(jnp.sum(jnp.abs(flat) ** 2, 1))
                out = (EXAMPLE, OTHER_EXAMPLE)
                got.append(gram(of_leaf, of_leaf, OTHER_EXAMPLE, out))
                expected.append((flat @ flat.conj().T).real)
        return got, expected

    for a, b in zip(*run(leaves, xs), strict=True):
        assert a.shape == b.shape
        assert jnp.iscomplexobj(a) == jnp.iscomplexobj(b)
        scale = np.max(np.abs(b), initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * scale)
    return program, comparable
