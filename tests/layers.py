"""Every layer of Equinox that has parameters, and networks made of them.

`python -m tests.layers` prints the table in the docs; a test compares them.
"""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from eqxbatch import explain_sites
from eqxbatch.results import SitesReport
from .helpers import drawn, integers, normal


nn = eqx.nn
KEY = jr.key(0)


class Case(NamedTuple):
    """A model, a function of it and an example, and a function that draws examples."""

    model: Any
    fun: Callable
    example: Callable


def vectors(*shape):
    return lambda key: normal(key, shape, jnp.result_type(float))


def weight(*shape):
    return normal(jr.key(2), shape, jnp.result_type(float))


def tokens(*shape):
    return lambda key: integers(key, shape, 7)


def examples(case, key, num):
    """Some examples, for whose shapes nothing is compiled."""
    drawn = [case.example(key) for key in jr.split(key, num)]
    return jax.tree.map(lambda *x: jax.device_put(np.stack(x)), *drawn)


def apply(model, x):
    return model(x)


def mapped(model, x):
    return jax.vmap(model)(x)


def gru(cell, x):
    step = lambda state, x: (cell(x, state), None)
    return jax.lax.scan(step, jnp.zeros(cell.hidden_size), x)[0]


def lstm(cell, x):
    zeros = jnp.zeros(cell.hidden_size)
    step = lambda state, x: (cell(x, state), state[0])
    return jax.lax.scan(step, (zeros, zeros), x, reverse=True)


def attention(model, x):
    return model(x, x, x)


def rope(attention, x):
    embedding = nn.RotaryPositionalEmbedding(2, dtype=x.dtype)

    def process(query, key, value):
        rotate = jax.vmap(embedding, in_axes=1, out_axes=1)
        return rotate(query), rotate(key), value

    return attention(x, x, x, process_heads=process)


def spectral(model, x):
    layer, state = model
    return layer(x, state)[0]


def _layers() -> dict[str, Callable[[], Case]]:
    make = lambda *args, **kwargs: lambda: drawn(*args, **kwargs, key=KEY)
    heads = make(nn.MultiheadAttention, 2, 4, use_query_bias=True)
    conv2d = {"kernel_size": (3, 2), "stride": (2, 1), "padding": ((1, 0), (2, 1))}
    dilated = {"stride": 2, "padding": 1, "dilation": 2}
    up = {"stride": 2, "padding": 1, "output_padding": 1}
    # `make_with_state` creates a layer that has a state.
    norm = lambda: nn.make_with_state(nn.SpectralNorm)(
        nn.Linear(3, 2, key=KEY), weight_name="weight", key=KEY
    )
    made = {
        "Linear": Case(make(nn.Linear, 2, 3), apply, vectors(2)),
        "Linear, of a sequence": Case(make(nn.Linear, 2, 3), mapped, vectors(5, 2)),
        "Conv1d": Case(make(nn.Conv1d, 4, 6, 3, **dilated), apply, vectors(4, 9)),
        "Conv2d": Case(make(nn.Conv2d, 4, 6, **conv2d), apply, vectors(4, 6, 5)),
        "Conv2d, in groups": Case(
            make(nn.Conv2d, 4, 6, **conv2d, groups=2), apply, vectors(4, 6, 5)
        ),
        "Conv3d": Case(make(nn.Conv3d, 2, 2, 2), apply, vectors(2, 3, 4, 3)),
        "ConvTranspose1d": Case(
            make(nn.ConvTranspose1d, 4, 6, 3, stride=2), apply, vectors(4, 5)
        ),
        "ConvTranspose2d": Case(
            make(nn.ConvTranspose2d, 4, 6, 3, **up, groups=2), apply, vectors(4, 5, 4)
        ),
        "ConvTranspose3d": Case(
            make(nn.ConvTranspose3d, 2, 2, 2), apply, vectors(2, 3, 2, 3)
        ),
        "Embedding": Case(make(nn.Embedding, 7, 3), apply, tokens()),
        "Embedding, of a sequence": Case(make(nn.Embedding, 7, 3), mapped, tokens(4)),
        "LayerNorm": Case(lambda: nn.LayerNorm((3, 2)), apply, vectors(3, 2)),
        "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), apply, vectors(4, 3)),
        "RMSNorm": Case(lambda: nn.RMSNorm(3), apply, vectors(3)),
        "PReLU": Case(nn.PReLU, apply, vectors(3)),
        "MultiheadAttention": Case(heads, attention, vectors(5, 4)),
        "MultiheadAttention, with RotaryPositionalEmbedding": Case(
            heads, rope, vectors(5, 4)
        ),
        "GRUCell, in a scan": Case(make(nn.GRUCell, 2, 3), gru, vectors(4, 2)),
        "LSTMCell, in a scan": Case(make(nn.LSTMCell, 2, 3), lstm, vectors(4, 2)),
        "MLP": Case(make(nn.MLP, 2, 3, 4, 2), apply, vectors(2)),
        "WeightNorm": Case(
            lambda: nn.WeightNorm(nn.Linear(3, 2, key=KEY)), apply, vectors(3)
        ),
        "SpectralNorm": Case(norm, spectral, vectors(3)),
    }

    # Layers are created once for each default dtype, in whatever order tests run.
    @functools.cache
    def one(name, is_double):
        del is_double
        return made[name]._replace(model=made[name].model())

    return {
        name: lambda name=name: one(name, jnp.result_type(float) == jnp.float64)
        for name in made
    }


# These are functions, so that only layers that are used are created.
LAYERS = _layers()


class Network(eqx.Module):
    """A sequence of layers, each with the function that applies it."""

    layers: list
    funs: list[Callable]

    def __call__(self, x):
        for layer, fun in zip(self.layers, self.funs, strict=True):
            x = jnp.tanh(fun(layer, x))
        return x


def random_network(key) -> Case:
    """A network of random layers of all kinds, one of them used twice."""
    key, key1, key2 = jr.split(key, 3)
    kind = ("vector", "image", "sequence")[int(jr.randint(key1, (), 0, 3))]
    order = [int(i) for i in jr.permutation(key2, 6)]
    keys = jr.split(key, 8)
    if kind == "vector":
        choices = [
            (nn.Linear(4, 4, key=keys[0]), apply),
            (nn.LayerNorm(4), apply),
            (nn.RMSNorm(4), apply),
            (nn.MLP(4, 4, 3, 1, key=keys[1]), apply),
            (nn.PReLU(), apply),
            (nn.Linear(4, 4, use_bias=False, key=keys[2]), apply),
        ]
        first, last = [], [(nn.Linear(4, 2, key=keys[3]), apply)]
        example = vectors(4)
    elif kind == "image":
        choices = [
            (nn.Conv2d(2, 2, 3, padding=1, key=keys[0]), apply),
            (nn.Conv2d(2, 2, 3, padding=2, dilation=2, groups=2, key=keys[1]), apply),
            (nn.ConvTranspose2d(2, 2, 3, padding=1, key=keys[2]), apply),
            (nn.GroupNorm(1, 2), apply),
            (nn.PReLU(), apply),
            (nn.LayerNorm((2, 4, 3)), apply),
        ]
        first, last = [], [(nn.Conv2d(2, 3, 2, stride=2, key=keys[3]), apply)]
        example = vectors(2, 4, 3)
    else:
        choices = [
            (nn.MultiheadAttention(2, 4, key=keys[0]), attention),
            (nn.Linear(4, 4, key=keys[1]), mapped),
            (nn.LayerNorm(4), mapped),
            (nn.MultiheadAttention(2, 4, key=keys[2]), rope),
            (nn.MLP(4, 4, 3, 1, key=keys[3]), mapped),
            (nn.RMSNorm(4), mapped),
        ]
        cell = (nn.GRUCell(4, 3, key=keys[4]), gru)
        first = [(nn.Embedding(7, 4, key=keys[5]), mapped)]
        last = [cell if order[0] % 2 else (nn.LSTMCell(4, 3, key=keys[4]), lstm_output)]
        example = tokens(5)
    chosen = [choices[i] for i in order[:3]]
    pairs = [*first, *chosen, chosen[0], *last]
    # The layer that is used twice is in the model once; the function shares it.
    shared = len(first)
    again = len(first) + len(chosen)
    layers = [layer for i, (layer, _) in enumerate(pairs) if i != again]

    def fun(layers, x):
        layers = [*layers[:again], layers[shared], *layers[again:]]
        return Network(layers, [fun for _, fun in pairs])(x)

    return Case(layers, fun, example)


def lstm_output(cell, x):
    return lstm(cell, x)[1]


def table() -> str:
    """The table in the docs: the sites of each layer, and parameters without rules."""
    return table_of("layer of `equinox.nn`", LAYERS)


def table_of(title: str, cases: dict[str, Callable[[], Case]]) -> str:
    """For each case, the sites of its parameters, and parameters that fall back."""
    lines = [f"| {title} | sites | without a rule | K-FAC |", "|---|---|---|---|"]
    for name, make in cases.items():
        model, fun, example = make()
        report = explain_sites(fun, model, example(KEY), in_axes=None)
        sites = collections.Counter(
            site for leaf in report.leaves for site in leaf.sites
        )
        names = ", ".join(
            f"{num} x `{site}`" if num > 1 else f"`{site}`"
            for site, num in sites.items()
        )
        failed = [
            f"`{leaf.path}`: {leaf.reason}" for leaf in report.leaves if leaf.reason
        ]
        columns = (name, names, "; ".join(failed), kfac_of(report))
        lines.append(f"| {' | '.join(text or '-' for text in columns)} |")
    return "\n".join(lines) + "\n"


def kfac_of(report: SitesReport) -> str:
    """Which parameters have Kronecker factors, and what the others have and why."""
    kinds: dict[str, list[str]] = {}
    for leaf in report.leaves:
        kind = leaf.kfac
        if kind not in ("block", "diagonal", "refused"):
            kind = "factors"
        elif not leaf.reason:
            reason = re.sub(
                r"(?<=it is multiplied with )(.+)$", r"`\1`", leaf.kfac_reason
            )
            kind = f"{kind}, as {reason}"
        kinds.setdefault(kind, []).append(f"`{leaf.path or 'itself'}`")
    return "; ".join(f"{', '.join(paths)}: {kind}" for kind, paths in kinds.items())


if __name__ == "__main__":
    print(table(), end="")
