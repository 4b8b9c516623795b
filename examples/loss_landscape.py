# %% [markdown]
# # Loss landscapes
#
# A loss landscape is the loss of a network in a plane around its trained parameters
# ([Li et al., 2018](https://arxiv.org/abs/1712.09913)). Each point of the plane takes a
# pass over all data, so the computation is a grid with three axes: two for the plane,
# and one for the data, over which the mean is taken. This example uses scikit-learn's
# handwritten digits, and two planes. One is spanned by random directions, and the other
# by the eigenvectors of the Hessian for its two largest eigenvalues.
#
# First, a grid of a function of two numbers:

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


horizontal, vertical = jnp.linspace(0, 6, 50), jnp.linspace(-1, 1, 50)
on_grid = eqxbatch.filter_grid_vmap(
    lambda x, y: jnp.sin(x) * y, in_axes={"x": "i", "y": "j"}
)
values = on_grid(horizontal, vertical)
np.testing.assert_allclose(values, np.outer(np.sin(horizontal), vertical), atol=1e-6)

# %% [markdown]
# Now load the digits.

# %%
digits = load_digits()
images = jnp.asarray(digits.data / 16, jnp.float32)
labels = jnp.asarray(digits.target, jnp.int32)


def loss(model, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


# %% [markdown]
# Train a network as usual.

# %%
value_and_grad = eqxbatch.filter_micro_value_and_grad(loss)
optimiser = optax.adam(1e-2)


@eqx.filter_jit
def step(model, state):
    value, grads = value_and_grad(model, images, labels)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


model = eqx.nn.MLP(64, 10, 12, 1, activation=jnp.tanh, key=jr.key(0))
state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
for _ in range(200):
    model, state, value = step(model, state)
print(f"loss at the end: {value:.4f}")

# %% [markdown]
# A direction is a model whose parameters are added to the trained ones. A random
# direction is only meaningful if it is scaled like the weights. Here, the weights into
# each neuron get the norm of the trained ones, and biases do not change.


# %%
def random_direction(key):
    leaves, treedef = jax.tree.flatten(eqx.filter(model, eqx.is_inexact_array))
    norm = lambda w: jnp.linalg.norm(w, axis=-1, keepdims=True)
    direction = []
    for leaf, subkey in zip(leaves, jr.split(key, len(leaves)), strict=True):
        drawn = jr.normal(subkey, leaf.shape)
        is_bias = leaf.ndim == 1
        direction.append(0 * leaf if is_bias else drawn * norm(leaf) / norm(drawn))
    return jax.tree.unflatten(treedef, direction)


# %% [markdown]
# The other two directions are eigenvectors of norm 1.

# %%
hessian, unravel = eqxbatch.filter_hessian(loss, in_axes=0, flat=True)(
    model, images, labels
)
eigenvalues, eigenvectors = jnp.linalg.eigh(hessian)
planes = {
    "Random directions": [random_direction(key) for key in jr.split(jr.key(1))],
    "Largest eigenvalues": [unravel(eigenvectors[:, -1]), unravel(eigenvectors[:, -2])],
}


# %% [markdown]
# Map the loss of one image at one point of the plane. `a` and `b` are on separate axes
# of the grid, so all of their combinations are computed. An image and its label are
# zipped on one axis. The model and the directions are not mapped. The mean over the
# images is accumulated, so only one block of the 4.7 million cells of the grid is in
# memory at a time.
#
# Accumulated axes are innermost. A block of 20,000 cells therefore contains 11 points
# with all images, and the parameters of a point are computed once for all images.


# %%
def move(model, first, second, a, b):
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)
    moved = jax.tree.map(lambda w, u, v: w + a * u + b * v, parameters, first, second)
    return eqx.combine(moved, rest)


def loss_at(model, first, second, a, b, image, label):
    return loss(move(model, first, second, a, b), image, label)


landscape = eqxbatch.filter_grid_vmap(
    loss_at,
    in_axes=(None, None, None, "i", "j", "k", "k"),
    accumulator={"k": eqxbatch.Mean()},
    block_size=20_000,
)
steps = {
    "Random directions": jnp.linspace(-1, 1, 51),
    "Largest eigenvalues": jnp.linspace(-3, 3, 51),
}
surfaces = {}
for name, (first, second) in planes.items():
    a = b = steps[name]
    surfaces[name] = landscape(model, first, second, a, b, images, labels)
    print(f"{name}: {surfaces[name].shape}, losses up to {surfaces[name].max():.2f}")

# %% [markdown]
# Compute a few points directly to check the result.

# %%
for name, (first, second) in planes.items():
    for i, j in ((25, 25), (0, 50), (13, 40)):
        moved = move(model, first, second, steps[name][i], steps[name][j])
        directly = jnp.mean(jax.vmap(loss, (None, 0, 0))(moved, images, labels))
        np.testing.assert_allclose(surfaces[name][i, j], directly, rtol=1e-4)

# %% [markdown]
# The curvatures of the second plane are known: they are the eigenvalues. Finite
# differences on the surface agree with them.

# %%
surface, width = surfaces["Largest eigenvalues"], 6 / 50
for number, near in enumerate((surface[24:27, 25], surface[25, 24:27]), start=1):
    curvature = (near[0] - 2 * near[1] + near[2]) / width**2
    print(f"eigenvalue {eigenvalues[-number]:.3f}, curvature {curvature:.3f}")
    np.testing.assert_allclose(curvature, eigenvalues[-number], rtol=0.1)

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
# `contourf` draws the rows of an array along the vertical axis.
axes[0].contourf(horizontal, vertical, values.T)
axes[0].set(title="sin(x) y", xlabel="x", ylabel="y")
levels = (0.07, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 2, 3, 5)
for axis, (name, surface) in zip(axes[1:], surfaces.items(), strict=True):
    lines = axis.contour(steps[name], steps[name], surface.T, levels, norm="log")
    axis.clabel(lines, fmt="%g", fontsize=7)
    axis.plot(0, 0, "k+")
    axis.set(title=name, xlabel="along the first", ylabel="along the second")
path = pathlib.Path("pictures", "loss_landscape.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
