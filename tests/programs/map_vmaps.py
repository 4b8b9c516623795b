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
from .map_derivatives import differentiated
from .map_draw import (
    Case,
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
    if dtype not in ("float32", "float64", "bfloat16", "float16") or not draw.flag(0.4):
        return "normal"
    return draw.one_of("inf", "huge", "nan", "-inf first", "-inf", "huge", "tiny")


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
            kinds = {*_kinds(texts)} - {"normal"}
            kind = kinds.pop() if len(kinds) == 1 else "other" if kinds else "normal"
            if num == 2:
                wrap = draw.one_of(dict, tuple, Pair)
                value = (
                    wrap(zip("ab", leaves, strict=True))
                    if wrap is dict
                    else (Pair(*leaves) if wrap is Pair else tuple(leaves))
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

    def is_mapped(self, arguments: list[Argument]) -> bool:
        """Whether some output is another one for each example."""
        axes = [
            argument.axis
            for argument in arguments
            for x in jtu.tree_leaves(argument.value)
            if eqx.is_array(x)
        ]
        return any(at >= 0 and axes[at] is not None for at, _ in self.steps)

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
    "dict": lambda x: dict(zip("abcdef", x, strict=False)),
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


def _by_leaf(axis: int | None) -> Callable:
    """`axis` for arrays, as a function from a leaf to that."""
    return lambda x: axis if eqx.is_array(x) else None


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
    forms.append("callable")
    form = draw.one_of(*forms)
    if form == "callable":
        return tuple(x if callable(x) else _by_leaf(x) for x in spec), False, form
    if form == "default":
        return eqx.if_array(0), False, "default"
    if form == "int":
        return axes[0], False, "int"
    if form == "tuple":
        return tuple(spec), False, "tuple"
    return dict(zip("abc", spec, strict=False)), form == "keyword", form


def _draw_out_axes(
    draw: Draw, fun: Function, program: Any, total: int
) -> tuple[Any, str]:
    """`out_axes` of a function whose outputs are all kept."""
    name = fun.text.split("[")[0]
    if name in ("Pair", "static") or not draw.flag(0.6):
        return eqx.if_array(0), ""
    is_shared = [
        argument.axis is None
        for argument in program.arguments
        for x in jtu.tree_leaves(argument.value)
        if eqx.is_array(x)
    ]
    axes: list[int | None] = []
    for (at, _), struct in zip(fun.steps, program.single, strict=True):
        ndim = len(struct.shape)
        options: list[int | None] = [0, *range(1, ndim + 1), *range(-ndim - 1, 0)]
        if (at < 0 or is_shared[at]) and total > 0:
            options.append(None)
        axes.append(draw.one_of(*options))
    return fun.structure(axes), f" out_axes={axes}"


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


@dataclasses.dataclass
class _Program:
    """`filter_micro_vmap` of a function, and the same without it.

    - `single`: the shapes of what one example gives.
    - `reduced`: accumulators, if there are any; one for all arrays, or one for each.
    - `rows`: how many examples run, if not all of them do.
    - `is_closed`: whether the last argument is closed over.
    """

    fun: Function
    arguments: list[Argument]
    single: list
    settings: dict[str, Any]
    by_name: bool = False
    is_closed: bool = False
    reduced: list[Reduced] | None = None
    rows: int | None = None

    def package(self, *args: Any) -> Any:
        num = len(self.arguments)
        fun = _named(self.fun, num)
        if self.is_closed:
            *args, closed = args
            fun = _named(lambda *args: self.fun(*args, closed), num - 1)
        micro = filter_micro_vmap(fun, **self.settings)
        if self.by_name:
            return micro(*args[:-1], **{"abc"[len(args) - 1]: args[-1]})
        return micro(*args)

    def dense(self, *args: Any) -> Any:
        axes = [
            None if x.axis is None else eqx.if_array(x.axis) for x in self.arguments
        ]
        return eqx.filter_vmap(
            self.fun,
            in_axes=tuple(axes),
            out_axes=self.settings.get("out_axes", eqx.if_array(0)),
            axis_size=self.settings.get("axis_size"),
        )(*args)

    def plain(self, *args: Any) -> Any:
        """The same as the package, in JAX."""
        out = self.dense(*args)
        if self.reduced is None:
            return out
        each = self._each()
        reduce = lambda x: next(each).dense(x[: self.rows])
        return jtu.tree_map(lambda x: reduce(x) if eqx.is_array(x) else x, out)

    def oracle(self, *args: Any) -> Any:
        """The same as the package, in NumPy."""
        out = eqx.filter_jit(self.dense)(*args)
        if self.reduced is None:
            return jtu.tree_map(expect, out)
        each = self._each()
        reduce = lambda x: _accumulated(next(each), x, self.rows)
        return jtu.tree_map(lambda x: reduce(x) if eqx.is_array(x) else x, out)

    def _each(self) -> Any:
        assert self.reduced is not None
        num = len(self.single)
        return iter(self.reduced * num if len(self.reduced) == 1 else self.reduced)

    def refusal(self, total: int) -> str:
        """What must be raised, if anything."""
        if self.reduced is None:
            return ""
        pairs = zip(self._each(), self.single, strict=True)
        found = [accumulator.refusal(x.dtype, total) for accumulator, x in pairs]
        return next(filter(None, found), "")

    @property
    def is_odd(self) -> bool:
        """Whether some results may be refused."""
        if self.reduced is None:
            return False
        pairs = zip(self._each(), self.single, strict=True)
        return any(accumulator.is_odd(x.dtype) for accumulator, x in pairs)


def draw_vmaps(draw: Draw) -> Case:
    """`filter_micro_vmap` of a function, or a derivative of that."""
    total = draw_total(draw)
    size = draw_size(draw, total)
    placing = draw_placing(draw, 0.15)
    mode = draw.one_of("", "jit", "", "grad", "jvp", "vmap")
    dtypes = DTYPES if mode in ("", "jit") else DTYPES[:6]
    arguments = draw_arguments(draw, total, placing, dtypes)
    kinds = {x.kind for x in arguments}
    if mode not in ("", "jit") and kinds != {"normal"}:
        mode = "shift" if kinds <= {"-inf first", "-inf", "normal"} else "jit"
    fun = draw_function(draw, arguments)
    program = _Program(fun, arguments, _single(fun, arguments), {})
    settings = program.settings
    is_closed = len(arguments) > 1 and arguments[-1].axis is None and draw.flag(0.5)
    program.is_closed = is_closed
    given = arguments[:-1] if is_closed else arguments
    in_axes, program.by_name, in_text = _draw_in_axes(draw, given)
    settings |= {"microbatch_size": size, "in_axes": in_axes}
    is_empty = total == 0 and mode not in ("", "jit")
    refuses, text = "", ""
    if draw.flag(0.6) and not is_empty:  # There, means are over nothing.
        found = [x.dtype for x in program.single]
        num = len(found) if draw.flag(0.4) and fun.text[0] in "{td" else 1
        program.reduced = [draw_accumulator(draw, total, found) for _ in range(num)]
        own = [x.accumulator for x in program.reduced]
        settings["accumulator"] = own[0] if num == 1 else fun.structure(own)
        text = f" accumulator={[x.text for x in program.reduced]}"
        refuses = program.refusal(total)
    elif total > 1 and fun.is_mapped(arguments) and draw.flag(0.04):
        settings["out_axes"], refuses, text = None, "out_axes", " out_axes=None"
        settings["microbatch_size"] = draw.one_of(1, size)
        size = settings["microbatch_size"]
    else:
        settings["out_axes"], text = _draw_out_axes(draw, fun, program, total)
    least = int(mode not in ("", "jit"))  # A mean over nothing has no derivative.
    text += _draw_more(draw, program, placing, total, size, least)
    if mode == "vmap" and " only " in text and "Concat" in text:
        mode = "jvp"  # The dense rows are those that ran, and not zero for the others.
    text = (
        f"n={total} b={size} {mode} {fun.text} of {[x.text for x in arguments]}"
        f"{' the last closed over' if is_closed else ''} in_axes {in_text}{text}"
        f"{placing.text}"
    )
    values = [x.value for x in arguments]
    placed = [x.placed for x in arguments]
    if mode in ("", "jit"):
        run = eqx.filter_jit(program.package) if mode == "jit" else program.package
        case = Case(text, lambda: run(*placed), lambda: program.oracle(*values))
        case.by_jax = lambda: eqx.filter_jit(program.plain)(*placed)
    else:
        case = differentiated(
            mode, text, program.package, program.plain, values, placed
        )
    case.refuses, case.may_refuse = refuses, program.is_odd
    return case


def _draw_more(
    draw: Draw,
    program: _Program,
    placing: Any,
    total: int,
    size: int | None,
    least: int,
) -> str:
    """Settings that change nothing, or how many microbatches run."""
    settings, text = program.settings, ""
    if draw.flag(0.15):
        settings["checkpoint"] = True
        text += " checkpoint"
    if draw.flag(0.1):
        settings["axis_size"] = total
        text += " axis_size"
    if placing.mesh is not None:
        return text
    if draw.flag(0.1):
        settings["axis_name"] = "i"
        text += " axis_name"
    if total and program.reduced is not None and draw.flag(0.2):
        step = min(size or total, total)
        num = max(draw.below(-(-total // step) + 1), least)
        program.rows = min(num * step, total)
        kind = draw.one_of("int", "int32", "int8") if num < 128 else "int"
        limit = num if kind == "int" else jnp.asarray(num, kind)
        settings["num_real_microbatches"] = limit
        text += f" only {num} blocks ({kind})"
    return text


def _accumulated(reduced: Reduced, y: Any, rows: int | None) -> Any:
    if rows is None:
        return reduced.numpy(y)
    if reduced.text == "Concat()":
        values = np.array(widen(y))
        values[rows:] = 0
        return Expected(values, y.dtype)
    return reduced.numpy(y[:rows])
