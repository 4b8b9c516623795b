"""Random calls of `filter_micro_vmap`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from eqxbatch import filter_micro_vmap

from .map_accumulators import draw_accumulator, Reduced
from .map_draw import (
    Case,
    coarsest,
    Draw,
    draw_dtype,
    draw_placing,
    draw_size,
    draw_total,
    DTYPES,
    expect,
    Expected,
    kind_of,
    make,
    widen,
)


SHAPES = ((), (2,), (3,), (2, 3), (1,), (0,), (1, 2))
# What keeps all numbers as they are, also those that are infinite or huge.
_EXACT_OPS: dict[str, Callable] = {
    "{}": lambda x: x,
    "flip({})": jnp.flip,
    "{}.ravel()": jnp.ravel,
    "{}[None]": lambda x: x[None],
    "{}.T": jnp.transpose,
}
_NUMBER_OPS: dict[str, Callable] = {
    **_EXACT_OPS,
    "{}.sum()": lambda x: jnp.sum(x).astype(x.dtype),
    "{0}*{0}": lambda x: x * x,
    "cumsum({})": lambda x: jnp.cumsum(x).astype(x.dtype),
}
_FLOAT_OPS: dict[str, Callable] = {
    **_NUMBER_OPS,
    "-{}": jnp.negative,
    "sin({})": jnp.sin,
    "{} * 2.5": lambda x: x * 2.5,
}
_KEY_OPS: dict[str, Callable] = {
    "{}": lambda x: x,
    "normal({})": lambda x: jr.normal(x.ravel()[0]) if x.size else jnp.zeros(()),
    "key_data({})": jr.key_data,
    "split({})": lambda x: jr.split(x.ravel()[0], 2) if x.size else x,
}
_CONSTANTS: dict[str, Callable] = {
    "asarray(2.0)": lambda: jnp.asarray(2.0),
    "asarray(3)": lambda: jnp.asarray(3),
    "ones(2)": lambda: jnp.ones(2),
    "full((2,), 1j)": lambda: jnp.full((2,), 1j),
}


class Pair(eqx.Module):
    """A module with an array, another one, and something static."""

    first: Any
    second: Any
    name: str = eqx.field(static=True, default="pair")
    power: float = 2.0


@dataclasses.dataclass
class Argument:
    """Arrays along one batch axis, or shared by all examples."""

    value: Any
    placed: Any  # The same on a mesh, if there is one.
    axis: int | None
    kind: str
    text: str


def _ops(x: Any, kind: str) -> dict[str, Callable]:
    if kind_of(x.dtype) == "key":
        return _KEY_OPS
    if kind != "normal" or kind_of(x.dtype) == "bool":
        return _EXACT_OPS
    return _NUMBER_OPS if kind_of(x.dtype) == "int" else _FLOAT_OPS


def draw_kind(draw: Draw, dtype: str) -> str:
    if dtype not in ("float32", "float64", "bfloat16", "float16") or not draw.flag(0.3):
        return "normal"
    return draw.one_of("normal", "huge", "inf", "nan", "-inf first", "-inf", "tiny")


def draw_arguments(draw: Draw, total: int, placing: Any, dtypes: tuple) -> list:
    """The first argument is along a batch axis."""
    arguments = []
    for number in range(1 + draw.below(3)):
        rng = draw.numbers()
        is_shared = number > 0 and draw.flag(0.3)
        if is_shared:
            dtype = draw_dtype(draw, dtypes)
            value, axis, kind = make(rng, draw.one_of(*SHAPES), dtype), None, "normal"
            text = f"{dtype}{list(value.shape)}"
        else:
            leaves, texts = [], []
            kind, axis, num = "normal", None, 2 if draw.flag(0.3) else 1
            shapes = [draw.one_of(*SHAPES) for _ in range(num)]
            smallest = min(len(shape) for shape in shapes)
            # One axis for all leaves; counted from the end if it is negative.
            axis = draw.one_of(*range(smallest + 1), *range(-smallest - 1, 0))
            for shape in shapes:
                dtype = draw_dtype(draw, dtypes)
                kind = draw_kind(draw, dtype)
                full = list(shape)
                full.insert(axis % (len(shape) + 1), total)
                leaves.append(make(rng, tuple(full), dtype, kind, axis))
                texts.append(f"{dtype}{full} {kind}")
            value, text = leaves[0], texts[0]
            kind = "normal" if {*_kinds(texts)} == {"normal"} else "other"
            if num == 2:
                wrap = draw.one_of(dict, tuple, Pair)
                value = wrap(zip("ab", leaves)) if wrap is dict else (
                    Pair(*leaves) if wrap is Pair else tuple(leaves)
                )
                text = f"{wrap.__name__}({', '.join(texts)})"
        before = placing.text
        placed = jtu.tree_map(lambda x: placing.spread(draw, x, axis), value)
        text += placing.text[len(before) :]
        placing.text = before
        where = "shared" if is_shared else f"at {axis}"
        arguments.append(Argument(value, placed, axis, kind, f"{text} {where}"))
    return arguments


def _kinds(texts: list[str]) -> list[str]:
    return [text.rsplit("] ", 1)[-1] for text in texts]


@dataclasses.dataclass(eq=False)
class Function:
    """A function of one example."""

    steps: list[tuple[int, list[Callable]]]
    structure: Callable[[list], Any]
    text: str

    def __call__(self, *args: Any) -> Any:
        leaves = [x for x in jtu.tree_leaves(args) if eqx.is_array(x)]
        outputs = []
        for at, ops in self.steps:
            x = leaves[at] if at >= 0 else None
            for op in ops:
                x = op() if x is None else op(x)
            outputs.append(x)
        return self.structure(outputs)


_STRUCTURES: dict[str, Callable[[list], Any]] = {
    "{}": lambda x: x[0] if len(x) == 1 else x,
    "tuple": tuple,
    "dict": lambda x: dict(zip("abcdef", x)),
    "Pair": lambda x: Pair(x[0], x[1:]),
    "static": lambda x: {"x": x, "s": "text", "f": 2.0, "n": None},
}


def draw_function(draw: Draw, arguments: list[Argument], max_outputs: int = 3):
    """Chains of operations on leaves, in some structure."""
    leaves, kinds = [], []
    for argument in arguments:
        for x in jtu.tree_leaves(argument.value):
            if eqx.is_array(x):
                leaves.append(x)
                kinds.append(argument.kind)
    steps, texts = [], []
    for _ in range(1 + draw.below(max_outputs)):
        if draw.flag(0.1):
            text, op = draw.one_of(*_CONSTANTS.items())
            steps.append((-1, [op]))
            texts.append(text)
            continue
        at = draw.below(len(leaves))
        ops, text = [], f"x{at}"
        for _ in range(draw.below(3)):
            name, op = draw.one_of(*_ops(leaves[at], kinds[at]).items())
            ops.append(op)
            text = name.format(text)
            if kind_of(leaves[at].dtype) == "key":
                break
        steps.append((at, ops))
        texts.append(text)
    name, structure = draw.one_of(*_STRUCTURES.items())
    return Function(steps, structure, f"{name}[{', '.join(texts)}]")


def _named(fun: Callable, num: int) -> Callable:
    """`fun` with arguments that have names."""
    return {
        1: lambda a: fun(a),
        2: lambda a, b: fun(a, b),
        3: lambda a, b, c: fun(a, b, c),
    }[num]


def _draw_in_axes(draw: Draw, arguments: list[Argument]) -> tuple[Any, bool, str]:
    """`in_axes`, whether the last argument is given by its name, and a description."""
    spec = []
    for argument in arguments:
        axis = argument.axis
        if axis is not None and isinstance(argument.value, Pair):
            axis = eqx.if_array(axis)
        spec.append(axis)
    axes = [argument.axis for argument in arguments]
    forms = ["tuple", "dict", "keyword"]
    if all(axis == 0 for axis in axes):
        forms.append("default")
    if len({*axes}) == 1 and not any(callable(x) for x in spec):
        forms.append("int")
    form = draw.one_of(*forms)
    if form == "default":
        return eqx.if_array(0), False, "default"
    if form == "int":
        return axes[0], False, "int"
    if form == "tuple":
        return tuple(spec), False, "tuple"
    return dict(zip("abc", spec)), form == "keyword", form


def _draw_out_axes(
    draw: Draw, fun: Function, single: list, arguments: list[Argument], total: int
) -> tuple[Any, str]:
    """`out_axes` of a function whose outputs are all kept."""
    name = fun.text.split("[")[0]
    if name in ("Pair", "static") or not draw.flag(0.6):
        return eqx.if_array(0), ""
    is_shared = [
        argument.axis is None
        for argument in arguments
        for x in jtu.tree_leaves(argument.value)
        if eqx.is_array(x)
    ]
    axes: list[int | None] = []
    for (at, _), struct in zip(fun.steps, single, strict=True):
        ndim = len(struct.shape)
        options: list[int | None] = [0, *range(1, ndim + 1), *range(-ndim - 1, 0)]
        if (at < 0 or is_shared[at]) and total > 0:
            options.append(None)
        axes.append(draw.one_of(*options))
    return fun.structure(axes), f" out_axes={axes}"


def _each(accumulators: list[Reduced], structs: list) -> list[Reduced]:
    """One accumulator for each array."""
    return accumulators * len(structs) if len(accumulators) == 1 else accumulators


def _single(fun: Function, arguments: list[Argument]) -> list:
    """The shapes of what one example gives."""
    def example(x: Any, axis: int) -> Any:
        shape = list(x.shape)
        shape[axis] = 1
        one = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
        cut = lambda x: jax.lax.index_in_dim(x, 0, axis, keepdims=False)
        return jax.eval_shape(cut, one)

    values = [
        argument.value
        if argument.axis is None
        else jtu.tree_map(
            lambda x, axis=argument.axis: example(x, axis) if eqx.is_array(x) else x,
            argument.value,
        )
        for argument in arguments
    ]
    out = eqx.filter_eval_shape(fun, *values)
    return [x for x in jtu.tree_leaves(out) if isinstance(x, jax.ShapeDtypeStruct)]


def draw_vmaps(draw: Draw) -> Case:
    """`filter_micro_vmap` of a function, or a derivative of that."""
    total = draw_total(draw)
    size = draw_size(draw, total)
    placing = draw_placing(draw, 0.15)
    mode = draw.one_of("", "jit", "", "grad", "jvp", "vmap")
    dtypes = DTYPES if mode in ("", "jit") else DTYPES[:6]
    arguments = draw_arguments(draw, total, placing, dtypes)
    if mode not in ("", "jit") and any(x.kind != "normal" for x in arguments):
        mode = "jit"
    fun = draw_function(draw, arguments)
    single = _single(fun, arguments)
    in_axes, by_name, in_text = _draw_in_axes(draw, arguments)
    settings: dict[str, Any] = {"microbatch_size": size, "in_axes": in_axes}
    text, reduced, refuses, rows, may_refuse = "", None, "", None, False
    is_empty = total == 0 and mode not in ("", "jit")
    if draw.flag(0.6) and not is_empty:  # There, means are over nothing.
        found = [x.dtype for x in single]
        num = len(single) if draw.flag(0.4) and fun.text[0] in "{td" else 1
        reduced = [draw_accumulator(draw, total, found) for _ in range(num)]
        each = _each(reduced, single)
        refuses = next(
            (r for acc, d in zip(each, found) if (r := acc.refusal(d, total))), ""
        )
        may_refuse = any(acc.is_odd(d) for acc, d in zip(each, found))
        accumulators = [x.accumulator for x in reduced]
        settings["accumulator"] = (
            accumulators[0] if num == 1 else fun.structure(accumulators)
        )
        text = f" accumulator={[x.text for x in reduced]}"
        out_axes: Any = eqx.if_array(0)
    else:
        out_axes, text = _draw_out_axes(draw, fun, single, arguments, total)
        settings["out_axes"] = out_axes
    if draw.flag(0.15):
        settings["checkpoint"] = True
        text += " checkpoint"
    if placing.mesh is None and total and reduced is not None and draw.flag(0.2):
        step = min(size or total, total)
        num_blocks = draw.below(-(-total // step) + 1)
        rows = min(num_blocks * step, total)
        is_traced = draw.flag()
        settings["num_real_microbatches"] = (
            jnp.array(num_blocks) if is_traced else num_blocks
        )
        text += f" only {num_blocks} blocks{' (traced)' if is_traced else ''}"
    named = _named(fun, len(arguments))
    axes = tuple(
        None if x.axis is None else eqx.if_array(x.axis) for x in arguments
    )
    dense = eqx.filter_vmap(fun, in_axes=axes, out_axes=out_axes)

    def package(*args: Any) -> Any:
        micro = filter_micro_vmap(named, **settings)
        if by_name:
            return micro(*args[:-1], **{"abc"[len(args) - 1]: args[-1]})
        return micro(*args)

    def plain(*args: Any) -> Any:
        """The same, in JAX."""
        out = dense(*args)
        if reduced is None:
            return out
        each = iter(_each(reduced, single))
        return jtu.tree_map(
            lambda x: next(each).dense(x[:rows]) if eqx.is_array(x) else x, out
        )

    def oracle(*args: Any) -> Any:
        out = eqx.filter_jit(dense)(*args)
        if reduced is None:
            return jtu.tree_map(expect, out)
        each = iter(_each(reduced, single))
        return jtu.tree_map(
            lambda x: _accumulated(next(each), x, rows) if eqx.is_array(x) else x, out
        )

    text = (
        f"n={total} b={size} {mode} {fun.text} of {[x.text for x in arguments]} "
        f"in_axes {in_text}{text}{placing.text}"
    )
    values = [x.value for x in arguments]
    placed = [x.placed for x in arguments]
    if mode in ("", "jit"):
        run = eqx.filter_jit(package) if mode == "jit" else package
        case = Case(text, lambda: run(*placed), lambda: oracle(*values))
        case.by_jax = lambda: eqx.filter_jit(plain)(*placed)
    else:
        case = differentiated(mode, text, package, plain, values, placed)
    case.refuses, case.may_refuse = refuses, may_refuse
    return case


def differentiated(
    mode: str,
    text: str,
    package: Callable,
    plain: Callable,
    values: list,
    placed: list | None = None,
) -> Case:
    """Compares a function, or a derivative of it, with what is to be the same in JAX."""
    run = {
        "": lambda fun, args: fun(*args),
        "jit": lambda fun, args: eqx.filter_jit(fun)(*args),
        "grad": _gradient,
        "jvp": _tangent,
        "vmap": _mapped,
    }[mode]
    placed = values if placed is None else placed
    by_jax = run if mode else lambda fun, args: eqx.filter_jit(fun)(*args)
    return Case(
        text,
        lambda: run(package, placed),
        lambda: loosely(by_jax(plain, values), coarsest(values)),
        by_jax=lambda: by_jax(plain, placed),
    )


def _accumulated(reduced: Reduced, y: Any, rows: int | None) -> Any:
    if rows is None:
        return reduced.numpy(y)
    if reduced.text == "Concat()":
        values = np.array(widen(y))
        values[rows:] = 0
        return Expected(values, y.dtype)
    return reduced.numpy(y[:rows])


def loosely(tree: Any, eps: float) -> Any:
    """These arrays, up to the rounding of longer programs."""

    def loose(x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        tolerance = 50.0 if eps > 1e-4 else 500.0
        wide = widen(x)
        # Zeros may be differences of numbers that are not small.
        finite = np.abs(np.where(np.isfinite(wide), wide, 0))
        scale = float(np.max(finite, initial=0.1))
        return Expected(wide, x.dtype, scale=scale, tolerance=tolerance, eps=eps)

    return jtu.tree_map(loose, tree)


def _objective(fun: Callable, args: list) -> tuple[Callable, Any]:
    """A number that is made of all results, and the arguments it is differentiated in."""
    diff, rest = eqx.partition(args, eqx.is_inexact_array)

    def value(diff: Any) -> Any:
        out = fun(*eqx.combine(diff, rest))
        total = jnp.zeros(())
        wide = total.dtype
        for x in jtu.tree_leaves(out):
            if eqx.is_inexact_array(x):
                weights = jnp.cos(jnp.arange(x.size, dtype=wide)) + 1.5
                real = jnp.real(x) + jnp.imag(x) if jnp.iscomplexobj(x) else x
                total += jnp.sum(real.ravel().astype(wide) * weights)
        return total

    return value, diff


def _gradient(fun: Callable, args: list) -> Any:
    value, diff = _objective(fun, args)
    return jax.jit(jax.grad(value))(diff)


def _tangent(fun: Callable, args: list) -> Any:
    value, diff = _objective(fun, args)
    tangents = jtu.tree_map(lambda x: jnp.cos(x), diff)
    return jax.jit(lambda x, t: jax.jvp(value, (x,), (t,)))(diff, tangents)


def _mapped(fun: Callable, args: list) -> Any:
    """Over scales of all inexact arguments."""
    diff, rest = eqx.partition(args, eqx.is_inexact_array)

    def run(scale: Any) -> Any:
        scaled = jtu.tree_map(lambda x: x * scale.astype(x.dtype), diff)
        out = fun(*eqx.combine(scaled, rest))
        return [x for x in jtu.tree_leaves(out) if eqx.is_array(x)]

    return jax.jit(jax.vmap(run))(jnp.array([1.0, 2.0]))
