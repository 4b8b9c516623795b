"""Random calls of `filter_batch_kernel`, against NumPy."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eqxbatch import (
    filter_batch_kernel,
    FrobeniusNorm,
    HostStore,
    KernelProduct,
    TopK,
    ZarrStore,
)
from .map_draw import (
    Case,
    coarsest,
    Draw,
    draw_dtype,
    draw_placing,
    draw_size,
    draw_total,
    Expected,
    kind_of,
    make,
    widen,
)


_DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int32")
FEATURES = 2


@dataclasses.dataclass
class Kernel:
    """A kernel function.

    - `fun`: of `(xp, x1, x2, scale)`, for NumPy and for JAX.
    - `symmetric`: what to give as `symmetric` if that is to be said.
    """

    text: str
    fun: Callable[..., Any]
    symmetric: Any = False
    out_axes: Any = (0, 1)
    is_real: bool = False


def _linear(xp: Any, x: Any, y: Any, scale: Any) -> Any:
    return (x @ xp.conj(y).T) * scale


def _lopsided(xp: Any, x: Any, y: Any, scale: Any) -> Any:
    return xp.tanh(x[:, None, 0] + 2 * y[None, :, 1]) * scale


def _rbf(xp: Any, x: Any, y: Any, scale: Any) -> Any:
    return xp.exp(-(xp.abs(x[:, None] - y[None]) ** 2).sum(axis=-1)) * xp.real(scale)


def _masked(xp: Any, x: Any, y: Any, scale: Any) -> Any:
    """Many entries are `-inf`."""
    k = xp.tanh(x[:, None, 0] + y[None, :, 0]) * scale
    return xp.where(k < 0.3, xp.asarray(-np.inf, k.dtype), k)


def _outputs(xp: Any, x: Any, y: Any, scale: Any) -> Any:
    """With two axes of outputs, which take part in an exchange of sides."""
    first = xp.stack([x[:, 0], x[:, 1], x[:, 0] * x[:, 1]], axis=1) * scale
    second = xp.stack([y[:, 0], y[:, 1], y[:, 0] * y[:, 1]], axis=1)
    return first[:, None, :, None] * xp.conj(second)[None, :, None, :]


def _behind(xp: Any, x: Any, y: Any, scale: Any) -> Any:
    return xp.stack([_linear(xp, x, y, scale), _linear(xp, x, y, 2 * scale)])


def _tree(xp: Any, x: Any, y: Any, scale: Any) -> Any:
    k = _lopsided(xp, x, y, scale)
    return {"k": k, "swapped": k.T, "rows": x[:, 0], "columns": y[:, 1]}


def exchange(k: Any) -> Any:
    return jnp.conj(jnp.transpose(k, (1, 0, 3, 2)))


_TREE_AXES = {"k": (0, 1), "swapped": (1, 0), "rows": (0, None), "columns": (None, 0)}
KERNELS = (
    Kernel("rbf", _rbf, True, is_real=True),
    Kernel("linear", _linear, True),
    Kernel("lopsided", _lopsided),
    Kernel("outputs", _outputs, exchange),
    Kernel("masked", _masked, True, is_real=True),
    Kernel("behind", _behind, True, (1, 2)),
    Kernel("tree", _tree, False, _TREE_AXES),
)


def draw_kernels(draw: Draw) -> Case:
    """A kernel in blocks: kept, stored or reduced."""
    return draw.one_of(_kept, _reduced)(draw)


@dataclasses.dataclass
class Sides:
    """The examples of both sides, and what the call is given."""

    x: Any
    y: Any
    args: tuple
    text: str

    @property
    def dense(self) -> tuple:
        return self.x, self.x if self.y is None else self.y

    @property
    def totals(self) -> tuple[int, int]:
        return len(self.x), len(self.x if self.y is None else self.y)


def draw_sides(draw: Draw, dtype: str, placing: Any, axis: int = 0) -> Sides:
    totals = draw_total(draw), draw_total(draw)
    rng = draw.numbers()
    x, y = (make(rng, (n, FEATURES), dtype) for n in totals)
    way = draw.one_of("alone", "two", "same")
    if way != "two":
        y = None
    put = lambda x: placing.spread(draw, jnp.moveaxis(x, 0, axis), axis)
    args = (put(x),)
    if way != "alone":
        args = (*args, args[0] if way == "same" else put(y))
    return Sides(x, y, args, f"n={totals if way == 'two' else totals[0]} {way}")


def draw_blocks(draw: Draw, totals: tuple[int, int]) -> Any:
    first = draw_size(draw, totals[0])
    return first if first is None or not draw.flag(0.3) else (first, 1 + draw.below(5))


def function(kernel: Kernel, axis: int, is_given: bool, scale: Any) -> Callable:
    """As it is called, with a scale that is given or closed over."""

    def call(x1: Any, x2: Any = None, given: Any = None) -> Any:
        x2 = x1 if x2 is None else x2
        sides = [jnp.moveaxis(x, axis, 0) for x in (x1, x2)]
        return kernel.fun(jnp, *sides, given if is_given else scale)

    return call


def scaled(kernel: Kernel, dtype: str) -> Any:
    return jnp.asarray(2 if dtype == "int32" else 1.5, dtype)


def draw_kernel(draw: Draw, options: tuple, dtypes: tuple) -> tuple[Kernel, str]:
    kernel = draw.one_of(*options)
    dtype = draw_dtype(draw, dtypes)
    if dtype == "int32" and kernel.text not in ("linear", "outputs", "behind"):
        dtype = "float32"
    if "complex" in dtype and (kernel.is_real and kernel.text == "masked"):
        dtype = "float32"
    return kernel, dtype


def _kept(draw: Draw) -> Case:
    placing = draw_placing(draw, 0.35)
    kernel, dtype = draw_kernel(draw, KERNELS, _DTYPES)
    axis = draw.below(2)
    # On a mesh, the kernel function spreads the rows by itself.
    is_spread = draw.flag(0.3)
    sides = draw_sides(
        draw, dtype, placing if is_spread else draw_placing(draw, 0), axis
    )
    size = draw_blocks(draw, sides.totals)
    is_given = draw.flag(0.6)
    scale = scaled(kernel, dtype)
    settings: dict[str, Any] = {"block_size": size, "in_axes": axis}
    settings["out_axes"] = kernel.out_axes
    if kernel.symmetric and draw.flag(0.6):
        settings["symmetric"] = kernel.symmetric
    if placing.mesh is not None:
        settings["mesh"] = placing.mesh
    stores = ["device", "device", "host", "jit"]
    if dtype != "bfloat16":
        stores += ["zarr"]
    store = draw.one_of(*stores)
    fun = function(kernel, axis, is_given, scale)
    extra = {"given": scale} if is_given else {}

    def package() -> Any:
        with contextlib.ExitStack() as stack:
            if store == "host":
                settings["store"] = HostStore()
            if store == "zarr":
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                settings["store"] = ZarrStore(f"{folder}/k")
            run = filter_batch_kernel(fun, **settings)
            run = eqx.filter_jit(run) if store == "jit" else run
            out = run(*sides.args, **extra)
            if store == "zarr":
                out = jtu.tree_map(
                    lambda x: read(x, kernel.text),
                    out,
                    is_leaf=lambda x: hasattr(x, "shape"),
                )
            return out

    def oracle() -> Any:
        x, y = (widen(x) for x in sides.dense)
        with np.errstate(all="ignore"):
            dense = kernel.fun(np, x, y, widen(scale))
        call = lambda x, y: kernel.fun(jnp, x, y, scale)
        structs = jax.eval_shape(call, *sides.dense)
        eps = coarsest(sides.x)
        return jtu.tree_map(
            lambda k, s: Expected(k, s.dtype, tolerance=64.0, eps=eps), dense, structs
        )

    text = (
        f"{kernel.text} {dtype} {sides.text} blocks={size} axis={axis} {store} "
        f"{'symmetric' if 'symmetric' in settings else ''} "
        f"{'given' if is_given else 'closed over'}{placing.text}"
    )
    return Case(text, package, oracle)


def read(x: Any, text: str) -> Any:
    """All of a stored array, after some of it has been compared with all."""
    whole = np.asarray(x)
    for key in (
        (slice(1, None), slice(0, 2)),
        (slice(None, None, 2),),
        (-1, slice(1, 3)),
    ):
        if all(length > 1 for length in whole.shape[:2]) and whole.ndim > 1:
            part = x[key] if len(key) > 1 else x[key[0], :]
            if not np.array_equal(part, whole[key], equal_nan=True):
                raise AssertionError(f"{text}: what {key} reads differs from the whole")
    return whole


def _entries(found: Any, dense: np.ndarray, is_alone: bool) -> dict[str, Any]:
    """What indices are worth, as equal entries may come in any order."""
    values, at = np.asarray(found.values), np.asarray(found.indices)
    is_in = bool(np.all((at >= 0) & (at < dense.shape[1])))
    safe = np.clip(at, 0, max(dense.shape[1] - 1, 0))
    rows = np.arange(len(at))[:, None]
    return {
        "values": values,
        "entries": dense[rows, safe],
        "are indices": is_in,
        "are different": all(len({*row}) == len(row) for row in at.tolist()),
        "is self": bool(np.any(at == rows)) if is_alone else False,
    }


def _draw_reduction(draw: Draw, sides: Sides, dtype: str, kernel: Kernel) -> tuple:
    """A reduction, what it must return from a dense kernel, and a description."""
    n1, n2 = sides.totals
    rng = draw.numbers()
    options = ["KernelProduct", "KernelProduct"]
    if dtype != "int32":
        options.append("FrobeniusNorm")
        if kind_of(jnp.dtype(dtype)) == "float" and kernel.out_axes == (0, 1):
            options += ["TopK"] * 3 * (kernel.text != "outputs")
    if kernel.text == "masked":
        options = ["TopK"]
    if kernel.text != "masked" and min(n1, n2) == 0:
        options = [option for option in options if option != "TopK"]
    name = draw.one_of(*options)
    if name == "FrobeniusNorm":
        norm = lambda k: np.sqrt((np.abs(k) ** 2).sum())
        return FrobeniusNorm(), lambda k: (norm(k), norm(k)), name
    if name == "KernelProduct":
        shape = draw.one_of((n2,), (n2, 2))
        is_real = kernel.is_real and "complex" in dtype
        v = make(rng, shape, "float32" if is_real else dtype)
        wide = widen(v)
        product = lambda k, v: np.tensordot(k, v, ((1,), (0,)))
        return (
            KernelProduct(v),
            lambda k: (product(k, wide), product(np.abs(k), np.abs(wide))),
            f"{name}{shape}",
        )
    without_self = sides.y is None and n2 > 1 and draw.flag(0.4)
    num = 1 + draw.below(max(n2 - without_self, 1))

    def top(k: np.ndarray) -> Any:
        k = k.copy()
        if without_self:
            np.fill_diagonal(k, -np.inf)
        values = -np.sort(-k, axis=1)[:, :num]
        return (
            {
                "values": values,
                "entries": values,
                "are indices": True,
                "are different": True,
                "is self": False,
            },
            None,
        )

    text = f"TopK({num}{', without self' if without_self else ''})"
    return TopK(num, without_self=without_self), top, text


def _reduced(draw: Draw) -> Case:
    placing = draw_placing(draw, 0.5)
    options = (*KERNELS[:3], *KERNELS[:5])
    kernel, dtype = draw_kernel(draw, options, _DTYPES)
    if kernel.is_real and dtype == "complex128":
        dtype = "complex64"
    sides = draw_sides(
        draw, dtype, placing if draw.flag(0.3) else draw_placing(draw, 0)
    )
    if kernel.text == "masked" and 0 in sides.totals:
        kernel = KERNELS[0]
    size = draw_blocks(draw, sides.totals)
    if placing.mesh is not None and draw.flag(0.4):
        size = max(-(-sides.totals[0] // placing.mesh.size), 1)  # One block for each.
    reduction, numpy, reduction_text = _draw_reduction(draw, sides, dtype, kernel)
    is_given = draw.flag(0.6)
    scale = scaled(kernel, dtype)
    settings: dict[str, Any] = {"block_size": size, "reduce": reduction}
    if kernel.symmetric and draw.flag(0.6):
        settings["symmetric"] = kernel.symmetric
    if placing.mesh is not None:
        settings["mesh"] = placing.mesh
    fun = function(kernel, 0, is_given, scale)
    extra = {"given": scale} if is_given else {}
    is_top = isinstance(reduction, TopK)

    def dense() -> np.ndarray:
        # With the rounding of its dtype, so that entries can be told apart.
        call = eqx.filter_jit(lambda x, y: kernel.fun(jnp, x, y, scale))
        return widen(call(*sides.dense))

    def package() -> Any:
        out = filter_batch_kernel(fun, **settings)(*sides.args, **extra)
        if is_top:
            return _entries(out, dense(), reduction.without_self)
        return out

    def oracle() -> Any:
        result, scale = numpy(dense())
        eps = coarsest(sides.x)
        if is_top:
            expected = lambda x: Expected(x, None, tolerance=16.0, eps=eps)
            return {
                key: expected(x) if isinstance(x, np.ndarray) else x
                for key, x in result.items()
            }
        kind = None if kernel.is_real and "complex" in dtype else dtype
        if isinstance(reduction, FrobeniusNorm):
            kind = None
        top = float(np.max(np.abs(scale), initial=0))
        return Expected(np.asarray(result), kind, scale=top, tolerance=64.0, eps=eps)

    text = (
        f"{kernel.text} {dtype} {sides.text} blocks={size} {reduction_text} "
        f"{'symmetric' if 'symmetric' in settings else ''} "
        f"{'given' if is_given else 'closed over'}{placing.text}"
    )
    return Case(text, package, oracle)
