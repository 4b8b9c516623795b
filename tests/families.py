"""One call of each family: `python -m tests.families` counts what they compile.

It prints how many programs were compiled, and how many came from the cache in the
folder that is its first argument. The others are the families that it calls.
"""

import collections
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxbatch
from .helpers import drawn


KEY = jax.random.key(0)
MODEL = drawn(eqx.nn.MLP, 3, 2, 4, 1, jnp.tanh, key=KEY)
X, Y = np.ones((5, 3), np.float32), np.ones((5, 2), np.float32)


def loss(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def half_square(out, x):
    return jnp.sum(out**2) / 2


def linear(key):
    return eqx.nn.Linear(3, 2, key=key)


def calls():
    model = MODEL
    vector = eqx.filter(model, eqx.is_inexact_array)
    apply = lambda model, x: model(x)
    rows = {"microbatch_size": 2}
    examples = {"in_axes": 0, "microbatch_size": 2}
    return {
        "maps": lambda: eqxbatch.filter_micro_vmap(apply, in_axes=(None, 0), **rows)(
            model, X
        ),
        "clipped gradients": lambda: eqxbatch.filter_micro_grad(
            loss, clip_norm=1.0, **rows
        )(model, X, Y),
        "accumulated gradients": lambda: eqxbatch.filter_micro_grad(loss, **rows)(
            model, X, Y
        ),
        "budgets": lambda: eqxbatch.filter_micro_grad(
            loss, microbatch_size=eqxbatch.MemoryBudget("1MB")
        )(model, X, Y),
        "Hessians by sites": lambda: eqxbatch.filter_hessian(
            loss, method="sites", **examples
        )(model, X, Y),
        "Hessians by products": lambda: eqxbatch.filter_hessian(
            loss, method="products", block_size=7, **examples
        )(model, X, Y),
        "diagonals": lambda: eqxbatch.filter_hessian_diagonal(loss, **examples)(
            model, X, Y
        ),
        "Gauss-Newton matrices": lambda: eqxbatch.filter_ggn(
            apply, half_square, **examples
        )(model, X),
        "products": lambda: eqxbatch.filter_hvp(loss, **examples)(model, vector, X, Y),
        "Jacobians": lambda: eqxbatch.filter_jacobian(
            lambda model: model(X[0]), block_size=2
        )(model),
        "kernels": lambda: eqxbatch.filter_batch_kernel(
            lambda x, y: x @ y.T, block_size=2
        )(X),
        "NTK": lambda: eqxbatch.EmpiricalNTK(model, block_size=2)(X),
        "both kernels": lambda: eqxbatch.EmpiricalKernel(model)(X),
        "random models": lambda: eqxbatch.MonteCarloKernel(
            linear, key=KEY, num_samples=2
        )(X),
        "grids": lambda: eqxbatch.filter_grid_vmap(
            jnp.vdot, in_axes=(eqxbatch.grid("i"), eqxbatch.grid("j")), block_size=3
        )(X, X),
    }


def main(folder: str, *names: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    counts: collections.Counter = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    families = calls()
    for name in names:
        counts.clear()
        jax.block_until_ready(eqx.filter(families[name](), eqx.is_array))
        kinds = ("cache_misses", "cache_hits")
        found = (counts[f"/jax/compilation_cache/{kind}"] for kind in kinds)
        print(name, *found, sep="\t")


if __name__ == "__main__":
    main(*sys.argv[1:])
