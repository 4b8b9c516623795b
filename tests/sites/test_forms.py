"""Which contraction is exact for which site: uses that look alike, and are not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from eqxbatch import (
    EmpiricalNTK,
    filter_ggn,
    filter_hessian,
    filter_hessian_diagonal,
    filter_micro_grad,
)
from ..helpers import normal, thinned, variants
from ..layers import Case, vectors, weight
from .adapter import without_parameters
from .oracle import cast, compare


pytestmark = [
    pytest.mark.versions,
    pytest.mark.usefixtures("x64", "mixed_dtypes"),
    # JAX 0.7 warns where it transposes a product of real and complex arrays itself.
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
]


@pytest.fixture
def mixed_dtypes():
    """Products of real and complex arrays are what some of these tests are about."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def integers(dtype, *values):
    """Examples of the same tokens, in another order each."""

    def example(key):
        rng = np.random.default_rng(np.asarray(jr.key_data(key)).tolist())
        return jax.device_put(rng.permutation(np.asarray(values, dtype)))

    return example


def dropping(w, x, axis=0):
    return jnp.take(w, x, axis=axis, mode="fill", fill_value=0)


def both_modes(w, x):
    return dropping(w, x) * jnp.take(w, x, axis=0, mode="clip")


def tied_layers(tables, x):
    """Each table of a stack looks tokens up, and is multiplied with."""

    def step(state, table):
        return jnp.tanh(table[x].sum(0) @ table.T @ table) * state, None

    return lax.scan(step, jnp.ones(tables.shape[-1]), tables)[0]


def tied_layers_and_all(tables, x):
    weights = jnp.sin(jnp.arange(5.0) + x[0].astype(float))
    step = lambda state, table: (state + jnp.tanh(table[x]) * (table.T @ weights), None)
    state, _ = lax.scan(step, jnp.ones((4, 3)), tables)
    return state + jnp.einsum(
        "lvd,lv->d", tables, jnp.ones((2, 5)) * x[1].astype(float)
    )


def looked_up_in_slices(table, x):
    return lax.scan(lambda _, part: (0.0, part[x]), 0.0, table)[1].ravel() ** 2


TOKENS = integers(jnp.int32, 0, 2, 2, 4)
# Norms and Gram matrices follow from the factors.
BY_FACTORS = {
    "added_summed": (weight(5, 3), lambda w, x: x + w.sum(0), vectors(3)),
    # Equal parameters of `concatenate`, and equal shapes.
    "in_two_places": (
        weight(3),
        lambda w, x: (
            jnp.concatenate([x[:1], w, x[:3]]) * x
            + jnp.concatenate([x[:3], w, x[:1]]) * x**2
        ),
        vectors(7),
    ),
    "order_of_reshape": (
        weight(3, 3),
        lambda w, x: jnp.tanh(jnp.reshape(w, (3, 3), order="F") @ x) + w @ x,
        vectors(3),
    ),
    "axes_dropped_in_another_order": (
        weight(2, 1, 3),
        lambda w, x: lax.reshape(w, (3, 2), (2, 1, 0)) @ x[:2] + jnp.sum(w[:, 0] @ x),
        vectors(3),
    ),
    "tied_layers": (weight(2, 5, 3), tied_layers, TOKENS),
    "tied_layers_and_all": (weight(2, 5, 3), tied_layers_and_all, TOKENS),
    "rows_and_columns": (
        weight(5, 5, 3),
        lambda w, x: jnp.concatenate(
            [looked_up_in_slices(w, x), jnp.take(w, x, axis=1).ravel() ** 2]
        ),
        TOKENS,
    ),
    "dropped_from_one_row": (
        weight(1, 3),
        lambda w, x: jnp.concatenate([dropping(w, x).ravel(), w[0] * x[:3]]),
        TOKENS,
    ),
    "dropped_from_repeated_rows": (
        weight(3),
        lambda w, x: dropping(jnp.broadcast_to(w, (3, 3)), x),
        TOKENS,
    ),
    "promises_not_kept": (weight(3, 2), lambda w, x: w[x] * 2.0, TOKENS),
    "uint8_beyond_its_range": (
        weight(300, 2),
        both_modes,
        integers(jnp.uint8, 0, 44, 255),
    ),
    "uint8_at_its_range": (weight(256, 2), both_modes, integers(jnp.uint8, 0, 255)),
    "int8": (weight(200, 2), both_modes, integers(jnp.int8, -128, -1, 0, 127)),
    "uint32": (weight(5, 2), both_modes, integers(jnp.uint32, 2**32 - 1, 4, 5)),
    "one_uint8": (
        weight(300, 2),
        lambda w, x: lax.dynamic_slice(w, (x[0], jnp.uint8(0)), (1, 2)),
        integers(jnp.uint8, 0, 44, 255),
    ),
    "one_int8": (
        weight(200, 2),
        lambda w, x: lax.dynamic_slice(w, (x[0], jnp.int8(0)), (1, 2)),
        integers(jnp.int8, -128, -1, 127),
    ),
}

# Here they do not, and each example's gradient is formed.
BY_GRADIENTS = {
    "product_with_complex": (
        weight(3, 4),
        lambda w, x: w @ jnp.fft.fft(x),
        vectors(4),
    ),
    "complex_by_a_view": (
        (weight(3), weight(3)),
        lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x) * (w[0] + 1j * w[1]), 4),
        vectors(4),
    ),
    "added_repeated": (
        weight(3),
        lambda w, x: x + jnp.repeat(w, 2),
        vectors(6),
    ),
    "added_in_a_part": (
        weight(3),
        lambda w, x: x + jnp.concatenate([w, jnp.zeros(3)]),
        vectors(6),
    ),
    "added_as_complex": (
        weight(3),
        lambda w, x: lax.complex(x, x**2) + w.astype(complex),
        vectors(3),
    ),
    "rows_of_slices": (
        weight(5, 5, 3),
        lambda w, x: jnp.concatenate([looked_up_in_slices(w, x), w[x].ravel() ** 2]),
        TOKENS,
    ),
    "slices_of_both_axes": (
        weight(5, 5),
        lambda w, x: jnp.concatenate(
            [looked_up_in_slices(w, x), looked_up_in_slices(w.T, x)]
        ),
        TOKENS,
    ),
}


@pytest.mark.parametrize(
    "name",
    variants(
        BY_FACTORS,
        "in_two_places",
        "tied_layers",
        "tied_layers_and_all",
        "dropped_from_repeated_rows",
        "axes_dropped_in_another_order",
        "rows_and_columns",
        "uint8_at_its_range",
        "uint32",
        "one_uint8",
    ),
)
def test_use_by_factors(name):
    program, comparable = compare(Case(*BY_FACTORS[name]))
    assert all(comparable)
    assert not program.fallbacks


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_use_by_gradients(name):
    program, comparable = compare(Case(*BY_GRADIENTS[name]))
    assert not any(comparable)
    assert not program.fallbacks


@pytest.mark.flags
@pytest.mark.skipif(jax.__version_info__ <= (0, 7, 2), reason="it takes one bool")
def test_remat_that_keeps_some_inputs():
    def fun(ws, x):
        use = lambda ws, bias, x: jnp.tanh(ws["a"] @ x) * (ws["b"] @ x) + bias
        prevent_cse = ({"a": True, "b": False, "c": True}, False, True)
        return jax.checkpoint(use, prevent_cse=prevent_cse)(ws, ws["c"], x)

    models = {"a": weight(3, 3), "b": weight(3, 3), "c": weight(3)}
    program, _ = compare(Case(models, fun, vectors(3)))
    assert not program.fallbacks


def close(got, expected):
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10 * scale)


def spectral(w, x):
    return jnp.fft.irfft(jnp.fft.rfft(x) * (w[0] + 1j * w[1]), 4)


# Losses of four numbers.
LOSSES = {
    "used_in_another_order": (
        {"a": weight(3), "b": weight(3) + 1},
        lambda w, x: jnp.sum(jnp.exp(w["b"]) * jnp.sin(jnp.exp(w["a"]) * x[:3])),
    ),
    "used_in_another_order_and_shape": (
        {"a": weight(2), "b": weight(3) + 1},
        lambda w, x: jnp.sum(jnp.exp(w["b"]) * jnp.exp(w["a"]).sum() * x[:3]),
    ),
    "order_of_reshape": (
        weight(4, 4),
        lambda w, x: jnp.sum(jnp.sin(jnp.reshape(w, (4, 4), order="F") @ x) ** 2),
    ),
    "product_with_complex": (
        weight(3, 4),
        lambda w, x: jnp.sum(jnp.abs(w @ jnp.fft.fft(x) + 1) ** 3),
    ),
    "complex_by_a_view": (
        (weight(3), weight(3)),
        lambda w, x: jnp.sum(jnp.sin(spectral(w, x))),
    ),
    "complex_by_a_cast": (
        weight(4),
        lambda w, x: jnp.sum(jnp.abs(w * jnp.fft.fft(x) + 1) ** 2),
    ),
    "with_both_signs": (
        weight(4),
        lambda w, x: jnp.sum(jnp.sin(w * x) * jnp.exp(-w * x**2)),
    ),
}


@pytest.mark.parametrize(
    "name",
    variants(
        LOSSES,
        "used_in_another_order",
        "complex_by_a_view",
        "complex_by_a_cast",
        "with_both_signs",
    ),
)
def test_curvature_and_clipping(name):
    model, fun = LOSSES[name]
    model = cast(model)
    xs = normal(jr.key(5), (3, 4), float)
    flat, unravel = ravel_pytree(model)
    total = lambda flat: jnp.mean(jax.vmap(lambda x: fun(unravel(flat), x))(xs))
    truth = jax.jit(jax.hessian(total))(flat)
    settings = {"in_axes": 0, "flat": True, "method": "sites"}
    close(filter_hessian(fun, **settings)(model, xs)[0], truth)
    diagonal = filter_hessian_diagonal(fun, **settings)(model, xs)[0]
    close(diagonal, np.diag(truth))

    each = jax.vmap(jax.grad(lambda flat, x: fun(unravel(flat), x)), (None, 0))
    gradients = np.asarray(jax.jit(each)(flat, xs))
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    bound = float(np.median(norms)) / 2
    clipped = filter_micro_grad(fun, clip_norm=bound, method="sites")(model, xs)
    expected = np.mean(gradients * np.minimum(1, bound / norms), axis=0)
    clipped = [np.ravel(x) for x in jax.tree.leaves(clipped)]
    close(np.concatenate(clipped), expected)


PREDICTIONS = {
    "spectral": ((weight(3), weight(3)), spectral),
    "complex_outputs": (
        weight(3, 4),
        lambda w, x: lax.complex(jnp.tanh(w @ x), jnp.cos(w @ x)),
    ),
    "complex_outputs_and_real_ones": (
        weight(3, 4),
        lambda w, x: {"real": jnp.sin(w @ x), "complex": w @ jnp.fft.fft(x)},
    ),
}


@pytest.mark.parametrize("name", variants(PREDICTIONS, "complex_outputs"))
def test_gauss_newton(name):
    model, fun = PREDICTIONS[name]
    model = cast(model)
    xs = normal(jr.key(5), (3, 4), float)
    flat, unravel = ravel_pytree(model)

    def loss(out, _):
        first, *rest = jax.tree.leaves(out)
        rest = sum(jnp.sum(jnp.real(x) ** 2 * jnp.imag(1j * x)) for x in rest)
        return jnp.sum(jnp.cosh(jnp.real(first)) * (1 + jnp.imag(first) ** 2)) + rest

    def dense(x):
        """A complex number as two real ones."""
        structs = jax.eval_shape(fun, model, x)
        outs = lambda flat: [
            (jnp.real(out), jnp.imag(out)) if jnp.iscomplexobj(out) else (out, 0 * out)
            for out in jax.tree.leaves(fun(unravel(flat), x))
        ]
        point, back = ravel_pytree(outs(flat))

        def of_parts(point):
            pairs = zip(back(point), jax.tree.leaves(structs), strict=True)
            joined = [
                lax.complex(*parts) if jnp.iscomplexobj(struct) else parts[0]
                for parts, struct in pairs
            ]
            return loss(jax.tree.unflatten(jax.tree.structure(structs), joined), x)

        jacobian = jax.jacfwd(lambda flat: ravel_pytree(outs(flat))[0])(flat)
        return jacobian.T @ jax.hessian(of_parts)(point) @ jacobian

    truth = np.mean(jax.jit(jax.vmap(dense))(xs), axis=0)
    for method in ("sites", "products"):
        compute = filter_ggn(fun, loss, in_axes=0, flat=True, method=method)
        close(compute(model, xs)[0], truth)


class Added(eqx.Module):
    """Something that is only added."""

    table: jax.Array
    way: str = eqx.field(static=True)

    def __call__(self, x):
        if self.way == "positions":
            return jnp.sin(x) + self.table[: x.shape[0], 0]
        if self.way == "sum":
            return jnp.sin(x) + self.table.sum(0)[: x.shape[0]]
        padded = jnp.concatenate([self.table[:, 0], jnp.zeros(5)])
        return jnp.sin(x) + padded[: x.shape[0]]


@pytest.mark.parametrize(
    ("way", "lengths"), thinned(("positions", "sum", "padded"), ((4, 4), (4, 2)))
)
def test_kernel_of_what_is_only_added(way, lengths):
    model = cast(Added(weight(5, 4), way))
    first, second = (normal(jr.key(n), (2, n), float) for n in lengths)
    apply = lambda table, x: Added(table, way)(x)
    each = jax.jit(jax.vmap(jax.jacrev(apply), (None, 0)))
    jacobians = [each(model.table, x) for x in (first, second)]
    expected = np.einsum("aivw,bjvw->abij", *jacobians)
    for method in ("sites", "jacobian_contraction"):
        estimator = EmpiricalNTK(model, trace_axes=(), method=method)
        close(estimator(first, second), expected)


@pytest.mark.parametrize(
    "name", variants(("reshape", "dot_general", "scan"), "dot_general")
)
def test_unknown_parameters_are_declined(name):
    def fun(ws, x):
        columns = lax.scan(lambda c, w: (c, w * x), 0.0, ws[0])[1]
        return columns @ x + jnp.reshape(ws[1], (2, 8))[:, :4] @ x + ws[2] @ x + ws[3]

    models = (weight(2, 4), weight(4, 4), weight(2, 4), weight(2))
    # The derivative of what is made of parameters alone is taken as JAX takes it.
    fallen = {"reshape": set(), "dot_general": {1, 2}, "scan": {0}}
    with without_parameters(name, {"dimensions", "dimension_numbers", "reverse"}):
        program, _ = compare(Case(models, fun, vectors(4)))
    assert {*program.fallbacks} == fallen[name]
    assert all("which no rule knows" in why for why in program.fallbacks.values())
