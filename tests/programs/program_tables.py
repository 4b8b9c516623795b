"""Lookups of parameters, for random programs: rows of tables, by any tokens."""

from .program_draw import Builder, joined, only, use, Var


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
    mode = b.pick("'promise_in_bounds'", "'clip'")
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
