"""What follows from the sites of a loss, beside what JAX says."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from eqxbatch._base.traced_function import TracedFunction
from eqxbatch._sites.factors import (
    EXAMPLE,
    Factors,
    gradients,
    inner_products,
    OTHER_EXAMPLE,
    weighted_sum,
)
from eqxbatch._sites.gram import (
    gram,
    has_products_of_squares,
    OfLeaf,
    squared_distances,
    squared_norms,
    squared_sum,
)
from eqxbatch._sites.site import is_allowed
from eqxbatch._sites.trace import Program
from ..experts import masked_products
from ..flags import compiler_options
from ..layers import examples


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


def expected_of(sites, is_comparable, gradients):
    """What follows from the gradients of a leaf, by NumPy, which compiles nothing."""
    if not sites:
        return [gradients]
    distances = lambda mean: np.tensordot(WEIGHTS, np.abs(gradients - mean) ** 2, 1)
    found = [gradients, np.tensordot(WEIGHTS, gradients, 1), distances(gradients[0])]
    if has_products_of_squares(sites):
        found.append(distances(0))
    flat = gradients.reshape(NUM, -1)
    kernel = (flat @ flat.conj().T).real
    found.append(kernel[:, 1])
    if is_comparable:
        found += [np.diag(kernel), kernel]
    return found


def compare(case, key=None):
    """Compares all that follows from the sites of a loss with what JAX says.

    Returns the program and the leaves that could be contracted without a gradient.
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
        values, truth = jax.vmap(jax.value_and_grad(loss), (None, 0))(leaves, xs)
        got = [outs[0]]
        for leaf, own, can, true in zip(
            program.leaves, sites, comparable, truth, strict=True
        ):
            if not own:
                got.append(jnp.zeros_like(true))
                continue
            got.append(gradients(own, factors, leaf))
            got.append(weighted_sum(own, factors, leaf, jnp.asarray(WEIGHTS)))
            of_leaf = OfLeaf(own, factors, leaf)
            got += squared_distances([of_leaf], [true[0]], jnp.asarray(WEIGHTS))
            if has_products_of_squares(own):
                got.append(squared_sum(of_leaf, jnp.asarray(WEIGHTS))[0])
            got.append(inner_products(own, factors, true[1]))
            if can:
                got += squared_norms([of_leaf])
                out = (EXAMPLE, OTHER_EXAMPLE)
                got.append(gram(of_leaf, of_leaf, OTHER_EXAMPLE, out))
        return got, values, truth

    # The program is traced; what is traced now is JAX's reference.
    with masked_products():
        got, values, truth = jax.device_get(run(leaves, xs))
    expected = [values]
    for own, can, true in zip(sites, comparable, truth, strict=True):
        expected += expected_of(own, can, true)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert jnp.iscomplexobj(a) == jnp.iscomplexobj(b)
        scale = np.max(np.abs(b), initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * scale)
    return program, comparable
