# %% [markdown]
# # Laplace approximations
#
# A network does not report its uncertainty by itself. The Laplace approximation
# ([MacKay, 1992](https://doi.org/10.1162/neco.1992.4.3.448)) is a Gaussian centred at
# the trained parameters, whose precision is the curvature of the loss plus that of the
# prior. In three lines, it gives the variances of predictions, their covariances, and a
# marginal likelihood that chooses the prior without validation data ([Daxberger et al.,
# 2021](https://arxiv.org/abs/2106.14806)). This example does all of it with Kronecker
# factors ([Ritter et al., 2018](https://openreview.net/forum?id=Skdvd2xAZ)), for
# regression and for classification.

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


def predict(model, x, y):
    return model(x)


def squares(model):
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(jnp.sum(w**2) for w in leaves), sum(w.size for w in leaves)


def minimised(objective, start, steps, rate):
    parameters, rest = eqx.partition(start, eqx.is_inexact_array)
    optimiser = optax.adam(optax.cosine_decay_schedule(rate, steps))
    grad = jax.grad(lambda parameters: objective(eqx.combine(parameters, rest)))

    def step(carry, _):
        parameters, state = carry
        updates, state = optimiser.update(grad(parameters), state)
        return (optax.apply_updates(parameters, updates), state), None

    carry = parameters, optimiser.init(parameters)
    return eqx.combine(jax.lax.scan(step, carry, length=steps)[0][0], rest)


# %% [markdown]
# ## Regression
#
# The data have a gap. Training minimises the squared error plus a Gaussian prior. The
# Kronecker factors are those of the sum over the examples, for a noise of variance 1.

# %%
keys = jr.split(jr.key(0), 3)
left = jr.uniform(keys[0], (60,), minval=-4.0, maxval=-1.0)
right = jr.uniform(keys[1], (60,), minval=1.5, maxval=4.0)
truth = lambda x: jnp.sin(1.5 * x) + 0.2 * x
x = jnp.concatenate([left, right])
y = truth(x) + 0.15 * jr.normal(keys[2], x.shape)


def squared_error(prediction, x, y):
    return (prediction - y) ** 2 / 2


@eqx.filter_jit
def trained(model):
    errors = lambda model: jax.vmap(squared_error)(jax.vmap(model)(x), x, y)
    objective = lambda m: jnp.sum(errors(m)) / 0.15**2 + squares(m)[0] / 2
    return minimised(objective, model, 3_000, 0.02)


model = trained(eqx.nn.MLP("scalar", "scalar", 24, 2, jnp.tanh, key=jr.key(1)))
settings = {"in_axes": 0, "accumulator": eqxbatch.Sum()}
factors = eqxbatch.filter_kfac(predict, squared_error, **settings)(model, x, y)
print(factors)

# %% [markdown]
# With noise of variance `v` and a prior of precision `p`, the precision of the Gaussian
# is `(F + p * v) / v`, for the curvature `F` in the factors: `p * v` is the damping of
# their operator. The marginal likelihood is the joint density at the trained parameters
# over the root of the determinant of this precision, up to a constant. `logdet` takes
# the determinant from the eigenvalues, and `jax.grad` goes through it: gradient steps
# find noise and prior.

# %%
size, num = squares(model)
error = jnp.sum((jax.vmap(model)(x) - y) ** 2)


def negative_log_marginal(logs):
    prior, noise = jnp.exp(logs)
    logdet = factors.operator(damping=prior * noise).logdet() - num * logs[1]
    of_data = error / noise + len(x) * logs[1]
    return (of_data + prior * size - num * logs[0] + logdet) / 2


chosen = jax.jit(lambda logs: minimised(negative_log_marginal, logs, 200, 0.1))
prior, noise = jnp.exp(chosen(jnp.zeros(2)))
print(f"prior precision {prior:.2f}, standard deviation of the noise {noise**0.5:.2f}")

# %% [markdown]
# The covariance of the parameters is a metric of the NTK: `J M J^T` is the covariance
# of the predictions of the linearised network. `diagonal` has their variances. The
# same argument takes the exact inverse, as these 673 parameters have a matrix that
# fits, and `where` selects the last layer only.

# %%
damping = float(prior * noise)
ggn, _ = eqxbatch.filter_ggn(predict, squared_error, flat=True, **settings)(model, x, y)
inverse = jnp.linalg.inv(ggn + damping * jnp.eye(len(ggn)))
last_layer = lambda model: model.layers[-1]
of_last = eqxbatch.filter_kfac(predict, squared_error, where=last_layer, **settings)
metrics = {
    "K-FAC": factors.operator(damping=damping).inverse(),
    "exact": (inverse + inverse.T) / 2,
    "last layer": of_last(model, x, y).operator(damping=damping).inverse(),
}
grid = jnp.linspace(-7, 7, 281)
mean = jax.vmap(model)(grid)
is_gap, is_data = (grid > -0.5) & (grid < 1), (grid > -4) & (grid < -1)
deviations = {}
for name, metric in metrics.items():
    where = last_layer if name == "last layer" else None
    kernel = eqxbatch.EmpiricalNTK(model, metric=metric, where=where, block_size=64)
    deviations[name] = jnp.sqrt(noise * kernel.diagonal(grid))
    gap, data = (jnp.mean(deviations[name][i]) for i in (is_gap, is_data))
    is_within = jnp.mean(jnp.abs(truth(grid) - mean) < 2 * deviations[name])
    print(
        f"{name}: standard deviation {data:.2f} at the data, {gap:.2f} in the gap; "
        f"two of them contain the truth at {is_within:.0%} of the points"
    )

# %% [markdown]
# ## Classification
#
# 300 images of digits, a tenth of them with a random label. A network without a prior
# fits all of them. The marginal likelihood finds the precision of the prior while it
# trains ([Immer et al., 2021](https://arxiv.org/abs/2104.04975)): train, choose, and
# train again. No image is set aside for it.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = jnp.asarray(digits.data[order] / 16, jnp.float32)
labels = jnp.asarray(digits.target[order], jnp.int32)
train, test = slice(0, 300), slice(700, None)
is_wrong = jr.bernoulli(jr.key(1), 0.1, (300,))
given = jnp.where(is_wrong, jr.randint(jr.key(2), (300,), 0, 10), labels[train])


def cross_entropy(logits, x, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def total_loss(model):
    logits = jax.vmap(model)(images[train])
    return jnp.sum(jax.vmap(cross_entropy)(logits, images[train], given))


@eqx.filter_jit
def trained_with(model, prior):
    objective = lambda model: total_loss(model) + prior / 2 * squares(model)[0]
    return minimised(objective, model, 400, 3e-3)


@eqx.filter_jit
def best_prior(factors, size, num, prior):
    def negative(log_prior):
        prior = jnp.exp(log_prior)
        logdet = factors.operator(damping=prior).logdet()
        return (prior * size - num * log_prior + logdet) / 2

    return jnp.exp(minimised(negative, jnp.log(prior), 60, 0.3))


kfac = eqxbatch.filter_kfac(predict, cross_entropy, **settings)
start = eqx.nn.MLP(64, 10, 64, 2, key=jr.key(0))
without_prior = trained_with(start, jnp.zeros(()))
with_prior, prior = start, jnp.ones(())
for _ in range(3):
    with_prior = trained_with(with_prior, prior)
    factors = kfac(with_prior, images[train], given)
    prior = best_prior(factors, *squares(with_prior), prior)
    print(f"prior precision {prior:.2f}")

# %% [markdown]
# The network without a prior is overconfident. Its Laplace approximation is less so:
# with `trace_axes=()`, `diagonal` has the covariances of the ten logits of each image.
# They become probabilities by sampling logits, or by the probit approximation, which
# divides each logit by a function of its variance ([MacKay,
# 1992](https://doi.org/10.1162/neco.1992.4.5.720)). As this network is not at the
# maximum of any posterior, the first 400 other images choose the precision.
#
# The variances of thousands of outputs take milliseconds in the same way:
# [Benchmarks](../benchmarks.md#kernels-in-a-metric) has the time and memory for 3,100.


# %%
def sampled(mean, covariance, key, num=100):
    noise = jr.normal(key, (num, *mean.shape))
    root = jnp.linalg.cholesky(covariance)
    moved = mean + jnp.einsum("nij,snj->sni", root, noise)
    return jnp.mean(jax.nn.softmax(moved), axis=0)


def probit(mean, covariance):
    variances = jnp.diagonal(covariance, axis1=1, axis2=2)
    return jax.nn.softmax(mean / jnp.sqrt(1 + jnp.pi / 8 * variances))


def log_likelihood(probabilities, labels):
    of_label = probabilities[jnp.arange(len(labels)), labels]
    return float(jnp.mean(jnp.log(of_label + 1e-12)))


@eqx.filter_jit
def linked(model, factors, prior, images):
    metric = factors.operator(damping=prior).inverse()
    kernel = eqxbatch.EmpiricalNTK(model, metric=metric, trace_axes=(), block_size=100)
    mean, covariance = jax.vmap(model)(images), kernel.diagonal(images)
    return {
        "probit": probit(mean, covariance),
        "samples": sampled(mean, covariance, jr.key(3)),
    }


factors = kfac(without_prior, images[train], given)
predictions = {
    "no prior": jax.nn.softmax(jax.vmap(without_prior)(images[test])),
    "prior by marginal likelihood": jax.nn.softmax(jax.vmap(with_prior)(images[test])),
}
of_precisions = [
    linked(without_prior, factors, jnp.asarray(precision), images[300:])
    for precision in (10.0, 30.0, 100.0, 300.0)
]
by_score = lambda links: log_likelihood(links["samples"][:400], labels[300:700])
for name, probabilities in max(of_precisions, key=by_score).items():
    predictions[f"no prior, Laplace, {name}"] = probabilities[400:]

# %% [markdown]
# The plots show the standard deviations in regression, and the log-likelihood of the
# test images.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for name, deviation in deviations.items():
    left.plot(grid, 2 * deviation, label=name)
left.plot(grid, jnp.abs(truth(grid) - mean), ":", color="black", label="error")
left.plot(x, jnp.zeros(len(x)), "|", color="grey", label="data")
left.set(title="Regression", xlabel="x", ylabel="two standard deviations", ylim=(0, 4))
left.legend(frameon=False)
scores = {name: log_likelihood(p, labels[test]) for name, p in predictions.items()}
for name, probabilities in predictions.items():
    accuracy = jnp.mean(jnp.argmax(probabilities, 1) == labels[test])
    print(f"{name}: log-likelihood {scores[name]:.3f}, accuracy {accuracy:.1%}")
right.barh(list(scores), list(scores.values()))
right.set(title="Classification", xlabel="log-likelihood per test image")
right.invert_yaxis()
assert min(scores.values()) == scores["no prior"]
path = pathlib.Path("pictures", "laplace.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)
print(f"saved {path}")
