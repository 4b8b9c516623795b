"""Products keep the precision that a model asks for, and digits that results need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxbatch import filter_batch_kernel, KernelAlignment, KernelProduct


PRODUCTS = ("dot_general", "conv_general_dilated")


def programs(jaxpr):
    """A jaxpr and all that its equations run."""
    yield jaxpr
    is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    for eqn in jaxpr.eqns:
        for x in jax.tree.leaves([*eqn.params.values()], is_leaf=is_program):
            if is_program(x):
                yield from programs(getattr(x, "jaxpr", x))


def precisions(fun, *args):
    """The precisions of all products of a program."""
    closed = jax.make_jaxpr(fun)(*args)
    found = [
        eqn.params["precision"]
        for jaxpr in programs(closed.jaxpr)
        for eqn in jaxpr.eqns
        if eqn.primitive.name in PRODUCTS
    ]
    return {x[0] if isinstance(x, tuple) else x for x in found}


@pytest.mark.parametrize("reduce", (KernelProduct, KernelAlignment))
def test_reductions_of_kernels_keep_digits(reduce):
    x = jnp.asarray(np.linspace(0.0, 1.0, 12, dtype=np.float32)[:, None])
    # A kernel without products of its own.
    kernel = filter_batch_kernel(
        lambda x, y: jnp.exp(-jnp.abs(x - y.T)), block_size=5, reduce=reduce(x[:, 0])
    )
    assert precisions(kernel, x, x) == {lax.Precision.HIGHEST}
    with jax.default_matmul_precision("default"):
        assert precisions(kernel, x, x) == {lax.Precision.DEFAULT}
