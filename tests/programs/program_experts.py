"""Products with the matrices of groups, as those of experts, for random programs."""

from jax.lax import RaggedDotDimensionNumbers

from ..experts import ragged_dot
from .program_draw import Builder, joined, only, REAL, SINGLE, use_on_request, Var


FUNCTIONS = {
    "ragged_dot": ragged_dot,
    "RaggedDotDimensionNumbers": RaggedDotDimensionNumbers,
}


def sizes(b: Builder, rows: int) -> tuple[str, int]:
    """The sizes of groups, which the example may choose: none, all rows, or more."""
    if b.chance(0.3):
        ends = sorted(b.rng.randrange(rows + 1) for _ in range(b.size()))
        numbers = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return f"np.array({numbers}, np.int32)", len(numbers)
    text = b.pick(
        f"jnp.clip(t, 0, {rows})",
        f"jnp.clip(t, 0, {rows})[:2]",
        f"jnp.bincount(jnp.abs(t.astype(jnp.int32)) % 3, length=3) * {b.pick(1, rows)}",
        f"jnp.clip(t, 0, {rows}).astype(jnp.uint8)[:1]",
        f"(x.ravel()[:1] > 0).astype(jnp.int32) * {rows}",
    )
    return text, b.struct(text).shape[0]


@use_on_request
def experts(b: Builder, h: Var):
    only(h.shape and h.size)
    rows = h if len(h.shape) == 2 else b.let(f"{h}.reshape(-1, {h.shape[-1]})")
    text, num = sizes(b, rows.shape[0])
    dtype = b.pick(REAL, REAL, REAL, SINGLE)
    w = b.weight((num, rows.shape[1], b.size()), dtype)
    if dtype == SINGLE:
        rows = b.let(f"{rows}.astype(jnp.float32)")
    wanted = b.pick("", "", ", preferred_element_type=np.float64")
    out = b.let(f"ragged_dot({rows}, {w}, {text}{wanted})")
    return joined(b, h, out) if b.chance(0.3) else out


@use_on_request
def experts_up_and_down(b: Builder, h: Var):
    """Two layers, the second of which may have the matrices of the first."""
    only(len(h.shape) == 2 and h.size)
    text, num = sizes(b, h.shape[0])
    width = h.shape[1]
    up = b.weight((num, width, b.size()))
    down = b.pick(f"{up}.swapaxes(1, 2)", str(b.weight((num, up.shape[2], width))))
    hidden = b.let(f"jnp.tanh(ragged_dot({h}, {up}, {text}))")
    return b.let(f"{h} + ragged_dot({hidden}, {down}, {text})")


@use_on_request
def experts_of_one_matrix(b: Builder, h: Var):
    """All of one parameter, or of one that a product without groups has, too."""
    only(len(h.shape) == 2 and h.size)
    text, num = sizes(b, h.shape[0])
    w = b.weight((h.shape[1], b.size()))
    how = b.pick(
        f"jnp.broadcast_to({w}, ({num}, *{w}.shape))",
        f"jnp.stack([{w}] * {num})",
        f"{w} * jnp.arange(1.0, {num + 1})[:, None, None]",
    )
    out = b.let(f"ragged_dot({h}, {how}, {text})")
    return b.let(f"{out} + {h} @ {w}") if b.chance(0.5) else out


@use_on_request
def experts_in_a_loop(b: Builder, h: Var):
    """Layers of experts in a `scan`, maybe rematerialised, or used in each step."""
    only(len(h.shape) == 2 and h.size)
    text, num = sizes(b, h.shape[0])
    width, length = h.shape[1], b.size()
    is_sliced = b.chance(0.6)
    w = b.weight((*((length,) if is_sliced else ()), num, width, width))
    step = "lambda c, v: (jnp.tanh(ragged_dot(c, {}, s)) + c, None)"
    step = step.format("v" if is_sliced else "w")
    step = f"jax.checkpoint({step})" if b.chance(0.4) else step
    xs = "w" if is_sliced else "None"
    return b.let(
        f"(lambda w, s, h: lax.scan({step}, h, {xs}, length={length})[0])"
        f"({w}, {text}, {h})"
    )


@use_on_request
def experts_of_parameters(b: Builder, h: Var):
    """Rows that are parameters, too: those of a table, or with other groups."""
    only(len(h.shape) == 2 and h.size)
    text, num = sizes(b, h.shape[0])
    rows = b.weight(h.shape)
    w = b.weight((num, h.shape[1], b.size()))
    which = b.pick(f"{rows}", f"({h} + {rows})", f"({h} * {rows})")
    return joined(b, h, b.let(f"ragged_dot({which}, {w}, {text})"))


@use_on_request
def experts_of_a_branch(b: Builder, h: Var):
    only(len(h.shape) == 2 and h.size)
    text, num = sizes(b, h.shape[0])
    w = b.weight((num, h.shape[1], b.size()))
    return b.let(
        f"(lambda w, s, h: lax.cond(h[0, 0] > 0, lambda: ragged_dot(h, w, s), "
        f"lambda: jnp.sin(ragged_dot(2 * h, w, s))))({w}, {text}, {h})"
    )
