"""Wrong calls for which the exception of JAX, Python or the user names no remedy."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxbatch
from eqxbatch import grid, Mean
from .cases import Case, key, loss, w, x, y
from .first_mistakes import net, norm, predict, state


class Plain:
    """No PyTree, so that JAX does not see its arrays."""

    def __init__(self):
        self.net = net

    def loss(self, x):
        return self.net(x) ** 2

    decorated = eqxbatch.filter_micro_grad(loss)


@dataclasses.dataclass
class Unhashable:
    weight: jax.Array


def scaled(model, x, scale):
    return scale * model(x)


def of_norm_and_state(norm, state, x):
    out, state = norm(x, state)
    return jnp.sum(out), state


def own_state():
    """Equinox allows one use of a state."""
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")[1]


spectral, spectral_state = eqx.nn.make_with_state(
    lambda key: eqx.nn.SpectralNorm(eqx.nn.Linear(2, 2, key=key), "weight", key=key)
)(key)


class Loader:
    """Batches that cannot be indexed."""

    def __iter__(self):
        return iter([np.ones((2, 2), np.float32)])


def predicted(scale=1.0, **settings):
    predict = eqxbatch.filter_micro_vmap(lambda x: scale * x)
    return eqxbatch.over_batches(predict, batch_size=2, **settings)


def to_host(scale):
    kernel = lambda x, y: scale * x @ y.T
    return eqxbatch.filter_batch_kernel(kernel, block_size=2, store="host")


def large():
    return jnp.ones(1_000_000)


mask = jax.tree.map(eqx.is_inexact_array, net)
last = lambda model: model.layers[-1]


REMEDIES = [
    *(
        Case(
            "filter_micro_value_and_grad",
            lambda settings=settings: eqxbatch.filter_micro_value_and_grad(
                of_norm_and_state, **settings
            )(norm, own_state(), x),
            ValueError,
            "`equinox.nn.State`, .* pass the `axis_name` of the layers that update it "
            "to `filter_micro_grad`",
        )
        for settings in ({}, {"has_aux": True}, {"in_axes": 0})
    ),
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(
            lambda model, state, x: jnp.sum(model(x, state)[0])
        )(spectral, spectral_state, x),
        ValueError,
        "`state.*` a batch axis, but not all .* pass the `axis_name` of the layers "
        "that update it",
    ),
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(of_norm_and_state, axis_name="batc")(
            norm, own_state(), x
        ),
        NameError,
        "uses a named axis, `batch`, .*But `axis_name` is 'batc': pass the name that",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(
            lambda x, state: norm(x, state)[0], in_axes=(0, None), axis_name="bat"
        )(x, own_state()),
        NameError,
        "uses a named axis, `batch`, .*But `axis_name` is 'bat': pass the name that `f",
    ),
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(
            lambda norm, x: jnp.mean(jax.vmap(lambda x: norm(x, state)[0])(x)),
            batched=True,
            accumulator=Mean(),
        )(norm, x),
        NameError,
        "Pass this `axis_name` to the `jax.vmap` inside of `fun`",
    ),
    *(
        Case(name, call, ValueError, rf"shape \(\)\. A scalar has no axis .*{example}")
        for name, call, example in (
            (
                "filter_micro_grad",
                lambda: eqxbatch.filter_micro_grad(scaled)(net, x, jnp.array(1.0)),
                r"`in_axes=\(0, None\)`",
            ),
            (
                "filter_micro_grad",
                lambda: eqxbatch.filter_micro_grad(scaled)(net, x, scale=np.float32(1)),
                "`in_axes={'scale': None}`",
            ),
            (
                "filter_micro_vmap",
                lambda: eqxbatch.filter_micro_vmap(jnp.multiply, in_axes=(1, 0))(
                    x, jnp.array(1.0)
                ),
                r"`in_axes=\(1, None\)`",
            ),
            (
                "filter_jacobian",
                lambda: eqxbatch.filter_jacobian(scaled, in_axes=0)(
                    net, x, {"a": y, "b": jnp.array(1.0)}
                ),
                "None in `in_axes`",
            ),
            (
                "EmpiricalNTK",
                lambda: eqxbatch.EmpiricalNTK(net)(jnp.array(1.0)),
                "None in `in_axes`",
            ),
        )
    ),
    Case(
        "filter_grid_vmap",
        lambda: eqxbatch.filter_grid_vmap(jnp.multiply, in_axes=(grid("i"), grid("j")))(
            y, jnp.array(1.0)
        ),
        ValueError,
        "is the grid axis 'j', .* None for an argument that is the same at all",
    ),
    *(
        Case(
            "filter_gauss_newton_step",
            lambda residual=residual, settings=settings: (
                eqxbatch.filter_gauss_newton_step(residual, damping=1.0, **settings)(
                    net, *[x] * len(settings.get("weights", (1.0,)))
                )
            ),
            ValueError,
            r"`residual` is called with one example, `x` of shape \(2,\), and raises .*"
            "works for a whole batch. Give the residual of one example",
        )
        for residual, settings in (
            (lambda net, x: jax.vmap(net)(x), {}),
            (lambda net, x: (jax.vmap(net)(x), x[:, 0]), {"has_residual": True}),
            (
                (lambda net, x: net(x), lambda net, x: jax.vmap(net)(x)),
                {"weights": (1.0, 1.0)},
            ),
        )
    ),
    Case(
        "filter_ggn",
        lambda: eqxbatch.filter_ggn(predict, lambda out, x, y: jnp.sum(y[:, 0] * out))(
            net, x, y
        ),
        IndexError,
        r"`loss`, .*is called for one example, with an array of shape \(\)",
    ),
    Case(
        "filter_grid_vmap",
        lambda: eqxbatch.filter_grid_vmap(eqx.filter_vmap(net), in_axes=grid("i"))(x),
        ValueError,
        r"`fun` is called for one point of the grid, with an array of shape \(2,\)",
    ),
    *(
        Case(
            name, call, TypeError, "`where` must be .*PyTree of bools .* `filter_spec`"
        )
        for name, call in (
            ("filter_micro_grad", lambda: eqxbatch.filter_micro_grad(loss, where=mask)),
            (
                "filter_hessian",
                lambda: eqxbatch.filter_hessian(loss, where={"a": True}),
            ),
            (
                "filter_jacobian",
                lambda: eqxbatch.filter_jacobian(loss, where=last(net)),
            ),
            ("EmpiricalNTK", lambda: eqxbatch.EmpiricalNTK(net, where=mask)),
            ("HessianOperator", lambda: eqxbatch.HessianOperator(loss, w, where=mask)),
            ("parameters", lambda: eqxbatch.parameters(net, where=mask)),
            ("explain_sites", lambda: eqxbatch.explain_sites(loss, w, where=[True])),
        )
    ),
    *(
        Case("parameters", call, error, "`filter_spec` must be .* pass `where`")
        for call, error in (
            (lambda: eqxbatch.parameters(net, filter_spec=last), AttributeError),
            (lambda: eqxbatch.parameters({"a": w}, filter_spec={"b": 1}), ValueError),
        )
    ),
    *(
        Case(
            name, call, ValueError, f"{what} a Plain, which is no PyTree: .*`equinox.Mo"
        )
        for name, call, what in (
            ("filter_micro_grad", lambda: Plain().decorated(x), "It is"),
            (
                "filter_micro_grad",
                lambda: eqxbatch.filter_micro_grad(Plain().loss)(x),
                "",
            ),
            (
                "EmpiricalNTK",
                lambda: eqxbatch.EmpiricalNTK(Plain().loss),
                "a method of",
            ),
            ("parameters", lambda: eqxbatch.parameters(Plain()), "It is"),
            (
                "filter_micro_vmap",
                lambda: eqxbatch.filter_micro_vmap(id)(Plain()),
                "is",
            ),
        )
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(lambda x, y: x)(x, Unhashable(w)),
        TypeError,
        "must have a hash. One argument is a Unhashable, which is no PyTree: .*`weig",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(lambda x, y: x)(x, {1, 2}),
        TypeError,
        "must have a hash. One argument is a set, which is neither an array nor a PyT",
    ),
    *(
        Case(
            name,
            lambda name=name, setting=setting: getattr(eqxbatch, name)(net, **setting),
            TypeError,
            f"no argument `{next(iter(setting))}`. .*{remedy}",
        )
        for name, setting, remedy in (
            (
                "filter_micro_vmap",
                {"progress": True},
                "`eqxbatch.over_batches.*progress=",
            ),
            (
                "filter_grid_vmap",
                {"progress": True},
                "`eqxbatch.over_batches.*progress=",
            ),
            ("filter_micro_grad", {"store": "host"}, "`eqxbatch.over_batches.*store="),
            (
                "filter_micro_grad",
                {"weights": w},
                r"`accumulator=eqxbatch.Mean\(weights=",
            ),
        )
    ),
    *(
        Case(
            "EmpiricalNTK",
            lambda metric=metric: eqxbatch.EmpiricalNTK(net, metric=metric),
            ValueError,
            r"13 parameters: a matrix has the shape \(13, 13\).*`jax.flatten_util",
        )
        for metric in (jnp.eye(5), jnp.ones(13), np.ones((13, 5)))
    ),
    Case(
        "filter_hvp",
        lambda: eqxbatch.filter_hvp(loss)({"a": w}, w, w),
        ValueError,
        r"Make a PyTree of a vector with .*`jax.flatten_util.ravel_pytree",
    ),
    *(
        Case("over_batches", call, TypeError, f"can only be iterated. {remedy}")
        for call, remedy in (
            (lambda: predicted()(iter([x])), "Leave `batch_size` out"),
            (
                lambda: predicted(store="host")(Loader()),
                "A `store` .*`numpy.memmap`. Or",
            ),
            (
                lambda: predicted(store="host")(iter([x])),
                "A `store` .*`numpy.memmap`. Or",
            ),
        )
    ),
    Case(
        "over_batches",
        lambda: jax.grad(lambda scale: jnp.sum(predicted(scale, store="host")(x)))(1.0),
        TypeError,
        "a loop in Python, .*Call it outside of them, or leave out the `store`",
    ),
    Case(
        "filter_batch_kernel",
        lambda: jax.grad(lambda scale: jnp.sum(to_host(scale)(x)))(1.0),
        TypeError,
        "A kernel with a `store` runs a loop in Python, .*`store='device'`",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(net)(Loader()),
        ValueError,
        "Loader, which is iterable: transforms take its batches by `eqxbatch.over_ba",
    ),
    *(
        Case(name, call, ValueError, rf"{shape}.* \({size} GB\), but there are .*{use}")
        for name, call, shape, size, use in (
            (
                "filter_hessian",
                lambda: eqxbatch.filter_hessian(lambda w: jnp.sum(w**3))(large()),
                r"\(1000000, 1000000\) and dtype float32",
                "4,000",
                "`where`; or use `filter_hessian_diagonal`, .*`filter_hvp`.*`filter_k",
            ),
            (
                "filter_ggn",
                lambda: eqxbatch.filter_ggn(
                    lambda w, x: w * x, lambda out, x: jnp.sum(out**2)
                )(large(), y),
                r"\(1000000, 1000000\) and dtype float32",
                "4,000",
                "`where`; or use `filter_ggn_diagonal`, .*`filter_ggnvp`.*`filter_k",
            ),
            (
                "filter_jacobian",
                lambda: eqxbatch.filter_jacobian(jnp.sin)(large()),
                r"Jacobian, of shape \(1000000, 1000000\)",
                "4,000",
                "`where`; or use products with vectors: `filter_linearize`",
            ),
        )
    ),
]
