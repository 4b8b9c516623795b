# %% [markdown]
# # Hyperparameters of a Gaussian process
#
# This example fits the hyperparameters of a Gaussian process without storing its kernel
# matrix. The log marginal likelihood needs the solution of a linear system and a
# log-determinant. Both need only products of the kernel with vectors, which
# [`eqxbatch.KernelOperator`][] computes in blocks. `lineax` solves the system by
# conjugate gradients, `matfree` estimates the log-determinant by stochastic Lanczos
# quadrature, and gradients flow through both
# ([Krämer et al., 2024](https://arxiv.org/abs/2405.17277)). The data set is small
# enough to compute the exact likelihood for comparison.

# %%
import pathlib

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import lineax
import matfree.decomp
import matfree.funm
import matfree.stochtrace
import matplotlib.pyplot as plt
import numpy as np
import optax
import scipy.optimize
import scipy.stats
from sklearn.datasets import load_diabetes

import eqxbatch


data = load_diabetes()
order = np.random.default_rng(0).permutation(len(data.data))
inputs = data.data[order] / data.data.std()
targets = (data.target[order] - data.target.mean()) / data.target.std()
inputs, targets = jnp.asarray(inputs, jnp.float32), jnp.asarray(targets, jnp.float32)
num = 342
x, y = inputs[:num], targets[:num]
x_test, y_test = inputs[num:], targets[num:]

# %% [markdown]
# The kernel is a module. Its hyperparameters are leaves, so they have gradients. The
# standard deviation of the noise is a hyperparameter as well, but not part of the
# kernel.


# %%
class RBF(eqx.Module):
    log_scale: jax.Array
    log_amplitude: jax.Array

    def __call__(self, x1, x2=None):
        x2 = x1 if x2 is None else x2
        squares = [jnp.sum(x**2, axis=-1) for x in (x1, x2)]
        distances = squares[0][:, None] + squares[1][None, :] - 2 * x1 @ x2.T
        scaled = jnp.maximum(distances, 0) * jnp.exp(-2 * self.log_scale)
        return jnp.exp(2 * self.log_amplitude - scaled / 2)


class Hyperparameters(eqx.Module):
    kernel: RBF
    log_noise: jax.Array

    @property
    def variance(self):
        return jnp.exp(2 * self.log_noise)


def operator_of(kernel):
    return eqxbatch.KernelOperator(kernel, x, block_size=128, symmetric=True)


# %% [markdown]
# The estimate of the log-determinant uses 8 random vectors, and 15 products of the
# kernel with each. For conjugate gradients, `lineax` requires a tag that says that the
# kernel with the noise on its diagonal is positive semidefinite.

# %%
lanczos = matfree.decomp.tridiag_sym(15)
log_determinant = matfree.stochtrace.estimator_monte_carlo(
    matfree.funm.monte_carlo_funm_sym_logdet(lanczos),
    matfree.stochtrace.sampler_signs(y, num=8),
)


def noisy(hyper):
    operator = operator_of(hyper.kernel)
    identity = lineax.IdentityLinearOperator(operator.in_structure())
    return lineax.TaggedLinearOperator(
        operator + hyper.variance * identity, lineax.positive_semidefinite_tag
    )


def log_likelihood(hyper, key):
    solver = lineax.CG(rtol=1e-4, atol=1e-4)
    weights = lineax.linear_solve(noisy(hyper), y, solver).value
    logdet = log_determinant(lambda v, hyper: noisy(hyper).mv(v), key, hyper)
    return -(y @ weights + logdet + num * jnp.log(2 * jnp.pi)) / 2


# %% [markdown]
# For comparison, compute the exact likelihood with a Cholesky decomposition.


# %%
@eqx.filter_jit
@eqx.filter_value_and_grad
def exact(hyper):
    factor = jnp.linalg.cholesky(hyper.kernel(x) + hyper.variance * jnp.eye(num))
    half = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return -(half @ half + logdet + num * jnp.log(2 * jnp.pi)) / 2


# %% [markdown]
# ## Fitting
#
# Each step of Adam draws new random vectors, so its gradients are unbiased up to the
# errors of the quadrature and of the solver.

# %%
start = Hyperparameters(RBF(jnp.ones(()), jnp.zeros(())), jnp.zeros(()))
num_steps = 50
optimiser = optax.adam(optax.cosine_decay_schedule(0.1, num_steps))


@eqx.filter_jit
def step(hyper, state, key):
    value, grads = eqx.filter_value_and_grad(log_likelihood)(hyper, key)
    ascent = jax.tree.map(jnp.negative, grads)
    updates, state = optimiser.update(ascent, state)
    return eqx.apply_updates(hyper, updates), state, value


fitted, state = start, optimiser.init(start)
estimates, steps, along = [], range(0, num_steps, 5), []
for i, key in enumerate(jr.split(jr.key(0), num_steps)):
    if i in steps:
        along.append(float(exact(fitted)[0]))
    fitted, state, value = step(fitted, state, key)
    estimates.append(float(value))

# %% [markdown]
# For comparison, find the optimum from there, by BFGS with the exact likelihood and
# gradient.

# %%
flat, unravel = jax.flatten_util.ravel_pytree(fitted)


def negative(flat):
    value, grads = exact(unravel(jnp.asarray(flat, jnp.float32)))
    return -float(value), -np.asarray(jax.flatten_util.ravel_pytree(grads)[0], float)


found = scipy.optimize.minimize(
    negative, np.asarray(flat, float), jac=True, options={"gtol": 0.05}
)
best = unravel(jnp.asarray(found.x, jnp.float32))


def described(hyper):
    leaves = hyper.kernel.log_scale, hyper.kernel.log_amplitude, hyper.log_noise
    scale, amplitude, noise = (float(jnp.exp(leaf)) for leaf in leaves)
    value = float(exact(hyper)[0])
    return (
        f"scale {scale:.2f}, amplitude {amplitude:.2f}, noise {noise:.3f}: {value:.2f}"
    )


for name, hyper in (("start", start), ("fitted", fitted), ("exact optimum", best)):
    print(f"{name:14}", described(hyper))

# %% [markdown]
# ## Predictions
#
# [`eqxbatch.kernel_solve`][] solves for several right-hand sides: the targets give the
# mean, and the kernel of the training examples with each test example gives its
# variance. The preconditioner is a partial Cholesky decomposition. All right-hand sides
# share the products with the kernel.

# %%
operator = operator_of(fitted.kernel)
across = fitted.kernel(x, x_test)
solution = eqxbatch.kernel_solve(
    operator,
    jnp.concatenate([y[:, None], across], axis=1),
    ridge=fitted.variance,
    preconditioner_rank=20,
    rtol=1e-5,
)
print(f"{solution.num_products} products for {len(x_test) + 1} right-hand sides.")
mean = across.T @ solution.weights[:, 0]
prior = jnp.exp(2 * fitted.kernel.log_amplitude) + fitted.variance
explained = jnp.sum(across * solution.weights[:, 1:], axis=0)
deviation = jnp.sqrt(prior - explained)

# %% [markdown]
# Compute the same with a Cholesky decomposition:

# %%
matrix = fitted.kernel(x) + fitted.variance * jnp.eye(num)
factor = jax.scipy.linalg.cho_factor(matrix, lower=True)
mean_exact = across.T @ jax.scipy.linalg.cho_solve(factor, y)
solved = jax.scipy.linalg.cho_solve(factor, across)
deviation_exact = jnp.sqrt(prior - jnp.sum(across * solved, axis=0))

# %% [markdown]
# The error bars are calibrated if, at each level, a credible interval of this level
# contains the target for that share of the test examples: 50 % of them at a level of
# 0.5, for example.

# %%
levels = np.linspace(0.05, 0.95, 19)
bounds = scipy.stats.norm.ppf((1 + levels) / 2)
standardised = np.abs((y_test - mean) / deviation)
shares = np.mean(standardised[:, None] <= bounds, axis=0)
explained_variance = 1 - jnp.mean((y_test - mean) ** 2) / jnp.var(y_test)
print(f"R² on {len(y_test)} test examples: {explained_variance:.2f}")

figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
axes[0].plot(estimates, ".", alpha=0.6, label="estimate, 8 random vectors")
axes[0].plot(steps, along, label="exact, along the way")
axes[0].axhline(float(exact(best)[0]), color="grey", linestyle=":", label="optimum")
axes[0].set(xlabel="step", ylabel="log marginal likelihood", title="Fitting")
axes[0].legend(frameon=False, loc="lower right")
by_mean = np.argsort(mean)
ranks = np.arange(len(mean))
axes[1].errorbar(
    ranks,
    mean[by_mean],
    2 * deviation[by_mean],
    fmt=".",
    elinewidth=0.7,
    label="mean",
)
axes[1].plot(ranks, y_test[by_mean], "x", markersize=4, label="observed")
axes[1].set(
    xlabel="test example, by mean",
    ylabel="disease progression (standardised)",
    title="Predictions with 2 standard deviations",
)
axes[1].legend(frameon=False)
axes[2].plot(levels, shares, marker="o", markersize=3)
axes[2].plot([0, 1], [0, 1], color="grey", linestyle=":")
axes[2].set(xlabel="level", ylabel="share of test examples", title="Calibration")
path = pathlib.Path("pictures", "gp_hyperparameters.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")

# %%
assert float(exact(best)[0]) - float(exact(fitted)[0]) < 0.5
assert np.mean(np.abs(np.subtract(estimates[::5], along))) < 5
np.testing.assert_allclose(mean, mean_exact, atol=1e-3)
np.testing.assert_allclose(deviation, deviation_exact, rtol=1e-3)
assert explained_variance > 0.3
assert np.max(np.abs(shares - levels)) < 0.15
