# %% [markdown]
# # Error bands with the Laplace approximation
#
# A network does not report its uncertainty by itself. The Laplace approximation
# ([MacKay, 1992](https://doi.org/10.1162/neco.1992.4.3.448)) is a Gaussian centred at
# the trained parameters, and its precision is the curvature of the loss. It is often
# applied to the last layer only ([Daxberger et al.,
# 2021](https://arxiv.org/abs/2106.14806)). This example applies it to the last layer
# and to all layers, in a regression problem with a gap in the data.

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


NOISE, PRIOR = 0.15, 1.0


def truth(x):
    return jnp.sin(1.5 * x) + 0.2 * x


keys = jr.split(jr.key(0), 3)
left = jr.uniform(keys[0], (60,), minval=-4.0, maxval=-1.0)
right = jr.uniform(keys[1], (60,), minval=1.5, maxval=4.0)
x = jnp.concatenate([left, right])
y = truth(x) + NOISE * jr.normal(keys[2], x.shape)

# %% [markdown]
# Training finds the most likely parameters given the data and a Gaussian prior of
# precision 1 on each parameter.


# %%
def predict(model, x, y):
    return model(x)


def loss(prediction, x, y):
    return (prediction - y) ** 2 / (2 * NOISE**2)


def objective(model):
    fit = jax.vmap(lambda x, y: loss(model(x), x, y))(x, y)
    squares = [jnp.sum(w**2) for w in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    return jnp.sum(fit) + PRIOR / 2 * sum(squares)


STEPS = 4_000
optimiser = optax.adam(optax.cosine_decay_schedule(0.02, STEPS))


@eqx.filter_jit
def train(model):
    parameters, rest = eqx.partition(model, eqx.is_array)
    value_and_grad = jax.value_and_grad(lambda p: objective(eqx.combine(p, rest)))

    def step(carry, _):
        parameters, state = carry
        value, grads = value_and_grad(parameters)
        updates, state = optimiser.update(grads, state)
        return (optax.apply_updates(parameters, updates), state), value

    start = parameters, optimiser.init(parameters)
    (parameters, _), values = jax.lax.scan(step, start, length=STEPS)
    return eqx.combine(parameters, rest), values


network = eqx.nn.MLP("scalar", "scalar", 24, 2, activation=jnp.tanh, key=jr.key(1))
model, values = train(network)
print(f"objective: {values[0]:.0f} before training, {values[-1]:.0f} after it")


# %% [markdown]
# The curvature is the generalised Gauss-Newton matrix, summed over the examples. It is
# the Hessian of the loss of the linearised network, so it is positive semidefinite even
# if training has not reached a minimum. The precision of the prior is added to it.
# `where` selects the layers.


# %%
def last_layer(model):
    return model.layers[-1]


total = eqxbatch.Sum()


def posterior_precision(where):
    ggn, _ = eqxbatch.filter_ggn(
        predict, loss, where=where, accumulator=total, flat=True
    )(model, x, y)
    return ggn + PRIOR * jnp.eye(len(ggn))


# %% [markdown]
# A network is linear in its last layer, so for this layer the Hessian equals the
# Gauss-Newton matrix.

# %%
hessian, unravel = eqxbatch.filter_hessian(
    lambda model, x, y: loss(predict(model, x, y), x, y),
    where=last_layer,
    in_axes=0,
    accumulator=total,
    flat=True,
)(model, x, y)
np.testing.assert_allclose(
    hessian + PRIOR * jnp.eye(len(hessian)), posterior_precision(last_layer), rtol=1e-3
)

# %% [markdown]
# The variance of a prediction is `j @ covariance @ j`, for the covariance of the
# parameters and the Jacobian `j` of the network at the point. The Jacobians are
# computed for 64 points at a time.

# %%
grid = jnp.linspace(-7, 7, 281)
mean = jax.vmap(model)(grid)


def deviation(where):
    @eqxbatch.filter_micro_vmap(microbatch_size=64)
    def jacobian(x):
        at = lambda model: model(x)
        return eqxbatch.filter_jacobian(at, where=where, flat=True)(model)[0]

    factor = jnp.linalg.cholesky(posterior_precision(where))
    seen = jax.scipy.linalg.solve_triangular(factor, jacobian(grid).T, lower=True)
    return jnp.linalg.norm(seen, axis=0)


layers = {"last layer": last_layer, "all layers": lambda model: model}
deviations = {name: deviation(where) for name, where in layers.items()}

# %% [markdown]
# Far from the data, the last layer alone underestimates the uncertainty, because it
# takes the features from the other layers as given. With all layers, the band widens
# there and in the gap.

# %%
has_data = ((grid > -4) & (grid < -1)) | ((grid > 1.5) & (grid < 4))
is_gap = (grid > -0.5) & (grid < 1)
for name, found in deviations.items():
    is_within = jnp.abs(truth(grid) - mean) < 2 * found
    print(
        f"{name}: {jnp.mean(found[has_data]):.2f} at the data, "
        f"{jnp.mean(found[is_gap]):.2f} in the gap; "
        f"the band contains the truth at {jnp.mean(is_within):.0%} of the points"
    )
    assert jnp.mean(found[is_gap]) > 2 * jnp.mean(found[has_data])

figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), sharey=True, layout="constrained")
for axis, (name, found) in zip(axes, deviations.items(), strict=True):
    axis.fill_between(grid, mean - 2 * found, mean + 2 * found, alpha=0.3)
    axis.plot(grid, mean, label="network")
    axis.plot(grid, truth(grid), ":", color="black", label="truth")
    axis.plot(x, y, ".", color="grey", markersize=3, label="data")
    axis.set(title=f"Two standard deviations, {name}", xlabel="x", ylim=(-4, 4))
axes[0].legend(frameon=False)
path = pathlib.Path("pictures", "laplace.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
