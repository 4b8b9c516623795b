import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.experimental import sparse

from eqxbatch import (
    Concat,
    filter_grid_vmap,
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    Last,
    LogSumExp,
    Max,
    Mean,
    over_batches,
    Sum,
    Variance,
)
from eqxbatch.results import MeanAndVariance
from ..helpers import (
    assert_same,
    BLOCK,
    CountTraces,
    drawn,
    normal,
    spread,
    thinned,
    TOTALS,
)


SIZES = (1, BLOCK, None, 100)


@pytest.mark.parametrize(("size", "total"), thinned(SIZES, (0, *TOTALS)))
def test_equals_filter_vmap(total, size, getkey):
    x = normal(getkey(), (total, 3))

    def fun(x):
        return {"a": jnp.sin(x), "b": (x.sum(), None)}

    got = filter_micro_vmap(fun, microbatch_size=size)(x)
    assert_same(got, {"a": np.sin(x), "b": (np.sum(x, 1), None)})


def test_one_example_that_is_shifted():
    # XLA for CPUs: https://github.com/openxla/xla/issues/49176.
    x = jnp.arange(8.0).reshape(1, 4, 2)
    shift = lambda x: x.at[1:].set(x[:-1])
    expected = np.asarray(x)[:, [0, 0, 1, 2]]
    assert_same(filter_micro_vmap(shift)(x), expected)
    assert_same(filter_micro_vmap(shift, accumulator=Sum())(x), expected[0])


@pytest.mark.parametrize(
    "dtype",
    (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int8, jnp.bool_),
)
def test_dtypes(dtype):
    x = jnp.arange(3 * 13).reshape(13, 3).astype(dtype)
    got = filter_micro_vmap(lambda x: x[::-1], microbatch_size=BLOCK)(x)
    assert_same(got, np.asarray(x)[:, ::-1])


@pytest.mark.parametrize("dtype", (jnp.float64, jnp.complex128))
def test_dtypes_64(dtype, getkey, x64):
    x = normal(getkey(), (13, 3), dtype)
    got = filter_micro_vmap(jnp.sin, microbatch_size=BLOCK)(x)
    assert_same(got, np.sin(x))


@pytest.mark.parametrize(
    ("out_axes", "in_axes", "total"),
    thinned((0, 1, -1, -3), (0, 2, -2), (8, 9)),
)
def test_axes(total, in_axes, out_axes, getkey):
    x = jnp.asarray(np.moveaxis(normal(getkey(), (total, 2, 3)), 0, in_axes))
    fun = lambda x: jnp.cos(x) * jnp.arange(1.0, 4.0)[None]
    got = filter_micro_vmap(
        fun, in_axes=in_axes, out_axes=out_axes, microbatch_size=BLOCK
    )(x)
    expected = np.moveaxis(np.cos(x), in_axes, 0) * np.arange(1, 4, dtype=np.float32)
    assert_same(got, np.moveaxis(expected, 0, out_axes))


def test_axes_of_trees(getkey):
    x = {"a": normal(getkey(), (2, 9)), "b": [normal(getkey(), (9,)), 3, None]}
    y = normal(getkey(), (4,))
    in_axes = ({"a": 1, "b": eqx.if_array(0)}, None)
    out_axes = (1, {"z": None, "w": eqx.if_array(0)})

    def fun(x, y):
        out = x["a"] * x["b"][1]
        return out, {"z": y, "w": [x["b"][0], "static"]}

    got = filter_micro_vmap(
        fun, in_axes=in_axes, out_axes=out_axes, microbatch_size=BLOCK
    )(x, y)
    assert_same(got, eqx.filter_vmap(fun, in_axes=in_axes, out_axes=out_axes)(x, y))


def test_axes_by_name_and_defaults(getkey):
    x, y = (np.asarray(normal(getkey(), shape)) for shape in ((9, 3), (3, 9)))

    def fun(x, y, scale=2.0):
        return x * y * scale

    micro = functools.partial(filter_micro_vmap, fun, microbatch_size=BLOCK)
    assert_same(micro(in_axes={"y": 1})(x, y), 2 * x * y.T)
    # Beyond `filter_vmap`: keyword arguments.
    assert_same(micro(in_axes={"y": 1})(x, y=y, scale=3.0), 3 * x * y.T)
    assert_same(micro(in_axes={"y": 1})(y=y, x=x), 2 * x * y.T)
    assert_same(micro(in_axes=(0,))(x, y=y.T), 2 * x * y.T)
    scales = np.arange(9, dtype=np.float32)
    assert_same(micro(in_axes=(0, 1))(x, y, scale=scales), x * y.T * scales[:, None])
    assert_same(
        micro(in_axes={"y": 1, "scale": None})(x, y, scale=x[0]), x * y.T * x[:1]
    )


def test_default_in_axes_batches_arrays_only(getkey):
    x = normal(getkey(), (9, 3))
    fun = lambda x, y, activation: activation(x) * y
    got = filter_micro_vmap(fun, microbatch_size=BLOCK)(x, 2.0, jnp.tanh)
    assert_same(got, np.tanh(x) * 2)


def test_axis_size_without_batched_arguments():
    micro = functools.partial(filter_micro_vmap, microbatch_size=BLOCK, axis_size=9)
    assert_same(micro(lambda x: 2 * x, in_axes=None)(jnp.array(3.0)), jnp.full(9, 6.0))
    assert_same(micro(lambda: jnp.array(1.0))(), jnp.ones(9))
    assert_same(micro(lambda: jnp.array(1.0), accumulator=Sum())(), jnp.array(9.0))


def test_settings_can_be_numbers_of_numpy():
    run = filter_micro_vmap(
        lambda: 1.0,
        axis_size=np.int64(5),
        microbatch_size=2,
        out_axes=np.int32(0),
        checkpoint=np.bool_(True),
    )
    assert_same(run(), jnp.ones(5))


def test_axis_name():
    x = jnp.arange(8.0)
    center = lambda x: x - jax.lax.pmean(x, "i")
    got = filter_micro_vmap(center, axis_name="i", microbatch_size=4)(x)
    # Collectives see one microbatch; the docs say so.
    assert_same(got, jnp.concatenate([x[:4] - 1.5, x[4:] - 5.5]))
    got = filter_micro_vmap(center, axis_name="i")(x)
    assert_same(got, x - 3.5)


def test_vmap_fn_is_used(getkey):
    calls = []

    def vmap_fn(fun, in_axes, out_axes):
        calls.append((in_axes, out_axes))
        return jax.vmap(fun, in_axes, out_axes)

    x = normal(getkey(), (2, 8))
    got = filter_micro_vmap(jnp.sin, in_axes=1, microbatch_size=BLOCK, vmap_fn=vmap_fn)(
        x
    )
    assert_same(got, jnp.sin(x.T))
    assert calls == [(([1],), (0, None))]


def test_vmap_fn_with_keywords(getkey):
    x = normal(getkey(), (9, 2))
    vmap_fn = functools.partial(jax.vmap, spmd_axis_name="data")
    got = filter_micro_vmap(jnp.sin, microbatch_size=BLOCK, vmap_fn=vmap_fn)(x)
    assert_same(got, jnp.sin(x))


# Modules


@pytest.mark.parametrize("num", spread((5, 1, 4), 1))
def test_modules_in_and_out(num, getkey):
    make = lambda key: eqx.nn.MLP(2, 3, 4, 1, activation=jnp.tanh, key=key)
    keys = jr.split(getkey(), num)
    models = filter_micro_vmap(make, microbatch_size=BLOCK)(keys)
    assert_same(models, eqx.filter_jit(eqx.filter_vmap(make))(keys))
    assert isinstance(models, eqx.nn.MLP)

    x = normal(getkey(), (2,))
    got = filter_micro_vmap(
        lambda model, x: model(x),
        in_axes=(eqx.if_array(0), None),
        microbatch_size=BLOCK,
    )(models, x)
    dense = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    assert_same(got, eqx.filter_jit(dense)(models, x))


def test_module_is_the_function(getkey):
    model = drawn(eqx.nn.MLP, 2, 3, 4, 1, key=getkey())
    x = normal(getkey(), (9, 2))
    micro = filter_micro_vmap(model, microbatch_size=BLOCK)
    assert_same(micro(x), jax.jit(jax.vmap(lambda x: model(x)))(x))
    assert eqx.tree_equal(micro.__wrapped__, model)


@pytest.mark.cpu
def test_weights_of_modules_and_partials_are_arguments(getkey):
    model = drawn(eqx.nn.Linear, 256, 256, key=getkey())
    x = normal(getkey(), (8, 256))
    partial = eqx.Partial(lambda model, x: model(x), model)
    for fun in (model, partial):
        micro = filter_micro_vmap(fun, microbatch_size=BLOCK)
        dynamic, static = eqx.partition(micro, eqx.is_array)
        call = lambda d, x: eqx.combine(d, static)(x)
        analysis = jax.jit(call).lower(dynamic, x).compile().memory_analysis()
        assert analysis.argument_size_in_bytes == 4 * (256 * 256 + 256 + x.size)


def test_equal_numbers_of_other_types_have_other_programs():
    x = jnp.array([200], jnp.uint8)
    times = lambda by, x: by * x.astype(jnp.result_type(by))
    fun = CountTraces(times)
    run = filter_micro_vmap(fun, in_axes=(None, 0))
    # 2 == 2.0 == True == 1.0 and 0.0 == -0.0.
    for by in (2, 2.0, 1, True, 1.0, 0.0, -0.0):
        expected = times(by, x)
        for _ in range(2):
            got = run(by, x)
            assert got.dtype == expected.dtype
            assert jnp.array_equal(jnp.signbit(got), jnp.signbit(expected))
            assert jnp.array_equal(got, expected)
    assert fun.num == 7
    for by in (2, 2.0):
        module = eqx.Partial(times, by)
        run = filter_micro_vmap(module)
        assert_same(run(x), times(by, x))
        assert_same(jax.jit(run)(x), times(by, x))
        assert run == filter_micro_vmap(module)


def test_methods(getkey):
    class Model(eqx.Module):
        weight: jax.Array

        @filter_micro_vmap(in_axes=(None, 0), microbatch_size=BLOCK)
        def decorated(self, x):
            """The docstring."""
            return self.weight @ x

        def plain(self, x):
            return self.weight @ x

    model = Model(normal(getkey(), (2, 3)))
    x = normal(getkey(), (9, 3))
    expected = x @ model.weight.T
    assert_same(model.decorated(x), expected)
    assert_same(filter_micro_vmap(model.plain, microbatch_size=BLOCK)(x), expected)
    assert Model.decorated.__doc__ == "The docstring."
    assert Model.decorated.__name__ == "decorated"
    loss = lambda model: jnp.sum(model.decorated(x) ** 2)
    grad = eqx.filter_grad(loss)(model)
    assert_same(grad.weight, 2 * expected.T @ x)


def test_is_a_pytree_of_what_it_wraps(getkey):
    model = drawn(eqx.nn.Linear, 2, 3, key=getkey())
    micro = filter_micro_vmap(model, microbatch_size=BLOCK)
    arrays = jax.tree.leaves(eqx.filter(micro, eqx.is_array))
    assert [x.shape for x in arrays] == [(3, 2), (3,)]
    doubled = eqx.tree_at(lambda m: m.__wrapped__.weight, micro, 2 * model.weight)
    x = normal(getkey(), (9, 2))
    assert_same(doubled(x), 2 * x @ model.weight.T + model.bias[None])


# PRNG keys


@pytest.mark.parametrize(("typed", "total"), thinned((True, False), (8, 9)))
def test_keys_do_not_depend_on_the_block_size(total, typed, getkey):
    key = getkey() if typed else jr.PRNGKey(0)
    keys = jr.split(key, total)
    draw = lambda key: jr.normal(key, (2,))
    expected = jax.jit(jax.vmap(draw))(keys)
    for size in (1, BLOCK, total):
        assert_same(filter_micro_vmap(draw, microbatch_size=size)(keys), expected)


@pytest.mark.parametrize(("typed", "out_axes"), thinned((True, False), (0, 1)))
def test_keys_are_returned(typed, out_axes, getkey):
    keys = jr.split(getkey() if typed else jr.PRNGKey(0), 9)
    split = lambda key: jr.split(key, 3)
    got = filter_micro_vmap(split, microbatch_size=BLOCK, out_axes=out_axes)(keys)
    assert_same(got, jax.jit(jax.vmap(split, out_axes=out_axes))(keys))


# Nesting


@pytest.mark.parametrize("total", spread((9, 8), 1))
def test_inside_jit_vmap_and_shard_free_nesting(total, getkey):
    x = normal(getkey(), (5, total, 2))
    micro = filter_micro_vmap(jnp.sin, microbatch_size=BLOCK)
    assert_same(jax.jit(micro)(x[0]), np.sin(x[0]))
    assert_same(eqx.filter_jit(micro)(x[0]), np.sin(x[0]))
    assert_same(jax.vmap(micro)(x), np.sin(x))
    assert_same(jax.vmap(micro, in_axes=2, out_axes=2)(x), np.sin(x))
    assert_same(eqx.filter_vmap(micro)(x), np.sin(x))
    nested = filter_micro_vmap(micro, microbatch_size=2)
    assert_same(nested(x), np.sin(x))
    assert_same(jax.jit(jax.vmap(nested))(x[None]), np.sin(x[None]))


def test_of_a_function_with_a_closed_over_tracer(getkey):
    x = normal(getkey(), (9, 2))

    @jax.jit
    def f(w):
        return filter_micro_vmap(lambda x: x * w, microbatch_size=BLOCK)(x)

    assert_same(f(jnp.array(2.0)), 2 * x)
    assert_same(f(jnp.array(3.0)), 3 * x)
    grad = jax.grad(
        lambda w: filter_micro_vmap(lambda x: x * w, microbatch_size=BLOCK)(x).sum()
    )(jnp.array(2.0))
    assert_same(grad, x.sum())
    mapped = jax.vmap(
        lambda w: filter_micro_vmap(lambda x: x * w, microbatch_size=BLOCK)(x)
    )(jnp.arange(3.0))
    assert_same(mapped, x[None] * jnp.arange(3.0)[:, None, None])


def test_with_jit_disabled(getkey):
    x = normal(getkey(), (9, 2))
    with jax.disable_jit():
        got = filter_micro_vmap(jnp.sin, microbatch_size=BLOCK)(x)
    assert_same(got, np.sin(x))


def test_effects_inside(getkey, capfd):
    x = jnp.arange(5.0)

    def fun(x):
        jax.debug.print("saw {x}", x=x)
        return eqx.error_if(2 * x, x > 10, "too large")

    assert_same(filter_micro_vmap(fun, microbatch_size=2)(x), 2 * x)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert [f"saw {i}.0" in out for i in range(5)] == [True] * 5
    with pytest.raises(Exception, match="too large"):
        filter_micro_vmap(fun, microbatch_size=2)(jnp.arange(20.0))


# Early stop


@pytest.mark.parametrize(("traced", "count"), thinned((True, False), (0, 1, 2, 3, 4)))
def test_num_real_microbatches(count, traced, getkey):
    x = normal(getkey(), (13, 2))
    rows = min(4 * count, 13)
    micro = filter_micro_vmap(
        lambda x: (jnp.sin(x),) * 3,
        microbatch_size=4,
        num_real_microbatches=jnp.array(count) if traced else count,
        accumulator=(Concat(), Sum(), Mean()),
    )
    kept = np.where(np.arange(13)[:, None] < rows, np.sin(x), np.float32(0))
    total = kept.sum(axis=0)
    mean = total / rows if rows else np.full(2, np.float32("nan"))
    assert_same(micro(x), (kept, total, mean))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", (jnp.int64, jnp.uint32, jnp.int8))
def test_num_real_microbatches_of_any_integer_dtype(dtype):
    count = jnp.array(2, dtype)
    f = functools.partial(filter_micro_vmap, microbatch_size=2)
    fun = lambda x: (x, x)
    micro = f(fun, num_real_microbatches=count, accumulator=(Sum(), Concat()))
    assert_same(
        micro(jnp.arange(1.0, 6)), (jnp.array(10.0), jnp.array([1.0, 2, 3, 4, 0]))
    )


@pytest.mark.parametrize(("traced", "count"), thinned((True, False), (1, 2, 4)))
def test_accumulators_do_not_see_what_does_not_run(count, traced, getkey):
    # So that a zero would be the largest.
    x = np.asarray(normal(getkey(), (13,))) - np.float32(10)
    kept = x[: 4 * count]
    run = functools.partial(
        filter_micro_vmap,
        microbatch_size=4,
        num_real_microbatches=jnp.array(count) if traced else count,
    )
    # Beside an extreme, no microbatches overlap.
    assert_same(run(lambda x: x, accumulator=Max())(x), kept.max())
    others = run(lambda x: (x, x, x), accumulator=(LogSumExp(), Last(), Variance()))
    expected = (
        np.log(np.exp(kept).sum()),
        kept[-1],
        MeanAndVariance(kept.mean(), kept.var()),
    )
    assert_same(others(x), expected, tol=1e-4)


@pytest.mark.parametrize("checkpoint", (True, False))
def test_num_real_microbatches_is_differentiable(checkpoint, getkey):
    x, w = normal(getkey(), (13, 2)), np.float32(1.5)

    def loss(x, w, count):
        micro = filter_micro_vmap(
            lambda x: (jnp.sin(w * x), x**2),
            microbatch_size=4,
            num_real_microbatches=count,
            accumulator=(Concat(), Sum()),
            checkpoint=checkpoint,
        )
        a, b = micro(x)
        return jnp.sum(a**2) + jnp.sum(b**2)

    # A program for all of these.
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for count in (0, 1, 3, 4):
        got = gradient(x, w, np.array(count))
        kept = np.where(np.arange(13)[:, None] < 4 * count, x, np.float32(0))
        of_sines = np.sin(2 * w * kept)
        expected = w * of_sines + 4 * kept * (kept**2).sum(0), (of_sines * kept).sum()
        assert_same(got, expected, tol=1e-4)


def test_num_real_microbatches_does_not_retrace():
    traces = []

    @jax.jit
    def f(x, count):
        traces.append(count)
        return filter_micro_vmap(
            jnp.sin, microbatch_size=2, num_real_microbatches=count, accumulator=Sum()
        )(x)

    x = jnp.arange(6.0)
    for count in range(4):
        assert_same(f(x, jnp.array(count)), jnp.sin(x[: 2 * count]).sum())
    assert len(traces) == 1


def test_num_real_microbatches_under_vmap():
    x = jnp.arange(6.0)
    run = lambda count: filter_micro_vmap(
        jnp.sin, microbatch_size=2, num_real_microbatches=count, accumulator=Sum()
    )(x)
    got = jax.vmap(run)(jnp.arange(4))
    assert_same(got, jnp.stack([jnp.sin(x[: 2 * i]).sum() for i in range(4)]))


# optax's own


@pytest.mark.parametrize("kind", tuple(optax.microbatching.AccumulationType))
def test_agrees_with_optax(kind, getkey):
    x, y = normal(getkey(), (12, 3)), normal(getkey(), (12,))
    fun = lambda x, y: (jnp.sin(x) * y, {"s": x.sum() + y})
    ours = filter_micro_vmap(fun, microbatch_size=4, accumulator=kind)(x, y=y)
    theirs = optax.microbatching.micro_vmap(fun, microbatch_size=4, accumulator=kind)
    assert_same(ours, theirs(x, y=y))


@pytest.mark.parametrize("size", (1, 2, None))
def test_outputs_said_to_be_the_same_are(size, getkey):
    x = normal(getkey(), (5, 2))
    micro = functools.partial(filter_micro_vmap, microbatch_size=size)
    with pytest.raises(ValueError, match="output was batched"):
        micro(lambda x: (x, 2 * x), out_axes=(0, None))(x)
    fun = CountTraces(lambda x: (2 * x, jnp.arange(3), jnp.float32(7)))
    got = micro(fun, out_axes=(0, None, None))(x)
    assert_same(got, (2 * x, jnp.arange(3), jnp.float32(7)))
    # A callable says so only when it sees the output.
    some = micro(fun, out_axes=lambda leaf: 0 if leaf.shape == (2,) else None)
    assert_same(some(x), got)


@pytest.mark.parametrize("size", spread((2, 1, None), 1))
def test_weak_types_stay_weak(size):
    x = jnp.ones(5, jnp.bfloat16)
    micro = functools.partial(filter_micro_vmap, microbatch_size=size)
    assert (micro(lambda _: jnp.asarray(2.0))(x) + x).dtype == jnp.bfloat16
    fun = lambda x: (jnp.asarray(2.0), jnp.asarray([1, 2]), jnp.asarray(1j), x)
    for options in ({}, {"out_axes": (0, 1, 0, 0)}, {"checkpoint": True}):
        got = micro(fun, **options)(x)
        options.pop("checkpoint", None)
        expected = eqx.filter_jit(eqx.filter_vmap(fun, **options))(x)
        assert_same(got, expected)
        assert [a.weak_type for a in got] == [b.weak_type for b in expected]
    last = micro(fun, accumulator=Last())(x)
    assert [a.weak_type for a in last] == [True, False, True, False]
    same = micro(lambda x: jnp.asarray(2.0), out_axes=None)(x)
    assert same.weak_type
    # Sums are strong, those of `jnp.sum` too.
    assert not micro(fun, accumulator=Sum())(x)[0].weak_type
    total = lambda s: jnp.sum(micro(lambda x: (s, x)[0])(x))
    assert jax.jit(jax.grad(total))(2.0) == 5


@pytest.mark.parametrize("kind", spread((sparse.BCOO, sparse.BCSR), 1))
def test_batches_of_sparse_arrays(kind):
    """One example of them is a sparse array with the shape of one example."""
    numbers = np.random.default_rng(0)
    dense = numbers.integers(-2, 3, (7, 4, 3)).astype(np.float32)
    # One program in place of one for each operation.
    settings = {"n_batch": 1, "nse": int(np.count_nonzero(dense, (1, 2)).max())}
    x = jax.jit(functools.partial(kind.fromdense, **settings))(dense)
    w = jax.device_put(np.arange(3, dtype=np.float32))
    for size in (3, None):
        both = filter_micro_vmap(lambda x: (x @ w, x.todense()), microbatch_size=size)
        product, same = both(x)
        np.testing.assert_array_equal(product, dense @ np.arange(3))
        np.testing.assert_array_equal(same, dense)
    shapes = []
    whole = filter_microbatch(
        lambda x: (shapes.append(x.shape), x.todense())[1],
        microbatch_size=3,
        accumulator=Concat(),
    )
    np.testing.assert_array_equal(whole(x), dense)
    assert {*shapes} == {(3, 4, 3), (1, 4, 3)}
    gradient = filter_micro_grad(
        lambda w, x: jnp.sum((x @ w) ** 2), microbatch_size=3, clip_norm=1e6
    )(w, x)
    expected = np.einsum("nij,nik,k->j", dense, dense, np.arange(3)) * 2 / 7
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", spread((sparse.BCOO, sparse.BCSR), 1))
def test_results_are_sparse_arrays_of_the_batch(kind):
    dense = np.random.default_rng(0).integers(-2, 3, (7, 4, 3)).astype(np.float32)
    x = jax.device_put(dense)
    one = functools.partial(kind.fromdense, nse=12)

    def check(result, expected=dense):
        assert result.shape == expected.shape
        todense = jax.jit(lambda x: x.todense())
        np.testing.assert_array_equal(todense(result), expected)

    for size in (3, None):
        check(filter_micro_vmap(one, microbatch_size=size)(x))
    shared = filter_micro_vmap(one, in_axes=None, axis_size=3, out_axes=None)
    check(shared(x[0]), dense[0])
    whole = functools.partial(kind.fromdense, nse=12, n_batch=1)
    check(filter_microbatch(whole, microbatch_size=3, accumulator=Concat())(x))
    loss = lambda w, x: (jnp.vdot(w, x), one(x))
    gradient = filter_micro_grad(loss, has_aux=True, microbatch_size=3)
    check(gradient(x[0], x)[1])
    check(over_batches(filter_micro_vmap(one), batch_size=4)(dense))
    pair = lambda x, y: one(jnp.outer(x, y[0]))
    grid = filter_grid_vmap(pair, in_axes={"x": "i", "y": "j"}, block_size=5)
    expected = np.einsum("ia,jb->ijab", dense[..., 0], dense[:, 0])
    check(grid(x[..., 0], x), expected)


def test_refuses_sparse_results_whose_arrays_would_be_mixed_up():
    x = jax.device_put(np.ones((5, 4, 3), np.float32))
    one = functools.partial(sparse.BCOO.fromdense, nse=12)
    with pytest.raises(ValueError, match=r"BCOO, cannot be accumulated by Sum: its e"):
        filter_micro_vmap(one, microbatch_size=2, accumulator=Sum())(x)
    with pytest.raises(ValueError, match=r"BCOO, cannot be joined along axis -1: ex"):
        filter_micro_vmap(one, microbatch_size=2, out_axes=-1)(x)
    # Its indices are those of a row in its microbatch.
    whole = lambda x: sparse.BCOO.fromdense(x, nse=12 * len(x))
    with pytest.raises(ValueError, match=r"along axis 0: .* of which it has 0"):
        filter_microbatch(whole, microbatch_size=2, accumulator=Concat())(x)
    # Their own batch axis is second, as for `jax.vmap`.
    rows = functools.partial(sparse.BCOO.fromdense, nse=3, n_batch=1)
    result = filter_micro_vmap(rows, microbatch_size=2, out_axes=1)(x)
    assert (result.shape, result.n_batch) == ((4, 5, 3), 2)
