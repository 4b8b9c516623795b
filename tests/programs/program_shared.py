"""Functions of parameters alone, for random programs: penalties, masks, stacks."""

from .program_draw import Builder, only, REAL, use, Var, view, Want


@view
def parametrised(b: Builder, want: Want):
    """Each entry is a function of one entry, or of the same entry of several arrays."""
    only(want.dtype == REAL)
    text = b.pick(
        "jax.nn.softplus($)",
        "jnp.exp($ * 0.3)",
        "jnp.tanh($) * 2 + $",
        "(lambda w: w * jax.nn.sigmoid(w) - w ** 3 / 9)($)",
        "jnp.sqrt(1 + jnp.square($))",
        "jax.nn.gelu($)",
        "jnp.clip($, -0.4, 0.7)",
        "jnp.where($ > 0, $, 0.1 * $)",
        "$ / (2 + jnp.cos($))",
        "odd_identity(jnp.sin($))",
    )
    return text, want


@view
def parametrised_by_two(b: Builder, want: Want):
    only(want.dtype == REAL)
    other = b.weight(want.of(want.shape))
    how = b.pick("$ * jnp.exp({})", "jnp.sin($ + {}) * {}", "$ / (2 + jnp.square({}))")
    return how.replace("{}", str(other)), want


@view
def normalised(b: Builder, want: Want):
    only(want.dtype == REAL and want.shape and 0 not in want.shape)
    norm = "jnp.sqrt(0.3 + jnp.sum(jnp.square(w), -1, keepdims=True))"
    text = b.pick(f"w / {norm}", "jax.nn.softmax(w)", f"w / jnp.sum({norm})")
    return f"(lambda w: {text})($)", want


@view
def straight_through(b: Builder, want: Want):
    only(want.dtype == REAL)
    text = b.pick("jnp.round(w)", "jnp.sign(w)", "w * 0.5")
    return f"(lambda w: w + lax.stop_gradient({text} - w))($)", want


@view
def frozen(b: Builder, want: Want):
    return f"lax.stop_gradient($) * {b.weight(())}", want


def penalty(b: Builder) -> str:
    w = b.weight(tuple(b.size() for _ in range(b.size(0, 2))))
    v = b.pick(w, b.weight((b.size(),)))
    return b.pick(
        f"jnp.sum(jnp.square({w}))",
        f"jnp.sum(jnp.abs({w})) * jnp.sum({v} ** 2)",
        f"jnp.sqrt(1 + jnp.sum({w} ** 2) + jnp.sum({v} ** 2))",
        f"jnp.sum(jnp.exp({w}) * jnp.sin({w}))",
        f"jnp.log(jnp.sum(jnp.exp({w})))",
        f"jnp.sum(jnp.tensordot({w}, {w}, 0) ** 2)",
        f"(lambda m: m @ m.T)(jnp.ravel({w})[None] + 1).sum()",
        f"jnp.max({w}) + jnp.sum(jnp.ravel({v})[:1])",
    )


@use
def penalised(b: Builder, h: Var):
    text = penalty(b)
    return b.let(
        b.pick(f"{h} + {text}", f"{h} * {text}", f"{h} - 0.1 * ({text} + {text})")
    )


@use
def penalised_in_a_scan(b: Builder, h: Var):
    w = b.weight((2, b.size()))
    u = b.weight(w.shape[1:])
    step = f"lambda c, w: (c + jnp.sum(w ** 2 * {u}), jnp.sum(jnp.exp(w) * {u}))"
    return b.let(f"(lambda o: {h} * o[0] + jnp.sum(o[1]))(lax.scan({step}, 1.0, {w}))")


@use
def layers_of_a_stack(b: Builder, h: Var):
    """A scan over layers that are stacked before, and changed on the way."""
    only(h.shape and h.dtype == REAL)
    num = h.shape[-1]
    ws = [b.weight((num,)) for _ in range(b.size())]
    listed = ", ".join(map(str, ws))
    stacked = b.pick(
        f"jnp.stack([{listed}])",
        f"jnp.concatenate([{', '.join(f'{w}[None]' for w in ws)}])",
        f"jnp.stack([{listed}], 1).T",
        f"jnp.pad(jnp.stack([{listed}]), ((1, 0), (0, 0)))",
    )
    stacked = b.pick(stacked, f"jnp.sinh({stacked})", f"{stacked} * {b.weight((num,))}")
    own = b.weight((num,))
    inside = b.pick("w", "jnp.exp(w)", f"w * {own}", f"(w + jnp.square({own}))")
    return b.let(
        f"lax.scan(lambda h, w: (jnp.tanh(h * {inside} + w), None), {h}, {stacked})[0]"
    )


@use
def among_data(b: Builder, h: Var):
    """What is put between data, or chosen instead of it."""
    only(h.shape and h.dtype == REAL)
    w = b.weight((b.size(), *h.shape[1:]))
    v = b.weight(h.shape)
    return b.let(
        b.pick(
            f"jnp.concatenate([{h}, {w}])[:{h.shape[0]}]",
            f"jnp.concatenate([{w}, {h}, {w}]) ** 2",
            f"jnp.stack([{h}, {v}, {v}]).sum(0)",
            f"jnp.where({h} > 0, {v}, {h} * {v})",
            f"{h} / (2 + jnp.square({v})) + {h} / jnp.exp({v} * 0.2)",
            f"lax.pad({v}, 0.5, [({b.size(-1, 2)}, 1, 1)]"
            f" + [(0, 0, 0)] * {len(h.shape) - 1})[:{h.shape[0]}]",
            f"jnp.concatenate([{h}, {h}]).at[1:{1 + h.shape[0]}].set({v})",
        )
    )


@use
def frozen_branch(b: Builder, h: Var):
    w = b.weight(h.shape)
    return b.let(f"{h} + lax.stop_gradient(jnp.sin({h} * {w}))")
