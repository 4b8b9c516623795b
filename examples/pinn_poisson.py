# %% [markdown]
# # A PINN with Gauss-Newton steps
#
# A physics-informed neural network (PINN) solves the Poisson equation on a square.
# Inside, its Laplacian must match that of a known solution; on the boundary, its values
# must match. The two differences are the residuals, each with points of its own. The
# problem is ill-conditioned, so Adam converges slowly, but Gauss-Newton steps do not
# ([Guzmán-Cordero et al., 2025](https://arxiv.org/abs/2505.12149)). There are fewer
# points than parameters, so the steps are solved in the space of samples. The example
# uses 64-bit mode: the squares of second derivatives are so large that the damping
# would be lost in float32.

# %%
import functools
import pathlib
import time

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import optax

import eqxbatch


jax.config.update("jax_enable_x64", True)
network = eqx.nn.MLP(2, "scalar", 32, 3, jnp.tanh, key=jr.key(0))


def solution(x):
    return jnp.prod(jnp.sin(jnp.pi * x))


# %% [markdown]
# The residuals take one point.


# %%
def laplacian(fun, x):
    return jnp.trace(jax.hessian(fun)(x))


def interior(model, x):
    return laplacian(model, x) - laplacian(solution, x)


def boundary(model, x):
    return model(x) - solution(x)


def draw(key):
    """200 points inside, and 40 on each of the four sides."""
    keys = jr.split(key)
    along, side = jr.uniform(keys[1], (160,)), jnp.arange(160) % 4
    across = (side // 2).astype(float)
    edge = jnp.where(
        (side % 2 == 0)[:, None],
        jnp.stack([along, across], axis=1),
        jnp.stack([across, along], axis=1),
    )
    return jr.uniform(keys[0], (200, 2)), edge


WEIGHT = 100.0  # Weight of the boundary residuals.
DAMPING = 1e-5

# %% [markdown]
# Computing a step is much more expensive than evaluating the loss, so a line search
# tries several lengths of each step.


# %%
def loss(model, inside, edge):
    first = jnp.mean(jax.vmap(functools.partial(interior, model))(inside) ** 2)
    second = jnp.mean(jax.vmap(functools.partial(boundary, model))(edge) ** 2)
    return 0.5 * (first + WEIGHT * second)


def line_search(model, step, batch):
    lengths = 0.5 ** jnp.arange(8.0)
    moved = lambda length: eqx.apply_updates(
        model, jax.tree.map(lambda s: -length * s, step)
    )
    best = jnp.argmin(jax.lax.map(lambda length: loss(moved(length), *batch), lengths))
    return moved(lengths[best])


samples = eqxbatch.filter_gauss_newton_step(
    (interior, boundary), damping=DAMPING, weights=(1.0, WEIGHT)
)


@eqx.filter_jit
def in_samples(model, state, key):
    batch = draw(key)
    return line_search(model, samples(model, *batch), batch), state


# %% [markdown]
# For comparison, compute the same step by hand, with the dense Gauss-Newton matrix over
# all parameters.


# %%
@eqx.filter_jit
def in_parameters(model, state, key):
    inside, edge = draw(key)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = jax.flatten_util.ravel_pytree(arrays)

    def residuals(flat):
        model = eqx.combine(unravel(flat), static)
        first = jax.vmap(functools.partial(interior, model))(inside)
        second = jax.vmap(functools.partial(boundary, model))(edge)
        scale = jnp.sqrt(WEIGHT / len(edge))
        return jnp.concatenate([first / jnp.sqrt(len(inside)), scale * second])

    jacobian, values = jax.jacrev(residuals)(flat), residuals(flat)
    matrix = jacobian.T @ jacobian + DAMPING * jnp.eye(flat.size)
    step = jnp.linalg.solve(matrix, jacobian.T @ values)
    return line_search(model, unravel(step), (inside, edge)), state


optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, 600))


@eqx.filter_jit
def by_adam(model, state, key):
    grads = eqx.filter_grad(loss)(model, *draw(key))
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state


# %% [markdown]
# Measure the relative error of the solution on a grid. Each function is compiled before
# the clock starts.

# %%
grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(0, 1, 30)] * 2), axis=-1).reshape(-1, 2)
exact = jax.vmap(solution)(grid)


@eqx.filter_jit
def error(model):
    return jnp.linalg.norm(jax.vmap(model)(grid) - exact) / jnp.linalg.norm(exact)


runs = {
    "eqxbatch, space of samples": (in_samples, 30),
    "dense Gauss-Newton": (in_parameters, 6),
    "Adam": (by_adam, 600),
}
curves = {}
for name, (take, num) in runs.items():
    model = network
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    jax.block_until_ready(eqx.filter(take(model, state, jr.key(0)), eqx.is_array))
    seconds, errors = [], []
    spent = 0.0
    for i in range(num):
        start = time.perf_counter()
        model, state = take(model, state, jr.key(i))
        jax.block_until_ready(eqx.filter(model, eqx.is_array))
        spent += time.perf_counter() - start
        seconds.append(spent)
        errors.append(float(error(model)))
    curves[name] = (seconds, errors)
    print(f"{name:27} {num:4} steps, error {errors[-1]:.1e}")

ours = curves["eqxbatch, space of samples"]
assert ours[1][-1] < 0.3 * curves["Adam"][1][-1]
np.testing.assert_allclose(ours[1][:3], curves["dense Gauss-Newton"][1][:3], rtol=0.2)

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
for name, (seconds, errors) in curves.items():
    axes[0].loglog(range(1, len(errors) + 1), errors, label=name)
    axes[1].loglog(seconds, errors)
axes[0].set(xlabel="steps", ylabel="relative error")
axes[1].set(xlabel="seconds")
axes[0].legend(frameon=False)
path = pathlib.Path("pictures", "pinn_poisson.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=150)
print(f"saved {path}")
