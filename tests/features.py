"""Models, and each public transform as a function of a model and its examples."""

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxbatch as eb
from .helpers import drawn, integers, normal


KEY = jax.random.key(0)
SIZE = 8


class Convolutional(eqx.Module):
    conv: eqx.nn.Conv2d
    last: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 2, 3, key=first)
        self.last = eqx.nn.Linear(2, 2, key=second)

    def __call__(self, x):
        return self.last(jnp.mean(jnp.tanh(self.conv(x)), (1, 2)))


class Attentive(eqx.Module):
    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    last: eqx.nn.Linear

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(6, 4, key=first)
        self.attention = eqx.nn.MultiheadAttention(
            2, 4, qk_size=1, vo_size=1, output_size=2, key=second
        )
        self.last = eqx.nn.Linear(2, 2, key=third)

    def __call__(self, tokens):
        words = jax.vmap(self.embedding)(tokens)
        return self.last(jnp.mean(self.attention(words, words, words), 0))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    last: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, 4, key=first)
        self.last = eqx.nn.Linear(4, 2, key=second)

    def __call__(self, words):
        step = lambda state, word: (self.cell(word, state), None)
        return self.last(jax.lax.scan(step, jnp.zeros(4), words)[0])


class Parametrised(eqx.Module):
    """Functions of parameters alone: a scale, a mask, a norm, a stack and a penalty."""

    first: jax.Array
    layers: list
    last: jax.Array

    def __init__(self, key):
        first, second, third, fourth = jax.random.split(key, 4)
        self.first = normal(first, (3, 3))
        self.layers = [normal(second, (3, 3)), normal(third, (3, 3))]
        self.last = normal(fourth, (2, 3))

    def __call__(self, x):
        hidden = jnp.tanh(jax.nn.softplus(self.first) @ x + jnp.tril(self.first) @ x)
        step = lambda hidden, w: (jnp.tanh(w @ hidden), None)
        hidden, _ = jax.lax.scan(step, hidden, jnp.stack(self.layers))
        last = self.last / jnp.linalg.norm(self.last, axis=1, keepdims=True)
        return last @ hidden + jnp.sum(self.first**2) / 10


MODELS = {
    "dense": (
        lambda: drawn(eqx.nn.MLP, 3, 2, 4, 1, jnp.tanh, use_final_bias=False, key=KEY),
        lambda n: normal(KEY, (n, 3)),
    ),
    "conv": (
        lambda: drawn(Convolutional, key=KEY),
        lambda n: normal(KEY, (n, 1, 4, 4)),
    ),
    "attention": (
        lambda: drawn(Attentive, key=KEY),
        lambda n: integers(KEY, (n, 3), 6),
    ),
    "recurrent": (lambda: drawn(Recurrent, key=KEY), lambda n: normal(KEY, (n, 3, 2))),
    "parametrised": (lambda: Parametrised(KEY), lambda n: normal(KEY, (n, 3))),
}


def apply(model, x):
    return model(x)


def loss(model, x):
    return jnp.sum(jnp.tanh(model(x)) ** 2)


def mean_loss(model, x):
    return jnp.mean(jax.vmap(lambda x: loss(model, x))(x))


def of_outputs(out, x):
    return jnp.sum(jnp.sin(out) ** 2)


def parameters(model):
    return eqx.filter(model, eqx.is_inexact_array)


def scaled(model):
    scale = lambda x: 1.1 * x if eqx.is_inexact_array(x) else x
    return jax.tree.map(scale, model)


def expanded(expand):
    of_one = lambda model, x: expand(model)(scaled(model), x)
    return eb.filter_micro_vmap(of_one, in_axes=(None, 0), microbatch_size=SIZE)


def sampled(model):
    factor = lambda key: 1 + jax.random.uniform(key)
    scale = lambda key, x: (
        factor(key).astype(x.dtype) * x if eqx.is_inexact_array(x) else x
    )
    return lambda key: jax.tree.map(lambda x: scale(key, x), model)


def kernel(model, x, **settings):
    ntk = eb.EmpiricalNTK(model)
    return eb.filter_batch_kernel(ntk, block_size=3, **settings)(x)


def in_batch(transform, *args, **settings):
    return transform(*args, in_axes=0, microbatch_size=SIZE, **settings)


def grad_of(run):
    total = lambda model, x: jnp.sum(run(model, x) ** 2)
    return eqx.filter_jit(eqx.filter_grad(total))


MAP = eb.filter_micro_vmap(apply, in_axes=(None, 0), microbatch_size=SIZE)
MAP_OF_ONE = eb.filter_micro_vmap(apply, in_axes=(None, 0), microbatch_size=1)

# By the public names that they are of.
FEATURES = {
    "filter_micro_vmap": MAP,
    "filter_micro_vmap of one": MAP_OF_ONE,
    "filter_micro_vmap derivative": grad_of(MAP),
    "filter_microbatch": eb.filter_microbatch(
        eqx.filter_grad(mean_loss),
        in_axes=(None, 0),
        microbatch_size=SIZE,
        accumulator=eb.Mean(),
    ),
    "MemoryBudget": eb.filter_micro_vmap(
        apply, in_axes=(None, 0), microbatch_size=eb.MemoryBudget("1MB")
    ),
    "MemoryBudget clip_norm": eb.filter_micro_grad(
        loss, microbatch_size=eb.MemoryBudget("1MB"), clip_norm=0.1
    ),
    "MemoryBudget hessian": in_batch(
        eb.filter_hessian, loss, block_size=eb.MemoryBudget("1MB"), method="products"
    ),
    "MemoryBudget kernel": lambda model, x: eb.EmpiricalNTK(
        model, block_size=eb.MemoryBudget("1MB")
    )(x),
    "filter_grid_vmap": lambda model, x: eb.filter_grid_vmap(
        lambda model, x, y: jnp.dot(model(x), model(y)),
        in_axes=(None, eb.grid("i"), eb.grid("j")),
        block_size=SIZE,
    )(model, x, x),
    "filter_micro_value_and_grad": eb.filter_micro_value_and_grad(
        loss, microbatch_size=SIZE
    ),
    "filter_micro_grad weights": lambda model, x: eb.filter_micro_grad(
        loss,
        microbatch_size=SIZE,
        accumulator=eb.Mean(jnp.arange(1.0, len(x) + 1)),
    )(model, x),
    "filter_micro_grad batched": eb.filter_micro_grad(
        mean_loss, batched=True, accumulator=eb.Mean(), microbatch_size=SIZE
    ),
    "filter_micro_grad clip_norm": eb.filter_micro_grad(
        loss, microbatch_size=SIZE, clip_norm=jnp.array(0.1), return_norms=True
    ),
    "filter_micro_grad sites": eb.filter_micro_grad(
        loss, microbatch_size=SIZE, clip_norm=0.1, nan_safe=True, method="sites"
    ),
    "filter_micro_grad statistics": eb.filter_micro_grad(
        loss,
        microbatch_size=SIZE,
        scale=lambda norm: 1 / (1 + norm),
        moments=True,
        return_norms=True,
    ),
    "filter_micro_grad moments": eb.filter_micro_grad(
        loss,
        microbatch_size=SIZE,
        clip_norm=0.1,
        transform=lambda gradient: jax.tree.map(jnp.sin, gradient),
        metrics=lambda gradient: jax.tree.leaves(gradient)[0].ravel()[0],
        moments=True,
    ),
    "filter_hessian": in_batch(eb.filter_hessian, loss),
    "filter_hessian flat": lambda model, x: in_batch(
        eb.filter_hessian, loss, flat=True, method="sites"
    )(model, x)[0],
    "filter_hessian products": in_batch(eb.filter_hessian, loss, method="products"),
    "filter_hessian_diagonal": in_batch(eb.filter_hessian_diagonal, loss),
    "filter_hessian_blocks": in_batch(eb.filter_hessian_blocks, loss),
    "filter_ggn": in_batch(eb.filter_ggn, apply, of_outputs),
    "filter_ggn_blocks": in_batch(eb.filter_ggn_blocks, apply, of_outputs),
    "filter_ggn_diagonal": in_batch(eb.filter_ggn_diagonal, apply, of_outputs),
    "filter_kfac": in_batch(eb.filter_kfac, apply, of_outputs),
    "filter_kfac corrected": in_batch(
        eb.filter_kfac, apply, of_outputs, corrected=True, weight_sharing="reduce"
    ),
    "filter_gauss_newton_step": lambda model, x: eb.filter_gauss_newton_step(
        lambda model, x: model(x), damping=0.5, space="sample"
    )(model, x),
    "filter_gauss_newton_step blocks": lambda model, x: eb.filter_gauss_newton_step(
        lambda model, x: model(x), damping=0.5, space="sample", block_size=SIZE
    )(model, x),
    "filter_gauss_newton_step parameter": lambda model, x: eb.filter_gauss_newton_step(
        lambda model, x: model(x),
        damping=0.5,
        space="parameter",
        microbatch_size=SIZE,
    )(model, x),
    "filter_hvp": lambda model, x: in_batch(eb.filter_hvp, loss)(
        model, parameters(scaled(model)), x
    ),
    "filter_ggnvp": lambda model, x: in_batch(eb.filter_ggnvp, apply, of_outputs)(
        model, parameters(scaled(model)), x
    ),
    "filter_jacobian": eb.filter_jacobian(
        lambda model, x: jax.vmap(model)(x), block_size=5
    ),
    "filter_linearize": expanded(eb.filter_linearize),
    "filter_taylor_expand": expanded(lambda m: eb.filter_taylor_expand(m, 2)),
    "EmpiricalNTK": lambda model, x: eb.EmpiricalNTK(
        model, trace_axes=(), block_size=4
    )(x),
    "EmpiricalNTK two sides": lambda model, x: eb.EmpiricalNTK(model)(x, x),
    "EmpiricalNTK diagonal": lambda model, x: eb.EmpiricalNTK(model).diagonal(x),
    "EmpiricalNTK matvec": lambda model, x: eb.EmpiricalNTK(model).untraced_matvec(
        x, None, jnp.ones((len(x), 2), x.dtype)
    ),
    "EmpiricalNNGP": lambda model, x: eb.EmpiricalNNGP(model)(x),
    "EmpiricalKernel": lambda model, x: eb.EmpiricalKernel(model)(x),
    "PseudoNTK": lambda model, x: eb.PseudoNTK(model)(x),
    "ProbedNTK": lambda model, x: eb.ProbedNTK(model, num_probes=2, key=KEY)(x),
    "MonteCarloKernel": lambda model, x: eb.MonteCarloKernel(
        sampled(model), key=KEY, num_samples=2, block_size=3
    )(x),
    "filter_batch_kernel": kernel,
    "filter_batch_kernel reduce": lambda model, x: kernel(
        model, x, reduce=eb.KernelProduct(jnp.ones(len(x), x.dtype))
    ),
    "filter_batch_kernel store": lambda model, x: kernel(
        model, x, store=eb.HostStore()
    ),
}
