# %% [markdown]
# # Batch normalisation and dropout in microbatches
#
# `equinox.nn.BatchNorm` couples the examples of a batch, because it normalises each
# example by the statistics of all of them. In microbatches, it sees one microbatch at a
# time. This example trains a network with batch normalisation and dropout, including
# its state and its keys. It measures how microbatches change the gradient, and shows
# which layers are not affected.

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


# %%
digits = load_digits()
images = jnp.asarray(digits.data[:1024] / 16, jnp.float32)
labels = jnp.asarray(digits.target[:1024], jnp.int32)


class Network(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.Module
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, kind, key):
        key1, key2 = jr.split(key)
        self.first = eqx.nn.Linear(64, 64, key=key1)
        if kind == "batch":
            self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")
        else:
            self.norm = eqx.nn.GroupNorm(8, 64)
        self.dropout = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(64, 10, key=key2)

    def __call__(self, image, state, key):
        hidden, state = self.norm(self.first(image), state=state)
        hidden = self.dropout(jax.nn.relu(hidden), key=key)
        return self.last(hidden), state


# %% [markdown]
# The loss is that of one example. With an `axis_name`, the examples of a microbatch are
# coupled. All microbatches start from the same state, and the states that they return
# are merged into one. Running means and variances are averaged, weighted by the number
# of examples. The counter of batches is the same for all microbatches, so it is taken
# from the last one.


# %%
def loss(model, state, image, label, key):
    logits, state = model(image, state, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label), state


def gradient_of(model, state, keys, size):
    value_and_grad = eqxbatch.filter_micro_value_and_grad(
        loss, axis_name="batch", microbatch_size=size
    )
    return value_and_grad(model, state, images, labels, keys)


# %% [markdown]
# Compare the gradient in microbatches with the gradient of the whole batch. Dropout
# makes no difference, because each example has its own key. Neither does group
# normalisation, which acts on one example at a time. Batch normalisation does, and more
# so for smaller microbatches. The gradient is then the exact gradient of a different
# function, known as [ghost batch normalisation](https://arxiv.org/abs/1705.08741).

# %%
keys = jr.split(jr.key(7), len(images))
sizes = (8, 64, 512)
distances = {}
for kind in ("batch", "group"):
    model, state = eqx.nn.make_with_state(Network)(kind, key=jr.key(0))
    whole = gradient_of(model, state, keys, None)[1]
    distances[kind] = []
    for size in sizes:
        gradient = gradient_of(model, state, keys, size)[1]
        off = jax.tree.map(jnp.subtract, gradient, whole)
        distances[kind].append(float(optax.tree.norm(off) / optax.tree.norm(whole)))
    shown = ", ".join(
        f"{d:.1e} ({n})" for n, d in zip(sizes, distances[kind], strict=True)
    )
    print(f"{kind} normalisation, relative change (microbatch size): {shown}")
assert max(distances["group"]) < 1e-4 < min(distances["batch"])

# %% [markdown]
# Train the network, with the state of the previous step and with new dropout keys in
# each step. Then evaluate it in inference mode, with the running statistics.

# %%
optimiser = optax.adam(1e-2)


def train(size):
    model, state = eqx.nn.make_with_state(Network)("batch", key=jr.key(0))
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, opt_state, key):
        keys = jr.split(key, len(images))
        (value, state), grads = gradient_of(model, state, keys, size)
        updates, opt_state = optimiser.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, value

    values = []
    for i in range(60):
        model, state, opt_state, value = step(model, state, opt_state, jr.key(i))
        values.append(float(value))
    inference = eqx.nn.inference_mode(model)
    test_images = jnp.asarray(digits.data[1024:] / 16, jnp.float32)
    logits, _ = eqxbatch.filter_micro_vmap(
        inference, in_axes=(0, None, None), out_axes=(0, None), microbatch_size=256
    )(test_images, state, jr.key(0))
    right = np.asarray(jnp.argmax(logits, axis=1)) == digits.target[1024:]
    return values, float(right.mean())


# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for kind, values in distances.items():
    left.loglog(sizes, values, "o-", label=f"{kind} normalisation")
left.set(xlabel="microbatch size", ylabel="relative change of the gradient")
left.legend(frameon=False)
for size in (32, None):
    values, accuracy = train(size)
    name = "whole batch" if size is None else f"microbatches of {size}"
    print(f"{name}: loss {values[-1]:.3f}, accuracy at inference {accuracy:.1%}")
    assert accuracy > 0.85
    right.semilogy(values, label=name)
right.set(xlabel="step", ylabel="loss")
right.legend(frameon=False)
path = pathlib.Path("pictures", "batch_norm.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")
