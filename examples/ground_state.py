# %% [markdown]
# # The ground state of a spin chain
#
# Variational Monte Carlo minimises the energy of a quantum state whose amplitudes are
# the outputs of a network. Its usual optimiser is stochastic reconfiguration: the
# gradient of the energy is multiplied by the inverse covariance of the derivatives of
# the log-amplitudes. This is a Gauss-Newton step with centred derivatives. With fewer
# samples than parameters, it is solved in the space of samples (minSR, [Chen and Heyl,
# 2023](https://arxiv.org/abs/2302.01941)); with momentum, it is SPRING ([Goldshlager et
# al., 2024](https://arxiv.org/abs/2401.10190)).
#
# The system is the transverse-field Ising model at its critical point, on a ring of ten
# spins. Its Hamiltonian is small enough to be diagonalised, so the error is known.

# %%
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax

import eqxbatch


SPINS, FIELD = 10, 1.0
SAMPLES, STEPS = 64, 200

# All 1,024 states, as rows of +1 and -1.
bits = (np.arange(2**SPINS)[:, None] >> np.arange(SPINS)) & 1
states = 1.0 - 2.0 * bits

# %% [markdown]
# NumPy computes the exact energy. The coupling of neighbours is diagonal, and the field
# connects states that differ in one spin.

# %%
coupling = -np.sum(states * np.roll(states, 1, axis=1), axis=1)
hamiltonian = np.diag(coupling)
for i in range(SPINS):
    hamiltonian[np.arange(2**SPINS), np.arange(2**SPINS) ^ (1 << i)] -= FIELD
exact = np.linalg.eigvalsh(hamiltonian)[0]
print(f"ground-state energy: {exact:.6f}")

# %% [markdown]
# The wave function is a network of circular convolutions, so it does not change if the
# ring is rotated. All amplitudes of the ground state are positive here, so the network
# returns the logarithm of an amplitude, as a real number.


# %%
class LogAmplitude(eqx.Module):
    layers: list[eqx.nn.Conv1d]

    def __init__(self, width, key):
        keys = jr.split(key)
        make = lambda channels, key: eqx.nn.Conv1d(
            channels, width, 5, padding="SAME", padding_mode="CIRCULAR", key=key
        )
        self.layers = [make(1, keys[0]), make(width, keys[1])]

    def __call__(self, spins):
        x = spins[None]
        for layer in self.layers:
            x = jnp.log(jnp.cosh(layer(x)))
        return jnp.sum(x)


network = LogAmplitude(12, jr.key(0))
num_parameters = sum(x.size for x in jax.tree.leaves(eqx.filter(network, eqx.is_array)))
print(f"{num_parameters} parameters")

# %% [markdown]
# The local energy of a state depends on its own amplitude and on those of the states
# that differ from it in one spin. Its mean over samples, drawn with probabilities
# proportional to the squared amplitudes, is an estimate of the energy.
#
# For so few states, all amplitudes are computed at once. They give the local energies,
# and exact samples without the burn-in and the autocorrelation of a Markov chain, which
# would blur the comparison of optimisers. A longer ring of spins needs Metropolis
# sampling; nothing else changes.

# %%
flipped = np.arange(2**SPINS)[:, None] ^ (1 << np.arange(SPINS))


def local_energies(model):
    """The local energies of all states, and their log-amplitudes."""
    logs = jax.vmap(model)(jnp.asarray(states))
    ratios = jnp.exp(logs[flipped] - logs[:, None])
    return jnp.asarray(coupling) - FIELD * jnp.sum(ratios, axis=1), logs


def draw(model, key):
    energies, logs = local_energies(model)
    chosen = jr.categorical(key, 2 * logs, shape=(SAMPLES,))
    # The energy without sampling noise, to judge the result.
    energy = jax.nn.softmax(2 * logs) @ energies
    return (jnp.asarray(states)[chosen], energies[chosen]), energy


# %% [markdown]
# The function that the step differentiates returns two things: the log-amplitude, which
# is differentiated, and the local energy, which takes the place of the residual.


# %%
def amplitude(model, spins, energy):
    return model(spins), energy


DAMPING, MOMENTUM = 1e-2, 0.9
settings = {"damping": DAMPING, "centre": True, "has_residual": True}
min_sr = eqxbatch.filter_gauss_newton_step(amplitude, **settings)
spring = eqxbatch.filter_gauss_newton_step(amplitude, momentum=MOMENTUM, **settings)

# %% [markdown]
# Adam takes the gradient that minSR preconditions: half of the gradient of the energy.


# %%
def gradient(model, spins, energies):
    centred = energies - jnp.mean(energies)
    loss = lambda model: jnp.mean(centred * jax.vmap(model)(spins))
    return eqx.filter_grad(loss)(model)


decay = optax.cosine_decay_schedule(0.01, STEPS)
ways = {
    "SPRING": (spring, optax.sgd(0.2)),
    "minSR": (lambda model, previous, *batch: min_sr(model, *batch), optax.sgd(0.2)),
    "Adam": (
        lambda model, previous, *batch: gradient(model, *batch),
        optax.adam(decay),
    ),
}

# %% [markdown]
# All optimisers start from the same network and draw with the same keys. The learning
# rates were tuned: SPRING and minSR diverge at 0.3, and Adam, whose learning rate
# decays, at 0.03.


# %%
def minimise(direction_of, optimiser):
    arrays, static = eqx.partition(network, eqx.is_array)

    def body(carry, key):
        arrays, state, previous = carry
        model = eqx.combine(arrays, static)
        batch, energy = draw(model, key)
        direction = direction_of(model, previous, *batch)
        updates, state = optimiser.update(direction, state)
        return (eqx.apply_updates(arrays, updates), state, direction), energy

    start = arrays, optimiser.init(arrays), jax.tree.map(jnp.zeros_like, arrays)
    return jax.jit(jax.lax.scan, static_argnums=0)(
        body, start, jr.split(jr.key(1), STEPS)
    )[1]


errors = {}
for name, way in ways.items():
    energies = np.asarray(minimise(*way))
    errors[name] = (energies - exact) / abs(exact)
    print(f"{name:7} relative error {errors[name][-1]:.1e}")

assert errors["SPRING"][-1] < 1e-4
assert errors["SPRING"][-1] < 0.2 * errors["Adam"][-1]

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for name, of_steps in errors.items():
    axes[0].plot(exact + abs(exact) * of_steps, label=name)
    axes[1].semilogy(of_steps, label=name)
axes[0].axhline(exact, color="black", linestyle="--", label="exact")
axes[0].set(xlabel="steps", ylabel="energy", ylim=(exact - 0.02, exact + 0.5))
axes[1].set(xlabel="steps", ylabel="relative error of the energy")
axes[0].legend(frameon=False)
path = pathlib.Path("pictures", "ground_state.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")
