"""What new users do first: a batch for an example, lists, one key, and the like."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxbatch
from eqxbatch import grid, Mean, Sum
from ..helpers import drawn, only_backwards
from .cases import Case, key, loss, w, x, y


net = drawn(eqx.nn.MLP, 2, "scalar", 3, 1, key=key)
deep = drawn(eqx.nn.MLP, 2, "scalar", 3, 5, key=key)


def of_one(model, x, y):
    return (model(x) - y) ** 2


def of_batch(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def squared(out, x, y):
    return jnp.sum((out - y) ** 2)


# All that differentiate a loss of one example, given one of a batch.
TOLD = (
    r"`fun` is called with one example, `x` of shape \(2,\), `y` of shape \(\), and "
    "raises .* It works for a whole batch. "
)
WHOLE = [
    Case(
        name,
        lambda name=name, settings=settings: getattr(eqxbatch, name)(
            of_batch, **settings
        )(net, x, y),
        ValueError,
        TOLD + remedy,
    )
    for name, settings, remedy in (
        ("filter_micro_grad", {}, "If it is .*`batched=True` and `accumulator=Mean"),
        ("filter_micro_grad", {"clip_norm": 1.0}, "If it is .*pass `batched=True`"),
        ("filter_micro_value_and_grad", {"transform": jnp.sign}, "If it is the loss"),
        ("filter_hessian", {"in_axes": 0}, "Give the function of one example; or"),
        ("filter_hessian_blocks", {"in_axes": 0}, "Give the function of one example"),
        ("filter_hessian_diagonal", {"in_axes": 0}, "Give the function of one exam"),
    )
]
WHOLE += [
    Case(
        "filter_hvp",
        lambda: eqxbatch.filter_hvp(of_batch, in_axes=0)(net, net, x, y),
        ValueError,
        TOLD,
    ),
    Case(
        "filter_ggn",
        lambda: eqxbatch.filter_ggn(lambda model, x, y: jax.vmap(model)(x), squared)(
            net, x, y
        ),
        ValueError,
        TOLD,
    ),
    Case(
        "explain_sites",
        lambda: eqxbatch.explain_sites(of_batch, net, x, y),
        ValueError,
        f"{TOLD}Give the function of one example; or pass `in_axes=None`",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(eqx.filter_vmap(net), microbatch_size=2)(x),
        ValueError,
        r"one example, `x` of shape \(2,\), .*batch. Give .* or use `filter_microbatch",
    ),
    Case(
        "EmpiricalNTK",
        lambda: eqxbatch.EmpiricalNTK(eqx.filter_vmap(net))(x),
        ValueError,
        r"one example, `x1` of shape \(2,\), .*batch. Pass `in_axes=None`",
    ),
]

# A batch where `in_axes` is None by default, as in Equinox.
FORGOTTEN = [
    Case(name, call, error, f"as `in_axes` is None, .*one example .*axis 0 .*{remedy}")
    for name, call, error, remedy in (
        (
            "filter_hessian",
            lambda: eqxbatch.filter_hessian(of_one)(net, x, y),
            TypeError,
            "For the mean over the examples, pass `in_axes=0`",
        ),
        (
            "filter_hvp",
            lambda: eqxbatch.filter_hvp(lambda w, x: (x @ w) ** 2)(w, w, x),
            ValueError,
            "pass `in_axes=0`",
        ),
        (
            "filter_jacobian",
            lambda: eqxbatch.filter_jacobian(lambda net, x: net(x))(net, x),
            TypeError,
            "For the Jacobian of each example, pass `in_axes=0`",
        ),
    )
]

# The other way round, and what depends on the size of a microbatch.
ONE = [
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(
            of_one, batched=True, accumulator=Mean(), microbatch_size=2
        )(net, x, y),
        ValueError,
        r"with a microbatch, `x` of shape \(2, 2\), `y` of shape \(2,\), and raises .*"
        "single example. If it is the loss of one example, leave out `batched=True`",
    ),
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(
            lambda w, x: x @ w, batched=True, accumulator=Sum()
        )(w, x),
        ValueError,
        r"(?s)must be a real .*scalar; .*shape \(5,\).*leave out `batched=True`",
    ),
    Case(
        "filter_microbatch",
        lambda: eqxbatch.filter_microbatch(net, accumulator=Sum(), microbatch_size=3)(
            x
        ),
        TypeError,
        r"a microbatch, `x` of shape \(3, 2\), .*example. Use `filter_micro_vmap` for",
    ),
    Case(
        "EmpiricalNTK",
        lambda: eqxbatch.EmpiricalNTK(net, in_axes=None)(x),
        TypeError,
        r"a microbatch, `x1` of shape \(5, 2\), .*example. If it is .*`in_axes=None`",
    ),
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(of_batch, batched=True),
        TypeError,
        r"`batched=True` needs an `accumulator`, .*`accumulator=Mean\(\)` if it is a m",
    ),
    Case(
        "filter_micro_value_and_grad",
        lambda: eqxbatch.filter_micro_value_and_grad(batched=True)(of_batch),
        TypeError,
        r"`batched=True` needs an `accumulator`, .*`accumulator=Sum\(\)` if it is a su",
    ),
    Case(
        "filter_microbatch",
        lambda: eqxbatch.filter_microbatch(eqx.filter_grad(of_batch)),
        TypeError,
        r"needs an `accumulator`, .*`Mean\(\)` if it is a mean over them, such as the",
    ),
]

ARGUMENTS = [
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(of_one)(net, x, [1.0] * 5),
        ValueError,
        "`y` is a list of 5 entries .*`jax.numpy.asarray`.*None in `in_axes`",
    ),
    # The same list for each example would be a number without a word.
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(
            lambda model, x, y: jnp.sum((model(x) - jnp.asarray(y)) ** 2)
        )(net, x, y=[1.0] * 5),
        ValueError,
        "`y` is a list of 5 entries",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(net)([[1.0, 2.0], [3.0, 4.0]]),
        ValueError,
        "`x` is a list of 2 entries that are numbers or lists of them",
    ),
    Case(
        "filter_hessian",
        lambda: eqxbatch.filter_hessian(loss)([1.0, 2.0], x[0]),
        ValueError,
        "no arrays of an inexact dtype.*Make an array of a list of numbers with",
    ),
    Case(
        "filter_grid_vmap",
        lambda: eqxbatch.filter_grid_vmap(jnp.multiply, in_axes=(grid("i"), grid("j")))(
            [1.0], [2.0]
        ),
        ValueError,
        "nothing to map over.*Make an array of a list of numbers with",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(lambda x, key: x)(x, key=key),
        ValueError,
        r"`key` looks like one PRNG key.*`jax.random.split\(key, n\)`",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(lambda x, key: x)(x, jax.random.PRNGKey(0)),
        ValueError,
        r"agree on the number.*`key` looks like one .*`jax.random.split\(key, 5\)`",
    ),
    Case(
        "filter_grid_vmap",
        lambda: eqxbatch.filter_grid_vmap(
            lambda x, key: x, in_axes=(grid("i"), grid("i"))
        )(y, key),
        ValueError,
        "out of range for its shape.*`key` looks like one PRNG key",
    ),
]

# Sizes by position, or by the names that others give them.
SETTINGS = [
    Case(
        name,
        lambda name=name: getattr(eqxbatch, name)(net, 32),
        TypeError,
        f"`{name}` takes `{first}` by position, and got 32 .* as in `{size}=32`",
    )
    for name, first, size in (
        ("filter_micro_vmap", "fun", "microbatch_size"),
        ("filter_microbatch", "fun", "microbatch_size"),
        ("filter_micro_grad", "fun", "microbatch_size"),
        ("filter_hessian", "fun", "microbatch_size"),
        ("filter_jacobian", "fun", "microbatch_size"),
        ("filter_batch_kernel", "kernel_fn", "block_size"),
        ("EmpiricalNTK", "model", "block_size"),
    )
]
SETTINGS += [
    Case(
        name,
        lambda call=call, given=given: call(**{given: 32}),
        TypeError,
        f"`{name}` has no argument `{given}`. Did you mean `{meant}`\\? It takes `",
    )
    for name, call, given, meant in (
        (
            name,
            functools.partial(getattr(eqxbatch, name), *first),
            given,
            meant,
        )
        for name, first, given, meant in (
            ("filter_micro_vmap", (net,), "batch_size", "microbatch_size"),
            ("filter_micro_vmap", (), "batch_size", "microbatch_size"),
            ("filter_micro_grad", (of_one,), "block_size", "microbatch_size"),
            ("filter_micro_grad", (of_one,), "clip_norms", "clip_norm"),
            ("filter_hvp", (of_one,), "chunk_size", "microbatch_size"),
            ("filter_batch_kernel", (jnp.dot,), "batch_size", "block_size"),
            ("EmpiricalNTK", (net,), "batch_size", "block_size"),
            ("MonteCarloKernel", (net,), "microbatch_size", "block_size"),
        )
    )
]
SETTINGS += [
    Case(
        "filter_ggn",
        lambda: eqxbatch.filter_ggn(of_one, 32),
        TypeError,
        "`loss` must be Callable; got 32 of type int",
    ),
]


def quietly(call):
    """Equinox warns of a function of JAX in a module, too."""
    with warnings.catch_warnings(action="ignore"):
        return call()


# What JAX itself does not take, or what hides the arrays of a module.
HIDDEN = [
    Case(name, call, TypeError, "is a MLP in `jax.jit` .*Give the MLP itself.*Mesh`")
    for name, call in (
        ("filter_micro_vmap", lambda: eqxbatch.filter_micro_vmap(jax.jit(net))),
        ("filter_micro_vmap", lambda: eqxbatch.filter_micro_vmap(jax.pmap(net))),
    )
]
HIDDEN += [
    Case(name, call, ValueError, "It is a MLP in `jax.jit`, .*give the MLP itself")
    for name, call in (
        (
            "filter_micro_grad",
            lambda: eqxbatch.filter_micro_grad(of_one)(jax.jit(net), x, y),
        ),
        ("EmpiricalNTK", lambda: quietly(lambda: eqxbatch.EmpiricalNTK(jax.jit(net)))),
        (
            "MonteCarloKernel",
            lambda: eqxbatch.MonteCarloKernel(
                lambda key: jax.jit(net), key=key, num_samples=1
            )(x),
        ),
        ("explain_sites", lambda: eqxbatch.explain_sites(of_one, jax.jit(net), x, y)),
        (
            "ntk_parameterise",
            lambda: eqxbatch.ntk_parameterise(jax.jit(net), key=key),
        ),
    )
]
HIDDEN += [
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(jax.jit(of_one))(net, x, y),
        TypeError,
        "take only arrays.*Leave `jax.jit` out",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(net, vmap_fn=jax.pmap),
        ValueError,
        "`vmap_fn` must map over examples; got `jax.pmap`.*`jax.sharding.Mesh`",
    ),
    Case(
        "filter_micro_vmap",
        lambda: jax.pmap(eqxbatch.filter_micro_vmap(net))(np.ones((1, 5, 2))),
        TypeError,
        "no hash .*`jax.jit` and `jax.pmap` do not take it.*`jax.sharding.Mesh`",
    ),
]


def cross_entropy(logits, x, label):
    return -jax.nn.log_softmax(logits)[label]


norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
of_norm = lambda norm, x: jnp.sum(norm(x, state)[0])
classifier = drawn(eqx.nn.MLP, 2, 3, 4, 1, key=key)
predict = lambda model, x, y: model(x)
pair = lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))


# What is not said by the exception of JAX, Python or the user alone.
HINTS = [
    Case(
        "filter_batch_kernel",
        lambda: eqxbatch.filter_batch_kernel(pair, block_size=2)(x, x[:3]),
        TypeError,
        r"of shape \(2, 2\) and \(3, 2\)\. For a .* single examples, .*`pairwise=True`",
    ),
    Case(
        "filter_batch_kernel",
        lambda: eqxbatch.filter_batch_kernel(lambda x: x, pairwise=True)(x),
        TypeError,
        r"(?s)`kernel_fn` is called with 2 .*blocks .*\(3, 2\)\.(?!.*pairwise)",
    ),
    *(
        Case(name, call, TypeError, f"{what} is called with 3 arguments: .*; an array")
        for name, call, what in (
            (
                "filter_micro_grad",
                lambda: eqxbatch.filter_micro_grad(lambda net, x: net(x))(net, x, y),
                "`fun`",
            ),
            (
                "filter_ggn",
                lambda: eqxbatch.filter_ggn(predict, lambda out, y: out)(net, x, y),
                "`loss`, whose arguments are the output of `fun` and all .* first,",
            ),
            (
                "filter_gauss_newton_step",
                lambda: eqxbatch.filter_gauss_newton_step(
                    lambda net, x: net(x), damping=1.0
                )(net, x, y),
                "`residual`",
            ),
        )
    ),
    Case(
        "EmpiricalNTK",
        lambda: eqxbatch.EmpiricalNTK(lambda x: net(x), where=lambda f: f.layers)(x),
        ValueError,
        r"differentiate; got .*a function, .*module itself, or `equinox.Partial\(func",
    ),
    Case(
        "filter_ggn",
        lambda: eqxbatch.filter_ggn(
            predict,
            cross_entropy,
            fisher="mc",
            key=key,
            sampler=lambda out, key: jax.random.categorical(key, out),
        )(classifier, x, jnp.arange(5) % 3),
        TypeError,
        r"called as `sampler\(key, out\)`; `out` is an array of shape \(3,\)",
    ),
    Case(
        "filter_micro_vmap",
        lambda: eqxbatch.filter_micro_vmap(lambda x: norm(x, state)[0])(x),
        NameError,
        "uses a named axis, `batch`, as Batch.* Pass this name as `axis_name`: .*inf",
    ),
    Case(
        "filter_microbatch",
        lambda: eqxbatch.filter_microbatch(
            lambda x: jax.vmap(lambda x: norm(x, state)[0])(x), accumulator=Sum()
        )(x),
        NameError,
        "Pass this `axis_name` to the `jax.vmap` inside of `fun`",
    ),
    Case(
        "filter_micro_grad",
        lambda: eqxbatch.filter_micro_grad(of_norm)(norm, x),
        NameError,
        "not defined if `fun` couples examples: switch such layers to inference mode",
    ),
    *(
        Case(
            name,
            call,
            TypeError,
            "JAX cannot .* with `mode='fwd'`.*`mode='auto'`, which takes",
        )
        for name, call in (
            (
                "filter_jacobian",
                lambda: eqxbatch.filter_jacobian(only_backwards, mode="fwd")(w),
            ),
            (
                "filter_hessian",
                lambda: eqxbatch.filter_hessian(
                    lambda w: jnp.sum(only_backwards(w)), mode="fwd"
                )(w),
            ),
            (
                "filter_hvp",
                lambda: eqxbatch.filter_hvp(
                    lambda w: jnp.sum(only_backwards(w)), mode="fwd"
                )(w, w),
            ),
        )
    ),
    Case(
        "filter_jacobian",
        lambda: eqxbatch.filter_jacobian(lambda p: p["a"] * w)({"a": 1.0}),
        ValueError,
        r"Python numbers are constants, .*`jax.tree.map\(jax.numpy.asarray, ...\)`",
    ),
    Case(
        "hessian_to_pytree",
        lambda: eqxbatch.hessian_to_pytree(jnp.ones((4, 4)), net),
        ValueError,
        r"if `where` or `filter_spec` selected a part of it, `unravel\(H\[0\]\)`",
    ),
    *(
        Case(name, call, TypeError, r"called with one example, `x2` of shape \(7,\)")
        for name, call in (
            ("EmpiricalNTK", lambda: eqxbatch.EmpiricalNTK(net)(x, jnp.ones((3, 7)))),
            ("EmpiricalNNGP", lambda: eqxbatch.EmpiricalNNGP(net)(x, jnp.ones((3, 7)))),
        )
    ),
    Case(
        "GGNOperator",
        lambda: eqxbatch.GGNOperator(
            predict, squared, deep, x, y, where=lambda net: net.layers[:4]
        ).mv(eqx.filter(deep, eqx.is_inexact_array)),
        ValueError,
        r"The first difference is at `.layers\[4\].weight`: nothing; got an ar",
    ),
]

FIRST = [*WHOLE, *FORGOTTEN, *ONE, *ARGUMENTS, *SETTINGS, *HIDDEN, *HINTS]
