"""Contractions of arrays with named axes, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxbatch._sites.axes import Axis, Named, Role
from eqxbatch._sites.contract import contract


NAMES = [Axis(Role.LEAF, number) for number in range(4)]
SIZES = (1, 3, 4, 5)


def random_terms(rng: np.random.Generator) -> list[Named]:
    """Two to four terms, of which most have the same axes in different orders."""
    common = rng.permutation(4)[: rng.integers(0, 5)]
    terms = []
    for _ in range(rng.integers(2, 5)):
        axes = rng.permutation(common)
        if rng.random() < 0.3:
            axes = rng.permutation(4)[: rng.integers(0, 5)]
        if len(axes) and rng.random() < 0.1:
            # The diagonal of two axes.
            axes = np.append(axes, axes[0])
        x = rng.normal(size=[SIZES[i] for i in axes])
        terms.append(Named(x, tuple(NAMES[i] for i in axes)))
    return terms


def expected(terms: list[Named], out: tuple[Axis, ...]) -> np.ndarray:
    operands = []
    for x, axes in terms:
        operands += [x, [axis.number for axis in axes]]
    return np.einsum(*operands, [axis.number for axis in out])


@pytest.mark.parametrize("dtype", ("float16", "float32", "complex64"))
@pytest.mark.quick
def test_random_contractions(dtype: str):
    tolerance = 2e-2 if dtype == "float16" else 2e-5
    for seed in range(30):
        rng = np.random.default_rng(seed)
        terms = random_terms(rng)
        present = list(dict.fromkeys(axis for x in terms for axis in x.axes))
        kept = rng.permutation(len(present))[: rng.integers(0, len(present) + 1)]
        out = tuple(present[i] for i in kept)
        if dtype == "complex64":
            terms = [Named(x * (1 + rng.normal() * 1j), axes) for x, axes in terms]
        rounded = [Named(jnp.asarray(x, dtype), axes) for x, axes in terms]
        result = contract(rounded, out)
        right = expected([Named(np.asarray(x, "c16"), a) for x, a in rounded], out)
        size = expected([Named(np.abs(x), axes) for x, axes in terms], out)
        assert result.shape == right.shape
        assert result.dtype == dtype
        assert np.all(np.abs(np.asarray(result, "c16") - right) <= tolerance * size)


def test_sums_of_entries_stay_where_they_are():
    # A table over rows meets two Gram matrices whose axes are in different orders.
    rows, first, second, entry, out = (Axis(Role.LEAF, i) for i in range(5))

    def kernel(s: jax.Array, a: jax.Array, d: jax.Array) -> jax.Array:
        terms = [
            Named(d, (first, out, rows)),
            Named(a, (first, entry)),
            Named(d, (second, out, rows)),
            Named(a, (second, entry)),
            Named(s, (rows, entry)),
        ]
        return contract(terms, (first, second))

    shapes = (4, 32), (64, 32), (64, 10, 4)
    structs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    text = str(jax.make_jaxpr(kernel)(*structs))
    # Each of the two Gram matrices is a product, and what meets is added up.
    assert text.count("dot_general") == 2
    assert text.count("reduce_sum") == 1
