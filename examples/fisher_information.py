# %% [markdown]
# # Error bars from Fisher information
#
# This example fits a physical model to a noisy spectrum with three lines, two of which
# overlap, on a sloping background. The uncertainties of its eleven parameters follow
# from the Jacobian of the model, which measures how much the spectrum changes with each
# parameter.

# %%
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax
from jaxtyping import Array, Float

import eqxbatch


class Spectrum(eqx.Module):
    """Gaussian lines on a linear background."""

    position: Float[Array, " lines"]
    log_width: Float[Array, " lines"]
    height: Float[Array, " lines"]
    background: Float[Array, "2"]

    def __call__(self, wavelength):
        return jnp.sum(self.lines(wavelength)) + self.floor(wavelength)

    def lines(self, wavelength):
        distance = (wavelength - self.position) / jnp.exp(self.log_width)
        return self.height * jnp.exp(-(distance**2) / 2)

    def floor(self, wavelength):
        return self.background[0] + self.background[1] * wavelength

    @property
    def strength(self):
        """The areas of the lines."""
        return jnp.sqrt(2 * jnp.pi) * self.height * jnp.exp(self.log_width)


truth = Spectrum(
    position=jnp.array([-2.0, 0.7, 1.8]),
    log_width=jnp.log(jnp.array([0.3, 0.4, 0.4])),
    height=jnp.array([1.0, 1.5, 0.9]),
    background=jnp.array([0.5, 0.05]),
)
NOISE = 0.1
wavelengths = jnp.linspace(-4, 4, 300)


@eqx.filter_jit
def observe(model, key):
    noise = NOISE * jr.normal(key, wavelengths.shape)
    return jax.vmap(model)(wavelengths) + noise


data = observe(truth, jr.key(0))


# %% [markdown]
# Fit the model from a rough guess: Adam gets close, and L-BFGS converges. The loss is
# the negative log-likelihood, up to a constant, of the flux at one wavelength. It is
# summed over all wavelengths.


# %%
def loss(model, wavelength, flux):
    return (model(wavelength) - flux) ** 2 / (2 * NOISE**2)


def total_loss(model, data):
    return jnp.sum(jax.vmap(loss, in_axes=(None, 0, 0))(model, wavelengths, data))


@eqx.filter_jit
def fit(model, data, adam_steps=300):
    def value_and_grad(model):
        return jax.value_and_grad(total_loss)(model, data)

    adam, lbfgs = optax.adam(0.03), optax.lbfgs()

    def adam_step(carry, _):
        model, state = carry
        value, grad = value_and_grad(model)
        updates, state = adam.update(grad, state)
        return (optax.apply_updates(model, updates), state), value

    def lbfgs_step(carry, _):
        model, state = carry
        value, grad = value_and_grad(model)
        value_fn = lambda model: total_loss(model, data)
        updates, state = lbfgs.update(
            grad, state, model, value=value, grad=grad, value_fn=value_fn
        )
        return (optax.apply_updates(model, updates), state), value

    (model, _), values = jax.lax.scan(
        adam_step, (model, adam.init(model)), length=adam_steps
    )
    (model, _), more = jax.lax.scan(lbfgs_step, (model, lbfgs.init(model)), length=30)
    return model, jnp.concatenate([values, more])


guess = Spectrum(
    position=jnp.array([-1.7, 0.5, 2.0]),
    log_width=jnp.full(3, -0.7),
    height=jnp.ones(3),
    background=jnp.zeros(2),
)
fitted, values = fit(guess, data)
degrees = len(wavelengths) - 11
print(f"chi squared per degree of freedom: {2 * values[-1] / degrees:.2f}")

# %% [markdown]
# The Jacobian `J` has one row per wavelength and, with `flat=True`, one column per
# parameter. For Gaussian noise with the same variance everywhere, the Fisher
# information matrix is `J.T @ J` divided by this variance.

# %%
spectrum = lambda model: jax.vmap(model)(wavelengths)
jacobian, unravel = eqxbatch.filter_jacobian(spectrum, flat=True)(fitted)
fisher = jacobian.T @ jacobian / NOISE**2
covariance = jnp.linalg.inv(fisher)
errors = unravel(jnp.sqrt(jnp.diag(covariance)))

for name in ("position", "log_width", "height", "background"):
    columns = (getattr(model, name) for model in (truth, fitted, errors))
    for true, found, error in zip(*columns, strict=True):
        print(f"{name:10}  {found:6.3f} +- {error:.3f}  (truth: {true:6.3f})")

# %% [markdown]
# The generalised Gauss-Newton matrix of the loss is the same matrix. It is the Fisher
# information matrix for counts, too, if the loss is that of a Poisson distribution and
# the model returns the logarithm of its rate. The Hessian of the loss is the observed
# information. It also includes the second derivatives of the model, which matter little
# where the model fits well.

# %%
total = eqxbatch.Sum()
ggn, _ = eqxbatch.filter_ggn(
    lambda model, wavelength, flux: model(wavelength),
    lambda predicted, wavelength, flux: (predicted - flux) ** 2 / (2 * NOISE**2),
    accumulator=total,
    flat=True,
)(fitted, wavelengths, data)
hessian, _ = eqxbatch.filter_hessian(loss, in_axes=0, accumulator=total, flat=True)(
    fitted, wavelengths, data
)
observed = jnp.sqrt(jnp.diag(jnp.linalg.inv(hessian)))
ratios = observed / jnp.sqrt(jnp.diag(covariance))
np.testing.assert_allclose(ggn, fisher, rtol=1e-3, atol=1e-4 * jnp.max(fisher))
print(
    f"errors from the Hessian: {ratios.min():.2f} to {ratios.max():.2f} times as large"
)

# %% [markdown]
# The standard errors of derived quantities take one more Jacobian: that of these
# quantities with respect to the parameters. Here, they are the strengths of the lines.
# The two overlapping lines are hard to distinguish, so their strengths are
# anticorrelated.

# %%
strengths = lambda model: model.strength
along, _ = eqxbatch.filter_jacobian(strengths, flat=True)(fitted)
of_strengths = along @ covariance @ along.T
strength_errors = jnp.sqrt(jnp.diag(of_strengths))
correlation = of_strengths[1, 2] / (strength_errors[1] * strength_errors[2])
for strength, error in zip(fitted.strength, strength_errors, strict=True):
    print(f"strength    {strength:6.3f} +- {error:.3f}")
print(f"correlation of the overlapping lines: {correlation:.2f}")

# %% [markdown]
# To check the error bars, draw 200 new spectra from the fitted model and fit each of
# them. The scatter of the fitted parameters agrees with the error bars.

# %%
keys = jr.split(jr.key(1), 200)
refits, _ = jax.vmap(lambda key: fit(fitted, observe(fitted, key), 0))(keys)
scatter = jax.tree.map(lambda x: jnp.std(x, axis=0), refits)
flat_errors, flat_scatter = (
    jnp.concatenate(jax.tree.leaves(model)) for model in (errors, scatter)
)
ratios = flat_scatter / flat_errors
print(f"scatter of 200 fits: {ratios.min():.2f} to {ratios.max():.2f} times the errors")
assert ratios.min() > 0.8
assert ratios.max() < 1.25

# %%
figure, axes = plt.subplot_mosaic(
    [["fit", "matrix"], ["residuals", "matrix"]],
    figsize=(10, 4.5),
    height_ratios=(3, 1),
    width_ratios=(3, 2),
    layout="constrained",
)
top, bottom, right = axes["fit"], axes["residuals"], axes["matrix"]
best = spectrum(fitted)
spread = jnp.sqrt(jnp.sum((jacobian @ covariance) * jacobian, axis=1))
top.plot(wavelengths, data, ".", color="grey", markersize=3, label="data")
top.plot(wavelengths, best, label="fit")
top.fill_between(wavelengths, best - 2 * spread, best + 2 * spread, alpha=0.4)
floor = fitted.floor(wavelengths)
lines = floor[:, None] + jax.vmap(fitted.lines)(wavelengths)
top.plot(wavelengths, lines, ":", color="black", linewidth=1)
top.errorbar(
    fitted.position,
    fitted.floor(fitted.position) + fitted.height,
    2 * errors.height,
    2 * errors.position,
    fmt="none",
    capsize=3,
    color="black",
    label="heights and positions",
)
top.set(ylabel="flux", title="Two standard errors")
top.legend(frameon=False)
bottom.plot(wavelengths, (data - best) / NOISE, ".", color="grey", markersize=3)
bottom.axhline(0, color="black", linewidth=1)
bottom.set(xlabel="wavelength", ylabel="residual")

scale = jnp.sqrt(jnp.diag(covariance))
picture = right.imshow(covariance / jnp.outer(scale, scale), "RdBu", vmin=-1, vmax=1)
names = [f"{name} {i}" for name in ("position", "width", "height") for i in (1, 2, 3)]
names += ["offset", "slope"]
right.set_xticks(range(11), names, rotation=90)
right.set_yticks(range(11), names)
right.set(title="Correlations")
figure.colorbar(picture, ax=right, shrink=0.7)
path = pathlib.Path("pictures", "fisher_information.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
