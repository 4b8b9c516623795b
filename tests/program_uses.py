"""Uses of parameters, for random programs: products, tables, convolutions, loops."""

import math

import jax
import jax.numpy as jnp

from . import program_loops as program_loops, program_views as program_views
from .program_draw import (
    Builder,
    COMPLEX,
    NAMESPACE as _NAMES,
    REAL,
    Rejected,
    SINGLE,
    use,
    Var,
)


def only(condition) -> None:
    if not condition:
        raise Rejected("does not fit")


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
    "odd": odd,
    "odd_identity": odd_identity,
    "strange_identity": strange_identity,
    "Mode": jax.lax.GatherScatterMode,
}


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
    return b.let(
        f"__import__('functools').reduce(lambda c, _: jnp.sin(c * {w}), range(17), {h})"
    )


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


def table_rows(b: Builder) -> int:
    """How many rows: few, one, or as many as a dtype of 8 bits has."""
    few, many = b.pick(1, 1, 2, 3, 5), b.pick(127, 128, 200, 255, 256, 300)
    return b.pick(few, few, many)


def table(b: Builder, rows: int, rest: tuple[int, ...], axis: int = 0) -> Var:
    """A table; if it is long, then of few different rows, or of single entries."""
    shape = (*rest[:axis], rows, *rest[axis:])
    if rows < 10:
        return b.weight(shape)
    few = b.pick(1, 2, 3)
    small = b.weight((*rest[:axis], few, *rest[axis:]))
    how = b.pick(
        f"jnp.resize({small}, {shape})" if axis == 0 else "",
        f"jnp.repeat({small}, {-(-rows // few)}, {axis})",
        f"jnp.broadcast_to({small}, {shape})" if few == 1 else "",
    )
    only(how)
    if "repeat" in how:
        shape = (*rest[:axis], few * -(-rows // few), *rest[axis:])
    return b.let(how, "w")


def tokens(b: Builder, rows: int, *, are_in: bool = False) -> str:
    """Those of the example, or made of them; in any integer dtype.

    What `x[t]` gives is not defined where `t` is out of bounds, but negative ones are.
    """
    if are_in:
        least = b.pick(0, -rows)
        return f"jnp.clip(t{b.pick('', '[:2]', '[:, None]')}, {least}, {rows - 1})"
    return b.pick(
        "t",
        "t",
        "t",
        "t[:2]",
        "t[:, None]",
        "t.reshape(1, 3)",
        "t.astype(jnp.int32)",
        f"jnp.clip(t, 0, {rows - 1})",
        "(t % 3)",
        "t[:1]",
    )


@use
def rows_by_index(b: Builder, h: Var):
    rows, axis = table_rows(b), b.pick(0, 0, 1)
    w = table(b, rows, (b.size(),), axis)
    zero = ", fill_value=0"
    mode = b.pick(
        "",
        f".get(mode='fill'{zero})",
        ".get(mode='clip')",
        f".get(mode='drop'{zero})",
        ".get(mode='wrap')",
    )
    t = tokens(b, rows, are_in=not mode)
    where = t if axis == 0 else f":, {t}"
    text = f"{w}.at[{where}]{mode}" if mode else f"{w}[{where}]"
    return joined(b, h, b.let(text))


@use
def rows_in_bounds(b: Builder, h: Var):
    rows = b.pick(1, 3, 5, 100)
    w = table(b, rows, (2,))
    t = f"jnp.clip(t, 0, {rows - 1})"
    mode = b.pick("'promise_in_bounds'", "Mode.ONE_HOT")
    return joined(b, h, b.let(f"{w}.at[{t}].get(mode={mode})"))


@use
def rows_taken(b: Builder, h: Var):
    rows, axis = table_rows(b), b.pick(0, 0, 1)
    w = table(b, rows, (b.size(),), axis)
    mode = b.pick("fill", "fill", "clip", "wrap", None)
    fill = (
        b.pick(", fill_value=0", ", fill_value=0.5") if mode in ("fill", None) else ""
    )
    text = f"jnp.take({w}, {tokens(b, rows)}, axis={axis}, mode={mode!r}{fill})"
    return joined(b, h, b.let(text))


@use
def row_by_dynamic_slice(b: Builder, h: Var):
    rows, axis = table_rows(b), b.pick(0, 0, 1)
    w = table(b, rows, (b.size(),), axis)
    keeps = b.chance(0.5)
    inside = f"{tokens(b, rows, are_in=True)}.ravel()[0]"
    text = b.pick(
        f"lax.dynamic_index_in_dim({w}, t[0], {axis}, {keeps})",
        f"lax.dynamic_slice_in_dim({w}, t[1], 1, {axis})",
        f"lax.dynamic_slice_in_dim({w}, t[1], {min(rows, 2)}, {axis})",
        f"lax.dynamic_slice({w}, (t[0], t[1]), (1, 1))",
        f"{w}[{inside}]" if axis == 0 else f"{w}[:, {inside}]",
    )
    return joined(b, h, b.let(text))


@use
def rows_under_vmap(b: Builder, h: Var):
    rows = table_rows(b)
    w = table(b, rows, (2,))
    t = tokens(b, rows, are_in=True)
    text = b.pick(
        f"jax.vmap(lambda i: {w}[i])({t})",
        f"jax.vmap(lambda i: lax.dynamic_index_in_dim({w}, i, 0, False))(t)",
        f"lax.map(lambda i: {w}[i], {t})",
        f"lax.scan(lambda c, i: (c + {w}[i], c.sum()), jnp.zeros(2), {t}.ravel())[1]",
    )
    return joined(b, h, b.let(text))


@use
def rows_by_one_hot(b: Builder, h: Var):
    rows = b.size(1, 4)
    w = b.weight((rows, 2))
    return joined(b, h, b.let(f"jax.nn.one_hot(t, {rows}, dtype=jnp.float64) @ {w}"))


@use
def rows_of_two_axes(b: Builder, h: Var):
    first, second = b.size(1, 3), b.size(1, 3)
    w = b.weight((first, second))
    t = tokens(b, min(first, second), are_in=True)
    text = b.pick(
        f"{w}[{t}, {t}]",
        f"{w}[{t}, 0]",
        f"{w}[0, {t}]",
        f"{w}.at[t, t].get(mode='fill', fill_value=0)",
        f"{w}.at[t, 0].get(mode='fill', fill_value=1)",
        f"{w}.at[t[:, None], t].get(mode='clip')",
    )
    return joined(b, h, b.let(text))


@use
def entries_along_axis(b: Builder, h: Var):
    w = b.weight((b.size(), 3))
    index = b.pick("t[None]", "jnp.clip(t, 0, 2)[None]")
    mode = b.pick("'fill', fill_value=0", "'clip'")
    text = f"jnp.take_along_axis({w}, {index}, axis=1, mode={mode})"
    return joined(b, h, b.let(text))


@use
def rows_by_lax_gather(b: Builder, h: Var):
    """Slices that are not collapsed, of several sizes, along either axis."""
    shape = (b.size(1, 4), b.size(1, 4))
    w = b.weight(shape)
    axis = b.pick(0, 1)
    sizes = [1 if i == axis else b.pick(n, n, 1) for i, n in enumerate(shape)]
    collapsed = tuple(i for i in (0, 1) if sizes[i] == 1 and b.chance(0.5))
    offsets = {2: (), 1: (b.pick(0, 1),), 0: b.pick((0, 1), (0, 2), (1, 2))}
    both = b.chance(0.4)
    numbers = (
        f"lax.GatherDimensionNumbers(offset_dims={offsets[len(collapsed)]}, "
        f"collapsed_slice_dims={collapsed}, "
        f"start_index_map={b.pick((0, 1), (1, 0)) if both else (axis,)})"
    )
    t = "jnp.stack([t, t - 1], -1)" if both else "t[:, None]"
    mode = b.pick("'fill', fill_value=0", "'clip'")
    text = f"lax.gather({w}, {t}, {numbers}, {tuple(sizes)}, mode={mode})"
    return joined(b, h, b.let(text))


@use
def tied(b: Builder, h: Var):
    """A table that is looked up, and that is a matrix."""
    only(h.shape and h.shape[-1])
    rows = b.size(1, 5)
    w = b.weight((rows, h.shape[-1]))
    look = b.pick(
        f"{w}[t % {rows}]",
        f"jnp.take({w}, t, axis=0, mode='fill', fill_value=0)",
        f"jnp.take({w}, t, axis=0, mode='clip')",
        f"{w}[t[0] % {rows}]",
    )
    b.known.append(w)
    return b.let(f"jnp.tanh({h}.reshape(-1, {h.shape[-1]})[0] + {look}) @ {w}.T")


@use
def scattered(b: Builder, h: Var):
    w = b.weight((3, 2))
    text = b.pick(
        f"jax.ops.segment_sum({w}, t, 4)",
        f"jnp.zeros((4, 2)).at[t].add({w})",
        f"jnp.ones((3, 2)).at[t].set({w}[0])",
        f"lax.dynamic_update_slice(jnp.zeros((4, 2)), {w}, (t[0], 0))",
    )
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
