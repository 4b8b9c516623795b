# %% [markdown]
# # Which training images matter for a prediction
#
# How would the loss of a test image change if one training image were left out? To
# first order, the answer is an influence function: the inner product of the two
# gradients, with the inverse curvature in between ([Koh and Liang,
# 2017](https://arxiv.org/abs/1703.04730)). For neural networks, EK-FAC approximates
# this inverse ([Grosse et al., 2023](https://arxiv.org/abs/2308.03296)). This example
# compares the predicted influence with the effect of leaving images out and training
# again.

# %%
import pathlib

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
images = jnp.asarray(digits.data[order] / 16, jnp.float32)
labels = jnp.asarray(digits.target[order], jnp.int32)
NUM, DECAY = 400, 3e-3
x, y = images[:NUM], labels[:NUM]


# %% [markdown]
# Train a small network with weight decay until its loss hardly changes. Each example
# has a weight in the objective; a weight of zero leaves it out.


# %%
def predict(model, image, label):
    return model(image)


def cross_entropy(logits, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def loss(model, image, label):
    return cross_entropy(predict(model, image, label), image, label)


network = eqx.nn.MLP(64, 10, 16, 1, jnp.tanh, key=jr.key(0))
start, rest = eqx.partition(network, eqx.is_inexact_array)


def fit(parameters, weights, steps, rate):
    def objective(parameters):
        model = eqx.combine(parameters, rest)
        values = jax.vmap(lambda x, y: loss(model, x, y))(x, y)
        decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(parameters))
        return jnp.sum(weights * values) / NUM + DECAY / 2 * decay

    optimiser = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def step(carry, _):
        parameters, state = carry
        value, gradient = jax.value_and_grad(objective)(parameters)
        updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(parameters, updates), state), value

    carry = parameters, optimiser.init(parameters)
    (parameters, _), values = jax.lax.scan(step, carry, length=steps)
    return parameters, values


fit = jax.jit(fit, static_argnums=(2, 3))
parameters, values = fit(start, jnp.ones(NUM), 3000, 0.02)
model = eqx.combine(parameters, rest)
print(f"objective: {values[0]:.3f} before training, {values[-1]:.4f} after it")

# %% [markdown]
# Among the test images that the network classifies correctly, choose the one with the
# largest loss.

# %%
held_out = jax.vmap(lambda x, y: loss(model, x, y))(images[NUM:], labels[NUM:])
is_right = jnp.argmax(jax.vmap(model)(images[NUM:]), 1) == labels[NUM:]
number = NUM + int(jnp.argmax(jnp.where(is_right, held_out, -jnp.inf)))
question = images[number], labels[number]
print(f"test image: a {question[1]} with loss {loss(model, *question):.3f}")

# %% [markdown]
# Compute the curvature of the training loss with EK-FAC, and use the weight decay as
# damping. A single solve, for the gradient of the test image, serves all training
# images. The inner products of the solution with the gradients of the training images
# are the derivatives of their losses along the solution, which one `jax.jvp` computes.
# No gradient of a training image is materialised.

# %%
factors = eqxbatch.filter_kfac(predict, cross_entropy, corrected=True)(model, x, y)
print(factors)
gradient = eqx.filter_grad(loss)(model, *question)
direction = factors.operator(damping=DECAY).inverse().mv(gradient)


def losses(parameters):
    model = eqx.combine(parameters, rest)
    return jax.vmap(lambda x, y: loss(model, x, y))(x, y)


_, slopes = jax.jvp(losses, (parameters,), (direction,))
influence = slopes / NUM

# %% [markdown]
# For comparison, leave out one image at a time: the 20 images with the largest absolute
# influence, and 20 others. Train the network again each time, starting from the trained
# parameters. `filter_micro_vmap` runs 20 of these trainings at a time. Training again
# with all images gives the baseline.

# %%
ranked = jnp.argsort(-jnp.abs(influence))
left_out = jnp.concatenate([ranked[:20], jr.permutation(jr.key(1), ranked[20:])[:20]])


@eqx.filter_jit
def change_without(row):
    weights = jnp.ones(NUM).at[row].set(0.0)
    again, _ = fit(parameters, weights, 500, 0.002)
    return loss(eqx.combine(again, rest), *question) - loss(model, *question)


changes = eqxbatch.filter_micro_vmap(change_without, microbatch_size=20)(left_out)
none_left_out, _ = fit(parameters, jnp.ones(NUM), 500, 0.002)
baseline = loss(eqx.combine(none_left_out, rest), *question) - loss(model, *question)
changes = changes - baseline
ranks = lambda x: jnp.argsort(jnp.argsort(x))
correlation = float(jnp.corrcoef(influence[left_out], changes)[0, 1])
of_ranks = float(jnp.corrcoef(ranks(influence[left_out]), ranks(changes))[0, 1])
print(f"correlation {correlation:.2f}, rank correlation {of_ranks:.2f}")
assert min(correlation, of_ranks) > 0.6

# %% [markdown]
# The influence of an image is the predicted increase of the test loss when the image is
# left out. Images with large positive influence help the prediction, and those with
# negative influence hurt it.

# %%
figure = plt.figure(figsize=(10, 4), layout="constrained")
grid = figure.add_gridspec(2, 9)
scatter = figure.add_subplot(grid[:, :4])
scatter.plot(influence[left_out], changes, "o", markersize=4)
ends = [float(jnp.min(influence)), float(jnp.max(influence))]
scatter.plot(ends, ends, ":", color="grey")
scatter.set(
    xlabel="influence by EK-FAC",
    ylabel="change of the test loss when left out",
    title=f"Correlation {correlation:.2f}, rank correlation {of_ranks:.2f}",
)
ranked = np.asarray(jnp.argsort(-influence))
shown = (("helps", ranked[:4]), ("hurts", ranked[::-1][:4]))
for row, (title, chosen) in enumerate(shown):
    for column, i in enumerate([number, *chosen]):
        axis = figure.add_subplot(grid[row, 4 + column])
        axis.imshow(images[i].reshape(8, 8), cmap="gray_r")
        axis.set(title="test" if column == 0 else f"{title}: {labels[i]}")
        axis.axis("off")
path = pathlib.Path("pictures", "influence.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
