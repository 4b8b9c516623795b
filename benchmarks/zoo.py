"""Small instances of models that others designed, for `benchmarks.models`.

Some models are imported from other packages; the others are implemented here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax


# Other implementations take longer to compile, once for each of the many shapes.
KEY = jr.key(0, impl="rbg")


@dataclasses.dataclass(frozen=True)
class Job:
    """A loss of one example, `loss(model, *example)`, and a batch of examples.

    Functions that create jobs take the number of examples, and the number of blocks.
    """

    loss: Callable
    model: Any
    data: tuple


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def classifies(model, x, label):
    return cross_entropy(model(x), label)


def fits(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def normal(*shape):
    return jr.normal(KEY, shape)


def labels(num, classes=10):
    return jr.randint(KEY, (num,), 0, classes)


def tokens(num, length, words):
    return jr.randint(KEY, (num, length), 0, words)


# Models from other packages.


def images(num, size):
    return normal(num, 3, size, size), labels(num)


def infers(model, x, label):
    """The loss of a model of equimo, without dropout."""
    return cross_entropy(model(x, key=KEY, inference=True), label)


def vit(num, depth):
    from equimo.models import VisionTransformer

    model = VisionTransformer(
        img_size=32,
        in_channels=3,
        dim=64,
        patch_size=4,
        num_heads=4,
        depths=[depth],
        num_classes=10,
        key=KEY,
    )
    return Job(infers, model, images(num, 32))


def convnext(num, depth):
    from equimo.models import ConvNeXt

    model = ConvNeXt(
        3,
        depths=[depth, depth],
        dims=[32, 64],
        layer_scale_init_value=0.1,
        num_classes=10,
        key=KEY,
    )
    return Job(infers, model, images(num, 32))


def mobilenet(num, depth):
    from equimo.models import MobileNetv3

    # Channels in, channels between, kernel, stride, squeeze-and-excite, activation.
    layers = [
        (16, 48, 3, 2, False, "relu"),
        *[(24, 72, 5, 1, True, "hard_swish")] * depth,
    ]
    model = MobileNetv3(3, layers, last_channels=64, num_classes=10, key=KEY)
    return Job(infers, model, images(num, 32))


def log_likelihood(flow, x):
    import paramax

    return -paramax.unwrap(flow).log_prob(x)


def masked_autoregressive(num, depth):
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(
        KEY, base_dist=Normal(jnp.zeros(8)), flow_layers=4, nn_width=64
    )
    return Job(log_likelihood, flow, (normal(num, 8),))


def block_autoregressive(num, depth):
    from flowjax.distributions import Normal
    from flowjax.flows import block_neural_autoregressive_flow

    flow = block_neural_autoregressive_flow(
        KEY, base_dist=Normal(jnp.zeros(8)), flow_layers=2, nn_block_dim=8
    )
    return Job(log_likelihood, flow, (normal(num, 8),))


def lora(num, depth):
    import quax
    from quax.examples.lora import LoraArray, loraify

    def adapts(leaf):
        """With entries that are zero only before training (`b`) drawn at random."""
        if not isinstance(leaf, LoraArray):
            return leaf
        b = 0.1 * normal(*leaf.b.shape)
        return eqx.tree_at(lambda leaf: leaf.b, leaf, b)

    mlp = eqx.nn.MLP(128, 10, 256, 3, key=KEY)
    mlp = loraify(mlp, rank=4, scale=0.1, key=KEY)
    is_lora = lambda leaf: isinstance(leaf, LoraArray)
    mlp = jax.tree.map(adapts, mlp, is_leaf=is_lora)
    loss = lambda mlp, x, label: cross_entropy(quax.quaxify(mlp)(x), label)
    return Job(loss, mlp, (normal(num, 128), labels(num)))


def fourier_operator(num, depth):
    from pdequinox.arch import ClassicFNO

    sizes = {"hidden_channels": 16, "num_modes": 6, "num_blocks": depth}
    model = ClassicFNO(2, 1, 1, **sizes, key=KEY)
    return Job(fits, model, (normal(num, 1, 32, 32), normal(num, 1, 32, 32)))


class Telescope(eqx.Module):
    """The unknowns of a telescope: aberrations in nm, a spectrum, and pixels."""

    aberrations: jax.Array
    spectrum: jax.Array
    pixels: jax.Array

    def __init__(self):
        self.aberrations = 50 * normal(10)
        self.spectrum = 0.1 * normal(3)
        self.pixels = 1 + 0.05 * normal(32, 32)

    def __call__(self, position, optics):
        import dLux

        optics = optics.set("aberrations.coefficients", 1e-9 * self.aberrations)
        wavelengths = 1e-6 * jnp.array([0.9, 1.0, 1.1])
        weights = jax.nn.softmax(self.spectrum)
        star = dLux.PointSource(wavelengths, position, 1e3, weights)
        return self.pixels * star.model(optics)


def telescope(num, depth):
    import dLux
    import dLux.utils as dlu

    coordinates = dlu.pixel_coords(64, 1.0)
    aperture = dlu.circle(coordinates, 0.5)
    basis = jnp.array([dlu.zernike(j, coordinates, 1.0) for j in range(4, 14)])
    optic = dLux.layers.BasisLayer(basis, coefficients=jnp.zeros(10))
    layers = [
        ("aperture", dLux.layers.TransmissiveLayer(aperture, normalise=True)),
        ("aberrations", optic),
    ]
    optics = dLux.AngularOpticalSystem(64, 1.0, layers, 32, 0.1)
    loss = lambda model, x, y: jnp.mean((model(x, optics) - y) ** 2)
    positions = dlu.arcsec2rad(0.3 * normal(num, 2))
    return Job(loss, Telescope(), (positions, 1 + normal(num, 32, 32)))


class NeuralODE(eqx.Module):
    """A state of two numbers, at 16 times."""

    field: eqx.nn.MLP

    def __init__(self):
        self.field = eqx.nn.MLP(2, 2, 64, 2, activation=jax.nn.softplus, key=KEY)

    def __call__(self, start):
        import diffrax

        times = jnp.linspace(0.0, 1.0, 16)
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: self.field(y)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=start,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        ).ys


def neural_ode(num, depth):
    return Job(fits, NeuralODE(), (normal(num, 2), normal(num, 16, 2)))


# Models that are implemented here.


def heads_first(x, heads):
    return jnp.moveaxis(x.reshape(len(x), heads, -1), 1, 0)


def attend(queries, keys, values):
    """Softmax attention, with the heads first; the heads are joined."""
    scores = jnp.einsum("hqd,hkd->hqk", queries, keys) / queries.shape[-1] ** 0.5
    mixed = jnp.einsum("hqk,hkd->qhd", jax.nn.softmax(scores), values)
    return mixed.reshape(len(mixed), -1)


def rotate(x):
    """Rotary embeddings of positions, for shape `(heads, positions, size)`."""
    _, length, size = x.shape
    rates = 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None] * rates
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


class Attention(eqx.Module):
    projections: list[eqx.nn.Linear]
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)
    rotary: bool = eqx.field(static=True)

    def __init__(self, width, heads, key, *, rotary):
        *keys, last = jr.split(key, 4)
        self.projections = [eqx.nn.Linear(width, width, key=key) for key in keys]
        self.out = eqx.nn.Linear(width, width, key=last)
        self.heads, self.rotary = heads, rotary

    def __call__(self, x):
        q, k, v = (heads_first(jax.vmap(p)(x), self.heads) for p in self.projections)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        return jax.vmap(self.out)(attend(q, k, v))


class Encoder(eqx.Module):
    """A block with norms before the layers (ESM2), or after the sums (BERT)."""

    attention: Attention
    wide: eqx.nn.Linear
    narrow: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]
    before: bool = eqx.field(static=True)

    def __init__(self, width, heads, key, *, before):
        keys = jr.split(key, 3)
        self.attention = Attention(width, heads, keys[0], rotary=before)
        self.wide = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.narrow = eqx.nn.Linear(4 * width, width, key=keys[2])
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.before = before

    def feed(self, x):
        return jax.vmap(self.narrow)(jax.nn.gelu(jax.vmap(self.wide)(x)))

    def __call__(self, x):
        first, second = map(jax.vmap, self.norms)
        if self.before:
            x = x + self.attention(first(x))
            return x + self.feed(second(x))
        x = first(x + self.attention(x))
        return second(x + self.feed(x))


class ESM2(eqx.Module):
    """Rotary attention, and a head that reuses the embedding of 33 residues."""

    embedding: jax.Array
    blocks: list[Encoder]
    norm: eqx.nn.LayerNorm
    dense: eqx.nn.Linear
    head_norm: eqx.nn.LayerNorm
    bias: jax.Array

    def __init__(self, depth, width=64):
        key, last, *keys = jr.split(KEY, 2 + depth)
        self.embedding = 0.1 * jr.normal(key, (33, width))
        self.blocks = [Encoder(width, 4, key, before=True) for key in keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.dense = eqx.nn.Linear(width, width, key=last)
        self.head_norm = eqx.nn.LayerNorm(width)
        self.bias = jnp.zeros(33)

    def __call__(self, residues):
        is_hidden = residues == 32
        x = jnp.where(is_hidden[:, None], 0.0, self.embedding[residues])
        x = x * (1 - 0.12) / (1 - jnp.mean(is_hidden))
        for block in self.blocks:
            x = block(x)
        x = jax.nn.gelu(jax.vmap(self.dense)(jax.vmap(self.norm)(x)))
        return jax.vmap(self.head_norm)(x) @ self.embedding.T + self.bias


def esm2(num, depth):
    return Job(classifies, ESM2(depth), (tokens(num, 64, 33), tokens(num, 64, 32)))


class BERT(eqx.Module):
    """Learned positions, post-norm blocks, and a head on the first token."""

    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    segments: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    blocks: list[Encoder]
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, depth, width=64):
        keys = jr.split(KEY, 5 + depth)
        self.words = eqx.nn.Embedding(2_000, width, key=keys[0])
        self.positions = eqx.nn.Embedding(64, width, key=keys[1])
        self.segments = eqx.nn.Embedding(2, width, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width)
        self.blocks = [Encoder(width, 4, key, before=False) for key in keys[5:]]
        self.pooler = eqx.nn.Linear(width, width, key=keys[3])
        self.head = eqx.nn.Linear(width, 10, key=keys[4])

    def __call__(self, words):
        places = jnp.arange(len(words))
        segments = (places >= len(words) // 2).astype(int)
        x = jax.vmap(self.words)(words)
        x = x + jax.vmap(self.positions)(places) + jax.vmap(self.segments)(segments)
        x = jax.vmap(self.norm)(x)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.tanh(self.pooler(x[0])))


def bert(num, depth):
    return Job(classifies, BERT(depth), (tokens(num, 64, 2_000), labels(num)))


class ComplexEMA(eqx.Module):
    """A damped average over earlier positions with complex decay, by an FFT."""

    alpha: jax.Array
    delta: jax.Array
    theta: jax.Array
    gamma: jax.Array
    omega: jax.Array

    def __init__(self, width, states, key):
        keys = jr.split(key, 5)
        self.alpha = 0.2 * jr.normal(keys[0], (width, states))
        self.delta = 0.2 * jr.normal(keys[1], (width, states))
        self.theta = jr.normal(keys[2], (width,))
        self.gamma = jr.normal(keys[3], (width, states, 2)) / states**0.5
        self.omega = jr.normal(keys[4], (width,))

    def __call__(self, x):
        length, _ = x.shape
        states = self.alpha.shape[-1]
        alpha = jax.nn.sigmoid(self.alpha)
        keep = 1 - alpha * jax.nn.sigmoid(self.delta)
        turns = 2 * jnp.pi * jnp.arange(1, states + 1) / states
        phase = jax.nn.sigmoid(self.theta)[:, None] * turns
        decay = jnp.log(keep) + 1j * phase
        powers = jnp.exp(decay[..., None] * jnp.arange(length))
        gamma = jax.lax.complex(self.gamma[..., 0], self.gamma[..., 1])
        kernel = jnp.einsum("ds,dsl->ld", gamma * alpha, powers).real
        size = 2 * length
        spectrum = jnp.fft.rfft(x, size, 0) * jnp.fft.rfft(kernel, size, 0)
        return jnp.fft.irfft(spectrum, size, 0)[:length] + self.omega * x


class TimestepNorm(eqx.Module):
    """Normalises by the mean and the variance of all positions so far."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, width):
        self.weight, self.bias = jnp.ones(width), jnp.zeros(width)

    def __call__(self, x):
        count = jnp.arange(1, len(x) + 1)[:, None]
        mean = jnp.cumsum(jnp.mean(x, 1, keepdims=True), 0) / count
        square = jnp.cumsum(jnp.mean(x**2, 1, keepdims=True), 0) / count
        x = (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)
        return x * self.weight + self.bias


class GatedBlock(eqx.Module):
    """Normalised and gated attention to averages, and a gated feed-forward layer."""

    norm: TimestepNorm
    ema: ComplexEMA
    shared: eqx.nn.Linear
    values: eqx.nn.Linear
    gate: eqx.nn.Linear
    skip: eqx.nn.Linear
    out: eqx.nn.Linear
    scale: jax.Array
    shift: jax.Array
    feed_norm: eqx.nn.LayerNorm
    feed: list[eqx.nn.Linear]

    def __init__(self, width, key):
        keys = jr.split(key, 10)
        linear = lambda i, o, key: eqx.nn.Linear(i, o, key=key)
        self.norm = TimestepNorm(width)
        self.ema = ComplexEMA(width, 4, keys[0])
        self.shared = linear(width, width // 2, keys[1])
        self.values = linear(width, 2 * width, keys[2])
        self.gate = linear(width, 2 * width, keys[3])
        self.skip = eqx.nn.Linear(width, width, key=keys[4])
        self.out = eqx.nn.Linear(2 * width, width, use_bias=False, key=keys[5])
        self.scale = 1 + 0.1 * jr.normal(keys[6], (2, width // 2))
        self.shift = jnp.zeros((2, width // 2))
        self.feed_norm = eqx.nn.LayerNorm(width)
        self.feed = [
            linear(width, 2 * width, keys[7]),
            linear(width, 2 * width, keys[8]),
            linear(2 * width, width, keys[9]),
        ]

    def __call__(self, x):
        normed = self.norm(x)
        averages = self.ema(normed)
        shared = jax.vmap(self.shared)(averages)
        norm = jnp.linalg.norm(shared, axis=-1, keepdims=True)
        shared = shared / jnp.maximum(norm, 1e-6)
        q, k = shared[None] * self.scale[:, None] + self.shift[:, None]
        scores = q @ k.T
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = weights @ jax.nn.silu(jax.vmap(self.values)(normed))
        gated = mixed * jax.nn.silu(jax.vmap(self.gate)(averages))
        x = x + jax.vmap(self.skip)(averages) + jax.vmap(self.out)(gated)
        first, second, last = map(jax.vmap, self.feed)
        y = jax.vmap(self.feed_norm)(x)
        return x + last(jax.nn.silu(first(y)) * second(y))


class Megalodon(eqx.Module):
    """Predicts the next of 256 tokens."""

    embedding: eqx.nn.Embedding
    blocks: list[GatedBlock]
    norm: TimestepNorm
    head: eqx.nn.Linear

    def __init__(self, depth, width=64):
        first, last, *keys = jr.split(KEY, 2 + depth)
        self.embedding = eqx.nn.Embedding(256, width, key=first)
        self.blocks = [GatedBlock(width, key) for key in keys]
        self.norm = TimestepNorm(width)
        self.head = eqx.nn.Linear(width, 256, key=last)

    def __call__(self, words):
        x = jax.vmap(self.embedding)(words)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(self.norm(x))


def megalodon(num, depth):
    words = tokens(num, 65, 256)
    return Job(classifies, Megalodon(depth), (words[:, :-1], words[:, 1:]))


class Term(eqx.Module):
    """A node of a formula: the numbers are learnt, and `op` combines them."""

    args: tuple
    op: Callable = eqx.field(static=True)

    def __call__(self, symbols):
        return self.op(*(evaluate(arg, symbols) for arg in self.args))


def evaluate(node, symbols):
    if isinstance(node, Term):
        return node(symbols)
    return symbols[node] if isinstance(node, str) else node


class Formula(eqx.Module):
    """Three outputs, `a_i sin(b_i x + c_i) exp(-d_i y^2) + e_i`."""

    terms: list[Term]

    def __init__(self):
        rows = 0.5 + jr.uniform(KEY, (3, 5))
        self.terms = [self.term(*row) for row in rows]

    @staticmethod
    def term(a, b, c, d, e):
        times = lambda *args: Term(args, jnp.multiply)
        plus = lambda *args: Term(args, jnp.add)
        wave = Term((plus(times(b, "x"), c),), jnp.sin)
        decay = Term((times(d, Term(("y",), lambda y: -(y**2))),), jnp.exp)
        return plus(times(a, times(wave, decay)), e)

    def __call__(self, x):
        symbols = {"x": x[0], "y": x[1]}
        return jnp.stack([term(symbols) for term in self.terms])


def formula(num, depth):
    return Job(fits, Formula(), (normal(num, 2), normal(num, 3)))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self):
        self.cell = eqx.nn.GRUCell(16, 64, key=KEY)
        self.linear = eqx.nn.Linear(64, 10, key=KEY)

    def __call__(self, xs):
        step = lambda state, x: (self.cell(x, state), None)
        state, _ = jax.lax.scan(step, jnp.zeros(64), xs)
        return self.linear(state)


def gru(num, depth):
    return Job(classifies, Recurrent(), (normal(num, 64, 16), labels(num)))


class MixerBlock(eqx.Module):
    """An MLP over the patches of a channel, and one over the channels of a patch."""

    norms: list[eqx.nn.LayerNorm]
    patches: eqx.nn.MLP
    channels: eqx.nn.MLP

    def __init__(self, patches, width, key):
        key1, key2 = jr.split(key)
        gelu = jax.nn.gelu
        self.norms = [eqx.nn.LayerNorm((width, patches)) for _ in range(2)]
        self.patches = eqx.nn.MLP(patches, patches, 64, 1, gelu, key=key1)
        self.channels = eqx.nn.MLP(width, width, 128, 1, gelu, key=key2)

    def __call__(self, x):
        first, second = self.norms
        x = x + jax.vmap(self.patches)(first(x))
        return x + jax.vmap(self.channels, 1, 1)(second(x))


class Mixer(eqx.Module):
    patch: eqx.nn.Conv2d
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear

    def __init__(self, depth):
        first, last, *keys = jr.split(KEY, 2 + depth)
        self.patch = eqx.nn.Conv2d(3, 64, 4, 4, key=first)
        self.blocks = [MixerBlock(64, 64, key) for key in keys]
        self.norm = eqx.nn.LayerNorm((64, 64))
        self.linear = eqx.nn.Linear(64, 10, key=last)

    def __call__(self, x):
        x = self.patch(x)
        x = x.reshape(len(x), -1)
        for block in self.blocks:
            x = block(x)
        return self.linear(jnp.mean(self.norm(x), axis=1))


def mixer(num, depth):
    return Job(classifies, Mixer(depth), images(num, 32))


def dense(num):
    return normal(num, 128), normal(num, 10)


def penalty(num, depth):
    def loss(mlp, x, y):
        arrays = jax.tree.leaves(eqx.filter(mlp, eqx.is_inexact_array))
        return fits(mlp, x, y) + 1e-4 * sum(jnp.sum(w**2) for w in arrays)

    return Job(loss, eqx.nn.MLP(128, 10, 256, 3, key=KEY), dense(num))


class Masked(eqx.Module):
    """Layers in which three quarters of all weights are multiplied by zero."""

    layers: list[eqx.nn.Linear]
    masks: list[np.ndarray]

    def __init__(self):
        sizes = (128, 256, 256, 10)
        keys = jr.split(KEY, 3)
        self.layers = [
            eqx.nn.Linear(i, o, key=key)
            for i, o, key in zip(sizes[:-1], sizes[1:], keys, strict=True)
        ]
        shapes = [layer.weight.shape for layer in self.layers]
        draw = np.random.default_rng(0).random
        self.masks = [draw(shape) < 0.25 for shape in shapes]

    def __call__(self, x):
        *hidden, (last, mask) = zip(self.layers, self.masks, strict=True)
        for layer, kept in hidden:
            x = jax.nn.relu((layer.weight * kept) @ x + layer.bias)
        return (last.weight * mask) @ x + last.bias


def masked(num, depth):
    return Job(fits, Masked(), dense(num))


class Stacked(eqx.Module):
    """Six layers of the same size, stacked and scanned."""

    layers: list[eqx.nn.Linear]
    last: eqx.nn.Linear

    def __init__(self):
        *keys, last = jr.split(KEY, 7)
        self.layers = [eqx.nn.Linear(128, 128, key=key) for key in keys]
        self.last = eqx.nn.Linear(128, 10, key=last)

    def __call__(self, x):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.layers)
        step = lambda x, layer: (x + jax.nn.relu(layer(x)), None)
        x, _ = jax.lax.scan(step, x, stacked)
        return self.last(x)


def stacked(num, depth):
    return Job(fits, Stacked(), dense(num))


class WeightNormed(eqx.Module):
    layers: list[eqx.nn.WeightNorm]

    def __init__(self):
        sizes = (128, 256, 256, 10)
        keys = jr.split(KEY, 3)
        self.layers = [
            eqx.nn.WeightNorm(eqx.nn.Linear(i, o, key=key))
            for i, o, key in zip(sizes[:-1], sizes[1:], keys, strict=True)
        ]

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


def weight_norm(num, depth):
    return Job(fits, WeightNormed(), dense(num))
