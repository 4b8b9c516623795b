"""Random derivatives of kernels in blocks, and kernels of derivatives."""

import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eqxbatch import EmpiricalNTK, filter_batch_kernel, HostStore, ZarrStore
from .map_draw import Case, Draw, draw_placing, Expected, make, widen
from .map_kernels import (
    draw_blocks,
    draw_kernel,
    draw_sides,
    exchange,
    FEATURES,
    function,
    KERNELS,
    read,
    scaled,
)


def draw_kernel_gradients(draw: Draw) -> Case:
    """The derivative of a kernel in the examples and in its scale."""
    placing = draw_placing(draw, 0.35)
    options = (KERNELS[2], KERNELS[0], KERNELS[3], KERNELS[6])
    kernel, dtype = draw_kernel(draw, options, ("float32", "float64"))
    sides = draw_sides(draw, dtype, draw_placing(draw, 0))
    size = draw_blocks(draw, sides.totals)
    settings: dict[str, Any] = {"block_size": size, "out_axes": kernel.out_axes}
    if kernel.symmetric and draw.flag(0.6):
        settings["symmetric"] = kernel.symmetric
    if placing.mesh is not None:
        settings["mesh"] = placing.mesh
    is_given = draw.flag(0.6)
    is_alone = len(sides.args) == 1

    def loss(run: Callable) -> Callable:
        def value(x: Any, y: Any, scale: Any) -> Any:
            out = run(x, None if is_alone else y, scale)
            leaves = [x for x in jtu.tree_leaves(out) if eqx.is_inexact_array(x)]
            # Not reshaped, which JAX does not do where it is spread over a mesh.
            weigh = lambda x: jnp.cos(jnp.arange(x.size)).astype(x.dtype)
            return sum(jnp.sum(x * weigh(x).reshape(x.shape)) for x in leaves)

        return value

    def blocked(x: Any, y: Any, scale: Any) -> Any:
        fun = function(kernel, 0, is_given, scale)
        extra = {"given": scale} if is_given else {}
        return filter_batch_kernel(fun, **settings)(x, y, **extra)

    def dense(x: Any, y: Any, scale: Any) -> Any:
        return kernel.fun(jnp, x, x if y is None else y, scale)

    y = sides.dense[1]
    values = (sides.x, y, scaled(kernel, dtype))

    def oracle() -> Any:
        found = jax.jit(jax.grad(loss(dense), argnums=(0, 1, 2)))(*values)
        # The terms of the derivative in the scale are those in the examples.
        scale = max(np.max(np.abs(widen(x)), initial=0) for x in found)
        return jtu.tree_map(
            lambda x: Expected(widen(x), x.dtype, scale=scale, tolerance=500.0), found
        )

    package = lambda: jax.jit(jax.grad(loss(blocked), argnums=(0, 1, 2)))(*values)
    text = (
        f"gradient of {kernel.text} {dtype} {sides.text} blocks={size} "
        f"{'symmetric' if 'symmetric' in settings else ''} "
        f"{'given' if is_given else 'closed over'}{placing.text}"
    )
    return Case(text, package, oracle)


def draw_kernels_of_gradients(draw: Draw) -> Case:
    """A kernel function that takes derivatives in what it is given or closes over."""
    placing = draw_placing(draw, 0.5)
    sides = draw_sides(draw, "float32", draw_placing(draw, 0))
    size = draw_blocks(draw, sides.totals)
    what = draw.one_of("grad", "EmpiricalNTK", "EmpiricalNTK full", "jvp")
    way = draw.one_of("closed over", "partial", "argument")
    store = draw.one_of("device", "host", "zarr")
    num = 3
    w = make(draw.numbers(), (num, FEATURES), "float32")
    apply = lambda w, x: jnp.tanh(w @ x)

    def jacobians(w: Any, x: Any) -> Any:
        derive = jax.jacfwd if what == "jvp" else jax.jacrev
        return jax.vmap(derive(apply), (None, 0))(w, x).reshape(len(x), num, -1)

    class Net(eqx.Module):
        w: Any

        def __call__(self, x: Any) -> Any:
            return apply(self.w, x)

    def kernel(w: Any, x1: Any, x2: Any = None) -> Any:
        if "EmpiricalNTK" in what:
            axes = () if "full" in what else -1
            return EmpiricalNTK(Net(w), trace_axes=axes)(x1, x2)
        first = jacobians(w, x1)
        second = first if x2 is None else jacobians(w, x2)
        return jnp.einsum("iap,jap->ij", first, second)

    is_full = "full" in what
    settings: dict[str, Any] = {"block_size": size}
    if draw.flag():
        settings["symmetric"] = exchange if is_full else True
    if placing.mesh is not None:
        settings["mesh"] = placing.mesh

    def package() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            if store == "host":
                settings["store"] = HostStore()
            if store == "zarr":
                settings["store"] = ZarrStore(f"{folder}/k")
            if way == "argument":
                fun = lambda x1, x2=None, *, w: kernel(w, x1, x2)
                out = filter_batch_kernel(fun, **settings)(*sides.args, w=w)
            else:
                partial = eqx.Partial(kernel, w)
                fun = partial if way == "partial" else lambda x, y=None: kernel(w, x, y)
                out = filter_batch_kernel(fun, **settings)(*sides.args)
            return read(out, what) if store == "zarr" else out

    def oracle() -> Any:
        x, y = (widen(x) for x in sides.dense)
        wide = widen(w)
        slope = lambda x: 1 - np.tanh(x @ wide.T) ** 2
        inner = x @ y.T
        full = np.zeros((len(x), len(y), num, num))
        for a in range(num):
            full[:, :, a, a] = slope(x)[:, None, a] * slope(y)[None, :, a] * inner
        traced = np.einsum("ijaa->ij", full)
        if what == "EmpiricalNTK":
            traced = traced / num
        return Expected(full if is_full else traced, "float32", tolerance=200.0)

    text = (
        f"{what} {sides.text} blocks={size} {way} {store} "
        f"{'symmetric' if 'symmetric' in settings else ''}{placing.text}"
    )
    return Case(text, package, oracle)
