# %% [markdown]
# # Which examples matter
#
# In this example, a fifth of the labels of scikit-learn's handwritten digits are wrong.
# It finds them, and finds the training images that make the network misclassify a test
# image. Both follow from dot products of gradients: a small step of gradient descent on
# a training image changes the loss of a test image by minus the learning rate times the
# dot product of their gradients. At one checkpoint, this dot product is called GradDot
# ([Charpiat et al., 2019](https://arxiv.org/abs/2102.05262)); summed over several
# checkpoints of the training, it is TracIn ([Pruthi et al.,
# 2020](https://arxiv.org/abs/2002.08484)).
#
# The matrix of dot products of gradients is a neural tangent kernel, that of the
# *loss*. `eqxbatch.EmpiricalNTK` computes it in blocks, and never materialises the
# per-example gradients.

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
is_wrong = np.asarray(jr.bernoulli(jr.key(1), 0.2, (1400,)))
shift = jr.randint(jr.key(2), (1400,), 1, 10)
given = jnp.where(is_wrong, (labels[train] + shift) % 10, labels[train])


# %% [markdown]
# Train the network for 60 epochs with batches of 100, and keep a checkpoint every 15
# epochs.


# %%
def loss(model, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


RATE, EPOCHS, BATCH = 0.1, 60, 100
grad = eqxbatch.filter_micro_grad(loss)


@eqx.filter_jit
def epoch(model, key):
    def step(model, rows):
        grads = grad(eqx.combine(model, static), images[rows], given[rows])
        return eqx.apply_updates(model, jax.tree.map(lambda g: -RATE * g, grads)), None

    arrays, static = eqx.partition(model, eqx.is_array)
    batches = jr.permutation(key, 1400).reshape(-1, BATCH)
    return eqx.combine(jax.lax.scan(step, arrays, batches)[0], static)


model = eqx.nn.MLP(64, 10, 128, 2, key=jr.key(0))
checkpoints = []
for i in range(EPOCHS):
    model = epoch(model, jr.key(i))
    if i % 15 == 14:
        checkpoints.append(model)
found = np.asarray(jnp.argmax(jax.vmap(model)(images[test]), axis=1))
is_right = found == np.asarray(labels[test])
print(f"right on {is_right.mean():.1%} of the test images")

# %% [markdown]
# The kernel takes a module that returns the loss of one example. An example is a PyTree
# of an image, its label and a sign. The module contains all checkpoints. They share no
# parameters, so the kernel of the sum of their losses is the sum of their kernels, and
# one call computes TracIn. Test images get the sign -1, so large entries belong to
# training images that increase the loss of the test image.


# %%
class SignedLoss(eqx.Module):
    checkpoints: list[eqx.nn.MLP]

    def __call__(self, example):
        image, label, sign = example
        return sign * sum(loss(model, image, label) for model in self.checkpoints)


def examples(which, labels, sign):
    return images[which], labels, jnp.full(len(labels), sign, jnp.float32)


trained_on = examples(train, given, 1.0)
harmed = examples(test, labels[test], -1.0)

# %% [markdown]
# For each of the 397 test images, find its *opponents*: the ten training images that
# increase its loss the most. `TopK` keeps only these, so only one block of the kernel
# is in memory at a time.

# %%
top = eqxbatch.TopK(10)
influence = eqxbatch.EmpiricalNTK(SignedLoss(checkpoints), block_size=256, reduce=top)
opponents = influence(harmed, trained_on)
print("opponents", opponents.indices.shape)
fraction = is_wrong[opponents.indices].mean(axis=0)
print(f"first opponents with a wrong label: {fraction[0]:.0%}")
print(f"training images with a wrong label: {is_wrong.mean():.0%}")
assert fraction.min() > 0.8

# %% [markdown]
# To find the wrong labels, rank the training images in three ways:
#
# - by the largest harm that they do to any test image, using the transposed kernel;
# - by their self-influence, the squared norm of the gradient. It is the diagonal of the
#   kernel of the training images with themselves, and needs no test images;
# - by their loss, which needs no gradients. On these data, it works equally well, but
#   it does not show which test images an example harms.

# %%
worst = eqxbatch.EmpiricalNTK(
    SignedLoss(checkpoints), block_size=256, reduce=eqxbatch.TopK(1)
)
tracin = eqxbatch.EmpiricalNTK(SignedLoss(checkpoints), block_size=256)
scores = {
    "harm to a test image": worst(trained_on, harmed).values[:, 0],
    "self-influence": tracin.diagonal(trained_on),
    "loss": jax.vmap(SignedLoss(checkpoints))(trained_on),
}
curves = {}
for name, score in scores.items():
    by_score = np.argsort(-np.asarray(score))
    curves[name] = np.cumsum(is_wrong[by_score]) / is_wrong.sum()
    print(f"{name:21} {curves[name][349]:.0%} of the wrong labels are in the first 25%")
assert min(curve[349] for curve in curves.values()) > 0.8

# %% [markdown]
# The plot shows how many of the wrong labels each ranking finds, and how often the
# opponents of a test image have wrong labels. Below are four misclassified test images,
# each next to its first four opponents, with the labels that these had in training.

# %%
figure = plt.figure(figsize=(9, 5.6), layout="constrained")
above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
left, right = above.subplots(1, 2)
checked = np.arange(1, 1401) / 1400
for name, curve in curves.items():
    left.plot(checked, curve, label=name)
left.plot([0, 1], [0, 1], color="grey", linestyle=":", label="chance")
left.set(xlabel="fraction of the labels checked", ylabel="wrong labels found")
left.legend(frameon=False)
right.bar(np.arange(1, 11), fraction)
right.axhline(is_wrong.mean(), color="grey", linestyle=":", label="chance")
right.set(xlabel="rank of the opponent", ylabel="fraction with a wrong label")
right.legend(loc="center right")
panels = below.subplots(2, 10)
shown = np.flatnonzero(~is_right)[:4]
for panel in panels.flat:
    panel.axis("off")
for number, i in enumerate(shown):
    row = panels[number // 2, 5 * (number % 2) :][:5]
    pictures = [images[test][i], *images[train][opponents.indices[i, :4]]]
    titles = [f"{labels[test][i]}, not {found[i]}"]
    titles += [f'"{given[j]}"' for j in opponents.indices[i, :4]]
    for panel, picture, title in zip(row, pictures, titles, strict=True):
        panel.imshow(picture.reshape(8, 8), cmap="gray_r")
        panel.set_title(title, fontsize=9)
path = pathlib.Path("pictures", "influential_examples.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
