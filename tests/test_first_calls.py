"""First calls: what they say, and what a second process has of them."""

import functools
import logging
import os
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch import (
    EmpiricalNTK,
    filter_hessian,
    filter_jacobian,
    filter_micro_grad,
    filter_micro_vmap,
    over_batches,
)
from .families import calls
from .helpers import drawn, variants


MODEL = drawn(eqx.nn.MLP, 3, 2, 4, 1, key=jax.random.key(0))
X = jnp.ones((5, 3))


def loss(model, x):
    return jnp.sum(model(x) ** 2)


@pytest.mark.parametrize(
    ("call", "expected"),
    (
        (
            lambda: filter_micro_grad(loss, clip_norm=1.0)(MODEL, X),
            "Clipping: method='auto' is 'sites' (factors: 4).",
        ),
        (
            lambda: filter_micro_grad(loss, clip_norm=1.0, method="materialise")(
                MODEL, X
            ),
            "Clipping: method='materialise' is 'materialise' (derivative: 4).",
        ),
        (
            lambda: filter_hessian(loss, in_axes=0, method="sites")(MODEL, X),
            "Second derivatives: method='sites' takes 4 of 4 arrays by sites.",
        ),
        (
            lambda: filter_hessian(loss, method="products")(MODEL, X[0]),
            "Second derivatives: method='products' takes 0 of 4 arrays by sites.",
        ),
        (
            lambda: filter_jacobian(lambda model: model(X[0]))(MODEL),
            "Jacobian: mode='auto' is 'rev'.",
        ),
        (
            lambda: EmpiricalNTK(MODEL)(X),
            "NTK: method='auto' is 'sites'; about ",
        ),
    ),
)
def test_choices_are_logged(call, expected, caplog):
    # Choices are made where programs are traced.
    with caplog.at_level(logging.DEBUG, "eqxbatch"):
        eqx.filter_eval_shape(call)
    messages = [record.getMessage() for record in caplog.records]
    assert any(message.startswith(expected) for message in messages), messages


def programs_of(names, folder, seed):
    """What each family compiles in a fresh process, and what it takes from a cache."""
    # Hashes of strings differ between processes, and so does the order in sets.
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.families", str(folder), *names],
        env=environment,
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {name: (int(compiled), int(cached)) for name, compiled, cached in rows}


# The others do what these do: a loop, sites, blocks.
FAMILIES = [*calls()]
SOME = ("clipped gradients", "NTK")


@pytest.mark.parametrize(
    "names",
    (
        SOME,
        pytest.param(
            tuple(name for name in FAMILIES if name not in SOME),
            marks=pytest.mark.matrix,
        ),
    ),
    ids=("some", "others"),
)
def test_a_second_process_compiles_nothing(names, tmp_path):
    first, second = (programs_of(names, tmp_path, seed) for seed in (1, 2))
    assert tuple(first) == names
    for name, (compiled, cached) in first.items():
        assert compiled > 0, name
        assert second[name] == (0, compiled + cached), name


def of_shape(fun, num=3):
    return filter_micro_grad(fun)(jnp.ones(3), jnp.ones((num, 3)))


def made_anew(scale=1.0):
    return lambda m, x: scale * jnp.sum(m * x)


def recursive():
    def fun(m, x, depth=2):
        return jnp.sum(m * x) if depth == 0 else fun(m, x, depth - 1)

    return fun


def test_functions_made_anew_are_warned_of_once():
    for make in (made_anew, recursive, lambda: functools.partial(made_anew(2.0))):
        of_shape(make())
        of_shape(make())
        name = "lambda" if make is not recursive else "recursive.<locals>.fun"
        with pytest.warns(UserWarning, match=f"compiled 3 times, because .*{name}"):
            of_shape(make())
        of_shape(make())


class Scaled(eqx.Module):
    weight: jax.Array
    scale: float

    def __call__(self, x):
        return self.scale * jnp.sum(self.weight * x)


def scaled(m, x, scale):
    return scale * jnp.sum(m * x)


ONES = jnp.ones(3), jnp.ones((3, 3))
call_model = lambda m, x: m(x)


# Each with a label of its own, as a program is warned of once.
CHANGING = {
    "`scale`": lambda i: filter_micro_grad(scaled)(*ONES, i / 10),
    r"`scale\['of'\]`": lambda i: filter_micro_grad(
        lambda m, x, scale: scaled(m, x, scale["of"])
    )(*ONES, {"of": i}),
    r"`m\.scale`": lambda i: filter_micro_grad(call_model)(
        Scaled(ONES[0], i / 10), ONES[1]
    ),
    r"`scale` in `made_anew\.<locals>\.<lambda>`": lambda i: of_shape(
        made_anew(i / 10), num=2
    ),
    r"`\.clip_norm`": lambda i: filter_micro_grad(call_model, clip_norm=1.0 + i)(
        Scaled(ONES[0], 1.0), ONES[1]
    ),
    "`factor`": lambda i: over_batches(
        filter_micro_vmap(lambda factor, x: factor * x, in_axes=(None, 0)),
        batch_size=3,
    )(i / 10, np.ones(3, np.float32)),
}


@pytest.mark.parametrize("label", CHANGING)
def test_numbers_that_change_are_warned_of_once(label):
    run = CHANGING[label]
    for i in range(4):
        run(i)
    with pytest.warns(UserWarning, match=f"compiled 5 times, .* number .* {label} was"):
        run(4)
    run(5)


def test_sizes_that_change_are_no_mistake():
    for size in range(1, 7):
        filter_micro_grad(call_model, microbatch_size=size)(
            Scaled(ONES[0], 2.0), jnp.ones((9, 3))
        )
        # The keys of this node are no names of its entries.
        partial = jax.tree_util.Partial(call_model, Scaled(ONES[0], 2.0))
        EmpiricalNTK(partial, block_size=size)(jnp.ones((9, 3)))


def over_numbers():
    for scale in (-2, -1, 0, 1, 1.0):
        of_shape(made_anew(scale))


def over_arrays():
    for i in range(6):
        # Each can be where one before was.
        scale = jnp.ones(()) + i
        of_shape(lambda m, x: scale * jnp.sum(m * x))


def over_lists():
    scales = []
    for i in range(4):
        scales.append(float(i))
        of_shape(lambda m, x: sum(scales) * jnp.sum(m * x))


def over_shapes():
    for num in range(1, 5):
        of_shape(made_anew(3.0), num)


def over_settings():
    for size in range(1, 5):
        fun = filter_micro_grad(made_anew(4.0), microbatch_size=size)
        fun(jnp.ones(3), jnp.ones((4, 3)))


def while_traced():
    jax.jit(lambda: [of_shape(made_anew(5.0)) for _ in range(4)])()


def in_scans():
    step = lambda carry, _: (carry + of_shape(made_anew(6.0)), None)
    jax.lax.scan(step, jnp.zeros(3), length=4)


def twice_of_one():
    fun = made_anew(7.0)
    for _ in range(4):
        of_shape(fun)
        jax.clear_caches()


@pytest.mark.parametrize(
    "calls",
    variants(
        (
            *(over_numbers, over_arrays, over_lists, over_shapes, over_settings),
            *(while_traced, in_scans, twice_of_one),
        ),
        # The same as numbers, shapes and loops.
        *(over_lists, over_settings, in_scans),
    ),
)
@pytest.mark.filterwarnings("error")
def test_other_compilations_are_not_warned_of(calls):
    calls()
