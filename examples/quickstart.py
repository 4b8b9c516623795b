# %% [markdown]
# # Quickstart: train in microbatches
#
# This example trains a convolutional network on scikit-learn's handwritten digits with
# full-batch gradients. Computing the gradient in microbatches (gradient accumulation)
# gives the same gradient, but the compiled training step needs much less memory.

# %%
import pathlib
import statistics
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits

import eqxbatch


# %% [markdown]
# The data set has 1,797 images of 8 x 8 pixels. The microbatch size need not divide the
# number of images.

# %%
digits = load_digits()
images = jnp.asarray(digits.images[:, None] / 16, jnp.float32)
labels = jnp.asarray(digits.target, jnp.int32)


# %% [markdown]
# As usual in Equinox, the model takes one image. So does the loss.


# %%
class CNN(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    linear: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3 = jr.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 16, 3, padding=1, key=key1)
        self.conv2 = eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=key2)
        self.linear = eqx.nn.Linear(32 * 4 * 4, 10, key=key3)

    def __call__(self, image):
        x = jax.nn.relu(self.conv1(image))
        x = jax.nn.relu(self.conv2(x))
        return self.linear(x.reshape(-1))


def loss(model, image, label):
    logits = model(image)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


# %% [markdown]
# Next, define the gradient in two ways: for the whole batch at once, and in
# microbatches of 64. The size need not divide 1,797, and the mean is exact.


# %%
def mean_loss(model, images, labels):
    return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(model, images, labels))


at_once = eqx.filter_value_and_grad(mean_loss)
in_microbatches = eqxbatch.filter_micro_value_and_grad(loss, microbatch_size=64)

optim = optax.adam(3e-3)


def make_step(value_and_grad):
    @eqx.filter_jit
    def step(model, state):
        value, grads = value_and_grad(model, images, labels)
        updates, state = optim.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    return step


steps = {
    "at once": make_step(at_once),
    "in microbatches of 64": make_step(in_microbatches),
}

# %% [markdown]
# Train both versions side by side. Time each step, and read its peak temporary memory
# from the compiled program.

# %%
history = {name: [] for name in steps}
seconds = {name: [] for name in steps}
megabytes = {}
models = {name: CNN(jr.key(0)) for name in steps}
states = {name: optim.init(eqxbatch.parameters(models[name])) for name in steps}
for name, step in steps.items():
    compiled = step.lower(models[name], states[name]).compile()
    megabytes[name] = compiled.compiled.memory_analysis().temp_size_in_bytes / 1e6

for i in range(31):
    for name, step in steps.items():
        start = time.perf_counter()
        models[name], states[name], value = jax.block_until_ready(
            step(models[name], states[name])
        )
        if i > 0:  # The first step compiles.
            seconds[name].append(time.perf_counter() - start)
        history[name].append(float(value))


@eqx.filter_jit
def accuracy(model):
    predicted = jnp.argmax(jax.vmap(model)(images), axis=1)
    return jnp.mean((predicted == labels).astype(jnp.float32))


print(f"{'gradient':22}  {'temporary memory':>16}  {'step time':>11}  accuracy")
for name in steps:
    median = statistics.median(seconds[name])
    print(
        f"{name:22}  {megabytes[name]:13.1f} MB  {median:9.3f} s"
        f"  {accuracy(models[name]):8.1%}"
    )

# %% [markdown]
# Up to rounding, the losses are the same in every step.

# %%
difference = max(abs(a - b) / a for a, b in zip(*history.values(), strict=True))
print(f"largest relative difference of the losses: {difference:.1e}")
assert difference < 1e-2
assert megabytes["in microbatches of 64"] < megabytes["at once"] / 4

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for (name, values), style in zip(history.items(), ("-", "--"), strict=True):
    left.semilogy(values, style, label=name)
left.set(xlabel="step", ylabel="loss")
left.legend(frameon=False)
right.barh(list(megabytes), list(megabytes.values()), height=0.5)
right.set(xlabel="peak temporary memory of a step [MB]")
right.invert_yaxis()
path = pathlib.Path("pictures", "quickstart.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")
