"""Products with derivatives of their own, and branches, for random programs.

The derivatives are not those of the values, but of another function: so second
derivatives are symmetric, and a program that looks at the value is wrong.
"""

import functools

import jax
import jax.numpy as jnp

from .program_draw import Builder, only, REAL, use_on_request, Var
from .program_loops import inline


@jax.custom_vjp
def quantised_product(w, h):
    """Has twice the derivative that it would have without being rounded."""
    return h @ (jnp.round(4 * w) / 4)


quantised_product.defvjp(
    lambda w, h: (quantised_product(w, h), (w, h)),
    lambda res, d: (2 * jnp.einsum("...i,...j->ij", res[1], d), 2 * d @ res[0].T),
)


@jax.custom_vjp
def clipped_product(w, h):
    """Has the derivative of the product with `clip(w)`, and of another sum."""
    return h @ w, jnp.sum(h)


def _clipped_bwd(res, d):
    w, h = res
    of_product = jnp.tensordot(h, d[0], [[*range(h.ndim - 1)]] * 2)
    is_inside = jnp.abs(w) < 0.5
    dw = jnp.where(is_inside, of_product - d[1] * h.sum(), 0)
    inner = jnp.clip(w, -0.5, 0.5)
    return dw, d[0] @ inner.T - d[1] * inner.sum()


clipped_product.defvjp(
    lambda w, h: (clipped_product(w, h), (w, h)),
    _clipped_bwd,
)


@jax.custom_vjp
def scaled_outer(w, h):
    return w * h.sum()


scaled_outer.defvjp(
    lambda w, h: (scaled_outer(w, h), (w, h)),
    lambda res, d: (
        d / 3 * jnp.sum(res[1]),
        jnp.full_like(res[1], (d * res[0]).sum() / 3),
    ),
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def sine_product(w, h, scale):
    """Has the derivative of `scale * h @ sin(w)`."""
    return h @ w


@sine_product.defjvp
def _sine_jvp(scale, primals, tangents):
    (w, h), (dw, dh) = primals, tangents
    moved = dh @ jnp.sin(w) + h @ (jnp.cos(w) * dw)
    return sine_product(w, h, scale), scale * moved


@jax.custom_jvp
def two_sums(w, h):
    return w * h, w + h


@two_sums.defjvp
def _two_sums_jvp(primals, tangents):
    (w, h), (dw, dh) = primals, tangents
    slope = 1 / (1 + h**2)
    moved = dw * jnp.arctan(h) + w * slope * dh
    return two_sums(w, h), (moved, 2 * moved)


@jax.custom_vjp
def custom_layer(w, b, h):
    """Has the derivative of `h @ sin(w) - 2 b`."""
    return h @ w + b


custom_layer.defvjp(
    lambda w, b, h: (custom_layer(w, b, h), (w, b, h)),
    lambda res, d: (
        jnp.cos(res[0]) * jnp.einsum("...i,...j->ij", res[2], d),
        -2 * d.sum([*range(d.ndim - res[1].ndim)]),
        d @ jnp.sin(res[0]).T,
    ),
)


FUNCTIONS = {
    "custom_layer": custom_layer,
    "quantised_product": quantised_product,
    "clipped_product": clipped_product,
    "scaled_outer": scaled_outer,
    "sine_product": sine_product,
    "two_sums": two_sums,
}


def _custom(b: Builder, h: Var) -> str:
    """An expression of a value of a shape that may be another."""
    num = h.shape[-1]
    w = b.weight((num, num))
    return b.pick(
        f"quantised_product({w}, {h})",
        f"quantised_product({w}, quantised_product({w}, {h}))",
        f"(lambda y: y[0] + y[1])(clipped_product({w}, {h}))",
        f"clipped_product({w}, {h})[{b.pick(0, 1)}]",
        f"sine_product({w}, {h}, {b.pick(-2.0, 3.0)})",
        f"(lambda y: jnp.sin(y[0]) * y[1])(two_sums({b.weight(h.shape)}, {h}))",
        f"scaled_outer({b.weight(h.shape)}, {h})",
        f"jax.vmap(sine_product, (None, 0, None))({w}, jnp.stack([{h}] * 2), 2.0)[1]",
        f"jax.checkpoint(quantised_product)({w}, {h})",
        f"lax.scan(lambda c, w: (jnp.tanh(quantised_product(w, c)), None), {h}, "
        f"{b.weight((2, num, num))})[0]",
        f"lax.cond(x.sum() > 0, lambda h: sine_product({w}, h, 2.0), lambda h: h, {h})",
    )


@use_on_request
def custom_product(b: Builder, h: Var):
    only(h.shape and h.dtype == REAL)
    return b.let(_custom(b, h))


@use_on_request
def custom_product_and_another(b: Builder, h: Var):
    only(h.shape and h.dtype == REAL)
    out = b.let(_custom(b, h))
    return b.let(inline(b, out))


@use_on_request
def custom_product_and_bias(b: Builder, h: Var):
    """Where the tangents of parameters are added, with one shape or with several."""
    only(h.shape and h.dtype == REAL)
    num = h.shape[-1]
    w, bias = b.weight((num, num)), b.weight(b.pick((num,), h.shape))
    own = f"(lambda h: custom_layer({w}, {bias}, h))"
    return b.let(
        b.pick(
            f"{own}({h})",
            f"{own}(jnp.tanh({own}({h})))",
            f"jax.vmap{own}(jnp.stack([{h}] * 2))[0]",
            f"jax.grad(lambda h: jnp.sum(jnp.sin(h @ {w} + {bias}) * h))({h})",
            f"lax.cond(x.sum() > 0, {own}, jnp.sin, {h})",
        )
    )


_INDICES = (
    "(x.sum() > 0).astype(int)",
    "t[0].astype(jnp.int32)",
    "(t[1] % 3).astype(jnp.int32)",
    "(jnp.sum({}) > 0).astype(int)",
)


@use_on_request
def branched(b: Builder, h: Var):
    """One of several branches, chosen by data, or by parameters alone."""
    only(h.dtype == REAL)
    index = b.pick(*_INDICES).format(b.weight((b.size(),)))
    inner = Var("h1", h.shape, h.dtype)
    branches = [f"lambda h1: {inline(b, inner)}" for _ in range(b.size(2, 3))]
    branches += b.subset(["jnp.tanh", "lambda h1: lax.stop_gradient(h1)"])
    return b.let(f"lax.switch({index}, [{', '.join(branches)}], {h})")


@use_on_request
def branched_by_step(b: Builder, h: Var):
    """A loop whose steps are not alike."""
    only(h.dtype == REAL)
    inner = Var("h1", h.shape, h.dtype)
    branches = [f"lambda h1: jnp.tanh({inline(b, inner)})" for _ in range(2)]
    index = b.pick("i % 2", "(i + t[0].astype(jnp.int32)) % 2")
    step = f"lambda h, i: (lax.switch({index}, [{', '.join(branches)}], h), h)"
    return b.let(f"lax.scan({step}, {h}, jnp.arange({b.size(1, 3)}))[0]")


@use_on_request
def branch_of_a_function(b: Builder, h: Var):
    """Parameters that only one branch makes something of, or that it returns."""
    only(h.dtype == REAL)
    w, v = b.weight(h.shape), b.weight(h.shape)
    first = b.pick("h * jnp.exp({})", "{} + 0 * h", "{}", "h / (2 + {} ** 2)").format(w)
    second = b.pick("h * {0} + {0}", "h - {0}", "h * jnp.tril(jnp.ones({0}.shape))")
    only("tril" not in second or len(h.shape) >= 2)
    pair = f"lambda h: {first}, lambda h: {second.format(v)}"
    return b.let(f"lax.cond(jnp.sum({h}) > 0, {pair}, {h})")
