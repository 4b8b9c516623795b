# %% [markdown]
# # The spectrum of a Hessian during training
#
# During training, the Hessian of a classifier's loss develops a few large eigenvalues
# and a bulk near zero ([Sagun et al., 2017](https://arxiv.org/abs/1706.04454)). This
# example follows the spectrum for a network that learns scikit-learn's handwritten
# digits. The network is small enough to compute the full Hessian. Methods for large
# networks, which only use Hessian-vector products, can thus be compared with the exact
# spectrum.

# %%
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from matfree import decomp, eig, stochtrace
from sklearn.datasets import load_digits

import eqxbatch


digits = load_digits()
images = jnp.asarray(digits.data / 16, jnp.float32)
labels = jnp.asarray(digits.target, jnp.int32)


def loss(model, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


# %% [markdown]
# The network has 910 parameters. Compute the exact Hessian of the mean loss at several
# steps of training. `in_axes=0` says that the loss takes one example, and that the
# other arguments have the examples along axis 0. This makes the Hessian fast.

# %%
model = eqx.nn.MLP(64, 10, 12, 1, activation=jnp.tanh, key=jr.key(0))
exact = eqxbatch.filter_hessian(loss, in_axes=0, flat=True)
value_and_grad = eqxbatch.filter_micro_value_and_grad(loss)
optimiser = optax.sgd(0.5, momentum=0.9)


@eqx.filter_jit
def step(model, state):
    value, grads = value_and_grad(model, images, labels)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
spectra = {}
for i in range(301):
    if i in (0, 10, 50, 300):
        hessian, _ = exact(model, images, labels)
        spectra[i] = np.asarray(jnp.linalg.eigvalsh(hessian))
        print(
            f"step {i:3}: largest {spectra[i][-1]:6.3f}, tenth {spectra[i][-10]:.3f}, "
            f"smallest {spectra[i][0]:6.3f}, trace {spectra[i].sum():.2f}"
        )
    if i < 300:
        model, state, value = step(model, state)
print(f"loss at the end: {value:.4f}")

# %% [markdown]
# The Hessian of a larger network does not fit in memory, but a product with it costs
# only about as much as a few gradients. `HessianOperator` computes such products in
# microbatches, and [matfree](https://github.com/pnkraemer/matfree) works with any
# matrix-vector product.

# %%
operator = eqxbatch.HessianOperator(
    loss, model, images, labels, in_axes=0, microbatch_size=600
)
flat, unravel = ravel_pytree(eqx.filter(model, eqx.is_inexact_array))


@jax.jit
def matvec(vector):
    return ravel_pytree(operator.mv(unravel(vector)))[0]


# %% [markdown]
# Estimate the trace from products with 100 random vectors:

# %%
exactly = spectra[300]
estimator = stochtrace.estimator_monte_carlo_mean_and_sem(
    stochtrace.monte_carlo_trace(), stochtrace.sampler_signs(flat, num=100)
)
trace, error = estimator(matvec, jr.key(1))
print(f"trace, exactly: {exactly.sum():.2f}, estimated: {trace:.2f} +- {error:.2f}")
assert abs(trace - exactly.sum()) < 4 * error

# %% [markdown]
# Next, estimate the eigenvalues with the Lanczos method, with 60 products for each of
# ten random vectors. Each run returns 60 approximate eigenvalues (Ritz values) with
# their vectors. The largest ones are accurate. The others cannot be all of the 910
# eigenvalues, but weighted by the squared overlaps of their vectors with the random
# vector, they estimate the density of the spectrum ([Ghorbani et al.,
# 2019](https://arxiv.org/abs/1901.10159)).

# %%
starts = jr.normal(jr.key(2), (10, flat.size))
starts /= jnp.linalg.norm(starts, axis=1, keepdims=True)
lanczos = eig.eigh_partial(decomp.tridiag_sym(60))
values, vectors = jax.vmap(lambda start: lanczos(matvec, start))(starts)
weights = jnp.einsum("nkp,np->nk", vectors, starts) ** 2 / len(starts)
for name, found in (("exactly", exactly), ("by Lanczos", values[0])):
    largest = ", ".join(f"{value:.3f}" for value in found[:-7:-1])
    print(f"largest eigenvalues, {name}: {largest}")
np.testing.assert_allclose(values[:, -10:], np.tile(exactly[-10:], (10, 1)), rtol=1e-2)


def density(grid, values, weights, width):
    peaks = jnp.exp(-(((grid[:, None] - values) / width) ** 2) / 2)
    return peaks @ weights / (width * jnp.sqrt(2 * jnp.pi))


# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for i, values_then in spectra.items():
    left.plot(np.arange(1, 101), values_then[:-101:-1], ".-", label=f"step {i}")
left.set(xlabel="eigenvalue, by size", xscale="log", yscale="log", title="The largest")
left.legend(frameon=False)
grid = jnp.linspace(-0.05, exactly[-1] + 0.05, 1000)
of_all = jnp.full(exactly.shape, 1 / len(exactly))
width = 0.005
right.semilogy(grid, density(grid, exactly, of_all, width), label="exactly")
estimated = density(grid, values.ravel(), weights.ravel(), width)
right.semilogy(grid, estimated, "--", label="by Lanczos")
right.set(
    xlabel="eigenvalue", ylabel="density", title="All, at the end", ylim=(1e-4, None)
)
right.legend(frameon=False)
path = pathlib.Path("pictures", "hessian_spectrum.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
