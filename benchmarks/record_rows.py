"""The jobs of the suite `records`, beside the best way by hand.

A row of the suite is a function that yields its jobs. All examples are drawn at random
on the device: no real set is read.
"""

import dataclasses
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from eqxbatch import (
    EmpiricalNTK,
    filter_hessian,
    filter_kfac,
    filter_micro_grad,
    kernel_solve,
    KernelOperator,
)
from . import kfac, work
from .harness import OURS
from .limit import num_bytes, Work
from .models import relative_error


KEY = jr.key(0)
BY_HAND, PLAIN = "by hand", "plain step"
# What float32 leaves of sums of as many terms.
ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class Record:
    """A job, and several ways to do it with the same precision.

    - `title`: begins with the name of its row.
    - `ways`: functions of `args`, by name; `eqxbatch` is one of them.
    - `work`: what has to be done at least, as often as `repeats` says of the result.
    - `is_program`: whether ways are compiled as a whole; others run on the host, too.
    - `first`: what compiles a way of the host in less time than the way itself.
    - `error`: the error of the result of eqxbatch, from the results of all ways, and
        `most` is its upper limit.
    - `limits`: upper limits for the time, divided by that of single ways.
    - `missing`: the peers that cannot do the job, and why.
    """

    title: str
    ways: dict[str, Callable]
    args: tuple
    work: Work
    repeats: Callable[[Any], int] = lambda result: 1
    is_program: bool = True
    first: Callable[[], Any] | None = None
    error: Callable[[dict[str, Any]], float] | None = None
    most: float = ROUNDING
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)


def compared(peer: str) -> Callable[[dict[str, Any]], float]:
    """The error relative to the result of a peer."""
    return lambda results: relative_error(results[OURS], results[peer])


# NTKs.


FEW = 8


def place_for(size: float) -> str:
    """The first place with room for a result of so many bytes."""
    in_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_device = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", in_host)
    # A program may copy its result once, and has blocks beside it.
    if 3 * size <= on_device:
        return "device"
    return "host" if 2 * size <= in_host else "disk"


def jacobians(model: Any, x: jax.Array) -> jax.Array:
    """Those of all outputs, one row for each example."""
    found = eqx.filter_vmap(
        eqx.filter_jacrev(lambda model, x: model(x)), in_axes=(None, 0)
    )
    leaves = jax.tree.leaves(found(model, x))
    return jnp.concatenate([leaf.reshape(len(x), -1) for leaf in leaves], axis=1)


def ntk_by_hand(model: Any, x: jax.Array, size: int) -> jax.Array:
    """From Jacobians of blocks, of which all pairs meet."""
    blocks = x.reshape(-1, size, *x.shape[1:])

    def panel(block):
        rows = jacobians(model, block)
        return lax.map(lambda columns: rows @ jacobians(model, columns).T, blocks)

    kernel = jnp.moveaxis(lax.map(panel, blocks), 1, 2).reshape(len(x), len(x))
    return kernel / model.out_size


def ntk(quick: bool) -> Iterator[Record]:
    width, depth, num, size = (8, 2, 64, 16) if quick else (512, 3, 60_000, 6_000)
    few, small = (32, 8) if quick else (2_048, 128)
    inputs = 16 if quick else 784
    model = eqx.nn.MLP(inputs, 10, width, depth, key=KEY)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    x = jr.normal(KEY, (num, inputs))
    products = work.products_of(lambda model, x: model(x), model, x)
    least = functools.partial(work.kernel, products, outputs=model.out_size)

    def of(num: int, tiles: int) -> Work:
        moved = num_bytes(arrays, x[:num]) + 4 * num**2
        return Work(least(num, tiles=tiles), moved, "highest")

    def ours(block: int | None, **store: Any) -> Callable:
        return lambda arrays, x: EmpiricalNTK(
            eqx.combine(arrays, static), block_size=block, **store
        )(x)

    def to_disk(arrays: Any, x: jax.Array) -> Any:
        # A folder of its own for each run, which would otherwise find a whole kernel.
        with tempfile.TemporaryDirectory() as folder:
            return ours(size, store=folder)(arrays, x)[:FEW, :FEW]

    def corner(results: dict[str, Any]) -> float:
        """The error of a few entries, compared with Jacobians."""
        true = ntk_by_hand(model, x[:FEW], FEW)
        return relative_error(jnp.asarray(results[OURS][:FEW, :FEW]), true)

    mlp = f"MLP {inputs}-{width}x{depth}-{model.out_size}"
    place = place_for(4 * num**2)
    stored = {"device": ours(size), "host": ours(size, store="host"), "disk": to_disk}
    # Each pair of Jacobians is an inner product of as many numbers.
    length = model.out_size * sum(x.size for x in jax.tree.leaves(arrays))
    yield Record(
        f"ntk: all pairs of {num:,} examples of {inputs} numbers, {mlp}, by {size:,}, "
        f"kept on the {place}",
        {OURS: stored[place]},
        (arrays, x),
        of(num, work.upper_tiles(num, size)),
        is_program=place == "device",
        error=corner,
        missing={"Jacobians by hand": f"{2e-12 * length * num**2:,.3g} TFLOP"},
    )
    hand = f"Jacobians by hand, by {small}"
    yield Record(
        f"ntk: all pairs of {few:,} of these examples, kept on the device",
        {
            OURS: ours(None),
            hand: lambda arrays, x: ntk_by_hand(eqx.combine(arrays, static), x, small),
        },
        (arrays, x[:few]),
        of(few, few**2),
        error=compared(hand),
        limits={hand: 1 / 4},
    )


# Kernels that are never stored.


VARIABLES = 4


def rbf(x: jax.Array, y: jax.Array | None = None) -> jax.Array:
    y = x if y is None else y
    of_x, of_y = jnp.sum(x**2, 1)[:, None], jnp.sum(y**2, 1)[None, :]
    return jnp.exp(-(of_x + of_y - 2 * x @ y.T) / (2 * 1.5**2))


def rbf_product_by_hand(x: jax.Array, vector: jax.Array, size: int) -> jax.Array:
    """All blocks of the kernel, each of which is multiplied at once."""
    blocks, vectors = x.reshape(-1, size, VARIABLES), vector.reshape(-1, size)

    def panel(rows):
        step = lambda total, pair: (total + rbf(rows, pair[0]) @ pair[1], None)
        return lax.scan(step, jnp.zeros(size), (blocks, vectors))[0]

    return lax.map(panel, blocks).reshape(-1)


def solve(quick: bool) -> Iterator[Record]:
    num, size = (400, 100) if quick else (1_000_000, 8_000)
    keys = jr.split(KEY)
    x = 6 * jr.uniform(keys[0], (num, VARIABLES))
    y = jnp.sum(jnp.sin(x), 1) + 0.1 * jr.normal(keys[1], (num,))
    # In proportion, so that the number of products depends little on that of points.
    ridge = num / 5_000

    def operator(x: jax.Array) -> KernelOperator:
        return KernelOperator(rbf, x, block_size=size, symmetric=True)

    # Inner products of pairs on and above the diagonal, and all entries once more.
    flops = 2.0 * VARIABLES * work.upper_tiles(num, size) + 2.0 * num**2
    least = Work(flops, num_bytes(x, y, y), "highest")
    points = f"the RBF kernel of {num:,} points of {VARIABLES} numbers"
    settings = f"by {size:,}, not stored"
    yield Record(
        f"product: {points} times a vector, {settings}",
        {
            OURS: lambda x, y: operator(x).mv(y),
            BY_HAND: lambda x, y: rbf_product_by_hand(x, y, size),
        },
        (x, y),
        least,
        error=compared(BY_HAND),
        limits={BY_HAND: 1.1},
    )
    kernel = operator(x)
    run = functools.partial(kernel_solve, kernel, y, ridge=ridge)
    yield Record(
        f"solve: {points} with a ridge of {ridge:,.3g}, {settings}",
        {OURS: run},
        (),
        least,
        repeats=lambda solution: solution.num_products,
        is_program=False,
        # With two columns and few products, the same programs are compiled.
        first=lambda: run(rtol=0.9, preconditioner_rank=2),
        error=lambda results: float(results[OURS].residuals),
        # The largest residual that it returns by default.
        most=1_000 * float(jnp.finfo(jnp.float32).eps),
    )


# A dense Hessian.


def cross_entropy(model: Any, x: jax.Array, label: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), label)


def hessian(quick: bool) -> Iterator[Record]:
    inputs, width, depth, num = (4, 6, 1, 16) if quick else (64, 105, 3, 1_024)
    size = 32 if quick else 128
    model = eqx.nn.MLP(inputs, 10, width, depth, jnp.tanh, key=KEY)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    x, labels = jr.normal(KEY, (num, inputs)), jr.randint(KEY, (num,), 0, 10)

    def ours(arrays, x, labels):
        run = filter_hessian(cross_entropy, in_axes=0, flat=True)
        return run(eqx.combine(arrays, static), x, labels)[0]

    def by_chunks(arrays, x, labels):
        vector, unravel = ravel_pytree(arrays)

        def total(vector):
            model = eqx.combine(unravel(vector), static)
            return jnp.mean(jax.vmap(cross_entropy, (None, 0, 0))(model, x, labels))

        _, product = jax.linearize(jax.grad(total), vector)
        column = lambda i: product(jax.nn.one_hot(i, len(vector), dtype=vector.dtype))
        return lax.map(column, jnp.arange(len(vector)), batch_size=size)

    count = sum(x.size for x in jax.tree.leaves(arrays))
    products = work.products_of(cross_entropy, model, x, labels)
    moved = num_bytes(arrays, x, labels) + 4 * count**2
    hand = f"jax.hessian by chunks of {size}"
    yield Record(
        f"hessian: {count:,} parameters of an MLP {inputs}-{width}x{depth}-10, "
        f"{num:,} examples",
        {OURS: ours, hand: by_chunks},
        (arrays, x, labels),
        Work(work.hessian(products, num), moved, "highest"),
        error=compared(hand),
        limits={hand: 1.0},
    )


# Adapters.


class Adapter(eqx.Module):
    """A linear layer that is frozen, plus a product of low rank that is trained."""

    linear: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __init__(self, linear: eqx.nn.Linear, rank: int, key: jax.Array):
        outputs, inputs = linear.weight.shape
        keys = jr.split(key)
        self.linear = linear
        self.down = jr.normal(keys[0], (rank, inputs)) / inputs**0.5
        # As if it had been trained for a while: it starts from zero.
        self.up = 0.01 * jr.normal(keys[1], (outputs, rank))

    def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
        return self.linear(x) + self.up @ (self.down @ x)


def projections(model: Any) -> list[Any]:
    attentions = [block.attention for block in model.blocks]
    return [y for x in attentions for y in (x.query_proj, x.value_proj)]


def adapters(model: Any) -> list[jax.Array]:
    return [array for x in projections(model) for array in (x.down, x.up)]


def adapted(model: Any, rank: int) -> Any:
    """A model with adapters of the queries and values of attention."""
    layers = projections(model)
    keys = jr.split(KEY, len(layers))
    new = [Adapter(x, rank, key) for x, key in zip(layers, keys, strict=True)]
    return eqx.tree_at(projections, model, new)


def lora_ways(static: Any, num: int, size: int, clip_norm: float) -> dict[str, Any]:
    """Clipped gradients, and a gradient that is not, as `way(trained, frozen, x, y)`.

    `trained` and `frozen` are the arrays of a model.
    """

    def loss(trained, frozen, x, y):
        return eqx.combine(trained, frozen, static)(x, y)

    def ours(trained, frozen, x, y):
        grad = filter_micro_grad(
            lambda model, x, y: model(x, y),
            where=adapters,
            clip_norm=clip_norm,
            microbatch_size=size,
        )
        return jax.tree.leaves(grad(eqx.combine(trained, frozen, static), x, y))

    def clip(grads):
        norm = optax.tree.norm(grads)
        return jax.tree.map(lambda g: g * jnp.minimum(1, clip_norm / norm), grads)

    def clipped(trained, frozen, x, y):
        grads = jax.vmap(jax.grad(loss), (None, None, 0, 0))(trained, frozen, x, y)
        return jax.tree.map(lambda g: jnp.sum(g, 0), jax.vmap(clip)(grads))

    def plain(trained, frozen, x, y):
        losses = jax.vmap(loss, (None, None, 0, 0))
        return jax.grad(lambda *args: jnp.sum(losses(*args)))(trained, frozen, x, y)

    def accumulated(grad: Callable) -> Callable:
        def way(trained, frozen, *data):
            def step(sums, rows):
                return jax.tree.map(jnp.add, sums, grad(trained, frozen, *rows)), None

            rows = [a.reshape(-1, size, *a.shape[1:]) for a in data]
            sums, _ = lax.scan(step, jax.tree.map(jnp.zeros_like, trained), rows)
            return [leaf / num for leaf in jax.tree.leaves(sums)]

        return way

    hand = f"clipped {BY_HAND}"
    return {OURS: ours, PLAIN: accumulated(plain), hand: accumulated(clipped)}


def lora(quick: bool) -> Iterator[Record]:
    # What these import is not needed for other rows.
    from . import large, price

    rank, num, size, length = (2, 4, 2, 8) if quick else (8, 32, 8, 512)
    words = 50 if quick else 50_257

    def small(key: jax.Array) -> price.GPT2:
        model = price.GPT2(key, width=64, words=words, length=length)
        return eqx.tree_at(lambda model: model.blocks, model, model.blocks[:1])

    make = small if quick else large.GPT2
    # As one program: there are many arrays to draw.
    model = eqx.filter_jit(lambda key: adapted(make(key), rank))(KEY)
    # Only adapters are trained; all other arrays are arguments, too.
    is_trained = eqx.tree_at(
        adapters, jax.tree.map(lambda _: False, model), replace_fn=lambda _: True
    )
    trained, rest = eqx.partition(model, is_trained)
    frozen, static = eqx.partition(rest, eqx.is_array)
    tokens = jr.randint(KEY, (num, length + 1), 0, words)
    data = tokens[:, :-1], tokens[:, 1:]
    ways = lora_ways(static, num, size, clip_norm=0.1)
    *_, hand = ways

    def loss(trained, x, y):
        return eqx.combine(trained, frozen, static)(x, y)

    products = work.products_of(loss, trained, *data)
    count = sum(x.size for x in jax.tree.leaves(trained))
    name = "a small GPT-2" if quick else "GPT-2 small"
    yield Record(
        f"lora: clipped, {count:,} parameters of adapters of rank {rank} in {name}, "
        f"{num} times {length} tokens by {size}",
        ways,
        (trained, frozen, *data),
        Work(work.clipped(products, num), num_bytes(trained, frozen, data, trained)),
        error=compared(hand),
        # TF32 rounds each factor to 11 bits.
        most=10 * ROUNDING,
        limits={PLAIN: 1.2, hand: 1.0},
    )


# Kronecker factors.


def factors(quick: bool) -> Iterator[Record]:
    inputs, width, depth, num = (8, 16, 1, 32) if quick else (784, 2_048, 3, 16_384)
    model = eqx.nn.MLP(inputs, kfac.CLASSES, width, depth, key=KEY)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    x = jr.normal(KEY, (num, inputs))
    title = f"MLP, {count:,} parameters, {num:,} examples"
    job = kfac.Job("mlp", title, model, x, kfac.dense_peer)
    ways = {OURS: job.way(filter_kfac, **kfac.LABELS), kfac.PLAIN: job.gradient()}
    limits, missing = {kfac.PLAIN: 1.5}, {}
    if kfac.has_peer():
        ways[kfac.PEER] = kfac.dense_peer(job)
        limits[kfac.PEER] = 1.0
    else:
        missing[kfac.PEER] = "not installed"
    yield Record(
        f"kfac: {title}, drawn labels",
        ways,
        job.args,
        job.work_of(1),
        limits=limits,
        missing=missing,
    )


# Clipping.


def clipping(quick: bool) -> Iterator[Record]:
    """The jobs of the suite `price`, by hand and without clipping."""
    # What it imports is not needed for other rows.
    from . import price

    hand = "lax.scan by hand"
    for case in itertools.islice(price.cases(quick), 1 if quick else None):
        yield Record(
            f"price: {case.title}",
            {way: case.ways[way] for way in (OURS, hand, price.ACCUMULATED)},
            case.args,
            case.work,
            error=compared(hand),
            # TF32 rounds each factor to 11 bits.
            most=10 * ROUNDING,
            limits=case.limits,
        )


# Each yields records whose titles begin with one of these names.
ROWS: dict[tuple[str, ...], Callable[[bool], Iterator[Record]]] = {
    ("ntk",): ntk,
    ("product", "solve"): solve,
    ("hessian",): hessian,
    ("lora",): lora,
    ("kfac",): factors,
    ("price",): clipping,
}


def records(quick: bool, only: str = "") -> Iterator[Record]:
    """The jobs whose titles start with `only`."""
    for names, make in ROWS.items():
        if any(name.startswith(only) or only.startswith(name) for name in names):
            yield from (x for x in make(quick) if x.title.startswith(only))
