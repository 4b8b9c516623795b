# %% [markdown]
# # Private training
#
# This example trains on scikit-learn's handwritten digits with differential privacy
# (DP-SGD, [Abadi et al., 2016](https://arxiv.org/abs/1607.00133)). eqxbatch computes
# the clipped gradients. Sampling and noise are those of
# [jax_privacy](https://github.com/google-deepmind/jax_privacy), and the accountant is
# that of [dp_accounting](https://pypi.org/project/dp-accounting). The same training
# with the clipped gradients of jax_privacy gives the same model; the time and memory of
# both are compared at the end.

# %%
import math
import pathlib
import statistics
import time

import dp_accounting
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax_privacy
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
NUM = 1400
train, test = slice(0, NUM), slice(NUM, None)


def loss(model, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


# %% [markdown]
# ## The privacy of the training
#
# In each step, each image takes part with probability `EXPECTED / NUM`, independently
# of all others. `dp_accounting` computes from this, the number of steps and the noise
# multiplier which epsilon the training has. Here, it chooses the multiplier.

# %%
EXPECTED, STEPS, EPSILON, DELTA = 256, 80, 6.0, 1e-4


def training(multiplier):
    noise = dp_accounting.GaussianDpEvent(multiplier)
    step = dp_accounting.PoissonSampledDpEvent(EXPECTED / NUM, noise)
    return dp_accounting.SelfComposedDpEvent(step, STEPS)


def accountant():
    return dp_accounting.rdp.RdpAccountant(range(2, 64))


multiplier = dp_accounting.calibrate_dp_mechanism(
    accountant, training, EPSILON, DELTA, tol=1e-3
)
epsilon = accountant().compose(training(multiplier)).get_epsilon(DELTA)
print(f"noise multiplier {multiplier:.2f}: epsilon {epsilon:.2f} at delta {DELTA}")
assert epsilon <= EPSILON

# %% [markdown]
# ## Samples of random size
#
# The number of images differs from step to step, but a compiled step needs arrays of
# one size. So each sample is padded, with the index -1. The padded size is six
# standard deviations above the expected one. If a sample is larger nevertheless,
# stop: leaving images out would change the privacy.

# %%
MICROBATCH = 32
deviation = math.sqrt(EXPECTED * (1 - EXPECTED / NUM))
PADDED = math.ceil((EXPECTED + 6 * deviation) / MICROBATCH) * MICROBATCH
sampling = jax_privacy.batch_selection.CyclicPoissonSampling(EXPECTED / NUM, STEPS)
samples, sizes = [], []
for drawn in sampling.batch_iterator(NUM, rng=0):
    if len(drawn) > PADDED:
        raise RuntimeError("A sample is larger than the padded size. Increase it.")
    padding = np.full(PADDED - len(drawn), -1)
    sample = jnp.asarray(np.concatenate([drawn, padding]))
    samples.append((images[sample], labels[sample], sample >= 0))
    sizes.append(len(drawn))
print(f"{min(sizes)} to {max(sizes)} images a step, padded to {PADDED}")

# %% [markdown]
# ## Two ways to clip
#
# The gradient is the sum of the clipped gradients, divided by the *expected* size of
# a sample: the size itself is private. In eqxbatch, the weights of the sum are `1 /
# EXPECTED`, and 0 for padding. `sensitivity` is the largest norm of the share of one
# image, to which the standard deviation of the noise is proportional.
#
# `nan_safe=True` belongs to private training: without it, one image with a gradient
# that is not finite makes the result NaN, which shows that the image is there.
# eqxbatch then replaces the whole gradient of the image by zero. jax_privacy replaces
# the entries that are not finite, and clips the gradient that remains.

# %%
CLIP = 1.0


@eqx.filter_jit
def with_eqxbatch(model, images, labels, is_real):
    grad = eqxbatch.filter_micro_grad(
        loss,
        microbatch_size=MICROBATCH,
        clip_norm=CLIP,
        nan_safe=True,
        accumulator=eqxbatch.Sum(weights=is_real / EXPECTED),
    )
    return grad(model, images, labels)


@eqx.filter_jit
def with_jax_privacy(model, images, labels, is_real):
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    grad = jax_privacy.clipped_grad(
        lambda arrays, image, label: loss(eqx.combine(arrays, static), image, label),
        l2_clip_norm=CLIP,
        normalize_by=EXPECTED,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=MICROBATCH,
    )
    return grad(arrays, images, labels, is_padding_example=~is_real)


network = eqx.nn.MLP(64, 10, 256, 2, key=jr.key(0))
arrays = eqxbatch.parameters(network)
grad = eqxbatch.filter_micro_grad(
    loss, clip_norm=CLIP, nan_safe=True, accumulator=eqxbatch.Sum()
)
sensitivity = float(grad.sensitivity(network, weight=1 / EXPECTED))
print(f"sensitivity {sensitivity:.5f}, which is {CLIP} / {EXPECTED}")

# %% [markdown]
# ## Training
#
# Both runs have the same samples and the same noise, so they differ by rounding only.

# %%
ways = {"eqxbatch": with_eqxbatch, "jax_privacy": with_jax_privacy}
noise = jax_privacy.noise_addition.gaussian_privatizer(
    stddev=multiplier * sensitivity, prng_key=jr.key(1)
)
optimiser = optax.chain(noise, optax.sgd(0.5, momentum=0.9))


@eqx.filter_jit
def update(model, state, grads):
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state


@eqx.filter_jit
def accuracy(model):
    predicted = jnp.argmax(jax.vmap(model)(images[test]), axis=1)
    return jnp.mean((predicted == labels[test]).astype(jnp.float32))


models = dict.fromkeys(ways, network)
states = {name: optimiser.init(arrays) for name in ways}
curves = {name: [] for name in ways}
seconds = {name: [] for name in ways}
for sample in samples:
    for name, gradient in ways.items():
        start = time.perf_counter()
        grads = jax.block_until_ready(gradient(models[name], *sample))
        seconds[name].append(time.perf_counter() - start)
        models[name], states[name] = update(models[name], states[name], grads)
        curves[name].append(float(accuracy(models[name])))

last = {name: float(np.mean(curve[-10:])) for name, curve in curves.items()}
for name, value in last.items():
    print(f"{name:12} test accuracy {value:.1%}, epsilon {epsilon:.2f}")
assert abs(last["eqxbatch"] - last["jax_privacy"]) < 0.01
assert last["eqxbatch"] > 0.8

# %% [markdown]
# ## No clipped gradient is above the bound
#
# Materialise the clipped gradient of each single image, for the network before and
# after training. Its norm is at most the bound, up to rounding in float32.


# %%
@eqx.filter_jit
def clipped_norms(model):
    def norms(image, label):
        grads, statistics = eqxbatch.filter_micro_grad(
            loss,
            clip_norm=CLIP,
            nan_safe=True,
            return_norms=True,
            accumulator=eqxbatch.Sum(),
        )(model, image[None], label[None])
        return optax.tree.norm(grads), statistics.norms[0]

    return eqxbatch.filter_micro_vmap(norms, microbatch_size=100)(
        images[train], labels[train]
    )


for name, model in (("before", network), ("after", models["eqxbatch"])):
    clipped, before = clipped_norms(model)
    share = float(jnp.mean((before > CLIP).astype(jnp.float32)))
    print(f"{name} training: {share:.0%} are clipped, to {float(clipped.max()):.7f}")
    assert jnp.all(clipped <= CLIP * (1 + 1e-6))

# %% [markdown]
# Padding has no influence, even if it is NaN:

# %%
images_of_step, labels_of_step, is_real = samples[0]
nans = jnp.where(is_real[:, None], images_of_step, jnp.nan)
grads = with_eqxbatch(network, images_of_step, labels_of_step, is_real)
padded = with_eqxbatch(network, nans, labels_of_step, is_real)
difference = optax.tree.norm(optax.tree.sub(padded, grads))
assert difference <= 1e-6 * optax.tree.norm(grads)

# %% [markdown]
# ## Time and memory
#
# jax_privacy materialises the gradient of each image in a microbatch. eqxbatch computes
# its norm from the inputs and the cotangents of the layers.

# %%
milliseconds, megabytes = {}, {}
for name, gradient in ways.items():
    milliseconds[name] = 1e3 * statistics.median(seconds[name][1:])
    program = gradient.lower(network, *samples[0]).compile().compiled
    megabytes[name] = program.memory_analysis().temp_size_in_bytes / 1e6
    print(
        f"{name:12} {milliseconds[name]:6.1f} ms a gradient, "
        f"{megabytes[name]:6.1f} MB of temporaries"
    )
assert megabytes["eqxbatch"] < megabytes["jax_privacy"]

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
    left.plot(curve, style, label=name)
left.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
left.legend(frameon=False)
positions = np.arange(2)
for i, name in enumerate(ways):
    figures = milliseconds[name], megabytes[name]
    right.bar(positions + 0.4 * i - 0.2, figures, 0.4, label=name)
right.set_xticks(positions, ["ms a gradient", "MB of temporaries"])
right.set(yscale="log")
right.legend(frameon=False)
path = pathlib.Path("pictures", "private_training.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")
