# %% [markdown]
# # Clipped and noisy gradients
#
# This example trains on data with wrong labels, and clips each per-example gradient by
# its norm. A fifth of the labels of scikit-learn's handwritten digits are replaced by
# random ones. Once a network has learnt something, the gradients of mislabelled images
# become large and disturb the training. Clipping bounds the effect of each image.
#
# A third run also adds Gaussian noise to the sum of the clipped gradients. The standard
# deviation of the noise in each entry is the norm to which gradients are clipped. This
# is the update of DP-SGD ([Abadi et al., 2016](https://arxiv.org/abs/1607.00133)), but
# without privacy accounting; see
# [private training](private_training.md) for that.

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
train, test = slice(0, 1400), slice(1400, None)
is_wrong = jr.bernoulli(jr.key(1), 0.2, (1400,))
given = jnp.where(is_wrong, jr.randint(jr.key(2), (1400,), 0, 10), labels[train])


# %% [markdown]
# The loss takes one image. It needs no changes for batches or for clipping.


# %%
def loss(model, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


# %% [markdown]
# `explain_sites` shows how the norm of the per-example gradient is computed for each
# parameter. In a matrix product, this gradient is a product of two small arrays, its
# *factors*. If the norm is computed from the factors, the per-example gradients are
# never materialised.

# %%
network = eqx.nn.MLP(64, 10, 128, 2, key=jr.key(0))
print(eqxbatch.explain_sites(loss, network, images, labels))

# %% [markdown]
# Each training step processes the 1,400 images in microbatches of 128; the last one has
# 120. The noise is added to the mean gradient and not to the sum, so it is divided by
# the number of images.

# %%
CLIP = 0.5


def make_step(optimiser, clip_norm, noise):
    value_and_grad = eqxbatch.filter_micro_value_and_grad(
        loss, microbatch_size=128, clip_norm=clip_norm, return_norms=True
    )

    @eqx.filter_jit
    def step(model, state, key):
        value, grads, statistics = value_and_grad(model, images[train], given)
        leaves, treedef = jax.tree.flatten(grads)
        keys = jr.split(key, len(leaves))
        noisy = [
            g + noise * CLIP / 1400 * jr.normal(k, g.shape)
            for g, k in zip(leaves, keys, strict=True)
        ]
        updates, state = optimiser.update(treedef.unflatten(noisy), state)
        return eqx.apply_updates(model, updates), state, value, statistics.norms

    return step


@eqx.filter_jit
def accuracy(model):
    found = jnp.argmax(jax.vmap(model)(images[test]), axis=1)
    return jnp.mean((found == labels[test]).astype(jnp.float32))


# %% [markdown]
# Each run uses a suitable learning rate: clipped gradients are small, so a rate of 1.0
# works, which diverges without clipping. Without clipping, the network first learns the
# digits and then memorises the wrong labels.

# %%
runs = {
    "not clipped": (0.1, None, 0.0),
    "clipped": (1.0, CLIP, 0.0),
    "clipped, noisy": (1.0, CLIP, 1.0),
}
curves, last_norms = {}, {}
for name, (rate, clip_norm, noise) in runs.items():
    optimiser = optax.sgd(rate, momentum=0.9)
    step = make_step(optimiser, clip_norm, noise)
    model, state = network, optimiser.init(eqx.filter(network, eqx.is_inexact_array))
    curve = []
    for i in range(300):
        model, state, value, norms = step(model, state, jr.key(i))
        curve.append(float(accuracy(model)))
    curves[name], last_norms[name] = curve, norms
    print(f"{name:15} loss {value:.3f}, test accuracy {np.mean(curve[-10:]):.1%}")

# %% [markdown]
# The norms before clipping, which `return_norms=True` returns, reveal the mislabelled
# images.

# %%
norms = last_norms["clipped"]
ratio = float(jnp.median(norms[is_wrong]) / jnp.median(norms[~is_wrong]))
print(f"median norm with a wrong label: {ratio:.0f} times that with a right one")
assert ratio > 3
assert np.mean(curves["clipped"][-10:]) > np.mean(curves["not clipped"][-10:])

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for name, curve in curves.items():
    left.plot(curve, label=name)
left.set(xlabel="step", ylabel="test accuracy", ylim=(0.6, 1))
left.legend(frameon=False)
bins = np.geomspace(float(norms.min()) + 1e-4, float(norms.max()), 40)
for name, chosen in (("right label", ~is_wrong), ("wrong label", is_wrong)):
    right.hist(np.asarray(norms[chosen]), bins, alpha=0.6, label=name)
right.axvline(CLIP, color="black", linewidth=1)
right.set(xlabel="norm of the gradient of an image", ylabel="images", xscale="log")
right.legend(frameon=False)
path = pathlib.Path("pictures", "clipped_gradients.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")
