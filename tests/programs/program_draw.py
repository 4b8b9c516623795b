"""Random functions of random parameters, as source text that can be read and run.

`draw(seed)` builds a program statement by statement. A statement is an expression of
`jax.numpy` whose shape JAX infers, so that what is built is always well-formed, and
what is printed for a failure is a program that anyone can run.
"""

import collections
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


REAL, COMPLEX, SINGLE = "float64", "complex128", "float32"
TOKEN_DTYPES = ("int16", "uint16", "int32", "uint32", "int64", *("int8", "uint8") * 2)
LARGEST_LEAF, LARGEST_TOTAL, LARGEST_VALUE = 30, 64, 24


class Want(NamedTuple):
    """The shape and dtype of an array that is asked for."""

    shape: tuple[int, ...]
    dtype: str = REAL

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, shape) -> "Want":
        return Want(tuple(shape), self.dtype)


class Var(NamedTuple):
    """An expression, and its type."""

    text: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return self.text

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# A view takes the builder and what is wanted. It returns a template, in which `$`
# stands for what the view is of, and what that must be.
View = Callable[["Builder", Want], tuple[str, Want]]
# A use takes the builder and a value, and returns another one that parameters enter.
Use = Callable[["Builder", Var], Var]
VIEWS: dict[str, View] = {}
USES: dict[str, Use] = {}
ON_REQUEST: set[str] = set()


def view(fun: View) -> View:
    VIEWS[fun.__name__] = fun
    return fun


def use(fun: Use) -> Use:
    USES[fun.__name__] = fun
    return fun


def use_on_request(fun: Use) -> Use:
    """One that only programs have that ask for it: others stay what they are."""
    ON_REQUEST.add(fun.__name__)
    return use(fun)


class Rejected(Exception):
    """A block does not fit what there is."""


def only(condition: Any) -> None:
    """Goes on only if a block fits."""
    if not condition:
        raise Rejected("does not fit")


@dataclasses.dataclass(eq=False)
class _Frame:
    """The body of a loop that is being written: what it takes slices of."""

    name: str
    length: int
    slices: list[str] = dataclasses.field(default_factory=list)


class Builder:
    """A program that is being written."""

    def __init__(self, seed: int, namespace: dict[str, Any]):
        self.rng = random.Random(seed)
        self.namespace = dict(namespace)
        self.lines: list[tuple[str, str]] = []
        self.leaves: dict[str, tuple[Want, str]] = {}
        self.known: list[Var] = []
        self.structs: dict[str, jax.ShapeDtypeStruct] = {}
        self.blocks: list[str] = []
        self.frames: list[_Frame] = []
        self.depth = 0
        self.names = self.rng.sample("abcdefghijkmnoqrsuvw", 20)
        self.num_values = 0

    # Choices.

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.randrange(len(choices))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def size(self, least: int = 1, most: int = 3) -> int:
        return self.rng.randint(least, most)

    def permutation(self, num: int) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(num), num))

    def axis(self, shape: tuple[int, ...]) -> int:
        if not shape:
            raise Rejected("no axes")
        return self.rng.randrange(len(shape))

    def subset(self, items) -> list:
        return [x for x in items if self.chance(0.5)]

    def shape_of_size(self, size: int) -> tuple[int, ...]:
        """A random shape with that many entries, axes of size one among them."""
        shape = []
        for prime in (2, 2, 2, 2, 2, 3, 3, 3, 5, 5, 7):
            if size % prime == 0 and size > 0:
                shape.append(prime)
                size //= prime
        if size != 1:
            shape.append(size)
        self.rng.shuffle(shape)
        while len(shape) > 1 and (len(shape) > 3 or self.chance(0.5)):
            i = self.rng.randrange(len(shape) - 1)
            shape[i : i + 2] = [shape[i] * shape[i + 1]]
        if len(shape) < 4 and self.chance(0.3):
            shape.insert(self.rng.randint(0, len(shape)), 1)
        return tuple(shape)

    def constant(self, shape: tuple[int, ...]) -> str:
        """The source of an array of numbers."""
        numbers = [self.pick(0.5, -1.0, 1.5, 0.0, 2.0) for _ in range(math.prod(shape))]
        return f"np.reshape({numbers}, {shape})"

    # Statements.

    def struct(self, text: str) -> jax.ShapeDtypeStruct:
        """The type of an expression; raises if it is not well-formed."""

        def evaluate(values: dict) -> Any:
            return eval(text, {**self.namespace, **values})

        out = jax.eval_shape(evaluate, self.structs)
        if not hasattr(out, "shape"):
            raise Rejected(f"`{text}` is no array")
        return out

    def let(self, text: str, prefix: str = "y") -> Var:
        """Adds a statement that names an expression."""
        struct = self.struct(text)
        if not jnp.issubdtype(struct.dtype, jnp.inexact) and prefix == "y":
            raise Rejected(f"`{text}` has no derivative")
        if math.prod(struct.shape) > 2000:
            raise Rejected("too large")
        name = f"{prefix}{self.num_values}"
        self.num_values += 1
        self.lines.append((name, text))
        self.structs[name] = struct
        return Var(name, struct.shape, str(struct.dtype))

    # Parameters.

    def leaf(self, want: Want) -> Var:
        """A new parameter; or, if there are too many, one of those that there are."""
        total = sum(own.size for own, _ in self.leaves.values())
        if not self.names or (self.leaves and total + want.size > LARGEST_TOTAL):
            return self.fitted(want)
        name = self.names.pop()
        access = self.pick(*['p["{}"]'] * 4, 'p["{}"][0]', 'p["{}"][1]["x"]')
        text = access.format(name)
        self.leaves[name] = (want, access)
        self.structs["p"] = self.parameter_structs()
        var = Var(text, *want)
        self.known.append(var)
        return var

    def fitted(self, want: Want) -> Var:
        """Entries of a parameter that there is, in another shape."""
        same = [var for var in self.known if var.dtype == want.dtype and var.size]
        if not same:
            raise Rejected("no parameter to fit")
        return Var(f"jnp.resize({self.pick(*same)}, {want.shape})", *want)

    def parameters_like(self, make: Callable[[tuple, Any], Any]) -> dict:
        tree: dict[str, Any] = {"static": "text", "none": None}
        tree["integers"] = np.arange(3)
        for name, (want, access) in self.leaves.items():
            x = make(want.shape, np.dtype(want.dtype))
            rest = access.removeprefix('p["{}"]')
            others = {"": x, "[0]": (x, 2), '[1]["x"]': [None, {"x": x, "z": "no"}]}
            tree[name] = others[rest]
        return tree

    def parameter_structs(self) -> dict:
        tree = self.parameters_like(jax.ShapeDtypeStruct)
        return eqx.filter(tree, lambda x: hasattr(x, "shape"))

    def base(self, want: Want) -> Var:
        """A parameter, or a slice of one that a loop takes, or what there is."""
        if self.frames and self.chance(0.5) and want.size <= LARGEST_LEAF // 2:
            frame = self.frames.pop()
            try:
                stacked = self.weight(want.of((frame.length, *want.shape)))
            finally:
                self.frames.append(frame)
            frame.slices.append(stacked.text)
            return Var(f"{frame.name}[{len(frame.slices) - 1}]", *want)
        same = [var for var in self.known if var[1:] == want]
        if same and self.chance(0.35):
            return self.pick(*same)
        if want.size > LARGEST_LEAF:
            return self.fitted(want)
        return self.leaf(want)

    def weight(self, want: Want | tuple[int, ...], dtype: str = REAL) -> Var:
        """A parameter, turned by views into what is wanted."""
        want = want if isinstance(want, Want) else Want(tuple(want), dtype)
        template, inner = "$", want
        for _ in range(self.pick(0, 0, 1, 1, 1, 2, 2, 3)):
            name = self.pick(*sorted(VIEWS))
            try:
                made = VIEWS[name](self, inner)
            except Rejected:
                continue
            if made[1].size > LARGEST_VALUE * 2:
                continue
            template, inner = template.replace("$", made[0]), made[1]
            self.blocks.append(name)
        text = template.replace("$", str(self.base(inner)))
        struct = self.struct(text) if not self.frames else None
        if struct is not None and (struct.shape, str(struct.dtype)) != want:
            raise Rejected(f"`{text}` is {struct}, and not {want}")
        if self.depth == 0 and self.chance(0.4):
            named = self.let(text, "w")
            self.known.append(named)
            return named
        return Var(text, *want)

    def real(self, var: Var) -> Var:
        """A real value of one that may be complex."""
        if var.dtype == REAL:
            return var
        if var.dtype == COMPLEX:
            parts = (f"{var}.real", f"{var}.imag", f"jnp.abs({var}) ** 2")
            return self.let(self.pick(*parts, f"({var}.real + 2 * {var}.imag)"))
        return self.let(f"{var}.astype(jnp.float64)")

    # Loops.

    def loop(self, length: int) -> _Frame:
        frame = _Frame(f"z{len(self.frames)}_{self.depth}", length)
        self.frames.append(frame)
        return frame


def joined(b: Builder, h: Var, other: Var) -> Var:
    """Both of them, in few entries."""
    other = b.real(other)
    while other.size > 8:
        other = b.let(f"{other}.sum({b.axis(other.shape)})")
    if other.shape == h.shape and b.chance(0.5):
        return b.let(f"{h} + {other}")
    if b.chance(0.2):
        return other
    return b.let(f"jnp.concatenate([jnp.ravel({h})[:4], jnp.ravel({other})])")


def snapshot(b: Builder) -> dict[str, Any]:
    names = ("lines", "leaves", "known", "structs", "blocks", "names", "frames")
    saved = {name: getattr(b, name).copy() for name in names}
    return {**saved, "depth": b.depth, "num_values": b.num_values}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of parameters and one example, and what it is called with."""

    seed: int
    lines: tuple[tuple[str, str], ...]
    result: str
    loss_kind: str
    blocks: tuple[str, ...]
    parameters: Any
    examples: tuple[np.ndarray, np.ndarray]
    others: tuple[np.ndarray, np.ndarray]
    namespace: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def source(self) -> str:
        body = [f"    {name} = {text}" for name, text in self.lines]
        return "\n".join(["def fun(p, x, t):", *body, f"    return {self.result}"])

    @functools.cached_property
    def fun(self) -> Callable:
        namespace = dict(self.namespace)
        exec(self.source, namespace)
        return namespace["fun"]

    def loss(self, p: Any, x: Any, t: Any) -> Any:
        """A loss in which every entry of the output has a part of its own."""
        return self.loss_of(self.fun(p, x, t))

    def loss_of(self, out: Any, *_: Any) -> Any:
        total = jnp.zeros(())
        for x in jax.tree.leaves(out):
            x = jnp.ravel(x)
            x = x.real + 2 * x.imag if jnp.iscomplexobj(x) else x
            x = x.astype(jnp.float64)
            scales = jnp.arange(1.0, 1 + x.size) / 2
            if self.loss_kind == "sin":
                total += jnp.sum(jnp.sin(x) * scales)
            elif self.loss_kind == "square":
                total += jnp.sum(x**2 * scales) / 2
            elif self.loss_kind == "linear":
                total += jnp.sum(x * scales)
            else:
                total += jax.nn.logsumexp(x * scales)
        return total

    def __str__(self) -> str:
        shapes = [
            f"{jax.tree_util.keystr(path)}: {x.dtype}{x.shape}"
            for path, x in jax.tree_util.tree_leaves_with_path(self.parameters)
            if eqx.is_inexact_array(x)
        ]
        x, t = self.examples
        lines = [f"seed {self.seed}: {', '.join(shapes)}"]
        lines.append(f"x: {x.dtype}{x.shape}, t: {t.dtype} {t.tolist()}")
        return "\n".join([*lines, self.source, f"loss: {self.loss_kind}"])


def inputs(
    rng: random.Random, dtype: str, num: int, length: int, width: int, most: int
):
    """Values, and tokens of which some are out of range."""
    values = np.array([rng.gauss(0, 1) for _ in range(num * length * width)])
    info = np.iinfo(dtype)
    low = max(-4, info.min)
    highs = [min(high, info.max) for high in (5, 5, most)]
    tokens = [rng.randint(low, rng.choice(highs)) for _ in range(num * 3)]
    shape = (num, length, width)
    return values.reshape(shape), np.array(tokens, dtype).reshape(num, 3)


# What JAX raises for what it does not define.
_ILL_FORMED = (
    Rejected,
    TypeError,
    ValueError,
    IndexError,
    ZeroDivisionError,
    OverflowError,
)
REJECTED: collections.Counter = collections.Counter()


def draw(seed: int, uses: tuple[str, ...] = ()) -> Program:
    """The program of a seed, of some of the `uses`, or of all that there are."""
    from . import program_uses  # Fills the registries.

    b = Builder(seed, program_uses.NAMESPACE)
    length, width = b.size(), b.size()
    dtype = b.pick(*TOKEN_DTYPES)
    most = b.pick(3, 6, 6, 300)
    num, num_other = b.size(2, 4), b.size(1, 3)
    if np.dtype(dtype).itemsize == 1:
        # Under `jax.vmap` over one example, JAX's own gradient of a slice is wrong for
        # these: it clamps them in their dtype.
        num_other = max(num_other, 2)
    examples = inputs(b.rng, dtype, num, length, width, most)
    other_length = b.pick(length, length, length + 1)
    others = inputs(b.rng, dtype, num_other, other_length, width, most)
    b.structs = {
        "p": b.parameter_structs(),
        "x": jax.ShapeDtypeStruct(examples[0].shape[1:], np.float64),
        "t": jax.ShapeDtypeStruct((3,), np.dtype(dtype)),
    }
    h = Var("x", (length, width), REAL)
    kept: list[Var] = []
    for _ in range(b.pick(1, 1, 1, 2, 2, 3)):
        h = _step(b, h, uses)
        if b.chance(0.2):
            kept.append(h)
    if not b.leaves:
        b.leaf(Want((2,)))
    if b.chance(0.15):
        b.leaf(Want((b.size(0, 2),)))  # One that is not used.
    result = _result(b, h, kept)
    parameters = b.parameters_like(lambda shape, dtype: _values(b.rng, shape, dtype))
    return Program(
        seed,
        tuple(b.lines),
        result,
        b.pick("sin", "square", "square", "linear", "logsumexp"),
        tuple(b.blocks),
        parameters,
        examples,
        others,
        b.namespace,
    )


def _values(rng: random.Random, shape: tuple, dtype: np.dtype) -> np.ndarray:
    numbers = np.array([rng.gauss(0.2, 0.7) for _ in range(2 * math.prod(shape))])
    first, second = numbers.reshape(2, *shape)
    x = first + 1j * second if dtype.kind == "c" else first
    return np.asarray(x, dtype)


def _step(b: Builder, h: Var, uses: tuple[str, ...]) -> Var:
    """One use of parameters, and a function of what comes out of it."""
    for _ in itertools.repeat(None, 30):
        saved = snapshot(b)
        name = b.pick(*(uses or sorted({*USES} - ON_REQUEST)))
        b.blocks.append(name)
        try:
            out = b.real(USES[name](b, h))
            return _activated(b, _small(b, out))
        except _ILL_FORMED as e:
            REJECTED[name, f"{type(e).__name__}: {e}"[:90]] += 1
            for key, value in saved.items():
                setattr(b, key, value)
    return h


def _small(b: Builder, h: Var) -> Var:
    while h.size > LARGEST_VALUE or len(h.shape) > 4:
        h = b.let(f"{h}.sum({b.axis(h.shape)})")
    return h


def _activated(b: Builder, h: Var) -> Var:
    return b.pick(
        lambda: h,
        lambda: b.let(f"jnp.tanh({h})"),
        lambda: b.let(f"jnp.tanh({h})"),
        lambda: b.let(f"jnp.sin({h})"),
        lambda: b.let(f"jax.nn.softplus({h}) / 2"),
        lambda: b.let(f"jax.nn.relu({h}) + 0.3 * {h}"),
    )()


def _result(b: Builder, h: Var, kept: list[Var]) -> str:
    """What the function returns: an array or several, a complex one, a parameter."""
    while h.size > 6:
        h = b.let(f"{h}.sum({b.axis(h.shape)})")
    leaf = b.pick(*b.known)
    choices = [h.text] * 5
    choices.append(f"({h} * (1 + 0.5j))")
    choices.append(f'{{"b": {h}, "a": jnp.sum({h}, keepdims=True)}}')
    if kept and kept[-1].size <= 6:
        choices += [f"({h}, {kept[-1]})"] * 3
    if leaf.size <= 4:
        choices.append(f"[{h}, {leaf}]")
    return b.pick(*choices)


NAMESPACE = {"jnp": jnp, "jax": jax, "lax": lax, "np": np}
