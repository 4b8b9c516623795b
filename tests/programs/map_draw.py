"""Random choices, numbers and comparisons for `map_programs.py`."""

import dataclasses
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..helpers import make_mesh


FLOATS = ("float32", "float64", "bfloat16", "float16")
COMPLEX = ("complex64", "complex128")
EXACT = ("int32", "uint8", "int8", "bool", "uint32")
DTYPES = (*FLOATS, *COMPLEX, *EXACT, "key")
# What numbers there are in an array; `normal` is what nothing is wrong with.
KINDS = ("normal", "zeros", "huge", "tiny", "inf", "nan", "-inf first", "-inf")


class Draw:
    """Choices, from a seed or from a list of earlier choices.

    The first of the options is always the simplest, so that a failing case is shrunk by
    making its choices smaller.
    """

    def __init__(self, seed: int, choices: list[int] | None = None):
        self._random = random.Random(seed)
        self._given = choices
        self.choices: list[int] = []

    def below(self, num: int, weights: Any = None) -> int:
        at = len(self.choices)
        if self._given is None:
            (index,) = self._random.choices(range(num), weights)
        else:
            index = min(self._given[at], num - 1) if at < len(self._given) else 0
        self.choices.append(index)
        return index

    def one_of(self, *options: Any) -> Any:
        return options[self.below(len(options))]

    def weighted(self, options: dict) -> Any:
        """One of the keys, with their values for weights."""
        return list(options)[self.below(len(options), list(options.values()))]

    def flag(self, probability: float = 0.5) -> bool:
        return bool(self.below(2, (1 - probability, probability)))

    def numbers(self) -> np.random.Generator:
        return np.random.default_rng(self.below(1000))


def draw_total(draw: Draw) -> int:
    ordinary = {4: 2, 5: 3, 7: 3, 8: 2, 11: 3, 12: 1, 13: 2}
    return draw.weighted({2: 1, 1: 1, 3: 1, 0: 1, **ordinary})


def draw_size(draw: Draw, total: int) -> int | None:
    """Often one that cuts the examples in several blocks and does not divide them."""
    extreme = draw.flag(0.35)
    if not extreme:
        return draw.one_of(2, 3, 4, 5)
    size = draw.one_of(None, 1, total - 1, total, total + 1, 2 * total + 3)
    return None if size is None else max(size, 1)


def draw_dtype(draw: Draw, options: tuple = DTYPES) -> str:
    """A dtype that there is, which depends on whether 64 bits are enabled."""
    dtype = draw.one_of(*options)
    if jax.config.jax_enable_x64:
        return dtype
    return {"float64": "float32", "complex128": "complex64"}.get(dtype, dtype)


def kind_of(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    if jnp.issubdtype(dtype, jnp.floating):
        return "float"
    return "bool" if dtype == jnp.bool_ else "int"


def make(rng: Any, shape: tuple, dtype: str, kind: str = "normal", axis: int = 0):
    """An array; `axis` is that along which the examples are."""
    if dtype == "key":
        return jr.split(jr.key(int(rng.integers(1000))), shape)
    if dtype == "bool":
        return jnp.array(rng.integers(0, 2, shape).astype(bool))
    if dtype in EXACT:
        low = 0 if dtype.startswith("u") else -3
        return jnp.array(rng.integers(low, 4, shape).astype(dtype))
    x = rng.normal(size=shape)
    if dtype in COMPLEX:
        return jnp.array((x + 1j * rng.normal(size=shape)).astype(dtype))
    largest = float(jnp.finfo(dtype).max)
    if kind == "zeros":
        x = np.zeros(shape)
    if kind == "huge":
        x = np.clip(x, -2, 2) * (largest / 2.5)
    if kind == "tiny":
        x = x * float(jnp.finfo(dtype).tiny) * 8
    if kind == "-inf":
        x = np.full(shape, -np.inf)
    if kind in ("inf", "nan"):
        x = np.where(rng.random(shape) < 0.3, np.inf if kind == "inf" else np.nan, x)
    if kind == "-inf first" and shape[axis]:
        front = [slice(None)] * len(shape)
        front[axis] = slice(0, (shape[axis] + 1) // 2)
        x[tuple(front)] = -np.inf
    return jnp.array(x).astype(dtype)


def widen(x: Any) -> np.ndarray:
    """An array as NumPy has it, in its widest dtype."""
    x = jax.device_get(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jr.key_data(x))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
        return np.asarray(x).astype(wide)
    return np.asarray(x)


@dataclasses.dataclass
class Expected:
    """An array that must come out.

    - `dtype`, `weak`: are not looked at if they are None.
    - `scale`: what errors are relative to; the largest entry by default.
    - `tolerance`: in units of the machine epsilon of the least precise dtype, `eps`, or
        that of `dtype`.
    """

    values: Any
    dtype: Any = None
    weak: bool | None = None
    scale: float | None = None
    tolerance: float = 32.0
    eps: float = 0.0


def expect(x: Any, **kwargs: Any) -> Any:
    """Just this array, or whatever else it is."""
    if not eqx.is_array(x):
        return x
    return Expected(widen(x), x.dtype, bool(getattr(x, "weak_type", False)), **kwargs)


def coarsest(tree: Any) -> float:
    """The largest machine epsilon of all arrays."""
    dtypes = [x.dtype for x in jtu.tree_leaves(tree) if eqx.is_inexact_array(x)]
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


class Skip(Exception):
    """Nobody can tell what must come out."""


class Mismatch(Exception):
    """What came out is not what must."""


def compare(got: Any, expected: Any) -> None:
    """Raises `Mismatch` unless it is the same."""
    is_expected = lambda x: isinstance(x, Expected)
    places, structure = jtu.tree_flatten_with_path(expected, is_leaf=is_expected)
    leaves, found = jtu.tree_flatten(got)
    if found != structure:
        raise Mismatch(f"structure {found}, expected {structure}")
    for (path, leaf), x in zip(places, leaves, strict=True):
        where = f"output{jtu.keystr(path)}: "
        if is_expected(leaf):
            _compare(where, x, leaf)
        elif type(x) is not type(leaf) or x != leaf:
            raise Mismatch(f"{where}static {x!r}, expected {leaf!r}")


def _compare(where: str, x: Any, leaf: Expected) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise Mismatch(f"{where}no array but {type(x).__name__}")
    if leaf.values is None:
        return
    if leaf.dtype is not None and x.dtype != leaf.dtype:
        raise Mismatch(f"{where}dtype {x.dtype}, expected {leaf.dtype}")
    values, wide = np.asarray(leaf.values), widen(x)
    if wide.shape != values.shape:
        raise Mismatch(f"{where}shape {wide.shape}, expected {values.shape}")
    if jnp.issubdtype(x.dtype, jnp.inexact):
        eps = max(float(jnp.finfo(x.dtype).eps), leaf.eps)
        with np.errstate(all="ignore"):
            # As the dtype has it: what is larger is infinite.
            largest = float(jnp.finfo(x.dtype).max)
            values = np.where(np.abs(values) > largest, values * np.inf, values)
            finite = np.abs(np.where(np.isfinite(values), values, 0))
            scale = np.max(finite, initial=0) if leaf.scale is None else leaf.scale
            atol = leaf.tolerance * eps * max(scale, 0)
            atol += float(jnp.finfo(x.dtype).tiny) * 4
            same = (wide == values) | (np.isnan(wide) & np.isnan(values))
            close = np.abs(wide - values) <= atol
            # At the edge of the dtype, rounding decides.
            edge = (np.abs(wide) > largest * 0.99) & (np.abs(values) > largest * 0.99)
            edge &= np.sign(wide.real) == np.sign(values.real)
        bad = ~(same | close | edge)
    else:
        bad = wide != values
    if np.any(bad):
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise Mismatch(
            f"{where}{int(np.sum(bad))} of {bad.size} entries differ: at {at} "
            f"{wide[at]!r}, expected {np.asarray(values)[at]!r}"
        )
    if leaf.weak is not None and bool(getattr(x, "weak_type", False)) != leaf.weak:
        raise Mismatch(f"{where}weak_type is {not leaf.weak}, expected {leaf.weak}")


@dataclasses.dataclass
class Placing:
    """Where arrays are: on a mesh, or on one device."""

    mesh: Mesh | None
    text: str

    def put(self, x: Any, *spec: Any) -> Any:
        """An array with some axes spread over the mesh, if there is one."""
        if self.mesh is None or not eqx.is_array(x):
            return x
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def spread(self, draw: Draw, x: Any, axis: int | None) -> Any:
        """An array along its batch axis, whole on each device, or not on the mesh."""
        if self.mesh is None or not eqx.is_array(x):
            return x
        ways = ["as it is", "whole"]
        if axis is not None and x.shape[axis] % self.mesh.size == 0:
            ways += ["rows"] * 3
        way = draw.one_of(*ways)
        self.text += f" [{way}]"
        if way == "as it is":
            return x
        if way == "whole":
            return self.put(x)
        return self.put(x, *[None] * (axis % x.ndim), "data")


def draw_placing(draw: Draw, probability: float) -> Placing:
    if not draw.flag(probability):
        return Placing(None, "")
    num = draw.one_of(2, 4, 1)
    kind = draw.one_of(AxisType.Auto, AxisType.Explicit)
    return Placing(make_mesh(kind, (num,)), f" on {num} devices ({kind.name})")


@dataclasses.dataclass
class Case:
    """A program, and what must come of it.

    - `package`, `oracle`: return what came, and `Expected`s.
    - `refuses`: the message of the error that must be raised instead, if any.
    - `may_refuse`: whether a `TypeError` or `ValueError` of the package is as good.
    - `by_jax`: the same without the package. Where that raises, the package may.
    """

    text: str
    package: Any
    oracle: Any
    refuses: str = ""
    may_refuse: bool = False
    by_jax: Any = None
