"""Random calls of `filter_grid_vmap`, against nested `jax.vmap`s."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eqxbatch import filter_grid_vmap, grid
from .map_accumulators import draw_accumulator
from .map_draw import (
    Case,
    coarsest,
    Draw,
    draw_dtype,
    draw_placing,
    Expected,
    make,
    widen,
)


_NAMES = "ijk"
_ARGUMENTS = "abcd"
_DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "int32", "uint8")


def _function(kinds: list[str]) -> tuple[Any, str]:
    """Of one example of each argument: a PyTree of results."""

    def total(*args: Any) -> Any:
        leaves = [x for x in jtu.tree_leaves(args) if eqx.is_array(x)]
        dtype = jnp.result_type(*[x.dtype for x in leaves])
        product = jnp.ones((), dtype)
        for number, x in enumerate(leaves):
            product = product * (jnp.sum(x).astype(dtype) + (number + 1))
        return product, leaves

    def both(*args: Any) -> Any:
        product, leaves = total(*args)
        return {"product": product, "first": leaves[0], "last": leaves[-1] * 2}

    kind = kinds[0]
    if kind == "number":
        return lambda *args: total(*args)[0], "product"
    if kind == "vector":
        return lambda *args: jnp.stack([total(*args)[0]] * 3), "vector"
    return both, "dict"


def _nested(fun: Any, places: list[dict], order: list[str]) -> Any:
    """`jax.vmap`s whose axes come first in the results, in this order."""
    for name in reversed(order):
        outer = order[: order.index(name)]
        axes = []
        for place in places:
            if name not in place:
                axes.append(None)
                continue
            axis = place[name]
            gone = sum(place[other] < axis for other in outer if other in place)
            axes.append(axis - gone)
        fun = jax.vmap(fun, in_axes=tuple(axes))
    return fun


def draw_grids(draw: Draw) -> Case:
    """`filter_grid_vmap` of some arguments on some axes of a grid."""
    placing = draw_placing(draw, 0.1)
    names = _NAMES[: 1 + draw.below(3)]
    sizes = {name: draw.one_of(2, 3, 1, 5, 4) for name in names}
    if draw.flag(0.05):
        sizes[names[0]] = 0
    values, placed, places, texts, given = [], [], [], [], []
    with_dtype = draw_dtype(draw, _DTYPES)
    num = len(names) + draw.below(3)
    for number in range(min(num, 4)):
        if number < len(names):
            mine = [names[number]]
        else:
            mine = [name for name in names if draw.flag(0.4)]
        shape = list(draw.one_of((), (2,), (2, 3)))
        place = {}
        for name in mine:
            at = draw.below(len(shape) + 1)
            shape.insert(at, sizes[name])
            place = {key: x + (x >= at) for key, x in place.items()} | {name: at}
        x = make(draw.numbers(), tuple(shape), with_dtype)
        axes = {
            name: at - len(shape) if draw.flag(0.3) else at
            for name, at in place.items()
        }
        if not axes:
            spec = None
        elif len(axes) == 1:
            ((name, axis),) = axes.items()
            spec = grid(name, axis)
        else:
            spec = grid(tuple(axes), tuple(axes.values()))
        first = next(iter(place.values()), None)
        placed.append(placing.spread(draw, x, first))
        values.append(x)
        places.append(place)
        given.append(spec)
        texts.append(f"{with_dtype}{shape} on {axes}")
    order = list(dict.fromkeys(name for place in places for name in place))
    fun, what = _function([draw.one_of("number", "vector", "dict")])
    settings: dict[str, Any] = {}
    named = {
        1: lambda a: fun(a),
        2: lambda a, b: fun(a, b),
        3: lambda a, b, c: fun(a, b, c),
        4: lambda a, b, c, d: fun(a, b, c, d),
    }[len(values)]
    is_dict = draw.flag()
    settings["in_axes"] = (
        dict(zip(_ARGUMENTS, given, strict=False)) if is_dict else tuple(given)
    )
    cells = int(np.prod(list(sizes.values())))
    block = draw.one_of(None, 1, 2, 3, 5, 7, cells - 1, cells, cells + 1)
    settings["block_size"] = None if block is None else max(block, 1)
    # Accumulators, in the order in which axes are reduced.
    dense = jax.jit(_nested(fun, places, order))
    out = jax.eval_shape(dense, *values)
    dtypes = [x.dtype for x in jtu.tree_leaves(out)]
    reduced: dict[str, Any] = {}
    if draw.flag(0.5):
        for name in sorted(order, key=lambda _: draw.below(10)):
            if len(reduced) == 2 or draw.flag(0.4):
                continue
            found = draw_accumulator(draw, sizes[name], dtypes)
            if found.text == "Concat()" or any(
                found.refusal(d, sizes[name]) or found.is_odd(d) for d in dtypes
            ):
                continue
            reduced[name] = found
    if reduced:
        settings["accumulator"] = {n: x.accumulator for n, x in reduced.items()}
    if draw.flag(0.15):
        settings["checkpoint"] = True
    kept = [name for name in order if name not in reduced]
    final, settings["out_axes"] = _draw_out_axes(draw, kept, out, len(order))
    eps = coarsest(values)

    def oracle() -> Any:
        whole = dense(*values)

        def one(x: Any) -> Any:
            remaining = list(order)
            for name, accumulator in reduced.items():
                at = remaining.index(name)
                remaining.remove(name)
                reduce = lambda x, at=at, f=accumulator.numpy: f(
                    np.moveaxis(_as_numpy(x), at, 0)
                )
                x = jtu.tree_map(reduce, x, is_leaf=is_expected)
            return jtu.tree_map(lambda x: _moved(x, final, eps), x, is_leaf=is_expected)

        return jtu.tree_map(one, whole)

    def by_jax() -> Any:
        return dense(*placed)

    reductions = {name: x.text for name, x in reduced.items()}
    text = (
        f"{what} of {texts} block={block} {'dict' if is_dict else 'tuple'} "
        f"out_axes={settings['out_axes']} accumulator={reductions}"
        f"{' checkpoint' if 'checkpoint' in settings else ''}{placing.text}"
    )
    return Case(
        text,
        lambda: filter_grid_vmap(named, **settings)(*placed),
        oracle,
        by_jax=by_jax,
    )


def _draw_out_axes(
    draw: Draw, kept: list[str], out: Any, num: int
) -> tuple[dict[int, int], Any]:
    """Where the axes that are kept go, by number, and how that is said."""
    default = {number: number for number in range(len(kept))}
    if not kept or not draw.flag(0.5):
        return default, None
    ndim = min(x.ndim for x in jtu.tree_leaves(out)) - num + len(kept)
    if len(kept) == 1:
        axis = draw.one_of(*range(ndim), *range(-ndim, 0))
        return {0: axis}, draw.one_of(axis, {kept[0]: axis})
    order = sorted(kept, key=lambda _: draw.below(10))
    return {kept.index(name): at for at, name in enumerate(order)}, tuple(order)


def is_expected(x: Any) -> bool:
    return isinstance(x, Expected)


def _as_numpy(x: Any) -> np.ndarray:
    if isinstance(x, Expected):
        return np.asarray(x.values).astype(x.dtype)
    return np.asarray(x)


def _moved(x: Any, final: dict[int, int], eps: float) -> Any:
    """With its first axes where they belong."""
    if not isinstance(x, Expected):
        x = Expected(widen(x), x.dtype)
    x.eps = eps
    x.tolerance = 64.0
    if final and x.values is not None:
        x.values = np.moveaxis(x.values, list(final), list(final.values()))
    return x
