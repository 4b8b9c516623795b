"""Functions and modules that users annotate see the shapes of one example."""

import functools
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from beartype import beartype
from jaxtyping import Array, Float, jaxtyped

import eqxbatch
from eqxbatch import grid
from .helpers import variants


typed = jaxtyped(typechecker=beartype)


class Linear(eqx.Module):
    """What equinox users write: a module whose call is annotated."""

    weight: Float[Array, "out in"]
    bias: Float[Array, "out"]

    @jaxtyped(typechecker=beartype)
    def __call__(self, x: Float[Array, "2"]) -> Float[Array, "3"]:
        return self.weight @ x + self.bias


@jaxtyped(typechecker=beartype)
class Narrow(eqx.Module):
    """The same, with its fields checked, too."""

    weight: Float[Array, "in"]

    @jaxtyped(typechecker=beartype)
    def __call__(self, x: Float[Array, "2"]) -> Float[Array, ""]:
        return jnp.dot(self.weight, x)


MODEL = Linear(jnp.arange(6.0).reshape(3, 2), jnp.ones(3))
NARROW = Narrow(jnp.arange(2.0))
X = jnp.arange(10.0).reshape(5, 2)
WRONG = jnp.ones((5, 4))


@typed
def loss(model: Linear, x: Float[Array, "in"]) -> Float[Array, ""]:
    return jnp.sum(model(x) ** 2)


@typed
def of_batch(model: Linear, x: Float[Array, "n in"]) -> Float[Array, ""]:
    return jnp.mean(jax.vmap(model)(x) ** 2)


@typed
def outputs(model: Linear, x: Float[Array, "in"]) -> Float[Array, "out"]:
    return model(x)


@typed
def of_outputs(out: Float[Array, "out"], x: Float[Array, "in"]) -> Float[Array, ""]:
    return jnp.sum(out**2)


@typed
def largest(gradient: Linear) -> Float[Array, ""]:
    return jnp.max(jnp.abs(gradient.weight))


@typed
def kernel(
    x1: Float[Array, "n1 in"], x2: Float[Array, "n2 in"]
) -> Float[Array, "n1 n2"]:
    return x1 @ x2.T


@typed
def of_pair(x: Float[Array, "in"], y: Float[Array, "in"]) -> Float[Array, ""]:
    return jnp.dot(x, y)


def init(key):
    return Linear(jax.random.normal(key, (3, 2)), jnp.zeros(3))


class Total(eqxbatch.AbstractReduction):
    @property
    def neutral(self) -> float:
        return 0.0

    @typed
    def init(self, kernel: jax.ShapeDtypeStruct) -> Float[Array, ""]:
        return jnp.zeros(())

    @typed
    def update(self, state: Float[Array, ""], tile: Float[Array, "r c"], rows, columns):
        return state + jnp.sum(tile)

    def merge(self, first, second):
        return first + second

    @typed
    def finalize(self, state: Float[Array, ""]) -> Float[Array, ""]:
        return state


in_blocks = functools.partial(eqxbatch.filter_batch_kernel, block_size=2)
grad = functools.partial(eqxbatch.filter_micro_grad, microbatch_size=2)
CALLS = {
    "filter_micro_vmap": lambda x: eqxbatch.filter_micro_vmap(MODEL, microbatch_size=2)(
        x
    ),
    "filter_microbatch": lambda x: eqxbatch.filter_microbatch(
        of_batch, in_axes=(None, 0), microbatch_size=2, accumulator=eqxbatch.Mean()
    )(MODEL, x),
    "filter_grid_vmap": lambda x: eqxbatch.filter_grid_vmap(
        NARROW, in_axes=(grid("i"),), block_size=2
    )(x),
    "filter_micro_grad": lambda x: grad(loss)(MODEL, x),
    "clip_norm": lambda x: grad(loss, clip_norm=1.0)(MODEL, x),
    "sites": lambda x: grad(loss, clip_norm=1.0, method="sites")(MODEL, x),
    "metrics": lambda x: grad(loss, metrics=largest)(MODEL, x),
    "batched": lambda x: grad(of_batch, batched=True, accumulator=eqxbatch.Mean())(
        MODEL, x
    ),
    "filter_micro_value_and_grad": lambda x: eqxbatch.filter_micro_value_and_grad(loss)(
        MODEL, x
    ),
    "filter_hessian": lambda x: eqxbatch.filter_hessian(loss, in_axes=0)(MODEL, x),
    "filter_hessian of sites": lambda x: eqxbatch.filter_hessian(
        loss, in_axes=0, method="sites"
    )(MODEL, x),
    "filter_hessian_diagonal": lambda x: eqxbatch.filter_hessian_diagonal(
        loss, in_axes=0
    )(MODEL, x),
    "filter_hessian_blocks": lambda x: eqxbatch.filter_hessian_blocks(loss, in_axes=0)(
        MODEL, x
    ),
    "filter_ggn": lambda x: eqxbatch.filter_ggn(outputs, of_outputs, in_axes=0)(
        MODEL, x
    ),
    "filter_ggnvp": lambda x: eqxbatch.filter_ggnvp(outputs, of_outputs, in_axes=0)(
        MODEL, MODEL, x
    ),
    "filter_kfac": lambda x: eqxbatch.filter_kfac(outputs, of_outputs, in_axes=0)(
        MODEL, x
    ),
    "filter_hvp": lambda x: eqxbatch.filter_hvp(loss, in_axes=0)(MODEL, MODEL, x),
    "filter_jacobian": lambda x: eqxbatch.filter_jacobian(outputs)(MODEL, x[0]),
    "HessianOperator": lambda x: eqxbatch.HessianOperator(
        loss, MODEL, x, in_axes=0
    ).as_matrix(),
    "GGNOperator": lambda x: eqxbatch.GGNOperator(
        outputs, of_outputs, MODEL, x, in_axes=0
    ).as_matrix(),
    "filter_linearize": lambda x: eqxbatch.filter_linearize(MODEL)(MODEL, x[0]),
    "explain_sites": lambda x: eqxbatch.explain_sites(loss, MODEL, x, in_axes=0),
    "filter_batch_kernel": lambda x: in_blocks(kernel)(X, x),
    "symmetric": lambda x: in_blocks(kernel, symmetric=True)(X, x),
    "pairwise": lambda x: in_blocks(of_pair, pairwise=True)(X, x),
    "reduce": lambda x: in_blocks(kernel, reduce=Total())(X, x),
    "EmpiricalNTK": lambda x: eqxbatch.EmpiricalNTK(MODEL, block_size=2)(x),
    "implementations": lambda x: eqxbatch.EmpiricalNTK(
        MODEL, method="jacobian_contraction"
    )(x),
    "matvec": lambda x: eqxbatch.EmpiricalNTK(MODEL).untraced_matvec(
        x, None, jnp.ones((5, 3))
    ),
    "EmpiricalNNGP": lambda x: eqxbatch.EmpiricalNNGP(MODEL)(x),
    "EmpiricalKernel": lambda x: eqxbatch.EmpiricalKernel(MODEL)(x),
    "PseudoNTK": lambda x: eqxbatch.PseudoNTK(MODEL)(x),
    "ProbedNTK": lambda x: eqxbatch.ProbedNTK(
        MODEL, num_probes=2, key=jax.random.key(0)
    )(x),
    "MonteCarloKernel": lambda x: eqxbatch.MonteCarloKernel(
        init, key=jax.random.key(0), num_samples=2
    )(x),
}


@pytest.mark.parametrize(
    "name", variants(CALLS, *(x for x in CALLS if x not in eqxbatch.__all__))
)
def test_annotated_functions_see_one_example(name):
    # What is traced is checked, and not compiled.
    eqx.filter_eval_shape(CALLS[name], X)
    with pytest.raises(jaxtyping.TypeCheckError) as e:
        CALLS[name](WRONG)
    # The violation is the user's own: nothing of the package checks anything below it.
    own = traceback.extract_tb(e.value.__traceback__)
    assert any(frame.filename == __file__ for frame in own)
    assert "test_annotated_users." in str(e.value).splitlines()[0]
    assert "eqxbatch" not in str(e.value)
