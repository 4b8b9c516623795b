# %% [markdown]
# # Natural gradients with K-FAC
#
# The natural gradient is the gradient times the inverse of the Fisher matrix, which
# measures how much each direction in parameter space changes the predictions of the
# model ([Amari, 1998](https://doi.org/10.1162/089976698300017746)). K-FAC ([Martens and
# Grosse, 2015](https://arxiv.org/abs/1503.05671)) makes it affordable: it approximates
# the block of each layer by a Kronecker product of two small matrices, and neglects all
# other blocks. This example trains a small convolutional network on handwritten digits
# with K-FAC in an `optax` chain, and compares it with Adam.

# %%
import pathlib
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import eqxbatch


digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = jnp.asarray(digits.images[order, None] / 16 - 0.3, jnp.float32)
labels = jnp.asarray(digits.target[order], jnp.int32)
train, test = slice(0, 1400), slice(1400, None)


# %% [markdown]
# The model, and the loss of its output for one image, need no changes for K-FAC.


# %%
class Network(eqx.Module):
    convolutions: list[eqx.nn.Conv2d]
    last: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jr.split(key, 3)
        self.convolutions = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            eqx.nn.Conv2d(16, 16, 3, stride=2, padding=1, key=keys[1]),
        ]
        self.last = eqx.nn.Linear(16 * 4 * 4, 10, key=keys[2])

    def __call__(self, x):
        for layer in self.convolutions:
            x = jax.nn.relu(layer(x))
        return self.last(x.ravel())


def predict(model, image, label):
    return model(image)


def loss(logits, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


# %% [markdown]
# `filter_kfac` returns the Kronecker factors for a batch. With `fisher="mc"`, labels
# are drawn from the model's own predictions, so all factors take one forward and one
# backward pass. The table shows the sizes of the two factors of each layer, for its
# outputs and its inputs. The bias counts as one additional input.


# %%
def factors_of(model, images, labels, key):
    return eqxbatch.filter_kfac(
        predict,
        loss,
        fisher="mc",
        key=key,
        sampler=jr.categorical,
    )(model, images, labels)


network = Network(key=jr.key(0))
first = factors_of(network, images[:128], labels[:128], jr.key(1))
print(first)

# %% [markdown]
# `scale_by_kfac` is a gradient transformation. It averages the factors over steps, adds
# damping, and multiplies the gradient by the inverse. The inverse needs an
# eigendecomposition of each factor, and is computed anew every fifth step. Natural
# gradients are large where the curvature is small, so their norm in the metric of the
# Fisher matrix is bounded.

# %%
kfac = eqxbatch.scale_by_kfac(
    first, damping=1e-3, decay=0.95, inverse_update_period=5, norm_constraint=0.01
)


# %% [markdown]
# Both optimisers use minibatches of 128 images and a cosine schedule. The settings
# are the best of a small search: for Adam, a learning rate of 0.1, out of 0.003, 0.01,
# 0.03 and 0.1; for K-FAC, a learning rate of 1.0, out of 0.3 and 1.0, a damping of
# 0.001, out of 0.001 and 0.003, and a bound of 0.01, out of 0.01, 0.1 and 1.0.

# %%
STEPS, BATCH = 120, 128


def make_step(optimiser, has_factors):
    def mean(model, images, labels):
        logits = jax.vmap(model)(images)
        return jnp.mean(jax.vmap(loss)(logits, images, labels))

    @eqx.filter_jit
    def step(model, state, images, labels, key):
        value, gradient = eqx.filter_value_and_grad(mean)(model, images, labels)
        extra = {}
        if has_factors:
            extra["factors"] = factors_of(model, images, labels, key)
        updates, state = optimiser.update(gradient, state, **extra)
        return eqx.apply_updates(model, updates), state, value

    return step


def fit(optimiser, *, has_factors=False):
    step = make_step(optimiser, has_factors)
    model = Network(key=jr.key(0))
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    rng, keys = np.random.default_rng(1), jr.split(jr.key(2), STEPS)
    batches = [rng.choice(1400, BATCH, replace=False) for _ in range(STEPS)]
    # The first call compiles, and its result is not used.
    jax.block_until_ready(step(model, state, images[:BATCH], labels[:BATCH], keys[0]))
    values, seconds = [], 0.0
    for rows, key in zip(batches, keys, strict=True):
        start = time.perf_counter()
        model, state, value = step(model, state, images[rows], labels[rows], key)
        value.block_until_ready()
        seconds += time.perf_counter() - start
        values.append((seconds, float(value)))
    right = jnp.argmax(jax.vmap(model)(images[test]), 1) == labels[test]
    return np.array(values), float(jnp.mean(right))


def schedule(rate):
    return optax.scale_by_learning_rate(optax.cosine_decay_schedule(rate, STEPS))


chains = {
    "Adam": (optax.chain(optax.scale_by_adam(), schedule(0.1)), False),
    "K-FAC": (optax.chain(kfac, schedule(1.0)), True),
}
curves = {}
for name, (optimiser, has_factors) in chains.items():
    curves[name], accuracy = fit(optimiser, has_factors=has_factors)
    last = np.mean(curves[name][-10:, 1])
    print(f"{name}: training loss {last:.5f}, test accuracy {accuracy:.1%}")

# %% [markdown]
# K-FAC needs fewer steps than Adam, but each step takes longer. The plot on the right
# shows the loss over time. Computing the factors takes about as long as the gradient;
# the rest is eigendecompositions, which dominate for a network as small as this one.
# The larger the batch, the less they matter.


# %%
def smooth(values):
    return np.convolve(values, np.ones(10) / 10, mode="valid")


figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), sharey=True, layout="constrained")
for name, found in curves.items():
    values = smooth(found[:, 1])
    axes[0].semilogy(np.arange(len(values)), values, label=name)
    axes[1].semilogy(found[: len(values), 0], values, label=name)
axes[0].set(xlabel="step", ylabel="training loss", title="Over steps")
axes[1].set(xlabel="seconds", title="Over time")
axes[0].legend(frameon=False)
path = pathlib.Path("pictures", "natural_gradient.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
