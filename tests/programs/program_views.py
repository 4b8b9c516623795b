"""Views of parameters, for random programs: each with all parameters of its primitive.

A view is written from what is wanted back to what it is made of.
"""

from .program_draw import Builder, COMPLEX, only, REAL, SINGLE, view, Want


def with_axis(shape, axis, size):
    return (*shape[:axis], size, *shape[axis + 1 :])


def index(ndim: int, axis: int, text: str) -> str:
    return ", ".join(text if i == axis else ":" for i in range(ndim))


@view
def reshape(b: Builder, want: Want):
    return f"jnp.reshape($, {want.shape})", want.of(b.shape_of_size(want.size))


@view
def reshape_columns_first(b: Builder, want: Want):
    source = want.of(b.shape_of_size(want.size))
    return f'jnp.reshape($, {want.shape}, order="F")', source


@view
def reshape_columns_first_of_same(b: Builder, want: Want):
    return f'jnp.reshape($, {want.shape}, order="F")', want.of(want.shape)


@view
def reshape_with_dimensions(b: Builder, want: Want):
    shape = b.pick(want.shape, want.shape[::-1], b.shape_of_size(want.size))
    return f"lax.reshape($, {want.shape}, {b.permutation(len(shape))})", want.of(shape)


@view
def transpose(b: Builder, want: Want):
    order = b.permutation(len(want.shape))
    source = [0] * len(order)
    for new, old in enumerate(order):
        source[old] = want.shape[new]
    return f"jnp.transpose($, {order})", want.of(source)


@view
def squeeze(b: Builder, want: Want):
    axis = b.size(0, len(want.shape))
    shape = (*want.shape[:axis], 1, *want.shape[axis:])
    return f"jnp.squeeze($, {axis - b.pick(0, len(shape))})", want.of(shape)


@view
def expand_dims(b: Builder, want: Want):
    axes = [axis for axis, size in enumerate(want.shape) if size == 1]
    only(axes)
    axis = b.pick(*axes)
    shape = (*want.shape[:axis], *want.shape[axis + 1 :])
    return f"jnp.expand_dims($, {axis})", want.of(shape)


@view
def broadcast_to(b: Builder, want: Want):
    shape = [b.pick(size, size, 1) for size in want.shape]
    first = b.size(0, len(shape))
    return f"jnp.broadcast_to($, {want.shape})", want.of(shape[first:])


@view
def broadcast_in_dim(b: Builder, want: Want):
    axes = tuple(axis for axis in range(len(want.shape)) if b.chance(0.6))
    shape = [b.pick(want.shape[axis], want.shape[axis], 1) for axis in axes]
    return f"lax.broadcast_in_dim($, {want.shape}, {axes})", want.of(shape)


@view
def repeat(b: Builder, want: Want):
    axis = b.axis(want.shape)
    size = want.shape[axis]
    num = b.pick(*(k for k in (1, 2, 3, 4) if size % k == 0))
    only(size and num > 1)
    return f"jnp.repeat($, {num}, {axis})", want.of(
        with_axis(want.shape, axis, size // num)
    )


@view
def repeat_unevenly(b: Builder, want: Want):
    axis = b.axis(want.shape)
    size = want.shape[axis]
    only(size >= 2)
    first = b.size(0, size)
    source = want.of(with_axis(want.shape, axis, 2))
    counts = f"np.array([{first}, {size - first}])"
    return f"jnp.repeat($, {counts}, {axis}, total_repeat_length={size})", source


@view
def tile(b: Builder, want: Want):
    nums = [b.pick(*(k for k in (1, 2, 3) if size % k == 0)) for size in want.shape]
    shape = [size // num for size, num in zip(want.shape, nums, strict=True)]
    return f"jnp.tile($, {tuple(nums)})", want.of(shape)


@view
def strided_slice(b: Builder, want: Want):
    starts, limits, strides, shape = [], [], [], []
    for size in want.shape:
        start, stride, after = b.size(0, 1), b.pick(1, 1, 2), b.size(0, 1)
        limit = start + max(size - 1, 0) * stride + min(size, 1)
        starts.append(start)
        strides.append(stride)
        limits.append(limit)
        shape.append(limit + after)
    return f"lax.slice($, {starts}, {limits}, {strides})", want.of(shape)


@view
def slice_from_the_end(b: Builder, want: Want):
    axis = b.axis(want.shape)
    more = b.size(0, 2)
    size = want.shape[axis]
    text = index(len(want.shape), axis, b.pick(f"{more}:", f"{more}:{more + size}"))
    return f"$[{text}]", want.of(with_axis(want.shape, axis, size + more))


@view
def reverse(b: Builder, want: Want):
    axes = tuple(b.subset(range(len(want.shape))))
    return f"lax.rev($, {axes})", want


@view
def item(b: Builder, want: Want):
    axis, size = b.size(0, len(want.shape)), b.size()
    shape = (*want.shape[:axis], size, *want.shape[axis:])
    which = b.size(-size, size - 1)
    return f"$[{index(len(shape), axis, str(which))}]", want.of(shape)


@view
def concatenate_with_constants(b: Builder, want: Want):
    axis = b.axis(want.shape)
    size = want.shape[axis]
    only(size >= 2)
    before = b.size(0, size - 1)
    own = b.size(0 if b.chance(0.1) else 1, size - before)
    parts = ["$"]
    for place, num in ((0, before), (2, size - before - own)):
        shape = with_axis(want.shape, axis, num)
        zeros = f"jnp.zeros({shape}, {want.dtype!r})"
        text = b.pick(zeros, f"jnp.asarray({b.constant(shape)}, {want.dtype!r})")
        parts.insert(place, text)
    return f"jnp.concatenate([{', '.join(parts)}], {axis})", want.of(
        with_axis(want.shape, axis, own)
    )


@view
def concatenate_with_itself(b: Builder, want: Want):
    axis = b.axis(want.shape)
    size = want.shape[axis]
    only(size and size % 2 == 0)
    other = b.pick("-w", "w", "2 * w", f"jnp.flip(w, {axis})", "jnp.exp(w / 2)")
    text = f"(lambda w: jnp.concatenate([w, {other}], {axis}))($)"
    return text, want.of(with_axis(want.shape, axis, size // 2))


@view
def concatenate_with_another(b: Builder, want: Want):
    axis = b.axis(want.shape)
    size = want.shape[axis]
    only(size >= 2 and not b.frames)
    first = b.size(1, size - 1)
    other = b.base(want.of(with_axis(want.shape, axis, size - first)))
    pair = b.pick(f"[$, {other}]", f"[{other}, $]")
    return f"jnp.concatenate({pair}, {axis})", want.of(
        with_axis(want.shape, axis, first)
    )


@view
def stack_with_constant(b: Builder, want: Want):
    axis = b.axis(want.shape)
    only(want.shape[axis] == 2)
    shape = (*want.shape[:axis], *want.shape[axis + 1 :])
    return f"(lambda w: jnp.stack([w, 0 * w + 1], {axis}))($)", want.of(shape)


@view
def pad(b: Builder, want: Want):
    config, shape = [], []
    for size in want.shape:
        source = b.size(max(size - 2, 1), size + 2)
        inner = 1 if source > 1 and b.chance(0.3) else 0
        low = b.size(-2 if source > 2 else 0, 2)
        full = source + inner * (source - 1)
        config.append((low, size - full - low, inner))
        shape.append(source)
    value = b.pick("0.0", "0.5")
    return f"lax.pad($, jnp.asarray({value}, {want.dtype!r}), {config})", want.of(shape)


def _reduced(b: Builder, want: Want, name: str):
    axis, size = b.size(0, len(want.shape)), b.size()
    keeps = axis < len(want.shape) and want.shape[axis] == 1 and b.chance(0.5)
    if keeps:
        shape = with_axis(want.shape, axis, size)
        return f"$.{name}({axis}, keepdims=True)", want.of(shape)
    shape = (*want.shape[:axis], size, *want.shape[axis:])
    return f"$.{name}({axis})", want.of(shape)


@view
def reduce_sum(b: Builder, want: Want):
    return _reduced(b, want, "sum")


@view
def reduce_mean(b: Builder, want: Want):
    return _reduced(b, want, "mean")


@view
def reduce_max(b: Builder, want: Want):
    only(want.dtype == REAL)
    return _reduced(b, want, "max")


@view
def cumsum(b: Builder, want: Want):
    axis = b.axis(want.shape)
    return f"lax.cumsum($, {axis}, reverse={b.chance(0.5)})", want


@view
def through_single_precision(b: Builder, want: Want):
    only(want.dtype == REAL and b.chance(0.3))
    return "$.astype(jnp.float64)", Want(want.shape, SINGLE)


@view
def through_complex(b: Builder, want: Want):
    only(want.dtype == REAL)
    part = b.pick("1j * {}", "(1 - 2j) * {}", "jnp.conj({})", "{}", "-{}", "{} / 2j")
    text = part.format("$.astype(jnp.complex128)")
    return f"({text}).{b.pick('real', 'imag')}", want


@view
def to_complex(b: Builder, want: Want):
    only(want.dtype == COMPLEX)
    text = "$.astype(jnp.complex128)"
    scaled = b.pick(text, f"({text} * 1j)", f"lax.complex($, {b.pick('$', '-$')})")
    return scaled, Want(want.shape, REAL)


@view
def of_a_complex_one(b: Builder, want: Want):
    only(want.dtype == REAL and b.chance(0.4))
    return b.pick("$.real", "$.imag", "jnp.abs($)"), Want(want.shape, COMPLEX)


@view
def conj(b: Builder, want: Want):
    only(want.dtype == COMPLEX)
    return "jnp.conj($)", want


@view
def scaled(b: Builder, want: Want):
    text = b.pick("($ * 0.5)", "(-1.5 * $)", "($ / 4.0)", "(-$)", "(2 * -$ / 3)")
    return text, want


@view
def scaled_by_zero(b: Builder, want: Want):
    only(b.chance(0.3))
    return "($ * 0.0)", want


@view
def scaled_by_constants(b: Builder, want: Want):
    numbers = b.constant(want.shape)
    numbers = f"jnp.asarray({numbers}, {want.dtype!r})"
    return b.pick(f"($ * {numbers})", f"($ / (3 + {numbers}))"), want


@view
def shifted(b: Builder, want: Want):
    numbers = f"jnp.asarray({b.constant(want.shape)}, {want.dtype!r})"
    return b.pick("($ + 1)", f"($ - {numbers})", f"({numbers} - $)", "(1 - $)"), want


@view
def sum_with_its_mirror(b: Builder, want: Want):
    axis = b.axis(want.shape)
    sign = b.pick("+", "-")
    return f"(lambda w: w {sign} 2 * jnp.flip(w, {axis}))($)", want


@view
def sum_with_its_transpose(b: Builder, want: Want):
    only(len(want.shape) == 2 and want.shape[0] == want.shape[1])
    return f"(lambda w: w {b.pick('+', '-')} w.T)($)", want


@view
def masked(b: Builder, want: Want):
    mask = [b.chance(0.5) for _ in range(want.size)]
    mask = f"np.reshape(np.array({mask}, bool), {want.shape})"
    return b.pick(f"jnp.where({mask}, $, 0)", f"jnp.where({mask}, 0.25, $)"), want


@view
def triangle(b: Builder, want: Want):
    only(len(want.shape) >= 2)
    return f"jnp.{b.pick('tril', 'triu')}($, {b.size(-1, 1)})", want


@view
def diagonal(b: Builder, want: Want):
    only(len(want.shape) == 1)
    (size,) = want.shape
    return b.pick("jnp.diagonal($)", 'jnp.einsum("ii->i", $)'), want.of((size, size))


@view
def diagonal_matrix(b: Builder, want: Want):
    only(len(want.shape) == 2 and want.shape[0] == want.shape[1])
    return "jnp.diag($)", want.of(want.shape[:1])


@view
def dynamic_slice(b: Builder, want: Want):
    shape = [size + b.size(0, 1) for size in want.shape]
    starts = [b.size(-1, 2) for _ in want.shape]
    only(shape)
    return f"lax.dynamic_slice($, {starts}, {list(want.shape)})", want.of(shape)


@view
def constant_rows(b: Builder, want: Want):
    axis = b.axis(want.shape)
    source = b.size(1, 4)
    rows = [b.size(-source - 1, source) for _ in range(want.shape[axis])]
    mode = b.pick("fill", "clip", "wrap", None)
    dtype = b.pick("int8", "int32", "int64")
    return (
        f'jnp.take($, np.array({rows}, "{dtype}"), axis={axis}, mode={mode!r}, '
        "fill_value=0)"
    ), want.of(with_axis(want.shape, axis, source))


@view
def roll(b: Builder, want: Want):
    axis = b.axis(want.shape)
    return f"jnp.roll($, {b.size(-2, 2)}, {axis})", want


@view
def halves(b: Builder, want: Want):
    axis = b.axis(want.shape)
    size = want.shape[axis]
    text = f"(lambda v: jnp.split(v, [{size}], {axis}))($)"
    rest = b.size(0, 2)
    if b.chance(0.5) and rest == size:
        return f"(lambda v: v[0] - v[1])({text})", want.of(
            with_axis(want.shape, axis, 2 * size)
        )
    return f"{text}[0]", want.of(with_axis(want.shape, axis, size + rest))


@view
def set_entries(b: Builder, want: Want):
    axis = b.axis(want.shape)
    only(want.shape[axis])
    at = index(len(want.shape), axis, str(b.size(0, want.shape[axis] - 1)))
    return f"$.at[{at}].{b.pick('set', 'add', 'multiply')}(0.5)", want


@view
def set_into_zeros(b: Builder, want: Want):
    axis = b.axis(want.shape)
    size = want.shape[axis]
    only(size >= 1)
    own = b.size(1, size)
    text = index(len(want.shape), axis, f"{size - own}:")
    zeros = f"jnp.zeros({want.shape}, {want.dtype!r})"
    return f"{zeros}.at[{text}].{b.pick('set', 'add')}($)", want.of(
        with_axis(want.shape, axis, own)
    )


@view
def mixed_by_a_constant(b: Builder, want: Want):
    axis, size = b.axis(want.shape), b.size()
    matrix = f"jnp.asarray({b.constant((want.shape[axis], size))}, {want.dtype!r})"
    text = f"jnp.moveaxis(jnp.tensordot({matrix}, $, (1, {axis})), 0, {axis})"
    return text, want.of(with_axis(want.shape, axis, size))


@view
def outer_with_a_constant(b: Builder, want: Want):
    only(want.shape and want.shape[-1] > 0)
    row = f"jnp.asarray({b.constant(want.shape[-1:])}, {want.dtype!r})"
    return f"jnp.multiply.outer($, {row})", want.of(want.shape[:-1])


@view
def copied(b: Builder, want: Want):
    return b.pick("jnp.array($, copy=True)", "jnp.copy($)", "jnp.positive($)"), want


@view
def partly_stopped(b: Builder, want: Want):
    return "(lambda w: 2 * w - lax.stop_gradient(w))($)", want


@view
def inside_a_jit(b: Builder, want: Want):
    inner = b.pick("-w", "w.T.T", "w + 1", "jnp.flip(w)", "w * 2.0")
    wrap = b.pick("jax.jit", "jax.checkpoint")
    return f"{wrap}(lambda w: {inner})($)", want


@view
def inside_a_vmap(b: Builder, want: Want):
    only(len(want.shape) >= 2)
    inner = b.pick("-w", "jnp.flip(w)", "jnp.cumsum(w.ravel()).reshape(w.shape)")
    axis = b.axis(want.shape)
    return f"jax.vmap(lambda w: {inner}, {axis}, {axis})($)", want


@view
def inside_a_scan(b: Builder, want: Want):
    only(want.shape and want.shape[0])
    kind = b.pick("(c, 2 * w)", "(c + 1, w)", "(c + w.sum(), w + c.real)")
    zero = f"jnp.zeros((), {want.dtype!r})"
    return f"lax.scan(lambda c, w: {kind}, {zero}, $)[1]", want


@view
def in_a_cond(b: Builder, want: Want):
    return "lax.cond(x.sum() > 0, lambda w: -w, lambda w: 2 * w, $)", want


@view
def nonlinear(b: Builder, want: Want):
    only(want.dtype == REAL)
    texts = ("jnp.exp($ / 2)", "jnp.tanh($)", "jax.nn.softplus($)", "($ ** 2)")
    of_all = ("($ / jnp.sqrt(1 + jnp.sum($ ** 2)))", "jax.nn.softmax($)", "($ * $)")
    return b.pick(*texts, *of_all), want


@view
def fourier(b: Builder, want: Want):
    only(want.shape and want.shape[-1])
    if want.dtype == COMPLEX:
        return f"jnp.fft.{b.pick('fft', 'ifft')}($)", want
    num = want.shape[-1]
    return f"jnp.fft.irfft(jnp.fft.rfft($), {num})", want


@view
def custom_rule(b: Builder, want: Want):
    only(want.dtype == REAL)
    return f"{b.pick('odd_identity', 'strange_identity')}($)", want


@view
def product_of_two(b: Builder, want: Want):
    only(not b.frames)
    return f"($ * {b.base(want)})", want


@view
def matrix_product_of_two(b: Builder, want: Want):
    only(len(want.shape) == 2 and not b.frames)
    rank = b.size(1, 2)
    other = b.base(want.of((rank, want.shape[1])))
    return f"($ @ {other})", want.of((want.shape[0], rank))


@view
def sum_of_two(b: Builder, want: Want):
    only(not b.frames)
    sizes = [b.pick(size, size, 1) for size in want.shape]
    other = b.base(want.of(sizes))
    return b.pick(f"($ + {other})", f"({other} - $)"), want
