# %% [markdown]
# # A differential equation with K-FAC
#
# A physics-informed network solves the Poisson equation on the unit square. Its loss
# has the Laplacian of the network, so that each layer meets derivatives as well as
# values. K-FAC takes them as further inputs of the layer ([Dangel, Müller and
# Zeinhofer, 2024](https://arxiv.org/abs/2405.15603)). A step takes about eight times as
# long as one of Adam. Unlike [Gauss-Newton steps](pinn_poisson.py), it needs no matrix
# of all points or of all parameters.

# %%
import os


# Threads of LAPACK slow down eigendecompositions of matrices as small as these.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pathlib
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import optax

import eqxbatch


network = eqx.nn.MLP(2, "scalar", 64, 3, jnp.tanh, key=jr.key(0))
POINTS = 512  # Inside, and on the boundary.
WEIGHT = 100.0  # Weight of the boundary.
SECONDS = 6.0  # For each optimiser.

# %% [markdown]
# The Laplacian is a sum of second derivatives in forward mode. The function of one
# example takes a point inside and one on the boundary, and returns both residuals; the
# loss of an example is convex in these.


# %%
def laplacian(fun, x):
    def second(direction):
        first = lambda x: jax.jvp(fun, (x,), (direction,))[1]
        return jax.jvp(first, (x,), (direction,))[1]

    return jnp.sum(jax.vmap(second)(jnp.eye(2)))


def solution(x):
    return jnp.prod(jnp.sin(jnp.pi * x))


def residuals(model, inside, edge):
    source = 2 * jnp.pi**2 * solution(inside)
    return laplacian(model, inside) + source, model(edge)


def loss(residuals, inside, edge):
    first, second = residuals
    return 0.5 * (first**2 + WEIGHT * second**2)


def mean_loss(model, *batch):
    of_example = lambda *points: loss(residuals(model, *points), *points)
    return jnp.mean(jax.vmap(of_example)(*batch))


def draw(key):
    """Random points inside, and on the four sides."""
    keys = jr.split(key)
    along, side = jr.uniform(keys[1], (POINTS,)), jnp.arange(POINTS) % 4
    across = (side // 2).astype(float)
    edge = jnp.where(
        (side % 2 == 0)[:, None],
        jnp.stack([along, across], axis=1),
        jnp.stack([across, along], axis=1),
    )
    return jr.uniform(keys[0], (POINTS, 2)), edge


# %% [markdown]
# All layers have Kronecker factors, and each bias counts as one more input: it is 1 for
# values, and 0 for derivatives.

# %%
kfac = eqxbatch.filter_kfac(residuals, loss)
factors = eqx.filter_eval_shape(kfac, network, *draw(jr.key(0)))
print(factors)
assert all(block.part.structure == "kronecker" for block in factors.blocks)

# %% [markdown]
# The optimisers: K-FAC and Gauss-Newton steps with a line search, and Adam.


# %%
def line_search(model, step, batch):
    lengths = jnp.append(0.5 ** jnp.arange(16.0), 0.0)
    moved = lambda length: eqx.apply_updates(
        model, jax.tree.map(lambda s: -length * s, step)
    )
    losses = jax.lax.map(lambda length: mean_loss(moved(length), *batch), lengths)
    return moved(lengths[jnp.nanargmin(losses)])


natural = optax.chain(
    eqxbatch.scale_by_kfac(factors, damping=1e-3, decay=0.9), optax.trace(0.5)
)


def by_kfac(model, state, batch):
    gradient = eqx.filter_grad(mean_loss)(model, *batch)
    step, state = natural.update(gradient, state, factors=kfac(model, *batch))
    return line_search(model, step, batch), state


samples = eqxbatch.filter_gauss_newton_step(
    (lambda model, x: residuals(model, x, x)[0], lambda model, x: model(x)),
    damping=0.1,
    weights=(1.0, WEIGHT),
)


def by_gauss_newton(model, state, batch):
    return line_search(model, samples(model, *batch), batch), state


adam = optax.adam(3e-3)


def by_adam(model, state, batch):
    gradient = eqx.filter_grad(mean_loss)(model, *batch)
    updates, state = adam.update(gradient, state)
    return eqx.apply_updates(model, updates), state


# %% [markdown]
# Each optimiser has the same time, without that of compilation. The error is measured
# on a grid.

# %%
grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(0, 1, 30)] * 2), axis=-1).reshape(-1, 2)
exact = jax.vmap(solution)(grid)


@eqx.filter_jit
def error(model):
    return jnp.linalg.norm(jax.vmap(model)(grid) - exact) / jnp.linalg.norm(exact)


def arrays(tree):
    return eqx.filter(tree, eqx.is_array)


curves = {}
for name, take, optimiser in (
    ("K-FAC", by_kfac, natural),
    ("Gauss-Newton", by_gauss_newton, natural),
    ("Adam", by_adam, adam),
):
    step = eqx.filter_jit(lambda *args, take=take: take(*args[:2], draw(args[2])))
    model, state = network, optimiser.init(arrays(network))
    jax.block_until_ready(arrays(step(model, state, jr.key(0))))
    seconds, errors = [0.0], [float(error(model))]
    while seconds[-1] < SECONDS:
        start = time.perf_counter()
        model, state = step(model, state, jr.key(len(errors)))
        jax.block_until_ready(arrays(model))
        seconds.append(seconds[-1] + time.perf_counter() - start)
        errors.append(float(error(model)))
    curves[name] = seconds, errors
    print(f"{name:12} {len(errors) - 1:4} steps, error {errors[-1]:.1e}")

# Errors of single steps of Adam vary.
late = {name: sum(errors[-10:]) / 10 for name, (_, errors) in curves.items()}
assert late["K-FAC"] < late["Adam"]

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
for name, (seconds, errors) in curves.items():
    axes[0].loglog(range(1, len(errors)), errors[1:], label=name)
    axes[1].semilogy(seconds, errors)
axes[0].set(xlabel="steps", ylabel="relative error")
axes[1].set(xlabel="seconds")
axes[0].legend(frameon=False)
path = pathlib.Path("pictures", "poisson.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")
