# %% [markdown]
# # Ensembles and hyperparameters on a grid
#
# Networks that are trained from different initial parameters agree near the training
# data, and disagree elsewhere ([Lakshminarayanan et al.,
# 2017](https://arxiv.org/abs/1612.01474)). To show this, the example evaluates every
# network on every input, which is a grid of models and inputs, and computes the mean
# and the variance over the models. A second grid trains networks for every combination
# of learning rate and weight decay.

# %%
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax

import eqxbatch


NOISE = 0.2


def truth(x):
    return jnp.sin(1.5 * x) + 0.2 * x


def draw(key, num):
    """Data with a gap in the middle."""
    keys = jr.split(key, 2)
    x = jr.uniform(keys[0], (num,), minval=-2.75, maxval=2.75)
    x = x + jnp.where(x < 0, -1.25, 1.25)
    return x, truth(x) + NOISE * jr.normal(keys[1], x.shape)


x, y = draw(jr.key(0), 64)
held_out = draw(jr.key(1), 256)

# %% [markdown]
# The training function takes a network and two hyperparameters, and returns the trained
# network.


# %%
def error(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def train(model, rate, decay, num_steps):
    optimiser = optax.adamw(rate, weight_decay=decay)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def step(carry, _):
        parameters, state = carry
        grads = jax.grad(lambda p: error(eqx.combine(p, rest), x, y))(parameters)
        updates, state = optimiser.update(grads, state, parameters)
        return (optax.apply_updates(parameters, updates), state), None

    start = parameters, optimiser.init(parameters)
    (parameters, _), _ = jax.lax.scan(step, start, length=num_steps)
    return eqx.combine(parameters, rest)


# %% [markdown]
# An ensemble is a module whose arrays have an additional axis for the networks.
# `eqx.filter_vmap` creates it from keys, and trains all of its networks at once.


# %%
@eqx.filter_vmap
def make(key):
    return eqx.nn.MLP("scalar", "scalar", 24, 2, activation=jnp.tanh, key=key)


@eqx.filter_jit
@eqx.filter_vmap
def fit(model):
    return train(model, rate=5e-3, decay=1e-3, num_steps=1_000)


networks = make(jr.split(jr.key(2), 20))
ensemble = fit(networks)

# %% [markdown]
# The models are on one axis of the grid and the inputs on the other. Along the models,
# only the mean and the variance are kept.


# %%
def predict(model, x):
    return model(x)


points = jnp.linspace(-5, 5, 401)
mean, variance = eqxbatch.filter_grid_vmap(
    predict,
    in_axes={"model": "model", "x": "x"},
    accumulator={"model": eqxbatch.Variance()},
    block_size=1_000,
)(ensemble, points)

# %% [markdown]
# Nested `vmap`s give the same result, but materialise all predictions.

# %%
each = eqx.filter_vmap(lambda model: jax.vmap(model)(points))(ensemble)
np.testing.assert_allclose(mean, each.mean(0), rtol=1e-3, atol=1e-4)
np.testing.assert_allclose(variance, each.var(0), rtol=1e-2, atol=1e-5)
deviation = jnp.sqrt(variance)
has_data = (jnp.abs(points) > 1.25) & (jnp.abs(points) < 4)
for name, where in (("at the data", has_data), ("elsewhere", ~has_data)):
    print(f"standard deviation {name}: {jnp.mean(deviation[where]):.3f}")
assert jnp.mean(deviation[~has_data]) > 2 * jnp.mean(deviation[has_data])

# %% [markdown]
# A cell of the grid may compute anything, including a whole training run. Here, the
# grid has 8 learning rates, 5 weight decays and 3 of the untrained networks, and the
# result is the error on held-out data, averaged over these networks. Of the 120
# training runs, 30 run at a time.

# %%
rates = jnp.geomspace(1e-4, 1e-1, 8)
decays = jnp.geomspace(1e-3, 1e1, 5)


@eqxbatch.filter_grid_vmap(
    in_axes={"model": "model", "rate": "rate", "decay": "decay"},
    accumulator={"model": eqxbatch.Mean()},
    block_size=30,
)
def error_after(model, rate, decay):
    return error(train(model, rate, decay, num_steps=300), *held_out)


few = jax.tree.map(lambda w: w[:3] if eqx.is_array(w) else w, networks)
errors = error_after(few, rates, decays)
i, j = np.unravel_index(np.argmin(errors), errors.shape)
print(
    f"smallest of {errors.size} errors: {errors[i, j]:.3f}, for a learning rate of "
    f"{rates[i]:.2g} and a weight decay of {decays[j]:.2g}; "
    f"variance of the noise: {NOISE**2:.3f}"
)
assert errors[i, j] < 2 * NOISE**2

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
left.fill_between(points, mean - 2 * deviation, mean + 2 * deviation, alpha=0.3)
left.plot(points, mean, label="mean of the networks")
left.plot(points, truth(points), ":", color="black", label="truth")
left.plot(x, y, ".", color="grey", markersize=3, label="data")
left.set(title="Two standard deviations", xlabel="x", ylim=(-4, 4))
left.legend(frameon=False)
mesh = right.pcolormesh(decays, rates, errors, norm="log", shading="nearest")
right.plot(decays[j], rates[i], "w*")
right.set(
    title="Error on held-out data",
    xlabel="weight decay",
    ylabel="learning rate",
    xscale="log",
    yscale="log",
)
figure.colorbar(mesh, ax=right)
path = pathlib.Path("pictures", "ensemble_grid.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
