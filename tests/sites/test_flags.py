"""Programs as JAX traces them with the flags that are going to be its defaults."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from eqxbatch import filter_kfac
from ..helpers import drawn, normal
from ..layers import Case, vectors, weight
from . import adapter
from .oracle import compare


pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.versions]

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
ALL_FLAGS = (*FLAGS, "jax_use_simplified_jaxpr_constants")
# Before that, some of JAX's own rules of these classes are missing.
is_whole = jax.__version_info__ >= (0, 12)


@contextlib.contextmanager
def flags(*names):
    """Runs with these of the flags switched on, and all others off."""
    before = {name: getattr(jax.config, name) for name in ALL_FLAGS if known(name)}
    try:
        for name in before:
            jax.config.update(name, name in names)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def known(flag):
    return hasattr(jax.config, flag)


def needs(flag):
    return pytest.mark.skipif(not known(flag), reason=f"this JAX has no `{flag}`")


def remat(ws, x):
    """Rematerialised: nested, in loops, closures, on parameters alone, by policies."""
    w, v, shift = ws["w"], ws["v"], jnp.arange(4.0)
    layer = jax.checkpoint(
        lambda w, x: jnp.tanh(w @ x + shift),
        policy=jax.checkpoint_policies.dots_saveable,
    )
    twice = jax.checkpoint(lambda w, x: layer(w, jnp.sin(layer(w.T, x))))
    x = lax.scan(lambda x, w: (twice(w, x), None), x, ws["stack"])[0]
    x = jax.checkpoint(lambda x: jnp.sin(v * (w @ x)), prevent_cse=False)(x)
    normalised = jax.checkpoint(lambda w: jnp.sin(w) / jnp.sqrt(jnp.sum(w**2)))(w)
    some = jax.checkpoint(lambda w, x: (w @ x, w.T), prevent_cse=(False, True))
    y, transposed = some(normalised, x)
    # A gradient inside of the program.
    slope = jax.grad(lambda x: jnp.sum(layer(w, x)))(x)
    return transposed @ y + slope, jax.vmap(layer, (None, 0))(w, jnp.outer(x, x))


def named(ws, x):
    w, v = checkpoint_name(ws["w"], "weight"), ws["v"]
    layer = lambda w, x: checkpoint_name(jnp.tanh(w @ x), "hidden")
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    return jax.checkpoint(layer, policy=policy)(w, x) * v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def scaled(f, w, x, k):
    return f(w @ x) * k


def _scaled_backward(f, k, saved, d):
    w, x = saved
    # What a backward pass differentiates or calls.
    pull = jax.vjp(jax.checkpoint(lambda x: jnp.sin(w).T @ x), x)[1]
    product = jax.jit(lambda d, x: 2 * jnp.outer(d, x))
    return jax.checkpoint(lambda d: product(k * d, x))(d), pull(d)[0]


scaled.defvjp(lambda f, w, x, k: (scaled(f, w, x, k), (w, x)), _scaled_backward)


@jax.custom_vjp
def summed(w):
    """Of parameters alone; not elementwise."""
    return w / jnp.sqrt(jnp.sum(w**2))


summed.defvjp(lambda w: (summed(w), w), lambda w, d: (3 * jnp.cumsum(d, 1) * w,))


def reverse(ws, x):
    """Rules in reverse mode."""
    y = jax.checkpoint(lambda w, x: scaled(jnp.tanh, w, x, 3))(ws["w"], x)
    step = lambda y, w: (scaled(jnp.tanh, w, y, 1), None)
    return summed(ws["w"].T) @ lax.scan(step, y, ws["stack"])[0] * ws["v"]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(f, w, x):
    return f(w @ x)


@applied.defjvp
def _applied_jvp(f, primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return applied(f, w, x), 5 * (dw @ x) + w @ dx


@jax.custom_jvp
def bent(w):
    return jnp.where(w > 0, w, jnp.exp(w) - 1)


bent.defjvps(lambda t, _, w: t * jnp.where(w > 0, 2.0, jnp.exp(w)))


@jax.custom_jvp
def mixed(w):
    return w / jnp.sqrt(jnp.sum(w**2))


mixed.defjvp(lambda p, t: (mixed(*p), 2 * jnp.cumsum(t[0], 0)))


def forward(ws, x):
    """Rules in forward mode."""
    shift = np.arange(4.0)
    y = jax.checkpoint(lambda w, x: applied(jnp.sin, bent(w), x))(ws["w"], x)
    y = applied(lambda y: jnp.sin(y + shift), ws["w"].T, jax.nn.relu(y))
    step = lambda y, w: (jnp.tanh(applied(jnp.tanh, w, y)), None)
    return mixed(ws["w"]) @ lax.scan(step, y, ws["stack"])[0] * jax.nn.relu(ws["v"])


PROGRAMS = {
    "jax_remat3": (remat, named) if is_whole else (remat,),
    "jax_custom_vjp3": (reverse,),
    "jax_custom_jvp3": (forward,),
}


def weights():
    return {"w": weight(4, 4), "v": weight(4), "stack": weight(2, 4, 4) / 2}


def sites_of(fun):
    run = lambda ws, rows: fun(ws, *rows)
    sites = adapter.Sites.of(run, weights(), [weight(4)])
    assert sites.fallbacks == {}
    return [(place.leaf, place.kind, place.axes) for place in sites.places]


@pytest.mark.parametrize("flag", [pytest.param(x, marks=needs(x)) for x in FLAGS])
def test_sites_are_what_they_were(flag):
    fun = lambda ws, x: [each(ws, x) for each in PROGRAMS[flag]]
    with flags():
        before = sites_of(fun)
    with flags(flag):
        assert sites_of(fun) == before
    with flags(*ALL_FLAGS):
        assert sites_of(fun) == before
        compare(Case(weights(), fun, vectors(4)))


@needs("jax_use_simplified_jaxpr_constants")
def test_constants_in_programs():
    mask, shift = np.arange(16.0).reshape(4, 4) % 3, np.arange(4.0)
    fun = lambda ws, x: (ws["w"] * mask / (1 + mask)) @ x + shift * (ws["v"] + shift)
    with flags("jax_use_simplified_jaxpr_constants"):
        program, _ = compare(Case(weights(), fun, vectors(4)))
    assert program.fallbacks == {}


@needs("jax_remat3")
def test_kronecker_factors_of_a_rematerialised_network():
    model = drawn(eqx.nn.MLP, 16, 2, 17, 1, use_bias=False, key=jr.key(0))
    xs, ys = normal(jr.key(1), (3, 16), float), normal(jr.key(2), (3, 2), float)
    loss = lambda out, x, y: jnp.sum((out - y) ** 2)

    def found():
        run = lambda model, x, y: eqx.filter_checkpoint(model)(x)
        return filter_kfac(run, loss, in_axes=0)(model, xs, ys)

    with flags():
        expected = found()
    with flags("jax_remat3"):
        got = found()
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    shapes = {x.shape[-2:] for x in jax.tree.leaves(got)}
    assert {(16, 16), (17, 17)} <= shapes


def test_modes_of_rules():
    ruled = jax.checkpoint(lambda w: summed(w[0]))
    for names in ((), FLAGS):
        with flags(*names):
            reasons = [
                adapter.reason_without_mode(mode, ruled, [weight(3, 3)])
                for mode in ("forward", "reverse")
            ]
            assert "custom_vjp" in (reasons[0] or "")
            assert reasons[1] is None


@needs("jax_custom_vjp3")
def test_digests_know_the_programs_of_rules():
    def digest(factor):
        @jax.custom_vjp
        def fun(x):
            return factor * x

        fun.defvjp(lambda x: (fun(x), None), lambda _, d: (d,))
        return adapter.digest_of(jax.make_jaxpr(fun)(jnp.ones(3)))

    for names in ((), FLAGS):
        with flags(*names):
            assert digest(2.0) == digest(2.0) != digest(3.0)


@needs("jax_remat3")
def test_effects_keep_the_function_whole(capfd):
    @jax.checkpoint
    def layer(w, x):
        jax.debug.print("seen {}", x[0])
        return w @ x

    with flags("jax_remat3"):
        program, _ = compare(Case(weight(4, 4), layer, vectors(4)))
    assert program.fallbacks
    jax.effects_barrier()
    assert "seen" in capfd.readouterr().out


def objects():
    """A class of objects that are primitives, each with the program of `2 x`."""
    hijax = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "HiPrim"):
        pytest.skip("this JAX has no class of primitives")

    class Twice(hijax.HiPrim):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x):
            return 2 * x

        def batch(self, axis_data, args, dims):
            return Twice(jax.typeof(args[0]))(args[0]), dims[0]

        def jvp(self, primals, tangents):
            return self(primals[0]), self(tangents[0])

        vjp_fwd = lambda self, nonzeros, x: (self(x), None)
        vjp_bwd_retval = lambda self, saved, d: (2 * d,)

    return Twice


def test_objects(monkeypatch):
    twice = objects()
    apply = lambda x: twice(jax.typeof(x))(x)
    fun = lambda ws, x: (apply(ws[0]) @ apply(x), apply(ws[1] * x))
    case = Case([weight(4, 4), weight(4)], fun, vectors(4))
    # What is unknown may have no transpose. After a site, it is like anything else.
    fallbacks = compare(case)[0].fallbacks
    assert list(fallbacks) == [0]
    assert "no rule for `call_hi_primitive[Twice]`" in fallbacks[0]
    closed = jax.make_jaxpr(apply)(jnp.ones(3))
    assert adapter.name_of(closed.eqns[0]) == "call_hi_primitive[Twice]"
    assert adapter.called(closed.eqns[0]) is None
    # One of JAX's own, whose program is known to have its derivative.
    monkeypatch.setattr(twice, "__module__", "jax.numpy")
    with adapter.with_known_class("Twice", "einsum"):
        program, comparable = compare(case)
    assert comparable == [True, True]
    assert [place.is_isometry for place in program.places] == [True, True]


def test_integers_found_in_parameters_and_data():
    def fun(ws, x):
        w, v = ws
        rows = jnp.nonzero(v > 0, size=3)[0]
        return w[rows] @ x, v[jnp.clip(jnp.searchsorted(jnp.sort(v), x), 0, 3)] * x

    program, _ = compare(Case([weight(4, 4), weight(4)], fun, vectors(4)))
    assert program.fallbacks == {}
