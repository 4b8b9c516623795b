# %% [markdown]
# # NTK regression, and how a kernel drifts
#
# A sufficiently wide network stays close to its linearisation during training, so it
# learns the same function as regression with its neural tangent kernel (NTK) ([Jacot et
# al., 2018](https://arxiv.org/abs/1806.07572); [Lee et al.,
# 2019](https://arxiv.org/abs/1902.06720)). This example performs this regression on
# scikit-learn's handwritten digits, first with the kernel of a network at
# initialisation, and then with the kernel of the same network after training.

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
order = np.random.default_rng(0).permutation(len(digits.target))
images = jnp.asarray(digits.data[order] / 16, jnp.float32)
labels = jnp.asarray(digits.target[order], jnp.int32)
# Sort by label, so that each class is a block of the kernel.
train = jnp.argsort(labels[:600])
test = jnp.arange(600, 1797)
targets = jax.nn.one_hot(labels[train], 10) - 0.1

model = eqx.nn.MLP(64, 10, 256, 2, key=jr.key(0))


# %% [markdown]
# Compute the kernel of the 600 training images with themselves, and of the 1,197 test
# images with the training images, in blocks of 128. By default, the kernel is the mean
# over the ten outputs, whose kernels are nearly the same in wide networks.


# %%
def regress(model):
    """The kernel of the training set, and the test accuracy of regression with it."""
    ntk = eqxbatch.EmpiricalNTK(model, block_size=128)
    kernel = ntk(images[train])
    cross = ntk(images[test], images[train])
    ridge = 1e-3 * jnp.trace(kernel) / len(kernel)
    weights = jnp.linalg.solve(kernel + ridge * jnp.eye(len(kernel)), targets)
    accuracy = jnp.mean(jnp.argmax(cross @ weights, axis=1) == labels[test])
    return kernel, float(accuracy)


before, accuracy_before = regress(model)
print(f"NTK regression at initialisation:   {accuracy_before:.1%} of the test images")


# %% [markdown]
# Now train the network, with gradients in microbatches.


# %%
@eqxbatch.filter_micro_value_and_grad(microbatch_size=128)
def value_and_grad(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


optimiser = optax.adam(2e-3)


@eqx.filter_jit
def step(model, state):
    value, grads = value_and_grad(model, images[train], targets)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
trained = model
for _ in range(200):
    trained, state, value = step(trained, state)
predictions = jnp.argmax(jax.vmap(trained)(images[test]), axis=1)
accuracy_trained = float(jnp.mean(predictions == labels[test]))
print(f"the trained network:                {accuracy_trained:.1%}")

after, accuracy_after = regress(trained)
print(f"NTK regression after training:      {accuracy_after:.1%}")
drift = jnp.linalg.norm(after - before) / jnp.linalg.norm(before)
print(f"the kernel has drifted by {drift:.0%} of its norm")

# %% [markdown]
# With 256 units and such large steps, the network moves far from its linearisation, and
# its kernel changes. Training aligns the kernel with the labels: it develops ten
# blocks, one per digit, and ten eigenvalues stand out from the others.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
kernels = {"before": before, "after": after}
for axis, (name, kernel) in zip(axes, kernels.items(), strict=False):
    picture = axis.imshow(kernel, cmap="viridis")
    axis.set_title(f"kernel {name} training")
    axis.set_xlabel("image, by label")
    figure.colorbar(picture, ax=axis, shrink=0.8)
for name, kernel in kernels.items():
    values = jnp.linalg.eigvalsh(kernel)[::-1]
    axes[2].loglog(jnp.arange(1, len(values) + 1), values / values.sum(), label=name)
axes[2].set_title("spectrum")
axes[2].set_xlabel("eigenvalue, by size")
axes[2].set_ylabel("fraction of the trace")
axes[2].legend()
path = pathlib.Path("pictures", "ntk_regression.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
