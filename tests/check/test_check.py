"""`explain_sites(check=True)`: it finds what is wrong, and nothing in what is right."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from eqxbatch import explain_sites
from eqxbatch._curvature import by_sites
from eqxbatch._sites import finder
from ..helpers import drawn, normal, only_backwards
from ..layers import examples, LAYERS


def checked(name, num=2):
    model, fun, _ = case = LAYERS[name]()
    xs = examples(case, jr.key(1), num)
    return explain_sites(fun, model, xs, in_axes=0, check=True)


def everything(check):
    """All errors of a leaf, or of all leaves together."""
    _, *errors = dataclasses.astuple(check)
    return [error for error in errors if error is not None]


def test_a_good_model():
    report = checked("Linear")
    check = report.check
    assert check.dtype == "float64"
    assert check.reason is None
    assert check.num_examples == 2
    # Nothing is left out of what is as small as that.
    assert all(len(everything(leaf)) == 5 for leaf in check.leaves)
    assert len(everything(check.whole)) == 3
    assert [leaf.path for leaf in check.leaves] == [x.path for x in report.leaves]
    assert 0 < check.max_error < 1e-12
    lines = str(report).splitlines()
    assert lines[-1] == "2 examples, in float64"
    assert lines[-2].startswith("all together")


def broken_products(monkeypatch, **changes):
    """What is found for a layer whose rule of products has other fields."""

    def find_broken(eqn, position):
        rule = find_rule(eqn, position)
        is_product = rule is not None and rule.kind == "dot_general"
        own = {name: change(rule) for name, change in changes.items() if is_product}
        return dataclasses.replace(rule, **own) if is_product else rule

    find_rule = finder.find_rule
    monkeypatch.setattr(finder, "find_rule", find_broken)
    model = drawn(eqx.nn.Linear, 2, 3, key=jr.key(0))
    fun = lambda model, x: model(x)
    return explain_sites(fun, model, jnp.ones(2), check=True, in_axes=None).check


def test_broken_rule(monkeypatch):
    check = broken_products(monkeypatch, scale=lambda _: 1.01)
    weight, bias = check.leaves
    for error in everything(weight):
        assert 1e-3 < error < 5e-2
    assert min(everything(check.whole)) > 1e-3
    # Blocks with the weight are the bias's, too.
    assert max(bias.gradient, bias.norm, bias.diagonal) < 1e-12
    both = [*everything(weight), *everything(check.whole)]
    assert check.max_error == max(both)


@pytest.mark.matrix
def test_broken_sums(monkeypatch):
    # What a sum over examples is the transpose of.
    op = lambda rule: lambda a, w: 2 * rule.op(a, w)
    weight, bias = broken_products(monkeypatch, op=op).leaves
    assert weight.gradient > 0.1
    assert max(weight.norm, bias.gradient) < 1e-12


@pytest.mark.matrix
def test_broken_curvature(monkeypatch):
    contracted = by_sites.contract

    def broken(terms, out):
        block = contracted(terms, out)
        # What is not finite is an error, too.
        factor = 1.5 if 4 in block.shape else jnp.nan
        return block.at[(0,) * block.ndim].multiply(factor)

    monkeypatch.setattr(by_sites, "contract", broken)
    model = drawn(eqx.nn.Linear, 4, 3, key=jr.key(0))
    fun = lambda model, x: jnp.sum(jnp.sin(model(x)))
    check = explain_sites(fun, model, jnp.ones(4), check=True, in_axes=None).check
    weight, bias = check.leaves
    for leaf in check.leaves:
        assert max(leaf.gradient, leaf.norm) < 1e-12
    assert min(weight.hessian, weight.diagonal, weight.gauss_newton) > 1e-3
    assert max(weight.hessian, weight.diagonal, weight.gauss_newton) < 1
    assert bias.hessian == bias.diagonal == bias.gauss_newton == np.inf
    assert check.max_error == np.inf
    assert max(everything(check.whole)) < 1e-12


@pytest.mark.matrix
def test_second_derivatives_of_small_leaves_only():
    # The convolution returns more numbers than are differentiated twice.
    shapes = {"kernel": (1, 1, 3, 3), "table": (60, 40), "bias": (60,), "scale": ()}
    model = {k: normal(jr.key(i), s) / 9 for i, (k, s) in enumerate(shapes.items())}

    def fun(model, x):
        y = lax.conv(x[None, None], model["kernel"], (1, 1), "SAME")
        z = jnp.tanh(jnp.sum(y[0, 0], 0)[:40])
        return jnp.sum(jnp.tanh(model["table"] @ z + model["bias"]) * model["scale"])

    check = explain_sites(
        fun, model, normal(jr.key(4), (48, 48)), check=True, in_axes=None
    ).check
    has_hessian = {leaf.path: leaf.hessian is not None for leaf in check.leaves}
    assert has_hessian == {
        "['bias']": True,
        "['kernel']": False,
        "['scale']": True,
        "['table']": False,
    }
    assert 0 < check.max_error < 1e-12
    assert all(None not in (leaf.gradient, leaf.norm) for leaf in check.leaves)


@pytest.mark.matrix
def test_gradients_that_are_zero():
    # Keys shifted by one vector change no attention: its gradient is rounding error.
    model = {"query": normal(jr.key(0), (4, 4)), "shift": jnp.ones(4)}

    def fun(model, x):
        queries = x @ model["query"]
        weights = jax.nn.softmax(queries @ (x + model["shift"][None]).T)
        return jnp.sum(jnp.sin(weights @ x))

    report = explain_sites(
        fun, model, normal(jr.key(1), (3, 4)), check=True, in_axes=None
    )
    assert report.check.max_error < 1e-10


def test_functions_that_refuse_float64():
    weights, model = (normal(jr.key(i), (3,)) for i in range(2))

    def fun(model, x):
        return jnp.sum(jnp.tanh(lax.mul(model * x, weights)))

    report = explain_sites(fun, model, jnp.ones(3), check=True, in_axes=None)
    assert report.check.dtype == "float32"
    assert report.check.reason.startswith("TypeError: lax.mul requires arguments")
    assert str(report).splitlines()[-1].endswith(report.check.reason)
    assert 1e-12 < report.check.max_error < 1e-5


@pytest.mark.matrix
def test_errors_without_a_text():
    def fun(model, x):
        if x.dtype == jnp.float64:
            raise NotImplementedError
        return jnp.sum(jnp.tanh(model * x))

    report = explain_sites(fun, jnp.ones(2), jnp.ones(2), check=True, in_axes=None)
    assert report.check.reason == "NotImplementedError"


def test_functions_without_arguments_and_with_unused_parameters():
    model = {"a": jnp.arange(1.0, 4.0), "b": jnp.ones(2), "steps": jnp.arange(3)}
    model["chosen"] = jnp.ones(3)

    def fun(model, name, *, power):
        # In a check, what is constant must be of the dtype of what is not.
        return jnp.sum(lax.mul(model["chosen"], model["a"]) ** power)

    spec = dict.fromkeys(model, True) | {"chosen": False}
    report = explain_sites(
        fun, model, "name", power=3, filter_spec=spec, check=True, in_axes=None
    )
    assert [leaf.path for leaf in report.check.leaves] == ["['a']", "['b']"]
    assert report.check.num_examples == 1
    assert report.check.dtype == "float64"
    assert report.check.max_error < 1e-12
    unused = report.check.leaves[1]
    assert everything(unused) == [0.0] * 5


@pytest.mark.matrix
def test_complex_parameters():
    w = normal(jr.key(0), (3,), jnp.complex64)
    fun = lambda w, x: jnp.abs(jnp.sum(jnp.exp(1j * x) * w)) ** 2
    check = explain_sites(fun, w, jnp.ones(3, complex), check=True, in_axes=None).check
    (leaf,) = check.leaves
    assert max(leaf.gradient, leaf.norm, check.whole.kernel) < 1e-12
    assert leaf.hessian is leaf.diagonal is leaf.gauss_newton is None


@pytest.mark.matrix
def test_only_where_forward_mode_is():
    w = jnp.arange(1.0, 4.0)
    fun = lambda w, x: jnp.sum(only_backwards(w * x))
    (leaf,) = explain_sites(fun, w, w, check=True, in_axes=None).check.leaves
    assert leaf.hessian is leaf.diagonal is None
    assert leaf.gauss_newton is not None
    assert max(everything(leaf)) < 1e-12


def test_batches_are_explained_as_their_examples():
    model = drawn(eqx.nn.Linear, 4, 3, key=jr.key(0))
    fun = lambda model, x, y, scale: jnp.sum((model(x) - y) ** 2) * scale
    of_one = explain_sites(fun, model, jnp.ones(4), jnp.ones(3), 2.0, in_axes=None)
    of_many = explain_sites(
        fun, model, np.ones((4, 5), "f4"), jnp.ones((5, 3)), 2.0, in_axes=(1, 0, None)
    )
    assert of_one == of_many
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    structs = struct(4, 5), struct(5, 3)
    assert explain_sites(fun, model, *structs, 2.0, in_axes=(1, 0, None)) == of_one


def test_selected_parameters():
    model = {"a": jnp.arange(1.0, 4.0), "b": jnp.ones(3), "c": [jnp.ones((2, 3))]}

    def fun(model, x):
        return model["c"][0] @ jnp.tanh(lax.mul(model["a"], model["b"]) * x)

    x = jnp.ones(3)
    spec = {"a": True, "b": False, "c": True}
    of_two = explain_sites(fun, model, x, filter_spec=spec, in_axes=None)
    assert [leaf.path for leaf in of_two.leaves] == ["['a']", "['c'][0]"]
    where = lambda model: (model["b"], model["c"])
    (last,) = explain_sites(
        fun, model, x, where=where, filter_spec=spec, in_axes=None
    ).leaves
    assert last == of_two.leaves[1]
    with pytest.raises(ValueError, match="`where` and `filter_spec` leave no param"):
        explain_sites(fun, model, x, where=lambda model: (), in_axes=None)
    with pytest.raises(ValueError, match="`where` must return parts of the model"):
        explain_sites(fun, model, x, where=lambda model: 1.0, in_axes=None)


def test_wrong_input():
    model = drawn(eqx.nn.Linear, 4, 3, key=jr.key(0))
    fun = lambda model, x: model(x)
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(ValueError, match=r"needs arrays .*ShapeDtypeStruct.*args\[0\]"):
        explain_sites(fun, model, struct, check=True, in_axes=None)
    with pytest.raises(ValueError, match="needs arrays with values"):
        jax.jit(lambda x: explain_sites(fun, model, x, check=True, in_axes=None))(
            jnp.ones(4)
        )
    with pytest.raises(ValueError, match="must return an array of an inexact dtype"):
        explain_sites(
            lambda model, x: jnp.argmax(model(x)),
            model,
            jnp.ones(4),
            check=True,
            in_axes=None,
        )
    with pytest.raises(ValueError, match="the batch is empty"):
        explain_sites(fun, model, jnp.ones((0, 4)), in_axes=0)
    with pytest.raises(ValueError, match="must have 1 entries"):
        explain_sites(fun, model, jnp.ones((2, 4)), in_axes=(0, 0))
