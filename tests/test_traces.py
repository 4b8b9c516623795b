"""How often each transform calls the user's function to trace it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqxbatch import (
    Concat,
    EmpiricalKernel,
    EmpiricalNNGP,
    EmpiricalNTK,
    filter_batch_kernel,
    filter_ggn,
    filter_ggnvp,
    filter_grid_vmap,
    filter_hessian,
    filter_hessian_blocks,
    filter_hessian_diagonal,
    filter_hvp,
    filter_jacobian,
    filter_kfac,
    filter_micro_grad,
    filter_micro_value_and_grad,
    filter_micro_vmap,
    filter_microbatch,
    FrobeniusNorm,
    grid,
    Mean,
    MemoryBudget,
)
from eqxbatch._kernels import sides
from .helpers import drawn, make_mesh


X = jnp.ones((5, 3))
BUDGET = MemoryBudget(100_000)
CALLS: list[None] = []


class Model(eqx.Module):
    """A model that counts the calls of it."""

    mlp: eqx.nn.MLP

    def __call__(self, x):
        CALLS.append(None)
        return self.mlp(x)


MODEL = Model(drawn(eqx.nn.MLP, 3, 2, 4, 1, key=jax.random.key(0)))


def out(model, x):
    return model(x)


def of_out(y, x):
    return jnp.sum((y - x[:2]) ** 2)


def loss(model, x):
    return of_out(model(x), x)


def of_all(model, x):
    return jax.vmap(model)(x)


def of_whole(model, x):
    return jnp.mean(of_all(model, x))


def sum_of(a, b):
    return MODEL(a + b)


AXES = {"a": grid("i"), "b": grid("j")}
MEAN = {"batched": True, "accumulator": Mean()}
ONCE = {
    "map": lambda: filter_micro_vmap(MODEL)(X),
    "map, remainder": lambda: filter_micro_vmap(MODEL, microbatch_size=2)(X),
    "microbatch": lambda: filter_microbatch(
        lambda x: jax.vmap(MODEL)(x), microbatch_size=5, accumulator=Concat()
    )(X),
    "grid": lambda: filter_grid_vmap(sum_of, in_axes=AXES)(X, X),
    "gradient": lambda: filter_micro_grad(loss)(MODEL, X),
    "gradient, remainder": lambda: filter_micro_grad(loss, microbatch_size=2)(MODEL, X),
    "value": lambda: filter_micro_value_and_grad(loss, microbatch_size=2)(MODEL, X),
    "whole": lambda: filter_micro_grad(of_whole, microbatch_size=5, **MEAN)(MODEL, X),
    "clipped": lambda: filter_micro_grad(loss, microbatch_size=2, clip_norm=1.0)(
        MODEL, X
    ),
    "clipped, materialised": lambda: filter_micro_grad(
        loss, microbatch_size=2, clip_norm=1.0, method="materialise"
    )(MODEL, X),
    "moments": lambda: filter_micro_grad(loss, microbatch_size=2, moments=True)(
        MODEL, X
    ),
    "Jacobian": lambda: filter_jacobian(of_all)(MODEL, X),
    "Hessian": lambda: filter_hessian(loss, in_axes=0)(MODEL, X),
    "Hessian, flat": lambda: filter_hessian(loss, in_axes=0, flat=True)(MODEL, X),
    "Hessian, products": lambda: filter_hessian(loss, in_axes=0, method="products")(
        MODEL, X
    ),
    "Hessian, microbatches": lambda: filter_hessian(loss, in_axes=0, microbatch_size=2)(
        MODEL, X
    ),
    "Hessian's diagonal": lambda: filter_hessian_diagonal(loss, in_axes=0)(MODEL, X),
    "Hessian's blocks": lambda: filter_hessian_blocks(loss, in_axes=0)(MODEL, X),
    "Hessian's product": lambda: filter_hvp(loss, in_axes=0)(MODEL, MODEL, X),
    "GGN": lambda: filter_ggn(out, of_out)(MODEL, X),
    "GGN, microbatches": lambda: filter_ggn(out, of_out, microbatch_size=2)(MODEL, X),
    "GGN's product": lambda: filter_ggnvp(out, of_out)(MODEL, MODEL, X),
    "K-FAC": lambda: filter_kfac(out, of_out)(MODEL, X),
    "K-FAC, microbatches": lambda: filter_kfac(out, of_out, microbatch_size=2)(
        MODEL, X
    ),
}
KERNELS = {
    "NTK": lambda: EmpiricalNTK(MODEL)(X),
    "NTK of two sides": lambda: EmpiricalNTK(MODEL)(X, X[:2]),
    "NTK's diagonal": lambda: EmpiricalNTK(MODEL).diagonal(X),
    "NNGP": lambda: EmpiricalNNGP(MODEL)(X),
    "NTK and NNGP": lambda: EmpiricalKernel(MODEL)(X),
}
# A budget compiles the whole first, to see whether it fits.
TWICE = {
    "map, budget": lambda: filter_micro_vmap(MODEL, microbatch_size=BUDGET)(X),
    "gradient, budget": lambda: filter_micro_grad(loss, microbatch_size=BUDGET)(
        MODEL, X
    ),
}


@pytest.mark.parametrize(
    ("call", "expected"),
    (
        *(pytest.param(call, 1, id=name) for name, call in (ONCE | KERNELS).items()),
        *(pytest.param(call, 2, id=name) for name, call in TWICE.items()),
    ),
)
def test_a_function_is_called_once_to_trace_it(call, expected):
    if call in KERNELS.values():
        # They share the trace of an earlier one.
        jax.clear_caches()
    CALLS.clear()
    # Only a budget compiles before it is known how often the function is traced.
    eqx.filter_eval_shape(call) if expected == 1 else call()
    assert len(CALLS) == expected


@pytest.mark.devices
@pytest.mark.parametrize("place", ("store", "mesh", "reduce"))
def test_programs_of_a_kernel_share_the_trace_of_its_model(place):
    jax.clear_caches()
    CALLS.clear()
    mesh = make_mesh(None, (2,), ("rows",))
    settings = {
        "store": {"store": "host"},
        "mesh": {"mesh": mesh},
        "reduce": {"mesh": mesh, "reduce": FrobeniusNorm()},
    }
    run = lambda: EmpiricalNTK(MODEL, block_size=2, **settings[place])(X)
    # On a mesh, there is one program.
    run() if place == "store" else eqx.filter_eval_shape(run)
    # What devices of a mesh run has other types.
    assert len(CALLS) == (1 if place == "store" else 2)


@pytest.mark.parametrize(
    "kernel",
    (
        filter_batch_kernel(lambda x, y: x @ y.T),
        EmpiricalNNGP(MODEL, reduce=FrobeniusNorm()),
        EmpiricalNTK(MODEL),
        EmpiricalNTK(MODEL, block_size=2).diagonal,
    ),
    ids=["function", "reduced", "model", "diagonal"],
)
def test_later_calls_of_a_kernel_split_no_batch(kernel, monkeypatch):
    expected = kernel(X, X + 1)
    monkeypatch.setattr(sides, "split_batch", None)
    assert jnp.array_equal(kernel(X, X + 1), expected)
    with pytest.raises(TypeError, match="NoneType"):
        kernel(X[1:])
