"""What is done for XLA for CPUs: layouts, mirror images, and programs kept apart."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import (
    filter_batch_kernel,
    filter_micro_vmap,
    filter_microbatch,
    HostStore,
    Mean,
    MonteCarloKernel,
)
from eqxbatch._base.cpu import (
    evaluate_in_loop,
    in_opaque_branch,
    mirrored,
    with_mirror_image,
)
from eqxbatch._kernels import called
from eqxbatch._ntk import average
from ..helpers import assert_same, drawn, memory, normal, spread, variants


pytestmark = pytest.mark.cpu


def conv_layouts(fun, *args, platform="cpu"):
    """The layouts of all convolutions where `fun` is compiled for a platform."""
    lowered = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,))
    return re.findall(r"dim_numbers = (\S.*?->\[.*?\])", lowered.as_text())


CHANNELS_FIRST = "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]"
CHANNELS_LAST = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"

CASES = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": "SAME"},
    "groups": {"groups": 2},
    "no_bias": {"use_bias": False},
    "circular": {"padding": 1, "padding_mode": "CIRCULAR"},
}


# Each number of dimensions, and what changes the layout most.
DENSE = ((1, "circular"), (2, "groups"), (3, "dilation"))
EACH = [(dims, case) for dims in (1, 2, 3) for case in CASES]


@pytest.mark.parametrize(
    ("dims", "case"), variants(EACH, *(x for x in EACH if x not in DENSE))
)
def test_equals_dense(dims, case, getkey):
    conv = drawn(eqx.nn.Conv, dims, 2, 4, 3, key=getkey(), **CASES[case])
    x = normal(getkey(), (9, 2, *(7, 6, 5)[:dims]))
    arrays, static = eqx.partition(conv, eqx.is_array)

    def loss(arrays, x, blocked):
        conv = eqx.combine(arrays, static)
        run = filter_micro_vmap(conv, microbatch_size=3) if blocked else jax.vmap(conv)
        out = run(x)
        return jnp.sum(jnp.sin(out)), out

    # The derivative of every layout, in data and weights.
    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    both = jax.jit(lambda *args: (grad(*args, True), grad(*args, False)))
    (got, out), (expected, wanted) = both(arrays, x)
    assert_same(out, wanted)
    assert_same(got, expected, tol=1e-4)


@pytest.mark.parametrize("case", spread(("stride", "plain", "groups"), 1))
def test_transposed_convolutions(case, getkey):
    kwargs = dict(CASES[case].items())
    conv = drawn(eqx.nn.ConvTranspose2d, 2, 4, 3, key=getkey(), **kwargs)
    x = normal(getkey(), (9, 2, 7, 6))
    micro = filter_micro_vmap(conv, microbatch_size=3)
    assert_same(micro(x), eqx.filter_jit(eqx.filter_vmap(conv))(x))


@pytest.mark.parametrize("dtype", spread((jnp.bfloat16, jnp.float16), 1))
def test_other_dtypes(dtype, getkey):
    conv = drawn(eqx.nn.Conv2d, 2, 4, 3, key=getkey(), dtype=dtype)
    x = normal(getkey(), (9, 2, 7, 6), dtype)
    micro = filter_micro_vmap(conv, microbatch_size=3)
    assert_same(micro(x), eqx.filter_jit(eqx.filter_vmap(conv))(x))
    assert conv_layouts(lambda x: micro(x), x) == [CHANNELS_LAST]


@pytest.mark.parametrize("dtype", spread((jnp.complex64, jnp.int32), 1))
def test_dtypes_that_layers_do_not_have(dtype, getkey):
    draw = np.random.default_rng(0)
    shapes = (3, 2, 3, 3), (9, 2, 7, 6)
    w, x = (jnp.asarray(draw.integers(-9, 9, shape), dtype) for shape in shapes)
    fun = lambda x: jax.lax.conv_general_dilated(x[None], w, (1, 1), "VALID")[0]
    micro = filter_micro_vmap(fun, microbatch_size=3)
    assert_same(micro(x), jax.jit(jax.vmap(fun))(x))


@pytest.mark.versions
def test_loops_have_channels_last(getkey):
    conv = drawn(eqx.nn.Conv2d, 2, 4, 3, key=getkey())
    x = normal(getkey(), (9, 2, 7, 6))
    jitted = eqx.filter_jit(lambda x: jax.nn.relu(conv(x)))
    for fun in (lambda x: conv(x), jitted):
        micro = filter_micro_vmap(fun, microbatch_size=3)
        assert conv_layouts(micro, x) == [CHANNELS_LAST]
        # What is compiled for another device, wherever it is traced, is as it was.
        for platform in ("cuda", "tpu"):
            assert conv_layouts(micro, x, platform=platform) == [CHANNELS_FIRST]
    # Outside of a loop, XLA does it.
    micro = filter_micro_vmap(lambda x: conv(x), microbatch_size=9)
    assert CHANNELS_LAST not in conv_layouts(micro, x)


@pytest.mark.versions
def test_checkpoints_have_channels_last(getkey):
    conv = drawn(eqx.nn.Conv2d, 2, 4, 3, key=getkey())
    x = normal(getkey(), (9, 2, 7, 6))
    saveable = jax.checkpoint_policies.dots_saveable
    for policy, layout in ((None, CHANNELS_LAST), (saveable, CHANNELS_FIRST)):
        # A policy does not find convolutions in a choice of a layout.
        fun = jax.checkpoint(lambda x: jnp.tanh(conv(x)), policy=policy)
        micro = filter_micro_vmap(fun, microbatch_size=3)
        assert conv_layouts(lambda x, micro=micro: micro(x), x) == [layout]
    micro = filter_micro_vmap(jax.checkpoint(lambda x: conv(x)), microbatch_size=3)
    grad = lambda run: jax.grad(lambda x: jnp.sum(jnp.sin(run(x))))
    both = jax.jit(lambda x: (grad(micro)(x), grad(jax.vmap(conv))(x)))
    assert_same(*both(x), tol=1e-4)


@pytest.mark.parametrize("outputs", (16, 17))
def test_one_channel_to_a_few_is_left_as_it_is(outputs, getkey):
    # Channels last would be several times slower.
    conv = drawn(eqx.nn.Conv2d, 1, outputs, 3, key=getkey())
    x = normal(getkey(), (9, 1, 7, 6))
    micro = filter_micro_vmap(lambda x: conv(x), microbatch_size=3)
    layout = CHANNELS_FIRST if outputs == 16 else CHANNELS_LAST
    assert conv_layouts(micro, x) == [layout]


@pytest.mark.versions
def test_gradients_in_microbatches_have_channels_last(getkey):
    conv = drawn(eqx.nn.Conv2d, 2, 4, 3, key=getkey())
    x = normal(getkey(), (9, 2, 7, 6))
    loss = lambda conv, x: jnp.mean(jax.vmap(conv)(x) ** 2)
    grad = eqx.filter_grad(loss)
    micro = filter_microbatch(
        grad, in_axes=(None, 0), microbatch_size=3, accumulator=Mean()
    )
    assert_same(micro(conv, x), eqx.filter_jit(grad)(conv, x), tol=1e-4)
    layouts = conv_layouts(lambda x: micro(conv, x).weight, x)
    assert layouts == [CHANNELS_LAST] * 2


@pytest.mark.versions
def test_derivatives_keep_what_those_of_convolutions_keep(getkey):
    # And not what they would on each of the platforms.
    x, w = normal(getkey(), (4, 2, 7, 6)), normal(getkey(), (3, 2, 3, 3))
    fun = lambda x, w: jax.lax.conv_general_dilated(jnp.tanh(x), w, (1, 1), "VALID")
    closed = jax.make_jaxpr(fun)(x, w)
    in_loop = lambda *args: evaluate_in_loop(closed.jaxpr, closed.consts, list(args))
    assert_same(*jax.jit(lambda x, w: (in_loop(x, w), [fun(x, w)]))(x, w))

    def kept(fun):
        pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], x, w)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert kept(in_loop) == kept(fun)


@pytest.mark.versions
def test_branches(getkey):
    conv = drawn(eqx.nn.Conv2d, 2, 3, 2, key=getkey())
    x = normal(getkey(), (4, 2, 5, 4))
    # Whether the one microbatch runs is only known then.
    micro = filter_micro_vmap(conv, num_real_microbatches=jnp.array(1))
    assert {*conv_layouts(lambda x: micro(x), x)} == {CHANNELS_LAST}
    assert_same(micro(x), jax.jit(jax.vmap(conv))(x))

    def kernel(x, y=None):
        first, second = (jax.vmap(conv)(x).reshape(len(x), -1) for x in (x, y))
        return first @ second.T

    # A block of a kernel is in a branch, so that it is a program of its own.
    blocks = filter_batch_kernel(kernel, block_size=None)
    assert {*conv_layouts(blocks, x, x)} == {CHANNELS_LAST}
    hosted = filter_batch_kernel(kernel, block_size=2, store=HostStore())
    y = normal(getkey(), (4, 2, 5, 4))
    assert_same(jnp.asarray(hosted(x, y)), jax.jit(kernel)(x, y), tol=1e-4)


@pytest.mark.versions
def test_rules_of_functions_around_convolutions_are_kept(getkey):
    conv = drawn(eqx.nn.Conv1d, 1, 1, 1, key=getkey())

    @jax.custom_vjp
    def double(x):
        return 2 * conv(x)

    double.defvjp(lambda x: (2 * conv(x), x), lambda _, ct: (100 * ct,))
    x = normal(getkey(), (8, 1, 3))
    micro = filter_micro_vmap(lambda x: double(conv(x)), microbatch_size=2)
    total = lambda x: jax.vmap(lambda x: double(conv(x)))(x).sum()
    both = jax.jit(
        lambda x: (jax.grad(lambda x: micro(x).sum())(x), jax.grad(total)(x))
    )
    assert_same(*both(x))


@pytest.mark.versions
def test_effects_are_kept(getkey, capfd):
    conv = drawn(eqx.nn.Conv1d, 1, 1, 1, key=getkey())

    def fun(x):
        jax.debug.print("sum {s}", s=x.sum())
        return conv(x)

    x = jnp.zeros((4, 1, 3))
    expected = jax.jit(jax.vmap(conv))(x)
    assert_same(filter_micro_vmap(fun, microbatch_size=2)(x), expected)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum 0.0") == 4


@pytest.mark.versions
def test_jaxprs_with_literals_constants_and_unused_outputs(getkey):
    conv = drawn(eqx.nn.Conv1d, 1, 1, 1, key=getkey())
    table = normal(getkey(), (3,))

    def fun(x):
        y = conv(x) * 2.0 + table[None]
        top, _ = jax.lax.top_k(y, 1)
        return y, top, x, jnp.array(3.0), conv(y) @ jnp.ones(3)

    x = normal(getkey(), (1, 3))
    closed = jax.make_jaxpr(fun)(x)
    run = functools.partial(evaluate_in_loop, closed.jaxpr, closed.consts)

    @jax.jit
    def results(x):
        mapped = jax.vmap(lambda x: run([x])[0])(x[None])
        return tuple(run([x])), fun(x), mapped[0]

    got, expected, mapped = results(x)
    assert_same(got, expected)
    assert_same(mapped, expected[0])


@pytest.mark.parametrize("size", spread((700, 300), 1))
def test_large_matrices_are_mirrored_in_pieces_on_cpus_only(size, getkey):
    x = normal(getkey(), (size, size))
    expected = np.triu(x) + np.triu(x, 1).T
    weights = normal(getkey(), x.shape)

    @jax.jit
    def results(x):
        gradient = jax.grad(lambda x: jnp.sum(weights * mirrored(x)))(x)
        return mirrored(x), jax.vmap(mirrored)(x[None])[0], gradient

    one, mapped, gradient = results(x)
    assert_same(one, expected, tol=0)
    assert_same(mapped, expected, tol=0)
    assert_same(gradient, np.triu(weights) + np.tril(weights, -1).T)
    # The places of pieces are constants: no program computes them.
    assert "cumsum" not in str(jax.make_jaxpr(mirrored)(x))
    for platform, is_in_pieces in (("cpu", True), ("cuda", False)):
        lowered = jax.jit(mirrored).trace(x).lower(lowering_platforms=(platform,))
        assert ("stablehlo.while" in lowered.as_text()) is is_in_pieces


def test_large_tiles_are_made_symmetric_in_pieces_on_cpus_only(getkey):
    x = normal(getkey(), (600, 600))
    run = lambda x: with_mirror_image(x, jnp.maximum, jnp.transpose)
    x = np.asarray(x)
    assert_same(jax.jit(run)(x), np.maximum(x, x.T), tol=0)
    for platform, is_in_pieces in (("cpu", True), ("cuda", False)):
        lowered = jax.jit(run).trace(x).lower(lowering_platforms=(platform,))
        assert ("stablehlo.while" in lowered.as_text()) is is_in_pieces


@pytest.mark.versions
def test_programs_are_kept_apart_on_cpus_only():
    # Elsewhere, the condition is true as the compiler can see.
    apart = jax.jit(
        lambda x, always: in_opaque_branch(lambda x: [jnp.sin(x)], always)(x)
    )
    traced = apart.trace(jnp.ones(3), jnp.array(True))
    for platform, is_apart in (("cpu", True), ("cuda", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.case" in text
        assert ("stablehlo.or" not in text) is is_apart


@pytest.mark.versions
def test_a_remainder_comes_after_the_loop(getkey):
    mean = filter_microbatch(jnp.sum, microbatch_size=3, accumulator=Mean())
    traced = jax.jit(lambda x: mean(x)).trace(normal(getkey(), (11,)))
    for platform, has_barrier in (("cpu", False), ("cuda", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("optimization_barrier" in text) is has_barrier
        # It is a branch on CPUs only, as the condition is known elsewhere.
        assert ("stablehlo.or" in text) is has_barrier


# Where the next two fail because both are equal, XLA has learned to do without.


def merged(monkeypatch, module):
    """From here on, what is kept apart in a module is not."""
    monkeypatch.setattr(module, "in_opaque_branch", lambda run, always: run)


def test_blocks_of_kernels_are_kept_apart(monkeypatch):
    def arc_cosine(x, y=None):
        y = x if y is None else y
        norms = jnp.linalg.norm(x, axis=1)[:, None] * jnp.linalg.norm(y, axis=1)[None]
        found = kernel = x @ y.T
        for _ in range(3):
            cosine = jnp.clip(found / norms, -0.99, 0.99)
            slope = jnp.pi - jnp.arccos(cosine)
            found = norms * (jnp.sqrt(1 - cosine**2) + slope * cosine)
            kernel = found + kernel * slope
        return kernel

    def temporaries():
        kernel = lambda x, y=None: arc_cosine(x, y)
        batched = filter_batch_kernel(kernel, block_size=128, symmetric=True)
        return memory(batched, jnp.ones((512, 8))).temp_size_in_bytes

    apart = temporaries()
    merged(monkeypatch, called)
    assert 2 * apart < temporaries()


def test_random_models_are_drawn_apart(monkeypatch):
    def temporaries():
        init = lambda key: eqx.nn.MLP(8, 4, 128, 2, key=key)
        settings = {"num_samples": 4, "get": "nngp"}
        kernel = MonteCarloKernel(init, key=jax.random.key(0), **settings)
        arrays, static = eqx.partition(kernel, eqx.is_array)
        run = lambda arrays, x: eqx.combine(arrays, static)(x)
        return memory(run, arrays, jnp.ones((4, 8))).temp_size_in_bytes

    apart = temporaries()
    merged(monkeypatch, average)
    assert 1.2 * apart < temporaries()
