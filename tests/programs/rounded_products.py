"""What products of float32 lose on GPUs and TPUs, emulated on a CPU.

`python -m tests.programs.rounded_products` prints a table of relative errors: with all
digits, with rounded products where eqxbatch leaves JAX's default, and with all products
rounded, as under `jax.default_matmul_precision("default")`.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax

import eqxbatch
from ..sites.adapter import called, is_product


# TF32 on GPUs, and bfloat16 on TPUs.
BITS = {"TF32": 10, "bfloat16": 7}


def rounded(fun: Callable, bits: int) -> Callable:
    """`fun`, where factors of products of float32 have so many bits of mantissa.

    Products whose precision is `"highest"` keep all of them.
    """

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        leaves = evaluate(closed, jax.tree.leaves(args), bits)
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return run


def evaluate(closed: jex.ClosedJaxpr, args: list, bits: int) -> list:
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, args, strict=True))
    read = lambda x: x.val if isinstance(x, jex.Literal) else values[x]
    for eqn in closed.jaxpr.eqns:
        outs = _outputs(eqn, [*map(read, eqn.invars)], bits)
        values |= dict(zip(eqn.outvars, outs, strict=True))
    return [*map(read, closed.jaxpr.outvars)]


def _outputs(eqn: Any, args: list, bits: int) -> list:
    name, params = eqn.primitive.name, dict(eqn.params)
    inner = called(eqn) or params.get("call_jaxpr")
    if inner is not None:
        return evaluate(inner, args, bits)
    if is_product(name) and not _is_exact(params["precision"]):
        is_single = lambda x: x.dtype == jnp.float32
        cut = lambda x: lax.reduce_precision(x, 8, bits) if is_single(x) else x
        args = [*map(cut, args)]

    def replaced(x: Any) -> Any:
        if not isinstance(x, jex.ClosedJaxpr):
            return x
        run = lambda *args: evaluate(x, [*args], bits)
        return jax.make_jaxpr(run)(*(var.aval for var in x.jaxpr.invars))

    if name in ("scan", "while", "cond"):
        is_program = lambda x: isinstance(x, jex.ClosedJaxpr)
        params = jax.tree.map(replaced, params, is_leaf=is_program)
    outs = eqn.primitive.bind(*args, **params)
    return [*outs] if eqn.primitive.multiple_results else [outs]


def _is_exact(precision: Any) -> bool:
    one = precision[0] if isinstance(precision, tuple) else precision
    return one == lax.Precision.HIGHEST


class Net(eqx.Module):
    """A layer at several positions, and one at their mean."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jr.split(key)
        self.first = eqx.nn.Linear(16, 24, key=keys[0])
        self.last = eqx.nn.Linear(24, 4, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.mean(jnp.tanh(jax.vmap(self.first)(x)), axis=0))


def results() -> dict[str, Callable]:
    """By name, functions of arrays of a model and of examples."""
    _, static = eqx.partition(Net(jr.key(0)), eqx.is_array)
    model = lambda arrays: eqx.combine(arrays, static)
    outputs = lambda net, x: net(x)
    squares = lambda out, x: jnp.sum(out**2)
    loss = lambda net, x: jnp.sum((net(x) - 1) ** 2)

    def norms(method: str) -> Callable:
        return lambda arrays, x: eqxbatch.filter_micro_grad(
            loss, clip_norm=0.1, method=method, return_norms=True
        )(model(arrays), x)

    clipped = lambda method, i: lambda *args: norms(method)(*args)[i]
    ntk = lambda arrays, x: eqxbatch.EmpiricalNTK(model(arrays))(x)

    def solved(arrays: Any, x: jax.Array) -> jax.Array:
        kernel = ntk(arrays, x)
        ridge = 1e-4 * jnp.trace(kernel) / len(kernel) * jnp.eye(len(kernel))
        return jnp.linalg.solve(kernel + ridge, x[:, 0, :3])

    def inverse(arrays: Any, x: jax.Array) -> Any:
        factors = eqxbatch.filter_kfac(outputs, squares, in_axes=0)(model(arrays), x)
        return factors.operator(damping=1e-3).inverse().mv(arrays)

    def product(arrays: Any, x: jax.Array) -> jax.Array:
        rbf = lambda x, y: jnp.exp(-jnp.mean((x[:, None] - y[None]) ** 2, -1))
        reduce = eqxbatch.KernelProduct(x[:, 0, :3])
        rows = x[:, 0] + 0 * arrays.last.bias[0]
        return eqxbatch.filter_batch_kernel(rbf, block_size=8, reduce=reduce)(
            rows, rows
        )

    def step(space: str) -> Callable:
        return lambda arrays, x: eqxbatch.filter_gauss_newton_step(
            lambda net, x: net(x) - 1, damping=1e-2, space=space
        )(model(arrays), x)

    return {
        "model": lambda arrays, x: jax.vmap(model(arrays))(x),
        "norms, by sites": clipped("sites", 1),
        "norms, materialised": clipped("materialise", 1),
        "clipped gradient, by sites": clipped("sites", 0),
        "clipped gradient, materialised": clipped("materialise", 0),
        "NTK": ntk,
        "NTK, solved": solved,
        "KernelProduct": product,
        "Kronecker factors, inverse": inverse,
        "step in sample space": step("sample"),
        "step in parameter space": step("parameter"),
    }


def errors(names: Collection[str] = ()) -> Iterator[tuple[str, list[float]]]:
    """For some or all results, the relative errors in the order of the table."""
    arrays, _ = eqx.partition(Net(jr.key(0)), eqx.is_array)
    x = jr.normal(jr.key(1), (32, 5, 16))
    flat = lambda tree: np.concatenate(
        [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    )
    for name, fun in results().items():
        if names and name not in names:
            continue
        with jax.enable_x64(True):
            wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64), tree)
            true = flat(jax.jit(fun)(wide(arrays), wide(x)))
        got = [flat(jax.jit(fun)(arrays, x))]
        for precision in (None, "default"):
            with jax.default_matmul_precision(precision):
                runs = [rounded(fun, bits) for bits in BITS.values()]
                got += [flat(jax.jit(run)(arrays, x)) for run in runs]
        size = np.linalg.norm(true)
        yield name, [float(np.linalg.norm(y - true) / size) for y in got]


if __name__ == "__main__":
    every = [*BITS, *(f"{name}, all" for name in BITS)]
    print("| result | float32 |", " | ".join(every), "|")
    print("|---|---:|---:|---:|---:|---:|")
    for name, found in errors():
        print(f"| {name} |", " | ".join(f"{x:.0e}" for x in found), "|")
