"""Random calls against `eqx.filter_vmap`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

from eqxbatch import Concat, filter_micro_vmap, Mean, Sum
from .helpers import assert_same


DTYPES = (jnp.float32, jnp.int32, jnp.bfloat16, jnp.complex64, jnp.bool_)


@st.composite
def calls(draw):
    """Arguments with batch axes anywhere, any `out_axes`, sizes around the total."""
    total = draw(st.integers(0, 11))
    size = draw(st.none() | st.integers(1, 12))
    arrays, in_axes, out_axes = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 3), max_size=2))
        axis = draw(st.integers(-len(shape) - 1, len(shape)))
        shape.insert(axis % (len(shape) + 1), total)
        dtype = draw(st.sampled_from(DTYPES))
        values = np.arange(np.prod(shape)).reshape(shape) % 5 - 2
        arrays.append(jnp.asarray(values).astype(dtype))
        in_axes.append(axis)
        out_axes.append(draw(st.integers(-len(shape), len(shape) - 1)))
    shared = draw(st.booleans())
    if shared:
        arrays.append(jnp.arange(3.0))
        in_axes.append(None)
        out_axes.append(None)
    return tuple(arrays), tuple(in_axes), tuple(out_axes), total, size


@given(calls(), st.booleans())
@settings(max_examples=60, deadline=None, database=None)
def test_equals_filter_vmap(call, nested):
    arrays, in_axes, out_axes, total, size = call

    def fun(*args):
        return [jnp.flip(x) if x.ndim else -x if x.dtype != bool else x for x in args]

    if total == 0:
        # There is no example that an output without axis could be taken from.
        keep = [axis is not None for axis in in_axes]
        arrays, in_axes, out_axes = (
            tuple(x for x, k in zip(values, keep, strict=True) if k)
            for values in (arrays, in_axes, out_axes)
        )
    axes = {"in_axes": in_axes, "out_axes": list(out_axes)}
    micro = filter_micro_vmap(fun, microbatch_size=size, **axes)
    dense = eqx.filter_vmap(fun, **axes)
    if nested:
        micro, dense = eqx.filter_jit(micro), eqx.filter_jit(dense)
    assert_same(micro(*arrays), dense(*arrays))


@given(
    st.integers(1, 20),
    st.integers(1, 21),
    st.sampled_from((Sum(), Mean(), Concat())),
    st.booleans(),
)
@settings(max_examples=40, deadline=None, database=None)
def test_gradients_do_not_depend_on_the_size(total, size, accumulator, checkpoint):
    x = jnp.linspace(-1.0, 1.0, 2 * total).reshape(total, 2)

    def loss(x, size):
        micro = filter_micro_vmap(
            jnp.sin,
            microbatch_size=size,
            accumulator=accumulator,
            checkpoint=checkpoint,
        )
        return jnp.sum(micro(x) ** 2)

    assert_same(jax.grad(loss)(x, size), jax.grad(loss)(x, None), tol=1e-5)
