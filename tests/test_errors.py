"""Wrong input: each a clear error."""

import functools
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import eqxbatch
from eqxbatch import (
    Concat,
    curvature_solve,
    filter_batch_kernel,
    filter_kfac,
    filter_micro_grad,
    filter_micro_vmap,
    filter_microbatch,
    GGNOperator,
    KernelOperator,
    Max,
    MemoryBudget,
    Sum,
)
from eqxbatch._base.jaxprs import equations_in
from .helpers import drawn, KINDS, make_mesh, put, variants


pytestmark = pytest.mark.quick


TRANSFORMS = (
    filter_micro_vmap,
    functools.partial(filter_microbatch, accumulator=Sum()),
)


def total(x, y=0.0):
    return jnp.sum(x) + jnp.sum(y)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_unequal_batch_axes(transform):
    fun = transform(total, microbatch_size=4)
    with pytest.raises(ValueError, match=r"`x` has 9 \(axis 0 of.*`y` has 8 \(axis 0"):
        fun(jnp.ones(9), jnp.ones(8))
    with pytest.raises(ValueError, match=r"`x` has 9.*`y` has 8"):
        fun(jnp.ones(9), y=jnp.ones(8))
    with pytest.raises(ValueError, match=r"`x\['a'\]` has 9.*`x\['b'\]\[0\]` has 7"):
        transform(lambda x: x["a"].sum())({"a": jnp.ones(9), "b": [jnp.ones(7)]})
    with pytest.raises(ValueError, match=r"`args\[1\]` has 8"):
        transform(lambda x, *args: x.sum())(jnp.ones(9), *[jnp.ones(9), jnp.ones(8)])


def test_axis_size_that_disagrees():
    fun = filter_micro_vmap(total, axis_size=8)
    with pytest.raises(ValueError, match=r"`x` has 9.*`axis_size` is 8"):
        fun(jnp.ones(9))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("size", (0, -1, np.int64(0)))
def test_sizes_below_one(transform, size, unchecked):
    with pytest.raises(ValueError, match=r"`microbatch_size` must be at least 1; got"):
        transform(total, microbatch_size=size)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("size", (2.0, "4", True, jnp.array(4), (4,)))
def test_sizes_that_are_not_ints(transform, size, unchecked):
    with pytest.raises(TypeError, match="`microbatch_size` must be int"):
        transform(total, microbatch_size=size)


@pytest.mark.parametrize("size", (np.int64(4), np.array(4)))
def test_sizes_of_numpy_are_ints(size, unchecked):
    micro = filter_microbatch(jnp.sum, accumulator=Sum(), microbatch_size=size)
    assert micro(jnp.ones(9)) == 9


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("axis", (1, -2, 7))
def test_in_axes_out_of_range(transform, axis):
    fun = transform(total, in_axes=axis)
    with pytest.raises(
        ValueError, match=rf"`x` the batch axis {axis}, which is out of"
    ):
        fun(jnp.ones(9))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_scalars_with_a_batch_axis(transform):
    with pytest.raises(ValueError, match="`y` the batch axis 0, which is out of range"):
        transform(total)(jnp.ones(3), jnp.array(1.0))


@pytest.mark.parametrize("axis", (2, -3))
def test_out_axes_out_of_range(axis):
    fun = filter_micro_vmap(lambda x: {"a": x}, out_axes=axis)
    with pytest.raises(
        ValueError, match=rf"output\['a'\] the axis {axis}, which is out"
    ):
        fun(jnp.ones((9, 2)))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_nothing_batched(transform):
    with pytest.raises(ValueError, match="Nothing is batched"):
        transform(total, in_axes=None)(jnp.ones(3))
    with pytest.raises(ValueError, match="Nothing is batched"):
        transform(total)(3.0)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_in_axes_that_do_not_fit(transform):
    with pytest.raises(ValueError, match="`in_axes` must be a PyTree prefix"):
        transform(total, in_axes=(0, 0, 0))(jnp.ones(3))
    with pytest.raises(ValueError, match=r"did not correspond to any argument: \('z',"):
        transform(total, in_axes={"z": 0})(jnp.ones(3))
    with pytest.raises(ValueError, match="`in_axes` must consist of ints, None"):
        transform(total, in_axes="x")(jnp.ones(3))
    with pytest.raises(ValueError, match="`in_axes` must consist of ints, None"):
        transform(total, in_axes=1.0)(jnp.ones(3))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_batch_axis_of_what_is_no_array(transform):
    fun = transform(lambda x, f: f(x).sum(), in_axes=0)
    with pytest.raises(ValueError, match="`f` the batch axis 0, but it is a"):
        fun(jnp.ones(3), jnp.sin)


def test_out_axes_that_do_not_fit():
    x = jnp.ones(3)
    with pytest.raises(ValueError, match="`out_axes` must be a PyTree prefix"):
        filter_micro_vmap(lambda x: x, out_axes=(0, 0))(x)
    with pytest.raises(ValueError, match="`out_axes` gives the axis 0 to a str"):
        filter_micro_vmap(lambda x: (x, "static"), out_axes=0)(x)
    with pytest.raises(ValueError, match="out_axes"):
        filter_micro_vmap(lambda x: x, out_axes=None)(x)


def test_unmapped_output_of_no_examples():
    fun = filter_micro_vmap(lambda x: (x, jnp.array(1.0)), out_axes=(0, None))
    with pytest.raises(ValueError, match="there are 0 examples to take it from"):
        fun(jnp.ones(0))


def test_concat_with_an_axis():
    fun = filter_micro_vmap(lambda x: x, accumulator=Concat(1))
    with pytest.raises(ValueError, match="the axis is set by `out_axes`"):
        fun(jnp.ones((3, 2)))


def test_tree_accumulators_of_unmapped_outputs():
    class Whole(Max):
        leafwise = False

    fun = filter_micro_vmap(
        lambda x: (x, jnp.array(1.0)), out_axes=(0, None), accumulator=Whole()
    )
    with pytest.raises(ValueError, match="takes a whole part of the output"):
        fun(jnp.ones(3))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_static_counts_out_of_range(transform):
    for count in (-1, 4):
        fun = transform(total, microbatch_size=4, num_real_microbatches=count)
        with pytest.raises(
            ValueError, match=rf"must be between 0 and .* 3; got {count}"
        ):
            fun(jnp.ones(9))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("count", (-1, 4))
def test_traced_counts_out_of_range(transform, count):
    @eqx.filter_jit
    def run(count):
        fun = transform(total, microbatch_size=4, num_real_microbatches=count)
        return fun(jnp.ones(9))

    with pytest.raises(RuntimeError, match="must be between 0 and the number of micro"):
        jax.block_until_ready(run(jnp.array(count)))


@pytest.mark.devices
@pytest.mark.parametrize("kind", variants(KINDS, AxisType.Auto))
def test_wrong_numbers_on_several_devices_are_nan(kind):
    """One device would raise an error, and the others wait for that one for ever."""
    x = put(jnp.ones((8, 3)), make_mesh(kind), "data")

    @eqx.filter_jit
    def run(x, bound, count, index):
        of_one = lambda weight, x: jnp.sum(weight * x)
        clip = filter_micro_grad(of_one, microbatch_size=4, clip_norm=bound)
        some = filter_micro_vmap(total, microbatch_size=4, num_real_microbatches=count)
        operator = KernelOperator(lambda x, y: x @ y.T, x, block_size=4)
        return clip(jnp.ones(3), x), some(x), operator.column(index)

    numbers = lambda *xs: map(jnp.array, xs)
    right = jax.device_get(run(x, *numbers(0.5, 1, 2)))
    assert all(np.all(np.isfinite(out)) for out in right)
    for wrong in (numbers(-0.5, -1, -1), numbers(np.nan, 3, 8)):
        for out in jax.device_get(run(x, *wrong)):
            assert np.all(np.isnan(out))


@pytest.mark.devices
@pytest.mark.parametrize("kind", variants(KINDS, AxisType.Auto))
def test_wrong_dampings_and_kernels_on_several_devices_are_nan(kind):
    """Also where the arrays that say so have lost the type of the mesh."""
    x = put(jnp.ones((8, 3)), make_mesh(kind), "data")

    @eqx.filter_jit
    def run(x, damping, shift):
        linear, square = lambda w, x: w @ x, lambda out, x: jnp.sum(out**2)
        operator = GGNOperator(linear, square, jnp.ones(3), x)
        solved = curvature_solve(operator, jnp.ones(3), damping=damping)
        factors = filter_kfac(linear, square, microbatch_size=4)(jnp.ones((2, 3)), x)
        product = factors.operator(damping).mv(jnp.ones((2, 3)))
        tilted = lambda a, b: a @ b.T + shift * jnp.arange(1.0 * len(a))[:, None]
        kernel = filter_batch_kernel(tilted, block_size=4, symmetric=True)
        return solved.solution, product, kernel(x)

    right = jax.device_get(run(x, jnp.array(0.5), jnp.array(0.0)))
    assert all(np.all(np.isfinite(out)) for out in right)
    for out in jax.device_get(run(x, jnp.array(-0.5), jnp.array(1.0))):
        assert np.all(np.isnan(out))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("count", (1.0, True, "1", jnp.array(1.0), jnp.array([1])))
def test_counts_that_are_no_ints(transform, count, unchecked):
    error = ValueError if getattr(count, "shape", ()) else TypeError
    with pytest.raises(error, match="`num_real_microbatches` must be int"):
        transform(total, num_real_microbatches=count)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_errors_of_the_function_come_through(transform):
    def fun(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        transform(fun, microbatch_size=4)(jnp.ones(9))


@pytest.mark.parametrize("value", ("", "lots", "1XB", "GB", 1.5, True, None, "1.2.3MB"))
def test_budgets_that_are_not_understood(value, unchecked):
    if value is None:
        assert MemoryBudget().max_bytes is None
        return
    with pytest.raises(ValueError, match="`max_bytes` must be an int or a string"):
        MemoryBudget(value)


@pytest.mark.parametrize("value", (0, -1, "0MB"))
def test_budgets_that_are_not_positive(value):
    with pytest.raises(ValueError, match="`max_bytes` must be positive"):
        MemoryBudget(value)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_wrong_function(transform, unchecked):
    with pytest.raises(TypeError, match="`fun` must be callable; got 3"):
        transform(3)


def test_decorator_with_arguments_is_a_partial():
    decorator = filter_micro_vmap(microbatch_size=4)
    assert isinstance(decorator, functools.partial)
    assert decorator(jnp.sin)(jnp.ones(9)).shape == (9,)


def test_loss_of_one_example_with_a_named_axis():
    loss = lambda w, x: jnp.sum(w * (x - jax.lax.pmean(x, "batch")))
    for options in ({}, {"clip_norm": 1.0}):
        grad = eqxbatch.filter_micro_grad(loss, **options)
        with pytest.raises(NameError, match=r"uses a named axis.*grad` as `axis_name`"):
            grad(jnp.ones(2), jnp.ones((3, 2)))
    with pytest.raises(NameError, match="not_there"):
        eqxbatch.filter_micro_grad(lambda w, x: not_there)(
            jnp.ones(2), jnp.ones((3, 2))
        )


def test_states_are_not_concatenated():
    fun = lambda w, x: (jnp.sum(x @ w), {"count": jnp.zeros(())})
    grad = functools.partial(
        eqxbatch.filter_micro_grad,
        fun,
        batched=True,
        has_aux=True,
        accumulator=Sum(),
        microbatch_size=2,
    )
    with pytest.raises(ValueError, match=r"`Last\(\)` for what each microbatch repl"):
        grad()(jnp.ones(2), jnp.ones((4, 2)))
    grad(aux_accumulator=eqxbatch.Last())(jnp.ones(2), jnp.ones((4, 2)))


def test_budgets_too_small_for_a_gradient():
    grad = eqxbatch.filter_micro_grad(
        lambda w, x: jnp.sum(w * x), microbatch_size=eqxbatch.MemoryBudget(1)
    )
    with pytest.raises(ValueError, match=r"Raise the budget.*`jax.checkpoint` keeps"):
        grad(jnp.ones(2), jnp.ones((3, 2)))


def test_lists_that_are_the_same_for_all_examples():
    x = jnp.arange(3.0)
    fun = lambda x, levels: x * sum(levels)
    for axes in ((0, None), {"levels": None}):
        assert filter_micro_vmap(fun, in_axes=axes)(x, [1, 2])[2] == 6
    # Neither a list of arrays nor a tuple is one of examples in the wrong form.
    assert filter_micro_vmap(fun)(x, (1, 2))[2] == 6
    assert filter_micro_vmap(fun)(x, [x, x])[2] == 8


def test_errors_of_functions_are_their_own():
    def fun(w, x):
        raise RuntimeError("mine")

    def picky(w, x):
        if x.ndim == 1:
            raise KeyError("two axes")
        return jnp.sum(x @ w)

    w, x = jnp.ones(2), jnp.ones((3, 2))
    for transform in (eqxbatch.filter_micro_grad, filter_micro_vmap):
        with pytest.raises(RuntimeError, match=r"^mine"):
            transform(fun)(w if transform is not filter_micro_vmap else x[:, 0], x)
    with pytest.raises(KeyError, match=r"(?s)two axes.*works for a whole batch"):
        eqxbatch.filter_micro_grad(picky)(w, x)


def test_errors_of_functions_in_jit_with_static_arguments_come_through():
    fun = jax.jit(lambda x, mode: jnp.dot(x, jnp.ones(3)), static_argnames="mode")
    run = filter_micro_vmap(fun, in_axes=(0, None))
    with pytest.raises(TypeError, match="dot_general requires"):
        run(jnp.ones((4, 2)), "fast")


def test_the_accumulator_says_what_a_loss_of_a_batch_is():
    w, x = jnp.ones(2), jnp.arange(14.0).reshape(7, 2)
    for reduce, accumulator in ((jnp.mean, eqxbatch.Mean()), (jnp.sum, Sum())):
        loss = lambda w, x, reduce=reduce: reduce((x @ w) ** 2)
        expected = jax.jit(jax.grad(loss))(w, x)
        for size in (3, None):
            by_rows = filter_microbatch(
                eqx.filter_grad(loss),
                in_axes=(None, 0),
                microbatch_size=size,
                accumulator=accumulator,
            )
            of_batch = eqxbatch.filter_micro_grad(
                loss, batched=True, microbatch_size=size, accumulator=accumulator
            )
            for grad in (by_rows, of_batch):
                np.testing.assert_allclose(grad(w, x), expected, rtol=1e-5)


class TheirError(TypeError, ValueError):
    """An exception of the user, of the types that most mistakes raise."""


def fails(*args, **kwargs):
    raise TheirError("theirs")


def fails_for_one(*args):
    if args[-1].ndim == 1:
        raise TheirError("theirs")
    return jnp.zeros(())


def fails_for_many(*args):
    if args[-1].ndim == 2:
        raise TheirError("theirs")
    return jnp.zeros(())


class FailingMeter(eqxbatch.AbstractProgressMeter):
    def start(self, num_blocks, num_done):
        return None

    def step(self, state, num_nans, residual=None):
        fails()

    def close(self, state):
        pass


def test_exceptions_of_users_stay_their_own():
    """So that `except TheirError` works."""
    w, x, square = jnp.ones(2), jnp.ones((3, 2)), lambda w, x: jnp.sum(w * x) ** 2
    budget = MemoryBudget("1MB")
    linear = lambda x, y=None: x @ (x if y is None else y).T
    kernel = functools.partial(eqxbatch.filter_batch_kernel, block_size=2)
    grad, hessian = eqxbatch.filter_micro_grad, eqxbatch.filter_hessian
    ggn = functools.partial(eqxbatch.filter_ggn, in_axes=0)
    key = jax.random.key(0)
    host = eqxbatch.HostStore()
    calls = [
        lambda: filter_micro_vmap(fails)(x),
        lambda: filter_micro_vmap(fails, microbatch_size=budget)(x),
        lambda: filter_micro_vmap(jax.jit(fails))(x),
        lambda: filter_micro_vmap(total, vmap_fn=fails)(x),
        lambda: filter_microbatch(fails, accumulator=Sum())(x),
        lambda: eqxbatch.filter_grid_vmap(fails, in_axes=eqxbatch.grid("i"))(w),
        lambda: grad(fails)(w, x),
        lambda: grad(fails, clip_norm=1.0)(w, x),
        lambda: grad(square, transform=fails)(w, x),
        lambda: grad(square, where=fails)(w, x),
        lambda: grad(square, filter_spec=fails)(w, x),
        lambda: hessian(fails, in_axes=0)(w, x),
        lambda: eqxbatch.filter_jacobian(fails)(w),
        lambda: eqxbatch.filter_hvp(fails, in_axes=0)(w, w, x),
        lambda: ggn(fails, square)(w, x),
        lambda: ggn(square, fails)(w, x),
        lambda: ggn(square, square, fisher="mc", key=key, sampler=fails)(w, x),
        lambda: eqxbatch.explain_sites(fails, w, x, in_axes=0),
        lambda: kernel(fails)(x),
        lambda: kernel(fails, pairwise=True)(x),
        lambda: kernel(fails, store=host)(x),
        lambda: kernel(linear, symmetric=fails)(x),
        lambda: kernel(linear, progress=FailingMeter())(x),
        lambda: kernel(linear, store=host, progress=FailingMeter())(x),
        lambda: eqxbatch.KernelOperator(fails, x),
        lambda: eqxbatch.EmpiricalNTK(eqx.Partial(fails, w))(x),
        lambda: eqxbatch.MonteCarloKernel(fails, key=key, num_samples=1)(x),
    ]
    for call in calls:
        with pytest.raises(TheirError, match="theirs"):
            call()


def test_exceptions_of_users_get_notes():
    w, x = jnp.ones(2), jnp.ones((3, 2))
    grad = functools.partial(eqxbatch.filter_micro_grad, accumulator=Sum())
    for fun, other, calls in (
        (
            fails_for_one,
            "whole batch",
            (
                lambda f: filter_micro_vmap(f, microbatch_size=2)(x),
                lambda f: grad(f)(w, x),
                lambda f: grad(f, clip_norm=1.0)(w, x),
                lambda f: eqxbatch.filter_hessian(f, in_axes=0)(w, x),
                lambda f: eqxbatch.filter_ggn(f, f, in_axes=0)(w, x),
                lambda f: eqxbatch.explain_sites(f, w, x, in_axes=0),
                lambda f: eqxbatch.EmpiricalNTK(eqx.Partial(f, w))(x),
            ),
        ),
        (
            fails_for_many,
            "single example",
            (
                lambda f: filter_microbatch(f, accumulator=Sum())(x),
                lambda f: grad(f, batched=True)(w, x),
                lambda f: eqxbatch.EmpiricalNTK(eqx.Partial(f, w), in_axes=None)(x),
            ),
        ),
    ):
        for call in calls:
            with pytest.raises(TheirError, match=f"(?s)theirs.*works for a {other}"):
                call(fun)


def test_a_call_has_one_condition_for_all_numbers():
    """The host of a GPU waits for each."""
    model = drawn(eqx.nn.MLP, 2, 2, 4, 1, key=jax.random.key(0))
    x, number = jnp.ones((3, 2)), jnp.asarray(0.1)
    weighted = eqxbatch.Mean(weights=jnp.ones(3))

    def step(number, x):
        take = eqxbatch.filter_gauss_newton_step(
            lambda model, x: model(x),
            damping=number,
            weights=number,
            accumulator=weighted,
        )
        return take(model, x)

    square = lambda out, x: jnp.sum(out**2)
    kfac = eqxbatch.filter_kfac(
        lambda model, x: model(x), square, in_axes=0, corrected=True
    )
    factors = eqx.filter_eval_shape(kfac, model, x)
    inverse = lambda factors, number: factors.operator(damping=number).inverse()
    cases = (1, step, (number, x)), (2, inverse, (factors, number))
    for num_calls, fun, args in cases:
        closed, _, _ = eqx.filter_make_jaxpr(fun)(*args)
        names = [eqn.primitive.name for eqn in equations_in(closed)]
        assert names.count("cond") == num_calls


@pytest.mark.parametrize("filtering", ("auto", "off"))
def test_tracebacks_show_the_frames_of_users(filtering):
    def wrong(x):
        raise LookupError("wrong")

    def call():
        eqxbatch.filter_micro_vmap(wrong, microbatch_size=2)(jnp.ones(5))

    jax.config.update("jax_traceback_filtering", filtering)
    try:
        with pytest.raises(LookupError, match="wrong") as raised:
            call()
    finally:
        jax.config.update("jax_traceback_filtering", "off")
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert (frames[1].name, frames[-1].name) == ("call", "wrong")
    num = sum("eqxbatch/_" in frame.filename for frame in frames)
    # The call of the transform, and what compiles it.
    assert num == 3 if filtering == "auto" else num > 10
