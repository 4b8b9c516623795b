"""Uses of parameters, for random programs: products, tables, convolutions, loops."""

import functools
import math

import jax
import jax.numpy as jnp

from . import (
    program_custom as program_custom,
    program_experts as program_experts,
    program_loops as program_loops,
    program_shared as program_shared,
    program_tables as program_tables,
    program_views as program_views,
)
from .program_draw import (
    Builder,
    COMPLEX,
    joined,
    NAMESPACE as _NAMES,
    only,
    REAL,
    SINGLE,
    use,
    Var,
)


# Functions with derivatives of their own, which are not those of their values. A rule
# calls the function itself, so that second derivatives are symmetric.
@jax.custom_jvp
def odd_identity(w):
    return 1.0 * w


@odd_identity.defjvp
def _odd_identity_jvp(primals, tangents):
    (w,), (dw,) = primals, tangents
    return odd_identity(w), 3 * dw * jnp.cos(w)


@jax.custom_vjp
def strange_identity(w):
    return 1.0 * w


strange_identity.defvjp(lambda w: (strange_identity(w), w), lambda w, d: (5 * d * w,))


@jax.custom_jvp
def odd(w, h):
    return w * h


@odd.defjvp
def _odd_jvp(primals, tangents):
    (w, h), (dw, dh) = primals, tangents
    return odd(w, h), 3 * (dw * h + w * dh)


NAMESPACE = {
    **_NAMES,
    **program_custom.FUNCTIONS,
    **program_experts.FUNCTIONS,
    "functools": functools,
    "odd": odd,
    "odd_identity": odd_identity,
    "strange_identity": strange_identity,
}


def complex_of(b: Builder, h: Var) -> Var:
    only(h.shape and h.shape[-1])
    return b.let(b.pick(f"jnp.fft.fft({h})", f"{h} * (1 - 0.5j)", f"jnp.exp(1j * {h})"))


def _dot_general(b: Builder, h: Var, dtype: str) -> str:
    axes = list(range(len(h.shape)))
    contracted = b.subset(axes)
    batched = [axis for axis in axes if axis not in contracted and b.chance(0.4)]
    b.rng.shuffle(contracted)
    b.rng.shuffle(batched)
    names = [("c", i) for i in contracted] + [("b", i) for i in batched]
    names += [("f", b.size()) for _ in range(b.pick(0, 1, 1, 2))]
    b.rng.shuffle(names)
    shape = [n if kind == "f" else h.shape[n] for kind, n in names]
    where = lambda kind, own: [names.index((kind, i)) for i in own]
    own = (contracted, batched)
    others = (where("c", contracted), where("b", batched))
    w = b.weight(tuple(shape), dtype)
    sides, pairs = [h, w], [own, others]
    if b.chance(0.5):
        sides.reverse()
        pairs.reverse()
    numbers = tuple(zip(*pairs, strict=True))
    widest = COMPLEX if COMPLEX in (h.dtype, dtype) else REAL
    wanted = b.pick("None", "None", repr(widest))
    return (
        f"lax.dot_general({sides[0]}, {sides[1]}, {numbers}, "
        f"preferred_element_type={wanted})"
    )


@use
def dot_general(b: Builder, h: Var):
    dtype = b.pick(REAL, REAL, REAL, REAL, SINGLE)
    return b.let(_dot_general(b, h, dtype))


@use
def dot_general_of_complex(b: Builder, h: Var):
    """Real with complex, complex with real, and complex with complex."""
    z = b.pick(complex_of(b, h), h)
    dtype = REAL if z.dtype == COMPLEX and b.chance(0.7) else COMPLEX
    return b.let(_dot_general(b, z, dtype))


@use
def dot_general_of_integers(b: Builder, h: Var):
    """Data that has no derivative: integers, and which of them are positive."""
    w = b.weight((3, b.size()))
    data = b.pick("(t % 5)", "(t > 1)")
    numbers = b.pick("(([0], [0]), ([], []))", "(([], []), ([0], [0]))")
    text = f"lax.dot_general({data}, {w}, {numbers}, preferred_element_type=np.float64)"
    return joined(b, h, b.let(text))


@use
def unrolled(b: Builder, h: Var):
    """So many uses that their pairs are too many for products of factors."""
    only(b.chance(0.2))
    w = b.weight(())
    return b.let(f"functools.reduce(lambda c, _: jnp.sin(c * {w}), range(17), {h})")


@use
def linear(b: Builder, h: Var):
    only(h.shape)
    num = b.size()
    w, bias = b.weight((num, h.shape[-1])), b.weight((num,))
    text = b.pick(f"{h} @ {w}.T + {bias}", f"{h} @ {w}.T - {bias}")
    if b.chance(0.3) and len(h.shape) > 1:
        return b.let(f"jax.vmap(lambda r: {w} @ r + {bias})({h})")
    return b.let(text)


@use
def einsum(b: Builder, h: Var):
    """Letters that are repeated in one operand, or that only one operand has."""
    only(1 <= len(h.shape) <= 3)
    own = "ijk"[: len(h.shape)]
    letters = own + "z"
    sizes = dict(zip(own, h.shape, strict=True)) | {"z": b.size()}
    word = "".join(b.pick(*letters) for _ in range(b.size(1, 3)))
    present = sorted({*own, *word})
    out = "".join(x for x in present if b.chance(0.6))
    w = b.weight(tuple(sizes[x] for x in word))
    return b.let(f'jnp.einsum("{own},{word}->{out}", {h}, {w})')


@use
def einsum_of_three(b: Builder, h: Var):
    only(len(h.shape) == 2)
    s, r = h.shape
    first, second = b.weight((r, 2)), b.weight((2, s))
    return b.let(f'jnp.einsum("sr,rk,kt->st", {h}, {first}, {second})')


@use
def add(b: Builder, h: Var):
    sizes = [b.pick(size, size, 1) for size in h.shape]
    w = b.weight(tuple(sizes[b.size(0, len(sizes)) :]))
    return b.let(b.pick(f"{h} + {w}", f"{w} + {h}", f"{h} - {w}", f"{w} - {h}"))


@use
def add_to_used_twice(b: Builder, h: Var):
    g, w = b.weight(h.shape), b.weight(h.shape)
    return b.let(f"(lambda y: (y + {w}) * jnp.sin(y))({h} * {g})")


@use
def multiply(b: Builder, h: Var):
    sizes = [b.pick(size, size, 1) for size in h.shape]
    w = b.weight(tuple(sizes[b.size(0, len(sizes)) :]))
    return b.let(b.pick(f"{h} * {w}", f"{w} * {h}", f"{w} / (1 + {h} ** 2)"))


@use
def multiply_complex(b: Builder, h: Var):
    z = complex_of(b, h)
    dtype = b.pick(REAL, COMPLEX)
    w = b.weight(z.shape[b.size(0, len(z.shape)) :], dtype)
    return b.let(b.pick(f"{z} * {w}", f"{w} * {z} + {w}", f"{z} + {w}", f"{w} / {z}"))


@use
def spectral_filter(b: Builder, h: Var):
    only(h.shape and h.shape[-1] > 1)
    num = h.shape[-1] // 2 + 1
    w = b.weight((num,), b.pick(REAL, COMPLEX))
    if w.dtype == REAL and b.chance(0.5):
        w = Var(f"({w} + 1j * {b.weight((num,))})", (num,), COMPLEX)
    return b.let(f"jnp.fft.irfft(jnp.fft.rfft({h}) * {w}, {h.shape[-1]})")


@use
def complex_square(b: Builder, h: Var):
    z = complex_of(b, h)
    w = b.weight(z.shape)
    return b.let(f"jnp.abs({w} * {z} + {b.pick('1', '1j', w)}) ** 2")


@use
def log_scale(b: Builder, h: Var):
    w = b.weight(h.shape[b.size(0, len(h.shape)) :])
    return b.let(b.pick(f"{h} * jnp.exp({w})", f"{h} / (1 + jnp.exp({w}))"))


@use
def positions(b: Builder, h: Var):
    only(h.shape)
    table = b.weight((h.shape[0] + b.size(0, 2), *h.shape[1:]))
    how = f"{table}[:{h}.shape[0]]"
    if b.chance(0.3):
        how = f"lax.dynamic_slice_in_dim({table}, 0, {h}.shape[0])"
    return b.let(f"{h} + {how}")


@use
def normed(b: Builder, h: Var):
    only(h.shape)
    w, bias = b.weight(h.shape[-1:]), b.weight(h.shape[-1:])
    centred = f"({h} - {h}.mean(-1, keepdims=True))"
    return b.let(
        f"{centred} / jnp.sqrt(0.5 + {h}.var(-1, keepdims=True)) * {w} + {bias}"
    )


@use
def attention(b: Builder, h: Var):
    only(len(h.shape) == 2)
    width = h.shape[1]
    q, k, v = (b.weight((width, 2)) for _ in range(3))
    scores = f"jax.nn.softmax({h} @ {q} @ ({h} @ {k}).T)"
    return b.let(f"{scores} @ ({h} @ {v})")


@use
def gated(b: Builder, h: Var):
    w, g = b.weight(h.shape), b.weight(h.shape)
    return b.let(f"{h} * jax.nn.sigmoid({h} * {w} + {g})")


@use
def prelu(b: Builder, h: Var):
    w = b.weight(h.shape[b.size(0, len(h.shape)) :])
    return b.let(f"jnp.where({h} > 0, {h}, {w} * {h})")


@use
def polynomial(b: Builder, h: Var):
    w, powers = b.weight(h.shape), b.weight((3, *h.shape[b.size(0, len(h.shape)) :]))
    x = b.pick(h, f"jnp.sin({w})", f"jnp.sin({w} * {h})")
    return b.let(f"jnp.polyval({powers}, {x}) * {h}")


@use
def select(b: Builder, h: Var):
    w, g = b.weight(h.shape), b.weight(h.shape)
    return b.let(f"jnp.where({h} > 0, {w}, {b.pick(g, h, 0.0)})")


@use
def solve(b: Builder, h: Var):
    only(h.shape)
    num = h.shape[0]
    w = b.weight((num, num))
    return b.let(f"jnp.linalg.solve(3 * jnp.eye({num}) + {w} / 3, {h})")


@use
def distances(b: Builder, h: Var):
    only(h.shape)
    w = b.weight((2, h.shape[-1]))
    return b.let(f"(({h}[..., None, :] - {w}) ** 2).sum(-1)")


@use
def of_itself(b: Builder, h: Var):
    """A parameter that meets itself, and what does not depend on the example."""
    w, g = b.weight((2, 3)), b.weight((3,))
    text = b.pick(f"{w} @ {w}.T", f"({w} @ {g}) ** 2", f"jnp.outer({g}, {g})[0]")
    return joined(b, h, b.let(text))


@use
def convolution(b: Builder, h: Var):
    """In one to three dimensions, with every option and layout."""
    num = b.pick(1, 1, 2, 3)
    groups, batch_groups = b.pick((1, 1), (1, 1), (2, 1), (1, 2))
    batch = batch_groups * b.pick(1, 1, 2)
    features, outputs = groups * b.size(1, 2), groups * batch_groups * b.size(1, 2)
    space = [b.size(1, 3 if num < 3 else 2) for _ in range(num)]
    kernel = [b.size(1, 3 if num == 1 else 2) for _ in range(num)]
    lhs_dilation = [b.pick(1, 1, 2) for _ in range(num)]
    rhs_dilation = [b.pick(1, 1, 2) for _ in range(num)]
    strides = [b.pick(1, 1, 2) for _ in range(num)]
    padding = [(b.size(-1, 2), b.size(-1, 2)) for _ in range(num)]
    letters = "DHW"[:num]
    specs = []
    for first, shape in (
        ("NC", (batch, features)),
        ("OI", (outputs, features // groups)),
    ):
        sizes = dict(zip(first, shape, strict=True))
        sizes |= zip(letters, space if first == "NC" else kernel, strict=True)
        order = "".join(b.rng.sample(first + letters, num + 2))
        specs.append((order, tuple(sizes[letter] for letter in order)))
    out_order = "".join(b.rng.sample("NC" + letters, num + 2))
    lhs_shape = specs[0][1]
    only(math.prod(lhs_shape) <= 32 and h.size)
    lhs = b.let(f"jnp.resize({h}, {lhs_shape})")
    dtype = REAL
    if b.chance(0.1):
        lhs, dtype = b.let(f"{lhs} * (1 + 2j)"), COMPLEX
    w = b.weight(specs[1][1], dtype)
    numbers = (specs[0][0], specs[1][0], out_order)
    out = b.let(
        f"lax.conv_general_dilated({lhs}, {w}, {tuple(strides)}, {padding}, "
        f"{tuple(lhs_dilation)}, {tuple(rhs_dilation)}, {numbers}, {groups}, "
        f"{batch_groups})"
    )
    return out if out.size else joined(b, h, b.let(f"{out}.sum()"))


@use
def convolution_by_data(b: Builder, h: Var):
    only(1 <= h.size <= 4)
    w = b.weight((1, 1, 4))
    return b.let(f"lax.conv({w}, {h}.reshape(1, 1, -1), (1,), 'SAME')")


@use
def without_entries(b: Builder, h: Var):
    w, v = b.weight((0, 2)), b.weight((2, 3))
    text = b.pick(
        f"jnp.sum({w} @ {v}) + jnp.concatenate([{w}, {v}.T]).sum(0)",
        f"jnp.sum(jnp.zeros((2, 0)) @ {w}, 0) + {v}[:, 0]",
        f"jnp.sum(jnp.ravel({h})[:0, None] * {v}[0], 0) + {v}[0, :2]",
        f"jnp.sum(jnp.ravel({h})[:0].reshape(0, 2) @ {v}, 0)",
        f"{v}[t[:0] % 2].sum(0)",
    )
    return joined(b, h, b.let(text))


@use
def inner_gradient(b: Builder, h: Var):
    w = b.weight(h.shape)
    value = f"jnp.sum(jnp.sin({w} * h) * {b.pick(w, 'h')})"
    return b.let(
        b.pick(
            f"jax.grad(lambda h: {value})({h})",
            f"jax.jvp(lambda h: {value}, ({h},), ({h},))[1]",
            f"jax.grad(lambda w, h: jnp.sum(jnp.sin(w * h) * w))({w}, {h})",
            f"jax.jacfwd(lambda h: {value})({h})",
        )
    )
