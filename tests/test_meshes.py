"""Every feature on meshes of all kinds, against one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqxbatch as eb
from .features import FEATURES, KEY, loss, mean_loss, MODELS, parameters, SIZE
from .helpers import assert_same, drawn, KINDS, make_mesh, normal, put, variants


pytestmark = pytest.mark.versions


# Whether axes are explicit, on how many devices, and how parameters are spread.
SETTINGS = (
    (AxisType.Explicit, 4, "sharded"),
    (AxisType.Explicit, 2, "elsewhere"),
    (AxisType.Auto, 4, "sharded"),
)
# Blocks of 8 leave a remainder of 4; and one of 1, of examples that only one device
# divides.
TOTAL, UNEVEN = 12, 9
_EXPECTED = {}


def expected(feature, name, total):
    place = feature, name, total
    if place not in _EXPECTED:
        make, examples = MODELS[name]
        _EXPECTED[place] = jax.device_get(FEATURES[feature](make(), examples(total)))
    return _EXPECTED[place]


def one_axis(kind, num):
    return make_mesh(kind, (num,))


def spread(model, mesh, how):
    """The parameters of a model on a mesh, or elsewhere."""
    if how == "elsewhere":
        return model
    num = mesh.shape["data"]

    def put_one(x):
        spec = [None] * x.ndim
        divided = [axis for axis, size in enumerate(x.shape) if size % num == 0]
        if how == "sharded" and divided:
            spec[divided[0]] = "data"
        return put(x, mesh, *spec)

    arrays, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.tree.map(put_one, arrays), static)


def placed(name, mesh, how, total):
    make, examples = MODELS[name]
    divides = total % mesh.shape["data"] == 0
    x = put(examples(total), mesh, *["data"] * divides)
    return spread(make(), mesh, how), x


# These are tried with other models below.
OF_OTHERS = ("filter_micro_grad clip_norm", "filter_hessian flat")


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize("feature", [x for x in FEATURES if x not in OF_OTHERS])
def test_equals_one_device(feature):
    # In turn; many devices with explicit axes for each public name.
    turn = [*FEATURES].index(feature) % len(SETTINGS) if " " in feature else 0
    kind, num, how = SETTINGS[turn]
    got = FEATURES[feature](*placed("dense", one_axis(kind, num), how, TOTAL))
    assert_same(jax.device_get(got), expected(feature, "dense", TOTAL), tol=1e-4)


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize(
    "feature",
    (
        "filter_micro_vmap derivative",
        "filter_micro_grad clip_norm",
        "filter_hvp",
        "filter_batch_kernel",
    ),
)
def test_numbers_of_examples_that_devices_do_not_divide(feature):
    settings = [(AxisType.Explicit, 4, "sharded"), (AxisType.Auto, 2, "whole")]
    for kind, num, how in settings:
        got = FEATURES[feature](*placed("dense", one_axis(kind, num), how, UNEVEN))
        assert_same(jax.device_get(got), expected(feature, "dense", UNEVEN), tol=1e-4)


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "feature"),
    (
        ("conv", "filter_micro_grad clip_norm"),
        ("conv", "filter_hessian"),
        ("attention", "filter_micro_grad clip_norm"),
        ("attention", "EmpiricalNTK two sides"),
        ("recurrent", "filter_micro_grad clip_norm"),
        ("recurrent", "filter_hvp"),
        ("parametrised", "filter_micro_grad clip_norm"),
        ("parametrised", "filter_hessian flat"),
        ("parametrised", "EmpiricalNTK two sides"),
    ),
)
def test_other_models(name, feature):
    mesh = one_axis(AxisType.Explicit, 4)
    got = FEATURES[feature](*placed(name, mesh, "sharded", TOTAL))
    assert_same(jax.device_get(got), expected(feature, name, TOTAL), tol=1e-4)


@pytest.mark.devices
@pytest.mark.matrix
@pytest.mark.parametrize("method", ("sites", "materialise"))
def test_functions_of_parameters_alone_within_shard_map(method):
    model, x = placed("parametrised", make_mesh(AxisType.Auto), "whole", TOTAL)
    grad = eb.filter_micro_grad(
        loss, clip_norm=0.1, accumulator=eb.Sum(), method=method, microbatch_size=SIZE
    )
    # As that of `jax.grad`, the gradient is summed over the devices.
    mapped = jax.shard_map(
        grad, mesh=make_mesh(AxisType.Auto), in_specs=(P(), P("data")), out_specs=P()
    )
    assert_same(jax.jit(mapped)(model, x), grad(model, x), tol=1e-4)


def test_all_public_names_are_tried():
    # Those that take examples; all else is an argument or a result of them.
    tried = {feature.split()[0] for feature in FEATURES} | {"filter_micro_grad"}
    named = {
        name
        for name in vars(eb)
        if name.startswith(("filter_", "Empirical")) or name.endswith(("NTK", "Kernel"))
    }
    assert named - tried == set()


@pytest.mark.devices
class TestExplicit:
    mesh = property(lambda _: make_mesh(AxisType.Explicit))

    def test_results_are_spread_as_what_they_are_of(self):
        model, x = placed("dense", self.mesh, "sharded", TOTAL)
        grad = FEATURES["filter_micro_grad clip_norm"]
        gradient, statistics = grad(model, x)
        specs = lambda tree: [x.sharding.spec for x in jax.tree.leaves(tree)]
        assert specs(parameters(model)) == specs(gradient)
        assert statistics.norms.sharding.spec[0] in ("data", ("data",))
        assert specs(FEATURES["filter_hvp"](model, x)) == specs(gradient)
        product = eb.filter_grid_vmap(
            jnp.dot, in_axes=(eb.grid("i"), eb.grid("j")), out_axes=("j", "i")
        )(x, put(x, self.mesh))
        assert product.sharding.spec[1] in ("data", ("data",))

    def test_functions_that_close_over_arrays(self):
        model, x = placed("dense", self.mesh, "whole", TOTAL)
        plain, y = MODELS["dense"][0](), MODELS["dense"][1](12)
        bias = lambda model: model.layers[0].bias
        for run in (
            lambda model, x: eb.filter_hessian(lambda m: mean_loss(m, x))(model),
            lambda model, x: eb.filter_micro_vmap(
                lambda x: model(x), microbatch_size=SIZE
            )(x),
            lambda model, x: eb.filter_batch_kernel(
                lambda a, b: eb.EmpiricalNTK(model)(a, b), block_size=5
            )(x, x),
            lambda model, x: eb.filter_micro_grad(
                lambda b, x: loss(eqx.tree_at(bias, model, b), x),
                microbatch_size=SIZE,
                clip_norm=0.1,
            )(bias(model), x),
        ):
            got, wanted = jax.device_get((run(model, x), run(plain, y)))
            assert_same(got, wanted, tol=1e-4)

    def test_functions_that_name_axes(self):
        mesh = make_mesh(AxisType.Explicit, (2, 2), ("data", "model"))
        x, w = normal(KEY, (12, 4)), normal(KEY, (4,))
        sharding = NamedSharding(mesh, P("model"))
        fun = lambda w, x: jax.sharding.reshard(jnp.sin(w * x), sharding)
        micro = eb.filter_micro_vmap(fun, in_axes=(None, 0), microbatch_size=SIZE)
        got = micro(put(w, mesh), put(x, mesh, "data"))
        assert [*got.sharding.spec] == ["data", "model"]
        assert_same(jax.device_get(got), np.sin(np.asarray(w) * np.asarray(x)))
        grad = eb.filter_micro_grad(
            lambda w, x: jnp.sum(fun(w, x)), microbatch_size=SIZE, clip_norm=0.5
        )
        plain = eb.filter_micro_grad(
            lambda w, x: jnp.sum(jnp.sin(w * x)), microbatch_size=SIZE, clip_norm=0.5
        )
        got = grad(put(w, mesh), put(x, mesh, "data"))
        assert_same(jax.device_get(got), jax.device_get(plain(w, x)), tol=1e-4)

    def test_maps_and_gradients_do_not_gather_examples(self):
        model, x = placed("dense", self.mesh, "whole", 32)
        arrays, static = eqx.partition(model, eqx.is_array)

        def collectives(feature):
            run = lambda arrays, x: FEATURES[feature](eqx.combine(arrays, static), x)
            hlo = jax.jit(run).lower(arrays, x).compile().as_text()
            names = ("all-gather", "all-to-all", "collective-permute")
            return [name for name in names if f" {name}(" in hlo]

        assert collectives("filter_micro_vmap") == []
        assert collectives("filter_micro_value_and_grad") == []
        assert collectives("filter_micro_grad sites") == []

    def test_within_a_mesh_that_is_set(self):
        model, x = placed("dense", self.mesh, "whole", TOTAL)
        wanted = [
            expected(feature, "dense", TOTAL)
            for feature in ("filter_micro_value_and_grad", "EmpiricalNTK two sides")
        ]
        with jax.set_mesh(self.mesh):
            got = [
                FEATURES["filter_micro_value_and_grad"](model, x),
                FEATURES["EmpiricalNTK two sides"](model, x),
            ]
        assert_same(jax.device_get(got), wanted, tol=1e-4)

    def test_what_jax_refuses_is_refused(self):
        # Of what is closed over, only JAX knows how it is spread.
        model, x = placed("dense", self.mesh, "elsewhere", TOTAL)
        hessian = eb.filter_hessian(lambda model: mean_loss(model, x))
        with pytest.raises(Exception, match="ambiguous how the output should be"):
            hessian(model)


@pytest.mark.devices
@pytest.mark.parametrize("kind", variants(KINDS, AxisType.Auto))
def test_convolutions_that_say_how_they_are_spread(kind):
    """In loops, too, where they have another layout."""
    mesh = make_mesh(kind)
    conv = drawn(eqx.nn.Conv2d, 1, 2, 3, key=KEY)
    x = normal(KEY, (16, 1, 4, 4))
    arrays, static = eqx.partition(conv, eqx.is_array)

    def total(arrays, x):
        conv = eqx.combine(arrays, static)
        out = eb.filter_microbatch(
            lambda x: jnp.tanh(jax.vmap(conv)(x)),
            microbatch_size=8,
            accumulator=eb.Concat(),
        )(x)
        return jnp.sum(out**2)

    wanted = jax.device_get(jax.jit(jax.grad(total))(arrays, x))
    on_mesh = jax.tree.map(lambda x: put(x, mesh), arrays)
    got = jax.jit(jax.grad(total))(on_mesh, put(x, mesh, "data"))
    assert_same(jax.device_get(got), wanted, tol=1e-4)
    assert np.all(np.isfinite(wanted.weight))


@pytest.mark.devices
@pytest.mark.parametrize("names_axes", variants((False, True), False))
def test_functions_of_parameters_alone_on_explicit_axes(names_axes):
    """Their derivatives are equations of a program that has been traced there."""
    mesh = make_mesh(AxisType.Explicit, (2,))

    def loss(parameters, x, names_axes=False):
        scale, w = parameters
        scale = jax.nn.softplus(scale) + jax.nn.relu(scale)
        if names_axes:
            both = jnp.stack([scale, scale])
            both = jax.sharding.reshard(both, NamedSharding(mesh, P("data")))
            scale = jnp.mean(both)
        return scale * jnp.sum(jnp.tanh(x @ w))

    parameters, x = (jnp.array(0.3), jnp.ones(3)), normal(KEY, (SIZE, 3))
    there = jax.tree.map(lambda x: put(x, mesh), parameters)
    clipped = eb.filter_micro_grad(
        lambda p, x: loss(p, x, names_axes), microbatch_size=4, clip_norm=0.5
    )
    # JAX cannot spread examples over an axis that the function names.
    got = clipped(there, put(x, mesh, None if names_axes else "data"))
    of_one = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(parameters, x)
    s, w = (np.asarray(g, np.float64) for g in of_one)
    scales = np.minimum(1, 0.5 / np.sqrt(s**2 + (w**2).sum(1)))
    np.testing.assert_allclose(got[0], np.mean(scales * s), rtol=1e-5)
    np.testing.assert_allclose(got[1], np.mean(scales[:, None] * w, 0), rtol=1e-5)


@pytest.mark.devices
@pytest.mark.matrix
def test_sites_are_explained():
    model, x = drawn(eqx.nn.Linear, 3, 2, key=KEY), normal(KEY, (TOTAL, 3))
    fun = lambda model, x: jnp.sum(jnp.sin(model(x)))
    sharded = put(x, one_axis(AxisType.Explicit, 4), "data")
    assert eb.explain_sites(fun, model, sharded) == eb.explain_sites(fun, model, x)
