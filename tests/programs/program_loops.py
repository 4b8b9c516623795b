"""Programs inside of programs: loops, branches, rematerialisation, custom rules."""

import math

from .program_draw import Builder, REAL, Rejected, use, Var, Want


_POLICIES = (
    "None",
    "jax.checkpoint_policies.dots_saveable",
    "jax.checkpoint_policies.everything_saveable",
)


def inline(b: Builder, h: Var) -> str:
    """An expression of the type of `h` in which it meets parameters."""
    b.depth += 1
    try:
        return _inline(b, h)
    finally:
        b.depth -= 1


def _inline(b: Builder, h: Var) -> str:
    shape = h.shape
    simple = [
        lambda: f"({h} * {b.weight(shape[b.size(0, len(shape)) :])})",
        lambda: f"({h} + {b.weight(shape[b.size(0, len(shape)) :])})",
        lambda: f"({h} - {b.weight(shape)})",
    ]
    if shape:
        num = shape[-1]
        simple += [
            lambda: f"({h} @ {b.weight((num, num))})",
            lambda: f"({h} @ {b.weight((num, num))}.T + {b.weight((num,))})",
            lambda: f"({h} + {b.weight((3, *shape))}[t % 3].sum(0))",
            lambda: f"({h} + {b.weight((2, *shape))}[t[0] % 2])",
            lambda: (
                f"({h} + jnp.take({b.weight((b.size(1, 4), *shape))}, t, axis=0, "
                "mode='fill', fill_value=0).mean(0))"
            ),
            lambda: _tied(b, h),
            lambda: (
                f"jnp.einsum('...i,ij,kj->...k', {h}, *[{b.weight((num, num))}] * 2)"
            ),
        ]
    if b.depth <= 2 and b.chance(0.4):
        return wrapped(b, h)
    return b.pick(*simple)()


def _tied(b: Builder, h: Var) -> str:
    num = h.shape[-1]
    w = b.weight((b.size(1, 3), num))
    look = b.pick(
        "w[t % len(w)].sum(0)",
        "w[t[0] % len(w)]",
        "jnp.take(w, t, axis=0, mode='fill', fill_value=0).sum(0)",
    )
    return f"(lambda w: jnp.tanh({h} + {look}) @ w.T @ w)({w})"


def wrapped(b: Builder, h: Var) -> str:
    """Within a call or a loop of some kind."""
    inner = Var(f"h{b.depth}", h.shape, h.dtype)
    kind = b.pick(
        "scan", "scan", "scan", "remat", "jit", "cond", "switch", "vmap", "fori", "map"
    )
    if kind in ("scan", "map"):
        return _scanned(b, h, inner, kind)
    body = inline(b, inner)
    function = f"lambda {inner}: {body}"
    if kind == "remat":
        settings = f"prevent_cse={b.chance(0.5)}, policy={b.pick(*_POLICIES)}"
        return f"jax.checkpoint({function}, {settings})({h})"
    if kind == "jit":
        return f"jax.jit({function})({h})"
    if kind == "cond":
        other = inline(b, inner)
        return f"lax.cond(x.sum() > 0, {function}, lambda {inner}: {other}, {h})"
    if kind == "switch":
        branches = f"[{function}, lambda {inner}: 2 * {inner}, jnp.tanh]"
        return f"lax.switch(t[0].astype(jnp.int32), {branches}, {h})"
    if kind == "fori":
        return f"lax.fori_loop(0, 2, lambda _, {inner}: jnp.tanh({body}), {h})"
    return f"jax.vmap({function})(jnp.stack([{h}, {h} / 2])).sum(0)"


def _scanned(b: Builder, h: Var, inner: Var, kind: str) -> str:
    length = b.pick(1, 1, 2, 2, 3, 3, 0)
    frame = b.loop(length)
    try:
        body = inline(b, inner)
    finally:
        b.frames.remove(frame)
    slices = f"({', '.join(frame.slices)},)" if frame.slices else "()"
    if kind == "map":
        if not frame.slices:
            raise Rejected("nothing to map over")
        function = f"lambda {frame.name}: (lambda {inner}: {body})({h})"
        return f"lax.map({function}, {slices}).sum(0)"
    carry = b.pick(f"jnp.tanh({body})", body, f"({inner} + {body}) / 2")
    out = b.pick("None", inner.text)
    settings = (
        f"length={length}, reverse={b.chance(0.3)}, unroll={b.pick(1, 1, 2, True)}"
    )
    step = f"lambda {inner}, {frame.name}: ({carry}, {out})"
    scan = f"lax.scan({step}, {h}, {slices}, {settings})"
    if out != "None" and b.chance(0.4):
        return f"{scan}[1].sum(0)"
    return f"{scan}[0]"


@use
def nested(b: Builder, h: Var) -> Var:
    return b.let(wrapped(b, h))


@use
def nested_and_outside(b: Builder, h: Var) -> Var:
    """What a loop uses is used outside of it, too."""
    out = b.let(wrapped(b, h))
    return b.let(inline(b, out))


def _stacked(b: Builder, num: int, *shape: int) -> Var:
    return b.weight(Want((num, *shape), REAL))


@use
def scan_of_a_table(b: Builder, h: Var) -> Var:
    """Tables for each layer: sliced and looked up, and used along the stacked axis."""
    length, rows, width = b.size(1, 3), b.size(1, 3), b.size(1, 2)
    w = _stacked(b, length, rows, width)
    b.known.append(w)
    look = b.pick(
        "w[t % len(w)].sum(0)",
        "w[t[0] % len(w)]",
        "jnp.take(w, t, axis=0, mode='fill', fill_value=0).sum(0)",
    )
    body = b.pick(
        f"jnp.tanh(c + {look})",
        f"jnp.tanh((c + {look}) @ w.T) @ w",
        f"jnp.tanh(c + {look}) + jnp.sin(w).sum(0)",
        f"jnp.tanh(c * w[0] + {look})",
    )
    start = f"jnp.resize({h}, ({width},))"
    text = f"lax.scan(lambda c, w: ({body}, c), {start}, {w}, reverse={b.chance(0.3)})"
    out = b.let(f"{text}[{b.pick(0, 1)}]")
    other = b.pick(
        None,
        f"{w}[t % {length}]",
        f"{w}[t[0] % {length}]",
        f"{w}[:, t % {rows}]",
        f"{w} @ jnp.ones({width})",
        f"{w}[0] @ {w}[-1].T",
        f"jnp.take({w}, t, axis=0, mode='fill', fill_value=0)",
    )
    if other is None:
        return out
    return b.let(
        f"jnp.concatenate([jnp.ravel({out}), jnp.sum({other}, keepdims=True).ravel()])"
    )


@use
def scan_with_a_carried_parameter(b: Builder, h: Var) -> Var:
    w = b.weight(h.shape)
    body = b.pick(
        "(c[0] * c[1], c[1] / 2)",
        "(jnp.tanh(c[0] + c[1]), c[1])",
        "(c[0] * a, c[1] * jnp.sin(c[0]))",
    )
    text = f"lax.scan(lambda c, a: ({body}, c[0]), ({h}, {w}), jnp.arange(2.0))"
    return b.let(f"{text}[0][{b.pick(0, 1)}]")


@use
def scan_that_returns_a_parameter(b: Builder, h: Var) -> Var:
    w = b.weight(h.shape)
    text = f"lax.scan(lambda c, _: (c * {w}, {w}), {h}, None, length=2)"
    return b.let(f"{text}[0] + {text}[1].sum(0)")


@use
def while_of_constants(b: Builder, h: Var) -> Var:
    w = b.weight(h.shape)
    text = "lax.while_loop(lambda s: jnp.sum(jnp.abs(s)) > 1, lambda s: s / 2, x)"
    return b.let(f"{h} * {w} * {text}.sum()")


@use
def associative_scan(b: Builder, h: Var) -> Var:
    if not h.shape:
        raise Rejected("no axes")
    w = b.weight(h.shape)
    return b.let(f"lax.associative_scan(jnp.multiply, {h} * {w})")


@use
def odd_product(b: Builder, h: Var) -> Var:
    return b.let(f"odd({b.weight(h.shape)}, {h})")


@use
def remat_with_settings_per_input(b: Builder, h: Var) -> Var:
    w = b.weight(h.shape)
    marks = tuple(b.chance(0.5) for _ in range(2))
    return b.let(
        f"jax.checkpoint(lambda w, h: jnp.sin(w * h), prevent_cse={marks})({w}, {h})"
    )


@use
def stacked_layers(b: Builder, h: Var) -> Var:
    if not h.shape or not math.prod(h.shape):
        raise Rejected("no axes")
    num, length = h.shape[-1], b.pick(0, 1, 2, 2, 3, 3)
    w, bias = _stacked(b, length, num, num), _stacked(b, length, num)
    step = "lambda c, p: (jnp.tanh(c @ p[0].T + p[1]), None)"
    return b.let(f"lax.scan({step}, {h}, ({w}, {bias}), reverse={b.chance(0.3)})[0]")
