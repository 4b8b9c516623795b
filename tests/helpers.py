"""Helpers that several test modules use."""

import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from .on_cpu import has_accelerator, require


# Numbers of examples around multiples of a block size of 4, and a prime.
BLOCK = 4
TOTALS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 13)

TOLERANCES = {
    jnp.dtype(jnp.bfloat16): 2e-2,
    jnp.dtype(jnp.float16): 2e-3,
    jnp.dtype(jnp.float32): 2e-5,
    jnp.dtype(jnp.complex64): 2e-5,
    jnp.dtype(jnp.float64): 1e-12,
    jnp.dtype(jnp.complex128): 1e-12,
}


def assert_same(got, expected, tol=None):
    """Checks structure, static leaves, shapes, dtypes, and values up to rounding.

    What is expected can be arrays of NumPy, for which nothing is compiled.
    """
    got_arrays, got_static = eqx.partition(got, eqx.is_array)
    arrays, static = eqx.partition(expected, eqx.is_array)
    assert eqx.tree_equal(got_static, static)
    assert jax.tree.structure(got_arrays) == jax.tree.structure(arrays)
    for a, b in zip(jax.tree.leaves(got_arrays), jax.tree.leaves(arrays), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jr.key_data(a), jr.key_data(b)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        rtol = TOLERANCES[a.dtype] if tol is None else tol
        wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        scale = np.max(np.abs(b), initial=0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


def last_bits(dtype):
    """How far apart two programs may be that have the same bits on CPUs.

    Programs of GPUs and TPUs add up in an order of their own: one that a loop on the
    host runs, and one with the loop in it.
    """
    few = 16 * float(jnp.finfo(dtype).eps)
    return min(few, TOLERANCES[jnp.dtype(dtype)]) if has_accelerator() else 0


def assert_bits(got, expected):
    """Checks that arrays have the same bits on CPUs, and all but the last elsewhere."""
    if not has_accelerator():
        assert eqx.tree_equal(got, expected)
        return
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        is_inexact = jnp.issubdtype(a.dtype, jnp.inexact)
        assert_same(a, b, tol=last_bits(a.dtype) if is_inexact else None)


def quickly(values, num, others=()):
    """Values for `parametrize`; `-m quick` runs only the first `num` of them."""
    return [pytest.param(x, marks=pytest.mark.quick) for x in values[:num]] + [
        pytest.param(x, marks=others) for x in values[num:]
    ]


def thinned(*settings, quick=0):
    """All combinations of each two settings, for `parametrize`.

    The default run has each value of each setting at least once, `-m quick` the first
    few of these, and the others are marked `matrix`. Of three or more settings, there
    are as many combinations as it takes to have all values of each two together.
    """
    most = max(map(len, settings))
    # Settings of one length do not go in step with those of another.
    kept = [tuple((i + i // len(x)) % len(x) for x in settings) for i in range(most)]
    every = [*itertools.product(*(range(len(x)) for x in settings))]
    pairs = lambda indices: {*itertools.combinations(enumerate(indices), 2)}
    chosen, missing = {*kept}, set().union(*map(pairs, every))
    missing -= set().union(*map(pairs, kept))
    while missing:
        best = max(every, key=lambda indices: len(pairs(indices) & missing))
        chosen.add(best)
        missing -= pairs(best)
    params = []
    for indices in sorted(chosen):
        values = (x[i] for x, i in zip(settings, indices, strict=True))
        mark = () if indices in kept else pytest.mark.matrix
        mark = pytest.mark.quick if indices in kept[:quick] else mark
        params.append(pytest.param(*values, marks=mark))
    return params


def variants(values, *names):
    """Values for `parametrize`, of which these are marked `matrix`.

    Here and in `spread`, tuples are values of several arguments.
    """
    assert {*names} <= {*values}, {*names} - {*values}
    return [_left_to_matrix(x) if x in names else x for x in values]


def on_devices(params, which):
    """Values for `parametrize`, of which those are marked that need several devices.

    `which` says so of their arguments. The others run on a single GPU, too.
    """
    found = []
    for x in params:
        if not hasattr(x, "marks"):
            x = pytest.param(*(x if isinstance(x, tuple) else (x,)))
        marks = (*x.marks, *[pytest.mark.devices] * bool(which(*x.values)))
        found.append(pytest.param(*x.values, marks=marks, id=x.id))
    return found


def _left_to_matrix(x):
    values = x if isinstance(x, tuple) else (x,)
    return pytest.param(*values, marks=pytest.mark.matrix)


def spread(values, num):
    """Values for `parametrize`, of which all but `num` are marked `matrix`."""
    kept = {len(values) * i // num for i in range(num)}
    return [x if i in kept else _left_to_matrix(x) for i, x in enumerate(values)]


def normal(key, shape, dtype=jnp.float32):
    """Standard normal numbers of any inexact dtype.

    NumPy draws them, because JAX would compile a program for each shape, as
    `jnp.asarray` does, too, but not `jax.device_put`.
    """
    if isinstance(key, jax.core.Tracer):
        return jr.normal(key, shape, dtype)
    rng = np.random.default_rng(np.asarray(jr.key_data(key)).tolist())
    values = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = (values + 1j * rng.standard_normal(shape)) / np.sqrt(2)
    return jax.device_put(np.asarray(values).astype(dtype))


def integers(key, shape, end):
    """Numbers from 0, below `end`, by NumPy."""
    if isinstance(key, jax.core.Tracer):
        return jr.randint(key, shape, 0, end)
    rng = np.random.default_rng(np.asarray(jr.key_data(key)).tolist())
    return jax.device_put(rng.integers(0, end, shape, np.int32))


def drawn(make, *args, key, **kwargs):
    """A model whose parameters NumPy draws.

    JAX would compile a program for each of them.
    """
    model = eqx.filter_eval_shape(make, *args, key=key, **kwargs)
    is_struct = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    structs, static = eqx.partition(model, is_struct)
    leaves, treedef = jax.tree.flatten(structs)
    ends = np.cumsum([x.size for x in leaves])
    numbers = np.split(np.asarray(normal(key, ends[-1:], float)), ends[:-1])
    scaled = [
        jax.device_put((x.reshape(y.shape) / y.shape[-1] ** 0.5).astype(y.dtype))
        for x, y in zip(numbers, leaves, strict=True)
    ]
    return eqx.combine(treedef.unflatten(scaled), static)


class Bent(eqx.Module):
    """One layer, and a function behind it: the least to compile for a model.

    Equinox leaves out the function behind the last layer of an MLP with no other layer.
    """

    layers: list[eqx.nn.Linear]

    def __init__(self, num_inputs, num_outputs, *, key):
        self.layers = [eqx.nn.Linear(num_inputs, num_outputs, key=key)]

    def __call__(self, x):
        return jnp.tanh(self.layers[0](x))


def bent(num_inputs, num_outputs, key):
    return drawn(Bent, num_inputs, num_outputs, key=key)


KINDS = (AxisType.Auto, AxisType.Explicit)


def make_mesh(kind, shape=(4,), names=("data",)):
    """A mesh with axes of this kind, or of that which JAX takes for None."""
    if math.prod(shape) > 1:
        require("devices")
    if jax.device_count() < math.prod(shape):
        pytest.fail(f"there are fewer devices than {shape} needs: see flags.py")
    types = None if kind is None else (kind,) * len(names)
    return jax.make_mesh(shape, names, axis_types=types)


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def memory(fun, *args):
    """XLA's memory analysis of the compiled `fun`: `temp_size_in_bytes` and so on."""
    require("cpu")
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return jax.jit(fun).lower(*structs).compile().memory_analysis()


class CountTraces:
    """A function that counts how often Python runs it."""

    def __init__(self, fun):
        self.fun = fun
        self.num = 0

    def __call__(self, *args, **kwargs):
        self.num += 1
        return self.fun(*args, **kwargs)


@jax.custom_vjp
def only_backwards(x):
    return jnp.sin(x)


@jax.custom_vjp
def _cosine(x):
    return jnp.cos(x)


_cosine.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (-g * jnp.sin(x),))


# Its derivative has no forward mode either.
only_backwards.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * _cosine(x),))


def forwards_only(x):
    """The sine, by a loop that JAX cannot differentiate in reverse mode."""
    return _looped(jnp.zeros_like(x), lambda total: total + jnp.sin(x))


def _looped(start, step):
    """One step, in a loop whose number of steps is not known."""
    num = 1 + jnp.count_nonzero(lax.stop_gradient(start))
    return lax.fori_loop(0, num, lambda _, value: step(value), start)


@jax.custom_vjp
def rows_only(x):
    """The sine, with a backward pass that JAX cannot transpose."""
    return forwards_only(x)


rows_only.defvjp(
    lambda x: (forwards_only(x), x),
    lambda x, g: (_looped(jnp.zeros_like(x), lambda total: total + g * jnp.cos(x)),),
)


class Counted:
    """Rows on disk that count how often they are read, and may fail."""

    def __init__(self, rows, fails=None):
        self.rows, self.fails, self.read = rows, fails, []
        self.shape = rows.shape

    def __getitem__(self, index):
        if index.start == self.fails:
            raise OSError("a disk")
        self.read.append(index.start)
        return self.rows[index]


def aligned(shape, dtype=np.float64):
    """An array in memory that JAX shares on the CPU if it may."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
