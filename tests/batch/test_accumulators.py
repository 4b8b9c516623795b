import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxbatch
from eqxbatch import (
    Concat,
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    Last,
    LogSumExp,
    Max,
    Mean,
    Min,
    Sum,
    Variance,
)
from eqxbatch.results import MeanAndVariance
from ..helpers import (
    assert_same,
    BLOCK,
    memory,
    normal,
    spread,
    thinned,
    TOTALS,
)


def variance(x, axis, ddof=0):
    return MeanAndVariance(jnp.mean(x, axis), jnp.var(x, axis, ddof=ddof))


# What each of them makes of the dense result, examples along axis 0.
ORACLES = {
    "concat": (Concat(), lambda x: x),
    "sum": (Sum(), lambda x: jnp.sum(x, 0)),
    "mean": (Mean(), lambda x: jnp.mean(x, 0)),
    "running_mean": (Mean(running=True), lambda x: jnp.mean(x, 0)),
    "max": (Max(), lambda x: jnp.max(x, 0)),
    "min": (Min(), lambda x: jnp.min(x, 0)),
    "logsumexp": (LogSumExp(), lambda x: jax.nn.logsumexp(x, 0)),
    "variance": (Variance(), lambda x: variance(x, 0)),
    "variance_ddof": (Variance(ddof=1), lambda x: variance(x, 0, 1)),
    "last": (Last(), lambda x: x[-1]),
}


ORDERED = ("max", "min")


CUTS = ((1, None), *((total, BLOCK) for total in TOTALS), (13, 1), (13, None))


def together(x, size, wide=None, without=()):
    """What all accumulators make of an array, and what they must."""
    # Beside an extreme, no microbatches overlap.
    for names in (ORDERED, [name for name in ORACLES if name not in ORDERED]):
        names = [name for name in names if name not in without]
        if names:
            accumulators, oracles = zip(*map(ORACLES.get, names), strict=True)
            micro = filter_micro_vmap(
                lambda x, names=names: (x,) * len(names),
                microbatch_size=size,
                accumulator=accumulators,
            )
            dense = jax.jit(
                lambda x, oracles=oracles: [
                    f(x.astype(wide or x.dtype)) for f in oracles
                ]
            )
            yield from zip(micro(x), dense(x), strict=True)


# The accumulators in turn.
@pytest.mark.parametrize(
    ("name", "cut"), [(name, CUTS[i % len(CUTS)]) for i, name in enumerate(ORACLES)]
)
def test_equals_dense(name, cut, getkey):
    total, size = cut
    if name == "variance_ddof" and total == 1:
        total = 2  # The variance of one example has no unbiased estimate.
    accumulator, oracle = ORACLES[name]
    x = normal(getkey(), (total, 3)) - 2
    micro = filter_micro_vmap(
        lambda x: x * 2, microbatch_size=size, accumulator=accumulator
    )
    assert_same(micro(x), jax.jit(lambda x: oracle(x * 2))(x))


@pytest.mark.matrix
@pytest.mark.parametrize(("total", "size"), CUTS)
def test_all_equal_dense(total, size, getkey):
    x = normal(getkey(), (total, 3)) - 2
    for got, expected in together(x, size, without=["variance_ddof"] * (total == 1)):
        assert_same(got, expected)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16, jnp.complex64))
def test_dtypes(dtype, getkey):
    x = normal(getkey(), (13, 3), dtype)
    is_complex = jnp.iscomplexobj(x)
    wide = jnp.complex64 if is_complex else jnp.float32
    real = np.asarray(x).real.dtype
    narrow = lambda e: np.asarray(e).astype(x.dtype if np.iscomplexobj(e) else real)
    for got, expected in together(x, 4, wide, ORDERED if is_complex else ()):
        assert_same(got, jax.tree.map(narrow, expected))
    for extreme in (Max(), Min()) if is_complex else ():
        with pytest.raises(TypeError, match="needs ordered results"):
            filter_micro_vmap(lambda x: x, accumulator=extreme)(x)


def test_float64(getkey, x64):
    for got, expected in together(normal(getkey(), (13, 3), jnp.float64), 4):
        assert_same(got, expected)


@pytest.mark.parametrize(
    "dtype", spread((jnp.int8, jnp.uint8, jnp.bool_, jnp.int32), 2)
)
def test_integers(dtype):
    x = jnp.asarray((np.arange(13) * 7 % 127).astype(dtype))
    micro = functools.partial(filter_micro_vmap, lambda x: x, microbatch_size=4)
    # As for `jnp.sum`, no sum of small integers overflows. Beside an extreme, no
    # microbatches overlap.
    for names in (("sum", "last", "concat"), ("max", "min")):
        accumulators, oracles = zip(*(ORACLES[name] for name in names), strict=True)
        several = filter_micro_vmap(
            lambda x: (x,) * len(names),
            microbatch_size=4,
            accumulator=accumulators,
        )
        dense = jax.jit(lambda x, of=oracles: tuple(oracle(x) for oracle in of))
        assert_same(several(x), dense(x))
    for name in (Mean, Variance, LogSumExp):
        with pytest.raises(TypeError, match=f"{name.__name__} needs floating-point"):
            micro(accumulator=name())(x)
    in_float32 = filter_micro_vmap(
        lambda x: (x, x),
        microbatch_size=4,
        accumulator=(Mean(dtype=jnp.float32), LogSumExp(dtype=jnp.float32)),
    )
    wide = np.asarray(x, np.float32)
    total = wide.max() + np.log(np.exp(wide - wide.max()).sum())
    assert_same(in_float32(x), (wide.mean(), total))


def test_low_precision_is_accumulated_in_float32():
    ones = jnp.ones(4099, jnp.bfloat16)
    micro = functools.partial(filter_micro_vmap, lambda x: x, microbatch_size=1)
    # In bfloat16 the sum would get stuck at 256.
    total = micro(accumulator=Sum())(ones)
    assert total.dtype == jnp.bfloat16
    assert total == jnp.asarray(4099, jnp.bfloat16)
    few = ones[:128].at[0].set(256)
    assert micro(accumulator=Sum(dtype=jnp.bfloat16))(few) == 256
    # Many microbatches are added with compensation.
    assert micro(accumulator=Sum(dtype=jnp.bfloat16))(ones) == total


def test_requested_dtypes(x64):
    x = jnp.full(1000, 0.1, jnp.float32)
    micro = functools.partial(filter_micro_vmap, lambda x: x, microbatch_size=7)
    wide = micro(accumulator=Sum(dtype=jnp.float64))(x)
    assert wide.dtype == jnp.float32
    assert wide == jnp.sum(x.astype(jnp.float64)).astype(jnp.float32)
    with pytest.raises(TypeError, match="would drop the imaginary part"):
        micro(accumulator=Sum(dtype=jnp.float32))(x.astype(jnp.complex64))


def test_64_bits_are_not_quietly_narrowed():
    micro = filter_micro_vmap(lambda x: x, accumulator=Sum(dtype=jnp.float64))
    with pytest.raises(ValueError, match="needs 64-bit mode"):
        micro(jnp.ones(3))


@pytest.mark.parametrize("name", ORACLES)
def test_no_examples(name):
    accumulator, _ = ORACLES[name]
    micro = filter_micro_vmap(lambda x: x, microbatch_size=4, accumulator=accumulator)
    empty = jnp.zeros((0, 2))
    if name == "last":
        with pytest.raises(ValueError, match="needs at least one example"):
            micro(empty)
        return
    nan = jnp.full(2, jnp.nan)
    expected = {
        "concat": empty,
        "sum": jnp.zeros(2),
        "mean": nan,
        "running_mean": nan,
        "max": jnp.full(2, -jnp.inf),
        "min": jnp.full(2, jnp.inf),
        "logsumexp": jnp.full(2, -jnp.inf),
        "variance": MeanAndVariance(nan, nan),
        "variance_ddof": MeanAndVariance(nan, nan),
    }
    if name == "variance_ddof":
        # -0 / -1, as there are fewer examples than degrees of freedom.
        assert jnp.isnan(micro(empty).mean).all()
        return
    assert_same(micro(empty), expected[name])


def test_identities_of_integers_and_bools():
    micro = filter_micro_vmap(
        lambda x, y: (x, y), microbatch_size=4, accumulator=(Max(), Min())
    )
    run = lambda x, y: tuple(z.item() for z in micro(jnp.asarray(x), jnp.asarray(y)))
    nothing = np.zeros(0, np.int32)
    assert run(nothing, nothing) == (-(2**31), 2**31 - 1)
    assert run(nothing.astype(bool), nothing.astype(bool)) == (False, True)
    # All negative, all positive: the identity of the accumulator must not show.
    numbers = np.arange(1, 10, dtype=np.float32)
    assert run(-numbers, numbers) == (-1, 1)


def test_nan_propagates():
    x = jnp.array([1.0, jnp.nan, 2.0, 3.0, 4.0])
    # Beside an extreme, no microbatches overlap.
    for several in ((Max(), Min()), (Mean(), Sum(), LogSumExp(), Mean(running=True))):
        micro = filter_micro_vmap(
            lambda x: (x,) * len(several),
            microbatch_size=2,
            accumulator=several,
        )
        assert np.all(np.isnan(micro(x)))


def test_extremes_of_thousands_of_results():
    x = np.random.default_rng(0).normal(size=(3000, 64)).astype(np.float32)
    x[::7, ::3] = np.nan
    x[5, 5] = np.inf
    accumulators = Max(), Min()
    extremes = filter_micro_vmap(
        lambda x: (x, x), microbatch_size=500, accumulator=accumulators
    )
    got = extremes(x)
    np.testing.assert_array_equal(got[0], x.max(axis=0))
    np.testing.assert_array_equal(got[1], x.min(axis=0))


def test_running_mean_does_not_overflow():
    x = jnp.full(100, 3e38, jnp.float32)
    micro = functools.partial(filter_micro_vmap, lambda x: x, microbatch_size=7)
    assert jnp.isinf(micro(accumulator=Mean())(x))
    assert_same(micro(accumulator=Mean(running=True))(x), jnp.array(3e38))


def test_logsumexp_of_reals_in_complex_numbers(recwarn):
    x = jnp.array([0.5, 1.0, 2.0])
    accumulator = LogSumExp(dtype=jnp.complex64)
    micro = filter_micro_vmap(lambda x: x, microbatch_size=2, accumulator=accumulator)
    assert_same(micro(x), jax.nn.logsumexp(x))
    assert not recwarn.list


def test_logsumexp_does_not_overflow():
    x = jnp.array([1000.0, 1001.0, -jnp.inf, 999.0, 1000.5])
    micro = filter_micro_vmap(lambda x: x, microbatch_size=2, accumulator=LogSumExp())
    assert_same(micro(x), jax.nn.logsumexp(x))


def test_variance_does_not_cancel(getkey):
    x = 1e4 + normal(getkey(), (1000,))
    micro = filter_micro_vmap(lambda x: x, microbatch_size=7, accumulator=Variance())
    got = micro(x).variance
    expected = np.var(np.asarray(x, np.float64))
    np.testing.assert_allclose(got, expected, rtol=1e-3)


@pytest.mark.parametrize("size", (1, 2, None))
def test_infinite_and_huge_values_do_not_depend_on_the_size(size):
    largest = float(jnp.finfo(jnp.float32).max)
    x = jnp.array(
        [
            [1.0, jnp.inf, 2.0, 3.0, jnp.inf],
            [1.0, -jnp.inf, jnp.inf, 2.0, 0.0],
            [largest, largest, largest, largest, largest],
            [largest, -largest, largest, -largest, 0.0],
        ]
    )
    expected = jnp.array([jnp.inf, jnp.nan, largest, 0.0])
    micro = functools.partial(filter_micro_vmap, in_axes=1, microbatch_size=size)
    mean = micro(lambda x: x, accumulator=Mean(running=True))(x)
    assert_same(mean / largest, expected / largest)
    spread = micro(lambda x: x, accumulator=Variance())(x)
    assert_same(spread.mean / largest, expected / largest)
    # Neither is infinite because a square on the way to it is.
    apart = micro(lambda x: x, accumulator=Variance())(jnp.array([[0.0, 2.5e19]]))
    assert_same(apart.variance, jnp.array([1.5625e38]))


def derivative(accumulator, x, size):
    micro = filter_micro_vmap(
        lambda x: x, microbatch_size=size, accumulator=accumulator
    )
    return jax.jit(jax.grad(lambda x: jnp.sum(micro(x))))(x)


@pytest.mark.parametrize("size", (1, 2, None))
def test_derivative_of_logsumexp_behind_a_mask(size):
    x = jnp.array([-jnp.inf, -jnp.inf, -jnp.inf, 1.0, 2.0, -jnp.inf, 3.0])
    assert_same(derivative(LogSumExp(), x, size), jax.nn.softmax(x))
    nothing = jnp.full(5, -jnp.inf)
    assert_same(derivative(LogSumExp(), nothing, size), jnp.zeros(5))


@pytest.mark.parametrize(("size", "sign"), thinned((1, 2, 3, None), (-1, 1)))
def test_derivative_of_equal_extremes_is_shared_evenly(size, sign):
    accumulator = Max() if sign > 0 else Min()
    # As many as those that are finite, so that one program has both.
    infinite = jnp.asarray(np.full(7, -np.inf * sign, np.float32))
    ties = np.array([0.0, 3.0, 3.0, 1.0, 3.0, 2.0, 3.0], np.float32)
    micro = filter_micro_vmap(
        lambda x: x, microbatch_size=size, accumulator=accumulator
    )
    in_ones = filter_microbatch(
        lambda x: x[0], microbatch_size=1, accumulator=accumulator
    )
    run = jax.jit(lambda x: (jax.grad(micro)(x), jax.grad(in_ones)(x)))
    shared = np.full(7, 1 / 7, np.float32)
    assert_same(run(infinite), (shared, shared))
    found, _ = run(jnp.asarray(sign * ties))
    assert_same(found, np.where(ties == 3, np.float32(0.25), np.float32(0)))


@pytest.mark.parametrize(
    ("size", "dtype"), thinned((1, 2, 3, None), (jnp.float32, jnp.bfloat16))
)
def test_second_derivative_of_equal_extremes(size, dtype):
    def square(x, reduce):
        return reduce(x) ** 2 * x[0]

    micro = filter_micro_vmap(lambda x: x**2, microbatch_size=size, accumulator=Max())
    x = jnp.array([2.0, 1.0, -2.0, 0.0, 2.0, 2.0], dtype)
    both = lambda x: [
        jax.hessian(square)(x, reduce) for reduce in (micro, lambda x: jnp.max(x**2))
    ]
    got, expected = (np.asarray(a, np.float32) for a in jax.jit(both)(x))
    tol = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(got, expected, tol)
    np.testing.assert_array_equal(got, got.T)


def test_extremes_of_dtypes_without_infinity():
    x = jnp.array([1.0, 3.0, -2.0], jnp.float8_e4m3fn)
    for accumulator, expected in ((Max(), 3), (Min(), -2)):
        got = filter_micro_vmap(lambda x: x, microbatch_size=2, accumulator=accumulator)
        assert got(x) == expected
        assert abs(got(x[:0])) == 448


# Prefixes


def test_prefixes(getkey):
    x = normal(getkey(), (9, 3))

    def fun(x):
        return {"a": (x, 2 * x), "b": [x.sum()], "c": ("static", None), "d": x}

    accumulator = {
        "a": Mean(),
        "b": [optax.microbatching.AccumulationType.SUM],
        "c": None,
        "d": Variance(),
    }
    got = filter_micro_vmap(fun, microbatch_size=4, accumulator=accumulator)(x)
    x = np.asarray(x)
    expected = {
        "a": (x.mean(0), 2 * x.mean(0)),
        "b": [x.sum()],
        "c": ("static", None),
        "d": MeanAndVariance(x.mean(0), x.var(0)),
    }
    assert_same(got, expected, tol=1e-4)


def test_numbers_stay_where_the_result_is_the_same_number():
    def fun(x):
        return {"mean": (x, 2), "kept": 3, "flag": True, "sum": x}

    accumulator = {"mean": Mean(), "kept": None, "flag": Sum(), "sum": Sum()}
    got = filter_micro_vmap(fun, microbatch_size=2, accumulator=accumulator)(
        jnp.arange(3.0)
    )
    assert got == {"mean": (1, 2), "kept": 3, "flag": True, "sum": 3}


def test_accumulators_apply_to_modules(getkey):
    import equinox as eqx

    keys = jr.split(getkey(), 9)
    make = lambda key: eqx.nn.MLP(2, 3, 4, 1, key=key)
    got = filter_micro_vmap(make, microbatch_size=4, accumulator=Mean())(keys)
    dense = eqx.filter_jit(eqx.filter_vmap(make))(keys)
    expected = jax.tree.map(
        lambda x: np.asarray(x).mean(0) if eqx.is_array(x) else x,
        dense,
        is_leaf=eqx.is_array,
    )
    assert_same(got, expected, tol=1e-4)


def test_unmapped_outputs_are_not_accumulated():
    micro = filter_micro_vmap(
        lambda x: (x, jnp.array(7.0)),
        out_axes=(0, None),
        microbatch_size=4,
        accumulator=Sum(),
    )
    assert_same(micro(jnp.arange(9.0)), (jnp.array(36.0), jnp.array(7.0)))


def test_prefix_that_does_not_fit():
    x = jnp.ones((9, 2))
    micro = functools.partial(filter_micro_vmap, lambda x: (x, {"a": x}))
    with pytest.raises(ValueError, match="`accumulator` must be a PyTree prefix"):
        micro(accumulator=(Sum(), Sum(), Sum()))(x)
    with pytest.raises(ValueError, match="`accumulator` must be a PyTree prefix"):
        micro(accumulator=(Sum(), {"b": Sum()}))(x)
    with pytest.raises(ValueError, match=r"`accumulator` is None for output\[0\]"):
        micro(accumulator=(None, Sum()))(x)


@pytest.mark.parametrize("wrong", ("sum", Sum, 3, jnp.sum))
def test_unknown_accumulators(wrong):
    with pytest.raises(TypeError, match="Unknown accumulator"):
        filter_micro_vmap(lambda x: x, accumulator=wrong)(jnp.ones(3))


def test_sum_of_keys():
    micro = filter_micro_vmap(lambda k: k, accumulator=Sum())
    with pytest.raises(TypeError, match="Sum needs numbers"):
        micro(jr.split(jr.key(0), 3))


def test_the_message_names_the_output():
    micro = filter_micro_vmap(lambda x: {"a": x}, accumulator=Mean())
    with pytest.raises(TypeError) as info:
        micro(jnp.arange(3))
    assert any("output['a']" in note for note in info.value.__notes__)


# Custom ones


class Norm(eqxbatch.AbstractAccumulator):
    power: jax.Array

    def init(self, value, blocks):
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state, value, block):
        return state + value

    def finalize(self, state):
        return state ** (1 / self.power)

    def aggregate(self, values, block):
        return jnp.sum(abs(values) ** self.power, axis=0)


@pytest.mark.parametrize("total", (1, BLOCK + 1, 13))
def test_custom(total, getkey):
    x = normal(getkey(), (total,))
    micro = filter_micro_vmap(
        lambda x: x, microbatch_size=BLOCK, accumulator=Norm(jnp.array(3.0))
    )
    assert_same(micro(x), (np.abs(x) ** 3).sum() ** np.float32(1 / 3), tol=1e-4)


class ArgMax(eqxbatch.AbstractAccumulator):
    """The whole output of the example with the largest score."""

    leafwise = False

    def init(self, value, blocks):
        state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), value)
        return {**state, "score": jnp.full_like(state["score"], -jnp.inf)}

    def update(self, state, value, block):
        better = value["score"] > state["score"]
        return jax.tree.map(lambda v, s: jnp.where(better, v, s), value, state)

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        best = jnp.argmax(values["score"])
        return jax.tree.map(lambda v: v[best], values)


def test_custom_on_whole_trees(getkey):
    x = normal(getkey(), (13, 3))

    def fun(x):
        return {"score": x.sum(), "x": x, "name": "static"}

    got = filter_micro_vmap(fun, microbatch_size=4, accumulator=ArgMax())(x)
    x = np.asarray(x)
    best = x[np.argmax(x.sum(1))]
    assert_same(got, {"score": best.sum(), "x": best, "name": "static"})


class Total(eqxbatch.AbstractAccumulator):
    """A sum that can do what sums of the package can."""

    counts_new = True
    one_shape = True
    state_as = "mean"

    def init(self, value, blocks):
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state, value, block):
        return state + value

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        return jnp.sum(block.new(values), axis=0)


class Newest(eqxbatch.AbstractAccumulator):
    """Like `Last`."""

    counts_new = True
    of_equal = True
    of_last = True
    keeps_weak = True

    def init(self, value, blocks):
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state, value, block):
        return value

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        return values[-1]


class Doubled(Total):
    """Says nothing of the examples that it counts: as it is, it counts some twice."""

    def aggregate(self, values, block):
        return 2 * jnp.sum(values, axis=0)


@pytest.mark.parametrize(
    ("accumulator", "expected", "num_traced"),
    ((Total(), 300.0, 1), (Newest(), 24.0, 1), (Doubled(), 600.0, 2)),
)
def test_custom_that_counts_new(accumulator, expected, num_traced):
    # Nine microbatches, of which the last one may overlap the one before.
    traced = []

    @filter_micro_vmap(microbatch_size=3, accumulator=accumulator)
    def f(x):
        traced.append(x)
        return x

    assert f(jnp.arange(25.0)) == expected
    assert len(traced) == num_traced


def test_custom_of_one_shape():
    f = filter_microbatch(lambda x: 1 * x, microbatch_size=3, accumulator=Total())
    with pytest.raises(ValueError, match="Total needs results of one shape"):
        f(jnp.arange(4.0))


def test_custom_of_equal():
    def f(accumulator):
        fun = lambda x: (x, 2.0)
        options = {"out_axes": (0, None), "accumulator": (Sum(), accumulator)}
        return filter_micro_vmap(fun, microbatch_size=2, **options)

    x = jnp.arange(3.0)
    assert f(Newest())(x) == (3.0, 2.0)
    with pytest.raises(ValueError, match="Total would leave it out"):
        f(Total())(x)


def test_custom_of_last():
    f = filter_micro_vmap(
        lambda x: x, microbatch_size=2, num_real_microbatches=0, accumulator=Newest()
    )
    with pytest.raises(ValueError, match="the last example that runs, because of `New"):
        f(jnp.arange(3.0))


@pytest.mark.parametrize(
    ("accumulator", "is_weak"), ((Newest(), True), (Total(), False))
)
def test_custom_that_keeps_weak_types(accumulator, is_weak):
    f = filter_microbatch(
        lambda x: jax.lax.full((), 2.0), microbatch_size=2, accumulator=accumulator
    )
    assert f(jnp.arange(4.0)).weak_type == is_weak


def test_custom_as_mean_of_a_state():
    layer, state = eqx.nn.make_with_state(eqx.nn.StateIndex)(jnp.zeros(()))

    def f(accumulator, x):
        clone = lambda: jax.tree.map(lambda x: x, state)
        run = lambda x: clone().set(layer, jnp.mean(x))
        return filter_microbatch(run, microbatch_size=2, accumulator=accumulator)(x)

    x = jnp.array([1.0, 3.0, 8.0])
    assert f(Total(), x).get(layer) == 4.0
    assert f(Newest(), x).get(layer) == 8.0


class Blocks(eqxbatch.AbstractAccumulator):
    """Writes down which blocks it saw."""

    def init(self, value, blocks):
        assert (blocks.total, blocks.size) == (13, 4)
        assert (blocks.num, blocks.num_full, blocks.remainder) == (4, 3, 1)
        return jnp.zeros((blocks.num, 3), jnp.int32)

    def update(self, state, value, block):
        row = jnp.stack(
            [jnp.asarray(v) for v in (block.index, block.start, block.size)]
        )
        return state.at[block.index].set(row)

    def finalize(self, state):
        return state

    def aggregate(self, values, block):
        assert values.shape == (block.size,)
        return values[0]


def test_custom_is_told_which_block_it_is():
    micro = filter_micro_vmap(lambda x: x, microbatch_size=4, accumulator=Blocks())
    expected = jnp.array([[0, 0, 4], [1, 4, 4], [2, 8, 4], [3, 12, 1]])
    assert_same(micro(jnp.ones(13)), expected)


@pytest.mark.parametrize("total", (1, 2, 3, 5))
def test_custom_that_takes_rows_of_another_length(total):
    class Taking(Norm):
        def aggregate(self, values, block):
            return values @ block.take(jnp.ones(total))

    micro = filter_micro_vmap(
        lambda x: x, microbatch_size=2, accumulator=Taking(jnp.array(1.0))
    )
    with pytest.raises(ValueError, match="must have all 4 examples along axis 0"):
        micro(jnp.ones(4))


def test_custom_whose_state_changes():
    class Wrong(Norm):
        def update(self, state, value, block):
            return (state + value).astype(jnp.bfloat16)

    micro = filter_micro_vmap(lambda x: x, accumulator=Wrong(jnp.array(1.0)))
    with pytest.raises(TypeError, match="must keep structure, shapes and dtypes"):
        micro(jnp.ones(3))


def test_optax_accumulator_objects(getkey):
    product = optax.microbatching.Accumulator(
        init=lambda tree: jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), tree),
        update=lambda carry, value, index: jax.tree.map(jnp.multiply, carry, value),
        finalize=lambda carry: carry,
        aggregate=lambda values: jax.tree.map(lambda v: v.prod(0), values),
    )
    x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (12, 2)), jnp.float32)
    fun = lambda x: (x, {"a": 2 * x})
    for accumulator in (product, (product, {"a": product})):
        got = filter_micro_vmap(fun, microbatch_size=4, accumulator=accumulator)(x)
        # Not against optax's own `micro_vmap`: that of optax 0.2.7 gets these wrong.
        expected = np.asarray(x).prod(0)
        assert_same(got, (expected, {"a": 2**12 * expected}), tol=1e-4)


# Memory


@pytest.mark.cpu
@pytest.mark.parametrize("name", spread(sorted(set(ORACLES) - {"concat"}), 3))
def test_temporaries_do_not_grow_with_the_batch(name):
    accumulator, _ = ORACLES[name]
    run = lambda x: filter_micro_vmap(
        lambda x: jnp.tanh(jnp.outer(x, x)), microbatch_size=16, accumulator=accumulator
    )(x)
    small, large = (memory(run, jnp.zeros((n, 32))) for n in (64, 1024))
    assert large.temp_size_in_bytes <= small.temp_size_in_bytes + 256
    assert small.temp_size_in_bytes < 3 * 16 * 32 * 32 * 4


LONG = 2**14


@eqx.filter_jit
def long_sums(x, weights):
    run = lambda fun, accumulator: filter_micro_vmap(
        fun, microbatch_size=1, accumulator=accumulator
    )
    scaled = lambda p: run(lambda x: p * x, Sum())(x)
    one = jnp.ones(())
    loss = lambda p, x: p * x
    gradient = filter_micro_grad(loss, microbatch_size=1, accumulator=Sum())
    return {
        "sum": run(lambda x: x, Sum())(x) / LONG,
        "mean": run(lambda x: x, Mean())(x),
        "weights": run(lambda x: x, Mean(weights=weights))(x),
        "variance": run(lambda x: x, Variance())(x)[1],
        "exponentials": jnp.exp(run(lambda x: x, LogSumExp())(x)) / LONG,
        "tangent": jax.jvp(scaled, (one,), (one,))[1] / LONG,
        "cotangents": jax.grad(lambda x: run(jnp.sin, Sum())(x))(x),
        "gradient": gradient(one, x) / LONG,
    }


def test_long_sums_keep_their_digits():
    """Adding one by one loses 1.5e-4 of equal numbers."""
    value = np.float32(0.1)
    found = long_sums(jnp.full(LONG, value), jnp.full(LONG, jnp.float32(0.3)))
    assert found.pop("variance") < 1e-12
    np.testing.assert_allclose(found.pop("exponentials"), np.exp(value), rtol=1e-5)
    np.testing.assert_allclose(found.pop("cotangents"), np.cos(value), rtol=1e-6)
    for name, got in found.items():
        np.testing.assert_allclose(got, value, rtol=1e-6, err_msg=name)
    signs = np.where(np.arange(LONG) % 2, value, -value)
    got = long_sums(jnp.asarray(signs), jnp.ones(LONG))
    np.testing.assert_allclose(got["variance"], np.float64(value) ** 2, rtol=1e-6)
    # Each number is larger than all before.
    ramp = np.linspace(-20, 5, LONG, dtype=np.float32)
    got = long_sums(jnp.asarray(ramp), jnp.ones(LONG))["exponentials"]
    np.testing.assert_allclose(got, np.exp(np.float64(ramp)).mean(), rtol=1e-5)


@pytest.mark.parametrize("bad", (np.inf, np.nan))
def test_long_sums_of_numbers_that_are_not_finite(bad):
    x = np.ones(LONG, np.float32)
    x[3] = bad
    found = long_sums(jnp.asarray(x), jnp.ones(LONG))
    np.testing.assert_equal(np.asarray(found["sum"]), np.float32(bad))
    np.testing.assert_equal(np.asarray(found["gradient"]), np.float32(bad))
