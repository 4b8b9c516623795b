"""Jacobians, Hessians, products with them, operators, expansions, and sites."""

import functools

import equinox as eqx
import jax.numpy as jnp

import eqxbatch
from eqxbatch.results import LeafReport, SitesReport, Unravel
from .cases import Case, key, loss, model, w, x, y


def square(w):
    return jnp.sum(w**3)


hessian = functools.partial(eqxbatch.filter_hessian, square)
diagonal = functools.partial(eqxbatch.filter_hessian_diagonal, square)
blocks = functools.partial(eqxbatch.filter_hessian_blocks, square)
jacobian = functools.partial(eqxbatch.filter_jacobian, jnp.sin)
hvp = functools.partial(eqxbatch.filter_hvp, square)
outputs = lambda w, x: jnp.dot(w, x)
of_output = lambda out, x: out**2
ggn = functools.partial(eqxbatch.filter_ggn, outputs, of_output)
ggn_diagonal = functools.partial(eqxbatch.filter_ggn_diagonal, outputs, of_output)
ggn_blocks = functools.partial(eqxbatch.filter_ggn_blocks, outputs, of_output)
step = functools.partial(eqxbatch.filter_gauss_newton_step, damping=0.1)
ggnvp = functools.partial(eqxbatch.filter_ggnvp, outputs, of_output)
kfac = functools.partial(eqxbatch.filter_kfac, outputs, of_output)
factors = lambda: kfac(in_axes=0)(w, x)
solve = lambda vectors, **settings: eqxbatch.curvature_solve(
    eqxbatch.GGNOperator(outputs, of_output, w, x), vectors, damping=0.1, **settings
)
by_kfac = lambda **x: eqxbatch.scale_by_kfac(factors(), **{"damping": 0.1, **x})
update_kfac = lambda **x: by_kfac().update(w, by_kfac().init(w), **x)
RUNNING = eqxbatch.Mean(running=True)
unravel = Unravel({"a": w, "b": y})
expansion = eqxbatch.filter_linearize(model)
explain = functools.partial(eqxbatch.explain_sites, loss)
z = w.astype(complex)
x3 = jnp.ones((5, 3))
wide = eqx.tree_at(lambda model: model.layers[0].weight, model, jnp.ones((5, 2)))


CURVATURE = [
    Case(
        "curvature_solve",
        lambda: eqxbatch.curvature_solve(factors(), w, damping=0.1),
        TypeError,
        "`operator` must be a `lineax.AbstractLinearOperator`; got a KroneckerFactors",
    ),
    Case(
        "curvature_solve",
        lambda: solve(x3),
        ValueError,
        r"`vectors` must have the structure, shapes and dtypes .* `jax.flatten_util",
    ),
    Case(
        "CurvatureSolution",
        lambda: solve(w, preconditioner=factors()),
        TypeError,
        r"`preconditioner` must be a `lineax.*`factors.operator\(damping=...\).inverse",
    ),
    Case(
        "CurvatureSolution",
        lambda: solve(w, rtol=0.0),
        ValueError,
        "`rtol` must be between 0 and 1; got 0.0",
    ),
    Case(
        "filter_gauss_newton_step",
        lambda: step(outputs, centre="yes"),
        TypeError,
        "`centre` must be bool; got 'yes'",
    ),
    *(
        Case(name, call, ValueError, r"`accumulator=Mean\(running=True\)` is for maps")
        for name, call in (
            ("filter_ggn", lambda: ggn(accumulator=RUNNING)),
            ("filter_gauss_newton_step", lambda: step(outputs, accumulator=RUNNING)),
            (
                "filter_gauss_newton_step",
                lambda: step(outputs, accumulator=(eqxbatch.Sum(), RUNNING)),
            ),
        )
    ),
    Case(
        "filter_gauss_newton_step",
        lambda: step(outputs, space="kernel"),
        ValueError,
        "`space` must be one of",
    ),
    Case(
        "filter_gauss_newton_step",
        lambda: step([outputs, outputs])(w, x),
        ValueError,
        "For 2 terms, the model is followed by one batch for each",
    ),
    Case(
        "filter_hessian",
        lambda: hessian(flat="no"),
        TypeError,
        "`flat` must be bool; got 'no'",
    ),
    Case(
        "filter_hessian",
        lambda: hessian(checkpoint="no"),
        TypeError,
        "`checkpoint` must be bool; got 'no'",
    ),
    Case(
        "filter_hessian",
        lambda: hessian(block_size=1.5),
        TypeError,
        "`block_size` must be int",
    ),
    Case(
        "filter_hessian",
        lambda: hessian(mode="forward"),
        ValueError,
        "`mode` must be one of",
    ),
    Case(
        "filter_hessian",
        lambda: hessian(holomorphic="yes"),
        TypeError,
        "`holomorphic` must be bool",
    ),
    Case(
        "filter_hessian",
        lambda: hessian()([1.0, 2.0]),
        ValueError,
        "has no arrays of an inexact dtype",
    ),
    Case(
        "filter_hessian",
        lambda: eqxbatch.filter_hessian(jnp.sin)(w),
        ValueError,
        "must be a real floating-point scalar",
    ),
    Case(
        "filter_hessian_diagonal",
        lambda: diagonal(flat=1),
        TypeError,
        "`flat` must be bool; got 1",
    ),
    Case(
        "filter_hessian_diagonal",
        lambda: diagonal(num_blocks="2"),
        TypeError,
        "`num_blocks` must be int",
    ),
    Case(
        "filter_hessian_diagonal",
        lambda: diagonal(where=0),
        TypeError,
        "`where` must be Callable",
    ),
    Case(
        "filter_hessian_blocks",
        lambda: blocks(is_block=eqx.nn.Linear(2, 2, key=key).weight),
        TypeError,
        "`is_block` must be Callable | None",
    ),
    Case(
        "filter_hessian_blocks",
        lambda: blocks(flat="yes"),
        TypeError,
        "`flat` must be bool",
    ),
    Case(
        "filter_jacobian",
        lambda: jacobian(flat="no"),
        TypeError,
        "`flat` must be bool; got 'no'",
    ),
    Case(
        "filter_jacobian",
        lambda: jacobian(has_aux="no"),
        TypeError,
        "`has_aux` must be bool; got 'no'",
    ),
    Case(
        "filter_jacobian",
        lambda: eqxbatch.filter_jacobian(lambda w: "out")(w),
        ValueError,
        "`fun` must return arrays of an inexact dtype",
    ),
    Case("filter_hvp", lambda: hvp()(w, y), ValueError, r"vector.*\(2,\).*\(5,\)"),
    Case(
        "filter_hvp",
        lambda: hvp()(w, [1.0, 2.0]),
        ValueError,
        "The vector must have the structure",
    ),
    Case(
        "filter_hvp",
        lambda: hvp()(w, jnp.arange(2)),
        ValueError,
        "The vector must have the structure",
    ),
    Case(
        "filter_hvp",
        lambda: hvp(checkpoint="no"),
        TypeError,
        "`checkpoint` must be bool; got 'no'",
    ),
    Case(
        "filter_hvp",
        lambda: hvp()(z, z),
        TypeError,
        r"(?m)real arrays and combine them inside `fun`\.$",
    ),
    Case(
        "filter_jacobian",
        lambda: jacobian()(z),
        TypeError,
        "inside `fun`; or, if `fun` is holomorphic, pass `holomorphic=True`",
    ),
    Case(
        "filter_ggn",
        lambda: eqxbatch.filter_ggn(outputs, 3.0),
        TypeError,
        "`loss` must be Callable",
    ),
    Case(
        "filter_ggn", lambda: ggn(flat="no"), TypeError, "`flat` must be bool; got 'no'"
    ),
    Case(
        "filter_ggn_diagonal",
        lambda: ggn_diagonal(fisher="mc"),
        ValueError,
        "give it a `key`, such as .*; got `key=None`",
    ),
    Case(
        "filter_ggn_diagonal",
        lambda: ggn_diagonal(fisher="type-1"),
        ValueError,
        r"`fisher` must be one of \('exact', 'type-2', 'mc', 'empirical'\); got",
    ),
    Case(
        "filter_ggn_diagonal",
        lambda: ggn_diagonal(flat="no"),
        TypeError,
        "`flat` must be bool",
    ),
    Case(
        "filter_ggn_blocks",
        lambda: ggn_blocks(num_samples=2),
        ValueError,
        "`num_samples` is for `fisher='mc'`",
    ),
    Case(
        "filter_ggn_blocks",
        lambda: ggn_blocks(checkpoint="no"),
        TypeError,
        "`checkpoint` must be bool",
    ),
    Case(
        "filter_ggn",
        lambda: eqxbatch.filter_ggn(outputs, lambda out, x: x, in_axes=0)(w, x),
        ValueError,
        "must be a real floating-point scalar; `loss` returned",
    ),
    Case(
        "filter_ggn",
        lambda: eqxbatch.filter_ggn(outputs, lambda out, x: (out, x), in_axes=0)(w, x),
        ValueError,
        "`loss` returned.*or the real part of it\\.",
    ),
    Case(
        "filter_kfac",
        lambda: eqxbatch.filter_kfac(
            lambda w, x: jnp.sum(x, axis=1) * jnp.sum(w), of_output, in_axes=0
        )(w, x),
        ValueError,
        r"works for a whole batch\. Give the function of one example\.(?!.*leave out)",
    ),
    Case(
        "filter_kfac",
        lambda: kfac(in_axes=None),
        ValueError,
        "`in_axes` must say which axes.*got None",
    ),
    Case(
        "filter_kfac",
        lambda: kfac(in_axes=0, weight_sharing="all"),
        ValueError,
        r"`weight_sharing` must be one of \('expand', 'reduce'\); got 'all'",
    ),
    Case(
        "filter_kfac",
        lambda: kfac(in_axes=0, corrected="yes"),
        TypeError,
        "`corrected` must be bool; got 'yes'",
    ),
    Case(
        "scale_by_kfac",
        update_kfac,
        TypeError,
        r"pass `factors=kfac\(model, ...\)`.*got None",
    ),
    Case(
        "scale_by_kfac",
        lambda: update_kfac(factors=kfac(is_block=eqx.is_array)(jnp.ones(3), x3)),
        ValueError,
        r"(?s)`factors` must have the structure.*with the same settings",
    ),
    Case(
        "scale_by_kfac",
        lambda: eqxbatch.scale_by_kfac(kfac(corrected=True)(w, x), damping=0.1),
        ValueError,
        "`factors` with `corrected=True` cannot be averaged",
    ),
    Case(
        "scale_by_kfac",
        lambda: by_kfac(decay=1.0),
        ValueError,
        "`decay` must be at least 0 and below 1; got 1.0",
    ),
    Case(
        "scale_by_kfac",
        lambda: by_kfac(norm_constraint=0.0),
        ValueError,
        "`norm_constraint` must be above 0; got 0.0",
    ),
    Case(
        "scale_by_kfac",
        lambda: by_kfac(inverse_update_period=0),
        ValueError,
        "`inverse_update_period` must be at least 1; got 0",
    ),
    Case(
        "scale_by_kfac",
        lambda: by_kfac(damping=-1.0),
        ValueError,
        "`damping` must be at least 0; got -1.0",
    ),
    Case(
        "KroneckerFactors",
        lambda: factors().operator(damping=-1.0),
        ValueError,
        "`damping` must be at least 0; got -1.0",
    ),
    Case(
        "KroneckerFactors",
        lambda: factors().operator(damping=y),
        ValueError,
        "`damping` must be",
    ),
    Case(
        "KroneckerOperator",
        lambda: factors().operator().mv(y),
        ValueError,
        "`vector` must have the structure and shapes.*got",
    ),
    Case(
        "KroneckerOperator",
        lambda: eqxbatch.KroneckerOperator(w),
        TypeError,
        "`factors` must be",
    ),
    Case("filter_ggnvp", lambda: ggnvp(in_axes=0)(w, y, x), ValueError, "vector"),
    Case(
        "filter_ggnvp",
        lambda: ggnvp(checkpoint=None),
        TypeError,
        "`checkpoint` must be bool; got None",
    ),
    Case(
        "hessian_to_pytree",
        lambda: eqxbatch.hessian_to_pytree(x, w),
        ValueError,
        r'`H` must be Inexact.Array, "n n".*shape \(5, 2\)',
    ),
    Case(
        "hessian_to_pytree",
        lambda: eqxbatch.hessian_to_pytree([[1.0]], w),
        TypeError,
        "`H` must be.*`jax.numpy.asarray`",
    ),
    Case(
        "hessian_to_pytree",
        lambda: eqxbatch.hessian_to_pytree(jnp.eye(3), w),
        ValueError,
        r"`H` must .*\(3, 3\).*Give the `x` that `H` was computed with",
    ),
    Case(
        "hessian_to_pytree",
        lambda: eqxbatch.hessian_to_pytree(jnp.eye(2), [1, 2]),
        ValueError,
        "`x` has no arrays of an inexact dtype",
    ),
    Case(
        "Unravel",
        lambda: unravel(jnp.ones(6)),
        ValueError,
        r'`vector` must be .*"\*batch 7".; got an array of shape \(6,\)',
    ),
    Case(
        "Unravel",
        lambda: unravel([1.0] * 7),
        TypeError,
        "`vector` must be.*`jax.numpy.asarray`",
    ),
    Case(
        "Unravel", lambda: unravel(jnp.arange(7)), TypeError, "`vector` must be Inexact"
    ),
    Case(
        "Unravel",
        lambda: unravel(jnp.ones(7, complex)),
        TypeError,
        "`vector` must be real.*complex64.*Unravel `vector.real`",
    ),
    Case(
        "Unravel",
        lambda: Unravel([1.0, 2.0]),
        TypeError,
        "`tree` must be PyTree",
    ),
    Case(
        "HessianOperator",
        lambda: eqxbatch.HessianOperator(square, w).mv(y),
        ValueError,
        "vector",
    ),
    Case(
        "HessianOperator",
        lambda: eqxbatch.HessianOperator("square", w),
        TypeError,
        "`fun` must be Callable; got 'square'",
    ),
    Case(
        "HessianOperator",
        lambda: eqxbatch.HessianOperator(square, w, checkpoint="no"),
        TypeError,
        "`checkpoint` must be bool; got 'no'",
    ),
    Case(
        "HessianOperator",
        lambda: eqxbatch.HessianOperator(square),
        ValueError,
        "The argument that is differentiated comes first",
    ),
    Case(
        "GGNOperator",
        lambda: eqxbatch.GGNOperator(outputs, "loss", w, x),
        TypeError,
        "`loss` must be Callable; got 'loss'",
    ),
    Case(
        "GGNOperator",
        lambda: eqxbatch.GGNOperator(outputs, of_output, w, x, is_convex="yes"),
        TypeError,
        "`is_convex` must be bool; got 'yes'",
    ),
    Case(
        "GGNOperator",
        lambda: eqxbatch.GGNOperator(outputs, of_output, w, x, in_axes=0).mv(y),
        ValueError,
        "vector",
    ),
    Case(
        "filter_linearize",
        lambda: eqxbatch.filter_linearize(w),
        TypeError,
        "`model` must be callable",
    ),
    Case(
        "filter_linearize",
        lambda: expansion(wide, w),
        ValueError,
        r"`model` must have the .*shapes.*shape \(4, 2\).*got .*shape \(5, 2\)",
    ),
    Case(
        "filter_taylor_expand",
        lambda: eqxbatch.filter_taylor_expand(model, 1.5),
        TypeError,
        "`degree` must be int; got 1.5",
    ),
    Case(
        "filter_taylor_expand",
        lambda: eqxbatch.filter_taylor_expand(model, -1),
        ValueError,
        "`degree` must be at least 0",
    ),
    Case("TaylorExpansion", lambda: expansion(wide, w), ValueError, "`model`"),
    Case(
        "TaylorExpansion",
        lambda: expansion(w, w),
        ValueError,
        "`model` must have the structure",
    ),
]

SITES = [
    Case(
        "explain_sites",
        lambda: eqxbatch.explain_sites("loss", w, w),
        TypeError,
        "`fun` must be Callable; got 'loss'",
    ),
    Case(
        "explain_sites",
        lambda: explain([1.0], w),
        ValueError,
        "`model` has no arrays of an inexact dtype",
    ),
    Case(
        "explain_sites",
        lambda: explain(w, where="first"),
        TypeError,
        "`where` must be Callable",
    ),
    Case(
        "SitesReport",
        lambda: SitesReport([], "auto", 0.0, 0.0, 0.0, 0.0),
        TypeError,
        "`leaves` must be",
    ),
    Case(
        "SitesReport",
        lambda: SitesReport((), "auto", "many", 0.0, 0.0, 0.0),
        TypeError,
        "`flops` must be float; got 'many'",
    ),
    Case(
        "LeafReport",
        lambda: LeafReport("a", 3, (), "factors", 0.0, 0.0, None, "", None),
        TypeError,
        "`shape` must be",
    ),
    Case(
        "LeafReport",
        lambda: LeafReport("a", (3,), (), 1, 0.0, 0.0, None, "", None),
        TypeError,
        "`contraction` must be str",
    ),
]
