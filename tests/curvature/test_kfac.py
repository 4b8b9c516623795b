"""Kronecker factors against their definition, and against exact matrices."""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import scipy.linalg
from jax.sharding import AxisType, PartitionSpec as P

from eqxbatch import (
    filter_ggn,
    filter_ggn_blocks,
    filter_kfac,
    Mean,
    MemoryBudget,
    Sum,
)
from eqxbatch._base import platforms
from eqxbatch._curvature import kronecker_sums
from eqxbatch.results import Unravel
from ..helpers import (
    drawn,
    forwards_only,
    make_mesh,
    normal,
    rows_only,
    spread,
    thinned,
    variants,
)
from .kfac_models import (
    diagonal_of,
    exact_blocks,
    factors,
    kfac,
    KNOWN,
    known_model,
    loss,
    loss_of_four,
    matrix_of,
    predict,
    product,
)
from .oracle import close


NUM = 5
pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(params=KNOWN)
def known(request, x64):
    return known_model(request.param, NUM)


@pytest.fixture
def y(x64):
    return normal(jr.key(2), (NUM, 2), float)


@eqx.filter_jit
def eigenpairs(found):
    values, vectors = found.operator().eigh()
    return values, vectors.as_matrix()


def kronecker(found):
    """The factors of the blocks, each with one pair."""
    return [(block.inputs[0], block.outputs[0]) for block in found.blocks]


@pytest.mark.parametrize("shape", ((3, 4), (4,), (3, 1), ()))
def test_a_bias_is_joined_if_each_output_has_its_own(shape):
    params = {"w": np.ones((3, 4, 2)), "b": np.ones(shape)}
    bias = lambda b: jnp.broadcast_to(b, (3, 4))
    call = filter_kfac(
        lambda params, x: params["w"] @ x + bias(params["b"]),
        lambda out, x: jnp.sum(out**2) / 2,
        in_axes=0,
    )
    found = eqx.filter_eval_shape(call, params, np.ones((NUM, 2)))
    joined = [("['b']", "['w']")] if shape == (3, 4) else [("['b']",), ("['w']",)]
    assert sorted(tuple(sorted(names)) for names in found.names) == joined


class TestDefinition:
    @pytest.mark.flags
    @pytest.mark.versions
    @pytest.mark.parametrize(
        ("known", "sharing"),
        (
            *thinned([*KNOWN][:4], ("expand", "reduce")),
            *(
                pytest.param(name, sharing, marks=pytest.mark.matrix)
                for name in [*KNOWN][4:]
                for sharing in ("expand", "reduce")
            ),
        ),
        indirect=["known"],
    )
    def test_factors(self, known, y, sharing):
        found = kfac(known, y, weight_sharing=sharing)
        expected = factors(known, y, sharing=sharing)
        close(kronecker(found), expected)

    @pytest.mark.parametrize("known", spread([*KNOWN], 1), indirect=True)
    def test_estimates(self, known, y):
        weights = jnp.arange(1.0, NUM + 1)
        found = kfac(
            known,
            y,
            fisher="empirical",
            microbatch_size=2,
            accumulator=Sum(weights=weights),
        )
        # Weights may be negative.
        assert not found.is_semidefinite
        expected = factors(known, y, fisher="empirical", weights=weights)
        expected = [(a, g * np.sum(weights)) for a, g in expected]
        close(kronecker(found), expected)

    @pytest.mark.parametrize("known", spread([*KNOWN], 1), indirect=True)
    def test_corrected(self, known, y):
        found = kfac(known, y, corrected=True, microbatch_size=3)
        plain = factors(known, y)
        close(kronecker(found), plain)
        for block, (into, out), exact in zip(
            found.blocks, plain, exact_blocks(known, y), strict=True
        ):
            exact = exact.reshape(len(out) * len(into), -1)
            vectors = np.kron(block.output_basis[0], block.input_basis[0])
            moments = np.sum(vectors * (exact @ vectors), 0)
            close(np.ravel(block.moments[0]), moments)
            # It is never further from the exact matrix.
            error = np.linalg.norm(vectors * moments @ vectors.T - exact)
            assert error <= np.linalg.norm(np.kron(out, into) - exact) * (1 + 1e-10)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ("pooled", "scanned"))
def test_blocks_of_examples(name, y, monkeypatch):
    """Gradients are formed for some examples at a time."""
    known = known_model(name, NUM)
    expected = kfac(known, y, corrected=True)
    # A gradient has 12 to 20 entries, and there are two vectors: for two examples.
    small = dataclasses.replace(platforms.CPU, block_bytes=2 * 2 * 20 * 8)
    blocks = []
    accumulated = kronecker_sums.accumulated

    def counted(run, rows, size, accumulator):
        blocks.append((rows.total, size))
        return accumulated(run, rows, size, accumulator)

    monkeypatch.setattr(kronecker_sums, "accumulated", counted)
    # Without weights, `test_shard_map` does this.
    weighted = {"corrected": True, "accumulator": Mean(weights=jnp.ones(NUM))}
    with platforms.for_platform(small):
        close(kfac(known, y, **weighted), expected)
    assert all(size < num for num, size in blocks)
    assert blocks


@pytest.mark.devices
@pytest.mark.parametrize(
    ("fisher", "has_few_directions"),
    variants(
        [*itertools.product(("exact", "empirical"), (False, True))],
        ("exact", False),
        ("exact", True),
        ("empirical", False),
    ),
)
def test_shard_map(fisher, has_few_directions, monkeypatch):
    """A sum over the examples of all devices, as a gradient is.

    What is corrected runs through the examples twice, forming few gradients at a time.
    """
    if has_few_directions:
        small = dataclasses.replace(platforms.CPU, block_bytes=2 * 16 * 8)
        monkeypatch.setattr(kronecker_sums, "platform", lambda: small)
    # A new one: no program of another platform may be taken.
    known = KNOWN["pooled" if has_few_directions else "mlp"](jr.key(1), 16)
    y = normal(jr.key(2), (16, 2), float)
    mesh = make_mesh(AxisType.Auto, names=("i",))
    settings = {"fisher": fisher, "accumulator": Sum(), "corrected": has_few_directions}

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P())
    def run(x, y):
        found = kfac(known._replace(x=x), y, microbatch_size=3, **settings)
        return kronecker(found), found.operator().diagonal()

    expected = kfac(known, y, **settings)
    close(run(known.x, y), (kronecker(expected), diagonal_of(expected)))


# In the first and in the fourth, the axes of the bias are in an order of their own.
@pytest.mark.parametrize(
    ("seed", "corrected"),
    spread([*zip((36, 1, 2, 16, 9, 10), 3 * (False, True), strict=True)], 1),
)
def test_random_products(seed, corrected):
    fun, parameters, x, matrix = product(seed)
    of_value = lambda out, x, y: jnp.sum((out - y) ** 2)
    call = (parameters, x, np.zeros(1))
    exact, _ = filter_ggn(fun, of_value, in_axes=0, flat=True)(*call)
    exact = np.where(matrix[:, None] == matrix[None, :], exact, 0)
    found = filter_kfac(fun, of_value, in_axes=0, corrected=corrected)(*call)
    assert [block.part.structure for block in found.blocks] == ["kronecker"]
    close(matrix_of(found), exact)


def square(out, x, y):
    return jnp.sum((out - y) ** 2)


class TestExact:
    """Where the product of the factors is the block itself."""

    @pytest.mark.quick
    def test_deep_linear(self):
        model = drawn(eqx.nn.MLP, 3, 2, 4, 2, lambda x: x, key=jr.key(0))
        x, y = normal(jr.key(1), (NUM, 3), float), jnp.zeros((NUM, 2))
        apply = lambda model, x, y: model(x)
        self._compare(apply, square, model, x, y)

    @pytest.mark.parametrize("sharing", spread(("expand", "reduce"), 1))
    def test_deep_linear_with_positions(self, sharing):
        """Losses of each position are expanded, and means over them reduced."""
        model = drawn(eqx.nn.MLP, 3, 2, 4, 1, lambda x: x, key=jr.key(0))
        x = normal(jr.key(1), (NUM, 4, 3), float)
        if sharing == "expand":
            y, apply = jnp.zeros((NUM, 4, 2)), lambda model, x, y: jax.vmap(model)(x)
        else:
            y = jnp.zeros((NUM, 2))
            apply = lambda model, x, y: jnp.mean(jax.vmap(model)(x), 0)
        self._compare(apply, square, model, x, y, weight_sharing=sharing)

    @pytest.mark.matrix
    def test_deep_linear_convolutions(self):
        keys = jr.split(jr.key(0), 3)
        conv = functools.partial(drawn, eqx.nn.Conv1d)
        layers = conv(2, 3, 1, key=keys[0]), conv(3, 2, 1, use_bias=False, key=keys[1])
        model = eqx.nn.Sequential(layers)
        x, y = normal(keys[2], (NUM, 2, 4), float), jnp.zeros((NUM, 2, 4))
        is_block = lambda x: isinstance(x, eqx.nn.Conv)
        self._compare(lambda model, x, y: model(x), square, model, x, y, of=is_block)

    def _compare(
        self,
        apply,
        of_output,
        *call,
        of=lambda x: isinstance(x, eqx.nn.Linear),
        **settings,
    ):
        settings = {"in_axes": 0, **settings}
        got = filter_kfac(apply, of_output, **settings)(*call)
        settings.pop("weight_sharing", None)
        exact = filter_ggn_blocks(apply, of_output, is_block=of, flat=True, **settings)(
            *call
        )
        is_pair = lambda x: isinstance(x, tuple) and isinstance(x[-1], Unravel)
        exact = [x[0] for x in jax.tree.leaves(exact, is_leaf=is_pair) if is_pair(x)]
        assert {block.part.structure for block in got.blocks} == {"kronecker"}
        close(matrix_of(got), scipy.linalg.block_diag(*exact))


class TestOtherBlocks:
    def test_scales_and_what_is_reshaped(self):
        """Exact blocks of small arrays, and diagonals of large ones."""
        keys = jr.split(jr.key(0), 4)
        model = {
            "norm": eqx.nn.LayerNorm(3),
            "reshaped": normal(keys[0], (6, 2), float),
            "large": normal(keys[1], (600,), float),
            "unused": normal(keys[2], (2,), float),
        }

        def apply(model, x, y):
            hidden = model["norm"](x) @ model["reshaped"].reshape(3, 4)
            return hidden + jnp.sum((x[0] * model["large"]).reshape(4, 150), 1)

        x, y = normal(keys[3], (NUM, 3), float), jnp.zeros((NUM, 4))
        settings = {"in_axes": 0, "fisher": "mc", "key": jr.key(1)}
        found = filter_kfac(apply, loss_of_four, **settings)(model, x, y)
        by_name = dict(zip(found.names, found.blocks, strict=True))
        exact = filter_ggn_blocks(apply, loss_of_four, **settings)(model, x, y)
        for name, own in (
            ("['norm'].weight", exact["norm"].weight),
            ("['norm'].bias", exact["norm"].bias),
            ("['reshaped']", exact["reshaped"].reshape(12, 12)),
            ("['unused']", exact["unused"]),
        ):
            close(by_name[name,].matrix, own)
        close(by_name["['large']",].diagonal, jnp.diag(exact["large"]))
        assert "`reshape`" in by_name["['reshaped']",].part.reason
        assert "does not use" in by_name["['unused']",].part.reason
        assert "['reshaped']     block      it is used after `reshape`" in str(found)

    def test_models_with_one_derivative_mode(self, y):
        w = {"a": normal(jr.key(3), (2, 3), float), "b": normal(jr.key(4), (2,), float)}
        x, of = (
            normal(jr.key(5), (NUM, 3), float),
            lambda out, x, y: jnp.sum((out - y) ** 4),
        )
        model = lambda fun: lambda w, x, y: fun(w["a"] @ x + w["b"])
        found = filter_kfac(model(forwards_only), of, in_axes=0)(w, x, y)
        # No layer is seen, so that all blocks are exact.
        blocks = filter_ggn_blocks(model(jnp.sin), of, in_axes=0, flat=True)(w, x, y)
        expected = [matrix for matrix, _ in blocks.values()]
        close([block.matrix for block in found.blocks], expected)
        pair = [filter_kfac(model(fun), of, in_axes=0) for fun in (rows_only, jnp.sin)]
        close(*(jax.tree.leaves(kfac(w, x, y)) for kfac in pair))

    def test_branches(self):
        """Examples that take another branch are none of the mean of the inputs."""
        model = {"a": jnp.ones((2, 2)), "b": 2 * jnp.ones((2, 3))}

        def apply(model, x, y):
            first, second = (
                (lambda x: model["a"] @ x),
                (lambda x: model["b"][:, :2] @ x),
            )
            return jnp.tanh(jax.lax.cond(x[0] > 0, first, second, x))

        x, y = jnp.array([[1.0, 2.0], [-1.0, 0.5], [-2.0, 1.0]]), jnp.zeros((3, 2))
        found = filter_kfac(apply, square, in_axes=0)(model, x, y)
        exact = filter_ggn_blocks(apply, square, in_axes=0)(model, x, y)
        for block, own in zip(found.blocks, jax.tree.leaves(exact), strict=True):
            size = int(own.size**0.5)
            close(block.matrix, own.reshape(size, size))
        assert "in a branch" in found.blocks[0].part.reason

    def test_weight_and_its_transpose(self):
        """The product with the partial traces of the sum of both uses."""
        weight = normal(jr.key(0), (2, 3), float)
        x, y = normal(jr.key(1), (NUM, 3), float), np.zeros((NUM, 3))
        apply = lambda w, x, y: w.T @ jnp.tanh(w @ x)
        found = filter_kfac(apply, square, in_axes=0)(weight, x, y)
        weight, x = jax.device_get((weight, x))
        h = np.tanh(x @ weight.T)
        back = weight.T[None] * (1 - h**2)[:, None]  # Outputs, and what is hidden.
        first = (2 * np.einsum("nci,ncj->ij", back, back) / NUM, x.T @ x / NUM)
        second = (h.T @ h / NUM, 2 * np.eye(3))
        total = sum(np.kron(*pair) for pair in (first, second)).reshape(2, 3, 2, 3)
        got = matrix_of(found).reshape(2, 3, 2, 3)
        for axes in ("aibi->ab", "aiaj->ij"):
            close(np.einsum(axes, got), np.einsum(axes, total))

    def test_chosen_blocks(self, y):
        known = known_model("mlp", NUM)
        whole = kfac(known, y, is_block=lambda x: isinstance(x, eqx.nn.MLP))
        exact, _ = filter_ggn(predict(known), loss, in_axes=0, flat=True)(
            known.model, known.x, y
        )
        close(matrix_of(whole), exact)
        layers = kfac(known, y, is_block=lambda x: isinstance(x, eqx.nn.Linear))
        close(kronecker(layers), kronecker(kfac(known, y)))
        apart = kfac(known, y, is_block=eqx.is_array)
        bias = known.model.layers[0].bias.size
        assert [block.part.structure for block in apart.blocks] == [
            "kronecker",
            "block",
            "kronecker",
            "block",
        ]
        start = known.model.layers[0].weight.size
        close(apart.blocks[1].matrix, exact[start : start + bias, start : start + bias])

    def test_embedding(self):
        model = drawn(eqx.nn.Embedding, 6, 3, key=jr.key(0))
        tokens, y = np.array([[0, 1, 1], [5, 2, 1], [4, 4, 4]]), np.zeros((3, 3))
        apply = lambda model, x, y: jnp.tanh(jax.vmap(model)(x)).sum(0)
        found = filter_kfac(apply, square, in_axes=0, corrected=True)(model, tokens, y)
        (block,) = found.blocks
        counts = np.bincount(tokens.ravel(), minlength=6)
        close(block.inputs[0], counts / 9)
        slopes = 1 - np.tanh(np.asarray(model.weight)[tokens]) ** 2
        close(block.outputs[0], np.diag(2 * np.sum(slopes**2, (0, 1)) / 3))
        exact, _ = filter_ggn(apply, square, in_axes=0, flat=True)(model, tokens, y)
        vectors, exact = jax.device_get((block.output_basis[0], exact))
        rows = [exact[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] for i in range(6)]
        moments = np.stack([np.diag(vectors.T @ own @ vectors) for own in rows])
        close(block.moments[0], moments.T)

    def test_embedding_that_is_the_last_layer(self):
        """The product with the partial traces of the sum of both uses."""
        table = normal(jr.key(0), (4, 3), float)
        tokens, y = np.array([0, 2, 2]), np.zeros((3, 4))
        apply = lambda table, x, y: table @ jnp.tanh(table[x])
        found = filter_kfac(apply, square, in_axes=0)(table, tokens, y)
        first = np.diag(np.bincount(tokens, minlength=4) / 3)
        h = np.tanh(np.asarray(table)[tokens])
        back = (1 - h**2)[:, None] * table[None]  # Outputs, and the entries of a row.
        second = 2 * np.einsum("nci,ncj->ij", back, back) / 3
        of_head, of_hidden = 2 * np.eye(4), h.T @ h / 3
        total = np.kron(first, second) + np.kron(of_head, of_hidden)
        got = matrix_of(found).reshape(4, 3, 4, 3)
        total = total.reshape(4, 3, 4, 3)
        for axes in ("aibi->ab", "aiaj->ij"):
            close(np.einsum(axes, got), np.einsum(axes, total))
        corrected = filter_kfac(apply, square, in_axes=0, corrected=True)
        found = corrected(table, tokens, y)
        exact, _ = filter_ggn(apply, square, in_axes=0, flat=True)(table, tokens, y)
        values, vectors = jax.device_get(eigenpairs(found))
        close(values, np.einsum("ik,ij,jk->k", vectors, exact, vectors))

    @pytest.mark.flags
    @pytest.mark.parametrize("way", spread(("scan", "groups", "ensemble"), 1))
    def test_several_matrices(self, way):
        """Each entry of an axis that both factors have is a block of its own."""
        keys = jr.split(jr.key(0), 3)
        x, y = np.asarray(normal(keys[0], (NUM, 4), float)), np.zeros((NUM, 4))
        make = lambda key: eqx.nn.Linear(4, 4, key=key)
        ensemble = lambda key: eqx.filter_vmap(make)(jr.split(key, 3))
        if way == "scan":
            model = drawn(ensemble, key=keys[1])
            stacked, static = eqx.partition(model, eqx.is_array)

            def apply(stacked, x, y):
                layers = lambda x, own: (jnp.tanh(eqx.combine(own, static)(x)), None)
                return jax.lax.scan(layers, x, stacked)[0]

            model, number = stacked, np.arange(3)
        elif way == "ensemble":
            model = drawn(ensemble, key=keys[1])

            def apply(model, x, y):
                inputs = x[None] * jnp.arange(1.0, 4)[:, None]
                return jnp.tanh(eqx.filter_vmap(lambda f, x: f(x))(model, inputs)).sum(
                    0
                )

            number = np.arange(3)
        else:
            model = drawn(eqx.nn.Conv1d, 4, 4, 1, groups=2, key=keys[1])
            apply = lambda model, x, y: jnp.tanh(model(x[:, None]))[:, 0]
            number = np.arange(4) // 2
        found = filter_kfac(apply, square, in_axes=0)(model, x[:1], y[:1])
        assert len(found.blocks) == 1
        num = len(np.unique(number))
        assert len(found.blocks[0].outputs) == num
        assert found.blocks[0].inputs.shape[1] == (3 if way == "groups" else 5)
        # Of an outer product `d a^T`, the traces of the block are known.
        exact, _ = filter_ggn(apply, square, in_axes=0, flat=True)(model, x[:1], y[:1])
        leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        belongs = np.concatenate(
            [np.broadcast_to(_column(number, x), x.shape).ravel() for x in leaves]
        )
        got, exact = jax.device_get((diagonal_of(found), exact))
        for i in range(num):
            close(np.sum(got[belongs == i]), np.sum(np.diag(exact)[belongs == i]))


def _column(number, x):
    return np.expand_dims(number, tuple(range(1, x.ndim)))


class TestExamples:
    @pytest.mark.parametrize(
        ("name", "size"), spread((("mlp", NUM - 1), ("mlp", 1), ("scanned", 2)), 1)
    )
    def test_sizes(self, name, size, y):
        known = known_model(name, NUM)
        settings = {"fisher": "mc", "key": jr.key(3), "num_samples": 2}
        settings["corrected"] = True
        expected = kfac(known, y, **settings)
        close(kfac(known, y, microbatch_size=size, **settings), expected)

    def test_budget(self, y):
        known = known_model("mlp", NUM)
        got = kfac(known, y, microbatch_size=MemoryBudget("10MB"))
        close(got, kfac(known, y))

    @pytest.mark.parametrize("fisher", variants(("empirical", "mc"), "empirical"))
    def test_one_drawn_example(self, fisher):
        """The block of a vector that is pulled back is an outer product."""
        known = known_model("mlp", 1)
        y = normal(jr.key(2), (1, 2), float)
        settings = {"fisher": fisher}
        if fisher == "mc":
            settings["key"] = jr.key(3)
        found = kfac(known, y, **settings)
        assert found.is_semidefinite
        exact = filter_ggn_blocks(
            predict(known),
            loss,
            in_axes=0,
            is_block=lambda x: isinstance(x, eqx.nn.Linear),
            flat=True,
            **settings,
        )(known.model, known.x, y)
        exact = [matrix for matrix, _ in exact.layers]
        close(matrix_of(found), scipy.linalg.block_diag(*exact))

    def test_no_parameter_is_used(self):
        for settings in ({}, {"fisher": "empirical", "corrected": True}):
            apply = filter_kfac(
                lambda w, x: x, lambda out, x: jnp.sum(out**2), in_axes=0, **settings
            )
            found = apply({"a": jnp.ones(3), "b": jnp.ones(600)}, jnp.ones((4, 2)))
            np.testing.assert_array_equal(diagonal_of(found), np.zeros(603))

    def test_no_examples(self):
        known = known_model("mlp", NUM)
        y = normal(jr.key(2), (NUM, 2), float)
        none = known._replace(x=known.x[:0])
        for block in kfac(none, y[:0], accumulator=Sum()).blocks:
            close(block.outputs, jnp.zeros_like(block.outputs))
        for block in kfac(none, y[:0]).blocks:
            assert jnp.all(jnp.isnan(block.outputs))

    def test_weights(self, y):
        known = known_model("pooled", NUM)
        weights = jnp.array([0.0, 2.0, 0.0, 1.0, 0.0])
        got = kfac(known, y, accumulator=Mean(weights=weights), microbatch_size=2)
        close(kronecker(got), factors(known, y, weights=weights))

    @pytest.mark.parametrize(
        ("name", "dtype"),
        spread((("convolution", jnp.bfloat16), ("mlp", jnp.float16)), 1),
    )
    def test_half_precision(self, name, dtype, y):
        known = known_model(name, NUM)
        cast = lambda x: jax.device_put(np.asarray(x).astype(dtype))
        model, x, y_ = jax.tree.map(
            lambda x: cast(x) if eqx.is_inexact_array(x) else x,
            (known.model, known.x, y),
        )
        taps = [jnp.zeros(shape, dtype) for shape in known.shapes]
        apply = lambda model, x, y: known.run(model, x, taps)[0]
        found = filter_kfac(apply, loss, in_axes=0)(model, x, y_)
        expected = factors(known, y)
        for got, wanted in zip(
            jax.tree.leaves(kronecker(found)), jax.tree.leaves(expected), strict=True
        ):
            assert got.dtype == jnp.float32
            error = np.linalg.norm(np.asarray(got) - wanted)
            assert error < 0.05 * np.linalg.norm(wanted)

    def test_under_transforms(self, y):
        known = known_model("mlp", NUM)
        run = lambda x, y: kronecker(kfac(known._replace(x=x), y))
        both = (np.stack([known.x, 2 * known.x]), np.stack([y, y]))
        got = jax.vmap(jax.jit(run))(*both)
        expected = [run(x, y) for x, y in zip(*both, strict=True)]
        close(got, jax.tree.map(lambda *x: np.stack(x), *expected))
        # The factors have derivatives.
        trace = lambda x: sum(jnp.trace(g) for _, g in run(x, y))
        traces = jax.jit(jax.value_and_grad(trace))
        x, slope = jax.device_get((known.x, traces(known.x)[1]))
        step = 1e-5 * slope
        above, below = (
            float(traces(jax.device_put(x))[0]) for x in (x + step, x - step)
        )
        np.testing.assert_allclose((above - below) / 2, np.sum(slope * step), rtol=1e-6)

    def test_traces(self, y):
        known = known_model("mlp", NUM)
        num = 0

        @filter_kfac(loss=loss, in_axes=0)
        def factors_of(model, x, y):
            nonlocal num
            num += 1
            return known.run(model, x, [jnp.zeros(s) for s in known.shapes])[0]

        factors_of(known.model, known.x, y)
        first = num
        factors_of(known.model, 2 * known.x, y)
        assert num == first


@eqx.filter_jit
def averaged(new, old):
    return optax.incremental_update(new, old, 0.25)


@eqx.filter_jit
def damped(found):
    return found.operator(damping=1.0)


class TestFactors:
    def test_average(self, y):
        known = known_model("pooled", NUM)
        first, second = kfac(known, y), kfac(known, 2 * y)
        mean = averaged(second, first)
        expected = [
            tuple(
                0.25 * np.asarray(x) + 0.75 * np.asarray(z)
                for x, z in zip(own, other, strict=True)
            )
            for own, other in zip(kronecker(second), kronecker(first), strict=True)
        ]
        close(kronecker(mean), expected)
        damped(mean)
        others = [known, known._replace(x=np.sin(known.x))]
        corrected = [kfac(own, y, corrected=True) for own in others]
        damped(corrected[0])
        mean = averaged(*corrected)
        with pytest.raises(RuntimeError, match="cannot be averaged"):
            damped(mean)

    def test_serialise(self, y, tmp_path):
        known = known_model("pooled", NUM)
        found = kfac(known, y)
        eqx.tree_serialise_leaves(tmp_path / "factors", found)
        like = eqx.filter_eval_shape(kfac, known, y)
        close(eqx.tree_deserialise_leaves(tmp_path / "factors", like), found)


class TestRefused:
    def test_products_of_parameters(self, y):
        model = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        apply = lambda model, x, y: model["a"] @ model["b"] @ x
        x = jnp.ones((NUM, 2))
        with pytest.raises(ValueError, match=r"`\['a'\]` and `\['b'\]` are multiplied"):
            filter_kfac(apply, square, in_axes=0)(model, x, y)
        found = filter_kfac(apply, square, in_axes=0, is_block=eqx.is_array)(
            model, x, y
        )
        exact = filter_ggn_blocks(apply, square, in_axes=0)(model, x, y)
        close(found.blocks[0].matrix, exact["a"].reshape(4, 4))
        one_by_one = lambda model, x, y: model["a"] @ (model["b"] @ x)
        found = filter_kfac(one_by_one, square, in_axes=0)(model, x, y)
        assert {block.part.structure for block in found.blocks} == {"kronecker"}

    def test_others(self, y):
        known = known_model("mlp", NUM)
        for settings, error, match in (
            (
                {"weight_sharing": "none"},
                ValueError,
                "`weight_sharing` must be one of",
            ),
            ({"in_axes": None}, ValueError, "`in_axes` must say"),
            ({"fisher": "mc"}, ValueError, "give it a `key`"),
            ({"num_samples": 2}, ValueError, "`num_samples` is for `fisher='mc'`"),
            ({"microbatch_size": 0}, ValueError, "`microbatch_size`"),
        ):
            with pytest.raises(error, match=match):
                filter_kfac(predict(known), loss, **{"in_axes": 0, **settings})(
                    known.model, known.x, y
                )
        with pytest.raises(TypeError, match="complex"):
            filter_kfac(lambda w, x, y: jnp.abs(w @ x), square, in_axes=0)(
                jnp.ones((2, 3), complex), known.x, y
            )
        not_convex = lambda out, x, y: -jnp.sum(out**2)
        with pytest.raises(RuntimeError, match="not convex"):
            filter_kfac(
                predict(known), not_convex, in_axes=0, fisher="mc", key=jr.key(0)
            )(known.model, known.x, y)
