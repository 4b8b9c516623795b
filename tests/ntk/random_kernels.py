"""Random models, and their kernels one after the other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import ShapeDtypeStruct

from eqxbatch import (
    EmpiricalKernel,
    MonteCarloKernel,
    ntk_parameterise,
)
from .. import helpers


KEY = jr.key(7)


def parameterised(make, *args, key):
    """A model in the NTK parameterisation.

    Its parameters are drawn at once, as XLA would compile a program for each of them.
    """

    def scaled(key):
        model = make(*args, key=key)
        return ntk_parameterise(model, weight_std=1.3, bias_std=0.2, key=key)

    model = eqx.filter_eval_shape(scaled, key)
    structs, static = eqx.partition(model, lambda x: isinstance(x, ShapeDtypeStruct))
    leaves, treedef = jax.tree.flatten(structs)
    ends = np.cumsum([x.size for x in leaves])
    numbers = jnp.split(jr.normal(key, (ends[-1],), leaves[0].dtype), ends[:-1])
    drawn = [x.reshape(y.shape) for x, y in zip(numbers, leaves, strict=True)]
    return eqx.combine(treedef.unflatten(drawn), static)


def network(key, width=8, depth=1, out=2, activation=jax.nn.relu):
    return parameterised(eqx.nn.MLP, 3, out, width, depth, activation, key=key)


def init(key):
    return parameterised(helpers.Bent, 3, 2, key=key)


def assert_same(got, expected, tol=None):
    """As means of kernels are the same, which cancel: wider in float32."""
    singles = (jnp.float32, jnp.complex64)
    arrays = filter(eqx.is_array, jax.tree.leaves(expected))
    if tol is None and any(x.dtype in singles for x in arrays):
        tol = 2e-4
    helpers.assert_same(got, expected, tol)


@eqx.filter_jit
def each(init, num, settings, x1, x2=None, keys=None, get=None):
    """The kernels of all samples, from a loop over models in one program."""

    def one(i):
        fold = jax.vmap(lambda key: jr.fold_in(key, i))
        key = None if keys is None else tuple(fold(key) for key in keys)
        kernel = EmpiricalKernel(init(jr.fold_in(KEY, i)), **settings)
        return kernel(x1, x2, get or ("nngp", "ntk"), key=key)

    return jax.lax.map(one, jnp.arange(num))


def sampled(x1, x2=None, num=7, init=init, keys=None, get=None, **settings):
    """Means and their standard errors.

    Fewer than 15 samples are the first of those, for which there is a program.
    """
    num_each = max(num, 15)
    kernels = jax.device_get(each(init, num_each, settings, x1, x2, keys, get))

    def mean(k):
        wide = np.mean(k[:num], 0, np.result_type(k, np.float64))
        return jnp.asarray(wide.astype(k.dtype))

    def error(k):
        wide = np.std(k[:num].astype(np.result_type(k, np.float64)), 0, ddof=1)
        return jnp.asarray((wide / num**0.5).astype(k.real.dtype))

    return jax.tree.map(mean, kernels), jax.tree.map(error, kernels)


def as_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


def kernel(num=7, init=init, **settings):
    return MonteCarloKernel(init, key=KEY, num_samples=num, **settings)
