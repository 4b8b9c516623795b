# %% [markdown]
# # Gaussian-process regression from a stored kernel
#
# This example computes the kernel matrix of all 1,797 handwritten digits in blocks and
# writes it to disk. By symmetry, only half of the blocks are computed. An interrupted
# run resumes where it stopped, and later runs open the stored kernel without computing
# anything.

# %%
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import eqxbatch


digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.data))
images = digits.data[order].astype(np.float32) / 16
labels = digits.target[order]
targets = np.eye(10, dtype=np.float32)[labels] - 0.1


def rbf(x1, x2=None, *, scale):
    x2 = x1 if x2 is None else x2
    squares = [jnp.sum(x**2, axis=-1) for x in (x1, x2)]
    distances = squares[0][:, None] + squares[1][None, :] - 2 * x1 @ x2.T
    return jnp.exp(-distances / (2 * scale**2))


# %% [markdown]
# The example uses a temporary folder. To keep the kernel, use a path of your own.

# %%
folder = tempfile.TemporaryDirectory()
kernel = eqxbatch.filter_batch_kernel(
    rbf,
    block_size=512,
    symmetric=True,
    store=folder.name + "/digits.zarr",
    progress=True,
)
stored = kernel(images, scale=1.5)
print(stored)

# %% [markdown]
# The kernel is on disk, and nothing is in memory yet. For the regression, read the rows
# and columns of the training examples. The kernel of the test examples with the
# training examples is a rectangle of the same array.

# %%
num_train = 1_297
noise = 1e-2
train = jnp.asarray(stored[:num_train, :num_train])
across = jnp.asarray(stored[num_train:, :num_train])

factor = jax.scipy.linalg.cho_factor(train + noise * jnp.eye(num_train), lower=True)
mean = across @ jax.scipy.linalg.cho_solve(factor, jnp.asarray(targets[:num_train]))
explained = jax.scipy.linalg.solve_triangular(factor[0], across.T, lower=True)
deviation = np.sqrt(np.maximum(1 - np.sum(np.asarray(explained) ** 2, axis=0), 0))

is_right = np.argmax(mean, axis=1) == labels[num_train:]
accuracy = np.mean(is_right)
print(f"{accuracy:.1%} of {len(is_right)} digits are recognised.")
assert accuracy > 0.97

# %% [markdown]
# Often, only a small result is needed and not the kernel itself. A reduction consumes
# the blocks one by one and keeps none of them. Here, two reductions in one pass compute
# how well the kernel aligns with the labels, for several length scales: the cosine
# similarity of the kernel and that of the labels, `columns @ columns.T`.

# %%
scales = np.geomspace(0.3, 10, 15)
columns = jnp.asarray(targets)
reduced = eqxbatch.filter_batch_kernel(
    lambda x1, x2=None, **kwargs: (rbf(x1, x2, **kwargs),) * 2,
    block_size=512,
    symmetric=True,
    reduce=(eqxbatch.KernelProduct(columns), eqxbatch.FrobeniusNorm()),
)


def alignment(scale):
    product, norm = reduced(images, scale=jnp.float32(scale))
    return jnp.sum(columns * product) / (norm * jnp.linalg.norm(columns.T @ columns))


alignments = [alignment(scale) for scale in scales]
best = scales[np.argmax(alignments)]
print(f"Best aligned with the labels at a scale of {best:.2f}.")

# %% [markdown]
# The standard deviations of the Gaussian process indicate where it is likely to be
# wrong.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
bins = np.linspace(deviation.min(), deviation.max(), 25)
left.hist(deviation[is_right], bins, density=True, alpha=0.6, label="right")
left.hist(deviation[~is_right], bins, density=True, alpha=0.6, label="wrong")
left.set(xlabel="standard deviation", ylabel="density", title="Test digits")
left.legend()
right.semilogx(scales, alignments, marker="o")
right.axvline(1.5, color="grey", linestyle=":")
right.set(xlabel="scale", ylabel="alignment with the labels", title="The kernel")
figure.tight_layout()
path = pathlib.Path("pictures", "gp_regression.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path)
print(f"saved {path}")
folder.cleanup()
assert np.mean(deviation[~is_right]) > np.mean(deviation[is_right])
