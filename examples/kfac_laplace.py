# %% [markdown]
# # Calibrated digits: Laplace approximations with K-FAC
#
# A network that fits its training data well is often overconfident on new data. The
# Laplace approximation averages predictions over a Gaussian that is centred at the
# trained parameters, with the curvature of the loss as its precision
# ([Daxberger et al., 2021](https://arxiv.org/abs/2106.14806)). The curvature matrix of
# a large network does not fit in memory, but its Kronecker factors do ([Ritter et al.,
# 2018](https://openreview.net/forum?id=Skdvd2xAZ)). This example compares K-FAC with
# the diagonal, and with the exact curvature of the last layer.

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
# Few training images and some wrong labels, so that predictions are uncertain.
train, validation, test = slice(0, 300), slice(300, 700), slice(700, None)
is_wrong = jr.bernoulli(jr.key(1), 0.1, (300,))
given = jnp.where(is_wrong, jr.randint(jr.key(2), (300,), 0, 10), labels[train])


# %% [markdown]
# Train the network as usual.


# %%
def predict(model, image, label):
    return model(image)


def loss(logits, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


optimiser = optax.adam(3e-3)


@eqx.filter_jit
def fit(model):
    parameters, rest = eqx.partition(model, eqx.is_array)

    def mean(parameters):
        logits = jax.vmap(eqx.combine(parameters, rest))(images[train])
        return jnp.mean(jax.vmap(loss)(logits, images[train], given))

    def step(carry, _):
        parameters, state = carry
        value, gradient = jax.value_and_grad(mean)(parameters)
        updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(parameters, updates), state), value

    start = parameters, optimiser.init(parameters)
    (parameters, _), values = jax.lax.scan(step, start, length=400)
    return eqx.combine(parameters, rest), values


model, values = fit(eqx.nn.MLP(64, 10, 64, 2, key=jr.key(0)))
print(f"training loss: {values[0]:.2f} before training, {values[-1]:.4f} after it")

# %% [markdown]
# The precision of the Gaussian is the curvature, summed over the training images
# (`accumulator=eqxbatch.Sum()`), plus the precision of the prior, which is the damping
# of the operator. Each approximation only has to map white noise to a change of the
# parameters with this precision. For K-FAC, `inverse().sqrt()` does so.

# %%
call = model, images[train], given
settings = {"in_axes": 0, "accumulator": eqxbatch.Sum()}
factors = eqxbatch.filter_kfac(predict, loss, **settings)(*call)
diagonal, unravel = eqxbatch.filter_ggn_diagonal(predict, loss, flat=True, **settings)(
    *call
)
last, unravel_last = eqxbatch.filter_ggn(
    predict, loss, where=lambda model: model.layers[-1], flat=True, **settings
)(*call)
print(factors)


def by_kfac(prior):
    root = factors.operator(damping=prior).inverse().sqrt()
    return lambda noise: root.mv(unravel(noise))


def by_diagonal(prior):
    return lambda noise: unravel(noise / jnp.sqrt(diagonal + prior))


def by_last_layer(prior):
    values, vectors = jnp.linalg.eigh(last)
    scales = 1 / jnp.sqrt(jnp.maximum(values, 0) + prior)

    def change(noise):
        of_last = unravel_last(vectors @ (scales * noise[: len(values)]))
        zeros = unravel(jnp.zeros(len(diagonal)))
        return eqx.combine(of_last, zeros)

    return change


# %% [markdown]
# Average the predictions over 60 samples of the Gaussian. As the Gauss-Newton matrix
# assumes, the network is linearised in its parameters ([Immer et al.,
# 2021](https://arxiv.org/abs/2008.08494)): `jax.jvp` computes how a change of the
# parameters changes the logits.

# %%
parameters, rest = eqx.partition(model, eqx.is_inexact_array)
noise = jr.normal(jr.key(3), (60, len(diagonal)))


@eqx.filter_jit
def probabilities(way, prior):
    """Predictions for all images that were not used for training."""
    change = way(prior)

    def logits(parameters):
        return jax.vmap(eqx.combine(parameters, rest))(images[300:])

    def sample(noise):
        mean, moved = jax.jvp(logits, (parameters,), (change(noise),))
        return jax.nn.softmax(mean + moved)

    return jnp.mean(eqxbatch.filter_micro_vmap(sample, microbatch_size=10)(noise), 0)


def log_likelihood(found, labels):
    return float(jnp.mean(jnp.log(found[jnp.arange(len(labels)), labels] + 1e-12)))


def calibration(found, labels, bins=10):
    """Mean confidence and accuracy per bin, and the expected calibration error."""
    sure, is_right = jnp.max(found, 1), jnp.argmax(found, 1) == labels
    where = np.minimum((np.asarray(sure) * bins).astype(int), bins - 1)
    counts = np.bincount(where, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = np.bincount(where, np.asarray(sure), bins) / counts
        rates = np.bincount(where, np.asarray(is_right), bins) / counts
    error = np.nansum(counts * np.abs(means - rates)) / len(labels)
    return means, rates, float(error)


# %% [markdown]
# For each approximation, choose the precision of the prior by the log-likelihood of the
# validation images.

# %%
PRIORS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
chosen, held_out = slice(0, 400), slice(400, None)
ways = {
    "K-FAC": by_kfac,
    "diagonal": by_diagonal,
    "last layer, exact": by_last_layer,
}
found = {"no approximation": jax.nn.softmax(jax.vmap(model)(images[test]))}
for name, way in ways.items():
    of_priors = {prior: probabilities(way, jnp.asarray(prior)) for prior in PRIORS}
    scores = {
        prior: log_likelihood(own[chosen], labels[validation])
        for prior, own in of_priors.items()
    }
    prior = max(scores, key=scores.get)
    found[name] = of_priors[prior][held_out]
    print(f"{name}: prior precision {prior:.0f}")

# %% [markdown]
# Finally, evaluate all of them on images that were not used before. The expected
# calibration error is the mean difference between confidence and accuracy.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
axes[0].plot([0, 1], [0, 1], ":", color="grey")
scores = []
for name, own in found.items():
    means, rates, error = calibration(own, labels[test])
    score = log_likelihood(own, labels[test])
    accuracy = float(jnp.mean(jnp.argmax(own, 1) == labels[test]))
    scores.append(score)
    axes[0].plot(means, rates, "o-", markersize=3, label=name)
    print(
        f"{name}: log-likelihood {score:.3f}, calibration error {error:.3f}, "
        f"accuracy {accuracy:.1%}"
    )
axes[0].set(xlabel="confidence", ylabel="accuracy", title="Held-out digits")
axes[0].legend(frameon=False)
axes[1].barh(list(found), scores)
axes[1].set(xlabel="log-likelihood per image", title="Higher is better")
axes[1].invert_yaxis()
assert scores[1] > scores[0]
path = pathlib.Path("pictures", "kfac_laplace.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
