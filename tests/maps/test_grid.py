"""`filter_grid_vmap` against nested `jax.vmap`."""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from optax import microbatching

from eqxbatch import (
    Concat,
    filter_grid_vmap,
    filter_micro_vmap,
    grid,
    LogSumExp,
    Max,
    Mean,
    MemoryBudget,
    Variance,
)
from ..helpers import assert_same, CountTraces, memory, normal, spread


BLOCKS = (None, 1, 2, 5, 6, 13, 1_000)


def product(x, y):
    return jnp.sin(x) * y


def nested(fun, *axes):
    """`jax.vmap` over each of these `in_axes`, the first of them outermost."""
    for in_axes in reversed(axes):
        fun = jax.vmap(fun, in_axes)
    return fun


@pytest.mark.matrix
class TestTruth:
    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize("sizes", ((0, 3), (3, 5), (7, 2)))
    def test_every_combination(self, sizes, block, getkey):
        x, y = (normal(getkey(), (size,)) for size in sizes)
        over = {"x": grid("i"), "y": grid("j")}
        got = filter_grid_vmap(product, in_axes=over, block_size=block)(x, y)
        assert_same(got, np.sin(x)[:, None] * np.asarray(y))

    def test_zipped(self, getkey):
        x, y = normal(getkey(), (5,)), normal(getkey(), (5,))
        for over in ((grid("i"), grid("i")), ("i", grid("i")), "i"):
            got = filter_grid_vmap(product, in_axes=over)(x, y)
            assert_same(got, product(x, y))

    def test_not_batched(self, getkey):
        y = normal(getkey(), (5,))
        for over in ({"y": "i"}, (None, "i")):
            assert_same(
                filter_grid_vmap(product, in_axes=over)(2.0, y), product(2.0, y)
            )

    def test_other_axes(self, getkey):
        x, y = normal(getkey(), (3, 5)), normal(getkey(), (5, 3))
        over = (grid("i", axis=1), grid("i"))
        got = filter_grid_vmap(product, in_axes=over, out_axes=1, block_size=2)(x, y)
        assert_same(got, jax.vmap(product, (1, 0), 1)(x, y))

    @pytest.mark.parametrize(
        ("order", "block"),
        [
            (order, block)
            for i, order in enumerate(itertools.permutations("ijk"))
            for block in ((None, 4), (1, 11))[i % 2]
        ],
    )
    def test_zipped_and_multiplied(self, order, block, getkey):
        x, y = normal(getkey(), (2, 3)), normal(getkey(), (2, 4))
        z, w = normal(getkey(), (5, 2)), normal(getkey(), (3,))

        def fun(x, y, z, w):
            return {"a": x[:, None] * z[None, :], "b": (y.sum() * w, None, "name")}

        over = {
            "x": grid("i", axis=-1),
            "y": grid("j", axis=1),
            "z": grid("k"),
            "w": grid("i"),
        }
        transform = filter_grid_vmap(
            fun, in_axes=over, out_axes=order, block_size=block
        )
        got = transform(x, y, z, w)
        levels = {
            "i": (1, None, None, 0),
            "j": (None, 1, None, None),
            "k": (None, None, 0, None),
        }
        arrays = lambda *args: jax.tree.map(
            lambda x: x if eqx.is_array(x) else None, fun(*args)
        )
        expected = jax.jit(nested(arrays, *(levels[name] for name in order)))
        expected = expected(x, y, z, w)
        assert_same(got, {"a": expected["a"], "b": (expected["b"][0], None, "name")})

    @pytest.mark.parametrize("block", (None, 1, 4))
    def test_places_in_the_results(self, block, getkey):
        x, y = normal(getkey(), (3, 2)), normal(getkey(), (4, 5))
        fun = lambda x, y: x[:, None] * y[None, :]
        own = np.einsum("ia,jb->ijab", x, y)
        for i, j in ((0, 1), (1, 0), (-1, 0), (0, -1), (-1, -2), (2, 1), (1, 3)):
            got = filter_grid_vmap(
                fun,
                in_axes=(grid("i"), grid("j")),
                out_axes={"i": i, "j": j},
                block_size=block,
            )(x, y)
            assert_same(got, np.moveaxis(own, (0, 1), (i, j)))

    @pytest.mark.parametrize("axes", ((2, 0), (0, 2), (0, 1), (-1, 1)))
    def test_array_on_several_axes(self, axes, getkey):
        shape = [2, 2, 2]
        shape[axes[0]], shape[axes[1]] = 3, 4
        w, x = normal(getkey(), tuple(shape)), normal(getkey(), (3,))
        over = (grid(("i", "j"), axes), grid("i"))
        got = filter_grid_vmap(lambda w, x: w * x, in_axes=over, block_size=2)(w, x)
        expected = np.moveaxis(np.asarray(w), axes, (0, 1))
        assert_same(got, expected * np.asarray(x)[:, None, None])

    @pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.complex64, jnp.int32))
    def test_dtypes(self, dtype, getkey):
        x, y = (jnp.arange(n).astype(dtype) for n in (3, 5))
        over = (grid("i"), grid("j"))
        got = filter_grid_vmap(lambda x, y: x * y, in_axes=over, block_size=4)(x, y)
        assert_same(got, x[:, None] * y[None])


class TestAccumulators:
    @pytest.mark.parametrize("block", spread(BLOCKS, 3))
    def test_along_either_axis(self, block, getkey):
        x, y = normal(getkey(), (7,)), normal(getkey(), (3,))
        over = {"x": grid("i"), "y": grid("j")}
        dense = np.sin(x)[:, None] * np.asarray(y)
        reduced = functools.partial(
            filter_grid_vmap, product, in_axes=over, block_size=block
        )
        assert_same(reduced(accumulator={"j": Mean()})(x, y), dense.mean(1))
        exponentials = np.log(np.exp(dense).sum(0))
        assert_same(reduced(accumulator={"i": LogSumExp()})(x, y), exponentials)
        spread = reduced(accumulator={"i": Variance(), "j": Concat()})(x, y)
        assert_same(spread.variance, dense.var(0))

    def test_first_named_is_accumulated_first(self, getkey):
        x, y = normal(getkey(), (7,)), normal(getkey(), (3,))
        over = {"x": grid("i"), "y": grid("j")}
        dense = np.sin(x)[:, None] * np.asarray(y)
        for names, expected in (
            ({"i": Max(), "j": Mean()}, dense.max(0).mean()),
            ({"j": Mean(), "i": Max()}, dense.mean(1).max()),
        ):
            got = filter_grid_vmap(
                product, in_axes=over, block_size=4, accumulator=names
            )(x, y)
            assert_same(got, expected)

    def test_of_parts_of_the_output(self, getkey):
        x, y = normal(getkey(), (7,)), normal(getkey(), (3,))
        fun = lambda x, y: (x * y, x + y)
        got = filter_grid_vmap(
            fun,
            in_axes=(grid("i"), grid("j")),
            accumulator={"j": (Mean(), Max())},
            block_size=2,
        )(x, y)
        x, y = np.asarray(x), np.asarray(y)
        assert_same(got, ((x[:, None] * y).mean(1), x + y.max()))

    def test_those_of_optax(self, getkey):
        x, y = normal(getkey(), (7,)), normal(getkey(), (3,))
        kinds = microbatching.AccumulationType
        of = functools.partial(
            filter_grid_vmap, product, in_axes=(grid("i"), grid("j"))
        )
        kept = of(accumulator={"i": kinds.CONCAT}, out_axes=("j", "i"))(x, y)
        assert_same(kept, np.sin(x) * np.asarray(y)[:, None])
        mean = of(accumulator={"i": kinds.MEAN}, out_axes="j")(x, y)
        assert_same(mean, np.sin(x).mean() * np.asarray(y))


class TestUse:
    def test_ensemble_by_data(self, getkey):
        make = lambda key: eqx.nn.MLP(2, 3, 4, 1, key=key)
        models = eqx.filter_jit(eqx.filter_vmap(make))(jr.split(getkey(), 3))
        x = normal(getkey(), (5, 2))

        def predict(model, x, *, scale):
            return scale * model(x)

        over = {"model": grid("model"), "x": grid("x")}
        got = filter_grid_vmap(predict, in_axes=over, block_size=4)(
            models, x, scale=2.0
        )
        dense = eqx.filter_vmap(
            jax.vmap(lambda model, x: 2.0 * model(x), (None, 0)),
            in_axes=(eqx.if_array(0), None),
        )
        assert_same(got, eqx.filter_jit(dense)(models, x))

    def test_grid_of_models(self, getkey):
        make = lambda key, width: eqx.nn.Linear(2, 2, key=key).weight * width
        keys, widths = jr.split(getkey(), 3), jnp.arange(4.0)
        over = {"key": grid("k"), "width": grid("w")}
        got = filter_grid_vmap(make, in_axes=over, block_size=3)(keys, widths)
        dense = jax.jit(nested(make, (0, None), (None, 0)))
        assert_same(got, dense(keys, widths))

    def test_methods_and_decorators(self, getkey):
        class Model(eqx.Module):
            w: jax.Array

            @filter_grid_vmap(in_axes=(None, grid("i"), grid("j")), block_size=2)
            def on_grid(self, x, y):
                return self.w * x + y

        model, x, y = Model(jnp.asarray(3.0)), jnp.arange(3.0), jnp.arange(4.0)
        assert_same(model.on_grid(x, y), 3.0 * x[:, None] + y[None])
        assert Model.on_grid.__name__ == "on_grid"

    @pytest.mark.parametrize("checkpoint", (False, True))
    def test_derivatives(self, checkpoint, getkey):
        x, y = normal(getkey(), (7,)), normal(getkey(), (3,))
        ours = filter_grid_vmap(
            product,
            in_axes=(grid("i"), grid("j")),
            block_size=4,
            accumulator={"j": Mean()},
            checkpoint=checkpoint,
        )
        dense = lambda x, y: jnp.mean(jnp.sin(x)[:, None] * y[None], 1)
        both = lambda f: [of(f, (0, 1))(x, y) for of in (jax.jacrev, jax.jacfwd)]
        got, expected = jax.jit(lambda: (both(ours), both(dense)))()
        assert_same(got, expected)

    def test_in_jit_and_vmap(self, getkey):
        x, y = normal(getkey(), (2, 7)), normal(getkey(), (3,))
        ours = filter_grid_vmap(product, in_axes=(grid("i"), grid("j")), block_size=4)
        got = jax.jit(jax.vmap(ours, (0, None)))(x, y)
        assert_same(got, np.sin(x)[:, :, None] * np.asarray(y))

    def test_is_hashable(self):
        """As `jax.jit` wants it, also with dicts of settings."""
        over = {"x": grid("i"), "y": grid("j")}
        ours = filter_grid_vmap(product, in_axes=over, accumulator={"i": Mean()})
        again = filter_grid_vmap(product, in_axes=over, accumulator={"i": Mean()})
        assert hash(ours) == hash(again)
        x = jnp.arange(3.0)
        assert_same(jax.jit(ours)(x, x), ours(x, x))
        mapped = filter_micro_vmap(product, in_axes={"x": 0, "y": None})
        assert_same(jax.jit(mapped)(x, 2.0), product(x, 2.0))

    def test_settings_can_be_replaced(self):
        """The order of the accumulators is kept."""
        x, y = jnp.arange(3.0), jnp.arange(4.0)
        ours = filter_grid_vmap(
            lambda x, y: (x - 1) * (y - 2),
            in_axes=(grid("i"), grid("j")),
            accumulator={"j": Max(), "i": Mean()},
        )
        assert "accumulator={'j': Max(), 'i': Mean()}" in repr(ours)
        again = dataclasses.replace(ours, block_size=2)
        assert_same(again(x, y), ours(x, y))
        assert ours(x, y) == 1.0

    def test_second_call_traces_nothing(self):
        fun = CountTraces(product)
        for _ in range(2):
            over = (grid("i"), grid("j"))
            filter_grid_vmap(fun, in_axes=over, block_size=4)(
                jnp.arange(5.0), jnp.arange(3.0)
            )
            num = fun.num if _ == 0 else num
        assert fun.num == num > 0

    @pytest.mark.cpu
    def test_shared_work_is_done_once(self):
        """What depends on the first axis alone is not computed for each cell."""

        def fun(matrix, y):
            return jnp.linalg.norm(matrix @ matrix @ matrix) * y

        matrices, y = jnp.ones((8, 64, 64)), jnp.arange(100.0)

        def flops(fun):
            return jax.jit(fun).lower(matrices, y).compile().cost_analysis()["flops"]

        ours = filter_grid_vmap(fun, in_axes=(grid("i"), grid("j")), block_size=200)
        # Of a loop, one step is counted: two matrices of eight.
        assert flops(ours) < 0.5 * flops(nested(fun, (0, None), (None, 0)))


@pytest.mark.cpu
class TestMemory:
    def of(self, block):
        def fun(x, y):
            outer = jnp.tanh(x[:, None] * y[None, :])
            return jnp.sum(jnp.sort(outer, axis=0)[::7])

        return filter_grid_vmap(fun, in_axes=(grid("i"), grid("j")), block_size=block)

    def test_flat_in_the_size_of_the_grid(self):
        sizes = [
            memory(self.of(64), jnp.ones((n, 30)), jnp.ones((n, 30))).temp_size_in_bytes
            for n in (128, 512)
        ]
        assert sizes[1] <= 1.05 * sizes[0]

    def test_budget(self, getkey):
        x, y = normal(getkey(), (41, 30)), normal(getkey(), (37, 30))
        run = self.of(MemoryBudget(400_000))
        stats = memory(run, x, y)
        used = stats.temp_size_in_bytes + stats.output_size_in_bytes
        assert 50_000 < used <= 400_000
        assert_same(run(x, y), self.of(None)(x, y))


class TestBadInput:
    def test_errors_of_the_function_come_through(self):
        # It would work for `x` as a whole.
        total = lambda x, y: jnp.sum(x, axis=1) @ y
        run = filter_grid_vmap(total, in_axes=(grid("i"), grid("j")))
        with pytest.raises(ValueError, match=r"^axis 1 is out of bounds"):
            run(jnp.ones((3, 2)), jnp.ones((4, 3)))

    def test_sizes(self):
        zipped = filter_grid_vmap(product, in_axes=(grid("i"), grid("i")))
        with pytest.raises(ValueError, match=r"'i' axis 0 of `x`.* has 3; .* has 4"):
            zipped(jnp.ones(3), jnp.ones(4))
        with pytest.raises(ValueError, match="`block_size` must be at least 1"):
            filter_grid_vmap(product, in_axes=(grid("i"), None), block_size=0)

    @pytest.mark.parametrize(
        ("settings", "match"),
        (
            ({"out_axes": ("i", "k")}, r"`out_axes` names the grid axis 'k', but"),
            ({"out_axes": ("i",)}, r"each grid axis that the results have, \('i', 'j'"),
            ({"out_axes": 1}, "a place for one grid axis"),
            ({"out_axes": {"i": 0, "j": 2}}, "at 2, which is out of range"),
            ({"out_axes": {"i": 0, "j": -2}}, "two grid axes"),
            ({"accumulator": {"k": Mean()}}, "`accumulator` names the grid axis 'k'"),
            (
                {"accumulator": {"i": Mean()}, "out_axes": ("i", "j")},
                "other than `Concat` are not in the",
            ),
            ({"accumulator": {"i": (Mean(), Concat())}}, "in some outputs and not in"),
            ({"in_axes": {"x": grid("i", 1)}}, r"axis 1 of `x` .* its shape \(3,\)"),
            ({"in_axes": {"z": grid("i")}}, "did not correspond to any argument"),
            ({"in_axes": (None, None)}, "nothing to map over"),
            ({"in_axes": {"x": grid("i")}}, "does not say where `y`, an array, lies"),
            (
                {"in_axes": {"x": grid("i"), "y": None, "scale": grid("j")}},
                "has no arrays",
            ),
            ({"accumulator": {"i": Concat(1)}}, r"Concat\(axis=1\) is for"),
            ({"in_axes": (grid("i"),)}, "a PyTree prefix of the arguments"),
            ({"in_axes": {"x": ("i", "j")}}, "with the name of a grid axis, `grid"),
            ({"in_axes": (grid(("i", "j"), (0, -1)), None)}, "one axis of `x` to two"),
        ),
    )
    def test_names_and_places(self, settings, match):
        settings = {"in_axes": (grid("i"), grid("j")), **settings}
        fun = lambda x, y, scale=1.0: product(x, y) * scale
        with pytest.raises(ValueError, match=match):
            filter_grid_vmap(fun, **settings)(jnp.ones(3), jnp.ones(4), scale=2.0)

    def test_types(self):
        with pytest.raises(
            TypeError, match=r"names of grid axes, `grid\(name, axis\)` and"
        ):
            filter_grid_vmap(product, in_axes=(0, None))(jnp.ones(3), 1.0)
        with pytest.raises(TypeError, match="`accumulator` must be dict"):
            filter_grid_vmap(product, in_axes=(grid("i"), None), accumulator=Mean())
        with pytest.raises(TypeError, match=r"`axis` must be int .*; got 1\.5"):
            grid("i", 1.5)
        with pytest.raises(TypeError, match="`name` must be str"):
            grid((1, "i"), (0, 1))
        for args in (("i", "i"), (0, 1)), (("i", "j"), 0), ((), ()):
            with pytest.raises(ValueError, match="names that differ"):
                grid(*args)
        with pytest.raises(ValueError, match="a grid axis twice"):
            filter_grid_vmap(product, in_axes=(grid("i"), None), out_axes=("i", "i"))
